//! The products of a draft step together with everything between them (kernels/draft.cu), on Hopper and for one or two rows.

use crate::args;
use crate::device::{Arg, Device, Kernel, Launch};
use crate::linear::{GROUP, Quantised, TILE, WARPS, block_bytes};
use quantspec_core::{Error, Result};
use std::sync::Arc;

/// Rows of the largest step: every block makes every row's input, and for three rows that takes longer than kernels between the products.
pub const ROWS_MAX: usize = 2;
/// Tiles of a batch, tiles of a chunk, and threads of a block; as in kernels/draft.cu.
const TOGETHER: usize = 4;
const CHUNK_TILES: usize = 2;
const THREADS: u32 = 384;
/// Chunks of weights on their way to a block: two of 17 KB keep memory busy, behind three inputs and results come late (docs/kernels.md).
const AHEAD: usize = 2;
/// Chunks under way below which a ring is too short to keep memory busy.
const STAGES_MIN: usize = 3;
/// Shared memory that the driver keeps of every block.
const KEPT: usize = 1024;
/// What a block of `merge` takes (kernels/attend.cu), with what is kept of it: it comes up beside two blocks, or the product behind it could not.
const SMALL: usize = 3072 + KEPT;

/// The hidden stream, f32 `[rows][width]`, and the norm ahead of a product.
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

/// Where queries, keys and values go, as kernels `append_*` take it; 0 where there is no bias.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// Rows of the step.
    pub rows: u64,
    /// f32 of the product's width.
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

/// Launches the products of draft steps.
#[derive(Debug)]
pub struct Draft {
    device: Arc<Device>,
    heads: Kernel,
    rows: Kernel,
    gated: Kernel,
    add_i8: Kernel,
    add_bf16: Kernel,
    /// Dynamic shared memory of a block, so that two share a multiprocessor.
    shared: usize,
}

impl Draft {
    /// Finds the kernels; `None` on devices that have none.
    pub fn new(device: &Arc<Device>, head_dim: usize) -> Result<Option<Draft>> {
        if !device.has_engine() {
            return Ok(None);
        }
        let shared = (device.shared_per_multiprocessor - SMALL) / 2 - KEPT;
        let kernel = |name: &str| {
            let kernel = device.kernel(name, shared)?;
            device.prefer_shared(kernel, 100)?;
            Ok(kernel)
        };
        Ok(Some(Draft {
            heads: kernel(&format!("draft_heads_{head_dim}"))?,
            rows: kernel("draft_rows")?,
            gated: kernel("draft_gated")?,
            add_i8: kernel("draft_add_i8")?,
            add_bf16: kernel("draft_add_bf16")?,
            shared,
            device: device.clone(),
        }))
    }

    /// Chunks of weights that fit beside the inputs of `rows` rows (kernels/draft.cu, `DraftShared`).
    fn stages(&self, groups: usize, rows: usize) -> usize {
        let inputs = rows * (groups * (GROUP + 8) + 64);
        let sums = TOGETHER * WARPS * TILE * 4 * rows + WARPS * ROWS_MAX * 4;
        self.shared.saturating_sub(inputs + sums + 16) / (CHUNK_TILES * WARPS * block_bytes(4) + 16)
    }

    /// Whether products of `k` inputs take `rows` rows.
    pub fn takes(&self, k: usize, rows: usize) -> bool {
        (1..=ROWS_MAX).contains(&rows) && self.stages(k.div_ceil(GROUP), rows) >= STAGES_MIN
    }

    unsafe fn launch(&self, kernel: Kernel, weights: &Quantised, rows: usize, rest: &[Arg]) -> Result<()> {
        let (groups, tiles) = (weights.k.div_ceil(GROUP), weights.n.div_ceil(TILE));
        if weights.bits != 4 || !self.takes(weights.k, rows) {
            return Err(Error::internal(format!("a draft product of {rows} rows and {} inputs", weights.k)));
        }
        let stages = self.stages(groups, rows);
        let mut arguments = args![weights.address(), groups, tiles, rows, stages, AHEAD].to_vec();
        arguments.extend_from_slice(rest);
        let grid = [tiles.min(self.device.multiprocessors) as u32, 1, 1];
        let launch = Launch { grid, block: THREADS, shared: self.shared as u32, overlap: true };
        // SAFETY: the argument list is the kernel's; the caller vouches for the addresses.
        unsafe { self.device.launch(kernel, launch, &arguments) }
    }

    /// Queries, keys and values of the normed stream; `weights` with paired rows ([`crate::linear::Linear::quantise`]).
    ///
    /// # Safety
    /// Every address must be good for `rows` rows until the stream has passed this call.
    pub unsafe fn heads(&self, weights: &Quantised, hidden: Hidden, to: &Heads, rows: usize) -> Result<()> {
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
        unsafe { self.launch(self.heads, weights, rows, &rest) }
    }

    /// y f32 `[rows][n]` = the normed stream · weightsᵀ.
    ///
    /// # Safety
    /// As [`Draft::heads`].
    pub unsafe fn rows(&self, weights: &Quantised, hidden: Hidden, y: u64, rows: usize) -> Result<()> {
        let rest = args![hidden.address, hidden.weight, hidden.eps, hidden.width, y, weights.n];
        // SAFETY: the caller's.
        unsafe { self.launch(self.rows, weights, rows, &rest) }
    }

    /// x bf16 `[rows][pitch]` = SiLU(gate) · up of the normed stream; gate, up and `bias` (or 0) interleaved by eight.
    ///
    /// # Safety
    /// As [`Draft::heads`].
    pub unsafe fn gated(
        &self,
        weights: &Quantised,
        hidden: Hidden,
        bias: u64,
        x: u64,
        pitch: usize,
        rows: usize,
    ) -> Result<()> {
        let rest = args![hidden.address, hidden.weight, hidden.eps, hidden.width, bias, x, weights.n / 2, pitch];
        // SAFETY: the caller's.
        unsafe { self.launch(self.gated, weights, rows, &rest) }
    }

    /// hidden f32 `[rows][n]` += x · weightsᵀ + bias; x and xs as of [`crate::linear::Linear::run_quantised`].
    ///
    /// # Safety
    /// As [`Draft::heads`].
    pub unsafe fn add_i8(
        &self,
        weights: &Quantised,
        x: u64,
        xs: u64,
        hidden: u64,
        bias: u64,
        rows: usize,
    ) -> Result<()> {
        let rest = args![x, xs, hidden, bias, weights.n];
        // SAFETY: the caller's.
        unsafe { self.launch(self.add_i8, weights, rows, &rest) }
    }

    /// hidden f32 `[rows][n]` += x · weightsᵀ + bias; x bf16 `[rows][pitch]`.
    ///
    /// # Safety
    /// As [`Draft::heads`].
    pub unsafe fn add_bf16(
        &self,
        weights: &Quantised,
        x: u64,
        pitch: usize,
        hidden: u64,
        bias: u64,
        rows: usize,
    ) -> Result<()> {
        let rest = args![x, weights.k, pitch, hidden, bias, weights.n];
        // SAFETY: the caller's.
        unsafe { self.launch(self.add_bf16, weights, rows, &rest) }
    }
}
