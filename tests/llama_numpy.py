"""An independent implementation in NumPy and float64: the network, the quantisers, the visibility law and teacher-forced
drafts.

Written from docs/algorithm.md, docs/design/cache.md and docs/design/quantise.md alone. Slow and literal; tests compare the
engine with it.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

G = 128


def load(folder: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """config.json and the tensors of one safetensors file, as float64."""
    raw = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    tensors: dict[str, Array] = {}
    for name, info in json.loads(raw[8 : 8 + length]).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + offset for offset in info["data_offsets"])
        if info["dtype"] == "BF16":
            values = (np.frombuffer(raw[begin:end], "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(raw[begin:end], {"F16": "<f2", "F32": "<f4"}[info["dtype"]])
        tensors[name] = values.astype(np.float64).reshape(info["shape"])
    return json.loads((folder / "config.json").read_text(encoding="utf-8")), tensors


def half(x: Array) -> Array:
    """Rounded to f16, as keys and values are stored."""
    return x.astype(np.float16).astype(np.float64)


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


# Quantisers ----------------------------------------------------------------------------------------------------------


def balanced(x: Array, axis: int) -> tuple[Array, Array]:
    """(view Upper, view Both) of groups along an axis: one 8-bit rounding on a mid-rise grid, split into nibbles."""
    least, most = x.min(axis, keepdims=True), x.max(axis, keepdims=True)
    constant = least == most
    fine = (most - least) / 255
    scale = half(np.where(constant, 1, np.maximum(16 * fine, 2.0**-14)))
    zero = half(np.where(constant, least, least + 8 * fine))
    code = np.clip(np.rint((x - zero) / (scale / 16)), -8, 247)
    upper = (code + 8) // 16
    lower = code - 16 * upper
    views = (upper * scale + zero - scale / 32, (upper + lower / 16) * scale + zero)
    return tuple(np.where(constant, zero, view) for view in views)  # type: ignore[return-value]


def coded(group: Array, step: Array, zero: Array, top: int) -> Array:
    return np.clip(np.rint((group - zero) / np.where(step == 0, 1, step)), 0, top)


def searched(group: Array, weigh: Array, step: Array, zero: Array) -> tuple[Array, Array]:
    """Scale and zero of 4-bit codes: shrunk ranges, then two fits, keeping whatever lowers the squared error, weighed by the
    importance of the inputs.
    """
    least, most = group.min(1, keepdims=True), group.max(1, keepdims=True)
    width = most - least
    best = (weigh * (coded(group, step, zero, 15) * step + zero - group) ** 2).sum(1, keepdims=True)

    def consider(new_step: Array, new_zero: Array) -> None:
        nonlocal best, step, zero
        new_step, new_zero = half(np.maximum(new_step, 2.0**-14)), half(new_zero)
        error = (weigh * (coded(group, new_step, new_zero, 15) * new_step + new_zero - group) ** 2).sum(
            1, keepdims=True
        )
        better = (error < best) & (width > 0)
        best, step, zero = (np.where(better, a, b) for a, b in ((error, best), (new_step, step), (new_zero, zero)))

    for below in (0, 1 / 32, 1 / 16):
        for above in (0, 1 / 32, 1 / 16):
            consider((1 - below - above) * width / 15, least + below * width)
    for _ in range(2):
        codes = coded(group, step, zero, 15)
        mean_code, mean = (np.average(x, 1, weigh)[:, None] for x in (codes, group))
        centred = codes - mean_code
        squares = (weigh * centred**2).sum(1, keepdims=True)
        slope = (weigh * centred * group).sum(1, keepdims=True) / np.maximum(squares, 1e-300)
        consider(slope, mean - slope * mean_code)
    return step, zero


def importance(config: dict[str, Any], tensors: dict[str, Array]) -> dict[str, Array]:
    """Importance of the inputs of every matrix, as docs/design/quantise.md has it: mean squares of the rows of four made-up
    texts of sixteen tokens. A head reads the mean of the values up to its token.
    """
    texts, tokens, heads = 4, 16, config["num_attention_heads"]
    lanes = np.arange(texts * tokens)
    x = tensors["model.embed_tokens.weight"][(2 * lanes + 1) * (config["vocab_size"] // 4) // (2 * len(lanes))]
    out: dict[str, Array] = {}

    def through(name: str, x: Array) -> Array:
        out[f"{name}.weight"] = (x**2).mean(0) / (x**2).mean()
        return np.asarray(x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", 0))

    def norm(x: Array, name: str) -> Array:
        return np.asarray(x / np.sqrt((x**2).mean(1, keepdims=True) + config["rms_norm_eps"]) * tensors[name])

    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        normed = norm(x, at + "input_layernorm.weight")
        _, _, values = (through(f"{at}self_attn.{part}_proj", normed) for part in "qkv")
        means = np.cumsum(values.reshape(tokens, texts, -1), 0) / np.arange(1, tokens + 1)[:, None, None]
        by_head = means.reshape(len(lanes), config["num_key_value_heads"], -1)
        read = by_head.repeat(heads // config["num_key_value_heads"], 1).reshape(len(lanes), -1)
        x = x + through(at + "self_attn.o_proj", read)
        normed = norm(x, at + "post_attention_layernorm.weight")
        gate, up = (through(f"{at}mlp.{part}_proj", normed) for part in ("gate", "up"))
        clipped = np.clip(gate / 2, -3, 3)
        inner = gate / 2 * (1 + clipped * (27 + clipped**2) / (27 + 9 * clipped**2)) * up
        x = x + through(at + "mlp.down_proj", inner)
    return out


def rounded_weights(w: Array, bits: int, weigh: Array | None = None) -> Array:
    """Asymmetric codes of groups of 128 inputs, scale and zero in f16. `weigh`: importance of the inputs, for 4-bit codes."""
    out = np.empty_like(w)
    for start in range(0, w.shape[1], G):
        group = w[:, start : start + G]
        least = group.min(1, keepdims=True)
        step = half((group.max(1, keepdims=True) - least) / (2**bits - 1))
        zero = half(least)
        if bits == 4:
            factors = np.ones(group.shape[1]) if weigh is None else weigh[start : start + G]
            step, zero = searched(group, factors, step, zero)
        out[:, start : start + G] = coded(group, step, zero, 2**bits - 1) * step + zero
    return out


def rounded_activations(x: Array) -> Array:
    """int8 per token and group of 128 channels."""
    out = np.empty_like(x)
    for start in range(0, x.shape[1], G):
        group = x[:, start : start + G]
        scale = np.abs(group).max(1, keepdims=True) / 127
        out[:, start : start + G] = np.rint(group / np.where(scale == 0, 1, scale)) * scale
    return out


# Network -------------------------------------------------------------------------------------------------------------


@dataclass
class Llama:
    """A Llama: full weights, or draft weights (4 bits, a head of 8, int8 activations) except of the `exact` layers."""

    config: dict[str, Any]
    tensors: dict[str, Array]
    draft: bool = False
    exact: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        config = self.config
        self.layers = config["num_hidden_layers"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config.get("head_dim", config["hidden_size"] // self.heads)
        self.embedding = self.tensors["model.embed_tokens.weight"]
        self.head = self.tensors.get("lm_head.weight", self.embedding)
        if self.draft:
            weigh = importance(config, self.tensors)
            self.tensors = {
                name: rounded_weights(w, 4, weigh[name]) if name in weigh and name[:-7] not in self.exact else w
                for name, w in self.tensors.items()
            }
            self.head = rounded_weights(self.head, 8)

    def _linear(self, x: Array, name: str) -> Array:
        rounded = self.draft and name not in self.exact
        out = (rounded_activations(x) if rounded else x) @ self.tensors[f"{name}.weight"].T
        bias = self.tensors.get(f"{name}.bias")
        return out if bias is None else out + bias

    def _norm(self, x: Array, name: str) -> Array:
        return (
            x / np.sqrt((x**2).mean(-1, keepdims=True) + self.config["rms_norm_eps"]) * self.tensors[f"{name}.weight"]
        )

    def _rope(self, x: Array, positions: Array) -> Array:
        half_dim = self.head_dim // 2
        angles = positions[:, None] / self.config["rope_theta"] ** (np.arange(half_dim) / half_dim)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        first, second = x[..., :half_dim], x[..., half_dim:]
        return np.concatenate((first * cos - second * sin, second * cos + first * sin), -1)

    def qkv(self, layer: int, x: Array, positions: Array) -> tuple[Array, Array, Array]:
        """Queries, keys (both after RoPE) and values, [rows][heads][head_dim]."""
        prefix = f"model.layers.{layer}."
        h = self._norm(x, prefix + "input_layernorm")
        q, k, v = (
            self._linear(h, f"{prefix}self_attn.{name}_proj").reshape(len(x), -1, self.head_dim) for name in "qkv"
        )
        if f"{prefix}self_attn.q_norm.weight" in self.tensors:
            q, k = self._norm(q, f"{prefix}self_attn.q_norm"), self._norm(k, f"{prefix}self_attn.k_norm")
        return self._rope(q, positions), self._rope(k, positions), v

    def attend(self, q: Array, k: Array, v: Array, visible: Array) -> Array:
        """Attention of [rows][heads][d] over [tokens][kv heads][d]; `visible` is [rows][tokens]."""
        out = np.empty_like(q)
        for head in range(self.heads):
            group = head // (self.heads // self.kv_heads)
            scores = q[:, head] @ k[:, group].T / np.sqrt(self.head_dim)
            p = np.exp(log_softmax(np.where(visible, scores, -np.inf)))
            out[:, head] = p @ v[:, group]
        return out

    def rest(self, layer: int, x: Array, attended: Array) -> Array:
        """Output projection and feed-forward network."""
        prefix = f"model.layers.{layer}."
        x = x + self._linear(attended.reshape(len(x), -1), prefix + "self_attn.o_proj")
        h = self._norm(x, prefix + "post_attention_layernorm")
        gate, up = self._linear(h, prefix + "mlp.gate_proj"), self._linear(h, prefix + "mlp.up_proj")
        return x + self._linear(gate / (1 + np.exp(-gate)) * up, prefix + "mlp.down_proj")

    def logits(self, x: Array) -> Array:
        h = self._norm(x, "model.norm")
        return (rounded_activations(h) if self.draft else h) @ self.head.T

    def forward(self, ids: Array) -> Array:
        """Logits of every position by plain causal attention, nothing quantised."""
        positions = np.arange(len(ids))
        visible = positions[:, None] >= positions
        x = self.embedding[ids]
        for layer in range(self.layers):
            q, k, v = self.qkv(layer, x, positions)
            x = self.rest(layer, x, self.attend(q, k, v, visible))
        return self.logits(x)


# Teacher forcing -----------------------------------------------------------------------------------------------------

VIEWS = {"fp16": None, "int8": 1, "int4": 0}


@dataclass(frozen=True)
class Groups:
    """Elements of the cache that share a scale: at most `size` tokens of a "channel", or channels of a "token" in a head.

    Attributes:
        truncated: view int4 reads the least of the codes that share an upper nibble.
    """

    keys: str = "channel"
    values: str = "token"
    size: int = G
    truncated: bool = False


OWN = Groups()


def _quantised(x: Array, axis: str, groups: Groups, which: int) -> Array:
    """Whole pages of keys or values, [tokens][kv heads][d], through view int4 (0) or int8 (1)."""
    tokens, heads, d = x.shape
    size = min(groups.size, d if axis == "token" else G)
    shape = (tokens // size, size, heads, d) if axis == "channel" else (tokens, heads, d // size, size)
    along = 1 if axis == "channel" else 3
    grouped = x.reshape(shape)
    read = balanced(grouped, along)[which]
    if groups.truncated and which == 0:
        # The centre of sixteen codes is 7.5 steps above the least of them.
        read = read - 7.5 * (grouped.max(along, keepdims=True) - grouped.min(along, keepdims=True)) / 255
    return read.reshape(x.shape)


def _view(k: Array, v: Array, quantised: int, view: str, groups: Groups) -> tuple[Array, Array]:
    """Keys and values visible to a query: the first `quantised` tokens through a view, later ones as stored."""
    which = VIEWS[view]
    if which is None or quantised == 0:
        return k, v
    keys = _quantised(k[:quantised], groups.keys, groups, which)
    values = _quantised(v[:quantised], groups.values, groups, which)
    return np.concatenate((keys, k[quantised:])), np.concatenate((values, v[quantised:]))


def evaluate(
    model: Llama, ids: Array, view: str, drafts: dict[str, tuple[Llama, str]], groups: Groups = OWN
) -> dict[str, Any]:
    """Log-probabilities of every position under a target view, and of each draft, decoding a page's rows at once.

    Rows of one page share Q(p), the number of quantised tokens they see. Returns {"target": [n][vocab], name: ...}.
    """
    n = len(ids)
    past: list[tuple[Array, Array]] = [(np.empty((0, model.kv_heads, model.head_dim)),) * 2] * model.layers
    out: dict[str, list[Array]] = {"target": [], **{name: [] for name in drafts}}
    for start in range(0, n, G):
        positions = np.arange(start, min(start + G, n))
        quantised = max(0, start // G - 1) * G
        tokens = np.arange(positions[-1] + 1)
        x, seen = model.embedding[ids[positions]], []
        for layer in range(model.layers):
            q, k, v = model.qkv(layer, x, positions)
            keys, values = (np.concatenate((old, half(new))) for old, new in zip(past[layer], (k, v), strict=True))
            seen.append((keys, values))
            keys, values = _view(keys, values, quantised, view, groups)
            x = model.rest(layer, x, model.attend(q, keys, values, positions[:, None] >= tokens))
        out["target"].append(log_softmax(model.logits(x)))
        for name, (draft, draft_view) in drafts.items():
            x = draft.embedding[ids[positions]]
            for layer in range(draft.layers):
                q, k, v = draft.qkv(layer, x, positions)
                keys, values = _view(*seen[layer], quantised, draft_view, groups)
                # A row sees the target's keys and values before it, and its own.
                own_k, own_v = np.concatenate((keys, half(k))), np.concatenate((values, half(v)))
                visible = np.concatenate((positions[:, None] > tokens, np.eye(len(positions), dtype=bool)), 1)
                x = draft.rest(layer, x, draft.attend(q, own_k, own_v, visible))
            out[name].append(log_softmax(draft.logits(x)))
        past = seen
    return {name: np.concatenate(rows) for name, rows in out.items()}
