//! Tile shapes of the Hopper GEMMs of a prompt, and the choice of one by its predicted time.

use crate::device::{Device, Kernel};
use crate::shapes;
use quantspec_core::{Error, Result};

/// The tile with this name in kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tile {
    name: &'static str,
    pub(super) shape: shapes::Tile,
    /// Clocks per k block of 64. The wide tile is bound by tensor cores; tiles with 64 rows or columns by loads from L2, 64
    /// bytes per clock and SM. 128 × 128 tiles are bound by both (512). The excess is measured.
    clocks: usize,
}

pub(super) const WIDE: Tile = Tile { name: "wide", shape: shapes::TILE_WIDE, clocks: 1024 };
pub(super) const MIDDLE: Tile = Tile { name: "middle", shape: shapes::TILE_MIDDLE, clocks: 540 };
pub(super) const TALL: Tile = Tile { name: "tall", shape: shapes::TILE_TALL, clocks: 600 };
pub(super) const SLIM: Tile = Tile { name: "slim", shape: shapes::TILE_SLIM, clocks: 384 };
pub(super) const SMALL: Tile = Tile { name: "small", shape: shapes::TILE_SMALL, clocks: 384 };
pub(super) const NARROW: Tile = Tile { name: "narrow", shape: shapes::TILE_NARROW, clocks: 256 };

/// Tile rows that are walked column by column together, so that L2 serves most loads. 4 to 16 perform alike.
pub(super) const TILE_ROW_GROUP: usize = 8;

impl Tile {
    /// Rows of a CTA, or of the CTAs of a cluster together.
    pub(super) const fn rows(&self) -> usize {
        64 * self.shape.consumers * self.shape.cluster
    }

    fn tiles(&self, rows: usize, columns: usize) -> usize {
        rows.div_ceil(self.rows()) * columns.div_ceil(self.shape.columns)
    }

    /// Time of a GEMM, in clocks per k block of 64.
    fn cost(&self, rows: usize, columns: usize, sms: usize) -> usize {
        self.tiles(rows, columns).div_ceil((sms / self.shape.cluster).max(1)) * self.clocks
    }

    pub(super) fn blocks(&self, rows: usize, columns: usize, sms: usize) -> usize {
        let resident = sms / self.shape.cluster;
        self.tiles(rows, columns).min(resident.max(1)) * self.shape.cluster
    }

    pub(super) fn threads(&self) -> u32 {
        128 * (self.shape.consumers as u32 + 1)
    }
}

/// A GEMM with its epilogue, in every tile shape it has.
#[derive(Clone, Debug)]
pub(super) struct Gemm {
    tiles: Vec<(Tile, Kernel)>,
}

impl Gemm {
    pub(super) fn new(device: &Device, stem: &str, dtype: &str, tiles: &[Tile]) -> Result<Gemm> {
        let tiles = tiles
            .iter()
            .map(|&tile| Ok((tile, device.kernel(&format!("{stem}_{dtype}_{}", tile.name), tile.shape.shared)?)))
            .collect::<Result<_>>()?;
        Ok(Gemm { tiles })
    }

    /// The tile with the least predicted time; the widest wins ties.
    pub(super) fn choose(&self, rows: usize, columns: usize, sms: usize) -> Result<(Tile, Kernel)> {
        let best = self.tiles.iter().min_by_key(|(tile, _)| tile.cost(rows, columns, sms));
        best.copied().ok_or_else(|| Error::internal("a GEMM without tiles"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_blocks_take_small_tiles_and_large_ones_wide_ones() {
        let best = |tiles: [Tile; 4], rows: usize, n: usize| {
            tiles.iter().min_by_key(|tile| tile.cost(rows, n, 132)).map(|tile| tile.name)
        };
        // The fastest measured tile on 132 SMs, or one within a few per cent of it.
        for (rows, name) in
            [(1, "narrow"), (128, "narrow"), (129, "slim"), (256, "slim"), (512, "middle"), (2048, "wide")]
        {
            assert_eq!(best([WIDE, MIDDLE, SLIM, NARROW], rows, 4096), Some(name), "{rows}");
        }
        for (rows, n, name) in [
            (1, 12_288, "small"),
            (128, 12_288, "tall"),
            (256, 12_288, "wide"),
            (320, 12_288, "small"),
            (640, 12_288, "tall"),
            (128, 22_016, "small"),
            (192, 22_016, "small"),
            (384, 22_016, "tall"),
            (512, 22_016, "wide"),
            (2048, 22_016, "wide"),
        ] {
            assert_eq!(best([WIDE, MIDDLE, TALL, SMALL], rows, n), Some(name), "{rows} {n}");
        }
    }

    #[test]
    fn tiles_fit_on_an_sm() {
        for tile in [WIDE, MIDDLE, TALL, SLIM, SMALL, NARROW] {
            assert!(tile.shape.shared <= 227 * 1024, "{} takes {}", tile.name, tile.shape.shared);
        }
    }
}
