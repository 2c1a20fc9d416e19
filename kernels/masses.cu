// Attention of a prompt's last queries to its pages (core::attend::page_masses), by which drafts of
// `Pages::Snap` choose pages.
#include "layout.cuh"
#include "numbers.cuh"

constexpr int BATCH = 32;          // queries that page_sums has in shared memory at a time
constexpr int MASS_THREADS = 256;  // threads of a block of page_masses

// page_sums_{64,128,256}(q, kv, sums, rows, position, first, queries, ...): base-2 logarithm of the sum over a
// page's tokens of 2^(q . k scale), scale = log2(e) / sqrt(D), of query rows at `position` ... Tokens after a
// row's position do not count.
//
//     q     f16 [rows][kv_heads group][D]
//     kv    f16 [token][2 kv_heads D], keys first, up to the last row's position at least
//     sums  f32 [kv head][queries][pages]; these rows are queries `first` .., query = row * group + head of the group
//
// Grid (pages, kv heads), PAGE threads: one per token of the page. Static shared memory.
template <int D>
DEV void page_sums(const uint16_t* q, const uint16_t* kv, float* sums, int rows, int position, int first, int queries,
                   int kv_heads, int group, float scale) {
  __shared__ float batch[BATCH][D], by_warp[BATCH][4];
  const int token = blockIdx.x * PAGE + threadIdx.x;
  const int head = blockIdx.y;
  const int warp = threadIdx.x >> 5;
  const int lane = threadIdx.x & 31;
  uint4 key[D / 8] = {};
  if (token < position + rows) {
    const uint16_t* channels = kv + ((size_t)token * 2 * kv_heads + head) * D;
#pragma unroll
    for (int i = 0; i < D / 8; i++) key[i] = ldg_plain(channels + i * 8);
  }
#pragma unroll 1
  for (int start = 0; start < rows * group; start += BATCH) {
    const int count = min(BATCH, rows * group - start);
    __syncthreads();
    for (int i = threadIdx.x; i < count * D; i += PAGE) {
      const int query = start + i / D;
      batch[i / D][i % D] =
          Half::to_float(q[((size_t)(query / group) * kv_heads * group + head * group + query % group) * D + i % D]) *
          scale;
    }
    __syncthreads();
#pragma unroll 1
    for (int r = 0; r < count; r++) {
      const float4* row = reinterpret_cast<const float4*>(batch[r]);
      float sum = 0;
#pragma unroll
      for (int i = 0; i < D / 8; i++) {
        const float4 low = row[2 * i], high = row[2 * i + 1];
        uint4 k = key[i];
        // 256 channels fit in registers only as halves, so they must not be unpacked before the loop.
        if constexpr (D > 128) asm volatile("" : "+r"(k.x), "+r"(k.y), "+r"(k.z), "+r"(k.w));
        const float2 a = unpack_half2(k.x), b = unpack_half2(k.y), c = unpack_half2(k.z), e = unpack_half2(k.w);
        sum = __fmaf_rn(low.x, a.x, __fmaf_rn(low.y, a.y, __fmaf_rn(low.z, b.x, __fmaf_rn(low.w, b.y, sum))));
        sum = __fmaf_rn(high.x, c.x, __fmaf_rn(high.y, c.y, __fmaf_rn(high.z, e.x, __fmaf_rn(high.w, e.y, sum))));
      }
      const bool seen = token <= position + (start + r) / group;
      const float largest = warp_max(seen ? sum : LOG_ZERO);
      const float total = warp_sum(seen ? exp2_fast(sum - largest) : 0.f);
      if (lane == 0) by_warp[r][warp] = total > 0 ? largest + __log2f(total) : LOG_ZERO;
    }
    __syncthreads();
    if (threadIdx.x < count) {
      const float* sums_of_warps = by_warp[threadIdx.x];
      const float largest = fmaxf(fmaxf(sums_of_warps[0], sums_of_warps[1]), fmaxf(sums_of_warps[2], sums_of_warps[3]));
      float total = 0;
#pragma unroll
      for (int i = 0; i < 4; i++) total += exp2_fast(sums_of_warps[i] - largest);
      sums[((size_t)head * queries + first + start + threadIdx.x) * gridDim.x + blockIdx.x] =
          largest > LOG_ZERO ? largest + __log2f(total) : LOG_ZERO;
    }
  }
}
#define PAGE_SUMS(D)                                                                                       \
  KERNEL __launch_bounds__(PAGE)                                                                           \
      page_sums_##D(const uint16_t* q, const uint16_t* kv, float* sums, int rows, int position, int first, \
                    int queries, int kv_heads, int group, float scale) {                                   \
    page_sums<D>(q, kv, sums, rows, position, first, queries, kv_heads, group, scale);                     \
  }
PAGE_SUMS(64)
PAGE_SUMS(128)
PAGE_SUMS(256)

// page_masses(sums, masses, first, queries, pages, visible, pitch): masses f32 [kv head][pitch] of the first `visible`
// pages. The mass of a page is the sum, over queries first .. queries - 1, of its share of the query's attention to
// all pages. sums: the result of page_sums. Grid (kv heads), MASS_THREADS threads, dynamic shared memory: a float for
// each query from `first` on, and up to three more, as the compiler reads 16 bytes at once.
KERNEL __launch_bounds__(MASS_THREADS)
    page_masses(const float* sums, float* masses, int first, int queries, int pages, int visible, int pitch) {
  extern __shared__ float whole[];
  const int count = queries - first, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const float* head_sums = sums + ((size_t)blockIdx.x * queries + first) * pages;
  for (int r = warp; r < count; r += MASS_THREADS / 32) {
    float largest = LOG_ZERO, total = 0;
    for (int page = lane; page < pages; page += 32) largest = fmaxf(largest, head_sums[(size_t)r * pages + page]);
    largest = warp_max(largest);
    for (int page = lane; page < pages; page += 32) total += exp2_fast(head_sums[(size_t)r * pages + page] - largest);
    total = warp_sum(total);
    if (lane == 0) whole[r] = largest + __log2f(total);
  }
  __syncthreads();
  for (int page = threadIdx.x; page < visible; page += MASS_THREADS) {
    float mass = 0;
    for (int r = 0; r < count; r++) mass += exp2_fast(head_sums[(size_t)r * pages + page] - whole[r]);
    masses[(size_t)blockIdx.x * pitch + page] = mass;
  }
}
