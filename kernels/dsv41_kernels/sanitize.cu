// What does a watching tool make of an order that is certain? racecheck of CUDA 13.0 reports a race
// in both of these kernels.

// Two thirds of a block meet twice at a named barrier, then all at the block's; what is written and
// read behind it has a barrier of the block between. The tool numbers the barriers that each thread
// has passed, so two threads that passed unequally many never meet again in its books: with named
// barriers of their own for the others (EVEN) it is silent.
extern "C" __global__ void ordered(int* out) {  // 384 threads
  __shared__ int numbers[384];
  const int thread = threadIdx.x;
  if (thread < 256) {
    asm volatile("bar.sync 1, 256;" ::: "memory");
    asm volatile("bar.sync 1, 256;" ::: "memory");
  }
#ifdef EVEN
  if (thread >= 256) {
    asm volatile("bar.sync 2, 128;" ::: "memory");
    asm volatile("bar.sync 2, 128;" ::: "memory");
  }
#endif
  __syncthreads();
  numbers[thread] = thread;
  __syncthreads();
  out[thread] = numbers[(thread + 64) % 256];
}

// The lanes of a warp write and meet, then one of them arrives at a barrier in shared memory, behind
// which another warp reads. A release covers what the thread has seen of others, but the tool
// counts the arriving thread alone: where all lanes arrive (ALL) it is silent.
extern "C" __global__ void elected(int* out) {  // 64 threads
  __shared__ int numbers[32];
  __shared__ unsigned long long barrier;
  const unsigned at = (unsigned)__cvta_generic_to_shared(&barrier);
  const int thread = threadIdx.x;
#ifdef ALL
  const int arriving = 32;
#else
  const int arriving = 1;
#endif
  if (thread == 0)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arriving) : "memory");
  __syncthreads();
  if (thread < 32) {
    numbers[thread] = thread;
    __syncwarp();
    if (thread < arriving)
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
  } else {
    asm volatile(
        "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0;"
        " @!p bra again; }" ::"r"(at)
        : "memory");
    out[thread] = numbers[63 - thread];
  }
}
