"""The native engine with callbacks and signals: one call at a time, and no deadlock."""

from __future__ import annotations

import functools
import gc
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from conftest import tool

from quantspec_cli import Engine, _native, hub, options, predict

ROOT = Path(__file__).parents[1]
SAMPLING: dict[str, Any] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}


def opened(**options: Any) -> Any:
    return _native.Engine(str(hub.demo()), capacity=1200, device="cpu", threads=1, **options)


def first(engine: Any, prompt: list[int]) -> int:
    """The first new token of a prompt."""
    token: int = engine.prefill(engine.add(prompt, max_new_tokens=1, **SAMPLING))
    return token


def test_constants_of_python_are_those_of_rust() -> None:
    assert (options.GAMMA_MAX, options.NGRAM_MAX) == (_native.GAMMA_MAX, _native.NGRAM_MAX)
    assert list(options.SENSITIVE) == _native.SENSITIVE
    assert options.BATCH_MAX == _native.STEP_ROWS_MAX // (_native.GAMMA_MAX + 1)
    assert (predict.GAMMA_MOST, list(predict.PAGES)) == (_native.GAMMA_AUTO, _native.PAGES_AUTO)


def test_a_call_during_another_one_is_an_error() -> None:
    engine = opened()
    slot = engine.add([1] * 600, max_new_tokens=4, **SAMPLING)
    calls: list[int] = []
    found: list[BaseException] = []

    def ask(done: int, _total: int) -> None:
        calls.append(done)
        with pytest.raises(_native.NativeError, match="called during another call") as caught:
            engine.stats()
        found.append(caught.value)
        thread = threading.Thread(target=ask_elsewhere)
        thread.start()
        thread.join(60)

    def ask_elsewhere() -> None:
        with pytest.raises(_native.NativeError, match="called during another call") as caught:
            engine.finish(slot)
        found.append(caught.value)

    engine.prefill(slot, ask)
    assert calls
    assert [error.kind for error in found] == ["usage"] * 2 * len(calls)  # type: ignore[attr-defined]
    # The engine is as it was.
    engine.draft([(slot, 1)])
    assert engine.verify()


@pytest.mark.parametrize("sampling", [SAMPLING, {**SAMPLING, "temperature": 0.8}])
def test_a_round_tells_what_was_drafted(sampling: dict[str, Any]) -> None:
    engine = opened(gamma=4)
    slot = engine.add([1, 2, 3] * 200, max_new_tokens=60, **sampling)
    engine.prefill(slot)
    accepted = []
    for _ in range(10):
        engine.draft([(slot, 4)])
        ((of, tokens, drafted),) = engine.verify_with_drafts()
        accepted.append(len(tokens) - 1)
        assert (of, len(drafted), drafted[: accepted[-1]]) == (slot, 4, tokens[:-1])
        # Greedy and replay reject a token because the target chooses another.
        assert accepted[-1] == 4 or drafted[accepted[-1]] != tokens[-1]
    assert 0 < sum(accepted) < 40
    assert engine.stats()["accepted_tokens"] == sum(accepted)


def test_the_tool_that_shows_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = tmp_path / "a.txt"
    # Verification rejects some drafts of this prose on every SIMD path.
    document.write_text((ROOT / "examples" / "dracula.txt").read_text()[:600])
    main = tool("rounds").main
    assert main([str(document), "-n", "120", "--gamma", "6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [str(number) for number in range(1, len(lines) + 1)]
    rejected = [line for line in lines if " | drafted " in line]
    assert 0 < len(rejected) < len(lines)
    assert all("(rank 1)" not in line for line in rejected), "greedy text has the most likely tokens"
    assert main([str(tmp_path / "b.txt")]) == 1
    assert main([str(document), "--method", "ar", "--gamma", "3"]) == 2
    assert main([str(document), "-n", "999999"]) == 3
    assert [line.split()[0] for line in capsys.readouterr().err.splitlines()] == ["error:", "hint:"] * 3


def test_options_are_read_by_name() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'slot'"):
        opened(slot=2)
    with pytest.raises(TypeError, match="capacity"):
        _native.plan(str(hub.demo()), device="cpu")  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        opened(slots="2")
    with pytest.raises(_native.NativeError, match="page_choice is"):
        opened(page_choice="worst")


def test_a_prompt_longer_than_was_planned_for() -> None:
    engine = opened(prompt_capacity=100)
    with pytest.raises(_native.NativeError, match="101 tokens") as caught:
        engine.add([1] * 101, max_new_tokens=1, **SAMPLING)
    assert caught.value.kind == "does_not_fit"  # type: ignore[attr-defined]
    assert first(engine, [1] * 100) == first(opened(), [1] * 100)


def test_a_grammar_that_fails_after_a_round_ends_its_answer() -> None:
    class Grammar:
        """Allows everything, until it is told of a second round."""

        told = 0

        def mask(self, _drafted: list[int]) -> bytes | None:
            return None

        def advance(self, _tokens: list[int]) -> None:
            self.told += 1
            if self.told == 2:
                raise Ended("advance")

    engine = opened()
    slot = engine.add([1, 2, 3], max_new_tokens=20, grammar=Grammar(), **SAMPLING)
    engine.prefill(slot)
    engine.draft([(slot, 0)])
    with pytest.raises(Ended):
        engine.verify()


def test_an_exception_of_the_last_callback_reaches_its_own_caller() -> None:
    engine = opened(slots=2)

    def interrupt(done: int, total: int) -> None:
        if done == total:
            raise KeyboardInterrupt

    slots = [engine.add([1, 2, 3, 4], max_new_tokens=4, **SAMPLING) for _ in range(2)]
    with pytest.raises(KeyboardInterrupt):
        engine.prefill(slots[0], interrupt)
    engine.finish(slots[0])
    assert engine.prefill(slots[1]) == first(opened(), [1, 2, 3, 4])
    engine.draft([(slots[1], 1)])
    assert engine.verify()


class Ended(Exception):  # noqa: N818
    """Raised by handlers of these tests, with the number of the signal."""


def end(number: int, _frame: FrameType | None) -> None:
    raise Ended(number)


class Ender:
    """A handler that is an object, or a method of one."""

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        raise Ended(number)

    def end(self, number: int, _frame: FrameType | None) -> None:
        raise Ended(number)


def end_of(_what: str, number: int, _frame: FrameType | None) -> None:
    end(number, _frame)


@contextmanager
def handled(number: int, handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Installs a signal handler while the body runs."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(number, before)


def test_an_exception_of_a_signal_handler_ends_work() -> None:
    # Seconds of work without a callback, and an early signal.
    with handled(signal.SIGALRM, end), pytest.raises(Ended) as caught:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        _native.evaluate(str(hub.demo()), [1, 2, 3] * 600, device="cpu", threads=1)
    assert caught.value.args == (signal.SIGALRM,)
    # The traceback shows where it was raised.
    assert [entry.name for entry in caught.traceback][-1] == "end"


@pytest.mark.parametrize("handler", [end, Ender(), Ender().end, functools.partial(end_of, "the call")])
def test_an_exception_of_a_signal_handler_inside_a_callback_ends_work(
    handler: Callable[[int, FrameType | None], object],
) -> None:
    engine = opened()
    slot = engine.add([1] * 1100, max_new_tokens=4, **SAMPLING)
    calls: list[int] = []

    def show(done: int, _total: int) -> None:
        calls.append(done)
        signal.raise_signal(signal.SIGALRM)

    with handled(signal.SIGALRM, handler), pytest.raises(Ended):
        engine.prefill(slot, show)
    assert len(calls) == 1
    engine.finish(slot)
    # No part of the exception is left for the next caller.
    assert first(engine, [1] * 100) == first(opened(), [1] * 100)
    with handled(signal.SIGALRM, handler), pytest.raises(Ended):
        opened(on_loading=show)


def test_a_callback_may_end_the_program_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened()
    slot = engine.add([1] * 300, max_new_tokens=4, **SAMPLING)
    reported: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)

    def fail(_done: int, _total: int) -> None:
        raise TimeoutError

    assert engine.prefill(slot, fail) == first(opened(), [1] * 300)
    assert reported
    assert {one.exc_type for one in reported} == {TimeoutError}
    engine.finish(slot)
    slot = engine.add([1] * 300, max_new_tokens=4, **SAMPLING)
    with pytest.raises(SystemExit):
        engine.prefill(slot, lambda *_: sys.exit(7))


@pytest.mark.slow
def test_a_callback_that_raises_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)

    def fail(_done: int, _total: int) -> None:
        raise TimeoutError

    text = "The rain fell in torrents. " * 700
    with Engine.load(context=8192, device="cpu", threads=1) as engine:
        assert engine.generate(text, max_new_tokens=1, on_prefill=fail).stop_reason == "length"
    assert [one.exc_type for one in reported] == [TimeoutError]


class Shown:
    """A callback that refers to its own engine."""

    engine: Any

    def __call__(self, _done: int, _total: int) -> None:
        pass


def test_an_engine_and_its_loading_callback_do_not_keep_each_other_alive() -> None:
    shown = Shown()
    shown.engine = opened(on_loading=shown)
    left = weakref.ref(shown)
    del shown
    gc.collect()
    assert left() is None
