//! GEMMs in f32, in plain Rust: weights are widened block by block.

use super::{Panels, TILE};
use crate::dispatch::{Simd, portable};
use crate::elementwise::PANEL_TOKENS;
use crate::lanes::{madd, widen};
use crate::linear::{Matrix, Store, pairs_of};
use crate::panel::PANEL;

/// k per f32 block: 64 tokens × 256 are 64 KiB, 32 outputs × 256 another 32 (from L2).
const KC: usize = 256;

/// # Safety
/// No other thread uses rows of `y` that belong to the output panels `mine`.
pub(super) unsafe fn gemm_share(simd: Simd, matrix: &Matrix, operands: &Panels, mine: std::ops::Range<usize>) {
    let k2 = 2 * pairs_of(matrix.k);
    let mut block = vec![0f32; KC * PANEL];
    for output in mine {
        for first in (0..k2).step_by(KC) {
            let kc = KC.min(k2 - first);
            let block = &mut block[..kc * PANEL];
            let at = output * PANEL * k2;
            let range = at + first * PANEL..at + (first + kc) * PANEL;
            match &matrix.store {
                Store::Bf16(w) => {
                    let w = &w[range];
                    portable!(simd, widen_pairs(w: &[u16], block: &mut [f32]));
                }
                Store::F16(w) => widen(simd, &w[range], block),
                Store::F32(w) => block.copy_from_slice(&w[range]),
                Store::Planes(planes) => planes.values(simd, output, first, kc, block),
            }
            for panel in 0..operands.count {
                let x = operands.inputs(panel, first * PANEL_TOKENS, kc * PANEL_TOKENS);
                // SAFETY: the caller's promise.
                let c = unsafe { operands.outputs(panel, output) };
                tiles(simd, block, (1, PANEL), PANEL, kc, x, c, first > 0);
            }
        }
    }
}

/// BF16 pairs `[k/2][32][2]` to f32 `[k][32]`.
#[inline(always)]
fn widen_pairs<const FMA: bool>(from: &[u16], to: &mut [f32]) {
    for (from, to) in from.chunks_exact(2 * PANEL).zip(to.chunks_exact_mut(2 * PANEL)) {
        for l in 0..PANEL {
            to[l] = crate::lanes::bf16_value(from[2 * l]);
            to[PANEL + l] = crate::lanes::bf16_value(from[2 * l + 1]);
        }
    }
}

/// `c[j][64] (+)= Σ_p w[j·sj + p·sp] · x[p][64]` for j in 0..n, p in 0..kc; `add`: accumulate onto c.
pub(crate) fn tiles(
    simd: Simd,
    w: &[f32],
    strides: (usize, usize),
    n: usize,
    kc: usize,
    x: &[f32],
    c: &mut [f32],
    add: bool,
) {
    if simd.has_avx512() {
        portable!(simd, tiles_body[64](w: &[f32], strides: (usize, usize), n: usize, kc: usize, x: &[f32], c: &mut [f32], add: bool));
    } else {
        portable!(simd, tiles_body[16](w: &[f32], strides: (usize, usize), n: usize, kc: usize, x: &[f32], c: &mut [f32], add: bool));
    }
}

#[inline(always)]
fn tiles_body<const FMA: bool, const L: usize>(
    w: &[f32],
    strides: (usize, usize),
    n: usize,
    kc: usize,
    x: &[f32],
    c: &mut [f32],
    add: bool,
) {
    for lane in (0..PANEL_TOKENS).step_by(L) {
        let mut j = 0;
        while j < n {
            let (w, c) = (&w[j * strides.0..], &mut c[j * PANEL_TOKENS..]);
            match n - j {
                1 => tile::<FMA, 1, L>(w, strides, kc, x, lane, c, add),
                2 => tile::<FMA, 2, L>(w, strides, kc, x, lane, c, add),
                3 => tile::<FMA, 3, L>(w, strides, kc, x, lane, c, add),
                4 | 8 => tile::<FMA, 4, L>(w, strides, kc, x, lane, c, add),
                5 => tile::<FMA, 5, L>(w, strides, kc, x, lane, c, add),
                _ => tile::<FMA, TILE, L>(w, strides, kc, x, lane, c, add),
            }
            j += match n - j {
                8 => 4,
                left => left.min(TILE),
            };
        }
    }
}

#[inline(always)]
fn tile<const FMA: bool, const N: usize, const L: usize>(
    w: &[f32],
    (sj, sp): (usize, usize),
    kc: usize,
    x: &[f32],
    lane: usize,
    c: &mut [f32],
    add: bool,
) {
    let mut acc = [[0f32; L]; N];
    if add {
        for (j, acc) in acc.iter_mut().enumerate() {
            acc.copy_from_slice(&c[j * PANEL_TOKENS + lane..][..L]);
        }
    }
    assert!(lane + L <= PANEL_TOKENS && x.len() >= kc * PANEL_TOKENS && w.len() > (N - 1) * sj + (kc - 1) * sp);
    for p in 0..kc {
        // SAFETY: L floats from lane `lane` of row p, and the last weight, are inside the lengths checked above.
        let x: [f32; L] = unsafe { x.as_ptr().add(p * PANEL_TOKENS + lane).cast::<[f32; L]>().read_unaligned() };
        for (j, acc) in acc.iter_mut().enumerate() {
            // SAFETY: as above. Bounds checks would cost a fifth of the time.
            let w = unsafe { *w.get_unchecked(j * sj + p * sp) };
            for l in 0..L {
                acc[l] = madd::<FMA>(x[l], w, acc[l]);
            }
        }
    }
    for (j, acc) in acc.iter().enumerate() {
        c[j * PANEL_TOKENS + lane..][..L].copy_from_slice(acc);
    }
}
