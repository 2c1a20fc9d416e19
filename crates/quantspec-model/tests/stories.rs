//! stories260K, a third party's trained checkpoint, emits its reference story token for token, plainly and with drafts.
#![cfg(feature = "reference")]

use quantspec_core::cache::G;
use quantspec_core::config::{Pages, Planes, View, Weights};
use quantspec_core::policy::Policy;
use quantspec_core::sample::{Accept, Sampler};
use quantspec_model::backend::{DraftConfig, Hooks, Options};
use quantspec_model::checkpoint::Checkpoint;
use quantspec_model::draft::SelfQuantised;
use quantspec_model::engine::{Engine, Method};
use quantspec_model::reference::ReferenceBackend;
use std::path::Path;

/// End of a story; the checkpoint's config.json names another token.
const STOP: u32 = 1;

/// Tokens of every prompt, decoded as one batch up to [`STOP`] or `max_new_tokens`.
fn decode(
    prompts: &[Vec<u32>],
    target: View,
    gamma: usize,
    pages: Pages,
    sampler: &Sampler,
    max_new_tokens: usize,
) -> Vec<Vec<u32>> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/stories260K");
    let checkpoint = Checkpoint::open(&directory).expect("checkpoint");
    let slots = prompts.len();
    let capacity = prompts.iter().map(Vec::len).max().unwrap_or(0) + max_new_tokens;
    let plan = DraftConfig { weights: Weights::Draft, view: View::Upper, pages };
    let options = Options {
        planes: Planes::of(&[target, plan.view]),
        step_rows: slots * (gamma + 1),
        block_rows: 16,
        ..Options::new(slots, capacity)
    };
    let backend = ReferenceBackend::load(&checkpoint, &options, Hooks::default()).expect("load");
    let draft = (gamma > 0).then_some(plan);
    let method = Method { target, drafter: draft.map(SelfQuantised::boxed), policy: Policy::fixed(gamma) };
    let mut engine = Engine::new(backend, method, slots, capacity, 16);
    let mut texts = Vec::new();
    for (index, prompt) in prompts.iter().enumerate() {
        assert_eq!(engine.add(prompt, sampler.clone(), max_new_tokens).expect("add"), index);
        texts.push(vec![engine.prefill(index, &mut |_, _| ()).expect("prefill")]);
    }
    loop {
        let going = |text: &Vec<u32>| text.len() < max_new_tokens && !text.contains(&STOP);
        let round: Vec<(usize, usize)> =
            (0..slots).filter(|&slot| going(&texts[slot])).map(|slot| (slot, engine.choose_gamma(slot))).collect();
        if round.is_empty() {
            break;
        }
        engine.draft(&round).expect("draft");
        for emitted in engine.verify().expect("verify") {
            texts[emitted.slot].extend(emitted.tokens);
        }
    }
    assert_eq!(engine.stats().drafted_tokens() > 0, gamma > 0);
    let until_stop = |text: Vec<u32>| text.into_iter().take_while(|&token| token != STOP).collect();
    texts.into_iter().map(until_stop).collect()
}

fn story(target: View, gamma: usize, max_new_tokens: usize) -> Vec<u32> {
    decode(&[vec![STOP]], target, gamma, Pages::All, &Sampler::greedy(), max_new_tokens).remove(0)
}

fn expected() -> Vec<u32> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/stories260K/greedy_reference.json");
    let json: serde_json::Value = serde_json::from_slice(&std::fs::read(file).expect("reference")).expect("JSON");
    let ids = json["generated_ids"].as_array().expect("ids");
    ids.iter().map(|id| id.as_u64().expect("id") as u32).collect()
}

#[test]
fn the_reference_story_is_reproduced_exactly() {
    let expected = expected();
    assert_eq!(expected.len(), 256, "the reference run was cut at 256 tokens");
    for gamma in [0, 4] {
        assert_eq!(story(View::Full, gamma, expected.len()), expected, "gamma {gamma}");
    }
}

#[test]
fn every_view_emits_its_story_with_and_without_drafts() {
    // Pages are read from position 256 on; the story ends at 345 or later.
    for (target, gammas) in [(View::Both, [1, 16].as_slice()), (View::Full, &[5]), (View::Upper, &[5])] {
        let plain = story(target, 0, 380);
        assert!(plain.len() > 2 * G + 32, "view {target:?}: the story ends after {} tokens", plain.len());
        for &gamma in gammas {
            assert_eq!(story(target, gamma, 380), plain, "view {target:?}, gamma {gamma}");
        }
    }
}

#[test]
fn neighbours_selected_pages_and_sampling_change_no_token() {
    // Prefixes of the reference story that end on both sides of page borders, the last with three pages to choose from.
    let story = expected();
    let prompt = |length: usize| std::iter::once(STOP).chain(story.iter().copied().cycle()).take(length).collect();
    let prompts: Vec<Vec<u32>> = [1, G - 1, 2 * G + 1, 4 * G + 40].into_iter().map(prompt).collect();
    let sampler =
        Sampler { temperature: 0.8, top_k: 40, top_p: 0.95, seed: 11, accept: Accept::Replay, ..Sampler::greedy() };
    let alone: Vec<Vec<u32>> = prompts
        .iter()
        .map(|prompt| decode(std::slice::from_ref(prompt), View::Both, 0, Pages::All, &sampler, 40).remove(0))
        .collect();
    assert!(alone.iter().map(Vec::len).sum::<usize>() > 80, "the texts stop early");
    for pages in [Pages::Best(2), Pages::Window(2)] {
        assert_eq!(decode(&prompts, View::Both, 4, pages, &sampler, 40), alone, "{pages:?}");
    }
}
