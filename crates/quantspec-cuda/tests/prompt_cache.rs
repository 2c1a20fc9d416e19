//! A prompt with a cached prefix is answered bit for bit as without a cache, wherever its keys and values are stored, and
//! sequences share the pages of a pool.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod gpu;
#[path = "gpu/model.rs"]
mod small;

use gpu::device;
use quantspec_core::config::{Pages, View, Weights};
use quantspec_core::policy::Policy;
use quantspec_core::sample::Sampler;
use quantspec_core::{Error, ErrorKind};
use quantspec_cuda::{CudaBackend, Limits, plan};
use quantspec_model::backend::{Backend, DraftConfig, Hooks, KvCache, Memory, Options, TokenSampler};
use quantspec_model::draft::SelfQuantised;
use quantspec_model::engine::{Engine, Method};
use quantspec_model::prompt_cache::{BLOCK_TOKENS, PromptCache, PromptFolder};
use small::{checkpoints, options, prompt};
use std::path::PathBuf;

const NEW_TOKENS: usize = 40;

fn engine(backend: CudaBackend, options: &Options) -> Engine<CudaBackend> {
    let plan = DraftConfig { weights: Weights::Draft, view: View::Upper, pages: Pages::All };
    let method = Method { target: View::Both, drafter: Some(SelfQuantised::boxed(plan)), policy: Policy::fixed(4) };
    Engine::new(backend, method, options.slots, options.capacity, options.block_rows)
}

/// Bits of the logits after a prompt, the tokens after it, and the number of restored tokens.
fn answer(engine: &mut Engine<CudaBackend>, prompt: &[u32], chunk_rows: usize) -> (Vec<u32>, Vec<u32>, usize) {
    engine.reset_stats();
    let slot = engine.add(prompt, Sampler::greedy(), NEW_TOKENS).unwrap();
    let first = loop {
        if let Some(first) = engine.prefill_chunk(slot, chunk_rows, &mut |_, _| {}).unwrap() {
            break first;
        }
    };
    let logits = engine.backend().logits(0).unwrap().iter().map(|x| x.to_bits()).collect();
    let mut tokens = vec![first];
    while tokens.len() < NEW_TOKENS {
        engine.draft(&[(slot, engine.choose_gamma(slot))]).unwrap();
        tokens.extend(engine.verify().unwrap().remove(0).tokens);
    }
    engine.finish(slot);
    (logits, tokens, engine.stats().reused_tokens())
}

#[test]
fn a_cached_prefix_changes_no_bit() {
    let Some(device) = device() else { return };
    let folder = std::env::temp_dir().join(format!("quantspec-prompts-gpu-{}", std::process::id()));
    for (number, checkpoint) in checkpoints(&device, 2000).into_iter().enumerate() {
        let vocab = checkpoint.config().vocab;
        let document = prompt(vocab, 1700, 3);
        // Keys and values in memory of their own, and in that of the draft weights; hidden states on the device, and in host
        // memory.
        for (slots, most) in [(1, usize::MAX), (1, 64), (2, 64)] {
            let options = options(2000, slots);
            let limits = Limits { tokens: most, hidden_bytes: if most == 64 { 0 } else { usize::MAX } };
            let load = || CudaBackend::load_with(&device, &checkpoint, &options, Hooks::default(), limits).unwrap();
            let mut plain = engine(load(), &options);
            let mut kept = engine(load(), &options);
            let cache = PromptCache::in_memory(kept.backend(), usize::MAX);
            kept.cache_prompts(cache);
            let mut stored = engine(load(), &options);
            let at = PromptFolder {
                folder: folder.join(slots.to_string()).join((most == 64).to_string()),
                model: PathBuf::from("model"),
                fingerprint: number as u128,
                limit_bytes: u64::MAX,
                patience_s: f64::INFINITY,
            };
            let cache = PromptCache::on_disk(stored.backend(), at);
            stored.cache_prompts(cache);
            // New rows within a page, and across the border of the last page.
            let short = [1700, 1, 127, 128, 300, 1024, 1699, 1700].map(|length| (length, 20));
            let lengths = [&short[..], &[(1024, 200), (1500, 250), (1664, 200)]].concat();
            for (index, (length, new)) in lengths.into_iter().enumerate() {
                let text = [&document[..length], &prompt(vocab, new, 100 + index as u64)].concat();
                let (logits, tokens, _) = answer(&mut plain, &text, usize::MAX);
                for (engine, rows) in [(&mut kept, 700), (&mut stored, usize::MAX)] {
                    let found = answer(engine, &text, rows);
                    let reused = if index == 0 { 0 } else { length / BLOCK_TOKENS * BLOCK_TOKENS };
                    assert!(found.0 == logits, "logits after {length} known tokens, {slots} slots, own up to {most}");
                    assert_eq!((found.1, found.2), (tokens.clone(), reused), "{length} known tokens");
                }
            }
            assert_eq!(stored.prompt_cache().unwrap().take_note(), None);
        }
    }
    let _ = std::fs::remove_dir_all(folder);
}

#[test]
fn sequences_share_the_pages_of_a_pool() {
    let Some(device) = device() else { return };
    let checkpoint = checkpoints(&device, 2000).remove(0);
    let options = Options { pool_pages: 17, ..options(1800, 3) };
    let backend = CudaBackend::load_on(&device, &checkpoint, &options, Hooks::default()).unwrap();
    let planned = plan(&checkpoint, &options, &device.info);
    let pools = |memory: &Memory| [memory.cache_upper_bytes, memory.cache_lower_bytes, memory.cache_full_bytes];
    assert_eq!(pools(&backend.memory()), pools(&planned));
    let vocab = checkpoint.config().vocab;
    let (long, short) = (prompt(vocab, 1500, 1), prompt(vocab, 500, 2));
    let mut engine = engine(backend, &options);
    let alone = answer(&mut engine, &short, usize::MAX);
    // Pages in the order in which sequences released them.
    let first = engine.add(&long, Sampler::greedy(), NEW_TOKENS).unwrap();
    assert!(engine.has_room(&[1; 560], NEW_TOKENS) && !engine.has_room(&[1; 760], NEW_TOKENS));
    assert_eq!(engine.add(&long, Sampler::greedy(), NEW_TOKENS).unwrap_err().kind, ErrorKind::Usage);
    engine.prefill(first, &mut |_, _| {}).unwrap();
    let together = answer(&mut engine, &short, usize::MAX);
    assert_eq!(together, alone);
    let backend = engine.backend();
    let refused: Error = backend.open(1, 1800).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::DoesNotFit);
}
