// Block scaling there and back, without codes: x -> round(x / scale) * scale, the scale shared by
// GROUP neighbouring numbers. One thread a number, 8 bytes each; a group is 16 or 32 lanes of a
// warp, which find their maximum by exchange. Contract: dsv41.quant.fake_blocks.
//
// MANTISSA and BIAS describe the element, SCALE_E4M3 the kind of scale. Products and quotients are
// written in PTX because CuPy compiles with -ftz=true: scales reach down to 2^-127.
//
// build: GROUP=32 MANTISSA=3 BIAS=7 SCALE_E4M3=0
// build: GROUP=32 MANTISSA=1 BIAS=1 SCALE_E4M3=0
// build: GROUP=16 MANTISSA=1 BIAS=1 SCALE_E4M3=1

__device__ float times(float a, float b) {
  float y;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

__device__ float over(float a, float b) {
  float y;
  asm("div.rn.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// The nearest number with `mantissa` bits: adding c and taking it away leaves the grid's steps.
__device__ float rounded(float x, float largest, int mantissa, int bias) {
  float size = fminf(fabsf(x), largest);
  float power = __uint_as_float(__float_as_uint(size) & 0x7f800000u);
  power = fmaxf(power, __uint_as_float((unsigned)(128 - bias) << 23));  // the smallest normal
  float c = power * __uint_as_float((unsigned)(127 + 23 - mantissa) << 23);
  return copysignf(__fsub_rn(__fadd_rn(size, c), c), x);
}

extern "C" __global__ void fake_blocks(const float* x, float* out, long long count, float largest,
                                       float floor) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  float value = i < count ? x[i] : 0.f;
  unsigned top = __float_as_uint(value) & 0x7fffffffu;  // as integers: inf and NaN are largest
  for (int step = GROUP / 2; step; step /= 2) top = max(top, __shfl_xor_sync(~0u, top, step));
  top = max(top, __float_as_uint(floor));
  float scale;
  if (SCALE_E4M3) {
    scale = rounded(over(__uint_as_float(top), largest), 448.f, 3, 7);
  } else {
    unsigned bits = __float_as_uint(times(__uint_as_float(top), 1.f / largest));
    unsigned byte = (bits >> 23) + ((bits & 0x7fffffu) != 0);
    scale = __uint_as_float(byte ? byte << 23 : 0x400000u);
  }
  if (top >= 0x7f800000u) scale = __uint_as_float(0x7fc00000u);
  if (i < count) out[i] = times(rounded(over(value, scale), largest, MANTISSA, BIAS), scale);
}
