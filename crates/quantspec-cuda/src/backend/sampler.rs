//! Choosing and judging tokens on the device.

use super::CudaBackend;
use super::describe::DeviceRow;
use crate::flags::{check_choice, check_flag};
use quantspec_core::Result;
use quantspec_core::sample::{Sampler, warp};
use quantspec_core::verify::Verdict;
use quantspec_model::backend::{Step, TokenSampler, Turn};

/// Returns true if penalties or masks would overwrite logits that the caller reads.
pub(super) fn keeps_logits(turns: &[Turn]) -> bool {
    turns.iter().any(|turn| turn.reads_logits) && turns.iter().any(Turn::changes_logits)
}

impl CudaBackend {
    /// Copies the logits of `rows` rows to the host if penalties will overwrite them and the caller reads them.
    pub(super) fn keep_logits(&mut self, rows: usize, turns: &[Turn]) -> Result<()> {
        if keeps_logits(turns) {
            let vocab = self.config.vocab;
            for row in 0..rows {
                self.unpenalised.push(self.step.logits.read(row * vocab * 4, vocab)?);
            }
        }
        Ok(())
    }

    /// Waits for the verdicts of a round.
    pub(super) fn read_verdicts(&mut self, turns: &[Turn]) -> Result<Vec<Verdict>> {
        let (verdicts, flag) = self.sampling.verdicts(turns)?;
        self.staged = 0;
        self.layout.drafts = false;
        check_choice(flag, turns.iter().any(Turn::forbids))?;
        Ok(verdicts)
    }
}

impl TokenSampler for CudaBackend {
    fn logits(&mut self, row: usize) -> Result<Vec<f32>> {
        let vocab = self.config.vocab;
        if let Some(logits) = self.unpenalised.get(row) {
            return Ok(logits.clone());
        }
        let logits = self.step.logits.read(row * vocab * 4, vocab)?;
        self.staged = 0;
        // Overflowing keys and values were stored as 0, so logits do not show them.
        check_flag(self.sampling.take_flag(self.layout.drafts)?)?;
        Ok(logits)
    }

    fn first(&mut self, turn: &Turn) -> Result<u32> {
        let row = DeviceRow { slot: turn.slot as i32, offset: 0, position: turn.committed as i32 - 1, token: -1 };
        self.step.description.write(0, &[row])?;
        self.staged = 0;
        let rows = self.step.description.at(0);
        let token = self.sampling.first(turn, rows, self.step.logits.at(0))?;
        self.prompting = false;
        check_choice(self.sampling.read()?, turn.forbids())?;
        Ok(token)
    }

    fn propose(&mut self, step: &Step, turns: &[Turn]) -> Result<()> {
        let features = self.sampling.upload(turns)?;
        // Those of a round were set before it was queued.
        if self.described.is_none() {
            self.sampling.upload_masks(step.rows, turns)?;
        }
        for row in step.rows {
            self.sampling.drafts(row.slot, row.offset);
        }
        self.sampling.propose(step.rows.len(), self.layout.rows, self.step.logits.at(0), features)
    }

    fn margin(&mut self, _slot: usize, _offset: usize) -> Result<f32> {
        let margin = self.sampling.margin()?;
        // The host has waited for all its copies.
        self.staged = 0;
        Ok(margin)
    }

    fn distribution(&mut self, slot: usize, offset: usize) -> Result<Vec<f32>> {
        self.sampling.distribution(slot, offset)
    }

    fn draft_probabilities(&mut self, slot: usize, offset: usize, sampler: &Sampler) -> Result<Vec<f32>> {
        let mut logits = self.sampling.distribution(slot, offset)?;
        logits.truncate(self.config.vocab);
        Ok(warp(&logits, sampler))
    }

    fn set_distribution(&mut self, slot: usize, offset: usize, q: &[f32]) -> Result<()> {
        self.sampling.set_distribution(slot, offset, q)
    }

    fn judge(&mut self, step: &Step, turns: &[Turn]) -> Result<Vec<Verdict>> {
        let features = self.sampling.upload(turns)?;
        self.sampling.upload_masks(step.rows, turns)?;
        self.keep_logits(step.rows.len(), turns)?;
        let described = self.sampling.describe(step.rows, turns)?;
        self.sampling.turns().write(0, &described)?;
        let (at, logits) = (self.sampling.turns().at(0), self.step.logits.at(0));
        self.sampling.judge(at, turns.len(), step.rows.len(), self.layout.rows, logits, features)?;
        self.read_verdicts(turns)
    }
}
