//! The CPU as a [`Backend`].

mod activations;
mod attend_step;
mod kv_cache;
mod network;

use crate::attend::{ITEM_ROWS, Shape, State};
use crate::cache::{Cache, Plan};
use crate::dispatch::{self, Choice};
use crate::pool::Pool;
use crate::prompt::Prompt;
use crate::quantize;
use crate::weights::{self, Model};
use activations::{Lengths, Rows, Source};
use kv_cache::Place;
use quantspec_core::cache::G;
use quantspec_core::config::{ModelConfig, Weights};
use quantspec_core::sample::{Sampler, Stream, check_finite, choose};
use quantspec_core::verify::{Judge, Verdict};
use quantspec_core::{Error, Result};
use quantspec_model::backend::{Backend, Hooks, Memory, Options, Pass, Step, Turn};
use quantspec_model::checkpoint::Checkpoint;
use quantspec_model::rope::RopeTable;

/// Runs a model on this machine's cores.
pub struct CpuBackend {
    config: ModelConfig,
    options: Options,
    choice: Choice,
    pool: Pool,
    hooks: Hooks,
    model: Model,
    rope: RopeTable,
    cache: Cache,
    /// Capacity of each open slot.
    open: Vec<Option<usize>>,
    windows: Vec<Vec<u32>>,
    /// Pages chosen for each slot, layer and KV head, and how many were visible then.
    chosen: Vec<(Vec<u32>, usize)>,
    prompt: Prompt,
    rows: Rows,
    states: Vec<State>,
    flushes: Vec<quantize::Scratch>,
    judge: Judge,
}

/// Bytes of the draft's distributions of a round, which [`Judge`] makes as they are drafted.
fn drafted_bytes(config: &ModelConfig, options: &Options) -> usize {
    if options.rejection { 4 * options.step_rows * config.vocab } else { 0 }
}

/// Query rows of one work item of attention.
fn state_rows(config: &ModelConfig, options: &Options) -> usize {
    ITEM_ROWS.min(options.step_rows.max(1)) * config.group()
}

/// Bytes this backend will hold for a model and options, as [`Backend::memory`] then reports them. Large arrays are reserved
/// at load and become resident as they are used.
pub fn plan(checkpoint: &Checkpoint, options: &Options) -> Memory {
    let config = checkpoint.config();
    let (weights_bytes, draft_weights_bytes) = weights::plan(checkpoint, options.draft_weights);
    let [upper, lower, full, ring] = Plan::new(config, options.planes, options.slots, options.capacity).bytes();
    let (threads, shape) = (options.threads.max(1), Shape::new(config.head_dim));
    let workspace_bytes = Lengths::new(config, options).bytes(options.step_rows.max(1))
        + Prompt::plan(config, options.prompt_capacity, options.block_rows, threads)
        + threads * (State::bytes_of(state_rows(config, options), shape) + quantize::Scratch::bytes_of(shape))
        + drafted_bytes(config, options);
    Memory {
        weights_bytes,
        draft_weights_bytes,
        cache_upper_bytes: upper,
        cache_lower_bytes: lower,
        cache_full_bytes: full,
        buffer_bytes: ring,
        workspace_bytes,
    }
}

impl CpuBackend {
    /// Loads a checkpoint on the SIMD path of [`dispatch::choose`].
    ///
    /// # Errors
    /// Those of the checkpoint and the hooks; [`quantspec_core::ErrorKind::Usage`] for a forced path this machine lacks;
    /// [`quantspec_core::ErrorKind::Model`] for a head_dim without a page layout;
    /// [`quantspec_core::ErrorKind::DoesNotFit`] where the system has no memory.
    pub fn load(checkpoint: &Checkpoint, options: &Options, hooks: Hooks) -> Result<CpuBackend> {
        CpuBackend::load_on(checkpoint, options, hooks, dispatch::choose()?)
    }

    /// Loads a checkpoint on a SIMD path.
    ///
    /// # Errors
    /// As [`CpuBackend::load`].
    pub fn load_on(checkpoint: &Checkpoint, options: &Options, mut hooks: Hooks, choice: Choice) -> Result<CpuBackend> {
        let config = checkpoint.config().clone();
        if !config.head_dim.is_multiple_of(8) || config.head_dim > 256 {
            return Err(Error::model(
                format!("head_dim {} has no kernels on the CPU", config.head_dim),
                "use a model whose head_dim is a multiple of 8 up to 256",
            ));
        }
        let missing = choice.simd.missing();
        if !missing.is_empty() {
            return Err(Error::usage(
                format!("this machine lacks {} for the {} kernels", missing.join(", "), choice.simd.name()),
                "choose another path",
            ));
        }
        let (threads, shape) = (options.threads.max(1), Shape::new(config.head_dim));
        let pool = Pool::new(threads)?;
        // Memory first: what does not fit is known before a minute of loading.
        let cache = Cache::new(Plan::new(&config, options.planes, options.slots, options.capacity))?;
        let prompt = Prompt::new(&config, options.prompt_capacity, options.block_rows, threads)?;
        let rows = Rows::new(&config, options)?;
        let states = (0..threads).map(|_| State::new(state_rows(&config, options), shape)).collect::<Result<_>>()?;
        let model = Model::load(checkpoint, options.draft_weights, choice.simd, &pool, &mut hooks)?;
        Ok(CpuBackend {
            rope: RopeTable::new(&config),
            chosen: vec![(Vec::new(), 0); options.slots * config.layers * config.kv_heads],
            open: vec![None; options.slots],
            windows: vec![Vec::new(); options.slots],
            flushes: (0..threads).map(|_| quantize::Scratch::new(shape)).collect(),
            judge: Judge::new(),
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

impl Backend for CpuBackend {
    const LEADS: bool = true;

    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn open(&mut self, slot: usize, capacity: usize) -> Result<()> {
        if capacity > self.options.capacity {
            return Err(Error::does_not_fit(
                format!("a sequence of {capacity} tokens; slots hold {}", self.options.capacity),
                "ask for a longer context (-c) or fewer tokens",
            ));
        }
        match self.open.get_mut(slot) {
            Some(open) => *open = Some(capacity),
            None => return Err(Error::internal(format!("slot {slot} of {}", self.options.slots))),
        }
        self.windows[slot].clear();
        Ok(())
    }

    fn close(&mut self, slot: usize) {
        if let Some(open) = self.open.get_mut(slot) {
            *open = None;
        }
        let heads = self.config.layers * self.config.kv_heads;
        for (list, visible) in self.chosen.iter_mut().skip(slot * heads).take(heads) {
            list.clear();
            *visible = 0;
        }
    }

    fn set_window(&mut self, slot: usize, tokens: &[u32]) -> Result<()> {
        self.slot(slot)?;
        let window = &mut self.windows[slot];
        window.resize(window.len().max(tokens.len()), 0);
        window[..tokens.len()].copy_from_slice(tokens);
        Ok(())
    }

    fn window(&mut self, slot: usize, n: usize) -> Result<Vec<u32>> {
        self.slot(slot)?;
        self.windows[slot]
            .get(..n)
            .map(<[u32]>::to_vec)
            .ok_or_else(|| Error::internal(format!("{n} tokens of a window of {}", self.windows[slot].len())))
    }

    fn embed(&mut self, pass: &Pass) -> Result<()> {
        match pass {
            Pass::Step(step) => self.embed_step(step),
            Pass::Prefill(block) => {
                self.check_block(block)?;
                self.prompt(|prompt, machine, model, rope| prompt.embed(machine, model, rope, block))
            }
        }
    }

    fn qkv(&mut self, layer: usize, pass: &Pass) -> Result<()> {
        match pass {
            Pass::Step(step) => self.qkv_step(layer, step),
            Pass::Prefill(block) => {
                self.prompt(|prompt, machine, model, _| prompt.qkv(machine, &model.layers[layer], block))
            }
        }
    }

    fn attend(&mut self, layer: usize, pass: &Pass) -> Result<()> {
        match pass {
            Pass::Step(step) => self.attend_step(layer, step),
            Pass::Prefill(block) => {
                self.prompt(|prompt, machine, model, _| prompt.attend(machine, &model.layers[layer], block))
            }
        }
    }

    fn output(&mut self, layer: usize, pass: &Pass) -> Result<()> {
        match pass {
            Pass::Step(step) => self.add(layer, step, Source::Attended),
            Pass::Prefill(block) => {
                self.prompt(|prompt, machine, model, _| prompt.output(machine, &model.layers[layer], block))
            }
        }
    }

    fn gate_up(&mut self, layer: usize, pass: &Pass) -> Result<()> {
        match pass {
            Pass::Step(step) => self.gate_up_step(layer, step),
            Pass::Prefill(block) => {
                self.prompt(|prompt, machine, model, _| prompt.gate_up(machine, &model.layers[layer], block))
            }
        }
    }

    fn down(&mut self, layer: usize, pass: &Pass) -> Result<()> {
        match pass {
            Pass::Step(step) => self.add(layer, step, Source::Ffn),
            Pass::Prefill(block) => {
                self.prompt(|prompt, machine, model, _| prompt.down(machine, &model.layers[layer], block))
            }
        }
    }

    fn store(&mut self, layer: usize, slot: usize, tokens: usize) -> Result<()> {
        let capacity = self.slot(slot)?;
        if tokens > capacity || tokens > self.prompt.room() {
            return Err(Error::internal(format!("{tokens} tokens in a slot of {capacity}")));
        }
        let (kv_heads, pages) = (self.config.kv_heads, tokens / G);
        let first = self.cache.head(slot, layer, 0);
        // The pages a decode query can see in the ring: the last two complete ones and the one under way.
        for kv_head in 0..kv_heads {
            for page in pages.saturating_sub(2)..tokens.div_ceil(G) {
                let at = self.cache.ring_at(first + kv_head, page);
                let ring = &mut self.cache.ring[at..at + self.cache.plan.shape.full_len()];
                self.prompt.copy(kv_head, page * G..tokens.min((page + 1) * G), ring);
            }
        }
        let place = |item: usize| {
            let (kv_head, page) = (item / pages, item % pages);
            Place { kv_head, head: first + kv_head, page, ring: 0 }
        };
        self.store_pages(kv_heads * pages, place, true)
    }

    fn head(&mut self, pass: &Pass) -> Result<()> {
        match pass {
            Pass::Step(step) => self.head_rows(step.weights, step.rows.len()),
            Pass::Prefill(block) => {
                let last = (block.start + block.rows).saturating_sub(1);
                self.prompt.hidden(last, &mut self.rows.hidden);
                self.head_rows(Weights::Full, 1)
            }
        }
    }

    fn logits(&mut self, row: usize) -> Result<Vec<f32>> {
        let vocab = self.config.vocab;
        self.rows
            .logits
            .get(row * vocab..(row + 1) * vocab)
            .map(<[f32]>::to_vec)
            .ok_or_else(|| Error::internal(format!("logits of row {row}")))
    }

    fn flush(&mut self, slot: usize, page: usize) -> Result<()> {
        let capacity = self.slot(slot)?;
        if (page + 1) * G > capacity {
            return Err(Error::internal(format!("page {page} of a slot of {capacity} tokens")));
        }
        let kv_heads = self.config.kv_heads;
        let first = self.cache.head(slot, 0, 0);
        let ring: Vec<usize> =
            (0..self.config.layers * kv_heads).map(|head| self.cache.ring_at(first + head, page)).collect();
        let place = |item: usize| Place { kv_head: item % kv_heads, head: first + item, page, ring: ring[item] };
        self.store_pages(ring.len(), place, false)
    }

    fn first(&mut self, _slot: usize, position: usize, sampler: &Sampler) -> Result<u32> {
        let logits = &self.rows.logits[..self.config.vocab];
        check_finite(logits)?;
        Ok(choose(logits, sampler, position, Stream::Sample))
    }

    fn propose(&mut self, step: &Step, turns: &[Turn]) -> Result<()> {
        let vocab = self.config.vocab;
        for (j, row) in step.rows.iter().enumerate() {
            let turn = turns
                .iter()
                .find(|turn| turn.slot == row.slot)
                .ok_or_else(|| Error::internal(format!("no turn for slot {}", row.slot)))?;
            let logits = &self.rows.logits[j * vocab..(j + 1) * vocab];
            let token = self.judge.propose(row.slot, row.offset, row.position + 1, logits, &turn.sampler);
            let window = &mut self.windows[row.slot];
            window.resize(window.len().max(row.offset + 2), 0);
            window[row.offset + 1] = token;
        }
        Ok(())
    }

    fn lead(&self, slot: usize) -> f32 {
        self.judge.lead(slot)
    }

    fn judge(&mut self, step: &Step, turns: &[Turn]) -> Result<Vec<Verdict>> {
        let vocab = self.config.vocab;
        let mut verdicts = Vec::with_capacity(turns.len());
        for turn in turns {
            let rows: Vec<&[f32]> = step
                .rows
                .iter()
                .enumerate()
                .filter(|(_, row)| row.slot == turn.slot)
                .map(|(j, _)| &self.rows.logits[j * vocab..(j + 1) * vocab])
                .collect();
            let drafted = self.windows[turn.slot].get(1..turn.gamma + 1).ok_or_else(|| {
                Error::internal(format!("slot {} has drafted fewer than {} tokens", turn.slot, turn.gamma))
            })?;
            verdicts.push(self.judge.judge(turn.slot, drafted, turn.q, &rows, &turn.sampler, turn.committed + 1)?);
        }
        Ok(verdicts)
    }

    fn poll(&mut self) -> Result<()> {
        (self.hooks.poll)()
    }

    fn memory(&self) -> Memory {
        let (weights_bytes, draft_weights_bytes) = self.model.bytes(&self.config);
        let cache = &self.cache;
        Memory {
            weights_bytes,
            draft_weights_bytes,
            cache_upper_bytes: cache.upper.bytes(),
            cache_lower_bytes: cache.lower.bytes(),
            cache_full_bytes: cache.full.bytes(),
            buffer_bytes: cache.ring.bytes(),
            workspace_bytes: self.rows.bytes()
                + self.prompt.bytes()
                + self.states.iter().map(State::bytes).sum::<usize>()
                + self.flushes.iter().map(quantize::Scratch::bytes).sum::<usize>()
                + drafted_bytes(&self.config, &self.options),
        }
    }
}
