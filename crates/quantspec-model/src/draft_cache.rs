//! Draft weights on disk, so that a model is not quantised at every load.
//!
//! A file holds *blocks*: what a backend makes of a few rows of one tensor, in its own layout. Next to each block is a hash of the
//! checkpoint's bytes that it was made of. A backend reads those bytes at every load, so each block is checked against the
//! checkpoint's content, not against names, sizes or times, and hashing costs a hundredth of quantising. Each block also has a
//! checksum. A block that fails either test is made anew, and the file is then replaced. Drafts decide about speed only: nothing
//! in a file can change a token.
//!
//! A segment of the file (`cache_file.rs`) is a block. When a file is written, those that were used least recently are removed
//! until the folder holds no more than its limit.

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

/// Where the drafts of one model are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DraftCache {
    /// Folder of the files; made when it is needed.
    pub folder: PathBuf,
    /// Directory of the model: names its file.
    pub model: PathBuf,
    /// Drafts of fewer bytes are not worth a file.
    pub smallest_bytes: usize,
    /// Most bytes that the folder holds after a file was written, unless that file alone has more.
    pub limit_bytes: u64,
}

/// How the draft weights of a load came about.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// Blocks in all.
    pub blocks: usize,
    /// Blocks taken from the file.
    pub cached: usize,
    /// One line about a damaged file or a folder that cannot be used.
    pub note: Option<String>,
}

/// Hash of what a block is made of: `bytes` of rows whose number format is `format`.
pub fn source(format: u64, bytes: &[u8]) -> u128 {
    XxHash3_128::oneshot_with_seed(format, bytes)
}

/// The drafts of one load: each block is taken from the file where that holds it, and made otherwise.
#[derive(Debug)]
pub struct DraftBlocks {
    cache: DraftCache,
    path: PathBuf,
    description: Vec<u8>,
    /// Where each block starts among the blocks, and where the last one ends.
    starts: Vec<usize>,
    stored: Option<Stored>,
    /// Set once per block: the hash of its source.
    sources: Vec<OnceLock<u128>>,
    cached: AtomicUsize,
    changed: AtomicUsize,
    damaged: AtomicUsize,
    note: Option<String>,
}

/// Every file of draft weights in `folder`, least recently used first, as [`CachedFile`] describes it. A folder that does not exist
/// is empty; other files and links are left out.
///
/// # Errors
/// The folder cannot be read.
pub fn files(folder: &Path) -> io::Result<Vec<CachedFile>> {
    cache_file::files(&FORMAT, folder)
}

impl DraftBlocks {
    /// Looks for the file of a model's drafts.
    ///
    /// `kind` distinguishes files of one model. `recipe` is everything that decides about a block beside its source: layout,
    /// shapes, number of bits; a file of another recipe is replaced. `sizes` are the bytes of every block in order. `None`
    /// where the drafts are too small to be kept.
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

    /// Bytes that [`DraftBlocks::save`] will write as far as is known: none once a file was found.
    pub fn unsaved_bytes(&self) -> usize {
        if self.stored.is_some() { 0 } else { self.bytes() }
    }

    fn bytes(&self) -> usize {
        self.starts.last().copied().unwrap_or(0)
    }

    /// Fills `out`, all of a block and zero so far, from the file where that holds a sound block of this source, and by `make` otherwise.
    /// Threads may ask for different blocks at once.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn block(
        &self,
        block: usize,
        source: u128,
        out: &mut [u8],
        make: impl FnOnce(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        if let Some(known) = self.sources.get(block) {
            known.get_or_init(|| source);
        }
        if let Some(stored) = &self.stored {
            let counter = if stored.source(block).is_some_and(|stored| stored != source) {
                &self.changed
            } else if stored.read(block, self.starts[block] as u64, out) {
                &self.cached
            } else {
                &self.damaged
            };
            counter.fetch_add(1, Relaxed);
            if std::ptr::eq(counter, &self.cached) {
                return Ok(());
            }
            // `make` expects zeros.
            out.fill(0);
        }
        make(out)
    }

    /// After all blocks were asked for: writes the file unless the one that was found is sound and of this checkpoint.
    /// `blocks` yields them in order; `poll` is called now and then with the bytes written so far. Whatever the disk does is
    /// no error but a note of the origin.
    ///
    /// # Errors
    /// Those of `poll`; nothing is left behind then.
    pub fn save<'a>(
        mut self,
        blocks: impl Iterator<Item = &'a [u8]>,
        poll: impl FnMut(usize) -> Result<()>,
    ) -> Result<Origin> {
        let (changed, damaged_blocks) = (self.changed.load(Relaxed), self.damaged.load(Relaxed));
        if damaged_blocks > 0 {
            self.note = Some(damaged(&self.path, &format!("{damaged_blocks} of {} blocks", self.sources.len())));
        }
        if self.stored.is_none() || changed + damaged_blocks > 0 {
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
            // A block whose source was never given could not be checked by a later load.
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

/// Named for people by the model, and for certain by its whole path: `owner--name-int4-0123456789abcdef.draft`.
fn file_name(model: &Path, kind: &str) -> String {
    let (name, hash) = (model_name(model), XxHash3_64::oneshot(model.as_os_str().as_encoded_bytes()));
    format!("{name}-{kind}-{hash:016x}.{}", FORMAT.suffix)
}

fn damaged(path: &Path, what: &str) -> String {
    format!("cached draft weights {} are damaged ({what}); they were made anew", path.display())
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
