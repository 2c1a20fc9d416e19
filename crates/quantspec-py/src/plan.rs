//! `plan(model, …)`, `fitting(models, …)` and `rates(model, …)`: an engine's memory, and the cost of its operations on a
//! machine, before any weight is read.

use crate::device::{ChosenDevice, Models};
use crate::engine::{default_threads, memory_dict};
use crate::errors::{detached, interruptible, to_python};
use crate::options::{DraftPages, Request, target_weights, weights_name};
use crate::raised::{Raised, poll};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use quantspec_core::Result;
use quantspec_model::checkpoint::Checkpoint;
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

/// Memory of an engine with these arguments on its device: `device`, `weights` and `draft_precision` (resolved from "auto"), `fits`,
/// `planned_bytes`, `available_bytes`, `longest_context` (for this many sequences), `largest_batch` (for this many tokens),
/// and the bytes of each part. `described`: only config.json of a directory is read ([`Checkpoint::describe`]). `opened`: the
/// device, which is not opened then.
#[pyfunction]
#[pyo3(signature = (model, *, capacity, prompt_capacity=None, device="auto", threads=None, weights="checkpoint", kv_target="int8", method="quantspec",
    kv_rounding="balanced", draft_weights="int4", draft_precision="auto", draft_pages=None, page_choice="best", draft_refresh=0, accept="replay", gamma=None, slots=1,
    pool_tokens=None, draft_model=None, described=false, opened=None))]
#[expect(clippy::too_many_arguments, reason = "those of the engine's constructor")]
pub(crate) fn plan<'py>(
    py: Python<'py>,
    model: &str,
    capacity: usize,
    prompt_capacity: Option<usize>,
    device: &str,
    threads: Option<usize>,
    weights: &str,
    kv_target: &str,
    method: &str,
    kv_rounding: &str,
    draft_weights: &str,
    draft_precision: &str,
    draft_pages: Option<DraftPages>,
    page_choice: &str,
    draft_refresh: usize,
    accept: &str,
    gamma: Option<usize>,
    slots: usize,
    pool_tokens: Option<usize>,
    draft_model: Option<&str>,
    described: bool,
    opened: Option<Py<OpenDevice>>,
) -> PyResult<Bound<'py, PyDict>> {
    let request = Request {
        weights,
        kv_target,
        method,
        kv_rounding,
        draft_weights,
        draft_precision,
        draft_pages,
        page_choice,
        draft_refresh,
        accept,
        gamma,
        capacity,
        prompt_capacity: prompt_capacity.map_or(capacity, |tokens| tokens.clamp(1, capacity.max(1))),
        slots,
        pool_tokens,
        threads: threads.unwrap_or_else(default_threads),
        every_method: false,
    };
    let mut resolved = request.resolve().map_err(to_python)?;
    let (name, kept, sensitive, memory, limit) = detached(py, || {
        let checkpoint = checkpoint_of(model, described)?;
        let draft = draft_model.map(|model| checkpoint_of(model, described)).transpose()?;
        let place = match &opened {
            Some(opened) => opened.get().0.now()?,
            None => ChosenDevice::choose(device, &checkpoint)?,
        };
        let models = Models { target: &checkpoint, draft: draft.as_ref() };
        place.resolve_auto(models, &mut resolved)?;
        let memory = place.memory_plan(models, &resolved.options, 0)?;
        let draft_limit = draft.as_ref().map_or(usize::MAX, |draft| draft.config().max_positions);
        let (kept, sensitive) = (resolved.options.weights, resolved.options.sensitive);
        Ok((place.name(), kept, sensitive, memory, checkpoint.config().max_positions.min(draft_limit)))
    })?;
    let out = PyDict::new(py);
    out.set_item("device", name)?;
    out.set_item("weights", weights_name(kept))?;
    out.set_item("draft_precision", sensitive.names())?;
    out.set_item("fits", capacity <= limit && memory.needed_bytes <= memory.available_bytes)?;
    out.set_item("planned_bytes", memory.used_bytes + memory.needed_bytes)?;
    out.set_item("available_bytes", memory.used_bytes + memory.available_bytes)?;
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
/// longest context of one sequence that fits the device, with an engine's defaults and weights kept so. The device is opened once, chosen for the
/// first model.
#[pyfunction]
#[pyo3(signature = (models, *, device, weights))]
pub(crate) fn fitting(
    py: Python<'_>,
    models: Vec<String>,
    device: &str,
    weights: &str,
) -> PyResult<Vec<(usize, usize, usize)>> {
    let request = Request {
        weights,
        kv_target: "int8",
        method: "quantspec",
        kv_rounding: "balanced",
        draft_weights: "int4",
        draft_precision: "auto",
        draft_pages: None,
        page_choice: "best",
        draft_refresh: 0,
        accept: "replay",
        gamma: None,
        capacity: 1,
        prompt_capacity: 1,
        slots: 1,
        pool_tokens: None,
        threads: default_threads(),
        every_method: false,
    };
    let resolved = request.resolve().map_err(to_python)?;
    detached(py, || {
        let described: Vec<_> = models.iter().map(|model| checkpoint_of(model, true)).collect::<Result<_>>()?;
        let Some(first) = described.first() else { return Ok(Vec::new()) };
        let place = ChosenDevice::choose(device, first)?;
        let memory_plan = |checkpoint| {
            let memory = place.memory_plan(Models::alone(checkpoint), &resolved.options, 0)?;
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

/// `rates(model, …)`: memory bandwidth of the device and, on a CPU, the cost of each operation of a step at the widths of a
/// model that config.json describes, for sequences of `context` tokens and weights kept so.
#[pyfunction]
#[pyo3(signature = (model, *, device, threads, context, weights))]
pub(crate) fn rates<'py>(
    py: Python<'py>,
    model: &str,
    device: &str,
    threads: Option<usize>,
    context: usize,
    weights: &str,
) -> PyResult<Bound<'py, PyDict>> {
    let threads = threads.unwrap_or_else(default_threads);
    let kept = target_weights(weights).map_err(to_python)?.unwrap_or_default();
    let raised = Raised::default();
    let mut interrupted = poll(raised.clone());
    let (place, read, rates) = interruptible(py, &raised, || {
        let checkpoint = checkpoint_of(model, true)?;
        let place = ChosenDevice::choose(device, &checkpoint)?;
        Ok(match place.gpu() {
            Some(gpu) => {
                let read = quantspec_cuda::bench::read_bytes_per_s(gpu)?;
                (place, read, None)
            }
            None => {
                let (read, rates) = steady(threads, &mut || {
                    quantspec_cpu::rates::rates(checkpoint.config(), kept, context, threads, &mut interrupted)
                })?;
                (place, read, Some(rates))
            }
        })
    })?;
    let out = PyDict::new(py);
    out.set_item("device", place.name())?;
    out.set_item("device_name", place.hardware())?;
    out.set_item("compute_capability", place.gpu().map(|gpu| gpu.info.compute_capability.clone()))?;
    out.set_item("read_gb_per_s", read / 1e9)?;
    out.set_item("threads", threads)?;
    if let Some(rates) = rates {
        out.set_item("rows", quantspec_cpu::rates::ROWS)?;
        out.set_item("window", quantspec_cpu::rates::WINDOW)?;
        out.set_item("weights", rates.weights)?;
        out.set_item("draft_weights", rates.draft_weights)?;
        out.set_item("fp16", rates.fp16)?;
        out.set_item("int8", rates.int8)?;
        out.set_item("int4", rates.int4)?;
        out.set_item("draft_int4", rates.draft_int4)?;
        out.set_item("dispatch_s", rates.dispatch_s)?;
        out.set_item("prompt_matrix", rates.prompt_matrix)?;
        out.set_item("prompt_attention", rates.prompt_attention)?;
    }
    Ok(out)
}
