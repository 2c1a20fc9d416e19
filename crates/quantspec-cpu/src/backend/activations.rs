//! Activations of a step.

use crate::attend::SPLIT;
use crate::dispatch::Simd;
use crate::elementwise::rms_norm;
use crate::hierarchy;
use crate::linear::{self, Input, Weight, row_stride};
use crate::memory::Array;
use crate::w4::{Acts, Bits};
use crate::weights::{Linear, QkvOffsets};
use quantspec_core::Result;
use quantspec_core::cache::visible_pages;
use quantspec_core::config::{ModelConfig, TargetWeights, Weights};
use quantspec_core::quantize::{ACTIVATION_4, ACTIVATION_8};
use quantspec_model::backend::Options;
use quantspec_model::rope::RopeTable;

/// Activations of a step.
pub(super) struct Rows {
    pub(super) offsets: QkvOffsets,
    /// `[row][row_stride(hidden)]`
    pub(super) hidden: Array<f32>,
    /// Input of a linear layer, normalised or not, `[row][row_stride(k)]`: f32, BF16, int8 for draft tiles and limbs for
    /// planes.
    pub(super) x: Array<f32>,
    pub(super) x16: Array<u16>,
    pub(super) x8: Acts,
    pub(super) limbs: hierarchy::Acts,
    /// `[row][offsets.width]`
    pub(super) qkv: Array<f32>,
    /// `[row][row_stride(q_width)]`
    pub(super) attended: Array<f32>,
    /// `[row][row_stride(intermediate)]`
    pub(super) ffn: Array<f32>,
    /// `[row][vocab]`
    pub(super) logits: Array<f32>,
    /// `[row][D/2]`; then the same for local layers if there are any; then one row for layers without position embedding if there
    /// are any.
    pub(super) cos: Array<f32>,
    pub(super) sin: Array<f32>,
    /// Start of the angles of local layers.
    pub(super) local_angles: usize,
    /// `[row][head][part][2 + D]`
    pub(super) partials: Array<f32>,
    /// 0, 1, 2, …: the list of all pages.
    pub(super) all: Vec<u32>,
}

/// Lengths of the arrays of [`Rows`].
pub(super) struct Lengths {
    pub(super) hidden: usize,
    pub(super) x: usize,
    pub(super) widest: usize,
    pub(super) qkv: usize,
    pub(super) attended: usize,
    pub(super) ffn: usize,
    pub(super) logits: usize,
    pub(super) angles: usize,
    /// The last of them, for layers without position embedding.
    pub(super) unrotated: usize,
    pub(super) partials: usize,
    pub(super) pages: usize,
    /// Rows and inputs of the activations in limbs; 0 without planes.
    pub(super) limbs: (usize, usize),
}

impl Lengths {
    pub(super) fn new(config: &ModelConfig, options: &Options) -> Lengths {
        let rows = options.step_rows.max(1);
        let widest = config.hidden.max(config.q_width()).max(config.intermediate);
        let pages = visible_pages(options.capacity);
        let unrotated = if config.no_rope.is_empty() { 0 } else { config.head_dim / 2 };
        Lengths {
            hidden: rows * row_stride(config.hidden),
            x: rows * row_stride(widest),
            widest,
            qkv: rows * QkvOffsets::new(config).width,
            attended: rows * row_stride(config.q_width()),
            ffn: rows * row_stride(config.intermediate),
            logits: rows * config.vocab,
            angles: rows * config.head_dim / 2 * if config.local.is_some() { 2 } else { 1 } + unrotated,
            unrotated,
            partials: rows * config.heads * (pages.div_ceil(SPLIT) + 1) * (2 + config.head_dim),
            pages,
            limbs: if options.weights == TargetWeights::Checkpoint { (0, 0) } else { (rows, widest) },
        }
    }

    pub(super) fn bytes(&self, rows: usize) -> usize {
        let floats =
            self.hidden + self.x + self.qkv + self.attended + self.ffn + self.logits + 2 * self.angles + self.partials;
        4 * (floats + self.pages)
            + 2 * self.x
            + Acts::bytes_of(rows, self.widest)
            + hierarchy::Acts::bytes_of(self.limbs.0, self.limbs.1)
    }
}

impl Rows {
    pub(super) fn new(config: &ModelConfig, options: &Options) -> Result<Rows> {
        let len = Lengths::new(config, options);
        let (mut cos, mut sin) = (Array::zeros(len.angles)?, Array::zeros(len.angles)?);
        let rotated = len.angles - len.unrotated;
        RopeTable::new(config).fill_unrotated(&mut cos[rotated..], &mut sin[rotated..]);
        Ok(Rows {
            offsets: QkvOffsets::new(config),
            hidden: Array::zeros(len.hidden)?,
            x: Array::zeros(len.x)?,
            x16: Array::zeros(len.x)?,
            x8: Acts::zeros(options.step_rows.max(1), len.widest)?,
            limbs: hierarchy::Acts::zeros(len.limbs.0, len.limbs.1)?,
            qkv: Array::zeros(len.qkv)?,
            attended: Array::zeros(len.attended)?,
            ffn: Array::zeros(len.ffn)?,
            logits: Array::zeros(len.logits)?,
            cos,
            sin,
            local_angles: options.step_rows.max(1) * config.head_dim / 2,
            partials: Array::zeros(len.partials)?,
            all: (0..len.pages as u32).collect(),
        })
    }

    /// Bytes held.
    pub(super) fn bytes(&self) -> usize {
        let floats = [
            &self.hidden,
            &self.x,
            &self.qkv,
            &self.attended,
            &self.ffn,
            &self.logits,
            &self.cos,
            &self.sin,
            &self.partials,
        ];
        floats.iter().map(|array| array.bytes()).sum::<usize>()
            + self.x16.bytes()
            + self.x8.bytes()
            + self.limbs.bytes()
            + size_of_val(&self.all[..])
    }

    /// Normalises the first m rows of the hidden states into `x`, or copies them if there is no norm.
    pub(super) fn norm(&mut self, simd: Simd, config: &ModelConfig, weight: Option<&[f32]>, m: usize) {
        let (n, stride) = (config.hidden, row_stride(config.hidden));
        for j in 0..m {
            let (from, to) = (&self.hidden[j * stride..][..n], &mut self.x[j * stride..][..stride]);
            match weight {
                Some(weight) => rms_norm(simd, from, weight, config.rms_eps, &mut to[..n]),
                None => to[..n].copy_from_slice(from),
            }
            to[n..].fill(0.0);
        }
    }

    /// Normalises numbers from `from` on of the first m rows of QKV, in place.
    pub(super) fn norm_qkv(&mut self, simd: Simd, config: &ModelConfig, weight: &[f32], from: usize, m: usize) {
        for row in self.qkv.chunks_exact_mut(self.offsets.width).take(m) {
            let x = &mut row[from..from + weight.len()];
            let before = x.to_vec();
            rms_norm(simd, &before, weight, config.rms_eps, x);
        }
    }

    /// Adds the first m rows of a projection in `x` to the hidden states, normalised.
    pub(super) fn add_normed(&mut self, simd: Simd, config: &ModelConfig, weight: &[f32], m: usize) {
        let (n, stride) = (config.hidden, row_stride(config.hidden));
        let mut normed = vec![0.0; n];
        for j in 0..m {
            rms_norm(simd, &self.x[j * stride..][..n], weight, config.rms_eps, &mut normed);
            self.hidden[j * stride..][..n].iter_mut().zip(&normed).for_each(|(out, y)| *out += y);
        }
    }

    /// Converts the input of a linear layer to the type its weights need.
    pub(super) fn input<'a>(
        &'a mut self,
        simd: Simd,
        linear: &'a Linear,
        weights: Weights,
        from: Source,
        k: usize,
        m: usize,
    ) -> (Weight<'a>, Input<'a>, Outputs<'a>) {
        let stride = row_stride(k);
        let Rows { hidden, x, x16, x8, limbs, qkv, attended, ffn, logits, .. } = self;
        let none: &mut [f32] = &mut [];
        let (x, x_out, ffn_out): (&[f32], _, _) = match from {
            Source::X => (&x[..m * stride], none, &mut ffn[..]),
            Source::Attended => (&attended[..m * stride], &mut x[..], &mut ffn[..]),
            Source::Ffn => (&ffn[..m * stride], &mut x[..], none),
        };
        let weight = linear.weight(weights);
        let input = match weight {
            Weight::Tiles(tiles) => {
                let coarse = weights == Weights::Draft4 && tiles.bits == Bits::Four;
                x8.quantize(simd, if coarse { ACTIVATION_4 } else { ACTIVATION_8 }, x, stride, m, k);
                Input::Int8(x8)
            }
            Weight::Planes(_, read) if !read.takes_f32(simd) => {
                limbs.quantize(simd, read, x, stride, m, k);
                Input::Limbs(limbs)
            }
            Weight::Full(matrix) if matrix.takes_bf16(simd) => {
                linear::to_bf16(simd, x, &mut x16[..m * stride]);
                Input::Bf16(&x16[..m * stride], stride)
            }
            Weight::Full(_) | Weight::Planes(..) => Input::F32(x, stride),
        };
        (weight, input, Outputs { hidden, x: x_out, qkv, ffn: ffn_out, logits })
    }
}

/// Input of a step's linear layer.
#[derive(Clone, Copy)]
pub(super) enum Source {
    /// Normalised hidden states.
    X,
    /// Result of attention.
    Attended,
    /// Result of gate and up.
    Ffn,
}

/// Outputs of a step's linear layers.
pub(super) struct Outputs<'a> {
    pub(super) hidden: &'a mut [f32],
    /// Room for a projection that is normalised before it is added.
    pub(super) x: &'a mut [f32],
    pub(super) qkv: &'a mut [f32],
    pub(super) ffn: &'a mut [f32],
    pub(super) logits: &'a mut [f32],
}
