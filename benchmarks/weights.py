#!/usr/bin/env python3
"""Divergence of quantised weights from a Llama model in 16 bits, next to ggml's: the table in docs/design/quantised_files.md.

    pip install xllamacpp==2026.10.11549 gguf==0.19.0
    python benchmarks/weights.py [FOLDER] [TEXT] [--permutations 3] [--results FILE]
                                                      default: the demo model, the shipped sample

FOLDER has model.safetensors (BF16 or F16), config.json and tokenizer.json; the first tokens of TEXT are scored. A number is
the mean of KL(checkpoint || quantised) of the next token. Weights are quantised by ggml, or as docs/design/weights.md
describes it in NumPy, and all pass one forward pass in f32, which rounds no activations. `quantspec eval` gives the engine's
own numbers.

A permutation renames the model's channels, which changes no output but the groups. Its mean is less noisy, and a checkpoint
that was dequantised from groups has no advantage in them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

# The first, because it says what to install.
from llama_cpp import ROOT, Quantiser, kind_of  # isort: split

import gguf
import numpy as np
from tokenizers import Tokenizer

from quantspec_cli.eval import SAMPLE

Array = np.ndarray[Any, np.dtype[Any]]
Tensors = dict[str, Array]

EMBEDDING = "model.embed_tokens.weight"
# Names in GGUF that llama.cpp's choice of types looks at.
NAMES = {"v_proj": "attn_v", "down_proj": "ffn_down"}


def read(path: Path) -> Tensors:
    """The tensors of a safetensors file in f32."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    tensors = {}
    for name, entry in json.loads(raw[8 : 8 + length]).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        if entry["dtype"] == "BF16":
            values = (np.frombuffer(raw[begin:end], np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(raw[begin:end], {"F16": np.float16, "F32": np.float32}[entry["dtype"]])
        tensors[name] = values.astype(np.float32).reshape(entry["shape"])
    return tensors


def half(x: Array) -> Array:
    """Rounded to f16."""
    return np.clip(x, -65504, 65504).astype(np.float16).astype(np.float32)


class Model:
    """A Llama model and a text."""

    def __init__(self, folder: Path, text: Path, tokens: int) -> None:
        self.config = config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.tensors = read(folder / "model.safetensors")
        ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text.read_text(encoding="utf-8")).ids
        self.ids = np.array(ids[:tokens])
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.layers = config["num_hidden_layers"]
        self.width = config.get("head_dim") or config["hidden_size"] // self.heads
        inverse = 1 / config["rope_theta"] ** (np.arange(0, self.width, 2) / self.width)
        angles = np.tile(np.arange(len(self.ids))[:, None] * inverse, 2)[:, None]
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self.head = "lm_head.weight" if "lm_head.weight" in self.tensors else EMBEDDING
        self.matrices = [name for name in self.tensors if name.endswith("_proj.weight")]

    def permuted(self, seed: int) -> Tensors:
        """The same function with its channels in another order."""
        random = np.random.default_rng(seed)
        hidden = random.permutation(self.config["hidden_size"])
        inner = [random.permutation(self.config["intermediate_size"]) for _ in range(self.layers)]
        value = [[random.permutation(self.width) for _ in range(self.kv_heads)] for _ in range(self.layers)]
        shared = self.heads // self.kv_heads
        out = {}
        for name, full in self.tensors.items():
            layer = int(name.split(".")[2]) if ".layers." in name else 0
            w = full
            if "o_proj" in name:
                order = [head * self.width + value[layer][head // shared] for head in range(self.heads)]
                w = w[hidden][:, np.concatenate(order)]
            elif "down_proj" in name:
                w = w[hidden][:, inner[layer]]
            elif "v_proj" in name:
                order = [head * self.width + value[layer][head] for head in range(self.kv_heads)]
                w = w[np.concatenate(order)][:, hidden]
            elif "gate_proj" in name or "up_proj" in name:
                w = w[inner[layer]][:, hidden]
            else:
                w = w[..., hidden]
            out[name] = np.ascontiguousarray(w)
        return out

    def scores(self, tensors: Tensors) -> Array:
        """Log-probabilities after each token but the first."""
        rows, eps = len(self.ids), self.config["rms_norm_eps"]

        def norm(x: Array, name: str) -> Array:
            return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * tensors[name])

        def turned(x: Array) -> Array:
            first, second = np.split(x, 2, -1)
            return np.asarray(x * self.cos + np.concatenate([-second, first], -1) * self.sin)

        x = tensors[EMBEDDING][self.ids]
        hidden_from = np.triu(np.full((rows, rows), -np.inf, np.float32), 1)
        for layer in range(self.layers):
            at = f"model.layers.{layer}."
            normed = norm(x, at + "input_layernorm.weight")
            q, k, v = (
                (normed @ tensors[f"{at}self_attn.{part}_proj.weight"].T).reshape(rows, -1, self.width)
                for part in "qkv"
            )
            q, k, out = turned(q), turned(k), np.empty_like(q)
            for head in range(self.heads):
                of = head * self.kv_heads // self.heads
                weights = q[:, head] @ k[:, of].T / self.width**0.5 + hidden_from
                weights = np.exp(weights - weights.max(1, keepdims=True))
                out[:, head] = weights @ v[:, of] / weights.sum(1, keepdims=True)
            x = x + out.reshape(rows, -1) @ tensors[at + "self_attn.o_proj.weight"].T
            normed = norm(x, at + "post_attention_layernorm.weight")
            gate, up = (normed @ tensors[f"{at}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
            x = x + gate / (1 + np.exp(-gate)) * up @ tensors[at + "mlp.down_proj.weight"].T
        logits = norm(x, "model.norm.weight")[1:] @ tensors[self.head].T
        logits -= logits.max(1, keepdims=True)
        return np.asarray(logits - np.log(np.exp(logits).sum(1, keepdims=True)))


def grouped(w: Array, group: int) -> Array:
    """[rows][groups][group], the last group filled with its last weight."""
    return np.pad(w, ((0, 0), (0, -w.shape[1] % group)), mode="edge").reshape(len(w), -1, group)


def both_planes(w: Array, group: int, importance: Array | None = None) -> Array:
    """A matrix in both planes (docs/design/weights.md)."""
    x, weigh = grouped(w, group), np.float32(1)
    if importance is not None:
        weigh = grouped(importance[None], group)
    least, most = x.min(-1, keepdims=True), x.max(-1, keepdims=True)

    def error(step: Array, zero: Array, first: int, last: int) -> Array:
        value = np.clip(np.rint((x - zero) / step), first, last) * step + zero
        return np.asarray((weigh * (value - x) ** 2).sum(-1, keepdims=True))

    best, steps, scale = np.full_like(least, np.inf), np.zeros_like(least), np.ones_like(least)
    for count in range(240, 248):
        tried = half(np.maximum(16 * (most - least) / count, 2.0**-14))
        found = error(tried / 16, half(least), -8, 247)
        steps, scale = np.where(found < best, count, steps), np.where(found < best, tried, scale)
        best = np.minimum(found, best)
    best, zero = np.full_like(least, np.inf), half(least)
    for first in (8, 0, 2, 4, 6, 10, 12, 14):
        tried = half(least + (8 - first) * (most - least) / steps)
        found = np.where(first <= 255 - steps, error(scale, tried, 0, 15), np.inf)
        zero, best = np.where(found < best, tried, zero), np.minimum(found, best)
    code = np.clip(np.rint(16 * (x - zero) / scale), -8, 247)
    return np.ascontiguousarray((code * scale / 16 + zero).reshape(len(w), -1)[:, : w.shape[1]])


def upper_plane(w: Array, group: int, importance: Array | None = None) -> Array:
    """A matrix of int4 without a lower plane (docs/design/weights.md)."""
    x, weigh = grouped(w, group), np.float32(1)
    if importance is not None:
        weigh = grouped(importance[None], group)
    least, most = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    best, found, out = np.full_like(least, np.inf), np.zeros_like(x), np.zeros_like(x)
    total = (weigh * np.ones_like(x)).sum(-1, keepdims=True)

    def consider(scale: Array, zero: Array) -> None:
        nonlocal best, found, out
        scale, zero = half(np.maximum(scale, 2.0**-14)), half(zero)
        code = np.clip(np.rint((x - zero) / scale), 0, 15)
        value = code * scale + zero
        error = (weigh * (value - x) ** 2).sum(-1, keepdims=True)
        out, found = np.where(error < best, value, out), np.where(error < best, code, found)
        best = np.minimum(error, best)

    def mean(x: Array) -> Array:
        return np.asarray((weigh * x).sum(-1, keepdims=True) / total)

    for below in range(-1, 4):
        for above in range(-1, 4):
            zero = least + below / 64 * (most - least)
            consider((most - above / 64 * (most - least) - zero) / 15, zero)
    for _ in range(2):
        centred = found - mean(found)
        scale = mean(centred * x) / np.maximum(mean(centred**2), 1e-30)
        consider(scale, mean(x) - scale * mean(found))
    return np.ascontiguousarray(out.reshape(len(w), -1)[:, : w.shape[1]])


def importance(model: Model, tensors: Tensors) -> Tensors:
    """Importance of the inputs of every matrix (docs/design/quantise.md)."""
    texts, tokens, eps = 4, 16, model.config["rms_norm_eps"]
    lanes = np.arange(texts * tokens)
    x = tensors[EMBEDDING][(2 * lanes + 1) * (model.config["vocab_size"] // 4) // (2 * len(lanes))]
    out: Tensors = {}

    def through(name: str, x: Array) -> Array:
        squares = (x * x).mean(0)
        out[name] = np.maximum(squares / squares.mean(), np.float32(1e-6))
        return np.asarray(x @ tensors[name].T)

    def norm(x: Array, name: str) -> Array:
        return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * tensors[name])

    for layer in range(model.layers):
        at = f"model.layers.{layer}."
        normed = norm(x, at + "input_layernorm.weight")
        _, _, values = (through(f"{at}self_attn.{part}_proj.weight", normed) for part in "qkv")
        means = (
            np.cumsum(values.reshape(tokens, texts, -1), 0) / np.arange(1, tokens + 1, dtype=np.float32)[:, None, None]
        )
        read = means.reshape(len(lanes), model.kv_heads, -1).repeat(model.heads // model.kv_heads, 1)
        x = x + through(at + "self_attn.o_proj.weight", read.reshape(len(lanes), -1))
        normed = norm(x, at + "post_attention_layernorm.weight")
        gate, up = (through(f"{at}mlp.{part}_proj.weight", normed) for part in ("gate", "up"))
        x = x + through(at + "mlp.down_proj.weight", gate / (1 + np.exp(-gate)) * up)
    return out


def planes(model: Model, tensors: Tensors, bits: int, group: int) -> tuple[Tensors, float]:
    """The weights of `--weights int8` or `int4`, in a CPU's groups (32) or a GPU's (64), and the bits of a layer's weight."""
    out, stored, count = dict(tensors), 0.0, 0
    out[model.head] = both_planes(tensors[model.head], group)
    weigh = importance(model, tensors)
    outer = [layer for layer in range(model.layers) if not model.layers // 8 <= layer < 7 * model.layers // 8]
    for name in model.matrices:
        w, layer = tensors[name], int(name.split(".")[2])
        both = bits == 8 or "k_proj" in name or "v_proj" in name or ("down_proj" in name and layer in outer)
        out[name] = (both_planes if both else upper_plane)(w, group, weigh.get(name))
        stored += w.size * ((8 if both else 4) + 32 / group)
        count += w.size
    return out, stored / count


def of_ggml(model: Model, tensors: Tensors, mix: str, quantise: Quantiser) -> tuple[Tensors, float]:
    """The weights of a GGUF file, and the bits of a weight of a layer."""
    out, stored, count = dict(tensors), 0.0, 0
    for name in (*model.matrices, model.head):
        w, part = tensors[name], name.split(".")[-2]
        layer = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
        ours = f"{layer}{NAMES.get(part, part)}.weight" if layer else "output.weight"
        kind = kind_of(ours, w.shape[1], model.layers, mix)
        out[name] = gguf.dequantize(quantise(w, kind), kind)
        if layer:
            block, size = gguf.GGML_QUANT_SIZES[kind]
            stored += w.size * 8 * size / block
            count += w.size
    return out, stored / count


def engine(weights: str, options: argparse.Namespace) -> float:
    """The divergence that `quantspec eval` finds on a CPU."""
    command = ["eval", "-m", str(options.folder), "--prompt", str(options.text), "--tokens", str(options.tokens)]
    command += ["--weights", weights, "--device", "cpu", "--json"]
    out = subprocess.run([sys.executable, "-m", "quantspec_cli", *command], check=True, stdout=subprocess.PIPE)
    return float(json.loads(out.stdout)["weights"][weights]["kld"])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="Divergence of quantised weights from a model in 16 bits.")
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "python/quantspec_cli/demo")
    parser.add_argument("text", type=Path, nargs="?", default=SAMPLE)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument(
        "--permutations", type=int, default=0, help="orders of channels to average over; 0: the file's own"
    )
    parser.add_argument("--results", type=Path, help="JSON file to write the rows to")
    options = parser.parse_args()
    model, quantise = Model(options.folder, options.text, options.tokens), Quantiser()
    expected = model.scores(model.tensors)
    orders = [model.permuted(seed) for seed in range(options.permutations)] or [model.tensors]
    rows: list[dict[str, Any]] = []
    sys.stdout.write("| weights | bits of a layer's weight | divergence, nats |\n|---|---|---|\n")
    for name, bits, group in (
        ("int8, groups of 32", 8, 32),
        ("int8, groups of 64", 8, 64),
        ("llama.cpp Q8_0", 0, 0),
        ("int4, groups of 32", 4, 32),
        ("int4, groups of 64", 4, 64),
        ("llama.cpp Q4_K_M", 0, 0),
        ("llama.cpp Q4_1", 0, 0),
    ):
        found, size = [], 0.0
        for tensors in orders:
            mix = name.removeprefix("llama.cpp ")
            quantised, size = planes(model, tensors, bits, group) if bits else of_ggml(model, tensors, mix, quantise)
            scores = model.scores(quantised)
            found.append(float((np.exp(expected) * (expected - scores)).sum(-1).mean()))
        rows.append({"weights": name, "bits": round(size, 3), "kld": [float(f"{kld:.4g}") for kld in found]})
        sys.stdout.write(f"| {name} | {size:.2f} | {np.mean(found):.2e} |\n")
        sys.stdout.flush()
    if not options.permutations:
        for weights in ("int8", "int4"):
            kld = engine(weights, options)
            rows.append({"weights": f"quantspec eval --weights {weights}", "kld": [float(f"{kld:.4g}")]})
            sys.stdout.write(f"| `quantspec eval --weights {weights}` | | {kld:.2e} |\n")
    if options.results:
        about = {"model": options.folder.name, "text": options.text.name, "tokens": options.tokens}
        result = about | {"permutations": options.permutations, "rows": rows}
        options.results.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
