// Sinkhorn of small matrices: one thread holds one S x S matrix in registers from logits to result.
// The definition makes 2 * iterations passes over memory; this one reads and writes each number once.
// Same steps in the same order as dsv41/mhc.py; only the order within a sum of S numbers may differ.

// build: S=4

extern "C" __global__ void sinkhorn(const float* logits, float* out, long long count, int iterations,
                                    float eps) {
  long long matrix = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (matrix >= count) return;
  float b[S][S];
  for (int i = 0; i < S; ++i) {
    float top = __int_as_float(0xff800000), total = 0.f;
    for (int j = 0; j < S; ++j) top = fmaxf(top, b[i][j] = logits[matrix * S * S + i * S + j]);
    for (int j = 0; j < S; ++j) total += b[i][j] = expf(b[i][j] - top);
    for (int j = 0; j < S; ++j) b[i][j] = b[i][j] / total + eps;
  }
  for (int pass = 0; pass < iterations; ++pass) {
    for (int i = 0; pass > 0 && i < S; ++i) {
      float total = 0.f;
      for (int j = 0; j < S; ++j) total += b[i][j];
      for (int j = 0; j < S; ++j) b[i][j] /= total + eps;
    }
    for (int j = 0; j < S; ++j) {
      float total = 0.f;
      for (int i = 0; i < S; ++i) total += b[i][j];
      for (int i = 0; i < S; ++i) b[i][j] /= total + eps;
    }
  }
  for (int k = 0; k < S * S; ++k) out[matrix * S * S + k] = b[k / S][k % S];
}
