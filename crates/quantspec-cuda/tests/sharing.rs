//! Sequences whose prompts begin alike read the same pages, and no bit of an answer changes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod gpu;
#[path = "../../quantspec-cpu/tests/support/random.rs"]
#[allow(dead_code, reason = "shared with tests that use more of it")]
mod random;
#[path = "../../quantspec-model/tests/support/sharing.rs"]
mod sharing;

use gpu::device;
use quantspec_core::cache::G;
use quantspec_core::config::{Pages, Planes, View, Weights};
use quantspec_core::policy::Policy;
use quantspec_cuda::CudaBackend;
use quantspec_model::backend::{DraftConfig, Hooks, Options};
use quantspec_model::draft::SelfQuantised;
use quantspec_model::engine::{Engine, Method};
use quantspec_model::prompt_cache::PromptCache;
use random::Shape;

/// A token with which a prompt fails.
const BAD: u32 = 7;

/// Text without [`BAD`].
fn text(tokens: usize, seed: u64) -> Vec<u32> {
    let ids = random::tokens(300, tokens, seed.wrapping_mul(0x9E37_79B9));
    ids.into_iter().map(|id| if id == BAD { 8 } else { id }).collect()
}

#[test]
fn shared_pages_change_no_bit() {
    let Some(device) = device() else { return };
    for (head_dim, pages, drafted, target, cached) in [
        (64, 8, Pages::All, View::Both, false),
        (64, 32, Pages::Window(4), View::Both, true),
        (128, 8, Pages::Best(3), View::Full, true),
        (128, 8, Pages::Snap { pages: 3, refresh: 1 }, View::Both, true),
    ] {
        let shape = Shape::new("llama", "BF16", (4, 2, head_dim));
        let shape = Shape { hidden: 128, intermediate: 256, tied: false, ..shape };
        let checkpoint = shape.failing(12, BAD as usize);
        let document = text(pages * G + 76, 11);
        let capacity = sharing::capacity(document.len());
        let open = |slots: usize, pool_pages: usize| {
            let options = Options {
                pool_pages,
                planes: Planes::of(&[target, View::Upper]),
                page_masses: true,
                ..Options::new(slots, capacity)
            };
            let backend = CudaBackend::load_on(&device, &checkpoint, &options, Hooks::default()).unwrap();
            let plan = DraftConfig { weights: Weights::Draft, view: View::Upper, pages: drafted };
            let method = Method { target, drafter: Some(SelfQuantised::boxed(plan)), policy: Policy::fixed(4) };
            let mut engine = Engine::new(backend, method, slots, capacity, options.block_rows);
            if cached {
                let cache = PromptCache::in_memory(engine.backend(), usize::MAX);
                engine.cache_prompts(cache);
            }
            engine
        };
        sharing::changes_no_bit(&open, &document, &text, BAD);
    }
}
