"""The native engine between threads and callbacks: one call at a time, and nobody waits for ever."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from quantspec_cli import _native, hub

SAMPLING: dict[str, Any] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}


def opened(**options: Any) -> Any:
    return _native.Engine(str(hub.demo()), capacity=1200, device="cpu", threads=1, **options)


def first(engine: Any, prompt: list[int]) -> int:
    """The first new token of a prompt."""
    token: int = engine.prefill(engine.add(prompt, max_new_tokens=1, **SAMPLING))
    return token


def test_a_callback_that_calls_the_engine_gets_an_error() -> None:
    engine = opened()
    slot = engine.add([1] * 600, max_new_tokens=4, **SAMPLING)
    found: list[BaseException] = []

    def ask(_done: int, _total: int) -> None:
        with pytest.raises(_native.NativeError, match="callback of its own") as caught:
            engine.stats()
        found.append(caught.value)

    engine.prefill(slot, ask)
    assert [error.kind for error in found] == ["usage"] * len(found)  # type: ignore[attr-defined]
    assert found
    # The engine is as it was.
    engine.draft([(slot, 1)])
    assert engine.verify()


def test_threads_take_turns() -> None:
    engine = opened(slots=2)
    slots = [engine.add([1, 2, 3 + index] * 300, max_new_tokens=4, **SAMPLING) for index in range(2)]
    firsts: dict[int, int] = {}

    def prefill(slot: int) -> None:
        firsts[slot] = engine.prefill(slot)

    threads = [threading.Thread(target=prefill, args=(slot,)) for slot in slots]
    for thread in threads:
        thread.start()
    # Asked while others are at work: every call waits for its turn without the GIL that their callbacks need.
    # Of four new tokens a round may draft three.
    assert all(engine.choose_gamma(slot) <= 3 for slot in slots)
    for thread in threads:
        thread.join(60)
    alone = opened()
    for index, slot in enumerate(slots):
        again = alone.add([1, 2, 3 + index] * 300, max_new_tokens=4, **SAMPLING)
        assert firsts[slot] == alone.prefill(again)
        alone.finish(again)


def test_a_prompt_longer_than_was_planned_for() -> None:
    engine = opened(prompt_capacity=100)
    with pytest.raises(_native.NativeError, match="101 tokens") as caught:
        engine.add([1] * 101, max_new_tokens=1, **SAMPLING)
    assert caught.value.kind == "does_not_fit"  # type: ignore[attr-defined]
    assert first(engine, [1] * 100) == first(opened(), [1] * 100)


def test_a_slot_is_freed_without_waiting_for_whoever_is_in_the_engine() -> None:
    engine = opened(slots=2)
    ended = engine.add([1, 2, 3], max_new_tokens=4, **SAMPLING)
    busy = engine.add([1] * 1100, max_new_tokens=4, **SAMPLING)
    done: list[int] = []
    inside, freed = threading.Event(), threading.Event()

    def show(rows: int, _total: int) -> None:
        done.append(rows)
        inside.set()
        # The prefill is under way as long as this waits.
        assert freed.wait(60)

    thread = threading.Thread(target=engine.prefill, args=(busy, show))
    thread.start()
    assert inside.wait(60)
    engine.finish(ended)
    freed.set()
    thread.join(60)
    # Freed by the next call, if not before.
    assert engine.add([4, 5], max_new_tokens=1, **SAMPLING) == ended


def test_what_the_last_callback_raises_is_its_own_callers() -> None:
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
