// The balance loss in two launches: count, in integers, so that atomics change nothing, how often
// each document chose each expert; then a thread a token. Contract:
// dsv41.train.losses.balance_loss.

extern "C" __global__ void count_choices(const long long* chosen, const long long* order,
                                         int* counts, int* lengths, long long tokens, int experts,
                                         int k) {
  long long t = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (t >= tokens) return;
  atomicAdd(&lengths[order[t]], 1);
  for (int j = 0; j < k; ++j) {
    long long e = chosen[t * k + j];
    if (e >= 0) atomicAdd(&counts[order[t] * experts + e], 1);  // -1: the scores were NaN
  }
}

extern "C" __global__ void balance_loss(const float* scores, const long long* order,
                                        const int* counts, const int* lengths, float* share,
                                        float* dscores, long long tokens, int experts, int k) {
  long long t = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (t >= tokens) return;
  scores += t * experts, dscores += t * experts, counts += order[t] * experts;
  float each = (float)experts / ((float)lengths[order[t]] * k), total = 0.f, weighted = 0.f;
  for (int e = 0; e < experts; ++e) {
    total += scores[e];
    weighted += counts[e] * each * scores[e];
  }
  float mine = weighted / total;
  share[t] = mine;
  for (int e = 0; e < experts; ++e) dscores[e] = (counts[e] * each - mine) / (total * tokens);
}
