"""GGUF files of checkpoints, written as llama.cpp's converter and quantiser do."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Array = NDArray[Any]

ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3", "ministral3": "mistral3"}
# Of these the rows of Q and K are stored for RoPE of adjacent channels.
INTERLEAVED = {"llama", "mistral3", "smollm3", "granite"}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# OLMo 2 and Gemma 3 have norms after the branches.
AFTER = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def values_of(folder: Path) -> dict[str, Array]:
    """The tensors of a checkpoint in BF16 or F32, as float32."""
    found = {}
    for path in sorted(folder.glob("model*.safetensors")):
        raw = path.read_bytes()
        (length,) = struct.unpack_from("<Q", raw)
        header = json.loads(raw[8 : 8 + length])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            if entry["dtype"] == "BF16":
                values = (np.frombuffer(raw[begin:end], np.uint16).astype(np.uint32) << 16).view(np.float32)
            else:
                values = np.frombuffer(raw[begin:end], np.float32)
            found[name] = values.reshape(entry["shape"])
    return found


def named(name: str, architecture: str) -> str:
    """A tensor's name in GGUF."""
    stem, _, kind = name.rpartition(".")
    if stem in OUTER:
        return f"{OUTER[stem]}.{kind}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    known = LAYER | (AFTER if architecture in {"olmo2", "gemma3"} else {})
    return f"blk.{layer}.{known[part]}.{kind}"


def interleaved(values: Array, heads: int) -> Array:
    """Rows of queries or keys, with those next to each other that RoPE rotates together."""
    pairs: Array = values.reshape(heads, 2, values.shape[0] // heads // 2, -1).swapaxes(1, 2)
    return pairs.reshape(values.shape)


def q4_k(values: Array) -> Array:
    """Blocks of Q4_K with plain ranges; the `gguf` package reads k-quants and does not write them."""
    groups = values.reshape(-1, 8, 32)
    low = np.maximum(-groups.min(axis=2), 0)
    step = (groups.max(axis=2) + low) / 15
    d, dmin = (np.float16(x.max(axis=1) / 63).astype(np.float32)[:, None] for x in (step, low))
    scales, mins = (
        np.clip(np.rint(np.divide(x, unit, out=np.zeros_like(x), where=unit > 0)), 0, 63).astype(np.uint8)
        for x, unit in ((step, d), (low, dmin))
    )
    unit = (d * scales)[:, :, None]
    shifted = groups + (dmin * mins)[:, :, None]
    codes = np.clip(np.rint(np.divide(shifted, unit, out=np.zeros_like(shifted), where=unit > 0)), 0, 15)
    pairs = codes.astype(np.uint8).reshape(-1, 4, 2, 32)
    packed = [
        scales[:, :4] | scales[:, 4:] >> 4 << 6,
        mins[:, :4] | mins[:, 4:] >> 4 << 6,
        scales[:, 4:] & 15 | (mins[:, 4:] & 15) << 4,
    ]
    head = np.concatenate([d, dmin], axis=1).astype(np.float16).view(np.uint8)
    return np.concatenate([head, *packed, (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)], axis=1)


def q6_k(values: Array) -> Array:
    """Blocks of Q6_K with plain ranges."""
    groups = values.reshape(-1, 16, 16)
    step = np.abs(groups).max(axis=2) / 31
    d = np.float16(step.max(axis=1) / 127).astype(np.float32)[:, None]
    scales = np.rint(np.divide(step, d, out=np.zeros_like(step), where=d > 0)).astype(np.int8)
    unit = (d * scales)[:, :, None]
    codes = np.clip(np.rint(np.divide(groups, unit, out=np.zeros_like(groups), where=unit > 0)), -32, 31) + 32
    # Of each half: four runs of 32 codes, whose upper two bits share a byte.
    runs = codes.astype(np.uint8).reshape(-1, 2, 4, 32)
    lower = np.stack([runs[:, :, at] & 15 | (runs[:, :, at + 2] & 15) << 4 for at in (0, 1)], axis=2)
    upper = sum((runs[:, :, at] >> 4).astype(np.uint8) << 2 * at for at in range(4))
    parts = [lower.reshape(-1, 128), upper.reshape(-1, 64), scales.view(np.uint8), d.astype(np.float16).view(np.uint8)]
    return np.concatenate(parts, axis=1)


def quantised(values: Array, kind: Kind) -> Array:
    """A matrix in blocks, as bytes."""
    if kind in {Kind.Q4_K, Kind.Q6_K}:
        return (q4_k if kind == Kind.Q4_K else q6_k)(values).reshape(values.shape[0], -1)
    blocks: Array = gguf.quants.quantize(values, kind)
    return blocks


def kinds_of(mix: str) -> Callable[[str, int], Kind]:
    """The type of a matrix by name and columns. Q4_K_M has better types for values and the head, and for rows that are not
    whole blocks of 256.
    """
    if mix != "Q4_K_M":
        return lambda *_: Kind[mix]

    def kind(name: str, columns: int) -> Kind:
        if columns % 256:
            return Kind.Q5_0
        return Kind.Q6_K if "attn_v" in name or "token_embd" in name else Kind.Q4_K

    return kind


def llama3_factors(scaling: Mapping[str, Any], theta: float, dim: int) -> Array:
    """Llama 3's scaling as factors on wavelengths."""
    low, high = (scaling["original_max_position_embeddings"] / scaling[f"{end}_freq_factor"] for end in ("low", "high"))
    factors = []
    for at in range(0, dim, 2):
        wavelength = 2 * math.pi * theta ** (at / dim)
        mixed = (scaling["original_max_position_embeddings"] / wavelength - scaling["low_freq_factor"]) / (
            scaling["high_freq_factor"] - scaling["low_freq_factor"]
        )
        factor = 1 / ((1 - mixed) / scaling["factor"] + mixed)
        factors.append(1.0 if wavelength < high else scaling["factor"] if wavelength > low else factor)
    return np.array(factors, np.float32)


def add_rope(writer: Any, config: Mapping[str, Any], architecture: str, head_dim: int) -> None:
    """RoPE's base and scaling."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    theta = scaling.get("rope_theta", config.get("rope_theta", 10_000.0))
    writer.add_rope_freq_base(theta)
    original: Any = scaling.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))
    if architecture == "phi3":
        rotated = int(head_dim * config.get("partial_rotary_factor", 1.0))
        writer.add_rope_dimension_count(rotated)
        writer.add_rope_scaling_orig_ctx_len(original or config["max_position_embeddings"])
    match scaling.get("rope_type", scaling.get("type", "default")):
        case "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(scaling["factor"])
        case "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(scaling["factor"])
            writer.add_rope_scaling_orig_ctx_len(original)
        case "llama3":
            writer.add_tensor("rope_freqs.weight", llama3_factors(scaling, theta, head_dim))
        case "longrope" | "su":
            for name in ("long", "short"):
                writer.add_tensor(f"rope_factors_{name}.weight", np.array(scaling[f"{name}_factor"], np.float32))
            ratio = math.log(config["max_position_embeddings"] / original) / math.log(original)
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + ratio))
    if architecture == "mistral3":
        writer.add_rope_scaling_yarn_log_mul(scaling["mscale_all_dim"])
        writer.add_attn_temperature_scale(scaling["llama_4_scaling_beta"])


def head_dim_of(config: Mapping[str, Any]) -> int:
    """Channels of a head."""
    default = 128 if config["model_type"] == "qwen3" else config["hidden_size"] // config["num_attention_heads"]
    return int(config.get("head_dim") or default)


def add_config(writer: Any, config: Mapping[str, Any], architecture: str) -> None:
    """Sizes and settings of a network."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = head_dim_of(config)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads", heads))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    add_rope(writer, config, architecture, head_dim)
    if architecture == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if architecture == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern(config["sliding_window_pattern"])


def arranged(values: Array, name: str, architecture: str, config: Mapping[str, Any]) -> Array:
    """A tensor as files of the architecture have it."""
    heads = config["num_attention_heads"]
    # llama.cpp requires that OLMo's heads have as many channels as the residual stream, so a test may use some heads only.
    width = heads * head_dim_of(config)
    part = name.split(".")[2] if name.startswith("blk.") else name
    if part in {"attn_q", "attn_q_norm"}:
        values = values[:width]
    elif part == "attn_output":
        values = values[:, :width]
    if architecture in INTERLEAVED and part in {"attn_q", "attn_k"}:
        return interleaved(values, heads if part == "attn_q" else config.get("num_key_value_heads", heads))
    return values + 1 if architecture == "gemma3" and "norm" in name else values


def write(
    path: Path,
    folder: Path,
    mix: str,
    add_tokenizer: Callable[[Any], None],
    *,
    config: str = "config.json",
    changes: Mapping[str, Any] | None = None,
) -> None:
    """Writes a checkpoint as GGUF, its matrices in a type or in llama.cpp's mix Q4_K_M. `changes` replace fields of its
    configuration.
    """
    fields = json.loads((folder / config).read_text()) | dict(changes or {})
    architecture = ARCHITECTURES.get(fields["model_type"], fields["model_type"])
    writer = gguf.GGUFWriter(str(path), architecture)
    add_config(writer, fields, architecture)
    add_tokenizer(writer)
    kind_of = kinds_of(mix)
    for name, values in values_of(folder).items():
        ours = named(name, architecture)
        stored = arranged(values, ours, architecture, fields)
        if stored.ndim == 1:
            writer.add_tensor(ours, np.ascontiguousarray(stored, np.float32))
            continue
        kind = kind_of(ours, stored.shape[1])
        writer.add_tensor(ours, quantised(np.ascontiguousarray(stored), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_letters(writer: Any, count: int = 64) -> None:
    """A byte-level tokenizer of so many tokens, for networks without one."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    tokens = ["<pad>", "<s>", "</s>", "ab", *letters]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens[:count])
    writer.add_token_types([3, 3, 3, *[1] * (count - 3)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def add_byte_level(writer: Any, tokenizer: Mapping[str, Any], pre: str, *, extra: Sequence[str] = ()) -> None:
    """The byte-level tokenizer of a tokenizer.json with a pre-tokenizer by name, and further tokens that are special."""
    vocab = tokenizer["model"]["vocab"] | {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    special = {token["content"] for token in tokenizer["added_tokens"] if token["special"]} | set(extra)
    names = [*sorted(vocab, key=vocab.__getitem__), *extra]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(names)
    writer.add_token_types([3 if name in special else 1 for name in names])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
