//! Integer dot products of a nibble page in AMX tiles: those of [`super::avx512`] for many rows.
//!
//! A plane's codes are unpacked once for all rows into tiles B `[index/4][lane][4]`. Sixteen lanes (tokens of the key plane,
//! channels of the value plane) by up to 64 indices (channels, tokens) are sixteen rows of 64 bytes. A row is what one vector
//! of the plane unpacks to. Tile A holds sixteen limb rows in memory order. Integer sums do not depend on their order, so a
//! row's bits equal those of the AVX-512 path, in any tile.

use super::avx512::{Ahead, codes, join};
use super::{Factors, G, State};
use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;

/// Rows of a tile.
pub(super) const ROWS: usize = crate::amx::TILE_ROWS;

/// Bytes of a tile: sixteen rows of 64.
const TILE: usize = crate::amx::TILE_ROWS * crate::amx::TILE_BYTES;

/// Unpacks `steps` pairs of rows of B; vectors of one lane block are `apart` vectors apart.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn unpack<const BOTH: bool>(
    u: *const u8,
    l: *const u8,
    apart: usize,
    steps: usize,
    out: *mut u8,
    ahead: &mut Ahead,
) {
    // SAFETY: the caller's planes hold these vectors, and `out` 128 bytes for each.
    unsafe {
        for step in 0..steps {
            ahead.step();
            let (first, second) = codes::<BOTH>(u, l, step * apart);
            _mm512_storeu_si512(out.add(step * 128).cast(), first);
            _mm512_storeu_si512(out.add(step * 128 + 64).cast(), second);
        }
    }
}

/// `out[16][16·blocks]` = A · B for one row of K tiles A, rows `a_stride` bytes apart, and `blocks` lane blocks of K tiles
/// each. Rows of `out` are `out_stride` bytes apart. One accumulator suffices: the hardware renames it, so blocks overlap.
macro_rules! gemms {
    ($name:ident, $k:literal, [$($load_a:literal)*], [$($step:literal)*]) => {
        /// # Safety
        /// All eight tiles are configured as 16 × 64 on this thread; the operands have these lengths.
        #[inline]
        unsafe fn $name(a: *const i8, a_stride: usize, b: *const u8, blocks: usize, out: *mut u32, out_stride: usize) {
            // SAFETY: the caller's promise; every tile that is written is declared.
            unsafe {
                asm!(
                    $($load_a,)*
                    "2:",
                    "tilezero tmm0",
                    $($step,)*
                    "tilestored [{out} + {out_stride}*1], tmm0",
                    concat!("add {b}, 1024*", $k),
                    "add {out}, 64",
                    "dec {blocks}",
                    "jnz 2b",
                    a = in(reg) a,
                    a_stride = in(reg) a_stride,
                    b = inout(reg) b => _,
                    row = in(reg) 64usize,
                    blocks = inout(reg) blocks => _,
                    out = inout(reg) out => _,
                    out_stride = in(reg) out_stride,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}
gemms!(gemm1, 1, ["tileloadd tmm4, [{a} + {a_stride}*1]"], ["tileloadd tmm1, [{b} + {row}*1]" "tdpbsud tmm0, tmm4, tmm1"]);
gemms!(
    gemm2, 2,
    ["tileloadd tmm4, [{a} + {a_stride}*1]" "tileloadd tmm5, [{a} + {a_stride}*1 + 64]"],
    ["tileloadd tmm1, [{b} + {row}*1]" "tdpbsud tmm0, tmm4, tmm1"
     "tileloadd tmm2, [{b} + {row}*1 + 1024]" "tdpbsud tmm0, tmm5, tmm2"]
);
gemms!(
    gemm3, 3,
    ["tileloadd tmm4, [{a} + {a_stride}*1]" "tileloadd tmm5, [{a} + {a_stride}*1 + 64]"
     "tileloadd tmm6, [{a} + {a_stride}*1 + 128]"],
    ["tileloadd tmm1, [{b} + {row}*1]" "tdpbsud tmm0, tmm4, tmm1"
     "tileloadd tmm2, [{b} + {row}*1 + 1024]" "tdpbsud tmm0, tmm5, tmm2"
     "tileloadd tmm3, [{b} + {row}*1 + 2048]" "tdpbsud tmm0, tmm6, tmm3"]
);
gemms!(
    gemm4, 4,
    ["tileloadd tmm4, [{a} + {a_stride}*1]" "tileloadd tmm5, [{a} + {a_stride}*1 + 64]"
     "tileloadd tmm6, [{a} + {a_stride}*1 + 128]" "tileloadd tmm7, [{a} + {a_stride}*1 + 192]"],
    ["tileloadd tmm1, [{b} + {row}*1]" "tdpbsud tmm0, tmm4, tmm1"
     "tileloadd tmm2, [{b} + {row}*1 + 1024]" "tdpbsud tmm0, tmm5, tmm2"
     "tileloadd tmm3, [{b} + {row}*1 + 2048]" "tdpbsud tmm0, tmm6, tmm3"
     "tileloadd tmm1, [{b} + {row}*1 + 3072]" "tdpbsud tmm0, tmm7, tmm1"]
);

/// Tiles of k per pass: up to 256 channels.
pub(super) const MAX_K: usize = 4;

/// Dot products of the limb tile that begins with row r, against `blocks` lane blocks of k tiles, into half `half` of
/// `st.limbs.accumulators`.
unsafe fn multiply<const LIMBS: usize>(st: &mut State, r: usize, blocks: usize, k: usize, half: usize) {
    let wide = st.shape.wide();
    // SAFETY: the tile's rows are inside the limbs (which have [`ROWS`] more rows than the state), its columns inside `wide`.
    unsafe {
        let a = st.limbs.data.as_ptr().add(r * 2 * wide);
        let b = st.limbs.codes.as_ptr();
        let out = st.limbs.accumulators.as_mut_ptr().add(half * ROWS * wide);
        // Two limbs of a row are `wide` apart, so rows are 2 · `wide` apart for either LIMBS.
        let stride = wide * (3 - LIMBS);
        match k {
            1 => gemm1(a, stride, b, blocks, out, 4 * wide),
            2 => gemm2(a, stride, b, blocks, out, 4 * wide),
            3 => gemm3(a, stride, b, blocks, out, 4 * wide),
            _ => gemm4(a, stride, b, blocks, out, 4 * wide),
        }
    }
}

/// Calls `row(state, r, its dot products)` for all rows, against `blocks` lane blocks of k tiles. The next rows' tiles are
/// multiplied meanwhile.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq")]
unsafe fn each_row<const LIMBS: usize>(
    st: &mut State,
    rows: Range<usize>,
    blocks: usize,
    k: usize,
    mut row: impl FnMut(&mut State, usize, *const u32),
) {
    // SAFETY: as `scores`.
    unsafe {
        let wide = st.shape.wide();
        let step = ROWS / LIMBS;
        multiply::<LIMBS>(st, rows.start, blocks, k, 0);
        for (i, first) in rows.clone().step_by(step).enumerate() {
            if first + step < rows.end {
                multiply::<LIMBS>(st, first + step, blocks, k, (i + 1) % 2);
            }
            for r in first..rows.end.min(first + step) {
                let at = (i % 2 * ROWS + (r - first) * LIMBS) * wide;
                let accumulators = st.limbs.accumulators.as_ptr().add(at);
                row(st, r, accumulators);
            }
        }
    }
}

/// Sums of vector `t` of a row, whose limbs' dot products are `wide` apart.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn sums<const LIMBS: usize>(accumulators: *const u32, wide: usize, t: usize) -> __m512 {
    // SAFETY: LIMBS rows of `wide` integers.
    unsafe {
        let high = accumulators.add(t * 16);
        join::<LIMBS>(_mm512_loadu_si512(high.cast()), _mm512_loadu_si512(high.add((LIMBS - 1) * wide).cast()))
    }
}

/// Scores of `rows` against the page; calls `then(state, row)` once a row's scores are complete.
///
/// # Safety
/// As [`super::avx512::page`], and tiles as for [`gemms`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq")]
pub(super) unsafe fn scores<const LIMBS: usize, const BOTH: bool>(
    st: &mut State,
    rows: Range<usize>,
    (u, l): (*const u8, *const u8),
    ahead: &mut Ahead,
    mut then: impl FnMut(&mut State, usize),
) {
    // SAFETY: passed on.
    unsafe {
        let (d, k, wide) = (st.shape.d, st.shape.d64 / 64, st.shape.wide());
        // Rows of B after D are stale, and limbs are zero there.
        for block in 0..G / 16 {
            let at = (block / 4 * (d / 8) * 4 + block % 4) * 64;
            let out = st.limbs.codes.as_mut_ptr().add(block * k * TILE);
            unpack::<BOTH>(u.add(at), l.wrapping_add(at), 4, d / 8, out, ahead);
        }
        each_row::<LIMBS>(st, rows, G / 16, k, |st, r, accumulators| {
            ahead.row();
            let Factors { scale, offset, .. } = st.factors[r];
            for t in 0..G / 16 {
                let v = sums::<LIMBS>(accumulators, wide, t);
                let v = _mm512_fmadd_ps(v, _mm512_set1_ps(scale), _mm512_set1_ps(offset));
                _mm512_storeu_ps(st.s.as_mut_ptr().add(r * G + t * 16), v);
            }
            then(st, r);
        });
    }
}

/// o = o·alpha + codes·p·page for `rows`.
///
/// # Safety
/// As [`scores`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq")]
pub(super) unsafe fn values<const LIMBS: usize, const BOTH: bool>(
    st: &mut State,
    rows: Range<usize>,
    (u, l): (*const u8, *const u8),
    ahead: &mut Ahead,
) {
    // SAFETY: passed on.
    unsafe {
        let (d16, k, wide) = (st.shape.d16, G / 64, st.shape.wide());
        for (first, vectors) in st.shape.value_groups() {
            for v in 0..vectors {
                let at = (first * G / 8 + v) * 64;
                let out = st.limbs.codes.as_mut_ptr().add((first + v) * k * TILE);
                unpack::<BOTH>(u.add(at), l.wrapping_add(at), vectors, G / 8, out, ahead);
            }
        }
        each_row::<LIMBS>(st, rows, d16 / 16, k, |st, r, accumulators| {
            ahead.row();
            let Factors { alpha, page, .. } = st.factors[r];
            for t in 0..d16 / 16 {
                let o = st.o.as_mut_ptr().add(r * d16 + t * 16);
                let old = _mm512_mul_ps(_mm512_loadu_ps(o), _mm512_set1_ps(alpha));
                let v = sums::<LIMBS>(accumulators, wide, t);
                _mm512_storeu_ps(o, _mm512_fmadd_ps(v, _mm512_set1_ps(page), old));
            }
        });
    }
}
