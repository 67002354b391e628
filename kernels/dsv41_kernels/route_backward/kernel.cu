// From the weights of the chosen experts, and the scores of all, back to the router's logits, one
// thread a token. Contract: the part of dsv41.train.moe.route_backward in front of its linear map.

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
    bool low = x < -20.f;
    float y = low ? expf(x * 0.5f) : sqrtf(fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))));
    float decay = expf(-fabsf(x));
    float sigmoid = (x >= 0.f ? 1.f : decay) / (1.f + decay);
    // the slope of the score waits in dlogits until the gradient by the score is known
    dlogits[e] = low ? 0.5f * y : sigmoid / (2.f * y);
  }
  float total = 0.f, product = 0.f;
  for (int j = 0; j < k; ++j) {
    if (chosen[j] < 0) continue;  // the scores were NaN
    float x = logits[chosen[j]];
    float y = x < -20.f ? expf(x * 0.5f) : sqrtf(fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))));
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
