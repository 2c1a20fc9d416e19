//! Panels of tokens: the input of a GEMM.

use crate::dispatch::{Simd, portable};
use crate::elementwise::{LANES, PANEL_TOKENS};
use crate::lanes::{bf16_bits, bf16_rest};
use crate::linear::{Matrix, Store, pairs_of};

/// What a panel holds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Format {
    /// `[k][64]` f32.
    F32,
    /// `[k/2][64][2]` BF16.
    Pairs,
    /// `[k/2][2][64][2]` BF16: a pair of features, rounded, then a pair of their rests ([`bf16_rest`]).
    Sums,
}

impl Format {
    /// The format of the input of `matrix` on this path.
    pub(crate) fn of(simd: Simd, matrix: &Matrix) -> Format {
        match &matrix.store {
            _ if matrix.takes_bf16(simd) => Format::Pairs,
            Store::F16(_) if simd == Simd::Amx && matrix.k.is_multiple_of(32) => Format::Sums,
            _ => Format::F32,
        }
    }

    /// Floats of `features` features of 64 tokens; an even number of features.
    pub(crate) const fn len(self, features: usize) -> usize {
        match self {
            Format::Pairs => features / 2 * PANEL_TOKENS,
            Format::F32 | Format::Sums => features * PANEL_TOKENS,
        }
    }
}

/// Length of a panel in floats, whatever its format; at least whole tiles of 16 pairs.
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
    format: Format,
    panel: &mut [f32],
    first: usize,
    lane: usize,
    values: &[[f32; LANES]],
) {
    #[inline(always)]
    fn word(low: f32, high: f32) -> f32 {
        f32::from_bits(u32::from(bf16_bits(low)) | u32::from(bf16_bits(high)) << 16)
    }
    #[inline(always)]
    fn body<const FMA: bool>(format: Format, panel: &mut [f32], first: usize, lane: usize, values: &[[f32; LANES]]) {
        match format {
            Format::Pairs => {
                for (i, pair) in values.chunks(2).enumerate() {
                    let out = &mut panel[(first / 2 + i) * PANEL_TOKENS + lane..][..LANES];
                    for l in 0..LANES {
                        out[l] = word(pair[0][l], if pair.len() == 2 { pair[1][l] } else { 0.0 });
                    }
                }
            }
            Format::Sums => {
                for (i, pair) in values.chunks_exact(2).enumerate() {
                    let (large, small) = panel[(first + 2 * i) * PANEL_TOKENS..].split_at_mut(PANEL_TOKENS);
                    let (large, small) = (&mut large[lane..][..LANES], &mut small[lane..][..LANES]);
                    for l in 0..LANES {
                        large[l] = word(pair[0][l], pair[1][l]);
                        small[l] = word(bf16_rest(pair[0][l]), bf16_rest(pair[1][l]));
                    }
                }
            }
            Format::F32 => {
                for (i, values) in values.iter().enumerate() {
                    panel[(first + i) * PANEL_TOKENS + lane..][..LANES].copy_from_slice(values);
                }
                if (first + values.len()) % 2 == 1 {
                    panel[(first + values.len()) * PANEL_TOKENS + lane..][..LANES].fill(0.0);
                }
            }
        }
    }
    portable!(simd, body(format: Format, panel: &mut [f32], first: usize, lane: usize, values: &[[f32; LANES]]));
}
