//! Loading: opens checkpoints, and loads an engine with its caches of draft weights and prompts.

use crate::device::{ChosenDevice, Device, MakeDrafter, Models, Way, on_device};
use crate::errors::detached;
use crate::options::{Resolved, weights_name};
use crate::raised::{Raised, locked, poll, progress};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use quantspec_core::config::{ModelConfig, Sensitive, TargetWeights};
use quantspec_core::{Error, Result};
use quantspec_model::backend::{Hooks, Options};
use quantspec_model::checkpoint::Checkpoint;
use quantspec_model::draft_cache::{DraftCache, Origin};
use quantspec_model::prompt_cache::{self, PromptCache, PromptFolder};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// Most bytes of the folder of draft weights (docs/draft_weights.md); those of a 70-billion-parameter model take 38 GB.
pub(crate) const DRAFTS_LIMIT_BYTES: u64 = 64 << 30;

/// Most bytes of a folder of prompts (docs/documents.md): about 500,000 tokens of an 8-billion-parameter model.
pub(crate) const PROMPTS_LIMIT_BYTES: u64 = 64 << 30;
/// Seconds by which writing a prompt to a folder may exceed computing it: many prompts are short, and a disk may pause.
const PROMPTS_PATIENCE_S: f64 = 2.0;

/// Opens a checkpoint. `draft_cache`: folder of its draft weights, and the fewest bytes worth keeping there.
pub(crate) fn open(model: &str, draft_cache: Option<(PathBuf, usize)>) -> Result<Checkpoint> {
    let model = Path::new(model);
    let mut checkpoint = Checkpoint::open(model)?;
    if let Some((folder, smallest_bytes)) = draft_cache {
        // Canonical, so that any path to a snapshot of the hub's cache finds its drafts.
        let model = model.canonicalize().unwrap_or_else(|_| model.to_path_buf());
        checkpoint.cache_drafts(DraftCache { folder, model, smallest_bytes, limit_bytes: DRAFTS_LIMIT_BYTES });
    }
    Ok(checkpoint)
}

/// Where a hook stores the origin of the draft weights.
#[derive(Clone, Default)]
pub(crate) struct OriginSlot(Arc<Mutex<Option<Origin>>>);

impl OriginSlot {
    /// The hook.
    pub(crate) fn hook(&self) -> Box<dyn FnMut(Origin) + Send> {
        let slot = self.clone();
        Box::new(move |origin| {
            // No code panics while holding the lock.
            if let Ok(mut origin_slot) = slot.0.lock() {
                *origin_slot = Some(origin);
            }
        })
    }

    /// Sets `cached_drafts` (share of the draft weights that was read; None without a cache) and `note`.
    pub(crate) fn describe(&self, out: &Bound<'_, PyDict>) -> PyResult<()> {
        let origin = self.0.lock().ok().and_then(|mut origin_slot| origin_slot.take());
        out.set_item("cached_drafts", origin.as_ref().map(|o| o.cached as f64 / o.blocks.max(1) as f64))?;
        out.set_item("note", origin.and_then(|origin| origin.note))
    }
}

type Show = Box<dyn FnMut(usize, usize) + Send>;

/// A callback that shows a load's progress. A backend keeps its hooks for its lifetime, and Python's garbage collector does not
/// traverse it: a callback that refers to the engine would leak both. So the hook forgets the callback when this is dropped.
pub(crate) struct Loading(Arc<Mutex<Option<Show>>>);

impl Loading {
    pub(crate) fn new(callback: Option<Py<PyAny>>, raised: &Raised) -> Loading {
        let show: Show = Box::new(progress(callback, raised.clone()));
        Loading(Arc::new(Mutex::new(Some(show))))
    }

    /// The hook.
    pub(crate) fn hook(&self) -> Show {
        let shown = self.0.clone();
        Box::new(move |done, total| {
            if let Some(show) = locked(&shown).as_mut() {
                show(done, total);
            }
        })
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        drop(locked(&self.0).take());
    }
}

/// The files and memory that an engine is opened with.
pub(crate) struct Files<'a> {
    pub(crate) model: &'a str,
    pub(crate) draft_model: Option<&'a str>,
    /// The folder of draft weights, and the fewest bytes worth keeping there.
    pub(crate) draft_cache: Option<(PathBuf, usize)>,
    /// Keep processed prompts in memory, unless there is a folder for them.
    pub(crate) prompt_memory: bool,
    pub(crate) prompt_folder: Option<PathBuf>,
}

/// A loaded engine, and the choices made for it.
pub(crate) struct Loaded {
    pub(crate) device: Device,
    pub(crate) make_drafter: Option<MakeDrafter>,
    pub(crate) chosen: ChosenDevice,
    config: ModelConfig,
    weights: TargetWeights,
    sensitive: Sensitive,
    pub(crate) planned_bytes: usize,
    /// Most bytes of prompts in memory, if they are kept there.
    prompt_bytes: Option<usize>,
}

impl Files<'_> {
    /// Chooses the device, plans its memory and loads the models. `hooks` are the target's.
    pub(crate) fn load(self, device: &str, mut resolved: Resolved, hooks: Hooks, raised: &Raised) -> Result<Loaded> {
        let checkpoint = open(self.model, self.draft_cache)?;
        let draft = self.draft_model.map(|model| open(model, None)).transpose()?;
        let models = Models { target: &checkpoint, draft: draft.as_ref(), draft_cache: resolved.draft_model_cache };
        let chosen = ChosenDevice::choose(device, &checkpoint)?;
        chosen.resolve_auto(models, &mut resolved)?;
        let Options { weights, sensitive, threads, .. } = resolved.options;
        let ways = if resolved.every_method { Way::OF_METHODS } else { Way::OF_ENGINE };
        let planned_bytes = chosen.plan(models, &resolved.options, 0, ways)?;
        let in_memory = self.prompt_memory && self.prompt_folder.is_none();
        let prompt_bytes = in_memory.then(|| chosen.bytes_for_prompts(planned_bytes));
        let (mut device, make_drafter) = chosen.engine(models, resolved, [hooks, raised.hooks()])?;
        // A callback's very last call, after which no poll follows.
        if raised.is_set() {
            return Err(Error::interrupted());
        }
        if let Some(limit_bytes) = prompt_bytes {
            on_device!(&mut device, engine => {
                let cache = PromptCache::in_memory(engine.backend(), limit_bytes);
                engine.cache_prompts(cache);
            });
        } else if let Some(folder) = self.prompt_folder {
            let fingerprint = prompt_cache::fingerprint(&checkpoint, weights, threads, &mut poll(raised.clone()))?;
            let model = PathBuf::from(self.model);
            let model = model.canonicalize().unwrap_or(model);
            let (limit_bytes, patience_s) = (PROMPTS_LIMIT_BYTES, PROMPTS_PATIENCE_S);
            let at = PromptFolder { folder, model, fingerprint, limit_bytes, patience_s };
            on_device!(&mut device, engine => {
                let cache = PromptCache::on_disk(engine.backend(), at);
                engine.cache_prompts(cache);
            });
        }
        let config = checkpoint.config().clone();
        Ok(Loaded { device, make_drafter, chosen, config, weights, sensitive, planned_bytes, prompt_bytes })
    }
}

impl Loaded {
    /// Fields of `Engine.info`.
    pub(crate) fn describe<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let info = PyDict::new(py);
        info.set_item("device", self.chosen.name())?;
        info.set_item("device_name", self.chosen.hardware())?;
        let chosen = &self.chosen;
        info.set_item("simd", detached(py, || chosen.simd())?)?;
        info.set_item("weights", weights_name(self.weights))?;
        info.set_item("draft_precision", self.sensitive.names())?;
        info.set_item("family", &self.config.family)?;
        info.set_item("vocab", self.config.vocab)?;
        info.set_item("layers", self.config.layers)?;
        info.set_item("max_positions", self.config.max_positions)?;
        info.set_item("eos", &self.config.eos)?;
        info.set_item("block_rows", on_device!(&self.device, engine => engine.block_rows()))?;
        info.set_item("planned_bytes", self.planned_bytes)?;
        info.set_item("prompt_cache_limit_bytes", self.prompt_bytes)?;
        Ok(info)
    }
}
