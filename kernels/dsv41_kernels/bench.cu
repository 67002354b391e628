// Helpers of bench.py, of which one empties the L2 cache and one reads the SM clock, and the mark
// between layers of launches.py.

// Reads `count` 16-byte words and keeps nothing: afterwards L2 holds this buffer, clean, so that the
// next kernel finds none of its own data there and no dirty lines that would be written back on its
// time. The store never happens, but the compiler cannot know.
extern "C" __global__ void read_through(const uint4* words, long long count, unsigned* out) {
  unsigned seen = 0;
  long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += step) {
    uint4 w = words[i];
    seen |= w.x | w.y | w.z | w.w;
  }
  if (seen) *out = seen;
}

// Cycles and nanoseconds of a busy wait: their ratio is the SM clock at this moment.
extern "C" __global__ void sm_clock(long long* out, int cycles) {
  long long start = clock64(), begin, end;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  while (clock64() - start < cycles) {
  }
  long long stop = clock64();
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(end));
  out[0] = stop - start;
  out[1] = end - begin;
}

// Does nothing, but under a name that is found again in the GPU's records.
extern "C" __global__ void layer_marker() {}
