//! Cache of prompts' keys and values: a second question about a document does not process the document again.
//!
//! Prefill attends over *unquantised* keys and values, so a prefix's pages do not suffice to compute the following rows bit
//! for bit. The cache keeps the 16-bit keys and values of every layer, as prefill stores them. A prompt with a cached prefix
//! restores the common blocks layer by layer and computes the rows after them ([`crate::forward::prefill_chunk`]). Rows do
//! not depend on their block, so no bit changes.
//!
//! A prompt is a chain of blocks of [`BLOCK_TOKENS`] tokens. A block's hash covers its tokens, all blocks before it, and
//! everything else that its keys and values depend on: the prompt's length where RoPE depends on it, and in files the
//! weights, the kernels and the program's version. A *branch* holds the consecutive blocks that one prompt added.
//! Branches are in memory or in files (`cache_file.rs`; a segment is a block of one layer, `[layer][block]`). The least
//! recently used are removed when there is no room.
//!
//! A file's segments are checked when they are read, which may be after earlier layers were computed. If one is damaged, the
//! file is removed and the prompt restarts without it.

use crate::cache_file::{self, CachedFile, Fault, Format, Stored, Writer, description, make_room, model_name, reason};
use crate::checkpoint::{Checkpoint, Part};
use crate::network::Network;
use crate::prompt_rows::{HeldRows, PromptRows};
use crate::rope::RopeTable;
use quantspec_core::cache::G;
use quantspec_core::config::{ModelConfig, TargetWeights};
use quantspec_core::weights::RECIPE;
use quantspec_core::{Error, ErrorKind, Result};
use std::collections::HashSet;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime};
use std::{fs, io, thread};
use twox_hash::XxHash3_128;

/// Tokens of a block.
pub const BLOCK_TOKENS: usize = G;

const FORMAT: Format =
    Format { magic: *b"QSPROMPT", version: 1, suffix: "prompt", prefix: ".quantspec-prompt-", holds: "prompts" };
/// Bytes read between two calls of the poll hook, enough for [`READERS`].
const PIECE_BYTES: usize = 32 << 20;
/// Bytes written between two calls of the poll hook. The plan does not count this memory, so it is small.
const WRITTEN_BYTES: usize = 1 << 20;
/// Threads that read and check a piece, enough for the fastest disks.
const READERS: usize = 8;
/// Fewest bytes for which another reader thread pays.
const READER_BYTES: usize = 1 << 20;

/// Every file of prompts in `folder`, least recently used first ([`CachedFile`]). A folder that does not exist counts as
/// empty; other files and links are left out.
///
/// # Errors
/// The folder cannot be read.
pub fn files(folder: &Path) -> io::Result<Vec<CachedFile>> {
    cache_file::files(&FORMAT, folder)
}

/// Hash of all properties of a model that affect a prompt's keys and values: its configuration, all of its weights, and the
/// target's weight format. Several threads read.
///
/// # Errors
/// Those of [`Checkpoint::read`], [`Checkpoint::read_stored`] and `poll`.
pub fn fingerprint(
    checkpoint: &Checkpoint,
    weights: TargetWeights,
    threads: usize,
    mut poll: impl FnMut() -> Result<()>,
) -> Result<u128> {
    let mut all = format!("{:?} {weights:?}", checkpoint.config()).into_bytes();
    if weights != TargetWeights::Checkpoint {
        all.extend_from_slice(RECIPE.as_bytes());
    }
    let hashes = hashes_of_weights(checkpoint, weights, threads, &mut poll)?;
    hashes.iter().for_each(|hash| all.extend_from_slice(&hash.to_le_bytes()));
    Ok(XxHash3_128::oneshot(&all))
}

/// Hash of rows of a matrix.
fn hash_of_rows(checkpoint: &Checkpoint, weights: TargetWeights, part: Part, rows: Range<usize>) -> Result<u128> {
    let values = rows.len() * checkpoint.shape(part).1;
    let bytes = if weights == TargetWeights::Checkpoint {
        let mut bytes = vec![0; values * checkpoint.dtype(part).bytes()];
        checkpoint.read(part, rows, &mut bytes)?;
        bytes
    } else {
        // Nibbles are made from the stored values, which `read` would round to a number format.
        let mut stored = vec![0.0; values];
        checkpoint.read_stored(part, rows, &mut stored)?;
        stored.iter().flat_map(|value| value.to_le_bytes()).collect()
    };
    Ok(XxHash3_128::oneshot(&bytes))
}

/// Hashes of all weights in pieces, in order. Each thread takes the next piece until all are hashed or one fails.
fn hashes_of_weights(
    checkpoint: &Checkpoint,
    weights: TargetWeights,
    threads: usize,
    poll: &mut dyn FnMut() -> Result<()>,
) -> Result<Vec<u128>> {
    let mut pieces = Vec::new();
    for part in Part::all(checkpoint.config()).into_iter().filter(|part| checkpoint.has(*part)) {
        let (rows, columns) = checkpoint.shape(part);
        let step = (READER_BYTES / (4 * columns.max(1))).max(1);
        pieces.extend((0..rows).step_by(step).map(|start| (part, start..rows.min(start + step))));
    }
    let (next, ended) = (AtomicUsize::new(0), AtomicBool::new(false));
    let work = |poll: &mut dyn FnMut() -> Result<()>| {
        let mut own = Vec::new();
        while let (false, at) = (ended.load(Relaxed), next.fetch_add(1, Relaxed))
            && let Some((part, rows)) = pieces.get(at)
        {
            match poll().and_then(|()| hash_of_rows(checkpoint, weights, *part, rows.clone())) {
                Ok(hash) => own.push((at, hash)),
                Err(error) => {
                    ended.store(true, Relaxed);
                    return Err(error);
                }
            }
        }
        Ok(own)
    };
    let mut hashes = thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(|| work(&mut || Ok(())))).collect();
        let mut all = work(poll)?;
        for other in others {
            all.extend(other.join().map_err(|_| Error::internal("a thread that hashed weights panicked"))??);
        }
        Ok::<_, Error>(all)
    })?;
    hashes.sort_unstable();
    Ok(hashes.into_iter().map(|(_, hash)| hash).collect())
}

/// A folder for the prompts of one model.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptFolder {
    /// The folder; created when needed.
    pub folder: PathBuf,
    /// Directory of the model, for people.
    pub model: PathBuf,
    /// [`fingerprint`] of the model.
    pub fingerprint: u128,
    /// Most bytes that the folder holds.
    pub limit_bytes: u64,
    /// Seconds by which writing a prompt may exceed computing it. A prompt that takes longer is not kept, nor are later ones:
    /// reading it would gain little, and each prompt would be delayed.
    pub patience_s: f64,
}

/// The prompts that one engine keeps.
#[derive(Debug)]
pub struct PromptCache {
    storage: Storage,
    rope: RopeTable,
    layers: usize,
    /// Bytes of a block in one layer.
    segment_bytes: usize,
    /// Most blocks of a prompt.
    most_blocks: usize,
    /// Hash before the first block.
    root: u128,
    note: Option<String>,
    /// Notes already given; each is given once.
    given_notes: HashSet<String>,
    /// Damaged files that could not be removed, as the folder is read-only.
    damaged: HashSet<PathBuf>,
}

#[derive(Debug)]
enum Storage {
    /// The least recently used branch first.
    Memory { branches: Vec<Arc<Held>>, limit_bytes: usize },
    Disk {
        at: PromptFolder,
        recipe: String,
        /// Writing took longer than computing and [`PromptFolder::patience_s`].
        slow: bool,
    },
}

/// A branch in memory.
#[derive(Debug)]
struct Held {
    chain: Vec<u128>,
    /// Per layer, the rows of all blocks.
    layers: Vec<HeldRows>,
    bytes: usize,
}

/// A branch that matches the start or the continuation of a prompt.
#[derive(Debug)]
enum Branch {
    Held(Arc<Held>),
    Stored { path: PathBuf, file: Stored },
}

impl PromptCache {
    /// Prompts in memory, at most `limit_bytes` of them.
    pub fn in_memory<B: Network + PromptRows>(backend: &B, limit_bytes: usize) -> PromptCache {
        PromptCache::new(backend, Storage::Memory { branches: Vec::new(), limit_bytes }, 0)
    }

    /// Prompts in a folder.
    pub fn on_disk<B: Network + PromptRows>(backend: &B, at: PromptFolder) -> PromptCache {
        let recipe = format!("{:032x} {} {}", at.fingerprint, backend.kernels(), env!("CARGO_PKG_VERSION"));
        let root = XxHash3_128::oneshot(recipe.as_bytes());
        PromptCache::new(backend, Storage::Disk { at, recipe, slow: false }, root)
    }

    fn new<B: Network + PromptRows>(backend: &B, storage: Storage, root: u128) -> PromptCache {
        let config: &ModelConfig = backend.config();
        PromptCache {
            storage,
            rope: RopeTable::new(config),
            layers: config.layers,
            segment_bytes: BLOCK_TOKENS * backend.row_bytes(),
            most_blocks: config.max_positions / BLOCK_TOKENS,
            root,
            note: None,
            given_notes: HashSet::new(),
            damaged: HashSet::new(),
        }
    }

    /// Bytes held in memory.
    pub fn held_bytes(&self) -> usize {
        match &self.storage {
            Storage::Memory { branches, .. } => branches.iter().map(|branch| branch.bytes).sum(),
            Storage::Disk { .. } => 0,
        }
    }

    /// One line about a damaged file or an unusable folder; each is reported once.
    pub fn take_note(&mut self) -> Option<String> {
        self.note.take()
    }

    fn add_note(&mut self, note: String) {
        if self.given_notes.insert(note.clone()) {
            self.note = Some(note);
        }
    }

    /// Hashes of the complete blocks of a prompt.
    fn chain(&self, prompt: &[u32]) -> Vec<u128> {
        let mut before = self.root;
        let mut bytes = Vec::with_capacity(16 + 8 + 4 * BLOCK_TOKENS);
        let step = |block: &[u32]| {
            bytes.clear();
            bytes.extend_from_slice(&before.to_le_bytes());
            bytes.extend_from_slice(&(self.rope.length_class(prompt.len()) as u64).to_le_bytes());
            block.iter().for_each(|token| bytes.extend_from_slice(&token.to_le_bytes()));
            before = XxHash3_128::oneshot(&bytes);
            before
        };
        prompt.chunks_exact(BLOCK_TOKENS).map(step).collect()
    }

    /// The longest known prefix of a prompt, at least one row shorter than it, and the rows to record.
    pub fn find(&mut self, prompt: &[u32]) -> Reuse {
        let chain = self.chain(prompt);
        let branches = match &mut self.storage {
            Storage::Memory { branches, .. } => find_held(branches, &chain),
            Storage::Disk { .. } => self.find_stored(&chain),
        };
        let found: usize = branches.iter().map(|(_, blocks)| blocks).sum();
        let mut reuse = Reuse {
            blocks: found.min(prompt.len().saturating_sub(1) / BLOCK_TOKENS),
            branches,
            recorder: None,
            layers: self.layers,
            segment_bytes: self.segment_bytes,
            buffer: Vec::new(),
            chain,
            damaged: None,
            failed: None,
            started: Instant::now(),
            writing: Duration::ZERO,
            slow: false,
        };
        self.record(&mut reuse, found);
        reuse
    }

    /// Starts recording the blocks of a prompt from `from` on, as many as there is room for.
    fn record(&mut self, reuse: &mut Reuse, from: usize) {
        let block_bytes = self.layers * self.segment_bytes;
        let new = reuse.chain.len().saturating_sub(from);
        let blocks = match &mut self.storage {
            Storage::Memory { branches, limit_bytes } => {
                let in_use: usize =
                    reuse.branches.iter().filter_map(|(branch, _)| branch.held()).map(|branch| branch.bytes).sum();
                let blocks = new.min(limit_bytes.saturating_sub(in_use) / block_bytes);
                // The least recently used go first; those in use are the last (`use_held`).
                let mut held: usize = branches.iter().map(|branch| branch.bytes).sum();
                while held + blocks * block_bytes > *limit_bytes && !branches.is_empty() {
                    held -= branches.remove(0).bytes;
                }
                blocks
            }
            Storage::Disk { slow: true, .. } => 0,
            // The files in use were read last, so they are removed last, and must leave room for this one.
            Storage::Disk { at, .. } => {
                let in_use: usize = reuse.branches.iter().map(|(branch, _)| branch.stored_segments()).sum();
                let room = at.limit_bytes.saturating_sub((in_use * self.segment_bytes) as u64);
                new.min(usize::try_from(room).unwrap_or(usize::MAX) / block_bytes)
            }
        };
        let chain = reuse.chain[from..from + blocks].to_vec();
        reuse.recorder = match &self.storage {
            _ if blocks == 0 => None,
            Storage::Memory { .. } => Some(Recorder { from, to: Kept::Memory(Vec::new()), chain }),
            Storage::Disk { at, recipe, .. } => {
                let (model, suffix) = (model_name(&at.model), FORMAT.suffix);
                let path = at.folder.join(format!("{model}-{:032x}-{:032x}.{suffix}", chain[0], chain[blocks - 1]));
                make_room(&FORMAT, &path, at.limit_bytes.saturating_sub((blocks * block_bytes) as u64));
                match Writer::new(&FORMAT, &path, &description(recipe, &at.model), blocks * self.layers) {
                    Ok(file) => {
                        let to = Kept::Disk { file, patience_s: at.patience_s };
                        Some(Recorder { from, to, chain })
                    }
                    Err(error) => {
                        reuse.failed = Some(error);
                        None
                    }
                }
            }
        };
    }

    /// Follows the chain through the folder's files, and lists the files used.
    fn find_stored(&mut self, chain: &[u128]) -> Vec<(Branch, usize)> {
        let Storage::Disk { at: PromptFolder { folder, .. }, recipe, .. } = &self.storage else { return Vec::new() };
        let (mut notes, mut found, mut walked) = (Vec::new(), Vec::new(), 0);
        let names: Vec<String> = match fs::read_dir(folder) {
            Ok(entries) => entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => {
                notes.push(unusable(folder, &error));
                Vec::new()
            }
        };
        while let Some(first) = chain.get(walked) {
            // The name of the model's directory does not matter.
            let (begins, ends) = (format!("-{first:032x}-"), format!(".{}", FORMAT.suffix));
            let mut longest: Option<(Branch, usize)> = None;
            for name in names.iter().filter(|name| name.contains(&begins) && name.ends_with(&ends)) {
                let path = folder.join(name);
                if self.damaged.contains(&path) {
                    continue;
                }
                let fits = |header: &cache_file::Header| {
                    let (layers, segment_bytes) = (self.layers as u64, self.segment_bytes as u64);
                    header.segments.is_multiple_of(layers)
                        && header.segments / layers <= self.most_blocks as u64
                        && header.segments.checked_mul(segment_bytes) == Some(header.data_bytes)
                };
                let file = match Stored::open(&FORMAT, &path, recipe, fits) {
                    Ok(file) => file,
                    Err(Fault::Other) => continue,
                    Err(Fault::Damaged(what)) => {
                        notes.push(damaged(&path, &what));
                        let _ = fs::remove_file(&path);
                        continue;
                    }
                    Err(Fault::Io(error)) => {
                        notes.push(unusable(&path, &error));
                        continue;
                    }
                };
                let blocks = file.segments() / self.layers;
                let same = |at: usize| chain.get(walked + at) == file.source(at).as_ref();
                let common = (0..blocks).take_while(|&at| same(at)).count();
                if common > longest.as_ref().map_or(0, |(_, blocks)| *blocks) {
                    longest = Some((Branch::Stored { path, file }, common));
                }
            }
            let Some(branch) = longest else { break };
            walked += branch.1;
            found.push(branch);
        }
        touch(&found);
        notes.into_iter().for_each(|note| self.add_note(note));
        found
    }

    /// Adds the blocks of a prompt to the cache, after its prefill succeeded.
    pub fn keep(&mut self, mut reuse: Reuse) {
        if let Some(Recorder { chain, to, .. }) = reuse.recorder.take() {
            match (to, &mut self.storage) {
                (Kept::Memory(layers), Storage::Memory { branches, .. }) => {
                    let bytes = chain.len() * self.layers * self.segment_bytes;
                    let new = Arc::new(Held { chain, layers, bytes });
                    let used = reuse.branches.iter().filter_map(|(branch, _)| branch.held()).chain([&new]);
                    use_held(branches, &used.cloned().collect::<Vec<_>>());
                }
                (Kept::Disk { file, .. }, _) => {
                    // A sound file replaces a damaged one.
                    self.damaged.remove(file.destination());
                    reuse.failed = file.publish().err();
                    touch(&reuse.branches);
                }
                (Kept::Memory(_), Storage::Disk { .. }) => (),
            }
        }
        self.note_failure(&mut reuse);
    }

    /// Removes a prompt that [`Reuse::restore`] found damaged, so that the next [`PromptCache::find`] does not use its file.
    pub fn forget(&mut self, mut reuse: Reuse) {
        if let Some(path) = reuse.damaged.take() {
            self.add_note(damaged(&path, "its keys and values"));
            self.damaged.insert(path);
        }
        self.note_failure(&mut reuse);
    }

    fn note_failure(&mut self, reuse: &mut Reuse) {
        if let (Some(error), Storage::Disk { at, slow, .. }) = (reuse.failed.take(), &mut self.storage) {
            *slow |= reuse.slow;
            let note = unusable(&at.folder, &error);
            self.add_note(note);
        }
    }
}

/// Follows the chain through branches in memory.
fn find_held(branches: &mut Vec<Arc<Held>>, chain: &[u128]) -> Vec<(Branch, usize)> {
    let (mut found, mut walked) = (Vec::new(), 0);
    while walked < chain.len() {
        let common =
            |branch: &Held| branch.chain.iter().zip(&chain[walked..]).take_while(|(own, wanted)| own == wanted).count();
        let longest = branches.iter().map(|branch| (common(branch), branch)).max_by_key(|(blocks, _)| *blocks);
        let Some((blocks, branch)) = longest.filter(|(blocks, _)| *blocks > 0) else { break };
        walked += blocks;
        found.push((branch.clone(), blocks));
    }
    use_held(branches, &found.iter().map(|(branch, _)| branch.clone()).collect::<Vec<_>>());
    found.into_iter().map(|(branch, blocks)| (Branch::Held(branch), blocks)).collect()
}

/// Moves the branches of one prompt to the end of the list, its first branch last: the others are useless without it.
fn use_held(branches: &mut Vec<Arc<Held>>, used: &[Arc<Held>]) {
    branches.retain(|branch| !used.iter().any(|other| Arc::ptr_eq(branch, other)));
    branches.extend(used.iter().rev().cloned());
}

/// Marks the files of one prompt as used, the first of them last, as [`use_held`] does.
fn touch(branches: &[(Branch, usize)]) {
    let now = SystemTime::now();
    for (back, (branch, _)) in branches.iter().enumerate() {
        if let Branch::Stored { file, .. } = branch {
            file.touch(now - Duration::from_millis(back as u64));
        }
    }
}

impl Branch {
    fn held(&self) -> Option<&Arc<Held>> {
        match self {
            Branch::Held(branch) => Some(branch),
            Branch::Stored { .. } => None,
        }
    }

    /// Segments of its file, 0 without one.
    fn stored_segments(&self) -> usize {
        match self {
            Branch::Held(_) => 0,
            Branch::Stored { file, .. } => file.segments(),
        }
    }
}

fn damaged(path: &Path, what: &str) -> String {
    format!("the cached prompt {} is damaged ({what}); the prompt was processed again", path.display())
}

fn unusable(path: &Path, error: &io::Error) -> String {
    format!("prompts are not cached: {}: {}; name another folder with --prompt-cache", path.display(), reason(error))
}

/// The cached rows of one prompt, and the rows to record.
#[derive(Debug)]
pub struct Reuse {
    /// Blocks that need no computing.
    blocks: usize,
    /// The branches, and the number of blocks used of each.
    branches: Vec<(Branch, usize)>,
    recorder: Option<Recorder>,
    layers: usize,
    segment_bytes: usize,
    buffer: Vec<u8>,
    /// Hashes of the prompt's complete blocks.
    chain: Vec<u128>,
    /// The file found to be damaged.
    damaged: Option<PathBuf>,
    /// Why the recorded rows are not kept.
    failed: Option<io::Error>,
    started: Instant,
    /// Time of exporting and writing rows.
    writing: Duration,
    /// Writing took longer than computing and [`PromptFolder::patience_s`].
    slow: bool,
}

/// Records the blocks of a prompt from block `from` on, layer by layer.
#[derive(Debug)]
struct Recorder {
    from: usize,
    chain: Vec<u128>,
    to: Kept,
}

#[derive(Debug)]
enum Kept {
    Memory(Vec<HeldRows>),
    Disk { file: Writer, patience_s: f64 },
}

impl Reuse {
    /// Rows at the beginning of the prompt that are restored.
    pub fn tokens(&self) -> usize {
        self.blocks * BLOCK_TOKENS
    }

    /// Restores the known keys and values of a layer into the backend's current prompt. Returns false if they are damaged:
    /// the file is removed, and the caller must restart the prompt.
    ///
    /// # Errors
    /// Those of [`PromptRows::import_rows`] and [`Network::poll`].
    pub fn restore<B: Network + PromptRows>(&mut self, backend: &mut B, layer: usize) -> Result<bool> {
        let mut done = 0;
        let per_piece = (PIECE_BYTES / self.segment_bytes).max(1);
        for (branch, blocks) in &self.branches {
            let blocks = (*blocks).min(self.blocks - done);
            for start in (0..blocks).step_by(per_piece) {
                let count = per_piece.min(blocks - start);
                let rows = (done + start) * BLOCK_TOKENS..(done + start + count) * BLOCK_TOKENS;
                match branch {
                    Branch::Held(held) => backend.import_held(rows, &held.layers[layer], start * BLOCK_TOKENS)?,
                    Branch::Stored { path, file } => {
                        self.buffer.resize(count * self.segment_bytes, 0);
                        let first = layer * (file.segments() / self.layers) + start;
                        if !read(file, first, self.segment_bytes, &mut self.buffer) {
                            let _ = fs::remove_file(path);
                            self.damaged = Some(path.clone());
                            return Ok(false);
                        }
                        backend.import_rows(rows, &self.buffer)?;
                    }
                }
                backend.poll()?;
            }
            done += blocks;
        }
        Ok(true)
    }

    /// Records a layer's computed rows. A full or slow disk, or a full device memory, ends the recording, not the prefill.
    ///
    /// # Errors
    /// Those of [`PromptRows::export_rows`] and [`Network::poll`].
    pub fn record<B: Network + PromptRows>(&mut self, backend: &mut B, layer: usize) -> Result<()> {
        let Some(recorder) = &mut self.recorder else { return Ok(()) };
        let (from, blocks, segment_bytes) = (recorder.from, recorder.chain.len(), self.segment_bytes);
        let rows = |start: usize, count: usize| (from + start) * BLOCK_TOKENS..(from + start + count) * BLOCK_TOKENS;
        match &mut recorder.to {
            Kept::Memory(layers) => {
                debug_assert_eq!(layers.len(), layer, "layers are recorded in order");
                match backend.hold_rows(rows(0, blocks)) {
                    Ok(held) => layers.push(held),
                    Err(error) if error.kind == ErrorKind::DoesNotFit => self.recorder = None,
                    Err(error) => return Err(error),
                }
                backend.poll()?;
            }
            Kept::Disk { file, patience_s } => {
                let began = Instant::now();
                let per_piece = (WRITTEN_BYTES / segment_bytes).max(1);
                for start in (0..blocks).step_by(per_piece) {
                    let count = per_piece.min(blocks - start);
                    self.buffer.resize(count * segment_bytes, 0);
                    backend.export_rows(rows(start, count), &mut self.buffer)?;
                    let mut segments = self.buffer.chunks_exact(segment_bytes).zip(&recorder.chain[start..]);
                    if let Err(error) = segments.try_for_each(|(segment, hash)| file.put(*hash, segment)) {
                        self.failed = Some(error);
                        self.recorder = None;
                        return Ok(());
                    }
                    backend.poll()?;
                }
                self.writing += began.elapsed();
                let computing = self.started.elapsed().saturating_sub(self.writing);
                if self.writing.as_secs_f64() > computing.as_secs_f64() + *patience_s {
                    self.failed = Some(io::Error::other("writing takes longer than processing a prompt"));
                    (self.slow, self.recorder) = (true, None);
                }
            }
        }
        Ok(())
    }
}

/// Reads consecutive segments from `first` on with several threads. Returns false if one is damaged.
fn read(file: &Stored, first: usize, segment_bytes: usize, out: &mut [u8]) -> bool {
    let threads = READERS.min(thread::available_parallelism().map_or(1, usize::from)).min(out.len() / READER_BYTES + 1);
    let per_thread = (out.len() / segment_bytes).div_ceil(threads);
    let work = |part: usize, out: &mut [u8]| {
        out.chunks_exact_mut(segment_bytes).enumerate().all(|(at, out)| {
            let segment = first + part * per_thread + at;
            file.read(segment, (segment * segment_bytes) as u64, out)
        })
    };
    thread::scope(|scope| {
        let parts = out.chunks_mut(per_thread * segment_bytes).enumerate();
        let parts: Vec<_> = parts.map(|(part, out)| scope.spawn(move || work(part, out))).collect();
        parts.into_iter().all(|part| part.join().unwrap_or(false))
    })
}
