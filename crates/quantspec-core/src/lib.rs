//! The QuantSpec method (ICML 2025) as numbers and slices.
//!
//! One file per concept. This crate knows no tensor, device, file, clock or global randomness: it holds the meaning of
//! every operation as clear f32/f64 code, against which the fast backends are tested.
//!
//! Letters follow Leviathan et al.: p is the target's distribution, q the draft's, γ the drafted tokens of a round.
#![forbid(unsafe_code)]

pub mod attend;
pub mod cache;
pub mod config;
pub mod error;
pub mod layout;
pub mod logprob;
pub mod penalty;
pub mod plan;
pub mod policy;
pub mod promise;
pub mod quantize;
pub mod report;
pub mod sample;
pub mod stop;
pub mod verify;
pub mod weights;

pub use error::{Error, ErrorKind, Result};
