// Decode attention and what belongs to it. Entries exist on every architecture.
#include "attend.cuh"
#include "numbers.cuh"

// attend_{upper,both,full}_{64,128,256}_{NT}(AttendArgs): NT row tiles of eight; see the table below for threads and shared memory (crates/quantspec-cuda/
// src/attend.rs computes the same). Rings belong to the order of a row's sums: one number per view and head width.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define REGISTERS(C, PER_SM) __maxnreg__((C::ENTRY))
#else
#define REGISTERS(C, PER_SM) __launch_bounds__(128, PER_SM)
#endif
#define ATTEND(name, D, VIEW, NT, RINGS, STAGES, PER_SM, ...)                                             \
  struct name##_of : Attend<D, VIEW, NT, RINGS, STAGES, ##__VA_ARGS__> {};                                \
  KERNEL REGISTERS(name##_of, PER_SM) name(const __grid_constant__ AttendArgs args) {                     \
    extern __shared__ __align__(128) uint8_t shared[];                                                    \
    attend<name##_of>(args, shared);                                                                      \
  }
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// grid min(items, multiprocessors); 128 threads a ring and one producer warp each, or one group of 128 more where registers are handed over
ATTEND(attend_upper_64_1, 64, UPPER, 1, 4, 4, 1)
ATTEND(attend_beside_64, 64, UPPER, 1, 2, 8, 1, true)
ATTEND(attend_beside_128, 128, UPPER, 1, 2, 5, 1, true)
ATTEND(attend_upper_64_2, 64, UPPER, 2, 4, 4, 1)
ATTEND(attend_both_64_1, 64, BOTH, 1, 3, 4, 1)
ATTEND(attend_both_64_2, 64, BOTH, 2, 3, 4, 1)
ATTEND(attend_both_64_3, 64, BOTH, 3, 3, 4, 1)
ATTEND(attend_both_64_4, 64, BOTH, 4, 3, 4, 1)
ATTEND(attend_full_64_1, 64, FULL, 1, 3, 4, 1)
ATTEND(attend_full_64_2, 64, FULL, 2, 3, 4, 1)
ATTEND(attend_full_64_4, 64, FULL, 4, 3, 4, 1)
ATTEND(attend_upper_128_1, 128, UPPER, 1, 4, 4, 1)
ATTEND(attend_upper_128_2, 128, UPPER, 2, 4, 4, 1)
ATTEND(attend_both_128_1, 128, BOTH, 1, 3, 3, 1)
ATTEND(attend_both_128_2, 128, BOTH, 2, 3, 3, 1)
ATTEND(attend_both_128_3, 128, BOTH, 3, 3, 3, 1)
ATTEND(attend_both_128_4, 128, BOTH, 4, 3, 3, 1)
ATTEND(attend_full_128_1, 128, FULL, 1, 3, 4, 1)
ATTEND(attend_full_128_2, 128, FULL, 2, 3, 4, 1)
ATTEND(attend_full_128_4, 128, FULL, 4, 3, 3, 1)
ATTEND(attend_upper_256_1, 256, UPPER, 1, 3, 3, 1)
ATTEND(attend_upper_256_2, 256, UPPER, 2, 3, 3, 1)
ATTEND(attend_both_256_1, 256, BOTH, 1, 2, 3, 1)
ATTEND(attend_both_256_2, 256, BOTH, 2, 2, 2, 1)
ATTEND(attend_both_256_3, 256, BOTH, 3, 2, 2, 1)
ATTEND(attend_both_256_4, 256, BOTH, 4, 2, 2, 1)
ATTEND(attend_full_256_1, 256, FULL, 1, 2, 3, 1)
ATTEND(attend_full_256_2, 256, FULL, 2, 2, 2, 1)
ATTEND(attend_full_256_4, 256, FULL, 4, 2, 2, 1)
#else
// grid items, 128 threads
ATTEND(attend_upper_64_1, 64, UPPER, 1, 1, 0, 4)
ATTEND(attend_upper_64_2, 64, UPPER, 2, 1, 0, 3)
ATTEND(attend_both_64_1, 64, BOTH, 1, 1, 0, 3)
ATTEND(attend_both_64_2, 64, BOTH, 2, 1, 0, 3)
ATTEND(attend_both_64_3, 64, BOTH, 3, 1, 0, 3)
ATTEND(attend_both_64_4, 64, BOTH, 4, 1, 0, 2)
ATTEND(attend_full_64_1, 64, FULL, 1, 1, 0, 3)
ATTEND(attend_full_64_2, 64, FULL, 2, 1, 0, 3)
ATTEND(attend_full_64_4, 64, FULL, 4, 1, 0, 2)
ATTEND(attend_upper_128_1, 128, UPPER, 1, 1, 0, 4)
ATTEND(attend_upper_128_2, 128, UPPER, 2, 1, 0, 3)
ATTEND(attend_both_128_1, 128, BOTH, 1, 1, 0, 3)
ATTEND(attend_both_128_2, 128, BOTH, 2, 1, 0, 3)
ATTEND(attend_both_128_3, 128, BOTH, 3, 1, 0, 2)
ATTEND(attend_both_128_4, 128, BOTH, 4, 1, 0, 2)
ATTEND(attend_full_128_1, 128, FULL, 1, 1, 0, 3)
ATTEND(attend_full_128_2, 128, FULL, 2, 1, 0, 3)
ATTEND(attend_full_128_4, 128, FULL, 4, 1, 0, 2)
ATTEND(attend_upper_256_1, 256, UPPER, 1, 1, 0, 2)
ATTEND(attend_upper_256_2, 256, UPPER, 2, 1, 0, 2)
ATTEND(attend_both_256_1, 256, BOTH, 1, 1, 0, 2)
ATTEND(attend_both_256_2, 256, BOTH, 2, 1, 0, 2)
ATTEND(attend_both_256_3, 256, BOTH, 3, 1, 0, 1)
ATTEND(attend_both_256_4, 256, BOTH, 4, 1, 0, 1)
ATTEND(attend_full_256_1, 256, FULL, 1, 1, 0, 2)
ATTEND(attend_full_256_2, 256, FULL, 2, 1, 0, 2)
ATTEND(attend_full_256_4, 256, FULL, 4, 1, 0, 1)
#endif

// ---- merging the items of a row ----
// merge_{bf16,f16,f32,i8}(MergeArgs), merge_wide_*: grid (heads * D / 128 rounded up, rows of the pass), 128 threads. Writes the input of the output projection:
// x [row][pitch], or x8 [row][pitch] and xs [row][pitch / 128] for the draft.
// Warp w adds items w, w + 4, ..., then the four warps are added in order. How many items a row has depends on its position alone, and one in which it
// sees nothing has weight 0 and changes nothing.
// Few blocks wait beside those of `attend`, which leave 4,096 registers; where there are more than multiprocessors, merge_wide_* has more items in flight.
constexpr int MERGE_WARPS = 4;
struct Merged { int first, items, total, unused; };       // of a row: its first partial row, items of a KV head, query rows of its span
struct MergeArgs {
  const Merged* rows;                    // of the pass
  const float* partial;
  const float2* extremes;
  void* x;                               // of the step's row 0, as xs
  float2* xs;
  int kv_heads, group, head_dim, pitch, first_row, unused;   // first_row: the step's row that this pass begins with
};

template <class Out, int B>              // B: items in flight
DEV void merge(const MergeArgs& p) {
  __shared__ float4 sums[MERGE_WARPS][32];
  __shared__ float2 heads[MERGE_WARPS][32];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, channel = blockIdx.x * 128 + lane * 4, row = p.first_row + blockIdx.y;
  grid_trigger();
  const int4 m = *reinterpret_cast<const int4*>(p.rows + blockIdx.y);       // complete before the step
  const int items = m.y, total = m.z, all = p.kv_heads * p.group, head = min(all - 1, channel / p.head_dim);
  const size_t base = (size_t)m.x + (size_t)(head / p.group) * items * total + head % p.group;
  const float* o = p.partial + base * p.head_dim + channel % p.head_dim;
  const float2* e = p.extremes + base;
  grid_wait();
  // A warp keeps a running maximum of its own, the maxima meet at the end: nothing waits for the whole row's.
  float4 sum = make_float4(0, 0, 0, 0);
  float top = -1e30f, l = 0;
#pragma unroll 1
  for (int i0 = warp; i0 < items; i0 += B * MERGE_WARPS) {
    float4 v[B];
    float2 m[B];
#pragma unroll
    for (int i = 0; i < B; i++) {
      const int item = (i0 + i * MERGE_WARPS) * total;
      v[i] = make_float4(0, 0, 0, 0), m[i] = make_float2(-1e30f, 0);
      if (i0 + i * MERGE_WARPS < items) m[i] = __ldcg(e + item), v[i] = __ldcg(reinterpret_cast<const float4*>(o + (size_t)item * p.head_dim));
    }
#pragma unroll
    for (int i = 0; i < B; i++) {
      // One item after the other, so that the number of items that are in flight together changes no bit.
      const float now = fmaxf(top, m[i].x), old = exp2_fast(__fadd_rn(top, -now)), a = exp2_fast(__fadd_rn(m[i].x, -now));
      top = now, l = __fmaf_rn(a, m[i].y, __fmul_rn(l, old));
      sum.x = __fmaf_rn(a, v[i].x, __fmul_rn(sum.x, old)), sum.y = __fmaf_rn(a, v[i].y, __fmul_rn(sum.y, old));
      sum.z = __fmaf_rn(a, v[i].z, __fmul_rn(sum.z, old)), sum.w = __fmaf_rn(a, v[i].w, __fmul_rn(sum.w, old));
    }
  }
  sums[warp][lane] = sum, heads[warp][lane] = make_float2(top, l);
  __syncthreads();
  if (warp) return;
#pragma unroll
  for (int w = 1; w < MERGE_WARPS; w++) top = fmaxf(top, heads[w][lane].x);
  l = 0, sum = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int w = 0; w < MERGE_WARPS; w++) {
    const float4 v = sums[w][lane];
    const float2 m = heads[w][lane];
    const float a = exp2_fast(__fadd_rn(m.x, -top));
    l = __fmaf_rn(a, m.y, l);
    sum.x = __fmaf_rn(a, v.x, sum.x), sum.y = __fmaf_rn(a, v.y, sum.y), sum.z = __fmaf_rn(a, v.z, sum.z), sum.w = __fmaf_rn(a, v.w, sum.w);
  }
  const bool there = channel < all * p.head_dim;
  const float over = there ? __frcp_rn(l) : 0.f;
  const float4 out = make_float4(__fmul_rn(sum.x, over), __fmul_rn(sum.y, over), __fmul_rn(sum.z, over), __fmul_rn(sum.w, over));
  if constexpr (Out::BYTES == 1) {
    const Int8Group of = int8_group(out);
    *reinterpret_cast<uint32_t*>(static_cast<int8_t*>(p.x) + (size_t)row * p.pitch + channel) = of.codes;
    if (lane == 0) p.xs[(size_t)row * (p.pitch / 128) + blockIdx.x] = make_float2(of.scale, of.sum);
  } else if constexpr (Out::BYTES == 4) {
    if (there) *reinterpret_cast<float4*>(static_cast<float*>(p.x) + (size_t)row * p.pitch + channel) = out;
  } else if (there) {
    uint32_t* to = reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.x) + (size_t)row * p.pitch + channel);
    to[0] = Out::Element::pack(out.x, out.y), to[1] = Out::Element::pack(out.z, out.w);
  }
}
template <class E, int B>
struct Output {
  typedef E Element;
  static constexpr int BYTES = B;
};
#define MERGE(name, E, BYTES)                                                                                                      \
  KERNEL __maxnreg__(32) merge_##name(const __grid_constant__ MergeArgs args) { merge<Output<E, BYTES>, 2>(args); }                \
  KERNEL __launch_bounds__(128, 8) merge_wide_##name(const __grid_constant__ MergeArgs args) { merge<Output<E, BYTES>, 4>(args); }
MERGE(bf16, Bf16, 2)
MERGE(f16, Half, 2)
MERGE(f32, Single, 4)
MERGE(i8, int8_t, 1)

// ---- choosing pages for a draft ----
// bounds(upper [page][kv head] of one layer, tables, table_pitch, q f16 [row][heads][d], choices [list], scores [list][kv head][score_pitch], ...): the
// score of a page is, over the heads of a group, the largest upper bound of q . k (core::attend::page_bound): sum over channels of max(q lo, q hi),
// lo and hi being the values of codes 0 and 15.
// grid (pages / 8 rounded up, kv heads, lists), 256 threads, one warp per page, d / 8 of its lanes with eight channels each. Pages and their parameters
// were complete before the step, so they are on their way before q is.
struct Choice { int row, slot, pages; };               // the list's row of q, its slot, its visible pages
KERNEL __launch_bounds__(256) bounds(const uint8_t* upper, const int* tables, int table_pitch, const __half* q, const Choice* choices, float* scores, int score_pitch, int kv_heads, int group, int d, float centre) {
  grid_trigger();
  const Choice choice = choices[blockIdx.z];
  const int page = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31, head = blockIdx.y;
  const bool there = page < choice.pages, mine = lane < d / 8;
  float low[8], high[8];
  if (there && mine) {
    const uint8_t* params = upper + ((size_t)tables[(size_t)choice.slot * table_pitch + page] * kv_heads + head) * upper_bytes(d) + lane * 32;
    const uint4 s = ldg_plain(params), z = ldg_plain(params + 16);         // of channels 32 (lane / 4) + 2 (lane % 4) + {0, 1, 8, 9, 16, 17, 24, 25}
    const uint32_t scales[4] = {s.x, s.y, s.z, s.w}, zeros[4] = {z.x, z.y, z.z, z.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 a = unpack_half2(scales[i]), b = unpack_half2(zeros[i]);
      low[2 * i] = __fmaf_rn(-centre, a.x, b.x), low[2 * i + 1] = __fmaf_rn(-centre, a.y, b.y);
      high[2 * i] = __fmaf_rn(15.f, a.x, low[2 * i]), high[2 * i + 1] = __fmaf_rn(15.f, a.y, low[2 * i + 1]);
    }
  }
  grid_wait();
  if (!there) return;
  const __half* row = q + ((size_t)choice.row * kv_heads * group + head * group) * d + lane / 4 * 32 + lane % 4 * 2;
  float best = -1e30f;
#pragma unroll 4
  for (int h = 0; h < group; h++) {
    float sum = 0;
    if (mine)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float2 x = unpack_half2(__ldcg(reinterpret_cast<const uint32_t*>(row + h * d + i * 8)));
        sum += fmaxf(x.x * low[2 * i], x.x * high[2 * i]) + fmaxf(x.y * low[2 * i + 1], x.y * high[2 * i + 1]);
      }
    best = fmaxf(best, warp_sum(sum));
  }
  if (lane == 0) scores[((size_t)blockIdx.z * kv_heads + head) * score_pitch + page] = best;
}

// select(scores, score_pitch, choices, lists, list_pitch, kv_heads, n): the first and the newest page and the n - 2 best of the others (ties to the
// lower number), ascending, into lists [slot][kv head][list_pitch]; without scores the newest are best. grid (kv heads, lists), 256 threads.
// The least key that is kept is found bit by bit, by counting; then pages above it and the first ones that equal it are listed in order.
constexpr int SELECT_WARPS = 8, SELECT_THREADS = SELECT_WARPS * 32;
constexpr int SELECT_KEPT = 8;                          // keys of a thread in registers: contexts of 2,048 pages; the rest are read again
KERNEL __launch_bounds__(SELECT_THREADS) select(const float* scores, int score_pitch, const Choice* choices, int* lists, int list_pitch, int kv_heads, int n) {
  __shared__ uint4 counts[2][SELECT_WARPS];
  grid_trigger();
  const Choice choice = choices[blockIdx.y];
  const int pages = choice.pages, kept = min(n, pages), warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const float* s = scores + ((size_t)blockIdx.y * kv_heads + blockIdx.x) * score_pitch;
  int* list = lists + ((size_t)choice.slot * kv_heads + blockIdx.x) * list_pitch;
  grid_wait();
  // Keys in the order of the scores (zeros differ, as for core's total_cmp), from 1 on; 0 where there is no page.
  auto key = [&](int page) -> uint32_t {
    if (page >= pages) return 0;
    if (page == 0 || page == pages - 1) return ~0u;
    if (!scores) return page;
    const uint32_t bits = __float_as_uint(__ldcg(s + page));
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  };
  uint32_t keys[SELECT_KEPT];
#pragma unroll
  for (int i = 0; i < SELECT_KEPT; i++) keys[i] = key(i * SELECT_THREADS + threadIdx.x);
  // Over the block; `turn` alternates, so that one barrier a turn is enough.
  auto total = [&](int a, int b, int c, int turn) -> uint4 {
    a = warp_sum(a), b = warp_sum(b), c = warp_sum(c);
    if (lane == 0) counts[turn][warp] = make_uint4(a, b, c, 0);
    __syncthreads();
    uint4 sum = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int w = 0; w < SELECT_WARPS; w++) {
      const uint4 v = counts[turn][w];
      sum.x += v.x, sum.y += v.y, sum.z += v.z;
    }
    return sum;
  };
  uint32_t least = 0;                                   // `kept` pages or more have this key or a higher one
#pragma unroll 1
  for (int shift = 30; shift >= 0; shift -= 2) {        // two bits a turn
    const uint32_t step = 1u << shift;
    int a = 0, b = 0, c = 0;
    auto count = [&](uint32_t key) { a += key >= least + step, b += key >= least + 2 * step, c += key >= least + 3 * step; };
#pragma unroll
    for (int i = 0; i < SELECT_KEPT; i++) count(keys[i]);
    for (int page = SELECT_KEPT * SELECT_THREADS + threadIdx.x; page < pages; page += SELECT_THREADS) count(key(page));
    const uint4 sum = total(a, b, c, shift >> 1 & 1);
    least += ((int)sum.x >= kept ? step : 0) + ((int)sum.y >= kept ? step : 0) + ((int)sum.z >= kept ? step : 0);
  }
  int above = 0;
  auto count = [&](uint32_t key) { above += key > least; };
#pragma unroll
  for (int i = 0; i < SELECT_KEPT; i++) count(keys[i]);
  for (int page = SELECT_KEPT * SELECT_THREADS + threadIdx.x; page < pages; page += SELECT_THREADS) count(key(page));
  const int ties = kept - (int)total(above, 0, 0, 1).x;            // of those that equal it
  // A page's place: pages above `least` ahead of it, and as many ties ahead of it as are kept.
  int before = 0, before_ties = 0, turn = 0;
  auto put = [&](int page, uint32_t key) {
    const bool over = key > least, tie = key == least && page < pages;
    const unsigned overs = __ballot_sync(~0u, over), equals = __ballot_sync(~0u, tie), lower = (1u << lane) - 1;
    if (lane == 0) counts[turn][warp] = make_uint4(__popc(overs), __popc(equals), 0, 0);
    __syncthreads();
    int first = before, first_ties = before_ties;
#pragma unroll
    for (int w = 0; w < SELECT_WARPS; w++) {
      const uint4 v = counts[turn][w];
      if (w < warp) first += v.x, first_ties += v.y;
      before += v.x, before_ties += v.y;
    }
    first_ties += __popc(equals & lower);
    if (over || (tie && first_ties < ties)) list[first + __popc(overs & lower) + min(first_ties, ties)] = page;
    turn ^= 1;
  };
#pragma unroll
  for (int i = 0; i < SELECT_KEPT; i++)
    if (i * SELECT_THREADS < pages) put(i * SELECT_THREADS + threadIdx.x, keys[i]);
#pragma unroll 1
  for (int first = SELECT_KEPT * SELECT_THREADS; first < pages; first += SELECT_THREADS) put(first + threadIdx.x, key(first + threadIdx.x));
}
