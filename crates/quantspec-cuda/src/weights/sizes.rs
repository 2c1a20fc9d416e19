//! Sizes of weights on the device, and the number formats that decide them.

use crate::hierarchy::Hierarchy;
use crate::linear::{Matrix, Quantised};
use quantspec_core::config::{DraftWeights, Dtype, LayerNorms, ModelConfig, QkNorm, Sensitive, TargetWeights};
use quantspec_model::backend::Options;
use quantspec_model::checkpoint::{Checkpoint, LayerPart, Part};

/// Alignment of draft weights, in bytes.
pub(super) const ALIGNED: usize = 256;

/// Returns true if the target's weights are in nibbles.
pub(crate) fn nibbles(options: &Options) -> bool {
    options.weights != TargetWeights::Checkpoint
}

/// Number format of the inputs of the head.
pub(crate) fn head_inputs(checkpoint: &Checkpoint, options: &Options) -> Dtype {
    if nibbles(options) { checkpoint.config().dtype } else { checkpoint.dtype(Part::Head) }
}

/// Bits in which a draft reads each of a layer's matrices, in the order of [`matrix_shapes`]; None if it reads the target's. With
/// weights in one plane at most four.
pub(crate) fn draft_bits(options: &Options) -> [Option<usize>; 4] {
    let (kept, Sensitive(sensitive)) = (options.draft_weights.kinds(), options.sensitive);
    let eight = options.weights != TargetWeights::Int4;
    std::array::from_fn(|kind| kept[kind].then_some(if eight && sensitive[kind] { 8 } else { 4 }))
}

/// (N, K) of a layer's matrices: QKV, output, gate and up, down.
pub(super) fn matrix_shapes(config: &ModelConfig) -> [(usize, usize); 4] {
    let (hidden, inter, q, kv) = (config.hidden, config.intermediate, config.q_width(), config.kv_width());
    [(q + 2 * kv, hidden), (hidden, q), (2 * inter, hidden), (hidden, inter)]
}

/// First row with both planes of each of a layer's matrices in nibbles, in the order of [`matrix_shapes`]
/// ([`Part::has_both_planes`]). Keys and values follow the queries.
pub(super) fn both_from(config: &ModelConfig, weights: TargetWeights, layer: usize) -> [usize; 4] {
    use LayerPart::*;
    let both = |part| Part::Layer(layer, part).has_both_planes(weights, config.layers);
    let mut first = matrix_shapes(config).map(|(n, _)| n);
    for (first, part) in first.iter_mut().zip([Q, Output, Gate, Down]) {
        if both(part) {
            *first = 0;
        }
    }
    if both(K) {
        first[0] = first[0].min(config.q_width());
    }
    first
}

/// Bytes of the head on a device.
fn head_bytes(checkpoint: &Checkpoint, weights: TargetWeights) -> usize {
    let config = checkpoint.config();
    match weights {
        TargetWeights::Checkpoint => Matrix::bytes(checkpoint.dtype(Part::Head), config.vocab, config.hidden),
        TargetWeights::Int8 | TargetWeights::Int4 => head_planes_bytes(config),
    }
}

/// Bytes of a head in nibbles.
fn head_planes_bytes(config: &ModelConfig) -> usize {
    Hierarchy::bytes(config.vocab, config.hidden).iter().sum()
}

/// Bytes of the memory that a long prompt may use, [`super::Weights::lent`].
pub(crate) fn lent_bytes(config: &ModelConfig, options: &Options) -> usize {
    if nibbles(options) { head_planes_bytes(config) } else { draft_bytes(config, options) }
}

/// Bytes of host memory of the embedding, and of the copy of the head if a prompt `borrows` its memory.
pub(crate) fn host_bytes(checkpoint: &Checkpoint, options: &Options, borrows: bool) -> usize {
    let config = checkpoint.config();
    let embedding = Matrix::bytes(checkpoint.dtype(Part::Embedding), config.vocab, config.hidden);
    let copy = if nibbles(options) && borrows { head_planes_bytes(config) } else { 0 };
    copy + if config.tied_embeddings { 0 } else { embedding }
}

/// Bytes of a checkpoint's weights on a device, without the draft's own and without an embedding in host memory.
pub(crate) fn bytes(checkpoint: &Checkpoint, weights: TargetWeights) -> usize {
    let config = checkpoint.config();
    let (hidden, inter, q, kv) = (config.hidden, config.intermediate, config.q_width(), config.kv_width());
    let matrix = |((n, k), both_from): ((usize, usize), usize)| match weights {
        TargetWeights::Checkpoint => Matrix::bytes(config.dtype, n, k),
        TargetWeights::Int8 | TargetWeights::Int4 => Hierarchy::bytes(n, k)[0] + Hierarchy::bytes(n - both_from, k)[1],
    };
    let layer = |layer: usize| {
        matrix_shapes(config).into_iter().zip(both_from(config, weights, layer)).map(matrix).sum::<usize>()
    };
    let matrices: usize = (0..config.layers).map(layer).sum();
    let mut vectors = if config.norms == LayerNorms::Both { 4 } else { 2 } * hidden;
    vectors += if config.qkv_bias { q + 2 * kv } else { 0 };
    vectors += if config.output_bias { hidden } else { 0 };
    vectors += if config.mlp_bias { 2 * inter + hidden } else { 0 };
    vectors += match config.qk_norm {
        QkNorm::None => 0,
        QkNorm::Heads => 2 * config.head_dim,
        QkNorm::Projection => q + kv,
    };
    matrices + config.layers * 4 * vectors + 4 * hidden + head_bytes(checkpoint, weights)
}

/// Bytes of a model's separate draft weights on a device, without those in nibbles.
pub(crate) fn draft_bytes(config: &ModelConfig, options: &Options) -> usize {
    if nibbles(options) {
        return 0;
    }
    let bytes = |bits: Option<usize>, (n, k): (usize, usize)| {
        bits.map_or(0, |bits| Quantised::bytes(bits, n, k).next_multiple_of(ALIGNED))
    };
    let layer: usize =
        draft_bits(options).into_iter().zip(matrix_shapes(config)).map(|(bits, shape)| bytes(bits, shape)).sum();
    config.layers * layer + bytes(head_bits(options), (config.vocab, config.hidden))
}

/// Bytes of the importance of inputs on a device: of separate draft weights in 4 bits, which are made again after long prompts.
pub(crate) fn importance_bytes(config: &ModelConfig, options: &Options) -> usize {
    if nibbles(options) {
        return 0;
    }
    let inputs = draft_bits(options).into_iter().zip(matrix_shapes(config)).filter(|(bits, _)| *bits == Some(4));
    config.layers * inputs.map(|(_, (_, k))| k * size_of::<f32>()).sum::<usize>()
}

/// Bits of a draft's separate head; None if it reads the target's.
pub(super) fn head_bits(options: &Options) -> Option<usize> {
    (options.draft_weights == DraftWeights::Int4).then_some(8)
}
