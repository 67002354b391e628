// The gradient of RMSNorm, one warp a row, CHUNKS = ceil(channels / 32) channels a lane:
//
//   dx = r (g w - n mean(g w n))     dweight = sum over rows of g n      n = x r, r = 1 / rms(x)
//
// dweight takes two steps, both in a fixed order: each block adds its ROWS rows into one line of
// `partial` (blocks, channels), and the caller adds the lines. Contract:
// dsv41.train.ops.rmsnorm_backward. Bytes: 12 per element.
//
// build: ROWS=64 CHUNKS=2
// build: ROWS=64 CHUNKS=4
// build: ROWS=64 CHUNKS=32
#include "../scalar.cuh"

#define WARPS 8

extern "C" __global__ void rmsnorm_backward(const float* dy, const float* x, const float* weight,
                                            float* dx, float* partial, long long rows, int channels,
                                            float eps) {
  __shared__ float lines[WARPS][CHUNKS * 32];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float dweight[CHUNKS] = {};
  long long end = min(rows, (blockIdx.x + 1LL) * ROWS);
  for (long long row = blockIdx.x * (long long)ROWS + warp; row < end; row += WARPS) {
    float value[CHUNKS], g[CHUNKS], squares = 0.f, product = 0.f;
    for (int i = 0; i < CHUNKS; ++i) {
      int c = lane + 32 * i;
      value[i] = c < channels ? x[row * channels + c] : 0.f;
      g[i] = c < channels ? dy[row * channels + c] : 0.f;
      squares += value[i] * value[i];
    }
    float r = 1.f / sqrtf(warp_sum(squares) / channels + eps);
    for (int i = 0; i < CHUNKS; ++i) {
      int c = lane + 32 * i;
      dweight[i] += g[i] * (value[i] * r);
      g[i] *= c < channels ? weight[c] : 0.f;
      product += g[i] * (value[i] * r);
    }
    product = warp_sum(product) / channels;
    for (int i = 0; i < CHUNKS; ++i) {
      int c = lane + 32 * i;
      if (c < channels) dx[row * channels + c] = r * (g[i] - value[i] * r * product);
    }
  }
  for (int i = 0; i < CHUNKS; ++i) lines[warp][lane + 32 * i] = dweight[i];
  __syncthreads();
  for (int c = threadIdx.x; c < channels; c += blockDim.x) {
    float sum = 0.f;
    for (int w = 0; w < WARPS; ++w) sum += lines[w][c];
    partial[blockIdx.x * (long long)channels + c] = sum;
  }
}
