//! GEMMs in BF16 pairs: the blocks of weights, with AVX-512 and with AMX.

use super::{Panels, avx512};
use crate::amx;
use crate::dispatch::Simd;
use crate::elementwise::PANEL_TOKENS;
use crate::hierarchy::Planes;
use crate::linear::{Matrix, Store, pairs_of};
use crate::panel::PANEL;

/// k per block of BF16 pairs: 64 tokens × 256 are 32 KiB (from L2), 32 outputs × 256 another 16 (from L1).
const PAIRS_KC: usize = 256;

/// k per block with AMX: the pairs of 5 panels, 1.25 MiB, stay in L2, and so do the packed weights, 128 KiB.
const TILE_KC: usize = 2048;

/// Weights multiplied as BF16 pairs: stored as such, or planes whose values are rounded to BF16 block by block.
#[derive(Clone, Copy)]
pub(super) enum Pairs<'a> {
    Stored(&'a [u16]),
    Planes(Simd, &'a Planes),
}

impl<'a> Pairs<'a> {
    pub(super) fn of(simd: Simd, matrix: &'a Matrix) -> Option<Pairs<'a>> {
        match &matrix.store {
            Store::Bf16(w) => Some(Pairs::Stored(w)),
            Store::Planes(planes) => Some(Pairs::Planes(simd, planes)),
            _ => None,
        }
    }

    /// Scratch for a block of kc inputs of one panel.
    fn block(self, kc: usize) -> Vec<u16> {
        match self {
            Pairs::Stored(_) => Vec::new(),
            Pairs::Planes(..) => vec![0; kc * PANEL],
        }
    }

    /// Inputs `first .. first + kc` of a panel of k2 inputs, `[kc/2][32][2]`.
    fn take<'b>(self, output: usize, first: usize, kc: usize, k2: usize, block: &'b mut [u16]) -> &'b [u16]
    where
        'a: 'b,
    {
        match self {
            Pairs::Stored(w) => &w[(output * k2 + first) * PANEL..][..kc * PANEL],
            Pairs::Planes(simd, planes) => {
                planes.pairs(simd, output, first, kc, block);
                &block[..kc * PANEL]
            }
        }
    }

    /// Address of stored weights from input `first` of a panel on, possibly past the last.
    fn after(self, output: usize, first: usize, k2: usize) -> Option<*const u16> {
        match self {
            Pairs::Stored(w) => Some(w.as_ptr().wrapping_add((output * k2 + first) * PANEL)),
            Pairs::Planes(..) => None,
        }
    }
}

/// [`super::gemm_share`] with BF16 pairs. An output panel is completed for all tokens before the next. Its outputs stay in L2,
/// and the tokens are read from there (or from L3) once per 32 outputs.
///
/// # Safety
/// As `gemm_share`.
pub(super) unsafe fn gemm_pairs(weights: Pairs, operands: &Panels, mine: std::ops::Range<usize>) {
    let k2 = 2 * pairs_of(operands.k);
    let mut block = weights.block(PAIRS_KC.min(k2));
    for output in mine {
        for first in (0..k2).step_by(PAIRS_KC) {
            let kc = PAIRS_KC.min(k2 - first);
            let w = weights.take(output, first, kc, k2, &mut block);
            // Prefetches the next block of weights while all panels use this one.
            let ahead = weights.after(output, first + kc, k2);
            for panel in 0..operands.count {
                let x = operands.inputs(panel, first / 2 * PANEL_TOKENS, kc / 2 * PANEL_TOKENS);
                // SAFETY: the caller's promise.
                let c = unsafe { operands.outputs(panel, output) };
                avx512::panel(w, x, c, first > 0, ahead.filter(|_| panel == 0));
            }
        }
    }
}

/// [`super::gemm_share`] with AMX.
///
/// # Safety
/// As `gemm_share`; the machine has tiles, and this thread holds none.
pub(super) unsafe fn gemm_tiles(weights: Pairs, operands: &Panels, mine: std::ops::Range<usize>) {
    let k2 = 2 * pairs_of(operands.k);
    let mut packed = vec![amx::Line([0; 32]); TILE_KC.min(k2.next_multiple_of(32))];
    let mut block = weights.block(TILE_KC.min(k2));
    // SAFETY: the caller's promise.
    let tiles = unsafe { amx::prompt_tiles() };
    for first in (0..k2).step_by(TILE_KC) {
        let kc = TILE_KC.min(k2 - first);
        let packed = &mut packed[..kc.next_multiple_of(32)];
        for output in mine.clone() {
            amx::pack(weights.take(output, first, kc, k2, &mut block), packed);
            // Prefetches the next block of weights within four panels.
            let ahead = weights.after(output + 1, first, k2).map_or(packed.as_ptr().cast(), <*const u16>::cast::<u8>);
            for panel in 0..operands.count {
                let x = operands.inputs(panel, first / 2 * PANEL_TOKENS, packed.len() / 2 * PANEL_TOKENS);
                let ahead = ahead.wrapping_add(panel.min(3) * packed.len() / 32 * 512);
                // SAFETY: the caller's promise.
                unsafe {
                    let c = operands.outputs(panel, output);
                    amx::panel(&tiles, packed, (x, amx::PAIR_PITCH), c, first > 0, ahead);
                }
            }
        }
    }
}
