// swiglu: silu(min(gate, limit)) * clip(up, -limit, limit), one thread a number; limit 0: unclamped.
// Contract: dsv41.ops.swiglu. Bytes: 12 per element.
#include "../scalar.cuh"

extern "C" __global__ void swiglu(const float* gate, const float* up, float* out, long long count,
                                  float limit) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i >= count) return;
  float a = gate[i], u = up[i];
  if (limit > 0.f) {  // comparisons that let a NaN pass, as np.minimum does
    a = a > limit ? limit : a;
    u = u > limit ? limit : (u < -limit ? -limit : u);
  }
  out[i] = a * sigmoid(a) * u;
}
