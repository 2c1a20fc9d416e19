//! Times of the kernels at a model's shapes, with the bytes that each must move at least.
//!
//! A measurement is a graph of one kernel over buffers that together far exceed the L2 cache; the median of several replays
//! is reported. Contents are small finite numbers of the right format; kernel speed does not depend on their values.

use crate::args;
use crate::attend::{Attend, Layer, Neighbours, PageChoice, SliceAddresses, StepSlice};
use crate::backend::{NORM_THREADS, page_shared};
use crate::device::{Arg, Buffer, Device, Kernel, Launch};
use crate::draft::{DraftGemms, Heads, Hidden};
use crate::hierarchy::{Hierarchies, Hierarchy, Reads};
use crate::linear::{Linear, Matrix, Quantised, name};
use crate::prefill::{Prefill, Shape, activate_mul, padded, readable};
use crate::sample::Sampling;
use half::f16;
use quantspec_core::Result;
use quantspec_core::cache::{BUFFER_TOKENS, G, GAMMA_MAX, visible_buffer, visible_pages};
use quantspec_core::config::{Dtype, ModelConfig, Rounding, View};
use quantspec_core::layout::Layout;
use quantspec_core::sample::{Accept, Sampler};
use quantspec_model::backend::{Branch, Row, Turn};
use std::sync::Arc;

/// Least total bytes of a measurement's buffers: several times the largest L2.
const ROTATED_BYTES: usize = 512 << 20;
/// Timed replays of a graph, and warm-up replays.
const REPEATED: usize = 11;
const WARM_UP: usize = 3;
/// Calls in a graph for kernels whose operands stay in the cache in a step.
const CALLS: usize = 32;
/// Rows of the timed prefill block.
const PREFILL_ROWS: usize = 2048;
/// Pages of a chosen list: the number per KV head that a draft reads of a long text.
const LISTED: usize = 16;

/// One measurement.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Measured {
    /// Kernel: "attend", "linear", "norm", …
    pub kernel: &'static str,
    /// Variant of the kernel: the view, or the type of the weights.
    pub form: &'static str,
    /// Rows of the call.
    pub rows: usize,
    /// Tokens before them, where that matters.
    pub context: Option<usize>,
    /// Outputs and inputs of a GEMM.
    pub shape: Option<(usize, usize)>,
    /// Seconds of a call.
    pub seconds: f64,
    /// Bytes a call must read and write at least.
    pub bytes: usize,
    /// Floating-point operations of a call, for kernels of many rows.
    pub operations: Option<f64>,
}

impl Measured {
    /// A measurement without context or GEMM shape.
    fn of(kernel: &'static str, form: &'static str, rows: usize, seconds: f64, bytes: usize) -> Measured {
        Measured { kernel, form, rows, seconds, bytes, ..Measured::default() }
    }
}

/// Read bandwidth in bytes per second, measured with a kernel that only reads, on as much memory as is free.
///
/// # Errors
/// Device errors of the driver, [`quantspec_core::ErrorKind::DoesNotFit`] if the GPU has no memory for the buffer.
pub fn read_bytes_per_s(device: &Arc<Device>) -> Result<f64> {
    let bytes = (2 * ROTATED_BYTES).min(device.memory()?.0 / 2) / 16 * 16;
    let (from, to) = (filled(device, bytes)?, device.zeroed(4)?);
    let kernel = device.kernel("read_all", 0)?;
    let seconds = seconds(device, || {
        // The sum of small numbers never equals this.
        let arguments = [(&from).into(), Arg::Long(from.bytes() as u64 / 16), Arg::Int(i32::MIN), (&to).into()];
        let launch = Launch { grid: [8 * device.info.sms as u32, 1, 1], block: 512, shared: 0, overlap: false };
        // SAFETY: the buffer has that many pieces.
        unsafe { device.launch(kernel, launch, &arguments) }
    })?;
    Ok(from.bytes() as f64 / seconds)
}

/// Times every kernel of a step and of a prompt block, at `rows` rows and after each of `contexts` tokens. `report` gets the
/// results one by one; its error ends the measurement.
///
/// # Errors
/// [`quantspec_core::ErrorKind::Model`] for head widths and sizes without kernels, [`quantspec_core::ErrorKind::DoesNotFit`]
/// if buffers do not fit on the GPU, other device errors of the driver, and those of `report`.
pub fn measure(
    device: &Arc<Device>,
    config: &ModelConfig,
    contexts: &[usize],
    rows: &[usize],
    report: &mut dyn FnMut(Measured) -> Result<()>,
) -> Result<()> {
    let bench = Bench { device: device.clone(), config: config.clone() };
    for &context in contexts {
        for view in [View::Upper, View::Both, View::Full] {
            bench.attend(view, context, rows, report)?;
        }
    }
    bench.gemms(rows, report)?;
    bench.drafts(rows, report)?;
    bench.small(rows, report)?;
    bench.ends(rows, report)?;
    bench.pages(report)?;
    bench.weights(report)?;
    bench.prompt(contexts, report)
}

/// Median seconds of some replays of a graph of `work`, after a warm-up.
fn seconds(device: &Arc<Device>, work: impl FnMut() -> Result<()>) -> Result<f64> {
    let graph = device.record(work)?;
    let mut times = Vec::with_capacity(REPEATED);
    for round in 0..WARM_UP + REPEATED {
        let start = device.mark()?;
        // SAFETY: callers keep all recorded buffers until this returns.
        unsafe { graph.launch() }?;
        let took = start.seconds_to(&device.mark()?)?;
        if round >= WARM_UP {
            times.push(took);
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

/// Memory filled with f16 or bf16 values of ordinary size.
fn filled(device: &Arc<Device>, bytes: usize) -> Result<Buffer> {
    let ones: Vec<u16> = (0..1 << 19).map(|i: u32| 0x2c00 + (i.wrapping_mul(2_654_435_761) >> 22) as u16).collect();
    repeated(device, &device.copied(&ones)?, bytes)
}

/// Memory that repeats a pattern.
fn repeated(device: &Arc<Device>, pattern: &Buffer, bytes: usize) -> Result<Buffer> {
    let buffer = device.allocate(bytes)?;
    for at in (0..bytes).step_by(pattern.bytes().max(1)) {
        buffer.copy_from(at, pattern, 0, pattern.bytes().min(bytes - at))?;
    }
    device.synchronize()?;
    Ok(buffer)
}

/// One sequence's cache in several layers, and queries.
struct MadeUpCache {
    /// Of the first row.
    position: usize,
    pages: usize,
    layers: usize,
    /// Bytes of an upper, lower and f16 page of a KV head; 0 of those that the view does not read.
    page_bytes: [usize; 3],
    /// `[layer][page][kv head]` of each.
    pools: [Buffer; 3],
    /// Keys, which also serve as values, `[layer][kv head][BUFFER_TOKENS][D]` f16.
    ring: Buffer,
    /// The page table, `[pages]`.
    table: Buffer,
    /// f16 `[row][heads · D]`.
    q: Buffer,
}

impl MadeUpCache {
    /// Addresses of a layer.
    fn layer(&self, config: &ModelConfig, layer: usize) -> Layer {
        let first = layer * self.pages * config.kv_heads;
        let [upper, lower, full] = std::array::from_fn(|i| self.pools[i].at(first * self.page_bytes[i]));
        let ring = self.ring.at(layer * config.kv_heads * BUFFER_TOKENS * config.head_dim * 2);
        Layer { upper, lower, full, ring_k: ring, ring_v: ring, lists: 0 }
    }
}

struct Bench {
    device: Arc<Device>,
    config: ModelConfig,
}

impl Bench {
    /// Number of copies that together exceed the cache.
    fn copies(&self, bytes: usize) -> usize {
        (ROTATED_BYTES / bytes.max(1)).clamp(2, 96)
    }

    fn launch(&self, kernel: Kernel, grid: [usize; 3], block: u32, shared: usize, arguments: &[Arg]) -> Result<()> {
        let launch = Launch { grid: grid.map(|n| n as u32), block, shared: shared as u32, overlap: true };
        // SAFETY: callers pass the kernel's own argument list; buffers have its shapes and live until the measurement is
        // done.
        unsafe { self.device.launch(kernel, launch, arguments) }
    }

    /// A made-up cache of `context` tokens, in as many layers as exceed the GPU's cache, and queries of `most` rows.
    fn cache(&self, view: View, context: usize, most: usize) -> Result<MadeUpCache> {
        let (device, config) = (&self.device, &self.config);
        let (d, heads, kv_heads) = (config.head_dim, config.heads, config.kv_heads);
        // Rows begin in the middle of a page, so that all see the same pages.
        let position = (context / G * G + G / 4).max(1);
        let pages = (position + most).div_ceil(G);
        let page_bytes = match view {
            View::Upper => [Layout::Cuda.upper_bytes(d), 0, 0],
            View::Both => [Layout::Cuda.upper_bytes(d), Layout::Cuda.lower_bytes(d), 0],
            View::Full => [0, 0, 4 * G * d],
        };
        let [upper, lower, full] = page_bytes;
        let layers = self.copies(pages * kv_heads * (upper + lower + full));
        let blocks = layers * pages * kv_heads;
        let pool = |bytes: usize| if bytes > 0 { filled(device, blocks * bytes) } else { device.allocate(16) };
        // Codes may have any bits; parameters must be finite.
        let upper_pool = if upper > 0 {
            let offsets = Layout::Cuda.offsets(d);
            let mut one: Vec<u8> = (0..upper as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
            for (at, count) in [(offsets.key_params, 2 * d), (offsets.value_params, 2 * G)] {
                for param in one[at..at + 2 * count].chunks_exact_mut(2) {
                    param.copy_from_slice(&f16::from_f32(0.01).to_le_bytes());
                }
            }
            let many: Vec<u8> = one.iter().copied().cycle().take(64 * upper).collect();
            repeated(device, &device.copied(&many)?, blocks * upper)?
        } else {
            device.allocate(16)?
        };
        Ok(MadeUpCache {
            position,
            pages,
            layers,
            page_bytes,
            pools: [upper_pool, pool(lower)?, pool(full)?],
            ring: filled(device, layers * kv_heads * BUFFER_TOKENS * d * 2)?,
            table: device.copied(&(0..pages as i32).collect::<Vec<_>>())?,
            q: filled(device, most * heads * d * 2)?,
        })
    }

    /// Decode attention with its merge, and the choice of pages if the context has enough.
    fn attend(
        &self,
        view: View,
        context: usize,
        rows: &[usize],
        report: &mut dyn FnMut(Measured) -> Result<()>,
    ) -> Result<()> {
        let (device, config) = (&self.device, &self.config);
        let (d, heads, kv_heads) = (config.head_dim, config.heads, config.kv_heads);
        let most = rows.iter().copied().max().unwrap_or(1);
        let cache = self.cache(view, context, most)?;
        let (position, layers) = (cache.position, cache.layers);
        let x = device.allocate(most * padded(heads * d) * 4)?;
        let attend = Attend::new(device, config, Rounding::Balanced)?;
        let partial_rows = attend.partial_rows(most);
        let (partial, extremes) = (device.allocate(partial_rows * d * 4)?, device.allocate(partial_rows * 8)?);
        for &count in rows {
            let steps: Vec<Row> =
                (0..count).map(|offset| Row { slot: 0, offset, position: position + offset }).collect();
            let mut launches: Vec<(StepSlice, SliceAddresses, [Buffer; 3])> = Vec::new();
            for slice in attend.slices(view, &steps, |_| None, |_| false, false)? {
                let described =
                    [device.copied(&slice.spans)?, device.copied(&slice.tiles)?, device.copied(&slice.merged)?];
                let addresses = SliceAddresses {
                    spans: described[0].at(0),
                    tiles: described[1].at(0),
                    merged: described[2].at(0),
                    tables: cache.table.at(0),
                    table_pitch: cache.pages,
                    list_pitch: 0,
                    partial: partial.at(0),
                    extremes: extremes.at(0),
                };
                launches.push((slice, addresses, described));
            }
            let seconds = seconds(device, || {
                for layer in 0..layers {
                    let at = cache.layer(config, layer);
                    for (slice, addresses, _) in &launches {
                        // SAFETY: every buffer has room for this context and these rows, and lives until the measurement is done.
                        unsafe {
                            attend.run(view, slice, cache.q.at(0), &at, addresses, Neighbours::default())?;
                            attend.merge(slice, Some(Dtype::Bf16), x.at(0), 0, padded(heads * d), 0, addresses)?;
                        }
                    }
                }
                Ok(())
            })? / layers as f64;
            let recent = visible_buffer(position).len() * 4 * d;
            report(Measured {
                kernel: "attend",
                form: match view {
                    View::Upper => "upper",
                    View::Both => "both",
                    View::Full => "full",
                },
                rows: count,
                context: Some(context),
                seconds,
                bytes: kv_heads * (visible_pages(position) * cache.page_bytes.iter().sum::<usize>() + recent),
                ..Measured::default()
            })?;
        }
        if view == View::Upper && visible_pages(position) > LISTED {
            report(Measured { context: Some(context), ..self.choose(&attend, &cache)? })?;
        }
        Ok(())
    }

    /// The choice of [`LISTED`] pages for one row.
    fn choose(&self, attend: &Attend, cache: &MadeUpCache) -> Result<Measured> {
        let (device, config) = (&self.device, &self.config);
        let (d, kv_heads, pages, visible) =
            (config.head_dim, config.kv_heads, cache.pages, visible_pages(cache.position));
        let choice =
            device.copied(&[PageChoice { pages: visible as i32, scored: visible as i32, ..PageChoice::default() }])?;
        let (lists, scores) = (device.allocate(kv_heads * pages * 4)?, device.allocate(kv_heads * pages * 4)?);
        let addresses = SliceAddresses {
            tables: cache.table.at(0),
            table_pitch: pages,
            list_pitch: pages,
            ..SliceAddresses::default()
        };
        let q = cache.q.at(0);
        let seconds = seconds(device, || {
            (0..cache.layers).try_for_each(|layer| {
                let at = Layer { lists: lists.at(0), ..cache.layer(config, layer) };
                // SAFETY: lists and scores have room for every page; all buffers live until the measurement is done.
                unsafe { attend.choose(choice.at(0), [1, 1], visible, LISTED, q, scores.at(0), &at, &addresses) }
            })
        })? / cache.layers as f64;
        // A scale and a zero for each key channel of every page.
        let bytes = kv_heads * visible * 4 * d;
        Ok(Measured::of("choose_pages", "best", 1, seconds, bytes))
    }

    /// The GEMMs of a layer and the head, with the checkpoint's weights and with draft weights.
    fn gemms(&self, rows: &[usize], report: &mut dyn FnMut(Measured) -> Result<()>) -> Result<()> {
        let (device, config) = (&self.device, &self.config);
        let linear = Linear::new(device)?;
        let hierarchies = match config.dtype {
            Dtype::F32 => None,
            dtype => Some(Hierarchies::new(device, dtype)?),
        };
        let flag = device.zeroed(4)?;
        let most = rows.iter().copied().max().unwrap_or(1);
        let shapes = [
            (config.q_width() + 2 * config.kv_width(), config.hidden, 4),
            (config.hidden, config.q_width(), 4),
            (2 * config.intermediate, config.hidden, 4),
            (config.hidden, config.intermediate, 4),
            (config.vocab, config.hidden, 8),
        ];
        let mut measured = Vec::new();
        for (n, k, bits) in shapes {
            let bytes = Matrix::bytes(config.dtype, n, k);
            let matrices: Vec<Matrix> = (0..self.copies(bytes))
                .map(|_| Ok(Matrix { buffer: filled(device, bytes)?, dtype: config.dtype, n, k }))
                .collect::<Result<_>>()?;
            let (x, y) = (filled(device, most.next_multiple_of(8) * padded(k) * 4)?, device.allocate(most * n * 4)?);
            for &rows in rows {
                let seconds = seconds(device, || {
                    // SAFETY: x has `most` rows and y room for as many.
                    matrices.iter().try_for_each(|matrix| unsafe { linear.run(matrix, x.at(0), y.at(0), rows) })
                })? / matrices.len() as f64;
                let (form, shape) = (name(config.dtype), Some((n, k)));
                measured.push(Measured { kernel: "linear", form, rows, shape, seconds, bytes, ..Measured::default() });
            }
            let quantised = self.copies(Quantised::bytes(bits, n, k));
            let drafts: Vec<Quantised> = (0..quantised)
                .map(|i| linear.quantise(&matrices[i % matrices.len()], bits, 0, &flag))
                .collect::<Result<_>>()?;
            let xs = device.zeroed(most.next_multiple_of(8) * k.div_ceil(128) * 8)?;
            for &rows in rows {
                let seconds = seconds(device, || {
                    // SAFETY: as above; any bytes of x are valid codes.
                    drafts
                        .iter()
                        .try_for_each(|draft| unsafe { linear.run_quantised(draft, x.at(0), xs.at(0), y.at(0), rows) })
                })? / drafts.len() as f64;
                measured.push(Measured {
                    kernel: "linear",
                    form: if bits == 4 { "w4" } else { "w8" },
                    rows,
                    shape: Some((n, k)),
                    seconds,
                    bytes: Quantised::bytes(bits, n, k),
                    ..Measured::default()
                });
            }
            let Some(hierarchies) = &hierarchies else { continue };
            let [upper, lower] = Hierarchy::bytes(n, k);
            let nibbles: Vec<Hierarchy> = (0..self.copies(upper + lower))
                .map(|i| hierarchies.quantise(&matrices[i % matrices.len()], 0, 0, &flag))
                .collect::<Result<_>>()?;
            for (reads, form, bytes) in [(Reads::All, "int8", upper + lower), (Reads::Upper, "int4", upper)] {
                for &rows in rows {
                    let seconds = seconds(device, || {
                        // SAFETY: as above.
                        nibbles.iter().try_for_each(|matrix| unsafe {
                            hierarchies.run(matrix, reads, x.at(0), y.at(0), rows, (0, 0))
                        })
                    })? / nibbles.len() as f64;
                    let shape = Some((n, k));
                    measured.push(Measured {
                        kernel: "linear",
                        form,
                        rows,
                        shape,
                        seconds,
                        bytes,
                        ..Measured::default()
                    });
                }
            }
        }
        measured.into_iter().try_for_each(report)
    }

    /// The fused GEMMs of a draft step, if the device has them, for the rows they support. Only weights count as bytes: all
    /// else stays in the cache.
    fn drafts(&self, rows: &[usize], report: &mut dyn FnMut(Measured) -> Result<()>) -> Result<()> {
        let (device, config) = (&self.device, &self.config);
        let Some(draft) = DraftGemms::new(device, config.head_dim)? else { return Ok(()) };
        let linear = Linear::new(device)?;
        let (hidden, inner, heads) = (config.hidden, config.intermediate, config.q_width());
        let most = rows.iter().copied().max().unwrap_or(1);
        let flag = device.zeroed(4)?;
        let (stream, weight) = (device.zeroed(most * hidden * 4)?, device.zeroed(hidden * 4)?);
        let stream_at = Hidden { address: stream.at(0), weight: weight.at(0), eps: config.rms_eps, width: hidden };
        let widest = heads.max(inner).max(hidden);
        let (x, xs) = (device.zeroed(most * padded(widest) * 4)?, device.zeroed(most * widest.div_ceil(128) * 8)?);
        let q = device.allocate(most * (heads + 2 * config.kv_width()) * 4)?;
        let ring = || device.zeroed(config.kv_width() * BUFFER_TOKENS * 2);
        let (ring_k, ring_v) = (ring()?, ring()?);
        // Descriptions of rows are zero: slot 0, position 0.
        let (described, angles) = (device.zeroed(most * 16)?, device.zeroed(most * config.head_dim * 4)?);
        let to = Heads {
            rows: described.at(0),
            bias: 0,
            cos_sin: angles.at(0),
            q: q.at(0),
            rings: [ring_k.at(0), ring_v.at(0)],
            scale: 1.0,
            heads: [config.heads, config.kv_heads],
            layer: 0,
            slots: 1,
            flag: flag.at(0),
        };
        let shapes = [
            ("heads", heads + 2 * config.kv_width(), hidden),
            ("add i8", hidden, heads),
            ("gated", 2 * inner, hidden),
            ("add bf16", hidden, inner),
        ];
        for (form, n, k) in shapes {
            let paired = if form == "heads" { config.head_dim } else { 0 };
            let full = Matrix { buffer: filled(device, Matrix::bytes(config.dtype, n, k))?, dtype: config.dtype, n, k };
            let bytes = Quantised::bytes(4, n, k);
            let drafts: Vec<Quantised> =
                (0..self.copies(bytes)).map(|_| linear.quantise(&full, 4, paired, &flag)).collect::<Result<_>>()?;
            for &rows in rows.iter().filter(|&&rows| draft.takes(widest, rows)) {
                let seconds = seconds(device, || {
                    // SAFETY: every buffer has room for `most` rows and outlives the graph.
                    drafts.iter().try_for_each(|weights| unsafe {
                        match form {
                            "heads" => draft.heads(weights, stream_at, &to, rows),
                            "add i8" => draft.add_i8(weights, x.at(0), xs.at(0), stream.at(0), 0, rows),
                            "gated" => draft.gated(weights, stream_at, 0, x.at(0), padded(inner), rows),
                            _ => draft.add_bf16(weights, x.at(0), padded(inner), stream.at(0), 0, rows),
                        }
                    })
                })? / drafts.len() as f64;
                let shape = Some((n, k));
                report(Measured { kernel: "draft", form, rows, shape, seconds, bytes, ..Measured::default() })?;
            }
        }
        Ok(())
    }

    /// Median seconds of one of [`CALLS`] calls.
    fn called(&self, mut call: impl FnMut() -> Result<()>) -> Result<f64> {
        Ok(seconds(&self.device, || (0..CALLS).try_for_each(|_| call()))? / CALLS as f64)
    }

    /// The operations between a layer's GEMMs, for 16-bit GEMMs and for draft GEMMs. Their buffers stay in the cache, as in a
    /// step.
    fn small(&self, rows: &[usize], report: &mut dyn FnMut(Measured) -> Result<()>) -> Result<()> {
        let (device, config) = (&self.device, &self.config);
        let (hidden, width, dtype) = (config.hidden, config.intermediate, name(config.dtype));
        let (d, q_width, kv_width) = (config.head_dim, config.q_width(), config.kv_width());
        let most = rows.iter().copied().max().unwrap_or(1);
        let kernel = |name: &str| device.kernel(name, 0);
        let norms = [kernel(&format!("norm_{dtype}"))?, kernel("norm_i8")?];
        let stem = activate_mul(config.activation);
        let gated = [kernel(&format!("{stem}_{dtype}"))?, kernel(&format!("{stem}_i8"))?];
        let append = kernel(&format!("append_{d}"))?;
        let widest = (2 * width).max(hidden).max(q_width + 2 * kv_width);
        let (stream, y) = (device.zeroed(most * hidden * 4)?, device.zeroed(most * widest * 4)?);
        let (weight, x) = (device.zeroed(hidden * 4)?, device.zeroed(most * padded(width.max(hidden)) * 4)?);
        let xs = device.zeroed(most * width.max(hidden).div_ceil(G) * 8)?;
        // Descriptions of rows are zero: slot 0, position 0.
        let (described, angles, flag) = (device.zeroed(most * 16)?, device.zeroed(most * d * 4)?, device.zeroed(4)?);
        let (q, ring) = (device.allocate(most * q_width * 2)?, device.zeroed(2 * kv_width * BUFFER_TOKENS * 2)?);
        let (ring_k, ring_v) = (ring.at(0), ring.at(kv_width * BUFFER_TOKENS * 2));
        let element = config.dtype.bytes();
        for &rows in rows {
            let timed = |kernel, form, seconds, bytes| Measured::of(kernel, form, rows, seconds, bytes);
            let eps = config.rms_eps;
            let full = args![&stream, &y, 0u64, &weight, &x, eps, hidden, padded(hidden), 0usize];
            let codes = args![&stream, &y, 0u64, &weight, &x, &xs, eps, hidden, 0usize];
            for (form, norm, arguments, out) in [(dtype, norms[0], &full[..], element), ("i8", norms[1], &codes[..], 1)]
            {
                let took = self.called(|| self.launch(norm, [rows, 1, 1], NORM_THREADS, 0, arguments))?;
                report(timed("norm", form, took, hidden * (4 + rows * (12 + out))))?;
            }
            let full = args![&y, 0u64, &x, width, padded(width), 0usize];
            let codes = args![&y, 0u64, &x, &xs, width, 0usize];
            let grid = [width.div_ceil(1024), rows, 1];
            for (form, silu, arguments, out) in [(dtype, gated[0], &full[..], element), ("i8", gated[1], &codes[..], 1)]
            {
                let took = self.called(|| self.launch(silu, grid, 256, 0, arguments))?;
                report(timed("silu", form, took, rows * width * (8 + out)))?;
            }
            let arguments = args![
                &described,
                &y,
                0u64,
                0u64,
                0u64,
                &angles,
                &q,
                ring_k,
                ring_v,
                eps,
                1.0f32,
                config.heads,
                config.kv_heads,
                0usize,
                1usize,
                0usize,
                &flag
            ];
            let grid = [(config.heads + 2 * config.kv_heads).div_ceil(4), rows, 1];
            let took = self.called(|| self.launch(append, grid, 128, 0, &arguments))?;
            report(timed("append", "f16", took, rows * (6 * (q_width + 2 * kv_width) + 4 * d)))?;
        }
        Ok(())
    }

    /// Start and end of a step: the embedding, and choosing and judging tokens, for one sequence's rows. Their buffers stay
    /// in the cache, too.
    fn ends(&self, rows: &[usize], report: &mut dyn FnMut(Measured) -> Result<()>) -> Result<()> {
        let (device, config) = (&self.device, &self.config);
        let (hidden, vocab) = (config.hidden, config.vocab);
        let most = rows.iter().copied().max().unwrap_or(1);
        let embed = device.kernel(&format!("embed_{}", name(config.dtype)), 0)?;
        let table = filled(device, Matrix::bytes(config.dtype, vocab, hidden))?;
        // Logits of a usual spread: sums of four uniform numbers with a total range of 10.
        let even = |i: u32, seed: u32| {
            (i.wrapping_mul(4).wrapping_add(seed).wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 24) as f32
        };
        let pattern: Vec<f32> =
            (0..vocab as u32).map(|i| (0..4).map(|seed| 10.0 * even(i, seed)).sum::<f32>()).collect();
        let logits = repeated(device, &device.copied(&pattern)?, most * vocab * 4)?;
        let stream = device.zeroed(most * hidden * 4)?;
        let described = device.zeroed(most * 16)?;
        let mut sampling = Sampling::new(device, vocab, 1, most, most.max(2), 1, false)?;
        for &rows in rows {
            let timed = |kernel, form, seconds, bytes| Measured::of(kernel, form, rows, seconds, bytes);
            let (windows, pitch) = (sampling.windows(), sampling.pitch());
            let arguments = args![&described, windows, pitch, 0u64, &table, &stream, hidden, vocab, 1.0f32];
            let took = self.called(|| self.launch(embed, [rows, 1, 1], 256, 0, &arguments))?;
            report(timed("embed", name(config.dtype), took, rows * hidden * (4 + config.dtype.bytes())))?;
            let warm = Sampler { temperature: 1.0, top_p: 0.95, accept: Accept::Replay, ..Sampler::greedy() };
            for (form, sampler) in [("greedy", Sampler::greedy()), ("replay", warm)] {
                let turns = [Turn::new(0, 0, (rows - 1).min(GAMMA_MAX), sampler)];
                let features = sampling.upload(&turns)?;
                let step: Vec<Row> = (0..rows).map(|offset| Row { slot: 0, offset, position: offset }).collect();
                sampling.turns().write(0, &sampling.describe(&step, &turns)?)?;
                let took = self.called(|| sampling.choose_all(rows, described.at(0), logits.at(0), features))?;
                report(timed("choose", form, took, rows * vocab * 4))?;
                let took = self.called(|| sampling.judge_chosen(sampling.turns().at(0), 1, logits.at(0)))?;
                report(timed("judge", form, took, 4 * rows))?;
            }
        }
        Ok(())
    }

    /// Quantising: one page of a sequence in all layers, from the ring; many pages of one layer, from a prompt.
    fn pages(&self, report: &mut dyn FnMut(Measured) -> Result<()>) -> Result<()> {
        const PAGES: usize = 64;
        let (device, config) = (&self.device, &self.config);
        let (d, heads, layers) = (config.head_dim, config.kv_heads, config.layers);
        let (upper, lower) = (Layout::Cuda.upper_bytes(d), Layout::Cuda.lower_bytes(d));
        let shared = page_shared(d);
        let (flush, store) =
            (device.kernel(&format!("flush_{d}"), shared)?, device.kernel(&format!("store_{d}"), shared)?);
        let ring = filled(device, layers * heads * BUFFER_TOKENS * d * 2)?;
        let scratch = filled(device, PAGES * G * 2 * heads * d * 2)?;
        let blocks = (layers.max(PAGES)) * heads;
        let (upper_pool, lower_pool) = (device.allocate(blocks * upper)?, device.allocate(blocks * lower)?);
        let table = device.copied(&(0..PAGES as i32).collect::<Vec<_>>())?;
        let flag = device.zeroed(4)?;
        for (form, balanced) in [("balanced", 1usize), ("paper", 0)] {
            let moved = 4 * G * d + upper + lower;
            let arguments = args![
                &ring,
                &ring,
                &upper_pool,
                &lower_pool,
                0u64,
                1usize,
                1usize,
                0usize,
                0usize,
                0usize,
                balanced,
                &flag
            ];
            let took = seconds(device, || self.launch(flush, [heads, layers, 2], 256, shared, &arguments))?;
            let bytes = layers * heads * moved;
            report(Measured { kernel: "flush", form, rows: G, seconds: took, bytes, ..Measured::default() })?;
            let arguments = args![&scratch, &upper_pool, &lower_pool, 0u64, &table, 0usize, balanced, &flag];
            let took = seconds(device, || self.launch(store, [heads, PAGES, 2], 256, shared, &arguments))?;
            let bytes = PAGES * heads * moved;
            report(Measured { kernel: "store", form, rows: PAGES * G, seconds: took, bytes, ..Measured::default() })?;
        }
        let keep = device.kernel("keep_recent", 0)?;
        let arguments = args![&scratch, &ring, &ring, 0usize, 1usize, 0usize, heads, d, 0usize, &flag];
        let took = seconds(device, || self.launch(keep, [BUFFER_TOKENS, 2, 1], 128, 0, &arguments))?;
        let (rows, bytes) = (BUFFER_TOKENS, 2 * BUFFER_TOKENS * 2 * heads * d * 2);
        report(Measured { kernel: "keep_recent", form: "f16", rows, seconds: took, bytes, ..Measured::default() })
    }

    /// Kernels of loading: reordering a matrix, and making draft weights of it.
    fn weights(&self, report: &mut dyn FnMut(Measured) -> Result<()>) -> Result<()> {
        let (device, config) = (&self.device, &self.config);
        let linear = Linear::new(device)?;
        let flag = device.zeroed(4)?;
        let (n, k, dtype) = (2 * config.intermediate, config.hidden, config.dtype);
        let bytes = Matrix::bytes(dtype, n, k);
        let from = filled(device, bytes)?;
        let matrix = Matrix { buffer: filled(device, bytes)?, dtype, n, k };
        let shape = Some((n, k));
        let (order, elements) = match dtype {
            Dtype::F32 => ("weights_rows", n * k),
            Dtype::Bf16 | Dtype::F16 => ("weights_atoms", n * k.div_ceil(8)),
        };
        let kernel = device.kernel(order, 0)?;
        let arguments = args![&from, &matrix.buffer, 0usize, n, k, 0usize];
        let took = seconds(device, || self.launch(kernel, [elements.div_ceil(256), 1, 1], 256, 0, &arguments))?;
        let (form, moved) = (name(dtype), 2 * bytes);
        report(Measured { kernel: order, form, rows: n, shape, seconds: took, bytes: moved, ..Measured::default() })?;
        for (form, bits) in [("w4", 4), ("w8", 8)] {
            let draft = linear.quantise(&matrix, bits, 0, &flag)?;
            let took = seconds(device, || linear.quantise_into(&matrix, &draft, &flag))?;
            let bytes = bytes + Quantised::bytes(bits, n, k);
            let kernel = "quantise_weights";
            report(Measured { kernel, form, rows: n, shape, seconds: took, bytes, ..Measured::default() })?;
        }
        Ok(())
    }

    /// A block of a prompt: its GEMMs with all fused operations, and its attention.
    fn prompt(&self, contexts: &[usize], report: &mut dyn FnMut(Measured) -> Result<()>) -> Result<()> {
        let (device, config, rows) = (&self.device, &self.config, PREFILL_ROWS);
        let shape = Shape::of(config);
        let (d, dtype, form) = (config.head_dim, config.dtype, name(config.dtype));
        let prefill = Prefill::new(device, shape, rows)?;
        let (q_width, kv_width) = (config.q_width(), 2 * config.kv_width());
        let widest = config.hidden.max(q_width).max(config.intermediate);
        let x = filled(device, readable(rows) * padded(widest) * dtype.bytes())?;
        let (out, q) = (device.allocate(x.bytes())?, device.allocate(rows * q_width * 2)?);
        let (hidden, angles) = (device.zeroed(rows * config.hidden * 4)?, device.zeroed(rows * d / 2 * 8)?);
        let most = contexts.iter().copied().max().unwrap_or(0) + rows;
        let (kv, flag) = (filled(device, most * kv_width * 2)?, device.zeroed(4)?);
        let weights = |n: usize, k: usize| filled(device, Matrix::bytes(dtype, n, k)).map(|buffer| (buffer, n, k));
        let gemms = [
            ("prefill_qkv", weights(q_width + kv_width, config.hidden)?),
            ("prefill_output", weights(config.hidden, q_width)?),
            ("prefill_gate_up", weights(2 * config.intermediate, config.hidden)?),
            ("prefill_down", weights(config.hidden, config.intermediate)?),
        ];
        for (kernel, (weights, n, k)) in &gemms {
            let (n, k, w) = (*n, *k, weights.at(0));
            let took = seconds(device, || {
                // SAFETY: all buffers have room for the block, and live until the measurement is done.
                unsafe {
                    match *kernel {
                        "prefill_qkv" => {
                            prefill.qkv(x.at(0), w, None, None, angles.at(0), q.at(0), kv.at(0), flag.at(0), rows)
                        }
                        "prefill_output" => prefill.add(Branch::Attention, x.at(0), w, [None; 2], hidden.at(0), rows),
                        "prefill_gate_up" => prefill.gate_up(x.at(0), w, None, out.at(0), rows),
                        _ => prefill.add(Branch::Mlp, x.at(0), w, [None; 2], hidden.at(0), rows),
                    }
                }
            })?;
            report(Measured {
                kernel,
                form,
                rows,
                shape: Some((n, k)),
                seconds: took,
                bytes: weights.bytes() + rows * (k + n) * dtype.bytes(),
                operations: Some(2.0 * rows as f64 * n as f64 * k as f64),
                ..Measured::default()
            })?;
        }
        for &context in contexts {
            let took = seconds(device, || {
                // SAFETY: as above; kv has room for the context and the block.
                unsafe { prefill.attend(q.at(0), kv.at(0), out.at(0), context, rows, None) }
            })?;
            // Scores and weighted sums over the mean number of visible tokens.
            let seen = context as f64 + (rows as f64 + 1.0) / 2.0;
            report(Measured {
                kernel: "prefill_attend",
                form,
                rows,
                context: Some(context),
                seconds: took,
                bytes: (context + rows) * kv_width * 2 + rows * q_width * (2 + dtype.bytes()),
                operations: Some(4.0 * rows as f64 * seen * q_width as f64),
                ..Measured::default()
            })?;
        }
        Ok(())
    }
}
