//! The weights of a network, named independently of file formats.

use quantspec_core::config::{LayerNorms, ModelConfig, QkNorm, Sensitive, TargetWeights};

/// A weight of the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// Token embedding, `[vocab][hidden]`.
    Embedding,
    /// RMSNorm before the head, `[hidden]`.
    FinalNorm,
    /// LM head, `[vocab][hidden]`; for a tied model the embedding.
    Head,
    /// A weight of one decoder layer.
    Layer(usize, LayerPart),
}

/// A weight of a decoder layer; matrices are `[outputs][inputs]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayerPart {
    /// RMSNorm before attention, `[hidden]`.
    AttentionNorm,
    /// Query projection, `[q_width][hidden]`.
    Q,
    /// Key projection, `[kv_width][hidden]`.
    K,
    /// Value projection, `[kv_width][hidden]`.
    V,
    /// Output projection, `[hidden][q_width]`.
    Output,
    /// Bias of Q, `[q_width]`.
    QBias,
    /// Bias of K, `[kv_width]`.
    KBias,
    /// Bias of V, `[kv_width]`.
    VBias,
    /// Bias of the output projection, `[hidden]`.
    OutputBias,
    /// RMSNorm of every query head, `[head_dim]`, or of all, `[q_width]`.
    QNorm,
    /// RMSNorm of every key head, `[head_dim]`, or of all, `[kv_width]`.
    KNorm,
    /// RMSNorm of the output projection's result, `[hidden]`.
    AttentionOutputNorm,
    /// RMSNorm before the feed-forward network, `[hidden]`.
    MlpNorm,
    /// Gate projection, `[intermediate][hidden]`.
    Gate,
    /// Up projection, `[intermediate][hidden]`.
    Up,
    /// Down projection, `[hidden][intermediate]`.
    Down,
    /// Bias of the gate projection, `[intermediate]`.
    GateBias,
    /// Bias of the up projection, `[intermediate]`.
    UpBias,
    /// Bias of the down projection, `[hidden]`.
    DownBias,
    /// RMSNorm of the down projection's result, `[hidden]`.
    MlpOutputNorm,
}

use LayerPart::*;

/// Every part of a layer, in the order of computation.
pub(crate) const LAYER_PARTS: [LayerPart; 20] = [
    AttentionNorm,
    Q,
    K,
    V,
    QBias,
    KBias,
    VBias,
    QNorm,
    KNorm,
    Output,
    OutputBias,
    AttentionOutputNorm,
    MlpNorm,
    Gate,
    Up,
    GateBias,
    UpBias,
    Down,
    DownBias,
    MlpOutputNorm,
];

impl LayerPart {
    /// The matrices, in the order of computation; all other parts are vectors.
    pub const MATRICES: [LayerPart; 7] = [Q, K, V, Output, Gate, Up, Down];

    /// Returns true if a model of this configuration has the part.
    pub fn exists(self, config: &ModelConfig) -> bool {
        match self {
            QBias | KBias | VBias => config.qkv_bias,
            OutputBias => config.output_bias,
            GateBias | UpBias | DownBias => config.mlp_bias,
            QNorm | KNorm => config.qk_norm != QkNorm::None,
            AttentionNorm | MlpNorm => config.norms != LayerNorms::After,
            AttentionOutputNorm | MlpOutputNorm => config.norms != LayerNorms::Before,
            Q | K | V | Output | Gate | Up | Down => true,
        }
    }

    /// The tensor's name after `model.layers.i.`.
    pub(crate) fn suffix(self, config: &ModelConfig) -> &'static str {
        match self {
            MlpNorm if config.norms == LayerNorms::Both => "pre_feedforward_layernorm.weight",
            AttentionNorm => "input_layernorm.weight",
            Q => "self_attn.q_proj.weight",
            K => "self_attn.k_proj.weight",
            V => "self_attn.v_proj.weight",
            Output => "self_attn.o_proj.weight",
            QBias => "self_attn.q_proj.bias",
            KBias => "self_attn.k_proj.bias",
            VBias => "self_attn.v_proj.bias",
            OutputBias => "self_attn.o_proj.bias",
            QNorm => "self_attn.q_norm.weight",
            KNorm => "self_attn.k_norm.weight",
            MlpNorm | AttentionOutputNorm => "post_attention_layernorm.weight",
            MlpOutputNorm => "post_feedforward_layernorm.weight",
            Gate => "mlp.gate_proj.weight",
            Up => "mlp.up_proj.weight",
            Down => "mlp.down_proj.weight",
            GateBias => "mlp.gate_proj.bias",
            UpBias => "mlp.up_proj.bias",
            DownBias => "mlp.down_proj.bias",
        }
    }

    /// (rows, columns); a vector is one row.
    fn shape(self, config: &ModelConfig) -> (usize, usize) {
        let (hidden, intermediate, q, kv) = (config.hidden, config.intermediate, config.q_width(), config.kv_width());
        match self {
            AttentionNorm | MlpNorm | AttentionOutputNorm | MlpOutputNorm | OutputBias | DownBias => (1, hidden),
            Q => (q, hidden),
            K | V => (kv, hidden),
            Output => (hidden, q),
            QBias => (1, q),
            KBias | VBias => (1, kv),
            QNorm if config.qk_norm == QkNorm::Projection => (1, q),
            KNorm if config.qk_norm == QkNorm::Projection => (1, kv),
            QNorm | KNorm => (1, config.head_dim),
            Gate | Up => (intermediate, hidden),
            Down => (hidden, intermediate),
            GateBias | UpBias => (1, intermediate),
        }
    }
}

impl Part {
    /// True if drafts with 4-bit weights read this matrix in 8 bits: the head, and sensitive matrices.
    pub fn is_drafted_in_8_bits(self, Sensitive([qkv, output, gate_up, down]): Sensitive) -> bool {
        match self {
            Part::Head => true,
            Part::Layer(_, Q | K | V) => qkv,
            Part::Layer(_, Output) => output,
            Part::Layer(_, Gate | Up) => gate_up,
            Part::Layer(_, Down) => down,
            _ => false,
        }
    }

    /// True if weights in nibbles have both planes of this matrix, in a model of so many layers. With int8 every matrix has both.
    /// With int4 only the head, the keys and the values have, and the down projections of the first and the last eighth of the
    /// layers: few bytes, whose precision matters most.
    pub fn has_both_planes(self, weights: TargetWeights, layers: usize) -> bool {
        let outer = |layer: usize| layer < layers / 8 || layer >= 7 * layers / 8;
        match (weights, self) {
            (TargetWeights::Int8, Part::Layer(_, Q | K | V | Output | Gate | Up | Down)) => true,
            (TargetWeights::Int4, Part::Layer(layer, Down)) => outer(layer),
            (TargetWeights::Int4, Part::Layer(_, K | V)) => true,
            (weights, Part::Head) => weights != TargetWeights::Checkpoint,
            _ => false,
        }
    }

    /// (rows, columns) in a model of this configuration; a vector is one row.
    pub fn shape(self, config: &ModelConfig) -> (usize, usize) {
        match self {
            Part::Embedding | Part::Head => (config.vocab, config.hidden),
            Part::FinalNorm => (1, config.hidden),
            Part::Layer(_, part) => part.shape(config),
        }
    }

    /// Every part that a model of this configuration stores, in the order of computation. A tied head is not listed.
    pub fn all(config: &ModelConfig) -> Vec<Part> {
        let layers = (0..config.layers).flat_map(|layer| {
            LAYER_PARTS.into_iter().filter(|part| part.exists(config)).map(move |part| Part::Layer(layer, part))
        });
        let head = (!config.tied_embeddings).then_some(Part::Head);
        std::iter::once(Part::Embedding).chain(layers).chain([Part::FinalNorm]).chain(head).collect()
    }

    /// Returns true for vectors, false for matrices.
    pub(crate) fn is_vector(self) -> bool {
        match self {
            Part::Embedding | Part::Head => false,
            Part::FinalNorm => true,
            Part::Layer(_, part) => !LayerPart::MATRICES.contains(&part),
        }
    }

    /// The tensor's name in Hugging Face checkpoints.
    pub(crate) fn name(self, config: &ModelConfig) -> String {
        match self {
            Part::Embedding => "model.embed_tokens.weight".to_string(),
            Part::FinalNorm => "model.norm.weight".to_string(),
            Part::Head => "lm_head.weight".to_string(),
            Part::Layer(layer, part) => format!("model.layers.{layer}.{}", part.suffix(config)),
        }
    }
}
