//! Shapes of the kernels that launchers need. build.rs reads the tables and numbers from the sources of the kernels, which assert what follows from a row.

use quantspec_core::cache::G;

/// A 16-bit GEMM on Hopper: `RING` in kernels/linear.cu.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ring {
    /// Row tiles of 8.
    pub(crate) nt: usize,
    /// Blocks that share what they copy of the inputs.
    pub(crate) cluster: usize,
    /// The warps that copy hand registers over to those that multiply.
    pub(crate) hand_over: bool,
    /// Bytes of shared memory.
    pub(crate) shared: usize,
}

/// A GEMM with draft weights on Hopper: `DRAFT_RING` there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DraftRing {
    /// As in [`Ring`].
    pub(crate) nt: usize,
    pub(crate) cluster: usize,
    pub(crate) hand_over: bool,
    /// Bytes of shared memory with weights of four and of eight bits.
    pub(crate) shared4: usize,
    pub(crate) shared8: usize,
}

/// A GEMM of many rows with draft weights on Hopper: `WIDE` there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wide {
    /// Bits of a weight.
    pub(crate) bits: usize,
    /// Most rows.
    pub(crate) n: usize,
    /// Bytes of shared memory.
    pub(crate) shared: usize,
}

/// A GEMM with planes on Hopper: `PLANE_RING` in kernels/hierarchy.cu.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlaneRing {
    /// Planes that are read.
    pub(crate) planes: usize,
    /// As in [`Ring`].
    pub(crate) nt: usize,
    pub(crate) cluster: usize,
    pub(crate) hand_over: bool,
    pub(crate) shared: usize,
}

/// Decode attention: `ATTEND` in kernels/attend.cu.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attend {
    /// Head width.
    pub(crate) d: usize,
    /// [`UPPER`], [`BOTH`] or [`FULL`].
    pub(crate) view: usize,
    /// Query rows a KV head it takes.
    pub(crate) rows: usize,
    /// Pipeline stages of a ring that TMA fills; 0: threads copy, and the launch says how many.
    pub(crate) stages: usize,
    /// A block has half an SM.
    pub(crate) beside: bool,
    /// Threads.
    pub(crate) block: usize,
    /// Bytes of shared memory for each pipeline stage, and besides.
    pub(crate) stage_bytes: usize,
    pub(crate) shared: usize,
}

/// A tile of a prompt's GEMM on Hopper: `TILE` in kernels/prefill_gemm.cu.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tile {
    /// Columns.
    pub(crate) columns: usize,
    /// Warpgroups of 64 rows that multiply.
    pub(crate) consumers: usize,
    /// CTAs that share a tile of W.
    pub(crate) cluster: usize,
    /// Pipeline stages.
    pub(crate) stages: usize,
    /// Bytes of shared memory.
    pub(crate) shared: usize,
}

include!(concat!(env!("OUT_DIR"), "/shapes.rs"));

const _: () = assert!(PAGE == G);
