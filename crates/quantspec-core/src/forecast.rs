//! Expected speed of a candidate before it is tried, so that candidates that cannot pay are not tried.
//!
//! A forecast is optimistic: a draft step takes the time of the bytes it reads, and acceptance is that of a good model.
//! Measurements of other candidates with the same weights correct both.

use crate::cache::GAMMA_MAX;

/// After a candidate with the same weights was measured, at least this share of its rejection rate is expected.
const REJECTIONS: f64 = 0.33;
/// Likewise, at least this share of the time by which its step exceeds the time of its bytes.
const EXCESS: f64 = 0.8;
/// Cost of one more row of verification, in plain steps.
const ROW: f64 = 0.02;

/// Tokens that a round of γ = `gamma` emits on average if each drafted token is accepted with probability `alpha` < 1:
/// (1 − α^(γ+1)) / (1 − α) (Leviathan et al. 2023, eq. 1).
pub fn expected_tokens(alpha: f64, gamma: usize) -> f64 {
    (1.0 - alpha.powi(gamma as i32 + 1)) / (1.0 - alpha)
}

/// What is known of a candidate before it drafts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prior {
    /// Bytes that a draft step reads, relative to those of a plain step.
    pub bytes: f64,
    /// Highest plausible probability that a drafted token is accepted.
    pub alpha: f64,
    /// Expected rejections, relative to those of other candidates with the same weights.
    pub rejections: f64,
    /// Measurements of one candidate apply in part to others that read the same weights.
    pub reads: Reads,
}

/// Weights that a draft step reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reads {
    /// The target's in 4 bits.
    DraftWeights,
    /// Those of a plain step.
    TargetWeights,
    /// Another checkpoint's.
    DraftModel,
}

/// Expected tokens of each candidate in the time of a plain step, at its best γ: 0 if it is not usable, infinite without
/// priors. `measured` has the time of each candidate's step, relative to a plain one, and its α
/// ([`crate::policy::Policy::measured`]).
pub fn forecasts(usable: &[bool], priors: &[Prior], measured: &[Option<(f64, f64)>]) -> Vec<f64> {
    let expected = |index| priors.get(index).map_or(f64::INFINITY, |prior| forecast(prior, priors, measured));
    usable.iter().enumerate().map(|(index, &usable)| if usable { expected(index) } else { 0.0 }).collect()
}

fn forecast(prior: &Prior, priors: &[Prior], measured: &[Option<(f64, f64)>]) -> f64 {
    let peers = priors.iter().zip(measured).filter(|(peer, _)| peer.reads == prior.reads);
    let (mut excess, mut alpha) = (f64::INFINITY, 0.0_f64);
    for (peer, (step, measured)) in peers.filter_map(|(peer, known)| Some((peer, (*known)?))) {
        excess = excess.min(EXCESS * (step - peer.bytes).max(0.0) * (prior.bytes / peer.bytes).min(1.0));
        alpha = alpha.max(1.0 - REJECTIONS * (1.0 - measured));
    }
    let (excess, alpha) = if excess.is_finite() { (excess, alpha.min(prior.alpha)) } else { (0.0, prior.alpha) };
    let rate = |gamma| expected_tokens(alpha, gamma) / (1.0 + gamma as f64 * (prior.bytes + excess + ROW));
    (1..=GAMMA_MAX).map(rate).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUICK: Prior = Prior { bytes: 0.25, alpha: 0.95, rejections: 1.0, reads: Reads::DraftWeights };
    const SLOW: Prior = Prior { bytes: 0.9, alpha: 0.99, rejections: 1.0, reads: Reads::TargetWeights };

    #[test]
    fn fewer_bytes_raise_a_forecast() {
        let found = forecasts(&[true; 3], &[QUICK, Prior { bytes: 0.1, ..QUICK }, SLOW], &[None; 3]);
        assert!(found[1] > found[0] && found[0] > found[2], "{found:?}");
        // γ 8: (1 − 0.95⁹) / 0.05 tokens in 1 + 8·0.27 plain steps.
        assert!((found[0] - 7.395 / 3.16).abs() < 1e-3, "{found:?}");
        assert!(found[2] < 1.1);
    }

    #[test]
    fn measurements_correct_candidates_with_the_same_weights() {
        let priors = [QUICK, Prior { bytes: 0.1, ..QUICK }, SLOW];
        let before = forecasts(&[true; 3], &priors, &[None; 3]);
        for (measured, bound) in [((0.25, 0.5), 0.75), ((1.0, 0.95), 0.9)] {
            let found = forecasts(&[true; 3], &priors, &[Some(measured), None, None]);
            assert!(found[0] < bound * before[0] && found[1] < bound * before[1], "{found:?} {before:?}");
            assert_eq!(found[2], before[2]);
        }
        // A measurement better than expected does not raise the expectation.
        assert_eq!(forecasts(&[true; 3], &priors, &[Some((0.2, 1.0)), None, None])[1], before[1]);
    }
}
