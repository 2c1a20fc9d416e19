//! Models for GPU tests, and prompts for them.
#![allow(dead_code, reason = "every test file uses its own part")]
#![allow(unreachable_pub, reason = "shared by test files, each its own crate")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]
#![allow(clippy::print_stderr, reason = "a skipped test must say so")]

use crate::gpu::Random;
use quantspec_core::config::View;
use quantspec_cuda::device::Device;
use quantspec_model::backend::{DraftConfig, Options};
use quantspec_model::checkpoint::Checkpoint;
use quantspec_model::draft;
use std::path::PathBuf;

/// The demo model, and every model in the directory `QUANTSPEC_TEST_MODELS` with room for `tokens` and head widths that the
/// GPU supports. If a GPU is required, the variable must be set, if only to an empty directory.
pub fn checkpoints(device: &Device, tokens: usize) -> Vec<Checkpoint> {
    let in_tree = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../python/quantspec_cli/demo");
    let demo = [in_tree, PathBuf::from("python/quantspec_cli/demo")].into_iter().find(|dir| dir.is_dir());
    let mut dirs = vec![demo.expect("the demo model is in the repository")];
    match std::env::var_os("QUANTSPEC_TEST_MODELS") {
        Some(folder) => {
            let models = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
            let mut models: Vec<PathBuf> = models.filter(|path| path.join("config.json").is_file()).collect();
            models.sort();
            dirs.extend(models);
        }
        None => {
            let left_out = "other models than the demo model: QUANTSPEC_TEST_MODELS is not set";
            assert!(std::env::var_os("QUANTSPEC_REQUIRE_GPU").is_none(), "{left_out}");
            eprintln!("SKIPPED, {left_out}");
        }
    }
    let fits = |checkpoint: &Checkpoint| {
        let config = checkpoint.config();
        let fits = config.max_positions >= tokens && device.info.takes_heads_of(config.head_dim);
        if !fits {
            let (positions, head_dim) = (config.max_positions, config.head_dim);
            eprintln!("left out: a model of {positions} positions and heads of {head_dim} channels");
        }
        fits
    };
    dirs.iter().map(|dir| Checkpoint::open(dir).unwrap()).filter(fits).collect()
}

/// Draft configuration of a self-drafting method, for a target of both nibbles.
pub fn drafting(method: &str) -> DraftConfig {
    draft::Entry::named(method)
        .and_then(|method| method.draft_config(View::Both))
        .expect("a method of the model itself")
}

/// Every plane, quantised drafts, rows for γ up to 16.
pub fn options(capacity: usize, slots: usize) -> Options {
    Options { rejection: true, page_masses: true, ..Options::new(slots, capacity) }
}

/// Tokens that a small model can continue: common ids, in runs, so that a prompt is not all noise.
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
