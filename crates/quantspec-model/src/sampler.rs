//! Choosing tokens from the last head's logits, and judging drafted ones.

use crate::network::{DraftPlan, Step};
use quantspec_core::Result;
use quantspec_core::penalty::History;
use quantspec_core::sample::Sampler;
use quantspec_core::stop::Stop;
use quantspec_core::verify::{DraftDistribution, Verdict};
use std::sync::Arc;

/// What one slot does in a round.
#[derive(Clone, Debug)]
pub struct Turn {
    /// Sequence slot.
    pub slot: usize,
    /// Committed tokens.
    pub committed: usize,
    /// Tokens to draft, 0..=GAMMA_MAX; after the draft, tokens that were drafted.
    pub gamma: usize,
    /// How its tokens are drafted with the verification, where they do not stand in the window yet.
    pub to_draft: Option<DraftPlan>,
    /// When to draft fewer: the draft of a turn that is alone in its round then looks at the logit margin of every token.
    pub stop: Option<Stop>,
    /// Logit margins of the drafted tokens; empty where they were not looked at.
    pub margins: Vec<f32>,
    /// Its tokens are copied from the sequence's text, in place of a draft by the network, which leaves this turn out.
    pub copied: bool,
    /// What the drafted tokens were drawn from.
    pub q: DraftDistribution,
    /// How tokens are chosen and accepted.
    pub sampler: Sampler,
    /// The committed text, where the sampler has penalties.
    pub history: Option<Arc<History>>,
    /// The caller reads [`TokenSampler::logits`] of the turn's rows after they are judged.
    pub reads_logits: bool,
}

impl Turn {
    /// A turn of γ tokens that no margin ends, with nothing drafted.
    pub fn new(slot: usize, committed: usize, gamma: usize, sampler: Sampler) -> Turn {
        Turn {
            slot,
            committed,
            gamma,
            to_draft: None,
            stop: None,
            margins: Vec::new(),
            copied: false,
            q: DraftDistribution::Kept,
            sampler,
            history: None,
            reads_logits: false,
        }
    }

    /// Whether the network drafts a token after the one at `offset` of the window.
    pub fn drafts(&self, offset: usize) -> bool {
        !self.copied && self.gamma > offset
    }

    /// Notes the logit margin of the token just drafted. The draft ends with it where it has become unlikely enough that all of its tokens stand.
    pub fn drafted(&mut self, margin: f32) {
        // A draft that computed no number is in doubt.
        self.margins.push(if margin.is_nan() { 0.0 } else { margin });
        let Some(stop) = self.stop else { return };
        let all: f64 = self.margins.iter().map(|&margin| stop.acceptance(margin)).product();
        if all < stop.min_acceptance {
            self.gamma = self.margins.len();
        }
    }
}

/// Chooses and judges tokens after [`crate::network::Network::head`], where the logits are.
pub trait TokenSampler: Send {
    /// The logits of row `row` of the last [`crate::network::Network::head`] (a prefill block has one row), `[vocab]`, before penalties
    /// and warpers. After [`TokenSampler::judge`] they may be read of turns that said so ([`Turn::reads_logits`]), after
    /// [`TokenSampler::first`] not at all.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] where there is no such row. Device errors of a GPU.
    fn logits(&mut self, row: usize) -> Result<Vec<f32>>;

    /// Samples the token after a prefill block from the last head's only row, at position `turn.committed`, the length of the prompt.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::NotFinite`] where no token can be chosen, and on a GPU where keys or values of the prompt
    /// are beyond half precision. On a GPU [`quantspec_core::ErrorKind::Internal`] where there is no such slot, and device
    /// errors.
    fn first(&mut self, turn: &Turn) -> Result<u32>;

    /// Chooses the next token of every row of a draft step (after [`crate::network::Network::head`]) and writes it into the window at
    /// `row.offset + 1`; keeps q where the sampler's acceptance rule needs it. `turns` holds the turn of every slot.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] where a row's slot has no turn or its window no room, and on a GPU where
    /// [`crate::backend::Options::rejection`] was not set. Device errors of a GPU.
    fn propose(&mut self, step: &Step, turns: &[Turn]) -> Result<()>;

    /// The logit margin of the slot's last proposed token, whose step had this row alone; infinite where it was drawn for rejection.
    ///
    /// # Errors
    /// Device errors of a GPU, which waits for the token here.
    fn margin(&mut self, slot: usize) -> Result<f32>;

    /// What was kept of the distribution that a slot's token after `offset` was drawn from, as backends of this kind hand it to
    /// one another ([`TokenSampler::set_distribution`]); acceptance by rejection only.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] where nothing was kept. On a GPU [`quantspec_core::ErrorKind::NotFinite`] for what
    /// is no number, and device errors.
    fn distribution(&mut self, slot: usize, offset: usize) -> Result<Vec<f32>>;

    /// Keeps the distribution of a token that another backend proposed, in place of what [`TokenSampler::propose`] keeps; by
    /// offset, ascending.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] where it is of another vocabulary, and on a GPU where there is no room for it.
    /// Device errors of a GPU.
    fn set_distribution(&mut self, slot: usize, offset: usize, q: &[f32]) -> Result<()>;

    /// After the head of a verify step: accepts the longest valid prefix of each turn's drafted tokens and chooses the token
    /// after it. One verdict per turn, in order.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::NotFinite`] where no token can be chosen, and on a GPU where keys or values since the
    /// last look are beyond half precision. [`quantspec_core::ErrorKind::Internal`] where rows, drafted tokens or kept
    /// distributions do not match the turns. Device errors of a GPU.
    fn judge(&mut self, step: &Step, turns: &[Turn]) -> Result<Vec<Verdict>>;
}
