//! Exact causal attention of prompt rows, with queries as lanes.
//!
//! Scores are `[key][64 queries]`, results `[D][64 queries]`, so softmax works lane by lane. With AVX-512 and AMX, queries,
//! keys, probabilities and values are multiplied in BF16 and summed in f32.
//!
//! Keys are taken in blocks, from the first key that the panel sees up to its last query, so a query's bits depend on its position
//! alone. In a local layer the first 64 of these keys are masked below the diagonal.

use crate::dispatch::{Simd, portable};
use crate::elementwise::{LANES, PANEL_TOKENS};
use crate::lanes::{exp2, widen};
use crate::memory::{Array, DisjointSlice};
use crate::pool::{Pool, share_by_cost};
use crate::prefill::{panel_len, put_features, slice_flops, tiles};
use quantspec_core::Result;

/// Tokens of a block of keys.
const KEYS: usize = 64;

/// Tokens of a block of keys with tiles. Longer blocks rescale results less often, but the scores of 256 do not fit in L1.
const TILE_KEYS: usize = 128;

/// Keys and values of the current layer, and the queries of a block.
pub(crate) struct Causal<'a> {
    pub(crate) heads: usize,
    pub(crate) group: usize,
    pub(crate) d: usize,
    /// Queries and results are BF16 pairs.
    pub(crate) pairs: bool,
    /// `[panel][head]` of `panel_len(d)`, times log2(e)/√D; pairs after D are zero.
    pub(crate) q: &'a [f32],
    /// `[kv head][token][D]` f16, `tokens` tokens (a multiple of 64) each, 16 values of padding at the end.
    pub(crate) keys: &'a [u16],
    /// Likewise.
    pub(crate) values: &'a [u16],
    pub(crate) tokens: usize,
    /// The block's first panel (absolute) and their number.
    pub(crate) first: usize,
    pub(crate) panels: usize,
    /// Tokens that a query sees, including its own, a multiple of 64; all if `None`.
    pub(crate) reach: Option<usize>,
}

/// Scratch of one thread.
pub(crate) struct Scratch {
    /// A block of keys `[key][D]` and of values, in f32 or BF16 by path.
    keys: Array<f32>,
    values: Array<f32>,
    /// Scores `[key][64]`, then probabilities.
    scores: Array<f32>,
    /// Results `[head][Dp][64]` of the heads that share keys; Dp is [`padded`].
    out: Array<f32>,
    /// Running maximum and sum of each query, `[head][2][64]`, on the tile path.
    state: Array<f32>,
}

/// D rounded up to two adjacent tiles of 16 pairs.
const fn padded(d: usize) -> usize {
    d.div_ceil(32) * 32
}

impl Scratch {
    /// (keys or values, scores, out, state)
    const fn lengths(d: usize, group: usize) -> [usize; 4] {
        // 128 tokens in BF16 take as much as 64 in f32.
        [KEYS * padded(d) + 16, TILE_KEYS * PANEL_TOKENS, group * padded(d) * PANEL_TOKENS, group * 2 * PANEL_TOKENS]
    }

    /// For heads of `d` channels, `group` of which share keys.
    pub(crate) fn new(d: usize, group: usize) -> Result<Scratch> {
        let [block, scores, out, state] = Scratch::lengths(d, group);
        Ok(Scratch {
            keys: Array::zeros(block)?,
            values: Array::zeros(block)?,
            scores: Array::zeros(scores)?,
            out: Array::zeros(out)?,
            state: Array::zeros(state)?,
        })
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        [&self.keys, &self.values, &self.scores, &self.out, &self.state].iter().map(|array| array.bytes()).sum()
    }

    /// Bytes of [`Scratch::new`].
    pub(crate) const fn bytes_of(d: usize, group: usize) -> usize {
        let [block, scores, out, state] = Scratch::lengths(d, group);
        4 * (2 * block + scores + out + state)
    }
}

const _: () = assert!(TILE_KEYS == 2 * KEYS && KEYS == PANEL_TOKENS);

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
        let share = self.share(simd, threads);
        let items = self.heads / share * self.panels;
        // Heads of a group are adjacent, so their keys stay in the cache.
        let panel_and_head = |item: usize| (item % self.panels, item / self.panels * share);
        let most = self.reach.map_or(usize::MAX, |reach| reach / KEYS + 1);
        let cost = |item: usize| (self.first + panel_and_head(item).0 + 1).min(most);
        let per_item = |item: usize| 4 * share * cost(item) * KEYS * PANEL_TOKENS * self.d;
        // Floats of a head in the output.
        let length = self.d * PANEL_TOKENS / if self.pairs { 2 } else { 1 };
        let scratch = DisjointSlice::new(scratch);
        let out = DisjointSlice::new(out);
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
                for item in share_by_cost(end - start, thread, threads, |i| cost(start + i)) {
                    let (panel, head) = panel_and_head(start + item);
                    self.block(simd, panel, head, share, scratch);
                    for (i, from) in scratch.out.chunks_exact(padded(self.d) * PANEL_TOKENS).take(share).enumerate() {
                        // SAFETY: features of one head of one panel belong to one item.
                        let out = unsafe { out.slice(panel * width + (head + i) * length, length) };
                        let mut values = [[0f32; LANES]; 2];
                        for lane in (0..PANEL_TOKENS).step_by(LANES) {
                            for c in (0..self.d).step_by(2) {
                                for (i, values) in values.iter_mut().enumerate() {
                                    *values = crate::lanes::take(from, (c + i) * PANEL_TOKENS + lane);
                                }
                                put_features(simd, self.pairs, out, c, lane, &values);
                            }
                        }
                    }
                }
            })?;
            start = end;
            poll()?;
        }
        Ok(())
    }

    /// Heads per item. With tiles, converting keys and values is a large part of a block's work, so heads of a group share it
    /// if there are enough items for the threads.
    fn share(&self, simd: Simd, threads: usize) -> usize {
        if !self.pairs || simd != Simd::Amx {
            return 1;
        }
        let fits = |share: &usize| {
            self.group.is_multiple_of(*share) && (*share == 1 || self.heads / share * self.panels >= 2 * threads)
        };
        (1..=self.group).rev().find(fits).unwrap_or(1)
    }

    /// `share` heads from `head` on of 64 query tokens, into `scratch.out`.
    fn block(&self, simd: Simd, panel: usize, head: usize, share: usize, scratch: &mut Scratch) {
        let (d, q0) = (self.d, (self.first + panel) * PANEL_TOKENS);
        let q = &self.q[(panel * self.heads + head) * panel_len(d)..][..share * panel_len(d)];
        let at = head / self.group * self.tokens * d;
        let seen = q0 + PANEL_TOKENS;
        assert!(seen <= self.tokens);
        // The panel's first query sees the keys after this one.
        let masked = self.reach.and_then(|reach| q0.checked_sub(reach));
        let start = masked.unwrap_or(0);
        let (keys, values) = (&self.keys[at..], &self.values[at..]);
        #[cfg(target_arch = "x86_64")]
        if self.pairs {
            // The last vector of a row may extend past its end.
            let (keys, values) = (&keys[..seen * d + 16], &values[..seen * d + 16]);
            match simd {
                Simd::Amx => amx::causal(q, share, keys, values, d, (q0, masked), scratch),
                _ => avx512::causal(q, keys, values, d, (q0, masked), scratch),
            }
            return;
        }
        let out = &mut scratch.out[..d * PANEL_TOKENS];
        out.fill(0.0);
        let mut state = [[-1e30f32, 0.0]; PANEL_TOKENS];
        for t0 in (start..seen).step_by(KEYS) {
            let range = t0 * d..(t0 + KEYS) * d;
            widen(simd, &keys[range.clone()], &mut scratch.keys[..KEYS * d]);
            widen(simd, &values[range], &mut scratch.values[..KEYS * d]);
            let scores = &mut scratch.scores[..KEYS * PANEL_TOKENS];
            tiles(simd, &scratch.keys, (d, 1), KEYS, d, q, scores, false);
            let (state, out, below) = (&mut state, &mut *out, masked == Some(t0));
            portable!(simd, softmax(
                scores: &mut [f32],
                state: &mut [[f32; 2]; PANEL_TOKENS],
                out: &mut [f32],
                q0: usize,
                t0: usize,
                below: bool,
            ));
            tiles(simd, &scratch.values, (1, d), d, KEYS, &scratch.scores, out, true);
        }
        for out in out.chunks_exact_mut(PANEL_TOKENS) {
            for (out, state) in out.iter_mut().zip(&state) {
                *out *= 1.0 / state[1];
            }
        }
    }
}

/// Converts scores `[64 keys from t0][64 queries from q0]` to probabilities relative to the running maximum. `state`: maximum
/// and sum of each query. `out` is rescaled to the new maximum. `below`: key t is hidden from query t and later ones.
#[inline(always)]
fn softmax<const FMA: bool>(
    scores: &mut [f32],
    state: &mut [[f32; 2]; PANEL_TOKENS],
    out: &mut [f32],
    q0: usize,
    t0: usize,
    below: bool,
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
                let hidden = t0 + t > q0 + lane + l || below && t <= lane + l;
                s[l] = if hidden { f32::NEG_INFINITY } else { s[l] };
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

/// Shared by the BF16 kernels.
#[cfg(target_arch = "x86_64")]
mod bf16 {
    use super::PANEL_TOKENS;
    use crate::attend::avx512_exp2 as exp2;
    use std::arch::x86_64::*;

    /// Vectors of a panel of queries.
    pub(super) const VECTORS: usize = PANEL_TOKENS / 16;

    /// Running maximum and sum of 64 queries.
    pub(super) struct State {
        pub(super) most: [__m512; VECTORS],
        pub(super) sum: [__m512; VECTORS],
    }

    impl State {
        #[inline]
        #[target_feature(enable = "avx512f")]
        pub(super) fn new() -> State {
            // Finite, since −∞ minus −∞ is NaN.
            State { most: [_mm512_set1_ps(-1e30); VECTORS], sum: [_mm512_setzero_ps(); VECTORS] }
        }
    }

    /// Converts sixteen f16 to BF16.
    ///
    /// # Safety
    /// Sixteen f16 are readable.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    pub(super) unsafe fn halves(from: *const u16) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe {
            let x = _mm512_cvtph_ps(_mm256_loadu_si256(from.cast()));
            std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(x))
        }
    }

    /// Sixteen channels of two tokens as words of BF16 pairs.
    ///
    /// # Safety
    /// Sixteen f16 are readable at both addresses.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    pub(super) unsafe fn token_pair(first: *const u16, second: *const u16) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe {
            let (low, high) = (_mm512_cvtepu16_epi32(halves(first)), _mm512_cvtepu16_epi32(halves(second)));
            _mm512_or_si512(low, _mm512_slli_epi32::<16>(high))
        }
    }

    /// Masks the keys after each query of `scores[64 keys][64]`, whose positions begin at the same number; or with `BELOW` all others.
    ///
    /// # Safety
    /// All scores are in bounds.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn mask_diagonal<const BELOW: bool>(scores: *mut f32) {
        let lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        for t in 0..PANEL_TOKENS {
            for i in 0..VECTORS {
                let query = _mm512_add_epi32(lane, _mm512_set1_epi32((i * 16) as i32));
                let after = _mm512_cmplt_epi32_mask(query, _mm512_set1_epi32(t as i32));
                let hidden = if BELOW { !after } else { after };
                // SAFETY: the caller's promise.
                unsafe { _mm512_mask_storeu_ps(scores.add(t * PANEL_TOKENS + i * 16), hidden, _mm512_set1_ps(-1e30)) };
            }
        }
    }

    /// Converts scores `[n][64]`, n even, in place to probabilities relative to the running maximum, as words of BF16 pairs
    /// `[n/2][64]`. Returns the factors of the earlier sums.
    ///
    /// # Safety
    /// All scores are in bounds.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq")]
    pub(super) unsafe fn softmax(scores: *mut f32, n: usize, state: &mut State) -> [__m512; VECTORS] {
        let mut alpha = [_mm512_setzero_ps(); VECTORS];
        let half = _mm512_set1_epi32(0x8000);
        for i in 0..VECTORS {
            // SAFETY: the caller's promise.
            let score = |t: usize| unsafe { _mm512_loadu_ps(scores.add(t * PANEL_TOKENS + i * 16)) };
            let mut top = [state.most[i]; 2];
            for t in (0..n).step_by(2) {
                top = [_mm512_max_ps(top[0], score(t)), _mm512_max_ps(top[1], score(t + 1))];
            }
            let most = _mm512_max_ps(top[0], top[1]);
            alpha[i] = exp2(_mm512_sub_ps(state.most[i], most));
            state.most[i] = most;
            let mut sum = [_mm512_mul_ps(state.sum[i], alpha[i]), _mm512_setzero_ps()];
            for t in (0..n).step_by(2) {
                let even = exp2(_mm512_sub_ps(score(t), most));
                let odd = exp2(_mm512_sub_ps(score(t + 1), most));
                sum = [_mm512_add_ps(sum[0], even), _mm512_add_ps(sum[1], odd)];
                // Positive numbers round with one addition. Pair t/2 of sixteen lanes overwrites the scores of token t, which
                // were read before.
                let low = _mm512_srli_epi32::<16>(_mm512_add_epi32(_mm512_castps_si512(even), half));
                let high = _mm512_add_epi32(_mm512_castps_si512(odd), half);
                let pair = _mm512_mask_blend_epi16(0xaaaa_aaaa, low, high);
                // SAFETY: as above.
                unsafe { _mm512_storeu_si512(scores.add(t / 2 * PANEL_TOKENS + i * 16).cast(), pair) };
            }
            state.sum[i] = _mm512_add_ps(sum[0], sum[1]);
        }
        alpha
    }

    /// Multiplies `out[d][64]` by a factor per query.
    ///
    /// # Safety
    /// All results are in bounds.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn scale(out: *mut f32, d: usize, factors: &[__m512; VECTORS]) {
        for c in 0..d {
            for (i, factor) in factors.iter().enumerate() {
                // SAFETY: the caller's promise.
                unsafe {
                    let at = out.add(c * PANEL_TOKENS + i * 16);
                    _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), *factor));
                }
            }
        }
    }

    /// 1 / sum of each query.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn inverse(state: &State) -> [__m512; VECTORS] {
        state.sum.map(|sum| _mm512_div_ps(_mm512_set1_ps(1.0), sum))
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use super::bf16::{State, halves, inverse, mask_diagonal, scale, softmax, token_pair};
    use super::{KEYS, PANEL_TOKENS, Scratch};
    use crate::prefill::avx512::tiles;
    use std::arch::x86_64::*;

    /// One head of 64 queries from position q0 on. q: BF16 pairs `[D/2][64]`; keys and values: `[token][D]` f16 up to q0 + 64
    /// tokens and 16 values more. The result is in `scratch.out`, `[D][64]`.
    pub(super) fn causal(
        q: &[f32],
        keys: &[u16],
        values: &[u16],
        d: usize,
        (q0, masked): (usize, Option<usize>),
        scratch: &mut Scratch,
    ) {
        let need = (q0 + PANEL_TOKENS) * d + 16;
        assert!(q.len() >= d / 2 * PANEL_TOKENS && keys.len() >= need && values.len() >= need);
        assert!(scratch.out.len() >= d * PANEL_TOKENS && scratch.keys.len() >= KEYS * d / 2 + 16);
        // SAFETY: pairs imply AVX-512; lengths were checked.
        unsafe { blocks(q.as_ptr().cast(), keys.as_ptr(), values.as_ptr(), d, (q0, masked), scratch) }
    }

    #[target_feature(enable = "avx512f,avx512bf16,avx512bw,avx512dq")]
    unsafe fn blocks(
        q: *const u8,
        keys: *const u16,
        values: *const u16,
        d: usize,
        (q0, masked): (usize, Option<usize>),
        scratch: &mut Scratch,
    ) {
        // SAFETY: as `causal` checked.
        unsafe {
            let mut state = State::new();
            scratch.out[..d * PANEL_TOKENS].fill(0.0);
            let (s, out) = (scratch.scores.as_mut_ptr(), scratch.out.as_mut_ptr());
            let (kb, vb) = (scratch.keys.as_mut_ptr().cast::<u16>(), scratch.values.as_mut_ptr().cast::<u32>());
            for t0 in (masked.unwrap_or(0)..q0 + PANEL_TOKENS).step_by(KEYS) {
                // Keys [token][D], values [token/2][D][2], both BF16. A row's last vector may extend into the next row, which
                // is written later; padding follows the last row.
                for t in 0..KEYS {
                    for c in (0..d).step_by(16) {
                        _mm256_storeu_si256(kb.add(t * d + c).cast(), halves(keys.add((t0 + t) * d + c)));
                    }
                }
                for t in (0..KEYS).step_by(2) {
                    for c in (0..d).step_by(16) {
                        let at = values.add((t0 + t) * d + c);
                        _mm512_storeu_si512(vb.add(t / 2 * d + c).cast(), token_pair(at, at.add(d)));
                    }
                }
                tiles::<0>(KEYS, kb.cast(), d * 2, 4, q, d / 2, s, std::ptr::null());
                if masked == Some(t0) {
                    mask_diagonal::<true>(s);
                }
                if t0 == q0 {
                    mask_diagonal::<false>(s);
                }
                let alpha = softmax(s, KEYS, &mut state);
                tiles::<2>(d, vb.cast(), 4, d * 4, s.cast(), KEYS / 2, out, alpha.as_ptr().cast());
            }
            scale(out, d, &inverse(&state));
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod amx {
    use super::bf16::{State, halves, inverse, mask_diagonal, scale, softmax, token_pair};
    use super::{PANEL_TOKENS, Scratch, TILE_KEYS, padded};
    use crate::amx::{Left, Tiles, gemm, prompt_tiles, transpose};
    use crate::prefill::panel_len;
    use std::arch::x86_64::*;

    /// `heads` heads of 64 queries from position q0 on that share keys and values. q: BF16 pairs `[head]` of `panel_len(D)`,
    /// zero after D; keys and values: `[token][D]` f16 up to q0 + 64 tokens and 16 values more. Results are in `scratch.out`,
    /// `[head][Dp][64]`.
    pub(super) fn causal(
        q: &[f32],
        heads: usize,
        keys: &[u16],
        values: &[u16],
        d: usize,
        (q0, masked): (usize, Option<usize>),
        scratch: &mut Scratch,
    ) {
        let need = (q0 + PANEL_TOKENS) * d + 16;
        assert!(q.len() >= heads * panel_len(d) && keys.len() >= need && values.len() >= need);
        assert!(panel_len(d) >= padded(d) / 2 * PANEL_TOKENS && scratch.out.len() >= heads * padded(d) * PANEL_TOKENS);
        let block = TILE_KEYS * padded(d) / 2;
        assert!(scratch.keys.len() >= block && scratch.values.len() >= block);
        assert!(scratch.scores.len() >= TILE_KEYS * PANEL_TOKENS && scratch.state.len() >= heads * 2 * PANEL_TOKENS);
        // SAFETY: the machine has tiles, as this path was chosen, and this thread holds no others; lengths were checked.
        unsafe {
            let tiles = prompt_tiles();
            blocks(&tiles, q.as_ptr(), heads, keys.as_ptr(), values.as_ptr(), d, (q0, masked), scratch);
        }
    }

    #[target_feature(enable = "avx512f,avx512bf16,avx512bw,avx512dq")]
    unsafe fn blocks(
        tiles: &Tiles,
        q: *const f32,
        heads: usize,
        keys: *const u16,
        values: *const u16,
        d: usize,
        (q0, masked): (usize, Option<usize>),
        scratch: &mut Scratch,
    ) {
        let (dp, seen) = (padded(d), q0 + PANEL_TOKENS);
        scratch.out[..heads * dp * PANEL_TOKENS].fill(0.0);
        let (s, out) = (scratch.scores.as_mut_ptr(), scratch.out.as_mut_ptr());
        let (kb, vb) = (scratch.keys.as_mut_ptr().cast::<u16>(), scratch.values.as_mut_ptr().cast::<u16>());
        let state_of = scratch.state.as_mut_ptr().cast::<State>();
        // SAFETY: as `causal` checked.
        unsafe {
            for head in 0..heads {
                state_of.add(head).write(State::new());
            }
            for t0 in (masked.unwrap_or(0)..seen).step_by(TILE_KEYS) {
                let n = TILE_KEYS.min(seen - t0);
                convert(keys.add(t0 * d), values.add(t0 * d), n, d, kb, vb);
                for head in 0..heads {
                    let (state, out) = (&mut *state_of.add(head), out.add(head * dp * PANEL_TOKENS));
                    let left = Left { start: kb, pitch: 2 * dp, step: 64 };
                    gemm::<false>(tiles, left, n, dp / 32, q.add(head * panel_len(d)), s);
                    if masked == Some(t0) {
                        mask_diagonal::<true>(s);
                    }
                    if t0 + n == seen {
                        mask_diagonal::<false>(s.add((n - PANEL_TOKENS) * PANEL_TOKENS));
                    }
                    let alpha = softmax(s, n, state);
                    let one = _mm512_set1_ps(1.0);
                    if alpha.iter().any(|alpha| _mm512_cmpneq_ps_mask(*alpha, one) != 0) {
                        scale(out, d, &alpha);
                    }
                    let left = Left { start: vb, pitch: 2 * TILE_KEYS, step: 64 };
                    gemm::<true>(tiles, left, dp, n / 32, s, out);
                }
            }
            for head in 0..heads {
                scale(out.add(head * dp * PANEL_TOKENS), d, &inverse(&*state_of.add(head)));
            }
        }
    }

    /// Converts keys to `[n][Dp]` and values, transposed, to `[Dp][128]`, both BF16. Entries after D are finite: they meet
    /// zeros in the queries, or end in results after D.
    ///
    /// # Safety
    /// n tokens, a multiple of 32, of keys and values, and 16 f16 more; blocks of 128 tokens.
    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn convert(keys: *const u16, values: *const u16, n: usize, d: usize, kb: *mut u16, vb: *mut u16) {
        // SAFETY: the caller's promise.
        unsafe {
            for t in 0..n {
                for c in (0..d).step_by(16) {
                    _mm256_storeu_si256(kb.add(t * padded(d) + c).cast(), halves(keys.add(t * d + c)));
                }
            }
            for c in (0..d).step_by(16) {
                for t in (0..n).step_by(32) {
                    let mut rows = [_mm512_setzero_si512(); 16];
                    for (i, row) in rows.iter_mut().enumerate() {
                        let at = values.add((t + 2 * i) * d + c);
                        *row = token_pair(at, at.add(d));
                    }
                    for (i, row) in transpose(rows).into_iter().enumerate() {
                        _mm512_store_si512(vb.add((c + i) * TILE_KEYS + t).cast(), row);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lanes::{bf16_value, f16_bits, f16_value};
    use crate::testing::{Noise, bits, distance, paths};

    const TOKENS: usize = 5 * PANEL_TOKENS;

    /// Attention of panels `first ..` of 320 tokens: `[token][head][D]`.
    fn attend(
        simd: Simd,
        pairs: bool,
        threads: usize,
        (heads, group, d): (usize, usize, usize),
        first: usize,
        reach: Option<usize>,
        q: &[f32],
        kv: &[Vec<u16>; 2],
    ) -> Vec<f32> {
        let panels = TOKENS / PANEL_TOKENS - first;
        let mut packed = vec![0f32; panels * heads * panel_len(d)];
        for (i, x) in packed.chunks_exact_mut(panel_len(d)).enumerate() {
            let (panel, head) = (first + i / heads, i % heads);
            for lane in (0..PANEL_TOKENS).step_by(LANES) {
                let token = |l: usize| panel * PANEL_TOKENS + lane + l;
                let values: Vec<[f32; LANES]> =
                    (0..d).map(|c| std::array::from_fn(|l| q[(token(l) * heads + head) * d + c])).collect();
                put_features(simd, pairs, x, 0, lane, &values);
            }
        }
        let causal = Causal {
            heads,
            group,
            d,
            pairs,
            q: &packed,
            keys: &kv[0],
            values: &kv[1],
            tokens: TOKENS,
            first,
            panels,
            reach,
        };
        let mut scratch: Vec<Scratch> = (0..threads).map(|_| Scratch::new(d, group).unwrap()).collect();
        let mut out = vec![f32::NAN; panels * panel_len(heads * d)];
        causal.run(&Pool::new(threads).unwrap(), simd, &mut || Ok(()), &mut scratch, &mut out).unwrap();
        let value = |token: usize, feature: usize| {
            let x = &out[token / PANEL_TOKENS * panel_len(heads * d)..];
            if pairs {
                let word = x[feature / 2 * PANEL_TOKENS + token % PANEL_TOKENS].to_bits();
                bf16_value((word >> (16 * (feature % 2))) as u16)
            } else {
                x[feature * PANEL_TOKENS + token % PANEL_TOKENS]
            }
        };
        (0..panels * PANEL_TOKENS).flat_map(|token| (0..heads * d).map(move |c| value(token, c))).collect()
    }

    #[test]
    fn attention_matches_f64_and_neither_blocks_nor_threads_change_a_bit() {
        let mut noise = Noise::new(42);
        let shapes = [(2, 1, 8), (4, 4, 40), (6, 3, 64), (2, 2, 128), (1, 1, 256)];
        let reaches = [None, Some(64), Some(128), Some(192)];
        for ((heads, group, d), reach) in shapes.into_iter().flat_map(|shape| reaches.map(|reach| (shape, reach))) {
            let kv_heads = heads / group;
            let q: Vec<f32> = noise.normals(TOKENS * heads * d).iter().map(|x| x * 2.0 / (d as f32).sqrt()).collect();
            let kv = [0, 1].map(|_| {
                let mut halves: Vec<u16> = noise.normals(kv_heads * TOKENS * d).iter().map(|x| f16_bits(*x)).collect();
                halves.resize(halves.len() + 16, 0);
                halves
            });
            let row = |of: usize, head: usize, t: usize| -> Vec<f64> {
                kv[of][(head * TOKENS + t) * d..][..d].iter().map(|x| f64::from(f16_value(*x))).collect()
            };
            let mut exact = vec![0f64; TOKENS * heads * d];
            for (i, out) in exact.chunks_exact_mut(d).enumerate() {
                let (token, head) = (i / heads, i % heads / group);
                let q: Vec<f64> = q[i * d..][..d].iter().map(|x| f64::from(*x)).collect();
                let first = (token + 1).saturating_sub(reach.unwrap_or(TOKENS));
                let weights: Vec<f64> = (first..=token)
                    .map(|t| row(0, head, t).iter().zip(&q).map(|(k, q)| k * q).sum::<f64>().exp2())
                    .collect();
                let sum: f64 = weights.iter().sum();
                for (t, weight) in weights.iter().enumerate() {
                    out.iter_mut().zip(row(1, head, first + t)).for_each(|(out, v)| *out += weight / sum * v);
                }
            }
            for simd in paths() {
                for pairs in if simd.has_avx512() { vec![true, false] } else { vec![false] } {
                    let all = attend(simd, pairs, 1, (heads, group, d), 0, reach, &q, &kv);
                    let (error, bound) = (distance(&all, &exact), if pairs { 8e-3 } else { 2e-6 });
                    assert!(error < bound, "{heads} heads of {d}, {reach:?}, {simd:?}, pairs {pairs}: off by {error}");
                    for (first, threads) in [(0, 3), (3, 1), (4, 2)] {
                        let some = attend(simd, pairs, threads, (heads, group, d), first, reach, &q, &kv);
                        let expected = &all[first * PANEL_TOKENS * heads * d..];
                        assert!(
                            bits(&some) == bits(expected),
                            "{heads} heads of {d} from {first}, {reach:?}, {simd:?}"
                        );
                    }
                }
            }
        }
    }
}
