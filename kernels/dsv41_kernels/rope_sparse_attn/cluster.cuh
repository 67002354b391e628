// v5 `cluster`, see kernel.cu. Eight blocks of four warpgroups per token, for calls of few tokens.
//
// Block r scores chunks r and r + 8, and adds the values of the 64 channels from 64 r on over all
// chunks. Nothing that is a sum in v4 is divided between blocks, so there is nothing to combine and
// o has v4's bits, whichever of the two a call takes:
//
//   groups 0, 1  read q         | score a chunk each | weigh it       | o: products over all
//   groups 2, 3  decode a chunk | read bytes of its  | decode those   |    chunks, by group 0
//                each           | 64 channels        |                |
//
// The second and the third bar are barriers of the cluster. `notes` hold what crosses them, per
// token and chunk: maxima of 64 heads, parts of sums, p as wgmma.cuh wants it; written once, read
// from L2. The chain of dependent steps is one chunk of v4 and two barriers long, not ten chunks.

constexpr int BLOCKS = 8, MOST_CHUNKS = 12;
constexpr int NUMBERS = 64 + 2 * GROUP, NOTE_BYTES = NUMBERS * 4 + BLOCK;

// The barrier of the cluster, in two halves: what was written before the first, in global memory
// too, is seen after the second.
__device__ void arrive_cluster() {
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

// These channels of all chunks, a block of 64 rows per chunk, by two groups: every second chunk is
// one group's. All bytes are on their way at once.
struct Channels {
  Piece pieces[MOST_CHUNKS / 2];

  __device__ static int row() { return threadIdx.x % GROUP / 2; }
  __device__ static int chunk_of(int i) { return 2 * i + threadIdx.x / GROUP % 2; }

  __device__ void read(const long long* rows, int chunks, int block, const Lists& lists) {
#pragma unroll
    for (int i = 0; i < MOST_CHUNKS / 2; ++i) {
      const int place = chunk_of(i) * CHUNK + row();
      const bool recent = place < lists.near_width, listed = chunk_of(i) < chunks;
      const long long at = listed ? rows[place] : -1;
      const unsigned char* record = recent ? lists.near : lists.far;
      if (at >= 0) record += at * (recent ? NEAR_BYTES : FAR_BYTES);
      pieces[i].read(record, recent, at >= 0, block, threadIdx.x % 2);
    }
  }

  __device__ void place(char* values, int chunks, int near_width) const {
#pragma unroll
    for (int i = 0; i < MOST_CHUNKS / 2; ++i)
      if (chunk_of(i) < chunks)
        pieces[i].place(values + chunk_of(i) * BLOCK, row(),
                        chunk_of(i) * CHUNK + row() < near_width, threadIdx.x % 2);
  }
};

__device__ void make_one(char* keys, const long long* rows, int chunk, const Lists& lists) {
  Part part;
  part.read_first(rows, chunk, lists), part.read_rest();
  if (part.recent)
    part.place_near(keys);
  else
    part.place_far<0>(keys), part.place_far<1>(keys);
}

extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(4 * GROUP, 1)
    cluster(const float* q, const long long* positions, const float* freqs, int pairs,
            const unsigned char* near, long long near_count, const long long* near_rows,
            int near_width, const unsigned char* far, long long far_count,
            const long long* far_rows, int far_width, const float* sink, unsigned long long* bad,
            float* out, char* notes) {
  const Lists lists = {near,      near_count, near_rows, near_width, far,
                       far_count, far_rows,   far_width, bad};
  const int chunks = (lists.width() + CHUNK - 1) / CHUNK, group = threadIdx.x / GROUP;
  const int lane = threadIdx.x % 32, low = threadIdx.x % GROUP / 32 * 16 + lane / 4;
  const int block = blockIdx.x % BLOCKS, chunk = block + group % 2 * BLOCKS;
  const bool scores = group < 2 && chunk < chunks;
  const long long token = blockIdx.x / BLOCKS;
  char* queries = reinterpret_cast<char*>(shared);  // (64 heads, 512), then
  char* keys = queries + KEYS_BYTES;                // two chunks of (CHUNK, 512)
  char* weights = queries;                          // later (chunks, 64 heads, CHUNK), then
  char* values = queries + MOST_CHUNKS * BLOCK;     // (chunks, CHUNK, 64 channels)
  float* numbers = reinterpret_cast<float*>(keys + 2 * KEYS_BYTES);            // (chunks, NUMBERS)
  float2* angle = reinterpret_cast<float2*>(numbers + MOST_CHUNKS * NUMBERS);  // (pairs,)
  long long* rows = reinterpret_cast<long long*>(angle + pairs);               // (chunks, CHUNK)
  uint2* valid = reinterpret_cast<uint2*>(rows + chunks * CHUNK);  // (chunks,) bits of places
  auto note = [&](int of) { return Note{notes + (token * chunks + of) * NOTE_BYTES}; };

  for (int i = 4 * GROUP - 1 - threadIdx.x; i < pairs; i += 4 * GROUP)
    angle[i] = angle_of(positions[token], freqs[i], false);
  const bool past_the_end = read_lists(rows, valid, lists, token, chunks, 4 * GROUP);
  if (group < 2) {
    const float4* q4 = reinterpret_cast<const float4*>(q + token * ALL_HEADS * C);
    load_columns<8>(queries, q4, 0, C / 8, angle, pairs);
  } else if (chunk < chunks) {
    make_one(keys + group % 2 * KEYS_BYTES, rows, chunk, lists);
  }
  publish();
  __syncthreads();

  float s[32];
  Channels channels;
  if (scores) {
    score(s, queries, keys + group * KEYS_BYTES);
    const float first = mask_and_max(s, 0, valid[chunk]), second = mask_and_max(s, 1, valid[chunk]);
    if (lane % 4 == 0) note(chunk).maxima()[low] = first, note(chunk).maxima()[low + 8] = second;
  }
  if (group >= 2) channels.read(rows, chunks, block, lists);
  __syncthreads();  // nobody reads q and keys any more
  arrive_cluster();
  if (group >= 2) channels.place(values, chunks, near_width);
  wait_cluster();
  if (scores) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float top = NEVER;
#pragma unroll 4
      for (int c = 0; c <= chunk; ++c) top = fmaxf(top, fresh(note(c).maxima() + low + 8 * n));
      note(chunk).sums()[n * GROUP + threadIdx.x % GROUP] = exponentials(s, n, top);
    }
    store_weights(note(chunk).weights(), s, low);
  }
  arrive_cluster();
  wait_cluster();
#pragma unroll 12
  for (int i = threadIdx.x; i < chunks * (NOTE_BYTES / 16); i += 4 * GROUP) {
    const int of = i / (NOTE_BYTES / 16), part = i % (NOTE_BYTES / 16) - NUMBERS / 4;
    char* to = part < 0 ? reinterpret_cast<char*>(numbers + (of + 1) * NUMBERS)
                        : weights + of * BLOCK;
    reinterpret_cast<uint4*>(to)[part] = fresh(reinterpret_cast<const uint4*>(note(0).at) + i);
  }
  publish();
  __syncthreads();

  float* staged = reinterpret_cast<float*>(shared);
  if (group == 0) {
    float o[32] = {}, top[2] = {NEVER, NEVER}, total[2] = {0.f, 0.f}, decay[2];
    for (int c = 0; c < chunks; ++c) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float before = top[n];
        const float* of_chunk = numbers + c * NUMBERS;
        top[n] = fmaxf(before, of_chunk[low + 8 * n]);
        decay[n] = exp2f(before - top[n]);
        total[n] = __fmaf_rn(total[n], decay[n], of_chunk[64 + n * GROUP + threadIdx.x]);
      }
      shrink_values<32>(o, decay[0], decay[1]);
      const unsigned long long a = matrix(weights + c * BLOCK),
                               b = matrix(values + c * BLOCK);
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
  write_rows(to, staged, 64 + 4, 64 * block, 64, ALL_HEADS, angle, pairs, 4 * GROUP);
}
