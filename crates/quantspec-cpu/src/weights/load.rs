//! Reading a checkpoint into panels, and making or reading the draft's own weights.

use super::{
    DraftMatrix, Embedding, LINEARS, Layer, Linear, Model, QkvOffsets, Sizes, both_from, dtype_of, panels, to_f32,
};
use crate::dispatch::Simd;
use crate::hierarchy::{self, Planes, Read};
use crate::linear::{Matrix, Store, repack16, repack32};
use crate::memory::{Array, DisjointSlice};
use crate::panel::PANEL;
use crate::pool::{Pool, share};
use crate::w4::{self, Bits, Tiles};
use quantspec_core::config::{DraftWeights, Dtype, ModelConfig, Sensitive, TargetWeights};
use quantspec_core::{Error, Result};
use quantspec_model::backend::{Hooks, Options};
use quantspec_model::checkpoint::{Checkpoint, LayerPart, Part};
use quantspec_model::draft_cache::{self, DraftBlocks};
use quantspec_model::importance::{self, Channel, LayerImportance, MadeUpRows};
use std::ops::Range;
use std::sync::Mutex;

/// Bytes of a checkpoint that one thread reads between two calls of the hooks: a quarter of a second on a slow disk.
const SLICE_BYTES: usize = 8 << 20;

/// The draft weights of a checkpoint on disk, if they are kept there. A block is a panel, in the order of [`Loader::linear`].
fn drafts(checkpoint: &Checkpoint, options: &Options, sizes: &Sizes) -> Result<Option<DraftBlocks>> {
    let Some(cache) = checkpoint.draft_cache().filter(|_| options.weights == TargetWeights::Checkpoint) else {
        return Ok(None);
    };
    let kind = match options.draft_weights {
        DraftWeights::None => return Ok(None),
        DraftWeights::Int4 => "int4",
        DraftWeights::Int4Mlp => "int4-mlp",
    };
    // One file per choice, so that engines with different choices do not replace each other's.
    let kind = match options.sensitive {
        Sensitive::NONE => kind.to_owned(),
        sensitive => format!("{kind}-{}", sensitive.names().replace(',', "-")),
    };
    let layers = checkpoint.config().layers;
    let weighed = importance::fingerprint(checkpoint)?;
    let recipe = format!("{} {layers} {sizes:?} {weighed:032x}", w4::LAYOUT);
    let linears = std::iter::repeat_n(&sizes.layer, layers).flatten().chain([&sizes.head]);
    let panels = linears.filter_map(|(panels, k, bits)| Some((*panels, Tiles::panel_bytes(*k, (*bits)?))));
    let blocks = panels.flat_map(|(panels, bytes)| std::iter::repeat_n(bytes, panels));
    Ok(DraftBlocks::open(cache, &kind, &recipe, blocks))
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
        let sizes = Sizes::new(checkpoint.config(), options);
        let mut drafts = drafts(checkpoint, options, &sizes)?;
        let matrices: usize = matrices(checkpoint.config()).map(|part| checkpoint.bytes(part)).sum();
        let (model, total) = loop {
            let total = matrices + drafts.as_ref().map_or(0, DraftBlocks::unsaved_bytes);
            let (weights, of) = (options.weights, drafts.as_ref());
            let mut loader = Loader { checkpoint, weights, simd, pool, hooks, drafts: of, blocks: 0, done: 0, total };
            match loader.model(&sizes)? {
                Some(model) => break (model, total),
                None => drafts.iter_mut().for_each(DraftBlocks::make_all),
            }
        };
        if let Some(drafts) = drafts {
            let origin = drafts.save(model.draft_panels(), |saved| {
                (hooks.loading)(total.min(matrices + saved), total);
                (hooks.poll)()
            })?;
            (hooks.drafts)(origin);
        }
        Ok(model)
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
    /// Everything; None if draft weights were read from a file that is damaged or of other weights.
    fn model(&mut self, sizes: &Sizes) -> Result<Option<Model>> {
        let (checkpoint, pool) = (self.checkpoint, self.pool);
        let config = checkpoint.config();
        let parallel = |count: usize, work: &(dyn Fn(Range<usize>) -> Result<()> + Sync)| on_threads(pool, count, work);
        let product = |part: Part, x: &[Channel]| importance::product(checkpoint, &parallel, part, x);
        let sound = |loader: &Loader| loader.drafts.is_none_or(DraftBlocks::is_sound);
        let drafts_are_made = !self.drafts.is_some_and(DraftBlocks::is_found)
            && sizes.layer.iter().any(|(_, _, bits)| *bits == Some(Bits::Four));
        let searches = self.weights != TargetWeights::Checkpoint || drafts_are_made;
        let mut rows = searches.then(|| MadeUpRows::new(checkpoint)).transpose()?;
        let mut layers = Vec::with_capacity(config.layers);
        for index in 0..config.layers {
            // Directly before the layer is loaded, so that its matrices are read from a disk once.
            let importance = rows.as_mut().map(|rows| rows.next_layer(&product)).transpose()?.unwrap_or_default();
            (self.hooks.poll)()?;
            layers.push(self.layer(index, sizes, &importance)?);
            if !sound(self) {
                return Ok(None);
            }
        }
        let source = Source { part: Part::Head, bias: None, first: 0, step: 1 };
        let head = self.linear(sizes.head, &[source], &[])?;
        if !sound(self) {
            return Ok(None);
        }
        let embedding = if config.tied_embeddings { None } else { Some(self.embedding()?) };
        let final_norm = self.vector(Part::FinalNorm)?;
        Ok(Some(Model { embedding, embedding_scale: config.scales.embedding, layers, final_norm, head }))
    }

    fn vector(&self, part: Part) -> Result<Vec<f32>> {
        let mut out = vec![0.0; self.checkpoint.shape(part).1];
        self.checkpoint.read_f32(part, 0..1, &mut out)?;
        Ok(out)
    }

    fn layer(&mut self, index: usize, sizes: &Sizes, importance: &LayerImportance) -> Result<Layer> {
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
        let qkv = self.linear(of_qkv, &qkv, importance.of(LayerPart::Q))?;
        let output = self.linear(of_output, &output, importance.of(LayerPart::Output))?;
        let gate_up = self.linear(of_gate_up, &gate_up, importance.of(LayerPart::Gate))?;
        let down = self.linear(of_down, &down, importance.of(LayerPart::Down))?;
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

    /// A linear layer of this size (panels, inputs, draft bits). `importance` of its inputs, or none ([`hierarchy::encode`],
    /// [`w4::encode`]).
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
        let (checkpoint, k) = (self.checkpoint, full.k);
        let (rows, _) = checkpoint.shape(source.part);
        let filling = Filling {
            checkpoint,
            simd: self.simd,
            source: *source,
            rows,
            k,
            dtype,
            importance,
            full: match &mut full.store {
                Store::Bf16(array) => FullPanels::Bits16(DisjointSlice::new(array), 0x7f80),
                Store::F16(array) => FullPanels::Bits16(DisjointSlice::new(array), 0x7c00),
                Store::F32(array) => FullPanels::F32(DisjointSlice::new(array)),
                Store::Planes(Planes { upper, lower, both_from, .. }) => {
                    FullPanels::Planes(DisjointSlice::new(upper), DisjointSlice::new(lower), *both_from)
                }
            },
            tiles: draft.map(|tiles| (tiles.bits, DisjointSlice::new(&mut tiles.data))),
            drafts: self.drafts.map(|drafts| (drafts, self.blocks)),
        };
        let per_thread = (SLICE_BYTES / (PANEL * k * dtype.bytes()).max(1)).max(1);
        let unit_bytes = PANEL * k * checkpoint.dtype(source.part).bytes();
        self.slices(panels(rows), per_thread, unit_bytes, checkpoint.bytes(source.part), &|mut panels| {
            let (mut raw, mut values) = (Vec::new(), Vec::new());
            // SAFETY: every panel is one unit of one thread.
            panels.try_for_each(|panel| unsafe { filling.panel(panel, &mut raw, &mut values) })
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

/// The panels of a matrix, written by several threads.
enum FullPanels<'a> {
    /// BF16 or F16, with the exponent bits of its NaN and infinity.
    Bits16(DisjointSlice<'a, u16>, u16),
    F32(DisjointSlice<'a, f32>),
    /// Upper and lower plane, and the first panel with both.
    Planes(DisjointSlice<'a, u8>, DisjointSlice<'a, u8>, usize),
}

/// A tensor that is being read into the panels of its matrix.
struct Filling<'a> {
    checkpoint: &'a Checkpoint,
    simd: Simd,
    source: Source,
    /// Outputs of the tensor; inputs.
    rows: usize,
    k: usize,
    /// Represents all tensors of the matrix exactly.
    dtype: Dtype,
    /// Of the inputs, or none.
    importance: &'a [f32],
    full: FullPanels<'a>,
    /// The draft's own weights.
    tiles: Option<(Bits, DisjointSlice<'a, u8>)>,
    /// Those on disk, and the matrix's first block there.
    drafts: Option<(&'a DraftBlocks, usize)>,
}

impl Filling<'_> {
    /// Reads a panel of the tensor and stores it, and its draft weights. `raw` and `values`: memory to reuse.
    ///
    /// # Safety
    /// No other thread fills the same panel.
    unsafe fn panel(&self, panel: usize, raw: &mut Vec<u8>, values: &mut Vec<f32>) -> Result<()> {
        let rows = panel * PANEL..self.rows.min((panel + 1) * PANEL);
        let index = self.source.first + panel * self.source.step;
        let numbers = rows.len() * self.k;
        // SAFETY: panels of a matrix have different indices; that of this function.
        unsafe {
            self.store(rows, index, raw, values)?;
            self.draft(numbers, index, raw, values)
        }
    }

    /// Reads rows into panel `index` of the matrix. Leaves their numbers in `raw` if the matrix has 16 bits, else in `values`.
    ///
    /// # Safety
    /// No other thread writes this panel.
    unsafe fn store(&self, rows: Range<usize>, index: usize, raw: &mut Vec<u8>, values: &mut Vec<f32>) -> Result<()> {
        let (checkpoint, part, k) = (self.checkpoint, self.source.part, self.k);
        let (len, numbers) = (Matrix::panel_len(k), rows.len() * k);
        match &self.full {
            FullPanels::Bits16(panels, special) => {
                raw.resize(2 * numbers, 0);
                checkpoint.read(part, rows, raw)?;
                // SAFETY: that of this function.
                let panel = unsafe { panels.slice(index * len, len) };
                if !repack16(raw, k, self.dtype == Dtype::Bf16, *special, panel) {
                    return Err(not_finite(checkpoint, part));
                }
            }
            FullPanels::F32(panels) => {
                values.resize(numbers, 0.0);
                checkpoint.read_f32(part, rows, values)?;
                // SAFETY: that of this function.
                repack32(values, k, unsafe { panels.slice(index * len, len) });
            }
            FullPanels::Planes(upper, lower, both_from) => {
                values.resize(numbers, 0.0);
                checkpoint.read_stored(part, rows, values)?;
                let (u, l) = Planes::panel_bytes(k);
                // SAFETY: that of this function.
                let upper = unsafe { upper.slice(index * u, u) };
                let lower: &mut [u8] = match index.checked_sub(*both_from) {
                    // SAFETY: that of this function.
                    Some(index) => unsafe { lower.slice(index * l, l) },
                    None => &mut [],
                };
                let encoded = hierarchy::encode(self.simd, values, self.importance, k, upper, lower);
                encoded.map_err(|error| self.named(error))?;
            }
        }
        Ok(())
    }

    /// Reads panel `index` of the draft's own weights from disk, or makes it from what [`Filling::store`] has read.
    ///
    /// # Safety
    /// No other thread writes this panel.
    unsafe fn draft(&self, numbers: usize, index: usize, raw: &[u8], values: &mut Vec<f32>) -> Result<()> {
        let Some((bits, panels)) = &self.tiles else { return Ok(()) };
        let len = Tiles::panel_bytes(self.k, *bits);
        // SAFETY: that of this function.
        let panel = unsafe { panels.slice(index * len, len) };
        let in_raw = matches!(self.full, FullPanels::Bits16(..));
        if let Some((drafts, first_block)) = self.drafts {
            let bytes = if in_raw { raw } else { bytes_of_f32(values) };
            if drafts.read(first_block + index, draft_cache::source(self.dtype as u64, bytes), panel) {
                return Ok(());
            }
        }
        if in_raw {
            values.resize(numbers, 0.0);
            to_f32(self.dtype, raw, values);
        }
        w4::encode(self.simd, *bits, values, self.importance, self.k, panel).map_err(|error| self.named(error))
    }

    /// The error with the tensor's name.
    fn named(&self, error: Error) -> Error {
        let name = self.checkpoint.tensor_name(self.source.part);
        Error { message: format!("{name}: {}", error.message), ..error }
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
