//! Export and import of the current prompt's keys and values.

use super::CudaBackend;
use crate::device::Buffer;
use crate::images;
use quantspec_core::{Error, Result};
use quantspec_model::backend::{HeldRows, PromptRows};
use std::ops::Range;

impl CudaBackend {
    /// Location of the keys and values of prompt tokens, checked against `bytes` of them.
    fn prompt_tokens(&self, tokens: &Range<usize>, bytes: usize) -> Result<(&Buffer, usize)> {
        let each = self.row_bytes();
        if tokens.start > tokens.end || tokens.end > self.options.prompt_capacity || bytes != tokens.len() * each {
            return Err(Error::internal(format!("{bytes} bytes for prompt tokens {tokens:?} of {each} bytes")));
        }
        Ok((self.prompt_kv(), tokens.start * each))
    }
}

impl PromptRows for CudaBackend {
    fn kernels(&self) -> String {
        let info = &self.device.info;
        // The driver compiles PTX.
        let compiler = if images::are_native(info.capability, info.architecture) { "" } else { &info.driver };
        format!("{} sm_{} {compiler}", info.name, info.architecture)
    }

    fn row_bytes(&self) -> usize {
        2 * self.config.kv_width() * size_of::<u16>()
    }

    fn export_rows(&mut self, tokens: Range<usize>, out: &mut [u8]) -> Result<()> {
        let (buffer, at) = self.prompt_tokens(&tokens, out.len())?;
        buffer.read_into(at, out)
    }

    fn import_rows(&mut self, tokens: Range<usize>, bytes: &[u8]) -> Result<()> {
        let (buffer, at) = self.prompt_tokens(&tokens, bytes.len())?;
        buffer.write(at, bytes)
    }

    /// In device memory: keys and values of 60,000 tokens take gigabytes, whose copy over PCIe would delay every prompt.
    fn hold_rows(&mut self, tokens: Range<usize>) -> Result<HeldRows> {
        let bytes = tokens.len() * self.row_bytes();
        let held = self.device.allocate(bytes)?;
        let (buffer, at) = self.prompt_tokens(&tokens, bytes)?;
        held.copy_from(0, buffer, at, bytes)?;
        Ok(Box::new(held))
    }

    fn import_held(&mut self, tokens: Range<usize>, held: &HeldRows, first: usize) -> Result<()> {
        let each = self.row_bytes();
        let (buffer, at) = self.prompt_tokens(&tokens, tokens.len() * each)?;
        match held.downcast_ref::<Buffer>() {
            Some(held) => buffer.copy_from(at, held, first * each, tokens.len() * each),
            None => Err(Error::internal(format!("no rows are held for prompt tokens {tokens:?}"))),
        }
    }
}
