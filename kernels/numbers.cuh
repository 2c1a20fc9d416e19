// Element types and small numeric helpers on top of ptx.cuh.
//
// Operations whose bits must equal quantspec-core's are written with the round-to-nearest intrinsics (__fmul_rn, __fadd_rn, __fdiv_rn), which the
// compiler never contracts into fused multiply-adds.
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

// Four floats that another kernel of the step wrote.
DEV float4 load4(const float* p) {
  const uint4 v = ldg_plain(p);
  return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}

// x * sigmoid(x). For large negative x the exponential is infinite and the quotient zero.
DEV float silu(float x) { return __fdividef(x, 1.f + exp2_fast(x * -1.4426950408889634f)); }

// Sum over the 32 lanes, the same tree for every caller; every lane gets it.
DEV float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step; step >>= 1) x = __fadd_rn(x, __shfl_xor_sync(~0u, x, step));
  return x;
}
// Sum over a block of WARPS (up to 32) warps: warp sums, then a tree over those. `scratch`: WARPS floats of shared memory. Contains two barriers.
template <int WARPS>
DEV float block_sum(float x, float* scratch) {
  x = warp_sum(x);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = x;
  __syncthreads();
  return warp_sum((threadIdx.x & 31) < WARPS ? scratch[threadIdx.x & 31] : 0.f);
}

// The error flag of a device: bits are only ever set by kernels; the host reads and clears it at its synchronisations.
constexpr uint32_t FLAG_CACHE = 1, FLAG_LOGITS = 2;

// 16 bytes to shared memory, or zeros.
DEV void copy16_or_zero(uint32_t shared, const void* global, bool there) {
#ifdef QS_SM80
  asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(shared), "l"(global), "r"(there ? 16 : 0) : "memory");
#else
  sts128(shared, there ? ldg_plain(global) : make_uint4(0, 0, 0, 0));
#endif
}
