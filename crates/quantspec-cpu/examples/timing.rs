//! Times of single passes of a model of any shape, beside the memory read of the same minute.
//!
//! `cargo run --release -p quantspec-cpu --example timing -- DIR THREADS DEPTH…`: DIR is a checkpoint; with `1b` or `8b` in its
//! place a file of zeros of that shape is made in the temporary directory (a sparse file: it takes no disk). Cached pages are
//! zeros too: what is timed is traffic and arithmetic, not text.

use quantspec_core::Result;
use quantspec_core::config::{DraftWeights, Pages, Planes, Rounding, View, Weights};
use quantspec_cpu::{CpuBackend, read_gb_per_s};
use quantspec_model::backend::{Backend, Block, Hooks, Options, Pass, Row, Step};
use quantspec_model::checkpoint::Checkpoint;
use quantspec_model::forward;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Repetitions of a pass; the best and the median are printed.
const REPETITIONS: usize = 7;

/// Writes a checkpoint of zeros: hidden, intermediate, layers, heads, KV heads, head_dim, vocab.
fn zeros(name: &str, [h, f, layers, heads, kv_heads, d, vocab]: [usize; 7]) -> std::io::Result<PathBuf> {
    let folder = std::env::temp_dir().join(format!("quantspec-timing-{name}"));
    std::fs::create_dir_all(&folder)?;
    std::fs::write(
        folder.join("config.json"),
        format!(
            r#"{{"model_type":"llama","hidden_size":{h},"intermediate_size":{f},"num_hidden_layers":{layers},
            "num_attention_heads":{heads},"num_key_value_heads":{kv_heads},"head_dim":{d},"vocab_size":{vocab},
            "max_position_embeddings":131072,"rms_norm_eps":1e-5,"rope_theta":500000.0,"hidden_act":"silu",
            "tie_word_embeddings":true,"torch_dtype":"bfloat16"}}"#
        ),
    )?;
    let mut tensors =
        vec![("model.embed_tokens.weight".to_string(), vec![vocab, h]), ("model.norm.weight".to_string(), vec![h])];
    for layer in 0..layers {
        for (part, shape) in [
            ("input_layernorm", vec![h]),
            ("post_attention_layernorm", vec![h]),
            ("self_attn.q_proj", vec![heads * d, h]),
            ("self_attn.k_proj", vec![kv_heads * d, h]),
            ("self_attn.v_proj", vec![kv_heads * d, h]),
            ("self_attn.o_proj", vec![h, heads * d]),
            ("mlp.gate_proj", vec![f, h]),
            ("mlp.up_proj", vec![f, h]),
            ("mlp.down_proj", vec![h, f]),
        ] {
            tensors.push((format!("model.layers.{layer}.{part}.weight"), shape));
        }
    }
    let (mut header, mut end) = (String::new(), 0);
    for (name, shape) in tensors {
        let start = end;
        end += 2 * shape.iter().product::<usize>();
        let comma = if header.is_empty() { "" } else { "," };
        header += &format!(r#"{comma}"{name}":{{"dtype":"BF16","shape":{shape:?},"data_offsets":[{start},{end}]}}"#);
    }
    let header = format!("{{{header}}}");
    let mut file = std::fs::File::create(folder.join("model.safetensors"))?;
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    file.set_len(8 + header.len() as u64 + end as u64)?;
    Ok(folder)
}

/// Best and median milliseconds of a step of `rows` rows at `depth`.
fn time(backend: &mut CpuBackend, rows: usize, depth: usize, plan: (Weights, View, Pages)) -> Result<(f64, f64)> {
    backend.set_window(0, &vec![1; rows])?;
    let rows: Vec<Row> = (0..rows).map(|offset| Row { slot: 0, offset, position: depth + offset }).collect();
    let (weights, view, pages) = plan;
    let mut times = Vec::new();
    for _ in 0..=REPETITIONS {
        let step = Step { weights, view, pages, choose_pages: true, rows: &rows };
        let started = Instant::now();
        forward::step(backend, &step)?;
        times.push(started.elapsed().as_secs_f64() * 1e3);
    }
    times.remove(0);
    times.sort_by(f64::total_cmp);
    Ok((times[0], times[times.len() / 2]))
}

/// Milliseconds of each operation of a pass, summed over the layers: the best of the repetitions.
fn operations(backend: &mut CpuBackend, pass: &Pass) -> Result<Vec<(&'static str, f64)>> {
    let layers = backend.config().layers;
    let mut best = vec![
        ("embed", f64::MAX),
        ("qkv", f64::MAX),
        ("attend", f64::MAX),
        ("output", f64::MAX),
        ("gate_up", f64::MAX),
        ("down", f64::MAX),
        ("head", f64::MAX),
    ];
    for _ in 0..REPETITIONS {
        let mut times = [0f64; 7];
        let mut timed = |index: usize, work: &mut dyn FnMut() -> Result<()>| -> Result<()> {
            let started = Instant::now();
            work()?;
            times[index] += started.elapsed().as_secs_f64() * 1e3;
            Ok(())
        };
        timed(0, &mut || backend.embed(pass))?;
        for layer in 0..layers {
            timed(1, &mut || backend.qkv(layer, pass))?;
            timed(2, &mut || backend.attend(layer, pass))?;
            timed(3, &mut || backend.output(layer, pass))?;
            timed(4, &mut || backend.gate_up(layer, pass))?;
            timed(5, &mut || backend.down(layer, pass))?;
        }
        timed(6, &mut || backend.head(pass))?;
        best.iter_mut().zip(times).for_each(|((_, best), time)| *best = best.min(time));
    }
    Ok(best)
}

fn line(times: &[(&str, f64)]) -> String {
    let times: Vec<String> = times.iter().map(|(name, best)| format!("{name} {best:.2}")).collect();
    times.join(", ")
}

fn run(arguments: &[String], out: &mut impl Write) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let error = |error: quantspec_core::Error| format!("{error} ({})", error.hint);
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
    let capacity = depths.iter().max().unwrap_or(&0) + 512;
    let options = Options {
        slots: 1,
        capacity,
        prompt_capacity: capacity,
        planes: Planes { upper: true, lower: true, full: true },
        rounding: Rounding::Balanced,
        draft_weights: DraftWeights::Int4,
        rejection: false,
        step_rows: 17,
        block_rows: 256,
        threads,
    };
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
    backend.open(0, capacity).map_err(error)?;
    for depth in depths {
        let read = read_gb_per_s(threads).map_err(error)?;
        let roof = memory.weights_bytes as f64 / read / 1e6;
        writeln!(out, "depth {depth}: read {read:.1} GB/s, weights alone {roof:.2} ms")?;
        let mut first = None;
        for (name, rows, plan) in [
            ("ar int8", 1, (Weights::Full, View::Both, Pages::All)),
            ("ar fp16", 1, (Weights::Full, View::Full, Pages::All)),
            ("draft", 1, (Weights::Draft, View::Upper, Pages::All)),
            ("draft, best 16", 1, (Weights::Draft, View::Upper, Pages::Best(16))),
            ("verify 2", 2, (Weights::Full, View::Both, Pages::All)),
            ("verify 3", 3, (Weights::Full, View::Both, Pages::All)),
            ("verify 5", 5, (Weights::Full, View::Both, Pages::All)),
            ("verify 8", 8, (Weights::Full, View::Both, Pages::All)),
        ] {
            let (best, median) = time(&mut backend, rows, depth, plan).map_err(error)?;
            let one = *first.get_or_insert(best);
            writeln!(out, "  {name:16} {best:9.3} ms (median {median:9.3})  {:.3} x ar", best / one)?;
        }
        for count in [1, 5] {
            backend.set_window(0, &vec![1; count]).map_err(error)?;
            let rows: Vec<Row> = (0..count).map(|offset| Row { slot: 0, offset, position: depth + offset }).collect();
            let (weights, view, pages) = (Weights::Full, View::Both, Pages::All);
            let step = Step { weights, view, pages, choose_pages: true, rows: &rows };
            let times = operations(&mut backend, &Pass::Step(&step)).map_err(error)?;
            writeln!(out, "  {count} rows, ms: {}", line(&times))?;
        }
        let prompt = vec![1; depth + 256];
        let block = Block { slot: 0, prompt: &prompt, start: depth, rows: 256 };
        let times = operations(&mut backend, &Pass::Prefill(block)).map_err(error)?;
        writeln!(out, "  256 rows of a prompt, ms: {}", line(&times))?;
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
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments, &mut std::io::stdout()) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "error: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}
