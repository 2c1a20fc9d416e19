//! Exact causal attention of prompt rows, with queries as lanes.
//!
//! Scores are `[key][64 queries]`, results `[D][64 queries]`, so softmax works lane by lane. With BF16 inputs queries, keys,
//! probabilities and values are multiplied in BF16 and summed in f32; with sums each is a sum of two BF16 numbers.
//!
//! Keys are taken in blocks, from the first key that the panel sees up to its last query, so a query's bits depend on its
//! position alone. In a local layer the first 64 of these keys are masked below the diagonal.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;
#[cfg(target_arch = "x86_64")]
mod softmax;

use crate::dispatch::Simd;
use crate::elementwise::{LANES, PANEL_TOKENS};
use crate::memory::{Array, DisjointSlice};
use crate::pool::{Pool, share_by_cost};
use crate::prefill::{Format, panel_len, put_features, slice_flops};
use quantspec_core::Result;

/// Tokens of a block of keys.
const KEYS: usize = 64;

/// Tokens of a block of keys with tiles. Longer blocks rescale results less often, but the scores of 256 do not fit in L1.
const TILE_KEYS: usize = 128;

/// Keys and values of the current layer, and the queries of a block.
pub(crate) struct Causal<'a> {
    pub(crate) heads: usize,
    pub(crate) group: usize,
    pub(crate) d: usize,
    /// Format of queries. Tiles take whole pairs of 32 channels, so other head widths have no sums.
    pub(crate) queries: Format,
    /// Format of results, the input of the output projection.
    pub(crate) results: Format,
    /// `[panel][head]` of `panel_len(d)`, times log2(e)/√D; pairs after D are zero.
    pub(crate) q: &'a [f32],
    /// `[kv head][token][D]` f16, `tokens` tokens (a multiple of 64) each, 16 values of padding at the end.
    pub(crate) keys: &'a [u16],
    /// Likewise.
    pub(crate) values: &'a [u16],
    pub(crate) tokens: usize,
    /// The block's first panel (absolute) and their number.
    pub(crate) first: usize,
    pub(crate) panels: usize,
    /// Tokens that a query sees, including its own, a multiple of 64; all if `None`.
    pub(crate) reach: Option<usize>,
}

/// Scratch of one thread.
pub(crate) struct Scratch {
    /// A block of keys `[key][D]` and of values, in f32 or BF16 by path; of sums the small summands follow the large ones.
    keys: Array<f32>,
    values: Array<f32>,
    /// Scores `[key][64]`, then probabilities.
    scores: Array<f32>,
    /// Results `[head][Dp][64]` of the heads that share keys; Dp is [`padded`].
    out: Array<f32>,
    /// Running maximum and sum of each query, `[head][2][64]`, on the tile path.
    state: Array<f32>,
}

/// D rounded up to two adjacent tiles of 16 pairs.
const fn padded(d: usize) -> usize {
    d.div_ceil(32) * 32
}

impl Scratch {
    /// (keys or values, scores, out, state)
    const fn lengths(d: usize, group: usize) -> [usize; 4] {
        // 128 tokens in BF16 take as much as 64 in f32, and their sums twice as much.
        [
            2 * KEYS * padded(d) + 16,
            TILE_KEYS * PANEL_TOKENS,
            group * padded(d) * PANEL_TOKENS,
            group * 2 * PANEL_TOKENS,
        ]
    }

    /// For heads of `d` channels, `group` of which share keys.
    pub(crate) fn new(d: usize, group: usize) -> Result<Scratch> {
        let [block, scores, out, state] = Scratch::lengths(d, group);
        Ok(Scratch {
            keys: Array::zeros(block)?,
            values: Array::zeros(block)?,
            scores: Array::zeros(scores)?,
            out: Array::zeros(out)?,
            state: Array::zeros(state)?,
        })
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        [&self.keys, &self.values, &self.scores, &self.out, &self.state].iter().map(|array| array.bytes()).sum()
    }

    /// Bytes of [`Scratch::new`].
    pub(crate) const fn bytes_of(d: usize, group: usize) -> usize {
        let [block, scores, out, state] = Scratch::lengths(d, group);
        4 * (2 * block + scores + out + state)
    }
}

const _: () = assert!(TILE_KEYS == 2 * KEYS && KEYS == PANEL_TOKENS);

impl Causal<'_> {
    /// Attention of every head and panel of the block into `out`, the output projection's input: `[panel]` of
    /// `panel_len(heads · D)`.
    ///
    /// # Errors
    /// Those of `poll`.
    pub(crate) fn run(
        &self,
        pool: &Pool,
        simd: Simd,
        poll: &mut dyn FnMut() -> Result<()>,
        scratch: &mut [Scratch],
        out: &mut [f32],
    ) -> Result<()> {
        let (threads, width) = (pool.threads(), panel_len(self.heads * self.d));
        let share = self.share(simd, threads);
        let items = self.heads / share * self.panels;
        // Heads of a group are adjacent, so their keys stay in the cache.
        let panel_and_head = |item: usize| (item % self.panels, item / self.panels * share);
        let most = self.reach.map_or(usize::MAX, |reach| reach / KEYS + 1);
        let cost = |item: usize| (self.first + panel_and_head(item).0 + 1).min(most);
        let per_item = |item: usize| 4 * share * cost(item) * KEYS * PANEL_TOKENS * self.d;
        // Floats of a head in the output.
        let length = self.results.len(self.d);
        let scratch = DisjointSlice::new(scratch);
        let out = DisjointSlice::new(out);
        let mut start = 0;
        while start < items {
            // As many items as one dispatch may take.
            let (mut end, mut flops) = (start, 0);
            while end < items && (end < start + threads || flops < slice_flops(simd) * threads) {
                flops += per_item(end);
                end += 1;
            }
            pool.run(&|thread| {
                // SAFETY: one element per thread.
                let scratch = unsafe { &mut scratch.slice(thread, 1)[0] };
                for item in share_by_cost(end - start, thread, threads, |i| cost(start + i)) {
                    let (panel, head) = panel_and_head(start + item);
                    self.block(simd, panel, head, share, scratch);
                    for (i, from) in scratch.out.chunks_exact(padded(self.d) * PANEL_TOKENS).take(share).enumerate() {
                        // SAFETY: features of one head of one panel belong to one item.
                        let out = unsafe { out.slice(panel * width + (head + i) * length, length) };
                        let mut values = [[0f32; LANES]; 2];
                        for lane in (0..PANEL_TOKENS).step_by(LANES) {
                            for c in (0..self.d).step_by(2) {
                                for (i, values) in values.iter_mut().enumerate() {
                                    *values = crate::lanes::take(from, (c + i) * PANEL_TOKENS + lane);
                                }
                                put_features(simd, self.results, out, c, lane, &values);
                            }
                        }
                    }
                }
            })?;
            start = end;
            poll()?;
        }
        Ok(())
    }

    /// Heads per item. With tiles, converting keys and values is a large part of a block's work, so heads of a group share it
    /// if there are enough items for the threads.
    fn share(&self, simd: Simd, threads: usize) -> usize {
        if self.queries == Format::F32 || simd != Simd::Amx {
            return 1;
        }
        let fits = |share: &usize| {
            self.group.is_multiple_of(*share) && (*share == 1 || self.heads / share * self.panels >= 2 * threads)
        };
        (1..=self.group).rev().find(fits).unwrap_or(1)
    }

    /// `share` heads from `head` on of 64 query tokens, into `scratch.out`.
    fn block(&self, simd: Simd, panel: usize, head: usize, share: usize, scratch: &mut Scratch) {
        let (d, q0) = (self.d, (self.first + panel) * PANEL_TOKENS);
        let q = &self.q[(panel * self.heads + head) * panel_len(d)..][..share * panel_len(d)];
        let at = head / self.group * self.tokens * d;
        let seen = q0 + PANEL_TOKENS;
        assert!(seen <= self.tokens);
        // The panel's first query sees the keys after this one.
        let masked = self.reach.and_then(|reach| q0.checked_sub(reach));
        let (keys, values) = (&self.keys[at..], &self.values[at..]);
        #[cfg(target_arch = "x86_64")]
        if self.queries != Format::F32 {
            // The last vector of a row may extend past its end.
            let (keys, values) = (&keys[..seen * d + 16], &values[..seen * d + 16]);
            match (self.queries, simd) {
                (Format::Sums, _) => amx::causal::<true>(q, share, keys, values, d, (q0, masked), scratch),
                (_, Simd::Amx) => amx::causal::<false>(q, share, keys, values, d, (q0, masked), scratch),
                _ => avx512::causal(q, keys, values, d, (q0, masked), scratch),
            }
            return;
        }
        portable::causal(simd, q, keys, values, d, (q0, masked), scratch);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lanes::{bf16_value, f16_bits, f16_value};
    use crate::testing::{Noise, bits, distance, paths};

    const TOKENS: usize = 5 * PANEL_TOKENS;

    /// Attention of panels `first ..` of 320 tokens: `[token][head][D]`.
    fn attend(
        simd: Simd,
        [queries, results]: [Format; 2],
        threads: usize,
        (heads, group, d): (usize, usize, usize),
        first: usize,
        reach: Option<usize>,
        q: &[f32],
        kv: &[Vec<u16>; 2],
    ) -> Vec<f32> {
        let panels = TOKENS / PANEL_TOKENS - first;
        let mut packed = vec![0f32; panels * heads * panel_len(d)];
        for (i, x) in packed.chunks_exact_mut(panel_len(d)).enumerate() {
            let (panel, head) = (first + i / heads, i % heads);
            for lane in (0..PANEL_TOKENS).step_by(LANES) {
                let token = |l: usize| panel * PANEL_TOKENS + lane + l;
                let values: Vec<[f32; LANES]> =
                    (0..d).map(|c| std::array::from_fn(|l| q[(token(l) * heads + head) * d + c])).collect();
                put_features(simd, queries, x, 0, lane, &values);
            }
        }
        let causal = Causal {
            heads,
            group,
            d,
            queries,
            results,
            q: &packed,
            keys: &kv[0],
            values: &kv[1],
            tokens: TOKENS,
            first,
            panels,
            reach,
        };
        let mut scratch: Vec<Scratch> = (0..threads).map(|_| Scratch::new(d, group).unwrap()).collect();
        let mut out = vec![f32::NAN; panels * panel_len(heads * d)];
        causal.run(&Pool::new(threads).unwrap(), simd, &mut || Ok(()), &mut scratch, &mut out).unwrap();
        let value = |token: usize, feature: usize| {
            let x = &out[token / PANEL_TOKENS * panel_len(heads * d)..];
            let row = |row: usize| x[row * PANEL_TOKENS + token % PANEL_TOKENS];
            let of_pair = |word: f32| bf16_value((word.to_bits() >> (16 * (feature % 2))) as u16);
            match results {
                Format::F32 => row(feature),
                Format::Pairs => of_pair(row(feature / 2)),
                Format::Sums => of_pair(row(feature / 2 * 2)) + of_pair(row(feature / 2 * 2 + 1)),
            }
        };
        (0..panels * PANEL_TOKENS).flat_map(|token| (0..heads * d).map(move |c| value(token, c))).collect()
    }

    #[test]
    fn attention_matches_f64_and_neither_blocks_nor_threads_change_a_bit() {
        let mut noise = Noise::new(42);
        let shapes = [(2, 1, 8), (4, 4, 40), (6, 3, 64), (2, 2, 128), (1, 1, 256)];
        let reaches = [None, Some(64), Some(128), Some(192)];
        for ((heads, group, d), reach) in shapes.into_iter().flat_map(|shape| reaches.map(|reach| (shape, reach))) {
            let kv_heads = heads / group;
            let q: Vec<f32> = noise.normals(TOKENS * heads * d).iter().map(|x| x * 2.0 / (d as f32).sqrt()).collect();
            let kv = [0, 1].map(|_| {
                let mut halves: Vec<u16> = noise.normals(kv_heads * TOKENS * d).iter().map(|x| f16_bits(*x)).collect();
                halves.resize(halves.len() + 16, 0);
                halves
            });
            let row = |of: usize, head: usize, t: usize| -> Vec<f64> {
                kv[of][(head * TOKENS + t) * d..][..d].iter().map(|x| f64::from(f16_value(*x))).collect()
            };
            let mut exact = vec![0f64; TOKENS * heads * d];
            for (i, out) in exact.chunks_exact_mut(d).enumerate() {
                let (token, head) = (i / heads, i % heads / group);
                let q: Vec<f64> = q[i * d..][..d].iter().map(|x| f64::from(*x)).collect();
                let first = (token + 1).saturating_sub(reach.unwrap_or(TOKENS));
                let weights: Vec<f64> = (first..=token)
                    .map(|t| row(0, head, t).iter().zip(&q).map(|(k, q)| k * q).sum::<f64>().exp2())
                    .collect();
                let sum: f64 = weights.iter().sum();
                for (t, weight) in weights.iter().enumerate() {
                    out.iter_mut().zip(row(1, head, first + t)).for_each(|(out, v)| *out += weight / sum * v);
                }
            }
            for simd in paths() {
                let sums = if d % 32 == 0 { Format::Sums } else { Format::F32 };
                let formats = [
                    ([Format::F32; 2], true, 2e-6),
                    ([Format::Pairs; 2], simd.has_avx512(), 8e-3),
                    ([sums, Format::Sums], simd == Simd::Amx, 1e-5),
                ];
                for (formats, _, bound) in formats.into_iter().filter(|(_, possible, _)| *possible) {
                    let all = attend(simd, formats, 1, (heads, group, d), 0, reach, &q, &kv);
                    let error = distance(&all, &exact);
                    assert!(error < bound, "{heads} heads of {d}, {reach:?}, {simd:?}, {formats:?}: off by {error}");
                    for (first, threads) in [(0, 3), (3, 1), (4, 2)] {
                        let some = attend(simd, formats, threads, (heads, group, d), first, reach, &q, &kv);
                        let expected = &all[first * PANEL_TOKENS * heads * d..];
                        assert!(
                            bits(&some) == bits(expected),
                            "{heads} heads of {d} from {first}, {reach:?}, {simd:?}"
                        );
                    }
                }
            }
        }
    }
}
