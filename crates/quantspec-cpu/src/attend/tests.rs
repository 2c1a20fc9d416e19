use super::*;
use crate::quantize;
use crate::testing::{Noise, bits, distance, paths};
use half::f16;
use quantspec_core::attend as core;
use quantspec_core::cache::{BUFFER_TOKENS, visible_pages};
use quantspec_core::config::View;
use quantspec_core::quantize::quantize_page;

/// Tokens of one KV head, in core's form and in that of the kernels.
struct Head {
    shape: Shape,
    rounding: Rounding,
    keys: Vec<f16>,
    values: Vec<f16>,
    upper: Vec<Vec<u8>>,
    lower: Vec<Vec<u8>>,
    full: Vec<Vec<u16>>,
}

fn halves(x: &[f16]) -> Vec<u16> {
    x.iter().map(|x| x.to_bits()).collect()
}

impl Head {
    fn new(noise: &mut Noise, d: usize, tokens: usize, rounding: Rounding) -> Head {
        let shape = Shape::new(d);
        // Some channels are much larger than others, and biased, like real keys.
        let gain: Vec<f32> = (0..d).map(|c| if c % 29 == 3 { 12.0 } else { 1.0 }).collect();
        let mut draw = |biased: bool| -> Vec<f16> {
            let x = noise.normals(tokens * d).into_iter().enumerate();
            x.map(|(i, x)| f16::from_f32(if biased { gain[i % d] * (x + 0.3) } else { x })).collect()
        };
        let (keys, mut values) = (draw(true), draw(false));
        values[3 * d..4 * d].fill(f16::ZERO);
        let mut head = Head { shape, rounding, keys, values, upper: vec![], lower: vec![], full: vec![] };
        for page in 0..tokens / G {
            let at = page * G * d..(page + 1) * G * d;
            let kv = (halves(&head.keys[at.clone()]), halves(&head.values[at]));
            let (mut upper, mut lower) = (vec![0; shape.upper_bytes()], vec![0; shape.lower_bytes()]);
            let mut scratch = quantize::Scratch::new(shape);
            quantize::page(Simd::Scalar, shape, rounding, (&kv.0, &kv.1), &mut scratch, &mut upper, &mut lower)
                .unwrap();
            let mut full = vec![0; shape.full_len()];
            for t in 0..G {
                put_token(&mut full, d, t, &kv.0[t * d..][..d], &kv.1[t * d..][..d]);
            }
            head.upper.push(upper);
            head.lower.push(lower);
            head.full.push(full);
        }
        head
    }

    /// The kernels' output for rows at `position`, all fed together: pages of the view, then the recent tokens.
    fn attend(&self, simd: Simd, q: &[f32], rows: usize, position: usize, planes: Option<Planes>) -> Vec<f32> {
        let d = self.shape.d;
        let mut state = State::new(rows, self.shape).unwrap();
        let scale = std::f32::consts::LOG2_E / (d as f32).sqrt();
        for r in 0..rows {
            state.set_query(r, &q[r * d..][..d], scale);
        }
        let pages = visible_pages(position);
        let mut parts = vec![0f32; rows * 2 * (2 + d)];
        for part in 0..2 {
            state.reset(rows);
            for page in if part == 0 { 0..pages } else { pages..position / G + 1 } {
                match planes.filter(|_| part == 0) {
                    Some(planes) => {
                        let next = (page + 1 < pages).then(|| (&self.upper[page + 1][..], &self.lower[page + 1][..]));
                        let (upper, lower) = (&self.upper[page], &self.lower[page]);
                        nibble_page(simd, &mut state, 0..rows, planes, self.rounding, upper, lower, next);
                    }
                    None => {
                        let visible = vec![G.min(position + 1 - page * G); rows];
                        let next = self.full.get(page + 1).map(|page| &page[..]);
                        full_page(simd, &mut state, 0..rows, &self.full[page], &visible, next);
                    }
                }
            }
            let shared = DisjointSlice::new(&mut parts);
            // SAFETY: one thread, and one slice alive at a time.
            state.finish(rows, |r| unsafe { shared.slice((2 * r + part) * (2 + d), 2 + d) });
        }
        let mut out = vec![f32::NAN; rows * d];
        for r in 0..rows {
            merge(simd, &parts[2 * r * (2 + d)..][..2 * (2 + d)], 2 + d, &mut out[r * d..][..d]);
        }
        out
    }

    fn exact(&self, q: &[f32], position: usize, view: View) -> Vec<f64> {
        let d = self.shape.d;
        let mut ring = [vec![f16::ZERO; BUFFER_TOKENS * d], vec![f16::ZERO; BUFFER_TOKENS * d]];
        for t in visible_pages(position) * G..=position {
            let at = quantspec_core::cache::ring_index(t) * d;
            ring[0][at..at + d].copy_from_slice(&self.keys[t * d..][..d]);
            ring[1][at..at + d].copy_from_slice(&self.values[t * d..][..d]);
        }
        let page = |x: &'_ [f16], page: usize| x[page * G * d..(page + 1) * G * d].to_vec();
        let count = self.upper.len();
        let pages: Vec<_> = (0..count)
            .map(|i| quantize_page(&page(&self.keys, i), &page(&self.values, i), d, self.rounding).unwrap())
            .collect();
        let full: Vec<_> = (0..count)
            .map(|i| core::FullPage {
                keys: &self.keys[i * G * d..(i + 1) * G * d],
                values: &self.values[i * G * d..(i + 1) * G * d],
            })
            .collect();
        let cache = core::Cache {
            head_dim: d,
            rounding: self.rounding,
            pages: &pages,
            full: &full,
            buffer_keys: &ring[0],
            buffer_values: &ring[1],
        };
        let all: Vec<usize> = (0..visible_pages(position)).collect();
        core::attend(q, position, view, &all, &cache).unwrap()
    }
}

#[test]
fn every_view_matches_core_and_rows_do_not_affect_each_other() {
    let mut noise = Noise::new(21);
    // Three tiles of two limbs, two tiles of one limb.
    const ROWS: usize = 19;
    const DRAWN: usize = 11;
    for d in [8, 24, 64, 80, 128, 256] {
        for rounding in [Rounding::Balanced, Rounding::Paper] {
            let head = Head::new(&mut noise, d, 6 * G, rounding);
            let position = 5 * G + 77;
            let mut q = noise.normals(DRAWN * d);
            q.extend_from_within(..(ROWS - DRAWN) * d);
            for (planes, view, bound) in [
                (Some(Planes::Both), View::Both, 1e-3),
                (Some(Planes::Upper), View::Upper, 1e-3),
                (Some(Planes::UpperCoarse), View::Upper, 6e-2),
                (None, View::Full, 2e-6),
            ] {
                let exact: Vec<f64> = q.chunks(d).flat_map(|q| head.exact(q, position, view)).collect();
                for simd in paths() {
                    let found = head.attend(simd, &q, ROWS, position, planes);
                    let error = distance(&found, &exact);
                    assert!(error < bound, "D {d}, {planes:?}, {rounding:?}, {simd:?}: off by {error}");
                    for rows in [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, ROWS] {
                        let first = ROWS - rows;
                        let some = head.attend(simd, &q[first * d..], rows, position, planes);
                        assert!(bits(&some) == bits(&found[first * d..]), "{rows} rows, D {d}, {planes:?}, {simd:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_query_of_nan_has_no_finite_result() {
    let mut noise = Noise::new(26);
    const ROWS: usize = 9;
    for d in [8, 64, 128] {
        let head = Head::new(&mut noise, d, 6 * G, Rounding::Balanced);
        let q = noise.normals(ROWS * d);
        for planes in [Some(Planes::Both), Some(Planes::Upper), Some(Planes::UpperCoarse), None] {
            // Contexts with pages of the view, and within the first page of recent tokens.
            for (simd, position) in paths().into_iter().flat_map(|simd| [(simd, 5 * G + 77), (simd, 20)]) {
                let expected = head.attend(simd, &q, ROWS, position, planes);
                for (bad, at) in [(f32::NAN, 0), (f32::NAN, d - 1), (f32::INFINITY, 3), (f32::NEG_INFINITY, 3)] {
                    let mut q = q.clone();
                    q[4 * d + at] = bad;
                    let found = head.attend(simd, &q, ROWS, position, planes);
                    for (r, (found, expected)) in found.chunks(d).zip(expected.chunks(d)).enumerate() {
                        let right =
                            if r == 4 { found.iter().all(|x| !x.is_finite()) } else { bits(found) == bits(expected) };
                        assert!(right, "{bad} in row 4, row {r}, D {d}, {planes:?}, {simd:?}, position {position}");
                    }
                }
            }
        }
    }
}

#[test]
fn tiles_change_no_bit() {
    if !paths().contains(&Simd::Amx) {
        return;
    }
    let mut noise = Noise::new(24);
    const ROWS: usize = 9;
    for d in [8, 72, 128, 200, 256, 264] {
        let head = Head::new(&mut noise, d, 5 * G, Rounding::Balanced);
        let q = noise.normals(ROWS * d);
        for planes in [Planes::Both, Planes::Upper, Planes::UpperCoarse] {
            let [tiles, vectors] =
                [Simd::Amx, Simd::Avx512].map(|simd| head.attend(simd, &q, ROWS, 4 * G + 9, Some(planes)));
            assert!(bits(&tiles) == bits(&vectors), "D {d}, {planes:?}");
        }
    }
}

#[test]
fn rows_that_see_different_tokens_of_a_page_do_not_affect_each_other() {
    let mut noise = Noise::new(25);
    for d in [8, 40, 64, 128] {
        let head = Head::new(&mut noise, d, G, Rounding::Balanced);
        let q = noise.normals(9 * d);
        let visible = [1, 1, 15, 16, 17, 64, 65, 127, 128];
        let run = |simd: Simd, rows: std::ops::Range<usize>| {
            let mut state = State::new(rows.len(), head.shape).unwrap();
            for (r, q) in q.chunks(d).skip(rows.start).take(rows.len()).enumerate() {
                state.set_query(r, q, 0.1);
            }
            state.reset(rows.len());
            full_page(simd, &mut state, 0..rows.len(), &head.full[0], &visible[rows.clone()], None);
            let mut out = vec![0f32; rows.len() * (2 + d)];
            let shared = DisjointSlice::new(&mut out);
            // SAFETY: one thread, and one slice alive at a time.
            state.finish(rows.len(), |r| unsafe { shared.slice(r * (2 + d), 2 + d) });
            out
        };
        for simd in paths() {
            let all = run(simd, 0..9);
            for r in 0..9 {
                assert!(bits(&run(simd, r..r + 1)) == bits(&all[r * (2 + d)..][..2 + d]), "row {r}, D {d}, {simd:?}");
            }
        }
    }
}

#[test]
fn page_scores_are_those_of_core() {
    let mut noise = Noise::new(22);
    for d in [8, 80, 128] {
        for rounding in [Rounding::Balanced, Rounding::Paper] {
            let head = Head::new(&mut noise, d, G, rounding);
            let page = quantize_page(&head.keys, &head.values, d, rounding).unwrap();
            let mut ranges = vec![f32::NAN; 2 * d];
            for queries in 1..6 {
                let q = noise.normals(queries * d);
                let scores = q.chunks(d).map(|q| core::page_score(q, &page.key_params, rounding));
                let want = scores.fold(f32::NEG_INFINITY, f32::max);
                for simd in paths() {
                    let found = page_score(simd, head.shape, rounding, &q, &head.upper[0], &mut ranges);
                    assert!((found - want).abs() < 1e-5 * want.abs(), "{found}, not {want}");
                }
            }
        }
    }
}

#[test]
fn a_dominant_score_gets_all_weight_and_uniform_scores_share_it() {
    let mut noise = Noise::new(23);
    let (d, position) = (64, 4 * G - 1);
    let mut head = Head::new(&mut noise, d, 4 * G, Rounding::Balanced);
    for simd in paths() {
        let zeros = vec![0.0; d];
        let mean = head.attend(simd, &zeros, 1, position, Some(Planes::Both));
        assert!(distance(&mean, &head.exact(&zeros, position, View::Both)) < 2e-3);
        // A query that matches the newest key only: all other weights are exp(-80).
        let newest: Vec<f32> = head.keys[position * d..].iter().map(|x| x.to_f32()).collect();
        let length: f32 = newest.iter().map(|x| x * x).sum();
        let q: Vec<f32> = newest.iter().map(|x| x * 4000.0 / length).collect();
        let one = head.attend(simd, &q, 1, position, Some(Planes::Both));
        assert!(distance(&one, &head.exact(&q, position, View::Both)) < 2e-3);
    }
    // Constant values have steps of zero.
    head.values.fill(f16::from_f32(0.5));
    let head = {
        let mut flat = Head::new(&mut noise, d, 4 * G, Rounding::Balanced);
        flat.values = head.values;
        for page in 0..4 {
            let at = page * G * d..(page + 1) * G * d;
            let kv = (halves(&flat.keys[at.clone()]), halves(&flat.values[at]));
            let mut scratch = quantize::Scratch::new(flat.shape);
            let (upper, lower) = (&mut flat.upper[page], &mut flat.lower[page]);
            quantize::page(Simd::Scalar, flat.shape, flat.rounding, (&kv.0, &kv.1), &mut scratch, upper, lower)
                .unwrap();
            for t in 0..G {
                put_token(&mut flat.full[page], d, t, &kv.0[t * d..][..d], &kv.1[t * d..][..d]);
            }
        }
        flat
    };
    for simd in paths() {
        for planes in [Planes::Both, Planes::Upper, Planes::UpperCoarse] {
            let found = head.attend(simd, &noise.normals(d), 1, position, Some(planes));
            assert!(found.iter().all(|x| (x - 0.5).abs() < 1e-4), "{planes:?} on {simd:?}");
        }
    }
}
