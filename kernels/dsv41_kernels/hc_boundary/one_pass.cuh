// v4 of hc_boundary: one pass whose 24 dot products of length 4 D run on tensor cores.
//
// Cut along the channels, not along the streams: all four streams of a channel meet in one thread,
// so mixing needs no communication, and a slice of fn fits into shared memory and is read once.
//
//   unit   32 channels of 16 tokens, the work of a warp: two rows and 8 channels a lane
//   half   UNITS units, whose sums are added in order;  D = 32 * UNITS * HALVES
//   total  the HALVES sums in order, by one warp, when all blocks have sent theirs
//
// New streams are bf16, so they are exact operands; a number of fn is the sum of three bf16, which
// together keep its 24 bits, so the products are those of float32. A unit is 8 steps of k = 16,
// then its sums are added in float32: the tensor core's own rounding never runs over more than 64.
//
// The cut depends on D alone: a row has the same bits alone, in a small launch (`thin`, a block
// takes one half of 16 tokens) and in a large one (`wide`, a block keeps one half and walks over
// tiles of 16 tokens). Blocks wait for one another, so a launch never has more of them than there
// are SMs, an SM takes any of them, and whoever waits too long stops the launch with an error.
//
// Bytes a token, bf16: 20 D through memory; 208 * HALVES of sums stay in L2. fn, 384 D bytes, is
// read for every 16 tokens (thin) or once a launch and team (wide), where v3 reads it for every 4.
#pragma once
#include "../tensor.cuh"

constexpr int WIDTH = 32 * UNITS * HALVES;
constexpr int PARTS = 3;   // bf16 summands of a number of fn
constexpr int TILES = 3;   // MIX = 24 outputs in tiles of 8

__device__ __forceinline__ float reciprocal_root(float square, float eps) {
  return 1.f / sqrtf(square / WIDTH + eps);
}

// The two bf16 of a word.
__device__ __forceinline__ float low_bf16(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(unsigned pair) {
  return __uint_as_float(pair & 0xffff0000u);
}

// One number from memory to shared memory, behind the thread's back.
__device__ __forceinline__ void copy_ahead(float* to, const float* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from)
               : "memory");
}

// Eight neighbouring channels, as they are stored.
struct Eight {
#if BF16_STORED
  uint4 raw;
  __device__ __forceinline__ void get(const Stored* at) {
    raw = __ldcs(reinterpret_cast<const uint4*>(at));
  }
  __device__ __forceinline__ void take(const Stored* shared) {
    raw = *reinterpret_cast<const uint4*>(shared);
  }
  __device__ __forceinline__ unsigned word(int i) const {
    return i == 0 ? raw.x : i == 1 ? raw.y : i == 2 ? raw.z : raw.w;
  }
  __device__ __forceinline__ float low(int i) const { return low_bf16(word(i)); }
  __device__ __forceinline__ float high(int i) const { return high_bf16(word(i)); }
#else
  float4 raw[2];
  __device__ __forceinline__ void get(const Stored* at) {
    raw[0] = __ldcs(reinterpret_cast<const float4*>(at));
    raw[1] = __ldcs(reinterpret_cast<const float4*>(at) + 1);
  }
  __device__ __forceinline__ void take(const Stored* shared) {
    raw[0] = reinterpret_cast<const float4*>(shared)[0];
    raw[1] = reinterpret_cast<const float4*>(shared)[1];
  }
  __device__ __forceinline__ float low(int i) const { return i % 2 ? raw[i / 2].z : raw[i / 2].x; }
  __device__ __forceinline__ float high(int i) const { return i % 2 ? raw[i / 2].w : raw[i / 2].y; }
#endif
};

// Four words of two bf16 each -> eight stored numbers.
__device__ __forceinline__ void put_eight(Stored* at, const unsigned (&w)[4]) {
#if BF16_STORED
  __stcs(reinterpret_cast<uint4*>(at), make_uint4(w[0], w[1], w[2], w[3]));
#else
  float4* out = reinterpret_cast<float4*>(at);
#pragma unroll
  for (int i = 0; i < 2; ++i)
    __stcs(out + i, make_float4(low_bf16(w[2 * i]), high_bf16(w[2 * i]), low_bf16(w[2 * i + 1]),
                                high_bf16(w[2 * i + 1])));
#endif
}

// The lane's place in the 16 tokens from `tile` on: rows g and g + 8, channels 8 q .. 8 q + 7 of a
// unit. A row behind the last token is read as the last one, and not written. `step` is a row's
// distance to the tile, as an int: 64 bits are for the tile alone.
struct Place {
  long long tile;
  int mine, last;
  __device__ __forceinline__ Place(long long tile, long long tokens)
      : tile(tile), mine(threadIdx.x % 32 / 4), last((int)min(tokens - tile, 16ll) - 1) {}
  __device__ __forceinline__ int step(int r) const { return min(mine + 8 * r, last); }
  __device__ __forceinline__ bool valid(int r) const { return mine + 8 * r <= last; }
};

// Where the lane writes the new streams.
struct Writes {
  Stored* out[2];
  bool valid[2];
  __device__ __forceinline__ Writes(Stored* to, const Place& p, int c) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      out[r] = to + (p.tile * (S * WIDTH) + c) + p.step(r) * (S * WIDTH);
      valid[r] = p.valid(r);
    }
  }
  __device__ __forceinline__ void put(int r, int k, const unsigned (&w)[4]) const {
    if (valid[r]) put_eight(out[r] + k * WIDTH, w);
  }
};

// What the lane's row r of a unit reads: eight channels of every stream and of y.
struct Row {
  Eight x[S], y;
};

// In registers, from memory.
struct Held {
  Row rows[2];
  __device__ __forceinline__ void get(const Stored* streams, const Stored* more, const Place& p,
                                      int c, int r) {
    long long row = p.tile + p.step(r);
    rows[r].y.get(more + row * WIDTH + c);
#pragma unroll
    for (int j = 0; j < S; ++j) rows[r].x[j].get(streams + (row * S + j) * WIDTH + c);
  }
  __device__ __forceinline__ const Row& row(int r) const { return rows[r]; }
};

// What one row needs for stream k: column k of comb, post[k] and pre[k].
struct Column {
  float comb[S], post, pre;
};

// Coefficients of a tile in a warp's own shared memory, (S, 16, 8); in registers they would be 48.
// `fetch` and `wait` are the two ends of a copy that takes its time and no registers.
struct Rows {
  float* table;
  __device__ __forceinline__ Column column(int r, int k) const {
    const float4* at =
        reinterpret_cast<const float4*>(table + (k * 16 + threadIdx.x % 32 / 4 + 8 * r) * 8);
    float4 comb = at[0], rest = at[1];
    return {{comb.x, comb.y, comb.z, comb.w}, rest.x, rest.y};
  }
  // Two lanes a token: streams 2 h and 2 h + 1 of pre and post, those rows of comb.
  __device__ __forceinline__ void fetch(Mixing<const float> from, const Place& p) const {
    int lane = threadIdx.x % 32, h = lane % 2 * 2;
    long long t = p.tile + min(lane / 2, p.last);
    float* to = table + lane / 2 * 8;
    __syncwarp();  // all lanes have read what lies there
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      copy_ahead(to + (h + i) * 128 + S, from.post + t * S + h + i);
      copy_ahead(to + (h + i) * 128 + S + 1, from.pre + t * S + h + i);
#pragma unroll
      for (int k = 0; k < S; ++k)
        copy_ahead(to + k * 128 + h + i, from.comb + (t * S + h + i) * S + k);
    }
  }
  __device__ __forceinline__ void wait() const {
    wait_for_copies();
    __syncwarp();
  }
};

// Sums of a unit: 24 dot products in the layout of the tensor core, squares of the new streams and
// of the collapsed row by lane.
struct Sums {
  float dot[TILES][4], square[2], collapsed[2];
};

// The lane's eight numbers of fn for stream k, tile j and its channels from c on.
__device__ __forceinline__ void get_fn(const float* fn, int k, int j, int c, float4 (&eight)[2]) {
  int row = 8 * j + threadIdx.x % 32 / 4;
  const float4* from = reinterpret_cast<const float4*>(fn + (row * S + k) * WIDTH + c);
  eight[0] = __ldg(from), eight[1] = __ldg(from + 1);
}

// Eight numbers of one row of fn as three words of bf16 pairs for each of the two k-steps.
__device__ __forceinline__ void split(const float4 (&eight)[2], uint4 (&parts)[PARTS]) {
  float4 low = eight[0], high = eight[1];
  float rest[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int p = 0; p < PARTS; ++p) {
    unsigned w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      w[i] = bf16_pair(rest[2 * i], rest[2 * i + 1]);
      rest[2 * i] -= low_bf16(w[i]);
      rest[2 * i + 1] -= high_bf16(w[i]);
    }
    parts[p] = make_uint4(w[0], w[1], w[2], w[3]);
  }
}

// `units` units of fn, from channel `start` on, into shared memory in the order in which lanes read
// them: [unit][stream][tile][part][lane], 16 bytes each; a warp's reads are 512 neighbouring bytes.
// Done by `threads` threads, which divide the work, of which the caller is number `thread`.
template <int units, int threads>
__device__ __forceinline__ void put_fn(const float* fn, int start, uint4* fragments, int thread) {
#pragma unroll
  for (int n = 0; n < units * S * TILES * 32 / threads; ++n) {
    int i = thread + n * threads, lane = i % 32;
    int j = i / 32 % TILES, k = i / 32 / TILES % S, u = i / 32 / TILES / S;
    float4 eight[2];
    uint4 parts[PARTS];
    get_fn(fn, k, j, start + u * 32 + lane % 4 * 8, eight);
    split(eight, parts);
#pragma unroll
    for (int s = 0; s < PARTS; ++s) fragments[(i / 32 * PARTS + s) * 32 + lane] = parts[s];
  }
}

// The same of one unit by one warp. The numbers come through `raw` in shared memory: all are on
// their way at once, for which a lane has no registers.
__device__ __forceinline__ void put_unit_of_fn(const float* fn, int start, float4* raw,
                                               uint4* fragments) {
  int lane = threadIdx.x % 32, row = lane / 4;
#pragma unroll
  for (int n = 0; n < S * TILES; ++n) {
    int j = n % TILES, k = n / TILES;
    const float* from = fn + ((8 * j + row) * S + k) * WIDTH + start + lane % 4 * 8;
    copy_16(raw + 2 * n * 32 + lane, from, true);
    copy_16(raw + (2 * n + 1) * 32 + lane, from + 4, true);
  }
  wait_for_copies();  // a lane reads only what it has copied itself
#pragma unroll
  for (int n = 0; n < S * TILES; ++n) {
    float4 eight[2] = {raw[2 * n * 32 + lane], raw[(2 * n + 1) * 32 + lane]};
    uint4 parts[PARTS];
    split(eight, parts);
#pragma unroll
    for (int s = 0; s < PARTS; ++s) fragments[(n * PARTS + s) * 32 + lane] = parts[s];
  }
}

// The lane's share of stream k and tile j of a unit, from there.
__device__ __forceinline__ void take_fn(const uint4* unit, int k, int j, uint4 (&parts)[PARTS]) {
#pragma unroll
  for (int s = 0; s < PARTS; ++s)
    parts[s] = unit[((k * TILES + j) * PARTS + s) * 32 + threadIdx.x % 32];
}

constexpr int UNIT_FRAGMENTS = S * TILES * PARTS * 32;  // uint4 of a unit of fn
constexpr int UNIT_NUMBERS = S * TILES * 2 * 32;        // float4 of it as it is in memory

// One unit: new streams, collapsed row (a word a row and pair of channels, in `raw`), sums.
// in.row(r) gives row r, to.put(r, k, words) writes stream k of it; `fragments` are the unit's of
// fn, begin() is called before their first use. zero is a 0 that the compiler does not know. With
// `half_full` the second eight rows do not exist.
template <class Inputs, class Begin>
__device__ __forceinline__ void unit(const Inputs& in, const Rows& rows, const Writes& to,
                                     unsigned (&raw)[2][4], Sums& sums, unsigned zero,
                                     const uint4* fragments, const Begin& begin, bool half_full) {
  // row by row, so that only one row's inputs are unpacked at a time
  unsigned operand[S][2][4] = {};  // [stream][k-step], in the order of the tensor core
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (r == 1 && half_full) break;
    float x[8] = {}, square = 0.f, collapsed = 0.f;
    const Row old = in.row(r);
#pragma unroll
    for (int k = 0; k < S; ++k) {
      Column a = rows.column(r, k);
      unsigned now[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float low = 0.f, high = 0.f;
#pragma unroll
        for (int j = 0; j < S; ++j) {
          low = __fmaf_rn(a.comb[j], old.x[j].low(i), low);
          high = __fmaf_rn(a.comb[j], old.x[j].high(i), high);
        }
        low = __fadd_rn(__fmul_rn(a.post, old.y.low(i)), low);
        high = __fadd_rn(__fmul_rn(a.post, old.y.high(i)), high);
        now[i] = bf16_pair(low, high);
        // trap: stored words and operands want different neighbours among the registers; without
        // this the compiler copies the operands before every product
        operand[k][i / 2][r + i % 2 * 2] = now[i] ^ zero;
        low = low_bf16(now[i]), high = high_bf16(now[i]);
        x[2 * i] = __fmaf_rn(a.pre, low, x[2 * i]);
        x[2 * i + 1] = __fmaf_rn(a.pre, high, x[2 * i + 1]);
        square = __fmaf_rn(low, low, square);
        square = __fmaf_rn(high, high, square);
      }
      to.put(r, k, now);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      raw[r][i] = bf16_pair(x[2 * i], x[2 * i + 1]);
      float low = low_bf16(raw[r][i]), high = high_bf16(raw[r][i]);
      collapsed = __fmaf_rn(low, low, collapsed);
      collapsed = __fmaf_rn(high, high, collapsed);
    }
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {  // the four lanes of a row
      square += __shfl_xor_sync(~0u, square, step);
      collapsed += __shfl_xor_sync(~0u, collapsed, step);
    }
    sums.square[r] = square;
    sums.collapsed[r] = collapsed;
  }
  begin();
  float dot[2][TILES][4] = {};  // two chains of products a tile: one alone would wait for itself
#pragma unroll
  for (int k = 0; k < S; ++k)
#pragma unroll
    for (int j = 0; j < TILES; ++j) {
      uint4 b[PARTS];
      take_fn(fragments, k, j, b);
#pragma unroll
      for (int s = 0; s < PARTS; ++s) {
        mma(dot[0][j], operand[k][0], b[s].x, b[s].y);
        mma(dot[1][j], operand[k][1], b[s].z, b[s].w);
      }
    }
#pragma unroll
  for (int j = 0; j < TILES; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) sums.dot[j][i] = dot[0][j][i] + dot[1][j][i];
}

// The sums of a unit into rows of SUMS numbers (row t of `table`) and `squares`[t], t < 16.
__device__ __forceinline__ void put_sums(const Sums& sums, float* table, float* squares) {
  int lane = threadIdx.x % 32, q = lane % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int t = lane / 4 + 8 * r;
#pragma unroll
    for (int j = 0; j < TILES; ++j)
      *reinterpret_cast<float2*>(table + t * SUMS + 8 * j + 2 * q) =
          make_float2(sums.dot[j][2 * r], sums.dot[j][2 * r + 1]);
    if (q == 0) table[t * SUMS + MIX] = sums.square[r];
    if (q == 1) squares[t] = sums.collapsed[r];
  }
}

// A unit of the collapsed row, normalised: bf16 or float32 numbers, or codes and a scale. `norm`
// points to the weights of the lane's channels in shared memory.
__device__ __forceinline__ void put_unit(const unsigned (&raw)[2][4], const float (&root)[2],
                                         const Place& p, int c, const float* norm, void* x) {
  const float4* from = reinterpret_cast<const float4*>(norm);
  float4 a = from[0], b = from[1];
  float weight[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    unsigned w[4];
    float amax = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      w[i] = bf16_pair(low_bf16(raw[r][i]) * root[r] * weight[2 * i],
                       high_bf16(raw[r][i]) * root[r] * weight[2 * i + 1]);
      amax = fmaxf(amax, fmaxf(fabsf(low_bf16(w[i])), fabsf(high_bf16(w[i]))));
    }
#if FP8
    amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 1));
    amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 2));
    if (!p.valid(r)) continue;
    unsigned scale = fp8_scale(amax);
    float inverse = fp8_inverse(scale);
    unsigned char* record = static_cast<unsigned char*>(x) + p.tile * (WIDTH + WIDTH / 32) +
                            p.step(r) * (WIDTH + WIDTH / 32);
#pragma unroll
    for (int i = 0; i < 4; ++i)  // records are even, not always a multiple of 8
      reinterpret_cast<unsigned short*>(record + c)[i] =
          e4m3x2(low_bf16(w[i]) * inverse, high_bf16(w[i]) * inverse);
    if (threadIdx.x % 4 == 0) record[WIDTH + c / 32] = scale;
#else
    if (p.valid(r))
      put_eight(static_cast<Stored*>(x) + (p.tile * WIDTH + c) + p.step(r) * WIDTH, w);
#endif
  }
}

// ---- coefficients of finished tokens ----------------------------------------------------------

// trap: a block that never starts would be waited for for ever; some seconds are enough for all
// that run, and an error says more than a GPU that does not come back.
constexpr unsigned PATIENCE = 1u << 24;

// The lane's number of base and its set's scale. Read at the start: behind the wait for the sums it
// would cost a trip to memory.
struct Affine {
  float scale = 0.f, base = 0.f;
  __device__ __forceinline__ Affine(const float* all_scales, const float* all_bases) {
    int m = threadIdx.x % 32;
    if (m < MIX) scale = all_scales[m < 2 * S ? m / S : 2], base = all_bases[m];
  }
};

// The sum of one number over the halves, in order; `stride` words from half to half. The numbers
// may still be on their way: each shares a word with the tag of its tile and launch, so whoever
// sees the tag has the number, without a count of arrivals in between.
__device__ __forceinline__ float awaited_sum(const u64* at, int stride, unsigned tag) {
  float total = 0.f;
#pragma unroll 1
  for (int h = 0; h < HALVES; h += 32) {
    u64 word[32];
    bool all = false;
#pragma unroll 1
    for (unsigned looks = 0; !all; ++looks) {
      if (looks == PATIENCE) __trap();
      all = true;
#pragma unroll
      for (int i = 0; i < 32; ++i)
        word[i] = h + i < HALVES ? load_relaxed(at + (h + i) * stride) : (u64)tag << 32;
#pragma unroll
      for (int i = 0; i < 32; ++i) all &= (unsigned)(word[i] >> 32) == tag;
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) total += __uint_as_float((unsigned)word[i]);
  }
  __syncwarp();
  return total;
}

__device__ __forceinline__ void put_tagged(u64* at, float value, unsigned tag) {
  store_relaxed(at, (u64)tag << 32 | __float_as_uint(value));
}

// Sums of a tile's UNITS units, added in order, into its half's words of the inbox: 16 rows of SUMS
// places and 16 squares of the collapsed rows. By `threads` threads, whole warps, of which the
// caller is number `thread`.
template <int threads>
__device__ __forceinline__ void send_sums(const float (*tables)[16][SUMS],
                                          const float (*collapsed)[16], u64* sums, u64* squares,
                                          unsigned tag, int thread) {
  const float* from = &tables[0][0][0] + thread;
#pragma unroll
  for (int n = 0; n < 16 * SUMS; n += threads) {
    float total = 0.f;
#pragma unroll
    for (int u = 0; u < UNITS; ++u)
      if (n + threads <= 16 * SUMS || thread < 16 * SUMS - n) total += from[n + u * 16 * SUMS];
    if (thread % SUMS <= MIX && thread < 16 * SUMS - n) put_tagged(sums + thread + n, total, tag);
  }
  if (thread < 16) {
    float total = 0.f;
#pragma unroll
    for (int u = 0; u < UNITS; ++u) total += collapsed[u][thread];
    put_tagged(squares + thread, total, tag);
  }
}

// One token, a lane a number: pre and post leave at once; the softmax rows of comb, plus eps, wait
// in `matrix` (S * S) for the thread that scales them.
__device__ __forceinline__ void mix_token(float total, long long t, const Affine& affine,
                                          float* pre, float* post, float* matrix,
                                          float norm_eps, float eps) {
  int m = threadIdx.x % 32;
  float rms = sqrtf(__shfl_sync(~0u, total, MIX) / (S * WIDTH) + norm_eps);
  float z = m < MIX ? total / rms * affine.scale + affine.base : 0.f, gate = sigmoid(z);
  float top = fmaxf(z, __shfl_xor_sync(~0u, z, 1));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  float e = expf(z - top), sum = e + __shfl_xor_sync(~0u, e, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  if (m < S) pre[t * S + m] = gate + eps;
  else if (m < 2 * S) post[t * S + m - S] = 2.f * gate;
  else if (m < MIX) matrix[m - 2 * S] = e / sum + eps;
}

// A matrix in shared memory -> comb, by one thread: its passes depend on each other.
__device__ __forceinline__ void scale_matrix(const float* matrix, float* comb, int iterations,
                                             float eps) {
  float k[S][S], row[S], column[S], factor[S];
#pragma unroll
  for (int i = 0; i < S * S; ++i) k[i / S][i % S] = matrix[i];
#pragma unroll
  for (int i = 0; i < S; ++i) row[i] = column[i] = 1.f;
  sinkhorn_scales(k, row, column, factor, iterations, eps);
#pragma unroll
  for (int i = 0; i < S * S; ++i) comb[i] = row[i / S] * k[i / S][i % S] * column[i % S];
}

// Both for one token, by a warp.
__device__ __forceinline__ void finish_token(float total, long long t, const Affine& affine,
                                             float* pre, float* post, float* comb, float* matrix,
                                             int iterations, float norm_eps, float eps) {
  mix_token(total, t, affine, pre, post, matrix, norm_eps, eps);
  __syncwarp();
  if (threadIdx.x % 32 == 0) scale_matrix(matrix, comb + t * S * S, iterations, eps);
  __syncwarp();
}

// ---- small launches ---------------------------------------------------------------------------

// A block takes one half of 16 tokens, two warps one unit: one updates the streams and multiplies,
// the other splits fn meanwhile. One more warp makes the coefficients. All that comes from memory
// is asked for at the start; behind the wait there are only numbers that other blocks made.
//
// inbox (tiles, HALVES * 16 * (SUMS + 1)) and epochs (tiles, 2) are kept from launch to launch and
// begin as zeros. A tile's words carry the number of its launch: last epoch + 1, which the last
// block that has read the epoch writes there.
constexpr int THIN_WARPS = 2 * UNITS + 1;

extern "C" __global__ void __launch_bounds__(32 * THIN_WARPS, 1)
thin(const Stored* streams, const Stored* y, const float* pre_in, const float* post_in,
     const float* comb_in, const float* fn, const float* base, const float* scale,
     const float* norm, Stored* out, void* x, float* pre, float* post, float* comb, u64* inbox,
     unsigned* epochs, long long tokens, int iterations, float norm_eps, float eps) {
  extern __shared__ uint4 memory[];
  uint4* fragments = memory;  // [UNITS]
  float4* numbers = reinterpret_cast<float4*>(fragments + UNITS * UNIT_FRAGMENTS);  // [UNITS]
  float(*tables)[16][SUMS] =
      reinterpret_cast<float(*)[16][SUMS]>(numbers + UNITS * UNIT_NUMBERS);  // [unit]
  float(*collapsed)[16] = reinterpret_cast<float(*)[16]>(tables + UNITS);
  float* copies = &collapsed[UNITS][0];  // [UNITS] of S * 16 * 8
  float* weights_of_x = copies + UNITS * S * 16 * 8;  // [UNITS * 32]
  float* matrix = weights_of_x + UNITS * 32;
  unsigned* number = reinterpret_cast<unsigned*>(matrix + S * S);  // of this launch
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int half = blockIdx.x % HALVES, tile = blockIdx.x / HALVES;
  long long first = tile * 16ll;
  Place p(first, tokens);
  int start = (half * UNITS + warp % UNITS) * 32, c = start + lane % 4 * 8;
  uint4* own = fragments + warp % UNITS * UNIT_FRAGMENTS;
  unsigned raw[2][4] = {};
  Affine affine(scale, base);
  if (warp < UNITS) {
    Held in;
    Rows rows = {copies + warp * S * 16 * 8};
    in.get(streams, y, p, c, 0);
    if (first + 8 < tokens) in.get(streams, y, p, c, 1);
    rows.fetch({pre_in, post_in, comb_in}, p);
    rows.wait();
    Sums total = {};
    unit(in, rows, Writes(out, p, c), raw, total, __float_as_uint(eps) >> 31, own,
         [] { __syncthreads(); }, first + 8 >= tokens);
    put_sums(total, &tables[warp][0][0], collapsed[warp]);
  } else {
    if (warp < 2 * UNITS)
      put_unit_of_fn(fn, start, numbers + warp % UNITS * UNIT_NUMBERS, own);
    else
      for (int i = lane; i < UNITS * 32; i += 32) weights_of_x[i] = norm[half * UNITS * 32 + i];
    if (warp == 2 * UNITS && lane == 0) *number = __ldcg(epochs + 2 * tile) + 1;
    __syncthreads();
  }
  __syncthreads();
  unsigned tag = *number;
  if (threadIdx.x == 0 && atomicAdd(epochs + 2 * tile + 1, 1u) == HALVES - 1) {
    epochs[2 * tile] = tag;
    epochs[2 * tile + 1] = 0;
  }
  u64* sums = inbox + tile * (long long)(HALVES * 16 * (SUMS + 1));
  u64* squares = sums + HALVES * 16 * SUMS;
  send_sums<32 * THIN_WARPS>(tables, collapsed, sums + half * 16 * SUMS, squares + half * 16, tag,
                             threadIdx.x);
  if (warp == 2 * UNITS) {
    for (int t = half; t < 16 && first + t < tokens; t += HALVES)
      finish_token(awaited_sum(sums + t * SUMS + min(lane, MIX), 16 * SUMS, tag), first + t, affine,
                   pre, post, comb, matrix, iterations, norm_eps, eps);
  } else if (warp < UNITS) {
    float root[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      root[r] =
          reciprocal_root(awaited_sum(squares + lane / 4 + 8 * r, 16, tag), norm_eps);
    put_unit(raw, root, p, c, weights_of_x + c - half * UNITS * 32, x);
  }
}

// ---- large launches ---------------------------------------------------------------------------

// Block b keeps half b % HALVES of fn in shared memory. It has SETS sets of warps; each walks over
// tiles of 16 tokens, and the sets of all blocks with the same half together take every tile once.
// A warp of a set takes one unit of the tile; one more makes coefficients.
//
// Some 30 kB must be under way to an SM at any time if memory is to be busy: more than registers
// can wait for. So a set copies two tiles ahead into shared memory, a stage each, and copies go on
// while it computes. They are pieces of 64 UNITS neighbouring bytes, and the blocks of a team ask
// for the rest of the row at about the same time. Measured on an H200, cold: 32.4 microseconds at
// 512 tokens, 177.4 at 4,096, which are 2.4 TB/s. (Trials that lost and are gone: 64 bytes of every
// row into registers, unit after unit, and arrivals counted behind a fence, 36 and 244; new streams
// that leave through the stage, whole rows at a time, 33.7 and 183.1; copies that ask L2 for 256
// bytes, the same.)
//
// Nobody waits for what other blocks do now: in its round r a set sends the sums of tile r, while
// its last warp makes coefficients of tile r - 2 and adds the squares of tile r - 1, whose rows
// leave the registers, normalised, in round r + 1.
// trap: RING places for sums are enough because a set sends sums of tile r behind its last warp,
// which has seen everybody's of tile r - 2. They were sent in rounds r - 2, in front of which all
// last warps were done with tile r - 5.
//
// inbox (walkers, RING, HALVES * 16 * (SUMS + 1)) and epochs (walkers, 2) as above, a walker being
// one set of each half; the tag of a tile is the number of tiles that its walker has ever had.
constexpr int SETS = BF16_STORED ? 2 : 1;
constexpr int STAGES = 2;  // tiles of a set in shared memory
constexpr int RING = 5;
constexpr int SET_WARPS = UNITS + 1;
constexpr int WIDE_WARPS = SETS * SET_WARPS;
constexpr int CHUNK = 16 / sizeof(Stored);                 // numbers that one copy moves
constexpr int PITCH = 32 * UNITS + (UNITS % 2 ? 0 : 32);   // of rows in a stage: no bank conflicts
constexpr int STAGE = (S + 1) * 16 * PITCH;                // numbers: 16 rows a stream, then y
constexpr int COPIES = 32 * UNITS / CHUNK;                 // of a row
constexpr int COPY_ROWS = 32 * UNITS / COPIES;             // that a set copies at once

// A copy of 16 bytes that takes its time.
__device__ __forceinline__ void copy_stage(Stored* to, const Stored* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
               : "memory");
}
__device__ __forceinline__ void end_stage() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_for_stage() {  // all but the newest
  asm volatile("cp.async.wait_group 1;" ::: "memory");
}

// Waits until `count` threads of the block have come to barrier `id`.
__device__ __forceinline__ void meet(int id, int count) {
  __syncwarp();
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory");
}

// A tile in shared memory; `at` is where the lane's first row of stream 0 has its channels.
struct Staged {
  const Stored* at;
  __device__ __forceinline__ Row row(int r) const {
    Row out;
#pragma unroll
    for (int j = 0; j < S; ++j) out.x[j].take(at + (j * 16 + 8 * r) * PITCH);
    out.y.take(at + (S * 16 + 8 * r) * PITCH);
    return out;
  }
};

// A thread's share of what a set copies: of every COPY_ROWS-th row 16 bytes, always the same ones.
struct Copies {
  const Stored *streams, *y;  // where the thread's channels of row 0 are
  long long tokens;
  int row, at;  // its first row, and its channels' place in a row of a stage
  __device__ __forceinline__ Copies(const Stored* streams, const Stored* y, int start,
                                    long long tokens, int thread)
      : streams(streams + start + thread % COPIES * CHUNK),
        y(y + start + thread % COPIES * CHUNK), tokens(tokens), row(thread / COPIES),
        at(row * PITCH + thread % COPIES * CHUNK) {}
  // Starts the copies of the 16 tokens from `first` on.
  __device__ __forceinline__ void fill(Stored* stage, long long first) const {
    const Stored *x = streams + first * (S * WIDTH), *more = y + first * WIDTH;
    int last = (int)min(tokens - first, 16ll) - 1;
#pragma unroll
    for (int n = 0; n < 16; n += COPY_ROWS) {
      int token = min(row + n, last);
      Stored* to = stage + at + n * PITCH;
#pragma unroll
      for (int j = 0; j < S; ++j)
        copy_stage(to + j * 16 * PITCH, x + token * (S * WIDTH) + j * WIDTH);
      copy_stage(to + S * 16 * PITCH, more + token * WIDTH);
    }
  }
};

// What a set has in shared memory.
struct Desk {
  Stored stages[STAGES][STAGE];
  float tables[UNITS][16][SUMS], collapsed[UNITS][16];  // sums of units
  float coefficients[2][S * 16 * 8];                    // of two tiles, as Rows wants them
  float roots[2][16], matrix[S * S];
  unsigned epoch, padding[3];
};

// A set's way over the tiles.
struct Walk {
  long long start, step;
  int rounds;
  __device__ __forceinline__ Walk(int walker, int walkers, long long tokens)
      : start(walker * 16ll), step(walkers * 16ll),
        rounds((int)(((tokens + 15) / 16 - walker + walkers - 1) / walkers)) {}
  __device__ __forceinline__ long long first(int round) const { return start + round * step; }
};

extern "C" __global__ void __launch_bounds__(32 * WIDE_WARPS, 1)
wide(const Stored* streams, const Stored* y, const float* pre_in, const float* post_in,
     const float* comb_in, const float* fn, const float* base, const float* scale,
     const float* norm, Stored* out, void* x, float* pre, float* post, float* comb, u64* inbox,
     unsigned* epochs, long long tokens, int iterations, float norm_eps, float eps) {
  extern __shared__ uint4 memory[];
  uint4* fragments = memory;  // [UNITS]
  Desk* desks = reinterpret_cast<Desk*>(fragments + UNITS * UNIT_FRAGMENTS);  // [SETS]
  float* weights_of_x = reinterpret_cast<float*>(desks + SETS);               // [UNITS * 32]
  int lane = threadIdx.x % 32, set = threadIdx.x / 32 / SET_WARPS;
  int part = threadIdx.x / 32 % SET_WARPS, thread = part * 32 + lane;
  int half = blockIdx.x % HALVES, walker = blockIdx.x / HALVES * SETS + set;
  int start = half * UNITS * 32, c = start + part * 32 + lane % 4 * 8;
  Walk walk(walker, gridDim.x / HALVES * SETS, tokens);
  Desk& desk = desks[set];
  Copies copies(streams, y, start, tokens, thread);
  Mixing<const float> old = {pre_in, post_in, comb_in};
  if (part < UNITS) {
    constexpr int THREADS_OF_FN = SETS * UNITS * 32;
    int number = set * UNITS * 32 + thread;
    for (int i = number; i < MIX * S * UNITS; i += THREADS_OF_FN)  // lines of 128 bytes
      prefetch(fn + i / UNITS * WIDTH + start + i % UNITS * 32);
    if (walk.rounds > 0) copies.fill(desk.stages[0], walk.first(0));
    end_stage();
    put_fn<UNITS, THREADS_OF_FN>(fn, start, fragments, number);
    if (walk.rounds > 1) copies.fill(desk.stages[1], walk.first(1));
    end_stage();
  } else {
    if (walk.rounds > 0) {
      Rows{desk.coefficients[0]}.fetch(old, Place(walk.first(0), tokens));
      if (lane == 0) desk.epoch = __ldcg(epochs + 2 * walker);
    }
    for (int i = lane + 32 * set; i < UNITS * 32; i += 32 * SETS) weights_of_x[i] = norm[start + i];
  }
  __syncthreads();
  if (walk.rounds <= 0) return;

  unsigned tag = desk.epoch + 1;  // of round 0
  auto slot = [&](int round) {
    return inbox + (walker * RING + round % RING) * (long long)(HALVES * 16 * (SUMS + 1));
  };
  constexpr int SQUARES = HALVES * 16 * SUMS;  // behind the sums of a slot
  if (part < UNITS) {
    unsigned zero = __float_as_uint(eps) >> 31, raw[3][2][4] = {};  // of this tile, the last two
#pragma unroll 1
    for (int round = 0; round < walk.rounds + 2; ++round) {
      wait_for_stage();
      meet(1 + set, 32 * SET_WARPS);
      if (round >= 2) {
        const float* roots = desk.roots[round % 2] + lane / 4;
        float root[2] = {roots[0], roots[8]};
        Place p(walk.first(round - 2), tokens);
        put_unit(raw[2], root, p, c, weights_of_x + c - start, x);
      }
      if (round < walk.rounds) {
        Place p(walk.first(round), tokens);
        Stored* stage = desk.stages[round % STAGES];
        Sums total = {};
        Stored* at = stage + lane / 4 * PITCH + c - start;
        unit(Staged{at}, Rows{desk.coefficients[round % 2]}, Writes(out, p, c), raw[0], total, zero,
             fragments + part * UNIT_FRAGMENTS, [] {}, false);
        put_sums(total, &desk.tables[part][0][0], desk.collapsed[part]);
        meet(1 + SETS + set, 32 * UNITS);
        if (round + STAGES < walk.rounds) copies.fill(stage, walk.first(round + STAGES));
        end_stage();
        send_sums<32 * UNITS>(desk.tables, desk.collapsed, slot(round) + half * 16 * SUMS,
                              slot(round) + SQUARES + half * 16, tag + round, thread);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i)
        raw[2][i / 4][i % 4] = raw[1][i / 4][i % 4], raw[1][i / 4][i % 4] = raw[0][i / 4][i % 4];
    }
    return;
  }
  // trap: behind the last reader of the epoch, and only there, it may move on
  if (lane == 0 && atomicAdd(epochs + 2 * walker + 1, 1u) == HALVES - 1) {
    epochs[2 * walker] = desk.epoch + walk.rounds;
    epochs[2 * walker + 1] = 0;
  }
  Affine affine(scale, base);
  auto add_squares = [&](int round) {
    float square = awaited_sum(slot(round) + SQUARES + lane % 16, 16, tag + round);
    if (lane < 16) desk.roots[round % 2][lane] = reciprocal_root(square, norm_eps);
  };
  auto finish = [&](int round) {  // token t of a tile in turn by blocks t, t + 16, ... of a team
    long long first = walk.first(round);
    for (int t = (half + 16 * round) % HALVES; t < 16 && first + t < tokens; t += HALVES)
      finish_token(awaited_sum(slot(round) + t * SUMS + min(lane, MIX), 16 * SUMS, tag + round),
                   first + t, affine, pre, post, comb, desk.matrix, iterations, norm_eps, eps);
  };
#pragma unroll 1
  for (int round = 0; round <= walk.rounds; ++round) {
    Rows{desk.coefficients[round % 2]}.wait();
    meet(1 + set, 32 * SET_WARPS);
    if (round + 1 < walk.rounds)
      Rows{desk.coefficients[(round + 1) % 2]}.fetch(old, Place(walk.first(round + 1), tokens));
    if (round >= 2 && round < walk.rounds) finish(round - 2);
    if (round >= 1) add_squares(round - 1);
  }
  __syncwarp();
  meet(1 + set, 32 * SET_WARPS);  // behind the end of the others' work, what they do not wait for
  for (int round = max(walk.rounds - 2, 0); round < walk.rounds; ++round) finish(round);
}
