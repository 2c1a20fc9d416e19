//! Checkpoints, the forward pass, drafters, and the engine that runs rounds.
#![forbid(unsafe_code)]

pub mod backend;
pub mod blocks;
pub mod cache_file;
pub mod checkpoint;
pub mod config;
pub mod draft;
pub mod draft_cache;
mod elements;
pub mod engine;
pub mod evaluate;
mod file;
pub mod forward;
pub mod gguf;
mod gguf_config;
mod host_sampler;
pub mod importance;
mod kv_cache;
mod names;
mod network;
mod part;
pub mod prompt_cache;
mod prompt_rows;
mod quantised;
#[cfg(feature = "reference")]
pub mod reference;
pub mod rope;
pub mod safetensors;
mod sampler;
mod shards;
