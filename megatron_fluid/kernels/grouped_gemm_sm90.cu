// Grouped GEMMs of expert rows for Hopper (sm_90a): TMA, wgmma, clusters of two blocks. Compiled at first use by
// megatron_fluid/kernels/hopper.py, which also writes wgmma.h, the wgmma instruction for every width used here.
//
// Why not Triton: its tiles have one height, so an expert's last rows cost a whole tile, and it multicasts nothing, so that
// tiles of 128 x 256 are fed from L2 at half again the bytes. Here the weights are the M side of the product and the
// tokens its N side, which an instruction takes in any multiple of 8. An expert's rows are dealt out to as few tiles as
// hold them, of up to 288 tokens, in units of 32: a few rows more than a tile holds widen it instead of starting one, which
// would fetch the same weights for almost nothing. Two blocks of a cluster take neighbouring features of the same tokens,
// and each fetches half of the tokens for both.
//
// A block: one warpgroup that loads (one thread of it), two that multiply, 64 features each, STAGES steps of 64 deep
// between them. Blocks are persistent; a cluster takes its next tile from a counter, since tiles differ in cost.
//
// FORWARD    out[n, j] = sum_k x[n, k] w[e, j, k]     w [El, J, K]
// GATED      the same for w [El, 2F, K], and act[n, f] = silu(out[n, f]) out[n, F + f] prob[n]
// BACKWARD   out[n, j] = sum_k x[n, k] w[e, k, j]     w [El, K, J]
// WEIGHTS    out[e, a, b] = sum_n left[n, a] right[n, b]
// SUMS       the same, added to fp32 matrices
// for the rows n of expert e: ends[e - 1] to ends[e].
#include "wgmma.h"

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int FORWARD = 0, BACKWARD = 1, WEIGHTS = 2, SUMS = 3, GATED = 4;
constexpr int DEPTH = 64;                        // of one step: 128 bytes, the width of the swizzle
constexpr int OWN = 128 * DEPTH * 2;             // bytes of a step of this block's 128 features
constexpr int PIECE = 32 * DEPTH * 2;            // bytes of a step of 32 tokens, or of 32 columns of right
constexpr int UNIT = 32, MOST_UNITS = 9;         // tokens of a tile
constexpr int STAGES = 3;
constexpr int CHUNK = 64 * 128;                  // bytes of 64 rows of 64 results
constexpr int RING = 4;                          // chunks on their way out
constexpr int SMALL = 64 * 64;                   // bytes of 64 rows of 32 results
constexpr int GATED_RING = 2;                    // GATED: sets of three small chunks, gate, up and act; behind them
                                                 // the tile's probabilities
constexpr int MOST_EXPERTS = 1024;
constexpr int SLOTS = 8;                         // numbers of tiles on their way to the warps: more than STAGES + 2
constexpr int COUNTERS = 1 << 16;
constexpr int STRIP = 16;                        // token tiles that take turns along one strip of weights, for the L2

// What differs between the modes. GRADS: whether the sums run over an expert's rows.
template <int MODE>
struct Shape {
  static constexpr bool GRADS = MODE == WEIGHTS || MODE == SUMS;
  static constexpr bool DEEP = MODE == FORWARD || MODE == GATED;  // weights whose rows run along the sums
  // Columns of right that a tile has: of SUMS fewer, so that all its fp32 sums are staged at once, and the old ones arrive
  // while it is multiplied.
  static constexpr int COLUMNS = MODE == SUMS ? 192 : 256;
  static constexpr int PIECES = GRADS ? COLUMNS / 32 : MOST_UNITS;
  static constexpr int STEP = OWN + PIECES * PIECE;  // bytes
  static constexpr int PITCH = COLUMNS * 4 + 32;     // bytes between rows of SUMS, by 8 banks, so that none collide
  static constexpr int STAGING = MODE == SUMS ? 64 * PITCH : RING * CHUNK;  // bytes of a warpgroup's results
};

struct alignas(64) TensorMap {
  u64 words[16];
};

struct Shared {
  u64 full[STAGES], empty[STAGES], given[SLOTS];
  u64 fetched[2], added[2];  // SUMS, for each warpgroup: the old sums are staged; the new ones are
  int tiles[SLOTS];
  int ends[MOST_EXPERTS];
};

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

// A step takes a microsecond. Whoever waits for seconds waits for a fault, and fails the launch rather than spin for ever.
__device__ __forceinline__ void wait(u64* barrier, u32 parity) {
  for (u32 tries = 0; tries < 1u << 24; tries++) {
    u32 done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(address(barrier)), "r"(parity) : "memory");
    if (done) return;
  }
  asm volatile("trap;");
}

// Arrive at a barrier of either block of the cluster.
__device__ __forceinline__ void release(u64* barrier, u32 block) {
  asm volatile(
      "{\n.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(address(barrier)), "r"(block) : "memory");
}

// A word for either block of the cluster, with its barrier, which the word itself completes.
__device__ __forceinline__ void give(int* to, u64* barrier, int value, u32 block) {
  asm volatile(
      "{\n.reg .b32 there, bar;\n"
      "mapa.shared::cluster.u32 there, %0, %3;\n"
      "mapa.shared::cluster.u32 bar, %1, %3;\n"
      "mbarrier.arrive.expect_tx.shared::cluster.b64 _, [bar], 4;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %2, [bar];\n}" ::"r"(address(to)),
      "r"(address(barrier)), "r"(value), "r"(block) : "memory");
}

__device__ __forceinline__ void load_own(u32 to, const TensorMap* map, u64* barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
      "l"(map), "r"(address(barrier)), "r"(x), "r"(y), "r"(z) : "memory");
}

// GATED: 64 features of gate and of up in turns of 8, so that a thread that multiplies has both of a feature.
__device__ __forceinline__ void load_gated(u32 to, const TensorMap* map, u64* barrier, int x, int feature, int expert) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %4, %5, %6}], [%2];" ::"r"(
          to),
      "l"(map), "r"(address(barrier)), "r"(x), "r"(0), "r"(feature / 8), "r"(expert) : "memory");
}

__device__ __forceinline__ void load_for_both(u32 to, const TensorMap* map, u64* barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
      "l"(map), "r"(address(barrier)), "r"(x), "r"(y), "r"(0), "h"((unsigned short)3) : "memory");
}

__device__ __forceinline__ void store(const TensorMap* map, u32 from, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map), "r"(from),
               "r"(x), "r"(y), "r"(z) : "memory");
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

// The tiles of one cluster, in the same order for every warp.
struct Tile {
  // WEIGHTS, SUMS: row and rows are the whole expert's, feature is one of left. GATED: twice a feature.
  int expert, row, rows, feature;
  int units;                       // of tokens
  int column;                      // WEIGHTS, SUMS: of right
};

// A counter of tiles taken and one of clusters that have finished; the last of them leaves both at zero.
struct Counter {
  int taken, finished;
};

// Launches that may run at the same time have different ones.
__device__ Counter counters[COUNTERS];

// From the number of a tile to the tile; numbers grow from call to call.
template <int MODE>
struct Walk {
  const int* ends;
  int rows;  // of all experts, at most: ends that are larger or that decrease lead nowhere else
  int experts, across, down;  // across: pairs of 128 features; down: tiles of COLUMNS (WEIGHTS, SUMS)
  int expert, first, start;

  __device__ __forceinline__ bool find(int number, Tile& found) {
    while (expert < experts) {
      const int end = max(start, min(ends[expert], rows));
      const int units = (end - start + UNIT - 1) / UNIT;
      // 8 units fill the widest instruction; a ninth takes two, but spares a tile.
      const int high = MODE == SUMS && end == start ? 0 : Shape<MODE>::GRADS ? down : max((units + MOST_UNITS - 1) / MOST_UNITS, units / 8);
      const int inside = number - first;
      if (inside < high * across) {
        const int strip = inside / (STRIP * across);
        const int height = min(high - strip * STRIP, STRIP);
        const int at = inside - strip * STRIP * across;
        const int place = strip * STRIP + at % height;
        found.expert = expert;
        found.feature = at / height * 256;
        found.row = start;
        found.rows = end - start;
        if (Shape<MODE>::GRADS) {
          found.column = place * Shape<MODE>::COLUMNS;
        } else {
          const int each = units / high, wider = units % high;
          const int skipped = (place * each + min(place, wider)) * UNIT;
          found.units = each + (place < wider);
          found.row += skipped;
          found.rows = min(found.units * UNIT, found.rows - skipped);
        }
        return true;
      }
      first += high * across;
      start = end;
      expert++;
    }
    return false;
  }
};

// Numbers of the cluster's tiles, one after the other. The first is its own number. The loading thread of block 0 takes the
// others and gives them to all warps. It cannot run away from them over the end of the slots: a tile has at least one step
// (also where an expert has no rows, see produce), and a stage is filled again only when all have left it.
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
};

template <int MODE>
__device__ __forceinline__ void produce(
    Walk<MODE> walk, Numbers numbers, Counter* counter, const TensorMap* own, const TensorMap* both, u32 steps,
    Shared* shared, int depth, int block) {
  Tile tile;
  int stage = 0;
  u32 parity = 1;  // a barrier that nobody arrived at counts as past its earlier phase
  const int clusters = gridDim.x / 2;
  while (walk.find(numbers.number, tile)) {
    int next = 0;
    if (block == 0) next = atomicAdd(&counter->taken, 1);  // arrives while this tile is loaded, if nothing is done with it
    const int feature = tile.feature + block * 128;
    const int last = Shape<MODE>::GRADS ? max(tile.rows, 1) : depth;
    const int pieces = Shape<MODE>::GRADS ? Shape<MODE>::PIECES : tile.units;
    for (int k = 0; k < last; k += DEPTH) {
      wait(&shared->empty[stage], parity);
      u64* full = &shared->full[stage];
      const u32 at = steps + stage * Shape<MODE>::STEP, tokens = at + OWN;
      expect(full, OWN + pieces * PIECE);
      if (MODE == FORWARD) {
        load_own(at, own, full, k, feature, tile.expert);
      } else if (MODE == GATED) {
        load_gated(at, own, full, k, feature / 2, tile.expert);
      } else if (MODE == BACKWARD) {
        load_own(at, own, full, feature, k, tile.expert);
        load_own(at + OWN / 2, own, full, feature + 64, k, tile.expert);
      } else {
        load_own(at, own, full, feature, tile.row + k, 0);
        load_own(at + OWN / 2, own, full, feature + 64, tile.row + k, 0);
      }
      if (Shape<MODE>::GRADS) {
        for (int i = block; i < Shape<MODE>::COLUMNS / 64; i += 2)
          load_for_both(tokens + i * 2 * PIECE, both, full, tile.column + i * 64, tile.row + k);
      } else {
        for (int i = block; i < pieces; i += 2) load_for_both(tokens + i * PIECE, both, full, k, tile.row + i * UNIT);
      }
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    if (block == 0)
      numbers.publish(clusters + next);
    else
      numbers.receive();
  }
  if (block == 0 && atomicAdd(&counter->finished, 1) == clusters - 1) {
    counter->taken = 0;
    counter->finished = 0;
  }
}

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
__device__ __forceinline__ void step(
    float (&total)[WIDTH / 2], u32 own, int left_over, int warpgroup, int thread) {
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
      product<N, !deep, false, FIRST>((float(&)[N / 2])total[0], left + i * along, right + i * beside, i);
      product<N, !deep, false, FIRST>(
          (float(&)[N / 2])total[N / 2], left + i * along, right + i * beside + (N * 128 >> 4), i);
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
  if (++stage == STAGES) stage = 0, parity ^= 1;
  for (int k = DEPTH; k < depth; k += DEPTH) {
    wait(&shared->full[stage], parity);
    step<MODE, WIDTH, false>(total, steps + stage * size, depth - k, warpgroup, thread);
    wgmma_wait<1>(total);
    if (thread < 2) release(&shared->empty[before], thread);
    before = stage;
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  wgmma_wait<0>(total);
  if (thread < 2) release(&shared->empty[before], thread);
}

// Up to 64 columns of results into a chunk: 64 rows of 128 swizzled bytes. TURNED: a row is a token, else a feature.
template <bool TURNED>
__device__ __forceinline__ void stage_chunk(const float* total, int columns, u32 chunk, int thread) {
  const int warp = thread / 32, lane = thread % 32;
  const int row = 16 * warp + 8 * (lane / 8 % 2);
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    if (8 * j >= columns) break;  // known where this is unrolled
    const int column = 8 * (j + lane / 16);
    const int line = (TURNED ? column : row) + lane % 8, piece = (TURNED ? row : column) / 8;
    const u32 at = chunk + line * 128 + (piece ^ line % 8) * 16;
    const u32 a = pack(total[4 * j], total[4 * j + 1]), b = pack(total[4 * j + 2], total[4 * j + 3]);
    const u32 c = pack(total[4 * j + 4], total[4 * j + 5]), d = pack(total[4 * j + 6], total[4 * j + 7]);
    if (TURNED)
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b),
                   "r"(c), "r"(d) : "memory");
    else
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c),
                   "r"(d) : "memory");
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

// A chunk of WIDE features, 64 or 32, that holds another expert's rows, too: only its first `rows` tokens of at most
// `features`.
template <int WIDE>
__device__ __forceinline__ void store_rows(char* to, u32 chunk, int rows, int features, int width, int thread) {
  constexpr int PIECES = WIDE / 8;
  for (int i = thread; i < rows * PIECES; i += 128) {
    const int token = i / PIECES, piece = i % PIECES;
    if (piece * 8 >= features) continue;
    u32 a, b, c, d;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                 : "r"(chunk + token * WIDE * 2 + (piece ^ token * PIECES / 8 % PIECES) * 16) : "memory");
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to + ((u64)token * width + piece * 8) * 2), "r"(a), "r"(b),
                 "r"(c), "r"(d) : "memory");
  }
}

template <int MODE, int WIDTH>
__device__ __forceinline__ void token_tile(
    const Tile& tile, const TensorMap* map, char* out, int width, u32 steps, u32 staging, Shared* shared, int depth, int& stage,
    u32& parity, int& ring, int block, int warpgroup, int thread) {
  float total[WIDTH / 2];
  multiply<MODE, WIDTH>(total, steps, shared, depth, stage, parity, warpgroup, thread);
  const int feature = tile.feature + block * 128 + warpgroup * 64;
#pragma unroll
  for (int c = 0; c < (WIDTH + 63) / 64; c++) {
    const u32 chunk = staging + ring * CHUNK;
    if (++ring == RING) ring = 0;
    staging_free<RING - 1>(warpgroup);
    stage_chunk<true>(total + 32 * c, WIDTH - 64 * c, chunk, thread);
    staging_filled(warpgroup);
    const int row = tile.row + c * 64, rows = tile.rows - c * 64;
    if (rows >= 64 && thread == 0 && feature < width) store(map, chunk, feature, row, 0);
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    if (rows < 64) store_rows<64>(out + ((u64)row * width + feature) * 2, chunk, rows, width - feature, width, thread);
  }
}

__device__ __forceinline__ float silu(float g) {
  float power, s;  // the instructions that Triton makes of kernels/activation.py: a backward makes the same values again
  asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"((0.0f - g) * 1.4426950216293335f));
  asm("div.full.f32 %0, %1, %2;" : "=f"(s) : "f"(1.0f), "f"(1.0f + power));
  return s * g;
}

// 32 tokens of 8 features of a warp into a small chunk: 64 tokens of 64 swizzled bytes.
__device__ __forceinline__ void stage_small(const u32 (&values)[4], int token, u32 chunk, int thread) {
  const int line = token + thread % 32;
  const u32 at = chunk + line * 64 + (thread / 32 ^ (line / 2 & 3)) * 16;
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(values[0]),
               "r"(values[1]), "r"(values[2]), "r"(values[3]) : "memory");
}

// `out` [N, 2F] is written only where `keep` says so. Rounded first, as by a kernel that would read it.
template <int WIDTH>
__device__ __forceinline__ void gated_tile(
    const Tile& tile, const TensorMap* map, const TensorMap* act_map, char* out, char* act, const float* prob, int keep,
    int width, u32 steps, u32 staging, Shared* shared, int depth, int& stage, u32& parity, int& ring, int block, int warpgroup,
    int thread) {
  float mine[(WIDTH + 127) / 128];  // on their way while the tile is multiplied
#pragma unroll
  for (int i = 0; i < (WIDTH + 127) / 128; i++) mine[i] = thread + 128 * i < tile.rows ? prob[tile.row + thread + 128 * i] : 0.0f;
  float total[WIDTH / 2];
  multiply<GATED, WIDTH>(total, steps, shared, depth, stage, parity, warpgroup, thread);
  const u32 probs = staging + GATED_RING * 3 * SMALL;
#pragma unroll
  for (int i = 0; i < (WIDTH + 127) / 128; i++)
    if (thread + 128 * i < WIDTH)
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(probs + (thread + 128 * i) * 4), "f"(mine[i]) : "memory");
  const int feature = tile.feature / 2 + block * 64 + warpgroup * 32, features = width / 2;
#pragma unroll
  for (int c = 0; c < (WIDTH + 63) / 64; c++) {
    const u32 gates = staging + ring * 3 * SMALL, ups = gates + SMALL, acts = ups + SMALL;
    if (++ring == GATED_RING) ring = 0;
    staging_free<GATED_RING - 1>(warpgroup);  // and all probabilities are there
#pragma unroll
    for (int half = 0; half < 2; half++) {
      if (64 * c + 32 * half >= WIDTH) break;  // known where this is unrolled
      u32 gate[4], up[4], value[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int at = 8 * c + 4 * half + j;
        gate[j] = pack(total[4 * at], total[4 * at + 1]);
        up[j] = pack(total[4 * at + 2], total[4 * at + 3]);
        float p0, p1, g0, g1, u0, u1;
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(p0), "=f"(p1) : "r"(probs + (8 * at + thread % 4 * 2) * 4)
                     : "memory");
        unpack(gate[j], g0, g1);
        unpack(up[j], u0, u1);
        value[j] = pack(silu(g0) * u0 * p0, silu(g1) * u1 * p1);
      }
      stage_small(value, 32 * half, acts, thread);
      if (keep) {
        stage_small(gate, 32 * half, gates, thread);
        stage_small(up, 32 * half, ups, thread);
      }
    }
    staging_filled(warpgroup);
    const int row = tile.row + c * 64, rows = tile.rows - c * 64;
    if (rows >= 64 && thread == 0 && feature < features) {
      store(act_map, acts, feature, row, 0);
      if (keep) {
        store(map, gates, feature, row, 0);
        store(map, ups, feature, row, 1);
      }
    }
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    if (rows < 64) {
      store_rows<32>(act + ((u64)row * features + feature) * 2, acts, rows, features - feature, features, thread);
      if (keep) {
        char* to = out + ((u64)row * width + feature) * 2;
        store_rows<32>(to, gates, rows, features - feature, width, thread);
        store_rows<32>(to + (u64)features * 2, ups, rows, features - feature, width, thread);
      }
    }
  }
}

// An expert without rows has one step, whose rows all become zeros.
template <int MODE>
__device__ __forceinline__ void weight_tile(
    const Tile& tile, const TensorMap* map, int high, int wide, u32 steps, u32 staging, Shared* shared, int& stage, u32& parity,
    int& turn, int block, int warpgroup, int thread) {
  constexpr int COLUMNS = Shape<MODE>::COLUMNS, PITCH = Shape<MODE>::PITCH;
  const int feature = tile.feature + block * 128 + warpgroup * 64;
  float total[COLUMNS / 2];
  multiply<MODE, COLUMNS>(total, steps, shared, tile.rows, stage, parity, warpgroup, thread);
  if constexpr (MODE == SUMS) {  // onto the old sums, which carry_sums has brought and takes away again
    const u32 at = staging + (thread / 32 * 16 + thread % 32 / 4) * PITCH + thread % 4 * 8;
    wait(&shared->fetched[warpgroup], turn++ & 1);
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const u32 place = at + 8 * h * PITCH + j * 32;
        float first, second;
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(first), "=f"(second) : "r"(place) : "memory");
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(place), "f"(first + total[4 * j + 2 * h]),
                     "f"(second + total[4 * j + 2 * h + 1]) : "memory");
      }
    }
    staging_filled(warpgroup);
    if (thread == 0) arrive(&shared->added[warpgroup]);
  } else {
    staging_free<0>(warpgroup);
#pragma unroll
    for (int c = 0; c < COLUMNS / 64; c++) stage_chunk<false>(total + 32 * c, 64, staging + c * CHUNK, thread);
    staging_filled(warpgroup);
    if (thread == 0 && feature < high) {
      for (int c = 0; c < COLUMNS / 64; c++)
        if (tile.column + c * 64 < wide) store(map, staging + c * CHUNK, tile.column + c * 64, feature, tile.expert);
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
  }
}

// SUMS, one warp for each warpgroup that multiplies: brings a tile's old sums into the staging area while the tile is
// multiplied, and takes the new ones back. An addition in memory would be simpler, but the L2 adds more slowly than memory is
// read and written. No other block has the same tile. `sums`: where each expert's fp32 matrix begins.
__device__ __forceinline__ void carry_sums(
    Walk<SUMS> walk, Numbers numbers, const u64* sums, int high, int wide, u32 staging, Shared* shared, int block, int warpgroup,
    int lane) {
  constexpr int COLUMNS = Shape<SUMS>::COLUMNS, PITCH = Shape<SUMS>::PITCH;
  Tile tile;
  for (int turn = 0; walk.find(numbers.number, tile); numbers.receive(), turn++) {
    const int feature = tile.feature + block * 128 + warpgroup * 64;
    const int rows = max(min(64, high - feature), 0), bytes = min(wide - tile.column, COLUMNS) * 4;
    char* const matrix = (char*)sums[tile.expert] + ((u64)feature * wide + tile.column) * 4;
    u64* const fetched = &shared->fetched[warpgroup];
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // a lane fills the rows that it emptied
    __syncwarp();  // nobody still waits for the tile before
    if (lane == 0) expect(fetched, rows * bytes);
    __syncwarp();
    for (int row = lane; row < rows; row += 32)
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                       staging + row * PITCH),
                   "l"(matrix + (u64)row * wide * 4), "r"(bytes), "r"(address(fetched)) : "memory");
    wait(&shared->added[warpgroup], turn & 1);
    for (int row = lane; row < rows; row += 32)
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(matrix + (u64)row * wide * 4),
                   "r"(staging + row * PITCH), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

template <int MODE>
__device__ __forceinline__ void consume(
    Walk<MODE> walk, Numbers numbers, const TensorMap* map, const TensorMap* act_map, char* out, char* act, const float* prob,
    int keep, int high, int width, u32 steps, u32 staging, Shared* shared, int depth, int block, int warpgroup, int thread) {
  Tile tile;
  int stage = 0, ring = 0, turn = 0;
  u32 parity = 0;
  for (; walk.find(numbers.number, tile); numbers.receive()) {
    if constexpr (Shape<MODE>::GRADS) {
      weight_tile<MODE>(tile, map, high, width, steps, staging, shared, stage, parity, turn, block, warpgroup, thread);
    } else {
#define TOKENS(n)                                                                                                        \
  if constexpr (MODE == GATED)                                                                                           \
    gated_tile<n * UNIT>(tile, map, act_map, out, act, prob, keep, width, steps, staging, shared, depth, stage, parity, ring, \
                         block, warpgroup, thread);                                                                      \
  else                                                                                                                   \
    token_tile<MODE, n * UNIT>(tile, map, out, width, steps, staging, shared, depth, stage, parity, ring, block, warpgroup, \
                               thread);                                                                                  \
  break;
      switch (tile.units) {
        case 1: TOKENS(1)
        case 2: TOKENS(2)
        case 3: TOKENS(3)
        case 4: TOKENS(4)
        case 5: TOKENS(5)
        case 6: TOKENS(6)
        case 7: TOKENS(7)
        case 8: TOKENS(8)
        default: TOKENS(MOST_UNITS)
      }
    }
  }
}

template <int MODE>
__device__ __forceinline__ void run(
    const TensorMap* own, const TensorMap* both, const TensorMap* map, const TensorMap* act_map, char* out, char* act,
    const int* ends, const void* extra, Counter* counter, int experts, int high, int width, int depth, int keep) {
  extern __shared__ char memory[];
  const u32 base = (address(memory) + 1023) / 1024 * 1024;
  const u32 staging = base + STAGES * Shape<MODE>::STEP;
  __shared__ Shared shared;
  const int warpgroup = threadIdx.x / 128, block = block_of_cluster();
  for (int e = threadIdx.x; e < experts; e += blockDim.x) shared.ends[e] = ends[e];
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      start_barrier(&shared.full[s], 1);
      start_barrier(&shared.empty[s], 4);  // two warpgroups of two blocks
    }
    for (int s = 0; s < SLOTS; s++) start_barrier(&shared.given[s], 1);
    for (int w = 0; w < 2; w++) {
      start_barrier(&shared.fetched[w], 1);
      start_barrier(&shared.added[w], 1);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  sync_cluster();
  Walk<MODE> walk;
  walk.ends = shared.ends;
  walk.rows = Shape<MODE>::GRADS ? depth : high;
  walk.experts = experts;
  walk.across = ((Shape<MODE>::GRADS ? high : width) + 255) / 256;
  walk.down = (width + Shape<MODE>::COLUMNS - 1) / Shape<MODE>::COLUMNS;
  walk.expert = walk.first = walk.start = 0;
  const Numbers numbers = {&shared, (int)blockIdx.x / 2, 0};
  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) produce<MODE>(walk, numbers, counter, own, both, base, &shared, depth, block);
    if constexpr (MODE == SUMS) {
      if (warp == 1 || warp == 2)
        carry_sums(walk, numbers, (const u64*)extra, high, width, staging + (warp - 1) * Shape<MODE>::STAGING, &shared, block,
                   warp - 1, threadIdx.x % 32);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    const int consumer = warpgroup - 1;
    consume<MODE>(walk, numbers, map, act_map, out, act, (const float*)extra, keep, high, width, base,
                  staging + consumer * Shape<MODE>::STAGING, &shared, depth, block, consumer, threadIdx.x % 128);
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
  // The other block may still signal here, and multicast into here.
  sync_cluster();
}

// high, width, depth: of the token kernels N, J (GATED 2F), K; of the others A, B, N. extra: GATED prob, SUMS the addresses of
// the matrices. act_map, act, keep: of GATED alone.
#define KERNEL(name, mode)                                                                                              \
  extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1) name(                                   \
      const __grid_constant__ TensorMap own, const __grid_constant__ TensorMap both, const __grid_constant__ TensorMap map, \
      const __grid_constant__ TensorMap act_map, char* out, char* act, const int* ends, const void* extra, int counter,   \
      int experts, int high, int width, int depth, int keep) {                                                           \
    run<mode>(&own, &both, &map, &act_map, out, act, ends, extra, counters + counter, experts, high, width, depth, keep); \
  }

KERNEL(grouped_forward, FORWARD)
KERNEL(grouped_gated, GATED)
KERNEL(grouped_backward, BACKWARD)
KERNEL(grouped_weights, WEIGHTS)
KERNEL(grouped_sums, SUMS)
