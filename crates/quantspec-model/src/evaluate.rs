//! Teacher-forced scores: how far each cache view is from full precision, and how often each draft would be accepted.
//!
//! Every view decodes the text in a slot of its own, exactly as a decode step would. So keys and values of later layers carry
//! the view's own errors. Target rows are row-invariant, so a window of rows scores like single steps. Tokens before the
//! first scored position may be context: they are prefilled, in full precision.

use crate::backend::{Backend, DraftConfig, Row, Step};
use crate::draft::METHODS;
use crate::forward::{self, check_ids};
use quantspec_core::cache::{BUFFER_TOKENS, Extent, G};
use quantspec_core::config::{
    DraftWeights, ModelConfig, Pages, Planes, Rounding, Sensitive, TargetWeights, View, Weights,
};
use quantspec_core::logprob;
use quantspec_core::sample::argmax;
use quantspec_core::{Error, Result};

/// Rows scored in one step. A window must fit into the ring after the 2G tokens that a row may read.
const WINDOW_ROWS: usize = 64;

/// Rows of a prefill block of the context, if the device has no preference.
const BLOCK_ROWS: usize = 256;

const _: () = assert!(WINDOW_ROWS + 2 * G <= BUFFER_TOKENS);

/// A view of the target, and the slot whose cache is read in it.
struct Target {
    name: &'static str,
    view: View,
    slot: usize,
}

/// The target views, in report order.
const TARGETS: [Target; 3] = [
    Target { name: "fp16", view: View::Full, slot: 0 },
    Target { name: "int8", view: View::Both, slot: INT8 },
    Target { name: "int4", view: View::Upper, slot: 2 },
];

/// The slot of view Both, against which drafts are scored.
const INT8: usize = 1;

/// A text to score.
#[derive(Clone, Copy, Debug)]
pub struct Text<'a> {
    /// Token ids.
    pub tokens: &'a [u32],
    /// Number of leading tokens that are prefilled. At least two tokens follow; the first of them is only fed.
    pub context: usize,
    /// Rows of a prefill block: [`crate::backend::Options::block_rows`] of the backend.
    pub block_rows: usize,
}

/// What is scored on a text.
struct Scoring<'a> {
    /// Target views, INT8 among them.
    targets: &'a [Target],
    drafts: Vec<ScoredDraft>,
    /// Numbers of pages at which choices of pages are compared, each with some of the drafts.
    budgets: &'a [usize],
}

/// A draft to be scored.
struct ScoredDraft {
    /// Number of pages at which choices of pages are compared; `None` for a method.
    budget: Option<usize>,
    name: &'static str,
    /// Its configuration if the target reads INT8.
    config: DraftConfig,
    /// One matrix that it reads with the target's weights: (layer, index in [`Sensitive::KINDS`]).
    exact: Option<(usize, usize)>,
    score: DraftScore,
}

/// The model's own drafts, then those of `quantspec` with each number of chosen pages, in report order. `tokens`: the backend
/// supports [`Pages::Tokens`].
fn drafts(budgets: &[usize], tokens: bool) -> Vec<ScoredDraft> {
    let draft = |budget, name, config| ScoredDraft { budget, name, config, exact: None, score: DraftScore::default() };
    let networks = METHODS.iter().filter(|method| !method.copies);
    let methods = networks.filter_map(|method| Some(draft(None, method.name, method.draft_config(View::Both)?)));
    let choices = budgets.iter().flat_map(|&n| {
        let all = [
            ("best", Pages::Best(n)),
            ("snap", Pages::Snap { pages: n, refresh: 0 }),
            ("window", Pages::Window(n)),
            ("tokens", Pages::Tokens(n.saturating_mul(G))),
        ];
        let known = all.into_iter().filter(move |(name, _)| *name != "tokens" || tokens);
        known.map(move |(name, pages)| {
            draft(Some(n), name, DraftConfig { weights: Weights::Draft, view: View::Upper, pages })
        })
    });
    methods.chain(choices).collect()
}

/// Score of one target view over all positions.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TargetScore {
    /// Mean negative log-likelihood, nats per token.
    pub nll: f64,
    /// Mean Kullback–Leibler divergence from the FP16 view, nats.
    pub kld: f64,
    /// Share of positions at which the FP16 view has the same argmax.
    pub top1: f64,
}

/// Score of one draft against the INT8 target.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DraftScore {
    /// Mean of Σ_v min(p, q) at temperature 1: acceptance probability of one sampled draft token.
    pub acceptance: f64,
    /// Share of positions at which the target has the same argmax: greedy acceptance.
    pub top1: f64,
}

/// Distance of the target's weights from the checkpoint's, both over the FP16 cache.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct WeightsScore {
    /// Mean Kullback–Leibler divergence from the checkpoint's weights, nats.
    pub kld: f64,
    /// Share of positions at which the checkpoint's weights give the same argmax.
    pub top1: f64,
}

/// Scores of a text.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    /// Positions scored: all tokens except the context and the first one after it.
    pub positions: usize,
    /// (name, score) per target view.
    pub targets: Vec<(&'static str, TargetScore)>,
    /// (name, score) per draft.
    pub drafts: Vec<(&'static str, DraftScore)>,
    /// (pages, (name, score) per choice of pages), of drafts that otherwise equal `quantspec`'s. Choice `tokens` reads as many
    /// tokens as these pages have, the best ones for each query head.
    pub choices: Vec<(usize, Vec<(&'static str, DraftScore)>)>,
    /// None if the target's weights are the checkpoint's.
    pub weights: Option<WeightsScore>,
}

/// The options an evaluation needs: three slots, every plane, draft weights.
pub fn options(tokens: usize, rounding: Rounding, threads: usize) -> crate::backend::Options {
    crate::backend::Options {
        rounding,
        page_masses: true,
        step_rows: WINDOW_ROWS,
        block_rows: BLOCK_ROWS,
        threads,
        ..crate::backend::Options::new(TARGETS.len(), tokens)
    }
}

/// The options of the backend with the checkpoint's weights, for the comparison of weights: one slot over the FP16 cache, no
/// draft weights.
pub fn checkpoint_options(options: &crate::backend::Options) -> crate::backend::Options {
    crate::backend::Options {
        slots: 1,
        planes: Planes::of(&[View::Full]),
        ablation: None,
        weights: TargetWeights::Checkpoint,
        draft_weights: DraftWeights::None,
        page_masses: false,
        ..options.clone()
    }
}

/// Host bytes that [`evaluate`] needs besides the backend: a window's logits of two targets, a row of the view compared, and
/// a row of the checkpoint's weights.
pub fn bytes(config: &ModelConfig) -> usize {
    (2 * WINDOW_ROWS + 2) * config.vocab * size_of::<f32>()
}

/// Scores the default method's draft alone on a backend loaded with [`options`], as [`evaluate`] does.
///
/// # Errors
/// As [`evaluate`].
pub fn acceptance<B: Backend>(
    backend: &mut B,
    text: Text,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<DraftScore> {
    let drafts = drafts(&[], false).into_iter().take(1).collect();
    let scored = score_text(backend, None, text, Scoring::of_drafts(drafts), progress)?;
    let score = scored.drafts.first().map(|&(_, score)| score);
    score.ok_or_else(|| Error::internal("no method drafts with the model itself"))
}

/// Acceptance of the default method's draft if one matrix alone is read with the target's weights, as [`evaluate`] scores it:
/// by layer and kind ([`Sensitive::KINDS`]). Not on a GPU ([`forward::step_but_one`]).
///
/// # Errors
/// As [`evaluate`].
pub fn acceptance_by_matrix<B: Backend>(
    backend: &mut B,
    text: Text,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Vec<[f64; Sensitive::KINDS.len()]>> {
    let matrices =
        (0..backend.config().layers).flat_map(|layer| (0..Sensitive::KINDS.len()).map(move |kind| (layer, kind)));
    let with =
        |exact| drafts(&[], false).into_iter().take(1).map(move |draft| ScoredDraft { exact: Some(exact), ..draft });
    let scored = score_text(backend, None, text, Scoring::of_drafts(matrices.flat_map(with).collect()), progress)?;
    let scores: Vec<f64> = scored.drafts.iter().map(|(_, score)| score.acceptance).collect();
    Ok(scores.as_chunks().0.to_vec())
}

/// Scores a text on a backend loaded with [`options`].
///
/// If its weights are not the checkpoint's, `checkpoint` is a backend loaded with [`checkpoint_options`], and both are
/// compared. Each of `budgets` is a number of pages at which choices of pages are scored, too. `progress` is called with
/// tokens done and tokens in total: the context once per target, and the scored positions.
///
/// # Errors
/// [`quantspec_core::ErrorKind::Usage`] for fewer than two tokens after the context, [`quantspec_core::ErrorKind::Model`] for
/// ids outside the vocabulary, [`quantspec_core::ErrorKind::NotFinite`] if a score is NaN or infinite, and those of the
/// backend's operations.
pub fn evaluate<B: Backend>(
    backend: &mut B,
    checkpoint: Option<&mut B>,
    text: Text,
    budgets: &[usize],
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Evaluation> {
    let drafts = drafts(budgets, backend.reads_tokens());
    score_text(backend, checkpoint, text, Scoring { targets: &TARGETS, drafts, budgets }, progress)
}

/// [`evaluate`] of some target views and drafts.
fn score_text<B: Backend>(
    backend: &mut B,
    mut checkpoint: Option<&mut B>,
    text: Text,
    mut scoring: Scoring,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Evaluation> {
    let Text { tokens, context, .. } = text;
    if tokens.len() < context.saturating_add(2) {
        return Err(Error::usage(
            format!("the text has {} tokens, of which {context} are context", tokens.len()),
            "give a text of at least 2 tokens beyond the context: the first of them is only fed",
        ));
    }
    check_ids(tokens, backend.config().vocab)?;
    // The last token is not fed.
    let end = tokens.len() - 1;
    let read = scoring.targets.len() * context;
    let total = read + end - context;
    let mut extents = Vec::with_capacity(scoring.targets.len());
    for (index, target) in scoring.targets.iter().enumerate() {
        // Rows are counted over all layers, tokens once.
        let mut rows = |done: usize, all: usize| progress(index * context + context * done / all, total);
        extents.push(begin(backend, target.slot, text, &mut rows)?);
    }
    let mut checkpoint_extent = match checkpoint.as_deref_mut() {
        Some(checkpoint) => begin(checkpoint, 0, text, &mut |_, _| ())?,
        None => Extent::default(),
    };
    let mut targets = vec![TargetScore::default(); scoring.targets.len()];
    let mut weights = WeightsScore::default();
    for start in (context..end).step_by(WINDOW_ROWS) {
        let rows = WINDOW_ROWS.min(end - start);
        let (window, next) = (&tokens[start..start + rows], &tokens[start + 1..start + rows + 1]);
        let (full, int8) = score_targets(backend, scoring.targets, &mut targets, start, window, next)?;
        if let Some(checkpoint) = checkpoint.as_deref_mut() {
            feed(checkpoint, 0, start, window, View::Full)?;
            weights.add(checkpoint, &full)?;
            commit(checkpoint, 0, &mut checkpoint_extent, rows)?;
        }
        // From the last offset to the first: a draft's keys and values overwrite its own position, and all earlier ones are
        // the target's.
        for offset in (0..rows).rev() {
            let row = Row { slot: INT8, offset, position: start + offset };
            score_drafts(backend, &mut scoring.drafts, &int8[offset], row)?;
            backend.poll()?;
            progress(read + start + rows - offset - context, total);
        }
        // The target's keys and values replace the drafts'.
        feed(backend, INT8, start, window, View::Both)?;
        for (extent, target) in extents.iter_mut().zip(scoring.targets) {
            commit(backend, target.slot, extent, rows)?;
        }
    }
    for target in scoring.targets {
        backend.close(target.slot);
    }
    let compared = checkpoint.map(|checkpoint| {
        checkpoint.close(0);
        weights
    });
    scoring.means(end - context, targets, compared)
}

/// Opens a slot for the text and prefills its context. Returns what is committed.
fn begin<B: Backend>(
    backend: &mut B,
    slot: usize,
    Text { tokens, context, block_rows }: Text,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Extent> {
    let mut extent = Extent::default();
    backend.open(slot, tokens.len())?;
    if context > 0 {
        forward::prefill(backend, slot, &tokens[..context], block_rows, progress)?;
        extent.commit(context);
    }
    Ok(extent)
}

/// Commits `rows` tokens of a slot, and quantises the pages that they complete.
fn commit<B: Backend>(backend: &mut B, slot: usize, extent: &mut Extent, rows: usize) -> Result<()> {
    for page in extent.commit(rows) {
        backend.flush(slot, page)?;
    }
    backend.poll()
}

/// Feeds a window to every target and adds the scores of its rows, whose tokens are followed by `next`. Returns the rows of
/// the two targets that others are compared with, FP16 and INT8; [`bytes`] counts these.
fn score_targets<B: Backend>(
    backend: &mut B,
    targets: &[Target],
    scores: &mut [TargetScore],
    start: usize,
    window: &[u32],
    next: &[u32],
) -> Result<(Vec<Scored>, Vec<Scored>)> {
    let (mut full, mut int8) = (Vec::with_capacity(next.len()), Vec::with_capacity(next.len()));
    for (score, &Target { view, slot, .. }) in scores.iter_mut().zip(targets) {
        feed(backend, slot, start, window, view)?;
        for (row, &token) in next.iter().enumerate() {
            let found = Scored::new(backend.logits(row)?);
            score.nll -= found.log(token as usize);
            let reference = full.get(row).unwrap_or(&found);
            score.kld += divergence(reference, &found);
            score.top1 += f64::from(u8::from(reference.best() == found.best()));
            match view {
                View::Full => full.push(found),
                View::Both => int8.push(found),
                View::Upper => (),
            }
        }
    }
    Ok((full, int8))
}

/// Adds the scores of every draft's token for a row to its sums. `p` is the target's.
fn score_drafts<B: Backend>(backend: &mut B, drafts: &mut [ScoredDraft], p: &Scored, row: Row) -> Result<()> {
    for ScoredDraft { config: DraftConfig { weights, view, pages }, exact, score, .. } in drafts {
        let step = Step { weights: *weights, view: *view, pages: *pages, choose_pages: true, rows: &[row] };
        forward::step_but_one(backend, &step, *exact)?;
        let q = Scored::new(backend.logits(0)?);
        let shared: f64 = q.logs().zip(p.logs()).map(|(q, p)| q.min(p).exp()).sum();
        // Rounding may yield slightly more than 1.
        score.acceptance += if shared > 1.0 { 1.0 } else { shared };
        score.top1 += f64::from(u8::from(q.best() == p.best()));
    }
    Ok(())
}

impl WeightsScore {
    /// Adds the scores of rows against those that a backend with the checkpoint's weights has just computed.
    fn add<B: Backend>(&mut self, checkpoint: &mut B, rows: &[Scored]) -> Result<()> {
        for (row, found) in rows.iter().enumerate() {
            let stored = Scored::new(checkpoint.logits(row)?);
            self.kld += divergence(&stored, found);
            self.top1 += f64::from(u8::from(stored.best() == found.best()));
        }
        Ok(())
    }
}

impl Scoring<'_> {
    /// These drafts alone.
    fn of_drafts(drafts: Vec<ScoredDraft>) -> Scoring<'static> {
        Scoring { targets: &TARGETS[INT8..=INT8], drafts, budgets: &[] }
    }

    /// The scores of `positions` positions from their sums; `targets` has those of the target views, in their order.
    fn means(
        mut self,
        positions: usize,
        targets: Vec<TargetScore>,
        weights: Option<WeightsScore>,
    ) -> Result<Evaluation> {
        let mean = |sum: f64| sum / positions as f64;
        let score = |sum: TargetScore| TargetScore { nll: mean(sum.nll), kld: mean(sum.kld), top1: mean(sum.top1) };
        let targets: Vec<_> = targets.into_iter().map(score).collect();
        for ScoredDraft { score, .. } in &mut self.drafts {
            *score = DraftScore { acceptance: mean(score.acceptance), top1: mean(score.top1) };
        }
        let weights = weights.map(|sum| WeightsScore { kld: mean(sum.kld), top1: mean(sum.top1) });
        let scores = targets.iter().flat_map(|score| [score.nll, score.kld]);
        let scores = scores.chain(self.drafts.iter().map(|draft| draft.score.acceptance));
        if !scores.chain(weights.map(|score| score.kld)).all(f64::is_finite) {
            return Err(Error::not_finite("logits are NaN or infinite"));
        }
        let of_budget = |budget: Option<usize>| -> Vec<(&'static str, DraftScore)> {
            let wanted = self.drafts.iter().filter(|draft| draft.budget == budget);
            wanted.map(|draft| (draft.name, draft.score)).collect()
        };
        Ok(Evaluation {
            positions,
            targets: self.targets.iter().map(|target| target.name).zip(targets).collect(),
            drafts: of_budget(None),
            choices: self.budgets.iter().map(|&n| (n, of_budget(Some(n)))).collect(),
            weights,
        })
    }
}

/// Log-probabilities of `tokens` from the second on, each given the tokens before it, under one view of the target: `[tokens
/// − 1]`, in nats. `slot` is free before and after. A step has `step_rows` rows; `progress` gets (rows done, total rows) after
/// each.
///
/// # Errors
/// [`quantspec_core::ErrorKind::Usage`] for fewer than two tokens, [`quantspec_core::ErrorKind::Model`] for ids outside the
/// vocabulary, [`quantspec_core::ErrorKind::NotFinite`] if a logit is NaN or infinite, and those of the backend's operations.
pub fn score<B: Backend>(
    backend: &mut B,
    view: View,
    slot: usize,
    tokens: &[u32],
    step_rows: usize,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Vec<f64>> {
    if tokens.len() < 2 {
        return Err(Error::usage(
            format!("a text of {} tokens has nothing to score", tokens.len()),
            "give at least 2 tokens: the first is only fed",
        ));
    }
    check_ids(tokens, backend.config().vocab)?;
    backend.open(slot, tokens.len())?;
    let scored = feed_all(backend, view, slot, tokens, step_rows.clamp(1, WINDOW_ROWS), progress);
    backend.close(slot);
    scored
}

/// The windows of [`score`], one after another.
fn feed_all<B: Backend>(
    backend: &mut B,
    view: View,
    slot: usize,
    tokens: &[u32],
    step_rows: usize,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Vec<f64>> {
    let mut extent = Extent::default();
    let mut scored = Vec::with_capacity(tokens.len() - 1);
    let fed = tokens.split_last().map_or(&[][..], |(_, fed)| fed);
    for window in fed.chunks(step_rows) {
        let start = scored.len();
        feed(backend, slot, start, window, view)?;
        for row in 0..window.len() {
            let found = logprob::of(&backend.logits(row)?, tokens[start + row + 1], 0).logprob;
            if found.is_nan() {
                return Err(Error::not_finite("logits are NaN or infinite"));
            }
            scored.push(found);
        }
        commit(backend, slot, &mut extent, window.len())?;
        progress(scored.len(), fed.len());
        backend.poll()?;
    }
    Ok(scored)
}

/// Runs a window of known tokens through a view of the target: yields logits of every row, and writes keys and values to the
/// buffer.
fn feed<B: Backend>(backend: &mut B, slot: usize, start: usize, window: &[u32], view: View) -> Result<()> {
    backend.set_window(slot, window)?;
    let rows: Vec<Row> = (0..window.len()).map(|offset| Row { slot, offset, position: start + offset }).collect();
    let step = Step { weights: Weights::Full, view, pages: Pages::All, choose_pages: false, rows: &rows };
    forward::step(backend, &step)
}

/// A row of logits and its log-sum-exp. Keeping the f32 logits takes half the memory of f64 log-probabilities.
struct Scored {
    logits: Vec<f32>,
    /// log Σ exp(logit).
    shift: f64,
}

impl Scored {
    fn new(logits: Vec<f32>) -> Scored {
        Scored { shift: logprob::shift(&logits), logits }
    }

    /// Natural logarithm of a token's probability.
    fn log(&self, token: usize) -> f64 {
        f64::from(self.logits[token]) - self.shift
    }

    fn logs(&self) -> impl Iterator<Item = f64> {
        self.logits.iter().map(|&logit| f64::from(logit) - self.shift)
    }

    /// The most likely token; the lowest id wins ties.
    fn best(&self) -> u32 {
        argmax(&self.logits)
    }
}

/// KL(p ‖ q) in nats. A token with p = 0 adds nothing.
fn divergence(p: &Scored, q: &Scored) -> f64 {
    p.logs().zip(q.logs()).map(|(p, q)| if p == f64::NEG_INFINITY { 0.0 } else { p.exp() * (p - q) }).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_masked_token_adds_nothing_to_a_divergence() {
        let masked = f32::NEG_INFINITY;
        let p = Scored::new(vec![0.0, masked, 0.0, masked]);
        // p is two halves, q is 1/2, 1/4, 1/4; p excludes the second token.
        let q = Scored::new(vec![2f32.ln(), 0.0, 0.0, masked]);
        assert!((divergence(&p, &q) - 0.5 * 2f64.ln()).abs() < 1e-6, "{}", divergence(&p, &q));
        assert_eq!(divergence(&p, &p), 0.0);
        // The divergence is infinite if q excludes a token that p allows.
        assert_eq!(divergence(&q, &p), f64::INFINITY);
        assert!(divergence(&Scored::new(vec![0.0, f32::NAN]), &p).is_nan());
        assert_eq!((p.best(), q.best(), p.log(1)), (0, 0, f64::NEG_INFINITY));
    }
}
