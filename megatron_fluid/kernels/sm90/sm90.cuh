// What GEMM kernels for Hopper (sm_90a) are made of: TMA, wgmma, clusters of two blocks that take tiles from a counter.
//
// The weights are the M side of the product and the tokens its N side, which an instruction takes in any multiple of 8. Two
// blocks of a cluster take neighbouring features of the same tokens, and each fetches half of the tokens for both.
//
// A block: one warpgroup that loads (one thread of it), two that multiply, 64 features each, 3 or 4 stages of 64 deep
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
constexpr int SLOTS = 8;               // numbers of tiles on their way to the warps: more than stages + 2
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
  // Columns of right that a tile has: of SUMS fewer, so that all its fp32 sums are staged at once, and the old ones arrive
  // while it is multiplied. Of LONG_SUMS, where that takes long, the wait for the second half of them is the lesser evil.
  static constexpr int COLUMNS = MODE == SUMS ? 192 : 256;
  static constexpr int PASSES = MODE == LONG_SUMS ? 2 : 1;      // in which a warpgroup's sums are staged
  static constexpr int UNITS = MODE == GATED ? 8 : MOST_UNITS;  // of tokens, at most
  static constexpr int PIECES = GRADS ? COLUMNS / 32 : UNITS;
  static constexpr int STAGES = GRADS ? 3 : 4;
  static constexpr int STEP = OWN + PIECES * PIECE;    // bytes
  static constexpr int PITCH = COLUMNS * 4 + 32;       // bytes between rows of sums, by 8 banks, so that none collide
  static constexpr int HALVES = MODE == WIDE ? 1 : 2;  // GATES: 32 tokens each, that leave at a time
  // Bytes of a warpgroup's results. WEIGHTS: all of a tile's. GATES: HALVES small chunks of each of gate, up and act, and the
  // tile's probabilities.
  static constexpr int STAGING = ADDS              ? 64 / PASSES * PITCH
                                 : MODE == WEIGHTS ? 4 * CHUNK
                                 : GATES           ? HALVES * CHUNK
                                                   : RING * CHUNK;
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
//   fetched    Between a warpgroup and the warp that moves what its results are added to, or that counts what it has stored:
//   and added  each waits for the other once a tile.
// A wait goes by the parity of a barrier's phase: nobody can fall two phases behind, because the next phase needs its arrival.
struct Shared {
  u64 full[4], empty[4], given[SLOTS];
  u64 fetched[2], added[2];
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

// -------- Consumers: multiply ----------------------------------------------------------------------------------------------

// Rows of an expert's last step that belong to the next one (or to nobody) become zeros in both operands.
template <int COLUMNS>
__device__ __forceinline__ void clear_rows(u32 own, u32 tokens, int from, int warpgroup, int thread) {
  const int pieces = (64 - from) * 8;  // of 16 bytes in 64 rows of 128 bytes
  for (int tile = warpgroup; tile < 2 + COLUMNS / 64; tile += 2) {
    const u32 at = (tile < 2 ? own + tile * OWN / 2 : tokens + (tile - 2) * 2 * PIECE) + from * 128;
    for (int i = thread; i < pieces; i += 128)
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at + i * 16), "r"(0) : "memory");
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("bar.sync 3, 256;" ::: "memory");
}

template <int WIDTH, int TA, int TB, bool FIRST>
__device__ __forceinline__ void product(float (&total)[WIDTH / 2], u64 left, u64 right, int i) {
  if (FIRST && i == 0)
    start<WIDTH, TA, TB>(total, left, right);
  else
    wgmma<WIDTH, TA, TB>(total, left, right);
}

// One step of 64 deep, once it has arrived. FIRST: the sums begin with it.
template <int MODE, int WIDTH, bool FIRST>
__device__ __forceinline__ void step(float (&total)[WIDTH / 2], u32 own, int left_over, int warpgroup, int thread) {
  constexpr bool deep = Shape<MODE>::DEEP;  // steps of 16 lie side by side in a row of 128 bytes, else 16 rows apart
  const u32 tokens = own + OWN;
  if (Shape<MODE>::GRADS && left_over < DEPTH) clear_rows<WIDTH>(own, tokens, left_over, warpgroup, thread);
  constexpr int along = deep ? 32 >> 4 : 2048 >> 4;  // to the next 16 of the features, and of the tokens
  constexpr int beside = Shape<MODE>::GRADS ? 2048 >> 4 : 32 >> 4;
  const u64 left = descriptor(own + warpgroup * OWN / 2, 16);
  const u64 right = descriptor(tokens, Shape<MODE>::GRADS ? 2 * PIECE : 16);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < DEPTH / 16; i++) {
    if constexpr (WIDTH <= 256) {
      product<WIDTH, !deep, Shape<MODE>::GRADS, FIRST>(total, left + i * along, right + i * beside, i);
    } else {  // by two instructions
      constexpr int N = WIDTH / 2;
      product<N, !deep, false, FIRST>((float (&)[N / 2]) total[0], left + i * along, right + i * beside, i);
      product<N, !deep, false, FIRST>(
          (float (&)[N / 2]) total[N / 2], left + i * along, right + i * beside + (N * 128 >> 4), i);
    }
  }
  wgmma_commit();
}

// Sums over `depth`. There is a first step also where it is 0.
template <int MODE, int WIDTH>
__device__ __forceinline__ void multiply(
    float (&total)[WIDTH / 2], u32 steps, Shared* shared, int depth, int& stage, u32& parity, int warpgroup, int thread) {
  constexpr int size = Shape<MODE>::STEP;
  wait(&shared->full[stage], parity);
  step<MODE, WIDTH, true>(total, steps + stage * size, depth, warpgroup, thread);
  int before = stage;
  if (++stage == Shape<MODE>::STAGES) stage = 0, parity ^= 1;
  for (int k = DEPTH; k < depth; k += DEPTH) {
    wait(&shared->full[stage], parity);
    step<MODE, WIDTH, false>(total, steps + stage * size, depth - k, warpgroup, thread);
    wgmma_wait<1>(total);
    if (thread < 2) release(&shared->empty[before], thread);
    before = stage;
    if (++stage == Shape<MODE>::STAGES) stage = 0, parity ^= 1;
  }
  wgmma_wait<0>(total);
  if (thread < 2) release(&shared->empty[before], thread);
}

// -------- Epilogue: stage and store ----------------------------------------------------------------------------------------

// Up to 64 columns of results, in pairs as `pack` makes them, into a chunk: 64 rows of 128 swizzled bytes. TURNED: a row is a
// token, else a feature.
template <bool TURNED>
__device__ __forceinline__ void stage_packed(const u32* pairs, int columns, u32 chunk, int thread) {
  const int warp = thread / 32, lane = thread % 32;
  const int row = 16 * warp + 8 * (lane / 8 % 2);
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    if (8 * j >= columns) break;  // known where this is unrolled
    const int column = 8 * (j + lane / 16);
    const int line = (TURNED ? column : row) + lane % 8, piece = (TURNED ? row : column) / 8;
    const u32 at = chunk + line * 128 + (piece ^ line % 8) * 16;
    const u32 a = pairs[2 * j], b = pairs[2 * j + 1], c = pairs[2 * j + 2], d = pairs[2 * j + 3];
    if (TURNED)
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b),
                   "r"(c), "r"(d)
                   : "memory");
    else
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c),
                   "r"(d)
                   : "memory");
  }
}

template <bool TURNED>
__device__ __forceinline__ void stage_chunk(const float* total, int columns, u32 chunk, int thread) {
  u32 pairs[16];
#pragma unroll
  for (int i = 0; i < 16; i++)
    if (4 * i < columns) pairs[i] = pack(total[2 * i], total[2 * i + 1]);  // known where this is unrolled
  stage_packed<TURNED>(pairs, columns, chunk, thread);
}

__device__ __forceinline__ float silu(float g) {
  float power, s;  // the instructions that Triton makes of kernels/activation: a backward makes the same values again
  asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"((0.0f - g) * 1.4426950216293335f));
  asm("div.full.f32 %0, %1, %2;" : "=f"(s) : "f"(1.0f), "f"(1.0f + power));
  return s * g;
}

// 32 tokens of 8 features of a warp into small chunks: tokens of 64 swizzled bytes.
__device__ __forceinline__ void stage_small(const u32 (&values)[4], int token, u32 chunk, int thread) {
  const int line = token + thread % 32;
  const u32 at = chunk + line * 64 + (thread / 32 ^ (line / 2 & 3)) * 16;
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(values[0]),
               "r"(values[1]), "r"(values[2]), "r"(values[3])
               : "memory");
}

constexpr int SENT_ONCE = 48;  // tokens of 64 features that a warpgroup sends at a time: all origins of a tile fit behind them

// SENDS: row n of the results goes to row origins[n] % 2^shift of the buffer of rank origins[n] / 2^shift, and not to out.
struct Owners {
  const u32* origins;
  char* const* buffers;
  int shift;
};

// By plain stores, which nobody waits for: the next tiles are multiplied while rows travel. (TMA: an instruction a short row.)
template <int WIDTH>
__device__ __forceinline__ void send_tile(
    int rows, const Owners& owners, const u32 (&mine)[(WIDTH + 127) / 128], const float* total, int feature, int width,
    u32 staging, int warpgroup, int thread) {
  const u32 origins = staging + SENT_ONCE * 128;
#pragma unroll
  for (int i = 0; i < (WIDTH + 127) / 128; i++)
    if (thread + 128 * i < WIDTH)
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(origins + (thread + 128 * i) * 4), "r"(mine[i]) : "memory");
  const int piece = thread % 8;
  const bool inside = feature + piece * 8 < width;
#pragma unroll
  for (int c = 0; c < (WIDTH + SENT_ONCE - 1) / SENT_ONCE; c++) {
    sync_warpgroup(warpgroup);  // all origins are there, and what was staged has been read
    stage_chunk<true>(total + SENT_ONCE / 2 * c, min(SENT_ONCE, WIDTH - SENT_ONCE * c), staging, thread);
    char* to[SENT_ONCE / 16];
#pragma unroll
    for (int j = 0; j < SENT_ONCE / 16; j++) {
      const int token = min(SENT_ONCE * c + 16 * j + thread / 8, WIDTH - 1);
      u32 origin;
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(origin) : "r"(origins + token * 4) : "memory");
      const u32 slot = origin & (1u << owners.shift) - 1;
      to[j] = owners.buffers[origin >> owners.shift] + ((u64)slot * width + feature + piece * 8) * 2;
    }
    sync_warpgroup(warpgroup);
#pragma unroll
    for (int j = 0; j < SENT_ONCE / 16; j++) {
      const int line = 16 * j + thread / 8;
      u32 a, b, d, e;
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(a), "=r"(b), "=r"(d), "=r"(e)
                   : "r"(staging + line * 128 + (piece ^ line % 8) * 16)
                   : "memory");
      if (SENT_ONCE * c + line < rows && inside)
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to[j]), "r"(a), "r"(b), "r"(d), "r"(e) : "memory");
    }
  }
}

// Until all but the last MORE groups of results have left the staging area.
template <int MORE>
__device__ __forceinline__ void staging_free(int warpgroup) {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(MORE) : "memory");
  sync_warpgroup(warpgroup);
}

__device__ __forceinline__ void staging_filled(int warpgroup) {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  sync_warpgroup(warpgroup);
}

// A chunk of FEATURES features, 64 or 32, that holds another expert's rows, too: only its first `rows` tokens of at most
// `features`.
template <int FEATURES>
__device__ __forceinline__ void store_rows(char* to, u32 chunk, int rows, int features, int width, int thread) {
  constexpr int PIECES = FEATURES / 8;
  for (int i = thread; i < rows * PIECES; i += 128) {
    const int token = i / PIECES, piece = i % PIECES;
    if (piece * 8 >= features) continue;
    u32 a, b, c, d;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                 : "r"(chunk + token * FEATURES * 2 + (piece ^ token * PIECES / 8 % PIECES) * 16)
                 : "memory");
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to + ((u64)token * width + piece * 8) * 2), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
  }
}

// By one thread of a block, before any other uses them. `adders`: threads of a warpgroup that arrive at `added`. `users`:
// warpgroups of both blocks that multiply.
__device__ __forceinline__ void start_barriers(Shared* shared, int adders, int users = 4) {
  for (int s = 0; s < 4; s++) {
    start_barrier(&shared->full[s], 1);
    start_barrier(&shared->empty[s], users);
  }
  for (int s = 0; s < SLOTS; s++) start_barrier(&shared->given[s], 1);
  for (int w = 0; w < 2; w++) {
    start_barrier(&shared->fetched[w], 1);
    start_barrier(&shared->added[w], adders);
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
