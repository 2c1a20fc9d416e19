//! Schemes of `quantization_config`: how each method stores codes, scales and zero points.

use crate::config::object;
use crate::elements::FLOATS;
use crate::file::shown;
use quantspec_core::{Error, Result};
use serde_json::{Map, Value};

/// How a method stores codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Codes {
    /// e4m3 without infinities, `[outputs][inputs]`.
    Fp8,
    /// Signed bytes, `[outputs][inputs]`; files with quantised activations (W4A8) hold codes of 4 bits in them, too.
    Int8,
    /// Codes plus half their range, packed in words: `[outputs][inputs / codes per word]`.
    Words { bits: usize },
    /// Words pack inputs, `[inputs / codes per word][outputs]`; with `v1`, zero points are stored minus one.
    Gptq { bits: usize, v1: bool },
    /// Words pack 8 outputs in interleaved order, `[inputs][outputs / 8]`.
    Awq,
}

impl Codes {
    /// Dtype and shape of the tensor with the codes of a matrix.
    pub(super) fn stored(self, rows: usize, columns: usize) -> (&'static str, Vec<usize>) {
        match self {
            Codes::Fp8 => ("F8_E4M3", vec![rows, columns]),
            Codes::Int8 => ("I8", vec![rows, columns]),
            Codes::Words { bits } => ("I32", vec![rows, columns.div_ceil(32 / bits)]),
            Codes::Gptq { bits, .. } => ("I32", vec![columns.div_ceil(32 / bits), rows]),
            Codes::Awq => ("I32", vec![columns, rows.div_ceil(8)]),
        }
    }

    /// Dtype and shape of the tensor with the zero points of a matrix; `found`: its dtype.
    pub(super) fn stored_zeros(self, rows: usize, groups: usize, found: &str) -> (&'static str, Vec<usize>) {
        match self {
            Codes::Fp8 | Codes::Int8 => ("I8", vec![rows, groups]),
            // Early versions of compressed-tensors do not pack them.
            Codes::Words { .. } if found == "I8" => ("I8", vec![rows, groups]),
            Codes::Words { bits } => ("I32", vec![rows.div_ceil(32 / bits), groups]),
            Codes::Gptq { bits, .. } => ("I32", vec![groups, rows.div_ceil(32 / bits)]),
            Codes::Awq => ("I32", vec![groups, rows.div_ceil(8)]),
        }
    }

    /// Dtypes of scales. A byte next to FP8 is an e8m0, too.
    pub(super) fn scale_dtypes(self) -> &'static [&'static str] {
        if self == Codes::Fp8 { &["BF16", "F16", "F32", "F8_E8M0", "U8"] } else { &FLOATS }
    }

    /// Shapes of the tensor with the scales of `bands` × `groups` blocks; the first is the usual one.
    pub(super) fn scale_shapes(self, bands: usize, groups: usize) -> Vec<Vec<usize>> {
        if matches!(self, Codes::Gptq { .. } | Codes::Awq) {
            return vec![vec![groups, bands]];
        }
        let mut shapes = vec![vec![bands, groups]];
        if groups == 1 {
            shapes.push(vec![bands]);
            shapes.extend((bands == 1).then(Vec::new));
        }
        shapes
    }
}

/// Weights that share a scale: rows (outputs) × columns (inputs). None means all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Block {
    pub(super) rows: Option<usize>,
    pub(super) columns: Option<usize>,
}

/// A scheme of `quantization_config`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Scheme {
    pub(super) codes: Codes,
    /// None if the scales' shape determines it.
    pub(super) block: Option<Block>,
    pub(super) zeros: bool,
    /// The method's library multiplies in the scales' type.
    pub(super) through_scales: bool,
}

/// Returns true if a tensor holds a scale for a cache of the method's library, which quantspec's cache does not use.
pub(crate) fn is_of_cache(name: &str) -> bool {
    name.ends_with(".k_scale") || name.ends_with(".v_scale")
}

/// Most schemes of a checkpoint. Published ones have up to three.
const SCHEMES_MAX: usize = 16;

/// What may be loaded, for hints.
const OTHERS: &str = "use a checkpoint in FP8 (e4m3), compressed-tensors INT8 or INT4, GPTQ, AWQ (gemm) or AutoRound in one of these layouts, or the unquantised one";

pub(super) fn unsupported(what: String) -> Error {
    Error::model(format!("quantization_config: {what} is not supported"), OTHERS)
}

/// Files that describe the quantisation if config.json does not, and their method if they name none: those of AutoGPTQ and its
/// successors, of AutoAWQ, and of NVIDIA's ModelOpt.
const FILES: [(&str, &str); 3] =
    [("quantize_config.json", "gptq"), ("quant_config.json", "awq"), ("hf_quant_config.json", "modelopt")];

/// Reads the schemes from the bytes of config.json, or else from those of the first of [`FILES`] that `read` finds; first that of
/// most modules; none if the checkpoint is not quantised.
///
/// # Errors
/// [`quantspec_core::ErrorKind::Model`] naming a method, an option or a value that is not supported, or if a file is not
/// valid JSON; those of `read`.
pub(crate) fn schemes(
    config: &[u8],
    mut read: impl FnMut(&'static str) -> Result<Option<Vec<u8>>>,
) -> Result<Vec<Scheme>> {
    let Ok(Value::Object(config)) = serde_json::from_slice(config) else { return Ok(Vec::new()) };
    if let Some(mlx) = present(&config, "quantization") {
        return Err(Error::model(
            format!("config.json: MLX's quantization {} is not supported", json_text(mlx)),
            OTHERS,
        ));
    }
    let found = ["quantization_config", "compression_config"].iter().find_map(|name| present(&config, name));
    let (mut found, mut usual) = (found.cloned(), None);
    for (file, method) in FILES {
        if found.is_none()
            && let Some(bytes) = read(file)?
        {
            (found, usual) = (Some(Value::Object(object(&bytes, file)?)), Some((file, method)));
        }
    }
    let Some(found) = found else { return Ok(Vec::new()) };
    let Value::Object(fields) = &found else { return Err(unsupported(json_text(&found))) };
    let Some(method) = present(fields, "quant_method").and_then(Value::as_str).or(usual.map(|(_, method)| method))
    else {
        return Err(unsupported(format!("{} without a quant_method", json_text(&found))));
    };
    let schemes = match method {
        "fp8" | "mxfp8" => fp8(fields, method).map(|scheme| vec![scheme]),
        "compressed-tensors" => compressed(fields),
        "gptq" => gptq(fields),
        "awq" => awq(fields),
        "auto-round" | "intel/auto-round" => auto_round(fields),
        "modelopt" | "modelopt_fp4" | "modelopt_mixed" => modelopt(fields).map(|scheme| vec![scheme]),
        other => Err(unsupported(format!("method \"{}\"", shown(other)))),
    };
    schemes.map_err(|error| match usual {
        Some((file, _)) => Error::model(error.message.replacen("quantization_config", file, 1), OTHERS),
        None => error,
    })
}

/// Different schemes, in order.
fn distinct(found: impl IntoIterator<Item = Result<Scheme>>) -> Result<Vec<Scheme>> {
    let mut schemes = Vec::new();
    for scheme in found {
        let scheme = scheme?;
        if schemes.contains(&scheme) {
            continue;
        }
        if schemes.len() == SCHEMES_MAX {
            return Err(unsupported(format!("a mixture of more than {SCHEMES_MAX} schemes")));
        }
        schemes.push(scheme);
    }
    Ok(schemes)
}

/// What a rule may change for some modules.
const RULED: [&str; 4] = ["bits", "group_size", "data_type", "act_bits"];

/// The scheme of most modules, and those of `rules`, which give some modules other values. A module that a rule leaves out,
/// or gives 16 bits, is stored plainly.
fn with_rules(
    fields: &Map<String, Value>,
    rules: &str,
    of: impl Fn(&Map<String, Value>) -> Result<Scheme>,
) -> Result<Vec<Scheme>> {
    let own = |rule: &Map<String, Value>| {
        let stated = |name: &&str| Some((name.to_string(), present(rule, name).or(present(fields, name))?.clone()));
        RULED.iter().filter_map(stated).collect::<Map<String, Value>>()
    };
    let ruled =
        present(fields, rules).and_then(Value::as_object).into_iter().flatten().filter_map(|(modules, rule)| {
            let rule = own(rule.as_object()?);
            let plain = rule.get("bits").and_then(Value::as_u64).is_some_and(|bits| bits >= 16);
            let named =
                |error: Error| Error::model(format!("{} ({rules} \"{}\")", error.message, shown(modules)), OTHERS);
            (!plain).then(|| of(&rule).map_err(named))
        });
    distinct(std::iter::once(of(&own(&Map::new()))).chain(ruled))
}

fn present<'a>(fields: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    fields.get(name).filter(|value| !value.is_null())
}

fn json_text(value: &Value) -> String {
    shown(&value.to_string())
}

/// Refuses an option that is present with none of these values.
fn one_of(fields: &Map<String, Value>, name: &str, allowed: &[Value]) -> Result<()> {
    match present(fields, name) {
        Some(value) if !allowed.contains(value) => Err(unsupported(format!("{name} {}", json_text(value)))),
        _ => Ok(()),
    }
}

fn size(name: &str, value: Option<&Value>) -> Result<usize> {
    match value.and_then(Value::as_u64) {
        Some(size @ 1..=0xffff_ffff) => Ok(size as usize),
        _ => Err(unsupported(format!("{name} {}", value.map_or("(missing)".to_string(), json_text)))),
    }
}

/// Inputs per group; −1 means all.
fn group_size(fields: &Map<String, Value>) -> Result<Option<usize>> {
    match present(fields, "group_size") {
        Some(value) if value.as_i64() == Some(-1) => Ok(None),
        value => size("group_size", value).map(Some),
    }
}

/// Rows and columns of a block of scales.
fn block_size(name: &str, value: &Value) -> Result<Block> {
    let [rows, columns] = value.as_array().map_or(&[] as &[Value], Vec::as_slice) else {
        return Err(unsupported(format!("{name} {}", json_text(value))));
    };
    Ok(Block { rows: Some(size(name, Some(rows))?), columns: Some(size(name, Some(columns))?) })
}

/// A block of MXFP8.
const MX: Block = Block { rows: Some(1), columns: Some(32) };

fn fp8(fields: &Map<String, Value>, method: &str) -> Result<Scheme> {
    one_of(fields, "fmt", &["e4m3".into(), "float8_e4m3fn".into()])?;
    // GPTQModel stores reciprocals of the scales under the same name.
    one_of(fields, "weight_scale_semantics", &[])?;
    let block = present(fields, "weight_block_size").map(|value| block_size("weight_block_size", value)).transpose()?;
    let block = block.or((method == "mxfp8").then_some(MX));
    Ok(Scheme { codes: Codes::Fp8, block, zeros: false, through_scales: false })
}

/// `quant_algo` is in an object of its own in files next to config.json.
fn modelopt(fields: &Map<String, Value>) -> Result<Scheme> {
    let fields = present(fields, "quantization").and_then(Value::as_object).unwrap_or(fields);
    let block = match present(fields, "quant_algo").and_then(Value::as_str) {
        Some("FP8" | "FP8_PER_CHANNEL_PER_TOKEN") => None,
        Some("MXFP8") => Some(MX),
        other => return Err(unsupported(format!("ModelOpt's \"{}\"", shown(other.unwrap_or("none"))))),
    };
    Ok(Scheme { codes: Codes::Fp8, block, zeros: false, through_scales: false })
}

fn compressed(fields: &Map<String, Value>) -> Result<Vec<Scheme>> {
    for name in ["sparsity_config", "transform_config"] {
        match present(fields, name) {
            Some(Value::Object(map))
                if map.is_empty() || map.get("format").and_then(Value::as_str) == Some("dense") => {}
            Some(value) => return Err(unsupported(format!("{name} {}", json_text(value)))),
            None => {}
        }
    }
    one_of(fields, "quantization_status", &["compressed".into(), "frozen".into()])?;
    let groups = present(fields, "config_groups").and_then(Value::as_object);
    let schemes = distinct(groups.into_iter().flat_map(Map::values).map(|group| {
        let own = group.get("format").filter(|format| !format.is_null());
        let format = own.or_else(|| present(fields, "format")).and_then(Value::as_str);
        match group.get("weights").and_then(Value::as_object) {
            Some(weights) => compressed_weights(weights, format),
            None => Err(unsupported("a config group without weights".to_string())),
        }
    }))?;
    if schemes.is_empty() {
        return Err(unsupported("config_groups without a group".to_string()));
    }
    Ok(schemes)
}

fn compressed_weights(weights: &Map<String, Value>, format: Option<&str>) -> Result<Scheme> {
    let bits = size("num_bits", present(weights, "num_bits"))?;
    let kind = present(weights, "type").and_then(Value::as_str).unwrap_or("int");
    let codes = match (format.unwrap_or("none"), kind, bits) {
        ("pack-quantized", "int", 4 | 8) => Codes::Words { bits },
        ("int-quantized" | "naive-quantized", "int", 4 | 8) => Codes::Int8,
        ("float-quantized" | "naive-quantized" | "mxfp8-quantized", "float", 8) => Codes::Fp8,
        (format, kind, bits) => {
            return Err(unsupported(format!("{} of type {} with {bits} bits", shown(format), shown(kind))));
        }
    };
    let each = Some(1);
    let block = match present(weights, "strategy").and_then(Value::as_str).unwrap_or("none") {
        "tensor" => Block { rows: None, columns: None },
        "channel" => Block { rows: each, columns: None },
        "group" => Block { rows: each, columns: group_size(weights)? },
        "block" => block_size("block_structure", weights.get("block_structure").unwrap_or(&Value::Null))?,
        other => return Err(unsupported(format!("strategy \"{}\"", shown(other)))),
    };
    let zeros = present(weights, "symmetric") == Some(&Value::Bool(false));
    if zeros && (codes == Codes::Fp8 || block.rows != each) {
        return Err(unsupported("an asymmetric scheme of this type and strategy".to_string()));
    }
    Ok(Scheme { codes, block: Some(block), zeros, through_scales: true })
}

/// Names of the storage format of GPTQ and AWQ files; GPTQModel writes both.
const FORMATS: [&str; 2] = ["checkpoint_format", "format"];

fn gptq(fields: &Map<String, Value>) -> Result<Vec<Scheme>> {
    one_of(fields, "is_marlin_format", &[false.into()])?;
    for name in FORMATS {
        one_of(fields, name, &["gptq".into(), "gptq_v2".into()])?;
    }
    let v1 = FORMATS.iter().all(|name| fields.get(*name) != Some(&"gptq_v2".into()));
    with_rules(fields, "dynamic", |fields| gptq_layout(fields, v1))
}

fn gptq_layout(fields: &Map<String, Value>, v1: bool) -> Result<Scheme> {
    let bits = size("bits", present(fields, "bits"))?;
    if bits != 4 && bits != 8 {
        return Err(unsupported(format!("GPTQ with {bits} bits")));
    }
    let block = Block { rows: Some(1), columns: group_size(fields)? };
    Ok(Scheme { codes: Codes::Gptq { bits, v1 }, block: Some(block), zeros: true, through_scales: true })
}

fn awq(fields: &Map<String, Value>) -> Result<Vec<Scheme>> {
    for name in ["version"].iter().chain(&FORMATS) {
        one_of(fields, name, &["gemm".into(), "GEMM".into()])?;
    }
    let mut fields = fields.clone();
    // Their names in quant_config.json.
    for (name, own) in [("bits", "w_bit"), ("group_size", "q_group_size")] {
        if let Some(value) = fields.remove(own) {
            fields.entry(name).or_insert(value);
        }
    }
    with_rules(&fields, "dynamic", awq_layout)
}

fn awq_layout(fields: &Map<String, Value>) -> Result<Scheme> {
    one_of(fields, "bits", &[4.into()])?;
    let block = Block { rows: Some(1), columns: group_size(fields)? };
    Ok(Scheme { codes: Codes::Awq, block: Some(block), zeros: true, through_scales: true })
}

/// AutoRound writes the layouts of other libraries. `packing_format` (`backend` until version 0.4) names that of integers.
fn auto_round(fields: &Map<String, Value>) -> Result<Vec<Scheme>> {
    // Rotations of activations.
    for name in ["rotation_config", "spinquant_config"] {
        one_of(fields, name, &[])?;
    }
    one_of(fields, "fmt", &["e4m3".into()])?;
    let packing = present(fields, "packing_format").or_else(|| present(fields, "backend"));
    let name = packing.map_or(Some("auto"), Value::as_str).unwrap_or("none");
    let layout = name.strip_prefix("auto_round:").unwrap_or(name).split(':').next();
    with_rules(fields, "extra_config", |fields| {
        let bits = size("bits", present(fields, "bits"))?;
        let data_type = present(fields, "data_type").and_then(Value::as_str).unwrap_or("int");
        if data_type != "int" {
            return auto_round_fp8(fields, data_type, bits);
        }
        // Codes of weights and activations are multiplied in FP8.
        if let Some(bits) = present(fields, "act_bits").and_then(Value::as_u64).filter(|bits| *bits < 16) {
            return Err(unsupported(format!("AutoRound's INT with act_bits {bits}")));
        }
        match layout {
            _ if name.contains("marlin") => Err(unsupported(format!("packing_format \"{}\"", shown(name)))),
            Some("auto" | "gptq" | "auto_gptq") => gptq_layout(fields, true),
            Some("auto_round" | "gptqmodel" | "exllamav2" | "triton" | "tritonv2") => gptq_layout(fields, false),
            Some("awq" | "auto_awq") => awq_layout(fields),
            _ => Err(unsupported(format!("packing_format \"{}\"", shown(name)))),
        }
    })
}

fn auto_round_fp8(fields: &Map<String, Value>, data_type: &str, bits: usize) -> Result<Scheme> {
    if bits != 8 || !["fp", "mx_fp"].iter().any(|known| data_type.starts_with(known)) || data_type.contains("e5m2") {
        return Err(unsupported(format!("AutoRound's data_type \"{}\" with {bits} bits", shown(data_type))));
    }
    let block = match present(fields, "group_size") {
        Some(block @ Value::Array(_)) => Some(block_size("group_size", block)?),
        // Per row and per matrix.
        Some(value) if matches!(value.as_i64(), Some(-1 | 0)) => None,
        _ => Some(Block { rows: Some(1), columns: group_size(fields)? }),
    };
    Ok(Scheme { codes: Codes::Fp8, block, zeros: false, through_scales: true })
}

impl Scheme {
    /// Suffixes after the module's name: codes, scales (the first that exists), zero points, and the group of each input.
    pub(super) fn names(&self) -> (&'static str, &'static [&'static str], &'static str, &'static str) {
        match self.codes {
            Codes::Fp8 | Codes::Int8 => {
                ("weight", &["weight_scale", "weight_scale_inv"], "weight_zero_point", "weight_g_idx")
            }
            Codes::Words { .. } => ("weight_packed", &["weight_scale"], "weight_zero_point", "weight_g_idx"),
            Codes::Gptq { .. } | Codes::Awq => ("qweight", &["scales"], "qzeros", "g_idx"),
        }
    }

    /// Returns true if a tensor with this suffix belongs to a quantised matrix. Scales of activations are unused, as
    /// activations are not quantised.
    pub(crate) fn owns(&self, suffix: &str) -> bool {
        let (codes, scales, zeros, groups) = self.names();
        suffix == codes
            || scales.contains(&suffix)
            || (self.zeros && suffix == zeros)
            || (suffix == groups && self.codes != Codes::Awq)
            || suffix == "weight_shape" && matches!(self.codes, Codes::Words { .. })
            || matches!(suffix, "input_scale" | "input_zero_point" | "activation_scale")
                && matches!(self.codes, Codes::Fp8 | Codes::Int8)
    }
}
