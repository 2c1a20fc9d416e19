// GEMMs of prefill: C[M, N] = A[M, K] * W[N, K]^T with f32 sums, for prompt rows.
//
// sm_90a has the wgmma kernels prefill_{qkv,residual,gated}_*. The other architectures have mma.sync kernels
// prefill_{plain,residual,gated}_* (plain and elementwise.cu's `rope_store` replace qkv). sm_75 has no bfloat16 tensor
// cores: there prefill_plain_bf16, without them, is the only bf16 kernel. prefill_plain_f32 exists everywhere.
//
//     A  row-major activations, bf16 or f16, pitch K padded to 64 elements
//     W  atoms, [N / 16][K / 64][16 rows][8 pieces of 16 bytes], piece j of row r at position j ^ (r & 7); N and K
//        padded with zeros. This is TMA's 128-byte swizzle, so tiles are wgmma operands as they are.
//
// Each output is summed over k in one fixed order, whatever M, the row's position and the tile's shape. So a row's bits
// depend on the row alone.
//
// Epilogues:
//
//     qkv       bias, per-head norm and RoPE on the accumulators, then q (f16) and k, v (f16) to two matrices; heads of
//               64, 128 or 256 channels
//     residual  hidden[M][N] f32 += C + bias
//     gated     X[M][N / 2] = activation(gate) * up, in the weights' type. W's rows are gate and up interleaved by 8:
//               rows 16 i .. 16 i + 7 are gate, the next eight up
//     plain     Y[M][N] f32 = C
//
// In this file lane = 4 g + c (ptx.cuh), kb is a block of k, and j a group of 8, 16, 32 or 64 columns.
#include "numbers.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "hopper.cuh"

namespace wgmma_gemm {

// CONSUMERS warpgroups of 64 rows x COLUMNS each per CTA, and one producer. CLUSTER CTAs share W's tile: each loads a
// share and multicasts it.
template <class T_, int COLUMNS_, int CONSUMERS_, int CLUSTER_, int STAGES_>
struct Config {
  typedef T_ T;
  static constexpr int COLUMNS = COLUMNS_, CONSUMERS = CONSUMERS_, CLUSTER = CLUSTER_, STAGES = STAGES_;
  static constexpr int ROWS = 64 * CONSUMERS, TILE_ROWS = ROWS * CLUSTER, BLOCK_K = 64, THREADS = 128 * (CONSUMERS + 1);
  static constexpr int A_BYTES = ROWS * 128, W_BYTES = COLUMNS * 128, STAGE_BYTES = A_BYTES + W_BYTES;
  // Outgoing blocks of a warpgroup: 64 x 64 of 16 bits, or 64 x 32 of f32.
  static constexpr int OUT_BYTES = 64 * 64 * 2, OUT_BUFFERS = CONSUMERS == 2 ? 2 : 1;
  // Stages, outgoing blocks, barriers, room to align.
  static constexpr int SHARED_BYTES = STAGES * STAGE_BYTES + CONSUMERS * OUT_BUFFERS * OUT_BYTES + 16 * STAGES + 1024;
  static constexpr bool HAND_OVER = CONSUMERS == 2;  // the producer releases registers to the consumers
};
// Registers per thread after the hand-over.
enum { PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232 };
// Few rows: small tiles and many stages, since weights come from memory and latency dominates. Otherwise pairs of
// CTAs; slim pairs and single CTAs if wider tiles would leave SMs idle. SHARED: bytes of shared memory. build.rs copies
// these rows for the launcher.
#define TILE(NAME, COLUMNS, CONSUMERS, CLUSTER, STAGES, SHARED) \
  template <class T>                                            \
  using NAME = Config<T, COLUMNS, CONSUMERS, CLUSTER, STAGES>;  \
  static_assert(NAME<Half>::SHARED_BYTES == SHARED);
TILE(Wide, 256, 2, 2, 4, 230464)
TILE(Middle, 128, 2, 2, 6, 230496)
TILE(Tall, 128, 2, 1, 6, 230496)
TILE(Slim, 64, 2, 2, 8, 230528)
TILE(Small, 128, 1, 1, 8, 205952)
TILE(Narrow, 64, 1, 1, 12, 206016)

struct TileIndex {
  int row, column;  // in tiles
};
// Tiles in groups of `group` tile rows, column by column: the tiles in flight form a nearly square
// block, so L2 serves most loads.
DEV TileIndex tile_at(int tile, int tile_rows, int tile_columns, int group) {
  const int group_tiles = group * tile_columns;
  const int index = tile / group_tiles;  // of the group
  const int first = index * group;
  const int height = min(group, tile_rows - first);
  const int rest = tile - index * group_tiles;
  return {first + rest % height, rest / height};
}

// Position of a warpgroup's accumulators in C, and shared memory for its outgoing blocks, which TMA stores or adds.
struct Corner {
  int row;       // first of the warpgroup's 64 rows
  int column;    // first of its COLUMNS columns
  uint32_t out;  // shared memory for outgoing blocks
  int barrier;   // named barrier of this warpgroup
  int sent;      // blocks sent so far
};

// Stores one 64 x 64 block of 16-bit values, the accumulators from `d` on, at (column, row) of a matrix.
// Several stores may be in flight.
template <class C, class Pack>
DEV void send_block(Corner& corner, const float* d, const TensorMap* matrix, int column, int row, Pack pack) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, r = warp * 16 + (lane & 15), half = lane >> 4;
  const uint32_t block = corner.out + corner.sent % C::OUT_BUFFERS * C::OUT_BYTES;
  if ((threadIdx.x & 127) == 0) bulk_wait_read<C::OUT_BUFFERS - 1>();
  bar_sync(corner.barrier, 128);
#pragma unroll
  for (int i = 0; i < 4; i++) {  // 16 columns each; lane l addresses row l % 16, the left or right 8 columns
    const float* v = d + i * 8;
    stmatrix4(block + r * 128 + (((2 * i + half) ^ (r & 7)) << 4), pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]),
              pack(v[6], v[7]));
  }
  fence_async();
  bar_sync(corner.barrier, 128);
  if ((threadIdx.x & 127) == 0) {
    tma_store(matrix, column, row, block);
    bulk_commit();
  }
  corner.sent++;
}

template <int HEAD_DIM>
struct Qkv {
  const TensorMap *q, *kv;       // [M][q_width] and [M][2 kv_width] f16; boxes 64 x 64
  const float* bias;             // [N] or null
  const float *q_norm, *k_norm;  // [HEAD_DIM] or null
  const float2* cos_sin;         // [M][HEAD_DIM / 2]
  float eps;
  int heads, kv_heads, M;
  static constexpr int REGISTERS = HEAD_DIM / 2;  // accumulators of a head

  // v: a head's accumulators. of_head: the head's bias.
  static DEV void add_bias(float* v, const float* of_head, int c) {
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 8; j++) {
      const float2 b = *(const float2*)(of_head + 8 * j + 2 * c);
      v[4 * j] += b.x;
      v[4 * j + 1] += b.y;
      v[4 * j + 2] += b.x;
      v[4 * j + 3] += b.y;
    }
  }

  DEV void normalise(float* v, const float* norm, int c) const {
    float s0 = 0, s1 = 0;
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 8; j++) {
      s0 += v[4 * j] * v[4 * j] + v[4 * j + 1] * v[4 * j + 1];
      s1 += v[4 * j + 2] * v[4 * j + 2] + v[4 * j + 3] * v[4 * j + 3];
    }
    quad_sum(s0, s1);
    const float f0 = rsqrtf(s0 / HEAD_DIM + eps), f1 = rsqrtf(s1 / HEAD_DIM + eps);
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 8; j++) {
      const float2 w = *(const float2*)(norm + 8 * j + 2 * c);
      v[4 * j] *= f0 * w.x;
      v[4 * j + 1] *= f0 * w.y;
      v[4 * j + 2] *= f1 * w.x;
      v[4 * j + 3] *= f1 * w.y;
    }
  }

  // RoPE. row: the thread's first row.
  DEV void rotate(float* v, int row, int c) const {
    constexpr int PAIR = HEAD_DIM / 4;  // distance between the accumulators that are rotated together
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float4* angles = (const float4*)(cos_sin + (size_t)min(row + 8 * r, M - 1) * (HEAD_DIM / 2) + 2 * c);
#pragma unroll
      for (int j = 0; j < HEAD_DIM / 16; j++) {
        const float4 a = __ldg(angles + 4 * j);  // cos, sin of channel 8j + 2c, then of the next
        float *x = v + 4 * j + 2 * r, *y = x + PAIR;
        const float x0 = x[0], x1 = x[1];
        x[0] = x0 * a.x - y[0] * a.y;
        x[1] = x1 * a.z - y[1] * a.w;
        y[0] = y[0] * a.x + x0 * a.y;
        y[1] = y[1] * a.z + x1 * a.w;
      }
    }
  }

  template <class C>
  DEV void operator()(float (&d)[C::COLUMNS / 2], Corner& corner) const {
    const int lane = threadIdx.x & 31, c = lane & 3, row = corner.row + (threadIdx.x >> 5 & 3) * 16 + (lane >> 2);
#pragma unroll
    for (int h = 0; h < C::COLUMNS / HEAD_DIM; h++) {
      float* v = d + h * REGISTERS;
      const int column = corner.column + h * HEAD_DIM, head = column / HEAD_DIM;
      if (head >= heads + 2 * kv_heads) break;
      if (bias) add_bias(v, bias + column, c);
      if (head >= heads + kv_heads) continue;  // values
      const float* norm = head < heads ? q_norm : k_norm;
      if (norm) normalise(v, norm, c);
      rotate(v, row, c);
    }
    const int q_width = heads * HEAD_DIM, width = q_width + 2 * kv_heads * HEAD_DIM;
#pragma unroll
    for (int j = 0; j < C::COLUMNS / 64; j++) {
      const int column = corner.column + 64 * j;
      if (column >= width) break;
      const bool is_q = column < q_width;
      send_block<C>(corner, d + 32 * j, is_q ? q : kv, is_q ? column : column - q_width, corner.row,
                    [](float a, float b) { return Half::pack(a, b); });
    }
  }
};

struct Residual {
  const TensorMap* hidden;  // [M][N] f32; box 32 columns x 64 rows
  const float* bias;        // [N] or null
  int N;

  // TMA adds blocks of 32 columns to memory while the next ones are written. Every element is added to once, so
  // the order does not matter.
  template <class C>
  DEV void operator()(float (&d)[C::COLUMNS / 2], Corner& corner) const {
    const int lane = threadIdx.x & 31, c = lane & 3, row = (threadIdx.x >> 5 & 3) * 16 + (lane >> 2);
#pragma unroll
    for (int j = 0; j < C::COLUMNS / 32; j++) {
      const int column = corner.column + 32 * j;
      if (column >= N) break;
      const uint32_t block = corner.out + corner.sent % C::OUT_BUFFERS * C::OUT_BYTES;
      if ((threadIdx.x & 127) == 0) bulk_wait_read<C::OUT_BUFFERS - 1>();
      bar_sync(corner.barrier, 128);
#pragma unroll
      for (int i = 0; i < 4; i++) {  // 8 columns each: this thread has 8 bytes of a 16-byte piece
        float2 b = make_float2(0, 0);
        if (bias && column + 8 * i < N) b = *(const float2*)(bias + column + 8 * i + 2 * c);
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const float* v = d + 16 * j + 4 * i + 2 * r;
          const uint32_t place = block + (row + 8 * r) * 128 + (((2 * i + (c >> 1)) ^ (row & 7)) << 4) + (c & 1) * 8;
          asm volatile("st.shared.v2.f32 [%0],{%1,%2};" ::"r"(place), "f"(v[0] + b.x), "f"(v[1] + b.y) : "memory");
        }
      }
      fence_async();
      bar_sync(corner.barrier, 128);
      if ((threadIdx.x & 127) == 0) {
        tma_add(hidden, column, corner.row, block);
        bulk_commit();
      }
      corner.sent++;
    }
  }
};

template <class Activation>
struct Gated {
  const TensorMap* x;  // [M][N / 2]; box 64 x 64
  const float* bias;   // [N], interleaved as W's rows, or null
  int N;

  template <class C>
  DEV void operator()(float (&d)[C::COLUMNS / 2], Corner& corner) const {
    const int c = threadIdx.x & 3;
    const Activation f;
#pragma unroll
    for (int j = 0; j < C::COLUMNS / 16; j++) {
      float2 gate = make_float2(0, 0), up = gate;  // bias
      const int column = corner.column + 16 * j + 2 * c;
      if (bias && column < N) {
        gate = *(const float2*)(bias + column);
        up = *(const float2*)(bias + column + 8);
      }
#pragma unroll
      for (int i = 0; i < 4; i++)
        d[4 * j + i] = f(d[8 * j + i] + (i & 1 ? gate.y : gate.x)) * (d[8 * j + 4 + i] + (i & 1 ? up.y : up.x));
    }
#pragma unroll
    for (int j = 0; j < C::COLUMNS / 128; j++)
      if (corner.column + 128 * j < N)
        send_block<C>(corner, d + 32 * j, x, corner.column / 2 + 64 * j, corner.row,
                      [](float a, float b) { return C::T::pack(a, b); });
  }
};

// A cluster's tiles of C: `first`, first + step, ... of `count`.
struct Tiles {
  int rows, columns, count;
  int group;  // of `tile_at`
  int first, step;
  int blocks;  // of k
  DEV TileIndex at(int tile) const { return tile_at(tile, rows, columns, group); }
};

// The producer, one thread: loads the CTA's rows of A, and its share of W for the whole cluster.
template <class C>
DEV void load_tiles(uint32_t base, uint32_t full, uint32_t empty, const TensorMap* A, const TensorMap* W,
                    const Tiles& tiles, int rank) {
  constexpr int SHARE = C::W_BYTES / C::CLUSTER;
  if (C::CLUSTER == 1) rank = 0;  // a constant for the compiler
  int s = 0, phase = 0;
  for (int t = tiles.first; t < tiles.count; t += tiles.step) {
    const TileIndex tile = tiles.at(t);
    const int row = tile.row * C::TILE_ROWS + rank * C::ROWS;
    const int column = tile.column * C::COLUMNS + rank * (C::COLUMNS / C::CLUSTER);
    for (int kb = 0; kb < tiles.blocks; kb++) {
      mbar_wait(empty + 8 * s, phase ^ 1);
      const uint32_t stage = base + s * C::STAGE_BYTES, w = stage + C::A_BYTES + rank * SHARE, bar = full + 8 * s;
      mbar_expect(bar, C::STAGE_BYTES);
      tma_load(stage, A, kb * C::BLOCK_K, row, bar);
      if (C::CLUSTER > 1)
        tma_load_multicast(w, W, 0, 0, kb, column / 16, bar, (1 << C::CLUSTER) - 1);
      else
        tma_load(w, W, 0, 0, kb, column / 16, bar);
      if (++s == C::STAGES) {
        s = 0;
        phase ^= 1;
      }
    }
  }
}

// A consumer warpgroup: multiplies its 64 rows of each tile.
template <class C, class Epilogue>
DEV void multiply_tiles(uint32_t base, uint32_t out, uint32_t full, uint32_t empty, const Tiles& tiles, int rank,
                        int warpgroup, const Epilogue& epilogue) {
  if (C::CLUSTER == 1) rank = 0;
  const int lane = threadIdx.x & 31;
  int s = 0, phase = 0;
  Corner corner{0, 0, out + warpgroup * C::OUT_BUFFERS * C::OUT_BYTES, 1 + warpgroup, 0};
  auto release = [&](int stage) {
    if (lane < C::CLUSTER) mbar_arrive_at(empty + 8 * stage, lane);
  };
  float d[C::COLUMNS / 2];
  for (int t = tiles.first; t < tiles.count; t += tiles.step) {
    const TileIndex tile = tiles.at(t);
    int previous = 0;
    // Zeroed by moves and always accumulated onto: an undefined accumulator makes ptxas serialise every wgmma (C7515).
#pragma unroll
    for (int i = 0; i < C::COLUMNS / 2; i++) d[i] = 0;
    for (int kb = 0; kb < tiles.blocks; kb++) {
      mbar_wait(full + 8 * s, phase);
      const uint32_t stage = base + s * C::STAGE_BYTES;
      const uint64_t a = desc_kmajor(stage + warpgroup * 64 * 128), b = desc_kmajor(stage + C::A_BYTES);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; k++) Wgmma<typename C::T>::shared(d, a + 2 * k, b + 2 * k, 1);
      wgmma_commit();
      wgmma_wait<1>();  // the previous block is complete, so its stage may be refilled
      if (kb) release(previous);
      previous = s;
      if (++s == C::STAGES) {
        s = 0;
        phase ^= 1;
      }
    }
    wgmma_wait<0>();
    release(previous);
    corner.row = tile.row * C::TILE_ROWS + rank * C::ROWS + warpgroup * 64;
    corner.column = tile.column * C::COLUMNS;
    epilogue.template operator()<C>(d, corner);
  }
  if ((threadIdx.x & 127) == 0) bulk_wait_all();
}

// Grid: a multiple of CLUSTER, at most as many CTAs as are resident. `group`: that of `tile_at`, in tile rows.
//
// Tensor maps:
//
//     A  {K, M}, box {64, ROWS}, 128-byte swizzle
//     W  {64, 16, K / 64, N / 16}, box {64, 16, 1, COLUMNS / CLUSTER / 16}, no swizzle
template <class C, class Epilogue>
DEV void multiply(const TensorMap* A, const TensorMap* W, int M, int N, int K, int group, const Epilogue& epilogue) {
  extern __shared__ char raw[];
  const uint32_t base = (shared_address(raw) + 1023) & ~1023u, out = base + C::STAGES * C::STAGE_BYTES;
  const uint32_t full = out + C::CONSUMERS * C::OUT_BUFFERS * C::OUT_BYTES, empty = full + C::STAGES * 8;
  const int rank = C::CLUSTER > 1 ? cluster_rank() : 0, warpgroup = threadIdx.x >> 7;
  Tiles tiles;
  tiles.rows = (M + C::TILE_ROWS - 1) / C::TILE_ROWS;
  tiles.columns = (N + C::COLUMNS - 1) / C::COLUMNS;
  tiles.count = tiles.rows * tiles.columns;
  tiles.group = group;
  tiles.blocks = (K + C::BLOCK_K - 1) / C::BLOCK_K;
  tiles.first = blockIdx.x / C::CLUSTER;
  tiles.step = gridDim.x / C::CLUSTER;
  if (threadIdx.x == 0) {
    // A stage is free when every consumer warp of the cluster has arrived.
    for (int s = 0; s < C::STAGES; s++) {
      mbar_init(full + 8 * s, 1);
      mbar_init(empty + 8 * s, 4 * C::CONSUMERS * C::CLUSTER);
    }
    mbar_init_done();
  }
  if (C::CLUSTER > 1)
    cluster_sync();
  else
    __syncthreads();
  if (warpgroup == C::CONSUMERS) {
    if (C::HAND_OVER) registers_give<PRODUCER_REGISTERS>();
    if ((threadIdx.x & 127) == 0) load_tiles<C>(base, full, empty, A, W, tiles, rank);
  } else {
    if (C::HAND_OVER) registers_take<CONSUMER_REGISTERS>();
    multiply_tiles<C>(base, out, full, empty, tiles, rank, warpgroup, epilogue);
  }
  if (C::CLUSTER > 1) cluster_sync();  // the other CTA may still signal or write to this one
}

}  // namespace wgmma_gemm
using namespace wgmma_gemm;

//     prefill_qkv_{64,128}_{bf16,f16}_{wide,middle,tall,small}, prefill_qkv_256_{bf16,f16}_wide
//         (A, W, Q, KV, bias, q_norm, k_norm, cos_sin, eps, heads, kv_heads, M, N, K, group)
//     prefill_residual_{bf16,f16}_{wide,middle,slim,narrow}
//         (A, W, hidden, bias, M, N, K, group)
//     prefill_gated_{bf16,f16}_{wide,middle,tall,small} with SiLU, prefill_gated_gelu_* with GELU
//         (A, W, X, bias, M, N, K, group)
//
// Arguments are those of the epilogues (`Qkv`, `Residual`, `Gated`). Config::THREADS threads,
// Config::SHARED_BYTES of dynamic shared memory.
#define LAUNCHED(CONFIG, CLUSTERED) CLUSTERED __launch_bounds__(CONFIG::THREADS, 1)
#define CLUSTER_PAIR __cluster_dims__(2, 1, 1)
#define SINGLE
#define QKV(D, NAME, CONFIG, CLUSTERED)                                                                                \
  extern "C" __global__ void LAUNCHED(CONFIG, CLUSTERED) prefill_qkv_##D##_##NAME(                                     \
      const __grid_constant__ TensorMap A, const __grid_constant__ TensorMap W, const __grid_constant__ TensorMap Q,   \
      const __grid_constant__ TensorMap KV, const float* bias, const float* q_norm, const float* k_norm,               \
      const float2* cos_sin, float eps, int heads, int kv_heads, int M, int N, int K, int group) {                     \
    multiply<CONFIG>(&A, &W, M, N, K, group, Qkv<D>{&Q, &KV, bias, q_norm, k_norm, cos_sin, eps, heads, kv_heads, M}); \
  }
#define RESIDUAL(NAME, CONFIG, CLUSTERED)                                                            \
  extern "C" __global__ void LAUNCHED(CONFIG, CLUSTERED) prefill_residual_##NAME(                    \
      const __grid_constant__ TensorMap A, const __grid_constant__ TensorMap W,                      \
      const __grid_constant__ TensorMap hidden, const float* bias, int M, int N, int K, int group) { \
    multiply<CONFIG>(&A, &W, M, N, K, group, Residual{&hidden, bias, N});                            \
  }
#define GATED(NAME, ACTIVATION, CONFIG, CLUSTERED)                                                                   \
  extern "C" __global__ void LAUNCHED(CONFIG, CLUSTERED)                                                             \
      prefill_gated_##NAME(const __grid_constant__ TensorMap A, const __grid_constant__ TensorMap W,                 \
                           const __grid_constant__ TensorMap X, const float* bias, int M, int N, int K, int group) { \
    multiply<CONFIG>(&A, &W, M, N, K, group, Gated<ACTIVATION>{&X, bias, N});                                        \
  }
#define ENTRIES(NAME, T)                                     \
  QKV(64, NAME##_wide, Wide<T>, CLUSTER_PAIR)                \
  QKV(64, NAME##_middle, Middle<T>, CLUSTER_PAIR)            \
  QKV(64, NAME##_tall, Tall<T>, SINGLE)                      \
  QKV(64, NAME##_small, Small<T>, SINGLE)                    \
  QKV(128, NAME##_wide, Wide<T>, CLUSTER_PAIR)               \
  QKV(128, NAME##_middle, Middle<T>, CLUSTER_PAIR)           \
  QKV(128, NAME##_tall, Tall<T>, SINGLE)                     \
  QKV(128, NAME##_small, Small<T>, SINGLE)                   \
  QKV(256, NAME##_wide, Wide<T>, CLUSTER_PAIR)               \
  RESIDUAL(NAME##_wide, Wide<T>, CLUSTER_PAIR)               \
  RESIDUAL(NAME##_middle, Middle<T>, CLUSTER_PAIR)           \
  RESIDUAL(NAME##_slim, Slim<T>, CLUSTER_PAIR)               \
  RESIDUAL(NAME##_narrow, Narrow<T>, SINGLE)                 \
  GATED(NAME##_wide, Silu, Wide<T>, CLUSTER_PAIR)            \
  GATED(NAME##_middle, Silu, Middle<T>, CLUSTER_PAIR)        \
  GATED(NAME##_tall, Silu, Tall<T>, SINGLE)                  \
  GATED(NAME##_small, Silu, Small<T>, SINGLE)                \
  GATED(gelu_##NAME##_wide, Gelu, Wide<T>, CLUSTER_PAIR)     \
  GATED(gelu_##NAME##_middle, Gelu, Middle<T>, CLUSTER_PAIR) \
  GATED(gelu_##NAME##_tall, Gelu, Tall<T>, SINGLE)           \
  GATED(gelu_##NAME##_small, Gelu, Small<T>, SINGLE)
ENTRIES(bf16, Bf16)
ENTRIES(f16, Half)

#else

constexpr int MMA_SHARED = 65536;  // bytes of dynamic shared memory

namespace mma_gemm {

// 128 x 128 of C per CTA, 4 warps of 64 x 64, blocks of 32 k through 4 stages filled by cp.async; two CTAs per SM.
enum { ROWS = 128, COLUMNS = 128, BLOCK_K = 32, STAGES = 4 };
enum { TILE_BYTES = 128 * BLOCK_K * 2, SHARED = STAGES * 2 * TILE_BYTES };  // of A or W; of all stages
static_assert(SHARED == MMA_SHARED);

// A tile: 128 rows of 64 bytes; the four pieces of a row are permuted so that 8 rows of one piece cover all banks.
DEV uint32_t swizzled(int row, int piece) { return row * 64 + ((piece ^ (row >> 1 & 3)) << 4); }

DEV void mma(Half, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { mma_f16(d, a, b0, b1); }
DEV void mma(Bf16, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { mma_bf16(d, a, b0, b1); }

// Calls store(row, column, c0, c1) for every pair of columns from an even one on that this thread holds, of rows below
// M and columns below N. With GATED it calls store(row, column, gate pair, up pair). row0, column0: of the warp.
template <bool GATED, class Store>
DEV void store_results(const float (&d)[4][8][4], int row0, int column0, int M, int N, Store store) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int row = row0 + 16 * i + 8 * h + (lane >> 2);
      if (row >= M) continue;
#pragma unroll
      for (int j = 0; j < 8; j += GATED ? 2 : 1) {
        const int column = column0 + 8 * j + (lane & 3) * 2;
        if (column >= N) continue;
        if constexpr (GATED)
          store(row, column, d[i][j][2 * h], d[i][j][2 * h + 1], d[i][j + 1][2 * h], d[i][j + 1][2 * h + 1]);
        else
          store(row, column, d[i][j][2 * h], d[i][j][2 * h + 1]);
      }
    }
}

// Multiplies a block's tile; `store` as of `store_results`.
template <class T, bool GATED, class Store>
DEV void multiply(const uint16_t* A, const uint4* W, int M, int N, int K, int pitch, int group, Store store) {
  extern __shared__ __align__(128) char raw[];
  const uint32_t base = shared_address(raw);
  const int tile_rows = (M + ROWS - 1) / ROWS;
  const int tile_columns = (N + COLUMNS - 1) / COLUMNS;
  // The tile of this block, as by `wgmma_gemm::tile_at`.
  const int group_tiles = group * tile_columns;
  const int index = blockIdx.x / group_tiles;  // of the group
  const int first = index * group, height = min(group, tile_rows - first), rest = blockIdx.x - index * group_tiles;
  const int row0 = (first + rest % height) * ROWS, column0 = rest / height * COLUMNS;
  const int t = threadIdx.x, lane = t & 31;
  const int wm = (t >> 5 & 1) * 64, wn = (t >> 6) * 64;  // this warp's rows and columns of the tile
  const int atoms = (K + 63) / 64, padded_n = (N + 15) / 16 * 16, blocks = atoms * 2;
  const int piece = t & 3, load_row = t >> 2;  // this thread copies `piece` of rows load_row + 32 i of both tiles
  auto load = [&](int kb) {
    const uint32_t dst = base + kb % STAGES * 2 * TILE_BYTES;
    if (kb < blocks)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int row = load_row + 32 * i, a_row = row0 + row, w_row = column0 + row;
        const int atom_piece = (kb & 1) * 4 + piece;
        copy16_or_zero(dst + swizzled(row, piece), A + (size_t)min(a_row, M - 1) * pitch + kb * BLOCK_K + piece * 8,
                       a_row < M);
        const int n = min(w_row, padded_n - 1);
        copy16_or_zero(dst + TILE_BYTES + swizzled(row, piece),
                       W + (((size_t)(n / 16) * atoms + kb / 2) * 16 + n % 16) * 8 + (atom_piece ^ (n & 7)),
                       w_row < padded_n);
      }
    copy_commit();
  };
  float d[4][8][4];
#pragma unroll
  for (int i = 0; i < 128; i++) (&d[0][0][0])[i] = 0;
  uint32_t a[2][4][4], b[2][4][4];  // fragments of two k steps of 16, double-buffered
  auto fetch = [&](int kb, int k) {
    const uint32_t a_at = base + kb % STAGES * 2 * TILE_BYTES, w_at = a_at + TILE_BYTES;
#pragma unroll
    for (int i = 0; i < 4; i++) ldmatrix4(a[k][i], a_at + swizzled(wm + 16 * i + (lane & 15), 2 * k + (lane >> 4)));
#pragma unroll
    for (int i = 0; i < 4; i++)
      ldmatrix4(b[k][i], w_at + swizzled(wn + 16 * i + (lane & 7) + (lane >> 4) * 8, 2 * k + (lane >> 3 & 1)));
  };
  auto multiply = [&](int k) {
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < 8; j++) mma(T(), d[i][j], a[k][i], b[k][j >> 1][(j & 1) * 2], b[k][j >> 1][(j & 1) * 2 + 1]);
  };
  auto arrived = [&]() {
    copy_wait<STAGES - 2>();
    __syncthreads();
  };
  for (int kb = 0; kb < STAGES - 1; kb++) load(kb);
  arrived();
  fetch(0, 0);
  for (int kb = 0; kb < blocks; kb++) {
    fetch(kb, 1);
    load(kb + STAGES - 1);  // into the stage of block kb - 1, which all warps had read at the last barrier
    multiply(0);
    arrived();  // block kb + 1
    if (kb + 1 < blocks) fetch(kb + 1, 0);
    multiply(1);
  }
  copy_wait<0>();
  store_results<GATED>(d, row0 + wm, column0 + wn, M, N, store);
}

}  // namespace mma_gemm

//     prefill_plain_{bf16,f16}(A, W, Y, M, N, K, pitch, group)
//     prefill_residual_{bf16,f16}(A, W, hidden, bias, M, N, K, pitch, group)
//     prefill_gated_{bf16,f16}, prefill_gated_gelu_{bf16,f16}(A, W, X, bias, x_pitch, M, N, K, pitch, group)
//
// pitch and x_pitch are row strides of A and X in elements; group is that of `tile_at`, in tile rows. N is even. Grid
// ceil(M / 128) * ceil(N / 128), 128 threads, MMA_SHARED bytes of dynamic shared memory.
#define GATED(NAME, ACTIVATION, T)                                                                                    \
  extern "C" __global__ void __launch_bounds__(128, 2)                                                                \
      prefill_gated_##NAME(const uint16_t* A, const uint4* W, uint16_t* X, const float* bias, int x_pitch, int M,     \
                           int N, int K, int pitch, int group) {                                                      \
    mma_gemm::multiply<T, true>(                                                                                      \
        A, W, M, N, K, pitch, group, [&](int row, int column, float g0, float g1, float u0, float u1) {               \
          const ACTIVATION f;                                                                                         \
          if (bias) {                                                                                                 \
            g0 += bias[column];                                                                                       \
            g1 += bias[column + 1];                                                                                   \
            u0 += bias[column + 8];                                                                                   \
            u1 += bias[column + 9];                                                                                   \
          }                                                                                                           \
          *(uint32_t*)(X + (size_t)row * x_pitch + (column / 16 * 8 + column % 8)) = T::pack(f(g0) * u0, f(g1) * u1); \
        });                                                                                                           \
  }
#define ENTRIES(NAME, T)                                                                                             \
  extern "C" __global__ void __launch_bounds__(128, 2)                                                               \
      prefill_plain_##NAME(const uint16_t* A, const uint4* W, float* Y, int M, int N, int K, int pitch, int group) { \
    mma_gemm::multiply<T, false>(A, W, M, N, K, pitch, group, [&](int row, int column, float x, float y) {           \
      *(float2*)(Y + (size_t)row * N + column) = make_float2(x, y);                                                  \
    });                                                                                                              \
  }                                                                                                                  \
  extern "C" __global__ void __launch_bounds__(128, 2)                                                               \
      prefill_residual_##NAME(const uint16_t* A, const uint4* W, float* hidden, const float* bias, int M, int N,     \
                              int K, int pitch, int group) {                                                         \
    mma_gemm::multiply<T, false>(A, W, M, N, K, pitch, group, [&](int row, int column, float x, float y) {           \
      float2* h = (float2*)(hidden + (size_t)row * N + column);                                                      \
      const float2 old = *h, b = bias ? *(const float2*)(bias + column) : make_float2(0, 0);                         \
      *h = make_float2(old.x + (x + b.x), old.y + (y + b.y));                                                        \
    });                                                                                                              \
  }                                                                                                                  \
  GATED(NAME, Silu, T)                                                                                               \
  GATED(gelu_##NAME, Gelu, T)
#ifdef QS_SM80
ENTRIES(bf16, Bf16)
#endif
ENTRIES(f16, Half)

#endif

// Without tensor cores: one chain of fused multiply-adds per output, k upwards. 64 x 64 outputs per CTA of 256 threads.
template <class LoadA, class LoadW>
DEV void multiply_plain(LoadA load_a, LoadW load_w, float* Y, int M, int N, int K) {
  __shared__ float a[16][65], w[16][65];
  const int row0 = blockIdx.y * 64, column0 = blockIdx.x * 64, t = threadIdx.x, r = t / 16 * 4, c = t % 16 * 4;
  float d[4][4] = {};
  for (int k0 = 0; k0 < K; k0 += 16) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int k = t % 16, row = t / 16 + 16 * i;
      a[k][row] = row0 + row < M && k0 + k < K ? load_a(row0 + row, k0 + k) : 0.f;
      w[k][row] = column0 + row < N && k0 + k < K ? load_w(column0 + row, k0 + k) : 0.f;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 16; k++)
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) d[i][j] = __fmaf_rn(a[k][r + i], w[k][c + j], d[i][j]);
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++)
      if (row0 + r + i < M && column0 + c + j < N) Y[(size_t)(row0 + r + i) * N + column0 + c + j] = d[i][j];
}

// Checkpoints in single precision: A f32 [M][pitch], W f32 row-major [N][K], Y f32 [M][N].
// Grid (ceil(N / 64), ceil(M / 64)), 256 threads, static shared memory.
extern "C" __global__ void __launch_bounds__(256)
    prefill_plain_f32(const float* A, const float* W, float* Y, int M, int N, int K, int pitch) {
  multiply_plain([&](int row, int k) { return A[(size_t)row * pitch + k]; },
                 [&](int row, int k) { return W[(size_t)row * K + k]; }, Y, M, N, K);
}

#ifndef QS_SM80
// Turing has no bfloat16 tensor cores. A bf16 [M][pitch], W atoms, Y f32 [M][N]; grid and threads as above.
extern "C" __global__ void __launch_bounds__(256)
    prefill_plain_bf16(const uint16_t* A, const uint16_t* W, float* Y, int M, int N, int K, int pitch) {
  const int atoms = (K + 63) / 64;
  multiply_plain([&](int row, int k) { return Bf16::to_float(A[(size_t)row * pitch + k]); },
                 [&](int row, int k) {
                   const size_t line = ((size_t)(row / 16) * atoms + k / 64) * 16 + row % 16;
                   return Bf16::to_float(W[line * 64 + ((k % 64 / 8) ^ (row & 7)) * 8 + k % 8]);
                 },
                 Y, M, N, K);
}
#endif
