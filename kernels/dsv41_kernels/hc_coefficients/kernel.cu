// Mixing coefficients from the streams that enter a sublayer (dsv41/mhc.py, hc_coefficients).
//
//   streams (T, W) f32 with W = S * D, fn (MIX, W), base (MIX), scale (3)
//   -> pre (T, S), post (T, S), comb (T, S, S), all float32, never rounded
//
// Traffic: 4 W bytes a token; fn stays in L1 or L2. The definition launches about 150 kernels here,
// most of them for Sinkhorn; these are two. W is cut into pieces of a width that no batch can
// change, and the pieces are added in order: a row's bits are its own.
#include "../mhc.cuh"

// build: S=4

constexpr int PIECE = 512;
constexpr int ROWS = 4;    // tokens of a warp: each number of fn that it loads serves all of them
constexpr int TOKENS = 16; // tokens of a block of 4 warps

// v1: sums[t][piece][m] = fn[m] . x[t], m < MIX, and x . x behind them, over the columns of one piece.
extern "C" __global__ void __launch_bounds__(128)
mixing_sums(const Stored* x, const float* fn, float* sums, long long tokens, int width) {
  int lane = threadIdx.x % 32, piece = blockIdx.y, pieces = gridDim.y;
  long long first = blockIdx.x * (long long)TOKENS + threadIdx.x / 32 * ROWS;
  if (first >= tokens) return;  // a whole warp
  int end = min(width, (piece + 1) * PIECE);
  float v[ROWS][SUMS] = {};
  for (int c = piece * PIECE + lane; c < end; c += 32) {
    float in[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      in[r] = load(x[min(first + r, tokens - 1) * width + c]);
      v[r][MIX] += in[r] * in[r];
    }
#pragma unroll
    for (int m = 0; m < MIX; ++m) {
      float w = fn[(long long)m * width + c];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) v[r][m] += w * in[r];
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    float total = warp_sums(v[r]);
    if (first + r < tokens) sums[((first + r) * pieces + piece) * SUMS + lane] = total;
  }
}

// v2: v1 waits for its loads one after the other: 24 numbers of fn a step, each 4 bytes a lane and
// needed at once by four products, 24 answers of L1 or L2 for 100 multiply-adds; 22 times the floor
// at T = 4096, W = 20480. Here a block copies its piece of fn into shared memory once, 96 KB, and
// then takes `span` tokens; a lane loads 16 bytes at a time, and those of the next step while it
// works on this one: 28 loads for 400 multiply-adds. Pieces are twice as wide, so that the 500
// instructions of warp_sums serve twice as many columns. W is a multiple of 4.
constexpr int WIDE = 1024, WARPS = 6;

// Four columns of ROWS rows, which begin `apart[r]` numbers behind x; zeros where c is past the end.
__device__ __forceinline__ void load_step(const float* x, const int (&apart)[ROWS], int c, int end,
                                          float4 (&in)[ROWS]) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
    in[r] = c < end ? *reinterpret_cast<const float4*>(x + apart[r] + c)
                    : make_float4(0.f, 0.f, 0.f, 0.f);
}

__device__ __forceinline__ float add_dot(float4 a, float4 b, float sum) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)
mixing_sums_v2(const float* x, const float* fn, float* sums, long long tokens, int width, int span) {
  extern __shared__ float4 part[];  // MIX rows of WIDE columns, zeros behind the last column
  const int lane = threadIdx.x % 32, piece = blockIdx.y, pieces = gridDim.y;
  const int begin = piece * WIDE, end = min(width, begin + WIDE);
  for (int i = threadIdx.x; i < MIX * (WIDE / 4); i += 32 * WARPS) {
    int m = i / (WIDE / 4), c = begin + i % (WIDE / 4) * 4;
    const float* from = fn + (long long)m * width + c;
    part[i] = c < end ? *reinterpret_cast<const float4*>(from) : make_float4(0.f, 0.f, 0.f, 0.f);
  }
  __syncthreads();
  long long first = blockIdx.x * (long long)span, behind = min(tokens, first + span);
  for (first += threadIdx.x / 32 * ROWS; first < behind; first += WARPS * ROWS) {
    float v[ROWS][SUMS] = {};
    float4 in[ROWS], next[ROWS];
    const float* row = x + first * width;
    int apart[ROWS];  // behind the last token: that one again
#pragma unroll
    for (int r = 0; r < ROWS; ++r) apart[r] = (int)min((long long)r, tokens - 1 - first) * width;
    load_step(row, apart, begin + 4 * lane, end, next);
    for (int c = begin; c < end; c += 128) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) in[r] = next[r];
      load_step(row, apart, c + 128 + 4 * lane, end, next);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) v[r][MIX] = add_dot(in[r], in[r], v[r][MIX]);
      const float4* w = part + (c - begin) / 4 + lane;
#pragma unroll
      for (int m = 0; m < MIX; ++m) {
        float4 four = w[m * (WIDE / 4)];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) v[r][m] = add_dot(four, in[r], v[r][m]);
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float total = warp_sums(v[r]);
      if (first + r < behind) sums[((first + r) * pieces + piece) * SUMS + lane] = total;
    }
  }
}

// Pieces in order, then the three sets: a warp adds the sums of 4 tokens, one lane a number, and
// the first warp turns them into coefficients, one lane a token.
extern "C" __global__ void __launch_bounds__(128)
coefficients(const float* sums, const float* base, const float* scale, float* pre, float* post,
             float* comb, long long tokens, int pieces, int width, int iterations, float norm_eps,
             float eps) {
  __shared__ float table[TOKENS][SUMS + 1];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  long long first = blockIdx.x * (long long)TOKENS;
  int count = (int)min((long long)TOKENS, tokens - first);
  for (int t = warp; t < count; t += 4) {
    float total = 0.f;
#pragma unroll 10
    for (int p = 0; p < pieces; ++p) total += sums[((first + t) * pieces + p) * SUMS + lane];
    table[t][lane] = total;
  }
  __syncthreads();
  if (warp == 0 && lane < count)
    mixing_sets(table[lane], base, scale, width, iterations, norm_eps, eps);
  __syncthreads();
  Mixing<float> out = {pre, post, comb};
  for (int i = threadIdx.x; i < count * MIX; i += 128)
    *out.at(first + i / MIX, i % MIX) = table[i / MIX][i % MIX];
}
