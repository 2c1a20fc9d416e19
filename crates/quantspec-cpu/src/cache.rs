//! Pages and rings. The pool is one array per plane, `[layer][KV head][physical page]`: a sequence whose pages are consecutive in
//! the pool is read as one stream.

use crate::attend::Shape;
use crate::memory::Array;
use quantspec_core::cache::{BUFFER_TOKENS, G};
use quantspec_core::config::{ModelConfig, Planes, View};
use quantspec_core::page_pool::PagePool;
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
    /// As in `Options`.
    kept: usize,
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
            kept: options.kept_pages,
            slots: options.slots,
            planes: options.planes,
            ablated: options.ablation.is_some(),
        }
    }

    /// Layers × KV heads.
    pub(crate) fn heads(&self) -> usize {
        self.layers * self.kv_heads
    }

    /// Index of a KV head of a layer of a slot.
    pub(crate) fn head(&self, slot: usize, layer: usize, kv_head: usize) -> usize {
        (slot * self.layers + layer) * self.kv_heads + kv_head
    }

    /// Index in the pool of a physical page of a head ([`CacheSizes::head`]).
    pub(crate) fn index(&self, head: usize, physical: usize) -> usize {
        head % self.heads() * self.pool + physical
    }

    /// Offset of the ring's page that holds page `page` of the sequence of this head.
    pub(crate) fn ring_at(&self, head: usize, page: usize) -> usize {
        (head * RING + page % RING) * self.shape.full_len()
    }

    /// Bytes of the upper, lower and f16 pages of the pool. In an ablation the first two are the f16 pages of views Upper and
    /// Both.
    fn page_bytes(&self) -> [usize; 3] {
        let of = |kept: bool, bytes: usize| {
            if kept { self.heads().saturating_mul(self.pool).saturating_mul(bytes) } else { 0 }
        };
        let full = 2 * self.shape.full_len();
        let [upper, lower] =
            if self.ablated { [full; 2] } else { [self.shape.upper_bytes(), self.shape.lower_bytes()] };
        [of(self.planes.upper, upper), of(self.planes.lower, lower), of(self.planes.full, full)]
    }

    /// Bytes of the upper, lower and f16 pages of the pool, and of the rings.
    pub(crate) fn bytes(&self) -> [usize; 4] {
        let [upper, lower, full] = self.page_bytes();
        [upper, lower, full, self.slots.saturating_mul(self.heads()).saturating_mul(RING * 2 * self.shape.full_len())]
    }
}

/// Pages and rings of all slots. Arrays of unused planes are empty.
pub(crate) struct Cache {
    pub(crate) sizes: CacheSizes,
    pub(crate) pages: PagePool,
    pub(crate) upper: Array<u8>,
    pub(crate) lower: Array<u8>,
    pub(crate) full: Array<u16>,
    /// f16 pages of views Upper and Both in an ablation.
    pub(crate) ablated: [Array<u16>; 2],
    pub(crate) ring: Array<u16>,
}

impl Cache {
    pub(crate) fn new(sizes: CacheSizes) -> Result<Cache> {
        let [upper, lower, full, ring] = sizes.bytes();
        let (nibbles, ablated) = if sizes.ablated { ([0; 2], [upper, lower]) } else { ([upper, lower], [0; 2]) };
        Ok(Cache {
            upper: Array::zeros(nibbles[0])?,
            lower: Array::zeros(nibbles[1])?,
            full: Array::zeros(full / 2)?,
            ablated: [Array::zeros(ablated[0] / 2)?, Array::zeros(ablated[1] / 2)?],
            ring: Array::zeros(ring / 2)?,
            pages: PagePool::new(sizes.pool, sizes.slots).keeping(sizes.kept),
            sizes,
        })
    }

    /// The pages of a head.
    #[inline]
    pub(crate) fn of_head(&self, head: usize) -> HeadPages<'_> {
        let table = self.pages.table(head / self.sizes.heads());
        HeadPages { cache: self, first: self.sizes.index(head, 0), table }
    }

    /// [`CacheSizes::head`].
    pub(crate) fn head(&self, slot: usize, layer: usize, kv_head: usize) -> usize {
        self.sizes.head(slot, layer, kv_head)
    }

    /// The ring's page that holds page `page` of the sequence.
    pub(crate) fn ring(&self, head: usize, page: usize) -> &[u16] {
        &self.ring[self.sizes.ring_at(head, page)..][..self.sizes.shape.full_len()]
    }

    /// An error if the planes of a view are not kept.
    pub(crate) fn check(&self, view: View) -> Result<()> {
        let kept = self.sizes.planes.serve(view);
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

/// The pages of one KV head of one layer of a slot.
#[derive(Clone, Copy)]
pub(crate) struct HeadPages<'a> {
    cache: &'a Cache,
    /// Index of the head's physical page 0.
    first: usize,
    table: &'a [u32],
}

impl<'a> HeadPages<'a> {
    #[inline]
    fn index(&self, page: usize) -> usize {
        self.first + self.table[page] as usize
    }

    /// The upper block of a page.
    #[inline]
    pub(crate) fn upper(&self, page: usize) -> &'a [u8] {
        let bytes = self.cache.sizes.shape.upper_bytes();
        &self.cache.upper[self.index(page) * bytes..][..bytes]
    }

    /// The lower block of a page; empty if lower nibbles are not kept.
    #[inline]
    pub(crate) fn lower(&self, page: usize) -> &'a [u8] {
        if !self.cache.sizes.planes.lower {
            return &[];
        }
        let bytes = self.cache.sizes.shape.lower_bytes();
        &self.cache.lower[self.index(page) * bytes..][..bytes]
    }

    /// The f16 page of a view: of Full, and in an ablation of any.
    #[inline]
    pub(crate) fn full(&self, view: View, page: usize) -> &'a [u16] {
        let pages = match view {
            View::Upper => &self.cache.ablated[0],
            View::Both => &self.cache.ablated[1],
            View::Full => &self.cache.full,
        };
        let len = self.cache.sizes.shape.full_len();
        &pages[self.index(page) * len..][..len]
    }
}
