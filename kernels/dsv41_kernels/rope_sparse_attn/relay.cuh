// v6 `relay`, see kernel.cu. One block of three warpgroups per token. Two of them score in turn and
// add one half of the values each; `a` and `b` are a pair of chunks, one in either buffer:
//
//   even   scores a     | weighs a         | values of a | (waits)    | values of b
//   odd    (waits)      | scores b         | values of a, weighs b    | values of b
//   maker  decodes b    | (waits, reads the bytes of the next pair)   | decodes the next a
//
// In v4 one group scored and weighed all chunks, so nothing was multiplied while it took
// exponentials, and the maker first waited for the bytes of a chunk and then decoded it: 11,000
// clocks a chunk, of which the products need 2,050. Here products of one group run under the
// exponentials of the other, bytes are read while the maker waits for a free buffer, all records
// are set out for L2 at the start, and every thread's place in a buffer is found once.
// The maxima and sums so far are handed over with the weights; sums come in v4's order, so o has
// v4's bits.

// Barriers beside FULL and EMPTY: weights of a chunk are written, for the group itself (two) and
// for the other one, with the state after them; lists are read; q's angles are known.
constexpr int WRITTEN = 8, WEIGHED_A = WEIGHED, WEIGHED_B = TAKEN, ASKED = 10, TURNED = 11;

// The maker's part of a record: two threads share one, of every 32 bytes each takes 16.
struct Half {
  const unsigned char* bytes;
  bool recent, real;
  uint4 codes[8], scales[2];

  __device__ static int odd() { return threadIdx.x % 2; }
  __device__ static int row() { return threadIdx.x % GROUP / 2; }

  __device__ void read_codes(int i, int from) {
    codes[i] = read_16(bytes + from + 32 * i + 16 * odd(), real);
  }

  // What the first half of place_far needs of the record in chunk `chunk`; and the rest.
  __device__ void read_first(const long long* rows, int chunk, const Lists& lists) {
    const int place = chunk * CHUNK + row();
    const long long record = rows[place];
    recent = place < lists.near_width, real = record >= 0;
    bytes = recent ? lists.near : lists.far;
    if (real) bytes += record * (recent ? NEAR_BYTES : FAR_BYTES);
#pragma unroll
    for (int i = 0; i < 4; ++i) read_codes(i, 0);
    scales[0] = read_16(bytes + (recent ? 512 : 256), real);
  }
  __device__ void read_rest() {
#pragma unroll
    for (int i = 4; i < 8; ++i) read_codes(i, 0);
    scales[1] = read_16(bytes + 272, real && !recent);
  }

  __device__ static uint4* slot(char* keys, int piece) {  // in the first block of this row
    return reinterpret_cast<uint4*>(keys + row() * 128 + ((piece ^ (row() & 7)) << 4));
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

  __device__ void place_near(char* keys) {  // of 512 bytes the second half is read meanwhile
    uint4* to[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) to[n] = slot(keys, n % 2 * 4 + 2 * odd() + n / 2);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const unsigned scale = e8m0_scale(word(scales[0], i / 4) >> i % 4 * 8 & 0xff);
      const uint4 from = codes[i % 8];
      if (i < 8) read_codes(i, 256);
      to[i % 2][i / 2 * (BLOCK / 16)] = place_e4m3(from.x, from.y, scale);
      to[i % 2 + 2][i / 2 * (BLOCK / 16)] = place_e4m3(from.z, from.w, scale);
    }
  }
};

// The lists of a token, read by the maker, with a bit for each place that has a record; every
// record is set out for L2. True if this thread saw one past the end.
__device__ bool ask_for_records(long long* rows, uint2* valid, const Lists& lists, long long token,
                                int chunks) {
  bool past_the_end = false;
#pragma unroll 5
  for (int j = threadIdx.x % GROUP; j < chunks * CHUNK; j += GROUP) {  // whole warps
    const long long row = lists.row(token, j, past_the_end);
    rows[j] = row;
#ifndef UNASKED
    const bool recent = j < lists.near_width;
    const int bytes = recent ? NEAR_BYTES : FAR_BYTES;
    if (row >= 0) set_out((recent ? lists.near : lists.far) + row * bytes, bytes);
#endif
    const unsigned bits = __ballot_sync(~0u, row >= 0);
    if (threadIdx.x % 32 == 0) reinterpret_cast<unsigned*>(valid)[j / 32] = bits;
  }
  return past_the_end;
}

// All chunks, in turn into either buffer. Bytes of the next chunk are asked for as soon as there
// are registers for them; not all at once, since `publish` may wait for them.
template <typename Meanwhile>
__device__ void make_chunks(char* keys, const long long* rows, int chunks, const Lists& lists,
                            Meanwhile meanwhile) {
  Half half;
  if (chunks > 0) half.read_first(rows, 0, lists), half.read_rest();
  meanwhile();
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int buffer = chunk % 2;
    const bool recent = half.recent, more = chunk + 1 < chunks;
    char* here = keys + buffer * KEYS_BYTES;
    if (chunk >= 2) meet(EMPTY + buffer, 3 * GROUP);
    if (recent) {
      half.place_near(here);
    } else {
      half.place_far<0>(here);
      if (more) half.read_first(rows, chunk + 1, lists);
      half.place_far<1>(here);
    }
    publish();
    __syncwarp();  // a warp may hold records of both kinds
    arrive(FULL + buffer, 2 * GROUP);
    if (more && recent) half.read_first(rows, chunk + 1, lists);
    if (more) half.read_rest();
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

__device__ void start_values(float* o, const Weights& weights, const char* keys, int half, int low) {
  shrink_values<128>(o, weights.shrink()[low], weights.shrink()[low + 8]);
  const unsigned long long a = matrix(weights.at), b = matrix(keys + 4 * half * BLOCK);
  begin_products();
#pragma unroll
  for (int k = 0; k < CHUNK / 16; ++k) product_256(o, a + 32 / 16 * k, b + 2048 / 16 * k, 1);
  close_products();
}

// A chunk whose values this group has added; its buffer may be filled again if there is more.
__device__ void leave(int chunk, int chunks) {
  if (chunk + 2 < chunks) arrive(EMPTY + chunk % 2, 3 * GROUP);
}

__device__ void run_even(float* o, State& state, const char* queries, const char* keys,
                         Weights to_a, Weights to_b, const uint2* valid, int chunks, int low) {
  for (int a = 0; a < chunks; a += 2) {
    float s[32], decay[2];
    meet(FULL, 2 * GROUP);
    score(s, queries, keys);
    state.weigh(s, decay, valid[a]);
    to_a.store(s, decay, low, state);
    arrive(WEIGHED_A, 2 * GROUP);
    start_values(o, to_a, keys, 0, low);
    await_products();
    leave(a, chunks);
    if (a + 1 == chunks) break;
    meet(WEIGHED_B, 2 * GROUP);
    state.take(to_b.state());
    start_values(o, to_b, keys + KEYS_BYTES, 0, low);
    await_products();
    leave(a + 1, chunks);
  }
}

__device__ void run_odd(float* o, State& state, const char* queries, const char* keys, Weights to_a,
                        Weights to_b, const uint2* valid, int chunks, int low) {
  for (int b = 1; b < chunks; b += 2) {
    float s[32], decay[2];
    meet(FULL + 1, 2 * GROUP);
    score(s, queries, keys + KEYS_BYTES);
    meet(WEIGHED_A, 2 * GROUP);
    state.take(to_a.state());
    start_values(o, to_a, keys, 1, low);
    state.weigh(s, decay, valid[b]);
    to_b.store(s, decay, low, state);  // before the wait: else weighing sinks behind it
    arrive(WEIGHED_B, 2 * GROUP);
    await_products();
    leave(b - 1, chunks);
    start_values(o, to_b, keys + KEYS_BYTES, 1, low);
    await_products();
    leave(b, chunks);
  }
  if (chunks % 2) {  // a last chunk without a partner
    meet(WEIGHED_A, 2 * GROUP);
    state.take(to_a.state());
    start_values(o, to_a, keys, 1, low);
    await_products();
  }
}

extern "C" __global__ void __launch_bounds__(3 * GROUP, 1)
    relay(const float* q, const long long* positions, const float* freqs, int pairs,
          const unsigned char* near, long long near_count, const long long* near_rows,
          int near_width, const unsigned char* far, long long far_count, const long long* far_rows,
          int far_width, const float* sink, unsigned long long* bad, float* out) {
  const Lists lists = {near,      near_count, near_rows, near_width, far,
                       far_count, far_rows,   far_width, bad};
  const int chunks = (lists.width() + CHUNK - 1) / CHUNK, group = threadIdx.x / GROUP;
  const int low = threadIdx.x % GROUP / 32 * 16 + threadIdx.x % 32 / 4;
  const long long token = blockIdx.x;
  char* queries = reinterpret_cast<char*>(shared);                 // 8 blocks: (64 heads, 512)
  char* keys = queries + KEYS_BYTES;                               // 2 times 8: (CHUNK, 512)
  const Weights to_a = {keys + 2 * KEYS_BYTES}, to_b = {to_a.at + WEIGHTS_BYTES};
  float2* angle = reinterpret_cast<float2*>(to_b.at + WEIGHTS_BYTES);  // (pairs,)
  long long* rows = reinterpret_cast<long long*>(angle + pairs);   // (chunks, CHUNK)
  uint2* valid = reinterpret_cast<uint2*>(rows + chunks * CHUNK);  // (chunks,) bits of places

  if (group == 2) {
    fewer_registers<96>();
    const bool past_the_end = ask_for_records(rows, valid, lists, token, chunks);
    meet(ASKED, GROUP);
    make_chunks(keys, rows, chunks, lists, [=] {
      for (int i = threadIdx.x % GROUP; i < pairs; i += GROUP)
        angle[i] = angle_of(positions[token], freqs[i], false);
      arrive(TURNED, 3 * GROUP);
    });
    __syncthreads_or(past_the_end);
    return;
  }
  more_registers<208>();
  const float4* q4 = reinterpret_cast<const float4*>(q + token * ALL_HEADS * C);
  const int unturned = (C / 2 - pairs) / 4;  // columns
  load_columns<7>(queries, q4, 0, unturned, angle, 0);
  meet(TURNED, 3 * GROUP);
  load_columns<2>(queries, q4, unturned, C / 8, angle, pairs);
  publish();
  meet(READERS, 2 * GROUP);

  float o[128] = {};
  State state = {{NEVER, NEVER}, {0.f, 0.f}};
  if (group == 0)
    run_even(o, state, queries, keys, to_a, to_b, valid, chunks, low);
  else
    run_odd(o, state, queries, keys, to_a, to_b, valid, chunks, low);

  const bool past_the_end = __syncthreads_or(false);  // nobody reads queries or records any more
  float norm = norm_of(state.total[0], state.top[0], sink[low]);
  float below = norm_of(state.total[1], state.top[1], sink[low + 8]);
  if (past_the_end) norm = below = not_a_number();
  float* staged = reinterpret_cast<float*>(shared);
  stage_values<128>(staged + group * 256, O_STRIDE, o, low, norm, below);
  meet(READERS, 2 * GROUP);
  write_rows(out + token * ALL_HEADS * C, staged, O_STRIDE, 0, C, ALL_HEADS, angle, pairs,
             2 * GROUP);
}
