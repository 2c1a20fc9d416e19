"""`quantspec plan`: what fits, from config.json alone, and predictions that agree with measurements."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import runpy
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import DEMO, Outcome
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st
from test_gguf import write_demo

from quantspec_cli import Engine, _native, hub, predict, sizes
from quantspec_cli.model import Model
from quantspec_cli.options import BATCH_MAX, EngineOptions
from quantspec_cli.predict import TARGET, Curve, Draft, Load, Machine, Rounds

Run = Callable[..., Outcome]
ROOT = Path(__file__).parents[1]
CONTRACT = [
    *("model", "device", "fits", "weights_bytes", "draft_weights_bytes", "cache_bytes_per_token", "planned_bytes"),
    *("available_bytes", "context", "longest_context", "batch", "largest_batch", "predicted", "roofline"),
]
PREDICTED = [
    *("method", "gamma", "draft_pages", "prefill_tokens_per_s", "ar_tokens_per_s", "decode_tokens_per_s"),
]
ROOFLINE = ["operation", "flops", "bytes", "intensity", "bound", "us"]


def described(folder: Path, **fields: Any) -> str:
    """A directory with config.json only: the demo's with other fields."""
    folder.mkdir(exist_ok=True)
    config = json.loads((DEMO / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return str(folder)


@pytest.mark.slow
def test_json_has_the_contracts_fields_and_finite_numbers(quantspec: Run, tmp_path: Path) -> None:
    outcome = quantspec(
        "plan", "-m", described(tmp_path / "m"), "-c", "900", "--batch", "2", "--device", "cpu", "--json"
    )
    assert outcome.code == 0, outcome
    found = outcome.json
    assert set(CONTRACT) <= set(found)
    assert set(PREDICTED) <= set(found["predicted"])
    for row in found["roofline"]:
        assert list(row) == ROOFLINE
        assert row["bound"] in {"memory", "compute"}
        assert row["intensity"] == pytest.approx(row["flops"] / row["bytes"])
        assert all(math.isfinite(row[name]) and row[name] > 0 for name in ("flops", "bytes", "us"))
    numbers = [found["predicted"][name] for name in PREDICTED[3:]]
    assert all(math.isfinite(number) and number > 0 for number in numbers), numbers
    assert (found["context"], found["batch"], found["fits"], found["device"]) == (900, 2, True, "cpu")
    rows = {row["method"]: row for row in found["methods"]}
    assert set(rows) == {"ar", "auto", "ngram", *predict.ACCEPTANCE}
    for name, row in rows.items():
        assert len(row["round_ms"]) == (1 if name == "ar" else predict.GAMMA_MOST + 1)
        assert row["round_ms"][0] == pytest.approx(rows["ar"]["round_ms"][0])
        assert row["pays_from"] is None or 0 <= row["pays_from"] <= 1
    assert rows["ar"]["decode_tokens_per_s"] == pytest.approx(2e3 / rows["ar"]["round_ms"][0])
    assert (rows["window"]["draft_pages"], rows["quantspec"]["draft_pages"]) == (16, "all")
    fastest = max(rows[name]["decode_tokens_per_s"] for name in ("ar", *predict.CHOICES))
    assert rows["auto"]["decode_tokens_per_s"] == pytest.approx(fastest)
    # How often earlier text is right is not known.
    assert (rows["ngram"]["decode_tokens_per_s"], rows["ngram"]["speedup"]) == (None, None)
    # Floating-point operations of a step of two sequences: two per weight of the matrices.
    shape = _native.model_info(str(DEMO))
    layer = shape["hidden"] * (2 * shape["heads"] + 2 * shape["kv_heads"]) * shape["head_dim"]
    layer += 3 * shape["hidden"] * shape["intermediate"]
    weights = shape["layers"] * layer + shape["vocab"] * shape["hidden"]
    assert found["roofline"][0]["flops"] == 2 * 2 * weights


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_plan_of_weights_in_nibbles(quantspec: Run, weights: str) -> None:
    plans = [
        quantspec("plan", "-c", "900", "--weights", kept, "--device", "cpu", "--json").json
        for kept in (weights, "checkpoint")
    ]
    own, checkpoint = plans
    assert (own["weights"], checkpoint["weights"]) == (weights, "checkpoint")
    # 9 or about 6.8 bits a weight in place of 16, and no second copy for drafts.
    assert own["weights_bytes"] < {"int8": 0.58, "int4": 0.43}[weights] * checkpoint["weights_bytes"]
    assert (own["draft_weights_bytes"], checkpoint["draft_weights_bytes"] > 0) == (0, True)
    read = [plan["roofline"][0]["bytes"] for plan in plans]
    assert read[0] < 0.58 * read[1]
    drafted = next(row["bytes"] for row in own["roofline"] if row["operation"] == "draft matrices")
    assert drafted <= read[0]


@pytest.mark.slow
def test_a_given_acceptance_is_that_of_every_method(quantspec: Run) -> None:
    outcome = quantspec("plan", "-c", "900", "--acceptance", "1", "--device", "cpu", "--json")
    rows = {row["method"]: row for row in outcome.json["methods"]}
    assert {row["acceptance"] for name, row in rows.items() if name != "ar"} == {1.0}
    # Copies that are always right: a round of γ yields γ + 1 tokens.
    speeds = [1e3 * (gamma + 1) / time for gamma, time in enumerate(rows["ngram"]["round_ms"])]
    assert rows["ngram"]["decode_tokens_per_s"] == pytest.approx(max(speeds))
    assert rows["ngram"]["gamma"] == speeds.index(max(speeds))


@pytest.mark.slow
def test_the_table_is_readable(quantspec: Run) -> None:
    outcome = quantspec("plan", "-c", "600", "--device", "cpu")
    assert outcome.code == 0, outcome
    for words in ("600 tokens", "fits", "speed-up", "quantspec", "decode matrices", "8B, BF16"):
        assert words in outcome.stdout, words


def parts(held: Mapping[str, Any]) -> dict[str, int]:
    """What an engine itself holds, by purpose."""
    return {name: held[name] for name in held if re.fullmatch(r"(.*weights|cache_.*|buffer|workspace)_bytes", name)}


@pytest.mark.parametrize("target", ["int8", "fp16", "int4"])
def test_config_alone_plans_what_an_engine_holds(tmp_path: Path, target: str) -> None:
    path = described(tmp_path / "m")
    # The process's memory counts, so its tokenizer is loaded first.
    model = Model.open()
    held = _native.plan(path, capacity=1500, slots=2, kv_target=target, device="cpu", described=True)
    with Engine(model, EngineOptions(kv_target=target, device="cpu"), context=1500, batch=2) as engine:
        stats = engine.statistics()
    assert len(parts(held)) == 7
    assert parts(held) == parts(stats)
    assert held["planned_bytes"] == pytest.approx(stats["planned_bytes"], rel=0.03)
    assert held["fits"] is True


@pytest.mark.slow
def test_a_plan_reads_no_weights(quantspec: Run, tmp_path: Path) -> None:
    """Invalid weights do not matter."""
    path = Path(described(tmp_path / "m"))
    (path / "model.safetensors").write_bytes(b"\xff" * 64)
    assert quantspec("plan", "-m", str(path), "-c", "300", "--device", "cpu", "--json").json["fits"] is True


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"hidden_size": 0}, "hidden_size"), ({"model_type": "mamba"}, "mamba"), ({"head_dim": 12}, "head_dim 12")],
)
def test_models_that_cannot_run_are_an_error(
    quantspec: Run, tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    path = described(tmp_path / "m", **fields)
    quantspec("plan", "-m", path, "--device", "cpu").assert_error(1, words)


@pytest.mark.slow
def test_a_draft_model_is_planned_and_predicted(quantspec: Run, tmp_path: Path) -> None:
    path, small = described(tmp_path / "m"), described(tmp_path / "small", num_hidden_layers=1)
    flags = ("plan", "-m", path, "-c", "1500", "--device", "cpu", "--json")
    alone = quantspec(*flags).json
    found = quantspec(*flags, "--draft-model", small, "--draft-model-kv", "int4").json
    held = _native.plan(
        path,
        capacity=1500,
        method="draft-model",
        draft_model=small,
        draft_model_kv="int4",
        draft_weights="none",
        device="cpu",
        described=True,
    )
    assert found["draft_weights_bytes"] == held["draft_weights_bytes"] < alone["weights_bytes"]
    assert (found["draft_model"], found["draft_model_kv"]) == (small, "int4")
    row = found["methods"][-1]
    assert (row["method"], row["decode_tokens_per_s"], row["gamma"]) == ("draft-model", None, None)
    # Each drafted token takes a step of the smaller model, and verification the time of copies.
    copies = next(one for one in found["methods"] if one["method"] == "ngram")["round_ms"]
    steps = np.subtract(row["round_ms"], copies)
    assert steps[0] == pytest.approx(0, abs=1e-3)
    assert 0 < steps[1] < row["round_ms"][0]
    assert steps[4] == pytest.approx(4 * steps[1], rel=0.1)
    likely = quantspec(*flags, "--draft-model", small, "--acceptance", "0.9").json["methods"][-1]
    assert likely["decode_tokens_per_s"] > 0


def test_a_draft_model_that_cannot_draft_is_an_error(quantspec: Run, tmp_path: Path) -> None:
    path = described(tmp_path / "m")
    flags = ("plan", "-m", path, "--device", "cpu")
    other = described(tmp_path / "other", vocab_size=4096)
    quantspec(*flags, "--draft-model", other).assert_error(1, "vocabulary of 4096")
    short = described(tmp_path / "short", max_position_embeddings=512)
    outcome = quantspec(*flags, "--draft-model", short, "-c", "1000")
    assert outcome.code == 3
    assert "the draft model's context of 512" in outcome.stderr
    quantspec(*flags, "--draft-model-kv", "int4").assert_error(2, "--draft-model-kv is int4", "--draft-model, or leave")


def test_a_plan_that_does_not_fit_is_exit_3(quantspec: Run, tmp_path: Path) -> None:
    # 10^15 bytes of cache, beyond every machine.
    path = described(tmp_path / "m", num_hidden_layers=1000, max_position_embeddings=1 << 27)
    outcome = quantspec("plan", "-m", path, "--device", "cpu", "--json")
    assert outcome.code == 3, outcome
    found = outcome.json
    assert found["error"]["exit_code"] == 3
    assert "available" in found["error"]["message"]
    assert (found["fits"], found["predicted"], found["roofline"]) == (False, None, [])
    assert 0 < found["longest_context"] < found["context"] == 1 << 27
    assert found["planned_bytes"] > found["available_bytes"]
    outcome = quantspec("plan", "-m", path, "--device", "cpu")
    assert outcome.code == 3
    assert "does not fit" in outcome.stdout
    assert len(outcome.stderr.splitlines()) == 2
    # The cache alone does not fit.
    assert re.fullmatch(r"hint: use -c \d+ or less", outcome.stderr.splitlines()[1]), outcome.stderr


def test_smaller_weights_are_a_remedy_if_the_rest_fits(quantspec: Run, tmp_path: Path) -> None:
    # 6.6 TB of weights.
    path = described(tmp_path / "m", num_hidden_layers=1024, hidden_size=8192, intermediate_size=1 << 17)
    outcome = quantspec("plan", "-m", path, "-c", "64", "--device", "cpu")
    assert (outcome.code, "--weights int8 or int4" in outcome.stderr) == (3, True), outcome
    outcome = quantspec("plan", "-m", path, "-c", "64", "--device", "cpu", "--weights", "int8")
    assert (outcome.code, "--weights" in outcome.stderr) == (3, False), outcome


def test_a_context_beyond_the_models_is_exit_3_with_the_longest(quantspec: Run) -> None:
    most = _native.model_info(str(DEMO))["max_positions"]
    outcome = quantspec("plan", "-c", str(most + 1), "--device", "cpu", "--json")
    assert outcome.code == 3, outcome
    assert f"the model's context of {most}" in outcome.json["error"]["message"]
    assert outcome.json["longest_context"] == most
    text = quantspec("plan", "-c", str(most + 1), "--device", "cpu").stdout
    assert f"context     {most + 1:,} tokens, more than the model's {most:,}; longest that fits {most:,}\n" in text
    assert re.search(r"memory  .* on cpu\n", text), "the memory is not what is missing, but the plan does not fit"


def test_the_largest_batch_is_the_largest(tmp_path: Path) -> None:
    path, tokens = described(tmp_path / "m", num_hidden_layers=40, max_position_embeddings=1 << 18), 1 << 18

    def plan(slots: int) -> dict[str, Any]:
        return _native.plan(path, capacity=tokens, slots=slots, device="cpu", described=True)

    # One plan has both numbers, because other processes allocate and free memory.
    now = plan(1)
    available = now["available_bytes"] - (now["planned_bytes"] - sum(parts(now).values()))
    largest = now["largest_batch"]
    assert sum(parts(plan(max(largest, 1))).values()) <= available or largest == 0
    assert available < sum(parts(plan(largest + 1)).values())


def test_the_largest_batch_can_be_planned(fake: Any, quantspec: Run) -> None:
    found = quantspec("plan", "-c", "10", "--json").json
    assert found["largest_batch"] == BATCH_MAX
    assert quantspec("plan", "-c", "10", "--batch", str(BATCH_MAX)).code == 0
    quantspec("plan", "-c", "10", "--batch", str(BATCH_MAX + 1)).assert_error(2, f"1 to {BATCH_MAX}")


def test_a_plan_of_more_bytes_than_there_are_addresses_does_not_fit(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 1024, "num_key_value_heads": 1024}
    path = described(tmp_path / "m", num_hidden_layers=1024, **heads)
    held = _native.plan(path, capacity=1 << 32, slots=4096, device="cpu", described=True)
    assert (held["fits"], held["planned_bytes"]) == (False, 2**64 - 1)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--batch", "0"), "--batch is 0"),
        (("-c", "-1"), "--ctx-size is -1"),
        (("--acceptance", "1.5"), "--acceptance is 1.5"),
        (("--acceptance", "nan"), "--acceptance is nan"),
        (("--device", "tpu"), "--device is 'tpu'"),
        (("--kv-target", "int2"), "int2"),
    ],
)
def test_values_out_of_range_are_usage_errors(quantspec: Run, flags: tuple[str, str], words: str) -> None:
    quantspec("plan", *flags).assert_error(2, words)


def test_no_temporary_folder_costs_only_the_table_of_sizes(
    fake: Any, quantspec: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a read-only container, or on a full disk."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    for command in ("plan", "doctor"):
        outcome = quantspec(command, "--json")
        assert (outcome.code, outcome.json["sizes"]) == (0, []), outcome
        assert "what fits here" not in quantspec(command).stdout
    assert "no temporary folder can be written: no space left on device; set TMPDIR" in quantspec("plan").stderr


def test_sizes_are_those_of_their_models() -> None:
    table = {(row["size"], row["weights"]): row for row in sizes.table("cpu")}
    rows = {size: row for (size, weights), row in table.items() if weights == "bf16"}
    # Weights of the published checkpoints, in units of 10^9 with 2 bytes each.
    for name, billions in (("1B", 1.236), ("3B", 3.213), ("8B", 8.03), ("14B", 14.77), ("32B", 32.76), ("70B", 70.55)):
        assert rows[name]["weights_bytes"] == pytest.approx(2e9 * billions, rel=0.005), name
        assert rows[name]["longest_context"] <= sizes.CONTEXT
    # 8B: 7.5 billion weights in 9 bits, or in 5 but for keys, values and the outer layers' down; the head's 0.53 in 9, the
    # embedding in 16. Drafts read the same bytes.
    for weights, gigabytes in (("int8", 9.49), ("int4", 6.37)):
        held = table["8B", weights]
        assert (held["weights_bytes"], held["draft_weights_bytes"]) == (pytest.approx(1e9 * gigabytes, rel=0.01), 0)
        assert held["longest_context"] >= rows["8B"]["longest_context"]


# Predictions ---------------------------------------------------------------------------------------------------------


# The shapes of benchmarks/results/h200-wide7.json and h200-wide8.json, and that of Llama 3.1 8B.
WIDE7 = {
    "layers": 32,
    "hidden": 4096,
    "heads": 32,
    "head_dim": 128,
    "kv_heads": 32,
    "intermediate": 11_264,
    "vocab": 8192,
}
WIDE8 = WIDE7 | {"kv_heads": 8, "intermediate": 14_336}
EIGHT = WIDE8 | {"vocab": 128_256}


def on_gpu(info: Mapping[str, int], context: int, weights: str, kv_target: str = "int8") -> Load:
    """A shape with these weights, as `_native` describes it on a GPU."""
    width, kv_width = (info[name] * info["head_dim"] for name in ("heads", "kv_heads"))
    linear = info["layers"] * info["hidden"] * (2 * width + 2 * kv_width + 3 * info["intermediate"])
    head = info["hidden"] * info["vocab"]
    # Bytes of a weight of the target, of the draft, and of the head in drafts.
    target, draft, drafted_head = {
        "checkpoint": (2, 17 / 32, 1),
        "int8": (17 / 16, 9 / 16, 17 / 16),
        "int4": (9 / 16, 9 / 16, 17 / 16),
    }[weights]
    heads = info["layers"] * info["kv_heads"]
    pages = max(0, context // 128 - 1)
    traffic = {
        "weights_bytes": target * (linear + head),
        "pages": pages,
        "buffer_tokens": context - 128 * pages,
        "upper_page_bytes": heads * 17_408,
        "lower_page_bytes": heads * 16_384,
        "full_page_bytes": heads * 65_536,
        "token_bytes": heads * 512,
    }
    drafted = round(draft * linear + drafted_head * head)
    return Load.of(info, traffic, drafted, context, weights=weights, kv_target=kv_target)


def at(times: Sequence[float], gamma: float) -> float:
    """Interpolates seconds of rounds."""
    return float(np.interp(gamma, range(len(times)), times))


@pytest.mark.parametrize(("kind", "weights", "count"), [("", "checkpoint", 11), ("-int8", "int8", 4)])
@pytest.mark.parametrize(("name", "info"), [("h200-wide7", WIDE7), ("h200-wide8", WIDE8)])
def test_predictions_of_a_gpu_are_near_what_was_measured(
    name: str, info: Mapping[str, int], kind: str, weights: str, count: int
) -> None:
    rows = json.loads((ROOT / f"benchmarks/results/{name}{kind}.json").read_text())
    compared = 0
    for row in rows:
        if row["accept"] != "replay":
            continue
        assert row["weights"] == weights
        load = on_gpu(info, row["n_depth"] + row["n_gen"] // 2, weights, row["kv_target"])
        rates = {"read_gb_per_s": row["bandwidth_gb_per_s"], "compute_capability": "9.0"}
        machine = Machine.of(rates, load)
        drafts = row["method"] != "ar"
        draft = Draft(row["method"], None if row["draft_pages"] == "all" else row["draft_pages"]) if drafts else None
        if draft is not None and draft not in predict.drafts(load.pages):
            continue  # a choice of more than two thirds of the pages
        rounds = Rounds.of(machine, load, draft, batch=1)
        assert 1e3 * at(rounds.seconds, row["gamma_mean"]) == pytest.approx(row["round_ms"], rel=0.08), row
        speed = rounds.speed(draft.acceptance).tokens_per_s if draft else rounds.plain
        assert speed == pytest.approx(row["tokens_per_s"], rel=0.15), row
        compared += 1
    assert compared == count


@pytest.mark.parametrize(("group", "once"), [(1, 13), (4, 8), (7, 4), (8, 4), (40, 1)])
def test_a_gpu_reads_the_cache_once_for_each_tile_of_query_rows(group: int, once: int) -> None:
    load = on_gpu(WIDE8 | {"heads": 8 * group}, 130_048, "checkpoint")
    attention = Machine.of({"read_gb_per_s": 4437, "compute_capability": "9.0"}, load).attention[predict.TARGET]
    times = [attention.at(rows) / attention.at(1) for rows in range(1, predict.GAMMA_MOST + 2)]
    assert times == pytest.approx([-(-rows // once) for rows in range(1, predict.GAMMA_MOST + 2)])


def test_tiles_of_query_rows_are_those_of_the_kernels() -> None:
    table = (ROOT / "kernels/attend.cu").read_text()
    for view in ("both", "full"):
        assert max(map(int, re.findall(rf"ATTEND\(attend_{view}_\d+_(\d+),", table))) == predict.GPU_TILE


@pytest.mark.parametrize(
    ("weights", "method", "milliseconds"),
    [("checkpoint", "w4", 1.52), ("checkpoint", "qspec", 1.60)],
)
def test_predicted_draft_steps_of_a_gpu_are_near_what_was_measured(
    weights: str, method: str, milliseconds: float
) -> None:
    """The measured ones are in docs/design/qspec.md."""
    load = on_gpu(EIGHT, 4096 + 32, weights)
    machine = Machine.of({"read_gb_per_s": 4437, "compute_capability": "9.0"}, load)
    step = predict.seconds(machine, load, Draft(method), rows=1, batch=1)
    assert 1e3 * step == pytest.approx(milliseconds, rel=0.05)


DRAFT = Draft("quantspec")
LOAD = Load(
    layers=2,
    group=4,
    weights="checkpoint",
    kv_target="int8",
    weights_bytes=8e9,
    draft_weights_bytes=1e9,
    pages=100,
    page_bytes={"fp16": 4e7, "int8": 2e7, "int4": 1e7},
    recent_bytes=0.0,
    matrix_flops=8e9,
    attention_flops=1e9,
    prompt_flops=(7.2e12, 0.4e12),
    context=1000,
)
# What `_native.rates` says of a CPU: seconds of matrices and attention by rows, and of the first and later steps of drafts.
CPU = {
    "read_gb_per_s": 1.0,
    "compute_capability": None,
    "rows": (1, 2, 4),
    "target": [(8.0, 2.0), (9.0, 3.0), (11.0, 5.0)],
    "drafts": [((1.5, 0.75), (1.0, 0.5))] * len(predict.drafts(LOAD.pages)),
    "many_s": [2.5] * len(predict.drafts(LOAD.pages)),
    "token_s": 0.125,
    "prompt_matrix": 1e12,
    "prompt_attention": 2e12,
}
# Seconds of the loop in rounds of seconds.
LOOP = 60e-6


def rounds(draft: Draft | None = DRAFT, *, batch: int = 1, **rates: Any) -> Rounds:
    """Of the machine `CPU` with other rates."""
    return Rounds.of(Machine.of(CPU | rates, LOAD), LOAD, draft, batch=batch)


def test_rounds_of_a_cpu_by_hand() -> None:
    found = rounds().seconds
    assert found[0] == pytest.approx(8 + 2 + 0.125 + LOOP)
    # γ = 1: a first draft step, two rows, three tokens to choose. γ = 3: two later steps more, four rows.
    assert found[1] == pytest.approx((1.5 + 0.75) + (9 + 3) + 3 * 0.125 + LOOP)
    assert found[3] == pytest.approx((1.5 + 0.75) + 2 * (1.0 + 0.5) + (11 + 5) + 7 * 0.125 + LOOP)
    # Beyond the last point costs grow as before it: 5 rows.
    assert found[4] == pytest.approx((1.5 + 0.75) + 3 * (1.0 + 0.5) + (12 + 6) + 9 * 0.125 + LOOP)
    # Copies take no time before they are verified.
    assert rounds(None).seconds[3] == pytest.approx((11 + 5) + 4 * 0.125 + LOOP)


def test_a_batch_shares_weights_but_no_caches() -> None:
    # Two sequences of one row: matrices of two rows, two attentions.
    assert rounds(batch=2).plain == pytest.approx(2 / (9 + 2 * 2 + 2 * 0.125 + LOOP))
    # γ = 1: four rows; a draft step of two rows lies a third of the way to that of four.
    drafted = (1.0 + 1.5 / 3) + 2 * 0.5 + 2 * 0.125 + (1.5 + 0.75 - 1.0 - 0.5)
    assert rounds(batch=2).seconds[1] == pytest.approx(drafted + 11 + 2 * 3 + 4 * 0.125 + LOOP)


def test_short_rounds_have_a_short_loop() -> None:
    # 200 µs: 6 µs and 1 %.
    quick = rounds(target=[(1e-4, 1e-4)] * 3, token_s=0.0)
    assert quick.seconds[0] == pytest.approx(200e-6 + 6e-6 + 2e-6)


def test_a_pass_of_a_gpu_reads_the_methods_weights_and_view() -> None:
    """1 GB/s: seconds are gigabytes over the share of the bandwidth."""
    machine = Machine.of({"read_gb_per_s": 1.0, "compute_capability": "1.0"}, LOAD)

    def read(method: str, pages: int | None = None) -> tuple[float, float]:
        draft = Draft(method, pages)
        return machine.matrices[draft].at(1), machine.attention[draft].at(1)

    assert (machine.matrices[TARGET].at(1), machine.attention[TARGET].at(3)) == (pytest.approx(8), pytest.approx(2))
    assert read("quantspec") == (pytest.approx(1 / 0.79), pytest.approx(1 / 0.92))
    assert read("quantspec", 16) == (pytest.approx(1 / 0.79), pytest.approx(0.16 / 0.92))
    assert read("kv4") == (pytest.approx(8), pytest.approx(1 / 0.92))
    assert read("w4") == (pytest.approx(1 / 0.79), pytest.approx(2))
    assert read("qspec") == (pytest.approx(1 / 0.74), pytest.approx(2))
    assert read("window") == (pytest.approx(1 / 0.79), pytest.approx(0.32))
    assert read("snapkv") == (pytest.approx(1 / 0.79), pytest.approx(0.16 / 0.92))
    assert predict.prompt(machine, LOAD) == []


def test_a_selection_has_at_most_two_thirds_of_the_pages() -> None:
    assert {draft.pages for draft in predict.drafts(95)} == {None, 16}
    assert {draft.pages for draft in predict.drafts(96)} == {None, 16, 64}
    assert [draft.method for draft in predict.drafts(0)] == [*predict.ACCEPTANCE]


def test_operations_by_hand() -> None:
    machine = Machine.of(CPU, LOAD)
    matrices, attention = predict.prompt(machine, LOAD)
    assert (matrices.seconds, attention.seconds) == (7.2, 0.2)
    matrices, attention = predict.step(machine, LOAD, TARGET, rows=2, batch=1, name="verify")
    assert (matrices.name, matrices.flops, matrices.bytes, matrices.seconds) == ("verify matrices", 16e9, 8e9, 9.0)
    assert (attention.flops, attention.bytes, attention.seconds) == (2e9, 2e9, 3.0)
    # A draft over 16 of 100 pages.
    _, attention = predict.step(machine, LOAD, Draft("window"), rows=1, batch=1, name="draft")
    assert (attention.flops, attention.bytes) == (pytest.approx(0.16e9), pytest.approx(0.32e9))
    # 8 GB take 8 of 8 seconds, 2 GB take 2 of 10.
    assert matrices.to_json()["bound"] == "memory"
    machine = Machine.of(CPU | {"target": [(8, 10)] * 3}, LOAD)
    slow = predict.step(machine, LOAD, TARGET, rows=1, batch=1, name="")
    assert [one.to_json()["bound"] for one in slow] == ["memory", "compute"]


def test_the_last_layer_computes_keys_and_values_of_a_prompt() -> None:
    info = {"layers": 2, "hidden": 8, "heads": 4, "kv_heads": 1, "head_dim": 2, "intermediate": 10, "vocab": 100}
    # 160 + 240 weights of a layer, 96 of them for queries, keys and values; 800 of the head.
    traffic = {"weights_bytes": 0, "pages": 0, "buffer_tokens": 0, "token_bytes": 0}
    traffic |= {"upper_page_bytes": 0, "lower_page_bytes": 0, "full_page_bytes": 0}
    load = Load.of(info, traffic, 0, 1000, weights="checkpoint", kv_target="int8")
    # A token sees half of the 1,000 new tokens and those before them, with 8 channels of one layer.
    assert load.prompt_flops == (2 * (1000 * (400 + 96) + 800), 4 * 8 * 500 * 1000)
    assert predict.prompt_flops(info, 1000, 2000) == (load.prompt_flops[0], 5 * load.prompt_flops[1])


def test_the_best_gamma_by_hand() -> None:
    of = rounds()
    by_hand = {gamma: sum(0.8**i for i in range(gamma + 1)) / of.seconds[gamma] for gamma in range(13)}
    found = of.speed(0.8)
    assert found.gamma == max(by_hand, key=lambda gamma: by_hand[gamma]) > 0
    assert found.tokens_per_s == pytest.approx(by_hand[found.gamma])


@given(st.floats(0, 1), st.floats(0, 1), st.sampled_from([*predict.ACCEPTANCE]), st.integers(1, 64))
def test_more_acceptance_is_no_slower_and_none_is_plain(low: float, high: float, method: str, batch: int) -> None:
    of = rounds(Draft(method), batch=batch)
    low, high = sorted((low, high))
    assert of.speed(low).tokens_per_s <= of.speed(high).tokens_per_s * (1 + 1e-9)
    assert of.speed(0.0).tokens_per_s == pytest.approx(of.plain)


@pytest.mark.slow
@given(st.floats(0.01, 20))
def test_drafts_pay_from_an_acceptance(later: float) -> None:
    of = rounds(drafts=[((later, 0.0), (later, 0.0))] * len(predict.drafts(LOAD.pages)))

    def gains(acceptance: float) -> bool:
        lengths = [sum(acceptance**i for i in range(gamma + 1)) for gamma in range(13)]
        return any(length / time >= of.plain for length, time in list(zip(lengths, of.seconds, strict=True))[1:])

    if of.pays_from is None:
        assert not gains(1.0)
    else:
        assert gains(of.pays_from)
        assert not gains(of.pays_from - 0.001)


@given(st.lists(st.floats(1e-12, 1e-6), min_size=1, max_size=4), st.integers(1, 200))
def test_curves_pass_through_their_points_and_never_fall_below_0(costs: list[float], rows: int) -> None:
    curve = Curve([(1 << index, cost) for index, cost in enumerate(costs)])
    for index, cost in enumerate(costs):
        assert curve.at(1 << index) == pytest.approx(cost)
    assert curve.at(rows) >= 0
    assert Curve([(1, 1.0), (5, 3.0)]).at(3) == 2.0
    assert Curve([(1, 1.0), (5, 3.0)]).at(9) == 5.0


def test_a_benchmark_is_compared_with_its_mean_round() -> None:
    run = runpy.run_path(str(ROOT / "benchmarks/run.py"))
    times = {"method": "quantspec", "draft_pages": "all", "round_ms": [10.0, 14.0, 20.0]}
    plan = {"methods": [{"method": "ar", "draft_pages": "all", "round_ms": [10.0]}, times]}
    row = {"method": "quantspec", "draft_pages": "all", "gamma_mean": 1.5, "mean_acceptance_length": 2.0, "batch": 3}
    # Halfway between 14 and 20 ms, two tokens of each of three sequences.
    assert run["predicted"](plan, row) == pytest.approx(6 / 0.017)
    plain = row | {"method": "ar", "gamma_mean": 0.0, "mean_acceptance_length": None, "batch": 1}
    assert run["predicted"](plan, plain) == pytest.approx(100)
    assert run["predicted"](plan, row | {"draft_pages": 64}) is None
    assert run["predicted"](plan, row | {"method": "draft-model"}) is None


# Models that are not here --------------------------------------------------------------------------------------------


@pytest.fixture
def hub_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Path], list[str]]:
    """Makes the hub offer the files of a folder; records the names of downloaded ones."""

    def serve(folder: Path) -> list[str]:
        fetched: list[str] = []

        def fetch(_model: str, _repository: str, _revision: str | None, patterns: list[str], **_: Any) -> Path:
            for path in folder.iterdir():
                if any(path.match(pattern) for pattern in patterns):
                    fetched.append(path.name)
                    shutil.copy(path, tmp_path / "snapshot")
            return tmp_path / "snapshot"

        (tmp_path / "snapshot").mkdir()
        monkeypatch.setattr(hub, "_fetch", fetch)
        return fetched

    return serve


@pytest.mark.slow
def test_of_a_model_on_the_hub_config_alone_is_downloaded(quantspec: Run, hub_of: Callable[[Path], list[str]]) -> None:
    fetched = hub_of(DEMO)
    outcome = quantspec("plan", "-m", "owner/model", "-c", "300", "--device", "cpu", "--json")
    assert outcome.code == 0, outcome
    assert fetched == ["config.json"]
    here = quantspec("plan", "-c", "300", "--device", "cpu", "--json").json
    for name in ("weights_bytes", "draft_weights_bytes", "cache_bytes_per_token", "longest_context"):
        assert outcome.json[name] == here[name], name


def test_a_gguf_file_of_the_hub_is_not_downloaded(
    quantspec: Run, hub_of: Callable[[Path], list[str]], tmp_path: Path
) -> None:
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository/model-Q8_0.gguf").write_bytes(b"GGUF")
    fetched = hub_of(tmp_path / "repository")
    for name, words in (
        ("owner/model", ["no config.json", "no GGUF file of it"]),
        ("owner/model:Q8_0", ["no GGUF file"]),
    ):
        quantspec("plan", "-m", name, "--device", "cpu").assert_error(1, name, *words)
    assert fetched == []


@pytest.mark.slow
def test_a_gguf_file_is_planned_by_its_header(quantspec: Run, tmp_path: Path) -> None:
    write_demo(tmp_path / "demo.gguf", Kind.F16)
    held = _native.plan(str(tmp_path / "demo.gguf"), capacity=900, device="cpu", described=True)
    outcome = quantspec("plan", "-m", str(tmp_path / "demo.gguf"), "-c", "900", "--device", "cpu", "--json")
    assert outcome.code == 0, outcome
    assert outcome.json["weights_bytes"] == held["weights_bytes"] > 0
