//! Flush: G tokens of one KV head become a page of nibble planes, with the bytes of core's `quantize_page` and `layout`.

use crate::attend::Shape;
use crate::dispatch::{Simd, portable};
use crate::lanes::{f16_bits, f16_is_finite, f16_value, fold16, rint_i32, take, widen};
use quantspec_core::cache::G;
use quantspec_core::config::Rounding;
use quantspec_core::quantize::SCALE_MIN;
use quantspec_core::{Error, Result};

/// Scratch of one thread.
pub(crate) struct Scratch {
    /// `[G][D]` keys or values.
    wide: Vec<f32>,
    /// Codes `16·U + L + 8`, `[G][D16]`.
    codes: Vec<u8>,
    /// Scale and zero of each group.
    scale: Vec<f32>,
    zero: Vec<f32>,
}

impl Scratch {
    pub(crate) fn new(shape: Shape) -> Scratch {
        let groups = shape.d.max(G);
        Scratch {
            wide: vec![0.0; G * shape.d],
            codes: vec![0; G * shape.d16],
            scale: vec![0.0; groups],
            zero: vec![0.0; groups],
        }
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        let floats = [&self.wide, &self.scale, &self.zero];
        floats.iter().map(|values| size_of_val(&values[..])).sum::<usize>() + self.codes.len()
    }

    /// Bytes of [`Scratch::new`].
    pub(crate) const fn bytes_of(shape: Shape) -> usize {
        G * (4 * shape.d + shape.d16) + 8 * if shape.d > G { shape.d } else { G }
    }
}

/// Quantises `keys` and `values`, `[G][D]` f16, into the blocks of a page; `lower` is empty if only U is kept.
///
/// # Errors
/// [`quantspec_core::ErrorKind::NotFinite`] for NaN and infinities.
pub(crate) fn page(
    simd: Simd,
    shape: Shape,
    rounding: Rounding,
    (keys, values): (&[u16], &[u16]),
    scratch: &mut Scratch,
    upper: &mut [u8],
    lower: &mut [u8],
) -> Result<()> {
    // Without an early exit, so that compilers vectorise it.
    let finite = |halves: &[u16]| halves.iter().fold(true, |finite, bits| finite & f16_is_finite(*bits));
    if !(finite(keys) && finite(values)) {
        return Err(Error::not_finite("keys or values of a page are NaN or infinite"));
    }
    let d = shape.d;
    widen(simd, keys, &mut scratch.wide);
    portable!(simd, key_codes(shape: Shape, rounding: Rounding, scratch: &mut Scratch));
    put_params(&mut upper[..4 * d], scratch, d);
    let (plane, low) = (&mut upper[shape.key_plane()..shape.value_params()], &mut lower[..]);
    let codes = &scratch.codes[..];
    portable!(simd, pack_keys(shape: Shape, codes: &[u8], plane: &mut [u8], low: &mut [u8]));
    widen(simd, values, &mut scratch.wide);
    portable!(simd, value_codes(shape: Shape, rounding: Rounding, scratch: &mut Scratch));
    let params = shape.value_params()..shape.value_plane();
    put_params(&mut upper[params], scratch, G);
    let low = if lower.is_empty() { lower } else { &mut lower[shape.lower_value_plane()..] };
    let (plane, codes) = (&mut upper[shape.value_plane()..], &scratch.codes[..]);
    portable!(simd, pack_values(shape: Shape, codes: &[u8], plane: &mut [u8], low: &mut [u8]));
    Ok(())
}

fn put_params(out: &mut [u8], scratch: &Scratch, groups: usize) {
    for i in 0..groups {
        out[2 * i..][..2].copy_from_slice(&f16_bits(scratch.scale[i]).to_le_bytes());
        out[2 * (groups + i)..][..2].copy_from_slice(&f16_bits(scratch.zero[i]).to_le_bytes());
    }
}

/// Stored scale and zero of a group, as f32. A constant group has scale 0 and is exact.
#[inline(always)]
fn params(rounding: Rounding, low: f32, high: f32) -> (f32, f32) {
    if low == high {
        return (0.0, low);
    }
    let (scale, zero) = match rounding {
        Rounding::Paper => ((high - low) / 15.0, low),
        Rounding::Balanced => {
            let step = (high - low) / 255.0;
            (16.0 * step, low + 8.0 * step)
        }
    };
    (f16_value(f16_bits(scale.max(SCALE_MIN))), f16_value(f16_bits(zero)))
}

/// Codes `16·U + L + 8` of `x`, with one scale and zero per element. Constant groups use scale 1, so U and L are 0.
#[inline(always)]
fn codes<const N: usize>(rounding: Rounding, x: [f32; N], scale: [f32; N], zero: [f32; N]) -> [u8; N] {
    let mut out = [0u8; N];
    match rounding {
        Rounding::Balanced => {
            for l in 0..N {
                let code = ((x[l] - zero[l]) / (scale[l] / 16.0)).clamp(-8.0, 247.0);
                out[l] = (rint_i32(code) + 8) as u8;
            }
        }
        Rounding::Paper => {
            for l in 0..N {
                let steps = (x[l] - zero[l]) / scale[l];
                let upper = rint_i32(steps.clamp(0.0, 15.0));
                let lower = rint_i32((16.0 * (steps - upper as f32)).clamp(-8.0, 7.0));
                out[l] = (16 * upper + lower + 8) as u8;
            }
        }
    }
    out
}

/// Lanes of the loops over channels; the last eight channels of a row may be half as many.
const LANES: usize = 16;

/// Keys: a group is a channel.
#[inline(always)]
fn key_codes<const FMA: bool>(shape: Shape, rounding: Rounding, scratch: &mut Scratch) {
    let whole = shape.d / LANES * LANES;
    for c in (0..whole).step_by(LANES) {
        codes_of_channels::<LANES>(shape, rounding, c, scratch);
    }
    for c in (whole..shape.d).step_by(LANES / 2) {
        codes_of_channels::<{ LANES / 2 }>(shape, rounding, c, scratch);
    }
}

/// Key channels c .. c + N.
#[inline(always)]
fn codes_of_channels<const N: usize>(shape: Shape, rounding: Rounding, c: usize, scratch: &mut Scratch) {
    let Shape { d, d16, .. } = shape;
    let (mut low, mut high) = ([f32::INFINITY; N], [f32::NEG_INFINITY; N]);
    for row in scratch.wide.chunks_exact(d) {
        widen_range(&take(row, c), &mut low, &mut high);
    }
    let (mut divisor, mut zero) = ([0f32; N], [0f32; N]);
    for l in 0..N {
        let (scale, z) = params(rounding, low[l], high[l]);
        (scratch.scale[c + l], scratch.zero[c + l]) = (scale, z);
        (divisor[l], zero[l]) = (if scale == 0.0 { 1.0 } else { scale }, z);
    }
    for (row, out) in scratch.wide.chunks_exact(d).zip(scratch.codes.chunks_exact_mut(d16)) {
        out[c..][..N].copy_from_slice(&codes::<N>(rounding, take(row, c), divisor, zero));
    }
}

/// Lowers `low` and raises `high` to include x.
#[inline(always)]
fn widen_range<const N: usize>(x: &[f32; N], low: &mut [f32; N], high: &mut [f32; N]) {
    for l in 0..N {
        low[l] = if x[l] < low[l] { x[l] } else { low[l] };
        high[l] = if x[l] > high[l] { x[l] } else { high[l] };
    }
}

/// Values: a group is a token.
#[inline(always)]
fn value_codes<const FMA: bool>(shape: Shape, rounding: Rounding, scratch: &mut Scratch) {
    let Shape { d, d16, .. } = shape;
    for (token, (row, out)) in scratch.wide.chunks_exact(d).zip(scratch.codes.chunks_exact_mut(d16)).enumerate() {
        let (mut low, mut high) = ([f32::INFINITY; LANES], [f32::NEG_INFINITY; LANES]);
        // If a row has not a multiple of sixteen channels, its last sixteen overlap others; eight channels are padded.
        let mut padded = [row[0]; LANES];
        padded[..d.min(LANES)].copy_from_slice(&row[..d.min(LANES)]);
        let last = d.saturating_sub(LANES);
        widen_range(&padded, &mut low, &mut high);
        for i in 1..d.div_ceil(LANES) {
            widen_range(&take(row, last.min(LANES * i)), &mut low, &mut high);
        }
        let (scale, zero) = params(rounding, fold16(low, f32::min), fold16(high, f32::max));
        (scratch.scale[token], scratch.zero[token]) = (scale, zero);
        let divisor = if scale == 0.0 { 1.0 } else { scale };
        let (divisor, zero) = ([divisor; LANES], [zero; LANES]);
        out[..LANES].copy_from_slice(&codes(rounding, padded, divisor, zero));
        out[d.min(LANES)..LANES].fill(0);
        for i in 1..d.div_ceil(LANES) {
            let c = last.min(LANES * i);
            out[c..][..LANES].copy_from_slice(&codes(rounding, take(row, c), divisor, zero));
        }
    }
}

const NIBBLES: u64 = 0x0f0f_0f0f_0f0f_0f0f;

/// Lanes are tokens; a lane holds eight consecutive channels, the first four in its even nibbles.
#[inline(always)]
fn pack_keys<const FMA: bool>(shape: Shape, codes: &[u8], upper: &mut [u8], lower: &mut [u8]) {
    let Shape { d, d16, .. } = shape;
    let lane = |nibbles: u64| nibbles as u32 | ((nibbles >> 32) as u32) << 4;
    for block in 0..G / 16 {
        for step in 0..d / 8 {
            let mut x = [0u64; 16];
            for (token, x) in x.iter_mut().enumerate() {
                *x = u64::from_le_bytes(take(codes, (16 * block + token) * d16 + 8 * step));
            }
            let at = ((block / 4 * (d / 8) + step) * 4 + block % 4) * 64;
            put(upper, at, x.map(|x| lane((x >> 4) & NIBBLES)));
            if !lower.is_empty() {
                put(lower, at, x.map(|x| lane(x & NIBBLES).rotate_right(4)));
            }
        }
    }
}

/// Writes a vector of lanes from byte `at` on.
#[inline(always)]
fn put(out: &mut [u8], at: usize, lanes: [u32; 16]) {
    let out = &mut out[at..at + 64];
    for (out, lane) in out.chunks_exact_mut(4).zip(lanes) {
        out.copy_from_slice(&lane.to_le_bytes());
    }
}

/// Lanes are channels; a lane holds eight consecutive tokens. Codes after D are zeros.
#[inline(always)]
fn pack_values<const FMA: bool>(shape: Shape, codes: &[u8], upper: &mut [u8], lower: &mut [u8]) {
    let d16 = shape.d16;
    for (first, vectors) in shape.value_groups() {
        for step in 0..G / 8 {
            for vector in 0..vectors {
                let c = (first + vector) * 16;
                let (mut u, mut l) = ([0u32; 16], [0u32; 16]);
                for i in 0..8 {
                    let row: [u8; 16] = take(codes, (8 * step + i) * d16 + c);
                    let nibble = if i < 4 { 8 * i } else { 8 * (i - 4) + 4 };
                    for lane in 0..16 {
                        let code = u32::from(row[lane]);
                        u[lane] |= (code >> 4) << nibble;
                        l[lane] |= (code & 15) << nibble;
                    }
                }
                let at = (first * G / 8 + step * vectors + vector) * 64;
                put(upper, at, u);
                if !lower.is_empty() {
                    put(lower, at, l.map(|lane| lane.rotate_right(4)));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Noise, paths};
    use half::f16;
    use quantspec_core::layout::Layout;
    use quantspec_core::quantize::quantize_page;

    fn halves(x: &[f16]) -> Vec<u16> {
        x.iter().map(|x| x.to_bits()).collect()
    }

    #[test]
    fn bytes_are_those_of_core() {
        let mut noise = Noise::new(3);
        for d in [8, 16, 40, 64, 80, 96, 128, 256] {
            let shape = Shape::new(d);
            let mut keys: Vec<f16> = noise.normals(G * d).into_iter().map(f16::from_f32).collect();
            let mut values: Vec<f16> = noise.normals(G * d).into_iter().map(f16::from_f32).collect();
            for t in 0..G {
                keys[t * d] = f16::from_f32(-3.25); // a constant channel
                keys[t * d + 1] = f16::from_f32(if t % 2 == 0 { 60000.0 } else { -60000.0 });
                keys[t * d + 2] = f16::from_bits((t % 3) as u16); // subnormals
                keys[t * d + 3] = f16::from_f32(100.0 + noise.normal()); // a biased channel
            }
            values[5 * d..6 * d].fill(f16::ZERO); // a constant token
            for rounding in [Rounding::Balanced, Rounding::Paper] {
                let page = quantize_page(&keys, &values, d, rounding).unwrap();
                let want = Layout::Cpu.pack(&page).unwrap();
                for simd in paths() {
                    let mut scratch = Scratch::new(shape);
                    let (mut upper, mut lower) = (vec![0xee; shape.upper_bytes()], vec![0xee; shape.lower_bytes()]);
                    upper[4 * d..shape.key_plane()].fill(0); // padding stays as it was allocated
                    super::page(
                        simd,
                        shape,
                        rounding,
                        (&halves(&keys), &halves(&values)),
                        &mut scratch,
                        &mut upper,
                        &mut lower,
                    )
                    .unwrap();
                    assert!(upper == want.upper, "upper block, D {d}, {rounding:?}, {simd:?}");
                    assert!(lower == want.lower, "lower block, D {d}, {rounding:?}, {simd:?}");
                    let mut alone = vec![0; shape.upper_bytes()];
                    super::page(
                        simd,
                        shape,
                        rounding,
                        (&halves(&keys), &halves(&values)),
                        &mut scratch,
                        &mut alone,
                        &mut [],
                    )
                    .unwrap();
                    assert!(alone == want.upper, "upper block without lower");
                }
            }
        }
    }

    #[test]
    fn non_finite_elements_are_errors() {
        let shape = Shape::new(16);
        for bad in [f16::NAN, f16::INFINITY, f16::NEG_INFINITY] {
            for at in 0..2 {
                let mut kv = [vec![0u16; G * 16], vec![0u16; G * 16]];
                kv[at][777] = bad.to_bits();
                let (mut upper, mut lower) = (vec![0; shape.upper_bytes()], vec![0; shape.lower_bytes()]);
                for simd in paths() {
                    let mut scratch = Scratch::new(shape);
                    let error =
                        page(simd, shape, Rounding::Balanced, (&kv[0], &kv[1]), &mut scratch, &mut upper, &mut lower)
                            .unwrap_err();
                    assert_eq!(error.kind, quantspec_core::ErrorKind::NotFinite);
                }
            }
        }
    }
}
