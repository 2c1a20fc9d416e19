//! Acceptance: how many drafted tokens stand, and which token of the target follows them.

use crate::error::{Error, Result};
use crate::sample::{Accept, Sampler, Stream, argmax, check_finite, choose, draw, uniform, warp};

/// Outcome of a round for one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Accepted drafted tokens, 0..=γ.
    pub accepted: usize,
    /// The target's token after them: the correction where a drafted token was refused, else the bonus.
    pub token: u32,
}

/// Greedy and replay: a drafted token stands while it equals the target's choice.
///
/// `chosen[i]` is the target's choice after row i; it has one element more than `drafted`.
pub fn judge_equal(drafted: &[u32], chosen: &[u32]) -> Verdict {
    let accepted = drafted.iter().zip(chosen).take_while(|(draft, target)| draft == target).count();
    Verdict { accepted, token: chosen.get(accepted).copied().unwrap_or(0) }
}

/// Leviathan/Chen rejection (arXiv 2211.17192, algorithm 1): drafted token x stands with probability min(1, p(x)/q(x)); the
/// first refused one is replaced by a draw from (p − q)+, and a draw from p follows when all stand. The emitted tokens are
/// distributed as p.
///
/// `q[i]` and `p[i]` are warped distributions over the vocabulary; `q` has γ rows, `p` γ + 1. `position` is that of the
/// first drafted token.
pub fn judge_rejection(drafted: &[u32], q: &[Vec<f32>], p: &[Vec<f32>], sampler: &Sampler, position: usize) -> Verdict {
    for (i, &token) in drafted.iter().enumerate() {
        if !accepts(token, &q[i], &p[i], sampler, position + i) {
            return Verdict { accepted: i, token: correct(&q[i], &p[i], sampler, position + i) };
        }
    }
    let accepted = drafted.len();
    Verdict { accepted, token: draw(&p[accepted], sampler, position + accepted, Stream::Sample) }
}

/// `u < p/q`, as a product: no division by q = 0, and p = 0 never stands.
fn accepts(token: u32, q: &[f32], p: &[f32], sampler: &Sampler, position: usize) -> bool {
    let u = uniform(sampler.seed, sampler.sequence, position, Stream::Accept, 0);
    let at = token as usize;
    u * q[at] < p[at]
}

/// A draw from (p − q)+ in proportion. Where rounding leaves nothing of it, p and q are equal, and p is drawn from.
fn correct(q: &[f32], p: &[f32], sampler: &Sampler, position: usize) -> u32 {
    let left: Vec<f32> = p.iter().zip(q).map(|(p, q)| (p - q).max(0.0)).collect();
    let weights = if left.iter().any(|w| *w > 0.0) { &left } else { p };
    draw(weights, sampler, position, Stream::Correct)
}

/// Proposes and judges on the host for backends whose logits are there; keeps q of the round where rejection needs it.
#[derive(Clone, Debug, Default)]
pub struct Judge {
    /// `[slot][offset]` warped draft distributions, empty unless the slot's rule is rejection.
    q: Vec<Vec<Vec<f32>>>,
}

impl Judge {
    /// A judge that holds nothing yet.
    pub fn new() -> Judge {
        Judge::default()
    }

    /// The drafted token at `position`, from the draft's logits of the row before it, which sits at `offset` of the window.
    pub fn propose(&mut self, slot: usize, offset: usize, position: usize, logits: &[f32], sampler: &Sampler) -> u32 {
        if sampler.accept == Accept::Rejection {
            self.keep(slot, offset, warp(logits, sampler));
        }
        choose(logits, sampler, position, sampler.draft_stream())
    }

    fn keep(&mut self, slot: usize, offset: usize, q: Vec<f32>) {
        if self.q.len() <= slot {
            self.q.resize_with(slot + 1, Vec::new);
        }
        let rows = &mut self.q[slot];
        rows.truncate(offset);
        rows.resize_with(offset, Vec::new);
        rows.push(q);
    }

    /// Judges the drafted tokens of a slot.
    ///
    /// `logits` are the target's, one row per window token (γ + 1); `first_position` is that of the first drafted token.
    ///
    /// # Errors
    /// [`crate::ErrorKind::NotFinite`] where logits cannot be chosen from, [`crate::ErrorKind::Internal`] where rows, tokens
    /// and kept distributions do not match.
    pub fn judge(
        &mut self,
        slot: usize,
        drafted: &[u32],
        logits: &[&[f32]],
        sampler: &Sampler,
        first_position: usize,
    ) -> Result<Verdict> {
        if logits.len() != drafted.len() + 1 {
            return Err(Error::internal(format!("{} rows for {} drafted tokens", logits.len(), drafted.len())));
        }
        for row in logits {
            check_finite(row)?;
            if drafted.iter().any(|token| *token as usize >= row.len()) {
                return Err(Error::internal("a drafted token is outside the vocabulary"));
            }
        }
        match sampler.accept {
            Accept::Greedy => Ok(equal(drafted, |i| argmax(logits[i]))),
            Accept::Replay => Ok(equal(drafted, |i| choose(logits[i], sampler, first_position + i, Stream::Sample))),
            Accept::Rejection => self.reject(slot, drafted, logits, sampler, first_position),
        }
    }

    fn reject(
        &self,
        slot: usize,
        drafted: &[u32],
        logits: &[&[f32]],
        sampler: &Sampler,
        first_position: usize,
    ) -> Result<Verdict> {
        let q = self.q.get(slot).map_or(&[][..], Vec::as_slice);
        let fits = |i: usize| q.get(i).is_some_and(|row| row.len() == logits[i].len());
        if !(0..drafted.len()).all(fits) {
            return Err(Error::internal(format!("no draft distribution of slot {slot} for every drafted token")));
        }
        let p: Vec<Vec<f32>> = logits.iter().map(|row| warp(row, sampler)).collect();
        Ok(judge_rejection(drafted, q, &p, sampler, first_position))
    }
}

/// [`judge_equal`] that asks for the target's choices only up to the first refusal.
fn equal(drafted: &[u32], target: impl Fn(usize) -> u32) -> Verdict {
    for (i, &token) in drafted.iter().enumerate() {
        let token_of_target = target(i);
        if token != token_of_target {
            return Verdict { accepted: i, token: token_of_target };
        }
    }
    Verdict { accepted: drafted.len(), token: target(drafted.len()) }
}
