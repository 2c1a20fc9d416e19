//! [`CudaBackend`]: the operations of a pass as launches on one stream.
//!
//! A round is one copy to the device (rows, angles, spans and turns of every draft step and of the verification), one graph of all their
//! launches, and one copy back. Positions are known before a round starts; drafted tokens never leave the device before its end. Where a draft may end
//! early each of its steps is a copy, a graph, and the lead of its token on its way back.

mod describe;
mod executor;
mod kv_cache;
mod network;
mod prompt;
mod sampler;
mod workspace;

use crate::args;
use crate::attend::{Attend, PASS_ROWS, check_head};
use crate::detect::DeviceInfo;
use crate::device::{Buffer, Device, Graph, Kernel, Launch, Plain};
use crate::draft::Draft;
use crate::linear::{Linear, name};
use crate::prefill::{self, Prefill, Shape, Way};
use crate::recorded::Recorded;
use crate::sample::{self, Sampling};
use crate::weights::{self, Weights as Stored, address, argument};
use describe::{DeviceRow, Plan, STAGES, Writer};
use executor::Clock;
pub(crate) use kv_cache::page_shared;
use kv_cache::{Cache, Lists, Slot, table_bytes};
pub(crate) use network::NORM_THREADS;
use quantspec_core::cache::BUFFER_TOKENS;
use quantspec_core::config::{ModelConfig, Pages, Rounding, View, Weights};
use quantspec_core::plan::{CacheBytes, pages};
use quantspec_core::sample::Sampler;
use quantspec_core::verify::Verdict;
use quantspec_core::{Error, Result};
use quantspec_model::backend::{Backend, DraftPlan, Hooks, Memory, Options, Pass, Row, Step, Turn};
use quantspec_model::checkpoint::{Checkpoint, Part};
use quantspec_model::rope::RopeTable;
pub(crate) use sampler::FLAG_WEIGHTS;
use sampler::check_flag;
use std::sync::Arc;
use workspace::{Input, PromptSpace, Sizes, StepSpace, TOKENS_OWN, prompt_bytes, tokens_own, window_pitch};

// SAFETY: thirty-two-bit numbers only.
unsafe impl Plain for DeviceRow {}

/// Kernels launched from here.
#[derive(Debug)]
struct Kernels {
    embed: Kernel,
    /// By input type: the weights' and the head's, and int8.
    norm: [Kernel; 2],
    norm_i8: Kernel,
    silu: Kernel,
    silu_i8: Kernel,
    append: Kernel,
    flush: Kernel,
    store: Kernel,
    keep_recent: Kernel,
}

/// A model on one GPU.
pub struct CudaBackend {
    config: ModelConfig,
    options: Options,
    hooks: Hooks,
    rope: RopeTable,
    device: Arc<Device>,
    kernels: Kernels,
    linear: Linear,
    /// Products of draft steps that take along what lies between them.
    draft: Option<Draft>,
    attend: Attend,
    prefill: Prefill,
    weights: Stored,
    cache: Cache,
    slots: Vec<Option<Slot>>,
    sampling: Sampling,
    step: StepSpace,
    prompt: PromptSpace,
    /// Lists of chosen pages, and the scores they are chosen by.
    lists: Lists,
    /// Rounds, and steps of drafts that are looked at.
    recorded: Recorded<Graph>,
    /// The step under way.
    plan: Plan,
    staged: usize,
    /// What the next verification's draft reads, where the round is queued as a whole.
    drafting: Option<DraftPlan>,
    /// A prompt is under way, and nobody has looked at what it flags.
    prompting: bool,
    /// A prompt was where the draft weights belong.
    overwritten: bool,
    clock: Clock,
}

/// Whether the kernels know a model on such a device: asked before anything is loaded.
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

/// Bytes [`CudaBackend::load`] will hold on this device, before anything is loaded.
pub fn plan(checkpoint: &Checkpoint, options: &Options, device: &DeviceInfo) -> Memory {
    let config = checkpoint.config();
    let (multiprocessors, architecture) = (device.multiprocessors, device.architecture);
    let cache = CacheBytes::of(config, options.planes, options.capacity, options.slots);
    let partial =
        crate::attend::partial_rows(config, multiprocessors, architecture, options.step_rows.clamp(1, PASS_ROWS));
    let sizes = Sizes::new(config, options, partial);
    let way = Way::of(architecture, config.dtype);
    Memory {
        weights_bytes: weights::bytes(checkpoint),
        draft_weights_bytes: weights::draft_bytes(config, options.draft_weights),
        cache_upper_bytes: cache.upper_bytes,
        cache_lower_bytes: cache.lower_bytes,
        cache_full_bytes: cache.full_bytes,
        buffer_bytes: cache.buffer_bytes,
        workspace_bytes: table_bytes(options)
            + sizes.step_bytes(config, checkpoint.dtype(Part::Head))
            + prompt_bytes(config, options, tokens_own(config, options, TOKENS_OWN)).iter().sum::<usize>()
            + Lists::bytes(config, options.slots, pages(options.capacity)).iter().sum::<usize>()
            + Sampling::bytes(
                config.vocab,
                options.slots,
                options.step_rows.max(1),
                window_pitch(options),
                options.rejection,
            )
            + Prefill::scratch_bytes(&Shape::of(config), options.block_rows.max(1), way),
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

    /// The same on an open device.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Model`] where [`check`] refuses the checkpoint, [`quantspec_core::ErrorKind::NotFinite`] for weights that are NaN, infinite
    /// or beyond what draft weights can hold, [`quantspec_core::ErrorKind::DoesNotFit`] where the GPU is out of memory. Other device errors, and those of the
    /// checkpoint and of `hooks.poll`.
    pub fn load_on(
        device: &Arc<Device>,
        checkpoint: &Checkpoint,
        options: &Options,
        hooks: Hooks,
    ) -> Result<CudaBackend> {
        CudaBackend::load_lending(device, checkpoint, options, hooks, TOKENS_OWN)
    }

    /// The same where prompts of more than `most` tokens borrow the memory of the draft weights, if they fit there.
    ///
    /// # Errors
    /// As [`CudaBackend::load_on`].
    pub fn load_lending(
        device: &Arc<Device>,
        checkpoint: &Checkpoint,
        options: &Options,
        mut hooks: Hooks,
        most: usize,
    ) -> Result<CudaBackend> {
        check(checkpoint, &device.info)?;
        let config = checkpoint.config().clone();
        let attend = Attend::new(device, &config, options.rounding)?;
        let linear = Linear::new(device)?;
        let draft = Draft::new(device, config.head_dim)?;
        let prefill = Prefill::new(device, Shape::of(&config), options.block_rows.max(1))?;
        let pitch = window_pitch(options);
        let sampling =
            Sampling::new(device, config.vocab, options.slots, options.step_rows.max(1), pitch, options.rejection)?;
        let weights = weights::load(checkpoint, device, &linear, options.draft_weights, sampling.shared(), &mut hooks)?;
        let d = config.head_dim;
        let dtype = config.dtype;
        let page_shared = page_shared(d);
        let kernels = Kernels {
            embed: device.kernel(&format!("embed_{}", name(weights.embedding.dtype)), 0)?,
            norm: [
                device.kernel(&format!("norm_{}", name(dtype)), 0)?,
                device.kernel(&format!("norm_{}", name(weights.head().dtype)), 0)?,
            ],
            norm_i8: device.kernel("norm_i8", 0)?,
            silu: device.kernel(&format!("silu_mul_{}", name(dtype)), 0)?,
            silu_i8: device.kernel("silu_mul_i8", 0)?,
            append: device.kernel(&format!("append_{d}"), 0)?,
            flush: device.kernel(&format!("flush_{d}"), page_shared)?,
            store: device.kernel(&format!("store_{d}"), page_shared)?,
            keep_recent: device.kernel("keep_recent", 0)?,
        };
        let partial = attend.partial_rows(options.step_rows.clamp(1, PASS_ROWS));
        let sizes = Sizes::new(&config, options, partial);
        let step = StepSpace {
            hidden: device.allocate(sizes.rows * config.hidden * 4)?,
            normed: Input::new(device, sizes.rows, config.hidden, dtype)?,
            attended: Input::new(device, sizes.rows, config.q_width(), dtype)?,
            gated: Input::new(device, sizes.rows, config.intermediate, dtype)?,
            last: Input::new(device, sizes.rows, config.hidden, weights.head().dtype)?,
            y: device.allocate(sizes.y)?,
            q: device.allocate(sizes.rows * config.q_width() * 2)?,
            logits: device.allocate(sizes.logits)?,
            partial: device.allocate(partial * d * 4)?,
            extremes: device.allocate(partial * 8)?,
            description: device.allocate(sizes.description)?,
            staging: (0..STAGES).map(|_| device.pinned(sizes.description)).collect::<Result<_>>()?,
        };
        let own = tokens_own(&config, options, most);
        let bytes = prompt_bytes(&config, options, own);
        let prompt = PromptSpace {
            hidden: device.allocate(bytes[0])?,
            scratch: device.allocate(bytes[1])?,
            own,
            borrows: [false; 2],
            cos_sin: device.allocate(bytes[2])?,
            tokens: device.allocate(bytes[3])?,
            normed: device.zeroed(bytes[4])?,
            q: device.allocate(bytes[5])?,
            attended: device.zeroed(bytes[6])?,
            gated: device.zeroed(bytes[7])?,
        };
        let clock = Clock { start: device.mark()?, drafted: device.mark()?, ran: false };
        let mut backend = CudaBackend {
            clock,
            drafting: None,
            prompting: false,
            overwritten: false,
            cache: Cache::new(device, &config, options)?,
            slots: (0..options.slots).map(|_| None).collect(),
            sampling,
            rope: RopeTable::new(&config),
            options: options.clone(),
            device: device.clone(),
            kernels,
            linear,
            draft,
            attend,
            prefill,
            weights,
            step,
            prompt,
            lists: Lists::new(device, &config, options.slots, pages(options.capacity))?,
            recorded: Recorded::new(),
            plan: Plan::default(),
            staged: 0,
            config,
            hooks,
        };
        check_flag(backend.sampling.read()?)?;
        Ok(backend)
    }

    /// The device under the model.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Kinds of rounds that are recorded as graphs now.
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
        // SAFETY: every caller below passes the kernel's own argument list (kernels/elementwise.cu, quantize.cu) with buffers of this
        // backend, which outlive the stream's work and have room for `step_rows` rows, `prompt_capacity` tokens or `block_rows` rows.
        unsafe { self.device.launch(kernel, launch, arguments) }
    }
}

impl Backend for CudaBackend {
    const LEADS: bool = true;

    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn open(&mut self, slot: usize, capacity: usize) -> Result<()> {
        self.close(slot);
        let wanted = pages(capacity);
        let Some(place) = self.slots.get_mut(slot) else {
            return Err(Error::internal(format!("slot {slot} does not exist")));
        };
        if capacity > self.options.capacity || wanted > self.cache.free.len() {
            return Err(Error::does_not_fit(
                format!("{capacity} tokens where {} were planned for", self.options.capacity),
                "open the engine with a larger context (-c)",
            ));
        }
        let pages = self.cache.free.split_off(self.cache.free.len() - wanted);
        // Also where the rest fails: closing the slot gives the pages back.
        *place = Some(Slot { pages: pages.clone(), chosen: None });
        let opened = self.cache.clean(slot, &self.config, self.options.slots).and_then(|()| {
            // What interrupted work has flagged, and nobody read, is not the new sequence's.
            self.sampling.clear_flag()?;
            self.prompting = false;
            self.cache.tables.write(slot * self.cache.pitch * 4, &pages)
        });
        opened.inspect_err(|_| self.close(slot))
    }

    fn close(&mut self, slot: usize) {
        if let Some(closed) = self.slots.get_mut(slot).and_then(Option::take) {
            self.cache.free.extend(closed.pages.into_iter().rev());
            // What a prompt flagged that was interrupted is not its neighbours'; an error comes again with their next step.
            if self.prompting && self.sampling.clear_flag().is_ok() {
                self.prompting = false;
            }
        }
    }

    fn set_window(&mut self, slot: usize, tokens: &[u32]) -> Result<()> {
        self.slot(slot)?;
        self.drafting = None;
        self.sampling.set_window(slot, tokens)
    }

    fn window(&mut self, slot: usize, n: usize) -> Result<Vec<u32>> {
        self.slot(slot)?;
        self.sampling.window(slot, n)
    }

    fn embed(&mut self, pass: &Pass) -> Result<()> {
        match pass {
            Pass::Prefill(block) => self.prompt_embed(block),
            Pass::Step(step) => {
                if step.weights == Weights::Draft {
                    self.restore_drafts()?;
                }
                self.begin(step)?;
                self.step_embed(step)
            }
        }
    }

    fn qkv(&mut self, layer: usize, pass: &Pass) -> Result<()> {
        match pass {
            Pass::Step(step) => {
                self.step_qkv(layer, step)?;
                self.plan.pending = false;
                Ok(())
            }
            Pass::Prefill(block) => {
                // Another sequence may have begun or ended since the last chunk.
                self.prompting = true;
                self.prompt_qkv(layer, block)
            }
        }
    }

    fn attend(&mut self, layer: usize, pass: &Pass) -> Result<()> {
        match pass {
            Pass::Step(step) => self.step_attend(layer, step),
            Pass::Prefill(block) => {
                let prompt = &self.prompt;
                // SAFETY: the buffers are this backend's and have room for `block_rows` rows and `prompt_capacity` tokens.
                unsafe {
                    self.prefill.attend(
                        prompt.q.at(0),
                        self.prompt_scratch(0),
                        prompt.attended.at(0),
                        block.start,
                        block.rows,
                    )
                }
            }
        }
    }

    fn output(&mut self, layer: usize, pass: &Pass) -> Result<()> {
        let weights = self.layer(layer)?;
        match pass {
            Pass::Step(step) => {
                let draft = weights.draft.output.as_ref().filter(|_| step.weights == Weights::Draft);
                if let (Some(together), Some(draft)) = (self.together(step), draft) {
                    let (x, hidden) = (&self.step.attended, self.step.hidden.at(0));
                    let bias = address(&weights.output_bias);
                    // SAFETY: the buffers are this backend's and have room for `step_rows` rows.
                    return unsafe { together.add_i8(draft, x.x8.at(0), x.xs.at(0), hidden, bias, step.rows.len()) };
                }
                self.product(&weights.output, draft, &self.step.attended, self.step.y.at(0), step.rows.len())?;
                self.plan.pending = true;
                Ok(())
            }
            Pass::Prefill(block) => {
                let bias = weights.output_bias.as_ref().map(|bias| bias.at(0));
                let hidden = self.prompt_hidden(block.start);
                // SAFETY: as in `attend`.
                unsafe {
                    self.prefill.output(
                        self.prompt.attended.at(0),
                        weights.output.buffer.at(0),
                        bias,
                        hidden,
                        block.rows,
                    )
                }
            }
        }
    }

    fn gate_up(&mut self, layer: usize, pass: &Pass) -> Result<()> {
        match pass {
            Pass::Step(step) => {
                self.step_gate_up(layer, step)?;
                self.plan.pending = false;
                Ok(())
            }
            Pass::Prefill(block) => {
                let weights = self.layer(layer)?;
                self.prompt_norm(block, &weights.mlp_norm)?;
                let bias = weights.gate_up_bias.as_ref().map(|bias| bias.at(0));
                let (normed, gated) = (self.prompt.normed.at(0), self.prompt.gated.at(0));
                // SAFETY: as in `attend`.
                unsafe { self.prefill.gate_up(normed, weights.gate_up.buffer.at(0), bias, gated, block.rows) }
            }
        }
    }

    fn down(&mut self, layer: usize, pass: &Pass) -> Result<()> {
        let weights = self.layer(layer)?;
        match pass {
            Pass::Step(step) => {
                let draft = weights.draft.down.as_ref().filter(|_| step.weights == Weights::Draft);
                if let (Some(together), Some(draft)) = (self.together(step), draft) {
                    let (x, hidden) = (&self.step.gated, self.step.hidden.at(0));
                    let bias = address(&weights.down_bias);
                    // SAFETY: as above.
                    return unsafe { together.add_bf16(draft, x.x.at(0), x.pitch(), hidden, bias, step.rows.len()) };
                }
                self.product(&weights.down, draft, &self.step.gated, self.step.y.at(0), step.rows.len())?;
                self.plan.pending = true;
                Ok(())
            }
            Pass::Prefill(block) => {
                let bias = weights.down_bias.as_ref().map(|bias| bias.at(0));
                let hidden = self.prompt_hidden(block.start);
                // SAFETY: as in `attend`.
                unsafe {
                    self.prefill.down(self.prompt.gated.at(0), weights.down.buffer.at(0), bias, hidden, block.rows)
                }
            }
        }
    }

    fn store(&mut self, layer: usize, slot: usize, tokens: usize) -> Result<()> {
        let (heads, d) = (self.config.kv_heads, self.config.head_dim);
        let complete = pages(tokens).min(self.slot(slot)?.pages.len());
        let cache = self.cache_layer(layer);
        if complete > 0 {
            let arguments = args![
                self.prompt_scratch(0),
                cache.upper,
                cache.lower,
                cache.full,
                self.cache.tables.at(slot * self.cache.pitch * 4),
                0usize,
                usize::from(self.options.rounding == Rounding::Balanced),
                self.sampling.flag(),
            ];
            self.launch(self.kernels.store, [heads, complete, 2], 256, page_shared(d), &arguments)?;
        }
        let first = tokens.saturating_sub(BUFFER_TOKENS);
        let arguments = args![
            self.prompt_scratch(0),
            &self.cache.ring_k,
            &self.cache.ring_v,
            layer,
            self.options.slots,
            slot,
            heads,
            d,
            first,
            self.sampling.flag(),
        ];
        self.launch(self.kernels.keep_recent, [tokens - first, 2, 1], 128, 0, &arguments)?;
        self.wait()
    }

    fn head(&mut self, pass: &Pass) -> Result<()> {
        let (rows, hidden, bias, drafting) = match pass {
            Pass::Step(step) => {
                let bias = self.weights.layers.last().map_or(0, |layer| address(&layer.down_bias));
                (step.rows.len(), self.step.hidden.at(0), bias, step.weights == Weights::Draft)
            }
            Pass::Prefill(block) => {
                self.plan.pending = false;
                (1, self.prompt_hidden(block.start + block.rows - 1), 0, false)
            }
        };
        let draft = self.weights.draft_head.as_ref().filter(|_| drafting);
        let last = &self.step.last;
        self.norm(rows, &self.weights.final_norm, bias, last, self.kernels.norm[1], draft.is_some(), hidden)?;
        self.product(self.weights.head(), draft, last, self.step.logits.at(0), rows)?;
        self.plan.pending = false;
        Ok(())
    }

    fn logits(&mut self, row: usize) -> Result<Vec<f32>> {
        let vocab = self.config.vocab;
        let logits = self.step.logits.read(row * vocab * 4, vocab)?;
        self.staged = 0;
        // Overflowing keys and values were stored as 0, so logits do not show them.
        check_flag(self.sampling.take_flag(self.plan.drafts)?)?;
        Ok(logits)
    }

    fn flush(&mut self, slot: usize, page: usize) -> Result<()> {
        let (heads, d) = (self.config.kv_heads, self.config.head_dim);
        let physical = self.slot(slot)?.pages.get(page).copied();
        let physical = physical.ok_or_else(|| Error::internal(format!("page {page} is beyond slot {slot}")))?;
        let arguments = args![
            &self.cache.ring_k,
            &self.cache.ring_v,
            argument(&self.cache.upper),
            argument(&self.cache.lower),
            argument(&self.cache.full),
            self.cache.pages,
            self.options.slots,
            slot,
            page,
            physical,
            usize::from(self.options.rounding == Rounding::Balanced),
            self.sampling.flag(),
        ];
        self.launch(self.kernels.flush, [heads, self.config.layers, 2], 256, page_shared(d), &arguments)
    }

    fn end_chunk(&mut self) -> Result<()> {
        check_flag(self.sampling.take_flag(false)?)
    }

    fn first(&mut self, slot: usize, position: usize, sampler: &Sampler) -> Result<u32> {
        let row = DeviceRow { slot: slot as i32, offset: 0, position: position as i32 - 1, token: -1 };
        self.step.description.write(0, &[row])?;
        self.staged = 0;
        let rows = self.step.description.at(0);
        let token = self.sampling.first(slot, sampler, rows, self.step.logits.at(0))?;
        self.prompting = false;
        check_flag(self.sampling.read()?)?;
        Ok(token)
    }

    fn propose(&mut self, step: &Step, turns: &[Turn]) -> Result<()> {
        let manner = self.sampling.learn(turns)?;
        for row in step.rows {
            self.sampling.drafts(row.slot, row.offset);
        }
        self.sampling.propose(step.rows.len(), self.plan.rows, self.step.logits.at(0), manner)
    }

    fn judge(&mut self, step: &Step, turns: &[Turn]) -> Result<Vec<Verdict>> {
        let manner = self.sampling.learn(turns)?;
        let described = self.sampling.describe(step.rows, turns)?;
        self.sampling.turns().write(0, &described)?;
        let (at, logits) = (self.sampling.turns().at(0), self.step.logits.at(0));
        self.sampling.judge(at, turns.len(), step.rows.len(), self.plan.rows, logits, manner)?;
        self.conclude(turns)
    }

    fn draft(&mut self, plan: &DraftPlan, turns: &mut [Turn]) -> Result<()> {
        self.drafting = None;
        if plan.weights == Weights::Draft {
            // Here, where nobody takes it for the time of a verification.
            self.restore_drafts()?;
        }
        match turns {
            [turn] if turn.stop.is_some() => self.draft_watched(plan, turn),
            _ => {
                self.drafting = Some(*plan);
                Ok(())
            }
        }
    }

    fn verify(&mut self, view: View, turns: &[Turn]) -> Result<Vec<Verdict>> {
        // Also where the poll ends the round: the next one is not to draft by this plan.
        let drafting = self.drafting.take();
        (self.hooks.poll)()?;
        if drafting.is_some_and(|plan| plan.weights == Weights::Draft) {
            // A long prompt since `draft` may have taken their place.
            self.restore_drafts()?;
        }
        let longest = drafting.map_or(0, |_| turns.iter().map(|turn| turn.gamma).max().unwrap_or(0));
        let manner = self.sampling.learn(turns)?;
        let at_offset = |turn: &Turn, offset| Row { slot: turn.slot, offset, position: turn.committed + offset };
        let mut rows: Vec<Vec<Row>> = (0..longest)
            .map(|offset| turns.iter().filter(|turn| turn.gamma > offset).map(|turn| at_offset(turn, offset)).collect())
            .collect();
        rows.push(turns.iter().flat_map(|turn| (0..=turn.gamma).map(|offset| at_offset(turn, offset))).collect());

        self.stage()?;
        let mut at = 0;
        let mut round = Vec::with_capacity(rows.len());
        for (offset, rows) in rows.iter().enumerate() {
            let step = match drafting.filter(|_| offset < longest) {
                Some(DraftPlan { weights, view, pages }) => {
                    Step { weights, view, pages, choose_pages: offset == 0, rows }
                }
                None => Step { weights: Weights::Full, view, pages: Pages::All, choose_pages: false, rows },
            };
            let mut plan = self.describe(&step, &mut at)?;
            plan.drafts = offset < longest;
            if plan.drafts {
                for row in rows {
                    self.sampling.drafts(row.slot, row.offset);
                }
            }
            round.push((step, plan));
        }
        let described = self.sampling.describe(rows.last().map_or(&[], Vec::as_slice), turns)?;
        let mut writer = Writer { pinned: &mut self.step.staging[self.staged], at };
        let turns_at = self.step.description.at(writer.put(&described)?);
        at = writer.at;
        self.send(at)?;
        self.run(&round, Some((turns_at, turns.len())), manner)?;
        self.clock.ran = longest > 0;
        self.conclude(turns)
    }

    fn draft_seconds(&mut self) -> Result<Option<f64>> {
        self.clock.ran.then(|| self.clock.start.seconds_to(&self.clock.drafted)).transpose()
    }

    fn poll(&mut self) -> Result<()> {
        (self.hooks.poll)()
    }

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
            &self.prompt.hidden,
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
        Memory {
            weights_bytes: self.weights.held_bytes(),
            draft_weights_bytes: self.weights.held_draft_bytes(),
            cache_upper_bytes: pool(&self.cache.upper),
            cache_lower_bytes: pool(&self.cache.lower),
            cache_full_bytes: pool(&self.cache.full),
            buffer_bytes: self.cache.ring_k.bytes() + self.cache.ring_v.bytes(),
            workspace_bytes: inputs
                + step_bytes.iter().map(|buffer| buffer.bytes()).sum::<usize>()
                + self.lists.lists.bytes()
                + self.lists.scores.bytes()
                + self.sampling.held_bytes()
                + self.prefill.held_bytes(),
        }
    }
}
