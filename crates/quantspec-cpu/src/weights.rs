//! Weights of this backend and their loading: row panels are read, checked, repacked and, for the draft, quantised in one
//! pass over the checkpoint, so that no weight is held twice.

mod load;

use crate::hierarchy::{Planes, Read};
use crate::lanes::{bf16_value, f16_value};
use crate::linear::{Matrix, Store, Weight};
use crate::memory::Array;
use crate::panel::PANEL;
use crate::w4::{Bits, Tiles};
use quantspec_core::config::{DraftWeights, Dtype, LayerNorms, ModelConfig, QkNorm, Sensitive, TargetWeights, Weights};
use quantspec_model::backend::Options;
use quantspec_model::checkpoint::{Checkpoint, LayerPart, Part};

/// Panels of a matrix of `n` outputs.
pub(crate) const fn panels(n: usize) -> usize {
    n.div_ceil(PANEL)
}

/// A linear layer: the target's weights, the draft's if they differ, and biases in the order of its outputs.
pub(crate) struct Linear {
    pub(crate) full: Matrix,
    pub(crate) draft: Option<DraftMatrix>,
    /// Empty if the model has none.
    pub(crate) bias: Vec<f32>,
}

impl Linear {
    /// The operand of a pass.
    pub(crate) fn weight(&self, weights: Weights) -> Weight<'_> {
        match (weights, &self.draft, &self.full.store) {
            (Weights::Draft | Weights::Draft4, Some(DraftMatrix::Tiles(tiles)), _) => Weight::Tiles(tiles),
            (Weights::Draft4, Some(DraftMatrix::Planes(Read::Upper)), Store::Planes(planes)) => {
                Weight::Planes(planes, Read::Upper4)
            }
            (Weights::Draft | Weights::Draft4, Some(DraftMatrix::Planes(read)), Store::Planes(planes)) => {
                Weight::Planes(planes, *read)
            }
            (_, _, Store::Planes(planes)) => Weight::Planes(planes, Read::Target),
            _ => Weight::Full(&self.full),
        }
    }

    /// Separate draft weights.
    fn tiles(&self) -> Option<&Tiles> {
        match &self.draft {
            Some(DraftMatrix::Tiles(tiles)) => Some(tiles),
            _ => None,
        }
    }
}

/// The draft's weights of a linear layer.
pub(crate) enum DraftMatrix {
    /// Separate weights.
    Tiles(Tiles),
    /// The target's planes.
    Planes(Read),
}

/// One decoder layer.
pub(crate) struct Layer {
    /// Norms before and after the two branches, if the model has them.
    pub(crate) attention_norm: Option<Vec<f32>>,
    pub(crate) attention_output_norm: Option<Vec<f32>>,
    pub(crate) mlp_norm: Option<Vec<f32>>,
    pub(crate) mlp_output_norm: Option<Vec<f32>>,
    /// Norms of queries and keys: of every head, or of all together.
    pub(crate) qk_norm: Option<(Vec<f32>, Vec<f32>)>,
    /// Query, key and value outputs, each starting at a panel border.
    pub(crate) qkv: Linear,
    pub(crate) output: Linear,
    /// Panels of gate and up alternate.
    pub(crate) gate_up: Linear,
    pub(crate) down: Linear,
}

/// The embedding of an untied model: rows in the checkpoint's format.
pub(crate) struct Embedding {
    dtype: Dtype,
    bytes: Array<u8>,
}

/// Everything a checkpoint holds.
pub(crate) struct Model {
    /// None if the head is the embedding.
    pub(crate) embedding: Option<Embedding>,
    /// Factor on the embedding.
    embedding_scale: f32,
    pub(crate) layers: Vec<Layer>,
    pub(crate) final_norm: Vec<f32>,
    pub(crate) head: Linear,
}

/// Offsets of the three parts of the fused QKV output.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QkvOffsets {
    pub(crate) key: usize,
    pub(crate) value: usize,
    pub(crate) width: usize,
}

impl QkvOffsets {
    pub(crate) fn new(config: &ModelConfig) -> QkvOffsets {
        let (q, kv) = (panels(config.q_width()) * PANEL, panels(config.kv_width()) * PANEL);
        QkvOffsets { key: q, value: q + kv, width: q + 2 * kv }
    }
}

/// Tensors of the linear layers of one decoder layer.
const LINEARS: [&[LayerPart]; 4] = {
    use LayerPart::{Down, Gate, K, Output, Q, Up, V};
    [&[Q, K, V], &[Output], &[Gate, Up], &[Down]]
};

/// (panels, inputs, draft bits) of the linear layers of one decoder layer, in the order of [`LINEARS`], and of the head. Draft
/// bits are None if the draft reads the target's weights.
#[derive(Debug)]
struct Sizes {
    layer: [(usize, usize, Option<Bits>); 4],
    head: (usize, usize, Option<Bits>),
}

impl Sizes {
    fn new(config: &ModelConfig, options: &Options) -> Sizes {
        let (kept, Sensitive(sensitive)) = (options.draft_weights.kinds(), options.sensitive);
        let bits = |kind: usize| {
            let both = options.weights != TargetWeights::Int4;
            let bits = if both && sensitive[kind] { Bits::Eight } else { Bits::Four };
            kept[kind].then_some(bits)
        };
        let qkv = QkvOffsets::new(config).width / PANEL;
        let hidden = panels(config.hidden);
        Sizes {
            layer: [
                (qkv, config.hidden, bits(0)),
                (hidden, config.q_width(), bits(1)),
                (2 * panels(config.intermediate), config.hidden, bits(2)),
                (hidden, config.intermediate, bits(3)),
            ],
            head: (
                panels(config.vocab),
                config.hidden,
                (options.draft_weights == DraftWeights::Int4).then_some(Bits::Eight),
            ),
        }
    }
}

/// First panel with both planes, of the matrix that begins with `part`; None if it keeps the checkpoint's format
/// ([`Part::has_both_planes`]).
fn both_from(config: &ModelConfig, weights: TargetWeights, part: Part, panels: usize) -> Option<usize> {
    match (weights, part) {
        (TargetWeights::Checkpoint, _) => None,
        (weights, part) if part.has_both_planes(weights, config.layers) => Some(0),
        // Keys and values follow the queries.
        (_, Part::Layer(_, LayerPart::Q)) => Some(QkvOffsets::new(config).key / PANEL),
        _ => Some(panels),
    }
}

/// Bytes of the weights and of the draft weights.
pub(crate) fn plan(checkpoint: &Checkpoint, options: &Options) -> (usize, usize) {
    let (config, weights) = (checkpoint.config(), options.weights);
    let sizes = Sizes::new(config, options);
    let layers = (0..config.layers).flat_map(|index| {
        sizes.layer.iter().zip(LINEARS).map(move |(size, parts)| {
            let dtype = dtype_of(checkpoint, parts.iter().map(|&part| Part::Layer(index, part)));
            (*size, dtype, Part::Layer(index, parts[0]))
        })
    });
    let all = layers.chain([(sizes.head, checkpoint.dtype(Part::Head), Part::Head)]);
    let (full, tiles) = all.fold((0, 0), |(full, tiles), ((panels, k, bits), dtype, part)| {
        if let Some(both_from) = both_from(config, weights, part, panels) {
            return (full + Planes::bytes_of(panels, k, both_from), tiles);
        }
        let draft = bits.map_or(0, |bits| panels * Tiles::panel_bytes(k, bits));
        (full + Matrix::bytes_of(panels, k, dtype), tiles + draft)
    });
    let embedding = if config.tied_embeddings { 0 } else { checkpoint.bytes(Part::Embedding) };
    (full + embedding + vectors(config), tiles)
}

/// Bytes of the matrices of all layers in nibbles.
pub(crate) fn nibble_bytes(config: &ModelConfig, options: &Options) -> usize {
    let sizes = Sizes::new(config, options);
    let layer = |index: usize| -> usize {
        let bytes = |(&(panels, k, _), parts): (&(usize, usize, Option<Bits>), &[LayerPart])| {
            let both_from = both_from(config, options.weights, Part::Layer(index, parts[0]), panels);
            Planes::bytes_of(panels, k, both_from.unwrap_or(panels))
        };
        sizes.layer.iter().zip(LINEARS).map(bytes).sum()
    };
    (0..config.layers).map(layer).sum()
}

/// Number format of a matrix made of several tensors: theirs, or f32, which holds all of them exactly, if they differ.
fn dtype_of(checkpoint: &Checkpoint, mut parts: impl Iterator<Item = Part>) -> Dtype {
    let first = parts.next().map_or(Dtype::F32, |part| checkpoint.dtype(part));
    if parts.all(|part| checkpoint.dtype(part) == first) { first } else { Dtype::F32 }
}

/// Bytes of norms and biases.
fn vectors(config: &ModelConfig) -> usize {
    let when = |there: bool, n: usize| if there { n } else { 0 };
    let norms = if config.norms == LayerNorms::Both { 4 } else { 2 };
    let layer = norms * config.hidden
        + match config.qk_norm {
            QkNorm::None => 0,
            QkNorm::Heads => 2 * config.head_dim,
            QkNorm::Projection => config.q_width() + config.kv_width(),
        }
        + when(config.qkv_bias, QkvOffsets::new(config).width)
        + when(config.output_bias, panels(config.hidden) * PANEL)
        + when(config.mlp_bias, (2 * panels(config.intermediate) + panels(config.hidden)) * PANEL);
    4 * (config.layers * layer + config.hidden)
}

impl Model {
    fn linears(&self) -> impl Iterator<Item = &Linear> {
        let layers = self.layers.iter().flat_map(|layer| [&layer.qkv, &layer.output, &layer.gate_up, &layer.down]);
        layers.chain([&self.head])
    }

    /// Every panel of draft weights, in the order of loading.
    fn draft_panels(&self) -> impl Iterator<Item = &[u8]> {
        let tiles = self.linears().filter_map(Linear::tiles);
        tiles.flat_map(|tiles| tiles.data.chunks_exact(Tiles::panel_bytes(tiles.k, tiles.bits)))
    }

    /// Embedding of a token, `[hidden]`.
    pub(crate) fn embed(&self, token: usize, out: &mut [f32]) {
        match &self.embedding {
            Some(embedding) => embedding.row(token, out),
            None => self.head.full.row(token, out),
        }
        out.iter_mut().for_each(|x| *x *= self.embedding_scale);
    }

    /// Bytes of the weights and of the draft weights.
    pub(crate) fn bytes(&self, config: &ModelConfig) -> (usize, usize) {
        let embedding = self.embedding.as_ref().map_or(0, |embedding| embedding.bytes.bytes());
        let full: usize = self.linears().map(|linear| linear.full.bytes()).sum();
        let draft = self.linears().filter_map(Linear::tiles).map(|tiles| tiles.data.bytes()).sum();
        (full + embedding + vectors(config), draft)
    }

    /// Bytes of the matrices that a draft step reads.
    pub(crate) fn draft_read_bytes(&self) -> usize {
        let bytes = |linear: &Linear| match linear.weight(Weights::Draft) {
            Weight::Tiles(tiles) => tiles.data.bytes(),
            Weight::Planes(planes, read) => planes.read_bytes(read),
            Weight::Full(matrix) => matrix.bytes(),
        };
        self.linears().map(bytes).sum()
    }
}

impl Embedding {
    fn row(&self, row: usize, out: &mut [f32]) {
        let len = out.len() * self.dtype.bytes();
        to_f32(self.dtype, &self.bytes[row * len..(row + 1) * len], out);
    }
}

/// Little-endian numbers of a checkpoint as f32.
fn to_f32(dtype: Dtype, raw: &[u8], out: &mut [f32]) {
    match dtype {
        Dtype::Bf16 => {
            raw.chunks_exact(2).zip(out).for_each(|(b, out)| *out = bf16_value(u16::from_le_bytes([b[0], b[1]])))
        }
        Dtype::F16 => {
            raw.chunks_exact(2).zip(out).for_each(|(b, out)| *out = f16_value(u16::from_le_bytes([b[0], b[1]])))
        }
        Dtype::F32 => {
            raw.chunks_exact(4).zip(out).for_each(|(b, out)| *out = f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        }
    }
}
