//! GGUF files of a tiny network, written by hand so that tests can damage them.

/// A metadata value, as its type number and bytes.
#[derive(Clone)]
pub(crate) struct Value(pub(crate) u32, pub(crate) Vec<u8>);

pub(crate) fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

pub(crate) fn u32_value(number: u32) -> Value {
    Value(4, number.to_le_bytes().to_vec())
}

pub(crate) fn f32_value(number: f32) -> Value {
    Value(6, number.to_le_bytes().to_vec())
}

pub(crate) fn text_value(value: &str) -> Value {
    Value(8, text(value))
}

pub(crate) fn texts_value(values: &[&str]) -> Value {
    let all: Vec<u8> = values.iter().flat_map(|value| text(value)).collect();
    Value(9, [&8u32.to_le_bytes()[..], &(values.len() as u64).to_le_bytes(), &all].concat())
}

/// A tensor: name, extents (innermost first), type number, bytes.
#[derive(Clone)]
pub(crate) struct Tensor(pub(crate) String, pub(crate) Vec<u64>, pub(crate) u32, pub(crate) Vec<u8>);

/// A file before it is written.
#[derive(Clone)]
pub(crate) struct File {
    pub(crate) entries: Vec<(String, Value)>,
    pub(crate) tensors: Vec<Tensor>,
}

impl File {
    /// The file's bytes.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.entries.len() as u64).to_le_bytes());
        for (key, Value(kind, bytes)) in &self.entries {
            out.extend(text(key));
            out.extend(kind.to_le_bytes());
            out.extend(bytes);
        }
        let mut data = Vec::new();
        for Tensor(name, extents, kind, bytes) in &self.tensors {
            out.extend(text(name));
            out.extend((extents.len() as u32).to_le_bytes());
            out.extend(extents.iter().flat_map(|extent| extent.to_le_bytes()));
            out.extend(kind.to_le_bytes());
            out.extend((data.len() as u64).to_le_bytes());
            data.extend(bytes);
            data.resize(data.len().next_multiple_of(32), 0);
        }
        out.resize(out.len().next_multiple_of(32), 0);
        [out, data].concat()
    }

    /// Sets or removes an entry.
    pub(crate) fn with(mut self, key: &str, value: Option<Value>) -> File {
        self.entries.retain(|(known, _)| known != key);
        self.entries.extend(value.map(|value| (key.to_string(), value)));
        self
    }

    /// The tensor of this name.
    pub(crate) fn tensor(&mut self, name: &str) -> &mut Tensor {
        self.tensors.iter_mut().find(|tensor| tensor.0 == name).expect("tensor")
    }
}

/// Value of an element; neighbours differ.
pub(crate) fn value(index: usize) -> f32 {
    index as f32 / 64.0 - 2.0
}

/// A one-layer llama in F32: 2 heads of 4 channels, hidden 32, vocabulary 16.
pub(crate) fn llama() -> File {
    let sizes = [("embedding_length", 32), ("block_count", 1), ("feed_forward_length", 64), ("context_length", 64)];
    let sizes = sizes.into_iter().chain([("attention.head_count", 2), ("attention.head_count_kv", 1)]);
    let sizes = sizes.chain([("attention.key_length", 4), ("attention.value_length", 4)]);
    let mut entries = vec![("general.architecture".to_string(), text_value("llama"))];
    entries.extend(sizes.map(|(name, size)| (format!("llama.{name}"), u32_value(size))));
    entries.push(("llama.attention.layer_norm_rms_epsilon".to_string(), f32_value(1e-5)));
    entries.push(("tokenizer.ggml.eos_token_id".to_string(), u32_value(2)));
    entries.push(("tokenizer.ggml.tokens".to_string(), texts_value(&["a", "é", ""])));
    let shapes: [(&str, &[u64]); 11] = [
        ("token_embd.weight", &[32, 16]),
        ("blk.0.attn_norm.weight", &[32]),
        ("blk.0.attn_q.weight", &[32, 8]),
        ("blk.0.attn_k.weight", &[32, 4]),
        ("blk.0.attn_v.weight", &[32, 4]),
        ("blk.0.attn_output.weight", &[8, 32]),
        ("blk.0.ffn_norm.weight", &[32]),
        ("blk.0.ffn_gate.weight", &[32, 64]),
        ("blk.0.ffn_up.weight", &[32, 64]),
        ("blk.0.ffn_down.weight", &[64, 32]),
        ("output_norm.weight", &[32]),
    ];
    let tensors = shapes.map(|(name, shape)| {
        let elements = shape.iter().product::<u64>() as usize;
        let bytes = (0..elements).flat_map(|index| value(index).to_le_bytes()).collect();
        Tensor(name.to_string(), shape.to_vec(), 0, bytes)
    });
    File { entries, tensors: tensors.to_vec() }
}
