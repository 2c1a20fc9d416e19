//! Activations of a GEMM in two int8 limbs.

use super::{GROUP, Planes, Read};
use crate::dispatch::{Simd, portable};
use crate::lanes::{group, inverse_step, rint_i32};
use crate::memory::Array;
use quantspec_core::Result;
use quantspec_core::quantize::{ACTIVATION_4, ACTIVATION_8};

/// Activations in limbs, with a maximum number of rows.
pub(crate) struct Acts {
    /// `[m][groups · 32]`
    pub(super) high: Array<i8>,
    pub(super) low: Array<i8>,
    /// Step of the integers, `[m][groups]`.
    pub(super) scale: Array<f32>,
    /// Sum of the group's activations, which multiplies the weight's zero point, `[m][groups]`.
    pub(super) sum: Array<f32>,
    /// Sum of the group's integers, `[m][groups]`. Codes of both planes are 8 too large, so 8 times this is subtracted.
    pub(super) total: Array<i32>,
    pub(super) groups: usize,
}

impl Acts {
    /// Bytes for `m` rows of `k`.
    pub(crate) const fn bytes_of(m: usize, k: usize) -> usize {
        m * k.div_ceil(GROUP) * (2 * GROUP + 12)
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        self.high.bytes() + self.low.bytes() + self.scale.bytes() + self.sum.bytes() + self.total.bytes()
    }

    /// Room for `m` rows of `k`.
    pub(crate) fn zeros(m: usize, k: usize) -> Result<Acts> {
        let groups = k.div_ceil(GROUP);
        Ok(Acts {
            high: Array::zeros(m * groups * GROUP)?,
            low: Array::zeros(m * groups * GROUP)?,
            scale: Array::zeros(m * groups)?,
            sum: Array::zeros(m * groups)?,
            total: Array::zeros(m * groups)?,
            groups,
        })
    }

    pub(super) fn width(&self) -> usize {
        self.groups * GROUP
    }

    pub(crate) fn fits(&self, planes: &Planes, m: usize) -> bool {
        self.groups == planes.k.div_ceil(GROUP) && self.high.len() >= m * self.width()
    }

    /// Quantises m rows of k, `stride` apart, for the planes in `read`; `k` determines the layout until the next call.
    pub(crate) fn quantize(&mut self, simd: Simd, read: Read, x: &[f32], stride: usize, m: usize, k: usize) {
        self.groups = k.div_ceil(GROUP);
        let (groups, width) = (self.groups, self.width());
        for j in 0..m {
            let x = &x[j * stride..][..k];
            let limbs = (&mut self.high[j * width..][..width], &mut self.low[j * width..][..width]);
            let at = j * groups..(j + 1) * groups;
            let totals = (&mut self.scale[at.clone()], &mut self.sum[at.clone()], &mut self.total[at]);
            portable!(simd, quantize_body(read: Read, x: &[f32], limbs: (&mut [i8], &mut [i8]), totals: (&mut [f32], &mut [f32], &mut [i32])));
        }
    }
}

/// Largest magnitude of an activation's integer: 127 in the high limb, 0 in the low one.
const TOP: f32 = ACTIVATION_8 * 128.0;
/// As [`TOP`] for 4 bits: 7 in the high limb.
const TOP_4: f32 = ACTIVATION_4 * 128.0;

#[inline(always)]
fn quantize_body<const FMA: bool>(
    read: Read,
    x: &[f32],
    (high, low): (&mut [i8], &mut [i8]),
    (scale, sum, total): (&mut [f32], &mut [f32], &mut [i32]),
) {
    let mut padded = [0.0; GROUP];
    for (g, (high, low)) in high.chunks_exact_mut(GROUP).zip(low.chunks_exact_mut(GROUP)).enumerate() {
        let (v, most) = group(x, g, &mut padded);
        let top = if read == Read::Upper4 { TOP_4 } else { TOP };
        let inverse = inverse_step(top, most);
        let (mut codes, mut highs) = (0i32, 0i32);
        for i in 0..GROUP {
            // Wraps only for codes of NaN, which the scale reveals.
            let code = rint_i32(v[i] * inverse);
            let limb = code.wrapping_add(64) >> 7;
            (high[i], low[i]) = (limb as i8, code.wrapping_sub(limb.wrapping_mul(128)) as i8);
            (codes, highs) = (codes.wrapping_add(code), highs.wrapping_add(limb));
        }
        (scale[g], total[g]) = match read {
            Read::Target => (most / TOP, codes),
            Read::Both | Read::Upper | Read::Upper4 => (most / (top / 128.0), highs),
        };
        sum[g] = scale[g] * total[g] as f32;
    }
}
