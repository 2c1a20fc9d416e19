//! Masks and the softmax of 64 queries, for kernels whose probabilities are BF16.
use super::PANEL_TOKENS;
use crate::attend::avx512_exp2 as exp2;
use crate::bf16::{high_values, low_values, rounded_pair};
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
/// `[n/2][64]`, or with SUMS `[n/2][2][64]`: then those of their rests. Returns the factors of the earlier sums.
///
/// # Safety
/// All scores are in bounds.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq")]
pub(super) unsafe fn softmax<const SUMS: bool>(scores: *mut f32, n: usize, state: &mut State) -> [__m512; VECTORS] {
    let mut alpha = [_mm512_setzero_ps(); VECTORS];
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
            // Overwrites scores that were read before.
            let pair = rounded_pair(even, odd);
            let row = if SUMS { t } else { t / 2 };
            // SAFETY: as above.
            unsafe {
                _mm512_storeu_si512(scores.add(row * PANEL_TOKENS + i * 16).cast(), pair);
                if SUMS {
                    let rest =
                        rounded_pair(_mm512_sub_ps(even, low_values(pair)), _mm512_sub_ps(odd, high_values(pair)));
                    _mm512_storeu_si512(scores.add((row + 1) * PANEL_TOKENS + i * 16).cast(), rest);
                }
            }
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
