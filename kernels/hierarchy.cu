// GEMMs of a step's few rows with weights in planes. On Hopper NT is 1 or 2, elsewhere also 4 and 8.
#include "hierarchy.cuh"
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#include "linear_wide.cuh"
#endif

// linear_{both,upper}_{NT}(PLANES_ARGUMENTS): y = x W^T with weights in planes (layout.cuh).
//
//     upper, lower      planes, blocks [tiles][groups]; lower is not read by linear_upper_*
//     x, xs             `Limbs` and {scale, scale times sum} of each group, row-major (panel.cuh)
//     y                 f32 [rows][n]
//     groups            of 64 inputs, an even number; tiles: of 16 outputs
//     next, next_bytes  weights to prefetch, on Hopper
//
// Grid, threads and shared memory as for linear_bf16_{NT} of linear.cu.
#define PLANES_ARGUMENTS                                                                                            \
  const uint8_t *upper, const uint8_t *lower, const uint8_t *x, const uint8_t *xs, float *y, int groups, int tiles, \
      int n, int rows, const uint8_t *next, uint32_t next_bytes
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define PLANE_PIPELINE(VIEW, PLANES, NT, TILES, DEEP, TOGETHER, STAGES, X_STAGES, CLUSTER, HAND_OVER, REGISTERS, \
                       SHARED)                                                                                   \
  PLANE_PIPELINE_OF(                                                                                             \
      VIEW, PLANES, DEEP, NT, CLUSTER, REGISTERS, SHARED,                                                        \
      PlanePipeline<PLANES, NT, TILES, DEEP, TOGETHER, STAGES, X_STAGES, CLUSTER, HAND_OVER ? REGISTERS : 0>)
#define PLANE_PIPELINE_OF(VIEW, PLANES, DEEP, NT, CLUSTER, REGISTERS, SHARED, ...)                        \
  static_assert(__VA_ARGS__::BYTES == SHARED);                                                            \
  KERNEL BLOCKS_##CLUSTER __maxnreg__(REGISTERS) linear_##VIEW##_##NT(PLANES_ARGUMENTS) {                 \
    pipelined_gemm<__VA_ARGS__, MultiplyPlanes<PLANES, __VA_ARGS__>>(                                     \
        PlanePieces<PLANES, DEEP * LINEAR_WARPS>{upper, lower, groups}, x, xs, y, groups, tiles, n, rows, \
        (size_t)groups * 128, NextWeights{next, next_bytes});                                             \
  }
// A warp has four blocks per stage, if registers suffice. With two, waiting for a stage and for its first results takes
// longer than memory takes for the upper plane. Loading warps hand registers over, so that a norm's block fits next to
// a GEMM's. Not faster: blocks of half an SM (slower in whole steps of one row), 16 computing warps, one arrival per
// warp, loading the next stage's codes before the current stage is multiplied, prefetching further weights into L2
// while all stages are full, SiLU or RoPE in the epilogue.
PLANE_PIPELINE(both, 2, 1, 2, 2, 4, 4, 3, 2, true, 104, 200200)
PLANE_PIPELINE(both, 2, 2, 1, 2, 4, 7, 2, 2, false, 144, 200352)
PLANE_PIPELINE(upper, 1, 1, 2, 2, 4, 7, 4, 2, true, 104, 207568)
PLANE_PIPELINE(upper, 1, 2, 2, 2, 4, 8, 2, 2, true, PIPELINE_ENTRY, 225968)

// linear_{both,upper}_wide_{N}: the same for 17 and more rows, up to N per block, with x and xs in panels. Grid and
// threads as for linear_w4_wide_{N} of linear.cu.
#define WIDE_PLANES(VIEW, PLANES, N, STAGES, SHARED)                                                                  \
  static_assert(Wide<PlaneGroup<PLANES>, N, 1, STAGES>::BYTES == SHARED);                                             \
  KERNEL BLOCKS_2 __maxnreg__(WIDE_ENTRY)                                                                             \
      linear_##VIEW##_wide_##N(const uint8_t* upper, const uint8_t* lower, const uint8_t* x, const uint8_t* xs,       \
                               float* y, int groups, int tiles, int n, int rows) {                                    \
    wide_gemm<Wide<PlaneGroup<PLANES>, N, 1, STAGES>>(PlanePieces<PLANES, 1>{upper, lower, groups}, x, xs, y, groups, \
                                                      tiles, n, rows);                                                \
  }
WIDE_PLANES(both, 2, 32, 6, 229800)
WIDE_PLANES(both, 2, 64, 4, 229672)
WIDE_PLANES(upper, 1, 32, 7, 209384)
WIDE_PLANES(upper, 1, 64, 4, 196904)
#else
#define PLANES_OF(VIEW, PLANES, NT, DEPTH, PER_SM)                                                                     \
  KERNEL __launch_bounds__(256, PER_SM) linear_##VIEW##_##NT(PLANES_ARGUMENTS) {                                       \
    linear_planes<PLANES, NT, DEPTH>(upper, lower, x, reinterpret_cast<const float2*>(xs), y, groups, tiles, n, rows); \
  }
PLANES_OF(both, 2, 1, 3, 2)
PLANES_OF(both, 2, 2, 2, 2)
PLANES_OF(both, 2, 4, 2, 1)
PLANES_OF(both, 2, 8, 2, 1)
PLANES_OF(upper, 1, 1, 4, 2)
PLANES_OF(upper, 1, 2, 4, 2)
PLANES_OF(upper, 1, 4, 2, 1)
PLANES_OF(upper, 1, 8, 2, 1)
#endif
