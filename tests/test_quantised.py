"""Quantised safetensors: `run` gives the text of an unquantised checkpoint with the same values, and unknown methods are
refused."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Outcome, copy_demo
from numpy.typing import NDArray
from test_gguf import demo_weights

Run = Callable[..., Outcome]
Array = NDArray[Any]
Stored = tuple[dict[str, Array], Array]

COMMAND = ("run", "--text", "It was a dark and stormy night", "-n", "40", "--device", "cpu", "--gamma", "3")
GROUP = 64


def bf16(values: Array) -> Array:
    """Bits of the nearest BF16, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def words(codes: Array) -> Array:
    """4-bit codes of consecutive rows in 32-bit words, the first in the lowest bits."""
    eight = codes.astype(np.uint32).reshape(-1, 8, codes.shape[1])
    shifts = np.arange(8, dtype=np.uint32)[None, :, None] * 4
    return (eight << shifts).sum(1, dtype=np.uint32).view(np.int32)


def int8(weight: Array) -> Stored:
    """A scale for each output, in F32."""
    scale = (np.abs(weight).max(1, keepdims=True) / 127).astype(np.float32)
    codes = np.clip(np.rint(weight / scale), -128, 127).astype(np.int8)
    return {"weight": codes, "weight_scale": scale}, bf16(codes * scale)


def gptq(weight: Array) -> Stored:
    """Groups of inputs with zero points, and a bias of zeros as exporters write it."""
    groups = weight.T.reshape(-1, GROUP, weight.shape[0])
    low, high = groups.min(1, keepdims=True), groups.max(1, keepdims=True)
    scale = ((high - low) / 15).astype(np.float16)
    zero = np.clip(np.rint(-low / scale.astype(np.float32)), 1, 15)
    codes = np.clip(np.rint(groups / scale.astype(np.float32)) + zero, 0, 15)
    values = ((codes - zero) * scale.astype(np.float32)).astype(np.float16).astype(np.float32)
    tensors = {
        "qweight": words(codes.reshape(weight.T.shape)),
        "qzeros": words(zero[:, 0].T - 1).T.copy(),
        "scales": scale[:, 0],
        "bias": np.zeros(weight.shape[0], np.float16),
    }
    return tensors, bf16(values.reshape(weight.T.shape).T)


FORMATS: dict[str, tuple[Callable[[Array], Stored], dict[str, Any]]] = {
    "compressed-tensors": (
        int8,
        {
            "format": "int-quantized",
            "config_groups": {
                "group_0": {"weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}}
            },
        },
    ),
    "gptq": (gptq, {"bits": 4, "group_size": GROUP}),
}


def save(folder: Path, tensors: dict[str, Array]) -> None:
    """Writes safetensors; arrays of uint16 are BF16."""
    names = {"float32": "F32", "float16": "F16", "uint16": "BF16", "int8": "I8", "int32": "I32"}
    header, body = {}, b""
    for name, values in tensors.items():
        data = values.tobytes()
        places = [len(body), len(body) + len(data)]
        header[name] = {"dtype": names[str(values.dtype)], "shape": values.shape, "data_offsets": places}
        body += data
    text = json.dumps(header).encode()
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)


@pytest.mark.slow
@pytest.mark.parametrize("method", FORMATS)
def test_the_text_is_that_of_the_same_values_unquantised(quantspec: Run, tmp_path: Path, method: str) -> None:
    quantise, config = FORMATS[method]
    stored, plain = {}, {}
    for name, weight in demo_weights().items():
        if ".layers." not in name or weight.ndim == 1:
            stored[name] = plain[name] = bf16(weight)
            continue
        tensors, plain[name] = quantise(weight)
        stored |= {f"{name.removesuffix('.weight')}.{kind}": values for kind, values in tensors.items()}
    quantised = copy_demo(tmp_path / "quantised", quantization_config={"quant_method": method, **config})
    save(quantised, stored)
    save(copy_demo(tmp_path / "plain"), plain)
    outcome = quantspec(*COMMAND, "-m", str(quantised))
    assert outcome.code == 0, outcome.stderr
    assert outcome.stdout == quantspec(*COMMAND, "-m", str(tmp_path / "plain")).stdout
    # Nibbles are made from codes times scales, of which the other model has rounded values: they share no cached prompt.
    cached = ("--weights", "int8", "--prompt-cache", str(tmp_path / "prompts"), "--text", "It was a dark night. " * 80)
    for model in (quantised, tmp_path / "plain"):
        again = quantspec(*COMMAND, *cached, "--json", "-m", str(model))
        assert json.loads(again.stdout)["stats"]["reused_tokens"] == 0


def test_an_unknown_method_is_refused_by_name(quantspec: Run, tmp_path: Path) -> None:
    model = copy_demo(tmp_path / "model", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    outcome = quantspec(*COMMAND, "-m", str(model))
    assert (outcome.code, outcome.stdout) == (1, "")
    assert 'error: quantization_config: method "bitsandbytes" is not supported\nhint: ' in outcome.stderr
