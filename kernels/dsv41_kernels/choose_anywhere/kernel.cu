// Score and select for a ragged batch, in one launch: the definition is dsv41/selection.py.
//
// q (T, HEADS, CHANNELS) f32, w (T, HEADS) f32, keys (rows, RECORD_BYTES), pages (R, width) i64,
// order (T) i64, visible (T) i64 -> chosen (T, k) i64 and, with budget > 0, blocks (T, budget) i64.
// Scores are as in score.cuh (v1), score_mma.cuh (v2), score_fp8.cuh (v3) or score_int8.cuh (v4),
// the choice as in topk.cuh. In v1 scores never leave the chip: the keys of one query, `longest` of
// them at most, stay in shared memory as integers of 4 bytes.
// build: HEADS=4 CHANNELS=32 PACKED=0 BF16=0
// build: HEADS=4 CHANNELS=32 PACKED=1 BF16=1
// build: sm_90a HEADS=32 CHANNELS=128 PACKED=1 BF16=1
// build: HEADS=32 CHANNELS=128 PACKED=1 BF16=0
#include "score_int8.cuh"
#include "topk.cuh"

// the newest block counts as +inf, others by the best of their visible entries
__device__ __forceinline__ void rank_blocks(const unsigned* keys, int n, int size, unsigned* best) {
  int count = (n + size - 1) / size;
  for (int b = threadIdx.x; b < count; b += blockDim.x) {
    unsigned top = b == count - 1 ? KEY_OF_INFINITY : 0u;
    for (int i = b * size; i < min(n, b * size + size); ++i) top = max(top, keys[i]);
    best[b] = top;
  }
  __syncthreads();
}

__device__ __forceinline__ void choose(const unsigned* keys, int n, long long t, int k, int size,
                                       int budget, unsigned* best, long long* chosen,
                                       long long* blocks) {
  auto same = [](int i) { return (long long)i; };
  write_best(keys, n, k, chosen + t * k, same);
  if (budget == 0) return;
  rank_blocks(keys, n, size, best);
  write_best(best, (n + size - 1) / size, budget, blocks + t * budget, same);
}

// v1: one block of threads per query, one key per thread and turn. With few heads the compiler keeps
// the whole query in registers, so that a fused multiply-add costs no load; small blocks leave room
// for three per SM, one choosing while the others score.
extern "C" __global__ void __launch_bounds__(128, 2)
    choose_v1(const float* q, const float* w, const unsigned char* keys, const long long* pages,
              const long long* order, const long long* visible, long long* chosen, long long* blocks,
              int width, int per_page, int k, int size, int budget, int longest) {
  extern __shared__ unsigned pool[];  // keys (longest), then the blocks' best
  __shared__ __align__(16) float my_q[HEADS * CHANNELS];
  __shared__ float my_w[HEADS];
  long long t = blockIdx.x;
  int n = (int)min(visible[t], (long long)longest);
  load_query(q, w, t, my_q, my_w);
  __syncthreads();
  const long long* table = pages + order[t] * width;
  for (int j = threadIdx.x; j < n; j += blockDim.x)
    pool[j] = order_key(score(my_q, my_w, record_of(keys, table, per_page, j)));
  __syncthreads();
  choose(pool, n, t, k, size, budget, pool + longest, chosen, blocks);
}

#if !PACKED && HEADS * CHANNELS <= 128
// v2 for float32 keys: 128 keys at a time come through shared memory, copied in whole lines while the
// ones before are scored. In v1 every lane fetches its own key, 16 bytes of a line at a time, and the
// 32 lines that a warp touches at once keep the cache busy 8 times longer than the arithmetic takes.
// The query stays in registers: 128 numbers are a third of what three blocks per SM leave a thread.
const int TURN = 128, STRIDE = CHANNELS + 4;  // floats: 8 lanes that read 16 bytes meet 32 banks

extern "C" __global__ void __launch_bounds__(TURN, 3)
    choose_v2(const float* q, const float* w, const unsigned char* keys, const long long* pages,
              const long long* order, const long long* visible, long long* chosen, long long* blocks,
              int width, int per_page, int k, int size, int budget, int longest) {
  extern __shared__ __align__(16) unsigned pool[];  // as in v1
  __shared__ __align__(16) float tiles[2][TURN][STRIDE];
  __shared__ long long rows[2][TURN];
  __align__(16) float my_q[HEADS * CHANNELS];
  float my_w[HEADS];
  const int PARTS = CHANNELS / 4;
  long long t = blockIdx.x;
  int n = (int)min(visible[t], (long long)longest), turns = (n + TURN - 1) / TURN, me = threadIdx.x;
  const long long* table = pages + order[t] * width;
  auto find = [&](int turn) {  // each thread the row of one key
    int j = min(turn * TURN + me, n - 1);
    if (turn < turns) rows[turn % 2][me] = table[j / per_page] * per_page + j % per_page;
  };
  auto fetch = [&](int turn) {
    for (int part = me; part < TURN * PARTS && turn < turns; part += TURN)
      copy_async(&tiles[turn % 2][part / PARTS][part % PARTS * 4],
                 keys + rows[turn % 2][part / PARTS] * RECORD_BYTES + part % PARTS * 16, 16);
    commit_copies();
  };
#pragma unroll
  for (int i = 0; i < HEADS * CHANNELS; ++i) my_q[i] = q[t * HEADS * CHANNELS + i];
#pragma unroll
  for (int a = 0; a < HEADS; ++a) my_w[a] = w[t * HEADS + a];
  find(0);
  __syncthreads();
  fetch(0), find(1);
  __syncthreads();
  for (int turn = 0; turn < turns; ++turn) {
    fetch(turn + 1);
    wait_copies<1>();
    __syncthreads();
    int j = turn * TURN + me;
    float own = score(my_q, my_w, (const unsigned char*)tiles[turn % 2][me]);
    if (j < n) pool[j] = order_key(own);
    find(turn + 2);
    __syncthreads();
  }
  choose(pool, n, t, k, size, budget, pool + longest, chosen, blocks);
}
#endif

#if PACKED && HEADS == 32 && CHANNELS == 128
template <class Scorer>
__device__ __forceinline__ void score_pages(const float* q, const float* w, const unsigned char* keys,
                                            const long long* pages, const long long* order,
                                            const long long* visible, float* scores, int width,
                                            int per_page, int longest, int chunk) {
  extern __shared__ __align__(16) unsigned char rings[];
  int chunks = (longest + chunk - 1) / chunk, begin = blockIdx.x % chunks * chunk;
  long long t = blockIdx.x / chunks;
  int count = (int)min((long long)min(chunk, longest - begin), visible[t] - begin);
  if (count <= 0) return;
  const long long* table = pages + order[t] * width;
  float* out = scores + t * longest + begin;
  stream_scores<Scorer>(
      rings, count, q + t * HEADS * CHANNELS, w + t * HEADS, per_page % TILE == 0,
      [&](int i) { return i < count ? record_of(keys, table, per_page, begin + i) : keys; },
      [&](int i, float score) { out[i] = score; });
}

// v2 for MXFP4 keys and contexts of any length. Scores on tensor cores by as many blocks of threads as a context
// needs, written out once (4 bytes beside the 68 of a key) and chosen from by index_topk; a query that
// is alone keeps every SM busy. Pages hold a multiple of 8 entries. scores (T, longest) f32 beyond
// visible[t] are left as they are. For float32 two blocks per SM leave too few registers.
extern "C" __global__ void __launch_bounds__(256, BF16 ? 2 : 1)
    scores_v2(const float* q, const float* w, const unsigned char* keys, const long long* pages,
              const long long* order, const long long* visible, float* scores, int width, int per_page,
              int longest, int chunk) {
  score_pages<OnBf16>(q, w, keys, pages, order, visible, scores, width, per_page, longest, chunk);
}

// v3: the same by FP8 products of warp groups (score_fp8.cuh), which halve the unpacking.
extern "C" __global__ void __launch_bounds__(256, 2)
    scores_v3(const float* q, const float* w, const unsigned char* keys, const long long* pages,
              const long long* order, const long long* visible, float* scores, int width, int per_page,
              int longest, int chunk) {
  score_pages<OnFp8<>>(q, w, keys, pages, order, visible, scores, width, per_page, longest, chunk);
}

// v4: the same by INT8 products of whole keys (score_int8.cuh).
extern "C" __global__ void __launch_bounds__(256, 2)
    scores_v4(const float* q, const float* w, const unsigned char* keys, const long long* pages,
              const long long* order, const long long* visible, float* scores, int width,
              int per_page, int longest, int chunk) {
  score_pages<OnInt8<>>(q, w, keys, pages, order, visible, scores, width, per_page, longest,
                        chunk);
}
#endif
