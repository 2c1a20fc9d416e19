//! A nibble page with AVX-512 VNNI, or with AMX for the dot products. Both give the same integers, so the same bits.

use super::prefetch::PagePrefetch;
use super::{Factors, G, Planes, State, amx};
use quantspec_core::config::Rounding;
use std::arch::x86_64::*;
use std::ops::Range;

/// Limb rows above which AMX tiles pay: there arithmetic takes longer than memory reads.
const MANY: usize = 8;

/// Adds a page to rows of the state with integer dot products.
///
/// The query times the page's steps becomes integers, and so do the probabilities times the tokens' steps; each row has its own
/// scale. They have one int8 limb (UpperCoarse, at most 127) or two (15 bits, at most `127·128`). So the order of summation
/// inside a page does not matter. Codes are centred through the sum of the limbs.
///
/// # Safety
/// AVX-512 F, BW, DQ and VNNI; block lengths as `Shape` says; rows inside the state.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vnni")]
pub(super) unsafe fn page(
    tiles: bool,
    st: &mut State,
    rows: Range<usize>,
    planes: Planes,
    rounding: Rounding,
    upper: &[u8],
    lower: &[u8],
    next: Option<(&[u8], &[u8])>,
) {
    let code = planes.code(rounding);
    let next = PagePrefetch::new(next, planes);
    // SAFETY: passed on.
    unsafe {
        match planes {
            Planes::UpperCoarse => run::<1, false>(tiles, st, rows, code, upper, lower, next),
            Planes::Upper => run::<2, false>(tiles, st, rows, code, upper, lower, next),
            Planes::Both => run::<2, true>(tiles, st, rows, code, upper, lower, next),
        }
    }
}

const fn top(limbs: usize) -> f32 {
    if limbs == 2 { 16_256.0 } else { 127.0 }
}

/// 2^x for every x ≤ 0, degree 4 (3e-6) or 3 (1e-4): x − ⌊x⌋ is one instruction, and `scalef` floors its argument.
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

/// Unpacks vector i of the planes: as bytes, the four codes of each lane with the first indices, and the four others.
///
/// # Safety
/// The planes hold vector i; with `BOTH` also the lower one.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn codes<const BOTH: bool>(u: *const u8, l: *const u8, i: usize) -> (__m512i, __m512i) {
    // SAFETY: vector i is inside planes whose length the caller guarantees.
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

/// `acc[vector][r]` = Σ over `steps` of codes · limb r, for NV adjacent lane vectors from u (and l) on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn dots<const NR: usize, const NV: usize, const BOTH: bool>(
    u: *const u8,
    l: *const u8,
    (steps, apart): (usize, usize),
    a: *const i8,
    lda: usize,
    ahead: &mut Ahead,
) -> [[__m512i; NR]; NV] {
    // SAFETY: the caller's planes hold steps · NV vectors, its limbs NR rows of 8 · steps.
    unsafe {
        let mut acc = [[_mm512_setzero_si512(); NR]; NV];
        for s in 0..steps {
            let mut c = [(_mm512_setzero_si512(), _mm512_setzero_si512()); NV];
            ahead.step();
            for (t, c) in c.iter_mut().enumerate() {
                *c = codes::<BOTH>(u, l, s * apart + t);
            }
            for r in 0..NR {
                let p = a.add(r * lda + s * 8).cast::<i32>();
                let (x0, x1) = (_mm512_set1_epi32(p.read_unaligned()), _mm512_set1_epi32(p.add(1).read_unaligned()));
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
pub(super) fn join<const LIMBS: usize>(high: __m512i, low: __m512i) -> __m512 {
    _mm512_cvtepi32_ps(if LIMBS == 2 { _mm512_add_epi32(_mm512_slli_epi32::<7>(high), low) } else { high })
}

/// Scores of rows r0.. (NR/LIMBS of them) against the page.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn score_rows<const NR: usize, const NV: usize, const LIMBS: usize, const BOTH: bool>(
    st: &mut State,
    r0: usize,
    u: *const u8,
    l: *const u8,
    ahead: &mut Ahead,
) {
    // SAFETY: as `page`.
    unsafe {
        let d = st.shape.d;
        let wide = st.shape.wide();
        let a = st.limbs.data.as_ptr().add(r0 * 2 * wide);
        let s = st.s.as_mut_ptr().add(r0 * G);
        for b in 0..2 {
            for first in (0..4).step_by(NV) {
                let off = b * d * 32 + first * 64;
                // Two limbs of a row are `wide` apart, so rows are 2 · `wide` apart for either LIMBS.
                let acc =
                    dots::<NR, NV, BOTH>(u.add(off), l.wrapping_add(off), (d / 8, 4), a, wide * (3 - LIMBS), ahead);
                for (t, acc) in acc.iter().enumerate() {
                    for r in 0..NR / LIMBS {
                        let Factors { scale, offset, .. } = *st.factors.get_unchecked(r0 + r);
                        let v = join::<LIMBS>(acc[r * LIMBS], acc[r * LIMBS + LIMBS - 1]);
                        let v = _mm512_fmadd_ps(v, _mm512_set1_ps(scale), _mm512_set1_ps(offset));
                        _mm512_storeu_ps(s.add(r * G + (b * 4 + first + t) * 16), v);
                    }
                }
            }
        }
    }
}

/// o = o·alpha + codes·p·page for rows r0..
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn value_rows<const NR: usize, const NV: usize, const LIMBS: usize, const BOTH: bool>(
    st: &mut State,
    r0: usize,
    u: *const u8,
    l: *const u8,
    ahead: &mut Ahead,
) {
    for (group, vectors) in st.shape.value_groups() {
        for first in (0..vectors).step_by(NV) {
            // SAFETY: as `page`.
            unsafe {
                match (vectors - first).min(NV) {
                    1 => value_group::<NR, 1, LIMBS, BOTH>(st, r0, (group, vectors, first), u, l, ahead),
                    2 => value_group::<NR, 2, LIMBS, BOTH>(st, r0, (group, vectors, first), u, l, ahead),
                    3 => value_group::<NR, 3, LIMBS, BOTH>(st, r0, (group, vectors, first), u, l, ahead),
                    _ => value_group::<NR, NV, LIMBS, BOTH>(st, r0, (group, vectors, first), u, l, ahead),
                }
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn value_group<const NR: usize, const NV: usize, const LIMBS: usize, const BOTH: bool>(
    st: &mut State,
    r0: usize,
    (group, vectors, first): (usize, usize, usize),
    u: *const u8,
    l: *const u8,
    ahead: &mut Ahead,
) {
    // SAFETY: as `page`.
    unsafe {
        let d16 = st.shape.d16;
        let wide = st.shape.wide();
        let a = st.limbs.data.as_ptr().add(r0 * 2 * wide);
        let o = st.o.as_mut_ptr().add(r0 * d16 + (group + first) * 16);
        let off = (group * G / 8 + first) * 64;
        let acc = dots::<NR, NV, BOTH>(u.add(off), l.wrapping_add(off), (G / 8, vectors), a, wide * (3 - LIMBS), ahead);
        for (t, acc) in acc.iter().enumerate() {
            for r in 0..NR / LIMBS {
                let Factors { alpha, page, .. } = *st.factors.get_unchecked(r0 + r);
                let p = o.add(r * d16 + t * 16);
                let old = _mm512_mul_ps(_mm512_loadu_ps(p), _mm512_set1_ps(alpha));
                let v = join::<LIMBS>(acc[r * LIMBS], acc[r * LIMBS + LIMBS - 1]);
                _mm512_storeu_ps(p, _mm512_fmadd_ps(v, _mm512_set1_ps(page), old));
            }
        }
    }
}

/// Writes the limbs of 64 integers q, four vectors in order: 64 bytes at `out` and, with two limbs, 64 more `apart` bytes
/// further. q = 128·high + low, low in 0..128; |q| is at most [`top`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn put_limbs<const LIMBS: usize>(q: [__m512i; 4], out: *mut i8, apart: usize) {
    // Packing works inside 128-bit lanes: word i of lane l is then word l of vector i.
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    let (a, b) = (_mm512_packs_epi32(q[0], q[1]), _mm512_packs_epi32(q[2], q[3]));
    let bytes = |a, b| _mm512_permutexvar_epi32(order, _mm512_packs_epi16(a, b));
    // SAFETY: 64 bytes at `out` and, with two limbs, at `out + apart`.
    unsafe {
        if LIMBS == 2 {
            let low = _mm512_set1_epi16(127);
            let high = bytes(_mm512_srai_epi16::<7>(a), _mm512_srai_epi16::<7>(b));
            _mm512_storeu_si512(out.cast(), high);
            let low = bytes(_mm512_and_si512(a, low), _mm512_and_si512(b, low));
            _mm512_storeu_si512(out.add(apart).cast(), low);
        } else {
            _mm512_storeu_si512(out.cast(), bytes(a, b));
        }
    }
}

/// Converts scales, and zeros `groups` f16 further, to n steps and values of the centre code, `apart` floats apart. Entries
/// after `groups` are unused: queries are 0 there. Returns the largest step.
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
    // SAFETY: n, a multiple of 16, floats at `out` and at `out + apart`; `groups + n` f16 at `params`, including padding.
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

/// Folds query row r with the page's key parameters into limbs; sets the scale and offset of its scores.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn fold_query<const LIMBS: usize>(st: &mut State, r: usize, centre: f32) {
    // SAFETY: as `page`. Queries after D are zero, and parameters there are finite.
    unsafe {
        let (d64, wide) = (st.shape.d64, st.shape.wide());
        let (q, params) = (st.q.as_ptr().add(r * d64), st.params.as_ptr());
        let out = st.limbs.data.as_mut_ptr().add(r * 2 * wide);
        let mut offset = _mm512_setzero_ps();
        let mut most = offset;
        for i in (0..d64).step_by(16) {
            let q = _mm512_loadu_ps(q.add(i));
            most = _mm512_max_ps(most, _mm512_abs_ps(_mm512_mul_ps(q, _mm512_loadu_ps(params.add(i)))));
            offset = _mm512_fmadd_ps(q, _mm512_loadu_ps(params.add(wide + i)), offset);
        }
        let most = _mm512_reduce_max_ps(most).max(1e-30);
        let (scale, inv) = (most / top(LIMBS), _mm512_set1_ps(top(LIMBS) / most));
        let mut sums = _mm512_setzero_si512();
        for first in (0..d64).step_by(64) {
            let mut codes = [sums; 4];
            for (i, code) in codes.iter_mut().enumerate() {
                let at = first + i * 16;
                let x = _mm512_mul_ps(_mm512_loadu_ps(q.add(at)), _mm512_loadu_ps(params.add(at)));
                *code = _mm512_cvtps_epi32(_mm512_mul_ps(x, inv));
                sums = _mm512_add_epi32(sums, *code);
            }
            put_limbs::<LIMBS>(codes, out.add(first), wide);
        }
        let offset = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), _mm512_set1_ps(-centre * scale), offset);
        (st.factors[r].scale, st.factors[r].offset) = (scale, sum(offset));
    }
}

/// Softmax of row r over the page, relative to the page's own maximum, as limbs of p·step. Their scale is the page's largest
/// step (`most`) over the top code. Also sets the row's merge factors. Steps come from [`normalise_steps`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq")]
unsafe fn softmax<const LIMBS: usize>(st: &mut State, r: usize, most: f32, centre: f32) {
    st.mask(r);
    // SAFETY: as `page`.
    unsafe {
        let wide = st.shape.wide();
        let s = st.s.as_ptr().add(r * G);
        let params = st.params.as_ptr();
        let out = st.limbs.data.as_mut_ptr().add(r * 2 * wide);
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
        let (mut total, mut zeros, mut sums) = (_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_si512());
        for first in [0, 4] {
            let mut codes = [sums; 4];
            for (i, code) in codes.iter_mut().enumerate() {
                let at = (first + i) * 16;
                let x = _mm512_sub_ps(p[first + i], _mm512_set1_ps(highest));
                let e = if LIMBS == 2 { exp2::<true>(x) } else { exp2::<false>(x) };
                total = _mm512_add_ps(total, e);
                zeros = _mm512_fmadd_ps(e, _mm512_loadu_ps(params.add(wide + at)), zeros);
                *code = _mm512_cvtps_epi32(_mm512_mul_ps(e, _mm512_loadu_ps(params.add(at))));
                sums = _mm512_add_epi32(sums, *code);
            }
            put_limbs::<LIMBS>(codes, out.add(first * 16), wide);
        }
        let scale = most / top(LIMBS);
        zeros = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), _mm512_set1_ps(-centre * scale), zeros);
        let (av, wv) = (_mm512_set1_ps(alpha), _mm512_set1_ps(w));
        _mm512_storeu_ps(l, _mm512_fmadd_ps(_mm512_loadu_ps(l), av, _mm512_mul_ps(total, wv)));
        _mm512_storeu_ps(zero, _mm512_fmadd_ps(_mm512_loadu_ps(zero), av, _mm512_mul_ps(zeros, wv)));
        (st.factors[r].alpha, st.factors[r].page) = (alpha, w * scale);
    }
}

/// Limb rows of the next pass if `left` are left: as few passes as registers allow, of about equal size. Ten limbs × two
/// vectors of codes fill 26 registers, so a code is unpacked once for ten limb rows. Rows of two limbs are not split.
const fn pass(left: usize, limbs: usize) -> usize {
    let even = left.div_ceil(left.div_ceil(10));
    let (sizes, mut i) = ([1, 2, 4, 5, 8, 10], 0);
    while i + 1 < sizes.len() && sizes[i] < even && sizes[i + 1] <= left {
        i += 1;
    }
    if limbs == 2 && sizes[i] == 5 { 4 } else { sizes[i] }
}

/// Steps of all passes over four vectors.
const fn steps(mut left: usize, limbs: usize) -> usize {
    let mut steps = 0;
    while left > 0 {
        let n = pass(left, limbs);
        steps += if n >= 8 { 2 } else { 1 };
        left -= n;
    }
    steps
}

/// Calls `$f` for all limb rows, in passes. Sums are integers, so any split gives the same bits.
macro_rules! passes {
    ($f:ident, $rows:expr, $limbs:expr, $both:tt, $st:expr, $planes:expr, $ahead:expr) => {{
        let mut r = $rows.start;
        while r < $rows.end {
            let n = pass(($rows.end - r) * $limbs, $limbs);
            match n {
                10 => $f::<10, 2, $limbs, $both>($st, r, $planes.0, $planes.1, $ahead),
                8 => $f::<8, 2, $limbs, $both>($st, r, $planes.0, $planes.1, $ahead),
                5 => $f::<5, 4, $limbs, $both>($st, r, $planes.0, $planes.1, $ahead),
                4 => $f::<4, 4, $limbs, $both>($st, r, $planes.0, $planes.1, $ahead),
                2 => $f::<2, 4, $limbs, $both>($st, r, $planes.0, $planes.1, $ahead),
                _ => $f::<1, 4, $limbs, $both>($st, r, $planes.0, $planes.1, $ahead),
            }
            r += n / $limbs;
        }
    }};
}

/// Scales the steps of the page's tokens by top/most, so that a probability times a step is a code.
#[target_feature(enable = "avx512f")]
unsafe fn normalise_steps<const LIMBS: usize>(params: *mut f32, most: f32) {
    let inv = _mm512_set1_ps(top(LIMBS) / most);
    for i in (0..G).step_by(16) {
        // SAFETY: G floats at `params`.
        unsafe { _mm512_storeu_ps(params.add(i), _mm512_mul_ps(_mm512_loadu_ps(params.add(i)), inv)) };
    }
}

/// Prefetches the next page evenly while the current one is computed. Prefetching lines shortly before their own loads
/// instead leaves memory idle while queries are folded and probabilities computed, and one row takes up to a third longer.
/// Quotas are whole lines: fractions, counted in the inner loop, cost 7 % with many rows. If there are more steps than lines,
/// all lines are prefetched between rows.
pub(super) struct Ahead {
    next: PagePrefetch,
    /// Lines per row of a phase, and per step of the dot products.
    per_row: usize,
    per_step: usize,
}

impl Ahead {
    /// For `rows` rows whose dot products take `steps` steps. With tiles a step unpacks a vector and rows have three phases,
    /// otherwise two.
    fn new(next: PagePrefetch, rows: usize, steps: usize, tiles: bool) -> Ahead {
        let (lines, steps) = (next.len(), steps.max(1));
        let (per_row, per_step) = if tiles {
            (lines / 8, (lines * 5 / 8).div_ceil(steps))
        } else {
            ((lines % steps).div_ceil(2), lines / steps)
        };
        Ahead { next, per_row: per_row.div_ceil(rows.max(1)), per_step }
    }

    /// Prefetches the lines of one row of a phase.
    #[inline(always)]
    pub(super) fn row(&mut self) {
        for _ in 0..self.per_row {
            self.next.line();
        }
    }

    /// Prefetches the lines of one step of the dot products.
    #[inline(always)]
    pub(super) fn step(&mut self) {
        for _ in 0..self.per_step {
            self.next.line();
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vnni")]
unsafe fn run<const LIMBS: usize, const BOTH: bool>(
    tiles: bool,
    st: &mut State,
    rows: Range<usize>,
    (step, shift, centre): (f32, f32, f32),
    upper: &[u8],
    lower: &[u8],
    next: PagePrefetch,
) {
    // SAFETY: as `page`.
    unsafe {
        let shape = st.shape;
        let wide = shape.wide();
        let (u, l) = (upper.as_ptr(), lower.as_ptr());
        let limbs = rows.len() * LIMBS;
        let tiles = tiles && limbs > MANY && shape.d64 <= 64 * amx::MAX_K;
        let steps = if tiles { 2 * shape.d } else { steps(limbs, LIMBS) * (shape.d + shape.d16) / 4 };
        let ahead = &mut Ahead::new(next, rows.len(), steps, tiles);
        let params = st.params.as_mut_ptr();
        unpack(u, shape.d, shape.d16, (step, shift), params, wide);
        for r in rows.clone() {
            ahead.row();
            fold_query::<LIMBS>(st, r, centre);
        }
        // If all steps are 0 (constant values), any scale is correct.
        let most = unpack(u.add(shape.value_params()), G, G, (step, shift), params, wide).max(1e-30);
        normalise_steps::<LIMBS>(params, most);
        let keys = (u.add(shape.key_plane()), l);
        let values = (u.add(shape.value_plane()), l.wrapping_add(shape.lower_value_plane()));
        if tiles {
            let _config = crate::amx::Tiles::new([(amx::ROWS, 64); 8]);
            amx::scores::<LIMBS, BOTH>(st, rows.clone(), keys, ahead, |st, r| softmax::<LIMBS>(st, r, most, centre));
            amx::values::<LIMBS, BOTH>(st, rows, values, ahead);
        } else {
            passes!(score_rows, rows, LIMBS, BOTH, st, keys, ahead);
            for r in rows.clone() {
                ahead.row();
                softmax::<LIMBS>(st, r, most, centre);
            }
            passes!(value_rows, rows, LIMBS, BOTH, st, values, ahead);
        }
    }
}
