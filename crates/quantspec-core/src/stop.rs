//! Early end of drafts: logit margins predict the acceptance of their tokens (docs/design/policy.md).

/// Largest margin that counts, in logits.
const MARGIN_MAX: f64 = 30.0;

/// Condition that ends a draft before γ tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stop {
    /// The draft ends if the estimated probability that all its tokens are accepted is below this; 0 never ends it.
    pub min_acceptance: f64,
    /// Logit margin at which a rejection is e times less likely than at a tie.
    pub margin_scale: f64,
}

impl Stop {
    /// Estimated acceptance probability of a token by its logit margin, under greedy and replay: 1 − ½·exp(−margin / scale).
    pub fn acceptance(&self, margin: f32) -> f64 {
        1.0 - 0.5 * (-f64::from(margin).min(MARGIN_MAX) / self.margin_scale).exp()
    }
}
