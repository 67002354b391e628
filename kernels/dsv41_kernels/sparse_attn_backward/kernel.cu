// Gradients of attention over listed records: by q, by the records, by the sink.
//
//   dout, q, dq (T, H, C) f32; dout is by o after, q before, dq by q before its rotation when pairs
//   is not 0; records, lists, sink and macros as in sparse_attn/kernel.cu; share (T, K).
// Many queries read one record, and no order of atomic float additions would repeat its bits. So:
//
//   1 `count_readers`    how many list entries name each record: integer atomics, whose result does
//                        not depend on their order
//   2 `places`           sums of the counts: where the parts of each record's gradient begin
//   3 `attend_backward`  a block per token: scores and weights again, dq, and for every entry its
//                        part, written at that record's next free place. Who comes first is chance
//   4 `add_parts`        a block per record adds its parts as integers, in units that are a tiny
//                        fraction of the largest part. Integers have no order either, and the sum
//                        is far closer than a float32 can tell. One more block per head adds dsink
//
// Bytes: a part is written and read once, 2 * 256 for C = 64. Adding q and dout of every reader to
// a record instead would read 4 KB per entry through L2; sorting the entries, to add in order,
// takes many more launches than 1 and 2.

// build: C=64 NEAR=1 FAR=2 BF16=1 H=8
// build: C=64 NEAR=0 FAR=0 BF16=0 H=8
// build: C=128 NEAR=0 FAR=0 BF16=0 H=16

#include "records.cuh"
#include "attention.cuh"

// Places are counted from the window records on: global record r is number near_count + r.
__device__ long long number(const Lists& lists, int place, long long row) {
  return place < lists.near_width ? row : lists.near_count + row;
}

extern "C" __global__ void count_readers(const unsigned char* near, long long near_count,
                                         const long long* near_rows, int near_width,
                                         const unsigned char* far, long long far_count,
                                         const long long* far_rows, int far_width, long long tokens,
                                         int* begin) {
  const Lists lists = {near, near_count, near_rows, near_width,
                       far,  far_count,  far_rows,  far_width};
  long long at = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (at >= tokens * lists.width()) return;
  bool past_the_end = false;
  int place = at % lists.width();
  long long row = lists.row(at / lists.width(), place, past_the_end);
  if (row >= 0) atomicAdd(begin + number(lists, place, row), 1);
}

// begin[i] becomes the sum of begin[0 .. i - 1]; one block of 1024 threads, each a run of
// neighbours.
extern "C" __global__ void __launch_bounds__(1024) places(int* begin, long long count) {
  __shared__ int sums[1024];
  const int thread = threadIdx.x;
  const long long each = (count + 1023) / 1024, first = thread * each;
  const long long last = first + each < count ? first + each : count;
  int sum = 0;
#pragma unroll 8
  for (long long i = first; i < last; ++i) sum += begin[i];
  sums[thread] = sum;
  __syncthreads();
  for (int step = 1; step < 1024; step *= 2) {
    int before = thread >= step ? sums[thread - step] : 0;
    __syncthreads();
    sums[thread] += before;
    __syncthreads();
  }
  sum = sums[thread] - sum;
  for (long long i = first; i < last; ++i) {
    int more = begin[i];
    begin[i] = sum;
    sum += more;
  }
}

// weights: q K becomes p; slopes: dout K becomes ds. The softmax is in one piece, the sink
// included. A thread takes one head and every (THREADS / H)th record; partial (3, 4 warps, H) is
// room for sums.
__device__ void softmax_slopes(float* weights, float* slopes, const long long* rows, int padded,
                               float* partial, float sink, float* dsink) {
  const int thread = threadIdx.x, warp = thread / 32, head = thread % H;
  float top = sink, total = 0.f, delta = 0.f;
  for (int j = thread / H; j < padded; j += THREADS / H) {
    float& s = weights[j * H + head];
    s = masked_score(s, rows[j]);
    top = fmaxf(top, s);
  }
  top = lanes_max(top);
  if (thread % 32 < H) partial[warp * H + head] = top;
  __syncthreads();
  for (int w = 0; w < 4; ++w) top = fmaxf(top, partial[w * H + head]);
  if (top == minus_infinity()) top = 0.f;  // no record and no sink: all weights are 0
  for (int j = thread / H; j < padded; j += THREADS / H) {
    float p = expf(weights[j * H + head] - top);
    weights[j * H + head] = p;
    total += p, delta += p * slopes[j * H + head];
  }
  total = lanes_sum(total), delta = lanes_sum(delta);
  if (thread % 32 < H)
    partial[(4 + warp) * H + head] = total, partial[(8 + warp) * H + head] = delta;
  __syncthreads();
  const float rest = expf(sink - top), scale = 1.f / sqrtf((float)C);
  total = rest, delta = 0.f;
  for (int w = 0; w < 4; ++w) {
    total += partial[(4 + w) * H + head];
    delta += partial[(8 + w) * H + head];
  }
  if (total == 0.f) total = 1.f;
  delta /= total;
  for (int j = thread / H; j < padded; j += THREADS / H) {
    float p = weights[j * H + head] / total;
    weights[j * H + head] = p;
    slopes[j * H + head] = p * (slopes[j * H + head] - delta) * scale;
  }
  if (thread < H) dsink[head] = -(rest / total) * delta;
  __syncthreads();
}

// parts[place[j]] = p_j dout + ds_j q, over all heads: a thread keeps 4 channels of all heads' dout
// and q and walks over the records.
__device__ void write_parts(float4* parts, const int* place, int width, const float* weights,
                            const float* slopes, const float4* wanted, const float4* queries) {
  const int quad = threadIdx.x % QUADS;
  float4 value[H], key[H];
#pragma unroll
  for (int h = 0; h < H; ++h)
    value[h] = wanted[h * QUADS + quad], key[h] = queries[h * QUADS + quad];
  for (int j = threadIdx.x / QUADS; j < width; j += THREADS / QUADS) {
    if (place[j] < 0) continue;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int h = 0; h < H; h += 4) {
      const float4 p = *reinterpret_cast<const float4*>(weights + j * H + h);
      const float4 ds = *reinterpret_cast<const float4*>(slopes + j * H + h);
      add_product(sum, p.x, value[h]), add_product(sum, ds.x, key[h]);
      add_product(sum, p.y, value[h + 1]), add_product(sum, ds.y, key[h + 1]);
      add_product(sum, p.z, value[h + 2]), add_product(sum, ds.z, key[h + 2]);
      add_product(sum, p.w, value[h + 3]), add_product(sum, ds.w, key[h + 3]);
    }
    parts[(long long)place[j] * QUADS + quad] = sum;
  }
}

extern __shared__ float4 shared[];

extern "C" __global__ void __launch_bounds__(THREADS)
    attend_backward(const float* dout, const float* q, const long long* positions,
                    const float* freqs, int pairs, const unsigned char* near, long long near_count,
                    const long long* near_rows, int near_width, const unsigned char* far,
                    long long far_count, const long long* far_rows, int far_width,
                    const float* sink, unsigned long long* bad, int* next, float* dq, float4* parts,
                    float* dsinks, float* share) {
  const Lists lists = {near,      near_count, near_rows, near_width, far,
                       far_count, far_rows,   far_width, bad};
  const int width = lists.width(), padded = width > 32 ? (width + 31) / 32 * 32 : 64;
  const int thread = threadIdx.x;
  const long long token = blockIdx.x;
  float4* records = shared;                                       // (padded, STRIDE)
  float4* queries = records + padded * STRIDE;                    // (H, QUADS)
  float4* wanted = queries + H * QUADS;                           // (H, QUADS), the gradient by o
  float* weights = reinterpret_cast<float*>(wanted + H * QUADS);  // (padded, H): s, then p
  float* slopes = weights + padded * H;                           // (padded, H): dp, then ds
  float* partial = slopes + padded * H;                           // (3, 4 warps, H)
  float2* angle = reinterpret_cast<float2*>(partial + 12 * H);    // (pairs,)
  long long* rows = reinterpret_cast<long long*>(angle + pairs);  // (padded,)
  int* place = reinterpret_cast<int*>(rows + padded);             // (padded,) of parts, -1 for none

  bool past_the_end = false;
  for (int j = thread; j < padded; j += THREADS) {
    rows[j] = lists.row(token, j, past_the_end);
    place[j] = rows[j] < 0 ? -1 : atomicAdd(next + number(lists, j, rows[j]), 1);
  }
  if (pairs) angles(angle, freqs, pairs, positions[token]);
  for (int i = thread; i < H * QUADS; i += THREADS) {
    queries[i] = reinterpret_cast<const float4*>(q)[token * H * QUADS + i];
    wanted[i] = reinterpret_cast<const float4*>(dout)[token * H * QUADS + i];
  }
  past_the_end = __syncthreads_or(past_the_end);
  turn(queries, angle, pairs, false);
  turn(wanted, angle, pairs, false);  // o was turned back, so its gradient is turned forward
  __syncthreads();
  for (int i = thread; pairs && i < H * QUADS; i += THREADS) queries[i] = rounded(queries[i]);
  gather(records, rows, padded, lists);
  __syncthreads();

  multiply(weights, records, queries, padded);
  multiply(slopes, records, wanted, padded);
  __syncthreads();
  softmax_slopes(weights, slopes, rows, padded, partial, sink[thread % H], dsinks + token * H);
  for (int k = thread; k < far_width; k += THREADS) {
    float sum = 0.f;
    for (int h = 0; h < H; ++h) sum += weights[(near_width + k) * H + h];
    share[token * far_width + k] = sum / H;
  }
  write_parts(parts, place, width, weights, slopes, wanted, queries);
  __syncthreads();

  weighted_sums(queries, slopes, records, padded);
  turn(queries, angle, pairs, true);
  __syncthreads();
  const float nan = not_a_number();
  for (int i = thread; i < H * QUADS; i += THREADS)
    reinterpret_cast<float4*>(dq)[token * H * QUADS + i] =
        past_the_end ? make_float4(nan, nan, nan, nan) : queries[i];
}

constexpr int GROUPS = 256 / C;  // of a block that add up every GROUPSth part

// The sum of x[0], x[stride], .. x[(count - 1) * stride] by the GROUPS threads of a channel; any
// order.
__device__ float exact_sum(const float* x, int count, int group, unsigned* tops, long long* sums) {
  const int channel = threadIdx.x % C;
  unsigned top = 0;
#pragma unroll 8
  for (int i = group; i < count; i += GROUPS)
    top = max(top, __float_as_uint(x[(long long)i * C]) & 0x7fffffffu);
  tops[threadIdx.x] = top;
  __syncthreads();
  for (int g = 0; g < GROUPS; ++g) top = max(top, tops[g * C + channel]);
  const int exponent = top >> 23;       // every |x| < 2^(exponent - 126)
  const int spare = 32 - __clz(count);  // count < 2^spare
  const int shift = 62 - spare - (exponent - 126);
  const double unit = __longlong_as_double((1023LL - shift) << 52);
  const double many = __longlong_as_double((1023LL + shift) << 52);
  long long sum = 0;
#pragma unroll 8
  for (int i = group; i < count; i += GROUPS) sum += __double2ll_rn(x[(long long)i * C] * many);
  sums[threadIdx.x] = sum;
  __syncthreads();
  for (int g = 1; g < GROUPS; ++g) sum += sums[(threadIdx.x + g * C) % 256];
  return exponent < 255 ? (float)(sum * unit) : not_a_number();  // inf and NaN are no integers
}

// end[r] is where the readers of record r end (attend_backward moved it there), begin is end[r -
// 1].
extern "C" __global__ void __launch_bounds__(256)
    add_parts(const float* parts, const int* end, float* drecords, const float* dsinks,
              float* dsink, long long tokens) {
  __shared__ unsigned tops[256];
  __shared__ long long sums[256];
  const int thread = threadIdx.x, channel = thread % C;
  const long long record = (long long)blockIdx.x - H;
  if (record >= 0) {
    int begin = record ? end[record - 1] : 0;
    const float* first = parts + (long long)begin * C + channel;
    float sum = exact_sum(first, end[record] - begin, thread / C, tops, sums);
    if (thread < C) drecords[record * C + channel] += sum;
    return;
  }
  const int head = blockIdx.x;
  double sum = 0.;
  for (long long token = thread; token < tokens; token += 256) sum += dsinks[token * H + head];
  double* all = reinterpret_cast<double*>(sums);
  all[thread] = sum;
  __syncthreads();
  for (int n = 1; thread == 0 && n < 256; ++n) sum += all[n];
  if (thread == 0) dsink[head] += sum;
}
