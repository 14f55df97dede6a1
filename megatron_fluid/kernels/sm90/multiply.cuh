// What the consumers of the kernels for Hopper do: multiply the stages, stage the results, store them. Included by sm90.cuh.

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

// By one thread of a block, before any other uses them. `users`: warpgroups of both blocks that multiply.
__device__ __forceinline__ void start_barriers(Shared* shared, int users = 4) {
  for (int s = 0; s < MOST_STAGES; s++) {
    start_barrier(&shared->full[s], 1);
    start_barrier(&shared->empty[s], users);
  }
  for (int s = 0; s < SLOTS; s++) start_barrier(&shared->given[s], 1);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
