//! The search for a group's scale and zero by the squared error of its weights: of draft weights, and of the target's in
//! nibbles ([`crate::weights`]).

use super::{Params, nearest};

/// Greatest 4-bit code.
pub(super) const W4_TOP: u8 = 15;

/// Fractions of a group's range by which either end is moved inwards, as candidates for 4-bit codes. Few weights lie near the
/// ends, so clipping them costs less than a smaller step gains. Five values with a fit each gain 1 % more at seven times the
/// work.
pub const SHRINK: [f32; 3] = [0.0, 1.0 / 32.0, 1.0 / 16.0];

/// As [`SHRINK`], of the target's weights. In groups of 32 a range that is slightly too wide often fits best; these reduce the
/// squared error by 2.5 % at twice the work. An exhaustive search reduces it by 3.4 %.
pub const TARGET_SHRINK: [f32; 5] = [-1.0 / 64.0, 0.0, 1.0 / 64.0, 1.0 / 32.0, 3.0 / 64.0];

/// Least-squares refinements of scale and zero, starting from the best range.
pub const FITS: usize = 2;

/// Lanes of the f32 sums below: element i goes to lane i mod 32, then lanes are added in halves. Every implementation uses
/// this order, so all choose the same parameters.
const SUM_LANES: usize = 32;

fn sum(terms: impl Iterator<Item = f32>) -> f32 {
    let mut lanes = [0.0; SUM_LANES];
    for (i, term) in terms.enumerate() {
        lanes[i % SUM_LANES] += term;
    }
    let mut half = SUM_LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// The 4-bit code of a weight during the search. It multiplies by the reciprocal, which vectorises well.
fn trial_code(value: f32, zero: f32, inverse: f32) -> f32 {
    nearest(((value - zero) * inverse).clamp(0.0, f32::from(W4_TOP)))
}

/// A group of weights, and the factors of their squared errors: as many, or none if all are 1.
#[derive(Clone, Copy)]
pub(crate) struct Group<'a> {
    pub(crate) w: &'a [f32],
    pub(crate) importance: &'a [f32],
}

impl Group<'_> {
    /// Σ importance · term(weight).
    fn sum(self, term: impl Fn(f32) -> f32) -> f32 {
        let importance = |at: usize| self.importance.get(at).copied().unwrap_or(1.0);
        sum(self.w.iter().enumerate().map(|(at, &w)| importance(at) * term(w)))
    }
}

/// Σ importance · (w − (code·scale + zero))² of a group.
pub(crate) fn squared_error(group: Group, params: Params) -> f32 {
    let (scale, zero) = (params.scale.to_f32(), params.zero.to_f32());
    let inverse = 1.0 / scale;
    group.sum(|value| {
        let error = value - (trial_code(value, zero, inverse) * scale + zero);
        error * error
    })
}

/// Σ importance · (w − (code·scale/16 + zero))² of a group with codes of both nibbles, −8..=247.
pub(crate) fn squared_error_of_both(group: Group, params: Params) -> f32 {
    let (step, zero) = (params.scale.to_f32() / 16.0, params.zero.to_f32());
    let inverse = 1.0 / step;
    group.sum(|value| {
        let error = value - (nearest(((value - zero) * inverse).clamp(-8.0, 247.0)) * step + zero);
        error * error
    })
}

/// Scale and zero by linear regression of w − zero on the codes that `params` give. None if all codes are equal.
fn fit(group: Group, params: Params) -> Option<Params> {
    let (scale, zero) = (params.scale.to_f32(), params.zero.to_f32());
    let inverse = 1.0 / scale;
    let code = |w: f32| trial_code(w, zero, inverse);
    // Without importance, sums of codes are integers below 2²⁴, exact in any order.
    let count = group.sum(|_| 1.0);
    let codes = group.sum(code);
    let squares = group.sum(|w| code(w) * code(w));
    let values = group.sum(|w| w - zero);
    let products = group.sum(|w| code(w) * (w - zero));
    let spread = count * squares - codes * codes;
    let scale = (count * products - codes * values) / spread;
    let zero = zero + (values - scale * codes) / count;
    (spread > 0.0).then(|| Params::rounded(scale, zero))
}

/// The parameters with the smaller squared error; ties keep `best`. Parameters that f16 cannot hold have error NaN and lose.
pub(crate) fn better(group: Group, best: (f32, Params), params: Params) -> (f32, Params) {
    let error = squared_error(group, params);
    if error < best.0 { (error, params) } else { best }
}

/// The range whose 4-bit codes have the least squared error, of `whole` and those whose ends are moved by `shrink`, refined by
/// up to [`FITS`] fits.
pub(crate) fn search(group: Group, low: f32, high: f32, whole: Params, shrink: &[f32]) -> Params {
    let range = high - low;
    let mut best = (squared_error(group, whole), whole);
    for below in shrink {
        for above in shrink {
            let zero = low + below * range;
            let scale = ((high - above * range) - zero) / f32::from(W4_TOP);
            best = better(group, best, Params::rounded(scale, zero));
        }
    }
    for _ in 0..FITS {
        if let Some(params) = fit(group, best.1) {
            best = better(group, best, params);
        }
    }
    best.1
}
