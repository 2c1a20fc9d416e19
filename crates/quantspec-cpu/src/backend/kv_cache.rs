//! Slots: their pages, rings and windows.

use super::CpuBackend;
use crate::attend::{self, Shape};
use crate::cache::Cache;
use crate::dispatch::Simd;
use crate::memory::DisjointSlice;
use crate::pool::share;
use crate::quantize::{self, Scratch};
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use quantspec_core::ablation::Ablation;
use quantspec_core::attend::SnapScores;
use quantspec_core::cache::G;
use quantspec_core::config::{Planes, Rounding};
use quantspec_core::page_pool::{PagePool, Prefix};
use quantspec_core::{Error, Result};
use quantspec_model::backend::KvCache;
use std::ops::Range;

/// Pages per thread between two calls of the poll hook: at most about 30 ms on the slowest path.
const FLUSH_PAGES: usize = 32;

impl CpuBackend {
    pub(super) fn slot(&self, slot: usize) -> Result<usize> {
        self.open.get(slot).copied().flatten().ok_or_else(|| Error::internal(format!("slot {slot} is not open")))
    }

    /// Quantises pages of a slot for some heads ([`Cache::head`]) from the prompt or the ring, in dispatches short enough for the
    /// poll hook.
    ///
    /// # Errors
    /// Those of [`KvCache::flush`].
    pub(super) fn store_pages(
        &mut self,
        slot: usize,
        heads: Range<usize>,
        pages: Range<usize>,
        from_prompt: bool,
    ) -> Result<()> {
        let (threads, sizes, kv_heads) = (self.pool.threads(), self.cache.sizes, self.config.kv_heads);
        let shape = sizes.shape;
        let own: Vec<usize> = pages.clone().map(|page| self.cache.pages.own(slot, page)).collect::<Result<_>>()?;
        let failure = std::sync::Mutex::new(None);
        let (mut start, items) = (0, heads.len() * pages.len());
        while start < items {
            let count = (items - start).min(FLUSH_PAGES * threads);
            let (stored, ring) =
                StoredPages::of(&mut self.cache, self.choice.simd, self.options.rounding, self.options.ablation);
            let flushes = DisjointSlice::new(&mut self.flushes);
            let prompt = &self.prompt;
            self.pool.run(&|thread| {
                // SAFETY: one element per thread.
                let scratch = unsafe { &mut flushes.slice(thread, 1)[0] };
                let mut keys = vec![0u16; G * shape.d];
                for item in share(count, thread, threads) {
                    let (head, index) = (heads.start + (start + item) / own.len(), (start + item) % own.len());
                    let (kv_head, page) = (head % kv_heads, pages.start + index);
                    let at = sizes.index(head, own[index]);
                    let ring = &ring[sizes.ring_at(head, page)..][..shape.full_len()];
                    let (keys, values) = if from_prompt {
                        prompt.page(kv_head, page)
                    } else {
                        attend::canonical_keys(ring, shape.d, &mut keys);
                        (&keys[..], &ring[G * shape.d..])
                    };
                    // SAFETY: the slot's own page, which no other item and no other sequence has.
                    let done = unsafe {
                        if let Some(full) = stored.full(at) {
                            match from_prompt {
                                true => prompt.copy(kv_head, page * G..(page + 1) * G, full),
                                false => full.copy_from_slice(ring),
                            }
                        }
                        stored.quantise(at, (keys, values), scratch)
                    };
                    if let Err(error) = done
                        && let Ok(mut failure) = failure.lock()
                    {
                        failure.get_or_insert(error);
                    }
                }
            })?;
            if let Some(error) = failure.lock().ok().and_then(|mut failure| failure.take()) {
                return Err(error);
            }
            start += count;
            (self.hooks.poll)()?;
        }
        Ok(())
    }
}

/// The cache's pages, written by several threads.
struct StoredPages<'a> {
    shape: Shape,
    planes: Planes,
    simd: Simd,
    rounding: Rounding,
    ablation: Option<Ablation>,
    upper: DisjointSlice<'a, u8>,
    lower: DisjointSlice<'a, u8>,
    full: DisjointSlice<'a, u16>,
    ablated: [DisjointSlice<'a, u16>; 2],
}

impl<'a> StoredPages<'a> {
    /// The pages of a cache, and its ring.
    fn of(
        cache: &'a mut Cache,
        simd: Simd,
        rounding: Rounding,
        ablation: Option<Ablation>,
    ) -> (StoredPages<'a>, &'a [u16]) {
        let (shape, planes) = (cache.sizes.shape, cache.planes());
        let Cache { upper, lower, full, ablated, ring, .. } = cache;
        let [upper, lower] = [upper, lower].map(|plane| DisjointSlice::new(plane));
        let ablated = ablated.each_mut().map(|pages| DisjointSlice::new(pages));
        let full = DisjointSlice::new(full);
        (StoredPages { shape, planes, simd, rounding, ablation, upper, lower, full, ablated }, ring)
    }

    /// Page `at` in f16; None if that plane is not kept.
    ///
    /// # Safety
    /// No other thread uses this page.
    unsafe fn full(&self, at: usize) -> Option<&'a mut [u16]> {
        let len = self.shape.full_len();
        // SAFETY: that of this function.
        self.planes.full.then(|| unsafe { self.full.slice(at * len, len) })
    }

    /// Quantises keys and values, `[G][d]` in f16, into page `at` of the planes kept.
    ///
    /// # Safety
    /// No other thread uses this page.
    unsafe fn quantise(&self, at: usize, (keys, values): (&[u16], &[u16]), scratch: &mut Scratch) -> Result<()> {
        let StoredPages { shape, planes, .. } = *self;
        if !planes.upper {
            return Ok(());
        }
        if let Some(ablation) = self.ablation {
            let views = ablation.page(keys.reinterpret_cast(), values.reinterpret_cast(), shape.d, self.rounding)?;
            let kept = [planes.upper, planes.lower];
            for ((pages, (keys, values)), _) in self.ablated.iter().zip(views).zip(kept).filter(|(_, kept)| *kept) {
                // SAFETY: that of this function.
                let page = unsafe { pages.slice(at * shape.full_len(), shape.full_len()) };
                let rows = keys.chunks_exact(shape.d).zip(values.chunks_exact(shape.d));
                for (token, (key, value)) in rows.enumerate() {
                    attend::put_token(page, shape.d, token, key.reinterpret_cast(), value.reinterpret_cast());
                }
            }
            return Ok(());
        }
        let lower_bytes = if planes.lower { shape.lower_bytes() } else { 0 };
        // SAFETY: that of this function.
        let (upper, lower) = unsafe {
            (
                self.upper.slice(at * shape.upper_bytes(), shape.upper_bytes()),
                self.lower.slice(at * lower_bytes, lower_bytes),
            )
        };
        quantize::page(self.simd, shape, self.rounding, (keys, values), scratch, upper, lower)
    }
}

impl KvCache for CpuBackend {
    fn page_pool(&self) -> &PagePool {
        &self.cache.pages
    }

    fn open_sharing(&mut self, slot: usize, capacity: usize, prefix: Option<Prefix>) -> Result<()> {
        if capacity > self.options.capacity {
            return Err(Error::does_not_fit(
                format!("a sequence of {capacity} tokens; slots hold {}", self.options.capacity),
                "ask for a longer context (-c) or fewer tokens",
            ));
        }
        self.close(slot);
        self.cache.pages.open(slot, capacity, prefix)?;
        self.open[slot] = Some(capacity);
        self.sampler.clear(slot);
        Ok(())
    }

    fn close(&mut self, slot: usize) {
        if let Some(open) = self.open.get_mut(slot) {
            *open = None;
            self.cache.pages.close(slot);
        }
        let heads = self.config.layers * self.config.kv_heads;
        for (list, visible) in self.chosen.iter_mut().skip(slot * heads).take(heads) {
            list.clear();
            *visible = 0;
        }
        self.snap_scores.iter_mut().skip(slot * heads).take(heads).for_each(|scores| *scores = SnapScores::default());
    }

    fn set_window(&mut self, slot: usize, tokens: &[u32]) -> Result<()> {
        self.slot(slot)?;
        self.sampler.set_window(slot, tokens)
    }

    fn window(&mut self, slot: usize, n: usize) -> Result<Vec<u32>> {
        self.slot(slot)?;
        self.sampler.window(slot, n).map(<[u32]>::to_vec)
    }

    fn flush(&mut self, slot: usize, page: usize) -> Result<()> {
        let capacity = self.slot(slot)?;
        if (page + 1) * G > capacity {
            return Err(Error::internal(format!("page {page} of a slot of {capacity} tokens")));
        }
        let first = self.cache.head(slot, 0, 0);
        self.store_pages(slot, first..first + self.cache.sizes.heads(), page..page + 1, false)
    }
}
