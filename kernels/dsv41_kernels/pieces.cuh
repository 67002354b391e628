// A piece is 16 neighbouring channels, the share of one thread in the packing kernels.
//
// CHANNELS is a multiple of GROUP (16 or 32), so a row is whole pieces and a group is one piece or
// the pieces of two neighbouring lanes. BF16 says what an element of x is.
#pragma once
#include "blockscale.cuh"

#if BF16
typedef u16 Element;
__device__ inline float element(Element x) { return __uint_as_float((u32)x << 16); }
#else
typedef float Element;
__device__ inline float element(Element x) { return x; }
#endif

struct Piece {
  long long index, row;
  int in_row;
  bool mine;   // false in threads behind the last piece, which repeat it and store nothing
  bool leads;  // writes the group's scale
};

__device__ inline Piece piece_of_thread(long long pieces) {
  Piece p;
  long long thread = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  // trap: where lanes 2k and 2k + 1 share a group, the last pair is repeated as a pair
  p.mine = thread < pieces;
  p.index = p.mine ? thread : pieces - 1 - (GROUP == 16 ? 0 : (pieces - 1 - thread) & 1);
  p.row = (u64)p.index / (CHANNELS / 16);
  p.in_row = (int)(p.index - p.row * (CHANNELS / 16));
  p.leads = GROUP == 16 || p.in_row % 2 == 0;
  return p;
}

// The maximum over the group: over this lane's piece, or over two lanes'.
__device__ inline u32 group_max(u32 value) {
  return GROUP == 16 ? value : max(value, __shfl_xor_sync(0xFFFFFFFFu, value, 1));
}

// A piece as it lies in memory: 32 bytes of bf16 or 64 of f32, loaded 16 at a time.
struct Raw {
  uint4 words[sizeof(Element)];
};

__device__ inline Raw load_raw(const Element* x, long long piece) {
  const uint4* from = reinterpret_cast<const uint4*>(x + 16 * piece);
  Raw raw;
  for (int i = 0; i < (int)sizeof(Element); ++i) raw.words[i] = from[i];
  return raw;
}

__device__ inline void words_of(const Raw& raw, u32* w) {
  for (int i = 0; i < (int)sizeof(Element); ++i) {
    uint4 four = raw.words[i];
    w[4 * i] = four.x, w[4 * i + 1] = four.y, w[4 * i + 2] = four.z, w[4 * i + 3] = four.w;
  }
}

__device__ inline void unpack_raw(const Raw& raw, float* v) {
  u32 w[4 * sizeof(Element)];
  words_of(raw, w);
  for (int i = 0; i < 16; ++i) {
#if BF16
    v[i] = i % 2 ? high_bf16(w[i / 2]) : low_bf16(w[i / 2]);
#else
    v[i] = __uint_as_float(w[i]);
#endif
  }
}

__device__ inline void load16(const Element* x, long long piece, float* v) {
  unpack_raw(load_raw(x, piece), v);
}

// Which of a piece are bad: read again, as this almost never happens and must cost no registers.
__device__ inline void report_piece(u64* bad, const Element* x, long long piece) {
#pragma unroll 1
  for (int i = 0; i < 16; ++i) {
    float value = element(x[16 * piece + i]);
    if (not_finite(magnitude(value))) report(bad, 16 * piece + i, value);
  }
}

// `count` words (2 or 4) to a record that starts at a multiple of RECORD bytes, as wide as it allows.
template <int RECORD>
__device__ inline void store_codes(u8* to, const u32* words, int count) {
  if (RECORD % 16 == 0 && count == 4) {
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  } else if (RECORD % 8 == 0) {
    for (int i = 0; i < count; i += 2)
      *reinterpret_cast<uint2*>(to + 4 * i) = make_uint2(words[i], words[i + 1]);
  } else if (RECORD % 4 == 0) {
    for (int i = 0; i < count; ++i) *reinterpret_cast<u32*>(to + 4 * i) = words[i];
  } else {
    for (int i = 0; i < 4 * count; ++i) to[i] = (u8)(words[i / 4] >> (8 * (i % 4)));
  }
}
