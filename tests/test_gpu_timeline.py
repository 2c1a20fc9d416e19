"""tools/gpu_timeline.py: times that overlapping kernels add."""

from __future__ import annotations

import sys

import pytest
from conftest import tool


def test_times_that_kernels_add_sum_up_to_the_time_recorded() -> None:
    timeline = tool("gpu_timeline")
    # The second kernel starts during the first, the third after a gap, the fourth ends before the third does.
    events = [(0.0, 10.0, "first"), (2.0, 16.0, "second"), (20.0, 30.0, "first"), (21.0, 25.0, "third")]
    found = timeline.by_kernel(reversed(events))
    assert list(found) == ["first", "third", "second"]
    assert [(of.launches, of.lasts, of.adds) for of in found.values()] == [(2, 20, 15), (1, 4, 9), (1, 14, 6)]
    assert sum(of.adds for of in found.values()) == 30
    head, line, *_ = timeline.table(found)
    assert head.split() == ["kernel", "launches", "lasts", "adds", "share"]
    assert line.split() == ["first", "2", "10.0", "us", "7.5", "us", "50.0", "%"]
    assert timeline.by_kernel([]) == {}


def test_without_pytorch_an_error_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert tool("gpu_timeline").main([]) == 1
    assert capsys.readouterr().err == "error: there is no module torch\nhint: pip install torch\n"


@pytest.mark.parametrize(("flag", "value"), [("--ms", "0"), ("--depth", "-1"), ("--batch", "x")])
def test_wrong_numbers_are_one_error_and_one_hint(capsys: pytest.CaptureFixture[str], flag: str, value: str) -> None:
    with pytest.raises(SystemExit) as ended:
        tool("gpu_timeline").main([flag, value])
    assert ended.value.code == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert flag in error
    assert value in error
    assert hint.startswith("hint: ")
