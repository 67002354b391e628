// Instructions of the tensor cores and of asynchronous copies that C++ has no name for.
//
// mma: d += a b, a 16 x 16 and b 16 x 8 in bf16, d in float32. With g = lane / 4 and t = lane % 4 a
// thread holds of a the pairs (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8), of b the pairs
// (2t, g) and (2t + 8, g), of d the pairs (g, 2t) and (g + 8, 2t); a pair runs along k in a and b,
// along n in d.

__device__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

__device__ void mma(float* d, const unsigned* a, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices of 16-bit numbers; lanes 8 i .. 8 i + 7 name the rows of matrix i, a thread
// gets the pair (g, 2t) of each. Transposed it gets (2t, g) and (2t + 1, g).
__device__ void load_matrices(unsigned* x, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ void load_transposed(unsigned* x, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared_address(row))
               : "memory");
}

// Copy 16 bytes from global to shared memory in the background, or write 16 zeros if not `real`.
__device__ void copy_16(void* to, const void* from, bool real) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(real ? 16 : 0)
               : "memory");
}
__device__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Two bf16 products. Subnormal factors count: only .ftz forms would drop them.
__device__ unsigned multiply_pairs(unsigned a, unsigned b) {
  unsigned d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// Two float32 rounded to bf16, to nearest, ties to even.
__device__ unsigned bf16_pair(float low, float high) {
  unsigned d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

// Four 8 x 8 matrices back into rows, as load_matrices takes them.
__device__ void store_matrices(void* row, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(
                   shared_address(row)),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// Four numbers that nothing writes meanwhile, asked for here and not where they are used.
__device__ float4 read_once(const float* from) {
  float4 x;
  asm volatile("ld.global.nc.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(from));
  return x;
}

// The compiler must not know x any more: it computes anew what depends on it.
__device__ void keep_here(int& x) { asm volatile("" : "+r"(x)); }
