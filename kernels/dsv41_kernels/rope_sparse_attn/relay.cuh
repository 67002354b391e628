// v6 `relay`, see kernel.cu. One block of three warpgroups per token. Two of them score in turn and
// add one half of the values each; `a` and `b` are a pair of chunks, one in either buffer:
//
//   even   scores a     | weighs a         | values of a | (waits)    | values of b
//   odd    (waits)      | scores b         | values of a, weighs b    | values of b
//   maker  decodes b    | (waits, reads the bytes of the next pair)   | decodes the next a
//
// In v4 one group scored and weighed all chunks, so nothing was multiplied while it took
// exponentials, and the maker first waited for the bytes of a chunk and then decoded it. Here products of one group run under the
// exponentials of the other, bytes are read while the maker waits for a free buffer, and every
// thread's place in a buffer is found once. (To ask L2 for all records of the token first took longer.)
// The maxima and sums so far are handed over with the weights; sums come in v4's order, so o has
// v4's bits.
//
// SPLIT (1, 2 or 4) blocks share a token where there are fewer tokens than multiprocessors: each
// scores all chunks and adds values of its part of the channels. That is 1,024 clocks a chunk for
// the scores and 1,024 / SPLIT for values; nothing is a sum over blocks, so bits stay. With SPLIT 4
// there are registers for a second maker, and decoding takes half as long.

#ifndef SPLIT
#define SPLIT 1
#endif
constexpr int WIDTH = C / 2 / SPLIT;  // channels of a group
constexpr int MAKERS = SPLIT == 4 ? 2 : 1, RELAY_THREADS = (2 + MAKERS) * GROUP;
// Registers change hands; trap: more than the block started with, and it would wait for ever.
constexpr int SCORER_REGISTERS = SPLIT == 4 ? 152 : SPLIT == 2 ? 192 : 208;
constexpr int MAKER_REGISTERS = SPLIT == 4 ? 104 : SPLIT == 2 ? 120 : 88;
static_assert(2 * SCORER_REGISTERS + MAKERS * MAKER_REGISTERS <=
                  (2 + MAKERS) * (65536 / RELAY_THREADS / 8 * 8),
              "registers");

// Barriers beside FULL and EMPTY: weights of a chunk are written, for the group itself (two) and
// for the other one, with the state after them; lists are read; q's angles are known; a has
// its scores.
constexpr int WRITTEN = 8, WEIGHED_A = WEIGHED, WEIGHED_B = TAKEN, ASKED = 10, TURNED = 11,
              SCORED_A = 12;

// The part of a record that a maker's thread decodes: of every 32 bytes 16, over all of the record
// or, with two makers, over half of it.
struct Part {
  const unsigned char* bytes;
  bool recent, real;
  uint4 codes[8], scales[2];

  __device__ static int maker() { return MAKERS == 1 ? 0 : threadIdx.x / GROUP - 2; }
  __device__ static int odd() { return threadIdx.x % 2; }
  __device__ static int row() { return threadIdx.x % GROUP / 2; }

  __device__ void read_codes(int i, int from, bool wanted) {
    codes[i] = read_16(bytes + from + 32 * i + 16 * odd(), wanted && real);
  }

  // What the first half of place_far needs of the record in chunk `chunk`; and the rest.
  __device__ void read_first(const long long* rows, int chunk, const Lists& lists) {
    const int place = chunk * CHUNK + row();
    const long long record = rows[place];
    recent = place < lists.near_width, real = record >= 0;
    bytes = recent ? lists.near : lists.far;
    if (real) bytes += record * (recent ? NEAR_BYTES : FAR_BYTES);
    scales[0] = read_16(bytes + (recent ? 512 : 256 + 16 * maker()), real);
    bytes += maker() * (recent ? 256 : 128);
#pragma unroll
    for (int i = 0; i < 4; ++i) read_codes(i, 0, true);
  }
  __device__ void read_rest() {
#pragma unroll
    for (int i = 4; i < 8; ++i) read_codes(i, 0, MAKERS == 1 || recent);
    if (MAKERS == 1) scales[1] = read_16(bytes + 272, real && !recent);
  }

  __device__ static uint4* slot(char* keys, int piece) {  // in the first block of this row
    return reinterpret_cast<uint4*>(keys + maker() * 4 * BLOCK + row() * 128 +
                                    ((piece ^ (row() & 7)) << 4));
  }

  template <int HALF>
  __device__ void place_far(char* keys) const {
    uint4* to[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) to[n] = slot(keys, 4 * odd() + n);
#pragma unroll
    for (int i = 4 * HALF; i < 4 * HALF + 4; ++i) {
      const uint2 scale = e4m3_scales(word(scales[HALF], i % 4) >> 16 * odd() & 0xffff);
      to[0][i * (BLOCK / 16)] = place_e2m1(codes[i].x, scale.x);
      to[1][i * (BLOCK / 16)] = place_e2m1(codes[i].y, scale.x);
      to[2][i * (BLOCK / 16)] = place_e2m1(codes[i].z, scale.y);
      to[3][i * (BLOCK / 16)] = place_e2m1(codes[i].w, scale.y);
    }
  }

  __device__ void place_near(char* keys) {  // one maker reads the second 256 bytes meanwhile
    const uint4 all = scales[0], mine = maker() ? make_uint4(all.z, all.w, 0, 0) : all;
    uint4* to[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) to[n] = slot(keys, n % 2 * 4 + 2 * odd() + n / 2);
#pragma unroll
    for (int i = 0; i < 16 / MAKERS; ++i) {
      const unsigned scale = e8m0_scale(word(mine, i / 4) >> i % 4 * 8 & 0xff);
      const uint4 from = codes[i % 8];
      if (MAKERS == 1 && i < 8) read_codes(i, 256, true);
      to[i % 2][i / 2 * (BLOCK / 16)] = place_e4m3(from.x, from.y, scale);
      to[i % 2 + 2][i / 2 * (BLOCK / 16)] = place_e4m3(from.z, from.w, scale);
    }
  }
};

// All chunks, in turn into either buffer. Bytes of the next chunk are asked for as soon as there
// are registers for them; before `publish`, which may wait for them, only early and in part.
template <typename Meanwhile>
__device__ void make_chunks(char* keys, const long long* rows, int chunks, const Lists& lists,
                            Meanwhile meanwhile) {
  Part part;
  if (chunks > 0) part.read_first(rows, 0, lists), part.read_rest();
  meanwhile();
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int buffer = chunk % 2;
    const bool recent = part.recent, more = chunk + 1 < chunks, late = MAKERS == 2 || recent;
    char* here = keys + buffer * KEYS_BYTES;
    if (chunk >= 2) meet(EMPTY + buffer, (2 + MAKERS) * GROUP);
    if (recent) {
      part.place_near(here);
    } else {
      part.place_far<0>(here);
      if (more && !late) part.read_first(rows, chunk + 1, lists);
      if (MAKERS == 1) part.place_far<1>(here);
    }
    publish();
    __syncwarp();  // a warp may hold records of both kinds
    arrive(FULL + buffer, (1 + MAKERS) * GROUP);
    if (more && late) part.read_first(rows, chunk + 1, lists);
    if (more) part.read_rest();
  }
}

// Columns `first` to `last` (of 8 channels) of q of 64 heads, by all threads that score.
template <int AT_ONCE>
__device__ void load_columns(char* queries, const float4* q, int first, int last,
                             const float2* angle, int pairs) {
  const int columns = last - first, reciprocal = (1 << 20) / max(columns, 1) + 1;
#pragma unroll AT_ONCE
  for (int i = threadIdx.x; i < ALL_HEADS * columns; i += 2 * GROUP) {
    const int head = i * reciprocal >> 20, column = first + i - head * columns;  // exact: i < 4096
    *block_piece(queries, head, column) = query_piece(q, head * (C / 8) + column, angle, pairs);
  }
}

// What a group hands over with the weights of a chunk, thread for thread: two heads each.
struct State {
  float top[2], total[2];

  __device__ void take(const float4* at) {
    const float4 x = at[threadIdx.x % GROUP];
    top[0] = x.x, top[1] = x.y, total[0] = x.z, total[1] = x.w;
  }
  __device__ void hand_over(float4* at) const {
    at[threadIdx.x % GROUP] = make_float4(top[0], top[1], total[0], total[1]);
  }
  // s becomes p; this is then the state after it.
  __device__ void weigh(float* s, float* decay, uint2 valid) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float before = top[n];
      top[n] = fmaxf(before, mask_and_max(s, n, valid));
      decay[n] = exp2f(before - top[n]);
      total[n] = __fmaf_rn(total[n], decay[n], exponentials(s, n, top[n]));
    }
  }
};

// One of two places for the weights of a chunk, what sums before it shrink by, and the state.
struct Weights {
  char* at;
  __device__ float* shrink() const { return reinterpret_cast<float*>(at + BLOCK); }
  __device__ float4* state() const { return reinterpret_cast<float4*>(at + BLOCK + 64 * 4); }
  __device__ void store(const float* s, const float* decay, int low, const State& now) const {
    store_weights(at, s, low);
    if (threadIdx.x % 4 == 0) shrink()[low] = decay[0], shrink()[low + 8] = decay[1];
    now.hand_over(state());
    publish();
    meet(WRITTEN + threadIdx.x / GROUP, GROUP);
  }
};
constexpr int WEIGHTS_BYTES = 11 * 1024;  // a place: 8 KB, 256 and 2,048 bytes, aligned for wgmma

// The values of this group's channels, which begin in the block at `values`.
__device__ void start_values(float* o, const Weights& weights, const char* values, int low) {
  shrink_values<WIDTH / 2>(o, weights.shrink()[low], weights.shrink()[low + 8]);
  const unsigned long long a = matrix(weights.at), b = matrix(values);
  begin_products();
#pragma unroll
  for (int k = 0; k < CHUNK / 16; ++k) {
    const int at = 32 / 16 * k, down = 2048 / 16 * k;
    if (WIDTH == 256) product_256(o, a + at, b + down, 1);
    if (WIDTH == 128) product_128(o, a + at, b + down, 1);
    if (WIDTH == 64) product_64_down(o, a + at, b + down, 1);
  }
  close_products();
}

// A chunk whose values this group has added; its buffer may be filled again if there is more.
__device__ void leave(int chunk, int chunks) {
  if (chunk + 2 < chunks) arrive(EMPTY + chunk % 2, (2 + MAKERS) * GROUP);
}

__device__ void run_even(float* o, State& state, const char* queries, const char* keys,
                         const char* values, Weights to_a, Weights to_b, const uint2* valid,
                         int chunks, int low) {
  for (int a = 0; a < chunks; a += 2) {
    float s[32], decay[2];
    meet(FULL, (1 + MAKERS) * GROUP);
    score(s, queries, keys);
    if (a + 1 < chunks) arrive(SCORED_A, 2 * GROUP);
    state.weigh(s, decay, valid[a]);
    to_a.store(s, decay, low, state);
    arrive(WEIGHED_A, 2 * GROUP);
    start_values(o, to_a, values, low);
    await_products();
    leave(a, chunks);
    if (a + 1 == chunks) break;
    meet(WEIGHED_B, 2 * GROUP);
    state.take(to_b.state());
    start_values(o, to_b, values + KEYS_BYTES, low);
    await_products();
    leave(a + 1, chunks);
  }
}

__device__ void run_odd(float* o, State& state, const char* queries, const char* keys,
                        const char* values, Weights to_a, Weights to_b, const uint2* valid,
                        int chunks, int low) {
  for (int b = 1; b < chunks; b += 2) {
    float s[32], decay[2];
    meet(FULL + 1, (1 + MAKERS) * GROUP);
    meet(SCORED_A, 2 * GROUP);  // at the same time, neither would be done before both are
    score(s, queries, keys + KEYS_BYTES);
    meet(WEIGHED_A, 2 * GROUP);
    state.take(to_a.state());
    start_values(o, to_a, values, low);
    state.weigh(s, decay, valid[b]);
    to_b.store(s, decay, low, state);  // before the wait: else weighing sinks behind it
    arrive(WEIGHED_B, 2 * GROUP);
    await_products();
    leave(b - 1, chunks);
    start_values(o, to_b, values + KEYS_BYTES, low);
    await_products();
    leave(b, chunks);
  }
  if (chunks % 2) {  // a last chunk without a partner
    meet(WEIGHED_A, 2 * GROUP);
    state.take(to_a.state());
    start_values(o, to_a, values, low);
    await_products();
  }
}

extern "C" __global__ void __launch_bounds__(RELAY_THREADS, 1)
    relay(const float* q, const long long* positions, const float* freqs, int pairs,
          const unsigned char* near, long long near_count, const long long* near_rows,
          int near_width, const unsigned char* far, long long far_count, const long long* far_rows,
          int far_width, const float* sink, unsigned long long* bad, float* out) {
  const Lists lists = {near,      near_count, near_rows, near_width, far,
                       far_count, far_rows,   far_width, bad};
  const int chunks = (lists.width() + CHUNK - 1) / CHUNK, group = threadIdx.x / GROUP;
  const int low = threadIdx.x % GROUP / 32 * 16 + threadIdx.x % 32 / 4;
  const int first = blockIdx.x % SPLIT * 2 * WIDTH;  // of this block's channels
  const long long token = blockIdx.x / SPLIT;
  char* queries = reinterpret_cast<char*>(shared);  // 8 blocks: (64 heads, 512)
  char* keys = queries + KEYS_BYTES;                // 2 times 8: (CHUNK, 512)
  const Weights to_a = {keys + 2 * KEYS_BYTES}, to_b = {to_a.at + WEIGHTS_BYTES};
  float2* angle = reinterpret_cast<float2*>(to_b.at + WEIGHTS_BYTES);  // (pairs,)
  long long* rows = reinterpret_cast<long long*>(angle + pairs);   // (chunks, CHUNK)
  uint2* valid = reinterpret_cast<uint2*>(rows + chunks * CHUNK);  // (chunks,) bits of places

  prepare({{FULL, (1 + MAKERS) * GROUP}, {FULL + 1, (1 + MAKERS) * GROUP},
           {EMPTY, (2 + MAKERS) * GROUP}, {EMPTY + 1, (2 + MAKERS) * GROUP},
           {WEIGHED_A, 2 * GROUP}, {WEIGHED_B, 2 * GROUP}, {READERS, 2 * GROUP}, {WRITTEN, GROUP},
           {WRITTEN + 1, GROUP}, {ASKED, MAKERS * GROUP}, {TURNED, 3 * GROUP},
           {SCORED_A, 2 * GROUP}});
  if (group >= 2) {
    fewer_registers<MAKER_REGISTERS>();
    const bool past_the_end = read_rows<5>(rows, valid, lists, token, chunks,
                                           threadIdx.x - 2 * GROUP, MAKERS * GROUP);
    meet(ASKED, MAKERS * GROUP);
    make_chunks(keys, rows, chunks, lists, [=] {
      if (group < 1 + MAKERS) return;  // the last maker has most time
      for (int i = threadIdx.x % GROUP; i < pairs; i += GROUP)
        angle[i] = angle_of(positions[token], freqs[i], false);
      arrive(TURNED, 3 * GROUP);
    });
    __syncthreads_or(past_the_end);
    return;
  }
  more_registers<SCORER_REGISTERS>();
  const float4* q4 = reinterpret_cast<const float4*>(q + token * ALL_HEADS * C);
  const int unturned = (C / 2 - pairs) / 4;  // columns
  load_columns<7>(queries, q4, 0, unturned, angle, 0);
  meet(TURNED, 3 * GROUP);
  load_columns<2>(queries, q4, unturned, C / 8, angle, pairs);
  publish();
  meet(READERS, 2 * GROUP);

  float o[WIDTH / 2] = {};
  State state = {{NEVER, NEVER}, {0.f, 0.f}};
  const char* values = keys + first / 64 * BLOCK;
  if (group == 0)
    run_even(o, state, queries, keys, values, to_a, to_b, valid, chunks, low);
  else
    run_odd(o, state, queries, keys, values + WIDTH / 64 * BLOCK, to_a, to_b, valid, chunks, low);

  const bool past_the_end = __syncthreads_or(false);  // nobody reads queries or records any more
  float norm = norm_of(state.total[0], state.top[0], sink[low]);
  float below = norm_of(state.total[1], state.top[1], sink[low + 8]);
  if (past_the_end) norm = below = not_a_number();
  constexpr int STAGED = 2 * WIDTH + 4;
  float* staged = reinterpret_cast<float*>(shared);
  stage_values<WIDTH / 2>(staged + group * WIDTH, STAGED, o, low, norm, below);
  meet(READERS, 2 * GROUP);
  write_rows(out + token * ALL_HEADS * C, staged, STAGED, first, 2 * WIDTH, ALL_HEADS, angle, pairs,
             2 * GROUP);
}
