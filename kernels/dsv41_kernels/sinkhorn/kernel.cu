// Sinkhorn of small matrices: one thread holds one S x S matrix in registers from logits to result.
// The definition makes 2 * iterations passes over memory; this one reads and writes each number once,
// and its passes change 2 * S factors instead of S * S numbers (../mhc.cuh).
#include "../mhc.cuh"

// build: S=4

extern "C" __global__ void sinkhorn(const float* logits, float* out, long long count, int iterations,
                                    float eps) {
  long long matrix = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (matrix >= count) return;
  float b[S][S];
#pragma unroll
  for (int k = 0; k < S * S; ++k) b[k / S][k % S] = logits[matrix * S * S + k];
  sinkhorn_matrix(b, iterations, eps);
#pragma unroll
  for (int k = 0; k < S * S; ++k) out[matrix * S * S + k] = b[k / S][k % S];
}
