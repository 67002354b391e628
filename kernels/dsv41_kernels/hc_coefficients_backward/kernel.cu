// The gradient of the mixing coefficients (dsv41/train/mhc.py, hc_coefficients_backward).
//
//   dpre, dpost (T, S), dcomb (T, S, S), streams (T, W), W = S * D, fn (MIX, W), base, scale (3)
//   -> dstreams (T, W), dfn (MIX, W), dbase (MIX), dscale (3), all float32
//
// Traffic: the streams are read twice (sums again, then gradients) and written once, 12 W bytes a
// token; dfn adds up through partial sums of SPAN tokens, 8 * MIX * W / SPAN bytes a token. Five
// launches instead of several hundred. No atomics: every sum has one order, set by T alone.
#include "../mhc.cuh"

// build: S=4 PASSES=39
// build: S=4 PASSES=1

constexpr int TOKENS = 32;  // of a block of through_sets
constexpr int SPAN = 128;   // tokens that one thread of stream_gradients adds up
constexpr int AHEAD = 8;    // of them, loaded before they are needed

// One token's sums u, in place, into dm = du / rms (MIX) and the factor of v, which stands behind
// them; z receives dz (MIX) and the three sums of dz * u.
__device__ __forceinline__ void through_one(float* u, float* z, const float* dpre,
                                            const float* dpost, const float* dcomb,
                                            const float* base, const float* scale, int width,
                                            float norm_eps, float eps) {
  float r = 1.f / sqrtf(u[MIX] / width + norm_eps), by_rms = 0.f, by_scale[3] = {};
  float d[S][S], b[S][S];
#pragma unroll
  for (int k = 0; k < S * S; ++k) {
    d[k / S][k % S] = dcomb[k];
    b[k / S][k % S] = u[2 * S + k] * r * scale[2] + base[2 * S + k];
  }
  sinkhorn_gradient(d, b, eps);
#pragma unroll
  for (int m = 0; m < MIX; ++m) {
    int set = m < 2 * S ? m / S : 2;
    float normed = u[m] * r, dz = d[max(m - 2 * S, 0) / S][max(m - 2 * S, 0) % S];
    if (m < 2 * S) {
      float s = sigmoid(normed * scale[set] + base[m]);
      dz = (m < S ? dpre[m] : 2.f * dpost[m - S]) * s * (1.f - s);
    }
    z[m] = dz;
    by_scale[set] += dz * normed;
    by_rms += dz * scale[set] * normed;
    u[m] = dz * scale[set] * r;
  }
  u[MIX] = r * r * by_rms / width;
#pragma unroll
  for (int set = 0; set < 3; ++set) z[MIX + set] = by_scale[set];
}

// dm[t] (SUMS) of every token, and z added up over the block's tokens, `small` (blocks, SUMS).
extern "C" __global__ void __launch_bounds__(128)
through_sets(const float* sums, const float* dpre, const float* dpost, const float* dcomb,
             const float* base, const float* scale, float* dm, float* small, long long tokens,
             int pieces, int width, float norm_eps, float eps) {
  __shared__ float u[TOKENS][SUMS + 1], z[TOKENS][SUMS + 1];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  long long first = blockIdx.x * (long long)TOKENS, token = first + lane;
  int count = (int)min((long long)TOKENS, tokens - first);
  for (int t = warp; t < count; t += 4) {
    float total = 0.f;
#pragma unroll 10
    for (int p = 0; p < pieces; ++p) total += sums[((first + t) * pieces + p) * SUMS + lane];
    u[t][lane] = total;
    z[t][lane] = 0.f;
  }
  __syncthreads();
  if (warp == 0 && lane < count)
    through_one(u[lane], z[lane], dpre + token * S, dpost + token * S, dcomb + token * S * S, base,
                scale, width, norm_eps, eps);
  __syncthreads();
  for (int t = warp; t < count; t += 4) dm[(first + t) * SUMS + lane] = u[t][lane];
  if (warp == 0) {
    float total = 0.f;
    for (int t = 0; t < count; ++t) total += z[t][lane];
    small[blockIdx.x * (long long)SUMS + lane] = total;
  }
}

// One token's part: dw += row x, and row . w - x * row[MIX], what x's gradient is.
__device__ __forceinline__ float through_token(const float4* from, const float (&w)[MIX],
                                               float (&dw)[MIX], float in) {
  float row[SUMS], sum = 0.f;
#pragma unroll
  for (int q = 0; q < (MIX + 4) / 4; ++q) {
    float4 four = from[q];
    row[4 * q] = four.x, row[4 * q + 1] = four.y;
    row[4 * q + 2] = four.z, row[4 * q + 3] = four.w;
  }
#pragma unroll
  for (int m = 0; m < MIX; ++m) {
    sum += row[m] * w[m];
    dw[m] += row[m] * in;
  }
  return sum - in * row[MIX];
}

// One thread owns one of the W columns: it holds that column of fn and of dfn, and walks through
// SPAN tokens: dstreams = dm . fn - x * dm[MIX], dfn += dm x. parts (spans, MIX, W). The next AHEAD
// numbers of x are always on their way: one at a time, 20 warps would wait for 2.5 KB an SM.
extern "C" __global__ void __launch_bounds__(128)
stream_gradients(const float* __restrict__ x, const float* __restrict__ fn,
                 const float* __restrict__ dm, float* __restrict__ dstreams,
                 float* __restrict__ parts, long long tokens, int width) {
  __shared__ float4 rows[SPAN][SUMS / 4];
  long long first = blockIdx.y * (long long)SPAN;
  int count = (int)min((long long)SPAN, tokens - first), c = blockIdx.x * 128 + threadIdx.x;
  const float4* from = reinterpret_cast<const float4*>(dm + first * SUMS);
  for (int i = threadIdx.x; i < count * (SUMS / 4); i += 128) (&rows[0][0])[i] = from[i];
  __syncthreads();
  if (c >= width) return;
  float w[MIX], dw[MIX] = {};
#pragma unroll
  for (int m = 0; m < MIX; ++m) w[m] = fn[(long long)m * width + c];
  const float* column = x + first * width + c;
  float* out = dstreams + first * width + c;
  float in[AHEAD], ahead[AHEAD];
#pragma unroll
  for (int u = 0; u < AHEAD; ++u) ahead[u] = column[(long long)min(u, count - 1) * width];
  for (int t = 0; t < count; t += AHEAD) {
#pragma unroll
    for (int u = 0; u < AHEAD; ++u) {
      in[u] = ahead[u];
      ahead[u] = column[(long long)min(t + AHEAD + u, count - 1) * width];
    }
#pragma unroll
    for (int u = 0; u < AHEAD; ++u)
      if (t + u < count) out[(long long)(t + u) * width] = through_token(rows[t + u], w, dw, in[u]);
  }
#pragma unroll
  for (int m = 0; m < MIX; ++m) parts[(blockIdx.y * (long long)MIX + m) * width + c] = dw[m];
}

// out[c] = sum of parts (rows, columns) over the rows: 8 runs of neighbouring rows, then the runs.
extern "C" __global__ void __launch_bounds__(256)
sum_parts(const float* parts, float* out, int rows, long long columns) {
  __shared__ float runs[8][32];
  int lane = threadIdx.x % 32, run = threadIdx.x / 32, each = (rows + 7) / 8;
  long long c = blockIdx.x * 32ll + lane;
  float total = 0.f;
  if (c < columns)
#pragma unroll 8
    for (int r = run * each; r < min(rows, (run + 1) * each); ++r) total += parts[r * columns + c];
  runs[run][lane] = total;
  __syncthreads();
  if (run || c >= columns) return;
  for (int other = 1; other < 8; ++other) total += runs[other][lane];
  out[c] = total;
}
