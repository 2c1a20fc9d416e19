// GEMMs of a step's few rows with the weights. On Hopper there are linear_{bf16,f16}_{1,2}, elsewhere also _{4,8}.
#include "linear.cuh"
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#include "linear_wide.cuh"
#endif

// linear_{bf16,f16}_{NT}(w, x, y, atoms, tiles, n, rows, pitch): y = x W^T with weights of 16 bits.
//
//     w      atoms [tiles][atoms]
//     x      the weights' type [rows][pitch], pitch in elements, at least 64 atoms
//     y      f32 [rows][n]
//     atoms  of 64 inputs; tiles: of 16 outputs
//
// Grid (blocks that share the tiles, ceil(rows / (8 NT))), 256 threads, no dynamic shared memory.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// On Hopper: grid (min(tiles, SMs) in whole clusters, as above), 320 threads, Pipeline::BYTES of shared memory. 104
// registers per thread leave room for a norm's block: three warps per scheduler use 312 of its 512 registers per lane,
// the norm's four warps 192 in all (docs/design/gemm.md).
#define PIPELINE(NT, TOGETHER, STAGES, X_STAGES, CLUSTER, REGISTERS, SHARED)                                        \
  static_assert(FullPipeline<NT, TOGETHER, STAGES, X_STAGES, CLUSTER>::BYTES == SHARED);                            \
  PIPELINE_OF(linear_bf16_##NT, MmaBf16, CLUSTER, REGISTERS, FullPipeline<NT, TOGETHER, STAGES, X_STAGES, CLUSTER>) \
  PIPELINE_OF(linear_f16_##NT, MmaHalf, CLUSTER, REGISTERS, FullPipeline<NT, TOGETHER, STAGES, X_STAGES, CLUSTER>)
#define PIPELINE_OF(name, E, CLUSTER, REGISTERS, ...)                                                                 \
  KERNEL BLOCKS_##CLUSTER __maxnreg__(REGISTERS)                                                                      \
      name(const uint8_t* w, const uint8_t* x, float* y, int atoms, int tiles, int n, int rows, int pitch) {          \
    pipelined_gemm<__VA_ARGS__, MultiplyFull<E, __VA_ARGS__>>(Pieces<2048>{w, atoms}, x, nullptr, y, atoms, tiles, n, \
                                                              rows, (size_t)pitch * 2);                               \
  }
PIPELINE(1, 4, 12, 2, 1, 96, 222448)
PIPELINE(2, 3, 10, 3, 2, 104, 224488)
#else
#define LINEAR(name, E, NT, DEPTH, PER_SM)                                                                  \
  KERNEL __launch_bounds__(256, PER_SM)                                                                     \
      name(const uint4* w, const uint16_t* x, float* y, int atoms, int tiles, int n, int rows, int pitch) { \
    linear_16<E, NT, DEPTH>(w, x, y, atoms, tiles, n, rows, pitch);                                         \
  }
LINEAR(linear_bf16_1, MmaBf16, 1, 4, 2)
LINEAR(linear_bf16_2, MmaBf16, 2, 4, 2)
LINEAR(linear_bf16_4, MmaBf16, 4, 2, 2)
LINEAR(linear_bf16_8, MmaBf16, 8, 2, 1)
LINEAR(linear_f16_1, MmaHalf, 1, 4, 2)
LINEAR(linear_f16_2, MmaHalf, 2, 4, 2)
LINEAR(linear_f16_4, MmaHalf, 4, 2, 2)
LINEAR(linear_f16_8, MmaHalf, 8, 2, 1)
#endif

// linear_{w4,w8}_{NT}_{STAGES}(w, x, xs, y, groups, tiles, n, rows): y = x W^T with draft weights.
//
//     w       blocks [tiles][groups] of QUANT_BLOCK bytes
//     x       int8 [rows][groups * 128]
//     xs      float2 [rows][groups] {scale, scale times the sum of the codes}
//     y       f32 [rows][n]
//     groups  of 128 inputs; tiles: of 16 outputs
//
// Grid as above, 256 threads. Shared memory: 8 STAGES QUANT_BLOCK bytes, and with one row tile
// rows * (groups * 136 + 64) more.
#define QUANT(name, BITS, NT, STAGES, PER_SM)                                                                       \
  KERNEL __launch_bounds__(256, PER_SM)                                                                             \
      name(const uint8_t* w, const int8_t* x, const float2* xs, float* y, int groups, int tiles, int n, int rows) { \
    linear_quant<BITS, NT, STAGES, NT == 1>(w, x, xs, y, groups, tiles, n, rows);                                   \
  }
QUANT(linear_w4_1_8, 4, 1, 8, 2)
QUANT(linear_w4_1_6, 4, 1, 6, 2)
QUANT(linear_w4_2_6, 4, 2, 6, 2)
QUANT(linear_w4_4_6, 4, 4, 6, 2)
QUANT(linear_w4_4_3, 4, 4, 3, 2)
QUANT(linear_w8_1_6, 8, 1, 6, 2)
QUANT(linear_w8_1_4, 8, 1, 4, 2)
QUANT(linear_w8_2_4, 8, 2, 4, 2)
QUANT(linear_w8_4_4, 8, 4, 4, 2)
QUANT(linear_w8_4_2, 8, 4, 2, 2)

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// linear_{w4,w8}_pipeline_{NT}: the same on Hopper, for an even number of groups, so that scales are copied 16 bytes at
// a time; grid and shared memory as for linear_{bf16,f16}_{NT} there, 320 threads, or 384 if registers are handed over.
#define DRAFT_PIPELINE(BITS, NT, TOGETHER, STAGES, X_STAGES, CLUSTER, HAND_OVER, REGISTERS, SHARED4, SHARED8) \
  DRAFT_PIPELINE_OF(BITS, NT, CLUSTER, REGISTERS, (BITS == 4 ? SHARED4 : SHARED8),                            \
                    DraftPipeline<BITS, NT, TOGETHER, STAGES, X_STAGES, CLUSTER, HAND_OVER ? REGISTERS : 0>)
#define DRAFT_PIPELINE_OF(BITS, NT, CLUSTER, REGISTERS, SHARED, ...)                                              \
  static_assert(__VA_ARGS__::BYTES == SHARED);                                                                    \
  KERNEL BLOCKS_##CLUSTER __maxnreg__(REGISTERS) linear_w##BITS##_pipeline_##NT(                                  \
      const uint8_t* w, const uint8_t* x, const uint8_t* xs, float* y, int groups, int tiles, int n, int rows) {  \
    pipelined_gemm<__VA_ARGS__, MultiplyDraft<BITS, __VA_ARGS__>>(Pieces<QUANT_BLOCK<BITS>>{w, groups}, x, xs, y, \
                                                                  groups, tiles, n, rows, (size_t)groups * 128);  \
  }
#define DRAFT_PIPELINES(BITS)                                    \
  DRAFT_PIPELINE(BITS, 1, 4, 9, 5, 2, false, 96, 211848, 207240) \
  DRAFT_PIPELINE(BITS, 2, 4, 7, 4, 2, true, PIPELINE_ENTRY, 205008, 201424)
DRAFT_PIPELINES(4)
DRAFT_PIPELINES(8)

// linear_{w4,w8,bf16,f16}_wide_{N}: the same for 17 and more rows on Hopper, up to N per block, x and xs in panels
// (panel.cuh). Grid (2 min(tiles, SMs / 2), ceil(rows / max(N, 64))), WIDE_THREADS threads, Wide::BYTES of shared
// memory.
#define WIDE(BITS, N, UNITS, STAGES, SHARED)                                                                           \
  static_assert(Wide<DraftGroup<BITS>, N, UNITS, STAGES>::BYTES == SHARED);                                            \
  KERNEL BLOCKS_2 __maxnreg__(WIDE_ENTRY) linear_w##BITS##_wide_##N(                                                   \
      const uint8_t* w, const uint8_t* x, const uint8_t* xs, float* y, int groups, int tiles, int n, int rows) {       \
    wide_gemm<Wide<DraftGroup<BITS>, N, UNITS, STAGES>>(Pieces<QUANT_BLOCK<BITS>>{w, groups}, x, xs, y, groups, tiles, \
                                                        n, rows);                                                      \
  }
// With 64 rows of 4 bits, 28,672 x 4,096, the time falls by 31 % without scales and zeros, by 19 % without three of
// four matrix instructions, by 10 % without handing sums over, and by 4 % without loads (H200). A wgmma makes no
// progress while other warps issue FFMA or FMUL at full rate, so neither hides behind the other. Not faster: x in
// shared memory for all passes, two halves of the rows or two units in flight, sums handed over in parts. The loop
// alone takes 334 cycles per group and unit; with two warpgroups that multiply the next group during `add`, 313.
WIDE(4, 32, 2, 4, 229672)
WIDE(4, 64, 1, 4, 229672)
WIDE(8, 32, 2, 2, 188584)
WIDE(8, 64, 1, 3, 225512)
#define WIDE_FULL(N, STAGES, SHARED)                                 \
  static_assert(Wide<Atom<Bf16>, N, 1, STAGES>::BYTES == SHARED);    \
  WIDE_FULL_OF(linear_bf16_wide_##N, Wide<Atom<Bf16>, N, 1, STAGES>) \
  WIDE_FULL_OF(linear_f16_wide_##N, Wide<Atom<Half>, N, 1, STAGES>)
#define WIDE_FULL_OF(name, ...)                                                                   \
  KERNEL BLOCKS_2 __maxnreg__(WIDE_ENTRY)                                                         \
      name(const uint8_t* w, const uint8_t* x, float* y, int atoms, int tiles, int n, int rows) { \
    wide_gemm<__VA_ARGS__>(Pieces<2048>{w, atoms}, x, nullptr, y, atoms, tiles, n, rows);         \
  }
WIDE_FULL(32, 4, 205096)
WIDE_FULL(64, 3, 213224)
WIDE_FULL(128, 2, 229544)
#endif

// linear_f32(w f32 [n][k], x f32 [rows][pitch], y f32 [rows][n], ...): grid (ceil(n / 8), ceil(rows / 8)), 256 threads,
// no dynamic shared memory.
KERNEL __launch_bounds__(256) linear_f32(const float* w, const float* x, float* y, int k, int n, int rows, int pitch) {
  linear_single<8>(w, x, y, k, n, rows, pitch);
}
