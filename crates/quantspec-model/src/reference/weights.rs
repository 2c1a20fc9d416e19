//! Draft weights, and the target's weights in nibbles, as their dequantised codes.

use crate::backend::Options;
use crate::checkpoint::{LayerPart, Part};
use crate::importance::LayerImportance;
use quantspec_core::Result;
use quantspec_core::config::{DraftWeights, TargetWeights};
use quantspec_core::quantize::{quantize_head_row, quantize_weights_row};
use quantspec_core::weights::{SMALL_GROUP, quantize_row, quantize_row_upper};

/// Returns true if the draft reads quantised weights of this part.
fn draft_kept(part: Part, kind: DraftWeights) -> bool {
    use LayerPart::*;
    match (part, kind) {
        (_, DraftWeights::None) => false,
        (Part::Layer(_, Gate | Up | Down), _) => true,
        (Part::Head | Part::Layer(_, Q | K | V | Output), DraftWeights::Int4) => true,
        _ => false,
    }
}

/// Importance of the inputs of a part; empty for those without.
fn of_inputs(importance: &[LayerImportance], part: Part) -> &[f32] {
    match part {
        Part::Layer(layer, part) => importance[layer].of(part),
        _ => &[],
    }
}

/// Dequantised draft weights of a part, or None if the draft uses its full weights.
pub(super) fn draft_values(
    part: Part,
    options: &Options,
    importance: &[LayerImportance],
    values: &[f32],
    columns: usize,
) -> Result<Option<Vec<f32>>> {
    if !draft_kept(part, options.draft_weights) {
        return Ok(None);
    }
    let eight = part.is_drafted_in_8_bits(options.sensitive);
    let importance = of_inputs(importance, part);
    let mut out = Vec::with_capacity(values.len());
    for row in values.chunks_exact(columns) {
        let row = if eight { quantize_head_row(row)? } else { quantize_weights_row(row, importance)? };
        out.extend(row.dequantize());
    }
    Ok(Some(out))
}

/// The target's values from a part's planes, and the draft's values, or None if the draft reads the target's.
pub(super) fn hierarchy_values(
    part: Part,
    options: &Options,
    importance: &[LayerImportance],
    values: &mut [f32],
    columns: usize,
) -> Result<Option<Vec<f32>>> {
    use LayerPart::*;
    if !matches!(part, Part::Head | Part::Layer(_, Q | K | V | Output | Gate | Up | Down)) {
        return Ok(None);
    }
    let both = part.has_both_planes(options.weights, importance.len());
    // Matrices of int4 that have both planes, and the head: the draft reads both.
    let few = part == Part::Head || options.weights == TargetWeights::Int4 && both;
    let kept = draft_kept(part, options.draft_weights);
    let upper = kept && !few && !part.is_drafted_in_8_bits(options.sensitive);
    let importance = of_inputs(importance, part);
    let mut draft = Vec::with_capacity(values.len());
    for row in values.chunks_exact_mut(columns) {
        let quantise = if both { quantize_row } else { quantize_row_upper };
        let codes = quantise(row, importance, SMALL_GROUP)?;
        row.copy_from_slice(&codes.both());
        draft.extend(if upper { codes.upper() } else { codes.both() });
    }
    Ok(kept.then_some(draft))
}
