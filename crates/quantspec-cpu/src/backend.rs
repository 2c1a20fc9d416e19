//! The CPU as a [`Backend`].

use crate::attend::{self, CHUNK, ITEM_ROWS, Partials, Shape, State};
use crate::cache::{Cache, Plan};
use crate::dispatch::{self, Choice, Simd};
use crate::elementwise::{rms_norm, rope, silu_mul};
use crate::hierarchy;
use crate::lanes::{f16_bits, f16_is_finite};
use crate::linear::{self, Input, PANEL, Weight, row_stride};
use crate::memory::{Array, Parts};
use crate::pool::{Deal, Pool, part, part_by_cost};
use crate::prompt::{Machine, Prompt};
use crate::quantize;
use crate::w4::Acts;
use crate::weights::{self, Linear, Model, QkvPlaces};
use quantspec_core::cache::{G, buffer_slot, visible_pages};
use quantspec_core::config::{ModelConfig, Pages, Rounding, TargetWeights, Weights};
use quantspec_core::sample::{Sampler, Stream, check_finite, choose};
use quantspec_core::verify::{Judge, Verdict};
use quantspec_core::{Error, Result};
use quantspec_model::backend::{Backend, Hooks, Memory, Options, Pass, Row, Step, Turn};
use quantspec_model::checkpoint::Checkpoint;
use quantspec_model::rope::RopeTable;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Pages one thread quantises between two calls of the poll hook: about a millisecond each on the slowest path.
const FLUSH_PAGES: usize = 32;

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

/// Activations of a step.
struct Rows {
    places: QkvPlaces,
    /// `[row][row_stride(hidden)]`
    hidden: Array<f32>,
    /// Input of a matrix, normalised or not, `[row][row_stride(k)]`: f32, BF16, int8 for draft tiles and limbs for planes.
    x: Array<f32>,
    x16: Array<u16>,
    x8: Acts,
    limbs: hierarchy::Acts,
    /// `[row][places.width]`
    qkv: Array<f32>,
    /// `[row][row_stride(q_width)]`
    attended: Array<f32>,
    /// `[row][row_stride(intermediate)]`
    ffn: Array<f32>,
    /// `[row][vocab]`
    logits: Array<f32>,
    /// `[row][D/2]`
    cos: Array<f32>,
    sin: Array<f32>,
    /// `[row][head][part][2 + D]`
    partials: Array<f32>,
    /// 0, 1, 2, …: the list of all pages.
    all: Vec<u32>,
}

/// Lengths of the arrays of [`Rows`].
struct Lengths {
    hidden: usize,
    x: usize,
    widest: usize,
    qkv: usize,
    attended: usize,
    ffn: usize,
    logits: usize,
    angles: usize,
    partials: usize,
    pages: usize,
    /// Rows and inputs of the activations in limbs: none without planes.
    limbs: (usize, usize),
}

impl Lengths {
    fn new(config: &ModelConfig, options: &Options) -> Lengths {
        let rows = options.step_rows.max(1);
        let widest = config.hidden.max(config.q_width()).max(config.intermediate);
        let pages = visible_pages(options.capacity);
        Lengths {
            hidden: rows * row_stride(config.hidden),
            x: rows * row_stride(widest),
            widest,
            qkv: rows * QkvPlaces::new(config).width,
            attended: rows * row_stride(config.q_width()),
            ffn: rows * row_stride(config.intermediate),
            logits: rows * config.vocab,
            angles: rows * config.head_dim / 2,
            partials: rows * config.heads * (pages.div_ceil(CHUNK) + 1) * (2 + config.head_dim),
            pages,
            limbs: if options.weights == TargetWeights::Checkpoint { (0, 0) } else { (rows, widest) },
        }
    }

    fn bytes(&self, rows: usize) -> usize {
        let floats =
            self.hidden + self.x + self.qkv + self.attended + self.ffn + self.logits + 2 * self.angles + self.partials;
        4 * (floats + self.pages)
            + 2 * self.x
            + Acts::bytes_of(rows, self.widest)
            + hierarchy::Acts::bytes_of(self.limbs.0, self.limbs.1)
    }
}

impl Rows {
    /// Bytes held.
    fn bytes(&self) -> usize {
        let floats = [
            &self.hidden,
            &self.x,
            &self.qkv,
            &self.attended,
            &self.ffn,
            &self.logits,
            &self.cos,
            &self.sin,
            &self.partials,
        ];
        floats.iter().map(|array| array.bytes()).sum::<usize>()
            + self.x16.bytes()
            + self.x8.bytes()
            + self.limbs.bytes()
            + size_of_val(&self.all[..])
    }
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
    let (weights_bytes, draft_weights_bytes) = weights::plan(checkpoint, options.weights, options.draft_weights);
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
        let model = Model::load(checkpoint, options.weights, options.draft_weights, choice.simd, &pool, &mut hooks)?;
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

    /// Checks that a step's rows fit and that their slots are open.
    fn check(&self, step: &Step) -> Result<()> {
        if step.rows.is_empty() || step.rows.len() > self.options.step_rows {
            return Err(Error::internal(format!(
                "a step of {} rows; there is room for {}",
                step.rows.len(),
                self.options.step_rows
            )));
        }
        for row in step.rows {
            match self.open.get(row.slot) {
                Some(Some(capacity)) if row.position < *capacity => (),
                Some(Some(capacity)) => {
                    return Err(Error::does_not_fit(
                        format!(
                            "position {} of slot {} is beyond its capacity of {capacity} tokens",
                            row.position, row.slot
                        ),
                        "open the sequence with a larger capacity",
                    ));
                }
                _ => return Err(Error::internal(format!("slot {} is not open", row.slot))),
            }
        }
        Ok(())
    }

    fn slot(&self, slot: usize) -> Result<usize> {
        self.open.get(slot).copied().flatten().ok_or_else(|| Error::internal(format!("slot {slot} is not open")))
    }

    fn check_block(&self, block: &quantspec_model::backend::Block) -> Result<()> {
        let capacity = self.slot(block.slot)?;
        if block.prompt.len() > capacity {
            return Err(Error::does_not_fit(
                format!("a prompt of {} tokens in a slot of {capacity}", block.prompt.len()),
                "open the sequence with a larger capacity",
            ));
        }
        Ok(())
    }

    /// Token of a row of a step.
    fn token(&self, row: &Row) -> Result<u32> {
        let token = self.windows[row.slot].get(row.offset).copied();
        token
            .filter(|token| (*token as usize) < self.config.vocab)
            .ok_or_else(|| Error::internal(format!("slot {} has no token at offset {}", row.slot, row.offset)))
    }

    fn embed_step(&mut self, step: &Step) -> Result<()> {
        self.check(step)?;
        let (hidden, half) = (self.config.hidden, self.config.head_dim / 2);
        for (j, row) in step.rows.iter().enumerate() {
            let token = self.token(row)? as usize;
            self.model.embed(token, &mut self.rows.hidden[j * row_stride(hidden)..][..hidden]);
            let angles = j * half..(j + 1) * half;
            let (cos, sin) = (&mut self.rows.cos[angles.clone()], &mut self.rows.sin[angles]);
            self.rope.fill(row.position, row.position + 1, cos, sin);
        }
        Ok(())
    }

    /// Threads that wait during the operations to come prepare to read this matrix, in units of `per` panels.
    fn will_read(&self, linear: &Linear, weights: Weights, per: usize) {
        let weight = linear.weight(weights);
        self.pool.will_read(|thread| weight.bytes_of_thread(per, thread, self.pool.threads()));
    }

    fn qkv_step(&mut self, index: usize, step: &Step) -> Result<()> {
        let (config, simd, m) = (&self.config, self.choice.simd, step.rows.len());
        let layer = &self.model.layers[index];
        self.will_read(&layer.output, step.weights, 1);
        self.rows.norm(simd, config, &layer.attention_norm, m);
        let places = self.rows.places;
        let (weight, input, out) = self.rows.input(simd, &layer.qkv, step.weights, Source::X, config.hidden, m);
        let out = Parts::new(out.qkv);
        let bias = &layer.qkv.bias;
        linear::run(&self.pool, simd, weight, input, m, 1, &|panel, tile| {
            for (j, tile) in tile.chunks_exact_mut(PANEL).enumerate() {
                add_bias(tile, bias, panel);
                // SAFETY: a panel is one unit of one thread.
                unsafe { out.slice(j * places.width + panel * PANEL, PANEL) }.copy_from_slice(tile);
            }
        })?;
        self.append(index, step)
    }

    /// Norms and RoPE of queries in place; keys and values go to the ring.
    fn append(&mut self, index: usize, step: &Step) -> Result<()> {
        let (config, simd, m) = (&self.config, self.choice.simd, step.rows.len());
        let layer = &self.model.layers[index];
        let (d, heads, kv_heads, places) = (config.head_dim, config.heads, config.kv_heads, self.rows.places);
        let shape = self.cache.plan.shape;
        let threads = self.pool.team(m * places.width);
        let (cos, sin) = (&self.rows.cos, &self.rows.sin);
        let qkv = Parts::new(&mut self.rows.qkv);
        let broken = AtomicBool::new(false);
        let at = |row: &Row, kv_head: usize| {
            let head = (row.slot * config.layers + index) * kv_heads + kv_head;
            (head * quantspec_core::cache::BUFFER_TOKENS / G + buffer_slot(row.position) / G) * shape.full_len()
        };
        let ring = Parts::new(&mut self.cache.ring);
        // An item is one KV head of all rows (they share pages of the ring), or one query head of one row.
        self.pool.run_team(threads, &|thread| {
            let mut halves = vec![0u16; 2 * d];
            for item in part(kv_heads + heads * m, thread, threads) {
                // SAFETY: heads of a row do not overlap, and each belongs to one item.
                let part = |j: usize, from: usize| unsafe { qkv.slice(j * places.width + from, d) };
                let turn = |j: usize, x: &mut [f32], norm: Option<&Vec<f32>>| {
                    if let Some(norm) = norm {
                        let before = x.to_vec();
                        rms_norm(simd, &before, norm, config.rms_eps, x);
                    }
                    rope(simd, x, &cos[j * d / 2..(j + 1) * d / 2], &sin[j * d / 2..(j + 1) * d / 2]);
                };
                if item >= kv_heads {
                    let (j, head) = ((item - kv_heads) / heads, (item - kv_heads) % heads);
                    turn(j, part(j, head * d), layer.qk_norm.as_ref().map(|norms| &norms.0));
                    continue;
                }
                for (j, row) in step.rows.iter().enumerate() {
                    let (key, value) = (part(j, places.key + item * d), part(j, places.value + item * d));
                    turn(j, key, layer.qk_norm.as_ref().map(|norms| &norms.1));
                    for (half, x) in halves.iter_mut().zip(key.iter().chain(value.iter())) {
                        *half = f16_bits(*x);
                    }
                    // Only numbers are stored: a later sequence multiplies what lies behind its end by zero.
                    for half in halves.iter_mut().filter(|half| !f16_is_finite(**half)) {
                        *half = 0;
                        broken.store(true, Relaxed);
                    }
                    // SAFETY: pages of a KV head belong to one item.
                    let page = unsafe { ring.slice(at(row, item), shape.full_len()) };
                    attend::put_token(page, d, row.position % G, &halves[..d], &halves[d..]);
                }
            }
        })?;
        if broken.load(Relaxed) {
            return Err(Error::not_finite(format!("keys or values of layer {index} are NaN or beyond half precision")));
        }
        Ok(())
    }

    /// Runs of rows of one slot: (first row, rows). A slot has one: what is kept for it belongs to one item.
    fn runs(step: &Step) -> Result<Vec<(usize, usize)>> {
        let mut runs: Vec<(usize, usize)> = Vec::new();
        for (j, row) in step.rows.iter().enumerate() {
            match runs.iter().position(|(first, _)| step.rows[*first].slot == row.slot) {
                None => runs.push((j, 1)),
                Some(run) if run + 1 == runs.len() => runs[run].1 += 1,
                Some(_) => return Err(Error::internal(format!("rows of slot {} lie apart", row.slot))),
            }
        }
        Ok(runs)
    }

    /// Chooses the pages of every KV head for a slot's first row: draft steps have one.
    fn choose_pages(&mut self, index: usize, step: &Step, runs: &[(usize, usize)]) -> Result<()> {
        let n = match step.pages {
            Pages::All => return Ok(()),
            Pages::Window(n) | Pages::Best(n) => n,
        };
        let (config, simd, threads) = (&self.config, self.choice.simd, self.pool.threads());
        let (d, kv_heads, group, shape) = (config.head_dim, config.kv_heads, config.group(), self.cache.plan.shape);
        let (cache, qkv, width, rounding) =
            (&self.cache, &self.rows.qkv, self.rows.places.width, self.options.rounding);
        let chosen = Parts::new(&mut self.chosen);
        self.pool.run(&|thread| {
            let mut bounds = Vec::new();
            for item in part(runs.len() * kv_heads, thread, threads) {
                let ((first, _), kv_head) = (runs[item / kv_heads], item % kv_heads);
                let row = &step.rows[first];
                let head = cache.head(row.slot, index, kv_head);
                // SAFETY: a slot is one run (`runs`), and a head of it one item.
                let (list, visible) = unsafe { &mut chosen.slice(head, 1)[0] };
                let now = visible_pages(row.position);
                if !step.choose_pages && *visible <= now && !(list.is_empty() && now > 0) {
                    // The last choice stays; pages that became visible since are read.
                    list.extend(*visible as u32..now as u32);
                    *visible = now;
                    continue;
                }
                let pages = match step.pages {
                    // Quantised keys are what is scored; a cache without them keeps to the window.
                    Pages::Best(_) if cache.planes().upper => {
                        let queries = &qkv[first * width + kv_head * group * d..][..group * d];
                        bounds.clear();
                        let upper = |page| cache.upper(head, page);
                        bounds.extend(attend::page_bounds(simd, shape, rounding, queries, now, upper));
                        best_pages(&bounds, n)
                    }
                    _ => quantspec_core::attend::window_pages(now, n),
                };
                list.clear();
                list.extend(pages.into_iter().map(|page| page as u32));
                *visible = now;
            }
        })
    }

    fn attend_step(&mut self, index: usize, step: &Step) -> Result<()> {
        self.cache.check(step.view)?;
        let runs = CpuBackend::runs(step)?;
        self.choose_pages(index, step, &runs)?;
        let (config, simd, threads) = (&self.config, self.choice.simd, self.pool.threads());
        let (d, heads, kv_heads, group) = (config.head_dim, config.heads, config.kv_heads, config.group());
        let (cache, all, chosen) = (&self.cache, &self.rows.all, &self.chosen);
        let list = |slot: usize, kv_head: usize, position: usize| -> &[u32] {
            let visible = visible_pages(position);
            match step.pages {
                Pages::All => &all[..visible],
                _ => {
                    let list = &chosen[cache.head(slot, index, kv_head)].0;
                    &list[..list.partition_point(|page| (*page as usize) < visible)]
                }
            }
        };
        let mut items = Vec::new();
        let mut parts = 1;
        for &(first, count) in &runs {
            for kv_head in 0..kv_heads {
                let (slot, last) = (step.rows[first].slot, step.rows[first + count - 1].position);
                let pages = list(slot, kv_head, last).len();
                parts = parts.max(pages.div_ceil(CHUNK) + 1);
                for chunk in 0..pages.div_ceil(CHUNK) + 1 {
                    for (from, rows) in linear::groups(count, ITEM_ROWS) {
                        items.push(Item { first: first + from, rows, kv_head, chunk: chunk.checked_sub(1), pages });
                    }
                }
            }
        }
        let (rounding, width) = (self.options.rounding, self.rows.places.width);
        let planes = attend::Planes::of(step.view, step.weights);
        let qkv = &self.rows.qkv;
        let partials = Partials { data: Parts::new(&mut self.rows.partials), heads, parts, d };
        let scale = std::f32::consts::LOG2_E / (d as f32).sqrt();
        let cost = |i: usize| items[i].cost(group);
        let states = Parts::new(&mut self.states);
        let context = Reads { simd, step, cache, planes, rounding, group };
        let deal = Deal::of((0..threads).map(|thread| part_by_cost(items.len(), thread, threads, cost)));
        self.pool.run(&|thread| {
            // SAFETY: one element per thread.
            let state = unsafe { &mut states.slice(thread, 1)[0] };
            while let Some(item) = deal.take(thread) {
                let item = &items[item];
                for r in 0..item.rows * group {
                    let (j, head) = (item.first + r / group, item.kv_head * group + r % group);
                    state.set_query(r, &qkv[j * width + head * d..][..d], scale);
                }
                state.reset(item.rows * group);
                let head = cache.head(step.rows[item.first].slot, index, item.kv_head);
                let list =
                    list(step.rows[item.first].slot, item.kv_head, step.rows[item.first + item.rows - 1].position);
                context.item(state, item, head, list);
                state.finish(item.rows * group, |r| {
                    let (j, head) = (item.first + r / group, item.kv_head * group + r % group);
                    // The recent tokens come last: a row's chunks before them are those its own position sees.
                    let part = item.chunk.unwrap_or(parts - 1);
                    // SAFETY: a row, head and part belong to one item.
                    unsafe { partials.at(j, head, part) }
                });
            }
        })?;
        // Merge.
        let stride = row_stride(config.q_width());
        let (partials, length) = (&self.rows.partials, 2 + d);
        let threads = self.pool.team(step.rows.len() * heads * parts * length);
        let out = Parts::new(&mut self.rows.attended);
        self.pool.run_team(threads, &|thread| {
            let mut gathered = vec![0f32; parts * length];
            for item in part(step.rows.len() * heads, thread, threads) {
                let (j, head) = (item / heads, item % heads);
                let row = &step.rows[j];
                let chunks = list(row.slot, head / group, row.position).len().div_ceil(CHUNK);
                let from = &partials[item * parts * length..][..parts * length];
                let gathered = &mut gathered[..(chunks + 1) * length];
                gathered[..chunks * length].copy_from_slice(&from[..chunks * length]);
                gathered[chunks * length..].copy_from_slice(&from[(parts - 1) * length..]);
                // SAFETY: a head of a row is one item.
                let out = unsafe { out.slice(j * stride + head * d, d) };
                attend::merge(simd, gathered, length, out);
            }
        })
    }

    /// Adds a matrix's output to the hidden states of a step.
    fn add(&mut self, index: usize, step: &Step, from: Source) -> Result<()> {
        let (config, simd, m) = (&self.config, self.choice.simd, step.rows.len());
        let layer = &self.model.layers[index];
        let after = self.model.layers.get(index + 1).map_or(&self.model.head, |layer| &layer.qkv);
        let (linear, k, (next, per)) = match from {
            Source::Attended => (&layer.output, config.q_width(), (&layer.gate_up, 2)),
            Source::X | Source::Ffn => (&layer.down, config.intermediate, (after, 1)),
        };
        self.will_read(next, step.weights, per);
        let (hidden, stride) = (config.hidden, row_stride(config.hidden));
        let (weight, input, out) = self.rows.input(simd, linear, step.weights, from, k, m);
        let out = Parts::new(out.hidden);
        let bias = &linear.bias;
        linear::run(&self.pool, simd, weight, input, m, 1, &|panel, tile| {
            let n = PANEL.min(hidden - panel * PANEL);
            for (j, tile) in tile.chunks_exact_mut(PANEL).enumerate() {
                add_bias(tile, bias, panel);
                // SAFETY: a panel is one unit of one thread.
                let out = unsafe { out.slice(j * stride + panel * PANEL, n) };
                out.iter_mut().zip(tile).for_each(|(out, y)| *out += *y);
            }
        })
    }

    fn gate_up_step(&mut self, index: usize, step: &Step) -> Result<()> {
        let (config, simd, m) = (&self.config, self.choice.simd, step.rows.len());
        let layer = &self.model.layers[index];
        self.will_read(&layer.down, step.weights, 1);
        self.rows.norm(simd, config, &layer.mlp_norm, m);
        let stride = row_stride(config.intermediate);
        let (weight, input, out) = self.rows.input(simd, &layer.gate_up, step.weights, Source::X, config.hidden, m);
        let out = Parts::new(out.ffn);
        let bias = &layer.gate_up.bias;
        linear::run(&self.pool, simd, weight, input, m, 2, &|unit, tile| {
            let (gate, up) = tile.split_at_mut(m * PANEL);
            for (j, (gate, up)) in gate.chunks_exact_mut(PANEL).zip(up.chunks_exact_mut(PANEL)).enumerate() {
                add_bias(gate, bias, 2 * unit);
                add_bias(up, bias, 2 * unit + 1);
                silu_mul(simd, gate, up);
                // SAFETY: a pair of panels is one unit of one thread. Outputs behind the last are zero, as the stride wants.
                unsafe { out.slice(j * stride + unit * PANEL, PANEL) }.copy_from_slice(gate);
            }
        })
    }

    /// Head over the first m rows of the hidden states.
    fn head_rows(&mut self, weights: Weights, m: usize) -> Result<()> {
        let (config, simd) = (&self.config, self.choice.simd);
        self.rows.norm(simd, config, &self.model.final_norm, m);
        let vocab = config.vocab;
        let (weight, input, out) = self.rows.input(simd, &self.model.head, weights, Source::X, config.hidden, m);
        let out = Parts::new(out.logits);
        let infinite = AtomicBool::new(false);
        linear::run(&self.pool, simd, weight, input, m, 1, &|panel, tile| {
            let n = PANEL.min(vocab - panel * PANEL);
            for (j, tile) in tile.chunks_exact(PANEL).enumerate() {
                if !tile[..n].iter().all(|x| x.is_finite()) {
                    infinite.store(true, Relaxed);
                }
                // SAFETY: a panel is one unit of one thread.
                unsafe { out.slice(j * vocab + panel * PANEL, n) }.copy_from_slice(&tile[..n]);
            }
        })?;
        if infinite.load(Relaxed) {
            // −∞ masks a token, unless it masks all of them.
            for (j, logits) in self.rows.logits.chunks_exact(vocab).take(m).enumerate() {
                let named = |error: Error| Error::not_finite(format!("row {} of {m}: {}", j + 1, error.message));
                check_finite(logits).map_err(named)?;
            }
        }
        Ok(())
    }

    /// Quantises pages of one slot, in dispatches short enough for the poll hook. `source`: the prompt, or the ring.
    fn store_pages(&mut self, items: usize, place: impl Fn(usize) -> Place + Sync, from_prompt: bool) -> Result<()> {
        let (simd, threads, rounding) = (self.choice.simd, self.pool.threads(), self.options.rounding);
        let shape = self.cache.plan.shape;
        let per_head = self.cache.plan.pages;
        let planes = self.cache.planes();
        let failure = std::sync::Mutex::new(None);
        let mut start = 0;
        while start < items {
            let count = (items - start).min(FLUSH_PAGES * threads);
            let Cache { upper, lower, full, ring, plan: _ } = &mut self.cache;
            let (upper, lower, full, ring) = (Parts::new(upper), Parts::new(lower), Parts::new(full), &*ring);
            let flushes = Parts::new(&mut self.flushes);
            let prompt = &self.prompt;
            self.pool.run(&|thread| {
                // SAFETY: one element per thread.
                let scratch = unsafe { &mut flushes.slice(thread, 1)[0] };
                let mut keys = vec![0u16; G * shape.d];
                for item in part(count, thread, threads) {
                    let at = place(start + item);
                    let slot = at.head * per_head + at.page;
                    let ring = &ring[at.ring..at.ring + shape.full_len()];
                    let (keys, values) = if from_prompt {
                        prompt.page(at.kv_head, at.page)
                    } else {
                        attend::canonical_keys(ring, shape.d, &mut keys);
                        (&keys[..], &ring[G * shape.d..])
                    };
                    if planes.full {
                        // SAFETY: a page is one item.
                        let page = unsafe { full.slice(slot * shape.full_len(), shape.full_len()) };
                        if from_prompt {
                            prompt.copy(at.kv_head, at.page * G..(at.page + 1) * G, page);
                        } else {
                            page.copy_from_slice(ring);
                        }
                    }
                    if !planes.upper {
                        continue;
                    }
                    let lower_bytes = if planes.lower { shape.lower_bytes() } else { 0 };
                    // SAFETY: a page is one item.
                    let (upper, lower) = unsafe {
                        (
                            upper.slice(slot * shape.upper_bytes(), shape.upper_bytes()),
                            lower.slice(slot * lower_bytes, lower_bytes),
                        )
                    };
                    if let Err(error) = quantize::page(simd, shape, rounding, (keys, values), scratch, upper, lower)
                        && let Ok(mut failure) = failure.lock()
                    {
                        failure.get_or_insert(error);
                    }
                }
            })?;
            if let Some(error) = failure.lock().ok().and_then(|mut failure| failure.take()) {
                return Err(error);
            }
            start += count;
            (self.hooks.poll)()?;
        }
        Ok(())
    }

    /// Runs a prompt operation with the machine's parts borrowed beside it.
    fn prompt<T>(
        &mut self,
        work: impl FnOnce(&mut Prompt, &mut Machine, &Model, &RopeTable) -> Result<T>,
    ) -> Result<T> {
        let mut machine = Machine { simd: self.choice.simd, pool: &self.pool, poll: &mut *self.hooks.poll };
        work(&mut self.prompt, &mut machine, &self.model, &self.rope)
    }
}

/// Where a page goes, and where it is in the ring.
struct Place {
    kv_head: usize,
    /// Index of slot, layer and KV head.
    head: usize,
    page: usize,
    ring: usize,
}

/// Adds a panel's biases; a model without biases has an empty list.
fn add_bias(tile: &mut [f32], bias: &[f32], panel: usize) {
    if !bias.is_empty() {
        tile.iter_mut().zip(&bias[panel * PANEL..]).for_each(|(y, b)| *y += b);
    }
}

/// Core's `select_pages` without sorting all pages: the n − 2 best inner ones are partitioned off.
fn best_pages(bounds: &[f32], n: usize) -> Vec<usize> {
    let (last, inner) = (bounds.len().saturating_sub(1), n.saturating_sub(2));
    if bounds.len() <= 2 || inner >= last - 1 {
        return (0..bounds.len()).collect();
    }
    let mut order: Vec<usize> = (1..last).collect();
    if inner == 0 {
        order.clear();
    } else {
        order.select_nth_unstable_by(inner - 1, |&a, &b| bounds[b].total_cmp(&bounds[a]).then(a.cmp(&b)));
        order.truncate(inner);
    }
    order.extend([0, last]);
    order.sort_unstable();
    order
}

/// Work of one thread: a chunk of pages, or the recent tokens, of one KV head, for some rows of one slot.
struct Item {
    /// First row in the step.
    first: usize,
    rows: usize,
    kv_head: usize,
    /// None: the recent tokens.
    chunk: Option<usize>,
    /// Pages of the longest row's list.
    pages: usize,
}

impl Item {
    /// In arbitrary units: reading a page costs about as much as four query rows on it.
    fn cost(&self, group: usize) -> usize {
        let rows = self.rows * group;
        match self.chunk {
            Some(chunk) => (self.pages - chunk * CHUNK).min(CHUNK) * (4 + rows),
            None => 2 * (4 + 2 * rows),
        }
    }
}

/// What attention items read.
struct Reads<'a> {
    simd: Simd,
    step: &'a Step<'a>,
    cache: &'a Cache,
    /// None: f16 pages.
    planes: Option<attend::Planes>,
    rounding: Rounding,
    group: usize,
}

impl Reads<'_> {
    /// Feeds an item's pages to the state, each to the rows that see it. `list`: the pages of the item's last row.
    fn item(&self, state: &mut State, item: &Item, head: usize, list: &[u32]) {
        let position = |i: usize| self.step.rows[item.first + i].position;
        let Some(chunk) = item.chunk else {
            self.recent(state, item, head);
            return;
        };
        let pages = &list[(chunk * CHUNK).min(list.len())..((chunk + 1) * CHUNK).min(list.len())];
        for (i, page) in pages.iter().enumerate() {
            let page = *page as usize;
            // Rows ascend in position, so those that see a page are the last ones.
            let blind = (0..item.rows).take_while(|i| visible_pages(position(*i)) <= page).count();
            let rows = blind * self.group..item.rows * self.group;
            let next = list.get(chunk * CHUNK + i + 1).map(|page| *page as usize);
            match self.planes {
                Some(planes) => {
                    let next = next.map(|page| (self.cache.upper(head, page), self.cache.lower(head, page)));
                    let (upper, lower) = (self.cache.upper(head, page), self.cache.lower(head, page));
                    attend::nibble_page(self.simd, state, rows, planes, self.rounding, upper, lower, next);
                }
                None => {
                    let visible = vec![G; rows.len()];
                    let next = next.map(|page| self.cache.full(head, page));
                    attend::full_page(self.simd, state, rows, self.cache.full(head, page), &visible, next);
                }
            }
        }
    }

    /// Feeds the ring's pages: of a row at position p, those from Q(p) on, up to p itself.
    fn recent(&self, state: &mut State, item: &Item, head: usize) {
        let position = |i: usize| self.step.rows[item.first + i].position;
        let (first, last) = (visible_pages(position(0)), position(item.rows - 1) / G);
        for page in first..=last {
            // Earlier rows may end before this page, later ones may see it through planes.
            let from = (0..item.rows).take_while(|i| position(*i) / G < page).count();
            let to = (0..item.rows).take_while(|i| visible_pages(position(*i)) <= page).count();
            if from >= to {
                continue;
            }
            let visible: Vec<usize> = (from * self.group..to * self.group)
                .map(|r| (position(r / self.group) + 1 - page * G).min(G))
                .collect();
            attend::full_page(
                self.simd,
                state,
                from * self.group..to * self.group,
                self.cache.ring(head, page),
                &visible,
                (page < last).then(|| self.cache.ring(head, page + 1)),
            );
        }
    }
}

/// Input of a matrix of a step.
#[derive(Clone, Copy)]
enum Source {
    /// Normalised hidden states.
    X,
    /// Result of attention.
    Attended,
    /// Result of gate and up.
    Ffn,
}

/// Outputs of the matrices of a step.
struct Outputs<'a> {
    hidden: &'a mut [f32],
    qkv: &'a mut [f32],
    ffn: &'a mut [f32],
    logits: &'a mut [f32],
}

impl Rows {
    fn new(config: &ModelConfig, options: &Options) -> Result<Rows> {
        let len = Lengths::new(config, options);
        Ok(Rows {
            places: QkvPlaces::new(config),
            hidden: Array::zeros(len.hidden)?,
            x: Array::zeros(len.x)?,
            x16: Array::zeros(len.x)?,
            x8: Acts::zeros(options.step_rows.max(1), len.widest)?,
            limbs: hierarchy::Acts::zeros(len.limbs.0, len.limbs.1)?,
            qkv: Array::zeros(len.qkv)?,
            attended: Array::zeros(len.attended)?,
            ffn: Array::zeros(len.ffn)?,
            logits: Array::zeros(len.logits)?,
            cos: Array::zeros(len.angles)?,
            sin: Array::zeros(len.angles)?,
            partials: Array::zeros(len.partials)?,
            all: (0..len.pages as u32).collect(),
        })
    }

    /// Normalises the first m rows of the hidden states into `x`.
    fn norm(&mut self, simd: Simd, config: &ModelConfig, weight: &[f32], m: usize) {
        let (n, stride) = (config.hidden, row_stride(config.hidden));
        for j in 0..m {
            let (from, to) = (&self.hidden[j * stride..][..n], &mut self.x[j * stride..][..stride]);
            rms_norm(simd, from, weight, config.rms_eps, &mut to[..n]);
            to[n..].fill(0.0);
        }
    }

    /// Prepares the input of a linear layer in the form its weights take.
    fn input<'a>(
        &'a mut self,
        simd: Simd,
        linear: &'a Linear,
        weights: Weights,
        from: Source,
        k: usize,
        m: usize,
    ) -> (Weight<'a>, Input<'a>, Outputs<'a>) {
        let stride = row_stride(k);
        let Rows { hidden, x, x16, x8, limbs, qkv, attended, ffn, logits, .. } = self;
        let (ffn_out, ffn_in): (&mut [f32], &[f32]) = match from {
            Source::Ffn => (&mut [], &ffn[..m * stride]),
            _ => (&mut ffn[..], &[]),
        };
        let x: &[f32] = match from {
            Source::X => &x[..m * stride],
            Source::Attended => &attended[..m * stride],
            Source::Ffn => ffn_in,
        };
        let weight = linear.weight(weights);
        let input = match weight {
            Weight::Draft(_) => {
                x8.quantize(simd, x, stride, m, k);
                Input::Int8(x8)
            }
            Weight::Planes(_, read) if !read.takes_f32(simd) => {
                limbs.quantize(simd, read, x, stride, m, k);
                Input::Limbs(limbs)
            }
            Weight::Full(matrix) if crate::prefill::takes_pairs(simd, matrix) => {
                linear::to_bf16(simd, x, &mut x16[..m * stride]);
                Input::Bf16(&x16[..m * stride], stride)
            }
            Weight::Full(_) | Weight::Planes(..) => Input::F32(x, stride),
        };
        (weight, input, Outputs { hidden, qkv, ffn: ffn_out, logits })
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Noise;

    #[test]
    fn pages_are_chosen_as_core_chooses_them() {
        let mut noise = Noise::new(31);
        for count in [0, 1, 2, 3, 4, 17, 200] {
            for n in [0, 1, 2, 3, 5, 16, 199, 200, 300] {
                // Whole numbers, so that bounds tie.
                let bounds: Vec<f32> = (0..count).map(|_| (noise.normal() * 3.0).round()).collect();
                assert_eq!(
                    best_pages(&bounds, n),
                    quantspec_core::attend::select_pages(&bounds, n),
                    "{n} of {bounds:?}"
                );
            }
        }
    }
}
