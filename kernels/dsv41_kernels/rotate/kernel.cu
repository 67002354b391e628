// Rotary embedding: x (tokens, vectors, channels) f32 -> out, a thread for each pair of channels;
// the last `pairs` pairs of a vector are turned by position * freqs[pair]. Contract:
// dsv41.rope.rotate. Angles are float32 products, sines are the accurate ones. Bytes: 8 per element.

extern "C" __global__ void rotate(const float2* x, const long long* positions, const float* freqs,
                                  float2* out, long long count, int vectors, int width, int pairs,
                                  float sign) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i >= count) return;
  float2 z = x[i];
  int pair = (int)(i % width) - (width - pairs);  // width: channels / 2
  if (pair >= 0) {
    long long token = i / ((long long)vectors * width);
    float angle = sign * ((float)positions[token] * freqs[pair]);
    float c = cosf(angle), s = sinf(angle);
    z = make_float2(z.x * c - z.y * s, z.x * s + z.y * c);
  }
  out[i] = z;
}
