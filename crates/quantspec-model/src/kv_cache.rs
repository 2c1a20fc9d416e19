//! The slots of a backend: pages, buffer and window of each sequence.

use quantspec_core::Result;

/// Holds the sequences. A failed call leaves a sequence undefined (close it), and nothing that a sequence opened there later could meet.
pub trait KvCache: Send {
    /// Reserves pages and a buffer for a sequence of up to `capacity` tokens.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::DoesNotFit`] where `capacity` is beyond [`crate::backend::Options::capacity`],
    /// [`quantspec_core::ErrorKind::Internal`] where there is no such slot. The reference returns the latter for both, and
    /// for a slot that is open. Device errors of a GPU.
    fn open(&mut self, slot: usize, capacity: usize) -> Result<()>;

    /// Frees what [`KvCache::open`] reserved.
    fn close(&mut self, slot: usize);

    /// Puts known tokens into the slot's window from offset 0 on: the last emitted token, and tokens to be verified that
    /// this backend did not draft, or scored.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] where the slot is not open or its window holds fewer tokens.
    fn set_window(&mut self, slot: usize, tokens: &[u32]) -> Result<()>;

    /// The slot's window, `n` tokens from offset 0.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] where the slot is not open or its window holds fewer tokens. Device errors of
    /// a GPU.
    fn window(&mut self, slot: usize, n: usize) -> Result<Vec<u32>>;

    /// Quantises `page` of the slot from the buffer, in all layers.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] where the slot is not open or the page is beyond it, and where threads
    /// panicked. [`quantspec_core::ErrorKind::NotFinite`] where the page cannot be quantised, which a GPU says in
    /// [`crate::sampler::TokenSampler::judge`]. Device errors of a GPU, and those of [`crate::backend::Hooks::poll`].
    fn flush(&mut self, slot: usize, page: usize) -> Result<()>;
}
