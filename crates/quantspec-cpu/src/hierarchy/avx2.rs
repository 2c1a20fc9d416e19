//! Sums of a draft's column of tiles by `vpmaddubsw`.

use super::{GROUP, LOWER, Operands, PARAMS, UPPER, VECTORS};
use crate::dispatch::Prefetch;
use std::arch::x86_64::*;

/// Integer sums of a tile's nibbles and 32 int8 activations, for outputs 0..8 and 8..16. Eight products of at most
/// 2·15·127 fit in an i16 lane before it must be widened.
///
/// # Safety
/// AVX2; 256 bytes at `codes` and 32 at `q`.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn dots(codes: *const u8, q: *const i32, prefetch: Option<Prefetch>) -> [__m256i; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let (low, ones) = (_mm256_set1_epi8(15), _mm256_set1_epi16(1));
        let mut dots = [_mm256_setzero_si256(); 2];
        for first in (0..VECTORS).step_by(4) {
            let mut sums = [_mm256_setzero_si256(); 2];
            for v in first..first + 4 {
                let codes = codes.add(v * 64);
                if let Some(prefetch) = prefetch {
                    prefetch.line(codes);
                }
                let q0 = _mm256_set1_epi32(q.add(2 * v).read_unaligned());
                let q1 = _mm256_set1_epi32(q.add(2 * v + 1).read_unaligned());
                for (h, sum) in sums.iter_mut().enumerate() {
                    let c = _mm256_loadu_si256(codes.add(32 * h).cast());
                    let a = _mm256_maddubs_epi16(_mm256_and_si256(c, low), q0);
                    let b = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16::<4>(c), low), q1);
                    *sum = _mm256_add_epi16(*sum, _mm256_add_epi16(a, b));
                }
            }
            for (dot, sum) in dots.iter_mut().zip(sums) {
                *dot = _mm256_add_epi32(*dot, _mm256_madd_epi16(sum, ones));
            }
        }
        dots
    }
}

/// The draft's dot products of row j.
///
/// # Safety
/// The lengths that `Operands::rows` checks, for row j; `out`: 16 floats.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn column<const BOTH: bool>(part: &Operands, j: usize, out: *mut f32) {
    // SAFETY: offsets are within the lengths that the caller guarantees.
    unsafe {
        let prefetch = Prefetch::choose(false);
        let mut acc = [_mm256_setzero_ps(); 2];
        for g in 0..part.groups {
            let (tile, at) = (part.upper.as_ptr().add(g * UPPER), j * part.groups + g);
            let q = part.high.as_ptr().add(at * GROUP).cast::<i32>();
            let mut dot = dots(tile.add(PARAMS), q, prefetch);
            if BOTH {
                let lower = dots(part.lower.as_ptr().add(g * LOWER), q, prefetch);
                let offset = _mm256_slli_epi32::<3>(_mm256_set1_epi32(*part.total.get_unchecked(at)));
                for (dot, lower) in dot.iter_mut().zip(lower) {
                    *dot = _mm256_add_epi32(_mm256_slli_epi32::<4>(*dot), _mm256_sub_epi32(lower, offset));
                }
            }
            let step = if BOTH { 1.0 / 16.0 } else { 1.0 };
            let scale = _mm256_set1_ps(*part.scale.get_unchecked(at));
            let sum = _mm256_set1_ps(*part.sum.get_unchecked(at));
            for h in 0..2 {
                let s = _mm256_cvtph_ps(_mm_loadu_si128(tile.add(16 * h).cast()));
                let s = _mm256_mul_ps(s, _mm256_set1_ps(step));
                let z = _mm256_cvtph_ps(_mm_loadu_si128(tile.add(32 + 16 * h).cast()));
                acc[h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[h]), _mm256_mul_ps(s, scale), acc[h]);
                acc[h] = _mm256_fmadd_ps(z, sum, acc[h]);
            }
        }
        _mm256_storeu_ps(out, acc[0]);
        _mm256_storeu_ps(out.add(8), acc[1]);
    }
}
