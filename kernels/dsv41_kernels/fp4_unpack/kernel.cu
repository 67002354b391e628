// FP4 records (rows, RECORD) uint8 -> out (rows, CHANNELS) f32 or bf16 (BF16), every value code * scale.
// Contract: fp4_unpack in dsv41/quant.py, the same bits. The product has at most 6 significant bits and
// is exact in both types; NaN scales give NaN. Macros as in fp4_pack.
//
// build: CHANNELS=512 GROUP=16 SCALE_E4M3=1 BF16=1
// build: CHANNELS=512 GROUP=16 SCALE_E4M3=1 BF16=0
// build: CHANNELS=128 GROUP=32 SCALE_E4M3=0 BF16=1
// build: CHANNELS=128 GROUP=32 SCALE_E4M3=0 BF16=0
#include "../blockscale.cuh"
#include "../stores.cuh"

constexpr int CODES = CHANNELS / 2, RECORD = CODES + CHANNELS / GROUP;

// v1: one thread an element, the value from a table of eight.
extern "C" __global__ void fp4_unpack_v1(const u8* records, Element* out, long long elements) {
  const float value[8] = {0.f, 0.5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f};
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i >= elements) return;
  const u8* record = records + i / CHANNELS * RECORD;
  int channel = (int)(i % CHANNELS);
  u32 code = record[channel / 2] >> (4 * (channel % 2)) & 15u;
  float signed_value = code & 8 ? -value[code & 7] : value[code & 7];
  store_one(out + i, mul_rn(signed_value, scale_value(record[CODES + channel / GROUP])));
}

// v2: one thread makes one 16-byte store (8 bf16 or 4 f32), so that a warp writes 512 bytes without
// gaps and reads its codes as words; v1 stored 2 or 4 bytes a thread and read every byte twice.
extern "C" __global__ void __launch_bounds__(256)
    fp4_unpack_v2(const u8* records, Element* out, long long units) {
  Unit at = unit_at(blockIdx.x * (long long)blockDim.x + threadIdx.x);
  if (at.index >= units) return;
  const u8* record = records + at.row * RECORD;
  u32 codes = load_word<RECORD, PER_STORE / 2>(record + at.in_row * (PER_STORE / 2));
  float scale = scale_value(record[CODES + at.in_row * PER_STORE / GROUP]);
  float v[PER_STORE];
  for (int i = 0; i < PER_STORE; ++i) v[i] = mul_rn(e2m1_value(codes >> (4 * i)), scale);
  store_unit(out, at.index, v);
}

#if BF16
// v3: no floats in between. A byte permutation looks up four codes at once in a table of eight bytes,
// one table for the upper and one for the lower bytes of the bf16 values, another spreads four
// signs, and one packed product scales two values. A thread makes two stores, a warp's width apart,
// so that both are without gaps and the second load is under way while the first is worked on.

// The four codes in the low half of `codes` -> upper bytes of their bf16 values, with signs.
__device__ inline u32 upper_bytes(u32 codes, u32 index) {
  u32 twice = __byte_perm(codes, 0, 0x1100);  // byte k holds code k, in its low or high nibble
  u32 signs = select(0xFF00FF00u, twice, twice << 4);
  return select(0x80808080u, signs, __byte_perm(0x3F3F3F00u, 0x40404040u, index));
}

__device__ inline void values_of(u32 codes, u32 scales, u32* words) {
  for (int half = 0; half < 2; ++half) {
    u32 four = codes >> (16 * half), index = four & 0x7777u;
    u32 high = upper_bytes(four, index);
    u32 low = __byte_perm(0xC0800000u, 0xC0804000u, index);
    words[2 * half] = mul_bf16x2(__byte_perm(low, high, 0x5140u), scales);
    words[2 * half + 1] = mul_bf16x2(__byte_perm(low, high, 0x7362u), scales);
  }
}

extern "C" __global__ void __launch_bounds__(256)
    fp4_unpack_v3(const u8* __restrict__ records, Element* __restrict__ out, long long units) {
  long long first = blockIdx.x * 2ll * blockDim.x + threadIdx.x / 32 * 64 + threadIdx.x % 32;
  if (first >= units) return;
  u32 codes[2], bytes[2], words[4];
#pragma unroll
  for (int k = 0; k < 2; ++k) {  // both loads, before anything waits for them
    Unit at = unit_at(min(first + 32 * k, units - 1));
    const u8* record = records + at.row * RECORD;
    codes[k] = load_word<RECORD, 4>(record + at.in_row * 4);
    bytes[k] = record[CODES + at.in_row * 8 / GROUP];
  }
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    u32 scale = __float_as_uint(scale_value(bytes[k])) >> 16;
    values_of(codes[k], scale | scale << 16, words);
    if (first + 32 * k < units) store_words(out, first + 32 * k, words);
  }
}
#endif
