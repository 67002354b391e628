#pragma once
#include "score_fp8.cuh"
// Index scores by exact INT8 products, for 32 heads of 128 channels and MXFP4 keys.
//
// Twice an E2M1 value is one of 0 1 2 3 4 6 8 12, and where the scales of a key's four groups
// differ by up to 2^3, all 128 channels are whole numbers up to 96 times one power of two; so is a
// head of an MXFP4 query, up to 112. Sums of their products stay below 2^21: one chain of products,
// no scale in it, and as a float32 the result has the bits that the chains of score_fp8.cuh give.
// Where the powers of two are multiplied in is free as long as nothing leaves the range of normal
// numbers: those of the heads go into the weights, that of the key into its score. A key or a query
// that is not like that is left to score_fp8.cuh.
//
// A lane unpacks the 32 channels of one group, so it needs one table of eight bytes per key, and
// another with what they leave of 128. PRMT reads a table by four codes at once, and makes zero of
// those with the sign bit.
#if PACKED && HEADS == 32 && CHANNELS == 128

const int MOST_NUMBER = 112;  // E4M3 holds 4 times that, too

// One head of q: four whole numbers of each lane, a byte each, times a factor.
struct Head {
  unsigned numbers;
  int sum;  // of all lanes
  float weight;
  bool whole;
};

// some: the lane's channels, w: the head's weight. A warp, all lanes.
__device__ __forceinline__ Head whole_head(float4 some, float w) {
  float values[4] = {some.x, some.y, some.z, some.w};
  unsigned top = 0;
  for (int i = 0; i < 4; ++i) top = max(top, __float_as_uint(fabsf(values[i])));
  top = __reduce_max_sync(0xffffffffu, top) >> 23;
  int exponent = top ? min(max((int)top, 67), 187) - 133 : 0;  // of the largest: 2^6
  float down = __uint_as_float((127 - exponent) << 23);
  Head head = {};
  head.weight = w * __uint_as_float((127 + exponent) << 23);
  bool whole = fabsf(head.weight) >= 0x1p-60f && fabsf(head.weight) <= 0x1p60f || w == 0.f;
  for (int i = 0; i < 4; ++i) {
    float x = values[i] * down;
    int number = __float2int_rn(x);
    whole &= (float)number == x && abs(number) <= MOST_NUMBER;
    whole &= (__float_as_uint(x) & 0xfffffu) == 0;  // four digits, as E4M3 has
    head.numbers |= (number & 255) << 8 * i;
  }
  head.sum = __reduce_add_sync(0xffffffffu, __dp4a((int)head.numbers, 0x01010101, 0));
  head.whole = __all_sync(0xffffffffu, whole);
  return head;
}

// where a lane's four numbers of a head lie, among `rows` heads: in matrices of 32 channels, of
// which lane c of a product finds 8, all of group c
__device__ __forceinline__ int number_place(int head, int rows) {
  int lane = threadIdx.x % 32;
  return lane % 8 * rows * 16 + head * 16 + lane / 8 * 4;
}

// four magnitudes of a table of eight, or 0 for codes with a sign; __byte_perm would ignore signs
__device__ __forceinline__ unsigned look_up(uint2 table, unsigned codes) {
  unsigned found;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(found) : "r"(table.x), "r"(table.y), "r"(codes));
  return found;
}

// What a lane knows of a group: eight magnitudes, and 128 less each of them.
struct Table {
  uint2 magnitudes, rest;
};

// 0 1 2 3 4 6 8 12, times 2^shift (0 .. 3; only 5 bits count)
__device__ __forceinline__ Table table_of(unsigned shift) {
  unsigned low = __funnelshift_l(0, 0x03020100u, shift);
  unsigned high = __funnelshift_l(0, 0x0c080604u, shift);
  return {{low, high}, {0x80808080u - low, 0x80808080u - high}};
}

// the lower four codes -> 128 + value, a byte each: 128 less the magnitude, and twice that where no
// sign is. No byte carries into the next, and a multiplication leaves to PRMT the units it needs.
__device__ __forceinline__ unsigned four_int8(unsigned codes, const Table& table) {
  unsigned sum, sizes = codes & 0x77777777u;
  asm("mad.lo.u32 %0, %1, 2, %2;"
      : "=r"(sum)
      : "r"(look_up(table.magnitudes, codes)), "r"(look_up(table.rest, sizes)));
  return sum;
}

// What the four scales of a key say: the shift of each group, in a byte, and the factor of all. The
// largest must lie between 2^-31 and 2^32, or all be 0; else, or where one is too small, misfit is
// not 0.
struct Scales {
  unsigned shifts, misfit;
  float factor;
};

__device__ __forceinline__ Scales read_scales(unsigned scales) {
  unsigned pairs = __vmaxu2(scales & 0x00ff00ffu, scales >> 8 & 0x00ff00ffu);
  unsigned top = __vmaxu2(pairs, pairs >> 16) & 0xffffu;
  Scales read;
  read.shifts = scales - (top - 3) * 0x01010101u;
  read.misfit = read.shifts & 0xfcfcfcfcu | (scales ? top - 96 & ~63u : 0);
  read.factor = scales ? __uint_as_float(top - 4 << 23) : 0.f;  // 2^(top - 3 - 127 - 1)
  return read;
}

// the score of a key from the sum over heads, of which -0 becomes 0 as in a longer sum
__device__ __forceinline__ float score_of_sum(float sum, float factor) {
  float score = __fmaf_rn(sum, factor, 0.f);
#if BF16
  unsigned bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(score), "f"(0.f));
  score = __uint_as_float(bits);
#endif
  return score;
}

// Keys count 128 too much, which saves a sign, so products start at `start`: where sums come out as
// the bits of 1.5 * 2^23 + dot, a float32 from which one subtraction takes dot.
const unsigned MAGIC = 0x4b400000u;

struct Whole {  // a query in shared memory
  alignas(16) unsigned char bytes[QUERY_BYTES];
  float weights[HEADS];
  int4 start[HEADS / 2];  // of two heads, twice: for two rows of keys
};

// How index_scores v6 and v4 of the choose_ ops score. Products of single warps find the query in
// registers, and integer work goes on beside them; those of a warp group are waited for by four.
template <int COUNT = 8>
struct OnInt8 {
  static const bool PARTIAL = true;
  static const int WARPS = COUNT, EACH = HEADS / WARPS;
  typedef OnFp8<COUNT> Otherwise;
  float4 some[EACH];
  float weights[EACH];
  Query query;
  uint2 heads[4][4];        // [words of a group][heads 8 n + g], b of mma_u8
  int start, mine, own, c;  // c of mma_u8 in shared memory, the lane's codes in a tile, its key
  unsigned failed;

  __device__ __forceinline__ OnInt8(const float* q, const float* w) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      some[i] = ((const float4*)q)[(warp + i * WARPS) * (CHANNELS / 4) + lane];
      weights[i] = w[warp + i * WARPS];
    }
  }

  __device__ __forceinline__ void prepare() {
    __shared__ Whole to;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
    bool whole = true;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      int n = warp + i * WARPS;
      Head head = whole_head(some[i], weights[i]);
      *(unsigned*)(to.bytes + number_place(n, HEADS)) = head.numbers;
      if (lane == 0) to.weights[n] = head.weight;
      if (lane < 2) ((int*)(to.start + n / 2))[2 * lane + n % 2] = MAGIC - 128 * head.sum;
      whole &= head.whole;
    }
    failed = __syncthreads_or(!whole);
    load_weights(to.weights, query);
    c = kept(lane % 4), mine = kept(row(g) * RECORD_BYTES + 16 * c), own = kept(row(g) + 4 * c);
    start = kept((int)__cvta_generic_to_shared(to.start + c));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const unsigned* from = (const unsigned*)(to.bytes + 1024 * i + 16 * (8 * n + g) + 4 * c);
        heads[i][n] = {from[0], from[512 / 4]};
      }
    }
  }

  // Lane 4 g + c reads words 4 c .. 4 c + 3 of the keys row(g) + 4 j, in 32 different banks, and
  // answers for the key where j is c.
  __device__ static int row(int g) { return g % 4 + g / 4 * 16; }
  __device__ __forceinline__ int place() const { return own; }

  __device__ __forceinline__ float tile_score(const unsigned char* records) {
    const unsigned char* group = records + mine;
    Scales scales = read_scales(*(const unsigned*)(group + c * (4 * RECORD_BYTES - 16) + 64));
    failed |= scales.misfit;
    const int4* sums = (const int4*)__cvta_shared_to_generic(start);
    float result = 0.f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      unsigned codes[4][4];
#pragma unroll
      for (int lower = 0; lower < 2; ++lower) {
        int j = 2 * half + lower;
        Table table = table_of(__shfl_sync(0xffffffffu, scales.shifts, j, 4) >> 8 * c);
        const unsigned short* fours = (const unsigned short*)(group + 4 * j * RECORD_BYTES);
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // by two bytes: loads have units to spare, shifts have not
          codes[i][lower] = four_int8(fours[2 * i], table);
          codes[i][2 + lower] = four_int8(fours[2 * i + 1], table);
        }
      }
      int dots[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          int4 first = sums[4 * n];
          mma_u8(dots[n], codes[i], heads[i][n], i ? dots[n] : &first.x);
        }
      }
      float numbers[4][4];
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        int dot = dots[i / 4][i % 4];
        numbers[i / 4][i % 4] = __fadd_rn(__int_as_float(dot), -__uint_as_float(MAGIC));
      }
      float2 found = add_heads(numbers, query);
      if (c == 2 * half) result = found.x;
      if (c == 2 * half + 1) result = found.y;
    }
    return score_of_sum(result, scales.factor);
  }
};
#endif
