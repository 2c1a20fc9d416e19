//! Operations between the GEMMs of a step.

use super::{HEAD, Machine, Noise, layers};
use crate::attend::{self, Shape};
use crate::dispatch::Simd;
use crate::elementwise::{LANES, PANEL_TOKENS, activate_mul, rms_norm, rms_norm_panel, rope};
use crate::lanes::{f16_bits, widen};
use crate::linear::{self, row_stride};
use crate::memory::Array;
use crate::panel::PANEL;
use crate::{prefill, w4};
use quantspec_core::Result;
use quantspec_core::cache::G;
use quantspec_core::config::Activation;
use quantspec_core::quantize::ACTIVATION_8;
use std::hint::black_box;

/// Partial results of a head of [`Op::Merge`]: 16,384 tokens in pages.
const PARTS: usize = 17;

/// An elementwise operation. Numbers of in-place operations stay finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// RMSNorm of rows.
    Norm,
    /// RMSNorm of a prompt's panels of 64 rows into the input of a BF16 GEMM.
    PanelNorm,
    /// SiLU(gate) · up, one panel of 32 outputs at a time, as a GEMM yields them.
    Silu,
    /// RoPE of heads of 128.
    Rope,
    /// Adds a linear layer's output to the hidden states, a panel at a time.
    Add,
    /// Rounds a linear layer's input to BF16, for paths with BF16 dot products.
    Bf16,
    /// Rounds a draft layer's input to int8.
    Int8,
    /// Halves to singles.
    Widen,
    /// Merges partial attention results, 16 splits of pages and the recent tokens, for heads of 128.
    Merge,
}

/// An operation on `rows` rows of `k` features, on one thread, as in a step. Operands are in a cache, as after the previous
/// operation.
pub struct Elementwise {
    simd: Simd,
    op: Op,
    rows: usize,
    k: usize,
    /// Input, or the operand of an in-place operation.
    x: Array<f32>,
    /// Second input: weights of a norm, `up`, a linear layer's output, cosines and sines.
    with: Array<f32>,
    y: Array<f32>,
    x16: Array<u16>,
    acts: w4::Acts,
    features: Vec<[f32; LANES]>,
}

impl Elementwise {
    /// Normally distributed numbers. `k` is a multiple of 128, and `rows` of 64 for [`Op::PanelNorm`].
    ///
    /// # Errors
    /// If memory is short.
    pub fn new(Machine { simd, .. }: Machine, op: Op, rows: usize, k: usize) -> Result<Elementwise> {
        let mut noise = Noise(19);
        let stride = row_stride(k);
        let (mut x, mut with) = (noise.fill(rows * stride)?, noise.fill(rows * stride)?);
        let mut y = Array::zeros(rows * stride)?;
        match op {
            // Above 20 the sigmoid is 1, so `gate` does not change.
            Op::Silu => {
                x.iter_mut().for_each(|x| *x = 20.0 + x.abs());
                with.fill(1.0);
            }
            Op::Rope => angles(&mut with),
            Op::Merge => x = noise.fill(rows * k / HEAD * PARTS * (2 + HEAD))?,
            Op::PanelNorm => y = Array::zeros(rows / PANEL_TOKENS * prefill::panel_len(k))?,
            _ => (),
        }
        let mut x16 = Array::zeros(rows * stride)?;
        x16.iter_mut().zip(&*x).for_each(|(to, x)| *to = f16_bits(*x));
        let (acts, features) = (w4::Acts::zeros(rows, k)?, vec![[0.0; LANES]; k]);
        Ok(Elementwise { simd, op, rows, k, x, with, y, x16, acts, features })
    }

    /// Bytes of rows that a call reads and writes.
    pub fn bytes(&self) -> usize {
        let (read, written) = match self.op {
            Op::Norm | Op::PanelNorm | Op::Rope => (4, 4),
            Op::Silu | Op::Add => (8, 4),
            Op::Bf16 => (4, 2),
            Op::Int8 => (4, 1),
            Op::Widen => (2, 4),
            Op::Merge => (4 * PARTS, 4),
        };
        self.rows * self.k * (read + written)
    }

    /// All rows.
    pub fn call(&mut self) {
        let Elementwise { simd, op, rows, k, x, with, y, x16, acts, features } = self;
        let (simd, k, stride) = (*simd, *k, row_stride(*k));
        match op {
            Op::Norm => {
                for (x, y) in x.chunks_exact(stride).zip(y.chunks_exact_mut(stride)) {
                    rms_norm(simd, &x[..k], &with[..k], 1e-5, &mut y[..k]);
                }
            }
            Op::PanelNorm => {
                let format = if simd.has_avx512() { prefill::Format::Pairs } else { prefill::Format::F32 };
                for (x, y) in x.chunks_exact(k * PANEL_TOKENS).zip(y.chunks_exact_mut(prefill::panel_len(k))) {
                    for lane in (0..PANEL_TOKENS).step_by(LANES) {
                        rms_norm_panel(simd, x, lane, &with[..k], 1e-5, features);
                        prefill::put_features(simd, format, y, 0, lane, features);
                    }
                }
            }
            Op::Silu => {
                for (gate, up) in x.chunks_exact_mut(PANEL).zip(with.chunks_exact(PANEL)) {
                    activate_mul(simd, Activation::Silu, gate, up);
                }
            }
            Op::Rope => {
                for (x, row) in x.chunks_exact_mut(stride).zip(with.chunks_exact(stride)) {
                    let (cos, sin) = row[..HEAD].split_at(HEAD / 2);
                    x.chunks_exact_mut(HEAD).for_each(|head| rope(simd, head, cos, sin));
                }
            }
            // The backend's own loop; this operation has no kernel.
            Op::Add => {
                for (hidden, tile) in x.chunks_exact_mut(PANEL).zip(with.chunks_exact(PANEL)) {
                    hidden.iter_mut().zip(tile).for_each(|(hidden, y)| *hidden += *y);
                }
            }
            Op::Bf16 => linear::to_bf16(simd, x, x16),
            Op::Int8 => acts.quantize(simd, ACTIVATION_8, x, stride, *rows, k),
            Op::Widen => widen(simd, x16, x),
            Op::Merge => {
                for (parts, out) in x.chunks_exact(PARTS * (2 + HEAD)).zip(y.chunks_exact_mut(HEAD)) {
                    attend::merge(simd, parts, 2 + HEAD, out);
                }
            }
        }
        black_box((x, y, x16, acts));
    }
}

/// Cosines and sines, alternating per half head.
fn angles(table: &mut [f32]) {
    for (i, half) in table.chunks_mut(HEAD / 2).enumerate() {
        let turned = |c: usize| (i / 2) as f32 + c as f32 / 10.0;
        half.iter_mut().enumerate().for_each(|(c, x)| *x = if i % 2 == 0 { turned(c).cos() } else { turned(c).sin() });
    }
}

/// Appends the keys and values of a step's rows to the ring: RoPE, rounding to f16, and scattered stores, on one thread. The
/// rings are in memory: between two steps a model's weights pass through the caches.
pub struct Append {
    simd: Simd,
    rows: usize,
    kv_heads: usize,
    /// `[row][keys | values]`
    kv: Array<f32>,
    /// `[row][cosines | sines]`
    angles: Vec<f32>,
    ring: Array<u16>,
    layers: usize,
    layer: usize,
    position: usize,
}

impl Append {
    /// Normally distributed numbers, heads of 128.
    ///
    /// # Errors
    /// If memory is short.
    pub fn new(Machine { simd, .. }: Machine, rows: usize, kv_heads: usize) -> Result<Append> {
        let len = kv_heads * Shape::new(HEAD).full_len();
        let layers = layers(2 * len);
        let mut ring = Array::zeros(layers * len)?;
        // Written once: the system clears a page on its first write.
        ring.fill(1);
        let mut table = vec![0.0; rows * HEAD];
        angles(&mut table);
        let kv = Noise(23).fill(rows * 2 * kv_heads * HEAD)?;
        Ok(Append { simd, rows, kv_heads, kv, angles: table, ring, layers, layer: 0, position: 0 })
    }

    /// Bytes of keys and values that a call stores.
    pub fn bytes(&self) -> usize {
        self.rows * self.kv_heads * HEAD * 2 * 2
    }

    /// Appends to one layer, at the positions after those of the last round of layers.
    pub fn call(&mut self) {
        let (width, len) = (self.kv_heads * HEAD, Shape::new(HEAD).full_len());
        let ring = &mut self.ring[self.layer * self.kv_heads * len..][..self.kv_heads * len];
        let mut halves = [0u16; 2 * HEAD];
        for (head, page) in ring.chunks_exact_mut(len).enumerate() {
            for (j, row) in self.kv.chunks_exact_mut(2 * width).enumerate() {
                let (keys, values) = row.split_at_mut(width);
                let (key, value) = (&mut keys[head * HEAD..][..HEAD], &values[head * HEAD..][..HEAD]);
                let (cos, sin) = self.angles[j * HEAD..][..HEAD].split_at(HEAD / 2);
                rope(self.simd, key, cos, sin);
                for (half, x) in halves.iter_mut().zip(key.iter().chain(value)) {
                    *half = f16_bits(*x);
                }
                attend::put_token(page, HEAD, (self.position + j) % G, &halves[..HEAD], &halves[HEAD..]);
            }
        }
        self.layer = (self.layer + 1) % self.layers;
        if self.layer == 0 {
            self.position += self.rows;
        }
    }
}
