//! Matrices in nibbles: their bytes compared with core's quantiser, GEMMs with sums in f64 and row by row in bits, and the
//! dequantised matrix.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod gpu;

use gpu::{COUNTS, Limbs, Random, bits, device, distance, download, matrix, poisoned, round, while_busy};
use quantspec_core::ErrorKind;
use quantspec_core::config::Dtype;
use quantspec_core::weights::{GROUP, Row, quantize_row, quantize_row_upper};
use quantspec_cuda::device::Device;
use quantspec_cuda::hierarchy::{Hierarchies, Hierarchy, Reads};
use quantspec_cuda::linear::{Linear, Matrix};
use quantspec_cuda::products::Products;
use quantspec_model::importance::Channel;
use std::sync::Arc;

/// Weights with the statistics of trained ones: most are small, some rows have outliers, some groups are constant or all
/// zero. Others are codes of 4 or 8 bits times a step, as of quantised files.
fn weights(random: &mut Random, n: usize, k: usize, dtype: Dtype) -> Vec<f32> {
    let mut w = random.normals(n * k);
    for (row, w) in w.chunks_mut(k).enumerate() {
        let size = 0.02 * (1.0 + random.uniform());
        w.iter_mut().for_each(|v| *v *= size);
        match row % 7 {
            1 => w[random.below(k)] *= 40.0,
            2 => w.iter_mut().take(64).for_each(|v| *v = 0.25),
            3 => w.iter_mut().skip(64).take(64).for_each(|v| *v = 0.0),
            // Steps in the bits that codes leave of the format; zero points at 8, at 128 and outside the codes.
            4.. => {
                let step =
                    if dtype == Dtype::F32 { round(size, Dtype::F16) } else { 2f32.powi(random.below(6) as i32 - 9) };
                let (codes, zero) = [(16, 8), (256, 128), (150, 200)][row % 3];
                w.iter_mut().for_each(|v| *v = (random.below(codes) as f32 - zero as f32) * step);
            }
            _ => (),
        }
    }
    w.iter_mut().for_each(|v| *v = round(*v, dtype));
    w
}

fn on_device(device: &Arc<Device>, w: &[f32], n: usize, k: usize, dtype: Dtype) -> Matrix {
    Matrix { buffer: matrix(device, w, n, k, dtype), dtype, n, k }
}

/// Poisoned outputs of a GEMM with the first `rows` rows of x.
fn product(
    hierarchies: &Hierarchies,
    device: &Arc<Device>,
    planes: &Hierarchy,
    reads: Reads,
    x: &Limbs,
    rows: usize,
    next: (u64, usize),
) -> Vec<f32> {
    let (n, k) = planes.shape();
    let y = poisoned(device, rows * n * 4);
    let panels = Linear::new(device).unwrap().panels(rows);
    let [x, xs] = x.upload(device, rows, k, panels);
    // SAFETY: x and xs have `rows` rows and y room for as many.
    unsafe { hierarchies.run(planes, reads, [x.at(0), xs.at(0)], y.at(0), rows, next) }.unwrap();
    y.read::<f32>(0, rows * n).unwrap()
}

/// Source row of a row index in heads of `paired` channels: a tile of 16 holds channels c … c + 7 and paired / 2 + c ….
fn source_row(stored: usize, paired: usize) -> usize {
    if paired == 0 {
        return stored;
    }
    let (head, at) = (stored / paired, stored % paired);
    let channel = at / 16 * 8 + at % 8;
    head * paired + if at % 16 < 8 { channel } else { paired / 2 + channel }
}

fn quantised(w: &[f32], importance: &[f32], k: usize, both: bool) -> Vec<Row> {
    let quantise = if both { quantize_row } else { quantize_row_upper };
    w.chunks(k).map(|row| quantise(row, importance, GROUP).unwrap()).collect()
}

/// Core's rows in the layout of kernels/hierarchy.cuh.
fn packed(rows: &[Row], n: usize, k: usize, paired: usize) -> [Vec<u8>; 2] {
    let (tiles, blocks) = (n.div_ceil(16), 2 * k.div_ceil(128));
    let (mut upper, mut lower) = (Vec::new(), Vec::new());
    for tile in 0..tiles {
        for block in 0..blocks {
            let row = |r: usize| (tile * 16 + r < n).then(|| &rows[source_row(tile * 16 + r, paired)]);
            // U and L are 0 outside the matrix.
            let code =
                |r: usize, at: usize| row(r).and_then(|row| row.codes.get(block * 64 + at)).copied().unwrap_or(8);
            for lane in 0..32 {
                for at in 0..16 {
                    let (g, k) = (lane / 4, lane % 4 * 16 + at);
                    let (a, b) = (code(g, k), code(g + 8, k));
                    upper.push((a >> 4) | (b & 0xf0));
                    lower.push((a & 15) | (b << 4));
                }
            }
            for r in (0..8).flat_map(|g| [g, g + 8]) {
                let params = row(r).and_then(|row| row.params.get(block)).copied().unwrap_or_default();
                upper.extend(params.scale.to_le_bytes());
                upper.extend(params.zero.to_le_bytes());
            }
        }
    }
    [upper, lower]
}

/// Bytes must be equal, except for the sign of a zero parameter.
fn equal(got: &[u8], want: &[u8], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let differs = got.iter().zip(want).enumerate().filter(|(_, (a, b))| a != b);
    for (at, (a, b)) in differs {
        let even = at / 2 * 2;
        let zero = at % 576 >= 512 && got[even] == 0 && want[even] == 0 && (a | b) == 0x80;
        assert!(zero, "{what}: byte {at} is {a:#x}, core has {b:#x}");
    }
}

const SHAPES: [(usize, usize); 6] = [(256, 512), (40, 200), (17, 64), (129, 1376), (129, 1280), (48, 328)];

/// Bytes of the upper and of the lower plane on the device.
fn planes(of: &Hierarchy) -> [Vec<u8>; 2] {
    let all = of.planes().read::<u8>(0, of.held_bytes()).unwrap();
    let (upper, lower) = all.split_at(of.upper_bytes());
    [upper, lower].map(<[u8]>::to_vec)
}

#[test]
fn planes_have_cores_bytes() {
    let Some(device) = device() else { return };
    let flag = device.zeroed(4).unwrap();
    let mut random = Random(7);
    let shapes = SHAPES.map(|(n, k)| (n, k, 0)).into_iter().chain([(256, 512, 64), (256, 320, 128)]);
    for (n, k, paired) in shapes {
        for dtype in [Dtype::Bf16, Dtype::F16, Dtype::F32] {
            let hierarchies = Hierarchies::new(&device, Dtype::Bf16).unwrap();
            let w = weights(&mut random, n, k, dtype);
            let full = on_device(&device, &w, n, k, dtype);
            let weighed: Vec<f32> = (0..k).map(|_| 2f32.powf(8.0 * random.uniform() - 4.0)).collect();
            for (both, importance) in [(true, &[][..]), (false, &[]), (true, &weighed), (false, &weighed)] {
                let got = hierarchies.quantise(&full, importance, if both { 0 } else { n }, paired, &flag).unwrap();
                let want = packed(&quantised(&w, importance, k, both), n, k, paired);
                assert_eq!(got.lower() > 0, both);
                for ((plane, want), name) in planes(&got).iter().zip(&want).zip(["upper", "lower"]) {
                    let weighed = !importance.is_empty();
                    let what = format!("{dtype:?} {n} x {k}, paired {paired}, both {both}, weighed {weighed}, {name}");
                    equal(plane, if both || name == "upper" { want } else { &[] }, &what);
                }
                let [upper, lower] = Hierarchy::bytes(n, k);
                assert_eq!(got.held_bytes(), upper + if both { lower } else { 0 });
            }
        }
    }
    assert_eq!(flag.read::<u32>(0, 1).unwrap(), [0]);
}

#[test]
fn products_of_texts_have_the_host_s_bits() {
    let Some(device) = device() else { return };
    let products = Products::new(&device).unwrap();
    let mut random = Random(12);
    for (n, k) in SHAPES {
        for dtype in [Dtype::Bf16, Dtype::F16, Dtype::F32] {
            let w = weights(&mut random, n, k, dtype);
            let matrix = on_device(&device, &w, n, k, dtype);
            let x: Vec<Channel> = (0..k).map(|_| std::array::from_fn(|_| random.normal())).collect();
            for first in [0, 16] {
                let got = products.run(&matrix, first..n, &x).unwrap();
                for (w, got) in w.chunks(k).skip(first).zip(&got) {
                    let want: Channel =
                        std::array::from_fn(|row| w.iter().zip(&x).fold(0.0, |sum, (w, x)| sum + w * x[row]));
                    assert_eq!(got.map(f32::to_bits), want.map(f32::to_bits), "{dtype:?} {n} x {k}");
                }
                assert_eq!(got.len(), n - first);
            }
            for rows in [0..n + 1, 8..n] {
                assert_eq!(products.run(&matrix, rows, &x).unwrap_err().kind, ErrorKind::Internal);
            }
        }
    }
}

#[test]
fn nan_weights_are_flagged() {
    let Some(device) = device() else { return };
    let hierarchies = Hierarchies::new(&device, Dtype::Bf16).unwrap();
    let mut random = Random(8);
    for (bad, both) in [(f32::NAN, true), (f32::INFINITY, false), (1e30, true), (1e30, false)] {
        let flag = device.zeroed(4).unwrap();
        let mut w = weights(&mut random, 32, 128, Dtype::Bf16);
        w[17 * 128 + 100] = bad;
        hierarchies
            .quantise(&on_device(&device, &w, 32, 128, Dtype::Bf16), &[], if both { 0 } else { 32 }, 0, &flag)
            .unwrap();
        assert_eq!(flag.read::<u32>(0, 1).unwrap(), [4], "{bad}");
    }
    let error = Hierarchies::new(&device, Dtype::F32).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Model);
}

#[test]
fn the_matrix_of_both_planes() {
    let Some(device) = device() else { return };
    let flag = device.zeroed(4).unwrap();
    let mut random = Random(9);
    for dtype in [Dtype::Bf16, Dtype::F16] {
        let hierarchies = Hierarchies::new(&device, dtype).unwrap();
        for (n, k, paired) in [(40, 200, 0), (129, 1376, 0), (256, 512, 128)] {
            let w = weights(&mut random, n, k, dtype);
            let full = on_device(&device, &w, n, k, dtype);
            for both in [true, false] {
                let planes = hierarchies.quantise(&full, &[], if both { 0 } else { n }, paired, &flag).unwrap();
                let to = poisoned(&device, full.buffer.bytes());
                hierarchies.expand(&planes, &to, 0).unwrap();
                let got = to.read::<u16>(0, to.bytes() / 2).unwrap();
                let rows = quantised(&w, &[], k, both);
                let values: Vec<f32> = rows.iter().flat_map(Row::both).collect();
                let want = gpu::atoms(&bits(&values, dtype), n, k);
                let inside = gpu::atoms(&vec![1; n * k], n, k);
                for (at, (got, want)) in got.iter().zip(&want).enumerate().filter(|(at, _)| inside[*at] == 1) {
                    assert!(got == want || (got | want) == 0x8000, "{dtype:?} {n} x {k}: {at}: {got:#x} {want:#x}");
                }
                // Values outside the matrix are finite: they meet zero inputs.
                assert!(download(&to, to.bytes() / 2, dtype).iter().all(|v| v.is_finite()));
            }
        }
    }
}

/// Many tiles per block, and several passes over the inputs.
const LARGE: [(usize, usize); 3] = [(8192, 256), (4800, 4096), (16 * (12 * 132 + 1) - 5, 256)];

#[test]
fn gemms() {
    check_gemms(&SHAPES);
}

#[test]
fn gemms_of_many_tiles() {
    check_gemms(&LARGE);
}

fn check_gemms(shapes: &[(usize, usize)]) {
    let Some(device) = device() else { return };
    let flag = device.zeroed(4).unwrap();
    let mut random = Random(10);
    for dtype in [Dtype::Bf16, Dtype::F16] {
        let hierarchies = Hierarchies::new(&device, dtype).unwrap();
        for &(n, k) in shapes {
            let most = *COUNTS.last().unwrap();
            let w = weights(&mut random, n, k, dtype);
            let mut x = random.normals(most * k);
            // Outliers, and groups without inputs.
            x.iter_mut().step_by(991).for_each(|x| *x *= 300.0);
            x[..64].fill(0.0);
            let x = Limbs::new(&x, k);
            let full = on_device(&device, &w, n, k, dtype);
            for (both, reads) in [(true, Reads::All), (true, Reads::Upper), (false, Reads::All)] {
                let planes = hierarchies.quantise(&full, &[], if both { 0 } else { n }, 0, &flag).unwrap();
                // Prefetching changes no bit.
                let next = if reads == Reads::All { (full.buffer.at(0), full.buffer.bytes()) } else { (0, 0) };
                let run = |rows: usize| product(&hierarchies, &device, &planes, reads, &x, rows, next);
                let all = run(most);
                assert!(all.iter().all(|v| v.is_finite()), "an output was not written");
                for &rows in &COUNTS {
                    let differs = run(rows).iter().zip(&all).position(|(a, b)| a.to_bits() != b.to_bits());
                    assert_eq!(differs, None, "{rows} of {most} rows change bits: {dtype:?} {n} x {k}, {reads:?}");
                }
                let (mut got, mut want) = (Vec::new(), Vec::new());
                for (out, row) in quantised(&w, &[], k, both).iter().enumerate() {
                    let values = if reads == Reads::All { row.both() } else { row.upper() };
                    for row in [0, 6, 30, most - 1] {
                        got.push(all[row * n + out]);
                        let x = &x.values[row * k..(row + 1) * k];
                        want.push(values.iter().zip(x).map(|(&a, &b)| f64::from(a) * b).sum::<f64>());
                    }
                }
                let error = distance(&got, &want);
                assert!(error < 3e-6, "{dtype:?} {n} x {k}, {reads:?}: {error}");
            }
        }
    }
    assert_eq!(flag.read::<u32>(0, 1).unwrap(), [0]);
}

#[test]
fn planes_of_the_last_rows() {
    let small = [(96, 64, 200, 0, Dtype::Bf16), (384, 256, 512, 64, Dtype::Bf16), (768, 256, 1376, 128, Dtype::F16)];
    check_last_rows(&small);
}

#[test]
fn planes_of_the_last_rows_of_many_tiles() {
    check_last_rows(&[(6144, 4096, 4096, 128, Dtype::Bf16)]);
}

/// A matrix whose last rows alone have a lower plane is that of two matrices, in bytes, values and outputs. Shapes are outputs,
/// the first with both planes, inputs, width of paired rows, and type.
fn check_last_rows(shapes: &[(usize, usize, usize, usize, Dtype)]) {
    let Some(device) = device() else { return };
    let flag = device.zeroed(4).unwrap();
    let mut random = Random(12);
    for &(n, both_from, k, paired, dtype) in shapes {
        let hierarchies = Hierarchies::new(&device, dtype).unwrap();
        let w = weights(&mut random, n, k, dtype);
        let of_rows = |w: &[f32], both_from: usize| {
            let rows = w.len() / k;
            hierarchies.quantise(&on_device(&device, w, rows, k, dtype), &[], both_from, paired, &flag).unwrap()
        };
        let (whole, first, last) =
            (of_rows(&w, both_from), of_rows(&w[..both_from * k], both_from), of_rows(&w[both_from * k..], 0));
        let [upper, lower] = planes(&whole);
        let ([of_first, none], [of_last, lower_of_last]) = (planes(&first), planes(&last));
        assert!(none.is_empty() && upper == [of_first, of_last].concat(), "upper plane of {n} x {k}");
        assert!(lower == lower_of_last, "lower plane of {n} x {k}");
        let full = |planes: &Hierarchy| {
            let to = device.zeroed(Matrix::bytes(dtype, planes.shape().0, k)).unwrap();
            hierarchies.expand(planes, &to, 0).unwrap();
            to.read::<u8>(0, to.bytes()).unwrap()
        };
        assert!(full(&whole) == [full(&first), full(&last)].concat(), "values of {n} x {k}");
        let most = 17;
        let x = Limbs::new(&random.normals(most * k), k);
        for reads in [Reads::All, Reads::Upper] {
            for rows in [1, 8, most] {
                let outputs = |planes: &Hierarchy| -> Vec<u32> {
                    let y = product(&hierarchies, &device, planes, reads, &x, rows, (0, 0));
                    y.into_iter().map(f32::to_bits).collect()
                };
                let (got, first, last) = (outputs(&whole), outputs(&first), outputs(&last));
                let want = first.chunks(both_from).zip(last.chunks(n - both_from));
                let want: Vec<u32> = want.flat_map(|(first, last)| [first, last].concat()).collect();
                let differs = got.iter().zip(&want).position(|(a, b)| a != b);
                assert_eq!(differs, None, "{rows} rows, {n} x {k}, {reads:?}");
            }
        }
        let odd = hierarchies.quantise(&on_device(&device, &w, n, k, dtype), &[], both_from + 8, paired, &flag);
        assert_eq!(odd.unwrap_err().kind, ErrorKind::Internal);
    }
    assert_eq!(flag.read::<u32>(0, 1).unwrap(), [0]);
}

#[test]
fn other_work_changes_no_bit() {
    let Some(device) = device() else { return };
    let hierarchies = Hierarchies::new(&device, Dtype::Bf16).unwrap();
    let flag = device.zeroed(4).unwrap();
    let mut random = Random(11);
    // Several tiles per SM, and a last stage that only some warps share.
    for (n, k) in [(12_288, 4096), (4096, 5504)] {
        let some = weights(&mut random, 64, k, Dtype::Bf16);
        let w: Vec<f32> = some.iter().cycle().take(n * k).copied().collect();
        let full = on_device(&device, &w, n, k, Dtype::Bf16);
        let most = 64;
        let x = Limbs::new(&random.normals(most * k), k);
        let linear = Linear::new(&device).unwrap();
        let planes = hierarchies.quantise(&full, &[], 0, 0, &flag).unwrap();
        for reads in [Reads::All, Reads::Upper] {
            for rows in [1, 5, 8, 16, 17, most] {
                let y = device.zeroed(rows * n * 4).unwrap();
                let [x, xs] = x.upload(&device, rows, k, linear.panels(rows));
                let run = || {
                    // SAFETY: x and xs have `rows` rows and y room for as many.
                    unsafe { hierarchies.run(&planes, reads, [x.at(0), xs.at(0)], y.at(0), rows, (0, 0)) }.unwrap();
                    y.read::<u32>(0, rows * n).unwrap()
                };
                let alone = run();
                let differ = while_busy(&device, || (0..60).filter(|_| run() != alone).count());
                assert_eq!(differ, 0, "of 60 GEMMs of {rows} rows, {n} x {k}, {reads:?}");
            }
        }
    }
}
