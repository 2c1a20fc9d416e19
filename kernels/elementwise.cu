// Operations between the GEMMs: embedding, norms, RoPE and the append to the rings, activation * up, the
// conversions to a GEMM's input type.
//
// The hidden stream is f32. A row's bits depend on that row alone: sums run in one fixed order, whatever the number of
// rows. Kernels that write a GEMM's input exist once per input type:
//
//     _bf16, _f16, _f32   x in the order of panel.cuh (`panels`), f32 always row-major; pitch in elements
//     _i8                 x int8 and xs float2 {scale, scale times the sum of the codes} per group of 128, equal to
//                         quantspec_core::quantize_activations, in the same order. Codes past K are zero.
//     _limbs              the same for `Limbs`, in groups of 64; K is padded to 128.
//
// Widths are multiples of 4.
#include "layout.cuh"
#include "numbers.cuh"
#include "panel.cuh"

// Stores four consecutive values of a row, from column k = 4 * lane + 128 * group on; one warp holds a group.
// `inside`: k is inside the row.
template <class T>
struct Into {
  typename T::Bits* x;
  int pitch, panels;
  DEV void store(int row, int group, int lane, bool inside, float4 v) const {
    if (!inside) return;
    typename T::Bits* values = x + (size_t)row * pitch + group * 128 + lane * 4;
    if constexpr (sizeof(typename T::Bits) == 4) {
      *(float4*)values = v;
    } else {
      const uint32_t low = T::pack(v.x, v.y), high = T::pack(v.z, v.w);
      if (panels)
        store16_in_panel(x, row, group * 32 + lane, pitch / 64, panels, low, high);
      else
        *(uint2*)values = make_uint2(low, high);
    }
  }
};
struct IntoInt8 {
  int8_t* x;
  float2* xs;
  int groups, panels;
  DEV void store(int row, int group, int lane, bool inside, float4 v) const {
    const float largest =
        warp_max_nonnegative(inside ? fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))) : 0.f);
    const float scale = __fdiv_rn(largest, 127.f);
    auto code = [&](float value) {
      return scale > 0.f ? (int)fminf(fmaxf(rintf(__fdiv_rn(value, scale)), -127.f), 127.f) : 0;
    };
    const int a = code(v.x), b = code(v.y), c = code(v.z), d = code(v.w), sum = warp_sum(inside ? a + b + c + d : 0);
    const size_t index = input_index(row, group, groups, panels);
    *(int*)(x + index * 128 + input_code(row, lane, panels)) =
        inside ? (a & 255) | (b & 255) << 8 | (c & 255) << 16 | d << 24 : 0;
    if (lane == 0) xs[index] = make_float2(scale, __fmul_rn(scale, (float)sum));
  }
};

struct IntoLimbs {
  int8_t* x;
  float2* xs;
  int pairs, panels;
  DEV void store(int row, int group, int lane, bool inside, float4 v) const {
    store_limbs(x, xs, row, group, pairs, lane, panels, inside ? v : make_float4(0, 0, 0, 0));
  }
};

DEV float4 add4(float4 a, float4 b) {
  return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}
DEV float4 times(float4 a, float f) {
  return make_float4(__fmul_rn(a.x, f), __fmul_rn(a.y, f), __fmul_rn(a.z, f), __fmul_rn(a.w, f));
}

// ---- embedding ----
//
// embed_{bf16,f16,f32}(rows, windows, window_pitch, tokens, table, hidden, width, vocab, scale):
// hidden[row] = scale * table[token].
//
//     rows     [row]; a row's token is its own, which is then stored in its window, or the window's. Null: tokens[row]
//     windows  int32 [slot][window_pitch]
//     table    atoms (linear.cuh); of f32 row-major [vocab][width]
//     hidden   f32 [row][width]
//
// Grid (rows), 256 threads, no shared memory. A step begins with this kernel, so its loads are issued together.
struct Eight {
  float4 low, high;
};
// load(token, k): eight values of a row from column k on, a multiple of 8; the last four of a row's
// last eight may be outside.
template <class Load>
DEV void embed(const Row* rows, int* windows, int window_pitch, const int* tokens, float* hidden, int width, int vocab,
               float scale, Load load) {
  constexpr int AT_ONCE = 4, ACROSS = 256 * 8;
  grid_trigger();
  grid_wait();
  const int row = blockIdx.x;
  int token;
  if (rows) {
    const Row r = rows[row];
    int* in_window = windows + (size_t)r.slot * window_pitch + r.offset;
    token = r.token < 0 ? __ldcg(in_window) : r.token;
    if (r.token >= 0 && threadIdx.x == 0) *in_window = token;
  } else {
    token = tokens[row];
  }
  token = min(max(token, 0), vocab - 1);  // never outside the table
  float* h = hidden + (size_t)row * width;
#pragma unroll 1
  for (int first = threadIdx.x * 8; first < width; first += AT_ONCE * ACROSS) {
    Eight x[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
      if (first + i * ACROSS < width) x[i] = load(token, first + i * ACROSS);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int k = first + i * ACROSS;
      if (k < width) *(float4*)(h + k) = times(x[i].low, scale);
      if (k + 4 < width) *(float4*)(h + k + 4) = times(x[i].high, scale);
    }
  }
}
#define EMBED(NAME, T)                                                                                        \
  KERNEL __launch_bounds__(256)                                                                               \
      embed_##NAME(const Row* rows, int* windows, int window_pitch, const int* tokens, const uint16_t* table, \
                   float* hidden, int width, int vocab, float scale) {                                        \
    const int atoms = (width + 63) / 64;                                                                      \
    embed(rows, windows, window_pitch, tokens, hidden, width, vocab, scale, [&](int token, int k) {           \
      const size_t line = ((size_t)(token / 16) * atoms + k / 64) * 16 + token % 16;                          \
      const uint4 v = __ldg((const uint4*)(table + line * 64 + ((k % 64 / 8) ^ (token & 7)) * 8));            \
      auto low = [](uint32_t x) { return T::to_float((uint16_t)x); };                                         \
      auto high = [](uint32_t x) { return T::to_float((uint16_t)(x >> 16)); };                                \
      return Eight{make_float4(low(v.x), high(v.x), low(v.y), high(v.y)),                                     \
                   make_float4(low(v.z), high(v.z), low(v.w), high(v.w))};                                    \
    });                                                                                                       \
  }
EMBED(bf16, Bf16)
EMBED(f16, Half)
KERNEL __launch_bounds__(256) embed_f32(const Row* rows, int* windows, int window_pitch, const int* tokens,
                                        const float* table, float* hidden, int width, int vocab, float scale) {
  embed(rows, windows, window_pitch, tokens, hidden, width, vocab, scale, [&](int token, int k) {
    const float4* line = (const float4*)(table + (size_t)token * width + k);
    return Eight{__ldg(line), k + 4 < width ? __ldg(line + 1) : make_float4(0, 0, 0, 0)};
  });
}

// embed_planes: the same for a table in planes (layout.cuh); `stride`: blocks per tile.
KERNEL __launch_bounds__(256)
    embed_planes(const Row* rows, int* windows, int window_pitch, const int* tokens, const uint8_t* upper,
                 const uint8_t* lower, int stride, float* hidden, int width, int vocab, float scale) {
  embed(rows, windows, window_pitch, tokens, hidden, width, vocab, scale, [&](int token, int k) {
    float w[8];
    plane_weights(w, upper, lower, token, k, stride);
    return Eight{make_float4(w[0], w[1], w[2], w[3]), make_float4(w[4], w[5], w[6], w[7])};
  });
}

// ---- RMSNorm ----
constexpr int NORM_THREADS = 512;  // few enough registers to be resident next to a GEMM's block
//
// norm_*: hidden += y + bias, then x = hidden / rms(hidden) * weight.
//
//     hidden, y     f32 [row][width]; y may be null
//     bias, weight  f32 [width]; bias may be null
//     x             a GEMM's input [row]
//
// Grid (rows), NORM_THREADS threads. A step has few rows, and this kernel is latency-bound. So a row gets a whole
// block, and its weights are loaded before the kernel waits for the previous one. A thread keeps its loaded values;
// rows wider than KEPT groups per warp are read a second time.
template <class Out>
DEV void norm(float* hidden, const float* y, const float* bias, const float* weight, float eps, int width, Out out) {
  constexpr int WARPS = NORM_THREADS / 32, KEPT = 2;
  __shared__ float sums[WARPS];
  grid_trigger();
  const int row = blockIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, groups = (width + 127) / 128;
  const float4 none = make_float4(0, 0, 0, 0);
  auto inside = [&](int group) { return group * 128 + lane * 4 < width; };
  auto constant = [&](const float* p, int group) {
    return inside(group) ? __ldg((const float4*)(p + group * 128 + lane * 4)) : none;
  };
  float4 kept[KEPT], scale[KEPT];  // of the groups that are kept: the hidden stream, the weight
#pragma unroll
  for (int i = 0; i < KEPT; i++) scale[i] = constant(weight, warp + i * WARPS);
  grid_wait();
  float* h = hidden + (size_t)row * width;
  float sum = 0;
  auto load = [&](const float* p, int group) { return inside(group) ? load4(p + group * 128 + lane * 4) : none; };
  auto load_y = [&](int group) { return y ? load(y + (size_t)row * width, group) : none; };
  // Adds y and bias to a group of the hidden stream, stores it and adds its squares to `sum`.
  auto add_residual = [&](int group, float4 v, float4 residual) {
    if (!inside(group)) return none;
    if (y) v = add4(v, residual);
    if (bias) v = add4(v, constant(bias, group));
    if (y || bias) *(float4*)(h + group * 128 + lane * 4) = v;
    sum = __fmaf_rn(v.x, v.x, sum);
    sum = __fmaf_rn(v.y, v.y, sum);
    sum = __fmaf_rn(v.z, v.z, sum);
    sum = __fmaf_rn(v.w, v.w, sum);
    return v;
  };
  // All loads are issued before the first is used: a store in between would order them.
  float4 residual[KEPT];
#pragma unroll
  for (int i = 0; i < KEPT; i++) {
    kept[i] = load(h, warp + i * WARPS);
    residual[i] = load_y(warp + i * WARPS);
  }
#pragma unroll
  for (int i = 0; i < KEPT; i++) kept[i] = add_residual(warp + i * WARPS, kept[i], residual[i]);
  for (int group = warp + KEPT * WARPS; group < groups; group += WARPS)
    add_residual(group, load(h, group), load_y(group));
  const float inverse_rms = __frsqrt_rn(__fadd_rn(__fdiv_rn(block_sum<WARPS>(sum, sums), (float)width), eps));
  auto normalise = [&](int group, float4 v, float4 w) {
    const float4 x =
        make_float4(__fmul_rn(__fmul_rn(v.x, inverse_rms), w.x), __fmul_rn(__fmul_rn(v.y, inverse_rms), w.y),
                    __fmul_rn(__fmul_rn(v.z, inverse_rms), w.z), __fmul_rn(__fmul_rn(v.w, inverse_rms), w.w));
    if (group < groups) out.store(row, group, lane, inside(group), x);
  };
#pragma unroll
  for (int i = 0; i < KEPT; i++) normalise(warp + i * WARPS, kept[i], scale[i]);
  for (int group = warp + KEPT * WARPS; group < groups; group += WARPS)
    normalise(group, load(h, group), constant(weight, group));
}

// norm_rows: to (+)= x / rms(x) * weight, accumulated if `add`. For a branch before its residual addition, and for all
// query or key heads in place.
//
//     x, to   f32 [row][pitch, to_pitch], pitches in elements; the same buffer or disjoint
//     weight  f32 [width]
//     paired  0, or the channels of a head if x alternates channels c .. c + 7 and paired / 2 + c .. of each head
//             (`weights_w4_*` in quantize_weights.cu); the weight does not
//
// Grid (rows), NORM_THREADS threads.
KERNEL __launch_bounds__(NORM_THREADS) norm_rows(const float* x, int pitch, float* to, int to_pitch,
                                                 const float* weight, float eps, int width, int paired, int add) {
  constexpr int WARPS = NORM_THREADS / 32;
  __shared__ float sums[WARPS];
  grid_trigger();
  grid_wait();
  x += (size_t)blockIdx.x * pitch;
  to += (size_t)blockIdx.x * to_pitch;
  float sum = 0;
  for (int k = threadIdx.x * 4; k < width; k += NORM_THREADS * 4) {
    const float4 v = load4(x + k);
    sum = __fmaf_rn(v.x, v.x, sum);
    sum = __fmaf_rn(v.y, v.y, sum);
    sum = __fmaf_rn(v.z, v.z, sum);
    sum = __fmaf_rn(v.w, v.w, sum);
  }
  const float inverse_rms = __frsqrt_rn(__fadd_rn(__fdiv_rn(block_sum<WARPS>(sum, sums), (float)width), eps));
  for (int k = threadIdx.x * 4; k < width; k += NORM_THREADS * 4) {
    const int in_head = paired ? k % paired : 0;
    const int channel = in_head / 16 * 8 + in_head % 8 + in_head / 8 % 2 * (paired / 2);
    const float4 w = __ldg((const float4*)(weight + k - in_head + channel)), v = times(load4(x + k), inverse_rms);
    float4 y = make_float4(__fmul_rn(v.x, w.x), __fmul_rn(v.y, w.y), __fmul_rn(v.z, w.z), __fmul_rn(v.w, w.w));
    if (add) y = add4(load4(to + k), y);
    *(float4*)(to + k) = y;
  }
}

// ---- the hidden stream as it is: one warp per group of 128 inputs of a row ----
//
// convert_*: hidden f32 [row][width] -> x [row], for models without a norm before the GEMM. Grid (ceil(width / 1024),
// rows), 256 threads, no shared memory.
template <class Out>
DEV void convert(const float* hidden, int width, Out out) {
  grid_trigger();
  grid_wait();
  const int row = blockIdx.y;
  const int lane = threadIdx.x & 31;
  const int group = blockIdx.x * 8 + (threadIdx.x >> 5);
  const int k = group * 128 + lane * 4;
  if (group >= (width + 127) / 128) return;
  const bool inside = k < width;
  out.store(row, group, lane, inside, inside ? load4(hidden + (size_t)row * width + k) : make_float4(0, 0, 0, 0));
}

// ---- activation * up: one warp per group of 128 outputs of a row ----
//
// {silu,gelu}_mul_*: y f32 [row][2 width], gate and up interleaved by 8, and bias f32 [2 width] in the same order or
// null -> x [row]. width is a multiple of 8. Grid (ceil(width / 1024), rows), 256 threads, no shared memory.
template <class Activation, class Out>
DEV void activate_mul(const float* y, const float* bias, int width, Out out) {
  const Activation f;
  grid_trigger();
  grid_wait();
  const int row = blockIdx.y;
  const int lane = threadIdx.x & 31;
  const int group = blockIdx.x * 8 + (threadIdx.x >> 5);
  const int k = group * 128 + lane * 4;
  if (group >= (width + 127) / 128) return;
  const bool inside = k < width;
  float4 v = make_float4(0, 0, 0, 0);
  if (inside) {
    const int column = k / 8 * 16 + k % 8;  // of the gate; that of up is 8 further
    const float* gate_up = y + (size_t)row * 2 * width + column;
    float4 gate = load4(gate_up), up = load4(gate_up + 8);
    if (bias) {
      gate = add4(gate, *(const float4*)(bias + column));
      up = add4(up, *(const float4*)(bias + column + 8));
    }
    v = make_float4(f(gate.x) * up.x, f(gate.y) * up.y, f(gate.z) * up.z, f(gate.w) * up.w);
  }
  out.store(row, group, lane, inside, v);
}
// 48 registers: four warps per scheduler, which fit next to the three of a pipelined GEMM (linear.cu) with 104 each.
// norm_i8 uses 50, allocated as 56, and fits next to the 96 of linear_w4_pipeline_1.
#define PRODUCERS(NAME, T)                                                                                          \
  KERNEL __maxnreg__(48) norm_##NAME(float* hidden, const float* y, const float* bias, const float* weight,         \
                                     T::Bits* x, float eps, int width, int pitch, int panels) {                     \
    norm(hidden, y, bias, weight, eps, width, Into<T>{x, pitch, panels});                                           \
  }                                                                                                                 \
  KERNEL __launch_bounds__(256)                                                                                     \
      silu_mul_##NAME(const float* y, const float* bias, T::Bits* x, int width, int pitch, int panels) {            \
    activate_mul<Silu>(y, bias, width, Into<T>{x, pitch, panels});                                                  \
  }                                                                                                                 \
  KERNEL __launch_bounds__(256)                                                                                     \
      gelu_mul_##NAME(const float* y, const float* bias, T::Bits* x, int width, int pitch, int panels) {            \
    activate_mul<Gelu>(y, bias, width, Into<T>{x, pitch, panels});                                                  \
  }                                                                                                                 \
  KERNEL __launch_bounds__(256) convert_##NAME(const float* hidden, T::Bits* x, int width, int pitch, int panels) { \
    convert(hidden, width, Into<T>{x, pitch, panels});                                                              \
  }
PRODUCERS(bf16, Bf16)
PRODUCERS(f16, Half)
PRODUCERS(f32, Single)
#define INTEGER_PRODUCERS(NAME, OUT, NORM_REGISTERS)                                                                \
  KERNEL __maxnreg__(NORM_REGISTERS)                                                                                \
      norm_##NAME(float* hidden, const float* y, const float* bias, const float* weight, int8_t* x, float2* xs,     \
                  float eps, int width, int panels) {                                                               \
    norm(hidden, y, bias, weight, eps, width, OUT{x, xs, (width + 127) / 128, panels});                             \
  }                                                                                                                 \
  KERNEL __launch_bounds__(256)                                                                                     \
      silu_mul_##NAME(const float* y, const float* bias, int8_t* x, float2* xs, int width, int panels) {            \
    activate_mul<Silu>(y, bias, width, OUT{x, xs, (width + 127) / 128, panels});                                    \
  }                                                                                                                 \
  KERNEL __launch_bounds__(256)                                                                                     \
      gelu_mul_##NAME(const float* y, const float* bias, int8_t* x, float2* xs, int width, int panels) {            \
    activate_mul<Gelu>(y, bias, width, OUT{x, xs, (width + 127) / 128, panels});                                    \
  }                                                                                                                 \
  KERNEL __launch_bounds__(256) convert_##NAME(const float* hidden, int8_t* x, float2* xs, int width, int panels) { \
    convert(hidden, width, OUT{x, xs, (width + 127) / 128, panels});                                                \
  }
INTEGER_PRODUCERS(i8, IntoInt8, 56)
INTEGER_PRODUCERS(limbs, IntoLimbs, 48)

// coarse_i8: rounds int8 inputs, as written by norm_i8, in place to the 4-bit grid: codes of -7 .. 7. Grid
// (groups, rows), 32 threads. A group's codes are 128 bytes in any order.
KERNEL __launch_bounds__(32) coarse_i8(int8_t* x, float2* xs, int panels) {
  grid_trigger();
  grid_wait();
  const int lane = threadIdx.x;
  const size_t index = input_index(blockIdx.y, blockIdx.x, gridDim.x, panels);
  uint32_t* word = (uint32_t*)(x + index * 128) + lane;
  const uint32_t codes = *word;
  uint32_t coarse = 0;
  int sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int code = (int)rintf(__fmul_rn((float)(int8_t)(codes >> 8 * i), 7.f / 127.f));
    coarse |= (uint32_t)(code & 255) << 8 * i;
    sum += code;
  }
  sum = warp_sum(sum);
  *word = coarse;
  float2* scale_sum = xs + index;
  __syncwarp();
  if (lane == 0) {
    const float scale = __fmul_rn(scale_sum->x, 127.f / 7.f);
    *scale_sum = make_float2(scale, __fmul_rn(scale, (float)sum));
  }
}

// coarse_limbs: the same for limbs, as written by norm_limbs: the codes become high limbs, and low ones zero. Grid
// (groups, rows), 32 threads.
KERNEL __launch_bounds__(32) coarse_limbs(int8_t* x, float2* xs, int panels) {
  grid_trigger();
  grid_wait();
  const int word = threadIdx.x & 15;  // both halves of the warp compute the same
  const size_t index = input_index(blockIdx.y, blockIdx.x, gridDim.x, panels);
  uint32_t* const high = (uint32_t*)(x + index * 128 + input_code(blockIdx.y, word, panels));
  uint32_t* const low = (uint32_t*)(x + index * 128 + input_code(blockIdx.y, 16 + word, panels));
  const uint32_t highs = *high, lows = *low;
  uint32_t coarse = 0;
  int sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int fine = (int8_t)(highs >> 8 * i) * 256 + (int8_t)(lows >> 8 * i);
    const int code = (int)rintf(__fmul_rn((float)fine, 7.f / 32512.f));
    coarse |= (uint32_t)(code & 255) << 8 * i;
    sum += code;
  }
  sum = warp_sum(sum) / 2;
  const float scale = __fmul_rn(xs[index].x, 127.f / 7.f);
  __syncwarp();
  *high = coarse;
  *low = 0;
  if (threadIdx.x == 0) xs[index] = make_float2(scale, __fmul_rn(scale, 256.f * (float)sum));
}

// widen: x f32 [n] = h f16 [n] (attention's output for checkpoints in single precision). Grid
// ceil(n / 256), 256 threads.
KERNEL __launch_bounds__(256) widen(const uint16_t* h, float* x, int64_t n) {
  const int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
  if (i < n) x[i] = Half::to_float(h[i]);
}

// add_rows: hidden f32 [row][width] += y f32 [row][width] + bias f32 [width] or null, if no norm follows. `elements` is
// the rows times width. Grid ceil(elements / 1024), 256 threads.
KERNEL __launch_bounds__(256) add_rows(float* hidden, const float* y, const float* bias, int64_t elements, int width) {
  grid_trigger();
  grid_wait();
  const int64_t i = ((int64_t)blockIdx.x * 256 + threadIdx.x) * 4;
  if (i >= elements) return;
  float4 v = add4(load4(hidden + i), load4(y + i));
  if (bias) v = add4(v, *(const float4*)(bias + i % width));
  *(float4*)(hidden + i) = v;
}

// read_all: reads `pieces` uint4 once, at memory speed, as the reference for kernel bandwidth. Stores only if the
// exclusive or of all data is `never`, so that no load is optimised away. Any grid, 512 threads.
KERNEL __launch_bounds__(512) read_all(const uint4* from, int64_t pieces, uint32_t never, uint32_t* to) {
  constexpr int IN_FLIGHT = 8;
  const uint64_t once = evict_first();
  uint32_t all = 0;
  const int64_t step = (int64_t)gridDim.x * 512;
  for (int64_t i = (int64_t)blockIdx.x * 512 + threadIdx.x; i < pieces; i += IN_FLIGHT * step) {
    uint4 v[IN_FLIGHT];
#pragma unroll
    for (int j = 0; j < IN_FLIGHT; j++)
      v[j] = i + j * step < pieces ? ldg_once(from + i + j * step, once) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int j = 0; j < IN_FLIGHT; j++) all ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (all == never) *to = all;
}

// ---- heads: bias, per-head norm, RoPE ----
//
// One warp per head of a row. Lane l has channels PAIRS l .. and D / 2 + PAIRS l .., which RoPE rotates
// together: v[i] and v[PAIRS + i].
template <int D>
struct Head {
  static constexpr int PAIRS = D / 64;
  float v[2 * PAIRS];

  // y f32 [D]: the head's outputs; bias, norm f32 [D] or null; angles {cos, sin} [D / 2] or null (no rotation). paired:
  // y alternates channels c .. c + 7 and D / 2 + c .. D / 2 + c + 7 (`weights_w4_*` in quantize_weights.cu).
  DEV Head(const float* y, bool paired, const float* bias, const float* norm, float eps, const float2* angles) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < 2 * PAIRS; i++) {
      const int channel = channel_of(lane, i), c = channel % (D / 2);
      v[i] = *(const volatile float*)(y + (paired ? c / 8 * 16 + c % 8 + channel / (D / 2) * 8 : channel));
      if (bias) v[i] = __fadd_rn(v[i], bias[channel]);
    }
    if (norm) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < 2 * PAIRS; i++) sum = __fmaf_rn(v[i], v[i], sum);
      const float inverse_rms = __frsqrt_rn(__fadd_rn(__fdiv_rn(warp_sum(sum), (float)D), eps));
#pragma unroll
      for (int i = 0; i < 2 * PAIRS; i++) v[i] = __fmul_rn(__fmul_rn(v[i], inverse_rms), norm[channel_of(lane, i)]);
    }
    if (angles)
#pragma unroll
      for (int i = 0; i < PAIRS; i++) {
        const float2 a = angles[PAIRS * lane + i];
        const float x = v[i], z = v[PAIRS + i];
        v[i] = __fsub_rn(__fmul_rn(x, a.x), __fmul_rn(z, a.y));
        v[PAIRS + i] = __fadd_rn(__fmul_rn(z, a.x), __fmul_rn(x, a.y));
      }
  }
  static DEV int channel_of(int lane, int i) { return (i / PAIRS) * (D / 2) + PAIRS * lane + i % PAIRS; }
  // Stores the head as f16; returns true if a value is not finite. Such a value is stored as 0: earlier rows multiply
  // later entries by zero, and a failed round is repeated without its drafted rows.
  DEV bool store(uint16_t* head, float scale) const {
    const int lane = threadIdx.x & 31;
    bool bad = false;
#pragma unroll
    for (int i = 0; i < 2 * PAIRS; i++) {
      const uint16_t bits = Half::from_float(v[i] * scale);
      const bool finite = (bits & 0x7c00) != 0x7c00;
      bad |= !finite;
      head[channel_of(lane, i)] = finite ? bits : 0;
    }
    return bad;
  }
};

// append_{64,128,256}: queries, keys and values of a step's rows.
//
//     y               f32 [row][(heads + 2 kv_heads) D], channels in order or `paired`
//     bias            f32 of that width, or null
//     q_norm, k_norm  f32 [D] or null
//     cos_sin         float2 [row][D / 2]
//     q               f16 [row][heads][D], times `scale`
//     ring_k, ring_v  f16 [layer][slot][kv_heads][RING][D], written at the row's position
//
// Grid (ceil((heads + 2 kv_heads) / 4), rows), 128 threads, no shared memory.
template <int D>
DEV void append(const Row* rows, const float* y, const float* bias, const float* q_norm, const float* k_norm,
                const float2* cos_sin, uint16_t* q, uint16_t* ring_k, uint16_t* ring_v, float eps, float scale,
                int heads, int kv_heads, int layer, int slots, int paired, uint32_t* flag) {
  grid_trigger();
  grid_wait();
  const int row = blockIdx.y, all = heads + 2 * kv_heads, head = blockIdx.x * 4 + (threadIdx.x >> 5);
  if (head >= all) return;
  const bool is_q = head < heads, is_k = !is_q && head < heads + kv_heads;
  const Head<D> h(y + ((size_t)row * all + head) * D, paired, bias ? bias + head * D : nullptr,
                  is_q   ? q_norm
                  : is_k ? k_norm
                         : nullptr,
                  eps, is_q || is_k ? cos_sin + (size_t)row * (D / 2) : nullptr);
  bool bad;
  if (is_q)
    bad = h.store(q + ((size_t)row * heads + head) * D, scale);
  else {
    const Row r = rows[row];
    const int kv = (head - heads) % kv_heads;
    bad = h.store((is_k ? ring_k : ring_v) + ring_at(layer, r.slot, kv, r.position, slots, kv_heads, D), 1.f);
  }
  if (bad) atomicOr(flag, FLAG_CACHE);
}

// rope_store_{64,128,256}: the same for prompt rows, if the GEMM did not do it: q f16 [row][heads D], unscaled; kv f16
// [row][2 kv_heads D]. Non-finite values set the flag, because later kernels cannot detect them. Grid
// (ceil((heads + 2 kv_heads) / 4), rows), 128 threads.
template <int D>
DEV void rope_store(const float* y, const float* bias, const float* q_norm, const float* k_norm, const float2* cos_sin,
                    uint16_t* q, uint16_t* kv, float eps, int heads, int kv_heads, uint32_t* flag) {
  const int row = blockIdx.y, all = heads + 2 * kv_heads, head = blockIdx.x * 4 + (threadIdx.x >> 5);
  if (head >= all) return;
  const bool is_q = head < heads, is_k = !is_q && head < heads + kv_heads;
  const Head<D> h(y + ((size_t)row * all + head) * D, false, bias ? bias + head * D : nullptr,
                  is_q   ? q_norm
                  : is_k ? k_norm
                         : nullptr,
                  eps, is_q || is_k ? cos_sin + (size_t)row * (D / 2) : nullptr);
  if (h.store(is_q ? q + ((size_t)row * heads + head) * D : kv + ((size_t)row * 2 * kv_heads + head - heads) * D, 1.f))
    atomicOr(flag, FLAG_CACHE);
}

// scale_queries: q f16 [row][width] times 1 + beta ln(1 + floor(position / original)), at the positions of `rows`, or
// at first + row without them. width is a multiple of 8. Grid (ceil(width / 2048), rows), 256 threads.
KERNEL __launch_bounds__(256)
    scale_queries(uint16_t* q, const Row* rows, int first, float beta, int original, int width) {
  grid_trigger();
  grid_wait();
  const int row = blockIdx.y;
  const int k = (blockIdx.x * 256 + threadIdx.x) * 8;
  const int whole = (rows ? rows[row].position : first + row) / original;
  if (k >= width || whole == 0) return;
  const float factor = 1.f + beta * logf(1.f + (float)whole);
  uint4* channels = (uint4*)(q + (size_t)row * width + k);
  const uint4 v = ldg_plain(channels);
  auto scaled = [&](uint32_t x) {
    return Half::pack(Half::to_float((uint16_t)x) * factor, Half::to_float((uint16_t)(x >> 16)) * factor);
  };
  *channels = make_uint4(scaled(v.x), scaled(v.y), scaled(v.z), scaled(v.w));
}

#define HEADS(D)                                                                                                      \
  KERNEL __launch_bounds__(128)                                                                                       \
      append_##D(const Row* rows, const float* y, const float* bias, const float* q_norm, const float* k_norm,        \
                 const float2* cos_sin, uint16_t* q, uint16_t* ring_k, uint16_t* ring_v, float eps, float scale,      \
                 int heads, int kv_heads, int layer, int slots, int paired, uint32_t* flag) {                         \
    append<D>(rows, y, bias, q_norm, k_norm, cos_sin, q, ring_k, ring_v, eps, scale, heads, kv_heads, layer, slots,   \
              paired, flag);                                                                                          \
  }                                                                                                                   \
  KERNEL __launch_bounds__(128) rope_store_##D(const float* y, const float* bias, const float* q_norm,                \
                                               const float* k_norm, const float2* cos_sin, uint16_t* q, uint16_t* kv, \
                                               float eps, int heads, int kv_heads, uint32_t* flag) {                  \
    rope_store<D>(y, bias, q_norm, k_norm, cos_sin, q, kv, eps, heads, kv_heads, flag);                               \
  }
HEADS(64)
HEADS(128)
HEADS(256)
