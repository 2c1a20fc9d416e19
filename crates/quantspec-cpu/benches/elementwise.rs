//! Elementwise operations of a 1-billion-parameter model on one thread: bytes read and written per second.
//!
//! Rows are rows of a step, or of a prompt if the name says so. All operands fit in a cache, except the rings of `append`;
//! its bytes are those of the f16 keys and values.
//!
//! `cargo bench -p quantspec-cpu --bench elementwise`; `QUANTSPEC_SIMD` applies.

use divan::Bencher;
use divan::counter::BytesCount;
use quantspec_cpu::bench::{Append, Elementwise, Op, machine};

fn main() {
    divan::main();
}

fn elementwise(bencher: Bencher, op: Op, rows: usize, k: usize) {
    let mut elementwise = Elementwise::new(machine().unwrap(), op, rows, k).unwrap();
    bencher.counter(BytesCount::new(elementwise.bytes())).bench_local(|| elementwise.call());
}

#[divan::bench(args = [1, 5])]
fn norm(bencher: Bencher, rows: usize) {
    elementwise(bencher, Op::Norm, rows, 2048);
}

#[divan::bench]
fn norm_of_a_prompt(bencher: Bencher) {
    elementwise(bencher, Op::PanelNorm, 64, 2048);
}

#[divan::bench(args = [1, 5])]
fn silu(bencher: Bencher, rows: usize) {
    elementwise(bencher, Op::Silu, rows, 8192);
}

/// 16 query heads and 4 KV heads.
#[divan::bench(args = [1, 5])]
fn rope(bencher: Bencher, rows: usize) {
    elementwise(bencher, Op::Rope, rows, 20 * 128);
}

#[divan::bench(args = [1, 5])]
fn add(bencher: Bencher, rows: usize) {
    elementwise(bencher, Op::Add, rows, 2048);
}

#[divan::bench(args = [1, 5])]
fn bf16(bencher: Bencher, rows: usize) {
    elementwise(bencher, Op::Bf16, rows, 8192);
}

#[divan::bench(args = [1, 5])]
fn int8(bencher: Bencher, rows: usize) {
    elementwise(bencher, Op::Int8, rows, 8192);
}

#[divan::bench(args = [1, 5])]
fn widen(bencher: Bencher, rows: usize) {
    elementwise(bencher, Op::Widen, rows, 8192);
}

/// 16 heads.
#[divan::bench(args = [1, 5])]
fn merge(bencher: Bencher, rows: usize) {
    elementwise(bencher, Op::Merge, rows, 16 * 128);
}

/// 4 KV heads.
#[divan::bench(args = [1, 5])]
fn append(bencher: Bencher, rows: usize) {
    let mut append = Append::new(machine().unwrap(), rows, 4).unwrap();
    bencher.counter(BytesCount::new(append.bytes())).bench_local(|| append.call());
}
