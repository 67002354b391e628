// v7 `resident`, see kernel.cu. Blocks of four warpgroups that stay and take token after token:
//
//   scorer      scores b | weighs b           | scores c | weighs c
//   two adders  (wait)   | values of a, a half each      | values of b
//   maker       decodes c when a's values are added      | decodes d
//
// In v6 the groups that score also add values, so a chunk's scores wait for the values of the one
// before, and state goes from group to group with the weights. Here one group scores and weighs all
// chunks and keeps the state; the tensor cores add values while it weighs, and not while it scores:
// both would be done later. A chunk is scored when its first half is decoded, and half a buffer is
// filled again when the values in it have been added. The maker asks for bytes when it has decoded
// all that it has, since a warp that waits for one of its loads waits for later ones too; records
// of the chunk after the next and q of the next token are asked into L2 before.
// o is written by those that add while the scorer takes q of the next token and the maker is ahead
// with its first chunks. Of q some pieces follow each other through registers. Sums come in v4's
// order, so o has v4's bits.
//
// Left out in turn, reading q again and writing o were each worth about a tenth of the time of 512
// tokens: all SMs come to the end of a token at once, and wait for memory together.
// In between the maker is busy all the time, for twice the 2,048 clocks that a chunk's products
// take, and nearly half of that only to ask for bytes.

#include "ptx.cuh"

constexpr int HALF = C / 2;  // channels of a group that adds
constexpr int READING = 3 * GROUP, RESIDENT_THREADS = 4 * GROUP;
// Registers change hands; trap: more than the block started with, and it would wait for ever.
constexpr int SCORING_REGISTERS = 96, ADDING_REGISTERS = 160, MAKING_REGISTERS = 96;
static_assert(SCORING_REGISTERS + 2 * ADDING_REGISTERS + MAKING_REGISTERS <=
                  4 * (65536 / RESIDENT_THREADS / 8 * 8),
              "registers");

// Barriers, beside FULL and EMPTY of the first half of either buffer: the other half is full or
// empty; weights of a chunk are there (two); a chunk has its scores; others' part of the first q is
// there; the makers among themselves; angles and bits of places are known; those that score among
// themselves; norms are there.
constexpr int FULL_TOO = 5, EMPTY_TOO = 7, WEIGHTS = 9, SCORED = 11, TAKEN_OVER = 12,
              ROWS_READ = 13, KNOWN = 14, ASKED_FOR = 15, FACTORS_KNOWN = 0;

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

  // Into L2, where the chunk after the next is read from.
  __device__ void announce(const long long* rows, int chunk, int chunks,
                           const Lists& lists) const {
    const int place = chunk * CHUNK + row();
    const long long record = chunk < chunks && !odd() ? rows[place] : -1;
    if (record < 0) return;
    if (place < lists.near_width)
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(lists.near +
                                                                      record * NEAR_BYTES),
                   "n"(NEAR_BYTES));
    else
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(lists.far +
                                                                      record * FAR_BYTES),
                   "n"(FAR_BYTES));
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

// All chunks of a token, in turn into either buffer. Meanwhile q of the next token is asked into
// L2.
__device__ void fill_buffers(char* keys, const long long* rows, int chunks, const Lists& lists,
                             bool first, const float* next_q) {
  Half half;
  half.thread = threadIdx.x % GROUP;
  half.read(rows, 0, chunks, lists);
  half.announce(rows, 1, chunks, lists);
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int buffer = chunk % 2;
    const bool used = chunk >= 2 || !first;
    char* here = keys + buffer * KEYS_BYTES;
    keep_here(half.thread);  // nothing of it is kept from chunk to chunk
    if (next_q && chunk < 8) prefetch(next_q + (chunk * GROUP + half.thread) * 32);
    if (used) meet(EMPTY + buffer, 2 * GROUP);
    half.place_first(here, rows, chunk, lists);
    arrive(FULL + buffer, 2 * GROUP);
    if (used) meet(EMPTY_TOO + buffer, 2 * GROUP);
    half.place_others(here);
    arrive(FULL_TOO + buffer, 2 * GROUP);
    half.read(rows, chunk + 1, chunks, lists);
    half.announce(rows, chunk + 2, chunks, lists);
  }
}

// q of a token, turned and rounded, into eight blocks: a thread of the group takes one column (of 8
// channels) of every 16th head. AHEAD pieces are on their way at a time.
template <int AHEAD>
struct Query {
  const float* q;  // this thread's first piece
  float4 low[AHEAD], high[AHEAD];

  __device__ static int head(int i) { return i % 4 * 16 + threadIdx.x % GROUP / 8; }
  __device__ static int column(int i) { return i / 4 * 8 + threadIdx.x % 8; }

  __device__ void read(int i) {
    const float* from = q + i % 4 * 16 * C + i / 4 * 64;
    low[i % AHEAD] = read_once(from), high[i % AHEAD] = read_once(from + 4);
  }

  // Pieces BEGIN to END of 32, the first of which are asked for already; four make a block, of
  // which the last one turns. No more than STOP are asked for.
  template <int BEGIN, int END, int STOP = END>
  __device__ void store(char* queries, const float2* angle, int pairs) {
    char* to = queries + head(0) * 128 + (threadIdx.x % 8 ^ (head(0) & 7)) * 16;
    const int pair = column(28) * 4 - (C / 2 - pairs);
#pragma unroll
    for (int i = BEGIN; i < END; ++i) {
      *reinterpret_cast<uint4*>(to + i / 4 * BLOCK + i % 4 * 16 * 128) =
          turned_piece(low[i % AHEAD], high[i % AHEAD], i < 28 ? -4 : pair, angle);
      if (i + AHEAD < STOP) read(i + AHEAD);
    }
  }
  // The first of them, of the token whose q is at `all`.
  template <int BEGIN>
  __device__ void ask(const float* all) {
    q = all + head(0) * C + column(0) * 8;
    asm volatile("" : "+l"(q));  // or addresses of all pieces would be kept from token to token
#pragma unroll
    for (int i = BEGIN; i < BEGIN + AHEAD; ++i) read(i);
  }
};

// More than the last block turns: again, with the angles.
__device__ void turn_others(char* queries, const float* q, const float2* angle, int pairs) {
  const int first = (C / 2 - pairs) / 32 * 8, columns = C / 8 - 8 - first;
  if (columns <= 0) return;
  meet(ASKED_FOR, GROUP);
#pragma unroll 1
  for (int i = threadIdx.x; i < columns * ALL_HEADS; i += GROUP) {
    const int head = i % ALL_HEADS, column = first + i / ALL_HEADS;
    *block_piece(queries, head, column) = query_piece(
        reinterpret_cast<const float4*>(q), head * (C / 8) + column, angle, pairs);
  }
}

// Scores of the chunk in a buffer, of which the first half is there and the second may still be on
// its way. The fence between a maker's stores and products is made here, for whoever reads the
// chunk after this group.
__device__ void score_buffer(float* s, const char* queries, const char* keys, int buffer) {
  unsigned long long a = matrix(queries), b = matrix(keys + buffer * KEYS_BYTES);
  asm volatile("" : "+l"(a));  // else sums of it and the steps would be kept from chunk to chunk
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

// State::weigh of v6, its two heads beside each other.
__device__ void weigh(State& state, float* s, float* decay, uint2 valid) {
  if ((valid.x & valid.y) != ~0u) {
    const unsigned first = valid.x >> threadIdx.x % 4 * 2, second = valid.y >> threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const unsigned bit = (j < 16 ? first : second) & 1u << (j / 4 % 4 * 8 + j % 2);
      if (!bit) s[j] = minus_infinity();
    }
  }
  float top[4] = {s[0], s[1], s[2], s[3]};
#pragma unroll
  for (int j = 4; j < 32; ++j) top[j % 4] = fmaxf(top[j % 4], s[j]);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    float most = fmaxf(top[2 * n], top[2 * n + 1]);
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    const float before = state.top[n];
    state.top[n] = fmaxf(before, fmaxf(NEVER, most * SCORE_SCALE));
    decay[n] = exp2f(before - state.top[n]);
  }
#pragma unroll
  for (int n = 0; n < 2; ++n)
    state.total[n] = __fmaf_rn(state.total[n], decay[n], exponentials(s, n, state.top[n]));
}

// The weights of a chunk and what values before it shrink by.
struct Place {
  char* at;
  __device__ float* shrink() const { return reinterpret_cast<float*>(at + BLOCK); }
  __device__ void store(const float* s, const float* decay, int low) const {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane % 16;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float* p = s + 8 * n;
      store_matrices(at + row * 128 + (((2 * n + lane / 16) ^ (row & 7)) << 4),
                     bf16_pair(p[0], p[1]), bf16_pair(p[2], p[3]), bf16_pair(p[4], p[5]),
                     bf16_pair(p[6], p[7]));
    }
    if (lane % 4 == 0) shrink()[low] = decay[0], shrink()[low + 8] = decay[1];
    publish();
  }
};
constexpr int PLACE_BYTES = 9 * 1024;  // 8 KB and 256 bytes, aligned for wgmma

// The half of a buffer that only this group has read since the scores may be filled again.
__device__ void release(int buffer) {
  arrive((threadIdx.x < 2 * GROUP ? EMPTY : EMPTY_TOO) + buffer, 2 * GROUP);
}

// The values of this group's channels, of all chunks of a token.
__device__ void add_chunks(float* o, const char* values, const char* weights, int chunks, int low,
                           bool last) {
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int buffer = chunk % 2;
    const bool more = chunk + 1 < chunks;
    const Place place = {const_cast<char*>(weights) + buffer * PLACE_BYTES};
    meet(WEIGHTS + buffer, READING);
    shrink_values<128>(o, place.shrink()[low], place.shrink()[low + 8]);
    if (more) meet(SCORED, READING);  // at the same time, both would be done later
    const unsigned long long a = matrix(place.at), b = matrix(values + buffer * KEYS_BYTES);
    begin_products();
#pragma unroll
    for (int k = 0; k < CHUNK / 16; ++k) {
      const int at = 32 / 16 * k, down = 2048 / 16 * k;
      product_128(o, a + at, b + down, 1);
      product_128(o + 64, a + at, b + 2 * (BLOCK >> 4) + down, 1);
    }
    finish_products();
    if (more && (chunk + 2 < chunks || !last)) release(buffer);
  }
}

// o times the factors of its two heads, rounded, into blocks of 64 rows and channels at `staged`,
// this warp's 16 rows of them.
__device__ void stage_blocks(char* staged, const float* o, float factor, float below) {
  const int lane = threadIdx.x % 32, row = threadIdx.x % GROUP / 32 * 16 + lane % 16;
#pragma unroll
  for (int n = 0; n < HALF / 16; ++n) {
    const float* from = o + 8 * n;
    char* to = staged + n / 4 * BLOCK + row * 128 + (((n % 4 * 2 + lane / 16) ^ (row & 7)) << 4);
    store_matrices(to, bf16_pair(from[0] * factor, from[1] * factor),
                   bf16_pair(from[2] * below, from[3] * below),
                   bf16_pair(from[4] * factor, from[5] * factor),
                   bf16_pair(from[6] * below, from[7] * below));
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
  char* weights = keys + 2 * KEYS_BYTES;            // 2 places
  // Twice each, for even and odd turns, since makers are ahead: angles (pairs,), a bit for each
  // place that has a record (chunks,), and whether a row was past the end. Once, for makers: rows.
  float2* angles = reinterpret_cast<float2*>(weights + 2 * PLACE_BYTES);
  uint2* places = reinterpret_cast<uint2*>(angles + 2 * pairs);
  int* flags = reinterpret_cast<int*>(places + 2 * chunks);
  float* factors = reinterpret_cast<float*>(flags + 2);          // (ALL_HEADS,) that o takes
  long long* rows = reinterpret_cast<long long*>(factors + 64);  // (chunks, CHUNK)
  constexpr int VECTORS = ALL_HEADS * C;                         // numbers of a token

  prepare({{FULL, 2 * GROUP}, {FULL + 1, 2 * GROUP}, {FULL_TOO, 2 * GROUP},
           {FULL_TOO + 1, 2 * GROUP}, {EMPTY, 2 * GROUP}, {EMPTY + 1, 2 * GROUP},
           {EMPTY_TOO, 2 * GROUP}, {EMPTY_TOO + 1, 2 * GROUP}, {WEIGHTS, READING},
           {WEIGHTS + 1, READING}, {SCORED, READING}, {TAKEN_OVER, READING}, {ROWS_READ, GROUP},
           {KNOWN, 2 * GROUP}, {ASKED_FOR, GROUP}, {FACTORS_KNOWN, READING}});
  if (group == 3) {
    fewer_registers<MAKING_REGISTERS>();
#pragma unroll 1
    for (int token = blockIdx.x; token < tokens; token += gridDim.x) {
      const int turn = token / gridDim.x % 2, thread = threadIdx.x % GROUP;
      if (thread == 0) flags[turn] = 0;
      meet(ROWS_READ, GROUP);
      if (thread < 96) {
        if (read_rows<7>(rows, places + turn * chunks, lists, token, chunks, thread, 96))
          flags[turn] = 1;
      } else {
#pragma unroll 1
        for (int i = thread % 32; i < pairs; i += 32)
          angles[turn * pairs + i] = angle_of(positions[token], freqs[i], false);
      }
      meet(ROWS_READ, GROUP);
      arrive(KNOWN, 2 * GROUP);
      const long long next = token + gridDim.x;
      fill_buffers(keys, rows, chunks, lists, token < gridDim.x,
                   next < tokens ? q + next * VECTORS : nullptr);
    }
    return;
  }

  const int low = threadIdx.x % GROUP / 32 * 16 + threadIdx.x % 32 / 4;
  if (group == 0) {
    fewer_registers<SCORING_REGISTERS>();
    int turn = 0;
#pragma unroll 1
    for (int token = blockIdx.x; token < tokens; token += gridDim.x, turn ^= 1) {
      const float2* angle = angles + turn * pairs;
      const uint2* valid = places + turn * chunks;
      const float* from = q + (long long)token * VECTORS;
      if (token >= gridDim.x) {
        meet(KNOWN, 2 * GROUP);
        Query<6> query;
        query.ask<0>(from);
        query.store<0, 32>(queries, angle, pairs);
      } else {  // other groups help with the first token
        Query<6> query;
        query.ask<24>(from);
        query.store<24, 28, 32>(queries, angle, pairs);
        meet(KNOWN, 2 * GROUP);
        query.store<28, 32>(queries, angle, pairs);
        meet(TAKEN_OVER, READING);
      }
      turn_others(queries, from, angle, pairs);
      publish();
      meet(ASKED_FOR, GROUP);

      State state = {{NEVER, NEVER}, {0.f, 0.f}};
#pragma unroll 1
      for (int chunk = 0; chunk < chunks; ++chunk) {
        const int buffer = chunk % 2;
        const Place place = {weights + buffer * PLACE_BYTES};
        float s[32], decay[2];
        meet(FULL + buffer, 2 * GROUP);
        score_buffer(s, queries, keys, buffer);
        if (chunk > 0) arrive(SCORED, READING);
        weigh(state, s, decay, valid[chunk]);
        place.store(s, decay, low);
        arrive(WEIGHTS + buffer, READING);
      }

      float norm = norm_of(state.total[0], state.top[0], sink[low]);
      float below = norm_of(state.total[1], state.top[1], sink[low + 8]);
      if (flags[turn]) norm = below = not_a_number();
      if (threadIdx.x % 4 == 0) factors[low] = LIFT / norm, factors[low + 8] = LIFT / below;
      arrive(FACTORS_KNOWN, READING);
    }
    return;
  }

  more_registers<ADDING_REGISTERS>();
  const char* values = keys + (group - 1) * (HALF / 64) * BLOCK;
  {
    Query<12> query;
    const float* from = q + (long long)blockIdx.x * VECTORS;
    if (group == 1) {
      query.ask<0>(from);
      query.store<0, 12>(queries, nullptr, 0);
    } else {
      query.ask<12>(from);
      query.store<12, 24>(queries, nullptr, 0);
    }
    publish();
    arrive(TAKEN_OVER, READING);
  }
  int turn = 0;
#pragma unroll 1
  for (int token = blockIdx.x; token < tokens; token += gridDim.x, turn ^= 1) {
    float o[HALF / 2];
#pragma unroll
    for (int i = 0; i < HALF / 2; ++i) asm volatile("mov.f32 %0, 0f00000000;" : "=f"(o[i]));
    const bool last = token + gridDim.x >= tokens;
    add_chunks(o, values, weights, chunks, low, last);
    // o waits where the values of the last chunk were
    const int buffer = (chunks + 1) % 2;
    char* staged = const_cast<char*>(values) + buffer * KEYS_BYTES;
    meet(FACTORS_KNOWN, READING);
    stage_blocks(staged, o, factors[low], factors[low + 8]);
    __syncwarp();
    write_blocks(out + (long long)token * VECTORS, staged, (group - 1) * HALF,
                 angles + turn * pairs, pairs);
    if (!last) release(buffer);
  }
}
