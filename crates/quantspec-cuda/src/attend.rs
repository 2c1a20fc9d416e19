//! Launches of decode attention (kernels/attend.cu).

mod pages;
mod slices;

pub use self::pages::PageChoice;
use self::pages::PageKernels;
use self::slices::Division;
pub(crate) use self::slices::SLICE_ROWS;
pub use self::slices::{Chosen, Merged, QueryTile, Span, StepSlice};
use crate::detect::DeviceInfo;
use crate::device::{Arg, Device, Kernel, Launch, Plain};
use crate::images;
use crate::linear::{DRAFT_GROUP, Form};
use crate::shapes;
use quantspec_core::config::{Dtype, ModelConfig, Rounding, View};
use quantspec_core::{Error, Result};
use quantspec_model::backend::Row;
use std::sync::Arc;

/// Pipeline stages of TMA loads issued before the previous kernel has ended: the first keys and values. With all stages, that
/// kernel's last loads on other SMs would queue after 18 MB of pages.
const EARLY: i32 = 2;
/// Most shared memory of a block on any GPU.
const SHARED_MAX: usize = 227 << 10;
/// Bytes per SM of the following GEMM's weights that are prefetched into L2 while attention ends: 8 MB on 132 SMs. A step
/// is faster with 4 and with 8 MB, and slower with 16 MB.
const PREFETCH_BYTES: usize = 64 << 10;

/// One kernel of a view.
#[derive(Clone, Copy, Debug)]
struct Variant {
    /// Query rows per KV head.
    rows: usize,
    kernel: Kernel,
    /// Pipeline stages: those the kernel was compiled for, or as many as fit if its threads copy.
    stages: usize,
    shared: usize,
    threads: usize,
}

/// Kernels of a view, and the splits that fill the GPU.
#[derive(Debug)]
struct ViewKernels {
    /// Kernels by rows, ascending.
    variants: Vec<Variant>,
    /// Those of local layers; none if the model has no such layers.
    local: Vec<Variant>,
    /// Splits of one row that fill the GPU.
    splits: usize,
}

/// A view's number in kernels.
const fn view_number(view: View) -> usize {
    match view {
        View::Upper => shapes::UPPER,
        View::Both => shapes::BOTH,
        View::Full => shapes::FULL,
    }
}

/// A view's kernels of a table, ascending by rows: with or without TMA, for whole or half SMs.
fn instances(
    table: &'static [shapes::Attend],
    view: View,
    d: usize,
    tma: bool,
    half_sm: bool,
) -> impl Iterator<Item = &'static shapes::Attend> {
    let is = (d, view_number(view), half_sm, tma);
    table.iter().filter(move |of| (of.d, of.view, of.half_sm, of.stages > 0) == is)
}

/// Most rows of partial results, for `rows` rows with `heads` query heads and at most `splits` splits.
fn most_partial_rows(heads: usize, splits: usize, rows: usize) -> usize {
    rows * heads * splits
}

/// Splits of one row that fill a GPU with `blocks` concurrent blocks.
fn most_splits(blocks: usize, kv_heads: usize) -> usize {
    (blocks / kv_heads).max(1)
}

/// Concurrent blocks of a view per SM. With TMA one block has all warps. Without it, registers and shared memory for four pages
/// in flight are the limits.
fn blocks_per_sm(view: View, d: usize, tma: bool, shared_bytes: usize) -> usize {
    if tma {
        return 1;
    }
    let registers = if view == View::Upper { 4 } else { 2 };
    let smallest = instances(shapes::ATTEND, view, d, tma, false).find(|of| of.rows == 8);
    let shared = smallest.map_or(0, |of| of.shared + 4 * of.stage_bytes) + 1024;
    (shared_bytes / shared).clamp(1, registers)
}

/// What [`Attend::partial_rows`] returns at most for this model and device, before the device is open.
pub(crate) fn partial_rows(config: &ModelConfig, sms: usize, architecture: u32, rows: usize) -> usize {
    let blocks = |view| blocks_per_sm(view, config.head_dim, images::has_tma(architecture), SHARED_MAX);
    let blocks = [View::Upper, View::Both, View::Full].map(blocks).into_iter().max().unwrap_or(1);
    most_partial_rows(config.heads, most_splits(sms * blocks, config.kv_heads), rows)
}

/// Refuses head widths without kernels.
pub(crate) fn check_head(device: &DeviceInfo, d: usize) -> Result<()> {
    let hint = "the kernels support 64, 128 and, from compute capability 8.0 on, 256; use --device cpu";
    if device.takes_heads_of(d) {
        return Ok(());
    }
    Err(Error::model(format!("head_dim {d} on a GPU of compute capability {}", device.compute_capability), hint))
}

const fn view_name(view: View) -> &'static str {
    match view {
        View::Upper => "upper",
        View::Both => "both",
        View::Full => "full",
    }
}

/// Addresses of one layer's cache.
#[derive(Clone, Copy, Debug, Default)]
pub struct Layer {
    /// Upper blocks.
    pub upper: u64,
    /// Lower blocks.
    pub lower: u64,
    /// f16 blocks.
    pub full: u64,
    /// Recent keys.
    pub ring_k: u64,
    /// Recent values.
    pub ring_v: u64,
    /// Lists of chosen pages.
    pub lists: u64,
}

/// Device addresses of a slice's description and of the partial results.
#[derive(Clone, Copy, Debug, Default)]
pub struct SliceAddresses {
    /// `Span`s.
    pub spans: u64,
    /// `QueryTile`s.
    pub tiles: u64,
    /// [`Merged`]s of the rows.
    pub merged: u64,
    /// Page tables `[slot][table_pitch]`.
    pub tables: u64,
    /// Entries of a page table.
    pub table_pitch: usize,
    /// Entries of a list.
    pub list_pitch: usize,
    /// f32 `[partial row][head_dim]`.
    pub partial: u64,
    /// float2 `[partial row]`.
    pub extremes: u64,
}

/// Properties of the operations before and after attention that affect its launch.
#[derive(Clone, Copy, Debug, Default)]
pub struct Neighbours {
    /// Between GEMMs of a draft whose blocks use half an SM.
    pub half_sm: bool,
    /// Address and bytes that the following GEMM reads first; prefetched into L2 while memory is idle.
    pub prefetch: (u64, usize),
    /// The following GEMM's input, if [`Attend::writes_codes`]; no merge follows then.
    pub codes: Option<Codes>,
}

/// The output projection's int8 input.
#[derive(Clone, Copy, Debug)]
pub struct Codes {
    /// Address of the codes of the step's row 0.
    pub x: u64,
    /// Address of their scales and sums.
    pub xs: u64,
    /// Their order: [`crate::linear::Linear::panels`].
    pub panels: usize,
}

/// `AttendArgs` in kernels/attend.cuh.
#[repr(C)]
#[derive(Clone, Copy)]
struct AttendArgs {
    pools: [u64; 3],
    rings: [u64; 2],
    tables: u64,
    lists: u64,
    q: u64,
    spans: u64,
    tiles: u64,
    partial: u64,
    extremes: u64,
    table_pitch: i32,
    list_pitch: i32,
    kv_heads: i32,
    group: i32,
    tile_count: i32,
    items: i32,
    stages: i32,
    centre: f32,
    prefetch: u64,
    prefetch_bytes: i32,
    reach: i32,
    codes: u64,
    scales: u64,
    panels: i32,
    unused: i32,
}

/// `MergeArgs` in kernels/attend.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct MergeArgs {
    rows: u64,
    partial: u64,
    extremes: u64,
    x: u64,
    xs: u64,
    kv_heads: i32,
    group: i32,
    head_dim: i32,
    pitch: i32,
    first_row: i32,
    panels: i32,
}

const _: () = assert!(size_of::<AttendArgs>() == 168 && size_of::<MergeArgs>() == 64);
// SAFETY: integers and floats only, and the sizes above leave no padding.
unsafe impl Plain for AttendArgs {}
// SAFETY: see above.
unsafe impl Plain for MergeArgs {}

/// Splits steps into work items and launches decode attention, for one model on one device.
#[derive(Debug)]
pub struct Attend {
    device: Arc<Device>,
    kv_heads: usize,
    group: usize,
    head_dim: usize,
    centre: f32,
    upper: ViewKernels,
    both: ViewKernels,
    full: ViewKernels,
    /// View Upper for blocks with half an SM, for drafts whose GEMMs have such blocks.
    half_sm: Vec<Variant>,
    /// By form (bf16, f16, f32, int8, limbs): for few blocks, and for more blocks than SMs.
    merge: [[Kernel; 2]; 5],
    pages: PageKernels,
}

impl Attend {
    /// Finds the kernels.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Model`] for head widths without kernels.
    pub fn new(device: &Arc<Device>, config: &ModelConfig, rounding: Rounding) -> Result<Attend> {
        let d = config.head_dim;
        check_head(&device.info, d)?;
        // The number of blocks that fill the GPU is a constant of the GPU, independent of the call's rows: it determines the
        // order of sums.
        let tma = device.has_tma();
        let variant = |name: String, of: &shapes::Attend, stages: usize| {
            let shared = of.shared + stages * of.stage_bytes;
            Ok::<_, Error>(Variant {
                rows: of.rows,
                kernel: device.kernel(&name, shared)?,
                stages,
                shared,
                threads: of.block,
            })
        };
        let kernels_of = |view: View| -> Result<ViewKernels> {
            let variants = |table, stem: &str| -> Result<Vec<Variant>> {
                let fitting = instances(table, view, d, tma, false).filter_map(|of| {
                    // Without TMA: double buffering of pages, or a single buffer if shared memory is small.
                    let fits = |&stages: &usize| of.shared + stages * of.stage_bytes <= device.shared_bytes;
                    let stages = if tma { of.stages } else { [4, 2].into_iter().find(fits)? };
                    Some(variant(format!("{stem}_{}_{d}_{}", view_name(view), of.rows), of, stages))
                });
                fitting.collect()
            };
            let local =
                if config.local.is_some() { variants(shapes::ATTEND_LOCAL, "attend_local")? } else { Vec::new() };
            let blocks = blocks_per_sm(view, d, tma, device.shared_bytes);
            let splits = most_splits(device.info.sms * blocks, config.kv_heads);
            Ok(ViewKernels { variants: variants(shapes::ATTEND, "attend")?, local, splits })
        };
        let half_sm = instances(shapes::ATTEND, View::Upper, d, tma, true).map(|of| {
            let variant = variant(format!("attend_half_{d}_{}", of.rows), of, of.stages)?;
            device.prefer_shared(variant.kernel, 100)?;
            Ok(variant)
        });
        let merge = |form: Form| -> Result<[Kernel; 2]> {
            let out = form.name();
            Ok([device.kernel(&format!("merge_{out}"), 0)?, device.kernel(&format!("merge_wide_{out}"), 0)?])
        };
        let [bf16, f16, f32] = [Dtype::Bf16, Dtype::F16, Dtype::F32].map(Form::Plain);
        Ok(Attend {
            upper: kernels_of(View::Upper)?,
            both: kernels_of(View::Both)?,
            full: kernels_of(View::Full)?,
            half_sm: half_sm.collect::<Result<_>>()?,
            merge: [merge(bf16)?, merge(f16)?, merge(f32)?, merge(Form::Int8)?, merge(Form::Limbs)?],
            pages: PageKernels::new(device, config)?,
            device: device.clone(),
            kv_heads: config.kv_heads,
            group: config.group(),
            head_dim: d,
            centre: if rounding == Rounding::Balanced { 1.0 / 32.0 } else { 0.0 },
        })
    }

    fn kernels_of(&self, view: View) -> &ViewKernels {
        match view {
            View::Upper => &self.upper,
            View::Both => &self.both,
            View::Full => &self.full,
        }
    }

    /// Most rows of partial results of a slice with `rows` rows.
    pub fn partial_rows(&self, rows: usize) -> usize {
        let splits = [self.upper.splits, self.both.splits, self.full.splits];
        most_partial_rows(self.kv_heads * self.group, splits.into_iter().max().unwrap_or(1), rows)
    }

    /// Splits the rows of a step into slices. `chosen` gives the page list of a slot's draft, or None for all pages. `fresh`:
    /// this step chooses the list, so it is ready only when the previous kernel has ended. `drafts`: rows of drafts, whose
    /// division into splits may depend on the number of sequences; a target's may not.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] if no kernel of the view fits this device's shared memory.
    pub fn slices(
        &self,
        view: View,
        rows: &[Row],
        chosen: impl Fn(usize) -> Option<Chosen>,
        fresh: impl Fn(usize) -> bool,
        drafts: bool,
    ) -> Result<Vec<StepSlice>> {
        Ok(self.division(view, None, drafts)?.slices(rows, chosen, fresh))
    }

    /// As [`Attend::slices`], for local layers whose queries see `reach` tokens: of every page of these.
    ///
    /// # Errors
    /// As [`Attend::slices`].
    pub fn local_slices(&self, view: View, rows: &[Row], reach: usize, drafts: bool) -> Result<Vec<StepSlice>> {
        Ok(self.division(view, Some(reach), drafts)?.slices(rows, |_| None, |_| false))
    }

    fn division(&self, view: View, reach: Option<usize>, drafts: bool) -> Result<Division> {
        let of_view = self.kernels_of(view);
        let variants = if reach.is_some() { &of_view.local } else { &of_view.variants };
        let most_rows = variants.last().map(|v| v.rows).ok_or_else(|| Error::internal("attention without kernels"))?;
        let (most_splits, kv_heads, group) = (of_view.splits, self.kv_heads, self.group);
        Ok(Division { most_splits, most_rows, kv_heads, group, reach, drafts })
    }

    /// Returns true if [`Attend::run`] can write the output projection's int8 input itself: with one split per row
    /// there is nothing to merge. Its bits are those of [`Attend::merge`].
    pub fn writes_codes(&self, view: View, slice: &StepSlice) -> bool {
        view == View::Upper && self.head_dim == DRAFT_GROUP && !slice.merges()
    }

    /// Attention of a slice's rows in one layer, into the partial results, or into `neighbours.codes`.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] if the slice was planned for more rows than kernels of the view take, and for
    /// codes without [`Attend::writes_codes`]. Device errors of the launch, named by the kernel.
    ///
    /// # Safety
    /// `q` f16 `[row of the step][heads][head_dim]`, `layer` and `addresses` must stay valid until the stream has completed this
    /// call; `addresses` must hold `slice` and room for its partial rows.
    pub unsafe fn run(
        &self,
        view: View,
        slice: &StepSlice,
        q: u64,
        layer: &Layer,
        addresses: &SliceAddresses,
        neighbours: Neighbours,
    ) -> Result<()> {
        if neighbours.codes.is_some() && !self.writes_codes(view, slice) {
            return Err(Error::internal("codes of rows with several splits"));
        }
        let (of_view, local) = (self.kernels_of(view), slice.reach.is_some());
        let half_sm =
            self.half_sm.iter().filter(|_| neighbours.half_sm && view == View::Upper && slice.short() && !local);
        let mut variants = half_sm.chain(if local { &of_view.local } else { &of_view.variants });
        let variant = variants.find(|variant| variant.rows >= slice.tile_rows);
        let Variant { kernel, stages, shared, threads, .. } = *variant
            .ok_or_else(|| Error::internal(format!("attention of {} query rows per KV head", slice.tile_rows)))?;
        // With TMA a block has an SM, or half of one, and loops over items.
        let tma = self.device.has_tma();
        let arguments = AttendArgs {
            pools: [layer.upper, layer.lower, layer.full],
            rings: [layer.ring_k, layer.ring_v],
            tables: addresses.tables,
            lists: layer.lists,
            q,
            spans: addresses.spans,
            tiles: addresses.tiles,
            partial: addresses.partial,
            extremes: addresses.extremes,
            table_pitch: addresses.table_pitch as i32,
            list_pitch: addresses.list_pitch as i32,
            kv_heads: self.kv_heads as i32,
            group: self.group as i32,
            tile_count: slice.tiles.len() as i32,
            items: slice.items as i32,
            stages: if tma { EARLY } else { stages as i32 },
            centre: self.centre,
            prefetch: neighbours.prefetch.0,
            prefetch_bytes: neighbours.prefetch.1.min(PREFETCH_BYTES * self.device.info.sms) as i32,
            reach: slice.reach.unwrap_or(0) as i32,
            codes: neighbours.codes.map_or(0, |codes| codes.x),
            scales: neighbours.codes.map_or(0, |codes| codes.xs),
            panels: neighbours.codes.map_or(0, |codes| codes.panels) as i32,
            unused: 0,
        };
        let blocks = if tma { slice.items.min(self.device.info.sms) } else { slice.items };
        let grid = [blocks as u32, 1, 1];
        // SAFETY: the argument is the kernel's; the caller guarantees its addresses.
        unsafe {
            self.device.launch(
                kernel,
                Launch { grid, block: threads as u32, shared: shared as u32, overlap: true },
                &[Arg::of(&arguments)],
            )
        }
    }

    /// Merges the splits of a slice's rows into the input of the output projection, of a `form`: x, and scales `xs` of integers.
    /// It is in `panels` ([`crate::linear::Linear::panels_of`], [`crate::linear::Linear::panels`]); if that is 0, it is
    /// `[row][pitch]`.
    ///
    /// # Errors
    /// Device errors of the launch, named by the kernel.
    ///
    /// # Safety
    /// As [`Attend::run`]; x and xs are those of row 0 of the step.
    #[expect(clippy::too_many_arguments, reason = "one address per matrix")]
    pub unsafe fn merge(
        &self,
        slice: &StepSlice,
        form: Form,
        x: u64,
        xs: u64,
        pitch: usize,
        panels: usize,
        addresses: &SliceAddresses,
    ) -> Result<()> {
        let [narrow, wide] = match form {
            Form::Plain(Dtype::Bf16) => self.merge[0],
            Form::Plain(Dtype::F16) => self.merge[1],
            Form::Plain(Dtype::F32) => self.merge[2],
            Form::Int8 => self.merge[3],
            Form::Limbs => self.merge[4],
        };
        let arguments = MergeArgs {
            rows: addresses.merged,
            partial: addresses.partial,
            extremes: addresses.extremes,
            x,
            xs,
            kv_heads: self.kv_heads as i32,
            group: self.group as i32,
            head_dim: self.head_dim as i32,
            pitch: pitch as i32,
            first_row: slice.first_row as i32,
            panels: panels as i32,
        };
        let groups = (self.kv_heads * self.group * self.head_dim).div_ceil(DRAFT_GROUP);
        let kernel = if groups * slice.merged.len() > self.device.info.sms { wide } else { narrow };
        let grid = [groups as u32, slice.merged.len() as u32, 1];
        // SAFETY: the argument is the kernel's; the caller guarantees its addresses.
        unsafe {
            self.device.launch(kernel, Launch { grid, block: 128, shared: 0, overlap: true }, &[Arg::of(&arguments)])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_fits_a_block() {
        for of in shapes::ATTEND.iter().chain(shapes::ATTEND_LOCAL) {
            // Shared memory of a block on Hopper, and of each of two blocks that share an SM's 228 KiB; the driver reserves 1
            // KiB per block.
            let most = if of.half_sm { 113 * 1024 } else { 227 * 1024 };
            assert!(of.shared + of.stages * of.stage_bytes <= most, "{of:?}");
        }
    }
}
