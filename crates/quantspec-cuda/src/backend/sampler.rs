//! Choosing and judging tokens on the device.

use super::CudaBackend;
use super::describe::DeviceRow;
use crate::flags::check_flag;
use quantspec_core::Result;
use quantspec_core::sample::Sampler;
use quantspec_core::verify::Verdict;
use quantspec_model::backend::{Step, TokenSampler, Turn};

impl CudaBackend {
    /// Waits for the verdicts of a round.
    pub(super) fn conclude(&mut self, turns: &[Turn]) -> Result<Vec<Verdict>> {
        let (verdicts, flag) = self.sampling.verdicts(turns)?;
        self.staged = 0;
        check_flag(flag)?;
        Ok(verdicts)
    }
}

impl TokenSampler for CudaBackend {
    fn logits(&mut self, row: usize) -> Result<Vec<f32>> {
        let vocab = self.config.vocab;
        let logits = self.step.logits.read(row * vocab * 4, vocab)?;
        self.staged = 0;
        // Overflowing keys and values were stored as 0, so logits do not show them.
        check_flag(self.sampling.take_flag(self.layout.drafts)?)?;
        Ok(logits)
    }

    fn first(&mut self, slot: usize, position: usize, sampler: &Sampler) -> Result<u32> {
        let row = DeviceRow { slot: slot as i32, offset: 0, position: position as i32 - 1, token: -1 };
        self.step.description.write(0, &[row])?;
        self.staged = 0;
        let rows = self.step.description.at(0);
        let token = self.sampling.first(slot, sampler, rows, self.step.logits.at(0))?;
        self.prompting = false;
        check_flag(self.sampling.read()?)?;
        Ok(token)
    }

    fn propose(&mut self, step: &Step, turns: &[Turn]) -> Result<()> {
        let manner = self.sampling.learn(turns)?;
        for row in step.rows {
            self.sampling.drafts(row.slot, row.offset);
        }
        self.sampling.propose(step.rows.len(), self.layout.rows, self.step.logits.at(0), manner)
    }

    fn margin(&mut self, _slot: usize) -> Result<f32> {
        let margin = self.sampling.lead()?;
        // The host has waited for everything it sent.
        self.staged = 0;
        Ok(margin)
    }

    fn judge(&mut self, step: &Step, turns: &[Turn]) -> Result<Vec<Verdict>> {
        let manner = self.sampling.learn(turns)?;
        let described = self.sampling.describe(step.rows, turns)?;
        self.sampling.turns().write(0, &described)?;
        let (at, logits) = (self.sampling.turns().at(0), self.step.logits.at(0));
        self.sampling.judge(at, turns.len(), step.rows.len(), self.layout.rows, logits, manner)?;
        self.conclude(turns)
    }
}
