//! Quantised safetensors compared bit for bit with NumPy's values (golden/quantised.py) and with what the formats' libraries pack
//! (golden/quantised_writers.py), and unusable files.

#[path = "support/folder.rs"]
mod folder;
#[path = "support/mutate.rs"]
mod mutate;

use folder::Folder;
use mutate::{Random, mutate};
use quantspec_core::config::Dtype;
use quantspec_model::checkpoint::{Checkpoint, LayerPart, Part};
use quantspec_model::safetensors::SafeTensors;
use serde_json::{Map, Value, json};
use std::path::PathBuf;

const MODULES: [&str; 7] = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
];

type Tensors = Vec<(String, &'static str, Vec<usize>, Vec<u8>)>;

fn golden() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

/// Formats in files of these names; the other files hold their tensors.
const FILES: [&str; 2] = ["quantised", "quantised_writers"];

fn formats_of(file: &str) -> Map<String, Value> {
    let text = std::fs::read(golden().join(file).with_extension("json")).expect("formats");
    serde_json::from_slice(&text).expect("JSON")
}

fn formats() -> Map<String, Value> {
    FILES.into_iter().flat_map(formats_of).collect()
}

/// All tensors of a format, including plain ones and matrices that the format does not have, and the expected matrices.
fn tensors(format: &str) -> (Tensors, Tensors) {
    let file = FILES.into_iter().find(|file| formats_of(file).contains_key(format)).expect("format");
    let file = SafeTensors::open(&golden().join(file).with_extension("safetensors")).expect("golden");
    let plain = [
        ("model.embed_tokens.weight", vec![8, 32]),
        ("lm_head.weight", vec![8, 32]),
        ("model.norm.weight", vec![32]),
        ("model.layers.0.input_layernorm.weight", vec![32]),
        ("model.layers.0.post_attention_layernorm.weight", vec![32]),
    ];
    let zeros = |shape: &[usize]| vec![0; 2 * shape.iter().product::<usize>()];
    let mut stored: Tensors =
        plain.into_iter().map(|(name, shape)| (name.to_string(), "F16", shape.clone(), zeros(&shape))).collect();
    let shapes = [[32, 32], [16, 32], [16, 32], [32, 32], [64, 32], [64, 32], [32, 64]];
    for (module, shape) in MODULES.into_iter().zip(shapes) {
        let begins = format!("{format}/model.layers.0.{module}.");
        if !file.tensors().keys().any(|name| name.starts_with(&begins)) {
            let name = format!("model.layers.0.{module}.weight");
            stored.push((name, "F16", shape.to_vec(), zeros(&shape)));
        }
    }
    let mut expected = Vec::new();
    for (name, tensor) in file.tensors() {
        let Some(name) = name.strip_prefix(format).and_then(|rest| rest.strip_prefix('/')) else { continue };
        let mut bytes = vec![0; tensor.bytes as usize];
        file.read(tensor.offset, &mut bytes).expect("bytes");
        let list = if name.ends_with(".expected") { &mut expected } else { &mut stored };
        list.push((name.to_string(), tensor.dtype, tensor.shape.clone(), bytes));
    }
    (stored, expected)
}

fn write(folder: &Folder, quantisation: &Value, tensors: &Tensors) {
    write_as(json!({"model_type": "llama"}), folder, quantisation, tensors);
}

/// Writes a checkpoint; `family` has the fields of config.json that only its family has.
fn write_as(family: Value, folder: &Folder, quantisation: &Value, tensors: &Tensors) {
    let mut config = json!({
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 16, "vocab_size": 8, "torch_dtype": "float16", "quantization_config": quantisation
    });
    config.as_object_mut().expect("object").extend(family.as_object().expect("object").clone());
    folder.write("config.json", config.to_string().as_bytes());
    let (mut header, mut body) = (Map::new(), Vec::new());
    for (name, dtype, shape, bytes) in tensors {
        let start = body.len();
        body.extend(bytes);
        header.insert(name.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": [start, body.len()]}));
    }
    let header = Value::Object(header).to_string();
    folder.write("model.safetensors", &[&(header.len() as u64).to_le_bytes(), header.as_bytes(), &body].concat());
}

/// Compares a folder's matrices with the expected ones; other matrices may be plain.
fn compare(folder: &Folder, expected: &Tensors, what: &str) {
    let checkpoint = Checkpoint::open(folder.path()).unwrap_or_else(|error| panic!("{what}: {error:?}"));
    let mut compared = 0;
    for (part, module) in LayerPart::MATRICES.into_iter().zip(MODULES) {
        let part = Part::Layer(0, part);
        let found = expected.iter().find(|entry| entry.0.contains(module));
        assert_eq!(checkpoint.has_codes(part), found.is_some(), "{what}: codes of {module}");
        let Some((_, _, _, values)) = found else { continue };
        compared += 1;
        assert_eq!((checkpoint.dtype(part), checkpoint.bytes(part)), (Dtype::F16, values.len()), "{what}");
        let rows = checkpoint.shape(part).0;
        let mut whole = vec![0; values.len()];
        checkpoint.read(part, 0..rows, &mut whole).expect("read");
        assert!(whole == *values, "{what}: {module}");
        let row = values.len() / rows;
        checkpoint.read(part, 3..5, &mut whole[..2 * row]).expect("rows");
        assert!(whole[..2 * row] == values[3 * row..5 * row], "{what}: rows of {module}");
    }
    assert_eq!(compared, expected.len());
    assert!(compared >= 1, "{what}");
}

#[test]
fn values_are_those_of_an_independent_reader_bit_for_bit() {
    for (format, quantisation) in formats() {
        let (stored, expected) = tensors(&format);
        let folder = Folder::empty();
        write(&folder, &quantisation, &stored);
        compare(&folder, &expected, &format);
    }
}

/// Other names of layouts that the goldens have.
#[test]
fn libraries_name_the_layouts_of_others() {
    let integers = |bits: u32, packing: &str, key: &str, method: &str| json!({"quant_method": method, "bits": bits, "group_size": 16, "data_type": "int", key: packing});
    let mut names = vec![
        ("gptq4", json!({"quant_method": "auto-round", "bits": 4, "group_size": 16, "act_bits": 16})),
        (
            "fp8-channel",
            json!({"quant_method": "auto-round", "bits": 8, "group_size": -1, "data_type": "fp", "act_bits": 8, "packing_format": "auto_round:fp8_static"}),
        ),
        ("fp8-tensor", json!({"quant_method": "auto-round", "bits": 8, "group_size": 0, "data_type": "fp"})),
        ("fp8-block", json!({"quant_method": "auto-round", "bits": 8, "group_size": [24, 24], "data_type": "fp"})),
        (
            "fp8-mx",
            json!({"quant_method": "auto-round", "bits": 8, "group_size": 32, "data_type": "mx_fp", "packing_format": "auto_round:llm_compressor"}),
        ),
        ("fp8-mx", json!({"quant_method": "mxfp8"})),
        ("fp8-mx", json!({"quant_method": "modelopt", "quant_algo": "MXFP8"})),
        ("fp8-tensor", json!({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8}})),
    ];
    for (format, bits, packing) in [
        ("gptq4", 4, "auto_round:auto_gptq"),
        ("gptq8", 8, "auto_round:gptq:exllamav2"),
        ("gptq4-v2", 4, "auto_round"),
        ("gptq4-v2", 4, "auto_round:exllamav2"),
        ("gptq4-v2", 4, "auto_round:gptqmodel"),
        ("awq", 4, "auto_round:awq:gemm"),
    ] {
        names.push((format, integers(bits, packing, "packing_format", "auto-round")));
        names.push((format, integers(bits, packing, "backend", "intel/auto-round")));
    }
    for (format, quantisation) in names {
        let (stored, expected) = tensors(format);
        let folder = Folder::empty();
        write(&folder, &quantisation, &stored);
        compare(&folder, &expected, &format!("{format} as {quantisation}"));
    }
}

/// Takes the tensors of each module from the format named with it.
fn mixed(formats: [&str; 7]) -> (Tensors, Tensors) {
    let (mut stored, mut expected) = (Vec::new(), Vec::new());
    for (index, (format, module)) in formats.into_iter().zip(MODULES).enumerate() {
        let (codes, values) = tensors(format);
        let of_module = |name: &str| name.contains(&format!(".{module}.")) || index == 0 && !name.contains("_proj.");
        stored.extend(codes.into_iter().filter(|(name, ..)| of_module(name)));
        expected.extend(values.into_iter().filter(|(name, ..)| name.contains(&format!(".{module}."))));
    }
    (stored, expected)
}

#[test]
fn modules_may_have_schemes_of_their_own() {
    let group = |of: &str| formats()[of]["config_groups"]["group_0"].clone();
    let in_format = |of: &str| {
        let mut group = group(of);
        group["format"] = formats()[of]["format"].clone();
        group
    };
    for (schemes, quantisation) in [
        (
            ["gptq4", "gptq8", "gptq4", "gptq8", "gptq4", "gptq4-whole", "gptq4"],
            json!({"quant_method": "gptq", "bits": 4, "group_size": 16, "dynamic": {
                "-:.*q_norm": {}, "+:.*[ko]_proj": {"bits": 8}, ".*up_proj": {"group_size": -1}}}),
        ),
        (
            ["gptq4", "gptq8", "gptq4", "gptq8", "gptq4", "gptq4-whole", "gptq4"],
            json!({"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 16,
                "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}, "a": {"bits": 8, "group_size": null}, "b": {"group_size": -1}}}),
        ),
        (
            ["awq", "awq", "awq", "awq", "awq", "awq-whole", "awq"],
            json!({"quant_method": "awq", "bits": 4, "group_size": 16, "dynamic": {".*up_proj": {"group_size": -1}}}),
        ),
        (
            ["int4", "int4-zeros", "fp8-channel", "int4", "int8", "int4-zeros", "fp8-channel"],
            json!({"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": {
                "a": in_format("int4"), "b": in_format("int4-zeros"), "c": in_format("fp8-channel"), "d": in_format("int8")}}),
        ),
    ] {
        let (stored, expected) = mixed(schemes);
        let folder = Folder::empty();
        write(&folder, &quantisation, &stored);
        compare(&folder, &expected, &format!("{schemes:?}"));
    }
    // Groups of 24 and of 20 have the same shapes here.
    let quantisation =
        json!({"quant_method": "gptq", "bits": 4, "group_size": 24, "dynamic": {".*": {"group_size": 20}}});
    let folder = Folder::empty();
    write(&folder, &quantisation, &tensors("gptq4").0);
    let error = Checkpoint::open(folder.path()).expect_err("ambiguous");
    assert!(error.message.contains("two of which fit \"model.layers.0.self_attn.q_proj\""), "{error:?}");
}

#[test]
fn a_file_may_describe_the_quantisation() {
    for (format, file, weights, quantisation) in [
        (
            "gptq4",
            "quantize_config.json",
            "gptq_model-4bit-16g.safetensors",
            json!({"bits": 4, "group_size": 16, "desc_act": true, "sym": false, "model_name_or_path": null}),
        ),
        (
            "awq",
            "quant_config.json",
            "model.safetensors",
            json!({"zero_point": true, "q_group_size": 16, "w_bit": 4, "version": "GEMM", "modules_to_not_convert": null}),
        ),
        (
            "fp8-tensor",
            "hf_quant_config.json",
            "model.safetensors",
            json!({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}),
        ),
    ] {
        let (mut stored, expected) = tensors(format);
        if format == "fp8-tensor" {
            stored.push(("model.layers.0.self_attn.k_proj.k_scale".to_string(), "F32", Vec::new(), vec![0; 4]));
        }
        let folder = Folder::empty();
        write(&folder, &Value::Null, &stored);
        std::fs::rename(folder.path().join("model.safetensors"), folder.path().join(weights)).expect("rename");
        let error = Checkpoint::open(folder.path()).expect_err("no description");
        assert!(error.message.contains("which quantization_config"), "{error:?}");
        assert!(error.hint.contains(file), "{error:?}");
        folder.write(file, quantisation.to_string().as_bytes());
        compare(&folder, &expected, file);
        folder.write(file, b"{");
        let error = Checkpoint::describe(folder.path()).expect_err("damaged");
        assert!(error.message.contains(&format!("{file} is not valid JSON")), "{error:?}");
        folder.write(file, b"{}");
        let error = Checkpoint::describe(folder.path()).expect_err("empty");
        assert!(error.message.starts_with(&format!("{file}: ")), "{error:?}");
        // config.json decides.
        let config = std::fs::read(folder.path().join("config.json")).expect("config");
        let mut config: Value = serde_json::from_slice(&config).expect("JSON");
        config["quantization_config"] = formats()[format].clone();
        folder.write("config.json", config.to_string().as_bytes());
        compare(&folder, &expected, format);
    }
}

/// Replaces the tensors of some modules by those of one that has their outputs, in order.
fn fuse(tensors: &mut Tensors, parts: &[&str], into: &str) {
    let of_part =
        |part: &str, (name, ..): &(String, &'static str, Vec<usize>, Vec<u8>)| name.contains(&format!(".{part}."));
    let (mut first, rest): (Tensors, Tensors) =
        std::mem::take(tensors).into_iter().partition(|tensor| of_part(parts[0], tensor));
    for (name, _, shape, bytes) in &mut first {
        let inputs_first = ["qweight", "qzeros", "scales"].iter().any(|suffix| name.ends_with(suffix));
        for part in &parts[1..] {
            let other = name.replace(parts[0], part);
            let (_, _, more, data) = rest.iter().find(|(name, ..)| *name == other).expect("tensor");
            let groups = if inputs_first { shape[0] } else { 1 };
            let rows = bytes.chunks(bytes.len() / groups).zip(data.chunks(data.len() / groups));
            *bytes = rows.flat_map(|(one, other)| [one, other].concat()).collect();
            shape[usize::from(inputs_first)] += more[usize::from(inputs_first)];
        }
        *name = name.replace(parts[0], into);
    }
    *tensors = first;
    tensors.extend(rest.into_iter().filter(|tensor| !parts.iter().any(|part| of_part(part, tensor))));
}

#[test]
fn fused_matrices_of_phi3_are_divided() {
    let open = |quantisation: &Value, mut tensors: Tensors| {
        fuse(&mut tensors, &["q_proj", "k_proj", "v_proj"], "qkv_proj");
        fuse(&mut tensors, &["gate_proj", "up_proj"], "gate_up_proj");
        let folder = Folder::empty();
        // Half of the channels are rotated, so rows of Q and K are permuted, too.
        write_as(json!({"model_type": "phi3", "partial_rotary_factor": 0.5}), &folder, quantisation, &tensors);
        Checkpoint::open(folder.path()).expect("checkpoint")
    };
    for format in ["fp8-channel", "int8", "int4", "int4-zeros", "awq"] {
        let (mut stored, expected) = tensors(format);
        stored.retain(|(name, ..)| !name.ends_with("weight_shape"));
        let mut plain: Tensors = stored.iter().filter(|(name, ..)| !name.contains("_proj.")).cloned().collect();
        plain.extend(
            expected
                .into_iter()
                .map(|(name, dtype, shape, bytes)| (name.replace(".expected", ".weight"), dtype, shape, bytes)),
        );
        let checkpoints = [open(&formats()[format], stored), open(&Value::Null, plain)];
        for part in LayerPart::MATRICES.map(|part| Part::Layer(0, part)) {
            let [quantised, plain] = checkpoints.each_ref().map(|checkpoint| {
                let mut bytes = vec![0; checkpoint.bytes(part)];
                checkpoint.read(part, 0..checkpoint.shape(part).0, &mut bytes).expect("read");
                bytes
            });
            assert!(quantised == plain, "{format}: {part:?}");
        }
    }
}

#[test]
fn missing_tensors_and_other_shapes_are_refused() {
    for (format, quantisation) in formats() {
        let (stored, _) = tensors(&format);
        for index in 5..stored.len() {
            let name = stored[index].0.clone();
            let optional = name.ends_with("g_idx") || name.ends_with("weight_shape");
            let mut damaged = [stored.clone(), stored.clone(), stored.clone()];
            damaged[0].remove(index);
            (damaged[1][index].2, damaged[1][index].3) = (vec![0], Vec::new());
            damaged[2][index].1 = if damaged[2][index].1 == "F16" { "I16" } else { "U16" };
            damaged[2][index].2 = vec![damaged[2][index].3.len() / 2];
            for (number, tensors) in damaged.iter().enumerate() {
                if optional && (number == 0 || name.ends_with("weight_shape")) {
                    continue;
                }
                let folder = Folder::empty();
                write(&folder, &quantisation, tensors);
                let error = Checkpoint::open(folder.path()).expect_err(&name);
                assert!(!error.message.contains('\n') && !error.hint.is_empty(), "{error:?}");
            }
        }
    }
}

#[test]
fn a_bias_of_a_quantised_matrix_must_be_zero() {
    let quantisation = &formats()["gptq4"];
    for (value, length, refused) in [(0, 32, false), (1, 32, true), (0, 33, true)] {
        let (mut stored, _) = tensors("gptq4");
        let bias = ("model.layers.0.mlp.down_proj.bias".to_string(), "F16", vec![length], vec![value; 2 * length]);
        stored.push(bias);
        let folder = Folder::empty();
        write(&folder, quantisation, &stored);
        let outcome = Checkpoint::open(folder.path());
        assert_eq!(outcome.is_err(), refused, "{outcome:?}");
    }
}

#[test]
fn a_missing_configuration_is_named_before_a_bias() {
    let (mut stored, _) = tensors("gptq4");
    stored.push(("model.layers.0.mlp.down_proj.bias".to_string(), "F16", vec![32], vec![0; 64]));
    let folder = Folder::empty();
    write(&folder, &Value::Null, &stored);
    let error = Checkpoint::open(folder.path()).expect_err("no quantization_config");
    assert!(error.message.contains("g_idx\" is of a quantised matrix, which quantization_config"), "{error:?}");
    assert!(error.hint.contains("quantize_config.json"), "{error:?}");
}

#[test]
fn bytes_may_hold_codes_of_four_bits() {
    let mut quantisation = formats()["int8"].clone();
    quantisation["config_groups"]["group_0"]["weights"]["num_bits"] = json!(4);
    let folder = Folder::empty();
    write(&folder, &quantisation, &tensors("int8").0);
    Checkpoint::open(folder.path()).expect("W4A8");
}

/// Activations are not quantised, so their scales next to codes of a byte have no effect. Other formats have none.
#[test]
fn scales_of_activations_are_ignored_next_to_bytes() {
    for (format, name) in [
        ("fp8-tensor", "input_scale"),
        ("fp8-block", "activation_scale"),
        ("int8", "input_scale"),
        ("int8", "input_zero_point"),
        ("gptq4", "activation_scale"),
    ] {
        let (mut stored, _) = tensors(format);
        stored.push((format!("model.layers.0.mlp.down_proj.{name}"), "F32", Vec::new(), vec![0; 4]));
        let folder = Folder::empty();
        write(&folder, &formats()[format], &stored);
        let outcome = Checkpoint::open(folder.path());
        assert_eq!(outcome.is_ok(), format != "gptq4", "{format}: {outcome:?}");
    }
}

#[test]
fn unsupported_options_are_refused() {
    let (stored, _) = tensors("gptq4");
    for (quantisation, expected) in [
        (json!({"quant_method": "bitsandbytes"}), "method \"bitsandbytes\""),
        (json!({"load_in_8bit": true}), "{\"load_in_8bit\":true} without a quant_method"),
        (json!({"quant_method": "gptq", "bits": 3, "group_size": 16}), "GPTQ with 3 bits"),
        (json!({"quant_method": "gptq", "bits": 4, "group_size": 0}), "group_size 0"),
        (
            json!({"quant_method": "gptq", "bits": 4, "group_size": 16, "checkpoint_format": "marlin"}),
            "checkpoint_format \"marlin\"",
        ),
        (
            json!({"quant_method": "gptq", "bits": 4, "group_size": 16, "dynamic": {"-:.*q_proj": {}, ".*k_proj": {"bits": 4}, ".*down_proj": {"bits": 3}}}),
            "GPTQ with 3 bits is not supported (dynamic \".*down_proj\")",
        ),
        (
            json!({"quant_method": "gptq", "bits": 4, "group_size": 16, "is_marlin_format": true}),
            "is_marlin_format true",
        ),
        (json!({"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemv"}), "version \"gemv\""),
        (json!({"quant_method": "awq", "bits": 4, "group_size": 16, "format": "gemv_fast"}), "format \"gemv_fast\""),
        (
            json!({"quant_method": "awq", "bits": 4, "group_size": 16, "dynamic": {".*up_proj": {"bits": 8}}}),
            "bits 8 is not supported (dynamic \".*up_proj\")",
        ),
        (
            json!({"quant_method": "auto-round", "bits": 2, "group_size": 32, "packing_format": "auto_round:auto_gptq"}),
            "GPTQ with 2 bits",
        ),
        (
            json!({"quant_method": "auto-round", "bits": 4, "group_size": 16, "packing_format": "auto_round:marlin"}),
            "packing_format \"auto_round:marlin\"",
        ),
        (
            json!({"quant_method": "auto-round", "bits": 4, "group_size": 16, "data_type": "nv_fp", "packing_format": "auto_round:llm_compressor"}),
            "AutoRound's data_type \"nv_fp\" with 4 bits",
        ),
        (json!({"quant_method": "auto-round", "bits": 4, "group_size": 16, "act_bits": 8}), "INT with act_bits 8"),
        (
            json!({"quant_method": "auto-round", "bits": 4, "group_size": 16, "rotation_config": {}}),
            "rotation_config {}",
        ),
        (
            json!({"quant_method": "auto-round", "bits": 4, "group_size": 16, "extra_config": {"lm_head": {"data_type": "mx_fp"}}}),
            "(extra_config \"lm_head\")",
        ),
        (json!({"quant_method": "modelopt", "quant_algo": "NVFP4"}), "ModelOpt's \"NVFP4\" is not supported"),
        (json!({"quant_method": "mxfp4"}), "method \"mxfp4\""),
        (json!({"quant_method": "fp8", "weight_scale_semantics": "inverse"}), "weight_scale_semantics \"inverse\""),
        (json!({"quant_method": "fp8", "weight_block_size": [0, 128]}), "weight_block_size 0"),
        (json!({"quant_method": "compressed-tensors", "config_groups": {}}), "config_groups without a group"),
        (
            json!({"quant_method": "gptq", "bits": 4, "group_size": 1, "dynamic":
                (2..20).map(|size| (size.to_string(), json!({"group_size": size}))).collect::<Map<String, Value>>()}),
            "a mixture of more than 16 schemes",
        ),
        (
            json!({"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "config_groups": {
                "a": {"weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}},
            }}),
            "mxfp4-pack-quantized of type float with 4 bits",
        ),
        (
            json!({"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": {
                "a": {"format": "float-quantized", "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}},
                "b": {"format": "nvfp4-pack-quantized", "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group"}},
            }}),
            "nvfp4-pack-quantized of type float with 4 bits",
        ),
        (json!([]), "[]"),
    ] {
        let folder = Folder::empty();
        write(&folder, &quantisation, &stored);
        let error = Checkpoint::open(folder.path()).expect_err(expected);
        assert!(error.message.contains(expected) && !error.message.contains('\n'), "{error:?}");
    }
    // MLX has a field of its own. A plan reads config.json alone, so the names of tensors are no help.
    let folder = Folder::empty();
    let mlx = json!({"model_type": "llama", "quantization": {"group_size": 64, "bits": 4}});
    write_as(mlx, &folder, &Value::Null, &stored);
    let error = Checkpoint::describe(folder.path()).expect_err("MLX");
    assert!(error.message.contains("MLX's quantization {\"bits\":4,\"group_size\":64} is not supported"), "{error:?}");
}

#[test]
fn mutated_files_are_read_or_refused_in_one_line() {
    let formats: Vec<(String, Value)> = formats().into_iter().collect();
    let mut random = Random(0x5EED_0028);
    let (folder, mut accepted) = (Folder::empty(), 0);
    for round in 0..4_000 {
        let (format, quantisation) = &formats[random.below(formats.len())];
        let name = ["config.json", "model.safetensors", "quantize_config.json"][random.below(3)];
        let beside = name == "quantize_config.json";
        write(&folder, if beside { &Value::Null } else { quantisation }, &tensors(format).0);
        folder.write("quantize_config.json", quantisation.to_string().as_bytes());
        let file = folder.path().join(name);
        let mut bytes = std::fs::read(&file).expect("file");
        // The header of safetensors, without its length and the values.
        let length = bytes.first_chunk().map_or(0, |length| u64::from_le_bytes(*length)) as usize;
        if name.ends_with("config.json") {
            mutate(&mut bytes, &mut random);
        } else {
            let mut header = bytes[8..8 + length].to_vec();
            mutate(&mut header, &mut random);
            bytes = [&(header.len() as u64).to_le_bytes(), header.as_slice(), &bytes[8 + length..]].concat();
        }
        std::fs::write(&file, &bytes).expect("write");
        let outcome = Checkpoint::open(folder.path()).and_then(|checkpoint| {
            for part in Part::all(checkpoint.config()) {
                let mut values = vec![0; checkpoint.bytes(part)];
                checkpoint.read(part, 0..checkpoint.shape(part).0, &mut values)?;
            }
            Ok(())
        });
        match outcome {
            Ok(()) => accepted += 1,
            Err(error) => {
                let one_line = |text: &str| !text.is_empty() && !text.chars().any(char::is_control);
                assert!(one_line(&error.message) && one_line(&error.hint), "round {round}, {format}: {error:?}");
            }
        }
    }
    assert!((20..3_500).contains(&accepted), "{accepted} of 4000 were accepted");
}
