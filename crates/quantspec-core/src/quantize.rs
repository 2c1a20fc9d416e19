//! Quantisers. This file has pages of keys and values, in two nibble planes. `draft_weights.rs` has draft weights and
//! activations, `search.rs` the search for the scale and zero of weights.
//!
//! A cache element is `(U + L/16)·s + z` in view Both and `U·s + z'` in view Upper. U is in 0..=15 and L in −8..=7; s and z
//! are f16 per group. A key group is one channel over the G tokens of a page; a value group is one token over the head's
//! channels. Codes are computed in f32 against the *stored* s and z, so rounding the parameters adds no error.
//!
//! * [`Rounding::Paper`]: s = range/15, z = minimum, z' = z. U rounds the value, L rounds the remainder. A remainder of
//!   exactly half a step saturates L, which biases view Both by about −0.03 of its step.
//! * [`Rounding::Balanced`]: one rounding to 8 bits on the mid-rise grid of step S = range/255, with z = minimum + 8·S and s
//!   = 16·S. The code is in −8..=247; U = (code + 8) / 16 and L = code − 16·U. A given U covers codes 16·U − 8 ..= 16·U + 7,
//!   whose centre is half a code below 16·U. View Upper corrects that: z' = z − s/32. There is no bias, and no clipping
//!   beyond the rounding of z.
//!
//! All roundings are to nearest, ties to even, and every operation is IEEE f32, so other implementations can match bit for
//! bit.

mod draft_weights;
mod search;

pub use draft_weights::{
    ACTIVATION_4, ACTIVATION_8, Activations, WEIGHT_GROUP, WeightRow, quantize_activations, quantize_activations_to,
    quantize_head_row, quantize_weights_row,
};
pub use search::{FITS, SHRINK, TARGET_SHRINK};
pub(crate) use search::{Group, better, search, squared_error, squared_error_of_both};

use crate::cache::G;
use crate::config::Rounding;
use crate::error::{Error, Result};
use half::f16;

/// Smallest scale of a group that is not constant: the smallest normal f16 (2⁻¹⁴). A subnormal scale would lose bits.
pub const SCALE_MIN: f32 = 6.103_515_6e-5;

const _: () = assert!(SCALE_MIN == 1.0 / 16_384.0);

/// Stored parameters of one group: an element is `code · scale + zero`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Params {
    /// Difference in value between two neighbouring codes; 0 for a constant group.
    pub scale: f16,
    /// Value of code 0.
    pub zero: f16,
}

impl Params {
    /// Rounds the parameters to f16. The scale is at least [`SCALE_MIN`]; constant groups do not come here.
    pub(crate) fn rounded(scale: f32, zero: f32) -> Params {
        Params { scale: f16::from_f32(scale.max(SCALE_MIN)), zero: f16::from_f32(zero) }
    }

    /// As [`Params::rounded`], with an error if f16 cannot hold the parameters.
    fn new(scale: f32, zero: f32) -> Result<Params> {
        Params::rounded(scale, zero).finite()
    }

    /// Parameters of a group whose elements all equal `value`; exact if `value` is an f16 value.
    pub(crate) fn constant(value: f32) -> Result<Params> {
        Params { scale: f16::ZERO, zero: f16::from_f32(value) }.finite()
    }

    pub(crate) fn finite(self) -> Result<Params> {
        if self.scale.is_finite() && self.zero.is_finite() {
            Ok(self)
        } else {
            Err(Error::not_finite("a quantisation group spans more than half precision can hold"))
        }
    }
}

/// Independent minima and maxima, so that compilers vectorise the search.
const LANES: usize = 16;

/// Smallest and largest element of a non-empty group.
pub(crate) fn range(x: &[f32]) -> Result<(f32, f32)> {
    let (mut low, mut high, mut finite) = ([f32::INFINITY; LANES], [f32::NEG_INFINITY; LANES], [true; LANES]);
    for chunk in x.chunks(LANES) {
        for (lane, &value) in chunk.iter().enumerate() {
            low[lane] = if value < low[lane] { value } else { low[lane] };
            high[lane] = if value > high[lane] { value } else { high[lane] };
            finite[lane] &= value.is_finite();
        }
    }
    if finite.contains(&false) {
        let at = x.iter().position(|value| !value.is_finite()).unwrap_or(0);
        return Err(Error::not_finite(format!("element {at} of a quantisation group is {}", x[at])));
    }
    Ok((low.into_iter().fold(f32::INFINITY, f32::min), high.into_iter().fold(f32::NEG_INFINITY, f32::max)))
}

/// The nearest integer, ties to even, for magnitudes below 2²². On baseline x86-64 [`f32::round_ties_even`] is a library
/// call; this is not.
pub(crate) fn nearest(x: f32) -> f32 {
    const INTEGERS: f32 = 12_582_912.0; // 1.5 · 2²³: neighbouring f32 values are 1 apart here
    (x + INTEGERS) - INTEGERS
}

/// Quantises one group into `upper` (0..=15) and `lower` (−8..=7), both as long as `x`.
///
/// # Errors
/// [`crate::ErrorKind::NotFinite`] for NaN, infinities, and ranges f16 cannot hold; finite f16 elements never fail.
/// [`crate::ErrorKind::Internal`] if the lengths differ or are 0.
pub fn quantize_group(x: &[f32], rounding: Rounding, upper: &mut [u8], lower: &mut [i8]) -> Result<Params> {
    if x.is_empty() || upper.len() != x.len() || lower.len() != x.len() {
        return Err(Error::internal(format!("group of {}, codes of {} and {}", x.len(), upper.len(), lower.len())));
    }
    let (low, high) = range(x)?;
    if low == high {
        upper.fill(0);
        lower.fill(0);
        return Params::constant(low);
    }
    let params = match rounding {
        Rounding::Paper => Params::new((high - low) / 15.0, low)?,
        Rounding::Balanced => {
            let step = (high - low) / 255.0;
            Params::new(16.0 * step, low + 8.0 * step)?
        }
    };
    let (scale, zero) = (params.scale.to_f32(), params.zero.to_f32());
    let codes = x.iter().zip(upper.iter_mut().zip(lower.iter_mut()));
    match rounding {
        Rounding::Paper => codes.for_each(|(&value, (u, l))| (*u, *l) = encode_paper(value, scale, zero)),
        Rounding::Balanced => codes.for_each(|(&value, (u, l))| (*u, *l) = encode_balanced(value, scale, zero)),
    }
    Ok(params)
}

fn encode_paper(value: f32, scale: f32, zero: f32) -> (u8, i8) {
    let steps = (value - zero) / scale;
    // The bounds are integers, so clamping before rounding gives the same result.
    let upper = nearest(steps.clamp(0.0, 15.0));
    let lower = nearest((16.0 * (steps - upper)).clamp(-8.0, 7.0));
    (upper as u8, lower as i8)
}

fn encode_balanced(value: f32, scale: f32, zero: f32) -> (u8, i8) {
    // Shifted by 8, the code is a byte whose nibbles are U and L + 8.
    let code = nearest(((value - zero) / (scale / 16.0)).clamp(-8.0, 247.0)) as i32 + 8;
    ((code >> 4) as u8, ((code & 15) - 8) as i8)
}

/// Value of an upper nibble in view Upper.
pub fn dequantize_upper(u: u8, params: Params, rounding: Rounding) -> f32 {
    let (scale, zero) = (params.scale.to_f32(), params.zero.to_f32());
    let centre = match rounding {
        Rounding::Paper => zero,
        Rounding::Balanced => zero - scale / 32.0,
    };
    f32::from(u) * scale + centre
}

/// Value of both nibbles in view Both.
pub fn dequantize_both(u: u8, l: i8, params: Params) -> f32 {
    (f32::from(u) + f32::from(l) / 16.0) * params.scale.to_f32() + params.zero.to_f32()
}

/// Quantised keys and values of G tokens of one KV head in one layer, in canonical order: `[token][channel]`, one code per
/// byte. [`crate::layout`] packs it.
#[derive(Clone, Debug, PartialEq)]
pub struct Page {
    /// Channels of the head.
    pub head_dim: usize,
    /// Upper nibbles of the keys, `[G][head_dim]`, 0..=15.
    pub key_upper: Vec<u8>,
    /// Lower nibbles of the keys, `[G][head_dim]`, −8..=7.
    pub key_lower: Vec<i8>,
    /// Parameters of the keys, `[head_dim]`.
    pub key_params: Vec<Params>,
    /// Upper nibbles of the values, `[G][head_dim]`, 0..=15.
    pub value_upper: Vec<u8>,
    /// Lower nibbles of the values, `[G][head_dim]`, −8..=7.
    pub value_lower: Vec<i8>,
    /// Parameters of the values, `[G]`.
    pub value_params: Vec<Params>,
}

impl Page {
    /// A page of zeros.
    pub fn zeros(head_dim: usize) -> Page {
        let elements = G * head_dim;
        Page {
            head_dim,
            key_upper: vec![0; elements],
            key_lower: vec![0; elements],
            key_params: vec![Params::default(); head_dim],
            value_upper: vec![0; elements],
            value_lower: vec![0; elements],
            value_params: vec![Params::default(); G],
        }
    }
}

/// Quantises the keys (after RoPE) and values of G tokens, both `[G][head_dim]` f16.
///
/// # Errors
/// [`crate::ErrorKind::NotFinite`] with the channel or token, [`crate::ErrorKind::Internal`] if lengths do not match.
pub fn quantize_page(keys: &[f16], values: &[f16], head_dim: usize, rounding: Rounding) -> Result<Page> {
    let elements = G * head_dim;
    if head_dim == 0 || keys.len() != elements || values.len() != elements {
        return Err(Error::internal(format!(
            "a page of head_dim {head_dim} has {elements} elements, not {} keys and {} values",
            keys.len(),
            values.len()
        )));
    }
    let mut page = Page::zeros(head_dim);
    let (mut group, mut upper, mut lower) = ([0.0; G], [0; G], [0; G]);
    for channel in 0..head_dim {
        for (token, element) in group.iter_mut().enumerate() {
            *element = keys[token * head_dim + channel].to_f32();
        }
        page.key_params[channel] = quantize_group(&group, rounding, &mut upper, &mut lower)
            .map_err(|error| named(error, format!("keys of channel {channel}")))?;
        for token in 0..G {
            page.key_upper[token * head_dim + channel] = upper[token];
            page.key_lower[token * head_dim + channel] = lower[token];
        }
    }
    for token in 0..G {
        let row = token * head_dim..(token + 1) * head_dim;
        let group: Vec<f32> = values[row.clone()].iter().map(|value| value.to_f32()).collect();
        let (upper, lower) = (&mut page.value_upper[row.clone()], &mut page.value_lower[row]);
        page.value_params[token] = quantize_group(&group, rounding, upper, lower)
            .map_err(|error| named(error, format!("values of token {token} of a page")))?;
    }
    Ok(page)
}

/// Adds the name of the quantised group to an error.
pub(crate) fn named(error: Error, what: String) -> Error {
    Error { message: format!("{what}: {}", error.message), ..error }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::ErrorKind;
    use crate::noise::{Noise, Stream};
    use proptest::prelude::*;

    const MODES: [Rounding; 2] = [Rounding::Paper, Rounding::Balanced];

    fn halves(x: &[f32]) -> Vec<f32> {
        x.iter().map(|&x| f16::from_f32(x).to_f32()).collect()
    }

    fn quantized(x: &[f32], rounding: Rounding) -> (Vec<u8>, Vec<i8>, Params) {
        let (mut upper, mut lower) = (vec![0; x.len()], vec![0; x.len()]);
        let params = quantize_group(x, rounding, &mut upper, &mut lower).unwrap();
        (upper, lower, params)
    }

    /// Normal deviates by the sum of twelve uniforms, reproducible.
    pub(crate) fn normal(count: usize, seed: u64) -> Vec<f32> {
        let u = |position: usize| Noise { seed, sequence: 0, position, stream: Stream::Sample }.uniform(0);
        (0..count).map(|i| (0..12).map(|j| u(12 * i + j)).sum::<f32>() - 6.0).collect()
    }

    #[test]
    fn codes_of_a_ramp_and_their_ties() {
        // Sixteen values, each one step apart and exact in f16: the paper's grid hits each exactly.
        let ramp: Vec<f32> = (0..16).map(|i| 2.0 + i as f32 / 4.0).collect();
        let (upper, lower, params) = quantized(&ramp, Rounding::Paper);
        assert_eq!((params.scale.to_f32(), params.zero.to_f32()), (0.25, 2.0));
        assert_eq!(upper, (0..16).collect::<Vec<u8>>());
        assert!(lower.iter().all(|l| *l == 0));
        // A tie rounds to the even step; a remainder of +1/2 saturates the lower nibble.
        let ties = [0.0, 0.5, 1.5, 2.5, 15.0];
        let (upper, lower, _) = quantized(&ties, Rounding::Paper);
        assert_eq!((upper, lower), (vec![0, 0, 2, 2, 15], vec![0, 7, -8, 7, 0]));
        // 256 values are exactly the 256 codes of the joint grid.
        let bytes: Vec<f32> = (0..256).map(|i| i as f32).collect();
        let (upper, lower, params) = quantized(&bytes, Rounding::Balanced);
        assert_eq!((params.scale.to_f32(), params.zero.to_f32()), (16.0, 8.0));
        for (i, (u, l)) in upper.iter().zip(&lower).enumerate() {
            assert_eq!(16 * i32::from(*u) + i32::from(*l) + 8, i as i32);
            assert_eq!(dequantize_both(*u, *l, params), i as f32);
        }
        // A tie of the joint grid rounds to the even code: 0.5 is code −7.5, so −8, and 1.5 is code −6.5, so −6.
        let (upper, lower, _) = quantized(&[0.0, 0.5, 1.5, 255.0], Rounding::Balanced);
        assert_eq!((upper, lower), (vec![0, 0, 0, 15], vec![-8, -8, -6, 7]));
    }

    #[test]
    fn constant_groups_are_exact() {
        for rounding in MODES {
            for value in [0.0, -0.0, 1.0, -30.062_5, 65_504.0, -65_504.0, 5.960_464_5e-8] {
                let (upper, lower, params) = quantized(&[value; 128], rounding);
                assert_eq!(params.scale, f16::ZERO);
                assert!(upper.iter().all(|u| *u == 0) && lower.iter().all(|l| *l == 0));
                assert_eq!(dequantize_upper(0, params, rounding), value);
                assert_eq!(dequantize_both(0, 0, params), value);
            }
        }
    }

    #[test]
    fn tiny_ranges_keep_a_normal_scale() {
        for rounding in MODES {
            // The smallest f16 and multiples of it: a range far below one step of the smallest scale.
            let x = halves(&[0.0, 5.960_464_5e-8, 2e-6]);
            let (upper, lower, params) = quantized(&x, rounding);
            assert_eq!(params.scale.to_f32(), SCALE_MIN);
            for i in 0..3 {
                let both = dequantize_both(upper[i], lower[i], params);
                assert!((both - x[i]).abs() <= SCALE_MIN / 32.0 + 3e-8, "{rounding:?} {both} {}", x[i]);
            }
        }
    }

    #[test]
    fn codes_keep_to_their_bits_where_the_zero_rounds_far() {
        // f16 values are 0.5 apart here, so the stored zero lies many steps outside the group, on either side.
        for x in [[1_000.74f32, 1_000.76, 1_000.8], [1_000.3, 1_000.4, 1_000.49]] {
            let beyond = if f16::from_f32(x[0]).to_f32() < x[0] { 15 } else { 0 };
            for rounding in MODES {
                let (upper, lower, _) = quantized(&x, rounding);
                assert!(upper.iter().all(|u| *u == beyond), "{rounding:?} {upper:?}");
                assert!(lower.iter().all(|l| *l == if beyond == 0 { -8 } else { 7 }), "{rounding:?} {lower:?}");
            }
            assert_eq!(quantize_weights_row(&x, &[]).unwrap().codes, [beyond; 3]);
            assert_eq!(quantize_head_row(&x).unwrap().codes, [17 * beyond; 3]);
        }
    }

    #[test]
    fn non_finite_elements_are_refused() {
        for rounding in MODES {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x = [1.0; 8];
                x[5] = bad;
                let error = quantize_group(&x, rounding, &mut [0; 8], &mut [0; 8]).unwrap_err();
                assert_eq!(error.kind, ErrorKind::NotFinite);
                assert_eq!(quantize_group(&[bad; 8], rounding, &mut [0; 8], &mut [0; 8]).unwrap_err().kind, error.kind);
                assert!(quantize_weights_row(&x, &[]).is_err() && quantize_head_row(&x).is_err());
                assert!(quantize_activations(&x).is_err());
            }
            // Ranges that f16 cannot hold need elements that are not f16 values.
            assert!(quantize_group(&[-65_504.0, 65_504.0], rounding, &mut [0; 2], &mut [0; 2]).is_ok());
            assert!(quantize_group(&[1e6, 2e6], rounding, &mut [0; 2], &mut [0; 2]).is_err());
            assert!(quantize_group(&[1.0], rounding, &mut [0; 2], &mut [0; 1]).is_err());
            assert!(quantize_group(&[], rounding, &mut [], &mut []).is_err());
        }
        let mut keys = vec![f16::ONE; G * 8];
        keys[77 * 8 + 3] = f16::NAN;
        let error = quantize_page(&keys, &vec![f16::ONE; G * 8], 8, Rounding::Balanced).unwrap_err();
        assert!(error.message.contains("channel 3") && error.kind == ErrorKind::NotFinite, "{}", error.message);
        let error = quantize_page(&vec![f16::ONE; G * 8], &keys, 8, Rounding::Balanced).unwrap_err();
        assert!(error.message.contains("token 77"), "{}", error.message);
    }

    #[test]
    fn view_both_and_view_upper_have_no_bias() {
        // Means over 64k values, in steps of each view. With Rounding::Paper a remainder of +1/2 saturates, which biases view
        // Both.
        for (rounding, most_both) in [(Rounding::Paper, 0.05), (Rounding::Balanced, 0.02)] {
            let (mut both, mut upper, mut count) = (0.0, 0.0, 0.0);
            for (group, x) in normal(65_536, 7).chunks(128).enumerate() {
                let x = halves(&x.iter().map(|x| x * (1.0 + group as f32 / 64.0)).collect::<Vec<_>>());
                let (u, l, params) = quantized(&x, rounding);
                let scale = params.scale.to_f64();
                for i in 0..x.len() {
                    both += f64::from(dequantize_both(u[i], l[i], params) - x[i]) / (scale / 16.0);
                    upper += f64::from(dequantize_upper(u[i], params, rounding) - x[i]) / scale;
                    count += 1.0;
                }
            }
            assert!((both / count).abs() < most_both, "{rounding:?} Both {}", both / count);
            assert!((upper / count).abs() < 0.02, "{rounding:?} Upper {}", upper / count);
            if rounding == Rounding::Paper {
                assert!(both / count < -0.01, "the paper's saturation should show: {}", both / count);
            }
        }
    }

    #[test]
    fn pages_group_keys_by_channel_and_values_by_token() {
        let element = |i: usize| f16::from_f32(((i * 7_919) % 1_009) as f32 / 100.0 - 5.0);
        let (keys, values): (Vec<f16>, Vec<f16>) = (0..G * 24).map(|i| (element(i), element(i + 13))).unzip();
        for rounding in MODES {
            let page = quantize_page(&keys, &values, 24, rounding).unwrap();
            for channel in 0..24 {
                let column: Vec<f32> = (0..G).map(|token| keys[token * 24 + channel].to_f32()).collect();
                let (upper, lower, params) = quantized(&column, rounding);
                assert_eq!(page.key_params[channel], params);
                for token in 0..G {
                    assert_eq!(page.key_upper[token * 24 + channel], upper[token]);
                    assert_eq!(page.key_lower[token * 24 + channel], lower[token]);
                }
            }
            for token in 0..G {
                let row: Vec<f32> = values[token * 24..][..24].iter().map(|x| x.to_f32()).collect();
                let (upper, lower, params) = quantized(&row, rounding);
                assert_eq!(page.value_params[token], params);
                assert_eq!(page.value_upper[token * 24..][..24], upper);
                assert_eq!(page.value_lower[token * 24..][..24], lower);
            }
        }
        assert!(quantize_page(&keys, &values[1..], 24, Rounding::Paper).is_err());
    }

    /// Groups of f16 values of any size, centre and spread, some with an outlier.
    pub(super) fn group() -> impl Strategy<Value = Vec<f32>> {
        (prop::collection::vec(-1.0f32..1.0, 2..=G), -14i32..14, -40.0f32..40.0, prop::option::of(0..G)).prop_map(
            |(x, exponent, centre, outlier)| {
                let spread = 2f32.powi(exponent);
                let mut x: Vec<f32> = x.iter().map(|x| x * spread + centre).collect();
                if let Some(at) = outlier.filter(|at| *at < x.len()) {
                    x[at] = (100.0 * x[at]).clamp(-65_504.0, 65_504.0);
                }
                halves(&x)
            },
        )
    }

    proptest! {
        #[test]
        fn error_is_within_half_a_step(x in group()) {
            let greatest = x.iter().fold(0.0f32, |most, x| most.max(x.abs()));
            for rounding in MODES {
                let (u, l, params) = quantized(&x, rounding);
                let (scale, zero) = (params.scale.to_f32(), params.zero.to_f32());
                // f32 rounding of the check itself, and the ends of the range: the stored scale may be 2⁻¹² too small, and
                // the balanced zero is rounded to f16, which clips the ends.
                let float = greatest * 1e-6 + 1e-7;
                let stored = 15.0 * scale / 4_096.0 + if rounding == Rounding::Balanced { zero.abs() / 2_048.0 } else { 0.0 };
                for i in 0..x.len() {
                    prop_assert!(u[i] <= 15 && (-8..=7).contains(&l[i]));
                    let upper = (dequantize_upper(u[i], params, rounding) - x[i]).abs();
                    let both = (dequantize_both(u[i], l[i], params) - x[i]).abs();
                    // Half a step of each view; with Rounding::Paper a remainder of +1/2 loses a whole lower step.
                    let (most_upper, most_both) = match rounding {
                        Rounding::Paper => (scale / 2.0, scale / 16.0),
                        Rounding::Balanced => (scale * (0.5 + 1.0 / 32.0), scale / 32.0),
                    };
                    prop_assert!(upper <= most_upper + stored + float, "{rounding:?} upper {upper} scale {scale}");
                    prop_assert!(both <= most_both + stored + float, "{rounding:?} both {both} scale {scale}");
                }
            }
        }
        #[test]
        fn upper_codes_are_a_rounding_of_both(x in group()) {
            // The draft reads the upper half of the target's codes, so its values do not depend on the lower plane.
            for rounding in MODES {
                let (u, l, params) = quantized(&x, rounding);
                for i in 0..x.len() {
                    let distance = (dequantize_both(u[i], l[i], params) - dequantize_upper(u[i], params, rounding)).abs();
                    let float = 4e-7 * params.zero.to_f32().abs();
                    prop_assert!(distance <= params.scale.to_f32() * (0.5 + 1.0 / 32.0) * 1.000_01 + float);
                }
                let mut again = vec![0; x.len()];
                let mut other = vec![3; x.len()];
                quantize_group(&x, rounding, &mut again, &mut other).unwrap();
                prop_assert_eq!(&again, &u);
                prop_assert_eq!(&other, &l);
            }
        }

        #[test]
        fn codes_equal_an_integer_model(x in group()) {
            // Codes computed in f64 must agree, except at ties and near ties; ties go to the even code.
            for rounding in MODES {
                let (u, l, params) = quantized(&x, rounding);
                let (scale, zero) = (params.scale.to_f64(), params.zero.to_f64());
                if scale == 0.0 {
                    continue;
                }
                for i in 0..x.len() {
                    let steps = (f64::from(x[i]) - zero) / scale;
                    let (coarse, fine) = match rounding {
                        Rounding::Paper => {
                            let coarse = steps.round_ties_even().clamp(0.0, 15.0);
                            (coarse, (16.0 * (steps - coarse)).round_ties_even().clamp(-8.0, 7.0))
                        }
                        Rounding::Balanced => {
                            let code = (16.0 * steps).round_ties_even().clamp(-8.0, 247.0) + 8.0;
                            ((code / 16.0).floor(), code.rem_euclid(16.0) - 8.0)
                        }
                    };
                    let near_tie = ((16.0 * steps).fract().abs() - 0.5).abs() < 1e-3;
                    prop_assert!(near_tie || (f64::from(u[i]), f64::from(l[i])) == (coarse, fine));
                }
            }
        }
    }
}
