// What does a watching tool make of an order that is certain? Two warps meet at a named barrier, then
// all three at the block's; what is written and read behind it has a barrier of the block between.
//
// racecheck of CUDA 13.0 reports a race here. It numbers the barriers that each thread has passed, so
// two threads that passed unequally many never meet again in its books: with a named barrier of its
// own for the third warp (EVEN) it is silent.

extern "C" __global__ void ordered(int* out) {  // 96 threads
  __shared__ int numbers[96];
  const int thread = threadIdx.x;
  if (thread < 64) asm volatile("bar.sync 1, 64;" ::: "memory");
#ifdef EVEN
  if (thread >= 64) asm volatile("bar.sync 2, 32;" ::: "memory");
#endif
  __syncthreads();
  numbers[thread] = thread;
  __syncthreads();
  out[thread] = numbers[95 - thread];
}
