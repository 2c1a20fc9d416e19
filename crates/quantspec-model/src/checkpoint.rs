//! A checkpoint on disk, safetensors or GGUF: its configuration, and a checked index of its tensors over all shards.
//!
//! Names, shapes, types, offsets and file lengths are checked when the checkpoint is opened, so a backend only reads. The
//! checkpoint holds no weights: a backend reads a few rows at a time and stores them in its own layout.

use crate::blocks::Encoding;
use crate::config;
use crate::draft_cache::DraftCache;
use crate::elements::{convert, round};
use crate::gguf::Gguf;
use crate::gguf_config::{self, Packed, RowOrder};
use crate::names;
use crate::part;
pub use crate::part::{LayerPart, Part};
use crate::quantised::{self, Quantised, Scheme};
use crate::rope::stored_channel;
use crate::safetensors::{SafeTensors, shown};
use quantspec_core::config::{Dtype, ModelConfig, Rope};
use quantspec_core::{Error, ErrorKind, Result};
use serde_json::Value;
use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

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
    SafeTensors { shards: Vec<SafeTensors>, locations: HashMap<Part, TensorLocation>, quantised: Quantised },
    Gguf { gguf: Gguf, locations: HashMap<Part, Packed> },
    StandIn,
}

/// Largest JSON file read. A config.json has some kilobytes; the index of a 405B model has 0.1 MB, that of the deepest model
/// accepted ([`config::parse`]) 2 MB. Parsed JSON takes up to 16 times its bytes.
const JSON_BYTES_MAX: u64 = 4 << 20;
/// Most shards of a checkpoint; all stay open.
const SHARDS_MAX: usize = 512;
/// Bytes that [`Checkpoint::read_f32`] converts at a time; input and result fit in a core's L2 cache.
const CHUNK_BYTES: usize = 64 << 10;

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
        let (mut shards, names) = open_shards(path)?;
        let names = names::rename(&config, wrapped, &mut shards, names)?;
        Checkpoint::new(config, &schemes, shards, &names)
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
        let weights = Weights::SafeTensors { shards: Vec::new(), locations, quantised: Quantised::new(config.dtype) };
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
        let mut shards = vec![SafeTensors::from_static("embedded model", safetensors)?];
        let names = shards[0].tensors().keys().map(|name| (name.clone(), 0)).collect();
        let names = names::rename(&config, wrapped, &mut shards, names)?;
        Checkpoint::new(config, &schemes, shards, &names)
    }

    fn new(
        mut config: ModelConfig,
        schemes: &[Scheme],
        shards: Vec<SafeTensors>,
        names: &HashMap<String, usize>,
    ) -> Result<Checkpoint> {
        refuse_foreign(&config, schemes, &shards, names)?;
        let table = embedding_of(&mut config, &shards, names)?;
        let mut locations = HashMap::new();
        let mut quantised = Quantised::new(config.dtype);
        for part in Part::all(&config) {
            if !part.is_vector() && part != Part::Embedding {
                let (weight, columns) = (part.name(&config), part.shape(&config).1);
                let mut found = false;
                for place in names::places(&config, part) {
                    found = found || quantised.add(schemes, &weight, (&place, columns), &shards, names)?;
                }
                if found {
                    continue;
                }
            }
            let location = if part == Part::Embedding { table } else { locate(&config, &shards, names, part)? };
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
                        read_at(shards, TensorLocation { offset, ..location }, out)
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

    /// Calls `read` with ranges of consecutive rows in the file, and the part of `out` for each, at `row` elements a row. Rows of Q and K
    /// are permuted if only some channels are rotated ([`crate::rope`]); families with such heads have no biases or norms of queries
    /// and keys.
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

    /// Reads some rows as f32, `[rows][columns]`; norm weights as they multiply, that of the final norm with the factor on the logits.
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
        let at_once = (CHUNK_BYTES / row_bytes).max(1);
        let mut chunk = vec![0; at_once.min(rows.len()) * row_bytes];
        for (index, out) in out.chunks_mut(at_once * width).enumerate() {
            let first = rows.start + index * at_once;
            let chunk = &mut chunk[..out.len() * dtype.bytes()];
            self.read_in(dtype, part, first..first + out.len() / width, chunk)?;
            convert(dtype, chunk, out);
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
    for (chunk, out) in out.chunks_mut(values.len() * bytes).enumerate() {
        let values = &mut values[..out.len() / bytes];
        let first = first + chunk * 256;
        values.iter_mut().enumerate().for_each(|(i, x)| *x = value(first + i));
        round(dtype, values, out);
    }
}

/// Reads rows of a GGUF matrix in its read format.
fn read_rows(gguf: &Gguf, location: &Packed, rows: Range<usize>, width: usize, out: &mut [u8]) -> Result<()> {
    let (values, block_bytes) = location.encoding.block();
    let raw_row = width / values * block_bytes;
    // Consecutive rows are read in one call.
    let at_once = if location.order == RowOrder::Own { (CHUNK_BYTES / raw_row).max(1) } else { 1 };
    let row_bytes = width * location.dtype.bytes();
    let mut raw = vec![0; at_once.min(rows.len()) * raw_row];
    let mut decoded = vec![0.0; width];
    for (index, out) in out.chunks_mut(at_once * row_bytes).enumerate() {
        let raw = &mut raw[..out.len() / row_bytes * raw_row];
        let first = location.row(rows.start + index * at_once);
        gguf.read(location.part, location.offset + first as u64 * raw_row as u64, raw)?;
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
    gguf.read(location.part, location.offset, &mut raw)?;
    let mut decoded = vec![0.0; width];
    location.encoding.decode(&raw, &mut decoded);
    let ordered: Vec<f32> = (0..width).map(|element| decoded[location.row(element)]).collect();
    round(location.dtype, &ordered, out);
    Ok(())
}

/// Returns true if the path exists. A link without a target counts as existing: a file belongs there. A folder without search
/// permission is an error, not an absent file.
fn is_there(path: &Path) -> Result<bool> {
    let refused = |message, hint: &str| Err(Error::new(ErrorKind::Io, message, hint));
    match path.try_exists() {
        Ok(true) => Ok(true),
        Ok(false) => match path.read_link() {
            Ok(target) => refused(
                format!("{} is a link to {}, which does not exist", path.display(), target.display()),
                "restore that file or remove the link; a model of the hub can be downloaded again",
            ),
            Err(_) => Ok(false),
        },
        Err(error) => refused(
            format!("cannot read {}: {error}", path.display()),
            "check its permissions and those of the folders above it",
        ),
    }
}

/// Reads a whole JSON file of the directory; None if it does not exist.
fn read_json(dir: &Path, name: &str) -> Result<Option<Vec<u8>>> {
    let refused = |why: &str, hint: &str| {
        Error::new(ErrorKind::Io, format!("cannot read {}: {why}", dir.join(name).display()), hint)
    };
    let failed = |error: std::io::Error| refused(&error.to_string(), "check the file's permissions");
    if !is_there(&dir.join(name))? {
        return Ok(None);
    }
    // Checked before opening: opening a pipe would block.
    if !dir.join(name).metadata().map_err(failed)?.is_file() {
        return Err(refused("it is not a file", "replace it with the file that is published with the model"));
    }
    let file = File::open(dir.join(name)).map_err(failed)?;
    let mut bytes = Vec::new();
    file.take(JSON_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > JSON_BYTES_MAX {
        return Err(Error::model(
            format!("{name} is larger than {JSON_BYTES_MAX} bytes"),
            "this is not a checkpoint's file; download it again",
        ));
    }
    Ok(Some(bytes))
}

/// File that marks a LoRA adapter; its weights alone are no model.
const ADAPTER: &str = "adapter_config.json";
const MERGE: &str = "merge the LoRA adapter into its base model and save that as safetensors";

/// Old checkpoints store this tensor. It follows from config.json and is ignored.
const RECOMPUTED: &str = "self_attn.rotary_emb.inv_freq";

/// Opens model.safetensors or the shards of the index, or else AutoGPTQ's file. The map gives the shard of every tensor.
fn open_shards(dir: &Path) -> Result<(Vec<SafeTensors>, HashMap<String, usize>)> {
    if is_there(&dir.join(ADAPTER))? {
        return Err(Error::model(format!("{} holds a LoRA adapter ({ADAPTER})", dir.display()), MERGE));
    }
    let open = |file: &Path| {
        let shard = SafeTensors::open(file)?;
        let names = shard.tensors().keys().map(|name| (name.clone(), 0)).collect();
        Ok((vec![shard], names))
    };
    let single = dir.join("model.safetensors");
    if is_there(&single)? {
        return open(&single);
    }
    let Some(index) = read_json(dir, "model.safetensors.index.json")? else {
        return open(&of_autogptq(dir).ok_or_else(|| no_weights(dir))?);
    };
    let (files, names) = read_index(&index)?;
    let mut shards = Vec::new();
    for file in files {
        let path = dir.join(&file);
        if !is_there(&path)? {
            return Err(Error::model(
                format!("shard {file} of the checkpoint is missing in {}", dir.display()),
                "the download is incomplete; fetch the missing file",
            ));
        }
        shards.push(SafeTensors::open(&path)?);
    }
    check_index(&shards, &names)?;
    Ok((shards, names))
}

/// The error for a wrong model.safetensors.index.json.
fn damaged_index(what: &str) -> Error {
    Error::model(format!("model.safetensors.index.json {what}"), "the file is damaged; download it again")
}

/// Parses the bytes of model.safetensors.index.json: the shards' file names, and the number of every tensor's shard.
fn read_index(index: &[u8]) -> Result<(Vec<String>, HashMap<String, usize>)> {
    let index: Value = serde_json::from_slice(index)
        .map_err(|error| damaged_index(&format!("is not valid JSON: {}", shown(&error.to_string()))))?;
    let Some(map) = index.get("weight_map").and_then(Value::as_object) else {
        return Err(damaged_index("has no weight_map"));
    };
    let mut files: Vec<String> = Vec::new();
    let mut names = HashMap::new();
    let mut numbers: HashMap<&str, usize> = HashMap::new();
    for (tensor, file) in map {
        let Some(file) = file.as_str().filter(|file| is_plain_name(file)) else {
            let file = shown(&file.to_string());
            return Err(damaged_index(&format!("names the shard {file}, which is not a plain file name")));
        };
        let number = *numbers.entry(file).or_insert_with(|| {
            files.push(file.to_owned());
            files.len() - 1
        });
        names.insert(tensor.clone(), number);
    }
    if files.len() > SHARDS_MAX {
        return Err(damaged_index(&format!("names {} shards; up to {SHARDS_MAX} are opened", files.len())));
    }
    Ok((files, names))
}

/// Refuses an index that does not agree with the shards. A tensor that it omits is refused, too: transformers loads it, and
/// ignoring a head or a bias would silently change the network.
fn check_index(shards: &[SafeTensors], names: &HashMap<String, usize>) -> Result<()> {
    for (tensor, &number) in names {
        if shards.get(number).is_none_or(|shard| !shard.tensors().contains_key(tensor)) {
            let file = shards.get(number).map_or("its shard", |shard| shard.name());
            let tensor = shown(tensor);
            return Err(damaged_index(&format!("places \"{tensor}\" in {file}, which does not hold it")));
        }
    }
    for (number, shard) in shards.iter().enumerate() {
        let unnamed = |tensor: &&String| names.get(*tensor) != Some(&number) && !tensor.ends_with(RECOMPUTED);
        if let Some(tensor) = shard.tensors().keys().find(unnamed) {
            let (tensor, file) = (shown(tensor), shard.name());
            return Err(damaged_index(&format!("does not place \"{tensor}\" in {file}, which holds it")));
        }
    }
    Ok(())
}

/// Returns true if text is one plain path component: no directory, no parent, no drive.
fn is_plain_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    matches!((components.next(), components.next()), (Some(Component::Normal(_)), None))
        && !name.contains(|c: char| matches!(c, '/' | '\\' | ':') || c.is_control())
        && name.len() <= 255
}

/// Names of a directory's entries; none if it cannot be read.
fn names_in(dir: &Path) -> Vec<String> {
    std::fs::read_dir(dir)
        .map(|entries| entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect())
        .unwrap_or_default()
}

/// The only file called as in AutoGPTQ's first versions, by bits and groups: gptq_model-4bit-128g.safetensors.
fn of_autogptq(dir: &Path) -> Option<PathBuf> {
    let mut names = names_in(dir);
    names.retain(|name| name.starts_with("gptq_model-") && name.ends_with(".safetensors"));
    let [name] = names.as_slice() else { return None };
    Some(dir.join(name))
}

/// The error for a directory without safetensors weights; it names the weights that are there.
fn no_weights(dir: &Path) -> Error {
    let names = names_in(dir);
    let any = |matches: &dyn Fn(&str) -> bool| names.iter().any(|name| matches(name));
    let hint = if any(&|name| name.ends_with(".gguf")) {
        "the directory holds GGUF files; name one of them"
    } else if any(&|name| name.starts_with("adapter_model.")) {
        MERGE
    } else if any(&|name| name.ends_with(".bin") || name.ends_with(".pth") || name.ends_with(".pt")) {
        "the directory holds pickled PyTorch weights, which can run code and are not read; convert them to safetensors"
    } else {
        "give a directory with config.json and model.safetensors, as published on the hub"
    };
    Error::model(format!("{} has neither model.safetensors nor model.safetensors.index.json", dir.display()), hint)
}

/// Ends of the names of quantised matrices' tensors.
const QUANTISED: [&str; 13] = [
    ".qweight",
    ".qzeros",
    ".scales",
    ".g_idx",
    ".weight_scale",
    ".weight_packed",
    ".weight_scale_inv",
    ".weight_zero_point",
    ".absmax",
    ".quant_map",
    ".SCB",
    ".input_scale",
    ".activation_scale",
];

fn is_quantised(name: &str) -> bool {
    QUANTISED.iter().any(|end| name.ends_with(end))
}

/// Refuses tensors of the network's modules that the configured network does not use. Ignoring a bias or a scale would
/// silently compute another function. Allowed are [`RECOMPUTED`], and next to quantised matrices scales of a cache and biases
/// of zeros, which GPTQ exporters write for networks without biases.
fn refuse_foreign(
    config: &ModelConfig,
    schemes: &[Scheme],
    shards: &[SafeTensors],
    names: &HashMap<String, usize>,
) -> Result<()> {
    let parts = Part::all(config).into_iter().filter(|part| !part.is_vector() && *part != Part::Embedding);
    let matrices: HashMap<String, usize> =
        parts.flat_map(|part| names::places(config, part)).map(|place| (place.name, place.rows)).collect();
    let of_matrix = |name: &str| {
        let Some((module, suffix)) = name.rsplit_once('.') else { return false };
        schemes.iter().any(|scheme| scheme.owns(suffix)) && matrices.contains_key(&format!("{module}.weight"))
    };
    let idle = |name: &str| -> Result<bool> {
        let rows = name.strip_suffix(".bias").and_then(|of| matrices.get(&format!("{of}.weight")));
        match rows {
            Some(&rows) if !schemes.is_empty() => is_zero(shards, names, name, rows),
            _ => Ok(false),
        }
    };
    // Sorted, so that the first refusal is the same in every run. A quantised matrix explains the bias next to it.
    let mut sorted: Vec<&String> = names.keys().collect();
    sorted.sort_unstable_by_key(|name| (!is_quantised(name), *name));
    let of_cache = |name: &str| !schemes.is_empty() && quantised::is_of_cache(name);
    for name in sorted.into_iter().filter(|name| !of_matrix(name) && !of_cache(name)) {
        if let Some(refusal) = refusal(config, name)
            && !idle(name)?
        {
            return Err(refusal);
        }
    }
    Ok(())
}

/// The error for a tensor's name that the configured network does not use; `None` if it is used or of no concern.
fn refusal(config: &ModelConfig, name: &str) -> Option<Error> {
    let shown = shown(name);
    let in_layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
    let suffix = match in_layer {
        Some((_, suffix)) => suffix,
        // Any other tensor of the embedding, the final norm or the head, for example a bias of the head.
        None => {
            let mut weights = [Part::Embedding, Part::FinalNorm, Part::Head].map(|part| part.name(config)).into_iter();
            weights.any(|weight| *name != weight && module(name) == module(&weight)).then_some(name)?
        }
    };
    if is_quantised(suffix) {
        return Some(Error::model(
            format!(
                "tensor \"{shown}\" is of a quantised matrix, which quantization_config of config.json does not describe"
            ),
            "download config.json again, and quantize_config.json, quant_config.json or hf_quant_config.json if the model has it",
        ));
    }
    let inside = |(layer, _): (&str, &str)| layer.parse::<usize>().is_ok_and(|layer| layer < config.layers);
    if !in_layer.is_none_or(inside) {
        return Some(Error::model(
            format!("tensor \"{shown}\" is outside the {} layers of config.json", config.layers),
            "config.json and the weights are of different models; fetch both again",
        ));
    }
    let used =
        in_layer.is_some() && part::LAYER_PARTS.iter().any(|part| part.exists(config) && part.suffix(config) == suffix);
    (!used && suffix != RECOMPUTED).then(|| {
        Error::model(
            format!("tensor \"{shown}\" is no part of a {} network as config.json describes it", config.family),
            config::SUPPORTED,
        )
    })
}

/// Returns true if a tensor is a vector of `rows` zeros.
fn is_zero(shards: &[SafeTensors], names: &HashMap<String, usize>, name: &str, rows: usize) -> Result<bool> {
    let Some(shard) = names.get(name).and_then(|shard| shards.get(*shard)) else { return Ok(false) };
    let Some(tensor) = shard.tensors().get(name).filter(|tensor| tensor.shape == [rows]) else { return Ok(false) };
    let mut bytes = vec![0; tensor.bytes as usize];
    shard.read(tensor.offset, &mut bytes)?;
    Ok(bytes.iter().all(|byte| *byte == 0))
}

/// A tensor's name without its last component.
fn module(name: &str) -> Option<&str> {
    name.rsplit_once('.').map(|(module, _)| module)
}

/// Finds the embedding. If the configuration ties the head to it, a stored head decides, as in transformers 5. A head alone
/// is both; an equal head is tied; a different head is separate.
fn embedding_of(
    config: &mut ModelConfig,
    shards: &[SafeTensors],
    names: &HashMap<String, usize>,
) -> Result<TensorLocation> {
    if !config.tied_embeddings || !names.contains_key(&Part::Head.name(config)) {
        return locate(config, shards, names, Part::Embedding);
    }
    let head = locate(config, shards, names, Part::Head)?;
    if !names.contains_key(&Part::Embedding.name(config)) {
        return Ok(head);
    }
    let table = locate(config, shards, names, Part::Embedding)?;
    let bytes = config.vocab * config.hidden * table.dtype.bytes();
    config.tied_embeddings = table.dtype == head.dtype && same_bytes(shards, table, head, bytes)?;
    Ok(table)
}

/// Returns true if both locations hold the same bytes.
fn same_bytes(shards: &[SafeTensors], one: TensorLocation, other: TensorLocation, bytes: usize) -> Result<bool> {
    let room = bytes.min(CHUNK_BYTES);
    let (mut a, mut b) = (vec![0; room], vec![0; room]);
    for done in (0..bytes).step_by(CHUNK_BYTES) {
        let length = (bytes - done).min(CHUNK_BYTES);
        for (location, chunk) in [(one, &mut a), (other, &mut b)] {
            let location = TensorLocation { offset: location.offset + done as u64, ..location };
            read_at(shards, location, &mut chunk[..length])?;
        }
        if a[..length] != b[..length] {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Fills `out` with the bytes at a location.
fn read_at(shards: &[SafeTensors], at: TensorLocation, out: &mut [u8]) -> Result<()> {
    match shards.get(at.shard) {
        Some(shard) => shard.read(at.offset, out),
        None => Err(Error::internal(format!("shard {} is not open", at.shard))),
    }
}

/// Finds a part and checks its type and shape.
fn locate(
    config: &ModelConfig,
    shards: &[SafeTensors],
    names: &HashMap<String, usize>,
    part: Part,
) -> Result<TensorLocation> {
    let name = part.name(config);
    let found = names.get(&name).and_then(|&number| Some((number, shards.get(number)?.tensors().get(&name)?)));
    let Some((shard, tensor)) = found else {
        let hint = match part {
            Part::Head => "if the head is the embedding, config.json must say \"tie_word_embeddings\": true",
            _ => "config.json and the weights are of different models, or the download is incomplete; fetch both again",
        };
        return Err(Error::model(format!("the checkpoint has no tensor \"{name}\""), hint));
    };
    let dtype = match tensor.dtype {
        "BF16" => Dtype::Bf16,
        "F16" => Dtype::F16,
        "F32" => Dtype::F32,
        other => {
            return Err(Error::model(
                format!("tensor \"{name}\" has dtype {other}, which is not supported"),
                "use the unquantised checkpoint in BF16, F16 or F32",
            ));
        }
    };
    let (rows, columns) = part.shape(config);
    let expected = if part.is_vector() { vec![columns] } else { vec![rows, columns] };
    if tensor.shape != expected {
        return Err(Error::model(
            format!("tensor \"{name}\" has shape {:?}, config.json expects {expected:?}", tensor.shape),
            "config.json and the weights are of different models; fetch both again",
        ));
    }
    Ok(TensorLocation { shard, offset: tensor.offset, dtype })
}
