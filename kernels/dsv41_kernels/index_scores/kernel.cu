// Index scores of every query against shared or listed keys; the definition is dsv41/indexer.py.
//
// q (T, HEADS, CHANNELS) f32, w (T, HEADS) f32, keys (N, RECORD_BYTES) for all queries, or
// (T, N, RECORD_BYTES), a list for each -> scores (T, N) f32. Rounding points as in score.cuh.
// build: HEADS=4 CHANNELS=32 PACKED=0 BF16=0
// build: HEADS=4 CHANNELS=32 PACKED=1 BF16=1
// build: sm_90a HEADS=32 CHANNELS=128 PACKED=1 BF16=1
// build: HEADS=32 CHANNELS=128 PACKED=1 BF16=0
#include "score_int8.cuh"
#include "watched.cuh"

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
  const unsigned char* first = kept(keys + (t * keys_per_query + begin) * RECORD_BYTES);
  float* out = kept(scores + t * count + begin);
  stream_scores<Scorer, true>(
      rings, (int)min(chunk, count - begin), q + t * HEADS * CHANNELS, w + t * HEADS, true,
      [&](int i) { return first + (long long)i * RECORD_BYTES; },
      [&](int i, float score) { store_global(out + i, score); });
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
// On an H200, 32 queries of 131,072 keys each: 112.4 us, of 524,288: 403.6, one of 524,288: 22.6.
extern "C" __global__ void __launch_bounds__(256, 2)
    scores_v4(const float* q, const float* w, const unsigned char* keys, float* scores,
              long long count, long long keys_per_query, long long chunk) {
  score_chunk<OnFp8<>>(q, w, keys, scores, count, keys_per_query, chunk);
}

// v5 is v3 by INT8 products of whole keys (score_int8.cuh): what scales and adds the four FP8
// products was a third of its instructions. Two queries are the 64 columns of a product, and while
// one pair is multiplied the last one's dots are weighed. Pairs with their weights come in the
// background by bulk copies, which no thread has to address. On an H200, 8,192 queries of 65,536
// keys: 4,490 us, v3 10,097. Products alone take somewhat more than half of it, and
// so does all the rest alone: while tensor cores work, an SM issues few other instructions.
//
// encode: queries as pairs (T / 2, PAIR_BYTES), with room for a whole stage at the end; odd (T),
// zeros before, is 1 where one does not fit.
const int WEIGHT_BYTES = (BF16 ? 2 : 4) * HEADS, PAIR_BYTES = 2 * (QUERY_BYTES + WEIGHT_BYTES);

extern "C" __global__ void __launch_bounds__(256)
    encode_v5(const float* q, const float* w, unsigned char* encoded, unsigned* odd,
              long long heads) {
  long long i = blockIdx.x * 8ll + threadIdx.x / 32, t = i / HEADS;  // a warp for each head
  if (i >= heads) return;
  int n = (int)(i % HEADS), lane = threadIdx.x % 32;
  Head head = whole_head(((const float4*)(q + i * CHANNELS))[lane], w[i]);
  unsigned char* pair = encoded + t / 2 * PAIR_BYTES;
  *(unsigned*)(pair + number_place((int)(t % 2) * HEADS + n, 2 * HEADS)) = head.numbers;
  if (lane) return;
  if (!head.whole) odd[t] = 1;
  // the weights of heads 8 n + 2 c, + 1 for lane c, in a row
  int place = n % 8 / 2 * 8 + n / 8 * 2 + n % 2;
  unsigned char* weights = pair + 2 * QUERY_BYTES + t % 2 * WEIGHT_BYTES;
  if (BF16)
    ((unsigned short*)weights)[place] = __float_as_uint(head.weight) >> 16;
  else
    ((float*)weights)[place] = head.weight;
}

__device__ __forceinline__ void load_pair_weights(const unsigned char* weights, Query& query) {
  int c = threadIdx.x % 4;
#if BF16
  uint4 four = ((const uint4*)weights)[c];
  query.weights[0] = four.x, query.weights[1] = four.y;
  query.weights[2] = four.z, query.weights[3] = four.w;
#else
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float4 four = ((const float4*)weights)[2 * c + i];
    query.exact_weights[2 * i] = {four.x, four.y};
    query.exact_weights[2 * i + 1] = {four.z, four.w};
  }
#endif
}

const int V5_STAGES = 5, V5_KEYS = 256, V5_WARPS = V5_KEYS / 16;
const int PAIRS = 4, STAGE_BYTES = PAIRS * PAIR_BYTES;

__device__ __forceinline__ unsigned shared_at(const void* p) {
  return (unsigned)__cvta_generic_to_shared(p);
}

// a stage of a ring: `full` when its bytes are there, `empty` when every warp is done with it
struct Ring {
  unsigned long long full[V5_STAGES], empty[V5_STAGES];
};

__device__ __forceinline__ void wait_for(const unsigned long long* barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}\n" ::"r"(
          shared_at(barrier)),
      "r"(parity)
      : "memory");
}

// stage n of all, by one thread, once what was in its place is not needed any more
__device__ __forceinline__ void fetch_stage(Ring& ring, unsigned char* buffers,
                                            const unsigned char* from, int n) {
  int s = n % V5_STAGES;
  unsigned full = shared_at(ring.full + s), to = shared_at(buffers + s * STAGE_BYTES);
  wait_for(ring.empty + s, n / V5_STAGES % 2 ^ 1);
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full),
               "r"(STAGE_BYTES)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to), "l"(from + (long long)n * STAGE_BYTES), "r"(STAGE_BYTES), "r"(full)
      : "memory");
}

// 16 keys of a warp: rows g and g + 8. A lane unpacks group c of both, and knows the factor of the
// row whose scores it stores.
struct WholeKeys {
  unsigned codes[4][4];
  float factor;
  bool misfit;
};

__device__ __forceinline__ WholeKeys load_whole_keys(const unsigned* upper, const unsigned* lower) {
  int c = threadIdx.x % 4;
  WholeKeys keys = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned* row = i ? lower : upper;
    Scales scales = read_scales(row[16]);
    Table table = table_of(scales.shifts >> 8 * c);
    keys.misfit |= scales.misfit != 0;
    if (c % 2 == i) keys.factor = scales.factor;
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      unsigned eight = row[4 * c + word];
      keys.codes[word][i] = four_int8(eight, table) ^ 0x80808080u;
      keys.codes[word][2 + i] = four_int8(eight >> 16, table) ^ 0x80808080u;
    }
  }
  return keys;
}

__device__ __forceinline__ void start_pair(int* dots, const WholeKeys& keys, Matrix pair) {
  begin_products();
#pragma unroll
  for (int i = 0; i < 4; ++i)
    start_product_s8(dots, keys.codes[i], matrix_behind(pair, 2048 * i), i > 0);
  close_products();
}

// products with a query -> sums over heads of the keys in rows g and g + 8
__device__ __forceinline__ float2 add_products(const int* dots, const Query& query) {
  float numbers[4][4];
#pragma unroll
  for (int i = 0; i < 16; ++i) numbers[i / 4][i % 4] = (float)dots[i];
  return add_heads(numbers, query);
}

// One block: 256 keys, 64 for each of its 4 warp groups, and the queries of a range of `share`.
// odd_tile (tiles), zeros before, is 1 where a key of a tile does not fit, and then none of it is
// scored.
extern "C" __global__ void __launch_bounds__(32 * V5_WARPS, 1)
    scores_v5(const unsigned char* encoded, const unsigned char* keys, float* scores,
              unsigned* odd_tile, int tokens, long long count, int share) {
  extern __shared__ __align__(128) unsigned char buffers[];
  __shared__ Ring ring;
  int begin = blockIdx.y * share, left = min(tokens - begin, share);
  int stages = (left + 2 * PAIRS - 1) / (2 * PAIRS);
  int lane = threadIdx.x % 32, c = lane % 4;
  long long row = (long long)blockIdx.x * V5_KEYS + threadIdx.x / 32 * 16 + lane / 4;
  WholeKeys own = load_whole_keys((const unsigned*)(keys + min(row, count - 1) * RECORD_BYTES),
                                  (const unsigned*)(keys + min(row + 8, count - 1) * RECORD_BYTES));
  if (threadIdx.x < V5_STAGES) {
    unsigned full = shared_at(ring.full + threadIdx.x), empty = shared_at(ring.empty + threadIdx.x);
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(full));
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(empty),
                 "n"(V5_WARPS * ARRIVING));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (__syncthreads_or(own.misfit)) {
    if (threadIdx.x == 0) odd_tile[blockIdx.x] = 1;
    return;
  }
  encoded += (long long)(begin / 2) * PAIR_BYTES;
  for (int n = 0; n < min(stages, V5_STAGES) && threadIdx.x == 0; ++n)
    fetch_stage(ring, buffers, encoded, n);
  long long key = row + c % 2 * 8;
  float* out = scores + (long long)(begin + c / 2) * count + key;
  left = key < count ? left - c / 2 : 0;
  int dots[2][32];
  Matrix first = matrix_at(buffers, 64);
  for (int n = 0, s = 0, parity = 0; n < stages; ++n) {
    const unsigned char* weights = buffers + s * STAGE_BYTES + 2 * QUERY_BYTES;
    Matrix matrix = matrix_behind(first, s * STAGE_BYTES);
    int refill = n - 2 + V5_STAGES;  // goes where no warp is any more, or only a slow one
    if (threadIdx.x == 0 && n >= 2 && refill < stages) fetch_stage(ring, buffers, encoded, refill);
    wait_for(ring.full + s, parity);
    start_pair(dots[0], own, matrix);
    start_pair(dots[1], own, matrix_behind(matrix, PAIR_BYTES));
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      Query queries[2];
#pragma unroll
      for (int j = 0; j < 2; ++j)
        load_pair_weights(weights + i * PAIR_BYTES + j * WEIGHT_BYTES, queries[j]);
      i + 1 < PAIRS ? await_products<1>() : await_products<0>();
      settle_product(dots[i % 2]);
      float2 sums[2] = {add_products(dots[i % 2], queries[0]),
                        add_products(dots[i % 2] + 16, queries[1])};
      if (i + 2 < PAIRS) start_pair(dots[i % 2], own, matrix_behind(matrix, (i + 2) * PAIR_BYTES));
      float2 mine = c / 2 ? sums[1] : sums[0];
      float score = score_of_sum(c % 2 ? mine.y : mine.x, own.factor);
      if (left > 0) *out = score;
      out += kept(2 * count), left -= 2;  // a compiler makes 2 * count anew and then spills
    }
    __syncwarp();
    if (lane < ARRIVING)
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_at(ring.empty + s))
                   : "memory");
    if (++s == V5_STAGES) s = 0, parity ^= 1;
  }
}

// the queries and the tiles of keys that did not fit, as v4 scores them; no others are read
extern "C" __global__ void __launch_bounds__(256, BF16 ? 2 : 1)
    repair_v5(const float* q, const float* w, const unsigned char* keys, const unsigned* odd,
              const unsigned* odd_tile, float* scores, long long tokens, long long count) {
  extern __shared__ __align__(128) unsigned char buffers[];
  long long share = (tokens + gridDim.x - 1) / gridDim.x, tiles = (count + V5_KEYS - 1) / V5_KEYS;
  long long begin = blockIdx.x * share, end = min(tokens, begin + share);
  unsigned any_query = 0, any_tile = 0;
  for (long long t = begin + threadIdx.x; t < end; t += blockDim.x) any_query |= odd[t];
  for (long long i = threadIdx.x; i < tiles; i += blockDim.x) any_tile |= odd_tile[i];
  any_query = __syncthreads_or(any_query), any_tile = __syncthreads_or(any_tile);
  if (!any_query && !any_tile) return;
  for (long long t = begin; t < end; ++t) {
    for (long long tile = 0; tile < tiles;) {
      long long first = tile;
      // no more at once than an int counts bytes of
      while (tile < tiles && tile - first < 65536 && (odd[t] || odd_tile[tile])) ++tile;
      if (first == tile) {
        ++tile;
        continue;
      }
      int several = (int)min((tile - first) * V5_KEYS, count - first * V5_KEYS);
      const unsigned char* from = keys + first * V5_KEYS * RECORD_BYTES;
      float* out = scores + t * count + first * V5_KEYS;
      stream_scores<OnFp8<>, true>(
          buffers, several, q + t * HEADS * CHANNELS, w + t * HEADS, true,
          [&](int i) { return from + i * RECORD_BYTES; },
          [&](int i, float score) { out[i] = score; });
      __syncthreads();  // the query's place in shared memory is free again
    }
  }
}

// v6 is v4 by INT8 products of whole keys, too, but of single warps (score_int8.cuh): unpacking
// takes more instructions than in v4, and those that scaled and added groups are gone. A block has
// an SM to itself, so that few blocks unpack a query. One with a key that does not fit scores all of
// its keys again as v4 does. On an H200, in the cases named at v4: 92.9, 351 and 17.0 us.
//
// Slower, and gone: products of warp groups; warps that never are more than two turns ahead of
// others; warps that take the next tile which nobody has; five warps for each scheduler instead of
// four, with 96 registers. Unpacking and products each add a fifth to the time of all else.
extern "C" __global__ void __launch_bounds__(512, 1)
    scores_v6(const float* q, const float* w, const unsigned char* keys, float* scores,
              long long count, long long keys_per_query, long long chunk) {
  score_chunk<OnInt8<16>>(q, w, keys, scores, count, keys_per_query, chunk);
}
#endif
