//! Tensor types of GGUF files: names, block sizes, and decoding to f32.
//!
//! A quantised row is a sequence of blocks, each with one or two f16 scales and packed codes. The f32 arithmetic follows
//! ggml's reference order (scale times sub-scale, times code, minus offset) without fused operations, so results are
//! bit-exact.

use half::{bf16, f16};

/// A tensor type that is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// IEEE single.
    F32,
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
    /// 32 codes of 4 bits, one scale.
    Q4_0,
    /// 32 codes of 4 bits, scale and minimum.
    Q4_1,
    /// 32 codes of 5 bits, one scale.
    Q5_0,
    /// 32 codes of 5 bits, scale and minimum.
    Q5_1,
    /// 32 codes of 8 bits, one scale.
    Q8_0,
    /// 256 codes of 2 bits; scales and minima of 4 bits for 16 codes each.
    Q2K,
    /// 256 codes of 3 bits; scales of 6 bits for 16 codes each.
    Q3K,
    /// 256 codes of 4 bits; scales and minima of 6 bits for 32 codes each.
    Q4K,
    /// 256 codes of 5 bits; scales and minima of 6 bits for 32 codes each.
    Q5K,
    /// 256 codes of 6 bits; scales of 8 bits for 16 codes each.
    Q6K,
    /// 32 codes of 4 bits, which select from uneven levels; one scale.
    Iq4Nl,
    /// 256 such codes; scales of 6 bits for 32 codes each.
    Iq4Xs,
}

/// Values of a block of the types with sub-scales.
const K: usize = 256;

/// Supported types: number in the file, encoding, name, values and bytes of a block.
const READ: &[(u32, Encoding, &str, usize, usize)] = &[
    (0, Encoding::F32, "F32", 1, 4),
    (1, Encoding::F16, "F16", 1, 2),
    (30, Encoding::Bf16, "BF16", 1, 2),
    (2, Encoding::Q4_0, "Q4_0", 32, 18),
    (3, Encoding::Q4_1, "Q4_1", 32, 20),
    (6, Encoding::Q5_0, "Q5_0", 32, 22),
    (7, Encoding::Q5_1, "Q5_1", 32, 24),
    (8, Encoding::Q8_0, "Q8_0", 32, 34),
    (10, Encoding::Q2K, "Q2_K", K, 84),
    (11, Encoding::Q3K, "Q3_K", K, 110),
    (12, Encoding::Q4K, "Q4_K", K, 144),
    (13, Encoding::Q5K, "Q5_K", K, 176),
    (14, Encoding::Q6K, "Q6_K", K, 210),
    (20, Encoding::Iq4Nl, "IQ4_NL", 32, 18),
    (23, Encoding::Iq4Xs, "IQ4_XS", K, 136),
];

/// Known types that are not supported; errors print their names.
const OTHERS: &[(u32, &str)] = &[
    (9, "Q8_1"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    // llama.cpp has removed these three; it rearranges Q4_0 at load.
    (31, "Q4_0_4_4"),
    (32, "Q4_0_4_8"),
    (33, "Q4_0_8_8"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
    (40, "NVFP4"),
    (41, "Q1_0"),
];

impl Encoding {
    /// The type with this number.
    ///
    /// # Errors
    /// The name of a type that is not supported, or None for an unknown number.
    pub fn of(number: u32) -> Result<Encoding, Option<&'static str>> {
        match READ.iter().find(|entry| entry.0 == number) {
            Some(entry) => Ok(entry.1),
            None => Err(OTHERS.iter().find(|entry| entry.0 == number).map(|entry| entry.1)),
        }
    }

    /// The names of all supported types, for hints.
    pub fn names() -> String {
        READ.iter().map(|entry| entry.2).collect::<Vec<_>>().join(", ")
    }

    /// The type's name in llama.cpp.
    pub fn name(self) -> &'static str {
        READ.iter().find(|entry| entry.1 == self).map_or("", |entry| entry.2)
    }

    /// Values and bytes of a block.
    pub fn block(self) -> (usize, usize) {
        READ.iter().find(|entry| entry.1 == self).map_or((1, 1), |entry| (entry.3, entry.4))
    }

    /// Decodes whole blocks; `raw` and `out` hold the same number of blocks ([`Encoding::block`]).
    pub fn decode(self, raw: &[u8], out: &mut [f32]) {
        match self {
            Encoding::F32 => each(raw, out, |raw, out: &mut [f32; 1]| out[0] = f32::from_le_bytes(*raw)),
            Encoding::F16 => each(raw, out, |raw, out: &mut [f32; 1]| out[0] = f16::from_le_bytes(*raw).to_f32()),
            Encoding::Bf16 => each(raw, out, |raw, out: &mut [f32; 1]| out[0] = bf16::from_le_bytes(*raw).to_f32()),
            Encoding::Q4_0 => each(raw, out, q4_0),
            Encoding::Q4_1 => each(raw, out, q4_1),
            Encoding::Q5_0 => each(raw, out, q5_0),
            Encoding::Q5_1 => each(raw, out, q5_1),
            Encoding::Q8_0 => each(raw, out, q8_0),
            Encoding::Q2K => each(raw, out, q2_k),
            Encoding::Q3K => each(raw, out, q3_k),
            Encoding::Q4K => each(raw, out, q4_k),
            Encoding::Q5K => each(raw, out, q5_k),
            Encoding::Q6K => each(raw, out, q6_k),
            Encoding::Iq4Nl => each(raw, out, iq4_nl),
            Encoding::Iq4Xs => each(raw, out, iq4_xs),
        }
    }
}

fn each<const BYTES: usize, const VALUES: usize>(
    raw: &[u8],
    out: &mut [f32],
    one: impl Fn(&[u8; BYTES], &mut [f32; VALUES]),
) {
    for (raw, out) in raw.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
        one(raw, out);
    }
}

/// The f16 at a byte.
fn half_at(raw: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([raw[at], raw[at + 1]]).to_f32()
}

/// The fifth bits of 32 codes.
fn fifth_bits(raw: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([raw[at], raw[at + 1], raw[at + 2], raw[at + 3]])
}

fn q4_0(raw: &[u8; 18], out: &mut [f32; 32]) {
    let d = half_at(raw, 0);
    for (i, &byte) in raw[2..].iter().enumerate() {
        out[i] = d * (f32::from(byte & 15) - 8.0);
        out[i + 16] = d * (f32::from(byte >> 4) - 8.0);
    }
}

fn q4_1(raw: &[u8; 20], out: &mut [f32; 32]) {
    let (d, m) = (half_at(raw, 0), half_at(raw, 2));
    for (i, &byte) in raw[4..].iter().enumerate() {
        out[i] = d * f32::from(byte & 15) + m;
        out[i + 16] = d * f32::from(byte >> 4) + m;
    }
}

fn q5_0(raw: &[u8; 22], out: &mut [f32; 32]) {
    let (d, high) = (half_at(raw, 0), fifth_bits(raw, 2));
    for (i, &byte) in raw[6..].iter().enumerate() {
        out[i] = d * (code5(byte & 15, high, i) - 16.0);
        out[i + 16] = d * (code5(byte >> 4, high, i + 16) - 16.0);
    }
}

fn q5_1(raw: &[u8; 24], out: &mut [f32; 32]) {
    let (d, m, high) = (half_at(raw, 0), half_at(raw, 2), fifth_bits(raw, 4));
    for (i, &byte) in raw[8..].iter().enumerate() {
        out[i] = d * code5(byte & 15, high, i) + m;
        out[i + 16] = d * code5(byte >> 4, high, i + 16) + m;
    }
}

/// A 5-bit code: the low four bits, and bit `at` of `high` as the fifth.
fn code5(low: u8, high: u32, at: usize) -> f32 {
    f32::from(low | ((high >> at & 1) << 4) as u8)
}

fn q8_0(raw: &[u8; 34], out: &mut [f32; 32]) {
    let d = half_at(raw, 0);
    for (out, &byte) in out.iter_mut().zip(&raw[2..]) {
        *out = d * f32::from(byte as i8);
    }
}

fn q2_k(raw: &[u8; 84], out: &mut [f32; K]) {
    let (scales, codes) = (&raw[..16], &raw[16..80]);
    let (d, dmin) = (half_at(raw, 80), half_at(raw, 82));
    for (group, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let (scale, min) = (d * f32::from(scales[group] & 15), dmin * f32::from(scales[group] >> 4));
        // 128 values share 32 bytes: each quarter of 32 values uses two bits of every byte.
        let (bytes, shift) = (&codes[group / 8 * 32 + group % 2 * 16..], group / 2 % 4 * 2);
        for (out, byte) in out.iter_mut().zip(bytes) {
            *out = scale * f32::from(byte >> shift & 3) - min;
        }
    }
}

fn q3_k(raw: &[u8; 110], out: &mut [f32; K]) {
    let (mask, codes, scales) = (&raw[..32], &raw[32..96], &raw[96..108]);
    let d = half_at(raw, 108);
    for (group, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let low = if group < 8 { scales[group] & 15 } else { scales[group - 8] >> 4 };
        let high = scales[8 + group % 4] >> (group / 4 * 2) & 3;
        let scale = d * (f32::from(low | high << 4) - 32.0);
        let (bytes, shift) = (&codes[group / 8 * 32 + group % 2 * 16..], group / 2 % 4 * 2);
        for ((out, byte), mask) in out.iter_mut().zip(bytes).zip(&mask[group % 2 * 16..]) {
            // A clear mask bit subtracts 4.
            let offset = if mask >> (group / 2) & 1 == 1 { 0.0 } else { 4.0 };
            *out = scale * (f32::from(byte >> shift & 3) - offset);
        }
    }
}

/// Scale and minimum of a group of 32 in Q4_K and Q5_K: 16 numbers of 6 bits in 12 bytes.
fn scale_and_min(packed: &[u8], group: usize) -> (f32, f32) {
    let (scale, min) = if group < 4 {
        (packed[group] & 63, packed[group + 4] & 63)
    } else {
        let low = packed[group + 4];
        (low & 15 | packed[group - 4] >> 2 & 48, low >> 4 | packed[group] >> 2 & 48)
    };
    (f32::from(scale), f32::from(min))
}

fn q4_k(raw: &[u8; 144], out: &mut [f32; K]) {
    let (d, dmin) = (half_at(raw, 0), half_at(raw, 2));
    let (scales, codes) = (&raw[4..16], &raw[16..]);
    for (group, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, min) = scale_and_min(scales, group);
        let (scale, min) = (d * scale, dmin * min);
        for (out, byte) in out.iter_mut().zip(&codes[group / 2 * 32..]) {
            *out = scale * f32::from(byte >> (group % 2 * 4) & 15) - min;
        }
    }
}

fn q5_k(raw: &[u8; 176], out: &mut [f32; K]) {
    let (d, dmin) = (half_at(raw, 0), half_at(raw, 2));
    let (scales, high, codes) = (&raw[4..16], &raw[16..48], &raw[48..]);
    for (group, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, min) = scale_and_min(scales, group);
        let (scale, min) = (d * scale, dmin * min);
        for ((out, byte), high) in out.iter_mut().zip(&codes[group / 2 * 32..]).zip(high) {
            *out = scale * f32::from(byte >> (group % 2 * 4) & 15 | (high >> group & 1) << 4) - min;
        }
    }
}

fn q6_k(raw: &[u8; 210], out: &mut [f32; K]) {
    let (low, high, scales) = (&raw[..128], &raw[128..192], &raw[192..208]);
    let d = half_at(raw, 208);
    for (group, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = d * f32::from(scales[group] as i8);
        // 128 values share 64 bytes of low nibbles and 32 bytes of high bit pairs.
        let (half, within) = (group / 8, group % 8);
        let low = &low[half * 64 + within % 4 * 16..];
        let high = &high[half * 32 + within % 2 * 16..];
        for ((out, low), high) in out.iter_mut().zip(low).zip(high) {
            let code = low >> (within / 4 * 4) & 15 | (high >> (within / 2 * 2) & 3) << 4;
            *out = scale * (f32::from(code) - 32.0);
        }
    }
}

/// What a code of the IQ4 types stands for: levels of ggml's `kvalues_iq4nl`, denser around zero.
const LEVELS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Low nibbles are the first half of 32 values, high nibbles the second.
fn levels(scale: f32, codes: &[u8], out: &mut [f32; 32]) {
    for (i, &byte) in codes.iter().enumerate() {
        out[i] = scale * f32::from(LEVELS[usize::from(byte & 15)]);
        out[i + 16] = scale * f32::from(LEVELS[usize::from(byte >> 4)]);
    }
}

fn iq4_nl(raw: &[u8; 18], out: &mut [f32; 32]) {
    levels(half_at(raw, 0), &raw[2..], out);
}

fn iq4_xs(raw: &[u8; 136], out: &mut [f32; K]) {
    let (d, high, low, codes) = (half_at(raw, 0), &raw[2..4], &raw[4..8], &raw[8..]);
    for (group, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let scale = low[group / 2] >> (group % 2 * 4) & 15 | (high[group / 4] >> (group % 4 * 2) & 3) << 4;
        levels(d * (f32::from(scale) - 32.0), &codes[group * 16..][..16], out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_fills_its_block() {
        for &(number, encoding, name, values, bytes) in READ {
            assert_eq!(
                (Encoding::of(number), encoding.name(), encoding.block()),
                (Ok(encoding), name, (values, bytes))
            );
            let mut out = vec![f32::NAN; 2 * values];
            encoding.decode(&vec![0; 2 * bytes], &mut out);
            assert!(out.iter().all(|&x| x == 0.0), "{name}: {out:?}");
        }
    }

    #[test]
    fn other_types_have_names_or_are_unknown() {
        assert_eq!(Encoding::of(21), Err(Some("IQ3_S")));
        assert_eq!(Encoding::of(4), Err(None));
        assert_eq!(Encoding::of(u32::MAX), Err(None));
    }

    #[test]
    fn small_blocks_by_hand() {
        let half = |x: f32| f16::from_f32(x).to_le_bytes();
        let mut q4 = [&half(0.5)[..], &[0x9f; 16]].concat();
        let mut out = [0.0; 32];
        Encoding::Q4_0.decode(&q4, &mut out);
        assert_eq!((out[0], out[15], out[16], out[31]), (3.5, 3.5, 0.5, 0.5));
        q4.splice(2..2, half(-1.0));
        Encoding::Q4_1.decode(&q4, &mut out);
        assert_eq!((out[0], out[16]), (6.5, 3.5));
        // Sets the fifth bit of the first and of the last code.
        let q5 = [&half(1.0)[..], &[1, 0, 0, 0x80], &[0x21; 16]].concat();
        Encoding::Q5_0.decode(&q5, &mut out);
        assert_eq!((out[0], out[1], out[16], out[31]), (1.0, -15.0, -14.0, 2.0));
        Encoding::Q8_0.decode(&[&half(2.0)[..], &[0xff; 32]].concat(), &mut out);
        assert_eq!(out, [-2.0; 32]);
    }
}
