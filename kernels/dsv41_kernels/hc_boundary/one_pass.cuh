// v4 of hc_boundary: one pass whose 24 dot products of length 4 D run on tensor cores.
//
// Cut along the channels, not along the streams: all four streams of a channel meet in one thread,
// so mixing needs no communication, and a slice of fn fits into shared memory and is read once.
//
//   unit   32 channels of 16 tokens, the work of a warp: two rows and 8 channels a lane
//   half   UNITS units, whose sums are added in order;  D = 32 * UNITS * HALVES
//   total  the HALVES sums, each quarter's in order, when all blocks have sent theirs
//
// New streams are bf16, so they are exact operands; a number of fn is the sum of three bf16, which
// together keep its 24 bits, so the products are those of float32. A unit is 8 steps of k = 16,
// then its sums are added in float32: the tensor core's own rounding never runs over more than 64.
//
// The cut depends on D alone: a row has the same bits alone, in a small launch (`thin`, a block
// takes one unit's channels of 64 tokens) and in a large one (`wide`, a block keeps one half and
// walks over tiles of 16 tokens). Blocks wait for one another, so a launch never has more of them
// than run at once, if no other kernel waits beside it: one of `wide` an SM, or two of `thin`, whose
// registers are bounded for that and which take 22 kB of shared memory. Whoever waits too long stops
// the launch with an error.
//
// Bytes a token, bf16: 20 D through memory; 208 * HALVES of sums stay in L2 (thin: 160 a unit). fn,
// 384 D bytes, is read for every 64 tokens (thin) or once a launch and team (wide), where v3 reads
// it for every 4.
#pragma once
#include "../tensor.cuh"
#include "../watched.cuh"

constexpr int WIDTH = 32 * UNITS * HALVES;
constexpr int PARTS = 3;   // bf16 summands of a number of fn
constexpr int TILES = 3;   // MIX = 24 outputs in tiles of 8

__device__ __forceinline__ float reciprocal_root(float square, float eps) {
  return rsqrtf(square * (1.f / WIDTH) + eps);
}

// The two bf16 of a word.
__device__ __forceinline__ float low_bf16(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(unsigned pair) {
  return __uint_as_float(pair & 0xffff0000u);
}

constexpr int PLACES = 16 * (MIX + 2);  // sums of a tile: 16 rows of MIX, then two rows of squares
constexpr int RECORD = MIX + 4;         // of a token's coefficients: eight of them, no bank twice

// 16 bytes that nothing writes meanwhile, asked for here and not where they are used.
__device__ __forceinline__ uint4 read_quad(const void* from) {
  float4 x = read_once(static_cast<const float*>(from));
  return make_uint4(__float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z),
                    __float_as_uint(x.w));
}

// Eight neighbouring channels, as they are stored.
struct Eight {
#if BF16_STORED
  uint4 raw;
  __device__ __forceinline__ void take(const uint4* shared) { raw = *shared; }
  __device__ __forceinline__ void read(const Stored* from) { raw = read_quad(from); }
  __device__ __forceinline__ unsigned word(int i) const {
    return i == 0 ? raw.x : i == 1 ? raw.y : i == 2 ? raw.z : raw.w;
  }
  __device__ __forceinline__ float low(int i) const { return low_bf16(word(i)); }
  __device__ __forceinline__ float high(int i) const { return high_bf16(word(i)); }
#else
  float4 raw[2];
  __device__ __forceinline__ void take(const uint4* shared) {
    raw[0] = reinterpret_cast<const float4*>(shared)[0];
    raw[1] = reinterpret_cast<const float4*>(shared)[32];
  }
  __device__ __forceinline__ void read(const Stored* from) {
    raw[0] = read_once(from), raw[1] = read_once(from + 4);
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
// unit. Rows behind the last token are that token once more: they compute the same, and write the
// same where it does.
struct Place {
  long long tile;
  int mine, last;
  __device__ __forceinline__ Place(long long tile, long long tokens)
      : tile(tile), mine(threadIdx.x % 32 / 4), last((int)min(tokens - tile, 16ll) - 1) {}
  __device__ __forceinline__ int step(int r) const { return min(mine + 8 * r, last); }
  // Number c of row r where a token has `width` of them. trap: without the empty instruction the
  // compiler computes the address again for every access, in 64 bits.
  template <class Number>
  __device__ __forceinline__ Number* at(Number* from, int width, int r, int c) const {
    from += tile * width;
    from += step(r) * width + c;
    asm("" : "+l"(from));
    return from;
  }
};

// What the lane's row r of a unit reads: eight channels of every stream and of y.
struct Row {
  Eight x[S], y;
};

// 16 bytes from memory to shared memory, behind the thread's back; L2 asks for the whole line, the
// other half of which a neighbour wants.
__device__ __forceinline__ void copy_part(uint4* to, const Stored* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(to)),
               "l"(from)
               : "memory");
}

// The lane's numbers of a tile in shared memory, by warps: a lane reads what it has copied itself.
constexpr int COPIES = sizeof(Eight) / 16;        // of eight numbers
constexpr int STAGE = 2 * (S + 1) * COPIES * 32;  // uint4 of a warp
struct Staged {
  uint4* at;  // [2][S + 1][COPIES][32], of which the lane has the first
  __device__ __forceinline__ Row row(int r) const {
    const uint4* from = at + r * (STAGE / 2);
    Row out;
#pragma unroll
    for (int j = 0; j < S; ++j) out.x[j].take(from + j * COPIES * 32);
    out.y.take(from + S * COPIES * 32);
    return out;
  }
  __device__ __forceinline__ void copy(int i, const Stored* from) const {
#pragma unroll
    for (int n = 0; n < COPIES; ++n)
      copy_part(at + (i * COPIES + n) * 32, from + n * (8 / COPIES));
  }
  __device__ __forceinline__ void fetch(const Stored* streams, const Stored* y, const Place& p,
                                        int c) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Stored* from = p.at(streams, S * WIDTH, r, c);
#pragma unroll
      for (int j = 0; j < S; ++j) copy(r * (S + 1) + j, from + j * WIDTH);
      copy(r * (S + 1) + S, p.at(y, WIDTH, r, c));
    }
  }
};

// Coefficients of one row.
struct Coefficients {
  float comb[S * S], post[S], pre[S];
};

// Those of a tile in shared memory, 16 records in the order of Coefficients; in registers they
// would be 48. `fetch` is a copy that takes its time and no registers.
struct Records {
  float* table;
  __device__ __forceinline__ Coefficients row(int r) const {
    const float4* at =
        reinterpret_cast<const float4*>(table + (threadIdx.x % 32 / 4 + 8 * r) * RECORD);
    Coefficients out;
    float4* to = reinterpret_cast<float4*>(&out);
#pragma unroll
    for (int i = 0; i < MIX / 4; ++i) to[i] = at[i];
    return out;
  }
  __device__ __forceinline__ void fetch(Mixing<const float> from, const Place& p) const {
    int lane = threadIdx.x % 32, q = lane % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r)
      copy_16(table + (lane / 4 + 8 * r) * RECORD + S * q,
              from.comb + ((p.tile + p.step(r)) * S + q) * S, true);
    const float* other = lane < 16 ? from.post : from.pre;
    copy_16(table + lane % 16 * RECORD + S * (S + lane / 16),
            other + (p.tile + min(lane % 16, p.last)) * S, true);
  }
};

// Sums of a unit: 24 dot products and, on a diagonal, squares of the new streams in the layout of
// the tensor core, squares of the collapsed row by lane.
struct Sums {
  float dot[TILES][4], self[2][4], collapsed[2];
};

// Eight numbers of one row of fn as three words of bf16 pairs for each of the two k-steps.
__device__ __forceinline__ void split(uint4 low, uint4 high, uint4 (&parts)[PARTS]) {
  unsigned bits[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  float rest[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) rest[i] = __uint_as_float(bits[i]);
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

// fn in shared memory, in the order in which lanes read it: [unit][stream][tile][part][lane], 16
// bytes each; a warp's reads are 512 neighbouring bytes. Here `streams` streams of a unit, for one
// warp. Numbers arrive where their first two parts will be, so that all are on their way at once
// and need no registers: eight lanes copy 128 bytes of a row, which four lanes split.
template <int streams>
struct Fragments {
  uint4* at;
  __device__ __forceinline__ void fetch(const float* fn, int k, int channel) const {
    int row = threadIdx.x % 32 / 8, piece = threadIdx.x % 8;
    const float* from = fn + (row * S + k) * WIDTH + channel + 4 * piece;
    uint4* to = at + piece % 2 * 32 + 4 * row + piece / 2;
#pragma unroll
    for (int n = 0; n < streams * TILES; ++n, to += PARTS * 32) {
      const float* eight = from + (n % TILES * 8 * S + n / TILES) * WIDTH;
      copy_16(to, eight, true);
      copy_16(to + 16, eight + 4 * S * WIDTH, true);
    }
  }
  __device__ __forceinline__ void split_all() const {
    __syncwarp();
    uint4* to = at + threadIdx.x % 32;
#pragma unroll 3
    for (int n = 0; n < streams * TILES; ++n, to += PARTS * 32) {
      uint4 parts[PARTS];
      split(to[0], to[32], parts);
#pragma unroll
      for (int s = 0; s < PARTS; ++s) to[s * 32] = parts[s];
    }
  }
};

// The lane's share of stream k and tile j of a unit, from there.
__device__ __forceinline__ void take_fn(const uint4* unit, int k, int j, uint4 (&parts)[PARTS]) {
#pragma unroll
  for (int s = 0; s < PARTS; ++s)
    parts[s] = unit[((k * TILES + j) * PARTS + s) * 32 + threadIdx.x % 32];
}

constexpr int UNIT_FRAGMENTS = S * TILES * PARTS * 32;  // uint4 of a unit of fn

// New streams of eight channels of one row, which leave at once; raw, a word a pair of channels of
// the collapsed row; and its sum of squares over the row's four lanes.
__device__ __forceinline__ float mix_row(const Row& old, const Coefficients& a, Stored* to,
                                         unsigned (&now)[S][4], unsigned (&raw)[4]) {
  float x[8] = {}, collapsed = 0.f;
#pragma unroll
  for (int k = 0; k < S; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float low = 0.f, high = 0.f;
#pragma unroll
      for (int j = 0; j < S; ++j) {
        low = __fmaf_rn(a.comb[j * S + k], old.x[j].low(i), low);
        high = __fmaf_rn(a.comb[j * S + k], old.x[j].high(i), high);
      }
      low = __fadd_rn(__fmul_rn(a.post[k], old.y.low(i)), low);
      high = __fadd_rn(__fmul_rn(a.post[k], old.y.high(i)), high);
      now[k][i] = bf16_pair(low, high);
      low = low_bf16(now[k][i]), high = high_bf16(now[k][i]);
      x[2 * i] = __fmaf_rn(a.pre[k], low, x[2 * i]);
      x[2 * i + 1] = __fmaf_rn(a.pre[k], high, x[2 * i + 1]);
    }
    put_eight(to + k * WIDTH, now[k]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    raw[i] = bf16_pair(x[2 * i], x[2 * i + 1]);
    float low = low_bf16(raw[i]), high = high_bf16(raw[i]);
    collapsed = __fmaf_rn(low, low, collapsed);
    collapsed = __fmaf_rn(high, high, collapsed);
  }
#pragma unroll
  for (int step = 1; step < 4; step *= 2) collapsed += __shfl_xor_sync(~0u, collapsed, step);
  return collapsed;
}

// The products of a unit's new streams with its fragments of fn and with themselves. zero is a 0
// that the compiler does not know; begin() is called when `now` has been taken over.
template <class Begin>
__device__ __forceinline__ void multiply(const unsigned (&now)[2][S][4], const uint4* fragments,
                                         unsigned zero, Sums& sums, const Begin& begin) {
  unsigned operand[S][2][4];  // [stream][k-step], in the order of the tensor core
#pragma unroll
  for (int k = 0; k < S; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        // trap: stored words and operands want different neighbours among the registers; without
        // this the compiler copies the operands before every product
        operand[k][i / 2][r + i % 2 * 2] = now[r][k][i] ^ zero;
  begin();
  float dot[2][TILES][4] = {};  // two chains of products a tile: one alone would wait for itself
#pragma unroll
  for (int k = 0; k < S; ++k) {
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
    for (int i = 0; i < 2; ++i)  // a row's operand is a column's, too: products of rows with rows
#pragma unroll
      for (int r = 0; r < 2; ++r)
        mma(sums.self[r], operand[k][i], operand[k][i][r], operand[k][i][2 + r]);
  }
#pragma unroll
  for (int j = 0; j < TILES; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) sums.dot[j][i] = dot[0][j][i] + dot[1][j][i];
}

// The sums of a unit into PLACES numbers.
__device__ __forceinline__ void put_sums(const Sums& sums, float* table) {
  int lane = threadIdx.x % 32, q = lane % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int t = lane / 4 + 8 * r;
#pragma unroll
    for (int j = 0; j < TILES; ++j)
      *reinterpret_cast<float2*>(table + t * MIX + 8 * j + 2 * q) =
          make_float2(sums.dot[j][2 * r], sums.dot[j][2 * r + 1]);
    float square = lane / 4 % 2 ? sums.self[r][2 * r + 1] : sums.self[r][2 * r];
    if (q == lane / 8) table[16 * MIX + t] = square;
    if (q == 0) table[16 * (MIX + 1) + t] = sums.collapsed[r];
  }
}

// A unit of `rows` rows a lane of the collapsed row, normalised: bf16 or float32 numbers, or codes
// and a scale. `norm` points to the weights of the lane's channels in shared memory.
template <int rows>
__device__ __forceinline__ void put_unit(const unsigned (&raw)[rows][4], const float (&root)[rows],
                                         const Place& p, int c, const float* norm, void* x) {
  const float4* from = reinterpret_cast<const float4*>(norm);
  float4 a = from[0], b = from[1];
  float weight[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
  for (int r = 0; r < rows; ++r) {
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
    unsigned scale = fp8_scale(amax);
    float inverse = fp8_inverse(scale);
    unsigned char* record = p.at(static_cast<unsigned char*>(x), WIDTH + WIDTH / 32, r, 0);
#pragma unroll
    for (int i = 0; i < 4; ++i)  // records are even, not always a multiple of 8
      reinterpret_cast<unsigned short*>(record + c)[i] =
          e4m3x2(low_bf16(w[i]) * inverse, high_bf16(w[i]) * inverse);
    if (threadIdx.x % 4 == 0) record[WIDTH + c / 32] = scale;
#else
    put_eight(p.at(static_cast<Stored*>(x), WIDTH, r, c), w);
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
  __device__ __forceinline__ void get(const float* all_scales, const float* all_bases) {
    int m = threadIdx.x % 32;
    if (m < MIX) scale = all_scales[m < 2 * S ? m / S : 2], base = all_bases[m];
  }
};

// A sum over the halves: four sums of neighbours, in order, which are added in pairs.
struct Quarters {
  float part[4] = {};
  __device__ __forceinline__ void add(int half, float value) {
    part[half / (HALVES / 2) * 2 + (half % (HALVES / 2) >= HALVES / 4)] += value;
  }
  __device__ __forceinline__ float sum() const {
    return (part[0] + part[1]) + (part[2] + part[3]);
  }
};

// Sums of one number over `count` halves, PLACES words from half to half. The numbers may
// still be on their way: each shares a word with the tag of its tile and launch, so whoever sees
// the tag has the number, without a count of arrivals in between. A look takes its time; whoever
// has something else to do does it between look() and sum().
template <int count>
struct Awaited {
  static constexpr int SOME = count < 32 ? count : 32;
  const u64* at;
  u64 word[SOME];
  __device__ __forceinline__ void look(int from = 0) {
#pragma unroll
    for (int i = 0; i < SOME; ++i)
      if (from + i < count) word[i] = load_relaxed(at + (from + i) * PLACES);
  }
  __device__ __forceinline__ bool missing(unsigned tag, int from) const {
    bool any = false;
#pragma unroll
    for (int i = 0; i < SOME; ++i) any |= from + i < count && (unsigned)(word[i] >> 32) != tag;
    return any;
  }
  __device__ __forceinline__ float sum(unsigned tag) {
    Quarters total;
#pragma unroll
    for (int from = 0; from < count; from += SOME) {
      if (from > 0) look(from);
      for (unsigned looks = 0; missing(tag, from); ++looks) {
        if (looks == PATIENCE) __trap();
        look(from);
      }
#pragma unroll
      for (int i = 0; i < SOME; ++i)
        if (from + i < count) total.add(from + i, __uint_as_float((unsigned)word[i]));
    }
    __syncwarp();
    return total.sum();
  }
};

// The lane's number of token t of a tile.
struct TokenSum : Awaited<HALVES> {
  __device__ __forceinline__ void look_at(const u64* sums, int t) {
    int m = threadIdx.x % 32;
    at = sums + (m < MIX ? t * MIX + m : 16 * MIX + t);
    look();
  }
};

// The sum of squares of token lane % 16's collapsed row, half of it a lane.
struct CollapsedSum : Awaited<HALVES / 2> {
  __device__ __forceinline__ void look_at(const u64* sums) {
    int lane = threadIdx.x % 32;
    at = sums + lane / 16 * (HALVES / 2) * PLACES + 16 * (MIX + 1) + lane % 16;
    look();
  }
  __device__ __forceinline__ float root(unsigned tag, float eps) {
    float half = sum(tag);
    return reciprocal_root(half + __shfl_xor_sync(~0u, half, 16), eps);
  }
};

// Sums of a tile's UNITS units, added in order, into its half's PLACES words of the inbox.
__device__ __forceinline__ void send_sums(const float* tables, u64* to, unsigned tag) {
  int lane = threadIdx.x % 32;
  static_assert(PLACES % 32 == 0, "whole warps of words");
#pragma unroll
  for (int n = lane; n < PLACES; n += 32) {
    float total = 0.f;
#pragma unroll
    for (int u = 0; u < UNITS; ++u) total += tables[u * PLACES + n];
    store_relaxed(to + n, (u64)tag << 32 | __float_as_uint(total));
  }
}

// One token, a lane a number: pre and post leave at once; the softmax rows of comb, plus eps, wait
// in `matrix` (S * S) for the thread that scales them.
__device__ __forceinline__ void mix_token(float total, long long t, const Affine& affine,
                                          float* pre, float* post, float* matrix,
                                          float norm_eps, float eps) {
  int m = threadIdx.x % 32;
  float square = __shfl_sync(~0u, total, MIX) * (1.f / (S * WIDTH));
  float z = total * rsqrtf(square + norm_eps) * affine.scale + affine.base;
  float gate = rcp_approx(1.f + expf(-z));
  float top = fmaxf(z, __shfl_xor_sync(~0u, z, 1));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  float e = expf(z - top), sum = e + __shfl_xor_sync(~0u, e, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  if (m < S) pre[t * S + m] = gate + eps;
  else if (m < 2 * S) post[t * S + m - S] = 2.f * gate;
  else if (m < MIX) matrix[m - 2 * S] = e * rcp_approx(sum) + eps;
}

// A matrix in shared memory -> comb, by one thread: its passes depend on each other.
__device__ __forceinline__ void scale_matrix(const float* matrix, float* comb, int iterations,
                                             float eps) {
  float k[S][S], row[S], column[S];
#pragma unroll
  for (int i = 0; i < S * S; ++i) k[i / S][i % S] = matrix[i];
  sinkhorn_scales(k, row, column, iterations, eps);
#pragma unroll
  for (int i = 0; i < S; ++i)
    reinterpret_cast<float4*>(comb)[i] =
        make_float4(row[i] * k[i][0] * column[0], row[i] * k[i][1] * column[1],
                    row[i] * k[i][2] * column[2], row[i] * k[i][3] * column[3]);
}

// ---- small launches ---------------------------------------------------------------------------

// A block takes 32 channels of a group of up to 64 tokens, a warp 8 of these. So fn is read once a
// group, and by all SMs, some of which have two blocks. All that comes from memory is asked for at
// the start; warps that split fn are the last to get tokens.
//
// A block sends the sums of a token as words of three numbers and a tag, 16 bytes that come and go
// as one, so whoever sees the tag has the numbers. The block that owns the token adds them, makes
// the coefficients, and sends the root of the collapsed row back to all. Measured on an H200, cold:
// 8.0 microseconds for one token, 8.8 for 8, 13.0 for 64. For one token the launch, the numbers'
// way to the SM, that of the sums to their owner, and Sinkhorn's passes are of like length; for 64
// the exchange takes most. (Blocks of 64 channels, one an SM, were slower.)
//
// inbox (groups, GROUP, TOKEN_WORDS) and epochs (groups, 2) are kept from launch to launch and
// begin as zeros. A group's words carry the number of its launch: last epoch + 1, which the last
// block that has read the epoch writes there.
constexpr int CUTS = UNITS * HALVES;  // units of the whole width
constexpr int MIXERS = CUTS < 16 ? 1 : CUTS < 64 ? CUTS / 8 : 8;
constexpr int GROUP = 8 * MIXERS;
constexpr int SPLITTERS = 6, FIRST_SPLITTER = 2;
constexpr int HELPER = 8, THIN_WARPS = HELPER + 1;
constexpr int FULL = 9, WORDS = 10;  // of a unit's sums of a token: whole sectors of 32 bytes
constexpr int TOKEN_WORDS = CUTS * WORDS + 2;  // and the root

// Word w of a unit's sums has these numbers.
struct Numbers {
  int first, second, third;
  __device__ __forceinline__ Numbers(int w)
      : first(w < 4 ? 2 * w : w < 8 ? 2 * w + 1 : MIX),
        second(w < 4 ? 2 * w + 1 : w < 8 ? 8 + 2 * w : MIX + 1),
        third(w < 4 ? 8 + 2 * w : w < 8 ? 9 + 2 * w : MIX + 2) {}
};

__device__ __forceinline__ uint4 word(float first, float second, float third, unsigned tag) {
  return make_uint4(__float_as_uint(first), __float_as_uint(second), __float_as_uint(third), tag);
}

extern "C" __global__ void __launch_bounds__(32 * THIN_WARPS, 2)
thin(const Stored* streams, const Stored* y, const float* pre_in, const float* post_in,
     const float* comb_in, const float* fn, const float* base, const float* scale,
     const float* norm, Stored* out, void* x, float* pre, float* post, float* comb, u64* inbox,
     unsigned* epochs, long long tokens, int iterations, float norm_eps, float eps) {
  __shared__ uint4 fragments[UNIT_FRAGMENTS];
  __shared__ float table[MIX + 3][HALVES + 1];
  __shared__ __align__(16) float weights_of_x[32];
  __shared__ float matrix[S * S];
  __shared__ unsigned number;  // of this launch
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, q = lane % 4;
  int cut = blockIdx.x % CUTS, group = blockIdx.x / CUTS;
  long long first = group * (long long)GROUP;
  int count = (int)min(tokens - first, (long long)GROUP), c = cut * 32 + q * 8;
  bool mixes = warp < MIXERS && 8 * warp < count;
  uint4* words = reinterpret_cast<uint4*>(inbox) + first * TOKEN_WORDS;
  int splitter = warp - FIRST_SPLITTER;
  bool splits = splitter >= 0 && splitter < SPLITTERS;
  constexpr int SHARE = S * TILES / SPLITTERS;
  uint4 numbers[SHARE][2];
  if (splits) {
#pragma unroll
    for (int i = 0; i < SHARE; ++i) {
      int n = splitter * SHARE + i;
      const float* from = fn + ((n % TILES * 8 + lane / 4) * S + n / TILES) * WIDTH + c;
      numbers[i][0] = read_quad(from), numbers[i][1] = read_quad(from + 4);
    }
  }
  Place p(first + (mixes ? 8 * warp : 0), tokens);
  Row old;
  Coefficients a;
  if (mixes) {
    const Stored* from = p.at(streams, S * WIDTH, 0, c);
#pragma unroll
    for (int j = 0; j < S; ++j) old.x[j].read(from + j * WIDTH);
    old.y.read(p.at(y, WIDTH, 0, c));
    float4* to = reinterpret_cast<float4*>(&a);
    const float* comb_row = p.at(comb_in, S * S, 0, 0);
#pragma unroll
    for (int j = 0; j < S; ++j) to[j] = read_once(comb_row + j * S);
    to[S] = read_once(p.at(post_in, S, 0, 0)), to[S + 1] = read_once(p.at(pre_in, S, 0, 0));
  }
  Affine affine;
  if (warp == HELPER) {
    if (lane == 0) number = __ldcg(epochs + 2 * group) + 1;
    affine.get(scale, base);
    weights_of_x[lane] = norm[cut * 32 + lane];
  }
  if (splits) {
#pragma unroll
    for (int i = 0; i < SHARE; ++i) {
      uint4 parts[PARTS];
      split(numbers[i][0], numbers[i][1], parts);
#pragma unroll
      for (int s = 0; s < PARTS; ++s)
        fragments[((splitter * SHARE + i) * PARTS + s) * 32 + lane] = parts[s];
    }
  }
  unsigned now[2][S][4] = {}, raw[1][4] = {};
  Sums sums = {};
  if (mixes) sums.collapsed[0] = mix_row(old, a, p.at(out, S * WIDTH, 0, c), now[0], raw[0]);
  __syncthreads();
  unsigned tag = number;
  if (mixes) {
    multiply(now, fragments, __float_as_uint(eps) >> 31, sums, [] {});
    int t = lane / 4;
    if (8 * warp + t < count) {
      uint4* to = words + (8 * warp + t) * TOKEN_WORDS + cut * WORDS;
      store_relaxed(to + q, word(sums.dot[0][0], sums.dot[0][1], sums.dot[1][0], tag));
      store_relaxed(to + 4 + q, word(sums.dot[1][1], sums.dot[2][0], sums.dot[2][1], tag));
      if (q == t / 2) {
        float square = t % 2 ? sums.self[0][1] : sums.self[0][0];
        uint4 squares = word(square, sums.collapsed[0], 0.f, tag);
        store_relaxed(to + 8, squares), store_relaxed(to + 9, squares);
      }
    }
  } else if (warp == HELPER && lane == 0 && atomicAdd(epochs + 2 * group + 1, 1u) == CUTS - 1) {
    epochs[2 * group] = tag;
    epochs[2 * group + 1] = 0;
  }
  // The block's own tokens; the last blocks, which share an SM with others, have none of 64.
  for (int t = (cut + CUTS - CUTS / 4) % CUTS; t < count; t += CUTS) {
    const uint4* from = words + t * TOKEN_WORDS;
    for (int n = threadIdx.x; n < FULL * HALVES; n += 32 * THIN_WARPS) {
      int half = n / FULL, w = n % FULL;
      Numbers m(w);
      uint4 seen[UNITS];
      bool missing = true;
      for (unsigned looks = 0; missing; ++looks) {
        if (looks == PATIENCE) __trap();
        missing = false;
#pragma unroll
        for (int u = 0; u < UNITS; ++u)
          seen[u] = load_relaxed(from + (half * UNITS + u) * WORDS + w);
#pragma unroll
        for (int u = 0; u < UNITS; ++u) missing |= seen[u].w != tag;
      }
      float total[3] = {};
#pragma unroll
      for (int u = 0; u < UNITS; ++u) {
        total[0] += __uint_as_float(seen[u].x);
        total[1] += __uint_as_float(seen[u].y);
        total[2] += __uint_as_float(seen[u].z);
      }
      table[m.first][half] = total[0];
      table[m.second][half] = total[1];
      table[m.third][half] = total[2];
    }
    __syncthreads();
    if (warp == HELPER) {
      Quarters total;
#pragma unroll
      for (int h = 0; h < HALVES; ++h) total.add(h, table[min(lane, MIX + 1)][h]);
      float sum = total.sum();
      if (lane == MIX + 1)
        store_relaxed(reinterpret_cast<u64*>(words + (t + 1) * TOKEN_WORDS - 1),
                      (u64)tag << 32 | __float_as_uint(reciprocal_root(sum, norm_eps)));
      mix_token(sum, first + t, affine, pre, post, matrix, norm_eps, eps);
      __syncwarp();
      if (lane == 0) scale_matrix(matrix, comb + (first + t) * S * S, iterations, eps);
    }
    if (t + CUTS < count) __syncthreads();
  }
  if (!mixes) return;
  int row = 8 * warp + p.step(0);
  const u64* at = reinterpret_cast<const u64*>(words + (row + 1) * TOKEN_WORDS - 1);
  u64 root = load_relaxed(at);
  for (unsigned looks = 0; (unsigned)(root >> 32) != tag; ++looks) {
    if (looks == PATIENCE) __trap();
    root = load_relaxed(at);
  }
  __syncwarp();
  float roots[1] = {__uint_as_float((unsigned)root)};
  put_unit(raw, roots, p, c, weights_of_x + q * 8, x);
}

// ---- large launches ---------------------------------------------------------------------------

// Block b keeps half b % HALVES of fn in shared memory. It has SETS sets of warps; each walks over
// tiles of 16 tokens, and the sets of all blocks with the same half together take every tile once.
// A warp of a set takes one unit of the tile; one more, the helper, sends sums and makes
// coefficients.
//
// Some 30 kB must be under way to an SM at any time if memory is to be busy: more than registers
// can wait for. So a lane copies what it will read of two tiles ahead into shared memory, and
// copies go on while it computes. Measured on an H200, cold: 28.1 microseconds at 512 tokens, 142.7
// at 4,096. (Slower, and gone: a barrier of all workers a round; bulk copies of 320 bytes, whose
// many starts take the helper's time; the first tile before fn; whole lines of 128 bytes, on their
// way out through shared memory, with halves of 128 channels and three sets of warps. A plain copy
// is faster by whole lines than by 64 bytes of a row at a time, which is how these warps move them.
// No faster: tiles fetched into L2 three rounds ahead; copies that ask L2 for 256 bytes instead of
// 128; ordinary stores; both rows of a lane side by side.)
//
// The warps of a set have no barrier in common: workers may be most of a tile apart, and so may
// helper and workers. In round r a worker waits for coefficients of its tile (`fed`), which the
// helper has asked for a round ago; computes; waits until the table is free of the last tile's sums
// (`freed`); leaves its own (`done`); and writes tile r - 3, normalised, out of its registers. In
// its round r the helper looks for everybody's sums of tile r - 2; while they come, it waits for
// the workers' sums of tile r and sends them. The Sinkhorn passes of one matrix are one long chain,
// so matrices wait until PENDING of them go through it together.
// trap: behind the last tile nobody leaves sums, so that the helper may be two rounds ahead of the
// slowest worker; hence four of what it hands over.
// trap: RING places for sums are enough because a helper sends tile r behind its sight of
// everybody's tile r - 3, which they sent when they were done with tile r - 6.
//
// inbox (walkers, RING, HALVES * PLACES) and epochs (walkers, 2) as above, a walker being one set
// of each half; the tag of a tile is the number of tiles that its walker has ever had.
constexpr int SETS = BF16_STORED ? 2 : 1;
constexpr int STAGES = 2;  // tiles of a worker in shared memory
constexpr int RING = 6;
constexpr int PENDING = 16;
constexpr int SET_WARPS = UNITS + 1;
constexpr int WIDE_WARPS = SETS * SET_WARPS;

__device__ __forceinline__ void end_stage() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_for_stage() {  // all but the newest
  asm volatile("cp.async.wait_group 1;" ::: "memory");
}

// A barrier in shared memory at which some arrive and others wait, round after round.
struct Signal {
  u64 state;
  __device__ __forceinline__ void start(int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&state)), "r"(count)
                 : "memory");
  }
  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&state))
                 : "memory");
  }
  __device__ __forceinline__ void arrive_behind_copies() {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(
                     shared_address(&state))
                 : "memory");
  }
  // Until it has been complete `times` + 1 times, which is now or next.
  __device__ __forceinline__ void wait(int times) {
    unsigned complete;
    do
      asm volatile(
          "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
          " selp.u32 %0, 1, 0, p; }"
          : "=r"(complete)
          : "r"(shared_address(&state)), "r"(times % 2)
          : "memory");
    while (!complete);
  }
};

// What a set has in shared memory.
struct Desk {
  uint4 stages[UNITS][STAGES][STAGE];
  float tables[UNITS * PLACES];
  float records[2][16 * RECORD];  // of two tiles
  float roots[4][16], matrices[PENDING][S * S];
  Signal fed[2], freed[4], done;
};

// A set's way over the tiles.
struct Walk {
  long long start, step;
  int rounds;
  __device__ __forceinline__ Walk(int walker, int walkers, long long tokens)
      : start(walker * 16ll), step(walkers * 16ll),
        rounds(((int)((tokens + 15) / 16) - walker + walkers - 1) / walkers) {}
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
  int part = threadIdx.x / 32 % SET_WARPS;
  int half = blockIdx.x % HALVES, walker = blockIdx.x / HALVES * SETS + set;
  int start = half * UNITS * 32, c = start + part * 32 + lane % 4 * 8;
  Walk walk(walker, gridDim.x / HALVES * SETS, tokens);
  Desk& desk = desks[set];
  if (part < UNITS) {
    auto staged = [&](int round) { return Staged{desk.stages[part][round % STAGES] + lane}; };
    auto fetch = [&](int round) {
      if (round < walk.rounds)
        staged(round).fetch(streams, y, Place(walk.first(round), tokens), c);
      end_stage();
    };
    int k = S / SETS * set;  // a warp of each set, of those of a unit
    Fragments<S / SETS> share = {fragments + (part * S + k) * TILES * PARTS * 32};
    share.fetch(fn, k, start + part * 32);
    fetch(0);
    wait_for_copies();
    share.split_all();
    __syncthreads();
    fetch(1);  // not before: a warp stands still while more is under way than the SM can follow
    unsigned zero = __float_as_uint(eps) >> 31;
    unsigned raw[4][2][4] = {};  // of this tile and the last three
#pragma unroll 1
    for (int round = 0; round < walk.rounds + 3 && walk.rounds > 0; ++round) {
      Sums total = {};
      if (round < walk.rounds) {
        Place p(walk.first(round), tokens);
        desk.fed[round % 2].wait(round / 2);
        wait_for_stage();
        unsigned now[2][S][4] = {};
#pragma unroll 1
        for (int r = 1; r >= 0; --r) {  // the last row first, which moves on when the other comes
#pragma unroll
          for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int k = 0; k < S; ++k) now[1][k][i] = now[0][k][i];
            raw[0][1][i] = raw[0][0][i];
          }
          total.collapsed[1] = total.collapsed[0];
          total.collapsed[0] =
              mix_row(staged(round).row(r), Records{desk.records[round % 2]}.row(r),
                      p.at(out, S * WIDTH, r, c), now[0], raw[0][0]);
        }
        multiply(now, fragments + part * UNIT_FRAGMENTS, zero, total,
                 [&] { fetch(round + STAGES); });
      }
      if (round > 0) desk.freed[(round - 1) % 4].wait((round - 1) / 4);
      const float* roots = desk.roots[(round + 3) % 4] + lane / 4;  // of tile round - 3
      float root[2] = {roots[0], roots[8]};
      if (round < walk.rounds) put_sums(total, desk.tables + part * PLACES);
      __syncwarp();
      if (lane < ARRIVING && round < walk.rounds) desk.done.arrive();
      if (round >= 3)
        put_unit(raw[3], root, Place(walk.first(round - 3), tokens), c, weights_of_x + c - start,
                 x);
#pragma unroll
      for (int i = 0; i < 24; ++i)
        raw[3 - i / 8][i / 4 % 2][i % 4] = raw[2 - i / 8][i / 4 % 2][i % 4];
    }
    return;
  }
  if (lane == 0) {
    desk.fed[0].start(32), desk.fed[1].start(32);
    desk.done.start(UNITS * ARRIVING);
    for (Signal& each : desk.freed) each.start(ARRIVING);
  }
  __syncwarp();
  Mixing<const float> old = {pre_in, post_in, comb_in};
  auto fetch = [&](int round) {
    if (round >= walk.rounds) return;
    Records{desk.records[round % 2]}.fetch(old, Place(walk.first(round), tokens));
    desk.fed[round % 2].arrive_behind_copies();
  };
  fetch(0);
  fetch(1);
  for (int i = lane + 32 * set; i < UNITS * 32; i += 32 * SETS) weights_of_x[i] = norm[start + i];
  unsigned epoch = 0;
  if (walk.rounds > 0) epoch = __shfl_sync(~0u, __ldcg(epochs + 2 * walker), 0);
  Affine affine;
  affine.get(scale, base);
  __syncthreads();
  if (walk.rounds <= 0) return;
  // trap: behind the last reader of the epoch, and only there, it may move on
  if (lane == 0 && atomicAdd(epochs + 2 * walker + 1, 1u) == HALVES - 1) {
    epochs[2 * walker] = epoch + walk.rounds;
    epochs[2 * walker + 1] = 0;
  }
  unsigned tag = epoch + 1;  // of round 0
  auto slot = [&](int round) {
    return inbox + (walker * RING + round % RING) * (long long)(HALVES * PLACES);
  };
  int pending = 0;
  long long token = 0;  // of the matrix that is the lane's
  auto scale_pending = [&] {
    __syncwarp();
    if (lane < pending)
      scale_matrix(desk.matrices[lane], comb + token * S * S, iterations, eps);
    pending = 0;
    __syncwarp();
  };
#pragma unroll 1
  for (int round = 0; round < walk.rounds + 2; ++round) {
    CollapsedSum square;
    TokenSum total;
    bool late = round >= 2;
    const u64* sums = slot(round - 2);
    unsigned old_tag = tag + round - 2;
    long long first = walk.first(round - 2);
    int t = (half + 16 * round) % HALVES;  // in turn by blocks t, t + 16, ... of a team
    if (late) {
      square.look_at(sums);
      if (t < 16) total.look_at(sums, t);
    }
    if (round < walk.rounds) {
      desk.done.wait(round);
      send_sums(desk.tables, slot(round) + half * PLACES, tag + round);
      fetch(round + 2);
    }
    if (late) {
      float root = square.root(old_tag, norm_eps);
      if (lane < 16) desk.roots[round % 4][lane] = root;
    }
    __syncwarp();
    if (lane < ARRIVING) desk.freed[round % 4].arrive();
    for (; late && t < 16 && first + t < tokens; t += HALVES) {
      mix_token(total.sum(old_tag), first + t, affine, pre, post, desk.matrices[pending],
                norm_eps, eps);
      if (lane == pending) token = first + t;
      if (++pending == PENDING) scale_pending();
      if (t + HALVES < 16) total.look_at(sums, t + HALVES);
    }
  }
  scale_pending();
}
