// Tokens to experts and back. Each expert gets `room` rows, no fewer than the busiest one needs,
// so that all experts together are one batched product:
//
//   gather    rows (E, room, D): row i of expert e is its i-th token, ascending; zeros behind
//   combine   y[t] = sum over the token's experts, in ascending order, of rows[slot]
//
// `order` (T * k) lists all choices by expert, `begins` (E + 1) where an expert's begin; `slots`
// (T, k) is the way back. Contract: dsv41.moe.moe_experts.

extern "C" __global__ void gather(const float* x, const long long* order, const long long* begins,
                                  float* rows, long long* slots, long long room, int experts,
                                  int channels, int k) {
  long long slot = blockIdx.x;
  long long e = slot / room, choice = begins[e] + slot % room;
  bool used = choice < begins[e + 1];
  long long token = used ? order[choice] / k : 0;
  if (used && threadIdx.x == 0) slots[order[choice]] = slot;
  for (int c = threadIdx.x; c < channels; c += blockDim.x)
    rows[slot * channels + c] = used ? x[token * channels + c] : 0.f;
}

extern "C" __global__ void spread(const float* values, const long long* order,
                                  const long long* begins, float* out, long long room,
                                  long long slots) {
  long long slot = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (slot >= slots) return;
  long long choice = begins[slot / room] + slot % room;
  out[slot] = choice < begins[slot / room + 1] ? values[order[choice]] : 0.f;
}

extern "C" __global__ void combine(const float* rows, const long long* chosen,
                                   const long long* slots, float* y, int channels, int k) {
  long long t = blockIdx.x;
  for (int c = threadIdx.x; c < channels; c += blockDim.x) {
    float sum = 0.f;
    long long last = -1;
    for (int j = 0; j < k; ++j) {  // the next expert in ascending order
      int next = -1;
      for (int i = 0; i < k; ++i) {
        long long e = chosen[t * k + i];
        if (e > last && (next < 0 || e < chosen[t * k + next])) next = i;
      }
      if (next < 0) break;  // the scores were NaN
      last = chosen[t * k + next];
      sum += rows[slots[t * k + next] * channels + c];
    }
    y[t * channels + c] = sum;
  }
}
