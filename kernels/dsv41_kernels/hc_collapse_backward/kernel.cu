// The gradient of the collapse (dsv41/train/mhc.py, hc_collapse_backward): dx (T, D), streams
// (T, S, D), pre (T, S) f32 -> dstreams[t][i] = pre[t][i] dx[t], dpre[t][i] = dx[t] . X[t][i].
// A warp walks along one token: 4 (2 S + 1) D bytes, and its S sums meet in a fixed order.
#include "../mhc.cuh"

// build: S=4

extern "C" __global__ void hc_collapse_backward(const float* dx, const float* streams,
                                                const float* pre, float* dstreams, float* dpre,
                                                long long tokens, int width) {
  long long t = blockIdx.x * (long long)(blockDim.x / 32) + threadIdx.x / 32;
  int lane = threadIdx.x % 32;
  if (t >= tokens) return;  // a whole warp
  float a[S], v[SUMS] = {};
#pragma unroll
  for (int i = 0; i < S; ++i) a[i] = pre[t * S + i];
  for (int c = lane; c < width; c += 32) {
    float d = dx[t * width + c];
#pragma unroll
    for (int i = 0; i < S; ++i) {
      long long at = (t * S + i) * width + c;
      v[i] += d * streams[at];
      dstreams[at] = a[i] * d;
    }
  }
  float total = warp_sums(v);
  if (lane < S) dpre[t * S + lane] = total;
}
