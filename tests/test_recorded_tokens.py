"""The demo model's tokens equal the recorded ones, so a change of the engine changes no token."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import record_tokens

from quantspec_cli import _native

RECORDED = Path(__file__).parent / "data" / "tokens"
SCRIPT = Path(__file__).with_name("record_tokens.py")


def compare(recording: Path, path: str) -> subprocess.CompletedProcess[str]:
    # A separate process: the SIMD path is chosen once.
    command = [sys.executable, str(SCRIPT), "--quick", "--compare", str(recording)]
    environment = {**os.environ, "QUANTSPEC_SIMD": path}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.slow
@pytest.mark.skipif(
    _native.doctor()["cpu"]["simd"] not in {"avx2", "avx512", "amx"}, reason="SKIPPED: no AVX2 on this machine"
)
def test_tokens_are_those_recorded() -> None:
    outcome = compare(RECORDED / "avx2.json.gz", "avx2")
    assert (outcome.returncode, outcome.stderr) == (0, ""), outcome
    assert outcome.stdout.endswith("cases are as recorded\n")


def test_a_recording_has_every_case_of_the_quick_comparison() -> None:
    quick = {str(way) for way in record_tokens.quick()}
    assert quick <= {str(way) for way in record_tokens.ways()}
    for file in RECORDED.iterdir():
        assert quick <= {case.partition(",")[0] for case in record_tokens.read(file)}, file


def test_differences_are_reported() -> None:
    recorded = {"a": {"tokens": [[1, 2]], "accepted": 3}, "b": {"tokens": [[1]], "accepted": None}}
    assert record_tokens.differences(recorded, recorded) == []
    found = {"a": {"tokens": [[1, 4]], "accepted": 2}, "c": {"tokens": [], "accepted": None}}
    assert record_tokens.differences(recorded, found) == [
        "a: token 1 of prompt 0 is 4 and was 2",
        "a: 2 drafted tokens were accepted, and 3 before",
        "c: not recorded",
    ]
