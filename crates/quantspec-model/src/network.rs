//! The operations of the network: about ten fused ones, at the grain a GPU wants.
//!
//! **Target operations are row-invariant to the bit**: what a row yields never depends on the other rows of the pass, on the
//! thread count or on earlier calls. Draft weights and the Upper view may be lossy in any way.

use quantspec_core::Result;
use quantspec_core::config::{ModelConfig, Pages, View, Weights};

/// One token of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Sequence slot.
    pub slot: usize,
    /// Place in the slot's window: 0 is the emitted token whose keys and values are not cached, i the i-th drafted token.
    pub offset: usize,
    /// Position in the sequence: committed + offset. Its keys and values go to buffer slot `position mod 3G`.
    pub position: usize,
}

/// One decode pass over rows of any number of slots; rows of a slot are neighbours with consecutive offsets, so a row attends
/// to the rows before it through the buffer.
#[derive(Clone, Debug)]
pub struct Step<'a> {
    /// Which weights.
    pub weights: Weights,
    /// Which view of the pages before `Q(position)`; the law is applied row by row.
    pub view: View,
    /// Which of the visible pages.
    pub pages: Pages,
    /// Choose the pages anew (first drafted token of a round); otherwise the slot's last choice stays. [`Pages::Snap`] says itself when
    /// it chooses.
    pub choose_pages: bool,
    /// The rows.
    pub rows: &'a [Row],
}

/// One block of consecutive prompt rows, in the layer under way.
#[derive(Clone, Copy, Debug)]
pub struct Block<'a> {
    /// Sequence slot.
    pub slot: usize,
    /// The whole prompt.
    pub prompt: &'a [u32],
    /// First row of the block.
    pub start: usize,
    /// Rows of the block.
    pub rows: usize,
}

/// What a forward operation works on.
#[derive(Clone, Copy, Debug)]
pub enum Pass<'a> {
    /// Draft or verify rows: attention over the cache.
    Step(&'a Step<'a>),
    /// Prompt rows: exact causal attention over the layer's full-precision keys and values.
    Prefill(Block<'a>),
}

/// How the model drafts for itself: what a draft step reads of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftPlan {
    /// Draft weights.
    pub weights: Weights,
    /// Draft view.
    pub view: View,
    /// Draft pages.
    pub pages: Pages,
}

impl DraftPlan {
    /// Whether it is worth trying as a candidate: pages that leave out less than half of the `visible` ones save too little. The first candidate always is.
    pub fn is_usable(&self, candidate: usize, visible: usize) -> bool {
        match self.pages {
            Pages::Best(n) | Pages::Window(n) | Pages::Snap { pages: n, .. } => candidate == 0 || 2 * n <= visible,
            Pages::All | Pages::Tokens(_) => true,
        }
    }
}

/// Runs the network operation by operation, in the order of [`crate::forward::step`] and [`crate::forward::prefill`].
pub trait Network: Send {
    /// The model's shape.
    fn config(&self) -> &ModelConfig;

    /// Hidden state of each row := its token's embedding. A step reads tokens from windows, a prefill block from the prompt.
    /// Prefill is layer-major: a backend keeps the hidden states of all embedded prompt rows between layers. The first block that is
    /// embedded begins a prompt; the rows before it are imported ([`crate::prompt_cache::PromptRows::import_rows`]).
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] where the backend has no such rows, slots, tokens or planes, or its threads
    /// panicked. [`quantspec_core::ErrorKind::DoesNotFit`] where a row or the prompt is beyond its slot (CPU). Device errors
    /// of a GPU.
    fn embed(&mut self, pass: &Pass) -> Result<()>;

    /// Whether steps may ask for [`Pages::Tokens`].
    fn reads_tokens(&self) -> bool {
        false
    }

    /// RMSNorm, Q/K/V projections and biases, per-head q/k norms where the model has them, RoPE at each row's position; a
    /// step's keys and values go to the buffer (overwriting drafted ones), a prefill block's to the layer's scratch.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::NotFinite`] where keys or values are beyond half precision, which a GPU says in
    /// [`crate::sampler::TokenSampler::first`] or [`crate::sampler::TokenSampler::judge`]. [`quantspec_core::ErrorKind::Internal`] for a block that was not prepared
    /// for, and where threads panicked. Device errors of a GPU, and those of [`crate::backend::Hooks::poll`].
    fn qkv(&mut self, layer: usize, pass: &Pass) -> Result<()>;

    /// Attention of every row. A step reads pages by `step.view` and `step.pages` and the buffer by the visibility law; a
    /// prefill block reads the layer's scratch causally.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] where planes or pages of the view are not kept, for a block that was not
    /// prepared for, and where threads panicked. Device errors of a GPU, and those of [`crate::backend::Hooks::poll`].
    fn attend(&mut self, layer: usize, pass: &Pass) -> Result<()>;

    /// Output projection, which [`Network::reduce_residual`] adds to the hidden state.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] for a block that was not prepared for, and where threads panicked. Device
    /// errors of a GPU, those of [`crate::backend::Hooks::poll`], and in the reference [`quantspec_core::ErrorKind::NotFinite`] where inputs
    /// of draft weights are NaN or infinite.
    fn output(&mut self, layer: usize, pass: &Pass) -> Result<()>;

    /// Hidden state of each row += the projection just computed. A backend may fuse the addition into the projection, and do nothing here,
    /// or into the norm that follows.
    ///
    /// # Errors
    /// None but those of defects.
    fn reduce_residual(&mut self, pass: &Pass) -> Result<()>;

    /// RMSNorm, gate and up projections, SiLU(gate) · up.
    ///
    /// # Errors
    /// As [`Network::output`].
    fn gate_up(&mut self, layer: usize, pass: &Pass) -> Result<()>;

    /// Down projection, which [`Network::reduce_residual`] adds to the hidden state.
    ///
    /// # Errors
    /// As [`Network::output`].
    fn down(&mut self, layer: usize, pass: &Pass) -> Result<()>;

    /// Ends a prefill layer: quantises the prompt's complete pages and copies the last (up to 3G) tokens to the buffer. With
    /// [`crate::backend::Options::page_masses`] it keeps the attention that the last queries paid to the pages that a query after them sees.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::NotFinite`] where keys or values cannot be quantised, which a GPU says in
    /// [`crate::sampler::TokenSampler::first`]. [`quantspec_core::ErrorKind::Internal`] where the slot is not open or holds fewer tokens, and
    /// where threads panicked. Device errors of a GPU, and those of [`crate::backend::Hooks::poll`].
    fn store(&mut self, layer: usize, slot: usize, tokens: usize) -> Result<()>;

    /// Ends a chunk of a prefill that goes on later: waits for it, and says what it found. Steps of other slots may follow, so
    /// nothing that the prompt flagged may be taken for theirs. The provided method is for backends that say so at once.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::NotFinite`] where keys or values of the prompt are beyond half precision. Device errors of
    /// a GPU.
    fn end_chunk(&mut self) -> Result<()> {
        Ok(())
    }

    /// Final norm and head. A step yields logits for every row; a prefill block only for its last row.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::NotFinite`] where [`quantspec_core::sample::check_finite`] refuses a row, which a GPU says in
    /// [`crate::sampler::TokenSampler::first`] or [`crate::sampler::TokenSampler::judge`]: −∞ masks a token and is allowed. [`quantspec_core::ErrorKind::Internal`] where threads panicked. Device errors of a GPU.
    fn head(&mut self, pass: &Pass) -> Result<()>;

    /// Called between operations: an [`quantspec_core::ErrorKind::Interrupted`] error ends the pass. Long operations poll it too.
    ///
    /// # Errors
    /// Those of [`crate::backend::Hooks::poll`].
    fn poll(&mut self) -> Result<()>;
}
