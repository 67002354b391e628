// Index scores of every query against shared or listed keys; the definition is dsv41/indexer.py.
//
// q (T, HEADS, CHANNELS) f32, w (T, HEADS) f32, keys (N, RECORD_BYTES) for all queries, or
// (T, N, RECORD_BYTES), a list for each -> scores (T, N) f32. Rounding points as in score.cuh.
// build: HEADS=4 CHANNELS=32 PACKED=0 BF16=0
// build: HEADS=4 CHANNELS=32 PACKED=1 BF16=1
// build: HEADS=32 CHANNELS=128 PACKED=1 BF16=1
#include "score.cuh"

// v1: one key per thread, one query per row of the grid.
extern "C" __global__ void __launch_bounds__(128, 2)
    scores_v1(const float* q, const float* w, const unsigned char* keys, float* scores, long long count,
              long long keys_per_query) {
  __shared__ __align__(16) float my_q[HEADS * CHANNELS];
  __shared__ float my_w[HEADS];
  long long blocks = (count + blockDim.x - 1) / blockDim.x;
  long long t = blockIdx.x / blocks, j = blockIdx.x % blocks * blockDim.x + threadIdx.x;
  load_query(q, w, t, my_q, my_w);
  __syncthreads();
  if (j >= count) return;
  const unsigned char* record = keys + (t * keys_per_query + j) * RECORD_BYTES;
  scores[t * count + j] = score(my_q, my_w, record);
}
