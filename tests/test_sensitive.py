"""Sensitive matrices: those a draft reads in 8 bits (`--draft-precision`), and the gain of each kind (`eval
--sensitivity`)."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import llama_numpy
import numpy as np
import pytest
from conftest import Outcome, exact_activations

from quantspec_cli import Engine, _native, hub
from quantspec_cli import eval as evaluation
from quantspec_cli.errors import UsageError
from quantspec_cli.model import Model
from quantspec_cli.options import SENSITIVE, EngineOptions

Run = Callable[..., Outcome]


@pytest.mark.slow
def test_every_kind_is_scored_alone(quantspec: Run) -> None:
    outcome = quantspec("eval", "--tokens", "90", "--sensitivity", "--json", "--device", "cpu")
    assert outcome.code == 0, outcome
    found = outcome.json
    scores: dict[str, Any] = found["sensitivity"]
    assert list(scores) == ["none", *SENSITIVE]
    plain = scores["none"]
    assert (plain["added_bytes"], plain["added_share"], plain["value"]) == (0, 0, None)
    # The default draft, which `drafts` has too.
    assert plain["acceptance"] == found["drafts"]["quantspec"]["acceptance"]
    for kind in SENSITIVE:
        score = scores[kind]
        assert score["added_bytes"] > 0
        assert score["value"] == pytest.approx((score["acceptance"] - plain["acceptance"]) / score["added_share"])
    gains = {kind: score["acceptance"] - plain["acceptance"] for kind, score in scores.items()}
    assert gains["down"] > 0
    # The scored draft has the requested precision.
    command = ("eval", "--tokens", "90", "--draft-precision", "down", "--json", "--device", "cpu")
    chosen = quantspec(*command).json
    assert chosen["draft_precision"] == "down"
    assert chosen["drafts"]["quantspec"]["acceptance"] == scores["down"]["acceptance"]
    assert chosen["targets"] == found["targets"]


# In a process whose kernels have f32 activations: BF16 ones would hide what one matrix gains.
MATRICES = """
import json, sys
from quantspec_cli import _native
model, ids = json.load(sys.stdin)
print(json.dumps(_native.sensitivity(model, ids, device="cpu", layers=True)))
"""


@pytest.mark.slow
def test_each_matrix_is_scored_alone(quantspec: Run) -> None:
    ids = Model.open(None).tokenizer.encode(evaluation.SAMPLE.read_text(encoding="utf-8"))[:60]
    found = subprocess.run(
        [sys.executable, "-c", MATRICES],
        input=json.dumps([str(hub.demo()), ids]),
        capture_output=True,
        env=exact_activations(),
        text=True,
        check=True,
    )
    scores = json.loads(found.stdout)
    assert "layers" not in scores["none"]
    model, tokens = llama_numpy.Llama(*llama_numpy.load(hub.demo())), np.array(ids)
    assert all(len(scores[kind]["layers"]) == model.layers for kind in SENSITIVE)
    parts = {"qkv": ("q", "k", "v"), "o": ("o",), "gate-up": ("gate", "up"), "down": ("down",)}

    rounded = llama_numpy.Llama(model.config, model.tensors, draft=True)

    def draft(kind: str, layer: int) -> tuple[llama_numpy.Llama, str]:
        """The draft network with these matrices exact; all others are rounded once."""
        block = "self_attn" if kind in {"qkv", "o"} else "mlp"
        one = copy.copy(rounded)
        one.exact = tuple(f"model.layers.{layer}.{block}.{part}_proj" for part in parts[kind])
        one.tensors = rounded.tensors | {f"{name}.weight": model.tensors[f"{name}.weight"] for name in one.exact}
        return one, "int4"

    engine = [rate for kind in SENSITIVE for rate in scores[kind]["layers"]]
    drafts = {f"{kind} {layer}": draft(kind, layer) for kind in SENSITIVE for layer in range(model.layers)}
    logs = llama_numpy.evaluate(model, tokens, "int8", drafts)
    expected = [float(np.exp(np.minimum(logs[name], logs["target"])[:-1]).sum(-1).mean()) for name in drafts]
    # A draft's code at a tie moves a score by up to .0015, and one matrix gains up to .007.
    assert engine == pytest.approx(expected, abs=0.003)
    assert np.corrcoef(engine, expected)[0, 1] > 0.75
    lines = quantspec("eval", "--tokens", "20", "--sensitivity-layers", "--device", "cpu").stdout.splitlines()
    assert lines[-7].split() == ["exact", *SENSITIVE]
    assert [line.split()[:2] for line in lines[-6:]] == [["layer", str(layer)] for layer in range(model.layers)]


@pytest.mark.slow
def test_the_table_names_every_kind(quantspec: Run) -> None:
    lines = quantspec(
        "eval", "--tokens", "30", "--sensitivity", "--weights", "int8", "--device", "cpu"
    ).stdout.splitlines()
    names = [line.split()[0] for line in lines if line]
    assert names[-6:] == ["in", "none", *SENSITIVE]


@pytest.mark.parametrize("weights", ["checkpoint", "int8"])
def test_precision_changes_no_token(weights: str) -> None:
    texts, held = [], []
    for precision in ("none", "down", "qkv,o,gate-up,down"):
        with Engine.load(context=400, weights=weights, draft_precision=precision, device="cpu", gamma=4) as engine:
            texts.append(engine.generate("The committee", max_new_tokens=60, ignore_eos=True).text)
            stats = engine.statistics()
            held.append(stats["draft_weights_bytes"])
            assert engine.info["draft_precision"] == precision
    assert len(set(texts)) == 1
    # A second copy in 8 bits takes memory; both planes exist anyway.
    assert (held == sorted(set(held))) if weights == "checkpoint" else held == [0, 0, 0]


@pytest.mark.parametrize(("precision", "shown"), [("none", ""), ("down", " (down in 8 bits)")])
def test_statistics_name_what_is_read_in_8_bits(quantspec: Run, precision: str, shown: str) -> None:
    flags = ("--draft-precision", precision, "--weights", "int8", "--device", "cpu")
    outcome = quantspec("run", "-n", "4", "--text", "Once upon a time", *flags)
    assert outcome.code == 0, outcome
    assert f"draft weights 0 B{shown}, cache" in outcome.stderr


def test_the_default_is_a_rule_of_shapes(quantspec: Run) -> None:
    config = quantspec("run", "-n", "4", "--json", "--device", "cpu", "--text", "Once upon a time").json
    assert config["draft_precision"] == "none"
    of = {
        batch: _native.plan(str(hub.demo()), capacity=100_000, slots=batch, device="cpu")["draft_precision"]
        for batch in (1, 64)
    }
    assert of[64] == "down"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--draft-precision", "up"), ("draft-precision is 'up'", "qkv, o, gate-up, down")),
        (("--draft-precision", "down,none"), ("draft-precision is 'down,none'",)),
        (("--draft-precision", ""), ("draft-precision is ''",)),
        (("--draft-precision", "down", "--weights", "int4"), ("weights int4 have no 8 bits", "int8")),
        (("--draft-precision", "qkv", "--draft-weights", "int4-mlp"), ("reads qkv as the target", "int4")),
        (("--draft-precision", "down", "--method", "kv4"), ("method kv4 reads no draft weights",)),
    ],
)
def test_what_cannot_be_read_in_8_bits_is_refused(
    quantspec: Run, flags: tuple[str, ...], words: tuple[str, ...]
) -> None:
    quantspec("run", "-n", "4", "--device", "cpu", *flags, "--text", "x").assert_error(2, *words)


def test_weights_without_8_bits_have_no_sensitivity(quantspec: Run) -> None:
    command = ("eval", "--tokens", "20", "--sensitivity", "--weights", "int4", "--device", "cpu")
    quantspec(*command).assert_error(2, "no 8 bits", "int8")


def test_names_are_the_engines() -> None:
    with pytest.raises(UsageError, match="draft_precision is 3"):
        EngineOptions(draft_precision=3)  # type: ignore[arg-type]
    for names in ("none", *SENSITIVE, ",".join(SENSITIVE)):
        plan = _native.plan(str(hub.demo()), capacity=500, device="cpu", draft_precision=names)
        assert plan["draft_precision"] == names
