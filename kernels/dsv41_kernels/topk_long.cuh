#pragma once
#include "topk.cuh"
// The k best of a long row, by many blocks: three kernels that read the row little more than once.
//
//   guess    one block per row samples SAMPLE keys in runs of 32 all over the row, and takes a key of a
//            rank that is almost surely below the k-th best of the whole row as the threshold
//   filter   all blocks stream the row and append (key, index) of what reaches the threshold
//   settle   one block per row finds the exact k best of those few, ties included, and sorts them
//
// An append takes its place by an atomic counter, so the list's order is chance; its contents are
// not, and `settle` orders by key, then index. Where the guess was wrong (fewer than k passed, or more
// than ROOM, as in a row of equal scores) `settle` reads the whole row instead, slowly and exactly.
// Which way a row goes depends on the row alone.

const int MOST_CHOSEN = 4096;  // k
const int SAMPLE = 8192, ROOM = 16384, LONG_THREADS = 1024;

typedef unsigned long long u64;

// larger is better: key, then lower index
__device__ __forceinline__ u64 ranked(unsigned key, unsigned i) { return (u64)key << 32 | ~i; }

// the rank-th largest of n numbers of BITS bits, 0 if there are fewer than rank: all threads
template <int BITS, class Number, class Read>
__device__ __forceinline__ Number rank_th(Read read, int n, int rank) {
  __shared__ unsigned counts[256], found[3];
  Number prefix = 0;
  unsigned left = rank;
  if (n < rank) return 0;
  for (int shift = BITS - 8; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < 256; i += blockDim.x) counts[i] = 0;
    __syncthreads();
    Number settled = shift == BITS - 8 ? (Number)0 : ~(Number)0 << (shift + 8);
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
      Number x = read(i);
      if ((x & settled) == prefix) atomicAdd(&counts[x >> shift & 255], 1u);
    }
    __syncthreads();
    find_digit(counts, left, found);
    __syncthreads();
    prefix |= (Number)found[0] << shift, left = found[1];
    bool all = found[2] == left;  // all of this digit are among the best: the smallest bound will do
    __syncthreads();
    if (all) break;
  }
  return prefix;
}

// which rank of a sample of `sample` out of n bounds the k-th best of all from below: its expected
// share of the k, and six deviations and some more
__device__ __forceinline__ int sample_rank(int k, int n, int sample) {
  float share = (float)k * sample / n;
  return min(sample, (int)(share + 6.f * sqrtf(share) + 12.f));
}

template <class Key>
__device__ __forceinline__ unsigned guess_threshold(Key key, int n, int k) {
  extern __shared__ unsigned sampled[];
  if (n <= ROOM) return 1;  // all of them may go on
  int runs = SAMPLE / 32, stride = n / runs;
  for (int i = threadIdx.x; i < SAMPLE; i += blockDim.x)
    sampled[i] = key(i / 32 * (long long)stride + i % 32);
  __syncthreads();
  unsigned bound = rank_th<32, unsigned>([&](int i) { return sampled[i]; }, SAMPLE,
                                         sample_rank(k, n, SAMPLE));
  return max(bound, 1u);
}

// append i with its key; `space` u64 (ROOM), `used` counts all that wanted to enter. A whole warp.
__device__ __forceinline__ void append(bool wanted, unsigned key, unsigned i, u64* space,
                                       unsigned* used) {
  unsigned all = __ballot_sync(0xffffffffu, wanted), lane = threadIdx.x % 32, first = 0;
  if (all == 0) return;
  if (lane == 0) first = atomicAdd(used, (unsigned)__popc(all));
  first = __shfl_sync(0xffffffffu, first, 0) + __popc(all & ((1u << lane) - 1));
  if (wanted && first < ROOM) space[first] = ranked(key, i);
}

// one block's share of a row: FILTERED keys from `begin` on, all loaded before the first is judged
const int FILTER_THREADS = 256, FILTERED = 4096;

template <class Key>
__device__ __forceinline__ void filter_keys(Key key, int begin, int n, unsigned bound, u64* space,
                                            unsigned* used) {
  unsigned keys[FILTERED / FILTER_THREADS];
#pragma unroll
  for (int turn = 0; turn < FILTERED / FILTER_THREADS; ++turn) {
    int i = begin + turn * FILTER_THREADS + threadIdx.x;
    keys[turn] = i < n ? key(i) : 0u;
  }
#pragma unroll
  for (int turn = 0; turn < FILTERED / FILTER_THREADS; ++turn)
    append(keys[turn] >= bound, keys[turn], begin + turn * FILTER_THREADS + threadIdx.x, space, used);
}

// `size` numbers in shared memory, a power of two, into ascending order
__device__ __forceinline__ void sort_ascending(unsigned* x, int size) {
  for (int width = 2; width <= size; width *= 2)
    for (int step = width / 2; step; step /= 2) {
      for (int i = threadIdx.x; i < size / 2; i += blockDim.x) {
        int low = 2 * i - (i & (step - 1)), high = low + step;
        bool up = (low & width) == 0;
        unsigned a = x[low], b = x[high];
        if ((a > b) == up) x[low] = b, x[high] = a;
      }
      __syncthreads();
    }
}

// the k best of the `used` numbers in `space`, or of the whole row of n keys where those are too many
// or too few, ascending by index, -1 padded. Shared memory: ROOM numbers of 8 bytes.
template <class Key>
__device__ __forceinline__ void settle_row(Key key, int n, int k, const u64* space, unsigned used,
                                           bool filtered, long long* out) {
  extern __shared__ __align__(16) u64 listed[];
  __shared__ unsigned places, chosen[MOST_CHOSEN];
  if (used > ROOM || (filtered && used < k)) {
    Threshold t = find_threshold(key, n, k);
    int chosen = emit_chosen(key, n, t, [&](unsigned rank, int i) { out[rank] = i; });
    for (int i = chosen + threadIdx.x; i < k; i += blockDim.x) out[i] = -1;
    return;
  }
  for (int i = threadIdx.x; i < used; i += blockDim.x) listed[i] = space[i];
  if (threadIdx.x == 0) places = 0;
  __syncthreads();
  u64 bound = rank_th<64, u64>([&](int i) { return listed[i]; }, used, k);
  for (int i = threadIdx.x; i < used; i += blockDim.x)
    if (listed[i] >= bound) chosen[atomicAdd(&places, 1u)] = ~(unsigned)listed[i];
  __syncthreads();
  int size = 2;
  while (size < places) size *= 2;
  for (int i = places + threadIdx.x; i < size; i += blockDim.x) chosen[i] = ~0u;
  __syncthreads();
  sort_ascending(chosen, size);
  for (int i = threadIdx.x; i < k; i += blockDim.x) out[i] = i < places ? (long long)chosen[i] : -1;
}
