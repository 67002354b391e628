// Attention over listed records with a sink, RoPE on q and back-rotation of o included.
//
//   q, out (T, heads, C) f32; positions (T,) int64 and freqs (pairs,) f32, unused when pairs is 0;
//   near, far: window and global records; near_rows (T, W), far_rows (T, K) int64, negative where
//   empty; sink (heads,) f32. Macros as in records.cuh, and H for v2.
// Rounding points are the definition's: q after its rotation; p = exp(s - running maximum of its
// chunk of 64 records) before it meets the values, not in the denominator; o before and after it
// turns back. A row past the end of the records is not read: the query gives NaN, and the word
// `bad` says where.
//
// v1 `plain`: one block per token and head, any number of heads. Every head gathers and decodes
// every record again, twice: for the miniature (8 heads, 64 channels, 128 rows) 8 * 2 * 32 KB per
// token.
//
// v2 `attend` (few heads): one block of 128 threads per token. Its records are read from memory
// once, decoded to float32 and kept in shared memory; all heads use them from there: 32 KB per
// token against 262 kFLOP, all in one launch.

// build: C=64 NEAR=1 FAR=2 BF16=1 H=8
// build: C=64 NEAR=0 FAR=0 BF16=0 H=8
// build: C=128 NEAR=0 FAR=0 BF16=0 H=16

#include "records.cuh"

constexpr int CHUNK = 64;
constexpr float NEVER = -1e30f;

// ---- v1

extern "C" __global__ void __launch_bounds__(128)
    plain(const float* q, const long long* positions, const float* freqs, int pairs,
          const unsigned char* near, long long near_count, const long long* near_rows,
          int near_width, const unsigned char* far, long long far_count, const long long* far_rows,
          int far_width, const float* sink, unsigned long long* bad, float* out, int heads) {
  __shared__ float4 shared_query[QUADS];
  __shared__ float score[CHUNK];
  __shared__ long long rows[CHUNK];
  const Lists lists = {near,      near_count, near_rows, near_width, far,
                       far_count, far_rows,   far_width, bad};
  const int thread = threadIdx.x, lane = thread % 32, head = blockIdx.x % heads;
  const long long token = blockIdx.x / heads;
  float* query = reinterpret_cast<float*>(shared_query);
  float* turning = query + C - 2 * pairs;
  for (int c = thread; c < C; c += 128) query[c] = q[(token * heads + head) * C + c];
  __syncthreads();
  for (int i = thread; i < pairs; i += 128)
    turn_pair(turning[2 * i], turning[2 * i + 1], angle_of(positions[token], freqs[i], false));
  __syncthreads();
  for (int c = thread; pairs && c < C; c += 128) query[c] = bf16(query[c]);
  __syncthreads();

  const float scale = 1.f / sqrtf((float)C);
  float top = NEVER, total = 0.f;
  float4 o = make_float4(0.f, 0.f, 0.f, 0.f);  // of the four channels that begin at 4 * thread
  bool past_the_end = false;
  for (int begin = 0; begin < lists.width(); begin += CHUNK) {
    if (thread < CHUNK) rows[thread] = lists.row(token, begin + thread, past_the_end);
    __syncthreads();
    auto record = [&](int j, int quad) {
      return begin + j < near_width ? decode<NEAR>(near, rows[j], quad)
                                    : decode<FAR>(far, rows[j], quad);
    };
    for (int j = thread / 32; j < CHUNK; j += 4) {  // a warp takes a record
      float s = 0.f;
      for (int quad = lane; rows[j] >= 0 && quad < QUADS; quad += 32)
        s += dot(record(j, quad), shared_query[quad]);
      for (int step = 16; step; step /= 2) s += __shfl_xor_sync(~0u, s, step);
      if (lane == 0) score[j] = rows[j] >= 0 ? s * scale : minus_infinity();
    }
    __syncthreads();
    float before = top;
    for (int j = 0; j < CHUNK; ++j) top = fmaxf(top, score[j]);
    float decay = expf(before - top);
    total *= decay, o.x *= decay, o.y *= decay, o.z *= decay, o.w *= decay;
    for (int j = 0; j < CHUNK; ++j) {
      float p = expf(score[j] - top);
      total += p;
      if (rows[j] >= 0 && thread < QUADS) add_product(o, bf16(p), record(j, thread));
    }
    __syncthreads();
  }
  total += expf(sink[head] - top);  // infinite for a query without records: its o is 0
  if (total == 0.f) total = 1.f;
  if (__syncthreads_or(past_the_end)) total = not_a_number();
  if (thread < QUADS)
    shared_query[thread] = rounded(make_float4(o.x / total, o.y / total, o.z / total, o.w / total));
  __syncthreads();
  for (int i = thread; i < pairs; i += 128)
    turn_pair(turning[2 * i], turning[2 * i + 1], angle_of(positions[token], freqs[i], true));
  __syncthreads();
  for (int c = thread; c < C; c += 128) out[(token * heads + head) * C + c] = bf16(query[c]);
}

// ---- v2
#ifdef H
#include "attention.cuh"

extern __shared__ float4 shared[];

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    attend(const float* q, const long long* positions, const float* freqs, int pairs,
           const unsigned char* near, long long near_count, const long long* near_rows,
           int near_width, const unsigned char* far, long long far_count, const long long* far_rows,
           int far_width, const float* sink, unsigned long long* bad, float* out) {
  const Lists lists = {near,      near_count, near_rows, near_width, far,
                       far_count, far_rows,   far_width, bad};
  const int chunks = (lists.width() + CHUNK - 1) / CHUNK, padded = chunks * CHUNK;
  const int thread = threadIdx.x, warp = thread / 32, head = thread % H;
  const long long token = blockIdx.x;
  float4* records = shared;                                        // (padded, STRIDE)
  float4* queries = records + padded * STRIDE;                     // (H, QUADS); later o
  float* weights = reinterpret_cast<float*>(queries + H * QUADS);  // (padded, H): scores, then p
  float* tops = weights + padded * H;                              // (chunks, 4 warps, H)
  float* sums = tops + chunks * 4 * H;                             // (4 warps, H)
  float2* angle = reinterpret_cast<float2*>(sums + 4 * H);         // (pairs,)
  long long* rows = reinterpret_cast<long long*>(angle + pairs);   // (padded,)

  bool past_the_end = false;
  for (int j = thread; j < padded; j += THREADS) rows[j] = lists.row(token, j, past_the_end);
  if (pairs) angles(angle, freqs, pairs, positions[token]);
  for (int i = thread; i < H * QUADS; i += THREADS)
    queries[i] = reinterpret_cast<const float4*>(q)[token * H * QUADS + i];
  past_the_end = __syncthreads_or(past_the_end);
  turn(queries, angle, pairs, false);
  __syncthreads();
  // trap: sparse_attn takes q as it comes, only a rotation stores it again
  for (int i = thread; pairs && i < H * QUADS; i += THREADS) queries[i] = rounded(queries[i]);
  gather(records, rows, padded, lists);
  __syncthreads();

  multiply(weights, records, queries, padded);
  __syncthreads();

  // softmax: a thread takes one head and every (THREADS / H)th record
  for (int k = 0; k < chunks; ++k) {
    float top = NEVER;
    for (int j = k * CHUNK + thread / H; j < (k + 1) * CHUNK; j += THREADS / H) {
      float& s = weights[j * H + head];
      s = masked_score(s, rows[j]);
      top = fmaxf(top, s);
    }
    top = lanes_max(top);
    if (thread % 32 < H) tops[(k * 4 + warp) * H + head] = top;
  }
  __syncthreads();
  float last = NEVER, running = NEVER, total = 0.f;
  for (int i = 0; i < chunks * 4; ++i) last = fmaxf(last, tops[i * H + head]);
  for (int k = 0; k < chunks; ++k) {
    for (int w = 0; w < 4; ++w) running = fmaxf(running, tops[(k * 4 + w) * H + head]);
    float decay = expf(running - last);  // what later chunks do to the sums of this one
    for (int j = k * CHUNK + thread / H; j < (k + 1) * CHUNK; j += THREADS / H) {
      float p = expf(weights[j * H + head] - running);
      total += p * decay;
      weights[j * H + head] = bf16(p) * decay;
    }
  }
  total = lanes_sum(total);
  __syncthreads();  // all have read tops
  if (thread % 32 < H) sums[warp * H + head] = total;
  if (thread < H) tops[head] = last;
  __syncthreads();

  weighted_sums(queries, weights, records, padded);
  for (int i = thread; i < H * QUADS; i += THREADS) {
    int h = i / QUADS;
    float norm = sums[h] + sums[H + h] + sums[2 * H + h] + sums[3 * H + h];
    norm += expf(sink[h] - tops[h]);  // infinite for a query without records: its o is 0
    if (norm == 0.f) norm = 1.f;
    if (past_the_end) norm = not_a_number();
    float4 o = queries[i];
    queries[i] = rounded(make_float4(o.x / norm, o.y / norm, o.z / norm, o.w / norm));
  }
  __syncthreads();
  turn(queries, angle, pairs, true);
  __syncthreads();
  for (int i = thread; i < H * QUADS; i += THREADS)
    reinterpret_cast<float4*>(out)[token * H * QUADS + i] = rounded(queries[i]);
}
#endif
