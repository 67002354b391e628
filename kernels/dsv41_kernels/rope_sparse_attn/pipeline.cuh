// v4 `pipeline`, see kernel.cu. One block of three warpgroups per token:
//
//   maker    reads the bytes of chunk i + 1 and decodes them into one of two buffers, while
//   left     scores chunk i, weighs it, hands the weights over and adds the left half of the values;
//   right    adds the right half.
//
// v3 does one after the other, and its warps read q and records from shared memory again and again to
// feed their own registers (3.5 bytes per 128 products); here the tensor cores read shared memory
// themselves, once for 64 heads, and decoding costs no time of theirs. Shared memory: q 64 KB, records
// 2 * 64 KB, weights 8 KB. Each block of 64 channels is laid out as wgmma.cuh wants it.

#include "wgmma.cuh"

constexpr int GROUP = 128, KEYS_BYTES = 8 * BLOCK;
enum Barrier { FULL = 1, EMPTY = 3, WEIGHED = 5, TAKEN = 6, READERS = 7 };  // FULL, EMPTY: two each

// Piece i (of 64) of row `row` in eight blocks of 64 channels.
__device__ uint4* block_piece(char* blocks, int row, int i) {
  return reinterpret_cast<uint4*>(blocks + i / 8 * BLOCK + row * 128 + ((i % 8 ^ (row & 7)) << 4));
}

// Two E4M3 codes (16 bits) to twice(scale * 2^118) each, in two exact steps.
__device__ uint2 e4m3_scales(unsigned codes) {
  unsigned x = (codes & 0x7f) << 4 | (codes & 0x7f00) << 12 | (codes & 0x80) << 8 | (codes & 0x8000) << 16;
  const unsigned lift = twice((119 + 127) << 7);
  x = multiply_pairs(multiply_pairs(x, lift), lift);
  return make_uint2(__byte_perm(x, 0, 0x1010), __byte_perm(x, 0, 0x3232));
}

__device__ uint4 read_16(const unsigned char* from, bool real) {
  return real ? __ldg(reinterpret_cast<const uint4*>(from)) : make_uint4(0, 0, 0, 0);
}

__device__ unsigned word(uint4 x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

// The maker. Two threads share a record: of every 32 bytes one takes the first half, one the second.
struct Record {
  const unsigned char* bytes;
  bool real;
  uint4 codes[8], scales[2];

  __device__ void read_codes(int from) {
#pragma unroll
    for (int i = 0; i < 8; ++i) codes[i] = read_16(bytes + from + 32 * i + threadIdx.x % 2 * 16, real);
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

__device__ void make_keys(char* keys, const long long* rows, int chunks, const Lists& lists) {
  const int row = threadIdx.x % GROUP / 2;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int place = chunk * CHUNK + row, buffer = chunk % 2;
    const bool recent = place < lists.near_width;
    Record record;
    record.real = rows[place] >= 0;
    record.bytes = recent ? lists.near : lists.far;
    if (record.real) record.bytes += rows[place] * (recent ? NEAR_BYTES : FAR_BYTES);
    record.read_codes(0);
    record.scales[0] = read_16(record.bytes + (recent ? 512 : 256), record.real);
    record.scales[1] = read_16(record.bytes + 272, record.real && !recent);
    if (chunk >= 2) meet(EMPTY + buffer, 3 * GROUP);  // the bytes are on their way while this waits
    char* to = keys + buffer * KEYS_BYTES;
    if (recent) {
      record.place_near(to, row, 0);
      record.read_codes(256);
      record.place_near(to, row, 1);
    } else {
      record.place_far(to, row);
    }
    publish();
    __syncwarp();  // a warp may hold records of both kinds
    arrive(FULL + buffer, 3 * GROUP);
  }
}

// The softmax of the left group: a thread holds two heads (`low` is the first), of each the places
// 8 j + 2 t and + 1. s becomes the weights' exponents; sums stay each thread's own until the end.
struct Softmax {
  float top[2] = {NEVER, NEVER}, total[2] = {0.f, 0.f}, decay[2];

  __device__ void weigh(float* s, unsigned long long valid) {
    const float scale = LIFT * LOG2_E / sqrtf((float)C);
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float before = top[n];
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        float& x = s[j / 2 * 4 + n * 2 + j % 2];
        x = valid >> (j / 2 * 8 + 2 * t + j % 2) & 1 ? x * scale : minus_infinity();
        top[n] = fmaxf(top[n], x);
      }
      top[n] = fmaxf(top[n], __shfl_xor_sync(~0u, top[n], 1));
      top[n] = fmaxf(top[n], __shfl_xor_sync(~0u, top[n], 2));
      decay[n] = exp2f(before - top[n]);
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        float& x = s[j / 2 * 4 + n * 2 + j % 2];
        x = exp2f(x - top[n]);
        sum += x;
      }
      total[n] = total[n] * decay[n] + sum;
    }
  }

  __device__ float norm(int n, float sink) {
    total[n] += __shfl_xor_sync(~0u, total[n], 1);
    total[n] += __shfl_xor_sync(~0u, total[n], 2);
    float all = total[n] + exp2f(sink * LOG2_E - top[n]);
    return all == 0.f ? 1.f : all;  // infinite for a query without records: its o is 0
  }
};

__device__ void shrink_values(float* o, float low, float high) {
  if (!__any_sync(~0u, low != 1.f || high != 1.f)) return;
#pragma unroll
  for (int j = 0; j < 32; ++j)
    o[4 * j] *= low, o[4 * j + 1] *= low, o[4 * j + 2] *= high, o[4 * j + 3] *= high;
}

__device__ void add_half(float* o, const char* weights, const char* keys, int half) {
  begin_products();
#pragma unroll
  for (int k = 0; k < CHUNK / 16; ++k)
    product_256(o, matrix(weights + 32 * k), matrix(keys + 4 * half * BLOCK + 2048 * k), 1);
  finish_products();
}

extern "C" __global__ void __launch_bounds__(3 * GROUP, 1)
    pipeline(const float* q, const long long* positions, const float* freqs, int pairs,
             const unsigned char* near, long long near_count, const long long* near_rows, int near_width,
             const unsigned char* far, long long far_count, const long long* far_rows, int far_width,
             const float* sink, unsigned long long* bad, float* out) {
  const Lists lists = {near, near_count, near_rows, near_width, far, far_count, far_rows, far_width, bad};
  const int chunks = (lists.width() + CHUNK - 1) / CHUNK, group = threadIdx.x / GROUP;
  const int lane = threadIdx.x % 32, low = threadIdx.x % GROUP / 32 * 16 + lane / 4, high = low + 8;
  const long long token = blockIdx.x;
  char* queries = reinterpret_cast<char*>(shared);             // 8 blocks: (64 heads, 512)
  char* keys = queries + KEYS_BYTES;                           // 2 times 8 blocks: (CHUNK, 512)
  char* weights = keys + 2 * KEYS_BYTES;                       // a block: (64 heads, CHUNK)
  float* shrink = reinterpret_cast<float*>(weights + BLOCK);   // (64,); later norms
  float2* angle = reinterpret_cast<float2*>(shrink + 64);      // (pairs,)
  long long* rows = reinterpret_cast<long long*>(angle + pairs);                       // (chunks, CHUNK)
  unsigned* valid = reinterpret_cast<unsigned*>(rows + chunks * CHUNK);  // (chunks, 2) bits of places

  bool past_the_end = false;
  for (int j = threadIdx.x; j < chunks * CHUNK; j += 3 * GROUP) {
    rows[j] = lists.row(token, j, past_the_end);
    unsigned bits = __ballot_sync(~0u, rows[j] >= 0);
    if (lane == 0) valid[j / 32] = bits;
  }
  for (int i = threadIdx.x; i < pairs; i += 3 * GROUP)
    angle[i] = angle_of(positions[token], freqs[i], false);
  past_the_end = __syncthreads_or(past_the_end);

  if (group == 2) {
    fewer_registers<88>();
    make_keys(keys, rows, chunks, lists);
    return;
  }
  more_registers<208>();
  const float4* q4 = reinterpret_cast<const float4*>(q + token * ALL_HEADS * C);
  for (int i = threadIdx.x; i < ALL_HEADS * C / 8; i += 2 * GROUP)
    *block_piece(queries, i / (C / 8), i % (C / 8)) = query_piece(q4, i, angle, pairs);
  publish();
  meet(READERS, 2 * GROUP);

  float o[128] = {};
  Softmax softmax;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    char* here = keys + chunk % 2 * KEYS_BYTES;
    meet(FULL + chunk % 2, 3 * GROUP);
    if (group == 0) {
      float s[32];
      begin_products();
#pragma unroll
      for (int k = 0; k < C / 16; ++k) {
        const int at = k / 4 * BLOCK + k % 4 * 32;
        product_64(s, matrix(queries + at), matrix(here + at), k > 0);
      }
      finish_products();
      softmax.weigh(s, valid[2 * chunk] | (unsigned long long)valid[2 * chunk + 1] << 32);
      if (chunk > 0) meet(TAKEN, 2 * GROUP);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        char* to = weights + ((j ^ (low & 7)) << 4) + lane % 4 * 4;
        *reinterpret_cast<unsigned*>(to + low * 128) = bf16_pair(s[4 * j], s[4 * j + 1]);
        *reinterpret_cast<unsigned*>(to + high * 128) = bf16_pair(s[4 * j + 2], s[4 * j + 3]);
      }
      if (lane % 4 == 0) shrink[low] = softmax.decay[0], shrink[high] = softmax.decay[1];
      publish();
    }
    meet(WEIGHED, 2 * GROUP);
    shrink_values(o, shrink[low], shrink[high]);
    add_half(o, weights, here, group);
    if (group == 1 && chunk + 1 < chunks) arrive(TAKEN, 2 * GROUP);
    if (chunk + 2 < chunks) arrive(EMPTY + chunk % 2, 3 * GROUP);
  }

  meet(READERS, 2 * GROUP);  // nobody reads shrink, weights or records any more
  if (group == 0) {
    float norms[2] = {softmax.norm(0, sink[low]), softmax.norm(1, sink[high])};
    if (lane % 4 == 0) {
      shrink[low] = past_the_end ? not_a_number() : norms[0];
      shrink[high] = past_the_end ? not_a_number() : norms[1];
    }
  }
  meet(READERS, 2 * GROUP);
  float* staged = reinterpret_cast<float*>(shared);
  const float low_norm = shrink[low], high_norm = shrink[high];
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    float* to = staged + low * O_STRIDE + group * 256 + 8 * j + lane % 4;
    to[0] = bf16(o[4 * j] * LIFT / low_norm), to[4] = bf16(o[4 * j + 1] * LIFT / low_norm);
    to += 8 * O_STRIDE;
    to[0] = bf16(o[4 * j + 2] * LIFT / high_norm), to[4] = bf16(o[4 * j + 3] * LIFT / high_norm);
  }
  meet(READERS, 2 * GROUP);
  write_rows(out + token * ALL_HEADS * C, staged, ALL_HEADS, angle, pairs, 2 * GROUP);
}
