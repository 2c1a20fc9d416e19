"""A run's memory is what was planned before loading."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import chain
from pathlib import Path

from quantspec_cli import hub

SAMPLE = Path(hub.__file__).with_name("sample.txt")


def test_the_peak_is_the_plan() -> None:
    # Twelve sequences fill 140 MB of pages, buffers and weights; Python's own growth is small next to that.
    prompts = list(chain.from_iterable(("--prompt", str(SAMPLE)) for _ in range(12)))
    command = [
        sys.executable,
        "-m",
        "quantspec_cli",
        "run",
        *prompts,
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
    assert 0.97 < stats["peak_bytes"] / stats["planned_bytes"] < 1.03, stats
