//! The `Backend` trait, its options, hooks and memory report.
//!
//! The forward pass ([`crate::forward`]) and the engine ([`crate::engine`]) are generic over these traits; the reference, CPU
//! and CUDA backends implement them. A backend owns the weights, the cache of every slot and the activations of the current
//! pass. The engine owns extents, γ and statistics.

pub use crate::forward::{DeviceSeconds, Executor, RoundSteps};
pub use crate::host_sampler::{HostSampler, SamplesOnHost};
pub use crate::kv_cache::KvCache;
pub use crate::network::{Block, Branch, DraftConfig, Network, Pass, Row, Step};
pub use crate::prompt_rows::{HeldRows, PromptRows};
pub use crate::sampler::{TokenSampler, Turn};

use crate::draft_cache::Origin;
use quantspec_core::Result;
use quantspec_core::ablation::Ablation;
use quantspec_core::cache::GAMMA_MAX;
use quantspec_core::config::{DraftWeights, Planes, Rounding, Sensitive, TargetWeights};
use quantspec_core::plan::pages;

/// How a backend is built.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Concurrent sequences.
    pub slots: usize,
    /// Tokens of the longest sequence, prompt and output together.
    pub capacity: usize,
    /// Upper limit for [`Options::pages`].
    pub pool_pages: usize,
    /// Most pages that a sequence keeps ([`quantspec_core::page_pool::PagePool::keeping`]), if all steps read a page
    /// window; else `usize::MAX`.
    pub kept_pages: usize,
    /// Tokens of the longest prompt, at most `capacity`. Prefill holds the hidden states of the whole prompt.
    pub prompt_capacity: usize,
    /// Planes every page keeps.
    pub planes: Planes,
    /// How keys and values are rounded to nibbles.
    pub rounding: Rounding,
    /// Views Upper and Both read f16 pages with these groups instead of nibbles. For `eval`; GPUs do not support it.
    pub ablation: Option<Ablation>,
    /// How the target's weights are kept.
    pub weights: TargetWeights,
    /// Which draft weights are made. If the target's weights are in planes, draft weights are read from the upper plane.
    pub draft_weights: DraftWeights,
    /// Matrices that drafts read in 8 bits, among those that `draft_weights` has in 4; none with weights in one plane.
    pub sensitive: Sensitive,
    /// Keep the distributions that [`TokenSampler::propose`] draws from; acceptance by rejection needs them.
    pub rejection: bool,
    /// Most drafted tokens of a sequence, if acceptance is by rejection, else 0. A backend that samples on the host has their
    /// distributions in memory.
    pub rejection_gamma: usize,
    /// Keep the masses of each prompt's pages, by which [`quantspec_core::config::Pages::Snap`] chooses. Without them such
    /// drafts read every page.
    pub page_masses: bool,
    /// Rows of the largest step: slots · (γ_max + 1), or more for scoring.
    pub step_rows: usize,
    /// Rows of a prefill block.
    pub block_rows: usize,
    /// Worker threads of a CPU backend.
    pub threads: usize,
}

impl Options {
    /// `slots` sequences of up to `capacity` tokens each, with the checkpoint's weights, 4-bit draft weights, every plane,
    /// room for any γ, and nothing that only some methods need.
    pub fn new(slots: usize, capacity: usize) -> Options {
        Options {
            slots,
            capacity,
            pool_pages: usize::MAX,
            kept_pages: usize::MAX,
            prompt_capacity: capacity,
            planes: Planes { upper: true, lower: true, full: true },
            rounding: Rounding::Balanced,
            ablation: None,
            weights: TargetWeights::Checkpoint,
            draft_weights: DraftWeights::Int4,
            sensitive: Sensitive::NONE,
            rejection: false,
            rejection_gamma: 0,
            page_masses: false,
            step_rows: slots * (GAMMA_MAX + 1),
            block_rows: 256,
            threads: 1,
        }
    }

    /// Pages, per layer and KV head, that all sequences share: as many as every slot can use, at most `pool_pages`.
    pub fn pages(&self) -> usize {
        self.pool_pages.min(self.slots.saturating_mul(pages(self.capacity).min(self.kept_pages)))
    }
}

/// Callbacks from long operations.
pub struct Hooks {
    /// Called between operations. An error (usually [`quantspec_core::Error::interrupted`]) ends the operation.
    pub poll: Box<dyn FnMut() -> Result<()> + Send>,
    /// Called with loaded bytes and total bytes while weights load.
    pub loading: Box<dyn FnMut(usize, usize) + Send>,
    /// Called once with the origin of the draft weights, by a backend that looked for them on disk.
    pub drafts: Box<dyn FnMut(Origin) + Send>,
}

impl Default for Hooks {
    /// Hooks that never interrupt and report nothing.
    fn default() -> Hooks {
        Hooks { poll: Box::new(|| Ok(())), loading: Box::new(|_, _| ()), drafts: Box::new(|_| ()) }
    }
}

/// A device that runs the network. All calls come from one thread.
///
/// After a failed call the sequences in the backend's slots are undefined and must be closed. Memory stays sound, and a
/// sequence opened later in the same slot is not affected.
///
/// The exception is a step that fails by its tokens ([`quantspec_core::ErrorKind::is_of_tokens`]): only the rows of its windows
/// are undefined, and the next verification computes them anew. So [`crate::forward::draft`] continues, and a verification can be
/// repeated without drafted tokens, or for each sequence alone.
pub trait Backend: Executor + KvCache + PromptRows {
    /// Bytes the device holds: weights, draft weights, planes, buffers, workspace.
    fn memory(&self) -> Memory;

    /// Bytes of weights that a draft step reads: separate draft weights, the planes that it reads of the target's, and matrices
    /// in the checkpoint's precision.
    fn draft_read_bytes(&self) -> usize;
}

/// Bytes held by a backend, by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Checkpoint weights in the device's format.
    pub weights_bytes: usize,
    /// Draft weights.
    pub draft_weights_bytes: usize,
    /// Upper nibbles and quantisation parameters.
    pub cache_upper_bytes: usize,
    /// Lower nibbles.
    pub cache_lower_bytes: usize,
    /// FP16 pages.
    pub cache_full_bytes: usize,
    /// Rings of recent tokens.
    pub buffer_bytes: usize,
    /// Activations, logits, prefill scratch.
    pub workspace_bytes: usize,
    /// Page-locked host memory of a GPU's weights and prompts, in addition to the device's.
    pub host_bytes: usize,
}

impl Memory {
    /// The memory of a backend that only drafts: its weights count as draft weights.
    #[must_use]
    pub fn of_draft(self) -> Memory {
        let draft_weights_bytes = self.weights_bytes.saturating_add(self.draft_weights_bytes);
        Memory { weights_bytes: 0, draft_weights_bytes, ..self }
    }

    /// Bytes on the device, saturating: each part of a plan may have any size, and the sum must not wrap to one that fits.
    pub fn device_bytes(&self) -> usize {
        [
            self.weights_bytes,
            self.draft_weights_bytes,
            self.cache_upper_bytes,
            self.cache_lower_bytes,
            self.cache_full_bytes,
            self.buffer_bytes,
            self.workspace_bytes,
        ]
        .into_iter()
        .fold(0, usize::saturating_add)
    }

    /// The sum of two backends, saturating: a plan may have any size.
    #[must_use]
    pub fn and(self, other: Memory) -> Memory {
        Memory {
            weights_bytes: self.weights_bytes.saturating_add(other.weights_bytes),
            draft_weights_bytes: self.draft_weights_bytes.saturating_add(other.draft_weights_bytes),
            cache_upper_bytes: self.cache_upper_bytes.saturating_add(other.cache_upper_bytes),
            cache_lower_bytes: self.cache_lower_bytes.saturating_add(other.cache_lower_bytes),
            cache_full_bytes: self.cache_full_bytes.saturating_add(other.cache_full_bytes),
            buffer_bytes: self.buffer_bytes.saturating_add(other.buffer_bytes),
            workspace_bytes: self.workspace_bytes.saturating_add(other.workspace_bytes),
            host_bytes: self.host_bytes.saturating_add(other.host_bytes),
        }
    }
}
