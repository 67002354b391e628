#pragma once
#include "topk_ordered.cuh"
// The k best of the scores that a block of threads holds in registers, in five meetings.
//
//   bound   lanes form groups, k of them or more. The best of each is a score, so at least k scores
//           reach the least of these bests.
//   count   from there to a score that few exceed, two counters a thread: a score finds its counter
//           by two multiplications, which keep the order of scores and need no comparison
//   find    the counter of the k-th best: larger scores are chosen, and where it counts more than
//           are wanted of it, these few go to shared memory
//   write   a prefix sum places the chosen; every warp ranks the few by a look at each other
//
// Where the counter has too many (equal scores, or most of the best outside the range) `slowly`
// finds the k-th best by rounds of counting keys instead.
//
// topk_ordered.cuh puts what reaches its bound on a list first, finds a tighter bound for that and
// so meets twelve times; here nothing is moved before it is known to be chosen.

struct HeldBoard {  // in shared memory
  unsigned counts[2049];
  unsigned low[32], most[32], totals[32], sums[2][32], listed;
  alignas(16) unsigned found[4];  // three; they are read as four, and no neighbour with them
  unsigned long long few[FEW];
};

__device__ __forceinline__ float smaller(float a, float b) {  // as larger, subnormal numbers kept
  float out;
  asm("min.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
}

__device__ __forceinline__ float saturated(float x, float scale, float more) {  // NaN becomes 0
  float out;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(out) : "f"(x), "f"(scale), "f"(more));
  return out;
}

// scores: PER (8 or 16) of each thread, those of warp w are the numbers from 32 * PER * w on, and
// 128 neighbours are what it holds in 4 registers. ALL: there are k at least, all worth counting,
// and minus infinity stands for none. Marks of register i are bits 2 * i.
template <int PER, bool ALL>
struct Held {
  const float* scores;
  HeldBoard& board;
  unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;

  __device__ Held(const float* scores, HeldBoard& board) : scores(scores), board(board) {}

  __device__ __forceinline__ unsigned number(unsigned i) const {
    return warp * (32 * PER) + i / 4 * 128 + lane * 4 + i % 4;
  }

  __device__ __forceinline__ unsigned marks_above(float bound) const {
    unsigned marks = 0;
#pragma unroll
    for (int i = 0; i < PER; ++i) mark_above(marks, 1u << 2 * i, scores[i], bound);
    return marks;
  }

  __device__ __forceinline__ float score(unsigned number) const {  // of register `number`
    float x = scores[0];
#pragma unroll
    for (int i = 1; i < PER; ++i) x = number == i ? scores[i] : x;
    return x;
  }

  template <class Each>
  static __device__ __forceinline__ void visit(unsigned marks, Each each) {
    for (; marks; marks &= marks - 1) each((31u - __clz(marks & -marks)) / 2);
  }

  struct Bounds {  // keys: k scores reach `low` or it is 1, and few exceed `middle`
    unsigned low, middle, high;
  };

  __device__ __forceinline__ Bounds bounds(int k) const {
    float most = scores[0];
#pragma unroll
    for (int i = 1; i < PER; ++i) most = larger(most, scores[i]);
    unsigned best = order_key(most), least = best;
    if (ALL) {
      float some = most;
#pragma unroll
      for (int i = 0; i < PER; ++i)
        some = scores[i] > score_of(0) ? smaller(some, scores[i]) : some;
      least = best ? order_key(some) : ~0u;
    } else {
      if (k > blockDim.x) least = 0;
      for (int d = 1; d < 32 && 2 * d * k <= blockDim.x; d *= 2)
        least = max(least, __shfl_xor_sync(~0u, least, d));
    }
    least = __reduce_min_sync(~0u, least), best = __reduce_max_sync(~0u, best);
    if (lane == 0) board.low[warp] = least, board.most[warp] = best;
    __syncthreads();
    least = lane < warps ? board.low[lane] : ~0u, best = lane < warps ? board.most[lane] : 0u;
    unsigned low = max(1u, __reduce_min_sync(~0u, least));
    unsigned middle = __reduce_min_sync(~0u, best ? best : ~0u);
    return {low, middle, max(low, __reduce_max_sync(~0u, best))};
  }

  // the counter with the left-th best, how many are wanted of it, how many it has; `forward`: the
  // first counter has the best
  __device__ __forceinline__ void find(unsigned left, bool forward) const {
    unsigned pair = forward ? threadIdx.x : blockDim.x - 1 - threadIdx.x;
    uint2 some = ((const uint2*)board.counts)[pair];
    unsigned sum = some.x + some.y, total = __reduce_add_sync(~0u, sum);
    unsigned first = forward ? some.x : some.y;
    if (lane == 0) board.totals[warp] = total;
    __syncthreads();
    unsigned seen = __reduce_add_sync(~0u, lane < warp ? board.totals[lane] : 0u);
    if (seen < left && left <= seen + total) {
      seen += warp_before(sum);
      if (seen < left && left <= seen + sum) {
        bool second = left > seen + first;
        board.found[0] = 2 * pair + (second == forward);
        board.found[1] = left - seen - (second ? first : 0);
        board.found[2] = second ? sum - first : first;
      }
    }
    __syncthreads();
  }

  __device__ __forceinline__ void clear() const {
    ((uint2*)board.counts)[threadIdx.x] = make_uint2(0, 0);
  }

  // marked: chosen for sure; unsure: `count` in all, of whom `left` are chosen. Where count is 0
  // there is no answer.
  struct Choice {
    unsigned marked, unsure, left, count;
  };

  __device__ __forceinline__ Choice quickly(int k, Bounds at) const {
    const float WHOLE = 0x1p23f;  // from here on a float's last bits count whole numbers
    float low = score_of(at.low), scale = __fdividef(1.f, score_of(at.middle) - low);
    float last = 2 * blockDim.x - 1;
    unsigned begin = (unsigned)__cvta_generic_to_shared(board.counts) - 4 * __float_as_uint(WHOLE);
    float place[PER];
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      place[i] = fmaf(saturated(scores[i], scale, -low * scale), last, WHOLE);
      asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(begin + 4 * __float_as_uint(place[i]))
                   : "memory");
    }
    __syncthreads();
    find(k, false);
    unsigned found = board.found[0], left = board.found[1], count = board.found[2];
    if (found == 0 || (count > FEW && count > left)) return {0, 0, 0, 0};
    unsigned marks = 0;
    float shift = (1.f - (WHOLE + found)) / 2;
#pragma unroll
    for (int first = 0; first < PER; first += 8) {
      float digits = 0;  // of 4: 0 below, 1 in the counter, 2 above
#pragma unroll
      for (int i = 0; i < 8; ++i)
        digits = fmaf(saturated(place[first + i], 0.5f, shift), 2 << 2 * i, digits);
      marks |= (unsigned)digits << 2 * first;
    }
    unsigned marked = marks >> 1 & 0x55555555u, unsure = marks & 0x55555555u;
    if (count == left) marked |= unsure, unsure = 0, left = 0;
    return {marked, unsure, left, count};
  }

  __device__ __forceinline__ Choice slowly(int k, Bounds at) const {
    unsigned low = at.low, high = at.high, left = k, count;
    int digits = 32 - __clz(blockDim.x);  // of 2 * blockDim.x counters
    for (;;) {
      __syncthreads();
      clear();
      if (threadIdx.x == 0) board.found[0] = ~0u;
      __syncthreads();
      int shift = max(0, 32 - __clz(high - low) - digits);
      unsigned behind = ((high - low) >> shift) + 1;
      unsigned counted = marks_above(score_of(0)) & ~marks_above(score_of(high));
#pragma unroll
      for (int i = 0; i < PER; ++i) {
        unsigned place = (high - key_above(scores[i])) >> shift;
        atomicAdd(board.counts + (counted >> 2 * i & 1 ? min(place, behind) : behind), 1u);
      }
      __syncthreads();
      find(left, true);
      unsigned found = board.found[0];
      if (found >= behind) return {marks_above(score_of(0)), 0, 0, 1};  // fewer than k are eligible
      left = board.found[1], count = board.found[2];
      high -= found << shift, low = high - min(high - 1, (1u << shift) - 1);
      if (count == left || count <= FEW || shift == 0) break;
    }
    unsigned marks = marks_above(score_of(low - 1)), beyond = marks_above(score_of(high));
    if (count == left) return {marks, 0, 0, count};
    return {beyond, marks & ~beyond, left, count};
  }

  __device__ __forceinline__ Choice choose(int k) const {
    clear();
    if (threadIdx.x == 0) board.found[0] = 0, board.listed = 0;
    Bounds at = bounds(k);
    Choice choice = {0, 0, 0, 0};
    float width = score_of(at.middle) - score_of(at.low);
    if (at.middle > at.low && width > 0x1p-100f && width < 0x1p100f) choice = quickly(k, at);
    return choice.count ? choice : slowly(k, at);
  }

  // for each 4 registers, 16 bits: how many of the warp are marked before this thread's
  __device__ __forceinline__ unsigned long long places(unsigned marks) const {
    unsigned each = 0;
#pragma unroll
    for (int i = 0; i < PER / 4; ++i) each |= __popc(marks >> 8 * i & 255) << 8 * i;
    unsigned before = warp_before(each), total = __shfl_sync(~0u, before + each, 31);
    return wide(before) + wide(total) * 0x0001000100010000ull;
  }

  static __device__ __forceinline__ unsigned long long wide(unsigned bytes) {
    return (unsigned long long)__byte_perm(bytes, 0, 0x4342) << 32 | __byte_perm(bytes, 0, 0x4140);
  }

  // each(rank in the warp, register) of the marked ones
  template <class Each>
  __device__ __forceinline__ void rank_marked(unsigned marks, Each each) const {
    unsigned long long ahead = places(marks);
    visit(marks, [&](unsigned i) {
      each((unsigned)(ahead >> i / 4 * 16) & 0xffffu, i);
      ahead += 1ull << i / 4 * 16;
    });
  }

  // larger is better, and no two are equal
  __device__ __forceinline__ unsigned long long ranking(unsigned i) const {
    return (unsigned long long)key_above(score(i)) << 32 | ~number(i);
  }

  // Of few that are unsure, those in front of the warp's that are chosen; its own become marked.
  __device__ __forceinline__ unsigned rank_few(Choice& choice) const {
    bool some = lane < choice.count;
    unsigned long long mine = some ? board.few[lane] : 0;
    unsigned better = 0;
#pragma unroll 4
    for (int i = 0; i < choice.count; ++i) better += board.few[i] > mine;
    int last = __ffs(__ballot_sync(~0u, some && better == choice.left - 1)) - 1;
    unsigned long long least = __shfl_sync(~0u, mine, last);
    visit(choice.unsure,
          [&](unsigned i) { choice.marked |= (unsigned)(ranking(i) >= least) << 2 * i; });
    bool in_front = some && mine >= least && ~(unsigned)mine < warp * (32 * PER);
    return __popc(__ballot_sync(~0u, in_front));
  }

  // out (k) int64: name(number) of the k best, ascending, padded with -1
  template <class Name>
  __device__ __forceinline__ void write_best(int k, long long* out, Name name) const {
    Choice choice = choose(k);
    bool few = choice.left && choice.count <= FEW, equal = choice.left && !few;
    if (few)
      visit(choice.unsure,
            [&](unsigned i) { board.few[atomicAdd(&board.listed, 1u)] = ranking(i); });
    unsigned sum = __reduce_add_sync(~0u, __popc(choice.marked));
    unsigned unsure = equal ? __reduce_add_sync(~0u, __popc(choice.unsure)) : 0;
    if (lane == 0) board.sums[0][warp] = sum, board.sums[1][warp] = unsure;
    __syncthreads();
    sum = lane < warps ? board.sums[0][lane] : 0u;
    unsigned first = __reduce_add_sync(~0u, lane < warp ? sum : 0u);
    unsigned all = __reduce_add_sync(~0u, sum) + choice.left;
    if (few) first += rank_few(choice);
    if (equal) {  // the first ones are chosen
      unsigned before = __reduce_add_sync(~0u, lane < warp ? board.sums[1][lane] : 0u);
      unsigned room = choice.left - min(choice.left, before);
      rank_marked(choice.unsure,
                  [&](unsigned rank, unsigned i) {
                    choice.marked |= (unsigned)(rank < room) << 2 * i;
                  });
      first += min(choice.left, before);
    }
    rank_marked(choice.marked,
                [&](unsigned rank, unsigned i) { out[first + rank] = name(number(i)); });
    for (int i = all + threadIdx.x; i < k; i += blockDim.x) out[i] = -1;
  }
};

// A row of up to 16 scores for each thread of a block.
template <class Source, class Visible, class Name>
__device__ __forceinline__ void choose_held(Source row, Visible visible, int k, long long* out,
                                            Name name) {
  __shared__ HeldBoard board;
  float scores[PER_THREAD];
  row.load(scores, 0);
  row.show(visible());
  row.hide(scores, 0);
  Held<PER_THREAD, false>(scores, board).write_best(k, out, name);
}

// ---- a row by many blocks -----------------------------------------------------------------------

// The parts' lists, end to end, into one -> false where they hold too many, or too few by a guess.
// What most lists have is on its way before anyone knows how long they are.
__device__ __forceinline__ bool collect_parts(List& list, Chooser& chooser, const uint2* found,
                                              const unsigned* counts, int parts, int limit, int k) {
  const int AHEAD = 8, MANY = 48;  // so often so many entries of a warp's lists
  unsigned lane = threadIdx.x % 32, warps = blockDim.x / 32;
  unsigned each = (parts + warps - 1) / warps, begin = threadIdx.x / 32 * each;  // lists of a warp
  unsigned turns = max(1u, AHEAD / each);  // of a list
  uint4 first[AHEAD];
  unsigned mine = lane < each && begin + lane < parts ? __ldcg(counts + begin + lane) : 0u, all;
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) {
    unsigned part = i / turns;
    const uint2* from = found + (long long)(begin + part) * limit + i % turns * MANY;
    if (part < each && begin + part < parts && 2 * lane < MANY)
      first[i] = __ldcg((const uint4*)from + lane);
  }
  unsigned start = chooser.before(mine & ~GUESSED, all);
  int guessed = __syncthreads_or(mine & GUESSED);
  if (all > list.size || (guessed && all < k)) return false;
  list.used = all, mine &= ~GUESSED;
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) {
    unsigned part = min(i / turns, 31u), at = i % turns * MANY + 2 * lane;
    uint2* to = list.at + __shfl_sync(~0u, start, part) + at;
    unsigned count = __shfl_sync(~0u, mine, part);
    if (part >= each || 2 * lane >= MANY) continue;
    if (at < count) to[0] = make_uint2(first[i].x, first[i].y);
    if (at + 1 < count) to[1] = make_uint2(first[i].z, first[i].w);
  }
  unsigned done = (lane + 1) * turns <= AHEAD ? MANY * turns : 0;  // of the lane's list
  for (unsigned rest = __ballot_sync(~0u, mine > done); rest; rest &= rest - 1) {
    int part = __ffs(rest) - 1;
    uint2* to = list.at + __shfl_sync(~0u, start, part);
    unsigned count = __shfl_sync(~0u, mine, part);
    for (unsigned i = lane + __shfl_sync(~0u, done, part); i < count; i += 32)
      to[i] = __ldcg(found + (long long)(begin + part) * limit + i);
  }
  __syncthreads();
  return true;
}

// As settle_parts, but the list goes on into registers where that is large enough.
template <class Visible>
__device__ __forceinline__ void settle_held(Row row, Visible visible, int k, int size,
                                            const uint2* found, const unsigned* counts, int parts,
                                            int limit, long long* out) {
  const int PER = 8;
  extern __shared__ uint2 memory[];
  __shared__ HeldBoard board;
  __shared__ Chooser::Board other;
  Chooser chooser(&other);
  List list(memory, size);
  row.show(visible());
  bool known = collect_parts(list, chooser, found, counts, parts, limit, k);
  if (known && list.used >= k && list.used <= PER * blockDim.x) {
    float scores[PER];
    Held<PER, true> held(scores, board);
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      int j = held.number(i);
      scores[i] = score_of(j < list.used ? list.at[j].x : 0u);
    }
    held.write_best(k, out, [&](unsigned i) { return (long long)list.at[i].y; });
    return;
  }
  if (!known) list.survive_slowly(chooser, row, k, (uint2*)out);
  write_chosen(list, chooser, k, out);
}

// Counts to `last` and begins again at 0. Who has counted sees what all wrote who counted before.
__device__ __forceinline__ unsigned count_around(unsigned* counter, unsigned last) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(last)
               : "memory");
  return before;
}

// A part of a row as filter_part has it; the last block of the row that gets so far settles it.
// arrived: how many have got so far, 0 before and after.
template <class Visible>
__device__ __forceinline__ void choose_part(Row row, Visible visible, int part, int parts,
                                            int length, int k, int rank, int size, uint2* found,
                                            int limit, unsigned* counts, unsigned* arrived,
                                            long long* out) {
  __shared__ bool last;
  filter_part(row, visible, part, length, k, rank, size, found + (long long)part * limit, limit,
              counts + part);
  __syncthreads();
  if (threadIdx.x == 0) last = count_around(arrived, parts - 1) == parts - 1;
  __syncthreads();
  if (last) settle_held(row, visible, k, size, found, counts, parts, limit, out);
}
