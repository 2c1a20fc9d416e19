//! Sums of a column of tiles by `vpmaddubsw`.

use super::{GROUP, Operands, PARAMS};
use crate::dispatch::Prefetch;
use std::arch::x86_64::*;

/// `vpmaddubsw` on nibbles, V code vectors per tile. Eight products of at most 2·15·127 fit in an i16 lane before it must
/// be widened; products of whole bytes would not. High nibbles of 8-bit codes count sixteen times.
///
/// # Safety
/// The lengths that `Operands::rows` checks, for row j; `out`: 16 floats.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn column<const V: usize>(part: &Operands, j: usize, out: *mut f32) {
    // SAFETY: offsets are within the lengths that the caller guarantees.
    unsafe {
        let low = _mm256_set1_epi8(15);
        let ones = _mm256_set1_epi16(1);
        let prefetch = Prefetch::choose(false);
        let mut acc = [_mm256_setzero_ps(); 2];
        for g in 0..part.groups {
            let tile = part.tiles.as_ptr().add(g * (PARAMS + 64 * V));
            let q = part.q.as_ptr().add(j * part.width + g * GROUP).cast::<i32>();
            // Sums over low and over high nibbles of the two halves of the outputs.
            let mut dots = [[_mm256_setzero_si256(); 2]; 2];
            // Both nibbles of a 4-bit vector go into one sum, so four vectors fill a lane; of an 8-bit one, eight.
            for first in (0..V).step_by(V / 4) {
                let mut sums = [[_mm256_setzero_si256(); 2]; 2];
                for v in first..first + V / 4 {
                    let codes = tile.add(PARAMS + v * 64);
                    if let Some(prefetch) = prefetch {
                        prefetch.line(codes);
                    }
                    let (q0, q1) = if V == 16 {
                        (q.add(2 * v).read_unaligned(), q.add(2 * v + 1).read_unaligned())
                    } else {
                        (q.add(v).read_unaligned(), q.add(v).read_unaligned())
                    };
                    let (q0, q1) = (_mm256_set1_epi32(q0), _mm256_set1_epi32(q1));
                    for h in 0..2 {
                        let c = _mm256_loadu_si256(codes.add(32 * h).cast());
                        let a = _mm256_maddubs_epi16(_mm256_and_si256(c, low), q0);
                        let b = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16::<4>(c), low), q1);
                        if V == 16 {
                            sums[0][h] = _mm256_add_epi16(sums[0][h], _mm256_add_epi16(a, b));
                        } else {
                            sums[0][h] = _mm256_add_epi16(sums[0][h], a);
                            sums[1][h] = _mm256_add_epi16(sums[1][h], b);
                        }
                    }
                }
                for (dots, sums) in dots.iter_mut().zip(sums) {
                    for (dot, sum) in dots.iter_mut().zip(sums) {
                        *dot = _mm256_add_epi32(*dot, _mm256_madd_epi16(sum, ones));
                    }
                }
            }
            let [mut dot, high] = dots;
            if V == 32 {
                for h in 0..2 {
                    dot[h] = _mm256_add_epi32(dot[h], _mm256_slli_epi32::<4>(high[h]));
                }
            }
            let xs = _mm256_set1_ps(*part.scale.get_unchecked(j * part.groups + g));
            let xsum = _mm256_set1_ps(*part.sum.get_unchecked(j * part.groups + g));
            for h in 0..2 {
                let s = _mm256_cvtph_ps(_mm_loadu_si128(tile.add(16 * h).cast()));
                let z = _mm256_cvtph_ps(_mm_loadu_si128(tile.add(32 + 16 * h).cast()));
                acc[h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[h]), _mm256_mul_ps(s, xs), acc[h]);
                acc[h] = _mm256_fmadd_ps(z, xsum, acc[h]);
            }
        }
        _mm256_storeu_ps(out, acc[0]);
        _mm256_storeu_ps(out.add(8), acc[1]);
    }
}
