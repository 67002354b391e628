// The k best entries of each query's own list; the definition is dsv41/indexer.py, the method
// topk.cuh.
//
// scores (T, P) f32 of the entries (T, P) i64, ascending with -1 among them, visible (T) i64
// -> chosen (T, k) i64 entry numbers, ascending, -1 padded.
#include "topk.cuh"

// v1: one block of threads per row; the list's keys stay in shared memory.
extern "C" __global__ void __launch_bounds__(256)
    topk_v1(const float* scores, const long long* entries, const long long* visible, long long* chosen,
            int count, int k) {
  extern __shared__ unsigned keys[];
  long long t = blockIdx.x, n = visible[t];
  const long long* mine = entries + t * count;
  load_keys_of_row(keys, count, [&](int i) {
    return mine[i] >= 0 && mine[i] < n ? order_key(scores[t * count + i]) : 0u;
  });
  write_best(keys, count, k, chosen + t * k, [&](int i) { return mine[i]; });
}
