"""The native engine's `configure`, `restart` and `prefill_timed`, on which repetitions of `bench` rely."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from typing import Any

import pytest

from quantspec_cli import _native, hub
from quantspec_cli.bench import grid
from quantspec_cli.model import Model
from quantspec_cli.options import METHODS, EngineOptions

SAMPLING: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@pytest.fixture(scope="module")
def engine() -> Any:
    return _native.Engine(str(hub.demo()), capacity=1200, kv_target="fp16", every_method=True, threads=2)


def test_an_engine_keeps_an_fp16_cache_only_if_a_method_reads_it() -> None:
    small = _native.Engine(str(hub.demo()), capacity=1200, every_method=True, threads=2)
    small.configure(method="kv4", kv_target="int8")
    with pytest.raises(_native.NativeError, match="keeps no cache in FP16"):
        small.configure(method="ar", kv_target="fp16")
    peaks: list[int] = []
    for methods, target in (("ar-int8,quantspec", "int8"), ("quantspec,w4-fp16", "fp16")):
        of = grid.Grid([0], [4], [8000], [1], grid.variants(methods, ["auto"], ["all"]))
        options = grid.engine_options(of, EngineOptions(device="cpu"))
        assert options["kv_target"] == target
        peaks.append(_native.planned(str(hub.demo()), **options))
    # Of 8,000 tokens: 6 layers, 2 KV heads, 128 channels, keys and values of two bytes.
    assert peaks[1] - peaks[0] > 8000 * 6 * 2 * 128 * 2 * 2 * 0.95


def ids(count: int) -> list[int]:
    return Model.open(None).tokenizer.encode(gzip.decompress(grid.BOOK.read_bytes()).decode())[:count]


def decode(engine: Any, slot: int, tokens: int) -> list[int]:
    found: list[int] = []
    while len(found) < tokens:
        engine.draft([(slot, engine.choose_gamma(slot))])
        found += engine.verify()[0][1]
    return found


@pytest.mark.slow
def test_a_restarted_answer_is_the_answer(engine: Any) -> None:
    prompt = ids(300)
    engine.configure(method="ar")
    slot = engine.add(prompt, seed=5, max_new_tokens=61, **SAMPLING)
    first = engine.prefill(slot)
    plain = decode(engine, slot, 60)
    for number, method in enumerate(name for name, method in METHODS.items() if not method.draft_model):
        engine.configure(method=method, gamma=1 + number % 8)
        assert engine.stats()["rounds"] == 0
        assert engine.restart(slot, first, seed=5, **SAMPLING)
        assert decode(engine, slot, 60) == plain, method
    # Another seed gives another text; another target mostly another text; then the first again.
    assert engine.restart(slot, first, seed=6, **SAMPLING)
    assert decode(engine, slot, 60) != plain
    engine.configure(method="ar", kv_target="int4")
    assert engine.restart(slot, first, seed=5, **SAMPLING)
    decode(engine, slot, 60)
    engine.configure(method="quantspec", gamma=2)
    assert engine.restart(slot, first, seed=5, **SAMPLING)
    assert decode(engine, slot, 60) == plain
    engine.finish(slot)


@pytest.mark.slow
@pytest.mark.parametrize(("prompt_tokens", "kept"), [(256, 256), (255, 129), (300, 212), (20, 364)])
def test_restarting_needs_the_buffer(engine: Any, prompt_tokens: int, kept: int) -> None:
    """The buffer holds 384 positions, and a query right after the prompt reads back to Q(prompt)."""
    for tokens, possible in ((kept, True), (kept + 1, False)):
        engine.configure(method="ar")
        # The last emitted token is never fed: one more token than positions written.
        slot = engine.add(ids(prompt_tokens), seed=1, max_new_tokens=tokens + 1, **SAMPLING)
        first = engine.prefill(slot)
        plain = decode(engine, slot, tokens)
        assert engine.restart(slot, first, seed=1, **SAMPLING) is possible
        if possible:
            assert decode(engine, slot, tokens) == plain
        engine.finish(slot)


def test_restarts_that_are_refused(engine: Any) -> None:
    def refused(word: str, work: Callable[[], object]) -> None:
        with pytest.raises(_native.NativeError, match=word):
            work()

    engine.configure(method="ar")
    slot = engine.add(ids(10), seed=1, max_new_tokens=5, **SAMPLING)
    refused("not prefilled", lambda: engine.restart(slot, 5, seed=1, **SAMPLING))
    engine.prefill(slot)
    refused("8192", lambda: engine.restart(slot, 8192, seed=1, **SAMPLING))
    refused("slot 7", lambda: engine.restart(7, 5, seed=1, **SAMPLING))
    engine.finish(slot)
    ordinary = _native.Engine(str(hub.demo()), capacity=20)
    refused("one method", lambda: ordinary.configure(method="ar"))


def test_a_draft_model_begins_in_the_middle_of_an_answer() -> None:
    model = str(hub.demo())
    sizes: dict[str, Any] = {"capacity": 500, "prompt_capacity": 256, "threads": 2, "every_method": True}
    engine = _native.Engine(model, draft_model=model, **sizes)
    texts = {}
    for method in ("ar", "draft-model"):
        engine.configure(method="ar")
        slot = engine.add(ids(250), max_new_tokens=100, seed=1, **SAMPLING)
        texts[method] = [engine.prefill(slot), *decode(engine, slot, 60)]
        # The text is longer than any prompt by now.
        engine.configure(method=method, gamma=3)
        texts[method] += decode(engine, slot, 20)[:20]
        engine.finish(slot)
    assert texts["ar"] == texts["draft-model"]
    assert engine.stats()["accepted_tokens"] > 10


def test_a_step_has_a_limited_number_of_rows() -> None:
    for slots in (1 << 16, 1 << 62):
        with pytest.raises(_native.NativeError, match=f"{slots} slots"):
            _native.Engine(str(hub.demo()), capacity=20, slots=slots, gamma=1)


@pytest.mark.slow
def test_rows_at_a_depth_are_part_of_the_prefill(engine: Any) -> None:
    prompt = ids(1000)
    seconds = dict.fromkeys((0, 500, 936, 1000), float("inf"))
    share = 0.0
    # The minimum of several repetitions: a busy machine may delay some, but not make all parts faster.
    for _ in range(4):
        for start in seconds:
            engine.configure(method="ar")
            slot = engine.add(prompt, seed=1, max_new_tokens=1, **SAMPLING)
            _, took = engine.prefill_timed(slot, start)
            whole = engine.stats()["prefill_s"]
            assert 0 < took <= whole
            seconds[start] = min(seconds[start], took)
            if start == 0:
                share = max(share, took / whole)
            engine.finish(slot)
    assert share > 0.9
    # The last 64 of 1,000 rows cannot take half the time.
    assert seconds[1000] < seconds[936] < 0.5 * seconds[0]
    assert seconds[936] < seconds[500] < seconds[0]
