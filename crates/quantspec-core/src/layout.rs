//! Byte layout of a page: the position of every code and parameter of a [`Page`], for each fast backend.
//!
//! Both layouts split a page of one KV head into an upper block, which a draft reads alone, and a lower block:
//!
//! ```text
//! upper: [key params][key plane][value params][value plane]
//! lower: [key plane][value plane]
//! ```
//!
//! A plane is an array of little-endian 32-bit words of eight nibbles. The upper word holds U in nibble e. The lower word
//! holds L + 8 one nibble lower, in nibble (e + 7) mod 8. So with M = 0xf0f0f0f0, two bit selections and one rotation yield
//! the bytes 16·U + L + 8 of all eight elements:
//!
//! ```text
//! odd  = (u & M) | (l & !M)              bytes of nibbles 1, 3, 5, 7
//! even = rotl((l & M) | (u & !M), 4)     bytes of nibbles 0, 2, 4, 6
//! ```
//!
//! **CUDA** ([`Layout::Cuda`], head_dim a multiple of 64): words are in the order of the A fragments of mma.m16n8k16. Keys
//! have tokens as rows and channels as k; values the reverse. Lane (g, c) = lane 4g + c of a 16 × 16 tile owns one word:
//!
//! ```text
//! nibble  0   1    2     3     4     5     6     7
//! row     g  g+8   g    g+8    g    g+8    g    g+8
//! k      2c   2c  2c+8  2c+8  2c+1  2c+1  2c+9  2c+9
//! ```
//!
//! ```text
//! key plane    [token tile][channel tile / 4][lane][channel tile mod 4]
//! value plane  [token tile / 2][channel tile / 2][lane][token tile mod 2][channel tile mod 2]
//! key params   [channel tile / 2][c][scales of both tiles, then zeros][2c, 2c+1, 2c+8, 2c+9]
//! value params [token tile][g][scale of g, zero of g, scale of g+8, zero of g+8]
//! ```
//!
//! **CPU** ([`Layout::Cpu`], head_dim a multiple of 8): a 64-byte vector is 16 lanes of one word. A lane is a token (keys) or
//! a channel (values); a word is eight consecutive channels (keys) or tokens (values). Index i is in nibble 2i for i < 4 and
//! in nibble 2(i − 4) + 1 otherwise. So the even nibbles are four consecutive elements, and so are the odd ones.
//!
//! ```text
//! key plane    [token / 64][channel / 8][4 vectors]
//! value plane  [channel / 64][token / 8][4 vectors]; the last channel block has only the vectors it needs
//! key params   scales [head_dim], zeros [head_dim], padding to 64 bytes
//! value params scales [G], zeros [G]
//! ```
//!
//! Lanes of the value plane beyond head_dim are zero bits in both planes.

use crate::cache::G;
use crate::error::{Error, Result};
use crate::plan::{lower_page_bytes, upper_page_bytes};
use crate::quantize::{Page, Params};
use half::f16;

/// Bytes of a vector of the CPU layout; planes are aligned to it.
const VECTOR_BYTES: usize = 64;

/// 32-bit lanes of a vector. The value plane of the CPU layout pads its channels to a multiple.
const VECTOR_LANES: usize = VECTOR_BYTES / 4;

/// Lanes of a block of the CPU layout: four vectors, stored in the order of use.
const BLOCK_LANES: usize = 64;

/// Byte layout of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Fragment order of tensor cores.
    Cuda,
    /// Vector order of CPUs.
    Cpu,
}

/// Byte offsets in the blocks of a page, and the blocks' sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offsets {
    /// Key parameters in the upper block.
    pub key_params: usize,
    /// Key plane in the upper block.
    pub key_plane: usize,
    /// Value parameters in the upper block.
    pub value_params: usize,
    /// Value plane in the upper block.
    pub value_plane: usize,
    /// Size of the upper block.
    pub upper_bytes: usize,
    /// Value plane in the lower block; the key plane is at 0.
    pub lower_value_plane: usize,
    /// Size of the lower block.
    pub lower_bytes: usize,
}

/// Bytes of one page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// Parameters and upper nibbles.
    pub upper: Vec<u8>,
    /// Lower nibbles.
    pub lower: Vec<u8>,
}

/// Position of a nibble: its word in the plane, and its index in the upper word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct NibbleIndex {
    /// 32-bit word of the plane.
    word: usize,
    /// Nibble of the upper word, 0..8, from the least significant; the lower word has it in (nibble + 7) mod 8.
    nibble: usize,
}

impl Layout {
    /// Returns true if the layout supports heads of `head_dim` channels.
    pub const fn supports(self, head_dim: usize) -> bool {
        match self {
            Layout::Cuda => head_dim > 0 && head_dim.is_multiple_of(64),
            Layout::Cpu => head_dim > 0 && head_dim.is_multiple_of(8),
        }
    }

    /// Offsets and sizes for a supported `head_dim`.
    pub const fn offsets(self, head_dim: usize) -> Offsets {
        // Half a byte per element; f16 scale and zero per group.
        let (key_params, value_width) = match self {
            Layout::Cuda => (4 * head_dim, head_dim),
            Layout::Cpu => ((4 * head_dim).next_multiple_of(VECTOR_BYTES), head_dim.next_multiple_of(VECTOR_LANES)),
        };
        let (key_plane, value_plane) = (G / 2 * head_dim, G / 2 * value_width);
        let value_params = key_params + key_plane;
        Offsets {
            key_params: 0,
            key_plane: key_params,
            value_params,
            value_plane: value_params + 4 * G,
            upper_bytes: value_params + 4 * G + value_plane,
            lower_value_plane: key_plane,
            lower_bytes: key_plane + value_plane,
        }
    }

    /// Bytes of the upper block.
    pub const fn upper_bytes(self, head_dim: usize) -> usize {
        self.offsets(head_dim).upper_bytes
    }

    /// Bytes of the lower block.
    pub const fn lower_bytes(self, head_dim: usize) -> usize {
        self.offsets(head_dim).lower_bytes
    }

    /// Position of a key's nibble in the key planes.
    const fn key_nibble(self, head_dim: usize, token: usize, channel: usize) -> NibbleIndex {
        match self {
            Layout::Cuda => {
                let (lane, nibble) = fragment(token % 16, channel % 16);
                let tile = channel / 16;
                let quad = token / 16 * (head_dim / 64) + tile / 4;
                NibbleIndex { word: (quad * 32 + lane) * 4 + tile % 4, nibble }
            }
            Layout::Cpu => {
                let steps = head_dim / 8;
                let vector = (token / BLOCK_LANES * steps + channel / 8) * 4 + token % BLOCK_LANES / VECTOR_LANES;
                NibbleIndex { word: vector * VECTOR_LANES + token % VECTOR_LANES, nibble: interleave(channel % 8) }
            }
        }
    }

    /// Position of a value's nibble in the value planes.
    const fn value_nibble(self, head_dim: usize, token: usize, channel: usize) -> NibbleIndex {
        match self {
            Layout::Cuda => {
                let (lane, nibble) = fragment(channel % 16, token % 16);
                let (token_tile, channel_tile) = (token / 16, channel / 16);
                let quad = token_tile / 2 * (head_dim / 32) + channel_tile / 2;
                NibbleIndex { word: (quad * 32 + lane) * 4 + token_tile % 2 * 2 + channel_tile % 2, nibble }
            }
            Layout::Cpu => {
                let first = channel / BLOCK_LANES * BLOCK_LANES;
                let vectors = vectors_of_block(head_dim, channel / BLOCK_LANES);
                // All blocks before this one are full: one word per lane and eight tokens.
                let vector =
                    first / VECTOR_LANES * (G / 8) + token / 8 * vectors + channel % BLOCK_LANES / VECTOR_LANES;
                NibbleIndex { word: vector * VECTOR_LANES + channel % VECTOR_LANES, nibble: interleave(token % 8) }
            }
        }
    }

    /// Scale and zero of a key channel, as f16 indices into the key parameters.
    const fn key_params_index(self, head_dim: usize, channel: usize) -> (usize, usize) {
        match self {
            Layout::Cuda => {
                let (tile, k) = (channel / 16, channel % 16);
                let at = (tile / 2 * 4 + k % 8 / 2) * 16 + tile % 2 * 4 + k / 8 * 2 + k % 2;
                (at, at + 8)
            }
            Layout::Cpu => (channel, head_dim + channel),
        }
    }

    /// Scale and zero of a token's values, as f16 indices into the value parameters.
    const fn value_params_index(self, token: usize) -> (usize, usize) {
        match self {
            Layout::Cuda => {
                let at = (token / 16 * 8 + token % 8) * 4 + token % 16 / 8 * 2;
                (at, at + 1)
            }
            Layout::Cpu => (token, G + token),
        }
    }

    /// Packs a page into bytes.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Model`] if the layout does not support the page's head_dim, [`crate::ErrorKind::Internal`] if the
    /// page's lengths are wrong.
    pub fn pack(self, page: &Page) -> Result<Blocks> {
        let head_dim = page.head_dim;
        self.check(head_dim)?;
        let elements = G * head_dim;
        let lengths = [&page.key_upper, &page.value_upper].map(Vec::len).into_iter();
        let lengths = lengths.chain([&page.key_lower, &page.value_lower].map(Vec::len));
        if lengths.into_iter().any(|length| length != elements)
            || (page.key_params.len(), page.value_params.len()) != (head_dim, G)
        {
            return Err(Error::internal(format!("a page of head_dim {head_dim} with arrays of other lengths")));
        }
        let offsets = self.offsets(head_dim);
        let mut blocks = Blocks { upper: vec![0; offsets.upper_bytes], lower: vec![0; offsets.lower_bytes] };
        for token in 0..G {
            for channel in 0..head_dim {
                let at = token * head_dim + channel;
                let found = self.key_nibble(head_dim, token, channel);
                found.write_upper(&mut blocks.upper[offsets.key_plane..], page.key_upper[at]);
                found.write_lower(&mut blocks.lower, page.key_lower[at]);
                let found = self.value_nibble(head_dim, token, channel);
                found.write_upper(&mut blocks.upper[offsets.value_plane..], page.value_upper[at]);
                found.write_lower(&mut blocks.lower[offsets.lower_value_plane..], page.value_lower[at]);
            }
        }
        for (channel, &params) in page.key_params.iter().enumerate() {
            let found = self.key_params_index(head_dim, channel);
            write_params(&mut blocks.upper[offsets.key_params..], found, params);
        }
        for (token, &params) in page.value_params.iter().enumerate() {
            write_params(&mut blocks.upper[offsets.value_params..], self.value_params_index(token), params);
        }
        Ok(blocks)
    }

    /// Unpacks a page; without a lower block the lower codes are 0.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Model`] if the layout does not support `head_dim`, [`crate::ErrorKind::Internal`] if the blocks'
    /// sizes are wrong.
    pub fn unpack(self, head_dim: usize, upper: &[u8], lower: Option<&[u8]>) -> Result<Page> {
        self.check(head_dim)?;
        let offsets = self.offsets(head_dim);
        if upper.len() != offsets.upper_bytes || lower.is_some_and(|lower| lower.len() != offsets.lower_bytes) {
            return Err(Error::internal(format!("blocks of other sizes than a page of head_dim {head_dim}")));
        }
        let mut page = Page::zeros(head_dim);
        for token in 0..G {
            for channel in 0..head_dim {
                let at = token * head_dim + channel;
                let key = self.key_nibble(head_dim, token, channel);
                let value = self.value_nibble(head_dim, token, channel);
                page.key_upper[at] = key.read_upper(&upper[offsets.key_plane..]);
                page.value_upper[at] = value.read_upper(&upper[offsets.value_plane..]);
                if let Some(lower) = lower {
                    page.key_lower[at] = key.read_lower(lower);
                    page.value_lower[at] = value.read_lower(&lower[offsets.lower_value_plane..]);
                }
            }
        }
        for (channel, params) in page.key_params.iter_mut().enumerate() {
            *params = read_params(&upper[offsets.key_params..], self.key_params_index(head_dim, channel));
        }
        for (token, params) in page.value_params.iter_mut().enumerate() {
            *params = read_params(&upper[offsets.value_params..], self.value_params_index(token));
        }
        Ok(page)
    }

    fn check(self, head_dim: usize) -> Result<()> {
        if self.supports(head_dim) {
            return Ok(());
        }
        let (device, multiple) = match self {
            Layout::Cuda => ("GPU", 64),
            Layout::Cpu => ("CPU", 8),
        };
        Err(Error::model(
            format!("head_dim {head_dim} has no {device} page layout"),
            format!("use a model whose head_dim is a multiple of {multiple}"),
        ))
    }
}

/// Lane and nibble of an element of a 16 × 16 A fragment.
const fn fragment(row: usize, k: usize) -> (usize, usize) {
    (row % 8 * 4 + k % 8 / 2, k % 2 * 4 + k / 8 * 2 + row / 8)
}

/// Nibble of element i of 8 in the CPU layout.
const fn interleave(i: usize) -> usize {
    i % 4 * 2 + i / 4
}

/// Vectors in one channel block of the CPU value plane.
const fn vectors_of_block(head_dim: usize, block: usize) -> usize {
    let left = head_dim - block * BLOCK_LANES;
    (if left < BLOCK_LANES { left } else { BLOCK_LANES }).div_ceil(VECTOR_LANES)
}

impl NibbleIndex {
    /// Byte and shift of a nibble of this word.
    const fn byte(self, nibble: usize) -> (usize, usize) {
        (self.word * 4 + nibble / 2, nibble % 2 * 4)
    }

    fn write_upper(self, plane: &mut [u8], upper: u8) {
        let (byte, shift) = self.byte(self.nibble);
        plane[byte] |= (upper & 15) << shift;
    }

    fn write_lower(self, plane: &mut [u8], lower: i8) {
        let (byte, shift) = self.byte((self.nibble + 7) % 8);
        plane[byte] |= ((lower + 8) as u8 & 15) << shift;
    }

    /// The upper nibble, 0..=15, at this position of `plane`, which starts with the key plane or the value plane.
    fn read_upper(self, plane: &[u8]) -> u8 {
        let (byte, shift) = self.byte(self.nibble);
        plane[byte] >> shift & 15
    }

    fn read_lower(self, plane: &[u8]) -> i8 {
        let (byte, shift) = self.byte((self.nibble + 7) % 8);
        (plane[byte] >> shift & 15) as i8 - 8
    }
}

fn write_params(to: &mut [u8], (scale, zero): (usize, usize), params: Params) {
    to[2 * scale..][..2].copy_from_slice(&params.scale.to_le_bytes());
    to[2 * zero..][..2].copy_from_slice(&params.zero.to_le_bytes());
}

fn read_params(from: &[u8], (scale, zero): (usize, usize)) -> Params {
    let read = |at: usize| f16::from_le_bytes([from[2 * at], from[2 * at + 1]]);
    Params { scale: read(scale), zero: read(zero) }
}

// The CUDA block of head_dim 128: K params 512 bytes, K 8192, V params 512, V 8192.
const _: () = {
    let at = Layout::Cuda.offsets(128);
    assert!(at.key_params == 0 && at.key_plane == 512 && at.value_params == 8_704 && at.value_plane == 9_216);
    assert!(at.upper_bytes == 17_408 && at.lower_value_plane == 8_192 && at.lower_bytes == 16_384);
};

// For common head sizes both layouts are as large as `plan` says, and planes start on vectors.
const _: () = {
    let sizes = [64, 80, 96, 128, 256];
    let mut i = 0;
    while i < sizes.len() {
        let (cpu, cuda) = (Layout::Cpu.offsets(sizes[i]), Layout::Cuda.offsets(sizes[i]));
        assert!(cpu.upper_bytes == upper_page_bytes(sizes[i]) && cpu.lower_bytes == lower_page_bytes(sizes[i]));
        assert!(cuda.upper_bytes == upper_page_bytes(sizes[i]) && cuda.lower_bytes == lower_page_bytes(sizes[i]));
        assert!(cpu.key_plane % VECTOR_BYTES == 0 && cpu.value_plane % VECTOR_BYTES == 0);
        assert!(cpu.upper_bytes % VECTOR_BYTES == 0 && cpu.lower_bytes % VECTOR_BYTES == 0);
        i += 1;
    }
    // A head of 8 channels pads its parameters to a vector and its values to 16 lanes.
    let tiny = Layout::Cpu.offsets(8);
    assert!(tiny.key_plane == 64 && tiny.value_params == 576 && tiny.value_plane == 1_088);
    assert!(tiny.upper_bytes == 2_112 && tiny.lower_value_plane == 512 && tiny.lower_bytes == 1_536);
};

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    const LAYOUTS: [(Layout, &[usize]); 2] =
        [(Layout::Cuda, &[64, 128, 192, 256]), (Layout::Cpu, &[8, 16, 40, 64, 80, 96, 128, 256])];

    /// A page of pseudo-random codes; its parameters have any bits that are finite.
    fn page(head_dim: usize, seed: u32) -> Page {
        let mut state = seed;
        let mut next = move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 16) as u16
        };
        let mut page = Page::zeros(head_dim);
        for upper in [&mut page.key_upper, &mut page.value_upper] {
            upper.iter_mut().for_each(|code| *code = (next() & 15) as u8);
        }
        for lower in [&mut page.key_lower, &mut page.value_lower] {
            lower.iter_mut().for_each(|code| *code = (next() & 15) as i8 - 8);
        }
        for params in page.key_params.iter_mut().chain(&mut page.value_params) {
            *params = Params { scale: f16::from_bits(next() & 0x3bff), zero: f16::from_bits(next() & 0xbbff) };
        }
        page
    }

    fn fnv(bytes: &[u8]) -> u64 {
        bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
    }

    fn word(plane: &[u8], at: usize) -> u32 {
        u32::from_le_bytes([plane[4 * at], plane[4 * at + 1], plane[4 * at + 2], plane[4 * at + 3]])
    }

    /// The two words of bytes that every kernel builds from an upper and a lower word.
    fn merged(u: u32, l: u32) -> (u32, u32) {
        const M: u32 = 0xf0f0_f0f0;
        ((((l & M) | (u & !M)).rotate_left(4)), (u & M) | (l & !M))
    }

    fn byte(upper: u8, lower: i8) -> u32 {
        16 * u32::from(upper) + (lower + 8) as u32
    }

    #[test]
    fn golden_bytes() {
        let hashes = |layout: Layout, head_dim| {
            let blocks = layout.pack(&page(head_dim, 1)).unwrap();
            (fnv(&blocks.upper), fnv(&blocks.lower))
        };
        assert_eq!(hashes(Layout::Cuda, 128), (0x379a_7e0d_673e_2da5, 0x78b7_3b1e_023b_4cf6));
        assert_eq!(hashes(Layout::Cuda, 64), (0x547b_8050_6334_bfcf, 0xf592_65ab_9c67_f47d));
        assert_eq!(hashes(Layout::Cuda, 256), (0x5662_4ff0_b7be_060b, 0x960a_d5b0_cad0_b17f));
        assert_eq!(hashes(Layout::Cpu, 128), (0x6759_6036_e0e2_75a8, 0xe4f6_4078_4048_15b6));
        assert_eq!(hashes(Layout::Cpu, 80), (0xfb27_058c_bfc3_7dd4, 0x6323_e675_2e00_f96a));
    }

    #[test]
    fn every_nibble_and_parameter_has_a_place_of_its_own() {
        for (layout, sizes) in LAYOUTS {
            for &head_dim in sizes {
                let offsets = layout.offsets(head_dim);
                let (mut keys, mut values) = (HashSet::new(), HashSet::new());
                for token in 0..G {
                    for channel in 0..head_dim {
                        let key = layout.key_nibble(head_dim, token, channel);
                        let value = layout.value_nibble(head_dim, token, channel);
                        assert!(4 * key.word + 4 <= offsets.lower_value_plane && key.nibble < 8);
                        assert!(4 * value.word + 4 <= offsets.lower_bytes - offsets.lower_value_plane);
                        assert!(keys.insert((key.word, key.nibble)) && values.insert((value.word, value.nibble)));
                    }
                }
                let mut params = HashSet::new();
                for (scale, zero) in (0..head_dim).map(|channel| layout.key_params_index(head_dim, channel)) {
                    assert!(scale.max(zero) * 2 < offsets.key_plane && params.insert(scale) && params.insert(zero));
                }
                params.clear();
                for (scale, zero) in (0..G).map(|token| layout.value_params_index(token)) {
                    assert!(scale.max(zero) < 2 * G && params.insert(scale) && params.insert(zero));
                }
            }
        }
    }

    /// Head widths that the CUDA kernels support.
    const CUDA_WIDTHS: [usize; 3] = [64, 128, 256];

    #[test]
    fn fragments_unpack_as_the_cuda_kernels_do() {
        for d in CUDA_WIDTHS {
            let page = page(d, 2);
            let blocks = Layout::Cuda.pack(&page).unwrap();
            // The key plane follows 4 bytes per channel; the value plane follows the keys and 4 bytes per token.
            let (key_upper, key_lower) = (&blocks.upper[4 * d..], &blocks.lower[..]);
            let (value_upper, value_lower) = (&blocks.upper[4 * d + G * d / 2 + 4 * G..], &blocks.lower[G * d / 2..]);
            for (token_tile, channel_tile, lane) in
                (0..G / 16).flat_map(|a| (0..d / 16).flat_map(move |b| (0..32).map(move |l| (a, b, l))))
            {
                let (g, c) = (lane / 4, lane % 4);
                let key_word = ((token_tile * (d / 64) + channel_tile / 4) * 32 + lane) * 4 + channel_tile % 4;
                let value_word = ((token_tile / 2 * (d / 32) + channel_tile / 2) * 32 + lane) * 4
                    + token_tile % 2 * 2
                    + channel_tile % 2;
                // Fragment register i of mma.m16n8k16: row g + 8·(i mod 2), k 2c + 8·(i / 2) and the next.
                for i in 0..4 {
                    let (row, k) = (g + 8 * (i % 2), 2 * c + 8 * (i / 2));
                    for (is_key, plane, low_plane, at) in
                        [(true, key_upper, key_lower, key_word), (false, value_upper, value_lower, value_word)]
                    {
                        let element = |k: usize| {
                            let (token, channel) = if is_key { (row, k) } else { (k, row) };
                            (token_tile * 16 + token) * d + channel_tile * 16 + channel
                        };
                        let codes = if is_key { &page.key_upper } else { &page.value_upper };
                        let lows = if is_key { &page.key_lower } else { &page.value_lower };
                        let u = word(plane, at);
                        let draft = (u >> (8 * (i / 2) + 4 * (i % 2))) & 0x000f_000f;
                        assert_eq!(draft, u32::from(codes[element(k)]) | u32::from(codes[element(k + 1)]) << 16);
                        let (even, odd) = merged(u, word(low_plane, at));
                        let bytes = if i % 2 == 0 { even } else { odd };
                        let verify = bytes >> (8 * (i / 2)) & 0x00ff_00ff;
                        let want = |k: usize| byte(codes[element(k)], lows[element(k)]);
                        assert_eq!(verify, want(k) | want(k + 1) << 16);
                    }
                }
            }
        }
    }

    #[test]
    fn parameters_are_where_the_cuda_kernels_read_them() {
        for d in CUDA_WIDTHS {
            let page = page(d, 4);
            let upper = Layout::Cuda.pack(&page).unwrap().upper;
            let half = |at: usize| f16::from_le_bytes([upper[at], upper[at + 1]]);
            // Lane column c loads 32 bytes per pair of channel tiles: eight scales, then eight zeros.
            for (pair, c, i) in (0..d / 32).flat_map(|p| (0..4).flat_map(move |c| (0..8).map(move |i| (p, c, i)))) {
                let channel = 32 * pair + 16 * (i / 4) + 2 * c + [0, 1, 8, 9][i % 4];
                let at = (pair * 4 + c) * 32 + 2 * i;
                assert_eq!(Params { scale: half(at), zero: half(at + 16) }, page.key_params[channel]);
            }
            // Lane row g loads 8 bytes per token tile: the pairs of tokens g and g + 8.
            for (tile, g, e) in (0..G / 16).flat_map(|t| (0..8).flat_map(move |g| (0..2).map(move |e| (t, g, e)))) {
                let at = 4 * d + G * d / 2 + (tile * 8 + g) * 8 + 4 * e;
                assert_eq!(Params { scale: half(at), zero: half(at + 2) }, page.value_params[16 * tile + g + 8 * e]);
            }
        }
    }

    #[test]
    fn vectors_unpack_as_the_cpu_kernels_do() {
        for head_dim in [8, 80, 128] {
            let page = page(head_dim, 3);
            let (blocks, at) = (Layout::Cpu.pack(&page).unwrap(), Layout::Cpu.offsets(head_dim));
            let check = |u: u32, l: u32, element: &dyn Fn(usize) -> usize, codes: &[u8], lows: &[i8]| {
                let (even, odd) = merged(u, l);
                for i in 0..8 {
                    let (nibbles, bytes) = if i < 4 { (u & 0x0f0f_0f0f, even) } else { (u >> 4 & 0x0f0f_0f0f, odd) };
                    let shift = 8 * (i % 4);
                    assert_eq!(nibbles >> shift & 15, u32::from(codes[element(i)]));
                    assert_eq!(bytes >> shift & 255, byte(codes[element(i)], lows[element(i)]));
                }
            };
            // Walks in the kernel's order, without the index arithmetic of the code under test.
            let mut at_word = 0;
            for first in [0, 64] {
                for step in 0..head_dim / 8 {
                    for token in first..first + 64 {
                        let (u, l) = (word(&blocks.upper[at.key_plane..], at_word), word(&blocks.lower, at_word));
                        check(u, l, &|i| token * head_dim + step * 8 + i, &page.key_upper, &page.key_lower);
                        at_word += 1;
                    }
                }
            }
            let mut at_word = 0;
            for first in (0..head_dim).step_by(64) {
                for step in 0..G / 8 {
                    for channel in first..(first + 64).min(head_dim.next_multiple_of(16)) {
                        let u = word(&blocks.upper[at.value_plane..], at_word);
                        let l = word(&blocks.lower[at.lower_value_plane..], at_word);
                        if channel < head_dim {
                            check(u, l, &|i| (step * 8 + i) * head_dim + channel, &page.value_upper, &page.value_lower);
                        } else {
                            assert_eq!((u, l), (0, 0));
                        }
                        at_word += 1;
                    }
                }
            }
            assert_eq!(4 * at_word, at.upper_bytes - at.value_plane);
        }
    }

    #[test]
    fn unsupported_heads_and_wrong_sizes_are_refused() {
        assert_eq!(Layout::Cuda.pack(&page(80, 1)).unwrap_err().kind, crate::ErrorKind::Model);
        assert_eq!(Layout::Cpu.unpack(12, &[], None).unwrap_err().kind, crate::ErrorKind::Model);
        let blocks = Layout::Cpu.pack(&page(64, 1)).unwrap();
        assert!(Layout::Cpu.unpack(64, &blocks.upper[1..], None).is_err());
        assert!(Layout::Cpu.unpack(64, &blocks.upper, Some(&blocks.lower[1..])).is_err());
        let spoil: [fn(&mut Page); 6] = [
            |page| _ = page.key_upper.pop(),
            |page| _ = page.key_lower.pop(),
            |page| _ = page.value_upper.pop(),
            |page| _ = page.value_lower.pop(),
            |page| _ = page.key_params.pop(),
            |page| _ = page.value_params.pop(),
        ];
        for (i, spoil) in spoil.into_iter().enumerate() {
            let mut short = page(64, 1);
            spoil(&mut short);
            let error = Layout::Cpu.pack(&short).expect_err(&format!("array {i}"));
            assert_eq!(error.kind, crate::ErrorKind::Internal);
            assert!(error.message.contains("head_dim 64"));
        }
    }

    #[test]
    fn head_sizes_of_a_layout() {
        for (layout, yes, no, multiple) in [
            (Layout::Cuda, [64, 128, 192, 256], [0, 32, 96, 127], "multiple of 64"),
            (Layout::Cpu, [8, 40, 80, 256], [0, 4, 12, 127], "multiple of 8"),
        ] {
            for head_dim in yes {
                assert!(layout.supports(head_dim) && layout.check(head_dim).is_ok(), "{layout:?} {head_dim}");
            }
            for head_dim in no {
                assert!(!layout.supports(head_dim), "{layout:?} {head_dim}");
                let error = layout.check(head_dim).unwrap_err();
                assert!(error.message.contains(&format!("head_dim {head_dim} ")) && error.hint.ends_with(multiple));
            }
        }
    }

    #[test]
    fn a_code_out_of_range_stays_in_its_nibble() {
        let elements = G * 64;
        for (layout, at) in [Layout::Cuda, Layout::Cpu].into_iter().flat_map(|l| [(l, 0), (l, 77), (l, elements - 1)]) {
            let mut page = Page::zeros(64);
            page.key_upper[at] = 0xf3;
            page.value_upper[at] = 0xf3;
            page.key_lower[at] = 0x75;
            page.value_lower[at] = 0x75;
            let blocks = layout.pack(&page).unwrap();
            let read = layout.unpack(64, &blocks.upper, Some(&blocks.lower)).unwrap();
            for i in 0..elements {
                let (upper, lower) = if i == at { (3, 5) } else { (0, 0) };
                assert_eq!((read.key_upper[i], read.value_upper[i]), (upper, upper), "{layout:?} {at} {i}");
                assert_eq!((read.key_lower[i], read.value_lower[i]), (lower, lower), "{layout:?} {at} {i}");
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn unpacking_undoes_packing(seed: u32, which in 0usize..12) {
            let all: Vec<(Layout, usize)> =
                LAYOUTS.iter().flat_map(|(layout, sizes)| sizes.iter().map(|size| (*layout, *size))).collect();
            let (layout, head_dim) = all[which];
            let page = page(head_dim, seed);
            let blocks = layout.pack(&page).unwrap();
            prop_assert_eq!(&layout.unpack(head_dim, &blocks.upper, Some(&blocks.lower)).unwrap(), &page);
            let upper_only = layout.unpack(head_dim, &blocks.upper, None).unwrap();
            let zeros = Page::zeros(head_dim);
            prop_assert_eq!(upper_only, Page { key_lower: zeros.key_lower, value_lower: zeros.value_lower, ..page });
        }
    }
}
