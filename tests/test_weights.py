"""`--weights int8`: one copy of the weights; the target reads both nibble planes and the draft the upper one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_numpy
import numpy as np
import pytest
from conftest import Outcome, copy_demo
from gguf import GGMLQuantizationType as Kind
from test_gguf import demo_weights, save_safetensors, save_tensors, write_demo

from quantspec_cli import Engine, fingerprint, hub
from quantspec_cli import eval as evaluation
from quantspec_cli.model import Model
from quantspec_cli.options import METHODS, EngineOptions, GenerateOptions

Run = Callable[..., Outcome]

TOKENS = 300


def views(w: llama_numpy.Array, weigh: llama_numpy.Array) -> tuple[llama_numpy.Array, llama_numpy.Array]:
    """(Both, Upper) of a matrix (docs/design/weights.md): groups of 32, the best of eight steps, then of eight zeros."""
    both, upper = np.empty_like(w), np.empty_like(w)
    for start in range(0, w.shape[1], 32):
        group, factor = w[:, start : start + 32], weigh[start : start + 32]
        least, most = group.min(1, keepdims=True), group.max(1, keepdims=True)

        def error(
            step: llama_numpy.Array,
            zero: llama_numpy.Array,
            first: int,
            last: int,
            group: llama_numpy.Array = group,
            factor: llama_numpy.Array = factor,
        ) -> llama_numpy.Array:
            value = np.clip(np.rint((group - zero) / step), first, last) * step + zero
            return np.asarray((factor * (value - group) ** 2).sum(1, keepdims=True))

        best, steps, scale = np.full_like(least, np.inf), np.zeros_like(least), np.ones_like(least)
        for count in range(240, 248):
            tried = llama_numpy.half(np.maximum(16 * (most - least) / count, 2.0**-14))
            found = error(tried / 16, llama_numpy.half(least), -8, 247)
            steps, scale = np.where(found < best, count, steps), np.where(found < best, tried, scale)
            best = np.minimum(found, best)
        best, zero = np.full_like(least, np.inf), llama_numpy.half(least)
        for first in (8, 0, 2, 4, 6, 10, 12, 14):
            tried = llama_numpy.half(least + (8 - first) * (most - least) / steps)
            found = np.where(first <= 255 - steps, error(scale, tried, 0, 15), np.inf)
            zero, best = np.where(found < best, tried, zero), np.minimum(found, best)
        code = np.clip(np.rint((group - zero) / (scale / 16)), -8, 247)
        both[:, start : start + 32] = code * scale / 16 + zero
        upper[:, start : start + 32] = (code + 8) // 16 * scale + zero
    return both, upper


def searched(group: llama_numpy.Array, weigh: llama_numpy.Array) -> llama_numpy.Array:
    """Groups of int4 without a lower plane: the range of least squared error, weighed by the importance of the inputs, of 25
    whose ends are moved by -1 to 3 64ths; then two least-squares fits.
    """
    least, most = group.min(1, keepdims=True), group.max(1, keepdims=True)
    best, codes, values = np.full_like(least, np.inf), np.zeros_like(group), np.zeros_like(group)

    def consider(scale: llama_numpy.Array, zero: llama_numpy.Array) -> None:
        nonlocal best, codes, values
        scale, zero = llama_numpy.half(np.maximum(scale, 2.0**-14)), llama_numpy.half(zero)
        code = np.clip(np.rint((group - zero) / scale), 0, 15)
        error = (weigh * (code * scale + zero - group) ** 2).sum(1, keepdims=True)
        values, codes = np.where(error < best, code * scale + zero, values), np.where(error < best, code, codes)
        best = np.minimum(error, best)

    for below in range(-1, 4):
        for above in range(-1, 4):
            zero = least + below / 64 * (most - least)
            consider((most - above / 64 * (most - least) - zero) / 15, zero)
    for _ in range(2):
        mean_code, mean = (np.average(x, 1, weigh)[:, None] for x in (codes, group))
        centred = codes - mean_code
        scale = np.average(centred * group, 1, weigh)[:, None] / np.average(centred**2, 1, weigh)[:, None]
        consider(scale, mean - scale * mean_code)
    return values


def upper(w: llama_numpy.Array, importance: llama_numpy.Array) -> llama_numpy.Array:
    """A matrix of int4 without a lower plane, in groups of 32."""
    starts = range(0, w.shape[1], 32)
    return np.concatenate([searched(w[:, at : at + 32], importance[at : at + 32]) for at in starts], 1)


@pytest.mark.slow
def test_scores_of_four_bits_agree_with_numpy(tmp_path: Path) -> None:
    from quantspec_cli import _native

    # The demo's function, with an eighth of the inputs of down larger and their weights smaller: importance decides.
    model, weights = copy_demo(tmp_path / "outliers"), demo_weights()
    for name in weights:
        if "up_proj" in name:
            weights[name][::8] *= 16
        elif "down_proj" in name:
            weights[name][:, ::8] /= 16
    save_safetensors(model, weights, "BF16")
    ids = Model.open(None).tokenizer.encode(evaluation.SAMPLE.read_text(encoding="utf-8"))[:150]
    scores = _native.evaluate(str(model), ids, weights="int4")
    config, tensors = llama_numpy.load(model)
    weigh, equal = llama_numpy.importance(config, tensors), np.ones(config["intermediate_size"])
    target, plain = dict(tensors), dict(tensors)
    # The head (which is the embedding), keys, values, and down in the last eighth of six layers have both planes.
    for name, w in tensors.items():
        for found, factor in ((target, weigh.get(name, equal)), (plain, equal)):
            if w.ndim == 2 and re.search(r"embed|[kv]_proj|layers\.5\.mlp\.down", name):
                found[name] = views(w, factor)[0]
            elif w.ndim == 2:
                found[name] = upper(w, factor)
    numbers = np.array(ids)

    def scored(tensors: dict[str, llama_numpy.Array]) -> llama_numpy.Array:
        return llama_numpy.evaluate(llama_numpy.Llama(config, tensors), numbers, "fp16", {})["target"][:-1]

    stored, int4, other = scored(tensors), scored(target), scored(plain)
    kld, without = ((np.exp(stored) * (stored - found)).sum(-1).mean() for found in (int4, other))
    found = scores["weights"]["int4"]["kld"]
    # The engine rounds activations, which moves a score less than leaving out the importance does.
    assert found == pytest.approx(kld, rel=0.02)
    assert without > 1.1 * kld, (kld, without)
    nll = -int4[np.arange(len(ids) - 1), numbers[1:]].mean()
    assert scores["targets"]["fp16"]["nll"] == pytest.approx(nll, abs=0.003)


@pytest.mark.slow
def test_scores_agree_with_numpy() -> None:
    from quantspec_cli import _native

    ids = Model.open(None).tokenizer.encode(evaluation.SAMPLE.read_text(encoding="utf-8"))[:TOKENS]
    scores = _native.evaluate(str(hub.demo()), ids, weights="int8")
    config, tensors = llama_numpy.load(hub.demo())
    # The head is the embedding, and the draft reads both of its planes.
    weigh, equal = llama_numpy.importance(config, tensors), np.ones(config["hidden_size"])
    coded = {name: views(w, weigh.get(name, equal)) for name, w in tensors.items() if w.ndim == 2}
    upper = {name: w[1] for name, w in coded.items() if name.endswith("_proj.weight")}
    target = tensors | {name: w[0] for name, w in coded.items()}
    stored, int8 = llama_numpy.Llama(config, tensors), llama_numpy.Llama(config, target)
    draft = llama_numpy.Llama(config, target | upper)
    numbers = np.array(ids)
    expected = llama_numpy.evaluate(stored, numbers, "fp16", {})["target"][:-1]
    over_fp16 = llama_numpy.evaluate(int8, numbers, "fp16", {})["target"][:-1]
    found = llama_numpy.evaluate(int8, numbers, "int8", {"quantspec": (draft, "int4")})
    nll = -over_fp16[np.arange(TOKENS - 1), numbers[1:]].mean()
    kld = (np.exp(expected) * (expected - over_fp16)).sum(-1).mean()
    acceptance = np.exp(np.minimum(found["quantspec"], found["target"])[:-1]).sum(-1).mean()
    assert scores["targets"]["fp16"]["nll"] == pytest.approx(nll, abs=0.003)
    # The engine's checkpoint side rounds activations to BF16; NumPy does not.
    assert kld / 2 < scores["weights"]["int8"]["kld"] < kld + 1e-4
    assert scores["weights"]["int8"]["top1"] > 0.97
    assert scores["drafts"]["quantspec"]["acceptance"] == pytest.approx(acceptance, abs=0.006)


@pytest.mark.slow
def test_a_draft_with_sensitive_matrices_agrees_with_numpy() -> None:
    from quantspec_cli import _native

    ids = Model.open(None).tokenizer.encode(evaluation.SAMPLE.read_text(encoding="utf-8"))[:120]
    scores = _native.evaluate(str(hub.demo()), ids, weights="int8", draft_precision="down")
    config, tensors = llama_numpy.load(hub.demo())
    weigh, equal = llama_numpy.importance(config, tensors), np.ones(config["hidden_size"])
    coded = {name: views(w, weigh.get(name, equal)) for name, w in tensors.items() if w.ndim == 2}
    read = {
        name: both if "down_proj" in name or not name.endswith("_proj.weight") else upper
        for name, (both, upper) in coded.items()
    }
    target = llama_numpy.Llama(config, tensors | {name: both for name, (both, _) in coded.items()})
    found = llama_numpy.evaluate(
        target, np.array(ids), "int8", {"quantspec": (llama_numpy.Llama(config, tensors | read), "int4")}
    )
    acceptance = np.exp(np.minimum(found["quantspec"], found["target"])[:-1]).sum(-1).mean()
    assert scores["draft_precision"] == "down"
    assert scores["drafts"]["quantspec"]["acceptance"] == pytest.approx(acceptance, abs=0.006)


# 9 bits of 6.9 million weights; 5 bits of 3.8 million, and 9 of 1.0 million of keys, values and one down projection and of
# the head's 2.1.
@pytest.mark.slow
@pytest.mark.parametrize(("weights", "megabytes"), [("int8", 7.78), ("int4", 5.87)])
def test_every_method_emits_the_text_of_plain_decoding_from_one_copy(weights: str, megabytes: float) -> None:
    texts = set()
    for name, method in METHODS.items():
        draft_model = hub.demo() if method.draft_model else None
        with Engine.load(context=500, method=name, weights=weights, draft_model=draft_model) as engine:
            assert engine.info["weights"] == weights
            texts.add(tuple(engine.generate("The scene lay in London " * 40, max_new_tokens=60).tokens))
            stats = engine.statistics()
        assert stats["weights_bytes"] == pytest.approx(megabytes * 1e6, rel=0.01)
        # A draft model is stored in the target's weight format.
        assert stats["draft_weights_bytes"] == (stats["weights_bytes"] if method.draft_model else 0)
    assert len(texts) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "weights"), [("Q8_0", "int8"), ("Q4_1", "int8"), ("Q4_0", "int4"), ("Q4_1", "int4")])
def test_codes_of_gguf_files_are_kept(quantspec: Run, tmp_path: Path, kind: str, weights: str) -> None:
    write_demo(tmp_path / "demo.gguf", Kind[kind])
    options = ("-m", str(tmp_path / "demo.gguf"), "--weights", weights, "--tokens", "120", "--json", "--device", "cpu")
    outcome = quantspec("eval", *options)
    assert outcome.code == 0, outcome
    # Kept codes differ by the checkpoint's 16-bit rounding only. New codes would cost 1e-4 (int8) or 1e-2 (int4).
    assert outcome.json["weights"][weights]["kld"] < 2e-5


def packed(codes: llama_numpy.Array, axis: int) -> llama_numpy.Array:
    """Words of eight 4-bit codes along an axis, the first in the lowest bits."""
    last = np.moveaxis(codes, axis, -1).astype(np.uint32)
    words = (last.reshape(*last.shape[:-1], -1, 8) << (4 * np.arange(8, dtype=np.uint32))).sum(-1, dtype=np.uint32)
    return np.moveaxis(words, -1, axis).view(np.int32)


def coded(method: str, w: llama_numpy.Array) -> dict[str, tuple[str, llama_numpy.Array]]:
    """Tensors of a matrix in a method's format, by suffix."""
    if method == "int8":
        scale = (np.abs(w).max(1, keepdims=True) / 127).astype(np.float16)
        codes = np.clip(np.rint(w / scale.astype(np.float32)), -127, 127).astype(np.int8)
        return {"weight": ("I8", codes), "weight_scale": ("F16", scale)}
    groups = w.reshape(w.shape[0], -1, 64)
    if method == "int4":
        scale = (np.abs(groups).max(2) / 7.5).astype(np.float16)
        codes = np.clip(np.rint(groups / scale.astype(np.float32)[..., None]), -8, 7) + 8
        shape = ("I64", np.array(w.shape))
        return {
            "weight_packed": ("I32", packed(codes.reshape(w.shape), 1)),
            "weight_scale": ("F16", scale),
            "weight_shape": shape,
        }
    scale = ((groups.max(2) - groups.min(2)) / 15).astype(np.float16)
    zero = np.clip(np.rint(-groups.min(2) / scale), 0, 15)
    codes = np.clip(np.rint(groups / scale.astype(np.float32)[..., None]) + zero[..., None], 0, 15).reshape(w.shape)
    if method == "gptq":
        # Version 1 stores zero points minus one.
        zeros = packed((zero.T - 1) % 16, 1)
        order = ("I32", np.arange(w.shape[1], dtype=np.int32) // 64)
        return {
            "qweight": ("I32", packed(codes.T, 0)),
            "qzeros": ("I32", zeros),
            "scales": ("F16", scale.T),
            "g_idx": order,
        }

    def placed(x: llama_numpy.Array) -> llama_numpy.Array:
        return x.T.reshape(x.shape[1], -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(x.shape[1], -1)

    return {
        "qweight": ("I32", packed(placed(codes), 1)),
        "qzeros": ("I32", packed(placed(zero), 1)),
        "scales": ("F16", scale.T),
    }


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """A CPU and a GPU in turn."""
    if request.param == "cuda":
        request.getfixturevalue("gpu")
    return str(request.param)


METHODS_OF_FILES = {
    "int8": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    "int4": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "weights"), [("int8", "int8"), ("int4", "int4"), ("int4", "int8"), ("gptq", "int4"), ("awq", "int4")]
)
def test_codes_of_quantised_safetensors_are_kept(
    quantspec: Run, tmp_path: Path, method: str, weights: str, device: str
) -> None:
    scheme: dict[str, Any] = METHODS_OF_FILES[method]
    if "quant_method" not in scheme:
        form = "int-quantized" if method == "int8" else "pack-quantized"
        groups = {"group_0": {"weights": scheme}}
        scheme = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}
    folder = copy_demo(tmp_path / "quantised", quantization_config=scheme, torch_dtype="float16")
    tensors: dict[str, tuple[str, llama_numpy.Array]] = {}
    for name, values in demo_weights().items():
        if name.endswith("_proj.weight"):
            tensors |= {name.removesuffix("weight") + part: of for part, of in coded(method, values).items()}
        elif values.ndim == 1:
            tensors[name] = ("F32", values)
        else:
            # The head, too, keeps codes of 8 bits.
            codes, scale = (of for _, of in coded("int8", values).values())
            tensors[name] = ("F32", codes * scale.astype(np.float32))
    save_tensors(folder, tensors)
    options = ("-m", str(folder), "--weights", weights, "--tokens", "120", "--json", "--device", device)
    outcome = quantspec("eval", *options)
    assert outcome.code == 0, outcome
    score = outcome.json["weights"][weights]
    # Kept codes differ by the checkpoint's 16-bit rounding only. New codes would cost 1e-4 (int8) or 1e-2 (int4).
    assert score["kld"] < 2e-5, score
    if weights == "int4" or method == "int4":
        # Draft and target read the same 4-bit codes, with other activations.
        assert outcome.json["drafts"]["w4"]["acceptance"] > 0.97, outcome.json["drafts"]
    else:
        assert outcome.json["drafts"]["w4"]["acceptance"] > 0.8, outcome.json["drafts"]


@pytest.mark.slow
def test_eval_compares_weights_with_the_checkpoint(quantspec: Run) -> None:
    outcome = quantspec("eval", "--tokens", "80", "--weights", "int8", "--json", "--device", "cpu")
    assert outcome.code == 0, outcome
    score = outcome.json["weights"]["int8"]
    assert set(score) == {"kld", "top1"}
    assert 0 < score["kld"] < 1e-3
    int4 = quantspec("eval", "--tokens", "80", "--weights", "int4", "--json", "--device", "cpu").json["weights"]["int4"]
    assert 5 * score["kld"] < int4["kld"] < 0.2
    assert "weights" not in quantspec("eval", "--tokens", "80", "--json", "--device", "cpu").json
    table = quantspec("eval", "--tokens", "80", "--weights", "int8", "--device", "cpu").stdout
    assert "KLD to the checkpoint" in table


def test_reports_name_the_weights(fake: Any, quantspec: Run) -> None:
    for asked, named in (("checkpoint", "checkpoint"), ("int8", "int8"), ("auto", "checkpoint")):
        outcome = quantspec("run", "--text", "x", "-n", "5", "--weights", asked, "--json")
        assert (outcome.code, outcome.json["weights"]) == (0, named)
    assert quantspec("run", "--text", "x", "--weights", "int2").code == 2


def test_other_weights_repeat_the_answers() -> None:
    prints = {
        fingerprint.of_answer("m", EngineOptions(weights=weights), GenerateOptions())
        for weights in ("checkpoint", "int8")
    }
    assert len(prints) == 2


def test_a_batch_does_not_depend_on_free_memory(fake: Any, quantspec: Run, document: Path, tmp_path: Path) -> None:
    outcome = quantspec("batch", str(document), "--out", str(tmp_path / "out"), "--weights", "auto")
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "--weights int8" in outcome.stderr
    assert not (tmp_path / "out").exists()


def sparse_model(folder: Path, layers: int) -> Path:
    """A checkpoint of this many layers whose weights are a hole in a file: any size, without memory or disk."""
    h, f = 2048, 8192
    copy_demo(
        folder,
        hidden_size=h,
        intermediate_size=f,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=128,
        torch_dtype="bfloat16",
    )
    shapes = {"model.embed_tokens.weight": [8192, h], "model.norm.weight": [h]}
    for layer in range(layers):
        of = {"q_proj": [h, h], "k_proj": [256, h], "v_proj": [256, h], "o_proj": [h, h]}
        shapes |= {f"model.layers.{layer}.self_attn.{name}.weight": shape for name, shape in of.items()}
        of = {"gate_proj": [f, h], "up_proj": [f, h], "down_proj": [h, f]}
        shapes |= {f"model.layers.{layer}.mlp.{name}.weight": shape for name, shape in of.items()}
        of = {"input_layernorm": [h], "post_attention_layernorm": [h]}
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of.items()}
    header, place = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [place, place + size]}
        place += size
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    (folder / "model.safetensors").unlink()  # the link to the demo's
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + place)
    return folder


def test_auto_takes_int8_if_the_checkpoint_does_not_fit(tmp_path: Path) -> None:
    from quantspec_cli import _native

    small = _native.plan(str(hub.demo()), capacity=500, weights="auto", device="cpu")
    assert (small["weights"], small["fits"]) == ("checkpoint", True)
    # BF16 needs 1.4 times the available memory, 8.5 bits per weight three quarters of it.
    layers = int(1.4 * small["available_bytes"] / (2 * 59_768_832))
    model = str(sparse_model(tmp_path / "large", layers))
    plans = {
        name: _native.plan(model, capacity=500, weights=name, device="cpu") for name in ("checkpoint", "int8", "auto")
    }
    assert {name: plan["fits"] for name, plan in plans.items()} == {"checkpoint": False, "int8": True, "auto": True}
    assert plans["auto"]["weights"] == "int8"
    assert plans["auto"]["weights_bytes"] == plans["int8"]["weights_bytes"]
