//! Mutated checkpoint files: for any content, reading ends soon, in a readable checkpoint or in an error of one line with a
//! hint. Mutations come from a fixed generator, so failures are reproducible.

#[path = "support/mutate.rs"]
mod mutate;
#[path = "support/tiny.rs"]
mod tiny;

use mutate::{Random, mutate};
use quantspec_core::Error;
use quantspec_model::checkpoint::{Checkpoint, Part};
use quantspec_model::config::parse;
use quantspec_model::rope::RopeTable;
use serde_json::{Map, Value, json};
use std::time::{Duration, Instant};
use tiny::Folder;

/// Far above the time for a few kilobytes, far below that for reading a claimed terabyte.
const SOON: Duration = Duration::from_secs(2);

/// Multiplier of the number of inputs: larger with `QUANTSPEC_LAWS`.
fn times() -> usize {
    if std::env::var_os("QUANTSPEC_LAWS").is_some() { 20 } else { 1 }
}

fn assert_error(error: &Error, what: &str) {
    let one_line = |text: &str| !text.is_empty() && !text.chars().any(char::is_control);
    assert!(one_line(&error.message) && one_line(&error.hint) && error.message.len() < 2000, "{what}: {error:?}");
}

/// The work's result; fails if all of three attempts are slow, so that a busy machine does not fail the test.
fn soon<T>(what: &str, work: impl Fn() -> T) -> T {
    let mut took = Vec::new();
    while took.len() < 3 {
        let started = Instant::now();
        let outcome = work();
        took.push(started.elapsed());
        if took.iter().any(|took| *took < SOON) {
            return outcome;
        }
    }
    panic!("{what}: took {took:?}");
}

/// Opens the folder's checkpoint and, if it is accepted, reads all of it. Returns true if it is accepted.
fn open(folder: &Folder, what: &str) -> bool {
    soon(what, || match Checkpoint::open(folder.path()) {
        Ok(checkpoint) => {
            for part in Part::all(checkpoint.config()) {
                let (rows, columns) = checkpoint.shape(part);
                let mut values = vec![0.0; rows * columns];
                if let Err(error) = checkpoint.read_f32(part, 0..rows, &mut values) {
                    assert_error(&error, what);
                }
            }
            true
        }
        Err(error) => {
            assert_error(&error, what);
            false
        }
    })
}

#[test]
fn mutated_safetensors() {
    let folder = Folder::valid();
    let (header, bytes) = tiny::header(&tiny::tensors());
    let (header, valid) = (header.to_string(), tiny::weights());
    let mut random = Random(0x5EED_0001);
    let mut accepted = 0;
    let rounds = 10_000 * times();
    for round in 0..rounds {
        let file = match random.below(4) {
            // Mutates anything, including the header's length.
            0 => {
                let mut file = valid.clone();
                mutate(&mut file, &mut random);
                file
            }
            // A wrong length alone.
            1 => {
                let lengths =
                    [0, 1, 7, 8, header.len() as u64 - 1, header.len() as u64 + 1, 99_999_999, 1 << 40, 1 << 63];
                let length = match random.below(3) {
                    0 => lengths[random.below(lengths.len())],
                    1 => random.next() >> random.below(64),
                    _ => (header.len() as u64).wrapping_add(random.next() % 64).wrapping_sub(32),
                };
                [length.to_le_bytes().as_slice(), &valid[8..]].concat()
            }
            // A changed header with the correct length.
            _ => {
                let mut changed = header.clone().into_bytes();
                mutate(&mut changed, &mut random);
                [(changed.len() as u64).to_le_bytes().as_slice(), &changed, &valid[valid.len() - bytes..]].concat()
            }
        };
        folder.write("model.safetensors", &file);
        accepted += usize::from(open(&folder, &format!("round {round}")));
    }
    assert!(
        (50 * times()..5_000 * times()).contains(&accepted),
        "{accepted} of {rounds} were accepted: the mutations are too weak or too strong"
    );
}

/// Configurations with every field that is read.
fn configurations() -> Vec<String> {
    let extra = [
        json!({"rope_scaling": {"type": "linear", "factor": 4.0}, "attention_bias": true, "mlp_bias": true}),
        json!({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "partial_rotary_factor": 1.0}),
        json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}}),
        json!({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": false, "original_max_position_embeddings": 16}}),
        json!({"model_type": "qwen2", "use_sliding_window": false, "sliding_window": 32, "max_window_layers": 1, "layer_types": ["full_attention"]}),
        json!({"model_type": "qwen3", "tie_word_embeddings": true, "dtype": "bfloat16"}),
        json!({"model_type": "mistral", "sliding_window": null, "eos_token_id": [1, 2]}),
        json!({"model_type": "smollm3", "no_rope_layers": [0], "no_rope_layer_interval": 4, "use_sliding_window": false}),
        json!({"model_type": "granite", "embedding_multiplier": 12.0, "attention_multiplier": 0.5, "residual_multiplier": 0.22, "logits_scaling": 8.0}),
        json!({"model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 512, "sliding_window_pattern": 6, "layer_types": ["sliding_attention"], "query_pre_attn_scalar": 256, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
        json!({"model_type": "gemma3_text", "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
        json!({"model_type": "ministral3", "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}}),
        json!({"model_type": "olmo2", "rms_norm_eps": 1e-6, "attention_bias": false}),
        json!({"model_type": "phi3", "head_dim": 8, "partial_rotary_factor": 0.5, "original_max_position_embeddings": 16, "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [1.0, 4.0], "attention_factor": 1.2}}),
    ];
    let with = |extra: &Value| {
        let mut config = tiny::config();
        for (name, value) in extra.as_object().expect("object") {
            config[name] = value.clone();
        }
        config.to_string()
    };
    extra.iter().map(with).collect()
}

#[test]
fn mutated_configurations() {
    let valid = configurations();
    let mut random = Random(0x5EED_0002);
    let mut accepted = 0;
    let rounds = 20_000 * times();
    for round in 0..rounds {
        let mut config = valid[random.below(valid.len())].clone().into_bytes();
        let mut generation = b"{\"eos_token_id\": [2, 3], \"temperature\": 0.6}".to_vec();
        mutate(if round % 8 == 0 { &mut generation } else { &mut config }, &mut random);
        let what = format!("round {round}");
        accepted += usize::from(soon(&what, || match parse(&config, Some(&generation)) {
            Ok(config) => {
                assert!(config.heads % config.kv_heads == 0 && config.head_dim % 2 == 0 && config.max_positions > 0);
                assert!(config.eos.iter().all(|&id| (id as usize) < config.vocab));
                let (mut cos, mut sin) = (vec![0.0; config.head_dim / 2], vec![0.0; config.head_dim / 2]);
                let table = RopeTable::new(&config);
                for position in [0, 1, config.max_positions - 1] {
                    table.fill(position, position + 1, &mut cos, &mut sin);
                    assert!(cos.iter().chain(&sin).all(|x| x.is_finite()), "{what}: {:?}", config.rope);
                }
                true
            }
            Err(error) => {
                assert_error(&error, &what);
                false
            }
        }));
    }
    assert!((500 * times()..19_000 * times()).contains(&accepted), "{accepted} of {rounds} were accepted");
}

#[test]
fn mutated_shard_indexes() {
    let folder = Folder::valid();
    std::fs::rename(folder.path().join("model.safetensors"), folder.path().join("one.safetensors")).expect("rename");
    let map: Map<String, Value> =
        tiny::tensors().iter().map(|(name, _)| (name.to_string(), json!("one.safetensors"))).collect();
    let valid = json!({"metadata": {"total_size": 2048}, "weight_map": map}).to_string();
    let mut random = Random(0x5EED_0003);
    let mut accepted = 0;
    let rounds = 2_000 * times();
    for round in 0..rounds {
        let mut index = valid.clone().into_bytes();
        mutate(&mut index, &mut random);
        folder.write("model.safetensors.index.json", &index);
        accepted += usize::from(open(&folder, &format!("round {round}")));
    }
    assert!((20 * times()..1_500 * times()).contains(&accepted), "{accepted} of {rounds} were accepted");
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
fn a_header_takes_the_memory_of_its_bytes() {
    const BYTES: usize = 32 << 20;
    let folder = Folder::valid();
    for (before, unit, after, expected) in [
        ("{\"a\":[0", ",0", "]}", "described in"),
        ("{\"a\":{\"dtype\":\"F32\",\"shape\":[1", ",1", "],\"data_offsets\":[0,4]}}", "described in"),
        ("{\"__metadata__\":[0", ",[]", "]}", "has no tensor"),
        ("{\"a\":", "[", "", "header that is not valid"),
    ] {
        let text = [before, &unit.repeat(BYTES / unit.len()), after].concat();
        folder.write("model.safetensors", &tiny::file(&text, 0));
        drop(text);
        let known = peak();
        let error = Checkpoint::open(folder.path()).expect_err("hostile");
        assert!(error.message.contains(expected), "{error:?}");
        assert_error(&error, expected);
        assert!(peak() - known < 2 * BYTES, "{expected}: {} bytes for {BYTES}", peak() - known);
    }
    let many = (0..70_000).map(|i| format!("\"{i}\":0")).collect::<Vec<_>>().join(",");
    folder.write("model.safetensors", &tiny::file(&format!("{{{many}}}"), 0));
    let error = Checkpoint::open(folder.path()).expect_err("many");
    assert!(error.message.contains("more than 65536 tensors"), "{error:?}");
}

#[test]
fn deep_and_wide_json() {
    let folder = Folder::valid();
    let deep = ["{\"a\":".repeat(50_000), "[".repeat(200_000)];
    let wide = format!("{{{}}}", (0..100_000).map(|i| format!("\"{i}\":0")).collect::<Vec<_>>().join(","));
    for text in deep.into_iter().chain([wide]) {
        for file in ["config.json", "generation_config.json", "model.safetensors"] {
            let folder = Folder::valid();
            let header = (text.len() as u64).to_le_bytes();
            let prefix = if file == "model.safetensors" { header.as_slice() } else { &[] };
            folder.write(file, &[prefix, text.as_bytes()].concat());
            open(&folder, file);
        }
    }
    // A sparse file as long as it claims; the header's own limit prevents reading it.
    let path = folder.path().join("model.safetensors");
    std::fs::write(&path, (1u64 << 36).to_le_bytes()).expect("write");
    std::fs::OpenOptions::new().write(true).open(&path).and_then(|file| file.set_len(1 << 37)).expect("sparse file");
    assert!(!open(&folder, "sparse"));
}
