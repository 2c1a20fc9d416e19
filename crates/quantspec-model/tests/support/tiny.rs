//! A valid checkpoint of a few kilobytes, written by hand so that tests can damage it.

use serde_json::{Value, json};

#[path = "folder.rs"]
mod folder;
pub(crate) use folder::Folder;

/// config.json of a one-layer Llama.
pub(crate) fn config() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 12,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 16,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": false, "attention_bias": false, "mlp_bias": false, "eos_token_id": 2, "torch_dtype": "float32"
    })
}

/// Names and shapes of the tensors, in the order of their data.
pub(crate) fn tensors() -> Vec<(&'static str, Vec<usize>)> {
    vec![
        ("model.embed_tokens.weight", vec![16, 8]),
        ("model.layers.0.input_layernorm.weight", vec![8]),
        ("model.layers.0.self_attn.q_proj.weight", vec![8, 8]),
        ("model.layers.0.self_attn.k_proj.weight", vec![4, 8]),
        ("model.layers.0.self_attn.v_proj.weight", vec![4, 8]),
        ("model.layers.0.self_attn.o_proj.weight", vec![8, 8]),
        ("model.layers.0.post_attention_layernorm.weight", vec![8]),
        ("model.layers.0.mlp.gate_proj.weight", vec![12, 8]),
        ("model.layers.0.mlp.up_proj.weight", vec![12, 8]),
        ("model.layers.0.mlp.down_proj.weight", vec![8, 12]),
        ("model.norm.weight", vec![8]),
        ("lm_head.weight", vec![16, 8]),
    ]
}

/// Header of F32 tensors stored without gaps, and the bytes of their data.
pub(crate) fn header(tensors: &[(&str, Vec<usize>)]) -> (Value, usize) {
    let mut end = 0;
    let mut header = serde_json::Map::new();
    for (name, shape) in tensors {
        let start = end;
        end += 4 * shape.iter().product::<usize>();
        header.insert(name.to_string(), json!({"dtype": "F32", "shape": shape, "data_offsets": [start, end]}));
    }
    (Value::Object(header), end)
}

/// A file with this header and `bytes` bytes of distinct f32 values.
pub(crate) fn file(header: &str, bytes: usize) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend((0..bytes.div_ceil(4)).flat_map(|index| (index as f32 / 64.0 - 2.0).to_le_bytes()).take(bytes));
    file
}

/// The whole checkpoint's weights.
pub(crate) fn weights() -> Vec<u8> {
    let (header, bytes) = header(&tensors());
    file(&header.to_string(), bytes)
}

impl Folder {
    /// The valid checkpoint.
    pub(crate) fn valid() -> Folder {
        let folder = Folder::empty();
        folder.write("config.json", config().to_string().as_bytes());
        folder.write("model.safetensors", &weights());
        folder
    }
}
