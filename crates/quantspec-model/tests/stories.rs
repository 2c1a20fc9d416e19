//! stories260K, a third party's trained checkpoint, tells its reference story token for token, plainly and drafted.
#![cfg(feature = "reference")]

use quantspec_core::cache::G;
use quantspec_core::config::{DraftWeights, Pages, Planes, Rounding, View, Weights};
use quantspec_core::policy::Policy;
use quantspec_core::sample::Sampler;
use quantspec_model::backend::{DraftPlan, Hooks, Options};
use quantspec_model::checkpoint::Checkpoint;
use quantspec_model::engine::{Engine, Method};
use quantspec_model::reference::ReferenceBackend;
use std::path::Path;

/// Ends a story; the checkpoint's config.json names another token.
const STOP: u32 = 1;

fn story(target: View, gamma: usize, max_new_tokens: usize) -> Vec<u32> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/stories260K");
    let checkpoint = Checkpoint::open(&directory).expect("checkpoint");
    let capacity = 1 + max_new_tokens;
    let plan = DraftPlan { weights: Weights::Draft, view: View::Upper, pages: Pages::All };
    let options = Options {
        slots: 1,
        capacity,
        planes: Planes::of(&[target, plan.view]),
        rounding: Rounding::Balanced,
        draft_weights: DraftWeights::Int4,
        step_rows: gamma + 1,
        block_rows: 16,
        threads: 1,
    };
    let backend = ReferenceBackend::load(&checkpoint, &options, Hooks::default()).expect("load");
    let draft = (gamma > 0).then_some(plan);
    let method = Method { target, draft, policy: Policy::fixed(gamma) };
    let mut engine = Engine::new(backend, method, 1, capacity, 16);
    let slot = engine.add(&[STOP], Sampler::greedy(), max_new_tokens).expect("add");
    let mut tokens = vec![engine.prefill(slot, &mut |_, _| ()).expect("prefill")];
    while tokens.len() < max_new_tokens && !tokens.contains(&STOP) {
        engine.draft(&[(slot, engine.choose_gamma(slot))]).expect("draft");
        tokens.extend(engine.verify().expect("verify").remove(0).tokens);
    }
    let end = tokens.iter().position(|&token| token == STOP).unwrap_or(tokens.len());
    tokens[..end].to_vec()
}

fn expected() -> Vec<u32> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/stories260K/greedy_reference.json");
    let json: serde_json::Value = serde_json::from_slice(&std::fs::read(file).expect("reference")).expect("JSON");
    let ids = json["generated_ids"].as_array().expect("ids");
    ids.iter().map(|id| id.as_u64().expect("id") as u32).collect()
}

#[test]
fn the_reference_story_is_told_exactly() {
    let expected = expected();
    assert_eq!(expected.len(), 256, "the reference run was cut at 256 tokens");
    for gamma in [0, 4] {
        assert_eq!(story(View::Full, gamma, expected.len()), expected, "gamma {gamma}");
    }
}

#[test]
fn every_view_tells_its_story_drafted_or_not() {
    // Pages are read from position 256 on; the story ends at 345 or later.
    for (target, gammas) in [(View::Both, [1, 16].as_slice()), (View::Full, &[5]), (View::Upper, &[5])] {
        let plain = story(target, 0, 380);
        assert!(plain.len() > 2 * G + 32, "view {target:?}: the story ends after {} tokens", plain.len());
        for &gamma in gammas {
            assert_eq!(story(target, gamma, 380), plain, "view {target:?}, gamma {gamma}");
        }
    }
}
