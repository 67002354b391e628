// FP4 records: x (rows, CHANNELS) f32 or bf16 -> records (rows, RECORD) uint8, all codes (two E2M1 a
// byte, even channel in the low nibble), then one scale byte for every GROUP channels. Contract and
// rounding points: fp4_pack in dsv41/quant.py; the bits are the same. A group that holds inf or NaN
// reports its first bad element and stores whatever comes out.
//
// BF16: 1 where x is bf16. GROUP 16 with SCALE_E4M3 1 is the main KV cache (512 channels: 288 bytes),
// GROUP 32 with SCALE_E4M3 0 the index keys (128 channels: 68 bytes).
//
// build: CHANNELS=512 GROUP=16 SCALE_E4M3=1 BF16=1
// build: CHANNELS=512 GROUP=16 SCALE_E4M3=1 BF16=0
// build: CHANNELS=128 GROUP=32 SCALE_E4M3=0 BF16=1
// build: CHANNELS=128 GROUP=32 SCALE_E4M3=0 BF16=0
#include "../blockscale.cuh"
#include "../pieces.cuh"

constexpr float LARGEST = 6.f;
constexpr int CODES = CHANNELS / 2, RECORD = CODES + CHANNELS / GROUP;

// v1: one thread a group, one element at a time, the definition's own steps: a division per element
// and the nearest of eight values by comparing with the seven midpoints, ties to the even code.
__device__ u32 nearest_e2m1(float m) {
  const float midpoint[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.f};
  u32 code = 0;
  for (u32 k = 1; k < 8; ++k)
    if (m > midpoint[k - 1] || (m == midpoint[k - 1] && k % 2 == 0)) code = k;
  return code;
}

extern "C" __global__ void fp4_pack_v1(const Element* x, u8* records, u64* bad, long long groups,
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
  record[CODES + in_row] = (u8)byte;
  for (int i = 0; i < GROUP; i += 2) {
    u32 pair = 0;
    for (int j = 0; j < 2; ++j) {
      float value = element(x[group * GROUP + i + j]);
      float scaled = div_rn(value, scale_value(byte));
      pair |= (nearest_e2m1(fabsf(scaled)) | sign_bit(value) << 3) << (4 * j);
    }
    record[(in_row * GROUP + i) / 2] = (u8)pair;
  }
}

// v2: one thread takes 16 neighbours with 16-byte loads and stores their 8 code bytes at once. The
// warp reads 512 channels and writes them without gaps: 1,024 + 288 bytes per record of bf16, each
// sector once, where v1 read every sector 16 times. No division: about 19 instructions an element.
extern "C" __global__ void __launch_bounds__(256, 6)
    fp4_pack_v2(const Element* x, u8* records, u64* bad, long long pieces, float floor) {
  Piece at = piece_of_thread(pieces);
  float v[16];
  load16(x, at.index, v);
  u32 amax = 0;
  for (int i = 0; i < 16; ++i) amax = max(amax, magnitude(v[i]));
  amax = group_max(amax);
  if (not_finite(amax)) report_piece(bad, x, at.index);
  Scale s = scale_of(fmaxf(__uint_as_float(amax), floor), LARGEST);
  u32 codes[2] = {0, 0};
  for (int i = 0; i < 16; ++i) {
    u32 code = e2m1_code(ratio(v[i], s)) | sign_bit(v[i]) << 3;
    codes[i / 8] |= code << (4 * (i % 8));
  }
  if (!at.mine) return;
  u8* record = records + at.row * RECORD;
  store_codes<RECORD>(record + 8 * at.in_row, codes, 2);
  if (at.leads) record[CODES + at.in_row * 16 / GROUP] = (u8)s.byte;
}

#if BF16
// Two elements an instruction, on 16-bit halves of a word. m holds magnitudes, two bf16 a word.
//
// y * 2^-14 as f16 has the layout of E2M1: exponent field 1 is [1, 2), subnormals are multiples of
// the same step below 1. So rounding to a code is rounding the 16-bit integers to 9 bits less, both
// halves in one addition. bf16 has 8 significant bits: y is a tie or 2^-10 away from it, hence the
// error of the multiplication vanishes when f16 rounds it, and a tie is a tie.
__device__ inline u32 round_e2m1x2(u32 m, float factor) {  // codes at bits 9-11 and 25-27
  u32 h = f16x2(mul_rn(low_bf16(m), factor), mul_rn(high_bf16(m), factor));
  return h + 0x00FF00FFu + ((h >> 9) & 0x00010001u);
}

// The eight nibbles of four words, the signs taken from w. Bytes 1 and 3 of a word hold its two codes
// (at bit 1 of the byte) and signs (at bit 7): gather the bytes first, then shift four at a time.
__device__ inline u32 nibbles(const u32* w, const u32* m, float factor) {
  u32 out[2];
  for (int half = 0; half < 2; ++half) {
    const int k = 2 * half;
    u32 codes = __byte_perm(round_e2m1x2(m[k], factor), round_e2m1x2(m[k + 1], factor), 0x7531);
    u32 signs = __byte_perm(w[k], w[k + 1], 0x7531);
    u32 four = select(0x0E0E0E0Eu, codes, signs >> 3);  // at bits 1-4 of each byte
    out[half] = select(0x000F000Fu, four >> 1, four >> 5);  // two a byte, in bytes 0 and 2
  }
  return __byte_perm(out[0], out[1], 0x6420);
}

// v3: packed arithmetic throughout: maximum, rounding and assembly handle two to four elements an
// instruction. Integer instructions run at half the rate of float ones, 64 lanes a clock and SM: v2's
// 12 an element take longer than the memory, these 7 do not. Saturation costs nothing where
// it cannot happen: a scale is below amax / 7 only at the ends of E4M3's range.
extern "C" __global__ void __launch_bounds__(256, 6)
    fp4_pack_v3(const Element* x, u8* records, u64* bad, long long pieces, float floor) {
  Piece at = piece_of_thread(pieces);
  u32 w[8], m[8], top = 0;
  words_of(load_raw(x, at.index), w);
  for (int i = 0; i < 8; ++i) top = __vmaxu2(top, m[i] = w[i] & 0x7FFF7FFFu);
  u32 amax = group_max(max(top << 16, top & 0xFFFF0000u));
  if (not_finite(amax)) report_piece(bad, x, at.index);
  Scale s = scale_of(fmaxf(__uint_as_float(amax), floor), LARGEST);
  if (SCALE_E4M3 && __uint_as_float(amax) >= 7.f * s.value) {
    u32 limit = __float_as_uint(LARGEST * s.value) >> 16;  // exact in bf16
    for (int i = 0; i < 8; ++i) m[i] = __vminu2(m[i], limit | limit << 16);
  }
  float factor = mul_rn(s.high, 0x1p-14f);
  u32 codes[2] = {nibbles(w, m, factor), nibbles(w + 4, m + 4, factor)};
  if (!at.mine) return;
  u8* record = records + at.row * RECORD;
  store_codes<RECORD>(record + 8 * at.in_row, codes, 2);
  if (at.leads) record[CODES + at.in_row * 16 / GROUP] = (u8)s.byte;
}
#endif
