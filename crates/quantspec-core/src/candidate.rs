//! Candidates of the γ policy: what each costs and yields (docs/design/policy.md).

use crate::costs::{Ratio, Timings};
use crate::forecast::Prior;
use crate::stop::Stop;

/// Initial margin scale (W4 drafts of a trained model have 0.3 to 0.6) and its bounds, in logits.
const MARGIN_SCALE: f64 = 0.45;
const MARGIN_SCALES: (f64, f64) = (0.01, 100.0);
/// Most tokens for which the judged tokens of other candidates count in one candidate's acceptance.
const POOLED: f64 = 20.0;

/// Largest α: the geometric sum of expected tokens has a closed form below 1.
pub(crate) const ALPHA_MAX: f64 = 0.999;

/// A way to draft: its cost and yield.
#[derive(Clone, Debug)]
pub(crate) struct Candidate {
    /// What was known before it drafted, if anything was.
    pub(crate) prior: Option<Prior>,
    /// Expected tokens in the time of a plain step; 0 if it cannot draft.
    pub(crate) forecast: f64,
    /// Seconds of one step.
    pub(crate) step: Timings,
    /// Accepted tokens per judged token.
    pub(crate) acceptance: Ratio,
    /// Rejections per rejection that margins predict at a scale of one logit.
    pub(crate) margins: Ratio,
    /// Rounds in which it was chosen, and the last of them.
    pub(crate) rounds: usize,
    pub(crate) last: usize,
}

impl Candidate {
    pub(crate) fn new() -> Candidate {
        Candidate {
            prior: None,
            forecast: f64::INFINITY,
            step: Timings::default(),
            // The prior: on ordinary text 4-bit drafts reach at least four of five tokens.
            acceptance: Ratio { numerator: 4.0, denominator: 5.0 },
            margins: Ratio { numerator: 2.0, denominator: 2.0 / MARGIN_SCALE },
            rounds: 0,
            last: 0,
        }
    }

    pub(crate) fn stop(&self, min_acceptance: f64) -> Stop {
        Stop { min_acceptance, margin_scale: self.margins.value().clamp(MARGIN_SCALES.0, MARGIN_SCALES.1) }
    }
}

/// α of a candidate, at most [`ALPHA_MAX`]. Rejections of others with the same weights count, scaled by the priors, as at most
/// [`POOLED`] tokens: a few tokens of its own would rank candidates by chance.
pub(crate) fn acceptance(candidates: &[Candidate], index: usize) -> f64 {
    let Candidate { prior, acceptance: Ratio { numerator: accepted, denominator: judged }, .. } = candidates[index];
    let (mut rejected, mut expected, mut tokens) = (0.0, 0.0, 0.0);
    for (at, other) in candidates.iter().enumerate().filter(|(_, other)| other.rounds > 0) {
        let (Some(prior), Some(known)) = (prior, other.prior) else { continue };
        if at != index && known.reads == prior.reads {
            let Ratio { numerator: accepted, denominator: judged } = other.acceptance;
            rejected += judged - accepted;
            expected += judged * known.rejections / prior.rejections;
            tokens += judged;
        }
    }
    let pooled = f64::min(tokens, POOLED);
    let share = if tokens > 0.0 { (rejected / expected).min(1.0) } else { 0.0 };
    (1.0 - (judged - accepted + pooled * share) / (judged + pooled)).min(ALPHA_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forecast::Reads;

    #[test]
    fn rejections_of_others_count_as_a_few_tokens() {
        let of = |rejections, reads, accepted, judged| {
            let prior = Some(Prior { bytes: 0.2, alpha: 0.95, rejections, reads });
            let acceptance = Ratio { numerator: accepted, denominator: judged };
            Candidate { prior, acceptance, rounds: 9, ..Candidate::new() }
        };
        // Ten tokens of its own, all accepted. Another candidate, which reads more, lost 10 of 100. By the priors this one loses
        // twice as many, which counts as 4 of 20 tokens.
        let (few, all) = (of(2.0, Reads::DraftWeights, 10.0, 10.0), of(1.0, Reads::DraftWeights, 90.0, 100.0));
        let found = acceptance(&[all.clone(), few.clone()], 1);
        assert!((found - 26.0 / 30.0).abs() < 1e-9, "{found}");
        // Those of other weights, and those without rounds, tell nothing.
        let unused = Candidate { rounds: 0, ..all };
        assert_eq!(acceptance(&[unused, of(1.0, Reads::TargetWeights, 0.0, 50.0), few], 2), ALPHA_MAX);
    }
}
