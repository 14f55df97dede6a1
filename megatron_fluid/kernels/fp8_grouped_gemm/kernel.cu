// Grouped GEMM of fp8 expert rows for Hopper (sm_90a), with the scales of both operands: TMA, wgmma e4m3, clusters of two
// blocks. Compiled at first use by megatron_fluid/kernels/sm90, which also writes wgmma.h: the wgmma instructions.
//
//   out[n, j] = sum_b a_scales[b, n] w_scales[e, j / 128, b] sum_(k in block b) x[n, k] w[e, j, k]     w [El, J, K]
//
// for the rows n of expert e: ends[e - 1] to ends[e]. A tensor core keeps some 14 bits of a sum of e4m3 products, so it adds up
// one block of 128; the sum is scaled and added in fp32 registers, by one warpgroup while others multiply.
//
// Unlike in grouped_gemm/kernel.cu the tokens are the M side: a thread then has two rows of a sum, and needs two scales,
// not 32. An expert's rows are cut into as few tiles as hold them, of up to three slabs of 64 rows, one for each warpgroup that
// multiplies: with the sums of 128 and those of all depth that fills its registers. Blocks of a cluster take neighbouring 128
// features of the same rows, and each fetches half of the rows for both.
//
// Shapes: N expert rows, El local experts, K depth, J width; K and J multiples of 128.
constexpr int MOST_UNITS = 8, RING = 2;
constexpr unsigned int MOST_TRIES = 1u << 24;  // a step takes a microsecond: seconds are a fault
#include "sm90.cuh"

constexpr int CONSUMERS = 3;  // warpgroups that multiply; also the slabs of a tile, at most
constexpr int SLAB = 64;      // rows of an instruction
constexpr int BLOCK = 128;    // of a scale along features and depth; also of a block's features, and a step's depth: 128 bytes
constexpr int MOST_STAGED = 256;  // experts whose ends have room in shared memory
constexpr int STAGES = Shape<FORWARD>::STAGES, STAGING = Shape<FORWARD>::STAGING;
constexpr int STEP = OWN + CONSUMERS * (SLAB / UNIT) * PIECE;

// -------- Tiles ------------------------------------------------------------------------------------------------------------

struct Tile {
  int expert, row, rows, feature, slabs;
};

// From the number of a tile to the tile; numbers grow from call to call.
struct Walk {
  const int* ends;
  int rows;  // of all experts, at most: ends that are larger or that decrease lead nowhere else
  int experts, across;
  int expert, first, start;

  __device__ __forceinline__ bool find(int number, Tile& found) {
    while (expert < experts) {
      const int end = max(start, min(ends[expert], rows));
      const int slabs = (end - start + SLAB - 1) / SLAB, high = (slabs + CONSUMERS - 1) / CONSUMERS;
      const int inside = number - first;
      if (inside < high * across) {
        const Place place = place_of(inside, high, across);
        const Part part = part_of(slabs, high, place.row);
        found.expert = expert;
        found.feature = place.column * 2 * BLOCK;
        found.slabs = part.size;
        found.row = start + part.first * SLAB;
        found.rows = min(found.slabs * SLAB, end - found.row);
        return true;
      }
      first += high * across;
      start = end;
      expert++;
    }
    return false;
  }
};

// -------- Producer: thread 0 of each block fills the stages ----------------------------------------------------------------

// What all of a block's threads know. origins, buffers, shift: as Owners of kernels/grouped_gemm, origins null to write to out.
struct Job {
  const TensorMap* result;
  char* out;
  char* const* buffers;
  const u32* origins;
  const float *a_scales, *w_scales;
  int pitch, rows, width, depth, shift;
};

__device__ __forceinline__ void produce(
    Walk walk, Numbers numbers, Counter* counter, const TensorMap* own, const Boxes* both, u32 steps, Shared* shared, int depth,
    int block) {
  Tile tile;
  int stage = 0;
  u32 parity = 1;  // a barrier that nobody arrived at counts as past its earlier phase
  const int clusters = gridDim.x / 2;
  while (walk.find(numbers.number, tile)) {
    int next = 0;
    if (block == 0) next = counter->take();  // arrives while this tile is loaded, if nothing is done with it
    const int pieces = tile.slabs * (SLAB / UNIT);
    for (int k = 0; k < depth; k += BLOCK) {
      wait(&shared->empty[stage], parity);
      u64* full = &shared->full[stage];
      const u32 at = steps + stage * STEP;
      expect(full, OWN + pieces * PIECE);
      load_own(at, own, full, k, tile.feature + block * BLOCK, tile.expert);
      load_tokens(at + OWN, both->maps, full, k, tile.row, pieces, block);
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    numbers.advance(block, clusters + next);
  }
  if (block == 0) counter->finish();
}

// -------- Epilogue ---------------------------------------------------------------------------------------------------------

// Rows of a chunk of 64 features to where their owners sum them, by plain stores that nobody waits for.
__device__ __forceinline__ void send_rows(const Job& job, u32 chunk, int row, int rows, int feature, int thread) {
  for (int i = thread; i < min(rows, SLAB) * 8; i += 128) {
    const int token = i / 8, piece = i % 8;
    const u32 origin = job.origins[row + token], slot = origin & (1u << job.shift) - 1;
    u32 a, b, c, d;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                 : "r"(chunk + token * 128 + (piece ^ token % 8) * 16)
                 : "memory");
    char* const to = job.buffers[origin >> job.shift] + ((u64)slot * job.width + feature + piece * 8) * 2;
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
  }
}

// 64 rows of 128 features, two chunks.
__device__ __forceinline__ void store_slab(
    const Job& job, const float (&total)[64], int row, int rows, int feature, u32 staging, int warpgroup, int thread) {
  staging_free<0>(warpgroup);
  stage_chunk<false>(total, 64, staging, thread);
  stage_chunk<false>(total + 32, 64, staging + CHUNK, thread);
  staging_filled(warpgroup);
  if (feature < job.width) {
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const u32 chunk = staging + c * CHUNK;
      const int column = feature + 64 * c;
      if (job.origins)
        send_rows(job, chunk, row, rows, column, thread);
      else if (rows < SLAB)
        store_rows<64>(job.out + ((u64)row * job.width + column) * 2, chunk, rows, job.width - column, job.width, thread);
      else if (thread == 0)
        store(job.result, chunk, column, row, 0);
    }
  }
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// -------- Consumers --------------------------------------------------------------------------------------------------------

// The slab of `warpgroup`.
__device__ __forceinline__ void multiply_slab(
    const Job& job, const Tile& tile, u32 steps, u32 staging, Shared* shared, int& stage, u32& parity, int block, int warpgroup,
    int thread) {
  const int feature = tile.feature + block * BLOCK, blocks = job.depth / BLOCK;
  const int high = job.width / BLOCK, feature_block = min(feature / BLOCK, high - 1);
  const float* w_scales = job.w_scales + ((u64)tile.expert * high + feature_block) * blocks;
  const float* a_scales = job.a_scales;
  // Rows of this thread's sums. Those that another expert has, or nobody, are not stored.
  const int line = tile.row + warpgroup * SLAB + thread / 32 * 16 + thread % 32 / 4;
  const int first = min(line, job.rows - 1), second = min(line + 8, job.rows - 1);
  float a = a_scales[first], b = a_scales[second], w = w_scales[0];
  float total[64];
#pragma unroll
  for (int i = 0; i < 64; i++) total[i] = 0.0f;
  for (int k = 0; k < blocks; k++) {
    const float scale[2] = {a * w, b * w};
    if (k + 1 < blocks) {  // arrive while this step is multiplied
      a_scales += job.pitch;
      a = a_scales[first];
      b = a_scales[second];
      w = w_scales[k + 1];
    }
    wait(&shared->full[stage], parity);
    const u32 own = steps + stage * STEP;
    const u64 left = descriptor(own + OWN + warpgroup * SLAB * 128, 16), right = descriptor(own, 16);
    float part[64];
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) product<128, 0, 0, true>(part, left + i * (32 >> 4), right + i * (32 >> 4), i);
    wgmma_commit();
    wgmma_wait<0>(part);
    if (thread < 2) release(&shared->empty[stage], thread);
#pragma unroll
    for (int i = 0; i < 64; i++) total[i] = fmaf(part[i], scale[i / 2 % 2], total[i]);
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  const int skipped = warpgroup * SLAB;
  store_slab(job, total, tile.row + skipped, tile.rows - skipped, feature, staging, warpgroup, thread);
}

__device__ __forceinline__ void consume(
    Walk walk, Numbers numbers, const Job& job, u32 steps, u32 staging, Shared* shared, int block, int warpgroup, int thread) {
  Tile tile;
  int stage = 0;
  u32 parity = 0;
  for (; walk.find(numbers.number, tile); numbers.receive()) {
    if (warpgroup < tile.slabs) {
      multiply_slab(job, tile, steps, staging, shared, stage, parity, block, warpgroup, thread);
      continue;
    }
    for (int k = 0; k < job.depth; k += BLOCK) {
      wait(&shared->full[stage], parity);
      sync_warpgroup(warpgroup);  // a warp that is two rounds late would wait for a third one
      if (thread < 2) release(&shared->empty[stage], thread);
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
  }
}

// -------- Kernel -----------------------------------------------------------------------------------------------------------

// rows: of x [rows, depth]; width: J, depth: K, multiples of 128. a_scales [depth / 128, pitch].
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(128 * (1 + CONSUMERS), 1) ENTRY(
    const __grid_constant__ TensorMap own, const __grid_constant__ Boxes both, const __grid_constant__ TensorMap result,
    char* out, char* const* buffers, const int* ends, const u32* origins, const float* a_scales, const float* w_scales,
    int pitch, int experts, int rows, int width, int depth, int shift, int counter) {
  extern __shared__ char memory[];
  static_assert(1024 + STAGES * STEP + CONSUMERS * STAGING <= SHARED_BYTES, "stages and staged results fit into shared memory");
  __shared__ Shared shared;
  __shared__ int row_ends[MOST_STAGED];
  const u32 base = (address(memory) + 1023) / 1024 * 1024;
  const u32 staging = base + STAGES * STEP;
  const int warpgroup = threadIdx.x / 128, block = block_of_cluster();
  for (int e = threadIdx.x; e < min(experts, MOST_STAGED); e += blockDim.x) row_ends[e] = ends[e];
  if (threadIdx.x == 0) start_barriers(&shared, 2 * CONSUMERS);
  __syncthreads();
  sync_cluster();
  const Walk walk = {experts <= MOST_STAGED ? row_ends : ends, rows, experts, (width + 2 * BLOCK - 1) / (2 * BLOCK), 0, 0, 0};
  const Numbers numbers = {&shared, (int)blockIdx.x / 2, 0};
  const Job job = {&result, out, buffers, origins, a_scales, w_scales, pitch, rows, width, depth, shift};
  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    if (threadIdx.x == 0) produce(walk, numbers, counters + counter, &own, &both, base, &shared, depth, block);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
    const int consumer = warpgroup - 1;
    consume(walk, numbers, job, base, staging + consumer * STAGING, &shared, block, consumer, threadIdx.x % 128);
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
  // The other block may still signal here, and multicast into here.
  sync_cluster();
}
