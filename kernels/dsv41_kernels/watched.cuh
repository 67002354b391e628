// Builds that racecheck can follow. As it books them, a lane that arrives at a barrier in shared
// memory does so for itself, and not for the warp whose stores it has seen; and barriers with a
// name are numbered as a thread passes them, so that threads which have passed unequally many never
// meet again. Where kernels order things in these ways it reports races that there are not.
//
// With WATCHED the same threads meet in the same places, by means that the tool follows: all lanes
// arrive, and barriers with a name lie in shared memory. Nothing else changes.
#pragma once

#ifdef WATCHED
constexpr int ARRIVING = 32;
__shared__ unsigned long long watched[16];
#else
constexpr int ARRIVING = 1;  // lanes of a warp that arrive for it at a barrier in shared memory
#endif

struct Named {
  int id, count;
};

// Says, before any is used, how many threads meet at which barriers; by all threads of the block.
template <int N>
__device__ void prepare(const Named (&barriers)[N]) {
#ifdef WATCHED
  if (threadIdx.x == 0)
    for (const Named& each : barriers)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(
                       (unsigned)__cvta_generic_to_shared(watched + each.id)),
                   "r"(each.count)
                   : "memory");
  __syncthreads();
#endif
}

// Barrier `id` opens when `count` threads have arrived; `wait_named` also waits for it.
__device__ void arrive_named(int id, int count) {
#ifdef WATCHED
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(
                   (unsigned)__cvta_generic_to_shared(watched + id))
               : "memory");
#else
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(count) : "memory");
#endif
}
__device__ void wait_named(int id, int count) {
#ifdef WATCHED
  asm volatile(
      "{ .reg .b64 phase; .reg .pred p; mbarrier.arrive.shared::cta.b64 phase, [%0]; again:"
      " mbarrier.try_wait.shared::cta.b64 p, [%0], phase; @!p bra again; }" ::"r"(
          (unsigned)__cvta_generic_to_shared(watched + id))
      : "memory");
#else
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory");
#endif
}
