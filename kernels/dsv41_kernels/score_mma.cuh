#pragma once
#include "products.cuh"
#include "score.cuh"
// Index scores of 32 keys at once on tensor cores, for 32 heads of 128 channels and MXFP4 keys.
//
// Keys are the rows and heads the columns of a product. Codes go from a record straight into the
// registers of the product: a lane takes one word of each of the four scale groups, and since an
// order of channels may be chosen freely if queries and keys share it, nothing is ever shuffled.
// E2M1 becomes bf16 by placing bits: sign to 15, the three magnitude bits to 8..6 are, read as bf16,
// x * 2^-126; one bf16 multiplication by the scale makes it exact. 2^-64 of the scale moves into the
// queries, so that no factor leaves the range of bf16: keys with scales from 2^-61 to 2^65 are exact.
//
// Queries must be numbers that bf16 holds, as index_queries makes them. Dots are exact where their
// groups' scales do not lie far apart; sums over heads run in the tensor cores' own order (BF16) or
// over 8 heads a lane, then lanes (float32). Against score.cuh, scores differ by rounding of float32
// before the last step: with BF16 they are equal but for rare ones that lay on a tie.
#if PACKED && HEADS == 32 && CHANNELS == 128

const int TILE = 32, RUN = 8, RUN_BYTES = RUN * RECORD_BYTES, TILE_BYTES = TILE * RECORD_BYTES;
const unsigned ONES = 0x3f803f80u;

struct Query {
  unsigned channels[4][8][2];  // [heads 8 n + g][step][b0, b1] of mma_bf16
  unsigned weights[4];         // bf16 pairs of heads 8 n + 2 c, + 1
  float2 exact_weights[4];
};

__device__ __forceinline__ unsigned bf16_pair(float low, float high) {
  return __float_as_uint(low) >> 16 | (__float_as_uint(high) & 0xffff0000u);
}

// q (HEADS, CHANNELS), w (HEADS) of one query
__device__ __forceinline__ Query load_fragments(const float* q, const float* w) {
  const float shift = 18446744073709551616.f;  // 2^64, see above
  int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
  Query query;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      const float* from = q + (8 * n + g) * CHANNELS + 8 * (step / 2 * 4 + c) + step % 2 * 2;
      float2 low = *(const float2*)from, high = *(const float2*)(from + 4);
      query.channels[n][step][0] = bf16_pair(low.x * shift, high.x * shift);
      query.channels[n][step][1] = bf16_pair(low.y * shift, high.y * shift);
    }
    query.exact_weights[n] = *(const float2*)(w + 8 * n + 2 * c);
    query.weights[n] = bf16_pair(query.exact_weights[n].x, query.exact_weights[n].y);
  }
  return query;
}

// 8 codes, times the scale, as pairs of codes (p, p + 4)
__device__ __forceinline__ void unpack(unsigned word, unsigned scale, unsigned* pairs) {
  pairs[0] = multiply_bf16x2((word << 12 & 0x80008000u) | (word << 6 & 0x01c001c0u), scale);
  pairs[1] = multiply_bf16x2((word << 8 & 0x80008000u) | (word << 2 & 0x01c001c0u), scale);
  pairs[2] = multiply_bf16x2((word << 4 & 0x80008000u) | (word >> 2 & 0x01c001c0u), scale);
  pairs[3] = multiply_bf16x2((word & 0x80008000u) | (word >> 6 & 0x01c001c0u), scale);
}

// byte i of the four scales as a pair of bf16 2^(e - 127 + 126 - 64)
__device__ __forceinline__ unsigned scale_pair(unsigned scales, int i) {
  return (scales >> 8 * i & 255) * 0x00800080u + 62 * 0x00800080u;
}

// dots of 16 keys and 32 heads -> sums over heads of the keys in rows g and g + 8
__device__ __forceinline__ float2 add_heads(const float (*dots)[4], const Query& query) {
#if BF16
  float sums[4] = {};
#pragma unroll
  for (int n = 0; n < 4; n += 2) {
    unsigned weighted[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = dots[n + i / 2] + i % 2 * 2;
      weighted[i] = multiply_bf16x2(relu_bf16x2(pair[0], pair[1]), query.weights[n + i / 2]);
    }
    mma_bf16(sums, weighted, ONES, ONES);  // the layout of d is that of a
  }
  return {sums[0], sums[2]};
#else
  float low = 0.f, high = 0.f;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    float2 w = query.exact_weights[n];
    low += fmaxf(dots[n][0], 0.f) * w.x, low += fmaxf(dots[n][1], 0.f) * w.y;
    high += fmaxf(dots[n][2], 0.f) * w.x, high += fmaxf(dots[n][3], 0.f) * w.y;
  }
  for (int d = 1; d < 4; d *= 2) {
    low += __shfl_xor_sync(0xffffffffu, low, d);
    high += __shfl_xor_sync(0xffffffffu, high, d);
  }
  return {low, high};
#endif
}

// the same, rounded: their scores
__device__ __forceinline__ float2 weigh_tile(const float (*dots)[4], const Query& query) {
  float2 sums = add_heads(dots, query);
  return {stored(sums.x), stored(sums.y)};
}

// tile: 32 records in shared memory -> the score of record `lane`. A lane reads rows 4 g .. 4 g + 3,
// so that 8 rows of 17 words and 4 words in each meet 32 different banks.
__device__ __forceinline__ float tile_score_bf16(const unsigned char* tile, const Query& query) {
  int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
  float result = 0.f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const unsigned* upper = (const unsigned*)(tile + (4 * g + 2 * half) * RECORD_BYTES);
    const unsigned* lower = upper + RECORD_BYTES / 4;
    unsigned upper_scales = upper[16], lower_scales = lower[16];
    float dots[4][4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      unsigned a[4], b[4];
      unpack(upper[4 * i + c], scale_pair(upper_scales, i), a);
      unpack(lower[4 * i + c], scale_pair(lower_scales, i), b);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        unsigned rows[4] = {a[2 * h], b[2 * h], a[2 * h + 1], b[2 * h + 1]};
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const unsigned* step = query.channels[n][2 * i + h];
          mma_bf16(dots[n], rows, step[0], step[1]);
        }
      }
    }
    float2 scores = weigh_tile(dots, query);
    if (c / 2 == half) result = c % 2 ? scores.y : scores.x;
  }
  return result;
}

// start copying a tile: run(i) is where 8 neighbouring records begin, on 16 bytes, valid(i) how many
// bytes of it exist. One warp.
template <class Run, class Valid>
__device__ __forceinline__ void copy_tile(unsigned char* tile, Run run, Valid valid) {
  const int CHUNKS = RUN_BYTES / 16;
#pragma unroll
  for (int chunk = threadIdx.x % 32; chunk < TILE / RUN * CHUNKS; chunk += 32) {
    int i = chunk / CHUNKS, offset = chunk % CHUNKS * 16;
    int bytes = max(0, min(16, valid(i) - offset));
    copy_async(tile + 16 * chunk, run(i) + (bytes ? offset : 0), bytes);
  }
}

// How v2 scores: one query in registers, made by each thread for itself.
struct OnBf16 {
  static const bool PARTIAL = false;
  static const int WARPS = 8;
  const float *q, *w;
  Query query;
  __device__ OnBf16(const float* q, const float* w) : q(q), w(w) {}
  __device__ __forceinline__ void prepare() { query = load_fragments(q, w); }
  __device__ static int place() { return threadIdx.x % 32; }
  __device__ __forceinline__ float tile_score(const unsigned char* records) const {
    return tile_score_bf16(records, query);
  }
};

// the same where it lies in a row, and where all of it exists, too
__device__ __forceinline__ void copy_row(unsigned char* tile, const unsigned char* from,
                                         int bytes) {
#pragma unroll 1
  for (int i = threadIdx.x % 32 * 16; i < TILE_BYTES; i += 32 * 16)
    copy_async(tile + i, from + (i < bytes ? i : 0), max(0, min(16, bytes - i)));
}

__device__ __forceinline__ void copy_whole_tile(unsigned char* tile, const unsigned char* from) {
  int middle = 1024 + 16 * (threadIdx.x % 32);
  copy_async_around(tile + middle, from + middle, middle < TILE_BYTES - 1024);
}

// A block's warps score `count` keys for the query q, w: take(i, score) for each. Every warp takes
// a tile of its own in turn, with STAGES of them in flight in its part of `rings`; in the last turn
// some are empty, and groups of four warps without any leave it out. run(i) is where record i lies,
// with the 7 behind it, or, `whole`, the 31 behind it, or, IN_A_ROW, all. A lane gets the score of
// record place() of a tile. Where a PARTIAL scorer has `failed`, another one scores all of it again.
const int STAGES = 4;

template <class Scorer, bool IN_A_ROW = false, class Run, class Take>
__device__ __forceinline__ void stream_scores(unsigned char* rings, int count, const float* q,
                                              const float* w, bool whole, Run run, Take take) {
  const int WARPS = Scorer::WARPS;
  int warp = threadIdx.x / 32;
  unsigned ring = kept((unsigned)__cvta_generic_to_shared(rings) + warp * (STAGES * TILE_BYTES));
  auto stage = [&](unsigned turn) {
    return (unsigned char*)__cvta_shared_to_generic(ring + turn % STAGES * TILE_BYTES);
  };
  // the same for all warps of a group
  int turns = (count - warp / 4 * 4 * TILE + WARPS * TILE - 1) / (WARPS * TILE);
  auto start = [&](unsigned turn) {
    int first = (turn * WARPS + warp) * TILE;
    if (whole && first + TILE <= count)
      copy_whole_tile(stage(turn), run(first));
    else if (IN_A_ROW && (int)turn < turns)
      copy_row(stage(turn), run(first), (count - first) * RECORD_BYTES);
    else if ((int)turn < turns)
      copy_tile(
          stage(turn), [&](int i) { return run(first + i * RUN); },
          [&](int i) { return min(count - first - i * RUN, RUN) * RECORD_BYTES; });
    commit_copies();
  };
  Scorer scorer(q, w);
  for (int turn = 0; turn < STAGES - 1; ++turn) start(turn);
  scorer.prepare();  // while the first tiles are under way
  for (unsigned turn = 0; (int)turn < turns; ++turn) {
    wait_copies<STAGES - 2>();
    __syncwarp();  // copies of the other lanes, too; and nobody still reads the stage refilled now
    start(turn + STAGES - 1);
    float score = scorer.tile_score(stage(turn));
    int i = (turn * WARPS + warp) * TILE + scorer.place();
    if (i < count) take(i, score);
  }
  if constexpr (Scorer::PARTIAL)
    if (__syncthreads_or(scorer.failed))
      stream_scores<typename Scorer::Otherwise, IN_A_ROW>(rings, count, q, w, whole, run, take);
}
#endif
