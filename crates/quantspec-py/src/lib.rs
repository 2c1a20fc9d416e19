//! `quantspec_cli._native`: the only interface between Python and the engine. Python owns text, files, the network and the
//! loop; Rust handles token ids.
#![forbid(unsafe_code)]

mod bench;
mod device;
mod engine;
mod errors;
mod evaluate;
mod grammar;
mod load;
mod options;
mod plan;
mod raised;
mod signal_watch;

use pyo3::prelude::*;

/// Native half of quantspec; `_native.pyi` has types and documentation.
#[pymodule]
mod _native {
    use super::*;
    use pyo3::types::{PyDict, PyList, PyString};
    use quantspec_core::config::Pages;
    use quantspec_model::cache_file::CachedFile;
    use quantspec_model::draft::{Entry, METHODS, Source};
    use quantspec_model::gguf::{Element, Gguf, Value};
    use quantspec_model::{draft_cache, prompt_cache};
    use std::path::{Path, PathBuf};
    use std::time::{SystemTime, UNIX_EPOCH};

    #[pymodule_export]
    use super::bench::{kernels, planned, traffic};
    #[pymodule_export]
    use super::engine::PyEngine;
    #[pymodule_export]
    use super::errors::NativeError;
    #[pymodule_export]
    use super::evaluate::{scores, sensitivity};
    #[pymodule_export]
    use super::plan::{OpenDevice, fitting, open_device, plan, rates};
    #[pymodule_export]
    use super::signal_watch::PySignalWatch;

    /// `gguf_metadata(path, keys)`: the metadata of a GGUF file that these keys name; keys that it lacks are left out.
    #[pyfunction]
    fn gguf_metadata<'py>(py: Python<'py>, path: &str, keys: Vec<String>) -> PyResult<Bound<'py, PyDict>> {
        let gguf = errors::detached(py, || Gguf::open(Path::new(path)))?;
        let out = PyDict::new(py);
        for (key, &value) in gguf.entries().iter().filter(|(key, _)| keys.contains(key)) {
            let value = match value {
                Value::List { .. } => {
                    let mut items = Vec::new();
                    let read = gguf.elements(key, |element| {
                        items.push(match element {
                            Element::Text(text) => PyString::new(py, text).into_any(),
                            Element::Value(value) => scalar(py, value),
                        });
                    });
                    read.map_err(errors::to_python)?;
                    PyList::new(py, items)?.into_any()
                }
                Value::Text { .. } => gguf.text(key).map_err(errors::to_python)?.into_pyobject(py)?,
                value => scalar(py, value),
            };
            out.set_item(key, value)?;
        }
        Ok(out)
    }

    /// A number or a flag.
    fn scalar(py: Python<'_>, value: Value) -> Bound<'_, PyAny> {
        let Ok(object) = match value {
            Value::Unsigned(number) => number.into_pyobject(py).map(Bound::into_any),
            Value::Signed(number) => number.into_pyobject(py).map(Bound::into_any),
            Value::Float(number) => number.into_pyobject(py).map(Bound::into_any),
            Value::Flag(flag) => flag.into_pyobject(py).map(|flag| flag.to_owned().into_any()),
            Value::Text { .. } | Value::List { .. } => Ok(py.None().into_bound(py)),
        };
        object
    }

    /// `model_info(path)`: the configuration of a checkpoint, parsed and validated. If `described`, a directory's config.json
    /// suffices.
    #[pyfunction]
    #[pyo3(signature = (path, *, described=false))]
    fn model_info<'py>(py: Python<'py>, path: &str, described: bool) -> PyResult<Bound<'py, PyDict>> {
        let checkpoint = errors::detached(py, || super::plan::checkpoint_of(path, described))?;
        let config = checkpoint.config();
        let out = PyDict::new(py);
        out.set_item("family", &config.family)?;
        out.set_item("vocab", config.vocab)?;
        out.set_item("layers", config.layers)?;
        out.set_item("hidden", config.hidden)?;
        out.set_item("intermediate", config.intermediate)?;
        out.set_item("heads", config.heads)?;
        out.set_item("kv_heads", config.kv_heads)?;
        out.set_item("head_dim", config.head_dim)?;
        out.set_item("max_positions", config.max_positions)?;
        out.set_item("eos", &config.eos)?;
        out.set_item("quantised", checkpoint.is_quantised())?;
        Ok(out)
    }

    /// `methods()`: every decoding method, and its settings.
    #[pyfunction]
    fn methods(py: Python<'_>) -> PyResult<Vec<Bound<'_, PyDict>>> {
        let describe = |method: &Entry| {
            let out = PyDict::new(py);
            out.set_item("name", method.name)?;
            out.set_item("about", method.about)?;
            out.set_item("drafts", !matches!(method.source, Source::Nothing))?;
            out.set_item("draft_weights", method.takes_draft_weights())?;
            out.set_item(
                "draft_view",
                match method.source {
                    Source::Model { view: Some(view), .. } => options::target_name(view),
                    Source::Model { view: None, .. } | Source::Checkpoint => Some("target"),
                    Source::Several => options::target_name(quantspec_core::config::View::Upper),
                    Source::Nothing | Source::Other(_) => None,
                },
            )?;
            let own = method.own_pages();
            out.set_item("pages", own.and_then(Pages::count))?;
            out.set_item(
                "page_choice",
                match own {
                    Some(Pages::Window(_)) => Some("window"),
                    Some(Pages::Snap { .. }) => Some("snap"),
                    None | Some(Pages::All | Pages::Best(_) | Pages::Tokens(_)) => None,
                },
            )?;
            out.set_item("draft_model", matches!(method.source, Source::Checkpoint))?;
            out.set_item("chooses", matches!(method.source, Source::Several))?;
            Ok(out)
        };
        METHODS.iter().map(describe).collect()
    }

    /// The commit of the sources; None if they were built outside of a repository.
    #[pymodule_export]
    const COMMIT: Option<&str> = option_env!("QUANTSPEC_COMMIT");

    /// Most bytes of the folder of draft weights.
    #[pymodule_export]
    const DRAFTS_LIMIT_BYTES: u64 = load::DRAFTS_LIMIT_BYTES;

    /// Most bytes of a folder of prompts.
    #[pymodule_export]
    const PROMPTS_LIMIT_BYTES: u64 = load::PROMPTS_LIMIT_BYTES;

    // Constants that Python has, too, as it parses options and plans without this module.

    /// Largest γ.
    #[pymodule_export]
    const GAMMA_MAX: usize = quantspec_core::cache::GAMMA_MAX;

    /// Longest γ of the automatic policy.
    #[pymodule_export]
    const GAMMA_AUTO: usize = options::GAMMA_AUTO;

    /// Numbers of draft pages among which the policy chooses.
    #[pymodule_export]
    const PAGES_AUTO: [usize; 3] = options::PAGES_AUTO;

    /// Most rows of a step.
    #[pymodule_export]
    const STEP_ROWS_MAX: usize = options::STEP_ROWS_MAX;

    /// Longest n-grams that can be forbidden.
    #[pymodule_export]
    const NGRAM_MAX: usize = quantspec_core::penalty::NGRAM_MAX;

    /// Matrices that a draft may read in 8 bits.
    #[pymodule_export]
    const SENSITIVE: [&str; 4] = quantspec_core::config::Sensitive::KINDS;

    /// Path, model, bytes, and seconds since the epoch of the last use.
    type KeptFile = (PathBuf, Option<PathBuf>, u64, f64);

    fn described(files: Vec<CachedFile>) -> Vec<KeptFile> {
        let seconds = |used: SystemTime| used.duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
        files.into_iter().map(|file| (file.path, file.model, file.bytes, seconds(file.used))).collect()
    }

    /// `draft_files(folder)`: the folder's draft weights, least recently used first, as (path, model, bytes, seconds since
    /// the epoch of the last use). The model is None if another version wrote the file.
    #[pyfunction]
    fn draft_files(py: Python<'_>, folder: &str) -> PyResult<Vec<KeptFile>> {
        Ok(described(py.detach(|| draft_cache::files(Path::new(folder)))?))
    }

    /// `prompt_files(folder)`: the folder's prompts, in the form of `draft_files`.
    #[pyfunction]
    fn prompt_files(py: Python<'_>, folder: &str) -> PyResult<Vec<KeptFile>> {
        Ok(described(py.detach(|| prompt_cache::files(Path::new(folder)))?))
    }

    /// `doctor()`: what this machine offers, and why a device or a fast path is unavailable.
    #[pyfunction]
    fn doctor(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
        let cpu = PyDict::new(py);
        let chosen = errors::detached(py, quantspec_cpu::dispatch::choose)?;
        cpu.set_item("name", quantspec_cpu::machine::cpu_name())?;
        cpu.set_item("threads", options::default_threads())?;
        cpu.set_item("simd", chosen.simd.name())?;
        cpu.set_item("simd_reason", chosen.reason)?;
        cpu.set_item(
            "read_gb_per_s",
            errors::detached(py, || quantspec_cpu::read_gb_per_s(options::default_threads()))?,
        )?;
        let gpu = PyDict::new(py);
        let detected = py.detach(quantspec_cuda::detect);
        gpu.set_item("available", detected.available)?;
        gpu.set_item("reason", &detected.reason)?;
        let devices = detected
            .devices
            .iter()
            .map(|device| {
                let entry = PyDict::new(py);
                entry.set_item("name", &device.name)?;
                entry.set_item("compute_capability", &device.compute_capability)?;
                entry.set_item("memory_bytes", device.memory_bytes)?;
                entry.set_item("usable", device.is_usable())?;
                Ok(entry)
            })
            .collect::<PyResult<Vec<_>>>()?;
        gpu.set_item("devices", devices)?;
        let out = PyDict::new(py);
        out.set_item("cpu", cpu)?;
        out.set_item("gpu", gpu)?;
        out.set_item("memory_bytes", quantspec_cpu::machine::memory_total())?;
        out.set_item("kernels", quantspec_cuda::kernels())?;
        Ok(out)
    }
}
