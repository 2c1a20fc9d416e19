"""Runs of one variant, and the statistics of a row."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .grid import Variant

# Two bandwidths count as equal if they differ by less. Repeated readings of an idle memory differ by 3 %, the two speeds of
# the memory of some machines by 70 %.
STEADY = 0.1


@dataclass
class Sample:
    """One run of one variant.

    Attributes:
        seconds: wall time of the decoding, including the loop.
        read_bytes: bytes its steps had to read.
        bandwidths: GB/s read before and after.
        processed: tokens of the prompt, or emitted by all sequences.
        stats: the engine's counters of this run.
        tokens: emitted tokens of each sequence.
    """

    seconds: float
    read_bytes: float
    bandwidths: tuple[float, float]
    processed: int
    stats: Mapping[str, Any] = field(default_factory=dict)
    tokens: Sequence[Sequence[int]] = ()

    @property
    def ms_per_token(self) -> float:
        """Milliseconds for a token of any sequence."""
        return self.seconds * 1e3 / self.processed

    @property
    def bandwidth(self) -> float:
        """Mean read bandwidth around the run."""
        return statistics.fmean(self.bandwidths)

    @property
    def steady(self) -> bool:
        """True if the memory had the same speed before and after."""
        return is_same_bandwidth(*self.bandwidths)


def is_same_bandwidth(one: float, other: float) -> bool:
    """True if two readings differ by noise."""
    return abs(one - other) <= STEADY * max(one, other)


def check_equal(runs: Mapping[Variant, Sample]) -> None:
    """Checks that variants with the same target and seed emit the same text, so that the compared work is equal.

    A sequence of a batch may have emitted fewer tokens with one variant than with another.
    """
    for variant, run in runs.items():
        other = next(known for known in runs if known.kv_target == variant.kv_target)
        if any(one[: len(two)] != two[: len(one)] for one, two in zip(run.tokens, runs[other].tokens, strict=True)):
            raise InternalError(
                f"{variant.name} and {other.name} emitted different tokens from the {variant.kv_target} target",
                "run quantspec selftest, and please report this",
            )


def bandwidth_share(steady: Sequence[Sample]) -> float | None:
    """Share of the bytes that could have been read in that time; a slow repetition counts by its length, as in bytes per
    second."""
    readable = sum(sample.seconds * 1e9 * sample.bandwidth for sample in steady)
    return sum(sample.read_bytes for sample in steady) / readable if steady else None


def speculation(runs: Sequence[Sample]) -> dict[str, Any]:
    """Statistics of drafting over all repetitions; times are means per round, which covers all sequences of a batch."""
    names = ("rounds", "drafted_tokens", "accepted_tokens", "passes", "draft_steps")
    total = {name: sum(run.stats[name] for run in runs) for name in names}
    spent = {name: sum(run.stats[name] for run in runs) for name in ("draft_s", "verify_s")}
    rounds, drafted, accepted, passes, steps = total.values()
    engine_s = spent["draft_s"] + spent["verify_s"]
    wall_s = sum(run.seconds for run in runs)
    return {
        "acceptance_rate": accepted / drafted if drafted else None,
        "mean_acceptance_length": 1 + accepted / rounds if drafted else None,
        "acceptance_rate_per_position": per_position(runs),
        **by_method(runs),
        "gamma_mean": drafted / rounds,
        "draft_pages_mean": pages_mean(runs),
        "draft_ms": spent["draft_s"] / passes * 1e3,
        "draft_step_ms": spent["draft_s"] / steps * 1e3 if steps else None,
        "verify_ms": spent["verify_s"] / passes * 1e3,
        "round_ms": wall_s / passes * 1e3,
        "loop_us": (wall_s - engine_s) / passes * 1e6,
    }


def by_method(runs: Sequence[Sample]) -> dict[str, Any]:
    """Rounds by drafting method, for a method that chooses among others."""
    rounds: Counter[str] = Counter()
    for run in runs:
        rounds.update({name: share["rounds"] for name, share in run.stats.get("by_method", {}).items()})
    return {"rounds_by_method": dict(rounds)} if rounds else {}


def pages_mean(runs: Sequence[Sample]) -> float | None:
    """Pages that a draft step read per KV head, over all repetitions; None if no network drafted."""
    steps = [run.stats["drafted_tokens"] - run.stats["copied_tokens"] for run in runs]
    read: float = sum(count * run.stats["draft_pages_mean"] for count, run in zip(steps, runs, strict=True) if count)
    return read / sum(steps) if any(steps) else None


def per_position(runs: Sequence[Sample]) -> list[float] | None:
    """Share of all rounds whose token at each position was accepted, over all repetitions."""
    rates = [(run.stats["rounds"], run.stats.get("acceptance_rate_per_position") or []) for run in runs]
    rounds = sum(count for count, _ in rates)
    longest = max(len(of_run) for _, of_run in rates)
    kept = [sum(count * of_run[at] for count, of_run in rates if at < len(of_run)) for at in range(longest)]
    return [count / rounds for count in kept] or None


def speedup(runs: Sequence[Sample], baseline: Sequence[Sample] | None) -> dict[str, Any]:
    """Speed-ups over plain decoding with an FP16 cache, per repetition, if the memory had one speed."""
    ratios = [
        base.ms_per_token / run.ms_per_token
        for run, base in zip(runs, baseline or [], strict=False)
        if run.steady and base.steady and is_same_bandwidth(run.bandwidth, base.bandwidth)
    ]
    return {
        "speedup": statistics.fmean(ratios) if ratios else None,
        "speedup_sd": (statistics.stdev(ratios) if len(ratios) > 1 else 0.0) if ratios else None,
        "speedup_repetitions": len(ratios),
    }
