//! What the BF16 kernels share: conversion to BF16, masks, and the softmax of 64 queries.
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

/// Masks the keys after each query of `scores[64 keys][64]`, whose positions begin at the same number; or with `BELOW` all
/// others.
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
