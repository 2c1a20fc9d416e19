//! f16 pages: those of view Full, and the ring of recent tokens.
//!
//! f16 values are widened as they are loaded, once for up to five rows; in plain Rust once for all rows. A score is one chain
//! of multiply-adds over the channels, an output one chain over the tokens, on every path. So the number of rows and vectors
//! in registers does not affect a bit.

use super::portable::softmax;
#[cfg(target_arch = "x86_64")]
use super::prefetch::PagePrefetch;
use super::{G, Shape, State};
use crate::dispatch::{Simd, portable};
use crate::lanes::{madd, widen};
use std::ops::Range;

/// Adds one f16 page (or a page of the ring) to rows of the state. Row r reads its first `visible(r)` tokens, at least one.
/// `next`: the following page, to be prefetched.
pub(crate) fn full_page(
    simd: Simd,
    state: &mut State,
    rows: Range<usize>,
    page: &[u16],
    visible: &[usize],
    next: Option<&[u16]>,
) {
    assert!(page.len() == state.shape.full_len() && visible.len() == rows.len() && rows.end <= state.m.len());
    let (key_halves, value_halves) = page.split_at(G * state.shape.d);
    let d = state.shape.d;
    let most = visible.iter().copied().max().unwrap_or(0);
    #[cfg(target_arch = "x86_64")]
    if simd.has_avx512() || simd == Simd::Avx2 {
        halves(simd, state, rows, (key_halves, value_halves), visible, most, &mut PagePrefetch::halves(next));
        return;
    }
    let _ = next;
    let mut wide = std::mem::take(&mut state.wide);
    for first in (0..most).step_by(64) {
        // Whole vectors: ring entries after the newest token are finite, and their scores are masked.
        let tokens = (most - first).min(64).div_ceil(16) * 16;
        let wide = &mut wide[..tokens * d];
        widen(simd, &key_halves[first * d..][..tokens * d], wide);
        let (state, rows, wide) = (&mut *state, rows.clone(), &*wide);
        portable!(simd, full_scores(state: &mut State, rows: Range<usize>, visible: &[usize], first: usize, wide: &[f32]));
    }
    {
        let (state, rows) = (&mut *state, rows.clone());
        portable!(simd, full_softmax(state: &mut State, rows: Range<usize>, visible: &[usize]));
    }
    for first in (0..most).step_by(16) {
        let tokens = (most - first).min(16);
        let wide = &mut wide[..tokens * d];
        widen(simd, &value_halves[first * d..][..tokens * d], wide);
        let (state, rows, wide) = (&mut *state, rows.clone(), &*wide);
        portable!(simd, full_values(state: &mut State, rows: Range<usize>, visible: &[usize], first: usize, wide: &[f32]));
    }
    state.wide = wide;
}

/// [`full_page`] with x86-64 vectors: the same sums, loading f16 directly.
#[cfg(target_arch = "x86_64")]
fn halves(
    simd: Simd,
    state: &mut State,
    rows: Range<usize>,
    (keys, values): (&[u16], &[u16]),
    visible: &[usize],
    most: usize,
    next: &mut PagePrefetch,
) {
    let Shape { d, d16, d64 } = state.shape;
    // Whole vectors: ring entries after the newest token are finite, and their scores are masked.
    let tokens = most.div_ceil(16) * 16;
    assert!(tokens <= G && keys.len() == G * d && values.len() == G * d);
    assert!(rows.end * d64 <= state.q.len() && rows.end * G <= state.s.len() && rows.end * d16 <= state.o.len());
    let (q, s) = (state.q[rows.start * d64..].as_ptr(), state.s[rows.start * G..].as_mut_ptr());
    let wide = simd.has_avx512();
    let scores = if wide { avx512::scores } else { avx2::scores };
    let add_values = if wide { avx512::values } else { avx2::values };
    // SAFETY: the path was chosen because the CPU has its features; the lengths were checked above.
    unsafe { scores(q, d64, rows.len(), keys.as_ptr(), d, tokens, s, next) };
    {
        let (state, rows) = (&mut *state, rows.clone());
        portable!(simd, full_softmax(state: &mut State, rows: Range<usize>, visible: &[usize]));
    }
    // All rows read the common tokens together, then each row reads its other visible tokens.
    let common = visible.iter().copied().min().unwrap_or(0);
    let mut take = |first: usize, seen: usize, rows: Range<usize>| {
        let (p, o) = (state.s[rows.start * G + first..].as_ptr(), state.o[rows.start * d16..].as_mut_ptr());
        // SAFETY: as above; tokens `first` to `first + seen` are in the page, the rows in the state.
        unsafe { add_values(p, rows.len(), seen, values[first * d..].as_ptr(), d, o, d16, next) };
    };
    take(0, common, rows.clone());
    equal_runs(rows, |i| visible[i] - common, |rows, seen| take(common, seen, rows));
}

/// Calls `each` for every run of adjacent rows that see the same number of tokens, unless that is 0. Rows ascend in position,
/// and rows of a run share loads. `seen` takes a row's index in `rows`.
#[cfg(target_arch = "x86_64")]
fn equal_runs(rows: Range<usize>, seen: impl Fn(usize) -> usize, mut each: impl FnMut(Range<usize>, usize)) {
    let mut i = 0;
    while i < rows.len() {
        let run = (i..rows.len()).take_while(|j| seen(*j) == seen(i)).count();
        if seen(i) > 0 {
            each(rows.start + i..rows.start + i + run, seen(i));
        }
        i += run;
    }
}

/// Both loops for vectors of `$lanes` floats, up to five rows at a time: four vectors for up to two rows, `$vectors` for
/// more. Five rows × `$vectors` sums fill the registers. `$read` widens f16 to a vector of floats.
#[cfg(target_arch = "x86_64")]
macro_rules! kernels {
    ($name:ident, $feature:literal, $lanes:literal, $vectors:literal, $read:expr, $zero:ident, $load:ident, $store:ident, $set1:ident, $fmadd:ident) => {
        mod $name {
            use super::{G, PagePrefetch};
            use crate::lanes::f16_value;
            use std::arch::x86_64::*;

            const LANES: usize = $lanes;

            /// Vectors that N rows take at a time.
            const fn vectors(rows: usize) -> usize {
                if rows > 2 { $vectors } else { 4 }
            }

            /// Lines of the next page to prefetch per load of this many f16 vectors: the same number of bytes, at least one
            /// line.
            const fn lines(vectors: usize) -> usize {
                (vectors * LANES).div_ceil(32)
            }

            /// Evaluates `$call` for all rows, up to five at a time: `$n` rows from `$r` on.
            macro_rules! row_groups {
                ($rows:expr, |$r:ident, $n:ident| $call:expr) => {{
                    let mut $r = 0;
                    while $r < $rows {
                        macro_rules! group {
                            ($count:literal) => {{
                                const $n: usize = $count;
                                $call;
                                $n
                            }};
                        }
                        $r += match $rows - $r {
                            1 => group!(1),
                            2 => group!(2),
                            3 => group!(3),
                            4 => group!(4),
                            _ => group!(5),
                        };
                    }
                }};
            }

            /// `s[r][token] = Σ q[r][c] · k[c][token]`, rows of `s` G apart; keys `[token/16][d][16]`.
            ///
            /// # Safety
            /// `rows` rows of `q` (`d64` apart) and of `s`, and `tokens` (a multiple of 16) keys exist.
            #[target_feature(enable = $feature)]
            pub(super) unsafe fn scores(
                q: *const f32,
                d64: usize,
                rows: usize,
                keys: *const u16,
                d: usize,
                tokens: usize,
                s: *mut f32,
                next: &mut PagePrefetch,
            ) {
                // SAFETY: passed on.
                unsafe {
                    let mut token = 0;
                    while token < tokens {
                        let whole = tokens - token >= 4 * LANES;
                        row_groups!(rows, |r, N| {
                            let (q, s) = (q.add(r * d64), s.add(r * G));
                            if whole {
                                for token in (token..token + 4 * LANES).step_by(vectors(N) * LANES) {
                                    score_block::<N, { vectors(N) }>(q, d64, keys, d, token, s.add(token), next);
                                }
                            } else {
                                score_block::<N, 1>(q, d64, keys, d, token, s.add(token), next);
                            }
                        });
                        token += if whole { 4 * LANES } else { LANES };
                    }
                }
            }

            #[inline]
            #[target_feature(enable = $feature)]
            unsafe fn score_block<const R: usize, const V: usize>(
                q: *const f32,
                d64: usize,
                keys: *const u16,
                d: usize,
                token: usize,
                s: *mut f32,
                next: &mut PagePrefetch,
            ) {
                // SAFETY: as `scores`, for R rows and V vectors of tokens.
                unsafe {
                    let mut acc = [[$zero(); V]; R];
                    let mut vectors = [keys; V];
                    for (v, vector) in vectors.iter_mut().enumerate() {
                        let t = token + v * LANES;
                        *vector = keys.add(t / 16 * d * 16 + t % 16);
                    }
                    for c in 0..d {
                        for _ in 0..lines(V) {
                            next.line();
                        }
                        let mut k = [$zero(); V];
                        for v in 0..V {
                            k[v] = $read(vectors[v].add(c * 16));
                        }
                        for r in 0..R {
                            let q = $set1(*q.add(r * d64 + c));
                            for v in 0..V {
                                acc[r][v] = $fmadd(k[v], q, acc[r][v]);
                            }
                        }
                    }
                    for r in 0..R {
                        for v in 0..V {
                            $store(s.add(r * G + v * LANES), acc[r][v]);
                        }
                    }
                }
            }

            /// `o[r][c] += Σ p[r][token] · v[token][c]`, rows of `p` G and of `o` `d16` apart.
            ///
            /// # Safety
            /// `rows` rows of `p` and `o` and `tokens` values of d channels exist.
            #[target_feature(enable = $feature)]
            pub(super) unsafe fn values(
                p: *const f32,
                rows: usize,
                tokens: usize,
                values: *const u16,
                d: usize,
                o: *mut f32,
                d16: usize,
                next: &mut PagePrefetch,
            ) {
                // SAFETY: passed on.
                unsafe {
                    row_groups!(rows, |r, N| {
                        let (p, o) = (p.add(r * G), o.add(r * d16));
                        let mut c = 0;
                        while c + vectors(N) * LANES <= d {
                            value_block::<N, { vectors(N) }>(p, tokens, values.add(c), d, o.add(c), d16, next);
                            c += vectors(N) * LANES;
                        }
                        while c + LANES <= d {
                            value_block::<N, 1>(p, tokens, values.add(c), d, o.add(c), d16, next);
                            c += LANES;
                        }
                        // Eight channels remain with 16-float vectors.
                        for r in 0..N {
                            for c in c..d {
                                let o = o.add(r * d16 + c);
                                for t in 0..tokens {
                                    *o = f32::mul_add(f16_value(*values.add(t * d + c)), *p.add(r * G + t), *o);
                                }
                            }
                        }
                    });
                }
            }

            #[inline]
            #[target_feature(enable = $feature)]
            unsafe fn value_block<const R: usize, const V: usize>(
                p: *const f32,
                tokens: usize,
                values: *const u16,
                d: usize,
                o: *mut f32,
                d16: usize,
                next: &mut PagePrefetch,
            ) {
                // SAFETY: as `values`, for R rows and V vectors of channels.
                unsafe {
                    let mut acc = [[$zero(); V]; R];
                    for r in 0..R {
                        for v in 0..V {
                            acc[r][v] = $load(o.add(r * d16 + v * LANES));
                        }
                    }
                    for t in 0..tokens {
                        for _ in 0..lines(V) {
                            next.line();
                        }
                        let mut x = [$zero(); V];
                        for v in 0..V {
                            x[v] = $read(values.add(t * d + v * LANES));
                        }
                        for r in 0..R {
                            let p = $set1(*p.add(r * G + t));
                            for v in 0..V {
                                acc[r][v] = $fmadd(x[v], p, acc[r][v]);
                            }
                        }
                    }
                    for r in 0..R {
                        for v in 0..V {
                            $store(o.add(r * d16 + v * LANES), acc[r][v]);
                        }
                    }
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
kernels!(
    avx512,
    "avx512f,fma",
    16,
    4,
    |at: *const u16| _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())),
    _mm512_setzero_ps,
    _mm512_loadu_ps,
    _mm512_storeu_ps,
    _mm512_set1_ps,
    _mm512_fmadd_ps
);
#[cfg(target_arch = "x86_64")]
kernels!(
    avx2,
    "avx2,fma,f16c",
    8,
    2,
    |at: *const u16| _mm256_cvtph_ps(_mm_loadu_si128(at.cast())),
    _mm256_setzero_ps,
    _mm256_loadu_ps,
    _mm256_storeu_ps,
    _mm256_set1_ps,
    _mm256_fmadd_ps
);

#[inline(always)]
fn full_softmax<const FMA: bool>(st: &mut State, rows: Range<usize>, visible: &[usize]) {
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

/// Scores of up to 64 tokens from `first` on, for all rows, in plain Rust. Scores of invisible tokens are meaningless.
/// `wide`: the tokens' keys `[token/16][D][16]`.
#[inline(always)]
fn full_scores<const FMA: bool>(st: &mut State, rows: Range<usize>, visible: &[usize], first: usize, wide: &[f32]) {
    let Shape { d, d64, .. } = st.shape;
    for (r, visible) in rows.zip(visible) {
        if *visible <= first {
            continue;
        }
        let q = &st.q[r * d64..][..d];
        let s = &mut st.s[r * G + first..][..wide.len() / d];
        if s.len() == 64 {
            // Four independent chains of sums hide the latency of a multiply-add.
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

/// Adds up to 16 tokens from `first` on to the outputs of rows that see them, in plain Rust. `wide`: the tokens' values
/// `[token][D]`.
#[inline(always)]
fn full_values<const FMA: bool>(st: &mut State, rows: Range<usize>, visible: &[usize], first: usize, wide: &[f32]) {
    let Shape { d, d16, .. } = st.shape;
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
