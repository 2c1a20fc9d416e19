//! Linear layers of the draft: 4-bit weights (8-bit for the head), int8 activations.
//!
//! Groups of 128 along k, `w = code·s + z` with s and z in f16. Activations are int8 with one scale per group, so a group's
//! sums are integers: `Σ w·x = s·xs·Σ code·q + z·xs·Σ q`.
//!
//! A tile is 16 outputs × one group, contiguous, parameters first, so that a pass reads one stream in address order: `{ s: 16
//! f16 | z: 16 f16 | codes }`. Code vector v of 64 bytes holds 4 bytes per output. In 4-bit tiles (16 vectors, 1,088 bytes)
//! byte b has k = 8v + b in its low nibble and k = 8v + 4 + b in its high one. In 8-bit tiles (32 vectors, 2,112 bytes) byte
//! b is k = 4v + b. Tiles are `[n/16][group]`; a short last group is padded with zero codes, and its activations with zeros.

mod activations;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;
mod quantise;
mod search;

pub(crate) use activations::Acts;
pub(crate) use quantise::encode;
pub(crate) use search::{Group, halves};

use crate::dispatch::{Simd, portable};
use crate::memory::Array;
use crate::panel::{PANEL, groups};
use portable::column_body;
use quantspec_core::Result;
use quantspec_core::quantize::WEIGHT_GROUP;

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

/// Rows that share one load of a tile.
const ROWS: usize = 8;

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
                    4 => avx512::column::<4>(self, out.as_mut_ptr()),
                    5 => avx512::column::<5>(self, out.as_mut_ptr()),
                    6 => avx512::column::<6>(self, out.as_mut_ptr()),
                    7 => avx512::column::<7>(self, out.as_mut_ptr()),
                    _ => avx512::column::<ROWS>(self, out.as_mut_ptr()),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Noise, bits, paths};
    use quantspec_core::quantize::{ACTIVATION_8, quantize_activations, quantize_head_row, quantize_weights_row};

    #[test]
    fn gemms_match_core_on_every_path() {
        const MOST: usize = 2 * ROWS + 1;
        let mut noise = Noise::new(12);
        for k in [100, 128, 704] {
            let (w, x) = (noise.normals(32 * k), noise.normals(MOST * k));
            for of in [Bits::Four, Bits::Eight] {
                let mut tiles = Tiles::zeros(1, k, of).unwrap();
                encode(Simd::Scalar, of, &w, &[], k, &mut tiles.data).unwrap();
                for simd in paths() {
                    let mut acts = Acts::zeros(MOST, k).unwrap();
                    acts.quantize(simd, ACTIVATION_8, &x, k, MOST, k);
                    let mut y = vec![f32::NAN; MOST * PANEL];
                    tiles.panel(simd, 0, &acts, MOST, &mut y);
                    // Every number of rows that a pass may have.
                    for m in 1..MOST {
                        let mut fewer = vec![f32::NAN; m * PANEL];
                        tiles.panel(simd, 0, &acts, m, &mut fewer);
                        assert_eq!(bits(&fewer), bits(&y[..m * PANEL]), "{m} rows, {of:?} {simd:?} k {k}");
                    }
                    for j in 0..MOST {
                        let want = quantize_activations(&x[j * k..][..k]).unwrap();
                        for n in 0..32 {
                            let row = &w[n * k..][..k];
                            let row = match of {
                                Bits::Four => quantize_weights_row(row, &[]).unwrap(),
                                Bits::Eight => quantize_head_row(row).unwrap(),
                            };
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
}
