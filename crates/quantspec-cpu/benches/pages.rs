//! Choosing pages: the scores of a layer's pages alone, and attention over the best 16 pages, with a new choice and with a
//! kept one. The difference between the last two is the cost of the choice. Bytes are those read: for a page that is not
//! chosen, its key parameters.
//!
//! `cargo bench -p quantspec-cpu --bench pages`; `QUANTSPEC_SIMD` and `QUANTSPEC_THREADS` apply.

use divan::Bencher;
use divan::counter::BytesCount;
use quantspec_cpu::bench::{BestPages, PageScores, machine};

fn main() {
    divan::main();
}

/// Tokens in pages.
const CONTEXTS: [usize; 2] = [16_384, 130_048];

/// (query heads per KV head, head_dim, tokens in pages), 4 KV heads of 128 or 8 of 64
#[divan::bench(args = [(1, 128, 16_384), (4, 128, 16_384), (4, 128, 130_048), (4, 64, 16_384)])]
fn scores(bencher: Bencher, (group, head_dim, context): (usize, usize, usize)) {
    let mut scores = PageScores::new(machine().unwrap(), 512 / head_dim, group, head_dim, context).unwrap();
    bencher.counter(BytesCount::new(scores.bytes())).bench_local(|| scores.call().unwrap());
}

fn best(bencher: Bencher, context: usize, anew: bool) {
    let mut best = BestPages::new(machine().unwrap(), context, anew).unwrap();
    bencher.counter(BytesCount::new(best.bytes())).bench_local(|| best.call().unwrap());
}

#[divan::bench(args = CONTEXTS)]
fn best_anew(bencher: Bencher, context: usize) {
    best(bencher, context, true);
}

#[divan::bench(args = CONTEXTS)]
fn best_kept(bencher: Bencher, context: usize) {
    best(bencher, context, false);
}
