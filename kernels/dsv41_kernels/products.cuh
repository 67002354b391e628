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

// d (16, 8) s32 = c + a (16, 32) u8 * b (32, 8) s8, exact, by one warp. As above, but each register
// holds four neighbours, of columns of a and rows of b, which begin at 4c and at 4c + 16.
__device__ __forceinline__ void mma_u8(int* d, const unsigned* a, uint2 b, const int* c) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "r"(c[0]), "r"(c[1]),
        "r"(c[2]), "r"(c[3]));
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

// x, of which the compiler shall not know how to make it again: it stays in its register
template <class Number>
__device__ __forceinline__ Number kept(Number x) {
  if constexpr (sizeof(x) == 8)
    asm volatile("" : "+l"(x));
  else
    asm volatile("" : "+r"(x));
  return x;
}

// *to = x, where the compiler has lost sight of what kind of memory that is
__device__ __forceinline__ void store_global(float* to, float x) {
  asm volatile("st.global.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
}

// start copying 16 bytes into shared memory; what is behind the first `bytes` becomes zero
__device__ __forceinline__ void copy_async(void* shared, const void* global, int bytes) {
  unsigned to = (unsigned)__cvta_generic_to_shared(shared);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes)
               : "memory");
}

// the 16 bytes at 512 * i of a lane for i = -2 .. 1, and those for i = 2 where `more` holds
__device__ __forceinline__ void copy_async_around(void* shared, const void* global, bool more) {
  unsigned to = (unsigned)__cvta_generic_to_shared(shared);
  asm volatile(
      "{\n.reg .pred more;\nsetp.ne.u32 more, %2, 0;\n"
      "cp.async.cg.shared.global [%0 + -1024], [%1 + -1024], 16;\n"
      "cp.async.cg.shared.global [%0 + -512], [%1 + -512], 16;\n"
      "cp.async.cg.shared.global [%0], [%1], 16;\n"
      "cp.async.cg.shared.global [%0 + 512], [%1 + 512], 16;\n"
      "@more cp.async.cg.shared.global [%0 + 1024], [%1 + 1024], 16;\n}\n" ::"r"(to),
      "l"(global), "r"((int)more)
      : "memory");
}

// end a group of copies
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// wait until at most NEWEST of this thread's groups are still under way
template <int NEWEST>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(NEWEST) : "memory");
}

// ---- warp groups (sm_90a) ----------------------------------------------------------------------

#ifdef WARP_GROUPS
typedef unsigned long long Matrix;  // where wgmma finds b in shared memory

// b (rows, 32 bytes of channels), as [half of the channels][8 rows][row][16 bytes], 32 bytes a row
__device__ __forceinline__ Matrix matrix_at(const void* shared, int rows = 32) {
  unsigned long long start = (unsigned)__cvta_generic_to_shared(shared);
  return (start & 0x3ffff) >> 4 | (unsigned long long)rows << 16 | 128ull >> 4 << 32;
}

// the one `bytes` further on, which only its lower half knows
__device__ __forceinline__ Matrix matrix_behind(Matrix matrix, unsigned bytes) {
  return matrix >> 32 << 32 | (unsigned)matrix + bytes / 16;
}

// d (64, 32) f32 = a (64, 32) * b (32, 32)^T, E4M3 numbers, by the four warps of a warp group; returns
// at once, d is there after finish_products. Warp w holds rows 16 w + g and 16 w + g + 8: of a the
// bytes 4c .. 4c + 3 (a[0], a[1]) and 16 + 4c .. (a[2], a[3]), of d columns 8 n + 2c, + 1 in
// d[4 n .. 4 n + 1] and d[4 n + 2 .. 4 n + 3].
__device__ __forceinline__ void start_product(float* d, const unsigned* a, Matrix b) {
  asm volatile(
      "{\n.reg .pred keep;\nsetp.ne.b32 keep, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19}, %20, keep, 1, 1;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
        "+f"(d[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// d (64, 64) s32 = a (64, 32) s8 * b (64, 32)^T s8, or += where `add` is 1
__device__ __forceinline__ void start_product_s8(int* d, const unsigned* a, Matrix b, int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, add;\n}\n"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]),
        "+r"(d[7]), "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]),
        "+r"(d[14]), "+r"(d[15]), "+r"(d[16]), "+r"(d[17]), "+r"(d[18]), "+r"(d[19]), "+r"(d[20]),
        "+r"(d[21]), "+r"(d[22]), "+r"(d[23]), "+r"(d[24]), "+r"(d[25]), "+r"(d[26]), "+r"(d[27]),
        "+r"(d[28]), "+r"(d[29]), "+r"(d[30]), "+r"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

// before the first product after registers or shared memory were written
__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// wait for all products of this warp group
__device__ __forceinline__ void finish_products() {
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// the same in two steps: end a group of products, wait until at most NEWEST groups are under way
__device__ __forceinline__ void close_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int NEWEST>
__device__ __forceinline__ void await_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(NEWEST) : "memory");
}

// what products wrote is read from here on, and not earlier
__device__ __forceinline__ void settle_product(float* d) {
#pragma unroll
  for (int i = 0; i < 16; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int COUNT>
__device__ __forceinline__ void settle_product(int (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// what this thread wrote into shared memory may be read by wgmma, after a barrier
__device__ __forceinline__ void publish_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
#endif
