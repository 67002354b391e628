// target <- factor * target + scale * other for a list of arrays, a block for each piece of PIECE
// numbers. table: sizes, targets, others; numbers: factors, scales. Contract:
// dsv41.train.many.scale_add.
//
// build: PIECE=4096

extern "C" __global__ void scale_add(const long long* pieces, const long long* table,
                                     const float* numbers, int arrays) {
  long long which = pieces[2 * blockIdx.x], begin = pieces[2 * blockIdx.x + 1];
  float* target = (float*)table[arrays + which];
  const float* other = (const float*)table[2 * arrays + which];
  float factor = numbers[which], scale = numbers[arrays + which];
  long long end = min(begin + PIECE, table[which]);
  for (long long i = begin + threadIdx.x; i < end; i += blockDim.x)
    target[i] = factor * target[i] + scale * other[i];
}
