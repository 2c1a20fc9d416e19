#!/usr/bin/env python3
"""Make a wide checkpoint that computes the same function as a small one.

    python tools/widen.py SOURCE OUT --times K --layers N

Speed depends on shapes, acceptance on a trained function. This tool combines both. Every hidden, feed-forward and head
dimension of SOURCE is tiled K times, and weights that read a tiled dimension are divided by K. So each copy carries the
original activations (including RMSNorm: a tiled vector has the same mean square). Layers beyond SOURCE's are copies whose
output projections are zero: they cost a layer's time and add nothing to the residual stream.

    W [out, in]      -> tile(W, (K, K)) / K      linears inside a layer
    norm [in]        -> tile(norm, K)
    embedding [V, h] -> tile(E, (1, K))
    head [V, h]      -> tile(H, (1, K)) / K      (a tied head becomes a separate tensor, as only it is divided)

With K a power of two the division is exact in BF16 and F32. F16 rounds its smallest weights: those below K * 2^-14 become
subnormal and change by at most 2^-25 (at K = 4, 0.6 % of weights with a deviation of 0.02). Results measured on such a
checkpoint must be labelled "widened": OUT's config.json has a `widened` entry and OUT/README.md says so. Needs NumPy
only; rows are streamed to disk.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from program import Parser, Refusal, check_new, check_space, reason, run

try:
    import numpy as np
except ImportError:
    sys.exit("error: NumPy is not installed in this Python\nhint: pip install numpy")

BYTES = {"BF16": 2, "F16": 2, "F32": 4}
# Rows processed at a time; bounds memory to a few hundred MB at the widest shapes.
BLOCK_ROWS = 1024
# Largest sizes that quantspec takes (crates/quantspec-model/src/config.rs).
LAYERS_MAX = 1024
SIZES_MAX = {
    "hidden_size": 65_536,
    "intermediate_size": 1_048_576,
    "num_attention_heads": 1024,
    "num_key_value_heads": 1024,
}
PARTIAL = "model.safetensors.partial"
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "special_tokens_map.json",
)
WIDENED = tuple(SIZES_MAX)
SETTINGS = (*WIDENED, "num_hidden_layers", "vocab_size")
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
# Some checkpoints store this tensor; every loader computes it.
RECOMPUTED = "rotary_emb.inv_freq"
# Channels of a head where the family defines them and config.json does not.
HEAD_DIM = {"qwen3": 128}
# First layer with windowed attention if config.json enables a window without naming the layer.
MAX_WINDOW_LAYERS = 28


class Source:
    """A single-file safetensors checkpoint, read row by row."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        hint = "name a directory with config.json and one model.safetensors"
        path = folder / "model.safetensors"
        try:
            self.config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            size = path.stat().st_size
            if not path.is_file():
                raise ValueError("model.safetensors is not a file")
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                if length > size:
                    raise ValueError(f"header of {length} bytes in a file of {size}")
                header = json.loads(file.read(length))
        except OSError as error:
            raise Refusal(f"cannot read {error.filename or folder}: {reason(error)}", hint) from error
        except (ValueError, RecursionError, struct.error) as error:
            raise Refusal(f"cannot read {folder}: {error}", hint) from error
        if not isinstance(self.config, dict) or not isinstance(header, dict) or not header.keys() - {"__metadata__"}:
            raise Refusal(f"cannot read {folder}: its JSON names nothing", hint)
        for key in SETTINGS:
            positive(self.config, key, folder)
        if not isinstance(self.config.get("model_type"), str | None):
            raise Refusal(
                f"config.json of {folder} has model_type {self.config['model_type']!r:.60}", "use a Llama-family model"
            )
        header.pop("__metadata__", None)
        for name, info in header.items():
            check(name, info, size - 8 - length)
        self.tensors: dict[str, Any] = header
        self.data = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + length)

    def rows(self, name: str) -> np.ndarray[Any, Any]:
        """The tensor as float32, `[rows, columns]` (vectors are one row)."""
        info = self.tensors[name]
        begin, end = info["data_offsets"]
        raw = self.data[begin:end]
        shape = info["shape"] if len(info["shape"]) == 2 else [1, info["shape"][0]]
        if info["dtype"] == "BF16":
            values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = raw.view(np.float16 if info["dtype"] == "F16" else np.float32).astype(np.float32)
        return values.reshape(shape)


def check(name: str, info: Any, data: int) -> None:
    """Refuses a tensor whose type or location is invalid; `data` bytes follow the header."""
    dtype = info.get("dtype") if isinstance(info, dict) else None
    if not isinstance(dtype, str) or dtype not in BYTES:
        raise Refusal(f"tensor {name} is {dtype}", f"use a checkpoint in {', '.join(BYTES)}")
    try:
        (begin, end), shape = info["data_offsets"], info["shape"]
        numbers = all(type(number) is int for number in (begin, end, *shape))
        whole = (
            numbers
            and 0 <= begin <= end <= data
            and end - begin == math.prod(shape) * BYTES[dtype]
            and 1 <= len(shape) <= 2
        )
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise Refusal(f"tensor {name} does not fit into the file", "the file is damaged; fetch it again")


def positive(config: dict[str, Any], key: str, folder: Path) -> int:
    """A positive size in config.json. True is refused, though Python treats it as 1."""
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise Refusal(f"config.json of {folder} has {key} {value!r}", "use a Llama-family model")
    return value


def head_dim(config: dict[str, Any], folder: Path) -> int:
    """Channels of a head."""
    hidden, heads, kv_heads = (config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    if heads % kv_heads:
        raise Refusal(f"config.json of {folder} has {kv_heads} KV heads for {heads} heads", "use a Llama-family model")
    if config.get("head_dim") is not None:
        return positive(config, "head_dim", folder)
    if config.get("model_type") in HEAD_DIM:
        return HEAD_DIM[config["model_type"]]
    if hidden % heads:
        raise Refusal(f"config.json of {folder} has {heads} heads for {hidden} channels", "use a Llama-family model")
    return int(hidden // heads)


def encode(values: np.ndarray[Any, Any], dtype: str) -> bytes:
    """Little-endian bytes of float32 values; BF16 rounds to nearest even (exact here when K is a power of two)."""
    if dtype == "BF16":
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        return (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")).tobytes()
    return values.astype("<f2" if dtype == "F16" else "<f4").tobytes()


class Target:
    """One tensor of the widened checkpoint: its source and its tiling."""

    def __init__(self, name: str, source: str, down: int, across: int, scale: float) -> None:
        self.name, self.source, self.down, self.across, self.scale = name, source, down, across, scale

    def shape(self, source: Source) -> list[int]:
        shape = list(source.tensors[self.source]["shape"])
        if len(shape) == 1:
            return [shape[0] * self.across]
        return [shape[0] * self.down, shape[1] * self.across]

    def blocks(self, source: Source) -> Iterator[np.ndarray[Any, Any]]:
        values = source.rows(self.source)
        for _ in range(self.down):
            for start in range(0, len(values), BLOCK_ROWS):
                yield np.tile(values[start : start + BLOCK_ROWS] * np.float32(self.scale), (1, self.across))


def layer_shapes(source: Source) -> dict[str, list[int]]:
    """Shapes of each layer's tensors, by their names after `model.layers.i.`. An optional bias or head norm belongs to all
    layers if the first one has it.
    """
    hidden, ffn, heads, kv_heads = (int(source.config[key]) for key in WIDENED)
    dim = head_dim(source.config, source.folder)
    linears = {
        "self_attn.q_proj": [heads * dim, hidden],
        "self_attn.k_proj": [kv_heads * dim, hidden],
        "self_attn.v_proj": [kv_heads * dim, hidden],
        "self_attn.o_proj": [hidden, heads * dim],
        "mlp.gate_proj": [ffn, hidden],
        "mlp.up_proj": [ffn, hidden],
        "mlp.down_proj": [hidden, ffn],
    }
    shapes = {f"{name}.weight": shape for name, shape in linears.items()}
    shapes |= {f"{name}.weight": [hidden] for name in ("input_layernorm", "post_attention_layernorm")}
    optional = {f"{name}.bias": shape[:1] for name, shape in linears.items()}
    optional |= {f"self_attn.{name}.weight": [dim] for name in ("q_norm", "k_norm")}
    return shapes | {name: shape for name, shape in optional.items() if f"model.layers.0.{name}" in source.tensors}


def check_tensors(source: Source, parts: dict[str, list[int]]) -> None:
    """Refuses a source with a missing or extra tensor, or with a shape that differs from config.json: the widened checkpoint
    could not be loaded.
    """
    own, hidden, vocab = (int(source.config[key]) for key in ("num_hidden_layers", "hidden_size", "vocab_size"))
    for layer in range(own):
        if not any(name.startswith(f"model.layers.{layer}.") for name in source.tensors):
            raise Refusal(f"{source.folder} has no layer {layer} of {own}", "use a Llama-family model")
    expected = {EMBEDDING: [vocab, hidden], NORM: [hidden]}
    expected |= {f"model.layers.{layer}.{name}": shape for layer in range(own) for name, shape in parts.items()}
    # A tied head is not stored.
    expected |= {HEAD: [vocab, hidden]} if HEAD in source.tensors else {}
    for name, shape in expected.items():
        if name not in source.tensors:
            raise Refusal(f"{source.folder} has no tensor {name}", "use a Llama-family model")
        found = source.tensors[name]["shape"]
        if found != shape:
            raise Refusal(f"tensor {name} is {found}, config.json makes it {shape}", "fetch both files again")
    for name in source.tensors:
        if name not in expected and not name.endswith(RECOMPUTED):
            raise Refusal(f"tensor {name} is no part of a Llama-family model", "use a Llama-family model")


def targets_of(source: Source, times: int, layers: int) -> list[Target]:
    """Every tensor of the widened checkpoint, in file order."""
    own = int(source.config["num_hidden_layers"])
    parts = layer_shapes(source)
    check_tensors(source, parts)
    targets = [
        Target(EMBEDDING, EMBEDDING, 1, times, 1.0),
        Target(NORM, NORM, 1, times, 1.0),
        Target(HEAD, HEAD if HEAD in source.tensors else EMBEDDING, 1, times, 1.0 / times),
    ]
    for layer in range(layers):
        for short, shape in parts.items():
            linear = len(shape) == 2
            silent = layer >= own and any(part in short for part in ("o_proj", "down_proj"))
            per_head = "q_norm" in short or "k_norm" in short
            targets.append(
                Target(
                    f"model.layers.{layer}.{short}",
                    f"model.layers.{layer % own}.{short}",
                    times if linear else 1,
                    1 if per_head else times,
                    0.0 if silent else 1.0 / times if linear else 1.0,
                )
            )
    return targets


def check_times(source: Source, times: int) -> None:
    """Refuses a factor that yields a size which quantspec does not load."""
    sizes = {key: int(source.config[key]) for key in WIDENED}
    room = {key: SIZES_MAX[key] // size for key, size in sizes.items()}
    key = min(room, key=lambda key: room[key])
    if room[key] < 1:
        raise Refusal(
            f"config.json of {source.folder} has {key} {sizes[key]}, more than the {SIZES_MAX[key]} of any model",
            "use a smaller source",
        )
    if not 1 <= times <= room[key]:
        makes = f", which makes {key} {sizes[key] * times} of at most {SIZES_MAX[key]}" if times > 0 else ""
        raise Refusal(
            f"--times is {times}{makes}",
            f"use 1 to {room[key]}; powers of two keep BF16 and F32 exact, F16's smallest weights are rounded",
        )


def widened_config(source: Source, times: int, layers: int, name: str) -> dict[str, Any]:
    config = source.config
    own = int(config["num_hidden_layers"])
    out = dict(config)
    for key in WIDENED:
        out[key] = int(config[key]) * times
    out["head_dim"] = head_dim(config, source.folder)
    out["num_hidden_layers"] = layers
    types = config.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != own:
            found = f"{len(types)} layer_types" if isinstance(types, list) else f"layer_types {types!r:.60}"
            raise Refusal(f"config.json of {source.folder} has {found} for {own} layers", "list one per layer")
        out["layer_types"] = [types[layer % own] for layer in range(layers)]
    first = config.get("max_window_layers")
    if first is None and config.get("use_sliding_window"):
        first = MAX_WINDOW_LAYERS
    # No layer of the source has a window, so added layers get none.
    if type(first) is int and first >= own:
        out["max_window_layers"] = max(first, layers)
    out["tie_word_embeddings"] = False
    out["widened"] = {"source": name, "times": times, "source_layers": own}
    return out


CARD = """# {name} × {times}, {layers} layers: widened

This checkpoint was **widened** by `tools/widen.py` from `{name}`: it computes the same function as that small model, at the
shapes and memory traffic of a large one. Use it to measure speed with real acceptance, and label what you measure "widened".
It knows nothing that `{name}` does not know.
"""


def widen(folder: Path, out: Path, times: int, layers: int) -> int:
    """Writes the widened checkpoint and returns its tensor bytes."""
    source = Source(folder)
    own = int(source.config["num_hidden_layers"])
    check_times(source, times)
    if not own <= layers <= LAYERS_MAX:
        raise Refusal(
            f"--layers is {layers} and the source has {own}",
            f"use {own} to {LAYERS_MAX}: layers can only be added",
        )
    check_new(out)
    if not (folder / "tokenizer.json").is_file():
        raise Refusal(f"{folder} has no tokenizer.json", "use the one published with these weights")
    targets = targets_of(source, times, layers)
    # File names are bytes, the card and the header text. The folder may be given as "." or "..".
    name = folder.resolve().name.encode(errors="replace").decode()
    config = widened_config(source, times, layers, name)
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "widened": f"{name} x {times}, {layers} layers"}}
    offset = 0
    for target in targets:
        dtype, shape = source.tensors[target.source]["dtype"], target.shape(source)
        size = int(np.prod(shape)) * BYTES[dtype]
        header[target.name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    check_space(out, offset)
    made = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    try:
        write(source, targets, header, out)
        (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        (out / "README.md").write_text(CARD.format(name=name, times=times, layers=layers), encoding="utf-8")
    except BaseException:
        for file in (PARTIAL, "model.safetensors", "config.json", "README.md", *TOKENIZER):
            (out / file).unlink(missing_ok=True)
        if made:
            out.rmdir()
        raise
    return offset


def write(source: Source, targets: list[Target], header: dict[str, Any], out: Path) -> None:
    """Writes the tensors, and copies the tokenizer."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with (out / PARTIAL).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for target in targets:
            dtype = source.tensors[target.source]["dtype"]
            for block in target.blocks(source):
                file.write(encode(block, dtype))
    (out / PARTIAL).rename(out / "model.safetensors")
    for name in TOKENIZER:
        if (source.folder / name).is_file():
            shutil.copyfile(source.folder / name, out / name)


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(
        description="Tile a small Llama checkpoint into a wide one of the same function.",
        epilog="Example: python tools/widen.py seed-gqa wide-1b --times 4 --layers 18",
    )
    parser.add_argument("source", type=Path, help="directory of the small checkpoint")
    parser.add_argument("out", type=Path, help="new or empty directory")
    parser.add_argument(
        "--times", type=int, required=True, help="copies of every hidden, feed-forward and head dimension"
    )
    parser.add_argument("--layers", type=int, required=True, help="layers of the result, at least the source's")
    options = parser.parse_args(arguments)

    def work() -> str:
        size = widen(options.source, options.out, options.times, options.layers)
        return f"{options.out}: {size / 1e9:.2f} GB, widened {options.times} times, {options.layers} layers"

    return run(work, options.out)


if __name__ == "__main__":
    sys.exit(main())
