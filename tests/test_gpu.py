"""The command line on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

Run = Callable[..., Any]


def test_the_self_test_passes(quantspec: Run) -> None:
    report = quantspec("selftest", "--device", "cuda", "--json").json
    assert report["passed"] is True
    assert report["compared_tokens"] > 20_000
    assert report["device"] == "cuda:0"


def test_every_kernel_is_compared_with_the_bandwidth(quantspec: Run, gpu: dict[str, Any]) -> None:
    rows = quantspec("bench", "kernels", "-d", "4096", "--rows", "1,5", "-o", "json").json
    assert {row["device_name"] for row in rows} == {gpu["name"]}
    # Draft steps have fused GEMMs on Hopper.
    hopper = {"draft"} if gpu["compute_capability"] == "9.0" else set()
    assert {row["kernel"] for row in rows} == hopper | {
        *("attend", "choose_pages", "linear", "norm", "silu", "append", "embed", "choose", "judge"),
        *("flush", "store", "keep_recent", "weights_atoms", "quantise_weights"),
        *("prefill_qkv", "prefill_output", "prefill_gate_up", "prefill_down", "prefill_attend"),
    }
    assert {row["form"] for row in rows if row["kernel"] == "attend"} == {"upper", "both", "full"}
    assert {row["form"] for row in rows if row["kernel"] == "linear"} == {"bf16", "w4", "w8", "int8", "int4"}
    assert {row["form"] for row in rows if row["kernel"] == "judge"} == {"greedy", "replay"}
    for row in rows:
        assert row["us"] > 0
        assert row["bandwidth_gb_per_s"] > 50
        # Data larger than the cache cannot be read faster than memory delivers it.
        if row["kernel"] in {"attend", "linear", "draft"}:
            assert row["bandwidth_share"] < 1.1, row


def test_decoding_is_compared_with_the_bandwidth(quantspec: Run) -> None:
    rows = quantspec("bench", "--device", "cuda", "-p", "0", "-n", "16", "-d", "300", "-r", "1", "-o", "json").json
    assert {row["method"] for row in rows} == {"ar", "quantspec"}
    assert all(row["bandwidth_gb_per_s"] > 50 for row in rows)


@pytest.mark.parametrize("pages", ["all", "2", "auto"])
def test_pages_of_drafts_change_no_token(quantspec: Run, pages: str) -> None:
    text = "The rain fell in torrents, and the wind swept up the streets. " * 60
    options = ("--text", text, "-n", "120", "--temperature", "0.7", "--device", "cuda", "--json")
    plain = quantspec("run", *options, "--method", "ar").json
    drafted = quantspec("run", *options, "--draft-pages", pages).json
    assert drafted["results"][0]["tokens"] == plain["results"][0]["tokens"]
    assert drafted["stats"]["drafted_tokens"] > 0


def test_an_index_out_of_range_is_a_usage_error(quantspec: Run) -> None:
    quantspec("run", "--text", "x", "--device", "cuda:99").assert_error(2, "99")


def test_statistics_name_the_gpu(quantspec: Run, gpu: dict[str, Any]) -> None:
    outcome = quantspec("run", "--text", "It was a dark", "-n", "8", "--device", "cuda")
    assert outcome.stderr.splitlines()[-1] == f"cuda:0: {gpu['name']}"
