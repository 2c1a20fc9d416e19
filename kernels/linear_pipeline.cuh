// Hopper: a block per SM, with pipelines for weights and for x in shared memory, filled by bulk copies. Included by
// linear.cuh.
//
// Weights do not depend on the previous kernel, so a producer warp starts to load them as soon as the previous GEMM has
// released the shared memory. Memory thus stays busy during norms and other small kernels, whose blocks fit in the
// remaining registers. A second producer warp copies x once per pass, i.e. for as many tiles as registers have sums
// for. Fewer tiles per pass would be slower: with two, x of 16 rows is half as many bytes as the weights, and L2
// bandwidth is little more than that of memory. So two blocks of a cluster share the copies of x, unless x has up to
// eight rows and weights have 16 bits.
//
// A piece is a warp's share of 16 outputs and 128 bytes of each row of x: an atom of 64 inputs, a block of draft
// weights of 128 inputs, or the blocks of 64 inputs of all planes that are read. A stage holds eight pieces, one per
// warp, of one tile. Stages of small pieces hold several tiles (TILES), or several pieces of a warp and tile (DEEP):
// more tiles leave a part of each stage empty if a block has few. A warp reads only its own share of x. The tiles of a
// pass alternate by stages. A warp adds its pieces in the order of `linear_16` and `linear_quant`.
#pragma once

// Attributes of a kernel with clusters of one or two blocks, for macros.
#define BLOCKS_1
#define BLOCKS_2 __cluster_dims__(2, 1, 1)

// Most bytes of stages in flight. They saturate memory; more of them would delay inputs and results. The first loads of
// a block compete with the end of the previous kernel, so fewer are allowed.
constexpr int PIPELINE_AHEAD = 72 << 10, PIPELINE_AHEAD_FIRST = 54 << 10;
// Registers per thread at entry, if computing warps need as many as there are, and of the four loading warps after they
// release theirs.
constexpr int PIPELINE_ENTRY = 168, PIPELINE_KEPT = 40;
// Registers of the eight computing warps after that, if all have `entry` at entry.
__host__ __device__ constexpr int taken_registers(int entry) {
  return ((4 + LINEAR_WARPS) * entry - 4 * PIPELINE_KEPT) / LINEAR_WARPS / 8 * 8;
}
// Units of 16 x 8 outputs that are summed at a time.
constexpr int PIPELINE_UNITS = 2;

// A shape of the pipelines:
//
//     NT                 row tiles
//     PIECE              bytes of a piece
//     TILES              tiles of a stage
//     SCALES             bytes of scales per 128 bytes of a row of x
//     TOGETHER           tiles of a pass
//     STAGES, X_STAGES   pipeline stages of weights and of x
//     CLUSTER            blocks of a cluster
//     HAND_OVER          0, or registers at entry, of which loading warps release some to computing warps
//     PAD                bytes between the rows of a stage of x
//     DEEP               pieces of a warp and tile in a stage
//     Rows               rows of a lane's sums
template <int NT_, int PIECE_, int TILES_, int SCALES_, int TOGETHER_, int STAGES_, int X_STAGES_, int CLUSTER_,
          int HAND_OVER_, int PAD_ = 64, int DEEP_ = 1, class Rows_ = RowPairs>
struct Pipeline {
  typedef Rows_ Rows;
  static constexpr int NT = NT_, ROWS = 8 * NT, PIECE = PIECE_, TILES = TILES_, DEEP = DEEP_, SCALES = SCALES_;
  static constexpr int TOGETHER = TOGETHER_, STAGES = STAGES_, X_STAGES = X_STAGES_, CLUSTER = CLUSTER_;
  static constexpr int HAND_OVER = HAND_OVER_;
  static constexpr int PIECES = DEEP * LINEAR_WARPS;  // of a tile in a stage
  static constexpr int HALF = PIECES * PIECE;         // bytes from one tile of a stage to the next
  static constexpr int STAGE = TILES * HALF;          // bytes
  // Pitches of a row of x in a stage and of its scales: adjacent rows are in different banks.
  static constexpr int PITCH = PIECES * 128 + PAD_;
  static constexpr int SCALES_PITCH = SCALES ? PIECES * SCALES + 16 : 0;
  static constexpr int X_STAGE = ROWS * (PITCH + SCALES_PITCH);
  // Shared memory: weights [STAGES][STAGE], x [X_STAGES][X_STAGE], f32 sums
  // [PIPELINE_UNITS][warp][8 rows][16], barriers.
  static constexpr int X = STAGES * STAGE;
  static constexpr int SUMS = X + X_STAGES * X_STAGE;
  static constexpr int BARRIERS = SUMS + PIPELINE_UNITS * LINEAR_WARPS * 512;
  static constexpr int BYTES = BARRIERS + (2 * STAGES + 3 * X_STAGES) * 8;
  static_assert(TOGETHER % TILES == 0 && TOGETHER * NT % PIPELINE_UNITS == 0);
  static_assert(STAGES >= PIPELINE_AHEAD / STAGE, "a stage in flight must not be overwritten by a later load");
};

// Shared-memory addresses of a pipeline's stages and barriers: of weights [STAGES], of x [X_STAGES].
template <class R>
struct PipelineShared {
  uint32_t stages, full, empty;
  uint32_t x_stages, x_full, x_empty;
  uint32_t x_ready;  // in a cluster: all blocks have released a stage of x
  DEV explicit PipelineShared(uint32_t base) : stages(base), x_stages(base + R::X) {
    full = base + R::BARRIERS;
    empty = full + R::STAGES * 8;
    x_full = empty + R::STAGES * 8;
    x_empty = x_full + R::X_STAGES * 8;
    x_ready = x_empty + R::X_STAGES * 8;
  }
  // By one thread of the block.
  DEV void init_barriers() const {
    mbar_init_stages(full, empty, R::STAGES, LINEAR_WARPS * 32);
    mbar_init_stages(x_full, x_empty, R::X_STAGES, LINEAR_WARPS * 32);
    if (R::CLUSTER > 1)
      for (int i = 0; i < R::X_STAGES; i++) mbar_init(x_ready + i * 8, R::CLUSTER);
    mbar_init_done();
  }
};

// Weights stored as [tile][piece].
template <int PIECE_>
struct Pieces {
  static constexpr int PIECE = PIECE_;
  const uint8_t* w;
  int pieces;
  // `count` pieces of a tile, from piece k on.
  DEV void copy(uint32_t stage, size_t tile, int k, int count, uint32_t bar, uint64_t policy) const {
    bulk_copy(stage, w + (tile * pieces + k) * PIECE, count * PIECE, bar, policy);
  }
};

// Loads weights into pipeline stages: by one thread, of a block with `own_tiles` tiles. At most `most_first` stages are
// in flight while the stages are filled for the first time, then at most `most_later`.
template <int TILES, int TOGETHER, int DEEP = 1, class Weights>
DEV void fill_weights(const Weights& w, uint32_t stages_at, uint32_t full, uint32_t empty, int stages, int pieces,
                      int own_tiles, int most_first, int most_later) {
  constexpr int PIECES = DEEP * LINEAR_WARPS, HALF = PIECES * Weights::PIECE;
  const uint64_t once = evict_first();
  int stage = 0, phase = 1;
  int oldest = 0, oldest_phase = 0, in_flight = 0;  // the stage in flight that was started first, and their number
  int most = most_first;
#pragma unroll 1
  for (int first = 0; first < own_tiles; first += TOGETHER)
#pragma unroll 1
    for (int k = 0; k < pieces; k += PIECES)
#pragma unroll 1
      for (int t = first; t < min(first + TOGETHER, own_tiles); t += TILES) {
        const int tiles = min(TILES, own_tiles - t), count = min(PIECES, pieces - k);
        mbar_wait(empty + stage * 8, phase);
        if (in_flight < most) {
          in_flight++;
        } else {
          mbar_wait(full + oldest * 8, oldest_phase);
          if (++oldest == stages) {
            oldest = 0;
            oldest_phase ^= 1;
          }
        }
        mbar_expect(full + stage * 8, tiles * count * Weights::PIECE);
#pragma unroll 1
        for (int i = 0; i < tiles; i++)
          w.copy(stages_at + stage * TILES * HALF + i * HALF, blockIdx.x + (t + i) * gridDim.x, k, count,
                 full + stage * 8, once);
        if (++stage == stages) {
          stage = 0;
          phase ^= 1;
          most = most_later;
        }
      }
}

// Loads x into its pipeline stages: by one warp, a lane per row, `passes` times. x: bytes [row][pitch]; scales
// [row][pieces]. In a cluster each block copies every other row to both blocks.
template <class R>
DEV void fill_inputs(const uint8_t* x, const uint8_t* scales, const PipelineShared<R>& at, int pieces, int passes,
                     int rows, size_t pitch) {
  constexpr int PIECES = R::PIECES;
  const int lane = threadIdx.x & 31, rank = R::CLUSTER > 1 ? (int)cluster_rank() : 0;
  const auto copy = [](uint32_t dst, const uint8_t* src, int bytes, uint32_t bar) {
    if (R::CLUSTER > 1)
      bulk_copy_multicast(dst, src, bytes, bar, (1 << R::CLUSTER) - 1);
    else
      bulk_copy(dst, src, bytes, bar);
  };
  int stage = 0, phase = 1;
#pragma unroll 1
  for (int pass = 0; pass < passes; pass++)
#pragma unroll 1
    for (int k = 0; k < pieces; k += PIECES) {
      const int count = min(PIECES, pieces - k);
      const uint32_t stage_at = at.x_stages + stage * R::X_STAGE, full = at.x_full + stage * 8;
      mbar_wait(at.x_empty + stage * 8, phase);
      if (lane == 0) mbar_expect(full, count * (128 + R::SCALES) * rows);
      __syncwarp();
      if (R::CLUSTER > 1) {
        if (lane < R::CLUSTER) mbar_arrive_at(at.x_ready + stage * 8, lane);
        mbar_wait(at.x_ready + stage * 8, phase ^ 1);
      }
#pragma unroll 1
      for (int row = lane * R::CLUSTER + rank; row < rows; row += 32 * R::CLUSTER) {
        copy(stage_at + row * R::PITCH, x + row * pitch + k * 128, count * 128, full);
        if (R::SCALES)
          copy(stage_at + R::ROWS * R::PITCH + row * R::SCALES_PITCH, scales + ((size_t)row * pieces + k) * R::SCALES,
               count * R::SCALES, full);
      }
      if (++stage == R::X_STAGES) {
        stage = 0;
        phase ^= 1;
      }
    }
}

// Adds the warps' sums of a pass in order and stores `count` tiles of y, from tile `first` of the block on. `sums`
// holds PIPELINE_UNITS units of 16 outputs x 8 rows per warp, [row][16]. To avoid bank conflicts row r is at
// r ^ r / 4, and the outputs of rows with odd r / 2 are rotated by eight.
template <class R>
DEV void store_pass(const float (&acc)[R::TOGETHER][R::NT][4], float* sums, float* y, int pass, int first, int count,
                    int n, int rows, int warp, int g, int c) {
  constexpr int W = LINEAR_WARPS, T = R::TOGETHER, NT = R::NT;
#pragma unroll
  for (int unit = 0; unit < T * NT; unit += PIPELINE_UNITS)
    if (unit / NT < count) {
      if (pass || unit) bar_sync(1, W * 32);  // the previous sums have been read
#pragma unroll
      for (int u = 0; u < PIPELINE_UNITS; u++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int r = R::Rows::row(c, e & 1);
          sums[(u * W + warp) * 128 + (r ^ (r >> 2)) * 16 + ((g + (e >> 1) * 8) ^ (r & 2) * 4)] =
              acc[(unit + u) / NT][(unit + u) % NT][e];
        }
      bar_sync(1, W * 32);
      // One output per thread: of unit u, tile i, row r of a row tile, output j of a tile.
      const int u = threadIdx.x >> 7;
      const int i = (unit + u) / NT;
      const int r = threadIdx.x >> 4 & 7;
      const int j = threadIdx.x & 15;
      const int row = (unit + u) % NT * 8 + r;
      const int out = (blockIdx.x + (first + i) * gridDim.x) * 16 + j;
      if (i < count && row < rows && out < n) {
        const float* const sum_of_warp = sums + u * W * 128 + (r ^ (r >> 2)) * 16 + (j ^ (r & 2) * 4);
        float sum = sum_of_warp[0];
#pragma unroll
        for (int w = 1; w < W; w++) sum = __fadd_rn(sum, sum_of_warp[w * 128]);
        y[(size_t)row * n + out] = sum;
      }
    }
}
static_assert(PIPELINE_UNITS * 128 == LINEAR_WARPS * 32, "one output per thread of the computing warps");

// A computing warp: multiplies its pieces of the block's `own_tiles` tiles, in `passes` passes over x, and stores y.
//
// `Multiply` processes a warp's pieces of a stage: `take` reads its inputs, `load` its weights, `add` adds the products
// of those that exist to the sums of TILES tiles. Each returns bits of what it read (`release_stage`). READS_AGAIN:
// `add` reads x, so that the stage of x is released only after the last tile.
template <class R, class Multiply>
DEV void multiply_tiles(const PipelineShared<R>& at, float* sums, float* y, int pieces, int own_tiles, int passes,
                        int n, int rows, int warp, int lane, int g, int c) {
  constexpr int T = R::TOGETHER, NT = R::NT;
  int stage = 0, phase = 0, x_stage = 0, x_phase = 0;
#pragma unroll 1
  for (int pass = 0; pass < passes; pass++) {
    const int first = pass * T, count = max(0, min(T, own_tiles - first));
    float acc[T][NT][4];
#pragma unroll
    for (int i = 0; i < T; i++)
#pragma unroll
      for (int t = 0; t < NT; t++) acc[i][t][0] = acc[i][t][1] = acc[i][t][2] = acc[i][t][3] = 0;
#pragma unroll 1
    for (int k = 0; k < pieces; k += R::PIECES) {
      const int left = pieces - k - warp;  // a warp has pieces 0, 8, ... of these
      Multiply multiply;
      // Missing rows hold stale data, in columns that are never stored. So does the missing second tile of a stage.
      const uint32_t x = at.x_stages + x_stage * R::X_STAGE;
      mbar_wait(at.x_full + x_stage * 8, x_phase);
      uint32_t seen = multiply.take(x, warp, lane);
      if (!Multiply::READS_AGAIN) release_stage(at.x_empty + x_stage * 8, seen);
#pragma unroll
      for (int i = 0; i < T; i += R::TILES)
        if (i < count) {
          mbar_wait(at.full + stage * 8, phase);
          const uint32_t loaded = multiply.load(at.stages + stage * R::STAGE, warp, lane);
          release_stage(at.empty + stage * 8, loaded);
          if (++stage == R::STAGES) {
            stage = 0;
            phase ^= 1;
          }
          if (left > 0) seen |= multiply.add(acc, i, x, warp, lane, left, rows);
        }
      if (Multiply::READS_AGAIN) release_stage(at.x_empty + x_stage * 8, seen);
      if (++x_stage == R::X_STAGES) {
        x_stage = 0;
        x_phase ^= 1;
      }
    }
    store_pass<R>(acc, sums, y, pass, first, count, n, rows, warp, g, c);
  }
}

// y f32 [row][n] = x W^T. x: bytes [row][pitch]; scales [row][pieces], SCALES bytes each. `next`: weights to prefetch.
template <class R, class Multiply, class Weights>
DEV void pipelined_gemm(const Weights& w, const uint8_t* x, const uint8_t* scales, float* y, int pieces, int tiles,
                        int n, int rows, size_t pitch, NextWeights next = {}) {
  constexpr int W = LINEAR_WARPS, T = R::TOGETHER;
  extern __shared__ __align__(128) uint8_t shared[];
  float* const sums = reinterpret_cast<float*>(shared + R::SUMS);
  // Shuffled, so that the compiler treats it as uniform in the warp.
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  const PipelineShared<R> at(shared_address(shared));
  // All blocks of a cluster make as many passes over x as its first block, which has the most tiles.
  const auto tiles_of = [&](int block) { return max(0, (tiles - block + (int)gridDim.x - 1) / (int)gridDim.x); };
  const int own_tiles = tiles_of(blockIdx.x),
            passes = (tiles_of((int)blockIdx.x / R::CLUSTER * R::CLUSTER) + T - 1) / T;
  grid_trigger();
  if (threadIdx.x == 0) at.init_barriers();
  __syncthreads();
  if (R::CLUSTER > 1) cluster_arrive_relaxed();
  const int first_row = blockIdx.y * R::ROWS;  // of this block
  rows = min(rows - first_row, R::ROWS);
  x += first_row * pitch;
  y += (size_t)first_row * n;
  if (R::SCALES) scales += (size_t)first_row * pieces * R::SCALES;
  if (warp >= W) {
    if (R::HAND_OVER) registers_give<PIPELINE_KEPT>();
    if (threadIdx.x == W * 32) {
      fill_weights<R::TILES, T, R::DEEP>(w, at.stages, at.full, at.empty, R::STAGES, pieces, own_tiles,
                                         PIPELINE_AHEAD_FIRST / R::STAGE, PIPELINE_AHEAD / R::STAGE);
      next.prefetch(blockIdx.x, gridDim.x);
    }
    __syncwarp();
    if (R::CLUSTER > 1) cluster_wait();  // the other block has initialised its barriers
    if (warp == W + 1) {
      grid_wait();
      fill_inputs<R>(x, scales, at, pieces, passes, rows, pitch);
    }
  } else {
    if constexpr (R::HAND_OVER > 0) registers_take<taken_registers(R::HAND_OVER)>();
    if (R::CLUSTER > 1) cluster_wait();
    grid_wait();
    multiply_tiles<R, Multiply>(at, sums, y, pieces, own_tiles, passes, n, rows, warp, lane, g, c);
  }
  // No cluster barrier at exit: all copies and arrivals from the other block have been waited for, stage by stage.
}

// `Multiply` for 16-bit weights: a warp keeps its 64 inputs of all rows in registers.
template <class E, class R>
struct MultiplyFull {
  static constexpr bool READS_AGAIN = false;
  uint4 in[R::NT][2], a[4];
  DEV uint32_t take(uint32_t x, int warp, int lane) {
    uint32_t seen = 0;
#pragma unroll
    for (int t = 0; t < R::NT; t++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        in[t][h] = lds128(x + (t * 8 + (lane >> 2)) * R::PITCH + warp * 128 + h * 64 + (lane & 3) * 16);
        seen |= in[t][h].w;
      }
    return seen;
  }
  DEV uint32_t load(uint32_t stage_at, int warp, int lane) {
    const int g = lane >> 2, c = lane & 3;
    const uint32_t atom = stage_at + warp * R::PIECE;
    const uint32_t low = atom + (g * 8 + (c ^ g)) * 16;
    const uint32_t high = atom + (g * 8 + ((c + 4) ^ g)) * 16;
    a[0] = lds128(low);
    a[1] = lds128(low + 1024);
    a[2] = lds128(high);
    a[3] = lds128(high + 1024);
    return a[0].w | a[1].w | a[2].w | a[3].w;
  }
  DEV uint32_t add(float (&acc)[R::TOGETHER][R::NT][4], int i, uint32_t, int, int, int, int) const {
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const uint4 out = a[h * 2], out8 = a[h * 2 + 1];  // outputs g and g + 8
        const uint32_t fragment[4] = {half ? out.z : out.x, half ? out8.z : out8.x, half ? out.w : out.y,
                                      half ? out8.w : out8.y};
#pragma unroll
        for (int t = 0; t < R::NT; t++)
          E::mma(acc[i][t], fragment, half ? in[t][h].z : in[t][h].x, half ? in[t][h].w : in[t][h].y);
      }
    return 0;
  }
};

// `Multiply` for draft weights, with the bits of `linear_quant`: a warp rereads the 128 inputs of its group for each
// stage, which leaves registers for sums. With four bits, the A operand of output g is the low nibbles, that of output
// g + 8 the whole bytes, from whose sum that of the low nibbles is subtracted.
template <int BITS, class R>
struct MultiplyDraft {
  static constexpr bool READS_AGAIN = true;
  static constexpr int WORDS = BITS / 2;  // 16-byte words per lane and tile
  uint4 v[R::TILES][WORDS];
  uint2 params[R::TILES];
  DEV uint32_t take(uint32_t, int, int) { return 0; }
  DEV uint32_t load(uint32_t stage_at, int warp, int lane) {
    const uint32_t block = stage_at + warp * R::PIECE;
    uint32_t seen = 0;
#pragma unroll
    for (int i = 0; i < R::TILES; i++) {
#pragma unroll
      for (int j = 0; j < WORDS; j++) {
        v[i][j] = lds128(block + i * R::HALF + (j * 32 + lane) * 16);
        seen |= v[i][j].w;
      }
      params[i] = lds64(block + i * R::HALF + R::PIECE - QUANT_PARAMS + (lane >> 2) * 8);
      seen |= params[i].x;
    }
    return seen;
  }
  DEV uint32_t add(float (&acc)[R::TOGETHER][R::NT][4], int first, uint32_t x, int warp, int lane, int, int) const {
    constexpr uint32_t L = LOW_NIBBLES;
    const int g = lane >> 2, c = lane & 3;
    uint32_t seen = 0;
#pragma unroll
    for (int t = 0; t < R::NT; t++) {
      const uint32_t codes = x + (t * 8 + g) * R::PITCH + warp * 128 + c * 16;
      const uint32_t scales = x + R::ROWS * R::PITCH + (t * 8 + 2 * c) * R::SCALES_PITCH + warp * 8;
      const uint4 b[2] = {lds128(codes), lds128(codes + 64)};
      const uint2 s[2] = {lds64(scales), lds64(scales + R::SCALES_PITCH)};
      seen |= b[0].w | b[1].w | s[0].x | s[1].x;
#pragma unroll
      for (int i = 0; i < R::TILES; i++) {
        int d[4] = {INTEGER_BIAS_BITS, INTEGER_BIAS_BITS, INTEGER_BIAS_BITS, INTEGER_BIAS_BITS};
#pragma unroll
        for (int h = 0; h < 2; h++) {
          if constexpr (BITS == 4) {
            const uint4 p = v[i][h];
            mma_u8s8(d, p.x & L, p.x, p.y & L, p.y, b[h].x, b[h].y);
            mma_u8s8(d, p.z & L, p.z, p.w & L, p.w, b[h].z, b[h].w);
          } else {
            const uint4 p = v[i][2 * h], q = v[i][2 * h + 1];
            mma_u8s8(d, p.x, p.y, p.z, p.w, b[h].x, b[h].y);
            mma_u8s8(d, q.x, q.y, q.z, q.w, b[h].z, b[h].w);
          }
        }
        const float2 low = unpack_half2(params[i].x), high = unpack_half2(params[i].y);
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const float scale = __uint_as_float(s[e].x);
          const float sum = __uint_as_float(s[e].y);
          const float lower = __int_as_float(d[e]);
          const float upper = __int_as_float(d[2 + e]);
          const float rest = BITS == 4 ? __fadd_rn(upper, -lower) : __fadd_rn(upper, -integer_bias());
          float (&y)[4] = acc[first + i][t];
          y[e] = add_group(y[e], __fadd_rn(lower, -integer_bias()), low.x, scale, low.y, sum);
          y[2 + e] = add_group(y[2 + e], rest, BITS == 4 ? high.x * 0.0625f : high.x, scale, high.y, sum);
        }
      }
    }
    return seen;
  }
};

template <int NT, int TOGETHER, int STAGES, int X_STAGES, int CLUSTER>
using FullPipeline = Pipeline<NT, 2048, 1, 0, TOGETHER, STAGES, X_STAGES, CLUSTER, 0>;
template <int BITS, int NT, int TOGETHER, int STAGES, int X_STAGES, int CLUSTER, int HAND_OVER>
using DraftPipeline = Pipeline<NT, QUANT_BLOCK<BITS>, 8 / BITS, 8, TOGETHER, STAGES, X_STAGES, CLUSTER, HAND_OVER>;
