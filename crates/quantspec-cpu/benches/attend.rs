//! Decode attention of one layer (4 KV heads of 128, or 8 of 64): page bytes per second, next to a plain read of memory.
//!
//! `cargo bench -p quantspec-cpu --bench attend`; `QUANTSPEC_SIMD` and `QUANTSPEC_THREADS` apply.

use divan::Bencher;
use divan::counter::BytesCount;
use quantspec_core::config::{View, Weights};
use quantspec_cpu::bench::{Attention, AttentionCase, Read, SPREAD, machine};

fn main() {
    divan::main();
}

#[divan::bench]
fn read(bencher: Bencher) {
    let mut read = Read::new(machine().unwrap()).unwrap();
    bencher.counter(BytesCount::new(SPREAD)).bench_local(|| read.call().unwrap());
}

/// (rows of the step, query heads per KV head, head_dim, tokens in pages)
const CASES: [(usize, usize, usize, usize); 12] = [
    (1, 1, 128, 16384),
    (5, 1, 128, 16384),
    (1, 4, 128, 4096),
    (5, 4, 128, 4096),
    (1, 4, 128, 16384),
    (2, 4, 128, 16384),
    (5, 4, 128, 16384),
    (8, 4, 128, 16384),
    (1, 8, 128, 16384),
    (5, 8, 128, 16384),
    (1, 4, 64, 16384),
    (5, 4, 64, 16384),
];

fn attend(
    bencher: Bencher,
    view: View,
    weights: Weights,
    (rows, group, head_dim, context): (usize, usize, usize, usize),
) {
    let case = AttentionCase { view, weights, rows, group, kv_heads: 512 / head_dim, head_dim, context };
    let mut attention = Attention::new(machine().unwrap(), case).unwrap();
    bencher.counter(BytesCount::new(attention.bytes())).bench_local(|| attention.call().unwrap());
}

#[divan::bench(args = CASES)]
fn both(bencher: Bencher, case: (usize, usize, usize, usize)) {
    attend(bencher, View::Both, Weights::Full, case);
}

#[divan::bench(args = CASES)]
fn upper(bencher: Bencher, case: (usize, usize, usize, usize)) {
    attend(bencher, View::Upper, Weights::Full, case);
}

#[divan::bench(args = CASES.into_iter().filter(|case| case.0 == 1))]
fn upper_draft(bencher: Bencher, case: (usize, usize, usize, usize)) {
    attend(bencher, View::Upper, Weights::Draft, case);
}

#[divan::bench(args = CASES)]
fn full(bencher: Bencher, case: (usize, usize, usize, usize)) {
    attend(bencher, View::Full, Weights::Full, case);
}
