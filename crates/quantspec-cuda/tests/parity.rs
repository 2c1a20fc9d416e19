//! Whole models of every shape on the GPU compared with the CPU backend without SIMD, which rounds no activation of the
//! target and is itself tested against the reference backend.
//!
//! Two sequences are decoded together as an engine would: prompts in blocks that end anywhere, then steps of one to five rows
//! in every view and with every kind of page list. In between, target steps commit tokens and flush pages, until such a page
//! is read. Biases, norm weights and token norms vary so much that a wrong one exceeds the bounds; the last test, which needs
//! no GPU, checks that.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]
#![allow(clippy::print_stderr, reason = "errors are worth seeing")]

mod gpu;
#[path = "../../quantspec-cpu/tests/support/random.rs"]
#[allow(dead_code, reason = "shared with tests that use more of it")]
mod random;

use gpu::{device, round};
use quantspec_core::cache::{Extent, G, visible_pages};
use quantspec_core::config::{DraftWeights, Dtype, Pages, Rounding, Sensitive, TargetWeights, View, Weights};
use quantspec_core::weights::{GROUP, quantize_row, quantize_row_upper};
use quantspec_cpu::CpuBackend;
use quantspec_cpu::dispatch::{ChosenPath, Simd};
use quantspec_cuda::CudaBackend;
use quantspec_model::backend::{Backend, Hooks, Options, Row, Step};
use quantspec_model::checkpoint::{Checkpoint, LayerPart, Part};
use quantspec_model::forward;
use quantspec_model::importance::{Channel, LayerImportance, MadeUpRows, product};
use random::Shape;
use std::ops::Range;

/// Tokens of the first prompt: five pages are complete, of which rows after it see four. A sixth is complete nine tokens
/// later.
const PROMPT: usize = 6 * G - 9;
/// Not a multiple of any kernel's tile.
const BLOCK_ROWS: usize = 200;
const CAPACITY: usize = 7 * G + 32;

/// Norm of token t's embedding, by t modulo 3. Rows of a step have very different norms, so another row's factor exceeds the
/// bounds.
const SIZES: [f32; 3] = [0.25, 1.0, 4.0];

/// A random model, and how it is loaded.
#[derive(Clone, Copy, Debug)]
struct Model {
    shape: Shape,
    /// Number format of embedding and head if it differs from the layers'.
    tables: Option<&'static str>,
    drafts: DraftWeights,
    rounding: Rounding,
    /// Tokens of the other prompt.
    second_prompt: usize,
}

impl Model {
    const fn new(family: &'static str, dtype: &'static str, heads: (usize, usize, usize)) -> Model {
        Model {
            shape: Shape::new(family, dtype, heads),
            tables: None,
            drafts: DraftWeights::Int4,
            rounding: Rounding::Balanced,
            second_prompt: 261,
        }
    }

    /// Layers' and head's sizes: hidden, intermediate, vocabulary.
    const fn sized(self, sizes: (usize, usize, usize)) -> Model {
        Model { shape: Shape { hidden: sizes.0, intermediate: sizes.1, vocab: sizes.2, ..self.shape }, ..self }
    }

    const fn untied(self) -> Model {
        Model { shape: Shape { tied: false, ..self.shape }, ..self }
    }

    /// With biases of attention and of the feed-forward network, which llama allows.
    const fn biased(self) -> Model {
        Model { shape: Shape { biases: true, ..self.shape }, ..self }
    }

    const fn second_prompt(self, second_prompt: usize) -> Model {
        Model { second_prompt, ..self }
    }

    /// The checkpoint, after `edit` of its tensors: name, values.
    fn checkpoint(&self, seed: u64, edit: &dyn Fn(&str, &mut [f32])) -> Checkpoint {
        // Gemma's norms are stored less 1.
        let middle = if self.shape.family == "gemma3_text" { 0.0 } else { 1.0 };
        let spread = |values: &mut [f32], by: f32| values.iter_mut().for_each(|x| *x = middle + by * (*x - middle));
        self.shape.edited(seed, &|name, values, dtype| {
            if name.ends_with("_norm.weight") {
                // Norms of heads: deviations of 0.8 around 1.
                spread(values, 4.0);
            } else if name.ends_with("norm.weight") {
                // Of 0.5.
                spread(values, 2.5);
            } else if name.ends_with(".bias") {
                // Deviations of 0.9 and 1.2; GEMMs have 1.7. Larger ones would make attention's contribution too small.
                let by =
                    if ["v_proj", "gate_proj", "up_proj"].iter().any(|part| name.contains(part)) { 3.0 } else { 4.0 };
                values.iter_mut().for_each(|x| *x *= by);
            } else if name == "model.embed_tokens.weight" {
                for (token, row) in values.chunks_exact_mut(self.shape.hidden).enumerate() {
                    row.iter_mut().for_each(|x| *x *= SIZES[token % 3]);
                }
            }
            if let Some(format) = self.tables.filter(|_| matches!(name, "model.embed_tokens.weight" | "lm_head.weight"))
            {
                *dtype = format;
            }
            edit(name, values);
        })
    }

    /// The checkpoint with its matrices replaced by their dequantised nibbles.
    fn in_nibbles(&self, seed: u64, weights: TargetWeights) -> Checkpoint {
        let plain = self.checkpoint(seed, &|_, _| ());
        let here = |count: usize, work: &(dyn Fn(Range<usize>) -> quantspec_core::Result<()> + Sync)| work(0..count);
        let product = |part: Part, x: &[Channel]| product(&plain, &here, part, x);
        let mut rows = MadeUpRows::new(&plain).unwrap();
        let importance: Vec<_> = (0..plain.config().layers).map(|_| rows.next_layer(&product).unwrap()).collect();
        self.checkpoint(seed, &|name, values| self.quantise(weights, &importance, name, values))
    }

    /// Replaces a tensor by its dequantised nibbles, if `weights` stores it in nibbles.
    fn quantise(&self, weights: TargetWeights, importance: &[LayerImportance], name: &str, values: &mut [f32]) {
        let Shape { dtype, hidden, intermediate, heads, head_dim, tied, .. } = self.shape;
        let (k, format) = match name {
            "lm_head.weight" => (hidden, self.tables.unwrap_or(dtype)),
            "model.embed_tokens.weight" if tied => (hidden, self.tables.unwrap_or(dtype)),
            name if !name.ends_with("_proj.weight") => return,
            name if name.contains("o_proj") => (heads * head_dim, dtype),
            name if name.contains("down_proj") => (intermediate, dtype),
            _ => (hidden, dtype),
        };
        let stored = match format {
            "BF16" => Dtype::Bf16,
            "F16" => Dtype::F16,
            _ => Dtype::F32,
        };
        let part = match name {
            name if name.contains("o_proj") => LayerPart::Output,
            name if name.contains("down_proj") => LayerPart::Down,
            name if name.contains("mlp.") => LayerPart::Gate,
            _ => LayerPart::Q,
        };
        let layer = name.split('.').find_map(|piece| piece.parse::<usize>().ok());
        let outer = name.contains("down_proj")
            && layer.is_some_and(|layer| Part::Layer(layer, part).has_both_planes(weights, importance.len()));
        let importance = layer.map_or(&[][..], |layer| importance[layer].of(part));
        // Rows of the queries of a matrix that keys and values follow.
        let queries = if name.contains("qkv_proj") { heads * head_dim } else { 0 };
        for (index, row) in values.chunks_mut(k).enumerate() {
            row.iter_mut().for_each(|value| *value = round(*value, stored));
            let few = outer || (name.contains("k_proj") || name.contains("v_proj")) && index >= queries;
            let upper = weights == TargetWeights::Int4 && name.ends_with("_proj.weight") && !few;
            let quantise = if upper { quantize_row_upper } else { quantize_row };
            row.copy_from_slice(&quantise(row, importance, GROUP).unwrap().both());
        }
    }

    fn options(&self) -> Options {
        Options {
            rounding: self.rounding,
            draft_weights: self.drafts,
            page_masses: true,
            // More rows than attention supports in a pass.
            step_rows: 70,
            block_rows: BLOCK_ROWS,
            threads: std::thread::available_parallelism().map_or(1, |n| n.get().min(4)),
            ..Options::new(2, CAPACITY)
        }
    }

    /// Both texts. Neighbours in a step have different norms. Pages two to four of the first text repeat one token each, so
    /// their keys are close together and the page with the best bound is never in doubt. It is page one, which no window of
    /// three pages includes.
    fn texts(&self, seed: u64) -> [Vec<u32>; 2] {
        let text = |seed: u64, first: usize| -> Vec<u32> {
            let random = random::tokens(self.shape.vocab - 2, CAPACITY, seed);
            let size = |position: usize| [0, 2, 1][(position + first) % 3];
            random.iter().enumerate().map(|(position, token)| token / 3 * 3 + size(position)).collect()
        };
        // The first row of the second text after its prompt has another norm than that of the first.
        let mut texts = [text(seed, 0), text(seed + 50, 4 - self.second_prompt % 3)];
        for page in texts[0].chunks_exact_mut(G).take(5).skip(2) {
            page.fill(page[0]);
        }
        texts
    }
}

// Groups of 1, 2, 3, 5, 6, 7, 8 and 12 heads, and every head width in every number format. Widths end within atoms of 64
// inputs and groups of 128, vocabularies within tiles of 16 tokens and, above 2,048, within a block's share of a choice.
const HEADS_OF_64: [Model; 8] = [
    Model::new("llama", "BF16", (7, 1, 64)).biased().untied().sized((136, 184, 2049)),
    Model::new("llama", "F16", (5, 1, 64)).biased().sized((96, 296, 300)).second_prompt(100),
    Model::new("llama", "F32", (6, 2, 64)).biased().untied().sized((72, 168, 257)).second_prompt(1),
    Model::new("mistral", "BF16", (8, 1, 64)).untied().sized((328, 344, 4099)).second_prompt(520),
    Model::new("mistral", "F16", (12, 1, 64)).sized((104, 200, 2050)),
    Model::new("qwen2", "F16", (4, 4, 64)).untied().sized((88, 176, 301)).second_prompt(128),
    Model::new("qwen2", "BF16", (14, 2, 64)).sized((200, 264, 2051)).second_prompt(129),
    Model::new("qwen3", "F32", (4, 2, 64)).sized((120, 136, 259)),
];

const HEADS_OF_128: [Model; 7] = [
    Model::new("qwen2", "BF16", (2, 1, 128)).sized((152, 312, 257)).second_prompt(520),
    Model { tables: Some("F32"), ..Model::new("qwen3", "BF16", (3, 3, 128)).untied().sized((104, 1000, 2049)) },
    Model::new("llama", "F32", (6, 1, 128)).biased().sized((80, 144, 2053)).second_prompt(300),
    Model::new("qwen3", "F16", (5, 1, 128)).untied().sized((136, 200, 303)),
    Model { drafts: DraftWeights::Int4Mlp, ..Model::new("llama", "BF16", (8, 1, 128)).biased().sized((72, 392, 305)) },
    Model { rounding: Rounding::Paper, ..Model::new("mistral", "F16", (3, 1, 128)).sized((168, 232, 3001)) },
    Model {
        tables: Some("BF16"),
        ..Model::new("qwen2", "F16", (7, 1, 128)).sized((112, 248, 2057)).second_prompt(255)
    },
];

const HEADS_OF_256: [Model; 5] = [
    Model::new("qwen3", "F16", (2, 1, 256)).untied().sized((264, 168, 258)),
    Model::new("llama", "BF16", (4, 2, 256)).biased().sized((88, 216, 2061)).second_prompt(77),
    Model::new("qwen2", "F32", (3, 1, 256)).untied().sized((96, 160, 307)),
    Model::new("qwen3", "BF16", (6, 1, 256)).sized((144, 328, 2049)).second_prompt(520),
    Model::new("mistral", "BF16", (2, 2, 256)).untied().sized((104, 152, 309)),
];

/// Layers without position embedding, constant factors, heads of which three quarters are rotated, norms after the branches, and
/// queries that grow.
const FAMILIES: [Model; 11] = [
    Model::new("smollm3", "BF16", (8, 2, 64)).untied().sized((136, 184, 2049)),
    Model::new("granite", "BF16", (6, 2, 64)).sized((200, 264, 2051)).second_prompt(129),
    Model::new("phi3", "F32", (4, 2, 64)).sized((120, 136, 259)),
    Model::new("smollm3", "F16", (5, 1, 128)).sized((136, 200, 303)).second_prompt(300),
    Model::new("granite", "F16", (4, 1, 128)).untied().sized((104, 200, 2050)),
    Model::new("phi3", "BF16", (6, 2, 128)).untied().sized((152, 312, 257)).second_prompt(520),
    Model::new("olmo2", "BF16", (6, 2, 64)).untied().sized((200, 264, 2051)).second_prompt(129),
    Model::new("olmo2", "F16", (4, 4, 128)).sized((136, 200, 303)).second_prompt(300),
    Model::new("olmo2", "F32", (4, 2, 64)).sized((120, 136, 259)),
    Model::new("ministral3", "BF16", (8, 2, 64)).untied().sized((136, 184, 2049)),
    Model::new("ministral3", "F16", (5, 1, 128)).sized((136, 200, 303)).second_prompt(300),
];

/// The first layer sees 256 tokens and has angles of its own; norms before and after the branches; GELU.
const WITH_LOCAL_LAYERS: [Model; 4] = [
    Model::new("gemma3_text", "BF16", (4, 1, 256)).sized((144, 328, 2049)).second_prompt(520),
    Model::new("gemma3_text", "BF16", (6, 3, 128)).untied().sized((200, 264, 2051)).second_prompt(300),
    Model::new("gemma3_text", "F16", (2, 1, 64)).sized((136, 184, 303)).second_prompt(255),
    Model::new("gemma3_text", "F32", (4, 2, 64)).sized((120, 136, 259)),
];

type StepConfig = (Weights, View, Pages);

/// The target's configuration.
const TARGET: StepConfig = (Weights::Full, View::Both, Pages::All);
const CONFIGS: [StepConfig; 9] = [
    (Weights::Full, View::Full, Pages::All),
    TARGET,
    (Weights::Full, View::Upper, Pages::All),
    (Weights::Draft, View::Upper, Pages::All),
    (Weights::Draft, View::Upper, Pages::Best(2)),
    (Weights::Draft, View::Upper, Pages::Best(3)),
    (Weights::Draft, View::Full, Pages::Window(2)),
    // Two pages of the prompt: the first and the newest, whatever the scores. The other pages become visible later.
    (Weights::Draft, View::Upper, Pages::Snap { pages: 2, refresh: 0 }),
    (Weights::Draft, View::Both, Pages::All),
];

/// Rows of either sequence in a step, and whether it chooses pages, which only steps with one row per sequence do. Drafts of
/// up to two rows use separate kernels.
const ROWS: [([usize; 2], bool); 4] = [([1, 0], true), ([1, 1], true), ([2, 0], false), ([3, 2], false)];

/// Tokens committed of either sequence, by rounds; and whether all configs run before that. The second round begins two tokens
/// before a page is complete; the fifth reads that page.
const ROUNDS: [(bool, [usize; 2]); 5] =
    [(true, [7, 3]), (true, [5, 4]), (true, [70, 0]), (false, [56, 0]), (true, [1, 1])];

/// The logits of a step or of a prompt.
struct Seen {
    config: StepConfig,
    /// Rows of either sequence; 0 for a prompt.
    rows: [usize; 2],
    logits: Vec<Vec<f32>>,
}

/// A step of the next tokens of both texts.
fn step<B: Backend>(
    backend: &mut B,
    texts: &[Vec<u32>; 2],
    extents: &[Extent; 2],
    rows: [usize; 2],
    (weights, view, pages): StepConfig,
    choose_pages: bool,
) -> Seen {
    let mut of_step = Vec::new();
    for slot in 0..2 {
        let position = extents[slot].committed();
        if rows[slot] > 0 {
            backend.set_window(slot, &texts[slot][position..position + rows[slot]]).unwrap();
        }
        of_step.extend((0..rows[slot]).map(|offset| Row { slot, offset, position: position + offset }));
    }
    forward::step(backend, &Step { weights, view, pages, choose_pages, rows: &of_step }).unwrap();
    let logits = (0..of_step.len()).map(|row| backend.logits(row).unwrap()).collect();
    Seen { config: (weights, view, pages), rows, logits }
}

/// Decodes both texts; returns all logits on the way.
fn decode<B: Backend>(
    backend: &mut B,
    texts: &[Vec<u32>; 2],
    second_prompt: usize,
    configs: &[StepConfig],
) -> Vec<Seen> {
    let mut seen = Vec::new();
    let mut extents = [Extent::default(), Extent::default()];
    for (slot, length) in [PROMPT, second_prompt].into_iter().enumerate() {
        backend.open(slot, CAPACITY).unwrap();
        forward::prefill(backend, slot, &texts[slot][..length], BLOCK_ROWS, &mut |_, _| ()).unwrap();
        let logits = vec![backend.logits(0).unwrap()];
        seen.push(Seen { config: (Weights::Full, View::Full, Pages::All), rows: [0; 2], logits });
        extents[slot].commit(length);
    }
    for (all, commits) in ROUNDS {
        for &config in configs.iter().filter(|_| all) {
            for (rows, choose) in ROWS {
                // Drafts have one row per sequence in a step, so backends may differ after a border that a page list does not
                // include.
                let border = |slot: usize| {
                    let first = extents[slot].committed();
                    rows[slot] > 0 && visible_pages(first) != visible_pages(first + rows[slot] - 1)
                };
                if config.2 == Pages::All || !(border(0) || border(1)) {
                    seen.push(step(backend, texts, &extents, rows, config, choose));
                }
            }
        }
        seen.push(step(backend, texts, &extents, commits, TARGET, false));
        for slot in 0..2 {
            for page in extents[slot].commit(commits[slot]) {
                backend.flush(slot, page).unwrap();
            }
        }
    }
    (0..2).for_each(|slot| backend.close(slot));
    seen
}

/// Difference of logits, in deviations of the expected row: the root mean square of the worst row, and the worst single
/// logit.
#[derive(Clone, Copy, Debug, Default)]
struct Apart {
    row: f32,
    one: f32,
}

impl Apart {
    fn of(found: &Seen, expected: &Seen) -> Apart {
        assert_eq!(
            (found.config, found.rows, found.logits.len()),
            (expected.config, expected.rows, expected.logits.len())
        );
        found.logits.iter().zip(&expected.logits).fold(Apart::default(), |worst, (found, expected)| {
            assert_eq!(found.len(), expected.len());
            let n = expected.len() as f32;
            let mean = expected.iter().sum::<f32>() / n;
            let deviation = (expected.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / n).sqrt();
            let apart = || found.iter().zip(expected).map(|(a, b)| (a - b).abs() / deviation);
            let row = (apart().map(|x| x * x).sum::<f32>() / n).sqrt();
            worst.most(Apart { row, one: apart().fold(0.0, most) })
        })
    }

    fn most(self, other: Apart) -> Apart {
        Apart { row: most(self.row, other.row), one: most(self.one, other.one) }
    }

    /// NaN is within nothing.
    fn within(self, bound: Apart) -> bool {
        self.row < bound.row && self.one < bound.one
    }
}

/// The larger number; NaN if either is NaN.
fn most(a: f32, b: f32) -> f32 {
    if a >= b || a.is_nan() { a } else { b }
}

/// Upper limit of rounding errors, about twice those measured with the reference backend's activations rounded as on the GPU.
/// In views Both an activation at a tie can have either of two int8 codes in every format. In view Upper a key that differs
/// in its last bit can have the next code, a sixteenth of the range away.
///
/// Defects exceed these bounds ([`defects_exceed_the_bounds`]): an absent bias, norm weights of 1, two exchanged heads, wrong
/// page lists, view Upper for Both. Another row's norm factor or int8 scale exceeds them in some models only.
fn bound(model: &Model, (weights, view, _): StepConfig) -> Apart {
    let [full, both, upper, draft, draft_upper] = match model.shape.dtype {
        "BF16" => [0.05, 0.07, 0.2, 0.12, 0.25],
        "F16" => [0.01, 0.03, 0.2, 0.1, 0.25],
        _ => [0.004, 0.01, 0.1, 0.08, 0.15],
    };
    let row = match (weights, view) {
        (Weights::Full, View::Full) => full,
        (Weights::Full, View::Both) => both,
        (Weights::Full, View::Upper) => upper,
        (Weights::Draft | Weights::Draft4, View::Upper) => draft_upper,
        (Weights::Draft | Weights::Draft4, _) => draft,
    };
    // Rounding spreads over the logits of a row: the worst of some thousand is 3 to 7 times the root mean square. A single
    // wrong one, such as the last of a vocabulary, is off by about 1.4 in rows of all steps.
    Apart { row, one: 8.0 * row }
}

/// The CPU backend without SIMD.
fn slow(checkpoint: &Checkpoint, options: &Options) -> CpuBackend {
    let choice = ChosenPath { simd: Simd::Scalar, reason: String::new() };
    CpuBackend::load_on(checkpoint, options, Hooks::default(), choice).unwrap()
}

fn compare(models: &[Model]) {
    let Some(device) = device() else { return };
    let mut failures = Vec::new();
    for (model, seed) in models.iter().zip(1..) {
        if !device.info.takes_heads_of(model.shape.head_dim) {
            eprintln!("SKIPPED: heads of {} channels on {}", model.shape.head_dim, device.info.name);
            continue;
        }
        let (checkpoint, options, texts) =
            (model.checkpoint(seed, &|_, _| ()), model.options(), model.texts(99 + seed));
        let mut gpu = CudaBackend::load_on(&device, &checkpoint, &options, Hooks::default()).unwrap();
        let found = decode(&mut gpu, &texts, model.second_prompt, &CONFIGS);
        let expected = decode(&mut slow(&checkpoint, &options), &texts, model.second_prompt, &CONFIGS);
        failures.extend(report(model, &found, &expected));
    }
    // All models run before any assertion, so that one run reports all.
    assert!(failures.is_empty(), "{} of all are too far apart:\n{}", failures.len(), failures.join("\n"));
}

/// Errors by config and number of rows: the worst over all such steps.
fn by_config(found: &[Seen], expected: &[Seen]) -> Vec<(StepConfig, [usize; 2], Apart)> {
    assert_eq!(found.len(), expected.len());
    let mut all: Vec<(StepConfig, [usize; 2], Apart)> = Vec::new();
    for (found, expected) in found.iter().zip(expected) {
        let apart = Apart::of(found, expected);
        match all.iter_mut().find(|(config, rows, _)| (*config, *rows) == (found.config, found.rows)) {
            Some((_, _, worst)) => *worst = worst.most(apart),
            None => all.push((found.config, found.rows, apart)),
        }
    }
    all
}

/// Prints the errors; returns those beyond their bounds.
fn report(model: &Model, found: &[Seen], expected: &[Seen]) -> Vec<String> {
    let Shape { family, dtype, heads, kv_heads, head_dim, .. } = model.shape;
    let mut failures = Vec::new();
    for (config, rows, apart) in by_config(found, expected) {
        let (weights, view, pages) = config;
        let of = if rows == [0; 2] { "prompts".to_owned() } else { format!("{} + {} rows", rows[0], rows[1]) };
        let line = format!(
            "{family} {dtype} {heads}/{kv_heads}x{head_dim} {weights:?} {view:?} {pages:?} {of}: {:.4}, one {:.3}",
            apart.row, apart.one
        );
        eprintln!("{line}");
        let bound = bound(model, config);
        if !apart.within(bound) {
            failures.push(format!("{line}; allowed {}, one {}", bound.row, bound.one));
        }
    }
    failures
}

#[test]
fn models_with_heads_of_64() {
    compare(&HEADS_OF_64);
}

#[test]
fn models_with_heads_of_128() {
    compare(&HEADS_OF_128);
}

#[test]
fn models_with_heads_of_256() {
    compare(&HEADS_OF_256);
}

#[test]
fn families_with_angles_and_factors_of_their_own() {
    compare(&FAMILIES);
}

#[test]
fn models_with_local_layers() {
    compare(&WITH_LOCAL_LAYERS);
}

/// Weights in nibbles compared with the CPU backend on a checkpoint of the dequantised values. Drafts read a different
/// target's cache there; their GEMMs are compared in the tests of `hierarchy`.
#[test]
fn weights_in_nibbles() {
    let Some(device) = device() else { return };
    let models = [
        HEADS_OF_64[0],
        HEADS_OF_64[4],
        HEADS_OF_128[0],
        HEADS_OF_128[1],
        HEADS_OF_128[4],
        HEADS_OF_256[0],
        FAMILIES[1],
        FAMILIES[3],
        FAMILIES[5],
        FAMILIES[6],
        WITH_LOCAL_LAYERS[1],
    ];
    let configs: Vec<StepConfig> = CONFIGS.into_iter().filter(|&(weights, ..)| weights == Weights::Full).collect();
    let mut failures = Vec::new();
    for (model, seed) in models.iter().zip(1..).filter(|(model, _)| device.info.takes_heads_of(model.shape.head_dim)) {
        let (options, texts) = (model.options(), model.texts(99 + seed));
        for weights in [TargetWeights::Int8, TargetWeights::Int4] {
            let in_nibbles = Options { weights, ..options.clone() };
            let checkpoint = model.checkpoint(seed, &|_, _| ());
            let mut gpu = CudaBackend::load_on(&device, &checkpoint, &in_nibbles, Hooks::default()).unwrap();
            let found = decode(&mut gpu, &texts, model.second_prompt, &configs);
            let quantised = model.in_nibbles(seed, weights);
            let expected = decode(&mut slow(&quantised, &options), &texts, model.second_prompt, &configs);
            failures.extend(report(model, &found, &expected));
        }
    }
    assert!(failures.is_empty(), "{} of all are too far apart:\n{}", failures.len(), failures.join("\n"));
}

/// Sets of sensitive matrices that cover every mixture of fused and separate kernels.
const SENSITIVE: [&str; 5] = ["down", "qkv", "o", "gate-up", "qkv,o,gate-up,down"];

/// Drafts that read some matrices in 8 bits, of draft weights and of both planes, with fused and separate kernels.
#[test]
fn sensitive_matrices() {
    let Some(device) = device() else { return };
    let models = [HEADS_OF_64[0], HEADS_OF_64[4], HEADS_OF_64[6], HEADS_OF_128[1], HEADS_OF_128[5], HEADS_OF_256[3]];
    let configs = [(Weights::Draft, View::Both, Pages::All), (Weights::Draft, View::Upper, Pages::All)];
    let mut failures = Vec::new();
    for (model, seed) in models.iter().zip(1..).filter(|(model, _)| device.info.takes_heads_of(model.shape.head_dim)) {
        let (checkpoint, texts) = (model.checkpoint(seed, &|_, _| ()), model.texts(99 + seed));
        for names in SENSITIVE {
            let options = Options { sensitive: Sensitive::named(names).unwrap(), ..model.options() };
            let mut gpu = CudaBackend::load_on(&device, &checkpoint, &options, Hooks::default()).unwrap();
            let found = decode(&mut gpu, &texts, model.second_prompt, &configs);
            let expected = decode(&mut slow(&checkpoint, &options), &texts, model.second_prompt, &configs);
            eprintln!("{names}:");
            failures.extend(report(model, &found, &expected));
        }
        // A CPU's planes have other groups. Drafts that read both planes of every matrix compute what the target computes.
        if model.shape.dtype != "F32" {
            let sensitive = Sensitive::named(SENSITIVE[4]).unwrap();
            let options = Options { weights: TargetWeights::Int8, sensitive, ..model.options() };
            let mut gpu = CudaBackend::load_on(&device, &checkpoint, &options, Hooks::default()).unwrap();
            let mut of = |weights| decode(&mut gpu, &texts, model.second_prompt, &[(weights, View::Both, Pages::All)]);
            let (target, mut draft) = (of(Weights::Full), of(Weights::Draft));
            draft.iter_mut().zip(&target).for_each(|(draft, target)| draft.config = target.config);
            failures.extend(report(model, &draft, &target));
        }
    }
    assert!(failures.is_empty(), "{} of all are too far apart:\n{}", failures.len(), failures.join("\n"));
}

/// Rounding activations to 4 bits moves a draft's logits on the GPU by as much as on the CPU. The logits themselves differ: one
/// code at a tie is off by a seventh, and moves the next codes.
#[test]
fn four_bit_activations() {
    let Some(device) = device() else { return };
    let models = [HEADS_OF_64[0], HEADS_OF_64[6], HEADS_OF_128[1], HEADS_OF_128[5]];
    for (model, seed) in models.iter().zip(1..).filter(|(model, _)| device.info.takes_heads_of(model.shape.head_dim)) {
        let (checkpoint, texts) = (model.checkpoint(seed, &|_, _| ()), model.texts(99 + seed));
        let options = Options { sensitive: Sensitive::named("o").unwrap(), ..model.options() };
        let mut gpu = CudaBackend::load_on(&device, &checkpoint, &options, Hooks::default()).unwrap();
        let moved = [
            moved_by_rounding(&mut gpu, model, &texts),
            moved_by_rounding(&mut slow(&checkpoint, &options), model, &texts),
        ];
        eprintln!("{model:?}: {moved:.3?}");
        assert!((moved[0] / moved[1] - 1.0).abs() < 0.15, "{model:?}: {moved:.3?}");
    }
}

/// Mean distance, in deviations of a row, between logits of drafts with 4-bit and with 8-bit activations.
fn moved_by_rounding<B: Backend>(backend: &mut B, model: &Model, texts: &[Vec<u32>; 2]) -> f32 {
    let mut of = |weights| decode(backend, texts, model.second_prompt, &[(weights, View::Both, Pages::All)]);
    let (coarse, fine) = (of(Weights::Draft4), of(Weights::Draft));
    let drafts = coarse.iter().zip(&fine).filter(|(coarse, _)| coarse.config.0.is_draft());
    let apart: Vec<f32> = drafts
        .map(|(coarse, fine)| {
            Apart::of(&Seen { config: fine.config, rows: fine.rows, logits: coarse.logits.clone() }, fine).row
        })
        .collect();
    apart.iter().sum::<f32>() / apart.len() as f32
}

/// Reading a kind of matrices in 4 bits instead of 8 moves a row by more than twice what rounding does (0.035 in
/// [`sensitive_matrices`]).
#[test]
fn matrices_in_eight_bits_show() {
    let model = &HEADS_OF_64[0];
    let (checkpoint, texts) = (model.checkpoint(1, &|_, _| ()), model.texts(100));
    let config = (Weights::Draft, View::Both, Pages::All);
    let of = |sensitive| {
        let options = Options { sensitive, ..model.options() };
        let mut backend = CpuBackend::load(&checkpoint, &options, Hooks::default()).unwrap();
        decode(&mut backend, &texts, model.second_prompt, &[config])
    };
    let four = of(Sensitive::NONE);
    for names in SENSITIVE {
        let apart = by_config(&of(Sensitive::named(names).unwrap()), &four);
        let apart =
            apart.iter().filter(|(seen, ..)| *seen == config).fold(0.0, |worst, (.., apart)| most(worst, apart.row));
        eprintln!("{names}: {apart:.3}");
        assert!(apart > 0.08, "{names}: {apart:.3}");
    }
}

/// Defects of the second layer or the final norm.
fn defects(model: &Model) -> Vec<(String, Box<Edit>)> {
    let Shape { family, heads, kv_heads, .. } = model.shape;
    let mut all: Vec<(String, Box<Edit>)> = Vec::new();
    let mut filled = |name: String, value: f32| {
        let edit = {
            let name = name.clone();
            move |tensor: &str, values: &mut [f32]| {
                if tensor.ends_with(&name) {
                    values.fill(value);
                }
            }
        };
        all.push((format!("{name} is all {value}"), Box::new(edit)));
    };
    let llama = model.shape.biases && family == "llama";
    for (name, biased) in [
        ("self_attn.q_proj", llama || family == "qwen2"),
        ("self_attn.k_proj", llama || family == "qwen2"),
        ("self_attn.v_proj", llama || family == "qwen2"),
        ("self_attn.o_proj", llama),
        ("mlp.gate_proj", llama),
        ("mlp.up_proj", llama),
        ("mlp.down_proj", llama),
    ] {
        if biased {
            filled(format!("layers.1.{name}.bias"), 0.0);
        }
    }
    for name in ["input_layernorm", "post_attention_layernorm"] {
        filled(format!("layers.1.{name}.weight"), 1.0);
    }
    for name in ["q_norm", "k_norm"] {
        if family == "qwen3" {
            filled(format!("layers.1.self_attn.{name}.weight"), 1.0);
        }
    }
    filled("model.norm.weight".to_owned(), 1.0);
    for (name, heads) in [("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)] {
        let edit = move |tensor: &str, values: &mut [f32]| {
            if tensor.contains(&format!("layers.1.self_attn.{name}")) {
                let (first, others) = values.split_at_mut(values.len() / heads);
                first.swap_with_slice(&mut others[..first.len()]);
            }
        };
        if heads > 1 {
            all.push((format!("the first two heads of {name} are swapped"), Box::new(edit)));
        }
    }
    all
}

type Edit = dyn Fn(&str, &mut [f32]);

/// Each defect of a model exceeds the bounds for each number of rows, with full weights and draft weights. In view Upper,
/// where bounds are wide, other page lists do.
#[test]
fn defects_exceed_the_bounds() {
    // Every bias, and norms of heads, where bounds are widest.
    for index in [1, 3] {
        let (model, seed) = (&HEADS_OF_256[index], 1 + index as u64);
        let (options, texts) = (model.options(), model.texts(99 + seed));
        let decode = |configs: &[StepConfig], edit: &Edit| {
            // On the machine's fastest path, as it is compared with itself.
            let mut backend = CpuBackend::load(&model.checkpoint(seed, edit), &options, Hooks::default()).unwrap();
            decode(&mut backend, &texts, model.second_prompt, configs)
        };
        let narrow = [CONFIGS[0], TARGET, (Weights::Draft, View::Both, Pages::All)];
        let right = decode(&narrow, &|_, _| ());
        for (what, edit) in defects(model) {
            for (config, rows, apart) in by_config(&decode(&narrow, &edit), &right) {
                let allowed = bound(model, config).row;
                eprintln!("{what}: {:.3} of {config:?}, {rows:?} rows", apart.row);
                assert!(
                    apart.row > allowed,
                    "{what}: {:.3} where {allowed} are allowed, {config:?} {rows:?}",
                    apart.row
                );
            }
        }
        let lists = [Pages::All, Pages::Best(2), Pages::Best(3)].map(|pages| (Weights::Draft, View::Upper, pages));
        let seen = decode(&lists, &|_, _| ());
        for (other, config) in [(0, 1), (0, 2), (1, 2)].map(|(a, b)| (lists[a], lists[b])) {
            let of = |config: StepConfig| seen.iter().filter(move |seen| seen.config == config && seen.rows == [1, 0]);
            let found = of(other).map(|seen| Seen { config, rows: seen.rows, logits: seen.logits.clone() });
            let expected = of(config).map(|seen| Seen { config, rows: seen.rows, logits: seen.logits.clone() });
            let [(_, _, apart)] = by_config(&found.collect::<Vec<_>>(), &expected.collect::<Vec<_>>())[..] else {
                panic!()
            };
            assert!(apart.row > bound(model, config).row, "{other:?} for {config:?}: {:.3}", apart.row);
        }
    }
}
