//! Kernels over the worker pool on synthetic operands in memory, for this crate's benches and [`crate::rates`]. Not for other
//! crates.
//!
//! A bench holds [`SPREAD`] bytes of operands as a sequence of *layers*. Each call uses the next layer, as a model's step
//! does, so its operands are not in the cache.

use crate::attend::{self, CHUNK, Shape, State};
use crate::causal::{self, Causal};
use crate::dispatch::{ChosenPath, Simd, choose};
use crate::elementwise::{LANES, PANEL_TOKENS, activate_mul, rms_norm, rms_norm_panel, rope};
use crate::lanes::{bf16_bits, f16_bits, widen};
use crate::linear::{self, Input, Matrix, Store, Weight, row_stride};
use crate::memory::{Array, DisjointSlice};
use crate::panel::PANEL;
use crate::pool::{Pool, share};
use crate::{CpuBackend, bandwidth, hierarchy, prefill, quantize, w4};
use quantspec_core::Result;
use quantspec_core::cache::{BUFFER_TOKENS, G};
use quantspec_core::config::{Activation, DraftWeights, Dtype, Pages, Planes, Rounding, View, Weights};
use quantspec_core::quantize::ACTIVATION_8;
use quantspec_model::backend::{Hooks, KvCache, Network, Options, Pass, Row, Step};
use quantspec_model::checkpoint::Checkpoint;
use std::hint::black_box;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

/// Bytes of operands a bench cycles through, more than the caches of current server CPUs' core complexes.
pub const SPREAD: usize = 512 << 20;

/// Number of layers of `bytes` that make up [`SPREAD`]; at least two.
fn layers(bytes: usize) -> usize {
    SPREAD.div_ceil(bytes).max(2)
}

/// A fixed sequence of nearly normal numbers (sums of four bytes of xorshift64).
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        let bytes = (self.0 >> 16).to_le_bytes();
        (bytes[..4].iter().map(|b| f32::from(*b)).sum::<f32>() - 510.0) / 147.8
    }

    /// An array of them.
    fn fill(&mut self, len: usize) -> Result<Array<f32>> {
        let mut array = Array::zeros(len)?;
        array.fill_with(|| self.next());
        Ok(array)
    }
}

/// The SIMD path and threads of a bench. Only [`machine`] makes it, so the CPU has the required features.
#[derive(Clone, Copy)]
pub struct Machine {
    simd: Simd,
    threads: usize,
}

impl Machine {
    /// The same path with this number of threads.
    #[must_use]
    pub fn with_threads(self, threads: usize) -> Machine {
        Machine { threads: threads.max(1), ..self }
    }
}

/// The path of [`choose`], and `QUANTSPEC_THREADS` threads, by default one per core.
///
/// # Errors
/// Those of [`choose`].
pub fn machine() -> Result<Machine> {
    let asked = std::env::var("QUANTSPEC_THREADS").ok().and_then(|threads| threads.parse().ok());
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    let threads = asked.filter(|threads| *threads > 0).unwrap_or_else(cores);
    Ok(Machine { simd: choose()?.simd, threads })
}

/// Memory bandwidth: a plain read of [`SPREAD`] bytes, whole or in parts.
pub struct Read {
    simd: Simd,
    pool: Pool,
    data: Array<u32>,
    parts: usize,
    part: usize,
}

impl Read {
    /// Reads all bytes in every call.
    ///
    /// # Errors
    /// If memory is short or threads cannot start.
    pub fn new(machine: Machine) -> Result<Read> {
        Read::in_parts(machine, 1)
    }

    /// Reads one of `parts` parts per call, in order; a power of two up to 4,096.
    ///
    /// # Errors
    /// As [`Read::new`].
    pub fn in_parts(Machine { simd, threads }: Machine, parts: usize) -> Result<Read> {
        let mut data = Array::zeros(SPREAD / 4)?;
        // Written once: unwritten pages may all map to one zero page.
        data.fill(1);
        Ok(Read { simd, pool: Pool::new(threads)?, data, parts, part: 0 })
    }

    /// Bytes that a call reads.
    pub fn bytes(&self) -> usize {
        SPREAD / self.parts
    }

    /// Reads the next part.
    ///
    /// # Errors
    /// If a kernel panicked.
    pub fn call(&mut self) -> Result<()> {
        let (len, threads) = (self.data.len() / self.parts, self.pool.threads());
        let data = &self.data[self.part * len..][..len];
        self.part = (self.part + 1) % self.parts;
        self.pool.run(&|thread| {
            let mine = share(data.len() / 4096, thread, threads);
            black_box(bandwidth::sum(self.simd, &data[mine.start * 4096..mine.end * 4096]));
        })
    }

    /// Bandwidth of one call in GB/s (10⁹), by threads that are awake.
    ///
    /// # Errors
    /// As [`Read::call`].
    pub fn gb_per_s(&mut self) -> Result<f64> {
        // No part ends before all have begun. Otherwise the caller would do the parts of sleeping threads.
        let (begun, threads) = (AtomicUsize::new(0), self.pool.threads());
        self.pool.run(&|_| {
            begun.fetch_add(1, Relaxed);
            while begun.load(Relaxed) < threads {
                std::hint::spin_loop();
            }
        })?;
        let started = Instant::now();
        self.call()?;
        Ok(self.bytes() as f64 / started.elapsed().as_secs_f64() / 1e9)
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
    /// Both planes of int8 weights, as the target reads them.
    Both,
    /// Their upper plane, as the draft reads it.
    Upper,
}

/// A linear layer of `n` outputs and `k` inputs for a few rows of a step.
pub struct Gemm {
    simd: Simd,
    pool: Pool,
    rows: usize,
    full: Vec<Matrix>,
    draft: Vec<w4::Tiles>,
    acts: w4::Acts,
    /// Planes to read.
    read: hierarchy::Read,
    limbs: hierarchy::Acts,
    x: Array<f32>,
    x16: Array<u16>,
    stride: usize,
    layer: usize,
}

impl Gemm {
    /// Normally distributed weights; `n` is a multiple of 32, `k` of 128.
    ///
    /// # Errors
    /// If memory is short or threads cannot start.
    pub fn new(Machine { simd, threads }: Machine, stored: Stored, n: usize, k: usize, rows: usize) -> Result<Gemm> {
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
        let read = if stored == Stored::Upper { hierarchy::Read::Upper } else { hierarchy::Read::Target };
        match stored {
            Stored::Both | Stored::Upper => {
                let both_from = if stored == Stored::Both { 0 } else { panels };
                let (upper, lower) = hierarchy::Planes::panel_bytes(k);
                let (mut high, mut low) = (vec![0; upper], vec![0; if both_from == 0 { lower } else { 0 }]);
                hierarchy::encode(simd, &weights, &[], k, &mut high, &mut low)?;
                for _ in 0..layers(hierarchy::Planes::bytes_of(panels, k, both_from)) {
                    let mut planes = hierarchy::Planes::zeros(panels, k, both_from)?;
                    planes.upper.chunks_exact_mut(upper).for_each(|to| to.copy_from_slice(&high));
                    planes.lower.chunks_exact_mut(lower).for_each(|to| to.copy_from_slice(&low));
                    full.push(Matrix { panels, k, store: Store::Planes(planes) });
                }
            }
            Stored::Bf16 => halves(Dtype::Bf16, crate::lanes::bf16_bits, 0x7f80)?,
            Stored::F16 => halves(Dtype::F16, crate::lanes::f16_bits, 0x7c00)?,
            Stored::Int4 => codes(w4::Bits::Four)?,
            Stored::Int8 => codes(w4::Bits::Eight)?,
        }
        let mut x = Array::zeros(rows * stride)?;
        x.chunks_exact_mut(stride).for_each(|row| row[..k].fill_with(|| noise.next()));
        let (mut acts, mut x16) = (w4::Acts::zeros(rows, k)?, Array::zeros(rows * stride)?);
        acts.quantize(simd, ACTIVATION_8, &x, stride, rows, k);
        let mut limbs = hierarchy::Acts::zeros(rows, k)?;
        limbs.quantize(simd, read, &x, stride, rows, k);
        linear::to_bf16(simd, &x, &mut x16);
        Ok(Gemm { simd, pool: Pool::new(threads)?, rows, full, draft, acts, read, limbs, x, x16, stride, layer: 0 })
    }

    /// Bytes of weights that a call reads.
    pub fn bytes(&self) -> usize {
        match self.full.first().map(|matrix| (&matrix.store, matrix)) {
            Some((Store::Planes(planes), _)) if self.read == hierarchy::Read::Upper => planes.upper.bytes(),
            Some((_, matrix)) => matrix.bytes(),
            None => self.draft[0].data.bytes(),
        }
    }

    /// Multiplies by the next matrix.
    ///
    /// # Errors
    /// If a kernel panicked.
    pub fn call(&mut self) -> Result<()> {
        let (weight, input) = match self.full.get(self.layer) {
            Some(Matrix { store: Store::Planes(planes), .. }) => {
                let f32 = self.read.takes_f32(self.simd);
                let input = if f32 { Input::F32(&self.x, self.stride) } else { Input::Limbs(&self.limbs) };
                (Weight::Planes(planes, self.read), input)
            }
            Some(matrix) if prefill::takes_pairs(self.simd, matrix) => {
                (Weight::Full(matrix), Input::Bf16(&self.x16, self.stride))
            }
            Some(matrix) => (Weight::Full(matrix), Input::F32(&self.x, self.stride)),
            None => (Weight::Tiles(&self.draft[self.layer]), Input::Int8(&self.acts)),
        };
        linear::run(&self.pool, self.simd, weight, input, self.rows, 1, &|_, out| {
            black_box(out);
        })?;
        self.layer = (self.layer + 1) % self.full.len().max(self.draft.len());
        Ok(())
    }
}

/// An elementwise operation. Numbers of in-place operations stay finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// RMSNorm of rows.
    Norm,
    /// RMSNorm of a prompt's panels of 64 rows into the input of a BF16 GEMM.
    PanelNorm,
    /// SiLU(gate) · up, one panel of 32 outputs at a time, as a GEMM yields them.
    Silu,
    /// RoPE of heads of 128.
    Rope,
    /// Adds a linear layer's output to the hidden states, a panel at a time.
    Add,
    /// Rounds a linear layer's input to BF16, for paths with BF16 dot products.
    Bf16,
    /// Rounds a draft layer's input to int8.
    Int8,
    /// Halves to singles.
    Widen,
    /// Merges partial attention results, 16 chunks of pages and the recent tokens, for heads of 128.
    Merge,
}

/// Channels of a head of [`Elementwise`] and [`Append`].
const HEAD: usize = 128;

/// Partial results of a head of [`Op::Merge`]: 16,384 tokens in pages.
const PARTS: usize = 17;

/// An operation on `rows` rows of `k` features, on one thread, as in a step. Operands are in a cache, as after the previous
/// operation.
pub struct Elementwise {
    simd: Simd,
    op: Op,
    rows: usize,
    k: usize,
    /// Input, or the operand of an in-place operation.
    x: Array<f32>,
    /// Second input: weights of a norm, `up`, a linear layer's output, cosines and sines.
    with: Array<f32>,
    y: Array<f32>,
    x16: Array<u16>,
    acts: w4::Acts,
    features: Vec<[f32; LANES]>,
}

impl Elementwise {
    /// Normally distributed numbers. `k` is a multiple of 128, and `rows` of 64 for [`Op::PanelNorm`].
    ///
    /// # Errors
    /// If memory is short.
    pub fn new(Machine { simd, .. }: Machine, op: Op, rows: usize, k: usize) -> Result<Elementwise> {
        let mut noise = Noise(19);
        let stride = row_stride(k);
        let (mut x, mut with) = (noise.fill(rows * stride)?, noise.fill(rows * stride)?);
        let mut y = Array::zeros(rows * stride)?;
        match op {
            // Above 20 the sigmoid is 1, so `gate` does not change.
            Op::Silu => {
                x.iter_mut().for_each(|x| *x = 20.0 + x.abs());
                with.fill(1.0);
            }
            Op::Rope => angles(&mut with),
            Op::Merge => x = noise.fill(rows * k / HEAD * PARTS * (2 + HEAD))?,
            Op::PanelNorm => y = Array::zeros(rows / PANEL_TOKENS * prefill::panel_len(k))?,
            _ => (),
        }
        let mut x16 = Array::zeros(rows * stride)?;
        x16.iter_mut().zip(&*x).for_each(|(to, x)| *to = f16_bits(*x));
        let (acts, features) = (w4::Acts::zeros(rows, k)?, vec![[0.0; LANES]; k]);
        Ok(Elementwise { simd, op, rows, k, x, with, y, x16, acts, features })
    }

    /// Bytes of rows that a call reads and writes.
    pub fn bytes(&self) -> usize {
        let (read, written) = match self.op {
            Op::Norm | Op::PanelNorm | Op::Rope => (4, 4),
            Op::Silu | Op::Add => (8, 4),
            Op::Bf16 => (4, 2),
            Op::Int8 => (4, 1),
            Op::Widen => (2, 4),
            Op::Merge => (4 * PARTS, 4),
        };
        self.rows * self.k * (read + written)
    }

    /// All rows.
    pub fn call(&mut self) {
        let Elementwise { simd, op, rows, k, x, with, y, x16, acts, features } = self;
        let (simd, k, stride) = (*simd, *k, row_stride(*k));
        match op {
            Op::Norm => {
                for (x, y) in x.chunks_exact(stride).zip(y.chunks_exact_mut(stride)) {
                    rms_norm(simd, &x[..k], &with[..k], 1e-5, &mut y[..k]);
                }
            }
            Op::PanelNorm => {
                for (x, y) in x.chunks_exact(k * PANEL_TOKENS).zip(y.chunks_exact_mut(prefill::panel_len(k))) {
                    for lane in (0..PANEL_TOKENS).step_by(LANES) {
                        rms_norm_panel(simd, x, lane, &with[..k], 1e-5, features);
                        prefill::put_features(simd, simd.has_avx512(), y, 0, lane, features);
                    }
                }
            }
            Op::Silu => {
                for (gate, up) in x.chunks_exact_mut(PANEL).zip(with.chunks_exact(PANEL)) {
                    activate_mul(simd, Activation::Silu, gate, up);
                }
            }
            Op::Rope => {
                for (x, row) in x.chunks_exact_mut(stride).zip(with.chunks_exact(stride)) {
                    let (cos, sin) = row[..HEAD].split_at(HEAD / 2);
                    x.chunks_exact_mut(HEAD).for_each(|head| rope(simd, head, cos, sin));
                }
            }
            // The backend's own loop; this operation has no kernel.
            Op::Add => {
                for (hidden, tile) in x.chunks_exact_mut(PANEL).zip(with.chunks_exact(PANEL)) {
                    hidden.iter_mut().zip(tile).for_each(|(hidden, y)| *hidden += *y);
                }
            }
            Op::Bf16 => linear::to_bf16(simd, x, x16),
            Op::Int8 => acts.quantize(simd, ACTIVATION_8, x, stride, *rows, k),
            Op::Widen => widen(simd, x16, x),
            Op::Merge => {
                for (parts, out) in x.chunks_exact(PARTS * (2 + HEAD)).zip(y.chunks_exact_mut(HEAD)) {
                    attend::merge(simd, parts, 2 + HEAD, out);
                }
            }
        }
        black_box((x, y, x16, acts));
    }
}

/// Cosines and sines, alternating per half head.
fn angles(table: &mut [f32]) {
    for (i, half) in table.chunks_mut(HEAD / 2).enumerate() {
        let turned = |c: usize| (i / 2) as f32 + c as f32 / 10.0;
        half.iter_mut().enumerate().for_each(|(c, x)| *x = if i % 2 == 0 { turned(c).cos() } else { turned(c).sin() });
    }
}

/// Appends the keys and values of a step's rows to the ring: RoPE, rounding to f16, and scattered stores, on one thread. The
/// rings are in memory: between two steps a model's weights pass through the caches.
pub struct Append {
    simd: Simd,
    rows: usize,
    kv_heads: usize,
    /// `[row][keys | values]`
    kv: Array<f32>,
    /// `[row][cosines | sines]`
    angles: Vec<f32>,
    ring: Array<u16>,
    layers: usize,
    layer: usize,
    position: usize,
}

impl Append {
    /// Normally distributed numbers, heads of 128.
    ///
    /// # Errors
    /// If memory is short.
    pub fn new(Machine { simd, .. }: Machine, rows: usize, kv_heads: usize) -> Result<Append> {
        let len = kv_heads * Shape::new(HEAD).full_len();
        let layers = layers(2 * len);
        let mut ring = Array::zeros(layers * len)?;
        // Written once: the system clears a page on its first write.
        ring.fill(1);
        let mut table = vec![0.0; rows * HEAD];
        angles(&mut table);
        let kv = Noise(23).fill(rows * 2 * kv_heads * HEAD)?;
        Ok(Append { simd, rows, kv_heads, kv, angles: table, ring, layers, layer: 0, position: 0 })
    }

    /// Bytes of keys and values that a call stores.
    pub fn bytes(&self) -> usize {
        self.rows * self.kv_heads * HEAD * 2 * 2
    }

    /// Appends to one layer, at the positions after those of the last round of layers.
    pub fn call(&mut self) {
        let (width, len) = (self.kv_heads * HEAD, Shape::new(HEAD).full_len());
        let ring = &mut self.ring[self.layer * self.kv_heads * len..][..self.kv_heads * len];
        let mut halves = [0u16; 2 * HEAD];
        for (head, page) in ring.chunks_exact_mut(len).enumerate() {
            for (j, row) in self.kv.chunks_exact_mut(2 * width).enumerate() {
                let (keys, values) = row.split_at_mut(width);
                let (key, value) = (&mut keys[head * HEAD..][..HEAD], &values[head * HEAD..][..HEAD]);
                let (cos, sin) = self.angles[j * HEAD..][..HEAD].split_at(HEAD / 2);
                rope(self.simd, key, cos, sin);
                for (half, x) in halves.iter_mut().zip(key.iter().chain(value)) {
                    *half = f16_bits(*x);
                }
                attend::put_token(page, HEAD, (self.position + j) % G, &halves[..HEAD], &halves[HEAD..]);
            }
        }
        self.layer = (self.layer + 1) % self.layers;
        if self.layer == 0 {
            self.position += self.rows;
        }
    }
}

/// Draft weights: quantises a panel of 32 outputs, on one thread.
pub struct Coding {
    simd: Simd,
    bits: w4::Bits,
    k: usize,
    weights: Vec<f32>,
    panel: Vec<u8>,
}

impl Coding {
    /// Normally distributed weights with `k` inputs; 8 bits if `head`, else 4.
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

    /// Bytes of the f16 input of a page.
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

/// A BF16 GEMM for `tokens` prompt rows.
pub struct PromptMatrix {
    simd: Simd,
    pool: Pool,
    matrix: Matrix,
    x: Array<f32>,
    y: Array<f32>,
    panels: usize,
}

impl PromptMatrix {
    /// Zeros, which take the same time. `n` is a multiple of 32, `tokens` of 64.
    ///
    /// # Errors
    /// If memory is short or threads cannot start.
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

    /// Multiplies by the next matrix.
    ///
    /// # Errors
    /// If a kernel panicked.
    pub fn call(&mut self) -> Result<()> {
        let PromptMatrix { simd, pool, matrix, x, y, panels } = self;
        prefill::gemm(pool, *simd, &mut || Ok(()), matrix, x, y, *panels)
    }
}

/// Causal attention of a block of prompt rows after `before` tokens.
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
    /// Zeros, which take the same time. `before` and `rows` are multiples of 64.
    ///
    /// # Errors
    /// If memory is short or threads cannot start.
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

    /// Floating-point operations of a call: both GEMMs over the keys each query sees.
    pub fn flops(&self) -> usize {
        let (before, rows) = (self.first * PANEL_TOKENS, self.panels * PANEL_TOKENS);
        4 * self.heads * self.d * (rows * before + rows * (rows + 1) / 2)
    }

    /// One layer.
    ///
    /// # Errors
    /// If a kernel panicked.
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
            reach: None,
        };
        causal.run(&self.pool, self.simd, &mut || Ok(()), &mut self.scratch, &mut self.out)
    }
}

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
        let (threads, chunks) = (self.pool.threads(), pages.div_ceil(CHUNK));
        let first = self.layer * case.kv_heads * pages;
        let states = DisjointSlice::new(&mut self.states);
        self.pool.run(&|thread| {
            // SAFETY: one element per thread.
            let state = unsafe { &mut states.slice(thread, 1)[0] };
            for item in share(case.kv_heads * chunks, thread, threads) {
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

/// Score bounds of a layer's pages, for one query row: the reads of a choice of the best pages.
pub struct Bounds {
    pages: Attention,
    q: Vec<f32>,
    bounds: Vec<f32>,
}

impl Bounds {
    /// The view-Upper pages of [`Attention::new`], and a row of normally distributed numbers.
    ///
    /// # Errors
    /// As [`Attention::new`].
    pub fn new(machine: Machine, kv_heads: usize, group: usize, head_dim: usize, context: usize) -> Result<Bounds> {
        let (view, weights, rows) = (View::Upper, Weights::Draft, 1);
        let case = AttentionCase { view, weights, rows, group, kv_heads, head_dim, context };
        let mut noise = Noise(29);
        let q = (0..kv_heads * group * head_dim).map(|_| noise.next()).collect();
        Ok(Bounds { pages: Attention::new(machine, case)?, q, bounds: vec![0.0; kv_heads * context / G] })
    }

    /// Bytes that a call reads: scales and zeros of the keys.
    pub fn bytes(&self) -> usize {
        self.bounds.len() * 4 * self.pages.case.head_dim
    }

    /// One layer, one KV head after another, in the backend's work split.
    ///
    /// # Errors
    /// If a kernel panicked.
    pub fn call(&mut self) -> Result<()> {
        let Bounds { pages: Attention { case, simd, pool, shape, upper, layers, layer, .. }, q, bounds } = self;
        let (case, shape, len, threads) = (*case, *shape, shape.upper_bytes(), pool.threads());
        let (pages, width) = (case.context / G, case.group * shape.d);
        let upper = &upper[*layer * case.kv_heads * pages * len..][..case.kv_heads * pages * len];
        let out = DisjointSlice::new(bounds);
        pool.run(&|thread| {
            for head in share(case.kv_heads, thread, threads) {
                // SAFETY: a head is one item of one thread.
                let out = unsafe { out.slice(head * pages, pages) };
                let queries = &q[head * width..][..width];
                let page = |page: usize| &upper[(head * pages + page) * len..][..len];
                let bounds = attend::page_bounds(*simd, shape, Rounding::Balanced, queries, pages, page);
                out.iter_mut().zip(bounds).for_each(|(out, bound)| *out = bound);
            }
        })?;
        *layer = (*layer + 1) % *layers;
        Ok(())
    }
}

/// Attention of a draft step over its best 16 pages, for 4 KV heads of 128 channels with 4 query heads each. It runs the
/// backend's own operation, whose choice is private. The cost of a choice is the difference between a new choice and a kept
/// one.
pub struct BestPages {
    backend: CpuBackend,
    anew: bool,
    context: usize,
    layer: usize,
}

impl BestPages {
    /// Pages a step reads.
    const CHOSEN: usize = 16;
    const KV_HEADS: usize = 4;
    const GROUP: usize = 4;
    /// Inputs of the model's matrices, which only produce queries and keys.
    const HIDDEN: usize = 64;

    /// A model of normally distributed numbers with `context` tokens in more than 16 pages.
    ///
    /// # Errors
    /// If memory is short or threads cannot start.
    pub fn new(Machine { simd, threads }: Machine, context: usize, anew: bool) -> Result<BestPages> {
        let pages = context / G;
        let layers = layers(BestPages::KV_HEADS * pages * Shape::new(HEAD).upper_bytes());
        let options = Options {
            prompt_capacity: G,
            planes: Planes { upper: true, lower: false, full: false },
            draft_weights: DraftWeights::None,
            step_rows: G,
            block_rows: G,
            threads,
            ..Options::new(1, context + 2 * G)
        };
        let choice = ChosenPath { simd, reason: String::new() };
        let mut backend = CpuBackend::load_on(&BestPages::model(layers)?, &options, Hooks::default(), choice)?;
        backend.open(0, options.capacity)?;
        let tokens: Vec<u32> = (0..G as u32).map(|token| token % PANEL as u32).collect();
        backend.set_window(0, &tokens)?;
        // First fills the ring, then every page from it.
        for start in (0..BUFFER_TOKENS).step_by(G) {
            let rows: Vec<Row> = (0..G).map(|offset| Row { slot: 0, offset, position: start + offset }).collect();
            BestPages::append(&mut backend, &rows)?;
        }
        (0..pages).try_for_each(|page| backend.flush(0, page))?;
        let mut best = BestPages { backend, anew: true, context, layer: 0 };
        let row = best.row();
        BestPages::append(&mut best.backend, &[row])?;
        (0..layers).try_for_each(|_| best.call())?;
        best.anew = anew;
        Ok(best)
    }

    /// A checkpoint of normally distributed numbers. It is leaked, as a process makes few.
    fn model(layers: usize) -> Result<Checkpoint> {
        let heads = BestPages::KV_HEADS * BestPages::GROUP;
        let llama = Llama::new([BestPages::HIDDEN, PANEL, layers, heads, BestPages::KV_HEADS, HEAD, PANEL]);
        let (mut file, mut noise) = (llama.header, Noise(31));
        file.extend((0..llama.bytes / 2).flat_map(|_| bf16_bits(noise.next() / 8.0).to_le_bytes()));
        Checkpoint::from_bytes(llama.config.as_bytes(), file.leak())
    }

    /// Queries, keys and values of rows, in every layer.
    fn append(backend: &mut CpuBackend, rows: &[Row]) -> Result<()> {
        let step = Step { weights: Weights::Full, view: View::Upper, pages: Pages::All, choose_pages: false, rows };
        backend.embed(&Pass::Step(&step))?;
        (0..backend.config().layers).try_for_each(|layer| backend.qkv(layer, &Pass::Step(&step)))
    }

    /// The step's row: it sees all pages, and 129 tokens of the ring.
    fn row(&self) -> Row {
        Row { slot: 0, offset: 0, position: self.context + G }
    }

    /// Bytes that a call reads.
    pub fn bytes(&self) -> usize {
        let shape = Shape::new(HEAD);
        let bounds = if self.anew { self.context / G * 4 * HEAD } else { 0 };
        BestPages::KV_HEADS * (bounds + BestPages::CHOSEN * shape.upper_bytes() + (G + 1) * 4 * HEAD)
    }

    /// One layer.
    ///
    /// # Errors
    /// If a kernel panicked.
    pub fn call(&mut self) -> Result<()> {
        let rows = [self.row()];
        let (weights, view, pages) = (Weights::Draft, View::Upper, Pages::Best(BestPages::CHOSEN));
        let step = Step { weights, view, pages, choose_pages: self.anew, rows: &rows };
        self.backend.attend(self.layer, &Pass::Step(&step))?;
        self.layer = (self.layer + 1) % self.backend.config().layers;
        Ok(())
    }
}

/// Logits like those of text: a bulk with standard deviation 2, and eight candidates above it, one nat apart. At the
/// vocabulary of Llama 3 the candidates hold nine tenths of the mass.
pub fn logits(vocab: usize, seed: u64) -> Vec<f32> {
    let mut noise = Noise(seed.wrapping_mul(2) | 1);
    let mut logits: Vec<f32> = (0..vocab).map(|_| 2.0 * noise.next()).collect();
    for candidate in 0..8 {
        logits[(noise.0 >> 20) as usize % vocab] = 16.0 - candidate as f32;
        noise.next();
    }
    logits
}

/// A BF16 Llama: hidden, intermediate, layers, heads, KV heads, head_dim, vocab.
struct Llama {
    /// Its config.json.
    config: String,
    /// The start of its model.safetensors.
    header: Vec<u8>,
    /// Bytes of numbers that follow.
    bytes: usize,
}

impl Llama {
    /// A model of that shape whose head is its embedding.
    fn new([h, f, layers, heads, kv_heads, d, vocab]: [usize; 7]) -> Llama {
        let config = format!(
            r#"{{"model_type":"llama","hidden_size":{h},"intermediate_size":{f},"num_hidden_layers":{layers},
            "num_attention_heads":{heads},"num_key_value_heads":{kv_heads},"head_dim":{d},"vocab_size":{vocab},
            "max_position_embeddings":131072,"rms_norm_eps":1e-5,"rope_theta":500000.0,"hidden_act":"silu",
            "tie_word_embeddings":true,"torch_dtype":"bfloat16"}}"#
        );
        let mut tensors =
            vec![("model.embed_tokens.weight".to_string(), vec![vocab, h]), ("model.norm.weight".to_string(), vec![h])];
        for layer in 0..layers {
            for (part, shape) in [
                ("input_layernorm", vec![h]),
                ("post_attention_layernorm", vec![h]),
                ("self_attn.q_proj", vec![heads * d, h]),
                ("self_attn.k_proj", vec![kv_heads * d, h]),
                ("self_attn.v_proj", vec![kv_heads * d, h]),
                ("self_attn.o_proj", vec![h, heads * d]),
                ("mlp.gate_proj", vec![f, h]),
                ("mlp.up_proj", vec![f, h]),
                ("mlp.down_proj", vec![h, f]),
            ] {
                tensors.push((format!("model.layers.{layer}.{part}.weight"), shape));
            }
        }
        let (mut header, mut end) = (String::new(), 0);
        for (name, shape) in tensors {
            let start = end;
            end += 2 * shape.iter().product::<usize>();
            let comma = if header.is_empty() { "" } else { "," };
            header +=
                &format!(r#"{comma}"{name}":{{"dtype":"BF16","shape":{shape:?},"data_offsets":[{start},{end}]}}"#);
        }
        let header = format!("{{{header}}}");
        let header = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
        Llama { config, header, bytes: end }
    }
}
