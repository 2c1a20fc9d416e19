//! Keys and values of prompts read before, so that a second question about a document does not read the document again.
//!
//! Prefill attends over *unquantised* keys and values, so pages of a prefix are not enough to compute what follows it bit for bit.
//! The cache keeps what prefill itself stored: the 16-bit keys and values of every layer. A prompt that begins like an earlier one
//! takes the common blocks from there, layer by layer, and computes the rows after them ([`crate::forward::prefill_chunk`]). Rows
//! do not depend on their block, so no bit changes.
//!
//! A prompt is a chain of blocks of [`BLOCK_TOKENS`] tokens. A block's hash covers its tokens, all blocks before it, and everything
//! else that its keys and values depend on: the weights, the kernels, the version of this program, and the prompt's length where
//! RoPE depends on it. A *branch* holds the consecutive blocks that one prompt added. Branches are in memory or in files
//! (`cache_file.rs`; a segment is a block of one layer, `[layer][block]`), and the least recently used go when there is no room.
//!
//! A file's segments are checked as they are read, when earlier layers may be done already: where one is damaged, the file is
//! removed, and the prompt is begun anew without it.

use crate::backend::{Backend, Network};
use crate::cache_file::{self, CachedFile, Fault, Format, Stored, Writer, description, make_room, model_name, reason};
use crate::checkpoint::{Checkpoint, Part};
use crate::rope::RopeTable;
use quantspec_core::cache::G;
use quantspec_core::config::{ModelConfig, TargetWeights};
use quantspec_core::weights::RECIPE;
use quantspec_core::{Error, Result};
use std::collections::HashSet;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, SystemTime};
use std::{fs, io, thread};
use twox_hash::XxHash3_128;

/// Tokens of a block.
pub const BLOCK_TOKENS: usize = G;

const FORMAT: Format =
    Format { magic: *b"QSPROMPT", version: 1, suffix: "prompt", prefix: ".quantspec-prompt-", holds: "prompts" };
/// Bytes that are read or copied between two calls of the poll hook.
const PIECE_BYTES: usize = 32 << 20;
/// Threads that read and check a piece: enough for the fastest disks.
const READERS: usize = 8;
/// Bytes that are worth a thread of their own.
const READER_BYTES: usize = 1 << 20;

/// Hands out and takes in what a backend stores of the prompt under way.
pub trait PromptRows {
    /// The kernels that decide about the bits of a prompt's keys and values: a CPU's path, or a GPU.
    fn kernels(&self) -> String;

    /// Bytes of a token's keys and values in one layer, as [`PromptRows::export_rows`] yields them.
    fn row_bytes(&self) -> usize;

    /// Copies keys and values of prompt tokens in the layer under way, after they were computed and before the layer is stored,
    /// bit for bit: `[token][row_bytes]`, keys first.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] where there are no such tokens or `out` has another length. Device errors of a
    /// GPU.
    fn export_rows(&mut self, tokens: Range<usize>, out: &mut [u8]) -> Result<()>;

    /// Puts what [`PromptRows::export_rows`] yielded for the same tokens and layer of a prompt with the same beginning in place of
    /// computing them. The tokens follow those that the layer has already; later ones are computed.
    ///
    /// # Errors
    /// As [`PromptRows::export_rows`].
    fn import_rows(&mut self, tokens: Range<usize>, bytes: &[u8]) -> Result<()>;
}

/// Every file of prompts in `folder`, least recently used first, as [`CachedFile`] describes it. A folder that does not exist is
/// empty; other files and links are left out.
///
/// # Errors
/// The folder cannot be read.
pub fn files(folder: &Path) -> io::Result<Vec<CachedFile>> {
    cache_file::files(&FORMAT, folder)
}

/// Hash of everything in a model that a prompt's keys and values depend on: its configuration, all of its weights as they are read, and
/// what the target makes of them. Threads share the reading.
///
/// # Errors
/// Those of [`Checkpoint::read`] and of `poll`.
pub fn fingerprint(
    checkpoint: &Checkpoint,
    weights: TargetWeights,
    threads: usize,
    mut poll: impl FnMut() -> Result<()>,
) -> Result<u128> {
    let config = checkpoint.config();
    let mut pieces = Vec::new();
    for part in Part::all(config).into_iter().filter(|part| checkpoint.has(*part)) {
        let (rows, _) = checkpoint.shape(part);
        let row_bytes = checkpoint.bytes(part) / rows.max(1);
        let step = (READER_BYTES / row_bytes.max(1)).max(1);
        pieces.extend((0..rows).step_by(step).map(|start| (part, start..rows.min(start + step), row_bytes)));
    }
    let hash = |(part, rows, row_bytes): &(Part, Range<usize>, usize)| {
        let mut bytes = vec![0; rows.len() * row_bytes];
        checkpoint.read(*part, rows.clone(), &mut bytes)?;
        Ok(XxHash3_128::oneshot(&bytes))
    };
    let (next, ended) = (AtomicUsize::new(0), AtomicBool::new(false));
    let work = |poll: &mut dyn FnMut() -> Result<()>| {
        let mut own = Vec::new();
        while let (false, at) = (ended.load(Relaxed), next.fetch_add(1, Relaxed))
            && let Some(piece) = pieces.get(at)
        {
            match poll().and_then(|()| hash(piece)) {
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
        let mut all = work(&mut poll)?;
        for other in others {
            all.extend(other.join().map_err(|_| Error::internal("a thread that hashed weights panicked"))??);
        }
        Ok::<_, Error>(all)
    })?;
    hashes.sort_unstable();
    let mut all = format!("{config:?} {weights:?}").into_bytes();
    if weights != TargetWeights::Checkpoint {
        // Nibbles are made of what the file stores, which bytes rounded to a number format do not tell.
        let stored: Vec<_> = Part::all(config).into_iter().map(|part| checkpoint.encoding(part)).collect();
        all.extend_from_slice(format!("{RECIPE} {stored:?}").as_bytes());
    }
    hashes.iter().for_each(|(_, hash)| all.extend_from_slice(&hash.to_le_bytes()));
    Ok(XxHash3_128::oneshot(&all))
}

/// A folder for the prompts of one model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromptFolder {
    /// The folder; made when it is needed.
    pub folder: PathBuf,
    /// Directory of the model, for people.
    pub model: PathBuf,
    /// [`fingerprint`] of the model.
    pub fingerprint: u128,
    /// Most bytes that the folder holds.
    pub limit_bytes: u64,
}

/// The prompts that one engine keeps.
#[derive(Debug)]
pub struct PromptCache {
    place: Place,
    rope: RopeTable,
    layers: usize,
    /// Bytes of a block in one layer.
    segment_bytes: usize,
    /// Most blocks of a prompt.
    most_blocks: usize,
    /// Hash before the first block.
    root: u128,
    note: Option<String>,
    /// Notes that were given: each is given once.
    told: HashSet<String>,
    /// Damaged files, which a folder that cannot be written to still holds.
    damaged: HashSet<PathBuf>,
}

#[derive(Debug)]
enum Place {
    /// The least recently used branch first.
    Memory {
        branches: Vec<Arc<Held>>,
        limit_bytes: usize,
    },
    Disk {
        at: PromptFolder,
        recipe: String,
    },
}

/// A branch in memory.
#[derive(Debug)]
struct Held {
    chain: Vec<u128>,
    /// Per layer the bytes of all blocks.
    layers: Vec<Vec<u8>>,
}

impl Held {
    fn bytes(&self) -> usize {
        self.layers.iter().map(Vec::len).sum()
    }
}

/// A branch that a prompt begins with, or goes on with.
#[derive(Debug)]
enum Branch {
    Held(Arc<Held>),
    Stored { path: PathBuf, file: Stored },
}

impl PromptCache {
    /// Prompts in memory, at most `limit_bytes` of them.
    pub fn in_memory<B: Backend>(backend: &B, limit_bytes: usize) -> PromptCache {
        PromptCache::new(backend, Place::Memory { branches: Vec::new(), limit_bytes }, 0)
    }

    /// Prompts in a folder.
    pub fn on_disk<B: Backend>(backend: &B, at: PromptFolder) -> PromptCache {
        let recipe = format!("{:032x} {} {}", at.fingerprint, backend.kernels(), env!("CARGO_PKG_VERSION"));
        let root = XxHash3_128::oneshot(recipe.as_bytes());
        PromptCache::new(backend, Place::Disk { at, recipe }, root)
    }

    fn new<B: Backend>(backend: &B, place: Place, root: u128) -> PromptCache {
        let config: &ModelConfig = backend.config();
        PromptCache {
            place,
            rope: RopeTable::new(config),
            layers: config.layers,
            segment_bytes: BLOCK_TOKENS * backend.row_bytes(),
            most_blocks: config.max_positions / BLOCK_TOKENS,
            root,
            note: None,
            told: HashSet::new(),
            damaged: HashSet::new(),
        }
    }

    /// Bytes of memory that are held now.
    pub fn held_bytes(&self) -> usize {
        match &self.place {
            Place::Memory { branches, .. } => branches.iter().map(|branch| branch.bytes()).sum(),
            Place::Disk { .. } => 0,
        }
    }

    /// One line about a damaged file or a folder that cannot be used; each is told once.
    pub fn take_note(&mut self) -> Option<String> {
        self.note.take()
    }

    fn tell(&mut self, note: String) {
        if self.told.insert(note.clone()) {
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

    /// The longest known beginning of a prompt, at least one row short of it, and what is to be kept of the rest.
    pub fn find(&mut self, prompt: &[u32]) -> Reuse {
        let chain = self.chain(prompt);
        let branches = match &mut self.place {
            Place::Memory { branches, .. } => find_held(branches, &chain),
            Place::Disk { .. } => self.find_stored(&chain),
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
        };
        self.record(&mut reuse, found);
        reuse
    }

    /// Begins to keep the blocks of a prompt from `from` on, as many as there is room for.
    fn record(&mut self, reuse: &mut Reuse, from: usize) {
        let block_bytes = self.layers * self.segment_bytes;
        let new = reuse.chain.len().saturating_sub(from);
        let blocks = match &mut self.place {
            Place::Memory { branches, limit_bytes } => {
                let in_use: usize =
                    reuse.branches.iter().filter_map(|(branch, _)| branch.held()).map(|branch| branch.bytes()).sum();
                let blocks = new.min(limit_bytes.saturating_sub(in_use) / block_bytes);
                // Branches in use are the last.
                let mut held: usize = branches.iter().map(|branch| branch.bytes()).sum();
                while held + blocks * block_bytes > *limit_bytes && !branches.is_empty() {
                    held -= branches.remove(0).bytes();
                }
                blocks
            }
            Place::Disk { at, .. } => new.min(usize::try_from(at.limit_bytes).unwrap_or(usize::MAX) / block_bytes),
        };
        let chain = reuse.chain[from..from + blocks].to_vec();
        reuse.recorder = match &self.place {
            _ if blocks == 0 => None,
            Place::Memory { .. } => Some(Recorder { from, to: Kept::Memory(Vec::new()), chain }),
            Place::Disk { at, recipe } => {
                let (model, suffix) = (model_name(&at.model), FORMAT.suffix);
                let path = at.folder.join(format!("{model}-{:032x}-{:032x}.{suffix}", chain[0], chain[blocks - 1]));
                make_room(&FORMAT, &path, at.limit_bytes.saturating_sub((blocks * block_bytes) as u64));
                match Writer::new(&FORMAT, &path, &description(recipe, &at.model), blocks * self.layers) {
                    Ok(file) => Some(Recorder { from, to: Kept::Disk(file), chain }),
                    Err(error) => {
                        reuse.failed = Some(error);
                        None
                    }
                }
            }
        };
    }

    /// Walks the chain through the files of the folder, and notes which of them are used.
    fn find_stored(&mut self, chain: &[u128]) -> Vec<(Branch, usize)> {
        let Place::Disk { at: PromptFolder { folder, .. }, recipe } = &self.place else { return Vec::new() };
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
            // Whatever the directory of the model is called.
            let begins = format!("-{first:032x}-");
            let mut longest: Option<(Branch, usize)> = None;
            for name in names.iter().filter(|name| name.contains(&begins) && name.ends_with(".prompt")) {
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
        notes.into_iter().for_each(|note| self.tell(note));
        found
    }

    /// Takes the blocks that a prompt added, once its prefill has succeeded.
    pub fn keep(&mut self, mut reuse: Reuse) {
        if let Some(Recorder { chain, to, .. }) = reuse.recorder.take() {
            match (to, &mut self.place) {
                (Kept::Memory(layers), Place::Memory { branches, .. }) => {
                    let new = Arc::new(Held { chain, layers });
                    let used = reuse.branches.iter().filter_map(|(branch, _)| branch.held()).chain([&new]);
                    use_held(branches, &used.cloned().collect::<Vec<_>>());
                }
                (Kept::Disk(file), _) => {
                    // A sound file takes the place of a damaged one.
                    self.damaged.remove(file.place());
                    reuse.failed = file.publish().err();
                    touch(&reuse.branches);
                }
                (Kept::Memory(_), Place::Disk { .. }) => (),
            }
        }
        self.note_failure(&mut reuse);
    }

    /// Drops a prompt that [`Reuse::restore`] found damaged: the next [`PromptCache::find`] does without the file.
    pub fn forget(&mut self, mut reuse: Reuse) {
        if let Some(path) = reuse.damaged.take() {
            self.tell(damaged(&path, "its keys and values"));
            self.damaged.insert(path);
        }
        self.note_failure(&mut reuse);
    }

    fn note_failure(&mut self, reuse: &mut Reuse) {
        if let (Some(error), Place::Disk { at, .. }) = (reuse.failed.take(), &self.place) {
            let note = unusable(&at.folder, &error);
            self.tell(note);
        }
    }
}

/// Walks the chain through branches in memory.
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

/// Moves the branches of one prompt to the end of the list, the first of them last: without it, the others are of no use.
fn use_held(branches: &mut Vec<Arc<Held>>, used: &[Arc<Held>]) {
    branches.retain(|branch| !used.iter().any(|other| Arc::ptr_eq(branch, other)));
    branches.extend(used.iter().rev().cloned());
}

/// Notes that the files of one prompt are used, the first of them last, as [`use_held`].
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
}

fn damaged(path: &Path, what: &str) -> String {
    format!("the cached prompt {} is damaged ({what}); the prompt was read anew", path.display())
}

fn unusable(path: &Path, error: &io::Error) -> String {
    format!("prompts are not cached: {}: {}; name another folder with --prompt-cache", path.display(), reason(error))
}

/// What becomes of one prompt: the rows that are known, and those that are to be kept.
#[derive(Debug)]
pub struct Reuse {
    /// Blocks that need no computing.
    blocks: usize,
    /// Where they are: so many blocks of each branch.
    branches: Vec<(Branch, usize)>,
    recorder: Option<Recorder>,
    layers: usize,
    segment_bytes: usize,
    buffer: Vec<u8>,
    /// Hashes of the prompt's complete blocks.
    chain: Vec<u128>,
    /// The file that turned out to be damaged.
    damaged: Option<PathBuf>,
    /// Why what was recorded is not kept.
    failed: Option<io::Error>,
}

/// Takes down a prompt's blocks from one on, layer by layer.
#[derive(Debug)]
struct Recorder {
    from: usize,
    chain: Vec<u128>,
    to: Kept,
}

#[derive(Debug)]
enum Kept {
    Memory(Vec<Vec<u8>>),
    Disk(Writer),
}

impl Reuse {
    /// Rows at the beginning of the prompt that need no computing.
    pub fn tokens(&self) -> usize {
        self.blocks * BLOCK_TOKENS
    }

    /// Puts the known keys and values of a layer into the backend's prompt under way. False where they are damaged: the file is
    /// removed, and the prompt is to be begun anew.
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
                    Branch::Held(held) => {
                        let bytes = start * self.segment_bytes..(start + count) * self.segment_bytes;
                        backend.import_rows(rows, &held.layers[layer][bytes])?;
                    }
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

    /// Takes down what the backend has computed of a layer. A disk that takes no more ends the recording, not the prefill.
    ///
    /// # Errors
    /// Those of [`PromptRows::export_rows`] and [`Network::poll`].
    pub fn record<B: Network + PromptRows>(&mut self, backend: &mut B, layer: usize) -> Result<()> {
        let Some(recorder) = &mut self.recorder else { return Ok(()) };
        let (from, blocks, segment_bytes) = (recorder.from, recorder.chain.len(), self.segment_bytes);
        let per_piece = (PIECE_BYTES / segment_bytes).max(1);
        let mut whole = match recorder.to {
            Kept::Memory(_) => vec![0; blocks * segment_bytes],
            Kept::Disk(_) => Vec::new(),
        };
        for start in (0..blocks).step_by(per_piece) {
            let count = per_piece.min(blocks - start);
            let rows = (from + start) * BLOCK_TOKENS..(from + start + count) * BLOCK_TOKENS;
            match &mut recorder.to {
                Kept::Memory(_) => {
                    let bytes = start * segment_bytes..(start + count) * segment_bytes;
                    backend.export_rows(rows, &mut whole[bytes])?;
                }
                Kept::Disk(file) => {
                    self.buffer.resize(count * segment_bytes, 0);
                    backend.export_rows(rows, &mut self.buffer)?;
                    let mut segments = self.buffer.chunks_exact(segment_bytes).zip(&recorder.chain[start..]);
                    if let Err(error) = segments.try_for_each(|(segment, hash)| file.put(*hash, segment)) {
                        self.failed = Some(error);
                        self.recorder = None;
                        return Ok(());
                    }
                }
            }
            backend.poll()?;
        }
        if let Kept::Memory(layers) = &mut recorder.to {
            debug_assert_eq!(layers.len(), layer, "layers are recorded in order");
            layers.push(whole);
        }
        Ok(())
    }
}

/// Reads consecutive segments from `first` on, by several threads; false where one is damaged.
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
