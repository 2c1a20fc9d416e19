"""`quantspec bench`: its flags, the fields of a row, and that repetitions decode the same text at the same depth."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_native
import pytest
from conftest import copy_demo

from quantspec_cli import _native, hub, predict, render
from quantspec_cli.bench import grid, samples, tables
from quantspec_cli.bench import measure as measuring
from quantspec_cli.bench.grid import Variant
from quantspec_cli.bench.samples import Sample
from quantspec_cli.bench.work import Work, pages_share
from quantspec_cli.errors import DeviceError, InternalError
from quantspec_cli.model import Model
from quantspec_cli.options import BATCH_MAX

PAGE = Path(__file__).parents[1] / "docs/json_bench.md"


def test_methods_cross_gammas_and_pages() -> None:
    assert grid.variants("ar-fp16,ar,quantspec", ["auto", 4], ["all", 8]) == [
        Variant("ar", "fp16"),
        Variant("ar", "int8"),
        *(Variant("quantspec", "int8", gamma, pages) for gamma in ("auto", 4) for pages in ("all", 8)),
    ]
    # Prompt lookup reads no pages.
    assert grid.variants("ngram", [2, 4], ["all", 8]) == [Variant("ngram", "int8", 2), Variant("ngram", "int8", 4)]
    assert grid.variants("w4-fp16", [3], ["all"]) == [Variant("w4", "fp16", 3)]
    # A window is never all pages.
    assert grid.variants("window", [3], ["all"]) == [Variant("window", "int8", 3, 16)]
    assert grid.variants("window+ngram-fp16", [3], ["all", 8]) == [Variant("window+ngram", "fp16", 3, 8)]


def test_a_model_counts_once(tmp_path: Path) -> None:
    assert grid.models_of("a, b,a") == ["a", "b"]
    (both := tmp_path / "a,a").mkdir()
    assert grid.models_of(str(both)) == [str(both)]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    from quantspec_cli import entry

    out = tmp_path_factory.mktemp("bench") / "rows.jsonl"
    methods = "ar-fp16,ar,ar-int4,quantspec,w4,kv4,ngram"
    arguments = f"bench -p 64 -n 40 -d 0,1024 -r 2 -g 3 --methods {methods} -o jsonl --output"
    assert entry.execute([*arguments.split(), str(out)]) == 0
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
def test_ranges_are_measured(quantspec: Callable[..., Any]) -> None:
    arguments = "-p 2-8*2 -n 2-3 -d 0-9+8 -g 1-2,auto -r 1 --methods quantspec -o json --device cpu"
    expected = [
        (depth, *test)
        for depth in (0, 8)
        for test in (
            *((tokens, 0, 0) for tokens in (2, 4, 8)),
            *((0, tokens, gamma) for tokens in (2, 3) for gamma in (1, 2, "auto")),
        )
    ]
    rows = quantspec("bench", *arguments.split()).json
    assert [(row["n_depth"], row["n_prompt"], row["n_gen"], row["gamma"]) for row in rows] == expected


@pytest.mark.slow
def test_lists_may_be_given_in_parts(
    quantspec: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arguments = "-p 0 -n 3 -n 1-2 -g auto -g 1 -r 1 --methods quantspec --methods ar -o json --device cpu"
    rows = quantspec("bench", *arguments.split()).json
    assert [(row["n_gen"], row["method"], row["gamma"]) for row in rows] == [
        (tokens, *method) for tokens in (3, 1, 2) for method in (("quantspec", "auto"), ("quantspec", 1), ("ar", 0))
    ]
    quantspec("bench", "-d", "0", "-d", "x").assert_error(2, "-d has 'x'")
    quantspec("bench", "-d", "x", "-d", "0").assert_error(2, "-d has 'x'")
    quantspec("bench", "-d", "0", "-d", "").assert_error(2, "-d has an empty item in '0,'")
    # A flag replaces the whole value of a variable or setting.
    (tmp_path / "config.toml").write_text("[bench]\nn-gen = 4\n")
    monkeypatch.setenv("QUANTSPEC_CONFIG", str(tmp_path / "config.toml"))
    few = ("bench", *"-p 0 -r 1 --methods ar -o json --device cpu".split())
    assert [row["n_gen"] for row in quantspec(*few).json] == [4]
    monkeypatch.setenv("QUANTSPEC_N_GEN", "2,3")
    assert [row["n_gen"] for row in quantspec(*few).json] == [2, 3]
    assert [row["n_gen"] for row in quantspec(*few, "-n", "1", "-n", "5").json] == [1, 5]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--methods ar --gamma 0,3", ("--gamma is 0,3", "drafts", "add quantspec")),
        ("--methods ar,ngram --draft-pages all,4", ("--draft-pages is all,4", "drafts by pages")),
        ("--methods ar,kv4 --draft-precision down", ("--draft-precision is down", "reads draft weights")),
        ("--methods quantspec --draft-refresh 2", ("--draft-refresh is 2", "keeps a choice of pages", "add snapkv")),
        ("--methods ar-fp16,w4-fp16 --kv-rounding paper", ("--kv-rounding is paper", "quantises a cache")),
    ],
)
def test_settings_that_no_method_reads_are_refused(
    quantspec: Callable[..., Any], arguments: str, words: tuple[str, ...]
) -> None:
    quantspec("bench", *arguments.split()).assert_error(2, *words)


@pytest.mark.slow
def test_every_row_of_a_table_has_its_columns(quantspec: Callable[..., Any], tmp_path: Path) -> None:
    models = f"demo,{copy_demo(tmp_path / 'a | b')}"
    arguments = "-p 4 -n 4 -r 1 -g 2 --methods ar,window+ngram --device cpu"
    table = quantspec("bench", "-m", models, *arguments.split()).stdout.splitlines()
    assert (len(table), len(set(map(len, table)))) == (8, 1), table
    assert not any("±" in line for line in table), "one repetition has no spread"
    path = tmp_path / "rows"
    quantspec("bench", "-m", models, *arguments.split(), "-o", "jsonl", "--output", str(path))
    table = quantspec("bench", "--compare", str(path), str(path)).stdout.splitlines()
    assert (len(table), len(set(map(len, table)))) == (8, 1), table


def test_a_warm_up_is_decoded_and_not_counted(quantspec: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[tuple[int, int | None]] = []
    run = measuring.Answers.run

    def noted(self: measuring.Answers, seed: int, tokens: int | None = None) -> tuple[float, list[list[int]]]:
        decoded.append((seed, tokens))
        return run(self, seed, tokens)

    monkeypatch.setattr(measuring.Answers, "run", noted)
    bench = ("bench", *"-p 0 -n 24 -r 2 -s 5 --methods ar-int8 -o json --device cpu".split())
    cold, warm = (quantspec(*bench, "--warm-up", tokens).json[0] for tokens in ("0", "60"))
    assert decoded[:3] == [(5, measuring.WARM_UP), (5, None), (6, None)]
    # Of the next seed, in answers as long as the timed one.
    assert decoded[4:] == [(6, 24), (6, 24), (6, 12), (5, None), (7, 24), (7, 24), (7, 12), (6, None)]
    assert (cold["warm_up"], warm["warm_up"]) == (0, 60)
    assert warm["bytes_per_token"] == cold["bytes_per_token"]


def test_rejection_keeps_the_distribution_and_not_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantspec: Callable[..., Any]
) -> None:
    compared: list[object] = []
    monkeypatch.setattr(measuring, "check_equal", compared.append)
    arguments = "bench -p 0 -n 24 -r 2 -g 3 --methods ar,quantspec -o jsonl --accept"
    for accept in ("replay", "rejection"):
        path = tmp_path / accept
        assert quantspec(*arguments.split(), accept, "--output", str(path)).code == 0
        found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        assert [row["accept"] for row in found] == [accept] * 2
        assert len(compared) == 2, "the two repetitions of replay"
        assert 0 < found[1]["acceptance_rate"] <= 1


def test_a_row_per_test_method_and_depth(rows: list[dict[str, Any]]) -> None:
    plain = [("ar", "fp16"), ("ar", "int8"), ("ar", "int4")]
    decoding = [*plain, ("quantspec", "int8"), ("w4", "int8"), ("kv4", "int8"), ("ngram", "int8")]
    expected = [
        (depth, *test)
        for depth in (0, 1024)
        for test in (("pp", "any", "any"), *(("tg", *method) for method in decoding))
    ]
    assert [(row["n_depth"], row["test"], row["method"], row["kv_target"]) for row in rows] == expected


def test_a_row_has_the_fields_of_its_page(rows: list[dict[str, Any]]) -> None:
    every, generation = (
        set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE))))
        for section in PAGE.read_text().split("\n## ")[1:3]
    )
    for row in rows:
        assert every <= row.keys() <= (every | generation if row["test"] == "tg" else every)


def test_a_row_has_the_settings_that_its_method_reads(quantspec: Callable[..., Any]) -> None:
    flags = "-p 0 -n 4 -r 1 -g 2 --methods ar-fp16,w4-fp16,kv4,draft-model,auto --draft-precision down"
    drafting = "--draft-model demo --draft-model-kv fp16 --page-choice window --kv-rounding paper"
    outcome = quantspec("bench", *flags.split(), *drafting.split(), "--json")
    assert outcome.code == 0, outcome
    fields = ("draft_precision", "draft_model", "draft_model_kv", "kv_rounding")
    assert {
        (row["method"], row["kv_target"]): {field: row[field] for field in fields if field in row}
        for row in outcome.json
    } == {
        ("ar", "fp16"): {},
        ("w4", "fp16"): {"draft_precision": "down"},
        ("kv4", "int8"): {"kv_rounding": "paper"},
        ("draft-model", "int8"): {"draft_model": "demo", "draft_model_kv": "fp16", "kv_rounding": "paper"},
        ("auto", "int8"): {"draft_precision": "down", "draft_model": "demo", "kv_rounding": "paper"},
    }


def test_values_of_a_row(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        tokens = row["n_prompt"] or row["n_gen"]
        assert tokens == (64 if row["test"] == "pp" else 40)
        assert (row["model"], row["batch"], row["repetitions"]) == ("demo", 1, 2)
        assert row["accept"] == "replay"
        assert row["ms_per_token"] == pytest.approx(sum(row["samples_ms_per_token"]) / 2)
        assert row["tokens_per_s"] == pytest.approx(1e3 / row["ms_per_token"])
        assert row["gb_per_s"] == pytest.approx(row["bytes_per_token"] / row["ms_per_token"] / 1e6)
        assert row["bandwidth_gb_per_s"] > 0
        drafts = row["method"] in {"quantspec", "w4", "kv4"}
        if row["method"] == "ngram":
            # Without a match in earlier text nothing is drafted.
            assert (row["gamma"], row["draft_pages"]) == (3, "all")
            assert 0 <= row["gamma_mean"] <= 3
            continue
        assert (row["acceptance_rate"] is not None) == drafts
        if drafts:
            assert 0 < row["acceptance_rate"] <= 1
            assert 1 < row["mean_acceptance_length"] <= 4
            assert 0 < row["draft_ms"] + row["verify_ms"] <= row["round_ms"]
            # 40 tokens, three drafted per round except at the end.
            assert row["gamma"] == 3
            assert 2.5 < row["gamma_mean"] <= 3


def test_bytes_are_what_the_steps_read(rows: list[dict[str, Any]]) -> None:
    decoding = {(row["n_depth"], row["method"], row["kv_target"]): row for row in rows if row["test"] == "tg"}
    read = {key: row["bytes_per_token"] for key, row in decoding.items()}
    # The demo model: 6 layers of 2 + 2 · 256 · 256 and 3 · 256 · 704 weights, a head of 8192 · 256, in BF16.
    weights = 2 * (6 * (4 * 256 * 256 + 3 * 256 * 704) + 8192 * 256)
    # Positions 1024 … 1063: 7 pages of 128, and from 129 to 168 recent tokens, for 6 · 2 heads of 128 channels.
    recent = 12 * (129 + 168) / 2 * 2 * 2 * 128
    for target, bits in (("fp16", 16), ("int8", 8.25), ("int4", 4.25)):
        pages = 12 * 7 * 2 * 128 * 128 * bits / 8
        assert read[1024, "ar", target] == pytest.approx(weights + pages + recent)
    # Three draft steps and a verification for at most four tokens: drafts with full weights read at least one step per token.
    assert read[1024, "kv4", "int8"] > 0.95 * read[1024, "ar", "int4"]

    # Tokens per round depend on the text; bytes per round do not.
    def read_a_round(method: str) -> float:
        row = decoding[1024, method, "int8"]
        return float(row["bytes_per_token"] * row["mean_acceptance_length"] / (1 + row["gamma_mean"]))

    assert read_a_round("quantspec") < read_a_round("w4") < read_a_round("kv4")
    # A round of prompt lookup reads what a plain step reads.
    ngram = decoding[1024, "ngram", "int8"]
    rounds = ngram["bytes_per_token"] * (ngram["mean_acceptance_length"] or 1)
    assert rounds == pytest.approx(read[1024, "ar", "int8"], rel=0.03)


def test_a_prompt_has_the_operations_of_its_plan(rows: list[dict[str, Any]]) -> None:
    model = Model.open("demo")
    traffic = _native.traffic(str(model.directory), 0, 64, "auto", "cpu")
    load = predict.Load.of(model.info, traffic, 0, 64, weights="checkpoint", kv_target="int8")
    planned = predict.prompt(predict.Machine(1.0, {}, {}, {}, 0.0, 0.0, 1.0, 1.0), load)
    found = {row["n_depth"]: row["flops_per_token"] * 64 for row in rows if row["test"] == "pp"}
    assert found[0] == pytest.approx(sum(operation.flops for operation in planned))
    # After 1024 tokens, each token sees them as well, in all layers but the last.
    assert found[1024] - found[0] == pytest.approx(64 * 4 * 5 * 2 * 128 * 1024)


def test_speed_ups_compare_repetitions_of_one_bandwidth() -> None:
    def sample(seconds: float, *bandwidths: float) -> Sample:
        return Sample(seconds, 1e9, (bandwidths[0], bandwidths[1]), processed=100)

    base = [sample(2.0, 36, 37), sample(1.0, 62, 64), sample(1.5, 36, 64), sample(2.0, 36, 36)]
    runs = [sample(1.0, 37, 36), sample(0.8, 64, 62), sample(0.5, 36, 36), sample(0.5, 62, 62)]
    # Memory speed changed during the third baseline and the last pair.
    found = samples.speedup(runs, base)
    assert found["speedup"] == pytest.approx((2.0 + 1.25) / 2)
    assert found["speedup_repetitions"] == 2
    assert samples.speedup(runs, None)["speedup"] is None
    assert samples.speedup(runs[3:], base[3:]) == {"speedup": None, "speedup_sd": None, "speedup_repetitions": 0}


def test_copies_are_verified_and_not_drafted() -> None:
    work = Work(info=Model.open("demo").info, draft_weights_bytes=0, draft_model_kv=None, page_choice=None)
    traffic = {"pages": 2, "buffer_tokens": 100}

    def flops(copied: int) -> float:
        stats = {"drafted_tokens": 8, "copied_tokens": copied, "rounds": 2, "draft_pages_mean": None}
        run = Sample(1.0, 1.0, (1.0, 1.0), processed=10, stats=stats)
        return work.flops(Variant("quantspec+ngram", "int8", "auto"), traffic, [run])

    # 10 verified rows, and as many rows of drafts as were not copied, for 10 tokens.
    assert flops(0) == pytest.approx(18 / 10 * flops(8))
    assert flops(5) == pytest.approx(13 / 10 * flops(8))


def test_pages_are_a_mean_over_draft_steps() -> None:
    def run(drafted: int, copied: int, pages: float | None) -> Sample:
        stats = {"drafted_tokens": drafted, "copied_tokens": copied, "draft_pages_mean": pages}
        return Sample(1.0, 1.0, (1.0, 1.0), processed=10, stats=stats)

    # The last run copied all its tokens, so it does not lower the mean.
    runs = [run(8, 2, 4.0), run(2, 0, 8.0), run(3, 3, None)]
    assert samples.pages_mean(runs) == pytest.approx(5.0)
    assert samples.pages_mean([run(0, 0, None)]) is None
    assert pages_share({"pages": 20, "buffer_tokens": 0}, runs) == pytest.approx(5 / 20)


def test_the_share_of_the_bandwidth_is_that_of_bytes_a_second() -> None:
    # The first run was slow: together 2 GB in 11 seconds, where 40 GB/s were possible.
    steady = [Sample(seconds, 1e9, (40.0, 40.0), processed=100) for seconds in (10.0, 1.0)]
    assert samples.bandwidth_share(steady) == pytest.approx(2 / 11 / 40)
    assert samples.bandwidth_share([]) is None


def test_a_checkpoint_is_not_read_between_measurements(
    quantspec: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantspec_cli import _native, files

    asked: list[tuple[int, int]] = []
    configs: list[str] = []
    traffic, read = _native.traffic, files.read

    def noted(model: str, start: int, tokens: int, weights: str, device: str, **precision: str) -> dict[str, Any]:
        asked.append((start, tokens))
        return traffic(model, start, tokens, weights, device, **precision)

    monkeypatch.setattr(_native, "traffic", noted)
    monkeypatch.setattr(files, "read", lambda path: configs.append(path.name) or read(path))
    outcome = quantspec("bench", *"-p 4 -n 3 -d 0,8 -r 2 --methods ar-fp16,quantspec -o jsonl --device cpu".split())
    assert (outcome.code, len(outcome.stdout.splitlines())) == (0, 6)
    # Once per test and depth, for any number of methods and repetitions.
    assert sorted(asked) == [(0, 4), (1, 3), (8, 3), (8, 4)]
    assert configs.count("config.json") == 1


def test_a_bench_does_not_overwrite_its_prompt(quantspec: Callable[..., Any], document: Path) -> None:
    quantspec("bench", "--prompt", str(document), "--output", str(document)).assert_error(2, "is also an input")


def test_different_tokens_are_an_error() -> None:
    def run(*tokens: list[int]) -> Sample:
        return Sample(1, 1, (30.0, 30.0), processed=sum(map(len, tokens)), tokens=tokens)

    runs = {
        Variant("ar", "int8"): run([1, 2], [3, 4, 5]),
        Variant("ar", "fp16"): run([1, 3], [3]),
        # A batch ends with its first answer, so others may be shorter with one method.
        Variant("quantspec", "int8", 4): run([1, 2, 7], [3, 4]),
    }
    samples.check_equal(runs)
    runs[Variant("kv4", "int8", 4)] = run([1, 2], [3, 5])
    with pytest.raises(InternalError, match="kv4 and ar emitted different tokens from the int8 target"):
        samples.check_equal(runs)


def test_csv_has_fields_of_one_value() -> None:
    text = io.StringIO()
    table = tables.Csv(text)
    table.row({"method": "auto", "rounds_by_method": {"ar": 1}, "samples_ms_per_token": [1.0], "speedup": None})
    table.close()
    assert text.getvalue() == "method,speedup\nauto,\n"


@pytest.mark.parametrize(
    ("output_format", "read"),
    [
        ("json", lambda text: [(row["test"], row["n_gen"]) for row in json.loads(text)]),
        ("csv", lambda text: [(row["test"], int(row["n_gen"])) for row in csv.DictReader(io.StringIO(text))]),
        ("md", lambda text: [(line[:2], int(line[2:])) for line in _tests(text)]),
    ],
)
def test_every_output_format_has_every_row(
    quantspec: Callable[..., Any], output_format: str, read: Callable[[str], Any]
) -> None:
    outcome = quantspec("bench", "-p", "0", "-n", "4,6", "-r", "1", "--methods", "ar", "-o", output_format)
    assert (outcome.code, outcome.stderr) == (0, "")
    assert read(outcome.stdout) == [("tg", 4), ("tg", 6)]


def test_kernels_are_compared_with_their_bytes(fake: Any, quantspec: Callable[..., Any]) -> None:
    rows = [json.loads(line) for line in quantspec("bench", "kernels", "-o", "jsonl").stdout.splitlines()]
    assert [(row["kernel"], row["test"], row["device_name"]) for row in rows] == [
        ("attend", "kernel", "toy"),
        ("linear", "kernel", "toy"),
    ]
    assert (rows[0]["context"], rows[0]["rows"]) == (4096, 1)
    # Depths and rows are handed on.
    deep = quantspec("bench", "kernels", "-d", "8192", "--rows", "3", "-o", "json").json
    assert (deep[0]["context"], deep[0]["rows"]) == (8192, 3)
    table = quantspec("bench", "kernels")
    lines = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.stdout.splitlines()]
    assert [line[0] for line in lines[2:]] == ["attend", "linear"]
    assert [line[3] for line in lines[2:]] == ["d4096", "96 x 32"]
    assert "cuda:0: toy, reads 4,000 GB/s" in table.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("-d 8192,999999", 3, ("depth 999999", "context of demo, 131072")),
        ("-d 0,4096", 2, ("-d is 0,4096", "at least 1")),
        *(
            (f"{flag} {value}", 2, (f"{flag} does not apply to bench kernels", f"leave out {flag}"))
            for flag, value in (
                *(("--n-prompt", "5"), ("--n-gen", "5"), ("--methods", "ar"), ("--prompt", "x"), ("--gamma", "3")),
                *(("--draft-pages", "3"), ("--page-choice", "best"), ("--kv-rounding", "paper"), ("--threads", "1")),
                ("--accept", "rejection"),
                *(("--repetitions", "3"), ("--seed", "1"), ("--warm-up", "8")),
            )
        ),
    ],
)
def test_kernels_are_timed_on_request_only(
    fake: Any,
    quantspec: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    code: int,
    words: tuple[str, ...],
) -> None:
    # A variable or settings file applies to several commands, so an unused value is no error.
    monkeypatch.setenv("QUANTSPEC_GAMMA", "4")
    assert quantspec("bench", "kernels", "-o", "jsonl").code == 0
    monkeypatch.setattr(fake_native, "kernels", None)
    quantspec("bench", "kernels", *arguments.split()).assert_error(code, *words)


def measure(monkeypatch: pytest.MonkeyPatch, done: int, end: BaseException) -> None:
    """Makes `bench` measure this many rows before it ends early."""

    def rows(_: object) -> Iterator[dict[str, Any]]:
        for number in range(done):
            yield {"test": "tg", "n_gen": number}
        raise end

    monkeypatch.setattr(measuring.Bench, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(measuring.Bench, "rows", rows)


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (DeviceError("the device fell off", "plug it in"), 1, "error: the device fell off\nhint: plug it in\n"),
    ],
)
@pytest.mark.parametrize(
    ("output_format", "read"),
    [
        ("jsonl", lambda text: [json.loads(line)["n_gen"] for line in text.splitlines()]),
        ("json", lambda text: [row["n_gen"] for row in json.loads(text)]),
        ("csv", lambda text: [int(row["n_gen"]) for row in csv.DictReader(io.StringIO(text))]),
    ],
)
def test_finished_measurements_are_kept(
    fake: Any,
    quantspec: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    end: BaseException,
    code: int,
    words: str,
    output_format: str,
    read: Callable[[str], list[int]],
) -> None:
    measure(monkeypatch, 2, end)
    path = tmp_path / "rows"
    command = ["bench", "-o", output_format]
    printed = quantspec(*command)
    written = quantspec(*command, "--output", str(path))
    assert (printed.code, written.code, written.stdout) == (code, code, "")
    for outcome in (printed, written):
        assert outcome.stderr.startswith(words)
        assert len(outcome.stderr.splitlines()) == 2
    assert read(printed.stdout) == read(path.read_text()) == [0, 1]
    # Without a row, an older file is kept.
    measure(monkeypatch, 0, end)
    assert quantspec(*command, "--output", str(path)).code == code
    assert read(path.read_text()) == [0, 1]
    assert os.listdir(tmp_path) == ["rows"]


def test_json_is_one_document(fake: Any, quantspec: Callable[..., Any], tmp_path: Path) -> None:
    command = ("bench", "kernels")
    outcome = quantspec(*command, "--json")
    assert outcome.json == quantspec(*command, "-o", "json").json
    assert [row["kernel"] for row in outcome.json] == ["attend", "linear"]
    # A file gets the default output of standard output.
    table = tmp_path / "table.md"
    assert quantspec(*command, "--json", "--output", str(table)).json == outcome.json
    assert table.read_text() == quantspec(*command).stdout


@pytest.mark.parametrize(
    ("end", "code", "kind"),
    [(KeyboardInterrupt(), 130, "interrupted"), (DeviceError("the device fell off", "plug it in"), 1, "device")],
)
def test_json_keeps_finished_rows_next_to_the_error(
    fake: Any, quantspec: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, end: BaseException, code: int, kind: str
) -> None:
    for done in (0, 2):
        measure(monkeypatch, done, end)
        outcome = quantspec("bench", "--json", "-o", "json")
        document = outcome.json
        assert (outcome.code, document["error"]["exit_code"], document["error"]["kind"]) == (code, code, kind)
        assert [row["n_gen"] for row in document.get("results", [])] == [0, 1][:done]


@pytest.mark.parametrize("output_format", ["jsonl", "csv"])
def test_a_file_that_cannot_be_written_costs_no_row_of_the_document(
    fake: Any, quantspec: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, output_format: str
) -> None:
    # A variable is for several commands, and a form of the file.
    monkeypatch.setenv("QUANTSPEC_OUTPUT_FORMAT", output_format)
    command = ("bench", "kernels", "--json")
    whole = quantspec(*command)
    outcome = quantspec(*command, "--output", "/dev/full")
    document = outcome.json
    assert (whole.code, outcome.code, document["error"]["kind"]) == (0, 1, "io")
    assert document["results"] == whole.json
    # An error of the measurements comes first, with the rows before it.
    measure(monkeypatch, 2, DeviceError("the device fell off", "plug it in"))
    document = quantspec("bench", "--json", "--output", "/dev/full").json
    assert (document["error"]["kind"], len(document["results"])) == ("device", 2)


def test_json_and_another_form_contradict_each_other(
    fake: Any, quantspec: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for form in ("md", "csv", "jsonl"):
        outcome = quantspec("bench", "kernels", "--json", "-o", form)
        assert (outcome.code, outcome.json["error"]["message"]) == (2, f"--json with --output-format {form}")
    assert quantspec("bench", "kernels", "--json", "-o", "json").code == 0
    # A variable is for several commands.
    monkeypatch.setenv("QUANTSPEC_OUTPUT_FORMAT", "csv")
    assert len(quantspec("bench", "kernels", "--json").json) == 2


def test_long_names_are_those_of_run(quantspec: Callable[..., Any], tmp_path: Path) -> None:
    text, out = tmp_path / "text", tmp_path / "rows"
    text.write_text("one two three four " * 20)
    flags = (
        f"--prompt {text} --method kv4 --gamma 2 --seed 3 --draft-pages all --accept replay --device cpu --output {out}"
    )
    assert quantspec("bench", *flags.split(), *"--n-prompt 8 --n-gen 0 -r 1 -o jsonl".split()).code == 0
    assert json.loads(out.read_text())["n_prompt"] == 8


def test_automatic_pages_are_all_pages_if_there_is_no_choice(quantspec: Callable[..., Any]) -> None:
    outcome = quantspec(
        *(
            "bench",
            "-p",
            "0",
            "-n",
            "12",
            "-d",
            "300",
            "-r",
            "1",
            "--methods",
            "quantspec",
            "-g",
            "3",
            "--draft-pages",
            "auto,all",
        ),
        *("-o", "json"),
    )
    assert [row["draft_pages"] for row in outcome.json] == ["auto", "all"]
    # Only one page is visible, so there is no choice.
    assert [row["draft_pages_mean"] for row in outcome.json] == [1, 1]
    assert [row.get("page_choice") for row in outcome.json] == ["best", None]
    assert outcome.json[0]["bytes_per_token"] == pytest.approx(outcome.json[1]["bytes_per_token"], rel=0.02)


def _tests(markdown: str) -> list[str]:
    lines = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in markdown.splitlines()]
    assert len({len(line) for line in lines}) == 1
    assert set("".join(lines[1])) == {"-", ":"}
    column = lines[0].index("test")
    return [line[column] for line in lines[2:]]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("-d 1,,x", 2, ("-d", "1,,x")),
        ("-p 0 -n 0", 2, ("nothing to measure",)),
        ("-g 17", 2, ("--gamma has '17'", "0 to 16")),
        ("-g auto,,", 2, ("--gamma",)),
        ("-g 12-20", 2, ("--gamma has '12-20'", "0 to 16", "auto")),
        ("-g auto-4", 2, ("--gamma has 'auto-4'",)),
        ("--draft-pages 1-4", 2, ("--draft-pages has '1-4'", "at least 2", "all or auto")),
        ("--draft-pages 2-999999", 2, ("--draft-pages 2-999999 is more than 256 values",)),
        ("--draft-pages 1", 2, ("--draft-pages has '1'", "all or auto")),
        ("kernels --device cpu", 2, ("bench kernels", "--device cuda")),
        ("kernels --rows 0", 2, ("--rows", "1 to 256")),
        ("kernel", 2, ("kernels",)),
        ("--methods ar-fp32", 2, ("ar-fp32",)),
        ("--methods ar-", 2, ("ar-",)),
        ("--draft-pages 4294967297", 2, ("--draft-pages has '4294967297'", "2 to 4294967296")),
        (f"--draft-pages {'9' * 5000}", 2, ("--draft-pages", "2 to 4294967296")),
        (f"--draft-pages {'0' * 12}1", 2, ("--draft-pages", "at least 2")),
        ("-r 0", 2, ("repetitions is 0",)),
        ("--warm-up -1", 2, ("warm-up is -1", "0 to 1000000")),
        ("-r 99999999999999999999", 2, ("repetitions is 99999999999999999999", "1 to 10000")),
        ("--rows 3", 2, ("--rows does not apply to bench without kernels",)),
        ("-m " + "x" * 5000, 1, ("is no valid hub id",)),
        ("-s -1", 2, ("seed is -1",)),
        ("-s 18446744073709551615", 2, ("seed is 18446744073709551615",)),
        ("-o xml", 2, ("xml",)),
        ("--threads 0", 2, ("threads is 0",)),
        ("-d 0,200000", 3, ("depth 200000", "context of demo is 131072", "at most 130559")),
        ("--prompt /no/such/book", 1, ("/no/such/book does not exist",)),
        ("-o jsonl --output /no/such/folder/rows", 1, ("/no/such/folder",)),
        ("-m /no/such/model", 1, ("/no/such/model",)),
    ],
)
def test_bad_input_is_one_error_with_its_exit_code(
    quantspec: Callable[..., Any], arguments: str, code: int, words: tuple[str, ...]
) -> None:
    quantspec("bench", *arguments.split()).assert_error(code, *words)


@pytest.mark.parametrize("flag", ["-p", "-n", "-d", "-g"])
@pytest.mark.parametrize("value", ["4-1", "1-8+0", "1-8*1", "0-8*2", "1-", "-4", "1-1000000", "1-8+x", "1..4"])
def test_a_range_that_is_refused_is_named_with_its_flag(quantspec: Callable[..., Any], flag: str, value: str) -> None:
    called = "--gamma" if flag == "-g" else flag
    # Also as one of several.
    for given in (value, f"2,{value}"):
        refused = quantspec("bench", flag, given)
        refused.assert_error(2, value, called)
        assert value in refused.stderr.splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ("", "lower -p to at most 511"),
        ("-p 0 -n 512", "lower -n to at most 510"),
        ("-p 600 -n 600", "lower -p to at most 511 and -n to at most 510"),
        ("-p 511 -d 0,1", "lower -d to at most 0"),
        ("-p 500 -d 0,100", "lower -d to at most 11"),
        # Depth 0 has one token of text, after which the first token is decoded.
        ("-p 0 -n 511 -d 3", "lower -n to at most 508"),
        ("-d 300 -p 600", "lower -p to at most 211"),
        ("-d 600 -p 600", "lower -d to 0 and -p to at most 511"),
    ],
)
def test_the_hint_of_a_refusal_fits(
    fake: Any, quantspec: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: str, hint: str
) -> None:
    measure(monkeypatch, 1, KeyboardInterrupt())
    command = ["bench", "-o", "jsonl", "-m", str(copy_demo(tmp_path / "m", max_position_embeddings=512))]
    refused = quantspec(*command, *arguments.split())
    refused.assert_error(3, f"hint: {hint}\n")
    asked = dict(zip(arguments.split()[::2], arguments.split()[1::2], strict=True))
    advised = asked | dict(re.findall(r"(-\w) to (?:at most )?(\d+)", hint))
    assert quantspec(*command, *(word for flag in advised.items() for word in flag)).code == 130
    for flag, most in re.findall(r"(-\w) to at most (\d+)", hint):
        more = advised | {flag: str(int(most) + 1)}
        assert quantspec(*command, *(word for pair in more.items() for word in pair)).code == 3


QUICK = ("bench", *"-p 0 -n 2 -r 1 --methods ar -o jsonl --device cpu".split())


def beyond_memory(folder: Path) -> Path:
    """A checkpoint of 1.6 TB, nearly all of it a hole of the file."""
    layers, wide = 1024, 1 << 20
    copy_demo(folder, num_hidden_layers=layers, intermediate_size=wide)
    shapes = {"model.embed_tokens": [8192, 256], "model.norm": [256]}
    for layer in (f"model.layers.{index}" for index in range(layers)):
        shapes |= {f"{layer}.self_attn.{part}_proj": [256, 256] for part in "qkvo"}
        shapes |= {f"{layer}.mlp.{part}_proj": [wide, 256] for part in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj": [256, wide]}
        shapes |= {f"{layer}.{norm}_layernorm": [256] for norm in ("input", "post_attention")}
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    weights = folder / "model.safetensors"
    weights.unlink()
    with weights.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


@pytest.mark.parametrize("refused_first", [False, True])
def test_a_model_beyond_memory_is_refused_before_others_are_measured(
    quantspec: Callable[..., Any], tmp_path: Path, refused_first: bool
) -> None:
    fits, other = copy_demo(tmp_path / "fits"), beyond_memory(tmp_path / "beyond")
    rows = tmp_path / "rows"
    rows.write_text("older\n")
    models = f"{other},{fits}" if refused_first else f"{fits},{other}"
    # A row of the first model would appear on standard output and in the file.
    for to in ((), ("--output", str(rows))):
        quantspec(*QUICK, "-m", models, *to).assert_error(3, f"error: {other}: a sequence of 4 tokens", "memory needed")
    assert rows.read_text() == "older\n"
    # With a single model the error need not name it.
    quantspec(*QUICK, "-m", str(other)).assert_error(3, "error: a sequence of 4 tokens", "memory needed")


def test_errors_that_need_no_weights_come_before_loading(
    fake: Any, quantspec: Callable[..., Any], tmp_path: Path
) -> None:
    fits, short = copy_demo(tmp_path / "fits"), copy_demo(tmp_path / "short", max_position_embeddings=512)
    damaged = copy_demo(tmp_path / "damaged")
    (damaged / "model.safetensors").unlink()
    for model, arguments, code, words in (
        (short, "-d 600", 3, (f"context of {short} is 512",)),
        (short, "-p 0 -n 512", 3, ("lower -n to at most 510",)),
        (tmp_path / "gone", "", 1, (str(tmp_path / "gone"),)),
        (damaged, "", 1, (f"{damaged} has no weights",)),
    ):
        quantspec("bench", "-m", f"{fits},{model}", *arguments.split()).assert_error(code, *words)
    assert fake.engines == []


def test_several_models_are_loaded_one_after_the_other(
    quantspec: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantspec_cli import _native

    events: list[tuple[str, str]] = []
    asked: list[dict[str, Any]] = []

    def noted(what: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(model: str, **options: Any) -> Any:
            events.append((Path(model).name, what))
            asked.append(options)
            return real(model, **options)

        return call

    monkeypatch.setattr(_native, "planned", noted("planned", _native.planned))
    monkeypatch.setattr(_native, "Engine", noted("loaded", _native.Engine))
    models = [str(copy_demo(tmp_path / name)) for name in "ab"]
    outcome = quantspec(*QUICK, "-m", ",".join(models))
    assert (outcome.code, outcome.stderr) == (0, "")
    assert [json.loads(line)["model"] for line in outcome.stdout.splitlines()] == models
    assert events == [("a", "planned"), ("b", "planned"), ("a", "loaded"), ("b", "loaded")]
    # The planned engines must be the loaded ones.
    plan, engine = asked[0], asked[2]
    assert engine["every_method"] is True
    assert plan == {name: engine[name] for name in plan}
    events.clear()
    assert quantspec(*QUICK, "-m", models[0]).code == 0
    assert events == [("a", "loaded")]


def test_names_stay_in_their_cells(quantspec: Callable[..., Any], tmp_path: Path) -> None:
    model = tmp_path / "a|b\n\x1b[2J"
    model.symlink_to(hub.demo())
    command = ["bench", "-p", "0", "-n", "4", "-r", "1", "--methods", "ar", "-m", str(model)]
    table = quantspec(*command).stdout
    assert "\x1b" not in table
    head, _, row = table.splitlines()
    assert "a\\|b \N{REPLACEMENT CHARACTER}[2J" in row
    assert row.count("|") - row.count("\\|") == head.count("|")
    assert quantspec(*command, "-o", "json").json[0]["model"] == str(model)


def test_more_threads_than_processors_are_pointed_out(quantspec: Callable[..., Any]) -> None:
    usable = render.processors()
    arguments = f"-p 0 -n 2 -r 1 --methods ar --threads {usable + 1}"
    outcome = quantspec("bench", *arguments.split())
    assert outcome.code == 0
    assert outcome.stderr.count("\n") == 1
    assert f"{usable + 1} threads on {usable} processors" in outcome.stderr


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system binds no process to processors")
def test_processors_are_those_the_process_may_use() -> None:
    whole = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(whole)})
        assert render.processors() == 1
    finally:
        os.sched_setaffinity(0, whole)


def test_a_text_that_is_too_short_is_refused_with_numbers(quantspec: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("It was a dark and stormy night.")
    quantspec("bench", "-d", "100", "--prompt", str(path)).assert_error(
        1, "tokens, the deepest test reads 612", "lower -d"
    )
    path.write_bytes(b"")
    quantspec("bench", "--prompt", str(path)).assert_error(1, "is empty")


@pytest.mark.slow
def test_answers_longer_than_the_buffer_prefill_again(quantspec: Callable[..., Any]) -> None:
    arguments = "-p 0 -n 300 -d 130 -r 2 --methods ar,quantspec -g 4 -o json"
    outcome = quantspec("bench", *arguments.split())
    assert outcome.code == 0, outcome
    assert [(row["n_gen"], row["n_depth"]) for row in outcome.json] == [(300, 130), (300, 130)]


@pytest.mark.slow
def test_a_batch_reads_weights_once_and_the_cache_once_per_sequence(quantspec: Callable[..., Any]) -> None:
    flags = ["-p", "0", "-n", "48", "-d", "0,300", "-r", "1", "--methods", "ar-int8,quantspec", "-g", "3"]
    outcome = quantspec("bench", "--batch", "1,3", *flags, "--device", "cpu", "--json")
    assert outcome.code == 0, outcome
    rows = {(row["n_depth"], row["batch"], row["method"]): row for row in outcome.json}
    assert set(rows) == {
        (depth, batch, method) for depth in (0, 300) for batch in (1, 3) for method in ("ar", "quantspec")
    }
    for (depth, batch, method), row in rows.items():
        assert row["tokens_per_s"] == pytest.approx(1e3 / row["ms_per_token"])
        if method == "ar":
            # Weights are read once for all sequences, the cache once per sequence.
            alone = rows[depth, 1, "ar"]["bytes_per_token"]
            weights = rows[0, 1, "ar"]["bytes_per_token"]
            assert row["bytes_per_token"] == pytest.approx(alone - weights * (1 - 1 / batch), rel=0.05)
            assert row["round_ms"] == pytest.approx(row["ms_per_token"] * batch, rel=0.2)
        else:
            # All sequences take part in every round.
            emitted = row["mean_acceptance_length"] * batch
            assert row["round_ms"] == pytest.approx(row["ms_per_token"] * emitted, rel=0.05)
    quantspec("bench", "--ragged", *flags).assert_error(2, "--ragged without several sequences")
    quantspec("bench", "--batch", "0", *flags).assert_error(2, "--batch is 0")
    for too_many in (BATCH_MAX + 1, 10**8):
        quantspec("bench", "--batch", str(too_many), *flags).assert_error(2, f"1 to {BATCH_MAX}")


@pytest.mark.slow
def test_the_sequences_of_a_ragged_batch_have_different_lengths(quantspec: Callable[..., Any], tmp_path: Path) -> None:
    flags = [
        "-p",
        "0",
        "-n",
        "16",
        "-r",
        "1",
        "--methods",
        "ar-int8",
        "--device",
        "cpu",
        "--batch",
        "1,4",
        "-o",
        "json",
    ]
    ragged, even = tmp_path / "ragged.json", tmp_path / "even.json"
    for file, more in ((ragged, ["-d", "800", "--ragged"]), (even, ["-d", "200,400,600,800"])):
        outcome = quantspec("bench", *flags, *more, "--output", str(file))
        assert outcome.code == 0, outcome
    rows, evens = (json.loads(file.read_text()) for file in (ragged, even))
    assert [(row["batch"], row.get("ragged")) for row in rows] == [(1, None), (4, True)]
    # Weights are read once, the caches of 200, 400, 600 and 800 tokens instead of four times that of 800.
    alone = [row["bytes_per_token"] for row in evens if row["batch"] == 1]
    saved = evens[-1]["bytes_per_token"] - rows[1]["bytes_per_token"]
    assert saved == pytest.approx(alone[-1] - statistics.fmean(alone))
    # They are other measurements than those of an even batch.
    outcome = quantspec("bench", "--compare", str(ragged), str(even), "--json")
    assert [row["batch"] for row in outcome.json] == [1]
    assert "x4 ragged" in quantspec("bench", "--compare", str(ragged), str(ragged)).stdout


def test_the_largest_batch_is_one_that_every_method_can_have() -> None:
    assert _native.planned(str(hub.demo()), capacity=1, slots=BATCH_MAX, device="cpu") > 0
    with pytest.raises(_native.NativeError, match="make a step of"):
        _native.planned(str(hub.demo()), capacity=1, slots=BATCH_MAX + 1, device="cpu")
