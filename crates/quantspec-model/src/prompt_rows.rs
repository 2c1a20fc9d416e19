//! Keys and values of prompts, exported and imported by a backend for the prompt cache ([`crate::prompt_cache`]).

use quantspec_core::{Error, Result};
use std::any::Any;
use std::ops::Range;

/// Exports and imports keys and values of the current prompt.
pub trait PromptRows {
    /// Names the kernels that determine the bits of a prompt's keys and values: a CPU's SIMD path, or a GPU.
    fn kernels(&self) -> String;

    /// Bytes of a token's keys and values in one layer, as [`PromptRows::export_rows`] yields them.
    fn row_bytes(&self) -> usize;

    /// Copies keys and values of prompt tokens in the current layer, after they were computed and before the layer is stored.
    /// Bit for bit, `[token][row_bytes]`, keys first.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] if there are no such tokens or `out` has another length. Device errors of a
    /// GPU.
    fn export_rows(&mut self, tokens: Range<usize>, out: &mut [u8]) -> Result<()>;

    /// Restores the bytes that [`PromptRows::export_rows`] gave for the same tokens and layer of a prompt with the same
    /// prefix. The tokens follow those the layer already has; later ones are computed.
    ///
    /// # Errors
    /// As [`PromptRows::export_rows`].
    fn import_rows(&mut self, tokens: Range<usize>, bytes: &[u8]) -> Result<()>;

    /// Copies what [`PromptRows::export_rows`] yields into memory of the backend's choice: the provided method uses the host's,
    /// a GPU its own.
    ///
    /// # Errors
    /// As [`PromptRows::export_rows`], and [`quantspec_core::ErrorKind::DoesNotFit`] if a device has no memory for the copy.
    fn hold_rows(&mut self, tokens: Range<usize>) -> Result<HeldRows> {
        let mut bytes = vec![0; tokens.len() * self.row_bytes()];
        self.export_rows(tokens, &mut bytes)?;
        Ok(Box::new(bytes))
    }

    /// [`PromptRows::import_rows`] of rows that [`PromptRows::hold_rows`] has copied, from its row `first` on.
    ///
    /// # Errors
    /// As [`PromptRows::import_rows`], and [`quantspec_core::ErrorKind::Internal`] if `held` has no such rows.
    fn import_held(&mut self, tokens: Range<usize>, held: &HeldRows, first: usize) -> Result<()> {
        let bytes = first * self.row_bytes()..(first + tokens.len()) * self.row_bytes();
        match held.downcast_ref::<Vec<u8>>().and_then(|held| held.get(bytes)) {
            Some(rows) => self.import_rows(tokens, rows),
            None => Err(Error::internal(format!("no rows are held for prompt tokens {tokens:?}"))),
        }
    }
}

/// Keys and values of consecutive prompt tokens in one layer, in a backend's memory ([`PromptRows::hold_rows`]).
pub type HeldRows = Box<dyn Any + Send + Sync>;
