//! Checkpoints and the network.
#![forbid(unsafe_code)]

pub mod backend;
pub mod forward;
