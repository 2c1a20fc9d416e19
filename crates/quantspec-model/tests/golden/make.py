"""Makes the golden checkpoints and logits next to this file, with Hugging Face transformers as the second opinion.

Made with Python 3.11, torch 2.11.0 (CPU), transformers 5.23.0, safetensors 0.8.0, numpy 2.4.6:

    pip install torch==2.11.0 transformers==5.23.0 safetensors==0.8.0 numpy==2.4.6
    python make.py [DIRECTORY ...]      # without a name all

phi3*, smollm3, granite*, olmo2, ministral3 and gemma3 are of transformers 5.17.0.

Every directory is one tiny random checkpoint (config.json, weights). `<variant>.json` is a configuration for the same
weights (config.json is the variant "config"), and `<variant>.golden.safetensors` what transformers makes of it in f32:

    ids      I32 [T]       token ids
    prefill  F32 [T][V]    row t: logits of the last position of a forward pass over ids[0..=t]
    steps    F32 [N][V]    row i: logits at position T - N + i when ids[..T-N] were prefilled and the rest fed one by
                           one with a key/value cache; written where it differs from `prefill`, which is for dynamic
                           RoPE, whose angles depend on the length at the time a key was made

The configurations are written by hand, in the spelling of published checkpoints, old and new; transformers reads the
same files as quantspec. Weights are drawn so that attention is sharp and far tokens matter: a wrong angle moves logits
by tenths.
"""

from __future__ import annotations

import json
import shutil
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).parent
VOCAB = 64


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    """The configuration less some fields."""
    return {name: value for name, value in config.items() if name not in names}


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
QWEN2 = LLAMA | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "use_sliding_window": False,
    "sliding_window": 16,
    "max_window_layers": 2,
    "rope_theta": 1000000.0,
}
QWEN3 = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 2,
    "rope_theta": 1000000.0,
}

PHI3: dict[str, Any] = {name: value for name, value in LLAMA.items() if name != "head_dim"} | {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "hidden_size": 128,
    "pad_token_id": 0,
    "original_max_position_embeddings": 1024,
    "rope_scaling": None,
    "sliding_window": None,
}
LONGROPE: dict[str, Any] = {
    "type": "longrope",
    "short_factor": [1.0 + 0.01 * pair for pair in range(24)],
    "long_factor": [round(1.0 + 0.05 * pair**2, 2) for pair in range(24)],
}
PHI4 = PHI3 | {
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.75,
    "rope_scaling": LONGROPE,
    "sliding_window": 2048,
    "tie_word_embeddings": True,
}
SMOLLM3 = LLAMA | {
    "architectures": ["SmolLM3ForCausalLM"],
    "model_type": "smollm3",
    "no_rope_layer_interval": 2,
    "pad_token_id": 0,
    "use_sliding_window": False,
    "sliding_window": None,
    "rope_theta": 5000000.0,
}
# Norms after the branches, and of queries and keys over all heads.
OLMO2 = LLAMA | {
    "architectures": ["Olmo2ForCausalLM"],
    "model_type": "olmo2",
    "attention_bias": False,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0,
}
# Every second layer sees 256 tokens. The root of the hidden size is a number in BF16.
GEMMA3 = without(LLAMA, "hidden_act") | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "sliding_window": 256,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 100,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
# Queries grow by 1 + beta ln(1 + floor(position / 16)).
MINISTRAL3 = without(MISTRAL, "rope_theta") | {
    "architectures": ["Ministral3ForCausalLM"],
    "model_type": "ministral3",
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "rope_parameters": {
        "rope_type": "yarn",
        "type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.5,
    },
}
GRANITE = LLAMA | {
    "architectures": ["GraniteForCausalLM"],
    "model_type": "granite",
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0078125,
}


# directory -> (variants of the configuration, tokens, shards)
CASES: dict[str, tuple[dict[str, dict[str, Any]], int, int]] = {
    # Every kind of RoPE over one set of weights, 48 tokens on original contexts of 16 to 64. Untied head, GQA 2.
    "llama-rope": (
        {
            "config": LLAMA,
            "none-new": without(LLAMA, "rope_theta")
            | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "dtype": "bfloat16"},
            "linear": LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}},
            "linear-new": without(LLAMA, "rope_theta")
            | {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 20000.0}},
            "dynamic": LLAMA | {"max_position_embeddings": 16, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "llama3": LLAMA
            | {
                "rope_theta": 500000.0,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 16,
                },
            },
            "llama3-new": without(LLAMA, "rope_theta")
            | {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 10000.0,
                    "factor": 32.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                }
            },
            "yarn": LLAMA
            | {
                "max_position_embeddings": 16,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
            },
            "yarn-new": without(LLAMA, "rope_theta")
            | {
                "max_position_embeddings": 960,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 40.0,
                    "beta_fast": 8,
                    "beta_slow": 2,
                    "mscale": 1.0,
                    "mscale_all_dim": 0.5,
                    "original_max_position_embeddings": 24,
                    "truncate": False,
                },
            },
            "yarn-factor": LLAMA
            | {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 16.0,
                    "attention_factor": 0.7,
                    "original_max_position_embeddings": 64,
                }
            },
        },
        48,
        1,
    ),
    # Long enough that pages are quantised and read: three pages and a buffer.
    "llama-long": (
        {"config": LLAMA | {"num_hidden_layers": 1, "rope_theta": 500000.0, "eos_token_id": [2, 3]}},
        560,
        1,
    ),
    # Biases everywhere; no key/value grouping; F16; head_dim from hidden_size.
    "llama-bias": (
        {
            "config": without(LLAMA, "head_dim", "num_key_value_heads")
            | {
                "hidden_size": 80,
                "num_attention_heads": 1,
                "attention_bias": True,
                "mlp_bias": True,
                "torch_dtype": "float16",
            }
        },
        40,
        1,
    ),
    # Tied; head_dim 96; GQA 4; F32; three shards.
    "llama-tied": (
        {
            "config": LLAMA
            | {
                "num_attention_heads": 4,
                "num_key_value_heads": 1,
                "head_dim": 96,
                "num_hidden_layers": 1,
                "tie_word_embeddings": True,
                "torch_dtype": "float32",
            }
        },
        40,
        3,
    ),
    "llama-256": ({"config": LLAMA | {"head_dim": 256, "num_hidden_layers": 1}}, 40, 1),
    # Two shards of BF16.
    "mistral": ({"config": MISTRAL | {"head_dim": 128, "num_hidden_layers": 1}}, 40, 2),
    # Q, K and V biases without a setting; tied; GQA 2 with two key/value heads.
    "qwen2": (
        {
            "config": without(QWEN2, "head_dim")
            | {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
            "yarn": without(QWEN2, "head_dim")
            | {
                "hidden_size": 128,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "tie_word_embeddings": True,
                "max_position_embeddings": 32,
                "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32, "type": "yarn"},
            },
        },
        48,
        1,
    ),
    # Norms of queries and keys; head_dim 128 of the family's default.
    "qwen3": ({"config": without(QWEN3, "head_dim") | {"tie_word_embeddings": True}}, 40, 1),
    # Two shards of F16.
    "qwen3-bias": (
        {"config": QWEN3 | {"attention_bias": True, "num_hidden_layers": 1, "head_dim": 80, "torch_dtype": "float16"}},
        40,
        2,
    ),
    # Queries, keys and values in one matrix, gate and up in another; two shards.
    "phi3": ({"config": PHI3}, 40, 2),
    # LongRoPE on the first 48 of 64 channels. More tokens than the original context: transformers then uses the long factors
    # in every row. `short` has the whole context as its original one.
    "phi3-long": (
        {
            "config": PHI4,
            "short": PHI4 | {"max_position_embeddings": 64, "original_max_position_embeddings": 64},
            "new": without(PHI4, "rope_scaling", "rope_theta", "partial_rotary_factor")
            | {
                "rope_parameters": LONGROPE
                | {"rope_theta": 500.0, "partial_rotary_factor": 0.75, "attention_factor": 0.9}
            },
            "unscaled": PHI4 | {"rope_scaling": None},
        },
        40,
        1,
    ),
    # Every second layer has no positions, or the layers that the configuration lists.
    "smollm3": (
        {
            "config": SMOLLM3 | {"tie_word_embeddings": True},
            "listed": SMOLLM3 | {"tie_word_embeddings": True, "no_rope_layers": [0, 1]},
        },
        48,
        1,
    ),
    "olmo2": ({"config": OLMO2}, 48, 1),
    # Twice as long as a local layer sees.
    "gemma3": (
        {
            "config": GEMMA3,
            "new": without(GEMMA3, "rope_theta", "rope_local_base_freq", "rope_scaling", "sliding_window_pattern")
            | {
                "layer_types": ["full_attention", "sliding_attention"],
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                },
            },
        },
        560,
        1,
    ),
    "ministral3": (
        {
            "config": MINISTRAL3,
            "plain": MINISTRAL3
            | {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 500.0,
                    "original_max_position_embeddings": 8,
                    "llama_4_scaling_beta": 0.1,
                }
            },
        },
        48,
        1,
    ),
    # Factors on the embedding, the scores, both branches and the logits; tied and untied.
    "granite": ({"config": GRANITE | {"tie_word_embeddings": True}}, 48, 1),
    "granite-head": ({"config": GRANITE | {"attention_multiplier": 0.3, "logits_scaling": 3.0}}, 40, 1),
}


def randomise(model: torch.nn.Module, seed: int, tied: bool, gemma: bool) -> None:
    """Weights of variance 1/inputs, queries and keys 4/inputs: sharp attention. Norms near 1, biases of 0.3."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif "norm" in name:
                # Gemma's norms are stored less 1.
                parameter.copy_((0.0 if gemma else 1.0) + 0.2 * noise)
            elif "embed" in name:
                # As a head, a tied embedding must not dominate: logits of deviation 1.
                parameter.copy_(noise / parameter.shape[1] ** 0.5 if tied else noise)
            else:
                gain = 2.0 if any(part in name for part in ("q_proj", "k_proj", "qkv_proj")) else 1.0
                parameter.copy_(gain * noise / parameter.shape[1] ** 0.5)


def save_weights(model: torch.nn.Module, directory: Path, dtype: torch.dtype, tied: bool, shards: int) -> None:
    """One safetensors file, or several with their index."""
    tensors = {
        name: parameter.detach().to(dtype).contiguous()
        for name, parameter in sorted(model.state_dict().items())
        if not (tied and name == "lm_head.weight")
    }
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        return
    names = sorted(tensors)
    index: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, directory / file, {"format": "pt"})
        index |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": dict(sorted(index.items()))}, indent=1)
    (directory / "model.safetensors.index.json").write_text(text + "\n")


def load(directory: Path) -> Any:
    """The model as transformers reads it, in f32."""
    automatic: Any = AutoModelForCausalLM
    return automatic.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def logits(directory: Path, tokens: int, seed: int, dynamic: bool) -> dict[str, torch.Tensor]:
    """Token ids and the logits described at the top."""
    ids = torch.randint(4, VOCAB, (1, tokens), generator=torch.Generator().manual_seed(seed))
    golden = {"ids": ids[0].to(torch.int32)}
    with torch.no_grad():
        if not dynamic:
            return golden | {"prefill": load(directory)(ids).logits[0].contiguous()}
        # A new model for every length: the angles of dynamic RoPE never shrink back.
        prefill = [load(directory)(ids[:, : last + 1]).logits[0, -1] for last in range(tokens)]
        start = tokens // 4
        model = load(directory)
        out = model(ids[:, :start], use_cache=True)
        steps = []
        for position in range(start, tokens):
            out = model(ids[:, position : position + 1], past_key_values=out.past_key_values, use_cache=True)
            steps.append(out.logits[0, -1])
    return golden | {"prefill": torch.stack(prefill), "steps": torch.stack(steps)}


def main() -> None:
    """Make the named cases, or all."""
    torch.set_num_threads(1)
    for case in sys.argv[1:] or CASES:
        variants, tokens, shards = CASES[case]
        directory = HERE / case
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        seed = zlib.crc32(case.encode())
        for number, (variant, config) in enumerate(variants.items()):
            text = json.dumps(config, indent=1) + "\n"
            (directory / f"{variant}.json").write_text(text)
            work = directory / "work"
            work.mkdir()
            (work / "config.json").write_text(text)
            if number == 0:
                automatic: Any = AutoModelForCausalLM
                model = automatic.from_config(AutoConfig.from_pretrained(work), dtype=torch.float32)
                randomise(model, seed, config["tie_word_embeddings"], config["model_type"] == "gemma3_text")
                dtype = getattr(torch, config["torch_dtype"])
                save_weights(model, directory, dtype, config["tie_word_embeddings"], shards)
            for file in directory.glob("model*"):
                (work / file.name).symlink_to(file)
            dynamic = (config.get("rope_scaling") or {}).get("type") == "dynamic"
            golden = logits(work, tokens, seed + number, dynamic)
            save_file(golden, directory / f"{variant}.golden.safetensors")
            shutil.rmtree(work)


if __name__ == "__main__":
    main()
