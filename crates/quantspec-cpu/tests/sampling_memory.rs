//! The heap that sampling takes in a round is planned. Other memory of a round is allocated at load.

#[path = "support/random.rs"]
#[allow(dead_code, reason = "one shape is enough here")]
mod random;

use quantspec_core::config::{Pages, View, Weights};
use quantspec_core::grammar::{Grammar, Mask};
use quantspec_core::penalty::Penalties;
use quantspec_core::policy::Policy;
use quantspec_core::sample::{Accept, Sampler};
use quantspec_cpu::{CpuBackend, plan};
use quantspec_model::backend::{DraftConfig, Hooks, Options};
use quantspec_model::draft::SelfQuantised;
use quantspec_model::engine::{Engine, Method};
use random::Shape;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

const GAMMA: usize = 6;
const SLOTS: usize = 2;

/// Bytes allocated now, and most of them so far.
struct Heap {
    held: AtomicUsize,
    peak: AtomicUsize,
}

#[global_allocator]
static HEAP: Heap = Heap { held: AtomicUsize::new(0), peak: AtomicUsize::new(0) };

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let held = self.held.fetch_add(layout.size(), Relaxed) + layout.size();
        self.peak.fetch_max(held, Relaxed);
        // SAFETY: as the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        self.held.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as the caller's.
        unsafe { System.dealloc(at, layout) }
    }
}

/// Allows no token after some drafted ones, so that the round fails.
#[derive(Debug)]
struct Ends;

impl Grammar for Ends {
    fn mask(&self, drafted: &[u32]) -> quantspec_core::Result<Option<Mask>> {
        Ok((drafted.len() >= GAMMA - 1).then(|| Mask::from([])))
    }

    fn advance(&self, _: &[u32]) {}
}

/// Bytes of the heap that four rounds take, and of sampling in the plan.
fn taken_and_planned(accept: Accept, temperature: f32, fails: bool) -> (usize, usize) {
    let shape = Shape { vocab: 20_000, ..Shape::new("llama", "BF16", (4, 2, 32)) };
    let by_rejection = accept == Accept::Rejection;
    let options = Options {
        step_rows: SLOTS * (GAMMA + 1),
        rejection: by_rejection,
        rejection_gamma: if by_rejection { GAMMA } else { 0 },
        ..Options::new(SLOTS, 256)
    };
    let (checkpoint, row) = (shape.checkpoint(3), size_of::<f32>() * shape.vocab);
    let without = Options { rejection: false, rejection_gamma: 0, ..options.clone() };
    let planned = [&options, &without].map(|options| plan(&checkpoint, options).workspace_bytes);
    let backend = CpuBackend::load(&checkpoint, &options, Hooks::default()).expect("load");
    let config = DraftConfig { weights: Weights::Draft, view: View::Upper, pages: Pages::All };
    let drafter = Some(SelfQuantised::boxed(config));
    let method = Method { target: View::Both, drafter, policy: Policy::fixed(GAMMA) };
    let mut engine = Engine::new(backend, method, SLOTS, 256, 64);
    let penalties = Penalties::new(1.3, 0.0, 0.0, 0).expect("penalties");
    for slot in 0..SLOTS {
        let sampler = Sampler { temperature, accept, penalties, ..Sampler::greedy() };
        engine.add(&random::tokens(shape.vocab, 40, 5), sampler, 100).expect("add");
        if fails {
            engine.constrain(slot, Box::new(Ends)).expect("constrain");
        }
        engine.prefill(slot, &mut |_, _| ()).expect("prefill");
    }
    let before = HEAP.held.load(Relaxed);
    HEAP.peak.store(before, Relaxed);
    for _ in 0..4 {
        engine.draft(&[(0, GAMMA), (1, GAMMA)]).expect("draft");
        engine.verify().expect("verify");
    }
    (HEAP.peak.load(Relaxed) - before, row + planned[0] - planned[1])
}

#[test]
fn sampling_takes_the_memory_that_was_planned() {
    for (accept, temperature) in [(Accept::Greedy, 0.0), (Accept::Replay, 1.0), (Accept::Rejection, 1.0)] {
        for fails in [false, true] {
            let (taken, planned) = taken_and_planned(accept, temperature, fails);
            // Half a row for lists of tokens and rows.
            assert!(taken < planned + 40_000, "{accept:?}, fails: {fails}: {taken} bytes of {planned}");
        }
    }
}
