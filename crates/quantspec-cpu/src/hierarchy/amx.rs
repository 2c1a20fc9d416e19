//! Sums of a panel of tiles by AMX: those of [`super::avx512`] for many rows.
//!
//! A group's codes are unpacked once for all rows into operands B, one for each half of the panel: eight rows `[k/4][output][4]`
//! of 64 bytes, each from the low or the high nibbles of a vector. Operand A is up to sixteen rows of the group's limbs, in
//! place. Sums over a group are exact integers, so a row's bits equal those of the AVX-512 path, in any tile.

use super::avx512::{add, codes, factors, parameters};
use super::{GROUP, HALVES, LOWER, Operands, TILE_ROWS, UPPER, VECTORS};
use crate::amx::{TILE_BYTES, Tiles};
use crate::dispatch::Prefetch;
use crate::panel::PANEL;
use std::arch::asm;
use std::arch::x86_64::*;

/// Rows that share one load of a tile.
pub(super) const ROWS: usize = crate::amx::TILE_ROWS;

/// Rows of operand B: the group's inputs, four to a row.
const STEPS: usize = GROUP / 4;

const _: () = assert!(STEPS == 2 * VECTORS && 4 * TILE_ROWS == TILE_BYTES);

/// Operands B of a group, by half of the panel.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Codes([[[u8; TILE_BYTES]; STEPS]; HALVES]);

/// Sums over a group `[limb][half][row][output]`.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Sums([[[[i32; TILE_ROWS]; ROWS]; HALVES]; 2]);

/// `out[m][32]` of a panel, whose halves share m ≤ [`ROWS`] rows of activations in LIMBS limbs. BOTH: of both planes.
///
/// Unpacking, multiplying and adding up are of different groups at a time, so that none waits for what another has just stored.
///
/// # Safety
/// The lengths that `Operands::check` checks for m rows; `out`: m rows of 32. Tiles exist, and no [`Tiles`] are alive on this
/// thread.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub(super) unsafe fn panel<const BOTH: bool, const LIMBS: usize>(halves: &[Operands; HALVES], m: usize, out: *mut f32) {
    // SAFETY: the caller's promise; every group of the operands exists.
    unsafe {
        let (c, a, b) = ((m, TILE_BYTES), (m, GROUP), (STEPS, TILE_BYTES));
        let tiles = Tiles::new([c, c, c, c, a, a, b, b]);
        let (groups, prefetch) = (halves[0].groups, Prefetch::choose(true));
        let mut codes = [Codes([[[0; TILE_BYTES]; STEPS]; HALVES]); 2];
        let mut sums = [Sums([[[[0; TILE_ROWS]; ROWS]; HALVES]; 2]); 2];
        let mut acc = [[_mm512_setzero_ps(); ROWS]; HALVES];
        unpack::<BOTH>(halves, 0, prefetch, &mut codes[0]);
        for g in 0..=groups {
            if g < groups {
                multiply::<LIMBS>(&tiles, &halves[0], g, &codes[g % 2], &mut sums[g % 2]);
            }
            if g + 1 < groups {
                unpack::<BOTH>(halves, g + 1, prefetch, &mut codes[(g + 1) % 2]);
            }
            if let Some(g) = g.checked_sub(1) {
                add_group::<BOTH, LIMBS>(halves, g, m, &sums[g % 2], &mut acc);
            }
        }
        for (half, acc) in acc.iter().enumerate() {
            for (j, acc) in acc.iter().take(m).enumerate() {
                _mm512_storeu_ps(out.add(j * PANEL + half * TILE_ROWS), *acc);
            }
        }
    }
}

/// Unpacks the codes of group g, and prefetches later ones.
///
/// # Safety
/// As [`panel`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn unpack<const BOTH: bool>(halves: &[Operands; HALVES], g: usize, prefetch: Option<Prefetch>, out: &mut Codes) {
    for (part, out) in halves.iter().zip(&mut out.0) {
        let (tile, lower) = (part.upper.as_ptr().wrapping_add(g * UPPER), part.lower.as_ptr().wrapping_add(g * LOWER));
        if let Some(prefetch) = prefetch {
            prefetch.lines(tile, UPPER);
            if BOTH {
                prefetch.lines(lower, LOWER);
            }
        }
        for (v, rows) in out.chunks_exact_mut(2).enumerate() {
            // SAFETY: the caller's promise; a row is a vector.
            unsafe {
                let (first, second) = codes::<BOTH>(tile, lower, v);
                _mm512_store_si512(rows[0].as_mut_ptr().cast(), first);
                _mm512_store_si512(rows[1].as_mut_ptr().cast(), second);
            }
        }
    }
}

/// Sums over group g, by limb and half.
///
/// # Safety
/// As [`panel`], with its tiles.
#[inline]
unsafe fn multiply<const LIMBS: usize>(_tiles: &Tiles, acts: &Operands, g: usize, codes: &Codes, sums: &mut Sums) {
    let at = g * GROUP;
    let (codes, sums) = (codes.0.as_ptr(), sums.0.as_mut_ptr());
    macro_rules! run {
        ([$($of_low:literal,)*], $($low:tt)*) => {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tileloadd tmm4, [{high} + {pitch}*1]",
                "tileloadd tmm6, [{codes} + {line}*1]",
                "tdpbsud tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{codes} + {line}*1 + 512]",
                "tdpbsud tmm1, tmm4, tmm7",
                "tilestored [{sums} + {line}*1], tmm0",
                "tilestored [{sums} + {line}*1 + 1024], tmm1",
                $($of_low,)*
                high = in(reg) acts.high.as_ptr().add(at),
                $($low)*
                pitch = in(reg) acts.groups * GROUP,
                codes = in(reg) codes,
                sums = in(reg) sums,
                line = in(reg) TILE_BYTES,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            )
        };
    }
    // SAFETY: the caller's promise; every tile that is written is declared.
    unsafe {
        if LIMBS == 2 {
            run!(
                [
                    "tilezero tmm2",
                    "tilezero tmm3",
                    "tileloadd tmm5, [{low} + {pitch}*1]",
                    "tdpbsud tmm2, tmm5, tmm6",
                    "tdpbsud tmm3, tmm5, tmm7",
                    "tilestored [{sums} + {line}*1 + 2048], tmm2",
                    "tilestored [{sums} + {line}*1 + 3072], tmm3",
                ],
                low = in(reg) acts.low.as_ptr().add(at),
            );
        } else {
            run!([],);
        }
    }
}

const _: () = assert!(size_of::<Codes>() == HALVES * 512 && size_of::<Sums>() == 2 * HALVES * 1024);

/// Adds the sums of group g to those of the groups before.
///
/// # Safety
/// As [`panel`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn add_group<const BOTH: bool, const LIMBS: usize>(
    halves: &[Operands; HALVES],
    g: usize,
    m: usize,
    sums: &Sums,
    acc: &mut [[__m512; ROWS]; HALVES],
) {
    // SAFETY: the caller's promise; a row of sums is a vector.
    unsafe {
        let of = halves.each_ref().map(|part| parameters::<BOTH>(part.upper.as_ptr().add(g * UPPER)));
        for j in 0..m {
            let row = factors::<BOTH>(&halves[0], j * halves[0].groups + g);
            for half in 0..HALVES {
                let dot = |limb: usize| _mm512_load_si512(sums.0[limb][half][j].as_ptr().cast());
                let dots = std::array::from_fn::<_, LIMBS, _>(dot);
                let acc = &mut acc[half][j];
                *acc = add::<BOTH, LIMBS>(*acc, dots, of[half], &row);
            }
        }
    }
}
