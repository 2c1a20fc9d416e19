"""A run's memory is what was planned before loading."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quantspec_cli import hub

SAMPLE = Path(hub.__file__).with_name("sample.txt")


@pytest.mark.slow
@pytest.mark.parametrize("recorded", [False, True])
def test_the_peak_is_the_plan(tmp_path: Path, recorded: bool) -> None:
    # Twelve sequences, or a long one, fill 140 MB of pages, buffers and weights; Python's own growth is small next to that.
    # The twelve texts differ from their first words on, so they share no page.
    text = SAMPLE.read_text(encoding="utf-8")
    prompts = []
    for number in range(1 if recorded else 12):
        prompts += ["--prompt", str(tmp_path / str(number))]
        (tmp_path / str(number)).write_text(f"Text {number}. {text * (12 if recorded else 1)}", encoding="utf-8")
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
        *(["--prompt-cache", str(tmp_path / "cache")] if recorded else []),
    ]
    done = subprocess.run(command, capture_output=True, check=True)
    stats = json.loads(done.stdout)["stats"]
    held = ("weights", "draft_weights", "cache_upper", "cache_lower", "buffer", "workspace")
    assert sum(stats[f"{part}_bytes"] for part in held) > 0.6 * stats["planned_bytes"]
    assert 0.97 < stats["peak_bytes"] / stats["planned_bytes"] < 1.03, stats


def test_a_limit_of_the_address_space_counts_as_a_smaller_machine() -> None:
    limit = 1 << 30
    program = (
        f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))\n"
        "from quantspec_cli.model import Model, planned\n"
        "from quantspec_cli.options import EngineOptions\n"
        "print(planned(Model.open(), EngineOptions(device='cpu'), context=1024)['available_bytes'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert 0 < int(done.stdout) < limit


def test_threads_reserve_little_of_a_limited_address_space() -> None:
    """Eight threads need their stacks, not a heap of 64 MB each."""
    program = (
        "import resource, threading; resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        "from quantspec_cli.model import Model, planned\n"
        "from quantspec_cli.options import EngineOptions\n"
        "planned(Model.open(), EngineOptions(device='cpu'), context=1024)\n"
        "def size(): return int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "def work(): kept.append([bytes(1000) for _ in range(100)]); ready.wait(); done.wait()\n"
        "kept, ready, done, before = [], threading.Barrier(9), threading.Event(), size()\n"
        "threads = [threading.Thread(target=work) for _ in range(8)]\n"
        "for thread in threads: thread.start()\n"
        "ready.wait(); print(size() - before - 8 * resource.getrlimit(resource.RLIMIT_STACK)[0]); done.set()"
    )
    grown = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
    assert int(grown) < 64 << 20


# Sets the memory that a plan finds available, in bytes; the demo model on two threads.
LIMITED = """
import json, resource
from quantspec_cli import _native, hub

def limit(available):
    size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + available, resource.RLIM_INFINITY))

def plan(capacity, **options):
    return _native.plan(str(hub.demo()), capacity=capacity, device="cpu", threads=2, **options)
"""


def with_limits(program: str) -> Any:
    """What the program prints, as JSON."""
    return json.loads(subprocess.run([sys.executable, "-c", LIMITED + program], capture_output=True, check=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_longest_context_and_the_largest_batch_are_what_auto_fits() -> None:
    of_auto, of_checkpoint, of_int8, fits = with_limits(
        "limit(200_000_000)\n"
        "plan(2000)\n"  # what a first plan allocates is not available to the next one
        "plans = [plan(2000, weights=weights) for weights in ('auto', 'checkpoint', 'int8')]\n"
        "longest, most = (int(0.99 * plans[0]['longest_context']), plans[0]['largest_batch'])\n"
        "at_limits = plan(longest, weights='auto'), plan(2000, weights='auto', slots=most)\n"
        "print(json.dumps([*plans, [one['fits'] for one in at_limits]]))"
    )
    assert (of_auto["weights"], of_auto["fits"], fits) == ("checkpoint", True, [True, True])
    assert of_auto["longest_context"] == pytest.approx(of_int8["longest_context"], rel=0.01)
    assert of_auto["longest_context"] > 1.04 * of_checkpoint["longest_context"]
    assert of_auto["largest_batch"] == of_int8["largest_batch"] > of_checkpoint["largest_batch"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_draft_precision_of_auto_shortens_no_context() -> None:
    of_auto, without, sensitive = with_limits(
        "limit(500_000_000)\n"
        "plan(20000)\n"
        "plans = [plan(20000, draft_precision=kinds) for kinds in ('auto', 'none', 'down')]\n"
        "print(json.dumps(plans))"
    )
    assert (of_auto["draft_precision"], of_auto["fits"]) == ("down", True)
    assert of_auto["longest_context"] == pytest.approx(without["longest_context"], abs=30)
    assert of_auto["longest_context"] > sensitive["longest_context"] + 60


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_refusal_names_what_helps() -> None:
    # The weights take 13.8 MB. A short text takes 23.2 MB in all, 18.4 with kv4, 17.8 with ar, 12.4 with int8 and 10.4 with
    # int4; eight take 44.0, 39.2, 34.6, 33.3 and 31.4 MB.
    smaller = ["--method kv4", "--method ar", "--weights int8", "--weights int4"]
    cases: list[tuple[int, float, list[str]]] = [
        (1, 9, []),
        (1, 13, smaller[2:]),
        (1, 15, smaller[2:]),
        (1, 21, smaller),
        (8, 28, ["fewer sequences at once"]),
        (8, 36.5, ["fewer sequences at once", *smaller[1:]]),
    ]
    hints = with_limits(
        "def hint(slots, available):\n"
        "    limit(int(available * 1e6))\n"
        "    try:\n"
        "        _native.Engine(str(hub.demo()), capacity=500, slots=slots, device='cpu', threads=2)\n"
        "    except _native.NativeError as error:\n"
        "        return error.hint\n"
        "plan(2000)\n"
        f"print(json.dumps([hint(slots, available) for slots, available, _ in {cases}]))"
    )
    for (_, available, ways), hint in zip(cases, hints, strict=True):
        reason, _, remedies = hint.partition("; use ")
        assert remedies == ", ".join([*ways, "a smaller model or a machine with more memory"])
        parts = r"not even a short text fits: weights take 13.8 MB, drafts [45].\d MB, all else \d+.\d MB"
        assert re.fullmatch(parts if available > 13.9 else "the weights alone do not fit", reason), reason
