//! `config.json` and `generation_config.json` of Hugging Face checkpoints, converted to [`ModelConfig`] or refused.
//!
//! An absent field takes the default of its model family, as in transformers. A setting that changes the computed function
//! and is not implemented is refused by name.

mod fields;
mod rope;

use crate::file::shown;
pub(crate) use fields::object;
use fields::{Fields, absurd, unsupported};
use quantspec_core::config::{Activation, Dtype, LayerNorms, Local, ModelConfig, QkNorm, Rope, RopeScaling, Scales};
use quantspec_core::{Error, Result};
use rope::rope;
use serde_json::Value;
use std::ops::RangeInclusive;

/// What may be loaded, for hints.
pub(crate) const SUPPORTED: &str = "supported are dense Llama 2/3/3.1/3.2, Mistral, Qwen2/2.5, Qwen3, Phi-3/4, SmolLM3, Granite 3, OLMo 2, Ministral 3 and Gemma 3 checkpoints in BF16, F16 or F32, or quantised by FP8, compressed-tensors, GPTQ, AWQ or AutoRound";

/// Limits of shapes: several times those of any published model of these families, and small enough that no product of two
/// overflows 64 bits.
pub(crate) const HIDDEN: RangeInclusive<usize> = 1..=65_536;
pub(crate) const INTERMEDIATE: RangeInclusive<usize> = 1..=1_048_576;
pub(crate) const LAYERS: RangeInclusive<usize> = 1..=1_024;
pub(crate) const HEADS: RangeInclusive<usize> = 1..=1_024;
pub(crate) const HEAD_DIM: RangeInclusive<usize> = 4..=256;
pub(crate) const VOCAB: RangeInclusive<usize> = 1..=16_777_216;
/// Granite's multipliers. Published ones are from 0.0078 to 16.
pub(crate) const MULTIPLIERS: RangeInclusive<f64> = 1e-4..=1e4;
pub(crate) const POSITIONS: RangeInclusive<usize> = 1..=268_435_456;

/// One supported `model_type`, with the defaults of its Hugging Face configuration class.
struct Family {
    name: &'static str,
    heads: Option<usize>,
    vocab: Option<usize>,
    kv_heads: Option<usize>,
    head_dim: Option<usize>,
    max_positions: usize,
    rms_eps: f64,
    theta: f64,
    /// The head is the embedding.
    tied: bool,
    /// Q, K and V always have biases; `attention_bias` is ignored.
    always_qkv_bias: bool,
    /// `attention_bias` applies to all four projections.
    attention_bias: bool,
    mlp_bias: bool,
    qk_norm: QkNorm,
    norms: LayerNorms,
    /// `partial_rotary_factor` applies, and `original_max_position_embeddings` has a default of its own. Such a family has
    /// neither biases nor norms of queries and keys, which would have to be permuted with their channels.
    partial_rotary: bool,
    /// `no_rope_layers` and `no_rope_layer_interval` apply.
    no_rope: bool,
    /// Granite's four multipliers apply.
    multipliers: bool,
    /// `llama_4_scaling_beta` of the RoPE parameters applies.
    query_scale: bool,
    /// Gemma's local layers, its scale of scores, GELU and norm weights less 1.
    gemma: bool,
    sliding: Sliding,
}

/// How a family limits attention to a sliding window; a null `sliding_window` means none.
enum Sliding {
    /// `sliding_window`, unless `use_sliding_window` is false. The family's attention is full, but its cache in transformers
    /// is limited to the window.
    Stated,
    /// `sliding_window`, or this many tokens if the field is absent.
    Always(usize),
    /// `sliding_window` if `use_sliding_window` is set, from layer `max_window_layers` on.
    Optional,
    /// `sliding_window` if it is stated and `use_sliding_window` is set.
    Requested,
}

/// The defaults that most families share.
const COMMON: Family = Family {
    name: "",
    heads: None,
    vocab: None,
    kv_heads: None,
    head_dim: None,
    max_positions: 2048,
    rms_eps: 1e-6,
    theta: 10_000.0,
    tied: false,
    always_qkv_bias: false,
    attention_bias: false,
    mlp_bias: false,
    qk_norm: QkNorm::None,
    norms: LayerNorms::Before,
    partial_rotary: false,
    no_rope: false,
    multipliers: false,
    query_scale: false,
    gemma: false,
    sliding: Sliding::Stated,
};

const MISTRAL: Family =
    Family { name: "mistral", kv_heads: Some(8), max_positions: 131_072, sliding: Sliding::Always(4096), ..COMMON };

const FAMILIES: &[Family] = &[
    Family { name: "llama", attention_bias: true, mlp_bias: true, ..COMMON },
    MISTRAL,
    // Ministral 8B, whose `layer_types` alternate.
    Family { name: "ministral", ..MISTRAL },
    Family {
        name: "qwen2",
        kv_heads: Some(32),
        max_positions: 32_768,
        always_qkv_bias: true,
        sliding: Sliding::Optional,
        ..COMMON
    },
    Family {
        name: "qwen3",
        kv_heads: Some(32),
        head_dim: Some(128),
        max_positions: 32_768,
        attention_bias: true,
        qk_norm: QkNorm::Heads,
        sliding: Sliding::Optional,
        ..COMMON
    },
    Family { name: "phi3", max_positions: 4096, rms_eps: 1e-5, partial_rotary: true, ..COMMON },
    Family {
        name: "smollm3",
        kv_heads: Some(4),
        max_positions: 32_768,
        theta: 2e6,
        tied: true,
        attention_bias: true,
        mlp_bias: true,
        no_rope: true,
        sliding: Sliding::Requested,
        ..COMMON
    },
    Family { name: "granite", attention_bias: true, mlp_bias: true, multipliers: true, ..COMMON },
    Family { name: "olmo2", rms_eps: 1e-5, qk_norm: QkNorm::Projection, norms: LayerNorms::After, ..COMMON },
    Family {
        name: "ministral3",
        kv_heads: Some(8),
        head_dim: Some(128),
        max_positions: 262_144,
        rms_eps: 1e-5,
        query_scale: true,
        ..COMMON
    },
    Family {
        name: "gemma3_text",
        heads: Some(8),
        vocab: Some(262_208),
        kv_heads: Some(4),
        head_dim: Some(256),
        max_positions: 131_072,
        theta: 1e6,
        tied: true,
        qk_norm: QkNorm::Heads,
        norms: LayerNorms::Both,
        gemma: true,
        ..COMMON
    },
];

/// SmolLM3's default of `no_rope_layer_interval`.
pub(crate) const SMOLLM3_INTERVAL: usize = 4;

/// Phi-3's default of `original_max_position_embeddings`.
const PHI_ORIGINAL: usize = 4096;

/// Models with a vision tower; `text_config` describes their language model.
const WRAPPERS: &[&str] = &["mistral3", "gemma3"];

/// Parses the bytes of `config.json` and of the optional `generation_config.json`.
///
/// [`ModelConfig::dtype`] is the file's claim; [`crate::checkpoint::Checkpoint`] replaces it by the tensors' type.
///
/// # Errors
/// [`quantspec_core::ErrorKind::Model`] if a file is not valid JSON, if a field is missing or out of range, or if it names
/// something that is not implemented.
pub fn parse(config: &[u8], generation: Option<&[u8]>) -> Result<ModelConfig> {
    let object = object(config, "config.json")?;
    let outer = Fields { map: &object, object: "config.json" };
    let fields =
        if wraps(&outer)? { outer.inner("text_config")?.ok_or_else(|| outer.missing("text_config"))? } else { outer };
    let family = family(&fields)?;
    let activation = activation(&fields, family)?;
    refuse_others(&fields)?;

    let hidden = fields.size("hidden_size", HIDDEN, None)?;
    let layers = fields.size("num_hidden_layers", LAYERS, None)?;
    let heads = fields.size("num_attention_heads", HEADS, family.heads)?;
    let kv_heads = family.kv_heads.filter(|_| !fields.is_null("num_key_value_heads")).unwrap_or(heads);
    let kv_heads = fields.size("num_key_value_heads", HEADS, Some(kv_heads))?;
    if heads % kv_heads != 0 {
        return Err(absurd(format!("config.json: {kv_heads} key/value heads do not divide {heads} attention heads")));
    }
    let head_dim = head_dim(&fields, family, hidden, heads)?;
    let vocab = fields.size("vocab_size", VOCAB, family.vocab)?;
    let stated_positions = fields.size("max_position_embeddings", POSITIONS, Some(family.max_positions))?;
    let rms_eps = fields.number("rms_norm_eps", Some(family.rms_eps))?;
    if !(1e-12..=1e-1).contains(&rms_eps) {
        return Err(absurd(format!("config.json: rms_norm_eps {rms_eps} is not from 1e-12 to 0.1")));
    }
    let (rope, max_positions) = rope(&fields, family, head_dim, stated_positions)?;
    let (local, window) = if family.gemma {
        (Some(local(&fields, layers, head_dim)?), None)
    } else {
        (None, sliding_window(&fields, family, layers)?)
    };
    // Attention to a sliding window equals full attention in texts that are no longer.
    let max_positions = max_positions.min(plain_positions(&fields)?).min(window.unwrap_or(usize::MAX));

    if family.norms != LayerNorms::Before && fields.flag("attention_bias", false)? {
        return Err(unsupported(format!("config.json: attention_bias in a {} network", family.name)));
    }
    let attention_bias = family.attention_bias && fields.flag("attention_bias", false)?;
    let (scales, residual) = match family {
        Family { multipliers: true, .. } => multipliers(&fields, head_dim)?,
        Family { gemma: true, .. } => (gemma_scales(&fields, hidden, head_dim)?, 1.0),
        _ => (Scales::NONE, 1.0),
    };
    Ok(ModelConfig {
        family: family.name.to_string(),
        layers,
        hidden,
        intermediate: fields.size("intermediate_size", INTERMEDIATE, None)?,
        heads,
        kv_heads,
        head_dim,
        vocab,
        max_positions,
        rms_eps: (rms_eps / (residual * residual)) as f32,
        rope,
        no_rope: if family.no_rope { no_rope(&fields, layers)? } else { Vec::new() },
        local,
        scales,
        activation,
        norms_less_one: family.gemma,
        tied_embeddings: tied_embeddings(&fields, &outer, family)?,
        qkv_bias: family.always_qkv_bias || attention_bias,
        output_bias: attention_bias,
        mlp_bias: family.mlp_bias && fields.flag("mlp_bias", false)?,
        qk_norm: family.qk_norm,
        norms: family.norms,
        dtype: dtype(if fields.stated("dtype") || fields.stated("torch_dtype") { &fields } else { &outer })?,
        eos: eos(if fields.stated("eos_token_id") { &fields } else { &outer }, generation, vocab)?,
    })
}

/// Whether the head is the embedding. Around a language model, transformers 5 states it in the outer object, where it is true by
/// default, and writes the inner one's default; earlier versions state it in either. A stored head decides later.
fn tied_embeddings(fields: &Fields, outer: &Fields, family: &Family) -> Result<bool> {
    let key = "tie_word_embeddings";
    if !wraps(outer)? {
        return fields.flag(key, family.tied);
    }
    Ok(outer.flag(key, true)? || fields.flag(key, false)?)
}

/// Channels of a head: stated, the family's default, or the hidden channels divided by the heads.
fn head_dim(fields: &Fields, family: &Family, hidden: usize, heads: usize) -> Result<usize> {
    let head_dim = match (fields.get("head_dim"), family.head_dim.filter(|_| !fields.is_null("head_dim"))) {
        (Some(_), _) => fields.size("head_dim", HEAD_DIM, None)?,
        (None, Some(default)) => default,
        (None, None) if hidden.is_multiple_of(heads) => hidden / heads,
        (None, None) => {
            return Err(absurd(format!("config.json: {heads} attention heads do not divide hidden_size {hidden}")));
        }
    };
    if HEAD_DIM.contains(&head_dim) && head_dim.is_multiple_of(2) {
        return Ok(head_dim);
    }
    Err(Error::model(
        format!(
            "config.json: head_dim {head_dim} is not an even number from {} to {}",
            HEAD_DIM.start(),
            HEAD_DIM.end()
        ),
        "channels are rotated in pairs and the cache's kernels hold up to 256 of them; use another model",
    ))
}

/// Gemma's embedding is multiplied by √hidden; its scores are divided by √query_pre_attn_scalar instead of √head_dim.
fn gemma_scales(fields: &Fields, hidden: usize, head_dim: usize) -> Result<Scales> {
    let scalar = fields.number("query_pre_attn_scalar", Some(256.0))?;
    if !(1.0..=1e6).contains(&scalar) {
        return Err(absurd(format!("config.json: query_pre_attn_scalar {scalar} is not from 1 to 1000000")));
    }
    Ok(Scales::of((hidden as f64).sqrt(), 1.0, 1.0, (head_dim as f64 / scalar).sqrt()))
}

/// Returns true if config.json describes a language model with a vision tower.
///
/// # Errors
/// [`quantspec_core::ErrorKind::Model`] if it is not valid JSON.
pub(crate) fn is_wrapped(config: &[u8]) -> Result<bool> {
    let object = object(config, "config.json")?;
    wraps(&Fields { map: &object, object: "config.json" })
}

fn wraps(fields: &Fields) -> Result<bool> {
    Ok(fields.text("model_type")?.is_some_and(|name| WRAPPERS.contains(&name)))
}

/// The family of `model_type`; `architectures` must be its causal language model.
fn family(fields: &Fields) -> Result<&'static Family> {
    let Some(name) = fields.text("model_type")? else {
        return Err(Error::model(
            "config.json: model_type is missing",
            format!("this is not a Hugging Face checkpoint; {SUPPORTED}"),
        ));
    };
    let Some(family) = FAMILIES.iter().find(|family| family.name == name) else {
        let kind = if name.contains("moe") || name.contains("mixtral") { " (mixture of experts)" } else { "" };
        return Err(unsupported(format!("model family \"{}\"{kind}", shown(name))));
    };
    if let Some(architectures) = fields.list("architectures")? {
        let causal = |value: &Value| value.as_str().is_some_and(|text| text.ends_with("ForCausalLM"));
        if !architectures.is_empty() && !architectures.iter().any(causal) {
            let names = architectures.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(", ");
            return Err(unsupported(format!("architecture \"{}\"", shown(&names))));
        }
    }
    Ok(family)
}

/// The family's activation. Any other is refused.
fn activation(fields: &Fields, family: &Family) -> Result<Activation> {
    let (name, allowed, activation): (_, &[&str], _) = if family.gemma {
        ("hidden_activation", &["gelu_pytorch_tanh"], Activation::Gelu)
    } else {
        ("hidden_act", &["silu", "swish"], Activation::Silu)
    };
    match fields.text(name)? {
        Some(other) if !allowed.contains(&other) => {
            Err(unsupported(format!("activation \"{}\" ({name})", shown(other))))
        }
        _ => Ok(activation),
    }
}

/// Gemma's local layers. Its settings that are not implemented are refused.
fn local(fields: &Fields, layers: usize, head_dim: usize) -> Result<Local> {
    const PATTERN: usize = 6;
    for name in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if let Some(value) = fields.get(name) {
            return Err(unsupported(format!("config.json: {name} ({})", shown(&value.to_string()))));
        }
    }
    if fields.flag("use_bidirectional_attention", false)? {
        return Err(unsupported("config.json: attention to later tokens (use_bidirectional_attention)".to_string()));
    }
    let layers = match fields.list("layer_types")? {
        Some(types) if types.len() >= layers => {
            let one = |value: &Value| match value.as_str() {
                Some("sliding_attention") => Ok(true),
                Some("full_attention") => Ok(false),
                other => Err(unsupported(format!("layer type \"{}\" (layer_types)", shown(other.unwrap_or("?"))))),
            };
            types[..layers].iter().map(one).collect::<Result<Vec<bool>>>()?
        }
        Some(types) => {
            return Err(absurd(format!("config.json: layer_types has {} entries for {layers} layers", types.len())));
        }
        None => {
            let every = fields.size("sliding_window_pattern", POSITIONS, Some(PATTERN))?;
            (1..=layers).map(|layer| layer % every != 0).collect()
        }
    };
    let reach = fields.size("sliding_window", POSITIONS, Some(4096))?;
    if reach < Local::LEAST || !reach.is_multiple_of(Local::UNIT) {
        let (unit, least) = (Local::UNIT, Local::LEAST);
        return Err(unsupported(format!("sliding_window {reach}, which is not a multiple of {unit} from {least} on,")));
    }
    let theta = match by_layer_type(fields, "sliding_attention")? {
        Some(inner) => match inner.text("rope_type")? {
            None | Some("default") => inner.number("rope_theta", Some(10_000.0))?,
            Some(other) => {
                return Err(unsupported(format!("RoPE type \"{}\" of local layers", shown(other))));
            }
        },
        None => fields.number("rope_local_base_freq", Some(10_000.0))?,
    };
    check_theta(theta)?;
    let rope = Rope { theta, dim: head_dim, scaling: RopeScaling::None, query_scale: None };
    Ok(Local { layers, reach, rope })
}

/// RoPE parameters of one type of layers, if `rope_parameters` has them by type.
fn by_layer_type<'a>(fields: &Fields<'a>, kind: &'static str) -> Result<Option<Fields<'a>>> {
    match fields.inner("rope_parameters")? {
        Some(parameters) => parameters.inner(kind),
        None => Ok(None),
    }
}

/// Refuses bases at which all wavelengths are equal, and ones far beyond the longest context.
fn check_theta(theta: f64) -> Result<()> {
    if theta > 1.0 && theta <= 1e12 {
        Ok(())
    } else {
        Err(absurd(format!("config.json: rope_theta {theta} is not above 1 and up to 1e12")))
    }
}

/// Rounds Gemma's factor on the embedding to the type of the embedding, as its reference implementation does.
pub(crate) fn round_embedding_factor(config: &mut ModelConfig, dtype: Dtype) {
    if config.norms_less_one {
        let factor = &mut config.scales.embedding;
        *factor = match dtype {
            Dtype::Bf16 => half::bf16::from_f32(*factor).to_f32(),
            Dtype::F16 => half::f16::from_f32(*factor).to_f32(),
            Dtype::F32 => *factor,
        };
    }
}

/// Refuses settings that transformers applies to every family and this network does not have, unless their value has no
/// effect.
fn refuse_others(fields: &Fields) -> Result<()> {
    for name in ["attention_chunk_size", "kv_sharing_modes", "per_layer_config", "transformers_weights"] {
        if let Some(value) = fields.get(name) {
            return Err(unsupported(format!("config.json: {name} ({})", shown(&value.to_string()))));
        }
    }
    if !fields.flag("is_causal", true)? {
        return Err(unsupported("config.json: attention to later tokens (is_causal false)".to_string()));
    }
    match fields.size("num_kv_shared_layers", 0..=*LAYERS.end(), Some(0))? {
        0 => Ok(()),
        shared => {
            Err(unsupported(format!("config.json: layers that share keys and values (num_kv_shared_layers {shared})")))
        }
    }
}

/// The longest context in which dual chunk attention (Qwen2.5-1M) equals plain attention: one chunk minus its overlap with
/// the next.
fn plain_positions(fields: &Fields) -> Result<usize> {
    let Some(chunks) = fields.inner("dual_chunk_attention_config")? else { return Ok(usize::MAX) };
    let (chunk, local) =
        (chunks.size("chunk_size", POSITIONS, None)?, chunks.size("local_size", 0..=*POSITIONS.end(), Some(0))?);
    let original = chunks.size("original_max_position_embeddings", POSITIONS, Some(chunk))?;
    match chunk.checked_sub(local) {
        Some(plain) if plain > 0 => Ok(plain.min(original)),
        _ => Err(absurd(format!("{}: chunk_size {chunk} is not above local_size {local}", chunks.object))),
    }
}

/// The sliding window of layers that see only recent tokens, if there are any.
fn sliding_window(fields: &Fields, family: &Family, layers: usize) -> Result<Option<usize>> {
    let window = match family.sliding {
        _ if fields.is_null("sliding_window") => None,
        Sliding::Stated if fields.stated("sliding_window") && fields.flag("use_sliding_window", true)? => {
            Some(fields.size("sliding_window", POSITIONS, None)?)
        }
        Sliding::Stated => None,
        Sliding::Always(default) => Some(fields.size("sliding_window", POSITIONS, Some(default))?),
        Sliding::Optional if fields.flag("use_sliding_window", false)? => {
            let first = fields.size("max_window_layers", 0..=usize::MAX, Some(28))?;
            let window = fields.size("sliding_window", POSITIONS, Some(4096))?;
            (first < layers || fields.get("layer_types").is_some()).then_some(window)
        }
        Sliding::Optional => None,
        Sliding::Requested if fields.stated("sliding_window") && fields.flag("use_sliding_window", false)? => {
            Some(fields.size("sliding_window", POSITIONS, None)?)
        }
        Sliding::Requested => None,
    };
    // An explicit list of layer types overrides the families' rules.
    let Some(types) = fields.list("layer_types")? else { return Ok(window) };
    let other = types.iter().find(|kind| kind.as_str() != Some("full_attention"));
    match other.map(Value::as_str) {
        None => Ok(None),
        Some(Some("sliding_attention")) => match window {
            Some(window) => Ok(Some(window)),
            None => fields.size("sliding_window", POSITIONS, None).map(Some),
        },
        Some(kind) => Err(unsupported(format!("layer type \"{}\" (layer_types)", shown(kind.unwrap_or("?"))))),
    }
}

/// Marks every `every`-th of `layers` layers as one without position embedding; empty if there is none.
pub(crate) fn each_without_rope(layers: usize, every: usize) -> Vec<bool> {
    let without: Vec<bool> = (1..=layers).map(|layer| layer % every == 0).collect();
    if without.contains(&true) { without } else { Vec::new() }
}

/// Which layers have no position embedding, of `layers`; empty if all have one.
fn no_rope(fields: &Fields, layers: usize) -> Result<Vec<bool>> {
    match fields.list("no_rope_layers")? {
        Some(list) if list.len() >= layers => {
            let one = |value: &Value| match value.as_u64() {
                Some(0) => Ok(true),
                Some(1) => Ok(false),
                _ => Err(fields.wrong("no_rope_layers", value, "a list of 0 (no RoPE) and 1 (RoPE)")),
            };
            let without = list[..layers].iter().map(one).collect::<Result<Vec<bool>>>()?;
            Ok(if without.contains(&true) { without } else { Vec::new() })
        }
        Some(list) => {
            let entries = list.len();
            Err(absurd(format!("{}: no_rope_layers has {entries} entries for {layers} layers", fields.object)))
        }
        None => {
            let every = fields.size("no_rope_layer_interval", POSITIONS, Some(SMOLLM3_INTERVAL))?;
            Ok(each_without_rope(layers, every))
        }
    }
}

/// Granite's multipliers, and the one of the branches among them.
fn multipliers(fields: &Fields, head_dim: usize) -> Result<(Scales, f64)> {
    let multiplier = |name: &str| -> Result<f64> {
        let value = fields.number(name, Some(1.0))?;
        if MULTIPLIERS.contains(&value) {
            Ok(value)
        } else {
            let (least, most) = (MULTIPLIERS.start(), MULTIPLIERS.end());
            Err(absurd(format!("{}: {name} {value} is not from {least} to {most}", fields.object)))
        }
    };
    let (embedding, residual) = (multiplier("embedding_multiplier")?, multiplier("residual_multiplier")?);
    let scores = multiplier("attention_multiplier")? * (head_dim as f64).sqrt();
    Ok((Scales::of(embedding, residual, multiplier("logits_scaling")?, scores), residual))
}

/// The weights' type by the file's claim; checkpoints without the field are F32.
fn dtype(fields: &Fields) -> Result<Dtype> {
    let name = match fields.text("dtype")? {
        Some(name) => Some(name),
        None => fields.text("torch_dtype")?,
    };
    match name.map(|name| name.strip_prefix("torch.").unwrap_or(name)) {
        None | Some("float32" | "float" | "auto") => Ok(Dtype::F32),
        Some("bfloat16") => Ok(Dtype::Bf16),
        Some("float16" | "half") => Ok(Dtype::F16),
        Some(other) => Err(unsupported(format!("config.json: dtype \"{}\"", shown(other)))),
    }
}

/// End-of-text tokens: those of `generation_config.json` if it lists any, otherwise those of `config.json`.
fn eos(fields: &Fields, generation: Option<&[u8]>, vocab: usize) -> Result<Vec<u32>> {
    if let Some(bytes) = generation {
        let map = object(bytes, "generation_config.json")?;
        let generation = Fields { map: &map, object: "generation_config.json" };
        if generation.get("eos_token_id").is_some() {
            return eos_of(&generation, vocab);
        }
    }
    eos_of(fields, vocab)
}

fn eos_of(fields: &Fields, vocab: usize) -> Result<Vec<u32>> {
    let one =
        |value: &Value| {
            value.as_u64().filter(|&id| id < vocab as u64).map(|id| id as u32).ok_or_else(|| {
                fields.wrong("eos_token_id", value, &format!("a token id below {vocab} or a list of them"))
            })
        };
    let mut ids = match fields.get("eos_token_id") {
        None => Vec::new(),
        Some(Value::Array(values)) => values.iter().map(one).collect::<Result<Vec<u32>>>()?,
        Some(value) => vec![one(value)?],
    };
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}
