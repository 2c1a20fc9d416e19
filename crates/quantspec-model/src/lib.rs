//! Checkpoints and the network.
#![forbid(unsafe_code)]

pub mod backend;
pub mod engine;
pub mod forward;
