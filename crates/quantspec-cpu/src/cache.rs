//! Pages and rings of every slot. Pages of one KV head of one layer are contiguous: a pass reads them as one stream.

use crate::attend::Shape;
use crate::memory::Array;
use quantspec_core::cache::{BUFFER_TOKENS, G};
use quantspec_core::config::{ModelConfig, Planes};
use quantspec_core::plan::pages;
use quantspec_core::{Error, Result};

/// Pages of a ring.
const RING: usize = BUFFER_TOKENS / G;

/// Sizes of the cache of a backend.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) shape: Shape,
    pub(crate) layers: usize,
    pub(crate) kv_heads: usize,
    /// Pages of a slot, layer and KV head.
    pub(crate) pages: usize,
    slots: usize,
    planes: Planes,
}

impl Plan {
    pub(crate) fn new(config: &ModelConfig, planes: Planes, slots: usize, capacity: usize) -> Plan {
        let shape = Shape::new(config.head_dim);
        Plan { shape, layers: config.layers, kv_heads: config.kv_heads, pages: pages(capacity), slots, planes }
    }

    /// Slots × layers × KV heads.
    fn heads(&self) -> usize {
        self.slots.saturating_mul(self.layers * self.kv_heads)
    }

    /// Bytes of the upper, lower and f16 pages, and of the rings.
    pub(crate) fn bytes(&self) -> [usize; 4] {
        let pages = |kept: bool, bytes: usize| {
            if kept { self.heads().saturating_mul(self.pages).saturating_mul(bytes) } else { 0 }
        };
        [
            pages(self.planes.upper, self.shape.upper_bytes()),
            pages(self.planes.lower, self.shape.lower_bytes()),
            pages(self.planes.full, 2 * self.shape.full_len()),
            self.heads().saturating_mul(RING * 2 * self.shape.full_len()),
        ]
    }
}

/// See the module. Arrays of planes that are not kept are empty.
pub(crate) struct Cache {
    pub(crate) plan: Plan,
    pub(crate) upper: Array<u8>,
    pub(crate) lower: Array<u8>,
    pub(crate) full: Array<u16>,
    pub(crate) ring: Array<u16>,
}

impl Cache {
    pub(crate) fn new(plan: Plan) -> Result<Cache> {
        let [upper, lower, full, ring] = plan.bytes();
        Ok(Cache {
            plan,
            upper: Array::zeros(upper)?,
            lower: Array::zeros(lower)?,
            full: Array::zeros(full / 2)?,
            ring: Array::zeros(ring / 2)?,
        })
    }

    /// Index of a slot's layer's KV head.
    pub(crate) fn head(&self, slot: usize, layer: usize, kv_head: usize) -> usize {
        (slot * self.plan.layers + layer) * self.plan.kv_heads + kv_head
    }

    /// The upper block of a page.
    pub(crate) fn upper(&self, head: usize, page: usize) -> &[u8] {
        let bytes = self.plan.shape.upper_bytes();
        &self.upper[(head * self.plan.pages + page) * bytes..][..bytes]
    }

    /// The lower block of a page; empty where lower nibbles are not kept.
    pub(crate) fn lower(&self, head: usize, page: usize) -> &[u8] {
        if self.lower.is_empty() {
            return &[];
        }
        let bytes = self.plan.shape.lower_bytes();
        &self.lower[(head * self.plan.pages + page) * bytes..][..bytes]
    }

    /// An f16 page.
    pub(crate) fn full(&self, head: usize, page: usize) -> &[u16] {
        let len = self.plan.shape.full_len();
        &self.full[(head * self.plan.pages + page) * len..][..len]
    }

    /// Place of the ring's page that holds page `page` of the sequence.
    pub(crate) fn ring_at(&self, head: usize, page: usize) -> usize {
        (head * RING + page % RING) * self.plan.shape.full_len()
    }

    /// The ring's page that holds page `page` of the sequence.
    pub(crate) fn ring(&self, head: usize, page: usize) -> &[u16] {
        &self.ring[self.ring_at(head, page)..][..self.plan.shape.full_len()]
    }

    /// Fails where the planes of a view are not kept.
    pub(crate) fn check(&self, view: quantspec_core::config::View) -> Result<()> {
        use quantspec_core::config::View;
        let planes = self.plan.planes;
        let kept = match view {
            View::Upper => planes.upper,
            View::Both => planes.upper && planes.lower,
            View::Full => planes.full,
        };
        if kept { Ok(()) } else { Err(Error::internal(format!("the cache keeps no planes for view {view:?}"))) }
    }

    /// The planes kept.
    pub(crate) fn planes(&self) -> Planes {
        self.plan.planes
    }
}
