// RMSNorm and the cast that an FP8 linear wants of its input, in one pass over memory:
//     y = bf16(x / sqrt(mean(x^2) + eps) * weight)          x (rows, CHANNELS) f32 or bf16 (BF16)
//     records (rows, RECORD) uint8 = E4M3 codes of y, one E8M0 byte per 32, as fp8_pack writes them
// Contract: rmsnorm_fp8 in dsv41/ops.py. All roundings are the definition's; only the order of the sum
// differs, so the root may differ in its last bit and a few y by one bf16 step. The order depends on
// CHANNELS alone: a row has the same bits in every batch. CHANNELS is a multiple of 32.
//
// build: CHANNELS=5120 BF16=1
// build: CHANNELS=5120 BF16=0
#define SCALE_E4M3 0
#define GROUP 32
#include "../blockscale.cuh"
#include "../pieces.cuh"

constexpr float LARGEST = 448.f, FLOOR = 1e-4f;
constexpr int RECORD = CHANNELS + CHANNELS / GROUP, PIECES = CHANNELS / 16;

__device__ inline float round_bf16(float x) { return low_bf16(bf16x2(x, 0.f)); }

// The sum over a block of at most 1,024 threads, whole warps; the same order in every launch.
__device__ inline float block_sum(float value, float* scratch) {
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, step);
  __syncthreads();  // scratch may still be read from the row before
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0.f;
  for (int warp = 0; warp < (int)blockDim.x / 32; ++warp) sum += scratch[warp];
  return sum;
}

// v1: one block a row, two readings of it: one for the sum of squares, one to normalise and cast, a
// group of 32 by one thread with the definition's own steps.
extern "C" __global__ void rmsnorm_fp8_v1(const Element* x, const float* weight, u8* records,
                                          u64* bad, long long rows, float eps) {
  __shared__ float scratch[32];
  long long row = blockIdx.x;
  const Element* in = x + row * CHANNELS;
  float sum = 0.f;
  for (int c = threadIdx.x; c < CHANNELS; c += blockDim.x)
    sum = fmaf(element(in[c]), element(in[c]), sum);
  float mean = div_rn(block_sum(sum, scratch), (float)CHANNELS);
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

// One piece of 16 channels that a thread holds in registers: normalised, rounded, cast, stored.
__device__ inline void cast_piece(const float* v, const float* w, float factor, int piece,
                                  long long row, u8* records, u64* bad) {
  float y[16];
  u32 amax = 0;
  for (int i = 0; i < 16; i += 2) {
    u32 pair = bf16x2(__fmul_rn(__fmul_rn(v[i], factor), w[i]),
                      __fmul_rn(__fmul_rn(v[i + 1], factor), w[i + 1]));
    y[i] = low_bf16(pair), y[i + 1] = high_bf16(pair);
    amax = max(amax, max(magnitude(y[i]), magnitude(y[i + 1])));
  }
  amax = group_max(amax);
  bool mine = piece < PIECES;
  if (not_finite(amax) && mine) report_piece(bad, row * PIECES + piece, y);
  Scale s = scale_of(fmaxf(__uint_as_float(amax), FLOOR), LARGEST);
  u32 codes[4];
  for (int i = 0; i < 4; ++i) codes[i] = e4m3x4(y + 4 * i, s.high);
  if (!mine) return;
  u8* record = records + row * RECORD;
  store_codes<RECORD>(record + 16 * piece, codes, 4);
  if (piece % 2 == 0) record[CHANNELS + piece / 2] = (u8)s.byte;
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

__device__ inline float root(float sum, float eps) {
  return div_rn(1.f, sqrtf(div_rn(sum, (float)CHANNELS) + eps));
}

// v2: one block a row, a thread for every 16 channels (PIECES threads, whole warps) keeps its share in
// registers between the sum and the cast, so that x is read once: 2 * 5,120 + 5,280 bytes a row.
extern "C" __global__ void rmsnorm_fp8_v2(const Element* x, const float* weight, u8* records,
                                          u64* bad, long long rows, float eps) {
  __shared__ float scratch[32];
  long long row = blockIdx.x;
  int piece = threadIdx.x, held = min(piece, PIECES - 2 + piece % 2);
  float v[16], w[16];
  load16(x, row * PIECES + held, v);
  load_weight(weight, held, w);
  float factor = root(block_sum(piece < PIECES ? squares(v) : 0.f, scratch), eps);
  cast_piece(v, w, factor, piece, row, records, bad);
}

// v3: blocks stay and take every gridDim.x-th row. The weight, 4 bytes a channel against 2 of x, is
// read once a block instead of once a row, and the next row is on its way while this one is summed:
// v2 waits for its loads with nothing else to do between two barriers.
extern "C" __global__ void rmsnorm_fp8_v3(const Element* x, const float* weight, u8* records,
                                          u64* bad, long long rows, float eps) {
  __shared__ float scratch[32];
  int piece = threadIdx.x, held = min(piece, PIECES - 2 + piece % 2);
  float w[16];
  load_weight(weight, held, w);
  Raw next = load_raw(x, blockIdx.x * (long long)PIECES + held);
  for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
    float v[16];
    unpack_raw(next, v);
    long long coming = min(row + gridDim.x, rows - 1);
    next = load_raw(x, coming * PIECES + held);
    float factor = root(block_sum(piece < PIECES ? squares(v) : 0.f, scratch), eps);
    cast_piece(v, w, factor, piece, row, records, bad);
  }
}
