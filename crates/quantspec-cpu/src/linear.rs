//! Linear layers of the target for a few rows: `y[m][n] = x[m][k] · W[n][k]ᵀ`.
//!
//! Weights keep the checkpoint's precision and are repacked at load into panels of 32 outputs. A pass then reads them in
//! address order; lanes are outputs, activations are broadcast, and no sum crosses lanes.
//! * BF16: `[n/32][k/2][32][2]`. With AMX, sixteen pairs of sixteen outputs are a tile; with AVX-512, one `vdpbf16ps` takes a
//!   pair. Both round activations to BF16. Other paths split a word into two f32 by shift and mask and keep f32 activations.
//! * F16 and F32: `[n/32][k][32]`, activations f32.
//!
//! n is padded to panels and k to pairs, with zeros. **Row invariance:** each (row, output) has its own accumulators and sums
//! over k upwards. The number of rows in a pass changes which registers are used, never an operand or the order.

use crate::dispatch::{Simd, portable};
use crate::hierarchy::{self, Planes, Read};
use crate::lanes::{bf16_bits, f16_value, madd};
use crate::memory::Array;
use crate::panel::{PANEL, groups};
use crate::pool::{Pool, WorkQueues, share};
use crate::w4;
use quantspec_core::config::Dtype;
use quantspec_core::{Error, Result};
use std::ops::Range;

/// Rows that share one pass over a panel: twelve pairs of accumulators take 24 of AVX-512's 32 registers.
const GROUP: usize = 6;

/// How a vector kernel reads numbers of a panel: pairs of BF16, or rows of F16 or F32.
#[cfg(target_arch = "x86_64")]
const BF16: u8 = 0;
#[cfg(target_arch = "x86_64")]
const F16: u8 = 1;
#[cfg(target_arch = "x86_64")]
const F32: u8 = 2;

/// k rounded up to pairs.
pub(crate) const fn pairs_of(k: usize) -> usize {
    k.div_ceil(2)
}

/// Row stride of activations for a linear layer of `k` inputs: whole cache lines, zero after k.
pub(crate) const fn row_stride(k: usize) -> usize {
    k.div_ceil(32) * 32
}

/// Weights of the target: in panels of the checkpoint's type, or in planes.
pub(crate) enum Store {
    /// `[panel][k/2][32][2]`
    Bf16(Array<u16>),
    /// `[panel][k][32]`
    F16(Array<u16>),
    /// `[panel][k][32]`
    F32(Array<f32>),
    /// Two planes of nibbles.
    Planes(Planes),
}

/// A repacked weight matrix.
pub(crate) struct Matrix {
    pub(crate) panels: usize,
    pub(crate) k: usize,
    pub(crate) store: Store,
}

impl Matrix {
    /// Elements of one panel.
    pub(crate) const fn panel_len(k: usize) -> usize {
        PANEL * 2 * pairs_of(k)
    }

    /// Bytes of a matrix.
    pub(crate) const fn bytes_of(panels: usize, k: usize, dtype: Dtype) -> usize {
        panels * Matrix::panel_len(k) * dtype.bytes()
    }

    /// A matrix of zeros, to be filled panel by panel.
    pub(crate) fn zeros(panels: usize, k: usize, dtype: Dtype) -> Result<Matrix> {
        let len = panels * Matrix::panel_len(k);
        let store = match dtype {
            Dtype::Bf16 => Store::Bf16(Array::zeros(len)?),
            Dtype::F16 => Store::F16(Array::zeros(len)?),
            Dtype::F32 => Store::F32(Array::zeros(len)?),
        };
        Ok(Matrix { panels, k, store })
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        match &self.store {
            Store::Bf16(w) | Store::F16(w) => w.bytes(),
            Store::F32(w) => w.bytes(),
            Store::Planes(planes) => planes.bytes(),
        }
    }

    /// Row `row` as f32, [k]. A tied model's embedding is read from its head.
    pub(crate) fn row(&self, row: usize, out: &mut [f32]) {
        let (at, lane) = (row / PANEL * Matrix::panel_len(self.k), row % PANEL);
        if let Store::Planes(planes) = &self.store {
            return planes.row(row, out);
        }
        for (c, out) in out[..self.k].iter_mut().enumerate() {
            *out = match &self.store {
                Store::Bf16(w) => crate::lanes::bf16_value(w[at + c / 2 * 2 * PANEL + lane * 2 + c % 2]),
                Store::F16(w) => f16_value(w[at + c * PANEL + lane]),
                Store::F32(w) => w[at + c * PANEL + lane],
                Store::Planes(_) => unreachable!("planes have rows of their own"),
            };
        }
    }
}

/// Inputs per block of a repack: 32 rows of one cache line each.
const REPACK: usize = 32;

/// Repacks little-endian rows `[rows][k]` of 16-bit numbers into a panel; `pairs` selects BF16's layout. Returns true if all
/// exponents are below the mask `special`, so all numbers are finite.
pub(crate) fn repack16(raw: &[u8], k: usize, pairs: bool, special: u16, panel: &mut [u16]) -> bool {
    let rows = raw.len() / (2 * k);
    let number = |row: usize, c: usize| u16::from_le_bytes([raw[2 * (row * k + c)], raw[2 * (row * k + c) + 1]]);
    for first in (0..k).step_by(REPACK) {
        let last = k.min(first + REPACK);
        if pairs {
            for c in (first..last).step_by(2) {
                let out = &mut panel[c * PANEL..][..2 * PANEL];
                for lane in 0..rows {
                    out[2 * lane] = number(lane, c);
                    out[2 * lane + 1] = if c + 1 < k { number(lane, c + 1) } else { 0 };
                }
            }
        } else {
            for c in first..last {
                for (lane, out) in panel[c * PANEL..][..rows].iter_mut().enumerate() {
                    *out = number(lane, c);
                }
            }
        }
    }
    // Without an early exit this compiles to a few vector operations.
    raw.chunks_exact(2).fold(true, |finite, b| finite & (u16::from_le_bytes([b[0], b[1]]) & special != special))
}

/// Places rows `[rows][k]` of f32 into a panel.
pub(crate) fn repack32(rows: &[f32], k: usize, panel: &mut [f32]) {
    for (lane, row) in rows.chunks_exact(k).enumerate() {
        for (c, x) in row.iter().enumerate() {
            panel[c * PANEL + lane] = *x;
        }
    }
}

/// Activations of a pass: m rows `stride` apart, zero after k.
#[derive(Clone, Copy)]
pub(crate) enum Input<'a> {
    /// f32.
    F32(&'a [f32], usize),
    /// BF16, for BF16 weights with AMX or AVX-512.
    Bf16(&'a [u16], usize),
    /// int8 with a scale per 128, for draft weights.
    Int8(&'a w4::Acts),
    /// Limbs of int8 with a scale per 32, for planes.
    Limbs(&'a hierarchy::Acts),
}

/// Weights of a pass.
#[derive(Clone, Copy)]
pub(crate) enum Weight<'a> {
    /// The checkpoint's.
    Full(&'a Matrix),
    /// Draft tiles.
    Tiles(&'a w4::Tiles),
    /// Planes, and what of them.
    Planes(&'a Planes, Read),
}

impl<'a> Weight<'a> {
    fn panels(&self) -> usize {
        match self {
            Weight::Full(matrix) => matrix.panels,
            Weight::Tiles(tiles) => tiles.panels,
            Weight::Planes(planes, _) => planes.panels,
        }
    }

    /// The weights that `thread` reads in [`run`], in units of `per` panels and without work stealing; of planes only the
    /// upper one.
    pub(crate) fn bytes_of_thread(&self, per: usize, thread: usize, threads: usize) -> &'a [u8] {
        let (panels, bytes) = match self {
            Weight::Full(Matrix { panels, store, .. }) => {
                let bytes = match store {
                    Store::Bf16(w) | Store::F16(w) => w.as_bytes(),
                    Store::F32(w) => w.as_bytes(),
                    Store::Planes(planes) => planes.upper.as_bytes(),
                };
                (*panels, bytes)
            }
            Weight::Tiles(tiles) => (tiles.panels, tiles.data.as_bytes()),
            Weight::Planes(planes, _) => (planes.panels, planes.upper.as_bytes()),
        };
        let (unit, mine) = (bytes.len() / (panels / per), share(panels / per, thread, threads));
        &bytes[mine.start * unit..mine.end * unit]
    }
}

/// Rounds rows to BF16.
pub(crate) fn to_bf16(simd: Simd, from: &[f32], to: &mut [u16]) {
    #[inline(always)]
    fn body<const FMA: bool>(from: &[f32], to: &mut [u16]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = bf16_bits(*from);
        }
    }
    portable!(simd, body(from: &[f32], to: &mut [u16]));
}

/// Computes outputs in units of `per` adjacent panels. Calls `each(unit, tile)`, tile `[per][m][32]`, on the thread that
/// computed the unit.
pub(crate) fn run(
    pool: &Pool,
    simd: Simd,
    weight: Weight,
    input: Input,
    m: usize,
    per: usize,
    each: &(dyn Fn(usize, &mut [f32]) + Sync),
) -> Result<()> {
    let (units, threads) = (weight.panels() / per, pool.threads());
    let fits = match (weight, input) {
        (Weight::Full(Matrix { store: Store::Planes(_), .. }), _) => false,
        (Weight::Full(w), Input::F32(x, stride)) => stride >= 2 * pairs_of(w.k) && x.len() >= m * stride,
        (Weight::Full(w), Input::Bf16(x, stride)) => {
            matches!(w.store, Store::Bf16(_)) && simd.has_avx512() && stride >= row_stride(w.k) && x.len() >= m * stride
        }
        (Weight::Tiles(w), Input::Int8(x)) => x.fits(w, m),
        (Weight::Planes(w, read), Input::F32(x, stride)) => {
            read.takes_f32(simd) && stride >= w.k && x.len() >= m * stride
        }
        (Weight::Planes(w, read), Input::Limbs(x)) => !read.takes_f32(simd) && x.fits(w, m),
        _ => false,
    };
    if !fits {
        return Err(Error::internal(format!("activations of another shape than {m} rows of a linear layer")));
    }
    let units = WorkQueues::new(units, threads);
    pool.run(&|thread| {
        let mut tile = vec![0f32; per * m * PANEL];
        let mut scratch = Scratch::new(simd, input, m);
        while let Some(unit) = units.take(thread) {
            for (i, out) in tile.chunks_exact_mut(m * PANEL).enumerate() {
                panel(simd, weight, unit * per + i, input, m, &mut scratch, out);
            }
            each(unit, &mut tile);
        }
    })
}

/// Scratch of one thread.
enum Scratch {
    None,
    /// Accumulators of the AVX-512 kernel.
    #[cfg(target_arch = "x86_64")]
    Chains(Vec<f32>),
    /// Tile registers, in use until this is dropped.
    #[cfg(target_arch = "x86_64")]
    Tiles(crate::amx::Tiles),
}

impl Scratch {
    #[cfg_attr(not(target_arch = "x86_64"), expect(unused_variables, reason = "the portable products need none"))]
    fn new(simd: Simd, input: Input, m: usize) -> Scratch {
        match (simd, input) {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the machine has tiles, as this path was chosen, and this thread holds no others.
            (Simd::Amx, Input::Bf16(..)) => Scratch::Tiles(unsafe { crate::amx::tiles_for_rows(m) }),
            #[cfg(target_arch = "x86_64")]
            (_, Input::Bf16(..)) => Scratch::Chains(vec![0f32; m * avx512::CHAINS]),
            _ => Scratch::None,
        }
    }
}

/// One panel: `out[m][32]`.
fn panel(simd: Simd, weight: Weight, index: usize, input: Input, m: usize, scratch: &mut Scratch, out: &mut [f32]) {
    match (weight, input) {
        (Weight::Tiles(tiles), Input::Int8(acts)) => tiles.panel(simd, index, acts, m, out),
        (Weight::Planes(planes, read), Input::Limbs(acts)) => planes.panel(simd, read, index, acts, m, out),
        (Weight::Planes(planes, _), Input::F32(x, stride)) => planes.panel_f32(simd, index, x, stride, m, out),
        (Weight::Full(matrix), input) => {
            let len = Matrix::panel_len(matrix.k);
            let at: Range<usize> = index * len..(index + 1) * len;
            #[cfg(target_arch = "x86_64")]
            if let (Store::Bf16(w), Input::Bf16(x, stride)) = (&matrix.store, input) {
                match scratch {
                    // SAFETY: made for m rows.
                    Scratch::Tiles(tiles) => unsafe { crate::amx::rows(tiles, &w[at], x, stride, m, out) },
                    Scratch::Chains(chains) => avx512::rows(&w[at], x, stride, m, chains, out),
                    Scratch::None => unreachable!("`Scratch::new` handles BF16 activations"),
                }
                return;
            }
            #[cfg(target_arch = "x86_64")]
            if let Input::F32(x, stride) = input {
                match (simd, &matrix.store) {
                    (Simd::Avx2, Store::Bf16(w)) => return avx2::rows::<BF16, _>(&w[at], x, stride, m, out),
                    (Simd::Avx2, Store::F16(w)) => return avx2::rows::<F16, _>(&w[at], x, stride, m, out),
                    (Simd::Avx2, Store::F32(w)) => return avx2::rows::<F32, _>(&w[at], x, stride, m, out),
                    (Simd::Avx512 | Simd::Amx, Store::F16(w)) => {
                        return avx512::single_rows::<F16, _>(&w[at], x, stride, m, out);
                    }
                    (Simd::Avx512 | Simd::Amx, Store::F32(w)) => {
                        return avx512::single_rows::<F32, _>(&w[at], x, stride, m, out);
                    }
                    _ => (),
                }
            }
            let _ = scratch;
            for (first, rows) in groups(m, GROUP) {
                let out = &mut out[first * PANEL..(first + rows) * PANEL];
                let Input::F32(x, stride) = input else { unreachable!("`run` refuses other pairs") };
                let x = &x[first * stride..];
                match &matrix.store {
                    Store::Bf16(w) => bf16(simd, &w[at.clone()], x, stride, rows, out),
                    Store::F16(w) => f16(simd, &w[at.clone()], x, stride, rows, out),
                    Store::F32(w) => f32(simd, &w[at.clone()], x, stride, rows, out),
                    Store::Planes(_) => unreachable!("a pass specifies the planes it reads"),
                }
            }
        }
        _ => unreachable!("`run` refuses other pairs"),
    }
}

/// Conversion of a stored pair of k to two f32 per lane.
trait Pair: Copy {
    /// Values of k = 2·pair and 2·pair + 1 for lanes `lane .. lane + L`; `w` is a panel.
    fn load<const L: usize>(w: &[Self], pair: usize, lane: usize) -> [[f32; L]; 2];
}

/// A BF16 number of the pair layout.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Bf16(u16);
/// A half.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Half(u16);

impl Pair for Bf16 {
    #[inline(always)]
    fn load<const L: usize>(w: &[Bf16], pair: usize, lane: usize) -> [[f32; L]; 2] {
        let w = &w[(pair * PANEL + lane) * 2..][..2 * L];
        let mut out = [[0f32; L]; 2];
        for l in 0..L {
            let word = u32::from(w[2 * l].0) | u32::from(w[2 * l + 1].0) << 16;
            out[0][l] = f32::from_bits(word << 16);
            out[1][l] = f32::from_bits(word & 0xffff_0000);
        }
        out
    }
}
impl Pair for Half {
    #[inline(always)]
    fn load<const L: usize>(w: &[Half], pair: usize, lane: usize) -> [[f32; L]; 2] {
        let (even, odd) = (&w[2 * pair * PANEL + lane..][..L], &w[(2 * pair + 1) * PANEL + lane..][..L]);
        let mut out = [[0f32; L]; 2];
        for l in 0..L {
            out[0][l] = f16_value(even[l].0);
            out[1][l] = f16_value(odd[l].0);
        }
        out
    }
}
impl Pair for f32 {
    #[inline(always)]
    fn load<const L: usize>(w: &[f32], pair: usize, lane: usize) -> [[f32; L]; 2] {
        let (even, odd) = (&w[2 * pair * PANEL + lane..][..L], &w[(2 * pair + 1) * PANEL + lane..][..L]);
        let mut out = [[0f32; L]; 2];
        out[0].copy_from_slice(even);
        out[1].copy_from_slice(odd);
        out
    }
}

/// M rows × L lanes: one accumulator per (row, output), k upwards.
#[inline(always)]
fn lanes<const FMA: bool, W: Pair, const M: usize, const L: usize>(
    w: &[W],
    x: &[f32],
    stride: usize,
    lane: usize,
    out: &mut [f32],
) {
    let pairs = w.len() / (2 * PANEL);
    let mut acc = [[0f32; L]; M];
    let mut rows = [&x[..0]; M];
    for (j, row) in rows.iter_mut().enumerate() {
        *row = &x[j * stride..][..2 * pairs];
    }
    for pair in 0..pairs {
        let w = W::load::<L>(w, pair, lane);
        for j in 0..M {
            for (k, w) in w.iter().enumerate() {
                let x = rows[j][2 * pair + k];
                for l in 0..L {
                    acc[j][l] = madd::<FMA>(w[l], x, acc[j][l]);
                }
            }
        }
    }
    for j in 0..M {
        out[j * PANEL + lane..][..L].copy_from_slice(&acc[j]);
    }
}

/// A panel for up to GROUP rows, with as many lanes at once as registers hold; the order of sums does not depend on it.
#[inline(always)]
fn panel_body<const FMA: bool, W: Pair>(w: &[W], x: &[f32], stride: usize, m: usize, out: &mut [f32]) {
    match m {
        1 => lanes::<FMA, W, 1, 32>(w, x, stride, 0, out),
        2 => lanes::<FMA, W, 2, 32>(w, x, stride, 0, out),
        _ => {
            for lane in (0..PANEL).step_by(16) {
                match m {
                    3 => lanes::<FMA, W, 3, 16>(w, x, stride, lane, out),
                    4 => lanes::<FMA, W, 4, 16>(w, x, stride, lane, out),
                    5 => lanes::<FMA, W, 5, 16>(w, x, stride, lane, out),
                    _ => lanes::<FMA, W, 6, 16>(w, x, stride, lane, out),
                }
            }
        }
    }
}

fn bf16(simd: Simd, w: &[u16], x: &[f32], stride: usize, m: usize, out: &mut [f32]) {
    // SAFETY: `Bf16` is a transparent u16.
    let w: &[Bf16] = unsafe { std::slice::from_raw_parts(w.as_ptr().cast(), w.len()) };
    portable!(simd, panel_body[Bf16](w: &[Bf16], x: &[f32], stride: usize, m: usize, out: &mut [f32]));
}

fn f16(simd: Simd, w: &[u16], x: &[f32], stride: usize, m: usize, out: &mut [f32]) {
    // SAFETY: `Half` is a transparent u16.
    let w: &[Half] = unsafe { std::slice::from_raw_parts(w.as_ptr().cast(), w.len()) };
    portable!(simd, panel_body[Half](w: &[Half], x: &[f32], stride: usize, m: usize, out: &mut [f32]));
}

fn f32(simd: Simd, w: &[f32], x: &[f32], stride: usize, m: usize, out: &mut [f32]) {
    portable!(simd, panel_body[f32](w: &[f32], x: &[f32], stride: usize, m: usize, out: &mut [f32]));
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::{BF16, F16, F32, Matrix, PANEL, groups};
    use crate::dispatch::Prefetch;
    use std::arch::x86_64::*;

    /// Rows that share a pass: ten accumulators and their operands fill sixteen registers.
    const GROUP: usize = 5;

    /// Pairs per chunk if the lanes take two passes: 2 KiB of weights (F32: 4 KiB). With as much prefetched, and the rows'
    /// activations, this stays in L1 even if rows alias. The fastest of 8 to 256 on Zen 4.
    const CHUNK: usize = 16;

    /// A panel with f32 activations, in the order of sums of the parent's `lanes`. T: storage type of a number.
    pub(super) fn rows<const KIND: u8, T>(w: &[T], x: &[f32], stride: usize, m: usize, out: &mut [f32]) {
        const { assert!(KIND <= F32 && size_of::<T>() == if KIND == F32 { 4 } else { 2 }) };
        let pairs = w.len() / (2 * PANEL);
        assert!(w.len() == Matrix::panel_len(2 * pairs) && out.len() == m * PANEL);
        assert!(x.len() >= (m - 1) * stride + 2 * pairs);
        let (chunk, prefetch) = (if m <= 2 { pairs } else { CHUNK }, Prefetch::choose(m > 2));
        for first in (0..pairs).step_by(chunk) {
            let count = chunk.min(pairs - first);
            for (row, rows) in groups(m, GROUP) {
                let w = w[first * 2 * PANEL..].as_ptr();
                let x = x[row * stride + 2 * first..].as_ptr();
                let (out, add) = (out[row * PANEL..].as_mut_ptr(), first > 0);
                let prefetch = prefetch.filter(|_| row == 0);
                // SAFETY: the path was chosen because the CPU has its features; the lengths were checked above.
                unsafe {
                    match rows {
                        1 => lanes::<KIND, T, 1, 4>(w, count, x, stride, out, add, prefetch),
                        2 => lanes::<KIND, T, 2, 4>(w, count, x, stride, out, add, prefetch),
                        3 => lanes::<KIND, T, 3, 2>(w, count, x, stride, out, add, prefetch),
                        4 => lanes::<KIND, T, 4, 2>(w, count, x, stride, out, add, prefetch),
                        _ => lanes::<KIND, T, GROUP, 2>(w, count, x, stride, out, add, prefetch),
                    }
                }
            }
        }
    }

    /// Numbers k = 0 and 1 of a pair, for eight outputs from `lane` on.
    ///
    /// # Safety
    /// AVX2 and F16C; `[32][2]` or `[2][32]` numbers of the kind at `at`.
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn pair<const KIND: u8, T>(at: *const T, lane: usize) -> [__m256; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            match KIND {
                BF16 => {
                    let words = _mm256_loadu_si256(at.add(2 * lane).cast());
                    let odd = _mm256_and_si256(words, _mm256_set1_epi32(0xffff_0000_u32 as i32));
                    [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(words)), _mm256_castsi256_ps(odd)]
                }
                F16 => [0, PANEL].map(|k| _mm256_cvtph_ps(_mm_loadu_si128(at.add(k + lane).cast()))),
                _ => [0, PANEL].map(|k| _mm256_loadu_ps(at.add(k + lane).cast())),
            }
        }
    }

    /// V vectors of outputs at a time: with M rows, as many accumulators as fit in registers besides the weights. They start
    /// from zero, or from `out` if `add`.
    ///
    /// # Safety
    /// AVX2, FMA and F16C. `w`: `[pairs]` as `pair` reads them; `x`: M rows of `2 · pairs`, `stride` apart; `out`: `[M][32]`.
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn lanes<const KIND: u8, T, const M: usize, const V: usize>(
        w: *const T,
        pairs: usize,
        x: *const f32,
        stride: usize,
        out: *mut f32,
        add: bool,
        prefetch: Option<Prefetch>,
    ) {
        for lane in (0..PANEL).step_by(8 * V) {
            // SAFETY: all offsets are within the caller's promise.
            unsafe {
                let mut acc = [[_mm256_setzero_ps(); V]; M];
                if add {
                    for (j, acc) in acc.iter_mut().enumerate() {
                        for (v, acc) in acc.iter_mut().enumerate() {
                            *acc = _mm256_loadu_ps(out.add(j * PANEL + lane + 8 * v));
                        }
                    }
                }
                for i in 0..pairs {
                    let at = w.add(i * 2 * PANEL);
                    if let Some(prefetch) = prefetch
                        && lane == 0
                    {
                        for line in (0..2 * PANEL).step_by(64 / size_of::<T>()) {
                            prefetch.line(at.wrapping_add(line));
                        }
                    }
                    let mut values = [[_mm256_setzero_ps(); V]; 2];
                    for v in 0..V {
                        [values[0][v], values[1][v]] = pair::<KIND, T>(at, lane + 8 * v);
                    }
                    for (k, values) in values.iter().enumerate() {
                        for (j, acc) in acc.iter_mut().enumerate() {
                            let x = _mm256_broadcast_ss(&*x.add(j * stride + 2 * i + k));
                            for (acc, value) in acc.iter_mut().zip(values) {
                                *acc = _mm256_fmadd_ps(*value, x, *acc);
                            }
                        }
                    }
                }
                for (j, acc) in acc.iter().enumerate() {
                    for (v, acc) in acc.iter().enumerate() {
                        _mm256_storeu_ps(out.add(j * PANEL + lane + 8 * v), *acc);
                    }
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use super::{F16, F32, GROUP, Matrix, PANEL, groups};
    use crate::dispatch::Prefetch;
    use std::arch::x86_64::*;

    /// Pairs per chunk if rows take several passes: 16 KiB of weights, which stay in L1 after the first pass.
    const CHUNK: usize = 128;

    /// Accumulators of one row, in floats: two chains of 32 outputs.
    pub(super) const CHAINS: usize = 2 * PANEL;

    /// Rows of a BF16 panel with BF16 activations; `chains`: scratch of `m · 64` floats.
    pub(super) fn rows(w: &[u16], x: &[u16], stride: usize, m: usize, chains: &mut [f32], out: &mut [f32]) {
        let pairs = w.len() / (2 * PANEL);
        assert!(w.len() == Matrix::panel_len(2 * pairs) && x.len() >= (m - 1) * stride + 2 * pairs);
        assert!(chains.len() >= m * CHAINS && out.len() == m * PANEL);
        let (chunk, prefetch) = (if m <= GROUP { pairs } else { CHUNK }, Prefetch::choose(m > GROUP));
        for first in (0..pairs).step_by(chunk) {
            let count = chunk.min(pairs - first);
            for (row, rows) in groups(m, GROUP) {
                let w = w[first * 2 * PANEL..].as_ptr();
                let x = x[row * stride + 2 * first..].as_ptr();
                let chains = chains[row * CHAINS..].as_mut_ptr();
                // SAFETY: `run` allows BF16 activations on the AVX-512 path only; the lengths were checked above.
                unsafe {
                    let prefetch = prefetch.filter(|_| row == 0);
                    match rows {
                        1 => panel::<1>(w, count, x, stride, chains, first > 0, prefetch),
                        2 => panel::<2>(w, count, x, stride, chains, first > 0, prefetch),
                        3 => panel::<3>(w, count, x, stride, chains, first > 0, prefetch),
                        4 => panel::<4>(w, count, x, stride, chains, first > 0, prefetch),
                        5 => panel::<5>(w, count, x, stride, chains, first > 0, prefetch),
                        _ => panel::<GROUP>(w, count, x, stride, chains, first > 0, prefetch),
                    }
                }
            }
        }
        for (chains, out) in chains.chunks_exact(CHAINS).zip(out.chunks_exact_mut(PANEL)) {
            let (even, odd) = chains.split_at(PANEL);
            out.iter_mut().zip(even).zip(odd).for_each(|((out, even), odd)| *out = even + odd);
        }
    }

    /// Two accumulators per (row, vector), for even and for odd pairs: one chain would expose the latency of `vdpbf16ps`. The
    /// order is the same for every M. They start from zero, or from `chains` if `add`.
    ///
    /// # Safety
    /// AVX-512 F and BF16. `w`: `[pairs][32][2]`; `x`: M rows of `2 · pairs`, `stride` apart; `chains`: `[M][2][32]`.
    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn panel<const M: usize>(
        w: *const u16,
        pairs: usize,
        x: *const u16,
        stride: usize,
        chains: *mut f32,
        add: bool,
        prefetch: Option<Prefetch>,
    ) {
        // SAFETY: all offsets are within the caller's promise; a prefetch may have any address.
        unsafe {
            let sums = |chain: usize, v: usize, j: usize| chains.add(j * CHAINS + chain * PANEL + 16 * v);
            let mut acc = [[[_mm512_setzero_ps(); M]; 2]; 2];
            if add {
                for (chain, acc) in acc.iter_mut().enumerate() {
                    for (v, acc) in acc.iter_mut().enumerate() {
                        for (j, acc) in acc.iter_mut().enumerate() {
                            *acc = _mm512_loadu_ps(sums(chain, v, j));
                        }
                    }
                }
            }
            let step = |acc: &mut [[__m512; M]; 2], pair: usize| {
                if let Some(prefetch) = prefetch {
                    prefetch.line(w.wrapping_add(pair * 64));
                    prefetch.line(w.wrapping_add(pair * 64 + 32));
                }
                let w0: __m512bh = std::mem::transmute(_mm512_loadu_si512(w.add(pair * 64).cast()));
                let w1: __m512bh = std::mem::transmute(_mm512_loadu_si512(w.add(pair * 64 + 32).cast()));
                for j in 0..M {
                    let x = _mm512_set1_epi32(x.add(j * stride + 2 * pair).cast::<i32>().read_unaligned());
                    let x: __m512bh = std::mem::transmute(x);
                    acc[0][j] = _mm512_dpbf16_ps(acc[0][j], w0, x);
                    acc[1][j] = _mm512_dpbf16_ps(acc[1][j], w1, x);
                }
            };
            let mut pair = 0;
            while pair + 1 < pairs {
                step(&mut acc[0], pair);
                step(&mut acc[1], pair + 1);
                pair += 2;
            }
            if pair < pairs {
                step(&mut acc[0], pair);
            }
            for (chain, acc) in acc.iter().enumerate() {
                for (v, acc) in acc.iter().enumerate() {
                    for (j, acc) in acc.iter().enumerate() {
                        _mm512_storeu_ps(sums(chain, v, j), *acc);
                    }
                }
            }
        }
    }

    /// A panel of F16 or F32 with f32 activations, in the order of sums of the parent's `lanes`. T: storage type of a number.
    pub(super) fn single_rows<const KIND: u8, T>(w: &[T], x: &[f32], stride: usize, m: usize, out: &mut [f32]) {
        const { assert!(KIND == F16 && size_of::<T>() == 2 || KIND == F32 && size_of::<T>() == 4) };
        let pairs = w.len() / (2 * PANEL);
        assert!(w.len() == Matrix::panel_len(2 * pairs) && out.len() == m * PANEL);
        assert!(x.len() >= (m - 1) * stride + 2 * pairs);
        let (chunk, prefetch) = (if m <= GROUP { pairs } else { CHUNK }, Prefetch::choose(m > 2));
        for first in (0..pairs).step_by(chunk) {
            let k = 2 * chunk.min(pairs - first);
            for (row, rows) in groups(m, GROUP) {
                let w = w[first * 2 * PANEL..].as_ptr();
                let x = x[row * stride + 2 * first..].as_ptr();
                let (out, add) = (out[row * PANEL..].as_mut_ptr(), first > 0);
                let prefetch = prefetch.filter(|_| row == 0);
                // SAFETY: the path was chosen because the CPU has its features; the lengths were checked above.
                unsafe {
                    match rows {
                        1 => singles::<KIND, T, 1>(w, k, x, stride, out, add, prefetch),
                        2 => singles::<KIND, T, 2>(w, k, x, stride, out, add, prefetch),
                        3 => singles::<KIND, T, 3>(w, k, x, stride, out, add, prefetch),
                        4 => singles::<KIND, T, 4>(w, k, x, stride, out, add, prefetch),
                        5 => singles::<KIND, T, 5>(w, k, x, stride, out, add, prefetch),
                        _ => singles::<KIND, T, GROUP>(w, k, x, stride, out, add, prefetch),
                    }
                }
            }
        }
    }

    /// One accumulator per (row, vector), from zero, or from `out` if `add`.
    ///
    /// # Safety
    /// AVX-512 F. `w`: `[k][32]`; `x`: M rows of k, `stride` apart; `out`: `[M][32]`.
    #[target_feature(enable = "avx512f")]
    unsafe fn singles<const KIND: u8, T, const M: usize>(
        w: *const T,
        k: usize,
        x: *const f32,
        stride: usize,
        out: *mut f32,
        add: bool,
        prefetch: Option<Prefetch>,
    ) {
        // SAFETY: all offsets are within the caller's promise.
        unsafe {
            let mut acc = [[_mm512_setzero_ps(); 2]; M];
            if add {
                for (j, acc) in acc.iter_mut().enumerate() {
                    *acc = [0, 16].map(|lane| _mm512_loadu_ps(out.add(j * PANEL + lane)));
                }
            }
            for c in 0..k {
                let at = w.add(c * PANEL);
                if let Some(prefetch) = prefetch {
                    for line in (0..PANEL).step_by(64 / size_of::<T>()) {
                        prefetch.line(at.wrapping_add(line));
                    }
                }
                let values = [0, 16].map(|lane| match KIND {
                    F16 => _mm512_cvtph_ps(_mm256_loadu_si256(at.add(lane).cast())),
                    _ => _mm512_loadu_ps(at.add(lane).cast()),
                });
                for (j, acc) in acc.iter_mut().enumerate() {
                    let x = _mm512_set1_ps(*x.add(j * stride + c));
                    for (acc, value) in acc.iter_mut().zip(values) {
                        *acc = _mm512_fmadd_ps(value, x, *acc);
                    }
                }
            }
            for (j, acc) in acc.iter().enumerate() {
                _mm512_storeu_ps(out.add(j * PANEL), acc[0]);
                _mm512_storeu_ps(out.add(j * PANEL + 16), acc[1]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Noise, bits, distance, paths};

    /// A matrix of random weights `[n][k]`, and the weights as f32.
    fn matrix(noise: &mut Noise, n: usize, k: usize, dtype: Dtype) -> (Matrix, Vec<f32>) {
        let mut matrix = Matrix::zeros(n.div_ceil(PANEL), k, dtype).unwrap();
        let len = Matrix::panel_len(k);
        let mut weights = noise.normals(n * k);
        for (i, rows) in weights.chunks_mut(PANEL * k).enumerate() {
            let panel = i * len..(i + 1) * len;
            match &mut matrix.store {
                Store::Bf16(w) => {
                    let raw: Vec<u8> = rows.iter().flat_map(|x| bf16_bits(*x).to_le_bytes()).collect();
                    assert!(repack16(&raw, k, true, 0x7f80, &mut w[panel]));
                    rows.iter_mut().for_each(|x| *x = crate::lanes::bf16_value(bf16_bits(*x)));
                }
                Store::F16(w) => {
                    let raw: Vec<u8> = rows.iter().flat_map(|x| crate::lanes::f16_bits(*x).to_le_bytes()).collect();
                    assert!(repack16(&raw, k, false, 0x7c00, &mut w[panel]));
                    rows.iter_mut().for_each(|x| *x = f16_value(crate::lanes::f16_bits(*x)));
                }
                Store::F32(w) => repack32(rows, k, &mut w[panel]),
                Store::Planes(_) => unreachable!("made of a number format"),
            }
        }
        (matrix, weights)
    }

    /// y [m][n] of rows x [m][k].
    fn apply(pool: &Pool, simd: Simd, matrix: &Matrix, x: &[f32], m: usize, n: usize) -> Vec<f32> {
        let (k, stride) = (matrix.k, row_stride(matrix.k));
        let mut rows = vec![0f32; m * stride];
        for j in 0..m {
            rows[j * stride..][..k].copy_from_slice(&x[j * k..][..k]);
        }
        let mut halves = vec![0u16; m * stride];
        to_bf16(simd, &rows, &mut halves);
        let pairs = crate::prefill::takes_pairs(simd, matrix);
        let input = if pairs { Input::Bf16(&halves, stride) } else { Input::F32(&rows, stride) };
        let mut y = vec![f32::NAN; m * n];
        let out = crate::memory::DisjointSlice::new(&mut y);
        run(pool, simd, Weight::Full(matrix), input, m, 1, &|panel, tile| {
            let width = PANEL.min(n - panel * PANEL);
            for j in 0..m {
                // SAFETY: a panel is one unit of one thread.
                unsafe { out.slice(j * n + panel * PANEL, width) }.copy_from_slice(&tile[j * PANEL..][..width]);
            }
        })
        .unwrap();
        y
    }

    #[test]
    fn gemms_match_f64_and_rows_do_not_affect_each_other() {
        let mut noise = Noise::new(7);
        let pools = [Pool::new(1).unwrap(), Pool::new(3).unwrap()];
        for (n, k) in [(96, 256), (40, 172), (33, 7), (64, 1376)] {
            for dtype in [Dtype::Bf16, Dtype::F16, Dtype::F32] {
                let (matrix, w) = matrix(&mut noise, n, k, dtype);
                let x = noise.normals(17 * k);
                for simd in paths() {
                    let bf16 = crate::prefill::takes_pairs(simd, &matrix);
                    let round = |x: &f32| if bf16 { crate::lanes::bf16_value(bf16_bits(*x)) } else { *x };
                    let exact: Vec<f64> = (0..17 * n)
                        .map(|i| {
                            let (x, w) = (&x[i / n * k..][..k], &w[i % n * k..][..k]);
                            x.iter().zip(w).map(|(x, w)| f64::from(round(x)) * f64::from(*w)).sum()
                        })
                        .collect();
                    let alone: Vec<f32> =
                        (0..17).flat_map(|j| apply(&pools[0], simd, &matrix, &x[j * k..][..k], 1, n)).collect();
                    assert!(distance(&alone, &exact) < 1e-6, "{n}x{k} {dtype:?} {simd:?}");
                    for m in 1..=17 {
                        for pool in &pools {
                            let y = apply(pool, simd, &matrix, &x, m, n);
                            assert!(bits(&y) == bits(&alone[..m * n]), "{m} rows, {n}x{k} {dtype:?} {simd:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn rows_of_a_matrix_come_back() {
        let mut noise = Noise::new(8);
        for dtype in [Dtype::Bf16, Dtype::F16, Dtype::F32] {
            let (matrix, w) = matrix(&mut noise, 50, 44, dtype);
            for row in [0, 31, 32, 49] {
                let mut out = vec![0.0; 44];
                matrix.row(row, &mut out);
                assert_eq!(bits(&out), bits(&w[row * 44..][..44]));
            }
        }
    }

    #[test]
    fn nan_weights_are_detected() {
        let mut panel = vec![0u16; Matrix::panel_len(4)];
        let raw = |bits: u16| [0x3f80, 0, bits, 0].iter().flat_map(|x: &u16| x.to_le_bytes()).collect::<Vec<_>>();
        for (bits, mask, finite) in [
            (0x7f80, 0x7f80, false),
            (0xffc0, 0x7f80, false),
            (0x7c00, 0x7c00, false),
            (0x7bff, 0x7c00, true),
            (0x7c00, 0x7f80, true),
        ] {
            assert_eq!(repack16(&raw(bits), 4, true, mask, &mut panel), finite, "{bits:#x}");
        }
    }

    #[test]
    fn unsupported_activation_types_are_refused() {
        let mut noise = Noise::new(9);
        let (pool, (matrix, _)) = (Pool::new(1).unwrap(), matrix(&mut noise, 32, 64, Dtype::F32));
        let x = [0f32; 64];
        for input in [Input::F32(&x, 32), Input::F32(&x[..63], 64), Input::Bf16(&[0; 64], 64)] {
            let error = run(&pool, Simd::Scalar, Weight::Full(&matrix), input, 1, 1, &|_, _| ()).unwrap_err();
            assert_eq!(error.kind, quantspec_core::ErrorKind::Internal);
        }
    }
}
