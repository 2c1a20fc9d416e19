//! `_native.evaluate`: teacher-forced scores of target views and drafts.

use crate::device::{ChosenDevice, Models};
use crate::engine::{OriginSlot, Raised, default_threads, open, poll, progress};
use crate::errors::{interruptible, to_python};
use crate::options::{rounding, target_weights, weights_name};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use quantspec_core::Error;
use quantspec_core::config::TargetWeights;
use quantspec_cpu::CpuBackend;
use quantspec_cuda::CudaBackend;
use quantspec_model::backend::{Hooks, Options};
use quantspec_model::evaluate::{self, DraftScore};
use std::path::PathBuf;

/// `evaluate(model, tokens, …)`: loads the model with every view and scores the tokens.
#[pyfunction(name = "evaluate")]
#[pyo3(signature = (model, tokens, *, context=0, device="auto", threads=None, weights="checkpoint", kv_rounding="balanced", pages=Vec::new(),
    draft_cache=None, on_loading=None, on_progress=None))]
#[expect(clippy::too_many_arguments, reason = "keyword arguments of the Python function")]
pub(crate) fn scores<'py>(
    py: Python<'py>,
    model: &str,
    tokens: Vec<u32>,
    context: usize,
    device: &str,
    threads: Option<usize>,
    weights: &str,
    kv_rounding: &str,
    pages: Vec<usize>,
    draft_cache: Option<(PathBuf, usize)>,
    on_loading: Option<Py<PyAny>>,
    on_progress: Option<Py<PyAny>>,
) -> PyResult<Bound<'py, PyDict>> {
    let threads = threads.unwrap_or_else(default_threads);
    let weights = match target_weights(weights).map_err(to_python)? {
        Some(weights) => weights,
        None => return Err(to_python(Error::usage("weights is \"auto\"", "name the weights to score"))),
    };
    let options = evaluate::options(tokens.len(), rounding(kv_rounding).map_err(to_python)?, threads);
    let options = Options { weights, ..options };
    let raised = Raised::default();
    let loading = progress(on_loading, raised.clone());
    let mut show = progress(on_progress, raised.clone());
    let polled = poll(raised.clone());
    let origin = OriginSlot::default();
    let drafts = origin.hook();
    let (place, scored) = interruptible(py, &raised, || {
        let checkpoint = open(model, draft_cache)?;
        let place = ChosenDevice::choose(device, &checkpoint)?;
        let stored = (weights != TargetWeights::Checkpoint).then(|| evaluate::checkpoint_options(&options));
        let models = Models::alone(&checkpoint);
        let beside = stored.as_ref().map_or(Ok(0), |stored| Ok(place.weigh(models, stored, 0)?.needed_bytes))?;
        place.plan(models, &options, evaluate::bytes(checkpoint.config()).saturating_add(beside))?;
        let (options, stored) = (place.adapt(&options), stored.map(|stored| place.adapt(&stored)));
        let hooks = Hooks { poll: Box::new(polled), loading: Box::new(loading), drafts };
        let scored = match &place {
            ChosenDevice::Cpu => {
                let mut backend = CpuBackend::load(&checkpoint, &options, hooks)?;
                let load = |stored| CpuBackend::load(&checkpoint, stored, Hooks::default());
                let mut stored = stored.as_ref().map(load).transpose()?;
                evaluate::evaluate(
                    &mut backend,
                    stored.as_mut(),
                    &tokens,
                    context,
                    options.block_rows,
                    &pages,
                    &mut show,
                )
            }
            ChosenDevice::Cuda { gpu, .. } => {
                let mut backend = CudaBackend::load_on(gpu, &checkpoint, &options, hooks)?;
                let load = |stored| CudaBackend::load_on(gpu, &checkpoint, stored, Hooks::default());
                let mut stored = stored.as_ref().map(load).transpose()?;
                evaluate::evaluate(
                    &mut backend,
                    stored.as_mut(),
                    &tokens,
                    context,
                    options.block_rows,
                    &pages,
                    &mut show,
                )
            }
        };
        Ok((place.name(), scored?))
    })?;
    let targets = PyDict::new(py);
    for (name, score) in &scored.targets {
        // Beyond e^709 f64 overflows, and JSON has no infinity.
        if score.nll.exp().is_infinite() {
            let what = format!("{} nats per token of the target {name} have no perplexity", score.nll);
            return Err(to_python(Error::not_finite(what)));
        }
        let entry = PyDict::new(py);
        entry.set_item("nll", score.nll)?;
        entry.set_item("perplexity", score.nll.exp())?;
        // The other targets are compared with the first.
        if targets.len() > 0 {
            entry.set_item("kld", score.kld)?;
            entry.set_item("top1", score.top1)?;
        }
        targets.set_item(name, entry)?;
    }
    let of_drafts = |scores: &[(&str, DraftScore)]| {
        let drafts = PyDict::new(py);
        for (name, score) in scores {
            let entry = PyDict::new(py);
            entry.set_item("acceptance", score.acceptance)?;
            entry.set_item("top1", score.top1)?;
            drafts.set_item(name, entry)?;
        }
        Ok::<_, PyErr>(drafts)
    };
    let drafts = of_drafts(&scored.drafts)?;
    let choices = PyDict::new(py);
    for (pages, scores) in &scored.choices {
        choices.set_item(pages.to_string(), of_drafts(scores)?)?;
    }
    let out = PyDict::new(py);
    out.set_item("device", place)?;
    out.set_item("tokens", tokens.len())?;
    out.set_item("positions", scored.positions)?;
    out.set_item("targets", targets)?;
    out.set_item("drafts", drafts)?;
    if !choices.is_empty() {
        out.set_item("page_choices", choices)?;
    }
    if let Some(score) = &scored.weights {
        let entry = PyDict::new(py);
        entry.set_item("kld", score.kld)?;
        entry.set_item("top1", score.top1)?;
        let weights_scores = PyDict::new(py);
        weights_scores.set_item(weights_name(weights), entry)?;
        out.set_item("weights", weights_scores)?;
    }
    origin.describe(&out)?;
    Ok(out)
}
