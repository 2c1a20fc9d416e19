//! A whole model on the GPU: speculation and neighbours change no token, and memory is as planned.
//!
//! The models are the demo model of the repository and those in the directory `QUANTSPEC_TEST_MODELS`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]
#![allow(clippy::print_stderr, reason = "acceptance is worth seeing")]

mod gpu;
#[path = "../../quantspec-cpu/tests/support/grammar.rs"]
mod grammar;
#[path = "gpu/model.rs"]
mod small;

use gpu::device;
use quantspec_core::cache::Extent;
use quantspec_core::config::{DraftWeights, Dtype, Pages, Planes, Sensitive, TargetWeights, View, Weights};
use quantspec_core::logprob::Logprob;
use quantspec_core::penalty::Penalties;
use quantspec_core::policy::Policy;
use quantspec_core::sample::{Accept, Sampler};
use quantspec_core::stop::Stop;
use quantspec_cuda::device::Device;
use quantspec_cuda::{CudaBackend, plan};
use quantspec_model::backend::{Backend, DraftConfig, Hooks, KvCache, Memory, Network, Options, TokenSampler, Turn};
use quantspec_model::checkpoint::Checkpoint;
use quantspec_model::draft::{self, Copying, DraftModel, Drafter, Ngram, SelfQuantised};
use quantspec_model::engine::{Engine, Method};
use quantspec_model::forward;
use small::{checkpoints, drafting, options, prompt};
use std::sync::Arc;

/// Rows of a prompt, over all layers, between two rounds of earlier sequences: several blocks, and no whole layers.
const CHUNK_ROWS: usize = 700;

/// Decodes every prompt as one batch, `tokens[i]` tokens of the i-th; γ of each round cycles through `gammas`. Prompts are
/// prefilled in chunks, between which earlier sequences decode.
fn decode(
    engine: &mut Engine<CudaBackend>,
    method: Method,
    prompts: &[Vec<u32>],
    tokens: &[usize],
    samplers: &[Sampler],
    gammas: &[usize],
) -> Vec<Vec<u32>> {
    decode_by(engine, method, prompts, tokens, samplers, gammas, &vec![false; prompts.len()])
}

/// The same, some of them by a grammar.
fn decode_by(
    engine: &mut Engine<CudaBackend>,
    method: Method,
    prompts: &[Vec<u32>],
    tokens: &[usize],
    samplers: &[Sampler],
    gammas: &[usize],
    constrained: &[bool],
) -> Vec<Vec<u32>> {
    engine.set_method(method).unwrap();
    let slots: Vec<usize> = prompts
        .iter()
        .zip(samplers)
        .zip(tokens)
        .map(|((prompt, sampler), &tokens)| engine.add(prompt, sampler.clone(), tokens).unwrap())
        .collect();
    for (&slot, _) in slots.iter().zip(constrained).filter(|(_, constrained)| **constrained) {
        let vocab = engine.backend().config().vocab;
        engine.constrain(slot, grammar::Fifths::boxed(vocab)).unwrap();
    }
    let mut out: Vec<Vec<u32>> = Vec::new();
    let mut number = 0;
    let mut round = |engine: &mut Engine<CudaBackend>, out: &mut [Vec<u32>]| {
        let turns: Vec<(usize, usize)> = (0..out.len())
            .filter(|&index| out[index].len() < tokens[index])
            .map(|index| {
                let left = tokens[index] - out[index].len();
                (slots[index], gammas[(number + index) % gammas.len()].min(left - 1))
            })
            .collect();
        if turns.is_empty() {
            return false;
        }
        engine.draft(&turns).unwrap();
        for emitted in engine.verify().unwrap() {
            let index = slots.iter().position(|&slot| slot == emitted.slot).unwrap();
            out[index].extend(emitted.tokens);
        }
        number += 1;
        true
    };
    for &slot in &slots {
        let first = loop {
            match engine.prefill_chunk(slot, CHUNK_ROWS, &mut |_, _| {}).unwrap() {
                Some(first) => break first,
                None => _ = round(engine, &mut out),
            }
        };
        out.push(vec![first]);
    }
    while round(engine, &mut out) {}
    for slot in slots {
        engine.finish(slot);
    }
    out
}

fn method(target: View, draft: Option<DraftConfig>) -> Method {
    Method { target, drafter: draft.map(SelfQuantised::boxed), policy: Policy::fixed(4) }
}

/// Prompt lookup: its tokens come from the host.
fn lookup(target: View) -> Method {
    Method { target, drafter: Some(Box::<Ngram>::default()), policy: Policy::fixed(4) }
}

/// Copies earlier text if that has proved reliable, else drafts. So rounds mix copied and drafted windows.
fn copying(target: View, config: DraftConfig) -> Method {
    Method { target, drafter: Some(Copying::boxed(SelfQuantised::boxed(config))), policy: Policy::fixed(4) }
}

fn sampler(accept: Accept, seed: u64, sequence: u64) -> Sampler {
    match accept {
        Accept::Greedy => Sampler { sequence, ..Sampler::greedy() },
        _ => Sampler::new(0.8, 40, 0.95, 0.0, seed, sequence, accept).unwrap(),
    }
}

fn load(device: &Arc<Device>, checkpoint: &Checkpoint, options: &Options) -> CudaBackend {
    CudaBackend::load_on(device, checkpoint, options, Hooks::default()).unwrap()
}

#[test]
fn speculation_and_neighbours_change_no_token() {
    let Some(device) = device() else { return };
    for checkpoint in checkpoints(&device, 3200) {
        speculation(&device, &checkpoint, &options(3200, 3), &[View::Both, View::Full, View::Upper]);
    }
}

/// The same with weights in nibbles; drafts read the upper plane.
#[test]
fn speculation_with_weights_in_nibbles_changes_no_token() {
    let Some(device) = device() else { return };
    for checkpoint in in_nibbles(checkpoints(&device, 3200)) {
        for weights in [TargetWeights::Int8, TargetWeights::Int4] {
            let options = Options { weights, ..options(3200, 3) };
            speculation(&device, &checkpoint, &options, &[View::Both]);
        }
    }
}

/// The same with sensitive matrices, around which fused kernels and others alternate.
#[test]
fn speculation_with_sensitive_matrices_changes_no_token() {
    let Some(device) = device() else { return };
    for checkpoint in in_nibbles(checkpoints(&device, 3200)) {
        for (weights, names) in [(TargetWeights::Int8, "down"), (TargetWeights::Checkpoint, "o,down")] {
            let options = Options { weights, sensitive: Sensitive::named(names).unwrap(), ..options(3200, 3) };
            speculation(&device, &checkpoint, &options, &[View::Both]);
        }
    }
}

/// The checkpoints that a GPU can store in nibbles.
fn in_nibbles(checkpoints: Vec<Checkpoint>) -> impl Iterator<Item = Checkpoint> {
    checkpoints.into_iter().filter(|checkpoint| checkpoint.config().dtype != Dtype::F32)
}

fn speculation(device: &Arc<Device>, checkpoint: &Checkpoint, options: &Options, targets: &[View]) {
    let vocab = checkpoint.config().vocab;
    let mut engine = Engine::new(load(device, checkpoint, options), method(View::Both, None), 3, 3200, 256);
    let prompts: Vec<Vec<u32>> = [2330, 120, 1015].iter().map(|&n| prompt(vocab, n, n as u64)).collect();
    let tokens = [600; 3];
    // The model drafts for itself, on a separate backend.
    let model = DraftModel::new(load(device, checkpoint, options), View::Both, &[Pages::All], 3200, 256);
    let model = &model;
    // Every method of the list, with pages and γ in turn.
    let methods = |target: View| {
        let pages = [Pages::All, Pages::Best(4), Pages::Window(3)].into_iter().cycle();
        let gammas = [vec![1, 16, 0, 7, 3], vec![4], vec![4, 0, 9], vec![7]].into_iter().cycle();
        let listed = draft::METHODS.iter().zip(pages).zip(gammas).filter_map(move |((entry, pages), gammas)| {
            let takes_second = matches!(entry.source, draft::Source::Checkpoint | draft::Source::Several);
            let second = takes_second.then(|| Box::new(model.reading(target, &[pages])) as Box<dyn Drafter>);
            let drafter = entry.drafter(target, DraftWeights::Int4, &[pages], second);
            let method = Method { target, drafter: Some(drafter?), policy: Policy::fixed(4) };
            Some((format!("{} {pages:?}", entry.name), method, gammas))
        });
        let mut listed: Vec<_> = listed.collect();
        assert_eq!(listed.len(), draft::METHODS.len() - 1, "every method but plain decoding drafts");
        let snaps = [(2, 0, vec![4]), (3, 1, vec![5, 0, 2])].map(|(pages, refresh, gammas)| {
            let config = DraftConfig { pages: Pages::Snap { pages, refresh }, ..drafting("quantspec") };
            (format!("{config:?}"), method(target, Some(config)), gammas)
        });
        listed.extend(snaps);
        listed
    };
    for &target in targets {
        for accept in [Accept::Greedy, Accept::Replay] {
            let samplers: Vec<Sampler> = (0..3).map(|sequence| sampler(accept, 11, sequence)).collect();
            let mut plain = Vec::new();
            for index in 0..prompts.len() {
                let one = decode(
                    &mut engine,
                    method(target, None),
                    &prompts[index..=index],
                    &tokens[index..=index],
                    &samplers[index..=index],
                    &[0],
                );
                plain.extend(one);
            }
            for (draft, method, gammas) in methods(target) {
                let together = decode(&mut engine, method, &prompts, &tokens, &samplers, &gammas);
                for (index, (got, want)) in together.iter().zip(&plain).enumerate() {
                    let differs = got.iter().zip(want).position(|(a, b)| a != b);
                    assert_eq!(differs, None, "{target:?} {accept:?} {draft} gamma {gammas:?} prompt {index}");
                    assert_eq!(got.len(), want.len());
                }
            }
        }
    }
    let stats = engine.stats();
    eprintln!("acceptance over all drafts {:?}", stats.acceptance_rate());
}

/// Penalties of some sequences of a batch, over drafted tokens and over tokens of prompt lookup, which the host sets.
#[test]
fn penalties_depend_on_the_text_alone() {
    let Some(device) = device() else { return };
    for checkpoint in checkpoints(&device, 1600) {
        let vocab = checkpoint.config().vocab;
        let backend = load(&device, &checkpoint, &options(1600, 3));
        let mut engine = Engine::new(backend, method(View::Both, None), 3, 1600, 256);
        let prompts: Vec<Vec<u32>> = [1100, 120, 515].iter().map(|&n| prompt(vocab, n, n as u64)).collect();
        let tokens = [300; 3];
        for accept in [Accept::Greedy, Accept::Replay] {
            let of = |sequence, (repetition, frequency, presence, ngram)| {
                let penalties = Penalties::new(repetition, frequency, presence, ngram).unwrap();
                sampler(accept, 11, sequence).penalised(penalties)
            };
            let samplers = [of(0, (1.2, 0.0, 0.0, 0)), sampler(accept, 11, 1), of(2, (1.0, 0.2, 0.3, 3))];
            let alone = |engine: &mut Engine<CudaBackend>, index: usize, sampler: &Sampler| {
                let (prompt, sampler) = (&prompts[index..=index], std::slice::from_ref(sampler));
                decode(engine, method(View::Both, None), prompt, &tokens[..1], sampler, &[0]).remove(0)
            };
            let plain: Vec<Vec<u32>> = (0..3).map(|i| alone(&mut engine, i, &samplers[i])).collect();
            assert!(plain[2].windows(3).enumerate().all(|(at, gram)| plain[2][..at + 2].windows(3).all(|g| g != gram)));
            assert_ne!(plain[0], alone(&mut engine, 0, &sampler(accept, 11, 0)), "a penalty changed nothing");
            let itself = |plan: DraftConfig| method(View::Both, Some(plan));
            let drafts = [
                (itself(drafting("quantspec")), vec![4]),
                (itself(drafting("quantspec")), vec![1, 16, 0, 7, 3]),
                (itself(drafting("w4")), vec![7]),
                (lookup(View::Both), vec![1, 16, 0, 7, 3]),
            ];
            for (index, (method, gammas)) in drafts.into_iter().enumerate() {
                let together = decode(&mut engine, method, &prompts, &tokens, &samplers, &gammas);
                assert!(together == plain, "{accept:?}, draft {index}, gamma {gammas:?}");
            }
        }
    }
}

/// Two of three sequences of a batch follow a grammar, one of these with penalties: drafted tokens, those of prompt lookup, which the host sets, and those of
/// a second model.
#[test]
fn masks_depend_on_the_text_alone() {
    let Some(device) = device() else { return };
    for checkpoint in checkpoints(&device, 1600) {
        let vocab = checkpoint.config().vocab;
        let options = options(1600, 3);
        let mut engine = Engine::new(load(&device, &checkpoint, &options), method(View::Both, None), 3, 1600, 256);
        let second = DraftModel::new(load(&device, &checkpoint, &options), View::Both, &[Pages::All], 1600, 256);
        let prompts: Vec<Vec<u32>> = [1100, 120, 515].iter().map(|&n| prompt(vocab, n, n as u64)).collect();
        let (tokens, constrained) = ([200; 3], [true, false, true]);
        for accept in [Accept::Greedy, Accept::Replay] {
            let penalties = Penalties::new(1.1, 0.2, 0.0, 3).unwrap();
            let samplers =
                [sampler(accept, 11, 0), sampler(accept, 11, 1), sampler(accept, 11, 2).penalised(penalties)];
            let plain: Vec<Vec<u32>> = (0..3)
                .map(|i| {
                    let (prompt, sampler) = (&prompts[i..=i], &samplers[i..=i]);
                    let (method, constrained) = (method(View::Both, None), &constrained[i..=i]);
                    decode_by(&mut engine, method, prompt, &tokens[..1], sampler, &[0], constrained).remove(0)
                })
                .collect();
            for (text, constrained) in plain.iter().zip(constrained) {
                assert_eq!(grammar::allows(text), constrained);
            }
            let itself = |plan: DraftConfig| method(View::Both, Some(plan));
            let reading = Box::new(second.reading(View::Both, &[Pages::All]));
            let drafts = [
                (itself(drafting("quantspec")), vec![4]),
                (itself(drafting("quantspec")), vec![1, 16, 0, 7, 3]),
                (itself(drafting("w4")), vec![7]),
                (lookup(View::Both), vec![1, 16, 0, 7, 3]),
                (copying(View::Both, drafting("quantspec")), vec![4, 0, 9]),
                (Method { target: View::Both, drafter: Some(reading), policy: Policy::fixed(4) }, vec![5, 2]),
            ];
            for (index, (method, gammas)) in drafts.into_iter().enumerate() {
                let together = decode_by(&mut engine, method, &prompts, &tokens, &samplers, &gammas, &constrained);
                assert!(together == plain, "{accept:?}, draft {index}, gamma {gammas:?}");
            }
        }
    }
}

/// A text with its log-probabilities. An automatic policy reads the margin of every drafted token.
fn decode_logprobs(
    engine: &mut Engine<CudaBackend>,
    method: Method,
    prompt: &[u32],
    sampler: &Sampler,
    new: usize,
) -> (Vec<u32>, Vec<Logprob>) {
    engine.set_method(method).unwrap();
    let slot = engine.add(prompt, sampler.clone(), new).unwrap();
    engine.want_logprobs(slot, 4).unwrap();
    let mut text = vec![engine.prefill(slot, &mut |_, _| {}).unwrap()];
    while text.len() < new {
        let gamma = engine.choose_gamma(slot);
        engine.draft(&[(slot, gamma)]).unwrap();
        text.extend(engine.verify().unwrap().remove(0).tokens);
    }
    let logprobs = engine.take_logprobs(slot).unwrap();
    engine.finish(slot);
    (text, logprobs)
}

#[test]
fn logprobs_do_not_depend_on_how_tokens_were_drafted() {
    let Some(device) = device() else { return };
    for checkpoint in checkpoints(&device, 800) {
        let prompt = prompt(checkpoint.config().vocab, 500, 3);
        let backend = load(&device, &checkpoint, &options(800, 1));
        let mut engine = Engine::new(backend, method(View::Both, None), 1, 800, 256);
        let penalties = Penalties::new(1.2, 0.1, 0.0, 4).unwrap();
        let penalised = [Accept::Greedy, Accept::Replay].map(|accept| sampler(accept, 5, 0).penalised(penalties));
        for sampler in [sampler(Accept::Greedy, 0, 0), penalised[0].clone(), penalised[1].clone()] {
            let plain = decode_logprobs(&mut engine, method(View::Both, None), &prompt, &sampler, 200);
            assert_eq!(plain.0.len(), plain.1.len());
            if sampler.penalties.is_none() {
                assert!(plain.0.iter().zip(&plain.1).all(|(token, of)| of.top[0] == (*token, of.logprob)));
            }
            let auto = Method { policy: Policy::auto(12), ..method(View::Both, Some(drafting("quantspec"))) };
            for method in [method(View::Both, Some(drafting("quantspec"))), auto, lookup(View::Both)] {
                assert!(decode_logprobs(&mut engine, method, &prompt, &sampler, 200) == plain, "{sampler:?}");
            }
        }
    }
}

/// A full-precision cache has no quantised keys to choose pages by: a draft with the best pages reads the newest ones.
#[test]
fn without_quantised_keys_drafts_read_the_window() {
    let Some(device) = device() else { return };
    for checkpoint in checkpoints(&device, 2000) {
        let planes = Planes { upper: false, lower: false, full: true };
        let options = Options { planes, ..options(2000, 1) };
        let mut engine = Engine::new(load(&device, &checkpoint, &options), method(View::Full, None), 1, 2000, 256);
        let prompts = [prompt(checkpoint.config().vocab, 1500, 9)];
        let samplers = [sampler(Accept::Replay, 3, 0)];
        let mut decode = |draft: Option<DraftConfig>| {
            let gamma = if draft.is_some() { 4 } else { 0 };
            decode(&mut engine, method(View::Full, draft), &prompts, &[200], &samplers, &[gamma])
        };
        let plain = decode(None);
        for pages in [Pages::Best(3), Pages::Window(3)] {
            assert_eq!(
                decode(Some(DraftConfig { weights: Weights::Draft, view: View::Full, pages })),
                plain,
                "{pages:?}"
            );
        }
    }
}

/// In an engine with one slot, long prompts store their hidden states in the memory of the draft weights. Draft weights made
/// anew draft the same tokens, with the same acceptance.
#[test]
fn drafts_are_the_same_after_a_prompt_has_used_their_memory() {
    let Some(device) = device() else { return };
    for checkpoint in checkpoints(&device, 1000) {
        let options = options(1000, 1);
        let vocab = checkpoint.config().vocab;
        let prompts: Vec<Vec<u32>> = [700, 90].iter().map(|&n| prompt(vocab, n, n as u64)).collect();
        let samplers: Vec<Sampler> = (0..2).map(|sequence| sampler(Accept::Replay, 5, sequence)).collect();
        let runs = [usize::MAX, 128].map(|most| {
            let backend = CudaBackend::load_lending(&device, &checkpoint, &options, Hooks::default(), most).unwrap();
            let held = backend.memory().workspace_bytes;
            let mut engine = Engine::new(backend, method(View::Both, Some(drafting("quantspec"))), 1, 1000, 256);
            // The long prompt precedes drafts, then follows some.
            let mut texts = Vec::new();
            for i in [0, 1, 0] {
                let (prompt, sampler) = (prompts[i].clone(), samplers[i].clone());
                let drafting = method(View::Both, Some(drafting("quantspec")));
                texts.push(decode(&mut engine, drafting, &[prompt], &[150], &[sampler], &[5]));
            }
            (texts, engine.stats().acceptance_rate(), held)
        });
        assert!(runs[0].2 > runs[1].2, "nothing was borrowed");
        assert!(runs[0].0 == runs[1].0, "other tokens");
        assert_eq!(runs[0].1, runs[1].1);
    }
}

/// A draft that ends early has the same tokens, up to its end, as one that does not.
#[test]
fn drafts_end_where_their_tokens_are_in_doubt() {
    let Some(device) = device() else { return };
    for checkpoint in checkpoints(&device, 1000) {
        let mut backend = load(&device, &checkpoint, &options(1000, 1));
        let vocab = checkpoint.config().vocab;
        let (mut ended, mut tried) = (0, 0);
        for (index, accept) in [Accept::Greedy, Accept::Replay, Accept::Replay, Accept::Replay].into_iter().enumerate()
        {
            let committed = 300 + 170 * index;
            let sampler = sampler(accept, 3, index as u64);
            backend.open(0, committed + 40).unwrap();
            forward::prefill(&mut backend, 0, &prompt(vocab, committed, index as u64), 256, &mut |_, _| {}).unwrap();
            let first = backend.first(&Turn::new(0, committed, 0, sampler.clone())).unwrap();
            backend.set_window(0, &[first]).unwrap();
            let turn = |stop| Turn { stop, ..Turn::new(0, committed, 12, sampler.clone()) };
            let never = [turn(None)];
            for offset in 0..12 {
                // By steps that are not watched.
                let step = forward::Round::of_draft(&drafting("quantspec"), &never, offset).unwrap();
                forward::run_steps(&mut backend, &step).unwrap();
            }
            let want = backend.window(0, 13).unwrap();
            for enough in [0.999, 0.7, 1e-9] {
                let stop = Stop { min_acceptance: enough, margin_scale: 0.45 };
                let mut turns = [turn(Some(stop))];
                backend.set_window(0, &[first]).unwrap();
                forward::draft(&mut backend, &drafting("quantspec"), &mut turns).unwrap();
                let [turn] = turns;
                assert_eq!(turn.margins.len(), turn.gamma);
                assert!(turn.margins.iter().all(|&margin| margin >= 0.0), "{:?}", turn.margins);
                assert!(backend.window(0, turn.gamma + 1).unwrap() == want[..=turn.gamma], "{accept:?} {enough}");
                let chance =
                    |n: usize| -> f64 { turn.margins[..n].iter().map(|&margin| stop.acceptance(margin)).product() };
                assert!(turn.gamma == 12 || chance(turn.gamma) < enough);
                assert!(chance(turn.gamma - 1) >= enough);
                (ended, tried) = (ended + usize::from(turn.gamma < 12), tried + 1);
            }
            backend.close(0);
        }
        assert!(ended > 0 && ended < tried, "{ended} of {tried} drafts ended early");
    }
}

/// Decodes `new` tokens in rounds whose drafts, of up to 12 tokens, end by `stop`; plainly without one. Also returns the
/// number of drafts that ended early.
fn rounds<B: Backend>(
    backend: &mut B,
    prompt: &[u32],
    sampler: &Sampler,
    pages: Pages,
    stop: Option<Stop>,
    new: usize,
) -> (Vec<u32>, usize) {
    backend.open(0, prompt.len() + new + 16).unwrap();
    forward::prefill(backend, 0, prompt, 256, &mut |_, _| {}).unwrap();
    let mut text = vec![backend.first(&Turn::new(0, prompt.len(), 0, sampler.clone())).unwrap()];
    backend.set_window(0, &text).unwrap();
    let (mut extent, mut ended) = (Extent::default(), 0);
    extent.commit(prompt.len());
    while text.len() < new {
        let gamma = if stop.is_some() { 12 } else { 0 };
        let committed = extent.committed();
        let mut turns = [Turn { stop, ..Turn::new(0, committed, gamma, sampler.clone()) }];
        if gamma > 0 {
            forward::draft(backend, &DraftConfig { pages, ..drafting("quantspec") }, &mut turns).unwrap();
            ended += usize::from(turns[0].gamma < gamma);
        }
        let verdict = forward::verify(backend, View::Both, &turns).unwrap().remove(0);
        text.extend(&backend.window(0, verdict.accepted + 1).unwrap()[1..]);
        text.push(verdict.token);
        for page in extent.commit(verdict.accepted + 1) {
            backend.flush(0, page).unwrap();
        }
        backend.set_window(0, &[verdict.token]).unwrap();
    }
    backend.close(0);
    text.truncate(new);
    (text, ended)
}

/// Rounds whose drafts end early give the tokens of plain decoding, across page borders and where page lists first appear.
#[test]
fn rounds_of_drafts_that_end_early_change_no_token() {
    let Some(device) = device() else { return };
    for checkpoint in checkpoints(&device, 1200) {
        let mut backend = load(&device, &checkpoint, &options(1200, 1));
        let vocab = checkpoint.config().vocab;
        for (accept, length) in [(Accept::Greedy, 330), (Accept::Replay, 500)] {
            let (prompt, sampler) = (prompt(vocab, length, 9), sampler(accept, 17, 0));
            let (want, _) = rounds(&mut backend, &prompt, &sampler, Pages::All, None, 400);
            for pages in [Pages::All, Pages::Best(3), Pages::Window(4), Pages::Snap { pages: 2, refresh: 1 }] {
                let stop = Some(Stop { min_acceptance: 0.9, margin_scale: 1.0 });
                let (got, ended) = rounds(&mut backend, &prompt, &sampler, pages, stop, 400);
                assert!(got == want, "{accept:?} {pages:?}");
                // A greedy text repeats itself, so few of its margins are small.
                assert!(accept == Accept::Greedy || ended > 0, "{pages:?}: no draft ended early");
            }
        }
    }
}

/// The automatic policy, with drafts that end early, on one sequence.
#[test]
fn automatic_drafts_change_no_token() {
    let Some(device) = device() else { return };
    for checkpoint in checkpoints(&device, 1700) {
        let vocab = checkpoint.config().vocab;
        let mut engine =
            Engine::new(load(&device, &checkpoint, &options(1700, 1)), method(View::Both, None), 1, 1700, 256);
        for accept in [Accept::Greedy, Accept::Replay] {
            let (prompts, samplers) = ([prompt(vocab, 700, 5)], [sampler(accept, 21, 0)]);
            let plain = decode(&mut engine, method(View::Both, None), &prompts, &[900], &samplers, &[0]);
            for pages in [Pages::All, Pages::Best(3), Pages::Snap { pages: 3, refresh: 2 }] {
                let draft = Some(DraftConfig { pages, ..drafting("quantspec") });
                engine
                    .set_method(Method {
                        target: View::Both,
                        drafter: draft.map(SelfQuantised::boxed),
                        policy: Policy::auto(8),
                    })
                    .unwrap();
                engine.reset_stats();
                let slot = engine.add(&prompts[0], samplers[0].clone(), 900).unwrap();
                let mut text = vec![engine.prefill(slot, &mut |_, _| {}).unwrap()];
                while text.len() < 900 {
                    let gamma = engine.choose_gamma(slot);
                    engine.draft(&[(slot, gamma)]).unwrap();
                    text.extend(engine.verify().unwrap().remove(0).tokens);
                }
                engine.finish(slot);
                assert!(text == plain[0], "{accept:?} {pages:?}");
                // Every draft of one sequence under this policy is watched.
                assert!(engine.stats().drafted_tokens() > 0, "nothing was drafted");
                // A wrong draft is rejected and changes no token, so only acceptance detects it.
                let accepted = engine.stats().acceptance_rate().unwrap();
                assert!(accepted > 0.5, "{accept:?} {pages:?}: of drafted tokens {accepted} stand");
            }
        }
    }
}

/// Ragged batches: prompts of one token to eleven pages, some ending at page borders, answers of different lengths, γ from 0
/// to 16 mixed.
#[test]
fn batches_of_any_size_change_no_token() {
    let Some(device) = device() else { return };
    for checkpoint in checkpoints(&device, 1700) {
        batches(&device, &checkpoint);
    }
}

fn batches(device: &Arc<Device>, checkpoint: &Checkpoint) {
    const SLOTS: usize = 32;
    let options = options(1700, SLOTS);
    let vocab = checkpoint.config().vocab;
    let mut engine = Engine::new(load(device, checkpoint, &options), method(View::Both, None), SLOTS, 1700, 256);
    let lengths = |i: usize| [1, 127, 128, 129, 255, 256, 257, 640][i % 8] + [0, 256, 512, 768][i / 8];
    let prompts: Vec<Vec<u32>> = (0..SLOTS).map(|i| prompt(vocab, lengths(i), i as u64)).collect();
    let tokens: Vec<usize> = (0..SLOTS).map(|i| 90 + 37 * (i % 5)).collect();
    let gammas: Vec<usize> = (0..=16).rev().collect();
    let mut compared = 0;
    for accept in [Accept::Greedy, Accept::Replay] {
        let samplers: Vec<Sampler> = (0..SLOTS).map(|i| sampler(accept, 3, i as u64)).collect();
        let mut alone = Vec::new();
        for i in 0..SLOTS {
            let of = i..=i;
            let (prompts, tokens, samplers) = (&prompts[of.clone()], &tokens[of.clone()], &samplers[of]);
            alone.extend(decode(&mut engine, method(View::Both, None), prompts, tokens, samplers, &[0]));
        }
        for batch in [1, 3, 8, SLOTS] {
            for draft in [
                drafting("quantspec"),
                DraftConfig { pages: Pages::Best(3), ..drafting("quantspec") },
                drafting("kv4"),
                drafting("w4"),
            ] {
                let method = method(View::Both, Some(draft));
                // Small batches use other prompts.
                let of = SLOTS - batch..SLOTS;
                let (prompts, samplers) = (&prompts[of.clone()], &samplers[of.clone()]);
                let together = decode(&mut engine, method, prompts, &tokens[of.clone()], samplers, &gammas);
                for (index, (got, want)) in together.iter().zip(&alone[of.clone()]).enumerate() {
                    let differs = got.iter().zip(want).position(|(a, b)| a != b);
                    assert_eq!((differs, got.len()), (None, want.len()), "{accept:?} {draft:?} batch {batch}: {index}");
                    compared += got.len();
                }
            }
        }
    }
    eprintln!("{compared} tokens equal");
}

/// Batches of 17 and more sequences draft with other GEMMs, and have the acceptance of smaller ones.
#[test]
fn large_batches_draft_what_small_ones_draft() {
    let Some(device) = device() else { return };
    for checkpoint in checkpoints(&device, 500) {
        let vocab = checkpoint.config().vocab;
        let speculating = || method(View::Both, Some(drafting("quantspec")));
        let rates = [12, 24].map(|slots| {
            let mut engine =
                Engine::new(load(&device, &checkpoint, &options(500, slots)), speculating(), slots, 500, 256);
            // The larger batch has every sequence of the smaller one twice.
            let prompts: Vec<Vec<u32>> = (0..slots).map(|i| prompt(vocab, 200 + i % 12, (i % 12) as u64)).collect();
            let samplers: Vec<Sampler> = (0..slots).map(|i| sampler(Accept::Replay, 3, (i % 12) as u64)).collect();
            decode(&mut engine, speculating(), &prompts, &vec![100; slots], &samplers, &[4]);
            engine.stats().acceptance_rate().unwrap()
        });
        // Sequences join at other rounds, and a draft step rounds by its rows.
        assert!((rates[0] - rates[1]).abs() < 0.02, "{rates:?}");
    }
}

#[test]
fn ten_thousand_tokens_are_those_of_plain_decoding() {
    let Some(device) = device() else { return };
    for checkpoint in checkpoints(&device, 10_400) {
        long_text(&device, &checkpoint);
    }
}

fn long_text(device: &Arc<Device>, checkpoint: &Checkpoint) {
    let tokens = [10_000];
    let options = options(10_400, 1);
    let vocab = checkpoint.config().vocab;
    let mut engine = Engine::new(load(device, checkpoint, &options), method(View::Both, None), 1, 10_400, 256);
    let prompts = [prompt(vocab, 300, 1)];
    for accept in [Accept::Greedy, Accept::Replay] {
        let samplers = [sampler(accept, 8, 0)];
        let plain = decode(&mut engine, method(View::Both, None), &prompts, &tokens, &samplers, &[0]);
        for draft in [drafting("quantspec"), drafting("kv4"), drafting("w4")] {
            let drafting = method(View::Both, Some(draft));
            let drafted = decode(&mut engine, drafting, &prompts, &tokens, &samplers, &[4, 6, 16, 1]);
            assert_eq!(plain[0].iter().zip(&drafted[0]).position(|(a, b)| a != b), None, "{accept:?} {draft:?}");
            assert_eq!((plain[0].len(), drafted[0].len()), (10_000, 10_000));
        }
    }
}

#[test]
fn rejection_is_reproducible() {
    let Some(device) = device() else { return };
    for checkpoint in checkpoints(&device, 900) {
        rejection(&device, &checkpoint);
    }
}

fn rejection(device: &Arc<Device>, checkpoint: &Checkpoint) {
    let options = options(900, 2);
    let vocab = checkpoint.config().vocab;
    let mut engine =
        Engine::new(load(device, checkpoint, &options), method(View::Both, Some(drafting("quantspec"))), 2, 900, 256);
    let prompts: Vec<Vec<u32>> = [500, 333].iter().map(|&n| prompt(vocab, n, n as u64)).collect();
    let samplers: Vec<Sampler> = (0..2).map(|sequence| sampler(Accept::Rejection, 5, sequence)).collect();
    for method in [|| method(View::Both, Some(drafting("quantspec"))), || lookup(View::Both)] {
        let mut run = || decode(&mut engine, method(), &prompts, &[200; 2], &samplers, &[4]);
        assert_eq!(run(), run());
    }
    // The model drafts for itself on a separate backend: p and q differ by rounding only, unless q belongs to another token.
    let second = DraftModel::new(load(device, checkpoint, &options), View::Both, &[Pages::All], 900, 256);
    let second =
        || Method { drafter: Some(Box::new(second.reading(View::Both, &[Pages::All]))), ..method(View::Both, None) };
    engine.reset_stats();
    let mut run = || decode(&mut engine, second(), &prompts, &[200; 2], &samplers, &[4]);
    assert_eq!(run(), run());
    let rate = engine.stats().acceptance_rate().unwrap();
    assert!(rate > 0.95, "{rate} of what a model drafts for itself");
    // Prompt lookup keeps no distributions.
    let options = Options { rejection: false, ..options };
    let mut without = Engine::new(load(device, checkpoint, &options), method(View::Both, None), 2, 900, 256);
    let run = |engine| decode(engine, lookup(View::Both), &prompts, &[200; 2], &samplers, &[4]);
    assert_eq!(run(&mut without), run(&mut engine));
}

#[test]
fn known_tokens_are_verified_as_they_are() {
    let Some(device) = device() else { return };
    for checkpoint in checkpoints(&device, 900) {
        let mut backend = load(&device, &checkpoint, &options(900, 1));
        let prompt = prompt(checkpoint.config().vocab, 300, 4);
        backend.open(0, 900).unwrap();
        forward::prefill(&mut backend, 0, &prompt, 256, &mut |_, _| {}).unwrap();
        let first = backend.first(&Turn::new(0, 300, 0, Sampler::greedy())).unwrap();
        backend.set_window(0, &[first]).unwrap();
        let turn = Turn::new(0, 300, 2, Sampler::greedy());
        // A round that ends before its verification, which its draft was deferred to.
        let mut left = [turn.clone()];
        forward::draft(&mut backend, &drafting("quantspec"), &mut left).unwrap();
        assert_eq!(left[0].to_draft, Some(drafting("quantspec")));
        let known = [first, 5, 6];
        backend.set_window(0, &known).unwrap();
        forward::verify(&mut backend, View::Both, &[turn]).unwrap();
        assert_eq!(backend.window(0, 3).unwrap(), known);
    }
}

#[test]
fn memory_is_what_the_plan_says() {
    let Some(device) = device() else { return };
    for checkpoint in checkpoints(&device, 4000) {
        memory(&device, &checkpoint);
    }
}

fn memory(device: &Arc<Device>, checkpoint: &Checkpoint) {
    let nibbles = checkpoint.config().dtype != Dtype::F32;
    let kinds = [
        (1, TargetWeights::Checkpoint),
        (3, TargetWeights::Checkpoint),
        (1, TargetWeights::Int8),
        (1, TargetWeights::Int4),
    ];
    for (slots, weights) in kinds.into_iter().filter(|&(_, weights)| nibbles || weights == TargetWeights::Checkpoint) {
        let options = Options { weights, ..options(4000, slots) };
        let planned = plan(checkpoint, &options, &device.info);
        let held = load(device, checkpoint, &options).memory();
        let sum = |m: &Memory| {
            (m.weights_bytes
                + m.draft_weights_bytes
                + m.cache_upper_bytes
                + m.cache_lower_bytes
                + m.cache_full_bytes
                + m.buffer_bytes
                + m.workspace_bytes) as f64
        };
        assert_eq!(planned.weights_bytes, held.weights_bytes);
        let ratio = sum(&planned) / sum(&held);
        assert!((0.97..=1.03).contains(&ratio), "planned {planned:?}, held {held:?}");
    }
}
