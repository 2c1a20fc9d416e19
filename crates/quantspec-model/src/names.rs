//! Renames tensors of other model families to Llama's names, so that all checkpoints are read alike.
//!
//! Phi-3 stores Q, K and V in one matrix, gate and up in another; their rows become separate matrices. Quantised ones stay fused,
//! as their codes may not be stored by rows (`quantised.rs`). In models with a vision tower the prefix of the language model is
//! removed, and the tower's tensors are left out.

use crate::elements::FLOATS;
use crate::file::shown;
use crate::part::Part;
use crate::safetensors::Tensor;
use crate::shards::Shards;
use quantspec_core::config::ModelConfig;
use quantspec_core::{Error, Result};

/// Prefixes of the language model next to a vision tower, as transformers 4 and 5 write them, and their replacements.
const PREFIXES: [(&str, &str); 2] = [("language_model.", ""), ("model.language_model.", "model.")];

/// Renames the tensors. `wrapped`: the model has a vision tower.
///
/// # Errors
/// [`quantspec_core::ErrorKind::Model`] if a fused matrix has a number of rows that differs from config.json, or if two
/// tensors would get the same name.
pub(crate) fn rename(config: &ModelConfig, wrapped: bool, shards: Shards) -> Result<Shards> {
    if !wrapped && config.family != "phi3" {
        return Ok(shards);
    }
    let parts = |name: &str, tensor: Tensor| {
        let Some(inner) = (if wrapped { inner(name) } else { Some(name.to_string()) }) else {
            return Ok(Vec::new());
        };
        match fused(config, &inner).filter(|_| FLOATS.contains(&tensor.dtype)) {
            Some(parts) => divide(name, &tensor, parts),
            None => Ok(vec![(inner, tensor)]),
        }
    };
    let twice = |name: &str| {
        Error::model(
            format!("two tensors of the checkpoint are \"{}\"", shown(name)),
            "the checkpoint is damaged; download it again",
        )
    };
    shards.rename(parts, twice)
}

/// A tensor's name in the language model; `None` for other tensors.
fn inner(name: &str) -> Option<String> {
    let of = |(prefix, becomes): &(&str, &str)| name.strip_prefix(prefix).map(|rest| format!("{becomes}{rest}"));
    PREFIXES.iter().find_map(of).or_else(|| name.starts_with("lm_head.").then(|| name.to_string()))
}

/// Ends of the names of fused matrices.
const FUSED: [&str; 2] = ["qkv_proj.weight", "gate_up_proj.weight"];

/// Names and row counts of the matrices in a fused one, in order; `None` for other names.
fn fused(config: &ModelConfig, name: &str) -> Option<Vec<(String, usize)>> {
    if config.family != "phi3" {
        return None;
    }
    let (q, kv, intermediate) = (config.q_width(), config.kv_width(), config.intermediate);
    let parts = |module: &str, parts: &[(&str, usize)]| {
        Some(parts.iter().map(|(part, rows)| (format!("{module}{part}_proj.weight"), *rows)).collect())
    };
    let [qkv, gate_up] = FUSED;
    if let Some(module) = name.strip_suffix(qkv) {
        return parts(module, &[("q", q), ("k", kv), ("v", kv)]);
    }
    parts(name.strip_suffix(gate_up)?, &[("gate", intermediate), ("up", intermediate)])
}

/// A matrix of a checkpoint that holds one of the network.
pub(crate) struct Place {
    /// Name of its plain weight.
    pub(crate) name: String,
    /// Its rows.
    pub(crate) rows: usize,
    /// First row of the network's matrix.
    pub(crate) first: usize,
}

/// A matrix's place in a fused one; `None` if the family does not fuse it.
pub(crate) fn fused_place(config: &ModelConfig, part: Part) -> Option<Place> {
    let alone = part.name(config);
    let module = &alone[..=alone.strip_suffix(".weight")?.rfind('.')?];
    FUSED.iter().find_map(|matrix| {
        let name = format!("{module}{matrix}");
        let parts = fused(config, &name)?;
        let at = parts.iter().position(|(part, _)| *part == alone)?;
        let rows = |parts: &[(String, usize)]| parts.iter().map(|(_, rows)| rows).sum();
        Some(Place { rows: rows(&parts), first: rows(&parts[..at]), name })
    })
}

/// Where a matrix may be: alone, or in a fused one.
pub(crate) fn places(config: &ModelConfig, part: Part) -> impl Iterator<Item = Place> {
    let alone = Place { name: part.name(config), rows: part.shape(config).0, first: 0 };
    std::iter::once(alone).chain(fused_place(config, part))
}

/// Splits a fused matrix by rows into tensors.
fn divide(name: &str, tensor: &Tensor, parts: Vec<(String, usize)>) -> Result<Vec<(String, Tensor)>> {
    let rows: usize = parts.iter().map(|(_, rows)| rows).sum();
    let &[height, width] = tensor.shape.as_slice() else { return Err(wrong_shape(name, &tensor.shape, rows)) };
    if height != rows {
        return Err(wrong_shape(name, &tensor.shape, rows));
    }
    let row_bytes = tensor.bytes / height as u64;
    let mut offset = tensor.offset;
    Ok(parts
        .into_iter()
        .map(|(part, rows)| {
            let bytes = rows as u64 * row_bytes;
            let tensor = Tensor { dtype: tensor.dtype, shape: vec![rows, width], offset, bytes };
            offset += bytes;
            (part, tensor)
        })
        .collect())
}

fn wrong_shape(name: &str, shape: &[usize], rows: usize) -> Error {
    Error::model(
        format!("tensor \"{}\" has shape {shape:?}, config.json expects {rows} rows", shown(name)),
        "config.json and the weights are of different models; fetch both again",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_language_model_is_left() {
        for (name, expected) in [
            ("language_model.model.layers.0.mlp.up_proj.weight", Some("model.layers.0.mlp.up_proj.weight")),
            ("language_model.lm_head.weight", Some("lm_head.weight")),
            ("model.language_model.embed_tokens.weight", Some("model.embed_tokens.weight")),
            ("lm_head.weight", Some("lm_head.weight")),
            ("lm_head.weight_packed", Some("lm_head.weight_packed")),
            ("vision_tower.transformer.layers.0.attention.q_proj.weight", None),
            ("model.multi_modal_projector.norm.weight", None),
        ] {
            assert_eq!(inner(name).as_deref(), expected, "{name}");
        }
    }
}
