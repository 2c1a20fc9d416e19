//! Reads weights from a checkpoint to the device, and makes the draft's.

use super::sizes::{ALIGNED, both_from, draft_bits, draft_bytes, head_bits, importance_bytes};
use super::{DraftLayer, Embedding, Full, Layer, Weights};
use crate::args;
use crate::device::{Buffer, Device, Kernel, Launch, Pinned};
use crate::flags::FLAG_WEIGHTS;
use crate::hierarchy::Hierarchies;
use crate::linear::{Linear, Matrix, Quantised, copied_importance};
use crate::products::Products;
use quantspec_core::config::{Dtype, ModelConfig};
use quantspec_core::{Error, Result};
use quantspec_model::backend::{Hooks, Options};
use quantspec_model::checkpoint::{Checkpoint, LayerPart, Part};
use quantspec_model::importance::{Channel, LayerImportance, MadeUpRows};
use std::ops::Range;
use std::sync::Arc;

/// Bytes of a staging buffer: long enough for full PCIe speed, short enough to overlap with reading.
const STAGING_BYTES: usize = 16 << 20;

/// Threads that fill a staging buffer. One thread copies from the page cache at a quarter of PCIe speed.
const READERS: usize = 4;
/// Fewest bytes for which another thread pays.
const READ_MIN: usize = 1 << 20;

/// Runs the first of several jobs on this thread and each of the others on one of its own.
fn on_threads(mut jobs: impl Iterator<Item = impl FnOnce() -> Result<()> + Send>) -> Result<()> {
    let Some(first) = jobs.next() else { return Ok(()) };
    std::thread::scope(|scope| {
        let others: Vec<_> = jobs.map(|job| std::thread::Builder::new().spawn_scoped(scope, job)).collect();
        first()?;
        others.into_iter().try_for_each(|other| {
            let no_thread = |error| {
                let hint = "allow this user more threads (ulimit -u)";
                Error::device(format!("a thread that loads weights did not start: {error}"), hint)
            };
            other.map_err(no_thread)?.join().unwrap_or_else(|_| Err(Error::internal("a loading thread panicked")))
        })
    })
}

/// Reads rows of a matrix with several threads, in the number format of [`Checkpoint::dtype`], or in F32 as codes times scales.
fn read_rows(checkpoint: &Checkpoint, part: Part, dtype: Dtype, rows: Range<usize>, out: &mut [u8]) -> Result<()> {
    let row_bytes = out.len() / rows.len().max(1);
    let each = rows.len().div_ceil(READERS.min(out.len() / READ_MIN).max(1)).max(1);
    on_threads(out.chunks_mut((each * row_bytes).max(1)).enumerate().map(|(index, out)| {
        let start = rows.start + index * each;
        let rows = start..(start + each).min(rows.end);
        move || {
            if dtype == checkpoint.dtype(part) {
                return checkpoint.read(part, rows, out);
            }
            // SAFETY: every bit pattern is an f32.
            let (before, floats, after) = unsafe { out.align_to_mut::<f32>() };
            if !(before.is_empty() && after.is_empty()) {
                return Err(Error::internal("rows of f32 are not aligned"));
            }
            checkpoint.read_stored(part, rows, floats)
        }
    }))
}

/// Allocates consecutive parts of the draft weights' memory.
struct DraftArena {
    buffer: Option<Arc<Buffer>>,
    taken: usize,
}

impl DraftArena {
    /// Allocates draft weights of a matrix in `bits` bits; None without bits.
    fn allocate(
        &mut self,
        full: &Matrix,
        bits: Option<usize>,
        importance: Option<Buffer>,
        paired: usize,
    ) -> Option<Quantised> {
        let (bits, buffer) = (bits?, self.buffer.clone()?);
        let draft = Quantised { buffer, offset: self.taken, bits, n: full.n, k: full.k, paired, importance };
        self.taken += Quantised::bytes(bits, full.n, full.k).next_multiple_of(ALIGNED);
        Some(draft)
    }
}

/// Loads weights through two page-locked staging buffers: one is filled while the other is copied.
struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    /// The target's matrices become nibbles.
    nibbles: bool,
    device: &'a Arc<Device>,
    hooks: &'a mut Hooks,
    pinned: [Pinned; 2],
    staged: [Buffer; 2],
    /// The pair to fill next.
    next: usize,
    atoms: Kernel,
    rows: Kernel,
    done: usize,
    total: usize,
}

/// A part of a matrix: the rows it fills, and their order (`matrix_row` in kernels/quantize_weights.cu).
struct Piece {
    part: Part,
    first: usize,
    interleave: usize,
}

impl<'a> Loader<'a> {
    fn new(
        checkpoint: &'a Checkpoint,
        nibbles: bool,
        device: &'a Arc<Device>,
        hooks: &'a mut Hooks,
    ) -> Result<Loader<'a>> {
        let parts = Part::all(checkpoint.config());
        let part_bytes = |part: &Part| if checkpoint.shape(*part).0 == 1 { 0 } else { checkpoint.bytes(*part) };
        let longest = parts.iter().map(|part| checkpoint.shape(*part).1).max().unwrap_or(0) * 4;
        let bytes = STAGING_BYTES.max(longest);
        Ok(Loader {
            total: parts.iter().map(part_bytes).sum(),
            checkpoint,
            nibbles,
            device,
            hooks,
            pinned: [device.pinned(bytes)?, device.pinned(bytes)?],
            staged: [device.allocate(bytes)?, device.allocate(bytes)?],
            next: 0,
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

    /// A matrix of a layer, in F32 if it becomes nibbles and the file has codes of it: codes times scales, not rounded.
    fn matrix(&mut self, pieces: &[Piece]) -> Result<Matrix> {
        let in_codes = self.nibbles && pieces.iter().any(|piece| self.checkpoint.has_codes(piece.part));
        self.matrix_in(in_codes.then_some(Dtype::F32), pieces)
    }

    /// A matrix in a number format, or in that of [`Checkpoint::dtype`].
    fn matrix_in(&mut self, dtype: Option<Dtype>, pieces: &[Piece]) -> Result<Matrix> {
        let Some(first) = pieces.first() else { return Err(Error::internal("a matrix without tensors")) };
        let (stored, k) = (self.checkpoint.dtype(first.part), self.checkpoint.shape(first.part).1);
        let dtype = dtype.unwrap_or(stored);
        let n = pieces.iter().map(|piece| self.checkpoint.shape(piece.part).0).sum();
        let buffer = self.device.zeroed(Matrix::bytes(dtype, n, k))?;
        let row_bytes = k * dtype.bytes();
        let rows_at_once = (STAGING_BYTES / row_bytes).max(1);
        for piece in pieces {
            let rows = self.checkpoint.shape(piece.part).0;
            for start in (0..rows).step_by(rows_at_once) {
                let count = rows_at_once.min(rows - start);
                let bytes = count * row_bytes;
                let pair = self.next;
                self.next = 1 - pair;
                // This page-locked buffer's copy is complete: the wait below, of the previous pair, came after it.
                let to = &mut self.pinned[pair].bytes()[..bytes];
                read_rows(self.checkpoint, piece.part, dtype, start..start + count, to)?;
                self.device.synchronize()?;
                // SAFETY: the buffer is rewritten only after the wait of the next pair has seen this copy complete.
                unsafe { self.staged[pair].write_pinned(0, &self.pinned[pair], 0, bytes)? };
                let arguments = args![&self.staged[pair], &buffer, piece.first + start, count, k, piece.interleave];
                let (kernel, elements) = match dtype {
                    Dtype::F32 => (self.rows, count * k),
                    Dtype::Bf16 | Dtype::F16 => (self.atoms, count * k.div_ceil(8)),
                };
                let launch =
                    Launch { grid: [elements.div_ceil(256) as u32, 1, 1], block: 256, shared: 0, overlap: false };
                // SAFETY: the argument list is the kernel's; the buffer holds `count` rows and the matrix has room for all rows.
                unsafe { self.device.launch(kernel, launch, &arguments)? };
                self.done += count * k * stored.bytes();
                (self.hooks.loading)(self.done, self.total);
                (self.hooks.poll)()?;
            }
        }
        Ok(Matrix { buffer, dtype, n, k })
    }

    /// A table in the number format of [`Checkpoint::dtype`]: in F32 a large one would need more memory than the loaded model.
    fn table(&mut self, part: Part) -> Result<Matrix> {
        self.matrix_in(None, &[Piece { part, first: 0, interleave: 0 }])
    }

    /// A layer's matrices, in the order of [`super::sizes::matrix_shapes`].
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

    fn layer(&mut self, index: usize, rows: Option<&mut MadeUpRows>, maker: &mut Maker) -> Result<Layer> {
        use LayerPart::*;
        let config = self.checkpoint.config();
        let matrices = self.matrices(index)?;
        let importance = rows.map(|rows| rows.next_layer(&|part, x| maker.product(&matrices, config, part, x)));
        let importance = importance.transpose()?.unwrap_or_default();
        let draft = maker.draft_layer(&matrices, &importance, config.head_dim)?;
        let [qkv, output, gate_up, down] = maker.full_layer(index, matrices, &importance, config)?;
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
        let Matrix { buffer, dtype, .. } = self.table(Part::Embedding)?;
        let mut table = self.device.pinned(buffer.bytes())?;
        buffer.read_pinned(0, &mut table, buffer.bytes())?;
        Ok(Embedding { table, dtype })
    }
}

/// Makes the weights that passes read from matrices in the checkpoint's format.
struct Maker<'a> {
    device: &'a Arc<Device>,
    linear: &'a Linear,
    /// None if nothing is quantised by importance.
    products: Option<Products>,
    /// None: the target reads the matrices as they are.
    hierarchies: Option<&'a Hierarchies>,
    options: &'a Options,
    /// The device's error flag.
    flag: &'a Buffer,
    drafts: DraftArena,
}

impl Maker<'_> {
    /// A matrix as the target reads it; in nibbles with both planes from row `both_from` on. `importance` of its inputs, or none.
    fn full(&self, matrix: Matrix, importance: &[f32], both_from: usize, paired: usize) -> Result<Full> {
        match self.hierarchies {
            Some(hierarchies) => {
                hierarchies.quantise(&matrix, importance, both_from, paired, self.flag).map(Full::Nibbles)
            }
            None => Ok(Full::Whole(matrix)),
        }
    }

    /// [`Maker::full`] of a layer's matrices, in the order of [`super::sizes::matrix_shapes`].
    fn full_layer(
        &self,
        index: usize,
        [qkv, output, gate_up, down]: [Matrix; 4],
        importance: &LayerImportance,
        config: &ModelConfig,
    ) -> Result<[Full; 4]> {
        use LayerPart::*;
        let [of_qkv, of_output, of_gate_up, of_down] = both_from(config, self.options.weights, index);
        Ok([
            self.full(qkv, importance.of(Q), of_qkv, config.head_dim)?,
            self.full(output, importance.of(Output), of_output, 0)?,
            self.full(gate_up, importance.of(Gate), of_gate_up, 0)?,
            self.full(down, importance.of(Down), of_down, 0)?,
        ])
    }

    /// [`quantspec_model::importance::Product`] of a layer's matrices, in the order of [`super::sizes::matrix_shapes`].
    fn product(&self, matrices: &[Matrix; 4], config: &ModelConfig, part: Part, x: &[Channel]) -> Result<Vec<Channel>> {
        use LayerPart::*;
        let (Some(products), Part::Layer(_, part)) = (&self.products, part) else {
            return Err(Error::internal(format!("a product with {part:?}")));
        };
        let [qkv, output, gate_up, down] = matrices;
        let (values, kv) = (config.q_width() + config.kv_width(), config.kv_width());
        // Gate and up are interleaved by eight rows.
        let interleaved = |x: Vec<Channel>, first: usize| -> Vec<Channel> {
            x.chunks(8).skip(first).step_by(2).flatten().copied().collect()
        };
        match part {
            V => products.run(qkv, values..values + kv, x),
            Output => products.run(output, 0..output.n, x),
            Gate => Ok(interleaved(products.run(gate_up, 0..gate_up.n, x)?, 0)),
            Up => Ok(interleaved(products.run(gate_up, 0..gate_up.n, x)?, 1)),
            Down => products.run(down, 0..down.n, x),
            _ => Err(Error::internal(format!("a product with {part:?}"))),
        }
    }

    /// Queues making separate draft weights of a matrix; None without bits. `importance` of its inputs, or none.
    fn draft(
        &mut self,
        matrix: &Matrix,
        bits: Option<usize>,
        importance: &[f32],
        paired: usize,
    ) -> Result<Option<Quantised>> {
        // 8-bit codes do not depend on it.
        let importance = if bits == Some(4) { importance } else { &[] };
        let importance = copied_importance(self.device, importance, matrix.k)?;
        let draft = self.drafts.allocate(matrix, bits, importance, paired);
        draft.iter().try_for_each(|draft| self.linear.quantise_into(matrix, draft, self.flag))?;
        Ok(draft)
    }

    /// [`Maker::draft`] of a layer's matrices, in the order of [`super::sizes::matrix_shapes`]. None has any if the target is in nibbles.
    fn draft_layer(
        &mut self,
        [qkv, output, gate_up, down]: &[Matrix; 4],
        importance: &LayerImportance,
        head_dim: usize,
    ) -> Result<DraftLayer> {
        use LayerPart::*;
        let bits = if self.hierarchies.is_some() { [None; 4] } else { draft_bits(self.options) };
        Ok(DraftLayer {
            qkv: self.draft(qkv, bits[0], importance.of(Q), head_dim)?,
            output: self.draft(output, bits[1], importance.of(Output), 0)?,
            gate_up: self.draft(gate_up, bits[2], importance.of(Gate), 0)?,
            down: self.draft(down, bits[3], importance.of(Down), 0)?,
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
    let mut loader = Loader::new(checkpoint, hierarchies.is_some(), device, hooks)?;
    let draft_bytes = draft_bytes(config, options);
    let buffer = if draft_bytes > 0 { Some(Arc::new(device.allocate(draft_bytes)?)) } else { None };
    let weighs = hierarchies.is_some() || importance_bytes(config, options) > 0;
    let products = weighs.then(|| Products::new(device)).transpose()?;
    let drafts = DraftArena { buffer, taken: 0 };
    let mut maker = Maker { device, linear, products, hierarchies, options, flag, drafts };
    // Tables first: the largest matrix needs its full size on the device until it is in nibbles or in host memory.
    let (embedding, head) = match config.tied_embeddings {
        true => (None, Part::Embedding),
        false => (Some(loader.embedding()?), Part::Head),
    };
    let head = maker.full(loader.table(head)?, &[], 0, 0)?;
    let draft_head = match &head {
        Full::Whole(head) => maker.draft(head, head_bits(options), &[], 0)?,
        Full::Nibbles(_) => None,
    };
    check_flag(flag, || "the head".to_owned())?;
    let mut rows = weighs.then(|| MadeUpRows::new(checkpoint)).transpose()?;
    let layers =
        (0..config.layers).map(|index| loader.layer(index, rows.as_mut(), &mut maker)).collect::<Result<_>>()?;
    let final_norm = loader.vector(&[Part::FinalNorm])?;
    Ok(Weights { embedding, layers, final_norm, head, head_copy: None, draft_head, drafts: maker.drafts.buffer })
}
