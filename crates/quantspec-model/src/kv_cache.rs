//! The KV cache of a backend: pages, buffer and window of each slot.

use quantspec_core::Result;
use quantspec_core::page_pool::{PagePool, Prefix};

/// Holds the sequences. After a failed call a sequence is undefined and must be closed; a sequence opened later in its slot
/// is not affected.
pub trait KvCache: Send {
    /// The pages of all slots.
    fn page_pool(&self) -> &PagePool;

    /// [`KvCache::open_sharing`] without a prefix.
    ///
    /// # Errors
    /// Those of [`KvCache::open_sharing`].
    fn open(&mut self, slot: usize, capacity: usize) -> Result<()> {
        self.open_sharing(slot, capacity, None)
    }

    /// Reserves pages and a buffer for a sequence of up to `capacity` tokens. It begins with the tokens of the pages of
    /// `prefix`, which a prefill completed, and shares them: its own prefill does not write them.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::DoesNotFit`] if `capacity` exceeds [`crate::backend::Options::capacity`], and those of
    /// [`PagePool::open`]. The reference returns [`quantspec_core::ErrorKind::Internal`] for a slot that is already open.
    /// Device errors of a GPU.
    fn open_sharing(&mut self, slot: usize, capacity: usize, prefix: Option<Prefix>) -> Result<()>;

    /// Frees what [`KvCache::open`] reserved.
    fn close(&mut self, slot: usize);

    /// Writes known tokens into the slot's window from offset 0 on: the last emitted token, then tokens to verify or score
    /// that this backend did not draft.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] if the slot is not open or its window holds fewer tokens.
    fn set_window(&mut self, slot: usize, tokens: &[u32]) -> Result<()>;

    /// The slot's window, `n` tokens from offset 0.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] if the slot is not open or its window holds fewer tokens. Device errors of
    /// a GPU.
    fn window(&mut self, slot: usize, n: usize) -> Result<Vec<u32>>;

    /// Quantises `page` of the slot from the buffer, in all layers.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] if the slot is not open, the page is beyond it or shared, or a thread panicked.
    /// [`quantspec_core::ErrorKind::NotFinite`] if the page cannot be quantised; a GPU reports this later
    /// ([`crate::network::Network`]). Device errors of a GPU, and those of [`crate::backend::Hooks::poll`].
    fn flush(&mut self, slot: usize, page: usize) -> Result<()>;
}
