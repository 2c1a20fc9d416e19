//! AMX: eight tile registers of up to 16 rows × 64 bytes, and products of tiles.
//!
//! `tdpbf16ps` adds to C `[M][N]` f32 the product of A `[M][2K]` BF16, row-major, and B `[K][N][2]`, pairs of k interleaved: K ≤ 16
//! pairs, M ≤ 16, N ≤ 16. A panel of [`crate::linear`] is B with two tiles beside each other; a prompt panel of pairs
//! ([`crate::prefill`]) is B with four. Row i of C depends on row i of A and on B alone, to the bit, whatever M is.
//!
//! Rust's intrinsics for tiles are not stable, so tiles are used in inline assembly.

use crate::dispatch::{AHEAD, FAR_AHEAD};
use crate::linear::{Matrix, PANEL};
use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::marker::PhantomData;
use std::sync::OnceLock;

/// Rows of a tile at most.
pub(crate) const TILE_ROWS: usize = 16;

/// Bytes of a row of a tile at most.
pub(crate) const TILE_BYTES: usize = 64;

/// What tiles of BF16 and int8 need and this machine lacks, asked once.
pub(crate) fn missing() -> Vec<&'static str> {
    static MISSING: OnceLock<Vec<&'static str>> = OnceLock::new();
    MISSING.get_or_init(find_missing).clone()
}

fn find_missing() -> Vec<&'static str> {
    let leaf7 = if __cpuid(0).eax >= 7 { __cpuid_count(7, 0).edx } else { 0 };
    let features = [("amx-bf16", 22), ("amx-tile", 24), ("amx-int8", 25)];
    let mut missing: Vec<_> =
        features.into_iter().filter(|(_, bit)| leaf7 >> bit & 1 == 0).map(|(name, _)| name).collect();
    if missing.is_empty() && !system_grants_tiles() {
        missing.push("the system's permission for tile registers");
    }
    missing
}

/// Whether threads of this process may use tiles. Linux saves their 8 KiB for processes that asked (since 5.16); the
/// permission holds for all threads, those that run already included.
fn system_grants_tiles() -> bool {
    #[cfg(target_os = "linux")]
    {
        const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
        const XFEATURE_XTILEDATA: libc::c_long = 18;
        // SAFETY: this request takes a number and touches no memory of ours; a kernel that does not know it returns an error.
        unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
    }
    #[cfg(not(target_os = "linux"))]
    false
}

/// The operand of `ldtilecfg`.
#[repr(C, align(64))]
struct Palette {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    /// Bytes of a row of each tile; eight exist.
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

const _: () = assert!(size_of::<Palette>() == 64);

/// Tiles in use on this thread, of the shapes it was made with; dropped, they are released, which tells the system that
/// there is nothing to save.
pub(crate) struct Tiles {
    /// The configuration belongs to a thread.
    of_this_thread: PhantomData<*mut ()>,
}

impl Tiles {
    /// Gives every tile its shape: (rows, bytes of a row), at most 16 × 64.
    ///
    /// # Safety
    /// [`missing`] is empty, and no other `Tiles` is alive on this thread.
    pub(crate) unsafe fn new(shapes: [(usize, usize); 8]) -> Tiles {
        let mut palette = Palette { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        for (i, (rows, bytes)) in shapes.into_iter().enumerate() {
            assert!((1..=TILE_ROWS).contains(&rows) && (4..=TILE_BYTES).contains(&bytes) && bytes % 4 == 0);
            (palette.rows[i], palette.row_bytes[i]) = (rows as u8, bytes as u16);
        }
        // SAFETY: the CPU has tiles, the system lets us use them, and the shapes are within palette 1.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const palette, options(nostack, preserves_flags, readonly)) };
        Tiles { of_this_thread: PhantomData }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: made by `new`, so tiles exist; none is used after this.
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

/// Pairs of k of one step: a whole tile.
const STEP: usize = 16;

/// Elements of a panel's part for one step: two tiles beside each other, rows of 128 bytes.
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

/// Rows of a BF16 panel with BF16 activations, as `linear` has them: `w` `[k/2][32][2]`, `x` m rows `stride` apart and zero
/// behind k up to a multiple of 32, `out` `[m][32]`. Every (row, output) takes k upwards in steps of 32.
///
/// # Safety
/// The tiles are those of [`tiles_for_rows`] of m.
pub(crate) unsafe fn rows(_tiles: &Tiles, w: &[u16], x: &[u16], stride: usize, m: usize, out: &mut [f32]) {
    let (steps, rest) = (w.len() / STEP_LEN, w.len() % STEP_LEN);
    assert!(w.len() == Matrix::panel_len(w.len() / PANEL) && out.len() == m * PANEL);
    assert!(stride >= (w.len() / PANEL).next_multiple_of(2 * STEP) && x.len() >= m * stride);
    // Pairs behind k are zero on both sides: what a tile would read there belongs to the next panel, or to nobody.
    let mut padded = [0u16; STEP_LEN];
    padded[..rest].copy_from_slice(&w[steps * STEP_LEN..]);
    let count = m.min(TILE_ROWS);
    for first in (0..m).step_by(TILE_ROWS) {
        // Tiles keep their shape: the last rows of many reach back over rows that are done, whose bits come out again.
        let first = first.min(m - count);
        let (x, out) = (x[first * stride..].as_ptr(), &mut out[first * PANEL..][..count * PANEL]);
        out.fill(0.0);
        let out = out.as_mut_ptr();
        // SAFETY: the caller's promise. The lengths were checked above: `steps` steps of `w` and rows, one more of `padded`
        // and the zeros behind the rows' k.
        unsafe {
            if steps > 0 {
                add_product(w.as_ptr(), x, stride, steps, out);
            }
            if rest > 0 {
                add_product(padded.as_ptr(), x.add(steps * 2 * STEP), stride, 1, out);
            }
        }
    }
}

/// `out[m][32] += x[m][32 · steps] · w`, one stream of loads in address order. m is that of the tiles.
///
/// # Safety
/// Tiles as `rows` shapes them; `steps` ≥ 1 steps of 1,024 elements of `w` and 32 of each row of `x`.
unsafe fn add_product(w: *const u16, x: *const u16, stride: usize, steps: usize, out: *mut f32) {
    // SAFETY: the caller's promise; a prefetch may have any address.
    unsafe {
        asm!(
            "tileloadd tmm0, [{out} + {pitch}]",
            "tileloadd tmm1, [{out} + {pitch} + 64]",
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
        );
    }
}
