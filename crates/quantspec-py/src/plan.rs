//! `plan(model, …)`: what an engine would hold, before any weight is read.

use crate::device::{Models, Place};
use crate::engine::{default_threads, memory_dict};
use crate::errors::{detached, to_python};
use crate::options::{DraftPages, Request, weights_name};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use quantspec_model::checkpoint::Checkpoint;
use std::path::Path;

/// Memory of an engine with these arguments, on the device that it would run on: `device`, `weights` (which, where "auto" asks), `fits`, `planned_bytes`,
/// `available_bytes`, `longest_context` (of as many sequences) and the bytes of each part.
#[pyfunction]
#[pyo3(signature = (model, *, capacity, prompt_capacity=None, device="auto", threads=None, weights="checkpoint",
    kv_target="int8", method="quantspec", kv_rounding="balanced", draft_weights="int4", draft_pages=None, page_choice="best", accept="replay", gamma=None, slots=1, draft_model=None))]
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
    draft_pages: Option<DraftPages>,
    page_choice: &str,
    accept: &str,
    gamma: Option<usize>,
    slots: usize,
    draft_model: Option<&str>,
) -> PyResult<Bound<'py, PyDict>> {
    let request = Request {
        weights,
        kv_target,
        method,
        kv_rounding,
        draft_weights,
        draft_pages,
        page_choice,
        accept,
        gamma,
        capacity,
        prompt_capacity: prompt_capacity.map_or(capacity, |tokens| tokens.clamp(1, capacity.max(1))),
        slots,
        threads: threads.unwrap_or_else(default_threads),
        every_view: false,
    };
    let mut resolved = request.resolve().map_err(to_python)?;
    let (name, kept, weighed, limit) = detached(py, || {
        let checkpoint = Checkpoint::open(Path::new(model))?;
        let draft = draft_model.map(|model| Checkpoint::open(Path::new(model))).transpose()?;
        let place = Place::choose(device, &checkpoint)?;
        let models = Models { target: &checkpoint, draft: draft.as_ref() };
        place.settle(models, &mut resolved)?;
        let weighed = place.weigh(models, &resolved.options, 0)?;
        let draft_limit = draft.as_ref().map_or(usize::MAX, |draft| draft.config().max_positions);
        Ok((place.name(), resolved.options.weights, weighed, checkpoint.config().max_positions.min(draft_limit)))
    })?;
    let out = PyDict::new(py);
    out.set_item("device", name)?;
    out.set_item("weights", weights_name(kept))?;
    out.set_item("fits", capacity <= limit && weighed.needed_bytes <= weighed.available_bytes)?;
    out.set_item("planned_bytes", weighed.used_bytes + weighed.needed_bytes)?;
    out.set_item("available_bytes", weighed.used_bytes + weighed.available_bytes)?;
    out.set_item("longest_context", weighed.longest_context)?;
    out.update(memory_dict(py, &weighed.parts)?.as_mapping())?;
    Ok(out)
}
