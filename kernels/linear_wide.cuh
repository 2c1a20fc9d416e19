// GEMM of 17 and more rows on Hopper: y = x W^T by wgmma, 64 outputs x N rows, with the weights in registers
// (operand A).
//
// The bits are those of `linear_quant`, `linear_16` and `linear_planes`: a wgmma with f32 sums has the bits of the
// mma.m16n8k16 with the same operands. Their eight warps are classes here: class w sums groups w, w + 8, ... in order,
// and then the classes are added in order. A cluster of two blocks has one warpgroup per class, so that a block reads
// half of the inputs:
//
//     warps 0-15    multiply: warpgroup j has class 4 rank + j of all tiles of the cluster
//     warps 16-19   load: each fills the stages of one warpgroup, which hold one group of inputs each: x, its
//                   scales, and the weights of the tiles
//
// The running sum of a tile passes from class to class in shared memory: a warpgroup waits for its token (a
// barrier), adds its class and signals the next one. From block 0 to block 1 it goes by st.async; the last
// warpgroup of block 1 stores y.
//
// A group is 128 bytes of each row of x (panel.cuh): 128 inputs of draft weights, 64 of 16-bit weights or planes. x is
// in panels, so that a group of 64 rows is one TMA copy.
//
// In this file lane = 4 g + c (ptx.cuh), j is a warpgroup and N the rows of a block.
#pragma once
#include "hierarchy.cuh"
#include "panel.cuh"

constexpr int WIDE_GROUPS = 4;  // warpgroups of a block that multiply
constexpr int CLASSES = LINEAR_WARPS;
constexpr int WIDE_THREADS = 640;
static_assert(CLASSES == 2 * WIDE_GROUPS, "two blocks have one warpgroup per class");
static_assert(WIDE_THREADS == (WIDE_GROUPS + 1) * 128, "one warpgroup loads");
// Registers per thread: of loading warps, of multiplying warps, and of all at entry.
constexpr int WIDE_KEPT = 32, WIDE_TAKEN = 112, WIDE_ENTRY = 96;
static_assert(WIDE_KEPT + WIDE_GROUPS * WIDE_TAKEN <= (WIDE_GROUPS + 1) * WIDE_ENTRY);

// Weights: those of a group (`DraftGroup`, `Atom`, `PlaneGroup`). N: rows, which are the columns of the wgmma. UNITS:
// of 64 outputs (four tiles) that share a stage of x; one with f32 sums, because a branch would make each wgmma wait
// for the last. STAGES: pipeline stages of a warpgroup.
template <class Weights_, int N_, int UNITS_, int STAGES_>
struct Wide {
  typedef Weights_ Weights;
  static constexpr int N = N_, UNITS = UNITS_, TILES = 4 * UNITS, STAGES = STAGES_;
  static constexpr int ROWS = N < PANEL_ROWS ? PANEL_ROWS : N;  // from one row of blocks to the next
  // A stage: x [N][128 bytes], scales [N] {scale, sum}, weights [TILES][PIECE]; swizzled atoms start at multiples of
  // 1024.
  static constexpr int PIECE = Weights::PIECE;
  static constexpr int SCALES = N * 128;
  static constexpr int WEIGHTS = SCALES + N * Weights::SCALES;
  static constexpr int STAGE = (WEIGHTS + TILES * PIECE + 1023) / 1024 * 1024;
  // Sums as threads hold them: [unit][column of eight rows][thread of the warpgroup] float4.
  static constexpr int SUMS = WIDE_GROUPS * STAGES * STAGE;
  static constexpr int SUM = N / 8 * 128 * 16;  // bytes of a unit's sums
  // Barriers: full and empty of each stage, the token of each warpgroup, and "block 1 has read its sums".
  static constexpr int BARRIERS = SUMS + UNITS * SUM;
  static constexpr int EMPTY = WIDE_GROUPS * STAGES * 8;
  static constexpr int TOKENS = BARRIERS + 2 * EMPTY;
  static constexpr int SUMS_FREE = TOKENS + WIDE_GROUPS * 8;
  static constexpr int BYTES = SUMS_FREE + 8;
  // Number of this cluster's tiles of 16 outputs; consecutive ones are as many tiles apart as there are clusters.
  static DEV int tiles_of_cluster(int tiles) {
    const int cluster = blockIdx.x / 2, clusters = gridDim.x / 2;
    return (tiles - cluster + clusters - 1) / clusters;
  }
};

// The address in block `rank` of the cluster that corresponds to a shared-memory address of this block.
DEV uint32_t at_rank(uint32_t address, uint32_t rank) {
  uint32_t r;
  asm("mapa.shared::cluster.u32 %0,%1,%2;" : "=r"(r) : "r"(address), "r"(rank));
  return r;
}
// Stores 16 bytes in another block's shared memory and counts them at its barrier. `sums` and
// `bar` are results of `at_rank`.
DEV void store_async(uint32_t sums, const float* v, uint32_t bar) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0],{%1,%2,%3,%4},[%5];" ::"r"(sums),
               "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(bar)
               : "memory");
}

#define INTS8(d, i)                                                                                           \
  "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), "+r"(d[i + 4]), "+r"(d[i + 5]), "+r"(d[i + 6]), \
      "+r"(d[i + 7])
#define WGMMA_CODES(N, LIST, P, A, B, ...)                                                                            \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p," P ",0;\nwgmma.mma_async.sync.aligned.m64n" N "k32.s32.u8.s8 {" LIST \
               "},{" A "}," B ",p;\n}"                                                                                \
               : __VA_ARGS__                                                                                          \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate))
// d[64 x N] (+)= A[64 x 32] (registers, as for mma.m16n8k32, 16 rows per warp) B[N x 32]^T (shared memory, K-major);
// accumulate = 0 overwrites d.
DEV void wgmma_codes(int (&d)[32], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b, int accumulate) {
  WGMMA_CODES("64", LIST32, "%37", "%32,%33,%34,%35", "%36", INTS8(d, 0), INTS8(d, 8), INTS8(d, 16), INTS8(d, 24));
}
DEV void wgmma_codes(int (&d)[16], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b, int accumulate) {
  WGMMA_CODES("32", LIST16, "%21", "%16,%17,%18,%19", "%20", INTS8(d, 0), INTS8(d, 8));
}

// One warp loads the stages of a class, pass by pass over TILES tiles: lane i loads the weights of tile i, lane 0 also
// x, and lane 1 its scales or x of the second panel. `base`: shared memory; `rows`: of the block.
template <class S, class Source>
DEV void wide_fill(const Source& w, const uint8_t* x, const uint8_t* xs, uint32_t base, int groups, int tiles,
                   int rows) {
  const int lane = threadIdx.x & 31, j = threadIdx.x >> 5 & 3;
  const int this_class = cluster_rank() * WIDE_GROUPS + j;
  const uint32_t stages_at = base + j * S::STAGES * S::STAGE;
  const uint32_t full = base + S::BARRIERS + j * S::STAGES * 8;
  const uint32_t empty = full + S::EMPTY;
  int tiles_left = this_class < groups ? S::tiles_of_cluster(tiles) : 0;
  int tile = blockIdx.x / 2 + lane * (gridDim.x / 2);  // of this lane
  // Bytes per group of lane 0 and lane 1, and what this lane copies.
  const int first_bytes = panel_height(rows) * 128;
  const int second_bytes =
      S::Weights::SCALES ? panel_height(rows) * S::Weights::SCALES : panel_height(max(0, rows - PANEL_ROWS)) * 128;
  const uint8_t* const input = !lane ? x : S::Weights::SCALES ? xs : x + (size_t)PANEL_ROWS * groups * 128;
  const int bytes = !lane ? first_bytes : lane == 1 ? second_bytes : 0;
  const int place = !lane ? 0 : S::Weights::SCALES ? S::SCALES : PANEL_ROWS * 128;
  const uint64_t once = evict_first();
  const auto load_weights = [&](int stage, int group) {
    const int count = min(S::TILES, tiles_left);
    if (lane == 0) mbar_expect(full + stage * 8, count * S::PIECE + first_bytes + second_bytes);
    __syncwarp();
    if (lane < count)
      w.copy(stages_at + stage * S::STAGE + S::WEIGHTS + lane * S::PIECE, tile, group, 1, full + stage * 8, once);
  };
  const auto load_inputs = [&](int stage, int group) {
    if (bytes) bulk_copy(stages_at + stage * S::STAGE + place, input + (size_t)group * bytes, bytes, full + stage * 8);
  };
  int group = this_class;
  const auto advance = [&]() {
    if ((group += CLASSES) >= groups) {
      group = this_class;
      tiles_left -= S::TILES;
      tile += S::TILES * (gridDim.x / 2);
    }
  };
  // Weights do not depend on the previous kernel: those of all stages are loaded before it ends.
  int early = 0;
#pragma unroll 1
  for (; early < S::STAGES && tiles_left > 0; early++) {
    load_weights(early, group);
    advance();
  }
  grid_wait();
  int input_group = this_class;
#pragma unroll 1
  for (int stage = 0; stage < early; stage++) {
    load_inputs(stage, input_group);
    if ((input_group += CLASSES) >= groups) input_group = this_class;
  }
  int stage = 0, phase = 0;
#pragma unroll 1
  while (tiles_left > 0) {
    mbar_wait(empty + stage * 8, phase);
    load_weights(stage, group);
    load_inputs(stage, group);
    advance();
    if (++stage == S::STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
}

// The inputs of a group in a stage, and who multiplies them.
struct WideInputs {
  uint32_t x;         // [N][128 bytes]
  uint32_t row_sums;  // {scale, sum} of each row
  int lane;
};

// acc += a group: sums of codes times inputs, times both scales, plus zero times the sum of inputs. sum(i): of element
// i; of, of8: {scale, zero} of outputs g and g + 8; row_sums as in WideInputs. Returns `seen` and bits of what was
// loaded.
template <int D, class Sum>
DEV uint32_t add_rows(float (&acc)[D], uint32_t row_sums, int c, float2 of, float2 of8, uint32_t seen, Sum sum) {
#pragma unroll
  for (int j = 0; j < D / 4; j++) {
    const uint4 s = lds128(row_sums + (j * 8 + 2 * c) * 8);
    seen |= s.x;
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float scale = __uint_as_float(e ? s.z : s.x), x_sum = __uint_as_float(e ? s.w : s.y);
      float &y = acc[4 * j + e], &y8 = acc[4 * j + 2 + e];
      y = add_group(y, __int2float_rn(sum(4 * j + e)), of.x, scale, of.y, x_sum);
      y8 = add_group(y8, __int2float_rn(sum(4 * j + 2 + e)), of8.x, scale, of8.y, x_sum);
    }
  }
  return seen;
}

// Draft weights: a lane's codes of 16 outputs and one group, and their scales and zeros.
template <int BITS>
struct DraftGroup {
  static constexpr int PIECE = QUANT_BLOCK<BITS>;
  static constexpr int SCALES = 8;  // bytes per row of x and group
  uint32_t a[4][4];                 // operand A of each wgmma (32 inputs)
  uint2 params;
  // With 4 bits, outputs g + 8 use whole bytes: 16 times the high nibble plus the low one, whose sum `add` subtracts.
  DEV void load(uint32_t block, int lane) {
    uint4 v[BITS / 2];
#pragma unroll
    for (int i = 0; i < BITS / 2; i++) v[i] = lds128(block + (i * 32 + lane) * 16);
    params = lds64(block + QUANT_BLOCK<BITS> - QUANT_PARAMS + (lane >> 2) * 8);
#pragma unroll
    for (int s = 0; s < 4; s++) {
      const uint4 p = v[BITS == 4 ? s / 2 : s];
      const uint32_t q = s & 1 ? p.z : p.x, r = s & 1 ? p.w : p.y;
      a[s][0] = BITS == 4 ? q & LOW_NIBBLES : p.x;
      a[s][1] = BITS == 4 ? q : p.y;
      a[s][2] = BITS == 4 ? r & LOW_NIBBLES : p.z;
      a[s][3] = BITS == 4 ? r : p.w;
    }
    // All registers are written before wgmma_fence: a write between two wgmmas would serialise them.
#pragma unroll
    for (int s = 0; s < 4; s++) asm volatile("" : "+r"(a[s][0]), "+r"(a[s][1]), "+r"(a[s][2]), "+r"(a[s][3])::"memory");
  }
  // Starts d = codes x inputs, for the group whose inputs descriptor `b` points to.
  template <int D>
  DEV void multiply(int (&d)[D], uint64_t b) const {
#pragma unroll
    for (int s = 0; s < 4; s++) wgmma_codes(d, a[s][0], a[s][1], a[s][2], a[s][3], b + 2 * s, s > 0);
    wgmma_commit();
  }
  // acc += the group. Returns bits of all that was loaded (`release_stage`).
  template <int D>
  DEV uint32_t add(float (&acc)[D], const int (&d)[D], uint32_t row_sums, int c) const {
    const float2 low = unpack_half2(params.x);
    float2 high = unpack_half2(params.y);
    if (BITS == 4) high.x *= 0.0625f;
    auto sum = [&](int i) { return BITS == 4 && (i & 2) ? d[i] - d[i - 2] : d[i]; };
    return add_rows(acc, row_sums, c, low, high, params.x, sum);
  }
  // acc += `block` (in shared memory) x the inputs. Returns bits of what was loaded.
  template <int D>
  static DEV uint32_t multiply_add(float (&acc)[D], uint32_t block, const WideInputs& in) {
    DraftGroup codes;
    int d[D];
    codes.load(block, in.lane);
    wgmma_fence();
    codes.multiply(d, desc_kmajor(in.x));
    wgmma_wait<0>();
    return codes.add(acc, d, in.row_sums, in.lane & 3);
  }
};

// 16-bit weights: an atom (linear.cuh).
template <class T>
struct Atom {
  static constexpr int PIECE = 2048;
  static constexpr int SCALES = 0;
  // As `DraftGroup::multiply_add`. The four wgmmas have the operands of the mmas of `linear_16`, in its order.
  template <int D>
  static DEV uint32_t multiply_add(float (&acc)[D], uint32_t atom, const WideInputs& in) {
    const int g = in.lane >> 2, c = in.lane & 3;
    const uint32_t low = atom + (g * 8 + (c ^ g)) * 16;
    const uint32_t high = atom + (g * 8 + ((c + 4) ^ g)) * 16;
    // Registers suffice for a whole group only with few rows.
    constexpr int PARTS = D > 32 ? 2 : 1, STEPS = 4 / PARTS;
    uint32_t seen = 0;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      uint32_t a[STEPS][4];
#pragma unroll
      for (int s = 0; s < STEPS; s += 2) {
        const uint32_t piece = part * STEPS + s ? high : low;
        const uint4 v = lds128(piece), v8 = lds128(piece + 1024);  // outputs g and g + 8
        seen |= v.w | v8.w;
        const uint32_t first[4] = {v.x, v8.x, v.y, v8.y}, second[4] = {v.z, v8.z, v.w, v8.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
          a[s][i] = first[i];
          a[s + 1][i] = second[i];
        }
      }
#pragma unroll
      for (int s = 0; s < STEPS; s++)  // as in `DraftGroup::load`
        asm volatile("" : "+r"(a[s][0]), "+r"(a[s][1]), "+r"(a[s][2]), "+r"(a[s][3])::"memory");
      const uint64_t b = desc_kmajor(in.x) + 2 * part * STEPS;
      wgmma_fence();
#pragma unroll
      for (int s = 0; s < STEPS; s++) Wgmma<T>::registers(acc, a[s], b + 2 * s);
      wgmma_commit();
      wgmma_wait<0>();
    }
    return seen;
  }
};

// Weights in planes, with x in limbs (hierarchy.cuh).
template <int PLANES>
struct PlaneGroup {
  static constexpr int PIECE = PlanePieces<PLANES, 1>::PIECE;
  static constexpr int SCALES = 8;
  // As `DraftGroup::multiply_add`. Sums of high limbs are shifted before those of low limbs are added, because
  // registers suffice for one sum only.
  template <int D>
  static DEV uint32_t multiply_add(float (&acc)[D], uint32_t block, const WideInputs& in) {
    const int lane = in.lane;
    GroupCodes<PLANES> codes;
    codes.load(block, block + UPPER_BLOCK, lane);
    uint32_t a[2][4];
    int d[D];
#pragma unroll
    for (int s = 0; s < 2; s++) {
      codes.fragment(a[s], s);
      asm volatile("" : "+r"(a[s][0]), "+r"(a[s][1]), "+r"(a[s][2]), "+r"(a[s][3])::"memory");
    }
    const uint64_t b = desc_kmajor(in.x);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < 2; s++) wgmma_codes(d, a[s][0], a[s][1], a[s][2], a[s][3], b + 2 * s, s > 0);
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int e = 0; e < D; e++) d[e] *= 256;
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < 2; s++) wgmma_codes(d, a[s][0], a[s][1], a[s][2], a[s][3], b + 4 + 2 * s, 1);
    wgmma_commit();
    const float2 of = codes.factors(0), of8 = codes.factors(1);
    wgmma_wait<0>();
    return add_rows(acc, in.row_sums, lane & 3, of, of8, codes.params.x, [&](int i) { return d[i]; });
  }
};

// Stores a thread's sums [unit][element] of the pass that begins at tile `first` of the cluster, of which `tiles_left`
// exist: y [rows][n].
template <class S>
DEV void store_units(const float (&acc)[S::UNITS][S::N / 2], float* y, int first, int tiles_left, int n, int rows,
                     int warp, int g, int c) {
#pragma unroll
  for (int i = 0; i < S::UNITS; i++) {
    const int tile = 4 * i + (warp & 3);
    const int out = (blockIdx.x / 2 + (first + tile) * (gridDim.x / 2)) * 16 + g;
    const int end = tile < tiles_left ? n : 0;
    const int rows_left = rows - 2 * c;
    float* row = y + (size_t)(2 * c) * n + out;
#pragma unroll
    for (int e = 0; e < S::N / 2; e += 4, row += 8 * (size_t)n) {
      if (2 * e < rows_left && out < end) row[0] = acc[i][e];
      if (2 * e < rows_left && out + 8 < end) row[8] = acc[i][e + 2];
      if (2 * e + 1 < rows_left && out < end) row[n] = acc[i][e + 1];
      if (2 * e + 1 < rows_left && out + 8 < end) row[n + 8] = acc[i][e + 3];
    }
  }
}

// acc += the running sum of the classes before, of which a thread's part begins at `sums`. Returns bits of it
// (`release_stage`).
template <class S>
DEV uint32_t add_running_sum(float (&acc)[S::UNITS][S::N / 2], uint32_t sums) {
  uint32_t seen = 0;
#pragma unroll
  for (int i = 0; i < S::UNITS * S::N / 8; i++) {
    const uint4 s = lds128(sums + i * 128 * 16);
    float* const sum = acc[i / (S::N / 8)] + i % (S::N / 8) * 4;
    seen |= s.x;
    sum[0] = __fadd_rn(__uint_as_float(s.x), sum[0]);
    sum[1] = __fadd_rn(__uint_as_float(s.y), sum[1]);
    sum[2] = __fadd_rn(__uint_as_float(s.z), sum[2]);
    sum[3] = __fadd_rn(__uint_as_float(s.w), sum[3]);
  }
  return seen;
}

// Stores the running sum for the next warpgroup of this block.
template <class S>
DEV void store_running_sum(const float (&acc)[S::UNITS][S::N / 2], uint32_t sums) {
#pragma unroll
  for (int i = 0; i < S::UNITS * S::N / 8; i++) {
    const float* const sum = acc[i / (S::N / 8)] + i % (S::N / 8) * 4;
    sts128(sums + i * 128 * 16, make_uint4(__float_as_uint(sum[0]), __float_as_uint(sum[1]), __float_as_uint(sum[2]),
                                           __float_as_uint(sum[3])));
  }
}

// Sends the running sum from block 0 to block 1. The stores complete the token of the first warpgroup there.
template <class S>
DEV void send_running_sum(const float (&acc)[S::UNITS][S::N / 2], uint32_t sums, uint32_t token) {
  const uint32_t next_sums = at_rank(sums, 1), next_token = at_rank(token, 1);
#pragma unroll
  for (int i = 0; i < S::UNITS * S::N / 8; i++)
    store_async(next_sums + i * 128 * 16, acc[i / (S::N / 8)] + i % (S::N / 8) * 4, next_token);
}

// One warpgroup: multiplies its class, adds it to the running sum of the classes before; the
// last class stores y [rows][n].
template <class S>
DEV void wide_multiply(float* y, uint32_t base, int groups, int tiles, int n, int rows) {
  // Shuffled, so that the compiler treats it as uniform in the warp: otherwise it makes each wgmma wait for the last.
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int lane = threadIdx.x & 31;
  const int g = lane >> 2;
  const int c = lane & 3;
  const int j = warp >> 2;
  const int this_class = cluster_rank() * WIDE_GROUPS + j;
  const uint32_t stages_at = base + j * S::STAGES * S::STAGE;
  const uint32_t full = base + S::BARRIERS + j * S::STAGES * 8;
  const uint32_t empty = full + S::EMPTY;
  const uint32_t tokens = base + S::TOKENS;
  const uint32_t sums_free = base + S::SUMS_FREE;
  const uint32_t sums = base + S::SUMS + (threadIdx.x & 127) * 16;
  const int own_tiles = S::tiles_of_cluster(tiles);
  int stage = 0, phase = 0, pass = 0;
#pragma unroll 1
  for (int first = 0; first < own_tiles; first += S::TILES, pass ^= 1) {
    // ---- multiply ----
    const int tiles_left = own_tiles - first;  // one per warp and unit; the results of further ones are not stored
    float acc[S::UNITS][S::N / 2];
#pragma unroll
    for (int i = 0; i < S::UNITS; i++)
#pragma unroll
      for (int e = 0; e < S::N / 2; e++) acc[i][e] = 0;
#pragma unroll 1
    for (int group = this_class; group < groups; group += CLASSES) {
      const uint32_t stage_at = stages_at + stage * S::STAGE, block = stage_at + S::WEIGHTS + (warp & 3) * S::PIECE;
      const WideInputs inputs = {stage_at, stage_at + S::SCALES, lane};
      mbar_wait(full + stage * 8, phase);
      uint32_t seen = 0;
#pragma unroll
      for (int i = 0; i < S::UNITS; i++)
        if (!i || 4 * i < tiles_left) seen |= S::Weights::multiply_add(acc[i], block + i * 4 * S::PIECE, inputs);
      release_stage(empty + stage * 8, seen);
      if (++stage == S::STAGES) {
        stage = 0;
        phase ^= 1;
      }
    }
    // ---- wait for the token: the sum of the classes before ----
    if (first > 0 || this_class > 0) {
      if (this_class == WIDE_GROUPS && (threadIdx.x & 127) == 0) mbar_expect(tokens, S::UNITS * S::SUM);
      mbar_wait(tokens + j * 8, this_class > 0 ? pass : pass ^ 1);  // class 0 waits for class 3 of the previous pass
    }
    uint32_t seen = 0;
    if (this_class > 0) seen = add_running_sum<S>(acc, sums);
    // ---- the last class stores y ----
    if (this_class == CLASSES - 1) {
      store_units<S>(acc, y, first, tiles_left, n, rows, warp, g, c);
      // After the last pass block 0 may have exited.
      if (first + S::TILES < own_tiles) {
        seen = __reduce_or_sync(~0u, seen);
        if (lane == 0) mbar_arrive_at(sums_free + (seen & (gridDim.z - 1)), 0);
      }
      continue;
    }
    // ---- other classes pass the sum and the token on ----
    if (this_class == WIDE_GROUPS - 1) {
      mbar_wait(sums_free, pass ^ 1);
      send_running_sum<S>(acc, sums, tokens);
    } else {
      store_running_sum<S>(acc, sums);
    }
    mbar_arrive(tokens + (j + 1) % WIDE_GROUPS * 8);
  }
}

// w: where `copy` finds a tile's groups; x and xs in panels, xs null without scales; y f32 [rows][n]. groups: of 128
// bytes of a row of x; tiles: of 16 outputs.
template <class S, class Source>
DEV void wide_gemm(const Source& w, const uint8_t* x, const uint8_t* xs, float* y, int groups, int tiles, int n,
                   int rows) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = shared_address(shared);
  grid_trigger();
  if (threadIdx.x == 0) {
    mbar_init_stages(base + S::BARRIERS, base + S::BARRIERS + S::EMPTY, WIDE_GROUPS * S::STAGES, 128);
    for (int j = 0; j < WIDE_GROUPS; j++) mbar_init(base + S::TOKENS + j * 8, cluster_rank() && j == 0 ? 1 : 128);
    mbar_init(base + S::SUMS_FREE, 4);
    mbar_init_done();
  }
  __syncthreads();
  cluster_arrive_relaxed();
  const size_t first_row = blockIdx.y * S::ROWS;  // of this block
  rows = min(rows - (int)first_row, S::ROWS);
  if (threadIdx.x >= WIDE_GROUPS * 128) {
    registers_give<WIDE_KEPT>();
    wide_fill<S>(w, x + first_row * groups * 128, xs + first_row * groups * S::Weights::SCALES, base, groups, tiles,
                 rows);
    __syncwarp();
    cluster_wait();
  } else {
    registers_take<WIDE_TAKEN>();
    cluster_wait();  // the other block has initialised its barriers
    grid_wait();     // the previous kernel may read y
    wide_multiply<S>(y + first_row * n, base, groups, tiles, n, rows);
  }
}
