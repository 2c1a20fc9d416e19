//! Random checkpoints of any shape, held in memory.

use quantspec_model::checkpoint::Checkpoint;
use serde_json::{Value, json};

/// Parameters of a random model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) family: &'static str,
    pub(crate) dtype: &'static str,
    pub(crate) layers: usize,
    pub(crate) hidden: usize,
    pub(crate) intermediate: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) vocab: usize,
    pub(crate) tied: bool,
    pub(crate) biases: bool,
}

/// A fixed stream of numbers (xorshift64).
pub(crate) struct Noise(pub(crate) u64);

impl Noise {
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Nearly normal: four uniforms, variance 1.
    fn normal(&mut self) -> f32 {
        let unit = |bits: u64| (bits >> 40) as f32 / (1u64 << 24) as f32;
        ((0..4).map(|_| unit(self.bits())).sum::<f32>() - 2.0) * 3f32.sqrt()
    }
}

/// Difference of two counts of `all` trials each, in standard deviations of a difference of two binomials.
#[allow(dead_code, reason = "not every test that includes this file counts")]
pub(crate) fn deviations(counts: [usize; 2], all: u64) -> f64 {
    let [a, b] = counts.map(|count| count as f64);
    let share = (a + b) / (2.0 * all as f64);
    (a - b) / (2.0 * all as f64 * share * (1.0 - share)).sqrt()
}

impl Shape {
    /// A model small enough for the reference, with the parts that `family` and `biases` imply.
    pub(crate) const fn new(family: &'static str, dtype: &'static str, heads: (usize, usize, usize)) -> Shape {
        Shape {
            family,
            dtype,
            layers: 2,
            hidden: 96,
            intermediate: 172,
            heads: heads.0,
            kv_heads: heads.1,
            head_dim: heads.2,
            vocab: 300,
            tied: true,
            biases: false,
        }
    }

    fn config(&self) -> Value {
        let biases = self.biases && self.family == "llama";
        let mut config = json!({
            "model_type": self.family, "hidden_size": self.hidden, "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim, "vocab_size": self.vocab, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": self.tied, "attention_bias": biases,
            "mlp_bias": biases, "torch_dtype": match self.dtype { "BF16" => "bfloat16", "F16" => "float16", _ => "float32" },
        });
        // Settings in which a family differs from Llama.
        let own = match self.family {
            "smollm3" => json!({"no_rope_layer_interval": 2}),
            "granite" => json!({
                "embedding_multiplier": 0.7, "residual_multiplier": 0.5, "attention_multiplier": 0.1, "logits_scaling": 3.0,
            }),
            "phi3" => json!({"partial_rotary_factor": 0.75}),
            "gemma3_text" => json!({
                "sliding_window": 256, "sliding_window_pattern": 2, "rope_local_base_freq": 1e3, "query_pre_attn_scalar": 100,
            }),
            "ministral3" => json!({"rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 128,
                "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
            }}),
            _ => json!({}),
        };
        config.as_object_mut().expect("an object").extend(own.as_object().expect("an object").clone());
        config
    }

    /// Name, shape, and scale of the random values (0: a norm, near 1) of every tensor.
    fn tensors(&self) -> Vec<(String, Vec<usize>, f32)> {
        let (h, q, kv, f) = (self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim, self.intermediate);
        let (llama, qwen2) = (self.family == "llama" && self.biases, self.family == "qwen2");
        // Gemma's norms are stored less 1.
        let near_one = if self.family == "gemma3_text" { 0.2 } else { 0.0 };
        let mut out = vec![("model.embed_tokens.weight".to_string(), vec![self.vocab, h], 1.0)];
        for layer in 0..self.layers {
            let mut push = |name: &str, shape: Vec<usize>, scale: f32| {
                out.push((format!("model.layers.{layer}.{name}"), shape, scale));
            };
            let norms: &[&str] = match self.family {
                "olmo2" => &["post_attention_layernorm", "post_feedforward_layernorm"],
                "gemma3_text" => &[
                    "input_layernorm",
                    "post_attention_layernorm",
                    "pre_feedforward_layernorm",
                    "post_feedforward_layernorm",
                ],
                _ => &["input_layernorm", "post_attention_layernorm"],
            };
            for norm in norms {
                push(&format!("{norm}.weight"), vec![h], near_one);
            }
            let matrices = match self.family {
                "phi3" => vec![
                    ("self_attn.qkv_proj", q + 2 * kv, h, false),
                    ("self_attn.o_proj", h, q, false),
                    ("mlp.gate_up_proj", 2 * f, h, false),
                    ("mlp.down_proj", h, f, false),
                ],
                _ => vec![
                    ("self_attn.q_proj", q, h, llama || qwen2),
                    ("self_attn.k_proj", kv, h, llama || qwen2),
                    ("self_attn.v_proj", kv, h, llama || qwen2),
                    ("self_attn.o_proj", h, q, llama),
                    ("mlp.gate_proj", f, h, llama),
                    ("mlp.up_proj", f, h, llama),
                    ("mlp.down_proj", h, f, llama),
                ],
            };
            for (name, n, k, bias) in matrices {
                push(&format!("{name}.weight"), vec![n, k], 1.5 / (k as f32).sqrt());
                if bias {
                    push(&format!("{name}.bias"), vec![n], 0.3);
                }
            }
            let normed = match self.family {
                "qwen3" | "gemma3_text" => [self.head_dim; 2],
                "olmo2" => [q, kv],
                _ => [0; 2],
            };
            for (name, width) in ["q", "k"].into_iter().zip(normed).filter(|(_, width)| *width > 0) {
                push(&format!("self_attn.{name}_norm.weight"), vec![width], near_one);
            }
        }
        out.push(("model.norm.weight".to_string(), vec![h], near_one));
        if !self.tied {
            out.push(("lm_head.weight".to_string(), vec![self.vocab, h], 1.0 / (h as f32).sqrt()));
        }
        out
    }

    /// The checkpoint. Its few bytes are leaked.
    #[allow(dead_code, reason = "not every test that includes this file needs one")]
    pub(crate) fn checkpoint(&self, seed: u64) -> Checkpoint {
        self.build(seed, None, &|_, _, _| ())
    }

    /// The checkpoint with `edit` applied to every tensor: name, values, number format.
    #[allow(dead_code, reason = "not every test that includes this file edits checkpoints")]
    pub(crate) fn edited(&self, seed: u64, edit: &dyn Fn(&str, &mut [f32], &mut &'static str)) -> Checkpoint {
        self.build(seed, None, edit)
    }

    /// A checkpoint in which only one token has values beyond f16. `weights` are those of its two first channels in the first
    /// value of layer 0. The token has only the first channel, which no other token has.
    #[allow(dead_code, reason = "not every test that includes this file needs one")]
    pub(crate) fn overflowing(&self, seed: u64, token: usize, weights: [f32; 2]) -> Checkpoint {
        self.edited(seed, &|name, values, _| self.overflow(token, weights, name, values))
    }

    /// A checkpoint in which only one token has values beyond f16. Its logit is always 0, so that greedy decoding never chooses
    /// it.
    #[allow(dead_code, reason = "not every test that includes this file needs one")]
    pub(crate) fn failing(&self, seed: u64, token: usize) -> Checkpoint {
        assert!(!self.tied, "the embedding of the token is not 0");
        self.edited(seed, &|name, values, _| {
            self.overflow(token, [2e4, 0.0], name, values);
            if name == "lm_head.weight" {
                values[token * self.hidden..][..self.hidden].fill(0.0);
            }
        })
    }

    fn overflow(&self, token: usize, weights: [f32; 2], name: &str, values: &mut [f32]) {
        if name == "model.embed_tokens.weight" {
            values.chunks_exact_mut(self.hidden).for_each(|row| row[..2].fill(0.0));
            values[token * self.hidden..][..self.hidden].fill(0.0);
            values[token * self.hidden] = 1.0;
        } else if name == "model.layers.0.input_layernorm.weight" {
            values.fill(1.0);
        } else if name == "model.layers.0.self_attn.v_proj.weight" {
            values[..self.hidden].fill(0.0);
            values[..2].copy_from_slice(&weights);
        } else if name == "model.layers.0.self_attn.o_proj.weight" {
            // The output projection scales that value down again.
            values.chunks_exact_mut(self.heads * self.head_dim).for_each(|row| row[0] *= 1e-6);
        }
    }

    /// The checkpoint with the bits of one element in the middle of a 16-bit tensor replaced.
    #[allow(dead_code, reason = "not every test that includes this file damages checkpoints")]
    pub(crate) fn damaged(&self, seed: u64, tensor: &str, bits: u16) -> Checkpoint {
        self.build(seed, Some((tensor, bits)), &|_, _, _| ())
    }

    fn build(
        &self,
        seed: u64,
        damage: Option<(&str, u16)>,
        edit: &dyn Fn(&str, &mut [f32], &mut &'static str),
    ) -> Checkpoint {
        let mut noise = Noise(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
        for (name, shape, scale) in self.tensors() {
            let (start, mut dtype) = (data.len(), self.dtype);
            let mut values: Vec<f32> = (0..shape.iter().product::<usize>())
                .map(|_| if scale == 0.0 { 1.0 + 0.2 * noise.normal() } else { scale * noise.normal() })
                .collect();
            edit(&name, &mut values, &mut dtype);
            for x in values {
                match dtype {
                    "BF16" => data.extend(half::bf16::from_f32(x).to_le_bytes()),
                    "F16" => data.extend(half::f16::from_f32(x).to_le_bytes()),
                    _ => data.extend(x.to_le_bytes()),
                }
            }
            if let Some((_, bits)) = damage.filter(|(tensor, _)| *tensor == name) {
                let middle = start + (data.len() - start) / 4 * 2;
                data[middle..middle + 2].copy_from_slice(&bits.to_le_bytes());
            }
            header.insert(name, json!({"dtype": dtype, "shape": shape, "data_offsets": [start, data.len()]}));
        }
        let header = Value::Object(header).to_string();
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.extend(data);
        let checkpoint = Checkpoint::from_bytes(self.config().to_string().as_bytes(), file.leak());
        checkpoint.unwrap_or_else(|error| panic!("{self:?}: {error} ({})", error.hint))
    }
}

/// Random token ids.
pub(crate) fn tokens(vocab: usize, n: usize, seed: u64) -> Vec<u32> {
    let mut noise = Noise(seed | 1);
    (0..n).map(|_| (noise.bits() >> 33) as u32 % vocab as u32).collect()
}
