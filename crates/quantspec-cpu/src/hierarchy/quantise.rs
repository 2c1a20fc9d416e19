//! Weights into tiles, as core quantises them.

use super::{GROUP, LOWER, PARAMS, TILE_ROWS, UPPER};
use crate::dispatch::{Simd, portable};
use crate::lanes::{f16_bits, f16_is_finite, f16_value, rint_i32};
use crate::w4::{Group, halves};
use quantspec_core::quantize::TARGET_SHRINK;
use quantspec_core::weights::{FIRST_CODES, STEPS, ZERO, grid_of};
use quantspec_core::{Error, Result};

/// Quantises a panel: `rows` f32 `[rows][k]`, up to 32 of them, into the panel's tiles; `lower` is empty without a lower
/// plane, `importance` has the inputs' or is empty. The result equals [`quantspec_core::weights::quantize_row`] or
/// [`quantspec_core::weights::quantize_row_upper`].
///
/// # Errors
/// [`quantspec_core::ErrorKind::NotFinite`] if the range of a group exceeds f16.
pub(crate) fn encode(
    simd: Simd,
    rows: &[f32],
    importance: &[f32],
    k: usize,
    upper: &mut [u8],
    lower: &mut [u8],
) -> Result<()> {
    let (groups, both) = (k.div_ceil(GROUP), !lower.is_empty());
    let mut codes = [0u8; GROUP];
    for (lane, row) in rows.chunks_exact(k).enumerate() {
        for (g, x) in row.chunks(GROUP).enumerate() {
            let out = &mut codes;
            let weigh = if importance.is_empty() { importance } else { &importance[g * GROUP..][..x.len()] };
            let (s, z) =
                portable!(simd, group_body(x: &[f32], weigh: &[f32], both: bool, out: &mut [u8; GROUP]) -> (u16, u16));
            if !f16_is_finite(s) || !f16_is_finite(z) {
                return Err(Error::not_finite("a group of weights spans more than half precision can hold"));
            }
            let tile = lane / TILE_ROWS * groups + g;
            let upper = &mut upper[tile * UPPER..][..UPPER];
            let lane = lane % TILE_ROWS;
            upper[2 * lane..][..2].copy_from_slice(&s.to_le_bytes());
            upper[2 * (TILE_ROWS + lane)..][..2].copy_from_slice(&z.to_le_bytes());
            for (v, codes) in codes.chunks_exact(8).enumerate() {
                for b in 0..4 {
                    let at = v * 64 + lane * 4 + b;
                    upper[PARAMS + at] = codes[b] >> 4 | codes[4 + b] & 0xf0;
                    if both {
                        lower[tile * LOWER + at] = codes[b] & 15 | codes[4 + b] << 4;
                    }
                }
            }
        }
    }
    Ok(())
}

/// Scale, zero (bits of f16) and codes of one group, with zero codes after it. The same IEEE operations as core's,
/// vectorised.
#[inline(always)]
fn group_body<const FMA: bool>(x: &[f32], importance: &[f32], both: bool, codes: &mut [u8; GROUP]) -> (u16, u16) {
    let mut padded = [x[0]; GROUP];
    padded[..x.len()].copy_from_slice(x);
    let (low, high) = (Group::plain(&padded).least(), Group::plain(&padded).greatest());
    codes.fill(0);
    if low == high {
        codes[..x.len()].fill(ZERO);
        return (0, f16_bits(low));
    }
    let plain = if both { of_steps(low, high, STEPS[0], FIRST_CODES[0]) } else { halves((high - low) / 15.0, low) };
    if !f16_is_finite(plain.0) || !f16_is_finite(plain.1) {
        return plain;
    }
    let found = match grid_of(x, low, high, both) {
        Some(grid) => (grid.scale.to_bits(), grid.zero.to_bits()),
        None if importance.is_empty() => searched(&Group::plain(x), low, high, plain, both),
        None => searched(&Group::<true> { x, importance }, low, high, plain, both),
    };
    let (scale, zero) = (f16_value(found.0), f16_value(found.1));
    let mut out = [0u8; GROUP];
    for (code, x) in out.iter_mut().zip(&padded) {
        let code_of_both = rint_i32(((x - zero) / (scale / 16.0)).clamp(-8.0, 247.0));
        let code_of_upper = 16 * rint_i32(((x - zero) / scale).clamp(0.0, 15.0));
        *code = (if both { code_of_both } else { code_of_upper } + i32::from(ZERO)) as u8;
    }
    codes[..x.len()].copy_from_slice(&out[..x.len()]);
    found
}

/// Parameters of a group whose range has this many fine steps and begins at this code.
#[inline(always)]
fn of_steps(low: f32, high: f32, steps: u8, first: u8) -> (u16, u16) {
    let step = (high - low) / f32::from(steps);
    halves(16.0 * step, low + (8.0 - f32::from(first)) * step)
}

/// Core's searches, from the finite parameters `plain`.
#[inline(always)]
fn searched<const WEIGHTED: bool>(
    group: &Group<WEIGHTED>,
    low: f32,
    high: f32,
    plain: (u16, u16),
    both: bool,
) -> (u16, u16) {
    if !both {
        return group.search(low, high, plain, &TARGET_SHRINK);
    }
    let (mut plain, mut taken, mut least) = (plain, STEPS[0], group.squared_error_of_both(plain));
    for steps in &STEPS[1..] {
        let found = of_steps(low, high, *steps, FIRST_CODES[0]);
        let error = group.squared_error_of_both(found);
        if error < least {
            (plain, taken, least) = (found, *steps, error);
        }
    }
    let start = (group.squared_error(plain), plain);
    let firsts = FIRST_CODES[1..].iter().filter(|&&first| first <= 255 - taken);
    firsts.fold(start, |best, &first| group.better(best, of_steps(low, high, taken, first))).1
}
