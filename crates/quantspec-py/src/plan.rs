//! `plan(model, …)`: what an engine would hold, before any weight is read.

use crate::device::Place;
use crate::engine::{default_threads, memory_dict};
use crate::errors::{detached, to_python};
use crate::options::{DraftPages, Request};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use quantspec_model::checkpoint::Checkpoint;
use std::path::Path;

/// Memory of an engine with these arguments, on the device that it would run on: `device`, `fits`, `planned_bytes`,
/// `available_bytes`, `longest_context` (of as many sequences) and the bytes of each part.
#[pyfunction]
#[pyo3(signature = (model, *, capacity, prompt_capacity=None, device="auto", threads=None, kv_target="int8", method="quantspec",
    kv_rounding="balanced", draft_weights="int4", draft_pages=None, page_choice="best", accept="replay", gamma=None, slots=1,
    pool_tokens=None))]
#[expect(clippy::too_many_arguments, reason = "those of the engine's constructor")]
pub(crate) fn plan<'py>(
    py: Python<'py>,
    model: &str,
    capacity: usize,
    prompt_capacity: Option<usize>,
    device: &str,
    threads: Option<usize>,
    kv_target: &str,
    method: &str,
    kv_rounding: &str,
    draft_weights: &str,
    draft_pages: Option<DraftPages>,
    page_choice: &str,
    accept: &str,
    gamma: Option<usize>,
    slots: usize,
    pool_tokens: Option<usize>,
) -> PyResult<Bound<'py, PyDict>> {
    let request = Request {
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
        pool_tokens,
        threads: threads.unwrap_or_else(default_threads),
        every_view: false,
    };
    let resolved = request.resolve().map_err(to_python)?;
    let (name, weighed, limit) = detached(py, || {
        let checkpoint = Checkpoint::open(Path::new(model))?;
        let place = Place::choose(device, &checkpoint)?;
        let weighed = place.weigh(&checkpoint, &resolved.options, 0)?;
        Ok((place.name(), weighed, checkpoint.config().max_positions))
    })?;
    let out = PyDict::new(py);
    out.set_item("device", name)?;
    out.set_item("fits", capacity <= limit && weighed.needed_bytes <= weighed.available_bytes)?;
    out.set_item("planned_bytes", weighed.used_bytes + weighed.needed_bytes)?;
    out.set_item("available_bytes", weighed.used_bytes + weighed.available_bytes)?;
    out.set_item("longest_context", weighed.longest_context)?;
    out.update(memory_dict(py, &weighed.parts)?.as_mapping())?;
    Ok(out)
}
