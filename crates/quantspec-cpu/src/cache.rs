//! Pages and rings of every slot. Pages of one KV head of one layer are contiguous, so a pass reads them as one stream.
//!
//! Sequences share the pool's pages as a count. A slot's pages are separate memory, allocated when it is opened and returned
//! to the system when it is closed.

use crate::attend::Shape;
use crate::memory::Array;
use quantspec_core::cache::{BUFFER_TOKENS, G};
use quantspec_core::config::{ModelConfig, Planes, View};
use quantspec_core::plan::pages;
use quantspec_core::{Error, Result};
use quantspec_model::backend::Options;

/// Pages of a ring.
const RING: usize = BUFFER_TOKENS / G;

/// Sizes of the cache of a backend.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CacheSizes {
    pub(crate) shape: Shape,
    pub(crate) layers: usize,
    pub(crate) kv_heads: usize,
    /// Pages of a layer and KV head that all slots share.
    pool: usize,
    slots: usize,
    planes: Planes,
    /// Views Upper and Both have f16 pages instead of nibbles.
    ablated: bool,
}

impl CacheSizes {
    pub(crate) fn new(config: &ModelConfig, options: &Options) -> CacheSizes {
        CacheSizes {
            shape: Shape::new(config.head_dim),
            layers: config.layers,
            kv_heads: config.kv_heads,
            pool: options.pages(),
            slots: options.slots,
            planes: options.planes,
            ablated: options.ablation.is_some(),
        }
    }

    /// Layers × KV heads.
    pub(crate) fn heads(&self) -> usize {
        self.layers * self.kv_heads
    }

    /// Bytes of this many upper, lower and f16 pages of every layer and KV head. In an ablation the first two are the f16 pages of
    /// views Upper and Both.
    fn page_bytes(&self, pages: usize) -> [usize; 3] {
        let of = |kept: bool, bytes: usize| {
            if kept { self.heads().saturating_mul(pages).saturating_mul(bytes) } else { 0 }
        };
        let full = 2 * self.shape.full_len();
        let [upper, lower] =
            if self.ablated { [full; 2] } else { [self.shape.upper_bytes(), self.shape.lower_bytes()] };
        [of(self.planes.upper, upper), of(self.planes.lower, lower), of(self.planes.full, full)]
    }

    /// Bytes of the upper, lower and f16 pages of the pool, and of the rings.
    pub(crate) fn bytes(&self) -> [usize; 4] {
        let [upper, lower, full] = self.page_bytes(self.pool);
        [upper, lower, full, self.slots.saturating_mul(self.heads()).saturating_mul(RING * 2 * self.shape.full_len())]
    }
}

/// Pages of one slot: `[layer][KV head][page]`. Arrays of unused planes are empty.
pub(crate) struct Slot {
    /// Pages of a layer and KV head.
    pub(crate) pages: usize,
    pub(crate) upper: Array<u8>,
    pub(crate) lower: Array<u8>,
    pub(crate) full: Array<u16>,
    /// f16 pages of views Upper and Both in an ablation.
    pub(crate) ablated: [Array<u16>; 2],
}

impl Slot {
    fn new(sizes: &CacheSizes, pages: usize) -> Result<Slot> {
        let [upper, lower, full] = sizes.page_bytes(pages);
        let (nibbles, ablated) = if sizes.ablated { ([0; 2], [upper, lower]) } else { ([upper, lower], [0; 2]) };
        Ok(Slot {
            pages,
            upper: Array::zeros(nibbles[0])?,
            lower: Array::zeros(nibbles[1])?,
            full: Array::zeros(full / 2)?,
            ablated: [Array::zeros(ablated[0] / 2)?, Array::zeros(ablated[1] / 2)?],
        })
    }
}

/// See the module.
pub(crate) struct Cache {
    pub(crate) sizes: CacheSizes,
    pub(crate) slots: Vec<Slot>,
    pub(crate) ring: Array<u16>,
}

impl Cache {
    pub(crate) fn new(sizes: CacheSizes) -> Result<Cache> {
        // Finds out before loading whether the system grants the memory.
        drop(Slot::new(&sizes, sizes.pool)?);
        let [.., ring] = sizes.bytes();
        let slots = (0..sizes.slots).map(|_| Slot::new(&sizes, 0)).collect::<Result<_>>()?;
        Ok(Cache { sizes, slots, ring: Array::zeros(ring / 2)? })
    }

    /// Allocates pages for a sequence of up to `capacity` tokens; frees those of an earlier sequence in the slot.
    pub(crate) fn open(&mut self, slot: usize, capacity: usize) -> Result<()> {
        self.close(slot);
        let (wanted, taken) = (pages(capacity), self.slots.iter().map(|slot| slot.pages).sum::<usize>());
        if wanted > self.sizes.pool - taken {
            return Err(Error::does_not_fit(
                format!(
                    "{wanted} pages for {capacity} tokens; {} of {} are free",
                    self.sizes.pool - taken,
                    self.sizes.pool
                ),
                "finish a sequence first, or plan for more tokens",
            ));
        }
        self.slots[slot] = Slot::new(&self.sizes, wanted)?;
        Ok(())
    }

    /// Gives a slot's pages back.
    pub(crate) fn close(&mut self, slot: usize) {
        if let Ok(empty) = Slot::new(&self.sizes, 0) {
            self.slots[slot] = empty;
        }
    }

    /// The slot of a head, and the head's first page in it.
    fn place(&self, head: usize) -> (&Slot, usize) {
        let slot = &self.slots[head / self.sizes.heads()];
        (slot, head % self.sizes.heads() * slot.pages)
    }

    /// Index of a KV head of a layer of a slot.
    pub(crate) fn head(&self, slot: usize, layer: usize, kv_head: usize) -> usize {
        (slot * self.sizes.layers + layer) * self.sizes.kv_heads + kv_head
    }

    /// The upper block of a page.
    pub(crate) fn upper(&self, head: usize, page: usize) -> &[u8] {
        let (bytes, (slot, first)) = (self.sizes.shape.upper_bytes(), self.place(head));
        &slot.upper[(first + page) * bytes..][..bytes]
    }

    /// The lower block of a page; empty if lower nibbles are not kept.
    pub(crate) fn lower(&self, head: usize, page: usize) -> &[u8] {
        if !self.sizes.planes.lower {
            return &[];
        }
        let (bytes, (slot, first)) = (self.sizes.shape.lower_bytes(), self.place(head));
        &slot.lower[(first + page) * bytes..][..bytes]
    }

    /// The f16 page of a view: of Full, and in an ablation of any.
    pub(crate) fn full(&self, view: View, head: usize, page: usize) -> &[u16] {
        let (len, (slot, first)) = (self.sizes.shape.full_len(), self.place(head));
        let pages = match view {
            View::Upper => &slot.ablated[0],
            View::Both => &slot.ablated[1],
            View::Full => &slot.full,
        };
        &pages[(first + page) * len..][..len]
    }

    /// Offset of the ring's page that holds page `page` of the sequence.
    pub(crate) fn ring_at(&self, head: usize, page: usize) -> usize {
        (head * RING + page % RING) * self.sizes.shape.full_len()
    }

    /// The ring's page that holds page `page` of the sequence.
    pub(crate) fn ring(&self, head: usize, page: usize) -> &[u16] {
        &self.ring[self.ring_at(head, page)..][..self.sizes.shape.full_len()]
    }

    /// An error if the planes of a view are not kept.
    pub(crate) fn check(&self, view: View) -> Result<()> {
        let planes = self.sizes.planes;
        let kept = match view {
            View::Upper => planes.upper,
            View::Both => planes.upper && planes.lower,
            View::Full => planes.full,
        };
        if kept { Ok(()) } else { Err(Error::internal(format!("the cache keeps no planes for view {view:?}"))) }
    }

    /// The planes kept.
    pub(crate) fn planes(&self) -> Planes {
        self.sizes.planes
    }

    /// True if pages have nibbles; in an ablation none have.
    pub(crate) fn has_nibbles(&self) -> bool {
        self.sizes.planes.upper && !self.sizes.ablated
    }
}
