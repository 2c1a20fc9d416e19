//! A checkpoint on disk, safetensors or GGUF: its configuration, and a checked index of its tensors over all shards.
//!
//! Names, shapes, types, offsets and file lengths are checked when the checkpoint is opened, so a backend only reads. The
//! checkpoint holds no weights: a backend reads a few rows at a time and stores them in its own layout.
//!
//! This file has the reading; `files.rs` has the files of a directory, `tensors.rs` the index of their tensors.

mod files;
mod tensors;

use crate::blocks::Encoding;
use crate::config;
use crate::draft_cache::DraftCache;
use crate::elements::{convert, round};
use crate::gguf::Gguf;
use crate::gguf_config::{self, Packed, RowOrder};
use crate::names;
pub use crate::part::{LayerPart, Part};
use crate::quantised::{self, Quantised, Scheme};
use crate::rope::stored_channel;
use crate::safetensors::SafeTensors;
use crate::shards::Shards;
use files::{open_shards, read_json};
use quantspec_core::config::{Dtype, ModelConfig, Rope};
use quantspec_core::{Error, Result};
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use tensors::{embedding_of, locate, refuse_foreign};

/// Location of a part's bytes in safetensors files.
#[derive(Clone, Copy, Debug)]
struct TensorLocation {
    shard: usize,
    offset: u64,
    dtype: Dtype,
}

/// An open checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    config: ModelConfig,
    weights: Weights,
    draft_cache: Option<DraftCache>,
}

/// Open files, and the location of each part.
#[derive(Debug)]
enum Weights {
    SafeTensors { shards: Shards, locations: HashMap<Part, TensorLocation>, quantised: Quantised },
    Gguf { gguf: Gguf, locations: HashMap<Part, Packed> },
    StandIn,
}

/// Bytes that [`Checkpoint::read_f32`] converts at a time; input and result fit in a core's L2 cache.
const PIECE_BYTES: usize = 64 << 10;

impl Checkpoint {
    /// Opens a GGUF file (for a split model its first part), or a directory. A directory has config.json, optionally
    /// generation_config.json and a description of the quantisation, and model.safetensors or the shards named by
    /// model.safetensors.index.json.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Model`] if a file is missing or damaged, if [`config::parse`] refuses the configuration,
    /// or if a tensor is missing, unknown, or of the wrong shape or type. [`quantspec_core::ErrorKind::Io`] if a file cannot
    /// be read.
    pub fn open(path: &Path) -> Result<Checkpoint> {
        if path.is_file() {
            let gguf = Gguf::open(path)?;
            let (config, locations) = gguf_config::read(&gguf)?;
            return Ok(Checkpoint { config, weights: Weights::Gguf { gguf, locations }, draft_cache: None });
        }
        let (config, schemes, wrapped) = configuration(path)?;
        let shards = names::rename(&config, wrapped, open_shards(path)?)?;
        Checkpoint::new(config, &schemes, shards)
    }

    /// A checkpoint from config.json or a GGUF header alone, for plans. Its sizes are those of [`Checkpoint::open`] if the
    /// weights match the configuration. The weights of a directory may be absent; reading one is an internal error.
    ///
    /// # Errors
    /// As [`Checkpoint::open`], without those of safetensors files.
    pub fn describe(path: &Path) -> Result<Checkpoint> {
        if path.is_file() {
            return Checkpoint::open(path);
        }
        let (config, ..) = configuration(path)?;
        let location = TensorLocation { shard: 0, offset: 0, dtype: config.dtype };
        let tied = config.tied_embeddings.then_some(Part::Head);
        let locations = Part::all(&config).into_iter().chain(tied).map(|part| (part, location)).collect();
        let weights =
            Weights::SafeTensors { shards: Shards::none(), locations, quantised: Quantised::new(config.dtype) };
        Ok(Checkpoint { config, weights, draft_cache: None })
    }

    /// Made-up weights for a model of this shape, in its number format: for timing its kernels, which take the same time for all
    /// weights.
    pub fn stand_in(config: ModelConfig) -> Checkpoint {
        Checkpoint { config, weights: Weights::StandIn, draft_cache: None }
    }

    /// A checkpoint from memory: config.json and one safetensors file.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Model`], as for [`Checkpoint::open`].
    pub fn from_bytes(config: &[u8], safetensors: &'static [u8]) -> Result<Checkpoint> {
        let schemes = quantised::schemes(config, |_| Ok(None))?;
        let wrapped = config::is_wrapped(config)?;
        let config = config::parse(config, None)?;
        let shards = Shards::of(SafeTensors::from_static("embedded model", safetensors)?);
        let shards = names::rename(&config, wrapped, shards)?;
        Checkpoint::new(config, &schemes, shards)
    }

    fn new(mut config: ModelConfig, schemes: &[Scheme], shards: Shards) -> Result<Checkpoint> {
        refuse_foreign(&config, schemes, &shards)?;
        let table = embedding_of(&mut config, &shards)?;
        let mut locations = HashMap::new();
        let mut quantised = Quantised::new(config.dtype);
        for part in Part::all(&config) {
            if !part.is_vector() && part != Part::Embedding {
                let (weight, columns) = (part.name(&config), part.shape(&config).1);
                let mut found = false;
                for place in names::places(&config, part) {
                    found = found || quantised.add(schemes, &weight, (&place, columns), &shards)?;
                }
                if found {
                    continue;
                }
            }
            let location = if part == Part::Embedding { table } else { locate(&config, &shards, part)? };
            locations.insert(part, location);
        }
        if config.tied_embeddings {
            locations.insert(Part::Head, table);
        }
        if let Some(location) = locations.get(&Part::Layer(0, LayerPart::Q)) {
            config.dtype = location.dtype;
        }
        config::round_embedding_factor(&mut config, table.dtype);
        Ok(Checkpoint { config, weights: Weights::SafeTensors { shards, locations, quantised }, draft_cache: None })
    }

    /// The model's shape. Its dtype is that of the first layer's query projection. Its head is tied if configuration and
    /// weights agree.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Keeps draft weights of this checkpoint on disk, if the backend makes them on the CPU.
    pub fn cache_drafts(&mut self, cache: DraftCache) {
        self.draft_cache = Some(cache);
    }

    /// Cache of this checkpoint's draft weights; None if they are made at every load.
    pub fn draft_cache(&self) -> Option<&DraftCache> {
        self.draft_cache.as_ref()
    }

    /// Number format in which a part is read; that of the model if the part does not exist.
    pub fn dtype(&self, part: Part) -> Dtype {
        let own = match &self.weights {
            Weights::SafeTensors { locations, quantised, .. } => locations
                .get(&part)
                .map(|location| location.dtype)
                .or_else(|| quantised.dtype(&part.name(&self.config))),
            Weights::Gguf { locations, .. } => locations.get(&part).map(|location| location.dtype),
            Weights::StandIn => None,
        };
        own.unwrap_or(self.config.dtype)
    }

    /// Whether the file has quantised matrices, which are dequantised when they are read. False if only the configuration
    /// was opened.
    pub fn is_quantised(&self) -> bool {
        match &self.weights {
            Weights::SafeTensors { quantised, .. } => !quantised.is_empty(),
            Weights::Gguf { locations, .. } => locations.values().any(|location| location.encoding.block().0 > 1),
            Weights::StandIn => false,
        }
    }

    /// Whether the file has codes of this matrix, so that [`Checkpoint::read_stored`] and [`Checkpoint::read_f32`] can differ.
    pub fn has_codes(&self, part: Part) -> bool {
        match &self.weights {
            Weights::SafeTensors { locations, .. } => !locations.contains_key(&part) && self.has(part),
            Weights::Gguf { .. } => self.encoding(part).is_some_and(|encoding| encoding.block().0 > 1),
            Weights::StandIn => false,
        }
    }

    /// The type of a GGUF file's matrix.
    pub fn encoding(&self, part: Part) -> Option<Encoding> {
        match &self.weights {
            Weights::Gguf { locations, .. } if !part.is_vector() => {
                locations.get(&part).map(|location| location.encoding)
            }
            _ => None,
        }
    }

    /// (rows, columns) of a part; a vector is one row.
    pub fn shape(&self, part: Part) -> (usize, usize) {
        part.shape(&self.config)
    }

    /// Bytes of a part in its read format.
    pub fn bytes(&self, part: Part) -> usize {
        let (rows, columns) = self.shape(part);
        rows * columns * self.dtype(part).bytes()
    }

    /// Returns true if the checkpoint has the part. Biases and norms are optional; a tied head counts.
    pub fn has(&self, part: Part) -> bool {
        match &self.weights {
            Weights::SafeTensors { locations, quantised, .. } => {
                locations.contains_key(&part) || quantised.dtype(&part.name(&self.config)).is_some()
            }
            Weights::Gguf { locations, .. } => locations.contains_key(&part),
            Weights::StandIn => match part {
                Part::Layer(layer, part) => layer < self.config.layers && part.exists(&self.config),
                Part::Embedding | Part::FinalNorm | Part::Head => true,
            },
        }
    }

    /// The tensor's name, for messages.
    pub fn tensor_name(&self, part: Part) -> String {
        let part = if part == Part::Head && self.config.tied_embeddings { Part::Embedding } else { part };
        match self.weights {
            Weights::SafeTensors { .. } | Weights::StandIn => part.name(&self.config),
            Weights::Gguf { .. } => gguf_config::tensor_name(&self.config.family, part),
        }
    }

    /// Reads the little-endian bytes of some rows, `[rows][columns]` in the number format of [`Checkpoint::dtype`]. Values of
    /// a quantised tensor are rounded to that format.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] if the part or the rows do not exist or `out` has another length,
    /// [`quantspec_core::ErrorKind::Io`] if the file cannot be read.
    pub fn read(&self, part: Part, rows: Range<usize>, out: &mut [u8]) -> Result<()> {
        self.read_in(self.dtype(part), part, rows, out)
    }

    /// [`Checkpoint::read`] in a number format: that of [`Checkpoint::dtype`], or F32 of a GGUF file's matrix.
    fn read_in(&self, dtype: Dtype, part: Part, rows: Range<usize>, out: &mut [u8]) -> Result<()> {
        let width = self.shape(part).1;
        let row_bytes = width * dtype.bytes();
        self.check_room(part, &rows, row_bytes, out.len())?;
        match &self.weights {
            Weights::SafeTensors { shards, locations, quantised } => {
                self.by_stored_rows(part, rows, row_bytes, out, |rows, out| match locations.get(&part) {
                    None => quantised.read(shards, &part.name(&self.config), rows, out),
                    Some(&location) => {
                        let offset = location.offset + rows.start as u64 * row_bytes as u64;
                        shards.read(location.shard, offset, out)
                    }
                })
            }
            Weights::Gguf { gguf, locations } if part.is_vector() => read_vector(gguf, &locations[&part], width, out),
            Weights::Gguf { gguf, locations } => {
                read_rows(gguf, &Packed { dtype, ..locations[&part] }, rows, width, out)
            }
            Weights::StandIn => {
                made_up(dtype, rows.start * width, width, out);
                Ok(())
            }
        }
    }

    /// Refuses rows that do not exist, and a destination of `len` elements that is not theirs, at `row` elements each.
    fn check_room(&self, part: Part, rows: &Range<usize>, row: usize, len: usize) -> Result<()> {
        if !self.has(part) || rows.start > rows.end || rows.end > self.shape(part).0 {
            return Err(Error::internal(format!("this model has no rows {rows:?} of {}", self.tensor_name(part))));
        }
        if len != rows.len() * row {
            let (name, count) = (self.tensor_name(part), rows.len());
            return Err(Error::internal(format!("room for {len} elements of {count} rows of {row} of {name}")));
        }
        Ok(())
    }

    /// Calls `read` with ranges of consecutive rows in the file, and the part of `out` for each, at `row` elements a row. Rows of
    /// Q and K are permuted if only some channels are rotated ([`crate::rope`]); families with such heads have no biases or norms
    /// of queries and keys.
    fn by_stored_rows<T>(
        &self,
        part: Part,
        rows: Range<usize>,
        row: usize,
        out: &mut [T],
        mut read: impl FnMut(Range<usize>, &mut [T]) -> Result<()>,
    ) -> Result<()> {
        let ModelConfig { head_dim, rope: Rope { dim, .. }, .. } = self.config;
        if dim == head_dim || !matches!(part, Part::Layer(_, LayerPart::Q | LayerPart::K)) {
            return read(rows, out);
        }
        let mut ranges: Vec<Range<usize>> = Vec::new();
        for at in rows {
            let stored = at / head_dim * head_dim + stored_channel(at % head_dim, head_dim, dim);
            match ranges.last_mut() {
                Some(last) if last.end == stored => last.end += 1,
                _ => ranges.push(stored..stored + 1),
            }
        }
        let mut rest = out;
        for rows in ranges {
            let (out, after) = rest.split_at_mut(rows.len() * row);
            rest = after;
            read(rows, out)?;
        }
        Ok(())
    }

    /// Reads some rows as f32, `[rows][columns]`; norm weights as they multiply, that of the final norm with the factor on the
    /// logits.
    ///
    /// # Errors
    /// As [`Checkpoint::read`], and [`quantspec_core::ErrorKind::NotFinite`] with the tensor and the element.
    pub fn read_f32(&self, part: Part, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        self.floats(self.dtype(part), part, rows, out)
    }

    /// [`Checkpoint::read_f32`], but quantised matrices as codes times scales, not rounded to the format of
    /// [`Checkpoint::dtype`].
    ///
    /// # Errors
    /// As [`Checkpoint::read_f32`].
    pub fn read_stored(&self, part: Part, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        if let Weights::SafeTensors { shards, locations, quantised } = &self.weights
            && !locations.contains_key(&part)
        {
            let width = self.shape(part).1;
            let first = rows.start * width;
            self.check_room(part, &rows, width, out.len())?;
            let read = |rows, out: &mut [f32]| quantised.read_stored(shards, &part.name(&self.config), rows, out);
            self.by_stored_rows(part, rows, width, out, read)?;
            return self.check_finite(part, first, out);
        }
        let dtype = if self.encoding(part).is_some() { Dtype::F32 } else { self.dtype(part) };
        self.floats(dtype, part, rows, out)
    }

    fn floats(&self, dtype: Dtype, part: Part, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        let width = self.shape(part).1;
        self.check_room(part, &rows, width, out.len())?;
        let row_bytes = width * dtype.bytes();
        let at_once = (PIECE_BYTES / row_bytes).max(1);
        let mut piece = vec![0; at_once.min(rows.len()) * row_bytes];
        for (index, out) in out.chunks_mut(at_once * width).enumerate() {
            let first = rows.start + index * at_once;
            let piece = &mut piece[..out.len() * dtype.bytes()];
            self.read_in(dtype, part, first..first + out.len() / width, piece)?;
            convert(dtype, piece, out);
            if self.config.norms_less_one && part.is_vector() {
                out.iter_mut().for_each(|x| *x += 1.0);
            }
            if part == Part::FinalNorm {
                out.iter_mut().for_each(|x| *x *= self.config.scales.logits);
            }
            self.check_finite(part, first * width, out)?;
        }
        Ok(())
    }

    /// Refuses values of a part that are not finite; they begin at element `first`.
    fn check_finite(&self, part: Part, first: usize, values: &[f32]) -> Result<()> {
        match values.iter().position(|x| !x.is_finite()) {
            None => Ok(()),
            Some(at) => Err(Error::not_finite(format!(
                "{} is {} at element {}",
                self.tensor_name(part),
                values[at],
                first + at
            ))),
        }
    }
}

/// Reads config.json and generation_config.json of a directory: the model, the schemes of its quantised matrices, and whether
/// it has a vision tower.
fn configuration(dir: &Path) -> Result<(ModelConfig, Vec<Scheme>, bool)> {
    if !dir.is_dir() {
        return Err(Error::model(
            format!("{} is neither a directory nor a GGUF file", dir.display()),
            "give a directory with config.json and model.safetensors, a GGUF file, or a hub id",
        ));
    }
    let Some(config) = read_json(dir, "config.json")? else {
        return Err(Error::model(
            format!("{} has no config.json", dir.display()),
            "give a directory with config.json and model.safetensors, as published on the hub",
        ));
    };
    let generation = read_json(dir, "generation_config.json")?;
    let schemes = quantised::schemes(&config, |file| read_json(dir, file))?;
    let wrapped = config::is_wrapped(&config)?;
    Ok((config::parse(&config, generation.as_deref())?, schemes, wrapped))
}

/// Writes numbers between −s and s for s = 1/√width, of elements from `first` on. Rows of a matrix differ.
fn made_up(dtype: Dtype, first: usize, width: usize, out: &mut [u8]) {
    let scale = 2.0 / (width as f32).sqrt();
    let value = |element: usize| {
        let hash = (element as u32).wrapping_mul(0x9E37_79B1);
        (((hash ^ hash >> 15).wrapping_mul(0x85EB_CA77) >> 8) as f32 / 16_777_216.0 - 0.5) * scale
    };
    let mut values = [0.0; 256];
    let bytes = dtype.bytes();
    for (piece, out) in out.chunks_mut(values.len() * bytes).enumerate() {
        let values = &mut values[..out.len() / bytes];
        let first = first + piece * 256;
        values.iter_mut().enumerate().for_each(|(i, x)| *x = value(first + i));
        round(dtype, values, out);
    }
}

/// Reads rows of a GGUF matrix in its read format.
fn read_rows(gguf: &Gguf, location: &Packed, rows: Range<usize>, width: usize, out: &mut [u8]) -> Result<()> {
    let (values, block_bytes) = location.encoding.block();
    let raw_row = width / values * block_bytes;
    // Consecutive rows are read in one call.
    let at_once = if location.order == RowOrder::Own { (PIECE_BYTES / raw_row).max(1) } else { 1 };
    let row_bytes = width * location.dtype.bytes();
    let mut raw = vec![0; at_once.min(rows.len()) * raw_row];
    let mut decoded = vec![0.0; width];
    for (index, out) in out.chunks_mut(at_once * row_bytes).enumerate() {
        let raw = &mut raw[..out.len() / row_bytes * raw_row];
        let first = location.row(rows.start + index * at_once);
        gguf.read(location.file, location.offset + first as u64 * raw_row as u64, raw)?;
        for (raw, out) in raw.chunks_exact(raw_row).zip(out.chunks_exact_mut(row_bytes)) {
            location.encoding.decode(raw, &mut decoded);
            round(location.dtype, &decoded, out);
        }
    }
    Ok(())
}

/// Reads a GGUF vector in its read format. A permutation of rows permutes the vector's elements.
fn read_vector(gguf: &Gguf, location: &Packed, width: usize, out: &mut [u8]) -> Result<()> {
    let (values, block_bytes) = location.encoding.block();
    let mut raw = vec![0; width / values * block_bytes];
    gguf.read(location.file, location.offset, &mut raw)?;
    let mut decoded = vec![0.0; width];
    location.encoding.decode(&raw, &mut decoded);
    let ordered: Vec<f32> = (0..width).map(|element| decoded[location.row(element)]).collect();
    round(location.dtype, &ordered, out);
    Ok(())
}
