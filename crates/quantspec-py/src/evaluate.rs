//! `_native.evaluate`: teacher-forced scores of target views and drafts.

use crate::device::{ChosenDevice, Models};
use crate::errors::{interruptible, to_python};
use crate::load::{OriginSlot, open};
use crate::options::{DraftedCache, ablation, default_threads, rounding, sensitive, target_weights, weights_name};
use crate::raised::{Raised, poll, progress};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use quantspec_core::config::{Sensitive, TargetWeights, View};
use quantspec_core::plan::{draft_step_bytes, sensitive_bytes};
use quantspec_core::{Error, Result};
use quantspec_cpu::CpuBackend;
use quantspec_cuda::CudaBackend;
use quantspec_model::backend::{Backend, Hooks, Options};
use quantspec_model::checkpoint::Checkpoint;
use quantspec_model::evaluate::{self, DraftScore, Evaluation, Text};
use std::path::PathBuf;

/// Options of a backend that scores this many tokens.
fn options(tokens: usize, threads: Option<usize>, weights: &str, kv_rounding: &str) -> Result<Options> {
    let Some(weights) = target_weights(weights)? else {
        return Err(Error::usage("weights is \"auto\"", "name the weights to score"));
    };
    let threads = threads.unwrap_or_else(default_threads);
    Ok(Options { weights, ..evaluate::options(tokens, rounding(kv_rounding)?, threads) })
}

/// `evaluate(model, tokens, …)`: loads the model with every view and scores the tokens.
#[pyfunction(name = "evaluate")]
#[pyo3(signature = (model, tokens, *, context=0, device="auto", threads=None, weights="checkpoint", kv_rounding="balanced", ablated=None,
    draft_precision="auto", pages=Vec::new(),
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
    ablated: Option<(String, String, usize, bool)>,
    draft_precision: &str,
    pages: Vec<usize>,
    draft_cache: Option<(PathBuf, usize)>,
    on_loading: Option<Py<PyAny>>,
    on_progress: Option<Py<PyAny>>,
) -> PyResult<Bound<'py, PyDict>> {
    let mut options = options(tokens.len(), threads, weights, kv_rounding).map_err(to_python)?;
    options.ablation = ablated.as_ref().map(ablation).transpose().map_err(to_python)?;
    let weights = options.weights;
    let sensitive = sensitive(draft_precision).map_err(to_python)?;
    let raised = Raised::default();
    let origin = OriginSlot::default();
    let hooks = Hooks {
        poll: Box::new(poll(raised.clone())),
        loading: Box::new(progress(on_loading, raised.clone())),
        drafts: origin.hook(),
    };
    let mut show = progress(on_progress, raised.clone());
    let scores = interruptible(py, &raised, || {
        let checkpoint = open(model, draft_cache)?;
        let request =
            Request { checkpoint: &checkpoint, device, tokens: &tokens, context, options, sensitive, pages: &pages };
        request.scores(hooks, &raised, &mut show)
    })?;
    let out = PyDict::new(py);
    out.set_item("device", scores.device)?;
    out.set_item("device_name", scores.device_name)?;
    out.set_item("simd", scores.simd)?;
    out.set_item("draft_precision", scores.sensitive.names())?;
    out.set_item("tokens", tokens.len())?;
    describe(&scores.evaluation, weights, &out)?;
    origin.describe(&out)?;
    Ok(out)
}

/// What is scored, and how.
struct Request<'a> {
    checkpoint: &'a Checkpoint,
    device: &'a str,
    tokens: &'a [u32],
    /// Leading tokens that are prefilled.
    context: usize,
    options: Options,
    /// Matrices that drafts read in the target's precision; None for the device's choice.
    sensitive: Option<Sensitive>,
    /// Page budgets whose choices are compared.
    pages: &'a [usize],
}

/// The scores of a [`Request`].
struct Scores {
    device: String,
    device_name: String,
    simd: Option<&'static str>,
    sensitive: Sensitive,
    evaluation: Evaluation,
}

impl Request<'_> {
    /// Loads the model, with quantised weights also the checkpoint's, and scores. `hooks` are of the first load; exceptions
    /// that end the other are kept in `raised`.
    fn scores(mut self, hooks: Hooks, raised: &Raised, show: &mut dyn FnMut(usize, usize)) -> Result<Scores> {
        let checkpoint = self.checkpoint;
        let chosen = ChosenDevice::choose(self.device, checkpoint)?;
        if self.options.ablation.is_some() && chosen.gpu().is_some() {
            return Err(Error::usage(
                format!("{} reads no cache with other groups or truncated codes", chosen.name()),
                "add --device cpu",
            ));
        }
        let drafted = DraftedCache { view: View::Upper, most_tokens: self.tokens.len() };
        let of_device = Options { slots: 1, ..self.options.clone() };
        let of_device = chosen.sensitive_of(checkpoint, &of_device, drafted);
        self.options.sensitive = self.sensitive.unwrap_or(of_device);
        let quantised = self.options.weights != TargetWeights::Checkpoint;
        let stored = quantised.then(|| evaluate::checkpoint_options(&self.options));
        let models = Models::alone(checkpoint);
        let stored_bytes = match &stored {
            Some(stored) => chosen.memory_plan(models, stored, 0)?.needed_bytes,
            None => 0,
        };
        let host_bytes = chosen.of_host(evaluate::bytes(checkpoint.config()));
        chosen.plan(models, &self.options, host_bytes.saturating_add(stored_bytes), &[])?;
        self.options = chosen.adapt(&self.options);
        let stored = stored.map(|stored| chosen.adapt(&stored));
        let evaluation = match &chosen {
            ChosenDevice::Cpu => {
                let load = |options: &Options, hooks| CpuBackend::load(checkpoint, options, hooks);
                let backend = load(&self.options, hooks)?;
                let stored = stored.map(|stored| load(&stored, raised.hooks())).transpose()?;
                self.evaluation(backend, stored, show)?
            }
            ChosenDevice::Cuda { gpu, .. } => {
                let load = |options: &Options, hooks| CudaBackend::load_on(gpu, checkpoint, options, hooks);
                let backend = load(&self.options, hooks)?;
                let stored = stored.map(|stored| load(&stored, raised.hooks())).transpose()?;
                self.evaluation(backend, stored, show)?
            }
        };
        let (device, device_name, simd) = (chosen.name(), chosen.hardware(), chosen.simd()?);
        Ok(Scores { device, device_name, simd, sensitive: self.options.sensitive, evaluation })
    }

    fn evaluation<B: Backend>(
        &self,
        mut backend: B,
        mut stored: Option<B>,
        show: &mut dyn FnMut(usize, usize),
    ) -> Result<Evaluation> {
        let text = Text { tokens: self.tokens, context: self.context, block_rows: self.options.block_rows };
        evaluate::evaluate(&mut backend, stored.as_mut(), text, self.pages, show)
    }
}

/// Sets the fields of the scores.
fn describe(scored: &Evaluation, weights: TargetWeights, out: &Bound<'_, PyDict>) -> PyResult<()> {
    let py = out.py();
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
    Ok(())
}

/// `sensitivity(model, tokens, …)`: the default draft's acceptance with no matrix in 8 bits, and with each kind alone. The
/// model is loaded for each. With `layers` also with each matrix alone in the target's precision.
#[pyfunction]
#[pyo3(signature = (model, tokens, *, context=0, device="auto", threads=None, weights="checkpoint", kv_rounding="balanced", layers=false, on_progress=None))]
#[expect(clippy::too_many_arguments, reason = "keyword arguments of the Python function")]
pub(crate) fn sensitivity<'py>(
    py: Python<'py>,
    model: &str,
    tokens: Vec<u32>,
    context: usize,
    device: &str,
    threads: Option<usize>,
    weights: &str,
    kv_rounding: &str,
    layers: bool,
    on_progress: Option<Py<PyAny>>,
) -> PyResult<Bound<'py, PyDict>> {
    let options = options(tokens.len(), threads, weights, kv_rounding).map_err(to_python)?;
    if options.weights == TargetWeights::Int4 {
        return Err(to_python(Error::usage(
            "weights is \"int4\", and there are no 8 bits to read",
            "use --weights int8 or checkpoint",
        )));
    }
    let raised = Raised::default();
    let mut show = progress(on_progress, raised.clone());
    let (config, Sensitivity { scores, matrices }) = interruptible(py, &raised, || {
        let checkpoint = open(model, None)?;
        let chosen = ChosenDevice::choose(device, &checkpoint)?;
        if layers && chosen.gpu().is_some() {
            let message = format!("{} scores kinds of matrices, not those of each layer", chosen.name());
            return Err(Error::usage(message, "add --device cpu"));
        }
        let text = Text { tokens: &tokens, context, block_rows: options.block_rows };
        let found = Sensitivity::measure(&chosen, &checkpoint, &options, text, layers, &raised, &mut show)?;
        Ok((checkpoint.config().clone(), found))
    })?;
    let (of_step, plain) =
        (draft_step_bytes(&config) as f64, scores.first().map_or(0.0, |(_, score)| score.acceptance));
    let added = std::iter::once(0).chain(sensitive_bytes(&config));
    let out = PyDict::new(py);
    for ((name, score), added) in scores.iter().zip(added) {
        let entry = PyDict::new(py);
        entry.set_item("acceptance", score.acceptance)?;
        entry.set_item("top1", score.top1)?;
        entry.set_item("added_bytes", added)?;
        let share = added as f64 / of_step;
        entry.set_item("added_share", share)?;
        entry.set_item("value", (added > 0).then(|| (score.acceptance - plain) / share))?;
        if let Some(kind) = Sensitive::KINDS.iter().position(|kind| kind == name).filter(|_| layers) {
            entry.set_item("layers", matrices.iter().map(|layer| layer[kind]).collect::<Vec<f64>>())?;
        }
        out.set_item(name, entry)?;
    }
    Ok(out)
}

/// What reading matrices in the target's precision gains the default draft.
struct Sensitivity {
    /// With no such matrix ("none"), then with each kind, by name.
    scores: Vec<(&'static str, DraftScore)>,
    /// Acceptance with each matrix alone, by layer and kind; empty unless asked for.
    matrices: Vec<[f64; Sensitive::KINDS.len()]>,
}

impl Sensitivity {
    /// Loads the model for each score. `layers` asks for `matrices`.
    fn measure(
        chosen: &ChosenDevice,
        checkpoint: &Checkpoint,
        options: &Options,
        text: Text,
        layers: bool,
        raised: &Raised,
        show: &mut dyn FnMut(usize, usize),
    ) -> Result<Sensitivity> {
        let kinds = Sensitive::KINDS;
        let read = std::iter::once("none").chain(kinds).map(|name| (name, Sensitive::named(name).unwrap_or_default()));
        // Progress counts drafts: one of each matrix, then one of each load.
        let of_matrices = if layers { kinds.len() * checkpoint.config().layers } else { 0 };
        let whole = of_matrices + 1 + kinds.len();
        let (mut scores, mut matrices) = (Vec::new(), Vec::new());
        for (index, (name, sensitive)) in read.enumerate() {
            let options = Options { sensitive, ..options.clone() };
            let host_bytes = chosen.of_host(evaluate::bytes(checkpoint.config()));
            chosen.plan(Models::alone(checkpoint), &options, host_bytes, &[])?;
            let options = chosen.adapt(&options);
            let (text, before) = (Text { block_rows: options.block_rows, ..text }, of_matrices + index);
            let score = match chosen {
                ChosenDevice::Cpu => {
                    let mut backend = CpuBackend::load(checkpoint, &options, raised.hooks())?;
                    if layers && sensitive == Sensitive::NONE {
                        let mut show = |done, all| show(of_matrices * done, whole * all);
                        matrices = evaluate::acceptance_by_matrix(&mut backend, text, &mut show)?;
                    }
                    let mut show = |done, all| show(before * all + done, whole * all);
                    evaluate::acceptance(&mut backend, text, &mut show)?
                }
                ChosenDevice::Cuda { gpu, .. } => {
                    let mut backend = CudaBackend::load_on(gpu, checkpoint, &options, raised.hooks())?;
                    let mut show = |done, all| show(before * all + done, whole * all);
                    evaluate::acceptance(&mut backend, text, &mut show)?
                }
            };
            scores.push((name, score));
        }
        Ok(Sensitivity { scores, matrices })
    }
}
