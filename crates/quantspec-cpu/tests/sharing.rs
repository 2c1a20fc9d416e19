//! Sequences whose prompts begin alike read the same pages, and no bit of an answer changes.

#[path = "support/paths.rs"]
mod paths;
#[path = "support/random.rs"]
mod random;
#[path = "../../quantspec-model/tests/support/sharing.rs"]
mod sharing;

use quantspec_core::ablation::{Ablation, Axis};
use quantspec_core::cache::G;
use quantspec_core::config::{Pages, Planes, View, Weights};
use quantspec_core::policy::Policy;
use quantspec_cpu::CpuBackend;
use quantspec_cpu::dispatch::{ChosenPath, Simd};
use quantspec_model::backend::{DraftConfig, Hooks, Options};
use quantspec_model::checkpoint::Checkpoint;
use quantspec_model::draft::SelfQuantised;
use quantspec_model::engine::{Engine, Method};
use quantspec_model::prompt_cache::PromptCache;
use random::Shape;

const LLAMA: Shape = Shape { tied: false, ..Shape::new("llama", "BF16", (4, 2, 32)) };
/// A token with which a prompt fails.
const BAD: u32 = 7;

/// Text without [`BAD`].
fn text(tokens: usize, seed: u64) -> Vec<u32> {
    random::tokens(300, tokens, seed.wrapping_mul(0x9E37_79B9))
        .into_iter()
        .map(|id| if id == BAD { 8 } else { id })
        .collect()
}

/// The settings that the engines of a case share.
struct Case {
    simd: Simd,
    document: usize,
    target: View,
    drafted: Pages,
    ablation: Option<Ablation>,
    cached: bool,
}

impl Case {
    fn check(&self) {
        let checkpoint = LLAMA.failing(12, BAD as usize);
        let open = |slots, pages| self.open(&checkpoint, slots, pages);
        sharing::changes_no_bit(&open, &text(self.document, 11), &text, BAD);
    }

    fn open(&self, checkpoint: &Checkpoint, slots: usize, pool_pages: usize) -> Engine<CpuBackend> {
        let capacity = sharing::capacity(self.document);
        let options = Options {
            pool_pages,
            planes: Planes::of(&[self.target, View::Upper]),
            ablation: self.ablation,
            page_masses: true,
            step_rows: 5 * slots,
            block_rows: 96,
            threads: 2,
            ..Options::new(slots, capacity)
        };
        let choice = ChosenPath { simd: self.simd, reason: String::new() };
        let backend = CpuBackend::load_on(checkpoint, &options, Hooks::default(), choice).expect("load");
        let plan = DraftConfig { weights: Weights::Draft, view: View::Upper, pages: self.drafted };
        let method =
            Method { target: self.target, drafter: Some(SelfQuantised::boxed(plan)), policy: Policy::fixed(4) };
        let mut engine = Engine::new(backend, method, slots, capacity, options.block_rows);
        if self.cached {
            let cache = PromptCache::in_memory(engine.backend(), usize::MAX);
            engine.cache_prompts(cache);
        }
        engine
    }
}

#[test]
fn shared_pages_change_no_bit() {
    for simd in paths::paths() {
        for (drafted, target, cached) in [
            (Pages::All, View::Both, false),
            (Pages::Best(3), View::Full, true),
            (Pages::Snap { pages: 3, refresh: 1 }, View::Both, true),
        ] {
            let document = 8 * G + 76;
            Case { simd, document, target, drafted, ablation: None, cached }.check();
        }
    }
}

#[test]
fn a_long_document_is_held_once() {
    let (simd, drafted) = (quantspec_cpu::dispatch::choose().expect("path").simd, Pages::Window(4));
    let document = 32 * G + 76;
    Case { simd, document, target: View::Both, drafted, ablation: None, cached: true }.check();
}

#[test]
fn pages_of_an_ablation_are_shared() {
    let (simd, drafted) = (quantspec_cpu::dispatch::choose().expect("path").simd, Pages::All);
    let ablation = Some(Ablation { key_axis: Axis::Token, value_axis: Axis::Token, group: 32, truncated: false });
    Case { simd, document: 8 * G + 76, target: View::Both, drafted, ablation, cached: false }.check();
}
