//! Expected speed of ways to draft before they are tried, so that hopeless ones never are.
//!
//! An expectation is optimistic: a draft step takes the time of the bytes it reads, and acceptance is that of a good model.
//! Measurements of other ways with the same weights correct both.

use crate::cache::GAMMA_MAX;

/// Least share of the measured rejections, and of the measured time beyond that of the bytes, expected of other ways with the
/// same weights.
const REJECTIONS: f64 = 0.33;
const EXCESS: f64 = 0.8;
/// Cost of one more row of verification, in plain steps.
const ROW: f64 = 0.02;

/// Tokens that a round of γ = `gamma` emits on average if each drafted token is accepted with probability `alpha` < 1:
/// (1 − α^(γ+1)) / (1 − α) (Leviathan et al. 2023, eq. 1).
pub fn expected_tokens(alpha: f64, gamma: usize) -> f64 {
    (1.0 - alpha.powi(gamma as i32 + 1)) / (1.0 - alpha)
}

/// A way to draft.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Way {
    /// Bytes that a draft step reads, relative to those of a plain step.
    pub bytes: f64,
    /// Highest plausible probability that a drafted token is accepted.
    pub alpha: f64,
    /// Identifies its weights: measurements of one way apply in part to others with the same weights.
    pub weights: usize,
}

/// Expected tokens of each of `ways` in the time of a plain step. `measured` has the seconds of each way's step, relative to
/// a plain one, and its α ([`crate::policy::Policy::measured`]).
pub fn promises(ways: &[Way], measured: &[Option<(f64, f64)>]) -> Vec<f64> {
    ways.iter().map(|way| promise(way, ways, measured)).collect()
}

fn promise(way: &Way, ways: &[Way], measured: &[Option<(f64, f64)>]) -> f64 {
    let kin = ways.iter().zip(measured).filter(|(kin, _)| kin.weights == way.weights);
    let (mut excess, mut alpha) = (f64::INFINITY, 0.0_f64);
    for (kin, (step, measured)) in kin.filter_map(|(kin, known)| Some((kin, (*known)?))) {
        excess = excess.min(EXCESS * (step - kin.bytes).max(0.0) * (way.bytes / kin.bytes).min(1.0));
        alpha = alpha.max(1.0 - REJECTIONS * (1.0 - measured));
    }
    let (excess, alpha) = if excess.is_finite() { (excess, alpha.min(way.alpha)) } else { (0.0, way.alpha) };
    let rate = |gamma| expected_tokens(alpha, gamma) / (1.0 + gamma as f64 * (way.bytes + excess + ROW));
    (1..=GAMMA_MAX).map(rate).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUICK: Way = Way { bytes: 0.25, alpha: 0.95, weights: 0 };
    const SLOW: Way = Way { bytes: 0.9, alpha: 0.99, weights: 1 };

    #[test]
    fn fewer_bytes_promise_more() {
        let found = promises(&[QUICK, Way { bytes: 0.1, ..QUICK }, SLOW], &[None; 3]);
        assert!(found[1] > found[0] && found[0] > found[2], "{found:?}");
        // γ 8: (1 − 0.95⁹) / 0.05 tokens in 1 + 8·0.27 plain steps.
        assert!((found[0] - 7.395 / 3.16).abs() < 1e-3, "{found:?}");
        assert!(found[2] < 1.1);
    }

    #[test]
    fn what_was_measured_corrects_ways_with_the_same_weights() {
        let ways = [QUICK, Way { bytes: 0.1, ..QUICK }, SLOW];
        let hoped = promises(&ways, &[None; 3]);
        for (measured, bound) in [((0.25, 0.5), 0.75), ((1.0, 0.95), 0.9)] {
            let found = promises(&ways, &[Some(measured), None, None]);
            assert!(found[0] < bound * hoped[0] && found[1] < bound * hoped[1], "{found:?} {hoped:?}");
            assert_eq!(found[2], hoped[2]);
        }
        // A measurement better than expected does not raise the expectation.
        assert_eq!(promises(&ways, &[Some((0.2, 1.0)), None, None])[1], hoped[1]);
    }
}
