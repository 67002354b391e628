// The router behind its matrix product, one thread a token:
//
//   s = sqrt(softplus(logit))   biased = s + bias   chosen = the k best of biased   weight from s
//
// The best come first; equal scores go to the lower expert, which is found without a list of those
// already taken: each next one is the largest behind its predecessor in the total order (score
// down, number up). Contract: dsv41.moe.route. A NaN is never chosen: where too few numbers are left
// the expert is -1, which the kernels behind skip, and the word `bad` says which token it was.
#include "../scalar.cuh"

extern "C" __global__ void route(const float* logits, const float* text_bias,
                                 const float* image_bias, const bool* is_image, long long* chosen,
                                 float* weight, float* biased, unsigned long long* bad,
                                 long long tokens, int experts, int k, int normalize,
                                 float factor) {
  long long t = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (t >= tokens) return;
  const float* bias = image_bias && is_image[t] ? image_bias : text_bias;
  logits += t * experts, biased += t * experts, chosen += t * k, weight += t * k;
  for (int e = 0; e < experts; ++e) biased[e] = sqrt_softplus(logits[e]) + bias[e];
  float last = __int_as_float(0x7f800000), total = 0.f;
  int last_expert = -1;
  for (int j = 0; j < k; ++j) {
    int best = -1;
    for (int e = 0; e < experts; ++e) {
      bool behind = biased[e] < last || (biased[e] == last && e > last_expert);
      if (behind && (best < 0 || biased[e] > biased[best])) best = e;
    }
    chosen[j] = best;
    weight[j] = best < 0 ? 0.f : sqrt_softplus(logits[best]);
    total += weight[j];
    if (best >= 0) last = biased[best];
    last_expert = best < 0 ? experts : best;
    if (best < 0) atomicMax(bad, ~(4ull * t));  // errors.py reads it
  }
  float scale = normalize && k > 1 ? total + 1e-20f : 1.f;
  for (int j = 0; j < k; ++j) weight[j] = weight[j] / scale * factor;
}
