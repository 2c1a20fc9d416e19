//! The weight hierarchy: one copy of a matrix, two views of it.
//!
//! A row is divided along k into groups: of [`SMALL_GROUP`] weights on a CPU, of [`GROUP`] on a GPU. A weight has an upper
//! nibble U in 0..=15 and a lower nibble L in −8..=7; its group has a scale s and a zero z in f16:
//!
//! * view Both, the target's: `w = (U + L/16)·s + z`
//! * view Upper, the draft's: `w ≈ U·s + z`
//!
//! In memory a weight is one byte, `code = 16·U + L + 8`, so U is its high nibble and L + 8 its low one. The code is a single
//! rounding of `16·(w − z)/s` to −8..=247, instead of rounding U first and then the remainder. So U is the draft's nearest
//! step except at ties, and no remainder is clipped.
//!
//! The range covers 240 to 247 of the 255 fine steps s/16 of the codes: the number of [`STEPS`] with the least squared error
//! in view Both. The range may start at any of [`FIRST_CODES`]; the zero whose upper codes have the least squared error is
//! kept. A smaller s would clip the ends of a group in view Both, which costs the target more than the draft gains.
//!
//! Squared errors are weighed by the importance of the matrix's inputs ([`importance`]), if the caller passes it.
//!
//! With `--weights int4` most matrices have the upper plane alone, and the target reads view Upper, too. L is 0 there, so both
//! views are equal, and the range is searched freely ([`TARGET_SHRINK`]).
//!
//! Groups of weights `n·d` with integers n keep their integers, if a file's codes were of 4 or 8 bits ([`grid_of`]): GGUF's
//! Q4_0 and Q8_0, compressed-tensors, GPTQ and AWQ.

use crate::error::{Error, Result};
use crate::quantize::{self, Group, Params, TARGET_SHRINK};
use half::f16;

/// Identifies these equations in the fingerprint of cached prompts. A change of codes needs a new name.
pub const RECIPE: &str = "nibbles 6";

/// Weights along k that share a scale and a zero on a GPU; the last group of a row may be shorter.
pub const GROUP: usize = 64;

/// As [`GROUP`], on a CPU: the group of most GGUF files. It takes half a bit per weight more, and reduces the target's
/// divergence by a quarter.
pub const SMALL_GROUP: usize = 32;

/// Candidate codes of a group's smallest weight. They reduce the squared error of the draft's view of trained weights by 17 %
/// compared with code 8, the plain `z = minimum`; free scales reduce it by 18 %.
pub const FIRST_CODES: [u8; 8] = [8, 0, 2, 4, 6, 10, 12, 14];

/// Candidate numbers of fine steps in a group's range. Rounding to a few grids and keeping the best of them takes a quarter
/// off the squared error in view Both of a [`SMALL_GROUP`], a sixth of a [`GROUP`]. With more steps fewer of [`FIRST_CODES`]
/// fit, and the draft would lose.
pub const STEPS: [u8; 8] = [240, 241, 242, 243, 244, 245, 246, 247];

/// The code with both nibbles 0.
pub const ZERO: u8 = 8;

/// Upper nibble of a code, 0..=15.
pub const fn upper(code: u8) -> u8 {
    code >> 4
}

/// Lower nibble of a code, −8..=7.
pub const fn lower(code: u8) -> i8 {
    (code & 15) as i8 - 8
}

/// One row of a matrix in nibbles.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// One byte per weight, 16·U + L + 8.
    pub codes: Vec<u8>,
    /// Scale and zero of each group.
    pub params: Vec<Params>,
    /// Weights per group.
    pub group: usize,
}

impl Row {
    /// The target's view `(U + L/16)·s + z`, `[k]`.
    pub fn both(&self) -> Vec<f32> {
        self.values(|code| f32::from(upper(code)) + f32::from(lower(code)) / 16.0)
    }

    /// The draft's view `U·s + z`, `[k]`.
    pub fn upper(&self) -> Vec<f32> {
        self.values(|code| f32::from(upper(code)))
    }

    fn values(&self, steps: impl Fn(u8) -> f32) -> Vec<f32> {
        let groups = self.codes.chunks(self.group).zip(&self.params);
        let value = |(codes, params): (&[u8], &Params)| {
            let (scale, zero) = (params.scale.to_f32(), params.zero.to_f32());
            codes.iter().map(|&code| steps(code) * scale + zero).collect::<Vec<_>>()
        };
        groups.flat_map(value).collect()
    }
}

/// Quantises a row of weights `[k]` to both planes, in groups of `group`. The search weighs the squared error of each weight by
/// its `importance`, positive numbers `[k]`; if there are none, all weigh the same.
///
/// # Errors
/// [`crate::ErrorKind::NotFinite`] for NaN, infinities and ranges f16 cannot hold, naming the group.
pub fn quantize_row(w: &[f32], importance: &[f32], group: usize) -> Result<Row> {
    let code = |value: f32, scale: f32, zero: f32| {
        quantize::nearest(((value - zero) / (scale / 16.0)).clamp(-8.0, 247.0)) as i32 + 8
    };
    let search = |group: Group, low: f32, high: f32| {
        grid_of(group.w, low, high, true).map_or_else(|| search(group, low, high), Ok)
    };
    quantize_groups(w, importance, group, search, code)
}

/// Quantises a row of weights `[k]` to the upper plane alone, in groups of `group`: every L is 0. `importance` as in
/// [`quantize_row`].
///
/// # Errors
/// As [`quantize_row`].
pub fn quantize_row_upper(w: &[f32], importance: &[f32], group: usize) -> Result<Row> {
    let code = |value: f32, scale: f32, zero: f32| {
        16 * quantize::nearest(((value - zero) / scale).clamp(0.0, 15.0)) as i32 + i32::from(ZERO)
    };
    let search = |group: Group, low: f32, high: f32| {
        let whole = Params::rounded((high - low) / 15.0, low).finite()?;
        let grid = grid_of(group.w, low, high, false);
        Ok(grid.unwrap_or_else(|| quantize::search(group, low, high, whole, &TARGET_SHRINK)))
    };
    quantize_groups(w, importance, group, search, code)
}

/// Importance of a matrix's inputs from estimates of their mean squares: these, divided by their mean. An input that the
/// estimate never saw keeps a small importance. If the estimates overflow, all inputs weigh the same.
pub fn importance(squares: &[f32]) -> Vec<f32> {
    let mean = squares.iter().map(|&square| f64::from(square)).sum::<f64>() / squares.len().max(1) as f64;
    if !mean.is_finite() {
        return vec![1.0; squares.len()];
    }
    // Also of a model whose weights are all zero.
    let least = (1e-6 * mean).max(f64::from(f32::MIN_POSITIVE));
    squares.iter().map(|&square| (f64::from(square).max(least) / mean.max(least)) as f32).collect()
}

/// Quantises the groups of a row: `search` finds parameters from the group, its minimum and its maximum; `code` rounds against
/// the stored ones.
fn quantize_groups(
    w: &[f32],
    importance: &[f32],
    group: usize,
    search: impl Fn(Group, f32, f32) -> Result<Params>,
    code: impl Fn(f32, f32, f32) -> i32,
) -> Result<Row> {
    let params = Vec::with_capacity(w.len().div_ceil(group));
    let mut row = Row { codes: Vec::with_capacity(w.len()), params, group };
    let mut importance = importance.chunks(group);
    for (index, w) in w.chunks(group).enumerate() {
        let group = Group { w, importance: importance.next().unwrap_or_default() };
        let named = |error: Error| Error { message: format!("weights of group {index}: {}", error.message), ..error };
        row.params.push(quantize_group(group, &search, &code, &mut row.codes).map_err(named)?);
    }
    Ok(row)
}

/// Appends the codes of one non-empty group.
fn quantize_group(
    group: Group,
    search: impl Fn(Group, f32, f32) -> Result<Params>,
    code: impl Fn(f32, f32, f32) -> i32,
    codes: &mut Vec<u8>,
) -> Result<Params> {
    let w = group.w;
    let (low, high) = quantize::range(w)?;
    if low == high {
        // Both nibbles 0, so that both views equal the zero point.
        codes.resize(codes.len() + w.len(), ZERO);
        return Params::constant(low);
    }
    let params = search(group, low, high)?;
    let (scale, zero) = (params.scale.to_f32(), params.zero.to_f32());
    codes.extend(w.iter().map(|&value| code(value, scale, zero) as u8));
    Ok(params)
}

/// Takes the number of fine steps across the range with the least squared error in view Both. Of [`FIRST_CODES`] it then takes
/// the first code whose upper codes have the least squared error. The first of a list wins ties.
fn search(group: Group, low: f32, high: f32) -> Result<Params> {
    let params = |steps: u8, first: u8| {
        let step = (high - low) / f32::from(steps);
        Params::rounded(16.0 * step, low + (8.0 - f32::from(first)) * step)
    };
    let mut plain = params(STEPS[0], FIRST_CODES[0]).finite()?;
    let (mut taken, mut least) = (STEPS[0], quantize::squared_error_of_both(group, plain));
    for &steps in &STEPS[1..] {
        let found = params(steps, FIRST_CODES[0]);
        let error = quantize::squared_error_of_both(group, found);
        if error < least {
            (plain, taken, least) = (found, steps, error);
        }
    }
    let start = (quantize::squared_error(group, plain), plain);
    // The last code of the range is at most 255.
    let firsts = FIRST_CODES[1..].iter().filter(|&&first| first <= 255 - taken);
    Ok(firsts.fold(start, |best, &first| quantize::better(group, best, params(taken, first))).1)
}

/// Parameters whose grid contains every weight of a group, if all are integers times one step d that is an f16. A grid of 16
/// values, which both views have, comes first; with `both` planes one of 256 follows. `low` and `high` are the group's range,
/// low < high.
///
/// With 256 values a narrow group takes the finest grid `d/2ʲ` that covers it, so that the upper nibbles span the group.
/// The scale is ±d (±16·d/2ʲ), and the zero `q·d`, with sign and q chosen so that it is exact in f16 if possible. Otherwise
/// f16 rounds it, and all weights of the group are off by the same amount, at most `q·d/2048`. That is 0.008 of a step for 16
/// values; for 256 it is 0.13 of a fine step, or 0.06 if the codes are signed.
pub fn grid_of(w: &[f32], low: f32, high: f32, both: bool) -> Option<Params> {
    let upper = grid_of_values(w, low, high, 15, 0);
    if both { upper.or_else(|| grid_of_values(w, low, high, 255, 8)) } else { upper }
}

/// [`grid_of`] for codes 0..=`most`, of which `offset` stands for the zero.
fn grid_of_values(w: &[f32], low: f32, high: f32, most: i32, offset: i32) -> Option<Params> {
    let (low, high) = (f64::from(low), f64::from(high));
    let mut step = common_step(w, 0.999 * (high - low) / f64::from(most))?;
    // Farther from 0, rounding the zero could move a weight to the next code.
    let steps = |step: f64| ((low / step).round_ties_even(), (high / step).round_ties_even());
    let (mut first, mut last) = steps(step);
    if last - first > f64::from(most) || first.abs().max(last.abs()) > 2_048.0 {
        return None;
    }
    while most > 15 && 2.0 * (last - first) <= f64::from(most) {
        step /= 2.0;
        (first, last) = steps(step);
    }
    let (first, last, fine) = (first as i32, last as i32, f64::from(if most > 15 { 16 } else { 1 }));
    let params = |step: f64, q: i32| {
        let (scale, zero) = (fine * step, f64::from(q) * step);
        let params = Params { scale: f16::from_f64(scale), zero: f16::from_f64(zero) };
        (params.scale.to_f64() == scale).then_some((params, params.zero.to_f64() == zero))
    };
    // Codes n − q + offset, or those of −n with the step −d, are 0..=most.
    let (one, exact) = params(step, roundest(last - most + offset, first + offset))?;
    let (other, other_exact) = params(-step, roundest(-first - most + offset, offset - last))?;
    (if exact || !other_exact { one } else { other }).finite().ok()
}

/// The greatest step of which all weights are multiples; None if it is below `least`. By Euclid's algorithm with nearest
/// multiples, exact in f64.
fn common_step(w: &[f32], least: f64) -> Option<f64> {
    let mut step = 0f64;
    for &w in w {
        let mut rest = f64::from(w).abs();
        while rest != 0.0 {
            if rest < least {
                return None;
            }
            (step, rest) = (rest, (step - (step / rest).round_ties_even() * rest).abs());
        }
    }
    Some(step)
}

/// The number from `first` to `last` with the fewest significant bits.
fn roundest(first: i32, last: i32) -> i32 {
    let (least, mut found) = if first > 0 { (first, last) } else { (-last, -first) };
    if least <= 0 {
        return 0;
    }
    while found & (found - 1) >= least {
        found &= found - 1;
    }
    if first > 0 { found } else { -found }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;
    use crate::quantize::tests::normal;
    use half::f16;
    use proptest::prelude::*;

    #[test]
    fn codes_of_known_weights() {
        // The plain grid hits all sixteen values, and the first candidate wins ties.
        let ramp: Vec<f32> = (0..=15).map(|i| 1.0 + i as f32).collect();
        let row = quantize_row(&ramp, &[], GROUP).unwrap();
        assert_eq!((row.params[0].scale.to_f32(), row.params[0].zero.to_f32()), (1.0, 1.0));
        assert!(row.codes.iter().enumerate().all(|(i, &code)| upper(code) == i as u8 && lower(code) == 0));
        assert_eq!((row.both(), row.upper()), (ramp.clone(), ramp));
        assert_eq!(quantize_row(&[-1.0, 14.0], &[], GROUP).unwrap().codes, [8, 248]);
        // A short last group has its own parameters; a constant one is exact in both views.
        let row = quantize_row(&[vec![0.25; GROUP], vec![-3.0, 12.0]].concat(), &[], GROUP).unwrap();
        assert_eq!((row.codes.len(), row.params.len()), (GROUP + 2, 2));
        assert_eq!((row.params[0].scale, row.params[0].zero), (f16::ZERO, f16::from_f32(0.25)));
        assert_eq!(
            (row.both()[..GROUP].to_vec(), row.upper()[..GROUP].to_vec()),
            (vec![0.25; GROUP], vec![0.25; GROUP])
        );
    }

    #[test]
    fn the_roundest_number_has_the_fewest_bits() {
        for (first, last, found) in
            [(119, 128, 128), (111, 120, 112), (-128, -119, -128), (-3, 5, 0), (7, 7, 7), (5, 7, 6), (-255, -1, -128)]
        {
            assert_eq!(roundest(first, last), found, "{first} to {last}");
        }
    }

    #[test]
    fn nan_weights_are_named() {
        let mut w = vec![0.5; 3 * GROUP];
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            w[GROUP + 7] = bad;
            let error = quantize_row(&w, &[], GROUP).unwrap_err();
            assert_eq!(error.kind, ErrorKind::NotFinite);
            assert!(error.message.contains("group 1") && error.message.contains("element 7"), "{error}");
        }
        w[GROUP + 7] = 2e6;
        assert_eq!(quantize_row(&w, &[], GROUP).unwrap_err().kind, ErrorKind::NotFinite);
        assert!(quantize_row(&[], &[], GROUP).unwrap().codes.is_empty());
    }

    /// Weights of any size and centre, some with an outlier.
    fn weights() -> impl Strategy<Value = Vec<f32>> {
        (prop::collection::vec(-1.0f32..1.0, 1..200), -12i32..10, -4.0f32..4.0, prop::option::of(0usize..200)).prop_map(
            |(x, exponent, centre, outlier)| {
                let spread = 2f32.powi(exponent);
                let mut x: Vec<f32> = x.iter().map(|x| (x + centre) * spread).collect();
                if let Some(at) = outlier.filter(|at| *at < x.len()) {
                    x[at] *= 20.0;
                }
                x
            },
        )
    }

    fn groups() -> impl Strategy<Value = usize> {
        prop_oneof![Just(GROUP), Just(SMALL_GROUP)]
    }

    /// Squared error of the draft's view for a zero, in f64.
    fn upper_error(w: &[f32], params: Params) -> f64 {
        let (scale, zero) = (params.scale.to_f64(), params.zero.to_f64());
        let code = |w: f64| ((w - zero) / scale).round_ties_even().clamp(0.0, 15.0);
        w.iter().map(|&w| f64::from(w)).map(|w| (w - code(w) * scale - zero).powi(2)).sum()
    }

    proptest! {
        #[test]
        fn codes_of_files_are_kept(
            codes in prop::collection::vec(0i32..=255, 2..=GROUP),
            group in groups(),
            bits in prop_oneof![Just(4), Just(8)],
            zero in 0i32..=255,
            narrow in 0u32..4,
            d in 1e-3f32..1.0,
            (brain, q8_0) in any::<(bool, bool)>(),
        ) {
            let q8_0 = q8_0 && bits == 8;
            // Codes minus a zero point, times a scale in BF16 or f16; a narrow group uses some of the codes.
            let d = if brain { half::bf16::from_f32(d).to_f32() } else { f16::from_f32(d).to_f32() };
            let top = 1 << bits;
            let (zero, narrow) = (zero % top, narrow.min(bits - 1));
            let mut steps: Vec<i32> = codes.iter().take(group).map(|code| ((code % top) >> narrow) - zero).collect();
            // d is the greatest common divisor.
            steps[1] = if steps[0] + zero > 0 { steps[0] - 1 } else { steps[0] + 1 };
            if q8_0 {
                steps.iter_mut().for_each(|n| *n = (*n).clamp(-127, 119));
                (steps[0], steps[1]) = (-127, 119);
            }
            let w: Vec<f32> = steps.iter().map(|&n| n as f32 * d).collect();
            let off = |view: Vec<f32>| view.iter().zip(&w).map(|(a, b)| (a - b).abs() / d).fold(0.0, f32::max);
            let both = quantize_row(&w, &[], group).unwrap();
            let within = |least, most| steps.iter().all(|n| (least..=most).contains(n));
            let exact = within(-8, 7) || within(-7, 8);
            if bits == 4 {
                let allowed = if exact { 0.0 } else { 15.0 / 2_048.0 };
                let upper = quantize_row_upper(&w, &[], group).unwrap();
                prop_assert!(off(upper.upper()) <= allowed && off(upper.both()) <= allowed, "{upper:?}");
                prop_assert!(off(both.upper()) <= allowed && off(both.both()) <= allowed, "{both:?}");
            } else {
                prop_assert!(off(both.both()) <= 256.0 / 2_048.0, "{} of {steps:?}", off(both.both()));
                // Few of the codes may be on a grid of 16 values, whose zero has other bits.
                if off(both.upper()) > 256.0 / 2_048.0 {
                    prop_assert!(!q8_0 || both.both() == w, "{steps:?}");
                    let upper: Vec<u8> = both.codes.iter().map(|&code| upper(code)).collect();
                    let (least, most) = (upper.iter().min().unwrap(), upper.iter().max().unwrap());
                    prop_assert!(most - least >= 7, "upper nibbles {least} to {most} of {steps:?}");
                }
            }
        }

        #[test]
        fn both_views_are_within_half_a_step(w in weights(), group in groups()) {
            let row = quantize_row(&w, &[], group).unwrap();
            let views = row.both().into_iter().zip(row.upper());
            for (at, ((both, upper), want)) in views.zip(&w).enumerate() {
                let (scale, zero) = (row.params[at / group].scale.to_f32(), row.params[at / group].zero.to_f32());
                // Rounding of the stored parameters moves the ends of the range: 240 fine steps by 2⁻¹¹, and the zero.
                let slack = 15.0 * scale / 2_048.0 + zero.abs() / 2_048.0 + 1e-6 * want.abs() + 1e-7;
                prop_assert!((both - want).abs() <= scale / 32.0 + slack, "{both} {want}, step {scale}");
                prop_assert!((upper - want).abs() <= scale * (0.5 + 1.0 / 32.0) + slack, "{upper} {want}, step {scale}");
            }
        }

        #[test]
        fn codes_equal_an_integer_model(w in weights(), group in groups()) {
            let row = quantize_row(&w, &[], group).unwrap();
            for (at, (&code, &w)) in row.codes.iter().zip(&w).enumerate() {
                let (scale, zero) = (row.params[at / group].scale.to_f64(), row.params[at / group].zero.to_f64());
                if scale == 0.0 {
                    prop_assert_eq!(code, ZERO);
                    continue;
                }
                let steps = 16.0 * (f64::from(w) - zero) / scale;
                let near_tie = (steps.fract().abs() - 0.5).abs() < 1e-3;
                let exact = (steps.round_ties_even().clamp(-8.0, 247.0) + 8.0) as u8;
                prop_assert!(near_tie || code == exact, "{code} {exact}");
                prop_assert_eq!(16 * i32::from(upper(code)) + i32::from(lower(code)), i32::from(code) - 8);
            }
        }

        #[test]
        fn no_candidate_range_is_better_with_four_bits(w in weights(), group in groups()) {
            let row = quantize_row_upper(&w, &[], group).unwrap();
            for (w, &params) in w.chunks(group).zip(&row.params) {
                let (low, high) = quantize::range(w).unwrap();
                if low == high {
                    continue;
                }
                let found = upper_error(w, params);
                let float = w.len() as f64 * f64::from(low.abs().max(high.abs()) * 3e-7).powi(2);
                for (below, above) in TARGET_SHRINK.iter().flat_map(|a| TARGET_SHRINK.map(|b| (a, b))) {
                    let (first, last) = (low + below * (high - low), high - above * (high - low));
                    let scale = f16::from_f32(((last - first) / 15.0).max(quantize::SCALE_MIN));
                    let error = upper_error(w, Params { scale, zero: f16::from_f32(first) });
                    prop_assert!(found <= error * 1.001 + 4.0 * (error * float).sqrt() + float, "{found} {error}");
                }
            }
        }

        #[test]
        fn no_candidate_zero_is_better_for_the_draft(w in weights(), group in groups()) {
            let row = quantize_row(&w, &[], group).unwrap();
            for (w, &params) in w.chunks(group).zip(&row.params) {
                let (low, high) = quantize::range(w).unwrap();
                if low == high {
                    continue;
                }
                let found = upper_error(w, params);
                let float = w.len() as f64 * f64::from(low.abs().max(high.abs()) * 3e-7).powi(2);
                // The steps that give this scale: several, if it is the smallest.
                let step = |steps: u8| (high - low) / f32::from(steps);
                let scale = |steps: u8| f16::from_f32((16.0 * step(steps)).max(quantize::SCALE_MIN));
                let same = STEPS.iter().filter(|&&steps| scale(steps) == params.scale);
                let best = same.map(|&steps| {
                    let firsts = FIRST_CODES.into_iter().filter(|first| first + (steps - 240) <= 15);
                    let zeros = firsts.map(|first| f16::from_f32(low + (8.0 - f32::from(first)) * step(steps)));
                    zeros.map(|zero| upper_error(w, Params { zero, ..params })).fold(f64::INFINITY, f64::min)
                });
                let error = best.fold(0.0, f64::max);
                prop_assert!(found <= error * 1.001 + 4.0 * (error * float).sqrt() + float, "{found} {error}");
            }
        }
    }

    #[test]
    fn four_bits_lose_less_than_by_the_search_of_draft_weights() {
        let mut w = normal(200 * GROUP + 20, 3);
        w[64..128].fill(0.25);
        for (group, least, most) in [(SMALL_GROUP, 0.95, 0.98), (GROUP, 0.96, 0.99)] {
            let row = quantize_row_upper(&w, &[], group).unwrap();
            let (mut found, mut of_drafts) = (0.0, 0.0);
            for (i, w) in w.chunks(group).enumerate() {
                let (low, high) = quantize::range(w).unwrap();
                if low == high {
                    assert_eq!((row.params[i].scale, row.params[i].zero), (f16::ZERO, f16::from_f32(0.25)));
                    continue;
                }
                found += upper_error(w, row.params[i]);
                of_drafts += upper_error(w, quantize::quantize_weights_row(w, &[]).unwrap().params[0]);
            }
            assert!((least..most).contains(&(found / of_drafts)), "{group}: {}", found / of_drafts);
            assert!(row.codes.iter().all(|&code| lower(code) == 0));
            assert_eq!(row.both(), row.upper());
        }
        w[70] = f32::NAN;
        assert!(quantize_row_upper(&w, &[], GROUP).unwrap_err().message.contains("group 1"));
        w[70] = 2e6;
        assert_eq!(quantize_row_upper(&w, &[], GROUP).unwrap_err().kind, ErrorKind::NotFinite);
    }

    #[test]
    fn important_weights_lose_less() {
        let w = normal(200 * SMALL_GROUP, 3);
        // One weight of each group matters as much as 64 others.
        let importance: Vec<f32> = (0..w.len()).map(|i| if i % SMALL_GROUP == 5 { 64.0 } else { 1.0 }).collect();
        let ones = vec![1.0; w.len()];
        let error = |row: &Row| -> f64 {
            let squares = row.both().into_iter().zip(&w).map(|(value, w)| f64::from(value - w).powi(2));
            squares.zip(&importance).map(|(square, &importance)| square * f64::from(importance)).sum()
        };
        type Quantiser = fn(&[f32], &[f32], usize) -> Result<Row>;
        let quantisers: [Quantiser; 2] = [quantize_row_upper, quantize_row];
        for quantise in quantisers {
            let plain = quantise(&w, &[], SMALL_GROUP).unwrap();
            assert_eq!(plain, quantise(&w, &ones, SMALL_GROUP).unwrap());
            let gain = error(&quantise(&w, &importance, SMALL_GROUP).unwrap()) / error(&plain);
            assert!(gain < 0.6, "{gain}");
        }
    }

    #[test]
    fn importance_has_mean_one_and_no_zeros() {
        assert_eq!(importance(&[1.0, 2.0, 5.0, 0.0]), [0.5, 1.0, 2.5, 1e-6]);
        assert_eq!(importance(&[0.0; 2]), [1.0; 2]);
        assert_eq!(importance(&[f32::INFINITY, 1.0]), [1.0; 2]);
        assert_eq!(importance(&[f32::MAX; 2]), [1.0; 2]);
        assert!(importance(&[]).is_empty());
    }

    #[test]
    fn the_search_of_steps_pays_on_normal_weights() {
        let w = normal(GROUP * 200, 3);
        let square = |x: &f32, y: &f32| f64::from(x - y).powi(2);
        let error = |row: &Row| -> f64 { row.both().iter().zip(&w).map(|(x, y)| square(x, y)).sum() };
        let of_240_steps = |w: &[f32]| {
            let (low, high) = quantize::range(w).unwrap();
            let params = Params::rounded((high - low) / 15.0, low);
            let (step, zero) = (params.scale.to_f64() / 16.0, params.zero.to_f64());
            let rest = |w: f64| (w - (((w - zero) / step).round_ties_even() * step + zero)).powi(2);
            w.iter().map(|&w| rest(f64::from(w))).sum::<f64>()
        };
        for (group, least, most) in [(SMALL_GROUP, 0.7, 0.78), (GROUP, 0.78, 0.86)] {
            let row = quantize_row(&w, &[], group).unwrap();
            let plain: f64 = w.chunks(group).map(of_240_steps).sum();
            assert!((least..most).contains(&(error(&row) / plain)), "{group}: {}", error(&row) / plain);
        }
    }

    #[test]
    fn the_search_pays_on_normal_weights() {
        let w = normal(GROUP * 200, 3);
        let row = quantize_row(&w, &[], GROUP).unwrap();
        let (mut plain, mut found) = (0.0, 0.0);
        for (w, params) in w.chunks(GROUP).zip(&row.params) {
            let low = quantize::range(w).unwrap().0;
            found += upper_error(w, *params);
            plain += upper_error(w, Params { zero: f16::from_f32(low), ..*params });
        }
        assert!((0.75..0.9).contains(&(found / plain)), "{}", found / plain);
    }
}
