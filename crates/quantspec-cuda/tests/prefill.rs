//! Prefill's GEMMs and attention compared with f64, and every row's bits across different blocks.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]
#![allow(clippy::print_stderr, reason = "the errors found belong into the test's log")]

mod gpu;

use gpu::{Random, device, distance, download, gelu, interleave, matrix, poisoned, round, upload};
use half::f16;
use quantspec_core::cache::first_visible;
use quantspec_core::config::{Activation, Dtype, LayerNorms, QkNorm};
use quantspec_cuda::device::{Buffer, Device};
use quantspec_cuda::prefill::{Prefill, Shape, padded, readable};
use quantspec_model::backend::Branch;
use std::sync::Arc;

const DTYPES: [Dtype; 3] = [Dtype::Bf16, Dtype::F16, Dtype::F32];

fn output_error(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::Bf16 => 3e-3,
        _ => 6e-4,
    }
}

/// Activations in the kernels' format: padded with zeros, and NaN in rows beyond that belong to a whole tile.
fn activations(device: &Arc<Device>, x: &[f32], rows: usize, width: usize, dtype: Dtype) -> Buffer {
    let pitch = padded(width);
    let mut padded = vec![0.0; rows * pitch];
    for row in 0..rows {
        padded[row * pitch..][..width].copy_from_slice(&x[row * width..][..width]);
    }
    padded.resize((rows + readable(1)) * pitch, f32::NAN);
    upload(device, &padded, dtype)
}

fn rounded(random: &mut Random, n: usize, scale: f32, dtype: Dtype) -> Vec<f32> {
    (0..n).map(|_| round(random.normal() * scale, dtype)).collect()
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum()
}

/// Rows to compare: tile edges and some between.
fn sample(rows: usize) -> Vec<usize> {
    let mut all: Vec<usize> = [0, 1, 63, 64, 127, 128, 255, 256, rows / 3, rows / 2, rows - 1]
        .into_iter()
        .filter(|&row| row < rows)
        .collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// Ways of cutting `rows` into blocks.
fn cuts(rows: usize) -> Vec<Vec<usize>> {
    let mut all = vec![vec![rows]];
    for block in [512, 200, 100, 1] {
        if block < rows && rows / block <= 30 {
            let mut parts = vec![block; rows / block];
            if !rows.is_multiple_of(block) {
                parts.push(rows % block);
            }
            all.push(parts);
        }
    }
    if rows > 70 {
        all.push(vec![1, 64, rows - 65]);
    }
    all
}

/// Runs `work(first, count)` for every division into blocks, and compares the bytes that `read` returns.
fn same_for_all_cuts(rows: usize, what: &str, mut work: impl FnMut(&[usize]) -> Vec<u8>) -> Vec<u8> {
    let mut first: Option<Vec<u8>> = None;
    for parts in cuts(rows) {
        let got = work(&parts);
        match &first {
            None => first = Some(got),
            Some(whole) => assert!(got == *whole, "{what}: rows in blocks of {parts:?} have other bits"),
        }
    }
    first.unwrap()
}

fn blocks(parts: &[usize]) -> impl Iterator<Item = (usize, usize)> + '_ {
    parts.iter().scan(0, |start, &count| {
        *start += count;
        Some((*start - count, count))
    })
}

fn floats(bytes: &[u8], dtype: Dtype) -> Vec<f32> {
    match dtype {
        Dtype::Bf16 => bytes.chunks_exact(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        Dtype::F16 => bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        Dtype::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
    }
}

fn shape(hidden: usize, intermediate: usize, heads: usize, kv_heads: usize, head_dim: usize, dtype: Dtype) -> Shape {
    Shape {
        hidden,
        intermediate,
        heads,
        kv_heads,
        head_dim,
        rms_eps: 1e-6,
        qk_norm: QkNorm::Heads,
        norms: LayerNorms::Before,
        activation: Activation::Silu,
        dtype,
    }
}

/// Narrow widths, and widths that are not multiples of a tile or an atom.
fn odd() -> Vec<(Shape, usize)> {
    let of = |dtype| {
        [
            (shape(328, 200, 6, 2, 128, dtype), 300),
            (shape(72, 136, 6, 3, 64, dtype), 300),
            (shape(512, 64, 4, 4, 128, dtype), 5),
            (shape(136, 72, 3, 1, 256, dtype), 300),
        ]
    };
    DTYPES.into_iter().flat_map(of).collect()
}

/// Widths and rows that together use every tile shape.
fn large() -> Vec<(Shape, usize)> {
    vec![
        (shape(200, 64, 32, 32, 128, Dtype::Bf16), 2100),
        (shape(4096, 72, 2, 1, 64, Dtype::Bf16), 2100),
        (shape(136, 11008, 1, 1, 64, Dtype::Bf16), 2100),
        (shape(4096, 64, 2, 1, 128, Dtype::Bf16), 600),
    ]
}

#[test]
fn queries_keys_and_values() {
    check_qkv(odd());
}

/// Models with a norm over all query heads and one over all key heads, and norms after the branches.
fn with_norms_of_rows() -> Vec<(Shape, usize)> {
    let tiles = large().into_iter().filter(|(s, _)| s.heads <= 2);
    let of = |(s, rows)| (Shape { qk_norm: QkNorm::Projection, norms: LayerNorms::After, ..s }, rows);
    odd().into_iter().chain(tiles).map(of).collect()
}

#[test]
fn queries_and_keys_normalised_over_all_heads() {
    check_qkv(with_norms_of_rows());
}

#[test]
fn queries_keys_and_values_in_every_tile() {
    check_qkv(large());
}

fn check_qkv(cases: Vec<(Shape, usize)>) {
    let Some(device) = device() else { return };
    for (case, (s, rows)) in cases.into_iter().enumerate() {
        let dtype = s.dtype;
        let mut random = Random(case as u64 + 1);
        let (d, all) = (s.head_dim, s.heads + 2 * s.kv_heads);
        let x = rounded(&mut random, rows * s.hidden, 1.0, dtype);
        let w = rounded(&mut random, all * d * s.hidden, 0.1, dtype);
        // Heads that a norm is over; a model with norms over all has no biases.
        let (of_q, of_k, biased) = match s.qk_norm {
            QkNorm::Projection => (s.heads, s.kv_heads, false),
            QkNorm::None | QkNorm::Heads => (1, 1, true),
        };
        let (bias, q_norm, k_norm) = (random.normals(all * d), random.normals(of_q * d), random.normals(of_k * d));
        let angles: Vec<f32> =
            (0..rows * d / 2).flat_map(|_| <[f32; 2]>::from((random.uniform() * 6.3).sin_cos())).collect();
        let x_on = activations(&device, &x, rows, s.hidden, dtype);
        let w_on = matrix(&device, &w, all * d, s.hidden, dtype);
        let [bias_on, q_on, k_on, angles_on] =
            [&bias, &q_norm, &k_norm, &angles].map(|values| device.copied(values).unwrap());
        let flag = device.zeroed(4).unwrap();
        let prefill = Prefill::new(&device, s, rows).unwrap();
        for (with_bias, with_norm) in [(false, false), (biased, true)] {
            let (q_bytes, kv_bytes) = (s.heads * d * 2, 2 * s.kv_heads * d * 2);
            let bytes = same_for_all_cuts(rows, "qkv", |parts| {
                let (q, kv) = (poisoned(&device, rows * q_bytes + 64), poisoned(&device, rows * kv_bytes + 64));
                for (start, count) in blocks(parts) {
                    // SAFETY: the buffers have the documented shapes.
                    unsafe {
                        prefill.qkv(
                            x_on.at(start * padded(s.hidden) * dtype.bytes()),
                            w_on.at(0),
                            with_bias.then(|| bias_on.at(0)),
                            with_norm.then(|| (q_on.at(0), k_on.at(0))),
                            angles_on.at(start * d / 2 * 8),
                            q.at(start * q_bytes),
                            kv.at(start * kv_bytes),
                            flag.at(0),
                            count,
                        )
                    }
                    .unwrap();
                }
                let (q, kv) =
                    (q.read::<u8>(0, rows * q_bytes + 64).unwrap(), kv.read::<u8>(0, rows * kv_bytes + 64).unwrap());
                assert!(
                    q[rows * q_bytes..].iter().chain(&kv[rows * kv_bytes..]).all(|&b| b == 0xff),
                    "wrote beyond its rows"
                );
                [&q[..rows * q_bytes], &kv[..rows * kv_bytes]].concat()
            });
            let got = floats(&bytes, Dtype::F16);
            let (q, kv) = got.split_at(rows * s.heads * d);
            let (mut seen, mut want) = (Vec::new(), Vec::new());
            for row in sample(rows) {
                let mut projected: Vec<f64> = (0..all * d)
                    .map(|n| {
                        dot(&x[row * s.hidden..][..s.hidden], &w[n * s.hidden..][..s.hidden])
                            + if with_bias { f64::from(bias[n]) } else { 0.0 }
                    })
                    .collect();
                if with_norm {
                    let (q, others) = projected.split_at_mut(s.heads * d);
                    let normed = [(q, &q_norm), (&mut others[..s.kv_heads * d], &k_norm)];
                    for (part, norm) in normed.into_iter().flat_map(|(all, norm)| {
                        all.chunks_exact_mut(norm.len()).map(move |part| (part, norm)).collect::<Vec<_>>()
                    }) {
                        let mean = part.iter().map(|x| x * x).sum::<f64>() / part.len() as f64;
                        let f = 1.0 / (mean + f64::from(s.rms_eps)).sqrt();
                        part.iter_mut().zip(norm).for_each(|(x, &w)| *x *= f * f64::from(w));
                    }
                }
                for head in 0..all {
                    let mut v = projected[head * d..(head + 1) * d].to_vec();
                    if head < s.heads + s.kv_heads {
                        for i in 0..d / 2 {
                            // sin_cos gives (sin, cos), used here as (cos, sin), which is a rotation as well.
                            let at = (row * d / 2 + i) * 2;
                            let (cos, sin) = (f64::from(angles[at]), f64::from(angles[at + 1]));
                            let (a, b) = (v[i], v[d / 2 + i]);
                            (v[i], v[d / 2 + i]) = (a * cos - b * sin, b * cos + a * sin);
                        }
                    }
                    want.extend(v);
                    let from = if head < s.heads {
                        (row * s.heads + head) * d
                    } else {
                        (row * 2 * s.kv_heads + head - s.heads) * d
                    };
                    seen.extend(if head < s.heads { &q[from..from + d] } else { &kv[from..from + d] });
                }
            }
            let error = distance(&seen, &want);
            eprintln!("qkv {s:?} rows {rows} bias {with_bias} norm {with_norm}: {error:.2e}");
            assert!(error < 6e-4, "{error}");
        }
    }
}

#[test]
fn projections_onto_the_hidden_stream() {
    check_residual(odd());
}

#[test]
fn normalised_projections_onto_the_hidden_stream() {
    check_residual(with_norms_of_rows());
}

/// Gemma 3's projections of Q, K and V need no scratch for rows, its branches do.
#[test]
fn normalised_projections_of_a_model_with_norms_before_them() {
    check_residual(odd().into_iter().map(|(s, rows)| (Shape { norms: LayerNorms::Both, ..s }, rows)).collect());
}

#[test]
fn projections_onto_the_hidden_stream_in_every_tile() {
    check_residual(large());
}

fn check_residual(cases: Vec<(Shape, usize)>) {
    let Some(device) = device() else { return };
    for (case, (s, rows)) in cases.into_iter().enumerate() {
        let dtype = s.dtype;
        let mut random = Random(case as u64 + 50);
        let prefill = Prefill::new(&device, s, rows).unwrap();
        for (branch, k) in [(Branch::Attention, s.heads * s.head_dim), (Branch::Mlp, s.intermediate)] {
            let x = rounded(&mut random, rows * k, 1.0, dtype);
            let w = rounded(&mut random, s.hidden * k, 0.1, dtype);
            // The norm's weight, or the bias.
            let (hidden, bias) = (random.normals(rows * s.hidden), random.normals(s.hidden));
            let normed = s.norms != LayerNorms::Before;
            let (x_on, w_on) = (activations(&device, &x, rows, k, dtype), matrix(&device, &w, s.hidden, k, dtype));
            let bias_on = device.copied(&bias).unwrap();
            for with_bias in [false, true].into_iter().filter(|with| *with || !normed) {
                let bytes = same_for_all_cuts(rows, "residual", |parts| {
                    let h = device.copied(&[&hidden[..], &[7.5; 16]].concat()).unwrap();
                    for (start, count) in blocks(parts) {
                        let (x, h) = (x_on.at(start * padded(k) * dtype.bytes()), h.at(start * s.hidden * 4));
                        let vector = with_bias.then(|| bias_on.at(0));
                        let bias_and_norm = if normed { [None, vector] } else { [vector, None] };
                        // SAFETY: the buffers have the documented shapes.
                        unsafe { prefill.add(branch, x, w_on.at(0), bias_and_norm, h, count) }.unwrap();
                    }
                    assert!(h.read::<f32>(rows * s.hidden * 4, 16).unwrap().iter().all(|&x| x == 7.5));
                    h.read::<u8>(0, rows * s.hidden * 4).unwrap()
                });
                let got = floats(&bytes, Dtype::F32);
                let (mut seen, mut want) = (Vec::new(), Vec::new());
                for row in sample(rows) {
                    let mut y: Vec<f64> = (0..s.hidden).map(|n| dot(&x[row * k..][..k], &w[n * k..][..k])).collect();
                    if normed {
                        let mean = y.iter().map(|y| y * y).sum::<f64>() / s.hidden as f64;
                        let f = 1.0 / (mean + f64::from(s.rms_eps)).sqrt();
                        y.iter_mut().zip(&bias).for_each(|(y, &w)| *y *= f * f64::from(w));
                    } else if with_bias {
                        y.iter_mut().zip(&bias).for_each(|(y, &b)| *y += f64::from(b));
                    }
                    for (n, y) in y.into_iter().enumerate() {
                        want.push(f64::from(hidden[row * s.hidden + n]) + y);
                        seen.push(got[row * s.hidden + n]);
                    }
                }
                let error = distance(&seen, &want);
                eprintln!("residual {s:?} rows {rows} k {k}: {error:.2e}");
                // Tensor cores truncate their sums, so the error grows with k.
                assert!(error < 1e-6 + 1.5e-9 * k as f64, "{error}");
            }
        }
    }
}

#[test]
fn gate_and_up() {
    check_gated(odd());
}

#[test]
fn gate_and_up_in_every_tile() {
    check_gated(large());
}

#[test]
fn gate_and_up_with_gelu() {
    let gelu = |(s, rows)| (Shape { activation: Activation::Gelu, ..s }, rows);
    check_gated(odd().into_iter().chain(large()).map(gelu).collect());
}

fn check_gated(cases: Vec<(Shape, usize)>) {
    let Some(device) = device() else { return };
    for (case, (s, rows)) in cases.into_iter().enumerate() {
        let dtype = s.dtype;
        let mut random = Random(case as u64 + 100);
        let (k, width) = (s.hidden, s.intermediate);
        let scale = 1.0 / (k as f32).sqrt();
        let x = rounded(&mut random, rows * k, 1.0, dtype);
        let gate = rounded(&mut random, width * k, scale, dtype);
        let up = rounded(&mut random, width * k, scale, dtype);
        let (gate_bias, up_bias) = (random.normals(width), random.normals(width));
        let x_on = activations(&device, &x, rows, k, dtype);
        let w_on = matrix(&device, &interleave(&gate, &up, width, k), 2 * width, k, dtype);
        let bias_on = device.copied(&interleave(&gate_bias, &up_bias, width, 1)).unwrap();
        let prefill = Prefill::new(&device, s, rows).unwrap();
        let pitch = padded(width);
        for with_bias in [false, true] {
            let bytes = same_for_all_cuts(rows, "gated", |parts| {
                let out = poisoned(&device, rows * pitch * dtype.bytes());
                for (start, count) in blocks(parts) {
                    let (x, out) = (x_on.at(start * padded(k) * dtype.bytes()), out.at(start * pitch * dtype.bytes()));
                    // SAFETY: the buffers have the documented shapes.
                    unsafe { prefill.gate_up(x, w_on.at(0), with_bias.then(|| bias_on.at(0)), out, count) }.unwrap();
                }
                out.read::<u8>(0, rows * pitch * dtype.bytes()).unwrap()
            });
            let got = floats(&bytes, dtype);
            let (mut seen, mut want) = (Vec::new(), Vec::new());
            for row in 0..rows {
                assert!(
                    got[row * pitch + width..(row + 1) * pitch].iter().all(|v| v.is_nan()),
                    "wrote into the padding"
                );
            }
            for row in sample(rows) {
                for n in 0..width {
                    let value = |w: &[f32], b: &[f32]| {
                        dot(&x[row * k..][..k], &w[n * k..][..k]) + if with_bias { f64::from(b[n]) } else { 0.0 }
                    };
                    let g = value(&gate, &gate_bias);
                    let activated = match s.activation {
                        Activation::Silu => g / (1.0 + (-g).exp()),
                        Activation::Gelu => gelu(g),
                    };
                    want.push(activated * value(&up, &up_bias));
                    seen.push(got[row * pitch + n]);
                }
            }
            let error = distance(&seen, &want);
            eprintln!("gated {s:?} rows {rows}: {error:.2e}");
            assert!(error < output_error(dtype), "{error}");
        }
    }
}

#[test]
fn causal_attention() {
    let of = |case: &Causal| (*case, None);
    check_attention(&CAUSAL.iter().map(of).collect::<Vec<_>>());
}

/// Local layers: no, one and several tiles of keys are skipped; the reach begins and ends within a tile and at its border.
#[test]
fn attention_to_the_last_tokens() {
    let with = |case: &Causal| [256, 320, 512].map(|reach| (*case, Some(reach)));
    check_attention(&CAUSAL.iter().flat_map(with).collect::<Vec<_>>());
}

/// Query heads, KV heads, head width and rows.
type Causal = (usize, usize, usize, usize);

/// On Hopper, a block that 64 rows per SM cover in one wave has kernels of its own: here cuts of every prompt, and all of those
/// with few heads.
const CAUSAL: [Causal; 9] = [
    (4, 2, 128, 300),
    (4, 1, 64, 300),
    (2, 2, 128, 1),
    (3, 1, 128, 129),
    (8, 2, 128, 1500),
    (5, 5, 64, 700),
    (4, 2, 256, 333),
    (40, 5, 64, 300),
    (40, 5, 128, 300),
];

fn check_attention(cases: &[(Causal, Option<usize>)]) {
    let Some(device) = device() else { return };
    for dtype in DTYPES {
        for &((heads, kv_heads, d, rows), reach) in cases {
            let s = shape(64, 64, heads, kv_heads, d, dtype);
            let mut random = Random((heads * 1000 + rows) as u64);
            let mut q = rounded(&mut random, rows * heads * d, 1.0, Dtype::F16);
            let mut kv = rounded(&mut random, rows * 2 * kv_heads * d, 1.0, Dtype::F16);
            // A head with sharp attention, a first token with most of the mass, and a biased channel of values.
            for row in 0..rows {
                q[row * heads * d..][..d].iter_mut().for_each(|x| *x *= 4.0);
                kv[(row * 2 * kv_heads + kv_heads) * d + 5] += 10.0;
            }
            kv[..d].copy_from_slice(&q[(rows - 1) * heads * d..][..d]);
            let kv: Vec<f32> = kv.iter().map(|&x| round(x, Dtype::F16)).collect();
            let q: Vec<f32> = q.iter().map(|&x| round(x, Dtype::F16)).collect();
            let (q_on, kv_on) = (upload(&device, &q, Dtype::F16), upload(&device, &kv, Dtype::F16));
            let prefill = Prefill::new(&device, s, rows).unwrap();
            let (width, pitch) = (heads * d, padded(heads * d));
            let bytes = same_for_all_cuts(rows, "attention", |parts| {
                let out = poisoned(&device, rows * pitch * dtype.bytes());
                for (start, count) in blocks(parts) {
                    let out = out.at(start * pitch * dtype.bytes());
                    // SAFETY: the buffers have the documented shapes.
                    unsafe { prefill.attend(q_on.at(start * width * 2), kv_on.at(0), out, start, count, reach) }
                        .unwrap();
                }
                out.read::<u8>(0, rows * pitch * dtype.bytes()).unwrap()
            });
            let got = floats(&bytes, dtype);
            let (mut seen, mut want) = (Vec::new(), Vec::new());
            for row in 0..rows {
                assert!(got[row * pitch..][..width].iter().all(|x| x.is_finite()));
                assert!(got[row * pitch + width..(row + 1) * pitch].iter().all(|v| v.is_nan()));
            }
            for row in sample(rows) {
                for head in 0..heads {
                    let kv_head = head / (heads / kv_heads);
                    let at = |token: usize, part: usize| (token * 2 * kv_heads + part * kv_heads + kv_head) * d;
                    let query = &q[(row * heads + head) * d..][..d];
                    let first = reach.map_or(0, |reach| first_visible(row, reach));
                    let scores: Vec<f64> =
                        (first..=row).map(|token| dot(query, &kv[at(token, 0)..][..d]) / (d as f64).sqrt()).collect();
                    let most = scores.iter().copied().fold(f64::MIN, f64::max);
                    let weights: Vec<f64> = scores.iter().map(|s| (s - most).exp()).collect();
                    let total: f64 = weights.iter().sum();
                    for channel in 0..d {
                        let sum: f64 = weights
                            .iter()
                            .enumerate()
                            .map(|(token, w)| w * f64::from(kv[at(first + token, 1) + channel]))
                            .sum();
                        want.push(sum / total);
                    }
                    seen.extend(&got[row * pitch + head * d..][..d]);
                }
            }
            let error = distance(&seen, &want);
            eprintln!(
                "attention {heads}/{kv_heads} heads of {d}, {rows} rows, {dtype:?}, reach {reach:?}: {error:.2e}"
            );
            assert!(error < output_error(dtype), "{error}");
        }
    }
}

#[test]
fn other_shapes_are_refused() {
    let Some(device) = device() else { return };
    let good = shape(64, 64, 2, 1, 64, Dtype::Bf16);
    assert!(Prefill::new(&device, good, 8).is_ok());
    for bad in [Shape { head_dim: 96, ..good }, Shape { hidden: 100, ..good }, Shape { intermediate: 4, ..good }] {
        assert!(Prefill::new(&device, bad, 8).is_err(), "{bad:?}");
    }
}

#[test]
fn downloads_round_trip() {
    let Some(device) = device() else { return };
    let values = Random(9).normals(100);
    for dtype in DTYPES {
        let buffer = upload(&device, &values, dtype);
        assert!(download(&buffer, 100, dtype).iter().zip(&values).all(|(&got, &v)| got == round(v, dtype)));
    }
}
