//! The model configuration of a GGUF file, from its metadata, and the location of each weight.
//!
//! Names are llama.cpp's: `llama.embedding_length`, `blk.0.attn_q.weight`. As with config.json, values are not guessed, and a
//! setting that changes the computed function and is not implemented is refused by name.

use crate::blocks::Encoding;
use crate::config::{
    HEAD_DIM, HEADS, HIDDEN, INTERMEDIATE, LAYERS, MULTIPLIERS, POSITIONS, SMOLLM3_INTERVAL, VOCAB, each_without_rope,
};
use crate::file::shown;
use crate::gguf::{Gguf, Tensor, Value};
use crate::names::fused_place;
use crate::part::{LayerPart, Part};
use crate::rope::stored_channel;
use quantspec_core::config::{
    Activation, Dtype, LayerNorms, Local, ModelConfig, QkNorm, QueryScale, Rope, RopeScaling, Scales,
};
use quantspec_core::{Error, Result};
use std::collections::{HashMap, HashSet};
use std::ops::RangeInclusive;

/// What may be loaded, for hints.
const SUPPORTED: &str = "supported are GGUF files of dense llama (Llama 2/3, Mistral), mistral3 (Ministral 3), qwen2, qwen3, smollm3, granite, olmo2, phi3 and gemma3 networks";

/// An architecture that may be loaded, with what its files do not state.
struct Architecture {
    /// `general.architecture`.
    name: &'static str,
    /// llama.cpp orders the rows of Q and K for pairs (2i, 2i + 1).
    interleaved: bool,
    /// Its keys among [`NEUTRAL`].
    keys: &'static [&'static str],
    /// Q, K and V have biases.
    qkv_bias: bool,
    qk_norm: QkNorm,
    norms: LayerNorms,
    /// Some layers have no position embedding.
    no_rope: bool,
    /// Granite's multipliers.
    multipliers: bool,
    /// Phi-3's partial rotation, LongRoPE, and a window that bounds the context.
    phi: bool,
    /// Gemma's local layers, its scale of scores, and GELU.
    gemma: bool,
}

/// What most architectures share.
const COMMON: Architecture = Architecture {
    name: "",
    interleaved: false,
    keys: &[],
    qkv_bias: false,
    qk_norm: QkNorm::None,
    norms: LayerNorms::Before,
    no_rope: false,
    multipliers: false,
    phi: false,
    gemma: false,
};

const ARCHITECTURES: &[Architecture] = &[
    Architecture { name: "llama", interleaved: true, ..COMMON },
    Architecture { name: "mistral3", interleaved: true, keys: &[QUERY_SCALE], ..COMMON },
    Architecture { name: "qwen2", qkv_bias: true, ..COMMON },
    Architecture { name: "qwen3", qk_norm: QkNorm::Heads, ..COMMON },
    Architecture { name: "smollm3", interleaved: true, no_rope: true, ..COMMON },
    Architecture {
        name: "granite",
        interleaved: true,
        keys: &["attention.scale", "logit_scale", "residual_scale", "embedding_scale"],
        multipliers: true,
        ..COMMON
    },
    Architecture { name: "olmo2", qk_norm: QkNorm::Projection, norms: LayerNorms::After, ..COMMON },
    Architecture { name: "phi3", phi: true, ..COMMON },
    Architecture { name: "gemma3", qk_norm: QkNorm::Heads, norms: LayerNorms::Both, gemma: true, ..COMMON },
];

/// RoPE's base, and its default.
const FREQ_BASE: &str = "rope.freq_base";
const THETA: f64 = 10_000.0;

/// Tensor of factors on RoPE's wavelengths, in which llama.cpp stores Llama 3's scaling.
const ROPE_FACTORS: &str = "rope_freqs.weight";

/// LongRoPE's factors, for texts beyond and within the original context.
const LONG_FACTORS: &str = "rope_factors_long.weight";
const SHORT_FACTORS: &str = "rope_factors_short.weight";

/// Key of the tokens of a sliding window.
const WINDOW: &str = "attention.sliding_window";

/// Key of the growth of Ministral 3's queries with their position.
const QUERY_SCALE: &str = "attention.temperature_scale";

/// Gemma 3's local layers, if the file does not say: all but each sixth, with this base of RoPE.
const GEMMA_PATTERN: usize = 6;
const GEMMA_LOCAL_THETA: f64 = 10_000.0;

/// Layers of the 27B model, which alone of Gemma 3 divides its scores by √(hidden / heads). Files do not state it; llama.cpp goes
/// by the layers, too.
const GEMMA_27B_LAYERS: usize = 62;

/// Keys (after the architecture's name) that change the network, each with the value that has no effect.
const NEUTRAL: &[(&str, f64)] = &[
    ("expert_count", 0.0),
    ("attention.clamp_kqv", 0.0),
    ("attention.max_alibi_bias", 0.0),
    ("attn_logit_softcapping", 0.0),
    ("final_logit_softcapping", 0.0),
    (QUERY_SCALE, 0.0),
    ("attention.scale", 0.0),
    ("logit_scale", 0.0),
    ("residual_scale", 0.0),
    ("embedding_scale", 0.0),
];

/// Location of a weight, and the format it is read as.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packed {
    /// Number of the file that holds it.
    pub(crate) file: usize,
    /// First byte.
    pub(crate) offset: u64,
    /// How it is stored.
    pub(crate) encoding: Encoding,
    /// Format it is read as.
    pub(crate) dtype: Dtype,
    /// Order of the rows.
    pub(crate) order: RowOrder,
}

/// How a file orders the rows of Q and K. RoPE here pairs channel i of a head with i + D/2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowOrder {
    /// In the order of this program: for pairs (i, i + D/2).
    Own,
    /// For pairs (2i, 2i + 1) of heads with this many channels, as files of some architectures.
    Interleaved(usize),
    /// For pairs (i, i + R/2) of the first R channels of each head ([`crate::rope`]).
    Partial { head_dim: usize, rotated: usize },
}

impl Packed {
    /// The file's row for a row of the matrix.
    pub(crate) fn row(&self, row: usize) -> usize {
        match self.order {
            RowOrder::Own => row,
            RowOrder::Interleaved(dim) => {
                let (head, channel) = (row / dim, row % dim);
                head * dim + 2 * (channel % (dim / 2)) + channel / (dim / 2)
            }
            RowOrder::Partial { head_dim, rotated } => {
                row / head_dim * head_dim + stored_channel(row % head_dim, head_dim, rotated)
            }
        }
    }
}

/// The name of the tensor with a weight in GGUF files of an architecture. Phi-3 has Q, K and V in one, gate and up in another.
pub(crate) fn tensor_name(architecture: &str, part: Part) -> String {
    use LayerPart::*;
    match part {
        Part::Layer(layer, Q | K | V) if architecture == "phi3" => format!("blk.{layer}.attn_qkv.weight"),
        Part::Layer(layer, Gate | Up) if architecture == "phi3" => format!("blk.{layer}.ffn_up.weight"),
        Part::Embedding => "token_embd.weight".to_string(),
        Part::FinalNorm => "output_norm.weight".to_string(),
        Part::Head => "output.weight".to_string(),
        Part::Layer(layer, part) => {
            let suffix = match part {
                AttentionNorm => "attn_norm.weight",
                Q => "attn_q.weight",
                K => "attn_k.weight",
                V => "attn_v.weight",
                Output => "attn_output.weight",
                QBias => "attn_q.bias",
                KBias => "attn_k.bias",
                VBias => "attn_v.bias",
                OutputBias => "attn_output.bias",
                QNorm => "attn_q_norm.weight",
                KNorm => "attn_k_norm.weight",
                MlpNorm => "ffn_norm.weight",
                AttentionOutputNorm => "post_attention_norm.weight",
                MlpOutputNorm => "post_ffw_norm.weight",
                Gate => "ffn_gate.weight",
                Up => "ffn_up.weight",
                Down => "ffn_down.weight",
                GateBias => "ffn_gate.bias",
                UpBias => "ffn_up.bias",
                DownBias => "ffn_down.bias",
            };
            format!("blk.{layer}.{suffix}")
        }
    }
}

/// Configuration and weights of a file.
pub(crate) fn read(gguf: &Gguf) -> Result<(ModelConfig, HashMap<Part, Packed>)> {
    let architecture = architecture(gguf)?;
    let mut config = config(&Fields { gguf, architecture })?;
    let parts = Part::all(&config);
    let name_of = |part| tensor_name(&config.family, part);
    let names: HashSet<String> = parts.iter().map(|&part| name_of(part)).collect();
    let factors: &[&str] = if architecture.phi { &[LONG_FACTORS, SHORT_FACTORS] } else { &[ROPE_FACTORS] };
    let foreign = gguf.tensors().keys().find(|name| !names.contains(*name) && !factors.contains(&name.as_str()));
    if let Some(name) = foreign {
        return Err(Error::model(
            format!("{}: tensor \"{}\" is no part of a {} network", gguf.name(), shown(name), config.family),
            SUPPORTED,
        ));
    }
    let mut locations = HashMap::new();
    for &part in &parts {
        let (first, rows) = rows_within(part, &config);
        let extents = if part.is_vector() { vec![rows] } else { vec![rows, part.shape(&config).1] };
        let (number, tensor) = tensor(gguf, &name_of(part), &extents)?;
        let permuted = architecture.interleaved && matches!(part, Part::Layer(_, kind) if is_permuted(kind));
        let order = match (part, permuted) {
            (_, true) => RowOrder::Interleaved(config.head_dim),
            (Part::Layer(_, LayerPart::Q | LayerPart::K), _) if config.rope.dim < config.head_dim => {
                RowOrder::Partial { head_dim: config.head_dim, rotated: config.rope.dim }
            }
            _ => RowOrder::Own,
        };
        let packed = Packed {
            file: *number,
            offset: tensor.offset + tensor.bytes / rows as u64 * first as u64,
            encoding: tensor.encoding,
            dtype: own_dtype(tensor.encoding),
            order,
        };
        locations.insert(part, packed);
    }
    let matrices = || parts.iter().filter(|part| !part.is_vector());
    config.dtype = common_dtype(matrices().filter_map(|part| locations.get(part)).map(|location| location.encoding));
    for part in matrices() {
        if let Some(location) = locations.get_mut(part) {
            location.dtype = config.dtype;
        }
    }
    if config.tied_embeddings
        && let Some(&table) = locations.get(&Part::Embedding)
    {
        locations.insert(Part::Head, table);
    }
    Ok((config, locations))
}

fn is_permuted(part: LayerPart) -> bool {
    matches!(part, LayerPart::Q | LayerPart::K | LayerPart::QBias | LayerPart::KBias)
}

/// First row of a matrix in its tensor, and the tensor's rows; (0, elements) for a vector.
fn rows_within(part: Part, config: &ModelConfig) -> (usize, usize) {
    let (rows, columns) = part.shape(config);
    match fused_place(config, part) {
        Some(place) => (place.first, place.rows),
        None if part.is_vector() => (0, columns),
        None => (0, rows),
    }
}

/// A tensor of this shape.
fn tensor<'a>(gguf: &'a Gguf, name: &str, shape: &[usize]) -> Result<&'a (usize, Tensor)> {
    let Some(found) = gguf.tensors().get(name) else {
        return Err(Error::model(
            format!("{} has no tensor \"{name}\"", gguf.name()),
            "the file is of another model than its metadata says, or its download is incomplete; fetch it again",
        ));
    };
    if found.1.shape != shape {
        return Err(Error::model(
            format!("{}: tensor \"{name}\" has shape {:?}, the metadata expects {shape:?}", gguf.name(), found.1.shape),
            "the file is damaged or not of this model; download it again",
        ));
    }
    Ok(found)
}

/// The format a vector is read as: its own, or F32 if it is quantised.
fn own_dtype(encoding: Encoding) -> Dtype {
    match encoding {
        Encoding::F16 => Dtype::F16,
        Encoding::Bf16 => Dtype::Bf16,
        _ => Dtype::F32,
    }
}

/// The format that all matrices are read as, since activations have one format: F32 if any matrix is F32, BF16 if all are,
/// F16 otherwise. F16 rounds a dequantised weight by at most 2⁻¹¹ of it, a sixteenth of half a step of Q8_0.
fn common_dtype(matrices: impl Iterator<Item = Encoding> + Clone) -> Dtype {
    let mut all = matrices.clone();
    if matrices.clone().any(|encoding| encoding == Encoding::F32) {
        Dtype::F32
    } else if all.all(|encoding| encoding == Encoding::Bf16) {
        Dtype::Bf16
    } else {
        Dtype::F16
    }
}

/// Typed access to the metadata of one architecture.
struct Fields<'a> {
    gguf: &'a Gguf,
    architecture: &'static Architecture,
}

impl Fields<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture.name)
    }

    fn get(&self, name: &str) -> Option<Value> {
        self.gguf.entries().get(&self.key(name)).copied()
    }

    fn size(&self, name: &str, range: RangeInclusive<usize>) -> Result<Option<usize>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        if let Value::List { .. } = value {
            return Err(self.unsupported(&format!("metadata {} by layer", self.key(name))));
        }
        let whole = value.whole().and_then(|whole| usize::try_from(whole).ok()).filter(|whole| range.contains(whole));
        let wanted = || format!("a whole number from {} to {}", range.start(), range.end());
        whole.map(Some).ok_or_else(|| self.gguf.wrong(&self.key(name), &wanted()))
    }

    fn needed<T>(&self, name: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| {
            Error::model(
                format!("{} has no metadata {}", self.gguf.name(), self.key(name)),
                "convert the model again with a current llama.cpp, or fetch another file of it",
            )
        })
    }

    fn number(&self, name: &str, range: RangeInclusive<f64>) -> Result<Option<f64>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let wanted = || match *range.end() {
            f64::MAX => "a finite number".to_owned(),
            most => format!("a number from {} to {most}", range.start()),
        };
        let number = value.number().filter(|number| range.contains(number));
        number.map(Some).ok_or_else(|| self.gguf.wrong(&self.key(name), &wanted()))
    }

    fn unsupported(&self, what: &str) -> Error {
        Error::model(format!("{}: {what} is not supported", self.gguf.name()), SUPPORTED)
    }
}

/// The architecture of a file.
fn architecture(gguf: &Gguf) -> Result<&'static Architecture> {
    let Some(name) = gguf.text("general.architecture")? else {
        return Err(Error::model(format!("{} has no metadata general.architecture", gguf.name()), SUPPORTED));
    };
    ARCHITECTURES.iter().find(|architecture| architecture.name == name).ok_or_else(|| {
        Error::model(format!("{}: architecture \"{}\" is not supported", gguf.name(), shown(&name)), SUPPORTED)
    })
}

fn config(fields: &Fields) -> Result<ModelConfig> {
    let Fields { gguf, architecture } = fields;
    refuse_others(fields)?;
    let size = |name, range| fields.size(name, range).and_then(|size| fields.needed(name, size));
    let (hidden, layers) = (size("embedding_length", HIDDEN)?, size("block_count", LAYERS)?);
    let heads = size("attention.head_count", HEADS)?;
    let kv_heads = fields.size("attention.head_count_kv", HEADS)?.unwrap_or(heads);
    let head_dim = head_dim(fields, hidden, heads)?;
    if heads % kv_heads != 0 {
        return Err(gguf.wrong(&fields.key("attention.head_count_kv"), &format!("a divisor of {heads}")));
    }
    let rotated = rotated(fields, head_dim)?;
    let stated_positions = size("context_length", POSITIONS)?;
    let (rope, reached) = match architecture.phi {
        true => long_rope(fields, rotated, stated_positions)?,
        false => rope(fields, head_dim, stated_positions)?,
    };
    let max_positions = within_window(fields, reached)?;
    let rms_eps = fields.number("attention.layer_norm_rms_epsilon", 1e-12..=1e-1)?;
    let (scales, residual) = match architecture {
        Architecture { multipliers: true, .. } => multipliers(fields, head_dim)?,
        Architecture { gemma: true, .. } => {
            let divisor = if layers == GEMMA_27B_LAYERS { hidden / heads } else { head_dim };
            (Scales::of((hidden as f64).sqrt(), 1.0, 1.0, (head_dim as f64 / divisor as f64).sqrt()), 1.0)
        }
        _ => (Scales::NONE, 1.0),
    };
    let has = |part| gguf.tensors().contains_key(&tensor_name(architecture.name, part));
    let has_in_layer = |part| has(Part::Layer(0, part));
    let table = gguf.tensors().get(&tensor_name(architecture.name, Part::Embedding));
    let vocab = table.and_then(|(_, table)| table.shape.first().copied());
    // A vocabulary without a plausible size is refused later, with its tensor.
    let vocab = vocab.filter(|vocab| VOCAB.contains(vocab)).unwrap_or(*VOCAB.end());
    Ok(ModelConfig {
        family: architecture.name.to_owned(),
        layers,
        hidden,
        intermediate: size("feed_forward_length", INTERMEDIATE)?,
        heads,
        kv_heads,
        head_dim,
        vocab,
        max_positions,
        rms_eps: (fields.needed("attention.layer_norm_rms_epsilon", rms_eps)? / (residual * residual)) as f32,
        rope,
        tied_embeddings: !has(Part::Head),
        qkv_bias: architecture.qkv_bias || has_in_layer(LayerPart::QBias),
        output_bias: has_in_layer(LayerPart::OutputBias),
        mlp_bias: has_in_layer(LayerPart::GateBias),
        qk_norm: architecture.qk_norm,
        norms: architecture.norms,
        no_rope: if architecture.no_rope { each_without_rope(layers, SMOLLM3_INTERVAL) } else { Vec::new() },
        scales,
        local: if architecture.gemma { Some(local(fields, layers, head_dim)?) } else { None },
        activation: if architecture.gemma { Activation::Gelu } else { Activation::Silu },
        // llama.cpp's converter adds the 1 to Gemma's norms.
        norms_less_one: false,
        dtype: Dtype::F32,
        eos: eos(gguf, vocab)?,
    })
}

/// The longest context, at most `reached`, in which attention to the file's sliding window is full, except in Gemma's local
/// layers.
fn within_window(fields: &Fields, reached: usize) -> Result<usize> {
    match fields.size(WINDOW, 0..=usize::MAX)? {
        None | Some(0) => Ok(reached),
        _ if fields.architecture.gemma => Ok(reached),
        // As from config.json.
        Some(window) if fields.architecture.phi => Ok(reached.min(window)),
        Some(window) if window < reached => {
            Err(fields.unsupported(&format!("sliding-window attention ({window} of {reached} tokens)")))
        }
        Some(_) => Ok(reached),
    }
}

/// Refuses metadata that describe something other than the network that is computed.
fn refuse_others(fields: &Fields) -> Result<()> {
    let own = fields.architecture.keys;
    for &(name, neutral) in NEUTRAL.iter().filter(|(name, _)| !own.contains(name)) {
        if let Some(value) = fields.number(name, f64::MIN..=f64::MAX)?
            && value != neutral
        {
            return Err(fields.unsupported(&format!("metadata {} ({value})", fields.key(name))));
        }
    }
    if fields.architecture.multipliers && fields.get("rope.scaling.finetuned") == Some(Value::Flag(false)) {
        return Err(fields.unsupported("granite without RoPE (rope.scaling.finetuned false)"));
    }
    if fields.get("attention.causal") == Some(Value::Flag(false)) {
        return Err(fields.unsupported("attention to later tokens (attention.causal false)"));
    }
    Ok(())
}

/// Channels of a head: stated, or the hidden channels divided by the heads.
fn head_dim(fields: &Fields, hidden: usize, heads: usize) -> Result<usize> {
    let head_dim = match fields.size("attention.key_length", HEAD_DIM)? {
        Some(dim) => dim,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => return Err(fields.gguf.wrong(&fields.key("attention.head_count"), &format!("a divisor of {hidden}"))),
    };
    match HEAD_DIM.contains(&head_dim) && head_dim.is_multiple_of(2) {
        true => Ok(head_dim),
        false => Err(fields.unsupported(&format!("a head of {head_dim} channels"))),
    }
}

/// Rotated channels of a head: all of them, or fewer in Phi-3.
fn rotated(fields: &Fields, head_dim: usize) -> Result<usize> {
    let mut rotated = head_dim;
    for name in ["attention.value_length", "rope.dimension_count"] {
        if let Some(other) = fields.size(name, 0..=usize::MAX)?
            && other != head_dim
        {
            let partial = fields.architecture.phi && name == "rope.dimension_count" && other.is_multiple_of(2);
            if !partial || !(*HEAD_DIM.start()..head_dim).contains(&other) {
                return Err(fields.unsupported(&format!("{} of {other} with heads of {head_dim}", fields.key(name))));
            }
            rotated = other;
        }
    }
    Ok(rotated)
}

/// Gemma 3's local layers, whose queries see the tokens of the sliding window.
fn local(fields: &Fields, layers: usize, head_dim: usize) -> Result<Local> {
    let reach = fields.needed(WINDOW, fields.size(WINDOW, 0..=usize::MAX)?)?;
    if reach < Local::LEAST || !reach.is_multiple_of(Local::UNIT) {
        let (unit, least) = (Local::UNIT, Local::LEAST);
        return Err(fields.unsupported(&format!("a sliding window of {reach}, no multiple of {unit} from {least} on,")));
    }
    let every = fields.size("attention.sliding_window_pattern", POSITIONS)?.unwrap_or(GEMMA_PATTERN);
    let theta = theta(fields, "rope.freq_base_swa", GEMMA_LOCAL_THETA)?;
    let rope = Rope { theta, dim: head_dim, scaling: RopeScaling::None, query_scale: None };
    Ok(Local { layers: (1..=layers).map(|layer| layer % every != 0).collect(), reach, rope })
}

/// Granite's multipliers, and its residual multiplier. Without `attention.scale` scores are divided by √head_dim, as in other
/// families.
fn multipliers(fields: &Fields, head_dim: usize) -> Result<(Scales, f64)> {
    let scale = |name| fields.number(name, MULTIPLIERS);
    let (embedding, residual) = (scale("embedding_scale")?.unwrap_or(1.0), scale("residual_scale")?.unwrap_or(1.0));
    let logits = fields.needed("logit_scale", scale("logit_scale")?)?;
    let scores = scale("attention.scale")?.map_or(1.0, |scale| scale * (head_dim as f64).sqrt());
    Ok((Scales::of(embedding, residual, logits, scores), residual))
}

/// Phi-3's RoPE on the first `dim` channels of a head, and the context it reaches. A model for more than its original context
/// always uses the long factors, as for safetensors ([`crate::config`]).
fn long_rope(fields: &Fields, dim: usize, stated_positions: usize) -> Result<(Rope, usize)> {
    match fields.gguf.text(&fields.key("rope.scaling.type"))?.as_deref() {
        None | Some("none" | "longrope") => (),
        Some(other) => return Err(fields.unsupported(&format!("RoPE scaling \"{}\"", shown(other)))),
    }
    let original = fields.size("rope.scaling.original_context_length", POSITIONS)?.unwrap_or(stated_positions);
    let attention_factor = fields.number("rope.scaling.attn_factor", 1e-6..=1e2)?.unwrap_or(1.0);
    let name = if stated_positions > original { LONG_FACTORS } else { SHORT_FACTORS };
    let scaling = match factors(fields, name, dim)? {
        Some(factors) => RopeScaling::Factors { factors, attention_factor },
        None if attention_factor == 1.0 => RopeScaling::None,
        None => {
            return Err(fields.unsupported(&format!("rope.scaling.attn_factor {attention_factor} without {name}")));
        }
    };
    Ok((Rope { theta: theta(fields, FREQ_BASE, THETA)?, dim, scaling, query_scale: None }, stated_positions))
}

/// A base of RoPE.
fn theta(fields: &Fields, name: &str, default: f64) -> Result<f64> {
    let theta = fields.number(name, 1.0..=1e12)?.unwrap_or(default);
    if theta <= 1.0 {
        return Err(fields.gguf.wrong(&fields.key(name), "a number above 1"));
    }
    Ok(theta)
}

/// RoPE, and the context it reaches.
fn rope(fields: &Fields, head_dim: usize, stated_positions: usize) -> Result<(Rope, usize)> {
    let theta = theta(fields, FREQ_BASE, THETA)?;
    let kind = fields.gguf.text(&fields.key("rope.scaling.type"))?;
    let factor = |name| fields.number(name, 1.0..=65_536.0);
    // Files of old converters have another key for the factor of linear scaling.
    let (factor, old) = (factor("rope.scaling.factor")?, factor("rope.scale_linear")?);
    let kind = kind.unwrap_or_else(|| if old.is_some() { "linear" } else { "none" }.to_string());
    let stretch = factor.or(old);
    let attention = |name| fields.number(name, 1e-6..=1e6).map(|factor| factor.unwrap_or(1.0));
    // The converter stores `attn_factor` of config.json by the second name.
    let attention = attention("rope.scaling.attn_factor")? * attention("rope.scaling.yarn_attn_factor")?;
    let scaling = match kind.as_str() {
        "none" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: fields.needed("rope.scaling.factor", stretch)? },
        "yarn" => {
            const ALL_DIM: &str = "rope.scaling.yarn_log_multiplier";
            let of_all = fields.number(ALL_DIM, 0.0..=1e2)?.unwrap_or(0.0);
            let refused = |name, value| Err(fields.unsupported(&format!("metadata {} ({value})", fields.key(name))));
            if of_all != 0.0 && fields.architecture.name != "mistral3" {
                return refused(ALL_DIM, of_all);
            }
            const EXTRAPOLATION: &str = "rope.scaling.yarn_ext_factor";
            if let Some(value) = fields.number(EXTRAPOLATION, f64::MIN..=f64::MAX)?
                && value != 1.0
            {
                return refused(EXTRAPOLATION, value);
            }
            let beta = |name, default| {
                fields.number(&format!("rope.scaling.yarn_beta_{name}"), 1e-6..=1e6).map(|beta| beta.unwrap_or(default))
            };
            let factor = fields.needed("rope.scaling.factor", stretch)?;
            RopeScaling::Yarn {
                factor,
                original: fields.size("rope.scaling.original_context_length", POSITIONS)?.unwrap_or(stated_positions),
                beta_fast: beta("fast", 32.0)?,
                beta_slow: beta("slow", 1.0)?,
                attention_factor: attention * (0.1 * factor.ln() + 1.0) / (0.1 * of_all * factor.ln() + 1.0),
                truncate: true,
            }
        }
        other => return Err(fields.unsupported(&format!("RoPE scaling \"{}\"", shown(other)))),
    };
    if attention != 1.0 && !matches!(scaling, RopeScaling::Yarn { .. }) {
        return Err(fields.unsupported(&format!("rope.scaling.attn_factor {attention} without YaRN")));
    }
    let scaling = match (scaling, factors(fields, ROPE_FACTORS, head_dim)?) {
        (scaling, None) => scaling,
        (RopeScaling::None, Some(factors)) => RopeScaling::Factors { factors, attention_factor: 1.0 },
        (_, Some(_)) => return Err(fields.unsupported(&format!("{ROPE_FACTORS} with RoPE scaling \"{kind}\""))),
    };
    let max_positions = match &scaling {
        // YaRN checkpoints often state the context before stretching.
        RopeScaling::Yarn { factor, original, .. } => {
            stated_positions.max((factor * *original as f64) as usize).min(*POSITIONS.end())
        }
        _ => stated_positions,
    };
    let query_scale = match fields.number(QUERY_SCALE, 0.0..=1e2)? {
        Some(beta) if beta > 0.0 => {
            let original = fields.size("rope.scaling.original_context_length", POSITIONS)?;
            Some(QueryScale { beta, original: original.unwrap_or(stated_positions) })
        }
        _ => None,
    };
    Ok((Rope { theta, dim: head_dim, scaling, query_scale }, max_positions))
}

/// Factors on RoPE's wavelengths of `dim` rotated channels, `[dim / 2]`; `None` if the file has no such tensor.
fn factors(fields: &Fields, name: &str, dim: usize) -> Result<Option<Vec<f32>>> {
    let gguf = fields.gguf;
    if !gguf.tensors().contains_key(name) {
        return Ok(None);
    }
    let (part, found) = tensor(gguf, name, &[dim / 2])?;
    let mut raw = vec![0; usize::try_from(found.bytes).unwrap_or_default()];
    gguf.read(*part, found.offset, &mut raw)?;
    let mut factors = vec![0.0; dim / 2];
    found.encoding.decode(&raw, &mut factors);
    match factors.iter().find(|factor| !(1e-6..=1e6).contains(*factor)) {
        Some(factor) => Err(Error::model(
            format!("{}: {name} has the factor {factor}, which is not from 1e-6 to 1e6", gguf.name()),
            "the file is damaged; download it again",
        )),
        None => Ok(Some(factors)),
    }
}

/// End-of-text tokens: end of text, of a turn and of a message.
fn eos(gguf: &Gguf, vocab: usize) -> Result<Vec<u32>> {
    let mut ids = Vec::new();
    for name in ["eos", "eot", "eom"] {
        let key = format!("tokenizer.ggml.{name}_token_id");
        if let Some(value) = gguf.entries().get(&key) {
            let id = value.whole().filter(|&id| id < vocab as u64);
            ids.push(id.ok_or_else(|| gguf.wrong(&key, &format!("a token id below {vocab}")))? as u32);
        }
    }
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}
