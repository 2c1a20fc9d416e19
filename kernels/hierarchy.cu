// Products of a step's few rows with weights in planes. Entries exist on every architecture.
#include "hierarchy.cuh"

// linear_int{8,4}_{bf16,f16}_{NT}(upper, lower plane (int4: any address), x [rows][pitch], y f32 [rows][n], groups of 64 inputs, stride: blocks of a tile in memory,
// tiles of 16 outputs, n, rows, pitch of x in elements): grid and threads as linear_bf16_{NT} of linear.cu.
#define PLANES_ARGUMENTS \
  const uint8_t *upper, const uint8_t *lower, const uint8_t *x, float *y, int groups, int stride, int tiles, int n, int rows, int pitch
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define BLOCKS_1
#define BLOCKS_2 __cluster_dims__(2, 1, 1)
#define PLANE_RING(BITS, NT, TILES, TOGETHER, STAGES, X_STAGES, CLUSTER, HAND_OVER, REGISTERS, SHARED)                                       \
  static_assert(PlaneRing<BITS / 4, NT, TILES, TOGETHER, STAGES, X_STAGES, CLUSTER, HAND_OVER>::BYTES == SHARED, "as hierarchy.rs asks for"); \
  PLANE_RING_OF(BITS, bf16, CodesBf16, NT, CLUSTER, REGISTERS, PlaneRing<BITS / 4, NT, TILES, TOGETHER, STAGES, X_STAGES, CLUSTER, HAND_OVER>) \
  PLANE_RING_OF(BITS, f16, CodesHalf, NT, CLUSTER, REGISTERS, PlaneRing<BITS / 4, NT, TILES, TOGETHER, STAGES, X_STAGES, CLUSTER, HAND_OVER>)
#define PLANE_RING_OF(BITS, TYPE, E, NT, CLUSTER, REGISTERS, ...)                                                                            \
  KERNEL BLOCKS_##CLUSTER __maxnreg__(REGISTERS) linear_int##BITS##_##TYPE##_##NT(PLANES_ARGUMENTS) {                                        \
    ring_product<__VA_ARGS__, MultiplyPlanes<E, BITS / 4, __VA_ARGS__>>(PlanePieces<BITS / 4>{upper, lower, stride}, x, nullptr, y, groups,  \
                                                                        tiles, n, rows, (size_t)pitch * 2);                                  \
  }
PLANE_RING(8, 1, 2, 4, 9, 5, 1, false, 96, 206728)
PLANE_RING(8, 2, 2, 4, 7, 4, 2, false, 104, 196816)
PLANE_RING(8, 4, 2, 4, 6, 3, 2, true, RING_ENTRY, 212648)
PLANE_RING(8, 8, 1, 2, 8, 2, 2, true, RING_ENTRY, 211120)
PLANE_RING(4, 1, 4, 4, 9, 4, 1, false, 104, 207600)
PLANE_RING(4, 2, 4, 8, 7, 4, 2, true, RING_ENTRY, 203984)
PLANE_RING(4, 4, 4, 4, 5, 3, 2, true, RING_ENTRY, 200344)
PLANE_RING(4, 8, 1, 2, 12, 2, 2, true, RING_ENTRY, 196848)
#else
#define PLANES_OF(BITS, TYPE, E, NT, DEPTH, PER_SM)                                                                                       \
  KERNEL __launch_bounds__(256, PER_SM) linear_int##BITS##_##TYPE##_##NT(PLANES_ARGUMENTS) {                                              \
    linear_planes<E, BITS / 4, NT, DEPTH>(upper, lower, reinterpret_cast<const uint16_t*>(x), y, groups, stride, tiles, n, rows, pitch); \
  }
#define PLANES(BITS, NT, DEPTH, PER_SM)                \
  PLANES_OF(BITS, bf16, CodesBf16, NT, DEPTH, PER_SM) \
  PLANES_OF(BITS, f16, CodesHalf, NT, DEPTH, PER_SM)
PLANES(8, 1, 4, 2)
PLANES(8, 2, 4, 2)
PLANES(8, 4, 2, 1)
PLANES(8, 8, 2, 1)
PLANES(4, 1, 4, 2)
PLANES(4, 2, 4, 2)
PLANES(4, 4, 2, 1)
PLANES(4, 8, 2, 1)
#endif
