//! The choice of pages, by a whole backend.

use super::{HEAD, Machine, Noise, layers};
use crate::CpuBackend;
use crate::attend::Shape;
use crate::dispatch::ChosenPath;
use crate::lanes::bf16_bits;
use crate::panel::PANEL;
use quantspec_core::Result;
use quantspec_core::cache::{BUFFER_TOKENS, G};
use quantspec_core::config::{DraftWeights, Pages, Planes, View, Weights};
use quantspec_model::backend::{Hooks, KvCache, Network, Options, Pass, Row, Step};
use quantspec_model::checkpoint::Checkpoint;

/// Attention of a draft step over its best 16 pages, for 4 KV heads of 128 channels with 4 query heads each. It runs the
/// backend's own operation, whose choice is private. The cost of a choice is the difference between a new choice and a kept
/// one.
pub struct BestPages {
    backend: CpuBackend,
    anew: bool,
    context: usize,
    layer: usize,
}

impl BestPages {
    /// Pages a step reads.
    const CHOSEN: usize = 16;
    const KV_HEADS: usize = 4;
    const GROUP: usize = 4;
    /// Inputs of the model's matrices, which only produce queries and keys.
    const HIDDEN: usize = 64;

    /// A model of normally distributed numbers with `context` tokens in more than 16 pages.
    ///
    /// # Errors
    /// If memory is short or threads cannot start.
    pub fn new(Machine { simd, threads }: Machine, context: usize, anew: bool) -> Result<BestPages> {
        let pages = context / G;
        let layers = layers(BestPages::KV_HEADS * pages * Shape::new(HEAD).upper_bytes());
        let options = Options {
            prompt_capacity: G,
            planes: Planes { upper: true, lower: false, full: false },
            draft_weights: DraftWeights::None,
            step_rows: G,
            block_rows: G,
            threads,
            ..Options::new(1, context + 2 * G)
        };
        let choice = ChosenPath { simd, reason: String::new() };
        let mut backend = CpuBackend::load_on(&BestPages::model(layers)?, &options, Hooks::default(), choice)?;
        backend.open(0, options.capacity)?;
        let tokens: Vec<u32> = (0..G as u32).map(|token| token % PANEL as u32).collect();
        backend.set_window(0, &tokens)?;
        // First fills the ring, then every page from it.
        for start in (0..BUFFER_TOKENS).step_by(G) {
            let rows: Vec<Row> = (0..G).map(|offset| Row { slot: 0, offset, position: start + offset }).collect();
            BestPages::append(&mut backend, &rows)?;
        }
        (0..pages).try_for_each(|page| backend.flush(0, page))?;
        let mut best = BestPages { backend, anew: true, context, layer: 0 };
        let row = best.row();
        BestPages::append(&mut best.backend, &[row])?;
        (0..layers).try_for_each(|_| best.call())?;
        best.anew = anew;
        Ok(best)
    }

    /// A checkpoint of normally distributed numbers. It is leaked, as a process makes few.
    fn model(layers: usize) -> Result<Checkpoint> {
        let heads = BestPages::KV_HEADS * BestPages::GROUP;
        let llama = Llama::new([BestPages::HIDDEN, PANEL, layers, heads, BestPages::KV_HEADS, HEAD, PANEL]);
        let (mut file, mut noise) = (llama.header, Noise(31));
        file.extend((0..llama.bytes / 2).flat_map(|_| bf16_bits(noise.next() / 8.0).to_le_bytes()));
        Checkpoint::from_bytes(llama.config.as_bytes(), file.leak())
    }

    /// Queries, keys and values of rows, in every layer.
    fn append(backend: &mut CpuBackend, rows: &[Row]) -> Result<()> {
        let step = Step { weights: Weights::Full, view: View::Upper, pages: Pages::All, choose_pages: false, rows };
        backend.embed(&Pass::Step(&step))?;
        (0..backend.config().layers).try_for_each(|layer| backend.qkv(layer, &Pass::Step(&step)))
    }

    /// The step's row: it sees all pages, and 129 tokens of the ring.
    fn row(&self) -> Row {
        Row { slot: 0, offset: 0, position: self.context + G }
    }

    /// Bytes that a call reads.
    pub fn bytes(&self) -> usize {
        let shape = Shape::new(HEAD);
        let scores = if self.anew { self.context / G * 4 * HEAD } else { 0 };
        BestPages::KV_HEADS * (scores + BestPages::CHOSEN * shape.upper_bytes() + (G + 1) * 4 * HEAD)
    }

    /// One layer.
    ///
    /// # Errors
    /// If a kernel panicked.
    pub fn call(&mut self) -> Result<()> {
        let rows = [self.row()];
        let (weights, view, pages) = (Weights::Draft, View::Upper, Pages::Best(BestPages::CHOSEN));
        let step = Step { weights, view, pages, choose_pages: self.anew, rows: &rows };
        self.backend.attend(self.layer, &Pass::Step(&step))?;
        self.layer = (self.layer + 1) % self.backend.config().layers;
        Ok(())
    }
}

/// A BF16 Llama: hidden, intermediate, layers, heads, KV heads, head_dim, vocab.
struct Llama {
    /// Its config.json.
    config: String,
    /// The start of its model.safetensors.
    header: Vec<u8>,
    /// Bytes of numbers that follow.
    bytes: usize,
}

impl Llama {
    /// A model of that shape whose head is its embedding.
    fn new([h, f, layers, heads, kv_heads, d, vocab]: [usize; 7]) -> Llama {
        let config = format!(
            r#"{{"model_type":"llama","hidden_size":{h},"intermediate_size":{f},"num_hidden_layers":{layers},
            "num_attention_heads":{heads},"num_key_value_heads":{kv_heads},"head_dim":{d},"vocab_size":{vocab},
            "max_position_embeddings":131072,"rms_norm_eps":1e-5,"rope_theta":500000.0,"hidden_act":"silu",
            "tie_word_embeddings":true,"torch_dtype":"bfloat16"}}"#
        );
        let mut tensors =
            vec![("model.embed_tokens.weight".to_string(), vec![vocab, h]), ("model.norm.weight".to_string(), vec![h])];
        for layer in 0..layers {
            for (part, shape) in [
                ("input_layernorm", vec![h]),
                ("post_attention_layernorm", vec![h]),
                ("self_attn.q_proj", vec![heads * d, h]),
                ("self_attn.k_proj", vec![kv_heads * d, h]),
                ("self_attn.v_proj", vec![kv_heads * d, h]),
                ("self_attn.o_proj", vec![h, heads * d]),
                ("mlp.gate_proj", vec![f, h]),
                ("mlp.up_proj", vec![f, h]),
                ("mlp.down_proj", vec![h, f]),
            ] {
                tensors.push((format!("model.layers.{layer}.{part}.weight"), shape));
            }
        }
        let (mut header, mut end) = (String::new(), 0);
        for (name, shape) in tensors {
            let start = end;
            end += 2 * shape.iter().product::<usize>();
            let comma = if header.is_empty() { "" } else { "," };
            header +=
                &format!(r#"{comma}"{name}":{{"dtype":"BF16","shape":{shape:?},"data_offsets":[{start},{end}]}}"#);
        }
        let header = format!("{{{header}}}");
        let header = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
        Llama { config, header, bytes: end }
    }
}
