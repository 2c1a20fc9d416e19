use super::*;
use crate::lanes::{bf16_bits, f16_bits};
use crate::linear::row_stride;
use crate::testing::{Noise, bits, distance, padded, paths};
use quantspec_core::weights::{Row, quantize_row, quantize_row_upper};

/// A matrix of `n` rows, 33 to 64, of normally distributed weights with a constant group and rows of other magnitudes.
fn weights(noise: &mut Noise, n: usize, k: usize) -> Vec<f32> {
    let mut w = noise.normals(n * k);
    w[..k].fill(0.5);
    for (n, row) in w.chunks_exact_mut(k).enumerate().skip(2) {
        let offset = if n % 3 == 0 { 4.0 } else { 0.0 };
        row.iter_mut().for_each(|w| *w = (*w + offset) * 2f32.powi(n as i32 % 5 - 2));
    }
    w
}

/// Makes four rows multiples of an f16 step, like files of 4-bit and 8-bit codes: codes of the first reach −8, those of
/// the others 127, −127 and both.
fn on_grids(w: &mut [f32], k: usize) {
    for (row, (least, most)) in w.chunks_exact_mut(k).zip([(-8, 7), (-119, 127), (-127, 119), (-127, 127)]) {
        let d = f16_value(f16_bits(0.0123));
        for (i, group) in row.chunks_mut(GROUP).enumerate() {
            group.iter_mut().for_each(|w| *w = (*w * 4.0).round().clamp(least as f32, most as f32) * d);
            group[i % group.len()] = least as f32 * d;
            group[(i + 1) % group.len()] = most as f32 * d;
        }
    }
}

/// Core's result for a row.
fn quantized(row: &[f32], both: bool) -> Row {
    if both { quantize_row(row, &[], GROUP) } else { quantize_row_upper(row, &[], GROUP) }.unwrap()
}

fn planes(simd: Simd, w: &[f32], k: usize, both: bool) -> Planes {
    planes_from(simd, w, &[], k, if both { 0 } else { (w.len() / k).div_ceil(PANEL) })
}

fn planes_from(simd: Simd, w: &[f32], importance: &[f32], k: usize, both_from: usize) -> Planes {
    let mut planes = Planes::zeros((w.len() / k).div_ceil(PANEL), k, both_from).unwrap();
    let (upper, lower) = Planes::panel_bytes(k);
    for (i, rows) in w.chunks(PANEL * k).enumerate() {
        let upper = &mut planes.upper[i * upper..][..upper];
        let lower = match i.checked_sub(both_from) {
            Some(i) => &mut planes.lower[i * lower..][..lower],
            None => &mut [],
        };
        encode(simd, rows, importance, k, upper, lower).unwrap();
    }
    planes
}

#[test]
fn codes_of_weights_that_differ_in_importance_are_those_of_core() {
    let mut noise = Noise::new(37);
    for k in [7, 172, 640] {
        let w = weights(&mut noise, 40, k);
        let importance: Vec<f32> = (0..k).map(|_| 2f32.powf(8.0 * noise.unit() - 4.0)).collect();
        for both in [false, true] {
            let quantise = if both { quantize_row } else { quantize_row_upper };
            let rows: Vec<Row> = w.chunks_exact(k).map(|w| quantise(w, &importance, GROUP).unwrap()).collect();
            assert!(rows.iter().zip(w.chunks_exact(k)).any(|(row, w)| *row != quantized(w, both)), "of no effect");
            for simd in paths() {
                let planes = planes_from(simd, &w, &importance, k, if both { 0 } else { 2 });
                for (n, row) in rows.iter().enumerate() {
                    let mut back = vec![f32::NAN; k];
                    planes.row(n, &mut back);
                    assert_eq!(bits(&back), bits(&row.both()), "row {n} of {k}, both {both}, {simd:?}");
                }
            }
        }
    }
}

#[test]
fn codes_are_those_of_core_and_come_back_as_core_s_values() {
    let mut noise = Noise::new(31);
    for (k, both) in [7, 64, 172, 1376].into_iter().flat_map(|k| [(k, true), (k, false)]) {
        let mut w = weights(&mut noise, 45, k);
        on_grids(&mut w[5 * k..], k);
        for (n, row) in w.chunks_exact_mut(k).enumerate().skip(2).take(30) {
            row.iter_mut().for_each(|w| *w *= 2f32.powi(n as i32 - 22));
        }
        w[3 * k] = 900.0;
        let rows: Vec<Row> = w.chunks_exact(k).map(|row| quantized(row, both)).collect();
        for simd in paths() {
            let planes = planes(simd, &w, k, both);
            for (n, want) in rows.iter().enumerate() {
                let (upper, lower) = planes.column(n / PANEL, n % PANEL / TILE_ROWS);
                for (c, code) in want.codes.iter().enumerate() {
                    let (g, i, lane) = (c / GROUP, c % GROUP, n % TILE_ROWS);
                    let tile = &upper[g * UPPER..][..UPPER];
                    assert_eq!(param(tile, lane), want.params[g].scale.to_f32());
                    assert_eq!(param(tile, 16 + lane), want.params[g].zero.to_f32());
                    let (at, shift) = (i / 8 * 64 + lane * 4 + i % 4, i % 8 / 4 * 4);
                    let (u, l) = (tile[PARAMS + at] >> shift & 15, lower_tile(lower, g)[at] >> shift & 15);
                    assert_eq!(u << 4 | l, *code, "row {n}, k {c}, {simd:?}");
                }
                let mut back = vec![f32::NAN; k];
                planes.row(n, &mut back);
                assert_eq!(bits(&back), bits(&want.both()));
            }
            // Blocks of a panel, as read by a prompt's GEMMs.
            let even = 2 * k.div_ceil(2);
            let (mut values, mut pairs) = (vec![f32::NAN; even * PANEL], vec![0; even * PANEL]);
            planes.values(simd, 0, 0, even, &mut values);
            planes.pairs(simd, 0, 0, even, &mut pairs);
            for (n, row) in rows.iter().take(PANEL).enumerate() {
                for (c, want) in row.both().into_iter().enumerate() {
                    assert_eq!(values[c * PANEL + n].to_bits(), want.to_bits(), "row {n}, k {c}, {simd:?}");
                    assert_eq!(pairs[c / 2 * 2 * PANEL + 2 * n + c % 2], bf16_bits(want));
                }
            }
            if k > 2 * GROUP {
                let mut part = vec![f32::NAN; GROUP * PANEL];
                planes.values(simd, 0, GROUP, GROUP, &mut part);
                assert_eq!(bits(&part), bits(&values[GROUP * PANEL..][..GROUP * PANEL]));
            }
        }
    }
}

/// More rows than one pass of VNNI has: with AMX, tiles.
const MANY: usize = ROWS + 1;

/// GEMM of m rows with panel 0.
fn gemms(simd: Simd, planes: &Planes, read: Read, x: &[f32], m: usize) -> Vec<f32> {
    let (k, mut y) = (planes.k, vec![f32::NAN; m * PANEL]);
    if read.takes_f32(simd) {
        planes.panel_f32(simd, 0, &padded(x, k), row_stride(k), m, &mut y);
    } else {
        let mut acts = Acts::zeros(m, k).unwrap();
        acts.quantize(simd, read, x, k, m, k);
        assert!(acts.fits(planes, m));
        planes.panel(simd, read, 0, &acts, m, &mut y);
    }
    y
}

#[test]
fn gemms_are_those_of_core_s_values_and_rows_do_not_affect_each_other() {
    // With AMX, two passes of nine rows.
    const MOST: usize = 18;
    let mut noise = Noise::new(32);
    // Planes to read, and the largest effect of the activations' rounding.
    let reads = [
        (Read::Target, true, 1e-4),
        (Read::Target, false, 1e-4),
        (Read::Both, true, 1e-2),
        (Read::Upper, true, 1e-2),
        (Read::Upper, false, 1e-2),
    ];
    for (k, (read, both, bound)) in [7, 64, 100, 704].into_iter().flat_map(|k| reads.map(|read| (k, read))) {
        let (mut w, x) = (weights(&mut noise, PANEL, k), noise.normals(MOST * k));
        on_grids(&mut w[5 * k..], k);
        let planes = planes(Simd::Scalar, &w, k, both);
        let rows: Vec<Row> = w.chunks_exact(k).map(|row| quantized(row, both)).collect();
        let exact: Vec<f64> = (0..MOST * PANEL)
            .map(|i| {
                let (x, row) = (&x[i / PANEL * k..][..k], &rows[i % PANEL]);
                let w = if read == Read::Upper { row.upper() } else { row.both() };
                x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(w)).sum()
            })
            .collect();
        for simd in paths() {
            let alone: Vec<f32> = x.chunks_exact(k).flat_map(|x| gemms(simd, &planes, read, x, 1)).collect();
            let off = distance(&alone, &exact);
            assert!(off < bound, "{read:?}, both {both}, {simd:?}, k {k}: {off}");
            for m in 1..=MOST {
                let y = gemms(simd, &planes, read, &x[..m * k], m);
                assert_eq!(bits(&y), bits(&alone[..m * PANEL]), "{m} rows, {read:?} {simd:?} k {k}");
            }
        }
    }
}

/// So neither the kernel nor the number of rows that share its pass can change a token.
#[cfg(target_arch = "x86_64")]
#[test]
fn f32_activations_have_the_bits_of_the_portable_kernel() {
    if !paths().contains(&Simd::Avx2) {
        return;
    }
    let mut noise = Noise::new(38);
    for (k, both) in [7, 64, 100, 704].into_iter().flat_map(|k| [(k, true), (k, false)]) {
        let planes = planes(Simd::Scalar, &weights(&mut noise, PANEL, k), k, both);
        for m in 1..=SINGLE_ROWS {
            let x = padded(&noise.normals(m * k), k);
            let mut y = vec![f32::NAN; m * PANEL];
            planes.panel_f32(Simd::Avx2, 0, &x, row_stride(k), m, &mut y);
            for half in 0..HALVES {
                let (upper, lower) = planes.column(0, half);
                let mut want = vec![f32::NAN; m * PANEL];
                singles_body::<true>(upper, lower, &x, row_stride(k), m, &mut want);
                for (y, want) in y.chunks_exact(PANEL).zip(want.chunks_exact(PANEL)) {
                    assert_eq!(bits(&y[half * TILE_ROWS..][..TILE_ROWS]), bits(&want[..TILE_ROWS]), "k {k}, {m} rows");
                }
            }
        }
    }
}

#[test]
fn integer_sums_do_not_overflow_and_the_draft_reads_no_lower_nibble() {
    // The largest codes with the largest activations, of every sign.
    let k = 2 * GROUP;
    let w: Vec<f32> = (0..PANEL * k).map(|i| if i % GROUP == i / k % GROUP { 0.0 } else { 0.3 }).collect();
    let mut planes = planes(Simd::Scalar, &w, k, true);
    let rows: Vec<Row> = w.chunks_exact(k).map(|row| quantized(row, true)).collect();
    assert!(rows.iter().all(|row| row.codes.iter().any(|code| code >> 4 == 15)));
    for sign in [1.0, -1.0] {
        let x = vec![sign * 3.0; k];
        for simd in paths() {
            for (read, m) in
                [Read::Target, Read::Both, Read::Upper].into_iter().flat_map(|read| [(read, 1), (read, MANY)])
            {
                let y = gemms(simd, &planes, read, &x.repeat(m), m);
                for (y, row) in y.iter().zip(rows.iter().cycle()) {
                    let w = if read == Read::Upper { row.upper() } else { row.both() };
                    let want = sign * 3.0 * w.iter().sum::<f32>();
                    assert!((y - want).abs() < 0.1, "{read:?} {simd:?}: {y}, not {want}");
                }
            }
        }
    }
    let x = Noise::new(33).normals(k);
    let before: Vec<_> = paths().into_iter().map(|simd| gemms(simd, &planes, Read::Upper, &x, 1)).collect();
    planes.lower.fill(0x5a);
    let after: Vec<_> = paths().into_iter().map(|simd| gemms(simd, &planes, Read::Upper, &x, 1)).collect();
    assert!(before.iter().zip(&after).all(|(a, b)| bits(a) == bits(b)));
}

#[test]
fn the_last_panels_alone_may_have_both_planes() {
    let (mut noise, k, m) = (Noise::new(36), 100, MANY);
    let w = weights(&mut noise, 2 * PANEL, k);
    let x = noise.normals(m * k);
    let (first, last) = w.split_at(PANEL * k);
    for simd in paths() {
        let mixed = planes_from(simd, &w, &[], k, 1);
        assert_eq!(mixed.bytes(), Planes::bytes_of(2, k, 1));
        // Drafts read both planes of such panels.
        for (read, of_last) in [(Read::Target, Read::Target), (Read::Upper, Read::Both)] {
            let mut acts = Acts::zeros(m, k).unwrap();
            acts.quantize(simd, read, &x, k, m, k);
            for (index, rows, both, read_alone) in [(0, first, false, read), (1, last, true, of_last)] {
                let mut y = vec![f32::NAN; m * PANEL];
                if read.takes_f32(simd) {
                    mixed.panel_f32(simd, index, &padded(&x, k), row_stride(k), m, &mut y);
                } else {
                    mixed.panel(simd, read, index, &acts, m, &mut y);
                }
                let alone = planes(simd, rows, k, both);
                assert_eq!(bits(&y), bits(&gemms(simd, &alone, read_alone, &x, m)), "{read:?} {simd:?}");
                let (mut here, mut there) = (vec![0.0; k], vec![0.0; k]);
                mixed.row(index * PANEL + 5, &mut here);
                alone.row(5, &mut there);
                assert_eq!(bits(&here), bits(&there));
            }
        }
    }
}

#[test]
fn nan_activations_reach_the_result_of_a_gemm() {
    let k = 3 * GROUP;
    let planes = planes(Simd::Scalar, &weights(&mut Noise::new(34), PANEL, k), k, true);
    for simd in paths() {
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY] {
            let mut x = Noise::new(35).normals(k);
            x[GROUP + 5] = bad;
            for (read, m) in
                [Read::Target, Read::Both, Read::Upper].into_iter().flat_map(|read| [(read, 1), (read, MANY)])
            {
                let y = gemms(simd, &planes, read, &x.repeat(m), m);
                // The constant row's scale is 0, and 0 times infinity is also NaN.
                assert!(y.iter().all(|y| !y.is_finite()), "{bad} {read:?} {simd:?}");
            }
        }
    }
}
