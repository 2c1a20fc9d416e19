//! Draft weights on disk, which saves quantising a model at every load.
//!
//! A file holds *blocks*: the backend's form of a few rows of one tensor. Each block has a checksum, and a hash of the
//! checkpoint bytes it was made from. A backend reads those bytes at every load, so the hash compares content, not names,
//! sizes or times. Hashing costs a hundredth of quantising. If a block fails either check, all blocks are made anew and the
//! file is replaced, because the importance that blocks are quantised with depends on the weights of earlier layers
//! (`importance.rs`). So a sound file needs no importance.
//!
//! A segment of the file (`cache_file.rs`) is a block. After a file is written, the least recently used files are removed
//! until the folder is within its limit.

use crate::cache_file::{self, CachedFile, Fault, Format, Stored, Writer, description, make_room, model_name, reason};
use quantspec_core::Result;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::SystemTime;
use twox_hash::{XxHash3_64, XxHash3_128};

const FORMAT: Format =
    Format { magic: *b"QSDRAFTS", version: 2, suffix: "draft", prefix: ".quantspec-draft-", holds: "draft weights" };
/// Bytes written between two calls of the poll hook: about 10 ms on an SSD.
const POLLED_BYTES: usize = 8 << 20;

/// Where the draft weights of one model are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DraftCache {
    /// Folder of the files; created when needed.
    pub folder: PathBuf,
    /// Directory of the model; its file is named after it.
    pub model: PathBuf,
    /// Smallest draft weights that are written to a file, in bytes.
    pub smallest_bytes: usize,
    /// Limit of the folder's bytes after a write. A single larger file is allowed.
    pub limit_bytes: u64,
}

/// Where the draft weights of a load came from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// Blocks in all.
    pub blocks: usize,
    /// Blocks taken from the file: all or none.
    pub cached: usize,
    /// One line about a damaged file or an unusable folder.
    pub note: Option<String>,
}

/// Hash of a block's source: `bytes` of rows in number format `format`.
pub fn source(format: u64, bytes: &[u8]) -> u128 {
    XxHash3_128::oneshot_with_seed(format, bytes)
}

/// The draft weights of one load: all are read from the file, or all are made.
#[derive(Debug)]
pub struct DraftBlocks {
    cache: DraftCache,
    path: PathBuf,
    description: Vec<u8>,
    /// Byte offset of every block, and the end of the last one.
    starts: Vec<usize>,
    stored: Option<Stored>,
    /// Hash of every block's source, set once.
    sources: Vec<OnceLock<u128>>,
    cached: AtomicUsize,
    changed: AtomicUsize,
    damaged: AtomicUsize,
    note: Option<String>,
}

/// Every file of draft weights in `folder`, least recently used first ([`CachedFile`]). A folder that does not exist counts
/// as empty; other files and links are left out.
///
/// # Errors
/// The folder cannot be read.
pub fn files(folder: &Path) -> io::Result<Vec<CachedFile>> {
    cache_file::files(&FORMAT, folder)
}

impl DraftBlocks {
    /// Looks for the file of a model's draft weights.
    ///
    /// `kind` distinguishes files of one model. `recipe` holds everything besides the source that determines a block: layout,
    /// shapes, number of bits. A file of another recipe is replaced. `sizes` are the bytes of every block, in order. Returns
    /// `None` if the draft weights are too small to be kept.
    pub fn open(
        cache: &DraftCache,
        kind: &str,
        recipe: &str,
        sizes: impl IntoIterator<Item = usize>,
    ) -> Option<DraftBlocks> {
        let mut starts = vec![0];
        let mut end = 0;
        for size in sizes {
            end += size;
            starts.push(end);
        }
        if end == 0 || end < cache.smallest_bytes {
            return None;
        }
        let path = cache.folder.join(file_name(&cache.model, kind));
        let description = description(recipe, &cache.model);
        let fits = |header: &cache_file::Header| {
            (header.segments, header.data_bytes) == ((starts.len() - 1) as u64, end as u64)
        };
        let (stored, note) = match Stored::open(&FORMAT, &path, recipe, fits) {
            Ok(stored) => {
                stored.touch(SystemTime::now());
                (Some(stored), None)
            }
            Err(Fault::Other) => (None, None),
            Err(Fault::Damaged(what)) => (None, Some(damaged(&path, &what))),
            Err(Fault::Io(error)) => (None, Some(unusable(&path, &error))),
        };
        Some(DraftBlocks {
            cache: cache.clone(),
            path,
            description,
            sources: (1..starts.len()).map(|_| OnceLock::new()).collect(),
            starts,
            stored,
            cached: AtomicUsize::new(0),
            changed: AtomicUsize::new(0),
            damaged: AtomicUsize::new(0),
            note,
        })
    }

    /// Bytes that [`DraftBlocks::save`] is expected to write; 0 if a file was found.
    pub fn unsaved_bytes(&self) -> usize {
        if self.is_found() { 0 } else { self.bytes() }
    }

    fn bytes(&self) -> usize {
        self.starts.last().copied().unwrap_or(0)
    }

    /// Returns true if there is a file to read.
    pub fn is_found(&self) -> bool {
        self.stored.is_some()
    }

    /// Returns true while all blocks that were read were sound and of this checkpoint. Once this is false,
    /// [`DraftBlocks::make_all`] must follow.
    pub fn is_sound(&self) -> bool {
        self.changed.load(Relaxed) + self.damaged.load(Relaxed) == 0
    }

    /// Forgets the file and what was read of it, so that all blocks are made.
    pub fn make_all(&mut self) {
        self.stored = None;
        // The checkpoint may have changed since its rows were hashed.
        self.sources.iter_mut().for_each(|source| *source = OnceLock::new());
        let damaged_blocks = self.damaged.swap(0, Relaxed);
        if damaged_blocks > 0 {
            self.note = Some(damaged(&self.path, &format!("{damaged_blocks} of {} blocks", self.sources.len())));
        }
        self.changed = AtomicUsize::new(0);
        self.cached = AtomicUsize::new(0);
    }

    /// Fills `out`, which holds a whole block, from the file, if there is one, and returns true. `out` is undefined if the block
    /// is damaged or has another source. Threads may call this for different blocks at once.
    pub fn read(&self, block: usize, source: u128, out: &mut [u8]) -> bool {
        if let Some(known) = self.sources.get(block) {
            known.get_or_init(|| source);
        }
        let Some(stored) = &self.stored else { return false };
        let counter = if stored.source(block).is_some_and(|stored| stored != source) {
            &self.changed
        } else if stored.read(block, self.starts[block] as u64, out) {
            &self.cached
        } else {
            &self.damaged
        };
        counter.fetch_add(1, Relaxed);
        true
    }

    /// Writes the file, unless there was a sound one. `blocks` yields them in order, after each was read or found missing by
    /// [`DraftBlocks::read`]; `poll` is called with the bytes written so far. A disk error is no error here but a note of the
    /// origin.
    ///
    /// # Errors
    /// Those of `poll`; no partial file remains.
    pub fn save<'a>(
        mut self,
        blocks: impl Iterator<Item = &'a [u8]>,
        poll: impl FnMut(usize) -> Result<()>,
    ) -> Result<Origin> {
        if self.stored.is_none() {
            make_room(&FORMAT, &self.path, self.cache.limit_bytes.saturating_sub(self.bytes() as u64));
            if let Err(error) = self.write(blocks, poll)? {
                self.note = Some(unusable(&self.path, &error));
            }
        }
        Ok(Origin { blocks: self.sources.len(), cached: self.cached.load(Relaxed), note: self.note })
    }

    fn write<'a>(
        &self,
        blocks: impl Iterator<Item = &'a [u8]>,
        mut poll: impl FnMut(usize) -> Result<()>,
    ) -> Result<io::Result<()>> {
        let mut file = match Writer::new(&FORMAT, &self.path, &self.description, self.sources.len()) {
            Ok(file) => file,
            Err(error) => return Ok(Err(error)),
        };
        let (mut done, mut asked) = (0, 0);
        for (block, source) in blocks.zip(&self.sources) {
            // A later load cannot check a block without the hash of its source.
            if let Err(error) = file.put(source.get().copied().unwrap_or_default(), block) {
                return Ok(Err(error));
            }
            done += block.len();
            if done - asked >= POLLED_BYTES {
                asked = done;
                poll(done)?;
            }
        }
        if done != self.bytes() {
            return Ok(Err(io::Error::other("blocks of other sizes than were announced")));
        }
        Ok(file.publish())
    }
}

/// Readable by the model's name, unique by a hash of its path: `owner--name-int4-0123456789abcdef.draft`.
fn file_name(model: &Path, kind: &str) -> String {
    let (name, hash) = (model_name(model), XxHash3_64::oneshot(model.as_os_str().as_encoded_bytes()));
    format!("{name}-{kind}-{hash:016x}.{}", FORMAT.suffix)
}

fn damaged(path: &Path, what: &str) -> String {
    format!("cached draft weights {} are damaged ({what}); they were made again", path.display())
}

fn unusable(path: &Path, error: &io::Error) -> String {
    format!(
        "draft weights are not cached: {}: {}; set QUANTSPEC_DRAFT_CACHE to another folder, or to off",
        path.display(),
        reason(error)
    )
}

#[cfg(test)]
mod tests;
