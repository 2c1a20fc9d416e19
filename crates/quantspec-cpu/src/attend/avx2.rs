//! A nibble page with AVX2: dot products of 16-bit integers, or of bytes for a draft.
//!
//! The integers are those of [`super::avx512`] without the split into limbs. `vpmaddwd` multiplies two codes by two 15-bit
//! queries (or probabilities times steps) into a 32-bit sum. A draft's 8-bit queries use `vpmaddubsw`. Codes stay unsigned;
//! the offset of the scores corrects for that. Integer sums do not depend on their order.

use super::portable::softmax;
use super::prefetch::PagePrefetch;
use super::{Factors, G, Planes, Shape, State};
use crate::lanes::{madd, sum16};
use quantspec_core::config::Rounding;
use std::arch::x86_64::*;
use std::ops::Range;

/// Precision of queries, and the multiply instruction.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Upper nibbles as bytes, 8-bit queries.
    Bytes,
    /// Upper nibbles as words, 15-bit queries.
    Upper,
    /// Both nibbles as words, 15-bit queries.
    Both,
}

const BYTES: u8 = Kind::Bytes as u8;
const UPPER: u8 = Kind::Upper as u8;
const BOTH: u8 = Kind::Both as u8;

/// Index, within a lane's eight elements, of word i of its unpacked codes. Words are pairs of neighbours of a 32-bit lane:
/// nibbles 0 and 4, then 2 and 6 (the bytes' high nibbles are indices 4 to 7).
const WORDS: [i32; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

/// Rows that share one pass over a vector of codes. Their sums, four vectors of codes and temporaries fill sixteen registers.
const ROWS: usize = 7;

/// Most channels of a head: the sum of that many word products, with codes up to 255, fits in 32 bits.
pub(super) const MAX_D: usize = 256;

/// Largest word and largest byte of a query.
const WORD_TOP: usize = 16_256;
const BYTE_TOP: usize = 127;

/// Steps whose byte products, each the sum of two nibbles times a byte, fit in 16 bits together.
const BYTE_STEPS: usize = 4;

const _: () = assert!(MAX_D >= G && MAX_D * 255 * WORD_TOP <= i32::MAX as usize);
const _: () = assert!(BYTE_STEPS * 2 * 2 * 15 * BYTE_TOP <= i16::MAX as usize);

const fn top(kind: u8) -> f32 {
    (if kind == BYTES { BYTE_TOP } else { WORD_TOP }) as f32
}

/// # Safety
/// AVX2, FMA and F16C; block lengths as [`Shape`] says, D at most [`MAX_D`]; rows inside the state.
#[target_feature(enable = "avx2,fma,f16c")]
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
    let next = &mut PagePrefetch::new(next, planes);
    // SAFETY: passed on.
    unsafe {
        match planes {
            Planes::UpperCoarse => run::<BYTES>(st, rows, code, upper, lower, next),
            Planes::Upper => run::<UPPER>(st, rows, code, upper, lower, next),
            Planes::Both => run::<BOTH>(st, rows, code, upper, lower, next),
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn run<const KIND: u8>(
    st: &mut State,
    rows: Range<usize>,
    (step, shift, centre): (f32, f32, f32),
    upper: &[u8],
    lower: &[u8],
    next: &mut PagePrefetch,
) {
    let shape = st.shape;
    let Shape { d, d16, .. } = shape;
    unpack(st, upper, d, (step, shift));
    for r in rows.clone() {
        // SAFETY: the caller's rows are in the state.
        unsafe { fold_query::<KIND>(st, r, centre) };
    }
    let most = unpack(st, &upper[shape.value_params()..], G, (step, shift)).max(1e-30);
    let low = |at: usize| if KIND == BOTH { &lower[at..] } else { lower };
    for vector in 0..G / 16 {
        let first = vector / 4 * (d / 8) * 4 + vector % 4;
        let plane = (&upper[shape.key_plane() + first * 64..], low(first * 64));
        // SAFETY: the plane holds d / 8 vectors, four apart, from `first` on.
        unsafe {
            each_row(st, rows.clone(), KIND, plane, 4, d / 8, next, |st, r, half, dots| {
                let Factors { scale, offset, .. } = st.factors[r];
                let s = &mut st.s[r * G + vector * 16 + half * 8..][..8];
                for l in 0..8 {
                    s[l] = madd::<true>(dots[l] as f32, scale, offset);
                }
            });
        }
    }
    for r in rows.clone() {
        // SAFETY: as above.
        unsafe { fold_probabilities::<KIND>(st, r, most, centre) };
    }
    for (first, vectors) in shape.value_groups() {
        for vector in 0..vectors {
            let at = (first * G / 8 + vector) * 64;
            let plane = (&upper[shape.value_plane() + at..], low(shape.lower_value_plane() + at));
            // SAFETY: the plane holds G / 8 vectors, `vectors` apart.
            unsafe {
                each_row(st, rows.clone(), KIND, plane, vectors, G / 8, next, |st, r, half, dots| {
                    let Factors { alpha, page, .. } = st.factors[r];
                    let o = &mut st.o[r * d16 + (first + vector) * 16 + half * 8..][..8];
                    for l in 0..8 {
                        o[l] = madd::<true>(dots[l] as f32, page, o[l] * alpha);
                    }
                });
            }
        }
    }
}

/// Converts scales and zeros of n groups (a multiple of 8) to steps and values of the centre code. Returns the largest step.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn unpack(st: &mut State, params: &[u8], n: usize, (step, shift): (f32, f32)) -> f32 {
    let wide = st.shape.wide();
    assert!(n.is_multiple_of(8) && n <= wide && st.params.len() >= wide + n && params.len() >= 4 * n);
    let (from, to) = (params.as_ptr(), st.params.as_mut_ptr());
    let mut most = _mm256_setzero_ps();
    for i in (0..n).step_by(8) {
        // SAFETY: the lengths were checked above.
        unsafe {
            let s = _mm256_cvtph_ps(_mm_loadu_si128(from.add(2 * i).cast()));
            let z = _mm256_cvtph_ps(_mm_loadu_si128(from.add(2 * (n + i)).cast()));
            let steps = _mm256_mul_ps(s, _mm256_set1_ps(step));
            most = _mm256_max_ps(most, steps);
            _mm256_storeu_ps(to.add(i), steps);
            _mm256_storeu_ps(to.add(wide + i), _mm256_fmadd_ps(s, _mm256_set1_ps(shift), z));
        }
    }
    lanes(most).into_iter().fold(0.0, f32::max)
}

#[inline]
#[target_feature(enable = "avx2")]
fn lanes(v: __m256) -> [f32; 8] {
    let mut lanes = [0f32; 8];
    // SAFETY: eight floats.
    unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), v) };
    lanes
}

/// Writes eight codes of a row, elements `8·step ..`, in the order of the dot products.
///
/// # Safety
/// The row's limbs begin at `row` and have as many elements.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn put<const KIND: u8>(row: *mut i8, step: usize, codes: __m256i) {
    // SAFETY: the caller's promise: 8 bytes or 8 words per step.
    unsafe {
        if KIND == BYTES {
            let words = _mm_packs_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256::<1>(codes));
            _mm_storel_epi64(row.add(8 * step).cast(), _mm_packs_epi16(words, words));
        } else {
            let [a, b, c, d, e, f, g, h] = WORDS;
            let codes = _mm256_permutevar8x32_epi32(codes, _mm256_setr_epi32(a, b, c, d, e, f, g, h));
            let words = _mm_packs_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256::<1>(codes));
            _mm_storeu_si128(row.add(16 * step).cast(), words);
        }
    }
}

/// Folds query row r with the page's key parameters into integer codes; sets the scale and offset of its scores.
///
/// # Safety
/// Row r is in the state.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn fold_query<const KIND: u8>(st: &mut State, r: usize, centre: f32) {
    let Shape { d, d64, .. } = st.shape;
    let wide = st.shape.wide();
    // SAFETY: rows of the state's arrays have the lengths of `Shape`.
    unsafe {
        let (q, params) = (st.q.as_ptr().add(r * d64), st.params.as_ptr());
        let out = st.limbs.data.as_mut_ptr().add(r * 2 * wide);
        let folded = |c: usize| _mm256_mul_ps(_mm256_loadu_ps(q.add(c)), _mm256_loadu_ps(params.add(c)));
        let (mut offset, mut most) = (_mm256_setzero_ps(), _mm256_set1_ps(1e-30));
        for c in (0..d).step_by(8) {
            most = _mm256_max_ps(most, _mm256_andnot_ps(_mm256_set1_ps(-0.0), folded(c)));
            offset = _mm256_fmadd_ps(_mm256_loadu_ps(q.add(c)), _mm256_loadu_ps(params.add(wide + c)), offset);
        }
        let most = lanes(most).into_iter().fold(0.0, f32::max);
        let (scale, inverse) = (most / top(KIND), _mm256_set1_ps(top(KIND) / most));
        let mut sums = _mm256_setzero_si256();
        for step in 0..d / 8 {
            let codes = _mm256_cvtps_epi32(_mm256_mul_ps(folded(8 * step), inverse));
            sums = _mm256_add_epi32(sums, codes);
            put::<KIND>(out, step, codes);
        }
        let offset = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums), _mm256_set1_ps(-centre * scale), offset);
        let mut wide = [0f32; 16];
        wide[..8].copy_from_slice(&lanes(offset));
        (st.factors[r].scale, st.factors[r].offset) = (scale, sum16(wide));
    }
}

/// Softmax of row r over the page, as codes of p·step. Their scale is the page's largest step (`most`) over the top code.
///
/// # Safety
/// Row r is in the state.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn fold_probabilities<const KIND: u8>(st: &mut State, r: usize, most: f32, centre: f32) {
    let wide = st.shape.wide();
    let (alpha, w) = softmax::<true>(st, r, G);
    let (scale, inverse) = (most / top(KIND), _mm256_set1_ps(top(KIND) / most));
    // SAFETY: rows of the state's arrays have the lengths of `Shape`.
    unsafe {
        let (p, params) = (st.s.as_ptr().add(r * G), st.params.as_ptr());
        let out = st.limbs.data.as_mut_ptr().add(r * 2 * wide);
        let (mut total, mut zeros, mut sums) = (_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_si256());
        for step in 0..G / 8 {
            let t = 8 * step;
            let p = _mm256_loadu_ps(p.add(t));
            total = _mm256_add_ps(total, p);
            zeros = _mm256_fmadd_ps(p, _mm256_loadu_ps(params.add(wide + t)), zeros);
            let x = _mm256_mul_ps(p, _mm256_loadu_ps(params.add(t)));
            let codes = _mm256_cvtps_epi32(_mm256_mul_ps(x, inverse));
            sums = _mm256_add_epi32(sums, codes);
            put::<KIND>(out, step, codes);
        }
        let zeros = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums), _mm256_set1_ps(-centre * scale), zeros);
        for (state, sum) in [(&mut st.l, total), (&mut st.zero, zeros)] {
            let at = state.as_mut_ptr().add(r * 16);
            let sum = _mm256_mul_ps(sum, _mm256_set1_ps(w));
            _mm256_storeu_ps(at, _mm256_fmadd_ps(_mm256_loadu_ps(at), _mm256_set1_ps(alpha), sum));
        }
    }
    (st.factors[r].alpha, st.factors[r].page) = (alpha, w * scale);
}

/// Calls `each(state, row, half, dots)` with the dot products of all rows and the eight lanes of both halves of a vector,
/// over `steps` vectors `apart` vectors apart. Prefetches the next page, since hardware prefetchers do not follow this order
/// of addresses.
///
/// # Safety
/// The planes hold these vectors; the rows' codes 8 · steps elements.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn each_row(
    st: &mut State,
    rows: Range<usize>,
    kind: u8,
    (u, l): (&[u8], &[u8]),
    apart: usize,
    steps: usize,
    next: &mut PagePrefetch,
    mut each: impl FnMut(&mut State, usize, usize, [i32; 8]),
) {
    assert!(steps > 0 && u.len() >= ((steps - 1) * apart + 1) * 64);
    assert!(kind != BOTH || l.len() >= ((steps - 1) * apart + 1) * 64);
    let row_bytes = 2 * st.shape.wide();
    for half in 0..2 {
        let (u, l) = (u.as_ptr().wrapping_add(32 * half), l.as_ptr().wrapping_add(32 * half));
        let mut r = rows.start;
        while r < rows.end {
            let (n, a) = ((rows.end - r).min(ROWS), st.limbs.data[r * row_bytes..].as_ptr());
            let mut dots = [[0i32; 8]; ROWS];
            macro_rules! pass {
                ($n:literal) => {{
                    // SAFETY: the lengths were checked above; codes of $n rows are `row_bytes` apart.
                    let sums = unsafe {
                        match kind {
                            BYTES => bytes::<$n>(u, apart, steps, a, row_bytes, next),
                            UPPER => words::<$n, false>(u, l, apart, steps, a, row_bytes, next),
                            _ => words::<$n, true>(u, l, apart, steps, a, row_bytes, next),
                        }
                    };
                    for (to, sum) in dots.iter_mut().zip(sums) {
                        // SAFETY: eight integers.
                        unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), sum) };
                    }
                }};
            }
            match n {
                1 => pass!(1),
                2 => pass!(2),
                3 => pass!(3),
                4 => pass!(4),
                5 => pass!(5),
                6 => pass!(6),
                _ => pass!(7),
            }
            for (i, dots) in dots[..n].iter().enumerate() {
                each(st, r + i, half, *dots);
            }
            r += n;
        }
    }
}

/// Σ codes · words of NR rows, for eight lanes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn words<const NR: usize, const BOTH: bool>(
    u: *const u8,
    l: *const u8,
    apart: usize,
    steps: usize,
    a: *const i8,
    row_bytes: usize,
    next: &mut PagePrefetch,
) -> [__m256i; NR] {
    let mut acc = [_mm256_setzero_si256(); NR];
    for step in 0..steps {
        next.line();
        // SAFETY: the caller's promise.
        let u = unsafe { _mm256_loadu_si256(u.add(step * apart * 64).cast()) };
        let codes = if BOTH {
            let high = _mm256_set1_epi8(0xf0_u8 as i8);
            // SAFETY: as above.
            let l = unsafe { _mm256_loadu_si256(l.add(step * apart * 64).cast()) };
            // See docs/design/cache.md: bytes 16·U + L + 8 of indices 4 to 7, then (rotated) of 0 to 3.
            let odd = _mm256_or_si256(_mm256_and_si256(u, high), _mm256_andnot_si256(high, l));
            let even = _mm256_or_si256(_mm256_and_si256(l, high), _mm256_andnot_si256(high, u));
            let even = _mm256_or_si256(_mm256_slli_epi32::<4>(even), _mm256_srli_epi32::<28>(even));
            let word = _mm256_set1_epi16(0xff);
            [
                _mm256_and_si256(even, word),
                _mm256_and_si256(odd, word),
                _mm256_srli_epi16::<8>(even),
                _mm256_srli_epi16::<8>(odd),
            ]
        } else {
            let word = _mm256_set1_epi16(15);
            [
                _mm256_and_si256(u, word),
                _mm256_and_si256(_mm256_srli_epi16::<4>(u), word),
                _mm256_and_si256(_mm256_srli_epi16::<8>(u), word),
                _mm256_srli_epi16::<12>(u),
            ]
        };
        for (r, acc) in acc.iter_mut().enumerate() {
            // SAFETY: four pairs of words per step.
            let pairs = unsafe { a.add(r * row_bytes + step * 16).cast::<i32>() };
            for (i, codes) in codes.iter().enumerate() {
                // SAFETY: as above.
                let pair = _mm256_set1_epi32(unsafe { pairs.add(i).read_unaligned() });
                *acc = _mm256_add_epi32(*acc, _mm256_madd_epi16(*codes, pair));
            }
        }
    }
    acc
}

/// Σ upper nibbles · bytes of NR rows, for eight lanes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn bytes<const NR: usize>(
    u: *const u8,
    apart: usize,
    steps: usize,
    a: *const i8,
    row_bytes: usize,
    next: &mut PagePrefetch,
) -> [__m256i; NR] {
    let (low, ones) = (_mm256_set1_epi8(15), _mm256_set1_epi16(1));
    let mut acc = [_mm256_setzero_si256(); NR];
    let mut step = 0;
    while step < steps {
        let end = steps.min(step + BYTE_STEPS);
        let mut sums = [_mm256_setzero_si256(); NR];
        while step < end {
            next.line();
            // SAFETY: the caller's promise.
            let u = unsafe { _mm256_loadu_si256(u.add(step * apart * 64).cast()) };
            let (first, second) = (_mm256_and_si256(u, low), _mm256_and_si256(_mm256_srli_epi16::<4>(u), low));
            for (r, sum) in sums.iter_mut().enumerate() {
                // SAFETY: eight bytes per step.
                let (x, y) = unsafe {
                    let quads = a.add(r * row_bytes + step * 8).cast::<i32>();
                    (quads.read_unaligned(), quads.add(1).read_unaligned())
                };
                let x = _mm256_maddubs_epi16(first, _mm256_set1_epi32(x));
                let y = _mm256_maddubs_epi16(second, _mm256_set1_epi32(y));
                *sum = _mm256_add_epi16(*sum, _mm256_add_epi16(x, y));
            }
            step += 1;
        }
        for (acc, sum) in acc.iter_mut().zip(sums) {
            *acc = _mm256_add_epi32(*acc, _mm256_madd_epi16(sum, ones));
        }
    }
    acc
}
