//! A directory for a test's files.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// A directory that is removed on drop.
pub(crate) struct Folder(PathBuf);

impl Folder {
    /// An empty directory.
    pub(crate) fn empty() -> Folder {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("quantspec-tiny-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).expect("temporary directory");
        Folder(path)
    }

    /// Its path.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Writes a file. An existing file is removed first: on ext4, truncating and rewriting waits for the disk.
    pub(crate) fn write(&self, name: &str, bytes: &[u8]) {
        let _ = std::fs::remove_file(self.0.join(name));
        std::fs::write(self.0.join(name), bytes).expect("write");
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
