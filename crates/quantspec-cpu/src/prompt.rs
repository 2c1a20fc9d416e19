//! The current prompt: hidden states of all its rows (prefill is layer-major), and full-precision keys and values of one
//! layer.

mod qkv_heads;

use crate::attend::{Shape, put_token};
use crate::causal::{Causal, Scratch};
use crate::dispatch::{Simd, portable};
use crate::elementwise::{LANES, PANEL_TOKENS, rms_norm_panel};
use crate::lanes::{gelu, silu, take};
use crate::masses::PageMasses;
use crate::memory::{Array, DisjointSlice};
use crate::panel::PANEL;
use crate::pool::{Pool, share};
use crate::prefill::{self, Format, panel_len, put_features};
use crate::weights::{Layer, Linear, Model, QkvOffsets, panels};
use qkv_heads::{Angles, QkvHeads};
use quantspec_core::config::{Activation, ModelConfig, QkNorm};
use quantspec_core::{Error, Result};
use quantspec_model::backend::{Block, Options};
use quantspec_model::rope::RopeTable;
use std::ops::Range;
use std::sync::atomic::AtomicBool;

/// Panels that rows `start .. start + rows` touch.
const fn span(start: usize, rows: usize) -> usize {
    (start + rows).div_ceil(PANEL_TOKENS) - start / PANEL_TOKENS
}

/// The most panels a block of `rows` touches, wherever it starts.
const fn most_panels(rows: usize) -> usize {
    rows.div_ceil(PANEL_TOKENS) + 1
}

/// Shared by the operations on a block.
pub(crate) struct Machine<'a> {
    pub(crate) simd: Simd,
    pub(crate) pool: &'a Pool,
    pub(crate) poll: &'a mut dyn FnMut() -> Result<()>,
}

pub(crate) struct Prompt {
    config: ModelConfig,
    shape: Shape,
    offsets: QkvOffsets,
    /// Rows a block may have.
    block_rows: usize,
    /// Capacity in tokens, whole panels.
    tokens: usize,
    /// `[panel][hidden][64]`
    hidden: Array<f32>,
    /// `[panel][D/2][64]`; then the same for local layers if there are any; then a panel for layers without position embedding if
    /// there are any.
    cos: Array<f32>,
    sin: Array<f32>,
    /// `[kv head][token][D]` halves, and padding.
    keys: Array<u16>,
    values: Array<u16>,
    /// Input of a matrix, `[panel]` of `panel_len(k)`.
    x: Array<f32>,
    /// Output of a matrix, `[panel][n][64]`.
    y: Array<f32>,
    /// `[panel][head]` of `panel_len(D)`.
    q: Array<f32>,
    scratch: Vec<Scratch>,
    /// The last queries, if page masses are kept.
    masses: PageMasses,
}

/// Lengths of the arrays of a prompt.
struct Lengths {
    tokens: usize,
    hidden: usize,
    angles: usize,
    /// The last of them, for layers without position embedding.
    unrotated: usize,
    keys: usize,
    x: usize,
    y: usize,
    q: usize,
}

impl Lengths {
    fn new(config: &ModelConfig, capacity: usize, block_rows: usize) -> Lengths {
        let tokens = capacity.max(1).div_ceil(PANEL_TOKENS) * PANEL_TOKENS;
        let block = most_panels(block_rows.max(1)).min(tokens / PANEL_TOKENS);
        let widest = config.hidden.max(config.q_width()).max(config.intermediate);
        let outputs = QkvOffsets::new(config)
            .width
            .max(2 * panels(config.intermediate) * PANEL)
            .max(panels(config.hidden) * PANEL);
        let unrotated = if config.no_rope.is_empty() { 0 } else { config.head_dim / 2 * PANEL_TOKENS };
        Lengths {
            tokens,
            hidden: tokens * config.hidden,
            angles: tokens * config.head_dim / 2 * if config.local.is_some() { 2 } else { 1 } + unrotated,
            unrotated,
            keys: tokens * config.kv_width() + 16,
            x: block * panel_len(widest),
            y: block * outputs * PANEL_TOKENS,
            q: block * config.heads * panel_len(config.head_dim),
        }
    }

    fn bytes(&self) -> usize {
        4 * (self.hidden + 2 * self.angles + self.x + self.y + self.q) + 4 * self.keys
    }
}

impl Prompt {
    pub(crate) fn new(config: &ModelConfig, options: &Options, threads: usize) -> Result<Prompt> {
        let (capacity, block_rows) = (options.prompt_capacity, options.block_rows);
        let len = Lengths::new(config, capacity, block_rows);
        let (mut cos, mut sin) = (Array::zeros(len.angles)?, Array::zeros(len.angles)?);
        let rotated = len.angles - len.unrotated;
        RopeTable::new(config).fill_unrotated(&mut cos[rotated..], &mut sin[rotated..]);
        Ok(Prompt {
            config: config.clone(),
            shape: Shape::new(config.head_dim),
            offsets: QkvOffsets::new(config),
            block_rows: block_rows.max(1),
            tokens: len.tokens,
            hidden: Array::zeros(len.hidden)?,
            cos,
            sin,
            keys: Array::zeros(len.keys)?,
            values: Array::zeros(len.keys)?,
            x: Array::zeros(len.x)?,
            y: Array::zeros(len.y)?,
            q: Array::zeros(len.q)?,
            scratch: (0..threads).map(|_| Scratch::new(config.head_dim, config.group())).collect::<Result<_>>()?,
            masses: PageMasses::new(config, options)?,
        })
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        let floats = [&self.hidden, &self.cos, &self.sin, &self.x, &self.y, &self.q];
        floats.iter().map(|array| array.bytes()).sum::<usize>()
            + self.keys.bytes()
            + self.values.bytes()
            + self.scratch.iter().map(Scratch::bytes).sum::<usize>()
            + self.masses.bytes()
    }

    /// Bytes of [`Prompt::new`].
    pub(crate) fn plan(config: &ModelConfig, options: &Options, threads: usize) -> usize {
        Lengths::new(config, options.prompt_capacity, options.block_rows).bytes()
            + threads * Scratch::bytes_of(config.head_dim, config.group())
            + PageMasses::bytes_of(config, options)
    }

    /// First panel and number of panels of a block, checked.
    fn panels(&self, block: &Block) -> Result<(usize, usize)> {
        let end = block.start.saturating_add(block.rows);
        if block.rows == 0 || block.rows > self.block_rows || end > block.prompt.len() || end > self.tokens {
            return Err(Error::internal(format!(
                "a prefill block of {} rows from {} of a prompt of {}; there is room for blocks of {} and {} tokens",
                block.rows,
                block.start,
                block.prompt.len(),
                self.block_rows,
                self.tokens
            )));
        }
        Ok((block.start / PANEL_TOKENS, span(block.start, block.rows)))
    }

    /// Lanes of a panel that belong to the block.
    fn lanes(block: &Block, panel: usize) -> Range<usize> {
        let at = panel * PANEL_TOKENS;
        block.start.saturating_sub(at)..(block.start + block.rows - at).min(PANEL_TOKENS)
    }

    pub(crate) fn embed(
        &mut self,
        machine: &mut Machine,
        model: &Model,
        ropes: [Option<&RopeTable>; 2],
        block: &Block,
    ) -> Result<()> {
        let (first, count) = self.panels(block)?;
        self.masses.clear();
        let fed = &block.prompt[block.start..block.start + block.rows];
        if let Some(token) = fed.iter().find(|token| **token as usize >= self.config.vocab) {
            return Err(Error::internal(format!("token {token} is outside the vocabulary of {}", self.config.vocab)));
        }
        let (hidden, half, threads) = (self.config.hidden, self.config.head_dim / 2, machine.pool.threads());
        let tokens = self.tokens;
        let (states, cos, sin) = (
            DisjointSlice::new(&mut self.hidden),
            DisjointSlice::new(&mut self.cos),
            DisjointSlice::new(&mut self.sin),
        );
        machine.pool.run(&|thread| {
            let mut row = vec![0f32; hidden];
            let (mut c, mut s) = (vec![0f32; half], vec![0f32; half]);
            for panel in share(count, thread, threads) {
                let panel = first + panel;
                // SAFETY: a panel is one item of one thread.
                let states = unsafe { states.slice(panel * hidden * PANEL_TOKENS, hidden * PANEL_TOKENS) };
                for lane in Prompt::lanes(block, panel) {
                    let position = panel * PANEL_TOKENS + lane;
                    model.embed(block.prompt[position] as usize, &mut row);
                    row.iter().enumerate().for_each(|(i, x)| states[i * PANEL_TOKENS + lane] = *x);
                }
                for (set, rope) in ropes.into_iter().enumerate() {
                    let Some(rope) = rope else { continue };
                    let (first, length) = ((set * tokens + panel * PANEL_TOKENS) * half, half * PANEL_TOKENS);
                    // SAFETY: as above.
                    let (cos, sin) = unsafe { (cos.slice(first, length), sin.slice(first, length)) };
                    for lane in Prompt::lanes(block, panel) {
                        rope.fill(panel * PANEL_TOKENS + lane, block.prompt.len(), &mut c, &mut s);
                        for i in 0..half {
                            (cos[i * PANEL_TOKENS + lane], sin[i * PANEL_TOKENS + lane]) = (c[i], s[i]);
                        }
                    }
                }
            }
        })
    }

    /// Normalises the block's hidden states into the input of `linear`, or copies them if there is no norm.
    fn norm(
        &mut self,
        machine: &mut Machine,
        linear: &Linear,
        weight: Option<&[f32]>,
        (first, count): (usize, usize),
    ) -> Result<()> {
        let (hidden, eps, simd, threads) =
            (self.config.hidden, self.config.rms_eps, machine.simd, machine.pool.threads());
        let format = Format::of(simd, &linear.full);
        let (states, len) = (&self.hidden, panel_len(hidden));
        let x = DisjointSlice::new(&mut self.x);
        machine.pool.run(&|thread| {
            let mut out = vec![[0f32; LANES]; hidden];
            for panel in share(count, thread, threads) {
                let states = &states[(first + panel) * hidden * PANEL_TOKENS..][..hidden * PANEL_TOKENS];
                // SAFETY: a panel is one item of one thread.
                let x = unsafe { x.slice(panel * len, len) };
                for lane in (0..PANEL_TOKENS).step_by(LANES) {
                    match weight {
                        Some(weight) => rms_norm_panel(simd, states, lane, weight, eps, &mut out),
                        None => {
                            let features = states.chunks_exact(PANEL_TOKENS);
                            out.iter_mut().zip(features).for_each(|(out, x)| *out = take(x, lane));
                        }
                    }
                    put_features(simd, format, x, 0, lane, &out);
                }
            }
        })
    }

    fn multiply(&mut self, machine: &mut Machine, linear: &Linear, count: usize) -> Result<()> {
        prefill::gemm(machine.pool, machine.simd, machine.poll, &linear.full, &mut self.x, &mut self.y, count)
    }

    /// Normalises features from `from` on of the last matrix's output, in place; its panels have `width` features.
    fn norm_output(
        &mut self,
        machine: &Machine,
        weight: &[f32],
        from: usize,
        width: usize,
        count: usize,
    ) -> Result<()> {
        let (n, eps, simd, threads) = (weight.len(), self.config.rms_eps, machine.simd, machine.pool.threads());
        let y = DisjointSlice::new(&mut self.y);
        machine.pool.run(&|thread| {
            let mut out = vec![[0f32; LANES]; n];
            for panel in share(count, thread, threads) {
                // SAFETY: a panel is one item of one thread.
                let y = unsafe { y.slice((panel * width + from) * PANEL_TOKENS, n * PANEL_TOKENS) };
                for lane in (0..PANEL_TOKENS).step_by(LANES) {
                    rms_norm_panel(simd, y, lane, weight, eps, &mut out);
                    for (y, out) in y.chunks_exact_mut(PANEL_TOKENS).zip(&out) {
                        y[lane..lane + LANES].copy_from_slice(out);
                    }
                }
            }
        })
    }

    /// Adds a linear layer's output to the hidden states of the block's rows, normalised if there is a norm.
    fn add(
        &mut self,
        machine: &mut Machine,
        linear: &Linear,
        norm: Option<&[f32]>,
        block: &Block,
        (first, count): (usize, usize),
    ) -> Result<()> {
        let (hidden, threads, width) = (self.config.hidden, machine.pool.threads(), linear.full.panels * PANEL);
        if let Some(norm) = norm {
            self.norm_output(machine, norm, 0, width, count)?;
        }
        let (y, bias) = (&self.y, &linear.bias);
        let states = DisjointSlice::new(&mut self.hidden);
        machine.pool.run(&|thread| {
            for i in share(count, thread, threads) {
                let lanes = Prompt::lanes(block, first + i);
                // SAFETY: a panel is one item of one thread.
                let states = unsafe { states.slice((first + i) * hidden * PANEL_TOKENS, hidden * PANEL_TOKENS) };
                for (c, states) in states.chunks_exact_mut(PANEL_TOKENS).enumerate() {
                    let y = &y[(i * width + c) * PANEL_TOKENS..][..PANEL_TOKENS];
                    let bias = bias.get(c).copied().unwrap_or(0.0);
                    for (state, y) in states[lanes.clone()].iter_mut().zip(&y[lanes.clone()]) {
                        *state += y + bias;
                    }
                }
            }
        })
    }

    pub(crate) fn qkv(&mut self, machine: &mut Machine, index: usize, layer: &Layer, block: &Block) -> Result<()> {
        let (first, count) = self.panels(block)?;
        self.norm(machine, &layer.qkv, layer.attention_norm.as_deref(), (first, count))?;
        self.multiply(machine, &layer.qkv, count)?;
        let norms = match (self.config.qk_norm, &layer.qk_norm) {
            (QkNorm::Projection, Some((q_norm, k_norm))) => {
                let QkvOffsets { key, width, .. } = self.offsets;
                self.norm_output(machine, q_norm, 0, width, count)?;
                self.norm_output(machine, k_norm, key, width, count)?;
                None
            }
            (_, norms) => norms.as_ref(),
        };
        let (config, threads) = (&self.config, machine.pool.threads());
        let angles = match (config.rotates(index), config.reach(index)) {
            (false, _) => Angles::None,
            (true, None) => Angles::From(0),
            (true, Some(_)) => Angles::From(self.tokens * config.head_dim / 2),
        };
        let heads = QkvHeads {
            simd: machine.simd,
            config,
            offsets: self.offsets,
            block,
            first,
            panels: count,
            y: &self.y,
            bias: &layer.qkv.bias,
            norms,
            cos: &self.cos,
            sin: &self.sin,
            angles,
            queries: self.queries(machine.simd, layer),
            tokens: self.tokens,
            q: DisjointSlice::new(&mut self.q),
            keys: DisjointSlice::new(&mut self.keys),
            values: DisjointSlice::new(&mut self.values),
            last: self.masses.add_queries(block),
            broken: AtomicBool::new(false),
        };
        machine.pool.run(&|thread| {
            let mut head = vec![[0f32; LANES]; config.head_dim];
            for item in share(heads.items(), thread, threads) {
                // SAFETY: an item belongs to one thread.
                unsafe { heads.run(item, &mut head) };
            }
        })?;
        if heads.broken.into_inner() {
            return Err(Error::not_finite(format!(
                "keys or values of prompt tokens {}..{} are NaN or beyond half precision",
                block.start,
                block.start + block.rows
            )));
        }
        Ok(())
    }

    /// Format of a layer's queries ([`Causal::queries`]).
    fn queries(&self, simd: Simd, layer: &Layer) -> Format {
        match Format::of(simd, &layer.output.full) {
            Format::Sums if !self.config.head_dim.is_multiple_of(32) => Format::F32,
            format => format,
        }
    }

    pub(crate) fn attend(&mut self, machine: &mut Machine, index: usize, layer: &Layer, block: &Block) -> Result<()> {
        let (first, panels) = self.panels(block)?;
        let causal = Causal {
            heads: self.config.heads,
            group: self.config.group(),
            d: self.config.head_dim,
            queries: self.queries(machine.simd, layer),
            results: Format::of(machine.simd, &layer.output.full),
            q: &self.q,
            keys: &self.keys,
            values: &self.values,
            tokens: self.tokens,
            first,
            panels,
            reach: self.config.reach(index),
        };
        causal.run(machine.pool, machine.simd, machine.poll, &mut self.scratch, &mut self.x)
    }

    pub(crate) fn output(&mut self, machine: &mut Machine, layer: &Layer, block: &Block) -> Result<()> {
        let at = self.panels(block)?;
        self.multiply(machine, &layer.output, at.1)?;
        self.add(machine, &layer.output, layer.attention_output_norm.as_deref(), block, at)
    }

    pub(crate) fn gate_up(&mut self, machine: &mut Machine, layer: &Layer, block: &Block) -> Result<()> {
        let at = self.panels(block)?;
        self.norm(machine, &layer.gate_up, layer.mlp_norm.as_deref(), at)?;
        self.multiply(machine, &layer.gate_up, at.1)?;
        let (simd, threads, n) = (machine.simd, machine.pool.threads(), self.config.intermediate);
        let format = Format::of(simd, &layer.down.full);
        let activation = self.config.activation;
        let (y, bias, width, len) = (&self.y, &layer.gate_up.bias, layer.gate_up.full.panels * PANEL, panel_len(n));
        let x = DisjointSlice::new(&mut self.x);
        // A panel of outputs is an even number of features, so words of pairs have one writer.
        let per = n.div_ceil(PANEL);
        machine.pool.run(&|thread| {
            let mut out = [[0f32; LANES]; PANEL];
            for item in share(at.1 * per, thread, threads) {
                let (panel, unit) = (item / per, item % per);
                let features = PANEL.min(n - unit * PANEL);
                let y = &y[(panel * width + 2 * unit * PANEL) * PANEL_TOKENS..][..2 * PANEL * PANEL_TOKENS];
                let start = panel * len + format.len(unit * PANEL);
                let room = format.len(2 * features.div_ceil(2));
                // SAFETY: features of one unit of one panel belong to one item.
                let x = unsafe { x.slice(start, room) };
                for lane in (0..PANEL_TOKENS).step_by(LANES) {
                    let out = &mut out;
                    portable!(simd, activate(
                        activation: Activation,
                        y: &[f32],
                        bias: &[f32],
                        unit: usize,
                        lane: usize,
                        out: &mut [[f32; LANES]; PANEL],
                    ));
                    put_features(simd, format, x, 0, lane, &out[..features]);
                }
            }
        })
    }

    pub(crate) fn down(&mut self, machine: &mut Machine, layer: &Layer, block: &Block) -> Result<()> {
        let at = self.panels(block)?;
        self.multiply(machine, &layer.down, at.1)?;
        self.add(machine, &layer.down, layer.mlp_output_norm.as_deref(), block, at)
    }

    /// Hidden state of one row, `[hidden]`.
    pub(crate) fn hidden(&self, row: usize, out: &mut [f32]) {
        let at = row / PANEL_TOKENS * self.config.hidden * PANEL_TOKENS + row % PANEL_TOKENS;
        for (c, out) in out[..self.config.hidden].iter_mut().enumerate() {
            *out = self.hidden[at + c * PANEL_TOKENS];
        }
    }

    /// Keys and values of one page of a KV head, `[G][D]` halves each.
    pub(crate) fn page(&self, head: usize, page: usize) -> (&[u16], &[u16]) {
        let len = quantspec_core::cache::G * self.shape.d;
        let at = head * self.tokens * self.shape.d + page * len;
        (&self.keys[at..at + len], &self.values[at..at + len])
    }

    /// Copies tokens of a KV head, all of one page, into an f16 page.
    pub(crate) fn copy(&self, head: usize, tokens: Range<usize>, page: &mut [u16]) {
        let d = self.shape.d;
        for token in tokens {
            let at = (head * self.tokens + token) * d;
            let (key, value) = (&self.keys[at..at + d], &self.values[at..at + d]);
            put_token(page, d, token % quantspec_core::cache::G, key, value);
        }
    }

    /// Keys and values of tokens, checked against `bytes` of them.
    fn rows(&self, tokens: &Range<usize>, bytes: usize) -> Result<usize> {
        let width = self.config.kv_width() * size_of::<u16>();
        if tokens.start > tokens.end || tokens.end > self.tokens || bytes != tokens.len() * 2 * width {
            return Err(Error::internal(format!(
                "{bytes} bytes for prompt tokens {tokens:?}; there is room for {} of {} bytes",
                self.tokens,
                2 * width
            )));
        }
        Ok(width)
    }

    /// Exports keys and values of tokens, `[token][keys, values][kv head][D]` little-endian f16.
    pub(crate) fn export(&self, tokens: Range<usize>, out: &mut [u8]) -> Result<()> {
        let width = self.rows(&tokens, out.len())?;
        let d = self.config.head_dim;
        for (halves, first) in [(&self.keys, 0), (&self.values, width)] {
            for head in 0..self.config.kv_heads {
                let from = halves[(head * self.tokens + tokens.start) * d..].chunks_exact(d);
                for (out, from) in out.chunks_exact_mut(2 * width).zip(from) {
                    let out = &mut out[first + head * 2 * d..][..2 * d];
                    out.chunks_exact_mut(2).zip(from).for_each(|(out, half)| out.copy_from_slice(&half.to_le_bytes()));
                }
            }
        }
        Ok(())
    }

    /// Imports keys and values of tokens in the format of [`Prompt::export`].
    pub(crate) fn import(&mut self, tokens: Range<usize>, bytes: &[u8]) -> Result<()> {
        let width = self.rows(&tokens, bytes.len())?;
        let d = self.config.head_dim;
        for (halves, first) in [(&mut self.keys, 0), (&mut self.values, width)] {
            for head in 0..self.config.kv_heads {
                let to = halves[(head * self.tokens + tokens.start) * d..].chunks_exact_mut(d);
                for (from, to) in bytes.chunks_exact(2 * width).zip(to) {
                    let from = &from[first + head * 2 * d..][..2 * d];
                    to.iter_mut()
                        .zip(from.chunks_exact(2))
                        .for_each(|(to, from)| *to = u16::from_le_bytes([from[0], from[1]]));
                }
            }
        }
        Ok(())
    }

    /// Masses `[kv head][page]` of the pages that a query after the prompt's `tokens` sees, and the number of these pages.
    /// They are core's `page_masses` for the layer's last queries.
    pub(crate) fn page_masses(&mut self, machine: &Machine, tokens: usize) -> Result<(Vec<f32>, usize)> {
        self.masses.masses(machine.simd, machine.pool, &self.keys, self.tokens, self.config.kv_heads, tokens)
    }

    /// Tokens there is room for.
    pub(crate) fn room(&self) -> usize {
        self.tokens
    }
}

/// activation(gate) · up of one unit of 32 features, `y`: gate `[32][64]`, then up `[32][64]`.
#[inline(always)]
fn activate<const FMA: bool>(
    activation: Activation,
    y: &[f32],
    bias: &[f32],
    unit: usize,
    lane: usize,
    out: &mut [[f32; LANES]; PANEL],
) {
    let (gate, up) = y.split_at(PANEL * PANEL_TOKENS);
    for (i, out) in out.iter_mut().enumerate() {
        let (mut g, mut u): ([f32; LANES], [f32; LANES]) =
            (take(gate, i * PANEL_TOKENS + lane), take(up, i * PANEL_TOKENS + lane));
        if !bias.is_empty() {
            let (of_gate, of_up) = (bias[2 * unit * PANEL + i], bias[(2 * unit + 1) * PANEL + i]);
            for l in 0..LANES {
                g[l] += of_gate;
                u[l] += of_up;
            }
        }
        match activation {
            Activation::Silu => (0..LANES).for_each(|l| out[l] = silu::<FMA>(g[l]) * u[l]),
            Activation::Gelu => (0..LANES).for_each(|l| out[l] = gelu::<FMA>(g[l]) * u[l]),
        }
    }
}
