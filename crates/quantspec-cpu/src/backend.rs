//! The CPU [`Backend`].

mod activations;
mod attend_step;
mod attend_tokens;
mod kv_cache;
mod network;
mod prompt_rows;
use crate::attend::{ITEM_ROWS, Shape, State};
use crate::cache::{Cache, CacheSizes};
use crate::dispatch::{self, ChosenPath};
use crate::pool::Pool;
use crate::prompt::Prompt;
use crate::quantize;
use crate::weights::{self, Model};
use activations::{Lengths, Rows};
use quantspec_core::attend::SnapScores;
use quantspec_core::config::ModelConfig;
use quantspec_core::{Error, Result};
use quantspec_model::backend::{Backend, Executor, Hooks, HostSampler, Memory, Options, SamplesOnHost};
use quantspec_model::checkpoint::Checkpoint;
use quantspec_model::rope::RopeTable;

/// Runs a model on CPU cores.
pub struct CpuBackend {
    config: ModelConfig,
    options: Options,
    choice: ChosenPath,
    pool: Pool,
    hooks: Hooks,
    model: Model,
    rope: RopeTable,
    /// The table of local layers; `None` if the model has none.
    local_rope: Option<RopeTable>,
    cache: Cache,
    /// Capacity of each open slot.
    open: Vec<Option<usize>>,
    /// Pages chosen for each slot, layer and KV head, and the number visible at the choice.
    chosen: Vec<(Vec<u32>, usize)>,
    /// Scores of pages chosen by the attention of a prompt's end, likewise.
    snap_scores: Vec<SnapScores>,
    prompt: Prompt,
    rows: Rows,
    states: Vec<State>,
    flushes: Vec<quantize::Scratch>,
    sampler: HostSampler,
}

/// Bytes that [`HostSampler`] takes in a round: the row that penalties or a grammar change; by rejection also q of all drafted
/// tokens and, for the sequence being judged, p, a copy of q (if a row fails) and two rows of weights.
fn sampling_bytes(config: &ModelConfig, options: &Options) -> usize {
    let (gamma, kept) = (options.rejection_gamma, if options.rejection { options.slots } else { 0 });
    let by_rejection = if gamma > 0 { gamma * (kept + 2) + 2 } else { 0 };
    4 * config.vocab * (1 + by_rejection)
}

/// Query rows of one work item of attention.
fn state_rows(config: &ModelConfig, options: &Options) -> usize {
    ITEM_ROWS.min(options.step_rows.max(1)) * config.group()
}

/// Checks that the kernels support a model, before anything is loaded.
///
/// # Errors
/// [`quantspec_core::ErrorKind::Model`] for a head_dim without a page layout.
pub fn check(config: &ModelConfig) -> Result<()> {
    if !config.head_dim.is_multiple_of(8) || config.head_dim > 256 {
        return Err(Error::model(
            format!("head_dim {} has no kernels on the CPU", config.head_dim),
            "use a model whose head_dim is a multiple of 8 up to 256",
        ));
    }
    Ok(())
}

/// Bytes that this backend will hold for a model and options, as [`Backend::memory`] reports them. Large arrays are reserved
/// at load and become resident as they are used.
pub fn plan(checkpoint: &Checkpoint, options: &Options) -> Memory {
    let config = checkpoint.config();
    let (weights_bytes, draft_weights_bytes) = weights::plan(checkpoint, options);
    let [upper, lower, full, ring] = CacheSizes::new(config, options).bytes();
    let (threads, shape) = (options.threads.max(1), Shape::new(config.head_dim));
    let workspace_bytes = Lengths::new(config, options).bytes(options.step_rows.max(1))
        + Prompt::plan(config, options, threads)
        + threads * (State::bytes_of(state_rows(config, options), shape) + quantize::Scratch::bytes_of(shape))
        + sampling_bytes(config, options);
    Memory {
        weights_bytes,
        draft_weights_bytes,
        cache_upper_bytes: upper,
        cache_lower_bytes: lower,
        cache_full_bytes: full,
        buffer_bytes: ring,
        workspace_bytes,
        host_bytes: 0,
    }
}

impl CpuBackend {
    /// Loads a checkpoint on the SIMD path of [`dispatch::choose`].
    ///
    /// # Errors
    /// Those of the checkpoint, the hooks and [`check`]; [`quantspec_core::ErrorKind::Usage`] for a forced path this machine
    /// lacks; [`quantspec_core::ErrorKind::DoesNotFit`] if memory is short.
    pub fn load(checkpoint: &Checkpoint, options: &Options, hooks: Hooks) -> Result<CpuBackend> {
        CpuBackend::load_on(checkpoint, options, hooks, dispatch::choose()?)
    }

    /// Loads a checkpoint on the given SIMD path.
    ///
    /// # Errors
    /// As [`CpuBackend::load`].
    pub fn load_on(
        checkpoint: &Checkpoint,
        options: &Options,
        mut hooks: Hooks,
        choice: ChosenPath,
    ) -> Result<CpuBackend> {
        let config = checkpoint.config().clone();
        check(&config)?;
        let missing = choice.simd.missing();
        if !missing.is_empty() {
            return Err(Error::usage(
                format!("this machine lacks {} for the {} kernels", missing.join(", "), choice.simd.name()),
                "choose another path",
            ));
        }
        let (threads, shape) = (options.threads.max(1), Shape::new(config.head_dim));
        let pool = Pool::new(threads)?;
        // Allocates before loading, so that lack of memory is found early.
        let cache = Cache::new(CacheSizes::new(&config, options))?;
        let prompt = Prompt::new(&config, options, threads)?;
        let rows = Rows::new(&config, options)?;
        let states = (0..threads).map(|_| State::new(state_rows(&config, options), shape)).collect::<Result<_>>()?;
        let model = Model::load(checkpoint, options, choice.simd, &pool, &mut hooks)?;
        Ok(CpuBackend {
            rope: RopeTable::new(&config),
            local_rope: RopeTable::local(&config),
            chosen: vec![(Vec::new(), 0); options.slots * config.layers * config.kv_heads],
            snap_scores: vec![SnapScores::default(); options.slots * config.layers * config.kv_heads],
            open: vec![None; options.slots],
            sampler: HostSampler::new(options.slots, config.vocab),
            flushes: (0..threads).map(|_| quantize::Scratch::new(shape)).collect(),
            options: options.clone(),
            config,
            choice,
            pool,
            hooks,
            model,
            cache,
            prompt,
            rows,
            states,
        })
    }

    /// The SIMD path in use.
    pub fn simd(&self) -> &'static str {
        self.choice.simd.name()
    }
}

impl SamplesOnHost for CpuBackend {
    fn host_sampler(&mut self) -> (&mut HostSampler, &[f32]) {
        (&mut self.sampler, &self.rows.logits)
    }
}

/// Step after step.
impl Executor for CpuBackend {}

impl Backend for CpuBackend {
    fn memory(&self) -> Memory {
        let (weights_bytes, draft_weights_bytes) = self.model.bytes(&self.config);
        let [upper, lower, full, ring] = self.cache.sizes.bytes();
        Memory {
            weights_bytes,
            draft_weights_bytes,
            cache_upper_bytes: upper,
            cache_lower_bytes: lower,
            cache_full_bytes: full,
            buffer_bytes: ring,
            workspace_bytes: self.rows.bytes()
                + self.prompt.bytes()
                + self.states.iter().map(State::bytes).sum::<usize>()
                + self.flushes.iter().map(quantize::Scratch::bytes).sum::<usize>()
                + sampling_bytes(&self.config, &self.options),
            host_bytes: 0,
        }
    }

    fn draft_read_bytes(&self) -> usize {
        self.model.draft_read_bytes()
    }
}
