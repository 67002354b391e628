// v7 `resident`, see kernel.cu. Blocks of four warpgroups that stay and take token after token. Two
// groups score in turn and add one half of the values each, as in v6; each of the two others
// decodes every second chunk, into a buffer of its own:
//
//   even     scores a   | weighs a   | values of a         | (waits)  | values of b
//   odd      (waits)    | scores b   | values of a, weighs b          | values of b
//   maker a  (reads the bytes of the next a)               | decodes the next a
//   maker b  decodes b               | (reads the bytes of the next b)           | decodes ..
//
// v6's one maker was busy nine tenths of the time: a warp that decodes waits after most of its
// instructions, and it was alone on its scheduler. In a trial two makers shared every chunk and
// asked for bytes of the next as they decoded: half a chunk took 800 clocks, the other half 2,600,
// since a warp that waits for one of its loads waits for later ones too. So a maker now asks for
// bytes only when it has decoded all that it has, and the time of a pair of chunks passes until it
// needs them. A chunk is scored when its first half is decoded, and half a buffer is filled again
// when the values in it have been added.
// Makers go on to the next token while o of the last is written. Of q some columns follow each
// other through registers: loads that L1 cannot hold would keep the makers' lists from being asked
// for. Sums come in v4's order, so o has v4's bits.

constexpr int HALF = C / 2;  // channels of a group
constexpr int SCORING = 2 * GROUP, MAKING = 2 * GROUP, RESIDENT_THREADS = 4 * GROUP;
// Registers change hands; trap: more than the block started with, and it would wait for ever.
constexpr int HIGH_REGISTERS = 192, LOW_REGISTERS = 64;
static_assert(2 * HIGH_REGISTERS + 2 * LOW_REGISTERS <= 4 * (65536 / RESIDENT_THREADS / 8 * 8),
              "registers");

// Barriers beside v6's: FULL and EMPTY are of the first half of a buffer, and its other half is
// full or empty, two each; the makers among themselves; angles and bits of places are known.
constexpr int FULL_TOO = 13, ROWS_READ = 10, KNOWN = 11;
__device__ int empty_too(int buffer) { return buffer ? 15 : 0; }

// Where no record is listed, zeros are read: a load that happens or not would be waited for.
__device__ const uint4 nothing[NEAR_BYTES / 16] = {};

// What a maker's thread decodes: two share a record, of every 32 bytes of codes each takes 16.
struct Half {
  int thread;  // of its group
  bool recent;
  uint4 codes[8], scales[2];

  __device__ int odd() const { return thread % 2; }
  __device__ int row() const { return thread / 2; }
  __device__ static uint4 ask(const unsigned char* from) {
    return __ldg(reinterpret_cast<const uint4*>(from));
  }

  // The record in chunk `chunk`, none if there is no such chunk; of a recent one half of the codes.
  __device__ void read(const long long* rows, int chunk, int chunks, const Lists& lists) {
    const int place = chunk * CHUNK + row();
    const long long record = chunk < chunks ? rows[place] : -1;
    recent = record >= 0 && place < lists.near_width;
    const unsigned char* bytes = reinterpret_cast<const unsigned char*>(nothing);
    if (record >= 0)
      bytes = recent ? lists.near + record * NEAR_BYTES : lists.far + record * FAR_BYTES;
    scales[0] = ask(bytes + (recent ? 512 : 256)), scales[1] = ask(bytes + (recent ? 512 : 272));
#pragma unroll
    for (int i = 0; i < 8; ++i) codes[i] = ask(bytes + 32 * i + 16 * odd());
  }
  __device__ void read_others(const long long* rows, int chunk, const Lists& lists) {
    const unsigned char* bytes = lists.near + rows[chunk * CHUNK + row()] * NEAR_BYTES + 256;
#pragma unroll
    for (int i = 0; i < 8; ++i) codes[i] = ask(bytes + 32 * i + 16 * odd());
  }

  __device__ void place_far(char* keys, int i) const {  // half of block i
    char* to = keys + i * BLOCK + row() * 128;
    const int piece = (4 * odd() ^ (row() & 7)) << 4;
    const uint2 scale = e4m3_scales(word(scales[i / 4], i % 4) >> 16 * odd() & 0xffff);
    *reinterpret_cast<uint4*>(to + piece) = place_e2m1(codes[i].x, scale.x);
    *reinterpret_cast<uint4*>(to + (piece ^ 16)) = place_e2m1(codes[i].y, scale.x);
    *reinterpret_cast<uint4*>(to + (piece ^ 32)) = place_e2m1(codes[i].z, scale.y);
    *reinterpret_cast<uint4*>(to + (piece ^ 48)) = place_e2m1(codes[i].w, scale.y);
  }
  __device__ void place_near(char* keys, int i) const {  // a quarter of block i / 2
    char* to = keys + i / 2 * BLOCK + row() * 128;
    const int piece = ((i % 2 * 4 + 2 * odd()) ^ (row() & 7)) << 4;
    const unsigned code = word(scales[0], i / 4) >> i % 4 * 8 & 0xff;
    const unsigned scale = __byte_perm(code > 142 ? 0x7fc0 : (code + 112) << 7, 0, 0x1010);
    const uint4 from = codes[i % 8];
    *reinterpret_cast<uint4*>(to + piece) = place_e4m3(from.x, from.y, scale);
    *reinterpret_cast<uint4*>(to + (piece ^ 16)) = place_e4m3(from.z, from.w, scale);
  }

  // The first four blocks, then the others. A warp may hold records of both kinds.
  __device__ void place_first(char* keys, const long long* rows, int chunk, const Lists& lists) {
    if (recent) {
#pragma unroll
      for (int i = 0; i < 8; ++i) place_near(keys, i);
      read_others(rows, chunk, lists);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) place_far(keys, i);
    }
    __syncwarp();
  }
  __device__ void place_others(char* keys) const {
    if (recent) {
#pragma unroll
      for (int i = 8; i < 16; ++i) place_near(keys, i);
    } else {
#pragma unroll
      for (int i = 4; i < 8; ++i) place_far(keys, i);
    }
    __syncwarp();
  }
};

// Every second chunk of a token, into one buffer.
__device__ void fill_buffer(char* keys, int buffer, const long long* rows, int chunks,
                            const Lists& lists, bool first) {
  char* here = keys + buffer * KEYS_BYTES;
  Half half;
  half.thread = threadIdx.x % GROUP;
  half.read(rows, buffer, chunks, lists);
#pragma unroll 1
  for (int chunk = buffer; chunk < chunks; chunk += 2) {
    const bool used = chunk >= 2 || !first;
    keep_here(half.thread);  // nothing of it is kept from chunk to chunk
    if (used) meet(EMPTY + buffer, 2 * GROUP);
    half.place_first(here, rows, chunk, lists);
    arrive(FULL + buffer, 2 * GROUP);
    if (used) meet(empty_too(buffer), 2 * GROUP);
    half.place_others(here);
    arrive(FULL_TOO + buffer, 2 * GROUP);
    half.read(rows, chunk + 2, chunks, lists);
  }
}

// q of a token, turned and rounded, into eight blocks, by both groups that score: a thread takes
// one column (of 8 channels) of every fourth head, first of the first block. AHEAD columns are on
// their way at a time: more than L1 holds would keep the makers' lists from being asked for.
struct Query {
  static constexpr int AHEAD = 10;
  const float* q;
  float4 low[AHEAD], high[AHEAD];

  __device__ static int head(int i) {
    return i % 2 * 32 + threadIdx.x / 32 * 4 + threadIdx.x % 32 / 8;
  }
  __device__ static int column(int i) { return i / 2 * 8 + threadIdx.x % 8; }

  __device__ void read(int i) {
    const float* from = q + head(0) * C + column(0) * 8 + i % 2 * 32 * C + i / 2 * 64;
    low[i % AHEAD] = read_once(from), high[i % AHEAD] = read_once(from + 4);
  }

  // Columns `begin` to `end`, of the 16 that a thread takes.
  template <int BEGIN, int END>
  __device__ void store(char* queries, const float2* angle, int pairs) {
    char* to = queries + head(0) * 128 + (threadIdx.x % 8 ^ (head(0) & 7)) * 16;
    const int pair = column(14) * 4 - (C / 2 - pairs);
#pragma unroll
    for (int i = BEGIN; i < END; ++i) {
      *reinterpret_cast<uint4*>(to + i / 2 * BLOCK + i % 2 * 32 * 128) =
          turned_piece(low[i % AHEAD], high[i % AHEAD], i < 14 ? -4 : pair, angle);
      if (i + AHEAD < 16) read(i + AHEAD);
    }
  }

  // More than the last block turns: again, with the angles.
  __device__ void turn_others(char* queries, const float2* angle, int pairs) const {
#pragma unroll 1
    for (int i = (C / 2 - pairs) / 32 * 2; i < 14; ++i)
      *block_piece(queries, head(i), column(i)) = query_piece(
          reinterpret_cast<const float4*>(q), head(i) * (C / 8) + column(i), angle, pairs);
  }
};

// As start_values of v6; products of 256 columns would not compile for a block of so many threads.
__device__ void start_halves(float* o, const Weights& weights, const char* values, int low) {
  shrink_values<128>(o, weights.shrink()[low], weights.shrink()[low + 8]);
  const unsigned long long a = matrix(weights.at), b = matrix(values);
  begin_products();
#pragma unroll
  for (int k = 0; k < CHUNK / 16; ++k) {
    const int at = 32 / 16 * k, down = 2048 / 16 * k;
    product_128(o, a + at, b + down, 1);
    product_128(o + 64, a + at, b + 2 * (BLOCK >> 4) + down, 1);
  }
  close_products();
}

// A chunk whose values this group has added: the half of the buffer that only it has read since the
// scores may be filled again if there is more.
__device__ void release(int chunk, int chunks, bool last) {
  const int even = threadIdx.x < GROUP, buffer = chunk % 2;
  if (chunk + 2 < chunks || !last) arrive(even ? EMPTY + buffer : empty_too(buffer), 2 * GROUP);
}

// Scores of the chunk in a buffer, of which the first half is there and the second may still be on
// its way. The fence between a maker's stores and products is made here, for whoever reads the
// chunk after this group.
__device__ void score_buffer(float* s, const char* queries, const char* keys, int buffer) {
  const unsigned long long a = matrix(queries), b = matrix(keys + buffer * KEYS_BYTES);
  publish();
  begin_products();
#pragma unroll
  for (int k = 0; k < C / 16; ++k) {
    const int step = (k / 4 * BLOCK + k % 4 * 32) / 16;
    if (k == C / 32) meet(FULL_TOO + buffer, 2 * GROUP), publish();
    product_64(s, a + step, b + step, k > 0);
  }
  finish_products();
}

__device__ void turn_even(float* o, State& state, const char* queries, const char* keys,
                         const char* values, Weights to_a, Weights to_b, const uint2* valid,
                         int chunks, int low, bool last) {
#pragma unroll 1
  for (int a = 0; a < chunks; a += 2) {
    float s[32], decay[2];
    meet(FULL, 2 * GROUP);
    score_buffer(s, queries, keys, 0);
    if (a + 1 < chunks) arrive(SCORED_A, SCORING);
    state.weigh(s, decay, valid[a]);
    to_a.store(s, decay, low, state);
    arrive(WEIGHED_A, SCORING);
    start_halves(o, to_a, values, low);
    await_products();
    release(a, chunks, last);
    if (a + 1 == chunks) break;
    meet(WEIGHED_B, SCORING);
    state.take(to_b.state());
    start_halves(o, to_b, values + KEYS_BYTES, low);
    await_products();
    release(a + 1, chunks, last);
  }
}

__device__ void turn_odd(float* o, State& state, const char* queries, const char* keys,
                        const char* values, Weights to_a, Weights to_b, const uint2* valid,
                        int chunks, int low, bool last) {
#pragma unroll 1
  for (int b = 1; b < chunks; b += 2) {
    float s[32], decay[2];
    meet(FULL + 1, 2 * GROUP);
    meet(SCORED_A, SCORING);  // at the same time, neither would be done before both are
    score_buffer(s, queries, keys, 1);
    meet(WEIGHED_A, SCORING);
    state.take(to_a.state());
    start_halves(o, to_a, values, low);
    state.weigh(s, decay, valid[b]);
    to_b.store(s, decay, low, state);  // before the wait: else weighing sinks behind it
    arrive(WEIGHED_B, SCORING);
    await_products();
    release(b - 1, chunks, last);
    start_halves(o, to_b, values + KEYS_BYTES, low);
    await_products();
    release(b, chunks, last);
  }
  if (chunks % 2) {  // a last chunk without a partner
    meet(WEIGHED_A, SCORING);
    state.take(to_a.state());
    start_halves(o, to_a, values, low);
    await_products();
    release(chunks - 1, chunks, last);
  }
}

// o over the norms of its two heads, rounded, into blocks of 64 rows and channels at `staged`, this
// warp's 16 rows of them.
__device__ void stage_blocks(char* staged, const float* o, float norm, float below) {
  const float inverse = LIFT / norm, inverse_below = LIFT / below;
  const int lane = threadIdx.x % 32, row = threadIdx.x % GROUP / 32 * 16 + lane % 16;
#pragma unroll
  for (int n = 0; n < HALF / 16; ++n) {
    const float* from = o + 8 * n;
    char* to = staged + n / 4 * BLOCK + row * 128 + (((n % 4 * 2 + lane / 16) ^ (row & 7)) << 4);
    store_matrices(to, bf16_pair(from[0] * inverse, from[1] * inverse),
                   bf16_pair(from[2] * inverse_below, from[3] * inverse_below),
                   bf16_pair(from[4] * inverse, from[5] * inverse),
                   bf16_pair(from[6] * inverse_below, from[7] * inverse_below));
  }
}

// These rows, turned back, to out, in which the blocks begin at channel `first`. Two threads share
// a piece: one takes channels 0 to 3, one 4 to 7, so that a warp writes whole lines.
__device__ void write_blocks(float* out, const char* staged, int first, const float2* angle,
                             int pairs) {
  const int lane = threadIdx.x % 32, top = threadIdx.x % GROUP / 32 * 16 + lane / 16;
  const int select = lane % 2 ? 0x3244 : 0x1044, channel = lane % 16 * 4;
  out += top * C + first + channel;
#pragma unroll 1
  for (int block = 0; block < HALF / 64; ++block) {
    const int pair = (first + block * 64 + channel) / 2 - (C / 2 - pairs);
    const bool turned = first + block * 64 + 64 > C - 2 * pairs;
#pragma unroll 4
    for (int n = 0; n < 16; n += 2) {
      const int row = top + n;
      const uint4 x = *reinterpret_cast<const uint4*>(staged + block * BLOCK + row * 128 +
                                                      ((lane / 2 % 8 ^ (row & 7)) << 4));
      float4 y = make_float4(__uint_as_float(__byte_perm(x.x, 0, select)),
                             __uint_as_float(__byte_perm(x.y, 0, select)),
                             __uint_as_float(__byte_perm(x.z, 0, select)),
                             __uint_as_float(__byte_perm(x.w, 0, select)));
      if (turned) turn_back(y, pair, angle);
      *reinterpret_cast<float4*>(out + n * C + block * 64) = y;
    }
  }
}

extern "C" __global__ void __launch_bounds__(RESIDENT_THREADS, 1)
    resident(const float* q, const long long* positions, const float* freqs, int pairs,
             const unsigned char* near, long long near_count, const long long* near_rows,
             int near_width, const unsigned char* far, long long far_count,
             const long long* far_rows, int far_width, const float* sink, unsigned long long* bad,
             float* out, int tokens) {
  const Lists lists = {near,      near_count, near_rows, near_width, far,
                       far_count, far_rows,   far_width, bad};
  const int chunks = (lists.width() + CHUNK - 1) / CHUNK, group = threadIdx.x / GROUP;
  char* queries = reinterpret_cast<char*>(shared);  // 8 blocks: (64 heads, 512)
  char* keys = queries + KEYS_BYTES;                // 2 times 8: (CHUNK, 512)
  const Weights to_a = {keys + 2 * KEYS_BYTES}, to_b = {to_a.at + WEIGHTS_BYTES};
  // Twice each, for even and odd turns, since makers are ahead: angles (pairs,), a bit for each
  // place that has a record (chunks,), and whether a row was past the end. Once, for makers: rows.
  float2* angles = reinterpret_cast<float2*>(to_b.at + WEIGHTS_BYTES);
  uint2* places = reinterpret_cast<uint2*>(angles + 2 * pairs);
  int* flags = reinterpret_cast<int*>(places + 2 * chunks);
  float* sinks = reinterpret_cast<float*>(flags + 2);          // (ALL_HEADS,)
  long long* rows = reinterpret_cast<long long*>(sinks + 64);  // (chunks, CHUNK)

  prepare({{FULL, 2 * GROUP}, {FULL + 1, 2 * GROUP}, {FULL_TOO, 2 * GROUP},
           {FULL_TOO + 1, 2 * GROUP}, {EMPTY, 2 * GROUP}, {EMPTY + 1, 2 * GROUP},
           {empty_too(0), 2 * GROUP}, {empty_too(1), 2 * GROUP}, {WEIGHED_A, SCORING},
           {WEIGHED_B, SCORING}, {SCORED_A, SCORING}, {READERS, SCORING}, {WRITTEN, GROUP},
           {WRITTEN + 1, GROUP}, {ROWS_READ, MAKING}, {KNOWN, RESIDENT_THREADS}});
  if (group >= 2) {
    fewer_registers<LOW_REGISTERS>();
#pragma unroll 1
    for (int token = blockIdx.x; token < tokens; token += gridDim.x) {
      const int turn = token / gridDim.x % 2;
      int thread = threadIdx.x - SCORING;
      keep_here(thread);  // there are few registers: nothing of it is kept from token to token
      if (thread == 0) flags[turn] = 0;
      meet(ROWS_READ, MAKING);
      if (thread < MAKING - 32) {
        if (read_rows<3>(rows, places + turn * chunks, lists, token, chunks, thread, MAKING - 32))
          flags[turn] = 1;
      } else {
#pragma unroll 1
        for (int i = thread % 32; i < pairs; i += 32)
          angles[turn * pairs + i] = angle_of(positions[token], freqs[i], false);
      }
      meet(ROWS_READ, MAKING);
      arrive(KNOWN, RESIDENT_THREADS);
      fill_buffer(keys, group - 2, rows, chunks, lists, token < gridDim.x);
    }
    return;
  }

  more_registers<HIGH_REGISTERS>();
  const int low = threadIdx.x % GROUP / 32 * 16 + threadIdx.x % 32 / 4;
  const char* values = keys + group * (HALF / 64) * BLOCK;
  char* staged = queries + group * (HALF / 64) * BLOCK;
  if (threadIdx.x < ALL_HEADS) sinks[threadIdx.x] = sink[threadIdx.x];
  int turn = 0;
#pragma unroll 1
  for (int token = blockIdx.x; token < tokens; token += gridDim.x, turn ^= 1) {
    const float2* angle = angles + turn * pairs;
    const uint2* valid = places + turn * chunks;
    Query query;
    query.q = q + (long long)token * ALL_HEADS * C;
#pragma unroll
    for (int i = 0; i < Query::AHEAD; ++i) query.read(i);
    if (token >= gridDim.x) {
      write_blocks(out + (long long)(token - gridDim.x) * ALL_HEADS * C, staged, group * HALF,
                   angles + (turn ^ 1) * pairs, pairs);
      meet(KNOWN, RESIDENT_THREADS);  // and all that was staged has been written
    }
    query.store<0, 14>(queries, angle, pairs);
    if (token < gridDim.x) meet(KNOWN, RESIDENT_THREADS);
    query.store<14, 16>(queries, angle, pairs);
    query.turn_others(queries, angle, pairs);
    publish();
    meet(READERS, SCORING);

    const bool last = token + gridDim.x >= tokens;
    float o[HALF / 2];
#pragma unroll
    for (int i = 0; i < HALF / 2; ++i) asm volatile("mov.f32 %0, 0f00000000;" : "=f"(o[i]));
    State state = {{NEVER, NEVER}, {0.f, 0.f}};
    if (group == 0)
      turn_even(o, state, queries, keys, values, to_a, to_b, valid, chunks, low, last);
    else
      turn_odd(o, state, queries, keys, values, to_a, to_b, valid, chunks, low, last);

    float norm = norm_of(state.total[0], state.top[0], sinks[low]);
    float below = norm_of(state.total[1], state.top[1], sinks[low + 8]);
    if (flags[turn]) norm = below = not_a_number();
    stage_blocks(staged, o, norm, below);
    __syncwarp();
    if (last)
      write_blocks(out + (long long)token * ALL_HEADS * C, staged, group * HALF, angle, pairs);
  }
}
