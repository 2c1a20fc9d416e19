//! Attention of a step's rows: choice of pages, work items, and merging.

use super::CpuBackend;
use crate::attend::{self, ITEM_ROWS, Partials, SPLIT, State};
use crate::cache::Cache;
use crate::dispatch::Simd;
use crate::linear::row_stride;
use crate::memory::DisjointSlice;
use crate::panel::groups;
use crate::pool::{Pool, WorkQueues, share, share_by_cost};
use quantspec_core::cache::{G, first_visible, visible_pages};
use quantspec_core::config::{ModelConfig, Pages, Rounding};
use quantspec_core::{Error, Result};
use quantspec_model::backend::Step;

/// A work item: a split of pages, or the recent tokens, of one KV head, for some rows of one slot.
struct Item {
    /// First row in the step.
    first: usize,
    rows: usize,
    kv_head: usize,
    /// None: the recent tokens.
    split: Option<usize>,
    /// Pages of the longest row's list.
    pages: usize,
}

impl Item {
    /// In arbitrary units: reading a page costs about as much as computing four query rows on it.
    fn cost(&self, group: usize) -> usize {
        let rows = self.rows * group;
        match self.split {
            Some(split) => (self.pages - split * SPLIT).min(SPLIT) * (4 + rows),
            None => 2 * (4 + 2 * rows),
        }
    }
}

/// What the rows of a step read in one layer.
struct Reads<'a> {
    simd: Simd,
    config: &'a ModelConfig,
    layer: usize,
    step: &'a Step<'a>,
    cache: &'a Cache,
    /// None: f16 pages.
    planes: Option<attend::Planes>,
    rounding: Rounding,
    group: usize,
    /// Tokens that a row sees; None for all.
    reach: Option<usize>,
    /// 0, 1, 2, …: the list of all pages.
    all: &'a [u32],
    /// [`CpuBackend::chosen`].
    chosen: &'a [(Vec<u32>, usize)],
}

impl Reads<'_> {
    /// The pages of a row at this position, in a local layer also those before its reach.
    fn list(&self, slot: usize, kv_head: usize, position: usize) -> &[u32] {
        let visible = visible_pages(position);
        match (self.step.pages, self.reach) {
            (Pages::All, _) | (_, Some(_)) => &self.all[..visible],
            _ => {
                let list = &self.chosen[self.cache.head(slot, self.layer, kv_head)].0;
                &list[..list.partition_point(|page| (*page as usize) < visible)]
            }
        }
    }

    /// The first split of a row at this position: splits before its reach are neither computed nor merged.
    fn first_split(&self, position: usize) -> usize {
        self.reach.map_or(0, |reach| first_visible(position, reach) / G / SPLIT)
    }

    /// The work items of the runs, and the most parts of a row's result: one per split, and one of the recent tokens.
    fn items(&self, runs: &[(usize, usize)]) -> (Vec<Item>, usize) {
        let (mut items, mut parts) = (Vec::new(), 1);
        for &(first, count) in runs {
            let (slot, last) = (self.step.rows[first].slot, self.step.rows[first + count - 1].position);
            let first_split = self.first_split(self.step.rows[first].position);
            for kv_head in 0..self.config.kv_heads {
                let pages = self.list(slot, kv_head, last).len();
                let splits = pages.div_ceil(SPLIT);
                parts = parts.max(splits + 1);
                for split in std::iter::once(None).chain((first_split..splits).map(Some)) {
                    for (from, rows) in groups(count, ITEM_ROWS) {
                        items.push(Item { first: first + from, rows, kv_head, split, pages });
                    }
                }
            }
        }
        (items, parts)
    }

    /// Computes every item into its parts. `qkv`: `[row][width]`, the queries first; `states`: one per thread.
    fn compute(
        &self,
        pool: &Pool,
        items: &[Item],
        (qkv, width): (&[f32], usize),
        states: &mut [State],
        partials: &Partials,
    ) -> Result<()> {
        let (threads, group, d) = (pool.threads(), self.group, self.config.head_dim);
        let scale = std::f32::consts::LOG2_E / (d as f32).sqrt();
        let cost = |i: usize| items[i].cost(group);
        let states = DisjointSlice::new(states);
        let work = WorkQueues::of((0..threads).map(|thread| share_by_cost(items.len(), thread, threads, cost)));
        pool.run(&|thread| {
            // SAFETY: one element per thread.
            let state = unsafe { &mut states.slice(thread, 1)[0] };
            while let Some(item) = work.take(thread) {
                let item = &items[item];
                // Row of the step and head of a query row of the item.
                let query = |r: usize| (item.first + r / group, item.kv_head * group + r % group);
                for r in 0..item.rows * group {
                    let (j, head) = query(r);
                    state.set_query(r, &qkv[j * width + head * d..][..d], scale);
                }
                state.reset(item.rows * group);
                let last = &self.step.rows[item.first + item.rows - 1];
                let head = self.cache.head(last.slot, self.layer, item.kv_head);
                self.item(state, item, head, self.list(last.slot, item.kv_head, last.position));
                state.finish(item.rows * group, |r| {
                    let (j, head) = query(r);
                    // The recent tokens come last, after the splits that the row's own position sees.
                    let part = item.split.unwrap_or(partials.parts - 1);
                    // SAFETY: a row, head and part belong to one item, which one thread takes.
                    unsafe { partials.at(j, head, part) }
                });
            }
        })
    }

    /// Merges the parts of every row and head into `out`, `[row][row_stride(q_width)]`. `partials`: `[row][head][part]`.
    fn merge(&self, pool: &Pool, partials: &[f32], parts: usize, out: &mut [f32]) -> Result<()> {
        let (heads, d, simd) = (self.config.heads, self.config.head_dim, self.simd);
        let (stride, length) = (row_stride(self.config.q_width()), 2 + d);
        let threads = pool.team(self.step.rows.len() * heads * parts * length);
        let out = DisjointSlice::new(out);
        pool.run_team(threads, &|thread| {
            let mut gathered = vec![0f32; parts * length];
            for item in share(self.step.rows.len() * heads, thread, threads) {
                let (j, head) = (item / heads, item % heads);
                let row = &self.step.rows[j];
                let splits = self.list(row.slot, head / self.group, row.position).len().div_ceil(SPLIT);
                let first = self.first_split(row.position).min(splits);
                let from = &partials[item * parts * length..][..parts * length];
                let gathered = &mut gathered[..(splits - first + 1) * length];
                gathered[..(splits - first) * length].copy_from_slice(&from[first * length..splits * length]);
                gathered[(splits - first) * length..].copy_from_slice(&from[(parts - 1) * length..]);
                // SAFETY: a head of a row is one item.
                let out = unsafe { out.slice(j * stride + head * d, d) };
                attend::merge(simd, gathered, length, out);
            }
        })
    }

    /// Adds an item's pages to the state, each for the rows that see it. `list`: the pages of the item's last row.
    fn item(&self, state: &mut State, item: &Item, head: usize, list: &[u32]) {
        let position = |i: usize| self.step.rows[item.first + i].position;
        let Some(split) = item.split else {
            self.recent(state, item, head);
            return;
        };
        let of_head = self.cache.of_head(head);
        let pages = &list[(split * SPLIT).min(list.len())..((split + 1) * SPLIT).min(list.len())];
        for (i, page) in pages.iter().enumerate() {
            let page = *page as usize;
            // Rows ascend in position, so the rows that see a page are the last ones.
            let hidden = (0..item.rows).take_while(|i| visible_pages(position(*i)) <= page).count();
            // In a local layer the page may be before the reach of the last rows, or partly so.
            let first = |i: usize| first_visible(position(i), self.reach.unwrap_or(usize::MAX));
            let seeing = (hidden..item.rows).take_while(|i| first(*i) < (page + 1) * G).count();
            let rows = hidden * self.group..(hidden + seeing) * self.group;
            if rows.is_empty() {
                continue;
            }
            for r in rows.clone() {
                state.hide(r, first(r / self.group).saturating_sub(page * G));
            }
            let next = list.get(split * SPLIT + i + 1).map(|page| *page as usize);
            match self.planes {
                Some(planes) => {
                    let next = next.map(|page| (of_head.upper(page), of_head.lower(page)));
                    let (upper, lower) = (of_head.upper(page), of_head.lower(page));
                    attend::nibble_page(self.simd, state, rows, planes, self.rounding, upper, lower, next);
                }
                None => {
                    let visible = vec![G; rows.len()];
                    let read = |page| of_head.full(self.step.view, page);
                    let next = next.map(read);
                    attend::full_page(self.simd, state, rows, read(page), &visible, next);
                }
            }
        }
    }

    /// Adds the ring's pages: a row at position p reads tokens Q(p) to p.
    fn recent(&self, state: &mut State, item: &Item, head: usize) {
        let position = |i: usize| self.step.rows[item.first + i].position;
        let (first, last) = (visible_pages(position(0)), position(item.rows - 1) / G);
        for page in first..=last {
            // Earlier rows may end before this page; later rows may read it through planes.
            let from = (0..item.rows).take_while(|i| position(*i) / G < page).count();
            let to = (0..item.rows).take_while(|i| visible_pages(position(*i)) <= page).count();
            if from >= to {
                continue;
            }
            let visible: Vec<usize> = (from * self.group..to * self.group)
                .map(|r| (position(r / self.group) + 1 - page * G).min(G))
                .collect();
            attend::full_page(
                self.simd,
                state,
                from * self.group..to * self.group,
                self.cache.ring(head, page),
                &visible,
                (page < last).then(|| self.cache.ring(head, page + 1)),
            );
        }
    }
}

/// Core's `select_pages` without sorting all pages: the n − 2 best inner pages are partitioned off.
fn best_pages(scores: &[f32], n: usize) -> Vec<usize> {
    let (last, inner) = (scores.len().saturating_sub(1), n.saturating_sub(2));
    if scores.len() <= 2 || inner >= last - 1 {
        return (0..scores.len()).collect();
    }
    let mut order: Vec<usize> = (1..last).collect();
    if inner == 0 {
        order.clear();
    } else {
        order.select_nth_unstable_by(inner - 1, |&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
        order.truncate(inner);
    }
    order.extend([0, last]);
    order.sort_unstable();
    order
}

impl CpuBackend {
    /// Runs of rows of one slot: (first row, rows). An error if a slot has two runs: one item owns its state.
    fn runs(step: &Step) -> Result<Vec<(usize, usize)>> {
        let mut runs: Vec<(usize, usize)> = Vec::new();
        for (j, row) in step.rows.iter().enumerate() {
            match runs.iter().position(|(first, _)| step.rows[*first].slot == row.slot) {
                None => runs.push((j, 1)),
                Some(run) if run + 1 == runs.len() => runs[run].1 += 1,
                Some(_) => return Err(Error::internal(format!("rows of slot {} are not contiguous", row.slot))),
            }
        }
        Ok(runs)
    }

    /// Chooses the pages of every KV head for a slot's first row. Its other rows read them too, and pages that only they see.
    fn choose_pages(&mut self, index: usize, step: &Step, runs: &[(usize, usize)]) -> Result<()> {
        let n = match step.pages {
            Pages::All | Pages::Tokens(_) => return Ok(()),
            // A local layer reads all pages of its reach.
            _ if self.config.reach(index).is_some() => return Ok(()),
            Pages::Window(n) | Pages::Best(n) | Pages::Snap { pages: n, .. } => n,
        };
        let (config, simd, threads) = (&self.config, self.choice.simd, self.pool.threads());
        let (d, kv_heads, group, shape) = (config.head_dim, config.kv_heads, config.group(), self.cache.sizes.shape);
        let (cache, qkv, width, rounding) =
            (&self.cache, &self.rows.qkv, self.rows.offsets.width, self.options.rounding);
        let (chosen, snap_scores) = (DisjointSlice::new(&mut self.chosen), DisjointSlice::new(&mut self.snap_scores));
        self.pool.run(&|thread| {
            let mut scores = Vec::new();
            for item in share(runs.len() * kv_heads, thread, threads) {
                let ((first, count), kv_head) = (runs[item / kv_heads], item % kv_heads);
                let row = &step.rows[first];
                let head = cache.head(row.slot, index, kv_head);
                // SAFETY: a slot is one run (`runs`), and one of its heads is one item.
                let ((list, visible), snap) =
                    unsafe { (&mut chosen.slice(head, 1)[0], &mut snap_scores.slice(head, 1)[0]) };
                let now = visible_pages(row.position);
                // Every row reads the new pages that it sees.
                let end = visible_pages(step.rows[first + count - 1].position);
                if !(step.choose_pages || list.is_empty() && now > 0) {
                    // Keeps the last choice, plus pages that became visible after it; rows of wrong guesses may have seen more.
                    list.extend(*visible as u32..end as u32);
                    *visible = end.max(*visible);
                    continue;
                }
                let of_head = cache.of_head(head);
                let queries = &qkv[first * width + kv_head * group * d..][..group * d];
                let score = |scores: &mut Vec<f32>| {
                    scores.clear();
                    let upper = |page| of_head.upper(page);
                    scores.extend(attend::page_scores(simd, shape, rounding, queries, now, upper));
                };
                let pages = match step.pages {
                    // Scores need quantised keys; without them the newest pages are read.
                    Pages::Best(_) if cache.has_nibbles() => {
                        score(&mut scores);
                        best_pages(&scores, n)
                    }
                    Pages::Snap { .. } => {
                        if step.choose_pages && snap.is_due(step.pages, now) && cache.has_nibbles() {
                            score(&mut snap.refreshed);
                        }
                        let scores = snap.current();
                        let chosen = scores.len().min(now);
                        let mut pages = best_pages(&scores[..chosen], n);
                        pages.extend(chosen..now);
                        pages
                    }
                    _ => quantspec_core::attend::window_pages(now, n),
                };
                list.clear();
                list.extend(pages.into_iter().chain(now..end).map(|page| page as u32));
                *visible = end;
            }
        })
    }

    pub(super) fn attend_step(&mut self, index: usize, step: &Step) -> Result<()> {
        self.cache.check(step.view)?;
        let reach = self.config.reach(index);
        if let (Pages::Tokens(n), None) = (step.pages, reach) {
            return self.attend_tokens(index, step, n);
        }
        let runs = CpuBackend::runs(step)?;
        self.choose_pages(index, step, &runs)?;
        let planes = match self.options.ablation {
            None => attend::Planes::of(step.view, step.weights),
            Some(_) => None,
        };
        let reads = Reads {
            simd: self.choice.simd,
            config: &self.config,
            layer: index,
            step,
            cache: &self.cache,
            planes,
            rounding: self.options.rounding,
            group: self.config.group(),
            reach,
            all: &self.rows.all,
            chosen: &self.chosen,
        };
        let (items, parts) = reads.items(&runs);
        let (heads, d) = (self.config.heads, self.config.head_dim);
        let partials = Partials { data: DisjointSlice::new(&mut self.rows.partials), heads, parts, d };
        let queries = (&self.rows.qkv[..], self.rows.offsets.width);
        reads.compute(&self.pool, &items, queries, &mut self.states, &partials)?;
        reads.merge(&self.pool, &self.rows.partials, parts, &mut self.rows.attended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Noise;

    #[test]
    fn pages_are_chosen_as_core_chooses_them() {
        let mut noise = Noise::new(31);
        for count in [0, 1, 2, 3, 4, 17, 200] {
            for n in [0, 1, 2, 3, 5, 16, 199, 200, 300] {
                // Integers, so that scores tie.
                let scores: Vec<f32> = (0..count).map(|_| (noise.normal() * 3.0).round()).collect();
                assert_eq!(
                    best_pages(&scores, n),
                    quantspec_core::attend::select_pages(&scores, n),
                    "{n} of {scores:?}"
                );
            }
        }
    }
}
