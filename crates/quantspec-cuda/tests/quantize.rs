//! The device's quantisers compared with quantspec-core, byte by byte.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod gpu;

use gpu::{Random, atoms, bits, device, matrix, name, poisoned, run, upload};
use half::f16;
use quantspec_core::cache::{BUFFER_TOKENS, G};
use quantspec_core::config::{Dtype, Rounding};
use quantspec_core::layout::Layout;
use quantspec_core::quantize::{quantize_head_row, quantize_page, quantize_weights_row};
use quantspec_cuda::args;

/// A page's keys or values `[G][d]`: outlier channels, biases, constant channels and tokens, f16's extremes, subnormals,
/// ranges below the smallest scale.
fn page(random: &mut Random, d: usize) -> Vec<f16> {
    let mut x: Vec<f32> = random.normals(G * d);
    for token in 0..G {
        let row = &mut x[token * d..(token + 1) * d];
        row[3] *= 1000.0;
        row[5] += 10.0;
        row[7] = -2.5;
        row[9] = if token % 2 == 0 { 65504.0 } else { -65504.0 };
        row[11] *= 1e-7;
        row[13] = 1.0 + (token % 2) as f32 * 0.0009765625;
        row[15] = if token == 77 { 1.0 } else { 0.0 };
    }
    x[20 * d..21 * d].fill(0.375);
    for (channel, value) in x[21 * d..22 * d].iter_mut().enumerate() {
        *value = if channel % 3 == 0 { -1.0 } else { 1.0 };
    }
    // Both zeros in a group would make the sign of its zero parameter ambiguous.
    x.iter()
        .map(|&v| f16::from_f32(if v == 0.0 { 0.0 } else { v }))
        .map(|v| if v.to_f32() == 0.0 { f16::ZERO } else { v })
        .collect()
}

const ROUNDINGS: [Rounding; 2] = [Rounding::Paper, Rounding::Balanced];

fn balanced(rounding: Rounding) -> i32 {
    i32::from(rounding == Rounding::Balanced)
}

fn flags(buffer: &quantspec_cuda::device::Buffer) -> u32 {
    buffer.read::<u32>(0, 1).unwrap()[0]
}

#[test]
fn flushed_pages_equal_core() {
    let Some(device) = device() else { return };
    let mut random = Random(1);
    let (layers, slots, heads, pages) = (2, 2, 3, 4);
    let (slot, logical, physical) = (1, 4, 2);
    for d in [64, 128, 256] {
        let ring = |random: &mut Random| -> Vec<f16> {
            (0..layers * slots * heads * 3).flat_map(|_| page(random, d)).collect()
        };
        let (keys, values) = (ring(&mut random), ring(&mut random));
        let (ring_k, ring_v) = (device.copied(&keys).unwrap(), device.copied(&values).unwrap());
        let (upper_bytes, lower_bytes) = (Layout::Cuda.upper_bytes(d), Layout::Cuda.lower_bytes(d));
        for rounding in ROUNDINGS {
            for keeps_lower in [true, false] {
                let blocks = layers * pages * heads;
                let upper = poisoned(&device, blocks * upper_bytes);
                let lower = poisoned(&device, blocks * lower_bytes);
                let full = poisoned(&device, blocks * 2 * G * d * 2);
                let flag = device.zeroed(4).unwrap();
                let lower_at = if keeps_lower { lower.at(0) } else { 0 };
                let arguments = args![
                    &ring_k,
                    &ring_v,
                    &upper,
                    lower_at,
                    &full,
                    pages,
                    slots,
                    slot,
                    logical,
                    physical,
                    balanced(rounding),
                    &flag
                ];
                run(&device, &format!("flush_{d}"), [heads, layers, 2], 256, 256 * d + 4096, &arguments);
                assert_eq!(flags(&flag), 0);
                let (upper, lower, full) = (
                    upper.read::<u8>(0, blocks * upper_bytes).unwrap(),
                    lower.read::<u8>(0, blocks * lower_bytes).unwrap(),
                    full.read::<u16>(0, blocks * 2 * G * d).unwrap(),
                );
                for layer in 0..layers {
                    for p in 0..pages {
                        for head in 0..heads {
                            let block = (layer * pages + p) * heads + head;
                            let got_upper = &upper[block * upper_bytes..][..upper_bytes];
                            let got_lower = &lower[block * lower_bytes..][..lower_bytes];
                            let got_full = &full[block * 2 * G * d..][..2 * G * d];
                            if p != physical {
                                assert!(got_upper.iter().chain(got_lower).all(|&b| b == 0xff), "wrote beyond its page");
                                assert!(got_full.iter().all(|&b| b == 0xffff));
                                continue;
                            }
                            let from = (((layer * slots + slot) * heads + head) * BUFFER_TOKENS + logical % 3 * G) * d;
                            let (k, v) = (&keys[from..from + G * d], &values[from..from + G * d]);
                            let want = Layout::Cuda.pack(&quantize_page(k, v, d, rounding).unwrap()).unwrap();
                            assert!(got_upper == want.upper, "upper block, d {d}, {rounding:?}, head {head}");
                            if keeps_lower {
                                assert!(got_lower == want.lower, "lower block, d {d}, {rounding:?}, head {head}");
                            } else {
                                assert!(got_lower.iter().all(|&b| b == 0xff));
                            }
                            assert!(got_full.iter().zip(k.iter().chain(v)).all(|(&got, want)| got == want.to_bits()));
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn stored_pages_and_recent_tokens_equal_the_scratch() {
    let Some(device) = device() else { return };
    let mut random = Random(2);
    let (heads, tokens, d, slots, layer, slot) = (2, 5 * G + 37, 128, 3, 1, 2);
    let mut scratch = vec![f16::ZERO; tokens * 2 * heads * d];
    let mut heads_of = Vec::new();
    for part in 0..2 * heads {
        let x: Vec<f16> = (0..6).flat_map(|_| page(&mut random, d)).collect();
        for token in 0..tokens {
            let to = (token * 2 * heads + part) * d;
            scratch[to..to + d].copy_from_slice(&x[token * d..(token + 1) * d]);
        }
        heads_of.push(x);
    }
    let on_device = device.copied(&scratch).unwrap();
    let table = [4, 0, 3, 1, 2];
    let table_on_device = device.copied(&table).unwrap();
    let (upper_bytes, lower_bytes) = (Layout::Cuda.upper_bytes(d), Layout::Cuda.lower_bytes(d));
    for rounding in ROUNDINGS {
        let (upper, lower) = (poisoned(&device, 5 * heads * upper_bytes), poisoned(&device, 5 * heads * lower_bytes));
        let flag = device.zeroed(4).unwrap();
        // Pages 1..5: the first stays untouched.
        let arguments = args![&on_device, &upper, &lower, 0u64, &table_on_device, 1, balanced(rounding), &flag];
        run(&device, "store_128", [heads, 4, 2], 256, 256 * d + 4096, &arguments);
        assert_eq!(flags(&flag), 0);
        let (upper, lower) = (
            upper.read::<u8>(0, 5 * heads * upper_bytes).unwrap(),
            lower.read::<u8>(0, 5 * heads * lower_bytes).unwrap(),
        );
        for (logical, &physical) in table.iter().enumerate() {
            for head in 0..heads {
                let block = physical as usize * heads + head;
                let (got_upper, got_lower) =
                    (&upper[block * upper_bytes..][..upper_bytes], &lower[block * lower_bytes..][..lower_bytes]);
                if logical == 0 {
                    assert!(got_upper.iter().chain(got_lower).all(|&b| b == 0xff));
                    continue;
                }
                let at = logical * G * d..(logical + 1) * G * d;
                let (k, v) = (&heads_of[head][at.clone()], &heads_of[heads + head][at]);
                let want = Layout::Cuda.pack(&quantize_page(k, v, d, rounding).unwrap()).unwrap();
                assert!(
                    got_upper == want.upper && got_lower == want.lower,
                    "page {logical}, head {head}, {rounding:?}"
                );
            }
        }
    }
    // With full pages only, no later kernel checks for non-finite values.
    for (bad, flagged) in [(None, 0), (Some(f16::INFINITY), 1), (Some(f16::NAN), 1)] {
        let mut scratch = scratch.clone();
        scratch[(2 * G + 9) * 2 * heads * d + 5] = bad.unwrap_or(f16::ONE);
        let on_device = device.copied(&scratch).unwrap();
        let full = poisoned(&device, 5 * heads * 2 * G * d * 2);
        let flag = device.zeroed(4).unwrap();
        let arguments = args![&on_device, 0u64, 0u64, &full, &table_on_device, 1, 1, &flag];
        run(&device, "store_128", [heads, 4, 2], 256, 256 * d + 4096, &arguments);
        assert_eq!(flags(&flag), flagged, "{bad:?}");
    }
    // Recent tokens are written to their slot of the ring and nowhere else.
    let ring_elements = 2 * slots * heads * BUFFER_TOKENS * d;
    let (ring_k, ring_v) = (poisoned(&device, ring_elements * 2), poisoned(&device, ring_elements * 2));
    let flag = device.zeroed(4).unwrap();
    let first = tokens - 300;
    let arguments = args![&on_device, &ring_k, &ring_v, layer, slots, slot, heads, d, first, &flag];
    run(&device, "keep_recent", [300, 2, 1], 128, 0, &arguments);
    assert_eq!(flags(&flag), 0);
    for (part, ring) in [ring_k, ring_v].iter().enumerate() {
        let got = ring.read::<u16>(0, ring_elements).unwrap();
        let mut want = vec![0xffff; ring_elements];
        for token in first..tokens {
            for head in 0..heads {
                let to = (((layer * slots + slot) * heads + head) * BUFFER_TOKENS + token % BUFFER_TOKENS) * d;
                for channel in 0..d {
                    want[to + channel] = heads_of[part * heads + head][token * d + channel].to_bits();
                }
            }
        }
        assert!(got == want);
    }
}

#[test]
fn non_finite_elements_raise_the_flag() {
    let Some(device) = device() else { return };
    let d = 128;
    for (part, bad) in [(0, f16::NAN), (0, f16::INFINITY), (1, f16::NAN), (1, f16::NEG_INFINITY)] {
        let mut rings = [page(&mut Random(3), d), page(&mut Random(4), d)];
        rings[part][77 * d + 100] = bad;
        let padded = |x: &[f16]| [x, &vec![f16::ZERO; 2 * G * d]].concat();
        let (ring_k, ring_v) = (device.copied(&padded(&rings[0])).unwrap(), device.copied(&padded(&rings[1])).unwrap());
        let upper = poisoned(&device, Layout::Cuda.upper_bytes(d));
        let lower = poisoned(&device, Layout::Cuda.lower_bytes(d));
        let flag = device.zeroed(4).unwrap();
        let arguments = args![&ring_k, &ring_v, &upper, &lower, 0u64, 1, 1, 0, 0, 0, 1, &flag];
        run(&device, "flush_128", [1, 1, 2], 256, 256 * d + 4096, &arguments);
        assert_eq!(flags(&flag), 1, "{bad} in part {part}");
    }
}

#[test]
fn weights_are_repacked_and_interleaved() {
    let Some(device) = device() else { return };
    let mut random = Random(5);
    let (rows, k) = (24, 200);
    let (gate, up) = (random.normals(rows * k), random.normals(rows * k));
    let whole = gpu::interleave(&gate, &up, rows, k);
    let blocks = 4usize;
    let target = device.zeroed(3 * blocks * 2048).unwrap();
    for (part, values) in [(1, &gate), (2, &up)] {
        // In two pieces, like an upload.
        for (first, count) in [(0, 9), (9, 15)] {
            let staging = upload(&device, &values[first * k..(first + count) * k], Dtype::Bf16);
            let grid = [(count * k.div_ceil(8)).div_ceil(256), 1, 1];
            run(&device, "weights_atoms", grid, 256, 0, &args![&staging, &target, first, count, k, part]);
        }
    }
    assert!(target.read::<u16>(0, 3 * blocks * 1024).unwrap() == atoms(&bits(&whole, Dtype::Bf16), 2 * rows, k));
    let target = poisoned(&device, 2 * rows * k * 4);
    for (part, values) in [(1, &gate), (2, &up)] {
        let staging = device.copied(values).unwrap();
        run(
            &device,
            "weights_rows",
            [(rows * k).div_ceil(256), 1, 1],
            256,
            0,
            &args![&staging, &target, 0, rows, k, part],
        );
    }
    assert!(target.read::<f32>(0, 2 * rows * k).unwrap() == whole);
}

#[test]
fn draft_weights_equal_core() {
    let Some(device) = device() else { return };
    let mut random = Random(6);
    for (n, k, paired) in [(48, 256, 0), (40, 200, 0), (16, 64, 0), (192, 136, 64), (256, 64, 256)] {
        let mut values = random.normals(n * k);
        values[..k].fill(0.125);
        values.iter_mut().step_by(97).for_each(|w| *w *= 30.0);
        let importance: Vec<f32> = random.normals(k).iter().map(|x| x.exp()).collect();
        for dtype in [Dtype::Bf16, Dtype::F16, Dtype::F32] {
            let stored: Vec<f32> = values.iter().map(|&w| gpu::round(w, dtype)).collect();
            let weights = matrix(&device, &stored, n, k, dtype);
            let (tiles, groups) = (n.div_ceil(16), k.div_ceil(128));
            for (bits, block, weigh) in [(4, 1088, false), (4, 1088, true), (8, 2112, true)] {
                let importance = if weigh { &importance[..] } else { &[] };
                let out = poisoned(&device, tiles * groups * block);
                let flag = device.zeroed(4).unwrap();
                let kernel = format!("weights_w{bits}_{}", name(dtype));
                let on_device = weigh.then(|| device.copied(importance).unwrap());
                let address = on_device.as_ref().map_or(0, |buffer| buffer.at(0));
                run(&device, &kernel, [groups, tiles, 1], 128, 0, &args![&weights, address, &out, n, k, paired, &flag]);
                assert_eq!(flags(&flag), 0);
                let got = out.read::<u8>(0, tiles * groups * block).unwrap();
                let mut want = vec![0; tiles * groups * block];
                for natural in 0..n {
                    let source = &stored[natural * k..(natural + 1) * k];
                    let row = match natural % paired.max(1) {
                        _ if paired == 0 => natural,
                        channel => {
                            let (half, c) = (channel / (paired / 2), channel % (paired / 2));
                            natural - channel + c / 8 * 16 + half * 8 + c % 8
                        }
                    };
                    let quantised =
                        if bits == 4 { quantize_weights_row(source, importance) } else { quantize_head_row(source) }
                            .unwrap();
                    for (column, &code) in quantised.codes.iter().enumerate() {
                        let at = (row / 16 * groups + column / 128) * block;
                        let (g, upper, k) = (row % 8, row % 16 / 8, column % 128);
                        let (half, rest) = (k / 64, k % 64);
                        let (c, rest) = (rest / 16, rest % 16);
                        let lane = g * 4 + c;
                        if bits == 4 {
                            let byte = at + (half * 32 + lane) * 16 + rest;
                            want[byte] |= code << (4 * upper);
                        } else {
                            let (pair, word, byte) = (rest / 8, rest % 8 / 4, rest % 4);
                            want[at + ((half * 2 + pair) * 32 + lane) * 16 + (word * 2 + upper) * 4 + byte] = code;
                        }
                    }
                    for (group, params) in quantised.params.iter().enumerate() {
                        let at = (row / 16 * groups + group + 1) * block - 64 + row % 8 * 8 + row % 16 / 8 * 4;
                        want[at..at + 2].copy_from_slice(&params.scale.to_bits().to_le_bytes());
                        want[at + 2..at + 4].copy_from_slice(&params.zero.to_bits().to_le_bytes());
                    }
                }
                assert!(got == want, "{bits} bits of {dtype:?} {n} x {k}, paired {paired}, weighed {weigh}");
            }
        }
    }
}
