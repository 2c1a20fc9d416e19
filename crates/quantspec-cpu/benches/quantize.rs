//! Quantising on one thread. Flush: 128 tokens of one KV head become a page of nibble planes; bytes are those of the f16
//! input. Draft weights: a panel of 32 outputs and 4,096 inputs in 4 or 8 bits; items are weights.
//!
//! `cargo bench -p quantspec-cpu --bench quantize`; `QUANTSPEC_SIMD` applies.

use divan::Bencher;
use divan::counter::{BytesCount, ItemsCount};
use quantspec_cpu::bench::{Coding, Flush, machine};

fn main() {
    divan::main();
}

#[divan::bench(args = [64, 128])]
fn page(bencher: Bencher, head_dim: usize) {
    let mut flush = Flush::new(machine().unwrap(), head_dim);
    bencher.counter(BytesCount::new(flush.bytes())).bench_local(|| flush.call().unwrap());
}

#[divan::bench(args = [false, true])]
fn weights(bencher: Bencher, head: bool) {
    let mut coding = Coding::new(machine().unwrap(), 4_096, head);
    bencher.counter(ItemsCount::new(coding.weights())).bench_local(|| coding.call().unwrap());
}
