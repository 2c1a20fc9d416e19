"""The self-test compares what it reports, passes on a correct engine, and detects a single wrong token."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import fake_native
import pytest
from conftest import DEMO, Outcome, copy_demo

from quantspec_cli.model import Model
from quantspec_cli.options import COMBINED, METHODS
from quantspec_cli.selftest import FEW, GAMMAS, LENGTHS, cut_prompts, first_difference

Run = Callable[..., Outcome]

DRAFTING = {name for name, method in METHODS.items() if method.drafts and not method.draft_model}


def test_prompts_end_at_the_borders_and_differ(fake: Any) -> None:
    prompts = cut_prompts(Model.open(None))
    assert [len(prompt) for prompt in prompts] == list(LENGTHS)
    assert len({tuple(prompt[:127]) for prompt in prompts}) == len(LENGTHS)
    assert {prompt[0] for prompt in prompts} == {1}


def test_one_engine_is_loaded_at_a_time(fake: Any, quantspec: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    load, loaded = fake_native.Engine.__init__, []

    def counted(self: fake_native.Engine, *arguments: Any, **options: Any) -> None:
        assert not any(engine() for engine in loaded), "two may not fit"
        loaded.append(weakref.ref(self))
        load(self, *arguments, **options)

    monkeypatch.setattr(fake_native.Engine, "__init__", counted)
    assert quantspec("selftest").code == 0
    assert len(loaded) > len(DRAFTING)


def test_a_sound_engine_passes(fake: Any, quantspec: Run) -> None:
    report = quantspec("selftest", "--json").json
    assert report["passed"] is True
    cases = report["cases"]
    assert report["compared_tokens"] == sum(case["tokens"] for case in cases) > 20_000
    assert all(case["equal"] for case in cases)
    for method in DRAFTING:
        gammas = {case["gamma"] for case in cases if case["method"] == method and case["batch"] == 4}
        assert gammas == set(FEW if method in COMBINED or METHODS[method].chooses else GAMMAS)
    assert {case["method"] for case in cases} == DRAFTING
    assert {case["gamma"] for case in cases} == {*GAMMAS, "auto"}
    assert {(case["accept"], case["batch"]) for case in cases if case["gamma"] == "auto"} == {
        ("greedy", 1),
        ("replay", 1),
    }
    assert {case["accept"] for case in cases} == {"greedy", "replay"}
    assert {case["batch"] for case in cases} == {1, 4}
    assert {case["draft_pages"] for case in cases} == {"all", "auto", 2}
    assert {case["threads"] for case in cases} == {None, 1}
    text = quantspec("selftest")
    assert (text.code, text.stderr) == (0, "")
    assert text.stdout.splitlines()[-1].startswith("passed: ")
    assert len(text.stdout.splitlines()) == len(cases) + 2
    assert f": {len(cases)} comparisons, prompts of 127, " in text.stdout.splitlines()[0]
    assert text.stdout.splitlines()[-2].startswith(f"{len(cases)}/{len(cases)} auto ")
    assert "quantspec       2 pages (best), " in text.stdout
    assert "quantspec       2 pages (window), " in text.stdout


def test_a_draft_model_adds_the_cases_of_its_methods(fake: Any, quantspec: Run) -> None:
    report = quantspec("selftest", "--json", "--draft-model", str(DEMO)).json
    assert report["passed"] is True
    assert {case["method"] for case in report["cases"]} == {name for name, method in METHODS.items() if method.drafts}


def test_more_threads_than_processors_are_pointed_out(fake: Any, quantspec: Run) -> None:
    outcome = quantspec("selftest", "--threads", "4000")
    assert outcome.code == 0
    assert outcome.stderr.startswith("warning: 4000 threads on")


PLACES = [0, 1, 57, 135]
# One method with every place, and every other method with a place: tokens of all methods are compared by the same lines.
WRONG = [("quantspec", place) for place in PLACES] + list(
    zip(sorted(DRAFTING - {"quantspec"}), itertools.cycle(PLACES), strict=False)
)


@pytest.mark.parametrize(("method", "place"), WRONG)
def test_one_wrong_token_fails(fake: Any, quantspec: Run, method: str, place: int) -> None:
    fake.corrupt = (method, place)
    outcome = quantspec("selftest")
    assert outcome.code == 1
    last = outcome.stdout.splitlines()[-1]
    assert last.startswith(f"failed: {method}")
    assert f"new token {place}:" in last
    report = quantspec("selftest", "--json")
    assert (report.code, report.json["passed"]) == (1, False)
    assert [case["equal"] for case in report.json["cases"]].count(False) == 1
    assert report.json["cases"][-1]["method"] == method


def test_a_missing_token_is_a_difference() -> None:
    assert first_difference([5], [[1, 2]], [[1, 2]]) is None
    assert "new token 1: [2] expected, [] decoded" in (first_difference([5], [[1, 2]], [[1]]) or "")
    assert "new token 2: [] expected, [3] decoded" in (first_difference([5], [[1, 2]], [[1, 2, 3]]) or "")


def test_a_short_context_leaves_out_long_prompts(fake: Any, quantspec: Run, tmp_path: Any) -> None:
    short = copy_demo(tmp_path / "short", max_position_embeddings=512)
    report = quantspec("selftest", "--json", "--model", str(short)).json
    assert report["passed"]
    own = {name for name, method in METHODS.items() if method.pages}
    assert {case["draft_pages"] for case in report["cases"] if case["method"] not in own} == {"all", "auto"}
    assert {case["draft_pages"] for case in report["cases"] if case["method"] in own} == {2}
    tiny = copy_demo(tmp_path / "tiny", max_position_embeddings=128)
    quantspec("selftest", "--model", str(tiny)).assert_error(3, "128", "too short")


def test_interrupting_is_130(fake: Any, quantspec: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import quantspec_cli.selftest

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(quantspec_cli.selftest, "cut_prompts", interrupt)
    quantspec("selftest").assert_error(130, "interrupted")
