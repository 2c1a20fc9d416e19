//! Linear layers of a step, 8192 × 2048 (a feed-forward matrix of the 1-billion-parameter shape): bytes of weights a second, beside
//! a plain read of memory.
//!
//! `cargo bench -p quantspec-cpu --bench linear`; `QUANTSPEC_SIMD` and `QUANTSPEC_THREADS` apply.

use divan::Bencher;
use divan::counter::BytesCount;
use quantspec_cpu::bench::{Product, Read, SPREAD, Stored, machine};

fn main() {
    divan::main();
}

#[divan::bench]
fn read(bencher: Bencher) {
    let mut read = Read::new(machine().unwrap()).unwrap();
    bencher.counter(BytesCount::new(SPREAD)).bench_local(|| read.call().unwrap());
}

fn product(bencher: Bencher, stored: Stored, rows: usize) {
    let mut product = Product::new(machine().unwrap(), stored, 8192, 2048, rows).unwrap();
    bencher.counter(BytesCount::new(product.bytes())).bench_local(|| product.call().unwrap());
}

#[divan::bench(args = [1, 2, 5, 8, 16])]
fn bf16(bencher: Bencher, rows: usize) {
    product(bencher, Stored::Bf16, rows);
}

#[divan::bench(args = [1, 2, 5, 8, 16])]
fn f16(bencher: Bencher, rows: usize) {
    product(bencher, Stored::F16, rows);
}

#[divan::bench(args = [1, 2, 5, 8, 16])]
fn planes_both(bencher: Bencher, rows: usize) {
    product(bencher, Stored::Both(64), rows);
}

#[divan::bench(args = [1, 4])]
fn planes_upper(bencher: Bencher, rows: usize) {
    product(bencher, Stored::Upper(64), rows);
}

#[divan::bench(args = [1, 4])]
fn int4(bencher: Bencher, rows: usize) {
    product(bencher, Stored::Int4, rows);
}

#[divan::bench(args = [1, 4])]
fn int8(bencher: Bencher, rows: usize) {
    product(bencher, Stored::Int8, rows);
}
