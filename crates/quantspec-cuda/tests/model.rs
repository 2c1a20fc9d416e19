//! A whole model on the GPU: speculation changes no token, neighbours change no token, and logits are those of the reference backend.
//!
//! The model is the demo model of the repository; `QUANTSPEC_TEST_MODEL` names another directory.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]
#![allow(clippy::print_stderr, reason = "a skipped test must say so")]

mod gpu;

use gpu::{Random, device};
use quantspec_core::config::{DraftWeights, Pages, Planes, Rounding, View, Weights};
use quantspec_core::policy::Policy;
use quantspec_core::sample::{Accept, Sampler};
use quantspec_cuda::device::Device;
use quantspec_cuda::{CudaBackend, plan};
use quantspec_model::backend::{Backend, DraftPlan, Hooks, Options, Pass, Row, Step};
use quantspec_model::checkpoint::Checkpoint;
use quantspec_model::engine::{Engine, Method};
use quantspec_model::forward;
use quantspec_model::reference::ReferenceBackend;
use std::path::PathBuf;
use std::sync::Arc;

fn checkpoint() -> Option<Checkpoint> {
    let named = std::env::var_os("QUANTSPEC_TEST_MODEL").map(PathBuf::from);
    let beside = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
    let found = named.into_iter().chain([beside, PathBuf::from("models/demo")]).find(|dir| dir.is_dir());
    match found {
        Some(dir) => Some(Checkpoint::open(&dir).unwrap()),
        None => {
            eprintln!("SKIPPED, no model");
            None
        }
    }
}

fn options(checkpoint: &Checkpoint, capacity: usize, slots: usize) -> Options {
    let _ = checkpoint;
    Options {
        slots,
        capacity,
        planes: Planes { upper: true, lower: true, full: true },
        rounding: Rounding::Balanced,
        draft_weights: DraftWeights::Int4,
        step_rows: slots * 17,
        block_rows: 256,
        threads: 1,
    }
}

/// Tokens that a small model continues: common ids, in runs, so that a prompt is not noise throughout.
fn prompt(vocab: usize, tokens: usize, seed: u64) -> Vec<u32> {
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

const QUANTSPEC: DraftPlan = DraftPlan { weights: Weights::Draft, view: View::Upper, pages: Pages::All };

/// Decodes every prompt as one batch; γ of each round cycles through `gammas`.
fn decode(
    engine: &mut Engine<CudaBackend>,
    method: Method,
    prompts: &[Vec<u32>],
    tokens: usize,
    samplers: &[Sampler],
    gammas: &[usize],
) -> Vec<Vec<u32>> {
    engine.set_method(method);
    let slots: Vec<usize> = prompts
        .iter()
        .zip(samplers)
        .map(|(prompt, sampler)| engine.add(prompt, sampler.clone(), tokens).unwrap())
        .collect();
    let mut out: Vec<Vec<u32>> =
        slots.iter().map(|&slot| vec![engine.prefill(slot, &mut |_, _| {}).unwrap()]).collect();
    let mut round = 0;
    while out.iter().any(|text| text.len() < tokens) {
        let mut turns = Vec::new();
        for (index, &slot) in slots.iter().enumerate() {
            let left = tokens - out[index].len();
            if left > 0 {
                turns.push((slot, gammas[(round + index) % gammas.len()].min(left - 1)));
            }
        }
        engine.draft(&turns).unwrap();
        for emitted in engine.verify().unwrap() {
            let index = slots.iter().position(|&slot| slot == emitted.slot).unwrap();
            out[index].extend(emitted.tokens);
        }
        round += 1;
    }
    for slot in slots {
        engine.finish(slot);
    }
    out
}

fn method(target: View, draft: Option<DraftPlan>) -> Method {
    Method { target, draft, policy: Policy::fixed(4) }
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
    let (Some(device), Some(checkpoint)) = (device(), checkpoint()) else { return };
    let options = options(&checkpoint, 3200, 3);
    let vocab = checkpoint.config().vocab;
    let mut engine = Engine::new(load(&device, &checkpoint, &options), method(View::Both, None), 3, 3200, 256);
    let prompts: Vec<Vec<u32>> = [2330, 120, 1015].iter().map(|&n| prompt(vocab, n, n as u64)).collect();
    let tokens = 600;
    for target in [View::Both, View::Full, View::Upper] {
        for accept in [Accept::Greedy, Accept::Replay] {
            let samplers: Vec<Sampler> = (0..3).map(|sequence| sampler(accept, 11, sequence)).collect();
            let mut plain = Vec::new();
            for index in 0..prompts.len() {
                let one = decode(
                    &mut engine,
                    method(target, None),
                    &prompts[index..=index],
                    tokens,
                    &samplers[index..=index],
                    &[0],
                );
                plain.extend(one);
            }
            let drafts = [
                (QUANTSPEC, vec![4]),
                (QUANTSPEC, vec![1, 16, 0, 7, 3]),
                (DraftPlan { weights: Weights::Full, ..QUANTSPEC }, vec![6]),
                (DraftPlan { pages: Pages::Best(4), ..QUANTSPEC }, vec![5]),
                (DraftPlan { pages: Pages::Window(3), view: target, weights: Weights::Draft }, vec![5]),
            ];
            for (draft, gammas) in drafts {
                let together = decode(&mut engine, method(target, Some(draft)), &prompts, tokens, &samplers, &gammas);
                for (index, (got, want)) in together.iter().zip(&plain).enumerate() {
                    let differs = got.iter().zip(want).position(|(a, b)| a != b);
                    assert_eq!(differs, None, "{target:?} {accept:?} {draft:?} gamma {gammas:?} prompt {index}");
                    assert_eq!(got.len(), want.len());
                }
            }
        }
    }
    let stats = engine.stats();
    eprintln!("acceptance over all drafts {:?}", stats.acceptance_rate());
}

#[test]
fn rejection_is_reproducible() {
    let (Some(device), Some(checkpoint)) = (device(), checkpoint()) else { return };
    let options = options(&checkpoint, 900, 2);
    let vocab = checkpoint.config().vocab;
    let mut engine =
        Engine::new(load(&device, &checkpoint, &options), method(View::Both, Some(QUANTSPEC)), 2, 900, 256);
    let prompts: Vec<Vec<u32>> = [500, 333].iter().map(|&n| prompt(vocab, n, n as u64)).collect();
    let samplers: Vec<Sampler> = (0..2).map(|sequence| sampler(Accept::Rejection, 5, sequence)).collect();
    let mut run = || decode(&mut engine, method(View::Both, Some(QUANTSPEC)), &prompts, 200, &samplers, &[4]);
    assert_eq!(run(), run());
}

/// Largest difference of two rows of logits against the spread of the second.
fn apart(a: &[f32], b: &[f32]) -> f64 {
    let mean = b.iter().map(|&x| f64::from(x)).sum::<f64>() / b.len() as f64;
    let spread = (b.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / b.len() as f64).sqrt();
    a.iter().zip(b).map(|(&x, &y)| (f64::from(x) - f64::from(y)).abs()).fold(0.0, f64::max) / spread
}

#[test]
fn logits_are_those_of_the_reference() {
    let (Some(device), Some(checkpoint)) = (device(), checkpoint()) else { return };
    let options = options(&checkpoint, 700, 1);
    let vocab = checkpoint.config().vocab;
    let tokens = prompt(vocab, 640, 1);
    let mut gpu = load(&device, &checkpoint, &options);
    let mut reference = ReferenceBackend::load(&checkpoint, &options, Hooks::default()).unwrap();
    let window = [tokens[7], tokens[90], tokens[3], tokens[4], tokens[5]];
    let rows: Vec<Row> = (0..window.len()).map(|i| Row { slot: 0, offset: i, position: tokens.len() + i }).collect();
    fn prepare<B: Backend>(backend: &mut B, tokens: &[u32], window: &[u32]) -> Vec<f32> {
        backend.open(0, 700).unwrap();
        forward::prefill(backend, 0, tokens, 256, &mut |_, _| {}).unwrap();
        let logits = backend.logits(0).unwrap();
        backend.set_window(0, window).unwrap();
        logits
    }
    let first = (prepare(&mut gpu, &tokens, &window), prepare(&mut reference, &tokens, &window));
    let error = apart(&first.0, &first.1);
    eprintln!("prefill: {error:.4} of the logits' spread");
    // bfloat16 inputs of every product against f32 throughout.
    assert!(error < 0.15, "prefill {error}");
    for (weights, view, bound) in [
        (Weights::Full, View::Both, 0.15),
        (Weights::Full, View::Full, 0.15),
        (Weights::Full, View::Upper, 0.15),
        (Weights::Draft, View::Upper, 0.3),
    ] {
        let step = Step { weights, view, pages: Pages::All, choose_pages: false, rows: &rows };
        forward::step(&mut gpu, &step).unwrap();
        forward::step(&mut reference, &step).unwrap();
        for row in 0..rows.len() {
            let error = apart(&gpu.logits(row).unwrap(), &reference.logits(row).unwrap());
            eprintln!("{weights:?} {view:?} row {row}: {error:.4}");
            assert!(error < bound, "{weights:?} {view:?} row {row}: {error}");
        }
        let pass = Pass::Step(&step);
        let _ = pass;
    }
}

#[test]
fn memory_is_what_the_plan_says() {
    let (Some(device), Some(checkpoint)) = (device(), checkpoint()) else { return };
    for slots in [1, 3] {
        let options = options(&checkpoint, 4000, slots);
        let planned = plan(checkpoint.config(), &options);
        let held = load(&device, &checkpoint, &options).memory();
        let sum = |m: &quantspec_model::backend::Memory| {
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
