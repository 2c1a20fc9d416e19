//! Conversion between f32 and the element types of checkpoints.

use half::{bf16, f16};
use quantspec_core::config::Dtype;

/// Element types of weights that are not quantised, and of scales, by safetensors' names.
pub(crate) const FLOATS: [&str; 3] = ["BF16", "F16", "F32"];

/// Writes values as little-endian bytes of a format, rounded to nearest; `values` and `out` have the same number of elements.
pub(crate) fn round(dtype: Dtype, values: &[f32], out: &mut [u8]) {
    match dtype {
        Dtype::Bf16 => {
            for (from, out) in values.iter().zip(out.as_chunks_mut().0) {
                *out = bf16::from_f32(*from).to_le_bytes();
            }
        }
        Dtype::F16 => {
            for (from, out) in values.iter().zip(out.as_chunks_mut().0) {
                *out = f16::from_f32(*from).to_le_bytes();
            }
        }
        Dtype::F32 => {
            for (from, out) in values.iter().zip(out.as_chunks_mut().0) {
                *out = from.to_le_bytes();
            }
        }
    }
}

/// Converts little-endian bytes to f32; `bytes` and `out` have the same number of elements.
pub(crate) fn convert(dtype: Dtype, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        Dtype::Bf16 => {
            for (out, from) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *out = bf16::from_le_bytes(*from).to_f32();
            }
        }
        Dtype::F16 => {
            for (out, from) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *out = f16::from_le_bytes(*from).to_f32();
            }
        }
        Dtype::F32 => {
            for (out, from) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *out = f32::from_le_bytes(*from);
            }
        }
    }
}
