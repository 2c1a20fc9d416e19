// y = x W^T for the few rows of a step, with W in planes (layout.cuh). The target reads all planes that there are, a
// draft the upper one alone. Most matrices of a 4-bit target have that one only.
//
// The mma A operand is a whole code, C = 16 U + L + 8 (upper plane alone: 16 U), an unsigned byte. The inputs are
// 16-bit integers q in two limbs with a scale per group of 64 (`Limbs`), x = xs q and q = 256 high + low. A column of
// operand B is one limb of a row, so the sum of a group is an exact integer, by two matrix instructions for four rows.
// Groups are added in f32:
//
//     y += s/16 xs sum(C q) + (z - s/2) xs sum(q)     (upper plane alone: z xs sum(q))
//
// In this file lane = 4 g + c (ptx.cuh), t is a tile of eight rows, of which half r has rows 4 r + c in columns 2 c
// (high limbs) and 2 c + 1 (low limbs), d one of DEEP groups, and h 0 for output g, 1 for output g + 8.
#pragma once
#include "layout.cuh"
#include "linear.cuh"

constexpr int HALVES = 2;  // of a tile of eight rows

// A lane's share of a group's inputs and half a tile: 16 bytes of operand B, and {scale, scale times sum} of row c.
struct GroupInput {
  uint4 limbs;
  float2 scale;
};

// A lane's codes of a group and output tile.
template <int PLANES>
struct GroupCodes {
  uint4 upper, lower;
  uint2 params;
  // Loads the blocks of both planes, or of the upper one, from shared memory. Returns bits of them (`release_stage`).
  DEV uint32_t load(uint32_t upper_block, uint32_t lower_block, int lane) {
    upper = lds128(upper_block + lane * 16);
    params = lds64(upper_block + UPPER_PARAMS + (lane >> 2) * 8);
    if constexpr (PLANES == 1) return upper.w | params.x;
    lower = lds128(lower_block + lane * 16);
    return upper.w | params.x | lower.w;
  }
  // {s / 16, z - s/2} of output g + 8 h.
  DEV float2 factors(int h) const {
    const float2 p = unpack_half2(h ? params.y : params.x);
    return make_float2(__fmul_rn(p.x, 0.0625f), PLANES == 2 ? __fmaf_rn(p.x, -0.5f, p.y) : p.y);
  }
  // A operand of 32 inputs: words 2 i and 2 i + 1.
  DEV void fragment(uint32_t (&a)[4], int i) const {
    constexpr uint32_t H = HIGH_NIBBLES;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      auto word = [&](const uint4& v) { return i ? (j ? v.w : v.z) : (j ? v.y : v.x); };
      const uint32_t u = word(upper);
      if constexpr (PLANES == 2) {
        const uint32_t l = word(lower);
        a[2 * j] = select_bits(u << 4, l, H);
        a[2 * j + 1] = select_bits(u, l >> 4, H);
      } else {
        a[2 * j] = u << 4 & H;
        a[2 * j + 1] = u & H;
      }
    }
  }
};

// d += codes times inputs of each group of every tile, for the first `halves` halves of every row tile t.
template <int PLANES, int TILES, int GROUPS, int NT>
DEV void group_products(int (&d)[TILES][GROUPS][NT][HALVES][4], const GroupCodes<PLANES> (&codes)[TILES][GROUPS],
                        const GroupInput (&in)[GROUPS][NT][HALVES], int halves) {
#pragma unroll
  for (int word = 0; word < 2; word++)
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
      for (int j = 0; j < GROUPS; j++) {
        uint32_t a[4];
        codes[i][j].fragment(a, word);
#pragma unroll
        for (int t = 0; t < NT; t++)
#pragma unroll
          for (int r = 0; r < HALVES; r++)
            if (2 * t + r < halves) {
              const uint4 b = in[j][t][r].limbs;
              mma_u8s8(d[i][j][t][r], a[0], a[1], a[2], a[3], word ? b.z : b.x, word ? b.w : b.y);
            }
      }
}

// acc[t] {output g of halves 0 and 1, output g + 8 of both} += the products d of one group.
template <int PLANES, int NT>
DEV void group_add(float (&acc)[NT][4], const int (&d)[NT][HALVES][4], const GroupCodes<PLANES>& codes,
                   const GroupInput (&in)[NT][HALVES], int halves) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float2 of = codes.factors(h);
#pragma unroll
    for (int t = 0; t < NT; t++)
#pragma unroll
      for (int r = 0; r < HALVES; r++)
        if (2 * t + r < halves) {
          const float sum = __int2float_rn(d[t][r][2 * h] * 256 + d[t][r][2 * h + 1]);
          acc[t][2 * h + r] = add_group(acc[t][2 * h + r], sum, of.x, in[t][r].scale.x, of.y, in[t][r].scale.y);
        }
  }
}

// Not on Hopper: a group is a block of 16 outputs x 64 inputs of each plane. x: limbs, [row][groups][128]; xs
// [row][groups]; y f32 [row][n].
template <int PLANES, int NT, int DEPTH>
DEV void linear_planes(const uint8_t* __restrict__ upper, const uint8_t* __restrict__ lower, const uint8_t* x,
                       const float2* xs, float* y, int groups, int tiles, int n, int rows) {
  const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  GroupCodes<PLANES> codes[DEPTH];
  xs += (size_t)blockIdx.y * NT * 8 * groups;
  auto load = [&](int i, int tile, int group) {
    const size_t block = (size_t)tile * groups + group;
    codes[i].upper = ldg_stream(upper + block * UPPER_BLOCK + lane * 16);
    codes[i].params = __ldg(reinterpret_cast<const uint2*>(upper + block * UPPER_BLOCK + UPPER_PARAMS + g * 8));
    if (PLANES == 2) codes[i].lower = ldg_stream(lower + block * LOWER_BLOCK + lane * 16);
  };
  auto add = [&](float (&acc)[NT][4], int i, int group, const uint8_t* x, int rows) {
    GroupInput in[1][NT][HALVES];
#pragma unroll
    for (int t = 0; t < NT; t++)
#pragma unroll
      for (int r = 0; r < HALVES; r++) {
        const int first = t * 8 + r * 4, row = first + (g >> 1);
        in[0][t][r] = {make_uint4(0, 0, 0, 0), make_float2(0, 0)};
        const uint8_t* const limbs = x + ((size_t)row * groups + group) * 128 + (g & 1) * 64 + c * 16;
        if (row < rows) in[0][t][r].limbs = ldg_plain(limbs);
        if (first + c < rows) in[0][t][r].scale = __ldcg(xs + (size_t)(first + c) * groups + group);
      }
    int d[1][1][NT][HALVES][4] = {};
    group_products<PLANES, 1, 1, NT>(d, {{codes[i]}}, in, HALVES * NT);
    group_add<PLANES, NT>(acc, d[0][0], codes[i], in[0], HALVES * NT);
  };
  warp_tiles<NT, DEPTH, RowHalves>(x, y, groups, tiles, n, rows, groups * 128, load, add);
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Weights for `fill_weights`. One tile of a stage: BLOCKS blocks of the upper plane, then as many of the lower one.
template <int PLANES, int BLOCKS>
struct PlanePieces {
  static constexpr int PIECE = UPPER_BLOCK + (PLANES == 2 ? LOWER_BLOCK : 0);
  const uint8_t *upper, *lower;
  int groups;
  // `count` groups of a tile, from group k on.
  DEV void copy(uint32_t stage, size_t tile, int k, int count, uint32_t bar, uint64_t policy) const {
    const size_t block = tile * groups + k;
    bulk_copy(stage, upper + block * UPPER_BLOCK, count * UPPER_BLOCK, bar, policy);
    if (PLANES == 2)
      bulk_copy(stage + BLOCKS * UPPER_BLOCK, lower + block * LOWER_BLOCK, count * LOWER_BLOCK, bar, policy);
  }
};

// `Multiply` of `pipelined_gemm`. A warp keeps its 64 DEEP inputs of all rows in registers.
template <int PLANES, class R>
struct MultiplyPlanes {
  static constexpr bool READS_AGAIN = false;
  GroupInput in[R::DEEP][R::NT][HALVES];
  GroupCodes<PLANES> codes[R::TILES][R::DEEP];
  DEV uint32_t take(uint32_t x, int warp, int lane) {
    const int g = lane >> 2, c = lane & 3;
    uint32_t seen = 0;
#pragma unroll
    for (int d = 0; d < R::DEEP; d++)
#pragma unroll
      for (int t = 0; t < R::NT; t++)
#pragma unroll
        for (int r = 0; r < HALVES; r++) {
          const int first = t * 8 + r * 4, piece = d * LINEAR_WARPS + warp;
          const uint32_t scales = x + R::ROWS * R::PITCH + (first + c) * R::SCALES_PITCH;
          in[d][t][r].limbs = lds128(x + (first + (g >> 1)) * R::PITCH + piece * 128 + (g & 1) * 64 + c * 16);
          const uint2 scale = lds64(scales + piece * R::SCALES);
          in[d][t][r].scale = make_float2(__uint_as_float(scale.x), __uint_as_float(scale.y));
          seen |= in[d][t][r].limbs.w | scale.x;
        }
    return seen;
  }
  DEV uint32_t load(uint32_t stage_at, int warp, int lane) {
    uint32_t seen = 0;
#pragma unroll
    for (int i = 0; i < R::TILES; i++)
#pragma unroll
      for (int d = 0; d < R::DEEP; d++) {
        const uint32_t tile = stage_at + i * R::HALF;
        const uint32_t piece = d * LINEAR_WARPS + warp;
        seen |=
            codes[i][d].load(tile + piece * UPPER_BLOCK, tile + R::PIECES * UPPER_BLOCK + piece * LOWER_BLOCK, lane);
      }
    return seen;
  }
  DEV uint32_t add(float (&acc)[R::TOGETHER][R::NT][4], int first, uint32_t, int, int, int left, int rows) const {
    if (rows <= R::ROWS - 4)
      add_halves<2 * R::NT - 1>(acc, first, left);
    else
      add_halves<2 * R::NT>(acc, first, left);
    return 0;
  }
  template <int N>
  DEV void add_halves(float (&acc)[R::TOGETHER][R::NT][4], int first, int left) const {
    int products[R::TILES][R::DEEP][R::NT][HALVES][4] = {};
    group_products<PLANES, R::TILES, R::DEEP, R::NT>(products, codes, in, N);
#pragma unroll
    for (int i = 0; i < R::TILES; i++)
#pragma unroll
      for (int d = 0; d < R::DEEP; d++)
        if (d == 0 || left > d * LINEAR_WARPS)
          group_add<PLANES, R::NT>(acc[first + i], products[i][d], codes[i][d], in[d], N);
  }
};

// In the rows of a stage of x, lanes of a phase read 128 adjacent bytes: no padding is needed.
template <int PLANES, int NT, int TILES, int DEEP, int TOGETHER, int STAGES, int X_STAGES, int CLUSTER, int HAND_OVER>
using PlanePipeline = Pipeline<NT, PlanePieces<PLANES, DEEP * LINEAR_WARPS>::PIECE, TILES, 8, TOGETHER, STAGES,
                               X_STAGES, CLUSTER, HAND_OVER, 0, DEEP, RowHalves>;
#endif
