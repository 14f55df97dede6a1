// Grouped GEMMs of expert rows for Hopper (sm_90a): TMA, wgmma, clusters of two blocks. Compiled at first use
// by megatron_fluid/kernels/sm90, which also writes wgmma.h: the wgmma instructions.
// Triton's tiles have one height, so an expert's last rows cost a whole tile, and it cannot multicast. Here (see sm90.cuh) an
// expert's rows are cut into as few tiles as hold them, of up to 288 tokens, in units of 32. Where rows are many, tiles stay at
// 256: one instruction instead of two, and blocks of like tiles stay in step and share more in the L2.
//
// FORWARD    out[n, j] = sum_k x[n, k] w[e, j, k]     w [El, J, K]
// GATED      the same for w [El, 2F, K], and act[n, f] = silu(out[n, f]) out[n, F + f] prob[n]; with larger tiles WIDE
// BACKWARD   out[n, j] = sum_k x[n, k] w[e, k, j]     w [El, K, J]
// WEIGHTS    out[e, a, b] = sum_n left[n, a] right[n, b]
// SUMS       the same, added to fp32 matrices; LONG_SUMS for experts with many rows, and where the matrices are written
// for the rows n of expert e: ends[e - 1] to ends[e].
//
// Shapes: N expert rows, El local experts; token kernels: K depth, J features (2F gated); weight gradients: A x B of left [N,
// A] and right [N, B].
constexpr int MOST_UNITS = 9, RING = 1;
constexpr unsigned int MOST_TRIES = 1u << 24;  // a step takes a microsecond: seconds are a fault
#include "sm90.cuh"

constexpr int LONG_UNITS = 48;    // of an expert whose rows fill many tiles
constexpr int MOST_STAGED = 256;  // experts whose ends fit in shared memory

// -------- Tiles ------------------------------------------------------------------------------------------------------------

// The tiles of one cluster, in the same order for every warp.
struct Tile {
  // GRADS: row and rows are the whole expert's, feature is one of left. GATES: twice a feature.
  int expert, row, rows, feature;
  int units;   // of tokens
  int column;  // GRADS: of right
};

// From the number of a tile to the tile; numbers grow from call to call.
template <int MODE>
struct Walk {
  const int* ends;
  int rows;                   // of all experts, at most: ends that are larger or that decrease lead nowhere else
  int experts, across, down;  // across: pairs of 128 features; down: tiles of COLUMNS (GRADS)
  int expert, first, start;
  bool reversed;  // the matrices of the experts lie in descending order
  bool fresh;     // LONG_SUMS: there are no old sums, so that an expert without rows is written zeros

  // Into how many tiles so many units of tokens are cut: 8 units fill the widest instruction; a ninth may spare a tile.
  static __device__ __forceinline__ int tiles_of(int units) {
    const int most = units >= LONG_UNITS ? 8 : Shape<MODE>::UNITS;
    return max((units + most - 1) / most, units / 8);
  }

  __device__ __forceinline__ bool find(int number, Tile& found) {
    while (expert < experts) {
      const int end = max(start, min(ends[expert], rows));
      const int units = (end - start + UNIT - 1) / UNIT;
      const int high = Shape<MODE>::ADDS && end == start && !fresh ? 0 : Shape<MODE>::GRADS ? down : tiles_of(units);
      const int inside = number - first;
      if (inside < high * across) {
        const Place place = place_of(inside, high, across);
        found.expert = !Shape<MODE>::GRADS && reversed ? experts - 1 - expert : expert;
        found.feature = place.column * 256;
        found.row = start;
        found.rows = end - start;
        if (Shape<MODE>::GRADS) {
          found.column = place.row * Shape<MODE>::COLUMNS;
        } else {
          const Part part = part_of(units, high, place.row);
          found.units = part.size;
          found.row += part.first * UNIT;
          found.rows = min(found.units * UNIT, found.rows - part.first * UNIT);
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

// -------- Producer: thread 0 of each block fills the stages ----------------------------------------------------------------

template <int MODE>
__device__ __forceinline__ void produce(
    Walk<MODE> walk, Numbers numbers, Counter* counter, const TensorMap* own, const Boxes* both, u32 steps, Shared* shared,
    int depth, int block) {
  Tile tile;
  int stage = 0;
  u32 parity = 1;  // a barrier that nobody arrived at counts as past its earlier phase
  const int clusters = gridDim.x / 2;
  while (walk.find(numbers.number, tile)) {
    int next = 0;
    if (block == 0) next = counter->take();  // arrives while this tile is loaded, if nothing is done with it
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
      } else if (Shape<MODE>::GATES) {
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
          load_for_both(tokens + i * 2 * PIECE, both->maps, full, tile.column + i * 64, tile.row + k);
      } else {
        load_tokens(tokens, both->maps, full, k, tile.row, pieces, block);
      }
      if (++stage == Shape<MODE>::STAGES) stage = 0, parity ^= 1;
    }
    numbers.advance(block, clusters + next);
  }
  if (block == 0) counter->finish();
}

// -------- Consumers, token kernels: multiply a tile, store its results -----------------------------------------------------

// The number of the chunk of 64 tokens that is staged and not stored, because it holds rows of another expert; -1 without one.
template <int MODE, bool SENDS, int WIDTH>
__device__ __forceinline__ int token_tile(
    const Tile& tile, const TensorMap* map, const Owners& owners, int width, u32 steps, u32 staging, Shared* shared, int depth,
    int& stage, u32& parity, int block, int warpgroup, int thread) {
  u32 mine[(WIDTH + 127) / 128] = {};  // on their way while the tile is multiplied
  if constexpr (SENDS) {
#pragma unroll
    for (int i = 0; i < (WIDTH + 127) / 128; i++)
      if (thread + 128 * i < tile.rows) mine[i] = owners.origins[tile.row + thread + 128 * i];
  }
  float total[WIDTH / 2];
  multiply<MODE, WIDTH>(total, steps, shared, depth, stage, parity, warpgroup, thread);
  const int feature = tile.feature + block * 128 + warpgroup * 64;
  if constexpr (SENDS) {
    send_tile<WIDTH>(tile.rows, owners, mine, total, feature, width, staging, warpgroup, thread);
    return -1;
  }
#pragma unroll
  for (int c = 0; c < (WIDTH + 63) / 64; c++) {
    const int rows = tile.rows - c * 64;
    if (rows <= 0) break;
    staging_free<0>(warpgroup);
    stage_chunk<true>(total + 32 * c, WIDTH - 64 * c, staging, thread);
    staging_filled(warpgroup);
    if (rows < 64) return c;
    if (thread == 0 && feature < width) store(map, staging, feature, tile.row + c * 64, 0);
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
  return -1;
}

// Where a warpgroup stages gates, ups and activations, one of each unit of a chunk, and behind them the probabilities.
template <int MODE>
struct Staged {
  static constexpr int HALVES = Shape<MODE>::HALVES, ONCE = 32 * HALVES;
  u32 gates, ups, acts, probs;

  explicit __device__ __forceinline__ Staged(u32 at)
      : gates(at), ups(gates + HALVES * SMALL), acts(ups + HALVES * SMALL), probs(acts + HALVES * SMALL) {}
};

// `out` [N, 2F] is written only where `keep` says so. Rounded first, as by a kernel that would read it. Returns as token_tile,
// of chunks of Staged::ONCE tokens.
template <int MODE, int WIDTH>
__device__ __forceinline__ int gated_tile(
    const Tile& tile, const TensorMap* map, const TensorMap* act_map, const float* prob, int keep, int width, u32 steps,
    u32 staging, Shared* shared, int depth, int& stage, u32& parity, int block, int warpgroup, int thread) {
  float mine[(WIDTH + 127) / 128];  // on their way while the tile is multiplied
#pragma unroll
  for (int i = 0; i < (WIDTH + 127) / 128; i++)
    mine[i] = thread + 128 * i < tile.rows ? prob[tile.row + thread + 128 * i] : 0.0f;
  float total[WIDTH / 2];
  multiply<MODE, WIDTH>(total, steps, shared, depth, stage, parity, warpgroup, thread);
  constexpr int HALVES = Shape<MODE>::HALVES, ONCE = Staged<MODE>::ONCE;
  const Staged<MODE> staged(staging);
#pragma unroll
  for (int i = 0; i < (WIDTH + 127) / 128; i++)
    if (thread + 128 * i < WIDTH)
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(staged.probs + (thread + 128 * i) * 4), "f"(mine[i]) : "memory");
  const int feature = tile.feature / 2 + block * 64 + warpgroup * 32, features = width / 2;
#pragma unroll
  for (int c = 0; c < (WIDTH + ONCE - 1) / ONCE; c++) {
    const int row = tile.row + c * ONCE, rows = tile.rows - c * ONCE;
    if (rows <= 0) break;
    staging_free<0>(warpgroup);  // and all probabilities are there
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
      if (ONCE * c + 32 * half >= WIDTH) break;  // known where this is unrolled
      u32 gate[4], up[4], value[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int at = 4 * (HALVES * c + half) + j;
        gate[j] = pack(total[4 * at], total[4 * at + 1]);
        up[j] = pack(total[4 * at + 2], total[4 * at + 3]);
        float p0, p1, g0, g1, u0, u1;
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                     : "=f"(p0), "=f"(p1)
                     : "r"(staged.probs + (8 * at + thread % 4 * 2) * 4)
                     : "memory");
        unpack(gate[j], g0, g1);
        unpack(up[j], u0, u1);
        value[j] = pack(silu(g0) * u0 * p0, silu(g1) * u1 * p1);
      }
      stage_small(value, 32 * half, staged.acts, thread);
      if (keep) {
        stage_small(gate, 32 * half, staged.gates, thread);
        stage_small(up, 32 * half, staged.ups, thread);
      }
    }
    staging_filled(warpgroup);
    if (rows < ONCE) return c;
    if (thread == 0 && feature < features) {
      store(act_map, staged.acts, feature, row, 0);
      if (keep) {
        store(map, staged.gates, feature, row, 0);
        store(map, staged.ups, feature, row, 1);
      }
    }
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
  return -1;
}

// -------- Consumers, weight gradients --------------------------------------------------------------------------------------

// A thread's results go to the fp32 matrix straight from its registers: added by the L2, so that no old sum has to come to a
// block, or written. An instruction leaves a thread two of every eight columns; after pairs went to and fro between
// neighbouring lanes it has four of every 16, in two rows eight apart, and four lanes have 64 bytes of a row. `to`: its first
// of them, with `rows` and `columns` from there to the end of the matrix.
template <int COLUMNS>
__device__ __forceinline__ void put_sums(
    const float (&total)[COLUMNS / 2], float* to, int wide, int rows, int columns, bool fresh, bool odd) {
#pragma unroll
  for (int i = 0; i < COLUMNS / 8; i++) {
    const float* const low = total + i / 2 * 8 + i % 2 * 2;
    const float* const high = low + 4;
    float v[4];
#pragma unroll
    for (int k = 0; k < 2; k++) {
      const float other = __shfl_xor_sync(0xffffffffu, odd ? low[k] : high[k], 1);
      v[k] = odd ? other : low[k];
      v[2 + k] = odd ? high[k] : other;
    }
    if (i % 2 * 8 >= rows || i / 2 * 16 >= columns) continue;
    float* const at = to + (u64)(i % 2 * 8) * wide + i / 2 * 16;
    if (fresh)
      asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
    else
      asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
                   : "memory");
  }
}

// An expert without rows has one step, whose rows all become zeros. `sums`, ADDS: each expert's matrix; no other block has the
// tile.
template <int MODE>
__device__ __forceinline__ void weight_tile(
    const Tile& tile, const TensorMap* map, const u64* sums, bool fresh, int high, int wide, u32 steps, u32 staging,
    Shared* shared, int& stage, u32& parity, int block, int warpgroup, int thread) {
  constexpr int COLUMNS = Shape<MODE>::COLUMNS;
  const int feature = tile.feature + block * 128 + warpgroup * 64;
  float total[COLUMNS / 2];
  if constexpr (Shape<MODE>::ADDS) {
    // Of an expert with fewer rows old sums come into the L2 while a tile is multiplied: docs/tuning_notes.md#grouped-gemm
    constexpr int FEW_ROWS = 704;
    const int lane = thread % 32, top = feature + thread / 32 * 16;  // this warp's rows
    float* const matrix = (float*)sums[tile.expert];
    if (!fresh && tile.rows < FEW_ROWS && lane < 16 && top + lane < high)
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(matrix + (u64)(top + lane) * wide + tile.column),
                   "r"(min(wide - tile.column, COLUMNS) * 4)
                   : "memory");
    multiply<MODE, COLUMNS>(total, steps, shared, tile.rows, stage, parity, warpgroup, thread);
    const int row = top + lane / 4, column = tile.column + lane % 2 * 8 + lane % 4 / 2 * 4;
    put_sums<COLUMNS>(total, matrix + (u64)row * wide + column, wide, high - row, wide - column, fresh, lane % 2);
  } else {
    multiply<MODE, COLUMNS>(total, steps, shared, tile.rows, stage, parity, warpgroup, thread);
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

// Stores the chunk that a tile has left staged: once in the kernel, and not in the code of each width.
template <int MODE>
__device__ __forceinline__ void store_left(
    const Tile& tile, int left, char* out, char* act, int keep, int width, u32 staging, int block, int warpgroup, int thread) {
  if constexpr (Shape<MODE>::GATES) {
    const Staged<MODE> staged(staging);
    const int row = tile.row + left * staged.ONCE, rows = tile.rows - left * staged.ONCE, features = width / 2;
    const int feature = tile.feature / 2 + block * 64 + warpgroup * 32, inside = features - feature;
    store_rows<32>(act + ((u64)row * features + feature) * 2, staged.acts, rows, inside, features, thread);
    if (keep) {
      char* const to = out + ((u64)row * width + feature) * 2;
      store_rows<32>(to, staged.gates, rows, inside, width, thread);
      store_rows<32>(to + (u64)features * 2, staged.ups, rows, inside, width, thread);
    }
  } else {
    const int row = tile.row + left * 64, feature = tile.feature + block * 128 + warpgroup * 64;
    char* const to = out + ((u64)row * width + feature) * 2;
    store_rows<64>(to, staging, tile.rows - left * 64, width - feature, width, thread);
  }
}

template <int MODE, bool SENDS>
__device__ __forceinline__ void consume(
    Walk<MODE> walk, Numbers numbers, const TensorMap* map, const TensorMap* act_map, char* out, char* act, const void* extra,
    int keep, int high, int width, u32 steps, u32 staging, Shared* shared, int depth, int block, int warpgroup, int thread) {
  Tile tile;
  int stage = 0;
  u32 parity = 0;
  for (; walk.find(numbers.number, tile); numbers.receive()) {
    if constexpr (Shape<MODE>::GRADS) {
      weight_tile<MODE>(
          tile, map, (const u64*)extra, walk.fresh, high, width, steps, staging, shared, stage, parity, block, warpgroup,
          thread);
    } else {
#define TOKENS(n)                                                                                                              \
  case n / 16:                                                                                                                 \
    if constexpr (!Shape<MODE>::GATES)                                                                                         \
      left = token_tile<MODE, SENDS, n>(                                                                                       \
          tile, map, {(const u32*)extra, (char* const*)act, keep}, width, steps, staging, shared, depth, stage, parity, block, \
          warpgroup, thread);                                                                                                  \
    else if constexpr (n % UNIT == 0 && n <= Shape<MODE>::UNITS * UNIT)                                                        \
      left = gated_tile<MODE, n>(                                                                                              \
          tile, map, act_map, (const float*)extra, keep, width, steps, staging, shared, depth, stage, parity, block,           \
          warpgroup, thread);                                                                                                  \
    break;
      // Of a tile's last unit only the half with rows is multiplied. Not of small or gated tiles: twice their code is slower.
      const bool units = Shape<MODE>::GATES || tile.rows <= 128;
      int left = -1;
      switch (units ? 2 * tile.units : (tile.rows + 15) / 16) {
        // clang-format off
        TOKENS(32) TOKENS(64) TOKENS(96) TOKENS(128) TOKENS(144) TOKENS(160) TOKENS(176) TOKENS(192) TOKENS(208) TOKENS(224)
        TOKENS(240) TOKENS(256) TOKENS(272) TOKENS(288)
        // clang-format on
      }
      if (left >= 0) store_left<MODE>(tile, left, out, act, keep, width, staging, block, warpgroup, thread);
    }
  }
}

// -------- Kernel -----------------------------------------------------------------------------------------------------------

template <int MODE, bool SENDS = false>
__device__ __forceinline__ void run(
    const TensorMap* own, const Boxes* both, const TensorMap* results, char* out, char* act, const int* ends, const void* extra,
    Counter* counter, int experts, int high, int width, int depth, int keep, Shared* shared, int* row_ends) {
  extern __shared__ char memory[];
  static_assert(
      1024 + Shape<MODE>::STAGES * Shape<MODE>::STEP + 2 * Shape<MODE>::STAGING <= SHARED_BYTES,
      "stages and staged results fit into shared memory");
  const u32 base = (address(memory) + 1023) / 1024 * 1024;
  const u32 staging = base + Shape<MODE>::STAGES * Shape<MODE>::STEP;
  const int warpgroup = threadIdx.x / 128, block = block_of_cluster();
  const bool reversed = experts < 0;
  experts = abs(experts);
  for (int e = threadIdx.x; e < min(experts, MOST_STAGED); e += blockDim.x) row_ends[e] = ends[e];
  if (threadIdx.x == 0) start_barriers(shared);
  __syncthreads();
  sync_cluster();
  Walk<MODE> walk;
  walk.ends = experts <= MOST_STAGED ? row_ends : ends;
  walk.rows = Shape<MODE>::GRADS ? depth : high;
  walk.experts = experts;
  walk.across = ((Shape<MODE>::GRADS ? high : width) + 255) / 256;
  walk.down = (width + Shape<MODE>::COLUMNS - 1) / Shape<MODE>::COLUMNS;
  walk.expert = walk.first = walk.start = 0;
  walk.reversed = reversed;
  walk.fresh = MODE == LONG_SUMS && keep;
  const Numbers numbers = {shared, (int)blockIdx.x / 2, 0};
  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    if (threadIdx.x == 0) produce<MODE>(walk, numbers, counter, own, both, base, shared, depth, block);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    const int consumer = warpgroup - 1;
    consume<MODE, SENDS>(
        walk, numbers, results, results + 1, out, act, extra, keep, high, width, base,
        staging + consumer * Shape<MODE>::STAGING, shared, depth, block, consumer, threadIdx.x % 128);
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
  // The other block may still signal here, and multicast into here.
  sync_cluster();
}

// experts: of the token kernels negative where matrices lie in descending order of experts.
// high, width, depth: of the token kernels N, J (GATED 2F), K; of the others A, B, N. extra: GATED prob, ADDS the addresses of
// the matrices, SENDS the origins of the rows; then act has the buffers and keep the shift (Owners).
// both: of the tokens; of right its first map alone, in boxes of 64. Else act is GATED's alone. keep: of LONG_SUMS whether
// the matrices are written instead of added to. A compilation makes one kernel, ENTRY of ENTRY_MODE (mode, SENDS), so that all
// are compiled side by side.
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1) ENTRY(
    const __grid_constant__ TensorMap own, const __grid_constant__ Boxes both, const __grid_constant__ Results results,
    char* out, char* act, const int* ends, const void* extra, int experts, int high, int width, int depth, int keep,
    int counter) {
  __shared__ Shared shared;
  __shared__ int row_ends[MOST_STAGED];
  run<ENTRY_MODE>(
      &own, &both, results.maps, out, act, ends, extra, counters + counter, experts, high, width, depth, keep, &shared,
      row_ends);
}
