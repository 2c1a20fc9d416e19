//! GEMMs of prompt rows, with tokens as lanes.
//!
//! Activations are panels of 64 tokens, `[feature][64]`. The input of a GEMM is f32, or BF16 pairs `[k/2][64][2]` on paths
//! with BF16 dot products. Weights are the decode kernels' repacked panels, read in place: a pair of k of one output is one
//! broadcast word. For AMX they are converted to tiles, once for all tokens of a block. Outputs are `[n][64]`, the next
//! operation's panel; norms, RoPE and SiLU work on it lane by lane.
//!
//! A token's result does not depend on its block of rows: panels start at multiples of 64 tokens, and every (token, output)
//! sums over k upwards in one accumulator.

#[cfg(target_arch = "x86_64")]
use crate::amx;
use crate::dispatch::{Simd, portable};
use crate::elementwise::{LANES, PANEL_TOKENS};
#[cfg(target_arch = "x86_64")]
use crate::hierarchy::Planes;
use crate::lanes::{bf16_bits, madd, widen};
use crate::linear::{Matrix, Store, pairs_of};
use crate::memory::DisjointSlice;
use crate::panel::PANEL;
use crate::pool::{Pool, share};
use quantspec_core::{Error, Result};

/// k per f32 block: 64 tokens × 256 are 64 KiB, 32 outputs × 256 another 32 (from L2).
const KC: usize = 256;

/// k per block of BF16 pairs: 64 tokens × 256 are 32 KiB (from L2), 32 outputs × 256 another 16 (from L1).
#[cfg(target_arch = "x86_64")]
const PAIRS_KC: usize = 256;

/// Outputs per register tile: with 64 tokens, 24 AVX-512 accumulators.
const TILE: usize = 6;

/// k per block with AMX: the pairs of 5 panels, 1.25 MiB, stay in L2, and so do the packed weights, 128 KiB.
#[cfg(target_arch = "x86_64")]
const TILE_KC: usize = 2048;

/// Floating-point operations of one dispatch per thread, so that the poll hook runs at least about every 0.1 s. A Sapphire
/// Rapids thread reaches 115 Gflop/s with AVX-512 and 75 with AVX2; for other paths a few are assumed.
pub(crate) const fn slice_flops(simd: Simd) -> usize {
    match simd {
        Simd::Amx => 40_000_000_000,
        Simd::Avx512 => 8_000_000_000,
        Simd::Avx2 => 4_000_000_000,
        Simd::Neon => 1_000_000_000,
        Simd::Scalar => 250_000_000,
    }
}

/// Returns true if the input of `matrix` is BF16 pairs on this path.
pub(crate) fn takes_pairs(simd: Simd, matrix: &Matrix) -> bool {
    simd.has_avx512() && matches!(matrix.store, Store::Bf16(_) | Store::Planes(_))
}

/// Length of a panel in floats, `[k][64]` f32 or `[k/2][64]` words of BF16 pairs; at least whole tiles of 16 pairs.
pub(crate) const fn panel_len(k: usize) -> usize {
    if k < 16 { 16 * PANEL_TOKENS } else { 2 * pairs_of(k) * PANEL_TOKENS }
}

/// The floats after a panel's pairs that tiles read; they must be zero.
pub(crate) const fn tile_padding(k: usize) -> std::ops::Range<usize> {
    pairs_of(k) * PANEL_TOKENS..pairs_of(k).div_ceil(16) * 16 * PANEL_TOKENS
}

/// Writes features `first ..` (an even number) of sixteen tokens from lane `lane` on into a panel that is the input of a
/// GEMM.
pub(crate) fn put_features(
    simd: Simd,
    pairs: bool,
    panel: &mut [f32],
    first: usize,
    lane: usize,
    values: &[[f32; LANES]],
) {
    #[inline(always)]
    fn body<const FMA: bool>(pairs: bool, panel: &mut [f32], first: usize, lane: usize, values: &[[f32; LANES]]) {
        if pairs {
            for (i, pair) in values.chunks(2).enumerate() {
                let out = &mut panel[(first / 2 + i) * PANEL_TOKENS + lane..][..LANES];
                for l in 0..LANES {
                    let high = if pair.len() == 2 { bf16_bits(pair[1][l]) } else { 0 };
                    out[l] = f32::from_bits(u32::from(bf16_bits(pair[0][l])) | u32::from(high) << 16);
                }
            }
        } else {
            for (i, values) in values.iter().enumerate() {
                panel[(first + i) * PANEL_TOKENS + lane..][..LANES].copy_from_slice(values);
            }
            if (first + values.len()) % 2 == 1 {
                panel[(first + values.len()) * PANEL_TOKENS + lane..][..LANES].fill(0.0);
            }
        }
    }
    portable!(simd, body(pairs: bool, panel: &mut [f32], first: usize, lane: usize, values: &[[f32; LANES]]));
}

/// `y[panel][n][64] = W · x[panel]` for `panels` panels of tokens; `x` as [`takes_pairs`] says, `panel_len(k)` apart.
///
/// # Errors
/// Those of `poll`, which is called between slices of the outputs.
pub(crate) fn gemm(
    pool: &Pool,
    simd: Simd,
    poll: &mut dyn FnMut() -> Result<()>,
    matrix: &Matrix,
    x: &mut [f32],
    y: &mut [f32],
    panels: usize,
) -> Result<()> {
    let (k, n, threads) = (matrix.k, matrix.panels * PANEL, pool.threads());
    if x.len() < panels * panel_len(k) || y.len() < panels * n * PANEL_TOKENS {
        return Err(Error::internal(format!(
            "panels of {} and {} numbers for {panels} panels of a matrix of {k} inputs and {n} outputs",
            x.len(),
            y.len()
        )));
    }
    if takes_pairs(simd, matrix) {
        x.chunks_exact_mut(panel_len(k)).take(panels).for_each(|x| x[tile_padding(k)].fill(0.0));
    }
    let x = &*x;
    let flops = 2 * PANEL * k * panels * PANEL_TOKENS;
    let most = (slice_flops(simd) / flops.max(1)).max(1) * threads;
    let y = DisjointSlice::new(y);
    let mut first = 0;
    while first < matrix.panels {
        let outputs = (matrix.panels - first).min(most);
        pool.run(&|thread| {
            let mine = share(outputs, thread, threads);
            let mine = first + mine.start..first + mine.end;
            #[cfg(target_arch = "x86_64")]
            if let (Simd::Amx | Simd::Avx512, Some(w)) = (simd, Pairs::of(simd, matrix)) {
                let gemm = if simd == Simd::Amx { gemm_tiles } else { gemm_pairs };
                // SAFETY: as below; the machine has the path's instructions.
                unsafe { gemm(w, k, n, x, &y, panels, mine) };
                return;
            }
            // SAFETY: output panels belong to one thread, and rows of `y` to one output.
            unsafe { gemm_share(simd, matrix, x, &y, panels, mine) };
        })?;
        first += outputs;
        poll()?;
    }
    Ok(())
}

/// # Safety
/// No other thread uses rows of `y` that belong to the output panels `mine`.
unsafe fn gemm_share(
    simd: Simd,
    matrix: &Matrix,
    x: &[f32],
    y: &DisjointSlice<f32>,
    panels: usize,
    mine: std::ops::Range<usize>,
) {
    let (k2, n) = (2 * pairs_of(matrix.k), matrix.panels * PANEL);
    let mut block = vec![0f32; KC * PANEL];
    for output in mine {
        for first in (0..k2).step_by(KC) {
            let kc = KC.min(k2 - first);
            let block = &mut block[..kc * PANEL];
            let at = output * PANEL * k2;
            let range = at + first * PANEL..at + (first + kc) * PANEL;
            match &matrix.store {
                Store::Bf16(w) => {
                    let w = &w[range];
                    portable!(simd, widen_pairs(w: &[u16], block: &mut [f32]));
                }
                Store::F16(w) => widen(simd, &w[range], block),
                Store::F32(w) => block.copy_from_slice(&w[range]),
                Store::Planes(planes) => planes.values(simd, output, first, kc, block),
            }
            for panel in 0..panels {
                let x = &x[panel * panel_len(matrix.k) + first * PANEL_TOKENS..][..kc * PANEL_TOKENS];
                // SAFETY: the caller's promise.
                let c = unsafe { y.slice((panel * n + output * PANEL) * PANEL_TOKENS, PANEL * PANEL_TOKENS) };
                tiles(simd, block, (1, PANEL), PANEL, kc, x, c, first > 0);
            }
        }
    }
}

/// Weights multiplied as BF16 pairs: stored as such, or planes whose values are rounded to BF16 block by block.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
enum Pairs<'a> {
    Stored(&'a [u16]),
    Planes(Simd, &'a Planes),
}

#[cfg(target_arch = "x86_64")]
impl<'a> Pairs<'a> {
    fn of(simd: Simd, matrix: &'a Matrix) -> Option<Pairs<'a>> {
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

/// [`gemm_share`] with BF16 pairs: `weights` are a matrix of k inputs and n outputs. An output panel is completed for all
/// tokens before the next. Its outputs stay in L2, and the tokens are read from there (or from L3) once per 32 outputs.
///
/// # Safety
/// As `gemm_share`.
#[cfg(target_arch = "x86_64")]
unsafe fn gemm_pairs(
    weights: Pairs,
    k: usize,
    n: usize,
    x: &[f32],
    y: &DisjointSlice<f32>,
    panels: usize,
    mine: std::ops::Range<usize>,
) {
    let k2 = 2 * pairs_of(k);
    let mut block = weights.block(PAIRS_KC.min(k2));
    for output in mine {
        for first in (0..k2).step_by(PAIRS_KC) {
            let kc = PAIRS_KC.min(k2 - first);
            let w = weights.take(output, first, kc, k2, &mut block);
            // Prefetches the next block of weights while all panels use this one.
            let ahead = weights.after(output, first + kc, k2);
            for panel in 0..panels {
                let x = &x[panel * panel_len(k) + first / 2 * PANEL_TOKENS..][..kc / 2 * PANEL_TOKENS];
                // SAFETY: the caller's promise.
                let c = unsafe { y.slice((panel * n + output * PANEL) * PANEL_TOKENS, PANEL * PANEL_TOKENS) };
                avx512::panel(w, x, c, first > 0, ahead.filter(|_| panel == 0));
            }
        }
    }
}

/// [`gemm_share`] with AMX: `weights` are a matrix of k inputs and n outputs.
///
/// # Safety
/// As `gemm_share`; the machine has tiles, and this thread holds none.
#[cfg(target_arch = "x86_64")]
unsafe fn gemm_tiles(
    weights: Pairs,
    k: usize,
    n: usize,
    x: &[f32],
    y: &DisjointSlice<f32>,
    panels: usize,
    mine: std::ops::Range<usize>,
) {
    let k2 = 2 * pairs_of(k);
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
            for panel in 0..panels {
                let x = &x[panel * panel_len(k) + first / 2 * PANEL_TOKENS..][..packed.len() / 2 * PANEL_TOKENS];
                let ahead = ahead.wrapping_add(panel.min(3) * packed.len() / 32 * 512);
                // SAFETY: the caller's promise.
                unsafe {
                    let c = y.slice((panel * n + output * PANEL) * PANEL_TOKENS, PANEL * PANEL_TOKENS);
                    amx::panel(&tiles, packed, x, c, first > 0, ahead);
                }
            }
        }
    }
}

/// BF16 pairs `[k/2][32][2]` to f32 `[k][32]`.
#[inline(always)]
fn widen_pairs<const FMA: bool>(from: &[u16], to: &mut [f32]) {
    for (from, to) in from.chunks_exact(2 * PANEL).zip(to.chunks_exact_mut(2 * PANEL)) {
        for l in 0..PANEL {
            to[l] = crate::lanes::bf16_value(from[2 * l]);
            to[PANEL + l] = crate::lanes::bf16_value(from[2 * l + 1]);
        }
    }
}

/// `c[j][64] (+)= Σ_p w[j·sj + p·sp] · x[p][64]` for j in 0..n, p in 0..kc; `add`: accumulate onto c.
pub(crate) fn tiles(
    simd: Simd,
    w: &[f32],
    strides: (usize, usize),
    n: usize,
    kc: usize,
    x: &[f32],
    c: &mut [f32],
    add: bool,
) {
    if simd.has_avx512() {
        portable!(simd, tiles_body[64](w: &[f32], strides: (usize, usize), n: usize, kc: usize, x: &[f32], c: &mut [f32], add: bool));
    } else {
        portable!(simd, tiles_body[16](w: &[f32], strides: (usize, usize), n: usize, kc: usize, x: &[f32], c: &mut [f32], add: bool));
    }
}

#[inline(always)]
fn tiles_body<const FMA: bool, const L: usize>(
    w: &[f32],
    strides: (usize, usize),
    n: usize,
    kc: usize,
    x: &[f32],
    c: &mut [f32],
    add: bool,
) {
    for lane in (0..PANEL_TOKENS).step_by(L) {
        let mut j = 0;
        while j < n {
            let (w, c) = (&w[j * strides.0..], &mut c[j * PANEL_TOKENS..]);
            match n - j {
                1 => tile::<FMA, 1, L>(w, strides, kc, x, lane, c, add),
                2 => tile::<FMA, 2, L>(w, strides, kc, x, lane, c, add),
                3 => tile::<FMA, 3, L>(w, strides, kc, x, lane, c, add),
                4 | 8 => tile::<FMA, 4, L>(w, strides, kc, x, lane, c, add),
                5 => tile::<FMA, 5, L>(w, strides, kc, x, lane, c, add),
                _ => tile::<FMA, TILE, L>(w, strides, kc, x, lane, c, add),
            }
            j += match n - j {
                8 => 4,
                left => left.min(TILE),
            };
        }
    }
}

#[inline(always)]
fn tile<const FMA: bool, const N: usize, const L: usize>(
    w: &[f32],
    (sj, sp): (usize, usize),
    kc: usize,
    x: &[f32],
    lane: usize,
    c: &mut [f32],
    add: bool,
) {
    let mut acc = [[0f32; L]; N];
    if add {
        for (j, acc) in acc.iter_mut().enumerate() {
            acc.copy_from_slice(&c[j * PANEL_TOKENS + lane..][..L]);
        }
    }
    assert!(lane + L <= PANEL_TOKENS && x.len() >= kc * PANEL_TOKENS && w.len() > (N - 1) * sj + (kc - 1) * sp);
    for p in 0..kc {
        // SAFETY: L floats from lane `lane` of row p, and the last weight, are inside the lengths checked above.
        let x: [f32; L] = unsafe { x.as_ptr().add(p * PANEL_TOKENS + lane).cast::<[f32; L]>().read_unaligned() };
        for (j, acc) in acc.iter_mut().enumerate() {
            // SAFETY: as above. Bounds checks would cost a fifth of the time.
            let w = unsafe { *w.get_unchecked(j * sj + p * sp) };
            for l in 0..L {
                acc[l] = madd::<FMA>(x[l], w, acc[l]);
            }
        }
    }
    for (j, acc) in acc.iter().enumerate() {
        c[j * PANEL_TOKENS + lane..][..L].copy_from_slice(acc);
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512 {
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

    /// c[j][64] (+)= Σ over pairs p of b(j, p) · x[p][64]; b(j, p) is the 32-bit word at b + j·sj + p·sp (bytes). INIT 0:
    /// from zero; 1: onto c; 2: onto c · alpha[64].
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linear::repack32;
    use crate::testing::{Noise, bits, distance, paths};
    use quantspec_core::config::Dtype;

    /// Random weights `[n][k]` of a type, rounded to it, as a matrix.
    fn matrix(noise: &mut Noise, n: usize, k: usize, dtype: Dtype) -> (Matrix, Vec<f32>) {
        let mut weights = noise.normals(n * k);
        let mut matrix = Matrix::zeros(n.div_ceil(PANEL), k, dtype).unwrap();
        let len = Matrix::panel_len(k);
        for (i, rows) in weights.chunks_mut(PANEL * k).enumerate() {
            match &mut matrix.store {
                Store::Bf16(w) => {
                    rows.iter_mut().for_each(|x| *x = crate::lanes::bf16_value(bf16_bits(*x)));
                    let raw: Vec<u8> = rows.iter().flat_map(|x| bf16_bits(*x).to_le_bytes()).collect();
                    assert!(crate::linear::repack16(&raw, k, true, 0x7f80, &mut w[i * len..(i + 1) * len]));
                }
                Store::F32(w) => repack32(rows, k, &mut w[i * len..(i + 1) * len]),
                Store::F16(_) | Store::Planes(_) => unreachable!("the test uses BF16 and F32"),
            }
        }
        (matrix, weights)
    }

    /// Tokens `[panels · 64][k]` as the input of `matrix`.
    fn input(simd: Simd, matrix: &Matrix, tokens: &[f32], k: usize) -> Vec<f32> {
        // Padding between panels and after k is NaN, so that reading it fails the test.
        let mut x = vec![f32::NAN; tokens.len() / k / PANEL_TOKENS * panel_len(k)];
        for (x, tokens) in x.chunks_exact_mut(panel_len(k)).zip(tokens.chunks_exact(k * PANEL_TOKENS)) {
            for lane in (0..PANEL_TOKENS).step_by(LANES) {
                let values: Vec<[f32; LANES]> =
                    (0..k).map(|c| std::array::from_fn(|l| tokens[(lane + l) * k + c])).collect();
                put_features(simd, takes_pairs(simd, matrix), x, 0, lane, &values);
            }
        }
        x
    }

    #[test]
    fn gemms_match_f64_and_panels_do_not_affect_each_other() {
        let mut noise = Noise::new(41);
        let (one, three) = (Pool::new(1).unwrap(), Pool::new(3).unwrap());
        // Less than a tile, parts of tiles, and more than one block of k.
        for (n, k) in [(96, 7), (33, 172), (64, 40), (32, 2100)] {
            for dtype in [Dtype::Bf16, Dtype::F32] {
                let (matrix, weights) = matrix(&mut noise, n, k, dtype);
                let tokens = noise.normals(3 * PANEL_TOKENS * k);
                for simd in paths() {
                    let pairs = takes_pairs(simd, &matrix);
                    let round = |x: f32| if pairs { crate::lanes::bf16_value(bf16_bits(x)) } else { x };
                    let multiply = |pool: &Pool, tokens: &[f32], panels: usize| {
                        let mut x = input(simd, &matrix, tokens, k);
                        let mut y = vec![f32::NAN; panels * matrix.panels * PANEL * PANEL_TOKENS];
                        gemm(pool, simd, &mut || Ok(()), &matrix, &mut x, &mut y, panels).unwrap();
                        y
                    };
                    let y = multiply(&three, &tokens, 3);
                    let width = matrix.panels * PANEL;
                    let (mut found, mut exact) = (Vec::new(), Vec::new());
                    for token in 0..3 * PANEL_TOKENS {
                        for output in 0..n {
                            let (x, w) = (&tokens[token * k..][..k], &weights[output * k..][..k]);
                            exact.push(x.iter().zip(w).map(|(x, w)| f64::from(round(*x)) * f64::from(*w)).sum());
                            let at = (token / PANEL_TOKENS * width + output) * PANEL_TOKENS + token % PANEL_TOKENS;
                            found.push(y[at]);
                        }
                    }
                    let error = distance(&found, &exact);
                    assert!(error < 2e-6, "{n}x{k} {dtype:?} {simd:?}: off by {error}");
                    for panel in 0..3 {
                        let alone = &tokens[panel * PANEL_TOKENS * k..][..PANEL_TOKENS * k];
                        let expected = &y[panel * width * PANEL_TOKENS..][..width * PANEL_TOKENS];
                        assert!(bits(&multiply(&one, alone, 1)) == bits(expected), "{n}x{k} {dtype:?} {simd:?}");
                    }
                }
            }
        }
    }
}
