// y[row][n] = sum_k x[row][k] W[n][k] for the few rows of a step. Weights are the mma A operand (16
// outputs), rows its columns.
//
// The bits of y depend on the weights and the row alone: K determines a warp's k order, the split of K over the warps
// of a block and the order of their sum. Rows only add columns.
//
// 16-bit weights are stored in atoms of 16 outputs x 64 k, [N / 16][K / 64][16][8 pieces of 16 bytes], piece j of
// output r at position j ^ (r & 7). Lane 4 g + c loads pieces c and c + 4 of outputs g and g + 8, eight consecutive k
// each, and the same eight k of row g of x. The order of k inside an mma is free if both operands agree, so x is
// row-major and needs no packing.
//
// In this file g and c are a lane's indices in an mma fragment (ptx.cuh), t is a tile of eight rows, e an element of an
// accumulator, and h a half of a group of inputs.
#pragma once
#include "numbers.cuh"
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#include "hopper.cuh"
#endif

// The mma of a weight type, as a type for templates.
struct MmaBf16 {
  static DEV void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { mma_bf16(d, a, b0, b1); }
};
struct MmaHalf {
  static DEV void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { mma_f16(d, a, b0, b1); }
};
constexpr int LINEAR_WARPS = 8;  // warps that share the k of a tile; fixes the order of every sum

// The row, in a tile of eight, of element e of a lane's sums of an output: as in an mma's result, or lanes in rows 0 to
// 3, then again in rows 4 to 7.
struct RowPairs {
  static DEV int row(int c, int e) { return 2 * c + e; }
};
struct RowHalves {
  static DEV int row(int c, int e) { return 4 * e + c; }
};

// Adds the warps' tiles of 16 outputs x 8 NT rows in order and stores them.
template <int NT, class Rows>
DEV void reduce_store(float (&sums)[LINEAR_WARPS][NT][128], const float (&acc)[NT][4], float* y, int tile, int n,
                      int rows) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
#pragma unroll
  for (int t = 0; t < NT; t++)
#pragma unroll
    for (int e = 0; e < 4; e++) sums[warp][t][Rows::row(c, e & 1) * 16 + g + (e >> 1) * 8] = acc[t][e];
  __syncthreads();
  for (int i = threadIdx.x; i < NT * 128; i += LINEAR_WARPS * 32) {
    const int t = i >> 7, j = i & 127, row = t * 8 + (j >> 4), out = tile * 16 + (j & 15);
    float sum = sums[0][t][j];
#pragma unroll
    for (int v = 1; v < LINEAR_WARPS; v++) sum = __fadd_rn(sum, sums[v][t][j]);
    if (row < rows && out < n) y[(size_t)row * n + out] = sum;
  }
  __syncthreads();
}

// The tiles of a block, whose warps share the groups of a tile in turn: warp w has groups w, w + 8, ... DEPTH groups of
// a warp are in flight: load(i, tile, group) loads one into registers i; add(acc, i, group, x, rows) multiplies it by
// the inputs of `rows` rows of x. x: [row][pitch], y f32 [row][n].
template <int NT, int DEPTH, class Rows, class X, class Load, class Add>
DEV void warp_tiles(const X* x, float* y, int groups, int tiles, int n, int rows, int pitch, Load load, Add add) {
  __shared__ float sums[LINEAR_WARPS][NT][128];
  const int warp = threadIdx.x >> 5;
  const int own_groups = (groups - warp + LINEAR_WARPS - 1) / LINEAR_WARPS;
  grid_trigger();
  int tile = blockIdx.x;
#pragma unroll
  for (int i = 0; i < DEPTH; i++)
    if (tile < tiles && i < own_groups) load(i, tile, i * LINEAR_WARPS + warp);
  grid_wait();  // weights do not depend on the previous kernel, x does
  x += (size_t)blockIdx.y * NT * 8 * pitch;
  y += (size_t)blockIdx.y * NT * 8 * n;
  rows = min(rows - (int)blockIdx.y * NT * 8, NT * 8);
  for (; tile < tiles; tile += gridDim.x) {
    float acc[NT][4];
#pragma unroll
    for (int t = 0; t < NT; t++) acc[t][0] = acc[t][1] = acc[t][2] = acc[t][3] = 0;
    const int next = tile + gridDim.x;
#pragma unroll 1
    for (int start = 0; start < own_groups; start += DEPTH) {
      const bool last = start + DEPTH >= own_groups;  // from here on the next tile's groups are loaded
#pragma unroll
      for (int i = 0; i < DEPTH; i++) {
        if (start + i < own_groups) add(acc, i, (start + i) * LINEAR_WARPS + warp, x, rows);
        if (last) {
          if (next < tiles && i < own_groups) load(i, next, i * LINEAR_WARPS + warp);
        } else if (start + DEPTH + i < own_groups) {
          load(i, tile, (start + DEPTH + i) * LINEAR_WARPS + warp);
        }
      }
    }
    reduce_store<NT, Rows>(sums, acc, y, tile, n, rows);
  }
}

// 16-bit weights: a group is an atom.
template <class E, int NT, int DEPTH>
DEV void linear_16(const uint4* __restrict__ w, const uint16_t* x, float* y, int atoms, int tiles, int n, int rows,
                   int pitch) {
  const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  // Positions of the lane's pieces of output g; those of output g + 8 are 64 pieces further.
  const int low = g * 8 + (c ^ g), high = g * 8 + ((c + 4) ^ g);
  uint4 a[DEPTH][4];
  auto load = [&](int i, int tile, int atom) {
    const uint4* pieces = w + ((size_t)tile * atoms + atom) * 128;
    a[i][0] = ldg_stream(pieces + low);
    a[i][1] = ldg_stream(pieces + 64 + low);
    a[i][2] = ldg_stream(pieces + high);
    a[i][3] = ldg_stream(pieces + 64 + high);
  };
  auto add = [&](float (&acc)[NT][4], int i, int atom, const uint16_t* x, int rows) {
    const uint16_t* const inputs = x + atom * 64;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint4 out = a[i][h * 2], out8 = a[i][h * 2 + 1];  // outputs g and g + 8
      const uint32_t first[4] = {out.x, out8.x, out.y, out8.y}, second[4] = {out.z, out8.z, out.w, out8.w};
#pragma unroll
      for (int t = 0; t < NT; t++) {
        uint4 b = make_uint4(0, 0, 0, 0);
        if (t * 8 + g < rows) b = ldg_plain(inputs + (size_t)(t * 8 + g) * pitch + c * 8 + h * 32);
        E::mma(acc[t], first, b.x, b.y);
        E::mma(acc[t], second, b.z, b.w);
      }
    }
  };
  warp_tiles<NT, DEPTH, RowPairs>(x, y, atoms, tiles, n, rows, pitch, load, add);
}

// Draft weights: blocks of 16 outputs x 128 k, [N / 16][K / 128], w = scale * code + zero per output and block.
// Activations are int8 codes xq with a scale sx per row and 128 k.
//
//     y += scale * sx * sum(code * xq) + zero * sx * sum(xq)
//
// The codes of a block are uint4s, one per lane; b is a byte of a word. With
//
//     4 bits  [h], word i: outputs g (low nibble) and g + 8 (high nibble) at k = 64 h + 16 c + 4 i + b
//     8 bits  [2 h + p], words 0 and 1: outputs g and g + 8 at k = 64 h + 16 c + 8 p + b; words 2 and 3: at k + 4
//
// Then follow the parameters, f16 [g] {scale, zero of output g; scale, zero of output g + 8}.
enum { QUANT_PARAMS = 64 };  // bytes of a block's parameters, its last ones
template <int BITS>
constexpr int QUANT_BLOCK = 256 * BITS + QUANT_PARAMS;                    // bytes
enum : uint32_t { LOW_NIBBLES = 0x0f0f0f0f, HIGH_NIBBLES = 0xf0f0f0f0 };  // of four bytes

// acc plus a group's share of y: `sum` of codes times inputs, in f32, and `x_sum` of the inputs.
DEV float add_group(float acc, float sum, float scale, float x_scale, float zero, float x_sum) {
  return __fmaf_rn(sum, __fmul_rn(scale, x_scale), __fmaf_rn(zero, x_sum, acc));
}
static_assert(128 * 255 * 127 < 1 << 22, "the integer sum of a group must be exact in f32");

// The activations of a block of `linear_quant`. STAGED: they are copied to shared memory after the weights,
// [row][groups * 128 + 64 bytes], then their scales [row][groups]. A step of a single row is a chain of memory
// latencies; this removes one per block.
template <int NT, bool STAGED>
struct QuantInputs {
  const int8_t* x;
  const float2* xs;
  int rows, groups;
  int pitch;                // bytes of a staged row: its pieces and its neighbour's are in different banks
  uint32_t staged, scales;  // shared memory
  uint4 b[NT][2];
  float2 sx[NT][2];  // {scale, sum} of rows 2c and 2c + 1

  DEV QuantInputs(const int8_t* x, const float2* xs, int rows, int groups, uint32_t shared)
      : x(x), xs(xs), rows(rows), groups(groups), pitch(groups * 128 + 64), staged(shared) {
    scales = staged + rows * pitch;
    if constexpr (STAGED) copy_to_shared();
  }

  DEV void copy_to_shared() {
    for (int i = threadIdx.x; i < rows * groups * 8; i += LINEAR_WARPS * 32)
      sts128(staged + i / (groups * 8) * pitch + i % (groups * 8) * 16, ldg_plain(x + (size_t)i * 16));
    for (int i = threadIdx.x; i < rows * groups; i += LINEAR_WARPS * 32) {
      const float2 v = __ldcg(xs + i);
      sts32(scales + i * 8, __float_as_uint(v.x));
      sts32(scales + i * 8 + 4, __float_as_uint(v.y));
    }
    __syncthreads();
  }

  // Loads b and sx of a group.
  DEV void load(int group, int g, int c) {
#pragma unroll
    for (int t = 0; t < NT; t++) {
      b[t][0] = b[t][1] = make_uint4(0, 0, 0, 0);
      sx[t][0] = sx[t][1] = make_float2(0, 0);
      if (t * 8 + g < rows) {
        if (STAGED) {
          const uint32_t codes = staged + g * pitch + group * 128 + c * 16;
          b[t][0] = lds128(codes);
          b[t][1] = lds128(codes + 64);
        } else {
          const int8_t* codes = x + ((size_t)(t * 8 + g) * groups + group) * 128 + c * 16;
          b[t][0] = ldg_plain(codes);
          b[t][1] = ldg_plain(codes + 64);
        }
      }
#pragma unroll
      for (int e = 0; e < 2; e++)
        if (t * 8 + 2 * c + e < rows) {
          if (STAGED) {
            const uint2 v = lds64(scales + ((2 * c + e) * groups + group) * 8);
            sx[t][e] = make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
          } else {
            sx[t][e] = __ldcg(xs + (size_t)(t * 8 + 2 * c + e) * groups + group);
          }
        }
    }
  }
};

// acc plus the products of one block of weights, in shared memory, and its inputs.
template <int BITS, int NT, bool STAGED>
DEV void add_block(float (&acc)[NT][4], uint32_t block, const QuantInputs<NT, STAGED>& in, int lane) {
  int d[NT][4];
#pragma unroll
  for (int t = 0; t < NT; t++) d[t][0] = d[t][1] = d[t][2] = d[t][3] = INTEGER_BIAS_BITS;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    if constexpr (BITS == 4) {
      const uint4 v = lds128(block + (h * 32 + lane) * 16);
      constexpr uint32_t L = LOW_NIBBLES, H = HIGH_NIBBLES;  // high nibbles enter as 16 * code, with scale / 16
#pragma unroll
      for (int t = 0; t < NT; t++) {
        mma_u8s8(d[t], v.x & L, v.x & H, v.y & L, v.y & H, in.b[t][h].x, in.b[t][h].y);
        mma_u8s8(d[t], v.z & L, v.z & H, v.w & L, v.w & H, in.b[t][h].z, in.b[t][h].w);
      }
    } else {
      const uint4 v0 = lds128(block + (2 * h * 32 + lane) * 16);
      const uint4 v1 = lds128(block + ((2 * h + 1) * 32 + lane) * 16);
#pragma unroll
      for (int t = 0; t < NT; t++) {
        mma_u8s8(d[t], v0.x, v0.y, v0.z, v0.w, in.b[t][h].x, in.b[t][h].y);
        mma_u8s8(d[t], v1.x, v1.y, v1.z, v1.w, in.b[t][h].z, in.b[t][h].w);
      }
    }
  }
  const uint2 params = lds64(block + QUANT_BLOCK<BITS> - QUANT_PARAMS + (lane >> 2) * 8);
  const float2 low = unpack_half2(params.x), high = unpack_half2(params.y);  // of outputs g and g + 8
  const float high_scale = BITS == 4 ? high.x * 0.0625f : high.x;
#pragma unroll
  for (int t = 0; t < NT; t++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float2 s = in.sx[t][e & 1];
      acc[t][e] = add_group(acc[t][e], __fadd_rn(__int_as_float(d[t][e]), -integer_bias()), e < 2 ? low.x : high_scale,
                            s.x, e < 2 ? low.y : high.y, s.y);
    }
}

// The few-row GEMM of draft weights. x int8 [row][groups * 128]; xs [row][groups] {sx, sx * sum(xq)}; y f32 [row][n].
template <int BITS, int NT, int STAGES, bool STAGED>
DEV void linear_quant(const uint8_t* __restrict__ w, const int8_t* x, const float2* xs, float* y, int groups, int tiles,
                      int n, int rows) {
  constexpr int BLOCK = QUANT_BLOCK<BITS>, PIECES = BLOCK / 16;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ float sums[LINEAR_WARPS][NT][128];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  const int own_groups = (groups - warp + LINEAR_WARPS - 1) / LINEAR_WARPS;  // groups of this warp: warp, warp + 8, ...
  const uint32_t stages_at = shared_address(shared) + warp * STAGES * BLOCK;
  const uint64_t once = evict_first();
  grid_trigger();
  int load_tile = blockIdx.x, load_group = 0, load_stage = 0;
  auto load = [&]() {
    if (own_groups > 0 && load_tile < tiles) {
      const uint8_t* block = w + ((size_t)load_tile * groups + load_group * LINEAR_WARPS + warp) * BLOCK;
      const uint32_t stage = stages_at + load_stage * BLOCK;
#pragma unroll
      for (int i = 0; i < PIECES; i += 32)
        if (i + lane < PIECES) copy16_once(stage + (i + lane) * 16, block + (i + lane) * 16, once);
      if (++load_group == own_groups) {
        load_group = 0;
        load_tile += gridDim.x;
      }
    }
    copy_commit();
    load_stage = load_stage + 1 == STAGES ? 0 : load_stage + 1;
  };
#pragma unroll 1
  for (int i = 0; i < STAGES - 1; i++) load();
  grid_wait();
  x += (size_t)blockIdx.y * NT * 8 * groups * 128;
  xs += (size_t)blockIdx.y * NT * 8 * groups;
  y += (size_t)blockIdx.y * NT * 8 * n;
  rows = min(rows - (int)blockIdx.y * NT * 8, NT * 8);
  QuantInputs<NT, STAGED> in(x, xs, rows, groups, shared_address(shared) + LINEAR_WARPS * STAGES * BLOCK);
  int stage = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    float acc[NT][4];
#pragma unroll
    for (int t = 0; t < NT; t++) acc[t][0] = acc[t][1] = acc[t][2] = acc[t][3] = 0;
#pragma unroll 1
    for (int i = 0; i < own_groups; i++) {
      in.load(i * LINEAR_WARPS + warp, g, c);
      __syncwarp();  // all lanes have read the stage that `load` overwrites
      load();
      copy_wait<STAGES - 1>();
      __syncwarp();
      add_block<BITS>(acc, stages_at + stage * BLOCK, in, lane);
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    reduce_store<NT, RowPairs>(sums, acc, y, tile, n, rows);
  }
  copy_wait<0>();
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#include "linear_pipeline.cuh"
#endif

// f32 weights, row-major [n][k], for checkpoints in single precision, which are small: a warp per output, lanes stride
// through k. x f32 [row][pitch], y f32 [row][n].
template <int ROWS>
DEV void linear_single(const float* __restrict__ w, const float* x, float* y, int k, int n, int rows, int pitch) {
  const int lane = threadIdx.x & 31, out = blockIdx.x * LINEAR_WARPS + (threadIdx.x >> 5);
  grid_trigger();
  grid_wait();
  x += (size_t)blockIdx.y * ROWS * pitch;
  y += (size_t)blockIdx.y * ROWS * n;
  rows = min(rows - (int)blockIdx.y * ROWS, ROWS);
  if (out >= n) return;
  float acc[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) acc[r] = 0;
  for (int i = lane; i < k; i += 32) {
    const float v = w[(size_t)out * k + i];
#pragma unroll
    for (int r = 0; r < ROWS; r++)
      if (r < rows) acc[r] = __fmaf_rn(v, x[(size_t)r * pitch + i], acc[r]);
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const float sum = warp_sum(acc[r]);
    if (lane == 0 && r < rows) y[(size_t)r * n + out] = sum;
  }
}
