//! Prompt lookup: proposes the tokens that followed the last tokens earlier in the prompt or the answer.
//!
//! It runs no network. Every occurrence of two neighbouring tokens is linked to the previous one, as in the match finder of
//! an LZ77 compressor. One index serves every length, a new token costs one insertion, and a text of n tokens takes O(n)
//! bytes. A proposal follows the links from the newest occurrence and uses the one with the longest match before it.

use super::{Drafter, Needs, Proposed, Target};
use crate::backend::Turn;
use quantspec_core::verify::DraftDistribution;
use quantspec_core::{Error, Result};
use std::collections::HashMap;

/// Length of the indexed tuples, and so the shortest match: a single token predicts too little.
const SHORTEST: usize = 2;

/// Longest match considered; the newest occurrence with this length is used.
pub(super) const LONGEST: usize = 8;

/// Occurrences that are compared. Bounds the time of a proposal if a pair of tokens is very frequent.
const COMPARED: usize = 256;

/// Drafts for any number of sequences.
#[derive(Debug, Default)]
pub struct Ngram {
    texts: HashMap<usize, Text>,
}

impl Drafter for Ngram {
    fn needs(&self) -> Needs {
        Needs::default()
    }

    fn prefill(&mut self, slot: usize, prompt: &[u32], first: u32) -> Result<()> {
        let mut text = Text::default();
        text.extend(prompt);
        text.extend(&[first]);
        self.texts.insert(slot, text);
        Ok(())
    }

    fn propose(&mut self, target: &mut dyn Target, turns: &mut [Turn], _candidate: usize) -> Result<Proposed> {
        for turn in turns.iter_mut() {
            let text = self.texts.get(&turn.slot);
            let text = text.ok_or_else(|| Error::internal(format!("no text of slot {}", turn.slot)))?;
            let (window, _) = text.continued(turn.gamma);
            turn.gamma = window.len() - 1;
            turn.q = DraftDistribution::OneHot;
            if turn.gamma > 0 {
                target.set_proposed(turn.slot, &window[1..])?;
            }
        }
        let steps = turns.iter().map(|turn| turn.gamma).max().unwrap_or(0);
        Ok(Proposed { steps, ..Proposed::default() })
    }

    fn commit(&mut self, slot: usize, tokens: &[u32]) -> Result<()> {
        if let Some(text) = self.texts.get_mut(&slot) {
            text.extend(tokens);
        }
        Ok(())
    }

    fn close(&mut self, slot: usize) {
        self.texts.remove(&slot);
    }
}

/// A text and its index. A position is a number of tokens; the tuple at a position ends there.
#[derive(Debug, Default)]
pub(super) struct Text {
    tokens: Vec<u32>,
    /// Newest position at which two tokens end.
    newest: HashMap<[u32; SHORTEST], u32>,
    /// By position: the previous position at which the same two tokens end; 0 if there is none.
    earlier: Vec<u32>,
}

impl Text {
    pub(super) fn extend(&mut self, tokens: &[u32]) {
        for &token in tokens {
            self.tokens.push(token);
            let position = self.tokens.len();
            // Positions 0 and 1 have fewer than two tokens before them.
            self.earlier.resize(position + 1, 0);
            if let Some(&pair) = self.tokens.last_chunk() {
                self.earlier[position] = self.newest.insert(pair, position as u32).unwrap_or(0);
            }
        }
    }

    /// Number of tokens.
    pub(super) fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Removes the tokens after the first `n`.
    pub(super) fn truncate(&mut self, n: usize) {
        while self.tokens.len() > n {
            if let Some(pair) = self.tokens.last_chunk().copied() {
                match self.earlier[self.tokens.len()] {
                    0 => self.newest.remove(&pair),
                    position => self.newest.insert(pair, position),
                };
            }
            self.tokens.pop();
        }
    }

    /// The last token, up to `n` tokens that may follow it, and the length of the match before them.
    pub(super) fn continued(&self, n: usize) -> (Vec<u32>, usize) {
        let end = self.tokens.len();
        let mut window = Vec::from(&self.tokens[end.saturating_sub(1)..]);
        let (agreement, position) = self.match_of_end();
        if let Some(position) = position {
            for next in position..position + n {
                // If the occurrence overlaps the end, it continues with the tokens just proposed, so a repeating text
                // continues to repeat.
                let token = self.tokens.get(next).copied().unwrap_or_else(|| window[next - end + 1]);
                window.push(token);
            }
        }
        (window, agreement)
    }

    /// The earlier position with the longest match (the newest wins ties), and the match's length.
    fn match_of_end(&self) -> (usize, Option<usize>) {
        let before = |position: usize| match self.earlier.get(position) {
            None | Some(0) => None,
            Some(&earlier) => Some(earlier as usize),
        };
        let agreeing = |position: usize| {
            let pairs = self.tokens[..position].iter().rev().zip(self.tokens.iter().rev());
            pairs.take(LONGEST).take_while(|(a, b)| a == b).count()
        };
        let mut best = (0, None);
        for position in std::iter::successors(before(self.tokens.len()), |&position| before(position)).take(COMPARED) {
            let length = agreeing(position);
            if length > best.0 {
                best = (length, Some(position));
            }
            if length == LONGEST {
                break;
            }
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::Recorder;
    use super::*;
    use proptest::prelude::*;
    use quantspec_core::sample::Sampler;

    fn turn(slot: usize, gamma: usize) -> Turn {
        Turn::new(slot, 0, gamma, Sampler::greedy())
    }

    fn proposed(text: &[u32], n: usize) -> Vec<u32> {
        let mut all = Text::default();
        all.extend(text);
        all.continued(n).0.split_off(1)
    }

    #[test]
    fn proposals_are_what_followed_before() {
        assert_eq!(proposed(&[1, 2, 3, 4, 5, 1, 2], 3), [3, 4, 5]);
        assert_eq!(proposed(&[1, 2, 3, 4, 5, 1, 2], 1), [3]);
        assert!(proposed(&[1, 2, 3, 4, 5, 1, 2], 0).is_empty());
        // A longer match wins over a newer one; the newest wins ties.
        assert_eq!(proposed(&[7, 1, 2, 3, 9, 1, 2, 4, 7, 1, 2], 1), [3]);
        assert_eq!(proposed(&[1, 2, 3, 9, 1, 2, 4, 8, 1, 2], 1), [4]);
        // Matches beyond the longest length considered do not favour an older position.
        let eight = [1, 2, 3, 4, 5, 6, 7, 8];
        let text = [&[9][..], &eight, &[50], &eight, &[60, 9], &eight].concat();
        assert_eq!(proposed(&text, 1), [60]);
    }

    #[test]
    fn a_repeating_text_is_continued() {
        assert_eq!(proposed(&[5, 5, 5], 4), [5, 5, 5, 5]);
        assert_eq!(proposed(&[0, 1, 2, 3, 1, 2], 7), [3, 1, 2, 3, 1, 2, 3]);
    }

    #[test]
    fn nothing_is_proposed_without_a_match() {
        for text in [&[1][..], &[1, 1], &[1, 2, 3], &[2, 9, 1, 3, 9]] {
            assert!(proposed(text, 5).is_empty(), "{text:?}");
        }
    }

    #[test]
    fn sequences_have_texts_of_their_own() {
        let (mut drafter, mut target) = (Ngram::default(), Recorder::default());
        drafter.prefill(0, &[1, 2, 3, 1], 2).unwrap();
        drafter.prefill(5, &[1, 2, 4, 1], 2).unwrap();
        drafter.prefill(2, &[1], 2).unwrap();
        let mut turns = [turn(5, 3), turn(2, 3), turn(0, 2)];
        let found = drafter.propose(&mut target, &mut turns, 0).unwrap();
        assert_eq!(found, Proposed { steps: 3, ..Proposed::default() });
        assert_eq!(turns.each_ref().map(|turn| turn.gamma), [3, 0, 2]);
        assert!(turns.iter().all(|turn| turn.q == DraftDistribution::OneHot));
        assert_eq!(target.proposed, [(5, vec![4, 1, 2]), (0, vec![3, 1])]);
        assert!(target.drafts.is_empty(), "prompt lookup runs no network");
        // Emitted tokens become part of the text, and a restarted answer replaces the old one.
        drafter.commit(2, &[1, 2]).unwrap();
        drafter.prefill(0, &[8, 9], 2).unwrap();
        let mut turns = [turn(2, 1), turn(0, 4)];
        assert_eq!(drafter.propose(&mut target, &mut turns, 0).unwrap().steps, 1);
        assert_eq!(turns.each_ref().map(|turn| turn.gamma), [1, 0]);
        drafter.close(2);
        drafter.close(2);
        assert!(drafter.propose(&mut target, &mut [turn(2, 1)], 0).is_err());
    }

    proptest! {
        #[test]
        fn a_proposal_is_that_of_a_plain_search(text in prop::collection::vec(0u32..4, 1..120), n in 0usize..9) {
            let end = text.len();
            let agreeing = |position: usize| {
                (1..=LONGEST.min(position)).take_while(|i| text[position - i] == text[end - i]).count()
            };
            let longest = (SHORTEST..end).map(agreeing).max().unwrap_or(0);
            let position = (SHORTEST..end).rev().find(|&position| longest >= SHORTEST && agreeing(position) == longest);
            let mut continued = text.clone();
            for i in 0..position.map_or(0, |_| n) {
                continued.push(continued[position.unwrap() + i]);
            }
            prop_assert_eq!(proposed(&text, n), &continued[end..]);
        }

        #[test]
        fn a_truncated_text_forgets_its_end(text in prop::collection::vec(0u32..4, 1..60), at in 0usize..60) {
            let (mut all, mut first) = (Text::default(), Text::default());
            let kept = at.min(text.len());
            all.extend(&text);
            all.truncate(kept);
            first.extend(&text[..kept]);
            prop_assert_eq!(all.len(), kept);
            prop_assert_eq!(&all.newest, &first.newest);
            all.extend(&text);
            first.extend(&text);
            prop_assert_eq!(all.continued(9), first.continued(9));
        }
    }
}
