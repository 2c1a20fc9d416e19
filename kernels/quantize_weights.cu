// Weights: copies into the layouts of the GEMMs, and quantisers into 4 and 8 bits and into planes.
#include "quantize.cuh"

constexpr uint32_t FLAG_WEIGHTS = 4;  // a weight or a parameter of its group is not finite

// ---- layouts ----
//
// Row of the device's matrix for row n of a tensor. interleave: 0 for the same row; 1 and 2 for gate and up, which
// alternate by eight rows.
DEV int matrix_row(int n, int interleave) { return interleave ? n / 8 * 16 + n % 8 + (interleave == 2 ? 8 : 0) : n; }

// Index of the 16-byte piece j of row n in a matrix of atoms (linear.cuh).
DEV size_t atom_piece(int n, int j, int atoms) {
  return (((size_t)(n / 16) * atoms + j / 8) * 16 + n % 16) * 8 + ((j % 8) ^ (n & 7));
}

// weights_atoms: rows [first, first + rows) of a row-major 16-bit matrix [.][K] into atoms; src begins at row `first`.
// Padding rows and columns must be zero already. Grid ceil(rows * ceil(K / 8) / 256), 256 threads.
KERNEL __launch_bounds__(256)
    weights_atoms(const uint16_t* src, uint4* dst, int first, int rows, int K, int interleave) {
  const int pieces = (K + 7) / 8, atoms = (K + 63) / 64;
  const int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
  if (i >= (int64_t)rows * pieces) return;
  const int row = i / pieces, j = i % pieces;
  const uint16_t* weights = src + (size_t)row * K + j * 8;
  uint16_t x[8];
#pragma unroll
  for (int e = 0; e < 8; e++) x[e] = j * 8 + e < K ? weights[e] : 0;
  dst[atom_piece(matrix_row(first + row, interleave), j, atoms)] =
      make_uint4(x[0] | x[1] << 16, x[2] | x[3] << 16, x[4] | x[5] << 16, x[6] | (uint32_t)x[7] << 16);
}

// weights_rows: the same for single precision, whose matrices stay row-major. Grid ceil(rows * K / 256), 256 threads.
KERNEL __launch_bounds__(256) weights_rows(const float* src, float* dst, int first, int rows, int K, int interleave) {
  const int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
  if (i < (int64_t)rows * K) dst[(size_t)matrix_row(first + i / K, interleave) * K + i % K] = src[i];
}

// Element k of row n of a matrix in the device's layout.
struct FromAtoms {
  template <class T>
  static DEV float load(const void* w, int n, int k, int K) {
    return T::to_float(((const uint16_t*)w)[atom_piece(n, k / 8, (K + 63) / 64) * 8 + k % 8]);
  }
};
struct FromRows {
  template <class T>
  static DEV float load(const void* w, int n, int k, int K) {
    return ((const float*)w)[(size_t)n * K + k];
  }
};

// Rows of the texts by which inputs are weighed (quantspec_model::importance).
constexpr int TEXT_ROWS = 64;

// 16 rows of a matrix times x f32 [K][TEXT_ROWS], 256 threads with four outputs of a text row each.
template <class T, class From>
DEV void product(const void* w, const float* x, float* out, int N, int K) {
  constexpr int AT_ONCE = 32;
  __shared__ __align__(16) float weights[AT_ONCE][16], inputs[AT_ONCE][TEXT_ROWS];
  const int t = threadIdx.x, row = t % TEXT_ROWS, first = t / TEXT_ROWS * 4;
  float sums[4] = {};
  for (int k0 = 0; k0 < K; k0 += AT_ONCE) {
    const int count = min(AT_ONCE, K - k0);
    __syncthreads();
    for (int i = t; i < AT_ONCE * 16; i += 256) {
      const int n = blockIdx.x * 16 + i / AT_ONCE, k = i % AT_ONCE;
      weights[k][i / AT_ONCE] = n < N && k < count ? From::template load<T>(w, n, k0 + k, K) : 0.f;
    }
    for (int i = t; i < count * TEXT_ROWS; i += 256)
      inputs[i / TEXT_ROWS][i % TEXT_ROWS] = x[(size_t)k0 * TEXT_ROWS + i];
    __syncthreads();
    for (int k = 0; k < count; k++) {
      const float4 of = *(const float4*)&weights[k][first];
      const float input = inputs[k][row], factors[4] = {of.x, of.y, of.z, of.w};
#pragma unroll
      for (int i = 0; i < 4; i++) sums[i] = __fadd_rn(sums[i], __fmul_rn(factors[i], input));
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int n = blockIdx.x * 16 + first + i;
    if (n < N) out[(size_t)n * TEXT_ROWS + row] = sums[i];
  }
}

// product_{bf16,f16,f32}(w, x, out f32 [N][TEXT_ROWS], N, K): w in the device's layout (atoms, or row-major for f32),
// sums with k upwards, not fused. Grid ceil(N / 16), 256 threads, static shared memory.
#define PRODUCT(NAME, T, FROM)                                                                            \
  KERNEL __launch_bounds__(256) product_##NAME(const void* w, const float* x, float* out, int N, int K) { \
    product<T, FROM>(w, x, out, N, K);                                                                    \
  }
PRODUCT(bf16, Bf16, FromAtoms)
PRODUCT(f16, Half, FromAtoms)
PRODUCT(f32, Single, FromRows)

// The matrix row that output n stands for. `paired`: 0, or the width D of the heads that the rows form. A tile then
// holds channels c .. c + 7 and D / 2 + c .. D / 2 + c + 7 of a head, which RoPE rotates together.
DEV int paired_row(int n, int paired) {
  if (!paired) return n;
  const int channel = n % paired;
  return n - channel + channel / 16 * 8 + channel % 8 + (channel & 8 ? paired / 2 : 0);
}
// A search of parameters: both ends of a range are moved inwards by `first` to `first + count - 1` times `step` of it.
struct Shrink {
  float step;
  int first, count;
};
// Search space of 4-bit parameters, as in quantspec_core::quantize: SHRINK, TARGET_SHRINK, FITS.
constexpr Shrink SHRINK = {0.03125f, 0, 3}, TARGET_SHRINK = {0.015625f, -1, 5};
constexpr int FITS = 2;

// A row's group of 32 EACH weights in a warp, element i * 32 + lane in x[i]; 0 past the row's end. Sums have
// quantspec_core::quantize's order: per lane, then a tree over the lanes.
template <int EACH_>
struct Weights {
  static constexpr int EACH = EACH_;
  float x[EACH], factor[EACH];  // factor: importance, by which squared errors are multiplied
  float low, high;              // of the elements inside the matrix
  bool inside[EACH], finite;
  int count;
  // Of row n, from k0 on. `importance` [K] may be null: all weigh the same. `finite` is each lane's own.
  template <class T, class From>
  DEV void read(const void* src, const float* importance, int n, int k0, int N, int K, int paired) {
    const int lane = threadIdx.x & 31;
    count = min(K - k0, 32 * EACH);
    low = infinity();
    high = -low;
    finite = true;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int k = k0 + i * 32 + lane;
      inside[i] = n < N && k < K;
      x[i] = inside[i] ? From::template load<T>(src, paired_row(n, paired), k, K) : 0.f;
      factor[i] = inside[i] && importance ? importance[k] : 1.f;
      if (inside[i]) {
        finite &= is_finite(x[i]);
        low = fminf(low, x[i]);
        high = fmaxf(high, x[i]);
      }
    }
    warp_range(low, high);
  }
};
DEV Group weights_group(float scale, float zero) { return rounded(fmaxf(scale, SCALE_MIN), zero); }
// The 4-bit code of a weight, from its distance to the zero and one over the scale.
DEV float trial_code(float rest, float inverse) { return rintf(fminf(fmaxf(__fmul_rn(rest, inverse), 0.f), 15.f)); }

// Sum of importance * (w - (code * step + zero))^2, codes first .. last.
template <int EACH>
DEV float squared_error(const Weights<EACH>& w, float step, float zero, float first, float last) {
  const float inverse = __fdiv_rn(1.f, step);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const float code = rintf(fminf(fmaxf(__fmul_rn(__fsub_rn(w.x[i], zero), inverse), first), last));
    const float error = __fsub_rn(w.x[i], __fadd_rn(__fmul_rn(code, step), zero));
    sum = __fadd_rn(sum, w.inside[i] ? __fmul_rn(w.factor[i], __fmul_rn(error, error)) : 0.f);
  }
  return warp_sum(sum);
}
// With 4-bit codes, and with codes of both nibbles.
template <int EACH>
DEV float squared_error(const Weights<EACH>& w, const Group& p) {
  return squared_error(w, p.scale, p.zero, 0.f, 15.f);
}
template <int EACH>
DEV float squared_error_of_both(const Weights<EACH>& w, const Group& p) {
  return squared_error(w, __fmul_rn(p.scale, 0.0625f), p.zero, -8.f, 247.f);
}

// Weighted least-squares fit to the codes that p gives; false if all codes are equal.
template <int EACH>
DEV bool fit(const Weights<EACH>& w, const Group& p, Group& found) {
  const float inverse = __fdiv_rn(1.f, p.scale);
  float count = 0.f, codes = 0.f, squares = 0.f, values = 0.f, products = 0.f;
#pragma unroll
  for (int i = 0; i < EACH; i++)
    if (w.inside[i]) {
      const float rest = __fsub_rn(w.x[i], p.zero), code = trial_code(rest, inverse);
      count = __fadd_rn(count, w.factor[i]);
      codes = __fadd_rn(codes, __fmul_rn(w.factor[i], code));
      squares = __fadd_rn(squares, __fmul_rn(w.factor[i], __fmul_rn(code, code)));
      values = __fadd_rn(values, __fmul_rn(w.factor[i], rest));
      products = __fadd_rn(products, __fmul_rn(w.factor[i], __fmul_rn(code, rest)));
    }
  count = warp_sum(count);
  codes = warp_sum(codes);
  squares = warp_sum(squares);
  values = warp_sum(values);
  products = warp_sum(products);
  const float spread = __fsub_rn(__fmul_rn(count, squares), __fmul_rn(codes, codes));
  if (!(spread > 0.f)) return false;
  const float scale = __fdiv_rn(__fsub_rn(__fmul_rn(count, products), __fmul_rn(codes, values)), spread);
  found = weights_group(scale, __fadd_rn(p.zero, __fdiv_rn(__fsub_rn(values, __fmul_rn(scale, codes)), count)));
  return true;
}

// Keeps the parameters of least error; the first wins ties.
template <int EACH>
struct Best {
  const Weights<EACH>& w;
  Group best;
  float least;
  DEV Best(const Weights<EACH>& w, const Group& first) : w(w), best(first), least(squared_error(w, first)) {}
  DEV void consider(const Group& p) {
    const float error = squared_error(w, p);
    if (p.ok && error < least) {
      least = error;
      best = p;
    }
  }
};

// The range of least error, refined by up to two fits.
template <int EACH>
DEV Group search(const Weights<EACH>& w, const Group& whole, Shrink shrink) {
  Best<EACH> found(w, whole);
  const float low = w.low, high = w.high, range = __fsub_rn(high, low);
#pragma unroll 1
  for (int i = 0; i < shrink.count * shrink.count; i++) {
    const float below = (shrink.first + i / shrink.count) * shrink.step;
    const float above = (shrink.first + i % shrink.count) * shrink.step;
    const float zero = __fadd_rn(low, __fmul_rn(below, range)), last = __fsub_rn(high, __fmul_rn(above, range));
    found.consider(weights_group(__fdiv_rn(__fsub_rn(last, zero), 15.f), zero));
  }
#pragma unroll 1
  for (int i = 0; i < FITS; i++) {
    Group fitted;
    if (!fit(w, found.best, fitted)) break;
    found.consider(fitted);
  }
  return found.best;
}

// One block of 16 rows x 128 k of draft weights (layout: linear.cuh), 128 threads. TOP: largest code, 15 or 255. Codes
// past K are 0, as are scale and zero of rows past N.
template <class T, class From, int TOP>
DEV void quantize_weights(const void* src, const float* importance, uint8_t* dst, int N, int K, int paired,
                          uint32_t* flag) {
  __shared__ __align__(16) uint8_t codes[16][128];
  const int tile = blockIdx.y, group = blockIdx.x, groups = gridDim.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  constexpr int CODES = TOP == 15 ? 1024 : 2048, BLOCK = CODES + 64;  // bytes: codes, and with parameters
  uint8_t* block = dst + ((size_t)tile * groups + group) * BLOCK;
  for (int row = warp; row < 16; row += 4) {
    const int n = tile * 16 + row;
    Weights<4> w;
    w.read<T, From>(src, TOP == 15 ? importance : nullptr, n, group * 128, N, K, paired);
    Group p = {0, 0, 0.f, 0.f, true};
    if (n < N)
      p = w.low == w.high ? rounded(0.f, w.low) : weights_group(__fdiv_rn(__fsub_rn(w.high, w.low), (float)TOP), w.low);
    if (!w.finite || !p.ok) atomicOr(flag, FLAG_WEIGHTS);
    if (TOP == 15 && p.ok && p.scale != 0.f) p = search(w, p, SHRINK);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const bool coded = w.inside[i] && p.scale != 0.f;
      codes[row][i * 32 + lane] =
          coded ? (uint8_t)fminf(fmaxf(rintf(__fdiv_rn(__fsub_rn(w.x[i], p.zero), p.scale)), 0.f), (float)TOP) : 0;
    }
    if (lane == 0) ((uint32_t*)(block + CODES))[(row % 8) * 2 + row / 8] = p.scale_bits | (uint32_t)p.zero_bits << 16;
  }
  __syncthreads();
  const int g = lane >> 2, c = lane & 3;
  uint32_t words[4];
  if (TOP == 15) {
    if (warp >= 2) return;
#pragma unroll
    for (int w = 0; w < 4; w++) {
      const int k = 64 * warp + 16 * c + 4 * w;
      words[w] = *(uint32_t*)&codes[g][k] | *(uint32_t*)&codes[g + 8][k] << 4;
    }
  } else {
    const int k = 64 * (warp >> 1) + 16 * c + 8 * (warp & 1);
#pragma unroll
    for (int w = 0; w < 4; w++) words[w] = *(uint32_t*)&codes[g + 8 * (w & 1)][k + 4 * (w >> 1)];
  }
  ((uint4*)block)[warp * 32 + lane] = make_uint4(words[0], words[1], words[2], words[3]);
}

// weights_w{4,8}_{bf16,f16,f32}(src, importance, dst, N, K, paired, flag): draft weights from src [N][K] in the
// device's layout (atoms, or row-major for f32). importance: f32 [K] or null, the factors of squared errors in the
// search of 4-bit codes. Grid (ceil(K / 128), ceil(N / 16)), 128 threads, static shared memory.
#define WEIGHTS_OF(BITS, NAME, T, FROM)                                                                          \
  KERNEL __launch_bounds__(128) weights_w##BITS##_##NAME(const void* src, const float* importance, uint8_t* dst, \
                                                         int N, int K, int paired, uint32_t* flag) {             \
    quantize_weights<T, FROM, (1 << BITS) - 1>(src, importance, dst, N, K, paired, flag);                        \
  }
#define WEIGHTS(NAME, T, FROM) \
  WEIGHTS_OF(4, NAME, T, FROM) \
  WEIGHTS_OF(8, NAME, T, FROM)
WEIGHTS(bf16, Bf16, FromAtoms)
WEIGHTS(f16, Half, FromAtoms)
WEIGHTS(f32, Single, FromRows)

// ---- weights in planes (layout.cuh) ----
//
// The code that the n-th try, n = 1 .. 7, gives a group's smallest weight; the try before them gives it 8
// (quantspec_core::weights::FIRST_CODES).
DEV int first_code(int n) { return 2 * (n - 1) + (n > 4 ? 2 : 0); }
// Fine steps in a group's range that are tried (quantspec_core::weights::STEPS).
constexpr int STEPS_FROM = 240, STEPS_TO = 247;

// The greatest step of which two numbers are multiples; 0 counts as a multiple of any. Negative if it is below `least`,
// and for a negative number. Exact: both are multiples of 2^-32 of a group's largest weight.
DEV double common_step(double a, double b, double least) {
  if (b < 0.0) return b;
  while (a >= 0.0 && b != 0.0) {
    const double rest = fabs(a - rint(a / b) * b);
    a = b < least ? -1.0 : b;
    b = rest;
  }
  return a;
}

// The number from `first` to `last` with the fewest significant bits (quantspec_core::weights::roundest).
DEV int roundest(int first, int last) {
  const int least = first > 0 ? first : -last;
  int found = first > 0 ? last : -first;
  if (least <= 0) return 0;
  while ((found & (found - 1)) >= least) found &= found - 1;
  return first > 0 ? found : -found;
}

// Parameters whose grid of codes 0 .. `most`, `offset` of which stands for the zero, has every multiple of `step` in a
// group's range; false if there are none (quantspec_core::weights::grid_of).
DEV bool grid_of_values(Group& found, double step, double low, double high, int most, int offset) {
  double first = rint(low / step), last = rint(high / step);
  if (last - first > most || fmax(fabs(first), fabs(last)) > 2048.0) return false;
  while (most > 15 && 2.0 * (last - first) <= most) {
    step *= 0.5;
    first = rint(low / step);
    last = rint(high / step);
  }
  const double scale = (most > 15 ? 16.0 : 1.0) * step;
  // Codes n - q + offset, or those of -n with the step -d, are 0 .. most.
  const double one = step * roundest((int)last - most + offset, (int)first + offset);
  const double other = -step * roundest(-(int)first - most + offset, offset - (int)last);
  auto half_of = [](double x) {
    uint16_t bits;
    asm("cvt.rn.f16.f64 %0, %1;" : "=h"(bits) : "d"(x));
    return bits;
  };
  auto exact = [&](double zero) { return (double)Half::to_float(half_of(zero)) == zero; };
  if (!exact(scale)) return false;
  const bool negative = !exact(one) && exact(other);
  found.scale_bits = half_of(negative ? -scale : scale);
  found.zero_bits = half_of(negative ? other : one);
  found.scale = Half::to_float(found.scale_bits);
  found.zero = Half::to_float(found.zero_bits);
  found.ok = is_finite(found.scale) && is_finite(found.zero);
  return found.ok;
}

// Parameters whose grid contains every weight of a group; false if there are none. A grid of 16 values comes first.
template <int EACH>
DEV bool grid_of(Group& found, const Weights<EACH>& w, bool both) {
  const double range = (double)w.high - w.low, least = 0.999 * range / (both ? 255 : 15);
  double step = 0.0;
#pragma unroll
  for (int i = 0; i < EACH; i++) step = common_step(step, fabs((double)w.x[i]), least);
  if (__any_sync(~0u, step < 0.0)) return false;
#pragma unroll 1
  for (int lanes = 16; lanes; lanes >>= 1) step = common_step(step, __shfl_xor_sync(~0u, step, lanes), least);
  if (step < 0.0) return false;
  if (step >= 0.999 * range / 15 && grid_of_values(found, step, w.low, w.high, 15, 0)) return true;
  return both && grid_of_values(found, step, w.low, w.high, 255, 8);
}

// One block of 16 rows x 64 k, 128 threads; `lower` null: the upper plane alone, every L 0.
template <class T, class From>
DEV void quantize_planes(const void* src, const float* importance, uint8_t* upper, uint8_t* lower, int N, int K,
                         int paired, uint32_t* flag) {
  __shared__ __align__(16) uint8_t codes[16][64];  // 16 U + L + 8
  const int tile = blockIdx.y, group = blockIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const size_t block = (size_t)tile * gridDim.x + group;
  upper += block * UPPER_BLOCK;
  for (int row = warp; row < 16; row += 4) {
    const int n = tile * 16 + row;
    Weights<2> w;
    w.read<T, From>(src, importance, n, group * 64, N, K, paired);
    Group p = {0, 0, 0.f, 0.f, true};
    if (n < N && w.count > 0) {
      const float range = __fsub_rn(w.high, w.low);
      // A range of this many fine steps that begins at code `first`.
      auto group_of = [&](int steps, int first) {
        const float step = __fdiv_rn(range, (float)steps);
        return weights_group(__fmul_rn(16.f, step), __fadd_rn(w.low, __fmul_rn((float)(8 - first), step)));
      };
      p = w.low == w.high ? rounded(0.f, w.low)
          : lower         ? group_of(STEPS_FROM, 8)
                          : weights_group(__fdiv_rn(range, 15.f), w.low);
      if (!w.finite || !p.ok) atomicOr(flag, FLAG_WEIGHTS);
      Group grid;
      if (p.ok && p.scale != 0.f) {
        if (grid_of(grid, w, lower != nullptr)) {
          p = grid;
        } else if (lower) {
          int steps = STEPS_FROM;
          float least = squared_error_of_both(w, p);
#pragma unroll 1
          for (int tried = STEPS_FROM + 1; tried <= STEPS_TO; tried++) {
            const Group next = group_of(tried, 8);
            const float error = squared_error_of_both(w, next);
            if (error < least) {
              least = error;
              steps = tried;
              p = next;
            }
          }
          Best<2> found(w, p);
#pragma unroll 1
          for (int i = 1; i < 8; i++)
            if (first_code(i) <= 255 - steps) found.consider(group_of(steps, first_code(i)));
          p = found.best;
        } else {
          p = search(w, p, TARGET_SHRINK);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      uint32_t code = 8;
      if (w.inside[i] && p.scale != 0.f) {
        const float offset = __fsub_rn(w.x[i], p.zero);
        code =
            lower
                ? (uint32_t)((int)rintf(fminf(fmaxf(__fdiv_rn(offset, __fmul_rn(p.scale, 0.0625f)), -8.f), 247.f)) + 8)
                : 16 * (uint32_t)rintf(fminf(fmaxf(__fdiv_rn(offset, p.scale), 0.f), 15.f)) + 8;
      }
      codes[row][i * 32 + lane] = (uint8_t)code;
    }
    if (lane == 0)
      ((uint32_t*)(upper + UPPER_PARAMS))[(row % 8) * 2 + row / 8] = p.scale_bits | (uint32_t)p.zero_bits << 16;
  }
  __syncthreads();
  if (warp > (lower ? 1 : 0)) return;
  const int g = lane >> 2, c = lane & 3;
  uint32_t words[4];
#pragma unroll
  for (int w = 0; w < 4; w++) {
    const uint32_t a = *(uint32_t*)&codes[g][16 * c + 4 * w], b = *(uint32_t*)&codes[g + 8][16 * c + 4 * w];
    words[w] = warp ? select_bits(b << 4, a, 0xf0f0f0f0) : select_bits(b, a >> 4, 0xf0f0f0f0);
  }
  uint4* const plane = warp ? (uint4*)(lower + block * LOWER_BLOCK) : (uint4*)upper;
  plane[lane] = make_uint4(words[0], words[1], words[2], words[3]);
}

// planes_{bf16,f16,f32}(src, importance [K] or null, upper, lower or null, N, K, paired, flag): src and `paired` as for
// weights_w4_*. Grid (blocks per tile, ceil(N / 16)), 128 threads, static shared memory.
#define PLANES(NAME, T, FROM)                                                                             \
  KERNEL __launch_bounds__(128) planes_##NAME(const void* src, const float* importance, uint8_t* upper,   \
                                              uint8_t* lower, int N, int K, int paired, uint32_t* flag) { \
    quantize_planes<T, FROM>(src, importance, upper, lower, N, K, paired, flag);                          \
  }
PLANES(bf16, Bf16, FromAtoms)
PLANES(f16, Half, FromAtoms)
PLANES(f32, Single, FromRows)

// atoms_{bf16,f16}(upper, lower or null, dst atoms, N, stride: blocks per tile, paired): the dequantised matrix,
// rounded to 16 bits, rows in the order before `paired`. Grid (ceil(K / 64), ceil(N / 16)), 128 threads with
// eight weights of a row each.
template <class T>
DEV void planes_to_atoms(const uint8_t* upper, const uint8_t* lower, uint4* dst, int N, int stride, int paired) {
  const int n = blockIdx.y * 16 + (threadIdx.x >> 3), k = blockIdx.x * 64 + (threadIdx.x & 7) * 8;
  float w[8];
  plane_weights(w, upper, lower, n, k, stride);
  const uint4 out = make_uint4(T::pack(w[0], w[1]), T::pack(w[2], w[3]), T::pack(w[4], w[5]), T::pack(w[6], w[7]));
  dst[atom_piece(n < N ? paired_row(n, paired) : n, k / 8, gridDim.x)] = out;
}
KERNEL __launch_bounds__(128)
    atoms_bf16(const uint8_t* upper, const uint8_t* lower, uint4* dst, int N, int stride, int paired) {
  planes_to_atoms<Bf16>(upper, lower, dst, N, stride, paired);
}
KERNEL __launch_bounds__(128)
    atoms_f16(const uint8_t* upper, const uint8_t* lower, uint4* dst, int N, int stride, int paired) {
  planes_to_atoms<Half>(upper, lower, dst, N, stride, paired);
}
