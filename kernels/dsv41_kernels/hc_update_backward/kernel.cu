// The gradient of the update (dsv41/train/mhc.py, hc_update_backward): dnew (T, S, D) and the
// inputs streams (T, S, D), y (T, D), post (T, S), comb (T, S, S), all f32 ->
//   dstreams[j] = sum_k comb[j][k] dnew[k]     dcomb[j][k] = X[j] . dnew[k]
//   dy          = sum_k post[k] dnew[k]        dpost[k]    = y . dnew[k]
// A warp walks along one token and reads everything once, 4 (3 S + 2) D bytes; its S * S + S sums
// meet in a fixed order.
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
