//! A small model to test with, and prompts for it.
#![allow(dead_code, reason = "every test file uses its own part")]
#![allow(unreachable_pub, reason = "shared by test files, each its own crate")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]
#![allow(clippy::print_stderr, reason = "a skipped test must say so")]

use crate::gpu::Random;
use quantspec_core::config::{DraftWeights, Planes, Rounding};
use quantspec_model::backend::Options;
use quantspec_model::checkpoint::Checkpoint;
use std::path::PathBuf;

/// The demo model, or the one that `QUANTSPEC_TEST_MODEL` names.
pub fn checkpoint() -> Option<Checkpoint> {
    let named = std::env::var_os("QUANTSPEC_TEST_MODEL").map(PathBuf::from);
    let beside = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../python/quantspec_cli/demo");
    let found = named.into_iter().chain([beside, PathBuf::from("python/quantspec_cli/demo")]).find(|dir| dir.is_dir());
    match found {
        Some(dir) => Some(Checkpoint::open(&dir).unwrap()),
        None => {
            assert!(std::env::var_os("QUANTSPEC_REQUIRE_GPU").is_none(), "no model");
            eprintln!("SKIPPED, no model");
            None
        }
    }
}

/// Every plane, quantised drafts, rows for γ up to 16.
pub fn options(capacity: usize, slots: usize) -> Options {
    Options {
        slots,
        capacity,
        prompt_capacity: capacity,
        planes: Planes { upper: true, lower: true, full: true },
        rounding: Rounding::Balanced,
        draft_weights: DraftWeights::Int4,
        step_rows: slots * 17,
        block_rows: 256,
        threads: 1,
    }
}

/// Tokens that a small model continues: common ids, in runs, so that a prompt is not noise throughout.
pub fn prompt(vocab: usize, tokens: usize, seed: u64) -> Vec<u32> {
    let mut random = Random(seed);
    let mut out: Vec<u32> = Vec::with_capacity(tokens);
    while out.len() < tokens {
        let (from, length) = (out.len(), 4 + random.below(24));
        if from > 64 && random.below(3) == 0 {
            let start = random.below(from - 40);
            let copied: Vec<u32> = out[start..start + length.min(40)].to_vec();
            out.extend(copied);
        } else {
            out.extend((0..length).map(|_| (3 + random.below(vocab - 3)) as u32));
        }
    }
    out.truncate(tokens);
    out
}
