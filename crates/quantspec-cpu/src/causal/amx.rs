//! Blocks of keys in AMX tiles, for several heads that share keys and values.
use super::softmax::{State, inverse, mask_diagonal, scale, softmax};
use super::{PANEL_TOKENS, Scratch, TILE_KEYS, padded};
use crate::amx::{Left, PAIR_PITCH, Right, Tiles, gemm, prompt_tiles, transpose};
use crate::bf16::{halves, pair_of_halves};
use crate::prefill::panel_len;
use std::arch::x86_64::*;

/// `heads` heads of 64 queries from position q0 on that share keys and values. q: BF16 pairs `[head]` of `panel_len(D)`,
/// zero after D, or with SUMS, for D a multiple of 32, their sums; keys and values: `[token][D]` f16 up to q0 + 64 tokens and
/// 16 values more. Results are in `scratch.out`, `[head][Dp][64]`.
pub(super) fn causal<const SUMS: bool>(
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
    assert!(if SUMS { d.is_multiple_of(32) } else { panel_len(d) >= padded(d) / 2 * PANEL_TOKENS });
    assert!(scratch.out.len() >= heads * padded(d) * PANEL_TOKENS);
    let block = TILE_KEYS * padded(d);
    assert!(scratch.keys.len() >= block && scratch.values.len() >= block);
    assert!(scratch.scores.len() >= TILE_KEYS * PANEL_TOKENS && scratch.state.len() >= heads * 2 * PANEL_TOKENS);
    // SAFETY: the machine has tiles, as this path was chosen, and this thread holds no others; lengths were checked.
    unsafe {
        let tiles = prompt_tiles();
        blocks::<SUMS>(&tiles, q.as_ptr(), heads, keys.as_ptr(), values.as_ptr(), d, (q0, masked), scratch);
    }
}

/// [`gemm`] of BF16 numbers, or with SUMS of sums, without the product of the small summands: those of `a` are `small`
/// elements after the large ones, those of `b` alternate with them.
///
/// # Safety
/// As [`gemm`].
unsafe fn multiply<const SUMS: bool, const ADD: bool>(
    tiles: &Tiles,
    a: Left,
    small: usize,
    rows: usize,
    steps: usize,
    b: *const f32,
    c: *mut f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        if SUMS {
            let b = Right { start: b, pitch: 2 * PAIR_PITCH };
            gemm::<ADD>(tiles, a, rows, steps, b, c);
            gemm::<true>(tiles, Left { start: a.start.add(small), ..a }, rows, steps, b, c);
            gemm::<true>(tiles, a, rows, steps, Right { start: b.start.add(PANEL_TOKENS), ..b }, c);
        } else {
            gemm::<ADD>(tiles, a, rows, steps, Right { start: b, pitch: PAIR_PITCH }, c);
        }
    }
}

#[target_feature(enable = "avx512f,avx512bf16,avx512bw,avx512dq")]
unsafe fn blocks<const SUMS: bool>(
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
    // From the large summands of a block of keys or values to the small ones.
    let small = TILE_KEYS * dp;
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
            let (keys, values) = (keys.add(t0 * d), values.add(t0 * d));
            convert::<false>(keys, values, n, d, kb, vb);
            if SUMS {
                convert::<true>(keys, values, n, d, kb.add(small), vb.add(small));
            }
            for head in 0..heads {
                let (state, out) = (&mut *state_of.add(head), out.add(head * dp * PANEL_TOKENS));
                let left = Left { start: kb, pitch: 2 * dp, step: 64 };
                multiply::<SUMS, false>(tiles, left, small, n, dp / 32, q.add(head * panel_len(d)), s);
                if masked == Some(t0) {
                    mask_diagonal::<true>(s);
                }
                if t0 + n == seen {
                    mask_diagonal::<false>(s.add((n - PANEL_TOKENS) * PANEL_TOKENS));
                }
                let alpha = softmax::<SUMS>(s, n, state);
                let one = _mm512_set1_ps(1.0);
                if alpha.iter().any(|alpha| _mm512_cmpneq_ps_mask(*alpha, one) != 0) {
                    scale(out, d, &alpha);
                }
                let left = Left { start: vb, pitch: 2 * TILE_KEYS, step: 64 };
                multiply::<SUMS, true>(tiles, left, small, dp, n / 32, s, out);
            }
        }
        for head in 0..heads {
            scale(out.add(head * dp * PANEL_TOKENS), d, &inverse(&*state_of.add(head)));
        }
    }
}

/// Converts keys to `[n][Dp]` and values, transposed, to `[Dp][128]`, by [`halves`]. Entries after D are finite: they meet
/// zeros in the queries, or end in results after D.
///
/// # Safety
/// n tokens, a multiple of 32, of keys and values, and 16 f16 more; blocks of 128 tokens.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn convert<const REST: bool>(
    keys: *const u16,
    values: *const u16,
    n: usize,
    d: usize,
    kb: *mut u16,
    vb: *mut u16,
) {
    // SAFETY: the caller's promise.
    unsafe {
        for t in 0..n {
            for c in (0..d).step_by(16) {
                _mm256_storeu_si256(kb.add(t * padded(d) + c).cast(), halves::<REST>(keys.add(t * d + c)));
            }
        }
        for c in (0..d).step_by(16) {
            for t in (0..n).step_by(32) {
                let mut rows = [_mm512_setzero_si512(); 16];
                for (i, row) in rows.iter_mut().enumerate() {
                    let at = values.add((t + 2 * i) * d + c);
                    *row = pair_of_halves::<REST>(at, at.add(d));
                }
                for (i, row) in transpose(rows).into_iter().enumerate() {
                    _mm512_store_si512(vb.add((c + i) * TILE_KEYS + t).cast(), row);
                }
            }
        }
    }
}
