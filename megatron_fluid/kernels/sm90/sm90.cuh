// What GEMM kernels for Hopper (sm_90a) are made of: TMA, wgmma, clusters of two blocks that take tiles from a counter.
//
// The weights are the M side of the product and the tokens its N side, which an instruction takes in any multiple of 8. Two
// blocks of a cluster take neighbouring features of the same tokens, and each fetches half of the tokens for both.
//
// A block: one warpgroup that loads (one thread of it), two that multiply, 64 features each, 3 to 5 stages of 64 deep
// between them. Blocks are persistent; a cluster takes its next tile from a counter, since tiles differ in cost.
//
// A source defines before it includes this, for FORWARD, BACKWARD and WIDE: MOST_UNITS, the tokens of the largest tile in units
// of 32, and RING, the chunks of 64 x 64 results on their way out of a warpgroup; and for all MOST_TRIES, how often a wait
// inside a block looks before it fails the launch. 225 KiB of shared memory hold all stages and all results on their way.
#include "wgmma.h"

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int FORWARD = 0, BACKWARD = 1, WEIGHTS = 2, SUMS = 3, LONG_SUMS = 4, GATED = 5, WIDE = 6;
constexpr int DEPTH = 64;              // of one step: 128 bytes, the width of the swizzle
constexpr int OWN = 128 * DEPTH * 2;   // bytes of a step of this block's 128 features
constexpr int PIECE = 32 * DEPTH * 2;  // bytes of a step of 32 tokens, or of 32 columns of right
constexpr int UNIT = 32;               // tokens of a tile come in multiples
constexpr int CHUNK = 64 * 128;        // bytes of 64 rows of 64 results
constexpr int SMALL = 32 * 64;         // bytes of 32 rows of 32 results
constexpr int MOST_STAGES = 5;
constexpr int SLOTS = 8;  // numbers of tiles on their way to the warps
static_assert(SLOTS > MOST_STAGES + 2, "no number of a tile is overwritten before every warp has read it");
constexpr int COUNTERS = 1 << 16;
constexpr int SHARED_BYTES = 225 * 1024;  // of a block, as the host asks for
constexpr int STRIP = 16;                 // token tiles that take turns along one strip of weights, for the L2

// Where tile `number` of `high` rows of `across` tiles lies: STRIP rows take turns along one strip of weights.
struct Place {
  int row, column, strip;
};

__device__ __forceinline__ Place place_of(int number, int high, int across) {
  const int strip = number / (STRIP * across);
  const int height = min(high - strip * STRIP, STRIP);
  const int at = number - strip * STRIP * across;
  return {strip * STRIP + at % height, at / height, strip};
}

// Part `number` of `units` that are cut into `parts`, whose sizes differ by at most one.
struct Part {
  int first, size;
};

__device__ __forceinline__ Part part_of(int units, int parts, int number) {
  const int each = units / parts, wider = units % parts;
  return {number * each + min(number, wider), each + (number < wider)};
}

// -------- Layout of shared memory, parameters ------------------------------------------------------------------------------

// What differs between the modes. GRADS: whether the sums run over an expert's rows. ADDS: whether they are added to old ones.
// GATES: whether features are those of gate and up; of WIDE with larger tiles, whose results have a smaller staging buffer.
template <int MODE>
struct Shape {
  static constexpr bool ADDS = MODE == SUMS || MODE == LONG_SUMS;
  static constexpr bool GRADS = MODE == WEIGHTS || ADDS;
  static constexpr bool GATES = MODE == GATED || MODE == WIDE;
  static constexpr bool DEEP = MODE == FORWARD || GATES;  // weights whose rows run along the sums
  // Columns of right that a tile has: of SUMS fewer, since the old sums of its few rows are in the L2 while it is multiplied.
  static constexpr int COLUMNS = MODE == SUMS ? 192 : 256;
  static constexpr int UNITS = MODE == GATED ? 8 : MOST_UNITS;  // of tokens, at most
  static constexpr int PIECES = GRADS ? COLUMNS / 32 : UNITS;
  static constexpr int STAGES = MODE == WEIGHTS ? 3 : MODE == SUMS ? MOST_STAGES : 4;
  static constexpr int STEP = OWN + PIECES * PIECE;    // bytes
  static constexpr int HALVES = MODE == WIDE ? 1 : 2;  // GATES: 32 tokens each, that leave at a time
  // Bytes of a warpgroup's results. ADDS: they go from registers to memory. WEIGHTS: all of a tile's. GATES: HALVES small
  // chunks of each of gate, up and act, and the tile's probabilities.
  static constexpr int STAGING = ADDS ? 0 : MODE == WEIGHTS ? 4 * CHUNK : GATES ? HALVES * CHUNK : RING * CHUNK;
};

struct alignas(64) TensorMap {
  u64 words[16];
};

// Of the same tensor, in boxes of 32, 64 and 128 rows.
struct Boxes {
  TensorMap maps[3];
};

// What is written by TMA: by the gated kernel its own result (if that is kept) and act, in boxes of 64 rows, or of 32 if WIDE;
// else one map, of ADDS and where rows are sent none.
struct Results {
  TensorMap maps[2];
};

// Who writes, who waits, and why nothing is overwritten. Of each block, all but tiles are mbarriers:
//   full[s]    Completed by the bytes of stage s, which the producers of both blocks load; consumers wait for it.
//   empty[s]   The consumers of both blocks arrive once their wgmma have read stage s. Each producer waits for it before it
//              loads the stage again, since half of what it loads goes into the other block.
//   given[i]   Completed by the word tiles[i], which block 0's producer writes into both blocks; all other warps wait for it
//              (Numbers says why a slot is not written again too early).
// A wait goes by the parity of a barrier's phase: nobody can fall two phases behind, because the next phase needs its arrival.
struct Shared {
  u64 full[MOST_STAGES], empty[MOST_STAGES], given[SLOTS];
  int tiles[SLOTS];
};

// -------- Barriers and TMA -------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ u32 block_of_cluster() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

__device__ __forceinline__ void start_barrier(u64* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void expect(u64* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(barrier)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
}

// Whoever waits in vain fails the launch rather than spin for ever.
__device__ __forceinline__ void wait(u64* barrier, u32 parity) {
  for (auto tries = 0 * MOST_TRIES; tries < MOST_TRIES; tries++) {
    u32 done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(address(barrier)), "r"(parity)
        : "memory");
    if (done) return;
  }
  asm volatile("trap;");
}

// Arrive at a barrier of either block of the cluster.
__device__ __forceinline__ void release(u64* barrier, u32 block) {
  asm volatile(
      "{\n.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(address(barrier)),
      "r"(block)
      : "memory");
}

// A word for either block of the cluster, with its barrier, which the word itself completes.
__device__ __forceinline__ void give(int* to, u64* barrier, int value, u32 block) {
  asm volatile(
      "{\n.reg .b32 there, bar;\n"
      "mapa.shared::cluster.u32 there, %0, %3;\n"
      "mapa.shared::cluster.u32 bar, %1, %3;\n"
      "mbarrier.arrive.expect_tx.shared::cluster.b64 _, [bar], 4;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %2, [bar];\n}" ::"r"(address(to)),
      "r"(address(barrier)), "r"(value), "r"(block)
      : "memory");
}

__device__ __forceinline__ void load_own(u32 to, const TensorMap* map, u64* barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
      "l"(map), "r"(address(barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// GATES: 64 features of gate and of up in turns of 8, so that a thread that multiplies has both of a feature.
__device__ __forceinline__ void load_gated(u32 to, const TensorMap* map, u64* barrier, int x, int feature, int expert) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %4, %5, %6}], [%2];" ::
          "r"(to),
      "l"(map), "r"(address(barrier)), "r"(x), "r"(0), "r"(feature / 8), "r"(expert)
      : "memory");
}

__device__ __forceinline__ void load_for_both(u32 to, const TensorMap* map, u64* barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
      "l"(map), "r"(address(barrier)), "r"(x), "r"(y), "r"(0), "h"((unsigned short)3)
      : "memory");
}

// This block's share of `units` of 32 tokens, for both blocks, by `boxes` of 32, 64 and 128: each of them
// costs the one thread that loads some fifteen instructions, and a step has to be loaded while another is multiplied.
__device__ __forceinline__ void load_tokens(
    u32 tokens, const TensorMap* boxes, u64* barrier, int x, int row, int units, u32 block) {
  const int half = (units + 1) / 2, share = block == 0 ? half : units - half;
  int unit = block == 0 ? 0 : half;
#pragma unroll
  for (int size = 2; size >= 0; size--) {
    if (!(share >> size & 1)) continue;
    load_for_both(tokens + unit * PIECE, boxes + size, barrier, x, row + unit * UNIT);
    unit += 1 << size;
  }
}

__device__ __forceinline__ void store(const TensorMap* map, u32 from, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map), "r"(from), "r"(x),
               "r"(y), "r"(z)
               : "memory");
}

__device__ __forceinline__ void sync_warpgroup(int warpgroup) {
  asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup) : "memory");
}

// Of a tile in shared memory with rows of 128 swizzled bytes. `wide`: bytes between blocks of 64 along M or N where these
// are contiguous (not K).
__device__ __forceinline__ u64 descriptor(u32 at, int wide) {
  return (u64)((at & 0x3ffff) >> 4) | (u64)(wide >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 both;
#ifdef HALF_FLOATS
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#endif
  return both;
}

__device__ __forceinline__ void unpack(u32 both, float& low, float& high) {
#ifdef HALF_FLOATS
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}" : "=f"(low), "=f"(high) : "r"(both));
#else
  low = __uint_as_float(both << 16);
  high = __uint_as_float(both & 0xffff0000u);
#endif
}

// -------- Which tile comes next --------------------------------------------------------------------------------------------

// Tiles taken and clusters that have finished, of one launch.
struct Counter {
  int taken, finished;

  __device__ __forceinline__ int take() { return atomicAdd(&taken, 1); }

  // By one thread of each cluster, which takes no more: the last of them leaves both at zero for the next launch.
  __device__ __forceinline__ void finish() {
    if (atomicAdd(&finished, 1) == gridDim.x / 2 - 1) {
      taken = 0;
      finished = 0;
    }
  }
};

// Launches that may run at the same time have different ones.
__device__ Counter counters[COUNTERS];

// Numbers of the cluster's tiles, one after the other. The loading thread of block 0 takes them, or all but the first, and
// gives them to all warps. It cannot run away from them over the end of the slots: a tile has at least one step (also where an
// expert has no rows, see produce), and a stage is filled again only when all have left it.
struct Numbers {
  Shared* shared;
  int number, turn;

  __device__ __forceinline__ void receive() {
    const int slot = turn % SLOTS;
    wait(&shared->given[slot], turn / SLOTS & 1);
    number = ((volatile int*)shared->tiles)[slot];
    turn++;
  }

  __device__ __forceinline__ void publish(int next) {
    const int slot = turn % SLOTS;
    for (u32 block = 0; block < 2; block++) give(&shared->tiles[slot], &shared->given[slot], next, block);
    number = next;
    turn++;
  }

  // By the loading thread of each block: block 0 has taken `next`.
  __device__ __forceinline__ void advance(int block, int next) {
    if (block == 0)
      publish(next);
    else
      receive();
  }
};

#include "multiply.cuh"
