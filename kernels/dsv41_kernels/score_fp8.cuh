#pragma once
#define WARP_GROUPS
#include "score_mma.cuh"
// Index scores by FP8 products of warp groups, for 32 heads of 128 channels and MXFP4 keys.
//
// E2M1 is E4M3 by placing bits: sign to 7, magnitude to 4..2 is x * 2^-6. That is half the work of
// making bf16, and the products run at twice its rate. An FP8 product keeps few bits when it adds, so
// no sum may mix scales: each of the four groups of 32 channels is one product of its own, whose terms
// are whole multiples of one power of two below 2^13 times it, hence exact. The groups are then added
// in float32, each times the key's scale.
//
// A query's values become E4M3 as they are, times a power of two per head that goes into the head's
// weight, and so does the 2^6; exact for MXFP4 values whose scales differ by up to 2^14. Bytes lie as wgmma wants them, in
// the order of channels in which keys unpack: even channels of a word of 8 codes, then odd ones.
#if PACKED && HEADS == 32 && CHANNELS == 128

const int QUERY_BYTES = HEADS * CHANNELS;  // 4 groups of 1,024

// where byte (head, channel) of an encoded query lies
__device__ __forceinline__ int encoded_place(int head, int channel) {
  int group = channel / 32, word = channel % 32 / 8, slot = channel % 8;
  return group * 1024 + slot % 2 * 512 + head * 16 + word * 4 + slot / 2;
}

// |x| <= 448 -> E4M3, towards zero; `exact` becomes false where that loses something
__device__ __forceinline__ unsigned e4m3(float x, bool& exact) {
  unsigned bits = __float_as_uint(x), size = bits & 0x7fffffffu, code;
  if (size >= 0x3c800000u) {  // 2^-6, the smallest normal number
    code = (size >> 20) - (120 << 3);
    exact &= (size & 0xfffffu) == 0;
  } else {
    float steps = __uint_as_float(size) * 512.f;
    code = (unsigned)steps;
    exact &= (float)code == steps;
  }
  return (bits >> 24 & 0x80) | code;
}

// One warp encodes one head of q (CHANNELS): bytes into `to`, and the factor that makes up for it, a
// power of two. All lanes; false where E4M3 does not hold a value.
__device__ __forceinline__ bool encode_head(const float* q, int head, unsigned char* to,
                                            float& factor) {
  int lane = threadIdx.x % 32;
  float4 some = ((const float4*)q)[lane];
  float values[4] = {some.x, some.y, some.z, some.w}, top = 0.f;
  for (int i = 0; i < 4; ++i) top = fmaxf(top, fabsf(values[i]));
  for (int d = 16; d; d /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, d));
  // the largest value gets the exponent 8: MXFP4 mantissas are 1 or 1.5, and 1.5 * 2^8 < 448
  int exponent = max(20, min(220, (int)(__float_as_uint(top) >> 23))) - 127 - 8;
  float down = __uint_as_float((127 - exponent) << 23);
  factor = __uint_as_float((127 + exponent + 6) << 23);
  bool exact = top * down <= 448.f;
  for (int i = 0; i < 4; ++i) {
    float x = fminf(fmaxf(values[i] * down, -448.f), 448.f);
    to[encoded_place(head, 4 * lane + i)] = (unsigned char)e4m3(x, exact);
  }
  return __ballot_sync(0xffffffffu, !exact) == 0;
}

// the codes of one word: even ones, odd ones
__device__ __forceinline__ void unpack_fp8(unsigned word, unsigned& even, unsigned& odd) {
  even = (word << 4 & 0x80808080u) | (word << 2 & 0x1c1c1c1cu);
  odd = (word & 0x80808080u) | (word >> 2 & 0x1c1c1c1cu);
}

// 16 keys of a warp: rows g and g + 8
struct Keys {
  unsigned codes[4][4];  // [group][a of start_product]
  float upper[4], lower[4];
};

// 2^(e - 127) of byte i; the 2^6 that its codes lack is part of the query's factors
__device__ __forceinline__ float key_scale(unsigned scales, int i) {
  return __uint_as_float((i < 3 ? scales << (23 - 8 * i) : scales >> 1) & 0x7f800000u);
}

// the records of rows g and g + 8, read by the four lanes of each g
__device__ __forceinline__ Keys load_keys(const unsigned* upper, const unsigned* lower) {
  int c = threadIdx.x % 4;
  Keys keys;
  unsigned upper_scales = upper[16], lower_scales = lower[16];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    unpack_fp8(upper[4 * i + c], keys.codes[i][0], keys.codes[i][2]);
    unpack_fp8(lower[4 * i + c], keys.codes[i][1], keys.codes[i][3]);
    keys.upper[i] = key_scale(upper_scales, i), keys.lower[i] = key_scale(lower_scales, i);
  }
  return keys;
}

// an encoded query in shared memory and its weights -> scores of rows g and g + 8; a whole warp group
__device__ __forceinline__ float2 score_keys(const unsigned char* encoded, const Query& query,
                                             const Keys& keys) {
  float parts[4][16];
  begin_products();
#pragma unroll
  for (int i = 0; i < 4; ++i) start_product(parts[i], keys.codes[i], matrix_at(encoded + 1024 * i));
  finish_products();
  float dots[4][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    settle_product(parts[i]);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      float scale = j % 4 < 2 ? keys.upper[i] : keys.lower[i];
      dots[j / 4][j % 4] = i ? __fmaf_rn(parts[i][j], scale, dots[j / 4][j % 4]) : parts[i][j] * scale;
    }
  }
  return weigh_tile(dots, query);
}

// weights (HEADS) f32, as the encoding left them, into the registers of weigh_tile
__device__ __forceinline__ void load_weights(const float* weights, Query& query) {
  int c = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    query.exact_weights[n] = *(const float2*)(weights + 8 * n + 2 * c);
    query.weights[n] = bf16_pair(query.exact_weights[n].x, query.exact_weights[n].y);
  }
}

// A query in shared memory.
struct Encoded {
  alignas(128) unsigned char bytes[QUERY_BYTES];
  float weights[HEADS];
  int inexact;
};

// by the whole block
__device__ __forceinline__ const Encoded* encode_query(const float* q, const float* w) {
  __shared__ Encoded to;
  if (threadIdx.x == 0) to.inexact = 0;
  __syncthreads();
  for (int head = threadIdx.x / 32; head < HEADS; head += blockDim.x / 32) {
    float factor;
    bool held = encode_head(q + head * CHANNELS, head, to.bytes, factor);
    if (threadIdx.x % 32 == 0) to.weights[head] = w[head] * factor;
    if (threadIdx.x % 32 == 0 && !held) to.inexact = 1;
  }
  publish_shared();
  __syncthreads();
  return &to;
}

// How v4 scores: a warp group together, each warp a tile of its own. A query that E4M3 does not hold is
// scored like v1.
template <int COUNT = 8>
struct OnFp8 {
  static const bool PARTIAL = false;
  static const int WARPS = COUNT;
  const float *q, *w;
  const Encoded* encoded;
  Query query;
  __device__ OnFp8(const float* q, const float* w) : q(q), w(w) {}
  __device__ __forceinline__ void prepare() {
    encoded = encode_query(q, w);
    load_weights(encoded->weights, query);
  }
  __device__ static int place() { return threadIdx.x % 32; }
  __device__ __forceinline__ float tile_score(const unsigned char* records) const {
    int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    if (encoded->inexact) return score_slowly(q, w, records + lane * RECORD_BYTES);
    float result = 0.f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned* upper = (const unsigned*)(records + (4 * g + 2 * half) * RECORD_BYTES);
      Keys keys = load_keys(upper, upper + RECORD_BYTES / 4);
      float2 scores = score_keys(encoded->bytes, query, keys);
      if (c / 2 == half) result = c % 2 ? scores.y : scores.x;
    }
    return result;
  }
};
#endif
