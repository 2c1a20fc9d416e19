//! Sums of a column of tiles by `vpdpbusd`.

use super::{Bits, GROUP, Operands, PANEL, PARAMS};
use crate::dispatch::Prefetch;
use std::arch::x86_64::*;

/// `vpdpbusd` on codes. High nibbles are used in place, 16 times too large, and shifted once per group.
///
/// # Safety
/// The lengths that `Operands::rows` checks for M rows; `out`: M rows of 16, 32 apart.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub(super) unsafe fn column<const M: usize>(part: &Operands, out: *mut f32) {
    // SAFETY: passed on.
    unsafe {
        match part.bits {
            Bits::Four => tiles::<M, 16>(part, out),
            Bits::Eight => tiles::<M, 32>(part, out),
        }
    }
}

/// V code vectors to a tile.
///
/// # Safety
/// As [`column()`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn tiles<const M: usize, const V: usize>(part: &Operands, out: *mut f32) {
    // SAFETY: offsets are within the lengths that the caller guarantees.
    unsafe {
        let (low, prefetch) = (_mm512_set1_epi8(15), Prefetch::choose(M > 1));
        let mut acc = [_mm512_setzero_ps(); M];
        for g in 0..part.groups {
            let tile = part.tiles.as_ptr().add(g * (PARAMS + V * 64));
            let q = part.q.as_ptr().add(g * GROUP);
            let mut a = [_mm512_setzero_si512(); M];
            let mut b = a;
            if let Some(prefetch) = prefetch {
                prefetch.line(tile);
            }
            for v in 0..16 {
                if let Some(prefetch) = prefetch {
                    for line in 0..V / 16 {
                        prefetch.line(tile.wrapping_add(PARAMS + v * 4 * V + line * 64));
                    }
                }
                let (c0, c1) = if V == 16 {
                    let c = _mm512_loadu_si512(tile.add(PARAMS + v * 64).cast());
                    (_mm512_and_si512(c, low), _mm512_andnot_si512(low, c))
                } else {
                    let c = tile.add(PARAMS + v * 128);
                    (_mm512_loadu_si512(c.cast()), _mm512_loadu_si512(c.add(64).cast()))
                };
                for j in 0..M {
                    let q = q.add(j * part.width + v * 8).cast::<i32>();
                    a[j] = _mm512_dpbusd_epi32(a[j], c0, _mm512_set1_epi32(q.read_unaligned()));
                    b[j] = _mm512_dpbusd_epi32(b[j], c1, _mm512_set1_epi32(q.add(1).read_unaligned()));
                }
            }
            let s = _mm512_cvtph_ps(_mm256_loadu_si256(tile.cast()));
            let z = _mm512_cvtph_ps(_mm256_loadu_si256(tile.add(32).cast()));
            for j in 0..M {
                let b = if V == 16 { _mm512_srai_epi32::<4>(b[j]) } else { b[j] };
                let dot = _mm512_cvtepi32_ps(_mm512_add_epi32(a[j], b));
                let xs = _mm512_set1_ps(*part.scale.get_unchecked(j * part.groups + g));
                let xsum = _mm512_set1_ps(*part.sum.get_unchecked(j * part.groups + g));
                acc[j] = _mm512_fmadd_ps(dot, _mm512_mul_ps(s, xs), acc[j]);
                acc[j] = _mm512_fmadd_ps(z, xsum, acc[j]);
            }
        }
        for (j, acc) in acc.iter().enumerate() {
            _mm512_storeu_ps(out.add(j * PANEL), *acc);
        }
    }
}
