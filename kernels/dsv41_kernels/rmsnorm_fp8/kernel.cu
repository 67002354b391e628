// RMSNorm and the cast that an FP8 linear wants of its input, in one pass over memory:
//     y = bf16(x / sqrt(mean(x^2) + eps) * weight)          x (rows, CHANNELS) f32 or bf16 (BF16)
//     records (rows, RECORD) uint8 = E4M3 codes of y, one E8M0 byte per 32, as fp8_pack writes them
// Contract: rmsnorm_fp8 in dsv41/ops.py. The sum's order and the root's last bits differ from it, so a
// few y fall the other way when rounded to bf16; all later steps have the definition's bits. The order
// depends on CHANNELS alone: a row has the same bits in every batch. CHANNELS is a multiple of 32.
//
// build: CHANNELS=5120 BF16=1
// build: CHANNELS=5120 BF16=0
#define SCALE_E4M3 0
#define GROUP 32
#include "../blockscale.cuh"
#include "../pieces.cuh"

constexpr float LARGEST = 448.f, FLOOR = 1e-4f;
constexpr int RECORD = CHANNELS + CHANNELS / GROUP, PIECES = CHANNELS / 16;
constexpr int WARPS = (PIECES + 31) / 32;

__device__ inline float round_bf16(float x) { return low_bf16(bf16x2(x, 0.f)); }

__device__ inline float warp_sum(float value) {
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, step);
  return value;
}

// The sum over WARPS whole warps, in an order that is the same in every launch.
template <int WARPS>
__device__ inline float block_sum(float value, float* scratch) {
  value = warp_sum(value);
  __syncthreads();  // scratch may still be read from the row before
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0.f;
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) sum += scratch[warp];
  return sum;
}

// v1: one block of 256 threads a row, two readings of it: one for the sum of squares, one to normalise
// and cast, a group of 32 by one thread with the definition's own steps.
extern "C" __global__ void rmsnorm_fp8_v1(const Element* x, const float* weight, u8* records,
                                          u64* bad, long long rows, float eps) {
  __shared__ float scratch[32];
  long long row = blockIdx.x;
  const Element* in = x + row * CHANNELS;
  float sum = 0.f;
  for (int c = threadIdx.x; c < CHANNELS; c += blockDim.x)
    sum = fmaf(element(in[c]), element(in[c]), sum);
  float mean = div_rn(block_sum<8>(sum, scratch), (float)CHANNELS);
  float factor = div_rn(1.f, sqrtf(mean + eps));
  for (int group = threadIdx.x; group < CHANNELS / GROUP; group += blockDim.x) {
    float y[GROUP];
    u32 amax = 0;
    for (int i = 0; i < GROUP; ++i) {
      int c = group * GROUP + i;
      y[i] = round_bf16(__fmul_rn(__fmul_rn(element(in[c]), factor), weight[c]));
      amax = max(amax, magnitude(y[i]));
      if (not_finite(magnitude(y[i]))) report(bad, row * CHANNELS + c, y[i]);
    }
    u32 byte = scale_code_plain(fmaxf(__uint_as_float(amax), FLOOR), LARGEST);
    records[row * RECORD + CHANNELS + group] = (u8)byte;
    for (int i = 0; i < GROUP; ++i) {
      float scaled = fminf(fabsf(div_rn(y[i], scale_value(byte))), LARGEST);
      u32 code = e4m3_code(scaled) | sign_bit(y[i]) << 7;
      records[row * RECORD + group * GROUP + i] = (u8)code;
    }
  }
}

__device__ inline float normalised(float x, float factor, float weight) {
  return __fmul_rn(__fmul_rn(x, factor), weight);
}

// Which of a piece came out bad: computed again from memory, as this almost never happens.
__device__ inline void report_normalised(u64* bad, const Element* x, const float* weight,
                                         float factor, int piece, long long row) {
#pragma unroll 1
  for (int i = 0; i < 16; ++i) {
    int c = 16 * piece + i;
    float y = round_bf16(normalised(element(x[row * CHANNELS + c]), factor, weight[c]));
    if (not_finite(magnitude(y))) report(bad, row * CHANNELS + c, y);
  }
}

// The larger magnitudes of two pairs, their signs multiplied; of NaN and a number NaN.
__device__ inline u32 larger_bf16x2(u32 a, u32 b) {
  u32 out;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

// 16 channels that a thread holds in registers, normalised, rounded and cast: the codes, and the
// scale's byte. The maximum is taken on pairs of bf16.
__device__ inline u32 cast_piece(const float* v, const float* w, float factor, u32* codes,
                                 bool* fine) {
  u32 pairs[8], top = 0;
  for (int i = 0; i < 8; ++i) {
    pairs[i] = bf16x2(normalised(v[2 * i], factor, w[2 * i]),
                      normalised(v[2 * i + 1], factor, w[2 * i + 1]));
    top = larger_bf16x2(top, pairs[i]);
  }
  u32 amax = group_max(max(top << 16 & 0x7FFF0000u, top & 0x7FFF0000u));
  *fine = !not_finite(amax);
  Scale s = scale_of(fmaxf(__uint_as_float(amax), FLOOR), LARGEST);
  u32 high = __byte_perm(__float_as_uint(s.high), 0, 0x3232);
  for (int i = 0; i < 4; ++i) {
    u32 a = mul_bf16x2(pairs[2 * i], high), b = mul_bf16x2(pairs[2 * i + 1], high);
    codes[i] = e4m3x2(low_bf16(a), high_bf16(a)) | e4m3x2(low_bf16(b), high_bf16(b)) << 16;
  }
  return s.byte;
}

__device__ inline void store_piece(u8* record, int piece, const u32* codes, u32 byte) {
  store_codes<RECORD>(record + 16 * piece, codes, 4);
  if (piece % 2 == 0) record[CHANNELS + piece / 2] = (u8)byte;
}

// Sum of squares of a piece, in two chains.
__device__ inline float squares(const float* v) {
  float even = 0.f, odd = 0.f;
  for (int i = 0; i < 16; i += 2) {
    even = fmaf(v[i], v[i], even);
    odd = fmaf(v[i + 1], v[i + 1], odd);
  }
  return even + odd;
}

__device__ inline void load_weight(const float* weight, int piece, float* w) {
  const float4* from = reinterpret_cast<const float4*>(weight + 16 * piece);
  for (int i = 0; i < 4; ++i) {
    float4 four = from[i];
    w[4 * i] = four.x, w[4 * i + 1] = four.y, w[4 * i + 2] = four.z, w[4 * i + 3] = four.w;
  }
}

// 1 / sqrt(sum / CHANNELS + eps) to about one unit in the last place: the fast root, corrected once.
// trap: of infinity it is 0, which the correction would turn into NaN.
__device__ inline float root(float sum, float eps) {
  float v = fmaf(sum, 1.f / CHANNELS, eps), r = rsqrtf(v);
  return magnitude(v) == 0x7F800000u ? 0.f : r * fmaf(-0.5f * v * r, r, 1.5f);
}

// v2: one block a row, a thread for every 16 channels keeps its share in registers between the sum and
// the cast, so that x is read once: 2 * 5,120 + 5,280 bytes a row.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    rmsnorm_fp8_v2(const Element* x, const float* weight, u8* records, u64* bad, long long rows,
                   float eps) {
  __shared__ float scratch[WARPS];
  long long row = blockIdx.x;
  int piece = threadIdx.x, held = min(piece, PIECES - 2 + piece % 2);
  float v[16], w[16];
  load16(x, row * PIECES + held, v);
  load_weight(weight, held, w);
  float factor = root(block_sum<WARPS>(piece < PIECES ? squares(v) : 0.f, scratch), eps);
  u32 codes[4];
  bool fine;
  u32 byte = cast_piece(v, w, factor, codes, &fine);
  if (!fine) report_normalised(bad, x, weight, factor, held, row);
  if (piece < PIECES) store_piece(records + row * RECORD, piece, codes, byte);
}

// v3: blocks stay and take every gridDim.x-th row. The weight, 4 bytes a channel against 2 of x, is
// read once a block instead of once a row, and the next row is on its way while this one is summed:
// v2 waits for its loads with nothing else to do between two barriers.
//
// Slower, and gone: a queue of three or more rows a block in shared memory, filled by cp.async; one
// warp a row, which holds it in 80 registers a lane and needs no barrier.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    rmsnorm_fp8_v3(const Element* x, const float* weight, u8* records, u64* bad, long long rows,
                   float eps) {
  __shared__ float scratch[WARPS];
  int piece = threadIdx.x, held = min(piece, PIECES - 2 + piece % 2);
  float w[16];
  load_weight(weight, held, w);
  Raw next = load_raw(x, blockIdx.x * (long long)PIECES + held);
  for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
    float v[16];
    unpack_raw(next, v);
    long long coming = row + gridDim.x;
    if (coming < rows) next = load_raw(x, coming * PIECES + held);
    float factor = root(block_sum<WARPS>(piece < PIECES ? squares(v) : 0.f, scratch), eps);
    u32 codes[4];
    bool fine;
    u32 byte = cast_piece(v, w, factor, codes, &fine);
    if (!fine) report_normalised(bad, x, weight, factor, held, row);
    if (piece < PIECES) store_piece(records + row * RECORD, piece, codes, byte);
  }
}

// As load_raw, of what nobody reads again: it leaves the L2 cache to the records.
__device__ inline Raw load_once(const Element* from) {
  Raw raw;
  for (int i = 0; i < (int)sizeof(Element); ++i)
    raw.words[i] = __ldcs(reinterpret_cast<const uint4*>(from) + i);
  return raw;
}

// v4: v3 with one barrier a row instead of two, as sums of neighbouring rows lie in places of their
// own; with pointers that move instead of addresses made anew; and x is read as data that nobody
// needs again, so that records stay in the L2 cache and go to memory later. Measured on an H200,
// T = 1, 512 and 4,096: v2 4.6, 7.2 and 27.3 us, v3 4.8, 7.3 and 20.0, v4 4.6, 7.2 and 18.2; the
// bytes alone take 15.2 of the last.
//
// Slower, and gone: x read as data to keep, or other hints to the cache; sums of the next row under
// way while a row is cast, by mbarriers, also with the squares on tensor cores; the weight in shared
// memory and four blocks an SM; the row after the next fetched to L2; rows by bulk copies, two to
// six in flight; fewer blocks, so that all of them have equally many rows.
extern "C" __global__ void __launch_bounds__(32 * WARPS, BF16 && WARPS <= 10 ? 3 : 1)
    rmsnorm_fp8_v4(const Element* x, const float* weight, u8* records, u64* bad, long long rows,
                   float eps) {
  __shared__ __align__(16) float sums[2][(WARPS + 3) / 4 * 4];
  int piece = threadIdx.x, held = min(piece, PIECES - 2 + piece % 2);
  bool mine = PIECES % 32 == 0 || piece < PIECES;
  long long left = rows - blockIdx.x, step = gridDim.x;
  const Element* from = x + blockIdx.x * (long long)CHANNELS + 16 * held;
  u8* to = records + blockIdx.x * (long long)RECORD;
  Raw next = load_once(from);
  float w[16];
  load_weight(weight, held, w);
  for (int turn = 0; left > 0; turn ^= 1, left -= step, to += step * RECORD) {
    float v[16];
    unpack_raw(next, v);
    if (left > step) next = load_once(from += step * CHANNELS);
    float part = warp_sum(mine ? squares(v) : 0.f), sum = 0.f;
    if (threadIdx.x % 32 == 0) sums[turn][threadIdx.x / 32] = part;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) sum += sums[turn][warp];
    float factor = root(sum, eps);
    u32 codes[4];
    bool fine;
    u32 byte = cast_piece(v, w, factor, codes, &fine);
    if (!fine) report_normalised(bad, x, weight, factor, held, rows - left);
    if (mine) store_piece(to, piece, codes, byte);
  }
}
