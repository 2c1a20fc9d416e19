//! Sequences whose prompts begin alike read the same pages. The cases are the same for every backend.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use quantspec_core::ErrorKind;
use quantspec_core::cache::G;
use quantspec_core::logprob::Logprob;
use quantspec_core::sample::Sampler;
use quantspec_model::backend::Backend;
use quantspec_model::engine::Engine;

/// Tokens of an answer: most answers complete a page.
pub(crate) const NEW_TOKENS: usize = 100;
/// Tokens of the longest sequence, for documents of `document` tokens.
pub(crate) const fn capacity(document: usize) -> usize {
    document + 2 * NEW_TOKENS + 80
}

/// One sequence and its answer so far.
struct Answer {
    slot: usize,
    tokens: Vec<u32>,
    logprobs: Vec<Logprob>,
}

/// A round of the sequences that are not at their ends.
fn round<B: Backend>(engine: &mut Engine<B>, answers: &mut [Answer]) {
    let unfinished = answers.iter().filter(|answer| answer.tokens.len() < NEW_TOKENS);
    let gammas: Vec<_> = unfinished.map(|answer| (answer.slot, engine.choose_gamma(answer.slot))).collect();
    if gammas.is_empty() {
        return;
    }
    engine.draft(&gammas).expect("draft");
    for emitted in engine.verify().expect("verify") {
        let answer = answers.iter_mut().find(|answer| answer.slot == emitted.slot).expect("its slot");
        answer.tokens.extend(emitted.tokens);
        answer.logprobs.extend(engine.take_logprobs(answer.slot).expect("log-probabilities"));
    }
}

/// Adds a prompt and processes it in chunks, with a round of the others after each.
fn begin<B: Backend>(engine: &mut Engine<B>, prompt: &[u32], others: &mut [Answer]) -> Answer {
    assert!(engine.has_room(prompt, NEW_TOKENS));
    let slot = engine.add(prompt, Sampler::greedy(), NEW_TOKENS).expect("add");
    engine.want_logprobs(slot, 1).expect("log-probabilities");
    loop {
        let first = engine.prefill_chunk(slot, prompt.len(), &mut |_, _| ()).expect("prefill");
        if let Some(first) = first {
            return Answer { slot, tokens: vec![first], logprobs: engine.take_logprobs(slot).expect("its first") };
        }
        round(engine, others);
    }
}

fn finish<B: Backend>(engine: &mut Engine<B>, answers: &mut [Answer]) {
    while answers.iter().any(|answer| answer.tokens.len() < NEW_TOKENS) {
        round(engine, answers);
    }
}

/// Tokens and log-probabilities are those of the same sequence alone, and only pages that no other sequence has are taken.
///
/// `open` makes an engine of some slots and pages; `document` has whole pages and 76 tokens more, at least eight pages;
/// `bad` is a token with which a prompt fails.
pub(crate) fn changes_no_bit<B: Backend>(
    open: &dyn Fn(usize, usize) -> Engine<B>,
    document: &[u32],
    tail: &dyn Fn(usize, u64) -> Vec<u32>,
    bad: u32,
) {
    let shared = document.len() / G;
    assert!(shared >= 8 && document.len() % G == 76, "a document of {} tokens", document.len());
    let alone = |prompt: &[u32]| {
        let mut engine = open(1, usize::MAX);
        let mut answers = [begin(&mut engine, prompt, &mut [])];
        finish(&mut engine, &mut answers);
        let [Answer { tokens, logprobs, .. }] = answers;
        assert_eq!((tokens.len(), logprobs.len()), (NEW_TOKENS, NEW_TOKENS));
        (tokens, logprobs)
    };
    let mut prompts = vec![
        [document, &tail(20, 1)].concat(),
        [document, &tail(33, 2)].concat(),
        [&document[..300], &tail(20, 3)].concat(),
        document[..8 * G].to_vec(),
    ];
    // The next turn of the first conversation: of its answer's pages none is shared, as decoding computed them.
    let mut expected = vec![alone(&prompts[0])];
    prompts.push([&prompts[0][..], &expected[0].0, &tail(20, 4)].concat());
    expected.extend(prompts[1..].iter().map(|prompt| alone(prompt)));
    let wanted: Vec<usize> = prompts.iter().map(|prompt| (prompt.len() + NEW_TOKENS) / G).collect();
    let taken: Vec<usize> = wanted.iter().zip([0, shared, 2, 8, shared]).map(|(all, shared)| all - shared).collect();
    let pool = taken.iter().sum::<usize>();
    assert!(taken[0] + wanted[1] > pool, "the first two do not fit without sharing");

    let mut engine = open(5, pool);
    // Pages are shared when they are complete, not before.
    let slot = engine.add(&prompts[0], Sampler::greedy(), NEW_TOKENS).expect("add");
    assert!(!engine.has_room(&prompts[1], NEW_TOKENS), "the first prompt has not been processed");
    let refused = engine.add(&prompts[1], Sampler::greedy(), NEW_TOKENS).expect_err("no pages");
    assert!(refused.kind == ErrorKind::Usage && refused.message.contains("are free"), "{}", refused.message);
    engine.finish(slot);

    let mut answers: Vec<Answer> = Vec::new();
    for (index, prompt) in prompts.iter().enumerate() {
        if index == 4 {
            // The first answer has completed the page after its prompt's.
            while answers[0].tokens.len() < 40 {
                round(&mut engine, &mut answers);
            }
            // A cancelled prompt and a failed one do not change the pages of the others.
            let free = engine.page_pool().free();
            let slot = engine.add(prompt, Sampler::greedy(), NEW_TOKENS).expect("add");
            assert_eq!(engine.prefill_chunk(slot, 1, &mut |_, _| ()).expect("a chunk"), None);
            engine.finish(slot);
            assert_eq!(engine.page_pool().free(), free);
            let failing = [document, &tail(40, 5), &[bad]].concat();
            let slot = engine.add(&failing, Sampler::greedy(), NEW_TOKENS).expect("add");
            let failed = engine.prefill(slot, &mut |_, _| ()).expect_err("a failure");
            assert_eq!(failed.kind, ErrorKind::NotFinite);
            engine.finish(slot);
            assert_eq!(engine.page_pool().free(), free);
        }
        let answer = begin(&mut engine, prompt, &mut answers);
        answers.push(answer);
        let left = taken[index + 1..].iter().sum::<usize>();
        assert_eq!(engine.page_pool().free(), left, "pages after prompt {index}");
    }
    // The sequence that wrote the document's pages ends. Another one overwrites the pages that only this one read.
    let first = answers.remove(0);
    engine.finish(first.slot);
    let own = wanted[0] - shared;
    assert_eq!(engine.page_pool().free(), own, "the document's pages are read by others");
    let stranger = tail(own * G - 40, 6);
    let expected_stranger = alone(&stranger);
    let mut strangers = vec![begin(&mut engine, &stranger, &mut answers)];
    assert_eq!(engine.page_pool().free(), 0);
    finish(&mut engine, &mut strangers);
    finish(&mut engine, &mut answers);
    assert!((strangers[0].tokens.clone(), strangers[0].logprobs.clone()) == expected_stranger, "the stranger");
    for (index, answer) in answers.iter().enumerate() {
        let (tokens, logprobs) = &expected[index + 1];
        assert_eq!(&answer.tokens, tokens, "sequence {}", index + 1);
        assert!(&answer.logprobs == logprobs, "bits of sequence {}", index + 1);
    }
    let so_far = first.tokens.len();
    assert_eq!((&first.tokens[..], first.logprobs.len()), (&expected[0].0[..so_far], so_far));
    answers.iter().chain(&strangers).for_each(|answer| engine.finish(answer.slot));
    assert_eq!(engine.page_pool().free(), pool);
}
