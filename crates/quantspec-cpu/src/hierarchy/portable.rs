//! Sums and values of a column of tiles in plain Rust.

use super::{GROUP, Operands, PARAMS, Read, SINGLE_ROWS, TILE_ROWS, UPPER, lower_tile, param};
#[cfg(any(target_arch = "x86_64", test))]
use crate::lanes::bf16_bits;
use crate::lanes::{madd, sum16};
use crate::panel::PANEL;

/// The four codes of a vector's outputs, low nibbles' and high nibbles' words: byte b of word l is output l, k = b.
#[inline(always)]
fn code_words(upper: &[u8], lower: &[u8]) -> [[u32; TILE_ROWS]; 2] {
    let mut words = [[0u32; TILE_ROWS]; 2];
    for l in 0..TILE_ROWS {
        let u = u32::from_le_bytes([upper[4 * l], upper[4 * l + 1], upper[4 * l + 2], upper[4 * l + 3]]);
        let d = u32::from_le_bytes([lower[4 * l], lower[4 * l + 1], lower[4 * l + 2], lower[4 * l + 3]]);
        words[0][l] = (u << 4) & 0xf0f0_f0f0 | d & 0x0f0f_0f0f;
        words[1][l] = u & 0xf0f0_f0f0 | (d >> 4) & 0x0f0f_0f0f;
    }
    words
}

#[inline(always)]
pub(super) fn values_body<const FMA: bool>(upper: &[u8], lower: &[u8], kc: usize, lane: usize, out: &mut [f32]) {
    for (g, upper) in upper.chunks_exact(UPPER).enumerate() {
        let lower = lower_tile(lower, g);
        let (mut scale, mut zero) = ([0f32; TILE_ROWS], [0f32; TILE_ROWS]);
        for l in 0..TILE_ROWS {
            (scale[l], zero[l]) = (param(upper, l) / 16.0, param(upper, TILE_ROWS + l));
        }
        for (v, (upper, lower)) in upper[PARAMS..].chunks_exact(64).zip(lower.chunks_exact(64)).enumerate() {
            for (h, words) in code_words(upper, lower).iter().enumerate() {
                for b in 0..4 {
                    let k = g * GROUP + 8 * v + 4 * h + b;
                    if k >= kc {
                        continue;
                    }
                    let out = &mut out[k * PANEL + lane..][..TILE_ROWS];
                    for l in 0..TILE_ROWS {
                        out[l] = ((words[l] >> (8 * b) & 255) as i32 - 8) as f32 * scale[l] + zero[l];
                    }
                }
            }
        }
    }
}

#[cfg(any(target_arch = "x86_64", test))]
#[inline(always)]
pub(super) fn pairs_body<const FMA: bool>(values: &[f32], out: &mut [u16]) {
    for (values, out) in values.chunks_exact(2 * PANEL).zip(out.chunks_exact_mut(2 * PANEL)) {
        for l in 0..PANEL {
            (out[2 * l], out[2 * l + 1]) = (bf16_bits(values[l]), bf16_bits(values[PANEL + l]));
        }
    }
}

/// M rows of f32 activations against a column of tiles: codes times activations are summed over a group, k upwards.
#[inline(always)]
fn singles<const FMA: bool, const M: usize>(upper: &[u8], lower: &[u8], x: &[f32], stride: usize, out: &mut [f32]) {
    let mut acc = [[0f32; TILE_ROWS]; M];
    for (g, upper) in upper.chunks_exact(UPPER).enumerate() {
        let lower = lower_tile(lower, g);
        let q: [&[f32]; M] = std::array::from_fn(|j| &x[j * stride + g * GROUP..][..GROUP]);
        let sums = q.map(|q| sum16(std::array::from_fn(|i| q[i] + q[16 + i])));
        let mut dots = [[0f32; TILE_ROWS]; M];
        for (v, (upper, lower)) in upper[PARAMS..].chunks_exact(64).zip(lower.chunks_exact(64)).enumerate() {
            for (h, words) in code_words(upper, lower).iter().enumerate() {
                for b in 0..4 {
                    let mut codes = [0f32; TILE_ROWS];
                    for l in 0..TILE_ROWS {
                        codes[l] = ((words[l] >> (8 * b) & 255) as i32 - 8) as f32;
                    }
                    for j in 0..M {
                        let x = q[j][8 * v + 4 * h + b];
                        for l in 0..TILE_ROWS {
                            dots[j][l] = madd::<FMA>(codes[l], x, dots[j][l]);
                        }
                    }
                }
            }
        }
        for j in 0..M {
            for l in 0..TILE_ROWS {
                acc[j][l] = madd::<FMA>(dots[j][l], param(upper, l) / 16.0, acc[j][l]);
                acc[j][l] = madd::<FMA>(param(upper, TILE_ROWS + l), sums[j], acc[j][l]);
            }
        }
    }
    for (j, acc) in acc.iter().enumerate() {
        out[j * PANEL..][..TILE_ROWS].copy_from_slice(acc);
    }
}

#[inline(always)]
pub(super) fn singles_body<const FMA: bool>(
    upper: &[u8],
    lower: &[u8],
    x: &[f32],
    stride: usize,
    m: usize,
    out: &mut [f32],
) {
    match m {
        1 => singles::<FMA, 1>(upper, lower, x, stride, out),
        2 => singles::<FMA, 2>(upper, lower, x, stride, out),
        3 => singles::<FMA, 3>(upper, lower, x, stride, out),
        4 => singles::<FMA, 4>(upper, lower, x, stride, out),
        _ => singles::<FMA, SINGLE_ROWS>(upper, lower, x, stride, out),
    }
}

/// Row j of a draft's GEMM in plain Rust.
#[inline(always)]
pub(super) fn column_body<const FMA: bool>(part: &Operands, read: Read, j: usize, out: &mut [f32]) {
    let mut acc = [0f32; TILE_ROWS];
    let upper_alone = matches!(read, Read::Upper | Read::Upper4);
    for (g, tile) in part.upper.chunks_exact(UPPER).enumerate() {
        let q = &part.high[(j * part.groups + g) * GROUP..][..GROUP];
        let (at, lower) = (j * part.groups + g, lower_tile(part.lower, g));
        let mut dot = [0i32; TILE_ROWS];
        for (v, upper) in tile[PARAMS..].chunks_exact(64).enumerate() {
            let lower = &lower[v * 64..][..64];
            for b in 0..4 {
                let (first, second) = (i32::from(q[8 * v + b]), i32::from(q[8 * v + 4 + b]));
                for l in 0..TILE_ROWS {
                    let u = i32::from(upper[4 * l + b]);
                    let code = if upper_alone {
                        (u & 15, u >> 4)
                    } else {
                        let d = i32::from(lower[4 * l + b]);
                        ((u & 15) << 4 | d & 15, u & 0xf0 | d >> 4)
                    };
                    dot[l] += code.0 * first + code.1 * second;
                }
            }
        }
        // Codes of both planes are sixteenths of a step, and 8 too large.
        let (step, offset) = if upper_alone { (1.0, 0) } else { (1.0 / 16.0, part.total[at].wrapping_mul(8)) };
        for l in 0..TILE_ROWS {
            let (scale, zero) = (param(tile, l) * step, param(tile, TILE_ROWS + l));
            acc[l] = madd::<FMA>(dot[l].wrapping_sub(offset) as f32, scale * part.scale[at], acc[l]);
            acc[l] = madd::<FMA>(zero, part.sum[at], acc[l]);
        }
    }
    out.copy_from_slice(&acc);
}
