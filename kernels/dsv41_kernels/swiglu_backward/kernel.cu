// The gradient of swiglu, one thread a number: dgate = g u silu'(a), du = g silu(a), 0 where the
// clamp cuts. Contract: dsv41.train.ops.swiglu_backward. Bytes: 20 per element.
#include "../scalar.cuh"

extern "C" __global__ void swiglu_backward(const float* dy, const float* gate, const float* up,
                                           float* dgate, float* dup, long long count, float limit) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i >= count) return;
  float a = gate[i], u = up[i], g = dy[i];
  bool a_moves = true, u_moves = true;
  if (limit > 0.f) {
    a_moves = a <= limit;
    u_moves = fabsf(u) <= limit;
    a = a > limit ? limit : a;
    u = u > limit ? limit : (u < -limit ? -limit : u);
  }
  float s = sigmoid(a);
  dgate[i] = a_moves ? g * u * (s * (1.f + a * (1.f - s))) : 0.f;
  dup[i] = u_moves ? g * (a * s) : 0.f;
}
