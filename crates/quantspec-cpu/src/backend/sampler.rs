//! Choosing and judging tokens on the host.

use super::CpuBackend;
use quantspec_core::sample::{Stream, check_left, choose};
use quantspec_core::verify::Verdict;
use quantspec_core::{Error, Result};
use quantspec_model::backend::{Step, TokenSampler, Turn};
use std::borrow::Cow;

impl TokenSampler for CpuBackend {
    fn logits(&mut self, row: usize) -> Result<Vec<f32>> {
        let vocab = self.config.vocab;
        self.rows
            .logits
            .get(row * vocab..(row + 1) * vocab)
            .map(<[f32]>::to_vec)
            .ok_or_else(|| Error::internal(format!("logits of row {row}")))
    }

    fn first(&mut self, turn: &Turn) -> Result<u32> {
        let logits = turn.allowed(&self.rows.logits[..self.config.vocab], &[])?;
        check_left(&logits)?;
        Ok(choose(&logits, &turn.sampler, turn.committed, Stream::Sample))
    }

    fn propose(&mut self, step: &Step, turns: &[Turn]) -> Result<()> {
        let vocab = self.config.vocab;
        for (j, row) in step.rows.iter().enumerate() {
            let turn = turns
                .iter()
                .find(|turn| turn.slot == row.slot)
                .ok_or_else(|| Error::internal(format!("no turn for slot {}", row.slot)))?;
            let logits = &self.rows.logits[j * vocab..(j + 1) * vocab];
            let window = &mut self.windows[row.slot];
            let drafted = window.get(1..row.offset + 1).unwrap_or_default();
            let logits = turn.allowed(logits, drafted)?;
            let token = self.judge.propose(row.slot, row.offset, row.position + 1, &logits, &turn.sampler);
            window.resize(window.len().max(row.offset + 2), 0);
            window[row.offset + 1] = token;
        }
        Ok(())
    }

    fn margin(&mut self, slot: usize, offset: usize) -> Result<f32> {
        Ok(self.judge.margin(slot, offset))
    }

    fn distribution(&mut self, slot: usize, offset: usize) -> Result<Vec<f32>> {
        self.judge.distribution(slot, offset).map(<[f32]>::to_vec)
    }

    fn set_distribution(&mut self, slot: usize, offset: usize, q: &[f32]) -> Result<()> {
        self.judge.keep(slot, offset, q.to_vec());
        Ok(())
    }

    fn judge(&mut self, step: &Step, turns: &[Turn]) -> Result<Vec<Verdict>> {
        let vocab = self.config.vocab;
        let mut verdicts = Vec::with_capacity(turns.len());
        for turn in turns {
            let drafted = self.windows[turn.slot].get(1..turn.gamma + 1).ok_or_else(|| {
                Error::internal(format!("slot {} has drafted fewer than {} tokens", turn.slot, turn.gamma))
            })?;
            let rows = step.rows.iter().enumerate().filter(|(_, row)| row.slot == turn.slot);
            let rows: Vec<Cow<[f32]>> = rows
                .map(|(j, row)| {
                    let before = drafted.get(..row.offset).unwrap_or(drafted);
                    turn.allowed(&self.rows.logits[j * vocab..(j + 1) * vocab], before)
                })
                .collect::<Result<_>>()?;
            let rows: Vec<&[f32]> = rows.iter().map(|row| &row[..]).collect();
            verdicts.push(self.judge.judge(turn.slot, drafted, turn.q, &rows, &turn.sampler, turn.committed + 1)?);
        }
        Ok(verdicts)
    }
}
