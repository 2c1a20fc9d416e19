//! [`CudaBackend`]: the operations of a pass as launches on one stream.
//!
//! A round is one copy to the device (rows, angles, spans and turns of all its steps), one graph of all launches, and one
//! copy back. Positions are known before a round starts, and drafted tokens stay on the device until its end. A step of a
//! watched draft runs alone: a copy, a graph, and the logit margin of its token back.

mod describe;
mod executor;
mod gemm;
mod hidden;
mod kv_cache;
mod network;
mod prompt;
mod prompt_rows;
mod sampler;
mod workspace;
use crate::attend::{Attend, SLICE_ROWS, check_head};
use crate::detect::DeviceInfo;
use crate::device::{Buffer, Device, Graph, Kernel, Launch};
use crate::draft::DraftGemms;
use crate::flags::check_flag;
use crate::hierarchy::Hierarchies;
use crate::linear::{Form, Linear, Matrix, name};
use crate::masses::PageMasses;
use crate::prefill::{self, Path, Prefill, Shape, activate_mul};
use crate::recorded::Recorded;
use crate::sample::{self, Sampling};
use crate::weights::{self, Embedding, Expanded, Full, Weights as Stored};
use describe::StepLayout;
use executor::Clock;
pub(crate) use gemm::NORM_THREADS;
use hidden::HiddenStates;
pub(crate) use kv_cache::page_shared;
use kv_cache::{Cache, Lists, Slot, table_bytes};
use quantspec_core::Result;
use quantspec_core::config::{Dtype, ModelConfig};
use quantspec_core::plan::{CacheBytes, pages};
use quantspec_model::backend::{Backend, Hooks, Memory, Options};
use quantspec_model::checkpoint::Checkpoint;
use quantspec_model::rope::RopeTable;
use std::sync::Arc;
pub use workspace::Limits;
use workspace::{PromptSpace, Sizes, StepSpace, prompt_bytes, tokens_own, window_pitch};

/// Kernels that write a GEMM's input, by its form.
#[derive(Debug)]
struct Producers {
    plain: Kernel,
    int8: Kernel,
    limbs: Kernel,
}

impl Producers {
    /// `stem_*`; plain inputs are of type `dtype`.
    fn new(device: &Device, stem: &str, dtype: Dtype) -> Result<Producers> {
        let of = |form: Form| device.kernel(&format!("{stem}_{}", form.name()), 0);
        Ok(Producers { plain: of(Form::Plain(dtype))?, int8: of(Form::Int8)?, limbs: of(Form::Limbs)? })
    }

    fn of(&self, form: Form) -> Kernel {
        match form {
            Form::Plain(_) => self.plain,
            Form::Int8 => self.int8,
            Form::Limbs => self.limbs,
        }
    }
}

/// Kernels that the backend launches itself.
#[derive(Debug)]
struct Kernels {
    embed: Kernel,
    /// For plain inputs of the weights' type, and of the type of the head's input.
    norm: [Producers; 2],
    /// Normalises f32 rows: a branch, or queries and keys.
    norm_rows: Kernel,
    /// Converts the hidden stream to a GEMM's input without a norm.
    convert: Producers,
    /// Adds a GEMM's result to the hidden stream before a fused kernel.
    add_rows: Kernel,
    /// Rounds inputs of 4-bit draft weights to the 4-bit grid: int8 codes, and limbs for nibbles.
    coarse_i8: Kernel,
    coarse_limbs: Kernel,
    /// activation(gate) · up.
    activate: Producers,
    append: Kernel,
    /// Multiplies queries by the factor of their position (Ministral 3).
    scale_queries: Kernel,
    flush: Kernel,
    store: Kernel,
    keep_recent: Kernel,
}

impl Kernels {
    /// The kernels for a model whose head takes inputs of type `head`.
    fn new(device: &Arc<Device>, config: &ModelConfig, weights: &Stored, head: Dtype) -> Result<Kernels> {
        let (d, dtype, page_shared) = (config.head_dim, config.dtype, page_shared(config.head_dim));
        Ok(Kernels {
            embed: match (&weights.embedding, &weights.head) {
                (Some(Embedding { dtype, .. }), _) | (None, Full::Whole(Matrix { dtype, .. })) => {
                    device.kernel(&format!("embed_{}", name(*dtype)), 0)?
                }
                (None, Full::Nibbles(_)) => device.kernel("embed_planes", 0)?,
            },
            norm: [Producers::new(device, "norm", dtype)?, Producers::new(device, "norm", head)?],
            norm_rows: device.kernel("norm_rows", 0)?,
            convert: Producers::new(device, "convert", dtype)?,
            add_rows: device.kernel("add_rows", 0)?,
            coarse_i8: device.kernel("coarse_i8", 0)?,
            coarse_limbs: device.kernel("coarse_limbs", 0)?,
            activate: Producers::new(device, activate_mul(config.activation), dtype)?,
            append: device.kernel(&format!("append_{d}"), 0)?,
            scale_queries: device.kernel("scale_queries", 0)?,
            flush: device.kernel(&format!("flush_{d}"), page_shared)?,
            store: device.kernel(&format!("store_{d}"), page_shared)?,
            keep_recent: device.kernel("keep_recent", 0)?,
        })
    }
}

/// A model on one GPU.
pub struct CudaBackend {
    config: ModelConfig,
    options: Options,
    hooks: Hooks,
    rope: RopeTable,
    /// Angles of local layers; `None` if the model has none.
    local_rope: Option<RopeTable>,
    device: Arc<Device>,
    kernels: Kernels,
    linear: Linear,
    /// GEMMs of draft steps with the operations between them fused in.
    draft: Option<DraftGemms>,
    /// GEMMs with weights in nibbles, and one layer of them in 16 bits for prompts.
    nibbles: Option<(Hierarchies, Expanded)>,
    attend: Attend,
    prefill: Prefill,
    weights: Stored,
    cache: Cache,
    slots: Vec<Option<Slot>>,
    sampling: Sampling,
    step: StepSpace,
    prompt: PromptSpace,
    /// Lists of chosen pages, and the scores for choosing them.
    lists: Lists,
    masses: Option<PageMasses>,
    /// Graphs of rounds, and of single steps of watched drafts.
    recorded: Recorded<Graph>,
    /// Layout of the current step.
    layout: StepLayout,
    /// Logits of the last verification before penalties and masks, if the caller reads them. On the device, penalties and masks
    /// have overwritten them.
    unpenalised: Vec<Vec<f32>>,
    /// Layouts of described steps that are not queued yet; `None` outside of a round.
    described: Option<std::vec::IntoIter<StepLayout>>,
    /// Set while `reduce_residual` must still add the projection in y: the address of its bias, 0 without one.
    unreduced: Option<u64>,
    /// Set while the next norm must add the projection in y to the hidden states: the same address.
    residual: Option<u64>,
    /// Staging buffers whose copies are queued.
    staged: usize,
    /// A prompt is unfinished, and its error flags are unread.
    prompting: bool,
    /// A prompt has overwritten the draft weights, or the head.
    overwritten: bool,
    clock: Clock,
}

/// Checks that kernels support a model on such a device, before anything is loaded.
///
/// # Errors
/// [`quantspec_core::ErrorKind::Model`]: head widths, sizes, vocabularies and mixtures of number formats without kernels.
pub fn check(checkpoint: &Checkpoint, device: &DeviceInfo) -> Result<()> {
    let config = checkpoint.config();
    check_head(device, config.head_dim)?;
    prefill::check(&Shape::of(config))?;
    sample::check(config.vocab)?;
    weights::check(checkpoint)
}

/// Bytes [`CudaBackend::load`] will hold on this device and in host memory, before anything is loaded.
pub fn plan(checkpoint: &Checkpoint, options: &Options, device: &DeviceInfo) -> Memory {
    plan_with(checkpoint, options, device, Limits::default())
}

/// As [`plan`], of [`CudaBackend::load_with`].
pub fn plan_with(checkpoint: &Checkpoint, options: &Options, device: &DeviceInfo, limits: Limits) -> Memory {
    let config = checkpoint.config();
    let (sms, architecture) = (device.sms, device.architecture);
    let cache = CacheBytes::of_pool(config, options.planes, options.pages(), options.slots);
    let partial = crate::attend::partial_rows(config, sms, architecture, options.step_rows.clamp(1, SLICE_ROWS));
    let sizes = Sizes::new(config, options, partial);
    let path = Path::of(architecture, config.dtype);
    let own = tokens_own(config, options, limits);
    let [hidden, hidden_in_host] = HiddenStates::bytes(config, options, limits);
    Memory {
        weights_bytes: weights::bytes(checkpoint, options.weights),
        draft_weights_bytes: weights::draft_bytes(config, options) + weights::importance_bytes(config, options),
        cache_upper_bytes: cache.upper_bytes,
        cache_lower_bytes: cache.lower_bytes,
        cache_full_bytes: cache.full_bytes,
        buffer_bytes: cache.buffer_bytes,
        workspace_bytes: table_bytes(options)
            + sizes.step_bytes(config, weights::head_inputs(checkpoint, options))
            + hidden
            + prompt_bytes(config, options, own).iter().sum::<usize>()
            + Lists::bytes(config, options.slots, pages(options.capacity)).iter().sum::<usize>()
            + PageMasses::bytes(config, options).iter().sum::<usize>()
            + Sampling::bytes(
                config.vocab,
                options.slots,
                options.step_rows.max(1),
                window_pitch(options),
                options.capacity,
                options.rejection,
            )
            + Prefill::scratch_bytes(&Shape::of(config), options.block_rows.max(1), path)
            + if weights::nibbles(options) { Expanded::bytes(config) } else { 0 },
        host_bytes: hidden_in_host + weights::host_bytes(checkpoint, options, own < options.prompt_capacity),
    }
}

impl CudaBackend {
    /// Loads a checkpoint onto device `index`.
    ///
    /// # Errors
    /// Those of [`Device::open`] (no driver: device, no such device: usage), of [`CudaBackend::load_on`] and of [`check`].
    pub fn load(checkpoint: &Checkpoint, options: &Options, hooks: Hooks, index: usize) -> Result<CudaBackend> {
        CudaBackend::load_on(&Device::open(index)?, checkpoint, options, hooks)
    }

    /// Loads a checkpoint onto an open device.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Model`] if [`check`] refuses the checkpoint, [`quantspec_core::ErrorKind::NotFinite`] for
    /// weights that are NaN, infinite or too large for draft weights, [`quantspec_core::ErrorKind::DoesNotFit`] if the GPU is
    /// out of memory. Other device errors, and those of the checkpoint and of `hooks.poll`.
    pub fn load_on(
        device: &Arc<Device>,
        checkpoint: &Checkpoint,
        options: &Options,
        hooks: Hooks,
    ) -> Result<CudaBackend> {
        CudaBackend::load_with(device, checkpoint, options, hooks, Limits::default())
    }

    /// As [`CudaBackend::load_on`], with other limits of what prompts keep on the device.
    ///
    /// # Errors
    /// As [`CudaBackend::load_on`].
    pub fn load_with(
        device: &Arc<Device>,
        checkpoint: &Checkpoint,
        options: &Options,
        mut hooks: Hooks,
        limits: Limits,
    ) -> Result<CudaBackend> {
        check(checkpoint, &device.info)?;
        weights::check_weights(checkpoint, options.weights)?;
        let config = checkpoint.config().clone();
        let attend = Attend::new(device, &config, options.rounding)?;
        let linear = Linear::new(device)?;
        let draft = DraftGemms::new(device, config.head_dim)?;
        let prefill = Prefill::new(device, Shape::of(&config), options.block_rows.max(1))?;
        let pitch = window_pitch(options);
        let sampling = Sampling::new(
            device,
            config.vocab,
            options.slots,
            options.step_rows.max(1),
            pitch,
            options.capacity,
            options.rejection,
        )?;
        let hierarchies = if weights::nibbles(options) { Some(Hierarchies::new(device, config.dtype)?) } else { None };
        let mut weights =
            weights::load(checkpoint, device, &linear, hierarchies.as_ref(), options, sampling.shared(), &mut hooks)?;
        if tokens_own(&config, options, limits) < options.prompt_capacity {
            weights.keep_head(device)?;
        }
        let with_room = |hierarchies| Ok((hierarchies, Expanded::new(device, &config)?));
        let nibbles = hierarchies.map(with_room).transpose()?;
        let head = weights::head_inputs(checkpoint, options);
        let kernels = Kernels::new(device, &config, &weights, head)?;
        let partial = attend.partial_rows(options.step_rows.clamp(1, SLICE_ROWS));
        let sizes = Sizes::new(&config, options, partial);
        let mut backend = CudaBackend {
            clock: Clock { start: device.mark()?, drafted: device.mark()?, judged: device.mark()?, ran: false },
            described: None,
            unreduced: None,
            residual: None,
            prompting: false,
            overwritten: false,
            cache: Cache::new(device, &config, options)?,
            slots: (0..options.slots).map(|_| None).collect(),
            sampling,
            rope: RopeTable::new(&config),
            local_rope: RopeTable::local(&config),
            options: options.clone(),
            device: device.clone(),
            kernels,
            linear,
            draft,
            nibbles,
            attend,
            prefill,
            weights,
            step: StepSpace::new(device, &config, &sizes, head)?,
            prompt: PromptSpace::new(device, &config, options, limits)?,
            lists: Lists::new(device, &config, options.slots, pages(options.capacity))?,
            masses: PageMasses::new(device, &config, options)?,
            recorded: Recorded::new(),
            layout: StepLayout::default(),
            unpenalised: Vec::new(),
            staged: 0,
            config,
            hooks,
        };
        backend.write_unrotated()?;
        check_flag(backend.sampling.read()?)?;
        Ok(backend)
    }

    /// The device that holds the model.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Number of kinds of rounds with a recorded graph.
    pub fn recorded(&self) -> usize {
        self.recorded.graphs()
    }

    fn launch(
        &self,
        kernel: Kernel,
        grid: [usize; 3],
        block: u32,
        shared: usize,
        arguments: &[crate::device::Arg],
    ) -> Result<()> {
        let launch = Launch { grid: grid.map(|n| n as u32), block, shared: shared as u32, overlap: true };
        // SAFETY: every caller below passes the kernel's own argument list (kernels/elementwise.cu, quantize_pages.cu) with
        // buffers of this backend. They outlive the stream's work and have room for `step_rows` rows, `prompt_capacity` tokens or
        // `block_rows` rows.
        unsafe { self.device.launch(kernel, launch, arguments) }
    }
}

impl Backend for CudaBackend {
    fn memory(&self) -> Memory {
        let step = &self.step;
        let inputs = [&step.normed, &step.attended, &step.gated, &step.last];
        let inputs: usize = inputs.iter().map(|input| input.x.bytes() + input.x8.bytes() + input.xs.bytes()).sum();
        let step_bytes = [
            &step.hidden,
            &step.y,
            &step.q,
            &step.logits,
            &step.partial,
            &step.extremes,
            &step.description,
            &self.prompt.scratch,
            &self.prompt.cos_sin,
            &self.prompt.tokens,
            &self.prompt.normed,
            &self.prompt.q,
            &self.prompt.attended,
            &self.prompt.gated,
            &self.cache.tables,
        ];
        let pool = |pool: &Option<Buffer>| pool.as_ref().map_or(0, Buffer::bytes);
        let [hidden, hidden_in_host] = self.prompt.hidden.held_bytes();
        Memory {
            weights_bytes: self.weights.held_bytes(),
            draft_weights_bytes: self.weights.held_draft_bytes(),
            cache_upper_bytes: pool(&self.cache.upper),
            cache_lower_bytes: pool(&self.cache.lower),
            cache_full_bytes: pool(&self.cache.full),
            buffer_bytes: self.cache.ring_k.bytes() + self.cache.ring_v.bytes(),
            workspace_bytes: inputs
                + hidden
                + step_bytes.iter().map(|buffer| buffer.bytes()).sum::<usize>()
                + self.lists.lists.bytes()
                + self.lists.scores.bytes()
                + self.masses.as_ref().map_or(0, PageMasses::held_bytes)
                + self.sampling.held_bytes()
                + self.prefill.held_bytes()
                + self.nibbles.as_ref().map_or(0, |(_, expanded)| expanded.held_bytes()),
            host_bytes: hidden_in_host + self.weights.held_host_bytes(),
        }
    }

    fn draft_read_bytes(&self) -> usize {
        self.weights.draft_read_bytes()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use quantspec_core::config::{Planes, TargetWeights, View};

    /// The widths of Llama-3.1-8B.
    const EIGHT_BILLION: &str = r#"{
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0, "max_position_embeddings": 131072, "tie_word_embeddings": false, "torch_dtype": "bfloat16"
    }"#;

    #[test]
    fn eight_billion_weights_and_a_full_context_fit_18_gb() {
        let folder = std::env::temp_dir().join(format!("quantspec-plan-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("config.json"), EIGHT_BILLION).unwrap();
        let checkpoint = Checkpoint::describe(&folder).unwrap();
        std::fs::remove_dir_all(folder).unwrap();
        let device = DeviceInfo {
            name: "a GPU".to_owned(),
            compute_capability: "9.0".to_owned(),
            memory_bytes: 80 << 30,
            driver: String::new(),
            capability: 90,
            architecture: 90,
            sms: 132,
        };
        let options = Options {
            planes: Planes::of(&[View::Both]),
            weights: TargetWeights::Int8,
            page_masses: true,
            block_rows: 4096,
            ..Options::new(1, 131_072)
        };
        let memory = plan(&checkpoint, &options, &device);
        let Memory { weights_bytes, draft_weights_bytes, workspace_bytes, buffer_bytes, .. } = memory;
        let pages = memory.cache_upper_bytes + memory.cache_lower_bytes + memory.cache_full_bytes;
        let bytes = weights_bytes + draft_weights_bytes + pages + buffer_bytes + workspace_bytes;
        assert!(bytes <= 18_000_000_000, "{memory:?}");
        // The embedding, hidden states, and the head's planes.
        let head = 128_256 * 4096;
        assert_eq!(memory.host_bytes, 2 * head + 131_072 * 4096 * 4 + head / 16 * 17);
        // Several sequences decode between the chunks of a prompt, so its keys and values have memory of their own.
        let several = plan(&checkpoint, &Options { slots: 2, pool_pages: 1024, ..options.clone() }, &device);
        assert_eq!(several.host_bytes, memory.host_bytes - head / 16 * 17);
        assert!(several.workspace_bytes > workspace_bytes + 114_688 * 4096);
        // A short context keeps everything on the device.
        let short = plan(&checkpoint, &Options { capacity: 8192, prompt_capacity: 8192, ..options }, &device);
        assert_eq!(short.host_bytes, 2 * head);
    }
}
