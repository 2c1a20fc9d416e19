//! How many tokens to draft: γ from measured costs and measured acceptance.
//!
//! With α the probability that a drafted token is accepted, a round of γ drafted tokens emits (1 − α^(γ+1)) / (1 − α) tokens
//! on average (Leviathan et al., eq. 1) and costs γ·T_draft + T_verify(γ + 1). [`Policy::auto`] drafts the γ with the most
//! tokens per second, where γ = 0, plain decoding, is one of the candidates.
//!
//! It is safe rather than clever: a ledger in units of plain steps holds what speculation has won or lost against plain
//! decoding, and when it is overdrawn the policy decodes plainly until [`ALLOWANCE`] of the time spent has paid the debt. So
//! however wrong α and the costs are, the loss against plain decoding is bounded. γ never changes a token under greedy and
//! replay acceptance, only the time.
//!
//! No clock is read here: seconds are given, and the same observations give the same γ.

use std::collections::BTreeMap;

/// Share of the time that may be lost against plain decoding.
const ALLOWANCE: f64 = 0.01;

/// Share of the time spent on refreshing what is not in use: plain steps while drafting, drafts while decoding plainly.
const PROBING: f64 = 0.005;

/// Plain steps that speculation may lose before it has won any; 2 % of 150 tokens.
const CREDIT: f64 = 3.0;

/// Most that winnings are remembered, so that a text that turns bad falls back within some rounds.
const CREDIT_MAX: f64 = 12.0;

/// Drafting must promise this much more than plain decoding.
const MARGIN: f64 = 1.01;

/// Timings kept per row count; the median of five ignores two interrupted ones.
const KEPT: usize = 5;

/// Timings before a row count's cost is believed: the first may include a graph capture or page faults.
const BELIEVED: usize = 2;

/// Rounds after which an unused cost is forgotten: the context has grown since.
const STALE_ROUNDS: usize = 256;

/// Drafted tokens over which the estimate of α forgets.
const ACCEPTANCE_WINDOW: f64 = 64.0;

/// Chooses γ. Everything it is told comes from the engine, after each round in this order: [`Policy::observe_draft`],
/// [`Policy::observe_round`] per sequence that drafted, [`Policy::observe_verify`].
#[derive(Clone, Debug)]
pub struct Policy {
    max: usize,
    auto: Option<Box<Auto>>,
}

impl Policy {
    /// Always γ = `gamma`.
    pub fn fixed(gamma: usize) -> Policy {
        Policy { max: gamma, auto: None }
    }

    /// The fastest γ of 0..=`max` by measurement.
    pub fn auto(max: usize) -> Policy {
        Policy { max, auto: Some(Box::new(Auto::new(max))) }
    }

    /// γ of the next round. A caller may draft fewer, at the end of a text for example.
    pub fn gamma(&self) -> usize {
        self.auto.as_ref().map_or(self.max, |auto| auto.gamma)
    }

    /// The draft of a round took `seconds` for `steps` steps, one after another.
    pub fn observe_draft(&mut self, seconds: f64, steps: usize) {
        if let Some(auto) = self.auto.as_mut().filter(|_| steps > 0) {
            auto.steps = steps;
            auto.draft.push(seconds / steps as f64);
        }
    }

    /// One sequence drafted `drafted` tokens in this round, and the first `accepted` of them were accepted.
    pub fn observe_round(&mut self, drafted: usize, accepted: usize) {
        if let Some(auto) = self.auto.as_mut() {
            auto.accepted += accepted;
            auto.drafted += drafted;
            auto.acceptance.observe(drafted, accepted);
        }
    }

    /// Verification of the round's `rows` rows, over all sequences, took `seconds`. Ends the round.
    pub fn observe_verify(&mut self, rows: usize, seconds: f64) {
        if let Some(auto) = self.auto.as_mut().filter(|_| rows > 0) {
            auto.end_round(rows, seconds);
        }
    }
}

/// Running estimate of α, forgetting exponentially.
#[derive(Clone, Debug)]
struct Acceptance {
    successes: f64,
    trials: f64,
}

impl Acceptance {
    /// Four of five: what 4-bit drafts reach at least on ordinary text; outvoted within a few rounds.
    const PRIOR: Acceptance = Acceptance { successes: 4.0, trials: 5.0 };

    /// A refused token ends the trials of its round.
    fn observe(&mut self, drafted: usize, accepted: usize) {
        let trials = (accepted + 1).min(drafted) as f64;
        let keep = (-trials / ACCEPTANCE_WINDOW).exp();
        self.successes = self.successes * keep + accepted as f64;
        self.trials = self.trials * keep + trials;
    }

    /// Short of 1, where the geometric sum has no closed form.
    fn alpha(&self) -> f64 {
        (self.successes / self.trials).min(0.999)
    }

    /// Tokens a round of `gamma` emits on average.
    fn tokens(&self, gamma: usize) -> f64 {
        let alpha = self.alpha();
        (1.0 - alpha.powi(gamma as i32 + 1)) / (1.0 - alpha)
    }
}

/// The last timings of one thing.
#[derive(Clone, Debug, Default)]
struct Timings {
    /// Seconds, oldest first.
    recent: Vec<f64>,
    /// Round of the last one.
    round: usize,
}

impl Timings {
    fn push(&mut self, seconds: f64) {
        if seconds.is_finite() && seconds > 0.0 {
            if self.recent.len() == KEPT {
                self.recent.remove(0);
            }
            self.recent.push(seconds);
        }
    }

    /// The lower median, once enough were seen.
    fn seconds(&self) -> Option<f64> {
        let mut sorted = self.recent.clone();
        sorted.sort_unstable_by(f64::total_cmp);
        if sorted.len() < BELIEVED { None } else { sorted.get((sorted.len() - 1) / 2).copied() }
    }
}

/// What the next round is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// What is believed to be fastest.
    Work,
    /// A plain step while drafting pays, to keep the yardstick fresh.
    ProbePlain,
    /// A short draft while it does not pay, to notice when it would.
    ProbeDraft,
}

/// State of the automatic policy.
#[derive(Clone, Debug)]
struct Auto {
    max: usize,
    /// γ of the next round, and why.
    gamma: usize,
    purpose: Purpose,
    acceptance: Acceptance,
    /// Seconds of one draft step.
    draft: Timings,
    /// Seconds of a verification by its rows, over all sequences.
    verify: BTreeMap<usize, Timings>,
    /// Sequences of the last round.
    batch: usize,
    round: usize,
    /// Plain steps won against plain decoding, less what was lost; drafting stops below 0.
    credit: f64,
    /// Plain steps that the next probe may cost.
    probing: f64,
    /// The round under way: draft steps, and drafted and accepted tokens over all sequences.
    steps: usize,
    drafted: usize,
    accepted: usize,
}

impl Auto {
    /// Seconds per row and row beyond the first, relative to the first, before two row counts were timed. Optimistic, so
    /// that drafting is tried.
    const ROW_SLOPE: f64 = 0.02;

    fn new(max: usize) -> Auto {
        Auto {
            max,
            gamma: 0,
            purpose: Purpose::Work,
            acceptance: Acceptance::PRIOR,
            draft: Timings::default(),
            verify: BTreeMap::new(),
            batch: 1,
            round: 0,
            credit: CREDIT,
            probing: 0.0,
            steps: 0,
            drafted: 0,
            accepted: 0,
        }
    }

    fn end_round(&mut self, rows: usize, seconds: f64) {
        self.round += 1;
        // Every sequence has one row more than it drafted.
        self.batch = rows.saturating_sub(self.drafted).max(1);
        let timings = self.verify.entry(rows).or_default();
        timings.push(seconds);
        timings.round = self.round;
        let (round, short) = (self.round, 2 * self.batch);
        self.verify.retain(|&rows, timings| rows <= short || round - timings.round < STALE_ROUNDS);
        self.settle(rows);
        (self.steps, self.drafted, self.accepted) = (0, 0, 0);
        (self.gamma, self.purpose) = self.next();
    }

    /// Books the round in plain steps: tokens won against its cost. Costs are the filtered ones, so that one interrupted
    /// round is not held against drafting.
    fn settle(&mut self, rows: usize) {
        let (Some(plain), Some(verify)) = (self.verify_s(self.batch), self.verify_s(rows)) else { return };
        let cost = (self.steps as f64 * self.draft.seconds().unwrap_or(0.0) + verify) / plain;
        self.credit += ALLOWANCE * cost;
        self.probing += PROBING * cost;
        if self.steps > 0 {
            let won = 1.0 + self.accepted as f64 / self.batch as f64 - cost;
            self.credit += won;
            if self.purpose == Purpose::ProbeDraft {
                self.probing += won;
            }
        } else if self.purpose == Purpose::ProbePlain {
            self.probing -= self.missed(plain);
        }
        self.credit = self.credit.min(CREDIT_MAX);
        self.probing = self.probing.min(self.risk(plain).max(1.0));
    }

    /// γ of the next round.
    fn next(&self) -> (usize, Purpose) {
        let Some(plain) = self.verify_s(self.batch).filter(|_| self.max > 0) else { return (0, Purpose::Work) };
        if self.draft.seconds().is_none() {
            return (1, Purpose::Work);
        }
        let (gamma, rate) = self.best();
        if rate * plain > MARGIN && self.credit >= 0.0 {
            return if self.probing >= self.missed(plain) { (0, Purpose::ProbePlain) } else { (gamma, Purpose::Work) };
        }
        if self.probing >= self.risk(plain) { (1, Purpose::ProbeDraft) } else { (0, Purpose::Work) }
    }

    /// The γ ≥ 1 with the most tokens per second, and that rate for one sequence. Beyond what was timed γ at most doubles:
    /// a line through two noisy timings should not be followed far.
    fn best(&self) -> (usize, f64) {
        let longest = self.believed().map(|(rows, _)| rows / self.batch).max().unwrap_or(1);
        let rate = |gamma| (gamma, self.acceptance.tokens(gamma) / self.round_s(gamma));
        (1..=self.max.min(2 * longest - 1))
            .map(rate)
            .fold((1, 0.0), |best, next| if next.1 > best.1 { next } else { best })
    }

    /// Seconds of a round of γ.
    fn round_s(&self, gamma: usize) -> f64 {
        let draft = self.draft.seconds().unwrap_or(0.0);
        gamma as f64 * draft + self.verify_s(self.batch * (gamma + 1)).unwrap_or(f64::INFINITY)
    }

    /// Plain steps lost by a plain step while drafting is faster.
    fn missed(&self, plain: f64) -> f64 {
        (1.0 - 1.0 / (self.best().1 * plain)).max(0.0)
    }

    /// Plain steps lost by a draft of one token that is refused.
    fn risk(&self, plain: f64) -> f64 {
        (self.round_s(1) / plain - 1.0).max(0.1)
    }

    /// Row counts whose cost is known, with their seconds, ascending.
    fn believed(&self) -> impl Iterator<Item = (usize, f64)> {
        self.verify.iter().filter_map(|(&rows, timings)| Some((rows, timings.seconds()?)))
    }

    /// Seconds of a verification of `rows` rows: measured, or on the line through its measured neighbours.
    fn verify_s(&self, rows: usize) -> Option<f64> {
        let known: Vec<(usize, f64)> = self.believed().collect();
        let above = known.partition_point(|point| point.0 < rows);
        match (known.as_slice(), known.get(above)) {
            ([], _) => None,
            (_, Some(&(at, seconds))) if at == rows => Some(seconds),
            (&[(at, seconds)], _) => Some(seconds * (1.0 + Self::ROW_SLOPE * rows.saturating_sub(at) as f64)),
            (points, _) => {
                let right = above.clamp(1, points.len() - 1);
                let ((x0, y0), (x1, y1)) = (points[right - 1], points[right]);
                let slope = ((y1 - y0) / (x1 - x0) as f64).max(0.0);
                // Half the known cost is the least believed of a line that falls towards fewer rows.
                Some((y0 + slope * (rows as f64 - x0 as f64)).max(0.5 * y0))
            }
        }
    }
}
