//! Linear layers with weights in two nibble planes (`quantspec_core::weights`): the target reads both, the draft the upper
//! one. A 4-bit matrix has no lower plane, or one for its last panels only; missing lower nibbles count as 0.
//!
//! A tile is 16 outputs × one group of 32 inputs. Upper tiles are `{ s: 16 f16 | z: 16 f16 | 4 vectors }`, 320 bytes; lower
//! tiles are 4 vectors, 256 bytes, in a separate array. So the draft reads one stream in address order and the target two.
//! Both arrays are `[n/16][group]`. Vector v of 64 bytes holds 4 bytes per output: byte b has k = 8v + b in its low nibble
//! and k = 8v + 4 + b in its high one. Lower nibbles are stored as L + 8, so the two nibbles of a weight form core's code.
//!
//! * AVX-512: activations are 15-bit integers q, `x ≈ q · scale` with a scale per row and group, in two int8 limbs: `q =
//!   128·high + low`. The draft uses the high limb alone. Sums over a group are exact integers.
//! * Elsewhere the target multiplies codes by f32 activations, and the draft by the high limb.
//!
//! **Row invariance:** a row's sums over a group are integers, or f32 with k upwards; groups are added upwards in one f32
//! accumulator per (row, output). The number of rows in a pass changes neither operands nor order.

use crate::dispatch::{Simd, portable};
#[cfg(any(target_arch = "x86_64", test))]
use crate::lanes::bf16_bits;
use crate::lanes::{f16_bits, f16_is_finite, f16_value, madd, rint_i32};
use crate::memory::Array;
use crate::panel::{PANEL, groups};
use crate::w4::{Group, halves};
use quantspec_core::quantize::{ACTIVATION_4, ACTIVATION_8, TARGET_SHRINK};
use quantspec_core::weights::{FIRST_CODES, SMALL_GROUP as GROUP, STEPS, ZERO, grid_of};
use quantspec_core::{Error, Result};

/// Outputs of a tile.
const TILE_ROWS: usize = 16;

/// Bytes of scales and zeros of an upper tile.
const PARAMS: usize = 2 * 2 * TILE_ROWS;

/// Code vectors of a tile.
const VECTORS: usize = GROUP / 8;

/// Bytes of a lower tile, and of an upper one.
const LOWER: usize = 64 * VECTORS;
const UPPER: usize = PARAMS + LOWER;

const _: () = assert!(GROUP == 32 && UPPER == 320 && LOWER == 256);

/// Rows that share one pass.
const ROWS: usize = 6;

/// Tiles of a panel, one above the other.
const HALVES: usize = PANEL / TILE_ROWS;

/// Planes and activations that a pass reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Read {
    /// All existing planes, with activations as precise as the path allows.
    Target,
    /// Both planes, int8 activations: the draft's head.
    Both,
    /// The upper plane, int8 activations. Of a matrix with a lower plane for some panels, both planes of these.
    Upper,
    /// The upper plane, 4-bit activations in int8 lanes.
    Upper4,
}

impl Read {
    /// This path multiplies by f32 activations.
    pub(crate) fn takes_f32(self, simd: Simd) -> bool {
        self == Read::Target && !simd.has_avx512()
    }
}

/// A lower tile with all nibbles 0, for a matrix without a lower plane.
static NO_LOWER: [u8; LOWER] = [ZERO << 4 | ZERO; LOWER];

/// A matrix in two planes, in the upper one alone, or with a lower one for its last panels.
pub(crate) struct Planes {
    /// Panels of 32 outputs, two tiles high.
    pub(crate) panels: usize,
    pub(crate) k: usize,
    pub(crate) upper: Array<u8>,
    /// Of the panels from `both_from` on.
    pub(crate) lower: Array<u8>,
    pub(crate) both_from: usize,
}

impl Planes {
    /// Bytes of one panel in the upper and in the lower plane.
    pub(crate) const fn panel_bytes(k: usize) -> (usize, usize) {
        let tiles = HALVES * k.div_ceil(GROUP);
        (tiles * UPPER, tiles * LOWER)
    }

    /// Bytes of a matrix whose panels from `both_from` on have both planes.
    pub(crate) const fn bytes_of(panels: usize, k: usize, both_from: usize) -> usize {
        let (upper, lower) = Planes::panel_bytes(k);
        panels * upper + (panels - both_from) * lower
    }

    /// A matrix of zeros, to be filled panel by panel.
    pub(crate) fn zeros(panels: usize, k: usize, both_from: usize) -> Result<Planes> {
        let (upper, lower) = Planes::panel_bytes(k);
        let (upper, lower) = (Array::zeros(panels * upper)?, Array::zeros((panels - both_from) * lower)?);
        Ok(Planes { panels, k, upper, lower, both_from })
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        self.upper.bytes() + self.lower.bytes()
    }

    /// One half of a panel: its tiles of both planes.
    fn column(&self, panel: usize, half: usize) -> (&[u8], &[u8]) {
        let groups = self.k.div_ceil(GROUP);
        let tiles = |panel: usize, bytes: usize| {
            let first = (panel * HALVES + half) * groups;
            first * bytes..(first + groups) * bytes
        };
        let lower = match panel.checked_sub(self.both_from) {
            Some(panel) => &self.lower[tiles(panel, LOWER)],
            None => &[],
        };
        (&self.upper[tiles(panel, UPPER)], lower)
    }

    /// One panel for m rows: `out[m][32]`.
    pub(crate) fn panel(&self, simd: Simd, read: Read, index: usize, acts: &Acts, m: usize, out: &mut [f32]) {
        let some = self.both_from > 0 && index >= self.both_from;
        let read = if some && matches!(read, Read::Upper | Read::Upper4) { Read::Both } else { read };
        for half in 0..HALVES {
            let (upper, lower) = self.column(index, half);
            for (first, rows) in groups(m, ROWS) {
                let (at, width) = (first * acts.groups, acts.width());
                let part = Operands {
                    upper,
                    lower,
                    high: &acts.high[first * width..],
                    low: &acts.low[first * width..],
                    scale: &acts.scale[at..],
                    sum: &acts.sum[at..],
                    total: &acts.total[at..],
                    groups: acts.groups,
                };
                part.rows(simd, read, rows, &mut out[first * PANEL + half * TILE_ROWS..]);
            }
        }
    }

    /// Multiplies one panel by m rows of f32 activations, `stride` apart and zero after k: `out[m][32]`.
    pub(crate) fn panel_f32(&self, simd: Simd, index: usize, x: &[f32], stride: usize, m: usize, out: &mut [f32]) {
        let k = self.k;
        for half in 0..HALVES {
            let (upper, lower) = self.column(index, half);
            for (first, m) in groups(m, ROWS) {
                let (x, out) = (&x[first * stride..], &mut out[first * PANEL + half * TILE_ROWS..]);
                portable!(simd, singles_body(upper: &[u8], lower: &[u8], x: &[f32], stride: usize, k: usize, m: usize, out: &mut [f32]));
            }
        }
    }

    /// View Both of inputs `first .. first + kc` of a panel, `[kc][32]` f32. `first` begins a group; values after k are
    /// meaningless.
    pub(crate) fn values(&self, simd: Simd, panel: usize, first: usize, kc: usize, out: &mut [f32]) {
        let count = kc.div_ceil(GROUP);
        for half in 0..HALVES {
            let (upper, lower) = self.column(panel, half);
            let upper = &upper[first / GROUP * UPPER..][..count * UPPER];
            let lower = if lower.is_empty() { lower } else { &lower[first / GROUP * LOWER..][..count * LOWER] };
            let (out, lane) = (&mut *out, half * TILE_ROWS);
            portable!(simd, values_body(upper: &[u8], lower: &[u8], kc: usize, lane: usize, out: &mut [f32]));
        }
    }

    /// The same as BF16 pairs, `[kc/2][32][2]`, kc even.
    #[cfg(any(target_arch = "x86_64", test))]
    pub(crate) fn pairs(&self, simd: Simd, panel: usize, first: usize, kc: usize, out: &mut [u16]) {
        let mut values = [0f32; GROUP * PANEL];
        for (i, out) in out[..kc * PANEL].chunks_mut(GROUP * PANEL).enumerate() {
            let kc = out.len() / PANEL;
            let values = &mut values[..kc * PANEL];
            self.values(simd, panel, first + i * GROUP, kc, values);
            let values = &*values;
            portable!(simd, pairs_body(values: &[f32], out: &mut [u16]));
        }
    }

    /// Row `row` in view Both, [k]. A tied model's embedding is read from its head.
    pub(crate) fn row(&self, row: usize, out: &mut [f32]) {
        let (panel, lane) = (row / PANEL, row % PANEL);
        let (upper, lower) = self.column(panel, lane / TILE_ROWS);
        let lane = lane % TILE_ROWS;
        for (g, out) in out[..self.k].chunks_mut(GROUP).enumerate() {
            let (upper, lower) = (&upper[g * UPPER..][..UPPER], lower_tile(lower, g));
            let (scale, zero) = (param(upper, lane) / 16.0, param(upper, TILE_ROWS + lane));
            for (i, out) in out.iter_mut().enumerate() {
                let (at, shift) = (i / 8 * 64 + lane * 4 + i % 4, i % 8 / 4 * 4);
                let code = (upper[PARAMS + at] >> shift & 15) << 4 | lower[at] >> shift & 15;
                *out = (f32::from(code) - f32::from(ZERO)) * scale + zero;
            }
        }
    }
}

/// Lower tile g of a column, if it has one.
#[inline(always)]
fn lower_tile(lower: &[u8], g: usize) -> &[u8] {
    if lower.is_empty() { &NO_LOWER } else { &lower[g * LOWER..][..LOWER] }
}

/// Parameter i of an upper tile: sixteen scales, then sixteen zeros.
#[inline(always)]
fn param(tile: &[u8], i: usize) -> f32 {
    f16_value(u16::from_le_bytes([tile[2 * i], tile[2 * i + 1]]))
}

/// Quantises a panel: `rows` f32 `[rows][k]`, up to 32 of them, into the panel's tiles; `lower` is empty without a lower
/// plane, `importance` has the inputs' or is empty. The result equals [`quantspec_core::weights::quantize_row`] or
/// [`quantspec_core::weights::quantize_row_upper`].
///
/// # Errors
/// [`quantspec_core::ErrorKind::NotFinite`] if the range of a group exceeds f16.
pub(crate) fn encode(
    simd: Simd,
    rows: &[f32],
    importance: &[f32],
    k: usize,
    upper: &mut [u8],
    lower: &mut [u8],
) -> Result<()> {
    let (groups, both) = (k.div_ceil(GROUP), !lower.is_empty());
    let mut codes = [0u8; GROUP];
    for (lane, row) in rows.chunks_exact(k).enumerate() {
        for (g, x) in row.chunks(GROUP).enumerate() {
            let out = &mut codes;
            let weigh = if importance.is_empty() { importance } else { &importance[g * GROUP..][..x.len()] };
            let (s, z) =
                portable!(simd, group_body(x: &[f32], weigh: &[f32], both: bool, out: &mut [u8; GROUP]) -> (u16, u16));
            if !f16_is_finite(s) || !f16_is_finite(z) {
                return Err(Error::not_finite("a group of weights spans more than half precision can hold"));
            }
            let tile = lane / TILE_ROWS * groups + g;
            let upper = &mut upper[tile * UPPER..][..UPPER];
            let lane = lane % TILE_ROWS;
            upper[2 * lane..][..2].copy_from_slice(&s.to_le_bytes());
            upper[2 * (TILE_ROWS + lane)..][..2].copy_from_slice(&z.to_le_bytes());
            for (v, codes) in codes.chunks_exact(8).enumerate() {
                for b in 0..4 {
                    let at = v * 64 + lane * 4 + b;
                    upper[PARAMS + at] = codes[b] >> 4 | codes[4 + b] & 0xf0;
                    if both {
                        lower[tile * LOWER + at] = codes[b] & 15 | codes[4 + b] << 4;
                    }
                }
            }
        }
    }
    Ok(())
}

/// Scale, zero (bits of f16) and codes of one group, with zero codes after it. The same IEEE operations as core's,
/// vectorised.
#[inline(always)]
fn group_body<const FMA: bool>(x: &[f32], importance: &[f32], both: bool, codes: &mut [u8; GROUP]) -> (u16, u16) {
    let mut padded = [x[0]; GROUP];
    padded[..x.len()].copy_from_slice(x);
    let (low, high) = (Group::plain(&padded).least(), Group::plain(&padded).greatest());
    codes.fill(0);
    if low == high {
        codes[..x.len()].fill(ZERO);
        return (0, f16_bits(low));
    }
    let plain = if both { of_steps(low, high, STEPS[0], FIRST_CODES[0]) } else { halves((high - low) / 15.0, low) };
    if !f16_is_finite(plain.0) || !f16_is_finite(plain.1) {
        return plain;
    }
    let found = match grid_of(x, low, high, both) {
        Some(grid) => (grid.scale.to_bits(), grid.zero.to_bits()),
        None if importance.is_empty() => searched(&Group::plain(x), low, high, plain, both),
        None => searched(&Group::<true> { x, importance }, low, high, plain, both),
    };
    let (scale, zero) = (f16_value(found.0), f16_value(found.1));
    let mut out = [0u8; GROUP];
    for (code, x) in out.iter_mut().zip(&padded) {
        let code_of_both = rint_i32(((x - zero) / (scale / 16.0)).clamp(-8.0, 247.0));
        let code_of_upper = 16 * rint_i32(((x - zero) / scale).clamp(0.0, 15.0));
        *code = (if both { code_of_both } else { code_of_upper } + i32::from(ZERO)) as u8;
    }
    codes[..x.len()].copy_from_slice(&out[..x.len()]);
    found
}

/// Parameters of a group whose range has this many fine steps and begins at this code.
#[inline(always)]
fn of_steps(low: f32, high: f32, steps: u8, first: u8) -> (u16, u16) {
    let step = (high - low) / f32::from(steps);
    halves(16.0 * step, low + (8.0 - f32::from(first)) * step)
}

/// Core's searches, from the finite parameters `plain`.
#[inline(always)]
fn searched<const WEIGHTED: bool>(
    group: &Group<WEIGHTED>,
    low: f32,
    high: f32,
    plain: (u16, u16),
    both: bool,
) -> (u16, u16) {
    if !both {
        return group.search(low, high, plain, &TARGET_SHRINK);
    }
    let (mut plain, mut taken, mut least) = (plain, STEPS[0], group.squared_error_of_both(plain));
    for steps in &STEPS[1..] {
        let found = of_steps(low, high, *steps, FIRST_CODES[0]);
        let error = group.squared_error_of_both(found);
        if error < least {
            (plain, taken, least) = (found, *steps, error);
        }
    }
    let start = (group.squared_error(plain), plain);
    let firsts = FIRST_CODES[1..].iter().filter(|&&first| first <= 255 - taken);
    firsts.fold(start, |best, &first| group.better(best, of_steps(low, high, taken, first))).1
}

/// The four codes of a vector's outputs, low nibbles' and high nibbles' words: byte b of word l is output l, k = b.
#[inline(always)]
fn code_words(upper: &[u8], lower: &[u8]) -> [[u32; TILE_ROWS]; 2] {
    let mut words = [[0u32; TILE_ROWS]; 2];
    for l in 0..TILE_ROWS {
        let u = u32::from_le_bytes([upper[4 * l], upper[4 * l + 1], upper[4 * l + 2], upper[4 * l + 3]]);
        let d = u32::from_le_bytes([lower[4 * l], lower[4 * l + 1], lower[4 * l + 2], lower[4 * l + 3]]);
        words[0][l] = (u << 4) & 0xf0f0_f0f0 | d & 0x0f0f_0f0f;
        words[1][l] = u & 0xf0f0_f0f0 | (d >> 4) & 0x0f0f_0f0f;
    }
    words
}

#[inline(always)]
fn values_body<const FMA: bool>(upper: &[u8], lower: &[u8], kc: usize, lane: usize, out: &mut [f32]) {
    for (g, upper) in upper.chunks_exact(UPPER).enumerate() {
        let lower = lower_tile(lower, g);
        let (mut scale, mut zero) = ([0f32; TILE_ROWS], [0f32; TILE_ROWS]);
        for l in 0..TILE_ROWS {
            (scale[l], zero[l]) = (param(upper, l) / 16.0, param(upper, TILE_ROWS + l));
        }
        for (v, (upper, lower)) in upper[PARAMS..].chunks_exact(64).zip(lower.chunks_exact(64)).enumerate() {
            for (h, words) in code_words(upper, lower).iter().enumerate() {
                for b in 0..4 {
                    let k = g * GROUP + 8 * v + 4 * h + b;
                    if k >= kc {
                        continue;
                    }
                    let out = &mut out[k * PANEL + lane..][..TILE_ROWS];
                    for l in 0..TILE_ROWS {
                        out[l] = ((words[l] >> (8 * b) & 255) as i32 - 8) as f32 * scale[l] + zero[l];
                    }
                }
            }
        }
    }
}

#[cfg(any(target_arch = "x86_64", test))]
#[inline(always)]
fn pairs_body<const FMA: bool>(values: &[f32], out: &mut [u16]) {
    for (values, out) in values.chunks_exact(2 * PANEL).zip(out.chunks_exact_mut(2 * PANEL)) {
        for l in 0..PANEL {
            (out[2 * l], out[2 * l + 1]) = (bf16_bits(values[l]), bf16_bits(values[PANEL + l]));
        }
    }
}

/// M rows of f32 activations against a column of tiles: codes times activations are summed over a group, k upwards.
#[inline(always)]
fn singles<const FMA: bool, const M: usize>(
    upper: &[u8],
    lower: &[u8],
    x: &[f32],
    stride: usize,
    k: usize,
    out: &mut [f32],
) {
    let mut acc = [[0f32; TILE_ROWS]; M];
    for (g, upper) in upper.chunks_exact(UPPER).enumerate() {
        let lower = lower_tile(lower, g);
        let mut q = [[0f32; GROUP]; M];
        let mut sums = [0f32; M];
        let here = GROUP.min(k - g * GROUP);
        for (j, q) in q.iter_mut().enumerate() {
            q[..here].copy_from_slice(&x[j * stride + g * GROUP..][..here]);
            sums[j] = crate::lanes::sum16(std::array::from_fn(|i| q[i] + q[16 + i]));
        }
        let mut dots = [[0f32; TILE_ROWS]; M];
        for (v, (upper, lower)) in upper[PARAMS..].chunks_exact(64).zip(lower.chunks_exact(64)).enumerate() {
            for (h, words) in code_words(upper, lower).iter().enumerate() {
                for b in 0..4 {
                    let mut codes = [0f32; TILE_ROWS];
                    for l in 0..TILE_ROWS {
                        codes[l] = ((words[l] >> (8 * b) & 255) as i32 - 8) as f32;
                    }
                    for j in 0..M {
                        let x = q[j][8 * v + 4 * h + b];
                        for l in 0..TILE_ROWS {
                            dots[j][l] = madd::<FMA>(codes[l], x, dots[j][l]);
                        }
                    }
                }
            }
        }
        for j in 0..M {
            for l in 0..TILE_ROWS {
                acc[j][l] = madd::<FMA>(dots[j][l], param(upper, l) / 16.0, acc[j][l]);
                acc[j][l] = madd::<FMA>(param(upper, TILE_ROWS + l), sums[j], acc[j][l]);
            }
        }
    }
    for (j, acc) in acc.iter().enumerate() {
        out[j * PANEL..][..TILE_ROWS].copy_from_slice(acc);
    }
}

#[inline(always)]
fn singles_body<const FMA: bool>(
    upper: &[u8],
    lower: &[u8],
    x: &[f32],
    stride: usize,
    k: usize,
    m: usize,
    out: &mut [f32],
) {
    match m {
        1 => singles::<FMA, 1>(upper, lower, x, stride, k, out),
        2 => singles::<FMA, 2>(upper, lower, x, stride, k, out),
        3 => singles::<FMA, 3>(upper, lower, x, stride, k, out),
        4 => singles::<FMA, 4>(upper, lower, x, stride, k, out),
        5 => singles::<FMA, 5>(upper, lower, x, stride, k, out),
        _ => singles::<FMA, ROWS>(upper, lower, x, stride, k, out),
    }
}

/// Activations in limbs, with a maximum number of rows.
pub(crate) struct Acts {
    /// `[m][groups · 32]`
    high: Array<i8>,
    low: Array<i8>,
    /// Step of the integers, `[m][groups]`.
    scale: Array<f32>,
    /// Sum of the group's activations, which multiplies the weight's zero point, `[m][groups]`.
    sum: Array<f32>,
    /// Sum of the group's integers, `[m][groups]`. Codes of both planes are 8 too large, so 8 times this is subtracted.
    total: Array<i32>,
    groups: usize,
}

impl Acts {
    /// Bytes for `m` rows of `k`.
    pub(crate) const fn bytes_of(m: usize, k: usize) -> usize {
        m * k.div_ceil(GROUP) * (2 * GROUP + 12)
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        self.high.bytes() + self.low.bytes() + self.scale.bytes() + self.sum.bytes() + self.total.bytes()
    }

    /// Room for `m` rows of `k`.
    pub(crate) fn zeros(m: usize, k: usize) -> Result<Acts> {
        let groups = k.div_ceil(GROUP);
        Ok(Acts {
            high: Array::zeros(m * groups * GROUP)?,
            low: Array::zeros(m * groups * GROUP)?,
            scale: Array::zeros(m * groups)?,
            sum: Array::zeros(m * groups)?,
            total: Array::zeros(m * groups)?,
            groups,
        })
    }

    fn width(&self) -> usize {
        self.groups * GROUP
    }

    pub(crate) fn fits(&self, planes: &Planes, m: usize) -> bool {
        self.groups == planes.k.div_ceil(GROUP) && self.high.len() >= m * self.width()
    }

    /// Quantises m rows of k, `stride` apart, for the planes in `read`; `k` determines the layout until the next call.
    pub(crate) fn quantize(&mut self, simd: Simd, read: Read, x: &[f32], stride: usize, m: usize, k: usize) {
        self.groups = k.div_ceil(GROUP);
        let (groups, width) = (self.groups, self.width());
        for j in 0..m {
            let x = &x[j * stride..][..k];
            let limbs = (&mut self.high[j * width..][..width], &mut self.low[j * width..][..width]);
            let at = j * groups..(j + 1) * groups;
            let totals = (&mut self.scale[at.clone()], &mut self.sum[at.clone()], &mut self.total[at]);
            portable!(simd, quantize_body(read: Read, x: &[f32], limbs: (&mut [i8], &mut [i8]), totals: (&mut [f32], &mut [f32], &mut [i32])));
        }
    }
}

/// Largest magnitude of an activation's integer: 127 in the high limb, 0 in the low one.
const TOP: f32 = ACTIVATION_8 * 128.0;
/// As [`TOP`] for 4 bits: 7 in the high limb.
const TOP_4: f32 = ACTIVATION_4 * 128.0;

#[inline(always)]
fn quantize_body<const FMA: bool>(
    read: Read,
    x: &[f32],
    (high, low): (&mut [i8], &mut [i8]),
    (scale, sum, total): (&mut [f32], &mut [f32], &mut [i32]),
) {
    for (g, (high, low)) in high.chunks_exact_mut(GROUP).zip(low.chunks_exact_mut(GROUP)).enumerate() {
        let mut v = [0f32; GROUP];
        let x = &x[g * GROUP..x.len().min((g + 1) * GROUP)];
        v[..x.len()].copy_from_slice(x);
        // Bits of magnitudes are ordered like the numbers, and NaN is above all, so the scale reveals NaN.
        let mut most = [0u32; 16];
        for v in v.chunks_exact(16) {
            for l in 0..16 {
                most[l] = most[l].max(v[l].to_bits() & 0x7fff_ffff);
            }
        }
        let most = f32::from_bits(most.iter().fold(0, |a, b| a.max(*b)));
        let top = if read == Read::Upper4 { TOP_4 } else { TOP };
        let inverse = if most > 0.0 { top / most } else { 0.0 };
        // The inverse of a group of subnormals overflows, which would give codes beyond their limbs.
        let inverse = if inverse.is_finite() { inverse } else { 0.0 };
        let (mut codes, mut highs) = (0i32, 0i32);
        for i in 0..GROUP {
            // Wraps only for codes of NaN, which the scale reveals.
            let code = rint_i32(v[i] * inverse);
            let limb = code.wrapping_add(64) >> 7;
            (high[i], low[i]) = (limb as i8, code.wrapping_sub(limb.wrapping_mul(128)) as i8);
            (codes, highs) = (codes.wrapping_add(code), highs.wrapping_add(limb));
        }
        (scale[g], total[g]) = match read {
            Read::Target => (most / TOP, codes),
            Read::Both | Read::Upper | Read::Upper4 => (most / (top / 128.0), highs),
        };
        sum[g] = scale[g] * total[g] as f32;
    }
}

/// One column of tiles and a few rows of activations in limbs.
struct Operands<'a> {
    upper: &'a [u8],
    lower: &'a [u8],
    high: &'a [i8],
    low: &'a [i8],
    scale: &'a [f32],
    sum: &'a [f32],
    total: &'a [i32],
    groups: usize,
}

impl Operands<'_> {
    /// `out[j][16]`, rows 32 apart.
    fn rows(&self, simd: Simd, read: Read, m: usize, out: &mut [f32]) {
        let (groups, width) = (self.groups, self.groups * GROUP);
        // A draft's head has both planes; the upper one always exists.
        let both = !self.lower.is_empty();
        assert!(self.upper.len() == groups * UPPER && (self.lower.len() == groups * LOWER || !both));
        assert!(both || read != Read::Both);
        assert!(self.high.len() >= m * width && self.low.len() >= m * width && (1..=ROWS).contains(&m));
        assert!(self.scale.len() >= m * groups && self.sum.len() >= m * groups && self.total.len() >= m * groups);
        assert!(out.len() >= (m - 1) * PANEL + TILE_ROWS);
        #[cfg(target_arch = "x86_64")]
        match simd {
            // SAFETY: the CPU has these features, as the path was chosen; the lengths were checked above.
            Simd::Avx512 | Simd::Amx => unsafe {
                let out = out.as_mut_ptr();
                return match read {
                    Read::Target if both => avx512::column::<true, 2>(self, m, out),
                    Read::Target => avx512::column::<false, 2>(self, m, out),
                    Read::Both => avx512::column::<true, 1>(self, m, out),
                    Read::Upper | Read::Upper4 => avx512::column::<false, 1>(self, m, out),
                };
            },
            // SAFETY: as above.
            Simd::Avx2 if read != Read::Target => unsafe {
                for j in 0..m {
                    let out = out.as_mut_ptr().add(j * PANEL);
                    match read {
                        Read::Upper | Read::Upper4 => avx2::column::<false>(self, j, out),
                        _ => avx2::column::<true>(self, j, out),
                    }
                }
                return;
            },
            _ => (),
        }
        let part = self;
        for j in 0..m {
            let out = &mut out[j * PANEL..][..TILE_ROWS];
            portable!(simd, column_body(part: &Operands, read: Read, j: usize, out: &mut [f32]));
        }
    }
}

/// Row j of a draft's GEMM in plain Rust.
#[inline(always)]
fn column_body<const FMA: bool>(part: &Operands, read: Read, j: usize, out: &mut [f32]) {
    let mut acc = [0f32; TILE_ROWS];
    let upper_alone = matches!(read, Read::Upper | Read::Upper4);
    for (g, tile) in part.upper.chunks_exact(UPPER).enumerate() {
        let q = &part.high[(j * part.groups + g) * GROUP..][..GROUP];
        let (at, lower) = (j * part.groups + g, lower_tile(part.lower, g));
        let mut dot = [0i32; TILE_ROWS];
        for (v, upper) in tile[PARAMS..].chunks_exact(64).enumerate() {
            let lower = &lower[v * 64..][..64];
            for b in 0..4 {
                let (first, second) = (i32::from(q[8 * v + b]), i32::from(q[8 * v + 4 + b]));
                for l in 0..TILE_ROWS {
                    let u = i32::from(upper[4 * l + b]);
                    let code = if upper_alone {
                        (u & 15, u >> 4)
                    } else {
                        let d = i32::from(lower[4 * l + b]);
                        ((u & 15) << 4 | d & 15, u & 0xf0 | d >> 4)
                    };
                    dot[l] += code.0 * first + code.1 * second;
                }
            }
        }
        // Codes of both planes are sixteenths of a step, and 8 too large.
        let (step, offset) = if upper_alone { (1.0, 0) } else { (1.0 / 16.0, part.total[at].wrapping_mul(8)) };
        for l in 0..TILE_ROWS {
            let (scale, zero) = (param(tile, l) * step, param(tile, TILE_ROWS + l));
            acc[l] = madd::<FMA>(dot[l].wrapping_sub(offset) as f32, scale * part.scale[at], acc[l]);
            acc[l] = madd::<FMA>(zero, part.sum[at], acc[l]);
        }
    }
    out.copy_from_slice(&acc);
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use super::{GROUP, LOWER, Operands, PANEL, PARAMS, UPPER, VECTORS};
    use crate::dispatch::Prefetch;
    use std::arch::x86_64::*;

    /// M rows of a column, of both planes or of the upper one, with LIMBS limbs of activations.
    ///
    /// # Safety
    /// The lengths that `Operands::rows` checks for m rows; `out`: m rows of 16, 32 apart.
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    pub(super) unsafe fn column<const BOTH: bool, const LIMBS: usize>(part: &Operands, m: usize, out: *mut f32) {
        // SAFETY: passed on.
        unsafe {
            match m {
                1 => tiles::<BOTH, LIMBS, 1>(part, out),
                2 => tiles::<BOTH, LIMBS, 2>(part, out),
                3 => tiles::<BOTH, LIMBS, 3>(part, out),
                4 => tiles::<BOTH, LIMBS, 4>(part, out),
                5 => tiles::<BOTH, LIMBS, 5>(part, out),
                _ => tiles::<BOTH, LIMBS, 6>(part, out),
            }
        }
    }

    /// `vpdpbusd` on codes. High nibbles are summed separately if registers allow it, which hides the latency of one row;
    /// sums are exact integers, so no bit changes. High nibbles of the upper plane alone are used in place, 16 times too
    /// large.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn tiles<const BOTH: bool, const LIMBS: usize, const M: usize>(part: &Operands, out: *mut f32) {
        // SAFETY: offsets are within the lengths that the caller guarantees.
        unsafe {
            let (low, prefetch) = (_mm512_set1_epi8(15), Prefetch::choose(M > 1));
            let second = if !BOTH || M <= 2 { 1 } else { 0 };
            let mut acc = [_mm512_setzero_ps(); M];
            for g in 0..part.groups {
                let (tile, lower) = (part.upper.as_ptr().add(g * UPPER), part.lower.as_ptr().add(g * LOWER));
                let mut dots = [[[_mm512_setzero_si512(); M]; 2]; LIMBS];
                if let Some(prefetch) = prefetch {
                    prefetch.line(tile);
                }
                for v in 0..VECTORS {
                    let c = tile.add(PARAMS + v * 64);
                    if let Some(prefetch) = prefetch {
                        prefetch.line(c);
                        if BOTH {
                            prefetch.line(lower.add(v * 64));
                        }
                    }
                    let c = _mm512_loadu_si512(c.cast());
                    let (c0, c1) = if BOTH {
                        let d = _mm512_loadu_si512(lower.add(v * 64).cast());
                        // 0xe2: selects bits of the third operand where the mask (the second) is 0, and of the first where it
                        // is 1.
                        let pick = |high: __m512i, low_nibbles: __m512i| {
                            _mm512_ternarylogic_epi32::<0xe2>(low_nibbles, low, high)
                        };
                        (pick(_mm512_slli_epi16::<4>(c), d), pick(c, _mm512_srli_epi16::<4>(d)))
                    } else {
                        (_mm512_and_si512(c, low), _mm512_andnot_si512(low, c))
                    };
                    for j in 0..M {
                        let at = (j * part.groups + g) * GROUP + v * 8;
                        for (limb, dots) in dots.iter_mut().enumerate() {
                            let q = if limb == 0 { part.high.as_ptr() } else { part.low.as_ptr() };
                            let q = q.add(at).cast::<i32>();
                            dots[0][j] = _mm512_dpbusd_epi32(dots[0][j], c0, _mm512_set1_epi32(q.read_unaligned()));
                            let q = _mm512_set1_epi32(q.add(1).read_unaligned());
                            dots[second][j] = _mm512_dpbusd_epi32(dots[second][j], c1, q);
                        }
                    }
                }
                let s = _mm512_cvtph_ps(_mm256_loadu_si256(tile.cast()));
                let s = if BOTH { _mm512_mul_ps(s, _mm512_set1_ps(1.0 / 16.0)) } else { s };
                let z = _mm512_cvtph_ps(_mm256_loadu_si256(tile.add(32).cast()));
                for j in 0..M {
                    let sum = |dots: &[[__m512i; M]; 2]| {
                        let b = if BOTH { dots[1][j] } else { _mm512_srai_epi32::<4>(dots[1][j]) };
                        _mm512_add_epi32(dots[0][j], b)
                    };
                    let mut dot = sum(&dots[0]);
                    if LIMBS == 2 {
                        dot = _mm512_add_epi32(_mm512_slli_epi32::<7>(dot), sum(&dots[LIMBS - 1]));
                    }
                    let at = j * part.groups + g;
                    if BOTH {
                        let total = _mm512_set1_epi32(*part.total.get_unchecked(at));
                        dot = _mm512_sub_epi32(dot, _mm512_slli_epi32::<3>(total));
                    }
                    let scale = _mm512_set1_ps(*part.scale.get_unchecked(at));
                    let sum = _mm512_set1_ps(*part.sum.get_unchecked(at));
                    acc[j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_mul_ps(s, scale), acc[j]);
                    acc[j] = _mm512_fmadd_ps(z, sum, acc[j]);
                }
            }
            for (j, acc) in acc.iter().enumerate() {
                _mm512_storeu_ps(out.add(j * PANEL), *acc);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::{GROUP, LOWER, Operands, PARAMS, UPPER, VECTORS};
    use crate::dispatch::Prefetch;
    use std::arch::x86_64::*;

    /// Integer sums of a tile's nibbles and 32 int8 activations, for outputs 0..8 and 8..16. Eight products of at most
    /// 2·15·127 fit in an i16 lane before it must be widened.
    ///
    /// # Safety
    /// AVX2; 256 bytes at `codes` and 32 at `q`.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn dots(codes: *const u8, q: *const i32, prefetch: Option<Prefetch>) -> [__m256i; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            let (low, ones) = (_mm256_set1_epi8(15), _mm256_set1_epi16(1));
            let mut dots = [_mm256_setzero_si256(); 2];
            for first in (0..VECTORS).step_by(4) {
                let mut sums = [_mm256_setzero_si256(); 2];
                for v in first..first + 4 {
                    let codes = codes.add(v * 64);
                    if let Some(prefetch) = prefetch {
                        prefetch.line(codes);
                    }
                    let q0 = _mm256_set1_epi32(q.add(2 * v).read_unaligned());
                    let q1 = _mm256_set1_epi32(q.add(2 * v + 1).read_unaligned());
                    for (h, sum) in sums.iter_mut().enumerate() {
                        let c = _mm256_loadu_si256(codes.add(32 * h).cast());
                        let a = _mm256_maddubs_epi16(_mm256_and_si256(c, low), q0);
                        let b = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16::<4>(c), low), q1);
                        *sum = _mm256_add_epi16(*sum, _mm256_add_epi16(a, b));
                    }
                }
                for (dot, sum) in dots.iter_mut().zip(sums) {
                    *dot = _mm256_add_epi32(*dot, _mm256_madd_epi16(sum, ones));
                }
            }
            dots
        }
    }

    /// The draft's dot products of row j.
    ///
    /// # Safety
    /// The lengths that `Operands::rows` checks, for row j; `out`: 16 floats.
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) unsafe fn column<const BOTH: bool>(part: &Operands, j: usize, out: *mut f32) {
        // SAFETY: offsets are within the lengths that the caller guarantees.
        unsafe {
            let prefetch = Prefetch::choose(false);
            let mut acc = [_mm256_setzero_ps(); 2];
            for g in 0..part.groups {
                let (tile, at) = (part.upper.as_ptr().add(g * UPPER), j * part.groups + g);
                let q = part.high.as_ptr().add(at * GROUP).cast::<i32>();
                let mut dot = dots(tile.add(PARAMS), q, prefetch);
                if BOTH {
                    let lower = dots(part.lower.as_ptr().add(g * LOWER), q, prefetch);
                    let offset = _mm256_slli_epi32::<3>(_mm256_set1_epi32(*part.total.get_unchecked(at)));
                    for (dot, lower) in dot.iter_mut().zip(lower) {
                        *dot = _mm256_add_epi32(_mm256_slli_epi32::<4>(*dot), _mm256_sub_epi32(lower, offset));
                    }
                }
                let step = if BOTH { 1.0 / 16.0 } else { 1.0 };
                let scale = _mm256_set1_ps(*part.scale.get_unchecked(at));
                let sum = _mm256_set1_ps(*part.sum.get_unchecked(at));
                for h in 0..2 {
                    let s = _mm256_cvtph_ps(_mm_loadu_si128(tile.add(16 * h).cast()));
                    let s = _mm256_mul_ps(s, _mm256_set1_ps(step));
                    let z = _mm256_cvtph_ps(_mm_loadu_si128(tile.add(32 + 16 * h).cast()));
                    acc[h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[h]), _mm256_mul_ps(s, scale), acc[h]);
                    acc[h] = _mm256_fmadd_ps(z, sum, acc[h]);
                }
            }
            _mm256_storeu_ps(out, acc[0]);
            _mm256_storeu_ps(out.add(8), acc[1]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Noise, bits, distance, paths};
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

    /// GEMM of m rows with panel 0.
    fn gemms(simd: Simd, planes: &Planes, read: Read, x: &[f32], m: usize) -> Vec<f32> {
        let (k, mut y) = (planes.k, vec![f32::NAN; m * PANEL]);
        if read.takes_f32(simd) {
            planes.panel_f32(simd, 0, x, k, m, &mut y);
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
            let (mut w, x) = (weights(&mut noise, PANEL, k), noise.normals(13 * k));
            on_grids(&mut w[5 * k..], k);
            let planes = planes(Simd::Scalar, &w, k, both);
            let rows: Vec<Row> = w.chunks_exact(k).map(|row| quantized(row, both)).collect();
            let exact: Vec<f64> = (0..13 * PANEL)
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
                for m in 1..=13 {
                    let y = gemms(simd, &planes, read, &x[..m * k], m);
                    assert_eq!(bits(&y), bits(&alone[..m * PANEL]), "{m} rows, {read:?} {simd:?} k {k}");
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
                for read in [Read::Target, Read::Both, Read::Upper] {
                    let y = gemms(simd, &planes, read, &x, 1);
                    for (y, row) in y.iter().zip(&rows) {
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
        let (mut noise, k, m) = (Noise::new(36), 100, 3);
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
                        mixed.panel_f32(simd, index, &x, k, m, &mut y);
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
                for read in [Read::Target, Read::Both, Read::Upper] {
                    let y = gemms(simd, &planes, read, &x, 1);
                    // The constant row's scale is 0, and 0 times infinity is also NaN.
                    assert!(y.iter().all(|y| !y.is_finite()), "{bad} {read:?} {simd:?}");
                }
            }
        }
    }
}
