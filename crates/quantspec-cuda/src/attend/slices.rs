//! Division of a step's rows into slices, spans, tiles of query rows and work items.

use crate::device::Plain;
use quantspec_core::cache::{G, first_visible, visible_pages, visible_quantised};
use quantspec_model::backend::Row;

/// Fewest pages of a split; for a single page, start-up and partial result take longer than the page.
const SPLIT_MIN: usize = 2;
/// Most pages of a draft's split if there are more work items than blocks. Longer splits spread badly over the blocks; in
/// shorter ones the start takes a large part of the time.
const DRAFT_SPLIT: usize = 16;
/// Splits that share the recent tokens of a row that sees few pages.
const RECENT_SPLITS: usize = 4;
/// Most pages of a split for which blocks with half an SM are used: rounds are 2 to 9 % faster with up to 16 pages, and slower
/// with 64.
const HALF_SM_PAGES: usize = 16;
/// Most rows of one launch. More rows take several launches, which keeps partial results small.
pub(crate) const SLICE_ROWS: usize = 64;

/// Consecutive rows of one slot that share a split length; `Span` in kernels/attend.cuh.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    slot: i32,
    row: i32,
    queries: i32,
    position: i32,
    split_pages: i32,
    splits: i32,
    first_block: i32,
    list: i32,
    listed: i32,
    cap: i32,
    partial: i32,
    fresh: i32,
}

/// Query rows of a span that one block processes; `QueryTile` in kernels/attend.cuh.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueryTile {
    span: i32,
    row: i32,
    rows: i32,
    first: i32,
}

/// Position of a row's splits in the partial results; `Merged` in kernels/attend.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Merged {
    first: i32,
    splits: i32,
    total: i32,
    unused: i32,
}

const _: () = assert!(size_of::<Span>() == 48 && size_of::<QueryTile>() == 16 && size_of::<Merged>() == 16);

// SAFETY: thirty-two-bit numbers only.
unsafe impl Plain for Span {}
// SAFETY: see above.
unsafe impl Plain for QueryTile {}
// SAFETY: see above.
unsafe impl Plain for Merged {}

/// The pages that a slot's draft reads, as numbers of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// Pages on the list.
    pub listed: usize,
    /// Pages that were visible at the choice.
    pub visible: usize,
}

/// Up to `SLICE_ROWS` rows of a step, which one launch attends: spans over rows `first_row ..`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepSlice {
    /// Spans.
    pub spans: Vec<Span>,
    /// Tiles of query rows.
    pub tiles: Vec<QueryTile>,
    /// Splits to merge for each row of the slice.
    pub merged: Vec<Merged>,
    /// Row of the step at which the slice begins.
    pub first_row: usize,
    /// Tokens that a row sees, for a local layer.
    pub(super) reach: Option<usize>,
    /// Pages of the longest split.
    longest: usize,
    /// Work items: one for each split of each tile and KV head.
    pub(super) items: usize,
    pub(super) tile_rows: usize,
    partial_rows: usize,
}

impl StepSlice {
    /// Everything except addresses that determines the launches of this slice.
    pub(crate) fn key(&self) -> [u64; 7] {
        let (rows, short) = (self.merged.len(), usize::from(self.short()));
        [self.first_row, self.items, self.tile_rows, self.tiles.len(), self.spans.len(), rows, short].map(|n| n as u64)
    }

    /// Adds a span, with tiles of at most `most_rows` query rows. `group`: query heads of each of `kv_heads` KV heads.
    fn push(&mut self, span: Span, group: usize, kv_heads: usize, most_rows: usize) {
        let (queries, splits) = (span.queries as usize, span.splits as usize);
        let total = queries * group;
        let tile_rows = total.div_ceil(total.div_ceil(most_rows));
        let number = self.spans.len() as i32;
        for row in (0..total).step_by(tile_rows) {
            let rows = tile_rows.min(total - row) as i32;
            self.tiles.push(QueryTile { span: number, row: row as i32, rows, first: self.items as i32 });
            self.items += splits * kv_heads;
        }
        self.tile_rows = self.tile_rows.max(tile_rows);
        self.merged.extend((0..queries).map(|query| Merged {
            first: (self.partial_rows + query * group) as i32,
            splits: span.splits,
            total: total as i32,
            unused: 0,
        }));
        self.longest = self.longest.max(span.split_pages as usize);
        self.partial_rows += splits * total * kv_heads;
        self.spans.push(span);
    }

    /// Returns true if a row has several splits, whose results must be merged.
    pub(super) fn merges(&self) -> bool {
        self.merged.iter().any(|row| row.splits != 1)
    }

    /// Returns true if blocks with half an SM suffice, between GEMMs that also use half.
    pub(super) fn short(&self) -> bool {
        self.longest <= HALF_SM_PAGES
    }
}

/// (pages per split, splits) for a row that sees `visible` pages: at most `most` splits. It depends on the row's position
/// alone, in steps of an eighth, so that neighbouring positions seldom differ.
fn cut(visible: usize, most: usize) -> (usize, usize) {
    let step = (visible.max(1).next_power_of_two() / 16).max(1);
    let rounded = visible.next_multiple_of(step);
    let pages = rounded.div_ceil(most).max(SPLIT_MIN);
    (pages, rounded.div_ceil(pages).max(RECENT_SPLITS.min(most)))
}

/// The pages of a row in a local layer: the first, and pages per split and splits, the same at every position.
fn cut_local(position: usize, reach: usize, most: usize) -> (usize, (usize, usize)) {
    (first_visible(position, reach) / G, cut(reach.div_ceil(G), most))
}

/// Most splits of a draft's row that reads `pages` pages, in a step of `sequences` sequences; `most` of one row fill the GPU.
/// A draft may divide its rows by the size of the batch, as its rounding changes no token.
fn draft_splits(most: usize, sequences: usize, pages: usize) -> usize {
    (most / sequences).max(pages.div_ceil(DRAFT_SPLIT)).clamp(1, most)
}

/// How the rows of a step are divided.
#[derive(Clone, Copy, Debug)]
pub(super) struct Division {
    /// Splits of one row that fill the GPU.
    pub(super) most_splits: usize,
    /// Most query rows of a tile.
    pub(super) most_rows: usize,
    pub(super) kv_heads: usize,
    /// Query heads per KV head.
    pub(super) group: usize,
    /// Tokens that a row sees, for a local layer.
    pub(super) reach: Option<usize>,
    /// True for rows of drafts. Their division may depend on the number of sequences; that of a target's rows may not.
    pub(super) drafts: bool,
}

impl Division {
    /// Slices of the rows; `chosen` and `fresh` as of [`super::Attend::slices`].
    pub(super) fn slices(
        &self,
        rows: &[Row],
        chosen: impl Fn(usize) -> Option<Chosen>,
        fresh: impl Fn(usize) -> bool,
    ) -> Vec<StepSlice> {
        let slices = rows.chunks(SLICE_ROWS).enumerate();
        slices.map(|(index, rows)| self.slice(index * SLICE_ROWS, rows, &chosen, &fresh)).collect()
    }

    fn slice(
        &self,
        first_row: usize,
        rows: &[Row],
        chosen: &impl Fn(usize) -> Option<Chosen>,
        fresh: &impl Fn(usize) -> bool,
    ) -> StepSlice {
        let mut slice = StepSlice { first_row, reach: self.reach, ..StepSlice::default() };
        // Rows of a sequence are adjacent.
        let sequences = rows.chunk_by(|row, next| row.slot == next.slot).count();
        let most = self.most_splits;
        let of_row = |pages| if self.drafts { draft_splits(most, sequences, pages) } else { most };
        let mut start = 0;
        while start < rows.len() {
            let first = rows[start];
            let list = chosen(first.slot);
            // The first page, and how the pages from there on are cut.
            let length = |row: &Row| match self.reach {
                Some(reach) => cut_local(row.position, reach, of_row(reach.div_ceil(G))),
                None => {
                    let pages = list.map_or(visible_pages(row.position), |list| list.listed);
                    (0, cut(pages, of_row(pages)))
                }
            };
            let same = |(offset, row): (usize, &Row)| {
                row.slot == first.slot && row.position == first.position + offset && length(row) == length(&first)
            };
            let queries = rows[start..].iter().enumerate().take_while(|&(offset, row)| same((offset, row))).count();
            let cap = list.map_or(i32::MAX as usize, |list| list.visible * G);
            let (_, (split_pages, splits)) = length(&first);
            let span = Span {
                slot: first.slot as i32,
                row: (first_row + start) as i32,
                queries: queries as i32,
                position: first.position as i32,
                split_pages: split_pages as i32,
                splits: splits as i32,
                first_block: (visible_quantised(first.position).min(cap) / G) as i32,
                list: first.slot as i32,
                listed: list.map_or(-1, |list| list.listed as i32),
                cap: cap as i32,
                partial: slice.partial_rows as i32,
                fresh: (list.is_some() && fresh(first.slot)).into(),
            };
            slice.push(span, self.group, self.kv_heads, self.most_rows);
            start += queries;
        }
        slice
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_grow_slowly_and_fill_the_device() {
        for most in [1, 3, 4, 8, 16, 33, 264] {
            let mut last = 0;
            for visible in 0..10_000 {
                let (pages, splits) = cut(visible, most);
                assert!(pages >= last && pages >= SPLIT_MIN && splits <= most && pages * splits >= visible);
                // Nearly as many splits as fill the GPU: pages per split round up by at most an eighth, then to whole pages.
                let exact = visible as f64 / most as f64;
                assert!((pages as f64) <= (exact * 1.126 + 1.0).max(SPLIT_MIN as f64), "{visible} {most} {pages}");
                last = pages;
            }
        }
    }

    #[test]
    fn splits_of_local_layers_have_every_page() {
        for (reach, most) in [256, 320, 512, 1024, 4096].into_iter().flat_map(|reach| [1, 3, 8, 33].map(|n| (reach, n)))
        {
            for position in 0..3 * reach {
                let (first, (pages, splits)) = cut_local(position, reach, most);
                let last = visible_pages(position + quantspec_core::cache::GAMMA_MAX);
                assert!(splits <= most && first + pages * splits >= last, "{position} {reach} {most}");
                assert!(
                    first * G <= first_visible(position, reach) && first_visible(position, reach) < (first + 1) * G
                );
            }
        }
    }

    #[test]
    fn splits_of_drafts_fill_the_device_with_their_batch() {
        // 16 KV heads on 132 SMs.
        assert_eq!([1, 2, 8, 32].map(|sequences| draft_splits(8, sequences, 16)), [8, 4, 1, 1]);
        assert_eq!([1, 8, 32].map(|sequences| draft_splits(8, sequences, 64)), [8, 4, 4]);
        // One sequence is divided as a target is, and no row has more splits than partial results have room for.
        for (most, pages) in (1..40).flat_map(|most| (0..300).map(move |pages| (most, pages))) {
            assert_eq!(draft_splits(most, 1, pages), most);
            assert!((1..80).all(|sequences| (1..=most).contains(&draft_splits(most, sequences, pages))));
        }
    }
}
