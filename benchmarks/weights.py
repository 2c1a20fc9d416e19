#!/usr/bin/env python3
"""Print how far weights in fewer bits are from a checkpoint's: quantspec's, and those of llama.cpp's files.

    pip install xllamacpp==2026.10.11549 gguf==0.19.0
    python benchmarks/weights.py [FOLDER]        a Llama checkpoint in BF16; default: the demo model

A number is the mean of KL(checkpoint || quantised) of the next token, in nats, over the same tokens of sample.txt. Those of
`--weights` come from `quantspec eval`, those of llama.cpp's types from ggml's quantiser and a forward pass in NumPy.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

# The first, because it says what to install.
from llama_cpp import KINDS, ROOT, Quantiser, kind_of, named  # isort: split

import gguf
import numpy as np

from quantspec_cli.eval import SAMPLE
from quantspec_cli.model import Model

sys.path.insert(0, str(ROOT / "tests"))
# The tests' forward pass.
reference = importlib.import_module("llama_numpy")

TOKENS = 600


def report(weights: str, divergence: float) -> None:
    """Prints a line."""
    sys.stdout.write(f"{weights:8}{divergence:.2e}\n")


def main() -> None:
    """Prints one line for each kind of weights."""
    folder = sys.argv[1] if len(sys.argv) > 1 else str(ROOT / "python/quantspec_cli/demo")
    for weights in ("int8", "int4"):
        command = ["eval", "-m", folder, "--tokens", str(TOKENS), "--weights", weights, "--device", "cpu", "--json"]
        out = subprocess.run([sys.executable, "-m", "quantspec_cli", *command], check=True, stdout=subprocess.PIPE)
        report(weights, json.loads(out.stdout)["weights"][weights]["kld"])
    ids = np.array(Model.open(folder).prompt(SAMPLE.read_text(encoding="utf-8")).ids[:TOKENS])
    config, tensors = reference.load(Path(folder))
    exact = reference.log_softmax(reference.Llama(config, tensors).forward(ids))
    quantise = Quantiser()
    for mix in KINDS:
        stored = dict(tensors)
        for name, values in tensors.items():
            if values.ndim == 2:
                # A tied embedding is the head too.
                tied = name == "model.embed_tokens.weight" and "lm_head.weight" not in tensors
                given = "output.weight" if tied else named(name)
                kind = kind_of(given, values.shape[1], config["num_hidden_layers"], mix)
                stored[name] = gguf.dequantize(quantise(values, kind), kind).astype(np.float64)
        read = reference.log_softmax(reference.Llama(config, stored).forward(ids))
        report(mix, float((np.exp(exact) * (exact - read)).sum(-1).mean()))


if __name__ == "__main__":
    main()
