//! Norms, RoPE, SiLU and conversions compared with f64, and every row's bits with the same row alone.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod gpu;

use gpu::{Limbs, Random, arranged, device, distance, download, gelu, limb_groups, matrix, name, poisoned, round, run};
use half::f16;
use quantspec_core::cache::BUFFER_TOKENS;
use quantspec_core::config::{Dtype, QueryScale};
use quantspec_core::quantize::quantize_activations;
use quantspec_cuda::args;
use quantspec_cuda::device::{Arg, Buffer, Device};
use std::sync::Arc;

const DTYPES: [Dtype; 3] = [Dtype::Bf16, Dtype::F16, Dtype::F32];

/// Relative rounding error of a type, as a distance over many values.
fn rounding(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::Bf16 => 3e-3,
        Dtype::F16 => 4e-4,
        Dtype::F32 => 2e-6,
    }
}

fn rows_of(device: &Arc<Device>, rows: &[[i32; 4]]) -> Buffer {
    device.copied(&rows.concat()).unwrap()
}

#[test]
fn norms_add_the_branch_and_normalise() {
    let Some(device) = device() else { return };
    let mut random = Random(1);
    let eps = 1e-5f32;
    // Less than one group, several groups per warp, more than a thread keeps.
    for width in [72, 4096, 9216] {
        let rows = 9;
        let (hidden, y) = (random.normals(rows * width), random.normals(rows * width));
        let (bias, weight) = (random.normals(width), random.normals(width));
        let (bias_on, weight_on) = (device.copied(&bias).unwrap(), device.copied(&weight).unwrap());
        for with in [true, false] {
            let mut sums: Vec<f64> = Vec::new();
            let mut want: Vec<f64> = Vec::new();
            for row in 0..rows {
                let h: Vec<f64> = (0..width)
                    .map(|k| {
                        let h = hidden[row * width + k];
                        f64::from(if with { (h + y[row * width + k]) + bias[k] } else { h })
                    })
                    .collect();
                let f = 1.0 / (h.iter().map(|x| x * x).sum::<f64>() / width as f64 + f64::from(eps)).sqrt();
                want.extend(h.iter().zip(&weight).map(|(x, &w)| x * f * f64::from(w)));
                sums.extend(h);
            }
            let pitch = width.next_multiple_of(64) + 64;
            let launch = |kernel: &str, first: usize, count: usize, outputs: &[Arg]| {
                let part = first * width..(first + count) * width;
                let h = device.copied(&hidden[part.clone()]).unwrap();
                let branch = device.copied(&y[part]).unwrap();
                let (y_at, bias_at) = if with { (branch.at(0), bias_on.at(0)) } else { (0, 0) };
                let mut arguments = args![&h, y_at, bias_at, &weight_on].to_vec();
                arguments.extend_from_slice(outputs);
                arguments.extend_from_slice(&args![eps, width]);
                if !["norm_i8", "norm_limbs"].contains(&kernel) {
                    arguments.extend_from_slice(&args![pitch]);
                }
                arguments.extend_from_slice(&args![0usize]); // row-major: no panels
                run(&device, kernel, [count, 1, 1], 512, 0, &arguments);
                h.read::<f32>(0, count * width).unwrap()
            };
            for dtype in DTYPES {
                let kernel = format!("norm_{}", name(dtype));
                let x = poisoned(&device, rows * pitch * dtype.bytes());
                let h = launch(&kernel, 0, rows, &args![&x]);
                assert!(h.iter().zip(&sums).all(|(&got, &want)| f64::from(got) == want), "hidden of {width}");
                let got = download(&x, rows * pitch, dtype);
                let inside: Vec<f32> = (0..rows).flat_map(|row| got[row * pitch..][..width].to_vec()).collect();
                let error = distance(&inside, &want);
                assert!(error < rounding(dtype), "{kernel} of {width}: {error}");
                assert!((0..rows).all(|row| got[row * pitch + width..(row + 1) * pitch].iter().all(|v| v.is_nan())));
                for row in [0, 4, 8] {
                    let alone = poisoned(&device, pitch * dtype.bytes());
                    launch(&kernel, row, 1, &args![&alone]);
                    let alone = download(&alone, width, dtype);
                    assert!(alone == got[row * pitch..][..width], "row {row} of {kernel} alone");
                }
            }
            // Int8: codes and scales must equal core's for the f32 result.
            let exact = poisoned(&device, rows * pitch * 4);
            launch("norm_f32", 0, rows, &args![&exact]);
            let exact = exact.read::<f32>(0, rows * pitch).unwrap();
            check_integers(&device, &exact, pitch, width, |form, x, xs| {
                launch(&format!("norm_{form}"), 0, rows, &args![x, xs]);
            });
        }
    }
}

/// Runs a kernel for both forms of integers and checks what it writes, row-major. `exact`: the inputs `[rows][pitch]` of `width`
/// numbers that it rounds; `launch(form, x, xs)`.
fn check_integers(
    device: &Arc<Device>,
    exact: &[f32],
    pitch: usize,
    width: usize,
    launch: impl Fn(&str, &Buffer, &Buffer),
) {
    let rows = exact.len() / pitch;
    let written = |form: &str, groups: usize| {
        let (x, xs) = (poisoned(device, rows * groups * 128), poisoned(device, rows * groups * 8));
        launch(form, &x, &xs);
        (x.read::<i8>(0, rows * groups * 128).unwrap(), xs.read::<f32>(0, rows * groups * 2).unwrap())
    };
    let (codes, scales) = written("i8", width.div_ceil(128));
    check_int8(exact, pitch, width, rows, &codes, &scales);
    let (codes, scales) = written("limbs", limb_groups(width));
    check_limbs(exact, pitch, width, &codes, &scales);
}

/// Limbs of rows, their scales and sums: the nearest of 32,512 steps to either side.
fn check_limbs(exact: &[f32], pitch: usize, width: usize, limbs: &[i8], scales: &[f32]) {
    let groups = limb_groups(width);
    for (row, x) in exact.chunks(pitch).enumerate() {
        for group in 0..groups {
            let at = row * groups + group;
            let x = &x[(group * 64).min(width)..(group * 64 + 64).min(width)];
            let (high, low) = limbs[at * 128..][..128].split_at(64);
            let codes: Vec<i32> =
                high.iter().zip(low).map(|(&high, &low)| 256 * i32::from(high) + i32::from(low)).collect();
            let largest = x.iter().fold(0.0f32, |most, x| most.max(x.abs()));
            let scale = largest * (1.0 / 32_512.0);
            assert_eq!(scales[at * 2..][..2], [scale, scale * codes.iter().sum::<i32>() as f32], "row {row}, {group}");
            let off = |(&x, &code): (&f32, &i32)| f64::from(x) / f64::from(scale) - f64::from(code);
            assert!(largest == 0.0 || x.iter().zip(&codes).all(|at| off(at).abs() < 0.51), "row {row}, {group}");
            assert!(codes[x.len()..].iter().all(|&code| code == 0), "limbs past row {row}, {group}");
        }
    }
}

/// Groups of 64 that are not finite have NaN as scale and sum, whatever else a row has; tiny ones are zero.
#[test]
fn limbs_of_extreme_numbers() {
    let Some(device) = device() else { return };
    let (width, first) = (512, [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e-40, 3e38, 1e36, 0.0, -1.0]);
    let mut x = vec![0.5f32; width];
    for (group, &value) in first.iter().enumerate() {
        x[group * 64 + group * 9] = value;
    }
    x[192..256].fill(1e-40);
    x[384..448].fill(0.0);
    let (hidden, limbs, xs) = (device.copied(&x).unwrap(), device.zeroed(1024).unwrap(), device.zeroed(64).unwrap());
    run(&device, "convert_limbs", [1, 1, 1], 256, 0, &args![&hidden, &limbs, &xs, width, 0usize]);
    let (limbs, scales) = (limbs.read::<i8>(0, 1024).unwrap(), xs.read::<f32>(0, 16).unwrap());
    for (group, pair) in scales.chunks(2).enumerate() {
        // 3e38 is beyond the range of the device's fast division.
        let finite = ![0, 1, 2, 4].contains(&group);
        assert!(pair.iter().all(|value| value.is_finite() == finite && value.is_nan() != finite), "{group}: {pair:?}");
        let zero = limbs[group * 128..][..128].iter().all(|&limb| limb == 0);
        assert!(zero == [3, 6].contains(&group) || !finite, "{group}");
    }
    assert_eq!([limbs[7 * 128 + 63], limbs[7 * 128 + 127]], [-127, 0]);
}

/// Codes, scales and sums of quantised rows.
fn check_int8(exact: &[f32], exact_pitch: usize, width: usize, rows: usize, codes: &[i8], scales: &[f32]) {
    let groups = width.div_ceil(128);
    for row in 0..rows {
        let x = &exact[row * exact_pitch..][..width];
        let want = quantize_activations(x).unwrap();
        let (inside, past) = codes[row * groups * 128..][..groups * 128].split_at(width);
        assert!(inside == &want.codes[..], "codes of row {row}");
        assert!(past.iter().all(|&code| code == 0), "codes past row {row}");
        for (group, codes) in want.codes.chunks(128).enumerate() {
            let at = (row * groups + group) * 2;
            let sum: i32 = codes.iter().map(|&code| i32::from(code)).sum();
            let expected = [want.scales[group], want.scales[group] * sum as f32];
            assert_eq!(scales[at..at + 2], expected, "scale and sum of row {row}, group {group}");
        }
    }
}

/// Branches are normalised and added, all heads are normalised in place in either order of channels, and rows alone have the same
/// bits.
#[test]
fn rows_are_normalised_in_place_or_added() {
    let Some(device) = device() else { return };
    let mut random = Random(7);
    let (rows, eps) = (9, 1e-6f32);
    // Width, first column and pitch; heads of `paired` channels.
    for (width, first, pitch, paired) in
        [(72, 0, 72, 0), (9216, 0, 9216, 0), (384, 128, 768, 0), (384, 128, 768, 128), (192, 64, 448, 64)]
    {
        let (x, to) = (random.normals(rows * pitch), random.normals(rows * width));
        let weight = random.normals(width);
        let weight_on = device.copied(&weight).unwrap();
        // The channel at an index of a row.
        let channel = |at: usize| match paired {
            0 => at,
            d => at / d * d + at % d / 16 * 8 + at % 8 + at / 8 % 2 * (d / 2),
        };
        let want = |row: usize, add: bool| -> Vec<f64> {
            let x = &x[row * pitch + first..][..width];
            let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / width as f64;
            let f = 1.0 / (mean + f64::from(eps)).sqrt();
            let normed = x.iter().enumerate().map(|(at, &x)| f64::from(x) * f * f64::from(weight[channel(at)]));
            normed.zip(&to[row * width..]).map(|(y, &h)| if add { y + f64::from(h) } else { y }).collect()
        };
        let launch = |first_row: usize, count: usize, add: bool| -> Vec<f32> {
            let x_on = device.copied(&x[first_row * pitch..][..count * pitch]).unwrap();
            let to_on = device.copied(&to[first_row * width..][..count * width]).unwrap();
            let from = x_on.at(first * 4);
            let (at, to_pitch) = if add { (to_on.at(0), width) } else { (from, pitch) };
            let arguments = args![from, pitch, at, to_pitch, &weight_on, eps, width, paired, usize::from(add)];
            run(&device, "norm_rows", [count, 1, 1], 512, 0, &arguments);
            let after = x_on.read::<f32>(0, count * pitch).unwrap();
            for (row, (after, before)) in after.chunks(pitch).zip(x[first_row * pitch..].chunks(pitch)).enumerate() {
                let inside = |at: usize| !add && (first..first + width).contains(&at);
                assert!((0..pitch).all(|at| inside(at) || after[at] == before[at]), "row {row} beyond its columns");
            }
            if add {
                return to_on.read::<f32>(0, count * width).unwrap();
            }
            after.chunks(pitch).flat_map(|row| row[first..first + width].to_vec()).collect()
        };
        for add in [false, true] {
            let got = launch(0, rows, add);
            let want: Vec<f64> = (0..rows).flat_map(|row| want(row, add)).collect();
            let error = distance(&got, &want);
            assert!(error < 2e-6, "norm_rows of {width}, add {add}: {error}");
            for row in [0, 4, 8] {
                assert!(launch(row, 1, add) == got[row * width..][..width], "row {row} of {width} alone");
            }
        }
    }
}

/// Queries grow at the positions of a step's rows and of consecutive prompt rows; those within the original context keep their
/// bits.
#[test]
fn queries_grow_with_their_position() {
    let Some(device) = device() else { return };
    let mut random = Random(11);
    let (width, scale) = (2112, QueryScale { beta: 0.1, original: 16_384 });
    let values: Vec<u16> = random.normals(4 * width).into_iter().map(|x| f16::from_f32(x).to_bits()).collect();
    let positions = [16_383usize, 16_384, 16_385, 16_386];
    let rows = [0, 3, 1, 2].map(|row| [0, 0, positions[row] as i32, -1]);
    let far = [[0, 0, 5, -1], [0, 0, 40_000, -1], [0, 0, 131_072, -1], [0, 0, 262_143, -1]];
    let run_on = |rows: Option<&[[i32; 4]]>, first: usize| -> Vec<u16> {
        let q = device.copied(&values).unwrap();
        let rows = rows.map(|rows| rows_of(&device, rows));
        let at = rows.as_ref().map_or(0, |rows| rows.at(0));
        let arguments = args![&q, at, first, scale.beta as f32, scale.original, width];
        run(&device, "scale_queries", [2, 4, 1], 256, 0, &arguments);
        q.read::<u16>(0, 4 * width).unwrap()
    };
    let check = |got: &[u16], at: [usize; 4]| {
        for ((got, before), position) in got.chunks(width).zip(values.chunks(width)).zip(at) {
            let factor = scale.at(position);
            assert_eq!(factor == 1.0, position < scale.original);
            for (&got, &before) in got.iter().zip(before) {
                let want = f16::from_f32(f16::from_bits(before).to_f32() * factor);
                // The device's logarithm may differ in the last bit, which may change a tie.
                let apart = i32::from(got & 0x7fff) - i32::from(want.to_bits() & 0x7fff);
                assert!(apart.abs() <= i32::from(factor != 1.0), "{got:x} at {position}, {want}");
            }
        }
    };
    check(&run_on(None, 16_383), positions);
    check(&run_on(Some(&rows), 0), [0, 3, 1, 2].map(|row| positions[row]));
    check(&run_on(Some(&far), 0), [5, 40_000, 131_072, 262_143]);
}

#[test]
fn the_hidden_stream_is_converted() {
    let Some(device) = device() else { return };
    let mut random = Random(8);
    for width in [72, 2056] {
        let rows = 5;
        let hidden = random.normals(rows * width);
        let h = device.copied(&hidden).unwrap();
        let pitch = width.next_multiple_of(64) + 64;
        let grid = [width.div_ceil(1024), rows, 1];
        for dtype in DTYPES {
            let x = poisoned(&device, rows * pitch * dtype.bytes());
            run(&device, &format!("convert_{}", name(dtype)), grid, 256, 0, &args![&h, &x, width, pitch, 0usize]);
            let got = download(&x, rows * pitch, dtype);
            for (got, hidden) in got.chunks(pitch).zip(hidden.chunks(width)) {
                assert!(got.iter().zip(hidden).all(|(&got, &x)| got == round(x, dtype)), "{dtype:?} of {width}");
                assert!(got[width..].iter().all(|x| x.is_nan()), "{dtype:?} of {width} beyond its columns");
            }
        }
        check_integers(&device, &hidden, width, width, |form, x, xs| {
            run(&device, &format!("convert_{form}"), grid, 256, 0, &args![&h, x, xs, width, 0usize]);
        });
    }
}

/// Inputs of a draft with 4-bit activations: codes and scales of int8 inputs, and of limbs.
#[test]
fn inputs_on_the_grid_of_4_bits() {
    let Some(device) = device() else { return };
    let mut random = Random(9);
    // A panel of 64 rows and one of 8: every group of both layouts is somewhere in the buffer.
    let (rows, groups, pitch) = (72, 3, 384);
    let mut x = random.normals(rows * pitch);
    x[pitch..pitch + 128].fill(0.0);
    let of_rows: Vec<_> = x.chunks(pitch).map(|row| quantize_activations(row).unwrap()).collect();
    let codes: Vec<i8> = of_rows.iter().flat_map(|row| row.codes.clone()).collect();
    let scales: Vec<f32> =
        of_rows.iter().flat_map(|row| row.scales.iter().flat_map(|&scale| [scale, f32::NAN])).collect();
    for panels in [0, rows] {
        let (x8, xs) = (device.copied(&codes).unwrap(), device.copied(&scales).unwrap());
        run(&device, "coarse_i8", [groups, rows, 1], 32, 0, &args![&x8, &xs, panels]);
        let (found, pairs) = (x8.read::<i8>(0, codes.len()).unwrap(), xs.read::<f32>(0, scales.len()).unwrap());
        for (group, (codes, found)) in codes.chunks(128).zip(found.chunks(128)).enumerate() {
            let want: Vec<i8> =
                codes.iter().map(|&code| (f32::from(code) * (7.0 / 127.0)).round_ties_even() as i8).collect();
            assert!(found == want, "codes of group {group}, panels {panels}");
            let scale = scales[2 * group] * (127.0 / 7.0);
            let sum: i32 = want.iter().map(|&code| i32::from(code)).sum();
            assert_eq!(pairs[2 * group..][..2], [scale, scale * sum as f32], "group {group}, panels {panels}");
        }
    }
    let limbs = Limbs::new(&x, pitch);
    for panels in [0, rows] {
        let [on, xs] = limbs.upload(&device, rows, pitch, panels);
        run(&device, "coarse_limbs", [limb_groups(pitch), rows, 1], 32, 0, &args![&on, &xs, panels]);
        let (mut want, mut want_scales) = (Vec::new(), Vec::new());
        for (group, pair) in limbs.codes.chunks(128).zip(limbs.scales.chunks(2)) {
            let fine = (0..64).map(|i| 256 * i32::from(group[i]) + i32::from(group[64 + i]));
            let codes: Vec<i8> = fine.map(|code| (code as f32 * (7.0 / 32_512.0)).round_ties_even() as i8).collect();
            let (scale, sum) = (pair[0] * (127.0 / 7.0), codes.iter().map(|&code| i32::from(code)).sum::<i32>());
            want_scales.extend([scale, scale * (256.0 * sum as f32)]);
            want.extend(codes);
            want.extend([0; 64]);
        }
        let (want, want_scales) = arranged(&want, &want_scales, rows, limb_groups(pitch), panels);
        assert!(on.read::<i8>(0, want.len()).unwrap() == want, "limbs, panels {panels}");
        assert!(xs.read::<f32>(0, want_scales.len()).unwrap() == want_scales, "scales, panels {panels}");
    }
}

#[test]
fn silu_times_up() {
    activation_times_up("silu_mul", |gate| gate / (1.0 + (-gate).exp()));
}

#[test]
fn gelu_times_up() {
    activation_times_up("gelu_mul", gelu);
}

fn activation_times_up(stem: &str, activation: impl Fn(f64) -> f64) {
    let Some(device) = device() else { return };
    let mut random = Random(2);
    let rows = 5;
    for width in [72, 1376, 14336] {
        let mut y = random.normals(rows * 2 * width);
        // Saturation at both ends, and no NaN from exp's overflow.
        y[0] = -200.0;
        y[1] = 200.0;
        y[2] = -1e4;
        let bias = random.normals(2 * width);
        let (on, bias_on) = (device.copied(&y).unwrap(), device.copied(&bias).unwrap());
        let pitch = width.next_multiple_of(128) + 128;
        let grid = [width.div_ceil(1024), rows, 1];
        for with in [true, false] {
            let at = |row: usize, k: usize| {
                let value =
                    |at: usize| f64::from(y[row * 2 * width + at]) + if with { f64::from(bias[at]) } else { 0.0 };
                activation(value(k / 8 * 16 + k % 8)) * value(k / 8 * 16 + k % 8 + 8)
            };
            let want: Vec<f64> =
                (0..rows).flat_map(|row| (0..width).map(move |k| (row, k))).map(|(row, k)| at(row, k)).collect();
            let bias_at = if with { bias_on.at(0) } else { 0 };
            for dtype in DTYPES {
                let x = poisoned(&device, rows * pitch * dtype.bytes());
                let arguments = args![&on, bias_at, &x, width, pitch, 0usize];
                run(&device, &format!("{stem}_{}", name(dtype)), grid, 256, 0, &arguments);
                let got = download(&x, rows * pitch, dtype);
                let inside: Vec<f32> = (0..rows).flat_map(|row| got[row * pitch..][..width].to_vec()).collect();
                let error = distance(&inside, &want);
                assert!(error < rounding(dtype), "{stem}_{dtype:?} of {width}: {error}");
                assert!((0..rows).all(|row| got[row * pitch + width..(row + 1) * pitch].iter().all(|v| v.is_nan())));
            }
            let exact = poisoned(&device, rows * pitch * 4);
            run(&device, &format!("{stem}_f32"), grid, 256, 0, &args![&on, bias_at, &exact, width, pitch, 0usize]);
            let exact = exact.read::<f32>(0, rows * pitch).unwrap();
            check_integers(&device, &exact, pitch, width, |form, x, xs| {
                run(&device, &format!("{stem}_{form}"), grid, 256, 0, &args![&on, bias_at, x, xs, width, 0usize]);
            });
        }
    }
}

/// Two panels, the second of seven rows, and a partial last group: codes and scales are those of row-major inputs.
#[test]
fn integers_are_stored_in_panels() {
    let Some(device) = device() else { return };
    let mut random = Random(7);
    let (rows, width) = (71usize, 296usize);
    let hidden = device.copied(&random.normals(rows * width)).unwrap();
    let weight = device.copied(&random.normals(width)).unwrap();
    let gates = device.copied(&random.normals(rows * 2 * width)).unwrap();
    let kernels = ["norm", "silu_mul", "gelu_mul"].map(|stem| ["i8", "limbs"].map(|form| (stem, form)));
    for (stem, form) in kernels.concat() {
        let kernel = &format!("{stem}_{form}");
        let groups = if form == "i8" { width.div_ceil(128) } else { limb_groups(width) };
        let launch = |panels: usize| {
            let places = 72 * groups;
            let (x8, xs) = (poisoned(&device, places * 128), poisoned(&device, places * 8));
            if stem == "norm" {
                let arguments = args![&hidden, 0u64, 0u64, &weight, &x8, &xs, 1e-5f32, width, panels];
                run(&device, kernel, [rows, 1, 1], 512, 0, &arguments);
            } else {
                let arguments = args![&gates, 0u64, &x8, &xs, width, panels];
                run(&device, kernel, [width.div_ceil(1024), rows, 1], 256, 0, &arguments);
            }
            (x8.read::<i8>(0, places * 128).unwrap(), xs.read::<f32>(0, places * 2).unwrap())
        };
        let (codes, scales) = launch(0);
        let (want, want_scales) = arranged(&codes, &scales, rows, groups, rows);
        let (got, got_scales) = launch(rows);
        for place in (0..72 * groups).filter(|&place| want_scales[place * 2].is_finite()) {
            assert!(got[place * 128..][..128] == want[place * 128..][..128], "{kernel}: codes at place {place}");
            assert_eq!(got_scales[place * 2..][..2], want_scales[place * 2..][..2], "{kernel}: place {place}");
        }
    }
}

/// The same for inputs of 16 bits, whose rows are whole groups of 64.
#[test]
fn inputs_of_16_bits_are_stored_in_panels() {
    let Some(device) = device() else { return };
    let mut random = Random(10);
    let (rows, width) = (71usize, 320usize);
    let (groups, bytes) = (width / 64, 72 * width * 2);
    let hidden = device.copied(&random.normals(rows * width)).unwrap();
    let weight = device.copied(&random.normals(width)).unwrap();
    let gates = device.copied(&random.normals(rows * 2 * width)).unwrap();
    for dtype in [Dtype::Bf16, Dtype::F16] {
        for stem in ["norm", "silu_mul", "gelu_mul", "convert"] {
            let kernel = format!("{stem}_{}", name(dtype));
            let launch = |panels: usize| {
                let x = poisoned(&device, bytes);
                let grid = [width.div_ceil(1024), rows, 1];
                match stem {
                    "norm" => {
                        let arguments = args![&hidden, 0u64, 0u64, &weight, &x, 1e-5f32, width, width, panels];
                        run(&device, &kernel, [rows, 1, 1], 512, 0, &arguments);
                    }
                    "convert" => run(&device, &kernel, grid, 256, 0, &args![&hidden, &x, width, width, panels]),
                    _ => run(&device, &kernel, grid, 256, 0, &args![&gates, 0u64, &x, width, width, panels]),
                }
                x.read::<i8>(0, bytes).unwrap()
            };
            let row_major = launch(0);
            let (want, exist) = arranged(&row_major, &vec![0.0; rows * groups * 2], rows, groups, rows);
            let got = launch(rows);
            for place in (0..72 * groups).filter(|&place| exist[place * 2].is_finite()) {
                assert!(got[place * 128..][..128] == want[place * 128..][..128], "{kernel}: place {place}");
            }
        }
    }
}

#[test]
fn embeddings_come_from_windows_or_prompts() {
    let Some(device) = device() else { return };
    // 8,212 columns: more than all threads take at once; half of the last eight are outside.
    for width in [200, 8212] {
        embeddings(&device, 50, width);
    }
}

fn embeddings(device: &Arc<Device>, vocab: usize, width: usize) {
    let values = Random(3).normals(vocab * width);
    // The middle row carries its own token.
    let rows = [[1, 2, 700, -1], [0, 0, 5, 31], [1, 3, 701, -1]];
    let (windows, pitch) = ([[7, 8, 9, 10, 11], [20, 21, 49, 0, 13]].concat(), 5);
    for dtype in DTYPES {
        let table = matrix(device, &values, vocab, width, dtype);
        let (on, windows_on) = (rows_of(device, &rows), device.copied(&windows).unwrap());
        let kernel = format!("embed_{}", name(dtype));
        let check = |tokens: &[usize], scale: f32, arguments: &[Arg], hidden: &Buffer| {
            let arguments = [arguments, &args![scale]].concat();
            run(device, &kernel, [tokens.len(), 1, 1], 256, 0, &arguments);
            let got = hidden.read::<f32>(0, tokens.len() * width).unwrap();
            for (row, &token) in tokens.iter().enumerate() {
                assert!(
                    (0..width).all(|k| got[row * width + k] == scale * round(values[token * width + k], dtype)),
                    "{kernel}, row {row}"
                );
            }
        };
        let hidden = poisoned(device, 3 * width * 4);
        check(&[49, 31, 0], 1.0, &args![&on, &windows_on, pitch, 0u64, &table, &hidden, width, vocab], &hidden);
        let kept = windows_on.read::<i32>(0, windows.len()).unwrap();
        assert_eq!(kept, [&[31], &windows[1..]].concat());
        let prompt = device.copied(&[3, 49, 3, 0]).unwrap();
        let hidden = poisoned(device, 4 * width * 4);
        check(&[3, 49, 3, 0], 12.0 / 0.22, &args![0u64, 0u64, 0, &prompt, &table, &hidden, width, vocab], &hidden);
    }
}

/// One head after bias, norm and RoPE, in f64.
fn head(y: &[f32], bias: Option<&[f32]>, norm: Option<&[f32]>, angles: Option<&[[f32; 2]]>, eps: f32) -> Vec<f64> {
    let d = y.len();
    let mut v: Vec<f64> = (0..d).map(|i| f64::from(y[i]) + bias.map_or(0.0, |b| f64::from(b[i]))).collect();
    if let Some(norm) = norm {
        let f = 1.0 / (v.iter().map(|x| x * x).sum::<f64>() / d as f64 + f64::from(eps)).sqrt();
        v.iter_mut().zip(norm).for_each(|(x, &w)| *x *= f * f64::from(w));
    }
    if let Some(angles) = angles {
        for (i, &[cos, sin]) in angles.iter().enumerate() {
            let (x, z) = (v[i], v[d / 2 + i]);
            v[i] = x * f64::from(cos) - z * f64::from(sin);
            v[d / 2 + i] = z * f64::from(cos) + x * f64::from(sin);
        }
    }
    v
}

/// Heads of projections, and rings that hold keys and values of `layers` layers; those of `layer` are appended.
#[derive(Clone, Copy)]
struct Heads {
    heads: usize,
    kv_heads: usize,
    d: usize,
    layers: usize,
    layer: usize,
    slots: usize,
}

/// Addresses of projections, their biases, the norms of queries and of keys, and angles.
type Projected = [u64; 5];

impl Heads {
    const EPS: f32 = 1e-6;

    /// Heads of queries, keys and values.
    fn all(&self) -> usize {
        self.heads + 2 * self.kv_heads
    }

    /// Factor on queries of a step.
    fn scale(&self) -> f32 {
        std::f32::consts::LOG2_E / (self.d as f32).sqrt()
    }

    /// Elements of a ring.
    fn elements(&self) -> usize {
        self.layers * self.slots * self.kv_heads * BUFFER_TOKENS * self.d
    }

    /// The element of a ring at which a row's key or value begins.
    fn place(&self, [slot, _, position, _]: [i32; 4], head: usize) -> usize {
        let ring = (self.layer * self.slots + slot as usize) * self.kv_heads + head;
        (ring * BUFFER_TOKENS + position as usize % BUFFER_TOKENS) * self.d
    }

    /// `append_{d}`: the queries of a step's rows, the rings of keys and of values, and the flag.
    fn append(&self, device: &Arc<Device>, rows: &[[i32; 4]], from: Projected, paired: bool) -> ([Buffer; 3], u32) {
        let Heads { heads, kv_heads, d, layer, slots, .. } = *self;
        let (rows_on, flag) = (rows_of(device, rows), device.zeroed(4).unwrap());
        let stored = [rows.len() * heads * d, self.elements(), self.elements()].map(|n| poisoned(device, n * 2));
        let ([y, bias, q_norm, k_norm, angles], [q, k, v]) = (from, &stored);
        let arguments = args![
            &rows_on,
            y,
            bias,
            q_norm,
            k_norm,
            angles,
            q,
            k,
            v,
            Heads::EPS,
            self.scale(),
            heads,
            kv_heads,
            layer,
            slots,
            usize::from(paired),
            &flag
        ];
        run(device, &format!("append_{d}"), [self.all().div_ceil(4), rows.len(), 1], 128, 0, &arguments);
        (stored, flag.read(0, 1).unwrap()[0])
    }

    /// `rope_store_{d}`: the queries of a prompt's rows, their keys and values, and the flag.
    fn store(&self, device: &Arc<Device>, rows: usize, from: Projected) -> ([Buffer; 2], u32) {
        let Heads { heads, kv_heads, d, .. } = *self;
        let flag = device.zeroed(4).unwrap();
        let stored = [heads, 2 * kv_heads].map(|heads| poisoned(device, rows * heads * d * 2));
        let ([y, bias, q_norm, k_norm, angles], [q, kv]) = (from, &stored);
        let arguments = args![y, bias, q_norm, k_norm, angles, q, kv, Heads::EPS, heads, kv_heads, &flag];
        run(device, &format!("rope_store_{d}"), [self.all().div_ceil(4), rows, 1], 128, 0, &arguments);
        (stored, flag.read(0, 1).unwrap()[0])
    }
}

/// A key or value beyond f16 is stored as 0, so that it multiplies to nothing, and flagged, as it cannot be detected in
/// memory.
#[test]
fn values_beyond_f16_are_flagged() {
    let Some(device) = device() else { return };
    let row = [0, 0, 5, 0];
    for d in [64, 128, 256] {
        let of = Heads { heads: 2, kv_heads: 1, d, layers: 1, layer: 0, slots: 1 };
        let angles = device.copied(&[1.0f32, 0.0].repeat(d / 2)).unwrap();
        for (at, flagged) in [(None, 0), (Some(2 * d + 3), 1), (Some(3 * d + 7), 1)] {
            let mut y = vec![1.0f32; of.all() * d];
            if let Some(at) = at {
                y[at] = 1e6;
            }
            let y = device.copied(&y).unwrap();
            let from = [y.at(0), 0, 0, 0, angles.at(0)];
            let ([_, k, v], appended) = of.append(&device, &[row], from, false);
            let ([_, kv], stored) = of.store(&device, 1, from);
            assert_eq!([appended, stored], [flagged; 2], "head_dim {d}, {at:?}");
            let ring = |ring| download(ring, of.elements(), Dtype::F16)[of.place(row, 0)..][..d].to_vec();
            let want: Vec<f32> = (0..2 * d).map(|i| if at == Some(of.heads * d + i) { 0.0 } else { 1.0 }).collect();
            assert!([ring(&k), ring(&v)].concat() == want, "append_{d}, {at:?}");
            assert!(download(&kv, 2 * d, Dtype::F16) == want, "rope_store_{d}, {at:?}");
        }
    }
}

#[test]
fn heads_are_rotated_and_appended() {
    let Some(device) = device() else { return };
    let mut random = Random(4);
    let rows = [[2, 0, 383, 0], [2, 1, 384, 0], [0, 0, 5, 1], [2, 2, 385, 0], [1, 0, 1_000_000, 2]];
    for d in [64, 128, 256] {
        let of = Heads { heads: 6, kv_heads: 2, d, layers: 2, layer: 1, slots: 3 };
        let (heads, kv_heads, all) = (of.heads, of.kv_heads, of.all());
        let (y, bias) = (random.normals(rows.len() * all * d), random.normals(all * d));
        let (q_norm, k_norm) = (random.normals(d), random.normals(d));
        let angles: Vec<[f32; 2]> =
            (0..rows.len() * d / 2).map(|_| (random.uniform() * 6.3).sin_cos()).map(|(s, c)| [c, s]).collect();
        // Heads whose halves alternate by eight channels, as in paired draft weights.
        let pairs = |at: usize| at - at % d + at % d / 16 * 8 + at % 8 + at / 8 % 2 * (d / 2);
        let paired: Vec<f32> = (0..y.len()).map(|at| y[pairs(at)]).collect();
        let [y_on, paired_on, bias_on, q_on, k_on, angles_on] =
            [&y, &paired, &bias, &q_norm, &k_norm, &angles.concat()].map(|values| device.copied(values).unwrap());
        for (with_bias, with_norm) in [(true, true), (false, false), (true, false), (false, true)] {
            let optional = |wanted: bool, buffer: &Buffer| if wanted { buffer.at(0) } else { 0 };
            let from = |y: &Buffer| {
                let norms = [&q_on, &k_on].map(|norm| optional(with_norm, norm));
                [y.at(0), optional(with_bias, &bias_on), norms[0], norms[1], angles_on.at(0)]
            };
            let value = |row: usize, h: usize| {
                let norm = (h < heads + kv_heads).then_some(if h < heads { &q_norm[..] } else { &k_norm });
                head(
                    &y[(row * all + h) * d..][..d],
                    with_bias.then_some(&bias[h * d..(h + 1) * d]),
                    norm.filter(|_| with_norm),
                    (h < heads + kv_heads).then_some(&angles[row * d / 2..(row + 1) * d / 2]),
                    Heads::EPS,
                )
            };
            let queries: Vec<f64> =
                (0..rows.len()).flat_map(|row| (0..heads).flat_map(move |h| value(row, h))).collect();
            let (appended, flag) = of.append(&device, &rows, from(&y_on), false);
            assert_eq!(flag, 0);
            let (as_pairs, _) = of.append(&device, &rows, from(&paired_on), true);
            for (natural, paired) in appended.iter().zip(&as_pairs) {
                let bytes = |of: &Buffer| of.read::<u8>(0, of.bytes()).unwrap();
                assert!(bytes(natural) == bytes(paired), "append_{d} of paired heads");
            }
            let [q, rings @ ..] = &appended;
            let want: Vec<f64> = queries.iter().map(|x| x * f64::from(of.scale())).collect();
            let error = distance(&download(q, want.len(), Dtype::F16), &want);
            assert!(error < 4e-4, "q of append_{d}: {error}");
            for (part, ring) in rings.iter().enumerate() {
                let mut got = download(ring, of.elements(), Dtype::F16);
                for (row, &place) in rows.iter().enumerate() {
                    for h in 0..kv_heads {
                        let got = &mut got[of.place(place, h)..][..d];
                        let error = distance(got, &value(row, heads + part * kv_heads + h));
                        assert!(error < 4e-4, "append_{d}, part {part}, row {row}: {error}");
                        got.fill(f32::NAN);
                    }
                }
                assert!(got.iter().all(|x| x.is_nan()), "append_{d} wrote elsewhere");
            }
            // The prompt's variant gives the same heads as matrices, to the bit, apart from the scale.
            let ([q, kv], flag) = of.store(&device, rows.len(), from(&y_on));
            assert_eq!(flag, 0);
            assert!(distance(&download(&q, queries.len(), Dtype::F16), &queries) < 4e-4);
            let kv = kv.read::<u16>(0, rows.len() * 2 * kv_heads * d).unwrap();
            let rings = rings.each_ref().map(|ring| ring.read::<u16>(0, of.elements()).unwrap());
            for (row, &place) in rows.iter().enumerate() {
                for h in 0..2 * kv_heads {
                    let ring = &rings[h / kv_heads][of.place(place, h % kv_heads)..][..d];
                    assert!(kv[(row * 2 * kv_heads + h) * d..][..d] == *ring, "rope_store_{d}, row {row}, head {h}");
                }
            }
        }
        // Row 3 alone has the same bits.
        let queries = |rows: &[[i32; 4]], first: usize| {
            let (y, angles) = (y_on.at(first * all * d * 4), angles_on.at(first * d / 2 * 8));
            let from = [y, bias_on.at(0), q_on.at(0), k_on.at(0), angles];
            let ([q, ..], _) = of.append(&device, rows, from, false);
            q.read::<u16>(0, rows.len() * heads * d).unwrap()
        };
        assert!(queries(&rows[3..4], 3)[..] == queries(&rows, 0)[3 * heads * d..4 * heads * d]);
    }
}

#[test]
fn small_helpers() {
    let Some(device) = device() else { return };
    let mut random = Random(5);
    let values = random.normals(1000);
    let (h, x) = (gpu::upload(&device, &values, Dtype::F16), poisoned(&device, 4000));
    run(&device, "widen", [4, 1, 1], 256, 0, &args![&h, &x, 1000u64]);
    let got = x.read::<f32>(0, 1000).unwrap();
    assert!(got.iter().zip(&values).all(|(&got, &v)| got == f16::from_f32(v).to_f32()));
    let (hidden, y, bias) = (random.normals(2400), random.normals(2400), random.normals(800));
    for with in [true, false] {
        let (on, y_on, bias_on) =
            (device.copied(&hidden).unwrap(), device.copied(&y).unwrap(), device.copied(&bias).unwrap());
        let bias_at = if with { bias_on.at(0) } else { 0 };
        run(&device, "add_rows", [3, 1, 1], 256, 0, &args![&on, &y_on, bias_at, 2400u64, 800]);
        let got = on.read::<f32>(0, 2400).unwrap();
        assert!((0..2400).all(|i| got[i] == if with { (hidden[i] + y[i]) + bias[i % 800] } else { hidden[i] + y[i] }));
    }
}
