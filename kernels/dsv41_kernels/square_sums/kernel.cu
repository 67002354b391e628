// The sum of squares of each piece of PIECE numbers of a list of arrays, in a fixed order; the
// caller adds the pieces of an array. table: sizes, arrays. Contract: dsv41.train.many.square_sums.
//
// build: PIECE=4096

extern "C" __global__ void square_sums(const long long* pieces, const long long* table,
                                       double* sums, int arrays) {
  __shared__ double lines[256];
  long long which = pieces[2 * blockIdx.x], begin = pieces[2 * blockIdx.x + 1];
  const float* x = (const float*)table[arrays + which];
  long long end = min(begin + PIECE, table[which]);
  double sum = 0.;
  for (long long i = begin + threadIdx.x; i < end; i += 256) sum += (double)x[i] * x[i];
  lines[threadIdx.x] = sum;
  for (int half = 128; half; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) lines[threadIdx.x] += lines[threadIdx.x + half];
  }
  if (threadIdx.x == 0) sums[blockIdx.x] = lines[0];
}
