//! Checkpoints whose tensor names differ from Llama's read like the same weights under Llama's names.

#[path = "support/tiny.rs"]
mod tiny;

use quantspec_core::ErrorKind;
use quantspec_model::checkpoint::{Checkpoint, Part};
use serde_json::{Value, json};
use tiny::Folder;

/// Name, shape and bytes of every tensor.
type Tensors = Vec<(String, Vec<usize>, Vec<u8>)>;

fn tensors(safetensors: &[u8]) -> Tensors {
    let length = u64::from_le_bytes(safetensors[..8].try_into().expect("length")) as usize;
    let header: Value = serde_json::from_slice(&safetensors[8..8 + length]).expect("header");
    let entries = header.as_object().expect("object").iter().filter(|(name, _)| *name != "__metadata__");
    entries
        .map(|(name, entry)| {
            let numbers = |field: &str| -> Vec<usize> {
                entry[field].as_array().expect("list").iter().map(|n| n.as_u64().expect("number") as usize).collect()
            };
            let range = numbers("data_offsets");
            let data = safetensors[8 + length..][range[0]..range[1]].to_vec();
            (name.clone(), numbers("shape"), data)
        })
        .collect()
}

fn written(tensors: &Tensors) -> Vec<u8> {
    let (mut header, mut body) = (serde_json::Map::new(), Vec::new());
    for (name, shape, data) in tensors {
        let begin = body.len();
        body.extend(data);
        header.insert(name.clone(), json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, body.len()]}));
    }
    let header = Value::Object(header).to_string();
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &body].concat()
}

/// Replaces tensors of a layer by one with their rows, in order.
fn fuse(tensors: &mut Tensors, parts: &[&str], into: &str) {
    let place = |tensors: &Tensors, suffix: &str| tensors.iter().position(|(name, ..)| name.ends_with(suffix));
    while place(tensors, parts[0]).is_some() {
        let mut fused: Option<(String, Vec<usize>, Vec<u8>)> = None;
        for part in parts {
            let (name, shape, data) = tensors.remove(place(tensors, part).expect("part"));
            let whole = fused.get_or_insert_with(|| (name.replace(part, into), vec![0, shape[1]], Vec::new()));
            whole.1[0] += shape[0];
            whole.2.extend(data);
        }
        tensors.extend(fused);
    }
}

fn assert_same(found: &Checkpoint, expected: &Checkpoint) {
    for part in Part::all(expected.config()) {
        let mut bytes = [found, expected].map(|checkpoint| {
            let mut bytes = vec![0; checkpoint.bytes(part)];
            checkpoint.read(part, 0..checkpoint.shape(part).0, &mut bytes).expect("read");
            bytes
        });
        assert!(!bytes[0].is_empty());
        assert_eq!(std::mem::take(&mut bytes[0]), bytes[1], "{part:?}");
    }
}

fn phi3() -> (Value, Tensors) {
    let mut tensors = tensors(&tiny::weights());
    fuse(&mut tensors, &["q_proj.weight", "k_proj.weight", "v_proj.weight"], "qkv_proj.weight");
    fuse(&mut tensors, &["gate_proj.weight", "up_proj.weight"], "gate_up_proj.weight");
    let mut config = tiny::config();
    config["model_type"] = json!("phi3");
    config["architectures"] = json!(["Phi3ForCausalLM"]);
    (config, tensors)
}

/// The published form of Mistral 3.1: tensors under a prefix, next to those of a vision tower.
fn wrapped(prefix: impl Fn(&str) -> String) -> (Value, Tensors) {
    let mut tensors = tensors(&tiny::weights());
    tensors.iter_mut().for_each(|(name, ..)| *name = prefix(name));
    tensors.push(("vision_tower.transformer.layers.0.attention.q_proj.weight".into(), vec![2], vec![0; 8]));
    tensors.push(("multi_modal_projector.norm.weight".into(), vec![1], vec![0; 4]));
    let mut text = tiny::config();
    text["model_type"] = json!("mistral");
    text["sliding_window"] = Value::Null;
    text.as_object_mut().expect("object").remove("architectures");
    let outer =
        json!({"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"], "text_config": text});
    (outer, tensors)
}

fn opened((config, tensors): (Value, Tensors)) -> quantspec_core::Result<Checkpoint> {
    let folder = Folder::empty();
    folder.write("config.json", config.to_string().as_bytes());
    folder.write("model.safetensors", &written(&tensors));
    Checkpoint::open(folder.path())
}

#[test]
fn fused_matrices_are_divided() {
    let plain = Folder::valid();
    let plain = Checkpoint::open(plain.path()).expect("plain");
    assert_same(&opened(phi3()).expect("phi3"), &plain);
}

#[test]
fn the_language_model_is_found_next_to_a_vision_tower() {
    let plain = Folder::valid();
    let plain = Checkpoint::open(plain.path()).expect("plain");
    let old = wrapped(|name| format!("language_model.{name}"));
    let new =
        wrapped(|name| name.strip_prefix("model.").map_or(name.into(), |rest| format!("model.language_model.{rest}")));
    for names in [old, new] {
        let found = opened(names).expect("wrapped");
        assert_eq!(found.config().family, "mistral");
        assert_same(&found, &plain);
    }
}

#[test]
fn inconsistent_checkpoints_are_refused() {
    let refused = |checkpoint, expected: &str| {
        let error = opened(checkpoint).expect_err("refused");
        assert_eq!(error.kind, ErrorKind::Model);
        assert!(error.message.contains(expected), "{error}");
    };
    let (config, mut fused) = phi3();
    let rows = fused.iter_mut().find(|(name, ..)| name.ends_with("qkv_proj.weight")).expect("fused");
    let width = rows.1[1];
    rows.1[0] -= 1;
    rows.2.truncate(rows.1[0] * width * 4);
    refused((config, fused), "config.json expects");
    let (config, mut tensors) = wrapped(|name| format!("language_model.{name}"));
    tensors.push(("model.language_model.norm.weight".into(), vec![1], vec![0; 4]));
    refused((config, tensors), "two tensors of the checkpoint are \"model.norm.weight\"");
    let (mut config, tensors) = wrapped(|name| format!("language_model.{name}"));
    config.as_object_mut().expect("object").remove("text_config");
    refused((config, tensors), "text_config is missing");
}
