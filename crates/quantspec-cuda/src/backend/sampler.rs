//! Choosing and judging tokens, and what the device flags.

use super::CudaBackend;
use quantspec_core::verify::Verdict;
use quantspec_core::{Error, Result};
use quantspec_model::backend::Turn;

/// Bits of the device's error flag (`FLAG_*` in kernels/numbers.cuh and quantize.cu).
const FLAG_CACHE: u32 = 1;
const FLAG_LOGITS: u32 = 2;
pub(crate) const FLAG_WEIGHTS: u32 = 4;

/// Turns what kernels flagged since the last look into an error.
pub(super) fn check_flag(flag: u32) -> Result<()> {
    Err(Error::not_finite(match flag {
        0 => return Ok(()),
        flag if flag & FLAG_WEIGHTS != 0 => "a weight is NaN or infinite, or its group does not fit half precision",
        flag if flag & FLAG_CACHE != 0 => "keys or values are NaN, infinite or beyond half precision",
        flag if flag & FLAG_LOGITS != 0 => "logits are NaN or infinite",
        _ => "a kernel found values that are not finite",
    }))
}

impl CudaBackend {
    /// Waits for the verdicts of a round.
    pub(super) fn conclude(&mut self, turns: &[Turn]) -> Result<Vec<Verdict>> {
        let (verdicts, flag) = self.sampling.verdicts(turns)?;
        self.staged = 0;
        self.plan.pending = false;
        check_flag(flag)?;
        Ok(verdicts)
    }
}
