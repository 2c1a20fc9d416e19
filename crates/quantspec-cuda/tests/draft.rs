//! Fused GEMMs of a draft step compared with f64, and every row's bits with other numbers of rows.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]
#![allow(clippy::print_stderr, reason = "a skipped test must say so")]

mod gpu;

use gpu::{Random, device, distance, download, matrix, poisoned, round, while_busy};
use quantspec_core::cache::BUFFER_TOKENS;
use quantspec_core::config::Dtype;
use quantspec_core::quantize::{quantize_activations, quantize_weights_row};
use quantspec_core::weights::{GROUP, quantize_row};
use quantspec_cuda::device::{Buffer, Device};
use quantspec_cuda::draft::{DraftGemms, DraftMatrix, Heads, Hidden};
use quantspec_cuda::hierarchy::{Hierarchies, Hierarchy};
use quantspec_cuda::linear::{Linear, Matrix, Quantised};
use std::sync::Arc;

/// Bound above the effect of one code rounded the other way.
const BOUND: f64 = 1e-3;
/// The same after rounding to f16, and to bfloat16.
const BOUND_F16: f64 = 1.2e-3;
const BOUND_BF16: f64 = 3e-3;
const EPS: f32 = 1e-5;
const MOST: usize = 2;

/// The kernels, on GPUs of compute capability 9.0.
fn kernels(device: &Arc<Device>, head_dim: usize) -> Option<DraftGemms> {
    let draft = DraftGemms::new(device, head_dim).unwrap();
    if draft.is_none() {
        eprintln!("SKIPPED: compute capability {} has no fused GEMMs of draft steps", device.info.compute_capability);
    }
    draft
}

/// Weights that a draft reads: its own, or the upper plane of the target's.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Own,
    Upper,
}

const KINDS: [Kind; 2] = [Kind::Own, Kind::Upper];

enum Weights {
    Own(Quantised),
    Upper(Hierarchy),
}

impl<'a> From<&'a Weights> for DraftMatrix<'a> {
    fn from(weights: &'a Weights) -> Self {
        match weights {
            Weights::Own(own) => own.into(),
            Weights::Upper(hierarchy) => hierarchy.into(),
        }
    }
}

/// Draft weights `[n][k]` of bfloat16 values, and the dequantised values.
fn weights(
    device: &Arc<Device>,
    random: &mut Random,
    kind: Kind,
    n: usize,
    k: usize,
    paired: usize,
) -> (Weights, Vec<f32>) {
    let flag = device.zeroed(4).unwrap();
    let size = 1.0 / (k as f32).sqrt();
    let w: Vec<f32> = random.normals(n * k).iter().map(|&v| round(v * size, Dtype::Bf16)).collect();
    let full = Matrix { buffer: matrix(device, &w, n, k, Dtype::Bf16), dtype: Dtype::Bf16, n, k };
    let made = match kind {
        Kind::Own => Weights::Own(Linear::new(device).unwrap().quantise(&full, 4, &[], paired, &flag).unwrap()),
        Kind::Upper => Weights::Upper(
            Hierarchies::new(device, Dtype::Bf16).unwrap().quantise(&full, &[], 0, paired, &flag).unwrap(),
        ),
    };
    device.synchronize().unwrap();
    assert_eq!(flag.read::<u32>(0, 1).unwrap(), [0]);
    let values = w.chunks(k).flat_map(|row| match kind {
        Kind::Own => quantize_weights_row(row, &[]).unwrap().dequantize(),
        Kind::Upper => quantize_row(row, &[], GROUP).unwrap().upper(),
    });
    (made, values.collect())
}

/// x `[rows][k]`, in int8 by groups, times w `[n][k]`: f64 `[rows][n]`.
fn gemm(x: &[f32], w: &[f32], k: usize) -> Vec<f64> {
    let mut out = Vec::new();
    for x in x.chunks(k) {
        let codes = quantize_activations(x).unwrap();
        let rounded: Vec<f64> =
            codes.codes.iter().enumerate().map(|(i, &c)| f64::from(c) * f64::from(codes.scales[i / 128])).collect();
        out.extend(w.chunks(k).map(|row| row.iter().zip(&rounded).map(|(&w, x)| f64::from(w) * x).sum::<f64>()));
    }
    out
}

/// A hidden stream with its norm on the device, and the expected norm: values before the factor, and the factors.
struct Stream {
    hidden: Buffer,
    weight: Buffer,
    values: Vec<f32>,
    weighted: Vec<f32>,
    factors: Vec<f64>,
    width: usize,
}

impl Stream {
    fn new(device: &Arc<Device>, random: &mut Random, width: usize) -> Stream {
        // Rows of different magnitude, so that another row's factor or scale would be detected.
        let values = (0..MOST).flat_map(|row| random.normals(width).into_iter().map(move |v| v * (row + 1) as f32));
        let values = values.collect();
        Stream::of(device, random, width, values)
    }

    fn of(device: &Arc<Device>, random: &mut Random, width: usize, values: Vec<f32>) -> Stream {
        let weight = random.normals(width);
        let factors = values.chunks(width).map(|row| {
            let mean = row.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / width as f64;
            1.0 / (mean + f64::from(EPS)).sqrt()
        });
        Stream {
            factors: factors.collect(),
            weighted: values.iter().enumerate().map(|(i, v)| v * weight[i % width]).collect(),
            hidden: device.copied(&values).unwrap(),
            weight: device.copied(&weight).unwrap(),
            values,
            width,
        }
    }

    fn at(&self) -> Hidden {
        Hidden { address: self.hidden.at(0), weight: self.weight.at(0), eps: EPS, width: self.width }
    }

    /// The normed stream times the weights.
    fn times(&self, w: &[f32]) -> Vec<f64> {
        let n = w.len() / self.width;
        let y = gemm(&self.weighted, w, self.width);
        y.iter().enumerate().map(|(i, y)| y * self.factors[i / n]).collect()
    }
}

/// Runs `work` for several numbers of rows and compares each row's bits with the largest run, which is returned.
fn invariant(what: &str, draft: &DraftGemms, k: usize, work: impl Fn(usize) -> Vec<f32>) -> Vec<f32> {
    let most = (1..=MOST).filter(|&rows| draft.takes(k, rows)).max().unwrap();
    let all = work(most);
    let width = all.len() / most;
    for rows in 1..most {
        let some = work(rows);
        let differs = some.iter().zip(&all).position(|(a, b)| a.to_bits() != b.to_bits());
        assert_eq!(differs, None, "{what}: {rows} of {most} rows change bits");
        assert_eq!(some.len(), rows * width);
    }
    all
}

#[test]
fn plain_rows() {
    KINDS.into_iter().for_each(rows_of);
}

fn rows_of(kind: Kind) {
    let Some(device) = device() else { return };
    let Some(draft) = kernels(&device, 64) else { return };
    let mut random = Random(21);
    // Whole tiles and remainders, fewer groups than warps, more than a warp keeps, several batches of tiles.
    for (n, k) in [(256, 512), (40, 200), (9000, 256), (17, 64), (129, 9216), (4800, 4096)] {
        let (weights, w) = weights(&device, &mut random, kind, n, k, 0);
        let stream = Stream::new(&device, &mut random, k);
        let y = invariant("rows", &draft, k, |rows| {
            let y = poisoned(&device, rows * n * 4);
            // SAFETY: the stream has all rows and y room for `rows`.
            unsafe { draft.rows(&weights, stream.at(), y.at(0), rows) }.unwrap();
            y.read::<f32>(0, rows * n).unwrap()
        });
        let want = stream.times(&w);
        for (row, (y, want)) in y.chunks(n).zip(want.chunks(n)).enumerate() {
            let error = distance(y, want);
            assert!(error < BOUND, "{kind:?} {n} x {k}, row {row}: {error}");
        }
    }
}

#[test]
fn a_row_of_zeros() {
    KINDS.into_iter().for_each(zeros);
}

fn zeros(kind: Kind) {
    let Some(device) = device() else { return };
    let Some(draft) = kernels(&device, 64) else { return };
    let (mut random, n, k) = (Random(27), 64, 640);
    let (weights, _) = weights(&device, &mut random, kind, n, k, 0);
    let stream = Stream::of(&device, &mut random, k, vec![0.0; k]);
    let y = poisoned(&device, n * 4);
    // SAFETY: the stream and y have one row.
    unsafe { draft.rows(&weights, stream.at(), y.at(0), 1) }.unwrap();
    // Its codes are zero, without 0/0.
    assert!(y.read::<f32>(0, n).unwrap().iter().all(|&v| v == 0.0));
}

#[test]
fn gate_and_up() {
    KINDS.into_iter().for_each(gated);
}

fn gated(kind: Kind) {
    let Some(device) = device() else { return };
    let Some(draft) = kernels(&device, 64) else { return };
    let mut random = Random(22);
    for (inner, k) in [(72, 200), (2752, 1024)] {
        let (weights, w) = weights(&device, &mut random, kind, 2 * inner, k, 0);
        let stream = Stream::new(&device, &mut random, k);
        let bias = random.normals(2 * inner);
        let bias_on = device.copied(&bias).unwrap();
        let pitch = inner.next_multiple_of(64);
        for with in [false, true] {
            let x = invariant("gated", &draft, k, |rows| {
                let x = poisoned(&device, rows * pitch * 2);
                let bias = if with { bias_on.at(0) } else { 0 };
                // SAFETY: the stream has all rows and x room for `rows`.
                unsafe { draft.gated(&weights, stream.at(), bias, x.at(0), pitch, rows) }.unwrap();
                let x = download(&x, rows * pitch, Dtype::Bf16);
                assert!(x.chunks(pitch).all(|row| row[inner..].iter().all(|v| v.is_nan())), "wrote beyond a row");
                x.chunks(pitch).flat_map(|row| row[..inner].to_vec()).collect()
            });
            let y = stream.times(&w);
            let want: Vec<f64> = (0..x.len())
                .map(|i| {
                    let (row, at) = (i / inner, i % inner / 8 * 16 + i % 8);
                    let value = |at: usize| y[row * 2 * inner + at] + if with { f64::from(bias[at]) } else { 0.0 };
                    value(at) / (1.0 + (-value(at)).exp()) * value(at + 8)
                })
                .collect();
            for (row, (x, want)) in x.chunks(inner).zip(want.chunks(inner)).enumerate() {
                let error = distance(x, want);
                assert!(error < BOUND_BF16, "{kind:?} {inner} x {k}, row {row}: {error}");
            }
        }
    }
}

#[test]
fn added_to_the_stream() {
    KINDS.into_iter().for_each(added);
}

fn added(kind: Kind) {
    let Some(device) = device() else { return };
    let Some(draft) = kernels(&device, 64) else { return };
    let mut random = Random(23);
    for (n, k) in [(256, 512), (40, 200), (2048, 14_336), (4096, 1376)] {
        let (weights, w) = weights(&device, &mut random, kind, n, k, 0);
        let stream = Stream::new(&device, &mut random, n);
        let bias = random.normals(n);
        let bias_on = device.copied(&bias).unwrap();
        let pitch = k.next_multiple_of(64);
        let x: Vec<f32> = random.normals(MOST * k).iter().map(|&v| round(v, Dtype::Bf16)).collect();
        let mut padded = vec![f32::NAN; MOST * pitch];
        let (groups, whole) = (k.div_ceil(128), k.next_multiple_of(128));
        let (mut codes, mut scales) = (vec![0i8; MOST * whole], vec![0.0f32; MOST * groups * 2]);
        for (row, values) in x.chunks(k).enumerate() {
            padded[row * pitch..][..k].copy_from_slice(values);
            let quantised = quantize_activations(values).unwrap();
            codes[row * whole..][..k].copy_from_slice(&quantised.codes);
            for (group, codes) in quantised.codes.chunks(128).enumerate() {
                let scale = quantised.scales[group];
                scales[(row * groups + group) * 2] = scale;
                scales[(row * groups + group) * 2 + 1] = scale * codes.iter().map(|&c| f32::from(c)).sum::<f32>();
            }
        }
        let x16 = gpu::upload(&device, &padded, Dtype::Bf16);
        let (x8, xs) = (device.copied(&codes).unwrap(), device.copied(&scales).unwrap());
        let y = gemm(&x, &w, k);
        for with in [false, true] {
            let at = if with { bias_on.at(0) } else { 0 };
            for int8 in [false, true] {
                let got = invariant("added", &draft, k, |rows| {
                    let hidden = device.copied(&stream.values[..rows * n]).unwrap();
                    // SAFETY: inputs have all rows, and the stream `rows`.
                    unsafe {
                        if int8 {
                            draft.add_i8(&weights, x8.at(0), xs.at(0), hidden.at(0), at, rows).unwrap();
                        } else {
                            draft.add_bf16(&weights, x16.at(0), pitch, hidden.at(0), at, rows).unwrap();
                        }
                    }
                    hidden.read::<f32>(0, rows * n).unwrap()
                });
                let want: Vec<f64> = (0..got.len())
                    .map(|i| f64::from(stream.values[i]) + y[i] + if with { f64::from(bias[i % n]) } else { 0.0 })
                    .collect();
                for (row, (got, want)) in got.chunks(n).zip(want.chunks(n)).enumerate() {
                    let error = distance(got, want);
                    assert!(error < BOUND, "{kind:?} {n} x {k}, int8 {int8}, row {row}: {error}");
                }
            }
        }
    }
}

#[test]
fn heads_are_rotated_and_appended() {
    KINDS.into_iter().for_each(heads_of);
}

fn heads_of(kind: Kind) {
    let Some(device) = device() else { return };
    let mut random = Random(24);
    let (slots, layers, layer) = (3, 2, 1);
    let rows = [[2, 0, 384, 0], [1, 0, 1_000_000, 2]];
    let rows_on = device.copied(&rows.concat()).unwrap();
    for (d, heads, kv_heads, k) in [(64, 6, 2, 200), (128, 32, 8, 1024), (256, 4, 4, 640)] {
        let Some(draft) = kernels(&device, d) else { return };
        let all = heads + 2 * kv_heads;
        let (weights, w) = weights(&device, &mut random, kind, all * d, k, d);
        let stream = Stream::new(&device, &mut random, k);
        let bias = random.normals(all * d);
        let bias_on = device.copied(&bias).unwrap();
        let angles: Vec<[f32; 2]> =
            (0..MOST * d / 2).map(|_| (random.uniform() * 6.3).sin_cos()).map(|(s, c)| [c, s]).collect();
        let angles_on = device.copied(&angles.concat()).unwrap();
        let scale = std::f32::consts::LOG2_E / (d as f32).sqrt();
        let elements = layers * slots * kv_heads * BUFFER_TOKENS * d;
        let y = stream.times(&w);
        for with in [false, true] {
            let flag = device.zeroed(4).unwrap();
            let bias_at = if with { bias_on.at(0) } else { 0 };
            let ring_at = |row: usize, head: usize| {
                let [slot, _, position, _] = rows[row];
                (((layer * slots + slot as usize) * kv_heads + head) * BUFFER_TOKENS
                    + position as usize % BUFFER_TOKENS)
                    * d
            };
            let got = invariant("heads", &draft, k, |count| {
                let rings = [poisoned(&device, elements * 2), poisoned(&device, elements * 2)];
                let q = poisoned(&device, count * heads * d * 2);
                let to = Heads {
                    rows: rows_on.at(0),
                    bias: bias_at,
                    cos_sin: angles_on.at(0),
                    q: q.at(0),
                    rings: [rings[0].at(0), rings[1].at(0)],
                    scale,
                    heads: [heads, kv_heads],
                    layer,
                    slots,
                    flag: flag.at(0),
                };
                // SAFETY: all inputs have all rows, and q `count`.
                unsafe { draft.heads(&weights, stream.at(), &to, count) }.unwrap();
                let q = download(&q, count * heads * d, Dtype::F16);
                let mut rings = rings.map(|ring| download(&ring, elements, Dtype::F16));
                let mut out = Vec::new();
                for row in 0..count {
                    out.extend_from_slice(&q[row * heads * d..][..heads * d]);
                    for ring in &mut rings {
                        for head in 0..kv_heads {
                            let place = &mut ring[ring_at(row, head)..][..d];
                            out.extend_from_slice(place);
                            place.fill(f32::NAN);
                        }
                    }
                }
                assert!(rings.iter().flatten().all(|v| v.is_nan()), "wrote elsewhere");
                out
            });
            assert_eq!(flag.read::<u32>(0, 1).unwrap(), [0]);
            let want: Vec<f64> = (0..MOST * all * d)
                .map(|i| {
                    let (row, head, channel) = (i / (all * d), i / d % all, i % d);
                    let value = |channel: usize| {
                        y[row * all * d + head * d + channel]
                            + if with { f64::from(bias[head * d + channel]) } else { 0.0 }
                    };
                    let [cos, sin] = angles[row * d / 2 + channel % (d / 2)].map(f64::from);
                    let turned = match channel < d / 2 {
                        _ if head >= heads + kv_heads => value(channel),
                        true => value(channel) * cos - value(channel + d / 2) * sin,
                        false => value(channel) * cos + value(channel - d / 2) * sin,
                    };
                    if head < heads { turned * f64::from(scale) } else { turned }
                })
                .collect();
            for (row, (got, want)) in got.chunks(all * d).zip(want.chunks(all * d)).enumerate() {
                let error = distance(got, want);
                assert!(error < BOUND_F16, "{kind:?} heads of {d}, row {row}: {error}");
            }
        }
    }
}

/// As in `append`: earlier rows multiply later entries by zero, which fails for infinity.
#[test]
fn heads_beyond_half_precision_are_flagged_and_stored_as_zero() {
    KINDS.into_iter().for_each(heads_beyond);
}

fn heads_beyond(kind: Kind) {
    let Some(device) = device() else { return };
    let (d, heads, kv_heads, k) = (64, 2, 1, 256);
    let Some(draft) = kernels(&device, d) else { return };
    let mut random = Random(28);
    let all = heads + 2 * kv_heads;
    let (weights, _) = weights(&device, &mut random, kind, all * d, k, d);
    let stream = Stream::new(&device, &mut random, k);
    let rows_on = device.copied(&[0, 0, 5, 0]).unwrap();
    let angles_on = device.copied(&[1.0f32, 0.0].repeat(d / 2)).unwrap();
    // Channel 3 of the values, and channel 40 of the keys, which RoPE rotates together with channel 8.
    let mut bias = vec![0.0f32; all * d];
    (bias[(heads + kv_heads) * d + 3], bias[heads * d + 40]) = (1e6, f32::NAN);
    let (bias_on, flag) = (device.copied(&bias).unwrap(), device.zeroed(4).unwrap());
    let rings = [0, 1].map(|_| poisoned(&device, kv_heads * BUFFER_TOKENS * d * 2));
    let q = poisoned(&device, heads * d * 2);
    let to = Heads {
        rows: rows_on.at(0),
        bias: bias_on.at(0),
        cos_sin: angles_on.at(0),
        q: q.at(0),
        rings: [rings[0].at(0), rings[1].at(0)],
        scale: 1.0,
        heads: [heads, kv_heads],
        layer: 0,
        slots: 1,
        flag: flag.at(0),
    };
    // SAFETY: everything has one row.
    unsafe { draft.heads(&weights, stream.at(), &to, 1) }.unwrap();
    assert_eq!(flag.read::<u32>(0, 1).unwrap(), [1]);
    for (ring, channels) in rings.iter().zip([&[8, 40][..], &[3]]) {
        let stored = &download(ring, 6 * d, Dtype::F16)[5 * d..];
        let zeros: Vec<usize> = (0..d).filter(|&c| stored[c] == 0.0).collect();
        assert!(stored.iter().all(|v| v.is_finite()) && zeros == channels, "{zeros:?}, not {channels:?}");
    }
}

#[test]
fn other_work_changes_no_bit() {
    KINDS.into_iter().for_each(under_load);
}

fn under_load(kind: Kind) {
    let Some(device) = device() else { return };
    let Some(draft) = kernels(&device, 64) else { return };
    let (n, k) = (12_288, 4096);
    let mut random = Random(26);
    let (weights, _) = weights(&device, &mut random, kind, n, k, 0);
    let stream = Stream::new(&device, &mut random, k);
    for rows in 1..=MOST {
        let y = device.zeroed(rows * n * 4).unwrap();
        let run = || {
            // SAFETY: the stream has all rows and y room for `rows`.
            unsafe { draft.rows(&weights, stream.at(), y.at(0), rows) }.unwrap();
            y.read::<u32>(0, rows * n).unwrap()
        };
        let alone = run();
        let differ = while_busy(&device, || (0..200).filter(|_| run() != alone).count());
        assert_eq!(differ, 0, "{kind:?}: of 200 GEMMs of {rows} rows");
    }
}
