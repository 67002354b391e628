// From the weights of the chosen experts, and the scores of all, back to the router's logits, one
// thread a token. Contract: the part of dsv41.train.moe.route_backward in front of its linear map.
#include "../scalar.cuh"

extern "C" __global__ void route_backward(const float* dweight, const float* dscores,
                                          const float* logits, const long long* chosen,
                                          float* dlogits, long long tokens, int experts, int k,
                                          int normalize, float factor) {
  long long t = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (t >= tokens) return;
  dweight += t * k, chosen += t * k;
  dscores += t * experts, logits += t * experts, dlogits += t * experts;
  for (int e = 0; e < experts; ++e) {
    float x = logits[e];
    float y = sqrt_softplus(x);
    // the slope of the score waits in dlogits until the gradient by the score is known
    dlogits[e] = x < -20.f ? 0.5f * y : sigmoid(x) / (2.f * y);
  }
  float total = 0.f, product = 0.f;
  for (int j = 0; j < k; ++j) {
    if (chosen[j] < 0) continue;  // the scores were NaN
    float y = sqrt_softplus(logits[chosen[j]]);
    total += y;
    product += dweight[j] * factor * y;
  }
  total += 1e-20f;
  bool shares = normalize && k > 1;
  for (int e = 0; e < experts; ++e) {
    float d = dscores[e];
    for (int j = 0; j < k; ++j) {
      if (chosen[j] != e) continue;
      float own = dweight[j] * factor;
      d += shares ? (own - product / total) / total : own;
    }
    dlogits[e] *= d;
  }
}
