//! A simulated machine that decodes a text with drafts.

use quantspec_core::noise::{Noise, Stream};
use quantspec_core::policy::Policy;
use quantspec_core::stop::Stop;

/// Acceptance probability of drafted tokens, as a function of the tokens emitted so far.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Text {
    Even(f64),
    /// Alternates: this many tokens with this acceptance, then as many with acceptance 0.
    Alternating(f64, usize),
    /// High acceptance, except for tokens 2,000 to 6,000.
    Gap,
}

/// Logit margins of drafted tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Margins {
    Always(f32),
    /// Exponentially distributed with this mean.
    Mean(f64),
}

/// A machine and a text. Costs in milliseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct World {
    pub(crate) draft: f64,
    pub(crate) verify: fn(usize) -> f64,
    pub(crate) text: Text,
    /// Standard deviation of timings, relative.
    pub(crate) noise: f64,
    /// Share of noisy timings that take five times as long.
    pub(crate) interrupted: f64,
    /// First rounds whose measured time is five times the true one.
    pub(crate) slow: usize,
    /// The second round's measured time relative to the true one.
    pub(crate) second: f64,
    pub(crate) batch: usize,
    /// A plain step after a draft or the prompt takes this many times as long; each further one keeps the share `warming` of
    /// the excess.
    pub(crate) cold: f64,
    pub(crate) warming: f64,
    /// Share of rounds in which the drafter proposes tokens; in the others it proposes nothing.
    pub(crate) proposes: f64,
    /// A draft is accepted entirely or not at all, contrary to the policy's model.
    pub(crate) together: bool,
    /// Known margins, which end drafts early.
    pub(crate) margins: Option<Margins>,
    /// The policy knows, as in the engine, how rejections of drafts over few and many pages should compare.
    pub(crate) told: bool,
    /// Margin scale that determines acceptance, whatever the text.
    pub(crate) scale: Option<f64>,
    pub(crate) seed: u64,
}

pub(crate) const WORLD: World = World {
    draft: 3.0,
    verify: flat,
    text: Text::Even(0.9),
    noise: 0.03,
    interrupted: 0.02,
    slow: 0,
    second: 1.0,
    batch: 1,
    cold: 1.0,
    warming: 0.0,
    proposes: 1.0,
    together: false,
    margins: None,
    told: false,
    scale: None,
    seed: 1,
};

pub(crate) fn flat(rows: usize) -> f64 {
    10.0 * (1.0 + 0.02 * (rows as f64 - 1.0))
}

pub(crate) fn steep(rows: usize) -> f64 {
    10.0 * (1.0 + 0.12 * (rows as f64 - 1.0))
}

pub(crate) fn cliff(rows: usize) -> f64 {
    if rows < 3 { 10.0 } else { 45.0 }
}

pub(crate) fn step(rows: usize) -> f64 {
    10.0 * rows.div_ceil(4) as f64
}

pub(crate) fn linear(rows: usize) -> f64 {
    10.0 * rows as f64
}

/// A model in a CPU's caches: one row costs less than memory traffic suggests.
pub(crate) fn cached(rows: usize) -> f64 {
    if rows == 1 { 10.0 } else { 15.0 + 0.5 * rows as f64 }
}

pub(crate) fn crowded(rows: usize) -> f64 {
    10.0 + 2.0 * (rows as f64 - 32.0).max(0.0)
}

/// Result of decoding.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) seconds: f64,
    pub(crate) tokens: usize,
    /// γ of each round, and the tokens emitted before the round.
    pub(crate) gammas: Vec<(usize, usize)>,
}

impl World {
    pub(crate) fn uniform(&self, position: usize, index: u64) -> f64 {
        f64::from(Noise { seed: self.seed, sequence: 0, position, stream: Stream::Sample }.uniform(index))
    }

    pub(crate) fn timed(&self, seconds: f64, round: usize, index: u64) -> f64 {
        let u = |i: u64| self.uniform(round, 1_000 + 10 * index + i);
        let jitter = (u(0) + u(1) + u(2) + u(3) - 2.0) * 1.7 * self.noise;
        let interrupted = self.noise > 0.0 && u(4) < self.interrupted;
        let slow = if round < self.slow { 5.0 } else { 1.0 } * if round == 1 { self.second } else { 1.0 };
        seconds * slow * (1.0 + jitter.max(-0.5)) * if interrupted { 5.0 } else { 1.0 }
    }

    fn alpha(&self, tokens: usize) -> f64 {
        match self.text {
            Text::Even(alpha) => alpha,
            Text::Alternating(alpha, period) => alpha * f64::from(u8::from((tokens / period).is_multiple_of(2))),
            Text::Gap => [0.9, 0.05][usize::from((2_000..6_000).contains(&tokens))],
        }
    }

    fn margin(&self, round: usize, i: usize) -> f32 {
        match self.margins {
            None => f32::INFINITY,
            Some(Margins::Always(margin)) => margin,
            Some(Margins::Mean(mean)) => -(mean * self.uniform(round, 2_000 + i as u64).ln()) as f32,
        }
    }

    /// Tokens drafted in a round.
    fn drafted(&self, policy: &Policy, round: usize) -> usize {
        let Some(stop) = policy.stop().filter(|_| self.margins.is_some()) else { return policy.gamma() };
        let mut all = 1.0;
        let ends = |i: &usize| {
            all *= stop.acceptance(self.margin(round, *i));
            all < stop.min_acceptance
        };
        (0..policy.gamma_limit()).find(ends).map_or(policy.gamma_limit(), |i| i + 1)
    }

    /// Decodes at least `tokens` tokens per sequence. Returns sums of true costs; the policy observes noisy ones.
    pub(crate) fn run(&self, policy: &mut Policy, tokens: usize) -> Run {
        let mut run = Run { seconds: 0.0, tokens: 0, gammas: vec![] };
        let (mut round, mut cold) = (0, self.cold - 1.0);
        while run.tokens < tokens * self.batch {
            let done = run.tokens / self.batch;
            let proposes = self.uniform(round, 3_000) < self.proposes;
            let gamma = if proposes { self.drafted(policy, round) } else { 0 };
            run.gammas.push((gamma, done));
            if gamma > 0 {
                run.seconds += self.draft * gamma as f64;
                policy.observe_draft(self.timed(self.draft * gamma as f64, round, 0), gamma);
            }
            for sequence in 0..self.batch {
                let alpha = |i: usize| match self.scale {
                    Some(margin_scale) => Stop { min_acceptance: 0.0, margin_scale }.acceptance(self.margin(round, i)),
                    None => self.alpha(done),
                };
                let accepts = |i: usize| self.uniform(round, (sequence * 20 + i) as u64) < alpha(i);
                let accepted = (0..gamma).take_while(|i| accepts(if self.together { 0 } else { *i })).count();
                if gamma > 0 {
                    let margins: Vec<f32> = (0..gamma).map(|i| self.margin(round, i)).collect();
                    if self.margins.is_some() {
                        policy.observe_margins(&margins, accepted);
                    }
                    policy.observe_round(gamma, accepted);
                }
                run.tokens += accepted + 1;
            }
            let rows = self.batch * (gamma + 1);
            let verify = (self.verify)(rows) * if gamma == 0 { 1.0 + cold } else { 1.0 };
            cold = if gamma == 0 { cold * self.warming } else { self.cold - 1.0 };
            run.seconds += verify;
            policy.observe_verify(rows, self.timed(verify, round, 1));
            round += 1;
        }
        run
    }

    /// Time per token.
    pub(crate) fn pace(&self, mut policy: Policy, tokens: usize) -> f64 {
        let run = self.run(&mut policy, tokens);
        run.seconds / run.tokens as f64
    }

    /// Time per token at the best fixed γ.
    pub(crate) fn best(&self, max: usize, tokens: usize) -> f64 {
        (0..=max).map(|gamma| self.pace(Policy::fixed(gamma), tokens)).fold(f64::INFINITY, f64::min)
    }
}
