//! AMX: eight tile registers of up to 16 rows × 64 bytes, and tile multiplication.
//!
//! `tdpbf16ps` adds to C `[M][N]` f32 the product of A `[M][2K]` BF16, row-major, and B `[K][N][2]`, pairs of k interleaved:
//! K ≤ 16 pairs, M ≤ 16, N ≤ 16. A panel of [`crate::linear`] is B as two adjacent tiles; a prompt panel of pairs
//! ([`crate::prefill`]) is B as four. Row i of C depends on row i of A and on B alone, to the bit, for every M.
//!
//! Rust's tile intrinsics are not stable, so tiles are used in inline assembly.

use crate::dispatch::{AHEAD, FAR_AHEAD};
use crate::elementwise::PANEL_TOKENS;
use crate::panel::PANEL;
use std::arch::asm;
use std::arch::x86_64::*;
use std::marker::PhantomData;

/// Rows of a tile at most.
pub(crate) const TILE_ROWS: usize = 16;

/// Most bytes of a tile row.
pub(crate) const TILE_BYTES: usize = 64;

/// The operand of `ldtilecfg`.
#[repr(C, align(64))]
struct Palette {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    /// Row bytes of each of the eight tiles.
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

const _: () = assert!(size_of::<Palette>() == 64);

/// Tiles in use on this thread, with fixed shapes. Dropping them releases the tiles, so the system need not save their state.
pub(crate) struct Tiles {
    /// The configuration belongs to a thread.
    of_this_thread: PhantomData<*mut ()>,
}

impl Tiles {
    /// Configures the shape of every tile: (rows, bytes of a row), at most 16 × 64.
    ///
    /// # Safety
    /// `Simd::Amx.missing()` is empty, and no other `Tiles` is alive on this thread.
    pub(crate) unsafe fn new(shapes: [(usize, usize); 8]) -> Tiles {
        let mut palette = Palette { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        for (i, (rows, bytes)) in shapes.into_iter().enumerate() {
            assert!((1..=TILE_ROWS).contains(&rows) && (4..=TILE_BYTES).contains(&bytes) && bytes % 4 == 0);
            (palette.rows[i], palette.row_bytes[i]) = (rows as u8, bytes as u16);
        }
        // SAFETY: the CPU has tiles, the system permits their use, and the shapes are within palette 1.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const palette, options(nostack, preserves_flags, readonly)) };
        Tiles { of_this_thread: PhantomData }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: `new` requires that tiles exist; none is used after this.
        unsafe {
            asm!(
                "tilerelease",
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, nomem, preserves_flags),
            );
        }
    }
}

/// Pairs of k per step: a whole tile.
const STEP: usize = 16;

/// Elements of a panel in one step: two adjacent tiles, rows of 128 bytes.
const STEP_LEN: usize = STEP * 2 * PANEL;

/// Tiles for [`rows`] of m rows: C, C, A, B, B.
///
/// # Safety
/// As [`Tiles::new`].
pub(crate) unsafe fn tiles_for_rows(m: usize) -> Tiles {
    let (few, whole, unused) = ((m.clamp(1, TILE_ROWS), TILE_BYTES), (TILE_ROWS, TILE_BYTES), (1, 4));
    // SAFETY: the caller's promise.
    unsafe { Tiles::new([few, few, few, whole, whole, unused, unused, unused]) }
}

/// GEMM of one BF16 panel with BF16 activations: `w` `[k/2][32][2]`, `x` m rows `stride` apart and zero after k up to a
/// multiple of 32, `out` `[m][32]`. Every (row, output) sums over k upwards in steps of 32.
///
/// # Safety
/// The tiles are those of [`tiles_for_rows`] of m.
pub(crate) unsafe fn rows(_tiles: &Tiles, w: &[u16], x: &[u16], stride: usize, m: usize, out: &mut [f32]) {
    let (steps, rest) = (w.len() / STEP_LEN, w.len() % STEP_LEN);
    assert!(w.len().is_multiple_of(2 * PANEL) && out.len() == m * PANEL);
    assert!(stride >= (w.len() / PANEL).next_multiple_of(2 * STEP) && x.len() >= m * stride);
    // Pairs after k are zero on both sides. A tile load there would read the next panel, or past the end.
    let mut padded = [0u16; STEP_LEN];
    padded[..rest].copy_from_slice(&w[steps * STEP_LEN..]);
    let count = m.min(TILE_ROWS);
    for first in (0..m).step_by(TILE_ROWS) {
        // Tiles have a fixed shape, so the last tile overlaps rows that are done; their bits do not change.
        let first = first.min(m - count);
        let (x, out) = (x[first * stride..].as_ptr(), &mut out[first * PANEL..][..count * PANEL]);
        let out = out.as_mut_ptr();
        // SAFETY: the caller's promise. The lengths were checked above: `steps` steps of `w` and rows, and one more step of
        // `padded` and the zeros after the rows' k.
        unsafe {
            if steps > 0 {
                stream::<false>(w.as_ptr(), x, stride, steps, out);
            }
            if rest > 0 {
                let x = x.add(steps * 2 * STEP);
                if steps > 0 {
                    stream::<true>(padded.as_ptr(), x, stride, 1, out);
                } else {
                    stream::<false>(padded.as_ptr(), x, stride, 1, out);
                }
            }
        }
    }
}

/// `out[m][32] (+)= x[m][32 · steps] · w`, loading in address order; m is that of the tiles. ADD: accumulate onto `out`.
///
/// # Safety
/// Tiles as for `rows`; `steps` ≥ 1 steps of 1,024 elements of `w` and 32 of each row of `x`.
unsafe fn stream<const ADD: bool>(w: *const u16, x: *const u16, stride: usize, steps: usize, out: *mut f32) {
    macro_rules! run {
        ($($start:literal),*) => {
            asm!(
                $($start,)*
                "2:",
                ".irp line, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, \
                    16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31",
                "prefetcht1 [{w} + 64 * \\line + {far}]",
                "prefetcht0 [{w} + 64 * \\line + {near}]",
                ".endr",
                "tileloadd tmm2, [{x} + {stride}]",
                "tileloadd tmm3, [{w} + {pitch}]",
                "tileloadd tmm4, [{w} + {pitch} + 64]",
                "tdpbf16ps tmm0, tmm2, tmm3",
                "tdpbf16ps tmm1, tmm2, tmm4",
                "add {x}, 64",
                "add {w}, 2048",
                "dec {steps}",
                "jnz 2b",
                "tilestored [{out} + {pitch}], tmm0",
                "tilestored [{out} + {pitch} + 64], tmm1",
                out = in(reg) out,
                // Bytes of 32 outputs, and of 32 pairs.
                pitch = in(reg) 128usize,
                w = inout(reg) w => _,
                x = inout(reg) x => _,
                stride = in(reg) 2 * stride,
                steps = inout(reg) steps => _,
                near = const AHEAD,
                far = const FAR_AHEAD,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _,
                options(nostack),
            )
        };
    }
    // SAFETY: the caller's promise; a prefetch may have any address.
    unsafe {
        if ADD {
            run!("tileloadd tmm0, [{out} + {pitch}]", "tileloadd tmm1, [{out} + {pitch} + 64]");
        } else {
            run!("tilezero tmm0", "tilezero tmm1");
        }
    }
}

/// Tiles for [`gemm`]: four of C, two of A, two of B.
///
/// # Safety
/// As [`Tiles::new`].
pub(crate) unsafe fn prompt_tiles() -> Tiles {
    // SAFETY: the caller's promise.
    unsafe { Tiles::new([(TILE_ROWS, TILE_BYTES); 8]) }
}

/// The left operand of [`gemm`]: rows of BF16 `pitch` bytes apart; the next 32 k are `step` bytes further.
#[derive(Clone, Copy)]
pub(crate) struct Left {
    pub(crate) start: *const u16,
    pub(crate) pitch: usize,
    pub(crate) step: usize,
}

/// The right operand of [`gemm`]: pairs of k as words of 64 tokens, `pitch` bytes apart.
#[derive(Clone, Copy)]
pub(crate) struct Right {
    pub(crate) start: *const f32,
    pub(crate) pitch: usize,
}

/// Bytes from a pair of k to the next in a panel of pairs.
pub(crate) const PAIR_PITCH: usize = 4 * PANEL_TOKENS;

/// `c[rows][64] (+)= a[rows][32 · steps] · b`. b has 16 · steps pairs, c is f32. 32 × 32 at a time, k upwards in steps of 32.
/// ADD: accumulate onto c.
///
/// # Safety
/// The tiles are those of [`prompt_tiles`]; `rows` is a multiple of 32, `steps` ≥ 1, and all operands are in bounds.
pub(crate) unsafe fn gemm<const ADD: bool>(tiles: &Tiles, a: Left, rows: usize, steps: usize, b: Right, c: *mut f32) {
    for row in (0..rows).step_by(2 * TILE_ROWS) {
        for column in (0..PANEL_TOKENS).step_by(2 * TILE_ROWS) {
            // SAFETY: the caller's promise.
            unsafe {
                let a = Left { start: a.start.byte_add(row * a.pitch), ..a };
                let second = a.start.byte_add(TILE_ROWS * a.pitch);
                let b = Right { start: b.start.add(column), ..b };
                let c = c.add(row * PANEL_TOKENS + column);
                block::<ADD>(tiles, a, second, steps, b, c, a.start.cast());
            }
        }
    }
}

/// One output panel against 64 tokens: `c[32][64] (+)= w · x`. `packed` is the result of [`pack`], `x` holds pairs of k, a
/// multiple of 16, `pitch` bytes apart. Prefetches from `ahead`, 512 bytes per step.
///
/// # Safety
/// The tiles are those of [`prompt_tiles`].
pub(crate) unsafe fn panel(
    tiles: &Tiles,
    packed: &[Line],
    (x, pitch): (&[f32], usize),
    c: &mut [f32],
    add: bool,
    ahead: *const u8,
) {
    let steps = packed.len() / (2 * TILE_ROWS);
    assert!(steps > 0 && packed.len() == steps * 2 * TILE_ROWS);
    assert!(x.len() * 4 >= (steps * STEP - 1) * pitch + PAIR_PITCH && c.len() == PANEL * PANEL_TOKENS);
    let a = Left { start: packed.as_ptr().cast(), pitch: TILE_BYTES, step: 2 * TILE_ROWS * TILE_BYTES };
    let second = packed[TILE_ROWS..].as_ptr().cast();
    for column in (0..PANEL_TOKENS).step_by(2 * TILE_ROWS) {
        let ahead = ahead.wrapping_add(steps * 4 * TILE_BYTES * (column / (2 * TILE_ROWS)));
        let c = c[column..].as_mut_ptr();
        let b = Right { start: x[column..].as_ptr(), pitch };
        // SAFETY: the caller's promise; lengths were checked.
        unsafe {
            if add {
                block::<true>(tiles, a, second, steps, b, c, ahead);
            } else {
                block::<false>(tiles, a, second, steps, b, c, ahead);
            }
        }
    }
}

/// `c[32][32] (+)= a · b`: rows 0..16 of `a` and 16..32 at `second`, against 32 tokens of panels 64 wide.
///
/// # Safety
/// As [`gemm`]. `ahead` may be any address.
unsafe fn block<const ADD: bool>(
    _tiles: &Tiles,
    a: Left,
    second: *const u16,
    steps: usize,
    b: Right,
    c: *mut f32,
    ahead: *const u8,
) {
    macro_rules! run {
        ($($start:literal),*) => {
            asm!(
                $($start,)*
                "2:",
                "tileloadd tmm4, [{a} + {a_pitch}]",
                "tileloadd tmm6, [{b} + {b_pitch}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{b} + {b_pitch} + 64]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{second} + {a_pitch}]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "prefetcht1 [{ahead}]",
                "prefetcht1 [{ahead} + 64]",
                "prefetcht1 [{ahead} + 128]",
                "prefetcht1 [{ahead} + 192]",
                "add {a}, {step}",
                "add {second}, {step}",
                "add {b}, {b_step}",
                "add {ahead}, 256",
                "dec {steps}",
                "jnz 2b",
                "tilestored [{c} + {pitch}], tmm0",
                "tilestored [{c} + {pitch} + 64], tmm1",
                "tilestored [{c} + {pitch} + 4096], tmm2",
                "tilestored [{c} + {pitch} + 4160], tmm3",
                a = inout(reg) a.start => _,
                second = inout(reg) second => _,
                a_pitch = in(reg) a.pitch,
                step = in(reg) a.step,
                b = inout(reg) b.start => _,
                b_pitch = in(reg) b.pitch,
                b_step = in(reg) STEP * b.pitch,
                c = in(reg) c,
                // Bytes of 64 tokens, f32 or pairs; the next rows are 16 times as far.
                pitch = in(reg) 4 * PANEL_TOKENS,
                steps = inout(reg) steps => _,
                ahead = inout(reg) ahead => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            )
        };
    }
    const _: () = assert!(4 * PANEL_TOKENS * TILE_ROWS == 4096);
    // SAFETY: the caller's promise; a prefetch may have any address.
    unsafe {
        if ADD {
            run!(
                "tileloadd tmm0, [{c} + {pitch}]",
                "tileloadd tmm1, [{c} + {pitch} + 64]",
                "tileloadd tmm2, [{c} + {pitch} + 4096]",
                "tileloadd tmm3, [{c} + {pitch} + 4160]"
            );
        } else {
            run!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3");
        }
    }
}

/// A row of a tile.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Line(pub(crate) [u16; 32]);

/// Converts a panel's pairs `w` `[k/2][32][2]` to left operands: `[k/32][2]` tiles of 16 outputs × 32 k, zero after k.
pub(crate) fn pack(w: &[u16], packed: &mut [Line]) {
    let (steps, rest) = (w.len() / STEP_LEN, w.len() % STEP_LEN);
    assert!(packed.len() == w.len().div_ceil(STEP_LEN) * 2 * TILE_ROWS);
    let mut padded = [0u16; STEP_LEN];
    padded[..rest].copy_from_slice(&w[steps * STEP_LEN..]);
    let parts = w.chunks_exact(STEP_LEN).chain((rest > 0).then_some(&padded[..]));
    for (part, tiles) in parts.zip(packed.chunks_exact_mut(2 * TILE_ROWS)) {
        for (half, tile) in tiles.chunks_exact_mut(TILE_ROWS).enumerate() {
            // SAFETY: tiles imply AVX-512. A part is 16 rows of 128 bytes, of which half is read; a tile is 16 lines.
            unsafe { pack_tile(part[half * PANEL..].as_ptr(), tile.as_mut_ptr()) };
        }
    }
}

/// # Safety
/// AVX-512 F; sixteen vectors 128 bytes apart, and sixteen lines.
#[target_feature(enable = "avx512f")]
unsafe fn pack_tile(from: *const u16, to: *mut Line) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut rows = [_mm512_setzero_si512(); 16];
        for (i, row) in rows.iter_mut().enumerate() {
            *row = _mm512_loadu_si512(from.add(i * 2 * PANEL).cast());
        }
        for (i, row) in transpose(rows).into_iter().enumerate() {
            _mm512_store_si512(to.add(i).cast(), row);
        }
    }
}

/// Transposes 16 × 16 words.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn transpose(rows: [__m512i; 16]) -> [__m512i; 16] {
    // Pairs of rows, then groups of four: in its 128-bit part p, vector 4i + j has column 4p + j of rows 4i to 4i + 3.
    let (mut twos, mut fours) = (rows, rows);
    for i in 0..8 {
        twos[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        twos[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    for i in 0..4 {
        for j in 0..2 {
            fours[4 * i + 2 * j] = _mm512_unpacklo_epi64(twos[4 * i + j], twos[4 * i + 2 + j]);
            fours[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(twos[4 * i + j], twos[4 * i + 2 + j]);
        }
    }
    // A column's four parts come together.
    let mut columns = rows;
    for j in 0..4 {
        let even = |i: usize| _mm512_shuffle_i32x4::<0x88>(fours[i + j], fours[i + 4 + j]);
        let odd = |i: usize| _mm512_shuffle_i32x4::<0xdd>(fours[i + j], fours[i + 4 + j]);
        columns[j] = _mm512_shuffle_i32x4::<0x88>(even(0), even(8));
        columns[4 + j] = _mm512_shuffle_i32x4::<0x88>(odd(0), odd(8));
        columns[8 + j] = _mm512_shuffle_i32x4::<0xdd>(even(0), even(8));
        columns[12 + j] = _mm512_shuffle_i32x4::<0xdd>(odd(0), odd(8));
    }
    columns
}
