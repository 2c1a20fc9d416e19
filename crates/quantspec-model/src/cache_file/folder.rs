//! A folder of cache files: listing it, and removing files when it is full.

use super::{Format, HEADER_BYTES};
use crate::file::read_at;
use std::fs::{self, File, FileTimes};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// A temporary file without a write for this long belongs to a killed process.
const ABANDONED: Duration = Duration::from_secs(24 * 3600);

/// A cache file in a listing of its folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedFile {
    /// Where it is.
    pub path: PathBuf,
    /// Directory of the model; None if the file has another format version or the name is not UTF-8.
    pub model: Option<PathBuf>,
    /// Its length.
    pub bytes: u64,
    /// Time of the last read or write.
    pub used: SystemTime,
}

/// Every file of a format in `folder`, least recently used first, including temporary files of killed processes. A file
/// counts if it begins with the format's magic; links are not followed. A folder that does not exist counts as empty.
///
/// # Errors
/// The folder cannot be read.
pub(crate) fn files(format: &Format, folder: &Path) -> io::Result<Vec<CachedFile>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut files: Vec<_> = entries.flatten().filter_map(|entry| cached_file(format, entry.path())).collect();
    files.sort_by_key(|file| file.used);
    Ok(files)
}

fn cached_file(format: &Format, path: PathBuf) -> Option<CachedFile> {
    let metadata = fs::symlink_metadata(&path).ok().filter(fs::Metadata::is_file)?;
    let written = metadata.modified().ok()?;
    let used = metadata.accessed().map_or(written, |read| read.max(written));
    let abandoned = || SystemTime::now().duration_since(written).is_ok_and(|age| age > ABANDONED);
    let ours = match path.extension()?.to_str()? {
        suffix if suffix == format.suffix => true,
        "tmp" => path.file_name()?.to_str()?.starts_with(format.prefix) && abandoned(),
        _ => false,
    };
    let mut magic = [0; 8];
    let file = ours.then(|| File::open(&path).ok())??;
    read_at(&file, &mut magic, 0).ok()?;
    let found = CachedFile { model: model_of(format, &file, metadata.len()), bytes: metadata.len(), used, path };
    // Reading the header is not use.
    let _ = metadata.accessed().map(|before| file.set_times(FileTimes::new().set_accessed(before)));
    (magic == format.magic).then_some(found)
}

fn model_of(format: &Format, file: &File, length: u64) -> Option<PathBuf> {
    let header = format.header(file, length).ok()?;
    let mut description = vec![0; header.description_bytes as usize];
    read_at(file, &mut description, HEADER_BYTES as u64).ok()?;
    let description = String::from_utf8(description).ok()?;
    let (_, model) = description.split_once('\n')?;
    (!model.is_empty()).then(|| PathBuf::from(model))
}

/// Removes temporary files of killed processes, then the least recently used files, until the files other than `destination` have
/// at most `allowed_bytes`. Best effort: an unreadable folder cannot be written either, and the caller reports that.
pub(crate) fn make_room(format: &Format, destination: &Path, allowed_bytes: u64) {
    let Ok(mut files) = destination.parent().map_or(Ok(Vec::new()), |folder| files(format, folder)) else { return };
    files.retain(|file| file.path != destination);
    let mut held: u64 = files.iter().map(|file| file.bytes).sum();
    for file in files {
        let abandoned = file.path.extension().is_some_and(|extension| extension != format.suffix);
        if (abandoned || held > allowed_bytes) && fs::remove_file(&file.path).is_ok() {
            held -= file.bytes;
        }
    }
}
