#pragma once
#include "topk.cuh"
// The k best of a row, from survivors that stay in the order of the row.
//
//   bound     a score that the k-th best surely or almost surely reaches, from the best of 16
//             scores of each thread: of the row itself where it fits into the block's registers,
//             since k threads whose best reach it are k scores that do, else of a sample of the row
//   survive   every thread holds 16 scores in registers, 4 times 4 in a row, while its next 16 are
//             on their way; what is above the bound goes on a list, placed by a prefix sum
//   choose    256 counters over the range that the list really covers find the piece with the k-th
//             best; the few numbers in it are ranked by one look at each other, and a second prefix
//             sum writes the chosen ones, already ascending
//
// For k = 512, 695 of 16,384 normal scores survive on average, and 2,600 of 2^20: choosing is short
// work, and the row is read once. No atomic decides an order. A list that gets too long (equal
// scores) is cut to its k best and goes on with their last one as the bound, which loses nothing: a
// later equal score would not be chosen. Only a sample that lies, whose bound leaves fewer than k,
// costs a second reading.

const int PER_THREAD = 16;      // scores of a thread in registers
const int MOST_LISTED = 20480;  // keys in shared memory, as many numbers beside them
const int FEW = 32;             // keys that a warp ranks at once

// comparisons that keep subnormal numbers apart, which C++'s under -ftz=true do not; false for NaN
__device__ __forceinline__ void mark_above(unsigned& marks, unsigned mark, float x, float bound) {
  asm("{ .reg .pred p; setp.gt.f32 p, %1, %2; @p or.b32 %0, %0, %3; }"
      : "+r"(marks)
      : "f"(x), "f"(bound), "r"(mark));
}

__device__ __forceinline__ float larger(float a, float b) {  // of a number and NaN the number
  float out;
  asm("max.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
}

// order_key of what is above a bound, hence neither NaN nor -inf
__device__ __forceinline__ unsigned key_above(float x) {
  asm("add.f32 %0, %1, 0f00000000;" : "=f"(x) : "f"(x));  // -0 becomes 0
  unsigned bits = __float_as_uint(x);
  return bits ^ ((unsigned)((int)bits >> 31) | 0x80000000u);
}

// the score such that x > it for just the scores x with order_key(x) > key
__device__ __forceinline__ float score_of(unsigned key) {
  if (key < 0x00800000u) return __uint_as_float(0xff800000u);  // -inf: every number is above
  if (key == 0x7fffffffu) --key;                               // which would be -0
  return __uint_as_float(key >> 31 ? key ^ 0x80000000u : ~key);
}

// ---- where the scores come from -----------------------------------------------------------------

struct Row {
  const float* at;
  int count, visible;  // scores that may be read, and that are eligible
  bool whole;          // starts at a multiple of 16 bytes

  __device__ Row(const float* row, long long count)
      : at(row), count((int)count), visible((int)count), whole(((size_t)row & 15) == 0) {}

  __device__ void show(long long n) { visible = (int)max(0ll, min(n, (long long)count)); }

  // a warp's 512 scores are neighbours, and 128 of them what it loads at once
  static __device__ __forceinline__ int number(int i) {
    return threadIdx.x / 32 * (32 * PER_THREAD) + i / 4 * 128 + threadIdx.x % 32 * 4 + i % 4;
  }

  // a thread's 16, number(i) of them from `first` on. What is visible is asked for later, so that
  // nobody waits for that number before the scores are on their way.
  __device__ __forceinline__ void load(float* to, int first) const {
    if (whole && first + PER_THREAD * (int)blockDim.x <= count) {
#pragma unroll
      for (int i = 0; i < PER_THREAD; i += 4) four(to + i, first + number(i));
    } else {
#pragma unroll
      for (int i = 0; i < PER_THREAD; ++i) {
        int j = first + number(i);
        to[i] = j < count ? at[j] : __uint_as_float(0xff800000u);
      }
    }
  }

  __device__ __forceinline__ void hide(float* scores, int first) const {
    if (first + PER_THREAD * (int)blockDim.x <= visible) return;
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i)
      if (first + number(i) >= visible) scores[i] = __uint_as_float(0xff800000u);
  }

  // 16 of a sample: runs of 32, one at an irregular place of each of as many equal stretches
  __device__ __forceinline__ int sampled(int i) const {
    unsigned runs = blockDim.x / 2, places = count / (32 * runs);
    unsigned unit = i / 4 * blockDim.x + threadIdx.x, run = unit / 8;
    return 32 * (run * places + __umulhi(run * 0x9e3779b1u, places)) + unit % 8 * 4;
  }

  __device__ __forceinline__ void sample(float* to) const {
#pragma unroll
    for (int i = 0; i < PER_THREAD; i += 4) four(to + i, sampled(i));
  }

  __device__ __forceinline__ void hide_sample(float* scores) const {
    if (visible == count) return;
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i)
      if (sampled(i) + i % 4 >= visible) scores[i] = __uint_as_float(0xff800000u);
  }

  __device__ __forceinline__ void four(float* to, int j) const {
    if (whole) {
      float4 x = *(const float4*)(at + j);
      to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) to[i] = at[j + i];
    }
  }
};

// the key of the best of a thread's scores
__device__ __forceinline__ unsigned best_key(const float* scores) {
  float best = scores[0];
#pragma unroll
  for (int i = 1; i < PER_THREAD; ++i) best = larger(best, scores[i]);
  return order_key(best);
}

// ---- what the threads of a block find out together ----------------------------------------------

struct Range {               // of keys, both ends in it, and in it
  unsigned low, high;        // the `left`-th largest is what we look for,
  unsigned left, count;      // of so many
};

struct Chooser {
  struct Board {  // in shared memory; what is used in turns needs no barrier before its next use
    unsigned counts[2][256], sums[2][2][32], found[2][3], few[FEW], places;
  }* board;
  int turn = 0, step = 0;
  unsigned bound = 0;  // chosen: keys above it,
  unsigned room = 0;   // and so many equal ones, from the left

  __device__ Chooser(Board* board) : board(board) {
    for (int i = threadIdx.x; i < 256; i += blockDim.x) board->counts[0][i] = 0;
    if (threadIdx.x == 0) board->places = 0;
  }

  // sum of the warps before, and of all; `sum` is a warp's in its lane 31
  __device__ __forceinline__ unsigned warps_before(unsigned sum, unsigned& all) {
    unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned* sums = board->sums[turn++ % 2][0];
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    sum = lane < blockDim.x / 32 ? sums[lane] : 0u;
    all = __reduce_add_sync(~0u, sum);
    return __reduce_add_sync(~0u, lane < warp ? sum : 0u);
  }

  // the same of threads
  __device__ __forceinline__ unsigned before(unsigned x, unsigned& all) {
    unsigned own = warp_before(x);
    return warps_before(own + x, all) + own;
  }

  // each(f) calls f(key) for the thread's share of the keys -> from the smallest, 0 aside, to the
  // largest, which is 0 if there is none
  template <class Each>
  __device__ __forceinline__ Range range_of(Each each, unsigned left, unsigned count) {
    unsigned low = ~0u, high = 0, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    each([&](unsigned key) { low = key ? min(low, key) : low, high = max(high, key); });
    low = __reduce_min_sync(~0u, low), high = __reduce_max_sync(~0u, high);
    auto sums = board->sums[turn++ % 2];
    if (lane == 0) sums[0][warp] = low, sums[1][warp] = high;
    __syncthreads();
    bool used = lane < blockDim.x / 32;
    low = __reduce_min_sync(~0u, used ? sums[0][lane] : ~0u);
    return {low, __reduce_max_sync(~0u, used ? sums[1][lane] : 0u), left, count};
  }

  // cut the range into 256 equal pieces or fewer and keep the one with the left-th largest key;
  // count 0 if there are fewer keys
  template <class Each>
  __device__ __forceinline__ void narrow(Each each, Range& range) {
    unsigned low = range.low, width = range.high - low;
    unsigned *counts = board->counts[step % 2], *next = board->counts[(step + 1) % 2];
    int shift = max(0, 24 - __clz(width));
    for (int i = threadIdx.x; i < 256; i += blockDim.x) next[i] = 0;
    each([&](unsigned key) {
      unsigned piece = (key - low) >> shift;
      if (key - low <= width) atomicAdd(&counts[piece % 8 * 32 + piece / 8], 1u);
    });
    ++step;
    __syncthreads();
    if (threadIdx.x < 32) find_piece(counts, range.left);
    __syncthreads();
    const unsigned* found = board->found[step % 2];
    range.low = low + (found[0] << shift), range.left = found[1], range.count = found[2];
    range.high = range.low + min(low + width - range.low, (1u << shift) - 1);  // without overflow
  }

  // by the first warp: all of them would wait for one another's instructions
  __device__ __forceinline__ void find_piece(const unsigned* counts, unsigned left) {
    unsigned n[8], sum = 0, eight = 31 - threadIdx.x, *found = board->found[step % 2];
#pragma unroll
    for (int i = 0; i < 8; ++i) n[i] = counts[(7 - i) * 32 + eight], sum += n[i];
    unsigned seen = warp_before(sum);
    bool here = seen < left && left <= seen + sum;
    if (__any_sync(~0u, here) ? !here : threadIdx.x > 0) return;
    unsigned piece = 0, rest = 0, count = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (seen < left && left <= seen + n[i])
        piece = eight * 8 + 7 - i, rest = left - seen, count = n[i];
      seen += n[i];
    }
    found[0] = piece, found[1] = rest, found[2] = count;
  }

  // low: a key that at least `rank` of the threads' best reach, and few more, or 1 if fewer have
  // one; high: the largest
  __device__ __forceinline__ Range reached(unsigned mine, int rank) {
    int count = blockDim.x;
    auto each = [&](auto f) {
      if (mine) f(mine);
    };
    Range range = range_of(each, rank, count);
    unsigned high = range.high;
    if (rank > count || high == 0) return {1, high};
    do narrow(each, range);
    while (range.count > 16 && range.low < range.high);
    return {range.count ? range.low : 1u, high};
  }

  // keys list[i].x, i < count, none 0 and all in `range` -> bound and room of the k best
  __device__ __forceinline__ void find_bound(const uint2* list, int count, int k, Range range) {
    bound = room = 0;
    __syncthreads();
    if (count <= k) return;
    auto each = [&](auto f) {
#pragma unroll 1
      for (int i = threadIdx.x; i < count; i += blockDim.x) f(list[i].x);
    };
    if (range.high == 0) range = range_of(each, k, count);
    range.left = k, range.count = count;
    while (range.count > range.left && range.count > FEW && range.low < range.high)
      narrow(each, range);
    bound = range.low - 1;
    if (range.count == range.left) return;  // the whole piece is chosen
    bound = range.low, room = range.left;
    if (range.low < range.high) rank_few(each, range);
  }

  template <class Each>
  __device__ __forceinline__ void rank_few(Each each, Range range) {
    each([&](unsigned key) {
      bool inside = key - range.low <= range.high - range.low;
      if (inside) board->few[atomicAdd(&board->places, 1u)] = key;
    });
    __syncthreads();
    unsigned* found = board->found[step % 2];
    if (threadIdx.x < 32) {
      unsigned lane = threadIdx.x, mine = lane < range.count ? board->few[lane] : 0u;
      unsigned above = 0, equal = 0;
      for (int other = 0; other < (int)range.count; ++other) {
        unsigned key = __shfl_sync(~0u, mine, other);
        above += key > mine, equal += key == mine;
      }
      if (lane < range.count && above < range.left && range.left <= above + equal)
        found[0] = mine, found[1] = range.left - above;  // equal keys write the same
      if (lane == 0) board->places = 0;
    }
    __syncthreads();
    bound = found[0], room = found[1];
  }

  // emit(rank, list[i]) for the k best of list[i], i < count, rank ascending with i -> how many.
  // range: of the keys, or {} if not known
  template <class Emit>
  __device__ __forceinline__ int choose(const uint2* list, int count, int k, Range range,
                                        Emit emit) {
    find_bound(list, count, k, range);
    int share = (count + blockDim.x - 1) / blockDim.x | 1;  // odd: 32 lanes meet 32 banks
    int begin = min(count, share * (int)threadIdx.x), end = min(count, begin + share);
    unsigned mine = 0, all;  // above it, and equal << 16
#pragma unroll 1
    for (int i = begin; i < end; ++i) mine += (list[i].x > bound) + ((list[i].x == bound) << 16);
    unsigned ahead = before(mine, all), level = ahead >> 16;
    ahead &= 0xffff;
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
      uint2 entry = list[i];
      if (entry.x > bound) emit(ahead++ + min(level, room), entry);
      if (entry.x == bound && level++ < room) emit(ahead + level - 1, entry);
    }
    return (all & 0xffff) + min(all >> 16, room);
  }
};

// ---- the list -----------------------------------------------------------------------------------

struct List {
  uint2* at;  // (size) in shared memory: keys and numbers in the row
  int size, used = 0;

  __device__ List(uint2* memory, int size) : at(memory), size(size) {}

  // what is above the bound of the block's scores, number(i) of them from `first` on
  __device__ __forceinline__ void append(Chooser& chooser, const float* scores, int first,
                                         float bound) {
    unsigned marks = 0, all, sum = 0;
    Places places;
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) mark_above(marks, 1u << i, scores[i], bound);
    if (__any_sync(~0u, marks != 0)) sum = places.find(marks);
    unsigned place = used + chooser.warps_before(sum, all);
    if (marks) place_marked(marks, scores, first + Row::number(0), place, places);
    used += all;
  }

  // 4 numbers of 8 bits, one for each 4 scores of a thread that are neighbours: how many are marked
  // in the lanes before, and in the whole warp
  struct Places {
    unsigned before = 0, total = 0;

    __device__ __forceinline__ unsigned find(unsigned marks) {  // -> the sum of the total
      unsigned each = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) each |= __popc(marks >> 4 * i & 15) << 8 * i;
      before = warp_before(each);
      total = __shfl_sync(~0u, before + each, 31);
      unsigned pairs = (total & 0xff00ff) + (total >> 8 & 0xff00ff);
      return (pairs & 0xffff) + (pairs >> 16);
    }
  };

  __device__ __forceinline__ void place_marked(unsigned marks, const float* scores, int number,
                                               unsigned place, Places places) {
#pragma unroll
    for (int turn = 0; turn < 4; ++turn) {
      if (marks >> 4 * turn & 15) {  // of a long row's 128 neighbours, two warps in three have none
        uint2* to = at + place + (places.before >> 8 * turn & 255);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (marks >> (4 * turn + i) & 1)
            *to++ = make_uint2(key_above(scores[4 * turn + i]), number + 128 * turn + i);
      }
      place += places.total >> 8 * turn & 255;
    }
  }

  // keep the k best alone; `spare` (k) is written over -> the new bound: later scores are above it
  __device__ __forceinline__ unsigned cut(Chooser& chooser, int k, uint2* spare) {
    auto emit = [&](unsigned rank, uint2 entry) { spare[rank] = entry; };
    used = chooser.choose(at, used, k, Range(), emit);
    __syncthreads();
    for (int i = threadIdx.x; i < used; i += blockDim.x) at[i] = spare[i];
    __syncthreads();
    return chooser.bound + (chooser.room == 0);
  }

  // all of row from begin to end that may be among the k best; `scores` hold the first 16 of a
  // thread. size is at least k and 16 for each thread.
  __device__ __forceinline__ void survive(Chooser& chooser, const Row& row, float* scores,
                                          int begin, int end, float bound, int k, uint2* spare) {
    int span = PER_THREAD * blockDim.x;
    for (int first = begin; first < end; first += span) {
      float next[PER_THREAD];
      if (first + span < end) row.load(next, first + span);
      row.hide(scores, first);
      append(chooser, scores, first, bound);
      if (used > size - span) bound = score_of(cut(chooser, k, spare));
#pragma unroll
      for (int i = 0; i < PER_THREAD; ++i) scores[i] = next[i];
    }
  }

  // the same of the whole row and without a guess, in fewer registers
  __device__ __forceinline__ void survive_slowly(Chooser& chooser, const Row& row, int k,
                                                 uint2* spare) {
    int span = PER_THREAD * blockDim.x;
    float bound = score_of(0), scores[PER_THREAD];
    used = 0;
    for (int first = 0; first < row.visible; first += span) {
      row.load(scores, first);
      row.hide(scores, first);
      append(chooser, scores, first, bound);
      if (used > size - span) bound = score_of(cut(chooser, k, spare));
    }
  }
};

// out (k) int64: name(number) of the k best of the list, ascending, padded with -1
template <class Name>
__device__ __forceinline__ void write_chosen(const List& list, Chooser& chooser, int k, Range range,
                                             long long* out, Name name) {
  auto emit = [&](unsigned rank, uint2 entry) { out[rank] = name(entry.y); };
  int chosen = chooser.choose(list.at, list.used, k, range, emit);
  for (int i = chosen + threadIdx.x; i < k; i += blockDim.x) out[i] = -1;
}

__device__ __forceinline__ void write_chosen(const List& list, Chooser& chooser, int k,
                                             long long* out) {
  write_chosen(list, chooser, k, Range(), out, [](unsigned i) { return (long long)i; });
}

// ---- whole kernels: the row, visible(), which says how many of its scores count, and k ----------

// A row of up to 16 scores for each thread of a block. Dynamic shared memory: 8 bytes * size, the
// longest row.
template <class Source, class Visible, class Name>
__device__ __forceinline__ void choose_short(Source row, Visible visible, int k, int size,
                                             long long* out, Name name) {
  extern __shared__ uint2 memory[];
  __shared__ Chooser::Board board;
  float scores[PER_THREAD];
  row.load(scores, 0);
  row.show(visible());
  Chooser chooser(&board);
  List list(memory, size);
  row.hide(scores, 0);
  Range range = chooser.reached(best_key(scores), k);
  list.append(chooser, scores, 0, score_of(range.low - 1));
  write_chosen(list, chooser, k, range, out, name);
}

// what a score of a longer row has to exceed: `rank` scores of the sample at least do
__device__ __forceinline__ float guess(Chooser& chooser, const Row& row, float* sample, int rank) {
  row.hide_sample(sample);
  return score_of(chooser.reached(best_key(sample), rank).low - 1);
}

// A longer row by one block. out also serves as `spare`; size is k and 16 for each thread.
template <class Visible>
__device__ __forceinline__ void choose_long(Row row, Visible visible, int k, int rank, int size,
                                            long long* out) {
  extern __shared__ uint2 memory[];
  __shared__ Chooser::Board board;
  float scores[PER_THREAD], sample[PER_THREAD];
  row.sample(sample);
  row.load(scores, 0);
  row.show(visible());
  Chooser chooser(&board);
  List list(memory, size);
  float bound = guess(chooser, row, sample, rank);
  list.survive(chooser, row, scores, 0, row.visible, bound, k, (uint2*)out);
  if (list.used < k && bound > score_of(0)) list.survive_slowly(chooser, row, k, (uint2*)out);
  write_chosen(list, chooser, k, out);
}

// A row by `parts` blocks and one more. Each block lists the survivors of its part of `length`
// scores, `limit` of them at most: found (parts, limit), counts (parts), with the highest bit where
// the bound was a guess.
const unsigned GUESSED = 1u << 31;
const int MOST_PARTS = 256;

template <class Visible>
__device__ __forceinline__ void filter_part(Row row, Visible visible, int part, int length, int k,
                                            int rank, int size, uint2* found, int limit,
                                            unsigned* count) {
  extern __shared__ uint2 memory[];
  __shared__ Chooser::Board board;
  int begin = part * length;
  float scores[PER_THREAD], sample[PER_THREAD];
  row.sample(sample);
  row.load(scores, begin);
  row.show(visible());
  Chooser chooser(&board);
  List list(memory, size);
  float bound = guess(chooser, row, sample, rank);
  int end = begin + max(0, min(row.visible - begin, length));
  list.survive(chooser, row, scores, begin, end, bound, k, found);
  if (list.used > limit) list.cut(chooser, k, found);
  __syncthreads();
  for (int i = threadIdx.x; i < list.used; i += blockDim.x) found[i] = list.at[i];
  if (threadIdx.x == 0) *count = list.used | (bound > score_of(0) ? GUESSED : 0u);
}

// the parts' lists, end to end, into one -> false where they hold too many, or too few by a guess
__device__ __forceinline__ bool gather_parts(List& list, Chooser& chooser, const uint2* found,
                                             const unsigned* counts, int parts, int limit, int k) {
  __shared__ unsigned starts[MOST_PARTS];
  unsigned mine = threadIdx.x < parts ? counts[threadIdx.x] : 0u, all;
  unsigned start = chooser.before(mine & ~GUESSED, all);
  if (threadIdx.x < parts) starts[threadIdx.x] = start;
  int guessed = __syncthreads_or(mine & GUESSED);
  if (all > list.size || (guessed && all < k)) return false;
  list.used = all;
#pragma unroll 4
  for (int i = threadIdx.x; i < (int)all; i += blockDim.x) {
    int part = 0;
#pragma unroll
    for (int half = MOST_PARTS / 2; half; half /= 2)
      if (part + half < parts && starts[part + half] <= i) part += half;
    list.at[i] = found[(long long)part * limit + i - starts[part]];
  }
  return true;
}

template <class Visible>
__device__ __forceinline__ void settle_parts(Row row, Visible visible, int k, const uint2* found,
                                             const unsigned* counts, int parts, int limit,
                                             long long* out) {
  extern __shared__ uint2 memory[];
  __shared__ Chooser::Board board;
  Chooser chooser(&board);
  List list(memory, MOST_LISTED);
  if (!gather_parts(list, chooser, found, counts, parts, limit, k)) {
    row.show(visible());
    list.survive_slowly(chooser, row, k, (uint2*)out);
  }
  write_chosen(list, chooser, k, out);
}
