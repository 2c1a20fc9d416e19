//! What `quantspec bench` relates its times to: bytes a step must read, and how fast this machine reads.

use crate::engine::default_threads;
use crate::errors::detached;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use quantspec_core::cache::{visible_buffer, visible_pages};
use quantspec_core::config::ModelConfig;
use quantspec_core::plan::{full_page_bytes, lower_page_bytes, upper_page_bytes};
use quantspec_model::checkpoint::Checkpoint;
use std::path::Path;

/// Bytes of an f16 scale and an f16 zero.
const PARAMS: usize = 4;

/// Bytes of one f16 key or value.
const HALF: usize = 2;

/// Bytes of the weights that one pass streams: every projection of every layer, and the head. Norms and biases are less
/// than a thousandth; of the embedding, a step reads one row.
fn streamed_weights(config: &ModelConfig) -> usize {
    let attention = 2 * config.q_width() + 2 * config.kv_width();
    let layer = config.hidden * (attention + 3 * config.intermediate);
    (config.layers * layer + config.vocab * config.hidden) * config.dtype.bytes()
}

/// `traffic(model, start, tokens)`: what steps at positions `start .. start + tokens` read, on average, from the cache (of all
/// layers and KV heads) and from the target's weights.
#[pyfunction]
pub(crate) fn traffic<'py>(py: Python<'py>, model: &str, start: usize, tokens: usize) -> PyResult<Bound<'py, PyDict>> {
    let config = detached(py, || Ok(Checkpoint::open(Path::new(model))?.config().clone()))?;
    let heads = config.layers * config.kv_heads;
    let positions = start..start + tokens.max(1);
    let mean = |of: fn(usize) -> usize| positions.clone().map(of).sum::<usize>() as f64 / positions.len() as f64;
    let out = PyDict::new(py);
    out.set_item("weights_bytes", streamed_weights(&config))?;
    out.set_item("head_bytes", config.vocab * config.hidden * config.dtype.bytes())?;
    out.set_item("pages", mean(visible_pages))?;
    out.set_item("upper_page_bytes", heads * upper_page_bytes(config.head_dim))?;
    out.set_item("lower_page_bytes", heads * lower_page_bytes(config.head_dim))?;
    out.set_item("full_page_bytes", heads * full_page_bytes(config.head_dim))?;
    out.set_item("page_bound_bytes", heads * PARAMS * config.head_dim)?;
    out.set_item("buffer_tokens", mean(|position| visible_buffer(position).len()))?;
    out.set_item("token_bytes", heads * 2 * HALF * config.head_dim)?;
    Ok(out)
}

/// `read_gb_per_s(threads)`: how fast that many threads read memory now, in 10⁹ bytes a second.
#[pyfunction]
#[pyo3(signature = (threads=None))]
pub(crate) fn read_gb_per_s(py: Python<'_>, threads: Option<usize>) -> PyResult<f64> {
    detached(py, || quantspec_cpu::read_gb_per_s(threads.unwrap_or_else(default_threads)))
}
