// Score and select inside each query's candidate pool, in one launch; the definition is
// dsv41/selection.py. Only the listed keys are read.
//
// q (T, HEADS, CHANNELS) f32, w (T, HEADS) f32, keys (rows, RECORD_BYTES), pages (R, width) i64,
// order (T) i64, visible (T) i64, blocks (T, budget) i64 ascending, -1 padded -> chosen (T, k) i64.
// Entry i of a query's list is i % size of its block i / size. Scores as in score.cuh (v1),
// score_mma.cuh (v2), score_fp8.cuh (v3) or score_int8.cuh (v4), choice as in topk.cuh (v1), where
// the budget * size keys of one query stay in shared memory, or topk_held.cuh.
// build: HEADS=4 CHANNELS=32 PACKED=0 BF16=0
// build: HEADS=4 CHANNELS=32 PACKED=1 BF16=1
// build: sm_90a HEADS=32 CHANNELS=128 PACKED=1 BF16=1
// build: HEADS=32 CHANNELS=128 PACKED=1 BF16=0
#include "score_int8.cuh"
#include "topk_held.cuh"

// v1: one block of threads per query, one listed key per thread and turn.
extern "C" __global__ void __launch_bounds__(128, 2)
    choose_v1(const float* q, const float* w, const unsigned char* keys, const long long* pages,
              const long long* order, const long long* visible, const long long* blocks,
              long long* chosen, int width, int per_page, int k, int size, int budget) {
  extern __shared__ unsigned pool[];
  __shared__ __align__(16) float my_q[HEADS * CHANNELS];
  __shared__ float my_w[HEADS];
  long long t = blockIdx.x, n = min(visible[t], (long long)width * per_page);
  load_query(q, w, t, my_q, my_w);
  __syncthreads();
  const long long *table = pages + order[t] * width, *mine = blocks + t * budget;
  for (int i = threadIdx.x; i < budget * size; i += blockDim.x) {
    long long block = mine[i / size], entry = block * size + i % size;
    bool readable = block >= 0 && entry < n;
    pool[i] = readable ? order_key(score(my_q, my_w, record_of(keys, table, per_page, (int)entry))) : 0u;
  }
  __syncthreads();
  write_best(pool, budget * size, k, chosen + t * k,
             [&](int i) { return mine[i / size] * size + i % size; });
}

#if PACKED && HEADS == 32 && CHANNELS == 128
template <class Scorer>
__device__ __forceinline__ void score_blocks(const float* q, const float* w, const unsigned char* keys,
                                             const long long* pages, const long long* order,
                                             const long long* visible, const long long* blocks,
                                             float* listed, int width, int per_page, int budget,
                                             int chunk) {
  extern __shared__ __align__(16) unsigned char rings[];
  int all = budget * RUN, chunks = (all + chunk - 1) / chunk;
  int begin = blockIdx.x % chunks * chunk, count = min(chunk, all - begin);
  long long t = blockIdx.x / chunks, n = min(visible[t], (long long)width * per_page);
  const long long *table = pages + order[t] * width, *mine = blocks + t * budget + begin / RUN;
  float* out = listed + t * all + begin;
  auto entry_of = [&](int i) {  // n where there is none
    long long block = i < count ? mine[i / RUN] : -1;
    return block < 0 ? n : min(n, block * RUN + i % RUN);
  };
  auto run = [&](int i) {  // a page holds whole blocks, of which some may not be visible
    long long entry = entry_of(i);
    return entry < n ? record_of(keys, table, per_page, (int)entry) : keys;
  };
  auto take = [&](int i, float score) { out[i] = entry_of(i) < n ? score : score_of(0); };
  stream_scores<Scorer>(rings, count, q + t * HEADS * CHANNELS, w + t * HEADS, false, run, take);
}

// v2: blocks of 8 entries, which are 544 bytes in a row, scored on tensor cores by several blocks of
// threads per query, so that the 16,384 listed keys of a query that is alone do not wait for one SM.
// listed (T, budget * 8) f32, -inf where an entry is not there.
extern "C" __global__ void __launch_bounds__(256, 2)
    scores_v2(const float* q, const float* w, const unsigned char* keys, const long long* pages,
              const long long* order, const long long* visible, const long long* blocks,
              float* listed, int width, int per_page, int budget, int chunk) {
  score_blocks<OnBf16>(q, w, keys, pages, order, visible, blocks, listed, width, per_page, budget,
                       chunk);
}

// v3: v2 by FP8 products of warp groups (score_fp8.cuh), which halve the unpacking.
extern "C" __global__ void __launch_bounds__(256, 2)
    scores_v3(const float* q, const float* w, const unsigned char* keys, const long long* pages,
              const long long* order, const long long* visible, const long long* blocks,
              float* listed, int width, int per_page, int budget, int chunk) {
  score_blocks<OnFp8<>>(q, w, keys, pages, order, visible, blocks, listed, width, per_page, budget,
                        chunk);
}

// v4: v2 by INT8 products of whole keys (score_int8.cuh).
extern "C" __global__ void __launch_bounds__(256, 2)
    scores_v4(const float* q, const float* w, const unsigned char* keys, const long long* pages,
              const long long* order, const long long* visible, const long long* blocks,
              float* listed, int width, int per_page, int budget, int chunk) {
  score_blocks<OnInt8<>>(q, w, keys, pages, order, visible, blocks, listed, width, per_page, budget,
                         chunk);
}

// all: the choice, from registers (topk_held.cuh)
extern "C" __global__ void __launch_bounds__(1024)
    settle_v3(const float* listed, const long long* blocks, long long* chosen, int k, int budget) {
  long long t = blockIdx.x;
  int count = budget * RUN;
  const long long* mine = blocks + t * budget;
  choose_held(
      Row(listed + t * count, count), [&] { return (long long)count; }, k, chosen + t * k,
      [&](unsigned i) { return mine[i / RUN] * RUN + i % RUN; });
}
#endif
