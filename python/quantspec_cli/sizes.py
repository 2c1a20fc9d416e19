"""Model sizes that fit a machine, and at which context: planned from the shapes of published models."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import render
from .errors import FileError, native_errors, reason

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Name, then layers, hidden, intermediate, heads, KV heads, vocabulary, tied head: Llama 3.2 1B and 3B, Llama 3.1 8B, Qwen2.5
# 14B and 32B, Llama 3.1 70B. Heads have 128 channels, those of 1B 64.
SHAPES = {
    "1B": (16, 2048, 8192, 32, 8, 128_256, True),
    "3B": (28, 3072, 8192, 24, 8, 128_256, True),
    "8B": (32, 4096, 14_336, 32, 8, 128_256, False),
    "14B": (48, 5120, 13_824, 40, 8, 152_064, False),
    "32B": (64, 5120, 27_648, 40, 8, 152_064, False),
    "70B": (80, 8192, 28_672, 64, 8, 128_256, False),
}
CONTEXT = 131_072

# The value of `--weights` for each name in a row.
WEIGHTS = {"bf16": "checkpoint", "int8": "int8", "int4": "int4"}


def config(name: str) -> dict[str, Any]:
    """config.json of a size."""
    layers, hidden, intermediate, heads, kv_heads, vocab, tied = SHAPES[name]
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 64 if name == "1B" else 128,
        "vocab_size": vocab,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }


def table(device: str) -> list[dict[str, Any]]:
    """For each size and `--weights`: bytes of weights and draft weights, and the longest context that fits the device, 0 if
    none does.

    Raises:
        FileError: no temporary folder can be written.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="quantspec-") as folder:
            found = _fitting(Path(folder), device)
    except OSError as error:
        raise FileError(
            f"no temporary folder can be written: {reason(error)}", "set TMPDIR to a folder that you may write to"
        ) from error
    names = ("weights_bytes", "draft_weights_bytes", "longest_context")
    return [
        {"size": size, "weights": name, **dict(zip(names, held[index], strict=True))}
        for index, size in enumerate(SHAPES)
        for name, held in found.items()
    ]


def _fitting(folder: Path, device: str) -> dict[str, list[tuple[int, int, int]]]:
    """The numbers of every size, by the name of the weights."""
    from . import _native

    places = [folder / name for name in SHAPES]
    for place in places:
        place.mkdir()
        (place / "config.json").write_text(json.dumps(config(place.name)), encoding="utf-8")
    with native_errors():
        models = [str(place) for place in places]
        return {name: _native.fitting(models, device=device, weights=kept) for name, kept in WEIGHTS.items()}


def lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table for people."""
    report = [f"{'what fits here':<24} {'weights':>9} {'drafts':>9} {'longest context':>16}"]
    for row in rows:
        longest = f"{row['longest_context']:,}" if row["longest_context"] else "-"
        report.append(
            f"{row['size'] + ', ' + row['weights'].upper():<24} {render.size(row['weights_bytes']):>9} "
            f"{render.size(row['draft_weights_bytes']):>9} {longest:>16}"
        )
    return report
