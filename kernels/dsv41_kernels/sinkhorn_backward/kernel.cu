// The gradient of Sinkhorn: one thread repeats the passes of one S x S matrix, keeps the factors of
// every pass in its local memory (2 * PASSES * S floats, which stay in L1), and walks back. The
// definition keeps the S * S results of every pass instead.
#include "../mhc.cuh"

// build: S=4 PASSES=39

extern "C" __global__ void sinkhorn_backward(const float* dcomb, const float* logits, float* dlogits,
                                             long long count, float eps) {
  long long matrix = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (matrix >= count) return;
  float d[S][S], b[S][S];
#pragma unroll
  for (int k = 0; k < S * S; ++k) {
    d[k / S][k % S] = dcomb[matrix * S * S + k];
    b[k / S][k % S] = logits[matrix * S * S + k];
  }
  sinkhorn_gradient(d, b, eps);
#pragma unroll
  for (int k = 0; k < S * S; ++k) dlogits[matrix * S * S + k] = d[k / S][k % S];
}
