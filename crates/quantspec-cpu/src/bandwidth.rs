//! The roof: how fast this machine reads memory, by plain loads of all threads (fetched ahead where that helps).

use crate::dispatch::{AHEAD, Simd, choose, fetch, fetches_ahead, portable};
use crate::memory::Array;
use crate::pool::{Pool, part};
use quantspec_core::Result;
use std::hint::black_box;
use std::time::Instant;

/// Bytes read: beyond the caches of most machines, and a tenth of a second on a slow one.
const BYTES: usize = 1 << 30;

/// Gigabytes (10⁹) per second that `threads` threads read: the best of five passes over 1 GiB.
///
/// # Errors
/// Those of [`choose`], and [`quantspec_core::ErrorKind::DoesNotFit`] where there is no such memory.
pub fn read_gb_per_s(threads: usize) -> Result<f64> {
    let simd = choose()?.simd;
    let threads = threads.max(1);
    let pool = Pool::new(threads)?;
    let mut data = Array::<u32>::zeros(BYTES / 4)?;
    // Written once: pages that were never written may all be one page of zeros.
    data.fill(1);
    let mut best = 0f64;
    for _ in 0..5 {
        let started = Instant::now();
        pool.run(&|thread| {
            let mine = part(data.len() / 4096, thread, threads);
            black_box(sum(simd, &data[mine.start * 4096..mine.end * 4096]));
        })?;
        best = best.max(BYTES as f64 / started.elapsed().as_secs_f64() / 1e9);
    }
    Ok(best)
}

/// Sum of all words, in vectors.
fn sum(simd: Simd, x: &[u32]) -> u32 {
    #[inline(always)]
    fn body<const FMA: bool>(x: &[u32]) -> u32 {
        let mut sums = [0u32; 64];
        let ahead = fetches_ahead();
        for x in x.chunks_exact(64) {
            if ahead {
                for line in (0..256).step_by(64) {
                    fetch(x.as_ptr(), AHEAD + line);
                }
            }
            for l in 0..64 {
                sums[l] = sums[l].wrapping_add(x[l]);
            }
        }
        sums.iter().fold(0, |a, b| a.wrapping_add(*b))
    }
    portable!(simd, body(x: &[u32]) -> u32)
}
