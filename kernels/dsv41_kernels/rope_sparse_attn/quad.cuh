// v8 `quad`, see kernel.cu. A cluster of SHARERS (four or two) blocks takes a token. Block r scores
// chunks r, r + SHARERS and so on for all heads, and adds up values of its part of the channels of
// all chunks; with four:
//
//   even    some heads of q | scores r | weighs it     | scores r + 8 | weighs it | values
//   odd     some heads of q |          | scores r + 4  | weighs it    |           | values
//   makers  decode r, r + 4            | r + 8         | the block's channels of all chunks
//
// In v6 each of a token's four blocks reads all of q, decodes all records and computes all scores:
// 328 K numbers and 12,800 clocks of products, where here it is 180 K and 5,632. What a block has
// found it writes into the shared memory of the others, as in v5: its heads of q, turned and
// rounded; maxima of a chunk, its weights and parts of their sum. That is slow: so scores follow the
// blocks of q that arrive, and the weights of a chunk travel while others are scored.
//
// q goes on into registers, where products take it from, and then weights take its place; those of
// the last four chunks take the place of keys. They are sent when the maxima of all blocks are
// there, and a block sends its maxima when it is done with the place. Sums come in v4's order, so o
// has v4's bits.
//
// Most of the time is that of steps which wait for each other. Two blocks take half as long again
// as four, but four find a place together 30 times on an H200, and two 66 times.

#ifndef SHARERS
#define SHARERS 4
#endif
constexpr int QUAD_THREADS = 4 * GROUP, QUAD_SCORERS = 2 * GROUP, QUAD_MAKERS = 2 * GROUP;
constexpr int QUAD_CHUNKS = 12, ROUNDS = QUAD_CHUNKS / 2;
constexpr int OWN_HEADS = ALL_HEADS / SHARERS, OWN_CHANNELS = C / SHARERS;
// Values lie in tiles of a chunk and 128 channels, PARTS of them for a chunk; there are places for
// SLOTS. A group adds up half of a tile, or all of one of two.
constexpr int TILE_BYTES = 2 * BLOCK, SLOTS = 4, PARTS = OWN_CHANNELS / 128;
constexpr int SUMMED = OWN_CHANNELS / 2, TILE_USERS = QUAD_MAKERS + 2 * GROUP / PARTS;
// Registers change hands; trap: more than the block started with, and it would wait for ever.
constexpr int QUAD_HIGH = 192, QUAD_LOW = 64;
static_assert(QUAD_HIGH + QUAD_LOW <= 2 * (65536 / QUAD_THREADS / 8 * 8), "registers");

// Barriers: keys of a chunk are there, or scored (for each group); a tile of values is, or is read
// (one for each of SLOTS); rows are known; for both groups that score; the chunk of one of them is
// scored.
enum QuadBarrier { KEYS_FULL = 1, KEYS_EMPTY = 3, TILE_FULL = 5, TILE_EMPTY = 9, ROWS_KNOWN = 13 };
constexpr int BOTH = 14;
__device__ int scored_by(int group) { return group ? 15 : 0; }

// Barriers on which bytes from other blocks arrive: a block of q, maxima, weights and sums.
struct Arrivals {
  unsigned long long queries[C / 64], tops[ROUNDS], weights[QUAD_CHUNKS];
};

struct QuadDesk {  // a block's shared memory
  char queries[KEYS_BYTES];  // then weights of chunks 0 to 7
  char keys[KEYS_BYTES];     // of a chunk of the even group; then weights of chunks 8 to 11
  char tiles[SLOTS][TILE_BYTES];  // before that, keys of the odd group
  float2 tops[QUAD_CHUNKS][ALL_HEADS / 2], sums[QUAD_CHUNKS][GROUP];  // of two heads each
  Arrivals arrivals;
  int past_the_end;
  float2 turns[2 * GROUP / 32][64];  // angles of the channels that a warp turns
  alignas(16) long long rows[QUAD_CHUNKS * CHUNK];
  uint2 valid[QUAD_CHUNKS];
  alignas(16) float2 angle[1];  // (pairs,)

  __device__ char* weights(int chunk) { return queries + chunk * BLOCK; }
  __device__ char* keys_of(int group) { return group ? tiles[0] : keys; }
};
static_assert(sizeof(QuadDesk) - 16 == 222528, "where angles begin, as cupy_op.py counts");

// `expect`, where threads of this block arrive as well.
__device__ void expect_all(const unsigned long long& barrier, int arrivals, int bytes) {
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], %1;"
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %2;"
      "fence.mbarrier_init.release.cluster;" ::"r"(shared_address(&barrier)),
      "r"(arrivals + 1), "r"(bytes)
      : "memory");
}
__device__ void arrive_at(const unsigned long long& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier))
               : "memory");
}
__device__ void send_pair(int block, const float2* to, float2 x,
                          const unsigned long long& barrier) {
  const Peer peer(block);
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(
          peer.at(to)),
      "r"(__float_as_uint(x.x)), "r"(__float_as_uint(x.y)), "r"(peer.at(&barrier))
      : "memory");
}
// What this warp has written, to the same place in the other blocks.
__device__ void send_to_others(int rank, const char* from, int bytes,
                               const unsigned long long& barrier) {
  publish();
  __syncwarp();
  const int lane = threadIdx.x % 32;
  if (lane < SHARERS - 1) Peer((rank + 1 + lane) % SHARERS).copy(from, from, bytes, barrier);
  __syncwarp();
}

// ---- makers: four threads share a record, each takes 16 of 64 bytes of codes -------------------
//
// The fence between their stores and products is made by those who start the products: makers would
// wait in it for bytes that are on their way.

struct Share {
  int thread;
  __device__ int row() const { return thread / 4; }
  __device__ int quarter() const { return thread % 4; }
  __device__ unsigned far_scales(unsigned word) const {
    return word >> 16 * (quarter() % 2) & 0xffff;
  }

  // Four pieces of a far record, or two of a near one, in the row's line of the block at `to`.
  __device__ int first_far() const { return (4 * (quarter() % 2) ^ (row() & 7)) << 4; }
  __device__ int first_near() const { return (2 * quarter() ^ (row() & 7)) << 4; }
  __device__ int far_line() const { return quarter() / 2 * BLOCK + row() * 128; }
  __device__ void place_far(char* to, uint4 codes, unsigned scales) const {
    const uint2 scale = e4m3_scales(scales);
    const bool late = quarter() > 1;  // starts with its third piece: neighbours have other banks
    const int first = first_far() ^ (late ? 32 : 0);
    const unsigned a = late ? scale.y : scale.x, b = late ? scale.x : scale.y;
    *reinterpret_cast<uint4*>(to + first) = place_e2m1(late ? codes.z : codes.x, a);
    *reinterpret_cast<uint4*>(to + (first ^ 16)) = place_e2m1(late ? codes.w : codes.y, a);
    *reinterpret_cast<uint4*>(to + (first ^ 32)) = place_e2m1(late ? codes.x : codes.z, b);
    *reinterpret_cast<uint4*>(to + (first ^ 48)) = place_e2m1(late ? codes.y : codes.w, b);
  }
  __device__ void place_near(char* to, uint4 codes, unsigned code) const {
    const unsigned scale = e8m0_scale(code & 255);
    const int first = first_near();
    *reinterpret_cast<uint4*>(to + first) = place_e4m3(codes.x, codes.y, scale);
    *reinterpret_cast<uint4*>(to + (first ^ 16)) = place_e4m3(codes.z, codes.w, scale);
  }
};

// Keys of a chunk: all codes of a far record, or half of those of a near one.
struct Keys : Share {
  bool recent;
  uint4 codes[4];
  unsigned scales[4];

  __device__ void read_codes(const unsigned char* bytes) {
    const uint4* first = reinterpret_cast<const uint4*>(bytes) + quarter();
#pragma unroll
    for (int i = 0; i < 4; ++i) codes[i] = __ldg(first + 4 * i);
  }
  __device__ void read(const QuadDesk& desk, int chunk, const Lists& lists) {
    const int place = chunk * CHUNK + row();
    const long long record = desk.rows[place];
    recent = record >= 0 && place < lists.near_width;
    const unsigned char* bytes = reinterpret_cast<const unsigned char*>(nothing);
    if (record >= 0)
      bytes = recent ? lists.near + record * NEAR_BYTES : lists.far + record * FAR_BYTES;
    read_codes(bytes);
    const unsigned* from = reinterpret_cast<const unsigned*>(bytes + (recent ? 512 : 256));
#pragma unroll
    for (int i = 0; i < 4; ++i)
      scales[i] = __ldg(from + (recent ? i : 2 * i + quarter() / 2));
  }

  __device__ void place(char* keys, long long record, const Lists& lists) {
    if (recent) {
      char* to = keys + row() * 128;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i == 4) read_codes(lists.near + record * NEAR_BYTES + 256);
        const int shift = 16 * (i % 2) + quarter() / 2 * 8;
        place_near(to + i * BLOCK, codes[i % 4], scales[i / 2] >> shift);
      }
    } else {
      char* to = keys + far_line();
#pragma unroll
      for (int i = 0; i < 4; ++i) place_far(to + 2 * i * BLOCK, codes[i], far_scales(scales[i]));
    }
    __syncwarp();  // a warp may hold records of both kinds
  }
};

// Two tiles: their bytes, read while others are placed.
struct Tiles : Share {
  bool recent[2];
  uint4 codes[2], more[2];
  unsigned scales[2];

  __device__ void read(const QuadDesk& desk, int first, int tiles, int rank, const Lists& lists) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int chunk = (first + n) / PARTS, column = rank * PARTS + (first + n) % PARTS;
      const int place = chunk * CHUNK + row();
      const long long record = first + n < tiles ? desk.rows[place] : -1;
      recent[n] = record >= 0 && place < lists.near_width;
      const unsigned char* bytes = reinterpret_cast<const unsigned char*>(nothing);
      if (record >= 0)
        bytes = recent[n] ? lists.near + record * NEAR_BYTES : lists.far + record * FAR_BYTES;
      const uint4* from =
          reinterpret_cast<const uint4*>(bytes + (recent[n] ? 128 : 64) * column) + quarter();
      codes[n] = __ldg(from);
      if (recent[n]) more[n] = __ldg(from + 4);
      bytes += recent[n] ? 512 + 4 * column : 256 + 8 * column + quarter() / 2 * 4;
      scales[n] = __ldg(reinterpret_cast<const unsigned*>(bytes));
    }
  }
  __device__ void place(QuadDesk& desk, int first, int tiles) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int slot = (first + n) % SLOTS;
      if (first + n >= tiles) break;
      if (first + n >= SLOTS) meet(TILE_EMPTY + slot, TILE_USERS);
      if (recent[n]) {
        char* to = desk.tiles[slot] + row() * 128;
        const unsigned scale = scales[n] >> quarter() / 2 * 8;
        place_near(to, codes[n], scale), place_near(to + BLOCK, more[n], scale >> 16);
      } else {
        place_far(desk.tiles[slot] + far_line(), codes[n], far_scales(scales[n]));
      }
      __syncwarp();
      arrive(TILE_FULL + slot, TILE_USERS);
    }
  }
};

// Keys of all chunks of the block, since weights wait for scores, and then tiles.
__device__ void make_all(QuadDesk& desk, const Lists& lists, int chunks, int rank) {
  Keys keys;
  Tiles two;
  keys.thread = two.thread = threadIdx.x - QUAD_SCORERS;
  const int tiles = chunks * PARTS;
  if (rank < chunks) keys.read(desk, rank, lists);
  two.read(desk, 0, tiles, rank, lists);
#pragma unroll 1
  for (int chunk = rank, group = 0; chunk < chunks; chunk += SHARERS, group ^= 1) {
    keep_here(keys.thread);  // else all places are found at once, and kept
    if (chunk >= 2 * SHARERS) meet(KEYS_EMPTY + group, QUAD_MAKERS + GROUP);
    keys.place(desk.keys_of(group), desk.rows[chunk * CHUNK + keys.row()], lists);
    arrive(KEYS_FULL + group, QUAD_MAKERS + GROUP);
    if (chunk + SHARERS < chunks) keys.read(desk, chunk + SHARERS, lists);
  }
  if (rank + SHARERS < chunks) meet(KEYS_EMPTY + 1, QUAD_MAKERS + GROUP);
#pragma unroll 1
  for (int first = 0; first < tiles; first += 2) {
    keep_here(two.thread);
    two.place(desk, first, tiles);
    if (first + 2 < tiles) two.read(desk, first + 2, tiles, rank, lists);
  }
}

// ---- both groups that score --------------------------------------------------------------------

// The block's heads of q. A warp takes half of them, in two of the blocks of 64 channels.
struct QueryShare {
  static constexpr int EACH = OWN_HEADS / 8;  // pieces of a step
  float4 low[2 * EACH], high[2 * EACH];

  __device__ static int warp() { return threadIdx.x / 32; }
  __device__ static int lane() { return threadIdx.x % 32; }
  __device__ static int block(int step) { return 4 * step + warp() / 2; }
  __device__ static int head(int n) { return warp() % 2 * (OWN_HEADS / 2) + n * 4 + lane() / 8; }
  __device__ static int first_pair(int step, int pairs) {  // of its block
    return block(step) * 32 - (C / 2 - pairs);
  }

  __device__ void read(const float* q) {  // from the first of these heads on
#pragma unroll
    for (int i = 0; i < 2 * EACH; ++i) {
      const float* from = q + head(i % EACH) * C + block(i / EACH) * 64 + lane() % 8 * 8;
      low[i] = read_once(from), high[i] = read_once(from + 4);
    }
  }

  // Each warp finds the angles that it needs, so that no other waits for them.
  __device__ static void find_angles(QuadDesk& desk, const long long* position,
                                     const float* freqs, int pairs) {
#pragma unroll 1
    for (int step = 0; step < 2; ++step) {
      const int pair = first_pair(step, pairs) + lane();
      if (pair < 0) continue;
      const float2 angle = angle_of(*position, freqs[pair], false);
      desk.turns[warp()][step * 32 + lane()] = angle;
      if (warp() % 2 == 0) desk.angle[pair] = angle;
    }
    __syncwarp();
  }

  __device__ void store(QuadDesk& desk, int rank, int pairs) const {
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      char* of_block = desk.queries + block(step) * BLOCK;
      const int first = first_pair(step, pairs);
      const float2* angle = desk.turns[warp()] + step * 32 - first;
#pragma unroll
      for (int n = 0; n < EACH; ++n) {
        const int row = rank * OWN_HEADS + head(n), i = EACH * step + n;
        *reinterpret_cast<uint4*>(of_block + row * 128 + ((lane() % 8 ^ (row & 7)) << 4)) =
            turned_piece(low[i], high[i], first + lane() % 8 * 4, angle);
      }
      arrive_at(desk.arrivals.queries[block(step)]);
      send_to_others(rank, of_block + (2 * rank + warp() % 2) * OWN_HEADS / 2 * 128,
                     OWN_HEADS / 2 * 128, desk.arrivals.queries[block(step)]);
    }
  }
};

struct Scorer {
  unsigned q[C / 16][4];  // a step of the tensor core each
  float s[32];

  // Channels 64 b to 64 b + 63 of q, when they are there.
  __device__ void take_queries(const QuadDesk& desk, int b) {
    await(desk.arrivals.queries[b]);
    const int lane = threadIdx.x % 32, row = threadIdx.x % GROUP / 32 * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < 4; ++k)
      load_matrices(q[4 * b + k], desk.queries + b * BLOCK + row * 128 +
                                      ((2 * k + lane / 16 ^ (row & 7)) << 4));
  }

  // s = q k of the chunk in this group's place for keys; `more`: that is wanted again. TAKES: q is
  // still on its way.
  template <bool TAKES>
  __device__ void score(QuadDesk& desk, bool more) {
    const int group = threadIdx.x / GROUP;
    const unsigned long long b = matrix(desk.keys_of(group));
#pragma unroll
    for (int k = 0; k < C / 16; ++k) {
      if (TAKES && k % 4 == 0) take_queries(desk, k / 4);
      if (k == 0) meet(KEYS_FULL + group, QUAD_MAKERS + GROUP), publish();
      if (k == 0 || TAKES && k % 4 == 0) begin_products();
      product_64_of(s, q[k], b + (k / 4 * BLOCK + k % 4 * 32) / 16, k > 0);
    }
    finish_products();
    if (more) arrive(KEYS_EMPTY + group, QUAD_MAKERS + GROUP);
  }

  // Maxima of the chunk to all blocks; where there is none, that this block is as far.
  __device__ void send_tops(const QuadDesk& desk, int chunk, int chunks) {
    float2 top = make_float2(NEVER, NEVER);
    if (chunk < chunks) {
      top.x = mask_and_max(s, 0, desk.valid[chunk]);
      top.y = mask_and_max(s, 1, desk.valid[chunk]);
    }
    if (threadIdx.x % 4 < SHARERS)
      send_pair(threadIdx.x % 4, &desk.tops[chunk][threadIdx.x % GROUP / 4], top,
                desk.arrivals.tops[chunk / SHARERS]);
  }

  __device__ void weigh(QuadDesk& desk, int chunk, int rank) {
    const int thread = threadIdx.x % GROUP;
    float2 top = make_float2(NEVER, NEVER);
    for (int c = 0; c <= chunk; ++c) {
      if (c % SHARERS == 0) await(desk.arrivals.tops[c / SHARERS]);
      const float2 x = desk.tops[c][thread / 4];
      top.x = fmaxf(top.x, x.x), top.y = fmaxf(top.y, x.y);
    }
    float2 sum;
    sum.x = exponentials(s, 0, top.x), sum.y = exponentials(s, 1, top.y);
    char* weights = desk.weights(chunk);
    store_weights(weights, s, thread / 32 * 16 + thread % 32 / 4);
    send_to_others(rank, weights + thread / 32 * 16 * 128, 16 * 128, desk.arrivals.weights[chunk]);
    desk.sums[chunk][thread] = sum;
    arrive_at(desk.arrivals.weights[chunk]);
#pragma unroll
    for (int n = 1; n < SHARERS; ++n)
      send_pair((rank + n) % SHARERS, &desk.sums[chunk][thread], sum, desk.arrivals.weights[chunk]);
  }
};

// Scores and weights of the block's chunks, by both groups in turn.
__device__ void score_chunks(QuadDesk& desk, int chunks, int rank) {
  const int rounds = (chunks + SHARERS - 1) / SHARERS, group = threadIdx.x / GROUP;
  Scorer scorer;
  if (group == 0 && rank < chunks) {
    scorer.score<true>(desk, rank + 2 * SHARERS < chunks);
  } else {
#pragma unroll
    for (int b = 0; b < C / 64; ++b) scorer.take_queries(desk, b);
  }
  meet(BOTH, QUAD_SCORERS);  // weights may take the place of q
#pragma unroll 1
  for (int round = group; round < rounds; round += 2) {
    const int chunk = rank + round * SHARERS;
    if (round > 0) {
      meet(scored_by(group ^ 1), QUAD_SCORERS);
      if (chunk < chunks) scorer.score<false>(desk, group || chunk + 2 * SHARERS < chunks);
    }
    if (round + 1 < rounds) arrive(scored_by(group), QUAD_SCORERS);
    scorer.send_tops(desk, chunk, chunks);
    if (chunk < chunks) scorer.weigh(desk, chunk, rank);
  }
}

// Values of the group's channels of all chunks, in v4's order. What the next chunk needs beside its
// weights is found while products run.
struct Adder {
  State state;
  float decay[2];

  __device__ static int group() { return threadIdx.x / GROUP; }
  __device__ static int tile(int c) { return PARTS == 1 ? c : PARTS * c + group(); }

  __device__ void look_ahead(QuadDesk& desk, int c) {
    if (c % SHARERS == 0) await(desk.arrivals.tops[c / SHARERS]);
    const float2 top = desk.tops[c][threadIdx.x % GROUP / 4];
    const float now[2] = {fmaxf(state.top[0], top.x), fmaxf(state.top[1], top.y)};
#pragma unroll
    for (int n = 0; n < 2; ++n) decay[n] = exp2f(state.top[n] - now[n]), state.top[n] = now[n];
    meet(TILE_FULL + tile(c) % SLOTS, TILE_USERS);
    publish();
  }

  __device__ void add_chunks(float* o, QuadDesk& desk, int chunks) {
    look_ahead(desk, 0);
#pragma unroll 1
    for (int c = 0; c < chunks; ++c) {
      await(desk.arrivals.weights[c]);
      const float2 sum = desk.sums[c][threadIdx.x % GROUP];
      state.total[0] = __fmaf_rn(state.total[0], decay[0], sum.x);
      state.total[1] = __fmaf_rn(state.total[1], decay[1], sum.y);
      shrink_values<SUMMED / 2>(o, decay[0], decay[1]);
      const unsigned long long a = matrix(desk.weights(c));
      const unsigned long long b =
          matrix(desk.tiles[tile(c) % SLOTS] + (PARTS == 1 ? group() * BLOCK : 0));
      begin_products();
#pragma unroll
      for (int k = 0; k < CHUNK / 16; ++k) {
        const int at = 32 / 16 * k, down = 2048 / 16 * k;
        if (SUMMED == 64) product_64_down(o, a + at, b + down, 1);
        if (SUMMED == 128) product_128(o, a + at, b + down, 1);
      }
      close_products();
      if (c + 1 < chunks) look_ahead(desk, c + 1);
      await_products();
      if (tile(c) + SLOTS < chunks * PARTS) arrive(TILE_EMPTY + tile(c) % SLOTS, TILE_USERS);
    }
  }
};

extern "C" __global__ void __cluster_dims__(SHARERS, 1, 1) __launch_bounds__(QUAD_THREADS, 1)
    quad(const float* q, const long long* positions, const float* freqs, int pairs,
         const unsigned char* near, long long near_count, const long long* near_rows,
         int near_width, const unsigned char* far, long long far_count, const long long* far_rows,
         int far_width, const float* sink, unsigned long long* bad, float* out) {
  const Lists lists = {near,      near_count, near_rows, near_width, far,
                       far_count, far_rows,   far_width, bad};
  QuadDesk& desk = *reinterpret_cast<QuadDesk*>(shared);
  const int chunks = max(1, (lists.width() + CHUNK - 1) / CHUNK), rank = blockIdx.x % SHARERS;
  const long long token = blockIdx.x / SHARERS;

  prepare({{KEYS_FULL, QUAD_MAKERS + GROUP}, {KEYS_FULL + 1, QUAD_MAKERS + GROUP},
           {KEYS_EMPTY, QUAD_MAKERS + GROUP}, {KEYS_EMPTY + 1, QUAD_MAKERS + GROUP},
           {TILE_FULL, TILE_USERS}, {TILE_FULL + 1, TILE_USERS}, {TILE_FULL + 2, TILE_USERS},
           {TILE_FULL + 3, TILE_USERS}, {TILE_EMPTY, TILE_USERS}, {TILE_EMPTY + 1, TILE_USERS},
           {TILE_EMPTY + 2, TILE_USERS}, {TILE_EMPTY + 3, TILE_USERS}, {ROWS_KNOWN, QUAD_MAKERS},
           {BOTH, QUAD_SCORERS}, {scored_by(0), QUAD_SCORERS}, {scored_by(1), QUAD_SCORERS}});
  if (threadIdx.x >= QUAD_SCORERS) {
    arrive_cluster();
    fewer_registers<QUAD_LOW>();
    bool past_the_end = read_rows<3>(desk.rows, desk.valid, lists, token, chunks,
                                     threadIdx.x - QUAD_SCORERS, QUAD_MAKERS);
    past_the_end = meet_or(ROWS_KNOWN, QUAD_MAKERS, past_the_end);
    if (threadIdx.x == QUAD_SCORERS) desk.past_the_end = past_the_end;
    wait_cluster();
    make_all(desk, lists, chunks, rank);
    return;
  }

  if (threadIdx.x % 32 == 0)
#pragma unroll
    for (int i = threadIdx.x / 32; i < (int)sizeof(Arrivals) / 8; i += QUAD_SCORERS / 32) {
      const int chunk = i - (C / 64 + ROUNDS);
      if (chunk >= 0) {
        const bool own = chunk % SHARERS == rank;
        expect_all(desk.arrivals.weights[chunk], own ? GROUP : 0, own ? 0 : BLOCK + GROUP * 8);
      } else if (chunk >= -ROUNDS) {
        expect_all(desk.arrivals.tops[chunk + ROUNDS], 0, SHARERS * ALL_HEADS * 4);
      } else {
        expect_all(desk.arrivals.queries[i], 64, (SHARERS - 1) * OWN_HEADS * 128);
      }
    }
  __syncwarp();
  arrive_cluster();
  more_registers<QUAD_HIGH>();
  QueryShare share;
  share.read(q + (token * ALL_HEADS + rank * OWN_HEADS) * C);
  QueryShare::find_angles(desk, positions + token, freqs, pairs);
  wait_cluster();
  share.store(desk, rank, pairs);
  score_chunks(desk, chunks, rank);

  const int low = threadIdx.x % GROUP / 32 * 16 + threadIdx.x % 32 / 4;
  float o[SUMMED / 2] = {};
  Adder adder = {{{NEVER, NEVER}, {0.f, 0.f}}};
  adder.add_chunks(o, desk, chunks);
  arrive_cluster();
  float norm = norm_of(adder.state.total[0], adder.state.top[0], sink[low]);
  float below = norm_of(adder.state.total[1], adder.state.top[1], sink[low + 8]);
  if (desk.past_the_end) norm = below = not_a_number();
  constexpr int STAGED = OWN_CHANNELS + 4;
  meet(BOTH, QUAD_SCORERS);  // nobody reads tiles or maxima any more
  // trap: copies for other blocks may still read the weights of this one where q and keys were
  float* staged = reinterpret_cast<float*>(desk.tiles);
  static_assert(ALL_HEADS * STAGED * 4 <= sizeof(desk.tiles) + sizeof(desk.tops), "o on its way");
  stage_values<SUMMED / 2>(staged + threadIdx.x / GROUP * SUMMED, STAGED, o, low, norm, below);
  meet(BOTH, QUAD_SCORERS);
  write_rows(out + token * ALL_HEADS * C, staged, STAGED, rank * OWN_CHANNELS, OWN_CHANNELS,
             ALL_HEADS, desk.angle, pairs, QUAD_SCORERS);
  wait_cluster();  // others have what is copied from here: trap, a block that ends takes it along
}
