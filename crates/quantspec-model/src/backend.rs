//! What a device must be able to do, and how a backend is built.
//!
//! The forward pass ([`crate::forward`]) and the engine ([`crate::engine`]) are written once over these traits; the
//! reference, CPU and CUDA backends implement them. A backend owns the weights, the cache of every slot and the activations
//! of the pass under way; the engine owns extents, γ and statistics.

pub use crate::forward::{Executor, Round};
pub use crate::kv_cache::KvCache;
pub use crate::network::{Block, DraftPlan, Network, Pass, Row, Step};
pub use crate::prompt_cache::PromptRows;
pub use crate::sampler::{TokenSampler, Turn};

use crate::draft_cache::Origin;
use quantspec_core::Result;
use quantspec_core::config::{DraftWeights, Planes, Rounding, Sensitive, TargetWeights};
use quantspec_core::plan::pages;

/// How a backend is built.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Sequences held at once.
    pub slots: usize,
    /// Tokens of the longest sequence, prompt and output together.
    pub capacity: usize,
    /// Most pages, of each layer and KV head, that all sequences share ([`Options::pages`]).
    pub pool_pages: usize,
    /// Tokens of the longest prompt, at most `capacity`: prefill holds the hidden states of all of them.
    pub prompt_capacity: usize,
    /// Planes every page keeps.
    pub planes: Planes,
    /// How keys and values are rounded to nibbles.
    pub rounding: Rounding,
    /// How the target's weights are kept.
    pub weights: TargetWeights,
    /// Which draft weights are made; of weights in planes, which are read from the upper one.
    pub draft_weights: DraftWeights,
    /// Matrices that drafts read in 8 bits, of those that `draft_weights` has in 4; none of weights in one plane.
    pub sensitive: Sensitive,
    /// Keep the distributions of a round's drafted tokens: acceptance by rejection compares with those that
    /// [`TokenSampler::propose`] drew from.
    pub rejection: bool,
    /// Rows of the largest step: slots · (γ_max + 1), or more for scoring.
    pub step_rows: usize,
    /// Rows of a prefill block.
    pub block_rows: usize,
    /// Worker threads of a CPU backend.
    pub threads: usize,
}

impl Options {
    /// Pages, of each layer and KV head, that all sequences share: as many as every slot can use, at most `pool_pages`.
    pub fn pages(&self) -> usize {
        self.pool_pages.min(self.slots.saturating_mul(pages(self.capacity)))
    }
}

/// Hooks of a caller into long operations.
pub struct Hooks {
    /// Asked between operations; an error (usually [`quantspec_core::Error::interrupted`]) ends the operation.
    pub poll: Box<dyn FnMut() -> Result<()> + Send>,
    /// Told bytes done and bytes in all while weights are loaded.
    pub loading: Box<dyn FnMut(usize, usize) + Send>,
    /// Told once, by a backend that looked for draft weights on disk, how they came about.
    pub drafts: Box<dyn FnMut(Origin) + Send>,
}

impl Default for Hooks {
    /// Hooks that never interrupt and show nothing.
    fn default() -> Hooks {
        Hooks { poll: Box::new(|| Ok(())), loading: Box::new(|_, _| ()), drafts: Box::new(|_| ()) }
    }
}

/// A device that runs the network. All calls are made from one thread. A failed call leaves the sequences in its slots in an
/// undefined state (close them), never memory, and nothing that a sequence opened there later could meet. A draft step that is not
/// finite leaves only what verification computes anew, the rows of its window: [`crate::forward::draft`] goes on with them.
pub trait Backend: Executor + KvCache + PromptRows {
    /// Bytes the device holds now: weights, draft weights, planes, buffers, workspace.
    fn memory(&self) -> Memory;
}

/// Bytes held by a backend, by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Checkpoint weights as the device keeps them.
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
}

impl Memory {
    /// The same of a backend that only drafts: its weights are draft weights.
    #[must_use]
    pub fn of_draft(self) -> Memory {
        let draft_weights_bytes = self.weights_bytes.saturating_add(self.draft_weights_bytes);
        Memory { weights_bytes: 0, draft_weights_bytes, ..self }
    }

    /// Of two backends together. Saturating, as a plan of any size is asked for.
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
        }
    }
}
