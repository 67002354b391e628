// Index scores of every query against shared or listed keys; the definition is dsv41/indexer.py.
//
// q (T, HEADS, CHANNELS) f32, w (T, HEADS) f32, keys (N, RECORD_BYTES) for all queries, or
// (T, N, RECORD_BYTES), a list for each -> scores (T, N) f32. Rounding points as in score.cuh.
// build: HEADS=4 CHANNELS=32 PACKED=0 BF16=0
// build: HEADS=4 CHANNELS=32 PACKED=1 BF16=1
// build: sm_90a HEADS=32 CHANNELS=128 PACKED=1 BF16=1
// build: HEADS=32 CHANNELS=128 PACKED=1 BF16=0
#include "score_fp8.cuh"

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
template <class Scorer>
__device__ __forceinline__ void score_chunk(const float* q, const float* w, const unsigned char* keys,
                                            float* scores, long long count, long long keys_per_query,
                                            long long chunk) {
  extern __shared__ __align__(16) unsigned char rings[];
  long long chunks = (count + chunk - 1) / chunk, t = blockIdx.x / chunks;
  long long begin = blockIdx.x % chunks * chunk;
  const unsigned char* first = keys + (t * keys_per_query + begin) * RECORD_BYTES;
  float* out = scores + t * count + begin;
  stream_scores<Scorer>(
      rings, (int)min(chunk, count - begin), q + t * HEADS * CHANNELS, w + t * HEADS, true,
      [&](int i) { return first + i * RECORD_BYTES; }, [&](int i, float score) { out[i] = score; });
}

// v2: the same on tensor cores (score_mma.cuh). v1 spends 4,096 fused multiply-adds and as many loads
// from shared memory on a key, 32 clocks of an SM; 68 bytes take 3.75 clocks from device memory. Here
// a key costs 2 to 3 clocks of tensor cores and 4 of the integer units that unpack it, while copies
// into shared memory run ahead without registers. A block of 8 warps scores `chunk` keys of a query.
// In float32 the weights take four registers more than two blocks per SM leave.
extern "C" __global__ void __launch_bounds__(256, BF16 ? 2 : 1)
    scores_v2(const float* q, const float* w, const unsigned char* keys, float* scores,
              long long count, long long keys_per_query, long long chunk) {
  score_chunk<OnBf16>(q, w, keys, scores, count, keys_per_query, chunk);
}

// v3 is for prefill, where every query meets every key: FP8 products of warp groups (score_fp8.cuh).
// v2 unpacks a key for each query, 4 clocks of an SM a pair; here a key is unpacked once, stays in
// registers, and meets the queries as they stream through shared memory: 1 clock of tensor cores and
// 1.3 of the other units a pair, each while other warp groups are in the other half.
//
// encode: queries into E4M3 (T, QUERY_BYTES) and weights (T, HEADS); inexact (T), zeros before, is 1
// where that lost something.
extern "C" __global__ void __launch_bounds__(256)
    encode_v3(const float* q, const float* w, unsigned char* encoded, float* weights, unsigned* inexact,
              long long heads) {
  long long i = blockIdx.x * 8ll + threadIdx.x / 32, t = i / HEADS;  // a warp for each head
  if (i >= heads) return;
  float factor;
  bool held = encode_head(q + i * CHANNELS, (int)(i % HEADS), encoded + t * QUERY_BYTES, factor);
  if (threadIdx.x % 32 == 0) weights[i] = w[i] * factor;
  if (threadIdx.x % 32 == 0 && !held) inexact[t] = 1;
}

// One block: 256 keys, 64 for each of its 4 warp groups, and the queries of a range of `share`, 8 at a
// time in one of 3 buffers of shared memory.
const int BATCH = 8, BUFFERS = 3, V3_KEYS = 256, V3_THREADS = 512;
const int BATCH_BYTES = BATCH * (QUERY_BYTES + 4 * HEADS);

__device__ __forceinline__ void fetch_batch(unsigned char* buffer, const unsigned char* encoded,
                                            const float* weights, long long first, int count) {
  for (int i = threadIdx.x; i < count * QUERY_BYTES / 16; i += V3_THREADS)
    copy_async(buffer + 16 * i, encoded + first * QUERY_BYTES + 16 * i, 16);
  for (int i = threadIdx.x; i < count * HEADS / 4; i += V3_THREADS)
    copy_async(buffer + BATCH * QUERY_BYTES + 16 * i, weights + first * HEADS + 4 * i, 16);
}

extern "C" __global__ void __launch_bounds__(V3_THREADS, 1)
    scores_v3(const unsigned char* encoded, const float* weights, const unsigned char* keys,
              float* scores, long long tokens, long long count, long long share) {
  extern __shared__ __align__(128) unsigned char buffers[];
  long long tiles = (count + V3_KEYS - 1) / V3_KEYS, begin = blockIdx.x / tiles * share;
  long long end = min(tokens, begin + share);
  int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
  long long row = blockIdx.x % tiles * V3_KEYS + threadIdx.x / 32 * 16 + g;
  Keys own = load_keys((const unsigned*)(keys + min(row, count - 1) * RECORD_BYTES),
                       (const unsigned*)(keys + min(row + 8, count - 1) * RECORD_BYTES));
  auto fetch = [&](int n) {
    long long first = begin + (long long)n * BATCH;
    if (first < end)
      fetch_batch(buffers + n % BUFFERS * BATCH_BYTES, encoded, weights, first,
                  (int)min((long long)BATCH, end - first));
    commit_copies();
  };
  for (int n = 0; n < BUFFERS - 1; ++n) fetch(n);
  for (int n = 0; begin + (long long)n * BATCH < end; ++n) {
    wait_copies<BUFFERS - 2>();
    publish_shared();
    __syncthreads();  // the batch is there, and the buffer refilled next is free
    fetch(n + BUFFERS - 1);
    const unsigned char* buffer = buffers + n % BUFFERS * BATCH_BYTES;
    long long first = begin + (long long)n * BATCH;
    for (int i = 0; i < (int)min((long long)BATCH, end - first); ++i) {
      Query query;
      load_weights((const float*)(buffer + BATCH * QUERY_BYTES) + i * HEADS, query);
      float2 found = score_keys(buffer + i * QUERY_BYTES, query, own);
      long long key = row + (c == 1 ? 8 : 0);
      if (c < 2 && key < count) scores[(first + i) * count + key] = c ? found.y : found.x;
    }
  }
}

// queries that E4M3 does not hold are scored again as in v1; for all others a block ends at once
extern "C" __global__ void __launch_bounds__(128)
    repair_v1(const float* q, const float* w, const unsigned char* keys, const unsigned* inexact,
              float* scores, long long count) {
  __shared__ __align__(16) float my_q[HEADS * CHANNELS];
  __shared__ float my_w[HEADS];
  long long t = blockIdx.x;
  if (!inexact[t]) return;
  load_query(q, w, t, my_q, my_w);
  __syncthreads();
  for (long long j = threadIdx.x; j < count; j += blockDim.x)
    scores[t * count + j] = score(my_q, my_w, keys + j * RECORD_BYTES);
}

// v4 is v2 with the products of v3: half the unpacking and half the tensor-core time of a key, and a
// float32 addition per head and scale group more. About 3 clocks a key, less than its 3.75 of memory.
// On an H200, 32 queries of 131,072 keys each: 117.7 us, of 524,288: 423.4, one of 524,288: 23.3.
extern "C" __global__ void __launch_bounds__(256, 2)
    scores_v4(const float* q, const float* w, const unsigned char* keys, float* scores,
              long long count, long long keys_per_query, long long chunk) {
  score_chunk<OnFp8>(q, w, keys, scores, count, keys_per_query, chunk);
}
#endif
