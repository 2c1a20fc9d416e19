//! The network on CPU cores: SIMD kernels, chosen at run time, over a fixed worker pool.
//!
//! Kernels are named after core's concepts (`linear`, `attend`, `quantize`); each file states its byte layouts and its order
//! of sums. Target kernels are row-invariant to the bit on every SIMD path, for any number of threads.

// Kernels walk several arrays by one lane index, and take shapes as plain numbers.
#![allow(clippy::needless_range_loop, clippy::too_many_arguments)]

#[cfg(target_arch = "x86_64")]
mod amx;
mod attend;
mod backend;
mod bandwidth;
#[doc(hidden)]
pub mod bench;
#[cfg(target_arch = "x86_64")]
mod bf16;
mod cache;
mod causal;
pub mod dispatch;
mod elementwise;
mod hierarchy;
mod lanes;
mod linear;
pub mod machine;
mod masses;
mod memory;
mod panel;
mod pool;
mod prefill;
mod prompt;
mod quantize;
pub mod rates;
#[cfg(test)]
mod testing;
mod w4;
mod weights;

pub use backend::{CpuBackend, check, plan};
pub use bandwidth::read_gb_per_s;
pub use memory::give_back_freed;
