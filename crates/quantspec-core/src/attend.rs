//! Reference attention of one query over one KV head: f64, one token after another. Every fast kernel is tested against it.
//!
//! A query at position p reads tokens before Q(p) from pages, through a view, and tokens Q(p)..=p from the buffer in full
//! precision ([`crate::cache`]). A draft may read a subset of the pages. It ranks them by an estimate of their largest
//! score, which the page's quantised key parameters give without reading the keys.

use crate::cache::{BUFFER_TOKENS, G, first_visible, ring_index, visible_buffer, visible_pages, visible_quantised};
use crate::config::{Pages, Rounding, View};
use crate::error::{Error, Result};
use crate::quantize::{Page, Params, dequantize_both, dequantize_upper};
use half::f16;

/// A page of view Full: keys and values of G tokens in f16, `[G][head_dim]` each.
#[derive(Clone, Copy, Debug)]
pub struct FullPage<'a> {
    /// Keys.
    pub keys: &'a [f16],
    /// Values.
    pub values: &'a [f16],
}

/// Cache of one sequence, layer and KV head. Planes that no view reads may be empty.
#[derive(Clone, Copy, Debug)]
pub struct Cache<'a> {
    /// Channels of the head.
    pub head_dim: usize,
    /// How the quantised pages were rounded.
    pub rounding: Rounding,
    /// Quantised pages in the order of their tokens.
    pub pages: &'a [Page],
    /// Full-precision pages in the order of their tokens.
    pub full: &'a [FullPage<'a>],
    /// Ring of recent keys, `[BUFFER_TOKENS][head_dim]`; token t is at [`ring_index`].
    pub buffer_keys: &'a [f16],
    /// Ring of recent values, likewise.
    pub buffer_values: &'a [f16],
}

/// One key and its value.
type Token = (Vec<f64>, Vec<f64>);

impl Cache<'_> {
    fn page_token(&self, view: View, page: usize, token: usize) -> Result<Token> {
        let missing = || Error::internal(format!("page {page} is not in view {view:?}"));
        let row = token * self.head_dim..(token + 1) * self.head_dim;
        if view == View::Full {
            let page = self.full.get(page).ok_or_else(missing)?;
            return Ok((widen(&page.keys[row.clone()]), widen(&page.values[row])));
        }
        let page = self.pages.get(page).ok_or_else(missing)?;
        let value = |upper: &[u8], lower: &[i8], params: Params, at: usize| {
            f64::from(match view {
                View::Upper => dequantize_upper(upper[at], params, self.rounding),
                View::Both | View::Full => dequantize_both(upper[at], lower[at], params),
            })
        };
        let key = |at: usize| value(&page.key_upper, &page.key_lower, page.key_params[at % self.head_dim], at);
        let val = |at: usize| value(&page.value_upper, &page.value_lower, page.value_params[token], at);
        Ok((row.clone().map(key).collect(), row.map(val).collect()))
    }

    fn buffer_token(&self, token: usize) -> Token {
        let at = ring_index(token) * self.head_dim;
        let row = at..at + self.head_dim;
        (widen(&self.buffer_keys[row.clone()]), widen(&self.buffer_values[row]))
    }

    fn check(&self, query: &[f32]) -> Result<()> {
        let ring = BUFFER_TOKENS * self.head_dim;
        let fits = query.len() == self.head_dim
            && self.buffer_keys.len() == ring
            && self.buffer_values.len() == ring
            && self.pages.iter().all(|page| page.head_dim == self.head_dim)
            && self
                .full
                .iter()
                .all(|page| page.keys.len() == G * self.head_dim && page.values.len() == G * self.head_dim);
        if fits {
            Ok(())
        } else {
            Err(Error::internal(format!("a cache of another shape than head_dim {}", self.head_dim)))
        }
    }
}

fn widen(x: &[f16]) -> Vec<f64> {
    x.iter().map(|x| x.to_f64()).collect()
}

/// Attention output `[head_dim]` of a query `[head_dim]` (after RoPE, not yet scaled) at `position`; scores are q·k /
/// √head_dim.
///
/// `pages` lists the pages to read in any order, for example `0..visible_pages(position)` for all of them. Pages that are not
/// visible from this position contribute nothing.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if shapes do not match or a listed visible page is missing.
pub fn attend(query: &[f32], position: usize, view: View, pages: &[usize], cache: &Cache) -> Result<Vec<f64>> {
    cache.check(query)?;
    let mut tokens = Vec::new();
    for &page in pages.iter().filter(|page| **page < visible_pages(position)) {
        for token in 0..G {
            tokens.push(cache.page_token(view, page, token)?);
        }
    }
    tokens.extend(visible_buffer(position).map(|token| cache.buffer_token(token)));
    Ok(softmax_sum(query, &tokens))
}

/// As [`attend`] in a local layer, where the query sees `reach` tokens, at least 2G ([`first_visible`]).
///
/// # Errors
/// As [`attend`].
pub fn attend_local(query: &[f32], position: usize, view: View, reach: usize, cache: &Cache) -> Result<Vec<f64>> {
    cache.check(query)?;
    let of_pages = first_visible(position, reach)..visible_quantised(position);
    let mut tokens =
        of_pages.map(|token| cache.page_token(view, token / G, token % G)).collect::<Result<Vec<Token>>>()?;
    tokens.extend(visible_buffer(position).map(|token| cache.buffer_token(token)));
    Ok(softmax_sum(query, &tokens))
}

/// As [`attend`] over all visible pages, of which only the `n` tokens with the highest scores are read. The earlier token wins
/// ties.
///
/// # Errors
/// As [`attend`].
pub fn attend_tokens(query: &[f32], position: usize, view: View, n: usize, cache: &Cache) -> Result<Vec<f64>> {
    cache.check(query)?;
    let mut tokens = Vec::new();
    for token in 0..visible_quantised(position) {
        tokens.push(cache.page_token(view, token / G, token % G)?);
    }
    let score = |key: &[f64]| query.iter().zip(key).map(|(&q, k)| f64::from(q) * k).sum::<f64>();
    let mut scored: Vec<(f64, Token)> = tokens.into_iter().map(|token| (score(&token.0), token)).collect();
    scored.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    let mut tokens: Vec<Token> = scored.into_iter().take(n).map(|(_, token)| token).collect();
    tokens.extend(visible_buffer(position).map(|token| cache.buffer_token(token)));
    Ok(softmax_sum(query, &tokens))
}

/// Values weighted by the softmax of the scaled scores; at least one token.
fn softmax_sum(query: &[f32], tokens: &[Token]) -> Vec<f64> {
    let scale = 1.0 / (query.len() as f64).sqrt();
    let score = |key: &[f64]| query.iter().zip(key).map(|(&q, k)| f64::from(q) * k).sum::<f64>() * scale;
    let scores: Vec<f64> = tokens.iter().map(|(key, _)| score(key)).collect();
    let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let (mut total, mut out) = (0.0, vec![0.0; query.len()]);
    for (score, (_, value)) in scores.iter().zip(tokens) {
        let weight = (score - most).exp();
        total += weight;
        out.iter_mut().zip(value).for_each(|(sum, v)| *sum += weight * v);
    }
    out.iter_mut().for_each(|sum| *sum /= total);
    out
}

/// Score of a page for a query: `Σ_c q_c·m_c + √(Σ_c (q_c·h_c)²)`, where m_c and h_c are the middle and half of a channel's
/// range, code 0 to code 15. Query heads that share a KV head use the largest of their scores. `query` and `key_params`:
/// `[head_dim]`.
///
/// That is the expected largest q·k (unscaled) of the page, if channels are normal and independent. If a channel's largest
/// value is t standard deviations above its mean, these are h_c. The largest q·k is t of its own above its mean. The upper bound
/// Σ_c max(q_c·lo_c, q_c·hi_c) (Quest, ICML 2024) combines the extremes of all channels, which no key has, and finds fewer of
/// the pages that matter.
pub fn page_score(query: &[f32], key_params: &[Params], rounding: Rounding) -> f32 {
    let (mut middle, mut square) = (0.0, 0.0);
    for (&q, &params) in query.iter().zip(key_params) {
        let ends = [dequantize_upper(0, params, rounding), dequantize_upper(15, params, rounding)];
        middle += q * (0.5 * (ends[1] + ends[0]));
        square += (q * (0.5 * (ends[1] - ends[0]))).powi(2);
    }
    middle + square.sqrt()
}

/// Indices of the `n` pages a draft reads, ascending: the first, the last, and those with the highest scores. The lower index
/// wins ties. `n` below 2 counts as 2. `scores`: `[page]`, as of [`page_score`].
pub fn select_pages(scores: &[f32], n: usize) -> Vec<usize> {
    let last = scores.len().saturating_sub(1);
    let mut inner: Vec<usize> = (1..last).collect();
    inner.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
    inner.truncate(n.saturating_sub(2));
    let mut pages: Vec<usize> = inner.into_iter().chain([0, last].into_iter().take(scores.len())).collect();
    pages.sort_unstable();
    pages
}

/// The first page and the newest ones of `visible` pages, `n` in all, ascending. `n` below 2 counts as 2.
pub fn window_pages(visible: usize, n: usize) -> Vec<usize> {
    let newest = visible.saturating_sub(n.max(2) - 1).max(1);
    (0..visible.min(1)).chain(newest..visible).collect()
}

/// Last queries of a prompt whose attention chooses the pages of [`crate::config::Pages::Snap`].
pub const SNAP_QUERIES: usize = 32;

/// Attention that queries of one KV head pay to each of its first `pages` pages: the softmax over tokens 0..=position, summed
/// over queries and over the tokens of a page. `queries` are (position, query `[head_dim]` after RoPE, not scaled), `keys`
/// `[tokens][head_dim]`.
///
/// This is the vote of SnapKV (Li et al. 2024, equation 2) with a page as the pool of its tokens.
pub fn page_masses(queries: &[(usize, &[f32])], keys: &[f16], pages: usize) -> Vec<f64> {
    let mut masses = vec![0.0; pages];
    for (position, query) in queries {
        let scale = 1.0 / (query.len() as f64).sqrt();
        let score = |key: &[f16]| query.iter().zip(key).map(|(&q, k)| f64::from(q) * k.to_f64()).sum::<f64>() * scale;
        let scores: Vec<f64> = keys.chunks_exact(query.len()).take(position + 1).map(score).collect();
        let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
        let total: f64 = weights.iter().sum();
        for (mass, page) in masses.iter_mut().zip(weights.chunks(G)) {
            *mass += page.iter().sum::<f64>() / total;
        }
    }
    masses
}

/// Scores by which pages of [`Pages::Snap`] are chosen, of one KV head of a sequence.
#[derive(Clone, Debug, Default)]
pub struct SnapScores {
    /// Masses ([`page_masses`]) of the pages that the prompt's end sees.
    pub prompt: Vec<f32>,
    /// Scores ([`page_score`]) of all pages that were visible at the last refresh; empty before the first.
    pub refreshed: Vec<f32>,
}

impl SnapScores {
    /// Returns true if the choice must be refreshed in a round whose first row sees `visible` pages. Drops refreshed
    /// scores of more pages than that: the sequence was restarted at its prompt, and chooses by the prompt's masses.
    pub fn is_due(&mut self, pages: Pages, visible: usize) -> bool {
        if self.refreshed.len() > visible {
            self.refreshed.clear();
        }
        pages.is_stale(self.current().len(), visible)
    }

    /// The scores to choose by, `[page]`: those of the last refresh, or the prompt's.
    pub fn current(&self) -> &[f32] {
        if self.refreshed.is_empty() { &self.prompt } else { &self.refreshed }
    }
}

/// Indices of the pages that a draft reads, ascending: [`select_pages`] of the pages scored by `masses`, `[page]`, which the
/// prompt's end sees, and all pages after them up to `visible`.
pub fn snap_pages(masses: &[f32], visible: usize, n: usize) -> Vec<usize> {
    let chosen = select_pages(masses, n).into_iter().filter(|page| *page < visible);
    chosen.chain(masses.len()..visible).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::noise::{Noise, Stream};
    use crate::quantize::quantize_page;
    use proptest::prelude::*;

    const D: usize = 16;

    fn noise(seed: u64, at: usize) -> f32 {
        4.0 * Noise { seed, sequence: 0, position: at, stream: Stream::Sample }.uniform(0) - 2.0
    }

    /// All keys and values of a sequence, its quantised pages, and the ring before decoding `position`.
    struct Sequence {
        keys: Vec<f16>,
        values: Vec<f16>,
        pages: Vec<Page>,
        ring_keys: Vec<f16>,
        ring_values: Vec<f16>,
        rounding: Rounding,
    }

    impl Sequence {
        fn new(tokens: usize, rounding: Rounding, element: impl Fn(u64, usize) -> f32) -> Sequence {
            let all = |seed| (0..tokens * D).map(|i| f16::from_f32(element(seed, i))).collect::<Vec<f16>>();
            let (keys, values) = (all(1), all(2));
            let page = |b: usize| {
                let range = b * G * D..(b + 1) * G * D;
                quantize_page(&keys[range.clone()], &values[range], D, rounding).unwrap()
            };
            let pages = (0..tokens / G).map(page).collect();
            // Entries of the ring that were never written hold values that no query may read.
            let ring = |x: &[f16]| {
                let mut ring = vec![f16::NAN; BUFFER_TOKENS * D];
                for token in 0..tokens {
                    let at = ring_index(token) * D;
                    ring[at..at + D].copy_from_slice(&x[token * D..(token + 1) * D]);
                }
                ring
            };
            let (ring_keys, ring_values) = (ring(&keys), ring(&values));
            Sequence { keys, values, pages, ring_keys, ring_values, rounding }
        }

        fn full_pages(&self) -> Vec<FullPage<'_>> {
            let page = |x| FullPage { keys: &self.keys[x..x + G * D], values: &self.values[x..x + G * D] };
            (0..self.pages.len()).map(|b| page(b * G * D)).collect()
        }

        fn cache<'a>(&'a self, full: &'a [FullPage]) -> Cache<'a> {
            Cache {
                head_dim: D,
                rounding: self.rounding,
                pages: &self.pages,
                full,
                buffer_keys: &self.ring_keys,
                buffer_values: &self.ring_values,
            }
        }

        fn attend(&self, query: &[f32], position: usize, view: View, pages: &[usize]) -> Result<Vec<f64>> {
            attend(query, position, view, pages, &self.cache(&self.full_pages()))
        }
    }

    fn query(seed: u64) -> Vec<f32> {
        (0..D).map(|c| noise(seed, c)).collect()
    }

    fn all_pages(position: usize) -> Vec<usize> {
        (0..visible_pages(position)).collect()
    }

    fn distance(a: &[f64], b: &[f64]) -> f64 {
        // NaN counts as infinitely far; f64::max would ignore it.
        let distances = a.iter().zip(b).map(|(a, b)| (a - b).abs());
        distances.fold(0.0, |most, d| if d.is_nan() { f64::INFINITY } else { d.max(most) })
    }

    /// Exact attention over keys and values `[tokens][head_dim]`.
    fn attend_exact(query: &[f32], keys: &[f32], values: &[f32]) -> Vec<f64> {
        let wide = |row: &[f32]| row.iter().map(|&x| f64::from(x)).collect();
        let rows = keys.chunks(query.len()).zip(values.chunks(query.len()));
        softmax_sum(query, &rows.map(|(key, value)| (wide(key), wide(value))).collect::<Vec<Token>>())
    }

    #[test]
    fn two_tokens_by_hand() {
        // Scores are 6/√4 = 3 and 0, so the weights are e³ and 1 over their sum.
        let out = attend_exact(
            &[2.0, 0.0, 0.0, 1.0],
            &[3.0, 9.0, 9.0, 0.0, 0.0, 5.0, 5.0, 0.0],
            &[1.0, 0.0, 2.0, 0.0, 0.0, 1.0, 2.0, 0.0],
        );
        let weight = 3f64.exp() / (3f64.exp() + 1.0);
        assert!(distance(&out, &[weight, 1.0 - weight, 2.0, 0.0]) < 1e-15);
    }

    #[test]
    fn local_attention_sees_its_reach_alone() {
        for position in [0, 255, 256, 383, 511, 512, 640] {
            let sequence = Sequence::new(position + 1, Rounding::Balanced, noise);
            let full = sequence.full_pages();
            let local = |view, reach| attend_local(&query(9), position, view, reach, &sequence.cache(&full)).unwrap();
            let wide = |tokens: &[f16]| tokens.iter().map(|x| x.to_f32()).collect::<Vec<f32>>();
            for reach in [256, 320, 1024] {
                let first = (position + 1).saturating_sub(reach) * D;
                let exact = attend_exact(&query(9), &wide(&sequence.keys[first..]), &wide(&sequence.values[first..]));
                assert!(distance(&local(View::Full, reach), &exact) < 1e-12, "{position} {reach}");
            }
            for view in [View::Upper, View::Both] {
                let all = sequence.attend(&query(9), position, view, &all_pages(position)).unwrap();
                assert!(distance(&local(view, position.max(256) + 1), &all) < 1e-12, "{position} {view:?}");
            }
        }
    }

    #[test]
    fn view_full_is_exact_attention_at_every_border() {
        for position in [0, 1, 127, 128, 255, 256, 257, 383, 384, 511, 512, 640] {
            let sequence = Sequence::new(position + 1, Rounding::Balanced, noise);
            let wide = |x: &[f16]| x.iter().map(|x| x.to_f32()).collect::<Vec<_>>();
            let exact = attend_exact(&query(5), &wide(&sequence.keys), &wide(&sequence.values));
            let full = sequence.attend(&query(5), position, View::Full, &all_pages(position)).unwrap();
            assert!(distance(&full, &exact) < 1e-12, "position {position}");
        }
    }

    #[test]
    fn quantised_views_are_close_in_their_order() {
        for rounding in [Rounding::Paper, Rounding::Balanced] {
            let sequence = Sequence::new(700, rounding, noise);
            let (pages, q) = (all_pages(699), query(6));
            let of = |view| sequence.attend(&q, 699, view, &pages).unwrap();
            let (upper, both) =
                (distance(&of(View::Upper), &of(View::Full)), distance(&of(View::Both), &of(View::Full)));
            assert!(both < 0.005 && upper < 0.05 && both < upper, "{rounding:?}: {both} {upper}");
        }
    }

    #[test]
    fn pages_the_law_hides_are_neutral_to_the_bit() {
        // Position 383 sees page 0. Page 1 exists and is listed, but its tokens are read from the buffer.
        let sequence = Sequence::new(384, Rounding::Balanced, noise);
        let of = |pages: &[usize]| sequence.attend(&query(7), 383, View::Both, pages).unwrap();
        assert_eq!(of(&[0]), of(&[0, 1, 2]));
        assert_ne!(of(&[0]), of(&[]));
        // One position later page 1 is read from the planes.
        let sequence = Sequence::new(385, Rounding::Balanced, noise);
        let of = |pages: &[usize]| sequence.attend(&query(7), 384, View::Both, pages).unwrap();
        assert_ne!(of(&[0]), of(&[0, 1]));
    }

    #[test]
    fn the_order_of_pages_does_not_matter_and_a_missing_one_is_an_error() {
        let sequence = Sequence::new(900, Rounding::Balanced, noise);
        let of = |pages: &[usize]| sequence.attend(&query(8), 899, View::Upper, pages).unwrap();
        assert!(distance(&of(&[0, 1, 2, 3, 4]), &of(&[3, 0, 4, 2, 1])) < 1e-14);
        let mut short = Sequence::new(900, Rounding::Balanced, noise);
        short.pages.truncate(2);
        assert!(short.attend(&query(8), 899, View::Upper, &[0, 1]).is_ok());
        let error = short.attend(&query(8), 899, View::Upper, &[0, 2]).unwrap_err();
        assert_eq!(error.kind, crate::ErrorKind::Internal);
        assert!(sequence.attend(&query(8)[1..], 899, View::Upper, &[]).is_err());
    }

    #[test]
    fn both_without_lower_nibbles_is_upper_except_for_its_centre() {
        for rounding in [Rounding::Paper, Rounding::Balanced] {
            let mut sequence = Sequence::new(600, rounding, noise);
            for page in &mut sequence.pages {
                page.key_lower.fill(0);
                page.value_lower.fill(0);
            }
            let of = |view| sequence.attend(&query(9), 599, view, &all_pages(599)).unwrap();
            let (both, upper) = (of(View::Both), of(View::Upper));
            match rounding {
                Rounding::Paper => assert_eq!(both, upper),
                // View Upper moves every value by −s/32; s is about 4/16 here.
                Rounding::Balanced => {
                    assert_ne!(both, upper);
                    assert!(distance(&both, &upper) < 0.02);
                }
            }
        }
    }

    #[test]
    fn equal_scores_average_and_strongly_negative_ones_vanish() {
        // All scores are exactly 0, so the output is the mean of the values. A score of 0 must not count as masked.
        let position = 520;
        let sequence = Sequence::new(position + 1, Rounding::Balanced, noise);
        let zero = sequence.attend(&[0.0; D], position, View::Full, &all_pages(position)).unwrap();
        for (channel, &got) in zero.iter().enumerate() {
            let values = (0..=position).map(|token| sequence.values[token * D + channel].to_f64());
            assert!((got - values.sum::<f64>() / (position + 1) as f64).abs() < 1e-12);
        }
        // All scores are far below 0 (−10,000 and −9,000). A hidden or absent token with score 0 would take all the weight.
        let far = Sequence::new(position + 1, Rounding::Balanced, |seed, i| match seed {
            1 => -100.0 - if i / D == 300 { 0.0 } else { 10.0 },
            _ => noise(seed, i),
        });
        let out = far.attend(&[25.0; D], position, View::Full, &all_pages(position)).unwrap();
        let kept: Vec<f64> = far.values[300 * D..301 * D].iter().map(|v| v.to_f64()).collect();
        assert!(distance(&out, &kept) < 1e-12);
    }

    #[test]
    fn chosen_pages() {
        assert_eq!(select_pages(&[0.0, 5.0, 1.0, 5.0, 9.0, -1.0], 4), [0, 1, 4, 5]);
        assert_eq!(select_pages(&[0.0, 5.0, 1.0, 5.0, 9.0, -1.0], 0), [0, 5]);
        assert_eq!(select_pages(&[1.0; 7], 4), [0, 1, 2, 6]);
        assert_eq!(select_pages(&[3.0, 2.0, 1.0], 9), [0, 1, 2]);
        assert_eq!(select_pages(&[3.0], 4), [0]);
        assert!(select_pages(&[], 4).is_empty());
        assert_eq!(window_pages(9, 4), [0, 6, 7, 8]);
        assert_eq!(window_pages(9, 1), [0, 8]);
        assert_eq!(window_pages(3, 8), [0, 1, 2]);
        assert_eq!(window_pages(1, 8), [0]);
        assert!(window_pages(0, 8).is_empty());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn the_score_is_at_most_the_bound_and_exact_along_an_axis(seed in 0u64..1_000, balanced: bool) {
            let rounding = if balanced { Rounding::Balanced } else { Rounding::Paper };
            let element = |s: u64, i: usize| noise(seed + s, i) * (1 + i % D) as f32;
            let page = &Sequence::new(G, rounding, element).pages[0];
            let q = query(seed + 50);
            let score = page_score(&q, &page.key_params, rounding);
            let end = |c: usize, code: u8| q[c] * dequantize_upper(code, page.key_params[c], rounding);
            let bound = (0..D).map(|c| end(c, 0).max(end(c, 15))).sum::<f32>();
            let middle = (0..D).map(|c| 0.5 * (end(c, 0) + end(c, 15))).sum::<f32>();
            prop_assert!(middle <= score && score <= bound, "{middle} {score} {bound}");
            // One channel's extremes are codes 0 and 15, so a query along that channel has the largest product as its score.
            let mut axis = [0.0; D];
            axis[3] = q[3];
            let most = end(3, 0).max(end(3, 15));
            prop_assert!((page_score(&axis, &page.key_params, rounding) - most).abs() <= 1e-6 * most.abs());
        }

        #[test]
        fn of_normal_keys_the_score_is_near_the_largest_product(seed in 0u64..1_000) {
            // Nearly normal with deviation 1, then with another mean and deviation for each channel.
            let normal = |s: u64, i: usize| (0..12).map(|j| noise(seed * 31 + s, 12 * i + j)).sum::<f32>() / 4.0;
            let element = |s: u64, i: usize| normal(s, i) * (1 + i % D) as f32 + (i % 5) as f32;
            let sequence = Sequence::new(3 * G, Rounding::Balanced, element);
            let q = query(seed + 50);
            let deviation = (0..D).map(|c| (q[c] * (1 + c) as f32).powi(2)).sum::<f32>().sqrt();
            for page in &sequence.pages {
                let value = |token: usize, c: usize| dequantize_upper(page.key_upper[token * D + c], page.key_params[c], Rounding::Balanced);
                let product = |token: usize| (0..D).map(|c| q[c] * value(token, c)).sum::<f32>();
                let most = (0..G).map(product).fold(f32::NEG_INFINITY, f32::max);
                let score = page_score(&q, &page.key_params, Rounding::Balanced);
                // Up to 2.5 deviations in these 1,000 seeds: the largest of 128 products varies.
                prop_assert!((score - most).abs() < 3.0 * deviation, "{score} {most} {deviation}");
            }
        }
    }

    #[test]
    fn the_best_tokens_are_nearer_to_all_than_other_choices() {
        let sequence = Sequence::new(900, Rounding::Balanced, noise);
        let full = sequence.full_pages();
        let cache = sequence.cache(&full);
        let q = query(8);
        let tokens = |n| attend_tokens(&q, 899, View::Upper, n, &cache).unwrap();
        let pages = |pages: &[usize]| sequence.attend(&q, 899, View::Upper, pages).unwrap();
        let all = pages(&all_pages(899));
        assert!(distance(&tokens(6 * G), &all) < 1e-12 && distance(&tokens(10 * G), &all) < 1e-12);
        assert!(distance(&tokens(0), &pages(&[])) < 1e-12);
        for page in 0..visible_pages(899) {
            assert!(distance(&tokens(G), &all) < distance(&pages(&[page]), &all), "page {page}");
        }
    }

    #[test]
    fn masses_are_shares_of_attention_within_the_causal_range() {
        let sequence = Sequence::new(5 * G, Rounding::Balanced, noise);
        let queries: Vec<(usize, Vec<f32>)> =
            [700, 5 * G - 1].into_iter().zip([query(3), query(4)]).map(|(p, q)| (p.min(5 * G - 1), q)).collect();
        let asked: Vec<(usize, &[f32])> = queries.iter().map(|(position, query)| (*position, &query[..])).collect();
        let masses = page_masses(&asked, &sequence.keys, 5);
        assert!((masses.iter().sum::<f64>() - 2.0).abs() < 1e-12);
        // By hand: query (1, 0, …) at token 130 of keys that are ln 2 · √D in page 1 and 0 in page 0.
        let mut keys = vec![f16::ZERO; 2 * G * D];
        let one = f16::from_f32(4.0 * std::f32::consts::LN_2);
        keys[G * D..].iter_mut().step_by(D).for_each(|key| *key = one);
        let mut query = vec![0.0; D];
        query[0] = 1.0;
        let masses = page_masses(&[(130, &query)], &keys, 2);
        // Three tokens of weight 2, to the precision of the half, and 128 of weight 1.
        assert!((masses[1] - 6.0 / 134.0).abs() < 1e-4 && (masses[0] - 128.0 / 134.0).abs() < 1e-4, "{masses:?}");
    }

    #[test]
    fn scores_of_kept_pages_are_refreshed_and_dropped_at_a_restart() {
        let pages = Pages::Snap { pages: 4, refresh: 3 };
        let mut scores = SnapScores { prompt: vec![0.5; 5], refreshed: Vec::new() };
        assert!(!scores.is_due(pages, 7) && scores.is_due(pages, 8));
        scores.refreshed = vec![1.0; 8];
        assert_eq!(scores.current(), [1.0; 8]);
        assert!(!scores.is_due(pages, 10) && scores.is_due(pages, 11));
        // Fewer visible pages: the sequence was restarted at its prompt.
        assert!(!scores.is_due(pages, 5));
        assert_eq!(scores.current(), [0.5; 5]);
    }

    #[test]
    fn snapped_pages_are_the_chosen_ones_of_the_prompt_and_all_later_ones() {
        let masses = [0.1, 0.2, 0.9, 0.0, 0.5, 0.3];
        assert_eq!(snap_pages(&masses, 6, 4), [0, 2, 4, 5]);
        assert_eq!(snap_pages(&masses, 9, 4), [0, 2, 4, 5, 6, 7, 8]);
        assert_eq!(snap_pages(&masses, 6, 100), [0, 1, 2, 3, 4, 5]);
        assert_eq!(snap_pages(&[], 3, 4), [0, 1, 2]);
        assert_eq!(snap_pages(&[], 0, 4), [] as [usize; 0]);
    }
}
