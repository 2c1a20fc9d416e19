//! Counter-based noise, from which tokens are sampled: a pure function of (seed, sequence, position, purpose, index), and under
//! rejection of the offset in the round. So a token of the target does not depend on earlier drafts, batching or rejections
//! (ARCHITECTURE.md).

use crate::cache::GAMMA_MAX;

/// Purposes of the noise. Two purposes never share a random number.
///
/// All but the first belong to a round and hold the token's offset among its drafted tokens. A position that is drafted again has
/// another offset then, and so other noise: the earlier round's verdict depends on its own, and a text that reused it would not
/// follow the target's distribution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stream {
    /// A token sampled from the target, or from the draft under [`crate::sample::Accept::Replay`].
    Sample,
    /// A token sampled from the draft under [`crate::sample::Accept::Rejection`].
    Draft(usize),
    /// The acceptance test of a drafted token.
    Accept(usize),
    /// The token that replaces a rejected one.
    Correct(usize),
}

impl Stream {
    /// The purpose's number, and its offset.
    fn parts(self) -> (u32, usize) {
        match self {
            Stream::Sample => (0, 0),
            Stream::Draft(offset) => (1, offset),
            Stream::Accept(offset) => (2, offset),
            Stream::Correct(offset) => (3, offset),
        }
    }
}

/// Bits of the last word of a counter that number blocks of four indices; the offset has the others.
const BLOCK_BITS: u32 = 24;
const _: () = assert!(GAMMA_MAX < 1 << (32 - BLOCK_BITS));

/// Rounds of Philox.
const ROUNDS: usize = 10;

/// Philox4x32-10 (Salmon et al., SC 2011): ten rounds of two 32-bit multiplications; a bijection of the counter per key.
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        (counter, key) = (round(counter, key), next_key(key));
    }
    counter
}

/// One round.
fn round([a, b, c, d]: [u32; 4], [k, l]: [u32; 2]) -> [u32; 4] {
    let (left, right) = (0xD251_1F53_u64 * u64::from(a), 0xCD9E_8D57_u64 * u64::from(c));
    [(right >> 32) as u32 ^ b ^ k, right as u32, (left >> 32) as u32 ^ d ^ l, left as u32]
}

/// The key of the next round.
fn next_key([k, l]: [u32; 2]) -> [u32; 2] {
    [k.wrapping_add(0x9E37_79B9), l.wrapping_add(0xBB67_AE85)]
}

/// Tokens whose noise is computed together.
pub(crate) const TILE: usize = 64;

/// The random numbers of one purpose at one position of a sequence, by index: a token, or 0 for a single number.
///
/// Philox counter: `[position, sequence low, sequence high << 2 | purpose, offset << 24 | index / 4]`, key: seed low and high.
/// `index mod 4` selects the word. Stateless, and the same on every platform.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Noise {
    /// The user's seed.
    pub seed: u64,
    /// Distinguishes sequences of one seed by its low 62 bits.
    pub sequence: u64,
    /// Position of the token that is chosen or tested.
    pub position: usize,
    /// The purpose.
    pub stream: Stream,
}

impl Noise {
    /// Uniform noise in (0, 1), at least 2⁻²⁴ from both ends.
    pub fn uniform(self, index: u64) -> f32 {
        unit(self.block(index / 4)[(index % 4) as usize])
    }

    /// Standard Gumbel noise `−ln(−ln u)`, within (−2.82, 16.64).
    pub fn gumbel(self, index: u64) -> f32 {
        gumbel_of(self.uniform(index))
    }

    /// The words of the indices `TILE·tile ..= TILE·tile + TILE − 1`: [`Noise::block`] in loops that compile to vectors.
    pub(crate) fn words(self, tile: usize) -> [u32; TILE] {
        const BLOCKS: usize = TILE / 4;
        let [position, sequence, purpose, first] = self.counter((tile * BLOCKS) as u64);
        let (mut a, mut b, mut c, mut d) = ([position; BLOCKS], [sequence; BLOCKS], [purpose; BLOCKS], [first; BLOCKS]);
        for (at, d) in d.iter_mut().enumerate() {
            *d += at as u32;
        }
        let mut key = self.key();
        for _ in 0..ROUNDS {
            for i in 0..BLOCKS {
                [a[i], b[i], c[i], d[i]] = round([a[i], b[i], c[i], d[i]], key);
            }
            key = next_key(key);
        }
        let mut words = [0; TILE];
        for (i, words) in words.chunks_exact_mut(4).enumerate() {
            words.copy_from_slice(&[a[i], b[i], c[i], d[i]]);
        }
        words
    }

    /// The words of four consecutive indices, `4·block ..= 4·block + 3`.
    fn block(self, block: u64) -> [u32; 4] {
        philox(self.counter(block), self.key())
    }

    fn counter(self, block: u64) -> [u32; 4] {
        let (purpose, offset) = self.stream.parts();
        let high = ((self.sequence >> 32) as u32) << 2 | purpose;
        [self.position as u32, self.sequence as u32, high, (offset as u32) << BLOCK_BITS | block as u32]
    }

    fn key(self) -> [u32; 2] {
        [self.seed as u32, (self.seed >> 32) as u32]
    }
}

/// The middle of one of 2²³ equal cells of (0, 1), which a word's upper 23 bits select: exact in f32, never 0 or 1.
pub(crate) fn unit(word: u32) -> f32 {
    (2 * (word >> 9) + 1) as f32 * (1.0 / 16_777_216.0)
}

/// In f64, so that a platform's rounding of the logarithm almost never affects the f32 result.
pub(crate) fn gumbel_of(u: f32) -> f32 {
    -(-f64::from(u).ln()).ln() as f32
}

/// Upper bound of [`Noise::gumbel`]: −ln(−ln(1 − 2⁻²⁴)) = 16.6355.
pub(crate) const GUMBEL_MAX: f32 = 16.64;

#[cfg(test)]
mod tests {
    use super::*;

    /// All 32-bit words of key and counter differ from 0.
    const ANY: Noise =
        Noise { seed: 0x0123_4567_89ab_cdef, sequence: 0x3_0000_0007, position: 41, stream: Stream::Correct(5) };

    #[test]
    fn philox_known_answers() {
        // Random123's kat_vectors.
        let cases = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, want) in cases {
            assert_eq!(philox(counter, key), want);
        }
    }

    #[test]
    fn uniform_is_the_documented_function_of_its_counter() {
        let noise = Noise { stream: Stream::Accept(9), ..ANY };
        let words = philox([41, 7, 3 << 2 | 2, 9 << 24 | 5], [0x89ab_cdef, 0x0123_4567]);
        for (at, word) in words.into_iter().enumerate() {
            let want = (f64::from(word >> 9) + 0.5) / 8_388_608.0;
            assert_eq!(f64::from(noise.uniform(20 + at as u64)), want);
        }
    }

    #[test]
    fn noise_of_a_tile_is_that_of_its_blocks() {
        for tile in [0, 1, 2_003] {
            for (at, words) in ANY.words(tile).chunks_exact(4).enumerate() {
                assert_eq!(words, ANY.block((tile * TILE / 4 + at) as u64));
            }
        }
    }

    #[test]
    fn noise_is_finite_and_keeps_its_distance_from_both_ends() {
        for word in [0, 1, u32::MAX, u32::MAX - 1, 1 << 9, 1 << 31, (1 << 31) - 1] {
            let (u, g) = (unit(word), gumbel_of(unit(word)));
            assert!(u > 0.0 && u < 1.0 && g.is_finite() && g < GUMBEL_MAX && g > -2.82, "{word}: {u} {g}");
        }
        assert_eq!((unit(0), unit(u32::MAX)), (1.0 / 16_777_216.0, 1.0 - 1.0 / 16_777_216.0));
    }

    #[test]
    fn purposes_positions_sequences_and_seeds_are_unrelated() {
        let base = Noise { seed: 1, sequence: 2, position: 3, stream: Stream::Sample };
        let others = [
            Noise { seed: 2, ..base },
            Noise { seed: 1 | 1 << 32, ..base },
            Noise { sequence: 3, ..base },
            Noise { sequence: 2 | 1 << 32, ..base },
            Noise { position: 4, ..base },
            Noise { stream: Stream::Draft(0), ..base },
            Noise { stream: Stream::Accept(0), ..base },
            Noise { stream: Stream::Correct(0), ..base },
        ];
        assert!(others.iter().all(|other| other.uniform(4) != base.uniform(4)));
        assert!(base.uniform(5) != base.uniform(4));
        let of_offset = |offset| Noise { stream: Stream::Draft(offset), ..base }.uniform(4);
        assert!((1..=GAMMA_MAX).all(|offset| of_offset(offset) != of_offset(offset - 1)));
        // 100,000 numbers in sixteen cells: chi-square with 15 degrees of freedom exceeds 45 with probability below 1 in
        // 10,000.
        let mut cells = [0.0; 16];
        (0..100_000).for_each(|i| cells[(base.uniform(i) * 16.0) as usize] += 1.0);
        let chi: f64 = cells.iter().map(|n: &f64| (n - 6_250.0).powi(2) / 6_250.0).sum();
        assert!(chi < 45.0, "{chi}");
    }
}
