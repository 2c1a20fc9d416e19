//! Activations of a GEMM in int8, with one scale per group.

use super::{GROUP, Tiles};
use crate::dispatch::{Simd, portable};
use crate::lanes::{group, inverse_step, rint_i32};
use crate::memory::Array;
use quantspec_core::Result;

/// Quantised activations, with a maximum number of rows.
pub(crate) struct Acts {
    /// `[m][width]`, width = groups · 128.
    pub(super) q: Array<i8>,
    /// `[m][groups]`
    pub(super) scale: Array<f32>,
    /// scale · Σ q, `[m][groups]`
    pub(super) sum: Array<f32>,
    pub(super) width: usize,
    pub(super) groups: usize,
}

impl Acts {
    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        self.q.bytes() + self.scale.bytes() + self.sum.bytes()
    }

    /// Room for `m` rows of `k`.
    pub(crate) fn zeros(m: usize, k: usize) -> Result<Acts> {
        let groups = k.div_ceil(GROUP);
        Ok(Acts {
            q: Array::zeros(m * groups * GROUP)?,
            scale: Array::zeros(m * groups)?,
            sum: Array::zeros(m * groups)?,
            width: groups * GROUP,
            groups,
        })
    }

    /// Bytes for `m` rows of `k`.
    pub(crate) const fn bytes_of(m: usize, k: usize) -> usize {
        m * k.div_ceil(GROUP) * (GROUP + 8)
    }

    pub(crate) fn fits(&self, tiles: &Tiles, m: usize) -> bool {
        self.groups == tiles.k.div_ceil(GROUP) && self.q.len() >= m * self.width
    }

    /// Quantises m rows of k, `stride` apart, to codes of `−most..=most`; `k` determines the layout until the next call.
    pub(crate) fn quantize(&mut self, simd: Simd, most: f32, x: &[f32], stride: usize, m: usize, k: usize) {
        self.groups = k.div_ceil(GROUP);
        self.width = self.groups * GROUP;
        for j in 0..m {
            let row = &x[j * stride..][..k];
            let q = &mut self.q[j * self.width..][..self.width];
            let (scale, sum) =
                (&mut self.scale[j * self.groups..][..self.groups], &mut self.sum[j * self.groups..][..self.groups]);
            portable!(simd, quantize_body(most: f32, row: &[f32], q: &mut [i8], scale: &mut [f32], sum: &mut [f32]));
        }
    }
}

#[inline(always)]
fn quantize_body<const FMA: bool>(largest: f32, x: &[f32], q: &mut [i8], scale: &mut [f32], sum: &mut [f32]) {
    let mut padded = [0.0; GROUP];
    for (g, q) in q.chunks_exact_mut(GROUP).enumerate() {
        let (v, most) = group(x, g, &mut padded);
        let inverse = inverse_step(largest, most);
        let mut total = 0i32;
        for (q, v) in q.iter_mut().zip(v) {
            let code = rint_i32(v * inverse);
            // Wraps only for codes of NaN, which the scale reveals.
            total = total.wrapping_add(code);
            *q = code as i8;
        }
        scale[g] = most / largest;
        sum[g] = most / largest * total as f32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Noise, paths};
    use quantspec_core::quantize::ACTIVATION_8;

    #[test]
    fn nan_activations_have_a_nan_scale() {
        let k = 3 * GROUP;
        let x = Noise::new(13).normals(k);
        for simd in paths() {
            for bad in [f32::NAN, -f32::NAN, f32::INFINITY] {
                for count in [1, 2, GROUP] {
                    let mut x = x.clone();
                    x[GROUP..GROUP + count].fill(bad);
                    let mut acts = Acts::zeros(1, k).unwrap();
                    acts.quantize(simd, ACTIVATION_8, &x, k, 1, k);
                    let finite: Vec<bool> = acts.scale.iter().map(|scale| scale.is_finite()).collect();
                    assert_eq!(finite, [true, false, true], "{count} of {bad}, {simd:?}");
                }
            }
        }
    }
}
