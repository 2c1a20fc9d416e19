//! Matrices of the weight hierarchy on the device (`quantspec_core::weights`, docs/design/weights.md): their quantiser, their
//! GEMMs with the few rows of a step (kernels/hierarchy.cu), and the dequantised 16-bit matrix for a prompt's GEMMs.

use crate::args;
use crate::device::{Buffer, Device, Kernel, Launch};
use crate::linear::{
    ATOM, Family, GemmPipeline, Matrix, TILE, WIDE_FROM, Wide, copied_importance, gemms, name, of_dtype, of_each_dtype,
};
use crate::shapes::{self, LOWER_BLOCK, UPPER_BLOCK};
use quantspec_core::config::Dtype;
use quantspec_core::weights::GROUP;
use quantspec_core::{Error, Result};
use std::sync::Arc;

// A warp processes a group of these weights where it processes an atom of 16-bit weights.
const _: () = assert!(GROUP == ATOM);

/// A weight matrix `[n][k]` in nibbles.
#[derive(Debug)]
pub struct Hierarchy {
    /// The upper plane, then the lower one of the rows from `both_from` on.
    planes: Buffer,
    both_from: usize,
    n: usize,
    k: usize,
    /// As in [`crate::linear::Quantised`].
    paired: usize,
    /// Number format of the dequantised matrix.
    dtype: Dtype,
}

/// Planes that a GEMM reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reads {
    /// All planes, as the target reads them.
    All,
    /// The upper plane alone, as a draft reads it.
    Upper,
}

/// Blocks per tile of outputs, rounded up to even, so that draft kernels read 128 inputs at a time.
const fn stride(k: usize) -> usize {
    2 * k.div_ceil(2 * GROUP)
}

impl Hierarchy {
    /// Bytes of the upper and of the lower plane of an `n` × `k` matrix.
    pub const fn bytes(n: usize, k: usize) -> [usize; 2] {
        let blocks = n.div_ceil(TILE) * stride(k);
        [blocks * UPPER_BLOCK, blocks * LOWER_BLOCK]
    }

    /// Bytes held on the device.
    pub fn held_bytes(&self) -> usize {
        self.planes.bytes()
    }

    /// Both planes.
    pub fn planes(&self) -> &Buffer {
        &self.planes
    }

    /// Outputs and inputs.
    pub const fn shape(&self) -> (usize, usize) {
        (self.n, self.k)
    }

    /// Blocks of a tile of outputs in memory.
    pub fn stride(&self) -> usize {
        stride(self.k)
    }

    /// Bytes of the upper plane, which is first.
    pub fn upper_bytes(&self) -> usize {
        Hierarchy::bytes(self.n, self.k)[0]
    }

    /// Address of the upper plane.
    pub fn upper(&self) -> u64 {
        self.planes.at(0)
    }

    /// Address of the lower plane, of the rows that have one; 0 if there are none.
    pub fn lower(&self) -> u64 {
        if self.both_from < self.n { self.planes.at(self.upper_bytes()) } else { 0 }
    }

    /// The rows without a lower plane, then those with one: first row, rows, address of the lower plane or 0.
    fn parts(&self) -> impl Iterator<Item = (usize, usize, u64)> {
        let parts = [(0, self.both_from, 0), (self.both_from, self.n - self.both_from, self.lower())];
        parts.into_iter().filter(|&(_, rows, _)| rows > 0)
    }

    /// Address of the upper plane of the rows from `row` on, which begins a tile.
    fn upper_at(&self, row: usize) -> u64 {
        self.planes.at(Hierarchy::bytes(row, self.k)[0])
    }
}

/// Pipeline of a GEMM with this many row tiles on Hopper; None if it has none.
fn pipeline(planes: usize, tiles: usize) -> Option<GemmPipeline> {
    let of = shapes::PLANE_PIPELINE.iter().find(|of| (of.planes, of.nt) == (planes, tiles))?;
    Some(GemmPipeline::new(of.shared, of.hand_over, of.cluster))
}

/// Launches quantisers, GEMMs and dequantisation of matrices in nibbles.
#[derive(Debug)]
pub struct Hierarchies {
    device: Arc<Device>,
    dtype: Dtype,
    /// GEMMs of both planes and of the upper one, and those of 17 and more rows on Hopper.
    both: (Family, Vec<Wide>),
    upper: (Family, Vec<Wide>),
    /// From bf16, f16, f32.
    quantise: [Kernel; 3],
    atoms: Kernel,
}

impl Hierarchies {
    /// Finds the kernels for a model in `dtype`.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Model`] for f32. Those of [`Device::kernel`].
    pub fn new(device: &Arc<Device>, dtype: Dtype) -> Result<Hierarchies> {
        check(dtype)?;
        let of_planes = |view: &str, planes: usize| {
            let shapes = shapes::WIDE_PLANES.iter().filter(|of| of.planes == planes).map(|of| (of.n, of.shared));
            gemms(device, &format!("linear_{view}"), |tiles| pipeline(planes, tiles), shapes)
        };
        Ok(Hierarchies {
            both: of_planes("both", 2)?,
            upper: of_planes("upper", 1)?,
            quantise: of_each_dtype(device, "planes")?,
            atoms: device.kernel(&format!("atoms_{}", name(dtype)), 0)?,
            device: device.clone(),
            dtype,
        })
    }

    /// Queues quantising a matrix: rows from `both_from` on to both planes, those before it to the upper one alone. The search
    /// weighs squared errors by `importance`, f32 `[k]` or empty ([`quantspec_core::weights::quantize_row`]). `paired` as in
    /// [`crate::linear::Quantised`]. `flag` begins with the device's error flag, a u32.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] if the matrix or the flag is shorter than its shape, if `importance` has another
    /// length, if rows are not whole heads, or if planes change inside a tile or head. Those of [`Device::allocate`] and of
    /// the launch.
    pub fn quantise(
        &self,
        weights: &Matrix,
        importance: &[f32],
        both_from: usize,
        paired: usize,
        flag: &Buffer,
    ) -> Result<Hierarchy> {
        let (n, k) = (weights.n, weights.k);
        let full = Matrix::bytes(weights.dtype, n, k);
        if weights.buffer.bytes() < full || flag.bytes() < size_of::<u32>() {
            let (held, flag) = (weights.buffer.bytes(), flag.bytes());
            return Err(Error::internal(format!("{held} bytes of weights instead of {full}, {flag} of a flag")));
        }
        let importance = copied_importance(&self.device, importance, k)?;
        let importance = importance.as_ref().map_or(0, |buffer| buffer.at(0));
        if paired > 0 && !(paired.is_multiple_of(TILE) && n.is_multiple_of(paired)) {
            return Err(Error::internal(format!("{n} rows in heads of {paired} channels")));
        }
        let whole = |row: usize| row.is_multiple_of(TILE.max(paired)) || row == n;
        if both_from > n || !whole(both_from) {
            return Err(Error::internal(format!("a lower plane from row {both_from} of {n} on")));
        }
        let [upper, _] = Hierarchy::bytes(n, k);
        let [_, lower] = Hierarchy::bytes(n - both_from, k);
        let planes = self.device.allocate(upper + lower)?;
        let to = Hierarchy { planes, both_from, n, k, paired, dtype: self.dtype };
        let kernel = of_dtype(self.quantise, weights.dtype);
        for (first, rows, lower) in to.parts() {
            let grid = [stride(k) as u32, rows.div_ceil(TILE) as u32, 1];
            let from = weights.buffer.at(Matrix::bytes(weights.dtype, first, k));
            let arguments = args![from, importance, to.upper_at(first), lower, rows, k, paired, flag];
            // SAFETY: the argument list is the kernel's, and the buffers have room for what it reads and writes: see above.
            unsafe { self.device.launch(kernel, Launch { grid, block: 128, shared: 0, overlap: false }, &arguments)? };
        }
        Ok(to)
    }

    /// y f32 `[rows][n]` = x · weightsᵀ; x in limbs and xs float2 {scale, sum}, in [`crate::linear::Linear::panels`].
    /// Row-major they are `[rows][groups][128]` and `[rows][groups]`, with groups of 64 inputs, k padded to 128; in panels rows
    /// are padded to a multiple of eight. Paired rows of `weights` are also paired in y. `next`: address and bytes, a multiple
    /// of 16, that the following GEMM reads first; on Hopper the GEMMs of up to 16 rows prefetch them into L2.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] for weights of another input type. Device errors of the launch, named by the
    /// kernel.
    ///
    /// # Safety
    /// All addresses must stay valid for their shapes until the stream has completed this call.
    pub unsafe fn run(
        &self,
        weights: &Hierarchy,
        reads: Reads,
        [x, xs]: [u64; 2],
        y: u64,
        rows: usize,
        next: (u64, usize),
    ) -> Result<()> {
        self.check(weights)?;
        let groups = stride(weights.k);
        let launch = |first: usize, outputs: usize, lower: u64| {
            let tiles = outputs.div_ceil(TILE);
            let (family, wide) = if lower == 0 { &self.upper } else { &self.both };
            let y = y + (first * size_of::<f32>()) as u64;
            // The last launch of a matrix in two parts prefetches.
            let next = if first + outputs == weights.n { next } else { (0, 0) };
            let (upper, n) = (weights.upper_at(first), weights.n);
            if !wide.is_empty() && rows >= WIDE_FROM {
                let (kernel, launch) = Wide::launch(wide, &self.device, rows, tiles)?;
                let arguments = args![upper, lower, x, xs, y, groups, tiles, n, rows];
                // SAFETY: as below.
                return unsafe { self.device.launch(kernel, launch, &arguments) };
            }
            let (kernel, launch) = family.launch(&self.device, rows, tiles)?;
            let arguments = args![upper, lower, x, xs, y, groups, tiles, n, rows, next.0, next.1];
            // SAFETY: the argument list is the kernel's; the caller guarantees the addresses.
            unsafe { self.device.launch(kernel, launch, &arguments) }
        };
        match reads {
            Reads::Upper => launch(0, weights.n, 0),
            Reads::All => weights.parts().try_for_each(|(first, outputs, lower)| launch(first, outputs, lower)),
        }
    }

    /// Queues writing the dequantised matrix, in 16 bits and atoms, rows in the checkpoint's order, to byte `at` of `to`.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] if it does not fit there, and as [`Hierarchies::run`].
    pub fn expand(&self, weights: &Hierarchy, to: &Buffer, at: usize) -> Result<()> {
        self.check(weights)?;
        let (n, k) = (weights.n, weights.k);
        let bytes = Matrix::bytes(self.dtype, n, k);
        if at + bytes > to.bytes() {
            return Err(Error::internal(format!("{bytes} bytes of a matrix at {at} of {}", to.bytes())));
        }
        for (first, rows, lower) in weights.parts() {
            let grid = [k.div_ceil(ATOM) as u32, rows.div_ceil(TILE) as u32, 1];
            let to = to.at(at + Matrix::bytes(self.dtype, first, k));
            let arguments = args![weights.upper_at(first), lower, to, rows, stride(k), weights.paired];
            let launch = Launch { grid, block: 128, shared: 0, overlap: false };
            // SAFETY: the argument list is the kernel's, and the buffer has room for the matrix.
            unsafe { self.device.launch(self.atoms, launch, &arguments)? };
        }
        Ok(())
    }

    fn check(&self, weights: &Hierarchy) -> Result<()> {
        if weights.dtype == self.dtype {
            Ok(())
        } else {
            Err(Error::internal(format!(
                "weights for inputs in {}, kernels for {}",
                name(weights.dtype),
                name(self.dtype)
            )))
        }
    }
}

/// Refuses models in f32, for whose prompts there are no kernels.
pub(crate) fn check(dtype: Dtype) -> Result<()> {
    match dtype {
        Dtype::Bf16 | Dtype::F16 => Ok(()),
        Dtype::F32 => Err(Error::model(
            "a GPU multiplies int8 and int4 weights by 16-bit activations, and this checkpoint is stored in F32",
            "store the checkpoint in BF16 or F16, use --weights checkpoint, or --device cpu",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An 8-bit matrix has 8.5 bits per weight, 4.5 of them in the upper plane.
    #[test]
    fn planes_take_eight_and_a_half_bits() {
        let [upper, lower] = Hierarchy::bytes(4096, 14_336);
        assert_eq!([upper * 16, lower * 16], [4096 * 14_336 * 9, 4096 * 14_336 * 8]);
        // Blocks per tile are rounded up to whole 128 inputs.
        assert_eq!(Hierarchy::bytes(17, 64), [2 * 2 * 576, 2 * 2 * 512]);
    }
}
