//! Teacher-forced scores: how far each view of the cache is from full precision, and how often each draft would be accepted.
//!
//! Every view decodes the text for itself, in slots of its own, exactly as a decode step would (visibility law, pages
//! quantised as they complete), so keys and values of later layers carry the view's own errors. Because target rows are
//! row-invariant, a window of rows scores what single steps would score.

use crate::backend::{Backend, Row, Step};
use crate::forward;
use quantspec_core::cache::{BUFFER_TOKENS, Extent, G};
use quantspec_core::config::{DraftWeights, ModelConfig, Pages, Planes, Rounding, View, Weights};
use quantspec_core::{Error, Result};

/// Rows scored in one step. A window must fit behind the 2G tokens a row may read from the buffer.
pub const WINDOW_ROWS: usize = 64;

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
    /// Positions scored: all tokens but the first.
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
        planes: Planes { upper: true, lower: true, full: true },
        rounding,
        draft_weights: DraftWeights::Int4,
        step_rows: WINDOW_ROWS,
        block_rows: WINDOW_ROWS,
        threads,
    }
}

/// Scores `tokens` (at least two) on a backend loaded with [`options`]. `drafts_from` is the first position at which drafts
/// are scored (they cost one step each per position). `progress` is told positions done and in all.
pub fn evaluate<B: Backend>(
    backend: &mut B,
    tokens: &[u32],
    drafts_from: usize,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Evaluation> {
    check(backend.config(), tokens)?;
    let positions = tokens.len() - 1;
    let mut targets = [TargetScore::default(); TARGETS.len()];
    let mut drafts = [DraftScore::default(); DRAFTS.len()];
    let mut drafted = 0;
    let mut extents: [Extent; TARGETS.len()] = Default::default();
    for (_, _, slot) in TARGETS {
        backend.open(slot, tokens.len())?;
    }
    for start in (0..positions).step_by(WINDOW_ROWS) {
        let rows = WINDOW_ROWS.min(positions - start);
        let (window, next) = (&tokens[start..start + rows], &tokens[start + 1..start + rows + 1]);
        let mut reference: Vec<Vec<f64>> = Vec::new();
        let mut int8 = Vec::new();
        for (index, &(_, view, slot)) in TARGETS.iter().enumerate() {
            let logs = score_window(backend, slot, start, window, view)?;
            if index == 0 {
                reference.clone_from(&logs);
            }
            for ((log_p, log_fp), &token) in logs.iter().zip(&reference).zip(next) {
                targets[index].nll -= log_p[token as usize];
                targets[index].kld += divergence(log_fp, log_p);
                targets[index].top1 += f64::from(u8::from(best(log_fp) == best(log_p)));
            }
            if slot == INT8 {
                int8 = logs;
            }
        }
        if start + rows > drafts_from {
            for offset in (drafts_from.saturating_sub(start)..rows).rev() {
                // Backwards: a draft's own keys and values overwrite only its position, and earlier ones are still the target's.
                for (score, &(_, weights, view)) in drafts.iter_mut().zip(&DRAFTS) {
                    let row = [Row { slot: INT8, offset, position: start + offset }];
                    let step = Step { weights, view, pages: Pages::All, choose_pages: false, rows: &row };
                    forward::step(backend, &step)?;
                    let log_q = log_softmax(&backend.logits(0)?);
                    let shared = log_q.iter().zip(&int8[offset]).map(|(q, p)| q.min(*p).exp());
                    score.acceptance += shared.sum::<f64>();
                    score.top1 += f64::from(u8::from(best(&log_q) == best(&int8[offset])));
                }
                drafted += 1;
                backend.poll()?;
            }
            // The target's keys and values again, over the drafts'.
            score_window(backend, INT8, start, window, View::Both)?;
        }
        for (extent, &(_, _, slot)) in extents.iter_mut().zip(&TARGETS) {
            for page in extent.commit(rows) {
                backend.flush(slot, page)?;
            }
        }
        progress(start + rows, positions);
        backend.poll()?;
    }
    for (_, _, slot) in TARGETS {
        backend.close(slot);
    }
    for score in &mut targets {
        score.nll /= positions as f64;
        score.kld /= positions as f64;
        score.top1 /= positions as f64;
    }
    for score in &mut drafts {
        score.acceptance /= drafted.max(1) as f64;
        score.top1 /= drafted.max(1) as f64;
    }
    Ok(Evaluation {
        positions,
        targets: TARGETS.iter().zip(targets).map(|(&(name, ..), score)| (name, score)).collect(),
        drafts: DRAFTS.iter().zip(drafts).map(|(&(name, ..), score)| (name, score)).collect(),
    })
}

fn check(config: &ModelConfig, tokens: &[u32]) -> Result<()> {
    if tokens.len() < 2 {
        return Err(Error::usage(
            format!("the text has {} tokens", tokens.len()),
            "give a text of at least 2 tokens: the first is only context",
        ));
    }
    if let Some(id) = tokens.iter().find(|&&id| id as usize >= config.vocab) {
        return Err(Error::model(
            format!("token id {id} is outside the model's vocabulary of {}", config.vocab),
            "the tokenizer belongs to another model; use the tokenizer.json published with these weights",
        ));
    }
    Ok(())
}

/// Log-probabilities of every row of a window, `[rows][vocab]`; leaves the window's keys and values in the buffer.
fn score_window<B: Backend>(
    backend: &mut B,
    slot: usize,
    start: usize,
    window: &[u32],
    view: View,
) -> Result<Vec<Vec<f64>>> {
    backend.set_window(slot, window)?;
    let rows: Vec<Row> = (0..window.len()).map(|offset| Row { slot, offset, position: start + offset }).collect();
    let step = Step { weights: Weights::Full, view, pages: Pages::All, choose_pages: false, rows: &rows };
    forward::step(backend, &step)?;
    (0..window.len()).map(|row| Ok(log_softmax(&backend.logits(row)?))).collect()
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
