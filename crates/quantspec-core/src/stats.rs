//! Counters and times of decoding, with the names and definitions of vLLM and llama.cpp.

use std::collections::BTreeMap;

/// Counters of one of several methods.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MethodCounters {
    /// Verification steps, counted per sequence.
    pub rounds: usize,
    /// Drafted or copied tokens.
    pub drafted_tokens: usize,
    /// Of these, accepted ones.
    pub accepted_tokens: usize,
    /// Pages per KV head that draft steps read, summed over the drafted tokens.
    pub drafted_pages: usize,
}

/// Counters over any number of sequences and rounds. Times are wall-clock seconds, measured by the caller.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stats {
    prefill_tokens: usize,
    reused_tokens: usize,
    prefill_s: f64,
    draft_s: f64,
    verify_s: f64,
    rounds: usize,
    drafted_tokens: usize,
    /// Sum over drafted tokens of the pages read per KV head.
    drafted_pages: usize,
    /// Drafted tokens copied from earlier text instead of drafted by a network.
    copied_tokens: usize,
    /// Tokens of earlier text that a draft network checked, and those that it chose as well.
    guessed: (usize, usize),
    accepted_tokens: usize,
    /// Pages of the pool that ended sequences reserved, and those of them that were filled.
    pool_pages: (usize, usize),
    by_method: BTreeMap<&'static str, MethodCounters>,
    /// `accepted_at[i]`: rounds whose (i+1)-th drafted token was accepted. As long as the longest draft.
    accepted_at: Vec<usize>,
}

impl Stats {
    /// Adds a prompt: `tokens` processed in `seconds`, and `reused` tokens from the prompt cache.
    pub fn prefill(&mut self, tokens: usize, reused: usize, seconds: f64) {
        self.prefill_tokens += tokens;
        self.reused_tokens += reused;
        self.prefill_s += seconds;
    }

    /// Adds the drafting time of a round, over all sequences.
    pub fn draft(&mut self, seconds: f64) {
        self.draft_s += seconds;
    }

    /// Adds the verification time of a round, over all sequences.
    pub fn verify(&mut self, seconds: f64) {
        self.verify_s += seconds;
    }

    /// Adds one sequence's round: `gamma` tokens drafted (0 for a plain step), the first `accepted` of them
    /// accepted.
    pub fn round(&mut self, gamma: usize, accepted: usize) {
        self.rounds += 1;
        self.drafted_tokens += gamma;
        self.accepted_tokens += accepted;
        if self.accepted_at.len() < gamma {
            self.accepted_at.resize(gamma, 0);
        }
        self.accepted_at.iter_mut().take(accepted).for_each(|count| *count += 1);
    }

    /// Records the method of a sequence's round, one of several.
    pub fn method(&mut self, name: &'static str, round: MethodCounters) {
        let sum = self.by_method.entry(name).or_default();
        sum.rounds += round.rounds;
        sum.drafted_tokens += round.drafted_tokens;
        sum.accepted_tokens += round.accepted_tokens;
        sum.drafted_pages += round.drafted_pages;
    }

    /// Adds drafted tokens that were copied from earlier text instead of drafted by a network.
    pub fn copied(&mut self, tokens: usize) {
        self.copied_tokens += tokens;
    }

    /// Adds tokens of earlier text that a draft network checked, of which it chose `right` as well.
    pub fn guessed(&mut self, tokens: usize, right: usize) {
        self.guessed = (self.guessed.0 + tokens, self.guessed.1 + right);
    }

    /// Adds the pages that a sequence's drafts read in a round: `pages` per KV head, summed over its drafted tokens.
    pub fn pages(&mut self, pages: usize) {
        self.drafted_pages += pages;
    }

    /// Adds a sequence that ended: pages of the pool that it reserved, and those of them that it filled. Pages that it shared
    /// are neither.
    pub fn pool_pages(&mut self, reserved: usize, filled: usize) {
        self.pool_pages = (self.pool_pages.0 + reserved, self.pool_pages.1 + filled);
    }

    /// Prompt tokens that came from the prompt cache.
    pub fn reused_tokens(&self) -> usize {
        self.reused_tokens
    }

    /// Seconds of prefill.
    pub fn prefill_s(&self) -> f64 {
        self.prefill_s
    }

    /// Seconds of drafting and verification.
    pub fn decode_s(&self) -> f64 {
        self.draft_s + self.verify_s
    }

    /// Seconds of drafting.
    pub fn draft_s(&self) -> f64 {
        self.draft_s
    }

    /// Seconds of verification.
    pub fn verify_s(&self) -> f64 {
        self.verify_s
    }

    /// Prompt tokens per second; `None` before any time was measured.
    pub fn prefill_tokens_per_s(&self) -> Option<f64> {
        (self.prefill_s > 0.0).then(|| self.prefill_tokens as f64 / self.prefill_s)
    }

    /// Tokens emitted by rounds: all but the first of each sequence, which prefill yields.
    fn decode_tokens(&self) -> usize {
        self.rounds + self.accepted_tokens
    }

    /// Tokens emitted by rounds per second; `None` before any time was measured.
    pub fn decode_tokens_per_s(&self) -> Option<f64> {
        (self.decode_s() > 0.0).then(|| self.decode_tokens() as f64 / self.decode_s())
    }

    /// Verification steps, counted per sequence, including plain steps.
    pub fn rounds(&self) -> usize {
        self.rounds
    }

    /// Drafted tokens per round; `None` before the first round.
    pub fn gamma_mean(&self) -> Option<f64> {
        (self.rounds > 0).then(|| self.drafted_tokens as f64 / self.rounds as f64)
    }

    /// Drafted tokens.
    pub fn drafted_tokens(&self) -> usize {
        self.drafted_tokens
    }

    /// Tokens of earlier text that a draft network checked, and those that it chose as well.
    pub fn guessed_tokens(&self) -> (usize, usize) {
        self.guessed
    }

    /// Drafted tokens copied from earlier text instead of drafted by a network.
    pub fn copied_tokens(&self) -> usize {
        self.copied_tokens
    }

    /// Mean pages per KV head that a draft step read, 0 if the drafter reads none; `None` if nothing was drafted, or all of it
    /// was copied.
    pub fn draft_pages_mean(&self) -> Option<f64> {
        let steps = self.drafted_tokens - self.copied_tokens;
        (steps > 0).then(|| self.drafted_pages as f64 / steps as f64)
    }

    /// Drafted tokens that were accepted.
    pub fn accepted_tokens(&self) -> usize {
        self.accepted_tokens
    }

    /// Pages of the pool that ended sequences reserved.
    pub fn reserved_pages(&self) -> usize {
        self.pool_pages.0
    }

    /// Share of these pages that were never filled; `None` if no page was reserved.
    pub fn pool_waste(&self) -> Option<f64> {
        let (reserved, filled) = self.pool_pages;
        (reserved > 0).then(|| (reserved - filled) as f64 / reserved as f64)
    }

    /// Counters of each of several methods; empty with a single one.
    pub fn by_method(&self) -> &BTreeMap<&'static str, MethodCounters> {
        &self.by_method
    }

    /// Accepted / drafted; `None` if nothing was drafted.
    pub fn acceptance_rate(&self) -> Option<f64> {
        (self.drafted_tokens > 0).then(|| self.accepted_tokens as f64 / self.drafted_tokens as f64)
    }

    /// Tokens per verification step: 1 + accepted / rounds; `None` if nothing was drafted.
    pub fn mean_acceptance_length(&self) -> Option<f64> {
        (self.drafted_tokens > 0).then(|| 1.0 + self.accepted_tokens as f64 / self.rounds as f64)
    }

    /// Element i: rounds whose (i+1)-th drafted token was accepted / all rounds. The sum is [`Stats::mean_acceptance_length`]
    /// − 1. `None` if nothing was drafted.
    pub fn acceptance_rate_per_position(&self) -> Option<Vec<f64>> {
        let rate = |&accepted: &usize| accepted as f64 / self.rounds as f64;
        (self.drafted_tokens > 0).then(|| self.accepted_at.iter().map(rate).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_follow_their_definitions() {
        let mut stats = Stats::default();
        stats.prefill(100, 60, 0.5);
        for (gamma, accepted) in [(4, 4), (4, 1), (0, 0), (3, 0)] {
            stats.round(gamma, accepted);
        }
        stats.draft(0.25);
        stats.verify(0.5);
        assert_eq!(stats.prefill_tokens_per_s(), Some(200.0));
        assert_eq!((stats.rounds(), stats.drafted_tokens(), stats.accepted_tokens()), (4, 11, 5));
        assert_eq!(stats.decode_tokens_per_s(), Some(9.0 / 0.75));
        assert_eq!(stats.gamma_mean(), Some(2.75));
        assert_eq!(stats.acceptance_rate(), Some(5.0 / 11.0));
        assert_eq!(stats.mean_acceptance_length(), Some(2.25));
        assert_eq!(stats.acceptance_rate_per_position(), Some(vec![0.5, 0.25, 0.25, 0.25]));
    }

    #[test]
    fn every_statistic_has_its_own_name() {
        let mut stats = Stats::default();
        for _ in 0..2 {
            stats.prefill(3, 0, 0.5);
            stats.draft(0.25);
            stats.verify(2.0);
            stats.round(7, 5);
        }
        assert_eq!((stats.prefill_tokens, stats.prefill_s()), (6, 1.0));
        assert_eq!((stats.draft_s(), stats.verify_s(), stats.decode_s()), (0.5, 4.0, 4.5));
        assert_eq!((stats.rounds(), stats.drafted_tokens(), stats.accepted_tokens()), (2, 14, 10));
        // Each round emits the accepted tokens and one token of the target.
        assert_eq!(stats.decode_tokens(), 12);
        assert_eq!(stats.gamma_mean(), Some(7.0));
    }

    #[test]
    fn rates_per_position_add_up_to_the_mean_length() {
        let mut stats = Stats::default();
        for (gamma, accepted) in [(2, 2), (5, 3), (1, 0), (0, 0), (5, 5), (3, 1)] {
            stats.round(gamma, accepted);
        }
        let rates = stats.acceptance_rate_per_position().unwrap();
        assert_eq!(rates.len(), 5);
        assert!(rates.windows(2).all(|pair| pair[0] >= pair[1]));
        assert!((1.0 + rates.iter().sum::<f64>() - stats.mean_acceptance_length().unwrap()).abs() < 1e-12);
    }

    #[test]
    fn methods_are_counted_apart() {
        let mut stats = Stats::default();
        assert!(stats.by_method().is_empty());
        let round = MethodCounters { rounds: 1, drafted_tokens: 4, accepted_tokens: 3, drafted_pages: 40 };
        for name in ["kv4", "ar", "kv4"] {
            stats.method(name, round);
        }
        let twice = MethodCounters { rounds: 2, drafted_tokens: 8, accepted_tokens: 6, drafted_pages: 80 };
        assert_eq!(stats.by_method().iter().collect::<Vec<_>>(), [(&"ar", &round), (&"kv4", &twice)]);
    }

    #[test]
    fn waste_is_the_share_of_reserved_pages_without_tokens() {
        let mut stats = Stats::default();
        assert_eq!((stats.reserved_pages(), stats.pool_waste()), (0, None));
        stats.pool_pages(0, 0);
        assert_eq!(stats.pool_waste(), None);
        stats.pool_pages(30, 27);
        stats.pool_pages(10, 10);
        assert_eq!((stats.reserved_pages(), stats.pool_waste()), (40, Some(0.075)));
    }

    #[test]
    fn nothing_drafted_has_no_rates() {
        let mut stats = Stats::default();
        assert_eq!((stats.prefill_tokens_per_s(), stats.decode_tokens()), (None, 0));
        assert_eq!((stats.gamma_mean(), stats.decode_tokens_per_s()), (None, None));
        stats.round(0, 0);
        assert_eq!(stats.gamma_mean(), Some(0.0));
        assert_eq!(stats.acceptance_rate(), None);
        assert_eq!(stats.mean_acceptance_length(), None);
        assert_eq!(stats.acceptance_rate_per_position(), None);
    }
}
