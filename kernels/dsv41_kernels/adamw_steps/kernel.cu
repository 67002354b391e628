// AdamW for a list of arrays, a block for each piece of PIECE numbers. table: sizes, weights, m, v,
// grads; numbers: keep (1 - lr * decay), rate (lr / (1 - b1^t)), root (sqrt(1 - b2^t)) of each
// array. Contract: dsv41.train.adamw.adamw_steps.
//
// build: PIECE=4096

extern "C" __global__ void adamw_steps(const long long* pieces, const long long* table,
                                       const float* numbers, int arrays, float b1, float b2,
                                       float rest1, float rest2, float eps) {
  long long which = pieces[2 * blockIdx.x], begin = pieces[2 * blockIdx.x + 1];
  float* weight = (float*)table[arrays + which];
  float* m = (float*)table[2 * arrays + which];
  float* v = (float*)table[3 * arrays + which];
  const float* grad = (const float*)table[4 * arrays + which];
  float keep = numbers[which], rate = numbers[arrays + which], root = numbers[2 * arrays + which];
  long long end = min(begin + PIECE, table[which]);
  for (long long i = begin + threadIdx.x; i < end; i += blockDim.x) {
    float g = grad[i];
    m[i] = b1 * m[i] + rest1 * g;
    v[i] = b2 * v[i] + rest2 * g * g;
    float size = sqrtf(v[i]) / root + eps;
    weight[i] = keep * weight[i] - rate * (m[i] / size);
  }
}
