//! Log-probabilities of tokens under a row of logits.
//!
//! They are those of softmax(logits) before penalties, temperature and warpers. The target's logits do not depend on the
//! drafting method, so neither do these numbers.

/// A token's log-probability, and the most likely tokens at its position.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprob {
    /// Natural logarithm of the token's probability; −∞ if the token is masked.
    pub logprob: f64,
    /// The most likely tokens with their log-probabilities, in descending order. The lower id wins ties.
    pub top: Vec<(u32, f64)>,
}

/// ln Σ exp(logit) over `logits` `[vocab]`, summed in f64 in the order of ids; log p = logit − shift. NaN if any logit is
/// NaN.
pub fn shift(logits: &[f32]) -> f64 {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - most).exp()).sum();
    f64::from(most) + sum.ln()
}

/// The log-probability of `token` under `logits` `[vocab]`, and the `top` most likely tokens.
pub fn of(logits: &[f32], token: u32, top: usize) -> Logprob {
    let shift = shift(logits);
    let log = |id: u32| logits.get(id as usize).map_or(f64::NEG_INFINITY, |&logit| f64::from(logit) - shift);
    let top = top.min(logits.len());
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    let by_logit = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    if top > 0 {
        ids.select_nth_unstable_by(top - 1, by_logit);
    }
    ids.truncate(top);
    ids.sort_unstable_by(by_logit);
    Logprob { logprob: log(token), top: ids.into_iter().map(|id| (id, log(id))).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_logprobs() {
        let logits = [0.0, 2f32.ln(), f32::NEG_INFINITY, 0.0];
        let found = of(&logits, 3, 3);
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-6, "{a} {b}");
        close(found.logprob, 0.25f64.ln());
        assert_eq!(found.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [1, 0, 3]);
        close(found.top[0].1, 0.5f64.ln());
        assert_eq!(of(&logits, 2, 0), Logprob { logprob: f64::NEG_INFINITY, top: Vec::new() });
        assert_eq!(of(&logits, 0, 99).top.len(), 4);
        // Large logits neither overflow nor lose their difference.
        close(of(&[1e6, 1e6], 0, 0).logprob, 0.5f64.ln());
        assert!(of(&[f32::NAN, 0.0], 1, 1).logprob.is_nan());
    }
}
