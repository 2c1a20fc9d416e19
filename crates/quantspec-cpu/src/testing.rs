//! Helpers of this crate's tests.

use crate::dispatch::Simd;

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
