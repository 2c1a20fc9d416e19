//! The network's operations on the CPU.

use super::CpuBackend;
use super::activations::Source;
use crate::attend;
use crate::elementwise::{activate_mul, rms_norm, rope};
use crate::lanes::{f16_bits, f16_is_finite};
use crate::linear::{self, row_stride};
use crate::memory::DisjointSlice;
use crate::panel::PANEL;
use crate::pool::share;
use crate::prompt::{Machine, Prompt};
use crate::weights::{Linear, Model};
use quantspec_core::attend::SnapScores;
use quantspec_core::cache::G;
use quantspec_core::config::{ModelConfig, QkNorm, Weights};
use quantspec_core::sample::check_finite;
use quantspec_core::{Error, Result};
use quantspec_model::backend::{Branch, Network, Pass, Step};
use quantspec_model::rope::RopeTable;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Adds a panel's biases; the list is empty for models without biases.
fn add_bias(tile: &mut [f32], bias: &[f32], panel: usize) {
    if !bias.is_empty() {
        tile.iter_mut().zip(&bias[panel * PANEL..]).for_each(|(y, b)| *y += b);
    }
}

impl CpuBackend {
    /// Checks that a step's rows fit and that their slots are open.
    pub(super) fn check(&self, step: &Step) -> Result<()> {
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

    fn embed_step(&mut self, step: &Step) -> Result<()> {
        self.check(step)?;
        let (hidden, half) = (self.config.hidden, self.config.head_dim / 2);
        for (j, row) in step.rows.iter().enumerate() {
            let token = self.sampler.token(row.slot, row.offset)? as usize;
            self.model.embed(token, &mut self.rows.hidden[j * row_stride(hidden)..][..hidden]);
            let angles = j * half..(j + 1) * half;
            let (cos, sin) = (&mut self.rows.cos[angles.clone()], &mut self.rows.sin[angles]);
            self.rope.fill(row.position, row.position + 1, cos, sin);
            if let Some(rope) = &self.local_rope {
                let angles = self.rows.local_angles + j * half..self.rows.local_angles + (j + 1) * half;
                let (cos, sin) = (&mut self.rows.cos[angles.clone()], &mut self.rows.sin[angles]);
                rope.fill(row.position, row.position + 1, cos, sin);
            }
        }
        Ok(())
    }

    /// Makes threads that wait during the next operations prefetch this matrix, in units of `per` panels.
    fn will_read(&self, linear: &Linear, weights: Weights, per: usize) {
        let weight = linear.weight(weights);
        self.pool.will_read(|thread| weight.bytes_of_thread(per, thread, self.pool.threads()));
    }

    fn qkv_step(&mut self, index: usize, step: &Step) -> Result<()> {
        let (config, simd, m) = (&self.config, self.choice.simd, step.rows.len());
        let layer = &self.model.layers[index];
        self.will_read(&layer.output, step.weights, 1);
        self.rows.norm(simd, config, layer.attention_norm.as_deref(), m);
        let offsets = self.rows.offsets;
        let (weight, input, out) = self.rows.input(simd, &layer.qkv, step.weights, Source::X, config.hidden, m);
        let out = DisjointSlice::new(out.qkv);
        let bias = &layer.qkv.bias;
        linear::run(&self.pool, simd, weight, input, m, 1, &|panel, tile| {
            for (j, tile) in tile.chunks_exact_mut(PANEL).enumerate() {
                add_bias(tile, bias, panel);
                // SAFETY: a panel is one unit of one thread.
                unsafe { out.slice(j * offsets.width + panel * PANEL, PANEL) }.copy_from_slice(tile);
            }
        })?;
        self.append(index, step)
    }

    /// Norms and RoPE of queries in place; stores keys and values in the ring.
    fn append(&mut self, index: usize, step: &Step) -> Result<()> {
        let (config, simd, m) = (&self.config, self.choice.simd, step.rows.len());
        let layer = &self.model.layers[index];
        let (d, heads, kv_heads, offsets) = (config.head_dim, config.heads, config.kv_heads, self.rows.offsets);
        let norms = match (config.qk_norm, &layer.qk_norm) {
            (QkNorm::Projection, Some((q_norm, k_norm))) => {
                self.rows.norm_qkv(simd, config, q_norm, 0, m);
                self.rows.norm_qkv(simd, config, k_norm, offsets.key, m);
                None
            }
            (_, norms) => norms.as_ref(),
        };
        let sizes = self.cache.sizes;
        let threads = self.pool.team(m * offsets.width);
        let (cos, sin, rotates) = (&self.rows.cos, &self.rows.sin, config.rotates(index));
        let local = if config.reach(index).is_some() { self.rows.local_angles } else { 0 };
        let qkv = DisjointSlice::new(&mut self.rows.qkv);
        let broken = AtomicBool::new(false);
        let ring = DisjointSlice::new(&mut self.cache.ring);
        // An item is one KV head of all rows, which share pages of the ring, or one query head of one row.
        self.pool.run_team(threads, &|thread| {
            let mut halves = vec![0u16; 2 * d];
            for item in share(kv_heads + heads * m, thread, threads) {
                // SAFETY: heads of a row do not overlap, and each belongs to one item.
                let head_at = |j: usize, from: usize| unsafe { qkv.slice(j * offsets.width + from, d) };
                let norm_and_rotate = |j: usize, x: &mut [f32], norm: Option<&Vec<f32>>| {
                    if let Some(norm) = norm {
                        let before = x.to_vec();
                        rms_norm(simd, &before, norm, config.rms_eps, x);
                    }
                    let angles = if rotates { local + j * d / 2 } else { cos.len() - d / 2 };
                    rope(simd, x, &cos[angles..][..d / 2], &sin[angles..][..d / 2]);
                };
                if item >= kv_heads {
                    let (j, head) = ((item - kv_heads) / heads, (item - kv_heads) % heads);
                    let query = head_at(j, head * d);
                    norm_and_rotate(j, query, norms.map(|norms| &norms.0));
                    let factor = config.query_factor(step.rows[j].position);
                    query.iter_mut().for_each(|x| *x *= factor);
                    continue;
                }
                for (j, row) in step.rows.iter().enumerate() {
                    let (key, value) = (head_at(j, offsets.key + item * d), head_at(j, offsets.value + item * d));
                    norm_and_rotate(j, key, norms.map(|norms| &norms.1));
                    for (half, x) in halves.iter_mut().zip(key.iter().chain(value.iter())) {
                        *half = f16_bits(*x);
                    }
                    // Only finite numbers are stored: a later sequence multiplies entries after its end by zero.
                    for half in halves.iter_mut().filter(|half| !f16_is_finite(**half)) {
                        *half = 0;
                        broken.store(true, Relaxed);
                    }
                    let at = sizes.ring_at(sizes.head(row.slot, index, item), row.position / G);
                    // SAFETY: pages of a KV head belong to one item.
                    let page = unsafe { ring.slice(at, sizes.shape.full_len()) };
                    attend::put_token(page, d, row.position % G, &halves[..d], &halves[d..]);
                }
            }
        })?;
        if broken.load(Relaxed) {
            return Err(Error::not_finite(format!("keys or values of layer {index} are NaN or beyond half precision")));
        }
        Ok(())
    }

    /// Adds a linear layer's output to the hidden states of a step, normalised if the model has a norm there.
    fn add(&mut self, index: usize, step: &Step, from: Source) -> Result<()> {
        let (config, simd, m) = (&self.config, self.choice.simd, step.rows.len());
        let layer = &self.model.layers[index];
        let after = self.model.layers.get(index + 1).map_or(&self.model.head, |layer| &layer.qkv);
        let (linear, norm, k, (next, per)) = match from {
            Source::Attended => (&layer.output, &layer.attention_output_norm, config.q_width(), (&layer.gate_up, 2)),
            Source::X | Source::Ffn => (&layer.down, &layer.mlp_output_norm, config.intermediate, (after, 1)),
        };
        self.will_read(next, step.weights, per);
        let (hidden, stride) = (config.hidden, row_stride(config.hidden));
        let (weight, input, out) = self.rows.input(simd, linear, step.weights, from, k, m);
        let out = DisjointSlice::new(if norm.is_some() { out.x } else { out.hidden });
        let (bias, adds) = (&linear.bias, norm.is_none());
        linear::run(&self.pool, simd, weight, input, m, 1, &|panel, tile| {
            let n = PANEL.min(hidden - panel * PANEL);
            for (j, tile) in tile.chunks_exact_mut(PANEL).enumerate() {
                add_bias(tile, bias, panel);
                // SAFETY: a panel is one unit of one thread.
                let out = unsafe { out.slice(j * stride + panel * PANEL, n) };
                if adds {
                    out.iter_mut().zip(tile).for_each(|(out, y)| *out += *y);
                } else {
                    out.copy_from_slice(&tile[..n]);
                }
            }
        })?;
        if let Some(norm) = norm {
            self.rows.add_normed(simd, config, norm, m);
        }
        Ok(())
    }

    fn gate_up_step(&mut self, index: usize, step: &Step) -> Result<()> {
        let (config, simd, m) = (&self.config, self.choice.simd, step.rows.len());
        let layer = &self.model.layers[index];
        self.will_read(&layer.down, step.weights, 1);
        self.rows.norm(simd, config, layer.mlp_norm.as_deref(), m);
        let stride = row_stride(config.intermediate);
        let (weight, input, out) = self.rows.input(simd, &layer.gate_up, step.weights, Source::X, config.hidden, m);
        let out = DisjointSlice::new(out.ffn);
        let (bias, activation) = (&layer.gate_up.bias, config.activation);
        linear::run(&self.pool, simd, weight, input, m, 2, &|unit, tile| {
            let (gate, up) = tile.split_at_mut(m * PANEL);
            for (j, (gate, up)) in gate.chunks_exact_mut(PANEL).zip(up.chunks_exact_mut(PANEL)).enumerate() {
                add_bias(gate, bias, 2 * unit);
                add_bias(up, bias, 2 * unit + 1);
                activate_mul(simd, activation, gate, up);
                // SAFETY: a pair of panels is one unit of one thread. Outputs after the last are zero up to the stride.
                unsafe { out.slice(j * stride + unit * PANEL, PANEL) }.copy_from_slice(gate);
            }
        })
    }

    /// LM head over the first m rows of the hidden states.
    fn head_rows(&mut self, weights: Weights, m: usize) -> Result<()> {
        let (config, simd) = (&self.config, self.choice.simd);
        self.rows.norm(simd, config, Some(&self.model.final_norm), m);
        let vocab = config.vocab;
        let (weight, input, out) = self.rows.input(simd, &self.model.head, weights, Source::X, config.hidden, m);
        let out = DisjointSlice::new(out.logits);
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
            // −∞ masks a token; a row that masks all tokens is refused.
            for (j, logits) in self.rows.logits.chunks_exact(vocab).take(m).enumerate() {
                let named = |error: Error| Error::not_finite(format!("row {} of {m}: {}", j + 1, error.message));
                check_finite(logits).map_err(named)?;
            }
        }
        Ok(())
    }

    /// Runs a prompt operation with the backend's other parts borrowed.
    pub(super) fn prompt<T>(
        &mut self,
        work: impl FnOnce(&mut Prompt, &mut Machine, &Model, [Option<&RopeTable>; 2]) -> Result<T>,
    ) -> Result<T> {
        let mut machine = Machine { simd: self.choice.simd, pool: &self.pool, poll: &mut *self.hooks.poll };
        work(&mut self.prompt, &mut machine, &self.model, [Some(&self.rope), self.local_rope.as_ref()])
    }
}

impl Network for CpuBackend {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn reads_tokens(&self) -> bool {
        true
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
                self.prompt(|prompt, machine, model, _| prompt.qkv(machine, layer, &model.layers[layer], block))
            }
        }
    }

    fn attend(&mut self, layer: usize, pass: &Pass) -> Result<()> {
        match pass {
            Pass::Step(step) => self.attend_step(layer, step),
            Pass::Prefill(block) => {
                self.prompt(|prompt, machine, model, _| prompt.attend(machine, layer, &model.layers[layer], block))
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

    /// The CPU's projections add their outputs to the residual themselves.
    fn reduce_residual(&mut self, _layer: usize, _branch: Branch, _pass: &Pass) -> Result<()> {
        Ok(())
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
        // The pages a decode query can see in the ring: the last two complete ones and the incomplete one.
        for kv_head in 0..kv_heads {
            for page in pages.saturating_sub(2)..tokens.div_ceil(G) {
                let at = self.cache.sizes.ring_at(first + kv_head, page);
                let ring = &mut self.cache.ring[at..at + self.cache.sizes.shape.full_len()];
                self.prompt.copy(kv_head, page * G..tokens.min((page + 1) * G), ring);
            }
        }
        if self.options.page_masses {
            let (masses, pages) = self.prompt(|prompt, machine, _, _| prompt.page_masses(machine, tokens))?;
            for kv_head in 0..kv_heads {
                let prompt = masses[kv_head * pages..(kv_head + 1) * pages].to_vec();
                self.snap_scores[first + kv_head] = SnapScores { prompt, ..SnapScores::default() };
            }
        }
        let left = self.cache.pages.left_of(self.cache.pages.shared(slot)..pages);
        left.into_iter().try_for_each(|pages| self.store_pages(slot, first..first + kv_heads, pages, true))
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

    fn poll(&mut self) -> Result<()> {
        (self.hooks.poll)()
    }
}
