// GEMMs of a step's few rows with weights in planes. On Hopper NT is 1 or 2, elsewhere also 4 and 8.
#include "hierarchy.cuh"
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#include "linear_wide.cuh"
#endif

// linear_{both,upper}_{bf16,f16}_{NT}(PLANES_ARGUMENTS): y = x W^T with weights in planes (layout.cuh).
//
//     upper, lower      planes, blocks [tiles][stride]; lower is not read by linear_upper_*
//     x                 16 bits [rows][pitch], pitch in elements
//     y                 f32 [rows][n]
//     groups            of 64 inputs; tiles: of 16 outputs
//     next, next_bytes  weights to prefetch, on Hopper
//
// Grid, threads and shared memory as for linear_bf16_{NT} of linear.cu.
#define PLANES_ARGUMENTS                                                                                            \
  const uint8_t *upper, const uint8_t *lower, const uint8_t *x, float *y, int groups, int stride, int tiles, int n, \
      int rows, int pitch, const uint8_t *next, uint32_t next_bytes
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define PLANE_PIPELINE(VIEW, PLANES, NT, TILES, DEEP, TOGETHER, STAGES, X_STAGES, CLUSTER, HAND_OVER, REGISTERS, \
                       SHARED)                                                                                   \
  static_assert(PlanePipeline<PLANES, NT, TILES, DEEP, TOGETHER, STAGES, X_STAGES, CLUSTER, HAND_OVER>::BYTES == \
                SHARED);                                                                                         \
  PLANE_PIPELINE_OF(VIEW, PLANES, DEEP, bf16, CodesBf16, NT, CLUSTER, REGISTERS,                                 \
                    PlanePipeline<PLANES, NT, TILES, DEEP, TOGETHER, STAGES, X_STAGES, CLUSTER, HAND_OVER>)      \
  PLANE_PIPELINE_OF(VIEW, PLANES, DEEP, f16, CodesHalf, NT, CLUSTER, REGISTERS,                                  \
                    PlanePipeline<PLANES, NT, TILES, DEEP, TOGETHER, STAGES, X_STAGES, CLUSTER, HAND_OVER>)
#define PLANE_PIPELINE_OF(VIEW, PLANES, DEEP, TYPE, E, NT, CLUSTER, REGISTERS, ...)                            \
  KERNEL BLOCKS_##CLUSTER __maxnreg__(REGISTERS) linear_##VIEW##_##TYPE##_##NT(PLANES_ARGUMENTS) {             \
    pipelined_gemm<__VA_ARGS__, MultiplyPlanes<E, PLANES, __VA_ARGS__>>(                                       \
        PlanePieces<PLANES, DEEP * LINEAR_WARPS>{upper, lower, stride}, x, nullptr, y, groups, tiles, n, rows, \
        (size_t)pitch * 2, NextWeights{next, next_bytes});                                                     \
  }
// In a step most stages are full when x arrives. A full stage of both planes then takes 700 cycles, .35 us, where
// memory needs .48: instructions delay a GEMM as much as memory does (H200, 4,096 x 4,096 in a harness). A warp has 171
// of them per stage, of which unpacking is 60, and a scheduler's two warps issue in half of the cycles. Without
// unpacking, or without loads of codes it takes 550 cycles, without any products 240. Not faster: blocks of half an SM
// (slower in whole steps of one row), 16 computing warps, also with alternate tiles for two groups of eight, one
// arrival per warp, loading the next stage's codes before the current stage is multiplied, 10 stages, prefetching
// further weights into L2 while all stages are full, SiLU or RoPE in the epilogue.
PLANE_PIPELINE(both, 2, 1, 1, 2, 4, 8, 3, 2, false, 104, 197192)
PLANE_PIPELINE(both, 2, 2, 1, 2, 4, 7, 2, 2, false, 144, 196256)
PLANE_PIPELINE(upper, 1, 1, 1, 2, 4, 14, 4, 2, false, 104, 203584)
PLANE_PIPELINE(upper, 1, 2, 2, 2, 4, 8, 2, 2, true, PIPELINE_ENTRY, 221872)

// linear_{both,upper}_{bf16,f16}_wide_{N}: the same for 17 and more rows, up to N per block, with x in panels in the
// order of planes. Grid and threads as for linear_w4_wide_{N} of linear.cu.
#define WIDE_PLANES(VIEW, PLANES, N, STAGES, SHARED)                                 \
  static_assert(Wide<PlaneGroup<CodesBf16, PLANES>, N, 1, STAGES>::BYTES == SHARED); \
  WIDE_PLANES_OF(VIEW, PLANES, bf16, CodesBf16, N, STAGES)                           \
  WIDE_PLANES_OF(VIEW, PLANES, f16, CodesHalf, N, STAGES)
#define WIDE_PLANES_OF(VIEW, PLANES, TYPE, E, N, STAGES)                                                              \
  KERNEL BLOCKS_2 __maxnreg__(WIDE_ENTRY)                                                                             \
      linear_##VIEW##_##TYPE##_wide_##N(const uint8_t* upper, const uint8_t* lower, const uint8_t* x, float* y,       \
                                        int groups, int stride, int tiles, int n, int rows) {                         \
    wide_gemm<Wide<PlaneGroup<E, PLANES>, N, 1, STAGES>>(PlanePieces<PLANES, 1>{upper, lower, stride}, x, nullptr, y, \
                                                         groups, tiles, n, rows);                                     \
  }
WIDE_PLANES(both, 2, 32, 6, 230824)
WIDE_PLANES(both, 2, 64, 4, 230696)
WIDE_PLANES(upper, 1, 32, 7, 210408)
WIDE_PLANES(upper, 1, 64, 4, 197928)
#else
#define PLANES_OF(VIEW, PLANES, TYPE, E, NT, DEPTH, PER_SM)                                                           \
  KERNEL __launch_bounds__(256, PER_SM) linear_##VIEW##_##TYPE##_##NT(PLANES_ARGUMENTS) {                             \
    linear_planes<E, PLANES, NT, DEPTH>(upper, lower, reinterpret_cast<const uint16_t*>(x), y, groups, stride, tiles, \
                                        n, rows, pitch);                                                              \
  }
#define VIEW_OF(VIEW, PLANES, NT, DEPTH, PER_SM)              \
  PLANES_OF(VIEW, PLANES, bf16, CodesBf16, NT, DEPTH, PER_SM) \
  PLANES_OF(VIEW, PLANES, f16, CodesHalf, NT, DEPTH, PER_SM)
VIEW_OF(both, 2, 1, 4, 2)
VIEW_OF(both, 2, 2, 4, 2)
VIEW_OF(both, 2, 4, 2, 1)
VIEW_OF(both, 2, 8, 2, 1)
VIEW_OF(upper, 1, 1, 4, 2)
VIEW_OF(upper, 1, 2, 4, 2)
VIEW_OF(upper, 1, 4, 2, 1)
VIEW_OF(upper, 1, 8, 2, 1)
#endif
