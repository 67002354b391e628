// The index loss and its gradients; the definition is dsv41/train/indexer.py, loss in losses.py.
//
// q (T, HEADS, CHANNELS) f32, w (T, HEADS) f32, keys (N, RECORD_BYTES), rows (T, k) i64 of the selected
// keys, -1 = none, attention (T, k) f32, weight -> losses (T), dq, dw like q, w, dkeys (N, CHANNELS).
// Scores are rounded as in score.cuh; gradients are float32, and rounding is passed straight through.
//
// Many queries select one key, and float atomics would add their gradients in any order. So the first
// kernel notes in a bit matrix which queries selected which key (an integer "or" has no order), and
// the second one walks each key's bits from the first query to the last.
// build: HEADS=4 CHANNELS=32 PACKED=0 BF16=0
// build: HEADS=4 CHANNELS=32 PACKED=1 BF16=1
// build: HEADS=32 CHANNELS=128 PACKED=1 BF16=1
#include "score.cuh"

__device__ __forceinline__ float warp_sum(float x) {
  for (int d = 16; d; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
  return x;
}

// the sum or the largest of x over the block, in a fixed order, for all threads
template <bool LARGEST>
__device__ __forceinline__ float over_block(float x) {
  __shared__ float parts[32];
  for (int d = 16; d; d /= 2) {
    float other = __shfl_xor_sync(0xffffffffu, x, d);
    x = LARGEST ? fmaxf(x, other) : x + other;
  }
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  x = parts[0];
  for (int i = 1; i < blockDim.x / 32; ++i) x = LARGEST ? fmaxf(x, parts[i]) : x + parts[i];
  __syncthreads();
  return x;
}

// scores (k) -> d loss / d score (k) in place; the loss, for all threads
__device__ __forceinline__ float compare(float* scores, const float* attention, const long long* rows,
                                         int k) {
  float total = 0.f, top = -3.4e38f, mass = 0.f, loss = 0.f;
  for (int s = threadIdx.x; s < k; s += blockDim.x) total += attention[s], top = fmaxf(top, scores[s]);
  total = over_block<false>(total), top = over_block<true>(top);
  for (int s = threadIdx.x; s < k; s += blockDim.x) mass += expf(scores[s] - top);
  float log_mass = logf(over_block<false>(mass));
  for (int s = threadIdx.x; s < k; s += blockDim.x) {
    float a = attention[s] / (total > 0.f ? total : 1.f), log_q = scores[s] - top - log_mass;
    if (a > 0.f) loss += a * (logf(a) - log_q);
    scores[s] = total > 0.f && rows[s] >= 0 ? expf(log_q) - a : 0.f;
  }
  return over_block<false>(loss);
}

// v1: one block of threads per query. ddots (T, HEADS, k) f32 and seen (N, words) u32, which starts
// as zeros, are for the second kernel.
extern "C" __global__ void __launch_bounds__(128, 2)
    queries_v1(const float* q, const float* w, const unsigned char* keys, const long long* rows,
               const float* attention, float weight, float* losses, float* dq, float* dw, float* ddots,
               unsigned* seen, long long words, int k, long long count) {
  extern __shared__ float dots[];  // (HEADS, k), then scores (k)
  __shared__ __align__(16) float my_q[HEADS * CHANNELS];
  __shared__ float my_w[HEADS];
  float* scores = dots + HEADS * k;
  long long t = blockIdx.x;
  const long long* mine = rows + t * k;
  load_query(q, w, t, my_q, my_w);
  __syncthreads();
  for (int s = threadIdx.x; s < k; s += blockDim.x) {
    float some[HEADS];
    long long row = mine[s] < count ? mine[s] : -1;
    head_dots(my_q, keys + max(row, 0ll) * RECORD_BYTES, some);
    for (int a = 0; a < HEADS; ++a) dots[a * k + s] = some[a];
    scores[s] = row < 0 ? -1e30f : weigh_heads(some, my_w);
    if (row >= 0) atomicOr(&seen[row * words + t / 32], 1u << t % 32);
  }
  __syncthreads();
  float loss = compare(scores, attention + t * k, mine, k);
  if (threadIdx.x == 0) losses[t] = loss;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int a = warp; a < HEADS; a += blockDim.x / 32) {
    float sum = 0.f;
    for (int s = lane; s < k; s += 32) {
      float d = weight * scores[s], dot = dots[a * k + s];
      sum += fmaxf(dot, 0.f) * d;
      dots[a * k + s] = ddots[(t * HEADS + a) * k + s] = dot > 0.f ? d * my_w[a] : 0.f;
    }
    sum = warp_sum(sum);
    if (lane == 0) dw[t * HEADS + a] = sum;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < HEADS * CHANNELS; i += blockDim.x) {
    int a = i / CHANNELS, c = i % CHANNELS;
    float sum = 0.f;
    for (int s = 0; s < k; ++s) {
      if (mine[s] < 0 || mine[s] >= count) continue;
      sum += dots[a * k + s] * decode_one(keys + mine[s] * RECORD_BYTES, c);
    }
    dq[t * HEADS * CHANNELS + i] = sum;
  }
}

// Lanes hold channels of sum: += d loss / d key of query t, for the place s where its list has the row.
__device__ __forceinline__ void add_place(float* sum, const float* q, const float* ddots, long long t,
                                          int s, int k, float factor) {
  const float *from = ddots + t * HEADS * k + s, *head = q + t * HEADS * CHANNELS + threadIdx.x % 32;
#pragma unroll
  for (int a = 0; a < HEADS; ++a)
#pragma unroll
    for (int g = 0; g < GROUPS; ++g)
      sum[g] += factor * from[a * k] * head[a * CHANNELS + GROUP * g];
}

// The queries t[0] .. t[count - 1], at least one; all their lists are searched, then all their numbers
// fetched, so that one wait serves AHEAD of them. A list that has the row twice adds both.
const int AHEAD = 4;

__device__ __forceinline__ void add_queries(float* sum, const float* q, const long long* rows,
                                            const float* ddots, const long long* t, int count,
                                            long long row, int k) {
  for (int base = 0; base < k; base += 32) {
    int s = base + threadIdx.x % 32;
    unsigned hits[AHEAD], any = 0;
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      hits[i] = __ballot_sync(0xffffffffu, i < count && s < k && rows[t[i] * k + min(s, k - 1)] == row);
      any |= hits[i];
    }
    if (any) {
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        int place = base + (hits[i] ? __ffs(hits[i]) - 1 : 0);
        add_place(sum, q, ddots, t[i], place, k, hits[i] ? 1.f : 0.f);
      }
      for (int i = 0; i < AHEAD; ++i)
        for (unsigned more = hits[i] & (hits[i] - 1); more; more &= more - 1)
          add_place(sum, q, ddots, t[i], base + __ffs(more) - 1, k, 1.f);
    }
  }
}

// v1: one block of 8 warps per key; a warp takes every eighth word of bits, its lanes the channels,
// and at the end the warps' sums are added from the first to the last.
extern "C" __global__ void __launch_bounds__(256)
    keys_v1(const float* q, const long long* rows, const float* ddots, const unsigned* seen,
            float* dkeys, long long words, int k) {
  __shared__ float sums[8][CHANNELS];
  long long row = blockIdx.x;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float sum[GROUPS] = {};
  for (long long base = 0; base < words; base += 256) {
    long long word = base + 8 * lane + warp;
    unsigned bits = word < words ? seen[row * words + word] : 0u;
    for (unsigned left = __ballot_sync(0xffffffffu, bits); left; left &= left - 1) {
      int owner = __ffs(left) - 1;
      long long first = 32 * (base + 8 * owner + warp);
      for (unsigned some = __shfl_sync(0xffffffffu, bits, owner); some;) {
        long long t[AHEAD];
        int count = 0;
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
          count += some != 0;
          t[i] = first + (some ? __ffs(some) - 1 : 0);
          some &= some - 1;
        }
        add_queries(sum, q, rows, ddots, t, count, row, k);
      }
    }
  }
  for (int g = 0; g < GROUPS; ++g) sums[warp][GROUP * g + lane] = sum[g];
  __syncthreads();
  if (threadIdx.x >= CHANNELS) return;
  float total = sums[0][threadIdx.x];
  for (int i = 1; i < 8; ++i) total += sums[i][threadIdx.x];
  dkeys[row * CHANNELS + threadIdx.x] = total;
}
