//! Tensors of other families under the names that Llama's have, so that a checkpoint is looked up in one way.
//!
//! Phi-3 keeps Q, K and V in one matrix, gate and up in another: their rows become matrices of their own. Models with a vision
//! tower keep the language model under a prefix, which is removed; the tower's tensors are left out.

use crate::safetensors::{SafeTensors, Tensor, shown};
use quantspec_core::config::ModelConfig;
use quantspec_core::{Error, Result};
use std::collections::HashMap;

/// Prefixes of the language model in checkpoints with a vision tower, as transformers 4 and 5 write them, and what they become.
const PREFIXES: [(&str, &str); 2] = [("language_model.", ""), ("model.language_model.", "model.")];

/// Renames the tensors of `shards`, where `names` says which shard holds each; returns the new names. `wrapped`: the model has a
/// vision tower.
///
/// # Errors
/// [`quantspec_core::ErrorKind::Model`] where a fused matrix has other rows than config.json says, or where two tensors would
/// have one name.
pub(crate) fn rename(
    config: &ModelConfig,
    wrapped: bool,
    shards: &mut [SafeTensors],
    names: HashMap<String, usize>,
) -> Result<HashMap<String, usize>> {
    if !wrapped && config.family != "phi3" {
        return Ok(names);
    }
    let mut renamed = HashMap::with_capacity(names.len());
    for (number, shard) in shards.iter_mut().enumerate() {
        shard.rename(|name, tensor| {
            if names.get(name) != Some(&number) {
                return Ok(Vec::new());
            }
            let Some(inner) = (if wrapped { inner(name) } else { Some(name.to_string()) }) else {
                return Ok(Vec::new());
            };
            let parts = match fused(config, &inner) {
                Some(parts) => divide(name, &tensor, parts)?,
                None => vec![(inner, tensor)],
            };
            for (part, _) in &parts {
                if renamed.insert(part.clone(), number).is_some() {
                    return Err(Error::model(
                        format!("two tensors of the checkpoint are \"{}\"", shown(part)),
                        "the checkpoint is damaged; fetch it again from where the model is published",
                    ));
                }
            }
            Ok(parts)
        })?;
    }
    Ok(renamed)
}

/// A tensor's name in the language model; `None` outside of it.
fn inner(name: &str) -> Option<String> {
    let of = |(prefix, becomes): &(&str, &str)| name.strip_prefix(prefix).map(|rest| format!("{becomes}{rest}"));
    PREFIXES.iter().find_map(of).or_else(|| (name == "lm_head.weight").then(|| name.to_string()))
}

/// The matrices in a fused one with their rows, in order.
fn fused(config: &ModelConfig, name: &str) -> Option<Vec<(String, usize)>> {
    if config.family != "phi3" {
        return None;
    }
    let (q, kv, intermediate) = (config.q_width(), config.kv_width(), config.intermediate);
    let parts = |module: &str, parts: &[(&str, usize)]| {
        Some(parts.iter().map(|(part, rows)| (format!("{module}{part}_proj.weight"), *rows)).collect())
    };
    if let Some(module) = name.strip_suffix("qkv_proj.weight") {
        return parts(module, &[("q", q), ("k", kv), ("v", kv)]);
    }
    parts(name.strip_suffix("gate_up_proj.weight")?, &[("gate", intermediate), ("up", intermediate)])
}

/// The rows of a fused matrix as tensors of their own.
fn divide(name: &str, tensor: &Tensor, parts: Vec<(String, usize)>) -> Result<Vec<(String, Tensor)>> {
    let rows: usize = parts.iter().map(|(_, rows)| rows).sum();
    let &[height, width] = tensor.shape.as_slice() else { return Err(unfit(name, &tensor.shape, rows)) };
    if height != rows {
        return Err(unfit(name, &tensor.shape, rows));
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

fn unfit(name: &str, shape: &[usize], rows: usize) -> Error {
    Error::model(
        format!("tensor \"{}\" has shape {shape:?}, config.json asks for {rows} rows", shown(name)),
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
            ("vision_tower.transformer.layers.0.attention.q_proj.weight", None),
            ("model.multi_modal_projector.norm.weight", None),
        ] {
            assert_eq!(inner(name).as_deref(), expected, "{name}");
        }
    }
}
