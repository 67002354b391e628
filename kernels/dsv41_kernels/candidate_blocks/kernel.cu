// The candidate pool of each query; the definition is dsv41/indexer.py, the method topk.cuh.
//
// scores (T, N) f32, visible (T) i64 -> blocks (T, budget) i64, ascending, -1 padded. Each block of
// `size` entries counts by its best visible entry, the newest block by +inf.
#include "topk.cuh"

// v1: one block of threads per row; every score is read once, the blocks' keys stay in shared memory.
extern "C" __global__ void __launch_bounds__(512)
    blocks_v1(const float* scores, const long long* visible, long long* blocks, long long count,
              int size, int budget) {
  extern __shared__ unsigned best[];
  long long t = blockIdx.x;
  long long n = max(0ll, min(visible[t], count));
  int used = (int)((n + size - 1) / size);
  for (int b = threadIdx.x; b < used; b += blockDim.x) {
    unsigned top = b == (visible[t] - 1) / size ? KEY_OF_INFINITY : 0u;
    for (long long i = (long long)b * size; i < min(n, ((long long)b + 1) * size); ++i)
      top = max(top, order_key(scores[t * count + i]));
    best[b] = top;
  }
  __syncthreads();
  write_best(best, used, budget, blocks + t * budget, [](int b) { return (long long)b; });
}
