//! GGUF files: the values of a sound one, and a one-line error for a damaged one.

#[path = "support/folder.rs"]
mod folder;
#[path = "support/gguf.rs"]
mod format;

use folder::Folder;
use format::{File, Tensor, Value, f32_value, llama, text, text_value, texts_value, u32_value, value};
use half::f16;
use quantspec_core::config::{Activation, Dtype, LayerNorms, QkNorm, QueryScale, RopeScaling, Scales};
use quantspec_core::{Error, ErrorKind};
use quantspec_model::blocks::Encoding;
use quantspec_model::checkpoint::{Checkpoint, LayerPart, Part};
use quantspec_model::gguf::{Element, Gguf};
use quantspec_model::rope::RopeTable;
use quantspec_model::safetensors::SafeTensors;
use std::path::PathBuf;

fn open(file: &File) -> Result<Checkpoint, Error> {
    open_bytes(&file.bytes())
}

/// The directory is removed on return: an open file stays readable.
fn open_bytes(bytes: &[u8]) -> Result<Checkpoint, Error> {
    let folder = Folder::empty();
    folder.write("model.gguf", bytes);
    Checkpoint::open(&folder.path().join("model.gguf"))
}

fn refused(file: &File, expected: &str) {
    refused_bytes(&file.bytes(), expected);
}

fn refused_bytes(bytes: &[u8], expected: &str) {
    let error = open_bytes(bytes).expect_err(expected);
    assert_eq!(error.kind, ErrorKind::Model, "{error:?}");
    assert_error(&error, expected);
    assert!(error.message.contains(expected), "message: {}\nexpected: {expected}", error.message);
}

fn assert_error(error: &Error, what: &str) {
    let one_line = |text: &str| !text.is_empty() && !text.chars().any(char::is_control);
    assert!(one_line(&error.message) && one_line(&error.hint) && error.message.len() < 2000, "{what}: {error:?}");
}

fn values(checkpoint: &Checkpoint, part: Part) -> Vec<f32> {
    let (rows, columns) = checkpoint.shape(part);
    let mut out = vec![0.0; rows * columns];
    checkpoint.read_f32(part, 0..rows, &mut out).expect("values");
    out
}

#[test]
fn a_sound_file_is_read() {
    let checkpoint = open(&llama()).expect("checkpoint");
    let config = checkpoint.config();
    assert_eq!((config.family.as_str(), config.layers, config.hidden, config.head_dim), ("llama", 1, 32, 4));
    assert_eq!((config.vocab, config.max_positions, config.eos.as_slice()), (16, 64, &[2][..]));
    assert!(config.tied_embeddings && !config.qkv_bias && config.rms_eps == 1e-5);
    assert_eq!(checkpoint.tensor_name(Part::Head), "token_embd.weight");
    let table: Vec<f32> = (0..16 * 32).map(value).collect();
    assert_eq!(values(&checkpoint, Part::Embedding), table);
    assert_eq!(values(&checkpoint, Part::Head), table);
    // A few rows must equal those of the whole.
    let mut rows = vec![0.0; 2 * 32];
    checkpoint.read_f32(Part::Layer(0, LayerPart::V), 1..3, &mut rows).expect("rows");
    assert_eq!(rows, (32..96).map(value).collect::<Vec<f32>>());
}

#[test]
fn rows_of_llamas_queries_and_keys_are_put_in_order() {
    let mut file = llama();
    file.tensors.push(Tensor("blk.0.attn_q.bias".to_string(), vec![8], 0, floats(8)));
    file.tensors.push(Tensor("blk.0.attn_k.bias".to_string(), vec![4], 0, floats(4)));
    file.tensors.push(Tensor("blk.0.attn_v.bias".to_string(), vec![4], 0, floats(4)));
    let checkpoint = open(&file).expect("checkpoint");
    // Channels 0, 1, 2, 3 of a head are stored as 0, 2, 1, 3.
    let q = values(&checkpoint, Part::Layer(0, LayerPart::Q));
    let order = [0, 2, 1, 3, 4, 6, 5, 7];
    for (row, &stored) in order.iter().enumerate() {
        assert_eq!(q[row * 32..][..32], (stored * 32..stored * 32 + 32).map(value).collect::<Vec<f32>>());
    }
    assert_eq!(values(&checkpoint, Part::Layer(0, LayerPart::QBias)), order.map(value));
    assert_eq!(values(&checkpoint, Part::Layer(0, LayerPart::KBias)), [0, 2, 1, 3].map(value));
    assert_eq!(values(&checkpoint, Part::Layer(0, LayerPart::VBias)), [0, 1, 2, 3].map(value));
}

fn floats(count: usize) -> Vec<u8> {
    (0..count).flat_map(|index| value(index).to_le_bytes()).collect()
}

/// The file with another architecture.
fn named(architecture: &str) -> File {
    let mut file = llama();
    for (key, entry) in &mut file.entries {
        *key = key.replace("llama.", &format!("{architecture}."));
        if key == "general.architecture" {
            *entry = text_value(architecture);
        }
    }
    file
}

#[test]
fn every_fourth_layer_of_smollm3_has_no_positions() {
    let mut file = named("smollm3").with("smollm3.block_count", Some(u32_value(5)));
    let of_layer: Vec<Tensor> = file.tensors.iter().filter(|tensor| tensor.0.starts_with("blk.")).cloned().collect();
    for layer in 1..5 {
        let rename = |tensor: &Tensor| {
            let mut tensor = tensor.clone();
            tensor.0 = tensor.0.replace("blk.0.", &format!("blk.{layer}."));
            tensor
        };
        file.tensors.extend(of_layer.iter().map(rename));
    }
    let checkpoint = open(&file).expect("checkpoint");
    assert_eq!(checkpoint.config().no_rope, [false, false, false, true, false]);
    let q = values(&checkpoint, Part::Layer(3, LayerPart::Q));
    assert_eq!(q[32..64], (64..96).map(value).collect::<Vec<f32>>(), "row 1 is the file's row 2");
    assert!(open(&named("smollm3")).expect("checkpoint").config().no_rope.is_empty());
}

#[test]
fn granites_multipliers_are_read() {
    let base = named("granite").with("granite.logit_scale", Some(f32_value(8.0)));
    let plain = open(&base).expect("checkpoint");
    assert_eq!(plain.config().scales, Scales { embedding: 1.0, scores: 1.0, logits: 0.125 });
    let all = [("embedding_scale", 12.0), ("residual_scale", 0.25), ("attention.scale", 0.125)];
    let with = |file: File, (name, value): (&str, f32)| file.with(&format!("granite.{name}"), Some(f32_value(value)));
    let checkpoint = open(&all.into_iter().fold(base.clone(), with)).expect("checkpoint");
    assert_eq!(checkpoint.config().scales, Scales { embedding: 48.0, scores: 0.25, logits: 0.125 });
    assert!((checkpoint.config().rms_eps / 1.6e-4 - 1.0).abs() < 1e-6);
    let norm = values(&checkpoint, Part::FinalNorm);
    assert_eq!(norm, (0..32).map(|index| value(index) / 8.0).collect::<Vec<f32>>());
    assert_eq!(values(&checkpoint, Part::Layer(0, LayerPart::Q))[32..33], [value(64)], "row 1 is the file's row 2");
    for name in ["embedding_scale", "residual_scale", "attention.scale", "logit_scale"] {
        for wrong in [0.0, -1.0, 1e5, f32::NAN] {
            refused(
                &with(base.clone(), (name, wrong)),
                &format!("granite.{name} that is {wrong}, not a number from 0.0001 to 10000"),
            );
        }
    }
    refused(&named("granite"), "has no metadata granite.logit_scale");
    let unrotated = base.with("granite.rope.scaling.finetuned", Some(Value(7, vec![0])));
    refused(&unrotated, "granite without RoPE");
}

#[test]
fn qwen_rows_are_stored_in_order() {
    let mut file = named("qwen3");
    for name in ["blk.0.attn_q_norm.weight", "blk.0.attn_k_norm.weight"] {
        file.tensors.push(Tensor(name.to_string(), vec![4], 0, floats(4)));
    }
    let checkpoint = open(&file).expect("checkpoint");
    assert_eq!(checkpoint.config().qk_norm, QkNorm::Heads);
    assert_eq!(values(&checkpoint, Part::Layer(0, LayerPart::Q)), (0..256).map(value).collect::<Vec<f32>>());
}

/// The file as phi3: fused matrices, heads of 8 channels of which 6 are rotated, and factors.
fn phi3() -> File {
    let mut file = named("phi3");
    file = file.with("phi3.attention.key_length", Some(u32_value(8)));
    file = file.with("phi3.attention.value_length", Some(u32_value(8)));
    file = file.with("phi3.rope.dimension_count", Some(u32_value(6)));
    file = file.with("phi3.rope.scaling.original_context_length", Some(u32_value(16)));
    file = file.with("phi3.rope.scaling.attn_factor", Some(f32_value(1.25)));
    let fused = ["attn_q.", "attn_k.", "attn_v.", "ffn_gate.", "ffn_up.", "attn_output."];
    file.tensors.retain(|tensor| !fused.iter().any(|part| tensor.0.contains(part)));
    for (name, shape) in [("attn_qkv", [32, 32]), ("ffn_up", [32, 128]), ("attn_output", [16, 32])] {
        let elements = (shape[0] * shape[1]) as usize;
        file.tensors.push(Tensor(format!("blk.0.{name}.weight"), shape.to_vec(), 0, floats(elements)));
    }
    for (name, factors) in [("long", [1f32, 4.0, 16.5]), ("short", [1.0, 1.5, 2.0])] {
        let bytes = factors.iter().flat_map(|factor| factor.to_le_bytes()).collect();
        file.tensors.push(Tensor(format!("rope_factors_{name}.weight"), vec![3], 0, bytes));
    }
    file
}

#[test]
fn phi3_has_fused_matrices_and_two_sets_of_factors() {
    let checkpoint = open(&phi3()).expect("checkpoint");
    let config = checkpoint.config();
    assert_eq!((config.head_dim, config.rope.dim, config.max_positions), (8, 6, 64));
    let scaling = |factors: [f32; 3]| RopeScaling::Factors { factors: factors.to_vec(), attention_factor: 1.25 };
    assert_eq!(config.rope.scaling, scaling([1.0, 4.0, 16.5]));
    let rows = |first: usize, order: &[usize]| -> Vec<f32> {
        order.iter().flat_map(|row| ((first + row) * 32..(first + row + 1) * 32).map(value)).collect()
    };
    // Channels 0, 1, 2 are paired with 3, 4, 5; 6 and 7 are not rotated.
    let head = [0, 1, 2, 6, 3, 4, 5, 7];
    let both: Vec<usize> = head.into_iter().chain(head.map(|row| 8 + row)).collect();
    assert_eq!(values(&checkpoint, Part::Layer(0, LayerPart::Q)), rows(0, &both));
    assert_eq!(values(&checkpoint, Part::Layer(0, LayerPart::K)), rows(16, &head));
    assert_eq!(values(&checkpoint, Part::Layer(0, LayerPart::V)), rows(24, &[0, 1, 2, 3, 4, 5, 6, 7]));
    let all: Vec<usize> = (0..64).collect();
    assert_eq!(values(&checkpoint, Part::Layer(0, LayerPart::Gate)), rows(0, &all));
    assert_eq!(values(&checkpoint, Part::Layer(0, LayerPart::Up)), rows(64, &all));
    assert_eq!(checkpoint.tensor_name(Part::Layer(0, LayerPart::K)), "blk.0.attn_qkv.weight");
    // A few rows must equal those of the whole.
    let mut some = vec![0.0; 3 * 32];
    checkpoint.read_f32(Part::Layer(0, LayerPart::K), 3..6, &mut some).expect("rows");
    assert_eq!(some, rows(16, &head[3..6]));

    let within = phi3().with("phi3.context_length", Some(u32_value(16)));
    assert_eq!(open(&within).expect("checkpoint").config().rope.scaling, scaling([1.0, 1.5, 2.0]));
    let mut plain = phi3().with("phi3.rope.scaling.attn_factor", None).with("phi3.rope.dimension_count", None);
    plain.tensors.retain(|tensor| !tensor.0.starts_with("rope_factors"));
    let checkpoint = open(&plain).expect("checkpoint");
    assert_eq!((checkpoint.config().rope.dim, &checkpoint.config().rope.scaling), (8, &RopeScaling::None));
    assert_eq!(values(&checkpoint, Part::Layer(0, LayerPart::K)), rows(16, &[0, 1, 2, 3, 4, 5, 6, 7]));

    let without = plain.with("phi3.rope.scaling.attn_factor", Some(f32_value(1.25)));
    refused(&without, "rope.scaling.attn_factor 1.25 without rope_factors_long.weight");
    for wrong in [2, 5, 10] {
        let file = phi3().with("phi3.rope.dimension_count", Some(u32_value(wrong)));
        refused(&file, &format!("phi3.rope.dimension_count of {wrong} with heads of 8"));
    }
    refused(&phi3().with("phi3.rope.scaling.type", Some(text_value("linear"))), "RoPE scaling \"linear\"");
    // Within a sliding window attention is full. The factors are those of the stated context.
    for (window, context) in [(0, 64), (12, 12), (100, 64)] {
        let file = phi3().with("phi3.attention.sliding_window", Some(u32_value(window)));
        let checkpoint = open(&file).expect("checkpoint");
        assert_eq!(checkpoint.config().max_positions, context);
        assert_eq!(checkpoint.config().rope.scaling, scaling([1.0, 4.0, 16.5]));
    }
    let windowed = named("olmo2").with("olmo2.attention.sliding_window", Some(u32_value(32)));
    refused(&windowed, "sliding-window attention (32 of 64 tokens)");
    let mut file = phi3();
    file.tensor("rope_factors_long.weight").1 = vec![2];
    file.tensor("rope_factors_long.weight").3.truncate(8);
    refused(&file, "tensor \"rope_factors_long.weight\" has shape [2], the metadata expects [3]");
    let mut file = phi3();
    file.tensor("rope_factors_long.weight").3[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    refused(&file, "rope_factors_long.weight has the factor NaN");
    let mut file = phi3();
    file.tensor("blk.0.attn_qkv.weight").1 = vec![32, 24];
    file.tensor("blk.0.attn_qkv.weight").3.truncate(24 * 32 * 4);
    refused(&file, "tensor \"blk.0.attn_qkv.weight\" has shape [24, 32], the metadata expects [32, 32]");
    let mut file = phi3();
    file.tensors.push(Tensor("blk.0.attn_q.weight".to_string(), vec![32, 16], 0, floats(512)));
    refused(&file, "tensor \"blk.0.attn_q.weight\" is no part of a phi3 network");
}

#[test]
fn olmo2_has_norms_after_the_branches() {
    let mut file = named("olmo2");
    for tensor in &mut file.tensors {
        tensor.0 = tensor.0.replace("attn_norm", "post_attention_norm").replace("ffn_norm", "post_ffw_norm");
    }
    for (name, width) in [("blk.0.attn_q_norm.weight", 8), ("blk.0.attn_k_norm.weight", 4)] {
        file.tensors.push(Tensor(name.to_string(), vec![width], 0, floats(width as usize)));
    }
    let checkpoint = open(&file).expect("checkpoint");
    assert_eq!((checkpoint.config().qk_norm, checkpoint.config().norms), (QkNorm::Projection, LayerNorms::After));
    assert_eq!(values(&checkpoint, Part::Layer(0, LayerPart::QNorm)), (0..8).map(value).collect::<Vec<f32>>());
    assert_eq!(values(&checkpoint, Part::Layer(0, LayerPart::Q)), (0..256).map(value).collect::<Vec<f32>>());
    for name in ["blk.0.post_attention_norm.weight", "blk.0.post_ffw_norm.weight"] {
        assert!(file.tensors.iter().any(|tensor| tensor.0 == name), "{name}");
        let mut without = file.clone();
        without.tensors.retain(|tensor| tensor.0 != name);
        refused(&without, &format!("has no tensor \"{name}\""));
    }
    file.tensors.push(Tensor("blk.0.attn_norm.weight".to_string(), vec![32], 0, floats(32)));
    refused(&file, "tensor \"blk.0.attn_norm.weight\" is no part of a olmo2 network");
}

#[test]
fn gemma3_has_local_layers_and_norms_on_both_sides() {
    let gemma = || {
        let mut file = named("gemma3").with("gemma3.attention.sliding_window", Some(u32_value(512)));
        file.tensors.extend(["post_attention_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm"].map(|name| {
            let width = if name.starts_with("attn") { 4 } else { 32 };
            Tensor(format!("blk.0.{name}.weight"), vec![width], 0, floats(width as usize))
        }));
        file.with("gemma3.rope.freq_base", Some(f32_value(1e6)))
    };
    let checkpoint = open(&gemma()).expect("checkpoint");
    let config = checkpoint.config();
    assert_eq!((config.norms, config.qk_norm, config.activation), (LayerNorms::Both, QkNorm::Heads, Activation::Gelu));
    assert_eq!(config.scales, Scales { embedding: 32f32.sqrt(), scores: 1.0, logits: 1.0 });
    let local = config.local.as_ref().expect("local layers");
    assert_eq!((local.layers.as_slice(), local.reach, local.rope.theta), (&[true][..], 512, 1e4));
    assert_eq!(config.rope.theta, 1e6);
    // The file's norms have the 1.
    assert_eq!(values(&checkpoint, Part::FinalNorm), (0..32).map(value).collect::<Vec<f32>>());
    assert_eq!(values(&checkpoint, Part::Layer(0, LayerPart::Q)), (0..256).map(value).collect::<Vec<f32>>());

    let other = gemma()
        .with("gemma3.attention.sliding_window_pattern", Some(u32_value(1)))
        .with("gemma3.rope.freq_base_swa", Some(f32_value(2e4)));
    let checkpoint = open(&other).expect("checkpoint");
    let local = checkpoint.config().local.as_ref().expect("local layers");
    assert_eq!((local.layers.as_slice(), local.rope.theta), (&[false][..], 2e4));

    refused(&gemma().with("gemma3.attention.sliding_window", None), "no metadata gemma3.attention.sliding_window");
    for wrong in [0, 100, 1000] {
        let file = gemma().with("gemma3.attention.sliding_window", Some(u32_value(wrong)));
        refused(&file, &format!("a sliding window of {wrong}"));
    }
    let never = gemma().with("gemma3.attention.sliding_window_pattern", Some(u32_value(0)));
    refused(&never, "sliding_window_pattern that is 0, not a whole number from 1");
    let capped = gemma().with("gemma3.final_logit_softcapping", Some(f32_value(30.0)));
    refused(&capped, "gemma3.final_logit_softcapping (30)");
    let flat = gemma().with("gemma3.rope.freq_base_swa", Some(f32_value(1.0)));
    refused(&flat, "gemma3.rope.freq_base_swa that is 1, not a number above 1");
}

#[test]
fn ministral3s_queries_grow() {
    let file = named("mistral3").with("mistral3.rope.scaling.type", Some(text_value("yarn")));
    let file = file.with("mistral3.rope.scaling.factor", Some(f32_value(4.0)));
    let file = file.with("mistral3.rope.scaling.original_context_length", Some(u32_value(16)));
    let plain = open(&file).expect("checkpoint").config().clone();
    assert_eq!((plain.rope.query_scale, plain.max_positions), (None, 64));
    let file = file.with("mistral3.attention.temperature_scale", Some(f32_value(0.5)));
    let file = file.with("mistral3.rope.scaling.yarn_log_multiplier", Some(f32_value(1.0)));
    let checkpoint = open(&file).expect("checkpoint");
    let rope = &checkpoint.config().rope;
    assert_eq!(rope.query_scale, Some(QueryScale { beta: 0.5, original: 16 }));
    assert!(matches!(rope.scaling, RopeScaling::Yarn { attention_factor: 1.0, .. }), "{rope:?}");
    assert_eq!(values(&checkpoint, Part::Layer(0, LayerPart::Q))[32..33], [value(64)], "row 1 is the file's row 2");
    for (name, wrong) in [("attention.temperature_scale", -1.0), ("rope.scaling.yarn_log_multiplier", f32::NAN)] {
        let file = file.clone().with(&format!("mistral3.{name}"), Some(f32_value(wrong)));
        refused(&file, &format!("mistral3.{name} that is {wrong}, not a number from 0 to 100"));
    }
    let llama = llama().with("llama.attention.temperature_scale", Some(f32_value(0.5)));
    refused(&llama, "llama.attention.temperature_scale (0.5)");
}

/// Stores F32 matrices in another type.
fn stored(file: &mut File, names: &[&str], kind: u32, bytes: impl Fn(&[f32]) -> Vec<u8>) {
    for name in names {
        let Tensor(_, _, number, data) = file.tensor(name);
        let values: Vec<f32> = data.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        (*number, *data) = (kind, bytes(&values));
    }
}

const MATRICES: [&str; 8] = [
    "token_embd.weight",
    "blk.0.attn_q.weight",
    "blk.0.attn_k.weight",
    "blk.0.attn_v.weight",
    "blk.0.attn_output.weight",
    "blk.0.ffn_gate.weight",
    "blk.0.ffn_up.weight",
    "blk.0.ffn_down.weight",
];

fn to_f16(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect()
}

fn to_bf16(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|&x| half::bf16::from_f32(x).to_le_bytes()).collect()
}

/// Q8_0 with a scale for which no value is exact in f16.
fn to_q8(values: &[f32]) -> Vec<u8> {
    let block = |block: &[f32]| {
        let codes = block.iter().map(|x| (x / 0.0571) as i8 as u8);
        f16::from_f32(0.0571).to_le_bytes().into_iter().chain(codes).collect::<Vec<u8>>()
    };
    values.chunks(32).flat_map(block).collect()
}

#[test]
fn all_matrices_are_read_in_one_format() {
    // Quantised matrices, and the format they are read as.
    let (all, most) = (&MATRICES[..], &MATRICES[1..]);
    let file = |f16: &[&str], bf16: &[&str], q8: &[&str]| {
        let mut file = llama();
        stored(&mut file, f16, 1, to_f16);
        stored(&mut file, bf16, 30, to_bf16);
        // Rows of 8 values are not whole blocks.
        let q8: Vec<&str> = q8.iter().copied().filter(|name| *name != "blk.0.attn_output.weight").collect();
        stored(&mut file, &q8, 8, to_q8);
        file
    };
    for (file, expected) in [
        (file(&[], &[], &[]), Dtype::F32),
        (file(all, &[], &[]), Dtype::F16),
        (file(&[], all, &[]), Dtype::Bf16),
        (file(&["blk.0.attn_output.weight"], &[], all), Dtype::F16),
        (file(&["blk.0.attn_output.weight"], &["token_embd.weight"], most), Dtype::F16),
        // An F32 matrix implies full precision for all.
        (file(&[], &[], most), Dtype::F32),
    ] {
        let checkpoint = open(&file).expect("checkpoint");
        assert_eq!(checkpoint.config().dtype, expected);
        for part in Part::all(checkpoint.config()) {
            let is_norm =
                matches!(part, Part::FinalNorm | Part::Layer(_, LayerPart::AttentionNorm | LayerPart::MlpNorm));
            assert_eq!(checkpoint.dtype(part), if is_norm { Dtype::F32 } else { expected });
            let (rows, columns) = checkpoint.shape(part);
            let mut raw = vec![0; checkpoint.bytes(part)];
            assert_eq!(raw.len(), rows * columns * checkpoint.dtype(part).bytes());
            checkpoint.read(part, 0..rows, &mut raw).expect("bytes");
        }
    }
}

#[test]
fn quantised_values_are_rounded_to_the_nearest_half() {
    let mut file = llama();
    stored(&mut file, &MATRICES, 1, to_f16);
    file.tensor("blk.0.ffn_up.weight").3 = floats(64 * 32);
    file.tensor("blk.0.ffn_up.weight").2 = 0;
    stored(&mut file, &["blk.0.ffn_up.weight"], 8, to_q8);
    let checkpoint = open(&file).expect("checkpoint");
    let d = f16::from_f32(0.0571).to_f32();
    let exact = (0..64 * 32).map(|index| d * f32::from((value(index) / 0.0571) as i8));
    let read = values(&checkpoint, Part::Layer(0, LayerPart::Up));
    assert!(exact.clone().zip(&read).all(|(exact, &read)| f16::from_f32(exact).to_f32() == read));
    assert!(exact.zip(&read).any(|(exact, &read)| exact != read));
    // Its codes may be kept; plain matrices have none.
    assert!(checkpoint.has_codes(Part::Layer(0, LayerPart::Up)));
    assert!(!checkpoint.has_codes(Part::Layer(0, LayerPart::Gate)) && !checkpoint.has_codes(Part::Embedding));
}

#[test]
fn values_beyond_half_precision_are_named() {
    let mut file = llama();
    stored(&mut file, &MATRICES, 1, to_f16);
    // A scale of 60000 times a code of 127.
    let block = [&f16::from_f32(60_000.0).to_le_bytes()[..], &[127; 32]].concat();
    let Tensor(_, _, kind, data) = file.tensor("blk.0.ffn_up.weight");
    (*kind, *data) = (8, block.repeat(64));
    let checkpoint = open(&file).expect("checkpoint");
    let error = checkpoint.read_f32(Part::Layer(0, LayerPart::Up), 0..1, &mut [0.0; 32]).expect_err("infinite");
    assert_eq!(error.kind, ErrorKind::NotFinite);
    assert!(error.message.contains("blk.0.ffn_up.weight is inf at element 0"), "{error:?}");
}

#[test]
fn rope_scaling_is_read() {
    let scaled = |entries: &[(&str, Value)]| {
        let file = entries.iter().fold(llama(), |file, (key, value)| file.with(key, Some(value.clone())));
        let config = open(&file).expect("checkpoint").config().clone();
        (config.rope.scaling, config.max_positions)
    };
    assert_eq!(scaled(&[]), (RopeScaling::None, 64));
    let kind = |kind| ("llama.rope.scaling.type", text_value(kind));
    let factor = ("llama.rope.scaling.factor", f32_value(4.0));
    assert_eq!(scaled(&[kind("linear"), factor.clone()]), (RopeScaling::Linear { factor: 4.0 }, 64));
    assert_eq!(scaled(&[("llama.rope.scale_linear", f32_value(2.0))]), (RopeScaling::Linear { factor: 2.0 }, 64));
    let original = ("llama.rope.scaling.original_context_length", u32_value(32));
    let yarn = [kind("yarn"), factor, original];
    let own = 0.1 * 4f64.ln() + 1.0;
    for (key, expected) in [("attn_factor", 0.5 * own), ("yarn_attn_factor", 0.5 * own), ("finetuned", own)] {
        let key = format!("llama.rope.scaling.{key}");
        let (yarn, positions) = scaled(&[&yarn[..], &[(&key, f32_value(0.5))]].concat());
        assert_eq!(positions, 128);
        assert!(
            matches!(yarn, RopeScaling::Yarn { original: 32, attention_factor, .. } if attention_factor == expected),
            "{key}: {yarn:?}"
        );
    }

    let mut file = llama();
    let factors = [1.0f32, 8.0].iter().flat_map(|factor| factor.to_le_bytes()).collect();
    file.tensors.push(Tensor("rope_freqs.weight".to_string(), vec![2], 0, factors));
    let stretched = open(&file).expect("checkpoint").config().clone();
    let plain = open(&llama()).expect("checkpoint").config().clone();
    let angle = |config, channel: usize| {
        let (mut cos, mut sin) = ([0.0; 2], [0.0; 2]);
        RopeTable::new(config).fill(1, 2, &mut cos, &mut sin);
        f64::from(sin[channel]).asin()
    };
    assert_eq!(angle(&stretched, 0), angle(&plain, 0));
    assert!((angle(&plain, 1) / angle(&stretched, 1) - 8.0).abs() < 1e-4);
    file.tensor("rope_freqs.weight").3 = vec![0; 8];
    refused(&file, "rope_freqs.weight has the factor 0");
}

#[test]
fn unimplemented_features_are_refused_by_name() {
    for (key, value, expected) in [
        ("general.architecture", text_value("gemma2"), "architecture \"gemma2\""),
        ("llama.expert_count", u32_value(8), "llama.expert_count (8)"),
        ("llama.attention.scale", f32_value(0.5), "llama.attention.scale (0.5)"),
        ("llama.rope.dimension_count", u32_value(2), "llama.rope.dimension_count of 2"),
        ("llama.attention.value_length", u32_value(8), "llama.attention.value_length of 8"),
        ("llama.attention.sliding_window", u32_value(32), "sliding-window attention (32 of 64 tokens)"),
        ("llama.rope.scaling.type", text_value("longrope"), "RoPE scaling \"longrope\""),
        ("llama.attention.causal", Value(7, vec![0]), "attention to later tokens"),
        ("llama.attention.head_count_kv", texts_value(&["1"]), "metadata llama.attention.head_count_kv by layer"),
    ] {
        refused(&llama().with(key, Some(value)), expected);
    }
    let mut file = llama();
    file.tensors.push(Tensor("blk.0.attn_sinks.weight".to_string(), vec![2], 0, floats(2)));
    refused(&file, "tensor \"blk.0.attn_sinks.weight\" is no part of a llama network");
    let mut file = llama();
    for (number, name) in [(21, "IQ3_S"), (31, "Q4_0_4_4"), (40, "NVFP4")] {
        file.tensor("blk.0.ffn_up.weight").2 = number;
        refused(&file, &format!("of type {name}, which is not supported"));
    }
}

#[test]
fn metadata_of_wrong_type_or_value_is_refused() {
    let sizes = ", not a whole number from";
    for (key, value, expected) in [
        ("general.architecture", u32_value(1), "general.architecture that is 1, not a text"),
        ("llama.block_count", text_value("1"), "llama.block_count that is a text, not a whole number from 1 to 1024"),
        ("llama.block_count", u32_value(0), "llama.block_count that is 0, not a whole number from 1 to 1024"),
        ("llama.embedding_length", Value(11, i64::MIN.to_le_bytes().to_vec()), sizes),
        ("llama.context_length", Value(10, u64::MAX.to_le_bytes().to_vec()), sizes),
        ("llama.attention.head_count_kv", text_value("1"), "head_count_kv that is a text, not"),
        ("llama.rope.freq_base", texts_value(&["1"]), "freq_base that is a list, not a number"),
        ("llama.attention.head_count", u32_value(3), "head_count_kv that is 2, not a divisor of 3"),
        ("llama.attention.layer_norm_rms_epsilon", f32_value(f32::NAN), "that is NaN, not a number from"),
        ("llama.rope.freq_base", f32_value(0.1), "llama.rope.freq_base that is 0.1, not a number from 1 to"),
        ("llama.rope.scaling.type", u32_value(0), "llama.rope.scaling.type that is 0, not a text"),
        ("tokenizer.ggml.eos_token_id", u32_value(16), "eos_token_id that is 16, not a token id below 16"),
        ("general.alignment", u32_value(3), "general.alignment that is 3, not a power of two"),
        ("general.alignment", text_value("32"), "general.alignment that is a text, not a power of two"),
    ] {
        let key_in_file = key != "llama.attention.head_count";
        let file = llama().with(key, Some(value));
        refused(
            &if key_in_file { file } else { file.with("llama.attention.head_count_kv", Some(u32_value(2))) },
            expected,
        );
    }
    for key in ["general.architecture", "llama.block_count", "llama.attention.layer_norm_rms_epsilon"] {
        refused(&llama().with(key, None), &format!("has no metadata {key}"));
    }
    refused(
        &llama().with(
            "general.architecture",
            Some(Value(8, [&text("llam")[..4], &[0, 0, 0, 0, 0xff, 0xfe, 0xff, 0xff]].concat())),
        ),
        "valid UTF-8",
    );
}

#[test]
fn damaged_files_are_refused() {
    let valid = llama().bytes();
    refused_bytes(b"", "is not a GGUF file");
    refused_bytes(&[b"GGML", &valid[4..]].concat(), "is not a GGUF file");
    refused_bytes(b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS");
    refused_bytes(&[b"GGUF", &1u32.to_le_bytes(), &valid[8..]].concat(), "is a GGUF file of version 1");
    refused_bytes(&[b"GGUF", &3u32.to_be_bytes(), &valid[8..]].concat(), "is a big-endian GGUF file");
    let with = |at: usize, number: u64| [&valid[..at], &number.to_le_bytes(), &valid[at + 8..]].concat();
    refused_bytes(&with(8, 1 << 63), "claims 9223372036854775808 tensors");
    refused_bytes(&with(16, u64::MAX), "claims 18446744073709551615 metadata entries");
    refused_bytes(&with(24, 1 << 63), "has a name of 9223372036854775808 bytes");
    // The first entry's text claims 4 GB.
    let at = 24 + 8 + "general.architecture".len() + 4;
    refused_bytes(&with(at, 4 << 30), "claims 4294967296 bytes at byte 64");
    // A file that ends early is refused, wherever it ends.
    for length in (0..valid.len()).step_by(7) {
        assert_eq!(open_bytes(&valid[..length]).expect_err("cut").kind, ErrorKind::Model, "{length}");
    }
    let list = |count: u64| Value(9, [&8u32.to_le_bytes()[..], &count.to_le_bytes()].concat());
    refused(&llama().with("x", Some(list(1 << 63))), "claims 9223372036854775808 elements of metadata x");
    refused(&llama().with("x", Some(Value(9, [9u32.to_le_bytes(); 3].concat()))), "metadata x that is a list of lists");
    refused(&llama().with("x", Some(Value(77, Vec::new()))), "metadata x of unknown type 77");
    refused(&llama().with("x", Some(Value(7, vec![2]))), "a flag of value 2");
    let mut twice = llama();
    twice.entries.push(("general.architecture".to_string(), text_value("llama")));
    refused(&twice, "has metadata general.architecture twice");
    let mut twice = llama();
    let again = twice.tensors[0].clone();
    twice.tensors.push(again);
    refused(&twice, "has tensor \"token_embd.weight\" twice");
}

#[test]
fn tensors_outside_the_file_are_refused() {
    let changed = |change: &dyn Fn(&mut Tensor)| {
        let mut file = llama();
        change(file.tensor("blk.0.ffn_up.weight"));
        file
    };
    refused(&changed(&|tensor| tensor.2 = 5), "of unknown type 5");
    refused(&changed(&|tensor| tensor.1 = vec![1 << 40, 1 << 40]), "of impossible shape");
    refused(&changed(&|tensor| (tensor.1, tensor.2) = (vec![33, 64], 8)), "of impossible shape");
    refused(&changed(&|tensor| tensor.1 = vec![1; 5]), "of 5 dimensions");
    refused(&changed(&|tensor| tensor.1 = vec![32, 1 << 33]), "of which the file has");
    refused(&changed(&|tensor| tensor.1 = vec![32, 65]), "that overlap");
    refused(&changed(&|tensor| tensor.1 = vec![32, 32]), "has shape [32, 32], the metadata expects [64, 32]");
    let mut missing = llama();
    missing.tensors.remove(0);
    refused(&missing, "has no tensor \"token_embd.weight\"");
    // The offset of the last tensor is the number before the padding.
    let header = llama().bytes();
    let at = header.windows(18).position(|window| window == b"output_norm.weight").expect("name") + 18 + 4 + 8 + 4;
    let with = |offset: u64| [&header[..at], &offset.to_le_bytes(), &header[at + 8..]].concat();
    refused_bytes(&with(u64::MAX - 31), "at offset 18446744073709551584 of the data");
    refused_bytes(&with(33), "which is not aligned to 32");
}

/// The network in parts: the metadata in the first, each tensor in the part of its index modulo the number of parts.
fn parts(count: usize) -> Vec<File> {
    let whole = llama();
    let u16_value = |number: usize| Some(Value(2, (number as u16).to_le_bytes().to_vec()));
    (0..count)
        .map(|number| {
            let entries = if number == 0 { whole.entries.clone() } else { Vec::new() };
            let tensors = whole.tensors.iter().skip(number).step_by(count).cloned().collect();
            let part = File { entries, tensors };
            let total = Value(5, (whole.tensors.len() as i32).to_le_bytes().to_vec());
            part.with("split.no", u16_value(number))
                .with("split.count", u16_value(count))
                .with("split.tensors.count", Some(total))
        })
        .collect()
}

fn split(parts: &[File]) -> (Folder, Vec<PathBuf>) {
    let folder = Folder::empty();
    let names = (1..=parts.len()).map(|number| format!("m-{number:05}-of-{:05}.gguf", parts.len()));
    let paths = names.zip(parts).map(|(name, part)| {
        folder.write(&name, &part.bytes());
        folder.path().join(name)
    });
    let paths = paths.collect();
    (folder, paths)
}

#[test]
fn parts_are_one_model() {
    let (_folder, paths) = split(&parts(3));
    let (checkpoint, whole) = (Checkpoint::open(&paths[0]).expect("parts"), open(&llama()).expect("whole"));
    assert_eq!(checkpoint.config(), whole.config());
    for part in Part::all(whole.config()) {
        assert_eq!(values(&checkpoint, part), values(&whole, part));
    }
    let refused = |path: &PathBuf, expected: &str| {
        let error = Checkpoint::open(path).expect_err(expected);
        assert!(error.kind == ErrorKind::Model && error.message.contains(expected), "{error:?}");
        assert_error(&error, expected);
        error
    };
    let error = refused(&paths[1], "part 2 of 3");
    assert!(error.hint.contains("m-00001-of-00003.gguf"), "{error:?}");
    let alone = paths[0].with_file_name("alone.gguf");
    std::fs::copy(&paths[0], &alone).expect("copy");
    refused(&alone, "is part 1 of 3, and not named as one");
    std::fs::copy(&paths[1], &paths[2]).expect("copy");
    refused(&paths[0], "is not part 3 of 3");
    std::fs::remove_file(&paths[2]).expect("remove");
    refused(&paths[0], "is missing");

    let mut repeated = parts(2);
    let again = repeated[0].tensors[0].clone();
    repeated[1].tensors.push(again);
    refused(&split(&repeated).1[0], "of an earlier part");
    let mut fewer = parts(2);
    fewer[1].tensors.pop();
    refused(&split(&fewer).1[0], "claims 11 tensors in all parts, which hold 10");
}

#[test]
fn lists_are_read_element_by_element() {
    let folder = Folder::empty();
    let numbers =
        Value(9, [&5u32.to_le_bytes()[..], &2u64.to_le_bytes(), &(-7i32).to_le_bytes(), &[9, 0, 0, 0]].concat());
    folder.write("a.gguf", &llama().with("numbers", Some(numbers)).bytes());
    let gguf = Gguf::open(&folder.path().join("a.gguf")).expect("file");
    let mut found = Vec::new();
    gguf.elements("tokenizer.ggml.tokens", |element| found.push(format!("{element:?}"))).expect("texts");
    gguf.elements("numbers", |element| found.push(format!("{element:?}"))).expect("numbers");
    let expected = ["Text(\"a\")", "Text(\"é\")", "Text(\"\")", "Value(Signed(-7))", "Value(Signed(9))"];
    assert_eq!(found, expected);
    assert!(gguf.elements("general.architecture", |_| ()).is_err());
    let mut bad = llama().with("tokenizer.ggml.tokens", Some(texts_value(&["ab"])));
    let at = bad.entries.len() - 1;
    let bytes = &mut bad.entries[at].1.1;
    let last = bytes.len() - 1;
    bytes[last] = 0xff;
    folder.write("b.gguf", &bad.bytes());
    let gguf = Gguf::open(&folder.path().join("b.gguf")).expect("file");
    let error = gguf.elements("tokenizer.ggml.tokens", |element| assert_ne!(element, Element::Text("ab")));
    assert!(error.expect_err("no text").message.contains("tokenizer.ggml.tokens that is not valid UTF-8"));
}

/// xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() >> 33) as usize % n.max(1)
    }
}

/// About the length of the mutated files' headers.
const HEADER_BYTES: usize = 1400;

/// One to three changes, most of them in the header.
fn mutate(bytes: &mut Vec<u8>, header: usize, random: &mut Random) {
    const NUMBERS: [u64; 12] = [0, 1, 2, 7, 32, 33, 255, 0xffff, 0xffff_ffff, 4 << 30, 1 << 63, u64::MAX];
    for _ in 0..=random.below(3) {
        let reach = if random.below(8) == 0 { bytes.len() } else { header.min(bytes.len()) };
        let at = random.below(reach);
        let end = bytes.len().min(at + 1 + random.below(40));
        match random.below(8) {
            0 => bytes.truncate(at),
            1 => drop(bytes.drain(at..end)),
            2 => {
                let again = bytes[at..end].to_vec();
                bytes.splice(at..at, again);
            }
            3 | 4 => {
                let number = NUMBERS[random.below(NUMBERS.len())].to_le_bytes();
                let width = [1, 2, 4, 8][random.below(4)].min(bytes.len() - at);
                bytes[at..at + width].copy_from_slice(&number[..width]);
            }
            _ => {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte ^= 1 << random.below(8);
                }
            }
        }
    }
}

#[test]
fn mutated_files() {
    let mut quantised = llama();
    stored(&mut quantised, &["blk.0.ffn_up.weight", "blk.0.ffn_gate.weight", "token_embd.weight"], 8, to_q8);
    let yarn = llama()
        .with("llama.rope.scaling.type", Some(text_value("yarn")))
        .with("llama.rope.scaling.factor", Some(f32_value(4.0)));
    let valid = [llama().bytes(), quantised.bytes(), yarn.bytes()];
    let folder = Folder::empty();
    let mut random = Random(0x5EED_0004);
    let (mut accepted, mut refused) = (0, 0);
    for round in 0..10_000 {
        let valid = &valid[random.below(valid.len())];
        let mut file = valid.clone();
        mutate(&mut file, HEADER_BYTES, &mut random);
        folder.write("model.gguf", &file);
        match Checkpoint::open(&folder.path().join("model.gguf")) {
            Ok(checkpoint) => {
                accepted += 1;
                for part in Part::all(checkpoint.config()) {
                    let (rows, columns) = checkpoint.shape(part);
                    assert!(rows * columns * 4 <= 8 * file.len(), "round {round}: {rows} x {columns}");
                    let mut values = vec![0.0; rows * columns];
                    if let Err(error) = checkpoint.read_f32(part, 0..rows, &mut values) {
                        assert_error(&error, &format!("round {round}"));
                    }
                }
            }
            Err(error) => {
                refused += 1;
                assert!(matches!(error.kind, ErrorKind::Model), "round {round}: {error:?}");
                assert_error(&error, &format!("round {round}"));
            }
        }
    }
    assert!(accepted > 300 && refused > 5_000, "{accepted} accepted, {refused} refused");
}

/// Peak memory of this process, in bytes.
#[cfg(target_os = "linux")]
fn peak() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("status");
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).expect("VmHWM");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<usize>().ok()).expect("KiB") << 10
}

#[test]
#[cfg(target_os = "linux")]
fn a_header_takes_no_more_memory_than_its_bytes() {
    const BYTES: usize = 64 << 20;
    // A vocabulary of a million tokens, and one text in the rest of the file: neither is read before it is requested.
    let tokens: Vec<u8> = (0..1_000_000).flat_map(|_| text("token")).collect();
    let tokens = Value(9, [&8u32.to_le_bytes()[..], &1_000_000u64.to_le_bytes(), &tokens].concat());
    let file = llama().with("tokens", Some(tokens)).with("x", Some(text_value(&"x".repeat(BYTES)))).bytes();
    let folder = Folder::empty();
    folder.write("model.gguf", &file);
    drop(file);
    let known = peak();
    assert!(Checkpoint::open(&folder.path().join("model.gguf")).is_ok());
    assert!(peak() - known < BYTES / 4, "{} bytes", peak() - known);
}

/// A sparse file has any length, so a text within it may claim more bytes than the machine has.
#[test]
fn texts_of_sparse_files_are_bounded() {
    const CLAIMED: u64 = 1 << 40;
    let folder = Folder::empty();
    let path = folder.path().join("model.gguf");
    let in_list = [&8u32.to_le_bytes()[..], &1u64.to_le_bytes(), &CLAIMED.to_le_bytes()].concat();
    for value in [Value(8, CLAIMED.to_le_bytes().to_vec()), Value(9, in_list)] {
        let mut file = llama();
        file.entries[0].1 = value;
        folder.write("model.gguf", &file.bytes());
        let sparse = std::fs::OpenOptions::new().write(true).open(&path).expect("file");
        sparse.set_len(2 * CLAIMED).expect("a file system with sparse files");
        let error = Checkpoint::open(&path).expect_err("a text of 1 TiB");
        assert_error(&error, "sparse");
        assert!(error.message.contains("of text before byte 10995116"), "{error}");
    }
}

/// Blocks and values of the `gguf` package, made by golden/gguf_blocks.py.
#[test]
fn values_are_those_of_an_independent_reader_bit_for_bit() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/gguf_blocks.safetensors");
    let golden = SafeTensors::open(&path).expect("golden");
    let bytes = |name: &str| {
        let tensor = golden.tensors().get(name).expect("tensor");
        let mut bytes = vec![0; tensor.bytes as usize];
        golden.read(tensor.offset, &mut bytes).expect("bytes");
        bytes
    };
    let mut types = 0;
    for encoding in (0..64).filter_map(|number| Encoding::of(number).ok()) {
        let name = encoding.name();
        let (raw, expected) = (bytes(&format!("{name}.raw")), bytes(&format!("{name}.values")));
        let mut values = vec![0.0; expected.len() / 4];
        encoding.decode(&raw, &mut values);
        for (index, (value, expected)) in values.iter().zip(expected.as_chunks().0).enumerate() {
            assert_eq!(value.to_le_bytes(), *expected, "{name}: value {index}");
        }
        types += 1;
    }
    assert_eq!(types, 15);
}
