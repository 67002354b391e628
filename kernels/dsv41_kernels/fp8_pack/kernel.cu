// FP8 records: x (rows, CHANNELS) f32 or bf16 -> records (rows, RECORD) uint8, CHANNELS E4M3 codes,
// then one E8M0 byte for every GROUP (32) channels. Contract and rounding points: fp8_pack in
// dsv41/quant.py; the bits are the same. A group that holds inf or NaN reports its first bad element.
// The window cache has 512 channels: 528 bytes. BF16: 1 where x is bf16.
//
// build: CHANNELS=512 GROUP=32 BF16=1
// build: CHANNELS=512 GROUP=32 BF16=0
#define SCALE_E4M3 0
#include "../blockscale.cuh"
#include "../pieces.cuh"

constexpr float LARGEST = 448.f;
constexpr int RECORD = CHANNELS + CHANNELS / GROUP;

// v1: one thread a group, a division per element, E4M3 by the definition's integer steps.
extern "C" __global__ void fp8_pack_v1(const Element* x, u8* records, u64* bad, long long groups,
                                       float floor) {
  long long group = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (group >= groups) return;
  long long row = group / (CHANNELS / GROUP), in_row = group % (CHANNELS / GROUP);
  u32 amax = 0;
  for (int i = 0; i < GROUP; ++i) {
    float value = element(x[group * GROUP + i]);
    amax = max(amax, magnitude(value));
    if (not_finite(magnitude(value))) report(bad, group * GROUP + i, value);
  }
  u32 byte = scale_code_plain(fmaxf(__uint_as_float(amax), floor), LARGEST);
  u8* record = records + row * RECORD;
  record[CHANNELS + in_row] = (u8)byte;
  for (int i = 0; i < GROUP; ++i) {
    float value = element(x[group * GROUP + i]);
    float scaled = fminf(fabsf(div_rn(value, scale_value(byte))), LARGEST);
    record[in_row * GROUP + i] = (u8)(e4m3_code(scaled) | sign_bit(value) << 7);
  }
}

// v2: one thread takes 16 neighbours, two lanes a group; 16-byte loads and stores, a warp reads and
// writes without gaps. The scale is a power of two, so a product is the division, and the
// instruction that makes two E4M3 codes at once rounds and saturates as the definition does:
// about 5 operations per element.
extern "C" __global__ void __launch_bounds__(256, 6)
    fp8_pack_v2(const Element* x, u8* records, u64* bad, long long pieces, float floor) {
  Piece at = piece_of_thread(pieces);
  float v[16];
  load16(x, at.index, v);
  u32 amax = 0;
  for (int i = 0; i < 16; ++i) amax = max(amax, magnitude(v[i]));
  amax = group_max(amax);
  if (not_finite(amax)) report_piece(bad, x, at.index);
  Scale s = scale_of(fmaxf(__uint_as_float(amax), floor), LARGEST);
  u32 codes[4];
  for (int i = 0; i < 4; ++i) codes[i] = e4m3x4(v + 4 * i, s.high);
  if (!at.mine) return;
  u8* record = records + at.row * RECORD;
  store_codes<RECORD>(record + 16 * at.in_row, codes, 4);
  if (at.leads) record[CHANNELS + at.in_row / 2] = (u8)s.byte;
}
