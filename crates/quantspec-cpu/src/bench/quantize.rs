//! Quantisers of draft weights and pages.

use super::{Machine, Noise};
use crate::attend::Shape;
use crate::dispatch::Simd;
use crate::panel::PANEL;
use crate::{quantize, w4};
use quantspec_core::Result;
use quantspec_core::cache::G;
use quantspec_core::config::Rounding;
use std::hint::black_box;

/// Draft weights: quantises a panel of 32 outputs, on one thread.
pub struct Coding {
    simd: Simd,
    bits: w4::Bits,
    k: usize,
    weights: Vec<f32>,
    importance: Vec<f32>,
    panel: Vec<u8>,
}

impl Coding {
    /// Normally distributed weights with `k` inputs of different importance; 8 bits if `head`, else 4.
    pub fn new(Machine { simd, .. }: Machine, k: usize, head: bool) -> Coding {
        let bits = if head { w4::Bits::Eight } else { w4::Bits::Four };
        let mut noise = Noise(17);
        let weights = (0..PANEL * k).map(|_| noise.next()).collect();
        let importance = (0..k).map(|_| noise.next().exp()).collect();
        Coding { simd, bits, k, weights, importance, panel: vec![0; w4::Tiles::panel_bytes(k, bits)] }
    }

    /// Weights that a call codes.
    pub fn weights(&self) -> usize {
        self.weights.len()
    }

    /// One panel.
    ///
    /// # Errors
    /// Never for these weights.
    pub fn call(&mut self) -> Result<()> {
        w4::encode(self.simd, self.bits, &self.weights, &self.importance, self.k, &mut self.panel)?;
        black_box(&mut self.panel);
        Ok(())
    }
}

/// Flush: a page of one KV head on one thread.
pub struct Flush {
    simd: Simd,
    shape: Shape,
    keys: Vec<u16>,
    values: Vec<u16>,
    scratch: quantize::Scratch,
    upper: Vec<u8>,
    lower: Vec<u8>,
}

impl Flush {
    /// Halves of normal numbers.
    pub fn new(Machine { simd, .. }: Machine, head_dim: usize) -> Flush {
        let shape = Shape::new(head_dim);
        let mut noise = Noise(13);
        let mut halves = || (0..G * head_dim).map(|_| crate::lanes::f16_bits(noise.next())).collect();
        Flush {
            simd,
            shape,
            keys: halves(),
            values: halves(),
            scratch: quantize::Scratch::new(shape),
            upper: vec![0; shape.upper_bytes()],
            lower: vec![0; shape.lower_bytes()],
        }
    }

    /// Bytes of the f16 input of a page.
    pub fn bytes(&self) -> usize {
        2 * self.shape.full_len()
    }

    /// One page.
    ///
    /// # Errors
    /// None for numbers that are finite.
    pub fn call(&mut self) -> Result<()> {
        let Flush { simd, shape, keys, values, scratch, upper, lower } = self;
        quantize::page(*simd, *shape, Rounding::Balanced, (keys, values), scratch, upper, lower)
    }
}
