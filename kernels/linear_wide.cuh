// Draft weights times 17 and more rows on Hopper: y = x W^T by integer wgmma, 64 outputs x N rows, with the codes in registers (operand A).
//
// The bits are those of `linear_quant`: the inputs are split into eight classes (class v: groups v, v + 8, ... of 128), each is summed in order, and then the
// classes are, in order.
//
//   warps 0-15    four warpgroups that multiply, each its tile of 64 outputs by the classes of its part
//   warps 16-19   producers: each fills a ring of stages {x, scales, weights of the tiles} of one group, which all warpgroups of a part read
//
// PARTS 1: four tiles, each by one warpgroup. PARTS 2: two tiles, each by two warpgroups. PARTS 8, for few outputs: one tile by the eight warpgroups of a cluster
// of two blocks, so that a block reads half of the inputs. Parts take classes in turn. The sum of a tile goes from part to part in shared memory as classes end:
// who has the token adds.
//
// Inputs lie in panels (`panel_code`), ready for wgmma: one bulk copy a group.
#pragma once
#include "linear.cuh"
#include "panel.cuh"

constexpr int WIDE_GROUPS = 4, WIDE_THREADS = (WIDE_GROUPS + 1) * 128, CLASSES = LINEAR_WARPS;
// Registers of a thread that copies, of one that multiplies, and what all begin with.
constexpr int WIDE_KEPT = 32, WIDE_TAKEN = 112, WIDE_ENTRY = 96;
static_assert(WIDE_KEPT + WIDE_GROUPS * WIDE_TAKEN <= (WIDE_GROUPS + 1) * WIDE_ENTRY);

// Bits of a code, rows (columns of the matrix instruction), parts that share the inputs of a tile, stages of a ring.
template <int BITS_, int N_, int PARTS_, int STAGES_>
struct Wide {
  static constexpr int BITS = BITS_, N = N_, PARTS = PARTS_, STAGES = STAGES_;
  static constexpr bool PAIRED = PARTS > WIDE_GROUPS;                       // over the two blocks of a cluster
  static constexpr int RINGS = PAIRED ? WIDE_GROUPS : PARTS, UNITS = WIDE_GROUPS / RINGS, TILES = 4 * UNITS;
  // A stage: x [N][128 bytes], scales [N] {scale, sum}, weights [TILES][PIECE]; swizzled atoms lie at multiples of 1024.
  static constexpr int PIECE = QUANT_BLOCK<BITS>, SCALES = N * 128, WEIGHTS = SCALES + N * 8, STAGE = (WEIGHTS + TILES * PIECE + 1023) / 1024 * 1024;
  // Sums of a tile as threads hold them: [column of eight rows][thread of the warpgroup] float4.
  static constexpr int SUM = N / 8 * 128 * 16, SUMS = RINGS * STAGES * STAGE;
  // Barriers: full and empty of each ring, a token of each warpgroup, and the other block's sums free.
  static constexpr int BARRIERS = SUMS + UNITS * SUM, BYTES = BARRIERS + (2 * RINGS * STAGES + WIDE_GROUPS + 1) * 8;
  static_assert(TILES <= 32 && BYTES <= 227 * 1024);
};

DEV uint32_t at_rank(uint32_t address, uint32_t rank) {
  uint32_t r;
  asm("mapa.shared::cluster.u32 %0,%1,%2;" : "=r"(r) : "r"(address), "r"(rank));
  return r;
}
// 16 bytes to another block's shared memory, which its barrier counts. Both addresses as of `at_rank`.
DEV void store_async(uint32_t to, const float* v, uint32_t bar) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0],{%1,%2,%3,%4},[%5];" ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]),
               "r"(bar)
               : "memory");
}

#define INTS8(d, i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), "+r"(d[i + 4]), "+r"(d[i + 5]), "+r"(d[i + 6]), "+r"(d[i + 7])
#define WGMMA_CODES(N, LIST, P, A, B, ...)                                                                                   \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p," P ",0;\nwgmma.mma_async.sync.aligned.m64n" N "k32.s32.u8.s8 {" LIST \
               "},{" A "}," B ",p;\n}"                                                                               \
               : __VA_ARGS__                                                                                         \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate))
// d[64 x N] (+)= A[64 x 32] (registers, as mma.m16n8k32, 16 rows a warp) B[N x 32]^T (shared memory, K-major).
DEV void wgmma_codes(int (&d)[32], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b, int accumulate) {
  WGMMA_CODES("64", LIST32, "%37", "%32,%33,%34,%35", "%36", INTS8(d, 0), INTS8(d, 8), INTS8(d, 16), INTS8(d, 24));
}
DEV void wgmma_codes(int (&d)[16], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b, int accumulate) {
  WGMMA_CODES("32", LIST16, "%21", "%16,%17,%18,%19", "%20", INTS8(d, 0), INTS8(d, 8));
}

// One warp fills a ring: over the groups of classes `part`, part + PARTS, ..., again for every TILES tiles.
template <class S>
DEV void wide_fill(const uint8_t* w, const uint8_t* x, const uint8_t* xs, uint32_t ring, uint32_t full, uint32_t empty, int part, int groups, int owner, int owners,
                   int mine, int height) {
  const int lane = threadIdx.x & 31;
  const uint64_t once = evict_first();
  int first = 0, v = part, group = part;
  const auto advance = [&]() {
    if ((group += CLASSES) < groups) return;
    v += S::PARTS;
    if (v >= CLASSES || v >= groups) v = part, first += S::TILES;
    group = v;
  };
  const auto weights = [&](int slot) {
    const int tiles = min(S::TILES, mine - first);
    if (lane == 0) mbar_expect(full + slot * 8, tiles * S::PIECE + height * 136);
    __syncwarp();
    if (lane < tiles)
      bulk_copy(ring + slot * S::STAGE + S::WEIGHTS + lane * S::PIECE, w + ((size_t)(owner + (first + lane) * owners) * groups + group) * S::PIECE, S::PIECE,
                full + slot * 8, once);
  };
  const auto inputs = [&](int slot, int of) {
    const uint32_t to = ring + slot * S::STAGE;
    if (lane == 0) bulk_copy(to, x + (size_t)of * height * 128, height * 128, full + slot * 8);
    if (lane == 1) bulk_copy(to + S::SCALES, xs + (size_t)of * height * 8, height * 8, full + slot * 8);
  };
  if (part >= groups) first = mine;
  // Weights do not depend on the kernel before: as many stages as there are get theirs at once.
  int of = 0;                                                               // lane i: the group of stage i
  int early = 0;
#pragma unroll 1
  for (; early < S::STAGES && first < mine; early++) {
    weights(early);
    if (lane == early) of = group;
    advance();
  }
  grid_wait();
#pragma unroll 1
  for (int slot = 0; slot < early; slot++) inputs(slot, __shfl_sync(~0u, of, slot));
  int slot = 0, phase = 0;
#pragma unroll 1
  while (first < mine) {
    mbar_wait(empty + slot * 8, phase);
    weights(slot), inputs(slot, group);
    advance();
    if (++slot == S::STAGES) slot = 0, phase ^= 1;
  }
}

// Codes of 16 outputs and a group as lanes hold them, and their parameters.
template <int BITS>
struct WideCodes {
  uint32_t a[4][4];                                                         // operand A of each 32 inputs
  uint2 params;
  // Of four bits the rows g + 8 take whole bytes: 16 times the high nibbles and the low ones.
  DEV void load(uint32_t block, int lane) {
    uint4 v[BITS / 2];
#pragma unroll
    for (int i = 0; i < BITS / 2; i++) v[i] = lds128(block + (i * 32 + lane) * 16);
    params = lds64(block + QUANT_BLOCK<BITS> - 64 + (lane >> 2) * 8);
#pragma unroll
    for (int s = 0; s < 4; s++) {
      const uint4 p = v[BITS == 4 ? s / 2 : s];
      const uint32_t q = s & 1 ? p.z : p.x, r = s & 1 ? p.w : p.y;
      a[s][0] = BITS == 4 ? q & 0x0f0f0f0f : p.x, a[s][1] = BITS == 4 ? q : p.y, a[s][2] = BITS == 4 ? r & 0x0f0f0f0f : p.z, a[s][3] = BITS == 4 ? r : p.w;
    }
    // wgmma reads the registers later: they are written here, not where the compiler would.
#pragma unroll
    for (int s = 0; s < 4; s++) asm volatile("" : "+r"(a[s][0]), "+r"(a[s][1]), "+r"(a[s][2]), "+r"(a[s][3])::"memory");
  }
  // Starts the products with the group's inputs at `b`.
  template <int D>
  DEV void multiply(int (&d)[D], uint64_t b) const {
#pragma unroll
    for (int s = 0; s < 4; s++) wgmma_codes(d, a[s][0], a[s][1], a[s][2], a[s][3], b + 2 * s, s > 0);
    wgmma_commit();
  }
  // acc += what the sums of a group stand for.
  template <int D>
  DEV uint32_t add(float (&acc)[D], const int (&d)[D], uint32_t scales, int c) const {
    constexpr int ONE_AND_A_HALF = 0x4b400000;                              // 1.5 * 2^23: read as a float the sum is exact
    const float2 low = unpack_half2(params.x), high = unpack_half2(params.y);
    const float upper_scale = BITS == 4 ? high.x * 0.0625f : high.x;
    uint32_t seen = params.x;
#pragma unroll
    for (int j = 0; j < D / 4; j++) {
      const uint4 s = lds128(scales + (j * 8 + 2 * c) * 8);
      seen |= s.x;
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float scale = __uint_as_float(e ? s.z : s.x), sum = __uint_as_float(e ? s.w : s.y);
        const int lower = d[4 * j + e], upper = BITS == 4 ? d[4 * j + 2 + e] - lower : d[4 * j + 2 + e];
        float &to = acc[4 * j + e], &to8 = acc[4 * j + 2 + e];
        to = __fmaf_rn(__fadd_rn(__int_as_float(lower + ONE_AND_A_HALF), -12582912.f), __fmul_rn(low.x, scale), __fmaf_rn(low.y, sum, to));
        to8 = __fmaf_rn(__fadd_rn(__int_as_float(upper + ONE_AND_A_HALF), -12582912.f), __fmul_rn(upper_scale, scale), __fmaf_rn(high.y, sum, to8));
      }
    }
    return seen;
  }
};

template <class S>
DEV void wide_product(const uint8_t* w, const uint8_t* x, const uint8_t* xs, float* y, int groups, int tiles, int n, int rows) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  const int rank = S::PAIRED ? (int)cluster_rank() : 0, owner = S::PAIRED ? blockIdx.x / 2 : blockIdx.x, owners = S::PAIRED ? gridDim.x / 2 : gridDim.x;
  const int mine = max(0, (tiles - owner + owners - 1) / owners);           // tiles of 16 outputs, `owners` apart
  const uint32_t base = shared_address(shared), full = base + S::BARRIERS, empty = full + S::RINGS * S::STAGES * 8, tokens = empty + S::RINGS * S::STAGES * 8,
                 sent_for = tokens + WIDE_GROUPS * 8;
  grid_trigger();
  if (threadIdx.x == 0) {
    mbar_init_ring(full, empty, S::RINGS * S::STAGES, S::UNITS * 128);
    for (int i = 0; i < WIDE_GROUPS; i++) mbar_init(tokens + i * 8, rank && i == 0 ? 1 : 128);
    mbar_init(sent_for, 4);
    mbar_init_done();
  }
  __syncthreads();
  if (S::PAIRED) cluster_arrive_relaxed();
  const int above = blockIdx.y * PANEL_ROWS;                                // rows of other panels
  rows = min(rows - above, PANEL_ROWS), x += (size_t)above * groups * 128, xs += (size_t)above * groups * 8, y += (size_t)above * n;
  if (warp >= WIDE_GROUPS * 4) {
    // ---- copy ----
    registers_give<WIDE_KEPT>();
    const int j = warp - WIDE_GROUPS * 4;
    if (j < S::RINGS)
      wide_fill<S>(w, x, xs, base + j * S::STAGES * S::STAGE, full + j * S::STAGES * 8, empty + j * S::STAGES * 8, rank * WIDE_GROUPS + j, groups, owner, owners, mine,
                   panel_height(rows));
    __syncwarp();
    if (S::PAIRED) cluster_wait();
    return;
  }
  // ---- multiply ----
  registers_take<WIDE_TAKEN>();
  const int wg = warp >> 2, j = wg % S::RINGS, unit = wg / S::RINGS, part = rank * WIDE_GROUPS + j;
  const uint32_t ring = base + j * S::STAGES * S::STAGE, ring_full = full + j * S::STAGES * 8, ring_empty = empty + j * S::STAGES * 8;
  const uint32_t sums = base + S::SUMS + unit * S::SUM + (threadIdx.x & 127) * 16, token = tokens + wg * 8, next = tokens + (unit * S::RINGS + (j + 1) % S::RINGS) * 8;
  int slot = 0, phase = 0, token_phase = 0, sent_phase = 1;
  if (S::PAIRED) cluster_wait();                                            // the other block's barriers are there
  grid_wait();                                                              // the kernel before may read y
#pragma unroll 1
  for (int first = 0; first < mine; first += S::TILES) {
    const int here = mine - first - 4 * unit;                               // tiles of this warpgroup, a warp each; garbage beyond
#pragma unroll 1
    for (int v = part; v < CLASSES; v += S::PARTS) {
      float acc[S::N / 2];
#pragma unroll
      for (int e = 0; e < S::N / 2; e++) acc[e] = 0;
#pragma unroll 1
      for (int group = v; group < groups; group += CLASSES) {
        const uint32_t stage = ring + slot * S::STAGE;
        uint32_t seen = 0;
        mbar_wait(ring_full + slot * 8, phase);
        if (here > 0) {
          WideCodes<S::BITS> codes;
          int d[S::N / 2];
          codes.load(stage + S::WEIGHTS + (4 * unit + (warp & 3)) * S::PIECE, lane);
          wgmma_fence();
          codes.multiply(d, desc_kmajor(stage));
          wgmma_wait<0>();
          seen = codes.add(acc, d, stage + S::SCALES, c);
        }
        slot_left(ring_empty + slot * 8, seen);
        if (++slot == S::STAGES) slot = 0, phase ^= 1;
      }
      if (here <= 0) continue;
      // ---- the sum of the classes ----
      if (S::PARTS > 1 && (first > 0 || v > 0)) {
        if (S::PAIRED && v == WIDE_GROUPS && (threadIdx.x & 127) == 0) mbar_expect(token, S::SUM);
        mbar_wait(token, token_phase);
        token_phase ^= 1;
      }
      uint32_t seen = 0;
      if (v > 0)
#pragma unroll
        for (int i = 0; i < S::N / 8; i++) {
          const uint4 s = lds128(sums + i * 128 * 16);
          seen |= s.x;
          acc[4 * i] = __fadd_rn(__uint_as_float(s.x), acc[4 * i]), acc[4 * i + 1] = __fadd_rn(__uint_as_float(s.y), acc[4 * i + 1]);
          acc[4 * i + 2] = __fadd_rn(__uint_as_float(s.z), acc[4 * i + 2]), acc[4 * i + 3] = __fadd_rn(__uint_as_float(s.w), acc[4 * i + 3]);
        }
      if (S::PAIRED && v == WIDE_GROUPS - 1) {
        mbar_wait(sent_for, sent_phase);
        sent_phase ^= 1;
        const uint32_t to = at_rank(sums, 1), bar = at_rank(tokens, 1);
#pragma unroll
        for (int i = 0; i < S::N / 8; i++) store_async(to + i * 128 * 16, acc + 4 * i, bar);
      } else if (v < CLASSES - 1) {
#pragma unroll
        for (int i = 0; i < S::N / 8; i++)
          sts128(sums + i * 128 * 16, make_uint4(__float_as_uint(acc[4 * i]), __float_as_uint(acc[4 * i + 1]), __float_as_uint(acc[4 * i + 2]), __float_as_uint(acc[4 * i + 3])));
      } else {
        const int out = (owner + (first + 4 * unit + (warp & 3)) * owners) * 16 + g;
        if ((warp & 3) < here)
#pragma unroll
          for (int e = 0; e < S::N / 2; e++) {
            const int row = e / 4 * 8 + 2 * c + (e & 1);
            if (row < rows && out + (e >> 1 & 1) * 8 < n) y[(size_t)row * n + out + (e >> 1 & 1) * 8] = acc[e];
          }
        // Nothing is said to a block that may have ended.
        if (S::PAIRED && first + S::TILES < mine) {
          seen = __reduce_or_sync(~0u, seen);
          if (lane == 0) mbar_arrive_at(sent_for + (seen & (gridDim.z - 1)), 0);
        }
      }
      if (S::PARTS > 1 && !(S::PAIRED && v == CLASSES - 1)) mbar_arrive(next);
    }
  }
}
