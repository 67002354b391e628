#pragma once
// One index score, as dsv41/indexer.py defines it:
//
//   I[t, j] = sum_a w[t, a] * relu(q[t, a] . k_j)        a = 0 .. HEADS - 1, in this order
//
// A dot is one chain of fused multiply-adds over the channels, from the first to the last; head sums
// are one chain of rounded additions, as NumPy adds along a row. So a score has the same bits in
// every kernel, for every neighbour and every batch. Macros: HEADS, CHANNELS (a multiple of 32),
// PACKED (1: keys are MXFP4 records, CHANNELS / 2 code bytes, low nibble first, then one E8M0
// exponent per 32; 0: float32), BF16 (1: every stage is rounded to bf16, as in the release).
// Powers of two below 2^-126 are flushed to zero.
const int GROUP = 32, GROUPS = CHANNELS / GROUP;
const int RECORD_BYTES = PACKED ? CHANNELS / 2 + GROUPS : 4 * CHANNELS;

__device__ __forceinline__ float bf16_nearest(float x) {
  unsigned u = __float_as_uint(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return x;
  return __uint_as_float((u + 0x7fffu + (u >> 16 & 1)) & 0xffff0000u);
}

__device__ __forceinline__ float stored(float x) { return BF16 ? bf16_nearest(x) : x; }

// 2^(code - 127); 255 means NaN
__device__ __forceinline__ float e8m0(unsigned code) {
  return code == 255 ? __uint_as_float(0x7fc00000u) : __uint_as_float(code << 23);
}

// code 0 .. 15 -> 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives
__device__ __forceinline__ float e2m1(unsigned code) {
  unsigned size = code & 7, exponent = size >> 1;
  unsigned bits = exponent ? (exponent + 126) << 23 | (size & 1) << 22 : size ? 0x3f000000u : 0u;
  return __uint_as_float(bits | (code & 8) << 28);
}

// four bytes of a record; records whose size is no multiple of four are not aligned
__device__ __forceinline__ unsigned load_word(const unsigned char* from) {
  if (RECORD_BYTES % 4 == 0) return *(const unsigned*)from;
  return from[0] | from[1] << 8 | from[2] << 16 | (unsigned)from[3] << 24;
}

// the channels 32 g .. 32 g + 31 of a key
__device__ __forceinline__ void decode_group(const unsigned char* record, int g, float* out) {
#if PACKED
  float scale = e8m0(record[CHANNELS / 2 + g]);
  const unsigned char* codes = record + g * (GROUP / 2);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    unsigned word = load_word(codes + 4 * i);
#pragma unroll
    for (int n = 0; n < 8; ++n) out[8 * i + n] = e2m1(word >> 4 * n & 15) * scale;
  }
#else
  const float4* quads = (const float4*)record + g * (GROUP / 4);
#pragma unroll
  for (int i = 0; i < GROUP / 4; ++i) {
    float4 four = quads[i];
    out[4 * i] = four.x, out[4 * i + 1] = four.y, out[4 * i + 2] = four.z, out[4 * i + 3] = four.w;
  }
#endif
}

// channel c of a key
__device__ __forceinline__ float decode_one(const unsigned char* record, int c) {
#if PACKED
  float scale = e8m0(record[CHANNELS / 2 + c / GROUP]);
  return e2m1(record[c / 2] >> c % 2 * 4 & 15) * scale;
#else
  return ((const float*)record)[c];
#endif
}

// dots[a] = q[a] . k for one key; q (HEADS, CHANNELS) in shared memory
__device__ __forceinline__ void head_dots(const float* q, const unsigned char* record, float* dots) {
#pragma unroll
  for (int a = 0; a < HEADS; ++a) dots[a] = 0.f;
#pragma unroll 1
  for (int g = 0; g < GROUPS; ++g) {
    float key[GROUP];
    decode_group(record, g, key);
#pragma unroll
    for (int a = 0; a < HEADS; ++a) {
      const float4* quads = (const float4*)(q + a * CHANNELS + g * GROUP);
#pragma unroll
      for (int i = 0; i < GROUP / 4; ++i) {
        float4 four = quads[i];
        dots[a] = __fmaf_rn(four.x, key[4 * i], dots[a]);
        dots[a] = __fmaf_rn(four.y, key[4 * i + 1], dots[a]);
        dots[a] = __fmaf_rn(four.z, key[4 * i + 2], dots[a]);
        dots[a] = __fmaf_rn(four.w, key[4 * i + 3], dots[a]);
      }
    }
  }
}

__device__ __forceinline__ float weigh_heads(const float* dots, const float* w) {
  float sum = 0.f;
#pragma unroll
  for (int a = 0; a < HEADS; ++a)
    sum = __fadd_rn(sum, stored(__fmul_rn(fmaxf(stored(dots[a]), 0.f), w[a])));
  return stored(sum);
}

__device__ __forceinline__ float score(const float* q, const float* w, const unsigned char* record) {
  float dots[HEADS];
  head_dots(q, record, dots);
  return weigh_heads(dots, w);
}

// The same bits in few registers and much time, for a rare case inside another kernel's loop.
__device__ __forceinline__ float score_slowly(const float* q, const float* w,
                                              const unsigned char* record) {
  float sum = 0.f;
#pragma unroll 1
  for (int a = 0; a < HEADS; ++a) {
    float dot = 0.f;
#pragma unroll 1
    for (int c = 0; c < CHANNELS; ++c)
      dot = __fmaf_rn(q[a * CHANNELS + c], decode_one(record, c), dot);
    sum = __fadd_rn(sum, stored(__fmul_rn(fmaxf(stored(dot), 0.f), w[a])));
  }
  return stored(sum);
}

// q (HEADS, CHANNELS) and w (HEADS) of query t into shared memory, by all threads of the block
__device__ __forceinline__ void load_query(const float* q, const float* w, long long t, float* to_q,
                                           float* to_w) {
  for (int i = threadIdx.x; i < HEADS * CHANNELS; i += blockDim.x)
    to_q[i] = q[t * HEADS * CHANNELS + i];
  for (int a = threadIdx.x; a < HEADS; a += blockDim.x) to_w[a] = w[t * HEADS + a];
}

// the record of entry j of a request whose page numbers are `pages`
__device__ __forceinline__ const unsigned char* record_of(const unsigned char* keys,
                                                          const long long* pages, int per_page,
                                                          int j) {
  return keys + (pages[j / per_page] * per_page + j % per_page) * RECORD_BYTES;
}
