// Sums of neighbouring rows: block b adds rows first[b] .. first[b + 1] - 1 of values (n, C), each
// thread a channel, from the first to the last row, so the order and the bits are always the same.

extern "C" __global__ void segment_sums(const float* values, const long long* first, float* out,
                                        long long rows, long long segments, int channels) {
  long long segment = blockIdx.x;
  long long begin = first[segment];
  long long end = segment + 1 < segments ? first[segment + 1] : rows;
  for (int c = threadIdx.x; c < channels; c += blockDim.x) {
    float sum = 0.f;
    for (long long row = begin; row < end; ++row) sum += values[row * channels + c];
    out[segment * channels + c] = sum;
  }
}
