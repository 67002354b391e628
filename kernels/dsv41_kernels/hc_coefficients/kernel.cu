// Mixing coefficients from the streams that enter a sublayer (dsv41/mhc.py, hc_coefficients).
//
//   streams (T, W) f32 with W = S * D, fn (MIX, W), base (MIX), scale (3)
//   -> pre (T, S), post (T, S), comb (T, S, S), all float32, never rounded
//
// Traffic: 4 W bytes a token; fn stays in L1 or L2. The definition launches about 150 kernels here,
// most of them for Sinkhorn; these are two. W is cut into pieces of PIECE columns, a number that no
// batch can change, and the pieces are added in order: a row's bits are its own.
#include "../mhc.cuh"

// build: S=4

constexpr int PIECE = 512;
constexpr int ROWS = 4;    // tokens of a warp: each number of fn that it loads serves all of them
constexpr int TOKENS = 16; // tokens of a block of 4 warps

// sums[t][piece][m] = fn[m] . x[t], m < MIX, and x . x behind them, over the columns of one piece.
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
