// Attention of the released model over listed records, RoPE on q and back-rotation of o included.
//
//   q, out (T, 64, 512) f32; positions (T,) int64 and freqs (pairs,) f32;
//   near: window records of 528 bytes, 512 E4M3 codes and 16 E8M0 scales; far: main records of 288
//   bytes, 512 E2M1 codes, low nibble first, and 32 E4M3 scales; near_rows (T, W), far_rows (T, K)
//   int64, negative where empty; sink (64,) f32. HEADS: how many a block takes, for v3 only.
// Rounding points are the definition's: q after its rotation; p = exp(s - running maximum of its
// chunk of 64 records) before it meets the values, not in the denominator; o before and after it
// turns back. A row past the end of the records is not read: the query gives NaN, and the word
// `bad` says where. Codes must be finite and E8M0 scales below 2^16: the encoders make nothing
// else.
//
// v1 is `plain` of sparse_attn/kernel.cu: a block per head, which decodes every record for itself,
// twice.
//
// v3 `tiles` (HEADS 64 or 16): one block for that many heads. Chunks of 64 records are copied as
// bytes in the background, decoded once for all heads into bf16 and used by the tensor cores as
// keys and as values. Per token of 640 records that is 215 KB from memory and 84 MFLOP; v1 reads
// and decodes them 128 times.
//   Decoding places bits instead of converting: the bits of an E2M1 or E4M3 code, put where bf16
//   has its sign, exponent and mantissa, are the value times 2^-126 or 2^-120; one product with the
//   scale times 2^118 or 2^112 leaves 2^-8, which the score's factor and the last division take
//   back. All of it is exact.
//   Few tokens fill the device when their heads are spread over four blocks. No score and no value
//   is a sum over blocks, so o has the same bits however many tokens come along.
//
// v4 `pipeline`: decoding beside the products instead of between them, see pipeline.cuh.
//
// v5 `cluster`: v4's sums, spread over 64 blocks for calls of few tokens, see cluster.cuh.
//
// v6 `relay`: v4's sums, two warpgroups that score in turn, see relay.cuh. It takes two or four
// blocks per token where that many fit (SPLIT), and v5 is left to calls of very few tokens.
//
// v7 `resident`: one warpgroup that scores, two that add, one that decodes, and blocks that stay for
// many tokens, see resident.cuh; for calls of more tokens than half as many as there are
// multiprocessors.
//
// v8 `quad`: v4's sums by a cluster of four or two blocks per token, which share out scores as v5
// does, see quad.cuh; between v5 and v7, but for the tokens that only v6's blocks serve at once.
//
// Measured on an H200, cold, in microseconds, tokens of 128 + 512 records:
//
//            1 token     16     32    128    512    8192
//   v1           423    812  1,482  5,305 20,585
//   v3            45     45     45     75    283   4,302
//   v4            49     54     55     53    200   2,881
//   v5            11
//   v6            28     29     29     42    159   2,292
//   v7                   37     36     39    132   1,797
//   v8            19     19     29

// build: sm_90a C=512 NEAR=1 FAR=2 BF16=1
// build: sm_90a C=512 NEAR=1 FAR=2 BF16=1 VALUE_BLOCKS=8
// build: sm_90a C=512 NEAR=1 FAR=2 BF16=1 SHARERS=2
// build: sm_90a C=512 NEAR=1 FAR=2 BF16=1 SPLIT=2
// build: sm_90a C=512 NEAR=1 FAR=2 BF16=1 SPLIT=4
// build: C=512 NEAR=1 FAR=2 BF16=1 HEADS=64
// build: C=512 NEAR=1 FAR=2 BF16=1 HEADS=16

#include "records.cuh"
#include "tensor.cuh"

constexpr int CHUNK = 64;
constexpr float NEVER = -1e30f;

static_assert(C == 512 && NEAR == 1 && FAR == 2 && BF16 == 1, "stored records of 512 channels");
constexpr int ALL_HEADS = 64, NEAR_BYTES = 528, FAR_BYTES = 288;
constexpr int O_STRIDE = C + 4;  // floats from row to row of o on its way out: other banks
constexpr float LOG2_E = 1.4426950408889634f, LIFT = 256.f;  // records are kept as value * 2^-8

extern __shared__ __align__(1024) float4 shared[];

// A piece of 16 bytes, eight channels, from eight E2M1 or E4M3 codes, times the scale (twice the
// same bf16). Its channels are 0 4 1 5 2 6 3 7: placing bits makes pairs (i, i + 4). The order is
// the same for q, so scores do not see it, and it is undone where o leaves.
__device__ uint4 place_e2m1(unsigned w, unsigned scale) {
  // the sum of two shifts, which is one product: the sign to bit 15, the size to bits 8 to 6
  const unsigned even = 0x000f000fu, odd = 0x00f000f0u, placed = 0x81c081c0u, v = w >> 8;
  return make_uint4(multiply_pairs((w & even) * (4096 + 64) & placed, scale),
                    multiply_pairs((w & odd) * (256 + 4) & placed, scale),
                    multiply_pairs((v & even) * (4096 + 64) & placed, scale),
                    multiply_pairs((v & odd) * (256 + 4) & placed, scale));
}
__device__ uint4 place_e4m3(unsigned low, unsigned high, unsigned scale) {
  const unsigned sign = 0x80008000u, size = 0x07f007f0u;
  unsigned u = __byte_perm(low, high, 0x5410), v = __byte_perm(low, high, 0x7632);
  return make_uint4(multiply_pairs((u << 8 & sign) | (u << 4 & size), scale),
                    multiply_pairs((u & sign) | (u >> 4 & size), scale),
                    multiply_pairs((v << 8 & sign) | (v << 4 & size), scale),
                    multiply_pairs((v & sign) | (v >> 4 & size), scale));
}
__device__ unsigned twice(unsigned bf16_bits) { return bf16_bits * 0x10001u; }
__device__ unsigned e4m3_scale(unsigned code) {
  return twice(__float_as_uint(e4m3(code) * 0x1p118f) >> 16);
}
__device__ unsigned e8m0_scale(unsigned code) {
  return twice(code > 142 ? 0x7fc0 : (code + 112) << 7);
}

// Eight channels of q, turned by the angles from pair `first` on (none below 0) and rounded;
// channels 0 4 1 5 2 6 3 7, as records have them.
__device__ uint4 turned_piece(float4 low, float4 high, int first, const float2* angle) {
  float x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int n = 0; n < 4; ++n)
    if (first + n >= 0) turn_pair(x[2 * n], x[2 * n + 1], angle[first + n]);
  return make_uint4(bf16_pair(x[0], x[4]), bf16_pair(x[1], x[5]), bf16_pair(x[2], x[6]),
                    bf16_pair(x[3], x[7]));
}
// Piece i of q.
__device__ uint4 query_piece(const float4* q, int i, const float2* angle, int pairs) {
  return turned_piece(__ldg(q + 2 * i), __ldg(q + 2 * i + 1), i % (C / 8) * 4 - (C / 2 - pairs),
                      angle);
}

// Four rounded channels of o from pair `pair` on, turned back where that is not below 0.
__device__ void turn_back(float4& x, int pair, const float2* angle) {
  if (pair + 1 < 0) return;
  if (pair >= 0) turn_pair(x.x, x.y, make_float2(angle[pair].x, -angle[pair].y));
  turn_pair(x.z, x.w, make_float2(angle[pair + 1].x, -angle[pair + 1].y));
  x = rounded(x);
}

// Rounded o from `heads` rows of `stride` floats that begin at channel `first`, turned back, to
// out.
__device__ void write_rows(float* out, const float* rows, int stride, int first, int channels,
                           int heads, const float2* angle, int pairs, int threads) {
  const int quads = channels / 4;
  for (int i = threadIdx.x; i < heads * quads; i += threads) {
    float4 x = *reinterpret_cast<const float4*>(rows + i / quads * stride + i % quads * 4);
    turn_back(x, (first / 4 + i % quads) * 2 - (C / 2 - pairs), angle);
    reinterpret_cast<float4*>(out + i / quads * C + first)[i % quads] = x;
  }
}

#ifdef HEADS
#include "tiles.cuh"
#else
#include "pipeline.cuh"
#include "relay.cuh"
#if SPLIT == 1
#include "cluster.cuh"
#include "resident.cuh"
#include "quad.cuh"
#endif
#endif
