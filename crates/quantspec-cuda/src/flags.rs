//! The device's error flag: non-finite results of kernels.

use crate::shapes;
use quantspec_core::{Error, Result};

/// Bits of the device's error flag (kernels/numbers.cuh and quantize_weights.cu).
const FLAG_CACHE: u32 = shapes::FLAG_CACHE as u32;
const FLAG_LOGITS: u32 = shapes::FLAG_LOGITS as u32;
pub(crate) const FLAG_WEIGHTS: u32 = shapes::FLAG_WEIGHTS as u32;
const FLAG_NO_TOKEN: u32 = shapes::FLAG_NO_TOKEN as u32;

/// As [`check_flag`]. With `forbids`, a mask or penalty forbids tokens, and their exhaustion is an error of its own
/// ([`Error::no_token_left`]).
pub(crate) fn check_choice(flag: u32, forbids: bool) -> Result<()> {
    if forbids && flag == FLAG_NO_TOKEN { Err(Error::no_token_left()) } else { check_flag(flag) }
}

/// Converts the flags set by kernels to an error.
pub(crate) fn check_flag(flag: u32) -> Result<()> {
    if flag == 0 {
        return Ok(());
    }
    Err(Error::not_finite(match flag {
        flag if flag & FLAG_WEIGHTS != 0 => "a weight is NaN or infinite, or its group does not fit half precision",
        flag if flag & FLAG_CACHE != 0 => "keys or values are NaN, infinite or beyond half precision",
        flag if flag & FLAG_LOGITS != 0 => "logits are NaN or infinite",
        flag if flag & FLAG_NO_TOKEN != 0 => "all logits are −∞",
        _ => "a kernel found values that are not finite",
    }))
}
