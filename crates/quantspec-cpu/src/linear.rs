//! Linear layers of a step, a few rows: `y[m][n] = x[m][k] · W[n][k]ᵀ`. Draft weights and planes have files of their own
//! (`w4.rs`, `hierarchy.rs`).
//!
//! Whole weights keep the checkpoint's precision and are repacked at load into panels of 32 outputs. A pass then reads them in
//! address order; lanes are outputs, activations are broadcast, and no sum crosses lanes.
//! * BF16: `[n/32][k/2][32][2]`. With AMX, sixteen pairs of sixteen outputs are a tile; with AVX-512, one `vdpbf16ps` takes a
//!   pair. Both round activations to BF16. Other paths split a word into two f32 by shift and mask and keep f32 activations.
//! * F16 and F32: `[n/32][k][32]`, activations f32.
//!
//! n is padded to panels and k to pairs, with zeros. **Row invariance:** each (row, output) has its own accumulators and sums
//! over k upwards. The number of rows in a pass changes which registers are used, never an operand or the order.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod matrix;
mod portable;

pub(crate) use matrix::{Matrix, Store, repack16, repack32};

use crate::dispatch::{Simd, portable};
use crate::hierarchy::{self, Planes, Read};
use crate::lanes::bf16_bits;
use crate::panel::{PANEL, groups};
use crate::pool::{Pool, WorkQueues, share};
use crate::w4;
use quantspec_core::{Error, Result};
use std::ops::Range;

/// Rows that share one load of a panel: twelve pairs of accumulators take 24 of AVX-512's 32 registers.
const GROUP: usize = 6;

/// How a vector kernel reads numbers of a panel: pairs of BF16, or rows of F16 or F32.
#[cfg(target_arch = "x86_64")]
const BF16: u8 = 0;
#[cfg(target_arch = "x86_64")]
const F16: u8 = 1;
#[cfg(target_arch = "x86_64")]
const F32: u8 = 2;

/// k rounded up to pairs.
pub(crate) const fn pairs_of(k: usize) -> usize {
    k.div_ceil(2)
}

/// Row stride of activations for a linear layer of `k` inputs: whole cache lines, zero after k.
pub(crate) const fn row_stride(k: usize) -> usize {
    k.div_ceil(32) * 32
}

/// Activations of a pass: m rows `stride` apart, zero after k.
#[derive(Clone, Copy)]
pub(crate) enum Input<'a> {
    /// f32.
    F32(&'a [f32], usize),
    /// BF16, for BF16 weights with AMX or AVX-512.
    Bf16(&'a [u16], usize),
    /// int8 with a scale per 128, for draft weights.
    Int8(&'a w4::Acts),
    /// Limbs of int8 with a scale per 32, for planes.
    Limbs(&'a hierarchy::Acts),
}

/// Weights of a pass.
#[derive(Clone, Copy)]
pub(crate) enum Weight<'a> {
    /// The checkpoint's.
    Full(&'a Matrix),
    /// Draft tiles.
    Tiles(&'a w4::Tiles),
    /// Planes, and what of them.
    Planes(&'a Planes, Read),
}

impl<'a> Weight<'a> {
    fn panels(&self) -> usize {
        match self {
            Weight::Full(matrix) => matrix.panels,
            Weight::Tiles(tiles) => tiles.panels,
            Weight::Planes(planes, _) => planes.panels,
        }
    }

    /// The weights that `thread` reads in [`run`], in units of `per` panels and without work stealing; of planes only the
    /// upper one.
    pub(crate) fn bytes_of_thread(&self, per: usize, thread: usize, threads: usize) -> &'a [u8] {
        let (panels, bytes) = match self {
            Weight::Full(Matrix { panels, store, .. }) => {
                let bytes = match store {
                    Store::Bf16(w) | Store::F16(w) => w.as_bytes(),
                    Store::F32(w) => w.as_bytes(),
                    Store::Planes(planes) => planes.upper.as_bytes(),
                };
                (*panels, bytes)
            }
            Weight::Tiles(tiles) => (tiles.panels, tiles.data.as_bytes()),
            Weight::Planes(planes, _) => (planes.panels, planes.upper.as_bytes()),
        };
        let (unit, mine) = (bytes.len() / (panels / per), share(panels / per, thread, threads));
        &bytes[mine.start * unit..mine.end * unit]
    }
}

/// Rounds rows to BF16.
pub(crate) fn to_bf16(simd: Simd, from: &[f32], to: &mut [u16]) {
    #[inline(always)]
    fn body<const FMA: bool>(from: &[f32], to: &mut [u16]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = bf16_bits(*from);
        }
    }
    portable!(simd, body(from: &[f32], to: &mut [u16]));
}

/// Computes outputs in units of `per` adjacent panels. Calls `each(unit, tile)`, tile `[per][m][32]`, on the thread that
/// computed the unit.
pub(crate) fn run(
    pool: &Pool,
    simd: Simd,
    weight: Weight,
    input: Input,
    m: usize,
    per: usize,
    each: &(dyn Fn(usize, &mut [f32]) + Sync),
) -> Result<()> {
    let (units, threads) = (weight.panels() / per, pool.threads());
    let fits = match (weight, input) {
        (Weight::Full(Matrix { store: Store::Planes(_), .. }), _) => false,
        (Weight::Full(w), Input::F32(x, stride)) => stride >= 2 * pairs_of(w.k) && x.len() >= m * stride,
        (Weight::Full(w), Input::Bf16(x, stride)) => {
            matches!(w.store, Store::Bf16(_)) && simd.has_avx512() && stride >= row_stride(w.k) && x.len() >= m * stride
        }
        (Weight::Tiles(w), Input::Int8(x)) => x.fits(w, m),
        (Weight::Planes(w, read), Input::F32(x, stride)) => {
            read.takes_f32(simd) && stride >= row_stride(w.k) && x.len() >= m * stride
        }
        (Weight::Planes(w, read), Input::Limbs(x)) => !read.takes_f32(simd) && x.fits(w, m),
        _ => false,
    };
    if !fits {
        return Err(Error::internal(format!("activations of another shape than {m} rows of a linear layer")));
    }
    let units = WorkQueues::new(units, threads);
    pool.run(&|thread| {
        let mut tile = vec![0f32; per * m * PANEL];
        let mut scratch = Scratch::new(simd, input, m);
        while let Some(unit) = units.take(thread) {
            for (i, out) in tile.chunks_exact_mut(m * PANEL).enumerate() {
                panel(simd, weight, unit * per + i, input, m, &mut scratch, out);
            }
            each(unit, &mut tile);
        }
    })
}

/// Scratch of one thread.
enum Scratch {
    None,
    /// Accumulators of the AVX-512 kernel.
    #[cfg(target_arch = "x86_64")]
    Chains(Vec<f32>),
    /// Tile registers, in use until this is dropped.
    #[cfg(target_arch = "x86_64")]
    Tiles(crate::amx::Tiles),
}

impl Scratch {
    #[cfg_attr(not(target_arch = "x86_64"), expect(unused_variables, reason = "the portable kernels need none"))]
    fn new(simd: Simd, input: Input, m: usize) -> Scratch {
        match (simd, input) {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the machine has tiles, as this path was chosen, and this thread holds no others.
            (Simd::Amx, Input::Bf16(..)) => Scratch::Tiles(unsafe { crate::amx::tiles_for_rows(m) }),
            #[cfg(target_arch = "x86_64")]
            (_, Input::Bf16(..)) => Scratch::Chains(vec![0f32; m * avx512::CHAINS]),
            _ => Scratch::None,
        }
    }
}

/// One panel: `out[m][32]`.
fn panel(simd: Simd, weight: Weight, index: usize, input: Input, m: usize, scratch: &mut Scratch, out: &mut [f32]) {
    match (weight, input) {
        (Weight::Tiles(tiles), Input::Int8(acts)) => tiles.panel(simd, index, acts, m, out),
        (Weight::Planes(planes, read), Input::Limbs(acts)) => planes.panel(simd, read, index, acts, m, out),
        (Weight::Planes(planes, _), Input::F32(x, stride)) => planes.panel_f32(simd, index, x, stride, m, out),
        (Weight::Full(matrix), input) => {
            let len = Matrix::panel_len(matrix.k);
            let at: Range<usize> = index * len..(index + 1) * len;
            #[cfg(target_arch = "x86_64")]
            if let (Store::Bf16(w), Input::Bf16(x, stride)) = (&matrix.store, input) {
                match scratch {
                    // SAFETY: made for m rows.
                    Scratch::Tiles(tiles) => unsafe { crate::amx::rows(tiles, &w[at], x, stride, m, out) },
                    Scratch::Chains(chains) => avx512::rows(&w[at], x, stride, m, chains, out),
                    Scratch::None => unreachable!("`Scratch::new` handles BF16 activations"),
                }
                return;
            }
            #[cfg(target_arch = "x86_64")]
            if let Input::F32(x, stride) = input {
                match (simd, &matrix.store) {
                    (Simd::Avx2, Store::Bf16(w)) => return avx2::rows::<BF16, _>(&w[at], x, stride, m, out),
                    (Simd::Avx2, Store::F16(w)) => return avx2::rows::<F16, _>(&w[at], x, stride, m, out),
                    (Simd::Avx2, Store::F32(w)) => return avx2::rows::<F32, _>(&w[at], x, stride, m, out),
                    (Simd::Avx512 | Simd::Amx, Store::F16(w)) => {
                        return avx512::single_rows::<F16, _>(&w[at], x, stride, m, out);
                    }
                    (Simd::Avx512 | Simd::Amx, Store::F32(w)) => {
                        return avx512::single_rows::<F32, _>(&w[at], x, stride, m, out);
                    }
                    _ => (),
                }
            }
            let _ = scratch;
            for (first, rows) in groups(m, GROUP) {
                let out = &mut out[first * PANEL..(first + rows) * PANEL];
                let Input::F32(x, stride) = input else { unreachable!("`run` refuses other pairs") };
                let x = &x[first * stride..];
                match &matrix.store {
                    Store::Bf16(w) => portable::bf16(simd, &w[at.clone()], x, stride, rows, out),
                    Store::F16(w) => portable::f16(simd, &w[at.clone()], x, stride, rows, out),
                    Store::F32(w) => portable::f32(simd, &w[at.clone()], x, stride, rows, out),
                    Store::Planes(_) => unreachable!("a pass specifies the planes it reads"),
                }
            }
        }
        _ => unreachable!("`run` refuses other pairs"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Noise, bits, distance, padded, paths, random_matrix};
    use quantspec_core::config::Dtype;
    /// y [m][n] of rows x [m][k].
    fn apply(pool: &Pool, simd: Simd, matrix: &Matrix, x: &[f32], m: usize, n: usize) -> Vec<f32> {
        let (k, stride) = (matrix.k, row_stride(matrix.k));
        let rows = padded(&x[..m * k], k);
        let mut halves = vec![0u16; m * stride];
        to_bf16(simd, &rows, &mut halves);
        let pairs = matrix.takes_bf16(simd);
        let input = if pairs { Input::Bf16(&halves, stride) } else { Input::F32(&rows, stride) };
        let mut y = vec![f32::NAN; m * n];
        let out = crate::memory::DisjointSlice::new(&mut y);
        run(pool, simd, Weight::Full(matrix), input, m, 1, &|panel, tile| {
            let width = PANEL.min(n - panel * PANEL);
            for j in 0..m {
                // SAFETY: a panel is one unit of one thread.
                unsafe { out.slice(j * n + panel * PANEL, width) }.copy_from_slice(&tile[j * PANEL..][..width]);
            }
        })
        .unwrap();
        y
    }

    #[test]
    fn gemms_match_f64_and_rows_do_not_affect_each_other() {
        let mut noise = Noise::new(7);
        let pools = [Pool::new(1).unwrap(), Pool::new(3).unwrap()];
        for (n, k) in [(96, 256), (40, 172), (33, 7), (64, 1376)] {
            for dtype in [Dtype::Bf16, Dtype::F16, Dtype::F32] {
                let (matrix, w) = random_matrix(&mut noise, n, k, dtype);
                let x = noise.normals(17 * k);
                for simd in paths() {
                    let bf16 = matrix.takes_bf16(simd);
                    let round = |x: &f32| if bf16 { crate::lanes::bf16_value(bf16_bits(*x)) } else { *x };
                    let exact: Vec<f64> = (0..17 * n)
                        .map(|i| {
                            let (x, w) = (&x[i / n * k..][..k], &w[i % n * k..][..k]);
                            x.iter().zip(w).map(|(x, w)| f64::from(round(x)) * f64::from(*w)).sum()
                        })
                        .collect();
                    let alone: Vec<f32> =
                        (0..17).flat_map(|j| apply(&pools[0], simd, &matrix, &x[j * k..][..k], 1, n)).collect();
                    assert!(distance(&alone, &exact) < 1e-6, "{n}x{k} {dtype:?} {simd:?}");
                    for m in 1..=17 {
                        for pool in &pools {
                            let y = apply(pool, simd, &matrix, &x, m, n);
                            assert!(bits(&y) == bits(&alone[..m * n]), "{m} rows, {n}x{k} {dtype:?} {simd:?}");
                        }
                    }
                }
            }
        }
    }
    #[test]
    fn unsupported_activation_types_are_refused() {
        let mut noise = Noise::new(9);
        let (pool, (matrix, _)) = (Pool::new(1).unwrap(), random_matrix(&mut noise, 32, 64, Dtype::F32));
        let x = [0f32; 64];
        for input in [Input::F32(&x, 32), Input::F32(&x[..63], 64), Input::Bf16(&[0; 64], 64)] {
            let error = run(&pool, Simd::Scalar, Weight::Full(&matrix), input, 1, 1, &|_, _| ()).unwrap_err();
            assert_eq!(error.kind, quantspec_core::ErrorKind::Internal);
        }
    }
}
