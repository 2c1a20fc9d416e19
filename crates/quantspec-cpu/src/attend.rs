//! Decode attention: nibble planes, f16 pages and the buffer.
//!
//! The layout is [`quantspec_core::layout::Layout::Cpu`]. A page of one KV head (G tokens, D channels, D a multiple of 8; `D16` is D rounded up to 16):
//! * upper block: `[key params: s f16[D] | z f16[D] | padding to 64 bytes] [K plane] [value params: s f16[G] | z f16[G]] [V plane]`,
//! * lower block: `[K plane] [V plane]`.
//!
//! K plane: `[token/64][D/8][4][64 B]`, a lane of 4 bytes is a token, a vector of 64 bytes 16 tokens. V plane: lanes are
//! channels, in groups of up to 64: `[group][token/8][vectors of the group][64 B]`; lanes behind D are zero. The order of
//! addresses is the order of use. A lane holds the nibbles of 8 consecutive channels (K) or tokens (V): index i sits in nibble
//! 2i for i < 4, else in nibble 2(i − 4) + 1. Lower nibbles are biased by 8 and rotated right by one nibble within the lane,
//! so that two selects and one rotate give both bytes `16U + L + 8`.
//!
//! f16 pages and the pages of the ring of recent tokens: `K [token/16][D][16] | V [token][D]`.
//!
//! **Order of sums.** A query row is taken page by page, each page with its own softmax, merged into the row's state; chunks
//! of [`CHUNK`] pages start at fixed positions, have states of their own, and are merged in index order, the recent tokens
//! last. Rows share loads, never sums: a row's bits depend on its position alone.

use crate::dispatch::{Simd, portable};
use crate::lanes::{exp2, f16_value, madd, sum16, widen};
use crate::memory::{Array, Parts};
use quantspec_core::Result;
use quantspec_core::cache::G;
use quantspec_core::config::Rounding;
use quantspec_core::layout::{Layout, Offsets};

/// Pages of a chunk: 1,024 tokens. Shorter chunks spread over more threads, longer ones merge less.
pub(crate) const CHUNK: usize = 8;

/// Step rows of one work item; longer windows are several items over the same pages, which are then in the cache.
pub(crate) const ITEM_ROWS: usize = 16;

const _: () = assert!(G == 128);

/// Sizes of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Channels.
    pub(crate) d: usize,
    /// Channels in whole vectors.
    pub(crate) d16: usize,
}

impl Shape {
    pub(crate) const fn new(d: usize) -> Shape {
        Shape { d, d16: d.div_ceil(16) * 16 }
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
    /// Groups of channel vectors of the V plane: (first vector, vectors).
    pub(crate) fn value_groups(self) -> impl Iterator<Item = (usize, usize)> {
        (0..self.d16 / 16).step_by(4).map(move |first| (first, (self.d16 / 16 - first).min(4)))
    }
}

// The kernels below rely on whole vectors and on no padding between parts.
const _: () = {
    let offsets = Layout::Cpu.offsets(80);
    assert!(offsets.key_params == 0 && offsets.key_plane == 320 && offsets.value_params == 320 + 64 * 80);
    assert!(offsets.value_plane == offsets.value_params + 4 * G && offsets.lower_value_plane == 64 * 80);
    assert!(Shape::new(128).upper_bytes() == 17_408 && Shape::new(128).lower_bytes() == 16_384);
};

/// Which planes are read, and how finely the query is rounded on paths with integer dot products.
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
    const fn both(self) -> bool {
        matches!(self, Planes::Both)
    }
    /// Step of a code in units of s, value of the centre code in units of s over z, and the centre code.
    const fn code(self, rounding: Rounding) -> (f32, f32, f32) {
        match (self, rounding) {
            // x = (byte − 8)·s/16 + z, centred at 128
            (Planes::Both, _) => (1.0 / 16.0, 120.0 / 16.0, 128.0),
            (_, Rounding::Paper) => (1.0, 8.0, 8.0),
            (_, Rounding::Balanced) => (1.0, 8.0 - 1.0 / 32.0, 8.0),
        }
    }
}

/// State and scratch of one thread for a few query rows.
pub(crate) struct State {
    shape: Shape,
    /// `[rows][D16]`, scaled by log2(e)/√D.
    pub(crate) q: Array<f32>,
    /// Running maximum of the scores, per row.
    m: Vec<f32>,
    /// `[rows][16]`: lane sums of p, and of p times the value of the centre code.
    l: Array<f32>,
    zero: Array<f32>,
    /// `[rows][D16]`
    o: Array<f32>,
    /// `[rows][G]` scores, then probabilities.
    s: Array<f32>,
    /// `[rows][2][max(D16, G)]` limbs of a folded query, then of probabilities.
    #[cfg(target_arch = "x86_64")]
    limbs: Array<i8>,
    /// `[rows][max(D16, G)]` folded queries, then probabilities times steps (paths without limbs).
    folded: Array<f32>,
    /// Per row: scale and offset of its scores, factor of the state, factor of the page.
    f: Vec<[f32; 4]>,
    /// Steps and centres of the page's channels (keys), then of its tokens (values).
    params: Array<f32>,
    /// 64 tokens of keys or 16 of values, widened.
    wide: Vec<f32>,
    /// Few rows: planes are fetched ahead line by line.
    #[cfg(target_arch = "x86_64")]
    ahead: bool,
}

impl State {
    /// Room for `rows` query rows.
    pub(crate) fn new(rows: usize, shape: Shape) -> Result<State> {
        let wide = shape.d16.max(G);
        Ok(State {
            shape,
            q: Array::zeros(rows * shape.d16)?,
            m: vec![0.0; rows],
            l: Array::zeros(rows * 16)?,
            zero: Array::zeros(rows * 16)?,
            o: Array::zeros(rows * shape.d16)?,
            s: Array::zeros(rows * G)?,
            #[cfg(target_arch = "x86_64")]
            limbs: Array::zeros(rows * 2 * wide)?,
            folded: Array::zeros(rows * wide)?,
            f: vec![[0.0; 4]; rows],
            params: Array::zeros(2 * wide)?,
            wide: vec![0.0; 64 * shape.d],
            #[cfg(target_arch = "x86_64")]
            ahead: false,
        })
    }

    /// Bytes of [`State::new`].
    pub(crate) const fn bytes_of(rows: usize, shape: Shape) -> usize {
        let wide = if shape.d16 > G { shape.d16 } else { G };
        4 * (rows * (2 * shape.d16 + 32 + G + wide + 5) + 2 * wide + 64 * shape.d) + rows * 2 * wide
    }

    /// Starts a chunk.
    pub(crate) fn reset(&mut self, rows: usize) {
        // Not −∞: a difference of two of them would be NaN.
        self.m[..rows].fill(-1e30);
        self.l[..rows * 16].fill(0.0);
        self.zero[..rows * 16].fill(0.0);
        self.o[..rows * self.shape.d16].fill(0.0);
    }

    /// Writes (m, l, o[D]) of each row, o not yet divided by l, to `out(row)`.
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

    /// Merges a page whose scores of row r have the maximum `most`: returns the factors of the state and of the page.
    #[inline(always)]
    fn merge<const FMA: bool>(&mut self, r: usize, most: f32) -> (f32, f32) {
        // One of the two factors is 1.
        let less = exp2::<FMA>(-(self.m[r] - most).abs());
        let factors = if most > self.m[r] { (less, 1.0) } else { (1.0, less) };
        self.m[r] = self.m[r].max(most);
        factors
    }
}

/// Feeds one page of nibble planes to rows `rows` of the state. `next`: the page after it, which may be fetched meanwhile.
pub(crate) fn nibble_page(
    simd: Simd,
    state: &mut State,
    rows: std::ops::Range<usize>,
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
        unsafe { avx512::page(state, rows, planes, rounding, upper, lower, next) };
        return;
    }
    let _ = next;
    portable!(simd, page_body(
        state: &mut State,
        rows: std::ops::Range<usize>,
        planes: Planes,
        rounding: Rounding,
        upper: &[u8],
        lower: &[u8],
    ));
}

/// The nibble of index i in a lane.
const NIBBLE: [u32; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

/// The sixteen lanes of a vector.
#[inline(always)]
fn words(vector: &[u8]) -> [u32; 16] {
    assert!(vector.len() == 64);
    // SAFETY: 64 bytes; any bytes are words. Assembled from single bytes this would not become one load.
    unsafe { vector.as_ptr().cast::<[u32; 16]>().read_unaligned() }.map(u32::from_le)
}

/// Centred codes of one vector: eight indices of sixteen lanes.
#[inline(always)]
fn decode(both: bool, centre: f32, upper: &[u8], lower: &[u8]) -> [[f32; 16]; 8] {
    let mut words = [words(upper), [0u32; 16]];
    if both {
        words[1] = self::words(lower);
        for word in &mut words[1] {
            *word = word.rotate_left(4);
        }
    }
    let mut out = [[0f32; 16]; 8];
    for i in 0..8 {
        for l in 0..16 {
            let code = (words[0][l] >> (4 * NIBBLE[i])) & 15;
            let code = if both { 16 * code + ((words[1][l] >> (4 * NIBBLE[i])) & 15) } else { code };
            out[i][l] = code as i32 as f32 - centre;
        }
    }
    out
}

/// Σ over 8·steps indices of centred codes times `a[r]`, for NR rows and one vector of lanes per step.
#[inline(always)]
fn dots<const FMA: bool, const NR: usize>(
    (both, centre): (bool, f32),
    (upper, lower): (&[u8], &[u8]),
    (first, stride, steps): (usize, usize, usize),
    a: &[f32],
    lda: usize,
) -> [[f32; 16]; NR] {
    let mut acc = [[0f32; 16]; NR];
    for step in 0..steps {
        let at = (first + step * stride) * 64;
        let codes = decode(both, centre, &upper[at..at + 64], if both { &lower[at..at + 64] } else { &[] });
        for (r, acc) in acc.iter_mut().enumerate() {
            let a: [f32; 8] = crate::lanes::take(a, r * lda + 8 * step);
            for (codes, a) in codes.iter().zip(a) {
                for l in 0..16 {
                    acc[l] = madd::<FMA>(codes[l], a, acc[l]);
                }
            }
        }
    }
    acc
}

/// Calls `$work(first row, dots of NR rows)` over all rows, four, two or one at a time (sums do not depend on how many).
macro_rules! row_groups {
    ($rows:expr, $call:ident) => {{
        let mut r = $rows.start;
        while r < $rows.end {
            r += match $rows.end - r {
                1 => {
                    $call!(1, r);
                    1
                }
                2 | 3 => {
                    $call!(2, r);
                    2
                }
                _ => {
                    $call!(4, r);
                    4
                }
            };
        }
    }};
}

/// A nibble page in f32: any path without integer dot products.
#[inline(always)]
fn page_body<const FMA: bool>(
    st: &mut State,
    rows: std::ops::Range<usize>,
    planes: Planes,
    rounding: Rounding,
    upper: &[u8],
    lower: &[u8],
) {
    let Shape { d, d16 } = st.shape;
    let wide = d16.max(G);
    let (step, shift, centre) = planes.code(rounding);
    let both = planes.both();
    let param = |at: usize, i: usize| f16_value(u16::from_le_bytes([upper[at + 2 * i], upper[at + 2 * i + 1]]));
    let mut steps = |at: usize, n: usize, apart: usize| {
        for i in 0..n {
            let s = param(at, i);
            st.params[i] = s * step;
            st.params[wide + i] = madd::<FMA>(s, shift, param(at, apart + i));
        }
    };
    steps(0, d, d);
    for r in rows.clone() {
        let q = &st.q[r * d16..][..d];
        let mut offset = 0.0;
        for c in 0..d {
            st.folded[r * wide + c] = q[c] * st.params[c];
            offset = madd::<FMA>(q[c], st.params[wide + c], offset);
        }
        st.f[r][1] = offset;
    }
    let plane = (&upper[st.shape.key_plane()..st.shape.value_params()], lower);
    for vector in 0..G / 16 {
        let at = (vector / 4 * (d / 8) * 4 + vector % 4, 4, d / 8);
        macro_rules! scores {
            ($n:literal, $r:expr) => {
                let sums = dots::<FMA, $n>((both, centre), plane, at, &st.folded[$r * wide..], wide);
                for (i, sums) in sums.iter().enumerate() {
                    let s = &mut st.s[($r + i) * G + vector * 16..][..16];
                    for l in 0..16 {
                        s[l] = sums[l] + st.f[$r + i][1];
                    }
                }
            };
        }
        row_groups!(rows, scores);
    }
    let mut steps = |at: usize, n: usize, apart: usize| {
        for i in 0..n {
            let s = param(at, i);
            st.params[i] = s * step;
            st.params[wide + i] = madd::<FMA>(s, shift, param(at, apart + i));
        }
    };
    steps(st.shape.value_params(), G, G);
    for r in rows.clone() {
        let (alpha, w) = softmax::<FMA>(st, r, G);
        let (mut sum, mut zeros) = ([0f32; 16], [0f32; 16]);
        for v in 0..G / 16 {
            for l in 0..16 {
                let (p, t) = (st.s[r * G + v * 16 + l], v * 16 + l);
                sum[l] += p;
                zeros[l] = madd::<FMA>(p, st.params[wide + t], zeros[l]);
                st.folded[r * wide + t] = p * st.params[t];
            }
        }
        for l in 0..16 {
            st.l[r * 16 + l] = madd::<FMA>(st.l[r * 16 + l], alpha, sum[l] * w);
            st.zero[r * 16 + l] = madd::<FMA>(st.zero[r * 16 + l], alpha, zeros[l] * w);
        }
        (st.f[r][2], st.f[r][3]) = (alpha, w);
    }
    let start = st.shape.lower_value_plane();
    let plane = (&upper[st.shape.value_plane()..], if both { &lower[start..] } else { lower });
    for (first, vectors) in st.shape.value_groups() {
        for vector in 0..vectors {
            let at = (first * G / 8 + vector, vectors, G / 8);
            macro_rules! values {
                ($n:literal, $r:expr) => {
                    let sums = dots::<FMA, $n>((both, centre), plane, at, &st.folded[$r * wide..], wide);
                    for (i, sums) in sums.iter().enumerate() {
                        let [_, _, alpha, w] = st.f[$r + i];
                        let o = &mut st.o[($r + i) * d16 + (first + vector) * 16..][..16];
                        for l in 0..16 {
                            o[l] = madd::<FMA>(sums[l], w, o[l] * alpha);
                        }
                    }
                };
            }
            row_groups!(rows, values);
        }
    }
}

/// Scores of row r become probabilities relative to their maximum over the first `n`; the factors of the state and the page.
#[inline(always)]
fn softmax<const FMA: bool>(st: &mut State, r: usize, n: usize) -> (f32, f32) {
    let s = &mut st.s[r * G..(r + 1) * G];
    let mut most = [-1e30f32; 16];
    s[n..].fill(f32::NEG_INFINITY);
    for v in s.chunks_exact(16) {
        for l in 0..16 {
            most[l] = if v[l] > most[l] { v[l] } else { most[l] };
        }
    }
    let most = most.iter().fold(-1e30f32, |a, b| if *b > a { *b } else { a });
    for v in s.chunks_exact_mut(16) {
        for v in v {
            *v = exp2::<FMA>(*v - most);
        }
    }
    st.merge::<FMA>(r, most)
}

/// Feeds one f16 page (or a page of the ring) to rows of the state; row r reads its first `visible(r)` tokens, at least one.
pub(crate) fn full_page(simd: Simd, state: &mut State, rows: std::ops::Range<usize>, page: &[u16], visible: &[usize]) {
    assert!(page.len() == state.shape.full_len() && visible.len() == rows.len() && rows.end <= state.m.len());
    let (keys, values) = page.split_at(G * state.shape.d);
    let d = state.shape.d;
    let most = visible.iter().copied().max().unwrap_or(0);
    let mut wide = std::mem::take(&mut state.wide);
    for first in (0..most).step_by(64) {
        // Whole vectors: what the ring holds behind the newest token is finite and masked.
        let tokens = (most - first).min(64).div_ceil(16) * 16;
        let wide = &mut wide[..tokens * d];
        widen(simd, &keys[first * d..][..tokens * d], wide);
        let (state, wide, rows) = (&mut *state, &*wide, rows.clone());
        portable!(simd, full_scores(state: &mut State, rows: std::ops::Range<usize>, visible: &[usize], first: usize, wide: &[f32]));
    }
    {
        let (state, rows) = (&mut *state, rows.clone());
        portable!(simd, full_softmax(state: &mut State, rows: std::ops::Range<usize>, visible: &[usize]));
    }
    for first in (0..most).step_by(16) {
        let tokens = (most - first).min(16);
        let wide = &mut wide[..tokens * d];
        widen(simd, &values[first * d..][..tokens * d], wide);
        let (state, wide, rows) = (&mut *state, &*wide, rows.clone());
        portable!(simd, full_values(state: &mut State, rows: std::ops::Range<usize>, visible: &[usize], first: usize, wide: &[f32]));
    }
    state.wide = wide;
}

/// Scores of up to 64 tokens from `first` on; `wide`: their keys `[token/16][D][16]`.
#[inline(always)]
fn full_scores<const FMA: bool>(
    st: &mut State,
    rows: std::ops::Range<usize>,
    visible: &[usize],
    first: usize,
    wide: &[f32],
) {
    let Shape { d, d16 } = st.shape;
    for (r, visible) in rows.zip(visible) {
        if *visible <= first {
            continue;
        }
        let q = &st.q[r * d16..][..d];
        let s = &mut st.s[r * G + first..][..wide.len() / d];
        if s.len() == 64 {
            // Four chains of sums, or each would wait for the one before.
            let mut acc = [[0f32; 16]; 4];
            for (c, q) in q.iter().enumerate() {
                for (v, acc) in acc.iter_mut().enumerate() {
                    let k = &wide[(v * d + c) * 16..][..16];
                    for l in 0..16 {
                        acc[l] = madd::<FMA>(k[l], *q, acc[l]);
                    }
                }
            }
            for (s, acc) in s.chunks_exact_mut(16).zip(acc) {
                s.copy_from_slice(&acc);
            }
        } else {
            for (v, s) in s.chunks_exact_mut(16).enumerate() {
                let mut acc = [0f32; 16];
                for (c, q) in q.iter().enumerate() {
                    let k = &wide[(v * d + c) * 16..][..16];
                    for l in 0..16 {
                        acc[l] = madd::<FMA>(k[l], *q, acc[l]);
                    }
                }
                s.copy_from_slice(&acc);
            }
        }
    }
}

#[inline(always)]
fn full_softmax<const FMA: bool>(st: &mut State, rows: std::ops::Range<usize>, visible: &[usize]) {
    let d16 = st.shape.d16;
    for (r, visible) in rows.zip(visible) {
        let (alpha, w) = softmax::<FMA>(st, r, *visible);
        let mut sum = [0f32; 16];
        for v in st.s[r * G..(r + 1) * G].chunks_exact_mut(16) {
            for l in 0..16 {
                sum[l] += v[l];
                v[l] *= w;
            }
        }
        for l in 0..16 {
            st.l[r * 16 + l] = madd::<FMA>(st.l[r * 16 + l], alpha, sum[l] * w);
            st.zero[r * 16 + l] *= alpha;
        }
        for o in &mut st.o[r * d16..(r + 1) * d16] {
            *o *= alpha;
        }
    }
}

/// Adds up to 16 tokens from `first` on; `wide`: their values `[token][D]`.
#[inline(always)]
fn full_values<const FMA: bool>(
    st: &mut State,
    rows: std::ops::Range<usize>,
    visible: &[usize],
    first: usize,
    wide: &[f32],
) {
    let Shape { d, d16 } = st.shape;
    for (r, visible) in rows.zip(visible) {
        let tokens = visible.saturating_sub(first).min(16);
        let p = &st.s[r * G + first..][..tokens];
        let o = &mut st.o[r * d16..][..d];
        let mut c = 0;
        while c + 64 <= d {
            let mut acc: [f32; 64] = crate::lanes::take(o, c);
            for (t, p) in p.iter().enumerate() {
                let v = &wide[t * d + c..][..64];
                for l in 0..64 {
                    acc[l] = madd::<FMA>(v[l], *p, acc[l]);
                }
            }
            o[c..c + 64].copy_from_slice(&acc);
            c += 64;
        }
        while c < d {
            let mut acc: [f32; 8] = crate::lanes::take(o, c);
            for (t, p) in p.iter().enumerate() {
                let v = &wide[t * d + c..][..8];
                for l in 0..8 {
                    acc[l] = madd::<FMA>(v[l], *p, acc[l]);
                }
            }
            o[c..c + 8].copy_from_slice(&acc);
            c += 8;
        }
    }
}

/// Merges partial results (m, l, o[D]) in index order into `out[D]`.
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

/// Upper bound of q·k over a page in view Upper: core's `page_bound` on this layout. `upper`: the page's upper block.
pub(crate) fn page_bound(simd: Simd, shape: Shape, rounding: Rounding, q: &[f32], upper: &[u8]) -> f32 {
    #[inline(always)]
    fn body<const FMA: bool>(d: usize, low: f32, q: &[f32], upper: &[u8]) -> f32 {
        let (scales, zeros) = upper[..4 * d].split_at(2 * d);
        let value = |x: &[u8], c: usize| f16_value(u16::from_le_bytes([x[2 * c], x[2 * c + 1]]));
        let mut sums = [0f32; 8];
        for c in (0..d).step_by(8) {
            for l in 0..8 {
                let (s, q) = (value(scales, c + l), q[c + l]);
                let low = madd::<FMA>(s, low, value(zeros, c + l));
                let (a, b) = (q * low, q * madd::<FMA>(s, 15.0, low));
                sums[l] += if a > b { a } else { b };
            }
        }
        sums.iter().sum()
    }
    let low = match rounding {
        Rounding::Paper => 0.0,
        Rounding::Balanced => -1.0 / 32.0,
    };
    let d = shape.d;
    portable!(simd, body(d: usize, low: f32, q: &[f32], upper: &[u8]) -> f32)
}

/// Writes one token's keys and values into an f16 page (or a page of the ring). `key`, `value`: `[D]` halves.
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

/// Where results of rows go: `[row][head][part][2 + D]`.
#[derive(Clone, Copy)]
pub(crate) struct Partials<'a> {
    pub(crate) data: Parts<'a, f32>,
    pub(crate) heads: usize,
    pub(crate) parts: usize,
    pub(crate) d: usize,
}

impl<'a> Partials<'a> {
    /// The place of one partial result.
    ///
    /// # Safety
    /// No two threads ask for the same place in one dispatch.
    pub(crate) unsafe fn at(&self, row: usize, head: usize, part: usize) -> &'a mut [f32] {
        let stride = 2 + self.d;
        // SAFETY: places do not overlap; each is one thread's by the caller's promise.
        unsafe { self.data.slice(((row * self.heads + head) * self.parts + part) * stride, stride) }
    }
}

/// 2^x for x ≤ 0 of any size, 3e-6.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
pub(crate) fn avx512_exp2(x: std::arch::x86_64::__m512) -> std::arch::x86_64::__m512 {
    avx512::exp2::<true>(x)
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use super::{G, Planes, Shape, State};
    use crate::dispatch::{AHEAD, fetch, fetches_ahead};
    use quantspec_core::config::Rounding;
    use std::arch::x86_64::*;
    use std::ops::Range;

    /// Row limbs above which computing leaves the memory idle, so that the next page is fetched meanwhile.
    const MANY: usize = 8;

    /// Products are integers: the query times the page's steps, and the probabilities times the tokens' steps, become one
    /// int8 limb (UpperCoarse) or two, 15 bits (`127` or `127·128 = 16,256` at most), each row with its own scale. So the order
    /// of summation inside a page does not matter. Codes are centred through the sum of the limbs.
    ///
    /// # Safety
    /// AVX-512 F, BW, DQ and VNNI; block lengths as `Shape` says; rows inside the state.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vnni")]
    pub(super) unsafe fn page(
        st: &mut State,
        rows: Range<usize>,
        planes: Planes,
        rounding: Rounding,
        upper: &[u8],
        lower: &[u8],
        next: Option<(&[u8], &[u8])>,
    ) {
        let code = planes.code(rounding);
        // SAFETY: passed on.
        unsafe {
            match planes {
                Planes::UpperCoarse => run::<1, false>(st, rows, code, upper, lower, next),
                Planes::Upper => run::<2, false>(st, rows, code, upper, lower, next),
                Planes::Both => run::<2, true>(st, rows, code, upper, lower, next),
            }
        }
    }

    const fn top(limbs: usize) -> f32 {
        if limbs == 2 { 16_256.0 } else { 127.0 }
    }

    /// 2^x for x ≤ 0 of any size, degree 4 (3e-6) or 3 (1e-4): x − ⌊x⌋ is one instruction, and `scalef` takes the floor itself.
    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    pub(super) fn exp2<const FINE: bool>(x: __m512) -> __m512 {
        let c = |v: f32| _mm512_set1_ps(v);
        let r = _mm512_reduce_ps::<1>(x);
        let p = if FINE {
            let p = _mm512_fmadd_ps(c(1.353_416_7e-2), r, c(5.201_146_4e-2));
            let p = _mm512_fmadd_ps(p, r, c(2.414_427_5e-1));
            let p = _mm512_fmadd_ps(p, r, c(6.930_038_3e-1));
            _mm512_fmadd_ps(p, r, c(1.000_002_6))
        } else {
            let p = _mm512_fmadd_ps(c(7.802_452e-2), r, c(2.260_671_6e-1));
            let p = _mm512_fmadd_ps(p, r, c(6.958_335_6e-1));
            _mm512_fmadd_ps(p, r, c(9.999_252e-1))
        };
        _mm512_scalef_ps(p, x)
    }

    /// Lane sum in a fixed tree.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn sum(v: __m512) -> f32 {
        let mut lanes = [0f32; 16];
        // SAFETY: sixteen floats.
        unsafe { _mm512_storeu_ps(lanes.as_mut_ptr(), v) };
        crate::lanes::sum16(lanes)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn codes<const BOTH: bool>(u: *const u8, l: *const u8, i: usize) -> (__m512i, __m512i) {
        // SAFETY: vector i of planes that the caller knows to be that long.
        unsafe {
            let u = _mm512_loadu_si512(u.add(i * 64).cast());
            if BOTH {
                let mask = _mm512_set1_epi32(0xf0f0_f0f0_u32 as i32);
                let l = _mm512_loadu_si512(l.add(i * 64).cast());
                (
                    _mm512_rol_epi32::<4>(_mm512_ternarylogic_epi32::<0xca>(mask, l, u)),
                    _mm512_ternarylogic_epi32::<0xca>(mask, u, l),
                )
            } else {
                let low = _mm512_set1_epi8(15);
                (_mm512_and_si512(u, low), _mm512_and_si512(_mm512_srli_epi16::<4>(u), low))
            }
        }
    }

    /// acc[vector][r] = Σ over `steps` of codes · limb r, for the NV lane vectors side by side from u (and l) on.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn dots<const NR: usize, const NV: usize, const BOTH: bool>(
        u: *const u8,
        l: *const u8,
        steps: usize,
        a: *const i8,
        lda: usize,
        ahead: bool,
    ) -> [[__m512i; NR]; NV] {
        // SAFETY: the caller's planes hold steps · NV vectors, its limbs NR rows of 8 · steps.
        unsafe {
            let mut acc = [[_mm512_setzero_si512(); NR]; NV];
            for s in 0..steps {
                let mut c = [(_mm512_setzero_si512(), _mm512_setzero_si512()); NV];
                if ahead {
                    for t in 0..NV {
                        fetch(u.wrapping_add((s * NV + t) * 64), AHEAD);
                        if BOTH {
                            fetch(l.wrapping_add((s * NV + t) * 64), AHEAD);
                        }
                    }
                }
                for (t, c) in c.iter_mut().enumerate() {
                    *c = codes::<BOTH>(u, l, s * NV + t);
                }
                for r in 0..NR {
                    let p = a.add(r * lda + s * 8).cast::<i32>();
                    let (x0, x1) =
                        (_mm512_set1_epi32(p.read_unaligned()), _mm512_set1_epi32(p.add(1).read_unaligned()));
                    for t in 0..NV {
                        acc[t][r] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(acc[t][r], c[t].0, x0), c[t].1, x1);
                    }
                }
            }
            acc
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn join<const LIMBS: usize>(high: __m512i, low: __m512i) -> __m512 {
        _mm512_cvtepi32_ps(if LIMBS == 2 { _mm512_add_epi32(_mm512_slli_epi32::<7>(high), low) } else { high })
    }

    /// Scores of rows r0.. (NR/LIMBS of them) against the page.
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn scores<const NR: usize, const LIMBS: usize, const BOTH: bool>(
        st: &mut State,
        r0: usize,
        u: *const u8,
        l: *const u8,
    ) {
        // SAFETY: as `page`.
        unsafe {
            let Shape { d, d16 } = st.shape;
            let wide = d16.max(G);
            let a = st.limbs.as_ptr().add(r0 * 2 * wide);
            let s = st.s.as_mut_ptr().add(r0 * G);
            for b in 0..2 {
                let off = b * d * 32;
                // Limbs of a row lie `wide` apart, so rows are two limbs apart whatever LIMBS is.
                let acc = dots::<NR, 4, BOTH>(u.add(off), l.wrapping_add(off), d / 8, a, wide * (3 - LIMBS), st.ahead);
                for (t, acc) in acc.iter().enumerate() {
                    for r in 0..NR / LIMBS {
                        let f = st.f.get_unchecked(r0 + r);
                        let v = join::<LIMBS>(acc[r * LIMBS], acc[r * LIMBS + LIMBS - 1]);
                        let v = _mm512_fmadd_ps(v, _mm512_set1_ps(f[0]), _mm512_set1_ps(f[1]));
                        _mm512_storeu_ps(s.add(r * G + (b * 4 + t) * 16), v);
                    }
                }
            }
        }
    }

    /// o = o·alpha + codes·p·factor for rows r0..
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn values<const NR: usize, const LIMBS: usize, const BOTH: bool>(
        st: &mut State,
        r0: usize,
        u: *const u8,
        l: *const u8,
    ) {
        let vectors = st.shape.d16 / 16;
        let mut first = 0;
        while first < vectors {
            // SAFETY: as `page`; groups are those of `Shape::value_groups`.
            unsafe {
                match vectors - first {
                    1 => value_group::<NR, 1, LIMBS, BOTH>(st, r0, first, u, l),
                    2 => value_group::<NR, 2, LIMBS, BOTH>(st, r0, first, u, l),
                    3 => value_group::<NR, 3, LIMBS, BOTH>(st, r0, first, u, l),
                    _ => value_group::<NR, 4, LIMBS, BOTH>(st, r0, first, u, l),
                }
            }
            first += 4;
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn value_group<const NR: usize, const NV: usize, const LIMBS: usize, const BOTH: bool>(
        st: &mut State,
        r0: usize,
        first: usize,
        u: *const u8,
        l: *const u8,
    ) {
        // SAFETY: as `page`.
        unsafe {
            let d16 = st.shape.d16;
            let wide = d16.max(G);
            let a = st.limbs.as_ptr().add(r0 * 2 * wide);
            let o = st.o.as_mut_ptr().add(r0 * d16 + first * 16);
            let off = first * G / 8 * 64;
            let acc = dots::<NR, NV, BOTH>(u.add(off), l.wrapping_add(off), G / 8, a, wide * (3 - LIMBS), st.ahead);
            for (t, acc) in acc.iter().enumerate() {
                for r in 0..NR / LIMBS {
                    let f = st.f.get_unchecked(r0 + r);
                    let p = o.add(r * d16 + t * 16);
                    let old = _mm512_mul_ps(_mm512_loadu_ps(p), _mm512_set1_ps(f[2]));
                    let v = join::<LIMBS>(acc[r * LIMBS], acc[r * LIMBS + LIMBS - 1]);
                    _mm512_storeu_ps(p, _mm512_fmadd_ps(v, _mm512_set1_ps(f[3]), old));
                }
            }
        }
    }

    /// Splits x·inv into limbs at `out`, `apart` bytes apart: q = 128·high + low, low in 0..128. Returns q.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn limbs<const LIMBS: usize>(x: __m512, inv: __m512, out: *mut i8, apart: usize) -> __m512i {
        // SAFETY: sixteen bytes at `out` and at `out + apart`.
        unsafe {
            let q = _mm512_cvtps_epi32(_mm512_mul_ps(x, inv));
            if LIMBS == 2 {
                _mm_storeu_si128(out.cast(), _mm512_cvtepi32_epi8(_mm512_srai_epi32::<7>(q)));
                let low = _mm512_cvtepi32_epi8(_mm512_and_si512(q, _mm512_set1_epi32(127)));
                _mm_storeu_si128(out.add(apart).cast(), low);
            } else {
                _mm_storeu_si128(out.cast(), _mm512_cvtepi32_epi8(q));
            }
            q
        }
    }

    /// Scales and, `groups` halves behind them, zeros become n steps and values of the centre code, `apart` floats apart (those
    /// behind `groups` mean nothing, and meet queries of 0). Returns the largest step.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn unpack(
        params: *const u8,
        groups: usize,
        n: usize,
        (step, shift): (f32, f32),
        out: *mut f32,
        apart: usize,
    ) -> f32 {
        // SAFETY: n, a multiple of 16, floats at `out` and at `out + apart`; `groups + n` halves at `params`, padding included.
        unsafe {
            let mut most = _mm512_setzero_ps();
            for i in (0..n).step_by(16) {
                let s = _mm512_cvtph_ps(_mm256_loadu_si256(params.add(i * 2).cast()));
                let z = _mm512_cvtph_ps(_mm256_loadu_si256(params.add((groups + i) * 2).cast()));
                let steps = _mm512_mul_ps(s, _mm512_set1_ps(step));
                most = _mm512_max_ps(most, steps);
                _mm512_storeu_ps(out.add(i), steps);
                _mm512_storeu_ps(out.add(apart + i), _mm512_fmadd_ps(s, _mm512_set1_ps(shift), z));
            }
            _mm512_reduce_max_ps(most)
        }
    }

    /// Query limbs of row r against the page's key parameters; sets the scale and offset of its scores.
    #[target_feature(enable = "avx512f")]
    unsafe fn fold_query<const LIMBS: usize>(st: &mut State, r: usize, centre: f32) {
        // SAFETY: as `page`.
        unsafe {
            let d16 = st.shape.d16;
            let wide = d16.max(G);
            let (q, params) = (st.q.as_ptr().add(r * d16), st.params.as_ptr());
            let out = st.limbs.as_mut_ptr().add(r * 2 * wide);
            let mut offset = _mm512_setzero_ps();
            let mut most = offset;
            for i in (0..d16).step_by(16) {
                let q = _mm512_loadu_ps(q.add(i));
                most = _mm512_max_ps(most, _mm512_abs_ps(_mm512_mul_ps(q, _mm512_loadu_ps(params.add(i)))));
                offset = _mm512_fmadd_ps(q, _mm512_loadu_ps(params.add(wide + i)), offset);
            }
            let most = _mm512_reduce_max_ps(most).max(1e-30);
            let (scale, inv) = (most / top(LIMBS), _mm512_set1_ps(top(LIMBS) / most));
            let mut sums = _mm512_setzero_si512();
            for i in (0..d16).step_by(16) {
                let x = _mm512_mul_ps(_mm512_loadu_ps(q.add(i)), _mm512_loadu_ps(params.add(i)));
                sums = _mm512_add_epi32(sums, limbs::<LIMBS>(x, inv, out.add(i), wide));
            }
            let offset = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), _mm512_set1_ps(-centre * scale), offset);
            st.f[r][0] = scale;
            st.f[r][1] = sum(offset);
        }
    }

    /// Softmax of row r over the page, relative to the page's own maximum; limbs of p·step, whose scale is the page's largest
    /// step (`most`) over the top code; merge factors of the row.
    #[target_feature(enable = "avx512f,avx512dq")]
    unsafe fn softmax<const LIMBS: usize>(st: &mut State, r: usize, most: f32, centre: f32) {
        // SAFETY: as `page`.
        unsafe {
            let wide = st.shape.d16.max(G);
            let s = st.s.as_ptr().add(r * G);
            let params = st.params.as_ptr();
            let out = st.limbs.as_mut_ptr().add(r * 2 * wide);
            let (l, zero) = (st.l.as_mut_ptr().add(r * 16), st.zero.as_mut_ptr().add(r * 16));
            let mut p = [_mm512_setzero_ps(); 8];
            for (i, p) in p.iter_mut().enumerate() {
                *p = _mm512_loadu_ps(s.add(i * 16));
            }
            let a = _mm512_max_ps(_mm512_max_ps(p[0], p[1]), _mm512_max_ps(p[2], p[3]));
            let b = _mm512_max_ps(_mm512_max_ps(p[4], p[5]), _mm512_max_ps(p[6], p[7]));
            let highest = _mm512_reduce_max_ps(_mm512_max_ps(a, b));
            // One of the two factors is 1.
            let less = _mm512_cvtss_f32(exp2::<true>(_mm512_set1_ps(-(st.m[r] - highest).abs())));
            let (alpha, w) = if highest > st.m[r] { (less, 1.0) } else { (1.0, less) };
            st.m[r] = st.m[r].max(highest);
            let inv = _mm512_set1_ps(top(LIMBS) / most);
            let (mut total, mut zeros, mut ints) = (_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_si512());
            for (i, p) in p.iter().enumerate() {
                let x = _mm512_sub_ps(*p, _mm512_set1_ps(highest));
                let e = if LIMBS == 2 { exp2::<true>(x) } else { exp2::<false>(x) };
                total = _mm512_add_ps(total, e);
                zeros = _mm512_fmadd_ps(e, _mm512_loadu_ps(params.add(wide + i * 16)), zeros);
                let p = _mm512_mul_ps(e, _mm512_loadu_ps(params.add(i * 16)));
                ints = _mm512_add_epi32(ints, limbs::<LIMBS>(p, inv, out.add(i * 16), wide));
            }
            let scale = most / top(LIMBS);
            zeros = _mm512_fmadd_ps(_mm512_cvtepi32_ps(ints), _mm512_set1_ps(-centre * scale), zeros);
            let (av, wv) = (_mm512_set1_ps(alpha), _mm512_set1_ps(w));
            _mm512_storeu_ps(l, _mm512_fmadd_ps(_mm512_loadu_ps(l), av, _mm512_mul_ps(total, wv)));
            _mm512_storeu_ps(zero, _mm512_fmadd_ps(_mm512_loadu_ps(zero), av, _mm512_mul_ps(zeros, wv)));
            st.f[r][2] = alpha;
            st.f[r][3] = w * scale;
        }
    }

    /// Calls `$f` for all row limbs, in passes of at most five. Integers: any split gives the same bits.
    macro_rules! passes {
        ($f:ident, $rows:expr, $limbs:expr, $both:tt, $st:expr, $u:expr, $l:expr) => {{
            let mut r = $rows.start;
            while r < $rows.end {
                let left = ($rows.end - r) * $limbs;
                let n = if left >= 5 && left != 8 && $limbs == 1 {
                    $f::<5, $limbs, $both>($st, r, $u, $l);
                    5
                } else if left >= 4 {
                    $f::<4, $limbs, $both>($st, r, $u, $l);
                    4
                } else if left >= 2 {
                    $f::<2, $limbs, $both>($st, r, $u, $l);
                    2
                } else {
                    $f::<1, $limbs, $both>($st, r, $u, $l);
                    1
                };
                r += n / $limbs;
            }
        }};
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vnni")]
    unsafe fn run<const LIMBS: usize, const BOTH: bool>(
        st: &mut State,
        rows: Range<usize>,
        (step, shift, centre): (f32, f32, f32),
        upper: &[u8],
        lower: &[u8],
        next: Option<(&[u8], &[u8])>,
    ) {
        // SAFETY: as `page`.
        unsafe {
            let shape = st.shape;
            let wide = shape.d16.max(G);
            let (u, l) = (upper.as_ptr(), lower.as_ptr());
            st.ahead = rows.len() * LIMBS <= MANY && fetches_ahead();
            unpack(u, shape.d, shape.d16, (step, shift), st.params.as_mut_ptr(), wide);
            for r in rows.clone() {
                fold_query::<LIMBS>(st, r, centre);
            }
            passes!(scores, rows, LIMBS, BOTH, st, u.add(shape.key_plane()), l);
            let params = st.params.as_mut_ptr();
            // All steps may be 0 (constant values): any scale does then.
            let most = unpack(u.add(shape.value_params()), G, G, (step, shift), params, wide).max(1e-30);
            let count = rows.len();
            for (i, r) in rows.clone().enumerate() {
                if let Some((upper, lower)) = next
                    && count * LIMBS > MANY
                {
                    // A slice of the next page per row.
                    let fetch = |block: &[u8]| {
                        for line in block.len() / 64 * i / count..block.len() / 64 * (i + 1) / count {
                            _mm_prefetch::<_MM_HINT_T1>(block.as_ptr().add(line * 64).cast());
                        }
                    };
                    fetch(upper);
                    if BOTH {
                        fetch(lower);
                    }
                }
                softmax::<LIMBS>(st, r, most, centre);
            }
            passes!(
                values,
                rows,
                LIMBS,
                BOTH,
                st,
                u.add(shape.value_plane()),
                l.wrapping_add(shape.lower_value_plane())
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantize;
    use crate::testing::{Noise, bits, distance, paths};
    use half::f16;
    use quantspec_core::attend as core;
    use quantspec_core::cache::{BUFFER_TOKENS, visible_pages};
    use quantspec_core::config::View;
    use quantspec_core::quantize::quantize_page;

    /// Tokens of one KV head, as core and as the kernels hold them.
    struct Head {
        shape: Shape,
        rounding: Rounding,
        keys: Vec<f16>,
        values: Vec<f16>,
        upper: Vec<Vec<u8>>,
        lower: Vec<Vec<u8>>,
        full: Vec<Vec<u16>>,
    }

    fn halves(x: &[f16]) -> Vec<u16> {
        x.iter().map(|x| x.to_bits()).collect()
    }

    impl Head {
        fn new(noise: &mut Noise, d: usize, tokens: usize, rounding: Rounding) -> Head {
            let shape = Shape::new(d);
            // Some channels are far larger than the others, and biased, as real keys are.
            let gain: Vec<f32> = (0..d).map(|c| if c % 29 == 3 { 12.0 } else { 1.0 }).collect();
            let mut draw = |biased: bool| -> Vec<f16> {
                let x = noise.normals(tokens * d).into_iter().enumerate();
                x.map(|(i, x)| f16::from_f32(if biased { gain[i % d] * (x + 0.3) } else { x })).collect()
            };
            let (keys, mut values) = (draw(true), draw(false));
            values[3 * d..4 * d].fill(f16::ZERO);
            let mut head = Head { shape, rounding, keys, values, upper: vec![], lower: vec![], full: vec![] };
            for page in 0..tokens / G {
                let at = page * G * d..(page + 1) * G * d;
                let kv = (halves(&head.keys[at.clone()]), halves(&head.values[at]));
                let (mut upper, mut lower) = (vec![0; shape.upper_bytes()], vec![0; shape.lower_bytes()]);
                let mut scratch = quantize::Scratch::new(shape);
                quantize::page(Simd::Scalar, shape, rounding, (&kv.0, &kv.1), &mut scratch, &mut upper, &mut lower)
                    .unwrap();
                let mut full = vec![0; shape.full_len()];
                for t in 0..G {
                    put_token(&mut full, d, t, &kv.0[t * d..][..d], &kv.1[t * d..][..d]);
                }
                head.upper.push(upper);
                head.lower.push(lower);
                head.full.push(full);
            }
            head
        }

        /// The kernels' output for rows at `position`, all fed together: pages of the view, then the recent ones.
        fn attend(&self, simd: Simd, q: &[f32], rows: usize, position: usize, planes: Option<Planes>) -> Vec<f32> {
            let d = self.shape.d;
            let mut state = State::new(rows, self.shape).unwrap();
            let scale = std::f32::consts::LOG2_E / (d as f32).sqrt();
            for r in 0..rows {
                for c in 0..d {
                    state.q[r * self.shape.d16 + c] = q[r * d + c] * scale;
                }
            }
            let pages = visible_pages(position);
            let mut parts = vec![0f32; rows * 2 * (2 + d)];
            for part in 0..2 {
                state.reset(rows);
                for page in if part == 0 { 0..pages } else { pages..position / G + 1 } {
                    match planes.filter(|_| part == 0) {
                        Some(planes) => {
                            let next =
                                (page + 1 < pages).then(|| (&self.upper[page + 1][..], &self.lower[page + 1][..]));
                            let (upper, lower) = (&self.upper[page], &self.lower[page]);
                            nibble_page(simd, &mut state, 0..rows, planes, self.rounding, upper, lower, next);
                        }
                        None => {
                            let visible = vec![G.min(position + 1 - page * G); rows];
                            full_page(simd, &mut state, 0..rows, &self.full[page], &visible);
                        }
                    }
                }
                let shared = Parts::new(&mut parts);
                // SAFETY: one thread, one slice at a time.
                state.finish(rows, |r| unsafe { shared.slice((2 * r + part) * (2 + d), 2 + d) });
            }
            let mut out = vec![f32::NAN; rows * d];
            for r in 0..rows {
                merge(simd, &parts[2 * r * (2 + d)..][..2 * (2 + d)], 2 + d, &mut out[r * d..][..d]);
            }
            out
        }

        fn exact(&self, q: &[f32], position: usize, view: View) -> Vec<f64> {
            let d = self.shape.d;
            let mut ring = [vec![f16::ZERO; BUFFER_TOKENS * d], vec![f16::ZERO; BUFFER_TOKENS * d]];
            for t in visible_pages(position) * G..=position {
                let at = quantspec_core::cache::buffer_slot(t) * d;
                ring[0][at..at + d].copy_from_slice(&self.keys[t * d..][..d]);
                ring[1][at..at + d].copy_from_slice(&self.values[t * d..][..d]);
            }
            let page = |x: &'_ [f16], page: usize| x[page * G * d..(page + 1) * G * d].to_vec();
            let count = self.upper.len();
            let pages: Vec<_> = (0..count)
                .map(|i| quantize_page(&page(&self.keys, i), &page(&self.values, i), d, self.rounding).unwrap())
                .collect();
            let full: Vec<_> = (0..count)
                .map(|i| core::FullPage {
                    keys: &self.keys[i * G * d..(i + 1) * G * d],
                    values: &self.values[i * G * d..(i + 1) * G * d],
                })
                .collect();
            let cache = core::Cache {
                head_dim: d,
                rounding: self.rounding,
                pages: &pages,
                full: &full,
                buffer_keys: &ring[0],
                buffer_values: &ring[1],
            };
            let all: Vec<usize> = (0..visible_pages(position)).collect();
            core::attend(q, position, view, &all, &cache).unwrap()
        }
    }

    #[test]
    fn every_view_matches_core_and_rows_do_not_see_each_other() {
        let mut noise = Noise::new(21);
        const ROWS: usize = 11;
        for d in [8, 24, 64, 80, 128, 256] {
            for rounding in [Rounding::Balanced, Rounding::Paper] {
                let head = Head::new(&mut noise, d, 6 * G, rounding);
                let position = 5 * G + 77;
                let q = noise.normals(ROWS * d);
                for (planes, view, bound) in [
                    (Some(Planes::Both), View::Both, 1e-3),
                    (Some(Planes::Upper), View::Upper, 1e-3),
                    (Some(Planes::UpperCoarse), View::Upper, 6e-2),
                    (None, View::Full, 2e-6),
                ] {
                    let exact: Vec<f64> = q.chunks(d).flat_map(|q| head.exact(q, position, view)).collect();
                    for simd in paths() {
                        let found = head.attend(simd, &q, ROWS, position, planes);
                        let error = distance(&found, &exact);
                        assert!(error < bound, "D {d}, {planes:?}, {rounding:?}, {simd:?}: off by {error}");
                        for rows in 1..=ROWS {
                            let first = ROWS - rows;
                            let some = head.attend(simd, &q[first * d..], rows, position, planes);
                            assert!(
                                bits(&some) == bits(&found[first * d..]),
                                "{rows} rows, D {d}, {planes:?}, {simd:?}"
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn bounds_are_those_of_core_and_bound_every_key() {
        let mut noise = Noise::new(22);
        for d in [8, 80, 128] {
            for rounding in [Rounding::Balanced, Rounding::Paper] {
                let head = Head::new(&mut noise, d, G, rounding);
                let page = quantize_page(&head.keys, &head.values, d, rounding).unwrap();
                for _ in 0..5 {
                    let q = noise.normals(d);
                    let want = core::page_bound(&q, &page.key_params, rounding);
                    for simd in paths() {
                        let found = page_bound(simd, head.shape, rounding, &q, &head.upper[0]);
                        assert!((found - want).abs() < 1e-5 * want.abs(), "{found}, not {want}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_score_far_above_the_others_takes_all_and_uniform_scores_share() {
        let mut noise = Noise::new(23);
        let (d, position) = (64, 4 * G - 1);
        let mut head = Head::new(&mut noise, d, 4 * G, Rounding::Balanced);
        for simd in paths() {
            let zeros = vec![0.0; d];
            let mean = head.attend(simd, &zeros, 1, position, Some(Planes::Both));
            assert!(distance(&mean, &head.exact(&zeros, position, View::Both)) < 2e-3);
            // A query that only the newest key answers: exp(-80) of everything else is left.
            let newest: Vec<f32> = head.keys[position * d..].iter().map(|x| x.to_f32()).collect();
            let length: f32 = newest.iter().map(|x| x * x).sum();
            let q: Vec<f32> = newest.iter().map(|x| x * 4000.0 / length).collect();
            let one = head.attend(simd, &q, 1, position, Some(Planes::Both));
            assert!(distance(&one, &head.exact(&q, position, View::Both)) < 2e-3);
        }
        // Values that are all equal have steps of zero.
        head.values.fill(f16::from_f32(0.5));
        let head = {
            let mut flat = Head::new(&mut noise, d, 4 * G, Rounding::Balanced);
            flat.values = head.values;
            for page in 0..4 {
                let at = page * G * d..(page + 1) * G * d;
                let kv = (halves(&flat.keys[at.clone()]), halves(&flat.values[at]));
                let mut scratch = quantize::Scratch::new(flat.shape);
                let (upper, lower) = (&mut flat.upper[page], &mut flat.lower[page]);
                quantize::page(Simd::Scalar, flat.shape, flat.rounding, (&kv.0, &kv.1), &mut scratch, upper, lower)
                    .unwrap();
                for t in 0..G {
                    put_token(&mut flat.full[page], d, t, &kv.0[t * d..][..d], &kv.1[t * d..][..d]);
                }
            }
            flat
        };
        for simd in paths() {
            for planes in [Planes::Both, Planes::Upper, Planes::UpperCoarse] {
                let found = head.attend(simd, &noise.normals(d), 1, position, Some(planes));
                assert!(found.iter().all(|x| (x - 0.5).abs() < 1e-4), "{planes:?} on {simd:?}");
            }
        }
    }
}
