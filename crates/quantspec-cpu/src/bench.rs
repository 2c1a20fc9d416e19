//! Kernels over the worker pool on synthetic operands in memory, for this crate's benches and [`crate::rates`]. Not for other
//! crates.
//!
//! A bench holds [`SPREAD`] bytes of operands as a sequence of *layers*. Each call uses the next layer, as a model's step
//! does, so its operands are not in the cache.

mod attend;
mod elementwise;
mod linear;
mod pages;
mod prefill;
mod quantize;

pub use attend::{Attention, AttentionCase, PageScores};
pub use elementwise::{Append, Elementwise, Op};
pub use linear::{Gemm, Stored};
pub use pages::BestPages;
pub use prefill::{PromptAttention, PromptMatrix};
pub use quantize::{Coding, Flush};

use crate::bandwidth;
use crate::dispatch::{Simd, choose};
use crate::memory::Array;
use crate::pool::{Pool, share};
use quantspec_core::Result;
use std::hint::black_box;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

/// Bytes of operands a bench cycles through, more than the caches of current server CPUs' core complexes.
pub const SPREAD: usize = 512 << 20;

/// Channels of a head of [`Elementwise`], [`Append`] and [`BestPages`].
const HEAD: usize = 128;

/// Number of layers of `bytes` that make up [`SPREAD`]; at least two.
fn layers(bytes: usize) -> usize {
    SPREAD.div_ceil(bytes).max(2)
}

/// A fixed sequence of nearly normal numbers (sums of four bytes of xorshift64).
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        let bytes = (self.0 >> 16).to_le_bytes();
        (bytes[..4].iter().map(|b| f32::from(*b)).sum::<f32>() - 510.0) / 147.8
    }

    /// An array of them.
    fn fill(&mut self, len: usize) -> Result<Array<f32>> {
        let mut array = Array::zeros(len)?;
        array.fill_with(|| self.next());
        Ok(array)
    }
}

/// The SIMD path and threads of a bench. Only [`machine`] makes it, so the CPU has the required features.
#[derive(Clone, Copy)]
pub struct Machine {
    simd: Simd,
    threads: usize,
}

/// The path of [`choose`], and `QUANTSPEC_THREADS` threads, by default one per core.
///
/// # Errors
/// Those of [`choose`].
pub fn machine() -> Result<Machine> {
    let asked = std::env::var("QUANTSPEC_THREADS").ok().and_then(|threads| threads.parse().ok());
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    let threads = asked.filter(|threads| *threads > 0).unwrap_or_else(cores);
    Ok(Machine { simd: choose()?.simd, threads })
}

/// Memory bandwidth: a plain read of [`SPREAD`] bytes, whole or in parts.
pub struct Read {
    simd: Simd,
    pool: Pool,
    data: Array<u32>,
    parts: usize,
    part: usize,
}

impl Read {
    /// Reads all bytes in every call.
    ///
    /// # Errors
    /// If memory is short or threads cannot start.
    pub fn new(machine: Machine) -> Result<Read> {
        Read::in_parts(machine, 1)
    }

    /// Reads one of `parts` parts per call, in order; a power of two up to 4,096.
    ///
    /// # Errors
    /// As [`Read::new`].
    pub fn in_parts(Machine { simd, threads }: Machine, parts: usize) -> Result<Read> {
        let mut data = Array::zeros(SPREAD / 4)?;
        // Written once: unwritten pages may all map to one zero page.
        data.fill(1);
        Ok(Read { simd, pool: Pool::new(threads)?, data, parts, part: 0 })
    }

    /// Bytes that a call reads.
    pub fn bytes(&self) -> usize {
        SPREAD / self.parts
    }

    /// Reads the next part.
    ///
    /// # Errors
    /// If a kernel panicked.
    pub fn call(&mut self) -> Result<()> {
        let (len, threads) = (self.data.len() / self.parts, self.pool.threads());
        let data = &self.data[self.part * len..][..len];
        self.part = (self.part + 1) % self.parts;
        self.pool.run(&|thread| {
            let mine = share(data.len() / 4096, thread, threads);
            black_box(bandwidth::sum(self.simd, &data[mine.start * 4096..mine.end * 4096]));
        })
    }

    /// Bandwidth of one call in GB/s (10⁹), by threads that are awake.
    ///
    /// # Errors
    /// As [`Read::call`].
    pub fn gb_per_s(&mut self) -> Result<f64> {
        // No part ends before all have begun. Otherwise the caller would do the parts of sleeping threads.
        let (begun, threads) = (AtomicUsize::new(0), self.pool.threads());
        self.pool.run(&|_| {
            begun.fetch_add(1, Relaxed);
            while begun.load(Relaxed) < threads {
                std::hint::spin_loop();
            }
        })?;
        let started = Instant::now();
        self.call()?;
        Ok(self.bytes() as f64 / started.elapsed().as_secs_f64() / 1e9)
    }
}

/// Logits like those of text: a bulk with standard deviation 2, and eight candidates above it, one nat apart. At the
/// vocabulary of Llama 3 the candidates hold nine tenths of the mass.
pub fn logits(vocab: usize, seed: u64) -> Vec<f32> {
    let mut noise = Noise(seed.wrapping_mul(2) | 1);
    let mut logits: Vec<f32> = (0..vocab).map(|_| 2.0 * noise.next()).collect();
    for candidate in 0..8 {
        logits[(noise.0 >> 20) as usize % vocab] = 16.0 - candidate as f32;
        noise.next();
    }
    logits
}
