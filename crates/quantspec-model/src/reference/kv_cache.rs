//! Slots: their pages and recent tokens.

use super::{ReferenceBackend, tensor};
use crate::backend::{KvCache, Options, Step};
use candle_core::Tensor;
use half::f16;
use quantspec_core::ablation::Values;
use quantspec_core::attend::{SnapScores, page_score, select_pages, snap_pages, window_pages};
use quantspec_core::cache::{BUFFER_TOKENS, G, ring_index, visible_pages};
use quantspec_core::config::{Pages, Rounding, View};
use quantspec_core::page_pool::{PagePool, Prefix};
use quantspec_core::quantize::{Page, dequantize_both, dequantize_upper, quantize_page};
use quantspec_core::{Error, Result};

/// The cache of one sequence, [layer][kv head].
pub(super) struct Slot {
    pub(super) heads: Vec<Vec<Head>>,
}

/// The cache of one KV head in one layer.
pub(super) struct Head {
    /// Recent keys (after RoPE) and values, `[BUFFER_TOKENS][head_dim]` each.
    pub(super) recent_keys: Vec<f16>,
    pub(super) recent_values: Vec<f16>,
    pub(super) pages: Vec<Option<Stored>>,
    /// Pages that the current draft reads, and the number visible at the choice; None before the first.
    chosen: Option<(Vec<usize>, usize)>,
    pub(super) snap: SnapScores,
}

/// One page in the planes that are kept.
pub(super) struct Stored {
    pub(super) quantised: Option<Page>,
    /// Keys and values, `[G][head_dim]` each.
    pub(super) full: Option<Values>,
    /// Views Upper and Both in an ablation.
    ablated: Option<[Values; 2]>,
}

impl Head {
    fn new(head_dim: usize, capacity: usize) -> Head {
        Head {
            recent_keys: vec![f16::ZERO; BUFFER_TOKENS * head_dim],
            recent_values: vec![f16::ZERO; BUFFER_TOKENS * head_dim],
            pages: (0..capacity / G).map(|_| None).collect(),
            chosen: None,
            snap: SnapScores::default(),
        }
    }

    /// The pages a row reads. `query` is `[group][head_dim]`; `upper` says whether pages have quantised keys.
    pub(super) fn choose_pages(
        &mut self,
        step: &Step,
        position: usize,
        query: &Tensor,
        rounding: Rounding,
        upper: bool,
    ) -> Result<Vec<usize>> {
        let visible = visible_pages(position);
        let chosen = match (step.pages, &self.chosen) {
            (Pages::All | Pages::Tokens(_), _) => return Ok((0..visible).collect()),
            (Pages::Window(_) | Pages::Best(_), Some((chosen, seen))) if !step.choose_pages => {
                let chosen = chosen.iter().copied().filter(|page| *page < visible);
                return Ok(chosen.chain(*seen..visible).collect());
            }
            (Pages::Window(n), _) => window_pages(visible, n),
            // Scores need quantised keys; without them the newest pages are read.
            (Pages::Best(n), _) if !upper => window_pages(visible, n),
            (Pages::Best(n), _) => select_pages(&self.scores(visible, query, rounding)?, n),
            (Pages::Snap { pages: n, .. }, _) => {
                if step.choose_pages && self.snap.is_due(step.pages, visible) && upper {
                    self.snap.refreshed = self.scores(visible, query, rounding)?;
                }
                return Ok(snap_pages(self.snap.current(), visible, n));
            }
        };
        self.chosen = Some((chosen.clone(), visible));
        Ok(chosen)
    }

    /// The largest score of each visible page for the group.
    fn scores(&self, visible: usize, query: &Tensor, rounding: Rounding) -> Result<Vec<f32>> {
        let queries = tensor(|| query.to_vec2::<f32>())?;
        let score = |page| {
            let params = &self.quantised(page)?.key_params;
            let best = queries.iter().map(|query| page_score(query, params, rounding));
            Ok(best.fold(f32::NEG_INFINITY, f32::max))
        };
        (0..visible).map(score).collect()
    }

    fn stored(&self, page: usize) -> Result<&Stored> {
        let stored = self.pages.get(page).and_then(Option::as_ref);
        stored.ok_or_else(|| Error::internal(format!("page {page} is read before it was quantised")))
    }

    fn quantised(&self, page: usize) -> Result<&Page> {
        self.stored(page)?.quantised.as_ref().ok_or_else(|| Error::internal("quantised planes are not kept"))
    }

    /// Appends the page's keys and values, `[G][head_dim]` each, as the view dequantises them.
    pub(super) fn page_values(
        &self,
        page: usize,
        view: View,
        rounding: Rounding,
        keys: &mut Vec<f32>,
        values: &mut Vec<f32>,
    ) -> Result<()> {
        let stored = self.stored(page)?;
        let halves = match (view, &stored.ablated) {
            (View::Full, _) => Some(stored.full.as_ref().ok_or_else(|| Error::internal("full pages are not kept"))?),
            (View::Upper, Some([upper, _])) => Some(upper),
            (View::Both, Some([_, both])) => Some(both),
            (View::Upper | View::Both, None) => None,
        };
        if let Some((full_keys, full_values)) = halves {
            keys.extend(full_keys.iter().map(|x| x.to_f32()));
            values.extend(full_values.iter().map(|x| x.to_f32()));
            return Ok(());
        }
        let page = self.quantised(page)?;
        let dequantise = |upper, lower, params| match view {
            View::Upper => dequantize_upper(upper, params, rounding),
            _ => dequantize_both(upper, lower, params),
        };
        for at in 0..G * page.head_dim {
            let (token, channel) = (at / page.head_dim, at % page.head_dim);
            keys.push(dequantise(page.key_upper[at], page.key_lower[at], page.key_params[channel]));
            values.push(dequantise(page.value_upper[at], page.value_lower[at], page.value_params[token]));
        }
        Ok(())
    }

    /// Stores a complete page in the requested planes.
    pub(super) fn keep(
        &mut self,
        page: usize,
        keys: Vec<f16>,
        values: Vec<f16>,
        head_dim: usize,
        options: &Options,
    ) -> Result<()> {
        let (quantised, ablated) = match (options.planes.upper, options.ablation) {
            (true, None) => (Some(quantize_page(&keys, &values, head_dim, options.rounding)?), None),
            (true, Some(ablation)) => (None, Some(ablation.page(&keys, &values, head_dim, options.rounding)?)),
            (false, _) => (None, None),
        };
        let stored = Stored { quantised, full: options.planes.full.then_some((keys, values)), ablated };
        match self.pages.get_mut(page) {
            Some(entry) => *entry = Some(stored),
            None => return Err(Error::internal(format!("page {page} is beyond the slot's capacity"))),
        }
        Ok(())
    }
}

impl KvCache for ReferenceBackend {
    fn page_pool(&self) -> &PagePool {
        &self.page_pool
    }

    fn open_sharing(&mut self, slot: usize, capacity: usize, prefix: Option<Prefix>) -> Result<()> {
        if capacity > self.options.capacity {
            return Err(Error::does_not_fit(
                format!("a sequence of {capacity} tokens exceeds the capacity of {}", self.options.capacity),
                "load the model for longer sequences",
            ));
        }
        if self.slots.get(slot).is_none_or(Option::is_some) {
            return Err(Error::internal(format!("slot {slot} cannot be opened")));
        }
        self.page_pool.open(slot, capacity, prefix)?;
        let heads = || (0..self.config.kv_heads).map(|_| Head::new(self.config.head_dim, capacity)).collect();
        self.slots[slot] = Some(Slot { heads: (0..self.config.layers).map(|_| heads()).collect() });
        self.sampler.clear(slot);
        Ok(())
    }

    fn close(&mut self, slot: usize) {
        self.page_pool.close(slot);
        if let Some(slot) = self.slots.get_mut(slot) {
            *slot = None;
        }
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
        let (head_dim, options) = (self.config.head_dim, self.options.clone());
        let start = ring_index(page * G) * head_dim; // pages keep their alignment in the ring
        for head in self.slot(slot)?.heads.iter_mut().flatten() {
            let keys = head.recent_keys[start..start + G * head_dim].to_vec();
            let values = head.recent_values[start..start + G * head_dim].to_vec();
            head.keep(page, keys, values, head_dim, &options)?;
        }
        Ok(())
    }
}
