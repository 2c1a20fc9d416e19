//! The law of exactness, on whole engines: emitted tokens are a function of the prompt, the target view, the sampling
//! settings and the seed alone. Comparisons are exact, without tolerances.
//!
//! Every case is compared with autoregressive decoding of the same prompt alone on one thread. By default, a covering
//! selection of combinations runs at 136 tokens, each combination greedy or sampled. Those cross a page border from every
//! prompt length but the shortest, and two from some. Other weights, models and rules of an answer have fewer combinations and
//! tokens. `QUANTSPEC_LAWS=long` runs the selection in both ways at the law's length (2,000 tokens, prompts of up to 5,000,
//! one sequence of 10,000 tokens), `QUANTSPEC_LAWS=full` every combination at that length. Models in the directory
//! `QUANTSPEC_TEST_MODELS`, if set, run in addition to the embedded one.

#![allow(clippy::print_stderr, reason = "tools/test.sh gathers what ran and what did not")]

#[path = "../../quantspec-model/tests/support/exactness.rs"]
mod exactness;

use exactness::grammar::{self, Fifths};
use exactness::{Answer, Case, Decode, Request, assert_same, law, share};
use quantspec_core::cache::G;
use quantspec_core::config::{DraftWeights, Pages, Planes, Rounding, Sensitive, TargetWeights, View, Weights};
use quantspec_core::page_pool::kept_of_window;
use quantspec_core::penalty::Penalties;
use quantspec_core::policy::Policy;
use quantspec_core::sample::{Accept, Sampler};
use quantspec_cpu::CpuBackend;
use quantspec_model::backend::{DraftConfig, Hooks, Network, Options};
use quantspec_model::checkpoint::Checkpoint;
use quantspec_model::draft::{self, DraftModel, Drafter};
use quantspec_model::engine::{Engine, Method};
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex};

const BLOCK_ROWS: usize = 256;

/// Value of `QUANTSPEC_LAWS`.
#[derive(Clone, Copy, PartialEq, PartialOrd)]
enum Laws {
    Short,
    Long,
    Full,
}

fn laws() -> Laws {
    match std::env::var("QUANTSPEC_LAWS").as_deref() {
        Ok("full") => Laws::Full,
        Ok("long") => Laws::Long,
        Ok(other) => panic!("QUANTSPEC_LAWS is {other:?}; it may be long or full"),
        Err(_) => Laws::Short,
    }
}

fn long() -> bool {
    laws() >= Laws::Long
}

fn full() -> bool {
    laws() == Laws::Full
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A directory of the test collection, or None with a printed notice if it is absent.
fn collection(name: &str) -> Option<Model> {
    let Some(folder) = std::env::var_os("QUANTSPEC_TEST_MODELS") else {
        eprintln!("SKIPPED: {name} needs QUANTSPEC_TEST_MODELS, a directory that holds the model {name}");
        return None;
    };
    let model = Path::new(&folder).join(name);
    assert!(model.is_dir(), "QUANTSPEC_TEST_MODELS has no {name}");
    Some(Model(model))
}

/// The first `n` tokens of a book in the demo tokenizer, after BOS.
fn book(skip: usize, n: usize) -> Vec<u32> {
    let bytes = std::fs::read(root().join("tests/data/book.u16")).expect("test data");
    let ids = bytes.chunks_exact(2).map(|pair| u32::from(u16::from_le_bytes([pair[0], pair[1]])));
    std::iter::once(1).chain(ids.skip(skip)).take(n).collect()
}

/// A checkpoint directory; each case is decoded by an engine that keeps what its method needs, and no more.
struct Model(PathBuf);

fn demo() -> Model {
    Model(root().join("python/quantspec_cli/demo"))
}

impl Model {
    /// The draft model: the demo model for every model with its tokenizer, others for themselves. Its cache has the case's view.
    /// Without one, and if the target reads both nibbles and the first γ is even, it reads the upper ones, so that its own target
    /// errs too.
    fn draft_model(&self, case: &Case, view: View, pages: &[Pages], target: &Options) -> Box<dyn Drafter> {
        let view = match case.draft_model_view {
            Some(view) => view,
            None if view == View::Both && case.gammas[0].is_multiple_of(2) => View::Upper,
            None => view,
        };
        let [own, demo] = [self, &demo()].map(|model| Checkpoint::open(&model.0).expect("a checkpoint"));
        let checkpoint = if own.config().vocab == demo.config().vocab { demo } else { own };
        // As an engine is loaded: of a cache whose window alone is read, the window is kept.
        let window =
            DraftConfig { weights: Weights::Full, view, pages: pages[0] }.window().filter(|_| pages.len() == 1);
        let reach = checkpoint.config().local.as_ref().map(|local| local.reach);
        let options = Options {
            planes: Planes::of(&[view]),
            kept_pages: window.map_or(usize::MAX, |window| kept_of_window(window, reach)),
            step_rows: target.slots.max(draft::CATCH_UP_ROWS),
            ..target.clone()
        };
        let backend = CpuBackend::load(&checkpoint, &options, Hooks::default()).expect("draft model");
        Box::new(DraftModel::new(backend, view, pages, target.capacity, BLOCK_ROWS))
    }
}

/// Cores that no engine uses. Tests run in parallel, and threads of a pool that wait for a core delay the others.
static FREE: (Mutex<Option<usize>>, Condvar) = (Mutex::new(None), Condvar::new());

/// Cores of one engine, free again when dropped.
struct Cores(usize);

impl Cores {
    /// Waits for `threads` free cores, or for all if there are fewer.
    fn taken(threads: usize) -> Cores {
        let all = std::thread::available_parallelism().map_or(1, usize::from);
        let (threads, (free, freed)) = (threads.min(all), &FREE);
        let free = free.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let enough = |free: &mut Option<usize>| *free.get_or_insert(all) < threads;
        let mut free = freed.wait_while(free, enough).unwrap_or_else(|poisoned| poisoned.into_inner());
        *free = free.map(|free| free - threads);
        Cores(threads)
    }
}

impl Drop for Cores {
    fn drop(&mut self) {
        let (free, freed) = &FREE;
        let mut free = free.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        *free = free.map(|free| free + self.0);
        freed.notify_all();
    }
}

impl Decode for Model {
    fn decode(&mut self, case: &Case, requests: &[Request]) -> Vec<Answer> {
        let _cores = Cores::taken(case.threads);
        let checkpoint = Checkpoint::open(&self.0).expect("checkpoint");
        let longest = requests.iter().map(|request| request.prompt.len() + request.new_tokens).max().unwrap_or(0);
        let rejection = requests.iter().any(|request| request.sampler.accept == Accept::Rejection);
        let options = Options {
            planes: Planes::of(&[case.target]),
            rounding: case.rounding,
            weights: case.weights,
            draft_weights: DraftWeights::None,
            sensitive: case.sensitive,
            rejection,
            step_rows: requests.len() * (case.gamma_max() + 1),
            block_rows: BLOCK_ROWS,
            threads: case.threads,
            ..Options::new(requests.len(), longest)
        };
        let method = case.method(|view, pages| self.draft_model(case, view, pages, &options));
        let needs = method.drafter.as_ref().map(|drafter| drafter.needs()).unwrap_or_default();
        let views: Vec<View> = std::iter::once(case.target).chain(needs.view).collect();
        let options = Options {
            planes: Planes::of(&views),
            draft_weights: if needs.draft_weights { DraftWeights::Int4 } else { DraftWeights::None },
            rejection: rejection && needs.distributions,
            page_masses: needs.page_masses,
            ..options
        };
        let backend = CpuBackend::load(&checkpoint, &options, Hooks::default()).expect("backend");
        let mut engine = Engine::new(backend, method, options.slots, options.capacity, BLOCK_ROWS);
        exactness::decode(&mut engine, case, requests)
    }
}

fn replay() -> Sampler {
    Sampler {
        temperature: 0.9,
        top_k: 50,
        top_p: 0.95,
        min_p: 0.01,
        seed: 7,
        accept: Accept::Replay,
        ..Sampler::greedy()
    }
}

fn requests(prompts: &[Vec<u32>], sampler: &Sampler, new_tokens: usize) -> Vec<Request> {
    prompts.iter().map(|prompt| Request::new(prompt, sampler, new_tokens)).collect()
}

/// The law of exactness, greedy and sampled: every second case each, and all cases at full length.
fn law_of_both(mut model: Model, prompts: &[Vec<u32>], new_tokens: usize, cases: &[Case]) {
    eprintln!("TESTED: whole engines on {}", quantspec_cpu::dispatch::choose().expect("path").simd.name());
    for (index, sampler) in [Sampler::greedy(), replay()].iter().enumerate() {
        let cases = if long() { cases } else { &share(cases, index, 2) };
        law(&mut model, &requests(prompts, sampler, new_tokens), cases);
    }
}

fn cases() -> Vec<Case> {
    exactness::cases(full())
}

/// Cases for four prompts, of which a larger batch would decode some twice.
fn of_four() -> Vec<Case> {
    cases().into_iter().filter(|case| case.batch <= 4).collect()
}

/// A case of every method, with chunks of prompts from single blocks to several layers. `just test` runs this test.
#[test]
fn a_window_drafts_as_the_whole_cache() {
    let checkpoint = Checkpoint::open(&demo().0).expect("checkpoint");
    let options = Options { draft_weights: DraftWeights::None, threads: 2, ..Options::new(2, 1800) };
    let options = Options { planes: Planes::of(&[View::Full]), ..options };
    let load = |options: &Options| CpuBackend::load(&checkpoint, options, Hooks::default()).expect("backend");
    // The window of the second moves over pages of its answer.
    let requests = requests(&[book(100, 1300), book(3000, 130)], &Sampler::greedy(), 480);
    for window in [2, 4] {
        exactness::a_window_drafts_as_the_whole_cache(load, &options, window, &requests);
    }
}

#[test]
fn prompts_are_processed_between_the_rounds_of_others() {
    let prompts: Vec<Vec<u32>> = [129, 260, 20, 150].iter().map(|&n| book(n, n)).collect();
    let mut chunks = [1, 300, 1000].into_iter().cycle();
    let of = |entry: &draft::Entry| cases().into_iter().find(|case| case.method == entry.name && case.batch >= 3);
    let cases = draft::METHODS.iter().map(|entry| of(entry).expect("a case in a batch"));
    let cases: Vec<Case> = cases.map(|case| Case { chunk_rows: chunks.next().expect("endless"), ..case }).collect();
    law(&mut demo(), &requests(&prompts, &replay(), 40), &cases);
}

fn prompts() -> Vec<Vec<u32>> {
    let lengths = [1, G - 1, G, G + 1, 2 * G - 1, 2 * G, 2 * G + 1, if long() { 5000 } else { 700 }];
    lengths.iter().enumerate().map(|(index, &length)| book(index * 311, length)).collect()
}

fn new_tokens() -> usize {
    if long() { 2000 } else { G + 8 }
}

#[test]
fn speculation_changes_no_token_of_the_demo_model() {
    law_of_both(demo(), &prompts(), new_tokens(), &cases());
}

#[test]
fn speculation_changes_no_token_of_weights_in_planes() {
    // The network is that of the other weights; only its GEMMs differ.
    for (weights, step) in [(TargetWeights::Int8, 5), (TargetWeights::Int4, 12)] {
        let chosen = |at: usize, case: &Case| long() || at.is_multiple_of(step) || case.method.starts_with("qspec");
        let cases = cases().into_iter().enumerate().filter(|(at, case)| chosen(*at, case));
        let cases: Vec<Case> = cases.map(|(_, case)| Case { weights, ..case }).collect();
        let sensitive = cases.iter().any(|case| case.sensitive != Sensitive::NONE);
        assert!(sensitive || weights == TargetWeights::Int4, "no case with sensitive matrices");
        law_of_both(demo(), &prompts(), new_tokens(), &cases);
    }
    // Another target view yields another text; otherwise the comparison above would not test these weights.
    let request = [Request::new(&book(40, 2 * G + 5), &replay(), new_tokens())];
    let views = [TargetWeights::Int8, TargetWeights::Int4, TargetWeights::Checkpoint];
    let [int8, int4, full] = views.map(|weights| demo().decode(&Case { weights, ..Case::plain() }, &request));
    assert!(int8 != full && int4 != full && int8 != int4);
}

/// Layers without position embedding, Granite's factors, heads of which a part is rotated, OLMo's norms, growing queries, and
/// local layers, in tiny random models.
#[test]
fn speculation_changes_no_token_of_families_with_angles_and_factors_of_their_own() {
    let prompts: Vec<Vec<u32>> = [G - 1, 2 * G + 1, 4 * G + 9]
        .iter()
        .map(|&length| book(length, length).iter().map(|id| 4 + id % 60).collect())
        .collect();
    for family in ["smollm3", "granite", "phi3-long", "olmo2", "ministral3", "gemma3"] {
        let model = root().join("crates/quantspec-model/tests/golden").join(family);
        for (weights, step) in [(TargetWeights::Checkpoint, 7), (TargetWeights::Int8, if long() { 7 } else { 14 })] {
            let cases: Vec<Case> = of_four().into_iter().step_by(step).map(|case| Case { weights, ..case }).collect();
            // Past a page border from every prompt.
            law_of_both(Model(model.clone()), &prompts, G + 8, &cases);
        }
    }
}

#[test]
fn speculation_changes_no_token_with_grouped_heads() {
    let Some(model) = collection("seed-gqa") else { return };
    let cases: Vec<Case> = cases().into_iter().step_by(if full() { 1 } else { 5 }).collect();
    law_of_both(model, &prompts(), if long() { 2000 } else { 64 }, &cases);
}

#[test]
fn speculation_changes_no_token_with_many_heads() {
    let Some(model) = collection("seed-mha") else { return };
    let cases: Vec<Case> = cases().into_iter().skip(2).step_by(if full() { 1 } else { 5 }).collect();
    law_of_both(model, &prompts(), if long() { 2000 } else { 64 }, &cases);
}

#[test]
fn speculation_changes_no_token_of_a_third_party_model() {
    // 512 positions and a vocabulary of 512: short prompts with valid ids.
    let prompts: Vec<Vec<u32>> = [1, G - 1, G + 1, 2 * G - 1]
        .iter()
        .map(|&length| book(0, length).into_iter().map(|id| id % 512).collect())
        .collect();
    let cases: Vec<Case> = of_four().into_iter().step_by(if long() { 1 } else { 3 }).collect();
    law_of_both(Model(root().join("tests/data/stories260K")), &prompts, 512 - 2 * G, &cases);
}

#[test]
fn every_target_view_and_rounding_is_exact() {
    // Past two page borders.
    let request = [Request::new(&book(40, 3 * G - 20), &Sampler::greedy(), 160)];
    for target in [View::Full, View::Both, View::Upper] {
        for rounding in [Rounding::Balanced, Rounding::Paper] {
            let methods = ["quantspec", "kv4", "w4", "window", "snapkv", "ngram", "w4+ngram", "auto"];
            let cases = methods.map(|method| Case { target, rounding, ..Case::new(method, Pages::All, &[5], 1) });
            law(&mut demo(), &request, &cases);
        }
    }
}

#[test]
fn under_rejection_a_seed_repeats_its_text_with_fixed_gamma_and_pages() {
    let sampler = |seed| Sampler {
        temperature: 0.9,
        top_k: 50,
        top_p: 0.95,
        min_p: 0.01,
        seed,
        accept: Accept::Rejection,
        ..Sampler::greedy()
    };
    // At least four visible pages, of which drafts read three.
    let prompts = [book(40, 6 * G - 7), book(700, 2 * G + 5)];
    for (method, gammas, pages) in [
        ("quantspec", &[2], Pages::All),
        ("quantspec", &[5], Pages::Best(3)),
        ("quantspec", &[12], Pages::Window(3)),
        ("ngram", &[4], Pages::All),
        ("window", &[4], Pages::Window(2)),
        ("snapkv", &[4], Pages::Snap { pages: 2, refresh: 1 }),
        ("quantspec+ngram", &[4], Pages::All),
        ("draft-model", &[3], Pages::All),
    ] {
        let decode = |threads, seed| {
            let case = Case { threads, ..Case::new(method, pages, gammas, 2) };
            demo().decode(&case, &requests(&prompts, &sampler(seed), 100))
        };
        let once = decode(1, 7);
        for (once, again) in once.iter().zip(decode(2, 7)) {
            assert_same(&format!("{method}, gamma {gammas:?}, {pages:?}"), once, &again);
        }
        assert_ne!(once, decode(1, 8), "another seed has another text");
    }
}

/// Tokens of an answer under penalties or a grammar.
fn ruled_tokens() -> usize {
    if long() { 160 } else { 60 }
}

/// Every case under one of the penalties and samplers.
#[test]
fn penalties_depend_on_the_text_alone() {
    let prompts: Vec<Vec<u32>> = [1, G, 300, 2 * G + 1].iter().map(|&n| book(n, n)).collect();
    let all = [(1.2, 0.0, 0.0, 0), (1.0, 0.3, 0.2, 0), (1.0, 0.0, 0.0, 3), (1.1, 0.1, -0.2, 4)];
    for (index, (repetition, frequency, presence, ngram)) in all.into_iter().enumerate() {
        let penalties = Penalties::new(repetition, frequency, presence, ngram).expect("penalties");
        for (place, sampler) in [Sampler::greedy(), replay()].into_iter().enumerate() {
            let mut cases = if full() { of_four() } else { share(&of_four(), 2 * index + place, 8) };
            cases.push(Case { chunk_rows: 700, ..Case::new("quantspec", Pages::All, &[5], prompts.len()) });
            let answers = law(
                &mut demo(),
                &requests(&prompts, &Sampler { penalties, ..sampler.clone() }, ruled_tokens()),
                &cases,
            );
            let free = demo().decode(&Case::plain(), &requests(&prompts, &sampler, ruled_tokens()));
            assert_ne!(answers, free, "{penalties:?} changed nothing");
            for (prompt, answer) in prompts.iter().zip(&answers).filter(|_| ngram > 0) {
                let whole: Vec<u32> = prompt.iter().chain(&answer.tokens).copied().collect();
                for end in prompt.len() + 1..=whole.len() {
                    let gram = &whole[end.saturating_sub(ngram)..end];
                    assert!(whole[..end - 1].windows(ngram).all(|earlier| earlier != gram), "{gram:?} comes twice");
                }
            }
        }
    }
}

/// Every case under a grammar, with one of the samplers.
#[test]
fn masks_depend_on_the_text_alone() {
    let prompts: Vec<Vec<u32>> = [1, G, 300, 2 * G + 1].iter().map(|&n| book(n, n)).collect();
    let penalties = Penalties::new(1.2, 0.1, 0.0, 0).expect("penalties");
    let samplers =
        [Sampler::greedy(), replay(), Sampler { penalties, ..Sampler::greedy() }, Sampler { penalties, ..replay() }];
    for (index, sampler) in samplers.into_iter().enumerate() {
        let mut cases = if full() { of_four() } else { share(&of_four(), index, 4) };
        cases.push(Case { chunk_rows: 700, ..Case::new("quantspec", Pages::All, &[5], prompts.len()) });
        let free = requests(&prompts, &sampler, ruled_tokens());
        let constrained: Vec<Request> =
            free.iter().map(|request| Request { constrained: true, ..request.clone() }).collect();
        let answers = law(&mut demo(), &constrained, &cases);
        assert!(answers.iter().all(|answer| grammar::allows(&answer.tokens)));
        let free = demo().decode(&Case::plain(), &free);
        assert!(!free.iter().any(|answer| grammar::allows(&answer.tokens)), "the grammar changed nothing");
    }
}

/// An engine for one answer of the demo model, drafted with 4-bit weights.
fn small_engine(gamma: usize) -> Engine<CpuBackend> {
    let checkpoint = Checkpoint::open(&root().join("python/quantspec_cli/demo")).expect("checkpoint");
    let options = Options { planes: Planes::of(&[View::Both]), block_rows: BLOCK_ROWS, ..Options::new(1, 300) };
    let backend = CpuBackend::load(&checkpoint, &options, Hooks::default()).expect("backend");
    let w4 = draft::Entry::named("w4").expect("a method");
    let drafter = w4.drafter(View::Both, DraftWeights::Int4, &[Pages::All], None);
    let method = Method { target: View::Both, drafter, policy: Policy::fixed(gamma) };
    Engine::new(backend, method, options.slots, options.capacity, BLOCK_ROWS)
}

/// Masks computed while drafting serve the verification: of a round of γ drafted tokens, γ + 1.
#[test]
fn a_round_computes_a_mask_for_each_of_its_rows() {
    use quantspec_core::grammar::{Grammar, Mask};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    #[derive(Debug)]
    struct Counting(Box<dyn Grammar>, Arc<AtomicUsize>);

    impl Grammar for Counting {
        fn mask(&self, drafted: &[u32]) -> quantspec_core::Result<Option<Mask>> {
            self.1.fetch_add(1, Relaxed);
            self.0.mask(drafted)
        }

        fn advance(&self, tokens: &[u32]) {
            self.0.advance(tokens);
        }
    }

    let mut engine = small_engine(4);
    let slot = engine.add(&book(0, 100), Sampler::greedy(), 100).expect("add");
    let computed = Arc::new(AtomicUsize::new(0));
    let grammar = Counting(Fifths::boxed(engine.backend().config().vocab), computed.clone());
    engine.constrain(slot, Box::new(grammar)).expect("a slot before its prompt");
    engine.prefill(slot, &mut |_, _| ()).expect("prefill");
    assert_eq!(computed.swap(0, Relaxed), 1);
    for _ in 0..10 {
        engine.draft(&[(slot, 4)]).expect("draft");
        engine.verify().expect("verify");
        assert_eq!(computed.swap(0, Relaxed), 5);
    }
    assert!(engine.constrain(slot, Fifths::boxed(9)).is_err(), "an answer under way");
}

/// Penalties that forbid all tokens are reported as such, on the first token and on later ones. They end no text if only drafted
/// tokens are affected.
#[test]
fn an_answer_without_a_token_left_says_so() {
    use quantspec_core::Error;
    use quantspec_core::grammar::{Grammar, Mask};

    /// Any tokens, so many.
    #[derive(Debug)]
    struct Short(usize, Mutex<usize>);

    impl Grammar for Short {
        fn mask(&self, drafted: &[u32]) -> quantspec_core::Result<Option<Mask>> {
            let length = *self.1.lock().expect("no test panics in here") + drafted.len();
            Ok((length >= self.0).then(|| Mask::from([0; 1])))
        }

        fn advance(&self, tokens: &[u32]) {
            *self.1.lock().expect("no test panics in here") += tokens.len();
        }
    }

    let mut texts = Vec::new();
    for gamma in [0, 4] {
        let mut engine = small_engine(gamma);
        let slot = engine.add(&book(0, 100), Sampler::greedy(), 100).expect("add");
        engine.constrain(slot, Box::new(Short(0, Mutex::default()))).expect("a slot before its prompt");
        assert_eq!(engine.prefill(slot, &mut |_, _| ()).expect_err("no first token"), Error::no_token_left());
        engine.finish(slot);
        let slot = engine.add(&book(0, 100), Sampler::greedy(), 100).expect("add");
        engine.constrain(slot, Box::new(Short(7, Mutex::default()))).expect("a slot before its prompt");
        let mut text = vec![engine.prefill(slot, &mut |_, _| ()).expect("prefill")];
        let error = loop {
            engine.draft(&[(slot, gamma)]).expect("draft");
            match engine.verify() {
                Ok(emitted) => text.extend(&emitted[0].tokens),
                Err(error) => break error,
            }
        };
        assert_eq!((error, text.len()), (Error::no_token_left(), 7), "gamma {gamma}");
        texts.push(text);
    }
    assert_eq!(texts[0], texts[1]);
}

#[test]
fn logprobs_do_not_depend_on_how_tokens_were_drafted() {
    let prompts: Vec<Vec<u32>> = [1, 300, 2 * G + 1].iter().map(|&n| book(n, n)).collect();
    let penalties = Penalties::new(1.2, 0.0, 0.1, 4).expect("penalties");
    for sampler in [Sampler::greedy(), Sampler { penalties, ..replay() }] {
        let mut requests = requests(&prompts, &sampler, 140);
        requests.iter_mut().for_each(|request| request.top = Some(5));
        let cases = [("quantspec", &[5]), ("ngram", &[4]), ("w4", &[12])]
            .map(|(method, gammas)| Case::new(method, Pages::All, gammas, prompts.len()));
        for Answer { tokens, logprobs } in law(&mut demo(), &requests, &cases) {
            assert_eq!(tokens.len(), logprobs.len());
            for (token, of) in tokens.iter().zip(&logprobs) {
                assert_eq!(of.top.len(), 5);
                assert!(of.top.is_sorted_by(|a, b| a.1 >= b.1));
                // Greedy without penalties takes the likeliest.
                assert!(sampler.accept != Accept::Greedy || of.top[0] == (*token, of.logprob));
            }
        }
    }
}

#[test]
fn ten_thousand_tokens() {
    if !long() {
        eprintln!("SKIPPED: set QUANTSPEC_LAWS=long to decode 10,000 tokens");
        return;
    }
    let request = [Request::new(&book(0, 300), &replay(), 10_000)];
    law(&mut demo(), &request, &[Case::new("quantspec", Pages::All, &[4], 1)]);
}
