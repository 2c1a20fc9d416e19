//! Decode attention: how a step's rows are cut into spans, parts and items, and the launches (kernels/attend.cu).

use crate::args;
use crate::device::{Arg, Device, Kernel, Launch, Plain};
use crate::linear::{GROUP, name};
use quantspec_core::cache::{G, visible_pages, visible_quantised};
use quantspec_core::config::{Dtype, ModelConfig, Rounding, View};
use quantspec_core::{Error, Result};
use quantspec_model::backend::Row;
use std::sync::Arc;

/// Most pages of an item (`CHUNK_MAX`).
const CHUNK_MAX: usize = 128;
/// Fewest: an item of one page would spend more on its start and its partial result than on the page.
const CHUNK_MIN: usize = 2;
/// Most blocks of a view that are on a multiprocessor together, by their registers (`__launch_bounds__` in kernels/attend.cu).
const BLOCKS_MAX: usize = 4;
/// Rows one launch takes; more are attended in turns, so that partial results stay small.
pub(crate) const PASS_ROWS: usize = 64;

/// Consecutive rows of one slot that share a chunk length; `Span` in kernels/attend.cuh.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    slot: i32,
    row: i32,
    queries: i32,
    position: i32,
    chunk_pages: i32,
    chunks: i32,
    first_block: i32,
    blocks: i32,
    list: i32,
    listed: i32,
    cap: i32,
    partial: i32,
}

/// Query rows of a span that one block works on; `Part` in kernels/attend.cuh.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Part {
    span: i32,
    row: i32,
    rows: i32,
    padding: i32,
}

/// What a list of pages is chosen for; `Choice` in kernels/attend.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    /// Row of q whose group chooses.
    pub row: i32,
    /// Slot.
    pub slot: i32,
    /// Visible pages.
    pub pages: i32,
}

const _: () = assert!(size_of::<Span>() == 48 && size_of::<Part>() == 16 && size_of::<Choice>() == 12);

// SAFETY: thirty-two-bit numbers only.
unsafe impl Plain for Span {}
// SAFETY: see above.
unsafe impl Plain for Part {}
// SAFETY: see above.
unsafe impl Plain for Choice {}

/// The pages a slot's draft reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// Pages on the list.
    pub listed: usize,
    /// Pages that were visible when they were chosen.
    pub visible: usize,
}

/// A launch: spans with their parts, over rows `first_row .. first_row + rows` of the step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pass {
    /// Spans.
    pub spans: Vec<Span>,
    /// Parts.
    pub parts: Vec<Part>,
    /// Span of each row of the pass.
    pub row_spans: Vec<i32>,
    /// First row of the step.
    pub first_row: usize,
    items: usize,
    part_rows: usize,
    partial_rows: usize,
}

impl Pass {
    /// What decides the launches of this pass, beside addresses.
    pub(crate) fn launches(&self) -> [u64; 6] {
        let rows = self.row_spans.len();
        [self.first_row, self.items, self.part_rows, self.parts.len(), self.spans.len(), rows].map(|n| n as u64)
    }
}

/// Pages of an item for a row that sees `visible` pages: about `items` items, from a ladder of lengths with steps of an eighth, so that it
/// changes seldom and a function of the row's position decides it.
fn chunk_pages(visible: usize, items: usize) -> usize {
    let step = (visible.max(1).next_power_of_two() / 16).max(1);
    visible.next_multiple_of(step).div_ceil(items).clamp(CHUNK_MIN, CHUNK_MAX)
}

/// How a view is split and which kernels it has.
#[derive(Debug)]
struct Split {
    /// Kernels by row tiles, ascending.
    kernels: Vec<(usize, Kernel, Stages)>,
    /// Items per KV head that fill the device.
    items: usize,
}

/// Shared memory of a kernel with the next page under way, and without where that does not fit.
#[derive(Clone, Copy, Debug)]
struct Stages {
    stages: usize,
    shared: usize,
}

/// Bytes of a stage and of the rest, as `Attend` in kernels/attend.cuh.
fn shared_bytes(view: View, d: usize, nt: usize, stages: usize) -> usize {
    let tokens = if view == View::Upper { 32 } else { 64 };
    let packed = (4 * d).max(512) + 64 * d * if view == View::Both { 2 } else { 1 };
    let plain = tokens * d * 2;
    let slot = if view == View::Full { plain } else { packed.max(plain) };
    let pitch = if nt % 2 == 1 { nt * 16 } else { nt * 16 + 16 };
    let queries = nt * 16 * d * if view == View::Full { 1 } else { 2 };
    stages * slot + queries + 128 * pitch + nt * 8 * (16 + 32) + CHUNK_MAX * 8
}

/// Partial results of `rows` rows with `heads` query heads where a view is cut into at most `items` items.
fn most_partial_rows(heads: usize, items: usize, capacity: usize, rows: usize) -> usize {
    let pages = visible_pages(capacity);
    let most = items.max(pages.div_ceil(CHUNK_MAX)).min(pages.div_ceil(CHUNK_MIN));
    // Four recent blocks at most: two that a row sees, one more for the rows of a window, one more for an older list.
    rows * heads * (most + 4)
}

/// [`Attend::partial_rows`] of a model before a device is open.
pub(crate) fn partial_rows(config: &ModelConfig, multiprocessors: usize, capacity: usize, rows: usize) -> usize {
    most_partial_rows(config.heads, (multiprocessors * BLOCKS_MAX / config.kv_heads).max(1), capacity, rows)
}

const fn view_name(view: View) -> &'static str {
    match view {
        View::Upper => "upper",
        View::Both => "both",
        View::Full => "full",
    }
}

/// Where one layer's cache lies.
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

/// Device addresses of a pass's description and of the partial results.
#[derive(Clone, Copy, Debug, Default)]
pub struct Places {
    /// `Span`s.
    pub spans: u64,
    /// `Part`s.
    pub parts: u64,
    /// Span of each row.
    pub row_spans: u64,
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
    parts: u64,
    partial: u64,
    extremes: u64,
    table_pitch: i32,
    list_pitch: i32,
    kv_heads: i32,
    group: i32,
    stages: i32,
    centre: f32,
}

/// `MergeArgs` in kernels/attend.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct MergeArgs {
    spans: u64,
    row_spans: u64,
    partial: u64,
    extremes: u64,
    x: u64,
    xs: u64,
    kv_heads: i32,
    group: i32,
    head_dim: i32,
    pitch: i32,
    first_row: i32,
    unused: i32,
}

const _: () = assert!(size_of::<AttendArgs>() == 120 && size_of::<MergeArgs>() == 72);
// SAFETY: numbers only, and the sizes above leave no room for padding.
unsafe impl Plain for AttendArgs {}
// SAFETY: see above.
unsafe impl Plain for MergeArgs {}

/// Plans and launches decode attention for one model on one device.
#[derive(Debug)]
pub struct Attend {
    device: Arc<Device>,
    kv_heads: usize,
    group: usize,
    head_dim: usize,
    centre: f32,
    upper: Split,
    both: Split,
    full: Split,
    merge: [Kernel; 4],
    bounds: Kernel,
    select: Kernel,
}

impl Attend {
    /// Finds the kernels.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Model`] for head widths without kernels.
    pub fn new(device: &Arc<Device>, config: &ModelConfig, rounding: Rounding) -> Result<Attend> {
        let d = config.head_dim;
        if !matches!(d, 64 | 128) {
            return Err(Error::model(
                format!("head_dim {d} on the GPU"),
                "the kernels know 64 and 128; use --device cpu",
            ));
        }
        // Blocks that stay on a multiprocessor together, by registers (kernels/attend.cu) and shared memory: a constant of the device, whatever the
        // rows of a call, because it belongs to the order of the sums.
        let split = |view: View, tiles: &[usize], registers: usize| -> Result<Split> {
            let per_block = shared_bytes(view, d, 1, 4) + 1024;
            let per_multiprocessor = (device.shared_bytes / per_block).clamp(1, registers);
            let mut kernels = Vec::new();
            for &nt in tiles {
                let Some(stages) =
                    [4, 2].into_iter().find(|&stages| shared_bytes(view, d, nt, stages) <= device.shared_bytes)
                else {
                    continue;
                };
                let shared = shared_bytes(view, d, nt, stages);
                kernels.push((
                    nt,
                    device.kernel(&format!("attend_{}_{d}_{nt}", view_name(view)), shared)?,
                    Stages { stages, shared },
                ));
            }
            Ok(Split { kernels, items: (device.multiprocessors * per_multiprocessor / config.kv_heads).max(1) })
        };
        let merge = |out: &str| device.kernel(&format!("merge_{out}"), 0);
        Ok(Attend {
            upper: split(View::Upper, &[1, 3], BLOCKS_MAX)?,
            both: split(View::Both, &[1, 2, 3, 4], 2)?,
            full: split(View::Full, &[1, 3], 2)?,
            merge: [merge(name(Dtype::Bf16))?, merge(name(Dtype::F16))?, merge(name(Dtype::F32))?, merge("i8")?],
            bounds: device.kernel("bounds", 0)?,
            select: device.kernel("select", 0)?,
            device: device.clone(),
            kv_heads: config.kv_heads,
            group: config.group(),
            head_dim: d,
            centre: if rounding == Rounding::Balanced { 1.0 / 32.0 } else { 0.0 },
        })
    }

    fn split(&self, view: View) -> &Split {
        match view {
            View::Upper => &self.upper,
            View::Both => &self.both,
            View::Full => &self.full,
        }
    }

    /// Most rows of partial results a pass of `rows` rows can leave, for sequences of up to `capacity` tokens.
    pub fn partial_rows(&self, capacity: usize, rows: usize) -> usize {
        let splits = [self.upper.items, self.both.items, self.full.items];
        most_partial_rows(self.kv_heads * self.group, splits.into_iter().max().unwrap_or(1), capacity, rows)
    }

    /// Cuts the rows of a step into passes. `chosen` gives the list of a slot's draft, or nothing for all pages.
    pub fn plan(&self, view: View, rows: &[Row], chosen: impl Fn(usize) -> Option<Chosen>) -> Result<Vec<Pass>> {
        let split = self.split(view);
        let most_rows =
            split.kernels.last().map(|(nt, ..)| nt * 8).ok_or_else(|| Error::internal("attention without kernels"))?;
        let mut passes = Vec::new();
        for (index, chunk) in rows.chunks(PASS_ROWS).enumerate() {
            let mut pass = Pass { first_row: index * PASS_ROWS, ..Pass::default() };
            let mut start = 0;
            while start < chunk.len() {
                let first = chunk[start];
                let list = chosen(first.slot);
                let length = |row: &Row| match list {
                    Some(list) => chunk_pages(list.listed, split.items),
                    None => chunk_pages(visible_pages(row.position), split.items),
                };
                let same = |(offset, row): (usize, &Row)| {
                    row.slot == first.slot && row.position == first.position + offset && length(row) == length(&first)
                };
                let queries =
                    chunk[start..].iter().enumerate().take_while(|&(offset, row)| same((offset, row))).count();
                let last = first.position + queries - 1;
                let cap = list.map_or(i32::MAX as usize, |list| list.visible * G);
                let pages = list.map_or(visible_pages(last), |list| list.listed);
                let chunk_pages = length(&first);
                let first_block = visible_quantised(first.position).min(cap) / G;
                let number = pass.spans.len() as i32;
                let span = Span {
                    slot: first.slot as i32,
                    row: (pass.first_row + start) as i32,
                    queries: queries as i32,
                    position: first.position as i32,
                    chunk_pages: chunk_pages as i32,
                    chunks: pages.div_ceil(chunk_pages) as i32,
                    first_block: first_block as i32,
                    blocks: (last / G + 1 - first_block) as i32,
                    list: first.slot as i32,
                    listed: list.map_or(-1, |list| list.listed as i32),
                    cap: cap as i32,
                    partial: pass.partial_rows as i32,
                };
                let total = queries * self.group;
                let parts = total.div_ceil(most_rows);
                let part_rows = total.div_ceil(parts);
                for row in (0..total).step_by(part_rows) {
                    pass.parts.push(Part {
                        span: number,
                        row: row as i32,
                        rows: part_rows.min(total - row) as i32,
                        padding: 0,
                    });
                }
                let items = (span.chunks + span.blocks) as usize;
                pass.items = pass.items.max(items);
                pass.part_rows = pass.part_rows.max(part_rows);
                pass.partial_rows += items * total * self.kv_heads;
                pass.row_spans.extend(std::iter::repeat_n(number, queries));
                pass.spans.push(span);
                start += queries;
            }
            passes.push(pass);
        }
        Ok(passes)
    }

    /// Attention of a pass's rows in one layer, into the partial results.
    ///
    /// # Safety
    /// `q` f16 `[row of the step][heads][head_dim]`, `layer` and `places` must be good until the stream has passed this call; `places` must hold `pass`
    /// and room for its partial rows.
    pub unsafe fn run(&self, view: View, pass: &Pass, q: u64, layer: &Layer, places: &Places) -> Result<()> {
        let kernels = &self.split(view).kernels;
        let (_, kernel, Stages { stages, shared }) = *kernels
            .iter()
            .find(|(nt, ..)| nt * 8 >= pass.part_rows)
            .ok_or_else(|| Error::internal("more rows than attention takes"))?;
        let arguments = AttendArgs {
            pools: [layer.upper, layer.lower, layer.full],
            rings: [layer.ring_k, layer.ring_v],
            tables: places.tables,
            lists: layer.lists,
            q,
            spans: places.spans,
            parts: places.parts,
            partial: places.partial,
            extremes: places.extremes,
            table_pitch: places.table_pitch as i32,
            list_pitch: places.list_pitch as i32,
            kv_heads: self.kv_heads as i32,
            group: self.group as i32,
            stages: stages as i32,
            centre: self.centre,
        };
        let grid = [pass.items as u32, self.kv_heads as u32, pass.parts.len() as u32];
        // SAFETY: the argument is the kernel's; the caller vouches for what it points to.
        unsafe {
            self.device.launch(
                kernel,
                Launch { grid, block: 128, shared: shared as u32, overlap: true },
                &[Arg::of(&arguments)],
            )
        }
    }

    /// Merges the items of a pass's rows into the input of the output projection: x `[row][pitch]` of `dtype`, or (None) int8 with its scales `xs`.
    ///
    /// # Safety
    /// As [`Attend::run`]; x and xs are those of row 0 of the step.
    pub unsafe fn merge(
        &self,
        pass: &Pass,
        dtype: Option<Dtype>,
        x: u64,
        xs: u64,
        pitch: usize,
        places: &Places,
    ) -> Result<()> {
        let kernel = match dtype {
            Some(Dtype::Bf16) => self.merge[0],
            Some(Dtype::F16) => self.merge[1],
            Some(Dtype::F32) => self.merge[2],
            None => self.merge[3],
        };
        let arguments = MergeArgs {
            spans: places.spans,
            row_spans: places.row_spans,
            partial: places.partial,
            extremes: places.extremes,
            x,
            xs,
            kv_heads: self.kv_heads as i32,
            group: self.group as i32,
            head_dim: self.head_dim as i32,
            pitch: pitch as i32,
            first_row: pass.first_row as i32,
            unused: 0,
        };
        let groups = (self.kv_heads * self.group * self.head_dim).div_ceil(GROUP);
        let grid = [groups as u32, pass.row_spans.len() as u32, 1];
        // SAFETY: the argument is the kernel's; the caller vouches for what it points to.
        unsafe {
            self.device.launch(kernel, Launch { grid, block: 256, shared: 0, overlap: true }, &[Arg::of(&arguments)])
        }
    }

    /// Chooses pages: the first, the newest and the best of one layer, `n` per KV head, into `layer.lists[list]`. With `scores` 0 the newest are best.
    ///
    /// # Safety
    /// As [`Attend::run`]; `choices` are `count` [`Choice`]s, `scores` f32 `[count][kv_heads][table_pitch]` or 0.
    #[expect(clippy::too_many_arguments, reason = "one address per matrix")]
    pub unsafe fn choose(
        &self,
        choices: u64,
        count: usize,
        pages: usize,
        n: usize,
        q: u64,
        scores: u64,
        layer: &Layer,
        places: &Places,
    ) -> Result<()> {
        // SAFETY: the argument lists are the kernels'; the caller vouches for the addresses.
        unsafe {
            if scores != 0 {
                let arguments = args![
                    layer.upper,
                    places.tables,
                    places.table_pitch,
                    q,
                    choices,
                    scores,
                    places.table_pitch,
                    self.kv_heads,
                    self.group,
                    self.head_dim,
                    self.centre
                ];
                let grid = [pages.div_ceil(8) as u32, self.kv_heads as u32, count as u32];
                self.device.launch(self.bounds, Launch { grid, block: 256, shared: 0, overlap: true }, &arguments)?;
            }
            let arguments =
                args![scores, places.table_pitch, choices, layer.lists, places.list_pitch, self.kv_heads, n];
            let grid = [self.kv_heads as u32, count as u32, 1];
            self.device.launch(self.select, Launch { grid, block: 1024, shared: 0, overlap: true }, &arguments)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunk_lengths_grow_slowly_and_fill_the_device() {
        for items in [1, 8, 33, 264] {
            let mut last = 0;
            for visible in 0..10_000 {
                let pages = chunk_pages(visible, items);
                assert!(pages >= last && (CHUNK_MIN..=CHUNK_MAX).contains(&pages));
                // No more items than fill the device, unless an item is as long as may be.
                assert!(visible.div_ceil(pages) <= items || pages == CHUNK_MAX);
                // Not many fewer: the ladder rounds up by an eighth, and then to whole pages.
                let exact = visible as f64 / items as f64;
                assert!((pages as f64) <= (exact * 1.126 + 1.0).max(CHUNK_MIN as f64), "{visible} {items} {pages}");
                last = pages;
            }
        }
    }
}
