//! Blocks of keys in f32, in plain Rust.

use super::{KEYS, PANEL_TOKENS, Scratch};
use crate::dispatch::{Simd, portable};
use crate::elementwise::LANES;
use crate::lanes::{exp2, widen};
use crate::prefill::tiles;

/// One head of 64 queries from position q0 on. q: `[D][64]`; keys and values: `[token][D]` f16 up to q0 + 64 tokens. The
/// result is in `scratch.out`, `[D][64]`.
pub(super) fn causal(
    simd: Simd,
    q: &[f32],
    keys: &[u16],
    values: &[u16],
    d: usize,
    (q0, masked): (usize, Option<usize>),
    scratch: &mut Scratch,
) {
    let out = &mut scratch.out[..d * PANEL_TOKENS];
    out.fill(0.0);
    let mut state = [[-1e30f32, 0.0]; PANEL_TOKENS];
    for t0 in (masked.unwrap_or(0)..q0 + PANEL_TOKENS).step_by(KEYS) {
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
