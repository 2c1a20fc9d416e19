//! GEMMs of few rows compared with sums in f64, and their row invariance bit by bit.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod gpu;

use gpu::{COUNTS, Random, arranged, device, distance, matrix, poisoned, round, upload, while_busy};
use quantspec_core::config::Dtype;
use quantspec_core::quantize::{quantize_activations, quantize_head_row, quantize_weights_row};
use quantspec_cuda::args;
use quantspec_cuda::device::{Buffer, Device, Launch};
use quantspec_cuda::linear::{Linear, Matrix};
use std::sync::Arc;

/// Rows in the order of their pitch.
fn pitched(x: &[f32], rows: usize, k: usize, pitch: usize) -> Vec<f32> {
    let mut out = vec![0.0; rows * pitch];
    for row in 0..rows {
        out[row * pitch..row * pitch + k].copy_from_slice(&x[row * k..(row + 1) * k]);
    }
    out
}

/// The first `rows` of x `[rows][k padded to 64]` on the device, arranged for a GEMM with `weights`.
fn inputs_of(device: &Arc<Device>, linear: &Linear, weights: &Matrix, x: &[f32], rows: usize) -> Buffer {
    let (pitch, panels) = (weights.k.next_multiple_of(64), linear.panels_of(weights, rows));
    let on_device = upload(device, &x[..rows * pitch], weights.dtype);
    if panels == 0 {
        return on_device;
    }
    let bytes = on_device.read::<i8>(0, rows * pitch * 2).unwrap();
    let groups = pitch / 64;
    device.copied(&arranged(&bytes, &vec![0.0; rows * groups * 2], rows, groups, panels).0).unwrap()
}

fn read(y: &Buffer, count: usize) -> Vec<f32> {
    y.read::<f32>(0, count).unwrap()
}

/// Runs `work` for 1 row and for each of `counts`; compares every row's bits with the largest run.
fn invariant(device: &Arc<Device>, n: usize, counts: &[usize], work: impl Fn(u64, usize)) -> Vec<f32> {
    let most = counts.iter().copied().max().unwrap();
    let y = poisoned(device, most * n * 4);
    work(y.at(0), most);
    let all = read(&y, most * n);
    assert!(all.iter().all(|v| v.is_finite()), "an output was not written");
    for &rows in counts {
        y.fill(0xff).unwrap();
        work(y.at(0), rows);
        let some = read(&y, rows * n);
        let differs = some.iter().zip(&all).position(|(a, b)| a.to_bits() != b.to_bits());
        assert_eq!(differs, None, "{rows} of {most} rows change bits");
    }
    all
}

/// Outputs and inputs: whole tiles, remainders of both, and fewer inputs than warps share.
const SHAPES: [(usize, usize); 5] = [(256, 512), (40, 200), (17, 64), (129, 1376), (129, 1280)];
/// Many tiles per block, in separate tests, since they dominate the time under compute-sanitizer. With 132 SMs, the last
/// shape has 13 tiles in the first block and 12 in the second: one more pass over the inputs, at three or four tiles per
/// pass.
const LARGE: [(usize, usize); 3] = [(8192, 256), (4800, 4096), (16 * (12 * 132 + 1) - 5, 256)];

#[test]
fn full_weights() {
    check_full(&SHAPES);
}

#[test]
fn full_weights_of_many_tiles() {
    check_full(&LARGE);
}

fn check_full(shapes: &[(usize, usize)]) {
    let Some(device) = device() else { return };
    let linear = Linear::new(&device).unwrap();
    let mut random = Random(3);
    for dtype in [Dtype::Bf16, Dtype::F16, Dtype::F32] {
        for &(n, k) in shapes {
            if dtype == Dtype::F32 && n > 300 {
                continue;
            }
            let most = *COUNTS.last().unwrap();
            let w: Vec<f32> = random.normals(n * k).iter().map(|&v| round(v, dtype)).collect();
            let x: Vec<f32> = random.normals(most * k).iter().map(|&v| round(v, dtype)).collect();
            let pitch = k.next_multiple_of(64);
            let x_pitched = pitched(&x, most, k, pitch);
            let weights = Matrix { buffer: matrix(&device, &w, n, k, dtype), dtype, n, k };
            let inputs = COUNTS.map(|rows| (rows, inputs_of(&device, &linear, &weights, &x_pitched, rows)));
            let y = invariant(&device, n, &COUNTS, |y, rows| {
                let (_, x) = inputs.iter().find(|(count, _)| *count == rows).unwrap();
                // SAFETY: x has that many rows, arranged as the GEMM takes them, and y room for as many.
                unsafe { linear.run(&weights, x.at(0), y, rows) }.unwrap();
            });
            let rows = [0, 6, 30, most - 1];
            let (mut got, mut want) = (Vec::new(), Vec::new());
            for row in rows {
                for out in 0..n {
                    got.push(y[row * n + out]);
                    let pairs = w[out * k..(out + 1) * k].iter().zip(&x[row * k..(row + 1) * k]);
                    want.push(pairs.map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>());
                }
            }
            let error = distance(&got, &want);
            assert!(error < 3e-6, "{dtype:?} {n} x {k}: {error}");
        }
    }
}

#[test]
fn draft_weights() {
    check_draft(&SHAPES);
}

#[test]
fn draft_weights_of_many_tiles() {
    check_draft(&LARGE);
}

fn check_draft(shapes: &[(usize, usize)]) {
    let Some(device) = device() else { return };
    let linear = Linear::new(&device).unwrap();
    let flag = device.zeroed(4).unwrap();
    let mut random = Random(4);
    for bits in [4, 8] {
        for &(n, k) in shapes {
            let most = *COUNTS.last().unwrap();
            let w: Vec<f32> = random.normals(n * k).iter().map(|&v| round(v, Dtype::Bf16)).collect();
            let x: Vec<f32> = random.normals(most * k);
            let weights = Matrix { buffer: matrix(&device, &w, n, k, Dtype::Bf16), dtype: Dtype::Bf16, n, k };
            let draft = linear.quantise(&weights, bits, &[], 0, &flag).unwrap();
            let (groups, pitch) = (k.div_ceil(128), k.next_multiple_of(128));
            let (mut codes, mut scales) = (vec![0i8; most * pitch], vec![0.0f32; most * groups * 2]);
            let mut rounded = vec![0.0f64; most * k];
            for row in 0..most {
                let values = &x[row * k..(row + 1) * k];
                let quantised = quantize_activations(values).unwrap();
                for (i, &code) in quantised.codes.iter().enumerate() {
                    codes[row * pitch + i] = code;
                    rounded[row * k + i] = f64::from(code) * f64::from(quantised.scales[i / 128]);
                }
                for (group, codes) in quantised.codes.chunks(128).enumerate() {
                    let sum: i32 = codes.iter().map(|&code| i32::from(code)).sum();
                    scales[(row * groups + group) * 2] = quantised.scales[group];
                    scales[(row * groups + group) * 2 + 1] = quantised.scales[group] * sum as f32;
                }
            }
            let inputs = COUNTS.map(|rows| {
                let (codes, scales) = arranged(&codes, &scales, rows, groups, linear.panels(rows));
                (rows, device.copied(&codes).unwrap(), device.copied(&scales).unwrap())
            });
            let y = invariant(&device, n, &COUNTS, |y, rows| {
                let (_, x8, xs) = inputs.iter().find(|(count, ..)| *count == rows).unwrap();
                // SAFETY: x8 and xs have that many rows, arranged as the GEMM takes them, and y room for as many.
                unsafe { linear.run_quantised(&draft, x8.at(0), xs.at(0), y, rows) }.unwrap();
            });
            let (mut got, mut want) = (Vec::new(), Vec::new());
            for out in 0..n {
                let row = &w[out * k..(out + 1) * k];
                let quantised =
                    if bits == 4 { quantize_weights_row(row, &[]) } else { quantize_head_row(row) }.unwrap();
                let values = quantised.dequantize();
                for row in [0, 6, 30, most - 1] {
                    got.push(y[row * n + out]);
                    want.push((0..k).map(|i| f64::from(values[i]) * rounded[row * k + i]).sum::<f64>());
                }
            }
            let error = distance(&got, &want);
            assert!(error < 3e-6, "{bits} bits, {n} x {k}: {error}");
        }
    }
    assert_eq!(flag.read::<u32>(0, 1).unwrap(), [0]);
}

/// Kernels with static arrays have less than 48 KiB of dynamic shared memory by default, which GPUs with little shared memory
/// use for the draft's head.
#[test]
fn kernels_get_the_shared_memory_they_request() {
    let Some(device) = device() else { return };
    let linear = Linear::new(&device).unwrap();
    let mut random = Random(6);
    let (n, k, asked, shared) = (256usize, 512usize, 48_128, 33_792);
    let flag = device.zeroed(4).unwrap();
    let w: Vec<f32> = random.normals(n * k).iter().map(|&v| round(v, Dtype::Bf16)).collect();
    let full = Matrix { buffer: matrix(&device, &w, n, k, Dtype::Bf16), dtype: Dtype::Bf16, n, k };
    let draft = linear.quantise(&full, 8, &[], 0, &flag).unwrap();
    let (x, xs) =
        (device.copied(&vec![3i8; k]).unwrap(), device.copied(&[0.5f32, 0.5 * 384.0].repeat(k / 128)).unwrap());
    let (y, expected) = (poisoned(&device, n * 4), poisoned(&device, n * 4));
    let kernel = device.kernel("linear_w8_4_2", asked).unwrap();
    let arguments = args![draft.address(), &x, &xs, &y, k / 128, n / 16, n, 1usize];
    let launch = Launch { grid: [16, 1, 1], block: 256, shared, overlap: false };
    // SAFETY: the buffers have the shapes of the GEMM.
    unsafe {
        device.launch(kernel, launch, &arguments).unwrap();
        linear.run_quantised(&draft, x.at(0), xs.at(0), expected.at(0), 1).unwrap();
    }
    assert_eq!(read(&y, n), read(&expected, n));
}

#[test]
fn other_work_changes_no_bit() {
    let Some(device) = device() else { return };
    let linear = Linear::new(&device).unwrap();
    let mut random = Random(5);
    // Several tiles per SM, and a last stage that only some warps share, for full weights and draft weights.
    for (n, k) in [(12_288, 4096), (4096, 5504), (4096, 5632)] {
        let some: Vec<f32> = random.normals(1 << 18).iter().map(|&v| round(v, Dtype::Bf16)).collect();
        let w: Vec<f32> = some.iter().cycle().take(n * k).copied().collect();
        let weights = Matrix { buffer: matrix(&device, &w, n, k, Dtype::Bf16), dtype: Dtype::Bf16, n, k };
        let most = 64;
        let x = upload(&device, &random.normals(most * k), Dtype::Bf16);
        let flag = device.zeroed(4).unwrap();
        let draft = linear.quantise(&weights, 4, &[], 0, &flag).unwrap();
        let codes: Vec<i8> = (0..most * k.next_multiple_of(128)).map(|_| random.next() as i8).collect();
        let scales: Vec<f32> = random.normals(most * k.div_ceil(128) * 2);
        let (x8, xs) = (device.copied(&codes).unwrap(), device.copied(&scales).unwrap());
        for quantised in [false, true] {
            for rows in [1, 5, 8, 16, 17, 40, most] {
                let y = device.zeroed(rows * n * 4).unwrap();
                let run = || {
                    // SAFETY: x, x8 and xs have `most` rows and y room for `rows`.
                    unsafe {
                        if quantised {
                            linear.run_quantised(&draft, x8.at(0), xs.at(0), y.at(0), rows).unwrap();
                        } else {
                            linear.run(&weights, x.at(0), y.at(0), rows).unwrap();
                        }
                    }
                    y.read::<u32>(0, rows * n).unwrap()
                };
                let alone = run();
                let differ = while_busy(&device, || (0..100).filter(|_| run() != alone).count());
                assert_eq!(differ, 0, "of 100 GEMMs of {rows} rows, {n} x {k}, draft weights: {quantised}");
            }
        }
    }
}
