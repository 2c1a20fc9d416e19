//! Linear layers of a step, 8192 × 2048 (a feed-forward matrix of a 1-billion-parameter model): weight bytes per second, next
//! to a plain read of memory.
//!
//! `cargo bench -p quantspec-cpu --bench linear`; `QUANTSPEC_SIMD` and `QUANTSPEC_THREADS` apply.

use divan::Bencher;
use divan::counter::BytesCount;
use quantspec_cpu::bench::{Gemm, Read, SPREAD, Stored, machine};

/// Rows of a step.
const ROWS: [usize; 6] = [1, 2, 4, 5, 8, 16];

fn main() {
    divan::main();
}

#[divan::bench]
fn read(bencher: Bencher) {
    let mut read = Read::new(machine().unwrap()).unwrap();
    bencher.counter(BytesCount::new(SPREAD)).bench_local(|| read.call().unwrap());
}

fn gemm(bencher: Bencher, stored: Stored, rows: usize) {
    let mut gemm = Gemm::new(machine().unwrap(), stored, 8192, 2048, rows).unwrap();
    bencher.counter(BytesCount::new(gemm.bytes())).bench_local(|| gemm.call().unwrap());
}

#[divan::bench(args = ROWS)]
fn bf16(bencher: Bencher, rows: usize) {
    gemm(bencher, Stored::Bf16, rows);
}

#[divan::bench(args = ROWS)]
fn f16(bencher: Bencher, rows: usize) {
    gemm(bencher, Stored::F16, rows);
}

#[divan::bench(args = ROWS)]
fn planes_both(bencher: Bencher, rows: usize) {
    gemm(bencher, Stored::Both, rows);
}

#[divan::bench(args = ROWS)]
fn planes_upper(bencher: Bencher, rows: usize) {
    gemm(bencher, Stored::Upper, rows);
}

#[divan::bench(args = ROWS)]
fn int4(bencher: Bencher, rows: usize) {
    gemm(bencher, Stored::Int4, rows);
}

#[divan::bench(args = ROWS)]
fn int8(bencher: Bencher, rows: usize) {
    gemm(bencher, Stored::Int8, rows);
}
