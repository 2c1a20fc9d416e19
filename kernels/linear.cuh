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
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#include "hopper.cuh"
#endif

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
//   y += scale * sx * sum(code * xq) + zero * sx * sum(xq)
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

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// ---- Hopper: a block per multiprocessor behind a ring that the copy engine fills ----
// Weights do not depend on the kernel before, so a producer warp fills the ring, nearly all shared memory of a multiprocessor, as soon as the product before
// has left it: memory works on while norms and the like run, whose blocks fit beside in the registers that are left. No more than AHEAD chunks are on their
// way: they keep memory busy, and behind more of them every input and every result would queue.
//
// A chunk is an atom for each of the eight warps. Up to RING_TOGETHER tiles of a block alternate by chunks, so that what a warp needs of x serves all of them;
// it is asked for two chunks ahead. Their sums meet in one go. Which atoms a warp adds up in which order is as in `linear_16`.
constexpr int RING_STAGES = 12, RING_AHEAD = 4, RING_CHUNK = LINEAR_WARPS * 2048, RING_TOGETHER = 4;

// Keeps the ring full: by one thread.
template <int TOGETHER>
DEV void ring_fill(const uint8_t* w, uint32_t slots, uint32_t full, uint32_t empty, int atoms, int mine) {
  const uint64_t once = evict_first();
  int slot = 0, phase = 1, behind = 0, behind_phase = 0, ahead = 0;
#pragma unroll 1
  for (int first = 0; first < mine; first += TOGETHER)
#pragma unroll 1
    for (int k = 0; k < atoms; k += LINEAR_WARPS)
#pragma unroll 1
      for (int t = first; t < min(first + TOGETHER, mine); t++) {
        const int bytes = min(LINEAR_WARPS, atoms - k) * 2048;
        mbar_wait(empty + slot * 8, phase);
        if (ahead < RING_AHEAD) {
          ahead++;
        } else {
          mbar_wait(full + behind * 8, behind_phase);
          if (++behind == RING_STAGES) behind = 0, behind_phase ^= 1;
        }
        mbar_expect(full + slot * 8, bytes);
        bulk_copy(slots + slot * RING_CHUNK, w + ((size_t)(blockIdx.x + t * gridDim.x) * atoms + k) * 2048, bytes, full + slot * 8, once);
        if (++slot == RING_STAGES) slot = 0, phase ^= 1;
      }
}

template <class E, int NT>
DEV void linear_ring(const uint8_t* __restrict__ w, const uint16_t* x, float* y, int atoms, int tiles, int n, int rows, int pitch) {
  constexpr int W = LINEAR_WARPS, TOGETHER = RING_TOGETHER / NT;
  extern __shared__ __align__(128) uint8_t shared[];                       // slots, f32 sums [tile][row tile][warp][8 rows][16], barriers
  float* const sums = reinterpret_cast<float*>(shared + RING_STAGES * RING_CHUNK);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  const uint32_t slots = shared_address(shared), full = slots + RING_STAGES * RING_CHUNK + RING_TOGETHER * W * 512, empty = full + RING_STAGES * 8;
  const int mine = (tiles - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x, chunks = (atoms + W - 1) / W;
  grid_trigger();
  mbar_init_ring(full, empty, RING_STAGES, W * 32);
  __syncthreads();
  if (warp == W) {
    if (lane == 0) ring_fill<TOGETHER>(w, slots, full, empty, atoms, mine);
    return;
  }
  grid_wait();
  x += (size_t)g * pitch + warp * 64 + c * 8;
  const uint32_t low = warp * 2048 + (g * 8 + (c ^ g)) * 16, high = warp * 2048 + (g * 8 + ((c + 4) ^ g)) * 16;
  uint4 in[2][NT][2];
  auto load = [&](int i, int k) {
    if (k * W + warp < atoms)
#pragma unroll
      for (int t = 0; t < NT; t++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          in[i][t][h] = make_uint4(0, 0, 0, 0);
          if (t * 8 + g < rows) in[i][t][h] = ldg_plain(x + (size_t)t * 8 * pitch + k * (W * 64) + h * 32);
        }
  };
  int slot = 0, phase = 0;
  load(0, 0), load(1, 1);
#pragma unroll 1
  for (int first = 0; first < mine; first += TOGETHER) {
    const int count = min(TOGETHER, mine - first);
    float acc[TOGETHER][NT][4];
#pragma unroll
    for (int i = 0; i < TOGETHER; i++)
#pragma unroll
      for (int t = 0; t < NT; t++) acc[i][t][0] = acc[i][t][1] = acc[i][t][2] = acc[i][t][3] = 0;
#pragma unroll 1
    for (int k0 = 0; k0 < chunks; k0 += 2)
#pragma unroll
      for (int b = 0; b < 2; b++)
        if (k0 + b < chunks) {
          const bool there = (k0 + b) * W + warp < atoms;
#pragma unroll
          for (int i = 0; i < TOGETHER; i += 2)
            if (i < count) {
              // Two tiles at a time. Without a second the first is read again, and nobody reads what it sums up.
              const bool two = i + 1 < count;
              uint4 a[2][4];
              uint32_t left[2];
#pragma unroll
              for (int j = 0; j < 2; j++) {
                if (j) left[1] = left[0];
                if (j == 0 || two) {
                  mbar_wait(full + slot * 8, phase);
                  left[j] = slot;
                  if (++slot == RING_STAGES) slot = 0, phase ^= 1;
                }
                const uint32_t at = slots + left[j] * RING_CHUNK;
                a[j][0] = lds128(at + low), a[j][1] = lds128(at + low + 1024), a[j][2] = lds128(at + high), a[j][3] = lds128(at + high + 1024);
              }
              if (there)
#pragma unroll
                for (int h = 0; h < 2; h++)
#pragma unroll
                  for (int half = 0; half < 2; half++)
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                      const uint4 r = a[j][h * 2], s = a[j][h * 2 + 1];
                      const uint32_t f[4] = {half ? r.z : r.x, half ? s.z : s.x, half ? r.w : r.y, half ? s.w : s.y};
#pragma unroll
                      for (int t = 0; t < NT; t++) E::mma(acc[i + j][t], f, half ? in[b][t][h].z : in[b][t][h].x, half ? in[b][t][h].w : in[b][t][h].y);
                    }
              slot_left(empty + left[0] * 8, a[0][0].w | a[0][1].w | a[0][2].w | a[0][3].w);
              if (two) slot_left(empty + left[1] * 8, a[1][0].w | a[1][1].w | a[1][2].w | a[1][3].w);
            }
          load(b, k0 + b + 2);
        }
    if (first + TOGETHER < mine) load(0, 0), load(1, 1);
    if (first) bar_sync(1, W * 32);                                        // the sums of the tiles before were read
#pragma unroll
    for (int i = 0; i < TOGETHER; i++)
#pragma unroll
      for (int t = 0; t < NT; t++)
        if (i < count)
#pragma unroll
          for (int e = 0; e < 4; e++)
            if (t * 8 + 2 * c + (e & 1) < rows) sums[((i * NT + t) * W + warp) * 128 + (2 * c + (e & 1)) * 16 + g + (e >> 1) * 8] = acc[i][t][e];
    bar_sync(1, W * 32);
#pragma unroll
    for (int part = 0; part < RING_TOGETHER * 128; part += W * 32) {
      const int at = (part + threadIdx.x) >> 7, j = threadIdx.x & 127, i = at / NT, row = at % NT * 8 + (j >> 4);
      const int out = (blockIdx.x + (first + i) * gridDim.x) * 16 + (j & 15);
      if (i < count && row < rows && out < n) {
        float sum = sums[at * W * 128 + j];
#pragma unroll
        for (int v = 1; v < W; v++) sum = __fadd_rn(sum, sums[(at * W + v) * 128 + j]);
        y[(size_t)row * n + out] = sum;
      }
    }
  }
}
#endif

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
