//! Sampling by core's rules, for backends whose logits are in host memory.

use crate::network::Step;
use crate::sampler::{TokenSampler, Turn};
use quantspec_core::noise::Stream;
use quantspec_core::sample::{Sampler, check_left, choose};
use quantspec_core::verify::{Judge, Verdict};
use quantspec_core::{Error, Result};

/// The windows of a backend's slots, and what the acceptance rules keep of a round.
#[derive(Debug)]
pub struct HostSampler {
    vocab: usize,
    /// By slot: the last emitted token, then the tokens to verify or score. Grows, and never shrinks before
    /// [`HostSampler::clear`].
    windows: Vec<Vec<u32>>,
    judge: Judge,
}

/// A backend that samples on the host. It is a [`TokenSampler`].
pub trait SamplesOnHost: Send {
    /// Its sampler, and the logits `[rows][vocab]` of the last [`crate::network::Network::head`]; more rows may follow them.
    fn host_sampler(&mut self) -> (&mut HostSampler, &[f32]);
}

impl HostSampler {
    /// A sampler of `slots` empty windows.
    pub fn new(slots: usize, vocab: usize) -> HostSampler {
        HostSampler { vocab, windows: vec![Vec::new(); slots], judge: Judge::new() }
    }

    /// Empties a slot's window.
    pub fn clear(&mut self, slot: usize) {
        if let Some(window) = self.windows.get_mut(slot) {
            window.clear();
        }
    }

    /// Writes a slot's window from offset 0 on.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] if there is no such slot.
    pub fn set_window(&mut self, slot: usize, tokens: &[u32]) -> Result<()> {
        let slots = self.windows.len();
        let window = self.windows.get_mut(slot).ok_or_else(|| Error::internal(format!("slot {slot} of {slots}")))?;
        window.resize(window.len().max(tokens.len()), 0);
        window[..tokens.len()].copy_from_slice(tokens);
        Ok(())
    }

    /// The first `n` tokens of a slot's window.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] if it holds fewer.
    pub fn window(&self, slot: usize, n: usize) -> Result<&[u32]> {
        let window = self.windows.get(slot).and_then(|window| window.get(..n));
        window.ok_or_else(|| Error::internal(format!("the window of slot {slot} holds fewer than {n} tokens")))
    }

    /// The token at an offset of a slot's window.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] if there is none in the vocabulary.
    pub fn token(&self, slot: usize, offset: usize) -> Result<u32> {
        let token = self.windows.get(slot).and_then(|window| window.get(offset)).copied();
        token
            .filter(|token| (*token as usize) < self.vocab)
            .ok_or_else(|| Error::internal(format!("slot {slot} has no token at offset {offset}")))
    }

    /// A row of logits, `[vocab]`.
    fn row<'a>(&self, logits: &'a [f32], row: usize) -> Result<&'a [f32]> {
        let found = logits.get(row * self.vocab..(row + 1) * self.vocab);
        found.ok_or_else(|| Error::internal(format!("no logits of row {row}")))
    }

    /// [`TokenSampler::propose`] from the logits of the step's rows.
    fn propose(&mut self, step: &Step, turns: &[Turn], logits: &[f32]) -> Result<()> {
        for (index, row) in step.rows.iter().enumerate() {
            let turn = turns.iter().find(|turn| turn.slot == row.slot);
            let turn = turn.ok_or_else(|| Error::internal(format!("slot {} has no turn", row.slot)))?;
            let drafted = &self.window(row.slot, row.offset + 1)?[1..];
            let logits = turn.allowed(self.row(logits, index)?, drafted)?;
            let token = self.judge.propose(row.slot, row.offset, row.position + 1, &logits, &turn.sampler);
            let window = &mut self.windows[row.slot];
            window.resize(window.len().max(row.offset + 2), 0);
            window[row.offset + 1] = token;
        }
        Ok(())
    }

    /// [`TokenSampler::judge`] of one turn, from the logits of the step's rows.
    fn verdict(&self, step: &Step, turn: &Turn, logits: &[f32]) -> Result<Verdict> {
        let drafted = &self.window(turn.slot, turn.gamma + 1)?[1..];
        let of_turn: Vec<_> = step.rows.iter().enumerate().filter(|(_, row)| row.slot == turn.slot).collect();
        let rows = of_turn.iter().map(|(index, row)| {
            let before = drafted.get(..row.offset).unwrap_or(drafted);
            turn.allowed(self.row(logits, *index)?, before)
        });
        self.judge.judge_rows(turn.slot, drafted, turn.q, rows, &turn.sampler, turn.committed + 1)
    }
}

impl<B: SamplesOnHost> TokenSampler for B {
    fn logits(&mut self, row: usize) -> Result<Vec<f32>> {
        let (sampler, logits) = self.host_sampler();
        sampler.row(logits, row).map(<[f32]>::to_vec)
    }

    fn first(&mut self, turn: &Turn) -> Result<u32> {
        let (sampler, logits) = self.host_sampler();
        let logits = turn.allowed(sampler.row(logits, 0)?, &[])?;
        check_left(&logits)?;
        Ok(choose(&logits, &turn.sampler, turn.committed, Stream::Sample))
    }

    fn propose(&mut self, step: &Step, turns: &[Turn]) -> Result<()> {
        let (sampler, logits) = self.host_sampler();
        sampler.propose(step, turns, logits)
    }

    fn margin(&mut self, slot: usize, offset: usize) -> Result<f32> {
        Ok(self.host_sampler().0.judge.margin(slot, offset))
    }

    fn distribution(&mut self, slot: usize, offset: usize) -> Result<Vec<f32>> {
        self.host_sampler().0.judge.distribution(slot, offset).map(<[f32]>::to_vec)
    }

    fn draft_probabilities(&mut self, slot: usize, offset: usize, _: &Sampler) -> Result<Vec<f32>> {
        self.distribution(slot, offset)
    }

    fn set_distribution(&mut self, slot: usize, offset: usize, q: &[f32]) -> Result<()> {
        self.host_sampler().0.judge.keep(slot, offset, q.to_vec());
        Ok(())
    }

    fn judge(&mut self, step: &Step, turns: &[Turn]) -> Result<Vec<Verdict>> {
        let (sampler, logits) = self.host_sampler();
        turns.iter().map(|turn| sampler.verdict(step, turn, logits)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::Row;
    use quantspec_core::ErrorKind;
    use quantspec_core::config::{Pages, View, Weights};

    /// A sampler of two slots, and logits of three tokens in two rows: the first row prefers token 2, the second token 1.
    struct Logits(HostSampler, Vec<f32>);

    impl SamplesOnHost for Logits {
        fn host_sampler(&mut self) -> (&mut HostSampler, &[f32]) {
            (&mut self.0, &self.1)
        }
    }

    fn step<'a>(rows: &'a [Row]) -> Step<'a> {
        Step { weights: Weights::Full, view: View::Both, pages: Pages::All, choose_pages: false, rows }
    }

    #[test]
    fn windows_grow_by_what_is_proposed_and_judged_tokens_are_those_of_the_slot() {
        let mut backend = Logits(HostSampler::new(2, 3), vec![0.0, 1.0, 3.0, 0.5, 2.0, 0.0]);
        backend.0.set_window(1, &[0]).unwrap();
        let turn = |slot, gamma| Turn::new(slot, 7, gamma, Sampler::greedy());
        let rows = [0, 1].map(|offset| Row { slot: 1, offset, position: 7 + offset });
        backend.propose(&step(&rows[..1]), &[turn(1, 1)]).unwrap();
        assert_eq!(backend.0.window(1, 2).unwrap(), [0, 2]);
        assert_eq!((backend.margin(1, 0).unwrap(), backend.logits(1).unwrap()), (2.0, vec![0.5, 2.0, 0.0]));
        let verdicts = backend.judge(&step(&rows), &[turn(1, 1)]).unwrap();
        assert_eq!(verdicts, [Verdict { accepted: 1, token: 1 }]);
        backend.0.clear(1);
        assert!(backend.0.window(1, 1).is_err() && backend.0.window(0, 0).unwrap().is_empty());
    }

    #[test]
    fn slots_rows_and_tokens_that_are_not_there_are_errors() {
        let mut backend = Logits(HostSampler::new(1, 3), vec![0.0; 3]);
        backend.0.set_window(0, &[1, 9]).unwrap();
        let turn = |slot, gamma| Turn::new(slot, 7, gamma, Sampler::greedy());
        let rows = [0, 1].map(|offset| Row { slot: 0, offset, position: 7 + offset });
        let errors = [
            backend.0.set_window(1, &[1]).err(),
            backend.0.token(0, 1).err(),
            backend.0.token(0, 2).err(),
            backend.logits(1).err(),
            backend.propose(&step(&rows[..1]), &[turn(1, 1)]).err(),
            backend.propose(&step(&[Row { offset: 2, ..rows[0] }]), &[turn(0, 3)]).err(),
            backend.judge(&step(&rows), &[turn(0, 2)]).err(),
            backend.judge(&step(&rows), &[turn(0, 1)]).err(),
            backend.judge(&step(&rows), &[turn(1, 0)]).err(),
        ];
        for (case, error) in errors.into_iter().enumerate() {
            assert_eq!(error.map(|error| error.kind), Some(ErrorKind::Internal), "case {case}");
        }
        assert_eq!(backend.0.token(0, 0).unwrap(), 1);
    }
}
