// Index scores of every query against shared or listed keys; the definition is dsv41/indexer.py.
//
// q (T, HEADS, CHANNELS) f32, w (T, HEADS) f32, keys (N, RECORD_BYTES) for all queries, or
// (T, N, RECORD_BYTES), a list for each -> scores (T, N) f32. Rounding points as in score.cuh.
// build: HEADS=4 CHANNELS=32 PACKED=0 BF16=0
// build: HEADS=4 CHANNELS=32 PACKED=1 BF16=1
// build: HEADS=32 CHANNELS=128 PACKED=1 BF16=1
// build: HEADS=32 CHANNELS=128 PACKED=1 BF16=0
#include "score_mma.cuh"

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

#if PACKED && HEADS == 32 && CHANNELS == 128
// v2: the same on tensor cores (score_mma.cuh). v1 spends 4,096 fused multiply-adds and as many loads
// from shared memory on a key, 32 clocks of an SM; 68 bytes take 3.75 clocks from device memory. Here
// a key costs 2 to 3 clocks of tensor cores and 4 of the integer units that unpack it, while copies
// into shared memory run ahead without registers. A block of 8 warps scores `chunk` keys of a query.
extern "C" __global__ void __launch_bounds__(256, 2)
    scores_v2(const float* q, const float* w, const unsigned char* keys, float* scores,
              long long count, long long keys_per_query, long long chunk) {
  extern __shared__ __align__(16) unsigned char rings[];
  long long chunks = (count + chunk - 1) / chunk, t = blockIdx.x / chunks;
  long long begin = blockIdx.x % chunks * chunk;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, left = (int)min(chunk, count - begin);
  Query query = load_fragments(q + t * HEADS * CHANNELS, w + t * HEADS);
  const unsigned char* first = keys + (t * keys_per_query + begin) * RECORD_BYTES;
  float* out = scores + t * count + begin;
  auto run = [&](int tile, int i) { return first + (tile * TILE + i * RUN) * RECORD_BYTES; };
  auto valid = [&](int tile, int i) { return (left - tile * TILE - i * RUN) * RECORD_BYTES; };
  auto take = [&](int tile, float score) {
    if (tile * TILE + lane < left) out[tile * TILE + lane] = score;
  };
  stream_tiles(rings + warp * STAGES * TILE_BYTES, warp, (left + TILE - 1) / TILE, 8, query, run, valid,
               take);
}
#endif
