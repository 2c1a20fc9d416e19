//! What the benches of this crate call: each kernel over the worker pool, on synthetic operands that lie in memory and not in
//! a cache. Not for other crates.
//!
//! A bench holds [`SPREAD`] bytes of operands, one *layer* after the other; a call works on the next layer, as a step of a
//! model does, so that what it reads was not read for a while.

use crate::attend::{self, CHUNK, Shape, State};
use crate::causal::{self, Causal};
use crate::dispatch::{Simd, choose};
use crate::elementwise::PANEL_TOKENS;
use crate::linear::{self, Input, Matrix, PANEL, Store, Weight, row_stride};
use crate::memory::{Array, Parts};
use crate::pool::{Pool, part};
use crate::{bandwidth, prefill, quantize, w4};
use quantspec_core::Result;
use quantspec_core::cache::G;
use quantspec_core::config::{Dtype, Rounding, View, Weights};
use std::hint::black_box;

/// Bytes of operands a bench walks through: more than the caches that one of the benches' machines calls its own.
pub const SPREAD: usize = 512 << 20;

/// Layers of `bytes` that make up [`SPREAD`]: at least two.
fn layers(bytes: usize) -> usize {
    SPREAD.div_ceil(bytes).max(2)
}

/// A fixed stream of numbers, nearly normal (sums of four bytes of xorshift64).
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        let bytes = (self.0 >> 16).to_le_bytes();
        (bytes[..4].iter().map(|b| f32::from(*b)).sum::<f32>() - 510.0) / 147.8
    }
}

/// The kernels and threads of a bench. [`machine`] alone makes it, so the CPU has what they need.
#[derive(Clone, Copy)]
pub struct Machine {
    simd: Simd,
    threads: usize,
}

/// The path of [`choose`] and the threads: `QUANTSPEC_THREADS`, else one per core.
///
/// # Errors
/// Those of [`choose`].
pub fn machine() -> Result<Machine> {
    let asked = std::env::var("QUANTSPEC_THREADS").ok().and_then(|threads| threads.parse().ok());
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    Ok(Machine { simd: choose()?.simd, threads: asked.filter(|threads| *threads > 0).unwrap_or_else(cores) })
}

/// The roof: a plain read of [`SPREAD`] bytes.
pub struct Read {
    simd: Simd,
    pool: Pool,
    data: Array<u32>,
}

impl Read {
    /// # Errors
    /// Where there is no such memory, or no such threads.
    pub fn new(Machine { simd, threads }: Machine) -> Result<Read> {
        let mut data = Array::zeros(SPREAD / 4)?;
        // Written once: pages that were never written may all be one page of zeros.
        data.fill(1);
        Ok(Read { simd, pool: Pool::new(threads)?, data })
    }

    /// All of it.
    ///
    /// # Errors
    /// Where a kernel panicked.
    pub fn call(&mut self) -> Result<()> {
        let (data, threads) = (&self.data, self.pool.threads());
        self.pool.run(&|thread| {
            let mine = part(data.len() / 4096, thread, threads);
            black_box(bandwidth::sum(self.simd, &data[mine.start * 4096..mine.end * 4096]));
        })
    }
}

/// Weights of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// The target's, of a BF16 checkpoint.
    Bf16,
    /// The target's, of an F16 checkpoint.
    F16,
    /// The draft's.
    Int4,
    /// The draft's head.
    Int8,
}

/// A linear layer of `n` outputs and `k` inputs for a few rows of a step.
pub struct Product {
    simd: Simd,
    pool: Pool,
    rows: usize,
    full: Vec<Matrix>,
    draft: Vec<w4::Tiles>,
    acts: w4::Acts,
    x: Array<f32>,
    x16: Array<u16>,
    stride: usize,
    layer: usize,
}

impl Product {
    /// Weights of normal numbers; `n` is a multiple of 32, `k` of 128.
    ///
    /// # Errors
    /// Where there is no such memory, or no such threads.
    pub fn new(Machine { simd, threads }: Machine, stored: Stored, n: usize, k: usize, rows: usize) -> Result<Product> {
        let mut noise = Noise(11);
        let (panels, stride) = (n / PANEL, row_stride(k));
        let weights: Vec<f32> = (0..PANEL * k).map(|_| noise.next() / (k as f32).sqrt()).collect();
        let (mut full, mut draft) = (Vec::new(), Vec::new());
        let mut halves = |dtype: Dtype, bits: fn(f32) -> u16, special: u16| -> Result<()> {
            let mut panel = vec![0; Matrix::panel_len(k)];
            let raw: Vec<u8> = weights.iter().flat_map(|w| bits(*w).to_le_bytes()).collect();
            linear::repack16(&raw, k, dtype == Dtype::Bf16, special, &mut panel);
            for _ in 0..layers(Matrix::bytes_of(panels, k, dtype)) {
                let mut matrix = Matrix::zeros(panels, k, dtype)?;
                if let Store::Bf16(data) | Store::F16(data) = &mut matrix.store {
                    data.chunks_exact_mut(panel.len()).for_each(|to| to.copy_from_slice(&panel));
                }
                full.push(matrix);
            }
            Ok(())
        };
        let mut codes = |bits: w4::Bits| -> Result<()> {
            let mut panel = vec![0; w4::Tiles::panel_bytes(k, bits)];
            w4::encode(simd, bits, &weights, k, &mut panel)?;
            for _ in 0..layers(panels * panel.len()) {
                let mut tiles = w4::Tiles::zeros(panels, k, bits)?;
                tiles.data.chunks_exact_mut(panel.len()).for_each(|to| to.copy_from_slice(&panel));
                draft.push(tiles);
            }
            Ok(())
        };
        match stored {
            Stored::Bf16 => halves(Dtype::Bf16, crate::lanes::bf16_bits, 0x7f80)?,
            Stored::F16 => halves(Dtype::F16, crate::lanes::f16_bits, 0x7c00)?,
            Stored::Int4 => codes(w4::Bits::Four)?,
            Stored::Int8 => codes(w4::Bits::Eight)?,
        }
        let mut x = Array::zeros(rows * stride)?;
        x.chunks_exact_mut(stride).for_each(|row| row[..k].fill_with(|| noise.next()));
        let (mut acts, mut x16) = (w4::Acts::zeros(rows, k)?, Array::zeros(rows * stride)?);
        acts.quantize(simd, &x, stride, rows, k);
        linear::to_bf16(simd, &x, &mut x16);
        Ok(Product { simd, pool: Pool::new(threads)?, rows, full, draft, acts, x, x16, stride, layer: 0 })
    }

    /// Bytes of weights that a call reads.
    pub fn bytes(&self) -> usize {
        self.full.first().map_or_else(|| self.draft[0].data.bytes(), Matrix::bytes)
    }

    /// One matrix.
    ///
    /// # Errors
    /// Where a kernel panicked.
    pub fn call(&mut self) -> Result<()> {
        let (weight, input) = match self.full.get(self.layer) {
            Some(matrix) if prefill::takes_pairs(self.simd, matrix) => {
                (Weight::Full(matrix), Input::Bf16(&self.x16, self.stride))
            }
            Some(matrix) => (Weight::Full(matrix), Input::F32(&self.x, self.stride)),
            None => (Weight::Draft(&self.draft[self.layer]), Input::Int8(&self.acts)),
        };
        linear::run(&self.pool, self.simd, weight, input, self.rows, 1, &|_, out| {
            black_box(out);
        })?;
        self.layer = (self.layer + 1) % self.full.len().max(self.draft.len());
        Ok(())
    }
}

/// Draft weights: a panel of 32 outputs is coded, on one thread.
pub struct Coding {
    simd: Simd,
    bits: w4::Bits,
    k: usize,
    weights: Vec<f32>,
    panel: Vec<u8>,
}

impl Coding {
    /// Weights of normal numbers, `k` inputs; 8 bits where the matrix is the head.
    pub fn new(Machine { simd, .. }: Machine, k: usize, head: bool) -> Coding {
        let bits = if head { w4::Bits::Eight } else { w4::Bits::Four };
        let mut noise = Noise(17);
        let weights = (0..PANEL * k).map(|_| noise.next()).collect();
        Coding { simd, bits, k, weights, panel: vec![0; w4::Tiles::panel_bytes(k, bits)] }
    }

    /// Weights that a call codes.
    pub fn weights(&self) -> usize {
        self.weights.len()
    }

    /// One panel.
    ///
    /// # Errors
    /// Never for these weights.
    pub fn call(&mut self) -> Result<()> {
        w4::encode(self.simd, self.bits, &self.weights, self.k, &mut self.panel)?;
        black_box(&mut self.panel);
        Ok(())
    }
}

/// Flush: a page of one KV head on one thread.
pub struct Flush {
    simd: Simd,
    shape: Shape,
    keys: Vec<u16>,
    values: Vec<u16>,
    scratch: quantize::Scratch,
    upper: Vec<u8>,
    lower: Vec<u8>,
}

impl Flush {
    /// Halves of normal numbers.
    pub fn new(Machine { simd, .. }: Machine, head_dim: usize) -> Flush {
        let shape = Shape::new(head_dim);
        let mut noise = Noise(13);
        let mut halves = || (0..G * head_dim).map(|_| crate::lanes::f16_bits(noise.next())).collect();
        Flush {
            simd,
            shape,
            keys: halves(),
            values: halves(),
            scratch: quantize::Scratch::new(shape),
            upper: vec![0; shape.upper_bytes()],
            lower: vec![0; shape.lower_bytes()],
        }
    }

    /// Bytes of halves that become a page.
    pub fn bytes(&self) -> usize {
        2 * self.shape.full_len()
    }

    /// One page.
    ///
    /// # Errors
    /// None for numbers that are finite.
    pub fn call(&mut self) -> Result<()> {
        let Flush { simd, shape, keys, values, scratch, upper, lower } = self;
        quantize::page(*simd, *shape, Rounding::Balanced, (keys, values), scratch, upper, lower)
    }
}

/// A BF16 matrix for `tokens` prompt rows.
pub struct PromptMatrix {
    simd: Simd,
    pool: Pool,
    matrix: Matrix,
    x: Array<f32>,
    y: Array<f32>,
    panels: usize,
}

impl PromptMatrix {
    /// Zeros: products cost the same. `n` is a multiple of 32, `tokens` of 64.
    ///
    /// # Errors
    /// Where there is no such memory, or no such threads.
    pub fn new(Machine { simd, threads }: Machine, n: usize, k: usize, tokens: usize) -> Result<PromptMatrix> {
        let panels = tokens / PANEL_TOKENS;
        Ok(PromptMatrix {
            simd,
            pool: Pool::new(threads)?,
            matrix: Matrix::zeros(n / PANEL, k, Dtype::Bf16)?,
            x: Array::zeros(panels * prefill::panel_len(k))?,
            y: Array::zeros(tokens * n)?,
            panels,
        })
    }

    /// Floating-point operations of a call.
    pub fn flops(&self) -> usize {
        2 * self.matrix.panels * PANEL * self.matrix.k * self.panels * PANEL_TOKENS
    }

    /// One matrix.
    ///
    /// # Errors
    /// Where a kernel panicked.
    pub fn call(&mut self) -> Result<()> {
        let PromptMatrix { simd, pool, matrix, x, y, panels } = self;
        prefill::gemm(pool, *simd, &mut || Ok(()), matrix, x, y, *panels)
    }
}

/// Causal attention of a block of prompt rows behind `before` tokens.
pub struct PromptAttention {
    simd: Simd,
    pool: Pool,
    heads: usize,
    group: usize,
    d: usize,
    q: Array<f32>,
    keys: Array<u16>,
    values: Array<u16>,
    out: Array<f32>,
    scratch: Vec<causal::Scratch>,
    first: usize,
    panels: usize,
}

impl PromptAttention {
    /// Zeros: scores all alike cost the same. `before` and `rows` are multiples of 64.
    ///
    /// # Errors
    /// Where there is no such memory, or no such threads.
    pub fn new(
        Machine { simd, threads }: Machine,
        (heads, group, d): (usize, usize, usize),
        before: usize,
        rows: usize,
    ) -> Result<PromptAttention> {
        let (panels, tokens) = (rows / PANEL_TOKENS, before + rows);
        let halves = || Array::zeros(heads / group * tokens * d + 16);
        Ok(PromptAttention {
            simd,
            pool: Pool::new(threads)?,
            heads,
            group,
            d,
            q: Array::zeros(panels * heads * prefill::panel_len(d))?,
            keys: halves()?,
            values: halves()?,
            out: Array::zeros(panels * prefill::panel_len(heads * d))?,
            scratch: (0..threads).map(|_| causal::Scratch::new(d, group)).collect::<Result<_>>()?,
            first: before / PANEL_TOKENS,
            panels,
        })
    }

    /// Floating-point operations of a call: both products over the keys each query sees.
    pub fn flops(&self) -> usize {
        let (before, rows) = (self.first * PANEL_TOKENS, self.panels * PANEL_TOKENS);
        4 * self.heads * self.d * (rows * before + rows * (rows + 1) / 2)
    }

    /// One layer.
    ///
    /// # Errors
    /// Where a kernel panicked.
    pub fn call(&mut self) -> Result<()> {
        let causal = Causal {
            heads: self.heads,
            group: self.group,
            d: self.d,
            pairs: self.simd.has_avx512(),
            q: &self.q,
            keys: &self.keys,
            values: &self.values,
            tokens: (self.first + self.panels) * PANEL_TOKENS,
            first: self.first,
            panels: self.panels,
        };
        causal.run(&self.pool, self.simd, &mut || Ok(()), &mut self.scratch, &mut self.out)
    }
}

/// What decode attention is asked for.
#[derive(Clone, Copy, Debug)]
pub struct AttentionCase {
    /// What is read.
    pub view: View,
    /// Who reads: a draft's view Upper rounds queries to 8 bits.
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
    /// Pages of normal numbers, the same in every page.
    ///
    /// # Errors
    /// Where there is no such memory, or no such threads.
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
    /// Where a kernel panicked.
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
        let (threads, chunks) = (self.pool.threads(), pages.div_ceil(CHUNK));
        let first = self.layer * case.kv_heads * pages;
        let states = Parts::new(&mut self.states);
        self.pool.run(&|thread| {
            // SAFETY: one element per thread.
            let state = unsafe { &mut states.slice(thread, 1)[0] };
            for item in part(case.kv_heads * chunks, thread, threads) {
                let (head, chunk) = (item / chunks, item % chunks);
                let mine = chunk * CHUNK..((chunk + 1) * CHUNK).min(pages);
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
                            attend::full_page(simd, state, 0..rows, &full[at(shape.full_len(), at_page)], &visible);
                        }
                    }
                }
            }
        })?;
        self.layer = (self.layer + 1) % self.layers;
        Ok(())
    }
}
