// Records of the caches and how they are read: decoded values, and which record a list names.
//
// Macros: C channels; NEAR and FAR, the formats of window and global records: 0 float32, 1 E4M3
// with E8M0 scales per 32 channels, 2 E2M1 with E4M3 scales per 16, low nibble first; BF16 1 where
// the numerics round to bf16. Values are built from bits: under -ftz float32 subnormals are 0.

constexpr int QUADS = C / 4;  // float4 in a vector of C channels

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

// Channels 4 * quad .. + 3 of a record. Packed records are only even, so they are read by two
// bytes.
template <int FORMAT>
__device__ float4 decode(const unsigned char* records, long long row, int quad) {
  if (FORMAT == 0) return __ldg(reinterpret_cast<const float4*>(records) + row * QUADS + quad);
  if (FORMAT == 1) {
    const unsigned char* record = records + row * (C + C / 32);
    unsigned low, high, scale = __ldg(record + C + quad / 8);
    if (C / 32 % 2 == 0) {
      const unsigned short* pairs = reinterpret_cast<const unsigned short*>(record) + 2 * quad;
      low = __ldg(pairs), high = __ldg(pairs + 1);
    } else {  // every second record begins at an odd address
      const unsigned char* codes = record + 4 * quad;
      low = __ldg(codes) | __ldg(codes + 1) << 8;
      high = __ldg(codes + 2) | __ldg(codes + 3) << 8;
    }
    return make_float4(times_e8m0(e4m3(low & 255), scale), times_e8m0(e4m3(low >> 8), scale),
                       times_e8m0(e4m3(high & 255), scale), times_e8m0(e4m3(high >> 8), scale));
  }
  const unsigned char* record = records + row * (C / 2 + C / 16);
  unsigned codes = __ldg(reinterpret_cast<const unsigned short*>(record) + quad);
  float scale = e4m3(__ldg(record + C / 2 + quad / 4));
  return make_float4(e2m1(codes & 15) * scale, e2m1(codes >> 4 & 15) * scale,
                     e2m1(codes >> 8 & 15) * scale, e2m1(codes >> 12) * scale);
}

// The lists of a token: places 0 .. near_width - 1 name window records, then come global records.
struct Lists {
  const unsigned char* near;
  long long near_count;
  const long long* near_rows;
  int near_width;
  const unsigned char* far;
  long long far_count;
  const long long* far_rows;
  int far_width;
  unsigned long long* bad = nullptr;  // the error word, as errors.py reads it

  __device__ int width() const { return near_width + far_width; }

  // What is listed at a place, -1 where nothing is.
  __device__ long long listed(long long token, int place) const {
    bool recent = place < near_width;
    if (place >= width()) return -1;
    long long at = recent ? token * near_width + place : token * far_width + place - near_width;
    return __ldg((recent ? near_rows : far_rows) + at);
  }

  // That as a record, -1 where there is none. One past the end is not read but reported.
  __device__ long long checked(long long row, long long token, int place,
                               bool& past_the_end) const {
    bool beyond = row >= (place < near_width ? near_count : far_count);
    if (beyond && bad) atomicMax(bad, ~(4ull * (token * width() + place) + 3));
    past_the_end |= beyond;
    return row < 0 || beyond ? -1 : row;
  }

  __device__ long long row(long long token, int place, bool& past_the_end) const {
    return checked(listed(token, place), token, place, past_the_end);
  }
};

__device__ float dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }
__device__ void add_product(float4& sum, float weight, float4 x) {
  sum.x += weight * x.x, sum.y += weight * x.y, sum.z += weight * x.z, sum.w += weight * x.w;
}
__device__ float4 rounded(float4 x) {
  return make_float4(bf16(x.x), bf16(x.y), bf16(x.z), bf16(x.w));
}

__device__ void turn_pair(float& real, float& imag, float2 angle) {  // as the text: no fused step
  float x = real, y = imag;
  real = __fsub_rn(__fmul_rn(x, angle.x), __fmul_rn(y, angle.y));
  imag = __fadd_rn(__fmul_rn(x, angle.y), __fmul_rn(y, angle.x));
}

// cos and sin of t f, the product rounded to float32, by Taylor's series within an eighth of a
// turn. Angles are large: position times up to 1. CUDA's sincosf takes a slow path from 105,615 on,
// thousands of clocks for a warp; in float64 two steps take the quarters off an angle below 2^50.
__device__ float2 angle_of(long long position, float freq, bool back) {
  const double angle = __fmul_rn((float)position, freq), to_integer = 0x1.8p52;
  const double shifted = fma(angle, 0x1.45f306dc9c883p-1, to_integer);
  const double count = shifted - to_integer;
  const int quarter = __double2loint(shifted);
  const double x = fma(-count, 0x1.1a62633145c07p-54, fma(-count, 0x1.921fb54442d18p0, angle));
  const double y = x * x;
  double s = fma(fma(fma(1. / 362880, y, -1. / 5040), y, 1. / 120), y, -1. / 6);
  double c = fma(fma(fma(fma(-1. / 3628800, y, 1. / 40320), y, -1. / 720), y, 1. / 24), y, -.5);
  s = fma(x * y, s, x), c = fma(y, c, 1.);
  const float cosine = quarter & 1 ? s : c, sine = quarter & 1 ? c : s;
  const bool below = (quarter & 2) != 0, left = (quarter + 1 & 2) != 0;
  return make_float2(left ? -cosine : cosine, below != back ? -sine : sine);
}
