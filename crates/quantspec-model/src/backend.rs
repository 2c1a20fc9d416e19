//! What a device must be able to do: about ten fused operations, at the grain a GPU wants.
//!
//! The forward pass ([`crate::forward`]) and the engine ([`crate::engine`]) are written once over this trait; the
//! reference, CPU and CUDA backends implement it. A backend owns the weights, the cache of every slot and the activations
//! of the pass under way; the engine owns extents, γ and statistics.
//!
//! **Target operations are row-invariant to the bit**: what a row yields never depends on the other rows of the pass, on the
//! thread count or on earlier calls. Draft weights and the Upper view may be lossy in any way.

use crate::draft_cache::Origin;
use quantspec_core::Result;
use quantspec_core::config::{DraftWeights, ModelConfig, Pages, Planes, Rounding, TargetWeights, View, Weights};
use quantspec_core::policy::Stop;
use quantspec_core::sample::Sampler;
use quantspec_core::verify::{DraftDistribution, Verdict};

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
    /// Choose the pages anew (first drafted token of a round); otherwise the slot's last choice stays.
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

/// How a backend is built.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Sequences held at once.
    pub slots: usize,
    /// Tokens of the longest sequence, prompt and output together.
    pub capacity: usize,
    /// Tokens of the longest prompt, at most `capacity`: prefill holds the hidden states of all of them.
    pub prompt_capacity: usize,
    /// Planes every page keeps.
    pub planes: Planes,
    /// How keys and values are rounded to nibbles.
    pub rounding: Rounding,
    /// How the target's weights are kept.
    pub weights: TargetWeights,
    /// Which draft weights are made; with [`TargetWeights::Int8`], which are read from the upper plane.
    pub draft_weights: DraftWeights,
    /// Keep the distributions of a round's drafted tokens: acceptance by rejection compares with those that
    /// [`Backend::propose`] drew from.
    pub rejection: bool,
    /// Rows of the largest step: slots · (γ_max + 1), or more for scoring.
    pub step_rows: usize,
    /// Rows of a prefill block.
    pub block_rows: usize,
    /// Worker threads of a CPU backend.
    pub threads: usize,
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

/// What one slot does in a round.
#[derive(Clone, Debug)]
pub struct Turn {
    /// Sequence slot.
    pub slot: usize,
    /// Committed tokens.
    pub committed: usize,
    /// Tokens to draft, 0..=GAMMA_MAX; after the draft, tokens that were drafted.
    pub gamma: usize,
    /// When to draft fewer, where leads are looked at.
    pub stop: Option<Stop>,
    /// Leads of the drafted tokens; empty where the backend did not look.
    pub leads: Vec<f32>,
    /// What the drafted tokens were drawn from.
    pub q: DraftDistribution,
    /// How tokens are chosen and accepted.
    pub sampler: Sampler,
}

impl Turn {
    /// A turn of γ tokens that no lead ends, with nothing drafted.
    pub fn new(slot: usize, committed: usize, gamma: usize, sampler: Sampler) -> Turn {
        Turn { slot, committed, gamma, stop: None, leads: Vec::new(), q: DraftDistribution::Kept, sampler }
    }

    /// Notes that the token just drafted led its runner-up by `lead` logits. The draft ends with it where it has become unlikely enough that all of
    /// its tokens stand.
    pub fn drafted(&mut self, lead: f32) {
        // A draft that computed no number leads by nothing.
        self.leads.push(if lead.is_nan() { 0.0 } else { lead });
        let Some(stop) = self.stop else { return };
        let all: f64 = self.leads.iter().map(|&lead| stop.chance(lead)).product();
        if all < stop.enough {
            self.gamma = self.leads.len();
        }
    }
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

/// A device that runs the network. All calls are made from one thread. A failed call leaves the sequences in its slots in an
/// undefined state (close them), never memory, and nothing that a sequence opened there later could meet. A draft step that is not
/// finite leaves only what verification computes anew, the rows of its window: [`crate::forward::draft`] goes on with them.
pub trait Backend: Send {
    /// Whether [`Backend::draft`] tells the leads of one sequence's tokens, and ends its draft by them.
    const LEADS: bool = false;

    /// The model's shape.
    fn config(&self) -> &ModelConfig;

    /// Reserves pages and a buffer for a sequence of up to `capacity` tokens.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::DoesNotFit`] where `capacity` is beyond [`Options::capacity`],
    /// [`quantspec_core::ErrorKind::Internal`] where there is no such slot. The reference returns the latter for both, and
    /// for a slot that is open. Device errors of a GPU.
    fn open(&mut self, slot: usize, capacity: usize) -> Result<()>;

    /// Frees what [`Backend::open`] reserved.
    fn close(&mut self, slot: usize);

    /// Puts known tokens into the slot's window from offset 0 on: the last emitted token, and tokens to be verified that
    /// this backend did not draft, or scored. A draft that was left to [`Backend::verify`] is forgotten.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] where the slot is not open or its window holds fewer tokens.
    fn set_window(&mut self, slot: usize, tokens: &[u32]) -> Result<()>;

    /// The slot's window, `n` tokens from offset 0.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] where the slot is not open or its window holds fewer tokens. Device errors of
    /// a GPU.
    fn window(&mut self, slot: usize, n: usize) -> Result<Vec<u32>>;

    /// Hidden state of each row := its token's embedding. A step reads tokens from windows, a prefill block from the prompt.
    /// Prefill is layer-major: a backend keeps the hidden states of all prompt rows between layers.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] where the backend has no such rows, slots, tokens or planes, or its threads
    /// panicked. [`quantspec_core::ErrorKind::DoesNotFit`] where a row or the prompt is beyond its slot (CPU). Device errors
    /// of a GPU.
    fn embed(&mut self, pass: &Pass) -> Result<()>;

    /// RMSNorm, Q/K/V projections and biases, per-head q/k norms where the model has them, RoPE at each row's position; a
    /// step's keys and values go to the buffer (overwriting drafted ones), a prefill block's to the layer's scratch.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::NotFinite`] where keys or values are beyond half precision, which a GPU says in
    /// [`Backend::first`] or [`Backend::judge`]. [`quantspec_core::ErrorKind::Internal`] for a block that was not prepared
    /// for, and where threads panicked. Device errors of a GPU, and those of [`Hooks::poll`].
    fn qkv(&mut self, layer: usize, pass: &Pass) -> Result<()>;

    /// Attention of every row. A step reads pages by `step.view` and `step.pages` and the buffer by the visibility law; a
    /// prefill block reads the layer's scratch causally.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] where planes or pages of the view are not kept, for a block that was not
    /// prepared for, and where threads panicked. Device errors of a GPU, and those of [`Hooks::poll`].
    fn attend(&mut self, layer: usize, pass: &Pass) -> Result<()>;

    /// Output projection, added to the hidden state.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] for a block that was not prepared for, and where threads panicked. Device
    /// errors of a GPU, those of [`Hooks::poll`], and in the reference [`quantspec_core::ErrorKind::NotFinite`] where inputs
    /// of draft weights are NaN or infinite.
    fn output(&mut self, layer: usize, pass: &Pass) -> Result<()>;

    /// RMSNorm, gate and up projections, SiLU(gate) · up.
    ///
    /// # Errors
    /// As [`Backend::output`].
    fn gate_up(&mut self, layer: usize, pass: &Pass) -> Result<()>;

    /// Down projection, added to the hidden state.
    ///
    /// # Errors
    /// As [`Backend::output`].
    fn down(&mut self, layer: usize, pass: &Pass) -> Result<()>;

    /// Ends a prefill layer: quantises the prompt's complete pages and copies the last (up to 3G) tokens to the buffer.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::NotFinite`] where keys or values cannot be quantised, which a GPU says in
    /// [`Backend::first`]. [`quantspec_core::ErrorKind::Internal`] where the slot is not open or holds fewer tokens, and
    /// where threads panicked. Device errors of a GPU, and those of [`Hooks::poll`].
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
    /// [`Backend::first`] or [`Backend::judge`]: −∞ masks a token and is allowed. [`quantspec_core::ErrorKind::Internal`] where threads panicked. Device errors of a GPU.
    fn head(&mut self, pass: &Pass) -> Result<()>;

    /// The logits of row `row` of the last [`Backend::head`] (a prefill block has one row), `[vocab]`, unwarped.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] where there is no such row. Device errors of a GPU.
    fn logits(&mut self, row: usize) -> Result<Vec<f32>>;

    /// Quantises `page` of the slot from the buffer, in all layers.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] where the slot is not open or the page is beyond it, and where threads
    /// panicked. [`quantspec_core::ErrorKind::NotFinite`] where the page cannot be quantised, which a GPU says in
    /// [`Backend::judge`]. Device errors of a GPU, and those of [`Hooks::poll`].
    fn flush(&mut self, slot: usize, page: usize) -> Result<()>;

    /// Samples the token after a prefill block from the last head's only row, at position `prompt.len()`.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::NotFinite`] where no token can be chosen, and on a GPU where keys or values of the prompt
    /// are beyond half precision. On a GPU [`quantspec_core::ErrorKind::Internal`] where there is no such slot, and device
    /// errors.
    fn first(&mut self, slot: usize, position: usize, sampler: &Sampler) -> Result<u32>;

    /// Chooses the next token of every row of a draft step (after [`Backend::head`]) and writes it into the window at
    /// `row.offset + 1`; keeps q where the sampler's acceptance rule needs it. `turns` holds the turn of every slot.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] where a row's slot has no turn or its window no room, and on a GPU where
    /// [`Options::rejection`] was not set. Device errors of a GPU.
    fn propose(&mut self, step: &Step, turns: &[Turn]) -> Result<()>;

    /// By how much, in logits, the slot's last proposed token led its runner-up: what the provided [`Backend::draft`] tells.
    fn lead(&self, _slot: usize) -> f32 {
        f32::INFINITY
    }

    /// After the head of a verify step: accepts the longest valid prefix of each turn's drafted tokens and chooses the token
    /// after it. One verdict per turn, in order.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::NotFinite`] where no token can be chosen, and on a GPU where keys or values since the
    /// last look are beyond half precision. [`quantspec_core::ErrorKind::Internal`] where rows, drafted tokens or kept
    /// distributions do not match the turns. Device errors of a GPU.
    fn judge(&mut self, step: &Step, turns: &[Turn]) -> Result<Vec<Verdict>>;

    /// Drafts for every turn, and sets leads where they are looked at, and γ of one that ends early. The provided method runs one step per
    /// drafted token; a backend may also leave that to the verification that follows, and say there what it took
    /// ([`Backend::draft_seconds`]).
    ///
    /// # Errors
    /// Those of [`crate::forward::draft`] and of [`Hooks::poll`]. A backend that leaves the draft to [`Backend::verify`]
    /// returns them there.
    fn draft(&mut self, plan: &DraftPlan, turns: &mut [Turn]) -> Result<()>
    where
        Self: Sized,
    {
        crate::forward::draft(self, plan, turns)
    }

    /// Verifies every turn's window in one pass and judges it.
    ///
    /// # Errors
    /// Those of [`crate::forward::verify`] and of [`Hooks::poll`], and those of a draft that was left to it.
    fn verify(&mut self, view: View, turns: &[Turn]) -> Result<Vec<Verdict>>
    where
        Self: Sized,
    {
        crate::forward::verify(self, view, turns)
    }

    /// Seconds that the last verification spent drafting, where [`Backend::draft`] only notes what is to be drafted.
    ///
    /// # Errors
    /// Device errors of a GPU whose clock is read. The provided method has none.
    fn draft_seconds(&mut self) -> Result<Option<f64>> {
        Ok(None)
    }

    /// Called between operations: an [`quantspec_core::ErrorKind::Interrupted`] error ends the pass. Long operations poll it too.
    ///
    /// # Errors
    /// Those of [`Hooks::poll`].
    fn poll(&mut self) -> Result<()>;

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
