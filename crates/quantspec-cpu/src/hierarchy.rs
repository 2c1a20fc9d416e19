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

mod activations;
#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;
mod quantise;

pub(crate) use activations::Acts;
pub(crate) use quantise::encode;

use crate::dispatch::{Simd, portable};
use crate::lanes::f16_value;
use crate::memory::Array;
use crate::panel::{PANEL, groups};
#[cfg(any(target_arch = "x86_64", test))]
use portable::pairs_body;
use portable::{column_body, singles_body, values_body};
use quantspec_core::Result;
use quantspec_core::weights::{SMALL_GROUP as GROUP, ZERO};

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

/// Rows that share one load of a tile.
const ROWS: usize = 8;

/// Rows of f32 activations that share one load of a tile: ten sums and their operands fill AVX2's sixteen registers.
const SINGLE_ROWS: usize = 5;

/// Tiles of a panel, one above the other.
const HALVES: usize = PANEL / TILE_ROWS;

/// Planes and activations that a product reads.
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

    /// Bytes that a pass reads.
    pub(crate) fn read_bytes(&self, read: Read) -> usize {
        // A lower plane of some panels is always read.
        let upper_alone = matches!(read, Read::Upper | Read::Upper4) && self.both_from == 0;
        self.upper.bytes() + if upper_alone { 0 } else { self.lower.bytes() }
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
        let part = |half: usize, first: usize| {
            let ((upper, lower), at, width) = (self.column(index, half), first * acts.groups, acts.width());
            Operands {
                upper,
                lower,
                high: &acts.high[first * width..],
                low: &acts.low[first * width..],
                scale: &acts.scale[at..],
                sum: &acts.sum[at..],
                total: &acts.total[at..],
                groups: acts.groups,
            }
        };
        #[cfg(target_arch = "x86_64")]
        if simd == Simd::Amx && m > ROWS {
            for (first, rows) in groups(m, amx::ROWS) {
                let halves = std::array::from_fn(|half| part(half, first));
                panel_in_tiles(read, &halves, rows, &mut out[first * PANEL..]);
            }
            return;
        }
        for half in 0..HALVES {
            for (first, rows) in groups(m, ROWS) {
                part(half, first).rows(simd, read, rows, &mut out[first * PANEL + half * TILE_ROWS..]);
            }
        }
    }

    /// Multiplies one panel by m rows of f32 activations, `stride` apart and zero after k up to a whole group: `out[m][32]`.
    pub(crate) fn panel_f32(&self, simd: Simd, index: usize, x: &[f32], stride: usize, m: usize, out: &mut [f32]) {
        for half in 0..HALVES {
            let (upper, lower) = self.column(index, half);
            for (first, m) in groups(m, SINGLE_ROWS) {
                let (x, out) = (&x[first * stride..], &mut out[first * PANEL + half * TILE_ROWS..]);
                #[cfg(target_arch = "x86_64")]
                if simd == Simd::Avx2 {
                    avx2::rows(upper, lower, x, stride, m, out);
                    continue;
                }
                portable!(simd, singles_body(upper: &[u8], lower: &[u8], x: &[f32], stride: usize, m: usize, out: &mut [f32]));
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

    /// Row `row` in view Both, `[k]`. A tied model's embedding is read from its head.
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

/// `out[m][32]` of a panel by AMX, in rows that its halves share.
#[cfg(target_arch = "x86_64")]
fn panel_in_tiles(read: Read, halves: &[Operands; HALVES], m: usize, out: &mut [f32]) {
    // Both halves have the same planes.
    let [both, _] = halves.each_ref().map(|part| part.check(read, m));
    assert!(m <= amx::ROWS && out.len() >= m * PANEL);
    let out = out.as_mut_ptr();
    // SAFETY: the CPU has tiles, as the path was chosen, and GEMMs of planes use none elsewhere; the lengths were checked.
    unsafe {
        match read {
            Read::Target if both => amx::panel::<true, 2>(halves, m, out),
            Read::Target => amx::panel::<false, 2>(halves, m, out),
            Read::Both => amx::panel::<true, 1>(halves, m, out),
            Read::Upper | Read::Upper4 => amx::panel::<false, 1>(halves, m, out),
        }
    }
}

impl Operands<'_> {
    /// Checks the lengths for m rows. Returns true if there is a lower plane.
    fn check(&self, read: Read, m: usize) -> bool {
        let (groups, width) = (self.groups, self.groups * GROUP);
        // A draft's head has both planes; the upper one always exists.
        let both = !self.lower.is_empty();
        assert!(self.upper.len() == groups * UPPER && (self.lower.len() == groups * LOWER || !both));
        assert!(both || read != Read::Both);
        assert!(self.high.len() >= m * width && self.low.len() >= m * width && m > 0 && groups > 0);
        assert!(self.scale.len() >= m * groups && self.sum.len() >= m * groups && self.total.len() >= m * groups);
        both
    }

    /// `out[j][16]`, rows 32 apart.
    fn rows(&self, simd: Simd, read: Read, m: usize, out: &mut [f32]) {
        let both = self.check(read, m);
        assert!(m <= ROWS && out.len() >= (m - 1) * PANEL + TILE_ROWS);
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

#[cfg(test)]
mod tests;
