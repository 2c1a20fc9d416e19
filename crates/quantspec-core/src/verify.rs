//! Acceptance rules: how many drafted tokens are accepted, and which token of the target follows them.

use crate::error::{Error, Result};
use crate::noise::Stream;
use crate::sample::{Accept, Sampler, check_left, choose, choose_with_margin, draw, warp};
use std::borrow::Cow;

/// Outcome of a round for one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Accepted drafted tokens, 0..=γ.
    pub accepted: usize,
    /// The target's token after them: the correction if a drafted token was rejected, else the bonus.
    pub token: u32,
}

/// The distribution q of drafted tokens, which rejection compares with the target's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DraftDistribution {
    /// The distribution kept when each token was proposed ([`Judge::propose`], or a backend's kernel).
    #[default]
    Kept,
    /// One at the drafted token: the drafter has no distribution.
    OneHot,
}

/// q of the drafted tokens of one sequence, by offset.
#[derive(Clone, Copy)]
enum Q<'a> {
    /// Warped distributions over the vocabulary.
    Kept(&'a [Vec<f32>]),
    /// The drafted tokens, each certain.
    OneHot(&'a [u32]),
}

impl Q<'_> {
    /// Probability of a token at an offset.
    fn at(&self, offset: usize, token: usize) -> f32 {
        match self {
            Q::Kept(rows) => rows[offset][token],
            Q::OneHot(drafted) => f32::from(u8::from(drafted[offset] as usize == token)),
        }
    }
}

/// Block verification (Sun et al. 2025, arXiv 2403.10444, algorithm 2): rejection that judges the drafted tokens x₁ … x_γ
/// together. A token that the target prefers makes up for earlier ones that the draft preferred, so more are accepted than by a
/// test of each (Leviathan et al. 2023). With p_i and q_i, the distributions of x_i,
///
/// ```text
/// s_0 = 1,  s_i = min(1, s_{i−1} · p_i(x_i) / q_i(x_i))
/// m_i = Σ_x (s_i · p_{i+1}(x) − q_{i+1}(x))+
/// ```
///
/// the longest prefix that passes its test is accepted. That of i tokens passes with probability m_i / (m_i + 1 − s_i), all γ
/// with probability s_γ, and the empty one always. A draw from (s_i · p_{i+1} − q_{i+1})+ follows, or the bonus after all γ. The
/// emitted tokens are distributed as p (docs/design/rejection.md), even if the drafted ones decide where the draft ends.
///
/// `p`: the target's warped distribution of each drafted token. `position` is that of the first one.
fn rejection(
    drafted: &[u32],
    q: Q,
    p: &[Vec<f32>],
    bonus: impl FnOnce() -> u32,
    sampler: &Sampler,
    position: usize,
) -> Verdict {
    let gamma = drafted.len();
    let mut shares = vec![1.0];
    for (i, &token) in drafted.iter().enumerate() {
        shares.push(share_after(shares[i], p[i][token as usize], q.at(i, token as usize)));
    }
    // Noise of the test of n tokens, and weights of the token after them.
    let u = |n: usize| sampler.noise(position + n - 1, Stream::Accept(n - 1)).uniform(0);
    let left_of = |n: usize| left(shares[n], &p[n], |id| q.at(n, id));
    if gamma == 0 || u(gamma) < shares[gamma] {
        return Verdict { accepted: gamma, token: bonus() };
    }
    let mut accepted = gamma - 1;
    let mut left = left_of(accepted);
    while accepted > 0 && !prefix_passes(u(accepted), shares[accepted], &left) {
        accepted -= 1;
        left = left_of(accepted);
    }
    // If rounding leaves no mass, p and q are equal, and the draw is from p.
    let weights = if left.iter().any(|w| *w > 0.0) { &left } else { &p[accepted] };
    Verdict { accepted, token: draw(weights, sampler.noise(position + accepted, Stream::Correct(accepted))) }
}

/// The verdict of rejection on drafted tokens of which the last leads to a row without a token: NaN, or nothing left to choose.
/// The text may end there, in the error of that row, but not before its time. So the draft ends there, and the row decides
/// nothing: if all tokens are accepted, the last one counts as the token after them, and the next round begins with the row.
///
/// `q` and `p`: distributions `[vocab]` of each drafted token, of the draft and of the target. `position` is that of the first
/// one.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if nothing was drafted, or there are other numbers of distributions or tokens.
pub fn judge_up_to_failure(
    drafted: &[u32],
    q: &[Vec<f32>],
    p: &[Vec<f32>],
    sampler: &Sampler,
    position: usize,
) -> Result<Verdict> {
    let known = |rows: &[Vec<f32>]| {
        rows.len() == drafted.len() && rows.iter().zip(drafted).all(|(row, &token)| row.len() > token as usize)
    };
    match drafted.last() {
        Some(&last) if known(q) && known(p) => {
            let verdict = rejection(drafted, Q::Kept(q), p, || last, sampler, position);
            Ok(Verdict { accepted: verdict.accepted.min(drafted.len() - 1), ..verdict })
        }
        _ => Err(Error::internal(format!("{} and {} rows of {} drafted tokens", p.len(), q.len(), drafted.len()))),
    }
}

/// s_i from s_{i−1} and the drafted token's probabilities. A token that the target excludes has none, whatever q is.
fn share_after(share: f32, p: f32, q: f32) -> f32 {
    if p > 0.0 { (share * p / q).min(1.0) } else { 0.0 }
}

/// Weights `[vocab]` of the token after an accepted prefix: (share · p − q)+.
fn left(share: f32, p: &[f32], q: impl Fn(usize) -> f32) -> Vec<f32> {
    p.iter().enumerate().map(|(id, p)| (share * p - q(id)).max(0.0)).collect()
}

/// u < m / (m + 1 − share) with the sum m of the prefix's weights. At share 1 it passes whatever m is: m is 0 if p = q.
fn prefix_passes(u: f32, share: f32, left: &[f32]) -> bool {
    let mass: f64 = left.iter().copied().map(f64::from).sum();
    share >= 1.0 || f64::from(u) * (mass + 1.0 - f64::from(share)) < mass
}

/// Proposes and judges on the host, for backends with logits there; keeps the round's q if rejection needs it.
#[derive(Clone, Debug, Default)]
pub struct Judge {
    /// `[slot][offset]` warped draft distributions, empty unless the slot's rule is rejection.
    q: Vec<Vec<Vec<f32>>>,
    /// `[slot][offset]` logit margins of proposed tokens.
    margins: Vec<Vec<f32>>,
}

impl Judge {
    /// A judge that holds nothing yet.
    pub fn new() -> Judge {
        Judge::default()
    }

    /// The drafted token at `position`, from the draft's logits `[vocab]` of the row before it, at `offset` of the window.
    pub fn propose(&mut self, slot: usize, offset: usize, position: usize, logits: &[f32], sampler: &Sampler) -> u32 {
        if self.margins.len() <= slot {
            self.margins.resize_with(slot + 1, Vec::new);
        }
        let margins = &mut self.margins[slot];
        margins.resize(margins.len().max(offset + 1), f32::INFINITY);
        if sampler.accept != Accept::Rejection {
            let (token, margin) = choose_with_margin(logits, sampler, position, sampler.draft_stream(offset));
            margins[offset] = margin;
            return token;
        }
        // Its noise is not the target's, so a margin does not predict acceptance.
        margins[offset] = f32::INFINITY;
        self.keep(slot, offset, warp(logits, sampler));
        choose(logits, sampler, position, sampler.draft_stream(offset))
    }

    /// The logit margin of the token proposed last at an offset of a slot's window; infinite if there is none.
    pub fn margin(&self, slot: usize, offset: usize) -> f32 {
        self.margins.get(slot).and_then(|margins| margins.get(offset)).copied().unwrap_or(f32::INFINITY)
    }

    /// The kept warped distribution of a slot's drafted token at `offset`, `[vocab]`.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if there is none.
    pub fn distribution(&self, slot: usize, offset: usize) -> Result<&[f32]> {
        let q = self.q.get(slot).and_then(|rows| rows.get(offset)).filter(|row| !row.is_empty());
        q.map(Vec::as_slice).ok_or_else(|| Error::internal(format!("no draft distribution {offset} of slot {slot}")))
    }

    /// Keeps the warped distribution of a slot's drafted token at `offset`, `[vocab]`, and drops those after it.
    /// [`Judge::judge`] refuses another length.
    pub fn keep(&mut self, slot: usize, offset: usize, q: Vec<f32>) {
        if self.q.len() <= slot {
            self.q.resize_with(slot + 1, Vec::new);
        }
        let rows = &mut self.q[slot];
        // Truncates or extends to the rows before this one, which drops an earlier round's rows.
        rows.resize_with(offset, Vec::new);
        rows.push(q);
    }

    /// As [`Judge::judge_rows`], with all rows at once.
    ///
    /// # Errors
    /// As [`Judge::judge_rows`].
    pub fn judge(
        &self,
        slot: usize,
        drafted: &[u32],
        q: DraftDistribution,
        logits: &[&[f32]],
        sampler: &Sampler,
        first_position: usize,
    ) -> Result<Verdict> {
        let rows = logits.iter().map(|row| Ok(Cow::Borrowed(*row)));
        self.judge_rows(slot, drafted, q, rows, sampler, first_position)
    }

    /// Judges a slot's drafted tokens, which were drawn from `q`.
    ///
    /// `rows` are the target's logits, one row per window token (γ + 1). Each is dropped before the next one is taken: rows
    /// changed by penalties or a grammar have memory of their own. `first_position` is that of the first drafted token.
    ///
    /// # Errors
    /// Those of `rows`, those of [`check_left`] if no token can be chosen from the logits, [`crate::ErrorKind::Internal`] if
    /// rows, tokens and kept distributions do not match.
    pub fn judge_rows<'a>(
        &self,
        slot: usize,
        drafted: &[u32],
        q: DraftDistribution,
        rows: impl ExactSizeIterator<Item = Result<Cow<'a, [f32]>>>,
        sampler: &Sampler,
        first_position: usize,
    ) -> Result<Verdict> {
        let gamma = drafted.len();
        if rows.len() != gamma + 1 {
            return Err(Error::internal(format!("{} rows for {gamma} drafted tokens", rows.len())));
        }
        let mut rows = rows.map(|row| {
            let row = row?;
            check_left(&row)?;
            match drafted.iter().find(|token| **token as usize >= row.len()) {
                Some(token) => {
                    Err(Error::internal(format!("drafted token {token} is outside the vocabulary of {}", row.len())))
                }
                None => Ok(row),
            }
        });
        let choose = |offset: usize, row: &[f32]| choose(row, sampler, first_position + offset, Stream::Sample);
        if sampler.accept != Accept::Rejection {
            let verdict = equal(drafted, rows.by_ref().enumerate().map(|(offset, row)| Ok(choose(offset, &row?))))?;
            // A row that fails ends the round, also after a rejection.
            rows.try_for_each(|row| row.map(drop))?;
            return Ok(verdict);
        }
        let p = rows.by_ref().take(gamma).map(|row| Ok(warp(&row?, sampler))).collect::<Result<Vec<_>>>()?;
        let last = rows.next().ok_or_else(|| Error::internal(format!("no row after {gamma} drafted tokens")))??;
        let q = match q {
            DraftDistribution::Kept => Q::Kept(self.kept(slot, gamma, last.len())?),
            DraftDistribution::OneHot => Q::OneHot(drafted),
        };
        // The bonus is chosen as in plain decoding, so γ = 0 is plain decoding under every rule.
        Ok(rejection(drafted, q, &p, || choose(gamma, &last), sampler, first_position))
    }

    /// The slot's kept distributions, at least one for each of the `drafted` tokens.
    fn kept(&self, slot: usize, drafted: usize, vocab: usize) -> Result<&[Vec<f32>]> {
        let q = self.q.get(slot).map_or(&[][..], Vec::as_slice);
        if !(0..drafted).all(|i| q.get(i).is_some_and(|row| row.len() == vocab)) {
            return Err(Error::internal(format!("no draft distribution of slot {slot} for every drafted token")));
        }
        Ok(q)
    }
}

/// Greedy and replay: accepts drafted tokens that equal the target's choices, which are taken only up to the first rejection.
fn equal(drafted: &[u32], target: impl Iterator<Item = Result<u32>>) -> Result<Verdict> {
    for (accepted, token) in target.enumerate() {
        let token = token?;
        if drafted.get(accepted) != Some(&token) {
            return Ok(Verdict { accepted, token });
        }
    }
    Err(Error::internal(format!("no token of the target after {} drafted ones", drafted.len())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;
    use proptest::prelude::*;

    const MASKED: f32 = f32::NEG_INFINITY;

    fn sampler(temperature: f32, top_k: usize, top_p: f32, min_p: f32, accept: Accept) -> Sampler {
        Sampler { temperature, top_k, top_p, min_p, seed: 17, accept, ..Sampler::greedy() }.checked().unwrap()
    }

    fn any_logits(vocab: usize) -> impl Strategy<Value = Vec<f32>> {
        prop::collection::vec(prop_oneof![8 => -4.0f32..4.0, 1 => Just(MASKED)], vocab)
            .prop_filter("one token must be possible", |logits| logits.iter().any(|l| *l > MASKED))
    }

    /// Pearson's statistic divided by the 1 − 10⁻⁵ quantile of its χ² distribution (Wilson and Hilferty). Above 1 the counts
    /// do not follow `p`.
    fn misfit(counts: &[f64], p: &[f32]) -> f64 {
        let total: f64 = counts.iter().sum();
        let possible: Vec<(f64, f64)> =
            counts.iter().zip(p).filter(|(_, p)| **p > 0.0).map(|(n, p)| (*n, f64::from(*p) * total)).collect();
        if counts.iter().zip(p).any(|(n, p)| *n > 0.0 && *p == 0.0) {
            return f64::INFINITY;
        }
        let freedom = possible.len() as f64 - 1.0;
        if freedom == 0.0 {
            return 0.0;
        }
        let chi: f64 = possible.iter().map(|(n, want)| (n - want).powi(2) / want).sum();
        let spread = 2.0 / (9.0 * freedom);
        chi / (freedom * (1.0 - spread + 4.265 * spread.sqrt()).powi(3))
    }

    /// Counts of emitted tokens over many rounds with the same logits, by position in the round.
    fn emitted(q: &[Vec<f32>], p: &[Vec<f32>], sampler: &Sampler, rounds: usize) -> Vec<Vec<f64>> {
        let rows: Vec<&[f32]> = p.iter().map(Vec::as_slice).collect();
        let mut counts = vec![vec![0.0; p[0].len()]; p.len()];
        let mut judge = Judge::new();
        for round in 0..rounds {
            let first = round * 10;
            let drafted: Vec<u32> = (0..q.len()).map(|i| judge.propose(2, i, first + i, &q[i], sampler)).collect();
            let verdict = judge.judge(2, &drafted, DraftDistribution::Kept, &rows, sampler, first).unwrap();
            for (offset, &token) in drafted[..verdict.accepted].iter().chain([&verdict.token]).enumerate() {
                counts[offset][token as usize] += 1.0;
            }
        }
        counts
    }

    #[test]
    fn tokens_that_lead_to_failure_are_not_rarer() {
        // Token 1 is likely, and leads to a row without a token, whatever follows it.
        let p = [vec![0.2, 1.0, 0.0], vec![0.5, 0.0, 1.0], vec![0.1, 0.2, 0.3]];
        let q = [vec![0.6, 0.7, 0.1], vec![1.0, 0.5, 0.0]];
        let sampler = sampler(1.0, 0, 1.0, 0.0, Accept::Rejection);
        let warped = |rows: &[Vec<f32>]| rows.iter().map(|row| warp(row, &sampler)).collect::<Vec<_>>();
        let mut judge = Judge::new();
        let mut counts = vec![0.0; 3];
        for round in 0..40_000 {
            let first = round * 10;
            let drafted: Vec<u32> = (0..2).map(|i| judge.propose(0, i, first + i, &q[i], &sampler)).collect();
            let verdict = match drafted.iter().position(|&token| token == 1) {
                Some(at) => {
                    let (q, p) = (warped(&q[..=at]), warped(&p[..=at]));
                    let verdict = judge_up_to_failure(&drafted[..=at], &q, &p, &sampler, first).unwrap();
                    assert!(verdict.accepted <= at);
                    verdict
                }
                None => {
                    let rows: Vec<&[f32]> = p.iter().map(Vec::as_slice).collect();
                    judge.judge(0, &drafted, DraftDistribution::Kept, &rows, &sampler, first).unwrap()
                }
            };
            let emitted = if verdict.accepted > 0 { drafted[0] } else { verdict.token };
            counts[emitted as usize] += 1.0;
        }
        assert!(misfit(&counts, &warp(&p[0], &sampler)) < 1.0, "{counts:?}");
        for (drafted, q, p) in [(&[][..], 0, 0), (&[1][..], 2, 1), (&[1][..], 1, 0), (&[9][..], 1, 1)] {
            let rows = |n| vec![vec![0.3, 0.3, 0.4]; n];
            let refused = judge_up_to_failure(drafted, &rows(q), &rows(p), &sampler, 0);
            assert_eq!(refused.err().map(|error| error.kind), Some(ErrorKind::Internal));
        }
    }

    #[test]
    fn rejection_emits_the_target_distribution_under_every_warper() {
        // Row 0: token 2 is impossible for the draft, token 4 for the target. Row 1: nearly disjoint. Row 2: the bonus.
        let p = vec![
            vec![1.0, 0.5, 0.8, -1.0, MASKED, 0.2],
            vec![3.0, -2.0, 0.0, -2.0, 1.0, 1.5],
            vec![0.3, 0.2, 0.1, 0.0, -0.1, -0.2],
        ];
        let q = vec![vec![0.2, 1.5, MASKED, -0.5, 1.0, 0.0], vec![0.0, 2.0, 1.0, 2.0, -1.0, 1.5]];
        let warpers = [
            (1.0, 0, 1.0, 0.0),
            (0.6, 0, 1.0, 0.0),
            (1.7, 0, 1.0, 0.0),
            (1.0, 3, 1.0, 0.0),
            (1.0, 0, 0.7, 0.0),
            (1.0, 0, 1.0, 0.35),
            (0.8, 4, 0.9, 0.1),
            (1.0, 1, 1.0, 0.0),
        ];
        for (t, k, top_p, min_p) in warpers {
            for accept in [Accept::Rejection, Accept::Replay] {
                let sampler = sampler(t, k, top_p, min_p, accept);
                let counts = emitted(&q, &p, &sampler, 30_000);
                let reached = |offset: usize| counts[offset].iter().sum::<f64>();
                // Only a hard cut prevents every agreement here.
                assert!(reached(0) == 30_000.0 && (reached(1) > 5_000.0 || k > 0 || top_p < 1.0));
                for (offset, counts) in counts.iter().enumerate().filter(|(offset, _)| reached(*offset) > 300.0) {
                    // Under replay a later position is reached by agreement, which selects its noise; it is compared with
                    // plain decoding below.
                    if accept == Accept::Rejection || offset == 0 {
                        let want = warp(&p[offset], &sampler);
                        let misfit = misfit(counts, &want);
                        assert!(misfit < 1.0, "{sampler:?} offset {offset}: {misfit} {counts:?} {want:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn rejection_of_certain_drafts_emits_the_target_distribution_under_every_warper() {
        let p = [vec![1.0, 0.5, 0.8, -1.0, MASKED, 0.2], vec![3.0, -2.0, 0.0, -2.0, 1.0, 1.5]];
        let rows: Vec<&[f32]> = p.iter().map(Vec::as_slice).collect();
        for (t, k, top_p, min_p) in [(1.0, 0, 1.0, 0.0), (0.6, 0, 1.0, 0.0), (1.7, 3, 1.0, 0.0), (0.8, 4, 0.9, 0.1)] {
            let sampler = sampler(t, k, top_p, min_p, Accept::Rejection);
            let want: Vec<Vec<f32>> = p.iter().map(|row| warp(row, &sampler)).collect();
            // Likely, unlikely, and excluded by the target.
            for drafted in [0, 3, 4] {
                let (mut counts, mut accepted, judge) = (vec![vec![0.0; 6]; 2], 0, Judge::new());
                for round in 0..30_000 {
                    let q = DraftDistribution::OneHot;
                    let verdict = judge.judge(1, &[drafted], q, &rows, &sampler, 10 * round).unwrap();
                    for (offset, &token) in [drafted][..verdict.accepted].iter().chain([&verdict.token]).enumerate() {
                        counts[offset][token as usize] += 1.0;
                    }
                    accepted += verdict.accepted;
                }
                let at = (drafted as usize, accepted as f64 / 30_000.0);
                assert!((at.1 - f64::from(want[0][at.0])).abs() < 0.012, "{sampler:?}: {at:?} of {want:?}");
                for (counts, want) in counts.iter().zip(&want).filter(|(counts, _)| counts.iter().sum::<f64>() > 300.0)
                {
                    assert!(misfit(counts, want) < 1.0, "{sampler:?} draft {drafted}: {counts:?} {want:?}");
                }
            }
        }
    }

    #[test]
    fn the_statistic_notices_a_wrong_rule() {
        let (p, q) = (vec![1.0, 0.5, 0.8, -1.0], vec![0.2, 1.5, 0.3, -0.5]);
        let sampler = sampler(1.0, 0, 1.0, 0.0, Accept::Rejection);
        let (warped_p, warped_q) = (warp(&p, &sampler), warp(&q, &sampler));
        let mut counts = [vec![0.0; 4], vec![0.0; 4]];
        for round in 0..30_000 {
            // Accepting everything emits q; correcting from p instead of (p − q)+ favours tokens that both prefer.
            let token = choose(&q, &sampler, round, Stream::Draft(0));
            counts[0][token as usize] += 1.0;
            let u = sampler.noise(round, Stream::Accept(0)).uniform(0);
            let stands = u < share_after(1.0, warped_p[token as usize], warped_q[token as usize]);
            let token = if stands { token } else { draw(&warped_p, sampler.noise(round, Stream::Correct(0))) };
            counts[1][token as usize] += 1.0;
        }
        assert!(counts.iter().all(|counts| misfit(counts, &warped_p) > 3.0));
    }

    #[test]
    fn the_acceptance_rate_is_the_overlap_of_the_distributions() {
        let (p, q) = (vec![1.0, 0.5, 0.8, -1.0, 2.0], vec![0.2, 1.5, 0.3, -0.5, 1.0]);
        let rejection = sampler(1.0, 0, 0.95, 0.0, Accept::Rejection);
        let overlap: f64 =
            warp(&p, &rejection).iter().zip(warp(&q, &rejection)).map(|(p, q)| f64::from(p.min(q))).sum();
        let rate = |sampler: &Sampler| {
            let counts = emitted(std::slice::from_ref(&q), &[p.clone(), p.clone()], sampler, 40_000);
            counts[1].iter().sum::<f64>() / 40_000.0
        };
        // Four standard deviations of 40,000 trials.
        assert!((rate(&rejection) - overlap).abs() < 0.01, "{} {overlap}", rate(&rejection));
        // Shared noise accepts slightly less than rejection, and more than independent draws.
        let shared = rate(&sampler(1.0, 0, 0.95, 0.0, Accept::Replay));
        let independent: f64 =
            warp(&p, &rejection).iter().zip(warp(&q, &rejection)).map(|(p, q)| f64::from(p * q)).sum();
        assert!(shared < overlap + 0.01 && shared > independent + 0.1, "{shared} {overlap} {independent}");
    }

    #[test]
    fn a_prefix_is_accepted_with_probability_of_its_share() {
        // Over all draws of x₁ … x_γ, P(accepted ≥ i) is the mean of s_i. Tests of each token would accept less.
        let p = [[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.1, 0.6, 0.3]];
        let q = [[0.3, 0.5, 0.2], [0.4, 0.3, 0.3], [0.3, 0.3, 0.4]];
        let (mut shares, mut each) = ([0.0; 3], [0.0; 3]);
        for text in 0..27usize {
            let (mut share, mut alone) = (1.0f32, 1.0f64);
            let tokens = [text / 9, text / 3 % 3, text % 3];
            let probability: f64 = (0..3).map(|i| f64::from(q[i][tokens[i]])).product();
            for (i, &x) in tokens.iter().enumerate() {
                share = share_after(share, p[i][x], q[i][x]);
                alone *= f64::from((p[i][x] / q[i][x]).min(1.0));
                shares[i] += probability * f64::from(share);
                each[i] += probability * alone;
            }
        }
        let logits = |rows: &[[f32; 3]; 3]| rows.map(|row| row.map(f32::ln).to_vec());
        let target = [&logits(&p)[..], &[vec![0.0; 3]]].concat();
        let rounds = 40_000;
        let counts = emitted(&logits(&q), &target, &sampler(1.0, 0, 1.0, 0.0, Accept::Rejection), rounds);
        for i in 0..3 {
            // Four standard deviations of 40,000 trials.
            let accepted = counts[i + 1].iter().sum::<f64>() / rounds as f64;
            assert!((accepted - shares[i]).abs() < 0.01, "{accepted} {shares:?}");
        }
        assert!(shares[2] > each[2] + 0.04, "{shares:?} {each:?}");
    }

    #[test]
    fn rejection_where_probabilities_vanish() {
        let rejection = sampler(1.0, 0, 1.0, 0.0, Accept::Rejection);
        let verdict = |drafted: &[u32], q: &[f32], p: &[f32], position: usize| {
            let rows = vec![q.to_vec(); drafted.len()];
            let p = vec![p.to_vec(); drafted.len()];
            super::rejection(drafted, Q::Kept(&rows), &p, || 2, &rejection, position)
        };
        for position in 0..64 {
            // A token that the target excludes is never accepted, nor is what follows it.
            for drafted in [&[0][..], &[0, 2], &[0, 2, 2]] {
                assert_eq!(
                    verdict(drafted, &[1e-45, 0.5, 0.5], &[0.0, 0.0, 1.0], position),
                    Verdict { accepted: 0, token: 2 }
                );
            }
            // Equal distributions are accepted, the least probabilities included.
            let equal = [0.0, 1e-45, 1.0];
            assert_eq!(verdict(&[1, 2, 1], &equal, &equal, position), Verdict { accepted: 3, token: 2 });
            // The draft's probability has vanished, the target's has not.
            assert_eq!(verdict(&[0], &[0.0, 0.5, 0.5], &[0.5, 0.5, 0.0], position).accepted, 1);
        }
        // Rounding may leave no mass of p − q.
        assert!(left(1.0, &[0.25, 0.75], |id| [0.25, 0.75][id]).iter().all(|w| *w == 0.0));
        assert!(prefix_passes(0.999, 1.0, &[0.0, 0.0]) && !prefix_passes(1e-6, 0.5, &[0.0, 0.0]));
    }

    #[test]
    fn acceptance_and_correction_have_noise_of_their_own_at_their_own_position() {
        // Backends that judge elsewhere must use the same numbers: u from `Accept` at the prefix's last token, and a draw with
        // `Correct` at the position after it.
        let rejection = sampler(1.0, 0, 1.0, 0.0, Accept::Rejection);
        let (p, q) = ([0.25, 0.5, 0.125, 0.125], [0.5, 0.25, 0.125, 0.125]);
        let mut accepted = [0; 3];
        for position in 0..300 {
            // Token 0 halves the share.
            let (q, p) = ([q, q].map(Vec::from), [p, p].map(Vec::from));
            let verdict = super::rejection(&[0, 0], Q::Kept(&q), &p, || 3, &rejection, position);
            let u = |offset: usize| rejection.noise(position + offset, Stream::Accept(offset)).uniform(0);
            accepted[verdict.accepted] += 1;
            if u(1) < 0.25 {
                assert_eq!(verdict, Verdict { accepted: 2, token: 3 });
                continue;
            }
            // After one token (p / 2 − q)+ has no mass, so only the empty prefix is left.
            assert_eq!(
                verdict,
                Verdict {
                    accepted: 0,
                    token: draw(&[0.0, 0.25, 0.0, 0.0], rejection.noise(position, Stream::Correct(0)))
                }
            );
        }
        assert!(accepted[2] > 50 && accepted[0] > 150, "{accepted:?}");
        for position in 0..300 {
            // After token 1 the share is 1: (p − q)+ follows if the second token fails.
            let (q, p) = ([q, q].map(Vec::from), [p, p].map(Vec::from));
            let verdict = super::rejection(&[1, 0], Q::Kept(&q), &p, || 3, &rejection, position);
            let at = position + 1;
            let want = if rejection.noise(at, Stream::Accept(1)).uniform(0) < 0.5 {
                Verdict { accepted: 2, token: 3 }
            } else {
                Verdict { accepted: 1, token: draw(&[0.0, 0.25, 0.0, 0.0], rejection.noise(at, Stream::Correct(1))) }
            };
            assert_eq!(verdict, want);
        }
    }

    #[test]
    fn nothing_drafted_is_plain_decoding_under_every_rule() {
        let row = [1.0, 0.5, 0.8, -1.0, 2.0];
        for accept in [Accept::Replay, Accept::Rejection] {
            let sampler = sampler(0.9, 4, 0.95, 0.0, accept);
            for position in 0..500 {
                let verdict = Judge::new().judge(0, &[], DraftDistribution::Kept, &[&row], &sampler, position).unwrap();
                assert_eq!(verdict, Verdict { accepted: 0, token: choose(&row, &sampler, position, Stream::Sample) });
            }
        }
    }

    #[test]
    fn a_margin_is_that_of_an_offset_and_none_of_rejection() {
        let (mut judge, row) = (Judge::new(), [1.0, 3.0, 0.5]);
        assert_eq!(judge.margin(1, 0), f32::INFINITY);
        judge.propose(1, 0, 5, &row, &Sampler::greedy());
        judge.propose(1, 1, 6, &[9.0, 3.0, 0.5], &Sampler::greedy());
        assert_eq!(
            [(1, 0), (1, 1), (0, 0)].map(|(slot, offset)| judge.margin(slot, offset)),
            [2.0, 6.0, f32::INFINITY]
        );
        judge.propose(1, 1, 6, &row, &sampler(1.0, 0, 1.0, 0.0, Accept::Rejection));
        assert_eq!((judge.margin(1, 0), judge.margin(1, 1)), (2.0, f32::INFINITY));
    }

    #[test]
    fn equality_takes_the_longest_prefix() {
        let verdict = |drafted: &[u32], chosen: &[u32]| equal(drafted, chosen.iter().copied().map(Ok)).unwrap();
        assert_eq!(verdict(&[], &[7]), Verdict { accepted: 0, token: 7 });
        assert_eq!(verdict(&[1, 2, 3], &[1, 2, 3, 4]), Verdict { accepted: 3, token: 4 });
        assert_eq!(verdict(&[1, 2, 3], &[1, 5, 3, 4]), Verdict { accepted: 1, token: 5 });
        assert_eq!(verdict(&[9, 2, 3], &[1, 2, 3, 4]), Verdict { accepted: 0, token: 1 });
    }

    #[test]
    fn mismatched_shapes_are_an_error() {
        let (mut judge, row) = (Judge::new(), vec![0.0, 1.0, 2.0]);
        let rejection = sampler(1.0, 0, 1.0, 0.0, Accept::Rejection);
        let kind = |judge: &mut Judge, drafted: &[u32], rows: &[&[f32]], sampler: &Sampler| {
            judge.judge(0, drafted, DraftDistribution::Kept, rows, sampler, 5).unwrap_err().kind
        };
        let greedy = Sampler::greedy();
        assert_eq!(kind(&mut judge, &[1], &[&row], &greedy), ErrorKind::Internal);
        assert_eq!(kind(&mut judge, &[3], &[&row, &row], &greedy), ErrorKind::Internal);
        assert_eq!(kind(&mut judge, &[1], &[&row, &row], &rejection), ErrorKind::Internal);
        for sampler in [&greedy, &rejection, &sampler(1.0, 0, 1.0, 0.0, Accept::Replay)] {
            let token = judge.propose(0, 0, 5, &row, sampler);
            assert_eq!(kind(&mut judge, &[token], &[&row, &[0.0, f32::NAN, 1.0]], sampler), ErrorKind::NotFinite);
            assert!(judge.judge(0, &[token], DraftDistribution::Kept, &[&row, &row], sampler, 5).is_ok());
        }
        // A shorter second draft removes all distributions of the first.
        for offset in 0..3 {
            judge.propose(0, offset, 6 + offset, &row, &rejection);
        }
        judge.propose(0, 0, 9, &row, &rejection);
        assert_eq!(kind(&mut judge, &[1, 1], &[&row, &row, &row], &rejection), ErrorKind::Internal);
        judge.keep(0, 0, vec![1.0; 2]);
        assert_eq!(kind(&mut judge, &[1], &[&row, &row], &rejection), ErrorKind::Internal);
    }

    proptest! {
        #[test]
        fn a_draft_like_the_target_is_always_accepted(
            logits in prop::collection::vec(any_logits(12), 1..6), seed: u64, position in 0usize..1_000_000,
            t in 0.1f32..2.0, k in 0usize..12, top_p in 0.1f32..=1.0, min_p in 0.0f32..0.5,
        ) {
            let sampled = |accept| Sampler {
                temperature: t, top_k: k, top_p, min_p, seed, sequence: 3, accept, ..Sampler::greedy()
            };
            let samplers = [Sampler::greedy(), sampled(Accept::Replay), sampled(Accept::Rejection)];
            for sampler in samplers {
                let mut judge = Judge::new();
                let gamma = logits.len() - 1;
                let drafted: Vec<u32> =
                    (0..gamma).map(|i| judge.propose(0, i, position + i, &logits[i], &sampler)).collect();
                let rows: Vec<&[f32]> = logits.iter().map(Vec::as_slice).collect();
                let verdict = judge.judge(0, &drafted, DraftDistribution::Kept, &rows, &sampler, position).unwrap();
                prop_assert_eq!(verdict.accepted, gamma, "{:?}", sampler);
                prop_assert_eq!(verdict.token, choose(&logits[gamma], &sampler, position + gamma, Stream::Sample));
            }
        }

        #[test]
        fn greedy_and_replay_equal_plain_decoding(
            p in prop::collection::vec(any_logits(9), 1..6), q in prop::collection::vec(any_logits(9), 5),
            seed: u64, position in 0usize..1_000_000, t in 0.1f32..2.0, k in 0usize..9,
        ) {
            let replay = Sampler { temperature: t, top_k: k, seed, accept: Accept::Replay, ..Sampler::greedy() };
            for sampler in [Sampler::greedy(), replay] {
                let plain: Vec<u32> =
                    p.iter().enumerate().map(|(i, row)| choose(row, &sampler, position + i, Stream::Sample)).collect();
                let mut judge = Judge::new();
                let drafted: Vec<u32> =
                    (0..p.len() - 1).map(|i| judge.propose(0, i, position + i, &q[i], &sampler)).collect();
                let rows: Vec<&[f32]> = p.iter().map(Vec::as_slice).collect();
                let verdict = judge.judge(0, &drafted, DraftDistribution::Kept, &rows, &sampler, position).unwrap();
                let mut round = drafted[..verdict.accepted].to_vec();
                round.push(verdict.token);
                prop_assert_eq!(&round[..], &plain[..round.len()]);
                prop_assert_eq!(verdict, equal(&drafted, plain.iter().copied().map(Ok)).unwrap());
            }
        }

        #[test]
        fn rejection_never_emits_what_the_target_excludes(
            p in any_logits(9), q in any_logits(9), position in 0usize..1_000_000, top_p in 0.1f32..=1.0, k in 0usize..9,
        ) {
            let sampler = sampler(1.0, k, top_p, 0.0, Accept::Rejection);
            let mut judge = Judge::new();
            let drafted = judge.propose(0, 0, position, &q, &sampler);
            let verdict = judge.judge(0, &[drafted], DraftDistribution::Kept, &[&p, &p], &sampler, position).unwrap();
            let p = warp(&p, &sampler);
            prop_assert!(p[verdict.token as usize] > 0.0);
            prop_assert!(verdict.accepted == 0 || p[drafted as usize] > 0.0);
        }
    }
}
