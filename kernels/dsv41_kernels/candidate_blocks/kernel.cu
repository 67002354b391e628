// The candidate pool of each query; the definition is dsv41/indexer.py, the method topk.cuh.
//
// scores (T, N) f32, visible (T) i64 -> blocks (T, budget) i64, ascending, -1 padded. Each block of
// `size` entries counts by its best visible entry, the newest block by +inf.
#include "topk_ordered.cuh"

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

// v2 to v4: what each block counts by, (T, blocks) f32, -inf for nothing, by as many threads as
// there are blocks. The choice among them is that of index_topk's version of the same number.
extern "C" __global__ void __launch_bounds__(256)
    maxima_v2(const float* scores, const long long* visible, float* best, long long count,
              long long blocks, long long total, int size) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i >= total) return;
  long long t = i / blocks, b = i % blocks;
  long long n = max(0ll, min(visible[t], count)), end = min(n, (b + 1) * size);
  unsigned top = visible[t] > 0 && b == (visible[t] - 1) / size ? KEY_OF_INFINITY : 0u;
  const float* row = scores + t * count;
  if (size == 8 && count % 8 == 0 && end == (b + 1) * size) {
    const float4* eight = (const float4*)(row + b * 8);
    float4 x = eight[0], y = eight[1];
    top = max(top, max(max(order_key(x.x), order_key(x.y)), max(order_key(x.z), order_key(x.w))));
    top = max(top, max(max(order_key(y.x), order_key(y.y)), max(order_key(y.z), order_key(y.w))));
  } else {
    for (long long j = b * size; j < end; ++j) top = max(top, order_key(row[j]));
  }
  best[i] = score_of(top);
}
