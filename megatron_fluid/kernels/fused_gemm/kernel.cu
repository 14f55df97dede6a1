// The GEMMs of AllGather-GEMM and GEMM-ReduceScatter in one kernel each, for Hopper (sm_90a). Compiled at first use
// by megatron_fluid/kernels/sm90.
//
// Why one kernel: a GEMM cut into one launch for each rank loses part of a wave of tiles at every cut, which costs more than
// the communication that the cut hides. Why not Triton: see grouped_gemm/kernel.cu; the parts are the same, in sm90.cuh.
//
// W ranks, rank r; A in W blocks of m rows (gather), or C in W blocks of m rows (scatter); weights [N, K] (FORWARD) or [K, N]
// (BACKWARD). C[i, n] = sum_k A[i, k] w[n, k] (+ bias[n]). Tiles are taken block after block, so that what waits comes last.
//
// Gather: the own block first, from where the caller has it, then those of r + 1, r + 2, ..., which their ranks push into this
// rank's receive buffer, whole or in chunks of K with a flag behind each. The thread that loads waits for a chunk before its
// first step. Where tiles are few and K is long, a tile is cut along K, so that whole waves of pieces keep all SMs busy; who
// finishes the last piece adds them up.
//
// Scatter: the blocks of r + 1, r + 2, ... first, the own last, each to an address of its own, on this GPU. Tiles are counted
// by chunks of columns once they are stored, for copy engines that bring a chunk to its owner. (Stores over NVLink come in
// bursts that hold up the tiles behind them, and to add other ranks' results in the epilogue, where no warp multiplies, takes
// longer than a kernel that does nothing else.)
//
// Nobody waits for a rank that waits: what is pushed depends on no flag. A wait that ends by its time limit
// leaves a record (megatron_fluid/kernels/flags.py) and goes on, and so do all after it. The rows that it waited for become
// NaN: one value a row is enough, which a product of rows does not lose.
constexpr int MOST_UNITS = 8, RING = 2;
constexpr unsigned long long MOST_TRIES = 1ull << 40;  // whoever waits here may wait for a rank, whose wait is bounded by time
#include "sm90.cuh"

constexpr int MOST_RANKS = 8, MOST_CHUNKS = 64;

// -------- Parameters and tiles ---------------------------------------------------------------------------------------------

// What one launch works on. What a kind does not use may be left from another launch.
struct Call {
  char* out[MOST_RANKS];   // gather: [0] C [W m, N]. scatter: each owner's block [m, N]
  int* counters;           // scatter: [W, MOST_CHUNKS] by owner, of parts of tiles that are stored; they only grow
  const int* flags;        // gather: [W] by source
  unsigned short* landed;  // gather: [W m, K], where the others' rows arrive
  const char* bias;        // gather: [N] or null
  float4* partials;        // gather: [tiles, 2 blocks, 2 warpgroups, splits, 32, 128 threads]
  int* arrivals;           // gather: [tiles, 2, 2] of splits; zero between launches
  u64* errors;             // [W, 2]
  int* abort;
  u64 timeout_ns;
  int value;  // gather: what flags reach with the first chunk; at least one more with each after it
  int ranks, rank, operation;
  int rows, width, depth;  // m, N, K
  int high;                // tiles of tokens of a block
  int chunks;              // scatter: of the columns of each strip of a block
  int part;                // gather: how much of K, a multiple of DEPTH, a chunk of a block has
  int splits, span;        // gather: of K, and how much of it, a multiple of DEPTH, each has
};

struct Maps {
  TensorMap weights;
  Boxes rows, landed;         // rows: gather: the own block; scatter: all of A
  TensorMap out[MOST_RANKS];  // as Call::out
};

struct Tile {
  int step, block;  // the step-th block to be worked on, and whose it is
  int row, rows;    // in the block
  int units, feature;
  int chunk;          // of the block, which is sent as one; less than MOST_CHUNKS
  int split, number;  // which part of K, and the number of the tile without it
};

// From the number of a tile to the tile.
struct Walk {
  int ranks, first;  // the block of step 0
  int rows, across, high, chunks, splits;

  __device__ __forceinline__ bool find(int number, Tile& found) const {
    const int each_block = high * across;
    found.step = number / (each_block * splits);
    if (found.step >= ranks) return false;
    found.block = (first + found.step) % ranks;
    number -= found.step * each_block * splits;
    found.split = number / each_block;
    const int inside = number - found.split * each_block;
    found.number = found.step * each_block + inside;
    const Place place = place_of(inside, high, across);
    const Part part = part_of((rows + UNIT - 1) / UNIT, high, place.row);
    found.feature = place.column * 256;
    found.chunk = place.strip * chunks + place.column / ((across + chunks - 1) / chunks);
    found.units = part.size;
    found.row = part.first * UNIT;
    found.rows = min(found.units * UNIT, rows - found.row);
    return true;
  }
};

// -------- Waits for other ranks --------------------------------------------------------------------------------------------

__device__ __forceinline__ int look(const int* flag) {
  int seen;
  asm volatile("ld.acquire.sys.global.b32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
  return seen;
}

__device__ __forceinline__ u64 now_ns() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Until `flag` has reached `value`, or false. As megatron_fluid.kernels.flags.wait.
__device__ __forceinline__ bool await(const int* flag, int value, const Call& call, int peer, int round) {
  int seen = look(flag);
  if (seen - value >= 0) return true;
  const u64 start = now_ns();
  while (*(volatile int*)call.abort == 0) {
    __nanosleep(50);
    seen = look(flag);
    if (seen - value >= 0) return true;
    if (now_ns() - start > call.timeout_ns) {
      call.errors[peer * 2 + 1] = (u64)(u32)value << 32 | (u32)seen;
      call.errors[peer * 2] = 1ull << 62 | (u64)call.operation << 32 | (u32)round;
      *(volatile int*)call.abort = 1;
    }
  }
  return false;
}

// The first of each of `count` rows of `pitch` values becomes NaN (of fp16 and of bf16).
__device__ __noinline__ void mark_rows(unsigned short* rows, int count, int pitch) {
  for (int row = 0; row < count; row++) *(volatile unsigned short*)(rows + (u64)row * pitch) = 0x7fff;
}

// -------- Producer: thread 0 of each block fills the stages ----------------------------------------------------------------

template <int MODE, bool SCATTER>
__device__ __forceinline__ void produce(
    const Walk& walk, Numbers numbers, Counter* counter, const Maps& maps, const Call& call, u32 steps, Shared* shared,
    int block) {
  Tile tile;
  int stage = 0;
  u32 parity = 1;   // a barrier that nobody arrived at counts as past its earlier phase
  u32 arrived = 1;  // bits of the steps whose whole blocks are known to be there
  // Also the first tile is taken, and not given with the cluster's number: a cluster that finds no SM, because others have it,
  // must not keep a tile that peers wait for.
  numbers.advance(block, block == 0 ? counter->take() : 0);
  while (walk.find(numbers.number, tile)) {
    int next = 0;
    if (block == 0) next = counter->take();  // arrives while this tile is loaded, if nothing is done with it
    const bool landed = !SCATTER && tile.step > 0;
    const int begin = tile.split * call.span, end = min(begin + call.span, call.depth);
    int until = SCATTER || arrived >> tile.step & 1 ? end : begin;  // K at which a chunk is wanted
    const Boxes& boxes = landed ? maps.landed : maps.rows;
    const int row = tile.row + (landed || SCATTER ? tile.block * call.rows : 0);
    const int feature = tile.feature + block * 128;
    for (int k = begin; k < end; k += DEPTH) {
      if (!SCATTER && k == until) {
        const int chunk = k / call.part;
        if (!await(call.flags + tile.block, call.value + chunk, call, tile.block, tile.step))
          mark_rows(call.landed + ((u64)tile.block * call.rows + tile.row) * call.depth + k, tile.rows, call.depth);
        asm volatile("fence.proxy.async.global;" ::: "memory");  // what follows reads by TMA
        until = (chunk + 1) * call.part;
      }
      wait(&shared->empty[stage], parity);
      u64* full = &shared->full[stage];
      const u32 at = steps + stage * Shape<MODE>::STEP, tokens = at + OWN;
      expect(full, OWN + tile.units * PIECE);
      if (MODE == FORWARD) {
        load_own(at, &maps.weights, full, k, feature, 0);
      } else {
        load_own(at, &maps.weights, full, feature, k, 0);
        load_own(at + OWN / 2, &maps.weights, full, feature + 64, k, 0);
      }
      load_tokens(tokens, boxes.maps, full, k, row, tile.units, block);
      if (++stage == Shape<MODE>::STAGES) stage = 0, parity ^= 1;
    }
    if (end == call.depth) arrived |= 1u << tile.step;
    numbers.advance(block, next);
  }
  if (block == 0) counter->finish();
}

// -------- Scatter: count what is stored ------------------------------------------------------------------------------------

// Scatter: between each warpgroup that multiplies and the thread that counts its stored tiles; each waits for the other.
struct Counted : Shared {
  u64 stored[2], seen[2];
};

// Scatter, a thread: counts stored tiles for the copy engines. A warpgroup that is done with a tile says by `stored` that all
// it stored for the tile before has left, and hears by `seen` that this was seen, without which it could come round twice.
__device__ __forceinline__ void count_stored(const Walk& walk, Numbers numbers, const Call& call, Counted* shared) {
  Tile tile;
  int* uncounted = nullptr;  // of the tile before
  numbers.receive();
  for (int turn = 0;; numbers.receive(), turn++) {
    const bool more = walk.find(numbers.number, tile);
    for (int warpgroup = 0; warpgroup < 2; warpgroup++) {
      wait(&shared->stored[warpgroup], turn & 1);
      if (more) arrive(&shared->seen[warpgroup]);
    }
    if (uncounted) {
      asm volatile("fence.proxy.async;" ::: "memory");
      asm volatile("red.release.sys.global.add.s32 [%0], 2;" ::"l"(uncounted) : "memory");
    }
    if (!more) return;
    uncounted = call.counters + tile.block * MOST_CHUNKS + tile.chunk;
  }
}

// Scatter: everything that the warpgroup has stored has left, for `turn` tiles.
__device__ __forceinline__ void tell_stored(Counted* shared, int turn, int warpgroup, int thread) {
  if (turn > 0) wait(&shared->seen[warpgroup], (turn - 1) & 1);
  sync_warpgroup(warpgroup);
  if (thread) return;
  asm volatile("cp.async.bulk.wait_group 0;\nfence.proxy.async;" ::: "memory");
  arrive(&shared->stored[warpgroup]);
}

// -------- Consumers --------------------------------------------------------------------------------------------------------

// Gather: leaves the sums over a part of K where the warpgroup that comes last to this tile finds them. For that one, true, and
// the sums over all of K, taken in the order of the parts.
template <int WIDTH>
__device__ __forceinline__ bool last_to_come(
    float (&total)[WIDTH / 2], const Tile& tile, const Call& call, int* last, int block, int warpgroup, int thread) {
  const int part = (tile.number * 2 + block) * 2 + warpgroup;
  float4* const all = call.partials + (u64)part * call.splits * 32 * 128 + thread;
  float4* const mine = all + tile.split * 32 * 128;
#pragma unroll
  for (int i = 0; i < WIDTH / 8; i++)
    __stcg(mine + i * 128, make_float4(total[4 * i], total[4 * i + 1], total[4 * i + 2], total[4 * i + 3]));
  __threadfence();
  sync_warpgroup(warpgroup);
  if (thread == 0) *last = atomicAdd(call.arrivals + part, 1) == call.splits - 1;
  sync_warpgroup(warpgroup);
  if (!*last) return false;
  __threadfence();
  if (thread == 0) call.arrivals[part] = 0;
#pragma unroll
  for (int i = 0; i < WIDTH / 2; i++) total[i] = 0.f;
  for (int split = 0; split < call.splits; split++) {
#pragma unroll
    for (int i = 0; i < WIDTH / 8; i++) {
      const float4 v = __ldcg(all + (split * 32 + i) * 128);
      total[4 * i] += v.x, total[4 * i + 1] += v.y, total[4 * i + 2] += v.z, total[4 * i + 3] += v.w;
    }
  }
  return true;
}

template <int MODE, bool SCATTER, int WIDTH>
__device__ __forceinline__ void finish_tile(
    const Tile& tile, const Maps& maps, const Call& call, u32 steps, u32 staging, Counted* shared, int* last, int& stage,
    u32& parity, int& ring, int& turn, int block, int warpgroup, int thread) {
  float total[WIDTH / 2];
  const int depth = min(call.span, call.depth - tile.split * call.span);
  multiply<MODE, WIDTH>(total, steps, shared, depth, stage, parity, warpgroup, thread);
  if (!SCATTER && call.splits > 1 && !last_to_come<WIDTH>(total, tile, call, last, block, warpgroup, thread)) return;
  const int feature = tile.feature + block * 128 + warpgroup * 64, features = call.width - feature;
  if (!SCATTER && call.bias) {
    const int at = feature + thread / 32 * 16 + thread % 32 / 4;  // a thread has two features
    float bias[2], none;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      unsigned short word = 0;
      if (at + 8 * h < call.width) word = ((const unsigned short*)call.bias)[at + 8 * h];
      unpack(word, bias[h], none);
    }
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++) total[i] += bias[i / 2 % 2];
  }
  u32 pairs[WIDTH / 4];  // from here on, so that half of the registers are free
#pragma unroll
  for (int i = 0; i < WIDTH / 4; i++) {
    pairs[i] = pack(total[2 * i], total[2 * i + 1]);
    asm volatile("" : "+r"(pairs[i]));
  }
  if (SCATTER) tell_stored(shared, turn++, warpgroup, thread);
  const int target = SCATTER ? tile.block : 0;
  const u64 first = (u64)tile.row + (SCATTER ? 0 : (u64)tile.block * call.rows), pitch = (u64)call.width * 2;
  char* const out = call.out[target] + first * pitch + feature * 2;
#pragma unroll
  for (int c = 0; c < (WIDTH + 63) / 64; c++) {
    const u32 chunk = staging + ring * CHUNK;
    if (++ring == RING) ring = 0;
    staging_free<RING - 1>(warpgroup);
    stage_packed<true>(pairs + 16 * c, WIDTH - 64 * c, chunk, thread);
    staging_filled(warpgroup);
    const int rows = tile.rows - c * 64;
    if (rows >= 64 && thread == 0 && features > 0) store(&maps.out[target], chunk, feature, (int)first + c * 64, 0);
    if (rows < 64) store_rows<64>(out + c * 64 * pitch, chunk, rows, features, call.width, thread);
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
}

template <int MODE, bool SCATTER>
__device__ __forceinline__ void consume(
    const Walk& walk, Numbers numbers, const Maps& maps, const Call& call, u32 steps, u32 staging, Counted* shared, int* last,
    int block, int warpgroup, int thread) {
  Tile tile;
  int stage = 0, ring = 0, turn = 0;
  u32 parity = 0;
  numbers.receive();
  for (; walk.find(numbers.number, tile); numbers.receive()) {
#define TOKENS(n)                                                                                           \
  finish_tile<MODE, SCATTER, n * UNIT>(                                                                     \
      tile, maps, call, steps, staging, shared, last, stage, parity, ring, turn, block, warpgroup, thread); \
  break;
    switch (tile.units) {
      case 1:
        TOKENS(1)
      case 2:
        TOKENS(2)
      case 3:
        TOKENS(3)
      case 4:
        TOKENS(4)
      case 5:
        TOKENS(5)
      case 6:
        TOKENS(6)
      case 7:
        TOKENS(7)
      default:
        TOKENS(MOST_UNITS)
    }
  }
  if (SCATTER) tell_stored(shared, turn, warpgroup, thread);
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// -------- Kernel -----------------------------------------------------------------------------------------------------------

template <int MODE, bool SCATTER>
__device__ __forceinline__ void run(const Maps& maps, const Call& call, Counter* counter) {
  extern __shared__ char memory[];
  static_assert(
      1024 + Shape<MODE>::STAGES * Shape<MODE>::STEP + 2 * Shape<MODE>::STAGING <= SHARED_BYTES,
      "stages and staged results fit into shared memory");
  const u32 base = (address(memory) + 1023) / 1024 * 1024;
  const u32 staging = base + Shape<MODE>::STAGES * Shape<MODE>::STEP;
  __shared__ Counted shared;
  __shared__ int last[2];  // of each warpgroup that multiplies
  const int warpgroup = threadIdx.x / 128, block = block_of_cluster();
  if (threadIdx.x == 0) {
    for (int w = 0; w < 2; w++) start_barrier(&shared.stored[w], 1), start_barrier(&shared.seen[w], 1);
    start_barriers(&shared);
  }
  __syncthreads();
  sync_cluster();
  const int first = SCATTER ? (call.rank + 1) % call.ranks : call.rank;
  const Walk walk = {call.ranks, first, call.rows, (call.width + 255) / 256, call.high, call.chunks, call.splits};
  const Numbers numbers = {&shared, 0, 0};
  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    if (threadIdx.x == 0) produce<MODE, SCATTER>(walk, numbers, counter, maps, call, base, &shared, block);
    if (SCATTER && threadIdx.x == 96) count_stored(walk, numbers, call, &shared);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    const int consumer = warpgroup - 1;
    consume<MODE, SCATTER>(
        walk, numbers, maps, call, base, staging + consumer * Shape<MODE>::STAGING, &shared, last + consumer, block, consumer,
        threadIdx.x % 128);
  }
  // The other block may still signal here, and multicast into here.
  sync_cluster();
}

// A compilation makes one kernel, ENTRY of mode ENTRY_MODE, so that all are compiled side by side.
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
    ENTRY(const __grid_constant__ Maps maps, const __grid_constant__ Call call, int counter) {
  run<ENTRY_MODE>(maps, call, counters + counter);
}
