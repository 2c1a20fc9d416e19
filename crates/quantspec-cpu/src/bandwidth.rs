//! Memory bandwidth: plain loads by all threads, prefetched if that helps.

use crate::dispatch::{Prefetch, Simd, choose, portable};
use crate::memory::Array;
use crate::pool::{Pool, share};
use quantspec_core::Result;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Bytes of a pass. On x86-64 every line is flushed from all caches before it is read. Other CPUs need more bytes than the
/// caches hold (hundreds of megabytes on servers).
const BYTES: usize = if cfg!(target_arch = "x86_64") { 64 << 20 } else { 512 << 20 };

/// Most passes, and the time after which no further pass starts.
const PASSES: usize = 8;
const MEASURING_TIME: Duration = Duration::from_millis(200);

/// Numbers per unit of work, so that the threads' parts are whole pages.
const UNIT: usize = 4096;

/// Memory bandwidth of `threads` threads in GB/s (10⁹): the best of up to eight passes, a quarter of a second in total.
///
/// # Errors
/// Those of [`choose`], and [`quantspec_core::ErrorKind::DoesNotFit`] if memory is short.
pub fn read_gb_per_s(threads: usize) -> Result<f64> {
    let simd = choose()?.simd;
    let threads = threads.max(1);
    let pool = Pool::new(threads)?;
    let mut data = Array::<u32>::zeros(BYTES / 4)?;
    // Written once: unwritten pages may all map to one zero page.
    data.fill(1);
    let mine = |thread: usize| {
        let units = share(data.len() / UNIT, thread, threads);
        &data[units.start * UNIT..units.end * UNIT]
    };
    let (began, mut best) = (Instant::now(), 0f64);
    for pass in 0..PASSES {
        if pass > 0 && began.elapsed() > MEASURING_TIME {
            break;
        }
        pool.run(&|thread| flush(mine(thread)))?;
        let started = Instant::now();
        pool.run(&|thread| {
            black_box(sum(simd, mine(thread)));
        })?;
        best = best.max(BYTES as f64 / started.elapsed().as_secs_f64() / 1e9);
    }
    Ok(best)
}

/// Evicts the lines of `x` from every cache.
fn flush(x: &[u32]) {
    #[cfg(target_arch = "x86_64")]
    for line in x.chunks(16) {
        // SAFETY: an address inside a slice; SSE2 belongs to every x86-64 CPU.
        unsafe { std::arch::x86_64::_mm_clflush(line.as_ptr().cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = x;
}

/// Sum of all words, in vectors.
pub(crate) fn sum(simd: Simd, x: &[u32]) -> u32 {
    #[inline(always)]
    fn body<const FMA: bool>(x: &[u32]) -> u32 {
        let mut sums = [0u32; 64];
        let prefetch = Prefetch::choose(false);
        for x in x.chunks_exact(64) {
            if let Some(prefetch) = prefetch {
                x.chunks_exact(16).for_each(|line| prefetch.line(line.as_ptr()));
            }
            for l in 0..64 {
                sums[l] = sums[l].wrapping_add(x[l]);
            }
        }
        sums.iter().fold(0, |a, b| a.wrapping_add(*b))
    }
    portable!(simd, body(x: &[u32]) -> u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bandwidth_is_measured_quickly_and_plausible() {
        let started = Instant::now();
        let speed = read_gb_per_s(2).unwrap();
        // Between a busy single-board computer and twice the largest server; a cache would exceed it.
        assert!((0.1..2000.0).contains(&speed), "{speed} GB/s");
        // Includes a slow minute of a busy test machine.
        assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
    }

    #[test]
    fn every_word_is_read() {
        let words: Vec<u32> = (0..4096).collect();
        for simd in crate::testing::paths() {
            assert_eq!(sum(simd, &words), 4095 * 4096 / 2, "{simd:?}");
        }
    }
}
