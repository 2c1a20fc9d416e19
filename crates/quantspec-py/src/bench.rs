//! What `quantspec bench` needs in addition to its engine: bytes that a step must read, the engine's memory, times of a GPU's
//! kernels.

use crate::device::{ChosenDevice, Models, Way};
use crate::errors::{detached, interruptible, to_python};
use crate::options::{EngineArguments, sensitive, target_weights};
use crate::plan::checkpoint_of;
use crate::raised::{Raised, poll};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use quantspec_core::Error;
use quantspec_core::cache::{visible_buffer, visible_pages};
use quantspec_core::config::TargetWeights;
use quantspec_core::plan::{full_page_bytes, lower_page_bytes, upper_page_bytes};
use quantspec_core::weights::{GROUP, SMALL_GROUP};
use quantspec_model::checkpoint::{Checkpoint, LayerPart, Part};

/// Bytes of an f16 scale and an f16 zero.
const PARAMS: usize = 4;

/// Bytes of one f16 key or value.
const HALF: usize = 2;

/// Bytes of the weights that one pass reads: every projection of every layer, and the head. Norms and biases are less than a
/// thousandth; a step reads one row of the embedding.
fn streamed_weights(checkpoint: &Checkpoint, bytes: impl Fn(Part) -> usize) -> usize {
    let layers = 0..checkpoint.config().layers;
    layers
        .flat_map(|index| LayerPart::MATRICES.map(|part| Part::Layer(index, part)))
        .chain([Part::Head])
        .map(bytes)
        .sum()
}

/// Bytes of a matrix in nibbles, in groups of `group`: both planes, and the upper one.
fn nibble_bytes((rows, columns): (usize, usize), group: usize) -> (usize, usize) {
    let groups = rows * columns.div_ceil(group);
    (groups * (group + PARAMS), groups * (group / 2 + PARAMS))
}

/// `traffic(model, start, tokens, weights, device)`: mean bytes that steps at positions `start .. start + tokens` read, over all
/// layers and KV heads: of the cache, of the target's weights, and in drafts of weights in nibbles. `described` as in
/// [`crate::plan::plan`].
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "keyword arguments of the Python function")]
#[pyo3(signature = (model, start, tokens, weights, device, *, draft_precision="none", described=false))]
pub(crate) fn traffic<'py>(
    py: Python<'py>,
    model: &str,
    start: usize,
    tokens: usize,
    weights: &str,
    device: &str,
    draft_precision: &str,
    described: bool,
) -> PyResult<Bound<'py, PyDict>> {
    let weights = target_weights(weights).map_err(to_python)?.unwrap_or_default();
    let chosen = sensitive(draft_precision).map_err(to_python)?.unwrap_or_default();
    let checkpoint = detached(py, || checkpoint_of(model, described))?;
    let config = checkpoint.config();
    let heads = config.layers * config.kv_heads;
    let positions = start..start + tokens.max(1);
    let mean = |of: fn(usize) -> usize| positions.clone().map(of).sum::<usize>() as f64 / positions.len() as f64;
    let out = PyDict::new(py);
    let cpu = device == "cpu";
    let nibbles = |part: Part| nibble_bytes(checkpoint.shape(part), if cpu { SMALL_GROUP } else { GROUP });
    let both = |part: Part| part.has_both_planes(weights, config.layers);
    let target = |part: Part| match weights {
        TargetWeights::Checkpoint => checkpoint.bytes(part),
        _ if both(part) => nibbles(part).0,
        _ => nibbles(part).1,
    };
    // On a CPU drafts of int4 read every plane that there is.
    let few = |part: Part| cpu && weights == TargetWeights::Int4 && both(part);
    let draft =
        |part: Part| if few(part) || part.is_drafted_in_8_bits(chosen) { nibbles(part).0 } else { nibbles(part).1 };
    out.set_item("weights_bytes", streamed_weights(&checkpoint, target))?;
    out.set_item("head_bytes", target(Part::Head))?;
    let drafted = (weights != TargetWeights::Checkpoint).then(|| streamed_weights(&checkpoint, draft));
    out.set_item("draft_weights_bytes", drafted)?;
    out.set_item("pages", mean(visible_pages))?;
    out.set_item("upper_page_bytes", heads * upper_page_bytes(config.head_dim))?;
    out.set_item("lower_page_bytes", heads * lower_page_bytes(config.head_dim))?;
    out.set_item("full_page_bytes", heads * full_page_bytes(config.head_dim))?;
    out.set_item("page_score_bytes", heads * PARAMS * config.head_dim)?;
    out.set_item("buffer_tokens", mean(|position| visible_buffer(position).len()))?;
    out.set_item("token_bytes", heads * 2 * HALF * config.head_dim)?;
    Ok(out)
}

/// `planned(model, …)`: peak bytes of an engine opened with `every_method`. Refuses a model that the device does not
/// support, and a context or memory that is too small. Reads no weights.
#[pyfunction]
#[pyo3(signature = (model, *, capacity, draft_model=None, **options))]
pub(crate) fn planned(
    py: Python<'_>,
    model: &str,
    capacity: usize,
    draft_model: Option<&str>,
    options: Option<&Bound<'_, PyDict>>,
) -> PyResult<usize> {
    let arguments = EngineArguments { every_method: true, ..EngineArguments::of(capacity, options)? };
    let mut resolved = arguments.resolve().map_err(to_python)?;
    detached(py, || {
        let checkpoint = checkpoint_of(model, false)?;
        let draft = draft_model.map(|model| checkpoint_of(model, false)).transpose()?;
        let models = Models { target: &checkpoint, draft: draft.as_ref(), draft_cache: resolved.draft_model_cache };
        let chosen = ChosenDevice::choose(&arguments.device, &checkpoint)?;
        chosen.resolve_auto(models, &mut resolved)?;
        chosen.plan(models, &resolved.options, 0, Way::OF_METHODS)
    })
}

/// `kernels(model, …)`: times of the GPU's kernels at the shapes of a model. Returns the GPU's name, its read bandwidth in
/// bytes per second, and one dict per measurement.
#[pyfunction]
#[pyo3(signature = (model, *, device, contexts, rows))]
pub(crate) fn kernels<'py>(
    py: Python<'py>,
    model: &str,
    device: &str,
    contexts: Vec<usize>,
    rows: Vec<usize>,
) -> PyResult<(String, String, f64, Vec<Bound<'py, PyDict>>)> {
    let raised = Raised::default();
    let mut interrupted = poll(raised.clone());
    let (chosen, config, read, measured) = interruptible(py, &raised, || {
        let checkpoint = checkpoint_of(model, false)?;
        let config = checkpoint.config().clone();
        let chosen = ChosenDevice::choose(device, &checkpoint)?;
        let ChosenDevice::Cuda { gpu, .. } = &chosen else {
            return Err(Error::usage(
                "bench kernels times the kernels of a GPU, and this engine runs on the CPU",
                "use --device cuda (quantspec doctor shows the usable GPUs); bench without kernels compares whole steps with the bandwidth",
            ));
        };
        let read = quantspec_cuda::bench::read_bytes_per_s(gpu)?;
        let mut measured = Vec::new();
        quantspec_cuda::bench::measure(gpu, &config, &contexts, &rows, &mut |one| {
            measured.push(one);
            interrupted()
        })?;
        Ok((chosen, config, read, measured))
    })?;
    let describe = |one: &quantspec_cuda::bench::Measured| {
        let out = PyDict::new(py);
        out.set_item("kernel", one.kernel)?;
        out.set_item("form", one.form)?;
        out.set_item("rows", one.rows)?;
        out.set_item("context", one.context)?;
        out.set_item("n", one.shape.map(|(n, _)| n))?;
        out.set_item("k", one.shape.map(|(_, k)| k))?;
        out.set_item("heads", config.heads)?;
        out.set_item("kv_heads", config.kv_heads)?;
        out.set_item("head_dim", config.head_dim)?;
        out.set_item("us", one.seconds * 1e6)?;
        out.set_item("bytes", one.bytes)?;
        out.set_item("gb_per_s", one.bytes as f64 / one.seconds / 1e9)?;
        out.set_item("bandwidth_gb_per_s", read / 1e9)?;
        out.set_item("bandwidth_share", one.bytes as f64 / one.seconds / read)?;
        out.set_item("tflop_per_s", one.operations.map(|operations| operations / one.seconds / 1e12))?;
        Ok(out)
    };
    let rows = measured.iter().map(describe).collect::<PyResult<_>>()?;
    Ok((chosen.name(), chosen.hardware(), read, rows))
}
