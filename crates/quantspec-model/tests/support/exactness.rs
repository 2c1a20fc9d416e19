//! Exactness on any backend: every way to decode yields the tokens of plain decoding of each prompt alone. Comparisons are
//! exact, without tolerances. Tests of other crates include this file by path and implement [`Decode`].

#[path = "grammar.rs"]
pub(crate) mod grammar;

use grammar::Fifths;
use quantspec_core::Result;
use quantspec_core::config::{DraftWeights, Pages, Rounding, Sensitive, TargetWeights, View, Weights};
use quantspec_core::logprob::Logprob;
use quantspec_core::page_pool::kept_of_window;
use quantspec_core::policy::Policy;
use quantspec_core::sample::Sampler;
use quantspec_model::backend::{Backend, Options, Turn};
use quantspec_model::draft::{self, DraftModel, Drafter, Needs, Proposed};
use quantspec_model::engine::{Engine, Method};

/// One text to decode.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) prompt: Vec<u32>,
    pub(crate) sampler: Sampler,
    pub(crate) new_tokens: usize,
    /// The answer follows the grammar of [`Fifths`].
    pub(crate) constrained: bool,
    /// Most likely tokens whose log-probabilities are requested.
    pub(crate) top: Option<usize>,
}

impl Request {
    pub(crate) fn new(prompt: &[u32], sampler: &Sampler, new_tokens: usize) -> Request {
        Request { prompt: prompt.to_vec(), sampler: sampler.clone(), new_tokens, constrained: false, top: None }
    }
}

/// Emitted tokens, and their log-probabilities if requested.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Answer {
    pub(crate) tokens: Vec<u32>,
    pub(crate) logprobs: Vec<Logprob>,
}

/// One way to decode.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) target: View,
    pub(crate) weights: TargetWeights,
    pub(crate) sensitive: Sensitive,
    pub(crate) rounding: Rounding,
    pub(crate) method: &'static str,
    pub(crate) pages: Pages,
    /// View of a draft model's cache; `None` for the target's, or what the decoder chooses.
    pub(crate) draft_model_view: Option<View>,
    /// γ of each round and sequence in turn; the policy chooses a single one.
    pub(crate) gammas: &'static [usize],
    /// γ is at most the largest of `gammas`; the policy and the logit margins of drafted tokens decide.
    pub(crate) auto: bool,
    /// Texts that decode together.
    pub(crate) batch: usize,
    #[allow(dead_code, reason = "a GPU has none")]
    pub(crate) threads: usize,
    /// Rows of a prompt, over all layers, between two rounds of earlier sequences.
    pub(crate) chunk_rows: usize,
}

impl Case {
    /// Plain decoding of one text on one thread, its prompt read at once.
    pub(crate) fn plain() -> Case {
        Case {
            target: View::Both,
            weights: TargetWeights::Checkpoint,
            sensitive: Sensitive::NONE,
            rounding: Rounding::Balanced,
            method: "ar",
            pages: Pages::All,
            draft_model_view: None,
            gammas: &[0],
            auto: false,
            batch: 1,
            threads: 1,
            chunk_rows: usize::MAX,
        }
    }

    pub(crate) fn new(method: &'static str, pages: Pages, gammas: &'static [usize], batch: usize) -> Case {
        Case { method, pages, gammas, batch, ..Case::plain() }
    }

    pub(crate) fn entry(&self) -> &'static draft::Entry {
        draft::Entry::named(self.method).expect("a method")
    }

    pub(crate) fn gamma_max(&self) -> usize {
        self.gammas.iter().copied().max().expect("one")
    }

    /// The method. `draft_model` makes the drafter of a draft model that reads this view and these pages. With fixed γ, `auto`
    /// drafts in every way it has, and also chooses among pages.
    pub(crate) fn method(&self, draft_model: impl FnOnce(View, &[Pages]) -> Box<dyn Drafter>) -> Method {
        let (entry, chooses) = (self.entry(), self.method == "auto");
        let takes_draft_model = matches!(entry.source, draft::Source::Checkpoint | draft::Source::Several);
        let draft_model = takes_draft_model.then(|| draft_model(self.target, &[self.pages]));
        let pages: Vec<Pages> = std::iter::once(self.pages).chain(chooses.then_some(Pages::Best(2))).collect();
        let drafter = entry.drafter(self.target, DraftWeights::Int4, &pages, draft_model);
        let in_turn = |drafter| Box::new(InTurn { drafter, round: 0 }) as Box<dyn Drafter>;
        let drafter = if chooses && !self.auto { drafter.map(in_turn) } else { drafter };
        let policy = if self.auto { Policy::auto } else { Policy::fixed };
        Method { target: self.target, drafter, policy: policy(self.gamma_max()) }
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

/// A backend with a model.
pub(crate) trait Decode {
    /// Decodes requests together, by [`decode`] on an engine with the case's method.
    fn decode(&mut self, case: &Case, requests: &[Request]) -> Vec<Answer>;
}

/// Decodes requests as one batch on an engine that has the case's method. Prompts are prefilled in chunks, between which
/// earlier sequences decode.
pub(crate) fn decode<B: Backend>(engine: &mut Engine<B>, case: &Case, requests: &[Request]) -> Vec<Answer> {
    let (vocab, layers) = (engine.backend().config().vocab, engine.backend().config().layers);
    let drafted_before = engine.stats().drafted_tokens();
    let add = |request: &Request| {
        let slot = engine.add(&request.prompt, request.sampler.clone(), request.new_tokens).expect("add");
        if request.constrained {
            engine.constrain(slot, Fifths::boxed(vocab)).expect("a slot before its prompt");
        }
        if let Some(top) = request.top {
            engine.want_logprobs(slot, top).expect("a slot before its prompt");
        }
        slot
    };
    let slots: Vec<usize> = requests.iter().map(add).collect();
    let mut texts: Vec<Vec<u32>> = Vec::new();
    let mut number = 0;
    // Runs a round for every unfinished text; returns false if there is none.
    let mut round = |engine: &mut Engine<B>, texts: &mut [Vec<u32>]| {
        let gamma = |at: usize| match case.gammas {
            [_] => engine.choose_gamma(slots[at]),
            several => several[(number + at) % several.len()].min(requests[at].new_tokens - texts[at].len() - 1),
        };
        let unfinished = (0..texts.len()).filter(|&at| texts[at].len() < requests[at].new_tokens);
        let turns: Vec<(usize, usize)> = unfinished.map(|at| (slots[at], gamma(at))).collect();
        if turns.is_empty() {
            return false;
        }
        engine.draft(&turns).expect("draft");
        for emitted in engine.verify().expect("verify") {
            let at = slots.iter().position(|&slot| slot == emitted.slot).expect("a slot of the round");
            texts[at].extend(emitted.tokens);
        }
        number += 1;
        true
    };
    for (request, &slot) in requests.iter().zip(&slots) {
        let mut chunks = 1;
        let first = loop {
            match engine.prefill_chunk(slot, case.chunk_rows, &mut |_, _| ()).expect("prefill") {
                Some(first) => break first,
                None => _ = round(engine, &mut texts),
            }
            chunks += 1;
        };
        let before_the_last_layer = request.prompt.len() * (layers - 1);
        assert!(chunks > 1 || before_the_last_layer < case.chunk_rows, "the prompt was read at once");
        texts.push(vec![first]);
    }
    while round(engine, &mut texts) {}
    // Rules of an answer may forbid all that prompt lookup proposes.
    let ruled = requests.iter().any(|request| request.constrained || !request.sampler.penalties.is_none());
    let may_draft_nothing = case.gamma_max() == 0 || ruled && matches!(case.entry().source, draft::Source::Other(_));
    let drafted = engine.stats().drafted_tokens() - drafted_before;
    assert!(drafted > 0 || may_draft_nothing, "{case:?}: nothing was drafted, so the comparison would be empty");
    let end = |(tokens, slot)| {
        let logprobs = engine.take_logprobs(slot).expect("log-probabilities");
        engine.finish(slot);
        Answer { tokens, logprobs }
    };
    texts.into_iter().zip(slots).map(end).collect()
}

/// Compares every case with plain decoding of each request alone, and returns the plain answers. Cases have the target of
/// the first.
pub(crate) fn law(decoder: &mut impl Decode, requests: &[Request], cases: &[Case]) -> Vec<Answer> {
    let target = |case: &Case| (case.target, case.weights, case.rounding);
    let (view, weights, rounding) = cases.first().map(target).expect("a case");
    assert!(cases.iter().all(|case| target(case) == (view, weights, rounding)), "cases of several targets");
    let plain = Case { target: view, weights, rounding, ..Case::plain() };
    let alone: Vec<Answer> =
        requests.iter().map(|request| decoder.decode(&plain, std::slice::from_ref(request)).remove(0)).collect();
    for (case, chosen) in cases.iter().zip(chosen(cases, requests.len())) {
        let together: Vec<Request> = chosen.iter().map(|&at| requests[at].clone()).collect();
        for (&at, answer) in chosen.iter().zip(decoder.decode(case, &together)) {
            let Request { prompt, sampler, .. } = &requests[at];
            let what = format!("{case:?}, prompt of {} tokens, {:?}", prompt.len(), sampler.accept);
            assert_same(&what, &alone[at], &answer);
        }
    }
    alone
}

/// Reports the position at which two answers differ; assert_eq would print thousands of tokens.
pub(crate) fn assert_same(what: &str, expected: &Answer, found: &Answer) {
    let (right, wrong) = (&expected.tokens, &found.tokens);
    if let Some(at) = (0..right.len().min(wrong.len())).find(|&at| right[at] != wrong[at]) {
        panic!("{what}: token {at} is {} and must be {}", wrong[at], right[at]);
    }
    assert_eq!(right.len(), wrong.len(), "{what}: lengths differ");
    assert!(expected.logprobs == found.logprobs, "{what}: log-probabilities differ");
}

/// The requests of each case. Cases of the same batch size start three requests apart, so that eight of them use each of
/// eight requests, at every position of a batch and with different neighbours.
pub(crate) fn chosen(cases: &[Case], requests: usize) -> Vec<Vec<usize>> {
    let begins = |at: usize| 3 * cases[..at].iter().filter(|case| case.batch == cases[at].batch).count();
    (0..cases.len()).map(|at| (0..cases[at].batch).map(|i| (begins(at) + i) % requests).collect()).collect()
}

/// The first three methods whose drafts read any pages, with 8-bit activations, and copy nothing; [`selection`] is made for three
/// and combines them with all other settings.
pub(crate) fn methods() -> [&'static str; 3] {
    let any_pages = |entry: &&draft::Entry| {
        matches!(entry.source, draft::Source::Model { weights: Weights::Full | Weights::Draft, pages: None, .. })
    };
    let mut found = draft::METHODS.iter().filter(any_pages).filter(|entry| !entry.copies).map(|entry| entry.name);
    std::array::from_fn(|_| found.next().expect("three such methods"))
}

pub(crate) const PAGES: [Pages; 3] = [Pages::All, Pages::Best(3), Pages::Window(3)];
pub(crate) static GAMMAS: [usize; 6] = [1, 2, 4, 7, 12, 16];
pub(crate) const BATCHES: [usize; 3] = [1, 3, 8];
pub(crate) const THREADS: [usize; 2] = [1, 2];

/// Indices of method, pages, γ, batch and threads: all combinations, or a selection in which every value of each is combined
/// with every value of every other.
pub(crate) fn selection(full: bool) -> Vec<[usize; 5]> {
    let mut all = Vec::new();
    for m in 0..methods().len() {
        for p in 0..PAGES.len() {
            for g in 0..GAMMAS.len() {
                for b in 0..BATCHES.len() {
                    for t in 0..THREADS.len() {
                        // Each γ runs once with each batch. Any two of method, pages, batch and γ mod 3 determine the other
                        // two, so every pair occurs.
                        if full || m == (g + b) % 3 && p == (g + 2 * b) % 3 && t == (g / 3 + b) % 2 {
                            all.push([m, p, g, b, t]);
                        }
                    }
                }
            }
        }
    }
    all
}

/// The cases of every suite: the selection (or all combinations); plain decoding; every method that drafts, with pages and γ
/// in turn; γ auto; sensitive matrices; the views of a draft model's own cache.
pub(crate) fn cases(full: bool) -> Vec<Case> {
    let of = |[m, p, g, b, t]: [usize; 5]| Case {
        threads: THREADS[t],
        ..Case::new(methods()[m], PAGES[p], &GAMMAS[g..=g], BATCHES[b])
    };
    let mut all: Vec<Case> = selection(full).into_iter().map(of).collect();
    let selected = all.len();
    all.push(Case::new("ar", Pages::All, &[0], 8));
    let mut gammas = [&[4][..], &[12], &[7], &[1, 16, 0, 7, 3], &[4, 0, 9], &[2], &[5], &[16, 1]].into_iter().cycle();
    let drafting = draft::METHODS.iter().filter(|entry| !matches!(entry.source, draft::Source::Nothing));
    for (index, entry) in drafting.enumerate() {
        for (b, batch) in BATCHES.into_iter().enumerate() {
            let turn = b + usize::from(entry.copies);
            let pages = match entry.own_pages() {
                Some(Pages::Snap { .. }) if turn % 2 == 0 => Pages::Snap { pages: 2, refresh: 0 },
                Some(Pages::Snap { .. }) => Pages::Snap { pages: 3, refresh: 1 },
                Some(_) => Pages::Window([3, 2, 16][turn % 3]),
                None => PAGES[(index + b) % 3],
            };
            // Eight sequences take as long as the smaller batches together; all methods decode them by the same code.
            if batch < 8 || index.is_multiple_of(4) {
                all.push(Case::new(entry.name, pages, gammas.next().expect("endless"), batch));
            }
        }
    }
    let auto = [("quantspec", 1), ("quantspec", 3), ("ngram", 1), ("window", 1), ("snapkv", 1), ("quantspec+ngram", 1)];
    let auto = auto.into_iter().chain([("quantspec+ngram", 3), ("draft-model", 1), ("auto", 1), ("auto", 3)]);
    all.extend(auto.map(|(method, batch)| Case { auto: true, ..Case::new(method, Pages::All, &[12], batch) }));
    for (names, method, gammas, batch) in
        [("down", "quantspec", &[4], 3), ("qkv,o,gate-up,down", "w4", &[16], 1), ("o,gate-up", "quantspec", &[7], 8)]
    {
        let sensitive = Sensitive::named(names).expect("kinds");
        all.push(Case { sensitive, ..Case::new(method, Pages::All, gammas, batch) });
    }
    for (view, pages) in [(View::Full, Pages::Window(3)), (View::Both, Pages::Best(3)), (View::Upper, Pages::All)] {
        all.push(Case { draft_model_view: Some(view), ..Case::new("draft-model", pages, &[5], 3) });
    }
    // Two threads decode a small model no faster than one, and take twice the cores.
    all[selected..].iter_mut().step_by(4).for_each(|case| case.threads = 2);
    all
}

/// A draft model that reads a page window drafts the same tokens, whether its cache keeps all pages or the window alone. `load`
/// loads the checkpoint that drafts for itself, with `options` for the target, whose cache is in FP16.
pub(crate) fn a_window_drafts_as_the_whole_cache<B: Backend + 'static>(
    load: impl Fn(&Options) -> B,
    options: &Options,
    window: usize,
    requests: &[Request],
) {
    let pages = Pages::Window(window);
    let drafted = |kept_pages: usize| {
        let network = load(&Options { kept_pages, step_rows: draft::CATCH_UP_ROWS, ..options.clone() });
        let held = network.page_pool().pages();
        let drafter = DraftModel::new(network, View::Full, &[pages], options.capacity, options.block_rows);
        let method = Method { target: View::Full, drafter: Some(Box::new(drafter)), policy: Policy::fixed(4) };
        let mut engine = Engine::new(load(options), method, options.slots, options.capacity, options.block_rows);
        let case = Case { target: View::Full, ..Case::new("draft-model", pages, &[4], requests.len()) };
        let answers = decode(&mut engine, &case, requests);
        (answers, engine.stats().drafted_tokens(), engine.stats().accepted_tokens(), held)
    };
    let (answers, proposed, accepted, all) = drafted(usize::MAX);
    assert!(0 < accepted && accepted < proposed, "drafts over {window} pages err: {accepted} of {proposed}");
    let kept = kept_of_window(window, None);
    assert!(all > options.slots * kept, "pages are left out");
    assert!(drafted(kept) == (answers, proposed, accepted, options.slots * kept));
}

/// Every `count`-th case, from the `index`-th on.
pub(crate) fn share(cases: &[Case], index: usize, count: usize) -> Vec<Case> {
    cases.iter().skip(index).step_by(count).cloned().collect()
}

#[test]
fn every_method_has_a_case() {
    for entry in draft::METHODS {
        let drafts = !matches!(entry.source, draft::Source::Nothing);
        for batch in if drafts { &[1, 3][..] } else { &[8] } {
            let found = cases(false).iter().any(|case| case.method == entry.name && case.batch == *batch);
            assert!(found, "no case of method {} in a batch of {batch}", entry.name);
        }
    }
}

#[test]
fn the_selection_meets_every_pair() {
    let sizes = [methods().len(), PAGES.len(), GAMMAS.len(), BATCHES.len(), THREADS.len()];
    for (a, b) in (0..5).flat_map(|b| (0..b).map(move |a| (a, b))) {
        for (i, j) in (0..sizes[a]).flat_map(|i| (0..sizes[b]).map(move |j| (i, j))) {
            let meet = selection(false).iter().any(|places| (places[a], places[b]) == (i, j));
            assert!(meet, "value {i} of axis {a} never meets value {j} of axis {b}");
        }
    }
    // In each half of the cases, each of eight requests is decoded alone, with two neighbours and with seven.
    for cases in [0, 1].map(|index| share(&cases(false), index, 2)) {
        for (batch, at) in BATCHES.into_iter().flat_map(|batch| (0..8).map(move |at| (batch, at))) {
            let mut chosen = cases.iter().zip(chosen(&cases, 8));
            let met = chosen.any(|(case, chosen)| case.gamma_max() > 0 && case.batch == batch && chosen.contains(&at));
            assert!(met, "request {at} never runs in a batch of {batch}");
        }
    }
}
