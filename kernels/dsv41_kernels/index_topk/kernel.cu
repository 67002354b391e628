// The k best scores of each row; the definition is dsv41/indexer.py, the methods topk.cuh,
// topk_long.cuh, topk_ordered.cuh and topk_held.cuh.
//
// scores (T, N) f32, visible (T) i64 -> chosen (T, k) i64, ascending, -1 padded.
#include "topk_long.cuh"
#include "topk_ordered.cuh"
#include "topk_held.cuh"

// v1: one block of threads per row; the row's keys stay in shared memory. On an H200, 512 of 64 x
// 16,384: 22 us, where an empty launch takes 4.
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
// u32 and space (T, ROOM) u64 pass from one kernel to the next. On an H200, 512 of 32 x 2^20: 137 us,
// of 1 x 2^20: 34 us; memory would need 32 and 1.
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

// v3: topk_ordered.cuh. A row of up to 16,384 scores is read once, into registers, and the 700 that
// survive are looked at a second time; v1 reads all from shared memory six times. On an H200, 512
// of 64 x 16,384: 9.9 us; of 32 x 2^20: 47.1; of 1 x 2^20: 14.7.
// Only the first ceil(visible / per) scores of a row are eligible.
#define SCORES(t)                               \
  Row row(scores + (t) * count, count);         \
  auto shown = [&] {                            \
    long long n = visible[t];                   \
    return per == 1 ? n : (n + per - 1) / per;  \
  }

extern "C" __global__ void __launch_bounds__(1024)
    short_v3(const float* scores, const long long* visible, long long* chosen, long long count,
             int per, int k) {
  long long t = blockIdx.x;
  SCORES(t);
  choose_short(row, shown, k, (int)count, chosen + t * k, [](unsigned i) { return (long long)i; });
}

// Many longer rows, one block for each.
extern "C" __global__ void __launch_bounds__(512, 1)
    long_v3(const float* scores, const long long* visible, long long* chosen, long long count,
            int per, int k, int rank, int size) {
  long long t = blockIdx.x;
  SCORES(t);
  choose_long(row, shown, k, rank, size, chosen + t * k);
}

// Few long rows, in two launches. Each block finds the bound for itself while its first scores are
// on their way, which costs 32 KB from the L2 cache and saves v2's first launch; a block lists its
// survivors in shared memory and writes them out once, where v2's warps asked one counter of the
// row for places, 3,500 times, one after the other. How many parts a row has is split's choice in
// orderedrows.py. (Slower: half as many parts of one row; 512 threads a row in the second launch.)
extern "C" __global__ void __launch_bounds__(512, 2)
    filter_v3(const float* scores, const long long* visible, uint2* found, unsigned* counts,
              long long count, int per, int k, int rank, int length, int limit, int size) {
  long long t = blockIdx.y, i = t * gridDim.x + blockIdx.x;
  SCORES(t);
  filter_part(row, shown, blockIdx.x, length, k, rank, size, found + i * limit, limit, counts + i);
}

extern "C" __global__ void __launch_bounds__(1024)
    settle_v3(const float* scores, const long long* visible, const uint2* found,
              const unsigned* counts, long long* chosen, long long count, int per, int k, int parts,
              int limit) {
  long long t = blockIdx.x, i = t * parts;
  SCORES(t);
  settle_parts(row, shown, k, found + i * limit, counts + i, parts, limit, chosen + t * k);
}

// v4: topk_held.cuh. A row of up to 16,384 scores stays where it is, in registers, until it is
// known which are chosen: 5 meetings of the block instead of 12, and no list. On an H200, 512 of
// 64 x 16,384: 8.1 us, of which loads and the launch are most. (Slower: two blocks a row in a
// cluster, which add up each other's counters; half the threads and 32 scores each; to find the
// bound while the second half of the scores is on its way.)
extern "C" __global__ void __launch_bounds__(1024)
    short_v4(const float* scores, const long long* visible, long long* chosen, long long count,
             int per, int k) {
  long long t = blockIdx.x;
  SCORES(t);
  choose_held(row, shown, k, chosen + t * k, [](unsigned i) { return (long long)i; });
}

// Rows whose parts are together no more than there are SMs: the last block that has filtered its part
// settles the row, which saves v3's second launch; the survivors of all parts fit into its
// registers. Of 1 x 2^20: 12.8 us.
extern "C" __global__ void __launch_bounds__(512, 1)
    parts_v4(const float* scores, const long long* visible, uint2* found, unsigned* counts,
             unsigned* arrived, long long* chosen, long long count, int per, int k, int rank,
             int length, int limit, int size) {
  long long t = blockIdx.y, i = t * gridDim.x;
  SCORES(t);
  choose_part(row, shown, blockIdx.x, gridDim.x, length, k, rank, size, found + i * limit, limit,
              counts + i, arrived + t, chosen + t * k);
}

// Behind filter_v3, where there are more parts than that. Of 32 x 2^20: 45.8 us; settled in the
// same launch it takes longer, as a row then takes an SM from the parts that wait for one.
extern "C" __global__ void __launch_bounds__(1024)
    settle_v4(const float* scores, const long long* visible, const uint2* found,
              const unsigned* counts, long long* chosen, long long count, int per, int k, int parts,
              int limit) {
  long long t = blockIdx.x, i = t * parts;
  SCORES(t);
  settle_held(row, shown, k, MOST_LISTED, found + i * limit, counts + i, parts, limit,
              chosen + t * k);
}
