//! A whole model on the GPU: speculation and neighbours change no token, and memory is as planned.
//!
//! The models are the demo model of the repository and those in the directory `QUANTSPEC_TEST_MODELS`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]
#![allow(clippy::print_stderr, reason = "acceptance is worth seeing")]

#[path = "../../quantspec-model/tests/support/exactness.rs"]
mod exactness;
mod gpu;
#[path = "../../quantspec-cpu/tests/support/random.rs"]
#[allow(dead_code, reason = "shared with tests that use more of it")]
mod random;
#[path = "gpu/model.rs"]
mod small;

use exactness::{Answer, Case, Decode, Request, grammar, law};
use gpu::device;
use quantspec_core::cache::Extent;
use quantspec_core::config::{Dtype, Pages, Planes, Sensitive, TargetWeights, View};
use quantspec_core::penalty::Penalties;
use quantspec_core::policy::Policy;
use quantspec_core::sample::{Accept, Sampler};
use quantspec_core::stop::Stop;
use quantspec_cuda::device::Device;
use quantspec_cuda::{CudaBackend, Limits, plan, plan_with};
use quantspec_model::backend::{Backend, DraftConfig, Hooks, KvCache, Options, TokenSampler, Turn};
use quantspec_model::checkpoint::Checkpoint;
use quantspec_model::draft::{DraftModel, Drafter};
use quantspec_model::engine::{Engine, Method};
use quantspec_model::forward;
use small::{checkpoints, drafting, options, prompt};
use std::sync::Arc;

/// Rows of a prompt, over all layers, between two rounds of earlier sequences: several blocks, and no whole layers.
const CHUNK_ROWS: usize = 700;

/// A checkpoint on the GPU. One engine decodes every case, and is its own draft model, in another backend.
struct Model<'a> {
    device: &'a Arc<Device>,
    checkpoint: &'a Checkpoint,
    options: Options,
    engine: Engine<CudaBackend>,
    draft_model: Option<DraftModel<CudaBackend>>,
}

impl<'a> Model<'a> {
    fn load(device: &'a Arc<Device>, checkpoint: &'a Checkpoint, options: &Options) -> Model<'a> {
        Model::on(load(device, checkpoint, options), device, checkpoint, options)
    }

    fn on(backend: CudaBackend, device: &'a Arc<Device>, checkpoint: &'a Checkpoint, options: &Options) -> Model<'a> {
        let plain = Method { target: View::Both, drafter: None, policy: Policy::fixed(0) };
        let engine = Engine::new(backend, plain, options.slots, options.capacity, options.block_rows);
        Model { device, checkpoint, options: options.clone(), engine, draft_model: None }
    }

    /// Requests of `new_tokens` tokens after prompts of these lengths, each with its sampler.
    fn requests(&self, lengths: &[usize], samplers: &[Sampler], new_tokens: usize) -> Vec<Request> {
        let vocab = self.checkpoint.config().vocab;
        let of = |(&length, sampler): (&usize, &Sampler)| {
            Request::new(&prompt(vocab, length, length as u64), sampler, new_tokens)
        };
        lengths.iter().zip(samplers).map(of).collect()
    }
}

impl Decode for Model<'_> {
    fn decode(&mut self, case: &Case, requests: &[Request]) -> Vec<Answer> {
        let Model { device, checkpoint, options, engine, draft_model } = self;
        let drafter = |view, pages: &[Pages]| -> Box<dyn Drafter> {
            // One network serves every case, so it keeps the planes of all views.
            let planes = Planes { upper: true, lower: true, full: true };
            let options = Options { planes, ..options.clone() };
            let made = || DraftModel::new(load(device, checkpoint, &options), view, pages, options.capacity, 256);
            Box::new(draft_model.get_or_insert_with(made).reading(case.draft_model_view.unwrap_or(view), pages))
        };
        engine.set_method(case.method(drafter)).unwrap();
        exactness::decode(engine, case, requests)
    }
}

/// The cases of every suite in batches of three, whose matrices are those that the engine was loaded with.
fn cases(target: View) -> Vec<Case> {
    let fits = |case: &Case| case.batch == 3 && case.sensitive == Sensitive::NONE;
    let of = |case| Case { target, chunk_rows: CHUNK_ROWS, ..case };
    exactness::cases(false).into_iter().filter(fits).map(of).collect()
}

/// A case with chunks and the planes' target.
fn case(method: &'static str, pages: Pages, gammas: &'static [usize], batch: usize) -> Case {
    Case { chunk_rows: CHUNK_ROWS, ..Case::new(method, pages, gammas, batch) }
}

fn sampler(accept: Accept, seed: u64, sequence: u64) -> Sampler {
    match accept {
        Accept::Greedy => Sampler { sequence, ..Sampler::greedy() },
        _ => Sampler { temperature: 0.8, top_k: 40, top_p: 0.95, seed, sequence, accept, ..Sampler::greedy() },
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

/// Local layers of 256 tokens, alternating with others, in random models.
fn with_local_layers() -> [Checkpoint; 2] {
    [(2, 1, 64), (4, 2, 256)].map(|heads| {
        random::Shape { layers: 3, hidden: 128, intermediate: 256, ..random::Shape::new("gemma3_text", "BF16", heads) }
            .checkpoint(7)
    })
}

#[test]
fn speculation_over_local_layers_changes_no_token() {
    let Some(device) = device() else { return };
    for checkpoint in with_local_layers() {
        if !device.info.takes_heads_of(checkpoint.config().head_dim) {
            eprintln!("SKIPPED: heads of {} channels", checkpoint.config().head_dim);
            continue;
        }
        for weights in [TargetWeights::Checkpoint, TargetWeights::Int8] {
            let mut model = Model::load(&device, &checkpoint, &Options { weights, ..options(1700, 3) });
            for accept in [Accept::Greedy, Accept::Replay] {
                let samplers = [0, 1, 2].map(|sequence| sampler(accept, 11, sequence));
                let requests = model.requests(&[1130, 120, 515], &samplers, 300);
                law(&mut model, &requests, &cases(View::Both));
            }
            eprintln!("acceptance over all drafts {:?}", model.engine.stats().acceptance_rate());
        }
        memory(&device, &checkpoint);
    }
}

/// The checkpoints that a GPU can store in nibbles.
fn in_nibbles(checkpoints: Vec<Checkpoint>) -> impl Iterator<Item = Checkpoint> {
    checkpoints.into_iter().filter(|checkpoint| checkpoint.config().dtype != Dtype::F32)
}

fn speculation(device: &Arc<Device>, checkpoint: &Checkpoint, options: &Options, targets: &[View]) {
    let mut model = Model::load(device, checkpoint, options);
    for &target in targets {
        for accept in [Accept::Greedy, Accept::Replay] {
            let samplers = [0, 1, 2].map(|sequence| sampler(accept, 11, sequence));
            let requests = model.requests(&[2330, 120, 1015], &samplers, 600);
            law(&mut model, &requests, &cases(target));
        }
    }
    eprintln!("acceptance over all drafts {:?}", model.engine.stats().acceptance_rate());
}

/// Penalties of some sequences of a batch, over drafted tokens and over tokens of prompt lookup, which the host sets.
#[test]
fn penalties_depend_on_the_text_alone() {
    let Some(device) = device() else { return };
    for checkpoint in checkpoints(&device, 1600) {
        let mut model = Model::load(&device, &checkpoint, &options(1600, 3));
        for accept in [Accept::Greedy, Accept::Replay] {
            let of = |sequence, (repetition, frequency, presence, ngram)| {
                let penalties = Penalties::new(repetition, frequency, presence, ngram).unwrap();
                Sampler { penalties, ..sampler(accept, 11, sequence) }
            };
            let samplers = [of(0, (1.2, 0.0, 0.0, 0)), sampler(accept, 11, 1), of(2, (1.0, 0.2, 0.3, 3))];
            let requests = model.requests(&[1100, 120, 515], &samplers, 300);
            let plain = law(&mut model, &requests, &cases(View::Both));
            let text = &plain[2].tokens;
            assert!(text.windows(3).enumerate().all(|(at, gram)| text[..at + 2].windows(3).all(|g| g != gram)));
            let free = model.requests(&[1100], &[sampler(accept, 11, 0)], 300);
            assert_ne!(plain[0], model.decode(&Case::plain(), &free)[0], "a penalty changed nothing");
        }
    }
}

/// Two of three sequences of a batch follow a grammar, one of these with penalties.
#[test]
fn masks_depend_on_the_text_alone() {
    let Some(device) = device() else { return };
    for checkpoint in checkpoints(&device, 1600) {
        let mut model = Model::load(&device, &checkpoint, &options(1600, 3));
        for accept in [Accept::Greedy, Accept::Replay] {
            let penalties = Penalties::new(1.1, 0.2, 0.0, 3).unwrap();
            let samplers =
                [sampler(accept, 11, 0), sampler(accept, 11, 1), Sampler { penalties, ..sampler(accept, 11, 2) }];
            let constrained = [true, false, true];
            let mut requests = model.requests(&[1100, 120, 515], &samplers, 200);
            requests.iter_mut().zip(constrained).for_each(|(request, constrained)| request.constrained = constrained);
            for (answer, constrained) in law(&mut model, &requests, &cases(View::Both)).iter().zip(constrained) {
                assert_eq!(grammar::allows(&answer.tokens), constrained);
            }
        }
    }
}

#[test]
fn logprobs_do_not_depend_on_how_tokens_were_drafted() {
    let Some(device) = device() else { return };
    for checkpoint in checkpoints(&device, 800) {
        let mut model = Model::load(&device, &checkpoint, &options(800, 1));
        let prompt = prompt(checkpoint.config().vocab, 500, 3);
        let penalties = Penalties::new(1.2, 0.1, 0.0, 4).unwrap();
        let [greedy, replay] =
            [Accept::Greedy, Accept::Replay].map(|accept| Sampler { penalties, ..sampler(accept, 5, 0) });
        // An automatic policy reads the margin of every drafted token.
        let auto = Case { auto: true, ..case("quantspec", Pages::All, &[12], 1) };
        let cases = [case("quantspec", Pages::All, &[4], 1), auto, case("ngram", Pages::All, &[4], 1)];
        for sampler in [sampler(Accept::Greedy, 0, 0), greedy, replay] {
            let request = Request { top: Some(4), ..Request::new(&prompt, &sampler, 200) };
            let Answer { tokens, logprobs } = law(&mut model, &[request], &cases).remove(0);
            assert_eq!(tokens.len(), logprobs.len());
            if sampler.penalties.is_none() {
                assert!(tokens.iter().zip(&logprobs).all(|(token, of)| of.top[0] == (*token, of.logprob)));
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
        let mut model = Model::load(&device, &checkpoint, &Options { planes, ..options(2000, 1) });
        let request = [Request::new(&prompt(checkpoint.config().vocab, 1500, 9), &sampler(Accept::Replay, 3, 0), 200)];
        let cases =
            [Pages::Best(3), Pages::Window(3)].map(|pages| Case { target: View::Full, ..case("w4", pages, &[4], 1) });
        law(&mut model, &request, &cases);
    }
}

/// Long prompts have their hidden states in host memory and, in an engine with one slot, keys and values in memory of the
/// weights. Neither changes a bit of theirs, and weights restored afterwards draft and verify as before.
#[test]
fn long_prompts_change_no_bit_wherever_they_are() {
    const ALL: Limits = Limits { tokens: usize::MAX, hidden_bytes: usize::MAX };
    let places = [ALL, Limits { hidden_bytes: 0, ..ALL }, Limits { tokens: 128, ..ALL }];
    let Some(device) = device() else { return };
    for checkpoint in checkpoints(&device, 1600) {
        let nibbles = checkpoint.config().dtype != Dtype::F32;
        let of_weights = [TargetWeights::Checkpoint, TargetWeights::Int8];
        for weights in of_weights.into_iter().filter(|&weights| nibbles || weights == TargetWeights::Checkpoint) {
            for slots in [1, 3] {
                let options = Options { weights, ..options(1600, slots) };
                let runs = places.map(|limits| {
                    let load = || CudaBackend::load_with(&device, &checkpoint, &options, Hooks::default(), limits);
                    let backend = load().unwrap();
                    let held = backend.memory();
                    let planned = plan_with(&checkpoint, &options, &device.info, limits);
                    assert_eq!((planned.host_bytes, planned.weights_bytes), (held.host_bytes, held.weights_bytes));
                    let mut model = Model::on(backend, &device, &checkpoint, &options);
                    // A long prompt precedes drafts, then follows some. Blocks have 256 rows.
                    let seen = [(1300, 0), (90, 1), (700, 0), (1281, 2)].map(|(length, sequence)| {
                        let request = model.requests(&[length], &[sampler(Accept::Replay, 5, sequence)], 150);
                        let slot = model.engine.add(&request[0].prompt, Sampler::greedy(), 1).unwrap();
                        model.engine.prefill(slot, &mut |_, _| ()).unwrap();
                        let logits: Vec<u32> =
                            model.engine.backend().logits(0).unwrap().iter().map(|logit| logit.to_bits()).collect();
                        model.engine.finish(slot);
                        (logits, model.decode(&case("quantspec", Pages::All, &[5], 1), &request))
                    });
                    (seen, model.engine.stats().acceptance_rate(), held)
                });
                let [(seen, rate, held), in_host, lent] = &runs;
                for (what, (again, again_rate, _)) in [("in host memory", in_host), ("lent", lent)] {
                    assert!(again == seen, "{weights:?}, {slots} slots, {what}");
                    assert_eq!(again_rate, rate, "{weights:?}, {slots} slots, {what}");
                }
                let hidden = (1600 - 512) * checkpoint.config().hidden * 4;
                assert_eq!(held.workspace_bytes - in_host.2.workspace_bytes, hidden);
                assert_eq!(in_host.2.host_bytes - held.host_bytes, 1600 * checkpoint.config().hidden * 4);
                let kv = (1600 - 128) * 4 * checkpoint.config().kv_width();
                let saved = held.workspace_bytes - lent.2.workspace_bytes;
                assert_eq!(saved, if slots == 1 { kv } else { 0 }, "nothing was lent");
            }
        }
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
                let span = offset..offset + 1;
                let step = forward::RoundSteps::of_draft(&drafting("quantspec"), &never, &[span]).unwrap();
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
        let mut model = Model::load(&device, &checkpoint, &options(1700, 1));
        for accept in [Accept::Greedy, Accept::Replay] {
            let request = [Request::new(&prompt(checkpoint.config().vocab, 700, 5), &sampler(accept, 21, 0), 900)];
            for pages in [Pages::All, Pages::Best(3), Pages::Snap { pages: 3, refresh: 2 }] {
                model.engine.reset_stats();
                law(&mut model, &request, &[Case { auto: true, ..case("quantspec", pages, &[8], 1) }]);
                // A wrong draft is rejected and changes no token, so only acceptance detects it.
                let accepted = model.engine.stats().acceptance_rate().unwrap();
                assert!(accepted > 0.5, "{accept:?} {pages:?}: of drafted tokens {accepted} stand");
            }
        }
    }
}

/// Ragged batches: prompts of one token to eleven pages, some ending at page borders, answers of different lengths, γ from 0
/// to 16 mixed.
#[test]
fn batches_of_any_size_change_no_token() {
    const SLOTS: usize = 32;
    let Some(device) = device() else { return };
    for checkpoint in checkpoints(&device, 1700) {
        let mut model = Model::load(&device, &checkpoint, &options(1700, SLOTS));
        let vocab = checkpoint.config().vocab;
        let length = |i: usize| [1, 127, 128, 129, 255, 256, 257, 640][i % 8] + [0, 256, 512, 768][i / 8];
        let gammas = &[16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0];
        let drafts =
            [("quantspec", Pages::All), ("quantspec", Pages::Best(3)), ("kv4", Pages::All), ("w4", Pages::All)];
        let of = |batch| drafts.map(|(method, pages)| case(method, pages, gammas, batch));
        let cases: Vec<Case> = [1, 3, 8, SLOTS].into_iter().flat_map(of).collect();
        for accept in [Accept::Greedy, Accept::Replay] {
            let of =
                |i| Request::new(&prompt(vocab, length(i), i as u64), &sampler(accept, 3, i as u64), 90 + 37 * (i % 5));
            law(&mut model, &(0..SLOTS).map(of).collect::<Vec<_>>(), &cases);
        }
    }
}

/// Batches of 17 and more sequences draft with other GEMMs, and have the acceptance of smaller ones.
#[test]
fn large_batches_draft_what_small_ones_draft() {
    let Some(device) = device() else { return };
    for checkpoint in checkpoints(&device, 500) {
        let vocab = checkpoint.config().vocab;
        let rates = [12, 24].map(|slots| {
            let mut model = Model::load(&device, &checkpoint, &options(500, slots));
            // The larger batch has every sequence of the smaller one twice.
            let of = |i| Request::new(&prompt(vocab, 200 + i, i as u64), &sampler(Accept::Replay, 3, i as u64), 100);
            let requests: Vec<Request> = (0..slots).map(|i| of(i % 12)).collect();
            model.decode(&case("quantspec", Pages::All, &[4], slots), &requests);
            model.engine.stats().acceptance_rate().unwrap()
        });
        // Sequences join at other rounds, and a draft step rounds by its rows.
        assert!((rates[0] - rates[1]).abs() < 0.02, "{rates:?}");
    }
}

#[test]
fn ten_thousand_tokens_are_those_of_plain_decoding() {
    let Some(device) = device() else { return };
    for checkpoint in checkpoints(&device, 10_400) {
        let mut model = Model::load(&device, &checkpoint, &options(10_400, 1));
        for accept in [Accept::Greedy, Accept::Replay] {
            let request = [Request::new(&prompt(checkpoint.config().vocab, 300, 1), &sampler(accept, 8, 0), 10_000)];
            let cases = exactness::methods().map(|method| case(method, Pages::All, &[4, 6, 16, 1], 1));
            assert_eq!(law(&mut model, &request, &cases)[0].tokens.len(), 10_000);
        }
    }
}

#[test]
fn a_window_drafts_as_the_whole_cache() {
    let Some(device) = device() else { return };
    for checkpoint in checkpoints(&device, 1800) {
        let options = Options { planes: Planes::of(&[View::Full]), ..options(1800, 2) };
        let model = Model::load(&device, &checkpoint, &options);
        let requests = model.requests(&[1300, 130], &[0, 1].map(|sequence| sampler(Accept::Replay, 5, sequence)), 480);
        drop(model);
        let load = |options: &Options| load(&device, &checkpoint, options);
        exactness::a_window_drafts_as_the_whole_cache(load, &options, 3, &requests);
    }
}

#[test]
fn rejection_is_reproducible() {
    let Some(device) = device() else { return };
    for checkpoint in checkpoints(&device, 900) {
        let options = options(900, 2);
        let mut model = Model::load(&device, &checkpoint, &options);
        let samplers = [0, 1].map(|sequence| sampler(Accept::Rejection, 5, sequence));
        let requests = model.requests(&[500, 333], &samplers, 200);
        let [itself, lookup, draft_model] =
            ["quantspec", "ngram", "draft-model"].map(|method| case(method, Pages::All, &[4], 2));
        for case in [&itself, &lookup, &draft_model] {
            model.engine.reset_stats();
            assert_eq!(model.decode(case, &requests), model.decode(case, &requests));
        }
        // The model drafts for itself: p and q differ by rounding only, unless q belongs to another token.
        let rate = model.engine.stats().acceptance_rate().unwrap();
        assert!(rate > 0.95, "{rate} of what a model drafts for itself");
        // Prompt lookup keeps no distributions.
        let mut without = Model::load(&device, &checkpoint, &Options { rejection: false, ..options });
        assert_eq!(without.decode(&lookup, &requests), model.decode(&lookup, &requests));
    }
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
        assert_eq!((planned.weights_bytes, planned.host_bytes), (held.weights_bytes, held.host_bytes));
        let ratio = planned.device_bytes() as f64 / held.device_bytes() as f64;
        assert!((0.97..=1.03).contains(&ratio), "planned {planned:?}, held {held:?}");
    }
}
