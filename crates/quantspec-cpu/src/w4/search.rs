//! The search for the scale and zero of a group of weights, in core's order of sums. Tiles and nibble planes share it.

use crate::lanes::{f16_bits, f16_is_finite, f16_value, fold16, rint, sum16};
use quantspec_core::quantize::{FITS, SCALE_MIN};

/// Stored parameters, bits of f16: the scale of a group that is not constant, and its zero.
#[inline(always)]
pub(crate) fn halves(scale: f32, zero: f32) -> (u16, u16) {
    (f16_bits(scale.max(SCALE_MIN)), f16_bits(zero))
}

/// Lanes of the sums, whose order core defines.
const SUM_LANES: usize = 32;

/// The code of a weight during the search. Nothing is NaN here, so a comparison is one vector instruction.
#[inline(always)]
fn trial_code(x: f32, zero: f32, inverse: f32) -> f32 {
    let steps = (x - zero) * inverse;
    let steps = if steps > 0.0 { steps } else { 0.0 };
    rint(if steps < 15.0 { steps } else { 15.0 })
}

/// A group of weights: its range, and the search for its parameters. If `WEIGHTED`, `importance` has a factor of each squared
/// error.
pub(crate) struct Group<'a, const WEIGHTED: bool> {
    pub(crate) x: &'a [f32],
    pub(crate) importance: &'a [f32],
}

impl<'a> Group<'a, false> {
    /// Weights of equal importance.
    pub(crate) fn plain(x: &'a [f32]) -> Self {
        Group { x, importance: &[] }
    }
}

impl<const WEIGHTED: bool> Group<'_, WEIGHTED> {
    /// The smallest weight; the length is a multiple of sixteen.
    #[inline(always)]
    pub(crate) fn least(&self) -> f32 {
        self.fold(f32::INFINITY, |a, b| if b < a { b } else { a })
    }

    /// The largest weight; the length is a multiple of sixteen.
    #[inline(always)]
    pub(crate) fn greatest(&self) -> f32 {
        self.fold(f32::NEG_INFINITY, |a, b| if b > a { b } else { a })
    }

    #[inline(always)]
    fn fold(&self, start: f32, fold: impl Fn(f32, f32) -> f32) -> f32 {
        let mut lanes = [start; 16];
        for x in self.x.as_chunks::<16>().0 {
            for l in 0..16 {
                lanes[l] = fold(lanes[l], x[l]);
            }
        }
        fold16(lanes, fold)
    }

    /// Σ importance · `term(weight)` over the group.
    #[inline(always)]
    fn sum(&self, term: impl Fn(f32) -> f32) -> f32 {
        let (mut even, mut odd) = ([0f32; 16], [0f32; 16]);
        let (whole, tail) = self.x.as_chunks::<SUM_LANES>();
        let (of_whole, of_tail) = self.importance.as_chunks::<SUM_LANES>();
        for (i, x) in whole.iter().enumerate() {
            let factors = if WEIGHTED { &of_whole[i] } else { &[1.0; SUM_LANES] };
            for l in 0..16 {
                even[l] += factors[l] * term(x[l]);
            }
            for l in 0..16 {
                odd[l] += factors[16 + l] * term(x[16 + l]);
            }
        }
        for (l, x) in tail.iter().enumerate() {
            let lane = if l < 16 { &mut even[l] } else { &mut odd[l - 16] };
            *lane += if WEIGHTED { of_tail[l] } else { 1.0 } * term(*x);
        }
        for l in 0..16 {
            even[l] += odd[l];
        }
        sum16(even)
    }

    /// Σ importance · (w − (code·scale + zero))².
    #[inline(always)]
    pub(crate) fn squared_error(&self, params: (u16, u16)) -> f32 {
        let (scale, zero) = (f16_value(params.0), f16_value(params.1));
        let inverse = 1.0 / scale;
        self.sum(|x| {
            let error = x - (trial_code(x, zero, inverse) * scale + zero);
            error * error
        })
    }

    /// The same with codes of both nibbles, −8..=247.
    #[inline(always)]
    pub(crate) fn squared_error_of_both(&self, params: (u16, u16)) -> f32 {
        let (step, zero) = (f16_value(params.0) / 16.0, f16_value(params.1));
        let inverse = 1.0 / step;
        self.sum(|x| {
            let steps = (x - zero) * inverse;
            let steps = if steps > -8.0 { steps } else { -8.0 };
            let error = x - (rint(if steps < 247.0 { steps } else { 247.0 }) * step + zero);
            error * error
        })
    }

    /// Least-squares fit to the codes that the parameters give.
    #[inline(always)]
    fn fit(&self, params: (u16, u16)) -> Option<(u16, u16)> {
        let (scale, zero) = (f16_value(params.0), f16_value(params.1));
        let inverse = 1.0 / scale;
        let code = |x: f32| trial_code(x, zero, inverse);
        let (codes, squares) = (self.sum(code), self.sum(|x| code(x) * code(x)));
        let (values, products) = (self.sum(|x| x - zero), self.sum(|x| code(x) * (x - zero)));
        let count = self.sum(|_| 1.0);
        let spread = count * squares - codes * codes;
        let scale = (count * products - codes * values) / spread;
        (spread > 0.0).then(|| halves(scale, zero + (values - scale * codes) / count))
    }

    /// The better of two, by error.
    #[inline(always)]
    pub(crate) fn better(&self, best: (f32, (u16, u16)), params: (u16, u16)) -> (f32, (u16, u16)) {
        if !f16_is_finite(params.0) || !f16_is_finite(params.1) {
            return best;
        }
        let error = self.squared_error(params);
        if error < best.0 { (error, params) } else { best }
    }

    /// Core's search, from the whole range.
    #[inline(always)]
    pub(crate) fn search(&self, low: f32, high: f32, whole: (u16, u16), shrink: &[f32]) -> (u16, u16) {
        let range = high - low;
        let mut best = (self.squared_error(whole), whole);
        for below in shrink {
            for above in shrink {
                let zero = low + below * range;
                best = self.better(best, halves(((high - above * range) - zero) / 15.0, zero));
            }
        }
        for _ in 0..FITS {
            if let Some(params) = self.fit(best.1) {
                best = self.better(best, params);
            }
        }
        best.1
    }
}
