//! Where an engine runs: choosing the device, planning its memory, loading the model onto it.

use crate::machine;
use crate::options::{Resolved, STEP_ROWS_MAX, Second, of_draft};
use quantspec_core::cache::G;
use quantspec_core::config::{Pages, Sensitive, TargetWeights, View};
use quantspec_core::plan::{largest_fitting, pages, sensitive};
use quantspec_core::{Error, Result};
use quantspec_cpu::CpuBackend;
use quantspec_cuda::CudaBackend;
use quantspec_model::backend::{Backend, Hooks, Memory, Options};
use quantspec_model::checkpoint::Checkpoint;
use quantspec_model::draft::{DraftModel, Drafter};
use quantspec_model::engine::Engine;
use std::sync::Arc;

/// Rows of a prefill block on a GPU: its products reach their full rate from about 4,000 rows on.
const CUDA_BLOCK_ROWS: usize = 4096;

/// What the process grows by beside what an engine holds: stacks of workers, the allocator's own, pages of code. 1.2 to 1.9 MB for the
/// demo model and prompts of 35 to 4,000 tokens.
const PROCESS_BYTES: usize = 3 << 19;

/// An engine on whichever device was chosen.
pub(crate) enum Device {
    Cpu(Box<Engine<CpuBackend>>),
    Cuda(Box<Engine<CudaBackend>>),
}

/// Drafts with a second network that is loaded, in any method.
pub(crate) type Drafts = Box<dyn Fn(&Second) -> Box<dyn Drafter> + Send + Sync>;

/// The checkpoints of an engine.
#[derive(Clone, Copy)]
pub(crate) struct Models<'a> {
    pub(crate) target: &'a Checkpoint,
    /// One that drafts.
    pub(crate) draft: Option<&'a Checkpoint>,
}

impl<'a> Models<'a> {
    /// A model that drafts for itself, if anything does.
    pub(crate) fn alone(target: &'a Checkpoint) -> Models<'a> {
        Models { target, draft: None }
    }

    /// Refuses a draft model of another vocabulary, or with less context than is asked for.
    fn check(&self, options: &Options) -> Result<()> {
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
        if options.capacity > draft.max_positions {
            return Err(Error::does_not_fit(
                format!(
                    "{} tokens exceed the draft model's context of {}; the model's is {}",
                    options.capacity, draft.max_positions, target.max_positions
                ),
                format!(
                    "shorten the prompt or lower -n so that both stay within {} tokens, or use a draft model with a longer context",
                    draft.max_positions
                ),
            ));
        }
        Ok(())
    }
}

/// What an engine would hold, in bytes.
pub(crate) struct Weighed {
    /// By purpose.
    pub(crate) parts: Memory,
    /// All of it, with what its user takes beside it.
    pub(crate) needed_bytes: usize,
    /// What the process holds already; 0 for a GPU.
    pub(crate) used_bytes: usize,
    /// What is there to be taken.
    pub(crate) available_bytes: usize,
    /// Tokens of the longest sequences, as many at once, that fit; 0 where none does.
    pub(crate) longest_context: usize,
    /// Most sequences of as many tokens that fit at once; 0 where none does.
    pub(crate) largest_batch: usize,
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

/// The device an engine will run on.
pub(crate) enum Place {
    Cpu,
    Cuda { gpu: Arc<quantspec_cuda::device::Device>, index: usize, name: String, free_bytes: usize },
}

impl Place {
    /// Resolves `auto`, `cpu`, `cuda` or `cuda:i` for a model. `cuda` is the first GPU that there are kernels for. `auto` takes the first whose kernels
    /// know the model and that opens, and the CPU where none knows it: one that knows it and fails is an error, for the CPU would be far slower.
    pub(crate) fn choose(wanted: &str, checkpoint: &Checkpoint) -> Result<Place> {
        match wanted {
            "cpu" => Ok(Place::Cpu),
            "auto" => {
                let gpus = quantspec_cuda::detect().devices;
                let mut failed = None;
                for (index, gpu) in gpus.iter().enumerate() {
                    if quantspec_cuda::check(checkpoint, gpu).is_ok() {
                        match Place::open(index) {
                            Ok(place) => return Ok(place),
                            Err(error) => failed = failed.or(Some(error)),
                        }
                    }
                }
                failed.map_or(Ok(Place::Cpu), Err)
            }
            "cuda" => {
                let gpus = quantspec_cuda::detect().devices;
                Place::open(gpus.iter().position(quantspec_cuda::DeviceInfo::is_usable).unwrap_or(0))
            }
            other => match other.strip_prefix("cuda:").and_then(|index| index.parse().ok()) {
                Some(index) => Place::open(index),
                None => Err(Error::usage(format!("device is {other:?}"), "use auto, cpu, cuda or cuda:0")),
            },
        }
    }

    fn open(index: usize) -> Result<Place> {
        let gpu = quantspec_cuda::device::Device::open(index)?;
        let (free_bytes, _) = gpu.memory()?;
        let name = gpu.info.name.clone();
        Ok(Place::Cuda { gpu, index, name, free_bytes })
    }

    /// The GPU, where it is one.
    pub(crate) fn gpu(&self) -> Option<&Arc<quantspec_cuda::device::Device>> {
        match self {
            Place::Cpu => None,
            Place::Cuda { gpu, .. } => Some(gpu),
        }
    }

    /// "cpu" or "cuda:i".
    pub(crate) fn name(&self) -> String {
        match self {
            Place::Cpu => "cpu".to_string(),
            Place::Cuda { index, .. } => format!("cuda:{index}"),
        }
    }

    /// The processor's or the GPU's own name.
    pub(crate) fn hardware(&self) -> String {
        match self {
            Place::Cpu => machine::cpu_name(),
            Place::Cuda { name, .. } => name.clone(),
        }
    }

    /// Adapts options that depend on the device.
    pub(crate) fn adapt(&self, options: &Options) -> Options {
        let block_rows = match self {
            Place::Cpu => options.block_rows,
            Place::Cuda { .. } => CUDA_BLOCK_ROWS,
        };
        // No block is longer than the longest prompt, rounded up to whole pages.
        Options { block_rows: block_rows.min(options.prompt_capacity.next_multiple_of(G)), ..options.clone() }
    }

    fn memory(&self, models: Models, options: &Options) -> Memory {
        let of = |checkpoint: &Checkpoint, options: &Options| match self {
            Place::Cpu => quantspec_cpu::plan(checkpoint, options),
            Place::Cuda { gpu, .. } => quantspec_cuda::plan(checkpoint, options, &gpu.info),
        };
        let draft = models.draft.map(|draft| of(draft, &of_draft(options)).of_draft());
        of(models.target, options).and(draft.unwrap_or_default())
    }

    /// What an engine would hold on this device, and what there is. `beside` are bytes that its user takes of a CPU's memory.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Model`] for a model that the device does not know, and for a draft model of another vocabulary.
    pub(crate) fn weigh(&self, models: Models, options: &Options, beside: usize) -> Result<Weighed> {
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
            Place::Cpu => {
                // What reading the prompt has freed must not count twice.
                quantspec_cpu::give_back_freed();
                (machine::resident().unwrap_or(0) + PROCESS_BYTES, machine::memory_available().unwrap_or(usize::MAX))
            }
            Place::Cuda { free_bytes, .. } => (0, *free_bytes),
        };
        // What is beside a GPU is the process's.
        let beside = if self.gpu().is_none() { beside } else { 0 };
        let needed = |capacity: usize| {
            // A pool that was asked for grows where it would not hold one sequence.
            let pool_pages = options.pool_pages.max(pages(capacity));
            let options = self.adapt(&Options { capacity, pool_pages, prompt_capacity: capacity, ..options.clone() });
            total(&self.memory(models, &options)).saturating_add(beside)
        };
        let rows = options.step_rows / options.slots.max(1);
        let needed_by = |slots: usize| {
            let options = self.adapt(&Options { slots, step_rows: slots * rows, ..options.clone() });
            total(&self.memory(models, &options)).saturating_add(beside)
        };
        let parts = self.memory(models, &self.adapt(options));
        Ok(Weighed {
            parts,
            needed_bytes: total(&parts).saturating_add(beside),
            used_bytes: used,
            available_bytes: available,
            longest_context: largest_fitting(context, available, needed),
            largest_batch: largest_fitting(STEP_ROWS_MAX / rows.max(1), available, needed_by),
        })
    }

    /// Settles what `auto` is: of the target's weights the checkpoint's where an engine with them fits, else int8; of the sensitive matrices those that
    /// pay beside the cache that a draft reads, unless the engine would not fit with them.
    ///
    /// # Errors
    /// As [`Place::weigh`].
    pub(crate) fn settle(&self, models: Models, resolved: &mut Resolved) -> Result<()> {
        if resolved.auto_weights {
            let weighed = self.weigh(models, &resolved.options, 0)?;
            let int8 = |checkpoint| quantspec_cuda::check_weights(checkpoint, TargetWeights::Int8).is_ok();
            let taken = self.gpu().is_none() || std::iter::once(models.target).chain(models.draft).all(int8);
            if weighed.needed_bytes > weighed.available_bytes && taken {
                resolved.options.weights = TargetWeights::Int8;
            }
        }
        if resolved.auto_precision {
            let options = &resolved.options;
            let read = sensitive_of(models.target, options, resolved.drafted);
            let with = Options { sensitive: read, ..options.clone() };
            if read != options.sensitive {
                let weighed = self.weigh(models, &with, 0)?;
                if weighed.needed_bytes <= weighed.available_bytes {
                    resolved.options = with;
                }
            }
        }
        Ok(())
    }

    /// Bytes at the peak of an engine: of the process (resident now plus what the engine will hold, and what its user takes beside it), or of
    /// the GPU. Refuses a model that the device does not know, and what does not fit in the model's context or the device's memory.
    pub(crate) fn plan(&self, models: Models, options: &Options, beside: usize) -> Result<usize> {
        models.check(options)?;
        let config = models.target.config();
        let Weighed {
            needed_bytes: bytes, used_bytes: used, available_bytes: available, longest_context: longest, ..
        } = self.weigh(models, options, beside)?;
        if options.capacity > config.max_positions {
            return Err(Error::does_not_fit(
                format!("{} tokens exceed the model's context of {}", options.capacity, config.max_positions),
                format!("shorten the prompt or lower -n so that both stay within {} tokens", longest.max(1)),
            ));
        }
        if bytes > available {
            let size = |bytes: usize| match bytes {
                ..1_000_000_000 => format!("{:.1} MB", bytes as f64 / 1e6),
                _ => format!("{:.2} GB", bytes as f64 / 1e9),
            };
            let sequences = match options.slots {
                1 => "a sequence".to_string(),
                slots => format!("{slots} sequences"),
            };
            return Err(Error::does_not_fit(
                format!(
                    "{sequences} of {} tokens: {} of {} memory needed, {} available",
                    options.capacity,
                    size(bytes),
                    self.name(),
                    size(available)
                ),
                if longest > 0 && options.slots > 1 {
                    format!(
                        "each has the room of the longest, and {} of {longest} tokens fit; decode the longest apart, or fewer at once",
                        options.slots
                    )
                } else if longest > 0 {
                    format!("the longest context that fits is {longest} tokens; lower -n or shorten the prompt")
                } else if options.slots > 1 {
                    "not even short sequences fit; decode fewer at once, or use a smaller model".to_string()
                } else {
                    "the weights alone do not fit; use a smaller model or a machine with more memory".to_string()
                },
            ));
        }
        Ok(used + bytes)
    }

    /// Bytes of the process's memory that would be left beside an engine of `planned_bytes`.
    pub(crate) fn spare_bytes(&self, planned_bytes: usize) -> usize {
        let taken = match self {
            Place::Cpu => planned_bytes.saturating_sub(machine::resident().unwrap_or(0)),
            Place::Cuda { .. } => 0,
        };
        machine::memory_available().unwrap_or(0).saturating_sub(taken)
    }

    /// Loads the models and opens an engine. `hooks` are of the model's backend, and of the draft model's.
    pub(crate) fn engine(
        &self,
        models: Models,
        resolved: Resolved,
        hooks: [Hooks; 2],
    ) -> Result<(Device, Option<Drafts>)> {
        let options = self.adapt(&resolved.options);
        let (slots, capacity, rows) = (options.slots, options.capacity, options.block_rows);
        let [hooks, of_second] = hooks;
        let mut method = resolved.method;
        let draft = models.draft.map(|draft| (draft, of_draft(&options)));
        // The target first: what it lacks memory for is said of it.
        Ok(match self {
            Place::Cpu => {
                let backend = CpuBackend::load(models.target, &options, hooks)?;
                let second = draft.map(|(draft, options)| CpuBackend::load(draft, &options, of_second)).transpose()?;
                let drafts = second.map(|second| drafts(second, capacity, rows));
                method.drafter = drafter(method.drafter, resolved.second.as_ref(), drafts.as_ref())?;
                let mut engine = Engine::new(backend, method, slots, capacity, rows);
                engine.share_pages(options.pages());
                (Device::Cpu(Box::new(engine)), drafts)
            }
            Place::Cuda { gpu, .. } => {
                let backend = CudaBackend::load_on(gpu, models.target, &options, hooks)?;
                let second =
                    draft.map(|(draft, options)| CudaBackend::load_on(gpu, draft, &options, of_second)).transpose()?;
                let drafts = second.map(|second| drafts(second, capacity, rows));
                method.drafter = drafter(method.drafter, resolved.second.as_ref(), drafts.as_ref())?;
                let mut engine = Engine::new(backend, method, slots, capacity, rows);
                engine.share_pages(options.pages());
                (Device::Cuda(Box::new(engine)), drafts)
            }
        })
    }

    /// Largest number of bytes taken so far: of the process, or of the GPU since it was opened (pools never shrink).
    pub(crate) fn peak_bytes(&self) -> Option<usize> {
        match self {
            Place::Cpu => machine::peak_resident(),
            Place::Cuda { gpu, free_bytes, .. } => gpu.memory().ok().map(|(free, _)| free_bytes.saturating_sub(free)),
        }
    }
}

/// The sensitive matrices of drafts that read a view of so many tokens; none where the draft reads one plane.
pub(crate) fn sensitive_of(checkpoint: &Checkpoint, options: &Options, (view, tokens): (View, usize)) -> Sensitive {
    match options.weights {
        TargetWeights::Int4 => Sensitive::NONE,
        _ => sensitive(checkpoint.config(), options.draft_weights, view, tokens.min(options.capacity), options.slots),
    }
}

fn drafts<B: Backend + 'static>(second: B, capacity: usize, block_rows: usize) -> Drafts {
    let model = DraftModel::new(second, View::Both, &[Pages::All], capacity, block_rows);
    Box::new(move |second| second.entry.with(Box::new(model.reading(second.view, &second.pages))))
}

/// A method's drafter: its own, or one of the second network.
pub(crate) fn drafter(
    own: Option<Box<dyn Drafter>>,
    second: Option<&Second>,
    drafts: Option<&Drafts>,
) -> Result<Option<Box<dyn Drafter>>> {
    match (second, drafts) {
        (None, _) => Ok(own),
        (Some(second), Some(drafts)) => Ok(Some(drafts(second))),
        (Some(second), None) => {
            Err(Error::usage(format!("method {} has no draft model", second.entry.name), "name one with --draft-model"))
        }
    }
}

/// Sum of all parts. Saturating: what a plan is of is bounded (options.rs), so each part is right, and their sum must not wrap around to one that fits.
fn total(memory: &Memory) -> usize {
    [
        memory.weights_bytes,
        memory.draft_weights_bytes,
        memory.cache_upper_bytes,
        memory.cache_lower_bytes,
        memory.cache_full_bytes,
        memory.buffer_bytes,
        memory.workspace_bytes,
    ]
    .into_iter()
    .fold(0, usize::saturating_add)
}
