// The k best scores of each row; the definition is dsv41/indexer.py, the method topk.cuh.
//
// scores (T, N) f32, visible (T) i64 -> chosen (T, k) i64, ascending, -1 padded.
#include "topk.cuh"

// v1: one block of threads per row; the row's keys stay in shared memory.
extern "C" __global__ void __launch_bounds__(512)
    topk_v1(const float* scores, const long long* visible, long long* chosen, long long count, int k) {
  extern __shared__ unsigned keys[];
  long long t = blockIdx.x;
  int n = (int)max(0ll, min(visible[t], count));
  for (int i = threadIdx.x; i < n; i += blockDim.x) keys[i] = order_key(scores[t * count + i]);
  __syncthreads();
  write_best(keys, n, k, chosen + t * k, [](int i) { return (long long)i; });
}
