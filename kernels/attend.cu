// Decode attention and merging. All kernels exist on every architecture, those for heads
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

// ---- merging the splits of a row ----
//
// merge_{bf16,f16,f32,i8,limbs}(MergeArgs), merge_wide_*: grid (heads * D / 128 rounded up, rows of the slice), 128
// threads. Writes the input of the output projection in the order of panel.cuh: x, or int8 codes or limbs in x and
// their scales and sums in xs; f32 as x [row][pitch]. Warp w adds splits w, w + 4, ..., then the four warps are added
// in order. A row's number of splits depends on its position alone; a split without visible tokens has weight 0 and
// changes nothing. A few blocks fit next to those of `attend`, which leave 4,096 registers. merge_wide_*, for more
// blocks than SMs, has more splits in flight.
constexpr int MERGE_WARPS = 4, MERGE_SHARED = 3072;  // MERGE_SHARED: bytes of static shared memory
// The splits of a row. first: its first partial row; total: query rows of its span.
struct Merged {
  int first, splits, total, unused;
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

// Stores four channels of a row's input of the output projection, its int8 codes or its limbs. `inside`: the row has
// them.
template <class Out>
DEV void store_merged(const MergeArgs& p, float4 out, int row, int channel, bool inside, int lane) {
  if constexpr (Out::LIMBS) {
    store_limbs(static_cast<int8_t*>(p.x), p.xs, row, blockIdx.x, p.pitch / 128, lane, p.panels, out);
  } else if constexpr (Out::BYTES == 1) {
    const Int8Group codes = int8_group(out);
    const size_t index = input_index(row, blockIdx.x, p.pitch / 128, p.panels);
    *reinterpret_cast<uint32_t*>(static_cast<int8_t*>(p.x) + index * 128 + input_code(row, lane, p.panels)) =
        codes.codes;
    if (lane == 0) p.xs[index] = make_float2(codes.scale, codes.sum);
  } else if constexpr (Out::BYTES == 4) {
    if (inside) *reinterpret_cast<float4*>(static_cast<float*>(p.x) + (size_t)row * p.pitch + channel) = out;
  } else if (inside) {
    const uint32_t low = Out::Element::pack(out.x, out.y), high = Out::Element::pack(out.z, out.w);
    if (p.panels) return store16_in_panel(p.x, row, channel / 4, p.pitch / 64, p.panels, low, high);
    uint32_t* x = reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.x) + (size_t)row * p.pitch + channel);
    x[0] = low;
    x[1] = high;
  }
}

// IN_FLIGHT: splits that a warp loads at a time.
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
  const int splits = merged.y, total = merged.z;
  const int query_heads = p.kv_heads * p.group, head = min(query_heads - 1, channel / p.head_dim);
  const size_t first = (size_t)merged.x + (size_t)(head / p.group) * splits * total + head % p.group;
  const float* outputs = p.partial + first * p.head_dim + channel % p.head_dim;
  const float2* extremes = p.extremes + first;
  grid_wait();
  // Each warp has its own running maximum; they are combined at the end, so no warp waits for the row's maximum.
  float4 sum = make_float4(0, 0, 0, 0);
  float top = LOG_ZERO, l = 0;
#pragma unroll 1
  for (int start = warp; start < splits; start += IN_FLIGHT * MERGE_WARPS) {
    float4 v[IN_FLIGHT];
    float2 m[IN_FLIGHT];  // {maximum, sum}
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; i++) {
      const int split = (start + i * MERGE_WARPS) * total;
      v[i] = make_float4(0, 0, 0, 0);
      m[i] = make_float2(LOG_ZERO, 0);
      if (start + i * MERGE_WARPS < splits) {
        m[i] = __ldcg(extremes + split);
        v[i] = __ldcg(reinterpret_cast<const float4*>(outputs + (size_t)split * p.head_dim));
      }
    }
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; i++) {
      // One split after another, so that the number of splits in flight does not affect a bit.
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
template <class E, int B, bool L = false>
struct Output {
  typedef E Element;
  static constexpr int BYTES = B;
  static constexpr bool LIMBS = L;
};
#define MERGE(name, ...)                                                                                               \
  KERNEL __maxnreg__(32) merge_##name(const __grid_constant__ MergeArgs args) { merge<Output<__VA_ARGS__>, 2>(args); } \
  KERNEL __launch_bounds__(128, 8) merge_wide_##name(const __grid_constant__ MergeArgs args) {                         \
    merge<Output<__VA_ARGS__>, 4>(args);                                                                               \
  }
MERGE(bf16, Bf16, 2)
MERGE(f16, Half, 2)
MERGE(f32, Single, 4)
MERGE(i8, int8_t, 1)
MERGE(limbs, int8_t, 1, true)
