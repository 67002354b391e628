// Block scaling on the device: the scale of a group, and the codes of its members (dsv41/quant.py).
//
// SCALE_E4M3 chooses the kind of scale: 1 is E4M3(amax / largest), 0 is the smallest power of two
// that is at least amax * (1 / largest), as an E8M0 byte. All functions give the definition's bits.
#pragma once
#include "ptx.cuh"

struct Scale {
  u32 byte;    // as stored
  float value;
  float high;  // high + low = 1 / value to 2^-45; low is 0 for powers of two
  float low;
};

// amax as the bits of a float: unsigned integers order magnitudes, and put inf and NaN on top.
__device__ inline u32 magnitude(float x) { return __float_as_uint(x) & 0x7FFFFFFFu; }
__device__ inline bool not_finite(u32 amax_bits) { return amax_bits >= 0x7F800000u; }

// The word that errors.py reads: the first bad element wins. 0 nan, 1 inf, 2 -inf.
__device__ inline void report(u64* bad, long long position, float x) {
  u64 kind = x != x ? 0 : __float_as_uint(x) >> 31 ? 2 : 1;
  atomicMax(bad, ~(4 * (u64)position + kind));
}

// E4M3 by the definition's integer steps, for 0 <= x <= 448.
__device__ inline u32 e4m3_code(float x) {
  u32 bits = __float_as_uint(x);
  u32 rounded = (bits + 0x7FFFFu + ((bits >> 20) & 1)) >> 20;
  return x < 0.015625f ? (u32)rintf(x * 512.f) : rounded - (120u << 3);
}

// trap: bytes below 8 are subnormals of the float that the shift makes, hence mul_rn
__device__ inline float e4m3_value(u32 byte) {
  float value = mul_rn(__uint_as_float((byte & 0x7Fu) << 20), 0x1p120f);
  value = (byte & 0x7Fu) == 0x7Fu ? __uint_as_float(0x7FC00000u) : value;
  return __uint_as_float(__float_as_uint(value) | (byte & 0x80u) << 24);
}

__device__ inline u32 e8m0_code(float x) {
  u32 bits = __float_as_uint(x);
  return (bits >> 23) + ((bits & 0x7FFFFFu) != 0);
}

// Byte 0 is 2^-127, a subnormal; 255 is NaN.
__device__ inline float e8m0_value(u32 byte) {
  u32 bits = byte == 0 ? 0x00400000u : byte << 23;
  return __uint_as_float(byte == 255 ? 0x7FC00000u : bits);
}

__device__ inline float scale_value(u32 byte) {
  return SCALE_E4M3 ? e4m3_value(byte) : e8m0_value(byte);
}

// The stored scale of a group, step by step as the definition has it.
__device__ inline u32 scale_code_plain(float amax, float largest) {
  if (SCALE_E4M3) return e4m3_code(fminf(div_rn(amax, largest), 448.f));
  return e8m0_code(mul_rn(amax, 1.f / largest));
}

// The same byte without a division, and what its members are multiplied with.
//
// amax / 6 is correctly rounded by a multiplication and one correction, as r = 1/6 is itself rounded
// correctly (Markstein). high + low = 1 / value because 1 - value * high is exact in one fma.
__device__ inline Scale scale_of(float amax, float largest) {
  Scale s;
  if (SCALE_E4M3) {
    float r = 1.f / largest, q = amax * r;
    q = fmaf(fmaf(-largest, q, amax), r, q);
    s.byte = e4m3x2(q, 0.f) & 0xFFu;
    s.value = e4m3_value(s.byte);
    s.high = rcp_approx(s.value);
    s.low = fmaf(-s.value, s.high, 1.f) * s.high;
  } else {
    s.byte = e8m0_code(mul_rn(amax, 1.f / largest));
    s.value = e8m0_value(s.byte);
    s.high = __uint_as_float((254u - s.byte) << 23);
    s.low = 0.f;
  }
  return s;
}

// x / value, as far as rounding to a code can tell.
//
// A float32 x that is not exactly (a tie of E2M1) * value differs from it by more than the error of
// this sum, and one that is comes out as the tie itself: so the codes are those of the division.
__device__ inline float ratio(float x, Scale s) {
  return SCALE_E4M3 ? fmaf(x, s.high, x * s.low) : mul_rn(x, s.high);
}

// E2M1 of |y|: adding 2^22 times its power of two leaves the number of grid steps in the last bits.
__device__ inline u32 e2m1_code(float y) {
  float m = fminf(fabsf(y), 6.f);
  u32 power = max(__float_as_uint(m) & 0x7F800000u, 0x3F800000u);
  u32 shifted = power + (22u << 23);
  u32 steps = __float_as_uint(m + __uint_as_float(shifted)) - shifted;
  return steps + (power >> 22) - 254u;
}

// E2M1 bits at the place of a float's exponent and mantissa are its value * 2^-126.
__device__ inline float e2m1_value(u32 code) {
  return mul_rn(__uint_as_float((code & 8u) << 28 | (code & 7u) << 22), 0x1p126f);
}

// Four E4M3 codes of v * factor, factor a power of two.
__device__ inline u32 e4m3x4(const float* v, float factor) {
  u32 low = e4m3x2(mul_rn(v[0], factor), mul_rn(v[1], factor));
  return low | e4m3x2(mul_rn(v[2], factor), mul_rn(v[3], factor)) << 16;
}

__device__ inline u32 sign_bit(float x) { return __float_as_uint(x) >> 31; }

// Two bf16 in a word -> float, exact.
__device__ inline float low_bf16(u32 word) { return __uint_as_float(word << 16); }
__device__ inline float high_bf16(u32 word) { return __uint_as_float(word & 0xFFFF0000u); }
