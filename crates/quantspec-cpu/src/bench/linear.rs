//! GEMMs of a step.

use super::{Machine, Noise, layers};
use crate::dispatch::Simd;
use crate::linear::{self, Input, Matrix, Store, Weight, row_stride};
use crate::memory::Array;
use crate::panel::PANEL;
use crate::pool::Pool;
use crate::{hierarchy, w4};
use quantspec_core::Result;
use quantspec_core::config::Dtype;
use quantspec_core::quantize::ACTIVATION_8;
use std::hint::black_box;

/// Weights of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// The target's, of a BF16 checkpoint.
    Bf16,
    /// The target's, of an F16 checkpoint.
    F16,
    /// The draft's.
    Int4,
    /// The draft's head.
    Int8,
    /// Both planes of int8 weights, as the target reads them.
    Both,
    /// Their upper plane, as the draft reads it.
    Upper,
}

/// A linear layer of `n` outputs and `k` inputs for a few rows of a step.
pub struct Gemm {
    simd: Simd,
    pool: Pool,
    rows: usize,
    full: Vec<Matrix>,
    draft: Vec<w4::Tiles>,
    acts: w4::Acts,
    /// Planes to read.
    read: hierarchy::Read,
    limbs: hierarchy::Acts,
    x: Array<f32>,
    x16: Array<u16>,
    stride: usize,
    layer: usize,
}

impl Gemm {
    /// Normally distributed weights; `n` is a multiple of 32, `k` of 128.
    ///
    /// # Errors
    /// If memory is short or threads cannot start.
    pub fn new(Machine { simd, threads }: Machine, stored: Stored, n: usize, k: usize, rows: usize) -> Result<Gemm> {
        let mut noise = Noise(11);
        let (panels, stride) = (n / PANEL, row_stride(k));
        let weights: Vec<f32> = (0..PANEL * k).map(|_| noise.next() / (k as f32).sqrt()).collect();
        let (mut full, mut draft) = (Vec::new(), Vec::new());
        let mut halves = |dtype: Dtype, bits: fn(f32) -> u16, special: u16| -> Result<()> {
            let mut panel = vec![0; Matrix::panel_len(k)];
            let raw: Vec<u8> = weights.iter().flat_map(|w| bits(*w).to_le_bytes()).collect();
            linear::repack16(&raw, k, dtype == Dtype::Bf16, special, &mut panel);
            for _ in 0..layers(Matrix::bytes_of(panels, k, dtype)) {
                let mut matrix = Matrix::zeros(panels, k, dtype)?;
                if let Store::Bf16(data) | Store::F16(data) = &mut matrix.store {
                    data.chunks_exact_mut(panel.len()).for_each(|to| to.copy_from_slice(&panel));
                }
                full.push(matrix);
            }
            Ok(())
        };
        let mut codes = |bits: w4::Bits| -> Result<()> {
            let mut panel = vec![0; w4::Tiles::panel_bytes(k, bits)];
            w4::encode(simd, bits, &weights, &[], k, &mut panel)?;
            for _ in 0..layers(panels * panel.len()) {
                let mut tiles = w4::Tiles::zeros(panels, k, bits)?;
                tiles.data.chunks_exact_mut(panel.len()).for_each(|to| to.copy_from_slice(&panel));
                draft.push(tiles);
            }
            Ok(())
        };
        let read = if stored == Stored::Upper { hierarchy::Read::Upper } else { hierarchy::Read::Target };
        match stored {
            Stored::Both | Stored::Upper => {
                let both_from = if stored == Stored::Both { 0 } else { panels };
                let (upper, lower) = hierarchy::Planes::panel_bytes(k);
                let (mut high, mut low) = (vec![0; upper], vec![0; if both_from == 0 { lower } else { 0 }]);
                hierarchy::encode(simd, &weights, &[], k, &mut high, &mut low)?;
                for _ in 0..layers(hierarchy::Planes::bytes_of(panels, k, both_from)) {
                    let mut planes = hierarchy::Planes::zeros(panels, k, both_from)?;
                    planes.upper.chunks_exact_mut(upper).for_each(|to| to.copy_from_slice(&high));
                    planes.lower.chunks_exact_mut(lower).for_each(|to| to.copy_from_slice(&low));
                    full.push(Matrix { panels, k, store: Store::Planes(planes) });
                }
            }
            Stored::Bf16 => halves(Dtype::Bf16, crate::lanes::bf16_bits, 0x7f80)?,
            Stored::F16 => halves(Dtype::F16, crate::lanes::f16_bits, 0x7c00)?,
            Stored::Int4 => codes(w4::Bits::Four)?,
            Stored::Int8 => codes(w4::Bits::Eight)?,
        }
        let mut x = Array::zeros(rows * stride)?;
        x.chunks_exact_mut(stride).for_each(|row| row[..k].fill_with(|| noise.next()));
        let (mut acts, mut x16) = (w4::Acts::zeros(rows, k)?, Array::zeros(rows * stride)?);
        acts.quantize(simd, ACTIVATION_8, &x, stride, rows, k);
        let mut limbs = hierarchy::Acts::zeros(rows, k)?;
        limbs.quantize(simd, read, &x, stride, rows, k);
        linear::to_bf16(simd, &x, &mut x16);
        Ok(Gemm { simd, pool: Pool::new(threads)?, rows, full, draft, acts, read, limbs, x, x16, stride, layer: 0 })
    }

    /// Bytes of weights that a call reads.
    pub fn bytes(&self) -> usize {
        match self.full.first().map(|matrix| (&matrix.store, matrix)) {
            Some((Store::Planes(planes), _)) if self.read == hierarchy::Read::Upper => planes.upper.bytes(),
            Some((_, matrix)) => matrix.bytes(),
            None => self.draft[0].data.bytes(),
        }
    }

    /// Multiplies by the next matrix.
    ///
    /// # Errors
    /// If a kernel panicked.
    pub fn call(&mut self) -> Result<()> {
        let (weight, input) = match self.full.get(self.layer) {
            Some(Matrix { store: Store::Planes(planes), .. }) => {
                let f32 = self.read.takes_f32(self.simd);
                let input = if f32 { Input::F32(&self.x, self.stride) } else { Input::Limbs(&self.limbs) };
                (Weight::Planes(planes, self.read), input)
            }
            Some(matrix) if matrix.takes_bf16(self.simd) => (Weight::Full(matrix), Input::Bf16(&self.x16, self.stride)),
            Some(matrix) => (Weight::Full(matrix), Input::F32(&self.x, self.stride)),
            None => (Weight::Tiles(&self.draft[self.layer]), Input::Int8(&self.acts)),
        };
        linear::run(&self.pool, self.simd, weight, input, self.rows, 1, &|_, out| {
            black_box(out);
        })?;
        self.layer = (self.layer + 1) % self.full.len().max(self.draft.len());
        Ok(())
    }
}
