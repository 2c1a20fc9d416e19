//! Unusable checkpoints: each is refused with one line that names the problem, and one line with the remedy.

#[path = "support/tiny.rs"]
mod tiny;

use quantspec_core::config::{
    Activation, Dtype, LayerNorms, ModelConfig, QkNorm, QueryScale, Rope, RopeScaling, Scales,
};
use quantspec_core::{Error, ErrorKind};
use quantspec_model::checkpoint::{Checkpoint, LayerPart, Part};
use quantspec_model::config::parse;
use serde_json::{Value, json};
use tiny::Folder;

/// The checkpoint must be refused, with a message that contains `expected`.
fn refused(folder: &Folder, expected: &str) -> Error {
    let error = match Checkpoint::open(folder.path()) {
        Ok(_) => panic!("accepted, expected: {expected}"),
        Err(error) => error,
    };
    check(&error, expected);
    error
}

fn remove(folder: &Folder, file: &str) {
    std::fs::remove_file(folder.path().join(file)).expect("remove");
}

fn check(error: &Error, expected: &str) {
    assert!(error.message.contains(expected), "message: {}\nexpected: {expected}", error.message);
    assert!(!error.hint.is_empty() && !error.hint.contains('\n') && !error.message.contains('\n'), "{error:?}");
    assert!(error.message.len() < 400, "{} characters", error.message.len());
}

fn with_config(fields: Value) -> Value {
    let mut config = tiny::config();
    for (name, value) in fields.as_object().expect("object") {
        match value {
            Value::String(text) if text == "REMOVE" => {
                config.as_object_mut().expect("object").remove(name);
            }
            _ => config[name] = value.clone(),
        }
    }
    config
}

fn parsed(fields: Value) -> ModelConfig {
    parse(with_config(fields).to_string().as_bytes(), None).expect("config")
}

fn config_refused(fields: Value, expected: &str) {
    match parse(with_config(fields.clone()).to_string().as_bytes(), None) {
        Ok(_) => panic!("accepted: {fields}"),
        Err(error) => {
            assert_eq!(error.kind, ErrorKind::Model);
            check(&error, expected);
        }
    }
}

/// The valid weights with one change to the header.
fn changed(change: impl FnOnce(&mut Value)) -> Vec<u8> {
    let (mut header, bytes) = tiny::header(&tiny::tensors());
    change(&mut header);
    tiny::file(&header.to_string(), bytes)
}

#[test]
fn the_undamaged_checkpoint_is_read() {
    let checkpoint = Checkpoint::open(Folder::valid().path()).expect("checkpoint");
    let part = Part::Layer(0, LayerPart::K);
    assert_eq!((checkpoint.shape(part), checkpoint.dtype(part)), ((4, 8), Dtype::F32));
    // The k projection's data starts after 16·8 + 8 + 8·8 values; row 2 is 16 further.
    let mut row = [0.0; 8];
    checkpoint.read_f32(part, 2..3, &mut row).expect("row");
    let first = 16 * 8 + 8 + 8 * 8 + 16;
    assert_eq!(row, std::array::from_fn(|i| (first + i) as f32 / 64.0 - 2.0));
    let mut bytes = [0; 32];
    checkpoint.read(part, 2..3, &mut bytes).expect("row");
    assert_eq!(bytes.as_chunks::<4>().0.iter().map(|x| f32::from_le_bytes(*x)).collect::<Vec<_>>(), row);
    assert_eq!(checkpoint.read_f32(part, 3..5, &mut row).map_err(|error| error.kind), Err(ErrorKind::Internal));
    assert!(!checkpoint.has(Part::Layer(0, LayerPart::QBias)) && checkpoint.has(Part::Head));
}

#[test]
fn a_description_has_the_sizes_of_the_checkpoint_and_nothing_to_read() {
    for tied in [false, true] {
        let folder = Folder::valid();
        folder.write("config.json", with_config(json!({"tie_word_embeddings": tied})).to_string().as_bytes());
        if tied {
            let head_last = &tiny::tensors()[..tiny::tensors().len() - 1];
            let (header, bytes) = tiny::header(head_last);
            folder.write("model.safetensors", &tiny::file(&header.to_string(), bytes));
        }
        let whole = Checkpoint::open(folder.path()).expect("checkpoint");
        remove(&folder, "model.safetensors");
        let described = Checkpoint::describe(folder.path()).expect("config.json alone");
        assert_eq!(described.config(), whole.config());
        for part in Part::all(whole.config()).into_iter().chain([Part::Head, Part::Layer(0, LayerPart::QBias)]) {
            assert_eq!(described.has(part), whole.has(part), "{part:?}");
            assert_eq!(
                (described.bytes(part), described.dtype(part)),
                (whole.bytes(part), whole.dtype(part)),
                "{part:?}"
            );
        }
        let mut row = [0.0; 8];
        let read = described.read_f32(Part::Embedding, 0..1, &mut row);
        assert_eq!(read.map_err(|error| error.kind), Err(ErrorKind::Internal));
    }
    let error = Checkpoint::describe(Folder::empty().path()).expect_err("no config.json");
    check(&error, "has no config.json");
}

#[test]
fn a_stand_in_has_every_part_and_made_up_rows() {
    let folder = Folder::valid();
    let whole = Checkpoint::open(folder.path()).expect("checkpoint");
    for dtype in [Dtype::Bf16, Dtype::F16, Dtype::F32] {
        let made_up = Checkpoint::stand_in(ModelConfig { dtype, ..whole.config().clone() });
        for part in Part::all(whole.config()) {
            let (rows, width) = whole.shape(part);
            assert_eq!((made_up.has(part), made_up.dtype(part), made_up.shape(part)), (true, dtype, (rows, width)));
            let mut all = vec![0.0; rows * width];
            made_up.read_f32(part, 0..rows, &mut all).expect("rows");
            // Of BF16 numbers, 0.4 % more by rounding.
            assert!(all.iter().all(|x| x.abs() < 1.004 / (width as f32).sqrt()), "{part:?}");
            // Each row is its own, however it is read.
            let mut last = vec![0.0; width];
            made_up.read_f32(part, rows - 1..rows, &mut last).expect("a row");
            assert_eq!(last, all[(rows - 1) * width..]);
            assert!(rows == 1 || last != all[..width], "{part:?}");
        }
        assert!(!made_up.has(Part::Layer(whole.config().layers, LayerPart::Q)));
        assert!(!made_up.has(Part::Layer(0, LayerPart::QBias)));
    }
}

#[test]
fn a_stored_head_of_a_tied_model_decides() {
    let folder = Folder::valid();
    folder.write("config.json", with_config(json!({"tie_word_embeddings": true})).to_string().as_bytes());
    let rows = |checkpoint: &Checkpoint| {
        let (mut table, mut head) = ([0.0; 8], [0.0; 8]);
        checkpoint.read_f32(Part::Embedding, 3..4, &mut table).expect("row");
        checkpoint.read_f32(Part::Head, 3..4, &mut head).expect("row");
        (table, head)
    };
    let different = Checkpoint::open(folder.path()).expect("checkpoint");
    let (table, head) = rows(&different);
    assert!(!different.config().tied_embeddings && table != head);

    let mut weights = tiny::weights();
    let (start, end) = (weights.len() - tiny::header(&tiny::tensors()).1, weights.len());
    weights.copy_within(start..start + 512, end - 512);
    folder.write("model.safetensors", &weights);
    let equal = Checkpoint::open(folder.path()).expect("checkpoint");
    assert!(equal.config().tied_embeddings && rows(&equal) == (table, table));

    let (header, bytes) = tiny::header(&tiny::tensors()[1..]);
    folder.write("model.safetensors", &tiny::file(&header.to_string(), bytes));
    let alone = Checkpoint::open(folder.path()).expect("checkpoint");
    let (table, head) = rows(&alone);
    assert!(alone.config().tied_embeddings && table == head);
}

#[test]
fn missing_files() {
    let folder = Folder::empty();
    refused(&folder, "has no config.json");
    folder.write("config.json", tiny::config().to_string().as_bytes());
    refused(&folder, "has neither model.safetensors nor model.safetensors.index.json");
    for (file, hint) in
        [("model.gguf", "GGUF"), ("adapter_model.safetensors", "LoRA"), ("pytorch_model.bin", "pickled")]
    {
        folder.write(file, b"x");
        assert!(refused(&folder, "has neither").hint.contains(hint));
        remove(&folder, file);
    }
    std::fs::create_dir(folder.path().join("model.safetensors")).expect("directory");
    refused(&folder, "model.safetensors");
    check(
        &Checkpoint::open(&folder.path().join("nothing")).expect_err("no directory"),
        "is neither a directory nor a GGUF file",
    );
}

/// transformers applies an adapter next to weights, so the weights alone are another model.
#[test]
fn an_adapter_next_to_weights_is_refused() {
    let folder = Folder::valid();
    folder.write("adapter_config.json", b"{}");
    assert!(refused(&folder, "holds a LoRA adapter (adapter_config.json)").hint.contains("merge"));
}

#[test]
fn json_that_is_no_configuration() {
    let folder = Folder::valid();
    for name in ["config.json", "generation_config.json"] {
        let folder = Folder::valid();
        folder.write(name, &vec![b' '; (4 << 20) + 1]);
        assert_eq!(refused(&folder, &format!("{name} is larger than 4194304 bytes")).kind, ErrorKind::Model);
    }
    remove(&folder, "model.safetensors");
    folder.write("model.safetensors.index.json", &vec![b' '; (4 << 20) + 1]);
    refused(&folder, "model.safetensors.index.json is larger than 4194304 bytes");
}

#[test]
#[cfg(unix)]
fn pipes_are_no_files() {
    for name in ["config.json", "generation_config.json", "model.safetensors"] {
        let folder = Folder::valid();
        let path = folder.path().join(name);
        let _ = std::fs::remove_file(&path);
        let made = std::process::Command::new("mkfifo").arg(&path).status().expect("mkfifo");
        assert!(made.success());
        // Opening it would block until a writer opens it.
        refused(&folder, "not a file");
    }
}

#[test]
fn damaged_weights() {
    let folder = Folder::valid();
    let valid = tiny::weights();
    let mut cases: Vec<(Vec<u8>, &str)> = vec![
        (Vec::new(), "is 0 bytes long"),
        (valid[..7].to_vec(), "is 7 bytes long"),
        (b"version https://git-lfs.github.com/spec/v1\n".to_vec(), "is a pointer of Git LFS"),
        (valid[..200].to_vec(), "claims a header of"),
        (valid[..valid.len() - 1].to_vec(), "that ends at byte"),
        ([valid.clone(), vec![0; 3]].concat(), "has 3 bytes after its last tensor"),
        ([(3u64 << 40).to_le_bytes().as_slice(), &valid[8..]].concat(), "claims a header of 3298534883328 bytes"),
        ([u64::MAX.to_le_bytes().as_slice(), &valid[8..]].concat(), "claims a header of 18446744073709551615 bytes"),
        (tiny::file("{\"a\": ", 0), "header that is not valid"),
        (tiny::file("[]", 0), "header that is not valid"),
        (tiny::file(&"[".repeat(100_000), 0), "header that is not valid"),
        (tiny::file("{}", 0), "no tensor \"model.embed_tokens.weight\""),
    ];
    let q = "model.layers.0.self_attn.q_proj.weight";
    cases.push((changed(|h| h[q]["data_offsets"] = json!([520, 776])), "overlapping the one before it by 24 bytes"));
    cases.push((changed(|h| h[q]["data_offsets"] = json!([543, 799])), "overlapping the one before it by 1 bytes"));
    cases.push((changed(|h| drop(h.as_object_mut().map(|h| h.remove(q)))), "bytes of no tensor before"));
    cases.push((changed(|h| h[q]["data_offsets"] = json!([800, 544])), "ends (byte 544) before it begins (byte 800)"));
    cases.push((changed(|h| h[q]["data_offsets"] = json!([544, u64::MAX])), "that ends at byte 18446744073709551615"));
    cases.push((changed(|h| h[q]["data_offsets"] = json!([544])), "with 1 data_offsets instead of 2"));
    cases.push((changed(|h| h[q]["data_offsets"] = json!([-1, 5])), "without valid data_offsets"));
    cases.push((changed(|h| h[q]["shape"] = json!([8, 9])), "of 256 bytes, but F32 [8, 9] needs 288"));
    cases.push((changed(|h| h[q]["shape"] = json!([1u64 << 40, 1u64 << 40])), "of impossible shape"));
    cases.push((changed(|h| h[q]["shape"] = json!(vec![1; 1000])), "of 1000 dimensions"));
    cases.push((changed(|h| h[q]["shape"] = json!([16, 4])), "has shape [16, 4], config.json expects [8, 8]"));
    cases.push((changed(|h| h[q]["shape"] = json!([64])), "has shape [64], config.json expects [8, 8]"));
    cases.push((changed(|h| h[q]["dtype"] = json!("I32")), "has dtype I32, which is not supported"));
    cases.push((changed(|h| h[q]["dtype"] = json!("F33")), "of unknown dtype \"F33\""));
    cases.push((changed(|h| h[q] = json!(7)), "without a dtype"));
    cases.push((
        changed(|h| {
            h["model.layers.0.self_attn.q_proj.bias"] =
                json!({"dtype": "F32", "shape": [0], "data_offsets": [544, 544]})
        }),
        "is no part of a llama network",
    ));
    for name in ["lm_head.bias", "model.norm.bias", "model.embed_tokens.extra"] {
        cases.push((
            changed(|h| h[name] = json!({"dtype": "F32", "shape": [0], "data_offsets": [544, 544]})),
            "is no part of a llama network",
        ));
    }
    cases.push((
        changed(|h| h["lm_head.weight_scale"] = json!({"dtype": "F32", "shape": [0], "data_offsets": [544, 544]})),
        "is of a quantised matrix",
    ));
    cases.push((
        changed(|h| {
            h["model.layers.1.mlp.up_proj.weight"] = json!({"dtype": "F32", "shape": [0], "data_offsets": [544, 544]})
        }),
        "is outside the 1 layers",
    ));
    cases.push((
        changed(|h| {
            h["model.layers.0.mlp.up_proj.qweight"] = json!({"dtype": "I32", "shape": [0], "data_offsets": [544, 544]})
        }),
        "is of a quantised matrix",
    ));
    let (header, bytes) = tiny::header(&tiny::tensors());
    let twice = header.to_string().replacen('{', &format!("{{\"{q}\":{},", header[q]), 1);
    cases.push((tiny::file(&twice, bytes), "comes twice"));
    for (file, expected) in cases {
        folder.write("model.safetensors", &file);
        assert_eq!(refused(&folder, expected).kind, ErrorKind::Model);
    }
}

#[test]
fn non_finite_weights_are_refused() {
    for (value, shown) in [(f32::NAN, "NaN"), (f32::NEG_INFINITY, "-inf")] {
        let mut weights = tiny::weights();
        let at = weights.len() - 4 * (16 * 8) - 4 * 3; // the third last value of the final norm
        weights[at..at + 4].copy_from_slice(&value.to_le_bytes());
        let folder = Folder::valid();
        folder.write("model.safetensors", &weights);
        let checkpoint = Checkpoint::open(folder.path()).expect("the header is sound");
        let error = checkpoint.read_f32(Part::FinalNorm, 0..1, &mut [0.0; 8]).expect_err("not finite");
        assert_eq!(error.kind, ErrorKind::NotFinite);
        check(&error, &format!("model.norm.weight is {shown} at element 5"));
        // Elements are counted from the tensor's first row, for any rows read.
        let mut weights = tiny::weights();
        let at = weights.len() - 4 * (16 * 8) + 4 * (2 * 8 + 3);
        weights[at..at + 4].copy_from_slice(&value.to_le_bytes());
        folder.write("model.safetensors", &weights);
        let checkpoint = Checkpoint::open(folder.path()).expect("the header is sound");
        assert!(checkpoint.read_f32(Part::Head, 0..2, &mut [0.0; 16]).is_ok());
        let error = checkpoint.read_f32(Part::Head, 1..3, &mut [0.0; 16]).expect_err("not finite");
        check(&error, &format!("lm_head.weight is {shown} at element 19"));
    }
}

#[test]
fn a_file_that_shrinks_after_opening_is_an_error() {
    let folder = Folder::valid();
    let checkpoint = Checkpoint::open(folder.path()).expect("checkpoint");
    let file = std::fs::OpenOptions::new().write(true).open(folder.path().join("model.safetensors")).expect("open");
    file.set_len(100).expect("shrink");
    let error = checkpoint.read_f32(Part::Head, 0..16, &mut [0.0; 128]).expect_err("short");
    assert_eq!(error.kind, ErrorKind::Io);
    check(&error, &format!("cannot read {}", folder.path().join("model.safetensors").display()));
}

#[cfg(unix)]
#[test]
fn unreadable_weights_are_not_missing() {
    let folder = Folder::valid();
    remove(&folder, "model.safetensors");
    let path = folder.path().join("model.safetensors");
    std::os::unix::fs::symlink("model.safetensors", &path).expect("a link to itself");
    let error = refused(&folder, &format!("cannot read {}", path.display()));
    assert_eq!(error.kind, ErrorKind::Io);
}

/// The state of a half-pruned hub cache.
#[cfg(unix)]
#[test]
fn dangling_links_are_not_missing_files() {
    for name in ["generation_config.json", "config.json", "adapter_config.json", "model.safetensors"] {
        let folder = Folder::valid();
        let path = folder.path().join(name);
        let _ = std::fs::remove_file(&path);
        std::os::unix::fs::symlink("../../blobs/4e20", &path).expect("a link");
        let error =
            refused(&folder, &format!("{} is a link to ../../blobs/4e20, which does not exist", path.display()));
        assert_eq!(error.kind, ErrorKind::Io);
    }
}

#[test]
fn shards() {
    let folder = Folder::valid();
    remove(&folder, "model.safetensors");
    let tensors = tiny::tensors();
    let (one, two) = tensors.split_at(5);
    // Recomputed tensors may be absent from the index.
    let one = [one, &[("model.layers.0.self_attn.rotary_emb.inv_freq", vec![2])]].concat();
    for (name, tensors) in [("one.safetensors", &one[..]), ("two.safetensors", two)] {
        let (header, bytes) = tiny::header(tensors);
        folder.write(name, &tiny::file(&header.to_string(), bytes));
    }
    let shard = |index: usize| if index < 5 { "one.safetensors" } else { "two.safetensors" };
    let map: serde_json::Map<String, Value> =
        tensors.iter().enumerate().map(|(index, (name, _))| (name.to_string(), json!(shard(index)))).collect();
    let write =
        |map: Value| folder.write("model.safetensors.index.json", json!({"weight_map": map}).to_string().as_bytes());
    let with = |name: &str, file: Value| {
        let mut map = map.clone();
        map.insert(name.to_string(), file);
        Value::Object(map)
    };
    write(Value::Object(map.clone()));
    let checkpoint = Checkpoint::open(folder.path()).expect("shards");
    let mut norm = [0.0; 8];
    checkpoint.read_f32(Part::Layer(0, LayerPart::MlpNorm), 0..1, &mut norm).expect("second shard");
    assert_eq!(norm[0], 64.0 / 64.0 - 2.0); // after the 8·8 values of o_proj

    for file in ["../one.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", "C:x", "a\\b"] {
        write(with("lm_head.weight", json!(file)));
        refused(&folder, "which is not a plain file name");
    }
    write(with("lm_head.weight", json!(17)));
    refused(&folder, "names the shard 17");
    write(with("lm_head.weight", json!("three.safetensors")));
    refused(&folder, "shard three.safetensors of the checkpoint is missing");
    write(with("lm_head.weight", json!("one.safetensors")));
    let one = folder.path().join("one.safetensors");
    refused(&folder, &format!("places \"lm_head.weight\" in {}, which does not hold it", one.display()));
    write(with("more", json!("two.safetensors")));
    refused(&folder, "places \"more\"");
    let mut without = map.clone();
    without.remove("lm_head.weight");
    write(Value::Object(without));
    let two = folder.path().join("two.safetensors");
    refused(&folder, &format!("does not place \"lm_head.weight\" in {}, which holds it", two.display()));
    write(
        (0..600)
            .map(|i| (format!("t{i}"), json!(format!("{i}.safetensors"))))
            .collect::<serde_json::Map<_, _>>()
            .into(),
    );
    refused(&folder, "names 600 shards");
    folder.write("model.safetensors.index.json", b"{}");
    refused(&folder, "has no weight_map");
    folder.write("model.safetensors.index.json", b"{\"weight_map\":");
    refused(&folder, "is not valid JSON");
}

#[test]
fn absurd_configurations() {
    for field in
        ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "model_type"]
    {
        config_refused(json!({field: "REMOVE"}), &format!("{field} is missing"));
        config_refused(json!({field: null}), &format!("{field} is missing"));
        config_refused(json!({field: [1]}), &format!("{field} is [1], not "));
    }
    for field in ["hidden_size", "num_hidden_layers", "num_key_value_heads", "vocab_size", "max_position_embeddings"] {
        config_refused(json!({field: 0}), &format!("{field} is 0, not a whole number from 1 to"));
        config_refused(json!({field: -4}), &format!("{field} is -4, not"));
        config_refused(json!({field: 1e12}), &format!("{field} is 1000000000000.0, not"));
        config_refused(json!({field: u64::MAX}), &format!("{field} is 18446744073709551615, not"));
        config_refused(json!({field: 2.5}), &format!("{field} is 2.5, not"));
    }
    config_refused(json!({"num_attention_heads": 4, "num_key_value_heads": 3}), "3 key/value heads do not divide 4");
    config_refused(
        json!({"head_dim": "REMOVE", "num_attention_heads": 3, "num_key_value_heads": 3}),
        "3 attention heads do not divide hidden_size 8",
    );
    config_refused(json!({"head_dim": 5}), "head_dim 5 is not an even number");
    config_refused(json!({"head_dim": 1024}), "head_dim is 1024, not a whole number from 4 to 256");
    config_refused(json!({"rms_norm_eps": 0.0}), "rms_norm_eps 0");
    config_refused(json!({"rms_norm_eps": "small"}), "rms_norm_eps is \"small\", not a number");
    config_refused(json!({"rope_theta": 1.0}), "rope_theta 1 ");
    config_refused(json!({"rope_theta": -5}), "rope_theta -5 ");
    config_refused(json!({"tie_word_embeddings": "yes"}), "tie_word_embeddings is \"yes\", not true or false");
    config_refused(json!({"eos_token_id": 16}), "eos_token_id is 16, not a token id below 16");
    config_refused(json!({"eos_token_id": [2, -1]}), "eos_token_id is -1");
    config_refused(json!({"rope_scaling": {"type": "linear"}}), "rope_scaling: factor is missing");
    config_refused(json!({"rope_scaling": {"type": "linear", "factor": 0.0}}), "factor 0 is not from 1");
    config_refused(json!({"rope_scaling": {"type": "linear", "factor": 1e300}}), "is not from 1 to 65536");
    config_refused(
        json!({"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}}),
        "low_freq_factor 4 is not below high_freq_factor 1",
    );
    config_refused(
        json!({"rope_scaling": {"type": "yarn", "factor": 4, "attention_factor": -1}}),
        "attention factor -1",
    );
    config_refused(json!({"rope_scaling": 4}), "rope_scaling is 4, not an object");
    for (bytes, expected) in
        [(b"".as_slice(), "is not valid JSON"), (b"[1]", "is not a JSON object"), (b"\xff\xfe{}", "not valid JSON")]
    {
        check(&parse(bytes, None).expect_err("no object"), expected);
    }
    let config = tiny::config().to_string();
    check(&parse(config.as_bytes(), Some(b"{")).expect_err("damaged"), "generation_config.json is not valid JSON");
    let long = "x".repeat(1_000_000);
    config_refused(json!({"hidden_size": long}), "hidden_size is \"xxxx");
    config_refused(json!({"model_type": "evil\u{1b}[2J\nname"}), "model family \"evil");
}

#[test]
fn unsupported_models_are_named() {
    config_refused(json!({"model_type": "mixtral"}), "model family \"mixtral\" (mixture of experts) is not supported");
    config_refused(json!({"model_type": "qwen3_moe"}), "model family \"qwen3_moe\" (mixture of experts)");
    config_refused(json!({"model_type": "gemma2"}), "model family \"gemma2\" is not supported");
    config_refused(json!({"model_type": "jamba"}), "model family \"jamba\"");
    config_refused(
        json!({"architectures": ["LlamaForSequenceClassification"]}),
        "architecture \"LlamaForSequenceClassification\"",
    );
    config_refused(json!({"hidden_act": "gelu"}), "activation \"gelu\"");
    config_refused(json!({"torch_dtype": "float8_e4m3fn"}), "dtype \"float8_e4m3fn\"");
    config_refused(json!({"partial_rotary_factor": 0.5}), "partial rotary embeddings");
    config_refused(json!({"rope_scaling": {"type": "xpos", "factor": 4}}), "RoPE type \"xpos\"");
    config_refused(
        json!({"rope_parameters": {"full_attention": {"rope_type": "default"}}}),
        "RoPE by layer type (\"full_attention\")",
    );
    config_refused(json!({"layer_types": ["linear_attention"]}), "layer type \"linear_attention\"");
    config_refused(json!({"layer_types": ["sliding_attention"]}), "sliding_window is missing");
    let factor = json!({"rope_scaling": {"type": "yarn", "factor": 4, "extrapolation_factor": 0.5}});
    config_refused(factor, "rope_scaling: extrapolation_factor 0.5 is not supported");
}

#[test]
fn settings_of_transformers_are_refused_if_they_have_an_effect() {
    for (fields, message) in [
        (json!({"is_causal": false}), "attention to later tokens (is_causal false)"),
        (json!({"attention_chunk_size": 16}), "attention_chunk_size (16)"),
        (json!({"kv_sharing_modes": ["self", "share"]}), "kv_sharing_modes"),
        (json!({"num_kv_shared_layers": 1}), "num_kv_shared_layers 1"),
        (json!({"per_layer_config": {"0": {}}}), "per_layer_config"),
        (json!({"transformers_weights": "other.safetensors"}), "transformers_weights (\"other.safetensors\")"),
    ] {
        config_refused(fields, message);
    }
    parsed(
        json!({"is_causal": true, "attention_chunk_size": null, "num_kv_shared_layers": 0, "per_layer_config": null}),
    );
}

/// Dual chunk attention equals plain attention up to one chunk minus its overlap with the next.
#[test]
fn chunks_bound_the_context() {
    let chunks = |chunk: usize, local: usize| {
        json!({"model_type": "qwen2", "max_position_embeddings": 1000,
            "dual_chunk_attention_config": {"chunk_size": chunk, "local_size": local, "original_max_position_embeddings": 256}})
    };
    assert_eq!(parsed(chunks(256, 8)).max_positions, 248);
    assert_eq!(parsed(chunks(512, 8)).max_positions, 256);
    config_refused(chunks(8, 8), "chunk_size 8 is not above local_size 8");
}

/// Attention to a sliding window equals full attention up to the length of the window.
#[test]
fn sliding_windows_bound_the_context() {
    for (fields, context) in [
        (json!({"model_type": "mistral", "sliding_window": 63}), 63),
        (json!({"model_type": "mistral", "sliding_window": 64}), 64),
        (json!({"model_type": "mistral", "sliding_window": 65}), 64),
        (json!({"model_type": "mistral", "sliding_window": null}), 64),
        // Without the field, a mistral configuration has the family's window of 4096 tokens.
        (json!({"model_type": "mistral", "max_position_embeddings": 8192}), 4096),
        (
            json!({"model_type": "ministral", "sliding_window": 32, "layer_types": ["full_attention", "sliding_attention"]}),
            32,
        ),
        (json!({"model_type": "ministral", "sliding_window": 32, "layer_types": ["full_attention"]}), 64),
        (json!({"model_type": "qwen2", "use_sliding_window": false, "sliding_window": 32, "max_window_layers": 0}), 64),
        (json!({"model_type": "qwen2", "use_sliding_window": true, "sliding_window": 32, "max_window_layers": 1}), 64),
        (json!({"model_type": "qwen2", "use_sliding_window": true, "sliding_window": 32, "max_window_layers": 0}), 32),
        (json!({"model_type": "qwen3", "sliding_window": null, "layer_types": ["full_attention"]}), 64),
        (
            json!({"model_type": "qwen2", "use_sliding_window": true, "sliding_window": null, "max_window_layers": 0,
                "max_position_embeddings": 8192}),
            8192,
        ),
        (json!({"model_type": "qwen3", "sliding_window": 32, "layer_types": ["sliding_attention"]}), 32),
        (json!({"model_type": "llama", "sliding_window": 32}), 32),
        (json!({"model_type": "llama", "sliding_window": 32, "use_sliding_window": false}), 64),
        (json!({"model_type": "llama", "sliding_window": 32, "layer_types": ["full_attention"]}), 64),
        (json!({"model_type": "smollm3", "use_sliding_window": true, "sliding_window": 32}), 32),
        (json!({"model_type": "smollm3", "sliding_window": 32}), 64),
    ] {
        assert_eq!(parsed(fields.clone()).max_positions, context, "{fields}");
    }
}

#[test]
fn families_have_their_own_defaults() {
    let llama = parsed(json!({"attention_bias": true, "mlp_bias": true, "num_key_value_heads": "REMOVE"}));
    assert_eq!(
        (llama.kv_heads, llama.qkv_bias, llama.output_bias, llama.mlp_bias, llama.qk_norm),
        (2, true, true, true, QkNorm::None)
    );
    let qwen2 = parsed(json!({"model_type": "qwen2", "head_dim": "REMOVE", "attention_bias": true}));
    assert_eq!((qwen2.head_dim, qwen2.qkv_bias, qwen2.output_bias), (4, true, false));
    let qwen3 = parsed(json!({"model_type": "qwen3", "head_dim": "REMOVE"}));
    assert_eq!((qwen3.head_dim, qwen3.qkv_bias, qwen3.qk_norm), (128, false, QkNorm::Heads));
    let mistral = parsed(json!({"model_type": "mistral", "sliding_window": null, "attention_bias": true}));
    assert_eq!((mistral.qkv_bias, mistral.rope.theta), (false, 10_000.0));
    // If the file states the original context, the context is the stretched one.
    let yarn = parsed(json!({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}));
    assert_eq!(yarn.max_positions, 256);
    assert!(matches!(yarn.rope.scaling, RopeScaling::Yarn { original: 64, truncate: true, .. }));
    // `attn_factor` multiplies YaRN's own factor, and not one that is stated.
    let attention = |fields: &[(&str, f64)]| {
        let mut scaling = json!({"type": "yarn", "factor": 4.0, "extrapolation_factor": 1.0});
        for (name, value) in fields {
            scaling[*name] = json!(value);
        }
        match parsed(json!({"rope_scaling": scaling})).rope.scaling {
            RopeScaling::Yarn { attention_factor, .. } => attention_factor,
            other => panic!("{other:?}"),
        }
    };
    let own = 0.1 * 4.0f64.ln() + 1.0;
    assert_eq!((attention(&[]), attention(&[("attn_factor", 0.5)])), (own, 0.5 * own));
    assert_eq!(attention(&[("attn_factor", 0.5), ("attention_factor", 2.0)]), 2.0);
    assert_eq!(parsed(json!({"rope_scaling": {"type": "dynamic", "factor": 2.0}})).max_positions, 128);
    // An original context next to the scaling wins over one inside it; a stated context is never shortened.
    let both = parsed(json!({
        "original_max_position_embeddings": 32,
        "rope_scaling": {"type": "yarn", "factor": 1.5, "original_max_position_embeddings": 16}
    }));
    assert!(matches!(both.rope.scaling, RopeScaling::Yarn { original: 32, .. }));
    assert_eq!(both.max_positions, 64);
    // Defaults of transformers 5.23.
    let heads = json!({"num_attention_heads": 32, "num_key_value_heads": "REMOVE", "head_dim": 8});
    for (family, kv_heads, positions) in [
        ("llama", 32, 2048),
        ("mistral", 8, 131_072),
        ("ministral", 8, 131_072),
        ("qwen2", 32, 32_768),
        ("qwen3", 32, 32_768),
        ("granite", 32, 2048),
    ] {
        let mut fields = heads.clone();
        fields["model_type"] = json!(family);
        for absent in ["max_position_embeddings", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "attention_bias"]
        {
            fields[absent] = json!("REMOVE");
        }
        fields["sliding_window"] = Value::Null;
        let config = parsed(fields);
        assert_eq!((config.kv_heads, config.max_positions), (kv_heads, positions), "{family}");
        assert_eq!((config.rms_eps, config.rope.theta, config.tied_embeddings), (1e-6, 10_000.0, false), "{family}");
    }
}

/// Hugging Face's classes compute these two from other fields, where an absent one has the default of its family.
#[test]
fn null_heads_are_computed() {
    for family in ["llama", "mistral", "qwen2", "qwen3", "smollm3"] {
        let config = parsed(json!({"model_type": family, "num_key_value_heads": null, "head_dim": null}));
        assert_eq!((config.heads, config.kv_heads, config.head_dim), (2, 2, 4), "{family}");
    }
}

#[test]
fn layers_without_positions_are_read() {
    let layers = |fields: Value| {
        let mut all = json!({"model_type": "smollm3", "num_hidden_layers": 8});
        all.as_object_mut().expect("object").extend(fields.as_object().expect("object").clone());
        parsed(all).no_rope.iter().map(|none| u8::from(!none)).collect::<Vec<_>>()
    };
    assert_eq!(layers(json!({})), [1, 1, 1, 0, 1, 1, 1, 0]);
    assert_eq!(layers(json!({"no_rope_layer_interval": 3})), [1, 1, 0, 1, 1, 0, 1, 1]);
    assert_eq!(layers(json!({"no_rope_layer_interval": 9})), [0u8; 0]);
    // The list decides; entries after the last layer are not used.
    let list = json!({"no_rope_layers": [0, 1, 1, 1, 1, 1, 1, 0, 1, 1], "no_rope_layer_interval": 2});
    assert_eq!(layers(list), [0, 1, 1, 1, 1, 1, 1, 0]);
    assert_eq!(layers(json!({"no_rope_layers": vec![1; 8]})), [0u8; 0]);
    let defaults = json!({"model_type": "smollm3", "rope_theta": "REMOVE", "tie_word_embeddings": "REMOVE",
        "max_position_embeddings": "REMOVE"});
    let config = parsed(defaults);
    assert_eq!((config.rope.theta, config.tied_embeddings, config.max_positions), (2e6, true, 32_768));
    // Other families have no such field.
    assert!(parsed(json!({"no_rope_layers": [0]})).no_rope.is_empty());
    let refused = |field: &str, value: Value, expected: &str| {
        config_refused(json!({"model_type": "smollm3", field: value}), expected);
    };
    refused("no_rope_layers", json!([]), "no_rope_layers has 0 entries for 1 layers");
    refused("no_rope_layers", json!(4), "no_rope_layers is 4, not a list");
    refused("no_rope_layers", json!([2]), "no_rope_layers is 2, not a list of 0 (no RoPE) and 1 (RoPE)");
    refused("no_rope_layers", json!([0.5]), "no_rope_layers is 0.5");
    refused("no_rope_layer_interval", json!(0), "no_rope_layer_interval is 0");
}

#[test]
fn norms_after_the_branches_are_read() {
    let config = parsed(json!({"model_type": "olmo2", "rms_norm_eps": "REMOVE", "num_key_value_heads": "REMOVE"}));
    assert_eq!((config.rms_eps, config.kv_heads, config.tied_embeddings), (1e-5, 2, false));
    assert_eq!((config.qk_norm, config.norms), (QkNorm::Projection, LayerNorms::After));
    parsed(json!({"model_type": "olmo2", "attention_bias": false}));
    let biased = json!({"model_type": "olmo2", "attention_bias": true});
    config_refused(biased, "attention_bias in a olmo2 network is not supported");
    assert_eq!(parsed(json!({})).norms, LayerNorms::Before);
}

#[test]
fn local_layers_are_read() {
    let bare = json!({"model_type": "gemma3_text", "num_hidden_layers": 8, "hidden_act": "REMOVE", "rope_theta": "REMOVE",
        "num_attention_heads": "REMOVE", "num_key_value_heads": "REMOVE", "head_dim": "REMOVE", "vocab_size": "REMOVE",
        "max_position_embeddings": "REMOVE", "rms_norm_eps": "REMOVE", "tie_word_embeddings": "REMOVE"});
    let with = |extra: Value| {
        let mut fields = bare.clone();
        fields.as_object_mut().expect("object").extend(extra.as_object().expect("object").clone());
        fields
    };
    let config = parsed(bare.clone());
    assert_eq!((config.heads, config.kv_heads, config.head_dim, config.vocab), (8, 4, 256, 262_208));
    assert_eq!((config.max_positions, config.rms_eps, config.rope.theta), (131_072, 1e-6, 1e6));
    assert!(config.tied_embeddings && config.norms_less_one);
    assert_eq!((config.activation, config.norms, config.qk_norm), (Activation::Gelu, LayerNorms::Both, QkNorm::Heads));
    let local = config.local.clone().expect("local layers");
    assert_eq!((local.reach, local.rope.theta), (4096, 10_000.0));
    assert_eq!(local.layers, [true, true, true, true, true, false, true, true]);
    assert_eq!([4, 5, 8].map(|layer| config.reach(layer)), [Some(4096), None, None]);
    // The root of the hidden size 8, and heads of 256 channels.
    assert_eq!(config.scales, Scales { embedding: 8f32.sqrt(), scores: 1.0, logits: 1.0 });
    let config = parsed(with(json!({"query_pre_attn_scalar": 64, "sliding_window_pattern": 2, "sliding_window": 512,
        "rope_local_base_freq": 5e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}})));
    assert_eq!((config.scales.scores, &config.rope.scaling), (2.0, &RopeScaling::Linear { factor: 8.0 }));
    let local = config.local.expect("local layers");
    assert_eq!((local.reach, local.rope.theta, local.layers[..3].to_vec()), (512, 5e3, vec![true, false, true]));
    assert_eq!(local.rope.scaling, RopeScaling::None);
    // Lists of layers and RoPE by layer type, as transformers 5 writes them.
    let types = ["full_attention", "sliding_attention"].repeat(4);
    let by_type = |local: Value| {
        let full = json!({"rope_type": "default", "rope_theta": 2e6});
        json!({"layer_types": types, "rope_parameters": {"full_attention": full, "sliding_attention": local}})
    };
    let config = parsed(with(by_type(json!({"rope_type": "default", "rope_theta": 3e4}))));
    let local = config.local.expect("local layers");
    assert_eq!((config.rope.theta, local.rope.theta, local.layers[..2].to_vec()), (2e6, 3e4, vec![false, true]));
    // Both spellings: the old scaling with the new base.
    let mut both = with(by_type(json!({"rope_type": "default", "rope_theta": 3e4})));
    both["rope_scaling"] = json!({"rope_type": "linear", "factor": 8.0});
    let rope = parsed(both).rope;
    assert_eq!((rope.theta, rope.scaling), (2e6, RopeScaling::Linear { factor: 8.0 }));
    // As published: within the configuration of a model with a vision tower.
    let inner: serde_json::Map<_, _> = with(json!({"hidden_size": 8, "intermediate_size": 16}))
        .as_object()
        .expect("object")
        .iter()
        .filter(|(_, value)| **value != "REMOVE")
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect();
    let wrapped = json!({"model_type": "gemma3", "text_config": inner});
    assert_eq!(parse(wrapped.to_string().as_bytes(), None).expect("config").family, "gemma3_text");
    for (extra, expected) in [
        (
            json!({"sliding_window": 192}),
            "sliding_window 192, which is not a multiple of 64 from 256 on, is not supported",
        ),
        (json!({"sliding_window": 300}), "sliding_window 300, which is not a multiple of 64"),
        (json!({"sliding_window": "4"}), "sliding_window is \"4\", not a whole number"),
        (json!({"sliding_window_pattern": 0}), "sliding_window_pattern is 0"),
        (json!({"layer_types": ["full_attention"]}), "layer_types has 1 entries for 8 layers"),
        (json!({"layer_types": vec!["linear_attention"; 8]}), "layer type \"linear_attention\""),
        (json!({"attn_logit_softcapping": 50.0}), "attn_logit_softcapping (50.0) is not supported"),
        (json!({"final_logit_softcapping": 30.0}), "final_logit_softcapping (30.0) is not supported"),
        (json!({"use_bidirectional_attention": true}), "use_bidirectional_attention"),
        (json!({"hidden_activation": "gelu"}), "activation \"gelu\" (hidden_activation)"),
        (json!({"query_pre_attn_scalar": 0}), "query_pre_attn_scalar 0 is not from 1 to 1000000"),
        (json!({"attention_bias": true}), "attention_bias in a gemma3_text network is not supported"),
        (json!({"rope_local_base_freq": 1.0}), "rope_theta 1 is not above 1"),
        (by_type(json!({"rope_type": "yarn"})), "RoPE type \"yarn\" of local layers is not supported"),
        (json!({"rope_parameters": {"rope_type": "default"}}), "rope_parameters.full_attention is missing"),
    ] {
        config_refused(with(extra), expected);
    }
}

#[test]
fn growing_queries_are_read() {
    let parameters = json!({"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0});
    let fields = json!({"model_type": "ministral3", "rope_parameters": parameters, "rope_theta": "REMOVE",
        "rms_norm_eps": "REMOVE", "max_position_embeddings": "REMOVE", "sliding_window": null});
    let config = parsed(fields.clone());
    assert_eq!(config.rope.query_scale, Some(QueryScale { beta: 0.1, original: 16 }));
    assert_eq!((config.rope.theta, config.rms_eps, config.max_positions), (1e6, 1e-5, 262_144));
    assert_eq!([0, 15].map(|position| config.query_factor(position)), [1.0; 2]);
    let grown = [16, 47, 48].map(|position| config.query_factor(position));
    assert_eq!(grown, [2f64, 3.0, 4.0].map(|chunks| (1.0 + 0.1 * chunks.ln()) as f32));
    // As published: within the configuration of a model with a vision tower, which may say that the head is the embedding.
    let mut inner = json!({"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 16, "hidden_act": "silu"});
    inner.as_object_mut().expect("object").extend(
        fields
            .as_object()
            .expect("object")
            .iter()
            .filter(|(_, value)| *value != "REMOVE")
            .map(|(k, v)| (k.clone(), v.clone())),
    );
    let wrapped = |tied: bool| json!({"model_type": "mistral3", "text_config": inner, "tie_word_embeddings": tied});
    for tied in [true, false] {
        let config = parse(wrapped(tied).to_string().as_bytes(), None).expect("configuration");
        assert_eq!((config.family.as_str(), config.tied_embeddings), ("ministral3", tied));
    }
    // transformers 5 writes false, the inner default, beside an outer true, which is also what an absent one is.
    for (outer, inner_states) in [(json!(true), json!(false)), (Value::Null, json!(false)), (Value::Null, Value::Null)]
    {
        let mut both = wrapped(true);
        both["tie_word_embeddings"] = outer;
        both["text_config"]["tie_word_embeddings"] = inner_states;
        assert!(parse(both.to_string().as_bytes(), None).expect("configuration").tied_embeddings);
    }
    // Mistral's queries do not grow.
    let mut mistral = fields.clone();
    mistral["model_type"] = json!("mistral");
    assert_eq!(parsed(mistral).rope.query_scale, None);
    let with = |beta: Value| {
        let mut fields = fields.clone();
        fields["rope_parameters"]["llama_4_scaling_beta"] = beta;
        fields
    };
    for wrong in [-0.1, 101.0] {
        config_refused(with(json!(wrong)), &format!("llama_4_scaling_beta {wrong} is not from 0 to 100"));
    }
    config_refused(with(Value::Null), "rope_parameters: llama_4_scaling_beta is missing");
    config_refused(with(json!("0.1")), "llama_4_scaling_beta is \"0.1\", not a number");
    config_refused(json!({"model_type": "ministral3"}), "config.json: rope_parameters is missing");
    let mut windowed = fields;
    windowed["sliding_window"] = json!(32);
    assert_eq!(parsed(windowed).max_positions, 32);
}

#[test]
fn multipliers_are_read() {
    let names = ["embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"];
    let values = [12.0, 0.125, 0.25, 8.0];
    let mut fields = json!({"model_type": "granite", "rms_norm_eps": 1e-5});
    for (name, value) in names.iter().zip(values) {
        fields[*name] = json!(value);
    }
    let config = parsed(fields.clone());
    assert_eq!(config.scales, Scales { embedding: 48.0, scores: 0.25, logits: 0.125 });
    assert_eq!(config.rms_eps, 1.6e-4);
    // Without the fields all are 1: scores are not divided by the root of the head's 4 channels.
    let config = parsed(json!({"model_type": "granite"}));
    assert_eq!(config.scales, Scales { embedding: 1.0, scores: 2.0, logits: 1.0 });
    // Other families have none.
    fields["model_type"] = json!("llama");
    assert_eq!(parsed(fields.clone()).scales, Scales::NONE);
    for name in names {
        for value in [json!(0), json!(-1.0), json!(1e5), json!(1e-9)] {
            config_refused(json!({"model_type": "granite", name: value}), "is not from 0.0001 to 10000");
        }
        config_refused(json!({"model_type": "granite", name: "NaN"}), &format!("{name} is \"NaN\", not a number"));
    }
}

#[test]
fn long_rope_is_read() {
    let base = json!({
        "model_type": "phi3", "head_dim": 8, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 16,
        "rope_scaling": {"type": "longrope", "short_factor": [1, 1.5, 2], "long_factor": [1, 4, 16.5]},
    });
    let with = |field: &str, value: Value| {
        let mut fields = base.clone();
        fields["rope_scaling"][field] = value;
        fields
    };
    let rope = |fields: Value| match parsed(fields).rope {
        Rope { dim: 6, scaling: RopeScaling::Factors { factors, attention_factor }, .. } => (factors, attention_factor),
        other => panic!("{other:?}"),
    };
    // 64 tokens of an original 16.
    let own = 1.5f64.sqrt();
    assert_eq!(rope(base.clone()), (vec![1.0, 4.0, 16.5], own));
    assert_eq!(rope(with("attention_factor", json!(1.25))).1, 1.25);
    assert_eq!(rope(with("factor", json!(1))).1, 1.0);
    for old in ["su", "yarn"] {
        assert_eq!(rope(with("type", json!(old))), (vec![1.0, 4.0, 16.5], own));
    }
    let mut short = base.clone();
    short["original_max_position_embeddings"] = json!(64);
    assert_eq!(rope(short), (vec![1.0, 1.5, 2.0], 1.0));
    let mut family = base.clone();
    family["original_max_position_embeddings"] = json!("REMOVE");
    assert_eq!(rope(family).0, [1.0, 1.5, 2.0], "the family's 4096 tokens");

    config_refused(with("long_factor", json!([1, 2])), "long_factor has 2 numbers for 3 pairs of channels");
    config_refused(with("short_factor", json!([1, 2, 3, 4])), "short_factor has 4 numbers for 3 pairs of channels");
    config_refused(with("short_factor", json!([1, 0, 3])), "short_factor is 0, not a number from 1e-6 to 1e6");
    config_refused(with("long_factor", json!([1, -2, 3])), "long_factor is -2, not a number");
    config_refused(with("long_factor", json!("4")), "long_factor is \"4\", not a list");
    config_refused(with("long_factor", Value::Null), "long_factor is missing");
    config_refused(with("attention_factor", json!(0)), "attention factor 0 is not above 0");
    let mut one = base.clone();
    one["original_max_position_embeddings"] = json!(1);
    config_refused(one, "attention factor inf");
    for factor in [0.1, 0.4, 1.5, -1.0, 1e308] {
        let mut fields = base.clone();
        fields["partial_rotary_factor"] = json!(factor);
        config_refused(fields, &format!("{factor:?} of 8 channels is no even number from 4 to 8"));
    }
}

#[test]
fn generation_config_names_the_ends() {
    let config = tiny::config().to_string();
    let eos = |generation: &[u8]| parse(config.as_bytes(), Some(generation)).expect("config").eos;
    assert_eq!(eos(b"{\"eos_token_id\": [9, 3, 9]}"), [3, 9]);
    assert_eq!(eos(b"{\"eos_token_id\": 5}"), [5]);
    assert_eq!(eos(b"{\"temperature\": 0.6}"), [2]);
    let folder = Folder::valid();
    folder.write("generation_config.json", b"{\"eos_token_id\": [4, 5]}");
    assert_eq!(Checkpoint::open(folder.path()).expect("checkpoint").config().eos, [4, 5]);
}
