//! Cost of a step's operations on this machine: kernels timed at a model's widths, without its weights. `quantspec plan` adds
//! them up.

use crate::bench::{Attention, AttentionCase, Gemm, PromptAttention, PromptMatrix, Stored, machine};
use crate::panel::PANEL;
use quantspec_core::Result;
use quantspec_core::cache::{G, visible_pages};
use quantspec_core::config::{Dtype, ModelConfig, TargetWeights, View, Weights};
use quantspec_core::plan::{full_page_bytes, lower_page_bytes, upper_page_bytes};
use std::time::{Duration, Instant};

/// Rows of a step for which linear layers are timed; the cost between them is nearly linear.
pub const ROWS: [usize; 4] = [1, 4, 8, 16];

/// Rows of a sequence at which attention is timed.
pub const WINDOW: [usize; 3] = [1, 4, 8];

/// Fewest timed calls, and the time after which no further call starts.
const CALLS: usize = 5;
const MEASURING_TIME: Duration = Duration::from_millis(120);

/// Most bytes of a timed matrix; a larger one costs the same per byte.
const MATRIX_BYTES: usize = 64 << 20;

/// Most tokens in pages for timed attention; a longer context costs the same per byte.
const CONTEXT: usize = 8192;

/// Prompt rows that are timed.
const PROMPT_ROWS: usize = 256;

/// Seconds per byte read, by rows of [`ROWS`] or [`WINDOW`], and operations per second of a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Rates {
    /// The checkpoint's matrices.
    pub weights: Vec<f64>,
    /// Draft weights.
    pub draft_weights: Vec<f64>,
    /// FP16 pages and recent tokens.
    pub fp16: Vec<f64>,
    /// Both nibbles.
    pub int8: Vec<f64>,
    /// Upper nibbles, read by a target.
    pub int4: Vec<f64>,
    /// Upper nibbles, read by a draft.
    pub draft_int4: Vec<f64>,
    /// Seconds to dispatch one linear layer to the threads.
    pub dispatch_s: f64,
    /// Floating-point operations per second of a prompt's GEMMs.
    pub prompt_matrix: f64,
    /// Floating-point operations per second of a prompt's attention.
    pub prompt_attention: f64,
}

/// Times every operation for sequences of `context` tokens and a target whose weights are stored as `kept`. Takes some seconds
/// and holds at most [`crate::bench::SPREAD`] bytes at a time. `poll` is called between timed calls; its error ends the
/// measurement.
///
/// # Errors
/// Those of `poll` and [`machine`], and [`quantspec_core::ErrorKind::DoesNotFit`] if memory is short.
pub fn rates(
    config: &ModelConfig,
    kept: TargetWeights,
    context: usize,
    threads: usize,
    poll: &mut dyn FnMut() -> Result<()>,
) -> Result<Rates> {
    let machine = machine()?.with_threads(threads);
    let k = config.hidden.next_multiple_of(G);
    let n = (2 * config.intermediate).min(MATRIX_BYTES / (2 * k)).next_multiple_of(PANEL);
    let layer = config.hidden * (config.q_width() + config.kv_width()) * 2 + 3 * config.hidden * config.intermediate;
    let elements = config.layers * layer + config.vocab * config.hidden;
    let mut gemms = |stored, bytes| -> Result<Vec<f64>> {
        // As many matrices as the model has, so that a model that fits in a cache is timed there.
        let mut gemm = Gemm::new(machine.with_spread(bytes), stored, n, k, ROWS[ROWS.len() - 1])?;
        let bytes = gemm.bytes() as f64;
        let mut of_rows = |rows| {
            gemm.take(rows);
            Ok(median_seconds(poll, || gemm.call())? / bytes)
        };
        rising(ROWS.into_iter().map(&mut of_rows))
    };
    let (stored, bytes, drafts) = match kept {
        TargetWeights::Checkpoint if config.dtype == Dtype::F16 => (Stored::F16, 2 * elements, Stored::Int4),
        TargetWeights::Checkpoint => (Stored::Bf16, config.dtype.bytes() * elements, Stored::Int4),
        TargetWeights::Int8 => (Stored::Both, elements, Stored::Upper),
        TargetWeights::Int4 => (Stored::UpperTarget, elements / 2, Stored::Upper),
    };
    let weights = gemms(stored, bytes)?;
    let draft_weights = gemms(drafts, elements / 2)?;
    let tokens = (visible_pages(context) * G).clamp(G, CONTEXT);
    let (heads, group, kv_heads, head_dim) = (config.heads, config.group(), config.kv_heads, config.head_dim);
    let mut attention = |view, weights| -> Result<Vec<f64>> {
        let rows = WINDOW[WINDOW.len() - 1];
        let case = AttentionCase { view, weights, rows, group, kv_heads, head_dim, context: tokens };
        let bytes = config.layers * kv_heads * tokens / G * page_bytes(view, head_dim);
        let mut attention = Attention::new(machine.with_spread(bytes), case)?;
        let bytes = attention.bytes() as f64;
        let mut of_rows = |rows| {
            attention.take(rows);
            Ok(median_seconds(poll, || attention.call())? / bytes)
        };
        rising(WINDOW.into_iter().map(&mut of_rows))
    };
    let fp16 = attention(View::Full, Weights::Full)?;
    let int8 = attention(View::Both, Weights::Full)?;
    let int4 = attention(View::Upper, Weights::Full)?;
    let draft_int4 = attention(View::Upper, Weights::Draft)?;
    let mut smallest = Gemm::new(machine.with_spread(0), Stored::Int8, PANEL, G, 1)?;
    let dispatch_s = median_seconds(poll, || smallest.call())?;
    let mut matrix = PromptMatrix::new(machine, n, k, PROMPT_ROWS)?;
    let prompt_matrix = matrix.flops() as f64 / median_seconds(poll, || matrix.call())?;
    let before = (context.min(CONTEXT) / 2).next_multiple_of(PROMPT_ROWS);
    let mut block = PromptAttention::new(machine, (heads, group, head_dim), before, PROMPT_ROWS)?;
    let prompt_attention = block.flops() as f64 / median_seconds(poll, || block.call())?;
    Ok(Rates { weights, draft_weights, fp16, int8, int4, draft_int4, dispatch_s, prompt_matrix, prompt_attention })
}

/// Bytes of a page in a view.
fn page_bytes(view: View, head_dim: usize) -> usize {
    match view {
        View::Upper => upper_page_bytes(head_dim),
        View::Both => upper_page_bytes(head_dim) + lower_page_bytes(head_dim),
        View::Full => full_page_bytes(head_dim),
    }
}

/// Makes costs ascend with rows: a lower cost for more rows is a disturbed measurement.
fn rising(costs: impl Iterator<Item = Result<f64>>) -> Result<Vec<f64>> {
    let mut most = 0f64;
    costs
        .map(|cost| {
            most = most.max(cost?);
            Ok(most)
        })
        .collect()
}

/// Seconds of several calls after a warm-up: their median, since a step in decoding is no faster than usual either.
fn median_seconds(poll: &mut dyn FnMut() -> Result<()>, mut call: impl FnMut() -> Result<()>) -> Result<f64> {
    call()?;
    let (began, mut times) = (Instant::now(), Vec::new());
    while times.len() < CALLS || began.elapsed() < MEASURING_TIME {
        poll()?;
        let started = Instant::now();
        call()?;
        times.push(started.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

#[cfg(test)]
mod tests {
    use super::*;
    use quantspec_core::Error;
    use quantspec_core::config::{Activation, LayerNorms, QkNorm, Rope, RopeScaling, Scales};

    /// A model of two layers with heads of 64.
    fn small() -> ModelConfig {
        ModelConfig {
            family: "llama".into(),
            layers: 2,
            hidden: 192,
            intermediate: 416,
            heads: 4,
            kv_heads: 2,
            head_dim: 64,
            vocab: 300,
            max_positions: 4096,
            rms_eps: 1e-5,
            rope: Rope { theta: 1e4, dim: 64, scaling: RopeScaling::None, query_scale: None },
            no_rope: Vec::new(),
            local: None,
            activation: Activation::Silu,
            norms_less_one: false,
            scales: Scales::NONE,
            tied_embeddings: true,
            qkv_bias: false,
            output_bias: false,
            mlp_bias: false,
            qk_norm: QkNorm::None,
            norms: LayerNorms::Before,
            dtype: Dtype::F32,
            eos: vec![],
        }
    }

    #[test]
    fn rates_are_plausible() {
        for kept in [TargetWeights::Checkpoint, TargetWeights::Int8, TargetWeights::Int4] {
            plausible(&rates(&small(), kept, 1000, 2, &mut || Ok(())).unwrap());
        }
    }

    fn plausible(found: &Rates) {
        for per_byte in [&found.weights, &found.draft_weights, &found.fp16, &found.int8, &found.int4, &found.draft_int4]
        {
            assert!(per_byte.len() >= WINDOW.len());
            // Between 10 TB/s, a fast cache, and one byte per microsecond.
            assert!(per_byte.iter().all(|seconds| (1e-13..1e-6).contains(seconds)), "{found:?}");
        }
        assert!((1e-8..1e-2).contains(&found.dispatch_s), "{found:?}");
        for rate in [found.prompt_matrix, found.prompt_attention] {
            assert!((1e6..1e15).contains(&rate), "{found:?}");
        }
    }

    #[test]
    fn an_interrupt_ends_the_measurement() {
        let mut calls = 0;
        let error = rates(&small(), TargetWeights::Checkpoint, 0, 1, &mut || {
            calls += 1;
            if calls == 3 { Err(Error::interrupted()) } else { Ok(()) }
        });
        assert_eq!((error.err().map(|error| error.kind), calls), (Some(quantspec_core::ErrorKind::Interrupted), 3));
    }
}
