//! Requests that the engine refuses, and that a refusal changes nothing. Correct decoding is tested by the stories and, with
//! the fast backends, by the laws of exactness.
#![cfg(feature = "reference")]

#[path = "support/tiny.rs"]
mod tiny;

use proptest::prelude::*;
use quantspec_core::cache::{BUFFER_TOKENS, G, GAMMA_MAX};
use quantspec_core::config::{DraftWeights, Pages, Planes, View, Weights};
use quantspec_core::grammar::{Grammar, Mask};
use quantspec_core::policy::Policy;
use quantspec_core::sample::{Accept, Sampler};
use quantspec_core::stop::Stop;
use quantspec_core::verify::DraftDistribution;
use quantspec_core::{Error, ErrorKind};
use quantspec_model::backend::{DeviceSeconds, DraftConfig, Hooks, KvCache, Options, Turn};
use quantspec_model::checkpoint::Checkpoint;
use quantspec_model::draft::{
    CATCH_UP_ROWS, Copying, DraftModel, Drafter, Needs, Ngram, Proposed, SelfQuantised, Target,
};
use quantspec_model::engine::{Engine, Method};
use quantspec_model::forward::{self, Guess};
use quantspec_model::prompt_cache::PromptCache;
use quantspec_model::reference::ReferenceBackend;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

fn engine(gamma: usize, slots: usize, capacity: usize) -> Engine<ReferenceBackend> {
    engine_of(&tiny::Folder::valid(), gamma, slots, capacity)
}

fn engine_of(folder: &tiny::Folder, gamma: usize, slots: usize, capacity: usize) -> Engine<ReferenceBackend> {
    let checkpoint = Checkpoint::open(folder.path()).expect("checkpoint");
    let plan = DraftConfig { weights: Weights::Draft, view: View::Upper, pages: Pages::All };
    let options = Options {
        planes: Planes::of(&[View::Both]),
        step_rows: slots * (gamma + 1),
        block_rows: 16,
        ..Options::new(slots, capacity)
    };
    let backend = ReferenceBackend::load(&checkpoint, &options, Hooks::default()).expect("load");
    let method = Method {
        target: View::Both,
        drafter: (gamma > 0).then(|| SelfQuantised::boxed(plan)),
        policy: Policy::fixed(gamma),
    };
    Engine::new(backend, method, slots, capacity, 16)
}

fn add(engine: &mut Engine<ReferenceBackend>, prompt: &[u32], new: usize) -> Result<usize, ErrorKind> {
    engine.add(prompt, Sampler::greedy(), new).map_err(|error| error.kind)
}

fn prefill(engine: &mut Engine<ReferenceBackend>, slot: usize) -> Result<u32, ErrorKind> {
    engine.prefill(slot, &mut |_, _| ()).map_err(|error| error.kind)
}

#[test]
fn unusable_prompts_are_refused() {
    let mut engine = engine(4, 2, 40);
    assert_eq!(add(&mut engine, &[], 5), Err(ErrorKind::Usage));
    assert_eq!(add(&mut engine, &[1, 16], 5), Err(ErrorKind::Model));
    assert_eq!(add(&mut engine, &[1], 0), Err(ErrorKind::Usage));
    assert_eq!(add(&mut engine, &[1; 30], 11), Err(ErrorKind::DoesNotFit));
    assert_eq!(add(&mut engine, &[1], usize::MAX), Err(ErrorKind::DoesNotFit));
    // A hint names what can be done; in an engine of 40 tokens neither side may take all.
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
    // An exactly full engine is accepted, and refusals took no slot.
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
    // Five tokens are left: γ 4 may emit all of them, and the policy's γ becomes 4. Then nothing is left to do.
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

/// The backend has room for one prompt, and would mix two.
#[test]
fn prompts_are_prefilled_one_after_the_other() {
    let mut engine = engine(4, 2, 40);
    // Two blocks each.
    let slots = [[1; 20], [2; 20]].map(|prompt| add(&mut engine, &prompt, 6).expect("add"));
    let mut chunk = |slot| engine.prefill_chunk(slot, 1, &mut |_, _| ()).map_err(|error| error.kind);
    assert_eq!(chunk(slots[0]), Ok(None));
    assert_eq!(chunk(slots[1]), Err(ErrorKind::Usage));
    while chunk(slots[0]).expect("prefill").is_none() {}
    assert_eq!(chunk(slots[1]), Ok(None));
    engine.finish(slots[1]);
    let again = add(&mut engine, &[3; 20], 6).expect("add");
    prefill(&mut engine, again).expect("an ended sequence leaves room");
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
    let plan = DraftConfig { weights: Weights::Draft, view: View::Upper, pages: Pages::All };
    // No margin matters next to such a scale: each token halves the probability.
    for (enough, drafted) in [(0.0, 4), (0.2, 3), (0.4, 2), (0.9, 1)] {
        let stop = Stop { min_acceptance: enough, margin_scale: 1e9 };
        let mut turns = [Turn { stop: Some(stop), ..Turn::new(slot, 3, 4, Sampler::greedy()) }];
        forward::draft(engine.backend(), &plan, &mut turns).expect("draft");
        assert_eq!((turns[0].gamma, turns[0].margins.len()), (drafted, drafted));
        assert!(turns[0].margins.iter().all(|margin| *margin >= 0.0));
    }
}

/// A draft deferred to the verification, as on a GPU, has the same tokens and verdict.
#[test]
fn a_draft_may_be_left_to_the_verification() {
    let plan = DraftConfig { weights: Weights::Draft, view: View::Upper, pages: Pages::All };
    let run = |left: bool| {
        let mut engine = varied(4, 1, 40);
        let slot = add(&mut engine, &[1, 2, 3], 9).expect("add");
        prefill(&mut engine, slot).expect("prefill");
        let mut turns = [Turn::new(slot, 3, 4, Sampler::greedy())];
        match left {
            true => turns[0].to_draft = Some(plan),
            false => forward::draft(engine.backend(), &plan, &mut turns).expect("draft"),
        }
        let verdicts = forward::verify(engine.backend(), View::Both, &turns).expect("verify");
        let window = engine.backend().window(slot, 5).expect("window");
        assert!(turns[0].margins.is_empty(), "no margins were requested");
        (verdicts, window)
    };
    assert_eq!(run(true), run(false));
    assert!(run(true).1[1..].iter().any(|&token| token != 0), "nothing was drafted");
}

/// A device's time for a round replaces the host's, which is much shorter here.
#[test]
fn the_policy_counts_the_seconds_of_a_device() {
    let last_gammas = |drafting: f64| {
        let plan = DraftConfig { weights: Weights::Draft, view: View::Upper, pages: Pages::All };
        let mut engine = engine(4, 1, 200);
        let policy = Policy::auto(4);
        let method = Method { target: View::Both, drafter: Some(SelfQuantised::boxed(plan)), policy };
        engine.set_method(method).expect("method");
        engine.backend().device_seconds = Some(DeviceSeconds { drafting, verification: 1.0 });
        // The model answers 0 to everything, so every drafted token is accepted.
        let slot = add(&mut engine, &[1, 2, 3], 180).expect("add");
        prefill(&mut engine, slot).expect("prefill");
        let rounds = (0..30).map(|_| {
            let gamma = engine.choose_gamma(slot);
            round(&mut engine, slot, gamma);
            gamma
        });
        rounds.skip(20).collect::<Vec<_>>()
    };
    assert_eq!(last_gammas(0.01), [4; 10]);
    assert_eq!(last_gammas(100.0), [0; 10]);
}

fn lookup(gamma: usize) -> Method {
    Method { target: View::Both, drafter: Some(Box::<Ngram>::default()), policy: Policy::fixed(gamma) }
}

/// A round in which the slot may draft up to `gamma` tokens.
fn round(engine: &mut Engine<ReferenceBackend>, slot: usize, gamma: usize) -> Vec<u32> {
    engine.draft(&[(slot, gamma)]).expect("draft");
    engine.verify().expect("verify").remove(0).tokens
}

#[test]
fn a_drafter_gets_the_text_whenever_it_begins() {
    // The model answers 0 to everything.
    let mut engine = engine(4, 1, 60);
    let slot = add(&mut engine, &[1, 2, 0, 0, 3], 50).expect("add");
    assert_eq!(prefill(&mut engine, slot), Ok(0));
    round(&mut engine, slot, 0);
    // The text now ends with two zeros, which the prompt contains, followed by 3; the answer has none yet.
    engine.set_method(lookup(4)).expect("method");
    assert_eq!(round(&mut engine, slot, 4), [0]);
    assert_eq!(engine.stats().drafted_tokens(), 4, "the prompt's continuation, refused");
    // The newest occurrence overlaps the end and continues as far as requested.
    assert_eq!(round(&mut engine, slot, 3), [0; 4]);
    assert_eq!(round(&mut engine, slot, 4), [0; 5]);
    assert_eq!((engine.stats().drafted_tokens(), engine.stats().accepted_tokens()), (11, 7));
    // The answer restarts, and its end now has no match in the text.
    engine.reset_stats();
    assert!(engine.restart(slot, 7, Sampler::greedy()).expect("restart"));
    assert_eq!(round(&mut engine, slot, 4), [0]);
    assert_eq!(engine.stats().drafted_tokens(), 0);
    // A slot's next sequence starts without the previous text.
    engine.finish(slot);
    let slot = add(&mut engine, &[5, 6], 9).expect("add");
    prefill(&mut engine, slot).expect("prefill");
    assert_eq!((round(&mut engine, slot, 4), engine.stats().drafted_tokens()), (vec![0], 0));
}

#[test]
fn rejection_needs_no_distribution_of_drafts_that_are_certain() {
    let mut engine = engine(4, 1, 60);
    engine.set_method(lookup(4)).expect("method");
    // The logits are so far apart that only 0 is ever drawn.
    let sampler = Sampler { temperature: 1.0, seed: 3, accept: Accept::Rejection, ..Sampler::greedy() };
    let slot = engine.add(&[1, 0, 0, 3], sampler, 30).expect("add");
    assert_eq!(prefill(&mut engine, slot), Ok(0));
    assert_eq!(round(&mut engine, slot, 0), [0]);
    assert_eq!(round(&mut engine, slot, 2), [0], "3 was proposed and refused");
    assert_eq!(round(&mut engine, slot, 2), [0; 3]);
}

#[test]
fn an_answer_restarts_while_the_buffer_holds_what_its_first_row_reads() {
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
    // Three prompt tokens: the ring is filled once, then its oldest token is overwritten.
    let answer = steps(&mut engine, BUFFER_TOKENS - 3);
    assert!(engine.restart(slot, first, Sampler::greedy()).expect("restart"));
    assert_eq!(steps(&mut engine, BUFFER_TOKENS - 3), answer);
    steps(&mut engine, 1);
    assert!(!engine.restart(slot, first, Sampler::greedy()).expect("restart"));
    assert_eq!(engine.restart(slot, 16, Sampler::greedy()).expect_err("no such token").kind, ErrorKind::Model);
}

/// Lengths of prompts whose answers cross the end of a page, the point where the first page becomes visible, and the end of
/// the ring.
const PROMPTS: [usize; 4] = [3, 2 * G - 8, 2 * G + 20, BUFFER_TOKENS - 9];

/// Tokens of each answer.
const ANSWER: usize = 30;

/// Slots of an engine to which answers are added and from which some are removed.
const SLOTS: usize = 3;

/// The valid checkpoint with random weights: its texts vary, and its drafts err sometimes.
fn varied(gamma: usize, slots: usize, capacity: usize) -> Engine<ReferenceBackend> {
    engine_of(&varied_folder(), gamma, slots, capacity)
}

fn varied_folder() -> tiny::Folder {
    folder_of(&[])
}

/// The varied checkpoint with other values of some weights, by tensor and index.
fn folder_of(weights: &[(&str, usize, f32)]) -> tiny::Folder {
    let (header, bytes) = tiny::header(&tiny::tensors());
    let mut file = tiny::file(&header.to_string(), bytes);
    let data = file.len() - bytes;
    let mut noise = 0x9e37_79b9_7f4a_7c15_u64;
    // Layers of twice the size of embedding and head, so that four bits lose more.
    let head = bytes - 16 * 8 * 4;
    for (at, value) in file[data..].chunks_exact_mut(4).enumerate() {
        noise ^= noise << 13;
        noise ^= noise >> 7;
        noise ^= noise << 17;
        let unit = (noise >> 40) as f32 / (1 << 23) as f32 - 1.0;
        let scale = if (16 * 8..head / 4).contains(&at) { 2.0 } else { 1.0 };
        value.copy_from_slice(&(scale * unit).to_le_bytes());
    }
    for &(name, index, value) in weights {
        let start = header[name]["data_offsets"][0].as_u64().expect("an offset") as usize;
        file[data + start + 4 * index..][..4].copy_from_slice(&value.to_le_bytes());
    }
    let folder = tiny::Folder::valid();
    folder.write("model.safetensors", &file);
    folder
}

#[test]
fn a_cached_prefix_is_reused_if_no_angle_depends_on_later_tokens() {
    let text = |tail: usize| -> Vec<u32> {
        let document = (0..290).map(|i: u32| (i * i + 3 * i) % 16);
        document.chain((0..tail as u32).map(|i| (7 * i + tail as u32) % 16)).collect()
    };
    for (dynamic, expected) in [(false, [0, 2 * G, 2 * G, 2 * G]), (true, [0, 0, 2 * G, 2 * G])] {
        let folder = varied_folder();
        let mut config = tiny::config();
        config["max_position_embeddings"] = 1024.into();
        if dynamic {
            config["max_position_embeddings"] = 128.into();
            config["rope_scaling"] = serde_json::json!({"rope_type": "dynamic", "factor": 4.0});
        }
        folder.write("config.json", config.to_string().as_bytes());
        let mut plain = engine_of(&folder, 2, 1, 400);
        let mut kept = engine_of(&folder, 2, 1, 400);
        let cache = PromptCache::in_memory(kept.backend(), usize::MAX);
        kept.cache_prompts(cache);
        for (tail, expected) in [5, 11, 5, 11].into_iter().zip(expected) {
            let answers = [&mut plain, &mut kept].map(|engine| {
                engine.reset_stats();
                let slot = add(engine, &text(tail), ANSWER).expect("add");
                let mut answer = vec![prefill(engine, slot).expect("prefill")];
                while answer.len() < ANSWER {
                    answer.extend(round(engine, slot, engine.choose_gamma(slot)));
                }
                engine.finish(slot);
                (answer, engine.stats().reused_tokens())
            });
            assert_eq!(answers[0].0, answers[1].0, "dynamic {dynamic}, {tail}");
            assert_eq!([answers[0].1, answers[1].1], [0, expected], "dynamic {dynamic}, {tail}");
        }
    }
}

#[test]
fn pages_are_shared_if_no_angle_depends_on_later_tokens() {
    let text = |tail: u32| -> Vec<u32> { (0..290).map(|i: u32| (i * i + 3 * i) % 16).chain(0..tail).collect() };
    for dynamic in [false, true] {
        let folder = varied_folder();
        let mut config = tiny::config();
        config["max_position_embeddings"] = if dynamic { 128 } else { 1024 }.into();
        if dynamic {
            config["rope_scaling"] = serde_json::json!({"rope_type": "dynamic", "factor": 4.0});
        }
        folder.write("config.json", config.to_string().as_bytes());
        let mut engine = engine_of(&folder, 2, 4, 400);
        // Pages that each sequence takes. The third has the length of the first; the last differs within the second page.
        let mut other = text(5);
        other[200] = 15 - other[200];
        let expected = [3, if dynamic { 3 } else { 1 }, 1, if dynamic { 3 } else { 2 }];
        for (prompt, expected) in [text(5), text(11), text(5), [other, vec![1]].concat()].into_iter().zip(expected) {
            let free = engine.page_pool().free();
            let slot = add(&mut engine, &prompt, 3 * G - prompt.len()).expect("add");
            assert_eq!(free - engine.page_pool().free(), expected, "dynamic {dynamic}, {} tokens", prompt.len());
            prefill(&mut engine, slot).expect("prefill");
        }
    }
}

/// A prompt, and its sampler: greedy or replay.
fn request(index: usize) -> (Vec<u32>, Sampler) {
    let prompt = (0..PROMPTS[index / 2]).map(|i| ((i * i + 3 * i + index) % 16) as u32).collect();
    let replay = Sampler { temperature: 0.5, seed: index as u64, accept: Accept::Replay, ..Sampler::greedy() };
    (prompt, if index.is_multiple_of(2) { replay } else { Sampler::greedy() })
}

/// The answers of plain decoding, one sequence at a time.
fn plain() -> &'static Vec<Vec<u32>> {
    static TEXTS: OnceLock<Vec<Vec<u32>>> = OnceLock::new();
    TEXTS.get_or_init(|| {
        let answer = |index: usize| {
            let (prompt, sampler) = request(index);
            let mut engine = varied(0, 1, prompt.len() + ANSWER);
            let slot = engine.add(&prompt, sampler, ANSWER).expect("add");
            let mut text = vec![prefill(&mut engine, slot).expect("prefill")];
            while text.len() < ANSWER {
                engine.draft(&[(slot, 0)]).expect("draft");
                text.extend(&engine.verify().expect("verify")[0].tokens);
            }
            text
        };
        (0..2 * PROMPTS.len()).map(answer).collect()
    })
}

#[test]
fn compared_texts_vary_and_their_drafts_err() {
    let (mut drafted, mut accepted) = (0, 0);
    for (index, text) in plain().iter().enumerate() {
        let mut tokens = text.clone();
        tokens.sort_unstable();
        tokens.dedup();
        assert!(tokens.len() > 4, "answer {index} is {text:?}");
        let (prompt, sampler) = request(index);
        let mut engine = varied(4, 1, prompt.len() + ANSWER);
        let slot = engine.add(&prompt, sampler, ANSWER).expect("add");
        let mut found = vec![prefill(&mut engine, slot).expect("prefill")];
        while found.len() < ANSWER {
            let gamma = engine.choose_gamma(slot);
            engine.draft(&[(slot, gamma)]).expect("draft");
            found.extend(&engine.verify().expect("verify")[0].tokens);
        }
        assert_eq!(found, *text, "answer {index}");
        drafted += engine.stats().drafted_tokens();
        accepted += engine.stats().accepted_tokens();
    }
    assert!(5 * accepted > drafted && 5 * accepted < 4 * drafted, "{accepted} of {drafted} were accepted");
}

/// A slot for each request, and its prompt's first token.
fn begin<const N: usize>(engine: &mut Engine<ReferenceBackend>, requests: [usize; N]) -> [(usize, Vec<u32>); N] {
    requests.map(|index| {
        let (prompt, sampler) = request(index);
        let slot = engine.add(&prompt, sampler, ANSWER).expect("add");
        (slot, vec![prefill(engine, slot).expect("prefill")])
    })
}

#[test]
fn a_sequence_may_end_between_draft_and_verification() {
    let mut engine = varied(4, 2, PROMPTS[3] + ANSWER);
    let [(first, _), (second, text)] = begin(&mut engine, [3, 6]);
    engine.draft(&[(first, 3), (second, 4)]).expect("draft");
    engine.finish(first);
    let round = engine.verify().expect("verify");
    assert_eq!((round.len(), round[0].slot), (1, second));
    let text = [text, round[0].tokens.clone()].concat();
    assert_eq!(text, plain()[6][..text.len()]);
    // The last one ends: nothing is left to verify.
    engine.draft(&[(second, 2)]).expect("draft");
    engine.finish(second);
    assert_eq!(engine.verify().expect_err("nothing drafted").kind, ErrorKind::Usage);
}

/// Allows every token until the answer has [`Limited::TOKENS`] of them, and then fails, whatever is drafted.
#[derive(Debug, Default)]
struct Limited(AtomicUsize);

impl Limited {
    const TOKENS: usize = 9;
}

impl Grammar for Limited {
    fn mask(&self, drafted: &[u32]) -> quantspec_core::Result<Option<Mask>> {
        match self.0.load(Relaxed) + drafted.len() < Limited::TOKENS {
            true => Ok(None),
            false => Err(Error::new(ErrorKind::Input, "too much work", "allow more")),
        }
    }

    fn advance(&self, tokens: &[u32]) {
        self.0.fetch_add(tokens.len(), Relaxed);
    }
}

/// Proposes tokens without any relation to the text.
#[derive(Debug)]
struct Nonsense(u32);

impl Drafter for Nonsense {
    fn needs(&self) -> Needs {
        Needs::default()
    }

    fn prefill(&mut self, _: usize, _: &[u32], _: u32) -> quantspec_core::Result<()> {
        Ok(())
    }

    fn propose(&mut self, target: &mut dyn Target, turns: &mut [Turn], _: usize) -> quantspec_core::Result<Proposed> {
        for turn in turns.iter_mut() {
            let tokens: Vec<u32> = (0..turn.gamma as u32).map(|i| (7 * i + self.0) % 16).collect();
            (turn.q, self.0) = (DraftDistribution::OneHot, self.0 + 5);
            target.set_proposed(turn.slot, &tokens)?;
        }
        Ok(Proposed { steps: 1, ..Proposed::default() })
    }

    fn commit(&mut self, _: usize, _: &[u32]) -> quantspec_core::Result<()> {
        Ok(())
    }

    fn close(&mut self, _: usize) {}
}

#[test]
fn a_drafter_cannot_change_the_text() {
    let mut engine = varied(4, 1, PROMPTS[2] + ANSWER);
    let method = Method { target: View::Both, drafter: Some(Box::new(Nonsense(0))), policy: Policy::fixed(4) };
    engine.set_method(method).expect("method");
    let [(slot, mut text)] = begin(&mut engine, [5]);
    while text.len() < ANSWER {
        let gamma = engine.choose_gamma(slot);
        text.extend(round(&mut engine, slot, gamma));
    }
    assert_eq!(text, plain()[5]);
    assert!(engine.stats().drafted_tokens() > 4 * engine.stats().accepted_tokens());
}

/// Drafts with the target's weights, and guesses one token always.
#[derive(Debug)]
struct Guessing(u32);

impl Guess for Guessing {
    fn guess(&mut self, _: usize, most: usize) -> Vec<u32> {
        vec![self.0; most]
    }

    fn chosen(&mut self, _: usize, _: usize, _: &[u32]) {}
}

impl Drafter for Guessing {
    fn needs(&self) -> Needs {
        Needs::default()
    }

    fn prefill(&mut self, _: usize, _: &[u32], _: u32) -> quantspec_core::Result<()> {
        Ok(())
    }

    fn propose(&mut self, target: &mut dyn Target, turns: &mut [Turn], _: usize) -> quantspec_core::Result<Proposed> {
        let config = DraftConfig { weights: Weights::Full, view: View::Both, pages: Pages::All };
        target.draft_guessed(&config, turns, self)?;
        Ok(Proposed { steps: 1, ..Proposed::default() })
    }

    fn commit(&mut self, _: usize, _: &[u32]) -> quantspec_core::Result<()> {
        Ok(())
    }

    fn close(&mut self, _: usize) {}
}

#[test]
fn a_guess_that_is_not_finite_ends_no_draft() {
    let capacity = PROMPTS[3] + ANSWER;
    let drafted = |guess: u32, bad: u32| {
        let mut engine = engine_of(&overflowing(bad), 4, 1, capacity);
        let drafter: Box<dyn Drafter> = Box::new(Guessing(guess));
        engine
            .set_method(Method { target: View::Both, drafter: Some(drafter), policy: Policy::fixed(4) })
            .expect("method");
        let [(slot, mut text)] = begin(&mut engine, [6]);
        while text.len() < ANSWER {
            let gamma = engine.choose_gamma(slot);
            engine.draft(&[(slot, gamma)]).expect("draft");
            text.extend(&engine.verify().ok()?[0].tokens);
        }
        Some((text, engine.stats().drafted_tokens()))
    };
    // The prompts have even tokens only. An odd one that the answer does without:
    let (bad, expected) = (1..16).step_by(2).find_map(|bad| Some((bad, drafted(0, bad)?))).expect("an answer");
    assert!(expected.1 > ANSWER / 2);
    assert_eq!(drafted(bad, bad).expect("an answer"), expected);
}

/// Guesses a draft that is known, and counts the tokens that the network chose.
struct Known<'a> {
    drafted: &'a [u32],
    chosen: usize,
}

impl Guess for Known<'_> {
    fn guess(&mut self, _: usize, most: usize) -> Vec<u32> {
        self.drafted[self.chosen..][..most].to_vec()
    }

    fn chosen(&mut self, _: usize, _: usize, tokens: &[u32]) {
        self.chosen += tokens.len();
    }
}

#[test]
fn guesses_beyond_the_end_of_a_draft_are_not_right() {
    let mut engine = varied(4, 1, 40);
    let slot = add(&mut engine, &[1, 2, 3], 9).expect("add");
    prefill(&mut engine, slot).expect("prefill");
    let config = DraftConfig { weights: Weights::Draft, view: View::Upper, pages: Pages::All };
    let mut turns = [Turn::new(slot, 3, 4, Sampler::greedy())];
    forward::draft_now(engine.backend(), &config, &mut turns, None).expect("draft");
    let drafted = engine.backend().window(slot, 5).expect("window").split_off(1);
    // One step checks all guesses; its margins end the draft, as in the test above.
    for (enough, tokens) in [(0.0, 4), (0.2, 3), (0.4, 2), (0.9, 1)] {
        let stop = Stop { min_acceptance: enough, margin_scale: 1e9 };
        let mut turns = [Turn { stop: Some(stop), ..Turn::new(slot, 3, 4, Sampler::greedy()) }];
        let mut known = Known { drafted: &drafted, chosen: 0 };
        forward::draft_now(engine.backend(), &config, &mut turns, Some(&mut known)).expect("draft");
        assert_eq!((turns[0].gamma, known.chosen), (tokens, tokens), "at least {enough}");
    }
}

/// Begins no text; counts the slots that are closed.
#[derive(Debug)]
struct Unready(Arc<AtomicUsize>);

impl Drafter for Unready {
    fn needs(&self) -> Needs {
        Needs::default()
    }

    fn prefill(&mut self, _: usize, _: &[u32], _: u32) -> quantspec_core::Result<()> {
        Err(Error::interrupted())
    }

    fn propose(&mut self, _: &mut dyn Target, _: &mut [Turn], _: usize) -> quantspec_core::Result<Proposed> {
        Err(Error::internal("no text was begun"))
    }

    fn commit(&mut self, _: usize, _: &[u32]) -> quantspec_core::Result<()> {
        Ok(())
    }

    fn close(&mut self, _: usize) {
        self.0.fetch_add(1, Relaxed);
    }
}

#[test]
fn a_method_that_cannot_begin_leaves_the_method_before_it() {
    let mut engine = varied(4, 1, PROMPTS[2] + ANSWER);
    let [(slot, mut text)] = begin(&mut engine, [5]);
    let closed = Arc::new(AtomicUsize::new(0));
    while text.len() < ANSWER {
        let gamma = engine.choose_gamma(slot);
        text.extend(round(&mut engine, slot, gamma));
        let drafter: Box<dyn Drafter> = Box::new(Unready(closed.clone()));
        let method = Method { target: View::Full, drafter: Some(drafter), policy: Policy::fixed(1) };
        assert_eq!(engine.set_method(method).expect_err("interrupted").kind, ErrorKind::Interrupted);
        // It begins anew if the method is set again.
        assert_eq!(closed.swap(0, Relaxed), 1);
    }
    assert_eq!(text, plain()[5]);
}

/// Drafts with a checkpoint.
fn draft_model(folder: &tiny::Folder, slots: usize, capacity: usize) -> Box<dyn Drafter> {
    let checkpoint = Checkpoint::open(folder.path()).expect("checkpoint");
    let options = Options {
        planes: Planes::of(&[View::Upper]),
        draft_weights: DraftWeights::None,
        step_rows: CATCH_UP_ROWS,
        block_rows: 16,
        ..Options::new(slots, capacity)
    };
    let backend = ReferenceBackend::load(&checkpoint, &options, Hooks::default()).expect("load");
    Box::new(DraftModel::new(backend, View::Upper, &[Pages::All], capacity, 16))
}

/// Drafters of every kind, for two slots.
fn drafters(capacity: usize) -> [Box<dyn Drafter>; 4] {
    let network =
        || SelfQuantised::boxed(DraftConfig { weights: Weights::Draft, view: View::Upper, pages: Pages::All });
    [network(), Copying::boxed(network()), Box::<Ngram>::default(), draft_model(&varied_folder(), 2, capacity)]
}

/// Rounds of slots 0 and 1 until slot 0 fails, then a plain one of each alone, then slot 1 to its end. Returns the kind of the
/// error.
fn decode_next_to_a_failing_one(engine: &mut Engine<ReferenceBackend>, texts: &mut [Vec<u32>; 2]) -> ErrorKind {
    let kind = loop {
        let gammas = [0, 1].map(|slot| (slot, engine.choose_gamma(slot)));
        engine.draft(&gammas).expect("draft");
        match engine.verify() {
            Ok(round) => round.into_iter().for_each(|emitted| texts[emitted.slot].extend(emitted.tokens)),
            Err(error) => break error.kind,
        }
    };
    engine.draft(&[(0, 0)]).expect("draft");
    assert_eq!(engine.verify().expect_err("the sequence at fault").kind, kind);
    texts[1].extend(round(engine, 1, 0));
    engine.finish(0);
    while texts[1].len() < ANSWER {
        let gamma = engine.choose_gamma(1);
        texts[1].extend(round(engine, 1, gamma));
    }
    kind
}

#[test]
fn a_sequence_that_fails_by_its_grammar_changes_no_token_of_its_neighbour() {
    let capacity = PROMPTS[3] + ANSWER;
    for drafter in drafters(capacity) {
        let name = format!("{drafter:?}");
        let mut engine = varied(2, 2, capacity);
        let method = Method { target: View::Both, drafter: Some(drafter), policy: Policy::fixed(2) };
        engine.set_method(method).expect("method");
        let (prompt, sampler) = request(5);
        let failing = engine.add(&prompt, sampler, ANSWER).expect("add");
        engine.constrain(failing, Box::<Limited>::default()).expect("constrain");
        let first = prefill(&mut engine, failing).expect("prefill");
        let [(_, text)] = begin(&mut engine, [6]);
        let mut texts = [vec![first], text];
        let kind = decode_next_to_a_failing_one(&mut engine, &mut texts);
        assert_eq!((kind, texts[0].len()), (ErrorKind::Input, Limited::TOKENS), "{name}");
        assert_eq!(texts[0], plain()[5][..Limited::TOKENS], "{name}");
        assert_eq!(texts[1], plain()[6], "{name}");
    }
}

/// The varied checkpoint, whose keys of one token overflow f16: channel 0 of the embedding belongs to that token alone.
fn overflowing(token: u32) -> tiny::Folder {
    let (embedding, token) = ("model.embed_tokens.weight", token as usize);
    let mut weights: Vec<_> = (0..16).map(|row| (embedding, 8 * row, 0.0)).collect();
    weights.extend((0..8).map(|channel| (embedding, 8 * token + channel, f32::from(u8::from(channel == 0)))));
    weights.push(("model.layers.0.input_layernorm.weight", 0, 1.0));
    weights.push(("model.layers.0.self_attn.k_proj.weight", 0, 6e4));
    folder_of(&weights)
}

#[test]
fn a_sequence_that_is_not_finite_changes_no_token_of_its_neighbour() {
    let capacity = PROMPTS[3] + ANSWER;
    let engine_of = |bad: u32, drafter: Option<Box<dyn Drafter>>| {
        let mut engine = engine_of(&overflowing(bad), 2, 2, capacity);
        let policy = Policy::fixed(if drafter.is_some() { 2 } else { 0 });
        engine.set_method(Method { target: View::Both, drafter, policy }).expect("method");
        engine
    };
    // The prompts have even tokens only. An odd one that the answer next to the failing sequence does without:
    let alone = |bad: u32| {
        let mut engine = engine_of(bad, None);
        let [(slot, mut text)] = begin(&mut engine, [6]);
        while text.len() < ANSWER {
            engine.draft(&[(slot, 0)]).expect("draft");
            text.extend(&engine.verify().ok()?[0].tokens);
        }
        Some((bad, text))
    };
    let (bad, expected) = (1..16).step_by(2).find_map(alone).expect("no answer does without some odd token");
    for drafter in drafters(capacity) {
        let name = format!("{drafter:?}");
        let mut engine = engine_of(bad, Some(drafter));
        let [(failing, _), (other, mut text)] = begin(&mut engine, [4, 6]);
        for _ in 0..3 {
            let gamma = engine.choose_gamma(other);
            text.extend(round(&mut engine, other, gamma));
        }
        assert!(engine.restart(failing, bad, request(4).1).expect("restart"), "{name}");
        let mut texts = [vec![bad], text];
        assert_eq!(decode_next_to_a_failing_one(&mut engine, &mut texts), ErrorKind::NotFinite, "{name}");
        assert_eq!(texts, [vec![bad], expected.clone()], "{name}");
    }
}

#[test]
fn a_draft_model_that_fails_ends_its_drafts_and_no_text() {
    let (prompt, sampler) = request(5);
    let answer = &plain()[5];
    // A token of the prompt, and the last one to appear in the first half of the answer.
    let appears = |at: &usize| !prompt.contains(&answer[*at]) && !answer[..*at].contains(&answer[*at]);
    let late = (2..ANSWER / 2).rfind(appears).expect("the answer has tokens of its own");
    for (token, drafts) in [(prompt[7], false), (answer[late], true)] {
        let capacity = prompt.len() + ANSWER;
        let mut engine = varied(4, 1, capacity);
        let drafter = Some(draft_model(&overflowing(token), 1, capacity));
        engine.set_method(Method { target: View::Both, drafter, policy: Policy::fixed(4) }).expect("method");
        let slot = engine.add(&prompt, sampler.clone(), ANSWER).expect("add");
        let mut text = vec![prefill(&mut engine, slot).expect("prefill")];
        while text.len() < ANSWER {
            let before = (text.len(), engine.stats().drafted_tokens());
            let gamma = engine.choose_gamma(slot);
            text.extend(round(&mut engine, slot, gamma));
            assert!(before.0 <= late + 1 || engine.stats().drafted_tokens() == before.1, "a draft after the failure");
        }
        assert_eq!(&text, answer, "token {token}");
        assert_eq!(engine.stats().drafted_tokens() > 0, drafts, "token {token}");
    }
}

/// Texts of requests 5 and 6, and tokens drafted and accepted. The first half of the first answer has a round after each of the
/// draft model's chunks of `most_rows` rows of the second prompt, and `chunks` rounds before it; `chunks` counts these chunks.
fn next_to_a_prompt_in_chunks(most_rows: usize, chunks: &mut usize) -> ([Vec<u32>; 2], [usize; 2]) {
    let capacity = PROMPTS[3] + ANSWER;
    let mut engine = varied(2, 2, capacity);
    let drafter = Some(draft_model(&varied_folder(), 2, capacity));
    engine.set_method(Method { target: View::Both, drafter, policy: Policy::fixed(2) }).expect("method");
    let [(slot, mut text)] = begin(&mut engine, [5]);
    let mut go_on = |engine: &mut Engine<ReferenceBackend>| {
        if text.len() < ANSWER / 2 {
            text.extend(round(engine, slot, 1));
        }
    };
    (0..*chunks).for_each(|_| go_on(&mut engine));
    let (prompt, sampler) = request(6);
    let other = engine.add(&prompt, sampler, ANSWER).expect("add");
    let first = loop {
        let mut done = 0;
        match engine.prefill_chunk(other, most_rows, &mut |rows, _| done = rows).expect("prefill") {
            Some(first) => break first,
            None if done == 0 => {
                *chunks += 1;
                go_on(&mut engine);
            }
            None => {}
        }
    };
    let mut texts = [text, vec![first]];
    while texts.iter().any(|text| text.len() < ANSWER) {
        for (slot, text) in [slot, other].into_iter().zip(&mut texts).filter(|(_, text)| text.len() < ANSWER) {
            let gamma = engine.choose_gamma(slot);
            text.extend(round(&mut engine, slot, gamma));
        }
    }
    (texts, [engine.stats().drafted_tokens(), engine.stats().accepted_tokens()])
}

#[test]
fn a_draft_models_prompt_is_read_in_chunks_between_rounds() {
    let mut chunks = 0;
    let found = next_to_a_prompt_in_chunks(1, &mut chunks);
    assert!(chunks > 4, "{chunks} chunks of the draft model");
    assert_eq!(found, next_to_a_prompt_in_chunks(usize::MAX, &mut chunks));
    assert_eq!(found.0, [5, 6].map(|request| plain()[request].clone()));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(32) })]

    /// Rounds with any γ for any of the slots, and sequences that end early: every answer is that of plain decoding.
    #[test]
    fn any_drafts_and_neighbours_give_the_answers_of_plain_decoding(
        rounds in prop::collection::vec([(0..=GAMMA_MAX, 0..4), (0..=GAMMA_MAX, 0..4), (0..=GAMMA_MAX, 0..4)], 8..30),
        ends in prop::collection::vec(0..6 * SLOTS, 8..30),
        first in 0..2 * PROMPTS.len(),
    ) {
        let mut engine = varied(GAMMA_MAX, SLOTS, PROMPTS[3] + ANSWER);
        // Per slot, the current request and its answer so far.
        let mut answers: [Option<(usize, Vec<u32>)>; SLOTS] = Default::default();
        let mut next = first;
        for (round, end) in rounds.iter().zip(ends.iter().cycle()) {
            // Some sequences are ended early; finished ones always are.
            for (slot, answer) in answers.iter_mut().enumerate() {
                let done = answer.as_ref().is_some_and(|(_, text)| text.len() == ANSWER);
                if done || *end == slot {
                    engine.finish(slot);
                    *answer = None;
                }
            }
            for _ in answers.clone().iter().filter(|answer| answer.is_none()) {
                let index = next % (2 * PROMPTS.len());
                next += 3;
                let (prompt, sampler) = request(index);
                let slot = engine.add(&prompt, sampler, ANSWER).expect("add");
                answers[slot] = Some((index, vec![prefill(&mut engine, slot).expect("prefill")]));
            }
            // One slot of four skips a round.
            let gammas: Vec<(usize, usize)> = (0..SLOTS)
                .filter(|&slot| round[slot].1 > 0)
                .filter_map(|slot| Some((slot, answers[slot].as_ref()?.1.len())))
                .map(|(slot, emitted)| (slot, round[slot].0.min(ANSWER - 1 - emitted)))
                .collect();
            if gammas.is_empty() {
                continue;
            }
            engine.draft(&gammas).expect("draft");
            for emitted in engine.verify().expect("verify") {
                let (index, text) = answers[emitted.slot].as_mut().expect("a sequence");
                text.extend(emitted.tokens);
                prop_assert_eq!(&text[..], &plain()[*index][..text.len()], "request {} in slot {}", index, emitted.slot);
            }
        }
    }
}
