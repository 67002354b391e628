#pragma once
// The instructions that have no name in CUDA C++.

// d (16, 8) f32 += a (16, 16) bf16 * b (16, 8) bf16, by one warp. With g = lane / 4, c = lane % 4 a
// lane holds, two neighbouring columns (of b: rows) to a register, the lower one in the lower half:
//   a[0], a[1]  rows g, g + 8 at columns 2c, 2c + 1      a[2], a[3]  the same at 2c + 8, 2c + 9
//   b0, b1      column g at rows 2c, 2c + 1 and 2c + 8, 2c + 9
//   d[0..1], d[2..3]  rows g, g + 8 at columns 2c, 2c + 1
__device__ __forceinline__ void mma_bf16(float* d, const unsigned* a, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// two bf16 products, each rounded to bf16; subnormal numbers count
__device__ __forceinline__ unsigned multiply_bf16x2(unsigned a, unsigned b) {
  unsigned product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// bf16(max(low, 0)) in the lower half, bf16(max(high, 0)) in the upper one
__device__ __forceinline__ unsigned relu_bf16x2(float low, float high) {
  unsigned pair;
  asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// start copying 16 bytes into shared memory; what is behind the first `bytes` becomes zero
__device__ __forceinline__ void copy_async(void* shared, const void* global, int bytes) {
  unsigned to = (unsigned)__cvta_generic_to_shared(shared);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes)
               : "memory");
}

// end a group of copies
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// wait until at most NEWEST of this thread's groups are still under way
template <int NEWEST>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(NEWEST) : "memory");
}
