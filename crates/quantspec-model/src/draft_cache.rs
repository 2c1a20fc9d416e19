//! Draft weights on disk, so that a model is not quantised anew at every load.
//!
//! A file holds *blocks*: what a backend makes of a few rows of one tensor, in its own layout. Beside each block stands a hash of
//! the checkpoint's bytes it was made of. A backend reads those bytes at every load anyway, so each block is checked against the
//! checkpoint's content itself, not against names, sizes or times: a changed weight never meets an old draft, and the hash costs a
//! hundredth of quantising (docs/cli.md). Each block has a checksum of its own. What fails either test is made anew, block by
//! block, and the file is then replaced. Drafts decide about speed only: nothing a file holds can change a token.
//!
//! All numbers are little-endian:
//!
//! ```text
//! 0   magic "QSDRAFTS"
//! 8   u32 version | u32 bytes of the description
//! 16  u64 blocks  | u64 bytes of all blocks
//! 32  u64 nanoseconds of one thread to make a MiB of blocks | u64 checksum of all before it and of what follows up to the blocks
//! 48  description: recipe, line feed, directory of the model
//!     index: per block { u128 hash of its source, u64 checksum }
//!     blocks, in order
//! ```
//!
//! Hashes are XXH3. A file is written beside its place and moved there when it is complete, so processes may share a folder. It
//! is not synced: a power failure may leave a file of zeros, which the checksums reveal.

use crate::safetensors::read_at;
use quantspec_core::Result;
use std::fs::{self, File, FileTimes};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime};
use twox_hash::{XxHash3_64, XxHash3_128};

const MAGIC: [u8; 8] = *b"QSDRAFTS";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 48;
/// Where the header's checksum is; it covers the bytes before it.
const CHECKSUM_AT: usize = 40;
const ENTRY_BYTES: usize = 24;
/// Longest description read: far above a path and a recipe.
const DESCRIPTION_MAX: u32 = 64 << 10;
const SUFFIX: &str = "draft";

/// Beginning of the names of files on their way: the folder may be one in which others keep files, too.
const TEMPORARY: &str = ".quantspec-draft-";
/// Bytes read before reading is compared with making: enough for a disk to show its speed.
const TRIAL_BYTES: u64 = 32 << 20;
const MIB: u64 = 1 << 20;
/// Bytes written between two calls of the poll hook: a hundredth of a second of a good disk.
const POLLED_BYTES: usize = 8 << 20;
/// A temporary file older than this belongs to a process that was killed.
const ABANDONED: Duration = Duration::from_secs(24 * 3600);
/// A draft used since then is kept although its model is not there. A home may be shared by machines that keep models on disks
/// of their own, each of which sees the others' as gone; a machine or a job that needs a model uses its draft within a week, and
/// keeping one longer than that costs room alone.
const UNUSED: Duration = Duration::from_secs(7 * 24 * 3600);

/// Where the drafts of one model are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DraftCache {
    /// Folder of the files; made when it is needed.
    pub folder: PathBuf,
    /// Directory of the model: names its file, and decides how long the file is of use.
    pub model: PathBuf,
    /// Drafts of fewer bytes are not worth a file.
    pub smallest_bytes: usize,
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
    trial_bytes: u64,
    /// Set once per block: the hash of its source.
    sources: Vec<OnceLock<u128>>,
    cached: AtomicU64,
    changed: AtomicU64,
    damaged: AtomicU64,
    reading: Meter,
    making: Meter,
    note: Option<String>,
}

/// A file whose header and index have been checked.
#[derive(Debug)]
struct Stored {
    file: File,
    index: Vec<u8>,
    data_at: u64,
    made_ns_per_mib: u64,
}

/// Time of threads spent on bytes.
#[derive(Debug, Default)]
struct Meter {
    bytes: AtomicU64,
    ns: AtomicU64,
}

impl Meter {
    fn add(&self, bytes: usize, since: Instant) {
        self.bytes.fetch_add(bytes as u64, Relaxed);
        self.ns.fetch_add(u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX), Relaxed);
    }

    fn ns_per_mib(&self) -> u64 {
        let ns = u128::from(self.ns.load(Relaxed)) * u128::from(MIB) / u128::from(self.bytes.load(Relaxed).max(1));
        u64::try_from(ns).unwrap_or(u64::MAX)
    }
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
        // A directory whose name is no text cannot be found again, so its file is never known to be useless.
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
            trial_bytes: TRIAL_BYTES,
            cached: AtomicU64::new(0),
            changed: AtomicU64::new(0),
            damaged: AtomicU64::new(0),
            reading: Meter::default(),
            making: Meter::default(),
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
        if let Some(stored) = &self.stored
            && !self.reads_slower_than_it_makes(stored)
        {
            let started = Instant::now();
            let counter = match stored.read(block, self.starts[block], source, out) {
                Block::Sound => &self.cached,
                Block::OfOtherSource => &self.changed,
                Block::Damaged => &self.damaged,
            };
            counter.fetch_add(1, Relaxed);
            if std::ptr::eq(counter, &self.cached) {
                self.reading.add(out.len(), started);
                return Ok(());
            }
            // What makes a block finds it as it was asked for.
            out.fill(0);
        }
        let started = Instant::now();
        make(out)?;
        self.making.add(out.len(), started);
        Ok(())
    }

    /// A disk that is slower than this machine quantises is left alone.
    fn reads_slower_than_it_makes(&self, stored: &Stored) -> bool {
        self.reading.bytes.load(Relaxed) >= self.trial_bytes && self.reading.ns_per_mib() > stored.made_ns_per_mib
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
            self.sweep();
            if let Err(error) = self.write(blocks, poll)? {
                self.note = Some(unusable(&self.path, &error));
            }
        }
        let cached = usize::try_from(self.cached.load(Relaxed)).unwrap_or(usize::MAX);
        Ok(Origin { blocks: self.sources.len(), cached, note: self.note })
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
        let mut head = vec![0; HEADER_BYTES + self.description.len() + index_bytes];
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
        // A block that nobody asked for would be one that cannot be trusted.
        if written.is_ok() && (done, index.len()) != (self.bytes(), index_bytes) {
            return Ok(Err(io::Error::other("blocks of other sizes than were announced")));
        }
        head[..8].copy_from_slice(&MAGIC);
        head[8..12].copy_from_slice(&VERSION.to_le_bytes());
        head[12..16].copy_from_slice(&(self.description.len() as u32).to_le_bytes());
        head[16..24].copy_from_slice(&(self.sources.len() as u64).to_le_bytes());
        head[24..32].copy_from_slice(&(done as u64).to_le_bytes());
        head[32..40].copy_from_slice(&self.made_ns_per_mib().to_le_bytes());
        if written.is_ok() {
            head[HEADER_BYTES..][..self.description.len()].copy_from_slice(&self.description);
            head[HEADER_BYTES + self.description.len()..].copy_from_slice(&index);
            let sum = checksum(&head);
            head[CHECKSUM_AT..HEADER_BYTES].copy_from_slice(&sum.to_le_bytes());
        }
        Ok(written.and_then(|()| place.publish(&head)))
    }

    /// What making costs: as measured now, or as the file that is replaced says where hardly a block was made.
    fn made_ns_per_mib(&self) -> u64 {
        match &self.stored {
            Some(stored) if self.making.bytes.load(Relaxed) < MIB => stored.made_ns_per_mib,
            _ => self.making.ns_per_mib(),
        }
    }

    /// Removes drafts of models that are gone, and what killed processes left. Best effort: a folder that cannot be read is
    /// one that cannot be written, which the caller notes.
    fn sweep(&self) {
        let Ok(entries) = fs::read_dir(&self.cache.folder) else { return };
        for path in entries.flatten().map(|entry| entry.path()) {
            let gone = match path.extension().and_then(|extension| extension.to_str()) {
                // In this order: to ask whose a file is reads it, which many file systems note as use.
                Some(SUFFIX) => is_unused(&path) && model_of(&path).is_some_and(|model| is_gone(&model)),
                Some("tmp") => is_ours(&path) && is_abandoned(&path),
                _ => false,
            };
            if gone {
                let _ = fs::remove_file(&path);
            }
        }
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
        // For those that sweep: not every file system notes by itself that a file was read.
        let _ = file.set_times(FileTimes::new().set_accessed(SystemTime::now()));
        Ok(Stored { index: index.to_vec(), file, data_at, made_ns_per_mib: header.made_ns_per_mib })
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
    made_ns_per_mib: u64,
    checksum: u64,
}

/// Opens a file for reading, and nothing else: a pipe of that name would be waited for.
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
    let header = Header {
        description_bytes: four(12),
        blocks: eight(16),
        data_bytes: eight(24),
        made_ns_per_mib: eight(32),
        checksum: eight(CHECKSUM_AT),
    };
    Ok((header, length))
}

/// Checksum of everything before the blocks but the checksum itself.
fn checksum(head: &[u8]) -> u64 {
    XxHash3_64::oneshot_with_seed(XxHash3_64::oneshot(&head[..CHECKSUM_AT]), &head[HEADER_BYTES..])
}

/// The model that a file is of; None where the file does not say.
fn model_of(path: &Path) -> Option<PathBuf> {
    let file = open_file(path).ok()?;
    let (header, _) = read_header(&file).ok()?;
    let mut description = vec![0; header.description_bytes as usize];
    read_at(&file, &mut description, HEADER_BYTES as u64).ok()?;
    let description = String::from_utf8(description).ok()?;
    let (_, model) = description.split_once('\n')?;
    (!model.is_empty()).then(|| PathBuf::from(model))
}

fn is_ours(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(TEMPORARY))
}

fn is_abandoned(path: &Path) -> bool {
    fs::metadata(path).and_then(|metadata| metadata.modified()).is_ok_and(|written| is_before(written, ABANDONED))
}

/// Whether a draft was neither written nor read of late.
fn is_unused(path: &Path) -> bool {
    let Ok(metadata) = fs::metadata(path) else { return false };
    let is_old = |time: io::Result<SystemTime>| time.is_ok_and(|time| is_before(time, UNUSED));
    is_old(metadata.modified()) && is_old(metadata.accessed())
}

fn is_before(time: SystemTime, ago: Duration) -> bool {
    SystemTime::now().duration_since(time).is_ok_and(|age| age > ago)
}

/// Whether a model was removed: its place is empty although what it lay in is there and has something else in it. Where that is
/// missing too, or empty as the directory is on which a disk belongs, a file system is not mounted; where nobody may look, nothing is
/// known.
fn is_gone(model: &Path) -> bool {
    let beside = |folder: &Path| fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some());
    named(model).parent().is_some_and(beside) && matches!(model.try_exists(), Ok(false))
}

/// The directory that has the model's name: in Hugging Face's cache `models--owner--name` of models--owner--name/snapshots/revision.
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

/// A file on its way to its place; dropping it leaves nothing.
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
            "{TEMPORARY}{}.{}.{}.tmp",
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
mod tests {
    use super::*;
    use proptest::prelude::*;
    use quantspec_core::Error;
    use std::cell::RefCell;
    use std::os::unix::fs::FileExt;
    use std::sync::atomic::AtomicUsize;

    /// A folder of its own, removed at the end.
    struct Folder(PathBuf);

    impl Folder {
        fn new() -> Folder {
            static COUNT: AtomicUsize = AtomicUsize::new(0);
            let name = format!("quantspec-drafts-{}-{}", std::process::id(), COUNT.fetch_add(1, Relaxed));
            let path = std::env::temp_dir().join(name);
            fs::create_dir_all(path.join("model")).unwrap();
            Folder(path)
        }

        fn cache(&self) -> DraftCache {
            DraftCache { folder: self.0.join("drafts"), model: self.0.join("model"), smallest_bytes: 1 }
        }

        fn files(&self) -> Vec<PathBuf> {
            let mut files: Vec<_> = fs::read_dir(self.0.join("drafts")).unwrap().map(|e| e.unwrap().path()).collect();
            files.sort();
            files
        }

        fn file(&self) -> PathBuf {
            let files = self.files();
            assert_eq!(files.len(), 1, "{files:?}");
            files[0].clone()
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const SIZES: [usize; 4] = [100, 100, 7, 1000];

    /// What the "backend" of these tests makes of a source.
    fn quantised(source: u8, size: usize) -> Vec<u8> {
        (0..size).map(|i| source.wrapping_mul(31).wrapping_add(i as u8)).collect()
    }

    /// One load of a model whose blocks are made of these bytes: the blocks, which of them were made, and their origin.
    fn load_from(drafts: Drafts, sources: [u8; 4]) -> (Vec<Vec<u8>>, Vec<usize>, Origin) {
        let made = RefCell::new(Vec::new());
        let blocks: Vec<Vec<u8>> = (0..4)
            .map(|i| {
                let mut out = vec![0; SIZES[i]];
                let make = |out: &mut [u8]| {
                    assert!(out.iter().all(|byte| *byte == 0), "a maker finds zeros");
                    made.borrow_mut().push(i);
                    out.copy_from_slice(&quantised(sources[i], SIZES[i]));
                    Ok(())
                };
                drafts.block(i, source(0, &[sources[i]]), &mut out, make).unwrap();
                out
            })
            .collect();
        let origin = drafts.save(blocks.iter().map(Vec::as_slice), |_| Ok(())).unwrap();
        (blocks, made.into_inner(), origin)
    }

    fn load(cache: &DraftCache, sources: [u8; 4]) -> (Vec<usize>, Origin) {
        let drafts = Drafts::open(cache, "int4", "recipe", SIZES).unwrap();
        let (blocks, made, origin) = load_from(drafts, sources);
        for (i, block) in blocks.iter().enumerate() {
            assert_eq!(*block, quantised(sources[i], SIZES[i]), "block {i}");
        }
        assert_eq!(origin.cached + made.len(), origin.blocks);
        (made, origin)
    }

    const MADE: Origin = Origin { blocks: 4, cached: 0, note: None };
    const CACHED: Origin = Origin { blocks: 4, cached: 4, note: None };

    #[test]
    fn what_was_made_once_is_read() {
        let folder = Folder::new();
        assert_eq!(load(&folder.cache(), [1, 2, 3, 4]).1, MADE);
        let before = fs::read(folder.file()).unwrap();
        assert_eq!(
            before.len(),
            HEADER_BYTES + folder.description().len() + 4 * ENTRY_BYTES + SIZES.iter().sum::<usize>()
        );
        age(&folder.file(), 2 * UNUSED);
        assert_eq!(load(&folder.cache(), [1, 2, 3, 4]), (vec![], CACHED));
        assert_eq!(fs::read(folder.file()).unwrap(), before);
        assert!(!is_unused(&folder.file()));
    }

    #[test]
    fn a_changed_weight_never_meets_an_old_draft() {
        let folder = Folder::new();
        load(&folder.cache(), [1, 2, 3, 4]);
        let (made, origin) = load(&folder.cache(), [1, 2, 9, 4]);
        assert_eq!((made, origin), (vec![2], Origin { cached: 3, ..CACHED }));
        assert_eq!(load(&folder.cache(), [1, 2, 9, 4]).1, CACHED);
        // The same bytes in another number format are other weights.
        assert_ne!(source(0, b"1234"), source(1, b"1234"));
    }

    #[test]
    fn another_recipe_or_shape_replaces_the_file() {
        let folder = Folder::new();
        load(&folder.cache(), [1, 2, 3, 4]);
        for recipe in ["other", "recipe"] {
            let drafts = Drafts::open(&folder.cache(), "int4", recipe, SIZES).unwrap();
            assert_eq!(drafts.unsaved_bytes(), 1207);
            assert_eq!(load_from(drafts, [1, 2, 3, 4]).2, MADE);
        }
        let drafts = Drafts::open(&folder.cache(), "int4", "recipe", [100, 107, 1000]).unwrap();
        assert!(drafts.stored.is_none() && drafts.note.is_none());
        // Drafts of another kind have a file of their own.
        let drafts = Drafts::open(&folder.cache(), "int4-mlp", "recipe", SIZES).unwrap();
        load_from(drafts, [1, 2, 3, 4]);
        assert_eq!(folder.files().len(), 2);
        assert_eq!(load(&folder.cache(), [1, 2, 3, 4]).1, CACHED);
    }

    #[test]
    fn a_sparse_file_is_not_allocated() {
        let folder = Folder::new();
        load(&folder.cache(), [1, 2, 3, 4]);
        // 4 TiB of index, which the length of the file confirms.
        let blocks = (1u64 << 42) / ENTRY_BYTES as u64;
        let index_at = HEADER_BYTES + folder.description().len();
        let file = File::options().write(true).open(folder.file()).unwrap();
        file.write_all_at(&blocks.to_le_bytes(), 16).unwrap();
        let length = index_at as u64 + blocks * ENTRY_BYTES as u64 + SIZES.iter().sum::<usize>() as u64;
        file.set_len(length).unwrap();
        assert_eq!(load(&folder.cache(), [1, 2, 3, 4]).1, MADE);
        assert_eq!(load(&folder.cache(), [1, 2, 3, 4]).1, CACHED, "a sound file took its place");
    }

    #[test]
    fn small_drafts_are_not_kept() {
        let folder = Folder::new();
        for (smallest_bytes, kept) in [(1207, true), (1208, false)] {
            let cache = DraftCache { smallest_bytes, ..folder.cache() };
            assert_eq!(Drafts::open(&cache, "int4", "recipe", SIZES).is_some(), kept);
        }
        assert!(Drafts::open(&DraftCache { smallest_bytes: 0, ..folder.cache() }, "int4", "recipe", []).is_none());
    }

    #[test]
    fn a_folder_that_cannot_be_used_is_a_note() {
        let folder = Folder::new();
        fs::write(folder.0.join("drafts"), "a file").unwrap();
        let (made, origin) = load(&folder.cache(), [1, 2, 3, 4]);
        assert_eq!(made.len(), 4);
        let note = origin.note.unwrap();
        assert!(
            note.contains("are not cached") && note.contains("file exists") && !note.contains("os error"),
            "{note}"
        );
    }

    #[cfg(unix)]
    #[test]
    fn a_pipe_in_the_place_of_a_file_is_not_waited_for() {
        let folder = Folder::new();
        load(&folder.cache(), [1, 2, 3, 4]);
        let place = folder.file();
        fs::remove_file(&place).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(&place).status().unwrap().success());
        let (made, origin) = load(&folder.cache(), [1, 2, 3, 4]);
        assert_eq!(made.len(), 4);
        assert!(origin.note.is_some_and(|note| note.contains("not a file")));
        assert!(fs::metadata(place).unwrap().is_file(), "a sound file took its place");
    }

    #[test]
    fn an_interrupted_save_leaves_nothing() {
        let folder = Folder::new();
        let sizes = [POLLED_BYTES, POLLED_BYTES];
        let drafts = Drafts::open(&folder.cache(), "int4", "recipe", sizes).unwrap();
        let block = vec![0; POLLED_BYTES];
        let mut seen = Vec::new();
        let saved = drafts.save([&block[..], &block].into_iter(), |done| {
            seen.push(done);
            assert_eq!(folder.files().len(), 1, "a temporary file");
            if done > POLLED_BYTES { Err(Error::interrupted()) } else { Ok(()) }
        });
        assert_eq!(saved.unwrap_err().kind, quantspec_core::ErrorKind::Interrupted);
        assert_eq!(seen, [POLLED_BYTES, 2 * POLLED_BYTES]);
        assert_eq!(folder.files(), Vec::<PathBuf>::new());
    }

    #[test]
    fn a_disk_slower_than_quantising_is_left_alone() {
        let folder = Folder::new();
        load(&folder.cache(), [1, 2, 3, 4]);
        let before = fs::read(folder.file()).unwrap();
        for (trial_bytes, made_ns_per_mib, cached) in [(0, u64::MAX, 4), (u64::MAX, 0, 4), (0, 0, 0), (150, 0, 2)] {
            let mut drafts = Drafts::open(&folder.cache(), "int4", "recipe", SIZES).unwrap();
            drafts.trial_bytes = trial_bytes;
            drafts.stored.as_mut().unwrap().made_ns_per_mib = made_ns_per_mib;
            drafts.reading.ns.store(1_000_000, Relaxed);
            let (blocks, made, origin) = load_from(drafts, [1, 2, 3, 4]);
            assert_eq!(blocks[3], quantised(4, 1000));
            assert_eq!((made.len(), origin), (4 - cached, Origin { cached, ..CACHED }));
            assert_eq!(fs::read(folder.file()).unwrap(), before, "nothing is wrong with the file");
        }
    }

    #[test]
    fn what_making_costs_is_kept() {
        let folder = Folder::new();
        let mut drafts = Drafts::open(&folder.cache(), "int4", "recipe", SIZES).unwrap();
        drafts.making.bytes.store(4 * MIB, Relaxed);
        drafts.making.ns.store(14_000_000, Relaxed);
        assert_eq!(drafts.made_ns_per_mib(), 3_500_000);
        let started = Instant::now();
        load_from(drafts, [1, 2, 3, 4]);
        // The 14 ms, and what these blocks took, of a little more than 4 MiB.
        let most = (14_000_000 + started.elapsed().as_nanos() as u64) / 4;
        drafts = Drafts::open(&folder.cache(), "int4", "recipe", SIZES).unwrap();
        let kept = drafts.stored.as_ref().unwrap().made_ns_per_mib;
        assert!((3_400_000..=most).contains(&kept), "{kept} of {most}");
        // Too little was made to measure anything: the file's number stands.
        load_from(drafts, [1, 2, 3, 9]);
        drafts = Drafts::open(&folder.cache(), "int4", "recipe", SIZES).unwrap();
        assert_eq!(drafts.stored.unwrap().made_ns_per_mib, kept);
    }

    #[test]
    fn drafts_of_models_that_are_gone_are_swept() {
        let folder = Folder::new();
        let other = DraftCache { model: folder.0.join("other"), ..folder.cache() };
        fs::create_dir(&other.model).unwrap();
        load(&other, [1, 2, 3, 4]);
        let draft = folder.file();
        let drafts = folder.0.join("drafts");
        fs::write(drafts.join("notes.txt"), "not ours").unwrap();
        let fresh = format!("{TEMPORARY}3.2.1.tmp");
        fs::write(drafts.join(&fresh), "of a process that runs").unwrap();
        let left = format!("{TEMPORARY}1.2.3.tmp");
        for name in [&left, "thesis.tmp"] {
            let old = File::create(drafts.join(name)).unwrap();
            old.set_modified(SystemTime::now() - 2 * ABANDONED).unwrap();
        }
        load(&folder.cache(), [1, 2, 3, 4]);
        assert_eq!(folder.files().len(), 5);
        assert!(!drafts.join(left).exists());
        fs::remove_dir(&other.model).unwrap();
        load(&folder.cache(), [1, 2, 3, 4]);
        assert_eq!(folder.files().len(), 5, "reading sweeps nothing");
        load(&folder.cache(), [5, 2, 3, 4]);
        assert_eq!(folder.files().len(), 5, "it was just used");
        age(&draft, 2 * UNUSED);
        load(&folder.cache(), [6, 2, 3, 4]);
        let names: Vec<_> =
            folder.files().iter().map(|f| f.file_name().unwrap().to_str().unwrap().to_string()).collect();
        assert_eq!(names.len(), 4);
        assert!(["notes.txt", &fresh, "thesis.tmp"].iter().all(|name| names.contains(&name.to_string())));
    }

    /// As if a file had been used last so long ago.
    fn age(path: &Path, by: Duration) {
        let then = SystemTime::now() - by;
        let times = FileTimes::new().set_modified(then).set_accessed(then);
        File::options().write(true).open(path).unwrap().set_times(times).unwrap();
    }

    #[test]
    fn drafts_stay_where_a_model_may_only_be_out_of_sight() {
        let folder = Folder::new();
        let hub = |name: &str| format!("hub/models--{name}/snapshots/4e20de36");
        let (removed, hub_removed) = ("shelf/removed".to_string(), hub("owner--removed"));
        let kept = ["shelf/there", &hub("owner--there"), "disk/model", "mounted/model"].map(str::to_string);
        #[cfg(unix)]
        let kept = [&kept[..], &["shelf/loop".to_string()]].concat();
        let draft_of = |model: &String| {
            let cache = DraftCache { model: folder.0.join(model), ..folder.cache() };
            fs::create_dir_all(&cache.model).unwrap();
            load(&cache, [1, 2, 3, 4]);
            cache.folder.join(file_name(&cache.model, "int4"))
        };
        let gone = [&removed, &hub_removed].map(draft_of);
        let kept: Vec<_> = kept.iter().map(draft_of).collect();
        gone.iter().chain(&kept).for_each(|draft| age(draft, 2 * UNUSED));
        // A model deleted, one deleted from the hub's cache, and disks that are not mounted: elsewhere, and where a directory is kept for it.
        for directory in ["shelf/removed", "hub/models--owner--removed", "disk", "mounted/model"] {
            fs::remove_dir_all(folder.0.join(directory)).unwrap();
        }
        #[cfg(unix)]
        {
            // Nothing can be known of it, as where a directory may not be searched (but root may).
            let path = folder.0.join("shelf/loop");
            fs::remove_dir(&path).unwrap();
            std::os::unix::fs::symlink(&path, &path).unwrap();
        }
        load(&folder.cache(), [1, 2, 3, 4]);
        assert_eq!(gone.each_ref().map(|draft| draft.exists()), [false, false]);
        assert_eq!(kept.iter().filter(|draft| !draft.exists()).collect::<Vec<_>>(), Vec::<&PathBuf>::new());
    }

    #[test]
    fn processes_may_share_a_folder() {
        let folder = Folder::new();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for round in 0..20 {
                        let note = load(&folder.cache(), [round, 2, 3, 4]).1.note;
                        assert_eq!(note, None);
                    }
                });
            }
        });
        folder.file();
    }

    #[test]
    fn names_are_for_people_and_certain() {
        let name = |path: &str| file_name(Path::new(path), "int4");
        let hub =
            name("/cache/hub/models--meta-llama--Llama-3.2-1B/snapshots/4e20de362430cd3b72f300e6b0f18e50e7166e08");
        assert!(hub.starts_with("meta-llama--Llama-3.2-1B-int4-") && hub.ends_with(".draft"), "{hub}");
        assert_ne!(hub, name("/cache/hub/models--meta-llama--Llama-3.2-1B/snapshots/0000"));
        assert!(name("/models/ein Modell\n").starts_with("ein_Modell_-int4-"));
        assert!(name(&format!("/{}", "é".repeat(500))).len() < 150);
        assert!(name("/").starts_with("-int4-"));
    }

    impl Folder {
        fn description(&self) -> Vec<u8> {
            format!("recipe\n{}", self.0.join("model").display()).into_bytes()
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        #[test]
        fn no_damage_reaches_a_block(at in any::<prop::sample::Index>(), change in 1u8.., how in 0..4) {
            let folder = Folder::new();
            load(&folder.cache(), [1, 2, 3, 4]);
            let path = folder.file();
            let sound = fs::read(&path).unwrap();
            let mut bytes = sound.clone();
            let at = at.index(bytes.len());
            match how {
                0 => bytes.truncate(at),
                1 => bytes.insert(at, change),
                2 => bytes[at..].fill(0), // what a power failure leaves
                _ => bytes[at] ^= change,
            }
            // Zeros where zeros were.
            prop_assume!(bytes != sound);
            fs::write(&path, &bytes).unwrap();
            let (made, origin) = load(&folder.cache(), [1, 2, 3, 4]);
            prop_assert!(!made.is_empty());
            // A file of another version is no damage; every other change is told.
            let version = bytes.len() < 12 || bytes[8..12] != VERSION.to_le_bytes();
            prop_assert!(origin.note.is_some() || version);
            if let Some(note) = origin.note {
                prop_assert!(note.contains("damaged") && note.contains("made anew"), "{}", note);
            }
            prop_assert_eq!(load(&folder.cache(), [1, 2, 3, 4]).1, CACHED);
        }
    }
}
