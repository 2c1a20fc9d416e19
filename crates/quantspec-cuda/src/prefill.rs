//! Prompt rows: GEMMs with fused epilogues, and causal attention over one layer's full-precision keys and values.
//!
//! There are three paths, by compute capability and weight type. Results differ between them in the last bits. Within a path,
//! a row's bits depend on that row alone, in any block:
//!
//! * [`Path::Hopper`] (9.0, 16-bit weights): wgmma. The QKV GEMM applies norms and RoPE per head and writes f16; the residual
//!   is added in the epilogue; gate and up are combined in registers. The tile shape depends on the number of rows and does
//!   not affect a bit.
//! * [`Path::Tensor`] (8.0 and newer, and 7.5 with f16 weights): mma.sync. The same, except that `rope_store` finishes the f32
//!   output of the QKV GEMM.
//! * [`Path::Plain`] (f32 weights; bfloat16 on 7.5): scalar GEMMs to f32, all other operations in kernels of their own.

mod tensor_map;
mod tiles;

use self::tensor_map::TensorMap;
use self::tiles::{Gemm, MIDDLE, NARROW, SLIM, SMALL, TALL, TILE_ROW_GROUP, Tile, WIDE};
use crate::args;
use crate::attend::check_head;
use crate::device::{Arg, Buffer, Device, Kernel, Launch};
use crate::linear::name;
use crate::shapes::{self, PROMPT_MMA_THREADS, PROMPT_WGMMA_FEW_THREADS, PROMPT_WGMMA_THREADS};
use quantspec_core::config::{Activation, Dtype, LayerNorms, ModelConfig, QkNorm};
use quantspec_core::{Error, Result};
use quantspec_model::backend::Branch;
use std::sync::Arc;

/// The model's parameters that the kernels need.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// Width of the hidden stream; a multiple of 8.
    pub hidden: usize,
    /// Width of the feed-forward network; a multiple of 8.
    pub intermediate: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Channels of a head: 64, 128 or 256.
    pub head_dim: usize,
    /// Epsilon of the norms.
    pub rms_eps: f32,
    /// Norms of queries and keys.
    pub qk_norm: QkNorm,
    /// Norms of the layers.
    pub norms: LayerNorms,
    /// Activation of the feed-forward network.
    pub activation: Activation,
    /// Type of the weights, and of the GEMMs' inputs.
    pub dtype: Dtype,
}

impl Shape {
    /// Of a model.
    pub fn of(config: &ModelConfig) -> Shape {
        Shape {
            hidden: config.hidden,
            intermediate: config.intermediate,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            rms_eps: config.rms_eps,
            qk_norm: config.qk_norm,
            norms: config.norms,
            activation: config.activation,
            dtype: config.dtype,
        }
    }

    fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    fn qkv_width(&self) -> usize {
        self.q_width() + 2 * self.kv_width()
    }
}

/// How a device runs prefill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// wgmma and tensor copies.
    Hopper,
    /// mma.sync.
    Tensor,
    /// No matrix units.
    Plain,
}

impl Path {
    /// The fastest path for weights of `dtype` with kernels compiled for a compute capability (times ten).
    pub fn of(architecture: u32, dtype: Dtype) -> Path {
        match (architecture, dtype) {
            (_, Dtype::F32) => Path::Plain,
            (90, _) => Path::Hopper,
            (80.., _) | (_, Dtype::F16) => Path::Tensor,
            _ => Path::Plain,
        }
    }
}

/// Stem of the kernels that compute activation(gate) · up.
pub(crate) const fn activate_mul(activation: Activation) -> &'static str {
    match activation {
        Activation::Silu => "silu_mul",
        Activation::Gelu => "gelu_mul",
    }
}

/// A GEMM's input pitch: K padded to whole atoms of 64 elements.
pub const fn padded(width: usize) -> usize {
    width.next_multiple_of(64)
}

/// Rows that must be allocated for `rows` rows of a GEMM's input, since whole tiles are read. TMA zero-fill of out-of-range
/// rows takes two to three times as long as reading them.
pub const fn readable(rows: usize) -> usize {
    rows.next_multiple_of(WIDE.rows())
}

#[derive(Clone, Debug)]
enum Kernels {
    Hopper { qkv: Gemm, residual: Gemm, gated: Gemm },
    Tensor { plain: Kernel, residual: Kernel, gated: Kernel },
    Plain { plain: Kernel, gated: Kernel, add_rows: Kernel },
}

/// Launches prefill's kernels for one model on one device.
#[derive(Clone, Debug)]
pub struct Prefill {
    device: Arc<Device>,
    shape: Shape,
    kernels: Kernels,
    /// Of layers that see the whole text, and of local layers.
    attend: [Kernel; 2],
    /// The same for blocks of few rows, on Hopper.
    attend_few: Option<[Kernel; 2]>,
    rope_store: Kernel,
    widen: Kernel,
    norm_rows: Kernel,
    /// f32 GEMM outputs of the paths without fused epilogues and before norms of whole rows, and the f16 attention output of f32
    /// models.
    scratch: Option<Arc<Buffer>>,
    rows: usize,
}

/// Addresses of the optional norm weights of queries and keys, as [`Shape::qk_norm`] says.
pub type QkNorms = Option<(u64, u64)>;

impl Prefill {
    /// Prepares blocks of up to `rows` rows.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Model`] for other head widths, or widths that are not multiples of 8.
    pub fn new(device: &Arc<Device>, shape: Shape, rows: usize) -> Result<Prefill> {
        let path = Path::of(device.info.architecture, shape.dtype);
        check(&shape)?;
        check_head(&device.info, shape.head_dim)?;
        let (d, dtype) = (shape.head_dim, name(shape.dtype));
        let gated = match shape.activation {
            Activation::Silu => "prefill_gated",
            Activation::Gelu => "prefill_gated_gelu",
        };
        let kernels = match path {
            Path::Hopper => Kernels::Hopper {
                // A head is within one tile.
                qkv: Gemm::new(
                    device,
                    &format!("prefill_qkv_{d}"),
                    dtype,
                    if d > MIDDLE.shape.columns { &[WIDE] } else { &[WIDE, MIDDLE, TALL, SMALL] },
                )?,
                residual: Gemm::new(device, "prefill_residual", dtype, &[WIDE, MIDDLE, SLIM, NARROW])?,
                gated: Gemm::new(device, gated, dtype, &[WIDE, MIDDLE, TALL, SMALL])?,
            },
            Path::Tensor => Kernels::Tensor {
                plain: device.kernel(&format!("prefill_plain_{dtype}"), shapes::MMA_SHARED)?,
                residual: device.kernel(&format!("prefill_residual_{dtype}"), shapes::MMA_SHARED)?,
                gated: device.kernel(&format!("{gated}_{dtype}"), shapes::MMA_SHARED)?,
            },
            Path::Plain => Kernels::Plain {
                plain: device.kernel(&format!("prefill_plain_{dtype}"), 0)?,
                gated: device.kernel(&format!("{}_{dtype}", activate_mul(shape.activation)), 0)?,
                add_rows: device.kernel("add_rows", 0)?,
            },
        };
        let bytes = Prefill::scratch_bytes(&shape, rows, path);
        let attend = |few: &str| -> Result<[Kernel; 2]> {
            let out = if shape.dtype == Dtype::F32 { "f16" } else { dtype };
            let kernel = |local: &str| {
                device.kernel(&format!("prefill_attend_{few}{d}{local}_{out}"), attend_shared_bytes(device, d))
            };
            Ok([kernel("")?, kernel("_local")?])
        };
        Ok(Prefill {
            kernels,
            attend: attend("")?,
            attend_few: if wgmma_attention(device, d) { Some(attend("few_")?) } else { None },
            rope_store: device.kernel(&format!("rope_store_{d}"), 0)?,
            widen: device.kernel("widen", 0)?,
            norm_rows: device.kernel("norm_rows", 0)?,
            // Zeroed, because compute-sanitizer does not track TMA stores.
            scratch: if bytes == 0 { None } else { Some(Arc::new(device.zeroed(bytes)?)) },
            device: device.clone(),
            shape,
            rows,
        })
    }

    /// Device memory held.
    pub(crate) fn held_bytes(&self) -> usize {
        self.scratch.as_ref().map_or(0, |scratch| scratch.bytes())
    }

    /// Device memory [`Prefill::new`] takes for itself.
    pub(crate) fn scratch_bytes(shape: &Shape, rows: usize, path: Path) -> usize {
        let of_rows = if shape.qk_norm == QkNorm::Projection { shape.qkv_width() } else { 0 };
        let of_rows = if shape.norms == LayerNorms::Before { of_rows } else { of_rows.max(shape.hidden) };
        let widest = match path {
            Path::Hopper => of_rows,
            Path::Tensor => of_rows.max(shape.qkv_width()),
            Path::Plain => shape.qkv_width().max(2 * shape.intermediate).max(shape.hidden),
        };
        rows * widest * 4
    }

    /// Queries, keys and values of a block.
    ///
    /// x `[rows][padded(hidden)]` in the weights' type; weights `[q | k | v]` atoms (f32: row-major); bias f32 of that width;
    /// norms f32 `[head_dim]`, or of all heads; cos_sin float2 `[rows][head_dim / 2]` -> q f16 `[rows][heads · head_dim]`, kv f16
    /// `[rows][2 · kv_heads · head_dim]` (keys, then values). A value beyond f16 is stored as infinity or NaN, or as 0 and noted
    /// in `flag`, the device's error flag.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] for a block without rows or with more than were prepared, and if the driver
    /// refuses to encode a tensor map. Device errors of the launches, named by the kernel.
    ///
    /// # Safety
    /// Every address must stay valid for its shape until the stream has completed this call, x for [`readable`] rows; rows of
    /// x beyond `rows` may have any content.
    #[allow(clippy::too_many_arguments, reason = "one address per matrix; a struct would only rename them")]
    pub unsafe fn qkv(
        &self,
        x: u64,
        weights: u64,
        bias: Option<u64>,
        norms: QkNorms,
        cos_sin: u64,
        q: u64,
        kv: u64,
        flag: u64,
        rows: usize,
    ) -> Result<()> {
        self.begin(rows)?;
        let s = &self.shape;
        let (of_heads, of_projection) = match s.qk_norm {
            QkNorm::Projection => (None, norms),
            QkNorm::None | QkNorm::Heads => (norms, None),
        };
        let (q_norm, k_norm) = of_heads.unwrap_or((0, 0));
        let bias = bias.unwrap_or(0);
        if let (Kernels::Hopper { qkv, .. }, None) = (&self.kernels, of_projection) {
            let n = s.qkv_width();
            let (tile, kernel) = qkv.choose(rows, n, self.device.info.sms)?;
            let (a, w) = self.inputs(&tile, x, s.hidden, weights, n, rows)?;
            let to_q = TensorMap::matrix(Dtype::F16, q, s.q_width(), rows, s.q_width(), [64, 64])?;
            let kv_width = 2 * s.kv_width();
            let to_kv = TensorMap::matrix(Dtype::F16, kv, kv_width, rows, kv_width, [64, 64])?;
            let arguments = [
                a.arg(),
                w.arg(),
                to_q.arg(),
                to_kv.arg(),
                bias.into(),
                q_norm.into(),
                k_norm.into(),
                cos_sin.into(),
                s.rms_eps.into(),
                s.heads.into(),
                s.kv_heads.into(),
                rows.into(),
                n.into(),
                s.hidden.into(),
                TILE_ROW_GROUP.into(),
            ];
            // SAFETY: the argument list is the kernel's; the caller guarantees the addresses.
            return unsafe { self.launch_tile(&tile, kernel, rows, n, &arguments) };
        }
        // SAFETY: as above; the scratch holds [rows][qkv width] f32.
        unsafe {
            let y = self.plain(x, s.hidden, weights, s.qkv_width(), rows)?;
            if let Some((q_norm, k_norm)) = of_projection {
                let pitch = s.qkv_width();
                for (first, width, norm) in [(0, s.q_width(), q_norm), (s.q_width(), s.kv_width(), k_norm)] {
                    let at = y + (first * 4) as u64;
                    self.norm_rows([at, at], [pitch; 2], norm, width, false, rows)?;
                }
            }
            let grid = [(s.heads + 2 * s.kv_heads).div_ceil(4) as u32, rows as u32, 1];
            let arguments = args![y, bias, q_norm, k_norm, cos_sin, q, kv, s.rms_eps, s.heads, s.kv_heads, flag];
            self.device.launch(self.rope_store, Launch { grid, block: 128, shared: 0, overlap: false }, &arguments)
        }
    }

    /// Causal attention of rows `start ..` over tokens `0 .. start + rows` of the layer, in a local layer the last `reach` before
    /// a row.
    ///
    /// q f16 `[rows][heads · head_dim]` of the block; kv f16 `[start + rows][2 · kv_heads · head_dim]` of the prompt -> x
    /// `[rows][padded(heads · head_dim)]`.
    ///
    /// # Errors
    /// As [`Prefill::qkv`].
    ///
    /// # Safety
    /// As [`Prefill::qkv`].
    pub unsafe fn attend(
        &self,
        q: u64,
        kv: u64,
        x: u64,
        start: usize,
        rows: usize,
        reach: Option<usize>,
    ) -> Result<()> {
        self.begin(rows)?;
        let s = &self.shape;
        let (d, pitch, kv_width, tokens) = (s.head_dim, padded(s.q_width()), 2 * s.kv_width(), start + rows);
        let values = kv + (s.kv_width() * 2) as u64;
        let scale = std::f32::consts::LOG2_E / (d as f32).sqrt();
        let group = s.heads / s.kv_heads;
        let local = usize::from(reach.is_some());
        let reach = reach.unwrap_or(0);
        // If every block of 64 rows has an SM of its own, the longest takes little more than half the time of 128 rows.
        let few = self.attend_few.filter(|_| rows.div_ceil(64) * s.heads <= self.device.info.sms);
        let tile = if d > 128 || few.is_some() { 64 } else { 128 };
        let grid = [(rows.div_ceil(tile) * s.heads) as u32, 1, 1];
        let shared = attend_shared_bytes(&self.device, d) as u32;
        // f32 models: the output passes through f16, like the values.
        let (out, out_pitch) = if s.dtype == Dtype::F32 { (self.scratch()?, s.q_width()) } else { (x, pitch) };
        // SAFETY: the argument lists are the kernels'; the caller guarantees the addresses.
        unsafe {
            if wgmma_attention(&self.device, d) {
                let from_q = TensorMap::heads(Dtype::F16, q, d, rows, s.heads, s.q_width(), 128)?;
                let from_k = TensorMap::heads(Dtype::F16, kv, d, tokens, s.kv_heads, kv_width, 128)?;
                let from_v = TensorMap::heads(Dtype::F16, values, d, tokens, s.kv_heads, kv_width, 128)?;
                let element = if s.dtype == Dtype::Bf16 { Dtype::Bf16 } else { Dtype::F16 };
                let to = TensorMap::heads(element, out, d, rows, s.heads, out_pitch, 64)?;
                let arguments = [
                    from_q.arg(),
                    from_k.arg(),
                    from_v.arg(),
                    to.arg(),
                    rows.into(),
                    start.into(),
                    group.into(),
                    scale.into(),
                    reach.into(),
                ];
                let (kernels, block) =
                    few.map_or((self.attend, PROMPT_WGMMA_THREADS), |few| (few, PROMPT_WGMMA_FEW_THREADS));
                let launch = Launch { grid, block: block as u32, shared, overlap: false };
                self.device.launch(kernels[local], launch, &arguments)?;
            } else {
                let strides = [s.q_width() as u64, kv_width as u64, out_pitch as u64];
                let arguments =
                    args![q, kv, values, out, rows, start, group, strides[0], strides[1], strides[2], scale, reach];
                let launch = Launch { grid, block: PROMPT_MMA_THREADS as u32, shared, overlap: false };
                self.device.launch(self.attend[local], launch, &arguments)?;
            }
            if s.dtype == Dtype::F32 {
                // Heads have a multiple of 64 channels, so rows have no padding.
                let count = rows * s.q_width();
                let grid = [count.div_ceil(256) as u32, 1, 1];
                let arguments = args![out, x, count as u64];
                self.device.launch(self.widen, Launch { grid, block: 256, shared: 0, overlap: false }, &arguments)?;
            }
        }
        Ok(())
    }

    /// The last projection of a branch of a block, added to its hidden states. If there is a norm, the projection has no bias and
    /// is normalised first.
    ///
    /// x `[rows][padded(heads · head_dim)]` of attention, `[rows][padded(intermediate)]` of the MLP; bias and norm f32 `[hidden]`
    /// -> hidden f32 `[rows][hidden]`.
    ///
    /// # Errors
    /// As [`Prefill::qkv`].
    ///
    /// # Safety
    /// As [`Prefill::qkv`].
    pub unsafe fn add(
        &self,
        branch: Branch,
        x: u64,
        weights: u64,
        [bias, norm]: [Option<u64>; 2],
        hidden: u64,
        rows: usize,
    ) -> Result<()> {
        self.begin(rows)?;
        let (n, bias) = (self.shape.hidden, bias.unwrap_or(0));
        let k = match branch {
            Branch::Attention => self.shape.q_width(),
            Branch::Mlp => self.shape.intermediate,
        };
        // SAFETY: the argument lists are the kernels'; the scratch holds [rows][hidden] f32; the caller guarantees the other
        // addresses.
        unsafe {
            match (norm, &self.kernels) {
                (Some(norm), _) => {
                    let y = self.plain(x, k, weights, n, rows)?;
                    self.norm_rows([y, hidden], [n; 2], norm, n, true, rows)
                }
                (None, Kernels::Hopper { residual, .. }) => {
                    self.add_gemm(residual, x, k, weights, bias, hidden, n, rows)
                }
                (None, Kernels::Tensor { residual, .. }) => {
                    let arguments = args![x, weights, hidden, bias, rows, n, k, padded(k), TILE_ROW_GROUP];
                    self.launch_mma(*residual, rows, n, &arguments)
                }
                (None, Kernels::Plain { add_rows, .. }) => {
                    let y = self.plain(x, k, weights, n, rows)?;
                    let grid = [(rows * n).div_ceil(1024) as u32, 1, 1];
                    let arguments = args![hidden, y, bias, (rows * n) as u64, n];
                    self.device.launch(*add_rows, Launch { grid, block: 256, shared: 0, overlap: false }, &arguments)
                }
            }
        }
    }

    /// Normalises f32 rows of `width` from one address to another, each with its pitch in elements.
    unsafe fn norm_rows(
        &self,
        [from, to]: [u64; 2],
        [pitch, to_pitch]: [usize; 2],
        norm: u64,
        width: usize,
        add: bool,
        rows: usize,
    ) -> Result<()> {
        let arguments = args![from, pitch, to, to_pitch, norm, self.shape.rms_eps, width, 0usize, usize::from(add)];
        let launch =
            Launch { grid: [rows as u32, 1, 1], block: shapes::NORM_THREADS as u32, shared: 0, overlap: false };
        // SAFETY: the argument list is the kernel's; the caller guarantees the addresses.
        unsafe { self.device.launch(self.norm_rows, launch, &arguments) }
    }

    /// Gate and up projections of a block, and activation(gate) · up.
    ///
    /// x `[rows][padded(hidden)]`; weights and bias with gate and up interleaved by eight rows -> out
    /// `[rows][padded(intermediate)]` in the weights' type.
    ///
    /// # Errors
    /// As [`Prefill::qkv`].
    ///
    /// # Safety
    /// As [`Prefill::qkv`].
    pub unsafe fn gate_up(&self, x: u64, weights: u64, bias: Option<u64>, out: u64, rows: usize) -> Result<()> {
        self.begin(rows)?;
        let s = &self.shape;
        let (n, pitch, bias) = (2 * s.intermediate, padded(s.intermediate), bias.unwrap_or(0));
        // SAFETY: the argument lists are the kernels'; the caller guarantees the addresses.
        unsafe {
            match &self.kernels {
                Kernels::Hopper { gated, .. } => {
                    let (tile, kernel) = gated.choose(rows, n, self.device.info.sms)?;
                    let (a, w) = self.inputs(&tile, x, s.hidden, weights, n, rows)?;
                    let to = TensorMap::matrix(s.dtype, out, s.intermediate, rows, pitch, [64, 64])?;
                    let arguments = [
                        a.arg(),
                        w.arg(),
                        to.arg(),
                        bias.into(),
                        rows.into(),
                        n.into(),
                        s.hidden.into(),
                        TILE_ROW_GROUP.into(),
                    ];
                    self.launch_tile(&tile, kernel, rows, n, &arguments)
                }
                Kernels::Tensor { gated, .. } => {
                    let arguments =
                        args![x, weights, out, bias, pitch, rows, n, s.hidden, padded(s.hidden), TILE_ROW_GROUP];
                    self.launch_mma(*gated, rows, n, &arguments)
                }
                Kernels::Plain { gated, .. } => {
                    let y = self.plain(x, s.hidden, weights, n, rows)?;
                    let grid = [s.intermediate.div_ceil(1024) as u32, rows as u32, 1];
                    let arguments = args![y, bias, out, s.intermediate, pitch, 0usize];
                    self.device.launch(*gated, Launch { grid, block: 256, shared: 0, overlap: false }, &arguments)
                }
            }
        }
    }

    /// y f32 `[rows][n]` += x · weightsᵀ + bias, by the GEMM `residual`.
    ///
    /// # Safety
    /// As [`Prefill::qkv`].
    #[allow(clippy::too_many_arguments, reason = "as for `qkv`")]
    unsafe fn add_gemm(
        &self,
        residual: &Gemm,
        x: u64,
        k: usize,
        weights: u64,
        bias: u64,
        y: u64,
        n: usize,
        rows: usize,
    ) -> Result<()> {
        let (tile, kernel) = residual.choose(rows, n, self.device.info.sms)?;
        let (a, w) = self.inputs(&tile, x, k, weights, n, rows)?;
        let to = TensorMap::matrix(Dtype::F32, y, n, rows, n, [32, 64])?;
        let arguments =
            [a.arg(), w.arg(), to.arg(), bias.into(), rows.into(), n.into(), k.into(), TILE_ROW_GROUP.into()];
        // SAFETY: the argument list is the kernel's; the caller guarantees the addresses.
        unsafe { self.launch_tile(&tile, kernel, rows, n, &arguments) }
    }

    /// x · weightsᵀ in the scratch, f32 `[rows][n]`; returns its address. On Hopper the scratch is cleared, and the GEMM adds to
    /// it.
    unsafe fn plain(&self, x: u64, k: usize, weights: u64, n: usize, rows: usize) -> Result<u64> {
        let Some(scratch) = &self.scratch else { return Err(Error::internal("prefill without scratch")) };
        let y = scratch.at(0);
        // SAFETY: the argument lists are the kernels'; the caller guarantees the addresses.
        unsafe {
            match &self.kernels {
                Kernels::Tensor { plain, .. } => {
                    let arguments = args![x, weights, y, rows, n, k, padded(k), TILE_ROW_GROUP];
                    self.launch_mma(*plain, rows, n, &arguments)
                }
                Kernels::Plain { plain, .. } => {
                    let grid = [n.div_ceil(64) as u32, rows.div_ceil(64) as u32, 1];
                    let arguments = args![x, weights, y, rows, n, k, padded(k)];
                    self.device.launch(*plain, Launch { grid, block: 256, shared: 0, overlap: false }, &arguments)
                }
                Kernels::Hopper { residual, .. } => {
                    scratch.fill_rows(0, 0, n * 4, n * 4, rows)?;
                    self.add_gemm(residual, x, k, weights, 0, y, n, rows)
                }
            }?;
        }
        Ok(y)
    }

    /// Refuses blocks larger than prepared, and makes the device's context current, which encoding tensor maps needs.
    fn begin(&self, rows: usize) -> Result<()> {
        if rows == 0 || rows > self.rows {
            return Err(Error::internal(format!("a prefill block of {rows} rows; {} are prepared", self.rows)));
        }
        self.device.bind()
    }

    fn scratch(&self) -> Result<u64> {
        self.scratch.as_ref().map(|buffer| buffer.at(0)).ok_or_else(|| Error::internal("prefill without scratch"))
    }

    /// Tensor maps of a GEMM's activations and weights. Whole tiles of rows are read; rows beyond the block affect no row of
    /// it.
    fn inputs(
        &self,
        tile: &Tile,
        x: u64,
        k: usize,
        weights: u64,
        n: usize,
        rows: usize,
    ) -> Result<(TensorMap, TensorMap)> {
        let element = self.shape.dtype;
        let whole = rows.next_multiple_of(tile.rows());
        let a = TensorMap::matrix(element, x, k, whole, padded(k), [64, (tile.rows() / tile.shape.cluster) as u32])?;
        let w = TensorMap::atoms(element, weights, n, k, (tile.shape.columns / tile.shape.cluster / 16) as u32)?;
        Ok((a, w))
    }

    /// # Safety
    /// As [`Device::launch`], with a grid for `rows` × `n` outputs.
    unsafe fn launch_tile(&self, tile: &Tile, kernel: Kernel, rows: usize, n: usize, arguments: &[Arg]) -> Result<()> {
        let blocks = tile.blocks(rows, n, self.device.info.sms);
        let launch = Launch {
            grid: [blocks as u32, 1, 1],
            block: tile.threads(),
            shared: tile.shape.shared as u32,
            overlap: false,
        };
        // SAFETY: handed on.
        unsafe { self.device.launch(kernel, launch, arguments) }
    }

    unsafe fn launch_mma(&self, kernel: Kernel, rows: usize, n: usize, arguments: &[Arg]) -> Result<()> {
        let grid = [(rows.div_ceil(128) * n.div_ceil(128)) as u32, 1, 1];
        let launch = Launch { grid, block: 128, shared: shapes::MMA_SHARED as u32, overlap: false };
        // SAFETY: handed on.
        unsafe { self.device.launch(kernel, launch, arguments) }
    }
}

/// Refuses sizes without kernels.
pub(crate) fn check(shape: &Shape) -> Result<()> {
    for (what, width) in [("hidden size", shape.hidden), ("intermediate size", shape.intermediate)] {
        if width == 0 || !width.is_multiple_of(8) {
            return Err(Error::model(
                format!("{what} {width} on the GPU"),
                "the kernels need a multiple of 8; use --device cpu",
            ));
        }
    }
    if shape.kv_heads == 0 || !shape.heads.is_multiple_of(shape.kv_heads) {
        return Err(Error::internal(format!("{} query heads, {} key heads", shape.heads, shape.kv_heads)));
    }
    Ok(())
}

/// Returns true if attention has its Hopper kernel; outputs of 256 channels would fill all registers.
fn wgmma_attention(device: &Device, head_dim: usize) -> bool {
    device.info.architecture == 90 && head_dim <= 128
}

fn attend_shared_bytes(device: &Device, head_dim: usize) -> usize {
    match head_dim {
        _ if wgmma_attention(device, head_dim) => shapes::PROMPT_WGMMA_CHANNEL * head_dim + shapes::PROMPT_WGMMA_MORE,
        ..=128 => shapes::PROMPT_MMA_CHANNEL * head_dim,
        _ => shapes::PROMPT_MMA_CHANNEL_256 * head_dim,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_depends_on_architecture_and_number_format() {
        assert_eq!(Path::of(90, Dtype::Bf16), Path::Hopper);
        assert_eq!(Path::of(90, Dtype::F32), Path::Plain);
        assert_eq!(Path::of(75, Dtype::F16), Path::Tensor);
        assert_eq!(Path::of(75, Dtype::Bf16), Path::Plain);
        assert_eq!(Path::of(120, Dtype::Bf16), Path::Tensor);
    }
}
