// RMSNorm and the cast that an FP8 linear wants of its input, in one pass over memory:
//     y = bf16(x / sqrt(mean(x^2) + eps) * weight)          x (rows, CHANNELS) f32 or bf16 (BF16)
//     records (rows, RECORD) uint8 = E4M3 codes of y, one E8M0 byte per 32, as fp8_pack writes them
// Contract: rmsnorm_fp8 in dsv41/ops.py. The sum's order and the root's last bits differ from it, so a
// few y fall the other way when rounded to bf16; all later steps have the definition's bits. The order
// depends on CHANNELS alone: a row has the same bits in every batch. CHANNELS is a multiple of 32.
//
// build: CHANNELS=5120 BF16=1
// build: CHANNELS=5120 BF16=0
// build: CHANNELS=5120 BF16=1 SLOTS=6 BLOCKS=2
#define SCALE_E4M3 0
#define GROUP 32
#ifndef SLOTS
#define SLOTS 3
#define BLOCKS 3
#endif
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

// The sum of what WARPS whole warps have found, in an order that is the same in every launch.
template <int WARPS>
__device__ inline float sum_of_warps(float value, float* scratch) {
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0.f;
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) sum += scratch[warp];
  return sum;
}

template <int WARPS>
__device__ inline float block_sum(float value, float* scratch) {
  value = warp_sum(value);
  __syncthreads();  // scratch may still be read from the row before
  return sum_of_warps<WARPS>(value, scratch);
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

// 16 channels that a thread holds in registers, normalised, rounded and cast: the codes, and the
// scale's byte. The maximum is taken on pairs of bf16.
__device__ inline u32 cast_piece(const float* v, const float* w, float factor, u32* codes,
                                 bool* fine) {
  u32 pairs[8], top = 0;
  for (int i = 0; i < 8; ++i) {
    pairs[i] = bf16x2(normalised(v[2 * i], factor, w[2 * i]),
                      normalised(v[2 * i + 1], factor, w[2 * i + 1]));
    top = __vmaxu2(top, pairs[i] & 0x7FFF7FFFu);
  }
  u32 amax = group_max(max(top << 16, top & 0xFFFF0000u));
  *fine = !not_finite(amax);
  Scale s = scale_of(fmaxf(__uint_as_float(amax), FLOOR), LARGEST);
  for (int i = 0; i < 4; ++i) {
    float y[4] = {low_bf16(pairs[2 * i]), high_bf16(pairs[2 * i]), low_bf16(pairs[2 * i + 1]),
                  high_bf16(pairs[2 * i + 1])};
    codes[i] = e4m3x4(y, s.high);
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

#if BF16 && CHANNELS % 256 == 0 && CHANNELS <= 5120
// v4: one warp a row. 8 channels a lane and 256 a step: all of a row's loads are in flight at once, 80
// registers of them, where v3 had 32 bytes a thread; no barrier, so that warps drift apart and
// compute while others wait; the weight lies in shared memory, halves of 16 bytes apart so that no
// two lanes meet in a bank. The cost of the sum and the root is shared by 160 elements a lane
// instead of 16.
constexpr int STEPS = CHANNELS / 256, ROWS_PER_BLOCK = 4;

__device__ inline float squares_of_pair(u32 pair, float sum) {
  return fmaf(high_bf16(pair), high_bf16(pair), fmaf(low_bf16(pair), low_bf16(pair), sum));
}

// The pair is taken apart by byte permutations, which the compiler does not recognise as what
// squares_of_pair did: it would keep those floats from the sum to the cast, 160 registers.
__device__ inline u32 normalised_pair(u32 pair, float factor, float low, float high) {
  return bf16x2(normalised(__uint_as_float(prmt(pair, 0x1044)), factor, low),
                normalised(__uint_as_float(prmt(pair, 0x3244)), factor, high));
}

__device__ inline u32 e4m3x4_of_pairs(u32 first, u32 second, float factor) {
  float y[4] = {low_bf16(first), high_bf16(first), low_bf16(second), high_bf16(second)};
  return e4m3x4(y, factor);
}

// Eight channels of a lane, four lanes a group; -> false where something is not finite.
__device__ inline bool cast_eight(uint4 x, float4 low, float4 high, float factor, u8* record,
                                  int step, int lane) {
  u32 a = normalised_pair(x.x, factor, low.x, low.y), b = normalised_pair(x.y, factor, low.z, low.w);
  u32 c = normalised_pair(x.z, factor, high.x, high.y);
  u32 d = normalised_pair(x.w, factor, high.z, high.w);
  u32 top = __vmaxu2(__vmaxu2(a & 0x7FFF7FFFu, b & 0x7FFF7FFFu),
                     __vmaxu2(c & 0x7FFF7FFFu, d & 0x7FFF7FFFu));
  u32 amax = max(top << 16, top & 0xFFFF0000u);
  amax = max(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, 1));
  amax = max(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, 2));
  Scale s = scale_of(fmaxf(__uint_as_float(amax), FLOOR), LARGEST);
  *reinterpret_cast<uint2*>(record + 256 * step + 8 * lane) =
      make_uint2(e4m3x4_of_pairs(a, b, s.high), e4m3x4_of_pairs(c, d, s.high));
  if (lane % 4 == 0) record[CHANNELS + 8 * step + lane / 4] = (u8)s.byte;
  return !not_finite(amax);
}

extern "C" __global__ void __launch_bounds__(32 * ROWS_PER_BLOCK, 4)
    rmsnorm_fp8_v4(const Element* x, const float* weight, u8* records, u64* bad, long long rows,
                   float eps) {
  __shared__ float4 low[32 * STEPS], high[32 * STEPS];
  const float4* weights = reinterpret_cast<const float4*>(weight);
  for (int i = threadIdx.x; i < 32 * STEPS; i += 32 * ROWS_PER_BLOCK)
    low[i] = weights[2 * i], high[i] = weights[2 * i + 1];
  __syncthreads();
  int lane = threadIdx.x % 32;
  long long first_row = blockIdx.x * (long long)ROWS_PER_BLOCK;
  for (; first_row < rows; first_row += gridDim.x * (long long)ROWS_PER_BLOCK) {
    // trap: a loop that warps leave one by one would make every shuffle a meeting point, which costs
    // registers; so warps behind the end write the last row once more, with the same bytes
    long long row = min(first_row + threadIdx.x / 32, rows - 1);
    const uint4* from = reinterpret_cast<const uint4*>(x + row * CHANNELS) + lane;
    uint4 held[STEPS];
#pragma unroll
    for (int k = 0; k < STEPS; ++k) held[k] = from[32 * k];
    float first = 0.f, second = 0.f;
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
      first = squares_of_pair(held[k].x, squares_of_pair(held[k].y, first));
      second = squares_of_pair(held[k].z, squares_of_pair(held[k].w, second));
    }
    float factor = root(warp_sum(first + second), eps);
    bool fine = true;
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
      fine &= cast_eight(held[k], low[32 * k + lane], high[32 * k + lane], factor,
                         records + row * RECORD, k, lane);
      asm volatile("" ::: "memory");  // one step after the other: all at once would not fit
    }
    if (!__all_sync(0xFFFFFFFFu, fine))
      for (int piece = lane; piece < PIECES; piece += 32)
        report_normalised(bad, x, weight, factor, piece, row);
  }
}
#endif

// v5: v3 with a deeper queue. There one row a block is on its way, and only from the end of the sum of
// the row before: 30 KB an SM, where 4.8 TB/s and an answer after a microsecond ask for 24 KB of x at
// every moment. Here asynchronous copies bring SLOTS rows into shared memory, 90 KB and more an SM. A
// warp copies 512 neighbouring bytes and reads 32 a lane, so threads read what others have copied; a
// row costs one barrier all the same: each thread waits for its copies of the next row before the
// barrier of this row's sum, and behind it every thread has done with this row's slot, which is
// filled again. Addresses are counted up: 228 instructions a thread and row instead of 263.
// Measured before it, T = 4,096: v2 27.9 us, v3 20.1, v4 21.8; the bytes alone take 15.2.
//
// Word w of a row lies at w / WORDS + w % WORDS * LANE: neither the copies of eight neighbours nor the
// reads of eight threads meet in a bank. Same order of the sum as v2 and v3, hence the same bits.
constexpr int WORDS = sizeof(Element), ROW_WORDS = PIECES * WORDS, THREADS = 32 * WARPS;
static_assert(SLOTS >= 2);
constexpr int LANE = (PIECES + 7) / 8 * 8 + 8 / WORDS, SLOT = LANE * WORDS;

__device__ inline void fetch_row(uint4* slot, const uint4* from) {
#pragma unroll
  for (int i = 0; i < WORDS; ++i)
    if (PIECES % 32 == 0 || threadIdx.x + i * THREADS < ROW_WORDS)
      copy_16(slot + i * THREADS / WORDS, from + i * THREADS);
}

extern "C" __global__ void __launch_bounds__(THREADS, WARPS * BLOCKS <= 32 ? BLOCKS : 1)
    rmsnorm_fp8_v5(const Element* x, const float* weight, u8* records, u64* bad, long long rows,
                   float eps) {
  extern __shared__ uint4 ring[];  // SLOTS rows
  __shared__ float scratch[2][32];
  const int piece = threadIdx.x, held = min(piece, PIECES - 2 + piece % 2);
  const bool mine = PIECES % 32 == 0 || piece < PIECES;
  const long long stride = gridDim.x * (long long)ROW_WORDS;
  const uint4* from = reinterpret_cast<const uint4*>(x) + blockIdx.x * (long long)ROW_WORDS + piece;
  const int own = piece / WORDS + piece % WORDS * LANE;
  for (int k = 0; k < SLOTS; ++k, from += stride) {
    if (blockIdx.x + k * (long long)gridDim.x < rows) fetch_row(ring + k * SLOT + own, from);
    end_group();
  }
  float w[16];
  load_weight(weight, held, w);
  wait_all_but<SLOTS - 1>();
  __syncthreads();
  uint4* slot = ring;
  float* sums = scratch[0];
  u8* record = records + blockIdx.x * (long long)RECORD;
  for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
    Raw raw;
    for (int i = 0; i < WORDS; ++i) raw.words[i] = slot[held + i * LANE];
    float v[16];
    unpack_raw(raw, v);
    float sum = warp_sum(mine ? squares(v) : 0.f);
    wait_all_but<SLOTS - 2>();  // the next row has come, see sum_of_warps' barrier
    float factor = root(sum_of_warps<WARPS>(sum, sums), eps);
    if (row + SLOTS * (long long)gridDim.x < rows) fetch_row(slot + own, from);
    end_group();
    u32 codes[4];
    bool fine;
    u32 byte = cast_piece(v, w, factor, codes, &fine);
    if (!fine) report_normalised(bad, x, weight, factor, held, row);
    if (mine) store_piece(record, piece, codes, byte);
    slot = slot == ring + (SLOTS - 1) * SLOT ? ring : slot + SLOT;
    sums = scratch[sums == scratch[0]];
    from += stride, record += gridDim.x * (long long)RECORD;
  }
}
