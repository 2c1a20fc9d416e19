//! Decode attention: nibble planes, f16 pages and the buffer.
//!
//! The layout is [`quantspec_core::layout::Layout::Cpu`]. A page of one KV head has G tokens and D channels, D a multiple of
//! 8; `D16` is D rounded up to 16:
//! * upper block: `[key params: s f16[D] | z f16[D] | padding to 64 bytes] [K plane] [value params: s f16[G] | z f16[G]] [V
//!   plane]`,
//! * lower block: `[K plane] [V plane]`.
//!
//! K plane: `[token/64][D/8][4][64 B]`; a 4-byte lane is a token, a 64-byte vector 16 tokens. V plane: lanes are channels, in
//! groups of up to 64: `[group][token/8][vectors of the group][64 B]`; lanes after D are zero. Addresses are in the order of
//! use. A lane holds the nibbles of 8 consecutive channels (K) or tokens (V): index i is in nibble 2i for i < 4, else in
//! nibble 2(i − 4) + 1. Lower nibbles are biased by 8 and rotated right by one nibble within the lane, so that two selects
//! and one rotate give both bytes `16U + L + 8`.
//!
//! f16 pages and the pages of the ring of recent tokens: `K [token/16][D][16] | V [token][D]`.
//!
//! **Order of sums.** A query row is processed page by page. Each page has its own softmax, which is merged into the row's
//! state. Splits of [`SPLIT`] pages start at fixed positions and have separate states. The states are merged in index order,
//! the recent tokens last. Rows share loads, never sums, so a row's bits depend on its position alone.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod full;
mod portable;
#[cfg(target_arch = "x86_64")]
mod prefetch;

pub(crate) use full::full_page;

use crate::dispatch::{Simd, fetch_far, portable};
use crate::lanes::{exp2, f16_value, madd, sum16};
use crate::memory::{Array, DisjointSlice};
use quantspec_core::Result;
use quantspec_core::cache::G;
use quantspec_core::config::{Rounding, View, Weights};
use quantspec_core::layout::{Layout, Offsets};
use std::ops::Range;

/// Pages per split: 1,024 tokens. Shorter splits spread over more threads, longer ones need fewer merges.
pub(crate) const SPLIT: usize = 8;

/// Step rows of one work item. A longer window is several items over the same pages, which the cache then holds.
pub(crate) const ITEM_ROWS: usize = 16;

const _: () = assert!(G == 128);

/// Sizes of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Channels.
    pub(crate) d: usize,
    /// D rounded up to whole vectors.
    pub(crate) d16: usize,
    /// D rounded up to whole tile rows: the stride of queries, with zeros after D.
    pub(crate) d64: usize,
}

impl Shape {
    pub(crate) const fn new(d: usize) -> Shape {
        Shape { d, d16: d.div_ceil(16) * 16, d64: d.div_ceil(64) * 64 }
    }
    /// Offsets of the parts of a page.
    const fn offsets(self) -> Offsets {
        Layout::Cpu.offsets(self.d)
    }
    /// Bytes of the upper block: 17,408 at D 128.
    pub(crate) const fn upper_bytes(self) -> usize {
        self.offsets().upper_bytes
    }
    /// Bytes of the lower block: 16,384 at D 128.
    pub(crate) const fn lower_bytes(self) -> usize {
        self.offsets().lower_bytes
    }
    /// Halves of an f16 page.
    pub(crate) const fn full_len(self) -> usize {
        2 * G * self.d
    }
    /// Start of the K plane in the upper block.
    pub(crate) const fn key_plane(self) -> usize {
        self.offsets().key_plane
    }
    /// Start of the value parameters in the upper block.
    pub(crate) const fn value_params(self) -> usize {
        self.offsets().value_params
    }
    /// Start of the V plane in the upper block.
    pub(crate) const fn value_plane(self) -> usize {
        self.offsets().value_plane
    }
    /// Start of the V plane in the lower block.
    pub(crate) const fn lower_value_plane(self) -> usize {
        self.offsets().lower_value_plane
    }
    /// Length of an array with one number per channel (keys) or per token (values) of a page.
    const fn wide(self) -> usize {
        if self.d64 > G { self.d64 } else { G }
    }
    /// Groups of channel vectors of the V plane: (first vector, vectors).
    pub(crate) fn value_groups(self) -> impl Iterator<Item = (usize, usize)> {
        (0..self.d16 / 16).step_by(4).map(move |first| (first, (self.d16 / 16 - first).min(4)))
    }
}

// The kernels below need whole vectors and no padding between parts.
const _: () = {
    let offsets = Layout::Cpu.offsets(80);
    assert!(offsets.key_params == 0 && offsets.key_plane == 320 && offsets.value_params == 320 + 64 * 80);
    assert!(offsets.value_plane == offsets.value_params + 4 * G && offsets.lower_value_plane == 64 * 80);
    assert!(Shape::new(128).upper_bytes() == 17_408 && Shape::new(128).lower_bytes() == 16_384);
};

/// Planes that are read, and the precision of queries on paths with integer dot products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Planes {
    /// Upper nibbles, 8-bit queries: the draft.
    UpperCoarse,
    /// Upper nibbles, 15-bit queries: an INT4 target.
    Upper,
    /// Both nibbles, 15-bit queries.
    Both,
}

impl Planes {
    /// The planes that rows with this `view` and these weights read; `None` for f16 pages.
    pub(crate) const fn of(view: View, weights: Weights) -> Option<Planes> {
        match (view, weights) {
            (View::Both, _) => Some(Planes::Both),
            (View::Upper, Weights::Draft | Weights::Draft4) => Some(Planes::UpperCoarse),
            (View::Upper, Weights::Full) => Some(Planes::Upper),
            (View::Full, _) => None,
        }
    }

    const fn both(self) -> bool {
        matches!(self, Planes::Both)
    }
    /// Step of a code in units of s, value of the centre code in units of s relative to z, and the centre code.
    const fn code(self, rounding: Rounding) -> (f32, f32, f32) {
        match (self, rounding) {
            // x = (byte − 8)·s/16 + z, centred at 128
            (Planes::Both, _) => (1.0 / 16.0, 120.0 / 16.0, 128.0),
            (_, Rounding::Paper) => (1.0, 8.0, 8.0),
            (_, Rounding::Balanced) => (1.0, 8.0 - 1.0 / 32.0, 8.0),
        }
    }
}

/// State and scratch of one thread for a few query rows. `wide` is [`Shape::wide`].
pub(crate) struct State {
    shape: Shape,
    /// `[rows][D64]`, scaled by log2(e)/√D.
    q: Array<f32>,
    /// Running maximum of the scores, per row.
    m: Vec<f32>,
    /// First tokens of a page that a row does not see, fewer than G.
    hidden: Vec<usize>,
    /// `[rows][16]`: lane sums of p, and of p times the value of the centre code.
    l: Array<f32>,
    zero: Array<f32>,
    /// `[rows][D16]`
    o: Array<f32>,
    /// `[rows][G]` scores, then probabilities.
    s: Array<f32>,
    /// `[rows][wide]` folded queries, then probabilities times steps (paths without limbs).
    folded: Array<f32>,
    /// Per row.
    factors: Vec<Factors>,
    /// Steps and centres of the page's channels (keys), then of its tokens (values): `[2][wide]`.
    params: Array<f32>,
    /// 64 tokens of keys or 16 tokens of values, widened to f32.
    wide: Vec<f32>,
    /// Scratch of paths with integer dot products.
    #[cfg(target_arch = "x86_64")]
    limbs: Limbs,
}

/// Factors of a row on the current page.
#[derive(Clone, Copy, Default)]
struct Factors {
    /// A score is scale · dot product + offset. The portable path's products have the scale.
    #[cfg(target_arch = "x86_64")]
    scale: f32,
    offset: f32,
    /// The state's new output is alpha · old + page · dot product.
    alpha: f32,
    page: f32,
}

/// Operands and results of integer dot products.
#[cfg(target_arch = "x86_64")]
struct Limbs {
    /// `[rows][2][wide]` limbs of a folded query, then of probabilities. [`amx::ROWS`] more rows, which a tile load may
    /// reach.
    data: Array<i8>,
    /// A plane's codes as tiles; see [`amx`].
    codes: Array<u8>,
    /// `[2][amx::ROWS][wide]` 32-bit integers: the dot products of two tiles of limbs.
    accumulators: Array<u32>,
}

impl State {
    /// Room for `rows` query rows.
    pub(crate) fn new(rows: usize, shape: Shape) -> Result<State> {
        let wide = shape.wide();
        Ok(State {
            shape,
            q: Array::zeros(rows * shape.d64)?,
            m: vec![0.0; rows],
            hidden: vec![0; rows],
            l: Array::zeros(rows * 16)?,
            zero: Array::zeros(rows * 16)?,
            o: Array::zeros(rows * shape.d16)?,
            s: Array::zeros(rows * G)?,
            folded: Array::zeros(rows * wide)?,
            factors: vec![Factors::default(); rows],
            params: Array::zeros(2 * wide)?,
            wide: vec![0.0; 64 * shape.d],
            #[cfg(target_arch = "x86_64")]
            limbs: Limbs {
                data: Array::zeros((rows + amx::ROWS) * 2 * wide)?,
                codes: Array::zeros(G * wide)?,
                accumulators: Array::zeros(2 * amx::ROWS * wide)?,
            },
        })
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        let arrays = [&self.q, &self.l, &self.zero, &self.o, &self.s, &self.folded, &self.params];
        let floats: usize = arrays.iter().map(|array| array.bytes()).sum();
        let lists = size_of_val(&self.m[..])
            + size_of_val(&self.hidden[..])
            + size_of_val(&self.factors[..])
            + size_of_val(&self.wide[..]);
        #[cfg(target_arch = "x86_64")]
        let limbs = self.limbs.data.bytes() + self.limbs.codes.bytes() + self.limbs.accumulators.bytes();
        #[cfg(not(target_arch = "x86_64"))]
        let limbs = 0;
        floats + lists + limbs
    }

    /// Bytes of [`State::new`].
    pub(crate) const fn bytes_of(rows: usize, shape: Shape) -> usize {
        let wide = shape.wide();
        let floats = rows * (shape.d64 + shape.d16 + 32 + G + wide + 5) + 2 * wide + 64 * shape.d;
        #[cfg(target_arch = "x86_64")]
        let limbs = (rows + amx::ROWS) * 2 * wide + G * wide + 8 * amx::ROWS * wide;
        #[cfg(not(target_arch = "x86_64"))]
        let limbs = 0;
        4 * floats + rows * size_of::<usize>() + limbs
    }

    /// Sets query row r: `q[D]` times `scale`, which is log2(e)/√D.
    pub(crate) fn set_query(&mut self, r: usize, q: &[f32], scale: f32) {
        let to = &mut self.q[r * self.shape.d64..][..self.shape.d];
        to.iter_mut().zip(q).for_each(|(to, q)| *to = q * scale);
    }

    /// Starts a split.
    pub(crate) fn reset(&mut self, rows: usize) {
        // Finite, since −∞ minus −∞ is NaN.
        self.m[..rows].fill(-1e30);
        self.hidden[..rows].fill(0);
        self.l[..rows * 16].fill(0.0);
        self.zero[..rows * 16].fill(0.0);
        self.o[..rows * self.shape.d16].fill(0.0);
    }

    /// Hides the first `tokens` of the following pages from row r, until the next call or [`State::reset`].
    pub(crate) fn hide(&mut self, r: usize, tokens: usize) {
        self.hidden[r] = tokens;
    }

    /// Masks the scores of hidden tokens.
    fn mask(&mut self, r: usize) {
        self.s[r * G..][..self.hidden[r]].fill(-1e30);
    }

    /// Writes (m, l, `o[D]`) of each row to `out(row)`; o is not yet divided by l.
    pub(crate) fn finish<'a>(&self, rows: usize, out: impl Fn(usize) -> &'a mut [f32]) {
        for r in 0..rows {
            let out = out(r);
            let sum = |x: &Array<f32>| sum16(crate::lanes::take(x, r * 16));
            let zero = sum(&self.zero);
            out[0] = self.m[r];
            out[1] = sum(&self.l);
            for (out, o) in out[2..].iter_mut().zip(&self.o[r * self.shape.d16..][..self.shape.d]) {
                *out = o + zero;
            }
        }
    }

    /// Merges a page whose scores of row r have the maximum `most`. Returns the factors of the state and of the page.
    #[inline(always)]
    fn merge<const FMA: bool>(&mut self, r: usize, most: f32) -> (f32, f32) {
        // One of the two factors is 1.
        let less = exp2::<FMA>(-(self.m[r] - most).abs());
        let factors = if most > self.m[r] { (less, 1.0) } else { (1.0, less) };
        self.m[r] = self.m[r].max(most);
        factors
    }
}

/// Adds one page of nibble planes to rows `rows` of the state. `next`: the following page, to be prefetched.
pub(crate) fn nibble_page(
    simd: Simd,
    state: &mut State,
    rows: Range<usize>,
    planes: Planes,
    rounding: Rounding,
    upper: &[u8],
    lower: &[u8],
    next: Option<(&[u8], &[u8])>,
) {
    assert!(upper.len() == state.shape.upper_bytes() && rows.end <= state.m.len());
    assert!(!planes.both() || lower.len() == state.shape.lower_bytes());
    #[cfg(target_arch = "x86_64")]
    if simd.has_avx512() {
        // SAFETY: the path was chosen because the CPU has its features; the lengths were checked above.
        unsafe { avx512::page(simd == Simd::Amx, state, rows, planes, rounding, upper, lower, next) };
        return;
    }
    #[cfg(target_arch = "x86_64")]
    if simd == Simd::Avx2 {
        assert!(state.shape.d <= avx2::MAX_D, "loading refuses wider heads");
        // SAFETY: as above.
        unsafe { avx2::page(state, rows, planes, rounding, upper, lower, next) };
        return;
    }
    let _ = next;
    portable::page(simd, state, rows, planes, rounding, upper, lower);
}

/// Merges partial results (m, l, `o[D]`) in index order into `out[D]`.
pub(crate) fn merge(simd: Simd, parts: &[f32], stride: usize, out: &mut [f32]) {
    #[inline(always)]
    fn body<const FMA: bool>(parts: &[f32], stride: usize, out: &mut [f32]) {
        let most = parts.chunks_exact(stride).fold(f32::NEG_INFINITY, |a, part| a.max(part[0]));
        let mut l = 0.0;
        out.fill(0.0);
        for part in parts.chunks_exact(stride) {
            let w = exp2::<FMA>(part[0] - most);
            l = madd::<FMA>(part[1], w, l);
            for (out, o) in out.iter_mut().zip(&part[2..]) {
                *out = madd::<FMA>(*o, w, *out);
            }
        }
        let inverse = 1.0 / l;
        out.iter_mut().for_each(|out| *out *= inverse);
    }
    portable!(simd, body(parts: &[f32], stride: usize, out: &mut [f32]));
}

/// Largest score of a page for queries `[_][D]`: core's `page_score` on this layout. `upper`: the page's upper block; `ranges`:
/// scratch for 2D numbers.
fn page_score(simd: Simd, shape: Shape, rounding: Rounding, queries: &[f32], upper: &[u8], ranges: &mut [f32]) -> f32 {
    #[inline(always)]
    fn body<const FMA: bool>(d: usize, middle: f32, queries: &[f32], upper: &[u8], ranges: &mut [f32]) -> f32 {
        // The middle and half of each channel's range, computed once for all queries.
        let (middles, halves) = ranges[..2 * d].split_at_mut(d);
        let (scales, zeros) = upper[..4 * d].split_at(2 * d);
        let params = scales.chunks_exact(2).zip(zeros.chunks_exact(2));
        for ((m, h), (s, z)) in middles.iter_mut().zip(halves.iter_mut()).zip(params) {
            let value = |half: &[u8]| f16_value(u16::from_le_bytes([half[0], half[1]]));
            let s = value(s);
            *m = madd::<FMA>(s, middle, value(z));
            *h = 7.5 * s;
        }
        let mut most = f32::NEG_INFINITY;
        for q in queries.chunks_exact(d) {
            let (mut sums, mut squares) = ([0f32; 8], [0f32; 8]);
            let channels = middles.chunks_exact(8).zip(halves.chunks_exact(8));
            for (q, (m, h)) in q.chunks_exact(8).zip(channels) {
                for l in 0..8 {
                    let x = q[l] * h[l];
                    sums[l] = madd::<FMA>(q[l], m[l], sums[l]);
                    squares[l] = madd::<FMA>(x, x, squares[l]);
                }
            }
            most = most.max(sums.iter().sum::<f32>() + squares.iter().sum::<f32>().sqrt());
        }
        most
    }
    let middle = match rounding {
        Rounding::Paper => 7.5,
        Rounding::Balanced => 7.5 - 1.0 / 32.0,
    };
    let d = shape.d;
    portable!(simd, body(d: usize, middle: f32, queries: &[f32], upper: &[u8], ranges: &mut [f32]) -> f32)
}

/// Pages by which [`page_scores`] prefetches key parameters ahead.
const SCORES_AHEAD: usize = 4;

/// [`page_score`] of `count` pages, whose upper blocks `upper` gives, in order. Parameters are a page apart, too far for
/// hardware prefetchers, so they are prefetched here.
pub(crate) fn page_scores<'a>(
    simd: Simd,
    shape: Shape,
    rounding: Rounding,
    queries: &[f32],
    count: usize,
    upper: impl Fn(usize) -> &'a [u8],
) -> impl Iterator<Item = f32> {
    let mut ranges = vec![0.0; 2 * shape.d];
    (0..count).map(move |page| {
        if page + SCORES_AHEAD < count {
            upper(page + SCORES_AHEAD)[..4 * shape.d].chunks(64).for_each(|line| fetch_far(line.as_ptr()));
        }
        page_score(simd, shape, rounding, queries, upper(page), &mut ranges)
    })
}

/// Writes one token's keys and values into an f16 page (or a page of the ring). `key`, `value`: `[D]` f16.
pub(crate) fn put_token(page: &mut [u16], d: usize, token: usize, key: &[u16], value: &[u16]) {
    let (keys, values) = page.split_at_mut(G * d);
    let block = &mut keys[token / 16 * 16 * d..][..16 * d];
    for (c, key) in key.iter().enumerate() {
        block[c * 16 + token % 16] = *key;
    }
    values[token * d..][..d].copy_from_slice(value);
}

/// Keys of an f16 page in canonical order, `[G][D]`.
pub(crate) fn canonical_keys(page: &[u16], d: usize, out: &mut [u16]) {
    for token in 0..G {
        let block = &page[token / 16 * 16 * d..][..16 * d];
        for (c, out) in out[token * d..][..d].iter_mut().enumerate() {
            *out = block[c * 16 + token % 16];
        }
    }
}

/// Results of rows: `[row][head][part][2 + D]`.
#[derive(Clone, Copy)]
pub(crate) struct Partials<'a> {
    pub(crate) data: DisjointSlice<'a, f32>,
    pub(crate) heads: usize,
    pub(crate) parts: usize,
    pub(crate) d: usize,
}

impl<'a> Partials<'a> {
    /// The numbers of one partial result.
    ///
    /// # Safety
    /// No two threads access the same partial result in one dispatch.
    pub(crate) unsafe fn at(&self, row: usize, head: usize, part: usize) -> &'a mut [f32] {
        let stride = 2 + self.d;
        // SAFETY: partial results do not overlap; each is accessed by one thread, by the caller's promise.
        unsafe { self.data.slice(((row * self.heads + head) * self.parts + part) * stride, stride) }
    }
}

/// 2^x for every x ≤ 0, relative error 3e-6.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
pub(crate) fn avx512_exp2(x: std::arch::x86_64::__m512) -> std::arch::x86_64::__m512 {
    avx512::exp2::<true>(x)
}

#[cfg(test)]
mod tests;
