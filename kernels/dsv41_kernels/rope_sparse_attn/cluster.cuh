// v5 `cluster`, see kernel.cu. Eight blocks of two warpgroups per token, for calls of few tokens.
//
// Block r scores chunks r and r + 8, and adds the values of the 64 channels from 64 r on over all
// chunks. Nothing that is a sum in v4 is divided between blocks, so there is nothing to combine and
// o has v4's bits, whichever of the two a call takes:
//
//   left  reads q    | scores its chunks | weights p of its chunks, sums | o: products over all
//   right decodes    | (waits)           | decodes its 64 channels       |    chunks, left alone
//         its chunks | maxima -> notes   | p and sums -> notes           |
//
// The second and the third bar are barriers of the cluster. `notes` hold what crosses them, per
// token and chunk: maxima of 64 heads, parts of sums, p as wgmma.cuh wants it; written once, read
// from L2. The chain of dependent steps is two chunks of v4 and two barriers long, not ten chunks.

constexpr int BLOCKS = 8, MOST_CHUNKS = 12;
constexpr int NUMBERS = 64 + 2 * GROUP, NOTE_BYTES = NUMBERS * 4 + BLOCK;

// The barrier of the cluster, in two halves: what was written before the first is seen after the
// second.
__device__ void arrive_cluster() {
  __threadfence();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ void wait_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

struct Note {  // of one chunk: maxima (64,), parts of sums (2, GROUP), weights (64 heads, CHUNK)
  char* at;
  __device__ float* maxima() const { return reinterpret_cast<float*>(at); }
  __device__ float* sums() const { return maxima() + 64; }
  __device__ char* weights() const { return at + NUMBERS * 4; }
};

// Half of the 64 channels from 64 block on of one record: 32 channels.
struct Piece {
  uint4 codes[2];
  unsigned scales;

  __device__ void read(const unsigned char* record, bool recent, bool real, int block, int odd) {
    codes[0] = read_16(record + (recent ? 64 * block + 32 * odd : 32 * block + 16 * odd), real);
    codes[1] = read_16(record + 64 * block + 32 * odd + 16, real && recent);
    const unsigned char* at = record + (recent ? 512 + 2 * block + odd : 256 + 4 * block + 2 * odd);
    scales = real ? __ldg(at) | (recent ? 0 : __ldg(at + 1) << 8) : 0;
  }

  __device__ void place(char* values, int row, bool recent, int odd) const {
    const uint2 scale = recent ? make_uint2(e8m0_scale(scales), 0) : e4m3_scales(scales);
    const uint4 a = codes[0], b = codes[1];
    *block_piece(values, row, 4 * odd) =
        recent ? place_e4m3(a.x, a.y, scale.x) : place_e2m1(a.x, scale.x);
    *block_piece(values, row, 4 * odd + 1) =
        recent ? place_e4m3(a.z, a.w, scale.x) : place_e2m1(a.y, scale.x);
    *block_piece(values, row, 4 * odd + 2) =
        recent ? place_e4m3(b.x, b.y, scale.x) : place_e2m1(a.z, scale.y);
    *block_piece(values, row, 4 * odd + 3) =
        recent ? place_e4m3(b.z, b.w, scale.x) : place_e2m1(a.w, scale.y);
  }
};

// These channels of all chunks, a block of 64 rows per chunk, by one group; four chunks on their
// way.
__device__ void decode_channels(char* values, const long long* rows, int chunks, int block,
                                const Lists& lists) {
  constexpr int AHEAD = 4;
  const int row = threadIdx.x % GROUP / 2, odd = threadIdx.x % 2;
  for (int first = 0; first < chunks; first += AHEAD) {
    Piece pieces[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int place = (first + i) * CHUNK + row;
      const bool recent = place < lists.near_width, real = first + i < chunks && rows[place] >= 0;
      const unsigned char* record = recent ? lists.near : lists.far;
      if (real) record += rows[place] * (recent ? NEAR_BYTES : FAR_BYTES);
      pieces[i].read(record, recent, real, block, odd);
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
      if (first + i < chunks)
        pieces[i].place(values + (first + i) * BLOCK, row,
                        (first + i) * CHUNK + row < lists.near_width, odd);
  }
}

extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(2 * GROUP, 1)
    cluster(const float* q, const long long* positions, const float* freqs, int pairs,
            const unsigned char* near, long long near_count, const long long* near_rows,
            int near_width, const unsigned char* far, long long far_count,
            const long long* far_rows, int far_width, const float* sink, unsigned long long* bad,
            float* out, char* notes) {
  const Lists lists = {near,      near_count, near_rows, near_width, far,
                       far_count, far_rows,   far_width, bad};
  const int chunks = (lists.width() + CHUNK - 1) / CHUNK, group = threadIdx.x / GROUP;
  const int lane = threadIdx.x % 32, low = threadIdx.x % GROUP / 32 * 16 + lane / 4;
  const int block = blockIdx.x % BLOCKS;
  const long long token = blockIdx.x / BLOCKS;
  char* queries = reinterpret_cast<char*>(shared);  // (64 heads, 512), then
  char* keys = queries + KEYS_BYTES;                // two chunks of (CHUNK, 512)
  char* weights = queries;                          // later (chunks, 64 heads, CHUNK), then
  char* values = queries + MOST_CHUNKS * BLOCK;     // (chunks, CHUNK, 64 channels)
  float* numbers = reinterpret_cast<float*>(keys + 2 * KEYS_BYTES);            // (chunks, NUMBERS)
  float2* angle = reinterpret_cast<float2*>(numbers + MOST_CHUNKS * NUMBERS);  // (pairs,)
  long long* rows = reinterpret_cast<long long*>(angle + pairs);               // (chunks, CHUNK)
  uint2* valid = reinterpret_cast<uint2*>(rows + chunks * CHUNK);  // (chunks,) bits of places
  auto note = [&](int chunk) { return Note{notes + (token * chunks + chunk) * NOTE_BYTES}; };

  const bool past_the_end = read_lists(rows, valid, lists, token, chunks, 2 * GROUP);
  for (int i = threadIdx.x; i < pairs; i += 2 * GROUP)
    angle[i] = angle_of(positions[token], freqs[i], false);
  __syncthreads();
  if (group == 1) {
    for (int i = 0; block + i * BLOCKS < chunks; ++i)
      make_chunk(keys + i * KEYS_BYTES, rows, block + i * BLOCKS, lists, [] {});
  } else {
    const float4* q4 = reinterpret_cast<const float4*>(q + token * ALL_HEADS * C);
#pragma unroll 16
    for (int i = threadIdx.x; i < ALL_HEADS * C / 8; i += GROUP)
      *block_piece(queries, i / (C / 8), i % (C / 8)) = query_piece(q4, i, angle, pairs);
  }
  publish();
  __syncthreads();

  float s[2][32];  // left only: scores of its two chunks
  if (group == 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int chunk = block + i * BLOCKS;
      if (chunk >= chunks) break;
      score(s[i], queries, keys + i * KEYS_BYTES);
      const float first = mask_and_max(s[i], 0, valid[chunk]),
                  second = mask_and_max(s[i], 1, valid[chunk]);
      if (lane % 4 == 0) note(chunk).maxima()[low] = first, note(chunk).maxima()[low + 8] = second;
    }
  }
  __syncthreads();  // nobody reads q and keys any more
  arrive_cluster();
  if (group == 1) decode_channels(values, rows, chunks, block, lists);
  wait_cluster();
  if (group == 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int chunk = block + i * BLOCKS;
      if (chunk >= chunks) break;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float top = NEVER;
#pragma unroll 4
        for (int c = 0; c <= chunk; ++c) top = fmaxf(top, fresh(note(c).maxima() + low + 8 * n));
        note(chunk).sums()[n * GROUP + threadIdx.x] = exponentials(s[i], n, top);
      }
      store_weights(note(chunk).weights(), s[i], low);
    }
  }
  arrive_cluster();
  wait_cluster();
#pragma unroll 8
  for (int i = threadIdx.x; i < chunks * (NOTE_BYTES / 16); i += 2 * GROUP) {
    const int chunk = i / (NOTE_BYTES / 16), part = i % (NOTE_BYTES / 16) - NUMBERS / 4;
    char* to = part < 0 ? reinterpret_cast<char*>(numbers + (chunk + 1) * NUMBERS)
                        : weights + chunk * BLOCK;
    reinterpret_cast<uint4*>(to)[part] = fresh(reinterpret_cast<const uint4*>(note(0).at) + i);
  }
  publish();
  __syncthreads();

  float* staged = reinterpret_cast<float*>(shared);
  if (group == 0) {
    float o[32] = {}, top[2] = {NEVER, NEVER}, total[2] = {0.f, 0.f}, decay[2];
    for (int chunk = 0; chunk < chunks; ++chunk) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float before = top[n];
        const float* of_chunk = numbers + chunk * NUMBERS;
        top[n] = fmaxf(before, of_chunk[low + 8 * n]);
        decay[n] = exp2f(before - top[n]);
        total[n] = __fmaf_rn(total[n], decay[n], of_chunk[64 + n * GROUP + threadIdx.x]);
      }
      shrink_values<32>(o, decay[0], decay[1]);
      const unsigned long long a = matrix(weights + chunk * BLOCK),
                               b = matrix(values + chunk * BLOCK);
      begin_products();
#pragma unroll
      for (int k = 0; k < CHUNK / 16; ++k)
        product_64_down(o, a + 32 / 16 * k, b + 2048 / 16 * k, 1);
      finish_products();
    }
    float norm[2] = {norm_of(total[0], top[0], sink[low]),
                     norm_of(total[1], top[1], sink[low + 8])};
    if (past_the_end) norm[0] = norm[1] = not_a_number();
    meet(READERS, GROUP);  // the weights have been read
    stage_values<32>(staged, 64 + 4, o, low, norm[0], norm[1]);
  }
  __syncthreads();
  float* to = out + token * ALL_HEADS * C;
  write_rows(to, staged, 64 + 4, 64 * block, 64, ALL_HEADS, angle, pairs, 2 * GROUP);
}
