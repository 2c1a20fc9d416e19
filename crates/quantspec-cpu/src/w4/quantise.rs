//! Weights into tiles, as core quantises them.

use super::{Bits, GROUP, Group, PARAMS, TILE_ROWS, halves};
use crate::dispatch::{Simd, portable};
use crate::lanes::{f16_bits, f16_is_finite, f16_value, rint_i32};
use quantspec_core::quantize::SHRINK;
use quantspec_core::{Error, Result};

/// Quantises a panel: `rows` f32 `[rows][k]`, up to 32 of them, into the panel's tiles; `importance` has the inputs' or is
/// empty. The result equals [`quantspec_core::quantize::quantize_weights_row`], or that of the head in 8 bits, whose codes
/// importance does not affect.
///
/// # Errors
/// [`quantspec_core::ErrorKind::NotFinite`] if the range of a group exceeds f16.
pub(crate) fn encode(
    simd: Simd,
    bits: Bits,
    rows: &[f32],
    importance: &[f32],
    k: usize,
    panel: &mut [u8],
) -> Result<()> {
    let (groups, bytes) = (k.div_ceil(GROUP), bits.tile_bytes());
    let mut codes = [0u8; GROUP];
    for (lane, row) in rows.chunks_exact(k).enumerate() {
        for (g, group) in row.chunks(GROUP).enumerate() {
            let out = &mut codes;
            let weigh = if importance.is_empty() { importance } else { &importance[g * GROUP..][..group.len()] };
            let (s, z) = portable!(
                simd,
                group_body(group: &[f32], weigh: &[f32], bits: Bits, out: &mut [u8; GROUP]) -> (u16, u16)
            );
            if !f16_is_finite(s) || !f16_is_finite(z) {
                return Err(Error::not_finite("a group of weights spans more than half precision can hold"));
            }
            let tile = &mut panel[(lane / TILE_ROWS * groups + g) * bytes..][..bytes];
            let lane = lane % TILE_ROWS;
            tile[2 * lane..][..2].copy_from_slice(&s.to_le_bytes());
            tile[2 * (TILE_ROWS + lane)..][..2].copy_from_slice(&z.to_le_bytes());
            let tile = &mut tile[PARAMS..];
            match bits {
                Bits::Four => {
                    for (v, codes) in codes.chunks_exact(8).enumerate() {
                        for b in 0..4 {
                            tile[v * 64 + lane * 4 + b] = codes[b] | codes[4 + b] << 4;
                        }
                    }
                }
                Bits::Eight => {
                    for (v, codes) in codes.chunks_exact(4).enumerate() {
                        tile[v * 64 + lane * 4..][..4].copy_from_slice(codes);
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
fn group_body<const FMA: bool>(x: &[f32], importance: &[f32], bits: Bits, codes: &mut [u8; GROUP]) -> (u16, u16) {
    let top = f32::from(bits.top());
    let mut padded = [x[0]; GROUP];
    padded[..x.len()].copy_from_slice(x);
    let (low, high) = (Group::plain(&padded).least(), Group::plain(&padded).greatest());
    codes.fill(0);
    if low == high {
        return (0, f16_bits(low));
    }
    let mut params = halves((high - low) / top, low);
    if bits == Bits::Four && f16_is_finite(params.0) && f16_is_finite(params.1) {
        params = if importance.is_empty() {
            Group::plain(x).search(low, high, params, &SHRINK)
        } else {
            Group::<true> { x, importance }.search(low, high, params, &SHRINK)
        };
    }
    let (step, zero) = (f16_value(params.0), f16_value(params.1));
    let mut out = [0u8; GROUP];
    for (code, x) in out.iter_mut().zip(&padded) {
        *code = rint_i32(((x - zero) / step).clamp(0.0, top)) as u8;
    }
    codes[..x.len()].copy_from_slice(&out[..x.len()]);
    params
}

#[cfg(test)]
mod tests {
    use super::super::{LAYOUT, Tiles};
    use super::*;
    use crate::testing::{Noise, paths};
    use quantspec_core::quantize::{quantize_head_row, quantize_weights_row};

    #[test]
    fn codes_are_those_of_core() {
        let mut noise = Noise::new(11);
        for k in [7, 128, 172, 1376] {
            let mut w = noise.normals(33 * k);
            w[..k].fill(0.5); // constant groups
            w[k] = 900.0;
            // Rows from where scales underflow to the end of f16's range, and groups far from zero.
            for (n, row) in w.chunks_exact_mut(k).enumerate().skip(2) {
                let offset = if n % 3 == 0 { 40.0 } else { 0.0 };
                row.iter_mut().for_each(|w| *w = (*w + offset) * 2f32.powi(n as i32 - 22));
            }
            // A negative zero as the minimum is kept.
            w[20 * k..21 * k].iter_mut().filter(|w| **w < 0.0).for_each(|w| *w = -0.0);
            let weighed: Vec<f32> = noise.normals(k).into_iter().map(|x| 2f32.powf(2.0 * x)).collect();
            for (bits, importance) in [(Bits::Four, &[][..]), (Bits::Four, &weighed), (Bits::Eight, &weighed)] {
                for simd in paths() {
                    let mut tiles = Tiles::zeros(2, k, bits).unwrap();
                    let len = Tiles::panel_bytes(k, bits);
                    encode(simd, bits, &w[..32 * k], importance, k, &mut tiles.data[..len]).unwrap();
                    encode(simd, bits, &w[32 * k..], importance, k, &mut tiles.data[len..]).unwrap();
                    for (n, row) in w.chunks_exact(k).enumerate() {
                        let want = match bits {
                            Bits::Four => quantize_weights_row(row, importance).unwrap(),
                            Bits::Eight => quantize_head_row(row).unwrap(),
                        };
                        for c in 0..k {
                            let (g, i) = (c / GROUP, c % GROUP);
                            let tile = &tiles.data[(n / 16 * k.div_ceil(GROUP) + g) * bits.tile_bytes()..]
                                [..bits.tile_bytes()];
                            let param = |at: usize| u16::from_le_bytes([tile[2 * at], tile[2 * at + 1]]);
                            assert_eq!(param(n % 16), want.params[g].scale.to_bits());
                            assert_eq!(param(16 + n % 16), want.params[g].zero.to_bits());
                            let code = match bits {
                                Bits::Four => tile[PARAMS + i / 8 * 64 + n % 16 * 4 + i % 4] >> (i % 8 / 4 * 4) & 15,
                                Bits::Eight => tile[PARAMS + i / 4 * 64 + n % 16 * 4 + i % 4],
                            };
                            assert_eq!(code, want.codes[c], "row {n}, k {c}, {bits:?}, {simd:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn the_bytes_of_a_draft_file_are_fixed() {
        let rows: Vec<f32> = (0..17 * 200).map(|i| ((i * 37) % 101) as f32 - 50.0).collect();
        for (bits, bytes) in [
            (Bits::Four, 0x0fa6_1116_dddd_5ebc_8b86_d9cb_698a_1e16),
            (Bits::Eight, 0xf337_81da_4165_cefb_54b5_81c5_1a2f_c0ea),
        ] {
            let mut tiles = Tiles::zeros(1, 200, bits).unwrap();
            encode(Simd::Scalar, bits, &rows, &[], 200, &mut tiles.data).unwrap();
            let seen = quantspec_model::draft_cache::source(0, &tiles.data);
            assert_eq!(seen, bytes, "{seen:#x}: other bytes need another LAYOUT than {LAYOUT:?}");
        }
    }

    #[test]
    fn weights_beyond_half_precision_are_an_error() {
        let mut panel = vec![0; Tiles::panel_bytes(128, Bits::Four)];
        let mut w = vec![0f32; 128];
        w[3] = 3e6;
        let error = encode(Simd::Scalar, Bits::Four, &w, &[], 128, &mut panel).unwrap_err();
        assert_eq!(error.kind, quantspec_core::ErrorKind::NotFinite);
    }
}
