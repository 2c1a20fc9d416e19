// Parameters of a group of quantised numbers.
//
// Codes and parameters equal quantspec_core::quantize to the bit (except for the sign of a zero parameter in groups
// with zeros of both signs). Non-finite elements, and groups that f16 parameters cannot hold, set a bit of the error
// flag; their output is meaningless.
#pragma once
#include "layout.cuh"
#include "numbers.cuh"

constexpr float SCALE_MIN = 6.103515625e-5f;  // smallest normal f16: scale of a group that is not constant

// Parameters of a group: scale, a step of the codes; zero, the value of code 0.
struct Group {
  uint16_t scale_bits, zero_bits;  // f16
  float scale, zero;               // the same in f32
  bool ok;                         // both are finite in f16
};

DEV Group rounded(float scale, float zero) {
  Group p;
  p.scale_bits = Half::from_float(scale);
  p.zero_bits = Half::from_float(zero);
  p.scale = Half::to_float(p.scale_bits);
  p.zero = Half::to_float(p.zero_bits);
  p.ok = is_finite(p.scale) && is_finite(p.zero);
  return p;
}

// Smallest and largest values over the lanes of a warp, in every lane.
DEV void warp_range(float& low, float& high) {
#pragma unroll
  for (int step = 16; step; step >>= 1) {
    low = fminf(low, __shfl_xor_sync(~0u, low, step));
    high = fmaxf(high, __shfl_xor_sync(~0u, high, step));
  }
}
