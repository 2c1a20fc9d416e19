"""`--long map-reduce`: a document beyond the context, answered in parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome, lines
from hypothesis import given
from hypothesis import strategies as st

from quantspec_cli import batch_plan, batch_view, engine, journal, mapreduce, sources, tokenizer
from quantspec_cli.engine import Generation
from quantspec_cli.errors import DoesNotFitError, FileError

Run = Callable[..., Outcome]


def test_map_reduce_answers_what_is_beyond_the_context(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    (docs / "long.txt").write_text("\n\n".join(f"Paragraph {number}. " + "word " * 50 for number in range(60)))
    out = tmp_path / "out"
    command = ["batch", str(docs), "--out", str(out), "-n", "20", "-c", "700", "--instruction", "Sum up.", "--json"]
    assert quantspec(*command).json["failed"] == 1
    outcome = quantspec(*command, "--long", "map-reduce")
    assert outcome.code == 0, outcome
    (result,) = [result for result in lines(out) if result["document"] == "long.txt"]
    tree = result["tree"]
    assert len(tree["parts"]) > 1

    def count(node: dict[str, Any]) -> int:
        assert node["prompt_tokens"] <= 680
        return 1 + sum(count(part) for part in node.get("parts", []))

    assert result["calls"] == count(tree)
    assert (out / "long.txt.md").read_text() == tree["text"] + "\n"
    assert all("tree" not in other for other in lines(out) if other["document"] != "long.txt")


def test_an_interrupted_document_continues_after_its_last_call(
    fake: Any, quantspec: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "long.txt").write_text("\n\n".join(f"Paragraph {number}. " + "word " * 50 for number in range(60)))
    calls: list[int] = []
    start = engine.Engine.start

    def counted(self: Any, prompts: Any, options: Any, **others: Any) -> Any:
        calls.append(len(prompts))
        return start(self, prompts, options, **others)

    monkeypatch.setattr(engine.Engine, "start", counted)

    def run(out: str, *flags: str) -> tuple[int, Any]:
        calls.clear()
        command = ["batch", str(tmp_path / "long.txt"), "--out", str(tmp_path / out), "-n", "20", "-c", "700", "--json"]
        report = quantspec(*command, "--long", "map-reduce", "--instruction", "Sum up.", *flags).json
        for result in report["results"]:
            del result["seconds"]
        return len(calls), report

    def failing(after: int, *flags: str) -> int:
        fake.fail, fake.fail_after = ("device", "the device fell off", "plug it in"), after
        made, report = run("out", *flags)
        fake.fail = None
        assert report["error"]["kind"] == "device"
        assert report["results"] == []
        return made

    whole, calm = run("calm")
    in_map = failing(30)
    assert 2 < in_map < whole
    assert failing(0, "--seed", "1", "--temperature", "1") == 1, "other options give other answers"
    made, report = run("out")
    assert made == whole - (in_map - 1)
    assert report["results"] == calm["results"]
    # Nothing is kept of a finished document, and --no-resume begins again.
    assert run("out", "--no-resume")[0] == whole
    failing(30, "--no-resume")
    assert run("out", "--no-resume")[0] == whole


def test_a_call_that_cannot_be_kept_is_no_failure(
    fake: Any, quantspec: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise FileError("the journal cannot be used: disk is full", "free some space")

    monkeypatch.setattr(journal.Journal, "keep_call", full)
    (tmp_path / "long.txt").write_text("word " * 2000)
    command = ["batch", str(tmp_path / "long.txt"), "--out", str(tmp_path / "out"), "-n", "20", "-c", "700"]
    assert quantspec(*command, "--long", "map-reduce", "--instruction", "Sum up.").code == 0


def test_the_time_left_counts_all_calls_of_a_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """A document in ten parts was answered in 100 s; the next one is half as long."""
    now = 50.0
    monkeypatch.setattr(batch_view.time, "perf_counter", lambda: now)
    parts = [{"prompt_tokens": 1000, "new_tokens": 50} for _ in range(10)]
    result = {"status": "done", "prompt_tokens": 500, "new_tokens": 50}
    with batch_view.View(3, 0, 1, shown=False) as view:
        view.finished({**result, "tree": {**result, "parts": parts}})
        now = 150.0
        job = batch_plan.Job(sources.Source("b"), "b.md", tokens=5250)
        totals = "2 of 3 documents, 1 failed, prompts 105 and answers 5.5 tokens/s, about 50 s left"
        assert view.totals([], [job]) == totals
        # Two parts are done, and half of the third one is read.
        job.stage, job.done, job.total, job.call_tokens, job.read_tokens = "reading", 1, 2, 1000, 2000
        assert view.totals([job], []).endswith("about 21 s left")
        # All is read, and the answer grows.
        job.stage, job.read_tokens = "decoding", 4250
        assert "left" not in view.totals([job], [])
        # All calls of the next document are of an earlier run.
        view.finished({**result, "prompt_tokens": 4250})
        before = view.totals([], [])
        view.known(1000, 50)
        view.finished({**result, "prompt_tokens": 1000})
        assert view.totals([], []) == before.replace("3 of 3", "4 of 3")


def test_a_text_beyond_the_context_can_be_planned(fake: Any, quantspec: Run, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "long.txt").write_text("word " * 140_000)
    command = ["batch", str(docs), "--out", str(tmp_path / "out"), "--instruction", "Sum up.", "--long", "map-reduce"]
    dry = [*command, "--dry-run", "--json"]
    # Longer than the model's context, too.
    plan = quantspec(*dry, "-n", "300").json
    assert plan["results"][0]["prompt_tokens"] > 131_072 > plan["results"][0]["new_tokens"]
    assert plan["predicted_s"] > 0
    (docs / "long.txt").write_text("word " * 1000)
    planned = quantspec(*dry, "-n", "20", "-c", "700").json["results"][0]
    (done,) = quantspec(*command, "--json", "-n", "20", "-c", "700", "--ignore-eos").json["results"]
    assert planned["new_tokens"] == 20 * done["calls"]
    # An answer that leaves no room for any prompt.
    for found in (quantspec(*dry, "-n", "697", "-c", "700"), quantspec(*command, "--json", "-n", "697", "-c", "700")):
        (error,) = [row["error"] for row in found.json["results"]]
        assert "the context leaves 3" in error["message"]


def words(text: str) -> int:
    return 3 + len(text.split())


def test_adding_map_reduce_repeats_no_answer(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    (docs / "long.txt").write_text("\n\n".join(f"Paragraph {number}. " + "word " * 50 for number in range(60)))
    command = ["batch", str(docs), "--out", str(tmp_path / "out"), "-n", "20", "--instruction", "Sum up.", "--json"]

    def counts(*flags: str) -> tuple[int, int, int]:
        report = quantspec(*command, *flags).json
        return report["done"], report["skipped"], report["failed"]

    split = ("--long", "map-reduce")
    assert counts("-c", "700") == (3, 0, 1)
    assert counts("-c", "700", *split) == (1, 3, 0)
    # An answer in parts depends on their size, the others do not.
    assert counts("-c", "700", *split) == (0, 4, 0)
    assert counts("-c", "900", *split) == (1, 3, 0)
    # Without the flag its document is beyond the context.
    assert counts("-c", "900") == (0, 3, 1)


@given(st.lists(st.sampled_from(["word", "a", "\n\n", "\n", ". ", " ", "x" * 40]), max_size=200), st.integers(8, 60))
def test_parts_of_a_long_text_are_the_text(pieces: list[str], budget: int) -> None:
    text = " ".join(pieces)
    parts = mapreduce.split("it", text, budget, words)
    assert "".join(parts) == text
    assert all(words(part) <= budget for part in parts)


def test_a_long_text_that_fits_is_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapreduce, "COUNTED_CHARACTERS", 100)
    assert mapreduce.split("it", "word " * 100, 200, words) == ["word " * 100]


def test_a_part_without_text_is_not_asked_about() -> None:
    def count(text: str) -> int:
        return len(text)

    asked: list[str] = []

    def call(text: str) -> Generation:
        asked.append(text)
        return Generation(1, [1], "short", "eos")

    mapreduce.answer("it", "word " * 20 + "\n" * 300 + "word " * 20, budget=100, count=count, call=call)
    assert len(asked) > 2
    assert not any(text.isspace() for text in asked)


def test_partial_answers_are_reduced_as_often_as_needed() -> None:
    calls: list[str] = []

    def call(text: str) -> Generation:
        calls.append(text)
        return Generation(words(text), [1], f"answer {len(calls)}", "eos")

    tree = mapreduce.answer("it", "word " * 2000, budget=30, count=words, call=call)
    assert tree.count() == len(calls)
    depth, node = 0, tree
    while node.parts:
        depth, node = depth + 1, node.parts[0]
    assert depth >= 3
    with pytest.raises(DoesNotFitError, match="two partial answers"):
        mapreduce.answer(
            "it", "word " * 100, budget=30, count=words, call=lambda _: Generation(1, [1], "long " * 20, "length")
        )
    with pytest.raises(DoesNotFitError, match="one character"):
        mapreduce.split("it", "word " * 10, 5, lambda text: 6 + len(text))


def test_a_huge_document_is_counted_in_pieces(
    fake: Any, quantspec: Run, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapreduce, "COUNTED_CHARACTERS", 500)
    (docs / "long.txt").write_text("word " * 1000)
    encode, longest = tokenizer.Tokenizer.encode_all, []

    def seen(self: Any, texts: Any, **options: Any) -> Any:
        longest.extend(map(len, texts))
        return encode(self, texts, **options)

    monkeypatch.setattr(tokenizer.Tokenizer, "encode_all", seen)
    command = ["batch", str(docs), "--out", str(tmp_path / "out"), "-n", "3", "--instruction", "Sum up.", "--dry-run"]
    plain = {row["document"]: row["prompt_tokens"] for row in quantspec(*command, "--json").json["results"]}
    assert max(longest) > 5000
    longest.clear()
    report = quantspec(*command, "--long", "map-reduce", "--json").json
    assert max(longest) < 600
    pieces = {row["document"]: row["prompt_tokens"] for row in report["results"]}
    assert plain["long.txt"] < pieces.pop("long.txt") < 2 * plain.pop("long.txt")
    assert pieces == plain
