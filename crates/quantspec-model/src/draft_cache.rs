//! Draft weights on disk, so that a model is not quantised at every load.
//!
//! A file holds *blocks*: what a backend makes of a few rows of one tensor, in its own layout. Next to each block is a hash of the
//! checkpoint's bytes that it was made of. A backend reads those bytes at every load, so each block is checked against the
//! checkpoint's content, not against names, sizes or times, and hashing costs a hundredth of quantising. Each block also has a
//! checksum. A block that fails either test is made anew, and the file is then replaced. Drafts decide about speed only: nothing
//! in a file can change a token.
//!
//! All numbers are little-endian:
//!
//! ```text
//! 0   magic "QSDRAFTS"
//! 8   u32 version | u32 bytes of the description
//! 16  u64 blocks  | u64 bytes of all blocks
//! 32  u64 checksum of all bytes before it and of those from here to the blocks
//! 40  description: recipe, line feed, directory of the model
//!     index: per block { u128 hash of its source, u64 checksum }
//!     blocks, in order
//! ```
//!
//! Hashes are XXH3. A file is written under a temporary name and renamed when it is complete, so processes may share a folder. It
//! is not synced: a power failure may leave a file of zeros, which the checksums reveal. When a file is written, those that were
//! used least recently are removed until the folder holds no more than its limit.

mod folder;

pub use folder::{CachedFile, files};

use crate::safetensors::read_at;
use quantspec_core::Result;
use std::fs::{self, File, FileTimes};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::SystemTime;
use twox_hash::{XxHash3_64, XxHash3_128};

const MAGIC: [u8; 8] = *b"QSDRAFTS";
const VERSION: u32 = 2;
const HEADER_BYTES: usize = 40;
/// Where the header's checksum is; it covers the bytes before it.
const CHECKSUM_AT: usize = 32;
const ENTRY_BYTES: usize = 24;
/// Longest description read: far above a path and a recipe.
const DESCRIPTION_MAX: u32 = 64 << 10;
const SUFFIX: &str = "draft";
/// Temporary files are `PREFIX*.tmp`: users may keep files of their own in the folder.
const PREFIX: &str = ".quantspec-draft-";
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
pub struct Drafts {
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

/// A file whose header and index have been checked.
#[derive(Debug)]
struct Stored {
    file: File,
    index: Vec<u8>,
    data_at: u64,
}

/// Why a file is not used.
enum Fault {
    /// There is none, or it was made for other code or another shape: nothing to tell.
    Other,
    /// What is wrong with it.
    Damaged(String),
    Io(io::Error),
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Fault {
        if error.kind() == ErrorKind::NotFound { Fault::Other } else { Fault::Io(error) }
    }
}

impl Drafts {
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
    ) -> Option<Drafts> {
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
        // For people only: a name that is not UTF-8 is left out.
        let model = cache.model.to_str().unwrap_or_default();
        let description = format!("{recipe}\n{model}").into_bytes();
        let (stored, note) = match Stored::open(&path, &description, &starts) {
            Ok(stored) => (Some(stored), None),
            Err(Fault::Other) => (None, None),
            Err(Fault::Damaged(what)) => (None, Some(damaged(&path, &what))),
            Err(Fault::Io(error)) => (None, Some(unusable(&path, &error))),
        };
        Some(Drafts {
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

    /// Bytes that [`Drafts::save`] will write as far as is known: none once a file was found.
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
            let counter = match stored.read(block, self.starts[block], source, out) {
                Block::Sound => &self.cached,
                Block::OfOtherSource => &self.changed,
                Block::Damaged => &self.damaged,
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
            folder::make_room(&self.path, self.cache.limit_bytes.saturating_sub(self.bytes() as u64));
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
        let mut place = match Temporary::new(&self.path) {
            Ok(place) => place,
            Err(error) => return Ok(Err(error)),
        };
        let index_bytes = ENTRY_BYTES * self.sources.len();
        let index_at = HEADER_BYTES + self.description.len();
        let mut head = vec![0; index_at + index_bytes];
        head[..8].copy_from_slice(&MAGIC);
        head[8..12].copy_from_slice(&VERSION.to_le_bytes());
        head[12..16].copy_from_slice(&(self.description.len() as u32).to_le_bytes());
        head[16..24].copy_from_slice(&(self.sources.len() as u64).to_le_bytes());
        head[24..32].copy_from_slice(&(self.bytes() as u64).to_le_bytes());
        head[HEADER_BYTES..index_at].copy_from_slice(&self.description);
        let mut written = place.file.write_all(&head);
        let (mut index, mut done, mut asked) = (Vec::with_capacity(index_bytes), 0, 0);
        for (block, source) in blocks.zip(&self.sources) {
            written = written.and_then(|()| place.file.write_all(block));
            if written.is_err() {
                break;
            }
            index.extend_from_slice(&source.get().copied().unwrap_or_default().to_le_bytes());
            index.extend_from_slice(&XxHash3_64::oneshot(block).to_le_bytes());
            done += block.len();
            if done - asked >= POLLED_BYTES {
                asked = done;
                poll(done)?;
            }
        }
        // A block whose source was never given could not be checked by a later load.
        if written.is_ok() && (done, index.len()) != (self.bytes(), index_bytes) {
            return Ok(Err(io::Error::other("blocks of other sizes than were announced")));
        }
        if written.is_ok() {
            head[index_at..].copy_from_slice(&index);
            let sum = checksum(&head);
            head[CHECKSUM_AT..HEADER_BYTES].copy_from_slice(&sum.to_le_bytes());
        }
        Ok(written.and_then(|()| place.publish(&head)))
    }
}

/// What reading a block came to.
enum Block {
    Sound,
    OfOtherSource,
    Damaged,
}

impl Stored {
    /// Opens a file and checks everything but its blocks.
    fn open(path: &Path, description: &[u8], starts: &[usize]) -> std::result::Result<Stored, Fault> {
        let file = open_file(path)?;
        let (header, length) = read_header(&file)?;
        let (found, blocks, data_bytes) = (u64::from(header.description_bytes), header.blocks, header.data_bytes);
        let data_at = blocks
            .checked_mul(ENTRY_BYTES as u64)
            .and_then(|index| index.checked_add(HEADER_BYTES as u64 + found))
            .filter(|at| at.checked_add(data_bytes) == Some(length));
        let Some(data_at) = data_at else {
            return Err(Fault::Damaged(format!("{length} bytes long, which is not what its header says")));
        };
        // Before anything is allocated: a sparse file is as long as its header likes.
        let expected = (description.len(), starts.len() - 1, starts.last().copied().unwrap_or(0));
        if (found, blocks, data_bytes) != (expected.0 as u64, expected.1 as u64, expected.2 as u64) {
            return Err(Fault::Other);
        }
        let mut head = vec![0; usize::try_from(data_at).map_err(|_| Fault::Damaged("too large".to_string()))?];
        read_at(&file, &mut head, 0)?;
        if checksum(&head) != header.checksum {
            return Err(Fault::Damaged("its header".to_string()));
        }
        let (own, index) = head[HEADER_BYTES..].split_at(description.len());
        if own != description {
            return Err(Fault::Other);
        }
        // The time of last use; many file systems do not record reads.
        let _ = file.set_times(FileTimes::new().set_accessed(SystemTime::now()));
        Ok(Stored { index: index.to_vec(), file, data_at })
    }

    fn read(&self, block: usize, start: usize, source: u128, out: &mut [u8]) -> Block {
        let Some(entry) = self.index.get(block * ENTRY_BYTES..).and_then(|rest| rest.first_chunk::<ENTRY_BYTES>())
        else {
            return Block::Damaged;
        };
        let (of, sum) = entry.split_at(16);
        if of != source.to_le_bytes() {
            return Block::OfOtherSource;
        }
        match read_at(&self.file, out, self.data_at + start as u64) {
            Ok(()) if sum == XxHash3_64::oneshot(out).to_le_bytes() => Block::Sound,
            _ => Block::Damaged,
        }
    }
}

/// The fixed part of a file.
struct Header {
    description_bytes: u32,
    blocks: u64,
    data_bytes: u64,
    checksum: u64,
}

/// Opens a regular file for reading: opening a pipe would block.
fn open_file(path: &Path) -> std::result::Result<File, Fault> {
    if !fs::metadata(path)?.is_file() {
        return Err(Fault::Damaged("not a file".to_string()));
    }
    Ok(File::open(path)?)
}

/// Reads the fixed part; the second value is the file's length.
fn read_header(file: &File) -> std::result::Result<(Header, u64), Fault> {
    let length = file.metadata()?.len();
    if length < HEADER_BYTES as u64 {
        return Err(Fault::Damaged(format!("{length} bytes long, shorter than its header")));
    }
    let mut bytes = [0; HEADER_BYTES];
    read_at(file, &mut bytes, 0)?;
    if bytes[..8] != MAGIC {
        return Err(Fault::Damaged("not a file of draft weights".to_string()));
    }
    let four = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let eight = |at: usize| u64::from(four(at)) | u64::from(four(at + 4)) << 32;
    if four(8) != VERSION {
        return Err(Fault::Other);
    }
    if four(12) > DESCRIPTION_MAX {
        return Err(Fault::Damaged("its header".to_string()));
    }
    let header =
        Header { description_bytes: four(12), blocks: eight(16), data_bytes: eight(24), checksum: eight(CHECKSUM_AT) };
    Ok((header, length))
}

/// Checksum of everything before the blocks but the checksum itself.
fn checksum(head: &[u8]) -> u64 {
    XxHash3_64::oneshot_with_seed(XxHash3_64::oneshot(&head[..CHECKSUM_AT]), &head[HEADER_BYTES..])
}

/// The directory that has the model's name: `models--owner--name` of Hugging Face's models--owner--name/snapshots/revision.
fn named(model: &Path) -> &Path {
    let snapshots = model.parent().filter(|parent| parent.ends_with("snapshots"));
    snapshots.and_then(Path::parent).unwrap_or(model)
}

/// Named for people by the model, and for certain by its whole path: `owner--name-int4-0123456789abcdef.draft`.
fn file_name(model: &Path, kind: &str) -> String {
    let name = named(model).file_name().unwrap_or_default().to_string_lossy();
    let name = name.strip_prefix("models--").unwrap_or(&name);
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    // A file name may have 255 bytes.
    let name: String = name.chars().map(plain).take(100).collect();
    format!("{name}-{kind}-{:016x}.{SUFFIX}", XxHash3_64::oneshot(model.as_os_str().as_encoded_bytes()))
}

fn damaged(path: &Path, what: &str) -> String {
    format!("cached draft weights {} are damaged ({what}); they were made anew", path.display())
}

fn unusable(path: &Path, error: &io::Error) -> String {
    let text = error.to_string();
    let reason = text.split(" (os error").next().unwrap_or(&text).to_lowercase();
    format!(
        "draft weights are not cached: {}: {reason}; set QUANTSPEC_DRAFT_CACHE to another folder, or to off",
        path.display()
    )
}

/// A file that gets its final name when it is complete; dropping it earlier removes it.
struct Temporary {
    file: File,
    path: PathBuf,
    place: PathBuf,
    published: bool,
}

impl Temporary {
    fn new(place: &Path) -> io::Result<Temporary> {
        let folder = place.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder)?;
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let name = format!(
            "{PREFIX}{}.{}.{}.tmp",
            XxHash3_64::oneshot(place.as_os_str().as_encoded_bytes()),
            std::process::id(),
            since.as_nanos()
        );
        let path = folder.join(name);
        let file = File::options().write(true).create_new(true).open(&path)?;
        Ok(Temporary { file, path, place: place.to_path_buf(), published: false })
    }

    /// Writes the head over the room left for it, and moves the file to its place.
    fn publish(&mut self, head: &[u8]) -> io::Result<()> {
        use std::io::Seek;
        self.file.rewind()?;
        self.file.write_all(head)?;
        fs::rename(&self.path, &self.place)?;
        self.published = true;
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.published {
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests;
