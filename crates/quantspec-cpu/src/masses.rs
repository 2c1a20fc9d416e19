//! The last queries of the current prompt, and their attention to its pages, by which `Pages::Snap` chooses.

use crate::dispatch::{Simd, portable};
use crate::lanes::{exp2, madd, widen};
use crate::memory::{Array, DisjointSlice};
use crate::pool::{Pool, share};
use quantspec_core::Result;
use quantspec_core::attend::SNAP_QUERIES;
use quantspec_core::cache::{G, visible_pages};
use quantspec_core::config::ModelConfig;
use quantspec_model::backend::{Block, Options};
use std::ops::Range;

/// Queries of the current layer, and memory for the sums over them. Everything is empty if page masses are not kept.
pub(crate) struct PageMasses {
    heads: usize,
    d: usize,
    /// `[position mod SNAP_QUERIES][head][D]`, times log2(e)/√D.
    q: Array<f32>,
    /// Positions that `q` holds.
    rows: Range<usize>,
    /// `[kv head][query][page]`: base-2 logarithm of the sum of 2^score over the tokens of a page.
    sums: Array<f32>,
}

/// Destination of the queries of a block.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    q: DisjointSlice<'a, f32>,
    heads: usize,
    d: usize,
    /// First kept position.
    first: usize,
}

impl<'a> Rows<'a> {
    /// Slice for a head of a row; empty if the row is not kept.
    ///
    /// # Safety
    /// At most one thread calls it for a slice in one dispatch.
    pub(crate) unsafe fn row(&self, position: usize, head: usize) -> &'a mut [f32] {
        if position < self.first {
            return &mut [];
        }
        // SAFETY: slices do not overlap; the caller guarantees one thread for each.
        unsafe { self.q.slice((position % SNAP_QUERIES * self.heads + head) * self.d, self.d) }
    }
}

impl PageMasses {
    /// Lengths of `q` and `sums` for heads of `d` channels and prompts of this many tokens, if masses are kept.
    fn lengths(heads: usize, d: usize, tokens: Option<usize>) -> [usize; 2] {
        let rows = if tokens.is_some() { SNAP_QUERIES * heads } else { 0 };
        [rows * d, rows * tokens.unwrap_or(0).max(1).div_ceil(G)]
    }

    pub(crate) fn new(config: &ModelConfig, options: &Options) -> Result<PageMasses> {
        PageMasses::of_shape(config.heads, config.head_dim, tokens(options))
    }

    fn of_shape(heads: usize, d: usize, tokens: Option<usize>) -> Result<PageMasses> {
        let [q, sums] = PageMasses::lengths(heads, d, tokens);
        Ok(PageMasses { heads, d, q: Array::zeros(q)?, rows: 0..0, sums: Array::zeros(sums)? })
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        self.q.bytes() + self.sums.bytes()
    }

    /// Bytes of [`PageMasses::new`].
    pub(crate) fn bytes_of(config: &ModelConfig, options: &Options) -> usize {
        4 * PageMasses::lengths(config.heads, config.head_dim, tokens(options)).iter().sum::<usize>()
    }

    /// Clears the queries at the beginning of a prompt.
    pub(crate) fn clear(&mut self) {
        self.rows = 0..0;
    }

    /// Destination of the queries of a block; those of the prompt's end are kept.
    pub(crate) fn add_queries(&mut self, block: &Block) -> Rows<'_> {
        let end = block.start + block.rows;
        let first = if self.q.is_empty() {
            usize::MAX
        } else {
            block.prompt.len().saturating_sub(SNAP_QUERIES).max(block.start)
        };
        if first < end {
            let start = if self.rows.end == first { self.rows.start } else { first };
            self.rows = start..end;
        }
        Rows { q: DisjointSlice::new(&mut self.q), heads: self.heads, d: self.d, first }
    }

    /// See [`crate::prompt::Prompt::page_masses`]. `keys`: `[kv head][room][D]` halves.
    pub(crate) fn masses(
        &mut self,
        simd: Simd,
        pool: &Pool,
        keys: &[u16],
        room: usize,
        kv_heads: usize,
        tokens: usize,
    ) -> Result<(Vec<f32>, usize)> {
        let (rows, pages, visible) = (std::mem::take(&mut self.rows), tokens.div_ceil(G), visible_pages(tokens));
        let threads = pool.threads();
        let (heads, d, group) = (self.heads, self.d, self.heads / kv_heads);
        let mut masses = vec![0.0; kv_heads * visible];
        if visible == 0 {
            return Ok((masses, visible));
        }
        let queries = rows.len() * group;
        let (q, sums) = (&self.q, DisjointSlice::new(&mut self.sums));
        pool.run(&|thread| {
            let (mut wide, mut scores) = (vec![0f32; G * d], [0f32; G]);
            for item in share(kv_heads * pages, thread, threads) {
                let (kv_head, page) = (item / pages, item % pages);
                let count = G.min(tokens - page * G);
                widen(simd, &keys[(kv_head * room + page * G) * d..][..count * d], &mut wide[..count * d]);
                for query in 0..queries {
                    let position = rows.start + query / group;
                    let q = &q[(position % SNAP_QUERIES * heads + kv_head * group + query % group) * d..][..d];
                    let seen = count.min((position + 1).saturating_sub(page * G));
                    // SAFETY: a page of a KV head is one item.
                    let to = unsafe { &mut sums.slice((kv_head * queries + query) * pages + page, 1)[0] };
                    let (wide, scores) = (&wide[..seen * d], &mut scores[..seen]);
                    *to = portable!(simd, log_sum(q: &[f32], wide: &[f32], scores: &mut [f32]) -> f32);
                }
            }
        })?;
        let sums = &self.sums;
        let out = DisjointSlice::new(&mut masses);
        pool.run(&|thread| {
            for kv_head in share(kv_heads, thread, threads) {
                // SAFETY: a KV head is one item.
                let out = unsafe { out.slice(kv_head * visible, visible) };
                for sums in sums[kv_head * queries * pages..][..queries * pages].chunks_exact(pages) {
                    portable!(simd, add_shares(sums: &[f32], out: &mut [f32]));
                }
            }
        })?;
        Ok((masses, visible))
    }
}

/// Tokens of the longest prompt, if masses are kept.
fn tokens(options: &Options) -> Option<usize> {
    options.page_masses.then_some(options.prompt_capacity)
}

/// Base-2 logarithm of the sum of 2^(q·k) over keys `[_][D]`; −∞ without keys. `scores`: scratch of that many numbers.
#[inline(always)]
fn log_sum<const FMA: bool>(q: &[f32], keys: &[f32], scores: &mut [f32]) -> f32 {
    let mut most = f32::NEG_INFINITY;
    for (score, key) in scores.iter_mut().zip(keys.chunks_exact(q.len())) {
        let mut sums = [0f32; 8];
        // Head widths are multiples of 8.
        for (q, k) in q.chunks_exact(8).zip(key.chunks_exact(8)) {
            for l in 0..8 {
                sums[l] = madd::<FMA>(q[l], k[l], sums[l]);
            }
        }
        *score = sums.iter().sum();
        most = most.max(*score);
    }
    if scores.is_empty() {
        return f32::NEG_INFINITY;
    }
    most + scores.iter().map(|score| exp2::<FMA>(score - most)).sum::<f32>().log2()
}

/// Adds to every page of `out` its share of the sum over all pages of `sums`.
#[inline(always)]
fn add_shares<const FMA: bool>(sums: &[f32], out: &mut [f32]) {
    let most = sums.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f32 = sums.iter().map(|sum| exp2::<FMA>(sum - most)).sum();
    for (out, sum) in out.iter_mut().zip(sums) {
        *out += exp2::<FMA>(sum - most) / total;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Noise, paths};
    use half::f16;
    use quantspec_core::attend::page_masses;

    #[test]
    fn masses_equal_core() {
        let (d, kv_heads, group) = (40, 2, 3);
        let heads = kv_heads * group;
        let pool = Pool::new(2).expect("pool");
        for simd in paths() {
            // The window within one block, over three blocks, and cut by a cached prefix; a prompt without visible pages.
            for (tokens, blocks) in [
                (2 * G, vec![0, 2 * G]),
                (700, vec![650, 680, 690, 700]),
                (3 * G + 1, vec![3 * G, 3 * G + 1]),
                (2 * G - 1, vec![0, 2 * G - 1]),
            ] {
                let mut last = PageMasses::of_shape(heads, d, Some(tokens + 5)).expect("room");
                let mut noise = Noise::new(tokens as u64);
                let room = (tokens + 5).next_multiple_of(64);
                let keys: Vec<f16> = (0..kv_heads * room * d).map(|_| f16::from_f32(noise.normal())).collect();
                let bits: Vec<u16> = keys.iter().map(|key| key.to_bits()).collect();
                let q: Vec<f32> = (0..tokens * heads * d).map(|_| 1.5 * noise.normal()).collect();
                let scale = std::f32::consts::LOG2_E / (d as f32).sqrt();
                let prompt = vec![0; tokens];
                // The state of a layer does not affect the next one.
                for _ in 0..2 {
                    for range in blocks.windows(2) {
                        let rows = last.add_queries(&Block {
                            slot: 0,
                            prompt: &prompt,
                            first: 0,
                            start: range[0],
                            rows: range[1] - range[0],
                        });
                        for (position, head) in
                            (range[0]..range[1]).flat_map(|at| (0..heads).map(move |head| (at, head)))
                        {
                            // SAFETY: one thread.
                            let to = unsafe { rows.row(position, head) };
                            let from = &q[(position * heads + head) * d..][..d];
                            to.iter_mut().zip(from).for_each(|(to, q)| *to = q * scale);
                        }
                    }
                    let (masses, visible) = last.masses(simd, &pool, &bits, room, kv_heads, tokens).expect("masses");
                    assert_eq!((visible, masses.len()), (visible_pages(tokens), kv_heads * visible));
                    let first = blocks[0].max(tokens.saturating_sub(SNAP_QUERIES));
                    for kv_head in 0..kv_heads {
                        let queries: Vec<(usize, &[f32])> = (first..tokens)
                            .flat_map(|at| (0..group).map(move |h| (at, kv_head * group + h)))
                            .map(|(at, head)| (at, &q[(at * heads + head) * d..][..d]))
                            .collect();
                        let want = page_masses(&queries, &keys[kv_head * room * d..][..tokens * d], visible);
                        for (page, want) in want.iter().enumerate() {
                            let got = f64::from(masses[kv_head * visible + page]);
                            assert!(
                                (got - want).abs() < 1e-4 * want,
                                "{simd:?}, {tokens} tokens, page {page}: {got}, not {want}"
                            );
                        }
                    }
                }
            }
        }
    }
}
