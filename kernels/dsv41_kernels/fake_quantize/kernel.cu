// What a reader of the stored codes will see: x f32 -> code(x / scale) * scale f32, GROUP neighbours
// sharing a scale. Contract: fake_quantize in dsv41/quant.py, the same bits. BITS is 4 (E2M1) or 8
// (E4M3). The definition makes about 20 passes over memory, this one reads and writes 4 bytes each.
//
// build: BITS=8 GROUP=32 SCALE_E4M3=0
// build: BITS=4 GROUP=32 SCALE_E4M3=0
// build: BITS=4 GROUP=16 SCALE_E4M3=1
#include "../blockscale.cuh"

constexpr float LARGEST = BITS == 4 ? 6.f : 448.f;

// The value whose code is nearest to y, with the sign of y.
__device__ inline float rounded(float y) {
  float m = fminf(fabsf(y), LARGEST);
  float value = BITS == 4 ? e2m1_value(e2m1_code(m)) : e4m3_value(e4m3_code(m));
  return __uint_as_float(__float_as_uint(value) | (__float_as_uint(y) & 0x80000000u));
}

// v1: one thread a group, a division per element.
extern "C" __global__ void fake_quantize_v1(const float* x, float* out, u64* bad, long long groups,
                                            float floor) {
  long long group = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (group >= groups) return;
  u32 amax = 0;
  for (int i = 0; i < GROUP; ++i) {
    float value = x[group * GROUP + i];
    amax = max(amax, magnitude(value));
    if (not_finite(magnitude(value))) report(bad, group * GROUP + i, value);
  }
  float scale = scale_value(scale_code_plain(fmaxf(__uint_as_float(amax), floor), LARGEST));
  for (int i = 0; i < GROUP; ++i)
    out[group * GROUP + i] = mul_rn(rounded(div_rn(x[group * GROUP + i], scale)), scale);
}

// v2: one thread takes 4 neighbours, so that a warp reads and writes 512 bytes without gaps; the lanes
// of a group exchange their maxima and derive the scale alike.
extern "C" __global__ void __launch_bounds__(256)
    fake_quantize_v2(const float* x, float* out, u64* bad, long long units, float floor) {
  constexpr int LANES = GROUP / 4;
  long long unit = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  bool mine = unit < units;
  // trap: lanes of a group stay together, so threads behind the end repeat the last group
  if (!mine) unit = units - LANES + threadIdx.x % LANES;
  float4 four = reinterpret_cast<const float4*>(x)[unit];
  float v[4] = {four.x, four.y, four.z, four.w};
  u32 amax = max(max(magnitude(v[0]), magnitude(v[1])), max(magnitude(v[2]), magnitude(v[3])));
  for (int step = 1; step < LANES; step *= 2)
    amax = max(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, step));
  Scale s = scale_of(fmaxf(__uint_as_float(amax), floor), LARGEST);
  for (int i = 0; i < 4; ++i) {
    if (not_finite(magnitude(v[i]))) report(bad, 4 * unit + i, v[i]);
    float sign = v[i];
    v[i] = mul_rn(rounded(ratio(v[i], s)), s.value);
    v[i] = __uint_as_float((__float_as_uint(v[i]) & 0x7FFFFFFFu) | (sign_bit(sign) << 31));
  }
  if (mine) reinterpret_cast<float4*>(out)[unit] = make_float4(v[0], v[1], v[2], v[3]);
}
