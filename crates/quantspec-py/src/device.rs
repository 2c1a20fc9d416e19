//! The device of an engine: choosing it, planning its memory, loading the model onto it.

use crate::options::{DraftModelCache, DraftedCache, Resolved, STEP_ROWS_MAX, WithDraftModel, of_draft};
use quantspec_core::cache::G;
use quantspec_core::config::{DraftWeights, Pages, Sensitive, TargetWeights, View};
use quantspec_core::plan::{largest_fitting, pages, sensitive};
use quantspec_core::{Error, Result};
use quantspec_cpu::{CpuBackend, machine};
use quantspec_cuda::CudaBackend;
use quantspec_model::backend::{Backend, Hooks, Memory, Options};
use quantspec_model::checkpoint::Checkpoint;
use quantspec_model::draft::{DraftModel, Drafter};
use quantspec_model::engine::Engine;
use std::sync::Arc;

/// Rows of a prefill block on a GPU: GEMMs reach their full rate from about 4,000 rows on.
const CUDA_BLOCK_ROWS: usize = 4096;

/// Growth of the process beyond the engine: stacks of workers, the allocator's own, pages of code. 1.2 to 1.9 MB for the demo
/// model, two threads and prompts of 35 to 4,000 tokens.
const PROCESS_BYTES: usize = 3 << 19;
/// The same for each further thread: 0.18 to 0.24 MB with 8 to 64 threads.
const THREAD_BYTES: usize = 200 << 10;
/// Growth of a GPU's used memory beyond the engine: code, local memory and graphs. 14 to 15 MB (H200) for the demo model and
/// one of 2.5 billion weights with 1 to 64 sequences, 20 MB with a draft model.
const DRIVER_BYTES: usize = 20 << 20;

/// An engine on the chosen device.
pub(crate) enum Device {
    Cpu(Box<Engine<CpuBackend>>),
    Cuda(Box<Engine<CudaBackend>>),
}

/// Makes a drafter with the loaded draft model, for any method.
pub(crate) type MakeDrafter = Box<dyn Fn(&WithDraftModel) -> Box<dyn Drafter> + Send + Sync>;

/// The checkpoints of an engine.
#[derive(Clone, Copy)]
pub(crate) struct Models<'a> {
    pub(crate) target: &'a Checkpoint,
    /// One that drafts.
    pub(crate) draft: Option<&'a Checkpoint>,
    pub(crate) draft_cache: DraftModelCache,
}

impl<'a> Models<'a> {
    /// A model without a draft model.
    pub(crate) fn alone(target: &'a Checkpoint) -> Models<'a> {
        Models { target, draft: None, draft_cache: DraftModelCache::default() }
    }

    /// Refuses a draft model with another vocabulary.
    fn check_vocabulary(&self) -> Result<()> {
        let Some(draft) = self.draft else { return Ok(()) };
        let (target, draft) = (self.target.config(), draft.config());
        if draft.vocab != target.vocab {
            return Err(Error::model(
                format!(
                    "the draft model has a vocabulary of {} tokens, the model one of {}",
                    draft.vocab, target.vocab
                ),
                "use a smaller model of the same family, with the same tokenizer",
            ));
        }
        Ok(())
    }

    /// Refuses models with less context than requested. `longest`: tokens that fit, for the hint.
    fn check_context(&self, options: &Options, longest: usize) -> Result<()> {
        let (tokens, most) = (options.capacity, self.target.config().max_positions);
        if let Some(draft) = self.draft.map(|draft| draft.config().max_positions).filter(|draft| tokens > *draft) {
            return Err(Error::does_not_fit(
                format!("{tokens} tokens exceed the draft model's context of {draft}; the model's is {most}"),
                format!(
                    "shorten the prompt or lower -n so that both stay within {draft} tokens, or use a draft model with a longer context"
                ),
            ));
        }
        if tokens > most {
            return Err(Error::does_not_fit(
                format!("{tokens} tokens exceed the model's context of {most}"),
                format!("shorten the prompt or lower -n so that both stay within {} tokens", longest.max(1)),
            ));
        }
        Ok(())
    }
}

/// Memory of an engine, in bytes.
pub(crate) struct MemoryPlan {
    /// By purpose.
    pub(crate) parts: Memory,
    /// Total, including its user's memory.
    pub(crate) needed_bytes: usize,
    /// Bytes that the process already uses and those of [`PROCESS_BYTES`], or [`DRIVER_BYTES`].
    pub(crate) used_bytes: usize,
    /// Bytes available.
    pub(crate) available_bytes: usize,
    /// Bytes of host memory available to a GPU; 0 for a CPU.
    pub(crate) host_available_bytes: usize,
    /// Longest context that fits for this many sequences; 0 if none fits.
    pub(crate) longest_context: usize,
    /// Most sequences of this length that fit; 0 if none fits.
    pub(crate) largest_batch: usize,
}

impl MemoryPlan {
    /// Returns true if the engine fits on its device and, with a GPU, in host memory.
    pub(crate) fn fits(&self) -> bool {
        self.needed_bytes <= self.available_bytes && self.parts.host_bytes <= self.host_available_bytes
    }

    /// Refuses an engine that does not fit on its `device` or in host memory. `ways`: changes with which a short text fits.
    fn check(&self, options: &Options, device: &str, ways: impl FnOnce() -> Vec<&'static str>) -> Result<()> {
        let sequences = match options.slots {
            1 => "a sequence".to_string(),
            slots => format!("{slots} sequences"),
        };
        let what = format!("{sequences} of {} tokens", options.capacity);
        if self.parts.host_bytes > self.host_available_bytes {
            let (needed, available) = (size(self.parts.host_bytes), size(self.host_available_bytes));
            return Err(Error::does_not_fit(
                format!("{what}: {needed} of host memory needed next to {device}, {available} available"),
                "use a smaller context (-c), or free memory of this machine",
            ));
        }
        if self.needed_bytes > self.available_bytes {
            let (needed, available) = (size(self.needed_bytes), size(self.available_bytes));
            let message = format!("{what}: {needed} of {device} memory needed, {available} available");
            return Err(Error::does_not_fit(message, self.remedy(options, ways)));
        }
        Ok(())
    }

    /// The hint for an engine that does not fit on its device.
    fn remedy(&self, options: &Options, ways: impl FnOnce() -> Vec<&'static str>) -> String {
        match (self.longest_context, options.slots) {
            (0, _) => {
                let Memory { weights_bytes: weights, draft_weights_bytes: drafts, .. } = self.parts;
                let rest = self.needed_bytes.saturating_sub(weights).saturating_sub(drafts);
                let of_drafts = if drafts > 0 { format!("drafts {}, ", size(drafts)) } else { String::new() };
                let reason = match weights > self.available_bytes {
                    true => "the weights alone do not fit".to_string(),
                    false => format!(
                        "not even a short text fits: weights take {}, {of_drafts}all else {}",
                        size(weights),
                        size(rest)
                    ),
                };
                let ways: String = ways().iter().map(|way| format!("{way}, ")).collect();
                format!("{reason}; use {ways}a smaller model or a machine with more memory")
            }
            (longest, 1) => {
                format!("the longest context that fits is {longest} tokens; shorten the text or the answer")
            }
            (longest, slots) => format!(
                "each reserves the memory of the longest, and {slots} sequences of {longest} tokens fit; decode the longest alone, or fewer at once"
            ),
        }
    }
}

/// A change of an engine's options that takes less memory.
#[derive(Clone, Copy)]
pub(crate) enum Way {
    OneSequence,
    Kv4,
    Ar,
    Int8,
    Int4,
}

impl Way {
    /// Those of an engine whose method is its user's choice.
    pub(crate) const OF_ENGINE: &'static [Way] = &[Way::OneSequence, Way::Kv4, Way::Ar, Way::Int8, Way::Int4];
    /// Those of an engine for every method.
    pub(crate) const OF_METHODS: &'static [Way] = &[Way::OneSequence, Way::Int8, Way::Int4];

    /// For a hint, after "use".
    fn name(self) -> &'static str {
        match self {
            Way::OneSequence => "fewer sequences at once",
            Way::Kv4 => "--method kv4",
            Way::Ar => "--method ar",
            Way::Int8 => "--weights int8",
            Way::Int4 => "--weights int4",
        }
    }

    /// The engine after the change, as far as its memory for a short text depends on it.
    fn changed<'a>(self, models: Models<'a>, options: &Options) -> (Models<'a>, Options) {
        let (rows, options) = (options.step_rows / options.slots.max(1), options.clone());
        let none = (DraftWeights::None, Sensitive::NONE);
        match self {
            Way::OneSequence => (models, Options { slots: 1, step_rows: rows, ..options }),
            Way::Kv4 => (Models::alone(models.target), Options { draft_weights: none.0, sensitive: none.1, ..options }),
            Way::Ar => {
                let (models, options) = Way::Kv4.changed(models, &options);
                (models, Options { step_rows: options.slots, rejection: false, rejection_gamma: 0, ..options })
            }
            Way::Int8 => (models, Options { weights: TargetWeights::Int8, ..options }),
            Way::Int4 => (models, Options { weights: TargetWeights::Int4, sensitive: none.1, ..options }),
        }
    }
}

/// Bytes for people.
fn size(bytes: usize) -> String {
    match bytes {
        ..1_000_000_000 => format!("{:.1} MB", bytes as f64 / 1e6),
        _ => format!("{:.2} GB", bytes as f64 / 1e9),
    }
}

/// Evaluates an expression on the engine, whatever its device.
macro_rules! on_device {
    ($device:expr, $engine:ident => $work:expr) => {
        match $device {
            $crate::device::Device::Cpu($engine) => $work,
            $crate::device::Device::Cuda($engine) => $work,
        }
    };
}
pub(crate) use on_device;

/// The device of an engine.
pub(crate) enum ChosenDevice {
    Cpu,
    Cuda { gpu: Arc<quantspec_cuda::device::Device>, index: usize, name: String, free_bytes: usize },
}

impl ChosenDevice {
    /// Resolves `auto`, `cpu`, `cuda` or `cuda:i` for a model. `cuda` is the first GPU with kernels. `auto` is the first GPU
    /// whose kernels support the model, or the CPU if none does. A supporting GPU that fails to open is an error: falling
    /// back to the CPU would be far slower.
    pub(crate) fn choose(wanted: &str, checkpoint: &Checkpoint) -> Result<ChosenDevice> {
        match wanted {
            "cpu" => Ok(ChosenDevice::Cpu),
            "auto" => {
                let gpus = quantspec_cuda::detect().devices;
                let mut failed = None;
                for (index, gpu) in gpus.iter().enumerate() {
                    if quantspec_cuda::check(checkpoint, gpu).is_ok() {
                        match ChosenDevice::open(index) {
                            Ok(gpu) => return Ok(gpu),
                            Err(error) => failed = failed.or(Some(error)),
                        }
                    }
                }
                failed.map_or(Ok(ChosenDevice::Cpu), Err)
            }
            "cuda" => {
                let gpus = quantspec_cuda::detect().devices;
                ChosenDevice::open(gpus.iter().position(quantspec_cuda::DeviceInfo::is_usable).unwrap_or(0))
            }
            other => match other.strip_prefix("cuda:").and_then(|index| index.parse().ok()) {
                Some(index) => ChosenDevice::open(index),
                None => Err(Error::usage(format!("device is {other:?}"), "use auto, cpu, cuda or cuda:0")),
            },
        }
    }

    fn open(index: usize) -> Result<ChosenDevice> {
        let gpu = quantspec_cuda::device::Device::open(index)?;
        let (free_bytes, _) = gpu.memory()?;
        let name = gpu.info.name.clone();
        Ok(ChosenDevice::Cuda { gpu, index, name, free_bytes })
    }

    /// The same device, with the memory that is free now.
    ///
    /// # Errors
    /// Device errors of the driver.
    pub(crate) fn now(&self) -> Result<ChosenDevice> {
        Ok(match self {
            ChosenDevice::Cpu => ChosenDevice::Cpu,
            ChosenDevice::Cuda { gpu, index, name, .. } => {
                let (free_bytes, _) = gpu.memory()?;
                ChosenDevice::Cuda { gpu: gpu.clone(), index: *index, name: name.clone(), free_bytes }
            }
        })
    }

    /// The GPU, where it is one.
    pub(crate) fn gpu(&self) -> Option<&Arc<quantspec_cuda::device::Device>> {
        match self {
            ChosenDevice::Cpu => None,
            ChosenDevice::Cuda { gpu, .. } => Some(gpu),
        }
    }

    /// "cpu" or "cuda:i".
    pub(crate) fn name(&self) -> String {
        match self {
            ChosenDevice::Cpu => "cpu".to_string(),
            ChosenDevice::Cuda { index, .. } => format!("cuda:{index}"),
        }
    }

    /// Name of the processor or GPU.
    pub(crate) fn hardware(&self) -> String {
        match self {
            ChosenDevice::Cpu => machine::cpu_name(),
            ChosenDevice::Cuda { name, .. } => name.clone(),
        }
    }

    /// Name of the SIMD path; None on a GPU.
    pub(crate) fn simd(&self) -> Result<Option<&'static str>> {
        match self {
            ChosenDevice::Cpu => Ok(Some(quantspec_cpu::dispatch::choose()?.simd.name())),
            ChosenDevice::Cuda { .. } => Ok(None),
        }
    }

    /// Adjusts options that depend on the device.
    pub(crate) fn adapt(&self, options: &Options) -> Options {
        let block_rows = match self {
            ChosenDevice::Cpu => options.block_rows,
            ChosenDevice::Cuda { .. } => CUDA_BLOCK_ROWS,
        };
        // A block is at most as long as the longest prompt, rounded up to whole pages.
        Options { block_rows: block_rows.min(options.prompt_capacity.next_multiple_of(G)), ..options.clone() }
    }

    fn memory(&self, models: Models, options: &Options) -> Memory {
        let of = |checkpoint: &Checkpoint, options: &Options| match self {
            ChosenDevice::Cpu => quantspec_cpu::plan(checkpoint, options),
            ChosenDevice::Cuda { gpu, .. } => quantspec_cuda::plan(checkpoint, options, &gpu.info),
        };
        let draft =
            models.draft.map(|draft| of(draft, &of_draft(options, models.draft_cache, draft.config())).of_draft());
        of(models.target, options).and(draft.unwrap_or_default())
    }

    /// Memory that an engine needs on this device, and memory available. `other_bytes`: bytes that its user needs on the device.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Model`] for a model that the device does not support, or a draft model with another
    /// vocabulary.
    pub(crate) fn memory_plan(&self, models: Models, options: &Options, other_bytes: usize) -> Result<MemoryPlan> {
        models.check_vocabulary()?;
        for checkpoint in std::iter::once(models.target).chain(models.draft) {
            match self.gpu() {
                Some(gpu) => {
                    quantspec_cuda::check(checkpoint, &gpu.info)?;
                    quantspec_cuda::check_weights(checkpoint, options.weights)?;
                }
                None => quantspec_cpu::check(checkpoint.config())?,
            }
        }
        let config = models.target.config();
        let context = models.draft.map_or(usize::MAX, |draft| draft.config().max_positions).min(config.max_positions);
        let (used, available) = match self {
            ChosenDevice::Cpu => {
                // Otherwise memory freed after reading the prompt would count twice.
                quantspec_cpu::give_back_freed();
                let process = PROCESS_BYTES + options.threads.saturating_sub(2) * THREAD_BYTES;
                (machine::resident().unwrap_or(0) + process, machine::memory_available().unwrap_or(usize::MAX))
            }
            ChosenDevice::Cuda { free_bytes, .. } => (DRIVER_BYTES, free_bytes.saturating_sub(DRIVER_BYTES)),
        };
        let needed = |capacity: usize| {
            // A requested pool grows if it would not hold one sequence.
            let pool_pages = options.pool_pages.max(pages(capacity));
            let options = self.adapt(&Options { capacity, pool_pages, prompt_capacity: capacity, ..options.clone() });
            self.memory(models, &options).device_bytes().saturating_add(other_bytes)
        };
        let rows = options.step_rows / options.slots.max(1);
        let needed_by = |slots: usize| {
            let options = self.adapt(&Options { slots, step_rows: slots * rows, ..options.clone() });
            self.memory(models, &options).device_bytes().saturating_add(other_bytes)
        };
        let parts = self.memory(models, &self.adapt(options));
        let host_available = if self.gpu().is_some() { machine::memory_available().unwrap_or(usize::MAX) } else { 0 };
        Ok(MemoryPlan {
            parts,
            needed_bytes: parts.device_bytes().saturating_add(other_bytes),
            used_bytes: used,
            available_bytes: available,
            host_available_bytes: host_available,
            longest_context: largest_fitting(context, available, needed),
            largest_batch: largest_fitting(STEP_ROWS_MAX / rows.max(1), available, needed_by),
        })
    }

    /// The sensitive matrices of drafts. There are none with weights in one plane. There are none on a GPU either, whose fused
    /// draft GEMMs support 4 bits only: the bytes do not show what it costs to do without them.
    pub(crate) fn sensitive_of(&self, checkpoint: &Checkpoint, options: &Options, drafted: DraftedCache) -> Sensitive {
        if self.gpu().is_some() || options.weights == TargetWeights::Int4 {
            return Sensitive::NONE;
        }
        let tokens = drafted.most_tokens.min(options.capacity);
        sensitive(checkpoint.config(), options.draft_weights, drafted.view, tokens, options.slots)
    }

    /// Resolves `auto`: for the target's weights the checkpoint's if such an engine fits, else int8; for sensitive matrices
    /// those that pay, if the engine fits with them.
    ///
    /// # Errors
    /// As [`ChosenDevice::memory_plan`].
    pub(crate) fn resolve_auto(&self, models: Models, resolved: &mut Resolved) -> Result<()> {
        if resolved.auto_weights {
            let memory = self.memory_plan(models, &resolved.options, 0)?;
            if !memory.fits() && self.takes_int8(models) {
                resolved.options.weights = TargetWeights::Int8;
            }
        }
        if resolved.auto_precision {
            let options = &resolved.options;
            let read = self.sensitive_of(models.target, options, resolved.drafted);
            let with = Options { sensitive: read, ..options.clone() };
            if read != options.sensitive {
                let memory = self.memory_plan(models, &with, 0)?;
                if memory.fits() {
                    resolved.options = with;
                }
            }
        }
        Ok(())
    }

    /// Returns true if int8 weights of these models have kernels.
    fn takes_int8(&self, models: Models) -> bool {
        let int8 = |checkpoint| quantspec_cuda::check_weights(checkpoint, TargetWeights::Int8).is_ok();
        self.gpu().is_none() || std::iter::once(models.target).chain(models.draft).all(int8)
    }

    /// [`ChosenDevice::memory_plan`] of an engine whose `auto` options are resolved. The longest context and the largest batch
    /// are those of the smallest engine that `auto` may choose, because it chooses that one where no other fits.
    ///
    /// # Errors
    /// As [`ChosenDevice::memory_plan`].
    pub(crate) fn resolved_plan(&self, models: Models, resolved: &Resolved) -> Result<MemoryPlan> {
        let mut memory = self.memory_plan(models, &resolved.options, 0)?;
        let mut least = resolved.options.clone();
        if resolved.auto_weights && self.takes_int8(models) {
            least.weights = TargetWeights::Int8;
        }
        if resolved.auto_precision {
            least.sensitive = Sensitive::NONE;
        }
        if least != resolved.options {
            let least = self.memory_plan(models, &least, 0)?;
            memory.longest_context = memory.longest_context.max(least.longest_context);
            memory.largest_batch = memory.largest_batch.max(least.largest_batch);
        }
        Ok(memory)
    }

    /// Bytes on this device, of those that a user of an engine needs in CPU memory.
    pub(crate) fn of_host(&self, bytes: usize) -> usize {
        if self.gpu().is_none() { bytes } else { 0 }
    }

    /// Peak bytes of an engine: of the process (resident now plus the engine and its user), or of the GPU. Refuses a model
    /// that the device does not support, and anything beyond the model's context or the device's memory; then the hint has those
    /// of `ways` that help.
    pub(crate) fn plan(&self, models: Models, options: &Options, other_bytes: usize, ways: &[Way]) -> Result<usize> {
        let memory = self.memory_plan(models, options, other_bytes)?;
        models.check_context(options, memory.longest_context)?;
        let helps = |way: &&Way| {
            let (models, options) = way.changed(models, options);
            self.memory_plan(models, &options, other_bytes).is_ok_and(|memory| memory.longest_context > 0)
        };
        memory.check(options, &self.name(), || ways.iter().filter(helps).map(|way| way.name()).collect())?;
        Ok(memory.used_bytes + memory.needed_bytes)
    }

    /// Bytes that the prompt cache may use next to an engine of `planned_bytes`: an eighth of the memory left to the process,
    /// or half of a GPU's, which other programs seldom share.
    pub(crate) fn bytes_for_prompts(&self, planned_bytes: usize) -> usize {
        match self {
            ChosenDevice::Cpu => {
                let taken = planned_bytes.saturating_sub(machine::resident().unwrap_or(0));
                machine::memory_available().unwrap_or(0).saturating_sub(taken) / 8
            }
            ChosenDevice::Cuda { free_bytes, .. } => free_bytes.saturating_sub(planned_bytes) / 2,
        }
    }

    /// Loads the models and opens an engine. `hooks`: for the model's backend, and for the draft model's.
    pub(crate) fn engine(
        &self,
        models: Models,
        resolved: Resolved,
        hooks: [Hooks; 2],
    ) -> Result<(Device, Option<MakeDrafter>)> {
        let resolved = Resolved { options: self.adapt(&resolved.options), ..resolved };
        Ok(match self {
            ChosenDevice::Cpu => {
                let (engine, make_drafter) = engine(CpuBackend::load, models, resolved, hooks)?;
                (Device::Cpu(engine), make_drafter)
            }
            ChosenDevice::Cuda { gpu, .. } => {
                let load = |checkpoint: &_, options: &_, hooks| CudaBackend::load_on(gpu, checkpoint, options, hooks);
                let (engine, make_drafter) = engine(load, models, resolved, hooks)?;
                (Device::Cuda(engine), make_drafter)
            }
        })
    }

    /// Peak bytes so far: of the process, or of the GPU after it was opened (pools never shrink).
    pub(crate) fn peak_bytes(&self) -> Option<usize> {
        match self {
            ChosenDevice::Cpu => machine::peak_resident(),
            ChosenDevice::Cuda { gpu, free_bytes, .. } => {
                gpu.memory().ok().map(|(free, _)| free_bytes.saturating_sub(free))
            }
        }
    }
}

/// [`ChosenDevice::engine`] on one kind of backend.
fn engine<B: Backend + 'static>(
    load: impl Fn(&Checkpoint, &Options, Hooks) -> Result<B>,
    models: Models,
    resolved: Resolved,
    [hooks, draft_hooks]: [Hooks; 2],
) -> Result<(Box<Engine<B>>, Option<MakeDrafter>)> {
    let Resolved { options, mut method, draft_model, .. } = resolved;
    // The target loads first, so that an out-of-memory error concerns it.
    let backend = load(models.target, &options, hooks)?;
    let network = models
        .draft
        .map(|draft| load(draft, &of_draft(&options, models.draft_cache, draft.config()), draft_hooks))
        .transpose()?;
    let make_drafter = network.map(|network| -> MakeDrafter {
        let model = DraftModel::new(network, View::Both, &[Pages::All], options.capacity, options.block_rows);
        Box::new(move |of| Box::new(model.reading(of.view, &of.pages)))
    });
    method.drafter = drafter(method.drafter, draft_model.as_ref(), make_drafter.as_ref())?;
    let engine = Engine::new(backend, method, options.slots, options.capacity, options.block_rows);
    Ok((Box::new(engine), make_drafter))
}

/// A method's drafter: its own, or one with the draft model if the method may use one.
pub(crate) fn drafter(
    own: Option<Box<dyn Drafter>>,
    draft_model: Option<&WithDraftModel>,
    make_drafter: Option<&MakeDrafter>,
) -> Result<Option<Box<dyn Drafter>>> {
    let Some(of) = draft_model else { return Ok(own) };
    let drafter = of.drafter(make_drafter.map(|make| make(of)));
    drafter.map(Some).ok_or_else(|| {
        Error::usage(format!("method {} has no draft model", of.entry.name), "name one with --draft-model")
    })
}
