//! GEMMs of a draft step fused with all operations between them (kernels/draft.cu), on Hopper and for one or two rows.

use crate::args;
use crate::device::{Arg, Device, Kernel, Launch};
use crate::hierarchy::Hierarchy;
use crate::linear::{DRAFT_GROUP, Quantised, TILE, WARPS, block_bytes};
use crate::shapes::{DRAFT_AHEAD, DRAFT_ROWS, DRAFT_STAGE_TILES, DRAFT_TOGETHER, MERGE_SHARED, UPPER_BLOCK};
use quantspec_core::{Error, Result};
use std::sync::Arc;

/// Rows of the largest step. Every block computes every row's input; from three rows on, separate kernels are faster. Neither
/// RoPE and append in the QKV GEMM nor its prefetching of pages into L2 pays there: attention then waits for the same bytes.
pub const ROWS_MAX: usize = DRAFT_ROWS;
/// Threads of a block: computing warps, and four loading ones.
const THREADS: u32 = 32 * (WARPS as u32 + 4);
/// Fewest pipeline stages of a launch: as many as a producer runs ahead. Fewer would not keep memory busy.
const STAGES_MIN: usize = DRAFT_AHEAD;
/// Shared memory that the driver reserves per block, in bytes.
const KEPT: usize = 1024;
/// Bytes of an upper plane for 16 outputs and 128 inputs.
const UPPER_BLOCKS: usize = 2 * UPPER_BLOCK;
/// Shared memory of a block of `merge` (kernels/attend.cu) with the driver's share. If it fits next to two GEMM blocks, the
/// following GEMM can start early.
const SMALL: usize = MERGE_SHARED + KEPT;

/// The hidden stream, f32 `[rows][width]`, and the norm before a GEMM.
#[derive(Clone, Copy, Debug)]
pub struct Hidden {
    /// Address of the first row.
    pub address: u64,
    /// Address of the norm's weight, f32 `[width]`.
    pub weight: u64,
    /// Added to the mean square.
    pub eps: f32,
    /// Channels.
    pub width: usize,
}

/// Destinations of queries, keys and values, as kernels `append_*` take them; a bias of 0 means none.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// Rows of the step.
    pub rows: u64,
    /// f32 of the GEMM's width.
    pub bias: u64,
    /// float2 `[row][head_dim / 2]`.
    pub cos_sin: u64,
    /// f16 `[row][heads][head_dim]`.
    pub q: u64,
    /// Rings of recent keys and values.
    pub rings: [u64; 2],
    /// Multiplies queries.
    pub scale: f32,
    /// Query and KV heads.
    pub heads: [usize; 2],
    /// Layer of the rings.
    pub layer: usize,
    /// Slots of the rings.
    pub slots: usize,
    /// The device's error flag.
    pub flag: u64,
}

/// Weights that a draft multiplies with int8 activations.
#[derive(Clone, Copy, Debug)]
pub enum DraftMatrix<'a> {
    /// The draft's own, of four bits.
    Own(&'a Quantised),
    /// The upper nibbles of the target's.
    Upper(&'a Hierarchy),
}

impl<'a> From<&'a Quantised> for DraftMatrix<'a> {
    fn from(weights: &'a Quantised) -> Self {
        DraftMatrix::Own(weights)
    }
}

impl<'a> From<&'a Hierarchy> for DraftMatrix<'a> {
    fn from(weights: &'a Hierarchy) -> Self {
        DraftMatrix::Upper(weights)
    }
}

impl DraftMatrix<'_> {
    /// Address, outputs, inputs.
    fn matrix(self) -> (u64, usize, usize) {
        match self {
            DraftMatrix::Own(weights) => (weights.address(), weights.n, weights.k),
            DraftMatrix::Upper(weights) => {
                let (n, k) = weights.shape();
                (weights.upper(), n, k)
            }
        }
    }
}

/// The kernels for one kind of weights.
#[derive(Clone, Copy, Debug)]
struct Kernels {
    heads: Kernel,
    rows: Kernel,
    gated: Kernel,
    add_i8: Kernel,
    add_bf16: Kernel,
    /// Bytes of weights for 16 outputs and 128 inputs.
    block: usize,
}

/// Launches the GEMMs of draft steps.
#[derive(Debug)]
pub struct DraftGemms {
    device: Arc<Device>,
    own: Kernels,
    upper: Kernels,
    /// Most dynamic shared memory of a block if two share an SM, in bytes.
    shared: usize,
}

/// Pipeline stages and shared memory of a block: stages of weights, in blocks of `block` bytes, that fit next to the inputs
/// of `rows` rows in `most` bytes. Leaves room for a small block next to two of these, if that costs no stage (`DraftShared`
/// in kernels/draft.cu).
fn pipeline(most: usize, block: usize, groups: usize, rows: usize) -> (usize, usize) {
    let inputs = rows * (groups * (DRAFT_GROUP + 8) + 64);
    let sums = DRAFT_TOGETHER * WARPS * TILE * 4 * rows + WARPS * ROWS_MAX * 4;
    let stages = |shared: usize| shared.saturating_sub(inputs + sums + 16) / (DRAFT_STAGE_TILES * WARPS * block + 16);
    let less = most - SMALL / 2;
    (stages(most), if stages(less) == stages(most) { less } else { most })
}

impl DraftGemms {
    /// Finds the kernels; `None` on devices without them.
    ///
    /// # Errors
    /// Those of [`Device::kernel`]; there are kernels for head widths of 64, 128 and 256.
    pub fn new(device: &Arc<Device>, head_dim: usize) -> Result<Option<DraftGemms>> {
        if !device.has_tma() {
            return Ok(None);
        }
        let shared = device.shared_per_sm / 2 - KEPT;
        let kernel = |name: &str| {
            let kernel = device.kernel(name, shared)?;
            device.prefer_shared(kernel, 100)?;
            Ok(kernel)
        };
        let kernels = |of: &str, block: usize| {
            Ok::<_, Error>(Kernels {
                heads: kernel(&format!("draft_heads_{head_dim}{of}"))?,
                rows: kernel(&format!("draft_rows{of}"))?,
                gated: kernel(&format!("draft_gated{of}"))?,
                add_i8: kernel(&format!("draft_add_i8{of}"))?,
                add_bf16: kernel(&format!("draft_add_bf16{of}"))?,
                block,
            })
        };
        Ok(Some(DraftGemms {
            own: kernels("", block_bytes(4))?,
            upper: kernels("_planes", UPPER_BLOCKS)?,
            shared,
            device: device.clone(),
        }))
    }

    /// Returns true if GEMMs with `k` inputs and a draft's own weights support `rows` rows.
    pub fn takes(&self, k: usize, rows: usize) -> bool {
        self.has_room(&self.own, k, rows)
    }

    /// The same with upper nibbles.
    pub(crate) fn takes_upper(&self, k: usize, rows: usize) -> bool {
        self.has_room(&self.upper, k, rows)
    }

    fn has_room(&self, kernels: &Kernels, k: usize, rows: usize) -> bool {
        let block = kernels.block;
        (1..=ROWS_MAX).contains(&rows) && pipeline(self.shared, block, k.div_ceil(DRAFT_GROUP), rows).0 >= STAGES_MIN
    }

    /// # Safety
    /// `rest` are the kernel's arguments after the number of stages, with addresses as of [`DraftGemms::heads`].
    unsafe fn launch(
        &self,
        kernel: impl Fn(&Kernels) -> Kernel,
        weights: DraftMatrix,
        rows: usize,
        rest: &[Arg],
    ) -> Result<()> {
        let (address, n, k) = weights.matrix();
        let (kernels, bits) = match weights {
            DraftMatrix::Own(weights) => (&self.own, weights.bits),
            DraftMatrix::Upper(_) => (&self.upper, 4),
        };
        let (kernel, groups, tiles) = (kernel(kernels), k.div_ceil(DRAFT_GROUP), n.div_ceil(TILE));
        if bits != 4 || !self.has_room(kernels, k, rows) {
            return Err(Error::internal(format!("a draft GEMM of {rows} rows and {k} inputs")));
        }
        let (stages, shared) = pipeline(self.shared, kernels.block, groups, rows);
        let mut arguments = args![address, groups, tiles, rows, stages].to_vec();
        arguments.extend_from_slice(rest);
        let grid = [tiles.min(self.device.info.sms) as u32, 1, 1];
        let launch = Launch { grid, block: THREADS, shared: shared as u32, overlap: true };
        // SAFETY: the argument list is the kernel's; the caller guarantees the addresses.
        unsafe { self.device.launch(kernel, launch, &arguments) }
    }

    /// Queries, keys and values of the normed stream; `weights` with paired rows ([`crate::linear::Linear::quantise`]).
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] for draft weights not in four bits, and if [`DraftGemms::takes`] returns false.
    /// Device errors of the launch, named by the kernel.
    ///
    /// # Safety
    /// Every address must stay valid for `rows` rows until the stream has completed this call.
    pub unsafe fn heads<'a>(
        &self,
        weights: impl Into<DraftMatrix<'a>>,
        hidden: Hidden,
        to: &Heads,
        rows: usize,
    ) -> Result<()> {
        let weights = weights.into();
        let rest = args![
            hidden.address,
            hidden.weight,
            hidden.eps,
            hidden.width,
            to.rows,
            to.bias,
            to.cos_sin,
            to.q,
            to.rings[0],
            to.rings[1],
            to.scale,
            to.heads[0],
            to.heads[1],
            to.layer,
            to.slots,
            to.flag,
        ];
        // SAFETY: the caller's.
        unsafe { self.launch(|kernels| kernels.heads, weights, rows, &rest) }
    }

    /// y f32 `[rows][n]` = the normed stream · weightsᵀ.
    ///
    /// # Errors
    /// As [`DraftGemms::heads`].
    ///
    /// # Safety
    /// As [`DraftGemms::heads`].
    pub unsafe fn rows<'a>(
        &self,
        weights: impl Into<DraftMatrix<'a>>,
        hidden: Hidden,
        y: u64,
        rows: usize,
    ) -> Result<()> {
        let weights = weights.into();
        let rest = args![hidden.address, hidden.weight, hidden.eps, hidden.width, y, weights.matrix().1];
        // SAFETY: the caller's.
        unsafe { self.launch(|kernels| kernels.rows, weights, rows, &rest) }
    }

    /// x bf16 `[rows][pitch]` = SiLU(gate) · up of the normed stream; gate, up and `bias` (or 0) interleaved by eight.
    ///
    /// # Errors
    /// As [`DraftGemms::heads`].
    ///
    /// # Safety
    /// As [`DraftGemms::heads`].
    pub unsafe fn gated<'a>(
        &self,
        weights: impl Into<DraftMatrix<'a>>,
        hidden: Hidden,
        bias: u64,
        x: u64,
        pitch: usize,
        rows: usize,
    ) -> Result<()> {
        let weights = weights.into();
        let rest =
            args![hidden.address, hidden.weight, hidden.eps, hidden.width, bias, x, weights.matrix().1 / 2, pitch];
        // SAFETY: the caller's.
        unsafe { self.launch(|kernels| kernels.gated, weights, rows, &rest) }
    }

    /// hidden f32 `[rows][n]` += x · weightsᵀ + bias; x and xs as in [`crate::linear::Linear::run_quantised`].
    ///
    /// # Errors
    /// As [`DraftGemms::heads`].
    ///
    /// # Safety
    /// As [`DraftGemms::heads`].
    pub unsafe fn add_i8<'a>(
        &self,
        weights: impl Into<DraftMatrix<'a>>,
        x: u64,
        xs: u64,
        hidden: u64,
        bias: u64,
        rows: usize,
    ) -> Result<()> {
        let weights = weights.into();
        let rest = args![x, xs, hidden, bias, weights.matrix().1];
        // SAFETY: the caller's.
        unsafe { self.launch(|kernels| kernels.add_i8, weights, rows, &rest) }
    }

    /// hidden f32 `[rows][n]` += x · weightsᵀ + bias; x bf16 `[rows][pitch]`.
    ///
    /// # Errors
    /// As [`DraftGemms::heads`].
    ///
    /// # Safety
    /// As [`DraftGemms::heads`].
    pub unsafe fn add_bf16<'a>(
        &self,
        weights: impl Into<DraftMatrix<'a>>,
        x: u64,
        pitch: usize,
        hidden: u64,
        bias: u64,
        rows: usize,
    ) -> Result<()> {
        let weights = weights.into();
        let rest = args![x, weights.matrix().2, pitch, hidden, bias, weights.matrix().1];
        // SAFETY: the caller's.
        unsafe { self.launch(|kernels| kernels.add_bf16, weights, rows, &rest) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_blocks_share_an_sm() {
        const HOPPER: usize = 228 * 1024;
        for (inputs, rows, expected, small) in [
            (4096, 1, 6, true),
            (11_008, 1, 5, true),
            (14_336, 1, 5, true),
            (8192, 1, 6, false),
            (11_008, 2, 5, false),
            (27_648, 2, 3, false),
        ] {
            let (stages, shared) = pipeline(HOPPER / 2 - KEPT, block_bytes(4), inputs / DRAFT_GROUP, rows);
            assert_eq!(stages, expected, "{inputs} inputs, {rows} rows");
            let taken = 2 * (shared + KEPT) + if small { SMALL } else { 0 };
            assert!(taken <= HOPPER, "{inputs} inputs, {rows} rows: {taken} bytes");
        }
        // Blocks of an upper plane are 1/17 larger.
        for (inputs, rows, expected) in [(4096, 1, 5), (14_336, 1, 5), (14_336, 2, 4)] {
            assert_eq!(
                pipeline(HOPPER / 2 - KEPT, UPPER_BLOCKS, inputs / DRAFT_GROUP, rows).0,
                expected,
                "{inputs} inputs, {rows} rows"
            );
        }
    }
}
