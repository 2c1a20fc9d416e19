//! Contract of the CPU backend apart from numerics: planned memory, hooks, errors, independent slots.

#[path = "support/paths.rs"]
mod paths;
#[path = "support/random.rs"]
mod random;

use quantspec_core::cache::G;
use quantspec_core::config::{DraftWeights, Pages, Planes, Sensitive, TargetWeights, View, Weights};
use quantspec_core::policy::Policy;
use quantspec_core::sample::{Accept, Sampler};
use quantspec_core::{Error, ErrorKind};
use quantspec_cpu::dispatch::{ChosenPath, Simd};
use quantspec_cpu::{CpuBackend, plan};
use quantspec_model::backend::{Backend, DraftConfig, Hooks, KvCache, Network, Options, Row, Step, TokenSampler, Turn};
use quantspec_model::draft::SelfQuantised;
use quantspec_model::engine::{Engine, Method};
use quantspec_model::forward;
use random::Shape;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

const LLAMA: Shape = Shape { tied: false, ..Shape::new("llama", "BF16", (4, 2, 32)) };

fn options(slots: usize, capacity: usize) -> Options {
    Options { block_rows: 64, threads: 2, ..Options::new(slots, capacity) }
}

/// One decode row of a slot; returns its logits.
fn step(backend: &mut CpuBackend, slot: usize, token: u32, position: usize) -> Result<Vec<f32>, Error> {
    backend.set_window(slot, &[token])?;
    let rows = [Row { slot, offset: 0, position }];
    let step = Step { weights: Weights::Full, view: View::Both, pages: Pages::All, choose_pages: false, rows: &rows };
    forward::step(backend, &step)?;
    backend.logits(0)
}

#[test]
fn memory_is_what_was_planned() {
    for (shape, draft) in [
        (LLAMA, DraftWeights::Int4),
        (Shape { biases: true, ..Shape::new("llama", "F32", (2, 1, 40)) }, DraftWeights::Int4Mlp),
        (Shape::new("qwen3", "F16", (2, 2, 64)), DraftWeights::None),
        (Shape::new("smollm3", "BF16", (2, 1, 64)), DraftWeights::Int4),
        (Shape::new("olmo2", "BF16", (2, 1, 64)), DraftWeights::Int4),
        (Shape::new("gemma3_text", "BF16", (2, 1, 64)), DraftWeights::Int4),
        (Shape { tied: false, ..Shape::new("qwen2", "BF16", (2, 1, 64)) }, DraftWeights::Int4),
    ] {
        // The last checkpoint mixes number formats: of tables, within a fused matrix, of a layer.
        let checkpoint = shape.edited(1, &|name, _, dtype| {
            *dtype = match (shape.family, name) {
                ("qwen2", "model.embed_tokens.weight" | "lm_head.weight") => "F32",
                ("qwen2", "model.layers.0.self_attn.k_proj.weight" | "model.layers.1.mlp.down_proj.weight") => "F16",
                _ => shape.dtype,
            }
        });
        for planes in [Planes::of(&[View::Both]), Planes::of(&[View::Full]), Planes::of(&[View::Upper])] {
            let rejection = draft != DraftWeights::None;
            let options =
                Options { planes, draft_weights: draft, rejection, page_masses: rejection, ..options(3, 1000) };
            let backend = CpuBackend::load(&checkpoint, &options, Hooks::default()).expect("load");
            assert_eq!(backend.memory(), plan(&checkpoint, &options), "{shape:?} {planes:?}");
            let (mut larger, down) = (backend.memory().weights_bytes, Sensitive::DOWN);
            // Without draft weights a draft reads every matrix; the rest are the embedding, norms and biases.
            let none = Options { draft_weights: DraftWeights::None, ..options.clone() };
            let none = CpuBackend::load(&checkpoint, &none, Hooks::default()).expect("load");
            let rest = none.memory().weights_bytes - none.draft_read_bytes();
            let own = backend.memory().draft_weights_bytes;
            match draft {
                DraftWeights::Int4 => assert_eq!(backend.draft_read_bytes(), own),
                DraftWeights::Int4Mlp => {
                    assert!((own + 1..none.draft_read_bytes()).contains(&backend.draft_read_bytes()))
                }
                DraftWeights::None => assert_eq!(backend.draft_read_bytes(), none.draft_read_bytes()),
            }
            let sensitive = Options { sensitive: down, ..options.clone() };
            let in_eight = CpuBackend::load(&checkpoint, &sensitive, Hooks::default()).expect("load").memory();
            assert_eq!(in_eight, plan(&checkpoint, &sensitive), "{shape:?} {planes:?}");
            assert_eq!(
                in_eight.draft_weights_bytes > backend.memory().draft_weights_bytes,
                draft != DraftWeights::None
            );
            for weights in [TargetWeights::Int8, TargetWeights::Int4] {
                let options = Options { weights, ..options.clone() };
                let one_copy = CpuBackend::load(&checkpoint, &options, Hooks::default()).expect("load");
                let (one_copy, read) = (one_copy.memory(), one_copy.draft_read_bytes());
                assert_eq!(one_copy, plan(&checkpoint, &options), "{shape:?} {planes:?} {weights:?}");
                // With int4 drafts read all planes that there are, with int8 a little more than half.
                let (matrices, fewer) = (one_copy.weights_bytes - rest, weights == TargetWeights::Int8 && own > 0);
                assert!(
                    if fewer { matrices / 2 < read && read < matrices } else { read == matrices },
                    "{weights:?} {read}"
                );
                let sensitive = Options { sensitive: down, ..options };
                assert_eq!(one_copy, plan(&checkpoint, &sensitive), "planes are there already");
                assert!(one_copy.weights_bytes < larger && one_copy.draft_weights_bytes == 0);
                larger = one_copy.weights_bytes;
            }
            let weights: usize = backend.memory().weights_bytes;
            assert!(weights > 0 && (backend.memory().draft_weights_bytes > 0) == (draft != DraftWeights::None));
        }
    }
}

#[test]
fn loading_reports_progress_and_stops_on_request() {
    let checkpoint = LLAMA.checkpoint(2);
    let seen = Arc::new(AtomicUsize::new(0));
    let last = seen.clone();
    let loading = move |done: usize, total: usize| {
        assert!(done >= last.load(Relaxed) && done <= total);
        last.store(done, Relaxed);
    };
    let hooks = Hooks { loading: Box::new(loading), ..Hooks::default() };
    CpuBackend::load(&checkpoint, &options(1, 256), hooks).expect("load");
    let config = checkpoint.config();
    let layer = config.hidden * (2 * config.q_width() + 2 * config.kv_width() + 3 * config.intermediate);
    assert_eq!(seen.load(Relaxed), 2 * (config.layers * layer + 2 * config.vocab * config.hidden));

    let mut calls = 0;
    let poll = move || {
        calls += 1;
        if calls == 5 { Err(Error::interrupted()) } else { Ok(()) }
    };
    let hooks = Hooks { poll: Box::new(poll), ..Hooks::default() };
    let error = CpuBackend::load(&checkpoint, &options(1, 256), hooks).err().expect("interrupted");
    assert_eq!(error.kind, ErrorKind::Interrupted);
}

#[test]
fn prefill_polls_inside_its_operations() {
    let checkpoint = LLAMA.checkpoint(3);
    let calls = Arc::new(AtomicUsize::new(0));
    let counter = calls.clone();
    let poll = move || {
        counter.fetch_add(1, Relaxed);
        Ok(())
    };
    let hooks = Hooks { poll: Box::new(poll), ..Hooks::default() };
    let mut backend = CpuBackend::load(&checkpoint, &options(1, 512), hooks).expect("load");
    backend.open(0, 512).expect("open");
    let ids = random::tokens(300, 300, 4);
    let before = calls.load(Relaxed);
    forward::prefill(&mut backend, 0, &ids, 64, &mut |_, _| ()).expect("prefill");
    // Five operations of each of five blocks, and the end of the layer; in the last layer the four blocks before the last page
    // have one operation.
    let layers = (5 * 5 + 1) + (4 + 5 + 1);
    // The forward pass polls after every block's embedding and after each of these. Each also polls once inside for work as
    // small as this.
    let inside = calls.load(Relaxed) - before - (5 + layers);
    assert_eq!(inside, layers);
}

#[test]
fn nan_weights_are_named() {
    for name in ["model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.down_proj.weight"] {
        for bits in [0x7f80, 0xff80, 0x7fc0] {
            for weights in [TargetWeights::Checkpoint, TargetWeights::Int8, TargetWeights::Int4] {
                let checkpoint = LLAMA.damaged(5, name, bits);
                let options = Options { weights, ..options(1, 256) };
                let error = CpuBackend::load(&checkpoint, &options, Hooks::default()).err().expect("an error");
                assert_eq!(error.kind, ErrorKind::NotFinite);
                assert!(error.message.contains(name), "{}", error.message);
            }
        }
    }
}

#[test]
fn keys_beyond_half_precision_are_an_error() {
    // One weight of 1e6 in the value projection: finite in BF16, but the values overflow f16.
    let checkpoint = LLAMA.damaged(5, "model.layers.0.self_attn.v_proj.weight", 0x4974);
    let mut backend = CpuBackend::load(
        &checkpoint,
        &Options { draft_weights: DraftWeights::None, ..options(1, 256) },
        Hooks::default(),
    )
    .expect("load");
    backend.open(0, 256).expect("open");
    let ids = random::tokens(300, 100, 4);
    let error = forward::prefill(&mut backend, 0, &ids, 64, &mut |_, _| ()).expect_err("an error");
    assert_eq!(error.kind, ErrorKind::NotFinite);
    let error = step(&mut backend, 0, 7, 0).expect_err("an error");
    assert_eq!(error.kind, ErrorKind::NotFinite);
}

#[test]
fn a_logit_may_mask_its_own_token_only() {
    // Hidden states are embeddings, as layers add nothing. Only token 7 has a non-zero first channel, token 8 the negative of
    // it. The head's weights make its logit for token 5 overflow f32.
    let (above, below, masked) = (7, 8, 5);
    for (dtype, all) in [("F32", false), ("BF16", false), ("F32", true)] {
        let shape = Shape { dtype, ..LLAMA };
        let checkpoint = shape.edited(9, &|name, values, _| match name {
            "model.embed_tokens.weight" => {
                values.chunks_exact_mut(shape.hidden).for_each(|row| row[0] = 0.0);
                values[above * shape.hidden] = 50.0;
                values[below * shape.hidden] = -50.0;
            }
            "lm_head.weight" if all => values.chunks_exact_mut(shape.hidden).for_each(|row| row[0] = 3e38),
            "lm_head.weight" => values[masked * shape.hidden] = 3e38,
            _ if name.ends_with("o_proj.weight") || name.ends_with("down_proj.weight") => values.fill(0.0),
            _ => (),
        });
        let options = Options { draft_weights: DraftWeights::None, ..options(1, 256) };
        let rows = [0, 1, 2].map(|offset| Row { slot: 0, offset, position: offset });
        let window = |n: usize| Step {
            weights: Weights::Full,
            view: View::Both,
            pages: Pages::All,
            choose_pages: false,
            rows: &rows[..n],
        };
        for choice in choices() {
            let name = choice.simd.name();
            let mut backend = CpuBackend::load_on(&checkpoint, &options, Hooks::default(), choice).expect("load");
            backend.open(0, 256).expect("open");
            backend.set_window(0, &[9, below as u32, above as u32]).expect("window");
            let error = forward::step(&mut backend, &window(3)).expect_err("no token can be chosen");
            assert_eq!(error.kind, ErrorKind::NotFinite, "{name}");
            if all {
                assert_eq!(error.message, "row 2 of 3: all 300 logits are −∞", "{name}");
                continue;
            }
            assert_eq!(error.message, "row 3 of 3: 1 of 300 logits are NaN or infinite", "{name}");
            forward::step(&mut backend, &window(2)).expect("a masked token");
            let infinite = |backend: &mut CpuBackend, row: usize| -> Vec<(usize, f32)> {
                let logits = backend.logits(row).expect("logits");
                logits.into_iter().enumerate().filter(|(_, logit)| !logit.is_finite()).collect()
            };
            assert_eq!(infinite(&mut backend, 0), [], "{name}");
            assert_eq!(infinite(&mut backend, 1), [(masked, f32::NEG_INFINITY)], "{name}");
            // A prompt's last row behaves the same.
            forward::prefill(&mut backend, 0, &[9, below as u32], 64, &mut |_, _| ()).expect("a masked token");
            assert_eq!(infinite(&mut backend, 0), [(masked, f32::NEG_INFINITY)], "{name}");
            assert_ne!(backend.first(&Turn::new(0, 2, 0, Sampler::greedy())).expect("a token"), masked as u32);
            forward::prefill(&mut backend, 0, &[9, above as u32], 64, &mut |_, _| ()).expect_err("infinite");
        }
    }
}

/// Every path this machine has.
fn choices() -> impl Iterator<Item = ChosenPath> {
    paths::paths().into_iter().map(|simd| ChosenPath { simd, reason: String::new() })
}

#[test]
fn a_sequence_that_failed_leaves_nothing_behind() {
    let bad = 7;
    let checkpoint = LLAMA.overflowing(9, bad, [2e4, 0.0]);
    let options = Options { draft_weights: DraftWeights::None, ..options(1, 256) };
    let clean: Vec<u32> =
        random::tokens(300, 70, 5).into_iter().map(|id| if id == bad as u32 { 8 } else { id }).collect();
    for choice in choices() {
        let name = choice.simd.name();
        let load = || CpuBackend::load_on(&checkpoint, &options, Hooks::default(), choice.clone()).expect("load");
        // The logits of a prompt and of steps up to the position of both failures.
        let decode = |backend: &mut CpuBackend| -> Vec<Vec<u32>> {
            backend.open(0, 256).expect("open");
            forward::prefill(backend, 0, &clean, 64, &mut |_, _| ()).expect("prefill");
            let prompt = backend.logits(0).expect("logits");
            let steps = (70..110).map(|position| step(backend, 0, clean[position % 70], position).expect("step"));
            std::iter::once(prompt).chain(steps).map(|row| row.iter().map(|x| x.to_bits()).collect()).collect()
        };
        let expected = decode(&mut load());

        let mut backend = load();
        backend.open(0, 256).expect("open");
        let mut long = [&clean[..], &clean[..30]].concat();
        long[80] = bad as u32;
        let error = forward::prefill(&mut backend, 0, &long, 64, &mut |_, _| ()).expect_err("an overflow");
        assert_eq!(error.kind, ErrorKind::NotFinite, "{name}");
        assert_eq!(decode(&mut backend), expected, "{name}: after a prompt that failed");
        let error = step(&mut backend, 0, bad as u32, 110).expect_err("an overflow");
        assert_eq!(error.kind, ErrorKind::NotFinite, "{name}");
        assert_eq!(decode(&mut backend), expected, "{name}: after a step that failed");
    }
}

#[test]
fn a_failing_draft_ends_the_draft_only() {
    // 6,650 · √96 fits in f16. In four bits it shares a code with 6,800, at a value between the two that does not fit. The
    // token is in no made-up text, so its channel's weight has little importance.
    let (bad, shape) = (3, Shape::new("llama", "F32", (4, 2, 32)));
    let checkpoint = shape.overflowing(9, bad, [6650.0, 6800.0]);
    let options = Options { rejection: true, ..options(2, 512) };
    let plan = DraftConfig { weights: Weights::Draft, view: View::Upper, pages: Pages::All };
    let prompt = random::tokens(300, 20, 6);
    for choice in choices() {
        let name = choice.simd.name();
        let load = || CpuBackend::load_on(&checkpoint, &options, Hooks::default(), choice.clone()).expect("load");
        let mut backend = load();
        backend.open(0, 512).expect("open");
        backend.set_window(0, &[bad as u32]).expect("window");
        let rows = [Row { slot: 0, offset: 0, position: 0 }];
        let drafted =
            Step { weights: Weights::Draft, view: View::Upper, pages: Pages::All, choose_pages: false, rows: &rows };
        let error = forward::step(&mut backend, &drafted).expect_err("an overflow of the draft");
        assert_eq!(error.kind, ErrorKind::NotFinite, "{name}");
        step(&mut backend, 0, bad as u32, 0).expect("the target computes it");

        // Two answers, the first of which begins with that token.
        let run = |accept: Accept, draft: Option<DraftConfig>, policy: Policy, gammas: [Option<usize>; 2]| {
            let method = Method { target: View::Both, drafter: draft.map(SelfQuantised::boxed), policy };
            let mut engine = Engine::new(load(), method, 2, 512, 64);
            let sampler = Sampler { temperature: 1.0, seed: 3, accept, ..Sampler::greedy() };
            let mut texts = [vec![bad as u32], vec![5]];
            for text in &texts {
                let slot = engine.add(&prompt, sampler.clone(), 40).expect("add");
                engine.prefill(slot, &mut |_, _| ()).expect("prefill");
                assert!(engine.restart(slot, text[0], sampler.clone()).expect("restart"));
            }
            while texts.iter().any(|text| text.len() < 40) {
                let running = (0..2).filter(|&slot| texts[slot].len() < 40);
                let round: Vec<(usize, usize)> = running
                    .map(|slot| {
                        let most = engine.choose_gamma(slot);
                        (slot, gammas[slot].map_or(most, |gamma| gamma.min(39 - texts[slot].len())))
                    })
                    .collect();
                engine.draft(&round).expect("draft");
                for emitted in engine.verify().expect("verify") {
                    texts[emitted.slot].extend(emitted.tokens);
                }
            }
            (texts, engine.stats().rounds(), engine.stats().drafted_tokens())
        };
        let (plain, ..) = run(Accept::Replay, None, Policy::fixed(0), [Some(0); 2]);
        for (policy, gammas) in [
            (Policy::fixed(3), [Some(3), Some(5)]),
            (Policy::fixed(3), [Some(1), Some(2)]),
            (Policy::fixed(8), [Some(8); 2]),
            (Policy::auto(8), [None; 2]),
        ] {
            let (texts, ..) = run(Accept::Replay, Some(plan), policy, gammas);
            assert_eq!(texts, plain, "{name} {gammas:?}");
        }
        // In the first round only the other sequence drafts.
        let (_, rounds, drafted) = run(Accept::Rejection, Some(plan), Policy::fixed(3), [Some(3), Some(3)]);
        assert!(drafted > 0 && drafted <= 3 * (rounds - 1), "{name}: {drafted} drafted in {rounds}");
    }
}

#[test]
fn a_failing_drafted_token_ends_no_text() {
    const TEXTS: u64 = 400;
    // The target fails on token 7. Drafts propose it, and plain decoding may choose another one.
    let (bad, shape) = (7, Shape { vocab: 32, ..LLAMA });
    let checkpoint = shape.overflowing(9, bad, [2e4, 0.0]);
    let options = Options { rejection: true, ..options(1, 256) };
    let plan = DraftConfig { weights: Weights::Draft, view: View::Upper, pages: Pages::All };
    let prompt: Vec<u32> = (0..20).map(|i| i % 7).collect();
    for choice in choices() {
        // The tokens up to the end, or up to the failure.
        let run = |accept: Accept, seed: u64, draft: Option<DraftConfig>, policy: Policy| {
            let load = CpuBackend::load_on(&checkpoint, &options, Hooks::default(), choice.clone()).expect("load");
            let mut engine = Engine::new(
                load,
                Method { target: View::Both, drafter: draft.map(SelfQuantised::boxed), policy },
                1,
                256,
                64,
            );
            let sampler = Sampler { temperature: 0.7, seed, accept, ..Sampler::greedy() };
            let slot = engine.add(&prompt, sampler, 30).expect("add");
            let mut text = vec![engine.prefill(slot, &mut |_, _| ()).expect("prefill")];
            while text.len() < 30 {
                let gamma = engine.choose_gamma(slot);
                let round = engine.draft(&[(slot, gamma)]).and_then(|()| engine.verify());
                match round {
                    Ok(round) => text.extend(&round[0].tokens),
                    Err(error) => {
                        assert_eq!(error.kind, ErrorKind::NotFinite, "{error}");
                        break;
                    }
                }
            }
            text
        };
        let (mut finished, mut by_rejection) = (0, 0);
        for seed in 0..40 {
            let plain = run(Accept::Replay, seed, None, Policy::fixed(0));
            finished += usize::from(plain.len() == 30);
            for policy in [Policy::fixed(1), Policy::fixed(5), Policy::fixed(8), Policy::auto(8)] {
                let text = run(Accept::Replay, seed, Some(plan), policy);
                assert_eq!(text, plain, "{} seed {seed}", choice.simd.name());
            }
            let text = run(Accept::Rejection, seed, Some(plan), Policy::fixed(5));
            assert!(text.len() == 30 || text.last() == Some(&(bad as u32)), "{text:?}");
        }
        assert!((5..35).contains(&finished), "{finished} of 40 texts do without the token");
        // By rejection as many texts end in failure.
        for seed in 40..TEXTS {
            finished += usize::from(run(Accept::Replay, seed, None, Policy::fixed(0)).len() == 30);
        }
        for seed in 0..TEXTS {
            by_rejection += usize::from(run(Accept::Rejection, seed, Some(plan), Policy::fixed(5)).len() == 30);
        }
        let apart = random::deviations([finished, by_rejection], TEXTS);
        assert!(apart.abs() < 4.0, "{finished} and {by_rejection} of {TEXTS} texts do without the token");
    }
}

#[test]
fn a_repeated_round_changes_no_token_of_neighbours() {
    // As above, with three answers at once: a failing draft of one makes the round of all fail.
    let (bad, shape) = (7, Shape { vocab: 32, ..LLAMA });
    let checkpoint = shape.overflowing(9, bad, [2e4, 0.0]);
    let options = Options { rejection: true, ..options(3, 256) };
    let plan = DraftConfig { weights: Weights::Draft, view: View::Upper, pages: Pages::All };
    let prompt = |seed: u64| (0..20).map(|i| (i + seed as u32) % 7).collect::<Vec<u32>>();
    for choice in choices() {
        let name = choice.simd.name();
        let engine = |draft: Option<DraftConfig>| {
            let load = CpuBackend::load_on(&checkpoint, &options, Hooks::default(), choice.clone()).expect("load");
            let policy = Policy::fixed(if draft.is_some() { 5 } else { 0 });
            Engine::new(
                load,
                Method { target: View::Both, drafter: draft.map(SelfQuantised::boxed), policy },
                3,
                256,
                64,
            )
        };
        // The texts of the seeds, or None if one of them chose the failing token itself; and the number of repeated
        // rounds.
        let run = |seeds: &[u64], draft: Option<DraftConfig>, accept: Accept| -> Option<(Vec<Vec<u32>>, usize)> {
            let mut engine = engine(draft);
            let (mut texts, mut again) = (Vec::new(), 0);
            for &seed in seeds {
                let sampler = Sampler { temperature: 0.7, seed, accept, ..Sampler::greedy() };
                let slot = engine.add(&prompt(seed), sampler, 30).expect("add");
                texts.push(vec![engine.prefill(slot, &mut |_, _| ()).expect("prefill")]);
            }
            while texts.iter().any(|text| text.len() < 30) {
                let running = (0..texts.len()).filter(|&slot| texts[slot].len() < 30);
                let round: Vec<(usize, usize)> = running.map(|slot| (slot, engine.choose_gamma(slot))).collect();
                engine.draft(&round).expect("draft");
                // A draft ends with the token, on which the target fails. It is verified at any window offset; the draft may
                // then be shorter than requested.
                let backend = engine.backend();
                let overflows = round.iter().any(|&(slot, gamma)| {
                    let drafted = (1..=gamma).rev().find_map(|n| backend.window(slot, n + 1).ok());
                    drafted.is_some_and(|window| window[1..].contains(&(bad as u32)))
                });
                let counts = |engine: &Engine<CpuBackend>| (engine.stats().drafted_tokens(), engine.stats().rounds());
                let before = counts(&engine);
                let emitted = engine.verify().ok()?;
                // Tokens of a failed draft count as drafted, and a repeated round as one round.
                let after = counts(&engine);
                assert!(!overflows || after.0 > before.0, "{name}: {after:?}");
                assert_eq!(after.1, before.1 + round.len(), "{name}");
                let one_each = emitted.iter().all(|emitted| emitted.tokens.len() == 1);
                assert!(!overflows || accept == Accept::Rejection || one_each, "{name}");
                again += usize::from(overflows);
                emitted.into_iter().for_each(|emitted| texts[emitted.slot].extend(emitted.tokens));
            }
            Some((texts, again))
        };
        let mut taken_again = [0; 2];
        for (again, (accept, alone)) in
            [(Accept::Replay, None), (Accept::Rejection, Some(plan))].into_iter().enumerate()
        {
            // By replay as plain decoding, by rejection as without neighbours.
            let alone: Vec<(u64, Vec<u32>)> =
                (0..40).filter_map(|seed| Some((seed, run(&[seed], alone, accept)?.0.remove(0)))).take(12).collect();
            assert_eq!(alone.len(), 12, "{name}: too few texts do without the token");
            for batch in alone.chunks(3) {
                let seeds: Vec<u64> = batch.iter().map(|(seed, _)| *seed).collect();
                let (texts, repeated) = run(&seeds, Some(plan), accept).expect("alone these seeds have texts");
                taken_again[again] += repeated;
                for ((seed, alone), text) in batch.iter().zip(&texts) {
                    assert_eq!(text, alone, "{name} {accept:?} seed {seed}");
                }
            }
        }
        assert!(taken_again.iter().all(|&rounds| rounds > 0), "{name}: {taken_again:?} rounds were taken again");
    }
}

#[test]
fn slots_do_not_affect_each_other() {
    let checkpoint = LLAMA.checkpoint(6);
    let ids: Vec<Vec<u32>> = (0..3).map(|slot| random::tokens(300, 3 * G + 50 * slot, 10 + slot as u64)).collect();
    let load = |slots: usize| CpuBackend::load(&checkpoint, &options(slots, 4 * G), Hooks::default()).expect("load");
    let bits = |logits: Vec<f32>| -> Vec<u32> { logits.iter().map(|x| x.to_bits()).collect() };
    let alone: Vec<Vec<u32>> = ids
        .iter()
        .map(|ids| {
            let mut backend = load(1);
            backend.open(0, 4 * G).expect("open");
            forward::prefill(&mut backend, 0, ids, 64, &mut |_, _| ()).expect("prefill");
            bits(step(&mut backend, 0, 3, ids.len()).expect("step"))
        })
        .collect();
    let mut backend = load(3);
    for (slot, ids) in ids.iter().enumerate().rev() {
        backend.open(slot, 4 * G).expect("open");
        forward::prefill(&mut backend, slot, ids, 64, &mut |_, _| ()).expect("prefill");
    }
    (0..3).for_each(|slot| backend.set_window(slot, &[3]).expect("window"));
    let rows: Vec<Row> = [2, 0, 1].map(|slot| Row { slot, offset: 0, position: ids[slot].len() }).to_vec();
    let step = Step { weights: Weights::Full, view: View::Both, pages: Pages::All, choose_pages: false, rows: &rows };
    forward::step(&mut backend, &step).expect("step");
    for (row, slot) in [2, 0, 1].into_iter().enumerate() {
        assert_eq!(bits(backend.logits(row).expect("logits")), alone[slot], "slot {slot}");
    }
}

#[test]
fn misuse_is_an_error() {
    let checkpoint = LLAMA.checkpoint(7);
    let mut backend = CpuBackend::load(&checkpoint, &options(1, 256), Hooks::default()).expect("load");
    let kind = |result: Result<Vec<f32>, Error>| result.err().map(|error| error.kind);
    assert_eq!(kind(step(&mut backend, 0, 1, 0)), Some(ErrorKind::Internal), "a slot that is not open");
    assert_eq!(backend.open(0, 257).err().map(|error| error.kind), Some(ErrorKind::DoesNotFit));
    assert_eq!(backend.open(1, 10).err().map(|error| error.kind), Some(ErrorKind::Internal));
    backend.open(0, 100).expect("open");
    assert_eq!(kind(step(&mut backend, 0, 1, 100)), Some(ErrorKind::DoesNotFit), "beyond the capacity");
    assert_eq!(kind(step(&mut backend, 0, 300, 0)), Some(ErrorKind::Internal), "a token outside the vocabulary");
    assert_eq!(kind(step(&mut backend, 0, 1, 99)), None);
    assert!(backend.flush(0, 1).is_err() && backend.store(0, 0, 101).is_err() && backend.window(0, 40).is_err());
    let mut pair = CpuBackend::load(&checkpoint, &options(2, 100), Hooks::default()).expect("load");
    for slot in [0, 1] {
        pair.open(slot, 100).expect("open");
        pair.set_window(slot, &[1, 2]).expect("window");
    }
    let rows = [(0, 0), (1, 0), (0, 1)].map(|(slot, offset)| Row { slot, offset, position: 90 + offset });
    let apart =
        Step { weights: Weights::Draft, view: View::Upper, pages: Pages::Best(1), choose_pages: true, rows: &rows };
    let error = forward::step(&mut pair, &apart).expect_err("an error");
    assert_eq!((error.kind, error.message.as_str()), (ErrorKind::Internal, "rows of slot 0 are not contiguous"));
    let foreign = Simd::ALL.into_iter().find(|simd| !simd.missing().is_empty()).expect("no CPU has every path");
    let choice = ChosenPath { simd: foreign, reason: String::new() };
    let error = CpuBackend::load_on(&checkpoint, &options(1, 256), Hooks::default(), choice).err().expect("an error");
    assert_eq!(error.kind, ErrorKind::Usage);
    // More memory than any machine has.
    let error = CpuBackend::load(&checkpoint, &options(1 << 20, 1 << 30), Hooks::default()).err().expect("an error");
    assert_eq!(error.kind, ErrorKind::DoesNotFit);
}

#[test]
fn sequences_share_the_pages_of_a_pool() {
    let checkpoint = LLAMA.checkpoint(12);
    let (prompts, new_tokens) = ([700, 120, 390, 300].map(|n| random::tokens(300, n, n as u64)), 20);
    let pages = |prompt: &Vec<u32>| (prompt.len() + new_tokens) / G;
    let open = |slots: usize, pool_pages: usize| {
        let options = Options { pool_pages, ..options(slots, 720) };
        let backend = CpuBackend::load(&checkpoint, &options, Hooks::default()).expect("load");
        assert_eq!(backend.memory(), plan(&checkpoint, &options));
        let plan = DraftConfig { weights: Weights::Draft, view: View::Upper, pages: Pages::All };
        let method = Method { target: View::Both, drafter: Some(SelfQuantised::boxed(plan)), policy: Policy::fixed(3) };
        Engine::new(backend, method, slots, 720, 64)
    };
    let decode = |engine: &mut Engine<CpuBackend>, slots: &[usize], texts: &mut [Vec<u32>]| {
        let turns: Vec<_> = slots.iter().map(|&slot| (slot, engine.choose_gamma(slot))).collect();
        engine.draft(&turns).expect("draft");
        for (emitted, text) in engine.verify().expect("verify").into_iter().zip(texts) {
            text.extend(emitted.tokens);
        }
    };
    let begin = |engine: &mut Engine<CpuBackend>, prompt: &[u32]| {
        let slot = engine.add(prompt, Sampler::greedy(), new_tokens).expect("add");
        (slot, vec![engine.prefill(slot, &mut |_, _| ()).expect("prefill")])
    };
    let alone: Vec<Vec<u32>> = prompts
        .iter()
        .map(|prompt| {
            let mut engine = open(1, usize::MAX);
            let (slot, text) = begin(&mut engine, prompt);
            let mut texts = [text];
            while texts[0].len() < new_tokens {
                decode(&mut engine, &[slot], &mut texts);
            }
            let [text] = texts;
            text
        })
        .collect();
    // Nine pages; three slots of the longest sequence would need fifteen.
    let mut engine = open(3, 9);
    let plans = [open(3, 9).memory(), open(3, usize::MAX).memory()].map(|memory| memory.cache_upper_bytes);
    assert_eq!(plans[0] * 15, plans[1] * 9);
    assert_eq!(prompts.each_ref().map(pages), [5, 1, 3, 2]);
    let mut begun: Vec<_> = prompts[..3].iter().map(|prompt| begin(&mut engine, prompt)).collect();
    assert!(!engine.has_room(&[1], 1), "no slot is free");
    let slots: Vec<usize> = begun.iter().map(|(slot, _)| *slot).collect();
    let mut texts: Vec<Vec<u32>> = begun.drain(..).map(|(_, text)| text).collect();
    decode(&mut engine, &slots, &mut texts);
    // The shortest sequence ends; its page is not enough for the next one.
    engine.finish(slots[1]);
    assert!(engine.has_room(&[1; 126], 1) && !engine.has_room(&prompts[3], new_tokens));
    let error = engine.add(&prompts[3], Sampler::greedy(), new_tokens).expect_err("no pages");
    assert!(error.kind == ErrorKind::Usage && error.message.contains("2 pages; 1 of 9 are free"), "{}", error.message);
    engine.finish(slots[0]);
    let (slot, text) = begin(&mut engine, &prompts[3]);
    let (slots, mut texts) = ([slots[2], slot], [texts.remove(2), text]);
    while texts.iter().any(|text| text.len() < new_tokens) {
        let open: Vec<usize> = (0..2).filter(|&i| texts[i].len() < new_tokens).collect();
        for i in open {
            decode(&mut engine, &slots[i..=i], &mut texts[i..=i]);
        }
    }
    assert_eq!(texts, [alone[2].clone(), alone[3].clone()]);
    // The backend enforces its pool limit itself.
    let backend = engine.backend();
    let error = backend.open(0, 720).and_then(|()| backend.open(1, 720)).expect_err("beyond the pool");
    assert_eq!(error.kind, ErrorKind::DoesNotFit);
}
