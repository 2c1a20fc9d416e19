//! Prompt rows: matrices and exact causal attention with tokens as lanes.
//!
//! Activations are panels of 64 tokens, `[feature][64]`; the input of a matrix is f32, or BF16 pairs `[k/2][64][2]` where the
//! path multiplies BF16. Weights are the decode kernels' repacked panels, read in place: a pair of k of one output is one
//! broadcast word. Outputs come as `[n][64]`, the next operation's panel; norms, RoPE and SiLU are vertical in it.
//!
//! A token's result never depends on the block of rows it is computed with: panels lie at multiples of 64 tokens, keys are
//! taken in blocks of 64 at multiples of 64, and every (token, output) pair sums over k upwards in one accumulator.

use crate::dispatch::{Simd, portable};
use crate::elementwise::{LANES, PANEL_TOKENS};
use crate::lanes::{bf16_bits, exp2, madd, widen};
use crate::linear::{Matrix, PANEL, Store, pairs_of};
use crate::memory::{Array, Parts};
use crate::pool::{Pool, part, part_by_cost};
use quantspec_core::config::Dtype;
use quantspec_core::{Error, Result};

/// k of one block: 64 tokens × 512 BF16 are 64 KiB (from L2), 32 outputs × 512 another 32 KiB (from L1).
const KC: usize = 512;

/// Outputs of one tile: with 64 tokens, 24 accumulators of AVX-512.
const TILE: usize = 6;

/// Tokens of a block of keys.
pub(crate) const KEYS: usize = 64;

/// Floating-point operations of one dispatch per thread, so that the caller is asked between dispatches at least every
/// 0.1 s or so: AVX-512 reaches 115 Gflop/s per thread of a Sapphire Rapids, AVX2 75; for the others a few are assumed.
const fn slice_flops(simd: Simd) -> usize {
    match simd {
        Simd::Amx | Simd::Avx512 => 8_000_000_000,
        Simd::Avx2 => 4_000_000_000,
        Simd::Neon => 1_000_000_000,
        Simd::Scalar => 250_000_000,
    }
}

/// The input of `matrix` is BF16 pairs on this path.
pub(crate) fn takes_pairs(simd: Simd, matrix: &Matrix) -> bool {
    simd.has_avx512() && matrix.dtype() == Dtype::Bf16
}

/// Values of a panel, `[k][64]` f32 or `[k/2][64]` words of BF16 pairs: floats it takes.
pub(crate) const fn panel_len(k: usize) -> usize {
    2 * pairs_of(k) * PANEL_TOKENS
}

/// Writes features `first ..` (an even number) of sixteen tokens from lane `lane` on into a panel that is the input of a
/// matrix.
pub(crate) fn put_features(
    simd: Simd,
    pairs: bool,
    panel: &mut [f32],
    first: usize,
    lane: usize,
    values: &[[f32; LANES]],
) {
    #[inline(always)]
    fn body<const FMA: bool>(pairs: bool, panel: &mut [f32], first: usize, lane: usize, values: &[[f32; LANES]]) {
        if pairs {
            for (i, pair) in values.chunks(2).enumerate() {
                let out = &mut panel[(first / 2 + i) * PANEL_TOKENS + lane..][..LANES];
                for l in 0..LANES {
                    let high = if pair.len() == 2 { bf16_bits(pair[1][l]) } else { 0 };
                    out[l] = f32::from_bits(u32::from(bf16_bits(pair[0][l])) | u32::from(high) << 16);
                }
            }
        } else {
            for (i, values) in values.iter().enumerate() {
                panel[(first + i) * PANEL_TOKENS + lane..][..LANES].copy_from_slice(values);
            }
            if (first + values.len()) % 2 == 1 {
                panel[(first + values.len()) * PANEL_TOKENS + lane..][..LANES].fill(0.0);
            }
        }
    }
    portable!(simd, body(pairs: bool, panel: &mut [f32], first: usize, lane: usize, values: &[[f32; LANES]]));
}

/// `y[panel][n][64] = W · x[panel]` for `panels` panels of tokens; `x` as [`takes_pairs`] says, `panel_len(k)` apart.
///
/// # Errors
/// Those of `poll`, which is asked between slices of the outputs.
pub(crate) fn gemm(
    pool: &Pool,
    simd: Simd,
    poll: &mut dyn FnMut() -> Result<()>,
    matrix: &Matrix,
    x: &[f32],
    y: &mut [f32],
    panels: usize,
) -> Result<()> {
    let (k, n, threads) = (matrix.k, matrix.panels * PANEL, pool.threads());
    if x.len() < panels * panel_len(k) || y.len() < panels * n * PANEL_TOKENS {
        return Err(Error::internal("a prefill matrix was given panels of another shape"));
    }
    let flops = 2 * PANEL * k * panels * PANEL_TOKENS;
    let most = (slice_flops(simd) / flops.max(1)).max(1) * threads;
    let y = Parts::new(y);
    let mut first = 0;
    while first < matrix.panels {
        let outputs = (matrix.panels - first).min(most);
        pool.run(&|thread| {
            let mine = part(outputs, thread, threads);
            let mine = first + mine.start..first + mine.end;
            // SAFETY: output panels belong to one thread, and rows of `y` to one output.
            unsafe { gemm_part(simd, matrix, x, &y, panels, mine) };
        })?;
        first += outputs;
        poll()?;
    }
    Ok(())
}

/// # Safety
/// No other thread uses rows of `y` that belong to the output panels `mine`.
unsafe fn gemm_part(
    simd: Simd,
    matrix: &Matrix,
    x: &[f32],
    y: &Parts<f32>,
    panels: usize,
    mine: std::ops::Range<usize>,
) {
    let (k2, n) = (2 * pairs_of(matrix.k), matrix.panels * PANEL);
    let mut block = vec![0f32; KC * PANEL];
    for first in (0..k2).step_by(KC) {
        let kc = KC.min(k2 - first);
        for output in mine.clone() {
            let at = output * PANEL * k2;
            if takes_pairs(simd, matrix) {
                #[cfg(target_arch = "x86_64")]
                if let Store::Bf16(w) = &matrix.store {
                    let w = &w[at + first * PANEL..][..kc * PANEL];
                    // The next block of weights is on its way while this one is used by all panels.
                    let ahead = &w.as_ptr().wrapping_add(k2 * PANEL);
                    for panel in 0..panels {
                        let x = &x[panel * panel_len(matrix.k) + first / 2 * PANEL_TOKENS..][..kc / 2 * PANEL_TOKENS];
                        // SAFETY: the caller's promise.
                        let c = unsafe { y.slice((panel * n + output * PANEL) * PANEL_TOKENS, PANEL * PANEL_TOKENS) };
                        avx512::panel(w, x, c, first > 0, (panel == 0).then_some(*ahead));
                    }
                }
                continue;
            }
            let block = &mut block[..kc * PANEL];
            let range = at + first * PANEL..at + (first + kc) * PANEL;
            match &matrix.store {
                Store::Bf16(w) => {
                    let w = &w[range];
                    portable!(simd, widen_pairs(w: &[u16], block: &mut [f32]));
                }
                Store::F16(w) => widen(simd, &w[range], block),
                Store::F32(w) => block.copy_from_slice(&w[range]),
            }
            for panel in 0..panels {
                let x = &x[panel * panel_len(matrix.k) + first * PANEL_TOKENS..][..kc * PANEL_TOKENS];
                // SAFETY: the caller's promise.
                let c = unsafe { y.slice((panel * n + output * PANEL) * PANEL_TOKENS, PANEL * PANEL_TOKENS) };
                tiles(simd, block, (1, PANEL), PANEL, kc, x, c, first > 0);
            }
        }
    }
}

/// BF16 pairs `[k/2][32][2]` to f32 `[k][32]`.
#[inline(always)]
fn widen_pairs<const FMA: bool>(from: &[u16], to: &mut [f32]) {
    for (from, to) in from.chunks_exact(2 * PANEL).zip(to.chunks_exact_mut(2 * PANEL)) {
        for l in 0..PANEL {
            to[l] = crate::lanes::bf16_value(from[2 * l]);
            to[PANEL + l] = crate::lanes::bf16_value(from[2 * l + 1]);
        }
    }
}

/// `c[j][64] (+)= Σ_p w[j·sj + p·sp] · x[p][64]` for j in 0..n, p in 0..kc; `add`: onto what is there.
fn tiles(simd: Simd, w: &[f32], strides: (usize, usize), n: usize, kc: usize, x: &[f32], c: &mut [f32], add: bool) {
    if simd.has_avx512() {
        portable!(simd, tiles_body[64](w: &[f32], strides: (usize, usize), n: usize, kc: usize, x: &[f32], c: &mut [f32], add: bool));
    } else {
        portable!(simd, tiles_body[16](w: &[f32], strides: (usize, usize), n: usize, kc: usize, x: &[f32], c: &mut [f32], add: bool));
    }
}

#[inline(always)]
fn tiles_body<const FMA: bool, const L: usize>(
    w: &[f32],
    strides: (usize, usize),
    n: usize,
    kc: usize,
    x: &[f32],
    c: &mut [f32],
    add: bool,
) {
    for lane in (0..PANEL_TOKENS).step_by(L) {
        let mut j = 0;
        while j < n {
            let (w, c) = (&w[j * strides.0..], &mut c[j * PANEL_TOKENS..]);
            match n - j {
                1 => tile::<FMA, 1, L>(w, strides, kc, x, lane, c, add),
                2 => tile::<FMA, 2, L>(w, strides, kc, x, lane, c, add),
                3 => tile::<FMA, 3, L>(w, strides, kc, x, lane, c, add),
                4 | 8 => tile::<FMA, 4, L>(w, strides, kc, x, lane, c, add),
                5 => tile::<FMA, 5, L>(w, strides, kc, x, lane, c, add),
                _ => tile::<FMA, TILE, L>(w, strides, kc, x, lane, c, add),
            }
            j += match n - j {
                8 => 4,
                left => left.min(TILE),
            };
        }
    }
}

#[inline(always)]
fn tile<const FMA: bool, const N: usize, const L: usize>(
    w: &[f32],
    (sj, sp): (usize, usize),
    kc: usize,
    x: &[f32],
    lane: usize,
    c: &mut [f32],
    add: bool,
) {
    let mut acc = [[0f32; L]; N];
    if add {
        for (j, acc) in acc.iter_mut().enumerate() {
            acc.copy_from_slice(&c[j * PANEL_TOKENS + lane..][..L]);
        }
    }
    assert!(x.len() >= kc * PANEL_TOKENS && w.len() > (N - 1) * sj + (kc - 1) * sp);
    for p in 0..kc {
        let x: [f32; L] = crate::lanes::take(x, p * PANEL_TOKENS + lane);
        for (j, acc) in acc.iter_mut().enumerate() {
            let w = w[j * sj + p * sp];
            for l in 0..L {
                acc[l] = madd::<FMA>(x[l], w, acc[l]);
            }
        }
    }
    for (j, acc) in acc.iter().enumerate() {
        c[j * PANEL_TOKENS + lane..][..L].copy_from_slice(acc);
    }
}

/// The keys and values of the layer under way, and the queries of a block.
pub(crate) struct Causal<'a> {
    pub(crate) heads: usize,
    pub(crate) group: usize,
    pub(crate) d: usize,
    /// Queries are BF16 pairs, and so are the results.
    pub(crate) pairs: bool,
    /// `[panel][head]` of `panel_len(d)`, times log2(e)/√D.
    pub(crate) q: &'a [f32],
    /// `[kv head][token][D]` halves, `tokens` tokens (a multiple of 64) each, 16 halves of padding at the end.
    pub(crate) keys: &'a [u16],
    /// Likewise.
    pub(crate) values: &'a [u16],
    pub(crate) tokens: usize,
    /// The block's first panel (absolute) and their number.
    pub(crate) first: usize,
    pub(crate) panels: usize,
}

/// Scratch of one thread for attention.
pub(crate) struct Scratch {
    keys: Array<f32>,
    values: Array<f32>,
    /// Scores `[64 keys][64]`, then probabilities.
    scores: Array<f32>,
    out: Array<f32>,
}

impl Scratch {
    pub(crate) fn new(d: usize) -> Result<Scratch> {
        Ok(Scratch {
            keys: Array::zeros(KEYS * d + 16)?,
            values: Array::zeros(KEYS * d + 16)?,
            scores: Array::zeros(KEYS * PANEL_TOKENS)?,
            out: Array::zeros(d * PANEL_TOKENS)?,
        })
    }

    /// Bytes of [`Scratch::new`].
    pub(crate) const fn bytes_of(d: usize) -> usize {
        4 * (2 * (KEYS * d + 16) + KEYS * PANEL_TOKENS + d * PANEL_TOKENS)
    }
}

impl Causal<'_> {
    /// Attention of every head and panel of the block into `out`, the output projection's input: `[panel]` of
    /// `panel_len(heads · D)`.
    ///
    /// # Errors
    /// Those of `poll`.
    pub(crate) fn run(
        &self,
        pool: &Pool,
        simd: Simd,
        poll: &mut dyn FnMut() -> Result<()>,
        scratch: &mut [Scratch],
        out: &mut [f32],
    ) -> Result<()> {
        let (threads, width) = (pool.threads(), panel_len(self.heads * self.d));
        let items = self.heads * self.panels;
        // Heads of a group are neighbours, so that their keys stay in the cache.
        let place = |item: usize| (item % self.panels, item / self.panels);
        let cost = |item: usize| self.first + place(item).0 + 1;
        let per_item = |item: usize| 4 * cost(item) * KEYS * PANEL_TOKENS * self.d;
        let scratch = Parts::new(scratch);
        let out = Parts::new(out);
        let mut start = 0;
        while start < items {
            // As many items as one dispatch may take.
            let (mut end, mut flops) = (start, 0);
            while end < items && (end < start + threads || flops < slice_flops(simd) * threads) {
                flops += per_item(end);
                end += 1;
            }
            pool.run(&|thread| {
                // SAFETY: one element per thread.
                let scratch = unsafe { &mut scratch.slice(thread, 1)[0] };
                for item in part_by_cost(end - start, thread, threads, |i| cost(start + i)) {
                    let (panel, head) = place(start + item);
                    self.block(simd, panel, head, scratch);
                    // SAFETY: features of one head of one panel belong to one item.
                    let out = unsafe {
                        let at = panel * width + head * self.d * PANEL_TOKENS / if self.pairs { 2 } else { 1 };
                        out.slice(at, self.d * PANEL_TOKENS / if self.pairs { 2 } else { 1 })
                    };
                    let mut values = [[0f32; LANES]; 2];
                    for lane in (0..PANEL_TOKENS).step_by(LANES) {
                        for c in (0..self.d).step_by(2) {
                            for (i, values) in values.iter_mut().enumerate() {
                                *values = crate::lanes::take(&scratch.out, (c + i) * PANEL_TOKENS + lane);
                            }
                            put_features(simd, self.pairs, out, c, lane, &values);
                        }
                    }
                }
            })?;
            start = end;
            poll()?;
        }
        Ok(())
    }

    /// One head of 64 query tokens, into `scratch.out` `[D][64]`.
    fn block(&self, simd: Simd, panel: usize, head: usize, scratch: &mut Scratch) {
        let (d, q0) = (self.d, (self.first + panel) * PANEL_TOKENS);
        let q = &self.q[(panel * self.heads + head) * panel_len(d)..][..panel_len(d)];
        let at = head / self.group * self.tokens * d;
        let seen = q0 + PANEL_TOKENS;
        assert!(seen <= self.tokens);
        let (keys, values) = (&self.keys[at..], &self.values[at..]);
        #[cfg(target_arch = "x86_64")]
        if self.pairs {
            avx512::causal(q, &keys[..seen * d + 16], &values[..seen * d + 16], d, q0, scratch);
            return;
        }
        scratch.out.fill(0.0);
        let mut state = [[-1e30f32, 0.0]; PANEL_TOKENS];
        for t0 in (0..seen).step_by(KEYS) {
            let range = t0 * d..(t0 + KEYS) * d;
            widen(simd, &keys[range.clone()], &mut scratch.keys[..KEYS * d]);
            widen(simd, &values[range], &mut scratch.values[..KEYS * d]);
            tiles(simd, &scratch.keys, (d, 1), KEYS, d, q, &mut scratch.scores, false);
            let (scores, state, out) = (&mut scratch.scores[..], &mut state, &mut scratch.out[..]);
            portable!(simd, softmax(
                scores: &mut [f32],
                state: &mut [[f32; 2]; PANEL_TOKENS],
                out: &mut [f32],
                q0: usize,
                t0: usize,
            ));
            tiles(simd, &scratch.values, (1, d), d, KEYS, &scratch.scores, &mut scratch.out, true);
        }
        for out in scratch.out.chunks_exact_mut(PANEL_TOKENS) {
            for (out, state) in out.iter_mut().zip(&state) {
                *out *= 1.0 / state[1];
            }
        }
    }
}

/// Scores `[64 keys from t0][64 queries from q0]` become probabilities against the running maximum; `state`: maximum and sum
/// of each query; `out` is scaled to the new maximum.
#[inline(always)]
fn softmax<const FMA: bool>(
    scores: &mut [f32],
    state: &mut [[f32; 2]; PANEL_TOKENS],
    out: &mut [f32],
    q0: usize,
    t0: usize,
) {
    for lane in (0..PANEL_TOKENS).step_by(LANES) {
        let (mut most, mut sum, mut alpha) = ([0f32; LANES], [0f32; LANES], [0f32; LANES]);
        for l in 0..LANES {
            most[l] = state[lane + l][0];
        }
        let before = most;
        for t in 0..KEYS {
            let s = &mut scores[t * PANEL_TOKENS + lane..][..LANES];
            for l in 0..LANES {
                s[l] = if t0 + t > q0 + lane + l { f32::NEG_INFINITY } else { s[l] };
                most[l] = if s[l] > most[l] { s[l] } else { most[l] };
            }
        }
        for l in 0..LANES {
            alpha[l] = exp2::<FMA>(before[l] - most[l]);
            sum[l] = state[lane + l][1] * alpha[l];
        }
        for t in 0..KEYS {
            let s = &mut scores[t * PANEL_TOKENS + lane..][..LANES];
            for l in 0..LANES {
                s[l] = exp2::<FMA>(s[l] - most[l]);
                sum[l] += s[l];
            }
        }
        for l in 0..LANES {
            state[lane + l] = [most[l], sum[l]];
        }
        for out in out.chunks_exact_mut(PANEL_TOKENS) {
            for l in 0..LANES {
                out[lane + l] *= alpha[l];
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use super::{KEYS, PANEL, PANEL_TOKENS, Scratch, TILE};
    use std::arch::x86_64::*;

    /// One output panel against 64 tokens, BF16: `c[32][64] (+)= w · x`.
    pub(super) fn panel(w: &[u16], x: &[f32], c: &mut [f32], add: bool, ahead: Option<*const u16>) {
        let pairs = w.len() / (2 * PANEL);
        assert!(x.len() == pairs * PANEL_TOKENS && c.len() == PANEL * PANEL_TOKENS);
        // SAFETY: pairs are used on the AVX-512 path only; lengths were checked. A prefetch may have any address.
        unsafe {
            if let Some(ahead) = ahead {
                for line in 0..w.len() / 32 {
                    _mm_prefetch::<_MM_HINT_T1>(ahead.wrapping_add(line * 32).cast());
                }
            }
            let (w, x, c) = (w.as_ptr().cast(), x.as_ptr().cast(), c.as_mut_ptr());
            if add {
                tiles::<1>(PANEL, w, 4, 4 * PANEL, x, pairs, c, std::ptr::null());
            } else {
                tiles::<0>(PANEL, w, 4, 4 * PANEL, x, pairs, c, std::ptr::null());
            }
        }
    }

    /// c[j][64] (+)= Σ over pairs p of b(j, p) · x[p][64]; b(j, p) is the 32-bit word at b + j·sj + p·sp (bytes). INIT 0: from
    /// zero; 1: onto c; 2: onto c · alpha[64].
    ///
    /// # Safety
    /// AVX-512 F and BF16, and that all of it is there.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn tile<const N: usize, const INIT: u8>(
        b: *const u8,
        sj: usize,
        sp: usize,
        x: *const u8,
        pairs: usize,
        c: *mut f32,
        alpha: *const f32,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let mut acc = [[_mm512_setzero_ps(); 4]; N];
            if INIT > 0 {
                for (j, acc) in acc.iter_mut().enumerate() {
                    for (v, acc) in acc.iter_mut().enumerate() {
                        *acc = _mm512_loadu_ps(c.add(j * PANEL_TOKENS + v * 16));
                        if INIT == 2 {
                            *acc = _mm512_mul_ps(*acc, _mm512_loadu_ps(alpha.add(v * 16)));
                        }
                    }
                }
            }
            for p in 0..pairs {
                let mut xv = [_mm512_setzero_si512(); 4];
                for (v, xv) in xv.iter_mut().enumerate() {
                    *xv = _mm512_loadu_si512(x.add((p * 4 + v) * 64).cast());
                }
                for (j, acc) in acc.iter_mut().enumerate() {
                    let w = _mm512_set1_epi32(b.add(j * sj + p * sp).cast::<i32>().read_unaligned());
                    let w: __m512bh = std::mem::transmute(w);
                    for (acc, x) in acc.iter_mut().zip(xv) {
                        *acc = _mm512_dpbf16_ps(*acc, std::mem::transmute::<__m512i, __m512bh>(x), w);
                    }
                }
            }
            for (j, acc) in acc.iter().enumerate() {
                for (v, acc) in acc.iter().enumerate() {
                    _mm512_storeu_ps(c.add(j * PANEL_TOKENS + v * 16), *acc);
                }
            }
        }
    }

    /// n outputs, at most six at a time.
    ///
    /// # Safety
    /// As `tile`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn tiles<const INIT: u8>(
        n: usize,
        b: *const u8,
        sj: usize,
        sp: usize,
        x: *const u8,
        pairs: usize,
        c: *mut f32,
        alpha: *const f32,
    ) {
        let mut j = 0;
        while j < n {
            // SAFETY: the caller's promise.
            unsafe {
                let (b, c) = (b.add(j * sj), c.add(j * PANEL_TOKENS));
                j += match n - j {
                    1 => {
                        tile::<1, INIT>(b, sj, sp, x, pairs, c, alpha);
                        1
                    }
                    2 => {
                        tile::<2, INIT>(b, sj, sp, x, pairs, c, alpha);
                        2
                    }
                    3 => {
                        tile::<3, INIT>(b, sj, sp, x, pairs, c, alpha);
                        3
                    }
                    4 | 8 => {
                        tile::<4, INIT>(b, sj, sp, x, pairs, c, alpha);
                        4
                    }
                    5 | 10 => {
                        tile::<5, INIT>(b, sj, sp, x, pairs, c, alpha);
                        5
                    }
                    _ => {
                        tile::<TILE, INIT>(b, sj, sp, x, pairs, c, alpha);
                        TILE
                    }
                };
            }
        }
    }

    /// One head of 64 queries from position q0 on, q: BF16 pairs `[D/2][64]`; keys and values `[token][D]` halves up to
    /// q0 + 64 tokens and 16 halves more; result in `scratch.out`, `[D][64]`.
    pub(super) fn causal(q: &[f32], keys: &[u16], values: &[u16], d: usize, q0: usize, scratch: &mut Scratch) {
        let need = (q0 + PANEL_TOKENS) * d + 16;
        assert!(q.len() >= d / 2 * PANEL_TOKENS && keys.len() >= need && values.len() >= need);
        assert!(scratch.out.len() == d * PANEL_TOKENS && scratch.keys.len() >= KEYS * d / 2 + 16);
        // SAFETY: pairs are used on the AVX-512 path only; lengths were checked.
        unsafe { blocks(q.as_ptr().cast(), keys.as_ptr(), values.as_ptr(), d, q0, scratch) }
    }

    #[target_feature(enable = "avx512f,avx512bf16,avx512bw,avx512dq")]
    unsafe fn blocks(q: *const u8, keys: *const u16, values: *const u16, d: usize, q0: usize, scratch: &mut Scratch) {
        use crate::attend::avx512_exp2 as exp2;
        // SAFETY: as `causal` checked.
        unsafe {
            let mut m = [_mm512_set1_ps(-1e30); 4];
            let mut l = [_mm512_setzero_ps(); 4];
            let mut alpha = [[0f32; 16]; 4];
            scratch.out.fill(0.0);
            let (s, out) = (scratch.scores.as_mut_ptr(), scratch.out.as_mut_ptr());
            let (kb, vb) = (scratch.keys.as_mut_ptr().cast::<u16>(), scratch.values.as_mut_ptr().cast::<u32>());
            let lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            for t0 in (0..q0 + PANEL_TOKENS).step_by(KEYS) {
                // Keys [token][D], values [token/2][D][2], both BF16. A row's last vector may reach into the next row, which is
                // written after it, and behind the last row there is padding.
                for t in 0..KEYS {
                    for c in (0..d).step_by(16) {
                        let k = halves(keys.add((t0 + t) * d + c));
                        _mm256_storeu_si256(kb.add(t * d + c).cast(), k);
                    }
                }
                for t in (0..KEYS).step_by(2) {
                    for c in (0..d).step_by(16) {
                        let v0 = _mm512_cvtepu16_epi32(halves(values.add((t0 + t) * d + c)));
                        let v1 = _mm512_cvtepu16_epi32(halves(values.add((t0 + t + 1) * d + c)));
                        let pair = _mm512_or_si512(v0, _mm512_slli_epi32::<16>(v1));
                        _mm512_storeu_si512(vb.add(t / 2 * d + c).cast(), pair);
                    }
                }
                tiles::<0>(KEYS, kb.cast(), d * 2, 4, q, d / 2, s, std::ptr::null());
                if t0 + KEYS > q0 {
                    for t in 0..KEYS {
                        for i in 0..4 {
                            let at = s.add(t * 64 + i * 16);
                            let position = _mm512_add_epi32(lane, _mm512_set1_epi32((q0 + i * 16) as i32));
                            let hidden = _mm512_cmplt_epi32_mask(position, _mm512_set1_epi32((t0 + t) as i32));
                            let masked = _mm512_mask_blend_ps(hidden, _mm512_loadu_ps(at), _mm512_set1_ps(-1e30));
                            _mm512_storeu_ps(at, masked);
                        }
                    }
                }
                for i in 0..4 {
                    let mut top = [m[i]; 2];
                    for t in (0..KEYS).step_by(2) {
                        top[0] = _mm512_max_ps(top[0], _mm512_loadu_ps(s.add(t * 64 + i * 16)));
                        top[1] = _mm512_max_ps(top[1], _mm512_loadu_ps(s.add(t * 64 + 64 + i * 16)));
                    }
                    let new = _mm512_max_ps(top[0], top[1]);
                    let a = exp2(_mm512_sub_ps(m[i], new));
                    m[i] = new;
                    _mm512_storeu_ps(alpha[i].as_mut_ptr(), a);
                    let mut sum = [_mm512_mul_ps(l[i], a), _mm512_setzero_ps()];
                    let half = _mm512_set1_epi32(0x8000);
                    for t in (0..KEYS).step_by(2) {
                        let e0 = exp2(_mm512_sub_ps(_mm512_loadu_ps(s.add(t * 64 + i * 16)), new));
                        let e1 = exp2(_mm512_sub_ps(_mm512_loadu_ps(s.add(t * 64 + 64 + i * 16)), new));
                        sum[0] = _mm512_add_ps(sum[0], e0);
                        sum[1] = _mm512_add_ps(sum[1], e1);
                        // Rounded to BF16 and paired, in place of the scores: positive numbers need no more than an addition.
                        // Pair t/2 of sixteen lanes lies where scores of token t/2 lay, which are read already.
                        let low = _mm512_srli_epi32::<16>(_mm512_add_epi32(_mm512_castps_si512(e0), half));
                        let high = _mm512_add_epi32(_mm512_castps_si512(e1), half);
                        let pair = _mm512_mask_blend_epi16(0xaaaa_aaaa, low, high);
                        _mm512_storeu_si512(s.add(t * 32 + i * 16).cast(), pair);
                    }
                    l[i] = _mm512_add_ps(sum[0], sum[1]);
                }
                tiles::<2>(d, vb.cast(), 4, d * 4, s.cast(), KEYS / 2, out, alpha.as_ptr().cast());
            }
            for (i, l) in l.iter().enumerate() {
                let inverse = _mm512_div_ps(_mm512_set1_ps(1.0), *l);
                for c in 0..d {
                    let at = out.add(c * PANEL_TOKENS + i * 16);
                    _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), inverse));
                }
            }
        }
    }

    /// Sixteen halves to BF16.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn halves(from: *const u16) -> __m256i {
        // SAFETY: sixteen halves.
        unsafe {
            let x = _mm512_cvtph_ps(_mm256_loadu_si256(from.cast()));
            std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(x))
        }
    }
}
