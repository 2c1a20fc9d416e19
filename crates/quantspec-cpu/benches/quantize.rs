//! Flush: 128 tokens of one KV head become a page of nibble planes, on one thread; bytes are those of the halves.
//!
//! `cargo bench -p quantspec-cpu --bench quantize`; `QUANTSPEC_SIMD` applies.

use divan::Bencher;
use divan::counter::BytesCount;
use quantspec_cpu::bench::{Flush, machine};

fn main() {
    divan::main();
}

#[divan::bench(args = [64, 128])]
fn page(bencher: Bencher, head_dim: usize) {
    let (simd, _) = machine().unwrap();
    let mut flush = Flush::new(simd, head_dim);
    bencher.counter(BytesCount::new(flush.bytes())).bench_local(|| flush.call().unwrap());
}
