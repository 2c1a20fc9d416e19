//! Times of single passes of a model of any shape, grouped by the memory speed around each pass.
//!
//! `cargo run --release -p quantspec-cpu --example timing -- DIR THREADS DEPTH… [--rounds N]`: DIR is a checkpoint, or `1b`
//! or `8b` for a sparse file of zeros of that shape in the temporary directory. The cached pages repeat three pages of one
//! token, which suffices to time memory traffic and arithmetic.
//!
//! Memory may change between two speeds within seconds. So memory is read for some milliseconds before and after every pass.
//! A pass is dropped if the two reads differ in speed, or if its threads waited for a core. The other passes are grouped into
//! speed classes, and a ratio compares two passes of one class. Kinds of passes alternate, N rounds of them, so that every
//! class contains all kinds.

use quantspec_core::Result;
use quantspec_core::cache::{BUFFER_TOKENS, G, visible_buffer, visible_pages};
use quantspec_core::config::{Pages, View, Weights};
use quantspec_core::plan::{full_page_bytes, lower_page_bytes, upper_page_bytes};
use quantspec_cpu::CpuBackend;
use quantspec_cpu::bench::{Llama, Read, SPREAD, machine};
use quantspec_model::backend::{Backend, Block, Hooks, KvCache, Network, Options, Pass, Row, Step};
use quantspec_model::checkpoint::{Checkpoint, LayerPart, Part};
use quantspec_model::forward;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Rounds of all kinds of passes, after a warm-up round.
const ROUNDS: usize = 12;

/// Repetitions of a prompt block, which is compute-bound; the best is printed.
const REPETITIONS: usize = 7;

/// Bytes of a memory read around a pass: 2 to 4 milliseconds on a two-core server.
const READ_BYTES: usize = 128 << 20;

/// A pass counts if the slower of the two reads reaches this share of the faster.
const STEADY: f64 = 0.9;

/// A pass counts if its threads together waited at most this share of its time for a core.
const WAITING: f64 = 0.02;

/// Speeds are split into two classes if the classes' means differ by this factor.
const APART: f64 = 1.25;

/// Fewest passes of one row in a class; fewer may all be disturbed by another process.
const FEW: usize = 3;

/// Longer than a pool's threads spin: the backend's threads and the reading threads share the cores.
const REST: Duration = Duration::from_millis(1);

/// Operations of a pass.
const OPERATIONS: [&str; 7] = ["embed", "qkv", "attend", "output", "gate_up", "down", "head"];

/// A kind of pass.
struct Kind {
    name: &'static str,
    rows: usize,
    weights: Weights,
    view: View,
    pages: Pages,
}

impl Kind {
    const fn verify(name: &'static str, rows: usize) -> Kind {
        Kind { name, rows, weights: Weights::Full, view: View::Both, pages: Pages::All }
    }

    const fn draft(name: &'static str, pages: Pages) -> Kind {
        Kind { name, rows: 1, weights: Weights::Draft, view: View::Upper, pages }
    }
}

/// The kinds of passes that alternate. Ratios are relative to the first.
const KINDS: [Kind; 8] = [
    Kind::verify("one row, int8", 1),
    Kind { view: View::Full, ..Kind::verify("one row, fp16", 1) },
    Kind::draft("draft", Pages::All),
    Kind::draft("draft, best 16", Pages::Best(16)),
    Kind::verify("2 rows", 2),
    Kind::verify("3 rows", 3),
    Kind::verify("5 rows", 5),
    Kind::verify("8 rows", 8),
];

/// A pass that counts.
#[derive(Clone)]
struct Sample {
    ms: f64,
    /// GB/s around it.
    read: f64,
    operations: [f64; 7],
}

/// Writes a checkpoint of zeros: hidden, intermediate, layers, heads, KV heads, head_dim, vocab.
fn zeros(name: &str, shape: [usize; 7]) -> std::io::Result<PathBuf> {
    let folder = std::env::temp_dir().join(format!("quantspec-timing-{name}"));
    std::fs::create_dir_all(&folder)?;
    let llama = Llama::new(shape);
    std::fs::write(folder.join("config.json"), llama.config)?;
    let mut file = std::fs::File::create(folder.join("model.safetensors"))?;
    file.write_all(&llama.header)?;
    file.set_len((llama.header.len() + llama.bytes) as u64)?;
    Ok(folder)
}

/// Milliseconds of each operation of a pass, summed over the layers.
fn operations(backend: &mut CpuBackend, pass: &Pass) -> Result<[f64; 7]> {
    let mut times = [0f64; 7];
    let mut timed = |index: usize, work: &mut dyn FnMut() -> Result<()>| -> Result<()> {
        let started = Instant::now();
        work()?;
        times[index] += started.elapsed().as_secs_f64() * 1e3;
        Ok(())
    };
    timed(0, &mut || backend.embed(pass))?;
    for layer in 0..backend.config().layers {
        timed(1, &mut || backend.qkv(layer, pass))?;
        timed(2, &mut || backend.attend(layer, pass))?;
        timed(3, &mut || backend.output(layer, pass).and_then(|()| backend.reduce_residual(pass)))?;
        timed(4, &mut || backend.gate_up(layer, pass))?;
        timed(5, &mut || backend.down(layer, pass).and_then(|()| backend.reduce_residual(pass)))?;
    }
    timed(6, &mut || backend.head(pass))?;
    Ok(times)
}

/// A pass of a kind at `depth`: total milliseconds, milliseconds waiting for cores, and milliseconds of each operation.
fn pass(backend: &mut CpuBackend, kind: &Kind, depth: usize) -> Result<(f64, f64, [f64; 7])> {
    let rows = rows(depth, kind.rows);
    let step = Step { weights: kind.weights, view: kind.view, pages: kind.pages, choose_pages: true, rows: &rows };
    // The threads are parked, and the system may wake one on a busy core. An extra head pass wakes them; the weights it reads
    // are evicted before the pass reads its own.
    backend.head(&Pass::Step(&step))?;
    let (waited_before, started) = (waited(), Instant::now());
    let operations = operations(backend, &Pass::Step(&step))?;
    let ms = started.elapsed().as_secs_f64() * 1e3;
    Ok((ms, waited() - waited_before, operations))
}

/// Milliseconds for which threads of this process were ready without a core so far. 0 on systems other than Linux.
fn waited() -> f64 {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let nanoseconds = tasks.filter_map(|task| {
        let counts = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        counts.split_whitespace().nth(1)?.parse::<f64>().ok()
    });
    nanoseconds.sum::<f64>() / 1e6
}

fn rows(position: usize, count: usize) -> Vec<Row> {
    (0..count).map(|offset| Row { slot: 0, offset, position: position + offset }).collect()
}

/// Fills the ring with tokens, and every page from the ring. Unwritten pages may all map to one zero page, which stays in the
/// cache.
fn fill(backend: &mut CpuBackend, tokens: &[u32], depth: usize) -> Result<()> {
    backend.set_window(0, tokens)?;
    for start in (0..BUFFER_TOKENS).step_by(tokens.len()) {
        let rows = rows(start, tokens.len().min(BUFFER_TOKENS - start));
        let (weights, view, pages) = (Weights::Full, View::Both, Pages::All);
        // At the start of the sequence only the ring is read.
        forward::step(backend, &Step { weights, view, pages, choose_pages: true, rows: &rows })?;
    }
    (0..depth / G).try_for_each(|page| backend.flush(0, page))
}

/// Bytes that a pass of a kind reads at `depth`, as `quantspec bench` counts them, plus the bounds of pages if it chooses
/// them.
fn bytes(kind: &Kind, backend: &CpuBackend, checkpoint: &Checkpoint, depth: usize) -> usize {
    let config = checkpoint.config();
    let matrices = |layer| LayerPart::MATRICES.map(|part| Part::Layer(layer, part));
    let weights = match kind.weights {
        Weights::Full => {
            (0..config.layers).flat_map(matrices).chain([Part::Head]).map(|part| checkpoint.bytes(part)).sum()
        }
        Weights::Draft | Weights::Draft4 => backend.memory().draft_weights_bytes,
    };
    let (visible, d) = (visible_pages(depth), config.head_dim);
    let (pages, bounds) = match kind.pages {
        Pages::Best(n) => (visible.min(n), visible * 4 * d),
        pages => (pages.count().map_or(visible, |n| n.min(visible)), 0),
    };
    let page = match kind.view {
        View::Upper => upper_page_bytes(d),
        View::Both => upper_page_bytes(d) + lower_page_bytes(d),
        View::Full => full_page_bytes(d),
    };
    weights + config.layers * config.kv_heads * (pages * page + bounds + visible_buffer(depth).len() * 4 * d)
}

/// Lower limits of the speed classes, ascending. A class is split in two if that removes most of the variance of its
/// logarithms and the means differ by [`APART`].
fn classes(speeds: &[f64]) -> Vec<f64> {
    let mean = |speeds: &[f64]| speeds.iter().map(|speed| speed.ln()).sum::<f64>() / speeds.len() as f64;
    let squares = |speeds: &[f64]| {
        let mean = mean(speeds);
        speeds.iter().map(|speed| (speed.ln() - mean).powi(2)).sum::<f64>()
    };
    let cost = |cut: usize| squares(&speeds[..cut]) + squares(&speeds[cut..]);
    match (1..speeds.len()).min_by(|a, b| cost(*a).total_cmp(&cost(*b))) {
        Some(cut) if mean(&speeds[cut..]) - mean(&speeds[..cut]) > APART.ln() => {
            [classes(&speeds[..cut]), classes(&speeds[cut..])].concat()
        }
        _ => speeds.first().copied().into_iter().collect(),
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn line(times: [f64; 7]) -> String {
    OPERATIONS.iter().zip(times).map(|(name, ms)| format!("{name} {ms:.2}")).collect::<Vec<_>>().join(", ")
}

/// Prints the passes of one class, `[kind][sample]`, with the bytes of each kind.
fn table(out: &mut impl Write, samples: &[Vec<Sample>], bytes: &[usize]) -> std::io::Result<()> {
    let count: usize = samples.iter().map(Vec::len).sum();
    let reads = || samples.iter().flatten().map(|sample| sample.read);
    let (least, most) = (reads().fold(f64::MAX, f64::min), reads().fold(0.0, f64::max));
    write!(out, "  memory at {least:.1} to {most:.1} GB/s, median {:.1}: {count} passes", median(reads()))?;
    if samples[0].len() < FEW {
        return writeln!(out, ", too few of one row to compare with");
    }
    writeln!(out)?;
    let best = |samples: &[Sample]| samples.iter().map(|sample| sample.ms).fold(f64::NAN, f64::min);
    let middle = |samples: &[Sample]| median(samples.iter().map(|sample| sample.ms));
    let one = (best(&samples[0]), middle(&samples[0]));
    writeln!(out, "    {:16}passes   best ms    median   x one row: best, median   x its bytes", "")?;
    for ((kind, samples), bytes) in KINDS.iter().zip(samples).zip(bytes).filter(|((_, samples), _)| !samples.is_empty())
    {
        let (best, middle) = (best(samples), middle(samples));
        // Milliseconds times GB/s are millions of bytes.
        let share = median(samples.iter().map(|sample| sample.ms * sample.read * 1e6 / *bytes as f64));
        let (name, passes, [a, b]) = (kind.name, samples.len(), [best / one.0, middle / one.1]);
        writeln!(out, "    {name:16}{passes:6} {best:9.2} {middle:9.2} {a:17.3} {b:8.3} {share:13.3}")?;
    }
    for (kind, samples) in KINDS.iter().zip(samples).filter(|(kind, samples)| {
        kind.weights == Weights::Full && kind.view == View::Both && matches!(kind.rows, 1 | 5) && !samples.is_empty()
    }) {
        let medians = std::array::from_fn(|i| median(samples.iter().map(|sample| sample.operations[i])));
        writeln!(out, "    {}, medians in ms: {}", kind.name, line(medians))?;
    }
    Ok(())
}

fn run(out: &mut impl Write) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let error = |error: quantspec_core::Error| format!("{error} ({})", error.hint);
    let (mut arguments, mut rounds) = (Vec::new(), ROUNDS);
    let mut given = std::env::args().skip(1);
    while let Some(argument) = given.next() {
        match argument.as_str() {
            "--rounds" => rounds = given.next().ok_or("--rounds needs a number")?.parse()?,
            _ => arguments.push(argument),
        }
    }
    let folder = match arguments.first().map_or("1b", String::as_str) {
        "1b" => zeros("1b", [2048, 8192, 16, 16, 4, 128, 128_256])?,
        "8b" => zeros("8b", [4096, 14_336, 32, 32, 8, 128, 128_256])?,
        folder => Path::new(folder).to_path_buf(),
    };
    let threads: usize = arguments.get(1).map_or(Ok(2), |text| text.parse())?;
    let depths: Vec<usize> =
        arguments.iter().skip(2).map(|text| text.parse()).collect::<std::result::Result<_, _>>()?;
    let depths = if depths.is_empty() { vec![0] } else { depths };
    let checkpoint = Checkpoint::open(&folder).map_err(error)?;
    let deepest = depths.iter().max().copied().unwrap_or(0);
    let capacity = deepest + 512;
    let options = Options { threads, ..Options::new(1, capacity) };
    let started = Instant::now();
    let mut backend = CpuBackend::load(&checkpoint, &options, Hooks::default()).map_err(error)?;
    let memory = backend.memory();
    writeln!(
        out,
        "{} on {threads} threads, loaded in {:.1} s: weights {:.3} GB, draft {:.3} GB",
        backend.simd(),
        started.elapsed().as_secs_f64(),
        memory.weights_bytes as f64 / 1e9,
        memory.draft_weights_bytes as f64 / 1e9
    )?;
    let machine = machine().map_err(error)?.with_threads(threads);
    let mut read = Read::in_parts(machine, SPREAD / READ_BYTES).map_err(error)?;
    let mut speed = || {
        let rest = || {
            let started = Instant::now();
            while started.elapsed() < REST {
                std::hint::spin_loop();
            }
        };
        rest();
        let speed = read.gb_per_s();
        rest();
        speed
    };
    backend.open(0, capacity).map_err(error)?;
    let tokens: Vec<u32> = (0..16).map(|token| token % backend.config().vocab as u32).collect();
    fill(&mut backend, &tokens, deepest).map_err(error)?;
    for depth in depths {
        let bytes = KINDS.each_ref().map(|kind| bytes(kind, &backend, &checkpoint, depth));
        let mut samples = KINDS.each_ref().map(|_| Vec::new());
        let (mut unsteady, mut disturbed) = (0, 0);
        let mut before = speed().map_err(error)?;
        for round in 0..=rounds {
            for (kind, samples) in KINDS.iter().zip(&mut samples) {
                let (ms, waiting, operations) = pass(&mut backend, kind, depth).map_err(error)?;
                let after = speed().map_err(error)?;
                // The first round warms up.
                match round {
                    0 => (),
                    _ if waiting > WAITING * ms => disturbed += 1,
                    _ if before.min(after) < STEADY * before.max(after) => unsteady += 1,
                    _ => samples.push(Sample { ms, read: (before + after) / 2.0, operations }),
                }
                before = after;
            }
        }
        let mut speeds: Vec<f64> = samples.iter().flatten().map(|sample| sample.read).collect();
        speeds.sort_by(f64::total_cmp);
        writeln!(
            out,
            "depth {depth}: {rounds} rounds, dropped {unsteady} passes between reads of different speed, {disturbed} that waited for cores"
        )?;
        let from = classes(&speeds);
        for (class, from) in from.iter().enumerate().map(|(class, &start)| (from.get(class + 1), start)) {
            let inside = |sample: &&Sample| sample.read >= from && class.is_none_or(|end| sample.read < *end);
            let class = samples.each_ref().map(|samples| samples.iter().filter(inside).cloned().collect::<Vec<_>>());
            table(out, &class, &bytes)?;
        }
        let prompt = vec![1; depth + 256];
        let block = Pass::Prefill(Block { slot: 0, prompt: &prompt, start: depth, rows: 256 });
        let mut best = [f64::MAX; 7];
        for _ in 0..REPETITIONS {
            let times = operations(&mut backend, &block).map_err(error)?;
            best.iter_mut().zip(times).for_each(|(best, ms)| *best = best.min(ms));
        }
        writeln!(out, "  256 rows of a prompt, the best of {REPETITIONS} in ms: {}", line(best))?;
    }
    let prompt = vec![1; capacity.min(512)];
    let started = Instant::now();
    forward::prefill(&mut backend, 0, &prompt, 256, &mut |_, _| ()).map_err(error)?;
    writeln!(
        out,
        "prefill of {}: {:.1} tokens/s",
        prompt.len(),
        prompt.len() as f64 / started.elapsed().as_secs_f64()
    )?;
    Ok(())
}

fn main() -> std::process::ExitCode {
    match run(&mut std::io::stdout()) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "error: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}
