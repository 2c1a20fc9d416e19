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

/// Generic constants: indices of `DTYPES`.
const BF16: usize = 0;
const F16: usize = 1;
const DTYPES: [Dtype; 2] = [Dtype::Bf16, Dtype::F16];

/// (outputs, inputs, tokens)
#[divan::bench(args = [(2048, 2048, 256), (8192, 2048, 256), (2048, 8192, 256), (8192, 2048, 512)], consts = [BF16, F16])]
fn matrix<const DTYPE: usize>(bencher: Bencher, (n, k, tokens): (usize, usize, usize)) {
    let mut matrix = PromptMatrix::new(machine().unwrap(), n, k, tokens, DTYPES[DTYPE]).unwrap();
    bencher.counter(ItemsCount::new(matrix.flops())).bench_local(|| matrix.call().unwrap());
}

/// (query heads, query heads per KV head, head_dim, tokens before, tokens)
#[divan::bench(args = [(32, 4, 64, 0, 256), (32, 4, 64, 4096, 256), (16, 4, 128, 4096, 256)], consts = [BF16, F16])]
fn attention<const DTYPE: usize>(
    bencher: Bencher,
    (heads, group, d, before, rows): (usize, usize, usize, usize, usize),
) {
    let mut attention =
        PromptAttention::new(machine().unwrap(), (heads, group, d), before, rows, DTYPES[DTYPE]).unwrap();
    bencher.counter(ItemsCount::new(attention.flops())).bench_local(|| attention.call().unwrap());
}
