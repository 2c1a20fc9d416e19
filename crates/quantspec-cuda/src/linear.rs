//! Weights on the device, and their GEMMs with the few rows of a step (kernels/linear.cu).

use crate::args;
use crate::device::{Buffer, Device, Kernel, LOADS_PERCENT, Launch};
use crate::shapes::{self, PANEL_ROWS, WIDE_THREADS};
use quantspec_core::config::Dtype;
use quantspec_core::{Error, Result};
use std::sync::Arc;

/// Rows of a tile of atoms.
pub(crate) const TILE: usize = 16;
/// Inputs of an atom.
pub(crate) const ATOM: usize = 64;
/// Inputs that share the parameters of a draft weight (and of an int8 activation).
pub(crate) const DRAFT_GROUP: usize = quantspec_core::quantize::WEIGHT_GROUP;
/// Warps of a block.
pub(crate) const WARPS: usize = shapes::LINEAR_WARPS;
/// Blocks per SM for GEMMs without a pipeline over the whole SM: a single one is latency-bound.
const RESIDENT: usize = 2;

/// Pipeline of a GEMM on Hopper (`Pipeline` in kernels/linear_pipeline.cuh).
#[derive(Clone, Copy, Debug)]
pub(crate) struct GemmPipeline {
    /// Bytes of shared memory.
    pub(crate) shared: usize,
    /// Warps that load: two, or four if they release registers to the computing warps.
    pub(crate) copying: usize,
    /// Blocks that share loads of the inputs by multicast.
    pub(crate) cluster: usize,
}

impl GemmPipeline {
    pub(crate) fn new(shared: usize, hand_over: bool, cluster: usize) -> GemmPipeline {
        GemmPipeline { shared, copying: if hand_over { 4 } else { 2 }, cluster }
    }

    /// The pipeline for weights of `bits` bits and `tiles` row tiles.
    fn of(bits: usize, tiles: usize) -> Option<GemmPipeline> {
        if bits == 16 {
            let of = shapes::PIPELINE.iter().find(|of| of.nt == tiles)?;
            return Some(GemmPipeline::new(of.shared, false, of.cluster));
        }
        let of = shapes::DRAFT_PIPELINE.iter().find(|of| of.nt == tiles)?;
        Some(GemmPipeline::new(if bits == 4 { of.shared4 } else { of.shared8 }, of.hand_over, of.cluster))
    }
}

/// Form of a GEMM's input (kernels/panel.cuh).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Numbers of the weights' type.
    Plain(Dtype),
    /// Int8 codes with scales and sums, for draft weights.
    Int8,
    /// 16-bit integers in two limbs with scales and sums, for weights in nibbles.
    Limbs,
}

impl Form {
    /// Its part of kernel names.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Form::Plain(dtype) => name(dtype),
            Form::Int8 => "i8",
            Form::Limbs => "limbs",
        }
    }
}

/// A type's part of kernel names.
pub(crate) const fn name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::Bf16 => "bf16",
        Dtype::F16 => "f16",
        Dtype::F32 => "f32",
    }
}

/// A weight matrix `[n][k]` in the checkpoint's precision: 16-bit types in atoms, f32 row-major.
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
    /// Bytes of an `n` × `k` matrix.
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
    /// Memory that holds the blocks, and their first byte.
    pub buffer: Arc<Buffer>,
    /// Byte of the first block.
    pub offset: usize,
    /// Bits of a code: 4, or 8 for the head and sensitive matrices.
    pub bits: usize,
    /// Outputs.
    pub n: usize,
    /// Inputs.
    pub k: usize,
    /// 0, or the width of the heads that the rows form. Channels c … c + 7 and width / 2 + c … of a head then share a tile.
    pub paired: usize,
    /// Importance of the inputs, f32 `[k]`, by which the search of 4-bit codes weighs errors; None if all weigh the same.
    pub importance: Option<Buffer>,
}

/// A copy of the importance of a matrix's `k` inputs on the device; None if there is none.
///
/// # Errors
/// [`quantspec_core::ErrorKind::Internal`] for another length. Those of [`Device::copied`].
pub(crate) fn copied_importance(device: &Arc<Device>, importance: &[f32], k: usize) -> Result<Option<Buffer>> {
    if !importance.is_empty() && importance.len() != k {
        return Err(Error::internal(format!("importance of {} inputs of {k}", importance.len())));
    }
    (!importance.is_empty()).then(|| device.copied(importance)).transpose()
}

/// Kernels `stem_bf16`, `stem_f16` and `stem_f32`.
pub(crate) fn of_each_dtype(device: &Device, stem: &str) -> Result<[Kernel; 3]> {
    let of = |dtype| device.kernel(&format!("{stem}_{}", name(dtype)), 0);
    Ok([of(Dtype::Bf16)?, of(Dtype::F16)?, of(Dtype::F32)?])
}

/// The kernel for a number format, of those from bf16, f16 and f32.
pub(crate) fn of_dtype([bf16, f16, f32]: [Kernel; 3], dtype: Dtype) -> Kernel {
    match dtype {
        Dtype::Bf16 => bf16,
        Dtype::F16 => f16,
        Dtype::F32 => f32,
    }
}

/// Bytes of a block of draft weights.
pub(crate) const fn block_bytes(bits: usize) -> usize {
    TILE * DRAFT_GROUP * bits / 8 + TILE * 4
}

impl Quantised {
    /// Bytes of draft weights of that shape.
    pub const fn bytes(bits: usize, n: usize, k: usize) -> usize {
        n.div_ceil(TILE) * k.div_ceil(DRAFT_GROUP) * block_bytes(bits)
    }

    /// Bytes of these, without the importance.
    pub fn held_bytes(&self) -> usize {
        Quantised::bytes(self.bits, self.n, self.k)
    }

    /// Address of the first block.
    pub fn address(&self) -> u64 {
        self.buffer.at(self.offset)
    }
}

/// Kernels of one weight type by number of row tiles (of 8 rows).
#[derive(Debug)]
pub(crate) struct Family {
    kernels: Vec<Gemm>,
}

/// One kernel of a family, with its row tiles of 8.
#[derive(Clone, Copy, Debug)]
struct Gemm {
    tiles: usize,
    pipeline: Option<GemmPipeline>,
    kernel: Kernel,
}

impl Family {
    /// `stem_{tiles}` of each of `tiles`; `pipeline` gives each one's pipeline on Hopper.
    pub(crate) fn new(
        device: &Device,
        stem: &str,
        tiles: &[usize],
        pipeline: impl Fn(usize) -> Option<GemmPipeline>,
    ) -> Result<Family> {
        let kernels = tiles.iter().map(|&tiles| {
            let pipeline = pipeline(tiles).filter(|_| device.has_tma());
            let kernel = device.kernel(&format!("{stem}_{tiles}"), pipeline.map_or(0, |pipeline| pipeline.shared))?;
            device.prefer_shared(kernel, if pipeline.is_some() { 100 } else { LOADS_PERCENT })?;
            Ok(Gemm { tiles, pipeline, kernel })
        });
        Ok(Family { kernels: kernels.collect::<Result<_>>()? })
    }

    /// The smallest kernel that takes all rows at once, or else the largest.
    fn choose(&self, rows: usize) -> Result<Gemm> {
        let fits = self.kernels.iter().find(|gemm| gemm.tiles * 8 >= rows).or(self.kernels.last());
        fits.copied().ok_or_else(|| Error::internal("a GEMM without kernels"))
    }

    /// The kernel for this number of rows, and its launch for this number of output tiles.
    pub(crate) fn launch(&self, device: &Device, rows: usize, tiles: usize) -> Result<(Kernel, Launch)> {
        let gemm = self.choose(rows)?;
        let (blocks, warps, shared) = match gemm.pipeline {
            Some(GemmPipeline { shared, copying, cluster }) => {
                let clusters = (device.info.sms / cluster).max(1).min(tiles.div_ceil(cluster));
                (clusters * cluster, WARPS + copying, shared)
            }
            // A block of the largest kernel needs a whole SM; two blocks of the others fit.
            None => (tiles.min(device.info.sms * if gemm.tiles == 8 { 1 } else { RESIDENT }), WARPS, 0),
        };
        let grid = [blocks as u32, rows.div_ceil(8 * gemm.tiles) as u32, 1];
        Ok((gemm.kernel, Launch { grid, block: 32 * warps as u32, shared: shared as u32, overlap: true }))
    }
}

/// Rows of a step from which GEMMs on Hopper are `linear_*_wide_{N}` and read panels.
pub(crate) const WIDE_FROM: usize = 17;

/// A kernel for 17 and more rows on Hopper.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wide {
    /// Most rows of a block.
    rows: usize,
    /// Bytes of shared memory.
    shared: usize,
    kernel: Kernel,
}

impl Wide {
    /// `stem_{rows}` of each of `shapes`, by rows: rows and bytes of shared memory.
    pub(crate) fn new(device: &Device, stem: &str, shapes: impl Iterator<Item = (usize, usize)>) -> Result<Vec<Wide>> {
        let kernels = shapes.map(|(rows, shared)| {
            let kernel = device.kernel(&format!("{stem}_{rows}"), shared)?;
            device.prefer_shared(kernel, 100)?;
            Ok(Wide { rows, shared, kernel })
        });
        kernels.collect()
    }

    /// The smallest of `kernels` that takes all rows at once, or else the largest, and its launch.
    pub(crate) fn launch(kernels: &[Wide], device: &Device, rows: usize, tiles: usize) -> Result<(Kernel, Launch)> {
        let wide = kernels.iter().find(|wide| wide.rows >= rows).or(kernels.last());
        let wide = wide.ok_or_else(|| Error::internal("a GEMM without kernels"))?;
        let clusters = (device.info.sms / 2).max(1).min(tiles);
        let grid = [2 * clusters as u32, rows.div_ceil(wide.rows.max(PANEL_ROWS)) as u32, 1];
        Ok((wide.kernel, Launch { grid, block: WIDE_THREADS as u32, shared: wide.shared as u32, overlap: true }))
    }
}

/// GEMMs `stem_{tiles}`, and on Hopper, where those take up to 16 rows, `stem_wide_{rows}` of `wide`, for 17 and more.
pub(crate) fn gemms(
    device: &Device,
    stem: &str,
    pipeline: impl Fn(usize) -> Option<GemmPipeline>,
    wide: impl Iterator<Item = (usize, usize)>,
) -> Result<(Family, Vec<Wide>)> {
    if !device.has_tma() {
        return Ok((Family::new(device, stem, &[1, 2, 4, 8], pipeline)?, Vec::new()));
    }
    Ok((Family::new(device, stem, &[1, 2], pipeline)?, Wide::new(device, &format!("{stem}_wide"), wide)?))
}

/// A kernel for draft weights: row tiles, and weight blocks per warp in flight.
#[derive(Clone, Copy, Debug)]
struct WarpPipeline {
    tiles: usize,
    stages: usize,
    kernel: Kernel,
}

impl WarpPipeline {
    /// Dynamic shared memory: weights in flight, and the activations if the kernel has one row tile.
    const fn shared(&self, bits: usize, groups: usize, rows: usize) -> usize {
        let staged = if self.tiles == 1 { rows * (groups * (DRAFT_GROUP + 8) + 64) } else { 0 };
        WARPS * self.stages * block_bytes(bits) + staged
    }

    /// Total shared memory of a block, including the warps' sums and the driver's share.
    const fn resident(&self, shared: usize) -> usize {
        shared + static_bytes(self.tiles)
    }
}

/// Static shared memory of a kernel with this many row tiles, and the driver's share, in bytes.
const fn static_bytes(tiles: usize) -> usize {
    tiles * WARPS * 128 * 4 + 1024
}

/// Kernels of one width of draft weights, in the order of preference: deep pipelines first, activations from L1 last.
#[derive(Debug)]
struct WarpPipelines {
    kernels: Vec<WarpPipeline>,
    /// Row tiles of the largest.
    tiles_max: usize,
}

impl WarpPipelines {
    fn new(device: &Device, bits: usize) -> Result<WarpPipelines> {
        let shapes = || shapes::QUANT.iter().filter(move |of| of.bits == bits);
        let tiles_max = shapes().map(|of| of.nt).max().unwrap_or(0);
        let shared = device.shared_bytes - static_bytes(tiles_max);
        let kernels = shapes().map(|&shapes::Quant { nt: tiles, stages, .. }| {
            let kernel = device.kernel(&format!("linear_w{bits}_{tiles}_{stages}"), shared)?;
            Ok(WarpPipeline { tiles, stages, kernel })
        });
        Ok(WarpPipelines { kernels: kernels.collect::<Result<_>>()?, tiles_max })
    }

    /// The first kernel that takes the rows at once (the largest takes them in turns) and leaves room for a second block;
    /// otherwise the last, which is small.
    fn choose(&self, device: &Device, bits: usize, groups: usize, rows: usize) -> Result<WarpPipeline> {
        let fits = |pipeline: &&WarpPipeline| {
            let shared = pipeline.shared(bits, groups, rows);
            pipeline.tiles * 8 >= rows.min(8 * self.tiles_max)
                && RESIDENT * pipeline.resident(shared) <= device.shared_per_sm
        };
        let pipeline = self.kernels.iter().find(fits).or(self.kernels.last());
        pipeline.copied().ok_or_else(|| Error::internal("a GEMM without kernels"))
    }
}

/// Launches GEMMs.
#[derive(Debug)]
pub struct Linear {
    device: Arc<Device>,
    /// 16-bit weights, and those of 17 and more rows on Hopper.
    bf16: (Family, Vec<Wide>),
    f16: (Family, Vec<Wide>),
    w4: WarpPipelines,
    w8: WarpPipelines,
    /// Draft weights of 4 and of 8 bits on Hopper: of up to 16 rows, and of more.
    pipeline: Option<[(Family, Vec<Wide>); 2]>,
    single: Kernel,
    quantise: [[Kernel; 3]; 2],
}

impl Linear {
    /// Finds the kernels.
    ///
    /// # Errors
    /// Those of [`Device::kernel`].
    pub fn new(device: &Arc<Device>) -> Result<Linear> {
        let draft = |bits| {
            let shapes = shapes::WIDE.iter().filter(|of| of.bits == bits).map(|of| (of.n, of.shared));
            let wide = Wide::new(device, &format!("linear_w{bits}_wide"), shapes)?;
            let stem = format!("linear_w{bits}_pipeline");
            Ok((Family::new(device, &stem, &[1, 2], |tiles| GemmPipeline::of(bits, tiles))?, wide))
        };
        let full = |dtype| -> Result<(Family, Vec<Wide>)> {
            let shapes = shapes::WIDE_FULL.iter().map(|of| (of.n, of.shared));
            gemms(device, &format!("linear_{}", name(dtype)), |tiles| GemmPipeline::of(16, tiles), shapes)
        };
        Ok(Linear {
            bf16: full(Dtype::Bf16)?,
            f16: full(Dtype::F16)?,
            pipeline: if device.has_tma() { Some([draft(4)?, draft(8)?]) } else { None },
            w4: WarpPipelines::new(device, 4)?,
            w8: WarpPipelines::new(device, 8)?,
            single: device.kernel("linear_f32", 0)?,
            quantise: [of_each_dtype(device, "weights_w4")?, of_each_dtype(device, "weights_w8")?],
            device: device.clone(),
        })
    }

    /// y f32 `[rows][n]` = x · weightsᵀ; x in the weights' type, in `panels` of [`Linear::panels_of`]. Row-major it is
    /// `[rows][k padded to 64]`, padding zero; in panels rows are padded to a multiple of eight.
    ///
    /// # Errors
    /// Device errors of the launch, named by the kernel.
    ///
    /// # Safety
    /// Both addresses must stay valid for their shapes until the stream has completed this call.
    pub unsafe fn run(&self, weights: &Matrix, x: u64, y: u64, rows: usize) -> Result<()> {
        let pitch = weights.k.next_multiple_of(ATOM);
        let (family, wide) = match weights.dtype {
            Dtype::Bf16 => &self.bf16,
            Dtype::F16 => &self.f16,
            Dtype::F32 => {
                let grid = [weights.n.div_ceil(WARPS) as u32, rows.div_ceil(8) as u32, 1];
                let arguments = args![&weights.buffer, x, y, weights.k, weights.n, rows, pitch];
                // SAFETY: the argument list is the kernel's; the caller guarantees the addresses.
                return unsafe {
                    self.device.launch(
                        self.single,
                        Launch { grid, block: 32 * WARPS as u32, shared: 0, overlap: true },
                        &arguments,
                    )
                };
            }
        };
        let tiles = weights.n.div_ceil(TILE);
        if self.panels_of(weights, rows) > 0 {
            let (kernel, launch) = Wide::launch(wide, &self.device, rows, tiles)?;
            let arguments = args![&weights.buffer, x, y, pitch / ATOM, tiles, weights.n, rows];
            // SAFETY: as above.
            return unsafe { self.device.launch(kernel, launch, &arguments) };
        }
        let (kernel, launch) = family.launch(&self.device, rows, tiles)?;
        let arguments = args![&weights.buffer, x, y, pitch / ATOM, tiles, weights.n, rows, pitch];
        // SAFETY: as above.
        unsafe { self.device.launch(kernel, launch, &arguments) }
    }

    /// `panels` of a step's int8 inputs and limbs (kernels/panel.cuh): `rows` if GEMMs of that many rows read panels, 0 if
    /// row-major.
    pub fn panels(&self, rows: usize) -> usize {
        if self.pipeline.is_some() && rows >= WIDE_FROM { rows } else { 0 }
    }

    /// The same for inputs of these weights in their type.
    pub fn panels_of(&self, weights: &Matrix, rows: usize) -> usize {
        // Part of a group would leave stale inputs where the padding of row-major ones must stay zero.
        let fits = weights.dtype != Dtype::F32 && weights.k.is_multiple_of(ATOM);
        if fits { self.panels(rows) } else { 0 }
    }

    /// y f32 `[rows][n]` = x · weightsᵀ with draft weights; x int8 and xs float2 {scale, sum}. Row-major they are
    /// `[rows][k padded to 128]` and `[rows][groups]`; if [`Linear::panels`] is not 0, panels with rows padded to a multiple
    /// of eight.
    ///
    /// # Errors
    /// Device errors of the launch, named by the kernel.
    ///
    /// # Safety
    /// As [`Linear::run`].
    pub unsafe fn run_quantised(&self, weights: &Quantised, x: u64, xs: u64, y: u64, rows: usize) -> Result<()> {
        let (groups, tiles) = (weights.k.div_ceil(DRAFT_GROUP), weights.n.div_ceil(TILE));
        let arguments = args![weights.address(), x, xs, y, groups, tiles, weights.n, rows];
        let pipeline = self.pipeline.as_ref().map(|[w4, w8]| if weights.bits == 4 { w4 } else { w8 });
        let (kernel, launch) = match pipeline {
            Some((_, wide)) if self.panels(rows) > 0 => Wide::launch(wide, &self.device, rows, tiles)?,
            // Bulk copies are multiples of 16 bytes: {scale, sum} of two groups of a row.
            Some((family, _)) if groups.is_multiple_of(2) => family.launch(&self.device, rows, tiles)?,
            _ => {
                let pipelines = if weights.bits == 4 { &self.w4 } else { &self.w8 };
                let pipeline = pipelines.choose(&self.device, weights.bits, groups, rows)?;
                let shared = pipeline.shared(weights.bits, groups, rows);
                let resident = (self.device.shared_per_sm / pipeline.resident(shared)).clamp(1, RESIDENT);
                let blocks = tiles.min(self.device.info.sms * resident) as u32;
                let grid = [blocks, rows.div_ceil(8 * pipeline.tiles) as u32, 1];
                (pipeline.kernel, Launch { grid, block: 32 * WARPS as u32, shared: shared as u32, overlap: true })
            }
        };
        // SAFETY: the argument list is the kernel's; the caller guarantees the addresses.
        unsafe { self.device.launch(kernel, launch, &arguments) }
    }

    /// Draft weights of a matrix in newly allocated memory. `importance` of its inputs, `[k]` or empty, and `paired` as in
    /// [`Quantised`]. `flag` begins with the device's error flag, a u32.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] for importance of another length. Those of [`Device::allocate`] and of
    /// [`Linear::quantise_into`].
    pub fn quantise(
        &self,
        weights: &Matrix,
        bits: usize,
        importance: &[f32],
        paired: usize,
        flag: &Buffer,
    ) -> Result<Quantised> {
        let buffer = Arc::new(self.device.allocate(Quantised::bytes(bits, weights.n, weights.k))?);
        let importance = copied_importance(&self.device, importance, weights.k)?;
        let draft = Quantised { buffer, offset: 0, bits, n: weights.n, k: weights.k, paired, importance };
        self.quantise_into(weights, &draft, flag)?;
        Ok(draft)
    }

    /// Queues quantising a matrix into `to`, draft weights of the same shape.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] if the shapes differ, a buffer is shorter than its shape or rows are not whole
    /// heads. Device errors of the launch, named by the kernel.
    pub fn quantise_into(&self, weights: &Matrix, to: &Quantised, flag: &Buffer) -> Result<()> {
        let bytes = to.held_bytes();
        let full = Matrix::bytes(weights.dtype, weights.n, weights.k);
        if weights.buffer.bytes() < full || flag.bytes() < size_of::<u32>() {
            return Err(Error::internal(format!(
                "{} bytes of weights instead of {full}, {} of a flag",
                weights.buffer.bytes(),
                flag.bytes()
            )));
        }
        if (weights.n, weights.k) != (to.n, to.k) || to.offset + bytes > to.buffer.bytes() {
            return Err(Error::internal(format!(
                "{bytes} bytes of draft weights at {} of {}",
                to.offset,
                to.buffer.bytes()
            )));
        }
        if to.paired > 0 && !(to.paired.is_multiple_of(TILE) && to.n.is_multiple_of(to.paired)) {
            return Err(Error::internal(format!("{} rows in heads of {} channels", to.n, to.paired)));
        }
        let of_bits = [4, 8].iter().position(|&bits| bits == to.bits).and_then(|index| self.quantise.get(index));
        let kernels = of_bits.ok_or_else(|| Error::internal(format!("draft weights of {} bits", to.bits)))?;
        let kernel = of_dtype(*kernels, weights.dtype);
        let importance = to.importance.as_ref().map_or(0, |buffer| buffer.at(0));
        let grid = [weights.k.div_ceil(DRAFT_GROUP) as u32, weights.n.div_ceil(TILE) as u32, 1];
        let arguments = args![&weights.buffer, importance, to.address(), weights.n, weights.k, to.paired, flag];
        // SAFETY: the argument list is the kernel's, and the three buffers have room for what it reads and writes: see above.
        unsafe { self.device.launch(kernel, Launch { grid, block: 128, shared: 0, overlap: false }, &arguments) }
    }
}
