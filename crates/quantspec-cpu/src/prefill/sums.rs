//! GEMMs of prompts with F16 weights and AMX, whose tiles have no F16: every number is a sum of two BF16 numbers.
//!
//! For a weight this sum is exact, an activation is rounded to 16 bits ([`super::Format::Sums`]). Of the four products of
//! summands all but the smallest are added.

use super::Panels;
use crate::amx::{self, Line, PAIR_PITCH};
use crate::bf16::pair_of_halves;
use crate::elementwise::PANEL_TOKENS;
use crate::panel::PANEL;
use std::arch::x86_64::_mm512_storeu_si512;

/// k per block: both summands of 32 outputs' weights take 128 KiB.
const KC: usize = 1024;

/// A block of weights as two summands: pairs `[kc/2][32][2]`, and tiles of these.
struct Block {
    pairs: [Vec<u16>; 2],
    tiles: [Vec<Line>; 2],
}

impl Block {
    fn new(kc: usize) -> Block {
        let pairs = || vec![0; kc * PANEL];
        let tiles = || vec![Line([0; 32]); kc];
        Block { pairs: [pairs(), pairs()], tiles: [tiles(), tiles()] }
    }

    /// Tiles of both summands of `w`, `[kc][32]` f16.
    #[target_feature(enable = "avx512f,avx512bf16")]
    fn fill(&mut self, w: &[u16]) -> [&[Line]; 2] {
        let [large, small] = &mut self.pairs;
        let pairs = large.chunks_exact_mut(2 * PANEL).zip(small.chunks_exact_mut(2 * PANEL));
        for (rows, (large, small)) in w.chunks_exact(2 * PANEL).zip(pairs) {
            for l in (0..PANEL).step_by(16) {
                // SAFETY: sixteen outputs of two rows, and their words.
                unsafe {
                    let (low, high) = (rows.as_ptr().add(l), rows.as_ptr().add(PANEL + l));
                    _mm512_storeu_si512(large.as_mut_ptr().add(2 * l).cast(), pair_of_halves::<false>(low, high));
                    _mm512_storeu_si512(small.as_mut_ptr().add(2 * l).cast(), pair_of_halves::<true>(low, high));
                }
            }
        }
        let kc = w.len() / PANEL;
        for (pairs, tiles) in self.pairs.iter().zip(&mut self.tiles) {
            amx::pack(&pairs[..w.len()], &mut tiles[..kc]);
        }
        [&self.tiles[0][..kc], &self.tiles[1][..kc]]
    }
}

/// [`super::gemm_share`] for F16 weights `[panel][k][32]` and inputs in sums; k is a multiple of 32.
///
/// # Safety
/// As `gemm_share`; the machine has tiles, and this thread holds none.
pub(super) unsafe fn gemm_sums(weights: &[u16], operands: &Panels, mine: std::ops::Range<usize>) {
    let k = operands.k;
    let mut block = Block::new(KC.min(k));
    // SAFETY: the caller's promise.
    let tiles = unsafe { amx::prompt_tiles() };
    for first in (0..k).step_by(KC) {
        let kc = KC.min(k - first);
        for output in mine.clone() {
            let w = &weights[(output * k + first) * PANEL..][..kc * PANEL];
            // SAFETY: machines with tiles have AVX-512.
            let [large, small] = unsafe { block.fill(w) };
            for panel in 0..operands.count {
                let x = operands.inputs(panel, first * PANEL_TOKENS, kc * PANEL_TOKENS);
                // The small summands of a pair follow the large ones.
                for (i, (w, x)) in [(large, x), (small, x), (large, &x[PANEL_TOKENS..])].into_iter().enumerate() {
                    // SAFETY: the caller's promise.
                    unsafe {
                        let c = operands.outputs(panel, output);
                        amx::panel(&tiles, w, (x, 2 * PAIR_PITCH), c, first > 0 || i > 0, w.as_ptr().cast());
                    }
                }
            }
        }
    }
}
