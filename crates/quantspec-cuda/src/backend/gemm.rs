//! GEMMs of a step: the weights and planes that each reads, its input, and what it prefetches.

use super::workspace::Input;
use super::{CudaBackend, Producers};
use crate::args;
use crate::device::Buffer;
use crate::draft::{DraftGemms, Hidden};
use crate::hierarchy::Reads;
use crate::linear::{DRAFT_GROUP, Form, Quantised};
use crate::weights::{self, Full};
use quantspec_core::config::{DraftWeights, LayerNorms, QkNorm, Weights};
use quantspec_core::{Error, Result};
use quantspec_model::backend::Step;

/// Threads of a norm's block.
pub(crate) const NORM_THREADS: u32 = crate::shapes::NORM_THREADS as u32;

/// Bytes per SM of the following GEMM's weights that a GEMM with weights in nibbles prefetches. The output projection prefetches
/// more, because its own weights are loaded while attention ends. Twice as many delay the inputs, and steps are not faster.
pub(super) const PREFETCH_BYTES: usize = 32 << 10;
pub(super) const OUTPUT_PREFETCH_BYTES: usize = 64 << 10;

/// Kinds of matrices: indices in `Sensitive::KINDS`.
pub(super) const QKV: usize = 0;
pub(super) const OUTPUT: usize = 1;
pub(super) const GATE_UP: usize = 2;
pub(super) const DOWN: usize = 3;

/// Form of the input of a GEMM with `full`, or with draft weights if it is `quantised`.
pub(super) const fn form_of(full: &Full, quantised: bool) -> Form {
    match full {
        _ if quantised => Form::Int8,
        Full::Whole(matrix) => Form::Plain(matrix.dtype),
        Full::Nibbles(_) => Form::Limbs,
    }
}

/// Kinds whose GEMM a fused kernel can compute; those in `eight` have 8 bits, and so separate kernels. The fused gate and up
/// stores BF16, which only the fused down reads.
const fn fused(eight: [bool; 4]) -> [bool; 4] {
    let feed_forward = !eight[GATE_UP] && !eight[DOWN];
    [!eight[QKV], !eight[OUTPUT], feed_forward, feed_forward]
}

/// The weights of a GEMM.
#[derive(Clone, Copy)]
pub(super) struct Operand<'a> {
    pub(super) full: &'a Full,
    /// The draft's own weights, if it has some.
    pub(super) draft: Option<&'a Quantised>,
    /// Planes of weights in nibbles.
    pub(super) reads: Reads,
    /// Address and bytes that the following GEMM reads first.
    pub(super) next: (u64, usize),
}

impl CudaBackend {
    /// The deferred residual addition of `Network::reduce_residual`, then the norm, into the input type of a GEMM. Without a norm
    /// the hidden states as they are. `(full, quantised)`: the GEMM's weights, and whether it has draft weights.
    pub(super) fn norm(
        &self,
        rows: usize,
        weight: Option<&Buffer>,
        input: &Input,
        kernels: &Producers,
        (full, quantised): (&Full, bool),
        hidden: u64,
    ) -> Result<()> {
        let (width, eps) = (self.config.hidden, self.config.rms_eps);
        let form = form_of(full, quantised);
        let panels = self.panels(full, quantised, rows);
        let Some(weight) = weight else {
            let grid = [width.div_ceil(1024), rows, 1];
            let arguments = match input.integers(form) {
                Some([x, xs]) => args![hidden, x, xs, width, panels],
                None => args![hidden, &input.x, width, input.pitch(), panels],
            };
            return self.launch(self.kernels.convert.of(form), grid, 256, 0, &arguments);
        };
        let (y, bias) = self.residual.map_or((0, 0), |bias| (self.step.y.at(0), bias));
        let arguments = match input.integers(form) {
            Some([x, xs]) => args![hidden, y, bias, weight, x, xs, eps, width, panels],
            None => args![hidden, y, bias, weight, &input.x, eps, width, input.pitch(), panels],
        };
        self.launch(kernels.of(form), [rows, 1, 1], NORM_THREADS, 0, &arguments)
    }

    /// Norms of all query heads and of all key heads in a GEMM's output, in place, if the model has such norms. `paired`:
    /// channels that RoPE rotates together are adjacent.
    pub(super) fn norm_projections(&self, layer: usize, paired: bool, rows: usize) -> Result<()> {
        let (config, weights) = (&self.config, self.layer(layer)?);
        let (QkNorm::Projection, Some((q_norm, k_norm))) = (config.qk_norm, &weights.qk_norms) else { return Ok(()) };
        let (q, kv) = (config.q_width(), config.kv_width());
        let (pitch, paired) = (q + 2 * kv, if paired { config.head_dim } else { 0 });
        for (first, width, norm) in [(0, q, q_norm), (q, kv, k_norm)] {
            let y = self.step.y.at(first * 4);
            let arguments = args![y, pitch, y, pitch, norm, config.rms_eps, width, paired, 0usize];
            self.launch(self.kernels.norm_rows, [rows, 1, 1], NORM_THREADS, 0, &arguments)?;
        }
        Ok(())
    }

    /// The addition deferred by `Network::reduce_residual`, before a fused kernel, which normalises the hidden stream but
    /// adds nothing to it.
    pub(super) fn add_residual(&self, rows: usize) -> Result<()> {
        let Some(bias) = self.residual else { return Ok(()) };
        let elements = rows * self.config.hidden;
        let arguments = args![&self.step.hidden, &self.step.y, bias, elements as u64, self.config.hidden];
        self.launch(self.kernels.add_rows, [elements.div_ceil(1024), 1, 1], 256, 0, &arguments)
    }

    /// `panels` of a GEMM's input (kernels/panel.cuh). `draft`: it has draft weights.
    pub(super) fn panels(&self, full: &Full, draft: bool, rows: usize) -> usize {
        match full {
            Full::Whole(matrix) if !draft => self.linear.panels_of(matrix, rows),
            Full::Whole(_) | Full::Nibbles(_) => self.linear.panels(rows),
        }
    }

    /// y = input · weightsᵀ.
    pub(super) fn gemm(&self, weights: &Operand, input: &Input, y: u64, rows: usize) -> Result<()> {
        let Operand { full, draft, reads, next } = *weights;
        // SAFETY: inputs and outputs are this backend's, with room for `step_rows` rows.
        unsafe {
            match (draft, full, &self.nibbles) {
                (Some(draft), ..) => self.linear.run_quantised(draft, input.x8.at(0), input.xs.at(0), y, rows),
                (None, Full::Whole(full), _) => self.linear.run(full, input.x.at(0), y, rows),
                (None, Full::Nibbles(full), Some((hierarchies, _))) => {
                    hierarchies.run(full, reads, [input.x.at(0), input.xs.at(0)], y, rows, next)
                }
                (None, Full::Nibbles(_), None) => Err(Error::internal("weights in nibbles without their kernels")),
            }
        }
    }

    /// Rounds the input of a GEMM with `full` to 4 bits, if a draft uses such activations for this kind; `own`: it has separate
    /// weights.
    pub(super) fn coarsen(&self, step: &Step, kind: usize, full: &Full, input: &Input, own: bool) -> Result<()> {
        if step.weights != Weights::Draft4 || weights::draft_bits(&self.options)[kind] != Some(4) {
            return Ok(());
        }
        let (rows, pairs) = (step.rows.len(), input.pitch8() / DRAFT_GROUP);
        let panels = self.panels(full, own, rows);
        if own {
            return self.launch(self.kernels.coarse_i8, [pairs, rows, 1], 32, 0, &args![&input.x8, &input.xs, panels]);
        }
        self.launch(self.kernels.coarse_limbs, [2 * pairs, rows, 1], 32, 0, &args![&input.x, &input.xs, panels])
    }

    /// y = input · weightsᵀ of one kind of matrices in a step. `draft`: the draft's own weights, if the step reads such.
    pub(super) fn step_gemm(
        &self,
        step: &Step,
        kind: usize,
        full: &Full,
        draft: Option<&Quantised>,
        input: &Input,
        next: (u64, usize),
    ) -> Result<()> {
        self.coarsen(step, kind, full, input, draft.is_some())?;
        let weights = Operand { full, draft, reads: self.reads(step, kind), next };
        self.gemm(&weights, input, self.step.y.at(0), step.rows.len())
    }

    /// What a GEMM prefetches of the weights of the following one: at most `per_sm` bytes for each SM.
    pub(super) fn prefetch(&self, next: &Full, per_sm: usize) -> (u64, usize) {
        let (address, bytes) = next.first_read();
        (address, bytes.min(per_sm * self.device.info.sms))
    }

    /// The nibbles that a step reads of a kind of matrices.
    pub(super) fn reads(&self, step: &Step, kind: usize) -> Reads {
        let four = weights::draft_bits(&self.options)[kind] == Some(4);
        if four && step.weights.is_draft() { Reads::Upper } else { Reads::All }
    }

    /// The fused kernels of a draft step, if they support it for a kind of matrices: weights in four bits, few rows, norms before
    /// the branches.
    pub(super) fn fused_gemms(&self, step: &Step, kind: usize) -> Option<&DraftGemms> {
        let eight = weights::draft_bits(&self.options).map(|bits| bits == Some(8));
        // The fused kernels compute 8-bit inputs.
        let fused = step.weights == Weights::Draft && fused(eight)[kind];
        let fused = fused && self.config.norms == LayerNorms::Before;
        let widest = self.config.hidden.max(self.config.q_width()).max(self.config.intermediate);
        let of_draft = self.options.draft_weights == DraftWeights::Int4;
        let takes = |draft: &&DraftGemms| match self.nibbles {
            Some(_) => draft.takes_upper(widest, step.rows.len()),
            None => draft.takes(widest, step.rows.len()),
        };
        self.draft.as_ref().filter(|draft| fused && of_draft && takes(draft))
    }

    /// The hidden stream of a step before a norm.
    pub(super) fn stream(&self, weight: &Buffer) -> Hidden {
        let (eps, width) = (self.config.rms_eps, self.config.hidden);
        Hidden { address: self.step.hidden.at(0), weight: weight.at(0), eps, width }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fused_kernels_meet_inputs_in_their_form() {
        assert_eq!(fused([false; 4]), [true; 4]);
        for bits in 0..16usize {
            let eight: [bool; 4] = std::array::from_fn(|kind| bits >> kind & 1 == 1);
            let fused = fused(eight);
            assert!(fused.iter().zip(eight).all(|(fused, eight)| !(*fused && eight)), "{eight:?}");
            // BF16 between gate, up and down if both are fused, else the form of down's own kernel.
            assert_eq!(fused[DOWN], fused[GATE_UP], "{eight:?}");
        }
        assert_eq!(fused([false, false, false, true]), [true, true, false, false]);
    }
}
