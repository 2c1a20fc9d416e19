// y = x W^T for the few rows of a step, with W in planes (layout.cuh). The target reads all planes that there are, a
// draft the upper one alone. Most matrices of a 4-bit target have that one only.
//
// The mma A operand is a whole code, C = 16 U + L + 8 (upper plane alone: 16 U), as the integer in the low bits of a
// 16-bit float: C 2^-24 in f16, C 2^-133 in bfloat16, both exact (subnormal or nearly so). So unpacking needs masks and
// byte selects only. bfloat16 inputs are multiplied by 2^64 to keep products normal. The tensor core sums a group from
// zero; groups are added in f32:
//
//     y += s/16 sum(C x) + (z - s/2) sum(x)     (upper plane alone: z sum(x))
//
// In this file lane = 4 g + c (ptx.cuh), t is a tile of eight rows, d one of DEEP groups, e an element of an
// accumulator, and h 0 for output g, 1 for output g + 8.
#pragma once
#include "layout.cuh"
#include "linear.cuh"

// How a 16-bit type multiplies codes. A sum of codes times inputs, as the tensor core returns it, lacks a power of two:
// TIMES is that factor divided by 16. OF_X is the factor that a sum of inputs lacks. ONES: a pair of 1.0.
struct CodesBf16 : MmaBf16 {
  typedef Bf16 Type;
  static constexpr uint32_t ONES = 0x3f803f80;
  static constexpr float TIMES = 0x1p65f, OF_X = 0x1p-64f;  // 133 - 64 - 4 = 65
};
struct CodesHalf : MmaHalf {
  typedef Half Type;
  static constexpr uint32_t ONES = 0x3c003c00;
  static constexpr float TIMES = 0x1p20f, OF_X = 1.f;  // 24 - 4 = 20
};

// A lane's 16 inputs of a group and row tile, and the sums of all 64 inputs of rows 2c and 2c + 1.
template <class E>
struct GroupInput {
  uint32_t pairs[8];
  float sum[2];
  DEV void set(uint4 low, uint4 high) {
    const uint32_t raw[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    const uint32_t ones[4] = {E::ONES, E::ONES, E::ONES, E::ONES};
    float sums[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 8; i++) pairs[i] = E::Type::for_codes(raw[i]);
#pragma unroll
    for (int i = 0; i < 8; i += 2) E::mma(sums, ones, pairs[i], pairs[i + 1]);
    sum[0] = sums[0] * E::OF_X;
    sum[1] = sums[1] * E::OF_X;
  }
};

// A lane's codes of a group and output tile.
template <int PLANES>
struct GroupCodes {
  uint4 upper, lower;
  uint2 params;
  // Factors of sum(C x), as the tensor core returns it, and of sum(x). p: scale and zero of an output.
  template <class E>
  static DEV float2 factors(float2 p) {
    return make_float2(__fmul_rn(p.x, E::TIMES), PLANES == 2 ? __fmaf_rn(p.x, -0.5f, p.y) : p.y);
  }
  // A operand of word i.
  DEV void fragment(uint32_t (&a)[4], int i) const {
    auto word = [i](const uint4& v) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; };
    constexpr uint32_t H = HIGH_NIBBLES;
    const uint32_t u = word(upper);
    uint32_t out = u << 4 & H, out8 = u & H;  // bytes C of outputs g and g + 8
    if constexpr (PLANES == 2) {
      const uint32_t l = word(lower);
      out = select_bits(u << 4, l, H);
      out8 = select_bits(u, l >> 4, H);
    }
    // Bytes become the low halves of 16-bit numbers.
    a[0] = __byte_perm(out, 0, 0x4140);
    a[1] = __byte_perm(out8, 0, 0x4140);
    a[2] = __byte_perm(out, 0, 0x4342);
    a[3] = __byte_perm(out8, 0, 0x4342);
  }
};

// d += codes times inputs of each group of every tile, for every row tile t. Matrix instructions of different groups
// alternate, because those of one group wait for each other.
template <class E, int PLANES, int TILES, int GROUPS, int NT>
DEV void group_products(float (&d)[TILES][GROUPS][NT][4], const GroupCodes<PLANES> (&codes)[TILES][GROUPS],
                        const GroupInput<E> (&in)[GROUPS][NT]) {
#pragma unroll
  for (int word = 0; word < 4; word++)
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
      for (int j = 0; j < GROUPS; j++) {
        uint32_t a[4];
        codes[i][j].fragment(a, word);
#pragma unroll
        for (int t = 0; t < NT; t++) E::mma(d[i][j][t], a, in[j][t].pairs[2 * word], in[j][t].pairs[2 * word + 1]);
      }
}

// acc[t] += the products d of one group.
template <class E, int PLANES, int NT>
DEV void group_add(float (&acc)[NT][4], const float (&d)[NT][4], const GroupCodes<PLANES>& codes,
                   const GroupInput<E> (&in)[NT]) {
  const float2 p[2] = {unpack_half2(codes.params.x), unpack_half2(codes.params.y)};
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float2 of = GroupCodes<PLANES>::template factors<E>(p[h]);
#pragma unroll
    for (int t = 0; t < NT; t++)
#pragma unroll
      for (int e = 0; e < 2; e++)
        acc[t][2 * h + e] = __fmaf_rn(d[t][2 * h + e], of.x, __fmaf_rn(of.y, in[t].sum[e], acc[t][2 * h + e]));
  }
}

// Not on Hopper: a group is a block of 16 outputs x 64 inputs of each plane. x 16-bit [row][pitch], y f32 [row][n];
// stride: blocks per tile in memory.
template <class E, int PLANES, int NT, int DEPTH>
DEV void linear_planes(const uint8_t* __restrict__ upper, const uint8_t* __restrict__ lower, const uint16_t* x,
                       float* y, int groups, int stride, int tiles, int n, int rows, int pitch) {
  const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  GroupCodes<PLANES> codes[DEPTH];
  auto load = [&](int i, int tile, int group) {
    const size_t block = (size_t)tile * stride + group;
    codes[i].upper = ldg_stream(upper + block * UPPER_BLOCK + lane * 16);
    codes[i].params = __ldg(reinterpret_cast<const uint2*>(upper + block * UPPER_BLOCK + UPPER_PARAMS + g * 8));
    if (PLANES == 2) codes[i].lower = ldg_stream(lower + block * LOWER_BLOCK + lane * 16);
  };
  auto add = [&](float (&acc)[NT][4], int i, const uint16_t* inputs, int rows) {
    GroupInput<E> in[1][NT];
#pragma unroll
    for (int t = 0; t < NT; t++) {
      uint4 low = make_uint4(0, 0, 0, 0), high = low;
      const uint16_t* row = inputs + (size_t)(t * 8 + g) * pitch + c * 16;
      if (t * 8 + g < rows) {
        low = ldg_plain(row);
        high = ldg_plain(row + 8);
      }
      in[0][t].set(low, high);
    }
    float d[1][1][NT][4] = {};
    group_products<E, PLANES, 1, 1, NT>(d, {{codes[i]}}, in);
    group_add<E, PLANES, NT>(acc, d[0][0], codes[i], in[0]);
  };
  warp_tiles<NT, DEPTH>(x, y, groups, 64, tiles, n, rows, pitch, load, add);
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Weights for `fill_weights`. One tile of a stage: BLOCKS blocks of the upper plane, then as many of the lower one.
template <int PLANES, int BLOCKS>
struct PlanePieces {
  static constexpr int PIECE = UPPER_BLOCK + (PLANES == 2 ? LOWER_BLOCK : 0);
  const uint8_t *upper, *lower;
  int stride;
  // `count` groups of a tile, from group k on.
  DEV void copy(uint32_t stage, size_t tile, int k, int count, uint32_t bar, uint64_t policy) const {
    const size_t block = tile * stride + k;
    bulk_copy(stage, upper + block * UPPER_BLOCK, count * UPPER_BLOCK, bar, policy);
    if (PLANES == 2)
      bulk_copy(stage + BLOCKS * UPPER_BLOCK, lower + block * LOWER_BLOCK, count * LOWER_BLOCK, bar, policy);
  }
};

// `Multiply` of `pipelined_gemm`. A warp keeps its 64 DEEP inputs of all rows in registers.
template <class E, int PLANES, class R>
struct MultiplyPlanes {
  static constexpr bool READS_AGAIN = false;
  GroupInput<E> in[R::DEEP][R::NT];
  GroupCodes<PLANES> codes[R::TILES][R::DEEP];
  DEV uint32_t take(uint32_t x, int warp, int lane) {
    uint32_t seen = 0;
#pragma unroll
    for (int d = 0; d < R::DEEP; d++)
#pragma unroll
      for (int t = 0; t < R::NT; t++) {
        const uint32_t row = x + (t * 8 + (lane >> 2)) * R::PITCH + (d * LINEAR_WARPS + warp) * 128 + (lane & 3) * 32;
        const uint4 low = lds128(row), high = lds128(row + 16);
        in[d][t].set(low, high);
        seen |= low.w | high.w;
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
        const uint32_t block = tile + piece * UPPER_BLOCK;
        GroupCodes<PLANES>& group = codes[i][d];
        group.upper = lds128(block + lane * 16);
        group.params = lds64(block + UPPER_PARAMS + (lane >> 2) * 8);
        seen |= group.upper.w | group.params.x;
        if (PLANES == 2) {
          group.lower = lds128(tile + R::PIECES * UPPER_BLOCK + piece * LOWER_BLOCK + lane * 16);
          seen |= group.lower.w;
        }
      }
    return seen;
  }
  DEV uint32_t add(float (&acc)[R::TOGETHER][R::NT][4], int first, uint32_t, int, int, int left) const {
    float products[R::TILES][R::DEEP][R::NT][4] = {};
    group_products<E, PLANES, R::TILES, R::DEEP, R::NT>(products, codes, in);
#pragma unroll
    for (int i = 0; i < R::TILES; i++)
#pragma unroll
      for (int d = 0; d < R::DEEP; d++)
        if (d == 0 || left > d * LINEAR_WARPS)
          group_add<E, PLANES, R::NT>(acc[first + i], products[i][d], codes[i][d], in[d]);
    return 0;
  }
};

// Rows of x are 16 bytes apart modulo 128, so that 32-byte loads of four lanes and two rows have no bank conflicts.
template <int PLANES, int NT, int TILES, int DEEP, int TOGETHER, int STAGES, int X_STAGES, int CLUSTER, bool HAND_OVER>
using PlanePipeline = Pipeline<NT, PlanePieces<PLANES, DEEP * LINEAR_WARPS>::PIECE, TILES, 0, TOGETHER, STAGES,
                               X_STAGES, CLUSTER, HAND_OVER, 16, DEEP>;
#endif
