"""The time left of a batch, on a clock of the test."""

from __future__ import annotations

import random
import re
from collections import Counter, deque
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace

import pytest

from quantspec_cli import batch_view, sources
from quantspec_cli.batch_view import View, expected_tokens, seconds_left
from quantspec_cli.batch_work import Job, RunningCall

Clock = SimpleNamespace


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(batch_view.time, "perf_counter", lambda: clock.now)
    return clock


def time_left(totals: str) -> tuple[str, float] | None:
    found = re.search(r"(about|at most) (\S+) s left", totals)
    return (found[1], float(found[2])) if found else None


def schedule(
    clock: Clock, view: View, prompt_tokens: int, lengths: list[int], *, slots: int = 16
) -> Iterator[tuple[str, float] | None]:
    """Decodes documents as the scheduler does: a chunk of a prompt, then a round of all others. Yields the time left."""
    waiting = deque(Job(sources.Source(str(at)), str(at), tokens=prompt_tokens) for at in range(len(lengths)))
    ends = {job.output: length for job, length in zip(waiting, lengths, strict=True)}
    running: list[Job] = []
    prompt_s = round_s = 0.0
    while waiting or running:
        while waiting and len(running) < 2 * slots:
            running.append(waiting.popleft())
            running[-1].running = [RunningCall(prompt_tokens)]
        calls = [job.running[0] for job in running]
        growing = [job for job in running if job.running[0].stage == "decoding"]
        before = clock.now
        chunk = next((call for call in calls[:slots] if call.stage != "decoding"), None)
        if chunk is not None:
            rows = min(1000, prompt_tokens - chunk.done)
            chunk.stage, chunk.done, chunk.total = "reading", chunk.done + rows, prompt_tokens
            clock.now += rows / 10_000
            prompt_s += clock.now - before
            if chunk.done == prompt_tokens:
                chunk.stage, chunk.done = "decoding", 1
        before = clock.now
        # A round of many takes longer than one of few.
        clock.now += 0.02 + 0.001 * len(growing) if growing else 0
        round_s += clock.now - before
        for job in growing:
            job.running[0].done += 1
            if (length := job.running[0].done) == ends[job.output]:
                running.remove(job)
                view.called(prompt_tokens, length)
                view.finished({"status": "done"})
        yield time_left(view.totals(running, waiting, prompt_s / (prompt_s + round_s)))


@pytest.mark.parametrize(
    ("prompt_tokens", "length", "documents"),
    [
        (250, (400, 400), 48),
        (250, (50, 300), 96),
        (1000, (20, 400), 96),
        (10_000, (100, 200), 48),
    ],
    ids=["cut answers", "short prompts", "prompts and answers", "long prompts"],
)
def test_the_time_left_is_about_right(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, prompt_tokens: int, length: tuple[int, int], documents: int
) -> None:
    monkeypatch.setattr(batch_view, "duration", lambda seconds: f"{seconds} s")
    chance = random.Random(7)
    lengths = [chance.randint(*length) for _ in range(documents)]
    seen = []
    with View(documents, 0, 0, longest=400, shown=False) as view:
        for left in schedule(clock, view, prompt_tokens, lengths):
            if left is not None:
                seen.append((clock.now, *left))
    assert {word for _, word, _ in seen} == {"at most", "about"}
    for now, word, left in seen:
        truth = clock.now - now
        error = 0.3 * truth
        if now > 0.75 * clock.now:
            # The last answers decode in smaller batches, and one may be longer than all others.
            error = max(error, 0.1 * clock.now)
        if now > 0.1 * clock.now:
            assert left > truth - error, (now, word, left, truth)
            assert word == "at most" or left < truth + error, (now, word, left, truth)


def test_an_estimate_does_not_jump(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents that are alike: after the first tenth the time left falls as time passes."""
    monkeypatch.setattr(batch_view, "duration", lambda seconds: f"{seconds} s")
    with View(48, 0, 0, longest=400, shown=False) as view:
        seen = [(clock.now, left[1]) for left in schedule(clock, view, 250, [400] * 48) if left is not None]
    late = [left for now, left in seen if now > clock.now / 10]
    assert all(after < before + 0.5 for before, after in pairwise(late))


def test_the_time_left_needs_both_rates() -> None:
    assert seconds_left(10, 0.25, read=100, unread=300, new=0, to_come=50) is None
    assert seconds_left(10, 0.25, read=0, unread=300, new=10, to_come=50) is None
    # 2.5 s for 100 tokens of prompts, and 7.5 s for 30 of answers.
    assert seconds_left(10, 0.25, read=100, unread=300, new=30, to_come=50) == 7.5 + 12.5
    assert seconds_left(10, 0.25, read=0, unread=0, new=30, to_come=50) == 12.5


def test_the_tokens_to_come_follow_from_those_that_ended() -> None:
    assert expected_tokens(Counter(), [0, 30], 100) == {0: 100, 30: 70}
    assert expected_tokens(Counter({100: 5}), [30], 100) == {0: 100, 30: 70, 100: 0}
    # The mean of the lengths that ended, and of one more that gets 100.
    expected = expected_tokens(Counter({0: 1, 10: 1, 40: 1}), [], 100)
    assert expected == pytest.approx({0: (0 + 10 + 40 + 100) / 4, 10: (30 + 90) / 2, 40: 60})
    # Of three that reached 10, one ended there.
    assert expected_tokens(Counter({10: 1}), [20], 100) == pytest.approx({0: 10 + 2 / 3 * 90, 10: 90, 20: 80})


def test_the_time_left_of_the_last_answers(clock: Clock) -> None:
    """The slower of two answers has 89 tokens to go, and takes 0.9 s for each."""
    jobs = [Job(sources.Source(name), name, tokens=1000) for name in ("a", "b")]
    with View(2, 0, 0, longest=100, shown=False) as view:
        jobs[0].running, jobs[1].running = [RunningCall(1000, "decoding", 1)], [RunningCall(1000, "reading", 1, 2)]
        clock.now = 50.0
        view.totals(jobs, [], 0.9)
        jobs[1].running[0] = RunningCall(1000, "decoding", 1)
        clock.now = 60.0
        view.totals(jobs, [], 0.9)
        jobs[0].running[0].done, jobs[1].running[0].done = 21, 11
        clock.now = 69.0
        assert ", at most 80 s left, " in view.totals(jobs, [], 0.9)
        del jobs[1]
        assert ", at most 36 s left, " in view.totals(jobs, [], 0.9)


def test_a_call_that_waits_on_a_cluster_counts_nothing(clock: Clock) -> None:
    job = Job(sources.Source("a"), "a", tokens=1000, running=[RunningCall(1000)])
    with View(2, 0, 0, longest=50, shown=False) as view:
        clock.now = 10.0
        assert view.totals([job], [], 0.0) == "0 of 2 documents, prompts 0 and answers 0 tokens/s"
        view.called(500, 50)
        view.finished({"status": "done"})
        totals = "1 of 2 documents, about 15 s left, prompts 50 and answers 5 tokens/s"
        assert view.totals([job], [], 0.5) == totals
