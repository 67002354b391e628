// A unit is what one thread of the unpacking kernels writes: one 16-byte store of neighbours in a row.
#pragma once
#include "ptx.cuh"

#if BF16
typedef u16 Element;
constexpr int PER_STORE = 8;
__device__ inline void store_one(Element* to, float value) { *to = (u16)bf16x2(value, 0.f); }
#else
typedef float Element;
constexpr int PER_STORE = 4;
__device__ inline void store_one(Element* to, float value) { *to = value; }
#endif

struct Unit {
  long long index, row;
  int in_row;
};

__device__ inline Unit unit_at(long long index) {
  Unit unit;
  unit.index = index;
  unit.row = (u64)index / (CHANNELS / PER_STORE);
  unit.in_row = (int)(index - unit.row * (CHANNELS / PER_STORE));
  return unit;
}

// BYTES (2 or 4) of a record that starts at a multiple of RECORD, little endian.
template <int RECORD, int BYTES>
__device__ inline u32 load_word(const u8* from) {
  if (BYTES == 4 && RECORD % 4 == 0) return *reinterpret_cast<const u32*>(from);
  if (BYTES == 2 && RECORD % 2 == 0) return *reinterpret_cast<const u16*>(from);
  u32 word = 0;
  for (int i = 0; i < BYTES; ++i) word |= (u32)from[i] << (8 * i);
  return word;
}

__device__ inline void store_words(Element* out, long long unit, const u32* w) {
  reinterpret_cast<uint4*>(out)[unit] = make_uint4(w[0], w[1], w[2], w[3]);
}

__device__ inline void store_unit(Element* out, long long unit, const float* v) {
#if BF16
  u32 w[4] = {bf16x2(v[0], v[1]), bf16x2(v[2], v[3]), bf16x2(v[4], v[5]), bf16x2(v[6], v[7])};
#else
  u32 w[4] = {__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
              __float_as_uint(v[3])};
#endif
  store_words(out, unit, w);
}
