//! `plan(model, …)`, `fitting(models, …)` and `rates(model, …)`: an engine's memory, and the cost of its operations on a
//! machine, before any weight is read.

use crate::device::{ChosenDevice, Models};
use crate::engine::memory_dict;
use crate::errors::{detached, interruptible, to_python};
use crate::options::{EngineArguments, default_threads, sensitive, target_view, target_weights, weights_name};
use crate::raised::Raised;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use quantspec_core::config::Pages;
use quantspec_core::{Error, Result};
use quantspec_cpu::rates::{Cost, ROWS, Workload};
use quantspec_model::backend::DraftConfig;
use quantspec_model::checkpoint::Checkpoint;
use quantspec_model::draft::Entry;
use std::path::Path;

/// A device that is open. While it exists, a plan does not open the device, and an engine opens it sooner: the driver keeps its
/// context.
#[pyclass(frozen, module = "quantspec_cli._native")]
pub(crate) struct OpenDevice(ChosenDevice);

/// `open_device(model, device)`: opens the device that an engine of the model would choose.
#[pyfunction]
#[pyo3(signature = (model, *, device))]
pub(crate) fn open_device(py: Python<'_>, model: &str, device: &str) -> PyResult<OpenDevice> {
    detached(py, || ChosenDevice::choose(device, &checkpoint_of(model, false)?)).map(OpenDevice)
}

/// Memory of an engine with these arguments on its device: `device`, `weights` and `draft_precision` (resolved from "auto"),
/// `fits`, `planned_bytes`, `available_bytes`, `longest_context` (for this many sequences), `largest_batch` (for this many
/// tokens), both with what "auto" is at that size, and the bytes of each part. `described`: only config.json of a directory is read ([`Checkpoint::describe`]).
/// `opened`: the device, already open.
#[pyfunction]
#[pyo3(signature = (model, *, capacity, draft_model=None, described=false, opened=None, **options))]
pub(crate) fn plan<'py>(
    py: Python<'py>,
    model: &str,
    capacity: usize,
    draft_model: Option<&str>,
    described: bool,
    opened: Option<Py<OpenDevice>>,
    options: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyDict>> {
    let arguments = EngineArguments::of(capacity, options)?;
    let mut resolved = arguments.resolve().map_err(to_python)?;
    let (name, kept, sensitive, memory, limit) = detached(py, || {
        let checkpoint = checkpoint_of(model, described)?;
        let draft = draft_model.map(|model| checkpoint_of(model, described)).transpose()?;
        let chosen = match &opened {
            Some(opened) => opened.get().0.now()?,
            None => ChosenDevice::choose(&arguments.device, &checkpoint)?,
        };
        let models = Models { target: &checkpoint, draft: draft.as_ref(), draft_cache: resolved.draft_model_cache };
        chosen.resolve_auto(models, &mut resolved)?;
        let memory = chosen.resolved_plan(models, &resolved)?;
        let draft_limit = draft.as_ref().map_or(usize::MAX, |draft| draft.config().max_positions);
        let (kept, sensitive) = (resolved.options.weights, resolved.options.sensitive);
        Ok((chosen.name(), kept, sensitive, memory, checkpoint.config().max_positions.min(draft_limit)))
    })?;
    let out = PyDict::new(py);
    out.set_item("device", name)?;
    out.set_item("weights", weights_name(kept))?;
    out.set_item("draft_precision", sensitive.names())?;
    out.set_item("fits", capacity <= limit && memory.fits())?;
    out.set_item("planned_bytes", memory.used_bytes.saturating_add(memory.needed_bytes))?;
    out.set_item("available_bytes", memory.used_bytes.saturating_add(memory.available_bytes))?;
    out.set_item("longest_context", memory.longest_context)?;
    out.set_item("largest_batch", memory.largest_batch)?;
    out.update(memory_dict(py, &memory.parts)?.as_mapping())?;
    Ok(out)
}

/// A checkpoint, or its description by config.json.
pub(crate) fn checkpoint_of(model: &str, described: bool) -> Result<Checkpoint> {
    let path = Path::new(model);
    if described { Checkpoint::describe(path) } else { Checkpoint::open(path) }
}

/// `fitting(models, …)`: for each model that a config.json describes, the bytes of its weights and draft weights, and the
/// longest context of one sequence that fits the device. The target's weights are stored as `weights` says; all else is an
/// engine's default. The device is opened once, chosen for the first model.
#[pyfunction]
#[pyo3(signature = (models, *, device, weights))]
pub(crate) fn fitting(
    py: Python<'_>,
    models: Vec<String>,
    device: &str,
    weights: &str,
) -> PyResult<Vec<(usize, usize, usize)>> {
    let resolved =
        EngineArguments { weights: weights.to_owned(), ..EngineArguments::default() }.resolve().map_err(to_python)?;
    detached(py, || {
        let described: Vec<_> = models.iter().map(|model| checkpoint_of(model, true)).collect::<Result<_>>()?;
        let Some(first) = described.first() else { return Ok(Vec::new()) };
        let chosen = ChosenDevice::choose(device, first)?;
        let memory_plan = |checkpoint| {
            let memory = chosen.memory_plan(Models::alone(checkpoint), &resolved.options, 0)?;
            Ok((memory.parts.weights_bytes, memory.parts.draft_weights_bytes, memory.longest_context))
        };
        described.iter().map(memory_plan).collect()
    })
}

/// Bytes that a CPU reads per second, and what `measure` returns while that is constant. Memory of a shared machine may
/// change its speed by half within seconds: `measure` is called again if it did, up to three times.
fn steady<T>(threads: usize, measure: &mut dyn FnMut() -> Result<T>) -> Result<(f64, T)> {
    let (mut before, mut attempts) = (quantspec_cpu::read_gb_per_s(threads)?, 0);
    loop {
        let found = measure()?;
        let after = quantspec_cpu::read_gb_per_s(threads)?;
        attempts += 1;
        if attempts == 4 || (after / before - 1.0).abs() < 0.1 {
            return Ok((1e9 * f64::midpoint(before, after), found));
        }
        before = after;
    }
}

/// `rates(model, …)`: memory bandwidth of the device and, on a CPU, seconds of passes of a model that config.json describes,
/// after `context` tokens. `drafts`: methods that draft for themselves, each with a number of pages; None is its own choice.
#[pyfunction]
#[pyo3(signature = (model, *, device, threads, context, weights, kv_target, draft_precision, drafts))]
#[expect(clippy::too_many_arguments, reason = "keyword arguments of the Python function")]
pub(crate) fn rates<'py>(
    py: Python<'py>,
    model: &str,
    device: &str,
    threads: Option<usize>,
    context: usize,
    weights: &str,
    kv_target: &str,
    draft_precision: &str,
    drafts: Vec<(String, Option<usize>)>,
) -> PyResult<Bound<'py, PyDict>> {
    let threads = threads.unwrap_or_else(default_threads);
    let weights = target_weights(weights).map_err(to_python)?.unwrap_or_default();
    let sensitive = sensitive(draft_precision).map_err(to_python)?.unwrap_or_default();
    let view = target_view(kv_target).map_err(to_python)?;
    let config = |(name, pages): &(String, Option<usize>)| {
        let config = Entry::named(name).and_then(|method| method.draft_config(view));
        let config = config.ok_or_else(|| Error::internal(format!("method {name} does not draft for itself")))?;
        Ok(DraftConfig { pages: pages.map_or(config.pages, Pages::Best), ..config })
    };
    let drafts: Vec<DraftConfig> = drafts.iter().map(config).collect::<Result<_>>().map_err(to_python)?;
    let raised = Raised::default();
    let (chosen, read, rates) = interruptible(py, &raised, || {
        let checkpoint = checkpoint_of(model, true)?;
        let chosen = ChosenDevice::choose(device, &checkpoint)?;
        Ok(match chosen.gpu() {
            Some(gpu) => {
                let read = quantspec_cuda::bench::read_bytes_per_s(gpu)?;
                (chosen, read, None)
            }
            None => {
                let config = checkpoint.config();
                let work = Workload { config, weights, sensitive, view, drafts: &drafts, context, threads };
                let (read, rates) = steady(threads, &mut || quantspec_cpu::rates::rates(&work, raised.hooks()))?;
                (chosen, read, Some(rates))
            }
        })
    })?;
    let out = PyDict::new(py);
    out.set_item("device", chosen.name())?;
    out.set_item("device_name", chosen.hardware())?;
    out.set_item("compute_capability", chosen.gpu().map(|gpu| gpu.info.compute_capability.clone()))?;
    out.set_item("read_gb_per_s", read / 1e9)?;
    out.set_item("threads", threads)?;
    if let Some(rates) = rates {
        let pair = |cost: &Cost| (cost.matrices_s, cost.attention_s);
        out.set_item("rows", ROWS)?;
        out.set_item("target", rates.target.iter().map(pair).collect::<Vec<_>>())?;
        out.set_item(
            "drafts",
            rates.drafts.iter().map(|[first, later]| (pair(first), pair(later))).collect::<Vec<_>>(),
        )?;
        out.set_item("many_s", rates.many_s)?;
        out.set_item("token_s", rates.token_s)?;
        out.set_item("prompt_matrix", rates.prompt_matrix)?;
        out.set_item("prompt_attention", rates.prompt_attention)?;
    }
    Ok(out)
}
