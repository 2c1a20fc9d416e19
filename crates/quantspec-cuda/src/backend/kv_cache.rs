//! Slots: their pages, rings, page tables and lists of chosen pages.

use super::CudaBackend;
use crate::args;
use crate::attend::{Chosen, Layer as CacheLayer, PageChoice};
use crate::device::{Buffer, Device};
use crate::shapes::{PAGE_SHARED, PAGE_SHARED_CHANNEL};
use crate::weights::argument;
use quantspec_core::cache::{BUFFER_TOKENS, G, visible_pages};
use quantspec_core::config::Rounding;
use quantspec_core::config::{ModelConfig, Pages};
use quantspec_core::layout::Layout;
use quantspec_core::page_pool::{PagePool, Prefix};
use quantspec_core::plan::{CacheBytes, pages};
use quantspec_core::{Error, Result};
use quantspec_model::backend::{KvCache, Options, Step};
use std::sync::Arc;

/// One sequence.
#[derive(Debug, Default)]
pub(super) struct Slot {
    /// The list its draft reads, unless it reads all pages.
    pub(super) chosen: Option<Chosen>,
    pub(super) scored_pages: ScoredPages,
}

/// Numbers of pages that have scores, by which a draft of `Pages::Snap` chooses.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ScoredPages {
    /// Pages that the prompt's end sees.
    pub(super) of_prompt: usize,
    /// Pages that were visible at the last refresh; 0 before the first.
    pub(super) refreshed: usize,
}

impl ScoredPages {
    /// For a row that sees `visible` pages: the number of pages to choose among, whether the choice is a refresh, and whether
    /// this row makes it (core's `SnapScores`).
    fn choose(&mut self, pages: Pages, visible: usize, refreshes: bool) -> (usize, bool, bool) {
        if self.refreshed > visible {
            self.refreshed = 0;
        }
        let current = |own: &ScoredPages| if own.refreshed > 0 { own.refreshed } else { own.of_prompt };
        let due = refreshes && pages.is_stale(current(self), visible);
        if due {
            self.refreshed = visible;
        }
        (current(self).min(visible), self.refreshed > 0, due)
    }
}

/// The cache: pools `[layer][page][kv head]`, rings `[layer][slot][kv head]`.
#[derive(Debug)]
pub(super) struct Cache {
    pub(super) upper: Option<Buffer>,
    pub(super) lower: Option<Buffer>,
    pub(super) full: Option<Buffer>,
    pub(super) ring_k: Buffer,
    pub(super) ring_v: Buffer,
    pub(super) pages: PagePool,
    /// The page tables as kernels read them, i32 `[slot][pitch]`.
    pub(super) tables: Buffer,
    pub(super) pitch: usize,
}

impl Cache {
    pub(super) fn new(device: &Arc<Device>, config: &ModelConfig, options: &Options) -> Result<Cache> {
        let count = options.pages();
        let bytes = CacheBytes::of_pool(config, options.planes, count, options.slots);
        let pool = |kept: bool, bytes: usize| if kept { device.allocate(bytes).map(Some) } else { Ok(None) };
        let pitch = table_pitch(options);
        Ok(Cache {
            upper: pool(options.planes.upper, bytes.upper_bytes)?,
            lower: pool(options.planes.lower, bytes.lower_bytes)?,
            full: pool(options.planes.full, bytes.full_bytes)?,
            ring_k: device.allocate(bytes.buffer_bytes / 2)?,
            ring_v: device.allocate(bytes.buffer_bytes / 2)?,
            tables: device.zeroed(table_bytes(options))?,
            pitch,
            pages: PagePool::new(count, options.slots).keeping(options.kept_pages),
        })
    }

    /// Queues clearing a slot's rings. Ring entries without a token are multiplied by probabilities of zero, so they must be
    /// finite. An earlier sequence may have ended on non-finite keys or values.
    fn clean(&self, slot: usize, config: &ModelConfig, slots: usize) -> Result<()> {
        let bytes = config.kv_heads * BUFFER_TOKENS * config.head_dim * size_of::<u16>();
        [&self.ring_k, &self.ring_v]
            .into_iter()
            .try_for_each(|ring| ring.fill_rows(0, slot * bytes, bytes, slots * bytes, config.layers))
    }
}

/// Page lists of drafts that do not read every page.
#[derive(Debug)]
pub(super) struct Lists {
    /// u32 `[layers][slots][KV heads][pitch]`
    pub(super) lists: Buffer,
    /// f32 `[slots][KV heads][pages of a sequence]`
    pub(super) scores: Buffer,
    /// Entries of the longest list: every page of a sequence, or at least the two that are always read.
    pub(super) pitch: usize,
}

impl Lists {
    pub(super) fn pitch(pages: usize) -> usize {
        pages.max(2)
    }

    /// Bytes of lists and scores for sequences of up to `pages` pages.
    pub(super) fn bytes(config: &ModelConfig, slots: usize, pages: usize) -> [usize; 2] {
        let heads = slots * config.kv_heads;
        [config.layers * heads * Lists::pitch(pages) * 4, heads * pages.max(1) * 4]
    }

    pub(super) fn new(device: &Arc<Device>, config: &ModelConfig, slots: usize, pages: usize) -> Result<Lists> {
        let [lists, scores] = Lists::bytes(config, slots, pages);
        Ok(Lists { lists: device.allocate(lists)?, scores: device.allocate(scores)?, pitch: Lists::pitch(pages) })
    }
}

/// Entries of a sequence's page table.
pub(super) fn table_pitch(options: &Options) -> usize {
    pages(options.capacity).max(1)
}

/// Bytes of the page tables.
pub(super) fn table_bytes(options: &Options) -> usize {
    options.slots * table_pitch(options) * 4
}

/// Dynamic shared memory, in bytes, of the kernels that quantise a page of heads with `d` channels.
pub(crate) const fn page_shared(d: usize) -> usize {
    PAGE_SHARED_CHANNEL * d + PAGE_SHARED
}

impl CudaBackend {
    pub(super) fn slot(&self, slot: usize) -> Result<&Slot> {
        let found = self.slots.get(slot).and_then(Option::as_ref);
        found.ok_or_else(|| Error::internal(format!("slot {slot} is not open")))
    }

    pub(super) fn cache_layer(&self, layer: usize) -> CacheLayer {
        let heads = self.config.kv_heads;
        let d = self.config.head_dim;
        let pages = self.cache.pages.pages() * heads * layer;
        let at = |pool: &Option<Buffer>, bytes: usize| pool.as_ref().map_or(0, |pool| pool.at(pages * bytes));
        let ring = layer * self.options.slots * heads * BUFFER_TOKENS * d * 2;
        CacheLayer {
            upper: at(&self.cache.upper, Layout::Cuda.upper_bytes(d)),
            lower: at(&self.cache.lower, Layout::Cuda.lower_bytes(d)),
            full: at(&self.cache.full, 4 * G * d),
            ring_k: self.cache.ring_k.at(ring),
            ring_v: self.cache.ring_v.at(ring),
            lists: self.lists.lists.at(layer * self.options.slots * heads * self.lists.pitch * 4),
        }
    }

    /// Length of a list of `n` requested pages: at least the first and the newest, at most all pages of a sequence.
    pub(super) fn listed(&self, n: usize) -> usize {
        n.clamp(2, self.lists.pitch)
    }

    /// The lists of pages that a draft step chooses, each for its rows, and the number of those with scored pages, which come
    /// first. Records what each slot reads afterwards.
    pub(super) fn choose_lists(&mut self, step: &Step) -> Result<(Vec<PageChoice>, usize)> {
        let Some(n) = step.pages.count().map(|n| self.listed(n)) else { return Ok((Vec::new(), 0)) };
        let slots = self.options.slots;
        let (scores, refreshes) = (self.cache.upper.is_some(), step.choose_pages && self.masses.is_some());
        let (mut scoring, mut others) = (Vec::new(), Vec::new());
        for (index, row) in step.rows.iter().enumerate() {
            // Rows of a sequence, which are adjacent, read the list of the first.
            if index > 0 && step.rows[index - 1].slot == row.slot {
                continue;
            }
            let visible = visible_pages(row.position);
            let Some(slot) = self.slots.get_mut(row.slot).and_then(Option::as_mut) else {
                return Err(Error::internal(format!("slot {} is not open", row.slot)));
            };
            if step.choose_pages || slot.chosen.is_none() {
                let (scored, refreshed, anew) = match step.pages {
                    Pages::Snap { .. } => slot.scored_pages.choose(step.pages, visible, refreshes && scores),
                    Pages::Best(_) => (visible, false, scores),
                    Pages::All | Pages::Window(_) | Pages::Tokens(_) => (visible, false, false),
                };
                let listed = n.min(scored) + visible - scored;
                // A list of all pages is not needed.
                slot.chosen = (visible > listed).then_some(Chosen { listed, visible });
                if slot.chosen.is_some() {
                    let choice = PageChoice {
                        row: index as i32,
                        slot: row.slot as i32,
                        pages: visible as i32,
                        scored: scored as i32,
                        scores: (row.slot + if refreshed { slots } else { 0 }) as i32,
                    };
                    if anew { &mut scoring } else { &mut others }.push(choice);
                }
            }
        }
        let count = scoring.len();
        scoring.extend(others);
        Ok((scoring, count))
    }
}

impl KvCache for CudaBackend {
    fn page_pool(&self) -> &PagePool {
        &self.cache.pages
    }

    fn open_sharing(&mut self, slot: usize, capacity: usize, prefix: Option<Prefix>) -> Result<()> {
        self.close(slot);
        if capacity > self.options.capacity {
            return Err(Error::does_not_fit(
                format!("{capacity} tokens; {} were planned", self.options.capacity),
                "open the engine with a larger context (-c)",
            ));
        }
        self.cache.pages.open(slot, capacity, prefix)?;
        // Stored before the fallible part: closing the slot then frees the pages.
        self.slots[slot] = Some(Slot::default());
        let opened = self.cache.clean(slot, &self.config, self.options.slots).and_then(|()| {
            // Clears flags of interrupted work, which do not concern the new sequence.
            self.sampling.clear_flag()?;
            self.sampling.forget(slot);
            self.prompting = false;
            self.cache.tables.write(slot * self.cache.pitch * 4, self.cache.pages.table(slot))
        });
        opened.inspect_err(|_| self.close(slot))
    }

    fn close(&mut self, slot: usize) {
        if self.slots.get_mut(slot).and_then(Option::take).is_some() {
            self.cache.pages.close(slot);
            // Clears flags of an interrupted prompt, which do not concern other slots; a device error appears again with
            // their next step.
            if self.prompting && self.sampling.clear_flag().is_ok() {
                self.prompting = false;
            }
        }
    }

    fn set_window(&mut self, slot: usize, tokens: &[u32]) -> Result<()> {
        self.slot(slot)?;
        self.sampling.set_window(slot, tokens)
    }

    fn window(&mut self, slot: usize, n: usize) -> Result<Vec<u32>> {
        self.slot(slot)?;
        self.sampling.window(slot, n)
    }

    fn flush(&mut self, slot: usize, page: usize) -> Result<()> {
        let (heads, d) = (self.config.kv_heads, self.config.head_dim);
        self.slot(slot)?;
        let physical = self.cache.pages.own(slot, page)?;
        let arguments = args![
            &self.cache.ring_k,
            &self.cache.ring_v,
            argument(&self.cache.upper),
            argument(&self.cache.lower),
            argument(&self.cache.full),
            self.cache.pages.pages(),
            self.options.slots,
            slot,
            page,
            physical,
            usize::from(self.options.rounding == Rounding::Balanced),
            self.sampling.flag(),
        ];
        self.launch(self.kernels.flush, [heads, self.config.layers, 2], 256, page_shared(d), &arguments)
    }
}
