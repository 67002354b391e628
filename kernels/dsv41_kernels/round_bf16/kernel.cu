// The nearest bf16 of every number, kept as float32; ties to even, NaN stays NaN. One thread a
// number, 8 bytes each. Contract: dsv41.formats.round_bf16.

extern "C" __global__ void round_bf16(const unsigned* x, unsigned* out, long long count) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i >= count) return;
  unsigned bits = x[i];
  bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  out[i] = (is_nan ? bits | 0x400000u : bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u;
}
