//! Memory arithmetic: bytes of the KV cache, and the largest context or batch that fits.
//!
//! Sizes are without padding, with one f16 scale and one f16 zero per group. A backend whose layout pads ([`crate::layout`])
//! adds its padding.

use crate::cache::{BUFFER_TOKENS, G};
use crate::config::{DraftWeights, ModelConfig, Planes, Sensitive, View};

/// Bytes of one f16.
const HALF: usize = 2;

/// Bytes of the upper block of a page (one KV head, one layer): upper nibbles of K and V, scale and zero per key channel and
/// per token's values.
pub const fn upper_page_bytes(head_dim: usize) -> usize {
    2 * (G * head_dim / 2) + 2 * HALF * head_dim + 2 * HALF * G
}

/// Bytes of the lower nibbles of a page (one KV head, one layer).
pub const fn lower_page_bytes(head_dim: usize) -> usize {
    2 * (G * head_dim / 2)
}

/// Bytes of a page of f16 keys and values (one KV head, one layer).
pub const fn full_page_bytes(head_dim: usize) -> usize {
    2 * HALF * G * head_dim
}

/// Bytes of the ring of recent keys and values (one KV head, one layer).
pub const fn buffer_bytes(head_dim: usize) -> usize {
    2 * HALF * BUFFER_TOKENS * head_dim
}

// 4.25, 8.25 and 16 bits per element at head_dim 128.
const _: () = assert!(upper_page_bytes(128) == 17_408);
const _: () = assert!(lower_page_bytes(128) == 16_384);
const _: () = assert!(full_page_bytes(128) == 65_536);

/// Complete pages of a sequence of `tokens`. Each is quantised when it is complete, so each needs a page of the pool.
pub const fn pages(tokens: usize) -> usize {
    tokens / G
}

/// Bytes of the caches of all sequences, over all layers and KV heads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheBytes {
    /// Upper nibbles and parameters.
    pub upper_bytes: usize,
    /// Lower nibbles.
    pub lower_bytes: usize,
    /// f16 pages.
    pub full_bytes: usize,
    /// Rings of recent tokens.
    pub buffer_bytes: usize,
}

impl CacheBytes {
    /// Caches of `slots` sequences of up to `capacity` tokens each.
    pub fn of(config: &ModelConfig, planes: Planes, capacity: usize, slots: usize) -> CacheBytes {
        CacheBytes::of_pool(config, planes, slots.saturating_mul(pages(capacity)), slots)
    }

    /// Caches of `slots` sequences that share `pool_pages` pages of every layer and KV head.
    pub fn of_pool(config: &ModelConfig, planes: Planes, pool_pages: usize, slots: usize) -> CacheBytes {
        let heads = slots.saturating_mul(config.layers).saturating_mul(config.kv_heads);
        let stored = pool_pages.saturating_mul(config.layers).saturating_mul(config.kv_heads);
        let when = |kept: bool, bytes: usize| if kept { stored.saturating_mul(bytes) } else { 0 };
        CacheBytes {
            upper_bytes: when(planes.upper, upper_page_bytes(config.head_dim)),
            lower_bytes: when(planes.lower, lower_page_bytes(config.head_dim)),
            full_bytes: when(planes.full, full_page_bytes(config.head_dim)),
            buffer_bytes: heads.saturating_mul(buffer_bytes(config.head_dim)),
        }
    }

    /// Sum of all four.
    pub fn total(&self) -> usize {
        [self.upper_bytes, self.lower_bytes, self.full_bytes, self.buffer_bytes]
            .into_iter()
            .fold(0, usize::saturating_add)
    }
}

/// Number of weights of each kind of matrices, over all layers, in the order of [`Sensitive::KINDS`].
fn weights_of_kinds(config: &ModelConfig) -> [usize; Sensitive::KINDS.len()] {
    let (hidden, q, intermediate) = (config.hidden, config.q_width(), config.intermediate);
    let layer = [(q + 2 * config.kv_width()) * hidden, q * hidden, 2 * intermediate * hidden, intermediate * hidden];
    layer.map(|weights| config.layers.saturating_mul(weights))
}

/// Bytes of draft weights that a step reads: 4.25 bits a weight, 8.25 of the head.
pub fn draft_step_bytes(config: &ModelConfig) -> usize {
    let weights = weights_of_kinds(config).iter().fold(0, |sum: usize, &weights| sum.saturating_add(weights));
    (weights / 32).saturating_mul(17).saturating_add(config.vocab * config.hidden / 32 * 33)
}

/// Additional bytes of a draft step if a kind of matrices is sensitive, by kind: 4 bits per weight.
pub fn sensitive_bytes(config: &ModelConfig) -> [usize; Sensitive::KINDS.len()] {
    weights_of_kinds(config).map(|weights| weights / 2)
}

/// Least ratio of a draft step's bytes to those added by sensitive matrices at which they pay (derived in
/// docs/design/sensitive.md).
const SENSITIVE_SHARE: usize = 20;

/// Default sensitive matrices for drafts with 4-bit weights that read `view` of up to `tokens` tokens of each of `slots`
/// sequences: the down projections, if their bytes are few compared with the cache's. The rule depends on shapes only.
pub fn sensitive(config: &ModelConfig, draft: DraftWeights, view: View, tokens: usize, slots: usize) -> Sensitive {
    if draft == DraftWeights::None {
        return Sensitive::NONE;
    }
    let cache = CacheBytes::of(config, Planes::of(&[view]), tokens, slots);
    let step = draft_step_bytes(config).saturating_add(cache.total() - cache.buffer_bytes);
    let [.., down] = sensitive_bytes(config);
    if down.saturating_mul(SENSITIVE_SHARE) <= step { Sensitive::DOWN } else { Sensitive::NONE }
}

/// The largest n ≤ `most` (tokens of a context, or sequences) with `needed_bytes(n)` ≤ `bytes`; 0 if none fits.
/// `needed_bytes` must not decrease with n.
pub fn largest_fitting(most: usize, bytes: usize, needed_bytes: impl Fn(usize) -> usize) -> usize {
    let (mut low, mut high) = (0, most);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if needed_bytes(middle) <= bytes { low = middle } else { high = middle - 1 }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Dtype, View};

    fn llama_8b() -> ModelConfig {
        ModelConfig {
            layers: 32,
            hidden: 4096,
            intermediate: 14_336,
            heads: 32,
            kv_heads: 8,
            head_dim: 128,
            vocab: 128_256,
            max_positions: 131_072,
            dtype: Dtype::Bf16,
            ..ModelConfig::default()
        }
    }

    #[test]
    fn a_full_context_of_llama_8b() {
        let bytes = CacheBytes::of(&llama_8b(), Planes::of(&[View::Upper, View::Both]), 131_072, 1);
        // 131,072 tokens × 32 layers × 8 heads × 256 elements = 8.6e9 elements of 4.25 and 4 bits.
        assert_eq!(bytes.upper_bytes, 8_589_934_592 / 8 * 17 / 4);
        assert_eq!(bytes.lower_bytes, 8_589_934_592 / 2);
        assert_eq!(bytes.full_bytes, 0);
        assert_eq!(bytes.buffer_bytes, 384 * 32 * 8 * 256 * 2);
        assert_eq!(bytes.total(), bytes.upper_bytes + bytes.lower_bytes + bytes.buffer_bytes);
    }

    #[test]
    fn planes_that_are_not_kept_cost_nothing() {
        let of = |views: &[View]| CacheBytes::of(&llama_8b(), Planes::of(views), 1_024, 2);
        let (upper, full) = (of(&[View::Upper]), of(&[View::Full]));
        assert_eq!((upper.lower_bytes, upper.full_bytes, full.upper_bytes, full.lower_bytes), (0, 0, 0, 0));
        assert_eq!(full.full_bytes, 2 * 32 * 8 * 8 * 65_536);
        // Tokens of an incomplete page are in the buffer only.
        let planes = Planes::of(&[View::Full]);
        assert_eq!(CacheBytes::of(&llama_8b(), planes, 127, 1).full_bytes, 0);
        assert_eq!(CacheBytes::of(&llama_8b(), planes, 128, 1).full_bytes, 32 * 8 * 65_536);
    }

    #[test]
    fn the_longest_context_fits_and_one_more_does_not() {
        let (config, planes) = (llama_8b(), Planes::of(&[View::Both]));
        let needed =
            |capacity| CacheBytes::of(&config, planes, capacity, 3).total() + 16_000_000_000 + 8_192 * capacity;
        for bytes in [17_000_000_000, 18_234_567_890, 24_000_000_000] {
            let longest = largest_fitting(config.max_positions, bytes, needed);
            assert!(longest < config.max_positions);
            assert!(needed(longest) <= bytes && needed(longest + 1) > bytes, "{longest}");
        }
        assert_eq!(largest_fitting(config.max_positions, usize::MAX, needed), 131_072);
        assert_eq!(largest_fitting(config.max_positions, 16_000_000_000, needed), 0);
    }

    #[test]
    fn every_part_counts() {
        let every = Planes::of(&[View::Both, View::Full]);
        let bytes = CacheBytes::of(&llama_8b(), every, 1_024, 2);
        // Eight pages of 2 × 32 × 8 heads; bytes of a page and of a ring from docs/design/cache.md.
        let heads = 2 * 32 * 8;
        let want = [heads * 8 * 17_408, heads * 8 * 16_384, heads * 8 * 65_536, heads * 196_608];
        assert_eq!([bytes.upper_bytes, bytes.lower_bytes, bytes.full_bytes, bytes.buffer_bytes], want);
        assert_eq!(bytes.total(), want.iter().sum());
    }

    #[test]
    fn down_projections_are_sensitive_where_the_cache_outweighs_them() {
        let config = llama_8b();
        let down = 32 * 4096 * 14_336;
        assert_eq!(sensitive_bytes(&config), [32 * 4096 * (4096 + 2 * 1024) / 2, 32 * 4096 * 4096 / 2, down, down / 2]);
        // 6,979,321,856 weights of 4.25 bits, and the head's 525,336,576 of 8.25.
        assert_eq!(draft_step_bytes(&config), 6_979_321_856 / 32 * 17 + 525_336_576 / 32 * 33);
        let of = |view, tokens, slots| sensitive(&config, DraftWeights::Int4, view, tokens, slots);
        // 20 · 939,524,096 bytes are those of draft weights and of 220,000 tokens of 4.25 bits a number, or of half as many of
        // 8.25.
        let least = (20 * (down / 2) - draft_step_bytes(&config)).div_ceil(32 * 8 * 17_408) * G;
        assert_eq!(of(View::Upper, least, 1), Sensitive::DOWN);
        assert_eq!(of(View::Upper, least - 1, 1), Sensitive::NONE);
        assert_eq!(of(View::Upper, least / 2 + G, 2), Sensitive::DOWN);
        assert_eq!(of(View::Both, least * 17 / 33 + G, 1), Sensitive::DOWN);
        assert_eq!(sensitive(&config, DraftWeights::None, View::Both, usize::MAX, 8), Sensitive::NONE);
        // Seven billion weights with 32 KV heads: from some 80,000 tokens on.
        let mha = ModelConfig { kv_heads: 32, intermediate: 11_008, vocab: 32_000, ..config };
        assert_eq!(sensitive(&mha, DraftWeights::Int4, View::Upper, 131_072, 1), Sensitive::DOWN);
        assert_eq!(sensitive(&mha, DraftWeights::Int4, View::Upper, 65_536, 1), Sensitive::NONE);
    }

    #[test]
    fn heads_of_another_width() {
        // 64 channels: key and value parameters differ in number.
        assert_eq!((upper_page_bytes(64), lower_page_bytes(64)), (8_192 + 256 + 512, 8_192));
        assert_eq!((full_page_bytes(64), buffer_bytes(64)), (32_768, 98_304));
    }

    #[test]
    fn a_context_that_fills_memory_to_the_byte_fits() {
        let (config, planes) = (llama_8b(), Planes::of(&[View::Both]));
        let needed = |capacity| CacheBytes::of(&config, planes, capacity, 1).total() + capacity;
        for capacity in [1, 127, 128, 5_000, config.max_positions] {
            assert_eq!(largest_fitting(config.max_positions, needed(capacity), needed), capacity);
        }
    }

    #[test]
    fn huge_plans_do_not_overflow() {
        let config = ModelConfig { layers: usize::MAX / 2, ..llama_8b() };
        let bytes = CacheBytes::of(&config, Planes::of(&[View::Both, View::Full]), usize::MAX, 3);
        assert_eq!((bytes.upper_bytes, bytes.buffer_bytes, bytes.total()), (usize::MAX, usize::MAX, usize::MAX));
        let needed = |capacity| CacheBytes::of(&config, Planes::of(&[View::Full]), capacity, 1).total();
        assert_eq!(largest_fitting(usize::MAX, 1 << 40, needed), 0);
        assert_eq!(largest_fitting(usize::MAX, usize::MAX, needed), usize::MAX);
    }
}
