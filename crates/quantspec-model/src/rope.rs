//! Rotary position embeddings: cosines and sines of a position, for every kind of scaling.
//!
//! The convention is Hugging Face's Llama ("rotate half"): channel i is paired with i + D/2, `y1 = x1·cos − x2·sin`, `y2 =
//! x2·cos + x1·sin`, angle = position · inverse frequency of i. Angles are computed in f64: in f32 the angle of the fastest
//! channel is wrong by up to 0.004 rad at position 10⁵.
//!
//! If only the first R channels of a head are rotated ("partial rotary"), the checkpoint pairs i with i + R/2. The rows of Q
//! and K are then loaded in the order of `stored_channel`, which makes them pairs (i, i + D/2) with i < R/2; all others have
//! the angle 0. The same permutation of queries and keys changes no score.

use quantspec_core::config::{ModelConfig, Rope, RopeScaling};
use std::f64::consts::PI;

/// Inverse frequencies of a model with their scaling.
#[derive(Clone, Debug)]
pub struct RopeTable {
    /// Inverse frequencies of the rotated pairs, [R/2].
    inverse: Vec<f64>,
    /// Factor on the cosines and sines of rotated pairs.
    attention_factor: f64,
    /// Factor on the cosines of all other pairs: the root of the factor on the attention scores (`Scales::scores`).
    level: f64,
    dynamic: Option<Dynamic>,
}

/// NTK-aware scaling: the base depends on the length of the sequence.
#[derive(Clone, Copy, Debug)]
struct Dynamic {
    theta: f64,
    factor: f64,
    original: usize,
}

/// `theta^(-2i/R)`, [R/2].
fn inverse_frequencies(theta: f64, dim: usize) -> Vec<f64> {
    (0..dim / 2).map(|i| theta.powf(-(2.0 * i as f64) / dim as f64)).collect()
}

/// The checkpoint's channel that becomes `channel` of a head with `head_dim` channels, of which the first `dim` are rotated.
pub(crate) fn stored_channel(channel: usize, head_dim: usize, dim: usize) -> usize {
    let (pair, second) = (channel % (head_dim / 2), channel / (head_dim / 2));
    match pair.checked_sub(dim / 2) {
        None => pair + second * dim / 2,
        Some(unrotated) => dim + unrotated + second * (head_dim - dim) / 2,
    }
}

impl RopeTable {
    /// The table of a model's layers that see all tokens.
    pub fn new(config: &ModelConfig) -> RopeTable {
        RopeTable::of(&config.rope, config)
    }

    /// The table of local layers; `None` if the model has none.
    pub fn local(config: &ModelConfig) -> Option<RopeTable> {
        config.local.as_ref().map(|local| RopeTable::of(&local.rope, config))
    }

    fn of(rope: &Rope, config: &ModelConfig) -> RopeTable {
        let (theta, dim) = (rope.theta, rope.dim);
        let mut table = RopeTable {
            inverse: inverse_frequencies(theta, dim),
            attention_factor: 1.0,
            level: config.scales.scores.sqrt(),
            dynamic: None,
        };
        match rope.scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => table.inverse.iter_mut().for_each(|f| *f /= factor),
            RopeScaling::Dynamic { factor, original } => table.dynamic = Some(Dynamic { theta, factor, original }),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original } => {
                for f in &mut table.inverse {
                    // Rotations within the pre-training context: channels with few are stretched, channels with many are
                    // kept.
                    let rotations = original as f64 * *f / (2.0 * PI);
                    let keep = ((rotations - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                    *f *= keep + (1.0 - keep) / factor;
                }
            }
            RopeScaling::Factors { ref factors, attention_factor } => {
                for (f, factor) in table.inverse.iter_mut().zip(factors) {
                    *f /= f64::from(*factor);
                }
                table.attention_factor = attention_factor;
            }
            RopeScaling::Yarn { factor, original, beta_fast, beta_slow, attention_factor, truncate } => {
                // The (fractional) channel that makes `rotations` turns within the pre-training context.
                let channel =
                    |rotations: f64| dim as f64 * (original as f64 / (rotations * 2.0 * PI)).ln() / (2.0 * theta.ln());
                let (mut low, mut high) = (channel(beta_fast), channel(beta_slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                (low, high) = (low.max(0.0), high.min(dim as f64 - 1.0));
                if low == high {
                    high += 0.001; // Hugging Face's guard against an empty ramp
                }
                for (i, f) in table.inverse.iter_mut().enumerate() {
                    let stretch = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    *f *= (1.0 - stretch) + stretch / factor;
                }
                table.attention_factor = attention_factor;
            }
        }
        table.attention_factor *= table.level;
        table
    }

    /// The part of the sequence's length that angles depend on: 0, or the length itself if dynamic scaling uses it.
    pub(crate) fn length_class(&self, length: usize) -> usize {
        self.dynamic.filter(|dynamic| length > dynamic.original).map_or(0, |_| length)
    }

    /// Cosines and sines of `position`, [D/2] each. They include the root of the factor on the attention scores; those of
    /// rotated pairs also include the attention factor of YaRN and LongRoPE.
    ///
    /// `length` is the sequence length at this row and matters for dynamic scaling only: a prefill row passes the prompt's
    /// length, a step row position + 1.
    pub fn fill(&self, position: usize, length: usize, cos: &mut [f32], sin: &mut [f32]) {
        let grown;
        let inverse = match self.dynamic {
            Some(Dynamic { theta, factor, original }) if length > original => {
                let dim = 2.0 * self.inverse.len() as f64; // R
                let growth = factor * length as f64 / original as f64 - (factor - 1.0);
                grown = inverse_frequencies(theta * growth.powf(dim / (dim - 2.0)), 2 * self.inverse.len());
                &grown
            }
            _ => &self.inverse,
        };
        let (cos, level_cos) = cos.split_at_mut(inverse.len());
        let (sin, level_sin) = sin.split_at_mut(inverse.len());
        self.fill_unrotated(level_cos, level_sin);
        for ((f, cos), sin) in inverse.iter().zip(cos).zip(sin) {
            let (s, c) = (position as f64 * f).sin_cos();
            *cos = (c * self.attention_factor) as f32;
            *sin = (s * self.attention_factor) as f32;
        }
    }

    /// Cosines and sines of pairs that are not rotated, at any position: all [D/2] of a layer without position embedding.
    pub fn fill_unrotated(&self, cos: &mut [f32], sin: &mut [f32]) {
        cos.fill(self.level as f32);
        sin.fill(0.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quantspec_core::config::Rope;

    fn table(head_dim: usize, scaling: RopeScaling) -> RopeTable {
        RopeTable::new(&model(head_dim, scaling))
    }

    fn model(head_dim: usize, scaling: RopeScaling) -> ModelConfig {
        let rope = Rope { theta: 10_000.0, dim: head_dim, scaling, query_scale: None };
        ModelConfig { head_dim, rope, ..ModelConfig::default() }
    }

    fn fill(table: &RopeTable, position: usize, length: usize) -> (Vec<f32>, Vec<f32>) {
        let half = table.inverse.len(); // every channel is rotated
        let (mut cos, mut sin) = (vec![0.0; half], vec![0.0; half]);
        table.fill(position, length, &mut cos, &mut sin);
        (cos, sin)
    }

    #[test]
    fn far_angles_are_exact() {
        // The first channel turns by 1 rad per token: cos and sin of 131071, computed with 60 digits.
        let (cos, sin) = fill(&table(64, RopeScaling::None), 131_071, 131_072);
        assert_eq!((cos[0], sin[0]), (-0.817_983_5_f32, -0.575_241_7_f32));
    }

    #[test]
    fn llama3_keeps_short_waves_and_stretches_long_ones() {
        let (factor, original) = (8.0, 8192);
        let plain = table(128, RopeScaling::None).inverse;
        let scaling = RopeScaling::Llama3 { factor, low_freq_factor: 1.0, high_freq_factor: 4.0, original };
        let scaled = table(128, scaling).inverse;
        for (plain, scaled) in plain.iter().zip(scaled) {
            let wavelength = 2.0 * PI / plain;
            let ratio = plain / scaled;
            if wavelength < original as f64 / 4.0 {
                assert_eq!(ratio, 1.0);
            } else if wavelength > original as f64 {
                assert!((ratio - factor).abs() < 1e-12);
            } else {
                assert!(ratio > 1.0 && ratio < factor);
            }
        }
    }

    #[test]
    fn stored_factors_stretch_as_llama3_does() {
        let plain = table(64, RopeScaling::None).inverse;
        let scaling = RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original: 8192 };
        let scaled = table(64, scaling).inverse;
        let factors = plain.iter().zip(&scaled).map(|(plain, scaled)| (plain / scaled) as f32).collect();
        let stored = table(64, RopeScaling::Factors { factors, attention_factor: 1.0 });
        for (stored, scaled) in stored.inverse.iter().zip(scaled) {
            assert!((stored / scaled - 1.0).abs() < 1e-7);
        }
    }

    #[test]
    fn stored_channels_are_a_permutation_that_keeps_pairs() {
        for (head_dim, dim) in [(128, 96), (64, 64), (32, 4), (20, 14), (256, 130)] {
            let stored = |channel| stored_channel(channel, head_dim, dim);
            let mut all: Vec<usize> = (0..head_dim).map(stored).collect();
            for i in 0..dim / 2 {
                assert_eq!((stored(i), stored(i + head_dim / 2)), (i, i + dim / 2));
            }
            assert!((0..head_dim).all(|i| i % (head_dim / 2) < dim / 2 || stored(i) >= dim));
            all.sort_unstable();
            assert_eq!(all, (0..head_dim).collect::<Vec<_>>());
        }
    }

    #[test]
    fn channels_after_the_rotated_ones_stay() {
        let mut config = model(64, RopeScaling::Factors { factors: vec![2.0; 24], attention_factor: 1.25 });
        config.rope.dim = 48;
        config.scales.scores = 0.25;
        let table = RopeTable::new(&config);
        let (mut cos, mut sin) = (vec![0.0f32; 32], vec![0.0f32; 32]);
        table.fill(1000, 1001, &mut cos, &mut sin);
        for i in 0..24 {
            let angle = 1000.0 / 2.0 * 10_000f64.powf(-2.0 * i as f64 / 48.0);
            assert_eq!((cos[i], sin[i]), ((0.625 * angle.cos()) as f32, (0.625 * angle.sin()) as f32));
        }
        // The attention factor is of the rotation; the factor on the scores is of every channel.
        assert_eq!((&cos[24..], &sin[24..]), (&[0.5; 8][..], &[0.0; 8][..]));
        table.fill_unrotated(&mut cos, &mut sin);
        assert_eq!((cos, sin), (vec![0.5; 32], vec![0.0; 32]));
    }

    #[test]
    fn dynamic_scaling_begins_beyond_the_original_context() {
        let plain = table(64, RopeScaling::None);
        let dynamic = table(64, RopeScaling::Dynamic { factor: 2.0, original: 100 });
        assert_eq!(fill(&dynamic, 99, 100), fill(&plain, 99, 100));
        assert_ne!(fill(&dynamic, 99, 101), fill(&plain, 99, 101));
        assert_eq!([99, 100, 101, 200].map(|length| dynamic.length_class(length)), [0, 0, 101, 200]);
        assert_eq!(plain.length_class(200), 0);
    }

    #[test]
    fn yarn_with_an_empty_ramp_is_a_step() {
        let scaling = RopeScaling::Yarn {
            factor: 4.0,
            original: 1024,
            beta_fast: 4.0,
            beta_slow: 4.0,
            attention_factor: 1.0,
            truncate: false,
        };
        let (plain, scaled) = (table(64, RopeScaling::None).inverse, table(64, scaling).inverse);
        // Channels with more than 4 turns within the context are kept, the others stretched.
        for (plain, scaled) in plain.iter().zip(scaled) {
            let factor = if 1024.0 * plain / (2.0 * PI) > 4.0 { 1.0 } else { 4.0 };
            assert!((plain / scaled - factor).abs() < 1e-12, "{plain} {scaled}");
        }
    }

    #[test]
    fn yarn_scales_cosine_and_sine() {
        let scaling = RopeScaling::Yarn {
            factor: 4.0,
            original: 1024,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: 1.25,
            truncate: true,
        };
        let (cos, sin) = fill(&table(64, scaling), 777, 778);
        for (cos, sin) in cos.iter().zip(sin) {
            assert!((cos.hypot(sin) - 1.25).abs() < 1e-6);
        }
    }
}
