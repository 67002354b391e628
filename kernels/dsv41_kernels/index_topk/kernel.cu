// The k best scores of each row; the definition is dsv41/indexer.py, the method topk.cuh.
//
// scores (T, N) f32, visible (T) i64 -> chosen (T, k) i64, ascending, -1 padded.
#include "topk_long.cuh"

// v1: one block of threads per row; the row's keys stay in shared memory.
extern "C" __global__ void __launch_bounds__(1024)
    topk_v1(const float* scores, const long long* visible, long long* chosen, long long count, int k) {
  extern __shared__ unsigned keys[];
  long long t = blockIdx.x;
  int n = (int)max(0ll, min(visible[t], count));
  load_keys_of_row(keys, n, [&](int i) { return order_key(scores[t * count + i]); });
  write_best(keys, n, k, chosen + t * k, [](int i) { return (long long)i; });
}

// v2: rows of any length, by topk_long.cuh: a row of 2^20 scores keeps every SM busy and is read 1.01
// times, where one block of threads would read it 5 times at the speed of one SM. bounds and used (T)
// u32 and space (T, ROOM) u64 pass from one kernel to the next.
#define ROW(t)                                              \
  const float* row = scores + (t) * count;                  \
  int n = (int)max(0ll, min(visible[t], count));            \
  auto key = [&](int i) { return order_key(row[i]); }

extern "C" __global__ void __launch_bounds__(LONG_THREADS)
    guess_v2(const float* scores, const long long* visible, long long count, int k, unsigned* bounds,
             unsigned* used) {
  ROW(blockIdx.x);
  unsigned bound = guess_threshold(key, n, k);
  if (threadIdx.x == 0) bounds[blockIdx.x] = bound, used[blockIdx.x] = 0;
}

extern "C" __global__ void __launch_bounds__(FILTER_THREADS)
    filter_v2(const float* scores, const long long* visible, long long count, const unsigned* bounds,
              unsigned* used, u64* space) {
  int parts = (int)((count + FILTERED - 1) / FILTERED);
  long long t = blockIdx.x / parts;
  ROW(t);
  int begin = blockIdx.x % parts * FILTERED;
  if (begin < n) filter_keys(key, begin, n, bounds[t], space + t * ROOM, used + t);
}

extern "C" __global__ void __launch_bounds__(LONG_THREADS)
    settle_v2(const float* scores, const long long* visible, long long count, int k,
              const unsigned* used, const u64* space, long long* chosen) {
  long long t = blockIdx.x;
  ROW(t);
  settle_row(key, n, k, space + t * ROOM, used[t], n > ROOM, chosen + t * k);
}
