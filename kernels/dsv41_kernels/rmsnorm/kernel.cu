// RMSNorm of rows, one warp a row: x (rows, channels) f32 -> out, rounded to bf16 on request.
// Contract: dsv41.ops.rmsnorm. Bytes: 8 per element; the text would make five passes of it.
#include "../scalar.cuh"

extern "C" __global__ void rmsnorm(const float* x, const float* weight, float* out, long long rows,
                                   int channels, float eps, int rounds) {
  long long row = (blockIdx.x * (long long)blockDim.x + threadIdx.x) / 32;
  int lane = threadIdx.x % 32;
  if (row >= rows) return;
  x += row * channels;
  out += row * channels;
  float squares = 0.f;
  for (int c = lane; c < channels; c += 32) squares += x[c] * x[c];
  float r = 1.f / sqrtf(warp_sum(squares) / channels + eps);
  for (int c = lane; c < channels; c += 32) {
    float y = x[c] * r * weight[c];
    out[c] = rounds ? round_bf16(y) : y;
  }
}
