//! Quantised matrices of safetensors files: FP8 (also MXFP8 and ModelOpt's), compressed-tensors (INT8, INT4, FP8), GPTQ, AWQ and
//! AutoRound, dequantised when they are read.
//!
//! `quantization_config` of config.json names the method. A module with a plain `weight` is not quantised. If modules differ in
//! bits or groups, the shapes of a matrix's tensors show its scheme. A value is (code − zero point) · scale in f32. It is
//! rounded to the scales' type if the method's library computes in it, then to the model's type.

use crate::config::object;
use crate::elements::{FLOATS, round};
use crate::names::Place;
use crate::safetensors::{SafeTensors, Tensor, shown};
use half::{bf16, f16};
use quantspec_core::config::Dtype;
use quantspec_core::{Error, Result};
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// Matrices whose codes stay in memory: backends read Q, K and V alternately.
const KEPT: usize = 3;

/// How a method stores codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Codes {
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
    fn stored(self, rows: usize, columns: usize) -> (&'static str, Vec<usize>) {
        match self {
            Codes::Fp8 => ("F8_E4M3", vec![rows, columns]),
            Codes::Int8 => ("I8", vec![rows, columns]),
            Codes::Words { bits } => ("I32", vec![rows, columns.div_ceil(32 / bits)]),
            Codes::Gptq { bits, .. } => ("I32", vec![columns.div_ceil(32 / bits), rows]),
            Codes::Awq => ("I32", vec![columns, rows.div_ceil(8)]),
        }
    }

    /// Dtype and shape of the tensor with the zero points of a matrix; `found`: its dtype.
    fn stored_zeros(self, rows: usize, groups: usize, found: &str) -> (&'static str, Vec<usize>) {
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
    fn scale_dtypes(self) -> &'static [&'static str] {
        if self == Codes::Fp8 { &["BF16", "F16", "F32", "F8_E8M0", "U8"] } else { &FLOATS }
    }

    /// Shapes of the tensor with the scales of `bands` × `groups` blocks; the first is the usual one.
    fn scale_shapes(self, bands: usize, groups: usize) -> Vec<Vec<usize>> {
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
struct Block {
    rows: Option<usize>,
    columns: Option<usize>,
}

/// A scheme of `quantization_config`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Scheme {
    codes: Codes,
    /// None if the scales' shape determines it.
    block: Option<Block>,
    zeros: bool,
    /// The method's library multiplies in the scales' type.
    through_scales: bool,
}

/// Returns true if a tensor holds a scale for a cache of the method's library, which quantspec's cache does not use.
pub(crate) fn is_of_cache(name: &str) -> bool {
    name.ends_with(".k_scale") || name.ends_with(".v_scale")
}

/// Position in a 32-bit AWQ word of the output with this index modulo 8.
const AWQ_PLACES: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// Most schemes of a checkpoint. Published ones have up to three.
const SCHEMES_MAX: usize = 16;

/// What may be loaded, for hints.
const OTHERS: &str = "use a checkpoint in FP8 (e4m3), compressed-tensors INT8 or INT4, GPTQ, AWQ (gemm) or AutoRound in one of these layouts, or the unquantised one";

fn unsupported(what: String) -> Error {
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
    fn names(&self) -> (&'static str, &'static [&'static str], &'static str, &'static str) {
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

/// A tensor of one of the shards.
#[derive(Clone, Debug)]
struct Source {
    shard: usize,
    tensor: Tensor,
}

impl Source {
    /// Refuses a dtype or shape that is none of these.
    fn check(&self, name: &str, dtypes: &[&str], shapes: &[Vec<usize>]) -> Result<()> {
        let Tensor { dtype, shape, .. } = &self.tensor;
        if dtypes.contains(dtype) && shapes.contains(shape) {
            return Ok(());
        }
        let wanted = shapes.first().map(Vec::as_slice).unwrap_or_default();
        Err(Error::model(
            format!("tensor \"{name}\" is {dtype} {shape:?}, config.json expects {} {wanted:?}", dtypes.join(" or ")),
            "config.json and the weights are of different models; fetch both again",
        ))
    }

    fn bytes(&self, shards: &[SafeTensors]) -> Result<Vec<u8>> {
        let shard = shards.get(self.shard).ok_or_else(|| Error::internal("a shard is not open".to_string()))?;
        let mut bytes = vec![0; self.tensor.bytes as usize];
        shard.read(self.tensor.offset, &mut bytes)?;
        Ok(bytes)
    }
}

/// A quantised matrix, checked. A fused one holds several of the network.
#[derive(Debug)]
struct Matrix {
    /// Name of the module.
    name: String,
    rows: usize,
    columns: usize,
    /// First row of the network's matrix.
    first: usize,
    scheme: Scheme,
    codes: Source,
    scales: Source,
    /// Rows that share a scale, and groups of columns.
    block_rows: usize,
    block_columns: usize,
    groups: usize,
    zeros: Option<Source>,
    order: Option<Source>,
}

/// A matrix in memory.
struct Loaded {
    codes: Vec<u8>,
    /// `[rows / block rows][groups]`, as are the zero points.
    scales: Vec<f32>,
    zeros: Vec<i16>,
    /// Group of each column.
    order: Vec<u32>,
}

/// The quantised matrices of a checkpoint, by the name of the plain weight that each replaces.
pub(crate) struct Quantised {
    matrices: HashMap<String, Matrix>,
    dtype: Dtype,
    kept: Mutex<Vec<(String, Arc<Loaded>)>>,
}

impl std::fmt::Debug for Quantised {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Quantised").field("matrices", &self.matrices.len()).field("dtype", &self.dtype).finish()
    }
}

impl Quantised {
    /// An empty set; its matrices will be read as `dtype`.
    pub(crate) fn new(dtype: Dtype) -> Quantised {
        Quantised { matrices: HashMap::new(), dtype, kept: Mutex::new(Vec::new()) }
    }

    /// True if no matrix is quantised.
    pub(crate) fn is_empty(&self) -> bool {
        self.matrices.is_empty()
    }

    /// The read format of a matrix; None if it is not quantised.
    pub(crate) fn dtype(&self, name: &str) -> Option<Dtype> {
        self.matrices.get(name).map(|_| self.dtype)
    }

    /// Finds the matrix of `columns` at a place, which replaces a weight, and checks its tensors against the schemes. Returns
    /// false if the matrix is stored plainly or not at all.
    pub(crate) fn add(
        &mut self,
        schemes: &[Scheme],
        weight: &str,
        (place, columns): (&Place, usize),
        shards: &[SafeTensors],
        names: &HashMap<String, usize>,
    ) -> Result<bool> {
        let find = |name: &str| {
            let shard = *names.get(name)?;
            let tensor = shards.get(shard)?.tensors().get(name)?.clone();
            Some(Source { shard, tensor })
        };
        let (mut fitting, mut refusal): (Option<Matrix>, Option<Error>) = (None, None);
        for &scheme in schemes {
            match (Matrix::find(scheme, place, columns, find), &fitting) {
                (Ok(None), _) => {}
                (Ok(Some(matrix)), None) => fitting = Some(matrix),
                (Ok(Some(matrix)), Some(first)) if matrix.layout() == first.layout() => {}
                (Ok(Some(Matrix { name, .. })), Some(_)) => {
                    return Err(unsupported(format!("a mixture of schemes, two of which fit \"{name}\",")));
                }
                (Err(error), _) => refusal = refusal.or(Some(error)),
            }
        }
        match (fitting, refusal) {
            (None, None) => Ok(false),
            (None, Some(refusal)) => Err(refusal),
            (Some(matrix), _) => {
                self.matrices.insert(weight.to_string(), matrix);
                Ok(true)
            }
        }
    }

    /// Reads rows of a matrix in its read format.
    pub(crate) fn read(&self, shards: &[SafeTensors], weight: &str, rows: Range<usize>, out: &mut [u8]) -> Result<()> {
        let (matrix, loaded) = self.loaded(shards, weight)?;
        let mut values = vec![0.0; matrix.columns];
        for (row, out) in rows.zip(out.chunks_exact_mut(matrix.columns * self.dtype.bytes())) {
            matrix.decode(&loaded, matrix.first + row, &mut values);
            matrix.round(&mut values);
            round(self.dtype, &values, out);
        }
        Ok(())
    }

    /// Reads rows of a matrix as codes times scales in f32, without rounding.
    pub(crate) fn read_stored(
        &self,
        shards: &[SafeTensors],
        weight: &str,
        rows: Range<usize>,
        out: &mut [f32],
    ) -> Result<()> {
        let (matrix, loaded) = self.loaded(shards, weight)?;
        for (row, out) in rows.zip(out.chunks_exact_mut(matrix.columns)) {
            matrix.decode(&loaded, matrix.first + row, out);
        }
        Ok(())
    }

    fn loaded(&self, shards: &[SafeTensors], weight: &str) -> Result<(&Matrix, Arc<Loaded>)> {
        let Some(matrix) = self.matrices.get(weight) else {
            return Err(Error::internal(format!("{weight} is not quantised")));
        };
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, loaded)) = kept.iter().find(|(name, _)| *name == matrix.name) {
            return Ok((matrix, Arc::clone(loaded)));
        }
        if kept.len() == KEPT {
            kept.remove(0);
        }
        let loaded = Arc::new(matrix.load(shards)?);
        kept.push((matrix.name.clone(), Arc::clone(&loaded)));
        Ok((matrix, loaded))
    }
}

impl Matrix {
    /// Checks the tensors of a matrix against a scheme; None if the matrix has no codes of the scheme.
    fn find(
        scheme: Scheme,
        place: &Place,
        columns: usize,
        find: impl Fn(&str) -> Option<Source>,
    ) -> Result<Option<Matrix>> {
        let Place { ref name, rows, first } = *place;
        let module = name.strip_suffix(".weight").unwrap_or(name);
        let find = |suffix: &str| find(&format!("{module}.{suffix}"));
        let (codes_name, scale_names, zeros_name, order_name) = scheme.names();
        let Some(codes) = find(codes_name) else { return Ok(None) };
        if codes_name == "weight" && FLOATS.contains(&codes.tensor.dtype) {
            return Ok(None);
        }
        let missing = |suffix: &str| {
            Error::model(
                format!("the checkpoint has no tensor \"{module}.{suffix}\", which quantization_config requires"),
                "config.json and the weights are of different models, or the download is incomplete; fetch both again",
            )
        };
        let check = |source: &Source, suffix: &str, dtypes: &[&str], shapes: &[Vec<usize>]| {
            source.check(&format!("{module}.{suffix}"), dtypes, shapes)
        };
        let (dtype, shape) = scheme.codes.stored(rows, columns);
        check(&codes, codes_name, &[dtype], &[shape])?;
        let found = scale_names.iter().find_map(|name| Some((*name, find(name)?)));
        let (scales_name, scales) = found.ok_or_else(|| missing(&scale_names.join("\" or \"")))?;
        // Without a stated block, scales are per matrix or per row.
        let block = scheme.block.unwrap_or(match scales.tensor.shape.as_slice() {
            [] | [1] | [1, 1] => Block { rows: None, columns: None },
            _ => Block { rows: Some(1), columns: None },
        });
        let (block_rows, block_columns) = (block.rows.unwrap_or(rows), block.columns.unwrap_or(columns));
        let (bands, groups) = (rows.div_ceil(block_rows), columns.div_ceil(block_columns));
        check(&scales, scales_name, scheme.codes.scale_dtypes(), &scheme.codes.scale_shapes(bands, groups))?;
        let zeros = match (find(zeros_name), scheme.zeros) {
            (None, true) => return Err(missing(zeros_name)),
            // The matrix has another scheme.
            (Some(_), false) => return Err(unsupported(format!("a zero point of \"{module}\""))),
            (zeros, _) => zeros,
        };
        if let Some(zeros) = &zeros {
            let (dtype, shape) = scheme.codes.stored_zeros(rows, groups, zeros.tensor.dtype);
            check(zeros, zeros_name, &[dtype], &[shape])?;
        }
        let order = if scheme.codes == Codes::Awq { None } else { find(order_name) };
        if let Some(order) = &order {
            check(order, order_name, &["I32"], &[vec![columns]])?;
        }
        Ok(Some(Matrix {
            name: module.to_string(),
            rows,
            columns,
            first,
            scheme,
            codes,
            scales,
            block_rows,
            block_columns,
            groups,
            zeros,
            order,
        }))
    }

    /// What decides how the tensors are decoded.
    fn layout(&self) -> (Codes, usize, usize, bool) {
        (self.scheme.codes, self.block_rows, self.block_columns, self.scheme.through_scales)
    }

    fn load(&self, shards: &[SafeTensors]) -> Result<Loaded> {
        let codes = self.codes.bytes(shards)?;
        let raw = self.scales.bytes(shards)?;
        let stored: Vec<f32> = match self.scales.tensor.dtype {
            "BF16" => raw.as_chunks().0.iter().map(|raw| bf16::from_le_bytes(*raw).to_f32()).collect(),
            "F16" => raw.as_chunks().0.iter().map(|raw| f16::from_le_bytes(*raw).to_f32()).collect(),
            "F8_E8M0" | "U8" => raw.iter().map(|code| e8m0(*code)).collect(),
            _ => raw.as_chunks().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect(),
        };
        let (bands, groups) = (self.rows.div_ceil(self.block_rows), self.groups);
        let transposed = matches!(self.scheme.codes, Codes::Gptq { .. } | Codes::Awq);
        let at = |band: usize, group: usize| if transposed { group * bands + band } else { band * groups + group };
        let cells = || (0..bands).flat_map(|band| (0..groups).map(move |group| (band, group)));
        let scales = cells().map(|(band, group)| stored[at(band, group)]).collect();
        let zeros = match &self.zeros {
            None => Vec::new(),
            Some(zeros) => {
                let mut raw = zeros.bytes(shards)?;
                if let Codes::Gptq { bits, v1: true } = self.scheme.codes {
                    add_ones(&mut raw, bits);
                }
                cells().map(|(row, group)| self.zero(&raw, row, group)).collect()
            }
        };
        let bytes = self.order.as_ref().map(|order| order.bytes(shards)).transpose()?;
        let words = |bytes: &[u8]| bytes.as_chunks().0.iter().map(|raw| u32::from_le_bytes(*raw)).collect();
        let stored: Option<Vec<u32>> = bytes.as_deref().map(words);
        // compressed-tensors stores −1 for columns in order.
        let stored = stored.filter(|order| transposed || !order.contains(&u32::MAX));
        let in_order = || (0..self.columns).map(|column| (column / self.block_columns) as u32).collect();
        let order = stored.unwrap_or_else(in_order);
        match order.iter().find(|&&group| group as usize >= groups) {
            Some(&group) => Err(Error::model(
                format!("tensor \"{}.g_idx\" names group {} of {groups}", self.name, group as i32),
                "the file is damaged; download it again",
            )),
            None => Ok(Loaded { codes, scales, zeros, order }),
        }
    }

    fn zero(&self, raw: &[u8], row: usize, group: usize) -> i16 {
        let byte = || i16::from(raw[row * self.groups + group] as i8);
        match self.scheme.codes {
            Codes::Fp8 | Codes::Int8 => byte(),
            Codes::Words { .. } if self.zeros.as_ref().is_some_and(|zeros| zeros.tensor.dtype == "I8") => byte(),
            Codes::Words { bits } => {
                let per = 32 / bits;
                field(raw, row / per * self.groups + group, row % per, bits) - (1 << (bits - 1))
            }
            Codes::Gptq { bits, .. } => {
                let per = 32 / bits;
                field(raw, group * self.rows.div_ceil(per) + row / per, row % per, bits)
            }
            Codes::Awq => field(raw, group * self.rows.div_ceil(8) + row / 8, AWQ_PLACES[row % 8], 4),
        }
    }

    fn decode(&self, loaded: &Loaded, row: usize, out: &mut [f32]) {
        let band = row / self.block_rows * self.groups;
        for (column, (out, &group)) in out.iter_mut().zip(&loaded.order).enumerate() {
            let code = match self.scheme.codes {
                Codes::Fp8 => e4m3(loaded.codes[row * self.columns + column]),
                Codes::Int8 => f32::from(loaded.codes[row * self.columns + column] as i8),
                Codes::Words { bits } => {
                    let per = 32 / bits;
                    let word = row * self.columns.div_ceil(per) + column / per;
                    f32::from(field(&loaded.codes, word, column % per, bits) - (1 << (bits - 1)))
                }
                Codes::Gptq { bits, .. } => {
                    let per = 32 / bits;
                    f32::from(field(&loaded.codes, column / per * self.rows + row, column % per, bits))
                }
                Codes::Awq => {
                    let word = column * self.rows.div_ceil(8) + row / 8;
                    f32::from(field(&loaded.codes, word, AWQ_PLACES[row % 8], 4))
                }
            };
            let cell = band + group as usize;
            let zero = loaded.zeros.get(cell).map_or(0.0, |&zero| f32::from(zero));
            *out = (code - zero) * loaded.scales[cell];
        }
    }

    /// Rounds values to the scales' type, if the method's library multiplies in it.
    fn round(&self, values: &mut [f32]) {
        for value in values {
            *value = match self.scales.tensor.dtype {
                "BF16" if self.scheme.through_scales => bf16::from_f32(*value).to_f32(),
                "F16" if self.scheme.through_scales => f16::from_f32(*value).to_f32(),
                _ => *value,
            };
        }
    }
}

/// Field `index` of a 32-bit word, counted from its lowest bits.
fn field(raw: &[u8], word: usize, index: usize, bits: usize) -> i16 {
    let bit = index * bits;
    i16::from(raw[4 * word + bit / 8] >> (bit % 8)) & ((1 << bits) - 1)
}

/// Adds one to every field of 32-bit words. GPTQModel subtracts it from whole words, so a field of zero borrows from the next.
fn add_ones(raw: &mut [u8], bits: usize) {
    let ones = u32::MAX / ((1 << bits) - 1);
    for word in raw.as_chunks_mut().0 {
        *word = u32::from_le_bytes(*word).wrapping_add(ones).to_le_bytes();
    }
}

/// FP8 with 4 bits of exponent (bias 7) and 3 of mantissa; 0x7f and 0xff are NaN, and there is no infinity.
fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa / 512.0,
        _ => (8.0 + mantissa) * (2.0f32).powi(exponent - 10),
    };
    if code >= 0x80 { -magnitude } else { magnitude }
}

/// A power of two, 2^(code − 127); 0xff is NaN.
fn e8m0(code: u8) -> f32 {
    match code {
        // 2⁻¹²⁷ is subnormal.
        0 => f32::from_bits(1 << 22),
        0xff => f32::NAN,
        code => f32::from_bits(u32::from(code) << 23),
    }
}
