//! Kernel shapes for launchers. build.rs reads the tables and numbers from the kernel sources, which assert the values
//! derived from a row.

use quantspec_core::cache::{BUFFER_TOKENS, G, GAMMA_MAX};
use quantspec_core::penalty;

/// A 16-bit GEMM on Hopper: `PIPELINE` in kernels/linear.cu.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pipeline {
    /// Row tiles of 8.
    pub(crate) nt: usize,
    /// Blocks of a cluster, which share copies of the inputs.
    pub(crate) cluster: usize,
    /// Bytes of shared memory.
    pub(crate) shared: usize,
}

/// A GEMM with draft weights on Hopper: `DRAFT_PIPELINE` in kernels/linear.cu.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DraftPipeline {
    /// As in [`Pipeline`].
    pub(crate) nt: usize,
    pub(crate) cluster: usize,
    pub(crate) hand_over: bool,
    /// Bytes of shared memory with weights of four and of eight bits.
    pub(crate) shared4: usize,
    pub(crate) shared8: usize,
}

/// A GEMM with draft weights and a pipeline for each warp: `QUANT` in kernels/linear.cu.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Quant {
    /// Bits of a weight.
    pub(crate) bits: usize,
    /// Row tiles of 8.
    pub(crate) nt: usize,
    /// Blocks of weights that a warp has in flight.
    pub(crate) stages: usize,
}

/// A GEMM of many rows with 16-bit weights on Hopper: `WIDE_FULL` in kernels/linear.cu.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WideFull {
    /// Most rows of a block.
    pub(crate) n: usize,
    /// Bytes of shared memory.
    pub(crate) shared: usize,
}

/// The same with draft weights: `WIDE` in kernels/linear.cu.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wide {
    /// Bits of a weight.
    pub(crate) bits: usize,
    /// Most rows of a block.
    pub(crate) n: usize,
    /// Bytes of shared memory.
    pub(crate) shared: usize,
}

/// A GEMM with planes on Hopper: `PLANE_PIPELINE` in kernels/hierarchy.cu.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlanePipeline {
    /// Number of planes to read.
    pub(crate) planes: usize,
    /// As in [`Pipeline`].
    pub(crate) nt: usize,
    pub(crate) cluster: usize,
    pub(crate) hand_over: bool,
    pub(crate) shared: usize,
}

/// A GEMM of many rows with planes on Hopper: `WIDE_PLANES` in kernels/hierarchy.cu.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WidePlanes {
    /// Number of planes to read.
    pub(crate) planes: usize,
    /// Most rows of a block.
    pub(crate) n: usize,
    /// Bytes of shared memory.
    pub(crate) shared: usize,
}

/// Decode attention: `ATTEND` in kernels/attend.cu, `ATTEND_LOCAL` in kernels/attend_local.cu.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attend {
    /// Head width.
    pub(crate) d: usize,
    /// [`UPPER`], [`BOTH`] or [`FULL`].
    pub(crate) view: usize,
    /// Most query rows per KV head.
    pub(crate) rows: usize,
    /// Pipeline stages that TMA fills; 0 if threads copy, with stages chosen at launch.
    pub(crate) stages: usize,
    /// True for blocks of half an SM.
    pub(crate) half_sm: bool,
    /// Threads.
    pub(crate) block: usize,
    /// Bytes of shared memory per pipeline stage.
    pub(crate) stage_bytes: usize,
    /// Bytes of shared memory besides the stages.
    pub(crate) shared: usize,
}

/// A tile of a prompt's GEMM on Hopper: `TILE` in kernels/prefill_gemm.cu.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tile {
    /// Columns.
    pub(crate) columns: usize,
    /// Computing warpgroups of 64 rows.
    pub(crate) consumers: usize,
    /// CTAs that share a tile of W.
    pub(crate) cluster: usize,
    /// Pipeline stages.
    pub(crate) stages: usize,
    /// Bytes of shared memory.
    pub(crate) shared: usize,
}

include!(concat!(env!("OUT_DIR"), "/shapes.rs"));

const _: () = assert!(PAGE == G && RING == BUFFER_TOKENS);
const _: () = assert!(NGRAM_MAX == penalty::NGRAM_MAX && WINDOW_MAX >= GAMMA_MAX);
