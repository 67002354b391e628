// X'[t][k] = post[t][k] y[t] + sum_j comb[t][j][k] X[t][j] (dsv41/mhc.py, hc_update): streams
// (T, S, D), y (T, D), post (T, S), comb (T, S, S) f32 -> (T, S, D) f32, rounded to bf16 once when
// ROUND is 1. One thread owns channel c of all streams, so 4 (2 S + 1) D bytes a token are moved.
// The order of operations is written out: streams in order with FMA, then the rounded post * y.
#include "../mhc.cuh"

// build: S=4 ROUND=0
// build: S=4 ROUND=1

extern "C" __global__ void hc_update(const Stored* streams, const Stored* y, const float* post,
                                     const float* comb, Stored* out, int tiles, int width) {
  long long t = blockIdx.x / tiles;
  int c = blockIdx.x % tiles * blockDim.x + threadIdx.x;
  if (c >= width) return;
  float in[S], more = load(y[t * width + c]);
#pragma unroll
  for (int j = 0; j < S; ++j) in[j] = load(streams[(t * S + j) * width + c]);
#pragma unroll
  for (int k = 0; k < S; ++k) {
    float mixed = 0.f;
#pragma unroll
    for (int j = 0; j < S; ++j) mixed = __fmaf_rn(comb[(t * S + j) * S + k], in[j], mixed);
    float value = __fadd_rn(__fmul_rn(post[t * S + k], more), mixed);
    out[(t * S + k) * width + c] = save(value);
  }
}
