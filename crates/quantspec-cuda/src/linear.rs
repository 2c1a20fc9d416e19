//! Weights on the device and their products with the few rows of a step (kernels/linear.cu).

use crate::args;
use crate::device::{Buffer, Device, Kernel, Launch};
use quantspec_core::config::Dtype;
use quantspec_core::{Error, Result};
use std::sync::Arc;

/// Rows of a tile of atoms.
const TILE: usize = 16;
/// Inputs of an atom.
const ATOM: usize = 64;
/// Inputs that share the parameters of a draft weight (and of an int8 activation).
pub(crate) const GROUP: usize = 128;
/// Blocks of draft weights a warp has under way (`QUANT_STAGES`), and warps of a block.
const STAGES: usize = 6;
const WARPS: usize = 8;

/// Static shared memory of a kernel and what the driver keeps of every block's, at the most.
const RESERVED: usize = 18 << 10;

/// Name of a type in kernel names.
pub(crate) const fn name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::Bf16 => "bf16",
        Dtype::F16 => "f16",
        Dtype::F32 => "f32",
    }
}

/// A weight matrix `[n][k]` as the checkpoint's precision keeps it: 16-bit types in atoms, f32 row-major.
#[derive(Debug)]
pub struct Matrix {
    /// The elements.
    pub buffer: Buffer,
    /// Their type.
    pub dtype: Dtype,
    /// Outputs.
    pub n: usize,
    /// Inputs.
    pub k: usize,
}

impl Matrix {
    /// Bytes of a matrix of that shape.
    pub const fn bytes(dtype: Dtype, n: usize, k: usize) -> usize {
        match dtype {
            Dtype::F32 => 4 * n * k,
            Dtype::Bf16 | Dtype::F16 => 2 * n.next_multiple_of(TILE) * k.next_multiple_of(ATOM),
        }
    }
}

/// Draft weights `[n][k]`: blocks of 16 outputs and 128 inputs with their parameters.
#[derive(Debug)]
pub struct Quantised {
    /// The blocks.
    pub buffer: Buffer,
    /// Bits of a code: 4, or 8 for the head.
    pub bits: usize,
    /// Outputs.
    pub n: usize,
    /// Inputs.
    pub k: usize,
}

/// Bytes of a block of draft weights.
const fn block_bytes(bits: usize) -> usize {
    TILE * GROUP * bits / 8 + TILE * 4
}

impl Quantised {
    /// Bytes of draft weights of that shape.
    pub const fn bytes(bits: usize, n: usize, k: usize) -> usize {
        n.div_ceil(TILE) * k.div_ceil(GROUP) * block_bytes(bits)
    }
}

/// Kernels of one weight type by row tiles (of 8 rows).
#[derive(Debug)]
struct Family {
    kernels: Vec<(usize, Kernel)>,
    shared: usize,
}

impl Family {
    fn new(device: &Device, stem: &str, tiles: &[usize], shared: usize) -> Result<Family> {
        let kernels = tiles.iter().map(|&nt| Ok((nt, device.kernel(&format!("{stem}_{nt}"), shared)?)));
        Ok(Family { kernels: kernels.collect::<Result<_>>()?, shared })
    }

    /// The smallest kernel that takes all rows at once, or the largest.
    fn choose(&self, rows: usize) -> Result<(usize, Kernel)> {
        let fits = self.kernels.iter().find(|(nt, _)| nt * 8 >= rows).or(self.kernels.last());
        fits.copied().ok_or_else(|| Error::internal("a product without kernels"))
    }
}

/// Launches products.
#[derive(Debug)]
pub struct Linear {
    device: Arc<Device>,
    bf16: Family,
    f16: Family,
    w4: Family,
    w8: Family,
    single: Kernel,
    quantise: [[Kernel; 3]; 2],
}

impl Linear {
    /// Finds the kernels.
    pub fn new(device: &Arc<Device>) -> Result<Linear> {
        let quantise = |bits: usize| -> Result<[Kernel; 3]> {
            let kernel = |dtype| device.kernel(&format!("weights_w{bits}_{}", name(dtype)), 0);
            Ok([kernel(Dtype::Bf16)?, kernel(Dtype::F16)?, kernel(Dtype::F32)?])
        };
        Ok(Linear {
            bf16: Family::new(device, "linear_bf16", &[1, 2, 4, 8], 0)?,
            f16: Family::new(device, "linear_f16", &[1, 2, 4, 8], 0)?,
            // The kernel of one row tile keeps its activations in shared memory too, as far as that goes.
            w4: Family::new(device, "linear_w4", &[1, 2, 4], device.shared_bytes - RESERVED)?,
            w8: Family::new(device, "linear_w8", &[1, 2, 4], device.shared_bytes - RESERVED)?,
            single: device.kernel("linear_f32", 0)?,
            quantise: [quantise(4)?, quantise(8)?],
            device: device.clone(),
        })
    }

    /// y f32 `[rows][n]` = x · weightsᵀ; x `[rows][k padded to 64]` in the weights' type, padding zero.
    ///
    /// # Safety
    /// Both addresses must be good for their shapes until the stream has passed this call.
    pub unsafe fn run(&self, weights: &Matrix, x: u64, y: u64, rows: usize) -> Result<()> {
        let pitch = weights.k.next_multiple_of(ATOM);
        let family = match weights.dtype {
            Dtype::Bf16 => &self.bf16,
            Dtype::F16 => &self.f16,
            Dtype::F32 => {
                let grid = [weights.n.div_ceil(WARPS) as u32, rows.div_ceil(8) as u32, 1];
                let arguments = args![&weights.buffer, x, y, weights.k, weights.n, rows, pitch];
                // SAFETY: the argument list is the kernel's; the caller vouches for the addresses.
                return unsafe {
                    self.device.launch(self.single, Launch { grid, block: 256, shared: 0, overlap: true }, &arguments)
                };
            }
        };
        let (nt, kernel) = family.choose(rows)?;
        let tiles = weights.n.div_ceil(TILE);
        // Two blocks fit on a multiprocessor, one of the largest.
        let resident = self.device.multiprocessors * if nt == 8 { 1 } else { 2 };
        let grid = [tiles.min(resident) as u32, rows.div_ceil(8 * nt) as u32, 1];
        let arguments = args![&weights.buffer, x, y, pitch / ATOM, tiles, weights.n, rows, pitch];
        // SAFETY: as above.
        unsafe { self.device.launch(kernel, Launch { grid, block: 256, shared: 0, overlap: true }, &arguments) }
    }

    /// y f32 `[rows][n]` = x · weightsᵀ with draft weights; x int8 `[rows][k padded to 128]` and xs float2 `[rows][groups]` {scale, sum}.
    ///
    /// # Safety
    /// As [`Linear::run`].
    pub unsafe fn run_quantised(&self, weights: &Quantised, x: u64, xs: u64, y: u64, rows: usize) -> Result<()> {
        let family = if weights.bits == 4 { &self.w4 } else { &self.w8 };
        let (groups, tiles) = (weights.k.div_ceil(GROUP), weights.n.div_ceil(TILE));
        let ring = WARPS * STAGES * block_bytes(weights.bits);
        let staged = ring + rows * (groups * (GROUP + 8) + 64);
        // Too many inputs for shared memory: the next larger kernel reads them from the cache.
        let (nt, kernel) = family.choose(if rows <= 8 && staged > family.shared { 9 } else { rows })?;
        let shared = if nt == 1 { staged } else { ring };
        let resident =
            (self.device.shared_per_multiprocessor / (shared + RESERVED)).clamp(1, if nt == 1 { 3 } else { 2 });
        let grid = [tiles.min(self.device.multiprocessors * resident) as u32, rows.div_ceil(8 * nt) as u32, 1];
        let arguments = args![&weights.buffer, x, xs, y, groups, tiles, weights.n, rows];
        let launch = Launch { grid, block: 256, shared: shared as u32, overlap: true };
        // SAFETY: the argument list is the kernel's; the caller vouches for the addresses.
        unsafe { self.device.launch(kernel, launch, &arguments) }
    }

    /// Draft weights of a matrix. `flag` is the address of the device's error flag.
    pub fn quantise(&self, weights: &Matrix, bits: usize, flag: u64) -> Result<Quantised> {
        let of_bits = self.quantise.get(if bits == 4 { 0 } else { 1 });
        let index = match weights.dtype {
            Dtype::Bf16 => 0,
            Dtype::F16 => 1,
            Dtype::F32 => 2,
        };
        let kernel = of_bits.and_then(|kernels| kernels.get(index)).copied();
        let kernel = kernel.ok_or_else(|| Error::internal("no such quantiser"))?;
        let buffer = self.device.allocate(Quantised::bytes(bits, weights.n, weights.k))?;
        let grid = [weights.k.div_ceil(GROUP) as u32, weights.n.div_ceil(TILE) as u32, 1];
        let arguments = args![&weights.buffer, &buffer, weights.n, weights.k, flag];
        // SAFETY: the argument list is the kernel's, and both buffers have the sizes of the shape.
        unsafe { self.device.launch(kernel, Launch { grid, block: 128, shared: 0, overlap: false }, &arguments)? };
        Ok(Quantised { buffer, bits, n: weights.n, k: weights.k })
    }
}
