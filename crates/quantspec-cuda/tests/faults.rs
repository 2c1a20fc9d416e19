//! A failure or interrupt in one sequence does not affect the next.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod gpu;
#[path = "../../quantspec-cpu/tests/support/random.rs"]
#[allow(dead_code, reason = "shared with tests that use more of it")]
mod random;
#[path = "gpu/model.rs"]
mod small;

use gpu::device;
use quantspec_core::config::{DraftWeights, Pages, Planes, Rounding, TargetWeights, View, Weights};
use quantspec_core::policy::Policy;
use quantspec_core::sample::{Accept, Sampler};
use quantspec_core::{Error, ErrorKind, Result};
use quantspec_cuda::device::Device;
use quantspec_cuda::{CudaBackend, Limits, plan};
use quantspec_model::backend::{Backend, DraftConfig, Hooks, KvCache, Memory, Options, Row, Step, TokenSampler, Turn};
use quantspec_model::checkpoint::Checkpoint;
use quantspec_model::draft::SelfQuantised;
use quantspec_model::engine::{Engine, Method};
use quantspec_model::{evaluate, forward};
use random::Shape;
use small::{checkpoints, drafting, options, prompt};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

const LLAMA: Shape = Shape { hidden: 128, intermediate: 256, tied: false, ..Shape::new("llama", "BF16", (4, 2, 64)) };

fn load(device: &Arc<Device>, checkpoint: &Checkpoint, options: &Options) -> CudaBackend {
    CudaBackend::load_on(device, checkpoint, options, Hooks::default()).unwrap()
}

fn method(draft: Option<DraftConfig>, policy: Policy) -> Method {
    Method { target: View::Both, drafter: draft.map(SelfQuantised::boxed), policy }
}

/// One decode row of slot 0; returns its logits' bits.
fn step(backend: &mut CudaBackend, weights: Weights, token: u32, position: usize) -> Result<Vec<u32>> {
    backend.set_window(0, &[token])?;
    let rows = [Row { slot: 0, offset: 0, position }];
    let view = if weights == Weights::Draft { View::Upper } else { View::Both };
    forward::step(backend, &Step { weights, view, pages: Pages::All, choose_pages: false, rows: &rows })?;
    Ok(backend.logits(0)?.iter().map(|x| x.to_bits()).collect())
}

/// A text of `tokens` tokens; if `bad` is given, the answer begins with it.
fn decode<B: Backend>(
    engine: &mut Engine<B>,
    prompt: &[u32],
    sampler: &Sampler,
    tokens: usize,
    bad: Option<u32>,
) -> Result<Vec<u32>> {
    let slot = engine.add(prompt, sampler.clone(), tokens)?;
    let mut run = || {
        let mut text = vec![engine.prefill(slot, &mut |_, _| {})?];
        if let Some(bad) = bad {
            assert!(engine.restart(slot, bad, sampler.clone())?);
            text = vec![bad];
        }
        while text.len() < tokens {
            engine.draft(&[(slot, engine.choose_gamma(slot))])?;
            text.extend(engine.verify()?.remove(0).tokens);
        }
        Ok(text)
    };
    let text = run();
    engine.finish(slot);
    text
}

#[test]
fn an_interrupt_at_any_time_leaves_nothing_behind() {
    let Some(device) = device() else { return };
    let checkpoint = &checkpoints(&device, 1200)[0];
    let text = prompt(checkpoint.config().vocab, 700, 3);
    let sampler = Sampler { temperature: 0.8, seed: 5, accept: Accept::Replay, ..Sampler::greedy() };
    let small = Limits { tokens: 64, hidden_bytes: 0 };
    for (policy, limits, weights) in [
        (Policy::fixed(3), Limits::default(), TargetWeights::Checkpoint),
        (Policy::auto(8), small, TargetWeights::Checkpoint),
        (Policy::fixed(3), small, TargetWeights::Int8),
    ] {
        let left = Arc::new(AtomicUsize::new(usize::MAX));
        let counter = left.clone();
        let poll = move || match counter.load(Relaxed) {
            0 => Err(Error::interrupted()),
            n => {
                counter.store(n - 1, Relaxed);
                Ok(())
            }
        };
        let hooks = Hooks { poll: Box::new(poll), ..Hooks::default() };
        let options = Options { weights, ..options(1200, 1) };
        let backend = CudaBackend::load_with(&device, checkpoint, &options, hooks, limits).unwrap();
        let mut engine = Engine::new(backend, method(Some(drafting("quantspec")), policy.clone()), 1, 1200, 256);
        let mut run = || {
            engine.set_method(method(Some(drafting("quantspec")), policy.clone())).unwrap();
            decode(&mut engine, &text, &sampler, 60, None)
        };
        let expected = run().unwrap();
        let (mut polls, mut interrupts) = (1, 0);
        loop {
            left.store(polls, Relaxed);
            let interrupted = run();
            left.store(usize::MAX, Relaxed);
            match interrupted {
                Err(error) => assert_eq!(error.kind, ErrorKind::Interrupted, "{}", error.message),
                Ok(text) => {
                    assert_eq!(text, expected);
                    break;
                }
            }
            interrupts += 1;
            assert_eq!(run().unwrap(), expected, "after an interrupt at the {polls}th look");
            polls += polls / 8 + 1;
        }
        assert!(interrupts > 10, "{interrupts} places were interrupted");
    }
}

#[test]
fn a_sequence_that_failed_leaves_nothing_behind() {
    let Some(device) = device() else { return };
    let bad = 7;
    let checkpoint = LLAMA.overflowing(9, bad, [2e4, 0.0]);
    let options = Options { draft_weights: DraftWeights::None, ..options(256, 1) };
    let clean: Vec<u32> =
        random::tokens(300, 70, 5).into_iter().map(|id| if id == bad as u32 { 8 } else { id }).collect();
    // The logits of a prompt and of steps up to the position of both failures.
    let decode = |backend: &mut CudaBackend| -> Vec<Vec<u32>> {
        backend.open(0, 256).unwrap();
        forward::prefill(backend, 0, &clean, 64, &mut |_, _| ()).unwrap();
        assert!(backend.first(&Turn::new(0, 70, 0, Sampler::greedy())).is_ok());
        (70..110).map(|position| step(backend, Weights::Full, clean[position % 70], position).unwrap()).collect()
    };
    let expected = decode(&mut load(&device, &checkpoint, &options));

    let mut backend = load(&device, &checkpoint, &options);
    backend.open(0, 256).unwrap();
    let mut long = [&clean[..], &clean[..30]].concat();
    long[80] = bad as u32;
    forward::prefill(&mut backend, 0, &long, 64, &mut |_, _| ()).unwrap();
    assert_eq!(backend.first(&Turn::new(0, 100, 0, Sampler::greedy())).unwrap_err().kind, ErrorKind::NotFinite);
    assert_eq!(decode(&mut backend), expected, "after a prompt that failed");
    // The flags of this prompt and this step are never read.
    backend.open(0, 256).unwrap();
    forward::prefill(&mut backend, 0, &long, 64, &mut |_, _| ()).unwrap();
    assert_eq!(decode(&mut backend), expected, "after a prompt whose failure was not read");
    backend.open(0, 256).unwrap();
    let logits = step(&mut backend, Weights::Full, bad as u32, 0);
    assert_eq!(logits.unwrap_err().kind, ErrorKind::NotFinite, "logits alone do not show it");
    assert_eq!(decode(&mut backend), expected, "after a step that failed");
}

/// A prompt interrupted after it set a flag, next to a sequence that continues.
#[test]
fn an_interrupted_prompt_fails_no_neighbour() {
    let Some(device) = device() else { return };
    let checkpoint = LLAMA.overflowing(9, 7, [2e4, 0.0]);
    let mut backend = load(&device, &checkpoint, &options(256, 2));
    backend.open(0, 256).unwrap();
    let clean: Vec<u32> = (20..60).collect();
    forward::prefill(&mut backend, 0, &clean, 64, &mut |_, _| ()).unwrap();
    backend.first(&Turn::new(0, clean.len(), 0, Sampler::greedy())).unwrap();
    backend.open(1, 256).unwrap();
    forward::prefill(&mut backend, 1, &[&clean[..], &[7]].concat(), 64, &mut |_, _| ()).unwrap();
    backend.close(1);
    let rows = [Row { slot: 0, offset: 0, position: clean.len() }];
    let turns = [Turn::new(0, clean.len(), 0, Sampler::greedy())];
    backend.set_window(0, &[30]).unwrap();
    let pages = Pages::All;
    forward::step(
        &mut backend,
        &Step { weights: Weights::Full, view: View::Both, pages, choose_pages: false, rows: &rows },
    )
    .unwrap();
    let step = Step { weights: Weights::Full, view: View::Both, pages, choose_pages: false, rows: &rows };
    assert!(backend.judge(&step, &turns).is_ok());
}

/// A text whose keys or values overflow must not be scored.
#[test]
fn an_evaluation_that_overflows_is_an_error() {
    let Some(device) = device() else { return };
    let checkpoint = LLAMA.overflowing(9, 7, [2e4, 0.0]);
    let mut text: Vec<u32> = (0..300).map(|i| 20 + i % 50).collect();
    let options = Options { threads: 1, ..evaluate::options(300, Rounding::Balanced, 1) };
    let score = |tokens: &[u32]| {
        let mut backend = load(&device, &checkpoint, &options);
        let text = evaluate::Text { tokens, context: 200, block_rows: options.block_rows };
        evaluate::evaluate(&mut backend, None, text, &[], &mut |_, _| ())
    };
    assert!(score(&text).is_ok());
    for at in [100, 250] {
        let old = std::mem::replace(&mut text[at], 7);
        assert_eq!(score(&text).unwrap_err().kind, ErrorKind::NotFinite, "token {at}");
        text[at] = old;
    }
}

#[test]
fn a_failing_draft_ends_no_text() {
    let Some(device) = device() else { return };
    // 5,750 · √128 fits in f16. In four bits it shares a code with 5,900, at a value between the two that does not fit. The
    // token is in no made-up text, so its channel's weight has little importance.
    let bad = 3;
    let checkpoint = Shape { dtype: "F32", ..LLAMA }.overflowing(9, bad, [5750.0, 5900.0]);
    let text = random::tokens(300, 20, 6);
    for rejection in [false, true] {
        let options = Options { rejection, ..options(512, 1) };
        let mut backend = load(&device, &checkpoint, &options);
        backend.open(0, 512).unwrap();
        assert!(step(&mut backend, Weights::Full, bad as u32, 0).is_ok(), "the target computes it");
        let draft = step(&mut backend, Weights::Draft, bad as u32, 0);
        assert_eq!(draft.unwrap_err().kind, ErrorKind::NotFinite, "the draft does not");
        for accept in [Accept::Greedy, Accept::Replay] {
            let sampler = match accept {
                Accept::Greedy => Sampler::greedy(),
                _ => Sampler { temperature: 1.0, seed: 3, accept, ..Sampler::greedy() },
            };
            let run = |draft, policy| {
                let mut engine = Engine::new(load(&device, &checkpoint, &options), method(draft, policy), 1, 512, 64);
                decode(&mut engine, &text, &sampler, 60, Some(bad as u32))
            };
            let plain = run(None, Policy::fixed(0)).unwrap();
            for policy in [Policy::fixed(3), Policy::auto(8)] {
                assert_eq!(run(Some(drafting("quantspec")), policy).unwrap(), plain, "{accept:?}");
            }
        }
        if rejection {
            // Rejection needs the draft's probabilities, which are NaN here: a plain step replaces the round.
            let sampler = Sampler { temperature: 1.0, seed: 3, accept: Accept::Rejection, ..Sampler::greedy() };
            let run = || {
                let method = method(Some(drafting("quantspec")), Policy::fixed(3));
                let mut engine = Engine::new(load(&device, &checkpoint, &options), method, 1, 512, 64);
                let text = decode(&mut engine, &text, &sampler, 60, Some(bad as u32)).unwrap();
                (text, engine.stats().accepted_tokens())
            };
            let (text, accepted) = run();
            assert!(text.len() == 60 && accepted > 0, "{accepted} accepted");
            assert_eq!(run(), (text, accepted));
        }
    }
}

#[test]
fn a_failing_drafted_token_ends_no_text() {
    const TEXTS: u64 = 400;
    let Some(device) = device() else { return };
    // The target fails on token 7. Drafts propose it, and plain decoding may choose another one.
    let checkpoint = Shape { vocab: 32, ..LLAMA }.overflowing(9, 7, [2e4, 0.0]);
    let options = Options { rejection: true, ..options(512, 1) };
    let prompt: Vec<u32> = (0..20).map(|i| i % 7).collect();
    let mut engine = Engine::new(load(&device, &checkpoint, &options), method(None, Policy::fixed(0)), 1, 512, 64);
    // The tokens up to the end, or up to the failure.
    let mut run = |accept: Accept, seed: u64, draft, policy: &Policy| {
        engine.set_method(method(draft, policy.clone())).unwrap();
        let sampler = Sampler { temperature: 0.7, seed, accept, ..Sampler::greedy() };
        let slot = engine.add(&prompt, sampler, 30).unwrap();
        let mut text = vec![engine.prefill(slot, &mut |_, _| ()).unwrap()];
        while text.len() < 30 {
            let gamma = engine.choose_gamma(slot);
            match engine.draft(&[(slot, gamma)]).and_then(|()| engine.verify()) {
                Ok(round) => text.extend(&round[0].tokens),
                Err(error) => {
                    assert_eq!(error.kind, ErrorKind::NotFinite);
                    break;
                }
            }
        }
        engine.finish(slot);
        text
    };
    let mut finished = 0;
    for seed in 0..60 {
        let plain = run(Accept::Replay, seed, None, &Policy::fixed(0));
        finished += usize::from(plain.len() == 30);
        for policy in [Policy::fixed(1), Policy::fixed(5), Policy::auto(8)] {
            assert_eq!(run(Accept::Replay, seed, Some(drafting("quantspec")), &policy), plain, "seed {seed}");
        }
    }
    assert!((5..55).contains(&finished), "{finished} of 60 texts do without the token");
    // By rejection as many texts end in failure.
    let mut by_rejection = 0;
    for seed in 60..TEXTS {
        finished += usize::from(run(Accept::Replay, seed, None, &Policy::fixed(0)).len() == 30);
    }
    for seed in 0..TEXTS {
        let text = run(Accept::Rejection, seed, Some(drafting("quantspec")), &Policy::fixed(5));
        by_rejection += usize::from(text.len() == 30);
    }
    let apart = random::deviations([finished, by_rejection], TEXTS);
    assert!(apart.abs() < 4.0, "{finished} and {by_rejection} of {TEXTS} texts do without the token");
}

/// Rounds queued whole and recorded, compared with their steps one after another.
#[test]
fn rounds_are_their_steps() {
    let Some(device) = device() else { return };
    let checkpoint = &checkpoints(&device, 1200)[0];
    let text = prompt(checkpoint.config().vocab, 520, 4);
    for accept in [Accept::Greedy, Accept::Replay, Accept::Rejection] {
        let sampler = match accept {
            Accept::Greedy => Sampler::greedy(),
            _ => Sampler { temperature: 0.9, top_k: 50, top_p: 0.95, seed: 8, accept, ..Sampler::greedy() },
        };
        let run = |whole: bool| {
            let mut backend = load(&device, checkpoint, &options(1200, 1));
            backend.open(0, 1200).unwrap();
            forward::prefill(&mut backend, 0, &text, 256, &mut |_, _| ()).unwrap();
            let mut last = backend.first(&Turn::new(0, text.len(), 0, sampler.clone())).unwrap();
            let (mut committed, mut out) = (text.len(), vec![(0, last)]);
            for gamma in [3, 3, 3, 3, 5, 0, 3, 1] {
                // No page becomes complete during the test.
                backend.set_window(0, &[last]).unwrap();
                let sampler = sampler.clone();
                let mut turns = [Turn::new(0, committed, gamma, sampler)];
                forward::draft(&mut backend, &drafting("quantspec"), &mut turns).unwrap();
                let verdict = if whole {
                    forward::verify(&mut backend, View::Both, &turns).unwrap()[0]
                } else {
                    let round = forward::RoundSteps::of_verification(View::Both, &turns);
                    assert_eq!(round.drafts().count(), gamma);
                    forward::run_steps(&mut backend, &round).unwrap()[0]
                };
                out.extend(
                    backend.window(0, verdict.accepted + 1).unwrap().into_iter().map(|id| (verdict.accepted, id)),
                );
                (committed, last) = (committed + verdict.accepted + 1, verdict.token);
            }
            // Rounds with γ 3 ran four times, the third time as a graph; single steps are never recorded.
            assert_eq!(backend.recorded() > 0, whole, "{} kinds of rounds are recorded", backend.recorded());
            out
        };
        assert_eq!(run(true), run(false), "{accept:?}");
    }
}

#[test]
fn tables_of_another_format_are_planned_for() {
    let Some(device) = device() else { return };
    let checkpoint = LLAMA.edited(1, &|name, _, dtype| {
        if matches!(name, "model.embed_tokens.weight" | "lm_head.weight") {
            *dtype = "F32";
        }
    });
    for draft_weights in [DraftWeights::Int4, DraftWeights::Int4Mlp, DraftWeights::None] {
        for planes in [Planes::of(&[View::Both]), Planes::of(&[View::Full])] {
            let options = Options { draft_weights, planes, ..options(1000, 2) };
            let [planned, held] =
                [plan(&checkpoint, &options, &device.info), load(&device, &checkpoint, &options).memory()]
                    .map(|memory| Memory { workspace_bytes: 0, ..memory });
            assert_eq!(planned, held);
        }
    }
}
