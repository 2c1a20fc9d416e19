//! What the engine refuses, and that a refusal leaves it as it was. That it decodes well is held by the stories and, with the
//! fast backends, by the laws of exactness.
#![cfg(feature = "reference")]

#[path = "support/tiny.rs"]
mod tiny;

use quantspec_core::ErrorKind;
use quantspec_core::cache::{BUFFER_TOKENS, GAMMA_MAX};
use quantspec_core::config::{DraftWeights, Pages, Planes, Rounding, View, Weights};
use quantspec_core::policy::{Policy, Stop};
use quantspec_core::sample::Sampler;
use quantspec_model::backend::{DraftPlan, Hooks, Options, Turn};
use quantspec_model::checkpoint::Checkpoint;
use quantspec_model::engine::{Engine, Method};
use quantspec_model::forward;
use quantspec_model::reference::ReferenceBackend;

fn engine(gamma: usize, slots: usize, capacity: usize) -> Engine<ReferenceBackend> {
    let folder = tiny::Folder::valid();
    let checkpoint = Checkpoint::open(folder.path()).expect("checkpoint");
    let plan = DraftPlan { weights: Weights::Draft, view: View::Upper, pages: Pages::All };
    let options = Options {
        slots,
        capacity,
        prompt_capacity: capacity,
        planes: Planes::of(&[View::Both]),
        rounding: Rounding::Balanced,
        draft_weights: DraftWeights::Int4,
        rejection: false,
        step_rows: slots * (gamma + 1),
        block_rows: 16,
        threads: 1,
    };
    let backend = ReferenceBackend::load(&checkpoint, &options, Hooks::default()).expect("load");
    let method = Method { target: View::Both, draft: (gamma > 0).then_some(plan), policy: Policy::fixed(gamma) };
    Engine::new(backend, method, slots, capacity, 16)
}

fn add(engine: &mut Engine<ReferenceBackend>, prompt: &[u32], new: usize) -> Result<usize, ErrorKind> {
    engine.add(prompt, Sampler::greedy(), new).map_err(|error| error.kind)
}

fn prefill(engine: &mut Engine<ReferenceBackend>, slot: usize) -> Result<u32, ErrorKind> {
    engine.prefill(slot, &mut |_, _| ()).map_err(|error| error.kind)
}

#[test]
fn prompts_that_cannot_be_taken() {
    let mut engine = engine(4, 2, 40);
    assert_eq!(add(&mut engine, &[], 5), Err(ErrorKind::Usage));
    assert_eq!(add(&mut engine, &[1, 16], 5), Err(ErrorKind::Model));
    assert_eq!(add(&mut engine, &[1], 0), Err(ErrorKind::Usage));
    assert_eq!(add(&mut engine, &[1; 30], 11), Err(ErrorKind::DoesNotFit));
    assert_eq!(add(&mut engine, &[1], usize::MAX), Err(ErrorKind::DoesNotFit));
    // A hint names what can be done: of an engine of 40 tokens neither side may take all.
    for (prompt, new, hint) in [
        (30, 11, "shorten the prompt to at most 29 tokens, or ask for at most 10 new ones"),
        (40, 1, "shorten the prompt to at most 39 tokens"),
        (50, 4, "shorten the prompt to at most 36 tokens"),
        (1, 40, "ask for at most 39 new tokens"),
        (1, usize::MAX, "ask for at most 39 new tokens"),
        (40, 40, "open the engine for longer sequences"),
    ] {
        let error = engine.add(&vec![1; prompt], Sampler::greedy(), new).expect_err("too much");
        assert_eq!(error.hint, hint, "{prompt} and {new}");
    }
    // Exactly full is not too much, and refusals took no slot.
    assert_eq!(add(&mut engine, &[1; 30], 10), Ok(0));
    assert_eq!(add(&mut engine, &[1], 5), Ok(1));
    assert_eq!(add(&mut engine, &[1], 5), Err(ErrorKind::Usage));
    engine.finish(0);
    engine.finish(0);
    assert_eq!(add(&mut engine, &[1], 5), Ok(0));
}

#[test]
fn rounds_that_cannot_be_run() {
    let mut engine = engine(4, 2, 40);
    let slot = add(&mut engine, &[1, 2, 3], 6).expect("add");
    let kind = |result: quantspec_core::Result<()>| result.expect_err("refused").kind;
    assert_eq!(kind(engine.draft(&[(slot, 1)])), ErrorKind::Usage, "before prefill");
    prefill(&mut engine, slot).expect("prefill");
    assert_eq!(prefill(&mut engine, slot), Err(ErrorKind::Usage));
    for round in [
        vec![(slot, 5)],
        vec![(slot, GAMMA_MAX + 1)],
        vec![(slot, 1), (slot, 1)],
        vec![(slot, 1), (1, 1)],
        vec![(7, 0)],
    ] {
        assert_eq!(kind(engine.draft(&round)), ErrorKind::Usage, "{round:?}");
        // No part of a refused round is left to verify.
        assert_eq!(engine.verify().expect_err("nothing drafted").kind, ErrorKind::Usage, "{round:?}");
    }
    // Five tokens are left: γ 4 may emit all of them and is what the policy's 4 becomes; then there is nothing to do.
    let mut emitted = 0;
    while emitted < 5 {
        let gamma = engine.choose_gamma(slot);
        assert_eq!(gamma, 4.min(4 - emitted));
        engine.draft(&[(slot, gamma)]).expect("draft");
        let round = engine.verify().expect("verify");
        assert!(round[0].tokens.len() <= gamma + 1);
        emitted += round[0].tokens.len();
    }
    assert_eq!((emitted, engine.choose_gamma(slot)), (5, 0));
    assert_eq!(kind(engine.draft(&[(slot, 0)])), ErrorKind::Usage, "ended");
}

#[test]
fn plain_decoding_drafts_nothing() {
    let mut engine = engine(0, 1, 40);
    let slot = add(&mut engine, &[1], 9).expect("add");
    prefill(&mut engine, slot).expect("prefill");
    assert_eq!(engine.choose_gamma(slot), 0);
    assert_eq!(engine.draft(&[(slot, 1)]).expect_err("no draft").kind, ErrorKind::Usage);
    assert!(engine.verify().is_err());
    engine.draft(&[(slot, 0)]).expect("plain step");
    assert_eq!(engine.verify().expect("verify")[0].tokens.len(), 1);
}

#[test]
fn a_draft_ends_where_its_tokens_are_in_doubt() {
    let mut engine = engine(4, 1, 40);
    let slot = add(&mut engine, &[1, 2, 3], 9).expect("add");
    prefill(&mut engine, slot).expect("prefill");
    let plan = DraftPlan { weights: Weights::Draft, view: View::Upper, pages: Pages::All };
    // No lead counts beside such an error: each token halves the chance.
    for (enough, drafted) in [(0.0, 4), (0.2, 3), (0.4, 2), (0.9, 1)] {
        let stop = Stop { enough, doubt: 1e9 };
        let mut turns =
            [Turn { slot, committed: 3, gamma: 4, stop: Some(stop), leads: vec![], sampler: Sampler::greedy() }];
        forward::draft(engine.backend(), &plan, &mut turns).expect("draft");
        assert_eq!((turns[0].gamma, turns[0].leads.len()), (drafted, drafted));
        assert!(turns[0].leads.iter().all(|lead| *lead >= 0.0));
    }
}

#[test]
fn an_answer_begins_anew_while_the_buffer_holds_what_its_first_row_reads() {
    let mut engine = engine(0, 1, 600);
    let slot = add(&mut engine, &[1, 2, 3], 500).expect("add");
    assert_eq!(engine.restart(slot, 1, Sampler::greedy()).expect_err("nothing to restart").kind, ErrorKind::Usage);
    let first = prefill(&mut engine, slot).expect("prefill");
    let steps = |engine: &mut Engine<ReferenceBackend>, count: usize| -> Vec<u32> {
        let step = |_| {
            engine.draft(&[(slot, 0)]).expect("draft");
            engine.verify().expect("verify")[0].tokens[0]
        };
        (0..count).map(step).collect()
    };
    // Three tokens of prompt: the ring is written once around, then its oldest token is lost.
    let answer = steps(&mut engine, BUFFER_TOKENS - 3);
    assert!(engine.restart(slot, first, Sampler::greedy()).expect("restart"));
    assert_eq!(steps(&mut engine, BUFFER_TOKENS - 3), answer);
    steps(&mut engine, 1);
    assert!(!engine.restart(slot, first, Sampler::greedy()).expect("restart"));
    assert_eq!(engine.restart(slot, 16, Sampler::greedy()).expect_err("no such token").kind, ErrorKind::Model);
}
