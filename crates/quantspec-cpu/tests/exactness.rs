//! The law of exactness, on whole engines: emitted tokens are a function of the prompt, the target view, the sampling
//! settings and the seed alone. Comparisons are exact, without tolerances.
//!
//! Every run is compared with autoregressive decoding of the same prompt alone on one thread. By default, a covering
//! selection of combinations runs at 320 tokens, enough to cross two page borders from every prompt length.
//! `QUANTSPEC_LAWS=long` runs the selection at the law's length (2,000 tokens, prompts of up to 5,000, one sequence of 10,000
//! tokens), `QUANTSPEC_LAWS=full` every combination at that length. Models in the directory `QUANTSPEC_TEST_MODELS`, if set,
//! run in addition to the embedded one.

#![allow(clippy::print_stderr, reason = "tools/test.sh gathers what ran and what did not")]

#[path = "support/grammar.rs"]
mod grammar;

use grammar::Fifths;
use quantspec_core::Result;
use quantspec_core::cache::G;
use quantspec_core::config::{DraftWeights, Pages, Planes, Rounding, Sensitive, TargetWeights, View, Weights};
use quantspec_core::logprob::Logprob;
use quantspec_core::penalty::Penalties;
use quantspec_core::policy::Policy;
use quantspec_core::sample::{Accept, Sampler};
use quantspec_cpu::CpuBackend;
use quantspec_model::backend::{Hooks, Network, Options, Turn};
use quantspec_model::checkpoint::Checkpoint;
use quantspec_model::draft::{self, DraftModel, Drafter, Needs, Proposed};
use quantspec_model::engine::{Engine, Method};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

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
fn collection(name: &str) -> Option<PathBuf> {
    let Some(folder) = std::env::var_os("QUANTSPEC_TEST_MODELS") else {
        eprintln!("SKIPPED: {name} needs QUANTSPEC_TEST_MODELS, a directory that holds the model {name}");
        return None;
    };
    let model = Path::new(&folder).join(name);
    assert!(model.is_dir(), "QUANTSPEC_TEST_MODELS has no {name}");
    Some(model)
}

/// The first `n` tokens of a book in the demo tokenizer, after BOS.
fn book(skip: usize, n: usize) -> Vec<u32> {
    let bytes = std::fs::read(root().join("tests/data/book.u16")).expect("test data");
    let ids = bytes.chunks_exact(2).map(|pair| u32::from(u16::from_le_bytes([pair[0], pair[1]])));
    std::iter::once(1).chain(ids.skip(skip)).take(n).collect()
}

#[derive(Clone, Debug)]
struct Run {
    target: View,
    weights: TargetWeights,
    method: &'static str,
    pages: Pages,
    gamma: usize,
    /// γ is at most `gamma`; the policy and the logit margins of drafted tokens decide.
    auto: bool,
    threads: usize,
    rounding: Rounding,
    sensitive: Sensitive,
    /// Rows of a prompt, over all layers, between two rounds of earlier sequences.
    chunk_rows: usize,
    /// Answers follow a grammar.
    constrained: bool,
}

impl Run {
    fn ar() -> Run {
        Run {
            target: View::Both,
            weights: TargetWeights::Checkpoint,
            method: "ar",
            pages: Pages::All,
            gamma: 0,
            auto: false,
            threads: 1,
            rounding: Rounding::Balanced,
            sensitive: Sensitive::NONE,
            chunk_rows: usize::MAX,
            constrained: false,
        }
    }

    fn new(method: &'static str, pages: Pages, gamma: usize, threads: usize) -> Run {
        Run { method, pages, gamma, threads, ..Run::ar() }
    }

    /// The method's drafter. As a second checkpoint, the demo model drafts for every model with its tokenizer, others for
    /// themselves. If the target reads both nibbles and γ is even, the second checkpoint reads the upper ones, so that its
    /// own target errs too.
    fn drafter(&self, model: &Path, target: &Options) -> Option<Box<dyn Drafter>> {
        let method = draft::Entry::named(self.method).expect("a method");
        let takes_second = matches!(method.source, draft::Source::Checkpoint | draft::Source::Several);
        let second = takes_second.then(|| self.second(model, target));
        let drafter = method.drafter(self.target, DraftWeights::Int4, &self.pages(), second)?;
        let in_turn = self.method == "auto" && !self.auto;
        Some(if in_turn { Box::new(InTurn { drafter, round: 0 }) } else { drafter })
    }

    /// `auto` also chooses among pages.
    fn pages(&self) -> Vec<Pages> {
        std::iter::once(self.pages).chain((self.method == "auto").then_some(Pages::Best(2))).collect()
    }

    fn second(&self, model: &Path, target: &Options) -> Box<dyn Drafter> {
        let options = Options { step_rows: target.slots.max(draft::CATCH_UP_ROWS), ..target.clone() };
        let [own, demo] = [model, &root().join("python/quantspec_cli/demo")]
            .map(|model| Checkpoint::open(model).expect("second checkpoint"));
        let second = if own.config().vocab == demo.config().vocab { demo } else { own };
        let backend = CpuBackend::load(&second, &options, Hooks::default()).expect("second backend");
        let view = if self.target == View::Both && self.gamma.is_multiple_of(2) { View::Upper } else { self.target };
        Box::new(DraftModel::new(backend, view, &[self.pages], target.capacity, BLOCK_ROWS))
    }

    /// Emitted tokens of every prompt, decoded as one batch.
    fn decode(&self, model: &Path, prompts: &[Vec<u32>], sampler: &Sampler, new_tokens: usize) -> Vec<Vec<u32>> {
        self.decode_and_tell(model, prompts, sampler, new_tokens, None).into_iter().map(|(text, _)| text).collect()
    }

    /// As `decode`, also returning log-probabilities of every token and of the most likely ones, if requested.
    fn decode_and_tell(
        &self,
        model: &Path,
        prompts: &[Vec<u32>],
        sampler: &Sampler,
        new_tokens: usize,
        top: Option<usize>,
    ) -> Vec<(Vec<u32>, Vec<Logprob>)> {
        // Tests run in parallel, and pools that share cores would mostly wait for each other.
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let checkpoint = Checkpoint::open(model).expect("checkpoint");
        let capacity = prompts.iter().map(Vec::len).max().unwrap_or(0) + new_tokens;
        let options = Options {
            planes: Planes::of(&[self.target]),
            rounding: self.rounding,
            weights: self.weights,
            draft_weights: DraftWeights::None,
            sensitive: self.sensitive,
            rejection: sampler.accept == Accept::Rejection,
            step_rows: prompts.len() * (self.gamma + 1),
            block_rows: BLOCK_ROWS,
            threads: self.threads,
            ..Options::new(prompts.len(), capacity)
        };
        let drafter = self.drafter(model, &options);
        let needs = drafter.as_ref().map(|drafter| drafter.needs()).unwrap_or_default();
        let views: Vec<View> = std::iter::once(self.target).chain(needs.view).collect();
        let options = Options {
            planes: Planes::of(&views),
            draft_weights: if needs.draft_weights { DraftWeights::Int4 } else { DraftWeights::None },
            rejection: options.rejection && needs.distributions,
            page_masses: needs.page_masses,
            ..options
        };
        let backend = CpuBackend::load(&checkpoint, &options, Hooks::default()).expect("backend");
        let policy = if self.auto { Policy::auto(self.gamma) } else { Policy::fixed(self.gamma) };
        let method = Method { target: self.target, drafter, policy };
        let mut engine = Engine::new(backend, method, prompts.len(), capacity, BLOCK_ROWS);
        let mut texts: Vec<Vec<u32>> = Vec::new();
        for (index, prompt) in prompts.iter().enumerate() {
            let slot = engine.add(prompt, sampler.clone(), new_tokens).expect("add");
            assert_eq!(slot, index);
            if self.constrained {
                engine.constrain(slot, Fifths::boxed(checkpoint.config().vocab)).expect("a slot before its prompt");
            }
            if let Some(top) = top {
                engine.want_logprobs(slot, top).expect("a slot before its prompt");
            }
            let mut chunks = 1;
            let first = loop {
                match engine.prefill_chunk(slot, self.chunk_rows, &mut |_, _| ()).expect("prefill") {
                    Some(first) => break first,
                    None => _ = round(&mut engine, &mut texts, new_tokens),
                }
                chunks += 1;
            };
            let before_the_last_layer = prompt.len() * (checkpoint.config().layers - 1);
            assert!(chunks > 1 || before_the_last_layer < self.chunk_rows, "the prompt was read at once");
            texts.push(vec![first]);
        }
        while round(&mut engine, &mut texts, new_tokens) {}
        if self.method != "ar" && self.gamma > 0 {
            let stats = engine.stats();
            assert!(stats.drafted_tokens() > 0, "nothing was drafted: the comparison would be empty");
        }
        texts
            .into_iter()
            .enumerate()
            .map(|(slot, text)| (text, engine.take_logprobs(slot).expect("log-probabilities")))
            .collect()
    }
}

/// Drafts with another candidate in each round, regardless of forecasts.
#[derive(Debug)]
struct InTurn {
    drafter: Box<dyn Drafter>,
    round: usize,
}

impl Drafter for InTurn {
    fn needs(&self) -> Needs {
        self.drafter.needs()
    }

    fn margins(&self) -> bool {
        self.drafter.margins()
    }

    fn copies(&self, slot: usize, most: usize, break_even: &dyn Fn(usize) -> Option<f64>) -> usize {
        self.drafter.copies(slot, most, break_even)
    }

    fn prefill(&mut self, slot: usize, prompt: &[u32], first: u32) -> Result<()> {
        assert!(self.drafter.candidates() > 3, "few ways to choose from");
        self.drafter.prefill(slot, prompt, first)
    }

    fn propose(&mut self, target: &mut dyn draft::Target, turns: &mut [Turn], _: usize) -> Result<Proposed> {
        self.round += 1;
        self.drafter.propose(target, turns, self.round % self.drafter.candidates())
    }

    fn commit(&mut self, slot: usize, tokens: &[u32]) -> Result<()> {
        self.drafter.commit(slot, tokens)
    }

    fn close(&mut self, slot: usize) {
        self.drafter.close(slot);
    }
}

/// Runs a round for every unfinished text; returns false if there is none.
fn round(engine: &mut Engine<CpuBackend>, texts: &mut [Vec<u32>], new_tokens: usize) -> bool {
    let gammas: Vec<(usize, usize)> = (0..texts.len())
        .filter(|&slot| texts[slot].len() < new_tokens)
        .map(|slot| (slot, engine.choose_gamma(slot)))
        .collect();
    if gammas.is_empty() {
        return false;
    }
    engine.draft(&gammas).expect("draft");
    for emitted in engine.verify().expect("verify") {
        texts[emitted.slot].extend(emitted.tokens);
    }
    true
}

fn greedy() -> Sampler {
    Sampler::new(0.0, 0, 1.0, 0.0, 0, 0, Accept::Greedy).expect("sampler")
}

fn replay() -> Sampler {
    Sampler::new(0.9, 50, 0.95, 0.01, 7, 0, Accept::Replay).expect("sampler")
}

/// Reports the position at which two texts differ; assert_eq would print thousands of tokens.
fn assert_same(what: &str, reference: &[u32], tokens: &[u32]) {
    if let Some(at) = (0..reference.len().min(tokens.len())).find(|&at| reference[at] != tokens[at]) {
        panic!("{what}: token {at} is {} and must be {}", tokens[at], reference[at]);
    }
    assert_eq!(reference.len(), tokens.len(), "{what}: lengths differ");
}

/// The prompts that each run decodes. Runs of the same batch size start three prompts apart, so that eight of them use every
/// prompt, at every place and with different neighbours.
fn chosen(runs: &[(Run, usize)], prompts: usize) -> Vec<Vec<usize>> {
    let begins = |at: usize| 3 * runs[..at].iter().filter(|(_, batch)| *batch == runs[at].1).count();
    (0..runs.len()).map(|at| (0..runs[at].1).map(|i| (begins(at) + i) % prompts).collect()).collect()
}

/// Compares every combination with decoding each prompt alone, with the weights of the first run.
fn law(model: &Path, prompts: &[Vec<u32>], new_tokens: usize, runs: &[(Run, usize)]) {
    law_of(model, prompts, new_tokens, runs, &[greedy(), replay()]);
}

/// The same for some samplers. Returns the texts of the last one.
fn law_of(
    model: &Path,
    prompts: &[Vec<u32>],
    new_tokens: usize,
    runs: &[(Run, usize)],
    samplers: &[Sampler],
) -> Vec<Vec<u32>> {
    eprintln!("TESTED: whole engines on {}", quantspec_cpu::simd().expect("path").name);
    let weights = runs.first().map(|(run, _)| run.weights).unwrap_or_default();
    let constrained = runs.first().is_some_and(|(run, _)| run.constrained);
    let plain = Run { weights, constrained, ..Run::ar() };
    let mut last = Vec::new();
    for sampler in samplers {
        let alone: Vec<Vec<u32>> = prompts
            .iter()
            .map(|prompt| plain.decode(model, std::slice::from_ref(prompt), sampler, new_tokens).remove(0))
            .collect();
        for ((run, batch), chosen) in runs.iter().zip(chosen(runs, prompts.len())) {
            let texts =
                run.decode(model, &chosen.iter().map(|&i| prompts[i].clone()).collect::<Vec<_>>(), sampler, new_tokens);
            for (&i, text) in chosen.iter().zip(&texts) {
                let what =
                    format!("{run:?}, batch {batch}, prompt of {} tokens, {:?}", prompts[i].len(), sampler.accept);
                assert_same(&what, &alone[i], text);
            }
        }
        last = alone;
    }
    last
}

/// Methods whose drafts read any pages, with 8-bit activations, and copy nothing; [`selection`] combines them with all other
/// settings.
fn methods() -> [&'static str; 3] {
    let any_pages = |entry: &&draft::Entry| {
        matches!(entry.source, draft::Source::Model { weights: Weights::Full | Weights::Draft, pages: None, .. })
    };
    let found: Vec<&str> =
        draft::METHODS.iter().filter(any_pages).filter(|entry| !entry.copies).map(|entry| entry.name).collect();
    found.try_into().expect("the selection of combinations is made for three")
}

const PAGES: [Pages; 3] = [Pages::All, Pages::Best(3), Pages::Window(3)];
const GAMMAS: [usize; 6] = [1, 2, 4, 7, 12, 16];
const BATCHES: [usize; 3] = [1, 3, 8];
const THREADS: [usize; 2] = [1, 2];

#[test]
fn prompts_are_processed_between_the_rounds_of_others() {
    let model = root().join("python/quantspec_cli/demo");
    let prompts: Vec<Vec<u32>> = [300, 900, 129, 640].iter().map(|&n| book(n, n)).collect();
    let runs: Vec<(Run, usize)> = [1, 700, 4000]
        .into_iter()
        .zip(["quantspec", "w4", "ngram"])
        .map(|(chunk_rows, method)| (Run { chunk_rows, ..Run::new(method, Pages::All, 4, 2) }, prompts.len()))
        .collect();
    law(&model, &prompts, 160, &runs);
}

#[test]
fn every_method_has_a_run() {
    for entry in &draft::METHODS {
        let runs = combinations();
        assert!(runs.iter().any(|(run, _)| run.method == entry.name), "no run of method {}", entry.name);
    }
}

/// Indices of method, pages, γ, batch and threads: all combinations at full length, otherwise a selection in which every
/// value of each is combined with every value of every other.
fn selection() -> Vec<[usize; 5]> {
    let mut all = Vec::new();
    for m in 0..methods().len() {
        for p in 0..PAGES.len() {
            for g in 0..GAMMAS.len() {
                for b in 0..BATCHES.len() {
                    for t in 0..THREADS.len() {
                        // Each γ runs once with each batch. Any two of method, pages, batch and γ mod 3 determine the other
                        // two, so every pair occurs.
                        if full() || m == (g + b) % 3 && p == (g + 2 * b) % 3 && t == (g / 3 + b) % 2 {
                            all.push([m, p, g, b, t]);
                        }
                    }
                }
            }
        }
    }
    all
}

/// The selection; plain decoding; γ auto; windows; and prompt lookup, alone and replacing any network's drafts.
fn combinations() -> Vec<(Run, usize)> {
    let run = |[m, p, g, b, t]: [usize; 5]| (Run::new(methods()[m], PAGES[p], GAMMAS[g], THREADS[t]), BATCHES[b]);
    let mut all: Vec<(Run, usize)> = selection().into_iter().map(run).collect();
    all.push((Run::new("ar", Pages::All, 0, 2), 8));
    for (method, batch, threads) in
        [("quantspec", 1, 1), ("quantspec", 1, 2), ("quantspec", 3, 2), ("ngram", 1, 2), ("ngram", 3, 1)]
            .into_iter()
            .chain([
                ("window", 1, 2),
                ("snapkv", 1, 2),
                ("quantspec+ngram", 1, 2),
                ("quantspec+ngram", 3, 2),
                ("draft-model", 1, 2),
            ])
            .chain([("auto", 1, 2), ("auto", 3, 2)])
    {
        all.push((Run { auto: true, ..Run::new(method, Pages::All, 12, threads) }, batch));
    }
    for (gamma, batch) in GAMMAS.into_iter().zip(BATCHES.into_iter().cycle()) {
        all.push((Run::new("ngram", Pages::All, gamma, 2), batch));
        all.push((Run::new("quantspec+ngram", Pages::All, gamma, 2), batch));
    }
    for (name, gamma, batch) in [("qspec", 4, 3), ("qspec", 12, 1), ("qspec", 1, 8), ("qspec+ngram", 7, 3)] {
        all.push((Run::new(name, Pages::All, gamma, 2), batch));
    }
    for (names, method, gamma, batch) in
        [("down", "quantspec", 4, 3), ("qkv,o,gate-up,down", "w4", 16, 1), ("o,gate-up", "quantspec", 7, 8)]
    {
        let sensitive = Sensitive::named(names).expect("kinds");
        all.push((Run { sensitive, ..Run::new(method, Pages::All, gamma, 2) }, batch));
    }
    for (name, pages, gamma, batch) in [
        ("draft-model", Pages::All, 1, 3),
        ("draft-model", Pages::All, 5, 8),
        ("draft-model", Pages::Window(2), 16, 1),
        ("draft-model", Pages::Best(3), 4, 3),
        ("draft-model+ngram", Pages::All, 7, 3),
        ("auto", Pages::All, 1, 8),
        ("auto", Pages::Best(3), 5, 1),
        ("auto", Pages::All, 12, 3),
    ] {
        all.push((Run::new(name, pages, gamma, 2), batch));
    }
    let windows = [(2, 1, 1), (3, 12, 3), (4, 7, 8), (16, 4, 1)];
    for ((n, gamma, batch), name) in windows.into_iter().zip(["kv4+ngram", "w4+ngram", "window+ngram", "kv4+ngram"]) {
        all.push((Run::new("window", Pages::Window(n), gamma, 2), batch));
        all.push((Run::new(name, Pages::Window(n), gamma, 1), batch));
    }
    for (pages, refresh, gamma, batch) in [(2, 0, 4, 3), (3, 1, 7, 8), (2, 1, 12, 1), (16, 0, 2, 1)] {
        let name = if batch == 1 { "snapkv+ngram" } else { "snapkv" };
        all.push((Run::new(name, Pages::Snap { pages, refresh }, gamma, 2), batch));
    }
    all
}

#[test]
fn the_selection_meets_every_pair() {
    let sizes = [methods().len(), PAGES.len(), GAMMAS.len(), BATCHES.len(), THREADS.len()];
    for (a, b) in (0..5).flat_map(|b| (0..b).map(move |a| (a, b))) {
        for (i, j) in (0..sizes[a]).flat_map(|i| (0..sizes[b]).map(move |j| (i, j))) {
            let meet = selection().iter().any(|places| (places[a], places[b]) == (i, j));
            assert!(meet, "value {i} of axis {a} never meets value {j} of axis {b}");
        }
    }
    // Every prompt, of a length near page borders, is decoded alone, with two neighbours and with seven.
    let (runs, prompts) = (combinations(), prompts());
    for batch in BATCHES {
        for (at, prompt) in prompts.iter().enumerate() {
            let mut chosen = runs.iter().zip(chosen(&runs, prompts.len()));
            let drafts = |run: &Run| methods().contains(&run.method);
            let met = chosen.any(|((run, n), chosen)| drafts(run) && *n == batch && chosen.contains(&at));
            assert!(met, "a prompt of {} tokens never runs in a batch of {batch}", prompt.len());
        }
    }
}

fn prompts() -> Vec<Vec<u32>> {
    let lengths = [1, G - 1, G, G + 1, 2 * G - 1, 2 * G, 2 * G + 1, if long() { 5000 } else { 700 }];
    lengths.iter().enumerate().map(|(index, &length)| book(index * 311, length)).collect()
}

fn new_tokens() -> usize {
    if long() { 2000 } else { 320 }
}

#[test]
fn speculation_changes_no_token_of_the_demo_model() {
    law(&root().join("python/quantspec_cli/demo"), &prompts(), new_tokens(), &combinations());
}

#[test]
fn speculation_changes_no_token_of_weights_in_planes() {
    let int8 = |(run, batch)| (Run { weights: TargetWeights::Int8, ..run }, batch);
    let runs: Vec<_> = combinations().into_iter().map(int8).step_by(if long() { 1 } else { 2 }).collect();
    assert!(runs.iter().any(|(run, _)| run.sensitive != Sensitive::NONE), "no run with sensitive matrices");
    for method in methods().into_iter().chain(["ngram"]) {
        assert!(runs.iter().any(|(run, _)| run.method == method), "no run of method {method}");
    }
    law(&root().join("python/quantspec_cli/demo"), &prompts(), new_tokens(), &runs);
    let int4 = |(run, batch)| (Run { weights: TargetWeights::Int4, ..run }, batch);
    let by_activations = |(run, _): &(Run, usize)| run.method.starts_with("qspec");
    let chosen = combinations().into_iter().enumerate();
    let chosen = chosen.filter(|(at, run)| long() || at.is_multiple_of(6) || by_activations(run));
    let runs: Vec<_> = chosen.map(|(_, run)| int4(run)).collect();
    law(&root().join("python/quantspec_cli/demo"), &prompts(), new_tokens(), &runs);
    // Another target view yields another text; otherwise the comparison above would not test these weights.
    let prompt = [book(40, 2 * G + 5)];
    let views = [TargetWeights::Int8, TargetWeights::Int4, TargetWeights::Checkpoint];
    let [int8, int4, full] = views.map(|weights| {
        Run { weights, ..Run::ar() }.decode(&root().join("python/quantspec_cli/demo"), &prompt, &replay(), new_tokens())
    });
    assert!(int8 != full && int4 != full && int8 != int4);
}

#[test]
fn speculation_changes_no_token_with_grouped_heads() {
    let Some(model) = collection("seed-gqa") else { return };
    let tokens = if long() { 2000 } else { 64 };
    let runs: Vec<_> = combinations().into_iter().step_by(if full() { 1 } else { 5 }).collect();
    law(&model, &prompts(), tokens, &runs);
}

#[test]
fn speculation_changes_no_token_with_many_heads() {
    let Some(model) = collection("seed-mha") else { return };
    let tokens = if long() { 2000 } else { 64 };
    let runs: Vec<_> = combinations().into_iter().skip(2).step_by(if full() { 1 } else { 5 }).collect();
    law(&model, &prompts(), tokens, &runs);
}

#[test]
fn speculation_changes_no_token_of_a_third_party_model() {
    // 512 positions and a vocabulary of 512: short prompts with valid ids.
    let prompts: Vec<Vec<u32>> = [1, G - 1, G + 1, 2 * G - 1]
        .iter()
        .map(|&length| book(0, length).into_iter().map(|id| id % 512).collect())
        .collect();
    let model = root().join("tests/data/stories260K");
    law(&model, &prompts, 512 - 2 * G, &combinations());
}

#[test]
fn every_target_view_and_rounding_is_exact() {
    let model = root().join("python/quantspec_cli/demo");
    let prompt = vec![book(40, 2 * G + 5)];
    for target in [View::Full, View::Both, View::Upper] {
        for rounding in [Rounding::Balanced, Rounding::Paper] {
            let reference = Run { target, rounding, ..Run::ar() }.decode(&model, &prompt, &greedy(), 300);
            for method in ["quantspec", "kv4", "w4", "window", "snapkv", "ngram", "w4+ngram", "auto"] {
                let run = Run { target, rounding, ..Run::new(method, Pages::All, 5, 2) };
                let text = run.decode(&model, &prompt, &greedy(), 300);
                assert_same(&format!("{run:?}"), &reference[0], &text[0]);
            }
        }
    }
}

#[test]
fn under_rejection_a_seed_repeats_its_text_with_fixed_gamma_and_pages() {
    let model = root().join("python/quantspec_cli/demo");
    let sampler = |seed| Sampler::new(0.9, 50, 0.95, 0.01, seed, 0, Accept::Rejection).expect("sampler");
    // At least four visible pages, of which drafts read three.
    let prompts = vec![book(40, 6 * G - 7), book(700, 2 * G + 5)];
    for (method, gamma, pages) in [
        ("quantspec", 2, Pages::All),
        ("quantspec", 5, Pages::Best(3)),
        ("quantspec", 12, Pages::Window(3)),
        ("ngram", 4, Pages::All),
        ("window", 4, Pages::Window(2)),
        ("snapkv", 4, Pages::Snap { pages: 2, refresh: 1 }),
        ("quantspec+ngram", 4, Pages::All),
        ("draft-model", 3, Pages::All),
    ] {
        let decode =
            |threads, seed| Run::new(method, pages, gamma, threads).decode(&model, &prompts, &sampler(seed), 100);
        let once = decode(1, 7);
        for threads in [1, 2] {
            for (once, again) in once.iter().zip(decode(threads, 7)) {
                assert_same(&format!("{method}, gamma {gamma}, {pages:?}, {threads} threads"), once, &again);
            }
        }
        assert_ne!(once, decode(1, 8), "another seed has another text");
    }
}

#[test]
fn penalties_depend_on_the_text_alone() {
    let model = root().join("python/quantspec_cli/demo");
    let prompts: Vec<Vec<u32>> = [1, G, 300, 2 * G + 1].iter().map(|&n| book(n, n)).collect();
    // For texts that may not repeat, prompt lookup proposes nothing.
    let mut runs: Vec<(Run, usize)> = combinations()
        .into_iter()
        .filter(|(run, _)| run.method != "ngram")
        .step_by(if full() { 1 } else { 4 })
        .collect();
    runs.push((Run { chunk_rows: 700, ..Run::new("quantspec", Pages::All, 5, 2) }, prompts.len()));
    let plain = law_of(&model, &prompts, 160, &[], &[greedy()]);
    for (repetition, frequency, presence, ngram) in
        [(1.2, 0.0, 0.0, 0), (1.0, 0.3, 0.2, 0), (1.0, 0.0, 0.0, 3), (1.1, 0.1, -0.2, 4)]
    {
        let penalties = Penalties::new(repetition, frequency, presence, ngram).expect("penalties");
        let samplers = [replay(), greedy()].map(|sampler| sampler.penalised(penalties));
        let texts = law_of(&model, &prompts, 160, &runs, &samplers);
        assert_ne!(texts, plain, "{penalties:?} changed nothing");
        for (prompt, text) in prompts.iter().zip(&texts).filter(|_| ngram > 0) {
            let whole: Vec<u32> = prompt.iter().chain(text).copied().collect();
            for end in prompt.len() + 1..=whole.len() {
                let gram = &whole[end.saturating_sub(ngram)..end];
                assert!(whole[..end - 1].windows(ngram).all(|earlier| earlier != gram), "{gram:?} comes twice");
            }
        }
    }
}

#[test]
fn masks_depend_on_the_text_alone() {
    let model = root().join("python/quantspec_cli/demo");
    let prompts: Vec<Vec<u32>> = [1, G, 300, 2 * G + 1].iter().map(|&n| book(n, n)).collect();
    let mut runs = combinations();
    runs.push((Run { chunk_rows: 700, ..Run::new("quantspec", Pages::All, 5, 2) }, prompts.len()));
    let auto =
        ["quantspec", "draft-model"].map(|method| (Run { auto: true, ..Run::new(method, Pages::All, 12, 2) }, 1));
    let mut runs: Vec<(Run, usize)> = runs.into_iter().step_by(if full() { 1 } else { 5 }).chain(auto).collect();
    // A text that must not repeat itself leaves prompt lookup few proposals: its first ones are forbidden.
    runs.retain(|(run, _)| run.method != "ngram" || run.gamma > 1);
    for entry in &draft::METHODS {
        if !runs.iter().any(|(run, _)| run.method == entry.name) {
            runs.push((Run::new(entry.name, Pages::All, 4, 2), 3));
        }
    }
    runs.iter_mut().for_each(|(run, _)| run.constrained = true);
    let penalties = Penalties::new(1.2, 0.1, 0.0, 0).expect("penalties");
    for samplers in [[replay(), greedy()], [replay().penalised(penalties), greedy().penalised(penalties)]] {
        let free = law_of(&model, &prompts, 160, &[], &samplers);
        let texts = law_of(&model, &prompts, 160, &runs, &samplers);
        assert!(texts.iter().all(|text| grammar::allows(text)));
        assert!(!free.iter().any(|text| grammar::allows(text)), "the grammar changed nothing");
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
    let slot = engine.add(&book(0, 100), greedy(), 100).expect("add");
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

/// Bans that leave no token are reported as such, on the first token and on later ones. They end no text if only drafted
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
        let slot = engine.add(&book(0, 100), greedy(), 100).expect("add");
        engine.constrain(slot, Box::new(Short(0, Mutex::default()))).expect("a slot before its prompt");
        assert_eq!(engine.prefill(slot, &mut |_, _| ()).expect_err("no first token"), Error::no_token_left());
        engine.finish(slot);
        let slot = engine.add(&book(0, 100), greedy(), 100).expect("add");
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
    let model = root().join("python/quantspec_cli/demo");
    let prompts: Vec<Vec<u32>> = [1, 300, 2 * G + 1].iter().map(|&n| book(n, n)).collect();
    let penalties = Penalties::new(1.2, 0.0, 0.1, 4).expect("penalties");
    for sampler in [greedy(), replay().penalised(penalties)] {
        let alone: Vec<(Vec<u32>, Vec<Logprob>)> = prompts
            .iter()
            .map(|prompt| {
                let prompt = std::slice::from_ref(prompt);
                Run::ar().decode_and_tell(&model, prompt, &sampler, 140, Some(5)).remove(0)
            })
            .collect();
        for (tokens, logprobs) in &alone {
            assert_eq!(tokens.len(), logprobs.len());
            for (token, logprob) in tokens.iter().zip(logprobs) {
                assert_eq!(logprob.top.len(), 5);
                assert!(logprob.top.is_sorted_by(|a, b| a.1 >= b.1));
                // Greedy without penalties takes the likeliest.
                assert!(sampler.accept != Accept::Greedy || logprob.top[0] == (*token, logprob.logprob));
            }
        }
        for (method, gamma) in [("quantspec", 5), ("ngram", 4), ("w4", 12)] {
            let run = Run::new(method, Pages::All, gamma, 2);
            assert!(run.decode_and_tell(&model, &prompts, &sampler, 140, Some(5)) == alone, "{run:?}");
        }
    }
}

#[test]
fn ten_thousand_tokens() {
    if !long() {
        eprintln!("SKIPPED: set QUANTSPEC_LAWS=long to decode 10,000 tokens");
        return;
    }
    let model = root().join("python/quantspec_cli/demo");
    let prompt = vec![book(0, 300)];
    let reference = Run::ar().decode(&model, &prompt, &replay(), 10_000);
    let text = Run::new("quantspec", Pages::All, 4, 2).decode(&model, &prompt, &replay(), 10_000);
    assert_same("10,000 tokens", &reference[0], &text[0]);
}
