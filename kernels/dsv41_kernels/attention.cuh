// What the attention kernels of small heads share: record formats, rotation, the gather.
//
// Macros: H heads and C channels; NEAR and FAR, the formats of window and global records: 0 float32,
// 1 E4M3 with E8M0 scales per 32 channels, 2 E2M1 with E4M3 scales per 16, low nibble first; BF16 1
// where the numerics round to bf16. Values are built from bits: under -ftz float32 subnormals are 0.

constexpr int THREADS = 128;
constexpr int QUADS = C / 4;                   // float4 in a vector of C channels
constexpr int STRIDE = QUADS + 1;              // of a record in shared memory: no bank conflicts
constexpr int TILE_THREADS = QUADS * (H / 4);  // a thread owns 4 channels x 4 heads of a result
constexpr int SPLITS = THREADS / TILE_THREADS; // so many threads share a tile, each some records
static_assert(H % 4 == 0 && 32 % H == 0 && C >= 32 && THREADS % TILE_THREADS == 0, "sizes");

__device__ float not_a_number() { return __uint_as_float(0x7fc00000u); }
__device__ float minus_infinity() { return __uint_as_float(0xff800000u); }

__device__ float bf16(float x) {
  unsigned bits = __float_as_uint(x);
  if (!BF16 || (bits & 0x7fffffffu) > 0x7f800000u) return x;
  return __uint_as_float((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
}

__device__ float e4m3(unsigned code) {
  unsigned size = code & 0x7fu;
  float value = size < 8 ? size * 0x1p-9f : __uint_as_float((size << 20) + (120u << 23));
  if (size == 0x7f) value = not_a_number();
  return code & 0x80u ? -value : value;
}

__device__ float e2m1(unsigned code) {
  unsigned size = code & 7u;
  float value = size < 2 ? size * 0.5f : __uint_as_float((size << 22) + (126u << 23));
  return code & 8u ? -value : value;
}

__device__ float times_e8m0(float x, unsigned code) {  // x * 2^(code - 127)
  if (code == 255) return not_a_number();
  return code ? x * __uint_as_float(code << 23) : 0.5f * x * 0x1p-126f;
}

// Channels 4 * quad .. + 3 of a record. Packed records are even at best, so two bytes are read at once.
template <int FORMAT>
__device__ float4 decode(const unsigned char* records, long long row, int quad) {
  if (FORMAT == 0) return reinterpret_cast<const float4*>(records)[row * QUADS + quad];
  if (FORMAT == 1) {
    const unsigned char* record = records + row * (C + C / 32);
    unsigned low, high, scale = record[C + quad / 8];
    if (C / 32 % 2 == 0) {
      const unsigned short* pairs = reinterpret_cast<const unsigned short*>(record) + 2 * quad;
      low = pairs[0], high = pairs[1];
    } else {  // every second record begins at an odd address
      const unsigned char* codes = record + 4 * quad;
      low = codes[0] | codes[1] << 8, high = codes[2] | codes[3] << 8;
    }
    return make_float4(times_e8m0(e4m3(low & 255), scale), times_e8m0(e4m3(low >> 8), scale),
                       times_e8m0(e4m3(high & 255), scale), times_e8m0(e4m3(high >> 8), scale));
  }
  const unsigned char* record = records + row * (C / 2 + C / 16);
  unsigned codes = reinterpret_cast<const unsigned short*>(record)[quad];
  float scale = e4m3(record[C / 2 + quad / 4]);
  return make_float4(e2m1(codes & 15) * scale, e2m1(codes >> 4 & 15) * scale,
                     e2m1(codes >> 8 & 15) * scale, e2m1(codes >> 12) * scale);
}

// The lists of one token: places 0 .. near_width - 1 are window rows, then come global rows.
struct Lists {
  const unsigned char *near, *far;
  long long near_count, far_count;
  const long long *near_rows, *far_rows;
  int near_width, far_width;

  // The record at a place, or -1 where there is none; past_the_end is set where it does not exist.
  __device__ long long row(long long token, int place, bool& past_the_end) const {
    bool recent = place < near_width;
    if (place >= near_width + far_width) return -1;
    long long at = recent ? token * near_width + place : token * far_width + place - near_width;
    long long row = recent ? near_rows[at] : far_rows[at];
    bool beyond = row >= (recent ? near_count : far_count);
    past_the_end |= beyond;
    return row < 0 || beyond ? -1 : row;
  }
};

// records[j] for j < padded: what rows[j] names, zeros where it is -1; trap: never the bytes of -1.
__device__ void gather(float4* records, const long long* rows, int padded, const Lists& lists) {
#pragma unroll 8
  for (int i = threadIdx.x; i < padded * QUADS; i += THREADS) {
    int j = i / QUADS, quad = i % QUADS;
    long long row = rows[j];
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
    if (row >= 0)
      x = j < lists.near_width ? decode<NEAR>(lists.near, row, quad) : decode<FAR>(lists.far, row, quad);
    records[j * STRIDE + quad] = x;
  }
}

__device__ void angles(float2* angle, const float* freqs, int pairs, long long position) {
  for (int i = threadIdx.x; i < pairs; i += THREADS) {
    float s, c;
    sincosf(__fmul_rn((float)position, freqs[i]), &s, &c);
    angle[i] = make_float2(c, s);
  }
}

// The pairs of the last channels of all heads turn by t f, or back. As the text: no fused step.
__device__ void turn(float4* vectors, const float2* angle, int pairs, bool back) {
  for (int i = threadIdx.x; i < H * pairs; i += THREADS) {
    int pair = i % pairs;
    float* z = reinterpret_cast<float*>(vectors) + (i / pairs + 1) * C - 2 * (pairs - pair);
    float real = z[0], imag = z[1], c = angle[pair].x, s = back ? -angle[pair].y : angle[pair].y;
    z[0] = __fsub_rn(__fmul_rn(real, c), __fmul_rn(imag, s));
    z[1] = __fadd_rn(__fmul_rn(real, s), __fmul_rn(imag, c));
  }
}

// Combine what the lanes h, h + H, h + 2 H .. of a warp hold for head h.
__device__ float lanes_max(float x) {
  for (int step = H; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}
__device__ float lanes_sum(float x) {
  for (int step = H; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

__device__ float dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }
__device__ void add_product(float4& sum, float weight, float4 x) {
  sum.x += weight * x.x, sum.y += weight * x.y, sum.z += weight * x.z, sum.w += weight * x.w;
}
__device__ float4 rounded(float4 x) {
  return make_float4(bf16(x.x), bf16(x.y), bf16(x.z), bf16(x.w));
}

// sum[h] = sum over j of weights[j][h] * records[j] for all heads, (H, QUADS); records are overwritten.
__device__ void weighted_sums(float4* sum, const float* weights, float4* records, int padded) {
  const int tile = threadIdx.x % TILE_THREADS, split = threadIdx.x / TILE_THREADS;
  const int quad = tile % QUADS, head = tile / QUADS * 4;
  float4 part[4] = {};
#pragma unroll 4
  for (int j = split; j < padded; j += SPLITS) {
    float4 k = records[j * STRIDE + quad];
    float4 w = *reinterpret_cast<const float4*>(weights + j * H + head);
    add_product(part[0], w.x, k), add_product(part[1], w.y, k);
    add_product(part[2], w.z, k), add_product(part[3], w.w, k);
  }
  __syncthreads();
  for (int h = 0; h < 4; ++h) records[(split * H + head + h) * QUADS + quad] = part[h];
  __syncthreads();
  for (int i = threadIdx.x; i < H * QUADS; i += THREADS) {
    float4 total = records[i];
    for (int n = 1; n < SPLITS; ++n) add_product(total, 1.f, records[n * H * QUADS + i]);
    sum[i] = total;
  }
  __syncthreads();
}
