// x[t] = sum_i pre[t][i] X[t][i] (dsv41/mhc.py, hc_collapse): streams (T, S, D), pre (T, S) f32 ->
// x (T, D) f32, rounded to bf16 when ROUND is 1. One thread a number, streams in order; 4 (S + 1) D
// bytes a token, which is all that this step can cost.
#include "../mhc.cuh"

// build: S=4 ROUND=0
// build: S=4 ROUND=1

extern "C" __global__ void hc_collapse(const Stored* streams, const float* pre, Stored* x,
                                       int tiles, int width) {
  long long t = blockIdx.x / tiles;
  int c = blockIdx.x % tiles * blockDim.x + threadIdx.x;
  if (c >= width) return;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < S; ++i)
    sum = __fmaf_rn(pre[t * S + i], load(streams[(t * S + i) * width + c]), sum);
  x[t * width + c] = save(sum);
}
