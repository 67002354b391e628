// x <- factor * x for a list of arrays, a block for each piece of PIECE numbers. table: sizes,
// arrays. Contract: dsv41.train.many.scale_all.
//
// build: PIECE=4096

extern "C" __global__ void scale_all(const long long* pieces, const long long* table, int arrays,
                                     float factor) {
  long long which = pieces[2 * blockIdx.x], begin = pieces[2 * blockIdx.x + 1];
  float* x = (float*)table[arrays + which];
  long long end = min(begin + PIECE, table[which]);
  for (long long i = begin + threadIdx.x; i < end; i += blockDim.x) x[i] *= factor;
}
