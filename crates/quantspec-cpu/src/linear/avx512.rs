//! Panels with AVX-512: BF16 by `vdpbf16ps`, F16 and F32 with f32 activations.

use super::{F16, F32, GROUP, Matrix, PANEL, groups};
use crate::dispatch::{Prefetch, fetch_far};
use std::arch::x86_64::*;

/// Pairs per block if rows take several passes: 16 KiB of weights, which stay in L1 after the first pass.
const BLOCK: usize = 128;

/// Accumulators of one row, in floats: two chains of 32 outputs.
pub(super) const CHAINS: usize = 2 * PANEL;

/// Rows of a BF16 panel with BF16 activations; `chains`: scratch of `m · 64` floats.
pub(super) fn rows(w: &[u16], x: &[u16], stride: usize, m: usize, chains: &mut [f32], out: &mut [f32]) {
    let pairs = w.len() / (2 * PANEL);
    assert!(w.len() == Matrix::panel_len(2 * pairs) && x.len() >= (m - 1) * stride + 2 * pairs);
    assert!(chains.len() >= m * CHAINS && out.len() == m * PANEL);
    let (block, prefetch) = (if m <= GROUP { pairs } else { BLOCK }, Prefetch::choose(false));
    for first in (0..pairs).step_by(block) {
        let count = block.min(pairs - first);
        for (pass, (row, rows)) in groups(m, GROUP).enumerate() {
            let w = w[first * 2 * PANEL..].as_ptr();
            let x = x[row * stride + 2 * first..].as_ptr();
            let chains = chains[row * CHAINS..].as_mut_ptr();
            let ahead = Ahead::of_pass(w, count, pass, m, prefetch);
            // SAFETY: `run` allows BF16 activations on the AVX-512 path only; the lengths were checked above.
            unsafe {
                match rows {
                    1 => panel::<1>(w, count, x, stride, chains, first > 0, &ahead),
                    2 => panel::<2>(w, count, x, stride, chains, first > 0, &ahead),
                    3 => panel::<3>(w, count, x, stride, chains, first > 0, &ahead),
                    4 => panel::<4>(w, count, x, stride, chains, first > 0, &ahead),
                    5 => panel::<5>(w, count, x, stride, chains, first > 0, &ahead),
                    _ => panel::<GROUP>(w, count, x, stride, chains, first > 0, &ahead),
                }
            }
        }
    }
    for (chains, out) in chains.chunks_exact(CHAINS).zip(out.chunks_exact_mut(PANEL)) {
        let (even, odd) = chains.split_at(PANEL);
        out.iter_mut().zip(even).zip(odd).for_each(|((out, even), odd)| *out = even + odd);
    }
}

/// What a pass over a block prefetches.
struct Ahead<T> {
    /// Its own weights, in the first pass.
    own: Option<Prefetch>,
    /// Half of the following block, from here on, if rows take several passes: memory is busy during all of them.
    next: Option<*const T>,
}

impl<T> Ahead<T> {
    /// Of pass `pass` of m rows over `pairs` pairs at `w`.
    fn of_pass(w: *const T, pairs: usize, pass: usize, m: usize, own: Option<Prefetch>) -> Ahead<T> {
        let passes = m.div_ceil(GROUP);
        let next = (passes > 1).then(|| w.wrapping_add((pairs + pairs * pass / passes) * 2 * PANEL));
        Ahead { own: own.filter(|_| pass == 0), next }
    }

    /// Before `numbers` numbers of the block, from number `at` on, are read.
    #[inline(always)]
    fn prefetch(&self, w: *const T, at: usize, numbers: usize) {
        if let Some(own) = self.own {
            own.lines(w.wrapping_add(at), numbers * size_of::<T>());
        }
        if let Some(next) = self.next {
            fetch_far(next.wrapping_add(at / 2));
        }
    }
}

/// Two accumulators per (row, vector), for even and for odd pairs: one chain would expose the latency of `vdpbf16ps`. The
/// order is the same for every M. They start from zero, or from `chains` if `add`.
///
/// # Safety
/// AVX-512 F and BF16. `w`: `[pairs][32][2]`; `x`: M rows of `2 · pairs`, `stride` apart; `chains`: `[M][2][32]`.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn panel<const M: usize>(
    w: *const u16,
    pairs: usize,
    x: *const u16,
    stride: usize,
    chains: *mut f32,
    add: bool,
    ahead: &Ahead<u16>,
) {
    // SAFETY: all offsets are within the caller's promise; a prefetch may have any address.
    unsafe {
        let sums = |chain: usize, v: usize, j: usize| chains.add(j * CHAINS + chain * PANEL + 16 * v);
        let mut acc = [[[_mm512_setzero_ps(); M]; 2]; 2];
        if add {
            for (chain, acc) in acc.iter_mut().enumerate() {
                for (v, acc) in acc.iter_mut().enumerate() {
                    for (j, acc) in acc.iter_mut().enumerate() {
                        *acc = _mm512_loadu_ps(sums(chain, v, j));
                    }
                }
            }
        }
        let step = |acc: &mut [[__m512; M]; 2], pair: usize| {
            ahead.prefetch(w, pair * 2 * PANEL, 2 * PANEL);
            let w0: __m512bh = std::mem::transmute(_mm512_loadu_si512(w.add(pair * 64).cast()));
            let w1: __m512bh = std::mem::transmute(_mm512_loadu_si512(w.add(pair * 64 + 32).cast()));
            for j in 0..M {
                let x = _mm512_set1_epi32(x.add(j * stride + 2 * pair).cast::<i32>().read_unaligned());
                let x: __m512bh = std::mem::transmute(x);
                acc[0][j] = _mm512_dpbf16_ps(acc[0][j], w0, x);
                acc[1][j] = _mm512_dpbf16_ps(acc[1][j], w1, x);
            }
        };
        let mut pair = 0;
        while pair + 1 < pairs {
            step(&mut acc[0], pair);
            step(&mut acc[1], pair + 1);
            pair += 2;
        }
        if pair < pairs {
            step(&mut acc[0], pair);
        }
        for (chain, acc) in acc.iter().enumerate() {
            for (v, acc) in acc.iter().enumerate() {
                for (j, acc) in acc.iter().enumerate() {
                    _mm512_storeu_ps(sums(chain, v, j), *acc);
                }
            }
        }
    }
}

/// A panel of F16 or F32 with f32 activations, in the order of sums of [`mod@super::portable`]. T: storage type of a number.
pub(super) fn single_rows<const KIND: u8, T>(w: &[T], x: &[f32], stride: usize, m: usize, out: &mut [f32]) {
    const { assert!(KIND == F16 && size_of::<T>() == 2 || KIND == F32 && size_of::<T>() == 4) };
    let pairs = w.len() / (2 * PANEL);
    assert!(w.len() == Matrix::panel_len(2 * pairs) && out.len() == m * PANEL);
    assert!(x.len() >= (m - 1) * stride + 2 * pairs);
    let (block, prefetch) = (if m <= GROUP { pairs } else { BLOCK }, Prefetch::choose(m > 2));
    for first in (0..pairs).step_by(block) {
        let k = 2 * block.min(pairs - first);
        for (pass, (row, rows)) in groups(m, GROUP).enumerate() {
            let w = w[first * 2 * PANEL..].as_ptr();
            let x = x[row * stride + 2 * first..].as_ptr();
            let (out, add) = (out[row * PANEL..].as_mut_ptr(), first > 0);
            let ahead = Ahead::of_pass(w, k / 2, pass, m, prefetch);
            // SAFETY: the path was chosen because the CPU has its features; the lengths were checked above.
            unsafe {
                match rows {
                    1 => singles::<KIND, T, 1>(w, k, x, stride, out, add, &ahead),
                    2 => singles::<KIND, T, 2>(w, k, x, stride, out, add, &ahead),
                    3 => singles::<KIND, T, 3>(w, k, x, stride, out, add, &ahead),
                    4 => singles::<KIND, T, 4>(w, k, x, stride, out, add, &ahead),
                    5 => singles::<KIND, T, 5>(w, k, x, stride, out, add, &ahead),
                    _ => singles::<KIND, T, GROUP>(w, k, x, stride, out, add, &ahead),
                }
            }
        }
    }
}

/// One accumulator per (row, vector), from zero, or from `out` if `add`.
///
/// # Safety
/// AVX-512 F. `w`: `[k][32]`; `x`: M rows of k, `stride` apart; `out`: `[M][32]`.
#[target_feature(enable = "avx512f")]
unsafe fn singles<const KIND: u8, T, const M: usize>(
    w: *const T,
    k: usize,
    x: *const f32,
    stride: usize,
    out: *mut f32,
    add: bool,
    ahead: &Ahead<T>,
) {
    // SAFETY: all offsets are within the caller's promise; a prefetch may have any address.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); 2]; M];
        if add {
            for (j, acc) in acc.iter_mut().enumerate() {
                *acc = [0, 16].map(|lane| _mm512_loadu_ps(out.add(j * PANEL + lane)));
            }
        }
        for c in 0..k {
            ahead.prefetch(w, c * PANEL, PANEL);
            let at = w.add(c * PANEL);
            let values = [0, 16].map(|lane| match KIND {
                F16 => _mm512_cvtph_ps(_mm256_loadu_si256(at.add(lane).cast())),
                _ => _mm512_loadu_ps(at.add(lane).cast()),
            });
            for (j, acc) in acc.iter_mut().enumerate() {
                let x = _mm512_set1_ps(*x.add(j * stride + c));
                for (acc, value) in acc.iter_mut().zip(values) {
                    *acc = _mm512_fmadd_ps(value, x, *acc);
                }
            }
        }
        for (j, acc) in acc.iter().enumerate() {
            _mm512_storeu_ps(out.add(j * PANEL), acc[0]);
            _mm512_storeu_ps(out.add(j * PANEL + 16), acc[1]);
        }
    }
}
