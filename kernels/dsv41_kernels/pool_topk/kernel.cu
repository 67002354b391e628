// The k best entries of each query's own list; the definition is dsv41/indexer.py, the methods
// topk.cuh and topk_held.cuh.
//
// scores (T, P) f32 of the entries (T, P) i64, ascending with -1 among them, visible (T) i64
// -> chosen (T, k) i64 entry numbers, ascending, -1 padded.
#include "topk_held.cuh"

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

// v2: lists of up to 16,384 entries are read once, into registers.
struct Listed : Row {
  const long long* entries;
  long long seen;

  __device__ Listed(const float* scores, const long long* entries, long long seen, int count)
      : Row(scores, count), entries(entries), seen(seen) {}

  __device__ __forceinline__ void load(float* to, int) const {
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      long long entry = number(i) < count ? entries[number(i)] : -1;
      to[i] = entry >= 0 && entry < seen ? at[number(i)] : score_of(0);
    }
  }
};

extern "C" __global__ void __launch_bounds__(1024)
    topk_v2(const float* scores, const long long* entries, const long long* visible, long long* chosen,
            int count, int k) {
  long long t = blockIdx.x;
  const long long* mine = entries + t * count;
  choose_held(
      Listed(scores + t * count, mine, visible[t], count), [&] { return (long long)count; }, k,
      chosen + t * k, [&](unsigned i) { return mine[i]; });
}
