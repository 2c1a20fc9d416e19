//! Model shape and decoding settings: plain data, shared by every crate.

/// Shape and numerics of a Llama-family decoder. Built and checked by `quantspec-model::config`.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// `model_type` of config.json, or the architecture of a GGUF file.
    pub family: String,
    /// Decoder layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the feed-forward network.
    pub intermediate: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Channels of a head; even.
    pub head_dim: usize,
    /// Rows of the embedding and of the LM head.
    pub vocab: usize,
    /// Longest context the checkpoint was trained for, in tokens.
    pub max_positions: usize,
    /// Epsilon of every RMSNorm. For Granite it is the checkpoint's, divided by the square of the residual multiplier
    /// ([`Scales`]).
    pub rms_eps: f32,
    /// Rotary position embedding.
    pub rope: Rope,
    /// True for each layer without position embedding (SmolLM3); empty if every layer has it.
    pub no_rope: Vec<bool>,
    /// Layers whose attention is limited to recent tokens (Gemma 3).
    pub local: Option<Local>,
    /// Constant factors of the network.
    pub scales: Scales,
    /// Of the feed-forward network: activation(gate) · up.
    pub activation: Activation,
    /// Norm weights are stored less 1 (Gemma 3).
    pub norms_less_one: bool,
    /// The LM head is the embedding.
    pub tied_embeddings: bool,
    /// Q, K and V projections have biases.
    pub qkv_bias: bool,
    /// The output projection has a bias.
    pub output_bias: bool,
    /// Gate, up and down projections have biases.
    pub mlp_bias: bool,
    /// RMSNorm of queries and keys before RoPE.
    pub qk_norm: QkNorm,
    /// Where a layer's RMSNorms are.
    pub norms: LayerNorms,
    /// Type of the stored weights.
    pub dtype: Dtype,
    /// Tokens that end a text.
    pub eos: Vec<u32>,
}

impl Default for ModelConfig {
    /// A Llama of one layer with one head of 64 channels, from which other shapes are varied.
    fn default() -> Self {
        ModelConfig {
            family: "llama".to_owned(),
            layers: 1,
            hidden: 64,
            intermediate: 64,
            heads: 1,
            kv_heads: 1,
            head_dim: 64,
            vocab: 64,
            max_positions: 1 << 20,
            rms_eps: 1e-5,
            rope: Rope { theta: 1e4, dim: 64, scaling: RopeScaling::None, query_scale: None },
            no_rope: Vec::new(),
            local: None,
            scales: Scales::NONE,
            activation: Activation::Silu,
            norms_less_one: false,
            tied_embeddings: false,
            qkv_bias: false,
            output_bias: false,
            mlp_bias: false,
            qk_norm: QkNorm::None,
            norms: LayerNorms::Before,
            dtype: Dtype::F32,
            eos: Vec::new(),
        }
    }
}

impl ModelConfig {
    /// Returns true if a layer rotates its queries and keys.
    pub fn rotates(&self, layer: usize) -> bool {
        !self.no_rope.get(layer).copied().unwrap_or(false)
    }

    /// Tokens that a query of a layer sees, including its own; `None` if it sees all before it.
    pub fn reach(&self, layer: usize) -> Option<usize> {
        self.local.as_ref().filter(|local| local.layers.get(layer) == Some(&true)).map(|local| local.reach)
    }

    /// Factor on a query at a position, after its rotation.
    pub fn query_factor(&self, position: usize) -> f32 {
        self.rope.query_scale.map_or(1.0, |scale| scale.at(position))
    }

    /// Query heads that share one key/value head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Width of all query heads together.
    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of all key (or value) heads together.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

/// RMSNorm of queries and keys before RoPE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// None.
    None,
    /// Of each head (Qwen3).
    Heads,
    /// Of all heads together: over the whole projection (OLMo 2). Such a model has no biases.
    Projection,
}

/// Where a layer's RMSNorms are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerNorms {
    /// Before attention and before the feed-forward network.
    Before,
    /// After both, before the residual addition (OLMo 2). The projections read the residual stream as it is, and have no biases.
    After,
    /// Before and after both (Gemma 3). The projections have no biases.
    Both,
}

/// Activation of the feed-forward network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// x · sigmoid(x).
    Silu,
    /// GELU with its tanh approximation.
    Gelu,
}

/// Layers whose queries see recent tokens only.
#[derive(Clone, Debug, PartialEq)]
pub struct Local {
    /// True for each such layer.
    pub layers: Vec<bool>,
    /// Tokens that a query sees, including its own: a multiple of [`Local::UNIT`], at least [`Local::LEAST`].
    pub reach: usize,
    /// Rotation in these layers.
    pub rope: Rope,
}

impl Local {
    /// Tokens of a prefill panel. The reach of a panel's first query begins at a panel border.
    pub const UNIT: usize = 64;
    /// Every query sees its recent tokens in full precision, which are at most 2G − 1 (`core::cache`).
    pub const LEAST: usize = 2 * crate::cache::G;
}

/// Constant factors of a network, all 1 except in Granite and Gemma.
///
/// Granite multiplies the embedding by μ, every branch by ρ before it is added to the residual stream, and divides the logits by
/// s. Here the residual stream is divided by ρ, so branches are added as they are: RMSNorm of a scaled vector is the same if ε is
/// scaled with its square.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scales {
    /// Factor on the embedding: μ/ρ.
    pub embedding: f32,
    /// Factor on the attention scores q·k/√head_dim: √head_dim times Granite's attention multiplier. The cosines and
    /// sines of the angle tables include its root, so queries and keys have it once each.
    pub scores: f64,
    /// Factor on the weight of the final norm: 1/s.
    pub logits: f32,
}

impl Scales {
    /// No factors.
    pub const NONE: Scales = Scales { embedding: 1.0, scores: 1.0, logits: 1.0 };

    /// Of μ, ρ, s, and the factor on the scores.
    pub fn of(embedding: f64, residual: f64, logits: f64, scores: f64) -> Scales {
        Scales { embedding: (embedding / residual) as f32, scores, logits: (1.0 / logits) as f32 }
    }
}

/// Number format of stored weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// bfloat16, 2 bytes.
    Bf16,
    /// IEEE half, 2 bytes.
    F16,
    /// IEEE single, 4 bytes.
    F32,
}

impl Dtype {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Dtype::Bf16 | Dtype::F16 => 2,
            Dtype::F32 => 4,
        }
    }
}

/// Rotary position embedding; names follow Hugging Face's `rope_scaling`.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base θ of the inverse frequencies θ^(−2i/dim).
    pub theta: f64,
    /// Channels of a head that are rotated, from 4 to head_dim; even. In the checkpoint they come first.
    pub dim: usize,
    /// How the frequencies are changed for long contexts.
    pub scaling: RopeScaling,
    /// How queries grow with their position (Ministral 3).
    pub query_scale: Option<QueryScale>,
}

/// Growth of queries with their position, which keeps attention over long texts sharp (introduced by Llama 4). Keys do not grow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueryScale {
    /// β of the factor 1 + β·ln(1 + ⌊position / `original`⌋).
    pub beta: f64,
    /// Context of the pre-training, in tokens; queries within it keep their size.
    pub original: usize,
}

impl QueryScale {
    /// The factor at a position.
    pub fn at(&self, position: usize) -> f32 {
        (1.0 + self.beta * ((position / self.original) as f64).ln_1p()) as f32
    }
}

/// `rope_scaling` of config.json.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Plain RoPE.
    None,
    /// Positions divided by `factor`.
    Linear {
        /// Stretch.
        factor: f64,
    },
    /// NTK-aware base that grows with the sequence length beyond `original`.
    Dynamic {
        /// Stretch.
        factor: f64,
        /// Context of the pre-training, in tokens.
        original: usize,
    },
    /// Llama 3.1: long wavelengths are divided by `factor`, short ones kept, with a smooth ramp between.
    Llama3 {
        /// Stretch.
        factor: f64,
        /// Wavelengths above `original` / `low_freq_factor` are stretched fully.
        low_freq_factor: f64,
        /// Wavelengths below `original` / `high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context of the pre-training, in tokens.
        original: usize,
    },
    /// One stretch per channel pair: LongRoPE (Ding et al. 2024), and GGUF files that store Llama 3's scaling.
    Factors {
        /// Stretch of each channel pair, `[dim / 2]`.
        factors: Vec<f32>,
        /// Factor on cos and sin, which scales the attention logits.
        attention_factor: f64,
    },
    /// YaRN (Peng et al. 2023), with its attention temperature.
    Yarn {
        /// Stretch.
        factor: f64,
        /// Context of the pre-training, in tokens.
        original: usize,
        /// Channels with more rotations over `original` are kept.
        beta_fast: f64,
        /// Channels with fewer rotations over `original` are stretched fully.
        beta_slow: f64,
        /// Factor on cos and sin, which scales the attention logits.
        attention_factor: f64,
        /// Round the ramp's ends to whole channels (Hugging Face's default).
        truncate: bool,
    },
}

/// Which planes an attention call reads for tokens before the buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum View {
    /// Upper nibbles: 4.25 bits per element at head_dim 128.
    Upper,
    /// Both nibbles (INT8): 8.25 bits.
    Both,
    /// Full-precision pages (FP16): 16 bits.
    Full,
}

/// Which weights a pass uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Weights {
    /// The checkpoint's.
    Full,
    /// 4-bit draft weights, with 8-bit activations.
    Draft,
    /// The same with 4-bit activations; matrices read in 8 bits keep 8-bit ones.
    Draft4,
}

impl Weights {
    /// True for draft weights.
    pub const fn is_draft(self) -> bool {
        !matches!(self, Weights::Full)
    }
}

/// Which of the visible pages a draft reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pages {
    /// Every visible page.
    All,
    /// The first page and the newest ones, `n` in total.
    Window(usize),
    /// The first page, the newest, and those with the highest scores (`attend::page_score`): `n` in total per KV head.
    Best(usize),
    /// Of the pages that the end of the prompt sees: the first, the newest, and those that the prompt's last queries attend to
    /// most ([`crate::attend::page_masses`]), `pages` in all per KV head. The choice is kept; pages that become visible later are
    /// all read.
    Snap {
        /// Pages of the prompt.
        pages: usize,
        /// Number of new pages after which the choice is repeated among all visible pages, as by [`Pages::Best`]; 0 is never.
        refresh: usize,
    },
    /// Every visible page; each query head attends to the `n` tokens with the highest scores. `eval` compares choices of pages
    /// with it: it saves no reads, and only CPU backends support it.
    Tokens(usize),
}

impl Pages {
    /// The number of pages; `None` for all.
    pub const fn count(self) -> Option<usize> {
        match self {
            Pages::All | Pages::Tokens(_) => None,
            Pages::Window(n) | Pages::Best(n) | Pages::Snap { pages: n, .. } => Some(n),
        }
    }

    /// Pages that are read of `visible` ones by a sequence whose prompt's end sees `of_prompt`.
    pub fn read(self, of_prompt: usize, visible: usize) -> usize {
        match self {
            Pages::All | Pages::Tokens(_) => visible,
            Pages::Window(n) | Pages::Best(n) => n.min(visible),
            Pages::Snap { pages, refresh } => {
                let new =
                    visible.saturating_sub(of_prompt).checked_rem(refresh).unwrap_or(visible.saturating_sub(of_prompt));
                pages.min(visible - new) + new
            }
        }
    }

    /// True if a choice among `chosen_of` pages must be repeated at `visible` pages.
    pub const fn is_stale(self, chosen_of: usize, visible: usize) -> bool {
        matches!(self, Pages::Snap { refresh, .. } if refresh > 0 && visible.saturating_sub(chosen_of) >= refresh)
    }
}

/// How the target's weights are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum TargetWeights {
    /// As in the checkpoint; drafts have weights of their own ([`DraftWeights`]).
    #[default]
    Checkpoint,
    /// Every linear layer and the head in two nibble planes ([`crate::weights`]). The target reads both planes. Where
    /// [`DraftWeights`] says 4 bits, the draft reads the upper plane; its head reads both. An embedding that is not the head
    /// stays as in the checkpoint.
    Int8,
    /// Linear layers in the upper plane, which target and drafts share. The head and a few matrices, whose precision matters
    /// most, are in both planes (`Part::has_both_planes` of quantspec-model).
    Int4,
}

/// How the draft weights are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DraftWeights {
    /// Every linear layer in 4 bits (group 128), the head in 8.
    Int4,
    /// Gate, up and down projections in 4 bits, the rest full.
    Int4Mlp,
    /// The draft uses the full weights.
    None,
}

/// The sensitive matrices of a model: those that drafts read in 8 bits instead of 4, by kind and in every layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Sensitive(
    /// In the order of [`Sensitive::KINDS`].
    pub [bool; Sensitive::KINDS.len()],
);

impl Sensitive {
    /// Kinds of matrices in the engine: queries, keys and values are one matrix, and so are gate and up.
    pub const KINDS: [&'static str; 4] = ["qkv", "o", "gate-up", "down"];

    /// None.
    pub const NONE: Sensitive = Sensitive([false; Sensitive::KINDS.len()]);

    /// The down projection: the kind whose 8 bits raise acceptance most for their bytes (docs/design/sensitive.md).
    pub const DOWN: Sensitive = Sensitive([false, false, false, true]);

    /// The kinds of a comma list, or "none"; `None` for anything else.
    pub fn named(names: &str) -> Option<Sensitive> {
        let mut found = Sensitive::NONE;
        if names != "none" {
            for name in names.split(',') {
                found.0[Sensitive::KINDS.iter().position(|kind| *kind == name)?] = true;
            }
        }
        Some(found)
    }

    /// The names, as [`Sensitive::named`] accepts them.
    pub fn names(self) -> String {
        let names: Vec<&str> =
            Sensitive::KINDS.into_iter().zip(self.0).filter_map(|(kind, on)| on.then_some(kind)).collect();
        if names.is_empty() { "none".to_owned() } else { names.join(",") }
    }
}

impl DraftWeights {
    /// The kinds of matrices, in the order of [`Sensitive::KINDS`], that drafts read in fewer bits than the target.
    pub const fn kinds(self) -> [bool; Sensitive::KINDS.len()] {
        match self {
            DraftWeights::Int4 => [true; Sensitive::KINDS.len()],
            DraftWeights::Int4Mlp => [false, false, true, true],
            DraftWeights::None => [false; Sensitive::KINDS.len()],
        }
    }
}

/// How keys and values are rounded to nibbles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// One 8-bit rounding on a mid-rise grid, split into two nibbles. It neither clips nor biases.
    Balanced,
    /// Quantises the value, then its error (the paper).
    Paper,
}

/// The planes a cache keeps for every page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Planes {
    /// Upper nibbles and parameters.
    pub upper: bool,
    /// Lower nibbles; only together with `upper`.
    pub lower: bool,
    /// FP16 keys and values.
    pub full: bool,
}

impl Planes {
    /// The smallest set of planes that serves `views`.
    pub fn of(views: &[View]) -> Planes {
        let reads = |view| views.contains(&view);
        Planes { upper: reads(View::Upper) || reads(View::Both), lower: reads(View::Both), full: reads(View::Full) }
    }

    /// Returns true if a cache with these planes can be read in this view.
    pub const fn serve(self, view: View) -> bool {
        match view {
            View::Upper => self.upper,
            View::Both => self.upper && self.lower,
            View::Full => self.full,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kept_choice_of_pages_grows_and_is_refreshed() {
        let snap = |refresh| Pages::Snap { pages: 4, refresh };
        let stale = |refresh, visible| snap(refresh).is_stale(10, visible);
        assert_eq!([stale(3, 12), stale(3, 13), stale(0, 99), stale(3, 9)], [false, true, false, false]);
        assert_eq!([stale(usize::MAX, 99), stale(usize::MAX, usize::MAX)], [false; 2]);
        // Four pages of the ten that the prompt's end sees, and those after the last refresh.
        let read =
            [(0, 10), (0, 13), (2, 13), (3, 13), (0, 3)].map(|(refresh, visible)| snap(refresh).read(10, visible));
        assert_eq!(read, [4, 7, 5, 4, 3]);
        let others = [Pages::All, Pages::Tokens(1), Pages::Best(4), Pages::Window(4), Pages::Best(40)];
        assert_eq!(others.map(|pages| pages.read(10, 13)), [13, 13, 4, 4, 13]);
    }

    #[test]
    fn sensitive_matrices_have_names() {
        for (names, kinds) in [
            ("none", [false; 4]),
            ("down", [false, false, false, true]),
            ("qkv,gate-up", [true, false, true, false]),
            ("qkv,o,gate-up,down", [true; 4]),
        ] {
            assert_eq!(Sensitive::named(names), Some(Sensitive(kinds)));
            assert_eq!(Sensitive(kinds).names(), names);
        }
        assert_eq!(Sensitive::named("down,o,down").map(Sensitive::names), Some("o,down".to_owned()));
        assert_eq!(Sensitive::named("down"), Some(Sensitive::DOWN));
        for wrong in ["", "auto", "up", "down,", "none,down", "Down", " down"] {
            assert_eq!(Sensitive::named(wrong), None, "{wrong:?}");
        }
    }
}
