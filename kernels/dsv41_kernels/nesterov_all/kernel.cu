// momentum <- mu * momentum + grad, direction = mu * momentum + grad for a list of arrays, a block
// for each piece of PIECE numbers. table: sizes, momenta, grads, directions. Contract:
// dsv41.train.muon.nesterov_all.
//
// build: PIECE=4096

extern "C" __global__ void nesterov_all(const long long* pieces, const long long* table, int arrays,
                                        float mu) {
  long long which = pieces[2 * blockIdx.x], begin = pieces[2 * blockIdx.x + 1];
  float* momentum = (float*)table[arrays + which];
  const float* grad = (const float*)table[2 * arrays + which];
  float* direction = (float*)table[3 * arrays + which];
  long long end = min(begin + PIECE, table[which]);
  for (long long i = begin + threadIdx.x; i < end; i += blockDim.x) {
    float g = grad[i], m = mu * momentum[i] + g;
    momentum[i] = m;
    direction[i] = mu * m + g;
  }
}
