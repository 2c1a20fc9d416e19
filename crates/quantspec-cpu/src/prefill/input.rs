//! Panels of tokens: the input of a GEMM, in f32 or BF16 pairs.

use crate::dispatch::{Simd, portable};
use crate::elementwise::{LANES, PANEL_TOKENS};
use crate::lanes::bf16_bits;
use crate::linear::{Matrix, Store, pairs_of};

/// Returns true if the input of `matrix` is BF16 pairs on this path.
pub(crate) fn takes_pairs(simd: Simd, matrix: &Matrix) -> bool {
    simd.has_avx512() && matches!(matrix.store, Store::Bf16(_) | Store::Planes(_))
}

/// Length of a panel in floats, `[k][64]` f32 or `[k/2][64]` words of BF16 pairs; at least whole tiles of 16 pairs.
pub(crate) const fn panel_len(k: usize) -> usize {
    if k < 16 { 16 * PANEL_TOKENS } else { 2 * pairs_of(k) * PANEL_TOKENS }
}

/// The floats after a panel's pairs that tiles read; they must be zero.
pub(crate) const fn tile_padding(k: usize) -> std::ops::Range<usize> {
    pairs_of(k) * PANEL_TOKENS..pairs_of(k).div_ceil(16) * 16 * PANEL_TOKENS
}

/// Writes features `first ..` (an even number) of sixteen tokens from lane `lane` on into a panel that is the input of a
/// GEMM.
pub(crate) fn put_features(
    simd: Simd,
    pairs: bool,
    panel: &mut [f32],
    first: usize,
    lane: usize,
    values: &[[f32; LANES]],
) {
    #[inline(always)]
    fn body<const FMA: bool>(pairs: bool, panel: &mut [f32], first: usize, lane: usize, values: &[[f32; LANES]]) {
        if pairs {
            for (i, pair) in values.chunks(2).enumerate() {
                let out = &mut panel[(first / 2 + i) * PANEL_TOKENS + lane..][..LANES];
                for l in 0..LANES {
                    let high = if pair.len() == 2 { bf16_bits(pair[1][l]) } else { 0 };
                    out[l] = f32::from_bits(u32::from(bf16_bits(pair[0][l])) | u32::from(high) << 16);
                }
            }
        } else {
            for (i, values) in values.iter().enumerate() {
                panel[(first + i) * PANEL_TOKENS + lane..][..LANES].copy_from_slice(values);
            }
            if (first + values.len()) % 2 == 1 {
                panel[(first + values.len()) * PANEL_TOKENS + lane..][..LANES].fill(0.0);
            }
        }
    }
    portable!(simd, body(pairs: bool, panel: &mut [f32], first: usize, lane: usize, values: &[[f32; LANES]]));
}
