// Instructions that C++ has no name for, one function each.
//
// CuPy compiles with -ftz=true, which turns C++'s float operators into ones that flush subnormals to
// zero. Scales reach down to 2^-127, so `mul_rn` asks for the plain instruction by name.
#pragma once
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ inline float mul_rn(float a, float b) {
  float out;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
}

__device__ inline float div_rn(float a, float b) {
  float out;
  asm("div.rn.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
}

// 1 / a with an error of one unit in the last place.
__device__ inline float rcp_approx(float a) {
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(a));
  return out;
}

// Two E4M3 codes, nearest even, saturating; lo in bits 0-7.
__device__ inline u32 e4m3x2(float lo, float hi) {
  u16 out;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(hi), "f"(lo));
  return out;
}

// Two E4M3 codes -> two f16, exact.
__device__ inline u32 f16x2_of_e4m3x2(u32 codes) {
  u32 out;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(out) : "h"((u16)codes));
  return out;
}

// Two f32 -> two f16, nearest even; lo in the low half.
__device__ inline u32 f16x2(float lo, float hi) {
  u32 out;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(hi), "f"(lo));
  return out;
}

__device__ inline u32 bf16x2(float lo, float hi) {
  u32 out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(hi), "f"(lo));
  return out;
}

__device__ inline float f32_of_f16(u32 half) {
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"((u16)half));
  return out;
}

// Two products of bf16 each; subnormals are kept.
__device__ inline u32 mul_bf16x2(u32 a, u32 b) {
  u32 out;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

// Bits of a where the mask is set, of b elsewhere: one instruction, which the compiler makes two of.
__device__ inline u32 select(u32 mask, u32 a, u32 b) {
  u32 out;
  asm("lop3.b32 %0, %1, %2, %3, 0xE2;" : "=r"(out) : "r"(a), "r"(mask), "r"(b));
  return out;
}

// A word that other blocks read or write meanwhile, as it is in L2: whole, in no order with others.
__device__ inline u64 load_relaxed(const u64* at) {
  u64 out;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(out) : "l"(at) : "memory");
  return out;
}
__device__ inline void store_relaxed(u64* at, u64 value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

// Likewise 16 bytes, which come and go as one.
__device__ inline uint4 load_relaxed(const uint4* at) {
  u64 low, high;
  asm volatile(
      "{ .reg .b128 all; ld.relaxed.gpu.global.b128 all, [%2]; mov.b128 {%0, %1}, all; }"
      : "=l"(low), "=l"(high)
      : "l"(at)
      : "memory");
  return make_uint4((u32)low, (u32)(low >> 32), (u32)high, (u32)(high >> 32));
}
__device__ inline void store_relaxed(uint4* at, uint4 value) {
  asm volatile(
      "{ .reg .b128 all; mov.b128 all, {%1, %2}; st.relaxed.gpu.global.b128 [%0], all; }" ::"l"(at),
      "l"((u64)value.y << 32 | value.x), "l"((u64)value.w << 32 | value.z)
      : "memory");
}

// Fetches the line of 128 bytes around `at` into L2, and waits for nothing.
__device__ inline void prefetch(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}
