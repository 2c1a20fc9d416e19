//! Tensors of safetensors shards: where each part is, and which names are refused.

use super::{PIECE_BYTES, TensorLocation};
use crate::config;
use crate::file::shown;
use crate::names;
use crate::part::{self, Part};
use crate::quantised::{self, Scheme};
use crate::shards::{ShardTensor, Shards};
use quantspec_core::config::{Dtype, ModelConfig};
use quantspec_core::{Error, Result};
use std::collections::HashMap;

/// Old checkpoints store this tensor. It follows from config.json and is ignored.
pub(super) const RECOMPUTED: &str = "self_attn.rotary_emb.inv_freq";

/// Ends of the names of quantised matrices' tensors.
const QUANTISED: [&str; 13] = [
    ".qweight",
    ".qzeros",
    ".scales",
    ".g_idx",
    ".weight_scale",
    ".weight_packed",
    ".weight_scale_inv",
    ".weight_zero_point",
    ".absmax",
    ".quant_map",
    ".SCB",
    ".input_scale",
    ".activation_scale",
];

/// Returns true for a name of a quantised matrix's tensor.
fn is_of_quantised(name: &str) -> bool {
    QUANTISED.iter().any(|end| name.ends_with(end))
}

/// Refuses tensors of the network's modules that the configured network does not use. Ignoring a bias or a scale would
/// silently compute another function. Allowed are [`RECOMPUTED`], and next to quantised matrices scales of a cache and biases
/// of zeros, which GPTQ exporters write for networks without biases.
pub(super) fn refuse_foreign(config: &ModelConfig, schemes: &[Scheme], shards: &Shards) -> Result<()> {
    let parts = Part::all(config).into_iter().filter(|part| !part.is_vector() && *part != Part::Embedding);
    let matrices: HashMap<String, usize> =
        parts.flat_map(|part| names::places(config, part)).map(|place| (place.name, place.rows)).collect();
    let of_matrix = |name: &str| {
        let Some((module, suffix)) = name.rsplit_once('.') else { return false };
        schemes.iter().any(|scheme| scheme.owns(suffix)) && matrices.contains_key(&format!("{module}.weight"))
    };
    let idle = |name: &str| -> Result<bool> {
        let rows = name.strip_suffix(".bias").and_then(|of| matrices.get(&format!("{of}.weight")));
        match rows {
            Some(&rows) if !schemes.is_empty() => is_zero(shards, name, rows),
            _ => Ok(false),
        }
    };
    // Sorted, so that the first refusal is the same in every run. A quantised matrix explains the bias next to it.
    let mut sorted: Vec<&String> = shards.names().collect();
    sorted.sort_unstable_by_key(|name| (!is_of_quantised(name), *name));
    let of_cache = |name: &str| !schemes.is_empty() && quantised::is_of_cache(name);
    for name in sorted.into_iter().filter(|name| !of_matrix(name) && !of_cache(name)) {
        if let Some(refusal) = refusal(config, name)
            && !idle(name)?
        {
            return Err(refusal);
        }
    }
    Ok(())
}

/// The error for a tensor's name that the configured network does not use; `None` if it is used or of no concern.
fn refusal(config: &ModelConfig, name: &str) -> Option<Error> {
    let shown = shown(name);
    let in_layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
    let suffix = match in_layer {
        Some((_, suffix)) => suffix,
        // Any other tensor of the embedding, the final norm or the head, for example a bias of the head.
        None => {
            let mut weights = [Part::Embedding, Part::FinalNorm, Part::Head].map(|part| part.name(config)).into_iter();
            weights.any(|weight| *name != weight && module(name) == module(&weight)).then_some(name)?
        }
    };
    if is_of_quantised(suffix) {
        return Some(Error::model(
            format!(
                "tensor \"{shown}\" is of a quantised matrix, which quantization_config of config.json does not describe"
            ),
            "download config.json again, and quantize_config.json, quant_config.json or hf_quant_config.json if the model has it",
        ));
    }
    let inside = |(layer, _): (&str, &str)| layer.parse::<usize>().is_ok_and(|layer| layer < config.layers);
    if !in_layer.is_none_or(inside) {
        return Some(Error::model(
            format!("tensor \"{shown}\" is outside the {} layers of config.json", config.layers),
            "config.json and the weights are of different models; fetch both again",
        ));
    }
    let used =
        in_layer.is_some() && part::LAYER_PARTS.iter().any(|part| part.exists(config) && part.suffix(config) == suffix);
    (!used && suffix != RECOMPUTED).then(|| {
        Error::model(
            format!("tensor \"{shown}\" is no part of a {} network as config.json describes it", config.family),
            config::SUPPORTED,
        )
    })
}

/// Returns true if a tensor is a vector of `rows` zeros.
fn is_zero(shards: &Shards, name: &str, rows: usize) -> Result<bool> {
    let Some(found) = shards.find(name).filter(|found| found.tensor.shape == [rows]) else { return Ok(false) };
    Ok(shards.bytes(&found)?.iter().all(|byte| *byte == 0))
}

/// A tensor's name without its last component.
fn module(name: &str) -> Option<&str> {
    name.rsplit_once('.').map(|(module, _)| module)
}

/// Finds the embedding. If the configuration ties the head to it, a stored head decides, as in transformers 5. A head alone
/// is both; an equal head is tied; a different head is separate.
pub(super) fn embedding_of(config: &mut ModelConfig, shards: &Shards) -> Result<TensorLocation> {
    if !config.tied_embeddings || !shards.has(&Part::Head.name(config)) {
        return locate(config, shards, Part::Embedding);
    }
    let head = locate(config, shards, Part::Head)?;
    if !shards.has(&Part::Embedding.name(config)) {
        return Ok(head);
    }
    let table = locate(config, shards, Part::Embedding)?;
    let bytes = config.vocab * config.hidden * table.dtype.bytes();
    config.tied_embeddings = table.dtype == head.dtype && same_bytes(shards, table, head, bytes)?;
    Ok(table)
}

/// Returns true if both locations hold the same bytes.
fn same_bytes(shards: &Shards, one: TensorLocation, other: TensorLocation, bytes: usize) -> Result<bool> {
    let room = bytes.min(PIECE_BYTES);
    let (mut a, mut b) = (vec![0; room], vec![0; room]);
    for done in (0..bytes).step_by(PIECE_BYTES) {
        let length = (bytes - done).min(PIECE_BYTES);
        for (location, piece) in [(one, &mut a), (other, &mut b)] {
            shards.read(location.shard, location.offset + done as u64, &mut piece[..length])?;
        }
        if a[..length] != b[..length] {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Finds a part and checks its type and shape.
pub(super) fn locate(config: &ModelConfig, shards: &Shards, part: Part) -> Result<TensorLocation> {
    let name = part.name(config);
    let Some(ShardTensor { shard, tensor }) = shards.find(&name) else {
        let hint = match part {
            Part::Head => "if the head is the embedding, config.json must say \"tie_word_embeddings\": true",
            _ => "config.json and the weights are of different models, or the download is incomplete; fetch both again",
        };
        return Err(Error::model(format!("the checkpoint has no tensor \"{name}\""), hint));
    };
    let dtype = match tensor.dtype {
        "BF16" => Dtype::Bf16,
        "F16" => Dtype::F16,
        "F32" => Dtype::F32,
        other => {
            return Err(Error::model(
                format!("tensor \"{name}\" has dtype {other}, which is not supported"),
                "use the unquantised checkpoint in BF16, F16 or F32",
            ));
        }
    };
    let (rows, columns) = part.shape(config);
    let expected = if part.is_vector() { vec![columns] } else { vec![rows, columns] };
    if tensor.shape != expected {
        return Err(Error::model(
            format!("tensor \"{name}\" has shape {:?}, config.json expects {expected:?}", tensor.shape),
            "config.json and the weights are of different models; fetch both again",
        ));
    }
    Ok(TensorLocation { shard, offset: tensor.offset, dtype })
}
