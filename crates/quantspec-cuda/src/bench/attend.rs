//! Decode attention, and the choice of pages.

use super::{Bench, Measured, filled, repeated, seconds};
use crate::attend::{Attend, Layer, Neighbours, PageChoice, SliceAddresses, StepSlice};
use crate::device::Buffer;
use crate::linear::Form;
use crate::prefill::padded;
use half::f16;
use quantspec_core::Result;
use quantspec_core::cache::{BUFFER_TOKENS, G, visible_buffer, visible_pages};
use quantspec_core::config::{Dtype, ModelConfig, Rounding, View};
use quantspec_core::layout::Layout;
use quantspec_model::backend::Row;

/// Pages of a chosen list: the number per KV head that a draft reads of a long text.
const LISTED: usize = 16;

/// One sequence's cache in several layers, and queries.
struct MadeUpCache {
    /// Of the first row.
    position: usize,
    pages: usize,
    layers: usize,
    /// Bytes of an upper, lower and f16 page of a KV head; 0 of those that the view does not read.
    page_bytes: [usize; 3],
    /// `[layer][page][kv head]` of each.
    pools: [Buffer; 3],
    /// Keys, which also serve as values, `[layer][kv head][BUFFER_TOKENS][D]` f16.
    ring: Buffer,
    /// The page table, `[pages]`.
    table: Buffer,
    /// f16 `[row][heads · D]`.
    q: Buffer,
}

impl MadeUpCache {
    /// Addresses of a layer.
    fn layer(&self, config: &ModelConfig, layer: usize) -> Layer {
        let first = layer * self.pages * config.kv_heads;
        let [upper, lower, full] = std::array::from_fn(|i| self.pools[i].at(first * self.page_bytes[i]));
        let ring = self.ring.at(layer * config.kv_heads * BUFFER_TOKENS * config.head_dim * 2);
        Layer { upper, lower, full, ring_k: ring, ring_v: ring, lists: 0 }
    }
}

impl Bench {
    /// A made-up cache of `context` tokens, in as many layers as exceed the GPU's cache, and queries of `most` rows.
    fn cache(&self, view: View, context: usize, most: usize) -> Result<MadeUpCache> {
        let (device, config) = (&self.device, &self.config);
        let (d, heads, kv_heads) = (config.head_dim, config.heads, config.kv_heads);
        // Rows begin in the middle of a page, so that all see the same pages.
        let position = (context / G * G + G / 4).max(1);
        let pages = (position + most).div_ceil(G);
        let page_bytes = match view {
            View::Upper => [Layout::Cuda.upper_bytes(d), 0, 0],
            View::Both => [Layout::Cuda.upper_bytes(d), Layout::Cuda.lower_bytes(d), 0],
            View::Full => [0, 0, 4 * G * d],
        };
        let [upper, lower, full] = page_bytes;
        let layers = self.copies(pages * kv_heads * (upper + lower + full));
        let blocks = layers * pages * kv_heads;
        let pool = |bytes: usize| if bytes > 0 { filled(device, blocks * bytes) } else { device.allocate(16) };
        // Codes may have any bits; parameters must be finite.
        let upper_pool = if upper > 0 {
            let offsets = Layout::Cuda.offsets(d);
            let mut one: Vec<u8> = (0..upper as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
            for (at, count) in [(offsets.key_params, 2 * d), (offsets.value_params, 2 * G)] {
                for param in one[at..at + 2 * count].chunks_exact_mut(2) {
                    param.copy_from_slice(&f16::from_f32(0.01).to_le_bytes());
                }
            }
            let many: Vec<u8> = one.iter().copied().cycle().take(64 * upper).collect();
            repeated(device, &device.copied(&many)?, blocks * upper)?
        } else {
            device.allocate(16)?
        };
        Ok(MadeUpCache {
            position,
            pages,
            layers,
            page_bytes,
            pools: [upper_pool, pool(lower)?, pool(full)?],
            ring: filled(device, layers * kv_heads * BUFFER_TOKENS * d * 2)?,
            table: device.copied(&(0..pages as i32).collect::<Vec<_>>())?,
            q: filled(device, most * heads * d * 2)?,
        })
    }

    /// Decode attention with its merge, and the choice of pages if the context has enough.
    pub(super) fn attend(
        &self,
        view: View,
        context: usize,
        rows: &[usize],
        report: &mut dyn FnMut(Measured) -> Result<()>,
    ) -> Result<()> {
        let (device, config) = (&self.device, &self.config);
        let (d, heads, kv_heads) = (config.head_dim, config.heads, config.kv_heads);
        let most = rows.iter().copied().max().unwrap_or(1);
        let cache = self.cache(view, context, most)?;
        let (position, layers) = (cache.position, cache.layers);
        let x = device.allocate(most * padded(heads * d) * 4)?;
        let attend = Attend::new(device, config, Rounding::Balanced)?;
        let partial_rows = attend.partial_rows(most);
        let (partial, extremes) = (device.allocate(partial_rows * d * 4)?, device.allocate(partial_rows * 8)?);
        for &count in rows {
            let steps: Vec<Row> =
                (0..count).map(|offset| Row { slot: 0, offset, position: position + offset }).collect();
            let mut launches: Vec<(StepSlice, SliceAddresses, [Buffer; 3])> = Vec::new();
            for slice in attend.slices(view, &steps, |_| None, |_| false, false)? {
                let described =
                    [device.copied(&slice.spans)?, device.copied(&slice.tiles)?, device.copied(&slice.merged)?];
                let addresses = SliceAddresses {
                    spans: described[0].at(0),
                    tiles: described[1].at(0),
                    merged: described[2].at(0),
                    tables: cache.table.at(0),
                    table_pitch: cache.pages,
                    list_pitch: 0,
                    partial: partial.at(0),
                    extremes: extremes.at(0),
                };
                launches.push((slice, addresses, described));
            }
            let seconds = seconds(device, || {
                for layer in 0..layers {
                    let at = cache.layer(config, layer);
                    for (slice, addresses, _) in &launches {
                        // SAFETY: every buffer has room for this context and these rows, and lives until the measurement is done.
                        unsafe {
                            attend.run(view, slice, cache.q.at(0), &at, addresses, Neighbours::default())?;
                            attend.merge(
                                slice,
                                Form::Plain(Dtype::Bf16),
                                x.at(0),
                                0,
                                padded(heads * d),
                                0,
                                addresses,
                            )?;
                        }
                    }
                }
                Ok(())
            })? / layers as f64;
            let recent = visible_buffer(position).len() * 4 * d;
            report(Measured {
                kernel: "attend",
                form: match view {
                    View::Upper => "upper",
                    View::Both => "both",
                    View::Full => "full",
                },
                rows: count,
                context: Some(context),
                seconds,
                bytes: kv_heads * (visible_pages(position) * cache.page_bytes.iter().sum::<usize>() + recent),
                ..Measured::default()
            })?;
        }
        if view == View::Upper && visible_pages(position) > LISTED {
            report(Measured { context: Some(context), ..self.choose(&attend, &cache)? })?;
        }
        Ok(())
    }

    /// The choice of [`LISTED`] pages for one row.
    fn choose(&self, attend: &Attend, cache: &MadeUpCache) -> Result<Measured> {
        let (device, config) = (&self.device, &self.config);
        let (d, kv_heads, pages, visible) =
            (config.head_dim, config.kv_heads, cache.pages, visible_pages(cache.position));
        let choice =
            device.copied(&[PageChoice { pages: visible as i32, scored: visible as i32, ..PageChoice::default() }])?;
        let (lists, scores) = (device.allocate(kv_heads * pages * 4)?, device.allocate(kv_heads * pages * 4)?);
        let addresses = SliceAddresses {
            tables: cache.table.at(0),
            table_pitch: pages,
            list_pitch: pages,
            ..SliceAddresses::default()
        };
        let q = cache.q.at(0);
        let seconds = seconds(device, || {
            (0..cache.layers).try_for_each(|layer| {
                let at = Layer { lists: lists.at(0), ..cache.layer(config, layer) };
                // SAFETY: lists and scores have room for every page; all buffers live until the measurement is done.
                unsafe { attend.choose(choice.at(0), [1, 1], visible, LISTED, q, scores.at(0), &at, &addresses) }
            })
        })? / cache.layers as f64;
        // A scale and a zero for each key channel of every page.
        let bytes = kv_heads * visible * 4 * d;
        Ok(Measured::of("choose_pages", "best", 1, seconds, bytes))
    }
}
