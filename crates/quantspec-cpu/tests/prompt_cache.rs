//! A prompt with a cached prefix is answered bit for bit as without a cache, whatever happened to the cached data.

#[path = "support/paths.rs"]
mod paths;
#[path = "support/random.rs"]
mod random;

use quantspec_core::config::{Pages, Planes, TargetWeights, View, Weights};
use quantspec_core::policy::Policy;
use quantspec_core::sample::Sampler;
use quantspec_core::{Error, ErrorKind};
use quantspec_cpu::CpuBackend;
use quantspec_cpu::dispatch::{ChosenPath, Simd};
use quantspec_model::backend::{DraftConfig, Hooks, Options, TokenSampler};
use quantspec_model::checkpoint::Checkpoint;
use quantspec_model::draft::SelfQuantised;
use quantspec_model::engine::{Engine, Method};
use quantspec_model::prompt_cache::{BLOCK_TOKENS, PromptCache, PromptFolder, files, fingerprint};
use random::Shape;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

const LLAMA: Shape = Shape { tied: false, ..Shape::new("llama", "BF16", (4, 2, 32)) };
const CAPACITY: usize = 1200;
const NEW_TOKENS: usize = 12;
/// Bytes of a block of [`LLAMA`]: keys and values of two layers and two heads with 32 f16 channels.
const BLOCK_BYTES: usize = BLOCK_TOKENS * 2 * 2 * 2 * 32 * 2;

fn engine_on(checkpoint: &Checkpoint, simd: Simd, slots: usize, hooks: Hooks) -> Engine<CpuBackend> {
    let options = Options {
        planes: Planes::of(&[View::Both, View::Upper]),
        page_masses: true,
        step_rows: 5 * slots,
        block_rows: 96,
        threads: 2,
        ..Options::new(slots, CAPACITY)
    };
    let choice = ChosenPath { simd, reason: String::new() };
    let backend = CpuBackend::load_on(checkpoint, &options, hooks, choice).expect("load");
    // The prompt's last queries choose its pages, and a known beginning leaves fewer of them.
    let pages = Pages::Snap { pages: 2, refresh: 0 };
    let plan = DraftConfig { weights: Weights::Draft, view: View::Upper, pages };
    let method = Method { target: View::Both, drafter: Some(SelfQuantised::boxed(plan)), policy: Policy::fixed(4) };
    Engine::new(backend, method, slots, CAPACITY, options.block_rows)
}

fn best() -> Simd {
    quantspec_cpu::dispatch::choose().expect("path").simd
}

fn engine() -> Engine<CpuBackend> {
    engine_on(&LLAMA.checkpoint(7), best(), 1, Hooks::default())
}

/// An engine that keeps prompts in a folder of at most `limit_bytes`.
fn on_disk(folder: &Path, limit_bytes: u64) -> Engine<CpuBackend> {
    let checkpoint = LLAMA.checkpoint(7);
    let mut engine = engine_on(&checkpoint, best(), 1, Hooks::default());
    keep_in(&mut engine, &checkpoint, folder, limit_bytes);
    engine
}

fn keep_in(engine: &mut Engine<CpuBackend>, checkpoint: &Checkpoint, folder: &Path, limit_bytes: u64) {
    keep_at(engine, at("/models/tiny", checkpoint, folder, limit_bytes));
}

fn at(model: &str, checkpoint: &Checkpoint, folder: &Path, limit_bytes: u64) -> PromptFolder {
    PromptFolder {
        folder: folder.to_path_buf(),
        model: PathBuf::from(model),
        fingerprint: fingerprint(checkpoint, TargetWeights::Checkpoint, 2, || Ok(())).expect("fingerprint"),
        limit_bytes,
        patience_s: f64::INFINITY,
    }
}

fn keep_at(engine: &mut Engine<CpuBackend>, at: PromptFolder) {
    let cache = PromptCache::on_disk(engine.backend(), at);
    engine.cache_prompts(cache);
}

fn in_memory(limit_bytes: usize) -> Engine<CpuBackend> {
    let mut engine = engine();
    let cache = PromptCache::in_memory(engine.backend(), limit_bytes);
    engine.cache_prompts(cache);
    engine
}

/// An engine's result for a prompt.
#[derive(Debug, PartialEq)]
struct Answer {
    /// Bits of the logits after the prompt.
    logits: Vec<u32>,
    tokens: Vec<u32>,
}

/// The answer, and the number of prompt tokens restored from the cache.
fn answer(engine: &mut Engine<CpuBackend>, prompt: &[u32], chunk_rows: usize) -> (Answer, usize) {
    engine.reset_stats();
    let slot = engine.add(prompt, Sampler::greedy(), NEW_TOKENS).expect("add");
    let first = loop {
        if let Some(first) = engine.prefill_chunk(slot, chunk_rows, &mut |_, _| ()).expect("prefill") {
            break first;
        }
    };
    let logits = engine.backend().logits(0).expect("logits").into_iter().map(f32::to_bits).collect();
    let mut tokens = vec![first];
    while tokens.len() < NEW_TOKENS {
        engine.draft(&[(slot, engine.choose_gamma(slot))]).expect("draft");
        tokens.extend(engine.verify().expect("verify").remove(0).tokens);
    }
    engine.finish(slot);
    (Answer { logits, tokens }, engine.stats().reused_tokens())
}

/// The document of these tests, and a question about its first `length` tokens.
fn question(length: usize, number: u64) -> Vec<u32> {
    let document = random::tokens(300, 900, 11);
    [&document[..length], &random::tokens(300, 20, (100 + number) * 0x9E37_79B9)].concat()
}

struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("quantspec-prompts-{}-{}", std::process::id(), COUNT.fetch_add(1, Relaxed));
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).expect("folder");
        Folder(path)
    }

    fn names(&self) -> Vec<PathBuf> {
        fs::read_dir(&self.0).expect("folder").map(|entry| entry.expect("entry").path()).collect()
    }

    fn file(&self) -> PathBuf {
        let names = self.names();
        assert_eq!(names.len(), 1, "{names:?}");
        names[0].clone()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn note(engine: &mut Engine<CpuBackend>) -> Option<String> {
    engine.prompt_cache().expect("a cache").take_note()
}

/// Questions about prefixes of any length, with several engines in turn.
fn law(checkpoint: &Checkpoint, simd: Simd, lengths: &[usize]) {
    let mut plain = engine_on(checkpoint, simd, 1, Hooks::default());
    let mut kept = engine_on(checkpoint, simd, 1, Hooks::default());
    let cache = PromptCache::in_memory(kept.backend(), usize::MAX);
    kept.cache_prompts(cache);
    let folder = Folder::new();
    let mut stored = engine_on(checkpoint, simd, 1, Hooks::default());
    keep_in(&mut stored, checkpoint, &folder.0, u64::MAX);
    let document = question(880, 0);
    for engine in [&mut kept, &mut stored] {
        assert_eq!(answer(engine, &document, usize::MAX), (answer(&mut plain, &document, usize::MAX).0, 0));
    }
    for (number, &length) in lengths.iter().enumerate() {
        let prompt = question(length, 1 + number as u64);
        let (expected, _) = answer(&mut plain, &prompt, usize::MAX);
        // Chunks of one block, of a few blocks, and of a few layers.
        for (engine, rows) in [(&mut kept, [1, 250, usize::MAX][number % 3]), (&mut stored, [1000, 1, 300][number % 3])]
        {
            let (found, reused) = answer(engine, &prompt, rows);
            assert_eq!(found, expected, "{} tokens of the document on {}", length, simd.name());
            assert_eq!(reused, length / BLOCK_TOKENS * BLOCK_TOKENS, "{length} tokens");
        }
        // The whole prompt again: only its last row is computed.
        for engine in [&mut kept, &mut stored] {
            let (found, reused) = answer(engine, &prompt, 400);
            assert_eq!(
                (found, reused),
                (answer(&mut plain, &prompt, 1).0, (prompt.len() - 1) / BLOCK_TOKENS * BLOCK_TOKENS)
            );
        }
    }
    assert_eq!((note(&mut kept), note(&mut stored)), (None, None));
    assert!(kept.prompt_cache().expect("a cache").held_bytes() > 7 * BLOCK_TOKENS);
    // Another process finds this one's prompts, whatever path it loads the model from.
    let mut other = engine_on(checkpoint, simd, 1, Hooks::default());
    keep_at(&mut other, at("/elsewhere/copy", checkpoint, &folder.0, u64::MAX));
    let prompt = question(700, 99);
    assert_eq!(answer(&mut other, &prompt, usize::MAX), (answer(&mut plain, &prompt, usize::MAX).0, 640));
}

#[test]
fn a_cached_prefix_changes_no_bit() {
    for simd in paths::paths() {
        law(&LLAMA.checkpoint(7), simd, &[880, 1, 107, 108, 127, 128, 129, 255, 256, 500, 512, 768, 879]);
        // Other prompt kernels: full weights in F32, and biases.
        law(&Shape { biases: true, ..Shape::new("qwen2", "F32", (2, 1, 64)) }.checkpoint(8), simd, &[880, 300]);
    }
}

#[test]
fn a_key_depends_on_the_form_of_the_weights() {
    let checkpoint = LLAMA.checkpoint(7);
    let of = |weights| fingerprint(&checkpoint, weights, 2, || Ok(())).expect("fingerprint");
    let [plain, int8, int4] = [TargetWeights::Checkpoint, TargetWeights::Int8, TargetWeights::Int4].map(of);
    assert!(plain != int8 && int8 != int4 && int4 != plain);
    assert_eq!(plain, of(TargetWeights::Checkpoint));
}

#[test]
fn a_cached_prefix_is_restored_between_the_rounds_of_others() {
    let mut plain = engine();
    let mut batch = engine_on(&LLAMA.checkpoint(7), best(), 2, Hooks::default());
    let cache = PromptCache::in_memory(batch.backend(), usize::MAX);
    batch.cache_prompts(cache);
    let prompts = [question(600, 1), question(600, 2)];
    let expected = prompts.each_ref().map(|prompt| answer(&mut plain, prompt, usize::MAX).0.tokens);
    let slots = prompts.each_ref().map(|prompt| batch.add(prompt, Sampler::greedy(), NEW_TOKENS).expect("add"));
    let mut texts = [vec![batch.prefill(slots[0], &mut |_, _| ()).expect("prefill")], Vec::new()];
    let mut rounds = 0;
    while texts.iter().any(|text| text.len() < NEW_TOKENS) {
        if texts[1].is_empty() {
            texts[1].extend(batch.prefill_chunk(slots[1], 1, &mut |_, _| ()).expect("prefill"));
        }
        let decoding = (0..2).filter(|&i| !texts[i].is_empty() && texts[i].len() < NEW_TOKENS);
        let gammas: Vec<_> = decoding.map(|i| (slots[i], batch.choose_gamma(slots[i]).min(1))).collect();
        if gammas.is_empty() {
            continue;
        }
        batch.draft(&gammas).expect("draft");
        for emitted in batch.verify().expect("verify") {
            texts[slots.iter().position(|slot| *slot == emitted.slot).expect("slot")].extend(emitted.tokens);
        }
        rounds += usize::from(texts[1].is_empty());
    }
    assert_eq!(texts, expected);
    assert!(rounds > 1 && batch.stats().reused_tokens() == 512, "{rounds} rounds");
}

#[test]
fn damage_is_one_warning_and_never_a_token() {
    let prompt = question(640, 1);
    let (expected, _) = answer(&mut engine(), &prompt, usize::MAX);
    let folder = Folder::new();
    answer(&mut on_disk(&folder.0, u64::MAX), &prompt, usize::MAX);
    let (path, sound) = (folder.file(), fs::read(folder.file()).expect("file"));
    let data_at = sound.len() - 5 * BLOCK_BYTES;
    let flips = [
        0,
        3,
        9,
        13,
        17,
        25,
        33,
        41,
        data_at - 30,
        data_at,
        data_at + 5000,
        sound.len() - BLOCK_BYTES,
        sound.len() - 1,
    ];
    let flipped = flips.into_iter().map(|at| {
        let mut bytes = sound.clone();
        bytes[at] ^= 0x10;
        bytes
    });
    let cut = [0, 7, 40, data_at, sound.len() - 1].into_iter().map(|length| sound[..length].to_vec());
    let zeroed = [40, data_at, data_at + 3 * BLOCK_BYTES].into_iter().map(|at| {
        let mut bytes = sound.clone();
        bytes[at..].fill(0);
        bytes
    });
    let longer = std::iter::once([&sound[..], b"x"].concat());
    for (case, bytes) in flipped.chain(cut).chain(zeroed).chain(longer).enumerate() {
        fs::write(&path, &bytes).expect("write");
        let mut engine = on_disk(&folder.0, u64::MAX);
        let (found, reused) = answer(&mut engine, &prompt, [usize::MAX, 300][case % 2]);
        assert_eq!((found, reused), (answer_of(&expected), 0), "case {case}");
        // A file of another version does not count as damaged.
        let note = note(&mut engine);
        assert_eq!(
            note.is_none(),
            bytes.get(8..12).is_some_and(|version| version != &sound[8..12]),
            "case {case}: {note:?}"
        );
        if let Some(note) = note {
            assert!(note.contains("damaged") && note.contains("processed again") && !note.contains('\n'), "{note}");
        }
        // A sound file has replaced it.
        assert_eq!(answer(&mut engine, &prompt, usize::MAX), (answer_of(&expected), 640), "case {case}");
        assert_eq!(self::note(&mut engine), None);
        assert_eq!(fs::read(folder.file()).expect("file"), sound, "case {case}");
    }
}

fn answer_of(answer: &Answer) -> Answer {
    Answer { logits: answer.logits.clone(), tokens: answer.tokens.clone() }
}

#[test]
fn a_sparse_file_is_not_allocated() {
    let folder = Folder::new();
    let prompt = question(640, 1);
    let (expected, _) = answer(&mut on_disk(&folder.0, u64::MAX), &prompt, usize::MAX);
    // The index claims 4 TiB, with as many segments as entries, and the sparse file is as long.
    let path = folder.file();
    let segments = (1u64 << 42) / 24 / 2 * 2;
    let data_bytes = segments * (BLOCK_BYTES / 2) as u64;
    let data_at = fs::metadata(&path).expect("file").len() - 5 * BLOCK_BYTES as u64 + 24 * (segments - 10);
    let file = fs::File::options().write(true).open(&path).expect("file");
    file.write_all_at(&segments.to_le_bytes(), 16).expect("write");
    file.write_all_at(&data_bytes.to_le_bytes(), 24).expect("write");
    // Some file systems refuse a file this long; its length then differs from the header.
    let _ = file.set_len(data_at + data_bytes);
    let mut engine = on_disk(&folder.0, u64::MAX);
    assert_eq!(answer(&mut engine, &prompt, usize::MAX), (answer_of(&expected), 0));
    assert_eq!(answer(&mut engine, &prompt, usize::MAX), (expected, 640), "a sound file took its place");
}

#[test]
fn rows_of_another_model_or_path_are_not_used() {
    let folder = Folder::new();
    let prompt = question(640, 1);
    answer(&mut on_disk(&folder.0, u64::MAX), &prompt, usize::MAX);
    // One weight of the last layer, on which no earlier key or value depends.
    let changed = LLAMA.edited(7, &|name, values, _| {
        if name == "model.layers.1.mlp.down_proj.weight" {
            values[5] += 1.0;
        }
    });
    let mut engine = engine_on(&changed, best(), 1, Hooks::default());
    keep_in(&mut engine, &changed, &folder.0, u64::MAX);
    assert_eq!(answer(&mut engine, &prompt, usize::MAX).1, 0);
    assert_eq!(folder.names().len(), 2);
    if best() != Simd::Scalar {
        let mut engine = engine_on(&LLAMA.checkpoint(7), Simd::Scalar, 1, Hooks::default());
        keep_in(&mut engine, &LLAMA.checkpoint(7), &folder.0, u64::MAX);
        assert_eq!(answer(&mut engine, &prompt, usize::MAX).1, 0);
    }
}

#[test]
fn memory_is_bounded_and_the_least_recently_used_goes() {
    // Room for nine blocks: the document's five, and some of another one's.
    let mut engine = in_memory(9 * BLOCK_BYTES);
    let other = |number| [random::tokens(300, 400, 50 + number), question(0, number)].concat();
    let held = |engine: &mut Engine<CpuBackend>, prompt: &[u32]| {
        let reused = answer(engine, prompt, usize::MAX).1 / BLOCK_TOKENS;
        (reused, engine.prompt_cache().expect("a cache").held_bytes() / BLOCK_BYTES)
    };
    assert_eq!(held(&mut engine, &question(640, 1)), (0, 5));
    assert_eq!(held(&mut engine, &other(1)), (0, 8));
    // Use of the document makes the other one the oldest.
    assert_eq!(held(&mut engine, &question(640, 2)), (5, 8));
    assert_eq!(held(&mut engine, &other(2)), (0, 8));
    assert_eq!(held(&mut engine, &question(640, 3)), (5, 8));
    assert_eq!(held(&mut engine, &other(1)), (0, 8));
    // A prompt longer than the room is kept as far as it fits.
    let mut small = in_memory(3 * BLOCK_BYTES + BLOCK_BYTES / 2);
    assert_eq!(held(&mut small, &question(640, 1)), (0, 3));
    assert_eq!(held(&mut small, &question(640, 1)), (3, 3));
    let mut none = in_memory(BLOCK_BYTES - 1);
    assert_eq!(held(&mut none, &question(640, 1)), (0, 0));
    assert_eq!(held(&mut none, &question(640, 1)), (0, 0));
}

#[test]
fn the_folder_is_bounded_and_the_least_recently_used_goes() {
    let folder = Folder::new();
    let limit = 9 * BLOCK_BYTES as u64 + 4096;
    let mut engine = on_disk(&folder.0, limit);
    let other = |number| [random::tokens(300, 400, 50 + number), question(0, number)].concat();
    let mut blocks = |prompt: &[u32]| {
        let reused = answer(&mut engine, prompt, usize::MAX).1 / BLOCK_TOKENS;
        let bytes: u64 = files(&folder.0).expect("files").iter().map(|file| file.bytes).sum();
        assert!(bytes <= limit, "{bytes}");
        // File times have a resolution of milliseconds.
        std::thread::sleep(std::time::Duration::from_millis(20));
        (reused, bytes as usize / BLOCK_BYTES)
    };
    assert_eq!(blocks(&question(640, 1)), (0, 5));
    assert_eq!(blocks(&other(1)), (0, 8));
    assert_eq!(blocks(&question(640, 2)), (5, 8));
    assert_eq!(blocks(&other(2)), (0, 8));
    assert_eq!(blocks(&question(640, 3)), (5, 8));
    assert_eq!(blocks(&other(1)), (0, 8));
    assert!(files(&folder.0).expect("files").iter().all(|file| file.model == Some(PathBuf::from("/models/tiny"))));
}

#[test]
fn a_longer_prompt_does_not_remove_the_file_that_it_continues() {
    let folder = Folder::new();
    let mut engine = on_disk(&folder.0, 6 * BLOCK_BYTES as u64 + 8192);
    let mut reused = |length, number| answer(&mut engine, &question(length, number), usize::MAX).1 / BLOCK_TOKENS;
    assert_eq!(reused(640, 1), 0);
    // Seven blocks, of which the folder has room for six.
    assert_eq!([reused(880, 2), reused(880, 3)], [5, 6]);
}

#[test]
fn a_folder_that_cannot_be_used_is_one_warning() {
    let folder = Folder::new();
    fs::write(folder.0.join("prompts"), "a file").expect("write");
    let mut engine = on_disk(&folder.0.join("prompts"), u64::MAX);
    let (expected, _) = answer(&mut self::engine(), &question(640, 1), usize::MAX);
    assert_eq!(answer(&mut engine, &question(640, 1), usize::MAX), (expected, 0));
    let said = note(&mut engine).expect("a note");
    assert!(said.contains("not cached") && said.contains("--prompt-cache") && !said.contains("os error"), "{said}");
    answer(&mut engine, &question(640, 1), usize::MAX);
    assert_eq!(note(&mut engine), None, "it is said once");
}

#[test]
fn a_folder_that_is_slower_than_computing_is_one_warning() {
    let (folder, checkpoint) = (Folder::new(), LLAMA.checkpoint(7));
    let mut engine = engine();
    let allowed = at("/models/tiny", &checkpoint, &folder.0, u64::MAX);
    keep_at(&mut engine, PromptFolder { patience_s: f64::NEG_INFINITY, ..allowed.clone() });
    let (expected, _) = answer(&mut self::engine(), &question(640, 1), usize::MAX);
    for number in 0..2 {
        assert_eq!(answer(&mut engine, &question(640, 1), usize::MAX), (answer_of(&expected), 0));
        assert_eq!(folder.names(), Vec::<PathBuf>::new());
        let note = note(&mut engine);
        assert_eq!(note.is_some(), number == 0, "{note:?}");
        assert!(note.is_none_or(|note| note.contains("takes longer") && note.contains("--prompt-cache")));
    }
    // Prompts that are there are read.
    keep_at(&mut engine, allowed.clone());
    answer(&mut engine, &question(640, 1), usize::MAX);
    keep_at(&mut engine, PromptFolder { patience_s: f64::NEG_INFINITY, ..allowed });
    assert_eq!(answer(&mut engine, &question(640, 1), usize::MAX), (expected, 640));
}

#[test]
fn an_interrupted_prompt_leaves_nothing() {
    let folder = Folder::new();
    let checkpoint = LLAMA.checkpoint(7);
    let armed = Arc::new(AtomicBool::new(false));
    let asked = armed.clone();
    let poll = move || if asked.load(Relaxed) { Err(Error::interrupted()) } else { Ok(()) };
    let mut engine = engine_on(&checkpoint, best(), 1, Hooks { poll: Box::new(poll), ..Hooks::default() });
    keep_in(&mut engine, &checkpoint, &folder.0, u64::MAX);
    let slot = engine.add(&question(640, 1), Sampler::greedy(), NEW_TOKENS).expect("add");
    assert_eq!(engine.prefill_chunk(slot, 1000, &mut |_, _| ()).expect("a part"), None);
    assert_eq!(folder.names().len(), 1, "a temporary file");
    armed.store(true, Relaxed);
    let error = engine.prefill_chunk(slot, usize::MAX, &mut |_, _| ()).expect_err("interrupted");
    assert_eq!(error.kind, ErrorKind::Interrupted);
    engine.finish(slot);
    assert_eq!(folder.names(), Vec::<PathBuf>::new());
    armed.store(false, Relaxed);
    assert_eq!(answer(&mut engine, &question(640, 1), usize::MAX).1, 0);
}

#[test]
fn processes_may_share_a_folder() {
    let folder = Folder::new();
    let prompts: Vec<Vec<u32>> = [(640, 1), (640, 2), (300, 3)].map(|(length, number)| question(length, number)).into();
    let mut plain = engine();
    let expected: Vec<Answer> = prompts.iter().map(|prompt| answer(&mut plain, prompt, usize::MAX).0).collect();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    let mut engine = on_disk(&folder.0, u64::MAX);
                    for _ in 0..12 {
                        for (prompt, expected) in prompts.iter().zip(&expected) {
                            assert_eq!(&answer(&mut engine, prompt, 200).0, expected);
                        }
                    }
                    assert_eq!(note(&mut engine), None);
                })
            })
            .collect();
        // A third thread clears the folder repeatedly.
        scope.spawn(|| {
            while !done.load(Relaxed) {
                for file in files(&folder.0).expect("files") {
                    let _ = fs::remove_file(file.path);
                }
                std::thread::sleep(std::time::Duration::from_millis(7));
            }
        });
        let ended: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
        done.store(true, Relaxed);
        assert!(ended.into_iter().all(|ended| ended.is_ok()));
    });
}
