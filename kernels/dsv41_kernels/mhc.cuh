// What the hyper-connection kernels share: sums over a warp, the Sinkhorn scaling of one S x S
// matrix, and its gradient. S, the number of streams, is a macro; MIX = S * (S + 2) numbers mix one
// token, and SUMS = 32 slots hold them and the sum of squares behind them (S <= 4).
#pragma once
#include "scalar.cuh"
#include "ptx.cuh"

#ifndef ROUND
#define ROUND 0
#endif
#ifndef BF16_STORED
#define BF16_STORED 0
#endif

constexpr int MIX = S * (S + 2);
constexpr int SUMS = 32;

// How streams lie in memory: as bf16, which is what the released code keeps, or as the float32
// numbers of the NumPy text, rounded to bf16 (ROUND 1, OFFICIAL) or not (FLOAT32).
#if BF16_STORED
typedef unsigned short Stored;
__device__ __forceinline__ float load(Stored x) { return __uint_as_float((unsigned)x << 16); }
__device__ __forceinline__ float stored(float x) { return round_bf16(x); }
__device__ __forceinline__ Stored save(float x) { return __float_as_uint(round_bf16(x)) >> 16; }
#else
typedef float Stored;
__device__ __forceinline__ float load(Stored x) { return x; }
__device__ __forceinline__ float stored(float x) { return ROUND ? round_bf16(x) : x; }
__device__ __forceinline__ Stored save(float x) { return stored(x); }
#endif

// 32 sums over the warp in 31 exchanges: at every step a lane keeps the half of the values that its
// own number points to and gives the other half away. Lane l returns the total of v[l]; the order
// of additions is the same in every launch.
template <int half = SUMS / 2>
__device__ __forceinline__ float warp_sums(float (&v)[SUMS]) {
  bool upper = threadIdx.x & half;
#pragma unroll
  for (int i = 0; i < half; ++i) {
    float give = upper ? v[i] : v[i + half], keep = upper ? v[i + half] : v[i];
    v[i] = keep + __shfl_xor_sync(0xffffffffu, give, half);
  }
  if constexpr (half > 1) return warp_sums<half / 2>(v);
  return v[0];
}

// Softmax of the rows of b, in place.
__device__ __forceinline__ void softmax_rows(float (&b)[S][S]) {
#pragma unroll
  for (int i = 0; i < S; ++i) {
    float top = b[i][0], total = 0.f;
#pragma unroll
    for (int j = 1; j < S; ++j) top = fmaxf(top, b[i][j]);
#pragma unroll
    for (int j = 0; j < S; ++j) total += b[i][j] = expf(b[i][j] - top);
#pragma unroll
    for (int j = 0; j < S; ++j) b[i][j] /= total;
  }
}

// The sum of a line of k diag(other), behind `sum`.
template <bool columns>
__device__ __forceinline__ float line_sum(const float (&k)[S][S], const float (&other)[S], int line,
                                          float sum) {
#pragma unroll
  for (int at = 0; at < S; ++at) sum += (columns ? k[at][line] : k[line][at]) * other[at];
  return sum;
}

// One normalisation of the lines of b = diag(row) k diag(column): `mine` is scaled so that every
// line sums to 1 - eps / sum. trap: the definition divides the matrix itself, pass after pass; here
// k stays as it is and only 2 S factors change, which is 24 operations a pass instead of 44, and
// rounding errors of a pass are divided out by the next one instead of adding up. With `inverse` =
// 1 / mine the new factor, mine / (sum mine + eps), is 1 / (sum + eps inverse).
template <bool columns>
__device__ __forceinline__ void scale_lines(const float (&k)[S][S], float (&mine)[S],
                                            float (&inverse)[S], const float (&other)[S],
                                            float eps) {
#pragma unroll
  for (int line = 0; line < S; ++line) {
    inverse[line] = line_sum<columns>(k, other, line, eps * inverse[line]);
    mine[line] = rcp_approx(inverse[line]);
  }
}

// All passes: row and column, which begin as ones, hold the scaling in the end.
__device__ __forceinline__ void sinkhorn_scales(const float (&k)[S][S], float (&row)[S],
                                                float (&column)[S], int iterations, float eps) {
  float row_inverse[S], column_inverse[S];
#pragma unroll
  for (int i = 0; i < S; ++i) row[i] = column[i] = row_inverse[i] = column_inverse[i] = 1.f;
  scale_lines<true>(k, column, column_inverse, row, eps);
  for (int pass = 1; pass < iterations; ++pass) {
    scale_lines<false>(k, row, row_inverse, column, eps);
    scale_lines<true>(k, column, column_inverse, row, eps);
  }
}

// logits in b -> the nearly doubly stochastic matrix in b, after `iterations` passes each way.
__device__ __forceinline__ void sinkhorn_matrix(float (&b)[S][S], int iterations, float eps) {
  float row[S], column[S];
  softmax_rows(b);
#pragma unroll
  for (int i = 0; i < S; ++i)
#pragma unroll
    for (int j = 0; j < S; ++j) b[i][j] += eps;
  sinkhorn_scales(b, row, column, iterations, eps);
#pragma unroll
  for (int i = 0; i < S; ++i)
#pragma unroll
    for (int j = 0; j < S; ++j) b[i][j] *= row[i] * column[j];
}

// The three sets of all tokens in memory; number m of token t.
template <class Number>
struct Mixing {
  Number *pre, *post, *comb;  // (T, S), (T, S), (T, S, S)
  __device__ __forceinline__ Number* at(long long t, int m) const {
    if (m < S) return pre + t * S + m;
    return m < 2 * S ? post + t * S + m - S : comb + t * S * S + m - 2 * S;
  }
};

// One token's sums, in place, into pre (S), post (S) and comb (S * S).
__device__ __forceinline__ void mixing_sets(float* u, const float* base, const float* scale,
                                            int width, int iterations, float norm_eps, float eps) {
  float rms = sqrtf(u[MIX] / width + norm_eps), b[S][S];
#pragma unroll
  for (int m = 0; m < 2 * S; ++m) {
    float z = u[m] / rms * scale[m / S] + base[m];
    u[m] = m < S ? sigmoid(z) + eps : 2.f * sigmoid(z);
  }
#pragma unroll
  for (int k = 0; k < S * S; ++k)
    b[k / S][k % S] = u[2 * S + k] / rms * scale[2] + base[2 * S + k];
  sinkhorn_matrix(b, iterations, eps);
#pragma unroll
  for (int k = 0; k < S * S; ++k) u[2 * S + k] = b[k / S][k % S];
}

#ifdef PASSES  // = 2 * iterations - 1
// scale_lines with what its gradient needs: by how much every line was scaled.
template <bool columns>
__device__ __forceinline__ void scale_lines_by(const float (&k)[S][S], float (&mine)[S],
                                               const float (&other)[S], float (&factor)[S],
                                               float eps) {
#pragma unroll
  for (int line = 0; line < S; ++line) {
    factor[line] = rcp_approx(line_sum<columns>(k, other, line, 0.f) * mine[line] + eps);
    mine[line] *= factor[line];
  }
}

// b = diag(row) k diag(column) came from lines divided by their sums: d -> (d - d . b) * factor.
template <bool columns>
__device__ __forceinline__ void undo_pass(float (&d)[S][S], const float (&k)[S][S],
                                          const float (&row)[S], const float (&column)[S],
                                          const float (&factor)[S]) {
#pragma unroll
  for (int line = 0; line < S; ++line) {
    float dot = 0.f;
#pragma unroll
    for (int at = 0; at < S; ++at) {
      int i = columns ? at : line, j = columns ? line : at;
      dot += d[i][j] * (row[i] * k[i][j] * column[j]);
    }
#pragma unroll
    for (int at = 0; at < S; ++at) {
      int i = columns ? at : line, j = columns ? line : at;
      d[i][j] = (d[i][j] - dot) * factor[line];
    }
  }
}

// d, the gradient by the result of sinkhorn_matrix, becomes that by its logits. The passes are made
// again and their 2 * PASSES * S factors kept, in local memory; then each is undone, last first.
__device__ __forceinline__ void sinkhorn_gradient(float (&d)[S][S], float (&soft)[S][S],
                                                  float eps) {
  float k[S][S], row[S], column[S], factor[PASSES][S], scaled[PASSES + 2][S];
  softmax_rows(soft);
#pragma unroll
  for (int i = 0; i < S; ++i) {
    row[i] = column[i] = scaled[0][i] = scaled[1][i] = 1.f;
#pragma unroll
    for (int j = 0; j < S; ++j) k[i][j] = soft[i][j] + eps;
  }
  for (int pass = 0; pass < PASSES; ++pass) {  // even passes normalise columns, odd ones rows
    if (pass % 2) scale_lines_by<false>(k, row, column, factor[pass], eps);
    else scale_lines_by<true>(k, column, row, factor[pass], eps);
#pragma unroll
    for (int i = 0; i < S; ++i) scaled[pass + 2][i] = pass % 2 ? row[i] : column[i];
  }
  for (int pass = PASSES - 1; pass >= 0; --pass) {
    if (pass % 2) undo_pass<false>(d, k, row, column, factor[pass]);
    else undo_pass<true>(d, k, row, column, factor[pass]);
#pragma unroll
    for (int i = 0; i < S; ++i) {
      if (pass % 2) row[i] = scaled[pass][i];
      else column[i] = scaled[pass][i];
    }
  }
#pragma unroll
  for (int i = 0; i < S; ++i) {
    float dot = 0.f;
#pragma unroll
    for (int j = 0; j < S; ++j) dot += d[i][j] * soft[i][j];
#pragma unroll
    for (int j = 0; j < S; ++j) d[i][j] = soft[i][j] * (d[i][j] - dot);
  }
}
#endif

// The MXFP8 scale of 32 numbers whose largest magnitude is amax (dsv41/quant.py, ACTIVATION_FP8):
// the E8M0 byte of the smallest power of two >= amax / 448, and 1 / scale, exact.
__device__ __forceinline__ unsigned fp8_scale(float amax) {
  unsigned bits = __float_as_uint(fmaxf(amax, 1e-4f) * (1.f / 448.f));
  return (bits >> 23) + ((bits & 0x7fffffu) != 0);
}
__device__ __forceinline__ float fp8_inverse(unsigned scale) {
  return __uint_as_float((254u - scale) << 23);
}
