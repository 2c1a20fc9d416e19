//! Choosing tokens from the logits of the last head, and verifying drafted tokens.

use crate::network::{DraftConfig, Step};
use quantspec_core::Result;
use quantspec_core::grammar::{self, Constraint};
use quantspec_core::penalty::{History, penalised};
use quantspec_core::sample::Sampler;
use quantspec_core::stop::Stop;
use quantspec_core::verify::{DraftDistribution, Verdict};
use std::borrow::Cow;
use std::sync::Arc;

/// What one slot does in a round.
#[derive(Clone, Debug)]
pub struct Turn {
    /// Sequence slot.
    pub slot: usize,
    /// Committed tokens.
    pub committed: usize,
    /// Tokens to draft, 0..=GAMMA_MAX; after the draft, the number of drafted tokens.
    pub gamma: usize,
    /// Configuration of a draft that the verification runs first; its tokens are not in the window yet.
    pub to_draft: Option<DraftConfig>,
    /// When to end the draft early. Applies to a turn that is alone in its round; the logit margin of every token is then
    /// read.
    pub stop: Option<Stop>,
    /// Logit margins of the drafted tokens; empty if they were not read.
    pub margins: Vec<f32>,
    /// The drafted tokens are copied from earlier text. The drafting network skips this turn.
    pub copied: bool,
    /// The distribution that the drafted tokens were drawn from.
    pub q: DraftDistribution,
    /// How tokens are chosen and accepted.
    pub sampler: Sampler,
    /// The committed text, if the sampler has penalties.
    pub history: Option<Arc<History>>,
    /// Grammar that constrains the answer; `None` without one.
    pub constraint: Option<Arc<Constraint>>,
    /// The caller reads [`TokenSampler::logits`] of the turn's rows after they are judged.
    pub reads_logits: bool,
}

impl Turn {
    /// A turn of γ tokens without early end, with nothing drafted.
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
            constraint: None,
            reads_logits: false,
        }
    }

    /// Returns true if the network drafts a token after the one at `offset` of the window.
    pub fn drafts(&self, offset: usize) -> bool {
        !self.copied && self.gamma > offset
    }

    /// Returns true if tokens may be forbidden. Then all logits of a row may be −∞ though the network's are finite.
    pub fn forbids(&self) -> bool {
        self.constraint.is_some()
            || self.history.as_ref().is_some_and(|history| history.penalties().no_repeat_ngram > 0)
    }

    /// Returns true if tokens may be chosen from other logits than the network's.
    pub fn changes_logits(&self) -> bool {
        self.constraint.is_some() || self.history.is_some()
    }

    /// The logits `[vocab]` that the token after `drafted` ones is chosen from: those given, penalised and masked.
    ///
    /// # Errors
    /// Those of [`Constraint::mask`].
    pub fn allowed<'a>(&self, logits: &'a [f32], drafted: &[u32]) -> Result<Cow<'a, [f32]>> {
        let mut logits = penalised(logits, self.history.as_deref(), drafted);
        if let Some(constraint) = &self.constraint
            && let Some(mask) = constraint.mask(drafted)?
        {
            grammar::apply(logits.to_mut(), &mask);
        }
        Ok(logits)
    }

    /// Records the logit margin of the token just drafted. Ends the draft if acceptance of all its tokens has become unlikely
    /// enough.
    pub fn drafted(&mut self, margin: f32) {
        // NaN counts as margin 0, the least certain.
        self.margins.push(if margin.is_nan() { 0.0 } else { margin });
        let Some(stop) = self.stop else { return };
        let all: f64 = self.margins.iter().map(|&margin| stop.acceptance(margin)).product();
        if all < stop.min_acceptance {
            self.gamma = self.margins.len();
        }
    }
}

/// Chooses and judges tokens after [`crate::network::Network::head`], on the device that holds the logits.
pub trait TokenSampler: Send {
    /// The logits of row `row` of the last [`crate::network::Network::head`] (a prefill block has one row), `[vocab]`, before
    /// penalties, masks and warpers. After [`TokenSampler::judge`] they are valid for turns with [`Turn::reads_logits`]; after
    /// [`TokenSampler::first`] for none.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] if there is no such row. Device errors of a GPU.
    fn logits(&mut self, row: usize) -> Result<Vec<f32>>;

    /// Samples the token after a prefill block from the head's only row, at position `turn.committed`, the length of the
    /// prompt.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::NotFinite`] if no token can be chosen, and on a GPU if keys or values of the prompt
    /// overflow f16. [`quantspec_core::ErrorKind::Input`] if penalties and grammar forbid all tokens, or the grammar takes too
    /// much work. On a GPU also [`quantspec_core::ErrorKind::Internal`] if there is no such slot, and device errors.
    fn first(&mut self, turn: &Turn) -> Result<u32>;

    /// Chooses the next token of every row of a draft step and writes it into the window at `row.offset + 1`. Keeps q if the
    /// sampler's acceptance rule needs it. `turns` holds the turn of every slot.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] if a row's slot has no turn or its window no room, and on a GPU if
    /// [`crate::backend::Options::rejection`] is not set. Errors of the turns' grammars. Device errors of a GPU.
    fn propose(&mut self, step: &Step, turns: &[Turn]) -> Result<()>;

    /// The logit margin of the token that the row at `offset` of the slot proposed in the last draft step, which had rows of
    /// this slot alone (on a GPU one row). Infinite for a token drawn for rejection.
    ///
    /// # Errors
    /// Device errors of a GPU, which synchronises here.
    fn margin(&mut self, slot: usize, offset: usize) -> Result<f32>;

    /// The kept distribution of a slot's token after `offset`, in the form that [`TokenSampler::set_distribution`] of the
    /// same kind of backend takes. For acceptance by rejection only.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] if nothing was kept. On a GPU [`quantspec_core::ErrorKind::NotFinite`] for
    /// NaN, and device errors.
    fn distribution(&mut self, slot: usize, offset: usize) -> Result<Vec<f32>>;

    /// The probabilities `[vocab]` that a slot's token after `offset` was drawn from. For acceptance by rejection only.
    ///
    /// # Errors
    /// As [`TokenSampler::distribution`].
    fn draft_probabilities(&mut self, slot: usize, offset: usize, sampler: &Sampler) -> Result<Vec<f32>>;

    /// Keeps the distribution of a token that another backend proposed, as [`TokenSampler::propose`] would. Called by
    /// ascending offset.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] if it has another vocabulary size, and on a GPU if there is no room for it.
    /// Device errors of a GPU.
    fn set_distribution(&mut self, slot: usize, offset: usize, q: &[f32]) -> Result<()>;

    /// After the head of a verify step: accepts the longest valid prefix of each turn's drafted tokens and chooses the token
    /// after it. One verdict per turn, in order.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::NotFinite`] if no token can be chosen, and on a GPU if keys or values overflowed f16
    /// after the last check. [`quantspec_core::ErrorKind::Input`] as of [`TokenSampler::first`].
    /// [`quantspec_core::ErrorKind::Internal`] if rows, drafted tokens or kept distributions do not match the turns. Device
    /// errors of a GPU.
    fn judge(&mut self, step: &Step, turns: &[Turn]) -> Result<Vec<Verdict>>;
}
