//! Quantised matrices of safetensors files: FP8 (also MXFP8 and ModelOpt's), compressed-tensors (INT8, INT4, FP8), GPTQ, AWQ and
//! AutoRound, dequantised when they are read.
//!
//! `quantization_config` of config.json names the method. A module with a plain `weight` is not quantised. If modules differ in
//! bits or groups, the shapes of a matrix's tensors show its scheme. A value is (code − zero point) · scale in f32. It is
//! rounded to the scales' type if the method's library computes in it, then to the model's type.
//!
//! This file has the matrices; `schemes.rs` has the schemes of `quantization_config`.

mod schemes;

use crate::elements::{FLOATS, round};
use crate::names::Place;
use crate::safetensors::Tensor;
use crate::shards::{ShardTensor, Shards};
use half::{bf16, f16};
use quantspec_core::config::Dtype;
use quantspec_core::{Error, Result};
use schemes::{Block, Codes, unsupported};
pub(crate) use schemes::{Scheme, is_of_cache, schemes};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// Matrices whose codes stay in memory: backends read Q, K and V alternately.
const KEPT: usize = 3;

/// Position in a 32-bit AWQ word of the output with this index modulo 8.
const AWQ_PLACES: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// Refuses a tensor whose dtype or shape is none of these.
fn check(name: &str, tensor: &Tensor, dtypes: &[&str], shapes: &[Vec<usize>]) -> Result<()> {
    let Tensor { dtype, shape, .. } = tensor;
    if dtypes.contains(dtype) && shapes.contains(shape) {
        return Ok(());
    }
    let wanted = shapes.first().map(Vec::as_slice).unwrap_or_default();
    Err(Error::model(
        format!("tensor \"{name}\" is {dtype} {shape:?}, config.json expects {} {wanted:?}", dtypes.join(" or ")),
        "config.json and the weights are of different models; fetch both again",
    ))
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
    codes: ShardTensor,
    scales: ShardTensor,
    /// Rows that share a scale, and groups of columns.
    block_rows: usize,
    block_columns: usize,
    groups: usize,
    zeros: Option<ShardTensor>,
    order: Option<ShardTensor>,
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
        shards: &Shards,
    ) -> Result<bool> {
        let (mut fitting, mut refusal): (Option<Matrix>, Option<Error>) = (None, None);
        for &scheme in schemes {
            match (Matrix::find(scheme, place, columns, shards), &fitting) {
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
    pub(crate) fn read(&self, shards: &Shards, weight: &str, rows: Range<usize>, out: &mut [u8]) -> Result<()> {
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
    pub(crate) fn read_stored(&self, shards: &Shards, weight: &str, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        let (matrix, loaded) = self.loaded(shards, weight)?;
        for (row, out) in rows.zip(out.chunks_exact_mut(matrix.columns)) {
            matrix.decode(&loaded, matrix.first + row, out);
        }
        Ok(())
    }

    fn loaded(&self, shards: &Shards, weight: &str) -> Result<(&Matrix, Arc<Loaded>)> {
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
    fn find(scheme: Scheme, place: &Place, columns: usize, shards: &Shards) -> Result<Option<Matrix>> {
        let Place { ref name, rows, first } = *place;
        let module = name.strip_suffix(".weight").unwrap_or(name);
        let find = |suffix: &str| shards.find(&format!("{module}.{suffix}"));
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
        let check = |found: &ShardTensor, suffix: &str, dtypes: &[&str], shapes: &[Vec<usize>]| {
            check(&format!("{module}.{suffix}"), &found.tensor, dtypes, shapes)
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

    fn load(&self, shards: &Shards) -> Result<Loaded> {
        let codes = shards.bytes(&self.codes)?;
        let raw = shards.bytes(&self.scales)?;
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
                let mut raw = shards.bytes(zeros)?;
                if let Codes::Gptq { bits, v1: true } = self.scheme.codes {
                    add_ones(&mut raw, bits);
                }
                cells().map(|(row, group)| self.zero(&raw, row, group)).collect()
            }
        };
        let bytes = self.order.as_ref().map(|order| shards.bytes(order)).transpose()?;
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
