"""`--long map-reduce`: a document beyond the context, answered in parts."""

from __future__ import annotations

import json
import os
import pty
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Child, Outcome, lines, rest_of
from hypothesis import given
from hypothesis import strategies as st

from quantspec_cli import batch_view, batch_work, engine, journal, mapreduce, sources, tokenizer
from quantspec_cli.errors import DoesNotFitError, FileError, InputError
from quantspec_cli.generation import Generation

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
    last = f"{result['calls']} calls, the last with {result['prompt_tokens']} prompt tokens, "
    assert f"done    long.txt: {last}{result['new_tokens']} new tokens (" in outcome.stderr
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
    kept, reused = [], []
    start, keep, find = engine.Engine.start, journal.Journal.keep_call, journal.Journal.kept_call

    def counted(self: Any, prompts: Any, options: Any, **others: Any) -> Any:
        calls.append(len(prompts))
        return start(self, prompts, options, **others)

    def keeping(*arguments: Any) -> None:
        kept.append(arguments)
        keep(*arguments)

    def finding(*arguments: Any) -> Any:
        found = find(*arguments)
        reused.extend([found] if found else [])
        return found

    monkeypatch.setattr(engine.Engine, "start", counted)
    monkeypatch.setattr(journal.Journal, "keep_call", keeping)
    monkeypatch.setattr(journal.Journal, "kept_call", finding)

    def run(out: str, *flags: str) -> tuple[int, Any]:
        for seen in (calls, kept, reused):
            seen.clear()
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
    begun = failing(8)
    done = len(kept)
    assert 0 < done < begun <= whole
    failing(0, "--seed", "1", "--temperature", "1")
    assert not reused, "other options give other answers"
    made, report = run("out")
    assert (made, len(reused)) == (whole - done, done)
    assert report["results"] == calm["results"]
    # Nothing is kept of a finished document, and --no-resume begins again.
    assert run("out", "--no-resume")[0] == whole
    failing(8, "--no-resume")
    assert run("out", "--no-resume")[0] == whole


SPLIT = ("--long", "map-reduce", "--instruction", "Sum up.", "-n", "20", "-c", "700")


def mixed(folder: Path) -> Path:
    """Two long documents and many short ones."""
    folder.mkdir()
    for number, paragraphs in enumerate((60, 25)):
        text = "\n\n".join(f"Paragraph {number} {place}. " + "word " * 50 for place in range(paragraphs))
        (folder / f"long{number}.txt").write_text(text)
    for number in range(12):
        (folder / f"{number}.txt").write_text(f"Document {number}. " * (1 + number))
    return folder


def results(report: Any) -> dict[str, str]:
    """The lines of results.jsonl by document, without their times."""
    return {result["document"]: json.dumps({**result, "seconds": 0}) for result in report["results"]}


@pytest.mark.slow
def test_parts_decode_together_and_change_nothing(
    fake: Any, quantspec: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = mixed(tmp_path / "docs")
    fake.round_s = 0.002
    alone = quantspec("batch", str(docs), "--out", str(tmp_path / "alone"), *SPLIT, "--json", "--parallel", "1").json
    assert (alone["done"], alone["stats"]["batch_peak"]) == (14, 1)
    start = engine.Engine.start

    def late(*arguments: Any, **options: Any) -> Any:
        time.sleep(random.random() * 0.01)
        return start(*arguments, **options)

    monkeypatch.setattr(engine.Engine, "start", late)
    for parallel in ("auto", "9"):
        found = quantspec(
            "batch", str(docs), "--out", str(tmp_path / parallel), *SPLIT, "--json", "--parallel", parallel
        )
        assert results(found.json) == results(alone)
    assert "quantspec-part" not in {thread.name for thread in threading.enumerate()}
    book = ["batch", str(docs / "long0.txt"), "--out", str(tmp_path / "book"), *SPLIT, "--json"]
    plan = quantspec(*book, "--dry-run", "--parallel", "4").json
    report = quantspec(*book, "--parallel", "4").json
    assert (plan["parallel"], fake.engines[-1]["slots"], report["stats"]["batch_peak"]) == (4, 4, 4)
    assert fake.engines[-1]["pool_tokens"] == plan["pool"] > 3 * 600
    assert quantspec(*book, "--dry-run", "--no-resume", "--parallel", "3").json["parallel"] == 3
    fake.memory_bytes = 1000 * 2 * 700
    tight = quantspec(*book, "--dry-run", "--no-resume").json
    assert (tight["pool"], tight["fits"]) == (10 * 128, True), "pages for two parts"
    (docs / "long0.txt").write_text("word " * 900)
    fake.memory_bytes = 10**12
    short = quantspec(*book, "--dry-run").json
    assert (short["new_tokens"], short["parallel"]) == (20 * 3, 2), "two parts, and the call for both answers"


def test_a_part_that_fails_fails_its_document_alone(fake: Any, quantspec: Run, tmp_path: Path) -> None:
    docs = mixed(tmp_path / "docs")
    command = ["batch", str(docs), *SPLIT, "--json", "--parallel", "2", "--out"]
    calm = quantspec(*command, str(tmp_path / "calm")).json
    book = next(result for result in calm["results"] if result["document"] == "long0.txt")
    fake.not_finite = book["tree"]["parts"][2]["prompt_tokens"]
    report = quantspec(*command, str(tmp_path / "out")).json
    failed = [result["document"] for result in report["results"] if result["status"] == "failed"]
    assert "long0.txt" in failed
    assert {result["error"]["kind"] for result in report["results"] if result["error"]} == {"not_finite"}
    assert report["done"] + len(failed) == 14
    assert "quantspec-part" not in {thread.name for thread in threading.enumerate()}
    fake.not_finite = None
    again = quantspec(*command, str(tmp_path / "out"), "--retry-failed").json
    assert results(again) == results(calm)


def test_a_partial_answer_that_was_cut_is_counted(fake: Any, quantspec: Run, tmp_path: Path) -> None:
    """The whole answer may end well without what was cut."""
    (tmp_path / "docs").mkdir()
    for number in range(8):
        (tmp_path / f"docs/{number}.txt").write_text("word " * (2600 + 13 * number))
    outcome = quantspec(
        "batch", str(tmp_path / "docs"), *SPLIT, "--stop", " a", "--json", "--out", str(tmp_path / "out")
    )
    trees = [[result["tree"], *result["tree"]["parts"]] for result in outcome.json["results"]]
    cut = [[call["stop_reason"] == "length" for call in tree] for tree in trees]
    last, partial = sum(last for last, *_ in cut), sum(any(partial) for _, *partial in cut)
    assert partial > last > 1
    assert f'{last} answers were cut at 20 tokens (-n): stop_reason "length" in results.jsonl\n' in outcome.stderr
    note = f'partial answers of {partial} documents were cut at 20 tokens (-n): see "tree" in results.jsonl\n'
    assert outcome.stderr.endswith(note)


def test_only_partial_answers_are_limited_to_a_quarter(fake: Any, quantspec: Run, tmp_path: Path) -> None:
    """The last answer gets what its prompt leaves, as the answer to a whole document does."""
    (tmp_path / "long.txt").write_text("word " * 1000)
    fake.answer = [45] * 1000
    command = ["batch", str(tmp_path / "long.txt"), *SPLIT[:4], "-c", "700", "--json", "--out", str(tmp_path / "out")]
    outcome = quantspec(*command)
    (result,) = outcome.json["results"]
    (most,) = {part["new_tokens"] for part in result["tree"]["parts"]}
    assert 165 < most < 175
    assert result["new_tokens"] == 256 < 700 - result["prompt_tokens"]
    assert "1 answer was cut at 256 tokens (-n): stop_reason" in outcome.stderr
    assert outcome.stderr.endswith(
        f'partial answers of 1 document were cut at {most} tokens: see "tree" in results.jsonl\n'
    )
    # Two partial answers leave less than the default.
    short = quantspec(*command, "-c", "500")
    (result,) = short.json["results"]
    assert result["new_tokens"] == 500 - result["prompt_tokens"] < 256
    assert max(part["new_tokens"] for part in result["tree"]["parts"]) < result["new_tokens"]
    assert "1 answer was cut at the end of the context: " in short.stderr
    fake.answer = [45, 2]
    assert "cut at" not in quantspec(*command, "--no-resume").stderr


def test_partial_answers_of_incomplete_json_are_counted(fake: Any, quantspec: Run, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("word " * 1000)
    (tmp_path / "schema.json").write_text('{"type": "array"}')
    command = ["batch", str(tmp_path / "long.txt"), *SPLIT, "--json-schema", str(tmp_path / "schema.json")]
    note = 'partial answers of 1 document were cut at 20 tokens (-n){}, so JSON is incomplete: see "tree" in results.jsonl\n'
    assert quantspec(*command, "--out", str(tmp_path / "a")).stderr.endswith(note.format(""))
    stopped = quantspec(*command, "--stop", "zzz", "--out", str(tmp_path / "b")).stderr
    assert stopped.endswith(note.format(" or a string of --stop"))


def test_a_kept_answer_has_the_limit_of_its_call(
    fake: Any, quantspec: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of an interrupted run may be the only one later, when its answer is the document's."""
    text = "word " * 500
    (tmp_path / "long.txt").write_text(text + "\n\n" + text)
    fake.answer = [45] * 1000
    with monkeypatch.context() as patch:
        patch.setattr(mapreduce, "split", lambda *_: [text, text + "."])
        fake.fail, fake.fail_after = ("device", "the device fell off", "plug it in"), 100
        command = ["batch", str(tmp_path / "long.txt"), *SPLIT[:4], "-c", "700", "--json", "--parallel", "1"]
        assert quantspec(*command, "--out", str(tmp_path / "out")).json["results"] == []
    fake.fail = None
    monkeypatch.setattr(mapreduce, "split", lambda *_: [text, "\n\n"])
    (result,) = quantspec(*command, "--out", str(tmp_path / "out")).json["results"]
    assert result["prompt_tokens"] + result["new_tokens"] == 700


MUTE = "mute "


@pytest.fixture
def mute(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Answers to prompts with this word are empty. Returns the texts of all prompts."""
    decode, prompts = batch_work.RunningCall.decode, list[str]()

    def decoded(self: Any, used: Any, prompt: Any, *others: Any) -> Generation:
        text = b"".join(map(used.model.tokenizer.token_bytes, prompt.ids)).decode()
        prompts.append(text)
        found = decode(self, used, prompt, *others)
        return replace(found, text="\n", tokens=[], stop_reason="eos") if MUTE in text else found

    monkeypatch.setattr(batch_work.RunningCall, "decode", decoded)
    return prompts


def test_empty_partial_answers_are_named(fake: Any, quantspec: Run, tmp_path: Path, mute: list[str]) -> None:
    (tmp_path / "long.txt").write_text("word " * 900 + MUTE + "word " * 1800)
    command = ["batch", str(tmp_path / "long.txt"), *SPLIT, "--out", str(tmp_path / "out")]
    outcome = quantspec(*command)
    assert outcome.code == 0
    (result,) = lines(tmp_path / "out")
    parts = result["tree"]["parts"]
    (empty,) = [number for number, part in enumerate(parts, 1) if part["text"] == "\n"]
    warning = f"part {empty} of {len(parts)} has an empty answer"
    assert result["warnings"] == [warning]
    assert outcome.stderr.count(f"warning: long.txt: {warning}\n") == 1
    assert result["calls"] == len(parts) + 1
    assert mute[-1].count("Part ") == len(parts) - 1
    # A run that skips the document repeats the warning.
    assert f"warning: long.txt: {warning}\n" in quantspec(*command).stderr


def test_a_document_of_empty_partial_answers_fails(fake: Any, quantspec: Run, tmp_path: Path, mute: list[str]) -> None:
    """The model would make up an answer to them."""
    (tmp_path / "long.txt").write_text((MUTE + "word ") * 1000)
    command = ["batch", str(tmp_path / "long.txt"), *SPLIT, "--json", "--out", str(tmp_path / "out")]
    outcome = quantspec(*command)
    (result,) = outcome.json["results"]
    assert (outcome.code, result["status"], result["error"]["kind"]) == (4, "failed", "input")
    assert re.fullmatch(r"long.txt: its \d partial answers are empty", result["error"]["message"])
    assert result["error"]["hint"] == "use another instruction or another model"
    assert not any("Part 1" in prompt for prompt in mute)
    assert not (tmp_path / "out/long.txt.md").exists()


def test_a_single_part_with_text_is_no_whole_document(fake: Any, quantspec: Run, tmp_path: Path) -> None:
    """Its answer depends on the size of parts, and without --long there is none."""
    (tmp_path / "long.txt").write_text("word " * 50 + "\n \n" * 3000)
    command = ["batch", str(tmp_path / "long.txt"), "--out", str(tmp_path / "out"), "--json"]
    split, plain = [*command, *SPLIT], [*command, "--instruction", "Sum up.", "-n", "20", "-c", "700"]
    (result,) = quantspec(*split).json["results"]
    assert (result["calls"], "tree" in result) == (1, False)
    assert quantspec(*split).json["skipped"] == 1
    report = quantspec(*plain).json
    assert (report["skipped"], report["failed"]) == (0, 1)
    assert quantspec(*split).json["skipped"] == 1


@pytest.mark.slow
def test_an_interrupt_ends_all_parts(start: Callable[..., Child], fake: Any, quantspec: Run, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("word " * 5000)
    command = ["batch", str(tmp_path / "long.txt"), *SPLIT, "--json", "--parallel", "3", "--out", str(tmp_path / "out")]
    child = start(*command, script={"round_s": 0.1})
    child.until("prefill", 5)
    started = time.monotonic()
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=20)
    assert (child.returncode, time.monotonic() - started < 2) == (143, True)
    assert quantspec(*command).json["done"] == 1


@pytest.mark.slow
def test_a_terminal_shows_the_calls_of_a_document(toy_command: list[str], tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("word " * 2700)
    terminal, end = pty.openpty()
    environment = {**os.environ, "FAKE_NATIVE": json.dumps({"round_s": 0.08}), "TERM": "xterm", "COLUMNS": "80"}
    command = [*toy_command, "batch", str(tmp_path / "long.txt"), "--out", str(tmp_path / "out"), *SPLIT]
    child = subprocess.Popen(command, stderr=end, env=environment)
    os.close(end)
    seen = rest_of(terminal).decode()
    assert child.wait(timeout=30) == 0
    shown = re.findall(r"long.txt +(\S+) +(\d+) of (\d+) calls  2,7\d\d prompt tokens", seen)
    assert shown[0][1:] == ("0", "5")
    assert ("decoding", "5", "6") in shown, "the last call, for the five answers"
    done = [int(number) for _, number, _ in shown]
    assert done == sorted(done)


@pytest.mark.slow
def test_kills_in_parts_lose_nothing(start: Callable[..., Child], fake: Any, quantspec: Run, tmp_path: Path) -> None:
    docs = mixed(tmp_path / "docs")
    command = ["batch", str(docs), *SPLIT, "--json", "--out"]
    calm = quantspec(*command, str(tmp_path / "calm"), "--parallel", "1").json
    random.seed(5)
    kills, ended, script = 0, False, {"round_s": 0.02}
    while not ended:
        child = start(*command, str(tmp_path / "out"), "-q", "--parallel", "4", script=script)
        while child.poll() is None and not child.stages.exists():
            time.sleep(0.005)
        time.sleep(random.random() * 0.4)
        number = (signal.SIGKILL, signal.SIGTERM)[kills % 2]
        ended = child.poll() is not None
        child.send_signal(number)
        child.communicate(timeout=20)
        assert child.returncode in {0, -number, 128 + number}
        kills += not ended
        assert kills < 100
    assert kills > 3
    assert results(quantspec(*command, str(tmp_path / "out")).json) == results(calm)


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
    """Of 50 s, prompts took half. A document in ten parts is done; the next one is half as long."""
    now = 50.0
    monkeypatch.setattr(batch_view.time, "perf_counter", lambda: now)
    with batch_view.View(3, 0, 1, longest=50, shown=False) as view:
        now = 100.0
        book = batch_work.Job(sources.Source("a"), "a.md", tokens=3000, calls=4)
        assert "left" not in view.totals([book], [], 0.0)
        book.known_calls = 3
        book.count(1000)
        view.called(1000, 50)
        # 25 s for a prompt of 1,000 tokens, and as many for an answer; 2 parts are left, and the call for their answers.
        assert ", about 2 min left, " in view.totals([book], [], 0.5)
        for tokens in [1000] * 9 + [500]:
            view.called(tokens, 50)
        view.finished({"status": "done"})
        now = 150.0
        job = batch_work.Job(sources.Source("b"), "b.md", tokens=5250, calls=6)
        # 10,500 tokens of prompts took 50 s, as did 11 answers.
        totals = "2 of 3 documents, 1 failed, about 52 s left, prompts 105 and answers 5.5 tokens/s"
        assert view.totals([], [job], 0.5) == totals
        # All prompts of parts are read, and two answers of six calls have ended.
        job.known_calls, job.done_calls, job.read_tokens = 5, 2, 5250
        assert ", about 18 s left, " in view.totals([job], [], 0.5)
        # More calls than planned.
        job.known_calls, job.done_calls = 8, 7
        assert ", about 5 s left, " in view.totals([job], [], 0.5)
        # Calls of an earlier run are not called again, and a failed document has no more calls.
        before = view.totals([], [], 0.5)
        view.finished({"status": "failed"})
        assert view.totals([], [], 0.5) == before.replace("2 of 3 documents, 1 failed", "3 of 3 documents, 2 failed")


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
    # How many calls the parts need is an estimate.
    dry_run = [*command, "--dry-run", "-n", "20"]
    assert f"about {planned['new_tokens']} new tokens" in quantspec(*dry_run, "-c", "700").stdout
    assert "at most 20 new tokens" in quantspec(*dry_run).stdout
    # An answer that leaves no room for any prompt.
    for found in (quantspec(*dry, "-n", "697", "-c", "700"), quantspec(*command, "--json", "-n", "697", "-c", "700")):
        (error,) = [row["error"] for row in found.json["results"]]
        assert "the context leaves 3" in error["message"]


def words(text: str) -> int:
    return 3 + len(text.split())


def test_partial_answers_that_do_not_fit_are_refused_before_decoding(fake: Any, quantspec: Run, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("word " * 2000)
    command = ["batch", str(tmp_path / "long.txt"), "--out", str(tmp_path / "out"), *SPLIT[:4], "-c", "700", "--json"]
    for outcome in (quantspec(*command, "-n", "400", "--dry-run"), quantspec(*command, "-n", "400")):
        (error,) = [row["error"] for row in outcome.json["results"]]
        assert "two partial answers of 400 tokens make a prompt of" in error["message"]
        assert fake.engines == []
    most = error["hint"].partition("at most ")[2].partition(" ")[0]
    assert quantspec(*command, "-n", str(int(most) + 1), "--dry-run").json["refused"] == 1
    fake.answer = [45] * 1000
    assert quantspec(*command, "-n", most).json["done"] == 1


def test_a_dry_run_counts_the_prompts_of_all_calls(fake: Any, quantspec: Run, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("word " * 2000)
    fake.answer = [45] * 1000
    flags = ["--long", "map-reduce", "--instruction", "Sum up. " * 30, "-c", "700", "-n", "100", "--json"]
    command = ["batch", str(tmp_path / "long.txt"), "--out", str(tmp_path / "out"), *flags]
    planned = quantspec(*command, "--dry-run").json
    (result,) = quantspec(*command).json["results"]
    calls, tokens = [result["tree"]], 0
    for call in calls:
        tokens += call["prompt_tokens"]
        calls += call.get("parts", [])
    assert planned["prompt_tokens"] == pytest.approx(tokens, rel=0.2)


def test_a_setting_of_map_reduce_needs_an_instruction_to_apply(
    fake: Any, quantspec: Run, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["batch", str(docs), "--out", str(tmp_path / "out"), "-n", "3"]
    quantspec(*command, "--long", "map-reduce").assert_error(2, "--long is map-reduce without an instruction")
    monkeypatch.setenv("QUANTSPEC_LONG", "map-reduce")
    assert quantspec(*command).code == 0


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


def test_adding_map_reduce_repeats_no_shortened_answer(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    command = ["batch", str(docs), "--out", str(tmp_path / "out"), "-c", "100", "--instruction", "Sum up.", "--json"]
    results = quantspec(*command).json["results"]
    assert {result["prompt_tokens"] + result["new_tokens"] for result in results} == {100}
    assert quantspec(*command, "--long", "map-reduce").json["skipped"] == 3


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

    def call(texts: Sequence[str], last: bool) -> list[Generation]:
        asked.extend(texts)
        return [Generation(1, [1], "short", "eos") for _ in texts]

    mapreduce.answer("it", "word " * 20 + "\n" * 300 + "word " * 20, budget=100, count=count, call=call)
    assert len(asked) > 2
    assert not any(text.isspace() for text in asked)


@pytest.mark.parametrize(
    ("reason", "shown"), [("a.txt: two", "a.txt: two"), ("a.txt is", "a.txt is"), ("no", "a.txt: no")]
)
def test_a_failed_document_is_named_once(capsys: pytest.CaptureFixture[str], reason: str, shown: str) -> None:
    batch_view.failures([{"document": "a.txt", "error": {"message": reason, "hint": "mend it"}}])
    assert capsys.readouterr().err == f"failed  {shown}\n        mend it\n"


def test_partial_answers_are_reduced_as_often_as_needed() -> None:
    calls: list[str] = []
    ends: list[tuple[int, bool]] = []

    def call(texts: Sequence[str], last: bool) -> list[Generation]:
        calls.extend(texts)
        ends.append((len(texts), last))
        return [Generation(words(text), [1], f"answer {len(calls)}", "eos") for text in texts]

    tree = mapreduce.answer("it", "word " * 2000, budget=30, count=words, call=call)
    assert len(list(tree.tree())) == len(calls)
    assert [last for _, last in ends] == [False] * (len(ends) - 1) + [True]
    assert ends[-1] == (1, True)
    depth, node = 0, tree
    while node.parts:
        depth, node = depth + 1, node.parts[0]
    assert depth >= 3
    with pytest.raises(DoesNotFitError, match="two partial answers"):
        mapreduce.answer(
            "it",
            "word " * 100,
            budget=30,
            count=words,
            call=lambda texts, _: [Generation(1, [1], "long " * 20, "length") for _ in texts],
        )
    with pytest.raises(DoesNotFitError, match="one character"):
        mapreduce.split("it", "word " * 10, 5, lambda text: 6 + len(text))


def tree_of(*answers: str, budget: int = 12, cut: bool = False) -> tuple[mapreduce.Call, list[tuple[list[str], bool]]]:
    """The tree of calls for a document whose parts have these answers, and the inputs of each level. An input of `empty` has
    an empty answer, any other is answered by its words.
    """
    levels: list[tuple[list[str], bool]] = []

    def call(texts: Sequence[str], last: bool) -> list[Generation]:
        levels.append((list(texts), last))
        replies = (
            answers if len(levels) == 1 else ["" if "empty" in text else " ".join(text.split()[2::3]) for text in texts]
        )
        return [
            Generation(words(text), [1], reply, "length" if cut else "eos")
            for text, reply in zip(texts, replies, strict=True)
        ]

    text = " ".join("x" * 10 for _ in answers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapreduce, "split", lambda *_: text.split())
        return mapreduce.answer("it", text, budget=budget, count=words, call=call), levels


def test_the_last_call_is_the_one_whose_answer_ends_the_tree() -> None:
    """Of three answers two fit together: that call is the only one of its level, and not the last."""
    tree, levels = tree_of("a", "b", "c", budget=10)
    assert [(len(texts), last) for texts, last in levels] == [(3, False), (1, False), (1, True)]
    assert len(list(tree.tree())) == 5
    assert list(tree.warnings()) == []
    assert tree_of("a")[1] == [(["x" * 10], True)]


@pytest.mark.parametrize(
    ("answers", "warning"),
    [
        ("a", None),
        ("a,,c", "part 2 of 3 has an empty answer"),
        (",b, ,,e,", "parts 1, 3-4 and 6 of 6 have empty answers"),
        (",,c", "parts 1-2 of 3 have empty answers"),
        # Three fit together. The answer to the first three is empty, too.
        ("a,empty,c,,e,f", "parts 1-4 of 6 have empty answers"),
    ],
)
def test_empty_partial_answers_are_no_input(answers: str, warning: str | None) -> None:
    tree, levels = tree_of(*answers.split(","))
    assert list(tree.warnings()) == ([] if warning is None else [warning])
    assert len(list(tree.tree())) == sum(len(texts) for texts, _ in levels), "the tree has all calls"
    for texts, _ in levels[1:]:
        assert all(re.fullmatch(r"(Part \d:\n\w[\w ]*(\n\n)?)+", text) for text in texts), texts


def test_no_call_is_made_for_empty_answers_alone() -> None:
    with pytest.raises(InputError, match="it: its 3 partial answers are empty") as found:
        tree_of("", " ", "\n")
    assert found.value.hint == "use another instruction or another model"
    # A thinking block may take all tokens.
    with pytest.raises(InputError, match="its 2 partial answers are empty") as found:
        tree_of("", "", cut=True)
    assert found.value.hint == "raise -n or -c"
    # Also after another level.
    with pytest.raises(InputError, match="its 2 partial answers are empty"):
        tree_of("empty", "b", "c", "empty", budget=9)
    # An answer that does not even fit alone.
    with pytest.raises(DoesNotFitError, match="two partial answers"):
        tree_of("", "", "long " * 20)


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
