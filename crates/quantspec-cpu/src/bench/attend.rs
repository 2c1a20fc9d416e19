//! Decode attention, and scores of pages.

use super::{Machine, Noise, layers};
use crate::attend::{self, SPLIT, Shape, State};
use crate::dispatch::Simd;
use crate::memory::{Array, DisjointSlice};
use crate::pool::{Pool, share};
use crate::quantize;
use quantspec_core::Result;
use quantspec_core::cache::G;
use quantspec_core::config::{Rounding, View, Weights};

/// A case of decode attention.
#[derive(Clone, Copy, Debug)]
pub struct AttentionCase {
    /// Pages to read.
    pub view: View,
    /// Draft or target; a draft's view Upper rounds queries to 8 bits.
    pub weights: Weights,
    /// Rows of the step.
    pub rows: usize,
    /// Query heads of a KV head.
    pub group: usize,
    /// KV heads of a layer.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Tokens in pages; a multiple of 128.
    pub context: usize,
}

/// Decode attention of a layer over pages, without the recent tokens.
pub struct Attention {
    case: AttentionCase,
    simd: Simd,
    pool: Pool,
    shape: Shape,
    states: Vec<State>,
    upper: Array<u8>,
    lower: Array<u8>,
    full: Array<u16>,
    layers: usize,
    layer: usize,
}

impl Attention {
    /// Normally distributed pages, all equal.
    ///
    /// # Errors
    /// If memory is short or threads cannot start.
    pub fn new(Machine { simd, threads }: Machine, case: AttentionCase) -> Result<Attention> {
        let shape = Shape::new(case.head_dim);
        let pages = case.kv_heads * case.context / G;
        let mut attention = Attention {
            case,
            simd,
            pool: Pool::new(threads)?,
            shape,
            states: (0..threads).map(|_| State::new(case.rows * case.group, shape)).collect::<Result<_>>()?,
            upper: Array::zeros(0)?,
            lower: Array::zeros(0)?,
            full: Array::zeros(0)?,
            layers: 0,
            layer: 0,
        };
        attention.layers = layers(attention.bytes());
        let pages = pages * attention.layers;
        let mut noise = Noise(7);
        let mut halves = || -> Vec<u16> { (0..G * shape.d).map(|_| crate::lanes::f16_bits(noise.next())).collect() };
        let (keys, values) = (halves(), halves());
        if case.view == View::Full {
            let page = [keys, values].concat();
            attention.full = Array::zeros(pages * shape.full_len())?;
            attention.full.chunks_exact_mut(page.len()).for_each(|to| to.copy_from_slice(&page));
        } else {
            let (mut upper, mut lower) = (vec![0; shape.upper_bytes()], vec![0; shape.lower_bytes()]);
            let mut scratch = quantize::Scratch::new(shape);
            let kv = (&keys[..], &values[..]);
            quantize::page(simd, shape, Rounding::Balanced, kv, &mut scratch, &mut upper, &mut lower)?;
            attention.upper = Array::zeros(pages * upper.len())?;
            attention.upper.chunks_exact_mut(upper.len()).for_each(|to| to.copy_from_slice(&upper));
            if case.view == View::Both {
                attention.lower = Array::zeros(pages * lower.len())?;
                attention.lower.chunks_exact_mut(lower.len()).for_each(|to| to.copy_from_slice(&lower));
            }
        }
        let (rows, scale) = (case.rows * case.group, std::f32::consts::LOG2_E / (shape.d as f32).sqrt());
        for state in &mut attention.states {
            for r in 0..rows {
                let q: Vec<f32> = (0..shape.d).map(|_| noise.next()).collect();
                state.set_query(r, &q, scale);
            }
        }
        Ok(attention)
    }

    /// Bytes that a call reads.
    pub fn bytes(&self) -> usize {
        let page = match self.case.view {
            View::Upper => self.shape.upper_bytes(),
            View::Both => self.shape.upper_bytes() + self.shape.lower_bytes(),
            View::Full => 2 * self.shape.full_len(),
        };
        self.case.kv_heads * self.case.context / G * page
    }

    /// One layer.
    ///
    /// # Errors
    /// If a kernel panicked.
    pub fn call(&mut self) -> Result<()> {
        let case = self.case;
        let (simd, shape, rows, pages) = (self.simd, self.shape, case.rows * case.group, case.context / G);
        let planes = attend::Planes::of(case.view, case.weights);
        let (upper, lower, full) = (&self.upper, &self.lower, &self.full);
        let at = |len: usize, page: usize| page * len..(page + 1) * len;
        let nibbles = |page: usize| -> (&[u8], &[u8]) {
            let lower = if lower.is_empty() { &[] } else { &lower[at(shape.lower_bytes(), page)] };
            (&upper[at(shape.upper_bytes(), page)], lower)
        };
        let visible = vec![G; rows];
        let (threads, splits) = (self.pool.threads(), pages.div_ceil(SPLIT));
        let first = self.layer * case.kv_heads * pages;
        let states = DisjointSlice::new(&mut self.states);
        self.pool.run(&|thread| {
            // SAFETY: one element per thread.
            let state = unsafe { &mut states.slice(thread, 1)[0] };
            for item in share(case.kv_heads * splits, thread, threads) {
                let (head, split) = (item / splits, item % splits);
                let mine = split * SPLIT..((split + 1) * SPLIT).min(pages);
                state.reset(rows);
                for page in mine.clone() {
                    let at_page = first + head * pages + page;
                    match planes {
                        Some(planes) => {
                            let next = (page + 1 < pages).then(|| nibbles(at_page + 1));
                            let (upper, lower) = nibbles(at_page);
                            attend::nibble_page(simd, state, 0..rows, planes, Rounding::Balanced, upper, lower, next);
                        }
                        None => {
                            let halves = |page: usize| &full[at(shape.full_len(), page)];
                            let next = (page + 1 < pages).then(|| halves(at_page + 1));
                            attend::full_page(simd, state, 0..rows, halves(at_page), &visible, next);
                        }
                    }
                }
            }
        })?;
        self.layer = (self.layer + 1) % self.layers;
        Ok(())
    }
}

/// Scores of a layer's pages, for one query row: the reads of a choice of the best pages.
pub struct PageScores {
    pages: Attention,
    q: Vec<f32>,
    scores: Vec<f32>,
}

impl PageScores {
    /// The view-Upper pages of [`Attention::new`], and a row of normally distributed numbers.
    ///
    /// # Errors
    /// As [`Attention::new`].
    pub fn new(machine: Machine, kv_heads: usize, group: usize, head_dim: usize, context: usize) -> Result<PageScores> {
        let (view, weights, rows) = (View::Upper, Weights::Draft, 1);
        let case = AttentionCase { view, weights, rows, group, kv_heads, head_dim, context };
        let mut noise = Noise(29);
        let q = (0..kv_heads * group * head_dim).map(|_| noise.next()).collect();
        Ok(PageScores { pages: Attention::new(machine, case)?, q, scores: vec![0.0; kv_heads * context / G] })
    }

    /// Bytes that a call reads: scales and zeros of the keys.
    pub fn bytes(&self) -> usize {
        self.scores.len() * 4 * self.pages.case.head_dim
    }

    /// One layer, one KV head after another, in the backend's work split.
    ///
    /// # Errors
    /// If a kernel panicked.
    pub fn call(&mut self) -> Result<()> {
        let PageScores { pages: Attention { case, simd, pool, shape, upper, layers, layer, .. }, q, scores } = self;
        let (case, shape, len, threads) = (*case, *shape, shape.upper_bytes(), pool.threads());
        let (pages, width) = (case.context / G, case.group * shape.d);
        let upper = &upper[*layer * case.kv_heads * pages * len..][..case.kv_heads * pages * len];
        let out = DisjointSlice::new(scores);
        pool.run(&|thread| {
            for head in share(case.kv_heads, thread, threads) {
                // SAFETY: a head is one item of one thread.
                let out = unsafe { out.slice(head * pages, pages) };
                let queries = &q[head * width..][..width];
                let page = |page: usize| &upper[(head * pages + page) * len..][..len];
                let scores = attend::page_scores(*simd, shape, Rounding::Balanced, queries, pages, page);
                out.iter_mut().zip(scores).for_each(|(out, score)| *out = score);
            }
        })?;
        *layer = (*layer + 1) % *layers;
        Ok(())
    }
}
