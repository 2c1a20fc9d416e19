//! Cost of passes on this machine: the backend's own operations, timed on a model of the same shape with made-up weights.
//! `quantspec plan` adds them up.

use crate::CpuBackend;
use crate::bench::{SPREAD, logits};
use crate::panel::PANEL;
use crate::weights::nibble_bytes;
use quantspec_core::Result;
use quantspec_core::cache::{BUFFER_TOKENS, G, visible_pages};
use quantspec_core::config::{DraftWeights, ModelConfig, Pages, Planes, Sensitive, TargetWeights, View, Weights};
use quantspec_core::noise::Stream;
use quantspec_core::plan::full_page_bytes;
use quantspec_core::sample::{Accept, Sampler, choose};
use quantspec_model::backend::{Block, Branch, DraftConfig, Hooks, KvCache, Network, Options, Pass, Row, Step};
use quantspec_model::checkpoint::Checkpoint;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Rows of the timed passes of a target; the cost between them is nearly linear.
pub const ROWS: [usize; 5] = [1, 2, 4, 8, 16];

/// Most rows of a pass.
const MOST: usize = ROWS[ROWS.len() - 1];

/// Steps of a timed draft. The first chooses pages.
const DRAFTED: usize = 4;

/// Fewest rounds of all passes, and the time after which no further round starts.
const ROUNDS: usize = 5;
const MEASURING_TIME: Duration = Duration::from_millis(700);

/// Most bytes of the pages of one view. A longer context costs the same per page.
const CACHE_BYTES: usize = 256 << 20;

/// Prompt rows that are timed, most tokens before them, the fewest measurements, and the time after which no further one
/// starts.
const PROMPT_ROWS: usize = 256;
const PROMPT_BEFORE: usize = 4096;
const PROMPT_ROUNDS: usize = 3;
const PROMPT_TIME: Duration = Duration::from_millis(150);

/// What to time.
#[derive(Clone, Debug)]
pub struct Workload<'a> {
    /// The model's shape.
    pub config: &'a ModelConfig,
    /// How the target's weights are kept.
    pub weights: TargetWeights,
    /// Matrices that drafts read in 8 bits.
    pub sensitive: Sensitive,
    /// The target's view.
    pub view: View,
    /// Drafts.
    pub drafts: &'a [DraftConfig],
    /// Tokens of the sequence.
    pub context: usize,
    /// Threads.
    pub threads: usize,
}

/// Seconds of a pass over the whole model.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Embedding, norms, matrices.
    pub matrices_s: f64,
    /// Attention.
    pub attention_s: f64,
}

/// Costs of passes of one sequence, and operations per second of a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Rates {
    /// The target's, by rows of [`ROWS`].
    pub target: Vec<Cost>,
    /// The first step of each draft, and a later one, with one row.
    pub drafts: Vec<[Cost; 2]>,
    /// Seconds of a later one's matrices with as many rows as the last of [`ROWS`].
    pub many_s: Vec<f64>,
    /// Seconds to choose a token.
    pub token_s: f64,
    /// Floating-point operations of a prompt's GEMMs per second of all its operations but attention.
    pub prompt_matrix: f64,
    /// Floating-point operations per second of a prompt's attention.
    pub prompt_attention: f64,
}

/// Times every pass. Takes some seconds and holds about four times [`SPREAD`] bytes, or as much as the model if that is less.
/// `hooks` are called while the weights are made and between passes.
///
/// # Errors
/// Those of [`CpuBackend::load`] and of the hooks.
pub fn rates(work: &Workload, hooks: Hooks) -> Result<Rates> {
    let mut stand_in = StandIn::new(work, hooks)?;
    let mut target = vec![Vec::new(); ROWS.len()];
    let mut drafts = vec![[Vec::new(), Vec::new()]; work.drafts.len()];
    let mut many = vec![Vec::new(); work.drafts.len()];
    let (began, mut rounds) = (Instant::now(), 0);
    while rounds < ROUNDS || began.elapsed() < MEASURING_TIME {
        // As in rounds, drafts and verifications alternate: each may have replaced the other's weights in a cache.
        for (i, (config, [first, later])) in work.drafts.iter().zip(&mut drafts).enumerate() {
            stand_in.backend.poll()?;
            first.push(stand_in.step(config, 1, true)?);
            for _ in 1..DRAFTED {
                later.push(stand_in.step(config, 1, false)?);
            }
            let rows = 1 + (i + rounds) % (ROWS.len() - 1);
            target[rows].push(stand_in.target(ROWS[rows])?);
        }
        stand_in.backend.poll()?;
        // Not timed: in plain decoding a pass follows one that read the same weights.
        stand_in.target(1)?;
        for _ in 1..DRAFTED {
            target[0].push(stand_in.target(1)?);
        }
        for (config, many) in work.drafts.iter().zip(&mut many) {
            many.push(stand_in.step(config, MOST, true)?);
        }
        rounds += 1;
    }
    let cost = |times: &[Times], pages| stand_in.cost(times, pages);
    let mut found: Vec<Cost> = target.iter().map(|times| cost(times, Pages::All)).collect();
    // Less time for more rows is a disturbed measurement.
    for i in 1..found.len() {
        found[i].matrices_s = found[i].matrices_s.max(found[i - 1].matrices_s);
        found[i].attention_s = found[i].attention_s.max(found[i - 1].attention_s);
    }
    let drafts: Vec<[Cost; 2]> = (drafts.iter().zip(work.drafts))
        .map(|(times, config)| [cost(&times[0], config.pages), cost(&times[1], config.pages)])
        .collect();
    let many_s = (many.iter().zip(&drafts))
        .map(|(times, [_, later])| cost(times, Pages::All).matrices_s.max(later.matrices_s))
        .collect();
    let [prompt_matrix, prompt_attention] = stand_in.prompt(prompt_before(work))?;
    let token_s = token_s(work.config.vocab, &mut || stand_in.backend.poll())?;
    Ok(Rates { target: found, drafts, many_s, token_s, prompt_matrix, prompt_attention })
}

/// Seconds of parts of a pass of the stand-in.
#[derive(Clone, Copy, Debug, Default)]
struct Times {
    /// Embedding, norms and matrices of the layers.
    layers: f64,
    head: f64,
    /// Attention in layers that see all tokens, and in local ones.
    attention: [f64; 2],
}

/// A smaller model of the same widths: some layers, a part of a large vocabulary, the first pages of a long context. It still
/// has more bytes than any cache holds.
#[derive(Debug)]
struct Small {
    config: ModelConfig,
    /// Position of the last token, and the pages that it sees.
    position: usize,
    visible: usize,
    /// The model's numbers divided by those of `config`: layers (in nibbles their bytes, because these differ by layer),
    /// vocabulary, layers that see all tokens and local ones, pages.
    layers: f64,
    vocab: f64,
    kinds: [f64; 2],
    pages: f64,
}

impl Small {
    fn new(all: &ModelConfig, weights: TargetWeights, context: usize) -> Small {
        let (layer, row) = (layer_weights(all) * all.dtype.bytes(), all.hidden * all.dtype.bytes());
        let vocab = all.vocab.min((SPREAD / 4 / row).next_multiple_of(PANEL));
        let room = (SPREAD - (vocab * row).min(SPREAD / 4)) / layer.max(1);
        let layers = room.max(if all.local.is_some() { 2 } else { 1 }).min(all.layers);
        let mut config = ModelConfig { layers, vocab, ..all.clone() };
        if let Some(local) = &mut config.local
            && layers < all.layers
        {
            local.layers = (0..layers).map(|layer| layer % 2 == 0).collect();
        }
        let kinds = |config: &ModelConfig| {
            let local = (0..config.layers).filter(|layer| config.reach(*layer).is_some()).count();
            [config.layers - local, local]
        };
        let last = context.saturating_sub(1);
        let most = CACHE_BYTES / (layers * all.kv_heads * full_page_bytes(all.head_dim)).max(1);
        let visible = visible_pages(last).min(most.max(1));
        let of = |all: usize, some: usize| all as f64 / some.max(1) as f64;
        let (all_kinds, some_kinds) = (kinds(all), kinds(&config));
        Small {
            position: last - (visible_pages(last) - visible) * G,
            visible,
            layers: match weights {
                TargetWeights::Checkpoint => of(all.layers, layers),
                TargetWeights::Int8 | TargetWeights::Int4 => {
                    let options = Options { weights, ..Options::new(1, G) };
                    of(nibble_bytes(all, &options), nibble_bytes(&config, &options))
                }
            },
            vocab: of(all.vocab, vocab),
            kinds: [of(all_kinds[0], some_kinds[0]), of(all_kinds[1], some_kinds[1])],
            pages: of(visible_pages(last), visible).max(1.0),
            config,
        }
    }
}

/// The backend that is timed.
struct StandIn {
    backend: CpuBackend,
    view: View,
    small: Small,
    /// Attention of a row that sees no page, in layers that see all tokens: seconds, if the context is longer than the timed one.
    recent_s: f64,
}

impl StandIn {
    fn new(work: &Workload, hooks: Hooks) -> Result<StandIn> {
        let small = Small::new(work.config, work.weights, work.context);
        let (position, visible) = (small.position, small.visible);
        let backend = load(work, small.config.clone(), position, hooks)?;
        let mut stand_in = StandIn { backend, view: work.view, small, recent_s: 0.0 };
        stand_in.fill(visible)?;
        if stand_in.small.pages > 1.0 {
            stand_in.small.position = position % G + G;
            let times: Vec<Times> = (0..=ROUNDS).map(|_| stand_in.target(1)).collect::<Result<_>>()?;
            stand_in.recent_s = median(&times, |times| times.attention[0]);
            stand_in.small.position = position;
        }
        Ok(stand_in)
    }

    /// Fills the buffer, and every page from it.
    fn fill(&mut self, pages: usize) -> Result<()> {
        for start in (0..BUFFER_TOKENS).step_by(MOST) {
            let rows: Vec<Row> = (0..MOST).map(|offset| Row { slot: 0, offset, position: start + offset }).collect();
            let step =
                Step { weights: Weights::Full, view: self.view, pages: Pages::All, choose_pages: false, rows: &rows };
            self.backend.embed(&Pass::Step(&step))?;
            for layer in 0..self.backend.config().layers {
                self.backend.qkv(layer, &Pass::Step(&step))?;
            }
        }
        (0..pages).try_for_each(|page| self.backend.flush(0, page))
    }

    /// A pass of the target.
    fn target(&mut self, rows: usize) -> Result<Times> {
        let target = DraftConfig { weights: Weights::Full, view: self.view, pages: Pages::All };
        self.step(&target, rows, false)
    }

    /// A step that reads this, of rows from the last position on.
    fn step(&mut self, reads: &DraftConfig, rows: usize, choose_pages: bool) -> Result<Times> {
        let DraftConfig { weights, view, pages } = *reads;
        let rows: Vec<Row> =
            (0..rows).map(|offset| Row { slot: 0, offset, position: self.small.position + offset }).collect();
        // The attention of a prompt's end, by which Snap chooses, is not known; as many other pages cost the same.
        let pages = if let Pages::Snap { pages, .. } = pages { Pages::Window(pages) } else { pages };
        self.pass(&Pass::Step(&Step { weights, view, pages, choose_pages, rows: &rows }))
    }

    /// A pass, timed by part.
    fn pass(&mut self, pass: &Pass) -> Result<Times> {
        let (mut times, mut clock) = (Times::default(), Instant::now());
        let mut lap = |sum: &mut f64| {
            let now = Instant::now();
            *sum += (now - clock).as_secs_f64();
            clock = now;
        };
        let backend = &mut self.backend;
        backend.embed(pass)?;
        for layer in 0..backend.config().layers {
            backend.qkv(layer, pass)?;
            lap(&mut times.layers);
            backend.attend(layer, pass)?;
            lap(&mut times.attention[usize::from(backend.config().reach(layer).is_some())]);
            backend.output(layer, pass)?;
            backend.reduce_residual(layer, Branch::Attention, pass)?;
            backend.gate_up(layer, pass)?;
            backend.down(layer, pass)?;
            backend.reduce_residual(layer, Branch::Mlp, pass)?;
            lap(&mut times.layers);
        }
        backend.head(pass)?;
        lap(&mut times.head);
        Ok(times)
    }

    /// Operations per second of a prompt's GEMMs and of its attention, with `before` tokens before the timed ones.
    fn prompt(&mut self, before: usize) -> Result<[f64; 2]> {
        let config = self.small.config.clone();
        let tokens: Vec<u32> = (0..before + PROMPT_ROWS).map(|token| (token % config.vocab) as u32).collect();
        let block = |start| Pass::Prefill(Block { slot: 0, prompt: &tokens, first: 0, start, rows: PROMPT_ROWS });
        // Warms up, and makes the keys and values that are stored.
        self.pass(&block(0))?;
        let (began, mut times) = (Instant::now(), Vec::new());
        while times.len() < PROMPT_ROUNDS || began.elapsed() < PROMPT_TIME {
            self.backend.poll()?;
            let mut found = self.pass(&block(before))?;
            let started = Instant::now();
            (0..config.layers).try_for_each(|layer| self.backend.store(layer, 0, PROMPT_ROWS))?;
            found.layers += started.elapsed().as_secs_f64();
            times.push(found);
        }
        let global = (0..config.layers).filter(|layer| config.reach(*layer).is_none()).count();
        let matrices = 2 * PROMPT_ROWS * config.layers * layer_weights(&config);
        let seen = PROMPT_ROWS * before + PROMPT_ROWS * (PROMPT_ROWS + 1) / 2;
        let attention = 4 * config.q_width() * seen * global;
        Ok([
            matrices as f64 / median(&times, |times| times.layers),
            attention as f64 / median(&times, |times| times.attention[0]),
        ])
    }

    /// The whole model's cost. A step that reads selected pages costs the same after a longer context.
    fn cost(&self, times: &[Times], pages: Pages) -> Cost {
        let median = |part: fn(&Times) -> f64| median(times, part);
        let (Small { layers, vocab, kinds, pages: longer, .. }, recent_s) = (&self.small, self.recent_s);
        let (global, local) = (median(|times| times.attention[0]), median(|times| times.attention[1]));
        let more = if pages == Pages::All { (longer - 1.0) * (global - recent_s).max(0.0) } else { 0.0 };
        Cost {
            matrices_s: layers * median(|times| times.layers) + vocab * median(|times| times.head),
            attention_s: kinds[0] * (global + more) + kinds[1] * local,
        }
    }
}

/// Weights of a layer's matrices.
fn layer_weights(config: &ModelConfig) -> usize {
    config.hidden * (2 * (config.q_width() + config.kv_width()) + 3 * config.intermediate)
}

/// Tokens before the timed rows of a prompt: half of the context, which a token sees on average.
fn prompt_before(work: &Workload) -> usize {
    (work.context / 2).min(PROMPT_BEFORE).next_multiple_of(PROMPT_ROWS)
}

/// A backend of made-up weights with room for a sequence of this many tokens and a round.
fn load(work: &Workload, config: ModelConfig, tokens: usize, hooks: Hooks) -> Result<CpuBackend> {
    let capacity = (tokens.max(BUFFER_TOKENS) + MOST).next_multiple_of(G) + G;
    let options = Options {
        prompt_capacity: prompt_before(work) + PROMPT_ROWS,
        planes: Planes { upper: true, lower: work.view == View::Both, full: work.view == View::Full },
        weights: work.weights,
        draft_weights: DraftWeights::Int4,
        sensitive: work.sensitive,
        step_rows: MOST,
        block_rows: PROMPT_ROWS,
        threads: work.threads,
        ..Options::new(1, capacity)
    };
    let vocab = config.vocab as u32;
    let mut backend = CpuBackend::load(&Checkpoint::stand_in(config), &options, hooks)?;
    backend.open(0, capacity)?;
    let window: Vec<u32> = (0..MOST as u32).map(|token| token % vocab).collect();
    backend.set_window(0, &window)?;
    Ok(backend)
}

/// Seconds to choose a token at temperature 1 from logits like those of text.
fn token_s(vocab: usize, poll: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
    let (logits, sampler) =
        (logits(vocab, 1), Sampler { temperature: 1.0, accept: Accept::Replay, ..Sampler::greedy() });
    let mut position = 0;
    timed(poll, || {
        position += 1;
        black_box(choose(&logits, &sampler, position, Stream::Sample));
        Ok(())
    })
}

/// Seconds of a call after a warm-up.
fn timed(poll: &mut dyn FnMut() -> Result<()>, mut call: impl FnMut() -> Result<()>) -> Result<f64> {
    call()?;
    let (began, mut times) = (Instant::now(), Vec::new());
    while times.len() < ROUNDS || began.elapsed() < MEASURING_TIME / 8 {
        poll()?;
        let started = Instant::now();
        call()?;
        times.push(started.elapsed().as_secs_f64());
    }
    Ok(median(&times, |time| *time))
}

/// The median of one part of the measurements, because the least is faster than a usual step in decoding; 0 without any.
fn median<T>(times: &[T], part: impl Fn(&T) -> f64) -> f64 {
    let mut times: Vec<f64> = times.iter().map(part).collect();
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use quantspec_core::Error;
    use quantspec_core::config::{Dtype, Local};
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering::Relaxed;

    /// A model of two layers with heads of 64.
    fn small() -> ModelConfig {
        ModelConfig {
            layers: 2,
            hidden: 192,
            intermediate: 416,
            heads: 4,
            kv_heads: 2,
            vocab: 300,
            max_positions: 4096,
            tied_embeddings: true,
            ..ModelConfig::default()
        }
    }

    /// Of a draft with 4-bit weights, and of one that chooses pages.
    const DRAFTS: [DraftConfig; 2] = [
        DraftConfig { weights: Weights::Draft, view: View::Upper, pages: Pages::All },
        DraftConfig { weights: Weights::Full, view: View::Upper, pages: Pages::Best(2) },
    ];

    fn workload(config: &ModelConfig, weights: TargetWeights, context: usize) -> Workload<'_> {
        let (view, drafts) = (View::Both, &DRAFTS);
        Workload { config, weights, sensitive: Sensitive::NONE, view, drafts, context, threads: 2 }
    }

    #[test]
    fn rates_are_plausible() {
        let local = Local { layers: vec![true, false], reach: 512, rope: small().rope };
        let gemma = ModelConfig { local: Some(local), ..small() };
        for (config, weights) in [
            (&small(), TargetWeights::Checkpoint),
            (&small(), TargetWeights::Int8),
            (&small(), TargetWeights::Int4),
            (&gemma, TargetWeights::Checkpoint),
        ] {
            for context in [0, 1000] {
                let found = rates(&workload(config, weights, context), Hooks::default()).unwrap();
                assert_eq!((found.target.len(), found.drafts.len(), found.many_s.len()), (ROWS.len(), 2, 2));
                let costs = found.target.iter().chain(found.drafts.iter().flatten());
                let seconds = costs.flat_map(|cost| [cost.matrices_s, cost.attention_s]).chain(found.many_s.clone());
                for seconds in seconds.chain([found.token_s]) {
                    assert!((1e-7..1.0).contains(&seconds), "{found:?}");
                }
                for rate in [found.prompt_matrix, found.prompt_attention] {
                    assert!((1e6..1e15).contains(&rate), "{found:?}");
                }
            }
        }
    }

    #[test]
    fn a_small_model_is_timed_whole() {
        let Small { config, position, visible, layers, vocab, kinds, pages } =
            Small::new(&small(), TargetWeights::Int4, 1000);
        assert_eq!((config, position, visible), (small(), 999, visible_pages(999)));
        assert_eq!((layers, vocab, kinds, pages), (1.0, 1.0, [1.0, 0.0], 1.0));
    }

    #[test]
    fn of_a_large_model_a_part_is_timed() {
        let layers: Vec<bool> = (0..48).map(|layer| layer % 6 != 5).collect();
        let large = ModelConfig {
            layers: 48,
            hidden: 4096,
            intermediate: 14_336,
            heads: 32,
            kv_heads: 8,
            head_dim: 128,
            vocab: 128_256,
            dtype: Dtype::Bf16,
            local: Some(Local { layers, reach: 1024, rope: small().rope }),
            ..small()
        };
        let part = Small::new(&large, TargetWeights::Int8, 131_072);
        // A layer has 416 MiB; of local and other layers there is at least one each.
        assert_eq!((part.config.layers, part.layers, part.kinds), (2, 24.0, [8.0, 40.0]));
        assert_eq!((part.config.vocab, part.vocab), (16_384, 128_256.0 / 16_384.0));
        // A page has 64 KiB in each of 2 layers and 8 heads.
        assert_eq!((part.visible, part.pages), (256, 1022.0 / 256.0));
        assert_eq!(visible_pages(part.position), part.visible);
        assert_eq!(part.position % G, 131_071 % G);
        // Of the two timed layers one has both planes of `down`, of all 48 a quarter.
        let int4 = Small::new(&large, TargetWeights::Int4, 131_072);
        assert_eq!((int4.layers * 100.0).round(), 2_286.0);
    }

    #[test]
    fn an_interrupt_ends_the_measurement() {
        // While weights are made, and between passes.
        for last in [1, 100] {
            let calls = Arc::new(AtomicUsize::new(0));
            let seen = calls.clone();
            let poll = move || if seen.fetch_add(1, Relaxed) + 1 == last { Err(Error::interrupted()) } else { Ok(()) };
            let hooks = Hooks { poll: Box::new(poll), ..Hooks::default() };
            let error = rates(&workload(&small(), TargetWeights::Checkpoint, 0), hooks).err();
            let expected = Some(quantspec_core::ErrorKind::Interrupted);
            assert_eq!((error.map(|error| error.kind), calls.load(Relaxed)), (expected, last));
        }
    }
}
