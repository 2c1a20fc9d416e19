//! Export and import of the current prompt's keys and values.

use super::CpuBackend;
use quantspec_core::Result;
use quantspec_model::backend::PromptRows;
use std::ops::Range;

impl PromptRows for CpuBackend {
    fn kernels(&self) -> String {
        format!("cpu {}", self.simd())
    }

    fn row_bytes(&self) -> usize {
        2 * self.config.kv_width() * size_of::<u16>()
    }

    fn export_rows(&mut self, tokens: Range<usize>, out: &mut [u8]) -> Result<()> {
        self.prompt.export(tokens, out)
    }

    fn import_rows(&mut self, tokens: Range<usize>, bytes: &[u8]) -> Result<()> {
        self.prompt.import(tokens, bytes)
    }
}
