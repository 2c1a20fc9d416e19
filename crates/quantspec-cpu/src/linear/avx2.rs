//! Panels of every number format with AVX2 and f32 activations.

use super::{BF16, F16, F32, Matrix, PANEL, groups};
use crate::dispatch::Prefetch;
use std::arch::x86_64::*;

/// Rows that share a pass: ten accumulators and their operands fill sixteen registers.
const GROUP: usize = 5;

/// Pairs per block if the lanes take two passes: 2 KiB of weights (F32: 4 KiB). They stay in L1, next to as many prefetched
/// bytes and the rows' activations, even if rows alias. The fastest of 8 to 256 on Zen 4.
const BLOCK: usize = 16;

/// A panel with f32 activations, in the order of sums of [`mod@super::portable`]. T: storage type of a number.
pub(super) fn rows<const KIND: u8, T>(w: &[T], x: &[f32], stride: usize, m: usize, out: &mut [f32]) {
    const { assert!(KIND <= F32 && size_of::<T>() == if KIND == F32 { 4 } else { 2 }) };
    let pairs = w.len() / (2 * PANEL);
    assert!(w.len() == Matrix::panel_len(2 * pairs) && out.len() == m * PANEL);
    assert!(x.len() >= (m - 1) * stride + 2 * pairs);
    let (block, prefetch) = (if m <= 2 { pairs } else { BLOCK }, Prefetch::choose(m > 2));
    for first in (0..pairs).step_by(block) {
        let count = block.min(pairs - first);
        for (row, rows) in groups(m, GROUP) {
            let w = w[first * 2 * PANEL..].as_ptr();
            let x = x[row * stride + 2 * first..].as_ptr();
            let (out, add) = (out[row * PANEL..].as_mut_ptr(), first > 0);
            let prefetch = prefetch.filter(|_| row == 0);
            // SAFETY: the path was chosen because the CPU has its features; the lengths were checked above.
            unsafe {
                match rows {
                    1 => lanes::<KIND, T, 1, 4>(w, count, x, stride, out, add, prefetch),
                    2 => lanes::<KIND, T, 2, 4>(w, count, x, stride, out, add, prefetch),
                    3 => lanes::<KIND, T, 3, 2>(w, count, x, stride, out, add, prefetch),
                    4 => lanes::<KIND, T, 4, 2>(w, count, x, stride, out, add, prefetch),
                    _ => lanes::<KIND, T, GROUP, 2>(w, count, x, stride, out, add, prefetch),
                }
            }
        }
    }
}

/// Numbers k = 0 and 1 of a pair, for eight outputs from `lane` on.
///
/// # Safety
/// AVX2 and F16C; `[32][2]` or `[2][32]` numbers of the kind at `at`.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn pair<const KIND: u8, T>(at: *const T, lane: usize) -> [__m256; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        match KIND {
            BF16 => {
                let words = _mm256_loadu_si256(at.add(2 * lane).cast());
                let odd = _mm256_and_si256(words, _mm256_set1_epi32(0xffff_0000_u32 as i32));
                [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(words)), _mm256_castsi256_ps(odd)]
            }
            F16 => [0, PANEL].map(|k| _mm256_cvtph_ps(_mm_loadu_si128(at.add(k + lane).cast()))),
            _ => [0, PANEL].map(|k| _mm256_loadu_ps(at.add(k + lane).cast())),
        }
    }
}

/// V vectors of outputs at a time: with M rows, as many accumulators as fit in registers besides the weights. They start
/// from zero, or from `out` if `add`.
///
/// # Safety
/// AVX2, FMA and F16C. `w`: `[pairs]` as `pair` reads them; `x`: M rows of `2 · pairs`, `stride` apart; `out`: `[M][32]`.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn lanes<const KIND: u8, T, const M: usize, const V: usize>(
    w: *const T,
    pairs: usize,
    x: *const f32,
    stride: usize,
    out: *mut f32,
    add: bool,
    prefetch: Option<Prefetch>,
) {
    for lane in (0..PANEL).step_by(8 * V) {
        // SAFETY: all offsets are within the caller's promise.
        unsafe {
            let mut acc = [[_mm256_setzero_ps(); V]; M];
            if add {
                for (j, acc) in acc.iter_mut().enumerate() {
                    for (v, acc) in acc.iter_mut().enumerate() {
                        *acc = _mm256_loadu_ps(out.add(j * PANEL + lane + 8 * v));
                    }
                }
            }
            for i in 0..pairs {
                let at = w.add(i * 2 * PANEL);
                if let Some(prefetch) = prefetch
                    && lane == 0
                {
                    prefetch.lines(at, 2 * PANEL * size_of::<T>());
                }
                let mut values = [[_mm256_setzero_ps(); V]; 2];
                for v in 0..V {
                    [values[0][v], values[1][v]] = pair::<KIND, T>(at, lane + 8 * v);
                }
                for (k, values) in values.iter().enumerate() {
                    for (j, acc) in acc.iter_mut().enumerate() {
                        let x = _mm256_broadcast_ss(&*x.add(j * stride + 2 * i + k));
                        for (acc, value) in acc.iter_mut().zip(values) {
                            *acc = _mm256_fmadd_ps(*value, x, *acc);
                        }
                    }
                }
            }
            for (j, acc) in acc.iter().enumerate() {
                for (v, acc) in acc.iter().enumerate() {
                    _mm256_storeu_ps(out.add(j * PANEL + lane + 8 * v), *acc);
                }
            }
        }
    }
}
