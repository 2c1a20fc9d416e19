// Element types and numeric helpers on top of ptx.cuh.
//
// Operations whose bits must equal quantspec-core's use the round-to-nearest intrinsics (__fmul_rn, __fadd_rn,
// __fdiv_rn), which the compiler never contracts into fused multiply-adds.
#pragma once
#include "ptx.cuh"

// Element types of weights and activations. pack(low, high) rounds two floats to nearest even, `low` in the lower half.
struct Half {
  typedef uint16_t Bits;
  static DEV float to_float(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
  static DEV uint16_t from_float(float x) { return __half_as_ushort(__float2half_rn(x)); }
  static DEV uint32_t pack(float low, float high) {
#ifdef QS_SM80
    return pack_half2(low, high);
#else
    return from_float(low) | (uint32_t)from_float(high) << 16;
#endif
  }
};
struct Bf16 {
  typedef uint16_t Bits;
  static DEV float to_float(uint16_t bits) { return __uint_as_float((uint32_t)bits << 16); }
  static DEV uint16_t from_float(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
  static DEV uint32_t pack(float low, float high) {
#ifdef QS_SM80
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
#else
    return from_float(low) | (uint32_t)from_float(high) << 16;
#endif
  }
};
struct Single {
  typedef uint32_t Bits;
  static DEV float to_float(uint32_t bits) { return __uint_as_float(bits); }
  static DEV uint32_t from_float(float x) { return __float_as_uint(x); }
};
DEV bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }
DEV float infinity() { return __int_as_float(0x7f800000); }
DEV float minus_infinity() { return __int_as_float(0xff800000); }

// True if all eight f16 of `x` are finite.
DEV bool finite_halves(uint4 x) {
  auto finite = [](uint32_t word) { return (word & 0x7c00u) != 0x7c00u && (word & 0x7c000000u) != 0x7c000000u; };
  return finite(x.x) && finite(x.y) && finite(x.z) && finite(x.w);
}

// Loads four floats that another kernel of the step wrote (`ldg_plain`).
DEV float4 load4(const float* p) {
  const uint4 v = ldg_plain(p);
  return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}

// x * sigmoid(x); the factor is -log2(e). For large negative x the exponential is infinite and the quotient zero.
DEV float silu(float x) { return __fdividef(x, 1.f + exp2_fast(x * -1.4426950408889634f)); }
// GELU with its tanh approximation: x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3); otherwise as `silu`.
// The factor is -2 sqrt(2 / pi) log2(e).
DEV float gelu(float x) { return __fdividef(x, 1.f + exp2_fast((x + 0.044715f * x * x * x) * -2.3022081987f)); }
// The same as types, for templates.
struct Silu {
  DEV float operator()(float x) const { return silu(x); }
};
struct Gelu {
  DEV float operator()(float x) const { return gelu(x); }
};

// Logarithm of zero: of a masked score, and of the sum over no tokens. Finite, so that differences are not NaN.
constexpr float LOG_ZERO = -1e30f;

// 1.5 * 2^23. Floats near it are 1 apart, so adding it to a number below 2^22 rounds that to an integer, which the low
// bits then hold. An integer sum that starts at INTEGER_BIAS_BITS is, read as a float, the sum plus `integer_bias`.
DEV float integer_bias() { return 12582912.f; }
enum { INTEGER_BIAS_BITS = 0x4b400000 };

// ---- reductions over the 32 lanes of a warp; every lane gets the result ----

// A sum has the same tree for every caller.
DEV float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step; step >>= 1) x = __fadd_rn(x, __shfl_xor_sync(~0u, x, step));
  return x;
}
DEV int warp_sum(int x) {
#ifdef QS_SM80
  return __reduce_add_sync(~0u, x);
#else
#pragma unroll
  for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(~0u, x, step);
  return x;
#endif
}
DEV uint32_t warp_min(uint32_t x) {
#ifdef QS_SM80
  return __reduce_min_sync(~0u, x);
#else
#pragma unroll
  for (int step = 16; step; step >>= 1) x = min(x, __shfl_xor_sync(~0u, x, step));
  return x;
#endif
}
DEV uint32_t warp_max(uint32_t x) { return ~warp_min(~x); }
DEV float warp_max(float x) {
#pragma unroll
  for (int step = 16; step; step >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}
// For values that are not negative: compared as integers, by one instruction.
DEV float warp_max_nonnegative(float x) {
#ifdef QS_SM80
  return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(x)));
#else
  return warp_max(x);
#endif
}

// Maximum and sum over the four lanes that have the same two rows of an mma's result, for both rows.
DEV void quad_max(float& x0, float& x1) {
  x0 = fmaxf(x0, __shfl_xor_sync(~0u, x0, 1));
  x1 = fmaxf(x1, __shfl_xor_sync(~0u, x1, 1));
  x0 = fmaxf(x0, __shfl_xor_sync(~0u, x0, 2));
  x1 = fmaxf(x1, __shfl_xor_sync(~0u, x1, 2));
}
DEV void quad_sum(float& x0, float& x1) {
  x0 += __shfl_xor_sync(~0u, x0, 1);
  x1 += __shfl_xor_sync(~0u, x1, 1);
  x0 += __shfl_xor_sync(~0u, x0, 2);
  x1 += __shfl_xor_sync(~0u, x1, 2);
}

// 128 inputs of a draft GEMM as int8, four per lane of a warp: code = round(x * 127 / max |x|).
// quantspec_core::quantize divides by the scale instead, so a code may differ by one; only drafts are affected.
//
// The zero point of a weight is multiplied by the sum of the codes, not of the inputs. So y is exactly W times the
// rounded inputs, and rounding errors are multiplied by weights, whose mean is near zero. With the sum of the inputs
// they would be multiplied by the weights' distances from the zero point.
struct Int8Group {
  uint32_t codes;   // four, of this lane
  float scale;      // of the group
  float sum;        // scale times the sum of the group's codes
  uint32_t halves;  // sums of the codes of inputs 0 to 63 and 64 to 127, 16 bits each (`half_sums`)
};
// The two sums in Int8Group::halves: of lanes 0 to 15, and of lanes 16 to 31.
DEV int2 half_sums(uint32_t halves) {
  const int low = (int)(halves << 16) >> 16;
  return make_int2(low, ((int)halves - low) >> 16);
}
DEV Int8Group int8_group(float4 v) {
  const float largest = warp_max_nonnegative(fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
  const float to_code = largest > 0.f ? __fdividef(127.f, largest) : 0.f;
  const float scale = largest * (1.f / 127.f);
  // The low byte is the code.
  auto code = [&](float value) { return __float_as_uint(__fmaf_rn(value, to_code, integer_bias())); };
  const uint32_t codes =
      __byte_perm(__byte_perm(code(v.x), code(v.y), 0x0040), __byte_perm(code(v.z), code(v.w), 0x0040), 0x5410);
  // Both sums in one word: the upper one is shifted by 16 bits, and a negative lower one borrows from it.
  const int lane_sum = __dp4a((int)codes, 0x01010101, 0);
  const uint32_t halves = (uint32_t)warp_sum((int)((uint32_t)lane_sum << (threadIdx.x & 16)));
  const int2 sums = half_sums(halves);
  return {codes, scale, scale * (float)(sums.x + sums.y), halves};
}

// 64 inputs of a GEMM with weights in planes as 16-bit integers, four per lane of half a warp: code = round(x * 32512 /
// max |x|) = 256 high + low. So |high| is at most 127, and a group's sums of products with bytes are exact. If an input
// is not finite (or beyond the range of __fdividef), scale and sum are NaN.
struct Limbs {
  uint32_t high, low;  // int8, four of this lane
  float scale;         // of the group
  float sum;           // scale times the sum of the group's codes
};
DEV Limbs limbs_of(float4 v) {
  // Magnitudes as integers: NaN is the largest.
  auto magnitude = [](float x) { return __float_as_uint(x) & 0x7fffffffu; };
  uint32_t bits = max(max(magnitude(v.x), magnitude(v.y)), max(magnitude(v.z), magnitude(v.w)));
#pragma unroll
  for (int step = 8; step; step >>= 1) bits = max(bits, __shfl_xor_sync(~0u, bits, step));
  const float largest = __uint_as_float(bits);
  // Below 2^-100 all codes are zero: 32512 / largest could be infinite.
  const float to_code = largest > 0x1p-100f ? __fdividef(32512.f, largest) : 0.f;
  const float scale = largest < 0x1p126f ? largest * (1.f / 32512.f) : __int_as_float(0x7fffffff);
  // The low 16 bits are the code, in two's complement.
  auto code = [&](float x) { return __float_as_uint(__fmaf_rn(x, to_code, integer_bias())); };
  const uint32_t a = code(v.x), b = code(v.y), c = code(v.z), d = code(v.w);
  int sum = (int)(a + b + c + d - 4u * INTEGER_BIAS_BITS);
#pragma unroll
  for (int step = 8; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
  // A low limb of -128 to -1 carries into the high one.
  auto bytes = [](uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t both) {
    return __byte_perm(__byte_perm(a, b, both), __byte_perm(c, d, both), 0x5410);
  };
  return {bytes(a + 128, b + 128, c + 128, d + 128, 0x0051), bytes(a, b, c, d, 0x0040), scale, scale * (float)sum};
}

// Sum over a block of WARPS (up to 32) warps: warp sums, then a tree over those. `scratch`: WARPS floats of shared
// memory. Contains two barriers.
template <int WARPS>
DEV float block_sum(float x, float* scratch) {
  x = warp_sum(x);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = x;
  __syncthreads();
  return warp_sum((threadIdx.x & 31) < WARPS ? scratch[threadIdx.x & 31] : 0.f);
}

// Bits of the device's error flag (4 is FLAG_WEIGHTS of quantize_weights.cu). Kernels only set bits; the host reads and
// clears the flag when it synchronises.
constexpr uint32_t FLAG_CACHE = 1;     // a key, value or page parameter is not finite in f16
constexpr uint32_t FLAG_LOGITS = 2;    // a logit is NaN or +infinity
constexpr uint32_t FLAG_NO_TOKEN = 8;  // no token may be chosen

// Copies 16 bytes to shared memory, asynchronously (`copy_commit`), or stores zeros if not `valid`.
DEV void copy16_or_zero(uint32_t shared, const void* global, bool valid) {
#ifdef QS_SM80
  asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0) : "memory");
#else
  sts128(shared, valid ? ldg_plain(global) : make_uint4(0, 0, 0, 0));
#endif
}
