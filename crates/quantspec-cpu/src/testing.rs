//! Helpers of this crate's tests.

use crate::dispatch::Simd;
use crate::lanes::{bf16_bits, bf16_value, f16_bits, f16_value};
use crate::linear::{Matrix, Store, repack16, repack32, row_stride};
use crate::panel::PANEL;
use quantspec_core::config::Dtype;

#[path = "../tests/support/paths.rs"]
mod paths;

pub(crate) use paths::paths;

/// A fixed stream of numbers (xorshift64).
pub(crate) struct Noise(u64);

impl Noise {
    pub(crate) fn new(seed: u64) -> Noise {
        Noise(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Uniform in [0, 1).
    pub(crate) fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// Nearly normal: four uniforms, variance 1.
    pub(crate) fn normal(&mut self) -> f32 {
        ((0..4).map(|_| self.unit()).sum::<f32>() - 2.0) * 3f32.sqrt()
    }

    pub(crate) fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }
}

/// Rows of k numbers with the stride of a linear layer, zero after k.
pub(crate) fn padded(x: &[f32], k: usize) -> Vec<f32> {
    x.chunks_exact(k).flat_map(|row| row.iter().copied().chain(std::iter::repeat_n(0.0, row_stride(k) - k))).collect()
}

/// Distance of `a` from the reference, relative to the reference's norm.
pub(crate) fn distance(a: &[f32], reference: &[f64]) -> f64 {
    assert_eq!(a.len(), reference.len());
    let (mut d, mut n) = (0.0, 0.0);
    for (a, r) in a.iter().zip(reference) {
        d += (f64::from(*a) - r).powi(2);
        n += r * r;
    }
    (d / n).sqrt()
}

/// The bits of numbers, for comparing them exactly.
pub(crate) fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// A matrix of random weights `[n][k]`, and the weights as f32.
pub(crate) fn random_matrix(noise: &mut Noise, n: usize, k: usize, dtype: Dtype) -> (Matrix, Vec<f32>) {
    let mut matrix = Matrix::zeros(n.div_ceil(PANEL), k, dtype).unwrap();
    let len = Matrix::panel_len(k);
    let mut weights = noise.normals(n * k);
    for (i, rows) in weights.chunks_mut(PANEL * k).enumerate() {
        let panel = i * len..(i + 1) * len;
        match &mut matrix.store {
            Store::Bf16(w) => {
                let raw: Vec<u8> = rows.iter().flat_map(|x| bf16_bits(*x).to_le_bytes()).collect();
                assert!(repack16(&raw, k, true, 0x7f80, &mut w[panel]));
                rows.iter_mut().for_each(|x| *x = bf16_value(bf16_bits(*x)));
            }
            Store::F16(w) => {
                let raw: Vec<u8> = rows.iter().flat_map(|x| f16_bits(*x).to_le_bytes()).collect();
                assert!(repack16(&raw, k, false, 0x7c00, &mut w[panel]));
                rows.iter_mut().for_each(|x| *x = f16_value(f16_bits(*x)));
            }
            Store::F32(w) => repack32(rows, k, &mut w[panel]),
            Store::Planes(_) => unreachable!("made of a number format"),
        }
    }
    (matrix, weights)
}
