//! Attention to the best tokens of all pages, in plain loops: `eval` compares choices of pages with it; no text is decoded by it.

use super::CpuBackend;
use crate::linear::row_stride;
use crate::memory::DisjointSlice;
use crate::pool::share;
use half::f16;
use quantspec_core::attend::{Cache, attend_tokens};
use quantspec_core::cache::{BUFFER_TOKENS, G, visible_pages};
use quantspec_core::config::View;
use quantspec_core::layout::Layout;
use quantspec_core::quantize::Page;
use quantspec_core::{Error, Result};
use quantspec_model::backend::Step;

impl CpuBackend {
    /// Attention of every row to its `n` best tokens of the visible pages in view Upper, and to the buffer: core's, page by page.
    pub(super) fn attend_tokens(&mut self, index: usize, step: &Step, n: usize) -> Result<()> {
        if step.view != View::Upper {
            return Err(Error::internal(format!("tokens of view {:?}", step.view)));
        }
        let (config, threads, rounding) = (&self.config, self.pool.threads(), self.options.rounding);
        let (d, kv_heads, group) = (config.head_dim, config.kv_heads, config.group());
        let (cache, qkv, width) = (&self.cache, &self.rows.qkv, self.rows.offsets.width);
        let stride = row_stride(config.q_width());
        let failure = std::sync::Mutex::new(None);
        let out = DisjointSlice::new(&mut self.rows.attended);
        self.pool.run(&|thread| {
            for item in share(step.rows.len() * kv_heads, thread, threads) {
                let (j, kv_head) = (item / kv_heads, item % kv_heads);
                let row = &step.rows[j];
                let head = cache.head(row.slot, index, kv_head);
                let stored = cache.of_head(head);
                let unpack = |page| Layout::Cpu.unpack(d, stored.upper(page), None);
                let pages: Result<Vec<Page>> = (0..visible_pages(row.position)).map(unpack).collect();
                let (keys, values) = ring(|page| cache.ring(head, page), d);
                let attended = pages.and_then(|pages| {
                    let of_head = Cache {
                        head_dim: d,
                        rounding,
                        pages: &pages,
                        full: &[],
                        buffer_keys: &keys,
                        buffer_values: &values,
                    };
                    for h in kv_head * group..(kv_head + 1) * group {
                        let query = &qkv[j * width + h * d..][..d];
                        let attended = attend_tokens(query, row.position, View::Upper, n, &of_head)?;
                        // SAFETY: a head of a row belongs to one item.
                        let out = unsafe { out.slice(j * stride + h * d, d) };
                        out.iter_mut().zip(attended).for_each(|(out, x)| *out = x as f32);
                    }
                    Ok(())
                });
                if let (Err(error), Ok(mut failure)) = (attended, failure.lock()) {
                    failure.get_or_insert(error);
                }
            }
        })?;
        failure.into_inner().ok().flatten().map_or(Ok(()), Err)
    }
}

/// Keys and values of a ring in canonical order, `[BUFFER_TOKENS][D]` each.
fn ring<'a>(page: impl Fn(usize) -> &'a [u16], d: usize) -> (Vec<f16>, Vec<f16>) {
    let mut halves = vec![0u16; G * d];
    let (mut keys, mut values) = (Vec::new(), Vec::new());
    for number in 0..BUFFER_TOKENS / G {
        let page = page(number);
        crate::attend::canonical_keys(page, d, &mut halves);
        keys.extend(halves.iter().map(|&bits| f16::from_bits(bits)));
        values.extend(page[G * d..].iter().map(|&bits| f16::from_bits(bits)));
    }
    (keys, values)
}
