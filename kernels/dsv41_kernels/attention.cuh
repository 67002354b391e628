// What the attention kernels of few heads share: a block per token, its records in shared memory.
//
// Macros: H heads, and those of records.cuh, which comes before.

constexpr int THREADS = 128;
constexpr int STRIDE = QUADS + 1;               // of a record in shared memory: no bank conflicts
constexpr int TILE_THREADS = QUADS * (H / 4);   // a thread owns 4 channels x 4 heads of a result
constexpr int SPLITS = THREADS / TILE_THREADS;  // so many threads share a tile, each some records
static_assert(H % 4 == 0 && 32 % H == 0 && C >= 32 && THREADS % TILE_THREADS == 0, "sizes");

// records[j] for j < padded: what rows[j] names, zeros where it is -1; trap: never the bytes of -1.
__device__ void gather(float4* records, const long long* rows, int padded, const Lists& lists) {
#pragma unroll 8
  for (int i = threadIdx.x; i < padded * QUADS; i += THREADS) {
    int j = i / QUADS, quad = i % QUADS;
    long long row = rows[j];
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
    if (row >= 0)
      x = j < lists.near_width ? decode<NEAR>(lists.near, row, quad)
                               : decode<FAR>(lists.far, row, quad);
    records[j * STRIDE + quad] = x;
  }
}

__device__ void angles(float2* angle, const float* freqs, int pairs, long long position) {
  for (int i = threadIdx.x; i < pairs; i += THREADS) angle[i] = angle_of(position, freqs[i], false);
}

// The pairs of the last channels of all heads turn by t f, or back.
__device__ void turn(float4* vectors, const float2* angle, int pairs, bool back) {
  for (int i = threadIdx.x; i < H * pairs; i += THREADS) {
    int pair = i % pairs;
    float* z = reinterpret_cast<float*>(vectors) + (i / pairs + 1) * C - 2 * (pairs - pair);
    turn_pair(z[0], z[1], make_float2(angle[pair].x, back ? -angle[pair].y : angle[pair].y));
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

// products[j][h] = records[j] . vectors[h] for j < padded. A thread takes a record and all heads,
// so that a record leaves shared memory once; the vectors are read by all threads of a warp
// together.
__device__ void multiply(float* products, const float4* records, const float4* vectors,
                         int padded) {
  for (int j = threadIdx.x; j < padded; j += THREADS) {
    float s[H] = {};
#pragma unroll 4
    for (int quad = 0; quad < QUADS; ++quad) {
      float4 k = records[j * STRIDE + quad];
#pragma unroll
      for (int h = 0; h < H; ++h) s[h] += dot(k, vectors[h * QUADS + quad]);
    }
#pragma unroll
    for (int h = 0; h < H; h += 4)
      *reinterpret_cast<float4*>(products + j * H + h) =
          make_float4(s[h], s[h + 1], s[h + 2], s[h + 3]);
  }
}

__device__ float masked_score(float product, long long row) {
  const float scale = 1.f / sqrtf((float)C);
  return row < 0 ? minus_infinity() : product * scale;
}

// sum[h] = sum over j of weights[j][h] * records[j] for all heads, (H, QUADS); records are
// overwritten.
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
