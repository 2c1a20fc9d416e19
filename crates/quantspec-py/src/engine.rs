//! `_native.Engine`: one engine on one device, driven by Python one round at a time.

use crate::device::{ChosenDevice, Device, MakeDrafter, drafter, on_device};
use crate::errors::{detached, interruptible, to_python};
use crate::grammar::PyGrammar;
use crate::load::{Files, Loaded, Loading, OriginSlot};
use crate::options::{DraftPages, EngineArguments};
use crate::raised::{Raised, poll, progress};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use quantspec_core::config::Planes;
use quantspec_core::penalty::Penalties;
use quantspec_core::sample::{Accept, Sampler};
use quantspec_core::stats::MethodCounters;
use quantspec_core::{Error, ErrorKind, Result};
use quantspec_model::backend::{Hooks, Memory, Options};
use quantspec_model::engine::Emitted;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::Instant;

pub(crate) fn memory_dict<'py>(py: Python<'py>, memory: &Memory) -> PyResult<Bound<'py, PyDict>> {
    let parts = PyDict::new(py);
    parts.set_item("weights_bytes", memory.weights_bytes)?;
    parts.set_item("draft_weights_bytes", memory.draft_weights_bytes)?;
    parts.set_item("cache_upper_bytes", memory.cache_upper_bytes)?;
    parts.set_item("cache_lower_bytes", memory.cache_lower_bytes)?;
    parts.set_item("cache_full_bytes", memory.cache_full_bytes)?;
    parts.set_item("buffer_bytes", memory.buffer_bytes)?;
    parts.set_item("workspace_bytes", memory.workspace_bytes)?;
    parts.set_item("host_bytes", memory.host_bytes)?;
    Ok(parts)
}

/// A slot, the tokens that it emitted, and those that were drafted.
type EmittedAndDrafted = (usize, Vec<u32>, Vec<u32>);

/// A token's log-probability, and the most likely tokens at its position with theirs.
type TokenLogprob = (f64, Vec<(u32, f64)>);

/// Decodes sequences on one device. `_native.pyi` documents each method.
#[pyclass(name = "Engine", module = "quantspec_cli._native")]
pub(crate) struct PyEngine {
    device: Mutex<Device>,
    chosen: ChosenDevice,
    threads: usize,
    raised: Raised,
    accept: Accept,
    info: Py<PyDict>,
    planned_bytes: usize,
    load_s: f64,
    prompt_capacity: usize,
    step_rows: usize,
    every_method: bool,
    planes: Planes,
    /// Makes drafters with the draft model, if one was loaded.
    make_drafter: Option<MakeDrafter>,
    /// The view of its cache, if not the target's.
    draft_model_kv: Option<String>,
}

impl PyEngine {
    /// Runs a call without the GIL. Ctrl-C ends it.
    fn run<T: Send>(&self, py: Python<'_>, work: impl FnOnce(&mut Device) -> Result<T> + Send) -> PyResult<T> {
        let own = Raised::default();
        interruptible(py, &own, || {
            let mut device = self.device()?;
            let done = work(&mut device);
            // It may be the exception of the very last call of a callback or a grammar, after which no poll follows.
            match self.raised.take() {
                Some(error) => done.and(Err(own.keep(error))),
                None => done,
            }
        })
    }

    /// The device, which one thread uses (`scheduler.py`). So another call is running only if a callback of that call makes this
    /// one, or a second thread does.
    fn device(&self) -> Result<MutexGuard<'_, Device>> {
        self.device.try_lock().map_err(|error| match error {
            TryLockError::Poisoned(_) => {
                Error::internal("an earlier call panicked and left the engine in an unknown state")
            }
            TryLockError::WouldBlock => Error::usage(
                "the engine is called during another call",
                "call it from one thread, and after a callback has returned",
            ),
        })
    }

    /// One sample per prompt: the noise's sequence key is 0, so a prompt's text does not depend on its position in a batch.
    fn sampler(&self, temperature: f32, top_k: usize, top_p: f32, min_p: f32, seed: u64) -> PyResult<Sampler> {
        let accept = if temperature == 0.0 { Accept::Greedy } else { self.accept };
        let sampler = Sampler { temperature, top_k, top_p, min_p, seed, accept, ..Sampler::greedy() };
        sampler.checked().map_err(to_python)
    }
}

#[pymethods]
impl PyEngine {
    #[new]
    #[pyo3(signature = (model, *, capacity, draft_model=None, draft_cache=None, prompt_memory=false, prompt_folder=None,
        on_loading=None, **options))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of the Python constructor")]
    fn new(
        py: Python<'_>,
        model: &str,
        capacity: usize,
        draft_model: Option<&str>,
        draft_cache: Option<(PathBuf, usize)>,
        prompt_memory: bool,
        prompt_folder: Option<PathBuf>,
        on_loading: Option<Py<PyAny>>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<PyEngine> {
        let arguments = EngineArguments::of(capacity, options)?;
        let resolved = arguments.resolve().map_err(to_python)?;
        let accept = resolved.accept;
        let Options { threads, prompt_capacity, step_rows, planes, .. } = resolved.options;
        let raised = Raised::default();
        let (loading, origin) = (Loading::new(on_loading, &raised), OriginSlot::default());
        let hooks = Hooks { poll: Box::new(poll(raised.clone())), loading: loading.hook(), drafts: origin.hook() };
        let files = Files { model, draft_model, draft_cache, prompt_memory, prompt_folder };
        let started = Instant::now();
        let loaded = interruptible(py, &raised, || files.load(&arguments.device, resolved, hooks, &raised))?;
        let load_s = started.elapsed().as_secs_f64();
        let info = loaded.describe(py)?;
        info.set_item("threads", threads)?;
        info.set_item("load_s", load_s)?;
        origin.describe(&info)?;
        let Loaded { device, make_drafter, chosen, planned_bytes, .. } = loaded;
        Ok(PyEngine {
            device: Mutex::new(device),
            chosen,
            threads,
            raised,
            accept,
            info: info.unbind(),
            planned_bytes,
            load_s,
            prompt_capacity,
            step_rows,
            every_method: arguments.every_method,
            planes,
            make_drafter,
            draft_model_kv: arguments.draft_model_kv,
        })
    }

    #[getter]
    fn info(&self, py: Python<'_>) -> Py<PyDict> {
        self.info.clone_ref(py)
    }

    #[pyo3(signature = (prompt, *, temperature, top_k, top_p, min_p, seed, max_new_tokens, repetition_penalty=1.0, frequency_penalty=0.0,
        presence_penalty=0.0, no_repeat_ngram=0, logprobs=None, grammar=None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of the Python method")]
    fn add(
        &self,
        py: Python<'_>,
        prompt: Vec<u32>,
        temperature: f32,
        top_k: usize,
        top_p: f32,
        min_p: f32,
        seed: u64,
        max_new_tokens: usize,
        repetition_penalty: f32,
        frequency_penalty: f32,
        presence_penalty: f32,
        no_repeat_ngram: usize,
        logprobs: Option<usize>,
        grammar: Option<Py<PyAny>>,
    ) -> PyResult<usize> {
        if prompt.len() > self.prompt_capacity {
            return Err(to_python(Error::does_not_fit(
                format!("a prompt of {} tokens; the engine was opened for {}", prompt.len(), self.prompt_capacity),
                "shorten the prompt, or open the engine for longer ones",
            )));
        }
        let penalties = Penalties::new(repetition_penalty, frequency_penalty, presence_penalty, no_repeat_ngram);
        let penalties = penalties.map_err(to_python)?;
        let sampler = Sampler { penalties, ..self.sampler(temperature, top_k, top_p, min_p, seed)? };
        let grammar = grammar.map(|answer| PyGrammar::boxed(answer, self.raised.clone()));
        self.run(py, |device| {
            on_device!(device, engine => {
                let slot = engine.add(&prompt, sampler, max_new_tokens)?;
                if let Some(top) = logprobs {
                    engine.want_logprobs(slot, top)?;
                }
                if let Some(grammar) = grammar {
                    engine.constrain(slot, grammar)?;
                }
                Ok(slot)
            })
        })
    }

    /// Log-probabilities of the slot's tokens after the last call, each with the most likely tokens at its position.
    fn take_logprobs(&self, py: Python<'_>, slot: usize) -> PyResult<Vec<TokenLogprob>> {
        let logprobs = self.run(py, |device| on_device!(device, engine => engine.take_logprobs(slot)))?;
        Ok(logprobs.into_iter().map(|of| (of.logprob, of.top)).collect())
    }

    /// Log-probabilities of `tokens` from the second on under the target's view, teacher-forced, in a free slot.
    #[pyo3(signature = (tokens, on_progress=None))]
    fn score(&self, py: Python<'_>, tokens: Vec<u32>, on_progress: Option<Py<PyAny>>) -> PyResult<Vec<f64>> {
        let rows = self.step_rows;
        let mut show = progress(on_progress, self.raised.clone());
        self.run(py, |device| on_device!(device, engine => engine.score(&tokens, rows, &mut show)))
    }

    /// Returns true if a prompt can be added now.
    fn has_room(&self, py: Python<'_>, prompt: Vec<u32>, max_new_tokens: usize) -> PyResult<bool> {
        self.run(py, |device| Ok(on_device!(device, engine => engine.has_room(&prompt, max_new_tokens))))
    }

    #[pyo3(signature = (slot, on_progress=None))]
    fn prefill(&self, py: Python<'_>, slot: usize, on_progress: Option<Py<PyAny>>) -> PyResult<u32> {
        let mut show = progress(on_progress, self.raised.clone());
        self.run(py, |device| on_device!(device, engine => engine.prefill(slot, &mut show)))
    }

    #[pyo3(signature = (slot, most_rows, on_progress=None))]
    fn prefill_chunk(
        &self,
        py: Python<'_>,
        slot: usize,
        most_rows: usize,
        on_progress: Option<Py<PyAny>>,
    ) -> PyResult<Option<u32>> {
        let mut show = progress(on_progress, self.raised.clone());
        self.run(py, |device| on_device!(device, engine => engine.prefill_chunk(slot, most_rows, &mut show)))
    }

    /// Prefill; also returns the seconds spent on the prompt's rows from `rows_from` on.
    #[pyo3(signature = (slot, rows_from, on_progress=None))]
    fn prefill_timed(
        &self,
        py: Python<'_>,
        slot: usize,
        rows_from: usize,
        on_progress: Option<Py<PyAny>>,
    ) -> PyResult<(u32, f64)> {
        let mut show = progress(on_progress, self.raised.clone());
        self.run(py, |device| on_device!(device, engine => engine.prefill_timed(slot, rows_from, &mut show)))
    }

    /// Changes the method; policy and statistics restart.
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of the Python method")]
    #[pyo3(signature = (*, method="quantspec", kv_target="int8", draft_pages=None, page_choice="best", draft_refresh=0, gamma=None))]
    fn configure(
        &self,
        py: Python<'_>,
        method: &str,
        kv_target: &str,
        draft_pages: Option<DraftPages>,
        page_choice: &str,
        draft_refresh: usize,
        gamma: Option<usize>,
    ) -> PyResult<()> {
        if !self.every_method {
            return Err(to_python(Error::usage(
                "this engine keeps the planes of one method only",
                "open it with every_method=True to change the method later",
            )));
        }
        if kv_target == "fp16" && !self.planes.full {
            return Err(to_python(Error::usage("this engine keeps no cache in FP16", "open it with kv_target fp16")));
        }
        let arguments = EngineArguments {
            kv_target: kv_target.to_owned(),
            method: method.to_owned(),
            draft_pages,
            page_choice: page_choice.to_owned(),
            draft_refresh,
            draft_model_kv: self.draft_model_kv.clone(),
            gamma,
            every_method: true,
            // Weights and sizes do not depend on the method.
            ..EngineArguments::default()
        };
        let resolved = arguments.resolve().map_err(to_python)?;
        let mut method = resolved.method;
        method.drafter =
            drafter(method.drafter, resolved.draft_model.as_ref(), self.make_drafter.as_ref()).map_err(to_python)?;
        self.run(py, |device| {
            on_device!(device, engine => {
                engine.set_method(method)?;
                engine.reset_stats();
            });
            Ok(())
        })
    }

    /// Forgets counters and times; the policy keeps its measurements.
    fn reset_stats(&self, py: Python<'_>) -> PyResult<()> {
        self.run(py, |device| {
            on_device!(device, engine => engine.reset_stats());
            Ok(())
        })
    }

    /// Restarts the slot's answer with `token`; False if the prompt must be prefilled again.
    #[pyo3(signature = (slot, token, *, temperature, top_k, top_p, min_p, seed))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of the Python method")]
    fn restart(
        &self,
        py: Python<'_>,
        slot: usize,
        token: u32,
        temperature: f32,
        top_k: usize,
        top_p: f32,
        min_p: f32,
        seed: u64,
    ) -> PyResult<bool> {
        let sampler = self.sampler(temperature, top_k, top_p, min_p, seed)?;
        self.run(py, |device| on_device!(device, engine => engine.restart(slot, token, sampler)))
    }

    fn choose_gamma(&self, py: Python<'_>, slot: usize) -> PyResult<usize> {
        self.run(py, |device| Ok(on_device!(device, engine => engine.choose_gamma(slot))))
    }

    fn draft(&self, py: Python<'_>, gammas: Vec<(usize, usize)>) -> PyResult<()> {
        self.run(py, |device| on_device!(device, engine => engine.draft(&gammas)))
    }

    fn verify(&self, py: Python<'_>) -> PyResult<Vec<(usize, Vec<u32>)>> {
        let round = self.run(py, |device| on_device!(device, engine => engine.verify()))?;
        Ok(round.into_iter().map(|Emitted { slot, tokens, .. }| (slot, tokens)).collect())
    }

    fn verify_with_drafts(&self, py: Python<'_>) -> PyResult<Vec<EmittedAndDrafted>> {
        let round = self.run(py, |device| on_device!(device, engine => engine.verify()))?;
        Ok(round.into_iter().map(|Emitted { slot, tokens, drafted }| (slot, tokens, drafted)).collect())
    }

    /// Memory bandwidth of the engine's device, measured now, in 10⁹ bytes per second.
    fn read_gb_per_s(&self, py: Python<'_>) -> PyResult<f64> {
        let threads = self.threads;
        let gpu = self.chosen.gpu();
        self.run(py, |_| match gpu {
            Some(gpu) => Ok(quantspec_cuda::bench::read_bytes_per_s(gpu)? / 1e9),
            None => quantspec_cpu::read_gb_per_s(threads),
        })
    }

    /// Cannot be interrupted: otherwise an interrupted caller would leak the slot. After a panic no call needs the slot.
    fn finish(&self, py: Python<'_>, slot: usize) -> PyResult<()> {
        detached(py, || match self.device() {
            Ok(mut device) => {
                on_device!(&mut *device, engine => engine.finish(slot));
                Ok(())
            }
            Err(error) if error.kind == ErrorKind::Internal => Ok(()),
            Err(error) => Err(error),
        })
    }

    /// One line about a prompt cache problem after the last call, or None.
    fn prompt_note(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.run(
            py,
            |device| on_device!(device, engine => Ok(engine.prompt_cache().and_then(|prompts| prompts.take_note()))),
        )
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (stats, memory, prompt_bytes) = self.run(py, |device| {
            on_device!(device, engine => {
                let prompt_bytes = engine.prompt_cache().map_or(0, |prompts| prompts.held_bytes());
                Ok((engine.stats().clone(), engine.memory(), prompt_bytes))
            })
        })?;
        let out = PyDict::new(py);
        out.set_item("load_s", self.load_s)?;
        out.set_item("prefill_s", stats.prefill_s())?;
        out.set_item("decode_s", stats.decode_s())?;
        out.set_item("draft_s", stats.draft_s())?;
        out.set_item("verify_s", stats.verify_s())?;
        out.set_item("prefill_tokens_per_s", stats.prefill_tokens_per_s())?;
        out.set_item("decode_tokens_per_s", stats.decode_tokens_per_s())?;
        out.set_item("rounds", stats.rounds())?;
        out.set_item("gamma_mean", stats.gamma_mean())?;
        out.set_item("draft_pages_mean", stats.draft_pages_mean())?;
        out.set_item("drafted_tokens", stats.drafted_tokens())?;
        out.set_item("copied_tokens", stats.copied_tokens())?;
        let (guessed, right) = stats.guessed_tokens();
        out.set_item("guessed_tokens", guessed)?;
        out.set_item("right_guesses", right)?;
        out.set_item("accepted_tokens", stats.accepted_tokens())?;
        out.set_item("acceptance_rate", stats.acceptance_rate())?;
        out.set_item("mean_acceptance_length", stats.mean_acceptance_length())?;
        out.set_item("acceptance_rate_per_position", stats.acceptance_rate_per_position())?;
        out.set_item("reused_tokens", stats.reused_tokens())?;
        out.set_item("reserved_pages", stats.reserved_pages())?;
        out.set_item("pool_waste", stats.pool_waste())?;
        if !stats.by_method().is_empty() {
            out.set_item("by_method", by_method(py, stats.by_method())?)?;
        }
        out.update(memory_dict(py, &memory)?.as_mapping())?;
        out.set_item("prompt_cache_bytes", prompt_bytes)?;
        out.set_item("planned_bytes", self.planned_bytes)?;
        out.set_item("peak_bytes", self.chosen.peak_bytes())?;
        Ok(out)
    }
}

/// Counters of each of several methods.
fn by_method<'py>(py: Python<'py>, counters: &BTreeMap<&'static str, MethodCounters>) -> PyResult<Bound<'py, PyDict>> {
    let out = PyDict::new(py);
    for (name, own) in counters {
        let of_method = PyDict::new(py);
        let mean = |sum: usize| (own.drafted_tokens > 0).then(|| sum as f64 / own.drafted_tokens as f64);
        of_method.set_item("rounds", own.rounds)?;
        of_method.set_item("drafted_tokens", own.drafted_tokens)?;
        of_method.set_item("accepted_tokens", own.accepted_tokens)?;
        of_method.set_item("acceptance_rate", mean(own.accepted_tokens))?;
        of_method.set_item("draft_pages_mean", mean(own.drafted_pages))?;
        out.set_item(name, of_method)?;
    }
    Ok(out)
}
