//! Weight matrices in panels, and the repacking of a checkpoint's rows into them.

use super::pairs_of;
use crate::dispatch::Simd;
use crate::hierarchy::Planes;
use crate::lanes::f16_value;
use crate::memory::Array;
use crate::panel::PANEL;
use quantspec_core::Result;
use quantspec_core::config::Dtype;

/// Weights of the target: in panels of the checkpoint's type, or in planes.
pub(crate) enum Store {
    /// `[panel][k/2][32][2]`
    Bf16(Array<u16>),
    /// `[panel][k][32]`
    F16(Array<u16>),
    /// `[panel][k][32]`
    F32(Array<f32>),
    /// Two planes of nibbles.
    Planes(Planes),
}

/// A repacked weight matrix.
pub(crate) struct Matrix {
    pub(crate) panels: usize,
    pub(crate) k: usize,
    pub(crate) store: Store,
}

impl Matrix {
    /// Elements of one panel.
    pub(crate) const fn panel_len(k: usize) -> usize {
        PANEL * 2 * pairs_of(k)
    }

    /// Bytes of a matrix.
    pub(crate) const fn bytes_of(panels: usize, k: usize, dtype: Dtype) -> usize {
        panels * Matrix::panel_len(k) * dtype.bytes()
    }

    /// A matrix of zeros, to be filled panel by panel.
    pub(crate) fn zeros(panels: usize, k: usize, dtype: Dtype) -> Result<Matrix> {
        let len = panels * Matrix::panel_len(k);
        let store = match dtype {
            Dtype::Bf16 => Store::Bf16(Array::zeros(len)?),
            Dtype::F16 => Store::F16(Array::zeros(len)?),
            Dtype::F32 => Store::F32(Array::zeros(len)?),
        };
        Ok(Matrix { panels, k, store })
    }

    /// Returns true if inputs are rounded to BF16 on this path.
    pub(crate) fn takes_bf16(&self, simd: Simd) -> bool {
        simd.has_avx512() && matches!(self.store, Store::Bf16(_) | Store::Planes(_))
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        match &self.store {
            Store::Bf16(w) | Store::F16(w) => w.bytes(),
            Store::F32(w) => w.bytes(),
            Store::Planes(planes) => planes.bytes(),
        }
    }

    /// Row `row` as f32, `[k]`. A tied model's embedding is read from its head.
    pub(crate) fn row(&self, row: usize, out: &mut [f32]) {
        let (at, lane) = (row / PANEL * Matrix::panel_len(self.k), row % PANEL);
        if let Store::Planes(planes) = &self.store {
            return planes.row(row, out);
        }
        for (c, out) in out[..self.k].iter_mut().enumerate() {
            *out = match &self.store {
                Store::Bf16(w) => crate::lanes::bf16_value(w[at + c / 2 * 2 * PANEL + lane * 2 + c % 2]),
                Store::F16(w) => f16_value(w[at + c * PANEL + lane]),
                Store::F32(w) => w[at + c * PANEL + lane],
                Store::Planes(_) => unreachable!("planes have rows of their own"),
            };
        }
    }
}

/// Inputs per block of a repack: 32 rows of one cache line each.
const REPACK: usize = 32;

/// Repacks little-endian rows `[rows][k]` of 16-bit numbers into a panel; `pairs` selects BF16's layout. Returns true if all
/// exponents are below the mask `special`, so all numbers are finite.
pub(crate) fn repack16(raw: &[u8], k: usize, pairs: bool, special: u16, panel: &mut [u16]) -> bool {
    let rows = raw.len() / (2 * k);
    let number = |row: usize, c: usize| u16::from_le_bytes([raw[2 * (row * k + c)], raw[2 * (row * k + c) + 1]]);
    for first in (0..k).step_by(REPACK) {
        let last = k.min(first + REPACK);
        if pairs {
            for c in (first..last).step_by(2) {
                let out = &mut panel[c * PANEL..][..2 * PANEL];
                for lane in 0..rows {
                    out[2 * lane] = number(lane, c);
                    out[2 * lane + 1] = if c + 1 < k { number(lane, c + 1) } else { 0 };
                }
            }
        } else {
            for c in first..last {
                for (lane, out) in panel[c * PANEL..][..rows].iter_mut().enumerate() {
                    *out = number(lane, c);
                }
            }
        }
    }
    // Without an early exit this compiles to a few vector operations.
    raw.chunks_exact(2).fold(true, |finite, b| finite & (u16::from_le_bytes([b[0], b[1]]) & special != special))
}

/// Places rows `[rows][k]` of f32 into a panel.
pub(crate) fn repack32(rows: &[f32], k: usize, panel: &mut [f32]) {
    for (lane, row) in rows.chunks_exact(k).enumerate() {
        for (c, x) in row.iter().enumerate() {
            panel[c * PANEL + lane] = *x;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Noise, bits, random_matrix};
    #[test]
    fn rows_of_a_matrix_come_back() {
        let mut noise = Noise::new(8);
        for dtype in [Dtype::Bf16, Dtype::F16, Dtype::F32] {
            let (matrix, w) = random_matrix(&mut noise, 50, 44, dtype);
            for row in [0, 31, 32, 49] {
                let mut out = vec![0.0; 44];
                matrix.row(row, &mut out);
                assert_eq!(bits(&out), bits(&w[row * 44..][..44]));
            }
        }
    }

    #[test]
    fn nan_weights_are_detected() {
        let mut panel = vec![0u16; Matrix::panel_len(4)];
        let raw = |bits: u16| [0x3f80, 0, bits, 0].iter().flat_map(|x: &u16| x.to_le_bytes()).collect::<Vec<_>>();
        for (bits, mask, finite) in [
            (0x7f80, 0x7f80, false),
            (0xffc0, 0x7f80, false),
            (0x7c00, 0x7c00, false),
            (0x7bff, 0x7c00, true),
            (0x7c00, 0x7f80, true),
        ] {
            assert_eq!(repack16(&raw(bits), 4, true, mask, &mut panel), finite, "{bits:#x}");
        }
    }
}
