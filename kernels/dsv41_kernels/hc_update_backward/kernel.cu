// The gradient of the update (dsv41/train/mhc.py, hc_update_backward): dnew (T, S, D) and the
// inputs streams (T, S, D), y (T, D), post (T, S), comb (T, S, S), all f32 ->
//   dstreams[j] = sum_k comb[j][k] dnew[k]     dcomb[j][k] = X[j] . dnew[k]
//   dy          = sum_k post[k] dnew[k]        dpost[k]    = y . dnew[k]
// A warp walks along one token and reads everything once, 4 (3 S + 2) D bytes; its S * S + S sums
// meet in a fixed order. v1 serves widths that are no multiple of 4, v2 all others.
#include "../mhc.cuh"

// build: S=4

extern "C" __global__ void __launch_bounds__(256)
hc_update_backward(const float* dnew, const float* streams, const float* y, const float* post,
                   const float* comb, float* dstreams, float* dy, float* dpost, float* dcomb,
                   long long tokens, int width) {
  long long t = blockIdx.x * (long long)(blockDim.x / 32) + threadIdx.x / 32;
  int lane = threadIdx.x % 32;
  if (t >= tokens) return;  // a whole warp
  float b[S][S], p[S], v[SUMS] = {};
#pragma unroll
  for (int k = 0; k < S * S; ++k) b[k / S][k % S] = comb[t * S * S + k];
#pragma unroll
  for (int k = 0; k < S; ++k) p[k] = post[t * S + k];
  for (int c = lane; c < width; c += 32) {
    float d[S], by_y = 0.f, out = y[t * width + c];
#pragma unroll
    for (int k = 0; k < S; ++k) {
      d[k] = dnew[(t * S + k) * width + c];
      by_y += p[k] * d[k];
      v[S * S + k] += out * d[k];
    }
    dy[t * width + c] = by_y;
#pragma unroll
    for (int j = 0; j < S; ++j) {
      long long at = (t * S + j) * width + c;
      float x = streams[at], by_x = 0.f;
#pragma unroll
      for (int k = 0; k < S; ++k) {
        by_x += b[j][k] * d[k];
        v[j * S + k] += x * d[k];
      }
      dstreams[at] = by_x;
    }
  }
  float total = warp_sums(v);
  if (lane < S * S) dcomb[t * S * S + lane] = total;
  else if (lane < S * S + S) dpost[t * S + lane - S * S] = total;
}

// v2: v1 asks for 4 bytes a lane, 9 * 128 bytes a warp and step, and stops at 57 % of the bandwidth
// (495 us at T = 4096, D = 5120). Here a lane takes 16 bytes, and all 9 loads of a step come before
// the first sum: 4,608 bytes a warp, 74 KB an SM with 16 warps, in a quarter of the steps.
__device__ __forceinline__ void add_scaled(float4& sum, float a, float4 x) {
  sum.x = fmaf(a, x.x, sum.x), sum.y = fmaf(a, x.y, sum.y);
  sum.z = fmaf(a, x.z, sum.z), sum.w = fmaf(a, x.w, sum.w);
}
__device__ __forceinline__ float add_dot(float4 a, float4 b, float sum) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

extern "C" __global__ void __launch_bounds__(256, 2)
hc_update_backward_v2(const float4* dnew, const float4* streams, const float4* y, const float* post,
                      const float* comb, float4* dstreams, float4* dy, float* dpost, float* dcomb,
                      long long tokens, int width) {
  long long t = blockIdx.x * (long long)(blockDim.x / 32) + threadIdx.x / 32;
  int lane = threadIdx.x % 32, quads = width / 4;
  if (t >= tokens) return;  // a whole warp
  float b[S][S], p[S], v[SUMS] = {};
#pragma unroll
  for (int k = 0; k < S * S; ++k) b[k / S][k % S] = comb[t * S * S + k];
#pragma unroll
  for (int k = 0; k < S; ++k) p[k] = post[t * S + k];
  const float4 *from_d = dnew + t * S * quads, *from_x = streams + t * S * quads;
  float4* to = dstreams + t * S * quads;
  for (int c = lane; c < quads; c += 32) {
    float4 d[S], x[S], out = y[t * quads + c], by_y = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int k = 0; k < S; ++k) d[k] = from_d[k * quads + c], x[k] = from_x[k * quads + c];
#pragma unroll
    for (int k = 0; k < S; ++k) {
      add_scaled(by_y, p[k], d[k]);
      v[S * S + k] = add_dot(out, d[k], v[S * S + k]);
    }
    dy[t * quads + c] = by_y;
#pragma unroll
    for (int j = 0; j < S; ++j) {
      float4 by_x = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int k = 0; k < S; ++k) {
        add_scaled(by_x, b[j][k], d[k]);
        v[j * S + k] = add_dot(x[j], d[k], v[j * S + k]);
      }
      to[j * quads + c] = by_x;
    }
  }
  float total = warp_sums(v);
  if (lane < S * S) dcomb[t * S * S + lane] = total;
  else if (lane < S * S + S) dpost[t * S + lane - S * S] = total;
}
