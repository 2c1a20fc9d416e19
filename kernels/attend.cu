// Decode attention, merging, and the choice of pages. All kernels exist on every architecture, those for heads
// of 256 channels from 8.0 on.
#include "attend.cuh"
#include "numbers.cuh"
#include "panel.cuh"

// attend_{upper,both,full}_{64,128,256}_{ROWS}(AttendArgs), attend_half_{64,128}_{ROWS} (half an SM): up to ROWS query
// rows per KV head. Threads and shared memory are columns of the table (`ATTEND_KERNEL`). The number of warpgroups
// affects the order of a row's sums, so it is fixed per view and head width.
#define ATTEND(name, D, VIEW, ROWS, WARPGROUPS, STAGES, PER_SM, HALF_SM, BLOCK, STAGE_BYTES, SHARED) \
  ATTEND_KERNEL(name, PER_SM, BLOCK, STAGE_BYTES, SHARED, D, VIEW, ROWS, WARPGROUPS, STAGES, HALF_SM)
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Grid min(items, SMs); 128 threads and one producer warp per warpgroup; if registers are handed over, one
// group of 128 producer threads.
ATTEND(attend_upper_64_4, 64, UPPER, 4, 4, 4, 1, false, 640, 18432, 14496)
ATTEND(attend_upper_64_8, 64, UPPER, 8, 4, 4, 1, false, 640, 18432, 15168)
ATTEND(attend_upper_64_16, 64, UPPER, 16, 4, 4, 1, false, 640, 18432, 38016)
ATTEND(attend_half_64_4, 64, UPPER, 4, 2, 8, 1, true, 384, 9216, 7776)
ATTEND(attend_half_64_8, 64, UPPER, 8, 2, 8, 1, true, 384, 9216, 8128)
ATTEND(attend_half_128_4, 128, UPPER, 4, 2, 5, 1, true, 384, 17408, 10848)
ATTEND(attend_half_128_8, 128, UPPER, 8, 2, 5, 1, true, 384, 17408, 11200)
ATTEND(attend_both_64_8, 64, BOTH, 8, 3, 4, 1, false, 480, 26112, 11648)
ATTEND(attend_both_64_16, 64, BOTH, 16, 3, 4, 1, false, 480, 26112, 29056)
ATTEND(attend_both_64_24, 64, BOTH, 24, 3, 4, 1, false, 512, 26112, 34176)
ATTEND(attend_both_64_32, 64, BOTH, 32, 3, 4, 1, false, 512, 26112, 51584)
ATTEND(attend_full_64_8, 64, FULL, 8, 3, 4, 1, false, 480, 24576, 8576)
ATTEND(attend_full_64_16, 64, FULL, 16, 3, 4, 1, false, 480, 24576, 16768)
ATTEND(attend_full_64_32, 64, FULL, 32, 3, 4, 1, false, 512, 24576, 33152)
ATTEND(attend_upper_128_4, 128, UPPER, 4, 4, 4, 1, false, 640, 34816, 19616)
ATTEND(attend_upper_128_8, 128, UPPER, 8, 4, 4, 1, false, 640, 34816, 20288)
ATTEND(attend_upper_128_16, 128, UPPER, 16, 4, 4, 1, false, 640, 34816, 48256)
ATTEND(attend_both_128_8, 128, BOTH, 8, 3, 3, 1, false, 480, 50688, 15744)
ATTEND(attend_both_128_16, 128, BOTH, 16, 3, 3, 1, false, 480, 50688, 37248)
ATTEND(attend_both_128_24, 128, BOTH, 24, 3, 3, 1, false, 512, 50688, 46464)
ATTEND(attend_both_128_32, 128, BOTH, 32, 3, 3, 1, false, 512, 50688, 67968)
ATTEND(attend_full_128_8, 128, FULL, 8, 3, 4, 1, false, 480, 49152, 15744)
ATTEND(attend_full_128_16, 128, FULL, 16, 3, 4, 1, false, 480, 49152, 31104)
ATTEND(attend_full_128_32, 128, FULL, 32, 3, 3, 1, false, 512, 49152, 61824)
ATTEND(attend_upper_256_4, 256, UPPER, 4, 3, 3, 1, false, 512, 52224, 29568)
ATTEND(attend_upper_256_8, 256, UPPER, 8, 3, 3, 1, false, 512, 52224, 30080)
ATTEND(attend_upper_256_16, 256, UPPER, 16, 3, 3, 1, false, 512, 52224, 59776)
ATTEND(attend_both_256_8, 256, BOTH, 8, 2, 3, 1, false, 384, 67584, 21440)
ATTEND(attend_both_256_16, 256, BOTH, 16, 2, 2, 1, false, 384, 67584, 42624)
ATTEND(attend_both_256_24, 256, BOTH, 24, 2, 2, 1, false, 384, 67584, 63808)
ATTEND(attend_both_256_32, 256, BOTH, 32, 2, 2, 1, false, 384, 67584, 84992)
ATTEND(attend_full_256_8, 256, FULL, 8, 2, 3, 1, false, 384, 65536, 21440)
ATTEND(attend_full_256_16, 256, FULL, 16, 2, 2, 1, false, 384, 65536, 42624)
ATTEND(attend_full_256_32, 256, FULL, 32, 2, 2, 1, false, 384, 65536, 84992)
#else
// Grid items, 128 threads.
ATTEND(attend_upper_64_4, 64, UPPER, 4, 1, 0, 4, false, 128, 4608, 4288)
ATTEND(attend_upper_64_8, 64, UPPER, 8, 1, 0, 4, false, 128, 4608, 4480)
ATTEND(attend_upper_64_16, 64, UPPER, 16, 1, 0, 3, false, 128, 4608, 11008)
ATTEND(attend_both_64_8, 64, BOTH, 8, 1, 0, 3, false, 128, 8704, 4480)
ATTEND(attend_both_64_16, 64, BOTH, 16, 1, 0, 3, false, 128, 8704, 11008)
ATTEND(attend_both_64_24, 64, BOTH, 24, 1, 0, 3, false, 128, 8704, 13440)
ATTEND(attend_both_64_32, 64, BOTH, 32, 1, 0, 2, false, 128, 8704, 19968)
ATTEND(attend_full_64_8, 64, FULL, 8, 1, 0, 3, false, 128, 8192, 2432)
ATTEND(attend_full_64_16, 64, FULL, 16, 1, 0, 3, false, 128, 8192, 5888)
ATTEND(attend_full_64_32, 64, FULL, 32, 1, 0, 2, false, 128, 8192, 10752)
ATTEND(attend_upper_128_4, 128, UPPER, 4, 1, 0, 4, false, 128, 8704, 6336)
ATTEND(attend_upper_128_8, 128, UPPER, 8, 1, 0, 4, false, 128, 8704, 6528)
ATTEND(attend_upper_128_16, 128, UPPER, 16, 1, 0, 3, false, 128, 8704, 15104)
ATTEND(attend_both_128_8, 128, BOTH, 8, 1, 0, 3, false, 128, 16896, 6528)
ATTEND(attend_both_128_16, 128, BOTH, 16, 1, 0, 3, false, 128, 16896, 15104)
ATTEND(attend_both_128_24, 128, BOTH, 24, 1, 0, 2, false, 128, 16896, 19584)
ATTEND(attend_both_128_32, 128, BOTH, 32, 1, 0, 2, false, 128, 16896, 28160)
ATTEND(attend_full_128_8, 128, FULL, 8, 1, 0, 3, false, 128, 16384, 3456)
ATTEND(attend_full_128_16, 128, FULL, 16, 1, 0, 3, false, 128, 16384, 7936)
ATTEND(attend_full_128_32, 128, FULL, 32, 1, 0, 2, false, 128, 16384, 14848)
#ifdef QS_SM80  // elsewhere heads of 256 channels are refused
ATTEND(attend_upper_256_4, 256, UPPER, 4, 1, 0, 2, false, 128, 17408, 10432)
ATTEND(attend_upper_256_8, 256, UPPER, 8, 1, 0, 2, false, 128, 17408, 10624)
ATTEND(attend_upper_256_16, 256, UPPER, 16, 1, 0, 2, false, 128, 17408, 23296)
ATTEND(attend_both_256_8, 256, BOTH, 8, 1, 0, 2, false, 128, 33792, 10624)
ATTEND(attend_both_256_16, 256, BOTH, 16, 1, 0, 2, false, 128, 33792, 23296)
ATTEND(attend_both_256_24, 256, BOTH, 24, 1, 0, 1, false, 128, 33792, 31872)
ATTEND(attend_both_256_32, 256, BOTH, 32, 1, 0, 1, false, 128, 33792, 44544)
ATTEND(attend_full_256_8, 256, FULL, 8, 1, 0, 2, false, 128, 32768, 5504)
ATTEND(attend_full_256_16, 256, FULL, 16, 1, 0, 2, false, 128, 32768, 12032)
ATTEND(attend_full_256_32, 256, FULL, 32, 1, 0, 1, false, 128, 32768, 23040)
#endif
#endif

// ---- merging the items of a row ----
//
// merge_{bf16,f16,f32,i8}(MergeArgs), merge_wide_*: grid (heads * D / 128 rounded up, rows of the slice), 128 threads.
// Writes the input of the output projection: x [row][pitch], or for drafts int8 codes in x and their scales and sums in
// xs (panel.cuh). Warp w adds items w, w + 4, ..., then the four warps are added in order. A row's number of items
// depends on its position alone; an item without visible tokens has weight 0 and changes nothing. A few blocks fit next
// to those of `attend`, which leave 4,096 registers. merge_wide_*, for more blocks than SMs, has more items in flight.
constexpr int MERGE_WARPS = 4, MERGE_SHARED = 3072;  // MERGE_SHARED: bytes of static shared memory
// The items of a row. first: its first partial row; items: per KV head; total: query rows of its span.
struct Merged {
  int first, items, total, unused;
};
struct MergeArgs {
  const Merged* rows;      // of the slice: the rows of one launch
  const float* partial;    // as AttendArgs
  const float2* extremes;  // as AttendArgs
  void* x;                 // x and xs: of the step's row 0
  float2* xs;
  int kv_heads, group, head_dim;
  int pitch;      // of x, in elements
  int first_row;  // the step's row at which the slice begins
  int panels;     // panel.cuh
};

// Stores four channels of a row's input of the output projection, or its int8 codes. `inside`: the row has them.
template <class Out>
DEV void store_merged(const MergeArgs& p, float4 out, int row, int channel, bool inside, int lane) {
  if constexpr (Out::BYTES == 1) {
    const Int8Group codes = int8_group(out);
    const size_t index = input_index(row, blockIdx.x, p.pitch / 128, p.panels);
    *reinterpret_cast<uint32_t*>(static_cast<int8_t*>(p.x) + index * 128 + input_code(row, lane, p.panels)) =
        codes.codes;
    if (lane == 0) p.xs[index] = make_float2(codes.scale, codes.sum);
  } else if constexpr (Out::BYTES == 4) {
    if (inside) *reinterpret_cast<float4*>(static_cast<float*>(p.x) + (size_t)row * p.pitch + channel) = out;
  } else if (inside) {
    uint32_t* x = reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.x) + (size_t)row * p.pitch + channel);
    x[0] = Out::Element::pack(out.x, out.y);
    x[1] = Out::Element::pack(out.z, out.w);
  }
}

// IN_FLIGHT: items that a warp loads at a time.
template <class Out, int IN_FLIGHT>
DEV void merge(const MergeArgs& p) {
  __shared__ float4 sums[MERGE_WARPS][32];
  __shared__ float2 heads[MERGE_WARPS][32];
  static_assert(sizeof(sums) + sizeof(heads) == MERGE_SHARED);
  const int warp = threadIdx.x >> 5;
  const int lane = threadIdx.x & 31;
  const int channel = blockIdx.x * 128 + lane * 4;
  const int row = p.first_row + blockIdx.y;
  grid_trigger();
  const int4 merged = *reinterpret_cast<const int4*>(p.rows + blockIdx.y);  // complete before the step
  const int items = merged.y, total = merged.z;
  const int query_heads = p.kv_heads * p.group, head = min(query_heads - 1, channel / p.head_dim);
  const size_t first = (size_t)merged.x + (size_t)(head / p.group) * items * total + head % p.group;
  const float* outputs = p.partial + first * p.head_dim + channel % p.head_dim;
  const float2* extremes = p.extremes + first;
  grid_wait();
  // Each warp has its own running maximum; they are combined at the end, so no warp waits for the row's maximum.
  float4 sum = make_float4(0, 0, 0, 0);
  float top = LOG_ZERO, l = 0;
#pragma unroll 1
  for (int start = warp; start < items; start += IN_FLIGHT * MERGE_WARPS) {
    float4 v[IN_FLIGHT];
    float2 m[IN_FLIGHT];  // {maximum, sum}
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; i++) {
      const int item = (start + i * MERGE_WARPS) * total;
      v[i] = make_float4(0, 0, 0, 0);
      m[i] = make_float2(LOG_ZERO, 0);
      if (start + i * MERGE_WARPS < items) {
        m[i] = __ldcg(extremes + item);
        v[i] = __ldcg(reinterpret_cast<const float4*>(outputs + (size_t)item * p.head_dim));
      }
    }
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; i++) {
      // One item after another, so that the number of items in flight does not affect a bit.
      const float now = fmaxf(top, m[i].x);
      const float old = exp2_fast(__fadd_rn(top, -now));
      const float a = exp2_fast(__fadd_rn(m[i].x, -now));
      top = now;
      l = __fmaf_rn(a, m[i].y, __fmul_rn(l, old));
      sum.x = __fmaf_rn(a, v[i].x, __fmul_rn(sum.x, old));
      sum.y = __fmaf_rn(a, v[i].y, __fmul_rn(sum.y, old));
      sum.z = __fmaf_rn(a, v[i].z, __fmul_rn(sum.z, old));
      sum.w = __fmaf_rn(a, v[i].w, __fmul_rn(sum.w, old));
    }
  }
  // ---- the warps, in order ----
  sums[warp][lane] = sum;
  heads[warp][lane] = make_float2(top, l);
  __syncthreads();
  if (warp) return;
#pragma unroll
  for (int w = 1; w < MERGE_WARPS; w++) top = fmaxf(top, heads[w][lane].x);
  l = 0;
  sum = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int w = 0; w < MERGE_WARPS; w++) {
    const float4 v = sums[w][lane];
    const float2 m = heads[w][lane];
    const float a = exp2_fast(__fadd_rn(m.x, -top));
    l = __fmaf_rn(a, m.y, l);
    sum.x = __fmaf_rn(a, v.x, sum.x);
    sum.y = __fmaf_rn(a, v.y, sum.y);
    sum.z = __fmaf_rn(a, v.z, sum.z);
    sum.w = __fmaf_rn(a, v.w, sum.w);
  }
  // ---- the output projection's input ----
  const bool inside = channel < query_heads * p.head_dim;
  const float inverse = inside ? __frcp_rn(l) : 0.f;
  const float4 out = make_float4(__fmul_rn(sum.x, inverse), __fmul_rn(sum.y, inverse), __fmul_rn(sum.z, inverse),
                                 __fmul_rn(sum.w, inverse));
  store_merged<Out>(p, out, row, channel, inside, lane);
}
template <class E, int B>
struct Output {
  typedef E Element;
  static constexpr int BYTES = B;
};
#define MERGE(name, E, BYTES)                                                                                       \
  KERNEL __maxnreg__(32) merge_##name(const __grid_constant__ MergeArgs args) { merge<Output<E, BYTES>, 2>(args); } \
  KERNEL __launch_bounds__(128, 8) merge_wide_##name(const __grid_constant__ MergeArgs args) {                      \
    merge<Output<E, BYTES>, 4>(args);                                                                               \
  }
MERGE(bf16, Bf16, 2)
MERGE(f16, Half, 2)
MERGE(f32, Single, 4)
MERGE(i8, int8_t, 1)

// ---- choosing pages for a draft ----
//
// bounds_{HEADS}_{U}(upper, tables, table_pitch, q, choices, scores, score_pitch, ...): scores of pages. The score of a
// page is the largest upper bound of q . k over the heads of a group (core::attend::page_bound). The bound is the sum
// over channels of max(q lo, q hi), lo and hi being the values of codes 0 and 15. It equals
// q (lo + hi) / 2 + |q| (hi - lo) / 2.
//
//     upper    the layer's upper blocks [page][kv head]
//     tables   [slot][table_pitch] logical -> physical page
//     q        f16 [row][heads][d]
//     choices  [list]
//     scores   f32 [.][kv head][score_pitch]
//
// A page takes d / 8 lanes of eight channels each, and each lane has U pages: 2,048 U / d pages per block. HEADS heads
// are processed together, 1 for a single query head per KV head. Grid (blocks, kv heads, lists), CHOICE_THREADS
// threads, no shared memory. Pages were complete before the step, so their parameters are loaded before q is ready.
//
// Neither this nor `select` is unrolled further: a step runs each once per layer, with cold instruction caches, and
// more code would take longer to load than it saves.
constexpr int CHOICE_THREADS = 256;  // of a block of bounds_* and of select
// A list to make, written by the host.
struct PageChoice {
  int row, slot;  // row of q
  int pages;      // visible, at least one
  int scored;     // how many of them are chosen among; all later ones are listed
  int scores;     // index of the list's scores
};
// The maximum of `best` and of HEADS heads' bounds of a page, in every lane of the page. Each of its `lanes` lanes has
// eight channels: q of each head, scales and zero points. Codes stand for U s + z - centre s.
template <int HEADS>
DEV float page_bound(const float2 (&q)[HEADS][4], uint4 scale, uint4 zero, float centre, int lanes, int lane,
                     float best) {
  const uint32_t scales[4] = {scale.x, scale.y, scale.z, scale.w}, zeros[4] = {zero.x, zero.y, zero.z, zero.w};
  float sum[HEADS] = {};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 s = unpack_half2(scales[i]), z = unpack_half2(zeros[i]);
    const float2 middle = make_float2(__fmaf_rn(7.5f - centre, s.x, z.x), __fmaf_rn(7.5f - centre, s.y, z.y));
    const float2 half = make_float2(7.5f * s.x, 7.5f * s.y);
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
      sum[h] = __fmaf_rn(q[h][i].x, middle.x, __fmaf_rn(fabsf(q[h][i].x), half.x, sum[h]));
      sum[h] = __fmaf_rn(q[h][i].y, middle.y, __fmaf_rn(fabsf(q[h][i].y), half.y, sum[h]));
    }
  }
  if constexpr (HEADS == 1) {
    for (int step = lanes / 2; step; step >>= 1) sum[0] = __fadd_rn(sum[0], __shfl_xor_sync(~0u, sum[0], step));
    return fmaxf(best, sum[0]);
  } else {
    // Reduces four sums over the lanes: each half continues with two, each quarter with one; then the maximum.
    static_assert(HEADS == 4, "four sums for four quarters");
    const bool half = lane & lanes / 2, quarter = lane & lanes / 4;
    const float a = __fadd_rn(half ? sum[2] : sum[0], __shfl_xor_sync(~0u, half ? sum[0] : sum[2], lanes / 2));
    const float b = __fadd_rn(half ? sum[3] : sum[1], __shfl_xor_sync(~0u, half ? sum[1] : sum[3], lanes / 2));
    float one = __fadd_rn(quarter ? b : a, __shfl_xor_sync(~0u, quarter ? a : b, lanes / 4));
    for (int step = lanes / 8; step; step >>= 1) one = __fadd_rn(one, __shfl_xor_sync(~0u, one, step));
    one = fmaxf(one, __shfl_xor_sync(~0u, one, lanes / 4));
    return fmaxf(best, fmaxf(one, __shfl_xor_sync(~0u, one, lanes / 2)));
  }
}
template <int HEADS, int U>
DEV void bounds(const uint8_t* upper, const int* tables, int table_pitch, const __half* q, const PageChoice* choices,
                float* scores, int score_pitch, int kv_heads, int group, int d, float centre) {
  grid_trigger();
  const PageChoice choice = choices[blockIdx.z];
  const int lanes = d / 8, lane = threadIdx.x & (lanes - 1);
  const int across = CHOICE_THREADS / lanes;  // pages that a block has at a time
  const int head = blockIdx.y;
  const int first = blockIdx.x * U * across + threadIdx.x / lanes;
  int id[U];
  uint4 scale[U], zero[U];  // of channels 32 (lane / 4) + 2 (lane % 4) + {0, 1, 8, 9, 16, 17, 24, 25}
#pragma unroll
  for (int u = 0; u < U; u++)
    id[u] = tables[(size_t)choice.slot * table_pitch + min(first + u * across, choice.pages - 1)];
#pragma unroll
  for (int u = 0; u < U; u++) {
    const uint8_t* params = upper + ((size_t)id[u] * kv_heads + head) * upper_bytes(d) + lane * 32;
    scale[u] = ldg_plain(params);
    zero[u] = ldg_plain(params + 16);
  }
  grid_wait();
  const __half* row = q + ((size_t)choice.row * kv_heads * group + head * group) * d + lane / 4 * 32 + lane % 4 * 2;
  float best[U];
#pragma unroll
  for (int u = 0; u < U; u++) best[u] = minus_infinity();
#pragma unroll 1
  for (int h = 0; h < group; h += HEADS) {  // if fewer than HEADS heads are left, the last one is repeated
    float2 x[HEADS][4];
#pragma unroll
    for (int i = 0; i < HEADS; i++)
#pragma unroll
      for (int j = 0; j < 4; j++)
        x[i][j] = unpack_half2(__ldcg(reinterpret_cast<const uint32_t*>(row + min(h + i, group - 1) * d + j * 8)));
#pragma unroll
    for (int u = 0; u < U; u++) best[u] = page_bound(x, scale[u], zero[u], centre, lanes, lane, best[u]);
  }
#pragma unroll
  for (int u = 0; u < U; u++) {
    const int page = first + u * across;
    if (lane == 0 && page < choice.pages)
      scores[((size_t)choice.scores * kv_heads + head) * score_pitch + page] = best[u];
  }
}
#define BOUNDS(HEADS, U)                                                                                       \
  KERNEL __launch_bounds__(CHOICE_THREADS) bounds_##HEADS##_##U(                                               \
      const uint8_t* upper, const int* tables, int table_pitch, const __half* q, const PageChoice* choices,    \
      float* scores, int score_pitch, int kv_heads, int group, int d, float centre) {                          \
    bounds<HEADS, U>(upper, tables, table_pitch, q, choices, scores, score_pitch, kv_heads, group, d, centre); \
  }
BOUNDS(1, 4)
BOUNDS(4, 2)
BOUNDS(4, 4)

// select(scores, score_pitch, choices, lists, list_pitch, kv_heads, n): writes lists [slot][kv head][list_pitch],
// ascending. Of the pages chosen among it lists the first, the newest and the n - 2 best others (ties to the lower
// number); it also lists all later pages. Without scores the newest pages are the best. Grid (kv heads, lists),
// CHOICE_THREADS threads, static shared memory.
//
// A page's key is in the order of its score; 0 means no page, and SELECT_ALWAYS a page that is listed in any case.
enum : uint32_t { SELECT_ALWAYS = ~0u };
constexpr int SELECT_KEPT = 2048;  // keys in shared memory; those of longer contexts are recomputed
constexpr int SELECT_SLAB = 1024;  // pages listed at a time, a word of 32 for each lane
// Up to this many pages are ranked by comparing each with every other, which takes fewer barriers than the buckets.
constexpr int SELECT_RANKED = 512;
KERNEL __launch_bounds__(CHOICE_THREADS) select(const float* scores, int score_pitch, const PageChoice* choices,
                                                int* lists, int list_pitch, int kv_heads, int n) {
  __shared__ __align__(16) uint32_t keys[SELECT_KEPT];
  __shared__ uint32_t lowest, highest, overs_all, buckets[3][32], words[2][2][32];
  grid_trigger();
  const PageChoice choice = choices[blockIdx.y];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const float* s = scores + ((size_t)choice.scores * kv_heads + blockIdx.x) * score_pitch;
  int* list = lists + ((size_t)choice.slot * kv_heads + blockIdx.x) * list_pitch;
  // A first pass with dummy keys loads the instructions while the scores are computed. Pays only where kernels overlap.
#ifdef QS_SM90
  const bool waits = scores;
#else
  const bool waits = false;
#endif
#pragma unroll 1
  for (int dry = waits; dry >= 0; dry--) {
    const int pages = dry ? min(choice.pages, 64) : choice.pages, scored = dry ? pages : choice.scored;
    const int wanted_of_scored = dry ? max(pages / 2, 2) : min(n, scored), kept = wanted_of_scored + pages - scored;
    // Zeros differ, as in core's total_cmp.
    auto key_of = [&](int page) -> uint32_t {
      if (page >= pages) return 0;
      if (page == 0 || page >= scored - 1) return SELECT_ALWAYS;
      if (!scores || dry) return page;
      const uint32_t bits = __float_as_uint(__ldcg(s + page));
      return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    };
    __syncthreads();
    // ---- few pages: list those of the highest rank ----
    if (choice.pages <= SELECT_RANKED) {
      const int page_words = (pages + 31) / 32;  // words of 32 pages
      if (!dry) grid_wait();
#pragma unroll 1
      for (int page = threadIdx.x; page < page_words * 32; page += CHOICE_THREADS) keys[page] = key_of(page);
      __syncthreads();
#pragma unroll 1
      for (int word = warp; word < page_words; word += CHOICE_THREADS / 32) {
        const uint32_t own = keys[word * 32 + lane];
        int rank = 0;  // pages above, and ties with a lower number
#pragma unroll 4
        for (int i = 0; i < word * 8; i++) {
          const uint4 k = reinterpret_cast<const uint4*>(keys)[i];
          rank += (k.x >= own) + (k.y >= own) + (k.z >= own) + (k.w >= own);
        }
#pragma unroll 8
        for (int i = 0; i < 32; i++) {
          const uint32_t k = keys[word * 32 + i];
          rank += k > own || (k == own && i < lane);
        }
#pragma unroll 4
        for (int i = word * 8 + 8; i < page_words * 8; i++) {
          const uint4 k = reinterpret_cast<const uint4*>(keys)[i];
          rank += (k.x > own) + (k.y > own) + (k.z > own) + (k.w > own);
        }
        const uint32_t chosen = __ballot_sync(~0u, word * 32 + lane < pages && (own == SELECT_ALWAYS || rank < kept));
        if (lane == 0) words[0][0][word] = chosen;
      }
      __syncthreads();
#pragma unroll 1
      for (int word = warp; word < page_words; word += CHOICE_THREADS / 32) {
        const uint32_t chosen = words[0][0][word];
        const int before = warp_sum(lane < word ? __popc(words[0][0][lane]) : 0);
        if (!dry && chosen >> lane & 1) list[before + __popc(chosen & ((1u << lane) - 1))] = word * 32 + lane;
      }
      continue;
    }
    // ---- many pages: keys and their range ----
    if (threadIdx.x < 32) buckets[0][lane] = 0;
    if (threadIdx.x == 0) {
      lowest = ~0u;
      highest = 0;
      overs_all = 0;
    }
    __syncthreads();
    if (!dry) grid_wait();
    uint32_t low = ~0u, high = 0;
#pragma unroll 1
    for (int page = threadIdx.x; page < pages; page += CHOICE_THREADS) {
      const uint32_t key = key_of(page);
      if (page < SELECT_KEPT) keys[page] = key;
      if (key != SELECT_ALWAYS) {
        low = min(low, key);
        high = max(high, key);
      }
    }
    low = warp_min(low);
    high = warp_max(high);
    if (lane == 0) {
      atomicMin(&lowest, low);
      atomicMax(&highest, high);
    }
    __syncthreads();
    auto key = [&](int page) { return page < SELECT_KEPT ? keys[page] : key_of(page); };

    // ---- the smallest key that is kept: at least `kept` pages have it or a larger one ----
    //
    // The range of keys is split into 32 buckets, then the bucket with the smallest kept key is split again, until the
    // kept pages are separated.
    const int wanted = wanted_of_scored - 2;  // in addition to the first and the newest
    uint32_t least = wanted > 0 ? lowest : SELECT_ALWAYS - 1;
    if (wanted > 0 && kept < pages) {
      // `above`: pages in higher buckets of earlier turns. A bucket is 32 of the next turn's.
      int above = 0, shift = (31 - __clz(highest - least | 1)) / 5 * 5;
#pragma unroll 1
      for (int turn = 0;; turn = turn == 2 ? 0 : turn + 1, shift -= 5) {
#pragma unroll 1
        for (int page = threadIdx.x; page < pages; page += CHOICE_THREADS) {
          const uint32_t k = key(page), bucket = (k - least) >> shift;
          if (k >= least && k != SELECT_ALWAYS && bucket < 32) atomicAdd(&buckets[turn][bucket], 1);
        }
        if (threadIdx.x < 32) buckets[turn == 2 ? 0 : turn + 1][lane] = 0;  // not read before the next barrier
        __syncthreads();
        // Pages in this lane's bucket and above, and the highest bucket that has enough pages.
        const int own = buckets[turn][lane];
        int sum = own;
#pragma unroll
        for (int step = 1; step < 32; step <<= 1) {
          const int higher = __shfl_down_sync(~0u, sum, step);
          if (lane + step < 32) sum += higher;
        }
        const int bucket = 31 - __clz(__ballot_sync(~0u, above + sum >= wanted));
        least += (uint32_t)bucket << shift;
        const int together = above + __shfl_sync(~0u, sum, bucket);
        above = together - __shfl_sync(~0u, own, bucket);
        if (shift == 0 || together == wanted) break;
      }
    }
    // ---- list the pages with a larger key, and in page order the needed number of ties ----
    int over = 0;
#pragma unroll 1
    for (int page = threadIdx.x; page < pages; page += CHOICE_THREADS) over += key(page) > least;
    over = warp_sum(over);
    if (lane == 0) atomicAdd(&overs_all, (uint32_t)over);
    int before = 0, before_ties = 0, turn = 0;
#pragma unroll 1
    for (int slab = 0; slab < pages; slab += SELECT_SLAB, turn ^= 1) {
#pragma unroll 1
      for (int word = warp; word < 32; word += CHOICE_THREADS / 32) {
        const int page = slab + word * 32 + lane;
        const uint32_t k = page < pages ? key(page) : 0;
        const uint32_t overs = __ballot_sync(~0u, k > least), equals = __ballot_sync(~0u, k == least);
        if (lane == 0) {
          words[turn][0][word] = overs;
          words[turn][1][word] = equals;
        }
      }
      __syncthreads();
      const int ties = kept - (int)overs_all;
      const uint32_t lower = (1u << lane) - 1;
      // Low half: pages above; high half: ties; both counted up to this lane's word.
      const uint32_t own = __popc(words[turn][0][lane]) | __popc(words[turn][1][lane]) << 16;
      uint32_t sum = own;
#pragma unroll
      for (int step = 1; step < 32; step <<= 1) {
        const uint32_t earlier = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += earlier;
      }
#pragma unroll 1
      for (int word = warp; word < 32; word += CHOICE_THREADS / 32) {
        const uint32_t ahead = __shfl_sync(~0u, sum - own, word);
        const uint32_t overs = words[turn][0][word];
        const uint32_t equals = words[turn][1][word];
        const int tie = before_ties + (ahead >> 16) + __popc(equals & lower);
        const bool is_over = overs >> lane & 1, is_tie = equals >> lane & 1;
        if (!dry && (is_over || (is_tie && tie < ties)))
          list[before + (ahead & 0xffff) + __popc(overs & lower) + min(tie, ties)] = slab + word * 32 + lane;
      }
      const uint32_t slab_total = __shfl_sync(~0u, sum, 31);
      before += slab_total & 0xffff;
      before_ties += slab_total >> 16;
    }
  }
}
