// FP8 records (rows, RECORD) uint8 -> out (rows, CHANNELS) f32 or bf16 (BF16), every value code * scale.
// Contract: fp8_unpack in dsv41/quant.py, the same bits, NaN where a code or a scale is NaN. bf16
// rounds products below its smallest step, 2^-133. Macros as in fp8_pack.
//
// build: CHANNELS=512 GROUP=32 BF16=1
// build: CHANNELS=512 GROUP=32 BF16=0
#define SCALE_E4M3 0
#include "../blockscale.cuh"
#include "../stores.cuh"

constexpr int RECORD = CHANNELS + CHANNELS / GROUP;

// v1: one thread an element.
extern "C" __global__ void fp8_unpack_v1(const u8* records, Element* out, long long elements) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i >= elements) return;
  const u8* record = records + i / CHANNELS * RECORD;
  int channel = (int)(i % CHANNELS);
  float scale = scale_value(record[CHANNELS + channel / GROUP]);
  store_one(out + i, mul_rn(e4m3_value(record[channel]), scale));
}

// v2: one thread makes one 16-byte store (8 bf16 or 4 f32) from codes read as words; one instruction
// decodes two codes.
extern "C" __global__ void __launch_bounds__(256)
    fp8_unpack_v2(const u8* records, Element* out, long long units) {
  Unit at = unit_at(blockIdx.x * (long long)blockDim.x + threadIdx.x);
  if (at.index >= units) return;
  const u8* record = records + at.row * RECORD;
  float scale = scale_value(record[CHANNELS + at.in_row * PER_STORE / GROUP]);
  float v[PER_STORE];
  for (int i = 0; i < PER_STORE; i += 4) {
    u32 codes = load_word<RECORD, 4>(record + at.in_row * PER_STORE + i);
    for (int k = 0; k < 4; k += 2) {
      u32 pair = f16x2_of_e4m3x2(codes >> (8 * k));
      v[i + k] = mul_rn(f32_of_f16(pair), scale);
      v[i + k + 1] = mul_rn(f32_of_f16(pair >> 16), scale);
    }
  }
  store_unit(out, at.index, v);
}
