//! Panels in plain Rust: the order of sums that vector kernels with f32 activations keep.

use crate::dispatch::{Simd, portable};
use crate::lanes::{f16_value, madd};
use crate::panel::PANEL;

/// Conversion of a stored pair of k to two f32 per lane.
trait Pair: Copy {
    /// Values of k = 2·pair and 2·pair + 1 for lanes `lane .. lane + L`; `w` is a panel.
    fn load<const L: usize>(w: &[Self], pair: usize, lane: usize) -> [[f32; L]; 2];
}

/// A BF16 number of the pair layout.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Bf16(u16);
/// A half.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Half(u16);

impl Pair for Bf16 {
    #[inline(always)]
    fn load<const L: usize>(w: &[Bf16], pair: usize, lane: usize) -> [[f32; L]; 2] {
        let w = &w[(pair * PANEL + lane) * 2..][..2 * L];
        let mut out = [[0f32; L]; 2];
        for l in 0..L {
            let word = u32::from(w[2 * l].0) | u32::from(w[2 * l + 1].0) << 16;
            out[0][l] = f32::from_bits(word << 16);
            out[1][l] = f32::from_bits(word & 0xffff_0000);
        }
        out
    }
}
impl Pair for Half {
    #[inline(always)]
    fn load<const L: usize>(w: &[Half], pair: usize, lane: usize) -> [[f32; L]; 2] {
        let (even, odd) = (&w[2 * pair * PANEL + lane..][..L], &w[(2 * pair + 1) * PANEL + lane..][..L]);
        let mut out = [[0f32; L]; 2];
        for l in 0..L {
            out[0][l] = f16_value(even[l].0);
            out[1][l] = f16_value(odd[l].0);
        }
        out
    }
}
impl Pair for f32 {
    #[inline(always)]
    fn load<const L: usize>(w: &[f32], pair: usize, lane: usize) -> [[f32; L]; 2] {
        let (even, odd) = (&w[2 * pair * PANEL + lane..][..L], &w[(2 * pair + 1) * PANEL + lane..][..L]);
        let mut out = [[0f32; L]; 2];
        out[0].copy_from_slice(even);
        out[1].copy_from_slice(odd);
        out
    }
}

/// M rows × L lanes: one accumulator per (row, output), k upwards.
#[inline(always)]
fn lanes<const FMA: bool, W: Pair, const M: usize, const L: usize>(
    w: &[W],
    x: &[f32],
    stride: usize,
    lane: usize,
    out: &mut [f32],
) {
    let pairs = w.len() / (2 * PANEL);
    let mut acc = [[0f32; L]; M];
    let mut rows = [&x[..0]; M];
    for (j, row) in rows.iter_mut().enumerate() {
        *row = &x[j * stride..][..2 * pairs];
    }
    for pair in 0..pairs {
        let w = W::load::<L>(w, pair, lane);
        for j in 0..M {
            for (k, w) in w.iter().enumerate() {
                let x = rows[j][2 * pair + k];
                for l in 0..L {
                    acc[j][l] = madd::<FMA>(w[l], x, acc[j][l]);
                }
            }
        }
    }
    for j in 0..M {
        out[j * PANEL + lane..][..L].copy_from_slice(&acc[j]);
    }
}

/// A panel for up to GROUP rows, with as many lanes at once as registers hold; the order of sums does not depend on it.
#[inline(always)]
fn panel_body<const FMA: bool, W: Pair>(w: &[W], x: &[f32], stride: usize, m: usize, out: &mut [f32]) {
    match m {
        1 => lanes::<FMA, W, 1, 32>(w, x, stride, 0, out),
        2 => lanes::<FMA, W, 2, 32>(w, x, stride, 0, out),
        _ => {
            for lane in (0..PANEL).step_by(16) {
                match m {
                    3 => lanes::<FMA, W, 3, 16>(w, x, stride, lane, out),
                    4 => lanes::<FMA, W, 4, 16>(w, x, stride, lane, out),
                    5 => lanes::<FMA, W, 5, 16>(w, x, stride, lane, out),
                    _ => lanes::<FMA, W, 6, 16>(w, x, stride, lane, out),
                }
            }
        }
    }
}

pub(super) fn bf16(simd: Simd, w: &[u16], x: &[f32], stride: usize, m: usize, out: &mut [f32]) {
    // SAFETY: `Bf16` is a transparent u16.
    let w: &[Bf16] = unsafe { std::slice::from_raw_parts(w.as_ptr().cast(), w.len()) };
    portable!(simd, panel_body[Bf16](w: &[Bf16], x: &[f32], stride: usize, m: usize, out: &mut [f32]));
}

pub(super) fn f16(simd: Simd, w: &[u16], x: &[f32], stride: usize, m: usize, out: &mut [f32]) {
    // SAFETY: `Half` is a transparent u16.
    let w: &[Half] = unsafe { std::slice::from_raw_parts(w.as_ptr().cast(), w.len()) };
    portable!(simd, panel_body[Half](w: &[Half], x: &[f32], stride: usize, m: usize, out: &mut [f32]));
}

pub(super) fn f32(simd: Simd, w: &[f32], x: &[f32], stride: usize, m: usize, out: &mut [f32]) {
    portable!(simd, panel_body[f32](w: &[f32], x: &[f32], stride: usize, m: usize, out: &mut [f32]));
}
