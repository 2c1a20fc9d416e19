//! A checkpoint's weights on the device, and its draft weights.

use crate::args;
use crate::device::{Arg, Buffer, Device, Kernel, Launch, Pinned};
use crate::draft::DraftMatrix;
use crate::flags::FLAG_WEIGHTS;
use crate::hierarchy::{self, Hierarchies, Hierarchy};
use crate::linear::{Linear, Matrix, Quantised};
use quantspec_core::config::{DraftWeights, Dtype, LayerNorms, ModelConfig, QkNorm, Sensitive, TargetWeights};
use quantspec_core::{Error, Result};
use quantspec_model::backend::{Hooks, Options};
use quantspec_model::checkpoint::{Checkpoint, LayerPart, Part};
use std::ops::Range;
use std::sync::Arc;

/// Bytes of a chunk copied to the device: long enough for full PCIe speed, short enough to overlap with reading.
const CHUNK_BYTES: usize = 16 << 20;

/// Threads that read a chunk. One thread copies from the page cache at a quarter of PCIe speed.
const READERS: usize = 4;
/// Fewest bytes for which another thread pays.
const READ_MIN: usize = 1 << 20;

/// Reads rows of a matrix in their stored format with several threads.
fn read_rows(checkpoint: &Checkpoint, part: Part, rows: Range<usize>, out: &mut [u8]) -> Result<()> {
    let row_bytes = out.len() / rows.len().max(1);
    let each = rows.len().div_ceil(READERS.min(out.len() / READ_MIN).max(1)).max(1);
    let read = |index: usize, out: &mut [u8]| {
        let start = rows.start + index * each;
        checkpoint.read(part, start..(start + each).min(rows.end), out)
    };
    let mut pieces = out.chunks_mut((each * row_bytes).max(1)).enumerate();
    let Some((first, own)) = pieces.next() else { return Ok(()) };
    std::thread::scope(|scope| {
        let readers: Vec<_> = pieces
            .map(|(index, out)| std::thread::Builder::new().spawn_scoped(scope, move || read(index, out)))
            .collect();
        read(first, own)?;
        readers.into_iter().try_for_each(|reader| {
            let no_thread = |error| {
                let hint = "allow this user more threads (ulimit -u)";
                Error::device(format!("a thread that reads weights did not start: {error}"), hint)
            };
            reader.map_err(no_thread)?.join().unwrap_or_else(|_| Err(Error::internal("a reader panicked")))
        })
    })
}

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

    /// Address and bytes that a GEMM reads first.
    pub(crate) fn ahead(&self) -> (u64, usize) {
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
    /// Its four matrices, in the order of [`shapes`].
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

    /// Bytes of draft weights on the device.
    pub(crate) fn held_draft_bytes(&self) -> usize {
        self.drafts.as_ref().map_or(0, |drafts| drafts.bytes())
    }

    /// Queues recomputing all draft weights, after their memory was used for a prompt.
    pub(crate) fn quantise(&self, linear: &Linear, flag: &Buffer) -> Result<()> {
        for layer in &self.layers {
            let DraftLayer { qkv, output, gate_up, down } = &layer.draft;
            for (full, draft) in layer.matrices().into_iter().zip([qkv, output, gate_up, down]) {
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

/// Alignment of draft weights, in bytes.
const ALIGNED: usize = 256;

/// Allocates consecutive parts of the draft weights' memory.
struct DraftArena {
    buffer: Option<Arc<Buffer>>,
    taken: usize,
}

impl DraftArena {
    /// Allocates draft weights of a matrix in `bits` bits, and queues making them; None without bits.
    fn quantise(
        &mut self,
        linear: &Linear,
        full: &Matrix,
        bits: Option<usize>,
        paired: usize,
        flag: &Buffer,
    ) -> Result<Option<Quantised>> {
        let (Some(bits), Some(buffer)) = (bits, self.buffer.clone()) else { return Ok(None) };
        let draft = Quantised { buffer, offset: self.taken, bits, n: full.n, k: full.k, paired };
        self.taken += Quantised::bytes(bits, full.n, full.k).next_multiple_of(ALIGNED);
        linear.quantise_into(full, &draft, flag)?;
        Ok(Some(draft))
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

/// Returns true if the target's weights are in nibbles.
pub(crate) fn nibbles(options: &Options) -> bool {
    options.weights != TargetWeights::Checkpoint
}

/// Number format of the inputs of the head.
pub(crate) fn head_inputs(checkpoint: &Checkpoint, options: &Options) -> Dtype {
    if nibbles(options) { checkpoint.config().dtype } else { checkpoint.dtype(Part::Head) }
}

/// Bits in which a draft reads each of a layer's matrices, in the order of [`shapes`]; None if it reads the target's. With
/// weights in one plane at most four.
pub(crate) fn draft_bits(options: &Options) -> [Option<usize>; 4] {
    let (kept, Sensitive(sensitive)) = (options.draft_weights.kinds(), options.sensitive);
    let eight = options.weights != TargetWeights::Int4;
    std::array::from_fn(|kind| kept[kind].then_some(if eight && sensitive[kind] { 8 } else { 4 }))
}

/// (N, K) of a layer's matrices: QKV, output, gate and up, down.
fn shapes(config: &ModelConfig) -> [(usize, usize); 4] {
    let (hidden, inter, q, kv) = (config.hidden, config.intermediate, config.q_width(), config.kv_width());
    [(q + 2 * kv, hidden), (hidden, q), (2 * inter, hidden), (hidden, inter)]
}

/// First row with both planes of each of a layer's matrices in nibbles, in the order of [`shapes`]
/// ([`Part::has_both_planes`]). Keys and values follow the queries.
fn both_from(config: &ModelConfig, weights: TargetWeights) -> [usize; 4] {
    use LayerPart::*;
    let both = |part| Part::Layer(0, part).has_both_planes(weights);
    let mut first = shapes(config).map(|(n, _)| n);
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

/// Bytes of the memory that a long prompt may use, [`Weights::lent`].
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
    let matrices: usize = shapes(config).into_iter().zip(both_from(config, weights)).map(matrix).sum();
    let mut vectors = if config.norms == LayerNorms::Both { 4 } else { 2 } * hidden;
    vectors += if config.qkv_bias { q + 2 * kv } else { 0 };
    vectors += if config.output_bias { hidden } else { 0 };
    vectors += if config.mlp_bias { 2 * inter + hidden } else { 0 };
    vectors += match config.qk_norm {
        QkNorm::None => 0,
        QkNorm::Heads => 2 * config.head_dim,
        QkNorm::Projection => q + kv,
    };
    config.layers * (matrices + 4 * vectors) + 4 * hidden + head_bytes(checkpoint, weights)
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
        draft_bits(options).into_iter().zip(shapes(config)).map(|(bits, shape)| bytes(bits, shape)).sum();
    config.layers * layer + bytes(head_bits(options), (config.vocab, config.hidden))
}

/// Bits of a draft's separate head; None if it reads the target's.
fn head_bits(options: &Options) -> Option<usize> {
    (options.draft_weights == DraftWeights::Int4).then_some(8)
}

/// Loads weights through two page-locked chunks: one is read while the other is copied.
struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    device: &'a Arc<Device>,
    hooks: &'a mut Hooks,
    pinned: [Pinned; 2],
    chunks: [Buffer; 2],
    turn: usize,
    atoms: Kernel,
    rows: Kernel,
    done: usize,
    total: usize,
}

/// A part of a matrix: the rows it fills, and their order (`matrix_row` in kernels/quantize.cu).
struct Piece {
    part: Part,
    first: usize,
    interleave: usize,
}

impl<'a> Loader<'a> {
    fn new(checkpoint: &'a Checkpoint, device: &'a Arc<Device>, hooks: &'a mut Hooks) -> Result<Loader<'a>> {
        let parts = Part::all(checkpoint.config());
        let part_bytes = |part: &Part| if checkpoint.shape(*part).0 == 1 { 0 } else { checkpoint.bytes(*part) };
        let longest = parts.iter().map(|part| checkpoint.shape(*part).1).max().unwrap_or(0) * 4;
        let chunk = CHUNK_BYTES.max(longest);
        Ok(Loader {
            total: parts.iter().map(part_bytes).sum(),
            checkpoint,
            device,
            hooks,
            pinned: [device.pinned(chunk)?, device.pinned(chunk)?],
            chunks: [device.allocate(chunk)?, device.allocate(chunk)?],
            turn: 0,
            atoms: device.kernel("weights_atoms", 0)?,
            rows: device.kernel("weights_rows", 0)?,
            done: 0,
        })
    }

    fn vector(&mut self, parts: &[Part]) -> Result<Buffer> {
        let mut values = Vec::new();
        for &part in parts {
            let start = values.len();
            values.resize(start + self.checkpoint.shape(part).1, 0.0f32);
            self.checkpoint.read_f32(part, 0..1, &mut values[start..])?;
        }
        self.device.copied(&values)
    }

    /// Gate and up biases in the order of the interleaved rows.
    fn interleaved(&mut self, gate: Part, up: Part) -> Result<Buffer> {
        let width = self.checkpoint.shape(gate).1;
        let (mut first, mut second) = (vec![0.0f32; width], vec![0.0f32; width]);
        self.checkpoint.read_f32(gate, 0..1, &mut first)?;
        self.checkpoint.read_f32(up, 0..1, &mut second)?;
        let values: Vec<f32> = first.chunks(8).zip(second.chunks(8)).flat_map(|(a, b)| [a, b].concat()).collect();
        self.device.copied(&values)
    }

    fn matrix(&mut self, pieces: &[Piece]) -> Result<Matrix> {
        let Some(first) = pieces.first() else { return Err(Error::internal("a matrix without tensors")) };
        let (dtype, k) = (self.checkpoint.dtype(first.part), self.checkpoint.shape(first.part).1);
        let n = pieces.iter().map(|piece| self.checkpoint.shape(piece.part).0).sum();
        let buffer = self.device.zeroed(Matrix::bytes(dtype, n, k))?;
        let row_bytes = k * dtype.bytes();
        let rows_at_once = (CHUNK_BYTES / row_bytes).max(1);
        for piece in pieces {
            let rows = self.checkpoint.shape(piece.part).0;
            for start in (0..rows).step_by(rows_at_once) {
                let count = rows_at_once.min(rows - start);
                let bytes = count * row_bytes;
                let turn = self.turn;
                self.turn = 1 - turn;
                // This page-locked buffer's copy is complete: the wait below, of the previous chunk, came after it.
                read_rows(self.checkpoint, piece.part, start..start + count, &mut self.pinned[turn].bytes()[..bytes])?;
                self.device.synchronize()?;
                // SAFETY: the buffer is rewritten only after the wait of the next chunk has seen this copy complete.
                unsafe { self.chunks[turn].write_pinned(0, &self.pinned[turn], 0, bytes)? };
                let arguments = args![&self.chunks[turn], &buffer, piece.first + start, count, k, piece.interleave];
                let (kernel, elements) = match dtype {
                    Dtype::F32 => (self.rows, count * k),
                    Dtype::Bf16 | Dtype::F16 => (self.atoms, count * k.div_ceil(8)),
                };
                let launch =
                    Launch { grid: [elements.div_ceil(256) as u32, 1, 1], block: 256, shared: 0, overlap: false };
                // SAFETY: the argument list is the kernel's; the chunk holds `count` rows and the matrix has room for all rows.
                unsafe { self.device.launch(kernel, launch, &arguments)? };
                self.done += bytes;
                (self.hooks.loading)(self.done, self.total);
                (self.hooks.poll)()?;
            }
        }
        Ok(Matrix { buffer, dtype, n, k })
    }

    fn plain(&mut self, part: Part) -> Result<Matrix> {
        self.matrix(&[Piece { part, first: 0, interleave: 0 }])
    }

    /// A layer's matrices, in the order of [`shapes`].
    fn matrices(&mut self, index: usize) -> Result<[Matrix; 4]> {
        use LayerPart::*;
        let piece = |part, first, interleave| Piece { part: Part::Layer(index, part), first, interleave };
        let (q, kv) = (self.checkpoint.config().q_width(), self.checkpoint.config().kv_width());
        Ok([
            self.matrix(&[piece(Q, 0, 0), piece(K, q, 0), piece(V, q + kv, 0)])?,
            self.matrix(&[piece(Output, 0, 0)])?,
            self.matrix(&[piece(Gate, 0, 1), piece(Up, 0, 2)])?,
            self.matrix(&[piece(Down, 0, 0)])?,
        ])
    }

    fn layer(&mut self, index: usize, maker: &mut Maker) -> Result<Layer> {
        use LayerPart::*;
        let config = self.checkpoint.config();
        let matrices = self.matrices(index)?;
        let draft = maker.draft_layer(&matrices, config.head_dim)?;
        let [qkv, output, gate_up, down] = maker.full_layer(matrices, config)?;
        check_flag(maker.flag, || format!("layer {index}"))?;
        let part = |part| Part::Layer(index, part);
        let mut norm = |kind: LayerPart| kind.exists(config).then(|| self.vector(&[part(kind)])).transpose();
        let (attention_norm, attention_output_norm) = (norm(AttentionNorm)?, norm(AttentionOutputNorm)?);
        let (mlp_norm, mlp_output_norm) = (norm(MlpNorm)?, norm(MlpOutputNorm)?);
        let qk_norms = norm(QNorm)?.zip(norm(KNorm)?);
        let mut bias = |there: bool, kinds: &[LayerPart]| {
            let parts: Vec<Part> = kinds.iter().map(|&kind| part(kind)).collect();
            there.then(|| self.vector(&parts)).transpose()
        };
        let qkv_bias = bias(config.qkv_bias, &[QBias, KBias, VBias])?;
        let output_bias = bias(config.output_bias, &[OutputBias])?;
        let down_bias = bias(config.mlp_bias, &[DownBias])?;
        let gate_up_bias = config.mlp_bias.then(|| self.interleaved(part(GateBias), part(UpBias))).transpose()?;
        Ok(Layer {
            attention_norm,
            attention_output_norm,
            qkv,
            qkv_bias,
            qk_norms,
            output,
            output_bias,
            mlp_norm,
            mlp_output_norm,
            gate_up,
            gate_up_bias,
            down,
            down_bias,
            draft,
        })
    }

    fn embedding(&mut self) -> Result<Embedding> {
        let Matrix { buffer, dtype, .. } = self.plain(Part::Embedding)?;
        let mut table = self.device.pinned(buffer.bytes())?;
        buffer.read_pinned(0, &mut table, buffer.bytes())?;
        Ok(Embedding { table, dtype })
    }
}

/// Makes the weights that passes read from matrices in the checkpoint's format.
struct Maker<'a> {
    linear: &'a Linear,
    /// None: the target reads the matrices as they are.
    hierarchies: Option<&'a Hierarchies>,
    options: &'a Options,
    /// The device's error flag.
    flag: &'a Buffer,
    drafts: DraftArena,
}

impl Maker<'_> {
    /// A matrix as the target reads it; in nibbles with both planes from row `both_from` on.
    fn full(&self, matrix: Matrix, both_from: usize, paired: usize) -> Result<Full> {
        match self.hierarchies {
            Some(hierarchies) => hierarchies.quantise(&matrix, both_from, paired, self.flag).map(Full::Nibbles),
            None => Ok(Full::Whole(matrix)),
        }
    }

    /// [`Maker::full`] of a layer's matrices, in the order of [`shapes`].
    fn full_layer(&self, [qkv, output, gate_up, down]: [Matrix; 4], config: &ModelConfig) -> Result<[Full; 4]> {
        let [of_qkv, of_output, of_gate_up, of_down] = both_from(config, self.options.weights);
        Ok([
            self.full(qkv, of_qkv, config.head_dim)?,
            self.full(output, of_output, 0)?,
            self.full(gate_up, of_gate_up, 0)?,
            self.full(down, of_down, 0)?,
        ])
    }

    /// Separate draft weights of a matrix; None without bits.
    fn draft(&mut self, matrix: &Matrix, bits: Option<usize>, paired: usize) -> Result<Option<Quantised>> {
        self.drafts.quantise(self.linear, matrix, bits, paired, self.flag)
    }

    /// [`Maker::draft`] of a layer's matrices, in the order of [`shapes`]. None has any if the target is in nibbles.
    fn draft_layer(&mut self, [qkv, output, gate_up, down]: &[Matrix; 4], head_dim: usize) -> Result<DraftLayer> {
        let bits = if self.hierarchies.is_some() { [None; 4] } else { draft_bits(self.options) };
        Ok(DraftLayer {
            qkv: self.draft(qkv, bits[0], head_dim)?,
            output: self.draft(output, bits[1], 0)?,
            gate_up: self.draft(gate_up, bits[2], 0)?,
            down: self.draft(down, bits[3], 0)?,
        })
    }
}

/// Waits for the draft weights made so far, and refuses non-finite weights.
fn check_flag(flag: &Buffer, what: impl Fn() -> String) -> Result<()> {
    match flag.read::<u32>(0, 1)?.first() {
        Some(&bits) if bits & FLAG_WEIGHTS != 0 => {
            let what = what();
            Err(Error::not_finite(format!(
                "a weight of {what} is NaN or infinite, or its group does not fit half precision"
            )))
        }
        _ => Ok(()),
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
        let offsets = shapes(config).map(|(n, k)| {
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

/// Loads a checkpoint onto the device and makes the draft weights; with `hierarchies` in nibbles, as `options` say. `flag` is
/// the device's error flag.
pub(crate) fn load(
    checkpoint: &Checkpoint,
    device: &Arc<Device>,
    linear: &Linear,
    hierarchies: Option<&Hierarchies>,
    options: &Options,
    flag: &Buffer,
    hooks: &mut Hooks,
) -> Result<Weights> {
    let config = checkpoint.config();
    let mut loader = Loader::new(checkpoint, device, hooks)?;
    let draft_bytes = draft_bytes(config, options);
    let buffer = if draft_bytes > 0 { Some(Arc::new(device.allocate(draft_bytes)?)) } else { None };
    let mut maker = Maker { linear, hierarchies, options, flag, drafts: DraftArena { buffer, taken: 0 } };
    // Tables first: the largest matrix needs its full size on the device until it is in nibbles or in host memory.
    let (embedding, head) = match config.tied_embeddings {
        true => (None, Part::Embedding),
        false => (Some(loader.embedding()?), Part::Head),
    };
    let head = maker.full(loader.plain(head)?, 0, 0)?;
    let draft_head = match &head {
        Full::Whole(head) => maker.draft(head, head_bits(options), 0)?,
        Full::Nibbles(_) => None,
    };
    check_flag(flag, || "the head".to_owned())?;
    let layers = (0..config.layers).map(|index| loader.layer(index, &mut maker)).collect::<Result<_>>()?;
    let final_norm = loader.vector(&[Part::FinalNorm])?;
    Ok(Weights { embedding, layers, final_norm, head, head_copy: None, draft_head, drafts: maker.drafts.buffer })
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
