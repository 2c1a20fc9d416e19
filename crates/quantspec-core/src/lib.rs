//! The QuantSpec method (ICML 2025) on numbers and slices.
//!
//! One file per concept. This crate has no tensors, devices, files, clocks or global random state. It defines every operation
//! in plain f32/f64 code, and the fast backends are tested against it.
//!
//! Letters follow Leviathan et al.: p is the target's distribution, q the draft's, γ the number of drafted tokens of a round.
#![forbid(unsafe_code)]

pub mod ablation;
pub mod attend;
pub mod cache;
mod candidate;
pub mod config;
mod costs;
pub mod error;
pub mod forecast;
pub mod grammar;
pub mod layout;
pub mod logprob;
pub mod noise;
pub mod page_pool;
pub mod penalty;
pub mod plan;
pub mod policy;
pub mod quantize;
pub mod sample;
pub mod stats;
pub mod stop;
pub mod verify;
pub mod weights;

pub use error::{Error, ErrorKind, Result};
