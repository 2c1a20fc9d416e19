//! A network drafter that copies earlier text where that has proved reliable: `METHOD+ngram`.
//!
//! A copied run costs no draft step. Its reliability is known before the first copy: every emitted token is compared with the
//! run that would have been copied, whichever drafter proposed it. So measuring it is free, and a text that never repeats itself
//! is decoded by the network alone. While the network drafts, shorter runs are guesses that it checks ([`super::levels`]).

use super::levels::{Guesses, Guessing, LEAST};
use super::ngram::{LONGEST, Text};
use super::{Drafter, Needs, Outlook, Proposed, Target};
use crate::backend::{Memory, Turn};
use quantspec_core::cache::GAMMA_MAX;
use quantspec_core::forecast::Prior;
use quantspec_core::verify::DraftDistribution;
use quantspec_core::{Error, Result};
use std::collections::HashMap;

/// Lengths of copied runs. A GPU records one graph per length.
const LENGTHS: [usize; 7] = [1, 2, 4, 6, 8, 12, GAMMA_MAX];

/// A copy must be expected to emit this many times the tokens of other rounds, as probabilities are estimated from few tokens.
const MARGIN: f64 = 1.05;

/// Copies instead of drafting by a network if that is expected to emit more tokens in the same time.
#[derive(Debug)]
pub struct Copying {
    network: Box<dyn Drafter>,
    sequences: HashMap<usize, Sequence>,
}

#[derive(Debug, Default)]
pub(super) struct Sequence {
    /// The emitted text, and during a draft the tokens that the network chose.
    text: Text,
    /// Tokens of the emitted text.
    emitted: usize,
    /// The last token, the tokens that followed it earlier, and the length of the match before it.
    run: Vec<u32>,
    agreement: usize,
    rates: MatchRates,
    /// Mean tokens of the network's rounds; `None` before the first.
    of_network: Option<f64>,
    /// The network drafts the current round.
    drafts: bool,
}

impl Sequence {
    fn extend(&mut self, tokens: &[u32]) {
        // A failed draft may have appended tokens that were not emitted.
        self.text.truncate(self.emitted);
        self.text.extend(tokens);
        self.emitted = self.text.len();
        (self.run, self.agreement) = self.text.continued(GAMMA_MAX);
    }

    /// Up to `most` tokens that are likely to follow the emitted and the chosen ones.
    pub(super) fn guess(&self, most: usize) -> Vec<u32> {
        let (run, agreement) = self.text.continued(most);
        let likely = self.rates.likely(agreement, LEAST).min(run.len() - 1);
        run[1..=likely].to_vec()
    }

    /// The network chose these tokens next.
    pub(super) fn choose(&mut self, tokens: &[u32]) {
        self.text.extend(tokens);
    }
}

/// Probability that the next token continues a match, by the match's length.
#[derive(Debug)]
struct MatchRates([Counts; LONGEST + 1]);

#[derive(Clone, Copy, Debug)]
struct Counts {
    matched: f64,
    seen: f64,
}

impl Default for MatchRates {
    fn default() -> MatchRates {
        MatchRates([Counts { matched: MatchRates::PRIOR.0, seen: MatchRates::PRIOR.1 }; LONGEST + 1])
    }
}

impl MatchRates {
    /// One of eight: copying needs evidence that the text repeats itself.
    const PRIOR: (f64, f64) = (0.5, 4.0);

    /// Weight of earlier observations at each token: quotations begin and end.
    const KEPT: f64 = 1.0 - 1.0 / 32.0;

    /// Records that the text continued with `emitted`, where `run` would have been copied.
    fn observe(&mut self, agreement: usize, run: &[u32], emitted: &[u32]) {
        for (i, (copied, token)) in run.iter().zip(emitted).enumerate() {
            let Counts { matched, seen } = &mut self.0[(agreement + i).min(LONGEST)];
            let right = copied == token;
            *matched = *matched * MatchRates::KEPT + f64::from(u8::from(right));
            *seen = *seen * MatchRates::KEPT + 1.0;
            if !right {
                break;
            }
        }
    }

    /// Probabilities that all of 1, 2, … [`GAMMA_MAX`] tokens continue a match.
    fn all_right(&self, agreement: usize) -> impl Iterator<Item = f64> {
        let chances = (0..GAMMA_MAX).map(move |i| self.0[(agreement + i).min(LONGEST)]);
        chances.scan(1.0, |all, Counts { matched, seen }| {
            *all *= matched / seen;
            Some(*all)
        })
    }

    /// Mean tokens of a round with γ copied ones, including the target's own.
    fn tokens(&self, agreement: usize, gamma: usize) -> f64 {
        1.0 + self.all_right(agreement).take(gamma).sum::<f64>()
    }

    /// Most tokens that all continue a match with this probability.
    fn likely(&self, agreement: usize, least: f64) -> usize {
        self.all_right(agreement).take_while(|&all| all >= least).count()
    }
}

impl Copying {
    /// A drafter that copies where that pays, and otherwise drafts by `network`.
    pub fn boxed(network: Box<dyn Drafter>) -> Box<dyn Drafter> {
        Box::new(Copying { network, sequences: HashMap::new() })
    }
}

impl Drafter for Copying {
    fn needs(&self) -> Needs {
        self.network.needs()
    }

    fn margins(&self) -> bool {
        self.network.margins()
    }

    fn candidates(&self) -> usize {
        self.network.candidates()
    }

    fn usable(&self, outlook: &Outlook) -> Vec<bool> {
        self.network.usable(outlook)
    }

    fn priors(&self, outlook: &Outlook) -> Vec<Prior> {
        self.network.priors(outlook)
    }

    fn method(&self, candidate: usize) -> Option<&'static str> {
        self.network.method(candidate)
    }

    fn copies(&self, slot: usize, most: usize, break_even: &dyn Fn(usize) -> Option<f64>) -> usize {
        let Some(sequence) = self.sequences.get(&slot) else { return 0 };
        let most = most.min(sequence.run.len() - 1);
        let lengths = LENGTHS.into_iter().filter(|&length| length < most).chain((most > 0).then_some(most));
        // Without costs a round must emit as many tokens as one of the network.
        let gain = |gamma: usize| {
            let break_even = break_even(gamma).or(sequence.of_network).unwrap_or(f64::INFINITY);
            sequence.rates.tokens(sequence.agreement, gamma) / break_even
        };
        lengths
            .map(|gamma| (gamma, gain(gamma)))
            .fold((0, MARGIN), |best, next| if next.1 > best.1 { next } else { best })
            .0
    }

    fn read_prompt(&mut self, slot: usize, prompt: &[u32], most_work: f64, progress: &mut dyn FnMut()) -> Result<bool> {
        self.network.read_prompt(slot, prompt, most_work, progress)
    }

    fn prefill(&mut self, slot: usize, prompt: &[u32], first: u32) -> Result<()> {
        self.network.prefill(slot, prompt, first)?;
        let mut sequence = Sequence::default();
        sequence.extend(&[prompt, &[first]].concat());
        self.sequences.insert(slot, sequence);
        Ok(())
    }

    fn propose(&mut self, target: &mut dyn Target, turns: &mut [Turn], candidate: usize) -> Result<Proposed> {
        for turn in turns.iter_mut().filter(|turn| turn.copied) {
            let sequence = self.sequences.get(&turn.slot);
            let copied = sequence.and_then(|sequence| sequence.run.get(1..=turn.gamma));
            let copied = copied.ok_or_else(|| Error::internal(format!("no run to copy for slot {}", turn.slot)))?;
            turn.q = DraftDistribution::OneHot;
            target.set_proposed(turn.slot, copied)?;
        }
        if !turns.iter().any(|turn| turn.drafts(0)) {
            return Ok(Proposed::default());
        }
        // Windows are set first: setting tokens discards a deferred draft.
        let guesses = Guesses { sequences: &mut self.sequences, counts: (0, 0) };
        let mut guessing = Guessing { target, guesses };
        let mut proposed = self.network.propose(&mut guessing, turns, candidate)?;
        proposed.guessed = guessing.guesses.counts;
        for turn in turns.iter() {
            if let Some(sequence) = self.sequences.get_mut(&turn.slot) {
                sequence.drafts = turn.drafts(0);
                sequence.text.truncate(sequence.emitted);
            }
        }
        Ok(proposed)
    }

    fn commit(&mut self, slot: usize, tokens: &[u32]) -> Result<()> {
        if let Some(sequence) = self.sequences.get_mut(&slot) {
            sequence.rates.observe(sequence.agreement, &sequence.run[1..], tokens);
            if std::mem::take(&mut sequence.drafts) {
                let emitted = tokens.len() as f64;
                let mean = sequence.of_network.get_or_insert(emitted);
                *mean += (emitted - *mean) / 16.0;
            }
            sequence.extend(tokens);
        }
        self.network.commit(slot, tokens)
    }

    fn close(&mut self, slot: usize) {
        self.sequences.remove(&slot);
        self.network.close(slot);
    }

    fn memory(&self) -> Memory {
        self.network.memory()
    }
}

#[cfg(test)]
mod tests {
    use super::super::SelfQuantised;
    use super::super::tests::Recorder;
    use super::*;
    use crate::backend::DraftConfig;
    use crate::forward::Guess;
    use quantspec_core::config::{Pages, View, Weights};
    use quantspec_core::sample::Sampler;

    /// A network that drafts zeros for its turns.
    #[derive(Debug)]
    struct Zeros;

    impl Drafter for Zeros {
        fn needs(&self) -> Needs {
            Needs::default()
        }

        fn prefill(&mut self, _: usize, _: &[u32], _: u32) -> Result<()> {
            Ok(())
        }

        fn propose(&mut self, target: &mut dyn Target, turns: &mut [Turn], _: usize) -> Result<Proposed> {
            for turn in turns.iter().filter(|turn| turn.drafts(0)) {
                target.set_proposed(turn.slot, &vec![0; turn.gamma])?;
            }
            Ok(Proposed { steps: 1, pages: Some(Pages::All), ..Proposed::default() })
        }

        fn commit(&mut self, _: usize, _: &[u32]) -> Result<()> {
            Ok(())
        }

        fn close(&mut self, _: usize) {}
    }

    /// A round of any number of copied tokens must emit three tokens.
    fn break_even(_: usize) -> Option<f64> {
        Some(3.0)
    }

    fn quoting() -> Vec<u32> {
        (1..100).chain(1..8).collect()
    }

    /// A copying drafter whose sequence in slot 0 has emitted the first `n` tokens after its prompt's second 8, one per
    /// round.
    fn after(n: u32) -> Box<dyn Drafter> {
        let mut drafter = Copying::boxed(Box::new(Zeros));
        drafter.prefill(0, &quoting(), 8).unwrap();
        (9..9 + n).for_each(|token| drafter.commit(0, &[token]).unwrap());
        drafter
    }

    #[test]
    fn a_text_that_quotes_is_copied_and_one_that_stops_is_not() {
        assert_eq!(after(0).copies(0, 12, &break_even), 0, "nothing is known yet");
        let mut drafter = after(20);
        assert_eq!(drafter.copies(0, 12, &break_even), 12);
        assert_eq!(drafter.copies(0, 5, &break_even), 5, "never more than is asked for");
        assert_eq!(drafter.copies(0, 0, &break_even), 0);
        assert_eq!(drafter.copies(0, 12, &|_| Some(f64::INFINITY)), 0, "costs are not known yet");
        assert_eq!(drafter.copies(3, 12, &break_even), 0, "no such sequence");
        // Runs become shorter if their length costs more than it yields.
        assert_eq!(drafter.copies(0, 12, &|gamma| Some(1.0 + 0.7 * gamma.saturating_sub(4) as f64)), 4);
        // The text leaves its source repeatedly: 8 tokens match, and the ninth does not.
        for _ in 0..40 {
            drafter.commit(0, &[200, 1, 2, 3, 4, 5, 6, 7, 8, 200]).unwrap();
        }
        drafter.commit(0, &[50, 51, 52, 53, 54, 55, 56, 57, 58, 200, 30, 31]).unwrap();
        assert_eq!(drafter.copies(0, 12, &break_even), 0, "few runs as long as that were right");
    }

    #[test]
    fn without_costs_a_copy_must_match_the_network() {
        let mut drafter = after(20);
        assert_eq!(drafter.copies(0, 4, &|_| None), 0, "the network has not drafted");
        let round = |drafter: &mut Box<dyn Drafter>, emitted: &[u32]| {
            let mut turns = [Turn::new(0, 0, 4, Sampler::greedy())];
            drafter.propose(&mut Recorder::default(), &mut turns, 0).unwrap();
            drafter.commit(0, emitted).unwrap();
        };
        round(&mut drafter, &[29, 30, 31]);
        assert_eq!(drafter.copies(0, 4, &|_| None), 4);
        (0..60).for_each(|i| round(&mut drafter, &[32 + 5 * i, 33 + 5 * i, 34 + 5 * i, 35 + 5 * i, 36 + 5 * i]));
        assert_eq!(drafter.copies(0, 4, &|_| None), 0, "all drafts stand, so that no copy is better");
    }

    /// Time of an answer in plain steps, with copies and without. A round of the network takes two and emits three tokens; a
    /// round of γ copied tokens takes 1 + γ/50.
    fn seconds(prompt: &[u32], answer: &[u32]) -> (f64, f64) {
        let verify = |gamma: usize| 1.0 + 0.02 * gamma as f64;
        let mut drafter = Copying::boxed(Box::new(Zeros));
        drafter.prefill(0, prompt, answer[0]).unwrap();
        let (mut at, mut seconds) = (1, 0.0);
        while at < answer.len() {
            let gamma = drafter.copies(0, 12, &|gamma| Some(3.0 / 2.0 * verify(gamma)));
            let mut turns = [Turn { copied: gamma > 0, ..Turn::new(0, 0, gamma.max(4), Sampler::greedy()) }];
            let mut target = Recorder::default();
            drafter.propose(&mut target, &mut turns, 0).unwrap();
            let right = target.proposed[0].1.iter().zip(&answer[at..]).take_while(|(a, b)| a == b).count();
            let emitted = if gamma > 0 { right + 1 } else { 3 };
            seconds += if gamma > 0 { verify(gamma) } else { 2.0 };
            let end = answer.len().min(at + emitted);
            drafter.commit(0, &answer[at..end]).unwrap();
            at = end;
        }
        (seconds, (answer.len() - 1) as f64 * 2.0 / 3.0)
    }

    #[test]
    fn quotations_gain_and_other_texts_lose_nothing() {
        let mut state = 1u64;
        let mut random = |n: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % n
        };
        // Every token has five successors, the first of them in half of the cases, so pairs repeat often without meaning.
        let mut natural = |n: usize| -> Vec<u32> {
            let mut token = 1;
            let next = |token: usize, choice: usize| (token * 31 + choice * choice * 17 + 7) % 500 + 1;
            let one = |_| {
                token = next(token, if random(2) == 0 { 0 } else { random(5) });
                token as u32
            };
            (0..n).map(one).collect()
        };
        let (prompt, answer) = (natural(3_000), natural(2_000));
        let (copying, network) = seconds(&prompt, &answer);
        assert!(copying < 1.01 * network, "{copying} against {network}");
        // Sentences of 40 tokens of the prompt, each after a few new words.
        let quotes: Vec<u32> =
            (0..40).flat_map(|i| [natural(10), prompt[70 * i..70 * i + 40].to_vec()].concat()).collect();
        let (copying, network) = seconds(&prompt, &quotes);
        assert!(1.3 * copying < network, "{copying} against {network}");
    }

    /// A network that gets three guesses, and chooses two of them and another token.
    fn two_of_three(guesses: &mut dyn Guess) {
        assert_eq!(guesses.guess(0, 3), [29, 30, 31]);
        guesses.chosen(0, 3, &[29, 30, 7]);
        assert!(guesses.guess(0, 3).is_empty(), "7 follows 30 nowhere");
        (40..48).for_each(|token| guesses.chosen(0, 0, &[token]));
        assert_eq!(guesses.guess(0, 1), [48]);
        assert!(guesses.guess(3, 3).is_empty(), "no such sequence");
    }

    #[test]
    fn guesses_follow_the_emitted_text_and_what_the_network_chose() {
        let config = DraftConfig { weights: Weights::Draft, view: View::Upper, pages: Pages::All };
        let mut drafter = Copying::boxed(SelfQuantised::boxed(config));
        drafter.prefill(0, &quoting(), 8).unwrap();
        (9..29).for_each(|token| drafter.commit(0, &[token]).unwrap());
        let mut turns = [Turn::new(0, 0, 4, Sampler::greedy())];
        let mut target = Recorder { network: Some(two_of_three), ..Recorder::default() };
        // Drafted tokens do not become part of the text, so the second draft gets the same guesses.
        for _ in 0..2 {
            assert_eq!(drafter.propose(&mut target, &mut turns, 0).unwrap().guessed, (3, 2));
        }
        let (mut quoted, mut new) = (Sequence::default(), Sequence::default());
        quoted.extend(&quoting());
        new.extend(&quoting());
        assert!(quoted.guess(3).is_empty(), "nothing is known yet");
        (0..20).for_each(|_| quoted.rates.observe(quoted.agreement, &[8, 9], &[8, 9]));
        assert_eq!((quoted.guess(2), new.guess(2)), (vec![8, 9], vec![]));
    }

    #[test]
    fn in_a_batch_each_sequence_copies_or_drafts() {
        let mut drafter = after(20);
        drafter.prefill(1, &[1, 2, 3], 4).unwrap();
        let mut turns = [1, 0].map(|slot| Turn { copied: slot == 0, ..Turn::new(slot, 0, 3, Sampler::greedy()) });
        let mut target = Recorder::default();
        let proposed = drafter.propose(&mut target, &mut turns, 0).unwrap();
        // Copied windows are set first: a deferred draft would be discarded.
        assert_eq!(target.proposed, [(0, vec![29, 30, 31]), (1, vec![0; 3])]);
        assert_eq!(turns.each_ref().map(|turn| turn.q), [DraftDistribution::Kept, DraftDistribution::OneHot]);
        assert_eq!(proposed.pages, Some(Pages::All));
        // If every sequence copies, the network is not used.
        let copied = drafter.propose(&mut target, &mut turns[1..], 0).unwrap();
        assert_eq!(copied, Proposed::default());
        drafter.close(0);
        assert!(drafter.propose(&mut target, &mut turns[1..], 0).is_err());
        assert_eq!(drafter.copies(0, 4, &break_even), 0);
    }
}
