//! Files of a checkpoint: opening, reading at offsets, and the errors of damaged ones.

use quantspec_core::{Error, ErrorKind, Result};
use std::fs::File;
use std::path::Path;

/// The first bytes of the text that a clone without Git LFS has in place of a large file.
pub(crate) const LFS_POINTER: &[u8; 8] = b"version ";

/// Opens a regular file; `name` is for messages.
///
/// # Errors
/// [`ErrorKind::Model`] for anything else that exists, [`ErrorKind::Io`] if the file cannot be opened.
pub(crate) fn open(path: &Path, name: &str) -> Result<File> {
    let failed = |error: std::io::Error| unreadable(name, &error);
    // Checked before opening: opening a pipe would block.
    if !path.metadata().map_err(failed)?.is_file() {
        return Err(damaged(name, "is not a file"));
    }
    File::open(path).map_err(failed)
}

/// Fills `out` with the bytes at `offset`.
pub(crate) fn read_at(file: &File, out: &mut [u8], offset: u64) -> std::io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, out, offset)
}

pub(crate) fn damaged(file: &str, what: &str) -> Error {
    Error::model(
        format!("{file} {what}"),
        "the file is damaged or its download is incomplete; fetch it again and compare its hash",
    )
}

/// The error for a file that begins with [`LFS_POINTER`].
pub(crate) fn no_content(file: &str) -> Error {
    Error::model(
        format!("{file} is a pointer of Git LFS, not the weights"),
        "fetch them with git lfs pull, or give the hub id",
    )
}

pub(crate) fn unreadable(file: &str, error: &std::io::Error) -> Error {
    Error::new(
        ErrorKind::Io,
        format!("cannot read {file}: {error}"),
        "check that the file exists, is complete and may be read",
    )
}

/// Makes foreign text safe for a one-line message: at most 120 characters, without control characters.
pub(crate) fn shown(text: &str) -> String {
    let end = if text.chars().nth(120).is_some() { "..." } else { "" };
    let plain = text.chars().take(120).map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c });
    plain.chain(end.chars()).collect()
}
