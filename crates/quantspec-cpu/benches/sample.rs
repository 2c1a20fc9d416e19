//! Choosing tokens, which the CPU backend does with core's code: one thread, the vocabulary of Llama 3, logits in a cache.
//! Bytes are those of the logits; items are random numbers.
//!
//! `cargo bench -p quantspec-cpu --bench sample`; core has one path, so `QUANTSPEC_SIMD` has no effect.

use divan::counter::{BytesCount, ItemsCount};
use divan::{Bencher, black_box};
use quantspec_core::noise::{Noise, Stream};
use quantspec_core::sample::{self, Accept, Sampler};
use quantspec_core::verify::{DraftDistribution, Judge};
use quantspec_cpu::bench::logits;

fn main() {
    divan::main();
}

const VOCAB: usize = 128_256;

/// Drafted tokens of a round.
const GAMMA: usize = 4;

/// Warpers at temperature 1.
const WARPERS: [&str; 5] = ["off", "top-k 40", "top-p 0.95", "min-p 0.05", "all three"];

fn sampler(warpers: &str, accept: Accept) -> Sampler {
    let (top_k, top_p, min_p) = match warpers {
        "top-k 40" => (40, 1.0, 0.0),
        "top-p 0.95" => (0, 0.95, 0.0),
        "min-p 0.05" => (0, 1.0, 0.05),
        "all three" => (40, 0.95, 0.05),
        _ => (0, 1.0, 0.0),
    };
    Sampler { temperature: 1.0, top_k, top_p, min_p, seed: 7, accept, ..Sampler::greedy() }
}

/// Calls `f` with a row of logits and a position, which advances with each call.
fn each<T>(bencher: Bencher, mut f: impl FnMut(&[f32], usize) -> T) {
    let (logits, mut position) = (logits(VOCAB, 1), 0);
    bencher.counter(BytesCount::of_slice(&logits[..])).bench_local(|| {
        position += 1;
        f(black_box(&logits), position)
    });
}

#[divan::bench]
fn check_finite(bencher: Bencher) {
    each(bencher, |logits, _| sample::check_finite(logits));
}

#[divan::bench]
fn argmax(bencher: Bencher) {
    each(bencher, |logits, _| sample::argmax(logits));
}

#[divan::bench]
fn gumbel(bencher: Bencher) {
    bencher.counter(ItemsCount::new(VOCAB)).bench_local(|| {
        let noise = Noise { seed: black_box(7), sequence: 0, position: 5, stream: Stream::Sample };
        (0..VOCAB as u64).map(|id| noise.gumbel(id)).fold(0.0, f32::max)
    });
}

#[divan::bench(args = WARPERS)]
fn choose(bencher: Bencher, warpers: &str) {
    let sampler = sampler(warpers, Accept::Replay);
    each(bencher, |logits, position| sample::choose(logits, &sampler, position, Stream::Sample));
}

#[divan::bench(args = WARPERS)]
fn choose_with_margin(bencher: Bencher, warpers: &str) {
    let sampler = sampler(warpers, Accept::Replay);
    each(bencher, |logits, position| sample::choose_with_margin(logits, &sampler, position, Stream::Sample));
}

#[divan::bench(args = WARPERS)]
fn warp(bencher: Bencher, warpers: &str) {
    let sampler = sampler(warpers, Accept::Rejection);
    each(bencher, |logits, _| sample::warp(logits, &sampler));
}

/// The token that replaces a rejected one.
#[divan::bench]
fn draw(bencher: Bencher) {
    let sampler = sampler("off", Accept::Rejection);
    let weights = sample::warp(&logits(VOCAB, 1), &sampler);
    each(bencher, |_, position| sample::draw(black_box(&weights), sampler.noise(position, Stream::Correct(0))));
}

/// A drafted token under rejection, whose distribution is kept.
#[divan::bench]
fn propose_rejection(bencher: Bencher) {
    let (sampler, mut judge) = (sampler("off", Accept::Rejection), Judge::new());
    each(bencher, |logits, position| judge.propose(0, 0, position, logits, &sampler));
}

/// A round of four drafted tokens, five rows. All are accepted if the draft's logits are the target's, none if they differ.
#[divan::bench(args = ["greedy", "replay", "rejection", "rejection, refused"])]
fn judge(bencher: Bencher, rule: &str) {
    let sampler = match rule {
        "greedy" => Sampler::greedy(),
        "replay" => sampler("off", Accept::Replay),
        _ => sampler("off", Accept::Rejection),
    };
    let stand = !rule.ends_with("refused");
    let target: Vec<Vec<f32>> = (0..=GAMMA as u64).map(|seed| logits(VOCAB, 1 + seed)).collect();
    let rows: Vec<&[f32]> = target.iter().map(Vec::as_slice).collect();
    let mut judge = Judge::new();
    let propose = |offset: usize| {
        let other = logits(VOCAB, 100 + offset as u64);
        let drafted = if stand { rows[offset] } else { &other };
        judge.propose(0, offset, 9 + offset, drafted, &sampler)
    };
    let drafted: Vec<u32> = (0..GAMMA).map(propose).collect();
    assert_eq!(
        judge.judge(0, &drafted, DraftDistribution::Kept, &rows, &sampler, 9).unwrap().accepted,
        if stand { GAMMA } else { 0 }
    );
    let bytes = rows.iter().map(|row| size_of_val(*row)).sum::<usize>();
    bencher.counter(BytesCount::new(bytes)).bench_local(|| {
        judge.judge(0, black_box(&drafted), DraftDistribution::Kept, black_box(&rows), &sampler, 9).unwrap()
    });
}
