//! Chooses γ, the number of tokens to draft, and the candidate that drafts them, from measured seconds and acceptance
//! (docs/design/policy.md).
//!
//! A candidate is a way to draft: a choice of pages, or a drafter. [`Policy`] identifies it by an index, and keeps the
//! seconds of its draft step and its acceptance α. All candidates share one table of verification seconds by rows. Each round
//! uses the candidate and the γ with the most tokens per second, or γ = 0, plain decoding.
//!
//! Two accounts, in plain steps, bound the cost. The ledger holds the gain of drafting over plain decoding; below 0, rounds
//! are plain. The probing budget pays for rounds that measure something other than the fastest choice. No clock is read: the
//! same observations give the same choices.

use crate::candidate::{ALPHA_MAX, Candidate, acceptance};
use crate::costs::{Costs, RELIABLE};
use crate::forecast::{Prior, expected_tokens};
use crate::stop::Stop;

/// Share of the time that may be lost against plain decoding; probes may lose as much against the fastest choice.
const SHARE: f64 = 0.005;
/// Initial credit of the ledger in plain steps, and its bounds: a text that turns bad falls back soon, and a single wild
/// measurement does not end drafting.
const CREDIT: f64 = 2.5;
const LEDGER: (f64, f64) = (-6.0, 12.0);
/// Rounds in which a new candidate is explored, and rows of its first verification: about as expensive as one row if
/// memory-bound.
const EXPLORED: usize = 3;
const FIRST_ROWS: usize = 8;
/// Judged tokens, including the prior's, from which on α may end all drafting. Fewer may be rejected by chance, and the next
/// probe is many rounds away.
const JUDGED: f64 = 20.0;
/// Budget, in plain steps, at which a probe begins, and most drafted tokens of its rounds.
const PROBE: f64 = 1.0;
const PROBE_GAMMA: usize = 4;
/// Rounds after which an unused row count is dropped from the cost table.
const STALE_ROUNDS: usize = 256;
/// A plain step faster than this share of the previous one shows a CPU cache that is still filling with weights.
const SETTLED: f64 = 0.95;
/// A plain step is timed again, up to this many times, if more rows took less than this share of its time, or if drafts gain
/// less than this factor. The first plain steps after a prompt may be slow.
const RETIMED: usize = 3;
const FASTER: f64 = 0.9;
const UNSURE: f64 = 1.15;
/// Judged tokens per sequence after which an observation has 1/e of its weight in acceptance. Many, because rejections are rare.
const ACCEPTANCE_MEMORY: f64 = 64.0;
/// The same for the margin scale, in tokens with known margins.
const MARGIN_MEMORY: f64 = 256.0;
/// Cost of a drafted token, relative to the mean one, above which no draft becomes longer than chosen.
const STEEP: f64 = 1.5;
/// Drafts with a higher probability always continue, however expensive a step is.
const MIN_ACCEPTANCE_MAX: f64 = 0.9;

/// Chooses γ and the candidate of each round. The engine reports a round in this order: [`Policy::observe_draft`]; for each
/// sequence that drafted, [`Policy::observe_margins`] if margins are known, and [`Policy::observe_round`];
/// [`Policy::observe_verify`].
#[derive(Clone, Debug, Default)]
pub struct Policy {
    /// Largest γ; the only one if `fixed`.
    max: usize,
    fixed: bool,
    candidates: Vec<Candidate>,
    verify: Costs,
    next: Choice,
    /// Tokens that the fastest choice emits in the time of a plain step.
    rate: f64,
    ledger: f64,
    probing: f64,
    round: usize,
    /// Sequences of the last round.
    batch: usize,
    /// The current round: draft steps, and tokens over all sequences.
    steps: usize,
    drafted: usize,
    accepted: usize,
    /// The last round, if it was a plain step.
    plain: Option<PlainStep>,
}

/// A plain step, with which the next one is compared.
#[derive(Clone, Copy, Debug)]
struct PlainStep {
    rows: usize,
    seconds: f64,
    /// False if it came first after a draft or a prompt, or was clearly faster than the one before it.
    recorded: bool,
}

/// The choice for a round, and whether it is a probe.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Choice {
    gamma: usize,
    candidate: usize,
    probe: bool,
}

impl Policy {
    /// Always γ = `gamma`.
    pub fn fixed(gamma: usize) -> Policy {
        Policy { fixed: true, next: Choice { gamma, ..Choice::default() }, ..Policy::auto(gamma) }
    }

    /// Chooses the fastest γ of 0..=`max`, by measurement.
    pub fn auto(max: usize) -> Policy {
        Policy { max, candidates: vec![Candidate::new()], rate: 1.0, ledger: CREDIT, batch: 1, ..Policy::default() }
    }

    /// Also chooses among `count` candidates (at least one).
    pub fn with_candidates(self, count: usize) -> Policy {
        Policy { candidates: vec![Candidate::new(); count.max(1)], ..self }
    }

    /// γ of the next round. The caller may draft fewer, for example at the end of a text.
    pub fn gamma(&self) -> usize {
        self.next.gamma
    }

    /// Largest γ of the next round if [`Policy::stop`] may end the draft: up to twice [`Policy::gamma`]. It ends before a token
    /// that costs much more than the mean one, for example because verification takes rows in tiles.
    pub fn gamma_limit(&self) -> usize {
        let Choice { gamma, candidate, .. } = self.next;
        let longest = if self.min_acceptance() > 0.0 { (2 * gamma).min(self.max) } else { gamma };
        let more = |own: usize| Some(self.round_s(candidate, own + 1)? - self.round_s(candidate, own)?);
        let steep = |own: &usize| more(*own) > self.token_s(candidate, gamma).map(|mean| STEEP * mean);
        (gamma..longest).find(steep).unwrap_or(longest)
    }

    /// Largest γ of any round.
    pub fn gamma_max(&self) -> usize {
        self.max
    }

    /// Tokens that a round of one sequence must emit to be as fast as the fastest choice, if it verifies `gamma` tokens that
    /// cost nothing to draft. Infinite before a plain step was timed; `None` for a fixed γ.
    pub fn break_even(&self, gamma: usize) -> Option<f64> {
        let (plain, verify) = (self.verify.seconds(self.batch), self.verify.seconds(self.batch * (gamma + 1)));
        (!self.fixed).then(|| plain.zip(verify).map_or(f64::INFINITY, |(plain, verify)| self.rate * verify / plain))
    }

    /// Condition that ends drafts of the next round early, for a single sequence with known margins; `None` for a fixed γ.
    pub fn stop(&self) -> Option<Stop> {
        (!self.fixed).then(|| self.candidates[self.next.candidate].stop(self.min_acceptance()))
    }

    /// Index of the candidate that drafts the next round.
    pub fn candidate(&self) -> usize {
        self.next.candidate
    }

    /// Measurements of each candidate: the time of its step relative to a plain one, and accepted per judged tokens. `None`
    /// before two of its drafts were timed, as the first may be slow.
    pub fn measured(&self) -> Vec<Option<(f64, f64)>> {
        let plain = self.verify.seconds(self.batch);
        let known = |own: &Candidate| Some(own.step.seconds / plain?).filter(|_| own.step.is_reliable());
        self.candidates.iter().map(|own| Some((known(own)?, own.acceptance.value()))).collect()
    }

    /// Sets the expected tokens of each candidate in the time of a plain step, for the current round; 0 if it cannot draft.
    /// Candidate 0 always can. The highest are tried first; those below the fastest choice's rate are not tried. `priors`: what
    /// is known of each; may be empty.
    pub fn observe_forecasts(&mut self, forecasts: &[f64], priors: &[Prior]) {
        for (index, (own, &forecast)) in self.candidates.iter_mut().zip(forecasts).enumerate() {
            (own.forecast, own.prior) = (forecast, priors.get(index).copied());
        }
        if self.candidates[self.next.candidate].forecast <= 0.0 {
            self.next.candidate = 0;
        }
    }

    /// Records the draft of a round: `seconds` for `steps` sequential steps.
    pub fn observe_draft(&mut self, seconds: f64, steps: usize) {
        if steps > 0 {
            self.steps = steps;
            self.candidates[self.next.candidate].step.observe(seconds / steps as f64, self.round);
        }
    }

    /// Records that one sequence drafted `drafted` tokens in this round, of which the first `accepted` were accepted.
    pub fn observe_round(&mut self, drafted: usize, accepted: usize) {
        (self.drafted, self.accepted) = (self.drafted + drafted, self.accepted + accepted);
        // The first rejected token ends a round's trials.
        let trials = (accepted + 1).min(drafted) as f64;
        let acceptance = &mut self.candidates[self.next.candidate].acceptance;
        acceptance.add(accepted as f64, trials, (-trials / (ACCEPTANCE_MEMORY * self.batch as f64)).exp());
    }

    /// Records that one sequence copied `drafted` tokens of its text, of which the first `accepted` were accepted. This
    /// affects no candidate.
    pub fn observe_copied(&mut self, drafted: usize, accepted: usize) {
        (self.drafted, self.accepted) = (self.drafted + drafted, self.accepted + accepted);
    }

    /// Records that one sequence's draft failed, and none of its tokens was verified. [`Policy::observe_draft`] has the whole
    /// time.
    pub fn observe_failure(&mut self) {
        self.candidates[self.next.candidate].acceptance.add(0.0, 1.0, 1.0);
    }

    /// Records the logit margins of a sequence's drafted tokens, of which the first `accepted` were accepted.
    pub fn observe_margins(&mut self, margins: &[f32], accepted: usize) {
        let candidate = &mut self.candidates[self.next.candidate];
        let (stop, judged) = (candidate.stop(0.0), &margins[..margins.len().min(accepted + 1)]);
        let predicted: f64 = judged.iter().map(|&margin| 1.0 - stop.acceptance(margin)).sum();
        let rejected = f64::from(u8::from(accepted < margins.len()));
        candidate.margins.add(rejected, predicted / stop.margin_scale, (-(judged.len() as f64) / MARGIN_MEMORY).exp());
    }

    /// Records the verification of the round's `rows` rows (one more per sequence than it drafted) in `seconds`. Ends the
    /// round.
    pub fn observe_verify(&mut self, rows: usize, seconds: f64) {
        self.round += 1;
        self.batch = rows.saturating_sub(self.drafted).max(1);
        let (round, few) = (self.round, 2 * self.batch);
        self.time(rows, seconds);
        self.verify.by_rows.retain(|&rows, own| rows <= few || round - own.round < STALE_ROUNDS);
        let copied = self.only_copied();
        let candidate = &mut self.candidates[self.next.candidate];
        if self.next.gamma > 0 && !copied {
            (candidate.rounds, candidate.last) = (candidate.rounds + 1, round);
        }
        self.account(rows, seconds);
        (self.steps, self.drafted, self.accepted) = (0, 0, 0);
        self.next = self.choose();
    }

    /// Records the time of a verification. If the model fits in a CPU's caches, plain steps right after a prompt or a draft
    /// are slow. So a plain step is recorded only directly after another of the same rows, with at most slightly more than its
    /// time. If that one was not recorded, this one must not be clearly faster.
    fn time(&mut self, rows: usize, seconds: f64) {
        let before = self.plain.take().filter(|before| before.rows == rows && self.steps == 0);
        let (usable, plain) = (seconds.is_finite() && seconds > 0.0, self.drafted == 0);
        let recorded = before.is_some_and(|before| before.recorded || seconds >= SETTLED * before.seconds);
        self.plain = (usable && plain && self.steps == 0).then_some(PlainStep { rows, seconds, recorded });
        if usable && (recorded || !plain) {
            let limited = before.map_or(seconds, |before| seconds.min(before.seconds / SETTLED));
            self.verify.by_rows.entry(rows).or_default().observe(limited, self.round);
        }
    }

    /// True if the round was a plain step that was not recorded.
    fn cold(&self) -> bool {
        self.plain.is_some_and(|step| !step.recorded)
    }

    /// True if nothing was drafted in this round, and something copied.
    fn only_copied(&self) -> bool {
        self.steps == 0 && self.drafted > 0
    }

    /// Books the round in plain steps. Costs are those of the table, so that a single interruption does not count against
    /// drafting.
    fn account(&mut self, rows: usize, seconds: f64) {
        let (Some(plain), Some(verify)) = (self.verify.seconds(self.batch), self.verify.seconds(rows)) else { return };
        let candidate = &self.candidates[self.next.candidate];
        // A step reads less than a plain one, so it is slower only at first, for example while a GPU records a graph.
        let slowest = if candidate.step.is_reliable() { f64::INFINITY } else { plain };
        let cost = (candidate.step.seconds.min(slowest) * self.steps as f64 + verify) / plain;
        let tokens = 1.0 + self.accepted as f64 / self.batch as f64;
        // Two timings may both be interrupted by chance: until a third, one round costs only a part of the initial credit.
        let unsure = self.verify.by_rows.get(&rows).is_some_and(|own| own.recent.len() <= RELIABLE);
        let least = if unsure { -CREDIT / EXPLORED as f64 } else { f64::NEG_INFINITY };
        // A plain step that is slow because of the previous draft counts as a cost of drafting.
        let cold = if self.cold() { (seconds / plain - 1.0).clamp(0.0, 1.0) } else { 0.0 };
        let won = if self.steps > 0 || self.drafted > 0 { (tokens - cost).max(least) } else { 0.0 };
        let missed = if self.next.probe && !self.only_copied() { tokens / self.rate - cost } else { 0.0 };
        self.ledger = (self.ledger + SHARE * cost + won - cold).clamp(LEDGER.0, LEDGER.1);
        self.probing = (self.probing + SHARE * cost + missed - cold).clamp(LEDGER.0, 2.0 * PROBE);
    }

    /// The next round's choice: a new candidate, a probe, or the fastest choice.
    fn choose(&mut self) -> Choice {
        // The choice if nothing pays or no plain step was timed: γ = 0, or the fixed one.
        let plain = Choice { gamma: self.max * usize::from(self.fixed), probe: false, ..self.next };
        let Some(plain_s) = self.verify.seconds(self.batch).filter(|_| self.max > 0) else { return plain };
        let best = |index| self.best(index, acceptance(&self.candidates, index));
        let best = self.usable().filter_map(best).max_by(|a, b| a.1.total_cmp(&b.1));
        let pays = best.filter(|best| self.fixed || best.1 * plain_s > 1.0 && self.ledger >= 0.0);
        let (fastest, rate) = pays.map_or((plain, 1.0), |(choice, rate)| (choice, rate * plain_s));
        self.rate = rate;
        self.explore(fastest, pays.is_some()).unwrap_or_else(|| self.probe(fastest, pays.is_some()))
    }

    /// Candidates that can draft.
    fn usable(&self) -> impl Iterator<Item = usize> {
        (0..self.candidates.len()).filter(|&index| self.candidates[index].forecast > 0.0)
    }

    /// γ of a round that measures a candidate.
    fn trial_gamma(&self, fastest: Choice) -> usize {
        if self.fixed { self.max } else { fastest.gamma.clamp(1, PROBE_GAMMA).min(self.max) }
    }

    /// The new candidate with the highest forecast, if the ledger allows it (a fixed γ has none). `drafts`: the fastest choice
    /// drafts. If it does not, a candidate stays new until some of its tokens were judged.
    fn explore(&self, fastest: Choice, drafts: bool) -> Option<Choice> {
        let least = if drafts { CREDIT } else { CREDIT / EXPLORED as f64 };
        // If the first drafts did not pay, the plain step that they are compared with is timed again.
        let once = self.verify.by_rows.get(&self.batch).is_some_and(|plain| !plain.is_reliable());
        let compared = !drafts && self.candidates.iter().any(|own| own.rounds > 0);
        if !self.fixed && (self.ledger < least || once && compared) {
            return None;
        }
        let is_new = |own: &Candidate| {
            own.rounds < EXPLORED || !drafts && (own.step.recent.is_empty() || own.acceptance.denominator < JUDGED)
        };
        let own = |index: usize| &self.candidates[index];
        let new = self.usable().filter(|&index| is_new(own(index)) && own(index).forecast > self.rate);
        let new = new.filter(|&index| drafts || self.may_pay(index));
        let highest = |a: &Candidate, b: &Candidate| b.forecast.total_cmp(&a.forecast).then(a.last.cmp(&b.last));
        let candidate = new.min_by(|&a, &b| highest(own(a), own(b)))?;
        if drafts && candidate == fastest.candidate {
            return Some(fastest);
        }
        // If rounds are plain, a candidate's first draft has more than one token.
        let plain_before = !drafts && own(candidate).rounds == 0;
        let first = if plain_before { (FIRST_ROWS / self.batch).clamp(2, PROBE_GAMMA) - 1 } else { 1 };
        Some(Choice { gamma: first.max(self.trial_gamma(fastest)).min(self.max), candidate, probe: false })
    }

    /// The next round of the current probe, the first of another if the budget allows it, or the fastest choice.
    fn probe(&self, fastest: Choice, drafts: bool) -> Choice {
        let own = |index: usize| &self.candidates[index];
        // In plain decoding, candidates that measured badly earlier are probed again: the text may have changed.
        let known = |index: usize| own(index).forecast > self.rate || !drafts && own(index).rounds > 0;
        let others = || self.usable().filter(|&index| known(index) && (!drafts || index != fastest.candidate));
        let (plain_idle, plain) = (drafts && !self.fixed, Choice { gamma: 0, probe: true, ..fastest });
        let timed = self.verify.by_rows.get(&self.batch);
        let more = || self.verify.by_rows.range(self.batch + 1..).map(|(_, more)| more.seconds);
        let unsure = |plain: f64| self.rate < UNSURE || more().any(|more| more < FASTER * plain);
        let retime = timed.is_some_and(|plain| plain.recent.len() < RETIMED && unsure(plain.seconds));
        // A probe continues while there is budget, a plain one until it has a timing.
        let continues = self.next.probe && (self.probing > 0.0 || self.cold());
        if plain_idle && (retime || continues && self.next.gamma == 0) {
            return plain;
        }
        let gamma = self.trial_gamma(fastest);
        if continues && self.next.gamma > 0 && others().any(|index| index == self.next.candidate) {
            return Choice { gamma, ..self.next };
        }
        if self.probing < PROBE {
            return fastest;
        }
        // The oldest measurement: of a candidate that is not in use, or of plain decoding.
        let refreshed = timed.filter(|_| plain_idle).map_or(usize::MAX, |plain| plain.round);
        match others().min_by_key(|&index| own(index).last).filter(|&index| own(index).last < refreshed) {
            Some(candidate) => Choice { gamma, candidate, probe: true },
            None if plain_idle => plain,
            None => fastest,
        }
    }

    /// False if a candidate would not be faster than plain decoding even if all its tokens were accepted, by the seconds of at
    /// least two drafts and two verifications. Always true for a fixed γ.
    fn may_pay(&self, candidate: usize) -> bool {
        let verified = self.verify.by_rows.range(self.batch + 1..).any(|(_, more)| more.is_reliable());
        let timed = verified && self.candidates[candidate].step.is_reliable();
        let best = self.best(candidate, ALPHA_MAX).zip(self.verify.seconds(self.batch));
        self.fixed || !timed || best.is_none_or(|((_, rate), plain)| rate * plain > 1.0)
    }

    /// A candidate's best γ ≥ 1 and its tokens per second of one sequence; `None` before it was timed. γ is limited to at most
    /// twice the rows of any timed verification: a line through two noisy timings is wrong farther away.
    fn best(&self, candidate: usize, alpha: f64) -> Option<(Choice, f64)> {
        let longest = self.verify.by_rows.last_key_value().map_or(1, |(rows, _)| rows / self.batch).max(1);
        let gammas = if self.fixed { self.max..=self.max } else { 1..=self.max.min(2 * longest - 1) };
        let rate = |gamma| Some(expected_tokens(alpha, gamma) / self.round_s(candidate, gamma)?);
        let choices = gammas.filter_map(|gamma| Some((Choice { gamma, candidate, probe: false }, rate(gamma)?)));
        choices.max_by(|a, b| a.1.total_cmp(&b.1))
    }

    fn round_s(&self, candidate: usize, gamma: usize) -> Option<f64> {
        let step = &self.candidates[candidate].step;
        let verify = self.verify.seconds(self.batch * (gamma + 1)).filter(|_| !step.recent.is_empty())?;
        Some(gamma as f64 * step.seconds + verify)
    }

    /// Mean seconds by which a drafted token prolongs a round.
    fn token_s(&self, candidate: usize, gamma: usize) -> Option<f64> {
        Some((self.round_s(candidate, gamma)? - self.round_s(candidate, 0)?) / gamma as f64)
    }

    /// Probability below which one more drafted token yields fewer tokens than rounds do in the same time; 0 if all γ tokens
    /// are drafted in any case. Its time is the mean: row counts beyond γ + 1 are seldom timed.
    fn min_acceptance(&self) -> f64 {
        let Choice { gamma, candidate, probe } = self.next;
        // In a batch the steps are shared. A row count that was timed once is timed again.
        let once = self.verify.by_rows.get(&(gamma + 1)).is_some_and(|own| !own.is_reliable());
        if probe || once || gamma == 0 || self.fixed || self.batch > 1 {
            return 0.0;
        }
        let Some((round, token)) = self.round_s(candidate, gamma).zip(self.token_s(candidate, gamma)) else {
            return 0.0;
        };
        let alpha = acceptance(&self.candidates, candidate);
        (expected_tokens(alpha, gamma) / round * token / alpha).clamp(0.0, MIN_ACCEPTANCE_MAX)
    }
}
