"""A run's memory is what was planned before loading."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from quantspec_cli import hub

SAMPLE = Path(hub.__file__).with_name("sample.txt")


def memory(prompts: Sequence[str]) -> tuple[int, int]:
    """Bytes planned and at the peak of a run that decodes these prompts together."""
    command = [
        sys.executable,
        "-m",
        "quantspec_cli",
        "run",
        *chain.from_iterable(("--prompt", prompt) for prompt in prompts),
        # Long enough that the first answer is unfinished when the last prompt has been prefilled.
        "-n",
        "200",
        "--gamma",
        "4",
        "--device",
        "cpu",
        # Stacks and buffers of threads count as Python's growth here.
        "--threads",
        "2",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, check=True)
    stats = json.loads(done.stdout)["stats"]
    held = ("weights", "draft_weights", "cache_upper", "cache_lower", "buffer", "workspace")
    assert sum(stats[f"{part}_bytes"] for part in held) > 0.6 * stats["planned_bytes"]
    return stats["planned_bytes"], stats["peak_bytes"]


def test_the_peak_is_the_plan(tmp_path: Path) -> None:
    # Twelve sequences fill 140 MB of pages, buffers and weights; Python's own growth is small next to that.
    sample, prompts = SAMPLE.read_text(encoding="utf-8"), []
    for number in range(12):
        # They differ from their first words on, so they share no page.
        (tmp_path / str(number)).write_text(f"Text {number}. {sample}", encoding="utf-8")
        prompts.append(str(tmp_path / str(number)))
    planned, peak = memory(prompts)
    assert 0.97 < peak / planned < 1.03, (planned, peak)
    # One document twelve times is kept once, and planned as twelve.
    shared_planned, shared_peak = memory([prompts[0]] * 12)
    assert shared_planned <= planned
    assert shared_peak < 0.8 * shared_planned, (shared_planned, shared_peak)
