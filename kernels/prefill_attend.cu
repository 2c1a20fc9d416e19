// Causal attention of prompt rows over full-precision keys and values, with grouped query heads, as FlashAttention.
//
// Queries [q0, q0 + n) attend to keys [0, q0 + n), key <= query: O = softmax(Q K^T * scale) V. Q, K, V are f16 (keys
// and values are the numbers that the cache stores). P is rounded to f16 for P V, after a factor 2^14 that keeps its
// tail out of the subnormals. Sums are f32; O has the weights' type. Keys run upward in tiles of fixed width, so a
// query row's bits do not depend on q0, n or the row's position in its tile.
//
// A thread has two query rows of each block of 16, g and g + 8 for lane = 4 g + c (ptx.cuh): suffixes 0 and 1. S, P and
// O are named as in FlashAttention, i counts accumulators, j tiles of keys.
//
// LOCAL: a query sees its last `reach` keys, key > query - reach, and tiles that no row of the block sees are skipped.
// Scores of hidden keys are minus infinity. So a tile without a key that a row sees changes no bit of the row's sums,
// also before the row's first visible key.
//
// sm_90a uses wgmma and TMA, except for heads of 256 channels. Those and other architectures use mma.sync and cp.async.
#include "layout.cuh"
#include "numbers.cuh"

// P is at most 2^14, so f16 holds probabilities down to 2^-28 of the largest without loss; the factor cancels in O.
constexpr float P_SHIFT = 14;
// Dynamic shared memory: bytes per channel of a head, and for the wgmma kernel a constant in addition
// (barriers, room to align).
constexpr int PROMPT_WGMMA_CHANNEL = 1280;
constexpr int PROMPT_WGMMA_MORE = 1096;
constexpr int PROMPT_MMA_CHANNEL = 512;
constexpr int PROMPT_MMA_CHANNEL_256 = 384;
// Threads of a block: of the wgmma kernel with 128 and with 64 rows, and of the other kernel.
constexpr int PROMPT_WGMMA_THREADS = 384, PROMPT_WGMMA_FEW_THREADS = 256;
constexpr int PROMPT_MMA_THREADS = 128;

// Score of a key that a query does not see. Without LOCAL a row's first tile has a key that it sees,
// so a finite number suffices.
template <bool LOCAL>
DEV float hidden_score() {
  return LOCAL ? minus_infinity() : LOG_ZERO;
}

// What a CTA computes: ROWS query rows from row0 on of a query head. Grid: KV head slowest, then query tiles from the
// last (longest) down, then the heads of the group, which share K and V in L2.
struct Place {
  int row0, head, kv_head;
};
template <int ROWS>
DEV Place place_of_block(int n, int group) {
  const int tiles_q = (n + ROWS - 1) / ROWS, in_group = blockIdx.x % group, rest = blockIdx.x / group;
  const int row0 = (tiles_q - 1 - rest % tiles_q) * ROWS, kv_head = rest / tiles_q;
  return {row0, kv_head * group + in_group, kv_head};
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "hopper.cuh"

namespace wgmma_attention {

// A CTA takes 64 or 128 query rows of a head: a consumer warpgroup per 64 rows, and a producer that loads K and V tiles
// of 128 keys. While one warpgroup computes exponentials, the tensor cores serve the other. S of tile j is issued
// before P V of tile j - 1 is awaited (FlashAttention-3). Blocks of few rows take 64, so that twice as many SMs work.
enum { KEYS = 128, STAGES = 2 };
enum { PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240 };  // per thread, with two consumer warpgroups
constexpr int threads(int consumers) { return 128 * (consumers + 1); }
static_assert(threads(2) == PROMPT_WGMMA_THREADS && threads(1) == PROMPT_WGMMA_FEW_THREADS);

// A tile: D / 64 slices of 64 channels, each 128 rows x 128 bytes, swizzled.
template <int D>
struct Tile {
  static constexpr int SLICE = 128 * 128, SLICES = D / 64, BYTES = SLICE * SLICES;
};

// Shared-memory addresses of a CTA's tiles and barriers.
template <int D>
struct Shared {
  uint32_t q, k, v;  // k, v: [STAGES]
  uint32_t q_full, k_full, k_empty, v_full, v_empty;
  DEV explicit Shared(uint32_t raw) {
    q = (raw + 1023) & ~1023u;
    k = q + Tile<D>::BYTES;
    v = k + STAGES * Tile<D>::BYTES;
    q_full = v + STAGES * Tile<D>::BYTES;
    k_full = q_full + 8;
    k_empty = k_full + 8 * STAGES;
    v_full = k_empty + 8 * STAGES;
    v_empty = v_full + 8 * STAGES;
  }
};

// The producer, one thread: loads Q, and K and V of every tile in the order of their use.
template <int D>
DEV void load_tiles(const Shared<D>& at, const TensorMap* Q, const TensorMap* K, const TensorMap* V, const Place& place,
                    int first_key, int tiles) {
  constexpr int BYTES = Tile<D>::BYTES;
  auto load = [&](uint32_t dst, const TensorMap* tensor, int row, int head, uint32_t bar) {
    mbar_expect(bar, BYTES);
#pragma unroll
    for (int i = 0; i < Tile<D>::SLICES; i++) tma_load(dst + i * Tile<D>::SLICE, tensor, 64 * i, row, head, bar);
  };
  load(at.q, Q, place.row0, place.head, at.q_full);
  for (int j = 0; j <= tiles; j++) {  // K of tile j, then V of tile j - 1
    if (j < tiles) {
      const int s = j % STAGES;
      mbar_wait(at.k_empty + 8 * s, (j / STAGES & 1) ^ 1);
      load(at.k + s * BYTES, K, first_key + j * KEYS, place.kv_head, at.k_full + 8 * s);
    }
    if (j) {
      const int i = j - 1, s = i % STAGES;
      mbar_wait(at.v_empty + 8 * s, (i / STAGES & 1) ^ 1);
      load(at.v + s * BYTES, V, first_key + i * KEYS, place.kv_head, at.v_full + 8 * s);
    }
  }
}

// Stores a warpgroup's 64 rows of O / sum, through the shared memory of its rows of Q. w: warpgroup; head: query head.
template <int D, class T>
DEV void store_output(const Shared<D>& at, const TensorMap* O, float (&o)[D / 2], float sum0, float sum1, int row0,
                      int head, int w, int warp, int lane) {
  constexpr int SLICE = Tile<D>::SLICE;
  const float f0 = 1.f / sum0, f1 = 1.f / sum1;
  wgmma_wait<0>();
  bar_sync(1 + w, 128);  // the whole warpgroup has read its rows of Q, which O overwrites
  const int o_row = warp * 16 + (lane & 15), half = lane >> 4;
#pragma unroll
  for (int i = 0; i < D / 16; i++) {
    float* v = o + i * 8;
    stmatrix4(at.q + (i >> 2) * SLICE + (w * 64 + o_row) * 128 + (((2 * (i & 3) + half) ^ (o_row & 7)) << 4),
              T::pack(v[0] * f0, v[1] * f0), T::pack(v[2] * f1, v[3] * f1), T::pack(v[4] * f0, v[5] * f0),
              T::pack(v[6] * f1, v[7] * f1));
  }
  fence_async();
  bar_sync(1 + w, 128);
  if ((threadIdx.x & 127) == 0) {
#pragma unroll
    for (int i = 0; i < Tile<D>::SLICES; i++)
      tma_store(O, 64 * i, row0 + w * 64, head, at.q + i * SLICE + w * 64 * 128);
    bulk_commit();
    bulk_wait_all();
  }
}

// A consumer warpgroup's 64 rows. A thread has two of them, 8 apart.
template <int D, bool LOCAL>
struct Consumer {
  static constexpr int BYTES = Tile<D>::BYTES, SLICE = Tile<D>::SLICE;
  const Shared<D>& at;
  int w, warp, lane;  // warpgroup, and indices in it
  int first_key, reach;
  int query;  // position of the thread's first row
  // Tiles before `unmasked` have no key after one of the 64 rows, tiles from `shown` on none before one's reach.
  int unmasked, shown;
  uint64_t q_desc;
  float scale_log2;
  float s[64], o[D / 2];  // scores of a tile, outputs
  uint32_t p[32];         // weights of a tile
  float max0 = LOG_ZERO, max1 = LOG_ZERO, sum0 = 0, sum1 = 0;
  float keep0, keep1;  // factors of earlier sums and outputs

  DEV Consumer(const Shared<D>& at, int w, int q0, int row0, int first_key, float scale_log2, int reach)
      : at(at), w(w), first_key(first_key), reach(reach), scale_log2(scale_log2) {
    lane = threadIdx.x & 31;
    warp = threadIdx.x >> 5 & 3;
    query = q0 + row0 + w * 64 + warp * 16 + (lane >> 2);
    unmasked = (q0 + row0 + w * 64 + 1 - first_key) / KEYS;
    shown = LOCAL ? (first_visible(q0 + row0 + w * 64 + 63, reach) - first_key + KEYS - 1) / KEYS : 0;
    q_desc = desc_kmajor(at.q + w * 64 * 128);
#pragma unroll
    for (int i = 0; i < D / 2; i++) o[i] = 0;
  }

  // Issues s = Q K^T.
  DEV void score(int stage) {
    const uint64_t k_desc = desc_kmajor(at.k + stage * BYTES);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      const int step = (k >> 2) * (SLICE >> 4) + (k & 3) * 2;
      Wgmma<Half>::shared(s, q_desc + step, k_desc + step, k != 0);
    }
    wgmma_commit();
  }

  // Issues o += P V.
  DEV void accumulate(int stage) {
    const uint64_t v_desc = desc_nmajor(at.v + stage * BYTES, SLICE);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 8; k++) wgmma_registers(o, p + 4 * k, v_desc + k * 128);
    wgmma_commit();
  }

  DEV void mask(int tile) {
    if (tile >= unmasked || (LOCAL && tile < shown))
#pragma unroll
      for (int i = 0; i < 64; i++) {
        const int key = first_key + tile * KEYS + (i >> 2) * 8 + (lane & 3) * 2 + (i & 1), row = query + (i & 2) * 4;
        if (key > row || (LOCAL && key <= row - reach)) s[i] = hidden_score<LOCAL>();
      }
  }

  // s of this tile becomes 2^(s - max + P_SHIFT).
  DEV void softmax(int tile) {
    mask(tile);
    float m0 = max0, m1 = max1;
#pragma unroll
    for (int i = 0; i < 64; i += 4) {
      m0 = fmaxf(m0, fmaxf(s[i], s[i + 1]));
      m1 = fmaxf(m1, fmaxf(s[i + 2], s[i + 3]));
    }
    quad_max(m0, m1);
    const float shift0 = m0 * scale_log2 - P_SHIFT, shift1 = m1 * scale_log2 - P_SHIFT;
    // Exactly 1 where the maximum stays.
    keep0 = exp2_fast((max0 - m0) * scale_log2);
    keep1 = exp2_fast((max1 - m1) * scale_log2);
    max0 = m0;
    max1 = m1;
    sum0 *= keep0;
    sum1 *= keep1;
#pragma unroll
    for (int i = 0; i < 64; i += 4) {
      s[i] = exp2_fast(__fmaf_rn(s[i], scale_log2, -shift0));
      s[i + 1] = exp2_fast(__fmaf_rn(s[i + 1], scale_log2, -shift0));
      s[i + 2] = exp2_fast(__fmaf_rn(s[i + 2], scale_log2, -shift1));
      s[i + 3] = exp2_fast(__fmaf_rn(s[i + 3], scale_log2, -shift1));
      sum0 += s[i] + s[i + 1];
      sum1 += s[i + 2] + s[i + 3];
    }
  }

  // Only if a maximum of the warp moved; otherwise the factors are exactly 1.
  DEV void rescale() {
    if (__any_sync(~0u, keep0 != 1.f || keep1 != 1.f))
#pragma unroll
      for (int i = 0; i < D / 2; i += 4) {
        o[i] *= keep0;
        o[i + 1] *= keep0;
        o[i + 2] *= keep1;
        o[i + 3] *= keep1;
      }
  }

  DEV void pack() {
#pragma unroll
    for (int i = 0; i < 32; i++) p[i] = Half::pack(s[2 * i], s[2 * i + 1]);
  }

  // The loop over tiles: S of tile j next to P V of tile j - 1.
  DEV void run(int tiles) {
    mbar_wait(at.q_full, 0);
    mbar_wait(at.k_full, 0);
    score(0);
    wgmma_wait<0>();
    if (lane == 0) mbar_arrive(at.k_empty);
    softmax(0);
    pack();
    int ks = 1 % STAGES, k_parity = 1 / STAGES & 1, vs = 0, v_parity = 0;
    for (int j = 1; j < tiles; j++) {
      mbar_wait(at.k_full + 8 * ks, k_parity);
      score(ks);
      mbar_wait(at.v_full + 8 * vs, v_parity);
      accumulate(vs);
      wgmma_wait<1>();
      if (lane == 0) mbar_arrive(at.k_empty + 8 * ks);
      softmax(j);
      wgmma_wait<0>();
      if (lane == 0) mbar_arrive(at.v_empty + 8 * vs);
      rescale();
      pack();
      if (++ks == STAGES) {
        ks = 0;
        k_parity ^= 1;
      }
      if (++vs == STAGES) {
        vs = 0;
        v_parity ^= 1;
      }
    }
    mbar_wait(at.v_full + 8 * vs, v_parity);
    accumulate(vs);
    quad_sum(sum0, sum1);
  }
};

// Tensor maps (3D, f16 or the output's type, 128-byte swizzle): {D channels, rows, heads}; Q, K, V: box {64, 128, 1};
// O: box {64, 64, 1}. Q and O have n rows, K and V q0 + n; rows beyond read as zero and are masked. With one consumer,
// the second half of Q's box is not used.
template <int D, bool LOCAL, int CONSUMERS, class T>
DEV void attend(const TensorMap* Q, const TensorMap* K, const TensorMap* V, const TensorMap* O, int n, int q0,
                int group, float scale_log2, int reach) {
  constexpr int ROWS = 64 * CONSUMERS;
  constexpr int WARPS = 4 * CONSUMERS;
  static_assert((1 + 2 * STAGES) * Tile<D>::BYTES == PROMPT_WGMMA_CHANNEL * D &&
                8 * (1 + 4 * STAGES) + 1024 == PROMPT_WGMMA_MORE);
  extern __shared__ char raw[];
  const Shared<D> at(shared_address(raw));
  const int warpgroup = threadIdx.x >> 7;
  const Place place = place_of_block<ROWS>(n, group);
  const int row0 = place.row0;
  const int first_key = LOCAL ? first_visible(q0 + row0, reach) / KEYS * KEYS : 0;
  const int tiles = (q0 + min(row0 + ROWS, n) - 1 - first_key) / KEYS + 1;
  if (threadIdx.x == 0) {
    mbar_init(at.q_full, 1);
    for (int s = 0; s < STAGES; s++) {
      mbar_init(at.k_full + 8 * s, 1);
      mbar_init(at.v_full + 8 * s, 1);
      mbar_init(at.k_empty + 8 * s, WARPS);
      mbar_init(at.v_empty + 8 * s, WARPS);
    }
    mbar_init_done();
  }
  __syncthreads();
  if (warpgroup == CONSUMERS) {
    if constexpr (CONSUMERS > 1) registers_give<PRODUCER_REGISTERS>();
    if (threadIdx.x == 128 * CONSUMERS) load_tiles<D>(at, Q, K, V, place, first_key, tiles);
  } else {
    if constexpr (CONSUMERS > 1) registers_take<CONSUMER_REGISTERS>();
    Consumer<D, LOCAL> rows(at, warpgroup, q0, row0, first_key, scale_log2, reach);
    rows.run(tiles);
    store_output<D, T>(at, O, rows.o, rows.sum0, rows.sum1, row0, place.head, warpgroup, rows.warp, rows.lane);
  }
}

}  // namespace wgmma_attention

// prefill_attend_{64,128}_{bf16,f16}(Q, K, V, O, n, q0, group, scale_log2, reach), prefill_attend_{64,128}_local_*: the
// suffix is O's type. scale_log2 = scale * log2(e); `reach` is read by local kernels. Grid ceil(n / 128) * heads,
// PROMPT_WGMMA_THREADS threads, dynamic shared memory as above. prefill_attend_few_*: the same with grid ceil(n / 64) *
// heads, PROMPT_WGMMA_FEW_THREADS threads.
#define KERNEL_OF(NAME, D, T, LOCAL, CONSUMERS)                                                                      \
  extern "C" __global__ void __launch_bounds__(wgmma_attention::threads(CONSUMERS), 1) prefill_attend_##NAME(        \
      const __grid_constant__ TensorMap Q, const __grid_constant__ TensorMap K, const __grid_constant__ TensorMap V, \
      const __grid_constant__ TensorMap O, int n, int q0, int group, float scale_log2, int reach) {                  \
    wgmma_attention::attend<D, LOCAL, CONSUMERS, T>(&Q, &K, &V, &O, n, q0, group, scale_log2, reach);                \
  }
#define ENTRY(D, NAME, T)                    \
  KERNEL_OF(D##_##NAME, D, T, false, 2)      \
  KERNEL_OF(D##_local_##NAME, D, T, true, 2) \
  KERNEL_OF(few_##D##_##NAME, D, T, false, 1) KERNEL_OF(few_##D##_local_##NAME, D, T, true, 1)
ENTRY(64, bf16, Bf16)
ENTRY(64, f16, Half)
ENTRY(128, bf16, Bf16)
ENTRY(128, f16, Half)

#undef KERNEL_OF
#undef ENTRY

#endif

namespace mma_attention {

// 128 query rows of a head per CTA, 4 warps of 32 rows (with 16 rows per warp shared-memory reads would be the
// limit), keys upward in tiles of 64. Shared memory: Q, one tile of K (the next loads during P V) and one of V
// (loads during Q K^T); two CTAs per SM. Heads of 256 channels have registers for only 16 rows per warp; they use
// this kernel on Hopper, too.
enum { KEYS = 64, THREADS = PROMPT_MMA_THREADS };

template <int D>
DEV uint32_t swizzled(int row, int piece) {
  return row * (2 * D) + ((piece ^ (row & 7)) << 4);
}
// Waits for this thread's copies, then for all threads'.
DEV void arrived() {
  copy_wait<0>();
  __syncthreads();
}

// s = Q K^T of a tile.
template <int D, int BLOCKS>
DEV void score(float (&s)[BLOCKS][8][4], uint32_t q_at, uint32_t k_at, int lane) {
#pragma unroll
  for (int i = 0; i < 32 * BLOCKS; i++) (&s[0][0][0])[i] = 0;
#pragma unroll
  for (int k = 0; k < D / 16; k++) {
    uint32_t q[BLOCKS][4];
#pragma unroll
    for (int m = 0; m < BLOCKS; m++) ldmatrix4(q[m], q_at + swizzled<D>(16 * m + (lane & 15), 2 * k + (lane >> 4)));
#pragma unroll
    for (int i = 0; i < 4; i++) {
      uint32_t b[4];
      ldmatrix4(b, k_at + swizzled<D>(16 * i + (lane & 7) + (lane >> 4) * 8, 2 * k + (lane >> 3 & 1)));
#pragma unroll
      for (int m = 0; m < BLOCKS; m++) {
        mma_f16(s[m][2 * i], q[m], b[0], b[1]);
        mma_f16(s[m][2 * i + 1], q[m], b[2], b[3]);
      }
    }
  }
}

// p = 2^(s - max + P_SHIFT) of a block. Its earlier sums and outputs are rescaled if a maximum moved.
template <int D>
DEV void softmax(const float (&s)[8][4], uint32_t (&p)[4][4], float (&o)[D / 8][4], float (&top)[2], float (&sum)[2],
                 float scale_log2) {
  float m0 = top[0], m1 = top[1];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    m0 = fmaxf(m0, fmaxf(s[i][0], s[i][1]));
    m1 = fmaxf(m1, fmaxf(s[i][2], s[i][3]));
  }
  quad_max(m0, m1);
  const float keep0 = exp2_fast((top[0] - m0) * scale_log2), keep1 = exp2_fast((top[1] - m1) * scale_log2);
  const float shift0 = m0 * scale_log2 - P_SHIFT, shift1 = m1 * scale_log2 - P_SHIFT;
  top[0] = m0;
  top[1] = m1;
  sum[0] *= keep0;
  sum[1] *= keep1;
  if (__any_sync(~0u, keep0 != 1.f || keep1 != 1.f))
#pragma unroll
    for (int i = 0; i < D / 8; i++) {
      o[i][0] *= keep0;
      o[i][1] *= keep0;
      o[i][2] *= keep1;
      o[i][3] *= keep1;
    }
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float e0 = exp2_fast(__fmaf_rn(s[i][0], scale_log2, -shift0));
    const float e1 = exp2_fast(__fmaf_rn(s[i][1], scale_log2, -shift0));
    const float e2 = exp2_fast(__fmaf_rn(s[i][2], scale_log2, -shift1));
    const float e3 = exp2_fast(__fmaf_rn(s[i][3], scale_log2, -shift1));
    sum[0] += e0 + e1;
    sum[1] += e2 + e3;
    p[i >> 1][(i & 1) * 2] = Half::pack(e0, e1);
    p[i >> 1][(i & 1) * 2 + 1] = Half::pack(e2, e3);
  }
}

// o += P V of a tile.
template <int D, int BLOCKS>
DEV void accumulate(float (&o)[BLOCKS][D / 8][4], const uint32_t (&p)[BLOCKS][4][4], uint32_t v_at, int lane) {
#pragma unroll
  for (int k = 0; k < 4; k++)
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
      uint32_t b[4];
      ldmatrix4_trans(b, v_at + swizzled<D>(16 * k + (lane & 15), 2 * i + (lane >> 4)));
#pragma unroll
      for (int m = 0; m < BLOCKS; m++) {
        mma_f16(o[m][2 * i], p[m][k], b[0], b[1]);
        mma_f16(o[m][2 * i + 1], p[m][k], b[2], b[3]);
      }
    }
}

// store(row, column, x, y) stores two neighbouring outputs. Other arguments as below. The phases are functions, and not
// members of a struct, with which ptxas runs out of registers on 7.5, 10.0 and 12.0.
template <int D, bool LOCAL, class Store>
DEV void attend(const uint16_t* Q, const uint16_t* K, const uint16_t* V, int n, int q0, int group, int64_t q_row,
                int64_t kv_row, float scale_log2, int reach, Store store) {
  constexpr int BLOCKS = D > 128 ? 1 : 2, ROWS = 64 * BLOCKS;  // blocks of 16 rows of a warp
  constexpr int PIECES = D / 8, K_AT = ROWS * 2 * D, V_AT = K_AT + KEYS * 2 * D;
  static_assert(V_AT + KEYS * 2 * D == (D > 128 ? PROMPT_MMA_CHANNEL_256 : PROMPT_MMA_CHANNEL) * D);
  extern __shared__ __align__(128) char raw[];
  const uint32_t base = shared_address(raw);
  const Place place = place_of_block<ROWS>(n, group);
  const int row0 = place.row0, head = place.head;
  const int first_key = LOCAL ? first_visible(q0 + row0, reach) / KEYS * KEYS : 0;
  const int tiles = (q0 + min(row0 + ROWS, n) - 1 - first_key) / KEYS + 1;
  const int keys = q0 + n, t = threadIdx.x, lane = t & 31, warp = t >> 5, piece = t % PIECES;
  auto load = [&](uint32_t dst, const uint16_t* src, int64_t stride, int first, int end, int rows) {
    for (int i = t / PIECES; i < rows; i += THREADS / PIECES)
      copy16_or_zero(dst + swizzled<D>(i, piece), src + (int64_t)min(first + i, end - 1) * stride + piece * 8,
                     first + i < end);
    copy_commit();
  };
  const uint16_t *k_head = K + place.kv_head * D, *v_head = V + place.kv_head * D;
  const uint32_t q_at = base + warp * 16 * BLOCKS * 2 * D, k_at = base + K_AT, v_at = base + V_AT;
  load(base, Q + head * D, q_row, row0, n, ROWS);
  load(k_at, k_head, kv_row, first_key, keys, KEYS);
  // A thread has rows query + 16 m + 8 h, h in {0, 1}, of each block m of 16 rows. `unmasked` and `shown` as in
  // `wgmma_attention`, for the warp's rows.
  const int first_row = q0 + row0 + warp * 16 * BLOCKS;
  const int query = first_row + (lane >> 2);
  const int unmasked = (first_row + 1 - first_key) / KEYS;
  const int shown = LOCAL ? (first_visible(first_row + 16 * BLOCKS - 1, reach) - first_key + KEYS - 1) / KEYS : 0;
  float o[BLOCKS][D / 8][4], top[BLOCKS][2], sum[BLOCKS][2];
#pragma unroll
  for (int i = 0; i < BLOCKS * D / 2; i++) (&o[0][0][0])[i] = 0;
#pragma unroll
  for (int i = 0; i < 2 * BLOCKS; i++) {
    top[i >> 1][i & 1] = LOG_ZERO;
    sum[i >> 1][i & 1] = 0;
  }
  for (int j = 0; j < tiles; j++) {
    arrived();  // K of tile j; V of tile j - 1 has been used
    load(v_at, v_head, kv_row, first_key + j * KEYS, keys, KEYS);
    float s[BLOCKS][8][4];
    score<D, BLOCKS>(s, q_at, k_at, lane);
    arrived();  // V of tile j; K of tile j has been used
    if (j + 1 < tiles) load(k_at, k_head, kv_row, first_key + (j + 1) * KEYS, keys, KEYS);
    if (j >= unmasked || (LOCAL && j < shown)) {
#pragma unroll
      for (int i = 0; i < 32 * BLOCKS; i++) {
        const int key = first_key + j * KEYS + (i >> 2 & 7) * 8 + (lane & 3) * 2 + (i & 1);
        const int row = query + (i >> 5) * 16 + (i & 2) * 4;
        if (key > row || (LOCAL && key <= row - reach)) s[i >> 5][i >> 2 & 7][i & 3] = hidden_score<LOCAL>();
      }
    }
    uint32_t p[BLOCKS][4][4];
#pragma unroll
    for (int m = 0; m < BLOCKS; m++) softmax<D>(s[m], p[m], o[m], top[m], sum[m], scale_log2);
    accumulate<D, BLOCKS>(o, p, v_at, lane);
  }
  // ---- O / sum ----
#pragma unroll
  for (int m = 0; m < BLOCKS; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float total = sum[m][h];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      const float f = 1.f / total;
      const int row = row0 + warp * 16 * BLOCKS + 16 * m + 8 * h + (lane >> 2);
      if (row < n)
#pragma unroll
        for (int i = 0; i < D / 8; i++)
          store(row, head * D + (lane & 3) * 2 + 8 * i, o[m][i][2 * h] * f, o[m][i][2 * h + 1] * f);
    }
}

}  // namespace mma_attention

// prefill_attend_{64,128,256}_{bf16,f16}(Q, K, V, O, n, q0, group, q_row, kv_row, o_row, scale_log2, reach),
// prefill_attend_{64,128,256}_local_*: the suffix is O's type. q_row, kv_row and o_row are row strides in elements; a
// head's channels are contiguous and 16-byte aligned. scale_log2 = scale * log2(e); `reach` is read by local kernels.
// Grid ceil(n / 128) * heads, or with 256 channels ceil(n / 64) * heads; PROMPT_MMA_THREADS threads; dynamic shared
// memory as above.
#define KERNEL_OF(NAME, D, T, LOCAL)                                                                                \
  extern "C" __global__ void __launch_bounds__(mma_attention::THREADS, D > 128 ? 1 : 2)                             \
      prefill_attend_##NAME(const uint16_t* Q, const uint16_t* K, const uint16_t* V, uint16_t* O, int n, int q0,    \
                            int group, int64_t q_row, int64_t kv_row, int64_t o_row, float scale_log2, int reach) { \
    mma_attention::attend<D, LOCAL>(                                                                                \
        Q, K, V, n, q0, group, q_row, kv_row, scale_log2, reach,                                                    \
        [&](int row, int column, float x, float y) { *(uint32_t*)(O + row * o_row + column) = T::pack(x, y); });    \
  }
#define ENTRY(D, NAME, T) KERNEL_OF(D##_##NAME, D, T, false) KERNEL_OF(D##_local_##NAME, D, T, true)
#if !defined(__CUDA_ARCH_FEAT_SM90_ALL)
ENTRY(64, bf16, Bf16)
ENTRY(64, f16, Half)
ENTRY(128, bf16, Bf16)
ENTRY(128, f16, Half)
#endif
#ifdef QS_SM80  // elsewhere heads of 256 channels are refused
ENTRY(256, bf16, Bf16)
ENTRY(256, f16, Half)
#endif
