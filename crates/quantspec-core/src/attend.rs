//! Attention of one query over one KV head, in f64 and one token after another: the meaning of every fast kernel.
//!
//! The visibility law ([`crate::cache`]) decides what a query at position p reads: tokens before Q(p) from pages, through a
//! view, and tokens Q(p)..=p from the buffer in full precision. A draft may read only some of the pages; a page's quantised
//! key parameters bound the scores inside it, which is how the best ones are found without reading them.

use crate::cache::{BUFFER_TOKENS, G, buffer_slot, visible_buffer, visible_pages};
use crate::config::{Rounding, View};
use crate::error::{Error, Result};
use crate::quantize::{Page, Params, dequantize_both, dequantize_upper};
use half::f16;

/// Keys and values of G tokens in full precision, `[G][head_dim]` each: a page of view Full.
#[derive(Clone, Copy, Debug)]
pub struct FullPage<'a> {
    /// Keys.
    pub keys: &'a [f16],
    /// Values.
    pub values: &'a [f16],
}

/// Cache of one sequence, layer and KV head. Views that are not read may have no pages.
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
    /// Ring of recent keys, `[BUFFER_TOKENS][head_dim]`; token t is in slot [`buffer_slot`].
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
        let at = buffer_slot(token) * self.head_dim;
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

/// Attention output `[head_dim]` of a query (after RoPE, not yet scaled) at `position`; scores are q·k / √head_dim.
///
/// `pages` lists the pages to read in any order, for example `0..visible_pages(position)` for all of them; pages the law hides
/// from this position contribute nothing.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] where shapes do not fit or a listed visible page is not there.
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

/// Exact attention over full-precision keys and values `[tokens][head_dim]`, as a prompt row at position `tokens − 1` reads
/// them.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] where lengths do not fit or there is no token.
pub fn attend_exact(query: &[f32], keys: &[f32], values: &[f32]) -> Result<Vec<f64>> {
    let head_dim = query.len();
    if head_dim == 0 || keys.is_empty() || keys.len() != values.len() || !keys.len().is_multiple_of(head_dim) {
        return Err(Error::internal(format!("{} keys and {} values of head_dim {head_dim}", keys.len(), values.len())));
    }
    let wide = |row: &[f32]| row.iter().map(|&x| f64::from(x)).collect();
    let tokens: Vec<Token> =
        keys.chunks(head_dim).zip(values.chunks(head_dim)).map(|(key, value)| (wide(key), wide(value))).collect();
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

/// Upper bound of q·k (unscaled) over the keys of a page in view Upper: `Σ_c max(q_c·lo_c, q_c·hi_c)` with lo and hi the
/// values of codes 0 and 15. Heads that share a KV head are scored by the largest of their bounds.
pub fn page_bound(query: &[f32], key_params: &[Params], rounding: Rounding) -> f32 {
    let most = |(&q, &params): (&f32, &Params)| {
        (q * dequantize_upper(0, params, rounding)).max(q * dequantize_upper(15, params, rounding))
    };
    query.iter().zip(key_params).map(most).sum()
}

/// Indices of the `n` pages a draft reads, ascending: the first, the last, and those of the highest bounds, the lower index
/// among equals. `n` below 2 counts as 2.
pub fn select_pages(bounds: &[f32], n: usize) -> Vec<usize> {
    let last = bounds.len().saturating_sub(1);
    let mut inner: Vec<usize> = (1..last).collect();
    inner.sort_by(|&a, &b| bounds[b].total_cmp(&bounds[a]).then(a.cmp(&b)));
    inner.truncate(n.saturating_sub(2));
    let mut pages: Vec<usize> = inner.into_iter().chain([0, last].into_iter().take(bounds.len())).collect();
    pages.sort_unstable();
    pages
}

/// The first page and the newest ones of `visible` pages, `n` in all, ascending. `n` below 2 counts as 2.
pub fn window_pages(visible: usize, n: usize) -> Vec<usize> {
    let newest = visible.saturating_sub(n.max(2) - 1).max(1);
    (0..visible.min(1)).chain(newest..visible).collect()
}
