// The gradient of Sinkhorn: one thread repeats the forward passes of one S x S matrix, keeps every
// result in its local memory (PASSES * S * (S + 1) floats, streamed through L1), and walks back.
// Same steps as dsv41/train/mhc.py.

// build: S=4 PASSES=39

extern "C" __global__ void sinkhorn_backward(const float* dcomb, const float* logits, float* dlogits,
                                             long long count, float eps) {
  long long matrix = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (matrix >= count) return;
  const float* in = logits + matrix * S * S;
  float b[S][S], soft[S][S], d[S][S];
  float result[PASSES][S][S], total[PASSES][S];
  for (int i = 0; i < S; ++i) {
    float top = __int_as_float(0xff800000), sum = 0.f;
    for (int j = 0; j < S; ++j) top = fmaxf(top, in[i * S + j]);
    for (int j = 0; j < S; ++j) sum += soft[i][j] = expf(in[i * S + j] - top);
    for (int j = 0; j < S; ++j) b[i][j] = (soft[i][j] /= sum) + eps;
  }
  for (int pass = 0; pass < PASSES; ++pass) {  // even passes normalise columns, odd ones rows
    for (int line = 0; line < S; ++line) {
      float sum = 0.f;
      for (int k = 0; k < S; ++k) sum += pass % 2 ? b[line][k] : b[k][line];
      total[pass][line] = sum + eps;
    }
    for (int i = 0; i < S; ++i)
      for (int j = 0; j < S; ++j)
        result[pass][i][j] = b[i][j] /= total[pass][pass % 2 ? i : j];
  }
  for (int k = 0; k < S * S; ++k) d[k / S][k % S] = dcomb[matrix * S * S + k];
  for (int pass = PASSES - 1; pass >= 0; --pass) {
    for (int line = 0; line < S; ++line) {
      float dot = 0.f;
      for (int k = 0; k < S; ++k) {
        int i = pass % 2 ? line : k, j = pass % 2 ? k : line;
        dot += d[i][j] * result[pass][i][j];
      }
      for (int k = 0; k < S; ++k) {
        int i = pass % 2 ? line : k, j = pass % 2 ? k : line;
        d[i][j] = (d[i][j] - dot) / total[pass][line];
      }
    }
  }
  for (int i = 0; i < S; ++i) {
    float dot = 0.f;
    for (int j = 0; j < S; ++j) dot += d[i][j] * soft[i][j];
    for (int j = 0; j < S; ++j)
      dlogits[matrix * S * S + i * S + j] = soft[i][j] * (d[i][j] - dot);
  }
}
