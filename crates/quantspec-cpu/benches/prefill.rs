//! Prompt rows: GEMMs and causal attention of BF16 and F16 checkpoints. "Items" are floating-point operations.
//!
//! `cargo bench -p quantspec-cpu --bench prefill`; `QUANTSPEC_SIMD` and `QUANTSPEC_THREADS` apply.

use divan::Bencher;
use divan::counter::ItemsCount;
use quantspec_core::config::Dtype;
use quantspec_cpu::bench::{PromptAttention, PromptMatrix, machine};

fn main() {
    divan::main();
}

/// Each shape for a BF16 and an F16 checkpoint.
fn of_both<const N: usize, Shape: Copy>(shapes: [Shape; N]) -> impl Iterator<Item = (Dtype, Shape)> {
    [Dtype::Bf16, Dtype::F16].into_iter().flat_map(move |dtype| shapes.map(|shape| (dtype, shape)))
}

/// (outputs, inputs, tokens)
#[divan::bench(args = of_both([(2048, 2048, 256), (8192, 2048, 256), (2048, 8192, 256), (8192, 2048, 512)]))]
fn matrix(bencher: Bencher, (dtype, (n, k, tokens)): (Dtype, (usize, usize, usize))) {
    let mut matrix = PromptMatrix::new(machine().unwrap(), n, k, tokens, dtype).unwrap();
    bencher.counter(ItemsCount::new(matrix.flops())).bench_local(|| matrix.call().unwrap());
}

/// (query heads, query heads per KV head, head_dim), tokens before, and tokens.
type Attention = ((usize, usize, usize), usize, usize);

#[divan::bench(args = of_both([((32, 4, 64), 0, 256), ((32, 4, 64), 4096, 256), ((16, 4, 128), 4096, 256)]))]
fn attention(bencher: Bencher, (dtype, (heads, before, rows)): (Dtype, Attention)) {
    let mut attention = PromptAttention::new(machine().unwrap(), heads, before, rows, dtype).unwrap();
    bencher.counter(ItemsCount::new(attention.flops())).bench_local(|| attention.call().unwrap());
}
