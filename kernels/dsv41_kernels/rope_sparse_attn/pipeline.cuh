// v4 `pipeline`, see kernel.cu. One block of three warpgroups per token:
//
//   maker    reads the bytes of chunk i + 1 and decodes them into one of two buffers, while
//   left     scores chunk i, weighs it, hands the weights over and adds the left half of the values
//   right    adds the right half
//
// v3 does one after the other, and its warps read q and records from shared memory again and again
// to feed their own registers; here the tensor cores read shared memory themselves, once for 64
// heads, and decoding costs no time of theirs. Shared memory: q 64 KB, records 2 * 64 KB, weights
// 8 KB, each in blocks of 64 channels as wgmma.cuh wants them.

#include "wgmma.cuh"

constexpr int GROUP = 128, KEYS_BYTES = 8 * BLOCK;
enum Barrier { FULL = 1, EMPTY = 3, WEIGHED = 5, TAKEN = 6, READERS = 7 };  // FULL, EMPTY: two each

// Piece i (of 64) of row `row` in eight blocks of 64 channels.
__device__ uint4* block_piece(char* blocks, int row, int i) {
  return reinterpret_cast<uint4*>(blocks + i / 8 * BLOCK + row * 128 + ((i % 8 ^ (row & 7)) << 4));
}

// Two E4M3 codes (16 bits) to twice(scale * 2^118) each, in two exact steps.
__device__ uint2 e4m3_scales(unsigned codes) {
  unsigned x =
      (codes & 0x7f) << 4 | (codes & 0x7f00) << 12 | (codes & 0x80) << 8 | (codes & 0x8000) << 16;
  const unsigned lift = twice((119 + 127) << 7);
  x = multiply_pairs(multiply_pairs(x, lift), lift);
  return make_uint2(__byte_perm(x, 0, 0x1010), __byte_perm(x, 0, 0x3232));
}

__device__ uint4 read_16(const unsigned char* from, bool real) {
  return real ? __ldg(reinterpret_cast<const uint4*>(from)) : make_uint4(0, 0, 0, 0);
}

__device__ unsigned word(uint4 x, int i) {
  return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

// All rows that a token reads, and a bit for each place that has one, by `threads` threads (whole
// warps) of which this is number `i`. Lists come AT_ONCE numbers at a time, since waiting for each
// would take longer than all else here. True if this thread saw one past the end.
template <int AT_ONCE>
__device__ bool read_rows(long long* rows, uint2* valid, const Lists& lists, long long token,
                          int chunks, int i, int threads) {
  bool past_the_end = false;
  for (; i < chunks * CHUNK; i += AT_ONCE * threads) {
    long long listed[AT_ONCE];
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) listed[n] = lists.listed(token, i + n * threads);
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
      const int place = i + n * threads;
      if (place >= chunks * CHUNK) break;
      const long long row = lists.checked(listed[n], token, place, past_the_end);
      rows[place] = row;
      const unsigned bits = __ballot_sync(~0u, row >= 0);
      if (threadIdx.x % 32 == 0) reinterpret_cast<unsigned*>(valid)[place / 32] = bits;
    }
  }
  return past_the_end;
}

__device__ bool read_lists(long long* rows, uint2* valid, const Lists& lists, long long token,
                           int chunks, int threads) {
  return __syncthreads_or(
      read_rows<2>(rows, valid, lists, token, chunks, threadIdx.x, threads));
}

// The maker. Two threads share a record: of every 32 bytes one takes the first half, one the
// second.
struct Record {
  const unsigned char* bytes;
  bool real;
  uint4 codes[8], scales[2];

  __device__ void read_codes(int from) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      codes[i] = read_16(bytes + from + 32 * i + threadIdx.x % 2 * 16, real);
  }

  __device__ void place_far(char* keys, int row) const {
    const int odd = threadIdx.x % 2;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint2 scale = e4m3_scales(word(scales[i / 4], i % 4) >> 16 * odd & 0xffff);
      const int first = 8 * i + 4 * odd;
      *block_piece(keys, row, first) = place_e2m1(codes[i].x, scale.x);
      *block_piece(keys, row, first + 1) = place_e2m1(codes[i].y, scale.x);
      *block_piece(keys, row, first + 2) = place_e2m1(codes[i].z, scale.y);
      *block_piece(keys, row, first + 3) = place_e2m1(codes[i].w, scale.y);
    }
  }

  __device__ void place_near(char* keys, int row, int half) const {  // 256 of 512 bytes
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const unsigned scale = e8m0_scale(word(scales[0], 2 * half + i / 4) >> i % 4 * 8 & 0xff);
      const int first = 32 * half + 4 * i + threadIdx.x % 2 * 2;
      *block_piece(keys, row, first) = place_e4m3(codes[i].x, codes[i].y, scale);
      *block_piece(keys, row, first + 1) = place_e4m3(codes[i].z, codes[i].w, scale);
    }
  }
};

// Chunk `chunk` into eight blocks at `keys`; `ready` is called when the first bytes are on their
// way.
template <typename Ready>
__device__ void make_chunk(char* keys, const long long* rows, int chunk, const Lists& lists,
                           Ready ready) {
  const int row = threadIdx.x % GROUP / 2, place = chunk * CHUNK + row;
  const bool recent = place < lists.near_width;
  Record record;
  record.real = rows[place] >= 0;
  record.bytes = recent ? lists.near : lists.far;
  if (record.real) record.bytes += rows[place] * (recent ? NEAR_BYTES : FAR_BYTES);
  record.read_codes(0);
  record.scales[0] = read_16(record.bytes + (recent ? 512 : 256), record.real);
  record.scales[1] = read_16(record.bytes + 272, record.real && !recent);
  ready();
  if (recent) {
    record.place_near(keys, row, 0);
    record.read_codes(256);
    record.place_near(keys, row, 1);
  } else {
    record.place_far(keys, row);
  }
  publish();
  __syncwarp();  // a warp may hold records of both kinds
}

__device__ void make_keys(char* keys, const long long* rows, int chunks, const Lists& lists) {
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int buffer = chunk % 2;
    make_chunk(keys + buffer * KEYS_BYTES, rows, chunk, lists, [=] {
      if (chunk >= 2) meet(EMPTY + buffer, 3 * GROUP);
    });
    arrive(FULL + buffer, 3 * GROUP);
  }
}

// The softmax of 64 heads by 128 threads: a thread holds two heads, `low` and eight below (n = 0,
// 1), and of each the places 8 j + 2 t and + 1, at s[4 j + 2 n] and the next.
constexpr float SCORE_SCALE = LIFT * LOG2_E / 22.627416998f;  // the square root of 512

__device__ float mask_and_max(float* s, int n, uint2 valid) {
  float top = minus_infinity();
  if ((valid.x & valid.y) != ~0u) {
    const unsigned first = valid.x >> threadIdx.x % 4 * 2, second = valid.y >> threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const unsigned bit = (j < 8 ? first : second) & 1u << (j / 2 % 4 * 8 + j % 2);
      if (!bit) s[j / 2 * 4 + n * 2 + j % 2] = minus_infinity();
    }
  }
#pragma unroll
  for (int j = 0; j < 16; ++j) top = fmaxf(top, s[j / 2 * 4 + n * 2 + j % 2]);
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
  return fmaxf(NEVER, fmaxf(top, __shfl_xor_sync(~0u, top, 2)) * SCORE_SCALE);
}

// s becomes p; -> this thread's part of their sum. The parts are added up at the very end.
__device__ float exponentials(float* s, int n, float top) {
  float sum = 0.f;
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    float& x = s[j / 2 * 4 + n * 2 + j % 2];
    x = exp2f(__fmaf_rn(x, SCORE_SCALE, -top));
    sum += x;
  }
  return sum;
}

__device__ void store_weights(char* weights, const float* s, int low) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    char* to = weights + low * 128 + ((j ^ (low & 7)) << 4) + threadIdx.x % 4 * 4;
    *reinterpret_cast<unsigned*>(to) = bf16_pair(s[4 * j], s[4 * j + 1]);
    *reinterpret_cast<unsigned*>(to + 8 * 128) = bf16_pair(s[4 * j + 2], s[4 * j + 3]);
  }
}

__device__ float norm_of(float total, float top, float sink) {
  total += __shfl_xor_sync(~0u, total, 1);
  total += __shfl_xor_sync(~0u, total, 2);
  total += exp2f(sink * LOG2_E - top);
  return total == 0.f ? 1.f : total;  // infinite for a query without records: its o is 0
}

__device__ void score(float* s, const char* queries, const char* keys) {
  const unsigned long long a = matrix(queries), b = matrix(keys);
  begin_products();
#pragma unroll
  for (int k = 0; k < C / 16; ++k) {
    const int step = (k / 4 * BLOCK + k % 4 * 32) / 16;
    product_64(s, a + step, b + step, k > 0);
  }
  finish_products();
}

template <int COUNT>
__device__ void shrink_values(float* o, float low, float high) {
  if (!__any_sync(~0u, low != 1.f || high != 1.f)) return;
#pragma unroll
  for (int j = 0; j < COUNT; j += 4)
    o[j] *= low, o[j + 1] *= low, o[j + 2] *= high, o[j + 3] *= high;
}

__device__ void store_pair(float* to, float first, float second) {  // channels t and t + 4
  const unsigned pair = bf16_pair(first, second);
  to[0] = __uint_as_float(pair << 16), to[4] = __uint_as_float(pair & 0xffff0000u);
}

// o over the norms of its two heads, rounded, to rows of `stride` floats that begin at the first
// column.
template <int COUNT>
__device__ void stage_values(float* rows, int stride, const float* o, int low, float norm,
                             float below) {
  const float inverse = LIFT / norm, inverse_below = LIFT / below;
#pragma unroll
  for (int j = 0; j < COUNT; j += 4) {
    float* to = rows + low * stride + 2 * j + threadIdx.x % 4;
    store_pair(to, o[j] * inverse, o[j + 1] * inverse);
    store_pair(to + 8 * stride, o[j + 2] * inverse_below, o[j + 3] * inverse_below);
  }
}

__device__ void add_half(float* o, const char* weights, const char* keys, int half) {
  const unsigned long long a = matrix(weights), b = matrix(keys + 4 * half * BLOCK);
  begin_products();
#pragma unroll
  for (int k = 0; k < CHUNK / 16; ++k) product_256(o, a + 32 / 16 * k, b + 2048 / 16 * k, 1);
  finish_products();
}

extern "C" __global__ void __launch_bounds__(3 * GROUP, 1)
    pipeline(const float* q, const long long* positions, const float* freqs, int pairs,
             const unsigned char* near, long long near_count, const long long* near_rows,
             int near_width, const unsigned char* far, long long far_count,
             const long long* far_rows, int far_width, const float* sink, unsigned long long* bad,
             float* out) {
  const Lists lists = {near,      near_count, near_rows, near_width, far,
                       far_count, far_rows,   far_width, bad};
  const int chunks = (lists.width() + CHUNK - 1) / CHUNK, group = threadIdx.x / GROUP;
  const int lane = threadIdx.x % 32, low = threadIdx.x % GROUP / 32 * 16 + lane / 4;
  const long long token = blockIdx.x;
  char* queries = reinterpret_cast<char*>(shared);                 // 8 blocks: (64 heads, 512)
  char* keys = queries + KEYS_BYTES;                               // 2 times 8 blocks: (CHUNK, 512)
  char* weights = keys + 2 * KEYS_BYTES;                           // a block: (64 heads, CHUNK)
  float* shrink = reinterpret_cast<float*>(weights + BLOCK);       // (64,); later norms
  float2* angle = reinterpret_cast<float2*>(shrink + 64);          // (pairs,)
  long long* rows = reinterpret_cast<long long*>(angle + pairs);   // (chunks, CHUNK)
  uint2* valid = reinterpret_cast<uint2*>(rows + chunks * CHUNK);  // (chunks,) bits of places

  prepare({{FULL, 3 * GROUP}, {FULL + 1, 3 * GROUP}, {EMPTY, 3 * GROUP}, {EMPTY + 1, 3 * GROUP},
           {WEIGHED, 2 * GROUP}, {TAKEN, 2 * GROUP}, {READERS, 2 * GROUP}});
  bool past_the_end = read_lists(rows, valid, lists, token, chunks, 3 * GROUP);
  for (int i = threadIdx.x; i < pairs; i += 3 * GROUP)
    angle[i] = angle_of(positions[token], freqs[i], false);
  __syncthreads();

  if (group == 2) {
    fewer_registers<88>();
    make_keys(keys, rows, chunks, lists);
    return;
  }
  more_registers<208>();
  const float4* q4 = reinterpret_cast<const float4*>(q + token * ALL_HEADS * C);
#pragma unroll 8
  for (int i = threadIdx.x; i < ALL_HEADS * C / 8; i += 2 * GROUP)
    *block_piece(queries, i / (C / 8), i % (C / 8)) = query_piece(q4, i, angle, pairs);
  publish();
  meet(READERS, 2 * GROUP);

  float o[128] = {}, top[2] = {NEVER, NEVER}, total[2] = {0.f, 0.f};
  for (int chunk = 0; chunk < chunks; ++chunk) {
    char* here = keys + chunk % 2 * KEYS_BYTES;
    meet(FULL + chunk % 2, 3 * GROUP);
    if (group == 0) {
      float s[32], decay[2];
      score(s, queries, here);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float before = top[n];
        top[n] = fmaxf(before, mask_and_max(s, n, valid[chunk]));
        decay[n] = exp2f(before - top[n]);
        total[n] = __fmaf_rn(total[n], decay[n], exponentials(s, n, top[n]));
      }
      if (chunk > 0) meet(TAKEN, 2 * GROUP);
      store_weights(weights, s, low);
      if (lane % 4 == 0) shrink[low] = decay[0], shrink[low + 8] = decay[1];
      publish();
    }
    meet(WEIGHED, 2 * GROUP);
    shrink_values<128>(o, shrink[low], shrink[low + 8]);
    add_half(o, weights, here, group);
    if (group == 1 && chunk + 1 < chunks) arrive(TAKEN, 2 * GROUP);
    if (chunk + 2 < chunks) arrive(EMPTY + chunk % 2, 3 * GROUP);
  }

  meet(READERS, 2 * GROUP);  // nobody reads shrink, weights or records any more
  if (group == 0) {
    float norms[2] = {norm_of(total[0], top[0], sink[low]),
                      norm_of(total[1], top[1], sink[low + 8])};
    if (past_the_end) norms[0] = norms[1] = not_a_number();
    if (lane % 4 == 0) shrink[low] = norms[0], shrink[low + 8] = norms[1];
  }
  meet(READERS, 2 * GROUP);
  float* staged = reinterpret_cast<float*>(shared);
  stage_values<128>(staged + group * 256, O_STRIDE, o, low, shrink[low], shrink[low + 8]);
  meet(READERS, 2 * GROUP);
  float* to = out + token * ALL_HEADS * C;
  write_rows(to, staged, O_STRIDE, 0, C, ALL_HEADS, angle, pairs, 2 * GROUP);
}
