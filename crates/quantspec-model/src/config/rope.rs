//! RoPE and its scalings, from config.json.

use super::fields::{Fields, absurd, unsupported};
use super::{Family, HEAD_DIM, PHI_ORIGINAL, POSITIONS, by_layer_type, check_theta};
use crate::file::shown;
use quantspec_core::config::{QueryScale, Rope, RopeScaling};
use quantspec_core::{Error, Result};
use serde_json::Value;

/// The channels of a head that are rotated, of `partial_rotary_factor` in the scaling or next to it.
fn rotated(fields: &Fields, scaling: Option<&Fields>, family: &Family, head_dim: usize) -> Result<usize> {
    const NAME: &str = "partial_rotary_factor";
    let stated = scaling.filter(|inner| inner.stated(NAME)).unwrap_or(fields);
    let factor = stated.number(NAME, Some(1.0))?;
    if factor == 1.0 {
        return Ok(head_dim);
    }
    if !family.partial_rotary {
        return Err(unsupported(format!("{}: partial rotary embeddings ({NAME} {factor:?})", stated.object)));
    }
    let dim = (head_dim as f64 * factor) as usize;
    if !(*HEAD_DIM.start()..=head_dim).contains(&dim) || !dim.is_multiple_of(2) {
        return Err(absurd(format!(
            "{}: {NAME} {factor:?} of {head_dim} channels is no even number from {} to {head_dim}",
            stated.object,
            HEAD_DIM.start()
        )));
    }
    Ok(dim)
}

/// RoPE from `rope_theta` and `rope_scaling`, or from `rope_parameters`; also returns the longest context.
pub(super) fn rope(
    fields: &Fields,
    family: &Family,
    head_dim: usize,
    stated_positions: usize,
) -> Result<(Rope, usize)> {
    // If a file has both spellings, the old one wins, as in transformers 5. There it keeps the base of Gemma's new one.
    let old = fields.inner("rope_scaling")?.filter(|inner| !inner.map.is_empty());
    let by_type = if family.gemma { by_layer_type(fields, "full_attention")? } else { None };
    let scaling = match (old, by_type) {
        (Some(inner), _) | (None, Some(inner)) => Some(inner),
        (None, None) if family.gemma && fields.stated("rope_parameters") => {
            return Err(fields.missing("rope_parameters.full_attention"));
        }
        (None, None) => fields.inner("rope_parameters")?,
    };
    let theta = match [scaling, by_type].into_iter().flatten().find(|inner| inner.get("rope_theta").is_some()) {
        Some(inner) => inner.number("rope_theta", None)?,
        None => fields.number("rope_theta", Some(family.theta))?,
    };
    check_theta(theta)?;
    let dim = rotated(fields, scaling.as_ref(), family, head_dim)?;
    let Some(inner) = scaling else {
        // transformers has defaults for all parameters together, which no published checkpoint needs.
        if family.query_scale {
            return Err(fields.missing("rope_parameters"));
        }
        return Ok((Rope { theta, dim, scaling: RopeScaling::None, query_scale: None }, stated_positions));
    };
    if let Some((name, _)) = inner.map.iter().find(|(_, value)| value.is_object()) {
        return Err(unsupported(format!("{}: RoPE by layer type (\"{}\")", inner.object, shown(name))));
    }
    let kind = match inner.text("rope_type")? {
        Some(kind) => kind,
        None => inner.text("type")?.unwrap_or("default"),
    };
    // Phi-3's first configurations have other names for LongRoPE.
    let kind = if family.partial_rotary && matches!(kind, "su" | "yarn") { "longrope" } else { kind };
    // The top-level field has priority over the one inside the scaling, as in transformers 5.
    let original = || match fields.get("original_max_position_embeddings") {
        Some(_) => fields.size("original_max_position_embeddings", POSITIONS, None),
        None => {
            let default = if family.partial_rotary { PHI_ORIGINAL } else { stated_positions };
            inner.size("original_max_position_embeddings", POSITIONS, Some(default))
        }
    };
    let query_scale = if family.query_scale {
        const BETA: &str = "llama_4_scaling_beta";
        let beta = inner.number(BETA, None)?;
        if !(0.0..=100.0).contains(&beta) {
            return Err(absurd(format!("{}: {BETA} {beta} is not from 0 to 100", inner.object)));
        }
        Some(QueryScale { beta, original: original()? })
    } else {
        None
    };
    let (scaling, max_positions) = if kind == "linear" {
        let factor = stretch(&inner, None)?;
        (RopeScaling::Linear { factor }, fields.size("max_sequence_length", POSITIONS, Some(0))?.max(stated_positions))
    } else {
        scaled(&inner, kind, dim, stated_positions, original)?
    };
    Ok((Rope { theta, dim, scaling, query_scale }, max_positions))
}

/// The factor by which a scaling stretches the context.
fn stretch(inner: &Fields, default: Option<f64>) -> Result<f64> {
    let factor = inner.number("factor", default)?;
    if (1.0..=65_536.0).contains(&factor) {
        Ok(factor)
    } else {
        Err(absurd(format!("{}: factor {factor} is not from 1 to 65536", inner.object)))
    }
}

/// RoPE's scaling of a type other than linear, and the longest context. `dim`: rotated channels of a head; `original`: the
/// context of the pre-training.
fn scaled(
    inner: &Fields,
    kind: &str,
    dim: usize,
    stated_positions: usize,
    original: impl Fn() -> Result<usize>,
) -> Result<(RopeScaling, usize)> {
    match kind {
        "default" => Ok((RopeScaling::None, stated_positions)),
        // Dynamic scaling starts at the stated context; `original_max_position_embeddings` is not used.
        "dynamic" => {
            let factor = stretch(inner, None)?;
            let scaling = RopeScaling::Dynamic { factor, original: stated_positions };
            Ok((scaling, stretched(stated_positions, factor, stated_positions)))
        }
        "llama3" => Ok((llama3(inner, original()?)?, stated_positions)),
        "yarn" => yarn(inner, stated_positions, original()?),
        "longrope" => Ok((long_rope(inner, dim, stated_positions, original()?)?, stated_positions)),
        other => Err(Error::model(
            format!("RoPE type \"{}\" is not supported", shown(other)),
            "supported RoPE types are default, linear, dynamic, llama3, yarn and longrope",
        )),
    }
}

/// A positive number of moderate size.
fn positive(fields: &Fields, name: &str, default: Option<f64>) -> Result<f64> {
    let value = fields.number(name, default)?;
    if (1e-6..=1e6).contains(&value) {
        Ok(value)
    } else {
        Err(absurd(format!("{}: {name} {value} is not from 1e-6 to 1e6", fields.object)))
    }
}

/// The longest context. YaRN and dynamic checkpoints often state the context before stretching; the longer of both counts.
fn stretched(stated_positions: usize, factor: f64, original: usize) -> usize {
    stated_positions.max((factor * original as f64) as usize).min(*POSITIONS.end())
}

fn llama3(inner: &Fields, original: usize) -> Result<RopeScaling> {
    let (low, high) = (positive(inner, "low_freq_factor", None)?, positive(inner, "high_freq_factor", None)?);
    if low >= high {
        return Err(absurd(format!("{}: low_freq_factor {low} is not below high_freq_factor {high}", inner.object)));
    }
    let factor = stretch(inner, None)?;
    Ok(RopeScaling::Llama3 { factor, low_freq_factor: low, high_freq_factor: high, original })
}

fn yarn(inner: &Fields, stated_positions: usize, original: usize) -> Result<(RopeScaling, usize)> {
    let factor = stretch(inner, Some(stated_positions as f64 / original as f64))?;
    let scaling = RopeScaling::Yarn {
        factor,
        original,
        beta_fast: positive(inner, "beta_fast", Some(32.0))?,
        beta_slow: positive(inner, "beta_slow", Some(1.0))?,
        attention_factor: yarn_attention_factor(inner, factor)?,
        truncate: inner.flag("truncate", true)?,
    };
    Ok((scaling, stretched(stated_positions, factor, original)))
}

/// A model for more than its original context always uses the long factors. Depending on the length of a text, as in
/// transformers, they would change under the keys that a growing text has cached.
fn long_rope(inner: &Fields, dim: usize, stated_positions: usize, original: usize) -> Result<RopeScaling> {
    let short = stretches(inner, "short_factor", dim / 2)?;
    let long = stretches(inner, "long_factor", dim / 2)?;
    let factors = if stated_positions > original { long } else { short };
    let factor = positive(inner, "factor", Some(stated_positions as f64 / original as f64))?;
    let own = if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / (original as f64).ln()).sqrt() };
    Ok(RopeScaling::Factors { factors, attention_factor: attention_factor(inner, own)? })
}

/// LongRoPE's stretch of each of `pairs` rotated pairs.
fn stretches(fields: &Fields, name: &str, pairs: usize) -> Result<Vec<f32>> {
    let Some(list) = fields.list(name)? else { return Err(fields.missing(name)) };
    if list.len() != pairs {
        return Err(absurd(format!(
            "{}: {name} has {} numbers for {pairs} pairs of channels",
            fields.object,
            list.len()
        )));
    }
    let one = |value: &Value| {
        let factor = value.as_f64().filter(|factor| (1e-6..=1e6).contains(factor));
        factor.map(|factor| factor as f32).ok_or_else(|| fields.wrong(name, value, "a number from 1e-6 to 1e6"))
    };
    list.iter().map(one).collect()
}

/// YaRN's factor on cos and sin: the stated one, or 0.1·ln(factor) + 1 with DeepSeek's two `mscale` fields if present. It is
/// multiplied by `attn_factor`. transformers ignores that field and the next; files with them are written for vLLM.
fn yarn_attention_factor(fields: &Fields, factor: f64) -> Result<f64> {
    let mscale = |weight: f64| if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 };
    let own = match (fields.number("mscale", Some(0.0))?, fields.number("mscale_all_dim", Some(0.0))?) {
        (one, all) if one != 0.0 && all != 0.0 => mscale(one) / mscale(all),
        _ => mscale(1.0),
    };
    match fields.number("extrapolation_factor", Some(1.0))? {
        1.0 => attention_factor(fields, own * fields.number("attn_factor", Some(1.0))?),
        other => Err(unsupported(format!("{}: extrapolation_factor {other}", fields.object))),
    }
}

/// The stated factor on cos and sin, or the scaling's `own`.
fn attention_factor(fields: &Fields, own: f64) -> Result<f64> {
    let value = fields.number("attention_factor", Some(own))?;
    if value > 0.0 && value <= 100.0 {
        Ok(value)
    } else {
        Err(absurd(format!("{}: attention factor {value} is not above 0 and up to 100", fields.object)))
    }
}
