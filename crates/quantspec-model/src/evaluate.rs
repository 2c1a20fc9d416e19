//! Teacher-forced scores: how far each view of the cache is from full precision, and how often each draft would be accepted.
//!
//! Every view decodes the text for itself, in slots of its own, exactly as a decode step would (visibility law, pages
//! quantised as they complete), so keys and values of later layers carry the view's own errors. Because target rows are
//! row-invariant, a window of rows scores what single steps would score. Tokens before the first scored position may be
//! given as context: they are processed as a prompt is, exactly.

use crate::backend::{Backend, Row, Step};
use crate::engine::check_ids;
use crate::forward;
use quantspec_core::cache::{BUFFER_TOKENS, Extent, G};
use quantspec_core::config::{DraftWeights, Pages, Planes, Rounding, View, Weights};
use quantspec_core::{Error, Result};

/// Rows scored in one step. A window must fit behind the 2G tokens a row may read from the buffer.
pub const WINDOW_ROWS: usize = 64;

/// Rows of a prefill block of the context, where the device has no wish of its own.
const BLOCK_ROWS: usize = 256;

const _: () = assert!(WINDOW_ROWS + 2 * G <= BUFFER_TOKENS);

/// The target views, in report order: name, view, slot.
const TARGETS: [(&str, View, usize); 3] = [("fp16", View::Full, 0), ("int8", View::Both, 1), ("int4", View::Upper, 2)];

/// The INT8 slot, against which drafts are scored.
const INT8: usize = 1;

/// The drafts, in report order: name, weights, view.
const DRAFTS: [(&str, Weights, View); 3] = [
    ("kv4", Weights::Full, View::Upper),
    ("w4", Weights::Draft, View::Both),
    ("quantspec", Weights::Draft, View::Upper),
];

/// Score of one target view over all positions.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TargetScore {
    /// Mean negative log-likelihood, nats per token.
    pub nll: f64,
    /// Mean Kullback–Leibler divergence from the FP16 view, nats.
    pub kld: f64,
    /// Share of positions with the FP16 view's argmax.
    pub top1: f64,
}

/// Score of one draft against the INT8 target.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DraftScore {
    /// Mean of Σ_v min(p, q) at temperature 1: acceptance of one sampled draft token.
    pub acceptance: f64,
    /// Share of positions with the target's argmax: greedy acceptance.
    pub top1: f64,
}

/// Scores of a text.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    /// Positions scored: all tokens but the context's and the first of the rest.
    pub positions: usize,
    /// (name, score) per target view.
    pub targets: Vec<(&'static str, TargetScore)>,
    /// (name, score) per draft.
    pub drafts: Vec<(&'static str, DraftScore)>,
}

/// The options an evaluation needs: three slots, every plane, draft weights.
pub fn options(tokens: usize, rounding: Rounding, threads: usize) -> crate::backend::Options {
    crate::backend::Options {
        slots: TARGETS.len(),
        capacity: tokens,
        prompt_capacity: tokens,
        planes: Planes { upper: true, lower: true, full: true },
        rounding,
        draft_weights: DraftWeights::Int4,
        rejection: false,
        step_rows: WINDOW_ROWS,
        block_rows: BLOCK_ROWS,
        threads,
    }
}

/// Scores `tokens` on a backend loaded with [`options`]. The first `context` tokens are a prompt, taken in blocks of `block_rows`, those
/// the backend was loaded with; of the others, at least two, the first is fed and every later one is predicted. `progress` is
/// told positions done and in all.
///
/// # Errors
/// [`quantspec_core::ErrorKind::Usage`] for fewer than two tokens beyond the context, [`quantspec_core::ErrorKind::Model`]
/// for ids outside the vocabulary, [`quantspec_core::ErrorKind::NotFinite`] where a score is NaN or infinite, and those of the
/// backend's operations.
pub fn evaluate<B: Backend>(
    backend: &mut B,
    tokens: &[u32],
    context: usize,
    block_rows: usize,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Evaluation> {
    if tokens.len() < context.saturating_add(2) {
        return Err(Error::usage(
            format!("the text has {} tokens, of which {context} are context", tokens.len()),
            "give a text of at least 2 tokens beyond the context: the first of them is only fed",
        ));
    }
    check_ids(tokens, backend.config().vocab)?;
    let positions = tokens.len() - 1;
    let mut targets = [TargetScore::default(); TARGETS.len()];
    let mut drafts = [DraftScore::default(); DRAFTS.len()];
    let mut extents: [Extent; TARGETS.len()] = Default::default();
    for (extent, &(_, _, slot)) in extents.iter_mut().zip(&TARGETS) {
        backend.open(slot, tokens.len())?;
        if context > 0 {
            forward::prefill(backend, slot, &tokens[..context], block_rows, &mut |_, _| ())?;
            extent.commit(context);
        }
    }
    for start in (context..positions).step_by(WINDOW_ROWS) {
        let rows = WINDOW_ROWS.min(positions - start);
        let (window, next) = (&tokens[start..start + rows], &tokens[start + 1..start + rows + 1]);
        let mut full: Vec<Vec<f64>> = Vec::new();
        let mut int8 = Vec::new();
        for (score, &(_, view, slot)) in targets.iter_mut().zip(&TARGETS) {
            feed(backend, slot, start, window, view)?;
            let logs =
                (0..rows).map(|row| Ok(log_softmax(&backend.logits(row)?))).collect::<Result<Vec<Vec<f64>>>>()?;
            let reference = if full.is_empty() { &logs } else { &full };
            for ((log_p, log_full), &token) in logs.iter().zip(reference).zip(next) {
                score.nll -= log_p[token as usize];
                score.kld += divergence(log_full, log_p);
                score.top1 += f64::from(u8::from(best(log_full) == best(log_p)));
            }
            match view {
                View::Full => full = logs,
                View::Both => int8 = logs,
                View::Upper => (),
            }
        }
        // Backwards: a draft's own keys and values overwrite only its position, and those before it are the target's.
        for offset in (0..rows).rev() {
            for (score, &(_, weights, view)) in drafts.iter_mut().zip(&DRAFTS) {
                let row = [Row { slot: INT8, offset, position: start + offset }];
                forward::step(backend, &Step { weights, view, pages: Pages::All, choose_pages: false, rows: &row })?;
                let log_q = log_softmax(&backend.logits(0)?);
                let shared: f64 = log_q.iter().zip(&int8[offset]).map(|(q, p)| q.min(*p).exp()).sum();
                // Rounding may end a little above 1.
                score.acceptance += if shared > 1.0 { 1.0 } else { shared };
                score.top1 += f64::from(u8::from(best(&log_q) == best(&int8[offset])));
            }
            backend.poll()?;
            progress(start + rows - offset - context, positions - context);
        }
        // The target's keys and values again, over the drafts'.
        feed(backend, INT8, start, window, View::Both)?;
        for (extent, &(_, _, slot)) in extents.iter_mut().zip(&TARGETS) {
            for page in extent.commit(rows) {
                backend.flush(slot, page)?;
            }
        }
        backend.poll()?;
    }
    for (_, _, slot) in TARGETS {
        backend.close(slot);
    }
    let scored = (positions - context) as f64;
    let mean = |sum: f64| sum / scored;
    let targets = targets.map(|sum| TargetScore { nll: mean(sum.nll), kld: mean(sum.kld), top1: mean(sum.top1) });
    let drafts = drafts.map(|sum| DraftScore { acceptance: mean(sum.acceptance), top1: mean(sum.top1) });
    let sums =
        targets.iter().flat_map(|score| [score.nll, score.kld]).chain(drafts.iter().map(|score| score.acceptance));
    if !sums.into_iter().all(f64::is_finite) {
        // A GPU flags keys and values for `first` and `judge`, which nobody calls here.
        return Err(Error::not_finite("logits are NaN or infinite"));
    }
    Ok(Evaluation {
        positions: positions - context,
        targets: TARGETS.iter().zip(targets).map(|(&(name, ..), score)| (name, score)).collect(),
        drafts: DRAFTS.iter().zip(drafts).map(|(&(name, ..), score)| (name, score)).collect(),
    })
}

/// Runs a window of known tokens through a view of the target: logits of every row, keys and values in the buffer.
fn feed<B: Backend>(backend: &mut B, slot: usize, start: usize, window: &[u32], view: View) -> Result<()> {
    backend.set_window(slot, window)?;
    let rows: Vec<Row> = (0..window.len()).map(|offset| Row { slot, offset, position: start + offset }).collect();
    let step = Step { weights: Weights::Full, view, pages: Pages::All, choose_pages: false, rows: &rows };
    forward::step(backend, &step)
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - most).exp()).sum();
    let shift = f64::from(most) + sum.ln();
    logits.iter().map(|&logit| f64::from(logit) - shift).collect()
}

/// KL(p ‖ q) in nats from log-probabilities.
fn divergence(log_p: &[f64], log_q: &[f64]) -> f64 {
    log_p.iter().zip(log_q).map(|(p, q)| p.exp() * (p - q)).sum()
}

/// Index of the largest log-probability, ties to the lowest id.
fn best(logs: &[f64]) -> usize {
    (1..logs.len()).fold(0, |best, id| if logs[id] > logs[best] { id } else { best })
}
