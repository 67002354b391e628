// v3 `tiles`, see kernel.cu. One block of eight warps for HEADS heads (64 or 16) of a token; all
// warps decode, score, weigh and add in turn.

constexpr int WARPS = 8, ROW = 1024;  // bytes of a row of 512 bf16
constexpr int RAW = NEAR_BYTES;       // bytes kept per record, the larger format
constexpr int M_TILES = HEADS / 16;
constexpr int M_SCORES = M_TILES == 4 ? 2 : 1, N_SCORES = M_TILES == 4 ? 4 : 2;  // tiles of a warp
constexpr int S_STRIDE = CHUNK + 8;        // floats: rows start in other banks
constexpr int PARTS = WARPS * 32 / HEADS;  // threads that share a head in the softmax

// Rows of bf16 in pieces of 16 bytes; piece i of a row lies at i ^ (row % 8), so that eight rows,
// or eight pieces, never meet in one bank.
template <int BYTES>
__device__ char* piece(char* rows, int row, int index) {
  return rows + row * BYTES + ((index ^ (row & 7)) << 4);
}

// The bytes of chunk `chunk` set out for shared memory; empty places become zeros.
__device__ void fetch(char* raw, const long long* rows, int chunk, const Lists& lists) {
  for (int i = threadIdx.x; i < CHUNK * (RAW / 16); i += WARPS * 32) {
    int j = i / (RAW / 16), part = i % (RAW / 16), place = chunk * CHUNK + j;
    bool recent = place < lists.near_width;
    long long row = rows[place];
    const int bytes = recent ? NEAR_BYTES : FAR_BYTES;
    if (part * 16 >= bytes) continue;
    const unsigned char* from = recent ? lists.near : lists.far;
    copy_16(raw + j * RAW + part * 16, from + (row < 0 ? 0 : row * bytes + part * 16), row >= 0);
  }
}

// raw -> keys (CHUNK rows of ROW bytes). Neighbouring threads take neighbouring records.
__device__ void decode_chunk(char* keys, const char* raw, int chunk, int near_width) {
  const int j = threadIdx.x % CHUNK;
  const char* record = raw + j * RAW;
  const unsigned char* scales = reinterpret_cast<const unsigned char*>(record);
  if (chunk * CHUNK + j < near_width) {
#pragma unroll 4
    for (int i = threadIdx.x / CHUNK; i < 32; i += WARPS * 32 / CHUNK) {  // 16 channels
      uint4 codes = reinterpret_cast<const uint4*>(record)[i];
      unsigned scale = e8m0_scale(scales[512 + i / 2]);
      *reinterpret_cast<uint4*>(piece<ROW>(keys, j, 2 * i)) = place_e4m3(codes.x, codes.y, scale);
      *reinterpret_cast<uint4*>(piece<ROW>(keys, j, 2 * i + 1)) =
          place_e4m3(codes.z, codes.w, scale);
    }
  } else {
#pragma unroll 2
    for (int i = threadIdx.x / CHUNK; i < 16; i += WARPS * 32 / CHUNK) {  // 32 channels
      uint4 codes = reinterpret_cast<const uint4*>(record)[i];
      unsigned first = e4m3_scale(scales[256 + 2 * i]), second = e4m3_scale(scales[257 + 2 * i]);
      *reinterpret_cast<uint4*>(piece<ROW>(keys, j, 4 * i)) = place_e2m1(codes.x, first);
      *reinterpret_cast<uint4*>(piece<ROW>(keys, j, 4 * i + 1)) = place_e2m1(codes.y, first);
      *reinterpret_cast<uint4*>(piece<ROW>(keys, j, 4 * i + 2)) = place_e2m1(codes.z, second);
      *reinterpret_cast<uint4*>(piece<ROW>(keys, j, 4 * i + 3)) = place_e2m1(codes.w, second);
    }
  }
}

// q of HEADS heads, turned and rounded.
__device__ void load_queries(char* queries, const float4* q, const float2* angle, int pairs) {
  for (int i = threadIdx.x; i < HEADS * C / 8; i += WARPS * 32)
    *reinterpret_cast<uint4*>(piece<ROW>(queries, i / (C / 8), i % (C / 8))) =
        query_piece(q, i, angle, pairs);
}

// scores (2, HEADS, S_STRIDE): q k over either half of the channels. Four warps share a half.
__device__ void score_chunk(float* scores, char* queries, char* keys) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, half = warp / 4;
  const int m0 = M_TILES == 4 ? warp % 2 * 32 : 0,
            n0 = M_TILES == 4 ? warp % 4 / 2 * 32 : warp % 4 * 16;
  float s[M_SCORES][N_SCORES][4] = {};
#pragma unroll 2
  for (int k = half * 32; k < half * 32 + 32; k += 2) {  // two pieces are 16 channels
    unsigned a[M_SCORES][4];
#pragma unroll
    for (int m = 0; m < M_SCORES; ++m)
      load_matrices(a[m], piece<ROW>(queries, m0 + 16 * m + lane % 16, k + lane / 16));
#pragma unroll
    for (int n = 0; n < N_SCORES; n += 2) {
      unsigned b[4];
      load_matrices(b, piece<ROW>(keys, n0 + 8 * n + lane % 8 + lane / 16 * 8, k + lane / 8 % 2));
#pragma unroll
      for (int m = 0; m < M_SCORES; ++m) {
        mma(s[m][n], a[m], b[0], b[1]);
        mma(s[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
#pragma unroll
  for (int m = 0; m < M_SCORES; ++m)
#pragma unroll
    for (int n = 0; n < N_SCORES; ++n) {
      float* to =
          scores + (half * HEADS + m0 + 16 * m + lane / 4) * S_STRIDE + n0 + 8 * n + lane % 4 * 2;
      *reinterpret_cast<float2*>(to) = make_float2(s[m][n][0], s[m][n][1]);
      *reinterpret_cast<float2*>(to + 8 * S_STRIDE) = make_float2(s[m][n][2], s[m][n][3]);
    }
}

// One chunk of the softmax: weights p in bf16, and by how much what was summed before shrinks.
// PARTS threads share a head; sums are paired so that they come out the same for both values of
// PARTS.
__device__ void weigh_chunk(char* weights, float* shrink, const float* scores,
                            const long long* rows, float& top, float& total) {
  const int head = threadIdx.x / PARTS, part = threadIdx.x % PARTS;
  constexpr int GROUPS = 16 / PARTS;  // of four places
  const float scale = LIFT * LOG2_E / sqrtf((float)C);
  float p[GROUPS][4], before = top;
#pragma unroll
  for (int i = 0; i < GROUPS; ++i) {
    const int j = 4 * (part + i * PARTS);
    float4 x = *reinterpret_cast<const float4*>(scores + head * S_STRIDE + j);
    float4 y = *reinterpret_cast<const float4*>(scores + (HEADS + head) * S_STRIDE + j);
    p[i][0] = x.x + y.x, p[i][1] = x.y + y.y, p[i][2] = x.z + y.z, p[i][3] = x.w + y.w;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      p[i][n] = rows[j + n] >= 0 ? p[i][n] * scale : minus_infinity();
      top = fmaxf(top, p[i][n]);
    }
  }
  for (int step = 1; step < PARTS; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
  float sum[GROUPS];
#pragma unroll
  for (int i = 0; i < GROUPS; ++i) {
    const int group = part + i * PARTS;
#pragma unroll
    for (int n = 0; n < 4; ++n) p[i][n] = exp2f(p[i][n] - top);
    sum[i] = (p[i][0] + p[i][1]) + (p[i][2] + p[i][3]);
    *reinterpret_cast<uint2*>(piece<2 * CHUNK>(weights, head, group / 2) + group % 2 * 8) =
        make_uint2(bf16_pair(p[i][0], p[i][1]), bf16_pair(p[i][2], p[i][3]));
  }
#pragma unroll
  for (int step = GROUPS / 2; step; step /= 2)
    for (int i = 0; i < step; ++i) sum[i] += sum[i + step];
  for (int step = PARTS / 2; step; step /= 2) sum[0] += __shfl_xor_sync(~0u, sum[0], step);
  float decay = exp2f(before - top);
  total = total * decay + sum[0];
  if (part == 0) shrink[head] = decay;
}

// o += p v for the 64 channels of this warp.
__device__ void add_values(float o[M_TILES][8][4], char* weights, char* keys, const float* shrink) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  bool shrinks = false;
  float factor[M_TILES][2];
#pragma unroll
  for (int m = 0; m < M_TILES; ++m)
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      factor[m][n] = shrink[16 * m + 8 * n + lane / 4];
      shrinks |= factor[m][n] != 1.f;
    }
  if (__any_sync(~0u, shrinks)) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        o[m][n][0] *= factor[m][0], o[m][n][1] *= factor[m][0];
        o[m][n][2] *= factor[m][1], o[m][n][3] *= factor[m][1];
      }
  }
#pragma unroll
  for (int k = 0; k < CHUNK / 16; ++k) {
    unsigned a[M_TILES][4];
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
      load_matrices(a[m], piece<2 * CHUNK>(weights, 16 * m + lane % 16, 2 * k + lane / 16));
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      unsigned b[4];
      load_transposed(b, piece<ROW>(keys, 16 * k + lane % 16, 8 * warp + n + lane / 16));
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) {
        mma(o[m][n], a[m], b[0], b[1]);
        mma(o[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// o over its norm, rounded, turned back, rounded, out.
__device__ void store_values(float* out, float* rows, const float o[M_TILES][8][4],
                             const float* norm, const float2* angle, int pairs) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float inverse[M_TILES][2];
#pragma unroll
  for (int m = 0; m < M_TILES; ++m)
    for (int n = 0; n < 2; ++n) inverse[m][n] = LIFT / norm[16 * m + 8 * n + lane / 4];
#pragma unroll
  for (int m = 0; m < M_TILES; ++m)
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int head = 16 * m + lane / 4 + i / 2 * 8,
            channel = 64 * warp + 8 * n + lane % 4 + i % 2 * 4;
        rows[head * O_STRIDE + channel] = bf16(o[m][n][i] * inverse[m][i / 2]);
      }
  __syncthreads();
  write_rows(out, rows, O_STRIDE, 0, C, HEADS, angle, pairs, WARPS * 32);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    tiles(const float* q, const long long* positions, const float* freqs, int pairs,
          const unsigned char* near, long long near_count, const long long* near_rows,
          int near_width, const unsigned char* far, long long far_count, const long long* far_rows,
          int far_width, const float* sink, unsigned long long* bad, float* out) {
  const Lists lists = {near,      near_count, near_rows, near_width, far,
                       far_count, far_rows,   far_width, bad};
  const int chunks = (lists.width() + CHUNK - 1) / CHUNK;
  const int groups = ALL_HEADS / HEADS, first_head = blockIdx.x % groups * HEADS;
  const long long token = blockIdx.x / groups;
  char* queries = reinterpret_cast<char*>(shared);                         // (HEADS, 512) bf16
  char* keys = queries + HEADS * ROW;                                      // (CHUNK, 512) bf16
  char* raw = keys + CHUNK * ROW;                                          // (CHUNK, RAW) bytes
  float* scores = reinterpret_cast<float*>(raw + CHUNK * RAW);             // (2, HEADS, S_STRIDE)
  char* weights = reinterpret_cast<char*>(scores + 2 * HEADS * S_STRIDE);  // (HEADS, CHUNK) bf16
  float* shrink = reinterpret_cast<float*>(weights + HEADS * CHUNK * 2);   // (HEADS,); later norms
  float2* angle = reinterpret_cast<float2*>(shrink + HEADS);               // (pairs,)
  long long* rows = reinterpret_cast<long long*>(angle + pairs);           // (chunks * CHUNK,)

  bool past_the_end = false;
  for (int j = threadIdx.x; j < chunks * CHUNK; j += WARPS * 32)
    rows[j] = lists.row(token, j, past_the_end);
  for (int i = threadIdx.x; i < pairs; i += WARPS * 32)
    angle[i] = angle_of(positions[token], freqs[i], false);
  past_the_end = __syncthreads_or(past_the_end);
  if (chunks) fetch(raw, rows, 0, lists);
  const long long begin = (token * ALL_HEADS + first_head) * C;
  load_queries(queries, reinterpret_cast<const float4*>(q + begin), angle, pairs);

  float o[M_TILES][8][4] = {}, top = NEVER, total = 0.f;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    wait_for_copies();
    __syncthreads();  // the bytes are here, and nobody reads the keys before these any more
    decode_chunk(keys, raw, chunk, near_width);
    __syncthreads();
    if (chunk + 1 < chunks) fetch(raw, rows, chunk + 1, lists);
    score_chunk(scores, queries, keys);
    __syncthreads();
    weigh_chunk(weights, shrink, scores, rows + chunk * CHUNK, top, total);
    __syncthreads();
    add_values(o, weights, keys, shrink);
  }
  __syncthreads();
  const int head = threadIdx.x / PARTS;
  float norm = total + exp2f(sink[first_head + head] * LOG2_E - top);
  if (norm == 0.f) norm = 1.f;  // no records gives an infinite norm: o is 0
  if (threadIdx.x % PARTS == 0) shrink[head] = past_the_end ? not_a_number() : norm;
  __syncthreads();
  store_values(out + begin, reinterpret_cast<float*>(shared), o, shrink, angle, pairs);
}
