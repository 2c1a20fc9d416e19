//! Blocks of keys with `vdpbf16ps`.
use super::softmax::{State, inverse, mask_diagonal, scale, softmax};
use super::{KEYS, PANEL_TOKENS, Scratch};
use crate::bf16::{halves, pair_of_halves};
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
                    _mm256_storeu_si256(kb.add(t * d + c).cast(), halves::<false>(keys.add((t0 + t) * d + c)));
                }
            }
            for t in (0..KEYS).step_by(2) {
                for c in (0..d).step_by(16) {
                    let at = values.add((t0 + t) * d + c);
                    _mm512_storeu_si512(vb.add(t / 2 * d + c).cast(), pair_of_halves::<false>(at, at.add(d)));
                }
            }
            tiles::<0>(KEYS, kb.cast(), d * 2, 4, q, d / 2, s, std::ptr::null());
            if masked == Some(t0) {
                mask_diagonal::<true>(s);
            }
            if t0 == q0 {
                mask_diagonal::<false>(s);
            }
            let alpha = softmax::<false>(s, KEYS, &mut state);
            tiles::<2>(d, vb.cast(), 4, d * 4, s.cast(), KEYS / 2, out, alpha.as_ptr().cast());
        }
        scale(out, d, &inverse(&state));
    }
}
