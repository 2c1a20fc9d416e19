// y[row][n] = sum_k x[row][k] W[n][k] for the few rows of a step. Weights are the mma A operand (16 outputs), rows its columns.
//
// The bits of y depend on the weights and the row alone: a warp's k order, the split of K over the warps of one block and the order of their sum are
// fixed by K. Rows only add columns.
//
// 16-bit weights lie in atoms of 16 rows x 64 k, [N/16][K/64][16][8 pieces of 16 bytes], piece j of row r at place j ^ (r & 7). Lane 4g + c loads
// pieces c and c + 4 of rows g and g + 8, eight consecutive k each, and the same eight k of row g of x: the order of k inside a product is free as
// long as both operands agree. So x is plain row-major and needs no packing.
#pragma once
#include "numbers.cuh"

struct MmaBf16 {
  static DEV void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { mma_bf16(d, a, b0, b1); }
};
struct MmaHalf {
  static DEV void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { mma_f16(d, a, b0, b1); }
};
constexpr int LINEAR_WARPS = 8;          // warps that share the k of a tile; part of the order of every sum

// Adds the warps' tiles of 16 outputs x 8 NT rows in order and stores them.
template <int NT>
DEV void reduce_store(float (&sums)[LINEAR_WARPS][NT][128], const float (&acc)[NT][4], float* y, int tile, int n, int rows) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
#pragma unroll
  for (int t = 0; t < NT; t++)
#pragma unroll
    for (int e = 0; e < 4; e++) sums[warp][t][(2 * c + (e & 1)) * 16 + g + (e >> 1) * 8] = acc[t][e];
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

// The warps share the atoms of a tile in turn (warp w has atoms w, w + 8, ...) and the blocks the tiles. DEPTH atoms per warp are under way.
template <class E, int NT, int DEPTH>
DEV void linear_16(const uint4* __restrict__ w, const uint16_t* x, float* y, int atoms, int tiles, int n, int rows, int pitch) {
  __shared__ float sums[LINEAR_WARPS][NT][128];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  const int mine = (atoms - warp + LINEAR_WARPS - 1) / LINEAR_WARPS;      // atoms of this warp
  const int low = g * 8 + (c ^ g), high = g * 8 + ((c + 4) ^ g);           // places of its pieces of row g; row g + 8 is 64 pieces further
  grid_trigger();
  uint4 a[DEPTH][4];
  auto load = [&](int i, int tile, int atom) {
    const uint4* at = w + ((size_t)tile * atoms + atom * LINEAR_WARPS + warp) * 128;
    a[i][0] = ldg_stream(at + low), a[i][1] = ldg_stream(at + 64 + low), a[i][2] = ldg_stream(at + high), a[i][3] = ldg_stream(at + 64 + high);
  };
  int tile = blockIdx.x;
#pragma unroll
  for (int i = 0; i < DEPTH; i++)
    if (tile < tiles && i < mine) load(i, tile, i);
  grid_wait();                                                             // weights do not depend on the kernel before, x does
  x += (size_t)blockIdx.y * NT * 8 * pitch, y += (size_t)blockIdx.y * NT * 8 * n, rows = min(rows - (int)blockIdx.y * NT * 8, NT * 8);
  for (; tile < tiles; tile += gridDim.x) {
    float acc[NT][4];
#pragma unroll
    for (int t = 0; t < NT; t++) acc[t][0] = acc[t][1] = acc[t][2] = acc[t][3] = 0;
    const int next = tile + gridDim.x;
#pragma unroll 1
    for (int i0 = 0; i0 < mine; i0 += DEPTH) {
      const bool last = i0 + DEPTH >= mine;                                // from here on the next tile's atoms are fetched
#pragma unroll
      for (int i = 0; i < DEPTH; i++) {
        if (i0 + i < mine) {
          const uint16_t* from = x + ((i0 + i) * LINEAR_WARPS + warp) * 64 + c * 8;
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const uint4 r = a[i][h * 2], s = a[i][h * 2 + 1];
            const uint32_t f0[4] = {r.x, s.x, r.y, s.y}, f1[4] = {r.z, s.z, r.w, s.w};
#pragma unroll
            for (int t = 0; t < NT; t++) {
              uint4 b = make_uint4(0, 0, 0, 0);
              if (t * 8 + g < rows) b = ldg_plain(from + (size_t)(t * 8 + g) * pitch + h * 32);
              E::mma(acc[t], f0, b.x, b.y), E::mma(acc[t], f1, b.z, b.w);
            }
          }
        }
        if (last) {
          if (next < tiles && i < mine) load(i, next, i);
        } else if (i0 + DEPTH + i < mine) {
          load(i, tile, i0 + DEPTH + i);
        }
      }
    }
    reduce_store<NT>(sums, acc, y, tile, n, rows);
  }
}

// Draft weights: blocks of 16 outputs x 128 k, [N/16][K/128], w = scale * code + zero per output and block; activations int8 per row and 128 k.
//   y += scale * sx * sum(code * xq) + zero * sum(x)
// Four bits, 1088 bytes: codes [half h][lane] uint4, byte b of word i: row g (low nibble) and g + 8 (high) at k = 64 h + 16 c + 4 i + b.
// Eight bits, 2112 bytes: codes [j = 2h + p][lane] uint4: words row g, row g + 8 at k = 64 h + 16 c + 8 p + b, then both at k + 4.
// Then parameters [g] half {scale, zero of row g, scale, zero of row g + 8}.
template <int BITS>
constexpr int QUANT_BLOCK = 256 * BITS + 64;

// STAGED: the activations lie in shared memory behind the ring, [row][groups * 128 + 64 bytes] and then their scales [row][groups]: a step of a single
// row is a chain of latencies, and this takes one out of every block.
template <int BITS, int NT, int STAGES, bool STAGED>
DEV void linear_quant(const uint8_t* __restrict__ w, const int8_t* x, const float2* xs, float* y, int groups, int tiles, int n, int rows) {
  constexpr int BLOCK = QUANT_BLOCK<BITS>, PIECES = BLOCK / 16;
  extern __shared__ __align__(128) uint8_t ring[];
  __shared__ float sums[LINEAR_WARPS][NT][128];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  const int mine = (groups - warp + LINEAR_WARPS - 1) / LINEAR_WARPS;     // groups of this warp: warp, warp + 8, ...
  const uint32_t slots = shared_address(ring) + warp * STAGES * BLOCK;
  const uint64_t once = evict_first();
  grid_trigger();
  int load_tile = blockIdx.x, load_group = 0, load_slot = 0;
  auto load = [&]() {
    if (mine > 0 && load_tile < tiles) {
      const uint8_t* at = w + ((size_t)load_tile * groups + load_group * LINEAR_WARPS + warp) * BLOCK;
      const uint32_t to = slots + load_slot * BLOCK;
#pragma unroll
      for (int i = 0; i < PIECES; i += 32)
        if (i + lane < PIECES) copy16_once(to + (i + lane) * 16, at + (i + lane) * 16, once);
      if (++load_group == mine) load_group = 0, load_tile += gridDim.x;
    }
    copy_commit();
    load_slot = load_slot + 1 == STAGES ? 0 : load_slot + 1;
  };
#pragma unroll 1
  for (int i = 0; i < STAGES - 1; i++) load();
  grid_wait();
  x += (size_t)blockIdx.y * NT * 8 * groups * 128, xs += (size_t)blockIdx.y * NT * 8 * groups, y += (size_t)blockIdx.y * NT * 8 * n, rows = min(rows - (int)blockIdx.y * NT * 8, NT * 8);
  const int pitch = groups * 128 + 64;                                     // a row's pieces and its neighbour's fall into different banks
  const uint32_t staged_x = shared_address(ring) + LINEAR_WARPS * STAGES * BLOCK, staged_s = staged_x + rows * pitch;
  if (STAGED) {
    for (int i = threadIdx.x; i < rows * groups * 8; i += LINEAR_WARPS * 32) sts128(staged_x + i / (groups * 8) * pitch + i % (groups * 8) * 16, ldg_plain(x + (size_t)i * 16));
    for (int i = threadIdx.x; i < rows * groups; i += LINEAR_WARPS * 32) {
      const float2 v = __ldcg(xs + i);
      sts32(staged_s + i * 8, __float_as_uint(v.x)), sts32(staged_s + i * 8 + 4, __float_as_uint(v.y));
    }
    __syncthreads();
  }
  int slot = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    float acc[NT][4];
#pragma unroll
    for (int t = 0; t < NT; t++) acc[t][0] = acc[t][1] = acc[t][2] = acc[t][3] = 0;
#pragma unroll 1
    for (int i = 0; i < mine; i++) {
      const int group = i * LINEAR_WARPS + warp;
      uint4 b[NT][2];
      float2 sx[NT][2];
#pragma unroll
      for (int t = 0; t < NT; t++) {
        b[t][0] = b[t][1] = make_uint4(0, 0, 0, 0), sx[t][0] = sx[t][1] = make_float2(0, 0);
        if (t * 8 + g < rows) {
          if (STAGED) {
            const uint32_t from = staged_x + g * pitch + group * 128 + c * 16;
            b[t][0] = lds128(from), b[t][1] = lds128(from + 64);
          } else {
            const int8_t* from = x + ((size_t)(t * 8 + g) * groups + group) * 128 + c * 16;
            b[t][0] = ldg_plain(from), b[t][1] = ldg_plain(from + 64);
          }
        }
#pragma unroll
        for (int e = 0; e < 2; e++)
          if (t * 8 + 2 * c + e < rows) {
            if (STAGED) {
              const uint2 v = lds64(staged_s + ((2 * c + e) * groups + group) * 8);
              sx[t][e] = make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
            } else {
              sx[t][e] = __ldcg(xs + (size_t)(t * 8 + 2 * c + e) * groups + group);
            }
          }
      }
      __syncwarp();                                                        // the slot asked for next was read by all lanes
      load();
      copy_wait<STAGES - 1>();
      __syncwarp();
      const uint32_t at = slots + slot * BLOCK;
      slot = slot + 1 == STAGES ? 0 : slot + 1;
      int d[NT][4];
#pragma unroll
      for (int t = 0; t < NT; t++) d[t][0] = d[t][1] = d[t][2] = d[t][3] = 0x4b400000;      // 1.5 * 2^23: read as a float the sum is exact
#pragma unroll
      for (int h = 0; h < 2; h++) {
        if constexpr (BITS == 4) {
          const uint4 v = lds128(at + (h * 32 + lane) * 16);
          const uint32_t L = 0x0f0f0f0f, H = 0xf0f0f0f0;                   // high nibbles enter as 16 * code, their scale as scale / 16
#pragma unroll
          for (int t = 0; t < NT; t++) {
            mma_u8s8(d[t], v.x & L, v.x & H, v.y & L, v.y & H, b[t][h].x, b[t][h].y);
            mma_u8s8(d[t], v.z & L, v.z & H, v.w & L, v.w & H, b[t][h].z, b[t][h].w);
          }
        } else {
          const uint4 v0 = lds128(at + (2 * h * 32 + lane) * 16), v1 = lds128(at + ((2 * h + 1) * 32 + lane) * 16);
#pragma unroll
          for (int t = 0; t < NT; t++) {
            mma_u8s8(d[t], v0.x, v0.y, v0.z, v0.w, b[t][h].x, b[t][h].y);
            mma_u8s8(d[t], v1.x, v1.y, v1.z, v1.w, b[t][h].z, b[t][h].w);
          }
        }
      }
      const uint2 params = lds64(at + BLOCK - 64 + g * 8);
      const float2 p0 = unpack_half2(params.x), p1 = unpack_half2(params.y);
      const float s1 = BITS == 4 ? p1.x * 0.0625f : p1.x;
#pragma unroll
      for (int t = 0; t < NT; t++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const float2 s = sx[t][e & 1];
          acc[t][e] = __fmaf_rn(__fadd_rn(__int_as_float(d[t][e]), -12582912.f), __fmul_rn(e < 2 ? p0.x : s1, s.x), __fmaf_rn(e < 2 ? p0.y : p1.y, s.y, acc[t][e]));
        }
    }
    reduce_store<NT>(sums, acc, y, tile, n, rows);
  }
  copy_wait<0>();
}
static_assert(128 * 255 * 127 < 1 << 22, "the integer sum of a group must stay where floats count by ones");

// f32 weights, row-major [n][k]: a warp per output, lanes stride through k. For checkpoints that are stored so: small ones.
template <int ROWS>
DEV void linear_single(const float* __restrict__ w, const float* x, float* y, int k, int n, int rows, int pitch) {
  const int lane = threadIdx.x & 31, out = blockIdx.x * LINEAR_WARPS + (threadIdx.x >> 5);
  grid_trigger();
  grid_wait();
  x += (size_t)blockIdx.y * ROWS * pitch, y += (size_t)blockIdx.y * ROWS * n, rows = min(rows - (int)blockIdx.y * ROWS, ROWS);
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
