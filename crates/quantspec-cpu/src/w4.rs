//! Linear layers of the draft: 4-bit weights (8-bit for the head), int8 activations.
//!
//! Groups of 128 along k, `w = code·s + z` with s and z in f16. Activations are int8 with one scale per group, so a group's
//! sums are integers: `Σ w·x = s·xs·Σ code·q + z·xs·Σ q`.
//!
//! A tile is 16 outputs × one group, contiguous, parameters first, so that a pass reads one stream in address order: `{ s: 16
//! f16 | z: 16 f16 | codes }`. Code vector v of 64 bytes holds 4 bytes per output. In 4-bit tiles (16 vectors, 1,088 bytes)
//! byte b has k = 8v + b in its low nibble and k = 8v + 4 + b in its high one. In 8-bit tiles (32 vectors, 2,112 bytes) byte
//! b is k = 4v + b. Tiles are `[n/16][group]`; a short last group is padded with zero codes, and its activations with zeros.

use crate::dispatch::{Simd, portable};
use crate::lanes::{f16_bits, f16_is_finite, f16_value, fold16, group, inverse_step, madd, rint, rint_i32, sum16};
use crate::memory::Array;
use crate::panel::{PANEL, groups};
use quantspec_core::quantize::{FITS, SCALE_MIN, SHRINK, WEIGHT_GROUP};
use quantspec_core::{Error, Result};

/// Weights of a group.
pub(crate) const GROUP: usize = WEIGHT_GROUP;

// A tile holds 16 vectors of 8 k.
const _: () = assert!(GROUP == 128);

/// Version of the format that [`encode`] writes, for files that keep it. Change it when the bytes change.
pub(crate) const LAYOUT: &str = "cpu tiles 2";

/// Outputs of a tile.
pub(crate) const TILE_ROWS: usize = 16;

/// Bytes of scales and zeros of a tile.
pub(crate) const PARAMS: usize = 2 * 2 * TILE_ROWS;

/// Rows that share one pass.
const ROWS: usize = 4;

/// Bits of a code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bits {
    Four,
    Eight,
}

impl Bits {
    /// Bytes of a tile.
    pub(crate) const fn tile_bytes(self) -> usize {
        PARAMS
            + match self {
                Bits::Four => TILE_ROWS * GROUP / 2,
                Bits::Eight => TILE_ROWS * GROUP,
            }
    }

    /// The largest code.
    pub(crate) const fn top(self) -> u8 {
        match self {
            Bits::Four => 15,
            Bits::Eight => 255,
        }
    }
}

const _: () = assert!(Bits::Four.tile_bytes() == 1088 && Bits::Eight.tile_bytes() == 2112);

/// A draft weight matrix.
pub(crate) struct Tiles {
    pub(crate) bits: Bits,
    /// Panels of 32 outputs, two tiles high.
    pub(crate) panels: usize,
    pub(crate) k: usize,
    pub(crate) data: Array<u8>,
}

impl Tiles {
    /// Bytes of one panel.
    pub(crate) const fn panel_bytes(k: usize, bits: Bits) -> usize {
        PANEL / TILE_ROWS * k.div_ceil(GROUP) * bits.tile_bytes()
    }

    /// A matrix of zeros, to be filled panel by panel.
    pub(crate) fn zeros(panels: usize, k: usize, bits: Bits) -> Result<Tiles> {
        Ok(Tiles { bits, panels, k, data: Array::zeros(panels * Tiles::panel_bytes(k, bits))? })
    }

    /// One panel for m rows: `out[m][32]`.
    pub(crate) fn panel(&self, simd: Simd, index: usize, acts: &Acts, m: usize, out: &mut [f32]) {
        let len = Tiles::panel_bytes(self.k, self.bits);
        let tiles = &self.data[index * len..(index + 1) * len];
        for (half, tiles) in tiles.chunks_exact(len / 2).enumerate() {
            for (first, rows) in groups(m, ROWS) {
                let part = Operands {
                    bits: self.bits,
                    tiles,
                    q: &acts.q[first * acts.width..],
                    width: acts.width,
                    scale: &acts.scale[first * acts.groups..],
                    sum: &acts.sum[first * acts.groups..],
                    groups: acts.groups,
                };
                let out = &mut out[first * PANEL + half * TILE_ROWS..];
                part.rows(simd, rows, out);
            }
        }
    }
}

/// Quantises a panel: `rows` f32 `[rows][k]`, up to 32 of them, into the panel's tiles. The result equals
/// [`quantspec_core::quantize::quantize_weights_row`].
///
/// # Errors
/// [`quantspec_core::ErrorKind::NotFinite`] if the range of a group exceeds f16.
pub(crate) fn encode(simd: Simd, bits: Bits, rows: &[f32], k: usize, panel: &mut [u8]) -> Result<()> {
    let (groups, bytes) = (k.div_ceil(GROUP), bits.tile_bytes());
    let mut codes = [0u8; GROUP];
    for (lane, row) in rows.chunks_exact(k).enumerate() {
        for (g, group) in row.chunks(GROUP).enumerate() {
            let out = &mut codes;
            let (s, z) = portable!(simd, group_body(group: &[f32], bits: Bits, out: &mut [u8; GROUP]) -> (u16, u16));
            if !f16_is_finite(s) || !f16_is_finite(z) {
                return Err(Error::not_finite("a group of weights spans more than half precision can hold"));
            }
            let tile = &mut panel[(lane / TILE_ROWS * groups + g) * bytes..][..bytes];
            let lane = lane % TILE_ROWS;
            tile[2 * lane..][..2].copy_from_slice(&s.to_le_bytes());
            tile[2 * (TILE_ROWS + lane)..][..2].copy_from_slice(&z.to_le_bytes());
            let tile = &mut tile[PARAMS..];
            match bits {
                Bits::Four => {
                    for (v, codes) in codes.chunks_exact(8).enumerate() {
                        for b in 0..4 {
                            tile[v * 64 + lane * 4 + b] = codes[b] | codes[4 + b] << 4;
                        }
                    }
                }
                Bits::Eight => {
                    for (v, codes) in codes.chunks_exact(4).enumerate() {
                        tile[v * 64 + lane * 4..][..4].copy_from_slice(codes);
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
fn group_body<const FMA: bool>(x: &[f32], bits: Bits, codes: &mut [u8; GROUP]) -> (u16, u16) {
    let top = f32::from(bits.top());
    let mut padded = [x[0]; GROUP];
    padded[..x.len()].copy_from_slice(x);
    let (low, high) = (Group::plain(&padded).least(), Group::plain(&padded).greatest());
    codes.fill(0);
    if low == high {
        return (0, f16_bits(low));
    }
    let mut params = halves((high - low) / top, low);
    if bits == Bits::Four && f16_is_finite(params.0) && f16_is_finite(params.1) {
        params = Group::plain(x).search(low, high, params, &SHRINK);
    }
    let (step, zero) = (f16_value(params.0), f16_value(params.1));
    let mut out = [0u8; GROUP];
    for (code, x) in out.iter_mut().zip(&padded) {
        *code = rint_i32(((x - zero) / step).clamp(0.0, top)) as u8;
    }
    codes[..x.len()].copy_from_slice(&out[..x.len()]);
    params
}

/// Stored parameters, bits of f16: the scale of a group that is not constant, and its zero.
#[inline(always)]
pub(crate) fn halves(scale: f32, zero: f32) -> (u16, u16) {
    (f16_bits(scale.max(SCALE_MIN)), f16_bits(zero))
}

/// Lanes of the sums, whose order core defines.
const SUM_LANES: usize = 32;

/// The code of a weight during the search. Nothing is NaN here, so a comparison is one vector instruction.
#[inline(always)]
fn trial_code(x: f32, zero: f32, inverse: f32) -> f32 {
    let steps = (x - zero) * inverse;
    let steps = if steps > 0.0 { steps } else { 0.0 };
    rint(if steps < 15.0 { steps } else { 15.0 })
}

/// A group of weights: its range, and the search for its parameters. If `WEIGHTED`, `importance` has a factor of each squared
/// error.
pub(crate) struct Group<'a, const WEIGHTED: bool> {
    pub(crate) x: &'a [f32],
    pub(crate) importance: &'a [f32],
}

impl<'a> Group<'a, false> {
    /// Weights of equal importance.
    pub(crate) fn plain(x: &'a [f32]) -> Self {
        Group { x, importance: &[] }
    }
}

impl<const WEIGHTED: bool> Group<'_, WEIGHTED> {
    /// The smallest weight; the length is a multiple of sixteen.
    #[inline(always)]
    pub(crate) fn least(&self) -> f32 {
        self.fold(f32::INFINITY, |a, b| if b < a { b } else { a })
    }

    /// The largest weight; the length is a multiple of sixteen.
    #[inline(always)]
    pub(crate) fn greatest(&self) -> f32 {
        self.fold(f32::NEG_INFINITY, |a, b| if b > a { b } else { a })
    }

    #[inline(always)]
    fn fold(&self, start: f32, fold: impl Fn(f32, f32) -> f32) -> f32 {
        let mut lanes = [start; 16];
        for x in self.x.as_chunks::<16>().0 {
            for l in 0..16 {
                lanes[l] = fold(lanes[l], x[l]);
            }
        }
        fold16(lanes, fold)
    }

    /// Σ importance · `term(weight)` over the group.
    #[inline(always)]
    fn sum(&self, term: impl Fn(f32) -> f32) -> f32 {
        let (mut even, mut odd) = ([0f32; 16], [0f32; 16]);
        let (whole, tail) = self.x.as_chunks::<SUM_LANES>();
        let (of_whole, of_tail) = self.importance.as_chunks::<SUM_LANES>();
        for (i, x) in whole.iter().enumerate() {
            let factors = if WEIGHTED { &of_whole[i] } else { &[1.0; SUM_LANES] };
            for l in 0..16 {
                even[l] += factors[l] * term(x[l]);
            }
            for l in 0..16 {
                odd[l] += factors[16 + l] * term(x[16 + l]);
            }
        }
        for (l, x) in tail.iter().enumerate() {
            let lane = if l < 16 { &mut even[l] } else { &mut odd[l - 16] };
            *lane += if WEIGHTED { of_tail[l] } else { 1.0 } * term(*x);
        }
        for l in 0..16 {
            even[l] += odd[l];
        }
        sum16(even)
    }

    /// Σ importance · (w − (code·scale + zero))².
    #[inline(always)]
    pub(crate) fn squared_error(&self, params: (u16, u16)) -> f32 {
        let (scale, zero) = (f16_value(params.0), f16_value(params.1));
        let inverse = 1.0 / scale;
        self.sum(|x| {
            let error = x - (trial_code(x, zero, inverse) * scale + zero);
            error * error
        })
    }

    /// The same with codes of both nibbles, −8..=247.
    #[inline(always)]
    pub(crate) fn squared_error_of_both(&self, params: (u16, u16)) -> f32 {
        let (step, zero) = (f16_value(params.0) / 16.0, f16_value(params.1));
        let inverse = 1.0 / step;
        self.sum(|x| {
            let steps = (x - zero) * inverse;
            let steps = if steps > -8.0 { steps } else { -8.0 };
            let error = x - (rint(if steps < 247.0 { steps } else { 247.0 }) * step + zero);
            error * error
        })
    }

    /// Least-squares fit to the codes that the parameters give.
    #[inline(always)]
    fn fit(&self, params: (u16, u16)) -> Option<(u16, u16)> {
        let (scale, zero) = (f16_value(params.0), f16_value(params.1));
        let inverse = 1.0 / scale;
        let code = |x: f32| trial_code(x, zero, inverse);
        let (codes, squares) = (self.sum(code), self.sum(|x| code(x) * code(x)));
        let (values, products) = (self.sum(|x| x - zero), self.sum(|x| code(x) * (x - zero)));
        let count = self.sum(|_| 1.0);
        let spread = count * squares - codes * codes;
        let scale = (count * products - codes * values) / spread;
        (spread > 0.0).then(|| halves(scale, zero + (values - scale * codes) / count))
    }

    /// The better of two, by error.
    #[inline(always)]
    pub(crate) fn better(&self, best: (f32, (u16, u16)), params: (u16, u16)) -> (f32, (u16, u16)) {
        if !f16_is_finite(params.0) || !f16_is_finite(params.1) {
            return best;
        }
        let error = self.squared_error(params);
        if error < best.0 { (error, params) } else { best }
    }

    /// Core's search, from the whole range.
    #[inline(always)]
    pub(crate) fn search(&self, low: f32, high: f32, whole: (u16, u16), shrink: &[f32]) -> (u16, u16) {
        let range = high - low;
        let mut best = (self.squared_error(whole), whole);
        for below in shrink {
            for above in shrink {
                let zero = low + below * range;
                best = self.better(best, halves(((high - above * range) - zero) / 15.0, zero));
            }
        }
        for _ in 0..FITS {
            if let Some(params) = self.fit(best.1) {
                best = self.better(best, params);
            }
        }
        best.1
    }
}

/// Quantised activations, with a maximum number of rows.
pub(crate) struct Acts {
    /// `[m][width]`, width = groups · 128.
    q: Array<i8>,
    /// `[m][groups]`
    scale: Array<f32>,
    /// scale · Σ q, `[m][groups]`
    sum: Array<f32>,
    width: usize,
    groups: usize,
}

impl Acts {
    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        self.q.bytes() + self.scale.bytes() + self.sum.bytes()
    }

    /// Room for `m` rows of `k`.
    pub(crate) fn zeros(m: usize, k: usize) -> Result<Acts> {
        let groups = k.div_ceil(GROUP);
        Ok(Acts {
            q: Array::zeros(m * groups * GROUP)?,
            scale: Array::zeros(m * groups)?,
            sum: Array::zeros(m * groups)?,
            width: groups * GROUP,
            groups,
        })
    }

    /// Bytes for `m` rows of `k`.
    pub(crate) const fn bytes_of(m: usize, k: usize) -> usize {
        m * k.div_ceil(GROUP) * (GROUP + 8)
    }

    pub(crate) fn fits(&self, tiles: &Tiles, m: usize) -> bool {
        self.groups == tiles.k.div_ceil(GROUP) && self.q.len() >= m * self.width
    }

    /// Quantises m rows of k, `stride` apart, to codes of `−most..=most`; `k` determines the layout until the next call.
    pub(crate) fn quantize(&mut self, simd: Simd, most: f32, x: &[f32], stride: usize, m: usize, k: usize) {
        self.groups = k.div_ceil(GROUP);
        self.width = self.groups * GROUP;
        for j in 0..m {
            let row = &x[j * stride..][..k];
            let q = &mut self.q[j * self.width..][..self.width];
            let (scale, sum) =
                (&mut self.scale[j * self.groups..][..self.groups], &mut self.sum[j * self.groups..][..self.groups]);
            portable!(simd, quantize_body(most: f32, row: &[f32], q: &mut [i8], scale: &mut [f32], sum: &mut [f32]));
        }
    }
}

#[inline(always)]
fn quantize_body<const FMA: bool>(largest: f32, x: &[f32], q: &mut [i8], scale: &mut [f32], sum: &mut [f32]) {
    for (g, q) in q.chunks_exact_mut(GROUP).enumerate() {
        let (v, most) = group::<GROUP>(x, g);
        let inverse = inverse_step(largest, most);
        let mut total = 0i32;
        for (q, v) in q.iter_mut().zip(&v) {
            let code = rint_i32(v * inverse);
            // Wraps only for codes of NaN, which the scale reveals.
            total = total.wrapping_add(code);
            *q = code as i8;
        }
        scale[g] = most / largest;
        sum[g] = most / largest * total as f32;
    }
}

/// One column of tiles and a few rows of activations.
struct Operands<'a> {
    bits: Bits,
    tiles: &'a [u8],
    q: &'a [i8],
    width: usize,
    scale: &'a [f32],
    sum: &'a [f32],
    groups: usize,
}

impl Operands<'_> {
    /// `out[j][16]`, rows 32 apart.
    fn rows(&self, simd: Simd, m: usize, out: &mut [f32]) {
        assert!(
            self.tiles.len() == self.groups * self.bits.tile_bytes()
                && self.width == self.groups * GROUP
                && self.q.len() >= m * self.width
                && self.scale.len() >= m * self.groups
                && self.sum.len() >= m * self.groups
                && out.len() >= (m - 1) * PANEL + TILE_ROWS
                && m <= ROWS
        );
        #[cfg(target_arch = "x86_64")]
        match simd {
            // SAFETY: the CPU has these features, as the path was chosen; the lengths were checked above.
            Simd::Avx512 | Simd::Amx => unsafe {
                return match m {
                    1 => avx512::column::<1>(self, out.as_mut_ptr()),
                    2 => avx512::column::<2>(self, out.as_mut_ptr()),
                    3 => avx512::column::<3>(self, out.as_mut_ptr()),
                    _ => avx512::column::<4>(self, out.as_mut_ptr()),
                };
            },
            // SAFETY: as above.
            Simd::Avx2 => unsafe {
                for j in 0..m {
                    let out = out.as_mut_ptr().add(j * PANEL);
                    match self.bits {
                        Bits::Four => avx2::column::<16>(self, j, out),
                        Bits::Eight => avx2::column::<32>(self, j, out),
                    }
                }
                return;
            },
            _ => (),
        }
        let part = self;
        for j in 0..m {
            let out = &mut out[j * PANEL..][..TILE_ROWS];
            portable!(simd, column_body(part: &Operands, j: usize, out: &mut [f32]));
        }
    }
}

#[inline(always)]
fn column_body<const FMA: bool>(part: &Operands, j: usize, out: &mut [f32]) {
    let mut acc = [0f32; TILE_ROWS];
    for (g, tile) in part.tiles.chunks_exact(part.bits.tile_bytes()).enumerate() {
        let q = &part.q[j * part.width + g * GROUP..][..GROUP];
        let mut dot = [0i32; TILE_ROWS];
        let codes = &tile[PARAMS..];
        for (v, codes) in codes.chunks_exact(64).enumerate() {
            for b in 0..4 {
                match part.bits {
                    Bits::Four => {
                        let (low, high) = (i32::from(q[8 * v + b]), i32::from(q[8 * v + 4 + b]));
                        for l in 0..TILE_ROWS {
                            let code = i32::from(codes[4 * l + b]);
                            dot[l] += (code & 15) * low + (code >> 4) * high;
                        }
                    }
                    Bits::Eight => {
                        let q = i32::from(q[4 * v + b]);
                        for l in 0..TILE_ROWS {
                            dot[l] += i32::from(codes[4 * l + b]) * q;
                        }
                    }
                }
            }
        }
        let (xs, xsum) = (part.scale[j * part.groups + g], part.sum[j * part.groups + g]);
        let param = |i: usize| f16_value(u16::from_le_bytes([tile[2 * i], tile[2 * i + 1]]));
        for l in 0..TILE_ROWS {
            acc[l] = madd::<FMA>(dot[l] as f32, param(l) * xs, acc[l]);
            acc[l] = madd::<FMA>(param(TILE_ROWS + l), xsum, acc[l]);
        }
    }
    out.copy_from_slice(&acc);
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use super::{Bits, GROUP, Operands, PANEL, PARAMS};
    use crate::dispatch::Prefetch;
    use std::arch::x86_64::*;

    /// `vpdpbusd` on codes. High nibbles are used in place, 16 times too large, and shifted once per group.
    ///
    /// # Safety
    /// The lengths that `Operands::rows` checks for M rows; `out`: M rows of 16, 32 apart.
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    pub(super) unsafe fn column<const M: usize>(part: &Operands, out: *mut f32) {
        // SAFETY: passed on.
        unsafe {
            match part.bits {
                Bits::Four => tiles::<M, 16>(part, out),
                Bits::Eight => tiles::<M, 32>(part, out),
            }
        }
    }

    /// V code vectors to a tile.
    ///
    /// # Safety
    /// As [`column`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn tiles<const M: usize, const V: usize>(part: &Operands, out: *mut f32) {
        // SAFETY: offsets are within the lengths that the caller guarantees.
        unsafe {
            let (low, prefetch) = (_mm512_set1_epi8(15), Prefetch::choose(M > 1));
            let mut acc = [_mm512_setzero_ps(); M];
            for g in 0..part.groups {
                let tile = part.tiles.as_ptr().add(g * (PARAMS + V * 64));
                let q = part.q.as_ptr().add(g * GROUP);
                let mut a = [_mm512_setzero_si512(); M];
                let mut b = a;
                if let Some(prefetch) = prefetch {
                    prefetch.line(tile);
                }
                for v in 0..16 {
                    if let Some(prefetch) = prefetch {
                        for line in 0..V / 16 {
                            prefetch.line(tile.wrapping_add(PARAMS + v * 4 * V + line * 64));
                        }
                    }
                    let (c0, c1) = if V == 16 {
                        let c = _mm512_loadu_si512(tile.add(PARAMS + v * 64).cast());
                        (_mm512_and_si512(c, low), _mm512_andnot_si512(low, c))
                    } else {
                        let c = tile.add(PARAMS + v * 128);
                        (_mm512_loadu_si512(c.cast()), _mm512_loadu_si512(c.add(64).cast()))
                    };
                    for j in 0..M {
                        let q = q.add(j * part.width + v * 8).cast::<i32>();
                        a[j] = _mm512_dpbusd_epi32(a[j], c0, _mm512_set1_epi32(q.read_unaligned()));
                        b[j] = _mm512_dpbusd_epi32(b[j], c1, _mm512_set1_epi32(q.add(1).read_unaligned()));
                    }
                }
                let s = _mm512_cvtph_ps(_mm256_loadu_si256(tile.cast()));
                let z = _mm512_cvtph_ps(_mm256_loadu_si256(tile.add(32).cast()));
                for j in 0..M {
                    let b = if V == 16 { _mm512_srai_epi32::<4>(b[j]) } else { b[j] };
                    let dot = _mm512_cvtepi32_ps(_mm512_add_epi32(a[j], b));
                    let xs = _mm512_set1_ps(*part.scale.get_unchecked(j * part.groups + g));
                    let xsum = _mm512_set1_ps(*part.sum.get_unchecked(j * part.groups + g));
                    acc[j] = _mm512_fmadd_ps(dot, _mm512_mul_ps(s, xs), acc[j]);
                    acc[j] = _mm512_fmadd_ps(z, xsum, acc[j]);
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
    use super::{GROUP, Operands, PARAMS};
    use crate::dispatch::Prefetch;
    use std::arch::x86_64::*;

    /// `vpmaddubsw` on nibbles, V code vectors per tile. Eight products of at most 2·15·127 fit in an i16 lane before it must
    /// be widened; products of whole bytes would not. High nibbles of 8-bit codes count sixteen times.
    ///
    /// # Safety
    /// The lengths that `Operands::rows` checks, for row j; `out`: 16 floats.
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) unsafe fn column<const V: usize>(part: &Operands, j: usize, out: *mut f32) {
        // SAFETY: offsets are within the lengths that the caller guarantees.
        unsafe {
            let low = _mm256_set1_epi8(15);
            let ones = _mm256_set1_epi16(1);
            let prefetch = Prefetch::choose(false);
            let mut acc = [_mm256_setzero_ps(); 2];
            for g in 0..part.groups {
                let tile = part.tiles.as_ptr().add(g * (PARAMS + 64 * V));
                let q = part.q.as_ptr().add(j * part.width + g * GROUP).cast::<i32>();
                // Sums over low and over high nibbles of the two halves of the outputs.
                let mut dots = [[_mm256_setzero_si256(); 2]; 2];
                // Both nibbles of a 4-bit vector go into one sum, so four vectors fill a lane; of an 8-bit one, eight.
                for first in (0..V).step_by(V / 4) {
                    let mut sums = [[_mm256_setzero_si256(); 2]; 2];
                    for v in first..first + V / 4 {
                        let codes = tile.add(PARAMS + v * 64);
                        if let Some(prefetch) = prefetch {
                            prefetch.line(codes);
                        }
                        let (q0, q1) = if V == 16 {
                            (q.add(2 * v).read_unaligned(), q.add(2 * v + 1).read_unaligned())
                        } else {
                            (q.add(v).read_unaligned(), q.add(v).read_unaligned())
                        };
                        let (q0, q1) = (_mm256_set1_epi32(q0), _mm256_set1_epi32(q1));
                        for h in 0..2 {
                            let c = _mm256_loadu_si256(codes.add(32 * h).cast());
                            let a = _mm256_maddubs_epi16(_mm256_and_si256(c, low), q0);
                            let b = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16::<4>(c), low), q1);
                            if V == 16 {
                                sums[0][h] = _mm256_add_epi16(sums[0][h], _mm256_add_epi16(a, b));
                            } else {
                                sums[0][h] = _mm256_add_epi16(sums[0][h], a);
                                sums[1][h] = _mm256_add_epi16(sums[1][h], b);
                            }
                        }
                    }
                    for (dots, sums) in dots.iter_mut().zip(sums) {
                        for (dot, sum) in dots.iter_mut().zip(sums) {
                            *dot = _mm256_add_epi32(*dot, _mm256_madd_epi16(sum, ones));
                        }
                    }
                }
                let [mut dot, high] = dots;
                if V == 32 {
                    for h in 0..2 {
                        dot[h] = _mm256_add_epi32(dot[h], _mm256_slli_epi32::<4>(high[h]));
                    }
                }
                let xs = _mm256_set1_ps(*part.scale.get_unchecked(j * part.groups + g));
                let xsum = _mm256_set1_ps(*part.sum.get_unchecked(j * part.groups + g));
                for h in 0..2 {
                    let s = _mm256_cvtph_ps(_mm_loadu_si128(tile.add(16 * h).cast()));
                    let z = _mm256_cvtph_ps(_mm_loadu_si128(tile.add(32 + 16 * h).cast()));
                    acc[h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[h]), _mm256_mul_ps(s, xs), acc[h]);
                    acc[h] = _mm256_fmadd_ps(z, xsum, acc[h]);
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
    use crate::testing::{Noise, bits, paths};
    use quantspec_core::quantize::{ACTIVATION_8, quantize_activations, quantize_head_row, quantize_weights_row};

    #[test]
    fn codes_are_those_of_core() {
        let mut noise = Noise::new(11);
        for k in [7, 128, 172, 1376] {
            let mut w = noise.normals(33 * k);
            w[..k].fill(0.5); // constant groups
            w[k] = 900.0;
            // Rows from where scales underflow to the end of f16's range, and groups far from zero.
            for (n, row) in w.chunks_exact_mut(k).enumerate().skip(2) {
                let offset = if n % 3 == 0 { 40.0 } else { 0.0 };
                row.iter_mut().for_each(|w| *w = (*w + offset) * 2f32.powi(n as i32 - 22));
            }
            // A negative zero as the minimum is kept.
            w[20 * k..21 * k].iter_mut().filter(|w| **w < 0.0).for_each(|w| *w = -0.0);
            for bits in [Bits::Four, Bits::Eight] {
                for simd in paths() {
                    let mut tiles = Tiles::zeros(2, k, bits).unwrap();
                    let len = Tiles::panel_bytes(k, bits);
                    encode(simd, bits, &w[..32 * k], k, &mut tiles.data[..len]).unwrap();
                    encode(simd, bits, &w[32 * k..], k, &mut tiles.data[len..]).unwrap();
                    for (n, row) in w.chunks_exact(k).enumerate() {
                        let want = if bits == Bits::Four { quantize_weights_row(row) } else { quantize_head_row(row) }
                            .unwrap();
                        for c in 0..k {
                            let (g, i) = (c / GROUP, c % GROUP);
                            let tile = &tiles.data[(n / 16 * k.div_ceil(GROUP) + g) * bits.tile_bytes()..]
                                [..bits.tile_bytes()];
                            let param = |at: usize| u16::from_le_bytes([tile[2 * at], tile[2 * at + 1]]);
                            assert_eq!(param(n % 16), want.params[g].scale.to_bits());
                            assert_eq!(param(16 + n % 16), want.params[g].zero.to_bits());
                            let code = match bits {
                                Bits::Four => tile[PARAMS + i / 8 * 64 + n % 16 * 4 + i % 4] >> (i % 8 / 4 * 4) & 15,
                                Bits::Eight => tile[PARAMS + i / 4 * 64 + n % 16 * 4 + i % 4],
                            };
                            assert_eq!(code, want.codes[c], "row {n}, k {c}, {bits:?}, {simd:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn the_bytes_of_a_draft_file_are_fixed() {
        let rows: Vec<f32> = (0..17 * 200).map(|i| ((i * 37) % 101) as f32 - 50.0).collect();
        for (bits, bytes) in [
            (Bits::Four, 0x0fa6_1116_dddd_5ebc_8b86_d9cb_698a_1e16),
            (Bits::Eight, 0xf337_81da_4165_cefb_54b5_81c5_1a2f_c0ea),
        ] {
            let mut tiles = Tiles::zeros(1, 200, bits).unwrap();
            encode(Simd::Scalar, bits, &rows, 200, &mut tiles.data).unwrap();
            let seen = quantspec_model::draft_cache::source(0, &tiles.data);
            assert_eq!(seen, bytes, "{seen:#x}: other bytes need another LAYOUT than {LAYOUT:?}");
        }
    }

    #[test]
    fn gemms_match_core_on_every_path() {
        let mut noise = Noise::new(12);
        for k in [100, 128, 704] {
            let (w, x) = (noise.normals(32 * k), noise.normals(5 * k));
            for of in [Bits::Four, Bits::Eight] {
                let mut tiles = Tiles::zeros(1, k, of).unwrap();
                encode(Simd::Scalar, of, &w, k, &mut tiles.data).unwrap();
                for simd in paths() {
                    let mut acts = Acts::zeros(5, k).unwrap();
                    acts.quantize(simd, ACTIVATION_8, &x, k, 5, k);
                    let mut y = vec![f32::NAN; 5 * PANEL];
                    tiles.panel(simd, 0, &acts, 5, &mut y);
                    for j in 0..5 {
                        let want = quantize_activations(&x[j * k..][..k]).unwrap();
                        for n in 0..32 {
                            let row = &w[n * k..][..k];
                            let row = if of == Bits::Four { quantize_weights_row(row) } else { quantize_head_row(row) }
                                .unwrap();
                            let exact = row.dot(&want);
                            // An activation's code may differ by one at a tie.
                            let bound = 2e-2 + 1e-4 * exact.abs();
                            assert!((f64::from(y[j * PANEL + n]) - exact).abs() < bound, "{of:?} {simd:?} k {k}");
                        }
                        // Rows do not affect each other here either.
                        let mut alone = Acts::zeros(1, k).unwrap();
                        alone.quantize(simd, ACTIVATION_8, &x[j * k..], k, 1, k);
                        let mut one = vec![f32::NAN; PANEL];
                        tiles.panel(simd, 0, &alone, 1, &mut one);
                        assert_eq!(bits(&one), bits(&y[j * PANEL..][..PANEL]));
                    }
                }
            }
        }
    }

    #[test]
    fn nan_activations_have_a_nan_scale() {
        let k = 3 * GROUP;
        let x = Noise::new(13).normals(k);
        for simd in paths() {
            for bad in [f32::NAN, -f32::NAN, f32::INFINITY] {
                for count in [1, 2, GROUP] {
                    let mut x = x.clone();
                    x[GROUP..GROUP + count].fill(bad);
                    let mut acts = Acts::zeros(1, k).unwrap();
                    acts.quantize(simd, ACTIVATION_8, &x, k, 1, k);
                    let finite: Vec<bool> = acts.scale.iter().map(|scale| scale.is_finite()).collect();
                    assert_eq!(finite, [true, false, true], "{count} of {bad}, {simd:?}");
                }
            }
        }
    }

    #[test]
    fn weights_beyond_half_precision_are_an_error() {
        let mut panel = vec![0; Tiles::panel_bytes(128, Bits::Four)];
        let mut w = vec![0f32; 128];
        w[3] = 3e6;
        let error = encode(Simd::Scalar, Bits::Four, &w, 128, &mut panel).unwrap_err();
        assert_eq!(error.kind, quantspec_core::ErrorKind::NotFinite);
    }
}
