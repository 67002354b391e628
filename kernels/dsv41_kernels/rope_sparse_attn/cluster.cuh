// v5 `cluster`, see kernel.cu. Heads do not see one another, so a token is four clusters, of 16
// heads and 16 blocks each:
//
//   scorers   bytes of a chunk  | scores, decoding on the way | maxima | weights | sums
//   helpers   q                 | some channels of all records, decoded  | their products
//   clerk     angles            |                             | decays           | norms
//
// Block r scores chunk r; the last VALUE_BLOCKS blocks add up values, of 512 / VALUE_BLOCKS
// channels each. Nothing that is a sum in v4 is divided, and products follow one another as there,
// so o has v4's bits. What a block has found it writes into the shared memory of the others, where
// a barrier counts the bytes: maxima to all, weights and sums to those that add up values.
//
// With few tokens all is latency: of trips to memory, of products that wait for one another, of
// instructions that are fetched to run once. So the work is spread until a block has one chunk,
// loops stay rolled, and products are those of a warp, which waits for no other (on an H200 they
// have the bits of a warpgroup's). A lane decodes the pairs that the tensor core wants from it.
//
// What a block sends takes long, and a chunk's weights for all others are 32 KB. Eight
// blocks that add up values halve that, for one token; 16 leave room for two blocks in an SM, for
// more of them.

#ifndef VALUE_BLOCKS
#define VALUE_BLOCKS 16
#endif
constexpr int BLOCKS = 16, MOST_CHUNKS = 12, TEAM_HEADS = 16, TEAMS = ALL_HEADS / TEAM_HEADS;
constexpr int TILE = 8, TILES = CHUNK / TILE;  // records of a warp
constexpr int SCORERS = TILES * 32, HELPERS = 256, ADDERS = 128;
constexpr int CLUSTER_THREADS = SCORERS + HELPERS + 32;
constexpr int PER_SM = VALUE_BLOCKS == 16 ? 2 : 1, FIRST_ADDER = BLOCKS - VALUE_BLOCKS;
constexpr int COLUMNS = C / VALUE_BLOCKS, PIECES = COLUMNS / 8;  // channels of a block that adds
constexpr int UNITS = COLUMNS / 32, ADDED = PIECES / (ADDERS / 32);  // ADDED: tiles of a warp
constexpr bool AHEAD = PER_SM == 1;  // are there registers for two chunks?
constexpr int RECORD = NEAR_BYTES + 64;  // a record and its scales as factors: rows in other banks
constexpr int Q_COLUMN = TEAM_HEADS * 16 + 16;  // 8 channels of all heads: likewise
constexpr int WEIGHT_BYTES = TEAM_HEADS * CHUNK * 2;
// Barriers on which bytes arrive from other blocks: weights, of each chunk or of all, and these.
constexpr int TOPS = MOST_CHUNKS, SUMS = TOPS + 1, ARRIVALS = TOPS + 2;
__device__ int weights_of(int chunk) { return AHEAD ? 0 : chunk; }
enum ClusterBarrier { LOADED = 1, LISTED, COMPUTED, ROTATED, JOINED, DECAYED, NORMED, OF_CHUNK };

struct Desk {  // a block's shared memory
  unsigned long long arrivals[ARRIVALS];
  float tops[MOST_CHUNKS][TEAM_HEADS], sums[MOST_CHUNKS][2 * 32], decays[MOST_CHUNKS][TEAM_HEADS];
  float tile_tops[TEAM_HEADS][TILES], inverse[TEAM_HEADS];
  float2 angle[C / 2];
  alignas(16) char queries[C / 8 * Q_COLUMN];
  union {  // the records are scored before the first weights can come
    char records[CHUNK][RECORD];
    struct {
      uint4 weights[MOST_CHUNKS][CHUNK / 16][32];  // as the tensor core wants them
      uint4 staged[CHUNK / 16][32];
      float4 parts[TILES][32];
    };
  };
  alignas(128) uint4 values[1][PIECES];  // (chunks * CHUNK, PIECES)
};

static_assert(MOST_CHUNKS * CHUNK == 768, "rows of a token at most, as cupy_op.py says");
static_assert(sizeof(Desk) - 128 == 62720, "where values begin, as cupy_op.py counts");

__device__ void arrive_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ void wait_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// `await` returns once so many bytes have arrived.
__device__ void expect(const unsigned long long& barrier, int bytes) {
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], 1;"
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
      "fence.mbarrier_init.release.cluster;" ::"r"(shared_address(&barrier)),
      "r"(bytes)
      : "memory");
}
__device__ void await(const unsigned long long& barrier) {
  asm volatile(
      "{ .reg .pred p; again:"
      " mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0; @!p bra again; }" ::"r"(
          shared_address(&barrier))
      : "memory");
  linger();
}

// A barrier of a part of the block that also says whether any of its threads found something.
__device__ bool meet_or(int id, int count, bool found) {
  linger();
#ifdef WATCHED
  __shared__ unsigned any;
  if (threadIdx.x == SCORERS) any = 0;
  meet(id, count);
  if (found) atomicOr(&any, 1u);
  meet(id, count);
  return any;
#else
  unsigned any;
  asm volatile(
      "{ .reg .pred p, q; setp.ne.u32 p, %3, 0; barrier.cta.red.or.aligned.pred q, %1, %2, p;"
      " selp.u32 %0, 1, 0, q; }"
      : "=r"(any)
      : "r"(id), "r"(count), "r"((unsigned)found)
      : "memory");
  return any;
#endif
}

// The same place in the shared memory of another block.
struct Peer {
  unsigned base, here;
  __device__ explicit Peer(int block) : here(shared_address(shared)) {
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(base) : "r"(here), "r"(block));
  }
  __device__ unsigned at(const void* p) const { return shared_address(p) - here + base; }
  __device__ void send(const float* to, float x, const unsigned long long& barrier) const {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(at(to)),
        "r"(__float_as_uint(x)), "r"(at(&barrier))
        : "memory");
  }
  // In the background, and from shared memory of this block: it must not end before.
  __device__ void copy(const void* to, const void* from, int bytes,
                       const unsigned long long& barrier) const {
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(at(to)),
        "r"(shared_address(from)), "r"(bytes), "r"(at(&barrier))
        : "memory");
  }
};

// The first of 64 columns of 8 channels in which something turns.
__device__ int first_turned(int pairs) { return (C / 2 - pairs) / 4; }

// One of a warp's eight records; four lanes share it.
struct Scored {
  char* bytes;
  bool recent, real;

  __device__ Scored(Desk& desk, const Lists& lists, long long token, int place) {
    Lists silent = lists;  // helpers see all rows and report
    silent.bad = nullptr;
    bool past_the_end = false;
    const long long row = silent.row(token, place, past_the_end);
    recent = place < lists.near_width, real = row >= 0;
    bytes = desk.records[threadIdx.x / 4];
    const unsigned char* record = recent ? lists.near : lists.far;
    if (real) record += row * (recent ? NEAR_BYTES : FAR_BYTES);
    // all lanes take a record after the other: few lines of memory at once, which is what costs
    const int lane = threadIdx.x % 32, kinds = recent + 2 * real;
#pragma unroll 4
    for (int i = 0; i < TILE; ++i) {
      const int kind = __shfl_sync(~0u, kinds, 4 * i);
      const unsigned char* from = reinterpret_cast<const unsigned char*>(
          __shfl_sync(~0u, reinterpret_cast<unsigned long long>(record), 4 * i));
      if (kind % 2 || lane < FAR_BYTES / 16)
        copy_16(desk.records[threadIdx.x / 32 * TILE + i] + 16 * lane, from + 16 * lane, kind > 1);
    }
    if (recent && lane % 4 == 0) copy_16(bytes + C, record + C, real);  // scales, behind 32 lanes'
  }

  // Scales become factors of pairs: behind the record, one for 32 channels or for 16.
  __device__ void make_factors() const {
    const int t = threadIdx.x % 4;
    wait_for_copies();
    __syncwarp();
    if (recent) {
      const unsigned x = *reinterpret_cast<const unsigned*>(bytes + 512 + 4 * t);
      *reinterpret_cast<uint4*>(bytes + NEAR_BYTES + 16 * t) =
          make_uint4(e8m0_scale(x & 255), e8m0_scale(x >> 8 & 255), e8m0_scale(x >> 16 & 255),
                     e8m0_scale(x >> 24));
    } else {
      const uint2 x = *reinterpret_cast<const uint2*>(bytes + 256 + 8 * t);
      const uint2 a = e4m3_scales(x.x & 0xffff), b = e4m3_scales(x.x >> 16);
      const uint2 c = e4m3_scales(x.y & 0xffff), d = e4m3_scales(x.y >> 16);
      uint4* to = reinterpret_cast<uint4*>(bytes + FAR_BYTES + 32 * t);
      to[0] = make_uint4(a.x, a.y, b.x, b.y), to[1] = make_uint4(c.x, c.y, d.x, d.y);
    }
    __syncwarp();
  }

  // s of heads g and g + 8, records 2 t and 2 t + 1 of the warp's eight.
  __device__ void score(float* s, const char* queries, int pairs) const {
    const unsigned near = __ballot_sync(~0u, recent);
    const int unturned = first_turned(pairs), turned = unturned < C / 8 ? unturned / 4 : -1;
    if (near == 0)
      score_some<false, true>(s, queries, turned);
    else if (near == ~0u)
      score_some<true, false>(s, queries, turned);
    else
      score_some<true, true>(s, queries, turned);
  }

  // Columns of 32 channels from `turned` on are there when ROTATED opens.
  template <bool NEARS, bool FARS>
  __device__ void score_some(float* s, const char* queries, int turned) const {
    const bool near = NEARS && (!FARS || recent);
    const int t = threadIdx.x % 4, shift = 4 * t, pick = 0x4400 + 0x1111 * t;
    const char* q = queries + threadIdx.x % 32 / 16 * Q_COLUMN + threadIdx.x % 16 * 16;
    const uint4* codes = reinterpret_cast<const uint4*>(bytes);
    const char* factors = bytes + (near ? NEAR_BYTES : FAR_BYTES);
    auto factor = [&](int i) {
      const uint2* far_factors = reinterpret_cast<const uint2*>(factors);
      const unsigned* near_factors = reinterpret_cast<const unsigned*>(factors);
      return near ? make_uint2(near_factors[i], near_factors[i]) : far_factors[i];
    };
    auto code = [&](int i) { return codes[near ? 2 * i : i]; };
    auto more = [&](int i) { return near ? codes[2 * i + 1] : make_uint4(0, 0, 0, 0); };
    uint4 low = code(0), high = more(0);
    uint2 scale = factor(0);
    unsigned a[4], b[4];
    if (turned == 0) meet(ROTATED, SCORERS + HELPERS);
    load_matrices(a, q), load_matrices(b, q + 2 * Q_COLUMN);
#pragma unroll 2
    for (int i = 0; i < C / 32; ++i) {  // 32 channels, two steps of the tensor core
      const uint4 u = low, v = high;
      const uint2 now = scale;
      const unsigned first[4] = {a[0], a[1], a[2], a[3]}, second[4] = {b[0], b[1], b[2], b[3]};
      unsigned x[4];
      // what the next ones need is on its way meanwhile, and one too many at the end
      if (i + 1 == turned) meet(ROTATED, SCORERS + HELPERS);
      q += 4 * Q_COLUMN;
      load_matrices(a, q), load_matrices(b, q + 2 * Q_COLUMN);
      low = code(i + 1), high = more(i + 1), scale = factor(i + 1);
      if (near) {
        const unsigned w[4] = {__byte_perm(u.x, u.y, pick), __byte_perm(u.z, u.w, pick),
                               __byte_perm(v.x, v.y, pick), __byte_perm(v.z, v.w, pick)};
#pragma unroll
        for (int n = 0; n < 4; ++n) x[n] = (w[n] & 0x80008000u) | (w[n] >> 4 & 0x07f007f0u);
      } else {
        const unsigned w[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
        for (int n = 0; n < 4; ++n)
          x[n] = (w[n] >> shift & 0x000f000fu) * (4096 + 64) & 0x81c081c0u;
      }
      mma(s, first, multiply_pairs(x[0], now.x), multiply_pairs(x[1], now.x));
      mma(s, second, multiply_pairs(x[2], now.y), multiply_pairs(x[3], now.y));
    }
  }
};

// 4 or 8 bytes in the background, or zeros if not `real`.
template <int BYTES>
__device__ void copy_some(void* to, const void* from, bool real) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)), "l"(from),
               "n"(BYTES), "r"(real ? BYTES : 0)
               : "memory");
}

// 32 of the block's channels of one record, read and decoded by one thread: first the bytes lie
// where values will, and behind them the scales; the record's number is behind all of them.
struct Valued {
  char* row;
  int turn, first;  // piece i lies at i ^ turn: eight records in other banks

  __device__ Valued(const Desk& desk, int place, int unit)
      : row(reinterpret_cast<char*>(const_cast<uint4*>(desk.values[place]))),
        turn(PIECES < 8 ? place * PIECES / 8 % PIECES : place % 8),
        first(4 * unit) {}
  __device__ uint4* piece(int i) const {
    return reinterpret_cast<uint4*>(row + ((first + i ^ turn) << 4));
  }
  __device__ long long& number() const { return *reinterpret_cast<long long*>(piece(3)); }

  // The number is on its way; 0 past the end of the lists.
  __device__ void list(const Lists& lists, long long token, int place) const {
    const bool recent = place < lists.near_width;
    const long long* from = recent ? lists.near_rows + token * lists.near_width
                                   : lists.far_rows + token * lists.far_width - lists.near_width;
    copy_some<8>(&number(), from + place, place < lists.width());
  }

  __device__ void read(const Lists& lists, long long number, bool recent, int column) const {
    const unsigned char* record = recent ? lists.near : lists.far;
    const bool real = number >= 0;
    if (real) record += number * (recent ? NEAR_BYTES : FAR_BYTES);
    const unsigned char* codes = record + column * (recent ? 32 : 16);
    copy_16(piece(0), codes, real);
    if (recent) copy_16(piece(1), codes + 16, real);
    const unsigned char* at = record + (recent ? 512 + (column & ~3) : 256 + (2 * column & ~3));
    copy_some<4>(piece(2), at, real);
  }

  __device__ void decode(bool recent, int column) const {
    const uint4 u = *piece(0), v = *piece(1);
    const unsigned scales =
        *reinterpret_cast<const unsigned*>(piece(2)) >> 8 * ((recent ? column : 2 * column) & 3);
    if (recent) {
      const unsigned scale = e8m0_scale(scales & 255);
      *piece(0) = place_e4m3(u.x, u.y, scale), *piece(1) = place_e4m3(u.z, u.w, scale);
      *piece(2) = place_e4m3(v.x, v.y, scale), *piece(3) = place_e4m3(v.z, v.w, scale);
    } else {
      const uint2 scale = e4m3_scales(scales & 0xffff);
      *piece(0) = place_e2m1(u.x, scale.x), *piece(1) = place_e2m1(u.y, scale.x);
      *piece(2) = place_e2m1(u.z, scale.y), *piece(3) = place_e2m1(u.w, scale.y);
    }
  }
};

// Two channels of two heads a lane, of the eight from `first` on: over the norm, turned back, out.
__device__ void write_tile(float* out, const float* o, const Desk& desk, int first, int pairs) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float inverse = desk.inverse[g + 8 * n];
    const unsigned both = bf16_pair(o[2 * n] * inverse, o[2 * n + 1] * inverse);  // t and t + 4
    const unsigned other = __shfl_xor_sync(~0u, t % 2 ? both << 16 : both & 0xffff0000u, 1);
    float x = __uint_as_float(t % 2 ? other : both << 16);
    float y = __uint_as_float(t % 2 ? both & 0xffff0000u : other);
    const int channel = first + (t % 2 ? t + 3 : t), pair = channel / 2 - (C / 2 - pairs);
    if (pair >= 0) {
      turn_pair(x, y, make_float2(desk.angle[pair].x, -desk.angle[pair].y));
      x = bf16(x), y = bf16(y);
    }
    *reinterpret_cast<float2*>(out + (g + 8 * n) * C + channel) = make_float2(x, y);
  }
}

// What a warp's products over a chunk need.
struct Added {
  uint4 weights[CHUNK / 16];
  unsigned values[ADDED][8];
  float decay, below;

  __device__ void load(const Desk& desk, int lane, int first_tile, int chunk) {
#pragma unroll
    for (int i = 0; i < ADDED; ++i) {
      const char* from =
          reinterpret_cast<const char*>(Valued(desk, lane, 0).piece(first_tile + i)) +
          chunk * CHUNK * PIECES * 16;
      load_transposed(values[i], from), load_transposed(values[i] + 4, from + 32 * PIECES * 16);
    }
    decay = desk.decays[chunk][lane / 4], below = desk.decays[chunk][lane / 4 + 8];
    if (!AHEAD) await(desk.arrivals[chunk]);
#pragma unroll
    for (int k = 0; k < CHUNK / 16; ++k) weights[k] = desk.weights[chunk][k][lane];
  }
};

// q of the cluster's heads; the columns that turn come last, when their angles are there.
__device__ void load_some_queries(Desk& desk, const float* q, int pairs) {
  const int unturned = first_turned(pairs);
  constexpr int ROUNDS = TEAM_HEADS * (C / 8) / HELPERS;
  const int helper = threadIdx.x - SCORERS, column = helper % (C / 8), head = helper / (C / 8);
  const float4* from = reinterpret_cast<const float4*>(q + head * C + 8 * column);
  float4 low[ROUNDS], high[ROUNDS];
#pragma unroll
  for (int n = 0; n < ROUNDS; ++n) low[n] = __ldg(from + n * C), high[n] = __ldg(from + n * C + 1);
#pragma unroll 1
  for (int turned = 0; turned < 2; ++turned) {
    if (turned && unturned < C / 8) meet(COMPUTED, HELPERS + 32);
    if (turned == (column >= unturned)) {
#pragma unroll
      for (int n = 0; n < ROUNDS; ++n) {
        float x[8] = {low[n].x,  low[n].y,  low[n].z,  low[n].w,
                      high[n].x, high[n].y, high[n].z, high[n].w};
        const int first = column * 4 - (C / 2 - pairs);
        if (turned) {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            if (first + i >= 0) turn_pair(x[2 * i], x[2 * i + 1], desk.angle[first + i]);
        }
        *reinterpret_cast<uint4*>(desk.queries + column * Q_COLUMN +
                                  (head + n * (HELPERS / (C / 8))) * 16) =
            make_uint4(bf16_pair(x[0], x[4]), bf16_pair(x[1], x[5]), bf16_pair(x[2], x[6]),
                       bf16_pair(x[3], x[7]));
      }
    }
    if (!turned) arrive(LOADED, SCORERS + HELPERS);
  }
  if (unturned < C / 8) arrive(ROTATED, SCORERS + HELPERS);
}

// The scorers: chunk `rank` of the token.
__device__ void score_chunk_of(Desk& desk, const Lists& lists, long long token, int chunks,
                               int rank, int pairs) {
  const int thread = threadIdx.x, lane = thread % 32, g = lane / 4, t = lane % 4;
  const int tile = thread / 32;
  const Scored record(desk, lists, token, rank * CHUNK + tile * TILE + g);
  const unsigned real = __ballot_sync(~0u, record.real) >> 8 * t;
  arrive_cluster();
  record.make_factors();
  meet(LOADED, SCORERS + HELPERS);
  float s[4] = {};
  record.score(s, desk.queries, pairs);
  if (!(real & 1)) s[0] = s[2] = minus_infinity();
  if (!(real & 16)) s[1] = s[3] = minus_infinity();
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    float top = fmaxf(s[2 * n], s[2 * n + 1]);
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    if (t == 0) desk.tile_tops[g + 8 * n][tile] = top;
  }
  wait_cluster();
  meet(OF_CHUNK, SCORERS);
  const int head = thread % TEAM_HEADS, target = thread / TEAM_HEADS;
  if (target < chunks || target >= FIRST_ADDER) {
    const float4* of = reinterpret_cast<const float4*>(desk.tile_tops[head]);
    const float4 a = of[0], b = of[1];
    const float top =
        fmaxf(fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w)), fmaxf(fmaxf(b.x, b.y), fmaxf(b.z, b.w)));
    Peer(target).send(&desk.tops[rank][head], fmaxf(NEVER, top * SCORE_SCALE),
                      desk.arrivals[TOPS]);
  }
  await(desk.arrivals[TOPS]);  // nobody reads records any more
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    float top = NEVER;
#pragma unroll
    for (int c = 0; c < MOST_CHUNKS; c += 4)
      if (c + t <= rank) top = fmaxf(top, desk.tops[c + t][g + 8 * n]);
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    s[2 * n] = exp2f(__fmaf_rn(s[2 * n], SCORE_SCALE, -top));
    s[2 * n + 1] = exp2f(__fmaf_rn(s[2 * n + 1], SCORE_SCALE, -top));
  }
  reinterpret_cast<uint2*>(&desk.staged[tile / 2][lane])[tile % 2] =
      make_uint2(bf16_pair(s[0], s[1]), bf16_pair(s[2], s[3]));
  desk.parts[tile][lane] = make_float4(s[0], s[1], s[2], s[3]);
  publish();
  meet(OF_CHUNK, SCORERS);
#pragma unroll 1
  for (int i = tile; i < VALUE_BLOCKS; i += TILES) {
    const int to = FIRST_ADDER + (rank + i) % VALUE_BLOCKS;
    const unsigned long long& arrival = desk.arrivals[weights_of(rank)];
    if (to == rank) {  // memcheck does not know a bulk copy of a block to itself
#pragma unroll 4
      for (int n = lane; n < WEIGHT_BYTES / 4; n += 32)
        Peer(to).send(reinterpret_cast<const float*>(desk.weights[rank]) + n,
                      reinterpret_cast<const float*>(desk.staged)[n], arrival);
    } else if (lane == 0) {
      Peer(to).copy(desk.weights[rank], desk.staged, WEIGHT_BYTES, arrival);
    }
  }
  __syncwarp();
  float sum = 0.f;  // in v4's order: of one of four threads that share a head
#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    const float2 p = reinterpret_cast<const float2*>(&desk.parts[i][lane])[tile % 2];
    sum += p.x, sum += p.y;
  }
#pragma unroll 1
  for (int i = thread / 64; i < VALUE_BLOCKS; i += SCORERS / 64)
    Peer(FIRST_ADDER + i).send(&desk.sums[rank][thread % 64], sum, desk.arrivals[SUMS]);
}

// The clerk, a warp: angles; then, where values are added, by what they shrink, and norms.
__device__ void keep_books(Desk& desk, const long long* position, const float* freqs, int pairs,
                           const float* sink, int chunks, bool scores, bool adds) {
  const int lane = threadIdx.x % 32, g = lane / 4, head = lane % TEAM_HEADS;
  const float sinks[2] = {sink[g], sink[g + 8]};
  const long long place = pairs ? *position : 0;
  float freq = lane < pairs ? freqs[lane] : 0.f;
  arrive_cluster();
#pragma unroll 1
  for (int i = lane; i < pairs; i += 32) {
    desk.angle[i] = angle_of(place, freq, false);
    if (i + 32 < pairs) freq = freqs[i + 32];
  }
  __syncwarp();
  if (scores && first_turned(pairs) < C / 8) arrive(COMPUTED, HELPERS + 32);
  wait_cluster();
  if (!adds) return;
  await(desk.arrivals[TOPS]);
  float top = NEVER, total[2] = {0.f, 0.f};
#pragma unroll 4
  for (int c = 0; c < chunks; ++c) {
    const float before = top;
    top = fmaxf(before, desk.tops[c][head]);
    desk.decays[c][head] = exp2f(before - top);
  }
  __syncwarp();
  arrive(DECAYED, 32 + ADDERS);
  await(desk.arrivals[SUMS]);
#pragma unroll 4
  for (int c = 0; c < chunks; ++c)
#pragma unroll
    for (int n = 0; n < 2; ++n)
      total[n] = __fmaf_rn(total[n], desk.decays[c][g + 8 * n], desk.sums[c][32 * n + lane]);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float norm = norm_of(total[n], __shfl_sync(~0u, top, g + 8 * n), sinks[n]);
    if (lane % 4 == 0) desk.inverse[g + 8 * n] = LIFT / norm;
  }
  arrive(NORMED, 32 + ADDERS);
}

extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(CLUSTER_THREADS, PER_SM)
    cluster(const float* q, const long long* positions, const float* freqs, int pairs,
            const unsigned char* near, long long near_count, const long long* near_rows,
            int near_width, const unsigned char* far, long long far_count,
            const long long* far_rows, int far_width, const float* sink, unsigned long long* bad,
            float* out) {
  const Lists lists = {near,      near_count, near_rows, near_width, far,
                       far_count, far_rows,   far_width, bad};
  Desk& desk = *reinterpret_cast<Desk*>(shared);
  const int chunks = (lists.width() + CHUNK - 1) / CHUNK, rank = blockIdx.x % BLOCKS;
  const int first_head = blockIdx.x / BLOCKS % TEAMS * TEAM_HEADS;
  const long long token = blockIdx.x / (BLOCKS * TEAMS);
  const long long begin = (token * ALL_HEADS + first_head) * C;  // of the heads in q and out
  const bool scores = rank < chunks, adds = rank >= FIRST_ADDER;

  prepare({{LOADED, SCORERS + HELPERS}, {LISTED, HELPERS}, {COMPUTED, HELPERS + 32},
           {ROTATED, SCORERS + HELPERS}, {JOINED, HELPERS}, {DECAYED, 32 + ADDERS},
           {NORMED, 32 + ADDERS}, {OF_CHUNK, SCORERS}});
  if (threadIdx.x >= SCORERS + HELPERS) {
    keep_books(desk, positions + token, freqs, pairs, sink + first_head, chunks, scores, adds);
    return;
  }
  if (threadIdx.x < SCORERS) {
    if (scores)
      score_chunk_of(desk, lists, token, chunks, rank, pairs);
    else
      arrive_cluster(), wait_cluster();
    if (threadIdx.x >= 32) return;
    arrive_cluster();
    wait_cluster();  // others have what is copied from here: trap, a block that ends takes it along
    return;
  }

  const int helper = threadIdx.x - SCORERS, lane = helper % 32;
  if (lane == 0)
#pragma unroll
    for (int i = helper / 32; i < ARRIVALS; i += HELPERS / 32)
      expect(desk.arrivals[i], i == TOPS   ? chunks * TEAM_HEADS * 4
                               : i == SUMS ? chunks * 64 * 4
                                           : (AHEAD ? chunks : 1) * WEIGHT_BYTES);
  __syncwarp();
  arrive_cluster();
  bool past_the_end = false;
  if (adds)
#pragma unroll 1
    for (int place = helper; place < chunks * CHUNK; place += HELPERS)
      Valued(desk, place, UNITS - 1).list(lists, token, place);
  if (scores) load_some_queries(desk, q + begin, pairs);
  if (adds) {
    wait_for_copies();
#pragma unroll 1
    for (int place = helper; place < chunks * CHUNK; place += HELPERS) {
      long long& number = Valued(desk, place, UNITS - 1).number();
      number = place < lists.width() ? lists.checked(number, token, place, past_the_end) : -1;
    }
    meet(LISTED, HELPERS);
#pragma unroll 1
    for (int i = helper; i < chunks * CHUNK * UNITS; i += HELPERS) {
      const int place = i / UNITS, unit = i % UNITS;
      const long long number = Valued(desk, place, UNITS - 1).number();
      Valued(desk, place, unit)
          .read(lists, number, place < near_width, (rank - FIRST_ADDER) * UNITS + unit);
    }
  }
  wait_cluster();
  if (!adds) return;
  wait_for_copies();
  __syncwarp();
#pragma unroll 1
  for (int i = helper; i < chunks * CHUNK * UNITS; i += HELPERS) {
    const int place = i / UNITS, unit = i % UNITS;
    Valued(desk, place, unit).decode(place < near_width, (rank - FIRST_ADDER) * UNITS + unit);
  }
  past_the_end = meet_or(JOINED, HELPERS, past_the_end);
  if (helper >= ADDERS) return;

  const int first_tile = helper / 32 * ADDED;
  float o[ADDED][4] = {};
  meet(DECAYED, 32 + ADDERS);
  Added next;
  if (AHEAD) {
    await(desk.arrivals[0]);
    next.load(desk, lane, first_tile, 0);
  }
#pragma unroll 2
  for (int c = 0; c < chunks; ++c) {
    if (!AHEAD) next.load(desk, lane, first_tile, c);
    const Added now = next;
    if (AHEAD) next.load(desk, lane, first_tile, min(c + 1, chunks - 1));
#pragma unroll
    for (int i = 0; i < ADDED; ++i) {
      o[i][0] *= now.decay, o[i][1] *= now.decay, o[i][2] *= now.below, o[i][3] *= now.below;
#pragma unroll
      for (int k = 0; k < CHUNK / 16; ++k) {
        const uint4 w = now.weights[k];
        const unsigned a[4] = {w.x, w.y, w.z, w.w};
        mma(o[i], a, now.values[i][2 * k], now.values[i][2 * k + 1]);
      }
    }
  }
  arrive_cluster();
  meet(NORMED, 32 + ADDERS);
#pragma unroll
  for (int i = 0; i < ADDED; ++i) {
    if (past_the_end) o[i][0] = o[i][1] = o[i][2] = o[i][3] = not_a_number();
    write_tile(out + begin, o[i], desk, (rank - FIRST_ADDER) * COLUMNS + 8 * (first_tile + i),
               pairs);
  }
}
