//! Device memory for activations, and its size.

use super::describe::{DeviceRow, STAGES};
use super::hidden::HiddenStates;
use crate::attend::{Merged, PageChoice, QueryTile, SLICE_ROWS, Span};
use crate::device::{Buffer, Device, Pinned};
use crate::linear::{DRAFT_GROUP, Form};
use crate::prefill::{padded, readable};
use crate::sample::TURN_BYTES;
use crate::weights;
use quantspec_core::Result;
use quantspec_core::cache::{BUFFER_TOKENS, G, GAMMA_MAX};
use quantspec_core::config::{Dtype, ModelConfig};
use quantspec_model::backend::Options;
use std::sync::Arc;

/// Input of a GEMM, `width` numbers per row: in the weights' type or in limbs (x), and as int8 codes (x8); scales and sums of
/// integers (xs).
#[derive(Debug)]
pub(super) struct Input {
    pub(super) x: Buffer,
    pub(super) x8: Buffer,
    pub(super) xs: Buffer,
    pub(super) width: usize,
}

impl Input {
    pub(super) fn bytes(rows: usize, width: usize, dtype: Dtype) -> [usize; 3] {
        // Rows of panels are padded to a multiple of eight. A pair of groups of limbs takes the place of a group of codes.
        let (eights, pairs) = (rows.next_multiple_of(8), width.div_ceil(DRAFT_GROUP));
        let padded = pairs * DRAFT_GROUP;
        [eights * padded * dtype.bytes(), eights * padded, eights * pairs * 2 * 8]
    }

    pub(super) fn new(device: &Arc<Device>, rows: usize, width: usize, dtype: Dtype) -> Result<Input> {
        let [x, x8, xs] = Input::bytes(rows, width, dtype);
        Ok(Input { x: device.zeroed(x)?, x8: device.zeroed(x8)?, xs: device.zeroed(xs)?, width })
    }

    /// Row pitch of x, in elements.
    pub(super) fn pitch(&self) -> usize {
        padded(self.width)
    }

    /// Inputs of a row of integers.
    pub(super) fn pitch8(&self) -> usize {
        self.width.next_multiple_of(DRAFT_GROUP)
    }

    /// Integers of a form and their scales; None of a plain input.
    pub(super) fn integers(&self, form: Form) -> Option<[&Buffer; 2]> {
        match form {
            Form::Plain(_) => None,
            Form::Int8 => Some([&self.x8, &self.xs]),
            Form::Limbs => Some([&self.x, &self.xs]),
        }
    }
}

/// Activations of a step.
#[derive(Debug)]
pub(super) struct StepSpace {
    pub(super) hidden: Buffer,
    pub(super) normed: Input,
    pub(super) attended: Input,
    pub(super) gated: Input,
    /// Input of the head, whose type may differ.
    pub(super) last: Input,
    /// f32 outputs of GEMMs.
    pub(super) y: Buffer,
    pub(super) q: Buffer,
    pub(super) logits: Buffer,
    pub(super) partial: Buffer,
    pub(super) extremes: Buffer,
    /// Description of a round or a single step: rows, angles, spans, turns; written by one copy.
    pub(super) description: Buffer,
    pub(super) staging: Vec<Pinned>,
}

impl StepSpace {
    /// `head` is the type of the head's input.
    pub(super) fn new(device: &Arc<Device>, config: &ModelConfig, sizes: &Sizes, head: Dtype) -> Result<StepSpace> {
        let (rows, partial, dtype) = (sizes.rows, sizes.partial_rows, config.dtype);
        Ok(StepSpace {
            hidden: device.allocate(rows * config.hidden * 4)?,
            normed: Input::new(device, rows, config.hidden, dtype)?,
            attended: Input::new(device, rows, config.q_width(), dtype)?,
            gated: Input::new(device, rows, config.intermediate, dtype)?,
            last: Input::new(device, rows, config.hidden, head)?,
            y: device.allocate(sizes.y)?,
            q: device.allocate(rows * config.q_width() * 2)?,
            logits: device.allocate(sizes.logits)?,
            partial: device.allocate(partial * config.head_dim * 4)?,
            extremes: device.allocate(partial * 8)?,
            description: device.allocate(sizes.description)?,
            staging: (0..STAGES).map(|_| device.pinned(sizes.description)).collect::<Result<_>>()?,
        })
    }
}

/// Activations of a prompt.
#[derive(Debug)]
pub(super) struct PromptSpace {
    pub(super) hidden: HiddenStates,
    /// Keys and values of the current layer, f16 `[tokens][2 kv_width]`.
    pub(super) scratch: Buffer,
    /// Capacity of `scratch` in tokens. Longer prompts use memory of the weights instead.
    pub(super) own: usize,
    /// The current prompt uses memory of the weights.
    pub(super) borrows: bool,
    /// Three tables of angles: one of every token, one of every token in local layers, and one of the rows of a block or step in
    /// layers without position embedding. The last two exist only in models with such layers.
    pub(super) cos_sin: Buffer,
    pub(super) tokens: Buffer,
    pub(super) normed: Buffer,
    pub(super) q: Buffer,
    pub(super) attended: Buffer,
    pub(super) gated: Buffer,
}

impl PromptSpace {
    pub(super) fn new(
        device: &Arc<Device>,
        config: &ModelConfig,
        options: &Options,
        limits: Limits,
    ) -> Result<PromptSpace> {
        let own = tokens_own(config, options, limits);
        let bytes = prompt_bytes(config, options, own);
        Ok(PromptSpace {
            hidden: HiddenStates::new(device, config, options, limits)?,
            scratch: device.allocate(bytes[0])?,
            own,
            borrows: false,
            cos_sin: device.allocate(bytes[1])?,
            tokens: device.allocate(bytes[2])?,
            normed: device.zeroed(bytes[3])?,
            q: device.allocate(bytes[4])?,
            attended: device.zeroed(bytes[5])?,
            gated: device.zeroed(bytes[6])?,
        })
    }
}

/// Sizes of a step that [`super::plan`] predicts and `load` allocates: `rows` and `partial_rows` in rows, the others in bytes.
pub(super) struct Sizes {
    pub(super) rows: usize,
    pub(super) y: usize,
    pub(super) logits: usize,
    pub(super) description: usize,
    pub(super) partial_rows: usize,
}

impl Sizes {
    pub(super) fn new(config: &ModelConfig, options: &Options, partial_rows: usize) -> Sizes {
        let rows = options.step_rows.max(1);
        let widest = (config.q_width() + 2 * config.kv_width()).max(2 * config.intermediate).max(config.hidden);
        // At most one span per row; a row's group is split into tiles of at least eight query rows. Local layers have angles and
        // slices of their own.
        let kinds = angle_tables(config);
        let of_kind = config.head_dim * 4
            + size_of::<Merged>()
            + size_of::<Span>()
            + (config.group().div_ceil(8) + 1) * size_of::<QueryTile>();
        let per_row = size_of::<DeviceRow>() + kinds * of_kind + size_of::<PageChoice>();
        Sizes {
            rows,
            y: rows * widest * 4,
            logits: rows * config.vocab * 4,
            // As many rows are drafted as verified. Every piece is aligned to 16; a step has rows, choices, and angles of each
            // kind of layer, and three pieces per slice.
            description: 2 * rows * per_row
                + options.slots * TURN_BYTES
                + (GAMMA_MAX + 1) * 16 * (3 + kinds * (1 + 3 * rows.div_ceil(SLICE_ROWS))),
            partial_rows,
        }
    }

    /// Total of a step; `head` is the number format of the model's head.
    pub(super) fn step_bytes(&self, config: &ModelConfig, head: Dtype) -> usize {
        let dtype = config.dtype;
        let inputs =
            [(config.hidden, dtype), (config.q_width(), dtype), (config.intermediate, dtype), (config.hidden, head)];
        let inputs: usize =
            inputs.iter().map(|&(width, dtype)| Input::bytes(self.rows, width, dtype).iter().sum::<usize>()).sum();
        self.rows * config.hidden * 4
            + inputs
            + self.y
            + self.rows * config.q_width() * 2
            + self.logits
            + self.partial_rows * (config.head_dim * 4 + 8)
            + self.description
    }
}

/// What prompts keep in memory of their own on the device. Tests lower it.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most tokens whose keys and values of a layer have memory of their own, if longer prompts can use memory of the weights.
    /// Restoring the weights takes some hundredths of a second; a prompt that needs it takes at least half a second.
    pub tokens: usize,
    /// Most bytes of hidden states that an engine keeps on the device. An engine for longer prompts keeps half as many there, or
    /// two blocks if these are larger. In small models copies of hidden states take longer than the GEMMs of a short prompt.
    pub hidden_bytes: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { tokens: 16_384, hidden_bytes: 256 << 20 }
    }
}

/// Bytes of one layer's keys and values.
pub(super) fn scratch_bytes(config: &ModelConfig, tokens: usize) -> usize {
    tokens * 2 * config.kv_width() * 2
}

/// Capacity, in tokens, of keys and values in memory of their own. It is the prompt capacity, unless longer prompts fit into
/// memory of the weights. With several slots nothing is lent, as others decode between the chunks of a prompt.
pub(super) fn tokens_own(config: &ModelConfig, options: &Options, limits: Limits) -> usize {
    let all = options.prompt_capacity.max(1);
    let lent = if options.slots > 1 { 0 } else { weights::lent_bytes(config, options) };
    if scratch_bytes(config, all) <= lent { all.min(limits.tokens) } else { all }
}

/// Tables of angles for the positions of a text: one, and one of local layers.
pub(super) fn angle_tables(config: &ModelConfig) -> usize {
    1 + usize::from(config.local.is_some())
}

/// Rows of angles for layers without position embedding.
pub(super) fn unrotated_rows(config: &ModelConfig, options: &Options) -> usize {
    if config.no_rope.is_empty() { 0 } else { options.block_rows.max(options.step_rows).max(1) }
}

/// Bytes of a prompt's activations without hidden states. The first buffer is for `own` tokens, the next two are for all tokens
/// of a prompt, the others for a block.
pub(super) fn prompt_bytes(config: &ModelConfig, options: &Options, own: usize) -> [usize; 7] {
    let (tokens, rows, element) = (options.prompt_capacity.max(1), options.block_rows.max(1), config.dtype.bytes());
    let read = readable(rows);
    [
        scratch_bytes(config, own),
        (angle_tables(config) * tokens + unrotated_rows(config, options)) * config.head_dim / 2 * 8,
        tokens * 4,
        read * padded(config.hidden) * element,
        rows * config.q_width() * 2,
        read * padded(config.q_width()) * element,
        read * padded(config.intermediate) * element,
    ]
}

/// Tokens of a slot's window: the emitted token and γ drafted ones, or a scored step's rows, which are of one sequence and
/// fit in its buffer besides two pages (docs/design/cache.md). All windows are read back every round.
pub(super) fn window_pitch(options: &Options) -> usize {
    options.step_rows.clamp(GAMMA_MAX + 2, BUFFER_TOKENS - 2 * G)
}
