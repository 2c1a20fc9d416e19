//! A checkpoint's weights on the device, and its draft weights.

mod load;
mod sizes;

pub(crate) use self::load::load;
use self::sizes::{ALIGNED, matrix_shapes};
pub(crate) use self::sizes::{
    bytes, draft_bits, draft_bytes, head_inputs, host_bytes, importance_bytes, lent_bytes, nibbles,
};
use crate::device::{Arg, Buffer, Device, Pinned};
use crate::draft::DraftMatrix;
use crate::hierarchy::{self, Hierarchies, Hierarchy};
use crate::linear::{Linear, Matrix, Quantised};
use quantspec_core::config::{Dtype, ModelConfig, TargetWeights};
use quantspec_core::{Error, Result};
use quantspec_model::checkpoint::{Checkpoint, LayerPart, Part};
use std::sync::Arc;

/// A matrix of the target.
#[derive(Debug)]
pub(crate) enum Full {
    /// In the checkpoint's precision.
    Whole(Matrix),
    /// In nibbles; a draft reads the upper plane.
    Nibbles(Hierarchy),
}

impl Full {
    fn held_bytes(&self) -> usize {
        match self {
            Full::Whole(matrix) => matrix.buffer.bytes(),
            Full::Nibbles(hierarchy) => hierarchy.held_bytes(),
        }
    }

    /// The weights that a draft multiplies with int8 activations: its own, or upper planes.
    pub(crate) fn drafted<'a>(&'a self, own: &'a Option<Quantised>) -> Option<DraftMatrix<'a>> {
        match (own, self) {
            (Some(own), _) => Some(own.into()),
            (None, Full::Nibbles(hierarchy)) => Some(hierarchy.into()),
            (None, Full::Whole(_)) => None,
        }
    }

    /// Bytes that a draft reads: of its `own` weights, of the upper plane, or of the whole matrix.
    fn draft_read_bytes(&self, own: &Option<Quantised>) -> usize {
        match (own, self) {
            (Some(own), _) => own.held_bytes(),
            (None, Full::Nibbles(hierarchy)) => hierarchy.upper_bytes(),
            (None, Full::Whole(_)) => self.held_bytes(),
        }
    }

    /// Address and bytes that a GEMM reads first.
    pub(crate) fn first_read(&self) -> (u64, usize) {
        match self {
            Full::Whole(matrix) => (matrix.buffer.at(0), matrix.buffer.bytes()),
            Full::Nibbles(hierarchy) => (hierarchy.upper(), hierarchy.upper_bytes()),
        }
    }
}

/// One decoder layer.
#[derive(Debug)]
pub(crate) struct Layer {
    /// Norms before and after the two branches, if the model has them.
    pub(crate) attention_norm: Option<Buffer>,
    pub(crate) attention_output_norm: Option<Buffer>,
    /// `[q | k | v]`; in nibbles, channels that RoPE rotates together are adjacent.
    pub(crate) qkv: Full,
    pub(crate) qkv_bias: Option<Buffer>,
    /// Norms of queries and keys: of every head, or of all together.
    pub(crate) qk_norms: Option<(Buffer, Buffer)>,
    pub(crate) output: Full,
    pub(crate) output_bias: Option<Buffer>,
    pub(crate) mlp_norm: Option<Buffer>,
    pub(crate) mlp_output_norm: Option<Buffer>,
    /// Gate and up, interleaved by eight rows.
    pub(crate) gate_up: Full,
    pub(crate) gate_up_bias: Option<Buffer>,
    pub(crate) down: Full,
    pub(crate) down_bias: Option<Buffer>,
    pub(crate) draft: DraftLayer,
}

impl Layer {
    /// Its four matrices, in the order of [`matrix_shapes`].
    pub(crate) fn matrices(&self) -> [&Full; 4] {
        [&self.qkv, &self.output, &self.gate_up, &self.down]
    }
}

/// The draft's own weights of a layer. A missing one is replaced by the full weights, or by the upper plane.
#[derive(Debug, Default)]
pub(crate) struct DraftLayer {
    /// Channels that RoPE rotates together are adjacent.
    pub(crate) qkv: Option<Quantised>,
    pub(crate) output: Option<Quantised>,
    pub(crate) gate_up: Option<Quantised>,
    pub(crate) down: Option<Quantised>,
}

impl DraftLayer {
    /// Its four matrices, in the order of [`matrix_shapes`].
    fn matrices(&self) -> [&Option<Quantised>; 4] {
        [&self.qkv, &self.output, &self.gate_up, &self.down]
    }
}

/// The embedding of a model whose head is a matrix of its own. It is in host memory, in the layout of a [`Matrix`]: a step reads
/// one row for each of its rows.
#[derive(Debug)]
pub(crate) struct Embedding {
    pub(crate) table: Pinned,
    pub(crate) dtype: Dtype,
}

/// All weights.
#[derive(Debug)]
pub(crate) struct Weights {
    /// None if the head is the embedding.
    pub(crate) embedding: Option<Embedding>,
    pub(crate) layers: Vec<Layer>,
    pub(crate) final_norm: Buffer,
    pub(crate) head: Full,
    /// Copy of a head in nibbles whose memory long prompts use.
    pub(crate) head_copy: Option<Pinned>,
    pub(crate) draft_head: Option<Quantised>,
    /// Memory of all separate draft weights; None if there are none.
    pub(crate) drafts: Option<Arc<Buffer>>,
}

impl Weights {
    /// Memory that a long prompt may use: of the draft weights, or of a head in nibbles.
    pub(crate) fn lent(&self) -> Option<&Buffer> {
        match (&self.drafts, &self.head) {
            (Some(drafts), _) => Some(drafts),
            (None, Full::Nibbles(head)) => Some(head.planes()),
            (None, Full::Whole(_)) => None,
        }
    }

    /// Keeps a copy of a head in nibbles, for [`Weights::restore_head`].
    pub(crate) fn keep_head(&mut self, device: &Arc<Device>) -> Result<()> {
        if let Full::Nibbles(head) = &self.head {
            let mut copy = device.pinned(head.held_bytes())?;
            head.planes().read_pinned(0, &mut copy, head.held_bytes())?;
            self.head_copy = Some(copy);
        }
        Ok(())
    }

    /// Queues copying the head back, after its memory was used for a prompt.
    pub(crate) fn restore_head(&self) -> Result<()> {
        match (&self.head, &self.head_copy) {
            // SAFETY: the copy does not change.
            (Full::Nibbles(head), Some(copy)) => unsafe { head.planes().write_pinned(0, copy, 0, head.held_bytes()) },
            _ => Ok(()),
        }
    }

    /// Bytes on the device, without draft weights.
    pub(crate) fn held_bytes(&self) -> usize {
        let layer = |layer: &Layer| -> usize {
            let matrices = layer.matrices().map(Full::held_bytes);
            let vectors = [
                &layer.attention_norm,
                &layer.attention_output_norm,
                &layer.mlp_norm,
                &layer.mlp_output_norm,
                &layer.qkv_bias,
                &layer.output_bias,
                &layer.gate_up_bias,
                &layer.down_bias,
            ];
            let qk_norms = layer.qk_norms.iter().flat_map(|(q, k)| [q, k]);
            let vectors = vectors.into_iter().flatten().chain(qk_norms).map(Buffer::bytes);
            matrices.into_iter().chain(vectors).sum()
        };
        self.layers.iter().map(layer).sum::<usize>() + self.final_norm.bytes() + self.head.held_bytes()
    }

    /// Bytes of host memory.
    pub(crate) fn held_host_bytes(&self) -> usize {
        let embedding = self.embedding.as_ref().map(|embedding| &embedding.table);
        embedding.into_iter().chain(&self.head_copy).map(Pinned::size).sum()
    }

    /// Bytes of draft weights on the device, and of what they are made with.
    pub(crate) fn held_draft_bytes(&self) -> usize {
        let drafts = self.layers.iter().flat_map(|layer| layer.draft.matrices()).flatten();
        let importance = drafts.filter_map(|draft| draft.importance.as_ref()).map(Buffer::bytes).sum::<usize>();
        self.drafts.as_ref().map_or(0, |drafts| drafts.bytes()) + importance
    }

    /// Bytes of the matrices that a draft step reads. Of a head in nibbles it reads both planes.
    pub(crate) fn draft_read_bytes(&self) -> usize {
        let layer = |layer: &Layer| -> usize {
            let own = layer.draft.matrices();
            layer.matrices().into_iter().zip(own).map(|(full, own)| full.draft_read_bytes(own)).sum()
        };
        let head = self.draft_head.as_ref().map_or_else(|| self.head.held_bytes(), Quantised::held_bytes);
        self.layers.iter().map(layer).sum::<usize>() + head
    }

    /// Queues recomputing all draft weights, after their memory was used for a prompt.
    pub(crate) fn quantise(&self, linear: &Linear, flag: &Buffer) -> Result<()> {
        for layer in &self.layers {
            for (full, draft) in layer.matrices().into_iter().zip(layer.draft.matrices()) {
                if let (Full::Whole(full), Some(draft)) = (full, draft) {
                    linear.quantise_into(full, draft, flag)?;
                }
            }
        }
        match (&self.head, &self.draft_head) {
            (Full::Whole(head), Some(draft)) => linear.quantise_into(head, draft, flag),
            _ => Ok(()),
        }
    }
}

/// Refuses layers whose matrices have different number formats: the activations of all layers have one.
pub(crate) fn check(checkpoint: &Checkpoint) -> Result<()> {
    let first = Part::Layer(0, LayerPart::Q);
    let mut parts =
        (0..checkpoint.config().layers).flat_map(|index| LayerPart::MATRICES.map(|part| Part::Layer(index, part)));
    match parts.find(|&part| checkpoint.dtype(part) != checkpoint.dtype(first)) {
        None => Ok(()),
        Some(other) => Err(Error::model(
            format!(
                "{} and {} have different number formats",
                checkpoint.tensor_name(first),
                checkpoint.tensor_name(other)
            ),
            "store the checkpoint in one format, or use --device cpu",
        )),
    }
}

/// Checks that the GPU has kernels for these target weights.
///
/// # Errors
/// [`quantspec_core::ErrorKind::Model`] for int8 and int4 weights of a checkpoint in F32.
pub fn check_weights(checkpoint: &Checkpoint, weights: TargetWeights) -> Result<()> {
    match weights {
        TargetWeights::Checkpoint => Ok(()),
        TargetWeights::Int8 | TargetWeights::Int4 => hierarchy::check(checkpoint.config().dtype),
    }
}

/// One layer's matrices in 16 bits, for a prompt's GEMMs with weights in nibbles.
#[derive(Debug)]
pub(crate) struct Expanded {
    buffer: Buffer,
    /// Byte offset of each matrix, in the order of [`Layer::matrices`].
    offsets: [usize; 4],
    /// The layer in the buffer.
    layer: Option<usize>,
}

impl Expanded {
    /// Offsets and total bytes of the four matrices, each aligned to [`ALIGNED`].
    fn offsets(config: &ModelConfig) -> ([usize; 4], usize) {
        let mut end = 0;
        let offsets = matrix_shapes(config).map(|(n, k)| {
            let offset = end;
            end += Matrix::bytes(config.dtype, n, k).next_multiple_of(ALIGNED);
            offset
        });
        (offsets, end)
    }

    /// Bytes held.
    pub(crate) fn bytes(config: &ModelConfig) -> usize {
        Expanded::offsets(config).1
    }

    /// Room for a layer.
    pub(crate) fn new(device: &Arc<Device>, config: &ModelConfig) -> Result<Expanded> {
        let (offsets, bytes) = Expanded::offsets(config);
        Ok(Expanded { buffer: device.allocate(bytes)?, offsets, layer: None })
    }

    /// Bytes held.
    pub(crate) fn held_bytes(&self) -> usize {
        self.buffer.bytes()
    }

    /// Addresses of a layer's matrices. Queues writing them if the buffer holds another layer's.
    pub(crate) fn layer(&mut self, hierarchies: &Hierarchies, index: usize, layer: &Layer) -> Result<[u64; 4]> {
        if self.layer != Some(index) {
            self.layer = None;
            for (full, &offset) in layer.matrices().into_iter().zip(&self.offsets) {
                if let Full::Nibbles(hierarchy) = full {
                    hierarchies.expand(hierarchy, &self.buffer, offset)?;
                }
            }
            self.layer = Some(index);
        }
        Ok(self.offsets.map(|offset| self.buffer.at(offset)))
    }
}

/// Address of an optional vector; 0 for None.
pub(crate) fn address(buffer: &Option<Buffer>) -> u64 {
    buffer.as_ref().map_or(0, |buffer| buffer.at(0))
}

/// [`address`] as a kernel argument.
pub(crate) fn argument(buffer: &Option<Buffer>) -> Arg<'static> {
    Arg::Long(address(buffer))
}

#[cfg(test)]
#[path = "../../quantspec-cpu/tests/support/random.rs"]
#[allow(dead_code, clippy::panic, reason = "shared with tests that use more of it")]
mod random;

#[cfg(test)]
mod tests {
    use super::random::Shape;
    use super::*;
    use quantspec_core::ErrorKind;

    #[test]
    fn nibbles_of_f32_checkpoints_are_refused() {
        for (dtype, taken) in [("BF16", true), ("F16", true), ("F32", false)] {
            let checkpoint = Shape::new("llama", dtype, (2, 1, 64)).checkpoint(1);
            assert!(check_weights(&checkpoint, TargetWeights::Checkpoint).is_ok());
            for weights in [TargetWeights::Int8, TargetWeights::Int4] {
                let checked = check_weights(&checkpoint, weights).map_err(|error| error.kind);
                assert_eq!(checked, if taken { Ok(()) } else { Err(ErrorKind::Model) }, "{dtype} {weights:?}");
            }
        }
    }

    #[test]
    fn layers_of_several_formats_are_refused() {
        let shape = Shape { tied: false, ..Shape::new("llama", "BF16", (2, 1, 64)) };
        let edited = |odd: &str| {
            let odd = odd.to_owned();
            check(&shape.edited(1, &move |name, _, dtype| {
                if name.contains(&odd) {
                    *dtype = "F16";
                }
            }))
        };
        // Tables may have a format of their own; a single matrix or layer may not.
        assert!(edited("nothing").is_ok() && edited("lm_head").is_ok() && edited("embed_tokens").is_ok());
        for odd in ["layers.0.mlp.up_proj", "layers.1.self_attn.q_proj", "layers.1."] {
            let error = edited(odd).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Model, "{odd}");
            assert!(error.message.contains("layers.0.self_attn") && error.message.contains(odd), "{}", error.message);
        }
    }
}
