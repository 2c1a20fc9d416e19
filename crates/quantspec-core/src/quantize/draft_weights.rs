//! Draft weights in 4 bits, or 8 of the head and of sensitive matrices; draft activations in 8 or 4 bits.

use super::search::{Group, SHRINK, W4_TOP, search};
use super::{Params, nearest, range};
use crate::error::{Error, Result};

/// Elements along k in one group of draft weights and of draft activations.
pub const WEIGHT_GROUP: usize = 128;

/// One row of draft weights: asymmetric codes in groups of [`WEIGHT_GROUP`] along k. `w ≈ code · scale + zero`.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightRow {
    /// One code per weight: 0..=15, or 0..=255 in 8 bits.
    pub codes: Vec<u8>,
    /// Parameters of each group; the last group may be shorter.
    pub params: Vec<Params>,
}

impl WeightRow {
    /// The dequantised row, `[k]`.
    pub fn dequantize(&self) -> Vec<f32> {
        let value = |(at, &code): (usize, &u8)| {
            let params = self.params[at / WEIGHT_GROUP];
            f32::from(code) * params.scale.to_f32() + params.zero.to_f32()
        };
        self.codes.iter().enumerate().map(value).collect()
    }

    /// Dot product with quantised activations, as the draft's kernels compute it: exact integer sums per group, `a · (s · Σ
    /// code·q + z · Σ q)`. Here the groups are summed in f64.
    pub fn dot(&self, x: &Activations) -> f64 {
        let groups = self.codes.chunks(WEIGHT_GROUP).zip(x.codes.chunks(WEIGHT_GROUP));
        let sums = groups.map(|(codes, q)| {
            let product: i32 = codes.iter().zip(q).map(|(&code, &q)| i32::from(code) * i32::from(q)).sum();
            let sum: i32 = q.iter().map(|&q| i32::from(q)).sum();
            (f64::from(product), f64::from(sum))
        });
        sums.zip(self.params.iter().zip(&x.scales))
            .map(|((product, sum), (params, &scale))| {
                f64::from(scale) * (params.scale.to_f64() * product + params.zero.to_f64() * sum)
            })
            .sum()
    }
}

/// Greatest 8-bit code.
const W8_TOP: u8 = 255;

/// Quantises one group of weights to codes 0..=`top` with f16 parameters; there are as many `codes`. In 8 bits, scale =
/// range/top and zero = minimum. In 4 bits, [`search`] improves on those.
fn quantize_weights_group(group: Group, top: u8, codes: &mut [u8]) -> Result<Params> {
    let w = group.w;
    if w.is_empty() || codes.len() != w.len() {
        return Err(Error::internal(format!("group of {} weights, {} codes", w.len(), codes.len())));
    }
    let (low, high) = range(w)?;
    if low == high {
        codes.fill(0);
        return Params::constant(low);
    }
    let whole = Params::new((high - low) / f32::from(top), low)?;
    let params = if top == W4_TOP { search(group, low, high, whole, &SHRINK) } else { whole };
    let (scale, zero) = (params.scale.to_f32(), params.zero.to_f32());
    for (&value, code) in w.iter().zip(codes) {
        *code = nearest(((value - zero) / scale).clamp(0.0, f32::from(top))) as u8;
    }
    Ok(params)
}

fn quantize_row(w: &[f32], importance: &[f32], top: u8) -> Result<WeightRow> {
    let mut row = WeightRow { codes: vec![0; w.len()], params: Vec::with_capacity(w.len().div_ceil(WEIGHT_GROUP)) };
    let mut importance = importance.chunks(WEIGHT_GROUP);
    for (w, codes) in w.chunks(WEIGHT_GROUP).zip(row.codes.chunks_mut(WEIGHT_GROUP)) {
        let group = Group { w, importance: importance.next().unwrap_or_default() };
        row.params.push(quantize_weights_group(group, top, codes)?);
    }
    Ok(row)
}

/// Quantises a row `[k]` of a linear layer to 4 bits, codes 0..=15. `importance` as in [`crate::weights::quantize_row`].
///
/// # Errors
/// [`crate::ErrorKind::NotFinite`] for NaN, infinities and ranges f16 cannot hold.
pub fn quantize_weights_row(w: &[f32], importance: &[f32]) -> Result<WeightRow> {
    quantize_row(w, importance, W4_TOP)
}

/// Quantises a row `[k]` of the LM head, or of a sensitive matrix, to 8 bits, codes 0..=255. A head in 4
/// bits costs about 3 percentage points of acceptance, in 8 bits none.
///
/// # Errors
/// As [`quantize_weights_row`].
pub fn quantize_head_row(w: &[f32]) -> Result<WeightRow> {
    quantize_row(w, &[], W8_TOP)
}

/// Draft activations of one row: `x ≈ code · scale`, symmetric, in groups of [`WEIGHT_GROUP`].
#[derive(Clone, Debug, PartialEq)]
pub struct Activations {
    /// One code per element, −127..=127.
    pub codes: Vec<i8>,
    /// Scale of each group; 0 if all elements are 0.
    pub scales: Vec<f32>,
}

/// Quantises the activations `[k]` of a row to int8 per group: scale = largest magnitude / 127.
///
/// # Errors
/// [`crate::ErrorKind::NotFinite`] for NaN and infinities.
pub fn quantize_activations(x: &[f32]) -> Result<Activations> {
    quantize_activations_to(x, WEIGHT_GROUP, ACTIVATION_8)
}

/// Largest code of an 8-bit activation.
pub const ACTIVATION_8: f32 = 127.0;

/// Largest code of a 4-bit activation.
pub const ACTIVATION_4: f32 = 7.0;

/// Quantises the activations `[k]` of a row to codes of `−most..=most` (at most 127) in groups of `group`: scale = largest
/// magnitude / `most`.
///
/// # Errors
/// As [`quantize_activations`].
pub fn quantize_activations_to(x: &[f32], group: usize, most: f32) -> Result<Activations> {
    let mut out = Activations { codes: Vec::with_capacity(x.len()), scales: Vec::new() };
    for group in x.chunks(group) {
        let (low, high) = range(group)?;
        let scale = high.max(-low) / most;
        // The scale underflows to 0 for magnitudes below 2e-43; the code is then 0.
        let code = |&value: &f32| {
            if scale > 0.0 { nearest((value / scale).clamp(-most, most)) as i8 } else { 0 }
        };
        out.codes.extend(group.iter().map(code));
        out.scales.push(scale);
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::super::SCALE_MIN;
    use super::super::tests::{group, normal};
    use super::*;
    use half::f16;
    use proptest::prelude::*;

    #[test]
    fn weight_rows_and_activations() {
        let (w, x) = (normal(300, 1), normal(300, 2));
        for (row, top) in [(quantize_weights_row(&w, &[]).unwrap(), 15.0), (quantize_head_row(&w).unwrap(), 255.0)] {
            assert_eq!((row.codes.len(), row.params.len()), (300, 3));
            // The short last group has its own parameters.
            assert_eq!(row.params[2], quantize_row(&w[256..], &[], top as u8).unwrap().params[0]);
            if top == 255.0 {
                let tail = w[256..].iter().fold((f32::MAX, f32::MIN), |(a, b), x| (a.min(*x), b.max(*x)));
                assert_eq!(row.params[2].zero, f16::from_f32(tail.0));
                assert_eq!(row.params[2].scale, f16::from_f32((tail.1 - tail.0) / top));
            }
            for (at, (value, want)) in row.dequantize().into_iter().zip(&w).enumerate() {
                let params = row.params[at / 128];
                // Half a step. In 4 bits clipping adds up to a sixteenth of the range, which is 15/16 of a step.
                let most = if top == 15.0 { 1.7 } else { 0.55 };
                let slack = 2.0 * params.zero.to_f32().abs() / 2_048.0 + params.scale.to_f32() * most;
                assert!((value - want).abs() <= slack, "{value} {want}");
            }
            let q = quantize_activations(&x).unwrap();
            let plain: f64 = row
                .dequantize()
                .iter()
                .enumerate()
                .map(|(i, w)| f64::from(*w) * f64::from(q.codes[i]) * f64::from(q.scales[i / 128]))
                .sum();
            assert!((row.dot(&q) - plain).abs() < 1e-4 * w.len() as f64, "{} {plain}", row.dot(&q));
        }
        let q = quantize_activations(&[0.0, 0.0]).unwrap();
        assert_eq!((q.codes, q.scales), (vec![0, 0], vec![0.0]));
        let q = quantize_activations(&[-2.54, 1.27, 0.01, 0.03]).unwrap();
        assert_eq!(q.codes, vec![-127, 64, 0, 2]);
        assert_eq!(quantize_activations(&[f32::MIN_POSITIVE / 1e6; 3]).unwrap().codes.len(), 3);
        // Of 4 bits, in groups of two: sevenths of the largest magnitude, ties to even.
        let q = quantize_activations_to(&[-14.0, 3.0, 5.0, -5.1, 0.0, 0.0, 7.0], 2, ACTIVATION_4).unwrap();
        assert_eq!(q.codes, [-7, 2, 7, -7, 0, 0, 7]);
        assert_eq!(q.scales, [2.0, 5.1 / 7.0, 0.0, 1.0]);
    }

    /// Squared error of a group in f64, with the codes that the parameters give.
    fn error_f64(w: &[f32], scale: f64, zero: f64) -> f64 {
        let code = |w: f64| ((w - zero) / scale).round_ties_even().clamp(0.0, 15.0);
        w.iter().map(|&w| f64::from(w)).map(|w| (w - code(w) * scale - zero).powi(2)).sum()
    }

    #[test]
    fn random_weights_lose_less_than_by_their_range() {
        let w = normal(128 * 200, 5);
        let (mut whole, mut found) = (0.0, 0.0);
        for group in w.chunks(128) {
            let (low, high) = range(group).unwrap();
            let first = Params::new((high - low) / 15.0, low).unwrap();
            let row = quantize_weights_row(group, &[]).unwrap();
            whole += error_f64(group, first.scale.to_f64(), first.zero.to_f64());
            found += error_f64(group, row.params[0].scale.to_f64(), row.params[0].zero.to_f64());
        }
        assert!((0.75..0.88).contains(&(found / whole)), "{}", found / whole);
    }

    #[test]
    fn important_weights_lose_less() {
        let w = normal(WEIGHT_GROUP * 100 + 20, 5);
        // One weight of each group matters as much as 256 others.
        let importance: Vec<f32> = (0..w.len()).map(|i| if i % WEIGHT_GROUP == 5 { 256.0 } else { 1.0 }).collect();
        let error = |importance_of_search: &[f32]| -> f64 {
            let found = quantize_weights_row(&w, importance_of_search).unwrap().dequantize();
            let squares = found.into_iter().zip(&w).map(|(value, w)| f64::from(value - w).powi(2));
            squares.zip(&importance).map(|(square, &importance)| square * f64::from(importance)).sum()
        };
        assert_eq!(quantize_weights_row(&w, &vec![1.0; w.len()]), quantize_weights_row(&w, &[]));
        let gain = error(&importance) / error(&[]);
        assert!(gain < 0.6, "{gain}");
    }

    #[test]
    fn ranges_that_half_precision_just_holds() {
        // The whole range decides whether a group is refused. A candidate that f16 cannot hold is skipped.
        let mut w = vec![0.0; 128];
        w[0] = 65_504.0 * 15.0;
        assert_eq!(quantize_weights_row(&w, &[]).unwrap().codes[0], 15);
        w[1] = -65_504.0;
        assert!(quantize_weights_row(&w, &[]).is_err());
        assert_eq!(quantize_weights_row(&[65_504.0, 65_472.0], &[]).unwrap().codes, [15, 0]);
    }

    proptest! {
        #[test]
        fn no_candidate_range_is_better(w in group()) {
            let row = quantize_weights_row(&w, &[]).unwrap();
            let (low, high) = range(&w).unwrap();
            let (scale, zero) = (row.params[0].scale.to_f64(), row.params[0].zero.to_f64());
            if low == high {
                prop_assert_eq!(scale, 0.0);
            } else {
                let found = error_f64(&w, scale, zero);
                // Errors are compared in f32, where a weight of large magnitude has few bits left below a step.
                let float = w.len() as f64 * f64::from(low.abs().max(high.abs()) * 3e-7).powi(2);
                for below in SHRINK {
                    for above in SHRINK {
                        let first = low + below * (high - low);
                        let last = high - above * (high - low);
                        let tried = (f16::from_f32(((last - first) / 15.0).max(SCALE_MIN)), f16::from_f32(first));
                        let error = error_f64(&w, tried.0.to_f64(), tried.1.to_f64());
                        prop_assert!(found <= error * 1.001 + 4.0 * (error * float).sqrt() + float, "{found} {error}");
                    }
                }
            }
        }
    }
}
