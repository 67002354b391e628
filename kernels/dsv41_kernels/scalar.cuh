// Small functions of one number that several operations share, and the sum over a warp.
#pragma once

// The nearest bf16 value, ties to even; NaN stays NaN.
__device__ __forceinline__ float round_bf16(float x) {
  unsigned bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return __uint_as_float((bits | 0x400000u) & 0xffff0000u);
  return __uint_as_float((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
}

__device__ __forceinline__ float sigmoid(float x) {
  float decay = expf(-fabsf(x));
  return (x >= 0.f ? 1.f : decay) / (1.f + decay);
}

__device__ __forceinline__ float sqrt_softplus(float x) {
  if (x < -20.f) return expf(x * 0.5f);  // where e^x itself would lose its digits
  return sqrtf(fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))));
}

// The same sum in every lane, in one order.
__device__ __forceinline__ float warp_sum(float value) {
  for (int step = 16; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}
