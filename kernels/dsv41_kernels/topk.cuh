#pragma once
// The k best of n keys, found by one block of threads without sorting.
//
// A score becomes an integer key whose order is the order of choice: larger is better, -0 equals +0,
// and 0 means never (-inf, NaN, hidden). Four rounds of counting 8 bits each find the k-th largest
// key; keys above it are chosen, and of those equal to it the first ones from the left. Each thread
// then owns a stretch of neighbouring keys, learns by a prefix sum how many are chosen before it, and
// writes its own in ascending order: no atomics decide an order, so the result is always the same.

__device__ __forceinline__ unsigned order_key(float x) {
  unsigned u = __float_as_uint(x);
  if ((u & 0x7fffffffu) > 0x7f800000u || u == 0xff800000u) return 0;  // NaN, -inf
  if (u == 0x80000000u) u = 0;
  return u >> 31 ? ~u : u | 0x80000000u;
}

const unsigned KEY_OF_INFINITY = 0xff800000u;

// key(i) of i = 0 .. n - 1 into shared memory, 8 of a thread's on their way at once
template <class Key>
__device__ __forceinline__ void load_keys_of_row(unsigned* to, int n, Key key) {
  for (int base = threadIdx.x; base < n; base += 8 * blockDim.x) {
    unsigned some[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
      some[i] = base + i * blockDim.x < n ? key(base + i * (int)blockDim.x) : 0u;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (base + i * blockDim.x < n) to[base + i * blockDim.x] = some[i];
  }
  __syncthreads();
}

struct Threshold {
  unsigned key;  // larger keys are chosen,
  int room;      // and this many of the equal ones
};

__device__ __forceinline__ unsigned warp_before(unsigned x) {  // sum of x in the lanes before
  unsigned sum = x;
  for (int d = 1; d < 32; d *= 2) {
    unsigned other = __shfl_up_sync(0xffffffffu, sum, d);
    if (threadIdx.x % 32 >= d) sum += other;
  }
  return sum - x;
}

// exclusive prefix sums of x and y over the block's threads
__device__ __forceinline__ void block_before(unsigned& x, unsigned& y) {
  __shared__ unsigned sums[2][32];
  unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  unsigned bx = warp_before(x), by = warp_before(y);
  if (lane == 31) sums[0][warp] = bx + x, sums[1][warp] = by + y;
  __syncthreads();
  for (unsigned other = 0; other < warp; ++other) bx += sums[0][other], by += sums[1][other];
  __syncthreads();
  x = bx, y = by;
}

// counts (256) of a digit -> the digit of the `left`-th largest key, and how many are left in it
__device__ __forceinline__ void find_digit(const unsigned* counts, unsigned left, unsigned* found) {
  if (threadIdx.x >= 32) return;
  unsigned sum = 0;
  for (int i = 0; i < 8; ++i) sum += counts[255 - 8 * (int)threadIdx.x - i];
  unsigned before = warp_before(sum);
  if (before >= left || left > before + sum) return;
  int digit = 255 - 8 * (int)threadIdx.x;
  for (; before + counts[digit] < left; --digit) before += counts[digit];
  found[0] = digit, found[1] = left - before, found[2] = counts[digit];
}

// all threads of a block; key(i) of i = 0 .. n - 1
template <class Key>
__device__ __forceinline__ Threshold find_threshold(Key key, int n, int k) {
  __shared__ unsigned counts[256], found[3];
  if (n <= k) return {0u, 0};
  unsigned prefix = 0, left = k;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < 256; i += blockDim.x) counts[i] = 0;
    __syncthreads();
    unsigned settled = shift == 24 ? 0u : ~0u << (shift + 8);
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
      unsigned x = key(i);
      if ((x & settled) == prefix) atomicAdd(&counts[x >> shift & 255], 1u);
    }
    __syncthreads();
    find_digit(counts, left, found);
    __syncthreads();
    prefix |= found[0] << shift, left = found[1];
    bool all = found[2] == left;  // the whole digit is chosen: lower bits do not matter
    __syncthreads();
    if (all && prefix) return {prefix - 1, 0};
  }
  return {prefix, (int)left};
}

// emit(rank, i) for every chosen key, rank ascending with i; returns how many there are
template <class Key, class Emit>
__device__ __forceinline__ int emit_chosen(Key key, int n, Threshold t, Emit emit) {
  __shared__ unsigned total;
  int each = (n + blockDim.x - 1) / blockDim.x | 1;  // odd, so that 32 lanes meet 32 banks
  int begin = min(n, each * (int)threadIdx.x), end = min(n, begin + each);
  unsigned above = 0, equal = 0;
  for (int i = begin; i < end; ++i) above += key(i) > t.key, equal += key(i) == t.key;
  unsigned ahead = above, level = equal;
  block_before(ahead, level);
  unsigned room = t.key ? t.room : 0;
  if (threadIdx.x == blockDim.x - 1) total = ahead + above + min(level + equal, room);
  for (int i = begin; i < end; ++i) {
    if (key(i) > t.key) emit(ahead++ + min(level, room), i);
    if (key(i) == t.key && level++ < room) emit(ahead + level - 1, i);
  }
  __syncthreads();
  return total;
}

// out (k) int64: name(i) of the k best keys in shared memory, ascending, padded with -1
template <class Name>
__device__ __forceinline__ void write_best(const unsigned* keys, int n, int k, long long* out,
                                           Name name) {
  auto key = [&](int i) { return keys[i]; };
  Threshold t = find_threshold(key, n, k);
  int chosen = emit_chosen(key, n, t, [&](unsigned rank, int i) { out[rank] = name(i); });
  for (int i = chosen + threadIdx.x; i < k; i += blockDim.x) out[i] = -1;
  __syncthreads();
}
