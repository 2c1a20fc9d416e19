"""Log-probabilities of answers and scores of texts, and the ranges of penalties."""

from __future__ import annotations

import math
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from conftest import Outcome

from quantspec_cli import Engine
from quantspec_cli.errors import DoesNotFitError, UsageError
from quantspec_cli.eval import SAMPLE
from quantspec_cli.model import Prompt

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Run = Callable[..., Outcome] if TYPE_CHECKING else Any

TEXT = SAMPLE.read_text(encoding="utf-8")[:1500]


def test_logprobs_are_those_of_the_text_whatever_drafts() -> None:
    found = []
    for method in ("quantspec", "ngram", "ar"):
        with Engine.load(context=700, method=method) as engine:
            # A stop string ends the answer inside a round; log-probabilities of the round's other tokens are not returned.
            answers = [
                engine.generate(TEXT, max_new_tokens=60, logprobs=3, no_repeat_ngram=5, stop=stop)
                for stop in ((), (" the",))
            ]
            assert engine.generate(TEXT, max_new_tokens=2).logprobs is None
            assert engine.generate(TEXT, max_new_tokens=2, logprobs=0).logprobs[1].top == []  # type: ignore[index]
        for answer in answers:
            assert answer.logprobs is not None
            assert [one.id for one in answer.logprobs] == answer.tokens
            for one in answer.logprobs:
                assert len(one.top) == 3
                assert [logprob for _, logprob in one.top] == sorted((logprob for _, logprob in one.top), reverse=True)
                assert one.logprob <= one.top[0][1] <= 0
        found.append(answers)
    assert found[0] == found[1] == found[2]


def test_logprobs_and_scores_are_one_distribution() -> None:
    with Engine.load(context=900, method="quantspec") as engine:
        prompt = engine.model.prompt("Once upon a time").ids
        answer = engine.generate(Prompt(prompt), max_new_tokens=300, logprobs=0, ignore_eos=True)
        scores = engine.score(Prompt(prompt + answer.tokens))
        assert scores.dtype == np.float64
        assert scores.shape == (len(prompt) + 299,)
        assert answer.logprobs is not None
        # Every token but the first comes from steps over the cache; the prompt is processed in full precision.
        reported = [one.logprob for one in answer.logprobs]
        assert np.abs(scores[len(prompt) - 1 :] - reported).max() < 0.2
        assert np.exp(scores).max() <= 1 + 1e-12
        # A score does not depend on other sequences, nor on the rows of a step.
    with Engine.load(context=900, method="ar") as plain:
        assert (plain.score(Prompt(prompt + answer.tokens)) == scores).all()


@pytest.mark.slow
def test_a_score_equals_that_of_eval(quantspec: Run, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    report = quantspec("eval", "-p", str(text), "--json").json
    for target in ("int8", "fp16"):
        with Engine.load(context=700, kv_target=target) as engine:
            assert -engine.score(TEXT).mean() == pytest.approx(report["targets"][target]["nll"], rel=1e-12)


def test_unscorable_texts_are_refused() -> None:
    with Engine.load(context=50) as engine:
        with pytest.raises(UsageError, match="the prompt has 1 token, and the first"):
            engine.score(Prompt([1]))
        with pytest.raises(UsageError, match="the text has 1 token, and the first"):
            engine.score("")
        with pytest.raises(UsageError, match="0 tokens"):
            engine.score(Prompt([]))
        with pytest.raises(UsageError, match="the text is 7"):
            engine.score(7)  # type: ignore[arg-type]
        with pytest.raises(DoesNotFitError, match="51 tokens"):
            engine.score(Prompt([1] * 51))
        # The slot is free again.
        assert engine.score(Prompt([1] * 50)).shape == (49,)


@pytest.mark.slow
def test_a_score_waits_for_a_slot_and_ends_with_its_caller() -> None:
    class Interrupted(KeyboardInterrupt):
        pass

    def interrupt(_number: int, _frame: Any) -> None:
        raise Interrupted

    with Engine.load(context=20_000) as engine:
        alone = engine.score(TEXT)
        stream = engine.stream("Once", max_new_tokens=200, ignore_eos=True)
        assert (engine.score(TEXT) == alone).all()
        assert stream.new_tokens == 200

        refused: list[str] = []

        def on_prefill(_done: int, _total: int) -> None:
            with pytest.raises(UsageError, match="a callback of an answer scores a text") as caught:
                engine.score(TEXT)
            refused.append(caught.value.message)

        engine.generate("Once", max_new_tokens=1, on_prefill=on_prefill)
        assert refused

        # It would take many seconds.
        previous = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(Interrupted):
                engine.score(Prompt([1] * 20_000))
            began = time.monotonic()
            engine.statistics()
            assert time.monotonic() - began < 2
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        assert (engine.score(TEXT) == alone).all()

        closing = threading.Timer(0.3, engine.close)
        closing.start()
        began = time.monotonic()
        with pytest.raises(UsageError, match="the engine is closed"):
            engine.score(Prompt([1] * 20_000))
        closing.join()
        assert time.monotonic() - began < 2


def test_logprobs_in_json(quantspec: Run) -> None:
    command = ["run", "--text", "Once upon a time", "-n", "5", "--logprobs", "2"]
    (result,) = quantspec(*command, "--json").json["results"]
    content = result["logprobs"]["content"]
    assert [one["id"] for one in content] == result["tokens"]
    assert "".join(one["token"] for one in content) == result["text"]
    for one in content:
        assert one["top_logprobs"][0] == {name: one[name] for name in ("id", "token", "logprob")}
        assert len(one["top_logprobs"]) == 2
        assert math.exp(one["top_logprobs"][1]["logprob"]) < math.exp(one["logprob"]) < 1
    assert "logprobs" not in quantspec(*command[:-2], "--json").json["results"][0]
    quantspec(*command).assert_error(2, "--logprobs without --json", "add --json")


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--repetition-penalty", "0", ("--repetition-penalty is 0.0", "0.01 to 100")),
        ("--repetition-penalty", "inf", ("--repetition-penalty is inf",)),
        ("--repeat-penalty", "nan", ("--repetition-penalty is nan",)),
        ("--frequency-penalty", "2.5", ("--frequency-penalty is 2.5", "-2 to 2")),
        ("--presence-penalty", "-3", ("--presence-penalty is -3.0", "-2 to 2")),
        ("--no-repeat-ngram", "1", ("--no-repeat-ngram is 1", "2 to 100")),
        ("--no-repeat-ngram", "101", ("--no-repeat-ngram is 101",)),
        ("--no-repeat-ngram-size", "-1", ("--no-repeat-ngram is -1",)),
        ("--logprobs", "21", ("--logprobs is 21", "0 to 20")),
        ("--logprobs", "-1", ("--logprobs is -1",)),
    ],
)
def test_values_out_of_range_are_usage_errors(
    fake: Any, quantspec: Run, flag: str, value: str, words: tuple[str, ...]
) -> None:
    outcome = quantspec("run", "--text", "Once", flag, value, "--json")
    assert outcome.code == 2
    message = outcome.stdout + outcome.stderr
    for word in words:
        assert word in message, message
