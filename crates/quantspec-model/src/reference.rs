//! The reference [`Backend`]: plain candle tensors in f32, slow.
//!
//! Every operation follows its definition literally, so fast backends can be compared with it. Decode rows are computed one
//! at a time, which makes them row-invariant by construction. The cache holds canonical pages
//! ([`quantspec_core::quantize::Page`]) and f16 buffers. Weights are the checkpoint's values in f32; draft weights are
//! dequantised codes.

use crate::backend::{
    Backend, Block, Branch, Executor, Hooks, HostSampler, KvCache, Memory, Network, Options, Pass, SamplesOnHost, Step,
};
use crate::checkpoint::{Checkpoint, LayerPart, Part};
use crate::importance::{LayerImportance, MadeUpRows};
use crate::prompt_rows::PromptRows;
use crate::rope::RopeTable;
use candle_core::{D, Device, Tensor};
use half::f16;
use quantspec_core::ablation::Values;
use quantspec_core::attend::{
    SNAP_QUERIES, SnapScores, page_bound, page_masses, select_pages, snap_pages, window_pages,
};
use quantspec_core::cache::{
    BUFFER_TOKENS, G, first_visible, ring_index, visible_buffer, visible_pages, visible_quantised,
};
use quantspec_core::config::{
    Activation, DraftWeights, ModelConfig, Pages, Planes, QkNorm, Rounding, TargetWeights, View, Weights,
};
use quantspec_core::page_pool::{PagePool, Prefix};
use quantspec_core::quantize::{
    ACTIVATION_4, ACTIVATION_8, Page, WEIGHT_GROUP, dequantize_both, dequantize_upper, quantize_activations_to,
    quantize_head_row, quantize_page, quantize_weights_row,
};
use quantspec_core::sample::check_finite;
use quantspec_core::weights::{SMALL_GROUP, quantize_row, quantize_row_upper};
use quantspec_core::{Error, Result};
use std::collections::HashMap;
use std::ops::Range;

/// A model in plain tensors.
pub struct ReferenceBackend {
    config: ModelConfig,
    options: Options,
    hooks: Hooks,
    rope: RopeTable,
    /// Of local layers.
    local_rope: Option<RopeTable>,
    /// Weights in f32: matrices [outputs][inputs], vectors [n].
    full: HashMap<Part, Tensor>,
    /// Dequantised draft weights. A missing part drafts with its full weights.
    draft: HashMap<Part, Tensor>,
    slots: Vec<Option<Slot>>,
    /// Page tables and counts alone: every slot has its own copy of a shared page.
    page_pool: PagePool,
    sampler: HostSampler,
    /// Hidden states of the current step, [1][hidden] per row.
    rows: Vec<Tensor>,
    /// Hidden states of the current prompt, [rows][hidden], by the block's first row.
    blocks: HashMap<usize, Tensor>,
    /// Result of the last operation for the next: queries, attention output, gated activations or a projection, [rows][n]
    /// each.
    between: Vec<Tensor>,
    /// Keys and values of the current prompt and layer, [tokens][kv_width] each.
    scratch: Option<(Tensor, Tensor)>,
    /// Positions and queries `[q_width]` of the prompt's last rows in the current layer, at most [`SNAP_QUERIES`].
    last: Vec<(usize, Vec<f32>)>,
    /// Of the last head, `[rows][vocab]`.
    logits: Vec<f32>,
}

/// The cache of one sequence, [layer][kv head].
struct Slot {
    heads: Vec<Vec<Head>>,
}

/// The cache of one KV head in one layer.
struct Head {
    /// Recent keys (after RoPE) and values, [BUFFER_TOKENS][head_dim] each.
    recent_keys: Vec<f16>,
    recent_values: Vec<f16>,
    pages: Vec<Option<Stored>>,
    /// Pages that the current draft reads, and the number visible at the choice; None before the first.
    chosen: Option<(Vec<usize>, usize)>,
    snap: SnapScores,
}

/// One page in the planes that are kept.
struct Stored {
    quantised: Option<Page>,
    /// Keys and values, [G][head_dim] each.
    full: Option<Values>,
    /// Views Upper and Both in an ablation.
    ablated: Option<[Values; 2]>,
}

/// Unwraps a tensor operation. It fails only through a defect: shapes were checked when the checkpoint was opened.
fn tensor<T>(compute: impl FnOnce() -> candle_core::Result<T>) -> Result<T> {
    compute().map_err(|error| Error::internal(format!("reference backend: {error}")))
}

impl ReferenceBackend {
    /// Reads a whole checkpoint into f32 tensors and makes the draft weights.
    ///
    /// # Errors
    /// Those of [`Checkpoint::read_f32`] and of `hooks.poll`, and [`quantspec_core::ErrorKind::NotFinite`] if the range of a
    /// group of draft weights exceeds f16.
    pub fn load(checkpoint: &Checkpoint, options: &Options, mut hooks: Hooks) -> Result<ReferenceBackend> {
        let config = checkpoint.config().clone();
        let mut full = HashMap::new();
        let mut draft = HashMap::new();
        let mut parts = Part::all(&config);
        if config.tied_embeddings {
            parts.push(Part::Head); // separate even if tied: the draft's head is quantised, the embedding is not
        }
        let mut importance = Vec::new();
        if options.weights != TargetWeights::Checkpoint {
            let here = |count: usize, work: &(dyn Fn(Range<usize>) -> Result<()> + Sync)| work(0..count);
            let mut rows = MadeUpRows::new(checkpoint, &here)?;
            importance = (0..config.layers).map(|_| rows.next_layer()).collect::<Result<_>>()?;
        }
        for (done, &part) in parts.iter().enumerate() {
            let (rows, columns) = checkpoint.shape(part);
            let mut values = vec![0.0; rows * columns];
            match options.weights {
                TargetWeights::Checkpoint => checkpoint.read_f32(part, 0..rows, &mut values)?,
                _ => checkpoint.read_stored(part, 0..rows, &mut values)?,
            }
            let codes = match options.weights {
                TargetWeights::Checkpoint => draft_values(part, options, &values, columns)?,
                TargetWeights::Int8 | TargetWeights::Int4 => {
                    // The embedding of a tied model is read from the head.
                    let part = if part == Part::Embedding && config.tied_embeddings { Part::Head } else { part };
                    hierarchy_values(part, options, &importance, &mut values, columns)?
                }
            };
            if let Some(codes) = codes.filter(|_| part != Part::Embedding) {
                draft.insert(part, tensor(|| Tensor::from_vec(codes, (rows, columns), &Device::Cpu))?);
            }
            full.insert(part, tensor(|| Tensor::from_vec(values, (rows, columns), &Device::Cpu))?);
            (hooks.loading)(done + 1, parts.len());
            (hooks.poll)()?;
        }
        Ok(ReferenceBackend {
            rope: RopeTable::new(&config),
            local_rope: RopeTable::local(&config),
            slots: (0..options.slots).map(|_| None).collect(),
            page_pool: PagePool::new(options.pages(), options.slots),
            sampler: HostSampler::new(options.slots, config.vocab),
            options: options.clone(),
            config,
            hooks,
            full,
            draft,
            rows: Vec::new(),
            blocks: HashMap::new(),
            between: Vec::new(),
            scratch: None,
            last: Vec::new(),
            logits: Vec::new(),
        })
    }

    fn slot(&mut self, slot: usize) -> Result<&mut Slot> {
        let found = self.slots.get_mut(slot).and_then(Option::as_mut);
        found.ok_or_else(|| Error::internal(format!("slot {slot} is not open")))
    }

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
            Pass::Prefill(block) => match self.blocks.get(&block.start) {
                Some(tensor) => Ok(vec![tensor.clone()]),
                None => Err(Error::internal(format!("prompt block {} was not embedded", block.start))),
            },
        }
    }

    fn set_hidden(&mut self, pass: &Pass, hidden: Vec<Tensor>) {
        match pass {
            Pass::Step(_) => self.rows = hidden,
            Pass::Prefill(block) => self.blocks.extend(hidden.into_iter().map(|tensor| (block.start, tensor))),
        }
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

    /// Attention of one decode row, [1][q_width].
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

    /// Exact causal attention of a prompt block over the layer's scratch, [rows][q_width].
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
}

/// Returns true if the draft reads quantised weights of this part.
fn draft_kept(part: Part, kind: DraftWeights) -> bool {
    use LayerPart::*;
    match (part, kind) {
        (_, DraftWeights::None) => false,
        (Part::Layer(_, Gate | Up | Down), _) => true,
        (Part::Head | Part::Layer(_, Q | K | V | Output), DraftWeights::Int4) => true,
        _ => false,
    }
}

/// Dequantised draft weights of a part, or None if the draft uses its full weights.
fn draft_values(part: Part, options: &Options, values: &[f32], columns: usize) -> Result<Option<Vec<f32>>> {
    if !draft_kept(part, options.draft_weights) {
        return Ok(None);
    }
    let eight = part.is_drafted_in_8_bits(options.sensitive);
    let mut out = Vec::with_capacity(values.len());
    for row in values.chunks_exact(columns) {
        let row = if eight { quantize_head_row(row)? } else { quantize_weights_row(row)? };
        out.extend(row.dequantize());
    }
    Ok(Some(out))
}

/// The target's values from a part's planes, and the draft's values, or None if the draft reads the target's.
fn hierarchy_values(
    part: Part,
    options: &Options,
    importance: &[LayerImportance],
    values: &mut [f32],
    columns: usize,
) -> Result<Option<Vec<f32>>> {
    use LayerPart::*;
    if !matches!(part, Part::Head | Part::Layer(_, Q | K | V | Output | Gate | Up | Down)) {
        return Ok(None);
    }
    let both = part.has_both_planes_on_cpu(options.weights, importance.len());
    // Matrices of int4 that have both planes, and the head: the draft reads both.
    let few = part == Part::Head || options.weights == TargetWeights::Int4 && both;
    let kept = draft_kept(part, options.draft_weights);
    let upper = kept && !few && !part.is_drafted_in_8_bits(options.sensitive);
    let importance = match part {
        Part::Layer(layer, part) => importance[layer].of(part),
        _ => &[],
    };
    let mut draft = Vec::with_capacity(values.len());
    for row in values.chunks_exact_mut(columns) {
        let quantise = if both { quantize_row } else { quantize_row_upper };
        let codes = quantise(row, importance, SMALL_GROUP)?;
        row.copy_from_slice(&codes.both());
        draft.extend(if upper { codes.upper() } else { codes.both() });
    }
    Ok(kept.then_some(draft))
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

/// `softmax(query · keysᵀ / √head_dim + mask) · values`, [queries][head_dim].
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

impl Head {
    fn new(head_dim: usize, capacity: usize) -> Head {
        Head {
            recent_keys: vec![f16::ZERO; BUFFER_TOKENS * head_dim],
            recent_values: vec![f16::ZERO; BUFFER_TOKENS * head_dim],
            pages: (0..capacity / G).map(|_| None).collect(),
            chosen: None,
            snap: SnapScores::default(),
        }
    }

    /// The pages a row reads. `query` is [group][head_dim]; `upper` says whether pages have quantised keys.
    fn choose_pages(
        &mut self,
        step: &Step,
        position: usize,
        query: &Tensor,
        rounding: Rounding,
        upper: bool,
    ) -> Result<Vec<usize>> {
        let visible = visible_pages(position);
        let chosen = match (step.pages, &self.chosen) {
            (Pages::All | Pages::Tokens(_), _) => return Ok((0..visible).collect()),
            (Pages::Window(_) | Pages::Best(_), Some((chosen, seen))) if !step.choose_pages => {
                let chosen = chosen.iter().copied().filter(|page| *page < visible);
                return Ok(chosen.chain(*seen..visible).collect());
            }
            (Pages::Window(n), _) => window_pages(visible, n),
            // Scores need quantised keys; without them the newest pages are read.
            (Pages::Best(n), _) if !upper => window_pages(visible, n),
            (Pages::Best(n), _) => select_pages(&self.bounds(visible, query, rounding)?, n),
            (Pages::Snap { pages: n, .. }, _) => {
                if step.choose_pages && self.snap.is_due(step.pages, visible) && upper {
                    self.snap.refreshed = self.bounds(visible, query, rounding)?;
                }
                return Ok(snap_pages(self.snap.current(), visible, n));
            }
        };
        self.chosen = Some((chosen.clone(), visible));
        Ok(chosen)
    }

    /// The largest bound of the group's scores in each visible page.
    fn bounds(&self, visible: usize, query: &Tensor, rounding: Rounding) -> Result<Vec<f32>> {
        let queries = tensor(|| query.to_vec2::<f32>())?;
        let bound = |page| {
            let params = &self.quantised(page)?.key_params;
            let best = queries.iter().map(|query| page_bound(query, params, rounding));
            Ok(best.fold(f32::NEG_INFINITY, f32::max))
        };
        (0..visible).map(bound).collect()
    }

    fn stored(&self, page: usize) -> Result<&Stored> {
        let stored = self.pages.get(page).and_then(Option::as_ref);
        stored.ok_or_else(|| Error::internal(format!("page {page} is read before it was quantised")))
    }

    fn quantised(&self, page: usize) -> Result<&Page> {
        self.stored(page)?.quantised.as_ref().ok_or_else(|| Error::internal("quantised planes are not kept"))
    }

    /// Appends the page's keys and values, [G][head_dim] each, as the view dequantises them.
    fn page_values(
        &self,
        page: usize,
        view: View,
        rounding: Rounding,
        keys: &mut Vec<f32>,
        values: &mut Vec<f32>,
    ) -> Result<()> {
        let stored = self.stored(page)?;
        let halves = match (view, &stored.ablated) {
            (View::Full, _) => Some(stored.full.as_ref().ok_or_else(|| Error::internal("full pages are not kept"))?),
            (View::Upper, Some([upper, _])) => Some(upper),
            (View::Both, Some([_, both])) => Some(both),
            (View::Upper | View::Both, None) => None,
        };
        if let Some((full_keys, full_values)) = halves {
            keys.extend(full_keys.iter().map(|x| x.to_f32()));
            values.extend(full_values.iter().map(|x| x.to_f32()));
            return Ok(());
        }
        let page = self.quantised(page)?;
        let dequantise = |upper, lower, params| match view {
            View::Upper => dequantize_upper(upper, params, rounding),
            _ => dequantize_both(upper, lower, params),
        };
        for at in 0..G * page.head_dim {
            let (token, channel) = (at / page.head_dim, at % page.head_dim);
            keys.push(dequantise(page.key_upper[at], page.key_lower[at], page.key_params[channel]));
            values.push(dequantise(page.value_upper[at], page.value_lower[at], page.value_params[token]));
        }
        Ok(())
    }

    /// Stores a complete page in the requested planes.
    fn keep(
        &mut self,
        page: usize,
        keys: Vec<f16>,
        values: Vec<f16>,
        head_dim: usize,
        options: &Options,
    ) -> Result<()> {
        let (quantised, ablated) = match (options.planes.upper, options.ablation) {
            (true, None) => (Some(quantize_page(&keys, &values, head_dim, options.rounding)?), None),
            (true, Some(ablation)) => (None, Some(ablation.page(&keys, &values, head_dim, options.rounding)?)),
            (false, _) => (None, None),
        };
        let stored = Stored { quantised, full: options.planes.full.then_some((keys, values)), ablated };
        match self.pages.get_mut(page) {
            Some(entry) => *entry = Some(stored),
            None => return Err(Error::internal(format!("page {page} is beyond the slot's capacity"))),
        }
        Ok(())
    }
}

impl PromptRows for ReferenceBackend {
    fn kernels(&self) -> String {
        "reference".to_string()
    }

    /// The reference keeps a prompt's keys and values in f32.
    fn row_bytes(&self) -> usize {
        2 * self.config.kv_width() * size_of::<f32>()
    }

    fn export_rows(&mut self, tokens: Range<usize>, out: &mut [u8]) -> Result<()> {
        let Some((keys, values)) = &self.scratch else {
            return Err(Error::internal("no prompt to export"));
        };
        let rows = tensor(|| {
            Tensor::cat(&[keys, values], 1)?.narrow(0, tokens.start, tokens.len())?.flatten_all()?.to_vec1::<f32>()
        })?;
        if out.len() != rows.len() * size_of::<f32>() {
            return Err(Error::internal(format!("{} bytes of room for tokens {tokens:?}", out.len())));
        }
        out.chunks_exact_mut(4).zip(rows).for_each(|(out, x)| out.copy_from_slice(&x.to_le_bytes()));
        Ok(())
    }

    fn import_rows(&mut self, tokens: Range<usize>, bytes: &[u8]) -> Result<()> {
        let width = self.config.kv_width();
        let rows: Vec<f32> =
            bytes.chunks_exact(4).filter_map(|x| x.first_chunk().map(|x| f32::from_le_bytes(*x))).collect();
        let earlier = self.scratch.take().filter(|_| tokens.start > 0);
        self.scratch = Some(tensor(|| {
            let rows = Tensor::from_vec(rows, (tokens.len(), 2 * width), &Device::Cpu)?;
            let (keys, values) = (rows.narrow(1, 0, width)?, rows.narrow(1, width, width)?);
            match &earlier {
                None => Ok((keys, values)),
                Some((before, and)) => Ok((Tensor::cat(&[before, &keys], 0)?, Tensor::cat(&[and, &values], 0)?)),
            }
        })?);
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
                    self.blocks.clear();
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
        self.set_hidden(pass, hidden);
        Ok(())
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
        self.set_hidden(pass, sums);
        Ok(())
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

impl KvCache for ReferenceBackend {
    fn page_pool(&self) -> &PagePool {
        &self.page_pool
    }

    fn open_sharing(&mut self, slot: usize, capacity: usize, prefix: Option<Prefix>) -> Result<()> {
        if capacity > self.options.capacity {
            return Err(Error::does_not_fit(
                format!("a sequence of {capacity} tokens exceeds the capacity of {}", self.options.capacity),
                "load the model for longer sequences",
            ));
        }
        if self.slots.get(slot).is_none_or(Option::is_some) {
            return Err(Error::internal(format!("slot {slot} cannot be opened")));
        }
        self.page_pool.open(slot, capacity, prefix)?;
        let heads = || (0..self.config.kv_heads).map(|_| Head::new(self.config.head_dim, capacity)).collect();
        self.slots[slot] = Some(Slot { heads: (0..self.config.layers).map(|_| heads()).collect() });
        self.sampler.clear(slot);
        Ok(())
    }

    fn close(&mut self, slot: usize) {
        self.page_pool.close(slot);
        if let Some(slot) = self.slots.get_mut(slot) {
            *slot = None;
        }
    }

    fn set_window(&mut self, slot: usize, tokens: &[u32]) -> Result<()> {
        self.slot(slot)?;
        self.sampler.set_window(slot, tokens)
    }

    fn window(&mut self, slot: usize, n: usize) -> Result<Vec<u32>> {
        self.slot(slot)?;
        self.sampler.window(slot, n).map(<[u32]>::to_vec)
    }

    fn flush(&mut self, slot: usize, page: usize) -> Result<()> {
        let (head_dim, options) = (self.config.head_dim, self.options.clone());
        let start = ring_index(page * G) * head_dim; // pages keep their alignment in the ring
        for head in self.slot(slot)?.heads.iter_mut().flatten() {
            let keys = head.recent_keys[start..start + G * head_dim].to_vec();
            let values = head.recent_values[start..start + G * head_dim].to_vec();
            head.keep(page, keys, values, head_dim, &options)?;
        }
        Ok(())
    }
}

impl SamplesOnHost for ReferenceBackend {
    fn host_sampler(&mut self) -> (&mut HostSampler, &[f32]) {
        (&mut self.sampler, &self.logits)
    }
}

impl Executor for ReferenceBackend {}

impl Backend for ReferenceBackend {
    fn memory(&self) -> Memory {
        let bytes = |tensors: &HashMap<Part, Tensor>| tensors.values().map(|tensor| tensor.elem_count() * 4).sum();
        let heads = || self.slots.iter().flatten().flat_map(|slot| slot.heads.iter().flatten());
        let pages = || heads().flat_map(|head| head.pages.iter().flatten());
        let codes = |page: &Page| page.key_upper.len() + page.value_upper.len();
        let params = |page: &Page| 4 * (page.key_params.len() + page.value_params.len());
        let quantised = || pages().filter_map(|page| page.quantised.as_ref());
        let full = pages().filter_map(|page| page.full.as_ref());
        Memory {
            weights_bytes: bytes(&self.full),
            draft_weights_bytes: bytes(&self.draft),
            cache_upper_bytes: quantised().map(|page| codes(page) + params(page)).sum(),
            cache_lower_bytes: quantised().map(codes).sum(),
            cache_full_bytes: full.map(|(keys, values)| 2 * (keys.len() + values.len())).sum(),
            buffer_bytes: heads().map(|head| 2 * (head.recent_keys.len() + head.recent_values.len())).sum(),
            workspace_bytes: self.logits.len() * 4,
            host_bytes: 0,
        }
    }
}

impl ReferenceBackend {
    /// Applies the projection to the last operation's result.
    fn linear_between(&mut self, layer: usize, pass: &Pass, part: LayerPart, bias: LayerPart) -> Result<()> {
        let (part, bias) = (Part::Layer(layer, part), Part::Layer(layer, bias));
        let project = |x| self.linear(x, part, Some(bias), weights_of(pass));
        self.between = self.between.iter().map(project).collect::<Result<_>>()?;
        Ok(())
    }
}

/// Prompts always use the target's weights.
fn weights_of(pass: &Pass) -> Weights {
    match pass {
        Pass::Step(step) => step.weights,
        Pass::Prefill(_) => Weights::Full,
    }
}
