//! AMX: eight tile registers of up to 16 rows × 64 bytes, and products of tiles.
//!
//! `tdpbf16ps` adds to C `[M][N]` f32 the product of A `[M][2K]` BF16, row-major, and B `[K][N][2]`, pairs of k interleaved: K ≤ 16
//! pairs, M ≤ 16, N ≤ 16. A panel of [`crate::linear`] is B with two tiles beside each other; a prompt panel of pairs
//! ([`crate::prefill`]) is B with four. Row i of C depends on row i of A and on B alone, to the bit, whatever M is.
//!
//! Rust's intrinsics for tiles are not stable, so tiles are used in inline assembly.

// The kernels that use tiles come with the next change.
#![allow(dead_code)]

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
