//! Lane arithmetic shared by the portable kernels: conversions, exponentials, sums in a fixed order.
//!
//! All of it is branch-free over fixed-size arrays, which compile to vectors of the path.

use crate::dispatch::{Simd, portable};

/// a·b + c, fused if the path has the instruction (in software it takes fifty times as long).
#[inline(always)]
pub(crate) fn madd<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// The value of a finite half.
#[inline(always)]
pub(crate) fn f16_value(bits: u16) -> f32 {
    // Exponent and mantissa move into an f32 whose exponent is 112 too small; the multiplication is exact, also for
    // subnormals.
    let magnitude = f32::from_bits(u32::from(bits & 0x7fff) << 13) * f32::from_bits(0x7780_0000);
    f32::from_bits(magnitude.to_bits() | (u32::from(bits & 0x8000) << 16))
}

/// The nearest f16, ties to even. Values out of range become infinite.
#[inline(always)]
pub(crate) fn f16_bits(x: f32) -> u16 {
    half::f16::from_f32(x).to_bits()
}

/// A half is NaN or infinite.
#[inline(always)]
pub(crate) fn f16_is_finite(bits: u16) -> bool {
    bits & 0x7c00 != 0x7c00
}

/// The value of a bfloat16.
#[inline(always)]
pub(crate) fn bf16_value(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The nearest bfloat16 of a finite number, ties to even.
#[inline(always)]
pub(crate) fn bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

/// A finite number minus its nearest bfloat16. The rest of a half is a bfloat16, too: 11 bits are 8 and 3.
#[inline(always)]
pub(crate) fn bf16_rest(x: f32) -> f32 {
    x - bf16_value(bf16_bits(x))
}

/// 1.5 · 2²³: adding it rounds to an integer, which is then in the low bits of the sum.
const ROUND: f32 = 12_582_912.0;

/// The nearest integer (ties to even) of |x| < 2²².
#[inline(always)]
pub(crate) fn rint(x: f32) -> f32 {
    (x + ROUND) - ROUND
}

/// The nearest integer of |x| < 2²², as an integer.
#[inline(always)]
pub(crate) fn rint_i32(x: f32) -> i32 {
    (x + ROUND).to_bits().wrapping_sub(ROUND.to_bits()) as i32
}

/// 2^x for x ≤ 126, relative error below 3e-7. Exactly 0 below −126, so a masked score of −∞ adds nothing. NaN stays NaN, so
/// it reaches the logits.
#[inline(always)]
pub(crate) fn exp2<const FMA: bool>(x: f32) -> f32 {
    let clamped = if x < -126.0 { -126.0 } else { x };
    let whole = rint(clamped);
    let r = clamped - whole;
    // Minimax polynomial of 2^r on [-1/2, 1/2] with p(0) = 1 and p'(0) = ln 2: 1.1e-7.
    let mut p = madd::<FMA>(1.330_026_4e-3, r, 9.669_708e-3);
    p = madd::<FMA>(p, r, 5.550_56e-2);
    p = madd::<FMA>(p, r, 2.402_228_2e-1);
    p = madd::<FMA>(p, r, std::f32::consts::LN_2);
    p = madd::<FMA>(p, r, 1.0);
    let scale = f32::from_bits((rint_i32(clamped).wrapping_add(127) as u32) << 23);
    if x < -126.0 { 0.0 } else { p * scale }
}

/// x / (1 + e^−x).
#[inline(always)]
pub(crate) fn silu<const FMA: bool>(x: f32) -> f32 {
    // Clamped: beyond ±80 the factor is 0 or 1 in f32.
    let e = exp2::<FMA>((x * -std::f32::consts::LOG2_E).clamp(-120.0, 120.0));
    x / (1.0 + e)
}

/// GELU with its tanh approximation: x · sigmoid(2u), u = √(2/π)·(x + 0.044715·x³).
#[inline(always)]
pub(crate) fn gelu<const FMA: bool>(x: f32) -> f32 {
    const TWICE_ROOT: f32 = 1.595_769_2;
    let e = exp2::<FMA>(((x + 0.044_715 * x * x * x) * (-TWICE_ROOT * std::f32::consts::LOG2_E)).clamp(-120.0, 120.0));
    x / (1.0 + e)
}

/// Sum of sixteen lanes in one fixed tree.
#[inline(always)]
pub(crate) fn sum16(v: [f32; 16]) -> f32 {
    fold16(v, |a, b| a + b)
}

/// Sixteen lanes folded in one fixed tree.
#[inline(always)]
pub(crate) fn fold16(mut v: [f32; 16], fold: impl Fn(f32, f32) -> f32) -> f32 {
    let mut half = 8;
    while half > 0 {
        for i in 0..half {
            v[i] = fold(v[i], v[i + half]);
        }
        half /= 2;
    }
    v[0]
}

/// Group g of N activations, with zeros after x, and its largest magnitude. A group that x does not fill is copied to
/// `padded`.
///
/// Bits of magnitudes are ordered like the numbers, and NaN is above all, so the result reveals NaN.
#[inline(always)]
pub(crate) fn group<'a, const N: usize>(x: &'a [f32], g: usize, padded: &'a mut [f32; N]) -> (&'a [f32; N], f32) {
    let x = &x[g * N..];
    let v = x.first_chunk().unwrap_or_else(|| {
        padded[..x.len()].copy_from_slice(x);
        padded[x.len()..].fill(0.0);
        padded
    });
    let most = v.iter().fold(0, |most, v| most.max(v.to_bits() & 0x7fff_ffff));
    (v, f32::from_bits(most))
}

/// Factor that maps activations of at most `most` to integers of at most `top`. It is 0 if all activations are 0. It is 0, too,
/// if they are so small that the factor would overflow.
#[inline(always)]
pub(crate) fn inverse_step(top: f32, most: f32) -> f32 {
    let inverse = if most > 0.0 { top / most } else { 0.0 };
    if inverse.is_finite() { inverse } else { 0.0 }
}

/// N elements from `at` on.
#[inline(always)]
pub(crate) fn take<T: Copy, const N: usize>(x: &[T], at: usize) -> [T; N] {
    let mut out = [x[at]; N];
    out.copy_from_slice(&x[at..at + N]);
    out
}

/// Halves to singles.
#[inline(always)]
fn widen_body<const FMA: bool>(from: &[u16], to: &mut [f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = f16_value(*from);
    }
}

/// Finite halves to singles.
pub(crate) fn widen(simd: Simd, from: &[u16], to: &mut [f32]) {
    assert_eq!(from.len(), to.len());
    #[cfg(target_arch = "x86_64")]
    match simd {
        // SAFETY: the CPU has these features, as the path was chosen.
        Simd::Avx512 | Simd::Amx => return unsafe { widen_avx512(from, to) },
        // SAFETY: as above.
        Simd::Avx2 => return unsafe { widen_avx2(from, to) },
        _ => (),
    }
    portable!(simd, widen_body(from: &[u16], to: &mut [f32]))
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn widen_avx512(from: &[u16], to: &mut [f32]) {
    use crate::dispatch::Prefetch;
    use std::arch::x86_64::*;
    let (whole, prefetch) = (from.len() / 16 * 16, Prefetch::choose(false));
    for i in (0..whole).step_by(16) {
        if let Some(prefetch) = prefetch
            && i % 32 == 0
        {
            prefetch.line(from.as_ptr().wrapping_add(i));
        }
        // SAFETY: i + 16 elements exist in both slices, which are equally long.
        unsafe {
            let halves = _mm256_loadu_si256(from.as_ptr().add(i).cast());
            _mm512_storeu_ps(to.as_mut_ptr().add(i), _mm512_cvtph_ps(halves));
        }
    }
    widen_body::<true>(&from[whole..], &mut to[whole..]);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
fn widen_avx2(from: &[u16], to: &mut [f32]) {
    use crate::dispatch::Prefetch;
    use std::arch::x86_64::*;
    let (whole, prefetch) = (from.len() / 8 * 8, Prefetch::choose(false));
    for i in (0..whole).step_by(8) {
        if let Some(prefetch) = prefetch
            && i % 32 == 0
        {
            prefetch.line(from.as_ptr().wrapping_add(i));
        }
        // SAFETY: i + 8 elements exist in both slices, which are equally long.
        unsafe {
            let halves = _mm_loadu_si128(from.as_ptr().add(i).cast());
            _mm256_storeu_ps(to.as_mut_ptr().add(i), _mm256_cvtph_ps(halves));
        }
    }
    widen_body::<true>(&from[whole..], &mut to[whole..]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_finite_half_has_its_value_on_every_path() {
        let halves: Vec<u16> = (0..=u16::MAX).filter(|bits| f16_is_finite(*bits)).collect();
        for simd in Simd::ALL.into_iter().filter(|simd| simd.missing().is_empty()) {
            let mut values = vec![f32::NAN; halves.len()];
            widen(simd, &halves, &mut values);
            for (bits, value) in halves.iter().zip(&values) {
                assert_eq!(value.to_bits(), half::f16::from_bits(*bits).to_f32().to_bits(), "{bits:#x} on {simd:?}");
            }
        }
    }

    #[test]
    fn bfloat16_rounds_to_nearest_even() {
        for (x, bits) in
            [(1.0f32, 0x3f80), (1.003_906_3, 0x3f80), (1.011_718_8, 0x3f82), (-0.0, 0x8000), (3.0e38, 0x7f62)]
        {
            assert_eq!(bf16_bits(x), bits, "{x}");
            assert_eq!(bf16_bits(x), half::bf16::from_f32(x).to_bits());
        }
    }

    #[test]
    fn powers_of_two_are_within_a_few_ulps_and_masked_ones_vanish() {
        for i in 0..200_000 {
            let x = -126.0 + f32::from_bits(0x3f80_0000 + i * 41) * 63.0;
            let x = x.min(126.0);
            let exact = f64::from(x).exp2();
            for got in [exp2::<true>(x), exp2::<false>(x)] {
                assert!((f64::from(got) / exact - 1.0).abs() < 3e-7, "2^{x} = {got}, not {exact}");
            }
        }
        for x in [f32::NEG_INFINITY, -126.1, -1e30] {
            assert_eq!(exp2::<true>(x).to_bits(), 0);
        }
        assert!(exp2::<true>(f32::NAN).is_nan() && exp2::<false>(f32::NAN).is_nan());
        assert_eq!(exp2::<true>(0.0), 1.0);
    }

    #[test]
    fn silu_is_right_at_both_ends() {
        for x in [-200.0f32, -30.0, -1.5, -1e-3, 0.0, 1e-3, 2.0, 50.0, 300.0] {
            let exact = f64::from(x) / (1.0 + (-f64::from(x)).exp());
            assert!((f64::from(silu::<true>(x)) - exact).abs() <= 4e-7 * exact.abs() + 1e-9, "{x}");
        }
    }
}
