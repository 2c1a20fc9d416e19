// Products of a step's few rows with the weights. Entries exist on every architecture.
#include "linear.cuh"

// linear_{bf16,f16}_{NT}(w atoms, x [rows][pitch], y f32 [rows][n], atoms of k, tiles of 16 outputs, n, rows, pitch of x in elements):
// grid (blocks that share the tiles, rows / (8 NT) rounded up), 256 threads, no dynamic shared memory.
#define LINEAR(name, E, NT, DEPTH, PER_SM)                                                                                                        \
  KERNEL __launch_bounds__(256, PER_SM) name(const uint4* w, const uint16_t* x, float* y, int atoms, int tiles, int n, int rows, int pitch) { \
    linear_16<E, NT, DEPTH>(w, x, y, atoms, tiles, n, rows, pitch);                                                                              \
  }
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// On Hopper up to 16 rows: grid min(tiles, multiprocessors), 288 threads, RING_STAGES (RING_CHUNK + 16) + 16384 bytes of shared memory. 104 registers leave
// room for a block of a norm.
#define RING(name, E, NT)                                                                                                                         \
  KERNEL __maxnreg__(104) name(const uint8_t* w, const uint16_t* x, float* y, int atoms, int tiles, int n, int rows, int pitch) {                 \
    linear_ring<E, NT>(w, x, y, atoms, tiles, n, rows, pitch);                                                                                    \
  }
RING(linear_bf16_1, MmaBf16, 1)
RING(linear_bf16_2, MmaBf16, 2)
RING(linear_f16_1, MmaHalf, 1)
RING(linear_f16_2, MmaHalf, 2)
#else
LINEAR(linear_bf16_1, MmaBf16, 1, 4, 2)
LINEAR(linear_bf16_2, MmaBf16, 2, 4, 2)
LINEAR(linear_f16_1, MmaHalf, 1, 4, 2)
LINEAR(linear_f16_2, MmaHalf, 2, 4, 2)
#endif
LINEAR(linear_bf16_4, MmaBf16, 4, 2, 2)
LINEAR(linear_bf16_8, MmaBf16, 8, 2, 1)
LINEAR(linear_f16_4, MmaHalf, 4, 2, 2)
LINEAR(linear_f16_8, MmaHalf, 8, 2, 1)

// linear_{w4,w8}_{NT}_{STAGES}(w blocks, x8 [rows][groups * 128], xs [rows][groups] {scale, sum}, y f32 [rows][n], groups, tiles, n, rows): the same grid,
// 256 threads, 8 STAGES (256 bits + 64) bytes of shared memory, with one row tile rows * (groups * 136 + 64) more.
#define QUANT(name, BITS, NT, STAGES, PER_SM)                                                                                                             \
  KERNEL __launch_bounds__(256, PER_SM) name(const uint8_t* w, const int8_t* x, const float2* xs, float* y, int groups, int tiles, int n, int rows) { \
    linear_quant<BITS, NT, STAGES, NT == 1>(w, x, xs, y, groups, tiles, n, rows);                                                                                         \
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

// linear_f32(w [n][k], x [rows][pitch], y f32 [rows][n], k, n, rows, pitch): grid (n / 8 rounded up, rows / 8 rounded up), 256 threads.
KERNEL __launch_bounds__(256) linear_f32(const float* w, const float* x, float* y, int k, int n, int rows, int pitch) { linear_single<8>(w, x, y, k, n, rows, pitch); }
