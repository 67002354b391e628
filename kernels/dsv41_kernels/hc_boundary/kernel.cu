// From one sublayer to the next (dsv41/mhc.py, hc_boundary), n = S streams of width d:
//
//   streams (T, S, D), y (T, D) Stored; pre, post (T, S), comb (T, S, S) f32 of the old sublayer;
//   fn (MIX, S * D), base (MIX), scale (3), norm (D) f32 of the new one
//   -> new streams (T, S, D), x (T, D) Stored or, with FP8, records (T, D + D / 32) of E4M3 codes
//      and E8M0 scales; pre, post (T, S), comb (T, S, S) f32
//
// Stored is bf16 or float32 (../mhc.cuh). Rounding points: new streams once, the collapsed row
// once, the normalised row once; coefficients never. Numbers through memory, for a token:
//
//   v1  a kernel a step: update (2n + 1) d, mixing n d, collapse (n + 1) d, norm 2 d   (4n + 4) d
//   v2  update (2n + 1) d, then everything that reads the new streams (n + 1) d          (3n + 2) d
//   v3  one pass: the new streams are still in registers when they are read              (2n + 2) d
//   v4  one pass, whose 24 dot products run on tensor cores; one_pass.cuh                (2n + 2) d
//
// v1 launches hc_update, hc_coefficients and hc_collapse, then `normalise` here.
// build: sm_90a S=4 ROUND=1 BF16_STORED=1 UNITS=5 HALVES=32 FP8=1
// build: sm_90a S=4 ROUND=1 BF16_STORED=0 UNITS=5 HALVES=32
// build: sm_90a S=4 ROUND=1 BF16_STORED=1 UNITS=5 HALVES=32
// build: S=4 ROUND=0 BF16_STORED=0
#include "../mhc.cuh"

#ifndef FP8
#define FP8 0
#endif

constexpr int THREADS = 256;
constexpr int ROWS = 4;  // tokens of a block in v2 and v3: every number of fn serves all of them

// Column c of the normalised row: x * r * norm, stored, or as the E4M3 code of its group of 32,
// which is the warp. All 32 lanes call this.
__device__ __forceinline__ void put_x(float value, void* out, long long row, int c, int width) {
  if (!FP8) {
    if (c < width) static_cast<Stored*>(out)[row * width + c] = save(value);
    return;
  }
  value = stored(value);
  float amax = fabsf(value);
#pragma unroll
  for (int step = 16; step; step /= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, step));
  if (c >= width) return;
  unsigned scale = fp8_scale(amax);
  unsigned char* record = static_cast<unsigned char*>(out) + row * (width + width / 32);
  record[c] = e4m3x2(value * fp8_inverse(scale), 0.f);
  if (c % 32 == 0) record[width + c / 32] = scale;
}

// v1: a block a row of x. The sum of squares is added by lane, then by warp.
extern "C" __global__ void __launch_bounds__(THREADS)
normalise(const Stored* x, const float* norm, void* out, int width, float norm_eps) {
  __shared__ float sums[THREADS / 32];
  long long row = blockIdx.x;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float sum = 0.f;
  for (int c = threadIdx.x; c < width; c += THREADS) {
    float value = load(x[row * width + c]);
    sum += value * value;
  }
#pragma unroll
  for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  sum = 0.f;
  for (int w = 0; w < THREADS / 32; ++w) sum += sums[w];
  float r = 1.f / sqrtf(sum / width + norm_eps);
  for (int c = threadIdx.x; c - lane < width; c += THREADS) {
    float value = c < width ? load(x[row * width + c]) * r * norm[c] : 0.f;
    put_x(value, out, row, c, width);
  }
}

// v2 and v3: a block takes ROWS tokens and all their channels; thread by thread a channel of all
// streams. What a row needs to the end, the collapsed row and its sums, stays in shared memory.
// fn is 2 MB and every block reads all of it from L2: 0.5 MB a token, which is what v4 is about.
template <bool update>
__device__ __forceinline__ void whole_rows(const Stored* streams, const Stored* y,
                                           Mixing<const float> old, const float* fn,
                                           const float* base, const float* scale,
                                           const float* norm, Stored* out, void* x,
                                           Mixing<float> mixing, long long tokens, int width,
                                           int iterations, float norm_eps, float eps) {
  extern __shared__ float shared[];
  float(*sums)[ROWS][SUMS] = reinterpret_cast<float(*)[ROWS][SUMS]>(shared);  // [warp]
  float(*coefficient)[SUMS] = sums[THREADS / 32];
  float(*table)[SUMS + 1] = reinterpret_cast<float(*)[SUMS + 1]>(coefficient + ROWS);
  Stored* collapsed = reinterpret_cast<Stored*>(table + ROWS);  // [ROWS][width]
  long long first = blockIdx.x * (long long)ROWS;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int count = (int)min((long long)ROWS, tokens - first);
  for (int i = threadIdx.x; i < ROWS * MIX; i += THREADS)
    coefficient[i / MIX][i % MIX] = *old.at(first + min(i / MIX, count - 1), i % MIX);
  __syncthreads();
  float v[ROWS][SUMS] = {};
  for (int c = threadIdx.x; c < width; c += THREADS) {
    float now[ROWS][S];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      long long t = first + min(r, count - 1);
      const float *pre = coefficient[r], *post = pre + S, *comb = post + S;
      float in[S], sum = 0.f;
#pragma unroll
      for (int j = 0; j < S; ++j) in[j] = load(streams[(t * S + j) * width + c]);
      float more = update ? load(y[t * width + c]) : 0.f;
#pragma unroll
      for (int k = 0; k < S; ++k) {
        float mixed = 0.f;
#pragma unroll
        for (int j = 0; j < S; ++j) mixed = __fmaf_rn(comb[j * S + k], in[j], mixed);
        now[r][k] = update ? stored(__fadd_rn(__fmul_rn(post[k], more), mixed)) : in[k];
        if (update && r < count) out[(t * S + k) * width + c] = save(now[r][k]);
        sum = __fmaf_rn(pre[k], now[r][k], sum);
        v[r][MIX] += now[r][k] * now[r][k];
      }
      collapsed[r * width + c] = save(sum);
      v[r][MIX + 1] += stored(sum) * stored(sum);
    }
#pragma unroll
    for (int m = 0; m < MIX; ++m)
#pragma unroll
      for (int k = 0; k < S; ++k) {
        float w = fn[((long long)m * S + k) * width + c];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) v[r][m] += w * now[r][k];
      }
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) sums[warp][r][lane] = warp_sums(v[r]);
  __syncthreads();
  if (warp < ROWS) {
    float total = 0.f;
    for (int w = 0; w < THREADS / 32; ++w) total += sums[w][warp][lane];
    table[warp][lane] = total;
  }
  __syncthreads();
  if (threadIdx.x < count)
    mixing_sets(table[lane], base, scale, S * width, iterations, norm_eps, eps);
  for (int r = 0; r < count; ++r) {
    float root = 1.f / sqrtf(table[r][MIX + 1] / width + norm_eps);
    for (int c = threadIdx.x; c - lane < width; c += THREADS) {
      float value = c < width ? load(collapsed[r * width + c]) * root * norm[c] : 0.f;
      put_x(value, x, first + r, c, width);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count * MIX; i += THREADS)
    *mixing.at(first + i / MIX, i % MIX) = table[i / MIX][i % MIX];
}

extern "C" __global__ void __launch_bounds__(THREADS)
enter(const Stored* streams, const float* pre_in, const float* post_in, const float* comb_in,
      const float* fn, const float* base, const float* scale, const float* norm, void* x,
      float* pre, float* post, float* comb, long long tokens, int width, int iterations,
      float norm_eps, float eps) {
  whole_rows<false>(streams, nullptr, {pre_in, post_in, comb_in}, fn, base, scale, norm, nullptr, x,
                    {pre, post, comb}, tokens, width, iterations, norm_eps, eps);
}

extern "C" __global__ void __launch_bounds__(THREADS)
boundary(const Stored* streams, const Stored* y, const float* pre_in, const float* post_in,
         const float* comb_in, const float* fn, const float* base, const float* scale,
         const float* norm, Stored* out, void* x, float* pre, float* post, float* comb,
         long long tokens, int width, int iterations, float norm_eps, float eps) {
  whole_rows<true>(streams, y, {pre_in, post_in, comb_in}, fn, base, scale, norm, out, x,
                   {pre, post, comb}, tokens, width, iterations, norm_eps, eps);
}

#ifdef UNITS
#include "one_pass.cuh"
#endif
