// Score and select inside each query's candidate pool, in one launch; the definition is
// dsv41/selection.py. Only the listed keys are read.
//
// q (T, HEADS, CHANNELS) f32, w (T, HEADS) f32, keys (rows, RECORD_BYTES), pages (R, width) i64,
// order (T) i64, visible (T) i64, blocks (T, budget) i64 ascending, -1 padded -> chosen (T, k) i64.
// Entry i of a query's list is i % size of its block i / size. Scores as in score.cuh, choice as in
// topk.cuh; the budget * size keys of one query stay in shared memory.
// build: HEADS=4 CHANNELS=32 PACKED=0 BF16=0
// build: HEADS=4 CHANNELS=32 PACKED=1 BF16=1
// build: HEADS=32 CHANNELS=128 PACKED=1 BF16=1
#include "score.cuh"
#include "topk.cuh"

// v1: one block of threads per query, one listed key per thread and turn.
extern "C" __global__ void __launch_bounds__(128, 2)
    choose_v1(const float* q, const float* w, const unsigned char* keys, const long long* pages,
              const long long* order, const long long* visible, const long long* blocks,
              long long* chosen, int width, int per_page, int k, int size, int budget) {
  extern __shared__ unsigned pool[];
  __shared__ __align__(16) float my_q[HEADS * CHANNELS];
  __shared__ float my_w[HEADS];
  long long t = blockIdx.x, n = visible[t];
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
