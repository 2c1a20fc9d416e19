//! A nibble page in f32, in plain Rust over fixed arrays, for paths without integer dot products.

use super::{Factors, G, Planes, Shape, State};
use crate::dispatch::{Simd, portable};
use crate::lanes::{exp2, f16_value, madd};
use quantspec_core::config::Rounding;
use std::ops::Range;

/// Adds a page to rows `rows`; [`super::nibble_page`] checks the lengths.
pub(super) fn page(
    simd: Simd,
    state: &mut State,
    rows: Range<usize>,
    planes: Planes,
    rounding: Rounding,
    upper: &[u8],
    lower: &[u8],
) {
    portable!(simd, page_body(
        state: &mut State,
        rows: Range<usize>,
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
    // SAFETY: 64 bytes, and any bytes are valid words. Assembling words from single bytes would not compile to one load.
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

/// Calls `$work(first row, dots of NR rows)` over all rows, four, two or one at a time; sums do not depend on the number.
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

/// Converts scales and zeros of n groups to steps and values of the centre code.
#[inline(always)]
fn unpack<const FMA: bool>(st: &mut State, params: &[u8], n: usize, (step, shift): (f32, f32)) {
    let param = |i: usize| f16_value(u16::from_le_bytes([params[2 * i], params[2 * i + 1]]));
    let (steps, centres) = st.params.split_at_mut(st.shape.wide());
    for i in 0..n {
        steps[i] = param(i) * step;
        centres[i] = madd::<FMA>(param(i), shift, param(n + i));
    }
}

#[inline(always)]
fn page_body<const FMA: bool>(
    st: &mut State,
    rows: Range<usize>,
    planes: Planes,
    rounding: Rounding,
    upper: &[u8],
    lower: &[u8],
) {
    let (step, shift, centre) = planes.code(rounding);
    let codes = (planes.both(), centre);
    unpack::<FMA>(st, upper, st.shape.d, (step, shift));
    scores::<FMA>(st, rows.clone(), codes, (&upper[st.shape.key_plane()..st.shape.value_params()], lower));
    unpack::<FMA>(st, &upper[st.shape.value_params()..], G, (step, shift));
    for r in rows.clone() {
        weigh::<FMA>(st, r);
    }
    let lower = if planes.both() { &lower[st.shape.lower_value_plane()..] } else { lower };
    values::<FMA>(st, rows, codes, (&upper[st.shape.value_plane()..], lower));
}

/// Folds the steps of keys into the queries, and sets the scores of a page's tokens.
#[inline(always)]
fn scores<const FMA: bool>(st: &mut State, rows: Range<usize>, codes: (bool, f32), plane: (&[u8], &[u8])) {
    let (Shape { d, d64, .. }, wide) = (st.shape, st.shape.wide());
    for r in rows.clone() {
        let q = &st.q[r * d64..][..d];
        let mut offset = 0.0;
        for c in 0..d {
            st.folded[r * wide + c] = q[c] * st.params[c];
            offset = madd::<FMA>(q[c], st.params[wide + c], offset);
        }
        st.factors[r].offset = offset;
    }
    for vector in 0..G / 16 {
        let at = (vector / 4 * (d / 8) * 4 + vector % 4, 4, d / 8);
        macro_rules! scores {
            ($n:literal, $r:expr) => {
                let sums = dots::<FMA, $n>(codes, plane, at, &st.folded[$r * wide..], wide);
                for (i, sums) in sums.iter().enumerate() {
                    let s = &mut st.s[($r + i) * G + vector * 16..][..16];
                    for l in 0..16 {
                        s[l] = sums[l] + st.factors[$r + i].offset;
                    }
                }
            };
        }
        row_groups!(rows, scores);
    }
}

/// Turns row r's scores to probabilities, adds their sums to the state, and folds the steps of values into them.
#[inline(always)]
fn weigh<const FMA: bool>(st: &mut State, r: usize) {
    let wide = st.shape.wide();
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
    (st.factors[r].alpha, st.factors[r].page) = (alpha, w);
}

/// Adds the weighted values of a page to the output.
#[inline(always)]
fn values<const FMA: bool>(st: &mut State, rows: Range<usize>, codes: (bool, f32), plane: (&[u8], &[u8])) {
    let (d16, wide) = (st.shape.d16, st.shape.wide());
    for (first, vectors) in st.shape.value_groups() {
        for vector in 0..vectors {
            let at = (first * G / 8 + vector, vectors, G / 8);
            macro_rules! values {
                ($n:literal, $r:expr) => {
                    let sums = dots::<FMA, $n>(codes, plane, at, &st.folded[$r * wide..], wide);
                    for (i, sums) in sums.iter().enumerate() {
                        let Factors { alpha, page, .. } = st.factors[$r + i];
                        let o = &mut st.o[($r + i) * d16 + (first + vector) * 16..][..16];
                        for l in 0..16 {
                            o[l] = madd::<FMA>(sums[l], page, o[l] * alpha);
                        }
                    }
                };
            }
            row_groups!(rows, values);
        }
    }
}

/// Converts scores of row r to probabilities relative to their maximum over the first `n`; sets the factors of the state and
/// the page.
#[inline(always)]
pub(super) fn softmax<const FMA: bool>(st: &mut State, r: usize, n: usize) -> (f32, f32) {
    st.mask(r);
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
