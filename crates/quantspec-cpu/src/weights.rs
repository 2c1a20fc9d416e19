//! Weights of this backend and their loading: row panels are read, checked, repacked and, for the draft, quantised in one
//! pass over the checkpoint, so that no weight is held twice.

use crate::dispatch::Simd;
use crate::hierarchy::{self, Planes, Read};
use crate::lanes::{bf16_value, f16_value};
use crate::linear::{Matrix, Store, Weight, repack16, repack32};
use crate::memory::{Array, DisjointSlice};
use crate::panel::PANEL;
use crate::pool::{Pool, share};
use crate::w4::{self, Bits, Tiles};
use quantspec_core::config::{DraftWeights, Dtype, LayerNorms, ModelConfig, QkNorm, Sensitive, TargetWeights, Weights};
use quantspec_core::{Error, Result};
use quantspec_model::backend::{Hooks, Options};
use quantspec_model::checkpoint::{Checkpoint, LayerPart, Part};
use quantspec_model::draft_cache::{self, DraftBlocks};
use quantspec_model::importance::{LayerImportance, MadeUpRows};
use std::ops::Range;
use std::sync::Mutex;

/// Bytes of a checkpoint that one thread reads between two calls of the hooks: a quarter of a second on a slow disk.
const SLICE_BYTES: usize = 8 << 20;

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
/// ([`Part::has_both_planes_on_cpu`]).
fn both_from(config: &ModelConfig, weights: TargetWeights, part: Part, panels: usize) -> Option<usize> {
    match (weights, part) {
        (TargetWeights::Checkpoint, _) => None,
        (weights, part) if part.has_both_planes_on_cpu(weights, config.layers) => Some(0),
        // Keys and values follow the queries.
        (_, Part::Layer(_, LayerPart::Q)) => Some(QkvOffsets::new(config).key / PANEL),
        _ => Some(panels),
    }
}

/// The draft weights of a checkpoint on disk, if they are kept there. A block is a panel, in the order of [`Loader::linear`].
fn drafts(checkpoint: &Checkpoint, options: &Options, sizes: &Sizes) -> Option<DraftBlocks> {
    if options.weights != TargetWeights::Checkpoint {
        return None;
    }
    let kind = match options.draft_weights {
        DraftWeights::None => return None,
        DraftWeights::Int4 => "int4",
        DraftWeights::Int4Mlp => "int4-mlp",
    };
    // One file per choice, so that engines with different choices do not replace each other's.
    let kind = match options.sensitive {
        Sensitive::NONE => kind.to_owned(),
        sensitive => format!("{kind}-{}", sensitive.names().replace(',', "-")),
    };
    let layers = checkpoint.config().layers;
    let recipe = format!("{} {layers} {sizes:?}", w4::LAYOUT);
    let linears = std::iter::repeat_n(&sizes.layer, layers).flatten().chain([&sizes.head]);
    let panels = linears.filter_map(|(panels, k, bits)| Some((*panels, Tiles::panel_bytes(*k, (*bits)?))));
    let blocks = panels.flat_map(|(panels, bytes)| std::iter::repeat_n(bytes, panels));
    DraftBlocks::open(checkpoint.draft_cache()?, &kind, &recipe, blocks)
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
    /// Loads a checkpoint.
    ///
    /// # Errors
    /// Those of the checkpoint and of `hooks.poll`; [`quantspec_core::ErrorKind::NotFinite`] with the tensor;
    /// [`quantspec_core::ErrorKind::DoesNotFit`] if memory is short.
    pub(crate) fn load(
        checkpoint: &Checkpoint,
        options: &Options,
        simd: Simd,
        pool: &Pool,
        hooks: &mut Hooks,
    ) -> Result<Model> {
        let config = checkpoint.config();
        let sizes = Sizes::new(config, options);
        let drafts = drafts(checkpoint, options, &sizes);
        let weights = options.weights;
        let total: usize = matrices(config).map(|part| checkpoint.bytes(part)).sum();
        let total = total + drafts.as_ref().map_or(0, DraftBlocks::unsaved_bytes);
        let drafts_of = drafts.as_ref();
        let mut loader =
            Loader { checkpoint, weights, simd, pool, hooks, drafts: drafts_of, blocks: 0, done: 0, total };
        let mut layers = Vec::with_capacity(config.layers);
        let parallel = |count: usize, work: &(dyn Fn(Range<usize>) -> Result<()> + Sync)| on_threads(pool, count, work);
        let mut rows =
            if weights == TargetWeights::Checkpoint { None } else { Some(MadeUpRows::new(checkpoint, &parallel)?) };
        for index in 0..config.layers {
            // Directly before the layer is loaded, so that its matrices are read from a disk once.
            let importance = rows.as_mut().map(MadeUpRows::next_layer).transpose()?;
            (loader.hooks.poll)()?;
            layers.push(loader.layer(index, &sizes, importance.as_ref())?);
        }
        let source = Source { part: Part::Head, bias: None, first: 0, step: 1 };
        let head = loader.linear(sizes.head, &[source], &[])?;
        let embedding = if config.tied_embeddings { None } else { Some(loader.embedding()?) };
        let final_norm = loader.vector(Part::FinalNorm)?;
        let done = loader.done;
        let model = Model { embedding, embedding_scale: config.scales.embedding, layers, final_norm, head };
        if let Some(drafts) = drafts {
            let origin = drafts.save(model.draft_panels(), |saved| {
                (hooks.loading)(total.min(done + saved), total);
                (hooks.poll)()
            })?;
            (hooks.drafts)(origin);
        }
        Ok(model)
    }

    fn linears(&self) -> impl Iterator<Item = &Linear> {
        let layers = self.layers.iter().flat_map(|layer| [&layer.qkv, &layer.output, &layer.gate_up, &layer.down]);
        layers.chain([&self.head])
    }

    /// Every panel of draft weights, in the order of loading.
    fn draft_panels(&self) -> impl Iterator<Item = &[u8]> {
        let tiles = self.linears().filter_map(Linear::tiles);
        tiles.flat_map(|tiles| tiles.data.chunks_exact(Tiles::panel_bytes(tiles.k, tiles.bits)))
    }

    /// Embedding of a token, [hidden].
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
}

impl Embedding {
    fn row(&self, row: usize, out: &mut [f32]) {
        let len = out.len() * self.dtype.bytes();
        to_f32(self.dtype, &self.bytes[row * len..(row + 1) * len], out);
    }
}

/// All matrices that are read from a checkpoint.
fn matrices(config: &ModelConfig) -> impl Iterator<Item = Part> {
    let embedding = (!config.tied_embeddings).then_some(Part::Embedding);
    (0..config.layers)
        .flat_map(|layer| LINEARS.into_iter().flatten().map(move |&part| Part::Layer(layer, part)))
        .chain([Part::Head])
        .chain(embedding)
}

/// The bytes of f32 numbers.
fn bytes_of_f32(values: &[f32]) -> &[u8] {
    // SAFETY: f32 has no padding, and bytes have no alignment.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
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

/// A tensor of a linear layer: its i-th panel is panel `first + i · step` of the layer.
#[derive(Clone, Copy)]
struct Source {
    part: Part,
    bias: Option<Part>,
    first: usize,
    step: usize,
}

struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    weights: TargetWeights,
    simd: Simd,
    pool: &'a Pool,
    hooks: &'a mut Hooks,
    drafts: Option<&'a DraftBlocks>,
    /// Blocks of `drafts` before the current linear layer.
    blocks: usize,
    done: usize,
    total: usize,
}

impl Loader<'_> {
    fn vector(&self, part: Part) -> Result<Vec<f32>> {
        let mut out = vec![0.0; self.checkpoint.shape(part).1];
        self.checkpoint.read_f32(part, 0..1, &mut out)?;
        Ok(out)
    }

    /// `importance` of its inputs, if the matrices are quantised to planes.
    fn layer(&mut self, index: usize, sizes: &Sizes, importance: Option<&LayerImportance>) -> Result<Layer> {
        let config = self.checkpoint.config().clone();
        let part = |part: LayerPart| Part::Layer(index, part);
        let source = |weight: LayerPart, bias: Option<LayerPart>, first: usize, step: usize| Source {
            part: part(weight),
            bias: bias.map(part),
            first,
            step,
        };
        let offsets = QkvOffsets::new(&config);
        let when = |there: bool, bias: LayerPart| there.then_some(bias);
        let qkv = [
            source(LayerPart::Q, when(config.qkv_bias, LayerPart::QBias), 0, 1),
            source(LayerPart::K, when(config.qkv_bias, LayerPart::KBias), offsets.key / PANEL, 1),
            source(LayerPart::V, when(config.qkv_bias, LayerPart::VBias), offsets.value / PANEL, 1),
        ];
        let output = [source(LayerPart::Output, when(config.output_bias, LayerPart::OutputBias), 0, 1)];
        let gate_up = [
            source(LayerPart::Gate, when(config.mlp_bias, LayerPart::GateBias), 0, 2),
            source(LayerPart::Up, when(config.mlp_bias, LayerPart::UpBias), 1, 2),
        ];
        let down = [source(LayerPart::Down, when(config.mlp_bias, LayerPart::DownBias), 0, 1)];
        let [of_qkv, of_output, of_gate_up, of_down] = sizes.layer;
        let importance = |part: LayerPart| importance.map_or(&[][..], |importance| importance.of(part));
        let qkv = self.linear(of_qkv, &qkv, importance(LayerPart::Q))?;
        let output = self.linear(of_output, &output, importance(LayerPart::Output))?;
        let gate_up = self.linear(of_gate_up, &gate_up, importance(LayerPart::Gate))?;
        let down = self.linear(of_down, &down, importance(LayerPart::Down))?;
        let norm = |kind: LayerPart| kind.exists(&config).then(|| self.vector(part(kind))).transpose();
        Ok(Layer {
            attention_norm: norm(LayerPart::AttentionNorm)?,
            attention_output_norm: norm(LayerPart::AttentionOutputNorm)?,
            mlp_norm: norm(LayerPart::MlpNorm)?,
            mlp_output_norm: norm(LayerPart::MlpOutputNorm)?,
            qk_norm: norm(LayerPart::QNorm)?.zip(norm(LayerPart::KNorm)?),
            qkv,
            output,
            gate_up,
            down,
        })
    }

    /// A linear layer of this size (panels, inputs, draft bits). `importance` of its inputs, or none ([`hierarchy::encode`]).
    fn linear(
        &mut self,
        (count, k, bits): (usize, usize, Option<Bits>),
        sources: &[Source],
        importance: &[f32],
    ) -> Result<Linear> {
        let dtype = dtype_of(self.checkpoint, sources.iter().map(|source| source.part));
        let planes = both_from(self.checkpoint.config(), self.weights, sources[0].part, count);
        let mut full = match planes {
            Some(from) => Matrix { panels: count, k, store: Store::Planes(Planes::zeros(count, k, from)?) },
            None => Matrix::zeros(count, k, dtype)?,
        };
        let mut draft = bits.filter(|_| planes.is_none()).map(|bits| Tiles::zeros(count, k, bits)).transpose()?;
        let mut bias = Vec::new();
        for source in sources {
            self.fill(&mut full, dtype, draft.as_mut(), source, importance)?;
            if let Some(part) = source.bias {
                bias.resize(count * PANEL, 0.0);
                for (i, values) in self.vector(part)?.chunks(PANEL).enumerate() {
                    bias[(source.first + i * source.step) * PANEL..][..values.len()].copy_from_slice(values);
                }
            }
        }
        self.blocks += draft.as_ref().map_or(0, |tiles| tiles.panels);
        // Drafts of int4 read every plane that there is.
        let all = self.weights == TargetWeights::Int4 && planes == Some(0);
        let read = |bits| if all || bits == Bits::Eight { Read::Both } else { Read::Upper };
        let draft = match planes {
            Some(_) => bits.map(|bits| DraftMatrix::Planes(read(bits))),
            None => draft.map(DraftMatrix::Tiles),
        };
        Ok(Linear { full, draft, bias })
    }

    /// Reads one tensor into its panels; `dtype` represents all tensors of the matrix exactly.
    fn fill(
        &mut self,
        full: &mut Matrix,
        dtype: Dtype,
        draft: Option<&mut Tiles>,
        source: &Source,
        importance: &[f32],
    ) -> Result<()> {
        let k = full.k;
        let (checkpoint, simd, drafts, first_block) = (self.checkpoint, self.simd, self.drafts, self.blocks);
        let (rows, _) = checkpoint.shape(source.part);
        let (len, count) = (Matrix::panel_len(k), panels(rows));
        let per_thread = (SLICE_BYTES / (PANEL * k * dtype.bytes()).max(1)).max(1);
        enum Out<'a> {
            Bits16(DisjointSlice<'a, u16>),
            Bits32(DisjointSlice<'a, f32>),
            Planes(DisjointSlice<'a, u8>, DisjointSlice<'a, u8>, usize),
        }
        let out = match &mut full.store {
            Store::Bf16(array) | Store::F16(array) => Out::Bits16(DisjointSlice::new(array)),
            Store::F32(array) => Out::Bits32(DisjointSlice::new(array)),
            Store::Planes(Planes { upper, lower, both_from, .. }) => {
                Out::Planes(DisjointSlice::new(upper), DisjointSlice::new(lower), *both_from)
            }
        };
        let tiles =
            draft.map(|tiles| (tiles.bits, Tiles::panel_bytes(k, tiles.bits), DisjointSlice::new(&mut tiles.data)));
        let named = |error: Error| Error {
            message: format!("{}: {}", checkpoint.tensor_name(source.part), error.message),
            ..error
        };
        let one = |panel: usize, raw: &mut Vec<u8>, values: &mut Vec<f32>| -> Result<()> {
            let range = panel * PANEL..rows.min((panel + 1) * PANEL);
            let n = range.len();
            let index = source.first + panel * source.step;
            match &out {
                Out::Bits16(parts) => {
                    raw.resize(2 * n * k, 0);
                    checkpoint.read(source.part, range, raw)?;
                    // SAFETY: every panel is one unit of one thread.
                    let panel = unsafe { parts.slice(index * len, len) };
                    let bf16 = dtype == Dtype::Bf16;
                    if !repack16(raw, k, bf16, if bf16 { 0x7f80 } else { 0x7c00 }, panel) {
                        return Err(not_finite(checkpoint, source.part));
                    }
                }
                Out::Bits32(parts) => {
                    values.resize(n * k, 0.0);
                    checkpoint.read_f32(source.part, range, values)?;
                    // SAFETY: as above.
                    repack32(values, k, unsafe { parts.slice(index * len, len) });
                }
                Out::Planes(upper, lower, both_from) => {
                    values.resize(n * k, 0.0);
                    checkpoint.read_stored(source.part, range, values)?;
                    let (u, l) = Planes::panel_bytes(k);
                    // SAFETY: as above.
                    let upper = unsafe { upper.slice(index * u, u) };
                    let lower: &mut [u8] = match index.checked_sub(*both_from) {
                        // SAFETY: as above.
                        Some(index) => unsafe { lower.slice(index * l, l) },
                        None => &mut [],
                    };
                    hierarchy::encode(simd, values, importance, k, upper, lower).map_err(named)?;
                }
            }
            let Some((bits, len, parts)) = &tiles else { return Ok(()) };
            // SAFETY: as above.
            let panel = unsafe { parts.slice(index * len, *len) };
            let (raw, whole): (&[u8], bool) = (raw, matches!(out, Out::Bits32(_)));
            let make = |values: &mut Vec<f32>, panel: &mut [u8]| -> Result<()> {
                if !whole {
                    values.resize(n * k, 0.0);
                    to_f32(dtype, raw, values);
                }
                w4::encode(simd, *bits, values, k, panel).map_err(named)
            };
            let Some(drafts) = drafts else { return make(values, panel) };
            let bytes = if whole { bytes_of_f32(values) } else { raw };
            let of = draft_cache::source(dtype as u64, bytes);
            drafts.block(first_block + index, of, panel, |panel| make(values, panel))
        };
        let unit_bytes = PANEL * k * checkpoint.dtype(source.part).bytes();
        self.slices(count, per_thread, unit_bytes, checkpoint.bytes(source.part), &|panels| {
            let (mut raw, mut values) = (Vec::new(), Vec::new());
            panels.into_iter().try_for_each(|panel| one(panel, &mut raw, &mut values))
        })
    }

    fn embedding(&mut self) -> Result<Embedding> {
        let (checkpoint, part) = (self.checkpoint, Part::Embedding);
        let ((rows, cols), dtype) = (checkpoint.shape(part), checkpoint.dtype(part));
        let row = cols * dtype.bytes();
        let mut bytes = Array::zeros(rows * row)?;
        let out = DisjointSlice::new(&mut bytes);
        let per = (SLICE_BYTES / 8 / row.max(1)).max(1);
        let one = |block: usize| -> Result<()> {
            let range = block * per..rows.min((block + 1) * per);
            // SAFETY: every block is one unit of one thread.
            let raw = unsafe { out.slice(range.start * row, range.len() * row) };
            checkpoint.read(part, range, raw)?;
            let special = |bits: u32, mask: u32| bits & mask == mask;
            let bad = match dtype {
                Dtype::Bf16 => raw.chunks_exact(2).any(|b| special(u16::from_le_bytes([b[0], b[1]]).into(), 0x7f80)),
                Dtype::F16 => raw.chunks_exact(2).any(|b| special(u16::from_le_bytes([b[0], b[1]]).into(), 0x7c00)),
                Dtype::F32 => {
                    raw.chunks_exact(4).any(|b| special(u32::from_le_bytes([b[0], b[1], b[2], b[3]]), 0x7f80_0000))
                }
            };
            if bad { Err(not_finite(checkpoint, part)) } else { Ok(()) }
        };
        let unit = per * row;
        self.slices(rows.div_ceil(per), 8, unit, rows * row, &|blocks| blocks.into_iter().try_for_each(one))?;
        Ok(Embedding { dtype, bytes })
    }

    /// Runs `work` over units 0..count, `per_thread` units per thread between two calls of the hooks.
    fn slices(
        &mut self,
        count: usize,
        per_thread: usize,
        unit_bytes: usize,
        bytes: usize,
        work: &(dyn Fn(Range<usize>) -> Result<()> + Sync),
    ) -> Result<()> {
        let before = self.done;
        for first in (0..count).step_by(per_thread * self.pool.threads()) {
            let units = (count - first).min(per_thread * self.pool.threads());
            on_threads(self.pool, units, &|mine| work(first + mine.start..first + mine.end))?;
            self.done = before + bytes.min((first + units) * unit_bytes);
            (self.hooks.loading)(self.done, self.total);
            (self.hooks.poll)()?;
        }
        self.done = before + bytes;
        Ok(())
    }
}

/// Runs `work` on a share of 0..count on each thread.
fn on_threads(pool: &Pool, count: usize, work: &(dyn Fn(Range<usize>) -> Result<()> + Sync)) -> Result<()> {
    let failure: Mutex<Option<Error>> = Mutex::new(None);
    let threads = pool.threads();
    pool.run(&|thread| {
        if let Err(error) = work(share(count, thread, threads)) {
            // Threads do not panic while they hold the lock.
            if let Ok(mut failure) = failure.lock() {
                failure.get_or_insert(error);
            }
        }
    })?;
    failure.lock().ok().and_then(|mut failure| failure.take()).map_or(Ok(()), Err)
}

fn not_finite(checkpoint: &Checkpoint, part: Part) -> Error {
    Error::not_finite(format!("tensor {} holds NaN or infinite weights", checkpoint.tensor_name(part)))
}
