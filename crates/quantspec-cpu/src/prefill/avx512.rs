//! Dot products of BF16 pairs by `vdpbf16ps`, in register tiles of outputs and 64 tokens.
use super::{PANEL, PANEL_TOKENS, TILE};
use std::arch::x86_64::*;

/// One output panel against 64 tokens, BF16: `c[32][64] (+)= w · x`.
pub(super) fn panel(w: &[u16], x: &[f32], c: &mut [f32], add: bool, ahead: Option<*const u16>) {
    let pairs = w.len() / (2 * PANEL);
    assert!(x.len() == pairs * PANEL_TOKENS && c.len() == PANEL * PANEL_TOKENS);
    // SAFETY: pairs are used on the AVX-512 path only; lengths were checked. A prefetch may have any address.
    unsafe {
        if let Some(ahead) = ahead {
            for line in 0..w.len() / 32 {
                _mm_prefetch::<_MM_HINT_T1>(ahead.wrapping_add(line * 32).cast());
            }
        }
        let (w, x, c) = (w.as_ptr().cast(), x.as_ptr().cast(), c.as_mut_ptr());
        if add {
            tiles::<1>(PANEL, w, 4, 4 * PANEL, x, pairs, c, std::ptr::null());
        } else {
            tiles::<0>(PANEL, w, 4, 4 * PANEL, x, pairs, c, std::ptr::null());
        }
    }
}

/// `c[j][64]` (+)= Σ over pairs p of b(j, p) · `x[p][64]`; b(j, p) is the 32-bit word at b + j·sj + p·sp (bytes). INIT 0:
/// from zero; 1: onto c; 2: onto c · `alpha[64]`.
///
/// # Safety
/// AVX-512 F and BF16; all operands are in bounds.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn tile<const N: usize, const INIT: u8>(
    b: *const u8,
    sj: usize,
    sp: usize,
    x: *const u8,
    pairs: usize,
    c: *mut f32,
    alpha: *const f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); 4]; N];
        if INIT > 0 {
            for (j, acc) in acc.iter_mut().enumerate() {
                for (v, acc) in acc.iter_mut().enumerate() {
                    *acc = _mm512_loadu_ps(c.add(j * PANEL_TOKENS + v * 16));
                    if INIT == 2 {
                        *acc = _mm512_mul_ps(*acc, _mm512_loadu_ps(alpha.add(v * 16)));
                    }
                }
            }
        }
        for p in 0..pairs {
            let mut xv = [_mm512_setzero_si512(); 4];
            for (v, xv) in xv.iter_mut().enumerate() {
                *xv = _mm512_loadu_si512(x.add((p * 4 + v) * 64).cast());
            }
            for (j, acc) in acc.iter_mut().enumerate() {
                let w = _mm512_set1_epi32(b.add(j * sj + p * sp).cast::<i32>().read_unaligned());
                let w: __m512bh = std::mem::transmute(w);
                for (acc, x) in acc.iter_mut().zip(xv) {
                    *acc = _mm512_dpbf16_ps(*acc, std::mem::transmute::<__m512i, __m512bh>(x), w);
                }
            }
        }
        for (j, acc) in acc.iter().enumerate() {
            for (v, acc) in acc.iter().enumerate() {
                _mm512_storeu_ps(c.add(j * PANEL_TOKENS + v * 16), *acc);
            }
        }
    }
}

/// n outputs, at most six at a time.
///
/// # Safety
/// As `tile`.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
pub(crate) unsafe fn tiles<const INIT: u8>(
    n: usize,
    b: *const u8,
    sj: usize,
    sp: usize,
    x: *const u8,
    pairs: usize,
    c: *mut f32,
    alpha: *const f32,
) {
    let mut j = 0;
    while j < n {
        // SAFETY: the caller's promise.
        unsafe {
            let (b, c) = (b.add(j * sj), c.add(j * PANEL_TOKENS));
            j += match n - j {
                1 => {
                    tile::<1, INIT>(b, sj, sp, x, pairs, c, alpha);
                    1
                }
                2 => {
                    tile::<2, INIT>(b, sj, sp, x, pairs, c, alpha);
                    2
                }
                3 => {
                    tile::<3, INIT>(b, sj, sp, x, pairs, c, alpha);
                    3
                }
                4 | 8 => {
                    tile::<4, INIT>(b, sj, sp, x, pairs, c, alpha);
                    4
                }
                5 | 10 => {
                    tile::<5, INIT>(b, sj, sp, x, pairs, c, alpha);
                    5
                }
                _ => {
                    tile::<TILE, INIT>(b, sj, sp, x, pairs, c, alpha);
                    TILE
                }
            };
        }
    }
}
