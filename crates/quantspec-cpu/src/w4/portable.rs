//! Sums of a column of tiles in plain Rust.

use super::{Bits, GROUP, Operands, PARAMS, TILE_ROWS};
use crate::lanes::{f16_value, madd};

#[inline(always)]
pub(super) fn column_body<const FMA: bool>(part: &Operands, j: usize, out: &mut [f32]) {
    let mut acc = [0f32; TILE_ROWS];
    for (g, tile) in part.tiles.chunks_exact(part.bits.tile_bytes()).enumerate() {
        let q = &part.q[j * part.width + g * GROUP..][..GROUP];
        let mut dot = [0i32; TILE_ROWS];
        let codes = &tile[PARAMS..];
        for (v, codes) in codes.chunks_exact(64).enumerate() {
            for b in 0..4 {
                match part.bits {
                    Bits::Four => {
                        let (low, high) = (i32::from(q[8 * v + b]), i32::from(q[8 * v + 4 + b]));
                        for l in 0..TILE_ROWS {
                            let code = i32::from(codes[4 * l + b]);
                            dot[l] += (code & 15) * low + (code >> 4) * high;
                        }
                    }
                    Bits::Eight => {
                        let q = i32::from(q[4 * v + b]);
                        for l in 0..TILE_ROWS {
                            dot[l] += i32::from(codes[4 * l + b]) * q;
                        }
                    }
                }
            }
        }
        let (xs, xsum) = (part.scale[j * part.groups + g], part.sum[j * part.groups + g]);
        let param = |i: usize| f16_value(u16::from_le_bytes([tile[2 * i], tile[2 * i + 1]]));
        for l in 0..TILE_ROWS {
            acc[l] = madd::<FMA>(dot[l] as f32, param(l) * xs, acc[l]);
            acc[l] = madd::<FMA>(param(TILE_ROWS + l), xsum, acc[l]);
        }
    }
    out.copy_from_slice(&acc);
}
