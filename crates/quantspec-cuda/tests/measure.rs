//! Times of decode kernels and of whole rounds. Not tests: `cargo test --release -p quantspec-cuda --test measure --
//! --ignored --nocapture`.
//!
//! Kernels run in graphs over rotating buffers larger than L2; results are medians. `QUANTSPEC_MEASURE_MODEL` names the model
//! of `rounds`, `QUANTSPEC_MEASURE_TOKENS` a file of its token ids (u16, little endian), `QUANTSPEC_MEASURE_CONTEXTS` prompt
//! lengths.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a measurement fails by panicking")]
#![allow(clippy::print_stderr, reason = "numbers go to the terminal")]

mod gpu;

use gpu::{Random, config, device};
use half::f16;
use quantspec_core::cache::{BUFFER_TOKENS, G, visible_pages};
use quantspec_core::config::{Dtype, ModelConfig, Pages, Rounding, View, Weights};
use quantspec_core::layout::Layout;
use quantspec_core::policy::Policy;
use quantspec_core::sample::Sampler;
use quantspec_cuda::CudaBackend;
use quantspec_cuda::attend::{Attend, Layer, Neighbours, Pass, PassAddresses};
use quantspec_cuda::bench::{median_seconds, read_bytes_per_s};
use quantspec_cuda::device::{Arg, Buffer, Device, Launch, Plain};
use quantspec_cuda::draft::{DraftGemms, Heads, Hidden};
use quantspec_cuda::hierarchy::{Hierarchies, Hierarchy, Reads};
use quantspec_cuda::linear::{Linear, Matrix};
use quantspec_cuda::prefill::{Prefill, Shape, readable};
use quantspec_model::backend::{DraftConfig, Hooks, Options, Row};
use quantspec_model::checkpoint::Checkpoint;
use quantspec_model::draft::SelfQuantised;
use quantspec_model::engine::{Engine, Method};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Total bytes of the rotating buffers: many times the largest L2.
const ROTATED_BYTES: usize = 1 << 30;

/// Median seconds of a graph of `work`.
fn graph_seconds(device: &Arc<Device>, mut work: impl FnMut()) -> f64 {
    let graph = device
        .record(|| {
            work();
            Ok(())
        })
        .unwrap();
    // SAFETY: recorded buffers outlive this call.
    unsafe { median_seconds(device, &graph) }.unwrap()
}

fn random_bytes(device: &Arc<Device>, bytes: usize, seed: u64) -> Buffer {
    let mut random = Random(seed);
    let part: Vec<u64> = (0..(bytes / 8).min(1 << 20)).map(|_| random.next()).collect();
    repeated(device, &part, bytes)
}

/// `bytes` bytes that repeat a pattern.
fn repeated<T: Plain>(device: &Arc<Device>, pattern: &[T], bytes: usize) -> Buffer {
    let (buffer, source) = (device.allocate(bytes).unwrap(), device.copied(pattern).unwrap());
    for at in (0..bytes).step_by(source.bytes().max(1)) {
        buffer.copy_from(at, &source, 0, source.bytes().min(bytes - at)).unwrap();
    }
    device.synchronize().unwrap();
    buffer
}

/// Upper blocks with random codes, and parameters that decode to small numbers; random bits would contain NaN.
fn upper_blocks(device: &Arc<Device>, blocks: usize, d: usize) -> Buffer {
    let bytes = Layout::Cuda.upper_bytes(d);
    let mut random = Random(9);
    let mut one: Vec<u8> = (0..bytes).map(|_| random.next() as u8).collect();
    let offsets = Layout::Cuda.offsets(d);
    for (at, count) in [(offsets.key_params, 2 * d), (offsets.value_params, 2 * G)] {
        for i in 0..count {
            let value = f16::from_f32(0.01 + 0.01 * random.uniform());
            one[at + 2 * i..at + 2 * i + 2].copy_from_slice(&value.to_le_bytes());
        }
    }
    let many: Vec<u8> = one.iter().copied().cycle().take(bytes * 64).collect();
    repeated(device, &many, blocks * bytes)
}

/// Outputs × inputs of a layer's four GEMMs.
type Products = [(usize, usize); 4];
/// Name, KV heads (of 32 query heads), GEMMs.
const SHAPES: [(&str, usize, Products); 2] = [
    ("Llama-2-7B", 32, [(12_288, 4096), (4096, 4096), (22_016, 4096), (4096, 11_008)]),
    ("Llama-3.1-8B", 8, [(6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336)]),
];

/// Bytes of a page of one KV head that a view reads.
fn block_bytes(view: View, d: usize) -> usize {
    match view {
        View::Upper => Layout::Cuda.upper_bytes(d),
        View::Both => Layout::Cuda.upper_bytes(d) + Layout::Cuda.lower_bytes(d),
        View::Full => 4 * G * d,
    }
}

/// The pass of a step of consecutive rows of one sequence with pages in order, described on the device.
struct Described {
    pass: Pass,
    pages: usize,
    /// Spans, parts, merged, page table, partial results, extremes.
    buffers: [Buffer; 6],
}

impl Described {
    fn new(device: &Arc<Device>, attend: &Attend, view: View, position: usize, rows: usize, d: usize) -> Described {
        let rows: Vec<Row> = (0..rows).map(|i| Row { slot: 0, offset: i, position: position + i }).collect();
        let pass = attend.passes(view, &rows, |_| None, |_| false).unwrap().remove(0);
        let pages = (position + rows.len()).div_ceil(G);
        let table: Vec<i32> = (0..pages as i32).collect();
        let partial_rows = attend.partial_rows(rows.len());
        let buffers = [
            device.copied(&pass.spans).unwrap(),
            device.copied(&pass.tiles).unwrap(),
            device.copied(&pass.merged).unwrap(),
            device.copied(&table).unwrap(),
            device.allocate(partial_rows * d * 4).unwrap(),
            device.allocate(partial_rows * 8).unwrap(),
        ];
        Described { pass, pages, buffers }
    }

    fn places(&self) -> PassAddresses {
        let [spans, tiles, merged, tables, partial, extremes] = self.buffers.each_ref().map(|buffer| buffer.at(0));
        PassAddresses { spans, tiles, merged, tables, table_pitch: self.pages, list_pitch: 0, partial, extremes }
    }
}

fn contexts(usual: &str) -> Vec<usize> {
    let given = std::env::var("QUANTSPEC_MEASURE_CONTEXTS").unwrap_or_else(|_| usual.to_owned());
    given.split(',').map(|n| n.parse().unwrap()).collect()
}

#[test]
#[ignore = "a measurement"]
fn attention() {
    let Some(device) = device() else { return };
    eprintln!("read {:.0} GB/s", read_bytes_per_s(&device).unwrap() / 1e9);
    let d = 128;
    for (heads, kv_heads) in [(32, 8), (32, 32)] {
        let config = config(heads, kv_heads, 128);
        let attend = Attend::new(&device, &config, Rounding::Balanced).unwrap();
        for context in contexts("192,4096,32768,65536,131072") {
            for view in [View::Upper, View::Both, View::Full] {
                let pages = context / G;
                let layers = (ROTATED_BYTES / (pages * kv_heads * block_bytes(view, d))).clamp(2, 64);
                let blocks = layers * pages * kv_heads;
                let upper = upper_blocks(&device, blocks, d);
                let mut random = Random(9);
                let lower =
                    random_bytes(&device, if view == View::Both { blocks * Layout::Cuda.lower_bytes(d) } else { 8 }, 5);
                let halves: Vec<f16> = (0..1 << 20).map(|_| f16::from_f32(random.normal())).collect();
                let halves = device.copied(&halves).unwrap();
                let full = device.allocate(if view == View::Full { blocks * 4 * G * d } else { 8 }).unwrap();
                for at in (0..full.bytes()).step_by(halves.bytes()) {
                    full.copy_from(at, &halves, 0, halves.bytes().min(full.bytes() - at)).unwrap();
                }
                let ring = device.allocate(layers * kv_heads * BUFFER_TOKENS * d * 2).unwrap();
                for at in (0..ring.bytes()).step_by(halves.bytes()) {
                    ring.copy_from(at, &halves, 0, halves.bytes().min(ring.bytes() - at)).unwrap();
                }
                let q: Vec<f16> = random.normals(17 * heads * d).iter().map(|v| f16::from_f32(v * 0.1)).collect();
                let q = device.copied(&q).unwrap();
                let x = device.allocate(17 * heads * d * 2).unwrap();
                let mut line = String::new();
                for m in if view == View::Both { vec![1, 4, 5, 6, 8] } else { vec![1] } {
                    let position = context - 64;
                    let described = Described::new(&device, &attend, view, position, m, d);
                    let (pass, places) = (&described.pass, described.places());
                    let run = |merge: bool| {
                        graph_seconds(&device, || {
                            for layer in 0..layers {
                                let first = layer * pages * kv_heads;
                                let at = Layer {
                                    upper: upper.at(first * Layout::Cuda.upper_bytes(d)),
                                    lower: if view == View::Both {
                                        lower.at(first * Layout::Cuda.lower_bytes(d))
                                    } else {
                                        0
                                    },
                                    full: if view == View::Full { full.at(first * 4 * G * d) } else { 0 },
                                    ring_k: ring.at(layer * kv_heads * BUFFER_TOKENS * d * 2),
                                    ring_v: ring.at(layer * kv_heads * BUFFER_TOKENS * d * 2),
                                    lists: 0,
                                };
                                // SAFETY: every buffer outlives the graph.
                                unsafe {
                                    attend.run(view, pass, q.at(0), &at, &places, Neighbours::default()).unwrap();
                                    if merge {
                                        attend
                                            .merge(pass, Some(Dtype::Bf16), x.at(0), 0, heads * d, 0, &places)
                                            .unwrap();
                                    }
                                }
                            }
                        }) / layers as f64
                    };
                    let (alone, both) = (run(false), run(true));
                    let bytes = (visible_pages(position) * block_bytes(view, d) + 200 * 512) * kv_heads;
                    line += &format!(
                        " | m {m}: {:.1} us {:.0} GB/s, with merge {:.1}",
                        alone * 1e6,
                        bytes as f64 / alone / 1e9,
                        both * 1e6
                    );
                }
                eprintln!("attend {heads}/{kv_heads} {context} {view:?}{line}");
            }
        }
    }
}

#[test]
#[ignore = "a measurement"]
fn gemms() {
    let Some(device) = device() else { return };
    let linear = Linear::new(&device).unwrap();
    let flag = device.zeroed(4).unwrap();
    let shapes = [
        (12_288, 4096),
        (4096, 4096),
        (22_016, 4096),
        (4096, 11_008),
        (6144, 4096),
        (28_672, 4096),
        (4096, 14_336),
        (32_000, 4096),
        (128_256, 4096),
    ];
    for (n, k) in shapes {
        let mut line = String::new();
        let x = random_bytes(&device, 128 * k * 2, 3);
        // Small finite numbers: bits of bfloat16 around one.
        let ones: Vec<u16> = (0..1 << 20).map(|i: u32| 0x3c00 + (i.wrapping_mul(2_654_435_761) >> 22) as u16).collect();
        let source = device.copied(&ones).unwrap();
        let bytes = Matrix::bytes(Dtype::Bf16, n, k);
        let copies = (ROTATED_BYTES / bytes).clamp(2, 48);
        let matrices: Vec<Matrix> = (0..copies)
            .map(|_| {
                let buffer = device.allocate(bytes).unwrap();
                for at in (0..bytes).step_by(source.bytes()) {
                    buffer.copy_from(at, &source, 0, source.bytes().min(bytes - at)).unwrap();
                }
                Matrix { buffer, dtype: Dtype::Bf16, n, k }
            })
            .collect();
        x.copy_from(0, &source, 0, x.bytes().min(source.bytes())).unwrap();
        let y = device.allocate(128 * n * 4).unwrap();
        for m in [1, 5, 8, 16, 32, 48, 64, 128] {
            let seconds = graph_seconds(&device, || {
                for matrix in &matrices {
                    // SAFETY: every buffer outlives the graph.
                    unsafe { linear.run(matrix, x.at(0), y.at(0), m) }.unwrap();
                }
            }) / copies as f64;
            line += &format!(" | bf16 m {m}: {:.1} us {:.0} GB/s", seconds * 1e6, bytes as f64 / seconds / 1e9);
        }
        for bits in [4, 8] {
            if (bits == 8) != (n > 30_000) {
                continue;
            }
            let drafts: Vec<_> = (0..(copies * 4).min(160))
                .map(|i| linear.quantise(&matrices[i % copies], bits, 0, &flag).unwrap())
                .collect();
            let bytes = drafts[0].buffer.bytes();
            let x8 = random_bytes(&device, 128 * k, 4);
            let xs = device.zeroed(128 * k / 128 * 8).unwrap();
            for m in [1, 8, 16, 17, 32, 64, 128] {
                let seconds = graph_seconds(&device, || {
                    for draft in &drafts {
                        // SAFETY: every buffer outlives the graph.
                        unsafe { linear.run_quantised(draft, x8.at(0), xs.at(0), y.at(0), m) }.unwrap();
                    }
                }) / drafts.len() as f64;
                line += &format!(" | w{bits} m {m}: {:.1} us {:.0} GB/s", seconds * 1e6, bytes as f64 / seconds / 1e9);
            }
        }
        eprintln!("linear {n} x {k}{line}");
    }
}

/// GEMMs of layers in sequence, as in a step, and their share of a copy's bandwidth.
#[test]
#[ignore = "a measurement"]
fn sequence() {
    let Some(device) = device() else { return };
    let linear = Linear::new(&device).unwrap();
    let draft = DraftGemms::new(&device, 128).unwrap().expect("kernels for Hopper");
    let bandwidth = read_bytes_per_s(&device).unwrap();
    eprintln!("read {:.0} GB/s", bandwidth / 1e9);
    let flag = device.zeroed(4).unwrap();
    let source: Vec<u16> = (0..1 << 20).map(|i: u32| 0x3c00 + (i.wrapping_mul(2_654_435_761) >> 22) as u16).collect();
    let source = device.copied(&source).unwrap();
    for (name, kv_heads, shapes) in SHAPES {
        let x = random_numbers(&device, 64 * 14_336 * 2);
        let (x8, xs) = (device.zeroed(64 * 14_336).unwrap(), device.zeroed(64 * 112 * 8).unwrap());
        let y = device.allocate(64 * 28_672 * 4).unwrap();
        let layers: Vec<Vec<Matrix>> = (0..6)
            .map(|_| {
                let matrix = |(n, k)| {
                    let buffer = device.allocate(Matrix::bytes(Dtype::Bf16, n, k)).unwrap();
                    for at in (0..buffer.bytes()).step_by(source.bytes()) {
                        buffer.copy_from(at, &source, 0, source.bytes().min(buffer.bytes() - at)).unwrap();
                    }
                    Matrix { buffer, dtype: Dtype::Bf16, n, k }
                };
                shapes.iter().map(|&shape| matrix(shape)).collect()
            })
            .collect();
        let drafts: Vec<Vec<_>> = layers
            .iter()
            .cycle()
            .take(12)
            .map(|layer| layer.iter().map(|matrix| linear.quantise(matrix, 4, 0, &flag).unwrap()).collect())
            .collect();
        let norm = device.kernel("norm_bf16", 0).unwrap();
        let (hidden, weight) = (random_singles(&device, 64 * 4096), random_singles(&device, 4096));
        let rings = [0; 2].map(|_| device.zeroed(kv_heads * BUFFER_TOKENS * 128 * 2).unwrap());
        let (rows_on, angles) = (device.zeroed(16 * 16).unwrap(), device.zeroed(16 * 64 * 8).unwrap());
        let heads = Heads {
            rows: rows_on.at(0),
            bias: 0,
            cos_sin: angles.at(0),
            q: y.at(0),
            rings: [rings[0].at(0), rings[1].at(0)],
            scale: 1.0,
            heads: [32, kv_heads],
            layer: 0,
            slots: 1,
            flag: flag.at(0),
        };
        // A norm between two GEMMs of a step, which waits for one and is waited for by the next.
        let between = |rows: usize| {
            let arguments = quantspec_cuda::args![&hidden, 0u64, 0u64, &weight, &x, 1e-5f32, 4096usize, 4096usize];
            let launch = Launch { grid: [rows as u32, 1, 1], block: 512, shared: 0, overlap: true };
            // SAFETY: 64 rows of 4,096 fit everywhere.
            unsafe { device.launch(norm, launch, &arguments) }.unwrap();
        };
        for rows in [1, 2, 3, 4, 5, 8, 16, 32, 48, 64] {
            if draft.takes(14_336, rows) {
                let hidden_at = Hidden { address: hidden.at(0), weight: weight.at(0), eps: 1e-5, width: 4096 };
                let bytes: usize = drafts.iter().flatten().map(|draft| draft.buffer.bytes()).sum();
                let together = graph_seconds(&device, || {
                    for layer in &drafts {
                        // SAFETY: every buffer outlives the graph.
                        unsafe {
                            draft.heads(&layer[0], hidden_at, &heads, rows).unwrap();
                            draft.add_i8(&layer[1], x8.at(0), xs.at(0), hidden.at(0), 0, rows).unwrap();
                            draft.gated(&layer[2], hidden_at, 0, x.at(0), 14_336, rows).unwrap();
                            draft.add_bf16(&layer[3], x.at(0), 14_336, hidden.at(0), 0, rows).unwrap();
                        }
                    }
                });
                let share = bytes as f64 / together / bandwidth;
                eprintln!(
                    "{name} rows {rows}: 4 bits, norms and all that lies between taken along: {:.1} us a layer, {share:.3}",
                    together / 12.0 * 1e6
                );
            }
            for apart in [false, true] {
                let bytes: usize = layers.iter().flatten().map(|matrix| matrix.buffer.bytes()).sum();
                let full = graph_seconds(&device, || {
                    for matrix in layers.iter().flatten() {
                        // SAFETY: every buffer outlives the graph.
                        unsafe { linear.run(matrix, x.at(0), y.at(0), rows) }.unwrap();
                        if apart {
                            between(rows);
                        }
                    }
                });
                let share = bytes as f64 / full / bandwidth;
                eprint!(
                    "{name} rows {rows}, norms between {apart}: bf16 {:.1} us a layer, {share:.3}",
                    full / 6.0 * 1e6
                );
                let bytes: usize = drafts.iter().flatten().map(|draft| draft.buffer.bytes()).sum();
                let quantised = graph_seconds(&device, || {
                    for draft in drafts.iter().flatten() {
                        // SAFETY: every buffer outlives the graph.
                        unsafe { linear.run_quantised(draft, x8.at(0), xs.at(0), y.at(0), rows) }.unwrap();
                        if apart {
                            between(rows);
                        }
                    }
                });
                let share = bytes as f64 / quantised / bandwidth;
                eprintln!("; 4 bits {:.1} us a layer, {share:.3}", quantised / 12.0 * 1e6);
            }
        }
    }
}

/// The same for weights in nibbles, and the time to write a layer of them in 16 bits for a prompt.
#[test]
#[ignore = "a measurement"]
fn nibbles_in_sequence() {
    let Some(device) = device() else { return };
    let (linear, hierarchies) = (Linear::new(&device).unwrap(), Hierarchies::new(&device, Dtype::Bf16).unwrap());
    let bandwidth = read_bytes_per_s(&device).unwrap();
    eprintln!("read {:.0} GB/s", bandwidth / 1e9);
    let flag = device.zeroed(4).unwrap();
    let norm = device.kernel("norm_bf16", 0).unwrap();
    let draft = DraftGemms::new(&device, 128).unwrap().expect("kernels for Hopper");
    let (x8, xs) = (device.zeroed(2 * 14_336).unwrap(), device.zeroed(2 * 112 * 8).unwrap());
    let (rows_on, angles) = (device.zeroed(16 * 16).unwrap(), device.zeroed(16 * 64 * 8).unwrap());
    let ring = device.zeroed(32 * BUFFER_TOKENS * 128 * 2).unwrap();
    for (name, kv_heads, shapes) in SHAPES {
        let x = random_numbers(&device, 64 * 14_336 * 2);
        let y = device.allocate(64 * 28_672 * 4).unwrap();
        let (hidden, weight) = (random_singles(&device, 64 * 4096), random_singles(&device, 4096));
        let whole = shapes.map(|(n, k)| {
            let buffer = random_numbers(&device, Matrix::bytes(Dtype::Bf16, n, k));
            Matrix { buffer, dtype: Dtype::Bf16, n, k }
        });
        let layers: Vec<Vec<Hierarchy>> = (0..8)
            .map(|_| whole.iter().map(|full| hierarchies.quantise(full, true, 0, &flag).unwrap()).collect())
            .collect();
        let to = device.allocate(Matrix::bytes(Dtype::Bf16, 28_672, 4096)).unwrap();
        let expand = graph_seconds(&device, || {
            layers.iter().flatten().for_each(|hierarchy| hierarchies.expand(hierarchy, &to, 0).unwrap());
        });
        eprintln!("{name}: written in 16 bits in {:.1} us a layer", expand / 8.0 * 1e6);
        let heads = Heads {
            rows: rows_on.at(0),
            bias: 0,
            cos_sin: angles.at(0),
            q: y.at(0),
            rings: [ring.at(0), ring.at(0)],
            scale: 1.0,
            heads: [32, kv_heads],
            layer: 0,
            slots: 1,
            flag: flag.at(0),
        };
        let stream = Hidden { address: hidden.at(0), weight: weight.at(0), eps: 1e-5, width: 4096 };
        for rows in [1, 2] {
            let seconds = graph_seconds(&device, || {
                for layer in &layers {
                    // SAFETY: every buffer outlives the graph.
                    unsafe {
                        draft.heads(&layer[0], stream, &heads, rows).unwrap();
                        draft.add_i8(&layer[1], x8.at(0), xs.at(0), hidden.at(0), 0, rows).unwrap();
                        draft.gated(&layer[2], stream, 0, x.at(0), 14_336, rows).unwrap();
                        draft.add_bf16(&layer[3], x.at(0), 14_336, hidden.at(0), 0, rows).unwrap();
                    }
                }
            });
            let bytes: usize = layers.iter().flatten().map(|hierarchy| hierarchy.upper().bytes()).sum();
            let share = bytes as f64 / seconds / bandwidth;
            eprintln!("{name} rows {rows}: draft, all taken along: {:.1} us a layer, {share:.3}", seconds / 8.0 * 1e6);
        }
        for rows in [1, 2, 5, 8, 9, 16, 32, 64] {
            for between in [false, true] {
                let time = |layers: usize, gemm: &dyn Fn(usize, usize)| {
                    let seconds = graph_seconds(&device, || {
                        for (layer, matrix) in (0..layers).flat_map(|layer| (0..4).map(move |matrix| (layer, matrix))) {
                            gemm(layer, matrix);
                            if between {
                                let (width, eps) = (4096usize, 1e-5f32);
                                let arguments =
                                    quantspec_cuda::args![&hidden, 0u64, 0u64, &weight, &x, eps, width, width];
                                let launch = Launch { grid: [rows as u32, 1, 1], block: 512, shared: 0, overlap: true };
                                // SAFETY: 64 rows of 4,096 fit everywhere.
                                unsafe { device.launch(norm, launch, &arguments) }.unwrap();
                            }
                        }
                    });
                    seconds / layers as f64
                };
                let mut line = String::new();
                for reads in [Reads::All, Reads::Upper] {
                    let read = layers[0].iter().map(|hierarchy| match reads {
                        Reads::All => hierarchy.held_bytes(),
                        Reads::Upper => hierarchy.upper().bytes(),
                    });
                    let bytes: usize = read.sum();
                    let seconds = time(8, &|layer, matrix| {
                        // SAFETY: every buffer outlives the graph.
                        unsafe { hierarchies.run(&layers[layer][matrix], reads, x.at(0), y.at(0), rows) }.unwrap();
                    });
                    let share = bytes as f64 / seconds / bandwidth;
                    line += &format!(" {reads:?} {:.1} us a layer, {share:.3};", seconds * 1e6);
                }
                let bytes: usize = whole.iter().map(|matrix| matrix.buffer.bytes()).sum();
                let seconds = time(1, &|_, matrix| {
                    // SAFETY: as above.
                    unsafe { linear.run(&whole[matrix], x.at(0), y.at(0), rows) }.unwrap();
                });
                let share = bytes as f64 / seconds / bandwidth;
                eprintln!(
                    "{name} rows {rows}, norms between {between}:{line} bf16 {:.1} us, {share:.3}",
                    seconds * 1e6
                );
            }
        }
    }
    assert_eq!(flag.read::<u32>(0, 1).unwrap(), [0]);
}

/// Whole layers of a draft step of one row.
#[test]
#[ignore = "a measurement"]
fn draft_layers() {
    const LAYERS: usize = 12;
    let Some(device) = device() else { return };
    let linear = Linear::new(&device).unwrap();
    let draft = DraftGemms::new(&device, 128).unwrap().expect("kernels for Hopper");
    let bandwidth = read_bytes_per_s(&device).unwrap();
    let flag = device.zeroed(4).unwrap();
    for (name, kv_heads, shapes) in SHAPES {
        let config = config(32, kv_heads, 128);
        let attend = Attend::new(&device, &config, Rounding::Balanced).unwrap();
        let matrices = shapes.map(|(n, k)| {
            let buffer = device.zeroed(Matrix::bytes(Dtype::Bf16, n, k)).unwrap();
            Matrix { buffer, dtype: Dtype::Bf16, n, k }
        });
        let layers: Vec<_> =
            (0..LAYERS).map(|_| matrices.each_ref().map(|m| linear.quantise(m, 4, 0, &flag).unwrap())).collect();
        let weight_bytes: usize = layers[0].iter().map(|matrix| matrix.buffer.bytes()).sum();
        let (hidden, weight) = (device.zeroed(4096 * 4).unwrap(), device.zeroed(4096 * 4).unwrap());
        let x = device.zeroed(14_336 * 2).unwrap();
        let (x8, xs, q) =
            (device.zeroed(4096).unwrap(), device.zeroed(32 * 8).unwrap(), device.zeroed(4096 * 2).unwrap());
        let rings = [0; 2].map(|_| device.zeroed(LAYERS * kv_heads * BUFFER_TOKENS * 128 * 2).unwrap());
        let angles = device.zeroed(64 * 8).unwrap();
        for context in contexts("192,4096,32768,131072") {
            let pages = context / G;
            let upper = upper_blocks(&device, LAYERS * pages * kv_heads, 128);
            let position = context - 64;
            let rows = device.copied(&[0i32, 0, position as i32, 0]).unwrap();
            let described = Described::new(&device, &attend, View::Upper, position, 1, 128);
            let (pass, places) = (&described.pass, described.places());
            let run = |half_sm: Option<bool>| {
                graph_seconds(&device, || {
                    for (layer, weights) in layers.iter().enumerate() {
                        let stream = Hidden { address: hidden.at(0), weight: weight.at(0), eps: 1e-5, width: 4096 };
                        let heads = Heads {
                            rows: rows.at(0),
                            bias: 0,
                            cos_sin: angles.at(0),
                            q: q.at(0),
                            rings: [rings[0].at(0), rings[1].at(0)],
                            scale: 1.0,
                            heads: [32, kv_heads],
                            layer,
                            slots: 1,
                            flag: flag.at(0),
                        };
                        let ring = layer * kv_heads * BUFFER_TOKENS * 128 * 2;
                        let at = Layer {
                            upper: upper.at(layer * pages * kv_heads * Layout::Cuda.upper_bytes(128)),
                            ring_k: rings[0].at(ring),
                            ring_v: rings[1].at(ring),
                            ..Layer::default()
                        };
                        // SAFETY: every buffer outlives the graph.
                        unsafe {
                            draft.heads(&weights[0], stream, &heads, 1).unwrap();
                            if let Some(half_sm) = half_sm {
                                let neighbours = Neighbours { half_sm, ..Neighbours::default() };
                                attend.run(View::Upper, pass, q.at(0), &at, &places, neighbours).unwrap();
                                attend.merge(pass, None, x8.at(0), xs.at(0), 4096, 0, &places).unwrap();
                            }
                            draft.add_i8(&weights[1], x8.at(0), xs.at(0), hidden.at(0), 0, 1).unwrap();
                            draft.gated(&weights[2], stream, 0, x.at(0), 14_336, 1).unwrap();
                            draft.add_bf16(&weights[3], x.at(0), 14_336, hidden.at(0), 0, 1).unwrap();
                        }
                    }
                }) / LAYERS as f64
                    * 1e6
            };
            let bytes = weight_bytes + visible_pages(position) * kv_heads * Layout::Cuda.upper_bytes(128);
            eprintln!(
                "{name} {context}: without attention {:.1} us a layer, with it {:.1}, in blocks of half a multiprocessor where items are short {:.1}, bytes {:.1}",
                run(None),
                run(Some(false)),
                run(Some(true)),
                bytes as f64 / bandwidth * 1e6
            );
        }
    }
}

/// Whole layers of a plain step or a verification.
#[test]
#[ignore = "a measurement"]
fn target_layers() {
    const LAYERS: usize = 6;
    let Some(device) = device() else { return };
    let linear = Linear::new(&device).unwrap();
    let bandwidth = read_bytes_per_s(&device).unwrap();
    let flag = device.zeroed(4).unwrap();
    let [norm, append, silu] = ["norm_bf16", "append_128", "silu_mul_bf16"].map(|name| device.kernel(name, 0).unwrap());
    for (name, kv_heads, shapes) in SHAPES {
        let attend = Attend::new(&device, &config(32, kv_heads, 128), Rounding::Balanced).unwrap();
        let layers: Vec<_> = (0..LAYERS)
            .map(|_| {
                shapes.map(|(n, k)| {
                    let buffer = device.zeroed(Matrix::bytes(Dtype::Bf16, n, k)).unwrap();
                    Matrix { buffer, dtype: Dtype::Bf16, n, k }
                })
            })
            .collect();
        let weight_bytes: usize = layers[0].iter().map(|matrix| matrix.buffer.bytes()).sum();
        let inner = shapes[3].1;
        let (hidden, weight) = (device.zeroed(8 * 4096 * 4).unwrap(), device.zeroed(4096 * 4).unwrap());
        let (x, y) = (device.zeroed(8 * 14_336 * 2).unwrap(), device.zeroed(8 * 28_672 * 4).unwrap());
        let q = device.zeroed(8 * 4096 * 2).unwrap();
        let rings = [0; 2].map(|_| device.zeroed(LAYERS * kv_heads * BUFFER_TOKENS * 128 * 2).unwrap());
        let angles = device.zeroed(8 * 64 * 8).unwrap();
        for context in contexts("4096,32768") {
            for (view, m) in [(View::Full, 1), (View::Both, 1), (View::Both, 4), (View::Both, 6)] {
                let pages = context / G;
                let blocks = LAYERS * pages * kv_heads;
                let upper = upper_blocks(&device, blocks, 128);
                let lower = device.zeroed(blocks * Layout::Cuda.lower_bytes(128)).unwrap();
                let full = device.zeroed(if view == View::Full { blocks * 4 * G * 128 } else { 8 }).unwrap();
                let position = context - 64;
                let rows: Vec<i32> = (0..m as i32).flat_map(|i| [0, i, position as i32 + i, 0]).collect();
                let rows = device.copied(&rows).unwrap();
                let described = Described::new(&device, &attend, view, position, m, 128);
                let (pass, places) = (&described.pass, described.places());
                let run = |attended: bool, prefetched: usize| {
                    graph_seconds(&device, || {
                        let launch = |kernel, grid, block, arguments: &[Arg]| {
                            let launch = Launch { grid, block, shared: 0, overlap: true };
                            // SAFETY: every buffer has room for eight rows and outlives the graph.
                            unsafe { device.launch(kernel, launch, arguments) }.unwrap();
                        };
                        let norm_of = || {
                            let arguments =
                                quantspec_cuda::args![&hidden, &y, 0u64, &weight, &x, 1e-5f32, 4096usize, 4096usize];
                            launch(norm, [m as u32, 1, 1], 512, &arguments);
                        };
                        for (layer, weights) in layers.iter().enumerate() {
                            let ring = layer * kv_heads * BUFFER_TOKENS * 128 * 2;
                            let first = layer * pages * kv_heads;
                            let at = Layer {
                                upper: upper.at(first * Layout::Cuda.upper_bytes(128)),
                                lower: lower.at(first * Layout::Cuda.lower_bytes(128)),
                                full: if view == View::Full { full.at(first * 4 * G * 128) } else { 0 },
                                ring_k: rings[0].at(ring),
                                ring_v: rings[1].at(ring),
                                ..Layer::default()
                            };
                            let gemm = |matrix: &Matrix| {
                                // SAFETY: as above.
                                unsafe { linear.run(matrix, x.at(0), y.at(0), m) }.unwrap();
                            };
                            norm_of();
                            gemm(&weights[0]);
                            let arguments = quantspec_cuda::args![
                                &rows, &y, 0u64, 0u64, 0u64, &angles, &q, &rings[0], &rings[1], 1e-5f32, 1.0f32,
                                32usize, kv_heads, layer, 1usize, 0usize, &flag
                            ];
                            launch(append, [(32 + 2 * kv_heads).div_ceil(4) as u32, m as u32, 1], 128, &arguments);
                            if attended {
                                let neighbours = Neighbours {
                                    prefetch: (weights[1].buffer.at(0), prefetched),
                                    ..Neighbours::default()
                                };
                                // SAFETY: as above.
                                unsafe {
                                    attend.run(view, pass, q.at(0), &at, &places, neighbours).unwrap();
                                    attend.merge(pass, Some(Dtype::Bf16), x.at(0), 0, 4096, 0, &places).unwrap();
                                }
                            }
                            gemm(&weights[1]);
                            norm_of();
                            gemm(&weights[2]);
                            let arguments = quantspec_cuda::args![&y, 0u64, &x, inner, inner];
                            launch(silu, [inner.div_ceil(1024) as u32, m as u32, 1], 256, &arguments);
                            gemm(&weights[3]);
                        }
                    }) / LAYERS as f64
                        * 1e6
                };
                let bytes = weight_bytes + visible_pages(position) * kv_heads * block_bytes(view, 128);
                let weights_of_output = layers[0][1].buffer.bytes();
                eprintln!(
                    "{name} {context} {view:?} {m}: without attention {:.1} us a layer, with it {:.1}, weights prefetched into L2 {:.1}, bytes {:.1}",
                    run(false, 0),
                    run(true, 0),
                    run(true, weights_of_output),
                    bytes as f64 / bandwidth * 1e6
                );
            }
        }
    }
}

/// Normally distributed numbers.
fn random_singles(device: &Arc<Device>, count: usize) -> Buffer {
    device.copied(&Random(11).normals(count)).unwrap()
}

/// f16 or bfloat16 of ordinary size with random mantissas and signs, which determine the power of multiplications.
fn random_numbers(device: &Arc<Device>, bytes: usize) -> Buffer {
    let mut random = Random(5);
    let part: Vec<u16> = (0..(bytes / 2).min(1 << 22)).map(|_| (random.next() as u16 & 0x83ff) | 0x3800).collect();
    repeated(device, &part, bytes)
}

/// Causal attention of prompts alone, then whole layers of a prompt, in blocks of 8,192 rows. `QUANTSPEC_MEASURE_CONTEXTS`
/// are the prompts' lengths; `tools/torch_prefill.py` times the same in PyTorch.
#[test]
#[ignore = "a measurement"]
fn prompts() {
    const BLOCK: usize = 8192;
    let Some(device) = device() else { return };
    let flag = device.zeroed(4).unwrap();
    for (heads, kv_heads, d) in [(32, 32, 128), (32, 8, 128), (32, 8, 64), (16, 8, 256)] {
        let config = config(heads, kv_heads, d);
        let prefill = Prefill::new(&device, Shape::of(&config), BLOCK).unwrap();
        for rows in contexts("8192,32768") {
            let q = random_numbers(&device, BLOCK.min(rows) * heads * d * 2);
            let kv = random_numbers(&device, rows * 2 * kv_heads * d * 2);
            let out = device.allocate(q.bytes()).unwrap();
            let seconds = graph_seconds(&device, || {
                for start in (0..rows).step_by(BLOCK) {
                    // SAFETY: q and the output have a block's rows, kv all of the prompt's; all outlive the graph.
                    unsafe { prefill.attend(q.at(0), kv.at(0), out.at(0), start, BLOCK.min(rows - start)) }.unwrap();
                }
            });
            let operations = 2.0 * (rows as f64).powi(2) * (heads * d) as f64;
            eprintln!(
                "attention, {heads} / {kv_heads} heads of {d}, {rows} tokens: {:.2} ms, {:.0} Tflop/s",
                seconds * 1e3,
                operations / seconds / 1e12
            );
        }
    }
    let kernel = |name: &str, shared: usize| device.kernel(name, shared).unwrap();
    let (norm, store) = (kernel("norm_bf16", 0), kernel("store_128", 256 * 128 + 4096));
    let states = Random(7).normals(1 << 20);
    for (name, kv_heads, shapes) in SHAPES {
        let inner = shapes[3].1;
        let config = ModelConfig { hidden: 4096, intermediate: inner, ..config(32, kv_heads, 128) };
        let prefill = Prefill::new(&device, Shape::of(&config), BLOCK).unwrap();
        let weights = shapes.map(|(n, k)| random_numbers(&device, Matrix::bytes(Dtype::Bf16, n, k)));
        for rows in contexts("128,192,256,512,2048,8192,32768") {
            let block = BLOCK.min(rows);
            let (hidden, weight) = (repeated(&device, &states, rows * 4096 * 4), device.copied(&[1f32; 4096]).unwrap());
            let read = readable(block);
            let x = random_numbers(&device, read * 4096 * 2);
            let (q, wide) = (random_numbers(&device, block * 4096 * 2), random_numbers(&device, read * inner * 2));
            let kv = random_numbers(&device, rows * 2 * kv_heads * 128 * 2);
            let angles = device.copied(&[0.8f32, 0.6].repeat(block * 64)).unwrap();
            let pages = rows / G;
            let pool = |bytes: usize| device.allocate(pages * kv_heads * bytes).unwrap();
            let (upper, lower) = (pool(Layout::Cuda.upper_bytes(128)), pool(Layout::Cuda.lower_bytes(128)));
            let table = device.copied(&(0..pages as i32).collect::<Vec<_>>()).unwrap();
            let seconds = graph_seconds(&device, || {
                let launch = |kernel, grid, block, shared: usize, arguments: &[Arg]| {
                    let launch = Launch { grid, block, shared: shared as u32, overlap: true };
                    // SAFETY: every buffer has room for the prompt and outlives the graph.
                    unsafe { device.launch(kernel, launch, arguments) }.unwrap();
                };
                for start in (0..rows).step_by(BLOCK) {
                    let (count, stream) = (BLOCK.min(rows - start), hidden.at(start * 4096 * 4));
                    let arguments =
                        quantspec_cuda::args![stream, 0u64, 0u64, &weight, &x, 1e-5f32, 4096usize, 4096usize];
                    let own = kv.at(start * 2 * kv_heads * 128 * 2);
                    launch(norm, [count as u32, 1, 1], 512, 0, &arguments);
                    // SAFETY: as above.
                    unsafe {
                        let (flag, angles, q) = (flag.at(0), angles.at(0), q.at(0));
                        prefill.qkv(x.at(0), weights[0].at(0), None, None, angles, q, own, flag, count).unwrap();
                        prefill.attend(q, kv.at(0), x.at(0), start, count).unwrap();
                        prefill.output(x.at(0), weights[1].at(0), None, stream, count).unwrap();
                        launch(norm, [count as u32, 1, 1], 512, 0, &arguments);
                        prefill.gate_up(x.at(0), weights[2].at(0), None, wide.at(0), count).unwrap();
                        prefill.down(wide.at(0), weights[3].at(0), None, stream, count).unwrap();
                    }
                }
                let arguments = quantspec_cuda::args![&kv, &upper, &lower, 0u64, &table, 0usize, 1usize, &flag];
                let grid = [kv_heads as u32, pages as u32, 2];
                launch(store, grid, 256, 256 * 128 + 4096, &arguments);
            });
            eprintln!(
                "{name}, {rows} tokens: {:.1} us a layer, {:.0} tokens/s of 32 layers",
                seconds * 1e6,
                rows as f64 / seconds / 32.0
            );
        }
    }
}

/// Launch overhead: seconds until a call returns, and until its work is done, for graphs of small kernels.
#[test]
#[ignore = "a measurement"]
fn launches() {
    let Some(device) = device() else { return };
    let kernel = device.kernel("add_rows", 0).unwrap();
    let (a, b) = (device.zeroed(4096).unwrap(), device.zeroed(4096).unwrap());
    let mut pinned = device.pinned(4096).unwrap();
    let queue = |n: usize, overlap: bool| {
        for _ in 0..n {
            let arguments = quantspec_cuda::args![&a, &b, 0u64, 256u64, 256usize];
            let launch = Launch { grid: [1, 1, 1], block: 256, shared: 0, overlap };
            // SAFETY: both buffers hold 256 floats.
            unsafe { device.launch(kernel, launch, &arguments) }.unwrap();
        }
    };
    let median = |mut times: Vec<(f64, f64)>| {
        times.sort_by(|a, b| a.1.total_cmp(&b.1));
        times[times.len() / 2]
    };
    let timed = |work: &mut dyn FnMut()| {
        let times = (0..25).map(|_| {
            let start = Instant::now();
            work();
            let queued = start.elapsed().as_secs_f64();
            device.synchronize().unwrap();
            (queued * 1e6, start.elapsed().as_secs_f64() * 1e6)
        });
        median(times.collect())
    };
    for n in [0, 1, 10, 50, 360, 1800, 3600] {
        for overlap in [false, true] {
            let (queued, done) = timed(&mut || queue(n, overlap));
            eprint!("{n} kernels, overlap {overlap}: one by one {queued:.1} us queued, {done:.1} us done");
            if n > 0 {
                let start = Instant::now();
                let graph = device
                    .record(|| {
                        queue(n, overlap);
                        Ok(())
                    })
                    .unwrap();
                let recorded = start.elapsed().as_secs_f64() * 1e3;
                // SAFETY: the buffers outlive the graph.
                let (queued, done) = timed(&mut || unsafe { graph.launch() }.unwrap());
                eprint!("; graph recorded in {recorded:.2} ms, {queued:.1} us queued, {done:.1} us done");
            }
            eprintln!();
        }
    }
    let (queued, done) = timed(&mut || {
        // SAFETY: the pinned memory is not written.
        unsafe { a.write_pinned(0, &pinned, 0, 1024) }.unwrap();
    });
    eprintln!("copy of 1 kB to the device: {queued:.1} us queued, {done:.1} us done");
    let (queued, done) = timed(&mut || a.read_pinned(0, &mut pinned, 1024).unwrap());
    eprintln!("copy of 1 kB back: {queued:.1} us queued, {done:.1} us done");
    let (queued, done) = timed(&mut || {
        device.idle().unwrap();
    });
    eprintln!("a query: {queued:.1} us, and a wait for nothing {done:.1} us");
}

#[test]
#[ignore = "a measurement"]
fn rounds() {
    let Some(device) = device() else { return };
    let Some(dir) = std::env::var_os("QUANTSPEC_MEASURE_MODEL") else {
        return eprintln!("QUANTSPEC_MEASURE_MODEL is not set");
    };
    let checkpoint = Checkpoint::open(Path::new(&dir)).unwrap();
    let tokens: Vec<u32> = match std::env::var_os("QUANTSPEC_MEASURE_TOKENS") {
        Some(file) => {
            std::fs::read(file).unwrap().chunks_exact(2).map(|b| u32::from(u16::from_le_bytes([b[0], b[1]]))).collect()
        }
        None => (0..200_000)
            .map(|i: u32| 3 + i.wrapping_mul(2_654_435_761) % (checkpoint.config().vocab as u32 - 3))
            .collect(),
    };
    let contexts = contexts("4096,32768");
    let new = 192;
    let capacity = contexts.iter().max().unwrap() + new + 64;
    let options = Options { block_rows: 4096, ..Options::new(1, capacity) };
    let start = Instant::now();
    let backend = CudaBackend::load_on(&device, &checkpoint, &options, Hooks::default()).unwrap();
    eprintln!("loaded in {:.1} s", start.elapsed().as_secs_f64());
    let plain = |target: View| Method { target, drafter: None, policy: Policy::fixed(0) };
    let mut engine = Engine::new(backend, plain(View::Both), 1, capacity, options.block_rows);
    let draft = |pages: Pages| DraftConfig { weights: Weights::Draft, view: View::Upper, pages };
    for context in contexts {
        let prompt = &tokens[..context];
        let slot = engine.add(prompt, Sampler::greedy(), new).unwrap();
        let start = Instant::now();
        let first = engine.prefill(slot, &mut |_, _| {}).unwrap();
        let seconds = start.elapsed().as_secs_f64();
        eprintln!("{context}: prefill {seconds:.3} s, {:.0} tokens/s", context as f64 / seconds);
        let mut want: Option<Vec<u32>> = None;
        for (name, target, plan, gamma) in [
            ("ar fp16", View::Full, None, 0),
            ("ar int8", View::Both, None, 0),
            ("quantspec", View::Both, Some(draft(Pages::All)), 3),
            ("quantspec", View::Both, Some(draft(Pages::All)), 4),
            ("quantspec", View::Both, Some(draft(Pages::All)), 5),
            ("best 16", View::Both, Some(draft(Pages::Best(16))), 4),
            ("best 32", View::Both, Some(draft(Pages::Best(32))), 5),
        ] {
            engine
                .set_method(Method {
                    target,
                    drafter: plan.map(SelfQuantised::boxed),
                    policy: Policy::fixed(gamma.max(1)),
                })
                .unwrap();
            if !engine.restart(slot, first, Sampler::greedy()).unwrap() {
                engine.finish(slot);
                engine.add(prompt, Sampler::greedy(), new).unwrap();
                engine.prefill(slot, &mut |_, _| {}).unwrap();
            }
            engine.reset_stats();
            let (mut out, mut drafts, mut verifies) = (Vec::new(), Vec::new(), Vec::new());
            let start = Instant::now();
            while out.len() + 1 < new {
                let gamma = gamma.min(new - 2 - out.len());
                let before = Instant::now();
                engine.draft(&[(slot, gamma)]).unwrap();
                drafts.push(before.elapsed().as_secs_f64());
                let before = Instant::now();
                out.extend(engine.verify().unwrap().remove(0).tokens);
                verifies.push(before.elapsed().as_secs_f64());
            }
            let seconds = start.elapsed().as_secs_f64();
            let rounds = verifies.len() as f64;
            let spread = |times: &mut Vec<f64>| {
                times.sort_by(f64::total_cmp);
                let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize] * 1e3;
                format!("{:.3} / {:.3} / {:.3}", at(0.0), at(0.5), at(1.0))
            };
            let (drafting, verifying) = (spread(&mut drafts), spread(&mut verifies));
            let same = match (&want, target) {
                (_, View::Full) => "-".to_owned(),
                (None, _) => {
                    want = Some(out.clone());
                    "baseline".to_owned()
                }
                (Some(want), _) => format!("equal {}", *want == out),
            };
            eprintln!(
                "{context}: {name} gamma {gamma}: {:.3} ms/token, {:.1} tokens/s, {:.3} ms/round, least / median / most of draft {drafting} and verify {verifying}, acceptance {:?}, {same}",
                seconds / out.len() as f64 * 1e3,
                out.len() as f64 / seconds,
                seconds / rounds * 1e3,
                engine.stats().acceptance_rate()
            );
        }
        engine.finish(slot);
    }
}

/// Single steps of each view after a short prompt, where all views read the same bytes: the overhead of the views themselves.
#[test]
#[ignore = "a measurement"]
fn steps() {
    let Some(device) = device() else { return };
    let Some(dir) = std::env::var_os("QUANTSPEC_MEASURE_MODEL") else {
        return eprintln!("QUANTSPEC_MEASURE_MODEL is not set");
    };
    let checkpoint = Checkpoint::open(Path::new(&dir)).unwrap();
    let (new, capacity) = (64, 512);
    let options = Options { block_rows: 512, ..Options::new(1, capacity) };
    let backend = CudaBackend::load_on(&device, &checkpoint, &options, Hooks::default()).unwrap();
    let plain = |target: View| Method { target, drafter: None, policy: Policy::fixed(0) };
    let mut engine = Engine::new(backend, plain(View::Both), 1, capacity, options.block_rows);
    let prompt: Vec<u32> = (0..capacity as u32).map(|i| 3 + i.wrapping_mul(2_654_435_761) % 8000).collect();
    for context in [2, 140] {
        // In both directions, so that a drift of the machine affects all views alike.
        for view in [View::Full, View::Both, View::Upper, View::Upper, View::Both, View::Full] {
            engine.set_method(plain(view)).unwrap();
            let slot = engine.add(&prompt[..context], Sampler::greedy(), new).unwrap();
            engine.prefill(slot, &mut |_, _| {}).unwrap();
            let mut times = Vec::new();
            while times.len() + 1 < new {
                engine.draft(&[(slot, 0)]).unwrap();
                let start = Instant::now();
                engine.verify().unwrap();
                times.push(start.elapsed().as_secs_f64());
            }
            engine.finish(slot);
            times.sort_by(f64::total_cmp);
            eprintln!(
                "steps {context} {view:?}: least {:.3}, median {:.3}, most {:.3} ms",
                times[0] * 1e3,
                times[times.len() / 2] * 1e3,
                times[times.len() - 1] * 1e3
            );
        }
    }
}
