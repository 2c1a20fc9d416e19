"""`bench --compare`: compares rows of two runs, with their noise."""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome

ROW: dict[str, Any] = {
    "model": "demo",
    "method": "ar",
    "kv_target": "int8",
    "gamma": 0,
    "draft_pages": "all",
    "accept": "replay",
    "batch": 1,
    "test": "tg",
    "n_prompt": 0,
    "n_gen": 8,
    "n_depth": 0,
    "ms_per_token": 2.0,
    "ms_per_token_sd": 0.02,
    "repetitions": 3,
}


@pytest.fixture
def compare(quantspec: Callable[..., Outcome], tmp_path: Path) -> Callable[..., Outcome]:
    """Compares two lists of rows, or files of these contents."""

    def run(first: Any, second: Any, *flags: str) -> Outcome:
        for name, content in (("a", first), ("b", second)):
            raw = content if isinstance(content, bytes) else json.dumps(content).encode()
            (tmp_path / name).write_bytes(raw)
        return quantspec("bench", "--compare", str(tmp_path / "a"), str(tmp_path / "b"), *flags)

    return run


@pytest.mark.parametrize(
    ("ms", "change"), [(2.0, "noise"), (2.05, "noise"), (1.96, "noise"), (2.2, "slower"), (1.8, "faster")]
)
def test_a_difference_counts_beyond_two_deviations(compare: Callable[..., Outcome], ms: float, change: str) -> None:
    [row] = compare([ROW], [ROW | {"ms_per_token": ms}], "--json").json
    assert row["change"] == change
    assert row["ratio"] == pytest.approx(2.0 / ms)
    assert row["ratio_sd"] == pytest.approx(2.0 / ms * math.sqrt(0.01**2 + (0.02 / ms) ** 2))
    assert (row["a_ms_per_token"], row["b_ms_per_token"]) == (2.0, ms)


def test_one_repetition_has_no_spread(compare: Callable[..., Outcome]) -> None:
    once = ROW | {"repetitions": 1, "ms_per_token_sd": 0.0}
    [row] = compare([ROW], [once | {"ms_per_token": 9.0}], "--json").json
    assert (row["change"], row["ratio_sd"]) == ("unknown", None)
    line = compare([ROW], [once]).stdout.splitlines()[2]
    assert line.endswith("? |")
    assert line.count("±") == 1


def test_a_file_that_cannot_be_written_costs_no_row_of_the_document(compare: Callable[..., Outcome]) -> None:
    outcome = compare([ROW], [ROW], "--json", "--output", "/dev/full")
    document = outcome.json
    assert (outcome.code, document["error"]["kind"]) == (1, "io")
    assert document["results"] == compare([ROW], [ROW], "--json").json


def test_every_form_of_rows_is_read(compare: Callable[..., Outcome]) -> None:
    other = ROW | {"n_depth": 512}
    lines = "\n".join(json.dumps(row) for row in (ROW, other)).encode()
    interrupted = {"error": {"kind": "interrupted"}, "results": [ROW, other]}
    for first in (lines, lines + b"\n\n", [ROW, other], interrupted):
        outcome = compare(first, [other], "-o", "jsonl")
        assert outcome.code == 0, outcome
        assert json.loads(outcome.stdout)["n_depth"] == 512


def test_models_of_one_file_each_need_no_common_name(compare: Callable[..., Outcome]) -> None:
    outcome = compare([ROW], [ROW | {"model": "/a/copy"}], "--json")
    assert len(outcome.json) == 1
    assert outcome.stderr == "note: model is demo in A and /a/copy in B\n"
    two = [ROW, ROW | {"model": "other"}]
    assert [row["model"] for row in compare(two, two, "--json").json] == ["demo", "other"]


@pytest.mark.parametrize(
    ("field", "one", "other"),
    [
        ("weights", "checkpoint", "int8"),
        ("page_choice", "best", "window"),
        ("draft_refresh", 0, 4),
        ("draft_precision", "none", "down"),
        ("draft_model", "small", "smaller"),
        ("draft_model_kv", "int8", "fp16"),
        ("kv_rounding", "balanced", "paper"),
    ],
)
def test_other_settings_are_noted(compare: Callable[..., Outcome], field: str, one: Any, other: Any) -> None:
    a, b = ROW | {field: one, "threads": 2}, ROW | {field: other, "threads": 2}
    outcome = compare([a], [b], "--json")
    assert outcome.code == 0
    assert outcome.stderr == f"note: {field} is {one} in A and {other} in B\n"
    assert compare([a], [a]).stderr == ""
    assert compare([a], [ROW]).stderr == "", "an older file has no such field"


def test_a_file_of_bench_compares_with_itself(quantspec: Callable[..., Outcome], tmp_path: Path) -> None:
    place = tmp_path / "rows.jsonl"
    flags = ("-p", "8", "-n", "4", "-r", "2", "--device", "cpu", "-o", "jsonl", "--output", str(place))
    assert quantspec("bench", *flags).code == 0
    outcome = quantspec("bench", "--compare", str(place), str(place))
    assert outcome.code == 0, outcome
    assert len(outcome.stdout.splitlines()) == 2 + len(place.read_text().splitlines())
    assert quantspec("bench", "--compare", str(place), str(place), "--output", str(place)).code == 2


def test_a_pipe_is_read(quantspec: Callable[..., Outcome], tmp_path: Path) -> None:
    """As a shell passes `<(git show HEAD:rows.jsonl)`."""
    place, pipe = tmp_path / "rows", tmp_path / "pipe"
    place.write_text(json.dumps(ROW))
    os.mkfifo(pipe)
    with subprocess.Popen(["cp", place, pipe]) as writer:
        outcome = quantspec("bench", "--compare", str(pipe), str(place))
        writer.kill()
    assert outcome.code == 0, outcome


def test_an_endless_pipe_is_an_error(quantspec: Callable[..., Outcome], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cp", "/dev/zero", tmp_path / "pipe"], stderr=subprocess.DEVNULL) as writer:
        outcome = quantspec("bench", "--compare", str(tmp_path / "pipe"), "b")
        writer.kill()
    outcome.assert_error(1, "more than 67108864 bytes")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no rows"),
        (b"[]", "holds no rows"),
        (b"\x89PNG\r\n", "holds no rows"),
        (b"[" * 100_000, "holds no rows"),
        (b"{}", "no measurement"),
        (b"3", "no measurement"),
        (b'{"error": {"kind": "interrupted"}}', "a has no finished rows (the run was interrupted)"),
        (b'{"error": {"kind": "device"}}', "a has no finished rows (the run ended with an error)"),
        (b'{"error": 1}', "a has no finished rows"),
        ([ROW | {"ms_per_token": "2"}], "no ms_per_token"),
        ([ROW | {"ms_per_token": 0}], "ms_per_token 0"),
        ([ROW | {"ms_per_token": float("nan")}], "ms_per_token nan"),
        ([ROW | {"ms_per_token": 10**400}], "ms_per_token a number of 1329 bits"),
        ([ROW | {"ms_per_token_sd": None}], "no ms_per_token_sd"),
        ([ROW | {"ms_per_token_sd": float("inf")}], "ms_per_token_sd inf"),
        ([ROW | {"ms_per_token": 1e-300}], "ms_per_token 1e-300"),
        ([ROW | {"ms_per_token": 1e300}], "ms_per_token 1e+300"),
        ([ROW | {"repetitions": 0}], "repetitions 0"),
        ([ROW | {"n_depth": [1]}], "neither text nor"),
        ([ROW | {"accept": ["replay"]}], "neither text nor"),
        ([{name: value for name, value in ROW.items() if name != "gamma"}], "row 1"),
        ([ROW, ROW | {"ms_per_token": 3.0}], "twice"),
        ([ROW | {"n_depth": 7}], "in common"),
    ],
)
def test_other_files_are_one_error(compare: Callable[..., Outcome], content: Any, words: str) -> None:
    compare(content, [ROW]).assert_error(1, words)
    document = compare([ROW], content, "--json").json
    assert document["error"]["kind"] == "input"


def test_flags_of_measuring_are_refused(compare: Callable[..., Outcome], quantspec: Callable[..., Outcome]) -> None:
    compare([ROW], [ROW], "-r", "3").assert_error(2, "--repetitions", "bench --compare")
    compare([ROW], [ROW], "--report", "x.html").assert_error(2, "--report")
    quantspec("bench", "kernels", "--compare", "a", "b").assert_error(2, "kernels")
    quantspec("bench", "--compare", "/dev/zero", "b").assert_error(1, "/dev/zero is no file")
    quantspec("bench", "--compare", "absent", "b").assert_error(1, "absent is no file")
