#!/usr/bin/env python3
"""Show where the time of decoding on a GPU goes, by kernel.

    python tools/gpu_timeline.py [-m MODEL] [--depth 4096] [--batch 1] [--method quantspec] [--gamma 4]
                                 [--weights int8] [--draft-pages 32] [--ms 100]

Kernels overlap: one starts while the previous one ends (docs/design/graphs.md), so its duration includes waiting. What it
adds is the time from the previous kernel's end to its own. These times sum up to the time that was recorded:

    kernel                          launches      lasts       adds   share
    draft_gated                          768    20.6 us    12.9 us   8.6 %

Recording slows the host down, which shows as time that the first kernel of a round adds. Needs PyTorch, whose profiler
records all kernels of this process.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from program import Parser, Refusal

from quantspec_cli import Engine
from quantspec_cli.errors import QuantspecError
from quantspec_cli.model import Prompt

# Starts and ends in microseconds, and the kernel's name.
Event = tuple[float, float, str]
DOCUMENTATION = Path(__file__).resolve().parent.parent / "docs"


@dataclass
class Kernel:
    """All launches of one kernel; times in microseconds."""

    launches: int = 0
    lasts: float = 0
    adds: float = 0


def by_kernel(events: Iterable[Event]) -> dict[str, Kernel]:
    """Launches by name, those that add most first. The first event adds its duration."""
    found: dict[str, Kernel] = {}
    previous: float | None = None
    for start, end, name in sorted(events, key=lambda event: event[1]):
        kernel = found.setdefault(name, Kernel())
        kernel.launches += 1
        kernel.lasts += end - start
        kernel.adds += end - (start if previous is None else previous)
        previous = end
    return dict(sorted(found.items(), key=lambda item: -item[1].adds))


def table(kernels: dict[str, Kernel]) -> Iterator[str]:
    """Lines of text."""
    total = sum(kernel.adds for kernel in kernels.values())
    yield f"{'kernel':30}{'launches':>10}{'lasts':>11}{'adds':>11}{'share':>8}"
    for name, of in kernels.items():
        each = f"{of.lasts / of.launches:8.1f} us{of.adds / of.launches:8.1f} us"
        yield f"{name[:29]:30}{of.launches:10}{each}{100 * of.adds / max(total, 1e-9):6.1f} %"


def recorded(profiler: Any) -> list[Event]:
    """Kernels and copies that a profiler of PyTorch has recorded."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())["traceEvents"]
    kinds = {"kernel", "gpu_memcpy", "gpu_memset"}
    return [(of["ts"], of["ts"] + of["dur"], of["name"]) for of in trace if of.get("cat") in kinds]


def record(asked: argparse.Namespace) -> list[Event]:
    """Decodes a batch, and records some of it."""
    try:
        import torch  # noqa: PLC0415 - an error line without it
        from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise Refusal(f"there is no module {error.name}", "pip install torch") from error
    options = {name: getattr(asked, name) for name in ("method", "gamma", "weights", "draft_pages")}
    options = {name: value for name, value in options.items() if value is not None}
    engine = Engine.load(
        asked.model, device="cuda", context=asked.depth + 2048, batch=asked.batch, prompt_cache=False, **options
    )
    text = "".join(page.read_text(encoding="utf-8") for page in sorted(DOCUMENTATION.glob("**/*.md")))
    ids = engine.model.tokenizer.encode(text)
    ids *= 1 + (asked.depth + 997 * asked.batch) // len(ids)
    prompts = [Prompt(ids[997 * i : 997 * i + asked.depth]) for i in range(asked.batch)]
    activities = [ProfilerActivity.CUDA]
    with profile(activities=activities):  # the first one takes seconds to begin
        torch.zeros(1, device="cuda")
    streams = [engine.stream(prompt, max_new_tokens=2047, ignore_eos=True) for prompt in prompts]
    for stream in streams:
        next(stream)
    time.sleep(0.3)  # the first rounds are launched kernel by kernel
    with profile(activities=activities) as profiler:
        time.sleep(asked.ms / 1000)
    for stream in streams:
        stream.close()
    events = recorded(profiler)
    if not events:
        raise Refusal("no kernel was recorded", "record longer with --ms, or a larger model")
    return events


def positive(text: str) -> int:
    """A number of a flag."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", help="default: the demo model")
    parser.add_argument("--depth", type=positive, default=4096, help="tokens of each prompt")
    parser.add_argument("--batch", type=positive, default=1, help="sequences")
    parser.add_argument("--method")
    parser.add_argument("--gamma", type=int)
    parser.add_argument("--weights")
    parser.add_argument("--draft-pages", type=int)
    parser.add_argument("--ms", type=positive, default=100, help="milliseconds to record")
    try:
        events = record(parser.parse_args(argv))
    except QuantspecError as error:
        print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return error.exit_code
    except Refusal as error:
        print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
        return 1
    print("\n".join(table(by_kernel(events))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
