//! Sums of a column of tiles by `vpdpbusd`.

use super::{GROUP, LOWER, Operands, PARAMS, ROWS, UPPER, VECTORS};
use crate::dispatch::Prefetch;
use crate::panel::PANEL;
use std::arch::x86_64::*;

/// M rows of a column, of both planes or of the upper one, with LIMBS limbs of activations.
///
/// # Safety
/// The lengths that `Operands::rows` checks for m rows; `out`: m rows of 16, 32 apart.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub(super) unsafe fn column<const BOTH: bool, const LIMBS: usize>(part: &Operands, m: usize, out: *mut f32) {
    // SAFETY: passed on.
    unsafe {
        match m {
            1 => tiles::<BOTH, LIMBS, 1>(part, out),
            2 => tiles::<BOTH, LIMBS, 2>(part, out),
            3 => tiles::<BOTH, LIMBS, 3>(part, out),
            4 => tiles::<BOTH, LIMBS, 4>(part, out),
            5 => tiles::<BOTH, LIMBS, 5>(part, out),
            6 => tiles::<BOTH, LIMBS, 6>(part, out),
            7 => tiles::<BOTH, LIMBS, 7>(part, out),
            _ => tiles::<BOTH, LIMBS, ROWS>(part, out),
        }
    }
}

/// `vpdpbusd` on codes. High nibbles are summed separately, which hides the latency of one row; sums are exact integers, so no
/// bit changes. Separate high nibbles of the upper plane alone are used in place, 16 times too large. If registers do not
/// suffice, all nibbles have one sum.
///
/// # Safety
/// As [`column()`], for M rows.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn tiles<const BOTH: bool, const LIMBS: usize, const M: usize>(part: &Operands, out: *mut f32) {
    // SAFETY: offsets are within the lengths that the caller guarantees.
    unsafe {
        let (low, prefetch) = (_mm512_set1_epi8(15), Prefetch::choose(M > 1));
        // With an index of their own, sums take 2 · LIMBS · M registers.
        let second = if M <= 2 || !BOTH && LIMBS * M <= 10 { 1 } else { 0 };
        let mut acc = [_mm512_setzero_ps(); M];
        for g in 0..part.groups {
            let (tile, lower) = (part.upper.as_ptr().add(g * UPPER), part.lower.as_ptr().wrapping_add(g * LOWER));
            let mut dots = [[[_mm512_setzero_si512(); M]; 2]; LIMBS];
            // Not between the `vpdpbusd`: at a branch the compiler would keep the inputs of later ones on the stack.
            if let Some(prefetch) = prefetch {
                prefetch.lines(tile, UPPER);
                if BOTH {
                    prefetch.lines(lower, LOWER);
                }
            }
            for v in 0..VECTORS {
                let (c0, c1) = if !BOTH && second == 1 {
                    let c = _mm512_loadu_si512(tile.add(PARAMS + v * 64).cast());
                    (_mm512_and_si512(c, low), _mm512_andnot_si512(low, c))
                } else {
                    codes::<BOTH>(tile, lower, v)
                };
                for j in 0..M {
                    let at = (j * part.groups + g) * GROUP + v * 8;
                    for (limb, dots) in dots.iter_mut().enumerate() {
                        let q = if limb == 0 { part.high.as_ptr() } else { part.low.as_ptr() };
                        let q = q.add(at).cast::<i32>();
                        dots[0][j] = _mm512_dpbusd_epi32(dots[0][j], c0, _mm512_set1_epi32(q.read_unaligned()));
                        let q = _mm512_set1_epi32(q.add(1).read_unaligned());
                        dots[second][j] = _mm512_dpbusd_epi32(dots[second][j], c1, q);
                    }
                }
            }
            let of = parameters::<BOTH>(tile);
            for j in 0..M {
                let dots = dots.each_ref().map(|dots: &[[__m512i; M]; 2]| {
                    let b = if BOTH { dots[1][j] } else { _mm512_srai_epi32::<4>(dots[1][j]) };
                    _mm512_add_epi32(dots[0][j], b)
                });
                acc[j] = add::<BOTH, LIMBS>(acc[j], dots, of, &factors::<BOTH>(part, j * part.groups + g));
            }
        }
        for (j, acc) in acc.iter().enumerate() {
            _mm512_storeu_ps(out.add(j * PANEL), *acc);
        }
    }
}

/// The codes of vector v: those of inputs 8v to 8v + 3, and those of the next four. The upper plane's alone are below 16.
///
/// # Safety
/// An upper tile, and BOTH: a lower one.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub(super) unsafe fn codes<const BOTH: bool>(tile: *const u8, lower: *const u8, v: usize) -> (__m512i, __m512i) {
    // SAFETY: the caller's promise.
    unsafe {
        let low = _mm512_set1_epi8(15);
        let c = _mm512_loadu_si512(tile.add(PARAMS + v * 64).cast());
        if BOTH {
            let d = _mm512_loadu_si512(lower.add(v * 64).cast());
            // 0xe2: selects bits of the third operand where the mask (the second) is 0, and of the first where it is 1.
            let pick = |high: __m512i, low_nibbles: __m512i| _mm512_ternarylogic_epi32::<0xe2>(low_nibbles, low, high);
            (pick(_mm512_slli_epi16::<4>(c), d), pick(c, _mm512_srli_epi16::<4>(d)))
        } else {
            (_mm512_and_si512(c, low), _mm512_and_si512(_mm512_srli_epi16::<4>(c), low))
        }
    }
}

/// Steps of the codes and zeros of a tile.
///
/// # Safety
/// An upper tile.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub(super) unsafe fn parameters<const BOTH: bool>(tile: *const u8) -> (__m512, __m512) {
    // SAFETY: the caller's promise.
    unsafe {
        let s = _mm512_cvtph_ps(_mm256_loadu_si256(tile.cast()));
        let s = if BOTH { _mm512_mul_ps(s, _mm512_set1_ps(1.0 / 16.0)) } else { s };
        (s, _mm512_cvtph_ps(_mm256_loadu_si256(tile.add(32).cast())))
    }
}

/// Step and sum of a group of a row of activations. `excess`: what codes of both planes, which are 8 too large, add to the sums.
pub(super) struct Factors {
    scale: __m512,
    sum: __m512,
    excess: __m512i,
}

/// Those at index `at` of row and group. BOTH: of both planes.
///
/// # Safety
/// `at` is within the activations.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub(super) unsafe fn factors<const BOTH: bool>(part: &Operands, at: usize) -> Factors {
    // SAFETY: the caller's promise.
    unsafe {
        let total = if BOTH { *part.total.get_unchecked(at) } else { 0 };
        Factors {
            scale: _mm512_set1_ps(*part.scale.get_unchecked(at)),
            sum: _mm512_set1_ps(*part.sum.get_unchecked(at)),
            excess: _mm512_slli_epi32::<3>(_mm512_set1_epi32(total)),
        }
    }
}

/// `acc` plus a group, whose limbs have the sums `dots`. s and z: [`parameters`] of the weights.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub(super) fn add<const BOTH: bool, const LIMBS: usize>(
    acc: __m512,
    dots: [__m512i; LIMBS],
    (s, z): (__m512, __m512),
    row: &Factors,
) -> __m512 {
    let mut dot = dots[0];
    if LIMBS == 2 {
        dot = _mm512_add_epi32(_mm512_slli_epi32::<7>(dot), dots[LIMBS - 1]);
    }
    if BOTH {
        dot = _mm512_sub_epi32(dot, row.excess);
    }
    let acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_mul_ps(s, row.scale), acc);
    _mm512_fmadd_ps(z, row.sum, acc)
}
