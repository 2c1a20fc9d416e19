//! The operations of the network, by their definitions.

use super::{ReferenceBackend, tensor};
use crate::backend::{Block, Branch, Network, Pass, Step};
use crate::checkpoint::{LayerPart, Part};
use candle_core::{D, Device, Tensor};
use half::f16;
use quantspec_core::attend::{SNAP_QUERIES, SnapScores, page_masses};
use quantspec_core::cache::{
    BUFFER_TOKENS, G, first_visible, ring_index, visible_buffer, visible_pages, visible_quantised,
};
use quantspec_core::config::{Activation, ModelConfig, Pages, Planes, QkNorm, TargetWeights, View, Weights};
use quantspec_core::quantize::{ACTIVATION_4, ACTIVATION_8, WEIGHT_GROUP, quantize_activations_to};
use quantspec_core::sample::check_finite;
use quantspec_core::weights::SMALL_GROUP;
use quantspec_core::{Error, Result};

impl ReferenceBackend {
    fn weight(&self, part: Part, weights: Weights) -> Result<(&Tensor, bool)> {
        let draft = if weights.is_draft() { self.draft.get(&part) } else { None };
        match (draft, self.full.get(&part)) {
            (Some(tensor), _) => Ok((tensor, true)),
            (None, Some(tensor)) => Ok((tensor, false)),
            (None, None) => Err(Error::internal(format!("{part:?} is not loaded"))),
        }
    }

    /// Hidden states of the pass: one tensor per row of a step, one for a whole prompt block.
    fn hidden(&self, pass: &Pass) -> Result<Vec<Tensor>> {
        match pass {
            Pass::Step(_) => Ok(self.rows.clone()),
            Pass::Prefill(block) => {
                let rows = block.start..block.start + block.rows;
                let hidden: Option<Vec<&Tensor>> = rows.clone().map(|row| self.prompt.get(&row)).collect();
                let hidden = hidden.ok_or_else(|| Error::internal(format!("rows {rows:?} were not embedded")))?;
                Ok(vec![tensor(|| Tensor::cat(&hidden, 0))?])
            }
        }
    }

    fn set_hidden(&mut self, pass: &Pass, hidden: Vec<Tensor>) -> Result<()> {
        match pass {
            Pass::Step(_) => self.rows = hidden,
            Pass::Prefill(block) => {
                for row in 0..block.rows {
                    self.prompt.insert(block.start + row, tensor(|| hidden[0].narrow(0, row, 1))?);
                }
            }
        }
        Ok(())
    }

    /// `x · wᵀ + bias`, `[rows][outputs]`; quantised weights use int8 or 4-bit activations.
    fn linear(&self, x: &Tensor, part: Part, bias: Option<Part>, weights: Weights) -> Result<Tensor> {
        let (weight, quantised) = self.weight(part, weights)?;
        let group = if self.options.weights == TargetWeights::Checkpoint { WEIGHT_GROUP } else { SMALL_GROUP };
        let coarse = weights == Weights::Draft4 && !part.is_drafted_in_8_bits(self.options.sensitive);
        let most = if coarse { ACTIVATION_4 } else { ACTIVATION_8 };
        let x = if quantised { &rounded_activations(x, group, most)? } else { x };
        let y = tensor(|| x.matmul(&weight.t()?))?;
        match bias.and_then(|part| self.full.get(&part)) {
            Some(bias) => tensor(|| y.broadcast_add(bias)),
            None => Ok(y),
        }
    }

    /// `x / sqrt(mean(x²) + eps) · weight` over the last dimension.
    fn norm(&self, x: &Tensor, part: Part) -> Result<Tensor> {
        let (weight, _) = self.weight(part, Weights::Full)?;
        let eps = f64::from(self.config.rms_eps);
        tensor(|| x.broadcast_div(&(x.sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?)?.broadcast_mul(weight))
    }

    /// Rows normalised by a part of a layer, or as they are if the model has no such norm.
    fn normed(&self, rows: &Tensor, layer: usize, part: LayerPart) -> Result<Tensor> {
        if part.exists(&self.config) { self.norm(rows, Part::Layer(layer, part)) } else { Ok(rows.clone()) }
    }

    /// Applies a layer's RoPE to [rows][heads · head_dim]; `row_positions` holds the (position, length) of each row.
    fn rotate(&self, layer: usize, x: &Tensor, heads: usize, row_positions: &[(usize, usize)]) -> Result<Tensor> {
        let half = self.config.head_dim / 2;
        let (mut cos, mut sin) = (vec![0.0; row_positions.len() * half], vec![0.0; row_positions.len() * half]);
        for (row, &(position, length)) in row_positions.iter().enumerate() {
            let channels = row * half..(row + 1) * half;
            let (cos, sin) = (&mut cos[channels.clone()], &mut sin[channels]);
            let local = self.local_rope.as_ref().filter(|_| self.config.reach(layer).is_some());
            if self.config.rotates(layer) {
                local.unwrap_or(&self.rope).fill(position, length, cos, sin);
            } else {
                self.rope.fill_unrotated(cos, sin);
            }
        }
        tensor(|| {
            let x = x.reshape((row_positions.len(), heads, 2 * half))?;
            let cos = Tensor::from_vec(cos, (row_positions.len(), 1, half), &Device::Cpu)?;
            let sin = Tensor::from_vec(sin, (row_positions.len(), 1, half), &Device::Cpu)?;
            let (x1, x2) = (x.narrow(2, 0, half)?, x.narrow(2, half, half)?);
            let y1 = (x1.broadcast_mul(&cos)? - x2.broadcast_mul(&sin)?)?;
            let y2 = (x2.broadcast_mul(&cos)? + x1.broadcast_mul(&sin)?)?;
            Tensor::cat(&[y1, y2], 2)?.reshape((row_positions.len(), heads * 2 * half))
        })
    }

    /// Queries, keys (both rotated) and values of some rows, [rows][heads · head_dim].
    fn project(
        &self,
        layer: usize,
        hidden: &Tensor,
        weights: Weights,
        row_positions: &[(usize, usize)],
    ) -> Result<[Tensor; 3]> {
        use LayerPart::*;
        let part = |part| Part::Layer(layer, part);
        let x = self.normed(hidden, layer, AttentionNorm)?;
        let mut q = self.linear(&x, part(Q), Some(part(QBias)), weights)?;
        let mut k = self.linear(&x, part(K), Some(part(KBias)), weights)?;
        let v = self.linear(&x, part(V), Some(part(VBias)), weights)?;
        let ModelConfig { heads, kv_heads, head_dim, .. } = self.config;
        match self.config.qk_norm {
            QkNorm::None => (),
            QkNorm::Heads => {
                let by_head = |x: &Tensor, heads| tensor(|| x.reshape((row_positions.len(), heads, head_dim)));
                let flat = |x: Tensor| tensor(|| x.flatten_from(1));
                q = flat(self.norm(&by_head(&q, heads)?, part(QNorm))?)?;
                k = flat(self.norm(&by_head(&k, kv_heads)?, part(KNorm))?)?;
            }
            QkNorm::Projection => (q, k) = (self.norm(&q, part(QNorm))?, self.norm(&k, part(KNorm))?),
        }
        let factors: Vec<f32> = row_positions.iter().map(|&(position, _)| self.config.query_factor(position)).collect();
        let factors = tensor(|| Tensor::from_vec(factors, (row_positions.len(), 1), &Device::Cpu))?;
        let q = self.rotate(layer, &q, heads, row_positions)?;
        Ok([tensor(|| q.broadcast_mul(&factors))?, self.rotate(layer, &k, kv_heads, row_positions)?, v])
    }

    /// Attention of one decode row, `[1][q_width]`.
    fn attend_row(&mut self, layer: usize, step: &Step, index: usize) -> Result<Tensor> {
        let row = step.rows[index];
        let ModelConfig { kv_heads, head_dim, .. } = self.config;
        let (group, rounding, planes) = (self.config.group(), self.options.rounding, self.options.planes);
        check_view(step.view, planes)?;
        let nibbles = planes.upper && self.options.ablation.is_none();
        // A local layer reads every token of it, whatever the draft's pages.
        let hidden = self.config.reach(layer).map(|reach| first_visible(row.position, reach));
        let query = tensor(|| self.between[index].reshape((kv_heads, group, head_dim)))?;
        let mut outputs = Vec::new();
        for kv_head in 0..kv_heads {
            let query = tensor(|| query.get(kv_head))?;
            let head = &mut self.slot(row.slot)?.heads[layer][kv_head];
            let pages = match hidden {
                None => head.choose_pages(step, row.position, &query, rounding, nibbles)?,
                Some(first) => (first / G..visible_pages(row.position)).collect(),
            };
            let (mut keys, mut values) = (Vec::new(), Vec::new());
            for page in pages {
                head.page_values(page, step.view, rounding, &mut keys, &mut values)?;
            }
            for token in visible_buffer(row.position) {
                let at = ring_index(token) * head_dim;
                keys.extend(head.recent_keys[at..at + head_dim].iter().map(|x| x.to_f32()));
                values.extend(head.recent_values[at..at + head_dim].iter().map(|x| x.to_f32()));
            }
            let (quantised, shape) = (visible_quantised(row.position), (keys.len() / head_dim, head_dim));
            let keys = tensor(|| Tensor::from_vec(keys, shape, &Device::Cpu))?;
            let values = tensor(|| Tensor::from_vec(values, shape, &Device::Cpu))?;
            let mask = match (hidden, step.pages) {
                (Some(first), _) => {
                    let hidden = |index: usize| index % shape.0 < first % G && first < quantised;
                    let mask = (0..group * shape.0).map(|index| if hidden(index) { f32::NEG_INFINITY } else { 0.0 });
                    Some(tensor(|| Tensor::from_vec(mask.collect(), (group, shape.0), &Device::Cpu))?)
                }
                (None, Pages::Tokens(n)) => Some(best_tokens(&query, &keys, quantised, n)?),
                (None, _) => None,
            };
            outputs.push(softmax_sum(&query, &keys, &values, mask.as_ref())?);
        }
        tensor(|| Tensor::cat(&outputs, 0)?.reshape((1, ())))
    }

    /// Exact causal attention of a prompt block over the layer's scratch, `[rows][q_width]`.
    fn attend_block(&self, layer: usize, block: &Block) -> Result<Tensor> {
        let ModelConfig { heads, head_dim, .. } = self.config;
        let Some((keys, values)) = &self.scratch else {
            return Err(Error::internal("prompt attention without keys"));
        };
        let tokens = block.start + block.rows;
        // Row r sees tokens 0..=start + r, or the last ones of these.
        let reach = self.config.reach(layer).unwrap_or(usize::MAX);
        let hidden = |index: usize| {
            let (position, token) = (block.start + index / tokens, index % tokens);
            token > position || token < first_visible(position, reach)
        };
        let mask = (0..block.rows * tokens).map(|index| if hidden(index) { f32::NEG_INFINITY } else { 0.0 }).collect();
        let mask = tensor(|| Tensor::from_vec(mask, (block.rows, tokens), &Device::Cpu))?;
        let mut outputs = Vec::new();
        for head in 0..heads {
            let kv_head = head / self.config.group();
            let query = tensor(|| self.between[0].narrow(1, head * head_dim, head_dim)?.contiguous())?;
            let keys = tensor(|| keys.narrow(1, kv_head * head_dim, head_dim)?.contiguous())?;
            let values = tensor(|| values.narrow(1, kv_head * head_dim, head_dim)?.contiguous())?;
            outputs.push(softmax_sum(&query, &keys, &values, Some(&mask))?);
        }
        tensor(|| Tensor::cat(&outputs, 1))
    }

    /// Applies the projection to the last operation's result.
    fn linear_between(&mut self, layer: usize, pass: &Pass, part: LayerPart, bias: LayerPart) -> Result<()> {
        let (part, bias) = (Part::Layer(layer, part), Part::Layer(layer, bias));
        let project = |x| self.linear(x, part, Some(bias), weights_of(pass));
        self.between = self.between.iter().map(project).collect::<Result<_>>()?;
        Ok(())
    }
}

impl Network for ReferenceBackend {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn reads_tokens(&self) -> bool {
        true
    }

    fn embed(&mut self, pass: &Pass) -> Result<()> {
        let tokens: Vec<u32> = match pass {
            Pass::Step(step) => {
                step.rows.iter().map(|row| self.sampler.token(row.slot, row.offset)).collect::<Result<_>>()?
            }
            Pass::Prefill(block) => {
                if block.start == 0 {
                    self.prompt.clear();
                }
                self.last.clear();
                block.prompt[block.start..block.start + block.rows].to_vec()
            }
        };
        let (table, _) = self.weight(Part::Embedding, Weights::Full)?;
        let scale = f64::from(self.config.scales.embedding);
        let hidden = tensor(|| table.index_select(&Tensor::new(tokens.as_slice(), &Device::Cpu)?, 0)? * scale)?;
        let hidden = match pass {
            Pass::Step(_) => (0..tokens.len()).map(|row| tensor(|| hidden.narrow(0, row, 1))).collect::<Result<_>>()?,
            Pass::Prefill(_) => vec![hidden],
        };
        self.set_hidden(pass, hidden)
    }

    fn qkv(&mut self, layer: usize, pass: &Pass) -> Result<()> {
        let hidden = self.hidden(pass)?;
        self.between.clear();
        match pass {
            Pass::Step(step) => {
                let (kv_heads, head_dim) = (self.config.kv_heads, self.config.head_dim);
                for (row, hidden) in step.rows.iter().zip(&hidden) {
                    let row_position = (row.position, row.position + 1);
                    let [q, k, v] = self.project(layer, hidden, step.weights, &[row_position])?;
                    let keys = halves(&tensor(|| k.flatten_all()?.to_vec1())?, "keys", layer)?;
                    let values = halves(&tensor(|| v.flatten_all()?.to_vec1())?, "values", layer)?;
                    let at = ring_index(row.position) * head_dim;
                    for kv_head in 0..kv_heads {
                        let head = &mut self.slot(row.slot)?.heads[layer][kv_head];
                        let from = kv_head * head_dim..(kv_head + 1) * head_dim;
                        head.recent_keys[at..at + head_dim].copy_from_slice(&keys[from.clone()]);
                        head.recent_values[at..at + head_dim].copy_from_slice(&values[from]);
                    }
                    self.between.push(q);
                }
            }
            Pass::Prefill(block) => {
                let positions = block.start..block.start + block.rows;
                let row_positions: Vec<(usize, usize)> =
                    positions.map(|position| (position, block.prompt.len())).collect();
                let [q, k, v] = self.project(layer, &hidden[0], Weights::Full, &row_positions)?;
                if self.options.page_masses {
                    let rows = tensor(|| q.to_vec2::<f32>())?;
                    self.last.extend(row_positions.iter().map(|&(position, _)| position).zip(rows));
                    self.last.drain(..self.last.len().saturating_sub(SNAP_QUERIES));
                }
                let earlier = self.scratch.take().filter(|_| block.start > 0);
                self.scratch = Some(match earlier {
                    None => (k, v),
                    Some((keys, values)) => {
                        (tensor(|| Tensor::cat(&[keys, k], 0))?, tensor(|| Tensor::cat(&[values, v], 0))?)
                    }
                });
                self.between.push(q);
            }
        }
        Ok(())
    }

    fn attend(&mut self, layer: usize, pass: &Pass) -> Result<()> {
        self.between = match pass {
            Pass::Step(step) => {
                (0..step.rows.len()).map(|index| self.attend_row(layer, step, index)).collect::<Result<_>>()?
            }
            Pass::Prefill(block) => vec![self.attend_block(layer, block)?],
        };
        Ok(())
    }

    fn output(&mut self, layer: usize, pass: &Pass) -> Result<()> {
        self.linear_between(layer, pass, LayerPart::Output, LayerPart::OutputBias)
    }

    fn reduce_residual(&mut self, layer: usize, branch: Branch, pass: &Pass) -> Result<()> {
        let norm = match branch {
            Branch::Attention => LayerPart::AttentionOutputNorm,
            Branch::Mlp => LayerPart::MlpOutputNorm,
        };
        self.between = self.between.iter().map(|y| self.normed(y, layer, norm)).collect::<Result<_>>()?;
        let hidden = self.hidden(pass)?;
        let sums = hidden.iter().zip(&self.between).map(|(hidden, y)| tensor(|| hidden + y)).collect::<Result<_>>()?;
        self.set_hidden(pass, sums)
    }

    fn gate_up(&mut self, layer: usize, pass: &Pass) -> Result<()> {
        use LayerPart::*;
        let (weights, part) = (weights_of(pass), |part| Part::Layer(layer, part));
        let mut gated = Vec::new();
        for hidden in self.hidden(pass)? {
            let x = self.normed(&hidden, layer, MlpNorm)?;
            let gate = self.linear(&x, part(Gate), Some(part(GateBias)), weights)?;
            let up = self.linear(&x, part(Up), Some(part(UpBias)), weights)?;
            gated.push(match self.config.activation {
                Activation::Silu => tensor(|| gate.silu()? * up)?,
                Activation::Gelu => tensor(|| gate.gelu()? * up)?,
            });
        }
        self.between = gated;
        Ok(())
    }

    fn down(&mut self, layer: usize, pass: &Pass) -> Result<()> {
        self.linear_between(layer, pass, LayerPart::Down, LayerPart::DownBias)
    }

    fn store(&mut self, layer: usize, slot: usize, tokens: usize) -> Result<()> {
        let Some((keys, values)) = self.scratch.take() else {
            return Err(Error::internal("no prompt to store"));
        };
        let head_dim = self.config.head_dim;
        let options = self.options.clone();
        let last = std::mem::take(&mut self.last);
        let group = self.config.group();
        for kv_head in 0..self.config.kv_heads {
            let of_head = |all: &Tensor| -> Result<Vec<f32>> {
                tensor(|| all.narrow(1, kv_head * head_dim, head_dim)?.flatten_all()?.to_vec1())
            };
            let keys = halves(&of_head(&keys)?, "keys", layer)?;
            let values = halves(&of_head(&values)?, "values", layer)?;
            let heads = || (kv_head * group..(kv_head + 1) * group).map(|head| head * head_dim..(head + 1) * head_dim);
            let queries: Vec<(usize, &[f32])> =
                last.iter().flat_map(|(position, q)| heads().map(|head| (*position, &q[head]))).collect();
            let head = &mut self.slot(slot)?.heads[layer][kv_head];
            if options.page_masses {
                let masses = page_masses(&queries, &keys, visible_pages(tokens));
                let prompt = masses.into_iter().map(|mass| mass as f32).collect();
                head.snap = SnapScores { prompt, ..SnapScores::default() };
            }
            for page in 0..tokens / G {
                let span = page * G * head_dim..(page + 1) * G * head_dim;
                head.keep(page, keys[span.clone()].to_vec(), values[span].to_vec(), head_dim, &options)?;
            }
            for token in tokens.saturating_sub(BUFFER_TOKENS)..tokens {
                let (from, at) = (token * head_dim, ring_index(token) * head_dim);
                head.recent_keys[at..at + head_dim].copy_from_slice(&keys[from..from + head_dim]);
                head.recent_values[at..at + head_dim].copy_from_slice(&values[from..from + head_dim]);
            }
        }
        Ok(())
    }

    fn head(&mut self, pass: &Pass) -> Result<()> {
        let mut logits = Vec::new();
        for hidden in self.hidden(pass)? {
            let last = tensor(|| hidden.narrow(0, hidden.dim(0)? - 1, 1))?;
            let x = self.norm(&last, Part::FinalNorm)?;
            let row = self.linear(&x, Part::Head, None, weights_of(pass))?;
            let row: Vec<f32> = tensor(|| row.flatten_all()?.to_vec1())?;
            check_finite(&row)?;
            logits.extend(row);
        }
        self.logits = logits;
        Ok(())
    }

    fn poll(&mut self) -> Result<()> {
        (self.hooks.poll)()
    }
}

/// Prompts always use the target's weights.
fn weights_of(pass: &Pass) -> Weights {
    match pass {
        Pass::Step(step) => step.weights,
        Pass::Prefill(_) => Weights::Full,
    }
}

/// Refuses a view whose planes are not kept.
fn check_view(view: View, planes: Planes) -> Result<()> {
    if planes.serve(view) {
        Ok(())
    } else {
        Err(Error::internal(format!("view {view:?} of a cache that keeps {planes:?}")))
    }
}

/// Converts keys or values to f16; values beyond its range are an error, never infinity.
fn halves(values: &[f32], what: &str, layer: usize) -> Result<Vec<f16>> {
    let halves: Vec<f16> = values.iter().map(|&x| f16::from_f32(x)).collect();
    match halves.iter().position(|x| !x.is_finite()) {
        None => Ok(halves),
        Some(at) => {
            Err(Error::not_finite(format!("{what} of layer {layer}: {} does not fit half precision", values[at])))
        }
    }
}

/// Activations rounded to codes of at most `most`, row by row, in groups of `group`.
fn rounded_activations(x: &Tensor, group: usize, most: f32) -> Result<Tensor> {
    let mut out = Vec::new();
    for row in tensor(|| x.to_vec2::<f32>())? {
        let codes = quantize_activations_to(&row, group, most)?;
        out.extend(codes.codes.iter().enumerate().map(|(at, &code)| f32::from(code) * codes.scales[at / group]));
    }
    tensor(|| Tensor::from_vec(out, x.shape(), &Device::Cpu))
}

/// `softmax(query · keysᵀ / √head_dim + mask) · values`, `[queries][head_dim]`.
fn softmax_sum(query: &Tensor, keys: &Tensor, values: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
    tensor(|| {
        let scale = 1.0 / (query.dim(1)? as f64).sqrt();
        let mut scores = (query.matmul(&keys.t()?)? * scale)?;
        if let Some(mask) = mask {
            scores = (scores + mask)?;
        }
        let weights = scores.broadcast_sub(&scores.max_keepdim(1)?)?.exp()?;
        weights.matmul(values)?.broadcast_div(&weights.sum_keepdim(1)?)
    })
}

/// A mask `[queries][tokens]` that hides all but the `n` best of the first `quantised` tokens from each query.
fn best_tokens(query: &Tensor, keys: &Tensor, quantised: usize, n: usize) -> Result<Tensor> {
    let scores = tensor(|| query.matmul(&keys.t()?)?.to_vec2::<f32>())?;
    let mut mask = Vec::new();
    for scores in &scores {
        let mut order: Vec<usize> = (0..quantised).collect();
        order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
        let mut row = vec![0.0; scores.len()];
        order.iter().skip(n).for_each(|&token| row[token] = f32::NEG_INFINITY);
        mask.extend(row);
    }
    tensor(|| Tensor::from_vec(mask, (scores.len(), keys.dim(0)?), &Device::Cpu))
}
