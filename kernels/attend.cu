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
#define ATTEND(name, D, VIEW, NT, RINGS, STAGES, PER_SM)                                                  \
  struct name##_of : Attend<D, VIEW, NT, RINGS, STAGES> {};                                               \
  KERNEL REGISTERS(name##_of, PER_SM) name(const __grid_constant__ AttendArgs args) {                     \
    extern __shared__ __align__(128) uint8_t shared[];                                                    \
    attend<name##_of>(args, shared);                                                                      \
  }
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// grid min(items, multiprocessors), 128 (rings + 1) threads
ATTEND(attend_upper_64_1, 64, UPPER, 1, 4, 4, 1)
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
  const float4 out = there ? make_float4(__fdiv_rn(sum.x, l), __fdiv_rn(sum.y, l), __fdiv_rn(sum.z, l), __fdiv_rn(sum.w, l)) : make_float4(0, 0, 0, 0);
  if constexpr (Out::BYTES == 1) {
    // int8 per group of 128, by core::quantize::quantize_activations
    float most = fmaxf(fmaxf(fabsf(out.x), fabsf(out.y)), fmaxf(fabsf(out.z), fabsf(out.w)));
#pragma unroll
    for (int step = 16; step; step >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    const float scale = __fdiv_rn(most, 127.f), total = warp_sum(__fadd_rn(__fadd_rn(out.x, out.y), __fadd_rn(out.z, out.w)));
    auto code = [&](float v) { return scale > 0 ? (uint32_t)(int)rintf(fminf(fmaxf(__fdiv_rn(v, scale), -127.f), 127.f)) & 255u : 0u; };
    const uint32_t word = code(out.x) | code(out.y) << 8 | code(out.z) << 16 | code(out.w) << 24;
    *reinterpret_cast<uint32_t*>(static_cast<int8_t*>(p.x) + (size_t)row * p.pitch + channel) = word;
    if (lane == 0) p.xs[(size_t)row * (p.pitch / 128) + blockIdx.x] = make_float2(scale, total);
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
// grid (pages / 8 rounded up, kv heads, lists), 256 threads, one warp per page.
struct Choice { int row, slot, pages; };               // the list's row of q, its slot, its visible pages
KERNEL __launch_bounds__(256) bounds(const uint8_t* upper, const int* tables, int table_pitch, const __half* q, const Choice* choices, float* scores, int score_pitch, int kv_heads, int group, int d, float centre) {
  grid_trigger();
  grid_wait();
  const Choice choice = choices[blockIdx.z];
  const int page = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31, head = blockIdx.y;
  if (page >= choice.pages) return;
  const __half* params = reinterpret_cast<const __half*>(upper + ((size_t)tables[(size_t)choice.slot * table_pitch + page] * kv_heads + head) * upper_bytes(d));
  float best = -1e30f;
  for (int h = 0; h < group; h++) {
    const __half* row = q + ((size_t)choice.row * kv_heads * group + head * group + h) * d;
    float sum = 0;
    for (int channel = lane; channel < d; channel += 32) {
      const float s = __half2float(params[k_param(channel)]), z = __half2float(params[k_param(channel) + 8]), x = __half2float(row[channel]);
      const float low = __fmaf_rn(-centre, s, z), high = __fmaf_rn(15.f, s, low);
      sum += fmaxf(x * low, x * high);
    }
    best = fmaxf(best, warp_sum(sum));
  }
  if (lane == 0) scores[((size_t)blockIdx.z * kv_heads + head) * score_pitch + page] = best;
}

// select(scores, score_pitch, choices, lists, list_pitch, kv_heads, n): the first and the newest page and the n - 2 best of the others (ties to the
// lower number), ascending, into lists [slot][kv head][list_pitch]; without scores the newest are best. grid (kv heads, lists), 1024 threads.
// A page's rank is the number of pages that beat it; with n of them kept, counting is cheaper than sorting.
KERNEL __launch_bounds__(1024) select(const float* scores, int score_pitch, const Choice* choices, int* lists, int list_pitch, int kv_heads, int n) {
  __shared__ float tile[1024];
  __shared__ int sums[32], before;
  grid_trigger();
  grid_wait();
  const int pages = choices[blockIdx.y].pages, kept = min(n, pages);
  const float* s = scores + ((size_t)blockIdx.y * kv_heads + blockIdx.x) * score_pitch;
  int* list = lists + ((size_t)choices[blockIdx.y].slot * kv_heads + blockIdx.x) * list_pitch;
  if (threadIdx.x == 0) before = 0;
  auto score = [&](int i) { return i == 0 || i == pages - 1 ? 3e38f : scores ? s[i] : (float)i; };
  for (int base = 0; base < pages; base += 1024) {
    const int mine = base + threadIdx.x;
    const float value = mine < pages ? score(mine) : -3e38f;
    int rank = 0;
    for (int from = 0; from < pages; from += 1024) {
      __syncthreads();
      tile[threadIdx.x] = from + (int)threadIdx.x < pages ? score(from + threadIdx.x) : -3.4e38f;
      __syncthreads();
      const int count = min(1024, pages - from);
      for (int i = 0; i < count; i++) rank += tile[i] > value || (tile[i] == value && from + i < mine);
    }
    // Places in ascending order of page number: how many kept pages come before this one.
    const bool keep = mine < pages && rank < kept;
    const unsigned ballot = __ballot_sync(~0u, keep);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = __popc(ballot);
    __syncthreads();
    int place = before + __popc(ballot & ((1u << (threadIdx.x & 31)) - 1)), total = 0;
    for (int w = 0; w < 32; w++) {
      if (w < (int)(threadIdx.x >> 5)) place += sums[w];
      total += sums[w];
    }
    if (keep) list[place] = mine;
    __syncthreads();
    if (threadIdx.x == 0) before += total;
    __syncthreads();
  }
}
