//! Decode attention compared with quantspec-core in f64, its row invariance bit by bit, and the choice of pages.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod gpu;
#[path = "gpu/model.rs"]
mod small;

use gpu::{Random, arranged, config, device, distance, limb_groups, poisoned, run, while_busy};
use half::f16;
use quantspec_core::attend::{
    Cache, FullPage, SNAP_QUERIES, attend, attend_local, page_masses, page_score, select_pages, snap_pages,
    window_pages,
};
use quantspec_core::cache::{BUFFER_TOKENS, G, ring_index, visible_pages, visible_quantised};
use quantspec_core::config::{Dtype, Local, ModelConfig, Rounding, View};
use quantspec_core::layout::Layout;
use quantspec_core::quantize::{Page, quantize_page};
use quantspec_cuda::args;
use quantspec_cuda::attend::{Attend, Chosen, Codes, Layer, Neighbours, PageChoice, SliceAddresses, StepSlice};
use quantspec_cuda::device::{Buffer, Device};
use quantspec_cuda::linear::Form;
use quantspec_cuda::masses::PageMasses;
use quantspec_model::backend::{Block, Options, Row};
use small::options;
use std::sync::Arc;

/// One slot's cache of one layer on the host.
struct Slot {
    /// [kv head][token][d]
    keys: Vec<Vec<f16>>,
    values: Vec<Vec<f16>>,
    pages: Vec<Vec<Page>>,
}

/// The int8 input of an output projection: codes, and {scale, sum} of groups of 128.
#[derive(Debug, PartialEq)]
struct Merged {
    codes: Vec<u8>,
    scales: Vec<f32>,
}

impl Merged {
    /// The distance to `want`, in excess of the rounding to codes.
    fn distance(&self, want: &[f64]) -> f64 {
        let mut nearest = vec![0.0f32; want.len()];
        for (group, want) in want.chunks(128).enumerate() {
            let (scale, sum) = (self.scales[group * 2], self.scales[group * 2 + 1]);
            let codes = self.codes[group * 128..][..128].iter().map(|&code| code.cast_signed());
            assert_eq!(sum, scale * codes.clone().map(f32::from).sum::<f32>());
            assert!(codes.skip(want.len()).all(|code| code == 0), "codes beyond the last head");
            for (i, &want) in want.iter().enumerate() {
                let value = f32::from(self.codes[group * 128 + i].cast_signed()) * scale;
                nearest[group * 128 + i] = (want as f32).clamp(value - 0.501 * scale, value + 0.501 * scale);
            }
        }
        distance(&nearest, want)
    }
}

/// A layer with two slots on host and device; the second slot is under test.
struct World {
    device: Arc<Device>,
    config: ModelConfig,
    rounding: Rounding,
    slot: Slot,
    tokens: usize,
    pools: [Buffer; 3],
    rings: [Buffer; 2],
    tables: Buffer,
    table: Vec<i32>,
    attend: Attend,
}

const SLOTS: usize = 2;
const SLOT: usize = 1;

impl World {
    /// `tokens` cached tokens; the ring is that of a decoder that has just written the last of them.
    fn new(device: &Arc<Device>, config: ModelConfig, rounding: Rounding, tokens: usize, seed: u64) -> World {
        let mut random = Random(seed);
        let (d, heads) = (config.head_dim, config.kv_heads);
        let mut tensor = |outlier: f32| -> Vec<Vec<f16>> {
            let channel = |c: usize| {
                if c == 3 {
                    (outlier, 0.0)
                } else if c == 17 {
                    (1.0, 5.0)
                } else {
                    (1.0, 0.0)
                }
            };
            (0..heads)
                .map(|_| {
                    (0..tokens * d)
                        .map(|i| {
                            let (scale, shift) = channel(i % d);
                            f16::from_f32(random.normal() * scale + shift)
                        })
                        .collect()
                })
                .collect()
        };
        let (keys, values) = (tensor(20.0), tensor(1.0));
        let count = tokens / G;
        let pages: Vec<Vec<Page>> = (0..heads)
            .map(|head| {
                let page = |page: usize| {
                    let range = page * G * d..(page + 1) * G * d;
                    quantize_page(&keys[head][range.clone()], &values[head][range], d, rounding).unwrap()
                };
                (0..count).map(page).collect()
            })
            .collect();
        // A permuted table with a hole, so that reading a wrong page fails.
        let physical = |page: usize| (page * 7 + 3) % (count + 2).next_power_of_two().max(8);
        let room = (count + 2).next_power_of_two().max(8);
        let (up, low, full) = (Layout::Cuda.upper_bytes(d), Layout::Cuda.lower_bytes(d), 4 * G * d);
        let mut pools =
            [vec![0xffu8; room * heads * up], vec![0xffu8; room * heads * low], vec![0xffu8; room * heads * full]];
        for (head, of_head) in pages.iter().enumerate() {
            for (page, content) in of_head.iter().enumerate() {
                let blocks = Layout::Cuda.pack(content).unwrap();
                let block = physical(page) * heads + head;
                pools[0][block * up..][..up].copy_from_slice(&blocks.upper);
                pools[1][block * low..][..low].copy_from_slice(&blocks.lower);
                let range = page * G * d..(page + 1) * G * d;
                let both = keys[head][range.clone()].iter().chain(&values[head][range]);
                let bytes: Vec<u8> = both.flat_map(|v| v.to_le_bytes()).collect();
                pools[2][block * full..][..full].copy_from_slice(&bytes);
            }
        }
        let ring = |from: &[Vec<f16>]| -> Buffer {
            let mut ring = vec![f16::ZERO; SLOTS * heads * BUFFER_TOKENS * d];
            for (head, from) in from.iter().enumerate() {
                for token in tokens.saturating_sub(BUFFER_TOKENS)..tokens {
                    let at = ((SLOT * heads + head) * BUFFER_TOKENS + ring_index(token)) * d;
                    ring[at..at + d].copy_from_slice(&from[token * d..(token + 1) * d]);
                }
            }
            device.copied(&ring).unwrap()
        };
        let mut table = vec![0i32; SLOTS * count.max(1)];
        for page in 0..count {
            table[SLOT * count.max(1) + page] = physical(page) as i32;
        }
        World {
            attend: Attend::new(device, &config, rounding).unwrap(),
            rings: [ring(&keys), ring(&values)],
            tables: device.copied(&table).unwrap(),
            table,
            pools: pools.map(|pool| device.copied(&pool).unwrap()),
            slot: Slot { keys, values, pages },
            device: device.clone(),
            config,
            rounding,
            tokens,
        }
    }

    fn layer(&self, lists: u64) -> Layer {
        Layer {
            upper: self.pools[0].at(0),
            lower: self.pools[1].at(0),
            full: self.pools[2].at(0),
            ring_k: self.rings[0].at(0),
            ring_v: self.rings[1].at(0),
            lists,
        }
    }

    fn addresses(&self, slice: &StepSlice, list_pitch: usize) -> (SliceAddresses, Vec<Buffer>) {
        let rows = self.attend.partial_rows(slice.merged.len());
        let buffers = vec![
            self.device.copied(&slice.spans).unwrap(),
            self.device.copied(&slice.tiles).unwrap(),
            self.device.copied(&slice.merged).unwrap(),
            poisoned(&self.device, rows * self.config.head_dim * 4),
            poisoned(&self.device, rows * 8),
        ];
        let addresses = SliceAddresses {
            spans: buffers[0].at(0),
            tiles: buffers[1].at(0),
            merged: buffers[2].at(0),
            tables: self.tables.at(0),
            table_pitch: self.table.len() / SLOTS,
            list_pitch,
            partial: buffers[3].at(0),
            extremes: buffers[4].at(0),
        };
        (addresses, buffers)
    }

    /// Attention of consecutive rows from `position` on; q f16 [row][heads][d], scaled as by the append kernel.
    fn run(&self, view: View, position: usize, q: &[f16], chosen: Option<(Chosen, u64, usize)>) -> Vec<f32> {
        let rows = q.len() / (self.config.heads * self.config.head_dim);
        let rows: Vec<Row> = (0..rows).map(|i| Row { slot: SLOT, offset: i, position: position + i }).collect();
        self.run_rows(view, &rows, q, chosen)
    }

    /// A draft's rows of both slots between its GEMMs; returns the codes of the last row. Short splits use blocks with half an
    /// SM, and the following weights are prefetched.
    fn between(&self, rows: &[Row], q: &[f16], chosen: Option<(Chosen, u64, usize)>) -> Merged {
        let width = self.config.heads * self.config.head_dim;
        let groups = width.div_ceil(128);
        let q = self.device.copied(q).unwrap();
        let (x, xs) =
            (poisoned(&self.device, rows.len() * groups * 128), poisoned(&self.device, rows.len() * groups * 8));
        // The same as a panel, which has room for eight rows.
        let (panel, panel_scales) = (poisoned(&self.device, 8 * groups * 128), poisoned(&self.device, 8 * groups * 8));
        let prefetch = (self.pools[0].at(0), self.pools[0].bytes());
        let neighbours = Neighbours { half_sm: true, prefetch, codes: None };
        let list = |slot| chosen.map(|(chosen, ..)| chosen).filter(|_| slot == SLOT);
        // Lists are of an earlier step.
        let slice = self.attend.slices(View::Upper, rows, list, |_| false, false).unwrap().remove(0);
        let (addresses, _keep) = self.addresses(&slice, chosen.map_or(0, |(.., pitch)| pitch));
        let layer = self.layer(chosen.map_or(0, |(_, lists, _)| lists));
        // SAFETY: everything lives until the reads below, which wait.
        unsafe {
            self.attend.run(View::Upper, &slice, q.at(0), &layer, &addresses, neighbours).unwrap();
            self.attend.merge(&slice, Form::Int8, x.at(0), xs.at(0), groups * 128, 0, &addresses).unwrap();
            let (x, xs) = (panel.at(0), panel_scales.at(0));
            self.attend.merge(&slice, Form::Int8, x, xs, groups * 128, rows.len(), &addresses).unwrap();
        }
        let all = (x.read::<i8>(0, rows.len() * groups * 128).unwrap(), xs.read::<f32>(0, rows.len() * groups * 2));
        let (codes, scales) = arranged(&all.0, &all.1.unwrap(), rows.len(), groups, rows.len());
        let (got, got_scales) =
            (panel.read::<i8>(0, codes.len()).unwrap(), panel_scales.read::<f32>(0, scales.len()).unwrap());
        for place in (0..8 * groups).filter(|&place| scales[place * 2].is_finite()) {
            assert!(got[place * 128..][..128] == codes[place * 128..][..128], "codes at place {place} of a panel");
            assert_eq!(got_scales[place * 2..][..2], scales[place * 2..][..2], "scales at place {place} of a panel");
        }
        let exact = poisoned(&self.device, rows.len() * width * 4);
        // SAFETY: as above.
        unsafe { self.attend.merge(&slice, Form::Plain(Dtype::F32), exact.at(0), 0, width, 0, &addresses) }.unwrap();
        let exact = exact.read::<f32>(0, rows.len() * width).unwrap();
        for form in [Form::Plain(Dtype::Bf16), Form::Plain(Dtype::F16), Form::Limbs] {
            let groups = if form == Form::Limbs { limb_groups(width) } else { width / 64 };
            let [row_major, panel] = [0, rows.len()].map(|panels| {
                let (x, xs) = (poisoned(&self.device, 8 * groups * 128), self.device.zeroed(8 * groups * 8).unwrap());
                // SAFETY: as above.
                unsafe { self.attend.merge(&slice, form, x.at(0), xs.at(0), groups * 64, panels, &addresses) }.unwrap();
                (x.read::<i8>(0, 8 * groups * 128).unwrap(), xs.read::<f32>(0, 8 * groups * 2).unwrap())
            });
            let (want, scales) = arranged(&row_major.0, &row_major.1, rows.len(), groups, rows.len());
            for place in (0..8 * groups).filter(|&place| scales[place * 2].is_finite()) {
                let same = panel.0[place * 128..][..128] == want[place * 128..][..128]
                    && panel.1[place * 2..][..2] == scales[place * 2..][..2];
                assert!(same, "{form:?}: place {place} of a panel");
            }
            if form == Form::Limbs {
                for (at, &x) in exact.iter().enumerate() {
                    let (group, i) = (at / width * groups + at % width / 64, at % 64);
                    let limbs = &row_major.0[group * 128..][..128];
                    let got = (256 * i32::from(limbs[i]) + i32::from(limbs[64 + i])) as f32 * row_major.1[group * 2];
                    assert!((got - x).abs() <= 0.51 * row_major.1[group * 2], "limbs of channel {at}: {got}, {x}");
                }
            }
        }
        let last = rows.len() - 1;
        Merged {
            codes: x.read::<u8>(last * groups * 128, groups * 128).unwrap(),
            scales: xs.read::<f32>(last * groups * 8, groups * 2).unwrap(),
        }
    }

    /// The same for one row; the result must not depend on the other row.
    fn run_between(&self, position: usize, q: &[f16], chosen: Option<(Chosen, u64, usize)>) -> Merged {
        let row = Row { slot: SLOT, offset: 0, position };
        let alone = self.between(&[row], q, chosen);
        let both = self.between(&[Row { slot: 1 - SLOT, offset: 0, position: 7 }, row], &[q, q].concat(), chosen);
        assert_eq!(alone, both, "next to another row, position {position}");
        alone
    }

    fn run_rows(&self, view: View, rows: &[Row], q: &[f16], chosen: Option<(Chosen, u64, usize)>) -> Vec<f32> {
        self.run_divided(view, rows, q, chosen, false)
    }

    /// `drafts` as in [`Attend::slices`].
    fn run_divided(
        &self,
        view: View,
        rows: &[Row],
        q: &[f16],
        chosen: Option<(Chosen, u64, usize)>,
        drafts: bool,
    ) -> Vec<f32> {
        let width = self.config.heads * self.config.head_dim;
        let q = self.device.copied(q).unwrap();
        let x = poisoned(&self.device, rows.len() * width * 4);
        let list = |_| chosen.map(|(chosen, ..)| chosen);
        let slices = match &self.config.local {
            Some(local) => self.attend.local_slices(view, rows, local.reach, drafts),
            None => self.attend.slices(view, rows, list, |_| true, drafts),
        };
        for slice in slices.unwrap() {
            let (addresses, _keep) = self.addresses(&slice, chosen.map_or(0, |(.., pitch)| pitch));
            let layer = self.layer(chosen.map_or(0, |(_, lists, _)| lists));
            // SAFETY: everything lives until the wait below.
            unsafe {
                self.attend.run(view, &slice, q.at(0), &layer, &addresses, Neighbours::default()).unwrap();
                self.attend.merge(&slice, Form::Plain(Dtype::F32), x.at(0), 0, width, 0, &addresses).unwrap();
            }
            self.device.synchronize().unwrap();
        }
        x.read::<f32>(0, rows.len() * width).unwrap()
    }

    /// The same by quantspec-core.
    fn want(&self, view: View, position: usize, q: &[f16], pages: &[usize]) -> Vec<f64> {
        let (d, group) = (self.config.head_dim, self.config.group());
        let back = (d as f64).sqrt() / std::f64::consts::LOG2_E;
        let mut out = Vec::new();
        for (index, query) in q.chunks(d).enumerate() {
            let (row, head) = (index / self.config.heads, index % self.config.heads / group);
            let at = position + row;
            let (keys, values) = (&self.slot.keys[head], &self.slot.values[head]);
            let ring = |from: &[f16]| -> Vec<f16> {
                let mut ring = vec![f16::ZERO; BUFFER_TOKENS * d];
                for token in visible_quantised(at)..=at {
                    ring[ring_index(token) * d..][..d].copy_from_slice(&from[token * d..(token + 1) * d]);
                }
                ring
            };
            let full: Vec<FullPage> = (0..self.tokens / G)
                .map(|page| page * G * d..(page + 1) * G * d)
                .map(|range| FullPage { keys: &keys[range.clone()], values: &values[range] })
                .collect();
            let (buffer_keys, buffer_values) = (ring(keys), ring(values));
            let cache = Cache {
                head_dim: d,
                rounding: self.rounding,
                pages: &self.slot.pages[head],
                full: &full,
                buffer_keys: &buffer_keys,
                buffer_values: &buffer_values,
            };
            let query: Vec<f32> = query.iter().map(|v| (v.to_f64() * back) as f32).collect();
            out.extend(match &self.config.local {
                Some(local) => attend_local(&query, at, view, local.reach, &cache).unwrap(),
                None => attend(&query, at, view, pages, &cache).unwrap(),
            });
        }
        out
    }
}

fn queries(random: &mut Random, rows: usize, config: &ModelConfig) -> Vec<f16> {
    let scale = std::f32::consts::LOG2_E / (config.head_dim as f32).sqrt();
    random.normals(rows * config.heads * config.head_dim).iter().map(|v| f16::from_f32(v * scale * 2.0)).collect()
}

const VIEWS: [View; 3] = [View::Upper, View::Both, View::Full];

/// Query heads, KV heads and head width: groups of 1 to 16.
const HEADS: [(usize, usize, usize); 11] = [
    (2, 2, 128),
    (4, 1, 128),
    (3, 1, 128),
    (6, 1, 128),
    (8, 1, 128),
    (12, 1, 128),
    (16, 1, 128),
    (8, 2, 64),
    (5, 1, 64),
    (7, 1, 64),
    (4, 2, 256),
];

/// (position of the first row, rows): windows across page borders and visibility borders.
fn check_against_core(device: &Arc<Device>, shapes: &[(usize, usize, usize)], windows: &[(usize, usize)]) {
    for &(heads, kv_heads, d) in shapes {
        for (index, &(position, rows)) in windows.iter().enumerate() {
            let rounding = if index % 2 == 0 { Rounding::Balanced } else { Rounding::Paper };
            let config = config(heads, kv_heads, d);
            let world = World::new(device, config, rounding, position + rows, index as u64);
            let q = queries(&mut Random(77), rows, &world.config);
            let all: Vec<usize> = (0..visible_pages(position + rows)).collect();
            for view in VIEWS {
                let got = world.run(view, position, &q, None);
                let error = distance(&got, &world.want(view, position, &q, &all));
                assert!(error < 4e-3, "{heads}/{kv_heads} heads of {d}, {rows} rows at {position}, {view:?}: {error}");
            }
            for (row, q) in q.chunks(heads * d).enumerate() {
                let want = world.want(View::Upper, position + row, q, &all);
                let error = world.run_between(position + row, q, None).distance(&want);
                assert!(error < 4e-3, "{heads}/{kv_heads} heads of {d}, a draft's row at {}: {error}", position + row);
            }
        }
    }
}

#[test]
fn edges_equal_core() {
    let Some(device) = device() else { return };
    check_against_core(&device, &HEADS, &[(0, 1), (5, 3), (126, 5), (255, 2), (254, 6), (383, 8), (1000, 5)]);
}

#[test]
fn long_contexts_equal_core() {
    let Some(device) = device() else { return };
    check_against_core(&device, &HEADS, &[(2815, 7), (9470, 5)]);
}

/// A model whose only layer is local.
fn local_config(heads: usize, kv_heads: usize, d: usize, reach: usize) -> ModelConfig {
    let config = config(heads, kv_heads, d);
    let local = Local { layers: vec![true], reach, rope: config.rope.clone() };
    ModelConfig { local: Some(local), ..config }
}

/// Reaches that begin at and within a page, and windows in which the first page or the first token of a row's reach changes.
const LOCAL: [(usize, &[(usize, usize)]); 4] = [
    (256, &[(0, 1), (126, 5), (254, 6), (383, 8), (511, 3), (1000, 5)]),
    (320, &[(316, 9), (380, 8), (700, 17)]),
    (512, &[(509, 6), (767, 4), (5000, 8)]),
    (1024, &[(1020, 8), (9470, 5)]),
];

#[test]
fn local_layers_equal_core() {
    let Some(device) = device() else { return };
    check_local(&device, &HEADS);
}

fn check_local(device: &Arc<Device>, shapes: &[(usize, usize, usize)]) {
    for &(heads, kv_heads, d) in shapes {
        for (index, (reach, windows)) in LOCAL.into_iter().enumerate() {
            for &(position, rows) in windows {
                let rounding = if index % 2 == 0 { Rounding::Balanced } else { Rounding::Paper };
                let config = local_config(heads, kv_heads, d, reach);
                let world = World::new(device, config, rounding, position + rows, (index + position) as u64);
                let q = queries(&mut Random(78), rows, &world.config);
                for view in VIEWS {
                    let got = world.run(view, position, &q, None);
                    let error = distance(&got, &world.want(view, position, &q, &[]));
                    let what = format!("{heads}/{kv_heads} heads of {d}, {rows} rows at {position} of reach {reach}");
                    assert!(error < 4e-3, "{what}, {view:?}: {error}");
                }
            }
        }
    }
}

/// Rows alone, in windows of every size, and among rows of another slot in several slices.
#[test]
fn rows_of_local_layers_do_not_depend_on_each_other() {
    let Some(device) = device() else { return };
    for (heads, kv_heads, d) in
        [(2, 2, 128), (4, 1, 128), (12, 1, 128), (3, 1, 64), (8, 2, 64), (2, 1, 256), (4, 1, 256)]
    {
        for (reach, position) in [(256, 120), (256, 375), (320, 571), (512, 1270), (1024, 4600)] {
            let most = 17;
            let config = local_config(heads, kv_heads, d, reach);
            let world = World::new(&device, config, Rounding::Balanced, position + most, position as u64);
            let (q, width) = (queries(&mut Random(5), most, &world.config), heads * d);
            let others = queries(&mut Random(6), 60, &world.config);
            for view in VIEWS {
                let bits = |out: &[f32]| out.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
                let alone: Vec<Vec<u32>> = (0..most)
                    .map(|row| bits(&world.run(view, position + row, &q[row * width..(row + 1) * width], None)))
                    .collect();
                for rows in [2, 3, 5, 8, 9, 17] {
                    let together = world.run(view, position, &q[..rows * width], None);
                    for (row, alone) in alone[..rows].iter().enumerate() {
                        let same = bits(&together[row * width..(row + 1) * width]) == *alone;
                        assert!(same, "{heads}/{kv_heads} heads of {d}, row {row} of {rows} at {position}, {view:?}");
                    }
                }
                // The other slot is short and not compared.
                let mut rows: Vec<Row> = (0..60).map(|i| Row { slot: 1 - SLOT, offset: i, position: 3 + i }).collect();
                rows.extend((0..most).map(|i| Row { slot: SLOT, offset: i, position: position + i }));
                let all = world.run_rows(view, &rows, &[&others[..], &q].concat(), None);
                assert!(bits(&all[60 * width..]) == alone.concat(), "{heads}/{kv_heads} of {d} in a batch, {view:?}");
            }
        }
    }
}

/// GPUs of compute capability 7.5 have 64 KiB of shared memory per block; 8.6, 8.9 and 12.0 have 99. Where four stages do not
/// fit, two are used.
#[test]
fn small_shared_memory_gets_two_stages() {
    if device().is_none() {
        return;
    }
    for (kib, shapes) in [(64, &[(2, 2, 128), (8, 1, 128), (8, 2, 64)][..]), (99, &[(4, 2, 256)])] {
        let mut device = Device::open_ptx(0).unwrap();
        Arc::get_mut(&mut device).unwrap().shared_bytes = kib << 10;
        check_against_core(&device, shapes, &[(0, 1), (254, 6), (1000, 5), (2815, 7)]);
        check_local(&device, shapes);
    }
}

#[test]
fn rows_do_not_depend_on_each_other() {
    let Some(device) = device() else { return };
    for (heads, kv_heads, d) in
        [(2, 2, 128), (4, 1, 128), (8, 1, 128), (12, 1, 128), (3, 1, 64), (8, 1, 64), (2, 1, 256)]
    {
        // Windows over page borders, visibility borders, and (long) changes of the split length.
        for position in [120, 250, 380, 1275, 2170, 4600, 17_400, 36_990] {
            let most = 17;
            let world =
                World::new(&device, config(heads, kv_heads, d), Rounding::Balanced, position + most, position as u64);
            let q = queries(&mut Random(5), most, &world.config);
            let width = heads * d;
            for view in VIEWS {
                let alone: Vec<Vec<f32>> = (0..most)
                    .map(|row| world.run(view, position + row, &q[row * width..(row + 1) * width], None))
                    .collect();
                for rows in [2, 3, 5, 8, 9, 17] {
                    let together = world.run(view, position, &q[..rows * width], None);
                    for (row, alone) in alone[..rows].iter().enumerate() {
                        let same = together[row * width..(row + 1) * width]
                            .iter()
                            .zip(alone)
                            .all(|(a, b)| a.to_bits() == b.to_bits());
                        assert!(same, "{heads}/{kv_heads} heads of {d}, row {row} of {rows} at {position}, {view:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn other_work_changes_no_bit() {
    let Some(device) = device() else { return };
    // Each uses a different kernel: one to four row tiles, three head widths, and the drafts' blocks with half an SM.
    for (heads, kv_heads, d, position) in [(8, 8, 128, 9000), (8, 2, 128, 9000), (4, 4, 64, 4000), (2, 2, 256, 4000)] {
        let most = 8;
        let world = World::new(&device, config(heads, kv_heads, d), Rounding::Balanced, position + most, 4);
        let q = queries(&mut Random(6), most, &world.config);
        for view in VIEWS {
            for rows in [1, 3, 5, 8] {
                let run = || {
                    let out = world.run(view, position, &q[..rows * heads * d], None);
                    out.into_iter().map(f32::to_bits).collect::<Vec<u32>>()
                };
                let alone = run();
                let differ = while_busy(&device, || (0..40).filter(|_| run() != alone).count());
                assert_eq!(differ, 0, "of 40: {heads}/{kv_heads} heads of {d}, {rows} rows, {view:?}");
            }
        }
        let run = || world.run_between(position, &q[..heads * d], None);
        let alone = run();
        let differ = while_busy(&device, || (0..40).filter(|_| run() != alone).count());
        assert_eq!(differ, 0, "of 40: {heads}/{kv_heads} heads of {d}, a draft's row");
        let config = local_config(heads, kv_heads, d, 1024);
        let world = World::new(&device, config, Rounding::Balanced, position + most, 4);
        for view in VIEWS {
            let run = || {
                let out = world.run(view, position, &q, None);
                out.into_iter().map(f32::to_bits).collect::<Vec<u32>>()
            };
            let alone = run();
            let differ = while_busy(&device, || (0..40).filter(|_| run() != alone).count());
            assert_eq!(differ, 0, "of 40: {heads}/{kv_heads} heads of {d}, {view:?} of a local layer");
        }
    }
}

#[test]
fn rows_do_not_depend_on_the_batch() {
    let Some(device) = device() else { return };
    for (heads, kv_heads, d) in [(4, 4, 128), (8, 2, 128), (4, 2, 64), (4, 1, 256)] {
        // More rows than a slice has, in windows of two slots; the other slot is short and not compared.
        for position in [300, 5000, 21_000] {
            let world = World::new(&device, config(heads, kv_heads, d), Rounding::Balanced, position + 64, 3);
            let windows = [(0, 17), (9, 1), (20, 16), (2, 9), (31, 17), (15, 4)];
            let mut rows = Vec::new();
            for (index, (first, count)) in windows.into_iter().enumerate() {
                rows.extend((0..count).map(|i| Row { slot: SLOT, offset: i, position: position + first + i }));
                rows.extend((0..3).map(|i| Row { slot: 1 - SLOT, offset: i, position: 7 * index + i }));
            }
            let q = queries(&mut Random(8), rows.len(), &world.config);
            let width = heads * d;
            for view in VIEWS {
                let together = world.run_rows(view, &rows, &q, None);
                for (index, row) in rows.iter().enumerate().filter(|(_, row)| row.slot == SLOT) {
                    let range = index * width..(index + 1) * width;
                    let alone = world.run(view, row.position, &q[range.clone()], None);
                    let same = together[range].iter().zip(&alone).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{heads}/{kv_heads} heads of {d}, row {index} ({row:?}), {view:?}");
                }
            }
        }
    }
}

/// A draft's rows have longer splits in a larger batch: bits may differ, results may not.
#[test]
fn drafts_of_a_batch_equal_core() {
    let Some(device) = device() else { return };
    for (heads, kv_heads, d) in [(2, 2, 128), (8, 2, 128), (4, 2, 64), (4, 1, 256)] {
        for (position, reach) in [(200, None), (700, None), (5000, None), (21_000, None), (5000, Some(1024))] {
            let config = match reach {
                Some(reach) => local_config(heads, kv_heads, d, reach),
                None => config(heads, kv_heads, d),
            };
            let world = World::new(&device, config, Rounding::Balanced, position + 1, 4);
            let all: Vec<usize> = (0..visible_pages(position)).collect();
            // The slots alternate, so every row counts as a sequence.
            for sequences in [2, 9, 33] {
                let rows: Vec<Row> = (0..sequences)
                    .map(|i| if i % 2 == 0 { (SLOT, position) } else { (1 - SLOT, 7) })
                    .map(|(slot, position)| Row { slot, offset: 0, position })
                    .collect();
                let q = queries(&mut Random(5), sequences, &world.config);
                let got = world.run_divided(View::Upper, &rows, &q, None, true);
                let (mut rows_got, mut want) = (Vec::new(), Vec::new());
                for index in (0..sequences).step_by(2) {
                    let of_row = index * heads * d..(index + 1) * heads * d;
                    want.extend(world.want(View::Upper, position, &q[of_row.clone()], &all));
                    rows_got.extend_from_slice(&got[of_row]);
                }
                let error = distance(&rows_got, &want);
                assert!(error < 4e-3, "{heads}/{kv_heads} heads of {d}, {sequences} rows at {position}: {error}");
            }
        }
    }
}

/// With one split per row, attention writes the codes that `merge` would.
#[test]
fn codes_of_single_splits_are_those_of_merge() {
    let Some(device) = device() else { return };
    for (heads, kv_heads, d) in [(16, 16, 128), (32, 16, 128), (64, 16, 128)] {
        for (position, reach) in [(200, None), (700, None), (2200, None), (700, Some(320))] {
            let config = match reach {
                Some(reach) => local_config(heads, kv_heads, d, reach),
                None => config(heads, kv_heads, d),
            };
            let world = World::new(&device, config, Rounding::Balanced, position + 1, 6);
            // More sequences than splits of a row fill the GPU; the slots alternate, so every row counts as one.
            let rows: Vec<Row> = (0..48)
                .map(|i| if i % 2 == 0 { (SLOT, position) } else { (1 - SLOT, 7) })
                .map(|(slot, position)| Row { slot, offset: 0, position })
                .collect();
            let (groups, q) = (heads * d / 128, queries(&mut Random(5), rows.len(), &world.config));
            let q = device.copied(&q).unwrap();
            let slices = match reach {
                Some(reach) => world.attend.local_slices(View::Upper, &rows, reach, true),
                None => world.attend.slices(View::Upper, &rows, |_| None, |_| false, true),
            };
            let slice = slices.unwrap().remove(0);
            assert!(world.attend.writes_codes(View::Upper, &slice) && !world.attend.writes_codes(View::Both, &slice));
            let layer = world.layer(0);
            for (panels, half_sm) in [(0, false), (rows.len(), false), (0, true)] {
                let [merged, direct] = [false, true].map(|direct| {
                    let (addresses, _keep) = world.addresses(&slice, 0);
                    let x = poisoned(&device, rows.len() * groups * 128);
                    let xs = poisoned(&device, rows.len() * groups * 8);
                    let codes = direct.then(|| Codes { x: x.at(0), xs: xs.at(0), panels });
                    let neighbours = Neighbours { half_sm, codes, ..Neighbours::default() };
                    // SAFETY: everything lives until the reads below, which wait.
                    unsafe {
                        world.attend.run(View::Upper, &slice, q.at(0), &layer, &addresses, neighbours).unwrap();
                        if !direct {
                            let pitch = groups * 128;
                            world
                                .attend
                                .merge(&slice, Form::Int8, x.at(0), xs.at(0), pitch, panels, &addresses)
                                .unwrap();
                        }
                    }
                    let codes = x.read::<u8>(0, rows.len() * groups * 128).unwrap();
                    Merged { codes, scales: xs.read::<f32>(0, rows.len() * groups * 2).unwrap() }
                });
                assert!(merged.scales.iter().all(|scale| scale.is_finite()), "every row has scales");
                let what = format!("{heads}/{kv_heads} heads of {d} at {position}, panels {panels}, half {half_sm}");
                assert!(merged == direct, "{what}");
            }
        }
    }
}

/// Page lists by synthetic scores, many, all or none of them equal. Covers slabs of 1,024 pages, keys in shared memory and
/// recomputed ones, and lists longer than the number of pages.
#[test]
fn lists_by_any_scores_equal_core() {
    let Some(device) = device() else { return };
    const KV_HEADS: usize = 2;
    let mut random = Random(12);
    for pages in [1, 2, 3, 33, 255, 256, 257, 511, 512, 513, 1000, 1023, 1024, 1025, 2047, 2048, 2049, 5000] {
        for n in [2, 3, 64, pages - 1, pages, pages + 1].into_iter().filter(|&n| n >= 2) {
            let (score_pitch, list_pitch) = (pages + 5, n + 3);
            let values = [-3.5f32, -0.0, 0.0, 1.25, 1e30];
            let mut scores: Vec<f32> = (0..2 * KV_HEADS * score_pitch).map(|_| values[random.below(5)]).collect();
            // Random scores, close ones, and equal ones.
            scores[score_pitch..2 * score_pitch].iter_mut().for_each(|score| *score = 30.0 + 4.0 * random.normal());
            scores[2 * score_pitch..3 * score_pitch].iter_mut().for_each(|score| *score = 7.0 + 1e-6 * random.normal());
            scores[3 * score_pitch..].fill(-7.25);
            let on_device = device.copied(&scores).unwrap();
            // List 0 belongs to slot 1 and vice versa.
            let choices = device
                .copied(&[1, 0].map(|slot| {
                    let (pages, scores) = (pages as i32, 1 - slot);
                    PageChoice { row: 0, slot, pages, scored: pages, scores }
                }))
                .unwrap();
            for best in [true, false] {
                let lists = poisoned(&device, 2 * KV_HEADS * list_pitch * 4);
                let by = if best { on_device.at(0) } else { 0 };
                let arguments = args![by, score_pitch, &choices, &lists, list_pitch, KV_HEADS, n];
                run(&device, "select", [KV_HEADS, 2, 1], 256, 0, &arguments);
                let lists = lists.read::<i32>(0, 2 * KV_HEADS * list_pitch).unwrap();
                for (list, slot, head) in [(0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1)] {
                    let scores = &scores[(list * KV_HEADS + head) * score_pitch..][..pages];
                    let want = if best { select_pages(scores, n) } else { window_pages(pages, n) };
                    let got = &lists[(slot * KV_HEADS + head) * list_pitch..][..list_pitch];
                    let kept: Vec<usize> = got[..want.len()].iter().map(|&page| page as usize).collect();
                    assert_eq!(kept, want, "best {best}, {n} of {pages}, list {list}, head {head}");
                    assert!(got[want.len()..].iter().all(|&page| page == -1), "written beyond {n} of {pages}");
                }
            }
        }
    }
}

#[test]
fn pages_that_are_not_chosen_among_are_all_listed() {
    let Some(device) = device() else { return };
    let mut random = Random(13);
    for (scored, pages) in [(3, 4), (5, 9), (40, 41), (64, 100), (1000, 1031), (2040, 2100)] {
        for n in [2, 3, 17, scored - 1].into_iter().filter(|&n| (2..scored).contains(&n)) {
            let (score_pitch, list_pitch) = (pages + 3, n + pages - scored + 2);
            // Masses are scores 1. Entries beyond the chosen-among pages have no effect.
            let scores: Vec<f32> = (0..2 * score_pitch).map(|_| random.normal().abs()).collect();
            let on_device = device.copied(&scores).unwrap();
            let choice = PageChoice { row: 0, slot: 0, pages: pages as i32, scored: scored as i32, scores: 1 };
            let choices = device.copied(&[choice]).unwrap();
            let lists = poisoned(&device, list_pitch * 4);
            let arguments = args![on_device.at(0), score_pitch, &choices, &lists, list_pitch, 1usize, n];
            run(&device, "select", [1, 1, 1], 256, 0, &arguments);
            let got = lists.read::<i32>(0, list_pitch).unwrap();
            let want = snap_pages(&scores[score_pitch..][..scored], pages, n);
            let kept: Vec<usize> = got[..want.len()].iter().map(|&page| page as usize).collect();
            assert_eq!(kept, want, "{n} of {scored}, {pages} visible");
            assert!(got[want.len()..].iter().all(|&page| page == -1), "written beyond {} pages", want.len());
        }
    }
}

#[test]
fn masses_of_pages_equal_core() {
    let Some(device) = device() else { return };
    for (heads, kv_heads, d) in [(4, 2, 64), (3, 1, 128), (2, 2, 128), (2, 1, 256), (12, 1, 64)] {
        let config = ModelConfig { layers: 2, ..config(heads, kv_heads, d) };
        if !device.info.takes_heads_of(d) {
            continue;
        }
        let group = heads / kv_heads;
        // One query, a block that has the window within it, and windows over two and more blocks.
        for (tokens, blocks) in [
            (2 * G, vec![2 * G]),
            (3 * G + 1, vec![3 * G, 1]),
            (700, vec![690, 10]),
            (1500, vec![1460, 13, 20, 7]),
            (40 * G - 1, vec![40 * G - 1]),
        ] {
            let mut random = Random(tokens as u64 + d as u64);
            let mut noise =
                |n: usize, scale: f32| -> Vec<f16> { (0..n).map(|_| f16::from_f32(random.normal() * scale)).collect() };
            let (q, kv) = (noise(tokens * heads * d, 1.5), noise(tokens * 2 * kv_heads * d, 1.0));
            let (on_device, cached) = (device.copied(&q).unwrap(), device.copied(&kv).unwrap());
            let options = Options { page_masses: true, ..options(tokens + 3 * G, 2) };
            let mut masses = PageMasses::new(&device, &config, &options).unwrap().unwrap();
            let plan: usize = PageMasses::bytes(&config, &options).iter().sum();
            assert_eq!(masses.held_bytes(), plan);
            let prompt = vec![0; tokens];
            // The computed rows of a prompt with a cached prefix, and remains of an earlier prompt.
            for known in [0, blocks[0]].into_iter().filter(|&known| known < tokens) {
                masses.clear();
                let mut start = 0;
                for &rows in &blocks {
                    let block = Block { slot: 1, prompt: &prompt, first: known, start, rows };
                    if start >= known {
                        // SAFETY: both live until the read below, which waits.
                        unsafe { masses.add_queries(&block, on_device.at(start * heads * d * 2), cached.at(0)) }
                            .unwrap();
                    }
                    start += rows;
                }
                let visible = masses.finish(1, 1, tokens).unwrap();
                assert_eq!(visible, visible_pages(tokens));
                let pitch = (tokens + 3 * G) / G;
                let first = known.max(tokens.saturating_sub(SNAP_QUERIES));
                for head in 0..kv_heads {
                    // [layer][masses, refreshed][slot]
                    let at = ((2 * 2 + 1) * kv_heads + head) * pitch;
                    let got = masses.scores.read::<f32>(at * 4, visible).unwrap();
                    let keys: Vec<f16> = (0..tokens)
                        .flat_map(|token| kv[(token * 2 * kv_heads + head) * d..][..d].iter().copied())
                        .collect();
                    let queries: Vec<(usize, Vec<f32>)> = (first..tokens)
                        .flat_map(|token| (0..group).map(move |h| (token, head * group + h)))
                        .map(|(token, h)| {
                            (token, q[(token * heads + h) * d..][..d].iter().map(|x| x.to_f32()).collect())
                        })
                        .collect();
                    let queries: Vec<(usize, &[f32])> = queries.iter().map(|(at, q)| (*at, &q[..])).collect();
                    let want = page_masses(&queries, &keys, visible);
                    let error = distance(&got, &want);
                    assert!(error < 1e-4, "{tokens} tokens, {known} known, head {head} of {kv_heads} of {d}: {error}");
                }
            }
        }
    }
}

#[test]
fn chosen_pages_equal_core() {
    let Some(device) = device() else { return };
    for (heads, kv_heads, d) in [(4, 2, 128), (4, 1, 64), (2, 1, 256), (7, 1, 128), (2, 2, 128)] {
        for (position, n) in [(700, 2), (5000, 7), (20_000, 1), (20_000, 16)] {
            let config = config(heads, kv_heads, d);
            let world = World::new(&device, config, Rounding::Balanced, position + 4, 9);
            let visible = visible_pages(position);
            let q = queries(&mut Random(6), 1, &world.config);
            let on_device = device.copied(&q).unwrap();
            let (asked, n) = (n, n.max(2)); // the first and the newest page are always included
            let pitch = n + 3;
            let lists = poisoned(&device, SLOTS * kv_heads * pitch * 4);
            let scores = poisoned(&device, kv_heads * (world.table.len() / SLOTS) * 4);
            let choices = device
                .copied(&[PageChoice {
                    slot: SLOT as i32,
                    pages: visible as i32,
                    scored: visible as i32,
                    ..PageChoice::default()
                }])
                .unwrap();
            let addresses = SliceAddresses {
                tables: world.tables.at(0),
                table_pitch: world.table.len() / SLOTS,
                list_pitch: pitch,
                ..SliceAddresses::default()
            };
            let centre = if world.rounding == Rounding::Balanced { 1.0f32 / 32.0 } else { 0.0 };
            for best in [true, false] {
                let layer = world.layer(lists.at(0));
                let by = if best { scores.at(0) } else { 0 };
                // SAFETY: everything lives until the read below, which waits.
                unsafe {
                    world.attend.choose(choices.at(0), [1, 1], visible, n, on_device.at(0), by, &layer, &addresses)
                }
                .unwrap();
                let lists_read = lists.read::<i32>(0, SLOTS * kv_heads * pitch).unwrap();
                let group = heads / kv_heads;
                let mut outputs = Vec::new();
                let chosen = Chosen { listed: n.min(visible), visible };
                let got = world.run(View::Upper, position, &q, Some((chosen, lists.at(0), pitch)));
                let between = world.run_between(position, &q, Some((chosen, lists.at(0), pitch)));
                for head in 0..kv_heads {
                    let estimates: Vec<f32> = (0..visible)
                        .map(|page| {
                            let params = &world.slot.pages[head][page].key_params;
                            let of = |h: usize| {
                                let query: Vec<f32> =
                                    q[(head * group + h) * d..][..d].iter().map(|v| v.to_f32()).collect();
                                page_score(&query, params, world.rounding)
                            };
                            (0..group).map(of).fold(f32::NEG_INFINITY, f32::max)
                        })
                        .collect();
                    // Each of the kernels can do every shape.
                    for (name, deep) in [("scores_1_4", 4), ("scores_4_2", 2), ("scores_4_4", 4)] {
                        let arguments = args![
                            layer.upper,
                            addresses.tables,
                            addresses.table_pitch,
                            &on_device,
                            &choices,
                            &scores,
                            addresses.table_pitch,
                            kv_heads,
                            group,
                            d,
                            centre
                        ];
                        scores.write(0, &vec![f32::NAN; kv_heads * addresses.table_pitch]).unwrap();
                        run(&device, name, [visible.div_ceil(deep * 2048 / d), kv_heads, 1], 256, 0, &arguments);
                        let got = scores.read::<f32>(head * addresses.table_pitch * 4, visible).unwrap();
                        let want: Vec<f64> = estimates.iter().map(|&estimate| f64::from(estimate)).collect();
                        let error = distance(&got, &want);
                        assert!(error < 1e-6, "{name}, {visible} pages, head {head} of {d}: {error}");
                    }
                    let want = if best { select_pages(&estimates, asked) } else { window_pages(visible, asked) };
                    let list = &lists_read[(SLOT * kv_heads + head) * pitch..][..n.min(visible)];
                    let list: Vec<usize> = list.iter().map(|&page| page as usize).collect();
                    assert_eq!(list, want, "best {best}, {n} of {visible}, head {head}");
                    outputs.push(world.want(View::Upper, position, &q, &want));
                }
                let want: Vec<f64> = (0..heads * d).map(|i| outputs[i / d / group][i]).collect();
                for (error, how) in [(distance(&got, &want), "alone"), (between.distance(&want), "in a draft")] {
                    assert!(error < 4e-3, "best {best}, {n} of {visible}, {how}: {error}");
                }
            }
        }
    }
}
