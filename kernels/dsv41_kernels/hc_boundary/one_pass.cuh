// v4 of hc_boundary: one pass whose 24 dot products of length 4 D run on tensor cores.
//
// Cut along the channels, not along the streams: all four streams of a channel meet in one thread,
// so mixing needs no communication, and a slice of fn fits into shared memory and is read once.
//
//   unit   32 channels of 16 tokens, the work of a warp: two rows and 8 channels a lane
//   half   UNITS units, whose sums are added in order;  D = 32 * UNITS * HALVES
//   total  the HALVES sums in order, by one warp, when all blocks of a token group have left theirs
//
// New streams are bf16, so they are exact operands; a number of fn is the sum of three bf16, which
// together keep its 24 bits, so the products are those of float32. A unit is 8 steps of k = 16,
// then its sums are added in float32: the tensor core's own rounding never runs over more than 64.
//
// The cut depends on D alone: a row has the same bits alone, in a small launch (`thin`, one block a
// half and 16 tokens) and in a large one (`wide`, one block a slice of two halves, walking over
// groups of 64 tokens). Blocks wait for one another, so a launch never has more of them than there
// are SMs, an SM takes any of them, and whoever waits too long stops the launch with an error.
//
// Bytes a token, bf16: 20 D through memory; 108 * HALVES of sums and 4 D of the collapsed row stay in
// L2. fn, 384 D bytes, is read for every 16 tokens (thin) or once a launch and team (wide), where v3
// reads it for every 4 tokens.
#pragma once
#include "../tensor.cuh"

constexpr int WIDTH = 32 * UNITS * HALVES;
constexpr int SLICES = HALVES / 2;
constexpr int PARTS = 3;   // bf16 summands of a number of fn
constexpr int TILES = 3;   // MIX = 24 outputs in tiles of 8
constexpr int GROUP = 64;  // tokens of a wide block's round
constexpr bool AHEAD = BF16_STORED;  // registers are enough to load the next unit during this one
constexpr int RING = 4;    // rounds whose sums may be in use at once
constexpr int WARPS = 8;   // of a wide block: 4 token tiles x 2 halves

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

// The lane's place in a tile of 16 tokens: rows g and g + 8, channels 8 q .. 8 q + 7 of a unit. A
// row behind the last token is read as the last one, and not written.
struct Place {
  long long first, last;
  __device__ __forceinline__ Place(long long tile, long long tokens)
      : first(tile + threadIdx.x % 32 / 4), last(tokens - 1) {}
  __device__ __forceinline__ long long row(int r) const { return min(first + 8 * r, last); }
  __device__ __forceinline__ bool valid(int r) const { return first + 8 * r <= last; }
};

// Where the lane reads its next unit, and where it writes: pointers that step by 32 channels, so
// that a unit's addresses are constants behind them.
struct Reads {
  const Stored *streams[2], *y[2];
  __device__ __forceinline__ void begin(const Stored* x, const Stored* more, const Place& p,
                                        int c) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      streams[r] = x + p.row(r) * S * WIDTH + c;
      y[r] = more + p.row(r) * WIDTH + c;
    }
  }
  __device__ __forceinline__ void step() {
    streams[0] += 32, streams[1] += 32, y[0] += 32, y[1] += 32;
  }
};

struct Writes {
  Stored* out[2];
  bool valid[2];
  __device__ __forceinline__ Writes(Stored* to, const Place& p, int c) {
#pragma unroll
    for (int r = 0; r < 2; ++r) out[r] = to + p.row(r) * S * WIDTH + c, valid[r] = p.valid(r);
  }
  __device__ __forceinline__ void step() { out[0] += 32, out[1] += 32; }
};

// What a unit reads.
struct Inputs {
  Eight x[2][S], y[2];
  __device__ __forceinline__ void get(const Reads& from, int r) {
    y[r].get(from.y[r]);
#pragma unroll
    for (int j = 0; j < S; ++j) x[r][j].get(from.streams[r] + j * WIDTH);
  }
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
    long long t = min(p.first - lane / 4 + lane / 2, p.last);
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

// Sums of a tile: 24 dot products in the layout of the tensor core, squares of the new streams and
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

// The same of one unit by one warp. The numbers come through `raw` in shared memory: all are on their
// way at once, for which a lane has no registers.
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
// weights(k, j, parts) gives the lane's share of stream k and tile j; done(r) is called when the
// inputs of row r are not needed any more, begin() before the first of weights. zero is a 0 that
// the compiler does not know. With `half_full` the second eight rows do not exist.
template <class Weights, class Done, class Begin>
__device__ __forceinline__ void unit(const Inputs& in, const Rows& rows, const Writes& to,
                                     unsigned (&raw)[2][4], Sums& sums, unsigned zero,
                                     const Weights& weights, const Done& done, const Begin& begin,
                                     bool half_full) {
  // row by row, so that only one row's inputs are unpacked at a time
  unsigned operand[S][2][4] = {};  // [stream][k-step], in the order of the tensor core
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (r == 1 && half_full) break;
    float x[8] = {}, square = 0.f, collapsed = 0.f;
#pragma unroll
    for (int k = 0; k < S; ++k) {
      Column a = rows.column(r, k);
      unsigned now[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float low = 0.f, high = 0.f;
#pragma unroll
        for (int j = 0; j < S; ++j) {
          low = __fmaf_rn(a.comb[j], in.x[r][j].low(i), low);
          high = __fmaf_rn(a.comb[j], in.x[r][j].high(i), high);
        }
        low = __fadd_rn(__fmul_rn(a.post, in.y[r].low(i)), low);
        high = __fadd_rn(__fmul_rn(a.post, in.y[r].high(i)), high);
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
      if (to.valid[r]) put_eight(to.out[r] + k * WIDTH, now);
    }
    done(r);
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
    sums.square[r] += square;
    sums.collapsed[r] += collapsed;
  }
  begin();
  float dot[2][TILES][4] = {};  // two chains of products a tile: one alone would wait for itself
#pragma unroll
  for (int k = 0; k < S; ++k)
#pragma unroll
    for (int j = 0; j < TILES; ++j) {
      uint4 b[PARTS];
      weights(k, j, b);
#pragma unroll
      for (int s = 0; s < PARTS; ++s) {
        mma(dot[0][j], operand[k][0], b[s].x, b[s].y);
        mma(dot[1][j], operand[k][1], b[s].z, b[s].w);
      }
    }
#pragma unroll
  for (int j = 0; j < TILES; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) sums.dot[j][i] += dot[0][j][i] + dot[1][j][i];
}

// The sums of a tile into rows of SUMS numbers (row t of `table`) and `squares`[t], t < 16.
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
    unsigned char* record = static_cast<unsigned char*>(x) + p.row(r) * (WIDTH + WIDTH / 32);
#pragma unroll
    for (int i = 0; i < 4; ++i)  // records are even, not always a multiple of 8
      reinterpret_cast<unsigned short*>(record + c)[i] =
          e4m3x2(low_bf16(w[i]) * inverse, high_bf16(w[i]) * inverse);
    if (threadIdx.x % 4 == 0) record[WIDTH + c / 32] = scale;
#else
    if (p.valid(r)) put_eight(static_cast<Stored*>(x) + p.row(r) * WIDTH + c, w);
#endif
  }
}

// ---- coefficients of finished tokens ----------------------------------------------------------

// trap: a block that never starts would be waited for for ever; some seconds are enough for all
// that run, and an error says more than a GPU that does not come back.
constexpr unsigned PATIENCE = 1u << 24;

// The sum of one number over the halves, in order; `stride` floats from half to half, `batch` loads
// in flight.
template <int batch>
__device__ __forceinline__ float ordered_sum(const float* at, int stride) {
  float total = 0.f;
#pragma unroll 1
  for (int h = 0; h < HALVES; h += batch) {
    float part[batch];
#pragma unroll
    for (int i = 0; i < batch; ++i) part[i] = h + i < HALVES ? __ldcg(at + (h + i) * stride) : 0.f;
#pragma unroll
    for (int i = 0; i < batch; ++i) total += part[i];
  }
  return total;
}

// The lane's number of base and its set's scale. Read at the start: behind the wait for the sums it
// would cost a trip to memory.
struct Affine {
  float scale = 0.f, base = 0.f;
  __device__ __forceinline__ Affine(const float* all_scales, const float* all_bases) {
    int m = threadIdx.x % 32;
    if (m < MIX) scale = all_scales[m < 2 * S ? m / S : 2], base = all_bases[m];
  }
};

// The same sum of numbers that may still be on their way: each shares a word with the tag of its
// launch, so whoever sees the tag has the number, without a count of arrivals in between.
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

// ---- arrival of blocks, in large launches -----------------------------------------------------

// Counts the calling warp, whose writes are visible to whoever sees the count.
__device__ __forceinline__ void arrive(unsigned* count) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) add_release(count, 1);
}

__device__ __forceinline__ void await(const unsigned* count, unsigned all) {
  if (threadIdx.x % 32 == 0)
    for (unsigned looks = 0; load_acquire(count) < all; ++looks) {
      if (looks == PATIENCE) __trap();
      __nanosleep(20);
    }
  __syncwarp();
}

// The last warp that has waited puts both counters back to zero, for the next launch.
__device__ __forceinline__ void leave(unsigned* count, unsigned* left, unsigned all) {
  if (threadIdx.x % 32 || atomicAdd(left, 1u) != all - 1) return;
  *count = 0;
  *left = 0;
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
    Reads from;
    Inputs in;
    Rows rows = {copies + warp * S * 16 * 8};
    from.begin(streams, y, p, c);
    in.get(from, 0);
    if (first + 8 < tokens) in.get(from, 1);
    rows.fetch({pre_in, post_in, comb_in}, p);
    rows.wait();
    Sums total = {};
    auto weights = [&](int k, int j, uint4(&parts)[PARTS]) { take_fn(own, k, j, parts); };
    unit(in, rows, Writes(out, p, c), raw, total, __float_as_uint(eps) >> 31, weights, [](int) {},
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
  for (int i = threadIdx.x; i < 16 * SUMS; i += 32 * THIN_WARPS) {
    float total = 0.f;
    for (int u = 0; u < UNITS; ++u) total += i % SUMS <= MIX ? tables[u][i / SUMS][i % SUMS] : 0.f;
    put_tagged(sums + half * 16 * SUMS + i, total, tag);
  }
  if (threadIdx.x < 16) {
    float total = 0.f;
    for (int u = 0; u < UNITS; ++u) total += collapsed[u][threadIdx.x];
    put_tagged(squares + half * 16 + threadIdx.x, total, tag);
  }
  if (warp == 2 * UNITS) {
    for (int t = half; t < 16 && first + t < tokens; t += HALVES)
      finish_token(awaited_sum(sums + t * SUMS + lane, 16 * SUMS, tag), first + t, affine, pre,
                   post, comb, matrix, iterations, norm_eps, eps);
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

// Block b keeps slice b % SLICES of fn and walks over token groups b / SLICES, + teams, ...; a warp
// takes 16 tokens of a group and one half of the slice. Warps never wait inside a group: a warp
// leaves its sums, goes on to the next group, and only then finishes the last one, whose sums have
// long arrived: it normalises its own collapsed rows and makes coefficients of some tokens.
//
// The eight warps may have 255 registers each. A ninth would leave 168 to all of them, and warps
// that hand registers over wait for each other in a way that no emulation on a CPU can check.
//
// sums (teams, RING, HALVES, GROUP, SUMS), squares (teams, RING, HALVES, GROUP); collapsed
// (blocks, 2, WARPS, UNITS, 2, 32) uint4: own rows of two rounds; counters (2, groups) are zero.
constexpr int BATCH = BF16_STORED ? 32 : 16;  // loads in flight of a finishing warp

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
wide(const Stored* streams, const Stored* y, const float* pre_in, const float* post_in,
     const float* comb_in, const float* fn, const float* base, const float* scale,
     const float* norm, Stored* out, void* x, float* pre, float* post, float* comb, float* sums,
     float* squares, uint4* collapsed, unsigned* counters, long long tokens, int iterations,
     float norm_eps, float eps) {
  extern __shared__ uint4 memory[];
  uint4* fragments = memory;
  float* tables = reinterpret_cast<float*>(fragments + 2 * UNITS * UNIT_FRAGMENTS);
  float* weights_of_x = tables + WARPS * S * 16 * 8;  // behind [WARPS] of S * 16 * 8
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float* matrix = weights_of_x + 2 * UNITS * 32 + warp * S * S;  // [WARPS] of S * S
  int slice = blockIdx.x % SLICES, team = blockIdx.x / SLICES, teams = gridDim.x / SLICES;
  int groups = (int)((tokens + GROUP - 1) / GROUP), rounds = (groups - team + teams - 1) / teams;
  int tile = warp % 4, part = warp / 4, start = slice * 2 * UNITS * 32;
  int c = start + part * UNITS * 32 + lane % 4 * 8;
  auto place = [&](int round) {
    return Place((team + round * (long long)teams) * GROUP + tile * 16, tokens);
  };
  auto slot = [&](int round) {  // in tokens: of half 0 of the group's sums
    return (team * RING + round % RING) * (long long)(HALVES * GROUP);
  };
  Rows rows = {tables + warp * S * 16 * 8};
  Mixing<const float> old = {pre_in, post_in, comb_in};
  Affine affine(scale, base);
  Reads from;
  Inputs in;
  for (int i = threadIdx.x; i < MIX * S * 2 * UNITS; i += 32 * WARPS)  // lines of 128 bytes
    prefetch(fn + i / (2 * UNITS) * WIDTH + start + i % (2 * UNITS) * 32);
  from.begin(streams, y, place(0), c);
  if (AHEAD) in.get(from, 0), in.get(from, 1);
  rows.fetch(old, place(0));
  put_fn<2 * UNITS, 32 * WARPS>(fn, start, fragments, threadIdx.x);
  for (int i = threadIdx.x; i < 2 * UNITS * 32; i += 32 * WARPS) weights_of_x[i] = norm[start + i];
  __syncthreads();

  unsigned zero = __float_as_uint(eps) >> 31;
  const uint4* own = fragments + part * UNITS * UNIT_FRAGMENTS;
  uint4* left = collapsed + (blockIdx.x * 2ll * WARPS + warp) * UNITS * 2 * 32 + lane;
  constexpr long long NEXT = WARPS * UNITS * 2 * 32;  // from round to round
  for (int round = 0; round <= rounds; ++round) {
    if (round < rounds) {
      Writes to(out, place(round), c);
      rows.wait();
      Sums total = {};
#pragma unroll 1
      for (int u = 0; u < UNITS; ++u) {
        if (!AHEAD) in.get(from, 0), in.get(from, 1);
        from.step();
        bool more = u + 1 < UNITS || round + 1 < rounds;
        if (u + 1 == UNITS && more) from.begin(streams, y, place(round + 1), c);
        auto weights = [&](int k, int j, uint4(&parts)[PARTS]) {
          take_fn(own + u * UNIT_FRAGMENTS, k, j, parts);
        };
        auto next = [&](int r) {  // a row's registers take the next unit's numbers at once
          if (AHEAD && more) in.get(from, r);
        };
        unsigned raw[2][4];
        unit(in, rows, to, raw, total, zero, weights, next, [] {}, false);
        to.step();
#pragma unroll
        for (int r = 0; r < 2; ++r)
          left[round % 2 * NEXT + (u * 2 + r) * 32] =
              make_uint4(raw[r][0], raw[r][1], raw[r][2], raw[r][3]);
      }
      long long at = slot(round) + (slice * 2 + part) * GROUP + tile * 16;
      put_sums(total, sums + at * SUMS, squares + at);
      arrive(counters + team + round * teams);
      if (round + 1 < rounds) rows.fetch(old, place(round + 1));
    }
    if (round > 0) {
      int last = round - 1, group = team + last * teams;
      await(counters + group, SLICES * WARPS);
      float root[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float* at = squares + slot(last) + tile * 16 + lane / 4 + 8 * r;
        root[r] = reciprocal_root(ordered_sum<BATCH>(at, GROUP), norm_eps);
      }
#pragma unroll 1
      for (int u = 0; u < UNITS; ++u) {
        unsigned raw[2][4];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          uint4 four = left[last % 2 * NEXT + (u * 2 + r) * 32];
          raw[r][0] = four.x, raw[r][1] = four.y, raw[r][2] = four.z, raw[r][3] = four.w;
        }
        put_unit(raw, root, place(last), c + u * 32, weights_of_x + c - start + u * 32, x);
      }
      // slice by slice, and a block's share in turn by its lower and its upper warps
      long long first = group * (long long)GROUP;
      for (int t = slice + (warp + 4 * round) % WARPS * SLICES; t < GROUP && first + t < tokens;
           t += WARPS * SLICES)
        finish_token(ordered_sum<BATCH>(sums + (slot(last) + t) * SUMS + lane, GROUP * SUMS),
                     first + t, affine, pre, post, comb, matrix, iterations, norm_eps, eps);
      leave(counters + group, counters + groups + group, SLICES * WARPS);
    }
  }
}
