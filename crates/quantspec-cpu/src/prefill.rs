//! GEMMs of prompt rows, with tokens as lanes.
//!
//! Activations are panels of 64 tokens, `[feature][64]`. The input of a GEMM is a [`Format`]: BF16 for weights in BF16 or
//! planes on paths with BF16 dot products, sums of two BF16 numbers for F16 weights with AMX, else f32. Weights are the decode kernels' repacked panels, read in place: a pair of k of one output is one
//! broadcast word. For AMX they are converted to tiles, once for all tokens of a block. Outputs are `[n][64]`, the next
//! operation's panel; norms, RoPE and SiLU work on it lane by lane.
//!
//! A token's result does not depend on its block of rows: panels start at multiples of 64 tokens, and every (token, output)
//! sums over k upwards in one accumulator.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
mod input;
#[cfg(target_arch = "x86_64")]
mod pairs;
mod portable;
#[cfg(target_arch = "x86_64")]
mod sums;

pub(crate) use input::{Format, panel_len, put_features, tile_padding};
pub(crate) use portable::tiles;

use crate::dispatch::Simd;
use crate::elementwise::PANEL_TOKENS;
use crate::linear::Matrix;
#[cfg(target_arch = "x86_64")]
use crate::linear::Store;
use crate::memory::DisjointSlice;
use crate::panel::PANEL;
use crate::pool::{Pool, share};
#[cfg(target_arch = "x86_64")]
use pairs::{Pairs, gemm_pairs, gemm_tiles};
use portable::gemm_share;
use quantspec_core::{Error, Result};
#[cfg(target_arch = "x86_64")]
use sums::gemm_sums;

/// Outputs per register tile: with 64 tokens, 24 AVX-512 accumulators.
const TILE: usize = 6;

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

/// Inputs and outputs of a GEMM, which threads share.
struct Panels<'a> {
    /// Number of panels of 64 tokens.
    count: usize,
    /// Inputs of the matrix.
    k: usize,
    /// Outputs of the matrix, padded to panels of 32.
    n: usize,
    /// Panels as [`Format::of`] says, `panel_len(k)` apart.
    x: &'a [f32],
    /// `[panel][n][64]`.
    y: DisjointSlice<'a, f32>,
}

impl<'a> Panels<'a> {
    /// `len` floats from `start` on of a panel's inputs.
    fn inputs(&self, panel: usize, start: usize, len: usize) -> &'a [f32] {
        &self.x[panel * panel_len(self.k) + start..][..len]
    }

    /// A panel's outputs of one panel of weights, `[32][64]`.
    ///
    /// # Safety
    /// They are not in use at the same time, by this thread or another.
    unsafe fn outputs(&self, panel: usize, output: usize) -> &'a mut [f32] {
        // SAFETY: the caller's promise.
        unsafe { self.y.slice((panel * self.n + output * PANEL) * PANEL_TOKENS, PANEL * PANEL_TOKENS) }
    }
}

/// `y[panel][n][64] = W · x[panel]` for `panels` panels of tokens; `x` as [`Format::of`] says, `panel_len(k)` apart.
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
    if Format::of(simd, matrix) == Format::Pairs {
        x.chunks_exact_mut(panel_len(k)).take(panels).for_each(|x| x[tile_padding(k)].fill(0.0));
    }
    let operands = Panels { count: panels, k, n, x, y: DisjointSlice::new(y) };
    let flops = 2 * PANEL * k * panels * PANEL_TOKENS;
    let most = (slice_flops(simd) / flops.max(1)).max(1) * threads;
    let mut first = 0;
    while first < matrix.panels {
        let outputs = (matrix.panels - first).min(most);
        pool.run(&|thread| {
            let mine = share(outputs, thread, threads);
            let mine = first + mine.start..first + mine.end;
            #[cfg(target_arch = "x86_64")]
            if let (Format::Sums, Store::F16(w)) = (Format::of(simd, matrix), &matrix.store) {
                // SAFETY: as below; the machine has tiles.
                unsafe { gemm_sums(w, &operands, mine) };
                return;
            }
            #[cfg(target_arch = "x86_64")]
            if let (Simd::Amx | Simd::Avx512, Some(w)) = (simd, Pairs::of(simd, matrix)) {
                let gemm = if simd == Simd::Amx { gemm_tiles } else { gemm_pairs };
                // SAFETY: as below; the machine has the path's instructions.
                unsafe { gemm(w, &operands, mine) };
                return;
            }
            // SAFETY: output panels belong to one thread, and rows of `y` to one output.
            unsafe { gemm_share(simd, matrix, &operands, mine) };
        })?;
        first += outputs;
        poll()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elementwise::LANES;
    use crate::lanes::{bf16_bits, bf16_value};
    use crate::testing::{Noise, bits, distance, paths, random_matrix};
    use quantspec_core::config::Dtype;

    /// Tokens `[panels · 64][k]` as the input of `matrix`.
    fn input(simd: Simd, matrix: &Matrix, tokens: &[f32], k: usize) -> Vec<f32> {
        // Padding between panels and after k is NaN, so that reading it fails the test.
        let mut x = vec![f32::NAN; tokens.len() / k / PANEL_TOKENS * panel_len(k)];
        for (x, tokens) in x.chunks_exact_mut(panel_len(k)).zip(tokens.chunks_exact(k * PANEL_TOKENS)) {
            for lane in (0..PANEL_TOKENS).step_by(LANES) {
                let values: Vec<[f32; LANES]> =
                    (0..k).map(|c| std::array::from_fn(|l| tokens[(lane + l) * k + c])).collect();
                put_features(simd, Format::of(simd, matrix), x, 0, lane, &values);
            }
        }
        x
    }

    #[test]
    fn gemms_match_f64_and_panels_do_not_affect_each_other() {
        let mut noise = Noise::new(41);
        let (one, three) = (Pool::new(1).unwrap(), Pool::new(3).unwrap());
        // Less than a tile, parts of tiles, and more than one block of k.
        for (n, k) in [(96, 7), (33, 172), (64, 40), (32, 2100), (33, 96), (64, 2112)] {
            for dtype in [Dtype::Bf16, Dtype::F16, Dtype::F32] {
                let (matrix, weights) = random_matrix(&mut noise, n, k, dtype);
                let tokens = noise.normals(3 * PANEL_TOKENS * k);
                for simd in paths() {
                    let pairs = matrix.takes_bf16(simd);
                    let round = |x: f32| if pairs { bf16_value(bf16_bits(x)) } else { x };
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
                    // Sums have 16 bits.
                    let bound = if Format::of(simd, &matrix) == Format::Sums { 8e-6 } else { 2e-6 };
                    assert!(error < bound, "{n}x{k} {dtype:?} {simd:?}: off by {error}");
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
