//! Two levels of drafting: the draft network checks tokens of earlier text, then the target verifies what the network chose
//! (docs/design/levels.md).

use super::Target;
use super::copying::Sequence;
use crate::backend::{DraftConfig, Turn};
use crate::forward::Guess;
use quantspec_core::Result;
use std::collections::HashMap;

/// Least probability that all tokens of a guess are right. A right guess saves a draft step, and every guess costs a row. On
/// AVX-512 a row costs less than this share of a step; on slower paths it costs more.
pub(super) const LEAST: f64 = 0.3;

/// A target whose drafts are guessed from earlier text.
pub(super) struct Guessing<'a> {
    pub(super) target: &'a mut dyn Target,
    pub(super) guesses: Guesses<'a>,
}

/// Guesses for the sequences of a round.
pub(super) struct Guesses<'a> {
    pub(super) sequences: &'a mut HashMap<usize, Sequence>,
    /// Tokens guessed so far, and those that the network chose as well.
    pub(super) counts: (usize, usize),
}

impl Target for Guessing<'_> {
    fn draft(&mut self, config: &DraftConfig, turns: &mut [Turn]) -> Result<()> {
        self.target.draft_guessed(config, turns, &mut self.guesses)
    }

    fn set_proposed(&mut self, slot: usize, tokens: &[u32]) -> Result<()> {
        self.target.set_proposed(slot, tokens)
    }

    fn set_distribution(&mut self, slot: usize, offset: usize, q: &[f32]) -> Result<()> {
        self.target.set_distribution(slot, offset, q)
    }
}

impl Guess for Guesses<'_> {
    fn guess(&mut self, slot: usize, most: usize) -> Vec<u32> {
        self.sequences.get(&slot).map_or_else(Vec::new, |sequence| sequence.guess(most))
    }

    fn chosen(&mut self, slot: usize, guessed: usize, tokens: &[u32]) {
        if let Some(sequence) = self.sequences.get_mut(&slot) {
            sequence.choose(tokens);
        }
        self.counts = (self.counts.0 + guessed, self.counts.1 + tokens.len() - 1);
    }
}
