"""Requests whose prompts begin alike share pages: more of them decode at once, and no token changes."""

from __future__ import annotations

import threading
from typing import Any

import fake_native
import pytest

from quantspec_cli import Engine, _native, hub
from quantspec_cli.scheduler import Request, Scheduler
from quantspec_cli.text import Text

SAMPLING: dict[str, Any] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}
DOCUMENT = "It was a dark and stormy night; the rain fell in torrents. " * 40
QUESTIONS = ("Who is there?", "What is the weather like?", "When was it?", "Why?")


def answers(native: Any, slots: int, prompts: list[list[int]], new_tokens: int) -> tuple[list[list[int]], int]:
    """The tokens of every prompt's answer, and the most sequences in a round."""
    scheduler, ended = Scheduler(native, slots), threading.Semaphore(0)
    failures: list[BaseException] = []

    def deliver(piece: str | BaseException, last: bool) -> None:
        if isinstance(piece, BaseException):
            failures.append(piece)
        if last:
            ended.release()

    sampling = {**SAMPLING, "max_new_tokens": new_tokens}
    requests = [Request(ids, sampling, Text(lambda _: b"", limit=new_tokens), deliver) for ids in prompts]
    scheduler.start()
    scheduler.submit(requests)
    for _ in requests:
        assert ended.acquire(timeout=60)
    scheduler.stop()
    assert not failures
    return [request.text.tokens for request in requests], scheduler.most_sequences


@pytest.mark.slow
def test_sequences_that_fit_only_when_shared_decode_together() -> None:
    document = [1, *(3 + i * i % 300 for i in range(600))]
    prompts = [[*document, 7 + index, 9] for index in range(4)]
    # Five pages of the document and of one sequence after them; the others add one page each.
    pages = {"slots": 4, "pool_tokens": 10 * 128}

    def opened(**options: Any) -> Any:
        return _native.Engine(str(hub.demo()), capacity=800, device="cpu", threads=1, **options)

    alone = [answers(opened(), 1, [prompt], 120)[0][0] for prompt in prompts]
    engine = opened(**pages)
    assert answers(engine, 4, prompts, 120) == (alone, 4)
    assert engine.stats()["reserved_pages"] == 8, "five and three times one"
    others = [[5 + index, *prompt[1:]] for index, prompt in enumerate(prompts)]
    assert answers(opened(**pages), 4, others, 120)[1] == 2, "no page is shared, so two fit"


def test_a_waiting_request_is_tried_when_a_sequence_ends(fake: type[fake_native.Script]) -> None:
    fake.accepted = [0]
    native = fake_native.Engine(str(hub.demo()), capacity=512, slots=2, pool_tokens=512, threads=1, weights="auto")
    # Three of four pages each, so the second waits for as many rounds as the first has tokens.
    tokens, most = answers(native, 2, [[5] * 200, [6] * 200], 200)
    assert ([len(answer) for answer in tokens], most) == ([200, 200], 1)
    assert fake.room_asked == 1


def test_a_score_waits_for_pages_of_its_own() -> None:
    """It shares none, even with a sequence whose prompt is the same text."""
    ids = [1, *range(3, 300)]
    alone = _native.Engine(str(hub.demo()), capacity=400, device="cpu", threads=1).score(ids)
    # Three of four pages are the sequence's; the text needs two.
    scheduler = Scheduler(
        _native.Engine(str(hub.demo()), capacity=400, slots=2, pool_tokens=4 * 128, device="cpu", threads=1), 2
    )
    begun = threading.Event()
    sampling = {**SAMPLING, "max_new_tokens": 100}
    request = Request(ids, sampling, Text(lambda _: b"", limit=100), lambda _piece, _last: begun.set())
    scheduler.start()
    scheduler.submit([request])
    assert begun.wait(60)
    assert scheduler.score(ids) == alone
    assert len(request.text.tokens) == 100
    scheduler.stop()


@pytest.mark.parametrize("method", ["quantspec", "snapkv"])
def test_questions_about_one_document_have_the_answers_of_each_alone(method: str) -> None:
    prompts = [f"{DOCUMENT}\n\n{question}" for question in QUESTIONS]
    engine = Engine.load(method=method, context=1200, batch=4, device="cpu", threads=2)
    together = engine.generate_batch(prompts, max_new_tokens=30)
    alone = Engine.load(method=method, context=1200, device="cpu", threads=2, prompt_cache=False)
    assert together == [alone.generate(prompt, max_new_tokens=30) for prompt in prompts]
