//! The network's operations on the rows of a step.

use super::CudaBackend;
use super::gemm::{DOWN, GATE_UP, NORM_THREADS, OUTPUT, OUTPUT_PREFETCH_BYTES, Operand, PREFETCH_BYTES, QKV, form_of};
use super::kv_cache::{ScoredPages, page_shared};
use crate::args;
use crate::attend::{Codes, Neighbours};
use crate::device::{Arg, Buffer, Launch};
use crate::draft::Heads;
use crate::flags::check_flag;
use crate::hierarchy::Reads;
use crate::linear::Quantised;
use crate::weights::{self, Full, address, argument};
use quantspec_core::cache::BUFFER_TOKENS;
use quantspec_core::config::{ModelConfig, Pages, QkNorm, QueryScale, Rounding};
use quantspec_core::plan::pages;
use quantspec_core::{Error, Result};
use quantspec_model::backend::{Branch, Executor, Network, Pass, Step};

impl CudaBackend {
    pub(super) fn layer(&self, layer: usize) -> Result<&weights::Layer> {
        self.weights.layers.get(layer).ok_or_else(|| Error::internal(format!("layer {layer} does not exist")))
    }

    /// The flag for non-finite keys and values of the current step.
    fn step_flag(&self) -> u64 {
        if self.layout.drafts { self.sampling.draft_flag() } else { self.sampling.flag() }
    }

    /// Addresses of a layer's matrices in 16 bits for a prompt's GEMMs: QKV; output; gate and up; down.
    pub(super) fn prompt_matrices(&mut self, layer: usize) -> Result<[u64; 4]> {
        let index = layer;
        let layer = self.weights.layers.get(index);
        let layer = layer.ok_or_else(|| Error::internal(format!("layer {index} does not exist")))?;
        match &mut self.nibbles {
            Some((hierarchies, expanded)) => expanded.layer(hierarchies, index, layer),
            None => Ok(layer.matrices().map(|full| full.first_read().0)),
        }
    }

    /// Copies a head in nibbles back whose memory a prompt has used, and waits, because kernels read weights before the previous
    /// kernel has ended.
    pub(super) fn restore_head(&mut self) -> Result<()> {
        if self.overwritten && self.weights.drafts.is_none() {
            self.weights.restore_head()?;
            self.device.synchronize()?;
            self.overwritten = false;
        }
        Ok(())
    }

    pub(super) fn step_embed(&self, step: &Step) -> Result<()> {
        let (windows, pitch) = (self.sampling.windows(), self.sampling.pitch());
        // Without overlap: later kernels read results of earlier steps before their predecessor has ended, so those steps
        // must end before this first kernel starts.
        let launch = Launch { grid: [step.rows.len() as u32, 1, 1], block: 256, shared: 0, overlap: false };
        // SAFETY: rows, windows and the hidden stream have room for the rows of a step.
        unsafe { self.launch_embed(launch, [self.layout.rows, windows, pitch as u64, 0], self.step.hidden.at(0)) }
    }

    /// Embeds rows. `from`: the rows of a step, windows and their pitch, or the tokens of a prompt.
    ///
    /// # Safety
    /// All addresses must stay valid for the launch's rows until the stream has completed this call.
    pub(super) unsafe fn launch_embed(&self, launch: Launch, from: [u64; 4], hidden: u64) -> Result<()> {
        let [rows, windows, pitch, tokens] = from;
        let mut arguments = args![rows, windows, pitch as usize, tokens].to_vec();
        match (&self.weights.embedding, &self.weights.head) {
            (Some(embedding), _) => arguments.extend(args![embedding.table.address()]),
            (None, Full::Whole(table)) => arguments.extend(args![&table.buffer]),
            (None, Full::Nibbles(table)) => arguments.extend(args![table.upper(), table.lower(), table.stride()]),
        }
        arguments.extend(args![hidden, self.config.hidden, self.config.vocab, self.config.scales.embedding]);
        // SAFETY: the argument list is the kernel's; the caller guarantees the addresses.
        unsafe { self.device.launch(self.kernels.embed, launch, &arguments) }
    }

    /// The norm before attention, and the QKV GEMM.
    fn step_norm_qkv(&self, layer: usize, draft: Option<&Quantised>, step: &Step) -> Result<()> {
        let (weights, space, rows) = (self.layer(layer)?, &self.step, step.rows.len());
        self.norm(
            rows,
            weights.attention_norm.as_ref(),
            &space.normed,
            &self.kernels.norm[0],
            (&weights.qkv, draft.is_some()),
            space.hidden.at(0),
        )?;
        // Attention prefetches the rest of the output projection.
        let next = self.prefetch(&weights.output, PREFETCH_BYTES);
        self.step_gemm(step, QKV, &weights.qkv, draft, &space.normed, next)
    }

    fn step_qkv(&self, layer: usize, step: &Step) -> Result<()> {
        let weights = self.layer(layer)?;
        let draft = weights.draft.qkv.as_ref().filter(|_| step.weights.is_draft());
        let paired = draft.is_some() || self.nibbles.is_some();
        let (rows, config) = (step.rows.len(), &self.config);
        let space = &self.step;
        let scale = std::f32::consts::LOG2_E / (config.head_dim as f32).sqrt();
        if let (Some(together), Some(draft), Some(norm)) =
            (self.fused_gemms(step, QKV), weights.qkv.drafted(&weights.draft.qkv), &weights.attention_norm)
        {
            self.add_residual(rows)?;
            let hidden = self.stream(norm);
            if weights.qk_norms.is_none() {
                let heads = Heads {
                    rows: self.layout.rows,
                    bias: address(&weights.qkv_bias),
                    cos_sin: self.angles(layer, self.layout.cos_sin),
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
            self.step_norm_qkv(layer, draft, step)?;
        }
        self.norm_projections(layer, paired, rows)?;
        let of_heads = weights.qk_norms.as_ref().filter(|_| config.qk_norm == QkNorm::Heads);
        let (q_norm, k_norm) = of_heads.map_or((0, 0), |(q, k)| (q.at(0), k.at(0)));
        let arguments = args![
            self.layout.rows,
            &space.y,
            address(&weights.qkv_bias),
            q_norm,
            k_norm,
            self.angles(layer, self.layout.cos_sin),
            &space.q,
            &self.cache.ring_k,
            &self.cache.ring_v,
            config.rms_eps,
            scale,
            config.heads,
            config.kv_heads,
            layer,
            self.options.slots,
            usize::from(paired),
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

    /// Multiplies queries by the factor of their position, if the model has one (Ministral 3). `described`: address of the
    /// step's rows, or 0 for consecutive ones from `first` on.
    pub(super) fn scale_queries(&self, q: &Buffer, described: u64, first: usize, rows: usize) -> Result<()> {
        let Some(QueryScale { beta, original }) = self.config.rope.query_scale else { return Ok(()) };
        let width = self.config.q_width();
        let arguments = args![q, described, first, beta as f32, original, width];
        self.launch(self.kernels.scale_queries, [width.div_ceil(2048), rows, 1], 256, 0, &arguments)
    }

    fn step_attend(&self, layer: usize, step: &Step) -> Result<()> {
        let weights = self.layer(layer)?;
        let half_sm = self.fused_gemms(step, OUTPUT).is_some();
        // The output projection's input is int8.
        let draft = half_sm || weights.draft.output.is_some() && step.weights.is_draft();
        let cache = self.cache_layer(layer);
        let space = &self.step;
        let local = self.config.reach(layer).is_some();
        // A local layer reads all pages of its reach.
        if let (Some((_, addresses)), false, true) = (self.layout.slices.first(), local, self.layout.choosing > 0) {
            let scores = match step.pages {
                // Scores need quantised keys; without them the newest pages are read.
                Pages::Best(_) if self.cache.upper.is_some() => self.lists.scores.at(0),
                Pages::Snap { .. } => self.masses.as_ref().map_or(0, |masses| masses.of_layer(layer)),
                Pages::All | Pages::Best(_) | Pages::Window(_) | Pages::Tokens(_) => 0,
            };
            let layout = &self.layout;
            // SAFETY: choices, q, scores and lists are this backend's and have room for every slot.
            unsafe {
                self.attend.choose(
                    layout.choices,
                    [layout.choosing, layout.scoring],
                    layout.choosing_pages,
                    self.listed(step.pages.count().unwrap_or(0)),
                    space.q.at(0),
                    scores,
                    &cache,
                    addresses,
                )?;
            }
        }
        let slices = if local { &self.layout.local_slices } else { &self.layout.slices };
        for (index, (slice, addresses)) in slices.iter().enumerate() {
            // Draft GEMMs prefetch their own weights, and no GEMM follows if another slice does.
            let none = draft || index + 1 < slices.len();
            let prefetch = if none { (0, 0) } else { weights.output.first_read() };
            let (input, panels) = (&space.attended, self.panels(&weights.output, draft, step.rows.len()));
            let form = form_of(&weights.output, draft);
            let direct = draft && self.attend.writes_codes(step.view, slice);
            let codes = direct.then(|| Codes { x: input.x8.at(0), xs: input.xs.at(0), panels });
            let neighbours = Neighbours { half_sm, prefetch, codes };
            // SAFETY: the description holds the slice, and the partial results have room for every slice of at most SLICE_ROWS
            // rows.
            unsafe {
                self.attend.run(step.view, slice, space.q.at(0), &cache, addresses, neighbours)?;
                if direct {
                    continue;
                }
                let (x, xs, pitch) = match input.integers(form) {
                    Some([x, xs]) => (x.at(0), xs.at(0), input.pitch8()),
                    None => (input.x.at(0), 0, input.pitch()),
                };
                self.attend.merge(slice, form, x, xs, pitch, panels, addresses)?;
            }
        }
        Ok(())
    }

    fn step_gate_up(&self, layer: usize, step: &Step) -> Result<()> {
        let weights = self.layer(layer)?;
        let drafting = step.weights.is_draft();
        let draft = weights.draft.gate_up.as_ref().filter(|_| drafting);
        let (rows, width) = (step.rows.len(), self.config.intermediate);
        let space = &self.step;
        if let (Some(together), Some(draft), Some(norm)) =
            (self.fused_gemms(step, GATE_UP), weights.gate_up.drafted(&weights.draft.gate_up), &weights.mlp_norm)
        {
            self.add_residual(rows)?;
            let (hidden, gated) = (self.stream(norm), &space.gated);
            // SAFETY: the buffers are this backend's and have room for `step_rows` rows.
            return unsafe {
                together.gated(draft, hidden, address(&weights.gate_up_bias), gated.x.at(0), gated.pitch(), rows)
            };
        }
        let norm = weights.mlp_norm.as_ref();
        let into = (&weights.gate_up, draft.is_some());
        self.norm(rows, norm, &space.normed, &self.kernels.norm[0], into, space.hidden.at(0))?;
        let next = self.prefetch(&weights.down, PREFETCH_BYTES);
        self.step_gemm(step, GATE_UP, &weights.gate_up, draft, &space.normed, next)?;
        let (bias, gated) = (argument(&weights.gate_up_bias), &space.gated);
        let grid = [width.div_ceil(1024), rows, 1];
        let quantised = drafting && weights.draft.down.is_some();
        let panels = self.panels(&weights.down, quantised, rows);
        let form = form_of(&weights.down, quantised);
        let y = Arg::from(&space.y);
        let arguments = match gated.integers(form) {
            Some([x, xs]) => [y, bias, x.into(), xs.into(), width.into(), panels.into()],
            None => [y, bias, (&gated.x).into(), width.into(), gated.pitch().into(), panels.into()],
        };
        self.launch(self.kernels.activate.of(form), grid, 256, 0, &arguments)
    }
}

impl Network for CudaBackend {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn embed(&mut self, pass: &Pass) -> Result<()> {
        // A failed step may have left them set.
        (self.unreduced, self.residual) = (None, None);
        match pass {
            Pass::Prefill(block) => self.prompt_embed(block),
            Pass::Step(step) => {
                match &mut self.described {
                    Some(layouts) => {
                        let next = layouts.next().ok_or_else(|| Error::internal("a step that was not described"));
                        self.layout = next?;
                    }
                    None => {
                        self.restore_head()?;
                        if step.weights.is_draft() {
                            self.restore_drafts()?;
                        }
                        self.begin(step)?;
                    }
                }
                self.step_embed(step)
            }
        }
    }

    fn qkv(&mut self, layer: usize, pass: &Pass) -> Result<()> {
        match pass {
            Pass::Step(step) => {
                self.step_qkv(layer, step)?;
                self.residual = None;
                self.scale_queries(&self.step.q, self.layout.rows, 0, step.rows.len())
            }
            Pass::Prefill(block) => {
                // Another sequence may have begun or ended after the last chunk.
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
                        self.config.reach(layer),
                    )
                }
            }
        }
    }

    fn output(&mut self, layer: usize, pass: &Pass) -> Result<()> {
        match pass {
            Pass::Step(step) => {
                let weights = self.layer(layer)?;
                let draft = weights.draft.output.as_ref().filter(|_| step.weights.is_draft());
                let own = &weights.draft.output;
                if let (Some(together), Some(draft)) = (self.fused_gemms(step, OUTPUT), weights.output.drafted(own)) {
                    let (x, hidden) = (&self.step.attended, self.step.hidden.at(0));
                    let bias = address(&weights.output_bias);
                    // SAFETY: the buffers are this backend's and have room for `step_rows` rows.
                    return unsafe { together.add_i8(draft, x.x8.at(0), x.xs.at(0), hidden, bias, step.rows.len()) };
                }
                let next = self.prefetch(&weights.gate_up, OUTPUT_PREFETCH_BYTES);
                self.step_gemm(step, OUTPUT, &weights.output, draft, &self.step.attended, next)?;
                self.unreduced = Some(address(&weights.output_bias));
                Ok(())
            }
            Pass::Prefill(block) => self.prompt_add(layer, Branch::Attention, block),
        }
    }

    /// The next norm adds y, unless y is normalised first. GEMMs of prompts and fused GEMMs of draft steps have added theirs.
    fn reduce_residual(&mut self, layer: usize, branch: Branch, pass: &Pass) -> Result<()> {
        let unreduced = self.unreduced.take();
        let Pass::Step(step) = pass else { return Ok(()) };
        let weights = self.layer(layer)?;
        let norm = match branch {
            Branch::Attention => &weights.attention_output_norm,
            Branch::Mlp => &weights.mlp_output_norm,
        };
        let Some(norm) = norm else {
            self.residual = unreduced;
            return Ok(());
        };
        let (width, eps) = (self.config.hidden, self.config.rms_eps);
        let arguments = args![&self.step.y, width, &self.step.hidden, width, norm, eps, width, 0usize, 1usize];
        self.launch(self.kernels.norm_rows, [step.rows.len(), 1, 1], NORM_THREADS, 0, &arguments)
    }

    fn gate_up(&mut self, layer: usize, pass: &Pass) -> Result<()> {
        match pass {
            Pass::Step(step) => {
                self.step_gate_up(layer, step)?;
                self.residual = None;
                Ok(())
            }
            Pass::Prefill(block) => {
                let [_, _, matrix, _] = self.prompt_matrices(layer)?;
                let weights = self.layer(layer)?;
                self.prompt_norm(block, weights.mlp_norm.as_ref())?;
                let bias = weights.gate_up_bias.as_ref().map(|bias| bias.at(0));
                let (normed, gated) = (self.prompt.normed.at(0), self.prompt.gated.at(0));
                // SAFETY: as in `attend`.
                unsafe { self.prefill.gate_up(normed, matrix, bias, gated, block.rows) }
            }
        }
    }

    fn down(&mut self, layer: usize, pass: &Pass) -> Result<()> {
        match pass {
            Pass::Step(step) => {
                let weights = self.layer(layer)?;
                let draft = weights.draft.down.as_ref().filter(|_| step.weights.is_draft());
                let own = &weights.draft.down;
                if let (Some(together), Some(draft)) = (self.fused_gemms(step, DOWN), weights.down.drafted(own)) {
                    let (x, hidden) = (&self.step.gated, self.step.hidden.at(0));
                    let bias = address(&weights.down_bias);
                    // SAFETY: as above.
                    return unsafe { together.add_bf16(draft, x.x.at(0), x.pitch(), hidden, bias, step.rows.len()) };
                }
                let next = self.weights.layers.get(layer + 1).map_or(&self.weights.head, |layer| &layer.qkv);
                let next = self.prefetch(next, PREFETCH_BYTES);
                self.step_gemm(step, DOWN, &weights.down, draft, &self.step.gated, next)?;
                self.unreduced = Some(address(&weights.down_bias));
                Ok(())
            }
            Pass::Prefill(block) => self.prompt_add(layer, Branch::Mlp, block),
        }
    }

    fn store(&mut self, layer: usize, slot: usize, tokens: usize) -> Result<()> {
        let (heads, d) = (self.config.kv_heads, self.config.head_dim);
        self.slot(slot)?;
        let table = &self.cache.pages;
        let complete = pages(tokens).min(table.table(slot).len());
        let left = table.left_of(table.shared(slot).min(complete)..complete);
        let cache = self.cache_layer(layer);
        for pages in left.into_iter().filter(|pages| !pages.is_empty()) {
            let arguments = args![
                self.prompt_scratch(0),
                cache.upper,
                cache.lower,
                cache.full,
                self.cache.tables.at(slot * self.cache.pitch * 4),
                pages.start,
                usize::from(self.options.rounding == Rounding::Balanced),
                self.sampling.flag(),
            ];
            self.launch(self.kernels.store, [heads, pages.len(), 2], 256, page_shared(d), &arguments)?;
        }
        let of_prompt = self.masses.as_mut().map_or(Ok(0), |masses| masses.finish(layer, slot, tokens))?;
        if let Some(slot) = self.slots.get_mut(slot).and_then(Option::as_mut) {
            slot.scored_pages = ScoredPages { of_prompt, refreshed: 0 };
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

    fn end_chunk(&mut self) -> Result<()> {
        check_flag(self.sampling.take_flag(false)?)
    }

    fn head(&mut self, pass: &Pass) -> Result<()> {
        self.unpenalised.clear();
        let (rows, hidden, drafting) = match pass {
            Pass::Step(step) => (step.rows.len(), self.step.hidden.at(0), step.weights.is_draft()),
            Pass::Prefill(block) => {
                self.layout.drafts = false;
                self.restore_head()?;
                (1, self.prompt.hidden.at(block.start + block.rows - 1)?, false)
            }
        };
        let draft = self.weights.draft_head.as_ref().filter(|_| drafting);
        let last = &self.step.last;
        let norm = Some(&self.weights.final_norm);
        self.norm(rows, norm, last, &self.kernels.norm[1], (&self.weights.head, draft.is_some()), hidden)?;
        let head = Operand { full: &self.weights.head, draft, reads: Reads::All, next: (0, 0) };
        self.gemm(&head, last, self.step.logits.at(0), rows)?;
        self.residual = None;
        Ok(())
    }

    fn poll(&mut self) -> Result<()> {
        // A round is queued without polling: an interrupt would leave a half-recorded graph.
        if self.described.is_some() { Ok(()) } else { (self.hooks.poll)() }
    }
}
