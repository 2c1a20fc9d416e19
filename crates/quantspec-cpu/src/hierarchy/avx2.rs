//! Sums of a column of tiles with AVX2: of a draft by `vpmaddubsw`, of the target with f32 activations.

use super::{GROUP, LOWER, Operands, PARAMS, SINGLE_ROWS, TILE_ROWS, UPPER, VECTORS};
use crate::dispatch::Prefetch;
use crate::panel::PANEL;
use std::arch::x86_64::*;

/// m rows of f32 activations, in the order of sums of `portable::singles`. x: `stride` apart, zero after k.
pub(super) fn rows(upper: &[u8], lower: &[u8], x: &[f32], stride: usize, m: usize, out: &mut [f32]) {
    let groups = upper.len() / UPPER;
    assert!(lower.is_empty() || lower.len() == groups * LOWER);
    assert!(stride >= groups * GROUP && x.len() >= (m - 1) * stride + groups * GROUP);
    assert!(out.len() >= (m - 1) * PANEL + TILE_ROWS && (1..=SINGLE_ROWS).contains(&m));
    macro_rules! singles {
        ($both:literal) => {
            match m {
                1 => singles::<$both, 1>(upper, lower, x, stride, out),
                2 => singles::<$both, 2>(upper, lower, x, stride, out),
                3 => singles::<$both, 3>(upper, lower, x, stride, out),
                4 => singles::<$both, 4>(upper, lower, x, stride, out),
                _ => singles::<$both, SINGLE_ROWS>(upper, lower, x, stride, out),
            }
        };
    }
    // SAFETY: the path was chosen because the CPU has its features; the lengths were checked above.
    unsafe { if lower.is_empty() { singles!(false) } else { singles!(true) } }
}

/// The sum of a group of activations in all lanes, in the order of [`crate::lanes::sum16`].
///
/// # Safety
/// AVX; 32 floats at `q`.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn group_sum(q: *const f32) -> __m256 {
    const { assert!(GROUP == 32) };
    // SAFETY: the caller's promise.
    unsafe {
        let eight = |i: usize| _mm256_add_ps(_mm256_loadu_ps(q.add(i)), _mm256_loadu_ps(q.add(16 + i)));
        let v = _mm256_add_ps(eight(0), eight(8));
        let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
        _mm256_broadcastss_ps(_mm_add_ss(v, _mm_movehdup_ps(v)))
    }
}

/// Codes of sixteen outputs are unpacked once and multiplied by M rows.
///
/// # Safety
/// AVX2, FMA and F16C, and the lengths that [`rows`] checks for M rows.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn singles<const BOTH: bool, const M: usize>(
    upper: &[u8],
    lower: &[u8],
    x: &[f32],
    stride: usize,
    out: &mut [f32],
) {
    // SAFETY: offsets are within the caller's promise.
    unsafe {
        let prefetch = Prefetch::choose(M > 1);
        let (low, high) = (_mm256_set1_epi8(15), _mm256_set1_epi8(-16));
        // Moves byte b of each word to its lowest place and clears the others.
        let first = _mm256_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12);
        let byte = |b: i32| _mm256_or_si256(first, _mm256_set1_epi32(b | 0x8080_8000_u32 as i32));
        let bytes = [byte(0), byte(1), byte(2), byte(3)];
        let mut acc = [[_mm256_setzero_ps(); 2]; M];
        for (g, tile) in upper.chunks_exact(UPPER).enumerate() {
            let (tile, lower) = (tile.as_ptr(), lower.as_ptr().wrapping_add(g * LOWER));
            if let Some(prefetch) = prefetch {
                prefetch.lines(tile, UPPER);
                if BOTH {
                    prefetch.lines(lower, LOWER);
                }
            }
            let q = x.as_ptr().add(g * GROUP);
            let mut dots = [[_mm256_setzero_ps(); 2]; M];
            for v in 0..VECTORS {
                // Of outputs 0..8 and 8..16, the words of low and of high nibbles.
                let mut words = [[_mm256_setzero_si256(); 2]; 2];
                for (half, words) in words.iter_mut().enumerate() {
                    let u = _mm256_loadu_si256(tile.add(PARAMS + v * 64 + 32 * half).cast());
                    *words = [_mm256_and_si256(_mm256_slli_epi16::<4>(u), high), _mm256_and_si256(u, high)];
                    if BOTH {
                        let l = _mm256_loadu_si256(lower.add(v * 64 + 32 * half).cast());
                        words[0] = _mm256_or_si256(words[0], _mm256_and_si256(l, low));
                        words[1] = _mm256_or_si256(words[1], _mm256_and_si256(_mm256_srli_epi16::<4>(l), low));
                    }
                }
                for h in 0..2 {
                    for (b, byte) in bytes.iter().enumerate() {
                        let mut codes = [_mm256_setzero_ps(); 2];
                        for (code, words) in codes.iter_mut().zip(&words) {
                            *code = _mm256_cvtepi32_ps(_mm256_shuffle_epi8(words[h], *byte));
                            if BOTH {
                                *code = _mm256_sub_ps(*code, _mm256_set1_ps(8.0));
                            }
                        }
                        for (j, dots) in dots.iter_mut().enumerate() {
                            let x = _mm256_broadcast_ss(&*q.add(j * stride + 8 * v + 4 * h + b));
                            for (dot, code) in dots.iter_mut().zip(codes) {
                                *dot = _mm256_fmadd_ps(code, x, *dot);
                            }
                        }
                    }
                }
            }
            for (j, (acc, dots)) in acc.iter_mut().zip(dots).enumerate() {
                let sum = group_sum(q.add(j * stride));
                for (h, (acc, dot)) in acc.iter_mut().zip(dots).enumerate() {
                    let s = _mm256_cvtph_ps(_mm_loadu_si128(tile.add(16 * h).cast()));
                    let z = _mm256_cvtph_ps(_mm_loadu_si128(tile.add(32 + 16 * h).cast()));
                    *acc = _mm256_fmadd_ps(dot, _mm256_mul_ps(s, _mm256_set1_ps(1.0 / 16.0)), *acc);
                    *acc = _mm256_fmadd_ps(z, sum, *acc);
                }
            }
        }
        for (j, acc) in acc.iter().enumerate() {
            _mm256_storeu_ps(out.as_mut_ptr().add(j * PANEL), acc[0]);
            _mm256_storeu_ps(out.as_mut_ptr().add(j * PANEL + 8), acc[1]);
        }
    }
}

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
