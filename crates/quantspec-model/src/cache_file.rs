//! Cache files on disk, and the folders that hold them.
//!
//! A file is a list of *segments*. The index stores a hash of each segment's source, and a checksum. All numbers are
//! little-endian:
//!
//! ```text
//! 0   magic, 8 bytes
//! 8   u32 version  | u32 bytes of the description
//! 16  u64 segments | u64 bytes of all segments
//! 32  u64 checksum of all bytes before it and of those from here to the segments
//! 40  description: recipe, line feed, directory of the model
//!     index: per segment { u128 hash of its source, u64 checksum }
//!     segments, in order
//! ```
//!
//! Hashes are XXH3. A file is written under a temporary name and renamed when it is complete, so processes may share a
//! folder. It is not synced: a power failure may leave a file of zeros, which the checksums detect. A reader that has a file
//! open can read it even after another process has removed it.

mod folder;

pub use folder::CachedFile;
pub(crate) use folder::{files, make_room};

use crate::file::read_at;
use std::fs::{self, File, FileTimes};
use std::io::{self, ErrorKind, Seek, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;
use twox_hash::XxHash3_64;

pub(crate) const HEADER_BYTES: usize = 40;
/// Offset of the header's checksum, which covers the bytes before it.
const CHECKSUM_AT: usize = 32;
pub(crate) const ENTRY_BYTES: usize = 24;
/// Longest description accepted, far above a path and a recipe.
const DESCRIPTION_MAX: u32 = 64 << 10;

/// Magic, version and file names of one kind of cache file.
#[derive(Debug)]
pub(crate) struct Format {
    pub(crate) magic: [u8; 8],
    pub(crate) version: u32,
    /// Extension of a file.
    pub(crate) suffix: &'static str,
    /// Prefix of temporary files, `prefix*.tmp`. Other files in the folder belong to users and stay.
    pub(crate) prefix: &'static str,
    /// Content of the files, for messages.
    pub(crate) holds: &'static str,
}

/// Why a file is not used.
#[derive(Debug)]
pub(crate) enum Fault {
    /// The file is missing, or of another version or shape. This is not reported.
    Other,
    /// Description of the damage.
    Damaged(String),
    Io(io::Error),
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Fault {
        if error.kind() == ErrorKind::NotFound { Fault::Other } else { Fault::Io(error) }
    }
}

/// The operating system's message for an error, without the error number.
pub(crate) fn reason(error: &io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or(&text).to_lowercase()
}

/// The fixed part of a file.
pub(crate) struct Header {
    pub(crate) description_bytes: u64,
    pub(crate) segments: u64,
    pub(crate) data_bytes: u64,
    checksum: u64,
}

impl Format {
    /// Opens a regular file and reads the fixed part of its header; the last value is the file's length. Other files are
    /// refused, as opening a pipe would block.
    fn open(&self, path: &Path) -> Result<(File, Header, u64), Fault> {
        if !fs::metadata(path)?.is_file() {
            return Err(Fault::Damaged("not a file".to_string()));
        }
        let file = File::open(path)?;
        let length = file.metadata()?.len();
        let header = self.header(&file, length)?;
        Ok((file, header, length))
    }

    fn header(&self, file: &File, length: u64) -> Result<Header, Fault> {
        if length < HEADER_BYTES as u64 {
            return Err(Fault::Damaged(format!("{length} bytes long, shorter than its header")));
        }
        let mut bytes = [0; HEADER_BYTES];
        read_at(file, &mut bytes, 0)?;
        if bytes[..8] != self.magic {
            return Err(Fault::Damaged(format!("not a file of {}", self.holds)));
        }
        let four = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let eight = |at: usize| u64::from(four(at)) | u64::from(four(at + 4)) << 32;
        if four(8) != self.version {
            return Err(Fault::Other);
        }
        if four(12) > DESCRIPTION_MAX {
            return Err(Fault::Damaged("its header".to_string()));
        }
        Ok(Header {
            description_bytes: u64::from(four(12)),
            segments: eight(16),
            data_bytes: eight(24),
            checksum: eight(CHECKSUM_AT),
        })
    }
}

/// Checksum of everything before the segments, except the checksum itself.
fn checksum(prologue: &[u8]) -> u64 {
    XxHash3_64::oneshot_with_seed(XxHash3_64::oneshot(&prologue[..CHECKSUM_AT]), &prologue[HEADER_BYTES..])
}

/// An open file; everything except the segments has been checked.
#[derive(Debug)]
pub(crate) struct Stored {
    file: File,
    index: Vec<u8>,
    data_at: u64,
}

impl Stored {
    /// Opens a file with this recipe; the model's directory in its description may differ. `fits` checks the header's sizes
    /// before anything is allocated: a sparse file can have any length that its header claims.
    pub(crate) fn open(
        format: &Format,
        path: &Path,
        recipe: &str,
        fits: impl FnOnce(&Header) -> bool,
    ) -> Result<Stored, Fault> {
        let (file, header, length) = format.open(path)?;
        let data_at = header
            .segments
            .checked_mul(ENTRY_BYTES as u64)
            .and_then(|index| index.checked_add(HEADER_BYTES as u64 + header.description_bytes))
            .filter(|at| at.checked_add(header.data_bytes) == Some(length));
        let Some(data_at) = data_at else {
            return Err(Fault::Damaged(format!("{length} bytes long, unlike the length in its header")));
        };
        if header.description_bytes <= recipe.len() as u64 || !fits(&header) {
            return Err(Fault::Other);
        }
        let mut prologue = vec![0; usize::try_from(data_at).map_err(|_| Fault::Damaged("too large".to_string()))?];
        read_at(&file, &mut prologue, 0)?;
        if checksum(&prologue) != header.checksum {
            return Err(Fault::Damaged("its header".to_string()));
        }
        let (own, index) = prologue[HEADER_BYTES..].split_at(header.description_bytes as usize);
        if own.strip_prefix(recipe.as_bytes()).and_then(<[u8]>::first) != Some(&b'\n') {
            return Err(Fault::Other);
        }
        Ok(Stored { index: index.to_vec(), file, data_at })
    }

    /// Sets the file's access time to its last use: many file systems do not record reads.
    pub(crate) fn touch(&self, when: SystemTime) {
        let _ = self.file.set_times(FileTimes::new().set_accessed(when));
    }

    /// Segments of the file.
    pub(crate) fn segments(&self) -> usize {
        self.index.len() / ENTRY_BYTES
    }

    fn entry(&self, segment: usize) -> Option<(u128, u64)> {
        let entry = self.index.get(segment * ENTRY_BYTES..)?.first_chunk::<ENTRY_BYTES>()?;
        let (source, sum) = entry.split_at(16);
        Some((u128::from_le_bytes(source.try_into().ok()?), u64::from_le_bytes(sum.try_into().ok()?)))
    }

    /// Hash of a segment's source.
    pub(crate) fn source(&self, segment: usize) -> Option<u128> {
        Some(self.entry(segment)?.0)
    }

    /// Reads a segment that begins `start` bytes after the first one. Returns false if it is damaged.
    pub(crate) fn read(&self, segment: usize, start: u64, out: &mut [u8]) -> bool {
        let Some((_, sum)) = self.entry(segment) else { return false };
        read_at(&self.file, out, self.data_at + start).is_ok() && XxHash3_64::oneshot(out) == sum
    }
}

/// A file being written. It gets its final name when it is complete; dropping it earlier removes it.
#[derive(Debug)]
pub(crate) struct Writer {
    file: File,
    path: PathBuf,
    destination: PathBuf,
    /// Header, description and index, which precede the segments.
    prologue: Vec<u8>,
    index: Vec<u8>,
    index_at: usize,
    done: u64,
    published: bool,
}

impl Writer {
    /// Begins a file of `segments` segments; creates its folder if needed.
    pub(crate) fn new(format: &Format, destination: &Path, description: &[u8], segments: usize) -> io::Result<Writer> {
        let folder = destination.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder)?;
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let name = format!(
            "{}{}.{}.{}.tmp",
            format.prefix,
            XxHash3_64::oneshot(destination.as_os_str().as_encoded_bytes()),
            std::process::id(),
            since.as_nanos()
        );
        let path = folder.join(name);
        let index_at = HEADER_BYTES + description.len();
        let mut prologue = vec![0; index_at + ENTRY_BYTES * segments];
        prologue[..8].copy_from_slice(&format.magic);
        prologue[8..12].copy_from_slice(&format.version.to_le_bytes());
        prologue[12..16].copy_from_slice(&(description.len() as u32).to_le_bytes());
        prologue[16..24].copy_from_slice(&(segments as u64).to_le_bytes());
        prologue[HEADER_BYTES..index_at].copy_from_slice(description);
        let file = File::options().write(true).create_new(true).open(&path)?;
        let index = Vec::with_capacity(ENTRY_BYTES * segments);
        let destination = destination.to_path_buf();
        let mut writer = Writer { file, path, destination, prologue, index, index_at, done: 0, published: false };
        writer.file.write_all(&writer.prologue)?;
        Ok(writer)
    }

    /// Appends a segment; `source` is the hash of its source.
    pub(crate) fn put(&mut self, source: u128, segment: &[u8]) -> io::Result<()> {
        self.file.write_all(segment)?;
        self.index.extend_from_slice(&source.to_le_bytes());
        self.index.extend_from_slice(&XxHash3_64::oneshot(segment).to_le_bytes());
        self.done += segment.len() as u64;
        Ok(())
    }

    /// Final path of the file.
    pub(crate) fn destination(&self) -> &Path {
        &self.destination
    }

    /// Writes the prologue into the space reserved for it, and moves the file to its final path.
    pub(crate) fn publish(mut self) -> io::Result<()> {
        if self.index.len() != self.prologue.len() - self.index_at {
            return Err(io::Error::other("not as many segments as were announced"));
        }
        self.prologue[24..32].copy_from_slice(&self.done.to_le_bytes());
        self.prologue[self.index_at..].copy_from_slice(&self.index);
        let sum = checksum(&self.prologue);
        self.prologue[CHECKSUM_AT..HEADER_BYTES].copy_from_slice(&sum.to_le_bytes());
        self.file.rewind()?;
        self.file.write_all(&self.prologue)?;
        fs::rename(&self.path, &self.destination)?;
        self.published = true;
        Ok(())
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if !self.published {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// The directory whose name is the model's: `models--owner--name` for Hugging Face's `models--owner--name/snapshots/revision`.
fn named(model: &Path) -> &Path {
    let snapshots = model.parent().filter(|parent| parent.ends_with("snapshots"));
    snapshots.and_then(Path::parent).unwrap_or(model)
}

/// The model as the first part of a file name.
pub(crate) fn model_name(model: &Path) -> String {
    let name = named(model).file_name().unwrap_or_default().to_string_lossy();
    let name = name.strip_prefix("models--").unwrap_or(&name);
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    // File names are limited to 255 bytes.
    name.chars().map(plain).take(100).collect()
}

/// The description, for people and listings: the recipe, and the model's path if it is UTF-8.
pub(crate) fn description(recipe: &str, model: &Path) -> Vec<u8> {
    format!("{recipe}\n{}", model.to_str().unwrap_or_default()).into_bytes()
}
