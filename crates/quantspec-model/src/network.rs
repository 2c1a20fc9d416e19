//! The operations of the network: about ten fused ones, each the size of a GPU kernel.
//!
//! **Target operations are row-invariant to the bit**: a row's result does not depend on the other rows of the pass, on the
//! thread count or on earlier calls. Draft weights and the Upper view may lose precision.

use quantspec_core::Result;
use quantspec_core::config::{ModelConfig, Pages, View, Weights};

/// One token of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Sequence slot.
    pub slot: usize,
    /// Offset in the slot's window: 0 is the emitted token whose keys and values are not cached, i the i-th drafted token.
    pub offset: usize,
    /// Position in the sequence: committed + offset. Its keys and values go to entry `position mod 3G` of the buffer.
    pub position: usize,
}

/// One decode pass over rows of any number of slots. The rows of a slot are adjacent, with consecutive offsets; a row attends
/// to the ones before it through the buffer.
#[derive(Clone, Debug)]
pub struct Step<'a> {
    /// Which weights.
    pub weights: Weights,
    /// View of the pages before `Q(position)`; visibility is applied row by row.
    pub view: View,
    /// Which of the visible pages.
    pub pages: Pages,
    /// True: choose the pages to read (first drafted token of a round). False: keep the slot's last choice, and read pages that
    /// became visible after it.
    /// [`Pages::Snap`] has a rule of its own ([`quantspec_core::attend::SnapScores::is_due`]).
    pub choose_pages: bool,
    /// The rows.
    pub rows: &'a [Row],
}

/// One block of consecutive prompt rows, in the current layer.
#[derive(Clone, Copy, Debug)]
pub struct Block<'a> {
    /// Sequence slot.
    pub slot: usize,
    /// The whole prompt.
    pub prompt: &'a [u32],
    /// First row of the prompt that is computed.
    pub first: usize,
    /// First row of the block.
    pub start: usize,
    /// Rows of the block.
    pub rows: usize,
}

/// Input of a forward operation.
#[derive(Clone, Copy, Debug)]
pub enum Pass<'a> {
    /// Draft or verify rows: attention over the cache.
    Step(&'a Step<'a>),
    /// Prompt rows: exact causal attention over the layer's full-precision keys and values.
    Prefill(Block<'a>),
}

/// The two branches of a layer, each added to the residual stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Branch {
    /// Attention and its output projection.
    Attention,
    /// The feed-forward network.
    Mlp,
}

/// What a draft step of a self-drafting model reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftConfig {
    /// Draft weights.
    pub weights: Weights,
    /// Draft view.
    pub view: View,
    /// Draft pages.
    pub pages: Pages,
}

impl DraftConfig {
    /// Pages of the page window that steps read; `None` if they read other pages, too.
    pub const fn window(&self) -> Option<usize> {
        match (self.pages, self.view) {
            // Pages of an FP16 cache have no scores: the newest are the best.
            (Pages::Window(n), _) | (Pages::Best(n), View::Full) => Some(n),
            _ => None,
        }
    }

    /// Returns true if this draft is worth measuring beside others: a choice of more than two thirds of the `visible` pages saves
    /// too little.
    pub fn leaves_out_enough(&self, visible: usize) -> bool {
        match self.pages {
            Pages::Best(n) | Pages::Window(n) | Pages::Snap { pages: n, .. } => n <= visible * 2 / 3,
            Pages::All | Pages::Tokens(_) => true,
        }
    }
}

/// The network's operations, in the order of [`crate::forward::step`] and [`crate::forward::prefill`].
///
/// A GPU queues its work. It reports values that are not finite with the next result that the host reads:
/// [`crate::sampler::TokenSampler::first`], [`crate::sampler::TokenSampler::judge`],
/// [`crate::sampler::TokenSampler::logits`] or [`Network::end_chunk`].
pub trait Network: Send {
    /// The model's shape.
    fn config(&self) -> &ModelConfig;

    /// Hidden state of each row := its token's embedding. A step reads tokens from windows, a prefill block from the prompt.
    ///
    /// Prefill is layer-major: a backend keeps the hidden states of all embedded prompt rows between layers. The first
    /// embedded block begins a prompt; the rows before it are imported ([`crate::prompt_rows::PromptRows::import_rows`]).
    /// The last layer may divide the rows into other blocks. Only those of the last page run more than [`Network::qkv`].
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] if the backend has no such rows, slots, tokens or planes, or a thread
    /// panicked. [`quantspec_core::ErrorKind::DoesNotFit`] if a row or the prompt exceeds its slot (CPU). Device errors of a
    /// GPU.
    fn embed(&mut self, pass: &Pass) -> Result<()>;

    /// Returns true if steps may read [`Pages::Tokens`].
    fn reads_tokens(&self) -> bool {
        false
    }

    /// RMSNorm, Q/K/V projections, q/k norms, and RoPE at each row's position; norms and biases only if the model has them.
    /// A step stores keys and values in the buffer, where they overwrite drafted ones; a prefill block in the layer's scratch.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::NotFinite`] if keys or values overflow f16; a GPU reports this later.
    /// [`quantspec_core::ErrorKind::Internal`] for a block without preparation, or if a thread panicked. Device errors of a
    /// GPU, and those of [`crate::backend::Hooks::poll`].
    fn qkv(&mut self, layer: usize, pass: &Pass) -> Result<()>;

    /// Attention of every row. A step reads pages by `step.view` and `step.pages`, and the buffer by the visibility law. A
    /// prefill block reads the layer's scratch causally.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] if planes or pages of the view are not kept, for a block without preparation,
    /// or if a thread panicked. Device errors of a GPU, and those of [`crate::backend::Hooks::poll`].
    fn attend(&mut self, layer: usize, pass: &Pass) -> Result<()>;

    /// Output projection; [`Network::reduce_residual`] adds it to the hidden state.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] for a block without preparation, or if a thread panicked. Device errors of a
    /// GPU, and those of [`crate::backend::Hooks::poll`]. In the reference, [`quantspec_core::ErrorKind::NotFinite`] if
    /// inputs of draft weights are NaN or infinite.
    fn output(&mut self, layer: usize, pass: &Pass) -> Result<()>;

    /// Adds the last projection, that of `branch`, to each row's hidden state. If the model has norms after branches, the
    /// projection is normalised first. A backend may fuse the addition into the projection or the following norm, and do
    /// nothing here.
    ///
    /// # Errors
    /// None but those of defects, and device errors of a GPU.
    fn reduce_residual(&mut self, layer: usize, branch: Branch, pass: &Pass) -> Result<()>;

    /// RMSNorm if the model has it, gate and up projections, activation(gate) · up.
    ///
    /// # Errors
    /// As [`Network::output`].
    fn gate_up(&mut self, layer: usize, pass: &Pass) -> Result<()>;

    /// Down projection; [`Network::reduce_residual`] adds it to the hidden state.
    ///
    /// # Errors
    /// As [`Network::output`].
    fn down(&mut self, layer: usize, pass: &Pass) -> Result<()>;

    /// Ends a prefill layer: quantises the prompt's complete pages, except shared ones, and copies the last (up to 3G) tokens
    /// to the buffer. With [`crate::backend::Options::page_masses`] it keeps the masses of the pages that a query after the
    /// prompt sees.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::NotFinite`] if keys or values cannot be quantised; a GPU reports this later.
    /// [`quantspec_core::ErrorKind::Internal`] if the slot is not open or holds fewer tokens, or if a thread panicked. Device
    /// errors of a GPU, and those of [`crate::backend::Hooks::poll`].
    fn store(&mut self, layer: usize, slot: usize, tokens: usize) -> Result<()>;

    /// Ends a chunk of an unfinished prefill, or steps outside a round: waits for them and reports their errors, so that they
    /// do not appear in steps of other slots. The provided method is for backends that report errors immediately.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::NotFinite`] if keys or values of the prompt overflow f16. Device errors of a GPU.
    fn end_chunk(&mut self) -> Result<()> {
        Ok(())
    }

    /// Final norm and LM head. A step yields logits for every row; a prefill block only for its last row.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::NotFinite`] if [`quantspec_core::sample::check_finite`] refuses a row; −∞ masks a token
    /// and is allowed. A GPU reports this later. [`quantspec_core::ErrorKind::Internal`] if a thread panicked. Device errors of
    /// a GPU.
    fn head(&mut self, pass: &Pass) -> Result<()>;

    /// Called between operations. An [`quantspec_core::ErrorKind::Interrupted`] error ends the pass. Long operations poll as
    /// well.
    ///
    /// # Errors
    /// Those of [`crate::backend::Hooks::poll`].
    fn poll(&mut self) -> Result<()>;
}
