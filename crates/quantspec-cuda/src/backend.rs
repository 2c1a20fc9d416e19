//! [`CudaBackend`]: the operations of a pass as launches on one stream.
//!
//! A round is one copy to the device (rows, angles, spans and turns of every draft step and of the verification), one graph of all their
//! launches, and one copy back. Positions are known before a round starts; drafted tokens never leave the device before its end. Where a draft may end
//! early each of its steps is a copy, a graph, and the lead of its token on its way back.

use crate::args;
use crate::attend::{
    Around, Attend, Choice, Chosen, Layer as CacheLayer, Merged, PASS_ROWS, Part as AttendPart, Pass as AttendPass,
    Places, Span, check_head,
};
use crate::detect::DeviceInfo;
use crate::device::{Buffer, Device, Graph, Kernel, Launch, Mark, Pinned, Plain};
use crate::draft::{Draft, Heads, Hidden};
use crate::linear::{GROUP, Linear, Matrix, Quantised, name};
use crate::prefill::{self, Prefill, Shape, Way, padded, readable};
use crate::recorded::{Kind, Recorded};
use crate::sample::{self, Manner, Sampling, TURN_BYTES};
use crate::weights::{self, Weights as Stored, address, argument};
use quantspec_core::cache::{BUFFER_TOKENS, G, GAMMA_MAX, visible_pages};
use quantspec_core::config::{DraftWeights, Dtype, ModelConfig, Pages, Rounding, View, Weights};
use quantspec_core::layout::Layout;
use quantspec_core::plan::{CacheBytes, pages};
use quantspec_core::sample::Sampler;
use quantspec_core::verify::Verdict;
use quantspec_core::{Error, ErrorKind, Result};
use quantspec_model::backend::{Backend, Block, DraftPlan, Hooks, Memory, Options, Pass, Row, Step, Turn};
use quantspec_model::checkpoint::{Checkpoint, Part};
use quantspec_model::rope::RopeTable;
use std::sync::Arc;
use std::time::Duration;

/// Descriptions that may be queued before the host must wait for the oldest: rounds end with a wait, only single steps queue up.
const STAGES: usize = 4;
/// Begins a step in the key of a graph; no address and no count is as large.
const STEP: u64 = u64::MAX;
/// Threads of a norm's block, as in kernels/elementwise.cu: few enough registers to wait beside a product's block.
pub(crate) const NORM_THREADS: u32 = 512;
/// How long the host sleeps between looks at a busy device: short against a prompt's layer.
const LOOK_AGAIN: Duration = Duration::from_micros(200);
/// Bits of the device's error flag (`FLAG_*` in kernels/numbers.cuh and quantize.cu).
const FLAG_CACHE: u32 = 1;
const FLAG_LOGITS: u32 = 2;
pub(crate) const FLAG_WEIGHTS: u32 = 4;

/// A row as the kernels see it; `Row` in kernels/layout.cuh.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct DeviceRow {
    slot: i32,
    offset: i32,
    position: i32,
    token: i32,
}

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

/// One sequence.
#[derive(Debug)]
struct Slot {
    /// Physical pages, by logical page.
    pages: Vec<i32>,
    /// What its draft reads, where not all pages.
    chosen: Option<Chosen>,
}

/// The cache: pools `[layer][page][kv head]`, rings `[layer][slot][kv head]`.
#[derive(Debug)]
struct Cache {
    upper: Option<Buffer>,
    lower: Option<Buffer>,
    full: Option<Buffer>,
    ring_k: Buffer,
    ring_v: Buffer,
    /// i32 `[slot][pitch]`.
    tables: Buffer,
    pitch: usize,
    /// Pages of a layer.
    pages: usize,
    free: Vec<i32>,
}

/// A product's input for its K: in the weights' type and in int8.
#[derive(Debug)]
struct Input {
    x: Buffer,
    x8: Buffer,
    xs: Buffer,
    width: usize,
}

impl Input {
    fn bytes(rows: usize, width: usize, dtype: Dtype) -> [usize; 3] {
        [rows * padded(width) * dtype.bytes(), rows * width.next_multiple_of(GROUP), rows * width.div_ceil(GROUP) * 8]
    }

    fn new(device: &Arc<Device>, rows: usize, width: usize, dtype: Dtype) -> Result<Input> {
        let [x, x8, xs] = Input::bytes(rows, width, dtype);
        Ok(Input { x: device.zeroed(x)?, x8: device.zeroed(x8)?, xs: device.zeroed(xs)?, width })
    }

    /// Pitch in elements.
    fn pitch(&self) -> usize {
        padded(self.width)
    }

    fn pitch8(&self) -> usize {
        self.width.next_multiple_of(GROUP)
    }
}

/// Activations of a step.
#[derive(Debug)]
struct StepSpace {
    hidden: Buffer,
    normed: Input,
    attended: Input,
    gated: Input,
    /// Input of the head, whose type may be another.
    last: Input,
    /// f32 products.
    y: Buffer,
    q: Buffer,
    logits: Buffer,
    partial: Buffer,
    extremes: Buffer,
    /// What describes a round or a single step: rows, angles, spans, turns; written by one copy.
    description: Buffer,
    staging: Vec<Pinned>,
}

/// Activations of a prompt.
#[derive(Debug)]
struct PromptSpace {
    /// f32 `[tokens][hidden]`: prefill is layer-major.
    hidden: Buffer,
    /// Keys and values of the layer under way, f16 `[tokens][2 kv_width]`.
    scratch: Buffer,
    /// Tokens of both. Longer prompts have theirs where the draft weights are.
    own: [usize; 2],
    /// Which of both the prompt under way has there.
    borrows: [bool; 2],
    cos_sin: Buffer,
    tokens: Buffer,
    normed: Buffer,
    q: Buffer,
    attended: Buffer,
    gated: Buffer,
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

/// Points of a round in the device's time.
struct Clock {
    start: Mark,
    drafted: Mark,
    /// The last verification drafted.
    ran: bool,
}

/// Page lists of drafts that do not read every page.
#[derive(Debug)]
struct Lists {
    /// u32 `[layers][slots][KV heads][pitch]`
    lists: Buffer,
    /// f32 `[slots][KV heads][pages of a sequence]`
    scores: Buffer,
    /// Entries of the longest list: of every page of a sequence, and of the two that are always read.
    pitch: usize,
}

impl Lists {
    fn pitch(pages: usize) -> usize {
        pages.max(2)
    }

    /// Bytes of lists and scores for sequences of up to `pages` pages.
    fn bytes(config: &ModelConfig, slots: usize, pages: usize) -> [usize; 2] {
        let heads = slots * config.kv_heads;
        [config.layers * heads * Lists::pitch(pages) * 4, heads * pages.max(1) * 4]
    }

    fn new(device: &Arc<Device>, config: &ModelConfig, slots: usize, pages: usize) -> Result<Lists> {
        let [lists, scores] = Lists::bytes(config, slots, pages);
        Ok(Lists { lists: device.allocate(lists)?, scores: device.allocate(scores)?, pitch: Lists::pitch(pages) })
    }
}

/// How the step under way is laid out in the description.
#[derive(Clone, Debug, Default)]
struct Plan {
    passes: Vec<AttendPass>,
    places: Vec<Places>,
    rows: u64,
    cos_sin: u64,
    /// Choices of page lists to make, and their largest page count; empty where lists stand.
    choices: u64,
    choosing: usize,
    choosing_pages: usize,
    /// The last product waits in y to be added by the next norm.
    pending: bool,
    /// The step drafts: nobody looks at what it flags.
    drafts: bool,
}

/// Sizes in bytes that [`plan`] predicts and `load` allocates.
struct Sizes {
    rows: usize,
    y: usize,
    logits: usize,
    description: usize,
    partial_rows: usize,
}

impl Sizes {
    fn new(config: &ModelConfig, options: &Options, partial_rows: usize) -> Sizes {
        let rows = options.step_rows.max(1);
        let widest = (config.q_width() + 2 * config.kv_width()).max(2 * config.intermediate).max(config.hidden);
        // Spans and parts: at most one span per row; a row's group is cut into parts of eight rows at the least.
        let per_row = size_of::<DeviceRow>()
            + config.head_dim * 4
            + size_of::<Merged>()
            + size_of::<Span>()
            + (config.group().div_ceil(8) + 1) * size_of::<AttendPart>()
            + size_of::<Choice>();
        Sizes {
            rows,
            y: rows * widest * 4,
            logits: rows * config.vocab * 4,
            // As many rows again are drafted as are verified; every piece begins at a multiple of 16, and a step has three, and three per pass.
            description: 2 * rows * per_row
                + options.slots * TURN_BYTES
                + (GAMMA_MAX + 1) * 16 * (4 + 3 * rows.div_ceil(PASS_ROWS)),
            partial_rows,
        }
    }

    /// Of a step in all; `head` is the number format of the model's head.
    fn step_bytes(&self, config: &ModelConfig, head: Dtype) -> usize {
        let dtype = config.dtype;
        let inputs =
            [(config.hidden, dtype), (config.q_width(), dtype), (config.intermediate, dtype), (config.hidden, head)];
        let inputs: usize =
            inputs.iter().map(|&(width, dtype)| Input::bytes(self.rows, width, dtype).iter().sum::<usize>()).sum();
        self.rows * config.hidden * 4
            + inputs
            + self.y
            + self.rows * config.q_width() * 2
            + self.logits
            + self.partial_rows * (config.head_dim * 4 + 8)
            + self.description
    }
}

/// Tokens of a prompt whose hidden states, keys and values have memory of their own. Longer ones put them where the draft weights are, which are made anew
/// before the next draft: some hundredths of a second, against half a second and more for such a prompt.
const TOKENS_OWN: usize = 16_384;

/// Bytes of hidden states, and of one layer's keys and values.
fn kept_bytes(config: &ModelConfig, tokens: usize) -> [usize; 2] {
    [tokens * config.hidden * 4, tokens * 2 * config.kv_width() * 2]
}

/// Tokens of hidden states, and of keys and values, with memory of their own: all, unless those of prompts of more than `most` fit where the draft
/// weights are, the hidden states first. With several slots others draft between the chunks of a prompt, and nothing is lent.
fn tokens_own(config: &ModelConfig, options: &Options, most: usize) -> [usize; 2] {
    let all = options.prompt_capacity.max(1);
    let [hidden, scratch] = kept_bytes(config, all);
    let room = if options.slots > 1 { 0 } else { weights::draft_bytes(config, options.draft_weights) };
    [hidden, hidden + scratch].map(|bytes| if bytes <= room { all.min(most) } else { all })
}

/// Bytes of a prompt's activations: two kept for every token, two of every token, the others for a block.
fn prompt_bytes(config: &ModelConfig, options: &Options, own: [usize; 2]) -> [usize; 8] {
    let (tokens, rows, element) = (options.prompt_capacity.max(1), options.block_rows.max(1), config.dtype.bytes());
    let read = readable(rows);
    [
        kept_bytes(config, own[0])[0],
        kept_bytes(config, own[1])[1],
        tokens * config.head_dim / 2 * 8,
        tokens * 4,
        read * padded(config.hidden) * element,
        rows * config.q_width() * 2,
        read * padded(config.q_width()) * element,
        read * padded(config.intermediate) * element,
    ]
}

/// Tokens of a slot's window: γ drafted ones around the emitted one, or a step's rows when nothing drafts, which are one sequence's and no more
/// than its buffer holds beside two pages (docs/design/cache.md). All windows are read back every round.
fn window_pitch(options: &Options) -> usize {
    options.step_rows.clamp(GAMMA_MAX + 2, BUFFER_TOKENS - 2 * G)
}

/// Entries of a sequence's page table.
fn table_pitch(options: &Options) -> usize {
    pages(options.capacity).max(1)
}

/// Bytes of the page tables.
fn table_bytes(options: &Options) -> usize {
    options.slots * table_pitch(options) * 4
}

/// Shared memory of the kernels that quantise a page of heads of `d` channels, in bytes: the keys or values of a page in f16, and sums.
pub(crate) const fn page_shared(d: usize) -> usize {
    2 * G * d + 4096
}

/// Turns what kernels flagged since the last look into an error.
fn check_flag(flag: u32) -> Result<()> {
    Err(Error::not_finite(match flag {
        0 => return Ok(()),
        flag if flag & FLAG_WEIGHTS != 0 => "a weight is NaN or infinite, or its group does not fit half precision",
        flag if flag & FLAG_CACHE != 0 => "keys or values are NaN, infinite or beyond half precision",
        flag if flag & FLAG_LOGITS != 0 => "logits are NaN or infinite",
        _ => "a kernel found values that are not finite",
    }))
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
        weights::check_weights(options.weights)?;
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

    fn slot(&self, slot: usize) -> Result<&Slot> {
        let found = self.slots.get(slot).and_then(Option::as_ref);
        found.ok_or_else(|| Error::internal(format!("slot {slot} is not open")))
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

    fn cache_layer(&self, layer: usize) -> CacheLayer {
        let heads = self.config.kv_heads;
        let d = self.config.head_dim;
        let pages = self.cache.pages * heads * layer;
        let at = |pool: &Option<Buffer>, bytes: usize| pool.as_ref().map_or(0, |pool| pool.at(pages * bytes));
        let ring = layer * self.options.slots * heads * BUFFER_TOKENS * d * 2;
        CacheLayer {
            upper: at(&self.cache.upper, Layout::Cuda.upper_bytes(d)),
            lower: at(&self.cache.lower, Layout::Cuda.lower_bytes(d)),
            full: at(&self.cache.full, 4 * G * d),
            ring_k: self.cache.ring_k.at(ring),
            ring_v: self.cache.ring_v.at(ring),
            lists: self.lists.lists.at(layer * self.options.slots * heads * self.lists.pitch * 4),
        }
    }

    /// Describes a single step to the device: one copy.
    fn begin(&mut self, step: &Step) -> Result<()> {
        self.stage()?;
        let mut at = 0;
        self.plan = self.describe(step, &mut at)?;
        self.plan.drafts = step.weights == Weights::Draft;
        self.send(at)
    }

    /// Where the step under way flags keys and values that are not numbers.
    fn step_flag(&self) -> u64 {
        if self.plan.drafts { self.sampling.draft_flag() } else { self.sampling.flag() }
    }

    /// Makes the next staging buffer free to write.
    fn stage(&mut self) -> Result<()> {
        if self.staged == STAGES {
            self.device.synchronize()?;
            self.staged = 0;
        }
        Ok(())
    }

    /// Queues the copy of the first `bytes` of the staging buffer.
    fn send(&mut self, bytes: usize) -> Result<()> {
        // SAFETY: a staging buffer is written to again when `stage` or the end of a round has waited for its copy.
        unsafe { self.step.description.write_pinned(0, &self.step.staging[self.staged], 0, bytes)? };
        self.staged += 1;
        Ok(())
    }

    /// Writes what describes a step into the staging buffer from `at` on.
    fn describe(&mut self, step: &Step, at: &mut usize) -> Result<Plan> {
        let rows = step.rows;
        if rows.is_empty() || rows.len() > self.options.step_rows {
            return Err(Error::internal(format!(
                "a step of {} rows where {} are prepared",
                rows.len(),
                self.options.step_rows
            )));
        }
        let kept = match step.view {
            View::Upper => self.options.planes.upper,
            View::Both => self.options.planes.lower,
            View::Full => self.options.planes.full,
        };
        if !kept {
            return Err(Error::internal(format!(
                "view {:?} of a cache that keeps {:?}",
                step.view, self.options.planes
            )));
        }
        let choices = self.choose_lists(step)?;
        let with_lists = step.pages != Pages::All;
        for row in rows {
            if row.offset >= self.sampling.pitch() || row.position / G > self.slot(row.slot)?.pages.len() {
                return Err(Error::internal(format!("row {row:?} is beyond its slot")));
            }
        }
        let slots = &self.slots;
        let chosen = |slot: usize| slots.get(slot)?.as_ref()?.chosen.filter(|_| with_lists);
        let fresh = |slot: usize| choices.iter().any(|choice| choice.slot as usize == slot);
        let passes = self.attend.plan(step.view, rows, chosen, fresh)?;

        let half = self.config.head_dim / 2;
        let mut writer = Writer { pinned: &mut self.step.staging[self.staged], at: *at };
        let sampling = &self.sampling;
        let device_rows: Vec<DeviceRow> = rows
            .iter()
            .map(|row| DeviceRow {
                slot: row.slot as i32,
                offset: row.offset as i32,
                position: row.position as i32,
                token: sampling.token(row.slot, row.offset),
            })
            .collect();
        let base = self.step.description.at(0);
        let mut plan = Plan { rows: base + writer.put(&device_rows)? as u64, ..Plan::default() };
        let (mut cos, mut sin) = (vec![0.0f32; half], vec![0.0f32; half]);
        let mut angles = Vec::with_capacity(rows.len() * half * 2);
        for row in rows {
            self.rope.fill(row.position, row.position + 1, &mut cos, &mut sin);
            angles.extend(cos.iter().zip(&sin).flat_map(|(c, s)| [*c, *s]));
        }
        plan.cos_sin = base + writer.put(&angles)? as u64;
        plan.choices = base + writer.put(&choices)? as u64;
        plan.choosing = choices.len();
        // In steps, so that rounds stay alike while a text grows by a few pages; scores beyond a sequence's pages are not made.
        let pages = choices.iter().map(|choice| choice.pages as usize).max().unwrap_or(0);
        plan.choosing_pages = pages.next_multiple_of(64).min(self.cache.pitch);
        for pass in &passes {
            plan.places.push(Places {
                spans: base + writer.put(&pass.spans)? as u64,
                parts: base + writer.put(&pass.parts)? as u64,
                merged: base + writer.put(&pass.merged)? as u64,
                tables: self.cache.tables.at(0),
                table_pitch: self.cache.pitch,
                list_pitch: self.lists.pitch,
                partial: self.step.partial.at(0),
                extremes: self.step.extremes.at(0),
            });
        }
        *at = writer.at;
        plan.passes = passes;
        Ok(plan)
    }

    /// Entries of a list that was asked for `n` pages: the first and the newest are always in, and there are no more than of a sequence.
    fn listed(&self, n: usize) -> usize {
        n.clamp(2, self.lists.pitch)
    }

    /// Which lists of pages a draft step chooses anew, and for which rows; notes what each slot reads from now on.
    fn choose_lists(&mut self, step: &Step) -> Result<Vec<Choice>> {
        let n = match step.pages {
            Pages::All => return Ok(Vec::new()),
            Pages::Window(n) | Pages::Best(n) => self.listed(n),
        };
        let mut choices = Vec::new();
        for (index, row) in step.rows.iter().enumerate() {
            let visible = visible_pages(row.position);
            let Some(slot) = self.slots.get_mut(row.slot).and_then(Option::as_mut) else {
                return Err(Error::internal(format!("slot {} is not open", row.slot)));
            };
            if step.choose_pages || slot.chosen.is_none() {
                // Where all would be on the list there is none.
                slot.chosen = (visible > n).then_some(Chosen { listed: n, visible });
                if slot.chosen.is_some() {
                    choices.push(Choice { row: index as i32, slot: row.slot as i32, pages: visible as i32 });
                }
            }
        }
        Ok(choices)
    }

    /// hidden += y where a product waits, then the norm, into the input type of a product.
    #[expect(clippy::too_many_arguments, reason = "a launch")]
    fn norm(
        &self,
        rows: usize,
        weight: &Buffer,
        bias: u64,
        input: &Input,
        kernel: Kernel,
        quantised: bool,
        hidden: u64,
    ) -> Result<()> {
        let (width, eps) = (self.config.hidden, self.config.rms_eps);
        let y = if self.plan.pending { self.step.y.at(0) } else { 0 };
        let bias = if self.plan.pending { bias } else { 0 };
        if quantised {
            let arguments = args![hidden, y, bias, weight, &input.x8, &input.xs, eps, width, input.pitch8()];
            self.launch(self.kernels.norm_i8, [rows, 1, 1], NORM_THREADS, 0, &arguments)
        } else {
            let arguments = args![hidden, y, bias, weight, &input.x, eps, width, input.pitch()];
            self.launch(kernel, [rows, 1, 1], NORM_THREADS, 0, &arguments)
        }
    }

    /// y = input · weightsᵀ by the draft's weights where it has some.
    fn product(&self, full: &Matrix, draft: Option<&Quantised>, input: &Input, y: u64, rows: usize) -> Result<()> {
        // SAFETY: inputs and outputs are this backend's, with room for `step_rows` rows.
        unsafe {
            match draft {
                Some(draft) => self.linear.run_quantised(draft, input.x8.at(0), input.xs.at(0), y, rows),
                None => self.linear.run(full, input.x.at(0), y, rows),
            }
        }
    }

    /// The kernels of a draft step that takes along what lies between its products, where it can: all weights in four bits, few rows.
    fn together(&self, step: &Step) -> Option<&Draft> {
        let widest = self.config.hidden.max(self.config.q_width()).max(self.config.intermediate);
        let of_draft = step.weights == Weights::Draft && self.options.draft_weights == DraftWeights::Int4;
        self.draft.as_ref().filter(|draft| of_draft && draft.takes(widest, step.rows.len()))
    }

    /// The hidden stream of a step ahead of a norm.
    fn stream(&self, weight: &Buffer) -> Hidden {
        let (eps, width) = (self.config.rms_eps, self.config.hidden);
        Hidden { address: self.step.hidden.at(0), weight: weight.at(0), eps, width }
    }

    fn layer(&self, layer: usize) -> Result<&weights::Layer> {
        self.weights.layers.get(layer).ok_or_else(|| Error::internal(format!("layer {layer} does not exist")))
    }

    /// Addresses of hidden states, and of keys and values, of the prompt under way.
    fn prompt_kept(&self) -> [u64; 2] {
        let drafts = self.weights.drafts.as_ref().map_or(0, |drafts| drafts.at(0));
        let [hidden, _] = kept_bytes(&self.config, self.options.prompt_capacity);
        let prompt = &self.prompt;
        [
            if prompt.borrows[0] { drafts } else { prompt.hidden.at(0) },
            if prompt.borrows[1] { drafts + hidden as u64 } else { prompt.scratch.at(0) },
        ]
    }

    /// Address of a prompt row's hidden state.
    fn prompt_hidden(&self, row: usize) -> u64 {
        self.prompt_kept()[0] + (row * self.config.hidden * 4) as u64
    }

    /// Address of a prompt row's keys and values.
    fn prompt_scratch(&self, row: usize) -> u64 {
        self.prompt_kept()[1] + (row * 2 * self.config.kv_width() * 2) as u64
    }

    /// Makes the draft weights anew where a prompt was in their place, and waits: kernels of a draft read weights before the kernel ahead has ended.
    fn restore_drafts(&mut self) -> Result<()> {
        if self.overwritten {
            self.weights.quantise(&self.linear, self.sampling.shared())?;
            self.device.synchronize()?;
            self.overwritten = false;
        }
        Ok(())
    }

    fn step_embed(&self, step: &Step) -> Result<()> {
        let arguments = args![
            self.plan.rows,
            self.sampling.windows(),
            self.sampling.pitch(),
            0u64,
            &self.weights.embedding.buffer,
            &self.step.hidden,
            self.config.hidden,
            self.config.vocab,
        ];
        // Without overlap: kernels of a step read ahead of one another what earlier steps left, so those have ended before its first kernel begins.
        let launch = Launch { grid: [step.rows.len() as u32, 1, 1], block: 256, shared: 0, overlap: false };
        // SAFETY: rows, windows and the hidden stream have room for the rows of a step.
        unsafe { self.device.launch(self.kernels.embed, launch, &arguments) }
    }

    /// Queues a whole step that was described, up to its logits.
    fn queue(&mut self, step: &Step, plan: &Plan) -> Result<()> {
        self.plan = plan.clone();
        let pass = Pass::Step(step);
        self.step_embed(step)?;
        for layer in 0..self.config.layers {
            self.qkv(layer, &pass)?;
            self.attend(layer, &pass)?;
            self.output(layer, &pass)?;
            self.gate_up(layer, &pass)?;
            self.down(layer, &pass)?;
        }
        self.head(&pass)
    }

    /// Queues a round: draft steps with their choices, the verification and its judgement of `turns`; without turns draft steps alone. `recording`: into
    /// a graph.
    fn queue_round(
        &mut self,
        round: &[(Step, Plan)],
        turns: Option<(u64, usize)>,
        manner: Manner,
        recording: bool,
    ) -> Result<()> {
        let logits = self.step.logits.at(0);
        let (drafts, verify) = round.split_at(round.len() - usize::from(turns.is_some()));
        // What is drafted by itself the host times.
        let timed = !drafts.is_empty() && turns.is_some();
        if timed {
            self.clock.start.set(recording)?;
        }
        for (step, plan) in drafts {
            self.queue(step, plan)?;
            self.sampling.propose(step.rows.len(), plan.rows, logits, manner)?;
        }
        if timed {
            self.clock.drafted.set(recording)?;
        }
        for ((step, plan), turns) in verify.iter().zip(turns) {
            self.queue(step, plan)?;
            self.sampling.judge(turns.0, turns.1, step.rows.len(), plan.rows, logits, manner)?;
        }
        Ok(())
    }

    /// Runs what [`CudaBackend::queue_round`] queues, as a graph where two like it ran before: some hundred launches per step become one.
    fn run(&mut self, round: &[(Step, Plan)], turns: Option<(u64, usize)>, manner: Manner) -> Result<()> {
        let (turns_at, count) = turns.unwrap_or_default();
        let how = u64::from(manner.warm) | u64::from(manner.rejects) << 1;
        let mut key = vec![turns_at, count as u64, how, self.sampling.draft_address()];
        for (step, plan) in round {
            self.key(step, plan, &mut key);
        }
        match self.recorded.find(&key) {
            // SAFETY: everything recorded belongs to this backend; buffers that may be replaced are part of the key.
            Some(Kind::Graph(graph)) => unsafe { graph.launch() },
            Some(Kind::Refused) => self.queue_round(round, turns, manner, false),
            None if self.device.one_by_one => self.queue_round(round, turns, manner, false),
            None => {
                self.recorded.note(key, Kind::Seen, round.len());
                self.queue_round(round, turns, manner, false)
            }
            Some(Kind::Seen) => {
                // Launched one by one once more, and recorded while the GPU works on it: building a graph of thousands of launches
                // takes milliseconds.
                self.queue_round(round, turns, manner, false)?;
                let device = self.device.clone();
                // The plan counts no graphs. Where memory for one is lacking, or the driver refuses, the round is slower and nothing else.
                let kind = match device.record(|| self.queue_round(round, turns, manner, true)) {
                    Ok(graph) => Kind::Graph(graph),
                    Err(error) if matches!(error.kind, ErrorKind::DoesNotFit | ErrorKind::Device) => Kind::Refused,
                    Err(error) => return Err(error),
                };
                self.recorded.note(key, kind, round.len());
                Ok(())
            }
        }
    }

    /// Drafts one sequence's tokens where the host looks at each: a step begins when it has seen the lead of the one before. The GPU waits for that a
    /// hundredth of a millisecond, and what is not drafted in vain is worth more.
    fn draft_watched(&mut self, plan: &DraftPlan, turn: &mut Turn) -> Result<()> {
        (self.hooks.poll)()?;
        let DraftPlan { weights, view, pages } = *plan;
        let manner = self.sampling.learn(std::slice::from_ref(turn))?;
        while turn.leads.len() < turn.gamma {
            let offset = turn.leads.len();
            let rows = [Row { slot: turn.slot, offset, position: turn.committed + offset }];
            let step = Step { weights, view, pages, choose_pages: offset == 0, rows: &rows };
            // Every step is described at the same place, so that all of them are one graph.
            self.stage()?;
            let mut at = 0;
            let mut plan = self.describe(&step, &mut at)?;
            plan.drafts = true;
            self.sampling.drafts(turn.slot, offset);
            self.send(at)?;
            self.run(&[(step, plan)], None, manner)?;
            turn.drafted(self.sampling.lead()?);
            // The host has waited for everything it sent.
            self.staged = 0;
        }
        Ok(())
    }

    /// Everything that decides which kernels a step launches, with which grids and addresses.
    fn key(&self, step: &Step, plan: &Plan, key: &mut Vec<u64>) {
        let (kind, n) = match step.pages {
            Pages::All => (0, 0),
            Pages::Window(n) => (1, n),
            Pages::Best(n) => (2, n),
        };
        key.extend([
            STEP,
            step.weights as u64,
            step.view as u64,
            kind,
            n as u64,
            step.rows.len() as u64,
            plan.rows,
            plan.cos_sin,
            plan.choices,
            plan.choosing as u64,
            plan.choosing_pages as u64,
        ]);
        for (pass, places) in plan.passes.iter().zip(&plan.places) {
            key.extend(pass.launches());
            key.extend([places.spans, places.parts, places.merged, places.list_pitch as u64]);
        }
    }

    /// The norm ahead of attention, which adds what the layer before left in y, and the product.
    fn step_norm_qkv(&self, layer: usize, draft: Option<&Quantised>, rows: usize) -> Result<()> {
        let (weights, space) = (self.layer(layer)?, &self.step);
        let before = layer.checked_sub(1).map(|before| self.layer(before)).transpose()?;
        let bias = before.map_or(0, |before| address(&before.down_bias));
        self.norm(
            rows,
            &weights.attention_norm,
            bias,
            &space.normed,
            self.kernels.norm[0],
            draft.is_some(),
            space.hidden.at(0),
        )?;
        self.product(&weights.qkv, draft, &space.normed, space.y.at(0), rows)
    }

    fn step_qkv(&self, layer: usize, step: &Step) -> Result<()> {
        let weights = self.layer(layer)?;
        let draft = weights.draft.qkv.as_ref().filter(|_| step.weights == Weights::Draft);
        let (rows, config) = (step.rows.len(), &self.config);
        let space = &self.step;
        let scale = std::f32::consts::LOG2_E / (config.head_dim as f32).sqrt();
        if let (Some(together), Some(draft)) = (self.together(step), draft) {
            let hidden = self.stream(&weights.attention_norm);
            if weights.head_norms.is_none() {
                let heads = Heads {
                    rows: self.plan.rows,
                    bias: address(&weights.qkv_bias),
                    cos_sin: self.plan.cos_sin,
                    q: space.q.at(0),
                    rings: [self.cache.ring_k.at(0), self.cache.ring_v.at(0)],
                    scale,
                    heads: [config.heads, config.kv_heads],
                    layer,
                    slots: self.options.slots,
                    flag: self.step_flag(),
                };
                // SAFETY: rows, angles, q and rings are this backend's and have room for `step_rows` rows.
                return unsafe { together.heads(draft, hidden, &heads, rows) };
            }
            // SAFETY: as above.
            unsafe { together.rows(draft, hidden, space.y.at(0), rows)? };
        } else {
            self.step_norm_qkv(layer, draft, rows)?;
        }
        let (q_norm, k_norm) = weights.head_norms.as_ref().map_or((0, 0), |(q, k)| (q.at(0), k.at(0)));
        let arguments = args![
            self.plan.rows,
            &space.y,
            address(&weights.qkv_bias),
            q_norm,
            k_norm,
            self.plan.cos_sin,
            &space.q,
            &self.cache.ring_k,
            &self.cache.ring_v,
            config.rms_eps,
            scale,
            config.heads,
            config.kv_heads,
            layer,
            self.options.slots,
            usize::from(draft.is_some()),
            self.step_flag(),
        ];
        self.launch(
            self.kernels.append,
            [(config.heads + 2 * config.kv_heads).div_ceil(4), rows, 1],
            128,
            0,
            &arguments,
        )
    }

    fn step_attend(&self, layer: usize, step: &Step) -> Result<()> {
        let weights = self.layer(layer)?;
        let draft = weights.draft.output.is_some() && step.weights == Weights::Draft;
        let cache = self.cache_layer(layer);
        let space = &self.step;
        if let (Some(places), true) = (self.plan.places.first(), self.plan.choosing > 0) {
            let (n, scores) = match step.pages {
                // Quantised keys are what is scored; a cache without them keeps to the window.
                Pages::Best(n) if self.cache.upper.is_some() => (n, self.lists.scores.at(0)),
                Pages::Best(n) | Pages::Window(n) => (n, 0),
                Pages::All => (0, 0),
            };
            let plan = &self.plan;
            // SAFETY: choices, q, scores and lists are this backend's and have room for every slot.
            unsafe {
                self.attend.choose(
                    plan.choices,
                    plan.choosing,
                    plan.choosing_pages,
                    self.listed(n),
                    space.q.at(0),
                    scores,
                    &cache,
                    places,
                )?;
            }
        }
        let beside = self.together(step).is_some();
        for (index, (pass, places)) in self.plan.passes.iter().zip(&self.plan.places).enumerate() {
            let output = &weights.output.buffer;
            // Draft products ask for their weights themselves, and ahead of another pass there is no product.
            let none = draft || index + 1 < self.plan.passes.len();
            let around = Around { beside, behind: if none { (0, 0) } else { (output.at(0), output.bytes()) } };
            // SAFETY: the description holds the pass, and the partial results have room for every pass of at most PASS_ROWS rows.
            unsafe {
                self.attend.run(step.view, pass, space.q.at(0), &cache, places, around)?;
                let input = &space.attended;
                if draft {
                    self.attend.merge(pass, None, input.x8.at(0), input.xs.at(0), input.pitch8(), places)?;
                } else {
                    self.attend.merge(pass, Some(weights.output.dtype), input.x.at(0), 0, input.pitch(), places)?;
                }
            }
        }
        Ok(())
    }

    fn step_gate_up(&self, layer: usize, step: &Step) -> Result<()> {
        let weights = self.layer(layer)?;
        let drafting = step.weights == Weights::Draft;
        let draft = weights.draft.gate_up.as_ref().filter(|_| drafting);
        let (rows, width) = (step.rows.len(), self.config.intermediate);
        let space = &self.step;
        if let (Some(together), Some(draft)) = (self.together(step), draft) {
            let (hidden, gated) = (self.stream(&weights.mlp_norm), &space.gated);
            // SAFETY: the buffers are this backend's and have room for `step_rows` rows.
            return unsafe {
                together.gated(draft, hidden, address(&weights.gate_up_bias), gated.x.at(0), gated.pitch(), rows)
            };
        }
        let bias = address(&weights.output_bias);
        self.norm(
            rows,
            &weights.mlp_norm,
            bias,
            &space.normed,
            self.kernels.norm[0],
            draft.is_some(),
            space.hidden.at(0),
        )?;
        self.product(&weights.gate_up, draft, &space.normed, space.y.at(0), rows)?;
        let (bias, gated) = (argument(&weights.gate_up_bias), &space.gated);
        let grid = [width.div_ceil(1024), rows, 1];
        if drafting && weights.draft.down.is_some() {
            let y = crate::device::Arg::from(&space.y);
            let arguments = [y, bias, (&gated.x8).into(), (&gated.xs).into(), width.into(), gated.pitch8().into()];
            self.launch(self.kernels.silu_i8, grid, 256, 0, &arguments)
        } else {
            let arguments = [(&space.y).into(), bias, (&gated.x).into(), width.into(), gated.pitch().into()];
            self.launch(self.kernels.silu, grid, 256, 0, &arguments)
        }
    }

    /// Waits for the verdicts of a round.
    fn conclude(&mut self, turns: &[Turn]) -> Result<Vec<Verdict>> {
        let (verdicts, flag) = self.sampling.verdicts(turns)?;
        self.staged = 0;
        self.plan.pending = false;
        check_flag(flag)?;
        Ok(verdicts)
    }

    /// Waits for the device while the caller may interrupt.
    fn wait(&mut self) -> Result<()> {
        while !self.device.idle()? {
            (self.hooks.poll)()?;
            std::thread::sleep(LOOK_AGAIN);
        }
        self.staged = 0;
        Ok(())
    }

    fn prompt_embed(&mut self, block: &Block) -> Result<()> {
        let end = block.start + block.rows;
        if block.prompt.len() > self.options.prompt_capacity || end > block.prompt.len() {
            return Err(Error::internal(format!(
                "a prompt of {} tokens where {} fit",
                block.prompt.len(),
                self.options.prompt_capacity
            )));
        }
        if block.start == 0 {
            self.prompt.borrows = self.prompt.own.map(|tokens| block.prompt.len() > tokens);
        }
        self.overwritten |= self.prompt.borrows.contains(&true);
        self.prompting = true;
        self.prompt.tokens.write(block.start * 4, &block.prompt[block.start..end])?;
        let half = self.config.head_dim / 2;
        let mut angles = vec![0.0f32; block.rows * half * 2];
        let (mut cos, mut sin) = (vec![0.0f32; half], vec![0.0f32; half]);
        for (row, out) in angles.chunks_mut(half * 2).enumerate() {
            self.rope.fill(block.start + row, block.prompt.len(), &mut cos, &mut sin);
            for (pair, (c, s)) in out.chunks_mut(2).zip(cos.iter().zip(&sin)) {
                pair.copy_from_slice(&[*c, *s]);
            }
        }
        self.prompt.cos_sin.write(block.start * half * 8, &angles)?;
        let arguments = args![
            0u64,
            0u64,
            0usize,
            self.prompt.tokens.at(block.start * 4),
            &self.weights.embedding.buffer,
            self.prompt_hidden(block.start),
            self.config.hidden,
            self.config.vocab,
        ];
        self.launch(self.kernels.embed, [block.rows, 1, 1], 256, 0, &arguments)
    }

    /// RMSNorm of a block's hidden states into the block's product input.
    fn prompt_norm(&self, block: &Block, weight: &Buffer) -> Result<()> {
        let (width, pitch) = (self.config.hidden, padded(self.config.hidden));
        let arguments = args![
            self.prompt_hidden(block.start),
            0u64,
            0u64,
            weight,
            &self.prompt.normed,
            self.config.rms_eps,
            width,
            pitch
        ];
        self.launch(self.kernels.norm[0], [block.rows, 1, 1], NORM_THREADS, 0, &arguments)
    }

    fn prompt_qkv(&self, layer: usize, block: &Block) -> Result<()> {
        let weights = self.layer(layer)?;
        self.prompt_norm(block, &weights.attention_norm)?;
        let norms = weights.head_norms.as_ref().map(|(q, k)| (q.at(0), k.at(0)));
        let bias = weights.qkv_bias.as_ref().map(|bias| bias.at(0));
        let prompt = &self.prompt;
        let cos_sin = prompt.cos_sin.at(block.start * self.config.head_dim / 2 * 8);
        let kv = self.prompt_scratch(block.start);
        // SAFETY: the buffers are this backend's and have room for `block_rows` rows and `prompt_capacity` tokens.
        unsafe {
            self.prefill.qkv(
                prompt.normed.at(0),
                weights.qkv.buffer.at(0),
                bias,
                norms,
                cos_sin,
                prompt.q.at(0),
                kv,
                self.sampling.flag(),
                block.rows,
            )
        }
    }
}

/// Lays values into a page-locked buffer, each aligned for the widest load.
struct Writer<'a> {
    pinned: &'a mut Pinned,
    at: usize,
}

impl Writer<'_> {
    fn put<T: Plain>(&mut self, values: &[T]) -> Result<usize> {
        let at = self.at.next_multiple_of(16);
        self.pinned.put(at, values)?;
        self.at = at + size_of_val(values);
        Ok(at)
    }
}

impl Cache {
    fn new(device: &Arc<Device>, config: &ModelConfig, options: &Options) -> Result<Cache> {
        let bytes = CacheBytes::of(config, options.planes, options.capacity, options.slots);
        let pool = |kept: bool, bytes: usize| if kept { device.allocate(bytes).map(Some) } else { Ok(None) };
        let per_slot = pages(options.capacity);
        let pitch = table_pitch(options);
        let count = options.slots * per_slot;
        Ok(Cache {
            upper: pool(options.planes.upper, bytes.upper_bytes)?,
            lower: pool(options.planes.lower, bytes.lower_bytes)?,
            full: pool(options.planes.full, bytes.full_bytes)?,
            ring_k: device.allocate(bytes.buffer_bytes / 2)?,
            ring_v: device.allocate(bytes.buffer_bytes / 2)?,
            tables: device.zeroed(table_bytes(options))?,
            pitch,
            pages: count,
            free: (0..count as i32).rev().collect(),
        })
    }

    /// Queues clearing a slot's rings. Places without a token are multiplied by probabilities of zero, so they must hold numbers, and a sequence that ended
    /// because its keys or values were none has left them there.
    fn clean(&self, slot: usize, config: &ModelConfig, slots: usize) -> Result<()> {
        let bytes = config.kv_heads * BUFFER_TOKENS * config.head_dim * size_of::<u16>();
        [&self.ring_k, &self.ring_v]
            .into_iter()
            .try_for_each(|ring| ring.fill_rows(0, slot * bytes, bytes, slots * bytes, config.layers))
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
