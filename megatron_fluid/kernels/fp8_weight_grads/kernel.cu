// Weight gradients of fp8 expert rows for Hopper (sm_90a), with the scales of both operands: TMA, wgmma e4m3, clusters of two
// blocks. Compiled at first use by megatron_fluid/kernels/sm90, which also writes wgmma.h: the wgmma instructions.
//
//   out[e, a, b] = sum_t left_scales[t, a] right_scales[t, b] sum_(p in block t) left[a, p] right[b, p]
//
// for the blocks t of 128 places that the rows of expert e fill (kernels/fp8_weight_grads). ADDS: added to fp32 matrices, or
// written to them.
//
// As in fp8_grouped_gemm/kernel.cu the sum of a block is scaled and added in fp32 registers, by one warpgroup while others
// multiply. The features of left are the M side, cut into as few tiles as hold them, of up to three slabs of 64, one for each
// warpgroup. Blocks of a cluster take neighbouring 128 features of right, and each fetches half of a tile's features of left
// for both. A thread has two rows of a sum, whose scales it reads itself, and 32 columns, whose scales come with each step into
// shared memory.
//
// A tile has few steps, one for 128 rows of an expert, so what happens to its results decides: they leave, and the old sums
// that they are added to come, while other tiles are multiplied.
//
// Shapes: left [A, P], right [B, P], P places; A, B and P multiples of 128.
constexpr int MOST_UNITS = 8, RING = 2;
constexpr unsigned int MOST_TRIES = 1u << 24;  // a step takes a microsecond: seconds are a fault
#include "sm90.cuh"

constexpr int CONSUMERS = 3;       // warpgroups that multiply; also the slabs of a tile, at most
constexpr int SLAB = 64;           // features of left of an instruction
constexpr int BLOCK = 128;         // places of a scale, which are a step's depth: 128 bytes; also a block's features of right
constexpr int MOST_STAGED = 256;   // experts whose ends have room in shared memory
constexpr int SCALES = BLOCK * 4;  // bytes of a step's scales of right
constexpr int PITCH = BLOCK * 4 + 32;  // bytes between rows of old sums, by 8 banks, so that none collide
constexpr int STEP = OWN + CONSUMERS * (SLAB / UNIT) * PIECE;

// STAGING: of a warpgroup's results in bf16, or of its fp32 sums, which cost a stage. MULTIPLY, LOAD: registers of a thread.
template <bool ADDS>
struct Room {
  static constexpr int STAGES = ADDS ? 3 : 4, STAGING = ADDS ? SLAB * PITCH : 2 * CHUNK;
  static constexpr int MULTIPLY = 152, LOAD = 512 - CONSUMERS * MULTIPLY;
  static_assert(1024 + STAGES * (STEP + SCALES) + CONSUMERS * STAGING <= SHARED_BYTES);
  static_assert(ADDS || STAGES * SCALES % 1024 == 0, "staged results are swizzled by their addresses");
};

// -------- Tiles ------------------------------------------------------------------------------------------------------------

struct Tile {
  int expert, block, blocks;  // block: the expert's first
  int row, slabs, feature;    // row: the first feature of left; feature: of right, of the cluster's first block
};

// From the number of a tile to the tile; numbers grow from call to call. ADDS: an expert without rows has none, but if the
// matrices are fresh: then it is written zeros.
template <bool ADDS>
struct Walk {
  const int* ends;
  int places;  // of all experts, at most: ends that are larger or that decrease lead nowhere else
  int experts, slabs, across;
  int expert, first, start, block;
  bool fresh;

  __device__ __forceinline__ bool find(int number, Tile& found) {
    const int high = (slabs + CONSUMERS - 1) / CONSUMERS;
    while (expert < experts) {
      const int end = max(start, min(ends[expert], places));
      const int blocks = min((end - start + BLOCK - 1) / BLOCK, places / BLOCK - block);
      const int tiles = ADDS && blocks == 0 && !fresh ? 0 : high * across;
      const int inside = number - first;
      if (inside < tiles) {
        const Place place = place_of(inside, high, across);
        const Part part = part_of(slabs, high, place.row);
        found.expert = expert;
        found.block = block;
        found.blocks = blocks;
        found.row = part.first * SLAB;
        found.slabs = part.size;
        found.feature = place.column * 2 * BLOCK;
        return true;
      }
      first += tiles;
      start = end;
      block += blocks;
      expert++;
    }
    return false;
  }
};

// What a block's warps share besides sm90.cuh's. told: who loads a tile finds it and tells the others, who have no registers
// left for the walk. fetched, added: between a warpgroup and the warp that moves the sums that its results are added to.
struct Mine {
  u64 told[SLOTS], fetched[CONSUMERS], added[CONSUMERS];
  Tile tiles[SLOTS];
};

// A block's tiles, one after the other, for all but who loads them. Like Numbers, that warp cannot run away from these.
struct Tiles {
  Mine* mine;
  int turn;

  __device__ __forceinline__ bool receive(Tile& found) {
    const int slot = turn % SLOTS;
    wait(&mine->told[slot], turn / SLOTS & 1);
    found = mine->tiles[slot];
    turn++;
    return found.slabs > 0;
  }

  // A tile without slabs is the end.
  __device__ __forceinline__ void tell(const Tile& tile) {
    const int slot = turn % SLOTS;
    mine->tiles[slot] = tile;
    arrive(&mine->told[slot]);
    turn++;
  }
};

// -------- Producer: thread 0 of each block fills the stages and tells the block its tiles ----------------------------------

// What all of a block's threads know. high, wide: A, B. ADDS: sums, the address of each expert's matrix; fresh, whether these
// have no sums yet.
struct Job {
  const TensorMap* result;
  const u64* sums;
  const float *left_scales, *right_scales;
  int high, wide;
  bool fresh;
};

__device__ __forceinline__ void load_bytes(u32 to, const void* from, int bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(address(barrier))
               : "memory");
}

__device__ __forceinline__ void store_bytes(void* to, u32 from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}

// An expert without rows has one step, into which nothing is loaded, so that no warp runs away: see Numbers.
template <bool ADDS>
__device__ __forceinline__ void produce(
    Walk<ADDS> walk, Numbers numbers, Counter* counter, const TensorMap* own, const Boxes* both, const Job& job, u32 steps,
    u32 scales, Shared* shared, Mine* mine, int block) {
  Tile tile = {};
  Tiles tiles = {mine, 0};
  int stage = 0;
  u32 parity = 1;  // a barrier that nobody arrived at counts as past its earlier phase
  const int clusters = gridDim.x / 2;
  while (walk.find(numbers.number, tile)) {
    tiles.tell(tile);
    int next = 0;
    if (block == 0) next = counter->take();  // arrives while this tile is loaded, if nothing is done with it
    const int pieces = tile.slabs * (SLAB / UNIT), feature = tile.feature + block * BLOCK;
    const int last = tile.block + max(tile.blocks, 1);
    for (int t = tile.block; t < last; t++) {
      wait(&shared->empty[stage], parity);
      u64* full = &shared->full[stage];
      if (tile.blocks == 0) {
        arrive(full);
      } else {
        const u32 at = steps + stage * STEP;
        expect(full, OWN + pieces * PIECE + SCALES);
        load_own(at, own, full, t * BLOCK, feature, 0);
        load_tokens(at + OWN, both->maps, full, t * BLOCK, tile.row, pieces, block);
        // The second block may have no features: then it needs some scales, and no certain ones.
        load_bytes(
            scales + stage * SCALES, job.right_scales + (u64)t * job.wide + min(feature, job.wide - BLOCK), SCALES, full);
      }
      if (++stage == Room<ADDS>::STAGES) stage = 0, parity ^= 1;
    }
    numbers.advance(block, clusters + next);
  }
  tile.slabs = 0;
  tiles.tell(tile);
  if (block == 0) counter->finish();
}

// -------- Consumers --------------------------------------------------------------------------------------------------------

// By each warp for itself, which has read a step's scales: none is so late that it meets a step's barrier a round on.
__device__ __forceinline__ void leave(Shared* shared, int stage, int thread) {
  __syncwarp();
  if (thread % 32 < 2) release(&shared->empty[stage], thread % 32);
}

// The scales of two columns of a thread.
__device__ __forceinline__ float2 scales_of(u32 mine, int j) {
  float2 both;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(both.x), "=f"(both.y) : "r"(mine + j * 32) : "memory");
  return both;
}

// The sums of the slab of `warpgroup`.
template <bool ADDS>
__device__ __forceinline__ void multiply_slab(
    float (&total)[64], const Job& job, const Tile& tile, u32 steps, u32 scales, Shared* shared, int& stage, u32& parity,
    int warpgroup, int thread) {
  // Rows of this thread's sums: this one and that 8 below.
  const int line = tile.row + warpgroup * SLAB + thread / 32 * 16 + thread % 32 / 4;
  const float* left_scales = job.left_scales + (u64)tile.block * job.high + line;
  float a = 0.0f, b = 0.0f;
  if (tile.blocks > 0) {  // behind the last block there may be no scales
    a = left_scales[0];
    b = left_scales[8];
  }
#pragma unroll
  for (int i = 0; i < 64; i++) total[i] = 0.0f;
#pragma unroll 1
  for (int t = 0; t < tile.blocks; t++) {
    float next_a = 0.0f, next_b = 0.0f;
    if (t + 1 < tile.blocks) {  // arrive while this step is multiplied
      left_scales += job.high;
      next_a = left_scales[0];
      next_b = left_scales[8];
    }
    wait(&shared->full[stage], parity);
    const u32 own = steps + stage * STEP, mine = scales + stage * SCALES + thread % 4 * 8;
    const u64 left = descriptor(own + OWN + warpgroup * SLAB * 128, 16), right = descriptor(own, 16);
    float part[64];
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) product<128, 0, 0, true>(part, left + i * (32 >> 4), right + i * (32 >> 4), i);
    wgmma_commit();
    wgmma_wait<0>(part);
#pragma unroll
    for (int j = 0; j < 16; j++) {
      const float2 c = scales_of(mine, j);
      total[4 * j] = fmaf(part[4 * j], a * c.x, total[4 * j]);
      total[4 * j + 1] = fmaf(part[4 * j + 1], a * c.y, total[4 * j + 1]);
      total[4 * j + 2] = fmaf(part[4 * j + 2], b * c.x, total[4 * j + 2]);
      total[4 * j + 3] = fmaf(part[4 * j + 3], b * c.y, total[4 * j + 3]);
    }
    leave(shared, stage, thread);
    if (++stage == Room<ADDS>::STAGES) stage = 0, parity ^= 1;
    a = next_a;
    b = next_b;
  }
}

// 64 features of left by 128 of right, two chunks, which leave while the next tile is multiplied.
__device__ __forceinline__ void store_slab(
    const Job& job, const float (&total)[64], int expert, int row, int feature, u32 staging, int warpgroup, int thread) {
  staging_free<0>(warpgroup);
  stage_chunk<false>(total, 64, staging, thread);
  stage_chunk<false>(total + 32, 64, staging + CHUNK, thread);
  staging_filled(warpgroup);
  if (thread == 0 && feature < job.wide) {
    store(job.result, staging, feature, row, expert);
    store(job.result, staging + CHUNK, feature + 64, row, expert);
  }
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Onto the old sums, if any, which carry_sums has brought and takes away again.
__device__ __forceinline__ void add_slab(const float (&total)[64], bool fresh, u32 staging, int thread) {
  const u32 at = staging + (thread / 32 * 16 + thread % 32 / 4) * PITCH + thread % 4 * 8;
#pragma unroll
  for (int j = 0; j < 16; j += 4) {
    float old[16] = {};  // read together: each read takes as long as many additions
#pragma unroll
    for (int i = 0; i < 8; i++) {
      if (fresh) break;
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                   : "=f"(old[2 * i]), "=f"(old[2 * i + 1])
                   : "r"(at + i % 2 * 8 * PITCH + (j + i / 2) * 32)
                   : "memory");
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at + i % 2 * 8 * PITCH + (j + i / 2) * 32),
                   "f"(old[2 * i] + total[4 * j + 2 * i]), "f"(old[2 * i + 1] + total[4 * j + 2 * i + 1])
                   : "memory");
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

template <bool ADDS>
__device__ __forceinline__ void consume(
    const Job& job, u32 steps, u32 scales, u32 staging, Shared* shared, Mine* mine, int block, int warpgroup, int thread) {
  Tile tile;
  Tiles tiles = {mine, 0};
  int stage = 0;
  u32 parity = 0, turn = 0;
  for (; tiles.receive(tile); turn ^= 1) {
    const bool idle = warpgroup >= tile.slabs;
    if (idle || tile.blocks == 0) {
      for (int t = 0; t < max(tile.blocks, 1); t++) {
        wait(&shared->full[stage], parity);
        leave(shared, stage, thread);
        if (++stage == Room<ADDS>::STAGES) stage = 0, parity ^= 1;
      }
    }
    if (idle) {
      if constexpr (ADDS) {  // so that the warp that carries stays in step
        wait(&mine->fetched[warpgroup], turn);
        arrive(&mine->added[warpgroup]);
      }
      continue;
    }
    float total[64];
    multiply_slab<ADDS>(total, job, tile, steps, scales, shared, stage, parity, warpgroup, thread);
    if constexpr (ADDS) {
      wait(&mine->fetched[warpgroup], turn);
      add_slab(total, job.fresh, staging, thread);
      arrive(&mine->added[warpgroup]);
    } else {
      store_slab(
          job, total, tile.expert, tile.row + warpgroup * SLAB, tile.feature + block * BLOCK, staging, warpgroup, thread);
    }
  }
}

// -------- Carrying warps: old sums in, new sums out ------------------------------------------------------------------------

// One warp for each warpgroup that multiplies: brings a slab's old sums into the staging area during the multiplication, and
// writes the new ones back; of fresh matrices it only says that the staging area is free. No other block has the slab.
__device__ __forceinline__ void carry_sums(const Job& job, u32 staging, Mine* mine, int block, int warpgroup, int lane) {
  u64 *const fetched = &mine->fetched[warpgroup], *const added = &mine->added[warpgroup];
  Tile tile;
  Tiles tiles = {mine, 0};
  u32 turn = 0;
  for (; tiles.receive(tile); turn ^= 1) {
    const int feature = tile.feature + block * BLOCK, row = tile.row + warpgroup * SLAB + lane;
    const bool some = warpgroup < tile.slabs && feature < job.wide;
    float* const matrix = (float*)job.sums[tile.expert] + (u64)row * job.wide + feature;
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // a lane fills the rows that it emptied
    __syncwarp();                                                   // nobody still waits for the tile before
    if (lane == 0) expect(fetched, some && !job.fresh ? SLAB * BLOCK * 4 : 0);
    __syncwarp();
    if (some && !job.fresh) {
#pragma unroll
      for (int i = 0; i < SLAB; i += 32)
        load_bytes(staging + (lane + i) * PITCH, matrix + (u64)i * job.wide, BLOCK * 4, fetched);
    }
    wait(added, turn);
    if (some) {
#pragma unroll
      for (int i = 0; i < SLAB; i += 32) store_bytes(matrix + (u64)i * job.wide, staging + (lane + i) * PITCH, BLOCK * 4);
    }
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// -------- Kernel -----------------------------------------------------------------------------------------------------------

template <bool ADDS>
__device__ __forceinline__ void run(
    const TensorMap* own, const Boxes* both, const Job& job, const int* ends, int experts, int places, Counter* counter,
    Shared* shared, Mine* mine, int* row_ends) {
  extern __shared__ char memory[];
  constexpr int STAGES = Room<ADDS>::STAGES, STAGING = Room<ADDS>::STAGING;
  const u32 steps = (address(memory) + 1023) / 1024 * 1024;
  const u32 scales = steps + STAGES * STEP, staging = scales + STAGES * SCALES;
  const int warpgroup = threadIdx.x / 128, block = block_of_cluster();
  for (int e = threadIdx.x; e < min(experts, MOST_STAGED); e += blockDim.x) row_ends[e] = ends[e];
  if (threadIdx.x == 0) {
    for (int s = 0; s < SLOTS; s++) start_barrier(&mine->told[s], 1);
    for (int w = 0; w < CONSUMERS; w++) {
      start_barrier(&mine->fetched[w], 1);
      start_barrier(&mine->added[w], 128);
    }
    start_barriers(shared, 2 * CONSUMERS * 4);  // every warp of both blocks that multiplies
  }
  __syncthreads();
  sync_cluster();
  const Walk<ADDS> walk = {
      experts <= MOST_STAGED ? row_ends : ends,
      places,
      experts,
      job.high / SLAB,
      (job.wide + 2 * BLOCK - 1) / (2 * BLOCK),
      0,
      0,
      0,
      0,
      job.fresh};
  const Numbers numbers = {shared, (int)blockIdx.x / 2, 0};
  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Room<ADDS>::LOAD));
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) produce<ADDS>(walk, numbers, counter, own, both, job, steps, scales, shared, mine, block);
    if constexpr (ADDS) {
      if (warp > 0) carry_sums(job, staging + (warp - 1) * STAGING, mine, block, warp - 1, threadIdx.x % 32);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Room<ADDS>::MULTIPLY));
    const int consumer = warpgroup - 1;
    consume<ADDS>(job, steps, scales, staging + consumer * STAGING, shared, mine, block, consumer, threadIdx.x % 128);
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
  // The other block may still signal here, and multicast into here.
  sync_cluster();
}

// high, wide, places: A, B, P, multiples of 128. left_scales [P / 128, A], right_scales [P / 128, B]. result: of [El, A, B],
// not of ADDS. sums, fresh: of ADDS alone.
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(128 * (1 + CONSUMERS), 1) ENTRY(
    const __grid_constant__ TensorMap own, const __grid_constant__ Boxes both, const __grid_constant__ TensorMap result,
    const int* ends, const u64* sums, const float* left_scales, const float* right_scales, int experts, int high, int wide,
    int places, int fresh, int counter) {
  __shared__ Shared shared;
  __shared__ Mine mine;
  __shared__ int row_ends[MOST_STAGED];
  const Job job = {&result, sums, left_scales, right_scales, high, wide, fresh != 0};
  run<ENTRY_MODE>(&own, &both, job, ends, experts, places, counters + counter, &shared, &mine, row_ends);
}
