//! Ablations of the cache: groups of keys and values other than the engine's own, and truncated codes.
//!
//! `eval` uses them to measure what the engine's choices gain (QuantSpec's ablation of axes and group sizes). Pages are
//! quantised by [`crate::quantize`] and read as views Upper and Both dequantise them. Kernels support the engine's groups
//! only, so the dequantised values are kept in f16.

use crate::cache::G;
use crate::config::Rounding;
use crate::error::{Error, Result};
use crate::quantize::{dequantize_both, dequantize_upper, named, quantize_group};
use half::f16;

/// The elements of a page that form a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Axis {
    /// One channel, over tokens.
    Channel,
    /// One token, over the channels of a head.
    Token,
}

/// How the keys and values of a page are quantised and read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ablation {
    /// Groups of the keys.
    pub key_axis: Axis,
    /// Groups of the values.
    pub value_axis: Axis,
    /// Most elements of a group. The last group of a token or channel may be shorter.
    pub group: usize,
    /// View Upper reads the 8-bit code of [`Rounding::Balanced`] with its four lower bits zero: the least of the codes that
    /// share an upper nibble, not their centre.
    pub truncated: bool,
}

/// Keys and values of a page, `[G][head_dim]` each.
pub type Values = (Vec<f16>, Vec<f16>);

impl Ablation {
    /// The engine's own groups, for heads of up to 128 channels.
    pub const OWN: Ablation = Ablation { key_axis: Axis::Channel, value_axis: Axis::Token, group: G, truncated: false };

    /// Keys and values, both `[G][head_dim]`, as views Upper and Both read them, rounded to f16.
    ///
    /// # Errors
    /// [`crate::ErrorKind::NotFinite`] for NaN and infinities, [`crate::ErrorKind::Internal`] if
    /// lengths do not match or groups have no elements.
    pub fn page(&self, keys: &[f16], values: &[f16], head_dim: usize, rounding: Rounding) -> Result<[Values; 2]> {
        let of = |what: &str, x: &[f16], axis| {
            self.views(x, head_dim, axis, rounding).map_err(|error| named(error, format!("{what} of a page")))
        };
        let ([key_upper, key_both], [value_upper, value_both]) =
            (of("keys", keys, self.key_axis)?, of("values", values, self.value_axis)?);
        Ok([(key_upper, value_upper), (key_both, value_both)])
    }

    /// Views Upper and Both of keys or values.
    fn views(&self, x: &[f16], head_dim: usize, axis: Axis, rounding: Rounding) -> Result<[Vec<f16>; 2]> {
        if self.group == 0 || head_dim == 0 || x.len() != G * head_dim {
            let (count, group) = (x.len(), self.group);
            return Err(Error::internal(format!("{count} elements of head_dim {head_dim} in groups of {group}")));
        }
        // A line is a channel or a token. Number of lines, distance of their starts, their length, distance of elements.
        let (lines, line, length, step) = match axis {
            Axis::Channel => (head_dim, 1, G, head_dim),
            Axis::Token => (G, head_dim, head_dim, 1),
        };
        let mut out = [vec![f16::ZERO; x.len()], vec![f16::ZERO; x.len()]];
        let (mut upper, mut lower) = (vec![0; self.group], vec![0; self.group]);
        for (first, start) in
            (0..lines).flat_map(|first| (0..length).step_by(self.group).map(move |start| (first, start)))
        {
            let count = self.group.min(length - start);
            let at = |i: usize| first * line + (start + i) * step;
            let group: Vec<f32> = (0..count).map(|i| x[at(i)].to_f32()).collect();
            let params = quantize_group(&group, rounding, &mut upper[..count], &mut lower[..count])?;
            for i in 0..count {
                let draft = match self.truncated {
                    true => dequantize_both(upper[i], -8, params),
                    false => dequantize_upper(upper[i], params, rounding),
                };
                // Half a step beyond the greatest element may exceed f16.
                let half = |value: f32| f16::from_f32(value.clamp(f16::MIN.to_f32(), f16::MAX.to_f32()));
                out[0][at(i)] = half(draft);
                out[1][at(i)] = half(dequantize_both(upper[i], lower[i], params));
            }
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantize::quantize_page;

    const D: usize = 96;

    fn elements(seed: usize) -> Vec<f16> {
        (0..G * D).map(|i| f16::from_f32((((i + seed) * 7_919) % 1_009) as f32 / 100.0 - 5.0)).collect()
    }

    #[test]
    fn the_engines_own_groups_give_its_values() {
        let (keys, values) = (elements(0), elements(13));
        for rounding in [Rounding::Balanced, Rounding::Paper] {
            let [upper, both] = Ablation::OWN.page(&keys, &values, D, rounding).unwrap();
            let page = quantize_page(&keys, &values, D, rounding).unwrap();
            for at in 0..G * D {
                let (token, channel) = (at / D, at % D);
                let (u, l, params) = (page.key_upper[at], page.key_lower[at], page.key_params[channel]);
                assert_eq!(upper.0[at], f16::from_f32(dequantize_upper(u, params, rounding)));
                assert_eq!(both.0[at], f16::from_f32(dequantize_both(u, l, params)));
                let (u, l, params) = (page.value_upper[at], page.value_lower[at], page.value_params[token]);
                assert_eq!(upper.1[at], f16::from_f32(dequantize_upper(u, params, rounding)));
                assert_eq!(both.1[at], f16::from_f32(dequantize_both(u, l, params)));
            }
        }
    }

    #[test]
    fn the_other_axis_is_the_transposed_page() {
        // A square page, so that its transposition is a page.
        let keys: Vec<f16> = (0..G * G).map(|i| f16::from_f32(((i * 7_919) % 1_009) as f32 / 100.0 - 5.0)).collect();
        let turned = |x: &[f16]| -> Vec<f16> { (0..G * G).map(|i| x[i % G * G + i / G]).collect() };
        for group in [32, 64, 128] {
            let by_token = Ablation { key_axis: Axis::Token, group, ..Ablation::OWN };
            let [(rows, values), _] = by_token.page(&keys, &keys, G, Rounding::Balanced).unwrap();
            let by_channel = Ablation { group, ..Ablation::OWN };
            let [(columns, _), _] = by_channel.page(&turned(&keys), &keys, G, Rounding::Balanced).unwrap();
            assert_eq!(rows, turned(&columns), "groups of {group}");
            // Values have the same axis, and so the same groups.
            assert_eq!(rows, values);
        }
    }

    #[test]
    fn a_group_has_its_own_range_and_the_last_may_be_shorter() {
        // Channels 64 to 95 of a token are the last group of 64; each group holds one value.
        let x: Vec<f16> = (0..G * D).map(|i| f16::from_f32(if i % D < 64 { 3.0 } else { -1_000.25 })).collect();
        let by_token = Ablation { value_axis: Axis::Token, key_axis: Axis::Token, group: 64, truncated: false };
        let [upper, both] = by_token.page(&x, &x, D, Rounding::Balanced).unwrap();
        assert_eq!([&upper.0, &upper.1, &both.0, &both.1], [&x; 4]);
        // In groups of 128 the token is one group, which spans both values.
        let [upper, _] = Ablation { group: 128, ..by_token }.page(&x, &x, D, Rounding::Balanced).unwrap();
        assert_ne!(upper.0, x);
        for truncated in [false, true] {
            // 0, 1, … 255 in steps of the 8-bit grid: view Both is exact, and 16 codes share an upper nibble.
            let x: Vec<f16> = (0..G * D).map(|i| f16::from_f32((2 * (i / D) + i % 2) as f32)).collect();
            let ablation = Ablation { truncated, key_axis: Axis::Channel, ..Ablation::OWN };
            let [upper, both] = ablation.page(&x, &x, D, Rounding::Balanced).unwrap();
            for (at, value) in x.iter().enumerate().filter(|(at, _)| at % 2 == 0) {
                // Even channels hold 0, 2, … 254: a range of 254 in 255 steps.
                let step = f16::from_f32(16.0 * 254.0 / 255.0).to_f32() / 16.0;
                assert!((both.0[at].to_f32() - value.to_f32()).abs() <= 0.5 * step + 0.1);
                let below = value.to_f32() - upper.0[at].to_f32();
                let (least, most) = if truncated { (-0.6, 16.0) } else { (-8.1, 8.1) };
                assert!((least..=most).contains(&below), "truncated {truncated}: {below} below at {at}");
            }
            let mean = x.iter().zip(&upper.0).map(|(x, read)| x.to_f64() - read.to_f64()).sum::<f64>() / x.len() as f64;
            assert!((mean - if truncated { 7.5 } else { 0.0 }).abs() < 0.2, "truncated {truncated}: mean {mean}");
        }
    }

    #[test]
    fn bad_pages_are_refused() {
        let (mut keys, values) = (elements(0), elements(1));
        let error = Ablation::OWN.page(&keys[1..], &values, D, Rounding::Balanced).unwrap_err();
        assert_eq!(error.kind, crate::ErrorKind::Internal);
        let none = Ablation { group: 0, ..Ablation::OWN };
        assert_eq!(none.page(&keys, &values, D, Rounding::Balanced).unwrap_err().kind, crate::ErrorKind::Internal);
        keys[5] = f16::NAN;
        let error = Ablation::OWN.page(&keys, &values, D, Rounding::Balanced).unwrap_err();
        assert!(error.kind == crate::ErrorKind::NotFinite && error.message.contains("keys"), "{}", error.message);
    }

    #[test]
    fn the_whole_range_of_half_precision_stays_finite() {
        let x: Vec<f16> = (0..G * D).map(|i| if (i / D).is_multiple_of(2) { f16::MAX } else { f16::MIN }).collect();
        for rounding in [Rounding::Balanced, Rounding::Paper] {
            let [upper, both] = Ablation::OWN.page(&x, &x, D, rounding).unwrap();
            assert!([upper.0, upper.1, both.0, both.1].iter().flatten().all(|value| value.is_finite()));
        }
    }
}
