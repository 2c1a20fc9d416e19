"""`quantspec batch`: every document ends as an answer or a reason, under any failure. The engine is the toy."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_native
import pypdf
import pytest
from conftest import LONG, Child, Outcome, answers, rest_of
from hypothesis import given
from hypothesis import strategies as st

from quantspec_cli import batch, batch_plan, batch_view, documents, engine, journal, mapreduce, sources, tokenizer
from quantspec_cli.engine import Generation
from quantspec_cli.errors import DoesNotFitError, FileError, InputError, UsageError
from quantspec_cli.options import EngineOptions

Run = Callable[..., Outcome]
Start = Callable[..., Child]


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """Three documents in two folders."""
    folder = tmp_path / "docs"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "a.txt").write_text("It was a dark and stormy night.")
    (folder / "b.md").write_text("# Title\n\nThe rain fell in torrents.")
    (folder / "deep" / "er" / "c.txt").write_text("Except at occasional intervals. " * 5)
    return folder


def lines(out: Path) -> list[dict[str, Any]]:
    raw = (out / "results.jsonl").read_bytes()
    assert raw == b"" or raw.endswith(b"\n")
    return [json.loads(line) for line in raw.decode().splitlines()]


def test_one_answer_per_document(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    outcome = quantspec("batch", str(docs), "--out", str(out), "-n", "12", "--json")
    assert outcome.code == 0, outcome
    report = outcome.json
    assert (report["documents"], report["done"], report["failed"], report["skipped"]) == (3, 3, 0, 0)
    assert set(answers(out)) == {"a.txt.md", "b.md.md", "deep/er/c.txt.md"}
    assert sorted(result["document"] for result in lines(out)) == ["a.txt", "b.md", "deep/er/c.txt"]
    assert report["results"] == lines(out)
    for result in lines(out):
        path = docs / result["document"]
        alone = quantspec("run", str(path), "-n", "12", "--json").json["results"][0]
        assert (out / result["output"]).read_text() == alone["text"] + "\n"
        assert {name: result[name] for name in ("tokens", "prompt_tokens", "new_tokens", "stop_reason")} == {
            name: alone[name] for name in ("tokens", "prompt_tokens", "new_tokens", "stop_reason")
        }
        assert (result["status"], result["calls"], result["error"]) == ("done", 1, None)
        assert len(result["sha256"]) == 64
    stats = report["stats"]
    assert stats["wall_s"] > 0
    assert stats["documents_per_hour"] > 0
    assert 1 <= stats["batch_mean"] <= stats["batch_peak"] <= 3


def test_cut_answers_are_counted(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    command = ["batch", str(docs), "--out", str(tmp_path / "out"), "-n", "1000"]
    note = 'cut at 1,000 tokens (-n): stop_reason "length" in results.jsonl\n'
    assert quantspec(*command, "--ignore-eos").stderr.endswith(f"3 answers were {note}")
    (docs / "a.txt").write_text("Another night.")
    assert quantspec(*command, "--ignore-eos").stderr.endswith(f"1 answer was {note}")
    fake.answer = [17, 2]
    assert "(-n)" not in quantspec(*command).stderr


def test_documents_may_be_plain_arguments_of_run(fake: Any, quantspec: Run, docs: Path) -> None:
    a, b = str(docs / "a.txt"), str(docs / "b.md")
    assert quantspec("run", a, b, "-n", "9").stdout == quantspec("run", "-p", a, "-p", b, "-n", "9").stdout
    assert quantspec("run", a, "-p", b, "-n", "9").stdout == quantspec("run", a, b, "-n", "9").stdout


def test_finished_documents_are_skipped_and_changed_ones_repeated(
    fake: Any, quantspec: Run, docs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = ["batch", str(docs), "--out", str(out), "-n", "12", "--json"]
    quantspec(*command)
    before = answers(out)
    loads = len(fake.engines)
    again = quantspec(*command)
    assert (again.code, again.json["done"], again.json["skipped"]) == (0, 0, 3)
    assert len(again.json["results"]) == 3
    assert len(fake.engines) == loads, "nothing to do loads no model"
    assert answers(out) == before

    (docs / "a.txt").write_text("A new text.")
    (docs / "new.txt").write_text("Another document.")
    (out / "b.md.md").unlink()
    changed = quantspec(*command)
    assert (changed.json["done"], changed.json["skipped"]) == (3, 1)
    assert answers(out)["deep/er/c.txt.md"] == before["deep/er/c.txt.md"]
    assert answers(out)["b.md.md"] == before["b.md.md"]
    assert answers(out)["a.txt.md"] != before["a.txt.md"]
    assert sorted(result["document"] for result in lines(out)) == ["a.txt", "b.md", "deep/er/c.txt", "new.txt"]

    for flags in (["-n", "13"], ["-n", "12", "--temperature", "1"], ["-n", "12", "--instruction", "Sum up."]):
        assert quantspec(*command[:4], *flags, "--json").json["done"] == 4
    # These change no token, so nothing is repeated.
    for flags in (["--gamma", "2"], ["--method", "ar"], ["--threads", "1"], ["--parallel", "1"]):
        assert quantspec(*command[:4], "-n", "12", "--instruction", "Sum up.", *flags, "--json").json["skipped"] == 4
    everything = quantspec(*command[:4], "-n", "12", "--instruction", "Sum up.", "--no-resume", "--json").json
    assert (everything["done"], everything["skipped"]) == (4, 0)


def test_failures_are_named_and_kept(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (docs / "binary.png").write_bytes(b"\x89PNG\0\0")
    (docs / "empty.txt").write_text("")
    (docs / "latin.txt").write_bytes(b"caf\xe9")
    (docs / "dangling.txt").symlink_to("nowhere")
    os.mkfifo(docs / "pipe")
    (docs / "loop").symlink_to(".")
    (docs / "long.txt").write_text("word " * 1000)
    (docs / os.fsdecode(b"na\xffme.txt")).write_text("A name that is not UTF-8.")
    (docs / ("x" * 251 + ".txt")).write_text("A name of 255 bytes.")
    (docs / "new\nline.txt").write_text("A name with a line break.")
    command = ["batch", str(docs), "--out", str(out), "-n", "12", "-c", "600"]
    outcome = quantspec(*command, "--json")
    assert outcome.code == 4, outcome
    report = outcome.json
    failed = {result["document"]: result["error"] for result in report["results"] if result["status"] == "failed"}
    assert set(failed) == {"binary.png", "empty.txt", "latin.txt", "dangling.txt", "pipe", "long.txt"}
    assert "no regular file" in failed["pipe"]["message"]
    assert "+ 12); the context is" in failed["long.txt"]["message"]
    assert "the context is 600" in failed["long.txt"]["message"]
    assert failed["long.txt"]["exit_code"] == 3
    assert report["done"] == 6
    assert {"na\\xffme.txt", "new\nline.txt", "x" * 251 + ".txt"} < {line["document"] for line in lines(out)}
    for result in lines(out):
        assert (
            result["status"] == "failed"
            or os.path.lexists(os.fsencode(out) + b"/" + os.fsencode(result["output"]))
            or (result["document"] == "na\\xffme.txt")
        )
    assert (out / os.fsdecode(b"na\xffme.txt.md")).exists()
    assert max(len(os.fsencode(name)) for name in answers(out)) <= 255

    # Unchanged failures are reported again without a new attempt; unreadable documents are tried again.
    before = {line["document"]: line for line in lines(out)}
    again = quantspec(*command, "--json")
    assert (again.code, again.json["failed"], again.json["done"]) == (4, 6, 0)
    after = {line["document"]: line for line in lines(out)}
    assert {name for name in before if before[name] != after[name]} == {"dangling.txt", "pipe"}
    tried = quantspec(*command, "--retry-failed")
    assert tried.code == 4
    assert "failed  long.txt and its answer need " in tried.stderr
    assert "12 documents: 0 done, 6 failed, 6 done before" in tried.stderr
    (docs / "empty.txt").write_text("No longer empty.")
    assert quantspec(*command, "--json").json["done"] == 1


def test_a_longer_context_gives_a_failed_document_another_chance(
    fake: Any, quantspec: Run, docs: Path, tmp_path: Path
) -> None:
    (docs / "long.txt").write_text("word " * 1000)
    command = ["batch", str(docs), "--out", str(tmp_path / "out"), "-n", "12", "--json"]
    assert quantspec(*command, "-c", "600").json["failed"] == 1
    assert quantspec(*command).json["failed"] == 0


def test_a_document_that_is_not_finite_fails_alone(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    counted = quantspec("batch", str(docs), "--out", str(tmp_path / "o"), "-n", "12", "--dry-run", "--json").json
    fake.not_finite = next(row["prompt_tokens"] for row in counted["results"] if row["document"] == "b.md")
    outcome = quantspec("batch", str(docs), "--out", str(tmp_path / "out"), "-n", "40", "--json")
    assert outcome.code == 4
    failed = [result for result in outcome.json["results"] if result["status"] == "failed"]
    assert [(result["document"], result["error"]["kind"]) for result in failed] == [("b.md", "not_finite")]
    assert set(answers(tmp_path / "out")) == {"a.txt.md", "deep/er/c.txt.md"}


def test_an_error_of_the_device_ends_the_batch_and_keeps_what_is_done(
    fake: Any, quantspec: Run, docs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    fake.fail, fake.fail_after = ("device", "the device fell off", "plug it in"), 4
    fake.accepted = [16]
    command = ["batch", str(docs), "--out", str(out), "-n", "16", "--parallel", "1"]
    outcome = quantspec(*command, "--gamma", "4", "--json")
    assert outcome.code == 1
    assert outcome.json["error"]["kind"] == "device"
    assert outcome.json["done"] == 1
    fake.fail = None
    assert quantspec(*command, "--json").json["skipped"] == 1


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
def test_a_device_that_is_missing_is_named_before_all_documents_are_read(
    fake: Any, quantspec: Run, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    def absent(*_: Any, **__: Any) -> None:
        raise fake_native.NativeError("device", "no CUDA device", "use --device cpu")

    read, calls = batch.Reader.read, []

    def slow(reader: Any, job: Any, **options: Any) -> Any:
        calls.append(job)
        time.sleep(0.2)
        return read(reader, job, **options)

    monkeypatch.setattr(fake_native, "open_device", absent)
    monkeypatch.setattr(batch.Reader, "read", slow)
    monkeypatch.setattr(batch_plan, "GROUP_CHARACTERS", 0)
    outcome = quantspec("batch", str(docs), "--out", str(tmp_path / "out"), "-n", "3", *flags)
    outcome.assert_error(1, "no CUDA device")
    assert len(calls) == 1


@pytest.mark.parametrize("parallel", ["1", "2", "7", "auto"])
def test_neighbours_change_nothing(fake: Any, quantspec: Run, tmp_path: Path, parallel: str) -> None:
    docs, out = tmp_path / "docs", tmp_path / "out"
    docs.mkdir()
    for number in range(9):
        (docs / f"{number}.txt").write_text(f"Document {number}. " * (1 + number * 7 % 5))
    flags = ["-n", "30", "--temperature", "0.9", "--seed", "4"]
    assert quantspec("batch", str(docs), "--out", str(out), *flags, "--parallel", parallel).code == 0
    for number in range(9):
        alone = quantspec("run", str(docs / f"{number}.txt"), *flags).stdout
        assert (out / f"{number}.txt.md").read_text() == alone


def test_the_next_prompt_is_there_when_an_answer_ends(
    fake: Any, quantspec: Run, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One document decodes at a time; while its answer is written, the next one is with the engine."""
    second = threading.Event()
    write, start, started = journal.Journal.write, engine.Engine.start, []

    def starting(*arguments: Any, **options: Any) -> Any:
        found = start(*arguments, **options)
        started.append(found)
        if len(started) == 2:
            second.set()
        return found

    def writing(*arguments: Any) -> int:
        assert second.wait(timeout=20)
        return write(*arguments)

    monkeypatch.setattr(engine.Engine, "start", starting)
    monkeypatch.setattr(journal.Journal, "write", writing)
    outcome = quantspec("batch", str(docs), "--out", str(tmp_path / "out"), "-n", "3", "--parallel", "1", "--json")
    assert (outcome.code, outcome.json["done"]) == (0, 3)
    assert (fake.engines[-1]["slots"], outcome.json["stats"]["batch_peak"]) == (1, 1)


def test_one_document_is_read_at_a_time(
    fake: Any, quantspec: Run, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers that run Python would keep the GIL from the scheduler's thread, the more of them, the longer."""
    read, reading, most = batch.Reader.read, threading.Semaphore(1), []
    intervals = {sys.getswitchinterval()}

    def slow(reader: Any, job: Any, **options: Any) -> Any:
        alone = reading.acquire(blocking=False)
        most.append(alone)
        intervals.add(sys.getswitchinterval())
        time.sleep(0.05)
        if alone:
            reading.release()
        return read(reader, job, **options)

    monkeypatch.setattr(batch.Reader, "read", slow)
    assert quantspec("batch", str(docs), "--out", str(tmp_path / "out"), "-n", "3").code == 0
    assert most == [True] * 6, "three are counted and then decoded"
    assert sorted(intervals) == pytest.approx([0.0005, sys.getswitchinterval()])


def test_an_answer_that_is_written_frees_its_prompt(
    fake: Any, quantspec: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ids of a long prompt take megabytes, and a folder may have thousands."""
    docs = tmp_path / "docs"
    docs.mkdir()
    for number in range(12):
        (docs / f"{number}.txt").write_text(f"Document {number}.")
    start, started, alive = engine.Engine.start, [], []

    def starting(*arguments: Any, **options: Any) -> Any:
        found = start(*arguments, **options)
        started.append(weakref.ref(found))
        alive.append(sum(batch() is not None for batch in started))
        return found

    monkeypatch.setattr(engine.Engine, "start", starting)
    assert quantspec("batch", str(docs), "--out", str(tmp_path / "out"), "-n", "3", "--parallel", "1").code == 0
    assert len(started) == 12
    assert max(alive) <= 3, "two workers, and one that ends"


def test_globs_files_and_lists_name_their_answers(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    def found(*arguments: str) -> list[str]:
        out = tmp_path / f"out{time.monotonic_ns()}"
        outcome = quantspec("batch", *arguments, "--out", str(out), "-n", "3", "--json")
        assert outcome.code == 0, outcome
        return sorted(answers(out))

    assert found(str(docs / "**" / "*.txt")) == ["a.txt.md", "deep/er/c.txt.md"]
    assert found(str(docs / "a.txt"), str(docs / "deep")) == ["a.txt.md", "er/c.txt.md"]
    assert found(str(docs / "a.txt"), str(docs / "a.txt")) == ["a.txt.md"]
    listed = tmp_path / "list.jsonl"
    rows = [{"path": "docs/a.txt"}, {"path": str(docs / "b.md")}, {"id": "x/y", "text": "A literal."}]
    listed.write_text("\n".join(map(json.dumps, [*rows, {"id": "z", "path": "docs/a.txt"}])) + "\n\n")
    absolute = str(docs / "b.md").lstrip("/") + ".md"
    assert found(str(listed)) == sorted(["docs/a.txt.md", absolute, "x/y.md", "z.md"])


def test_a_directory_in_a_list_is_no_document(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    listed = tmp_path / "list.jsonl"
    listed.write_text(json.dumps({"path": "docs"}))
    outcome = quantspec("batch", str(listed), "--out", str(tmp_path / "out"), "-n", "3", "--json")
    (result,) = outcome.json["results"]
    assert (outcome.code, result["error"]["message"]) == (4, "docs is a directory")
    assert "as files" in result["error"]["hint"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 1 of"),
        ("[1]", "no object"),
        ('{"path": 5}', "'path' in line 1"),
        ('{"path": ""}', "not empty"),
        ('{"text": "x"}', "no id"),
        ('{"id": "x"}', "neither path and text"),
        ('{"path": "x", "text": "y", "id": "z"}', "both path and text"),
        ('{"path": "x", "prompt": "y"}', "unknown field 'prompt'"),
        ('{"path": "../x"}', "leaves the output folder"),
        ('{"id": "a/../../x", "text": "y"}', "leaves the output folder"),
        ('{"id": "/", "text": "y"}', "cannot be that of an answer"),
        ('{"id": ".quantspec/journal.sqlite", "text": "y"}', "cannot be that of an answer"),
        ('{"id": "a\\u0000b", "text": "y"}', "'id' in line 1"),
        ('{"id": "\\ud800", "text": "y"}', "half of a pair"),
    ],
)
def test_a_malformed_line_of_a_list_is_one_error(
    fake: Any, quantspec: Run, tmp_path: Path, line: str, words: str
) -> None:
    listed = tmp_path / "list.jsonl"
    listed.write_text(line)
    quantspec("batch", str(listed), "--out", str(tmp_path / "out")).assert_error(1, words)
    assert not (tmp_path / "out").exists()


def test_bad_arguments_are_refused_before_anything_is_written(
    fake: Any, quantspec: Run, docs: Path, tmp_path: Path
) -> None:
    out = ["--out", str(tmp_path / "out")]
    quantspec("batch", *out).assert_error(2, "no document")
    quantspec("batch", str(docs)).assert_error(2, "--out")
    quantspec("batch", str(docs), "--out", "").assert_error(2, "--out")
    quantspec("batch", str(docs), "--out", str(docs)).assert_error(2, "also a directory of documents")
    quantspec("batch", str(tmp_path / "absent"), *out).assert_error(1, "does not exist")
    quantspec("batch", str(docs / "*.nothing"), *out).assert_error(1, "no file matches")
    quantspec("batch", str(docs), *out, "--suffix", "md").assert_error(2, "--suffix")
    quantspec("batch", str(docs), *out, "--suffix", "./../x").assert_error(2, "--suffix")
    quantspec("batch", str(docs), *out, "--parallel", "0").assert_error(2, "--parallel")
    quantspec("batch", str(docs), *out, "--long", "map-reduce").assert_error(2, "--instruction")
    (tmp_path / "hollow").mkdir()
    quantspec("batch", str(tmp_path / "hollow"), *out).assert_error(2, "no document")
    (tmp_path / "file").write_text("x")
    quantspec("batch", str(docs), "--out", str(tmp_path / "file")).assert_error(1, "cannot be written")
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.txt").write_text("Of the same name.")
    quantspec("batch", str(docs), str(other), *out).assert_error(2, "two documents are called a.txt")
    assert not (tmp_path / "out").exists()


def test_answers_never_leave_out(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    out.mkdir()
    elsewhere.mkdir()
    (out / "deep").symlink_to(elsewhere)
    outcome = quantspec("batch", str(docs), "--out", str(out), "-n", "3", "--json")
    assert outcome.code == 4
    (failed,) = [result for result in outcome.json["results"] if result["status"] == "failed"]
    assert failed["document"] == "deep/er/c.txt"
    assert "leads out of" in failed["error"]["message"]
    assert list(elsewhere.iterdir()) == []
    assert list((out / sources.STATE / "tmp").iterdir()) == []


def test_foreign_files_are_not_overwritten(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "a.txt.md").write_text("precious")
    command = ["batch", str(docs), "--out", str(out), "-n", "3", "--json"]
    outcome = quantspec(*command)
    assert (outcome.code, outcome.json["done"]) == (4, 2)
    assert (out / "a.txt.md").read_text() == "precious"
    assert quantspec(*command, "--no-resume").json["done"] == 3
    assert (out / "a.txt.md").read_text() != "precious"

    # An edited answer belongs to its editor.
    (out / "b.md.md").write_text("corrected by hand")
    again = quantspec(*command[:-1])
    assert again.code == 0
    assert "b.md was changed after it was written" in again.stderr
    (docs / "new\n\x1bline.txt").write_text("x")
    assert quantspec(*command).json["done"] == 1
    (out / "new\n\x1bline.txt.md").write_text("corrected by hand")
    assert "new \N{REPLACEMENT CHARACTER}line.txt was changed" in quantspec(*command).stderr
    assert (out / "b.md.md").read_text() == "corrected by hand"


def test_foreign_files_are_not_overwritten_by_later_runs(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "a.txt.md").write_text("precious")
    command = ["batch", str(docs), "--out", str(out), "--json"]
    for flags in (["-n", "3"], ["-n", "3", "--retry-failed"], ["-n", "4"]):
        (refused,) = [row for row in quantspec(*command, *flags, "--dry-run").json["results"] if row["error"]]
        assert "exists and is not as this batch wrote it" in refused["error"]["message"]
        assert quantspec(*command, *flags, "--dry-run", "--no-resume").json["refused"] == 0
        assert quantspec(*command, *flags).json["failed"] == 1
        assert (out / "a.txt.md").read_text() == "precious"
    # The remedy named by the error suffices.
    (out / "a.txt.md").unlink()
    assert quantspec(*command, "-n", "4").json["failed"] == 0


def test_an_answer_by_hand_to_a_failed_document_is_not_overwritten(
    fake: Any, quantspec: Run, docs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    (docs / "long.txt").write_text("word " * 1000)
    command = ["batch", str(docs), "--out", str(out), "--json"]
    assert quantspec(*command, "-n", "3", "-c", "600").json["failed"] == 1
    (out / "long.txt.md").write_text("by hand")
    for _ in range(2):
        report = quantspec(*command, "-n", "3").json
        (failed,) = [line["error"]["message"] for line in report["results"] if line["error"]]
        assert "exists and is not as this batch wrote it" in failed
        assert (out / "long.txt.md").read_text() == "by hand"
    (out / "long.txt.md").unlink()
    assert quantspec(*command, "-n", "3").json["failed"] == 0
    # An earlier answer of the batch is replaced, also if the document failed in between.
    assert quantspec(*command, "-n", "4", "-c", "600").json["failed"] == 1
    assert quantspec(*command, "-n", "4").json["failed"] == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_answer_by_hand_after_an_interrupt_is_not_overwritten(
    start: Start, fake: Any, quantspec: Run, docs: Path, tmp_path: Path, number: int
) -> None:
    out = tmp_path / "out"
    command = ["batch", str(docs), "--out", str(out), "-n", "40"]
    child = start(*command, script={"round_s": 1.0})
    child.until("verify")
    child.send_signal(number)
    child.communicate(timeout=20)
    (out / "a.txt.md").write_text("by hand")
    report = quantspec(*command, "--json").json
    assert (report["done"], report["failed"]) == (2, 1)
    assert (out / "a.txt.md").read_text() == "by hand"


def test_a_file_that_appears_during_a_run_is_not_overwritten(
    fake: Any, quantspec: Run, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody writes it, or two names are one on the file system of the answers, as a.txt and A.txt may be."""
    out = tmp_path / "out"
    write = journal.Journal.write

    def writing(kept: Any, name: str, output: str, text: str) -> int:
        if name == "a.txt":
            (out / output).write_text("by hand")
        return write(kept, name, output, text)

    monkeypatch.setattr(journal.Journal, "write", writing)
    command = ["batch", str(docs), "--out", str(out), "-n", "3", "--json"]
    report = quantspec(*command).json
    (error,) = [line["error"]["message"] for line in report["results"] if line["error"]]
    assert (report["done"], error) == (2, f"{out}/a.txt.md exists and is not as this batch wrote it")
    assert (out / "a.txt.md").read_text() == "by hand"
    assert quantspec(*command, "--no-resume").json["done"] == 3


def test_edited_answers_are_not_replaced(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["batch", str(docs), "--out", str(out), "--json"]
    quantspec(*command, "-n", "3")
    (out / "b.md.md").write_text("corrected by hand")
    for flags in (["-n", "4"], ["-n", "5"]):
        report = quantspec(*command, *flags).json
        assert (report["done"], report["failed"]) == (2, 1)
        assert (out / "b.md.md").read_text() == "corrected by hand"
        assert sorted(line["document"] for line in lines(out)) == ["a.txt", "b.md", "deep/er/c.txt"]
    assert quantspec(*command, "-n", "5", "--no-resume").json["done"] == 3


def test_a_file_of_another_suffix_is_no_answer(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["batch", str(docs), "--out", str(out), "-n", "3", "--json"]
    assert quantspec(*command).json["done"] == 3
    (out / "a.txt.txt").write_text("precious")
    report = quantspec(*command, "--suffix", ".txt").json
    assert (report["done"], report["failed"], report["skipped"]) == (2, 1, 0)
    assert (out / "a.txt.txt").read_text() == "precious"
    # The earlier answers are still there.
    assert quantspec(*command).json["skipped"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_other_options_by_mistake_lose_nothing(
    start: Start, fake: Any, quantspec: Run, docs: Path, tmp_path: Path, number: int
) -> None:
    out = tmp_path / "out"
    command = ["batch", str(docs), "--out", str(out), "--parallel", "1", "--json"]
    first = quantspec(*command, "-n", "12").json
    before = answers(out), lines(out)
    for flags in (["-n", "40"], ["-n", "40", "--suffix", ".txt"]):
        child = start(*command, *flags, script={"round_s": 1.0})
        child.until("verify")
        assert lines(out) == []
        child.send_signal(number)
        child.communicate(timeout=20)
        again = quantspec(*command, "-n", "12").json
        assert (again["done"], again["skipped"], again["results"]) == (0, 3, first["results"])
        assert (answers(out), lines(out)) == before
    # Only the documents that got another answer are repeated.
    child = start(*command, "-n", "40", script={"round_s": 0.1})
    child.until("verify")
    while not written(out):
        time.sleep(0.01)
    child.send_signal(number)
    child.communicate(timeout=20)
    again = quantspec(*command, "-n", "12").json
    assert 0 < again["done"] < 3
    assert again["done"] + again["skipped"] == 3
    assert answers(out) == before[0]
    # Without a chance to go back, nothing is kept.
    child = start(*command, "-n", "12", "--no-resume", script={"round_s": 1.0})
    child.until("verify")
    child.send_signal(number)
    child.communicate(timeout=20)
    assert quantspec(*command, "-n", "12").json["done"] == 3


def test_a_package_that_was_missing_gives_a_failed_document_another_chance(
    fake: Any, quantspec: Run, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (docs / "damaged.pdf").write_bytes(b"%PDF-1.7 nothing")
    command = ["batch", str(docs), "--out", str(tmp_path / "out"), "-n", "3", "--json"]
    monkeypatch.setattr(batch, "find_spec", lambda _: None)
    quantspec(*command)
    monkeypatch.undo()
    (first,) = [line for line in lines(tmp_path / "out") if line["status"] == "failed"]
    quantspec(*command)
    (second,) = [line for line in lines(tmp_path / "out") if line["status"] == "failed"]
    assert first["seconds"] != second["seconds"], "it was not tried again"


def test_answers_do_not_overwrite_files_of_the_batch(fake: Any, quantspec: Run, tmp_path: Path) -> None:
    docs, out = tmp_path / "work" / "docs", ["--out", str(tmp_path / "out"), "-n", "3"]
    docs.mkdir(parents=True)
    (docs / "results").write_text("It was a dark and stormy night.")
    (tmp_path / "above.txt").write_text("x")
    quantspec("batch", str(docs), *out, "--suffix", ".jsonl").assert_error(2, "results.jsonl", "--suffix")
    report = str(tmp_path / "out" / "results.jsonl")
    assert quantspec("batch", str(docs), *out, "--report", report).code == 2
    shutil.rmtree(tmp_path / "out")
    quantspec("batch", str(tmp_path / "work" / "*" / ".." / ".." / "above*"), *out).assert_error(2, "above.txt")
    (docs / "a.md").mkdir()
    (docs / "a.md" / "b.txt").write_text("x")
    (docs / "a").write_text("The rain fell in torrents.")
    quantspec("batch", str(docs), *out).assert_error(2, "the answer to a would be a.md, the folder of", "a.md/b.txt")
    assert not (tmp_path / "out").exists()


def test_an_interrupt_before_an_answer_begins_processes_no_prompt(
    fake: Any, quantspec: Run, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while workers convert documents to prompts: no prompt is read to its end."""
    fake.prefill_s = 60.0
    read, calls = batch.Reader.read, []

    def slow(reader: Any, job: Any, **options: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            calls.append(job)
            if len(calls) == 1:
                os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)
        return read(reader, job, **options)

    monkeypatch.setattr(batch.Reader, "read", slow)
    started = time.monotonic()
    assert quantspec("batch", str(docs), "--out", str(tmp_path / "out"), "-n", "3").code == 130
    assert time.monotonic() - started < 10


def test_answers_inside_the_documents_folder_are_not_documents(fake: Any, quantspec: Run, docs: Path) -> None:
    command = ["batch", str(docs), "--out", str(docs / "answers"), "-n", "3", "--json"]
    assert quantspec(*command).json["documents"] == 3
    assert quantspec(*command).json["documents"] == 3
    pattern = ["batch", str(docs / "**" / "*"), *command[2:]]
    assert quantspec(*pattern).json["documents"] == 3


def test_answers_may_go_above_the_documents(
    fake: Any, quantspec: Run, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(docs.parent)
    names = ["a.txt", "deep/er/c.txt"]
    for arguments in (["docs"], ["docs/**/*.txt"]):
        report = quantspec("batch", *arguments, "--out", ".", "-n", "3", "--dry-run", "--json").json
        assert [row["document"] for row in report["results"] if row["document"] != "b.md"] == names
    quantspec("batch", "*", "--out", ".").assert_error(2, "--out . is also a directory of documents")


def test_a_glob_does_not_follow_loops(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    (docs / "loop").symlink_to(".")
    (docs / ".hidden").mkdir()
    (docs / ".hidden" / "d.txt").write_text("Hidden.")
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "e.txt").write_text("In a linked folder.")
    (docs / "deep" / "link").symlink_to(linked)

    def found(pattern: str) -> list[str]:
        out = str(tmp_path / "out")
        report = quantspec("batch", str(docs / pattern), "--out", out, "-n", "3", "--dry-run", "--json").json
        return [row["document"] for row in report["results"]]

    assert found("**/*.txt") == ["a.txt", "deep/er/c.txt", "deep/link/e.txt"]
    assert found("**") == ["a.txt", "b.md", "deep/er/c.txt", "deep/link/e.txt"]
    assert found("**/er/**/*") == ["deep/er/c.txt"]
    assert found("**/.hidden/*") == [".hidden/d.txt"]
    assert found("deep/*/*.txt") == ["er/c.txt", "link/e.txt"]


def test_a_dry_run_predicts_the_speed_of_the_pages_that_are_read() -> None:
    rates = (("ar", 10.0), ("quantspec", 12.0), ("quantspec", 15.0), ("window", 14.0), ("kv4", None))
    rows = [{"method": method, "decode_tokens_per_s": rate} for method, rate in rates]
    for options, expected in (
        ({}, 15),
        ({"gamma": 4}, 12),
        ({"draft_pages": "all"}, 12),
        ({"method": "window"}, 14),
        ({"method": "kv4"}, 10),
        ({"method": "quantspec+ngram"}, 10),
    ):
        assert batch_plan._decode_rate(rows, EngineOptions(**options)) == expected  # type: ignore[arg-type]


def test_a_dry_run_writes_nothing(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (docs / "empty.txt").write_text("")
    command = ["batch", str(docs), "--out", str(out), "-n", "12", "--dry-run"]
    outcome = quantspec(*command, "--json")
    assert outcome.code == 0
    report = outcome.json
    assert not out.exists()
    assert fake.engines == []
    assert (report["documents"], report["to_do"], report["refused"]) == (4, 3, 1)
    assert report["prompt_tokens"] == sum(row["prompt_tokens"] or 0 for row in report["results"])
    longest = max(row["prompt_tokens"] or 0 for row in report["results"])
    assert report["context"] == longest + 12
    assert report["fits"]
    text = quantspec(*command).stdout
    assert "fail    empty.txt is empty" in text
    assert "4 documents: 3 to do, 1 would fail" in text
    # Before a first run, `quantspec plan` predicts the speed, if it knows the device.
    assert (report["predicted_from"], report["predicted_s"] > 0) == ("plan", True)
    assert "predicted as in `quantspec plan`" in text
    fake.capability = "1.0"
    unknown = quantspec(*command, "--json").json
    assert (unknown["predicted_from"], unknown["predicted_s"]) == (None, None)
    assert "no estimate before a first run" in quantspec(*command).stdout

    stats = quantspec(*command[:-1], "--json").json["stats"]
    later = quantspec(*command, "--json").json
    assert (later["to_do"], later["skipped"], later["predicted_s"]) == (0, 3, None)
    (docs / "more.txt").write_text("One more.")
    later = quantspec(*command, "--json").json
    assert later["predicted_from"] == "run"
    expected = later["prompt_tokens"] / stats["prefill_tokens_per_s"] + 12 / stats["decode_tokens_per_s"]
    assert later["predicted_s"] == pytest.approx(expected)
    assert "as measured in an earlier run" in quantspec(*command).stdout


def test_a_dry_run_counts_a_common_beginning_once(fake: Any, quantspec: Run, tmp_path: Path) -> None:
    story = "It was a dark and stormy night. " * 60
    questions = [f"{story}\n{question}" for question in ("Who?", "Where was it?", "When?")]
    texts = [*questions, "Another story.", questions[0]]
    listed = tmp_path / "list.jsonl"
    listed.write_text("".join(json.dumps({"id": f"{place}", "text": text}) + "\n" for place, text in enumerate(texts)))
    command = ["batch", str(listed), "--out", str(tmp_path / "out"), "-n", "8", "--dry-run"]
    report = quantspec(*command, "--json").json
    lengths = [row["prompt_tokens"] for row in report["results"]]
    shared = [row["shared_tokens"] for row in report["results"]]
    # Whole blocks of 128 tokens; the last token of a prompt is always computed.
    common = (lengths[2] - 20) // 128 * 128
    assert shared == [0, common, common, 0, (lengths[0] - 1) // 128 * 128]
    assert (report["prompt_tokens"], report["shared_tokens"]) == (sum(lengths), sum(shared))
    assert f"{sum(lengths):,} prompt tokens ({sum(shared):,} as in other documents)" in quantspec(*command).stdout
    stats = quantspec(*command[:-3], "-n", "8", "--json").json["stats"]
    (tmp_path / "out" / "0.md").unlink()
    (tmp_path / "out" / "4.md").unlink()
    later = quantspec(*command, "--json").json
    computed = sum(lengths[place] for place in (0, 4)) - shared[4]
    expected = computed / stats["prefill_tokens_per_s"] + 16 / stats["decode_tokens_per_s"]
    assert later["predicted_s"] == pytest.approx(expected)


def test_a_document_is_extracted_once(
    fake: Any, quantspec: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "a.html").write_text("<p>It was a dark and stormy night.</p>")
    (docs / "long.html").write_text(f"<p>{'word ' * 1000}</p>")
    (docs / "plain.txt").write_text("The rain fell in torrents.")
    extract, extracted = documents.extract, []

    def seen(which: str, name: str, raw: bytes, limit: int) -> Any:
        extracted.append(name)
        return extract(which, name, raw, limit)

    monkeypatch.setattr(documents, "extract", seen)
    command = ["batch", str(docs), "-n", "3", "-c", "600", "--json", "--out"]
    once = quantspec(*command, str(tmp_path / "once")).json
    assert (once["done"], once["failed"]) == (2, 1)
    assert sorted(extracted) == ["a.html", "long.html"]
    # Memory for kept texts is bounded; the others are extracted again.
    extracted.clear()
    monkeypatch.setattr(batch_plan, "KEPT_BYTES", 0)
    quantspec(*command, str(tmp_path / "twice"))
    assert sorted(extracted) == ["a.html", "a.html", "long.html"]
    assert answers(tmp_path / "twice") == answers(tmp_path / "once")
    # A text that is refused makes room for the next one.
    extracted.clear()
    text = "word " * 100_000
    (docs / "0.html").write_text(text)
    monkeypatch.setattr(batch_plan, "KEPT_BYTES", sys.getsizeof(text))
    assert quantspec(*command, str(tmp_path / "third")).json["failed"] == 2
    assert sorted(extracted) == ["0.html", "a.html", "long.html"]


def test_memory_bounds_the_context_and_the_number_at_once(
    fake: Any, quantspec: Run, docs: Path, tmp_path: Path
) -> None:
    (docs / "long.txt").write_text("word " * 1000)
    fake.memory_bytes = 600 * 1000
    command = ["batch", str(docs), "--out", str(tmp_path / "out"), "-n", "12", "--json"]
    outcome = quantspec(*command)
    assert outcome.code == 4
    (failed,) = [result for result in outcome.json["results"] if result["status"] == "failed"]
    assert failed["document"] == "long.txt"
    assert "600 fit into memory" in failed["error"]["message"]
    assert (fake.engines[-1]["capacity"], fake.engines[-1]["slots"]) == (600, 3)
    # The remedy named by the error suffices.
    fake.memory_bytes = 10**12
    assert quantspec(*command).json["done"] == 1


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


def test_documents_share_the_memory_of_the_longest(fake: Any, quantspec: Run, tmp_path: Path) -> None:
    """With the longest context for each, only two would fit."""
    folder, out = tmp_path / "docs", tmp_path / "out"
    folder.mkdir()
    for number, words_ in enumerate((700, 100, 120, 140)):
        (folder / f"{number}.txt").write_text("word " * words_)
    command = ["batch", str(folder), "--out", str(out), "-n", "16", "--json"]
    longest = quantspec(*command, "--dry-run").json["context"]
    fake.memory_bytes = 2 * 1000 * longest
    planned = quantspec(*command, "--dry-run").json
    assert (planned["context"], planned["parallel"], planned["fits"]) == (longest, 4, True)
    assert planned["pool"] <= 2 * longest
    engines = len(fake.engines)
    report = quantspec(*command).json
    assert (report["done"], report["failed"]) == (4, 0)
    (engine,) = fake.engines[engines:]
    assert (engine["slots"], engine["pool_tokens"]) == (4, planned["pool"])
    # The longest document fills the pool: the others wait, then decode together.
    fake.memory_bytes, fake.round_s = 1000 * (longest + 128), 0.02
    again = quantspec(*command, "--no-resume").json
    tokens = [{line["document"]: line["tokens"] for line in found["results"]} for found in (report, again)]
    assert tokens[0] == tokens[1]
    assert again["done"] == 4


def test_memory_decides_how_many_decode_together(fake: Any, quantspec: Run, tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.txt").write_text("word " * (100 + 10 * number))
    command = ["batch", str(folder), "--out", str(tmp_path / "out"), "-n", "16", "--dry-run", "--json"]
    assert quantspec(*command).json["parallel"] == 4
    fake.device = "cuda:0"
    assert quantspec(*command).json["parallel"] == 32
    assert quantspec(*command, "--parallel", "7").json["parallel"] == 7
    # Memory of the toy's slots is their pages alone: as many wait for pages as do not fit.
    tokens = quantspec(*command).json["prompt_tokens"]
    fake.memory_bytes = 1000 * 20 * (tokens // 40)
    tight = quantspec(*command).json
    assert 18 * (tokens // 40) < tight["pool"] <= 20 * (tokens // 40)
    assert tight["fits"]


def test_two_processes_on_one_folder(fake: Any, quantspec: Run, start: Start, docs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["batch", str(docs), "--out", str(out), "-n", "30"]
    child = start(*command, "--no-resume", script={"round_s": 0.1})
    child.until("verify")
    quantspec(*command).assert_error(1, f"in use by process {child.pid}")
    child.send_signal(signal.SIGINT)
    _, stderr = child.communicate(timeout=20)
    assert child.returncode == 130
    assert b"run the same command without --no-resume to continue" in stderr
    assert quantspec(*command).code == 0


def test_an_interrupt_keeps_what_is_done(start: Start, fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["batch", str(docs), "--out", str(out), "-n", "40", "--parallel", "1"]
    child = start(*command, "--json", script={"round_s": 0.02})
    child.until("prefill", 2)
    started = time.monotonic()
    child.send_signal(signal.SIGTERM)
    stdout, stderr = child.communicate(timeout=20)
    assert time.monotonic() - started < 2
    assert child.returncode == 143, stderr
    report = json.loads(stdout)
    assert report["done"] == 1
    assert b"run the same command to continue" in stderr
    assert len(lines(out)) == 1
    rest = quantspec(*command, "--json").json
    assert (rest["done"], rest["skipped"]) == (2, 1)


def test_a_document_takes_one_line_of_a_terminal(toy_command: list[str], docs: Path, tmp_path: Path) -> None:
    (docs / f"{'long name ' * 20}.txt").write_text("The rain fell. " * 40)
    terminal, end = pty.openpty()
    environment = {**os.environ, "FAKE_NATIVE": json.dumps({"round_s": 0.1}), "TERM": "xterm", "COLUMNS": "80"}
    command = [*toy_command, "batch", str(docs), "--out", str(tmp_path / "out"), "-n", "9", "--parallel", "1"]
    child = subprocess.Popen(command, stderr=end, env=environment)
    os.close(end)
    seen = rest_of(terminal).decode()
    assert child.wait(timeout=30) == 0
    rows = [line for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", seen).splitlines() if "long name" in line]
    assert any(re.fullmatch(r"long name .*…  decoding  +\d+ tokens  +\d+ prompt tokens", row) for row in rows), rows
    assert re.search(r"of 4 documents, prompts \S+ and answers \S+ tokens/s", seen)


def test_a_second_interrupt_ends_at_once(start: Start, docs: Path, tmp_path: Path) -> None:
    child = start("batch", str(docs), "--out", str(tmp_path / "out"), "-n", "40", script={"round_s": 1.0})
    child.until("verify")
    child.send_signal(signal.SIGINT)
    time.sleep(0.4)
    child.send_signal(signal.SIGINT)
    started = time.monotonic()
    child.communicate(timeout=20)
    assert child.returncode == 130
    assert time.monotonic() - started < 1.5
    lines(tmp_path / "out")


def written(out: Path) -> int:
    """Complete lines of results.jsonl."""
    path = out / "results.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
def test_kills_lose_nothing(start: Start, fake: Any, quantspec: Run, tmp_path: Path, toy_command: list[str]) -> None:
    """SIGKILL at random moments (30, in long runs 100): finished documents stay finished, exactly once, and the result equals
    that of an undisturbed run."""
    docs, out, calm = tmp_path / "docs", tmp_path / "out", tmp_path / "calm"
    docs.mkdir()
    for number in range(40):
        (docs / f"{number:02}.txt").write_text(f"Document {number}. " * (1 + number % 7))
    (docs / "bad.txt").write_bytes(b"\xff\xfe")
    flags = ["-n", "16", "--parallel", "3", "-q"]
    random.seed(26)
    kills, partial, known = 0, 0, {}
    while kills < (100 if LONG else 30):
        child = subprocess.Popen(
            [*toy_command, "batch", str(docs), "--out", str(out), *flags],
            env={**os.environ, "FAKE_NATIVE": json.dumps({"round_s": 0.002})},
        )
        # Every other kill comes after a further document, however slow the machine is.
        while kills % 2 and written(out) <= len(known) and child.poll() is None:
            time.sleep(0.005)
        time.sleep(random.random() * (0.05 if kills % 2 else 0.5))
        child.kill()
        ended = child.wait() == 4
        kills += not ended
        if out.exists() and (out / "results.jsonl").exists():
            raw = (out / "results.jsonl").read_text()
            now = {line["document"]: line for line in map(json.loads, raw.splitlines()[: raw.count("\n")])}
            assert all(now.get(name) == line for name, line in known.items()), "a finished document was lost or redone"
            known = now
            partial += 0 < len(now) < 41
        if ended:
            shutil.rmtree(out)
            known = {}
    assert partial > kills // 4
    quantspec("batch", str(docs), "--out", str(out), *flags)
    quantspec("batch", str(docs), "--out", str(calm), *flags)
    assert answers(out) == answers(calm)
    names = [line["document"] for line in lines(out)]
    assert sorted(names) == sorted(set(names)) == sorted(line["document"] for line in lines(calm))
    assert list((out / sources.STATE / "tmp").iterdir()) == []


def test_a_closed_standard_output_is_refused_before_the_work(start: Start, docs: Path, tmp_path: Path) -> None:
    command = ["batch", str(docs), "--out", str(tmp_path / "out"), "-n", "3"]
    for flag in ("--json", "--dry-run"):
        child = start(*command, flag, preexec_fn=lambda: os.close(1))
        _, stderr = child.communicate(timeout=20)
        assert (child.returncode, b"standard output is closed" in stderr) == (1, True), stderr
    assert not (tmp_path / "out").exists()


def test_documents_that_change_while_the_batch_runs(start: Start, fake: Any, quantspec: Run, tmp_path: Path) -> None:
    docs, out = tmp_path / "docs", tmp_path / "out"
    docs.mkdir()
    # The second is read while the first decodes.
    lengths = {"first.txt": 6, "second.txt": 5}
    for name in (*lengths, "deleted.txt", "emptied.txt", "changed.txt", "grown.txt", "shortened.txt", "cut.txt"):
        (docs / name).write_text("Éventuellement, il pleut. " * lengths.get(name, 2))
    command = ["batch", str(docs), "--out", str(out), "-n", "20", "--parallel", "1", "--json"]
    child = start(*command, script={"round_s": 0.05})
    child.until("verify")
    (docs / "deleted.txt").unlink()
    (docs / "emptied.txt").write_text("")
    (docs / "changed.txt").write_text("Now it is bright.")
    (docs / "grown.txt").write_text("Éventuellement, il pleut. " * 9)
    os.truncate(docs / "shortened.txt", 20)
    os.truncate(docs / "cut.txt", 28)  # inside a character
    report = json.loads(child.communicate(timeout=60)[0])
    assert child.returncode == 4
    errors = {result["document"]: result["error"] and result["error"]["message"] for result in report["results"]}
    assert (errors.pop("grown.txt") or "").startswith("grown.txt grew while the batch ran: it and its answer need ")
    assert errors == {
        "first.txt": None,
        "second.txt": None,
        "deleted.txt": "deleted.txt does not exist",
        "emptied.txt": "emptied.txt is empty",
        "changed.txt": None,
        "shortened.txt": None,
        "cut.txt": "cut.txt is not UTF-8: byte 0xc3 at offset 27, line 1",
    }
    # An answer names the text that it is for, and the next run finds nothing to do.
    for result in report["results"]:
        path = docs / result["document"]
        assert not path.exists() or result["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    again = quantspec(*command).json
    assert (again["done"], again["skipped"]) == (1, 4), "what has grown has room now"


def test_an_encrypted_pdf_is_a_failed_document(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    writer = pypdf.PdfWriter()
    writer.add_blank_page(100, 100)
    writer.encrypt("password", algorithm="AES-256")
    writer.write(docs / "secret.pdf")
    outcome = quantspec("batch", str(docs), "--out", str(tmp_path / "out"), "-n", "3", "--json")
    assert (outcome.code, outcome.json["done"]) == (4, 3)
    (failed,) = [result for result in outcome.json["results"] if result["status"] == "failed"]
    assert failed["document"] == "secret.pdf"
    assert "encrypted" in failed["error"]["message"]
    assert "password" in failed["error"]["hint"]


@pytest.mark.slow
@pytest.mark.parametrize("text", ["It was a dark and stormy night. ", "a", "\n"])
def test_a_huge_document_fails_at_once_in_little_memory(
    toy_command: list[str], docs: Path, tmp_path: Path, text: str
) -> None:
    """100 MB: prose, one word, and white space, which a check of the stripped text would miss."""
    with (docs / "huge.txt").open("w") as file:
        file.write((text * 1_000_000)[:1_000_000] * 99 + "x" * 1_000_000)
    program = toy_command[-1].removesuffix("main()") + (
        "import resource\n"
        "try:\n    main()\n"
        "finally:\n    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)"
    )
    command = ["batch", str(docs), "--out", str(tmp_path / "out"), "-n", "3", "-q", "--json"]
    done = subprocess.run([*toy_command[:-1], program, *command], capture_output=True, timeout=60, check=False)
    (failed,) = [result for result in json.loads(done.stdout)["results"] if result["status"] == "failed"]
    assert done.returncode == 4
    assert failed["error"]["message"] == (
        "huge.txt has 100000000 characters and more than 131072 tokens; the context is 131072"
    )
    assert failed["sha256"] is not None
    assert int(done.stderr) < 1_000_000, "kB; encoding takes 10 GB"


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


def test_groups_of_documents_are_counted_as_each_alone(
    fake: Any, quantspec: Run, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (docs / "empty.txt").write_text("")
    command = ["batch", str(docs), "--out", str(tmp_path / "out"), "-n", "3", "--dry-run", "--json"]
    together = quantspec(*command).json["results"]
    monkeypatch.setattr(batch_plan, "GROUP_CHARACTERS", 0)
    assert quantspec(*command).json["results"] == together
    assert [row["document"] for row in together] == ["a.txt", "b.md", "deep/er/c.txt", "empty.txt"]
    assert [row["error"] is None for row in together] == [True, True, True, False]


@pytest.mark.slow
@pytest.mark.parametrize("size_kb", [120, 160, 240])
def test_a_disk_that_is_really_full(toy_command: list[str], tmp_path: Path, size_kb: int) -> None:
    """A small file system for OUT, then the same one with more space. Which file meets the end of the space depends on the
    size.
    """
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace: unshare -rm is refused")
    docs, out, copy, calm = (tmp_path / name for name in ("docs", "out", "copy", "calm"))
    for folder in (docs, out, copy):
        folder.mkdir()
    for number in range(40):
        (docs / f"{number:02}.txt").write_text(f"Document {number}. " * (1 + number % 7))
    command = [*toy_command, "batch", str(docs), "-n", "200", "--parallel", "3", "--json", "--out"]
    script = (
        f'mount -t tmpfs -o size={size_kb}k tmpfs {out} && "$@" > {copy}/full; echo $? > {copy}/code; '
        f"cp {out}/results.jsonl {copy}; ls {out} > {copy}/names; "
        f'mount -o remount,size=16m {out} && "$@" > {copy}/rest; cp -r {out} {copy}/out'
    )
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, "sh", *command, str(out)], capture_output=True, timeout=60, check=False
    )
    full, rest = (json.loads((copy / name).read_text()) for name in ("full", "rest"))
    assert (copy / "code").read_text() == "1\n", done.stderr
    assert full["error"]["kind"] == "io", full["error"]
    assert "full" in full["error"]["message"] or "no space left" in full["error"]["message"]
    assert "run the command again: it resumes" in full["error"]["hint"]
    written = lines(copy)
    assert {line["document"] + ".md" for line in written} <= set((copy / "names").read_text().split())
    assert 0 < full["done"] < 40
    # The journal may have committed one row whose line found no space; the next run writes it.
    assert rest["skipped"] - len(written) in {0, 1}
    assert rest["done"] + rest["skipped"] == 40
    subprocess.run([*command, str(calm)], capture_output=True, timeout=60, check=True)
    assert answers(copy / "out") == answers(calm)
    assert sorted(line["document"] for line in lines(copy / "out")) == [f"{number:02}.txt" for number in range(40)]


def test_a_full_disk_ends_the_batch_and_the_next_run_goes_on(
    fake: Any, quantspec: Run, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    command = ["batch", str(docs), "--out", str(out), "-n", "12", "--parallel", "1", "--json"]
    sync, calls = os.fsync, []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 4:
            raise OSError(28, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    outcome = quantspec(*command)
    assert outcome.code == 1, outcome
    assert "no space left" in outcome.json["error"]["message"]
    monkeypatch.setattr(os, "fsync", sync)
    done = len(lines(out))
    assert done == outcome.json["done"] == len(answers(out))
    assert quantspec(*command).json["done"] == 3 - done


def test_an_answer_without_a_row_is_not_done(
    fake: Any, quantspec: Run, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the disk were full when the journal is written."""
    command = ["batch", str(docs), "--out", str(tmp_path / "out"), "-n", "3", "--parallel", "1", "--json"]
    finish, calls = journal.Journal.finish, []

    def full(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise FileError("the journal cannot be used: disk is full", "free some space")
        finish(*arguments)

    monkeypatch.setattr(journal.Journal, "finish", full)
    outcome = quantspec(*command)
    done = [result for result in outcome.json["results"] if result["status"] == "done"]
    assert (outcome.code, outcome.json["error"]["kind"], outcome.json["done"]) == (1, "io", len(done))
    assert len(lines(tmp_path / "out")) == len(done) < 3
    monkeypatch.undo()
    assert quantspec(*command).json["done"] == 3 - len(done)


def test_a_run_of_few_documents_keeps_earlier_rates(
    fake: Any, quantspec: Run, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statistics = engine.Engine.statistics

    def rates(speed: float, *flags: str) -> set[float]:
        """The decoding rates that the folder's journal has after a run at this speed."""
        monkeypatch.setattr(
            engine.Engine, "statistics", lambda self: {**statistics(self), "decode_tokens_per_s": speed}
        )
        assert quantspec("batch", str(docs), "--out", str(tmp_path / "out"), "-n", "3", *flags).code == 0
        found = journal.peek(tmp_path / "out")[1]
        return {rate["decode_tokens_per_s"] for by_device in found.values() for rate in by_device.values()}

    assert rates(100.0) == {100.0}
    (docs / "more.txt").write_text("One more.")
    assert rates(10.0) == {100.0}
    assert rates(50.0, "--seed", "1", "--temperature", "1") == {50.0}


def test_rates_that_cannot_be_kept_cost_no_report(
    fake: Any, quantspec: Run, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise FileError("the journal cannot be used: disk is full", "free some space")

    monkeypatch.setattr(journal.Journal, "keep_rates", full)
    outcome = quantspec("batch", str(docs), "--out", str(tmp_path / "out"), "-n", "3", "--json")
    assert (outcome.code, outcome.json["done"]) == (0, 3)
    assert "warning: the rates of this run are not kept: the journal cannot be used: disk is full" in outcome.stderr


def test_a_folder_that_cannot_be_written(obedient: Run, docs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir(mode=0o555)
    outcome = obedient("batch", str(docs), "--out", str(out))
    assert outcome.code == 1
    assert "cannot be written" in outcome.stderr
    out.chmod(0o755)
    (docs / "secret.txt").write_text("x")
    (docs / "secret.txt").chmod(0)
    (docs / "deep").chmod(0)
    command = ["--out", str(out), "-n", "3", "--json"]
    outcomes = [obedient("batch", str(documents), *command) for documents in (docs, docs / "**" / "*.txt")]
    (docs / "deep").chmod(0o755)
    for outcome in outcomes:
        failed = {row["document"]: row["error"]["message"] for row in outcome.json["results"] if row["error"]}
        assert failed == {
            "deep": f"folder {docs / 'deep'} cannot be listed: permission denied",
            "secret.txt": "secret.txt cannot be read: permission denied",
        }


def test_a_dry_run_reads_a_folder_that_cannot_be_written(obedient: Run, docs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert obedient("batch", str(docs), "--out", str(out), "-n", "3").code == 0
    for folder in (out / sources.STATE, out):
        folder.chmod(0o555)
    outcome = obedient("batch", str(docs), "--out", str(out), "-n", "3", "--dry-run", "--json")
    for folder in (out, out / sources.STATE):
        folder.chmod(0o755)
    assert (outcome.code, outcome.json["skipped"]) == (0, 3)


def test_an_output_folder_may_have_any_name(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    command = ["batch", str(docs), "--out", str(tmp_path / os.fsdecode(b"100%?\xff#")), "-n", "3", "--json"]
    assert quantspec(*command).json["done"] == 3
    assert quantspec(*command, "--dry-run").json["skipped"] == 3


def test_a_very_deep_folder_is_a_failed_document(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    deep = docs
    for _ in range(201):
        deep /= "d"
        deep.mkdir()
    (deep / "lost.txt").write_text("x")
    outcome = quantspec("batch", str(docs), "--out", str(tmp_path / "out"), "-n", "3", "--json")
    assert (outcome.code, outcome.json["done"], outcome.json["failed"]) == (4, 3, 1)
    assert "200 levels deep" in outcome.json["results"][0]["error"]["message"]


def test_a_damaged_journal_is_named_and_can_be_replaced(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["batch", str(docs), "--out", str(out), "-n", "3"]
    quantspec(*command)
    path = out / sources.STATE / "journal.sqlite"
    path.write_bytes(b"not a database" * 100)
    quantspec(*command).assert_error(1, "journal.sqlite cannot be used", "--no-resume")
    quantspec(*command, "--dry-run").assert_error(1, "journal.sqlite cannot be used")
    assert quantspec(*command, "--no-resume", "--json").json["done"] == 3
    assert quantspec(*command, "--json").json["skipped"] == 3
    # The first page, which opening reads, is whole.
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (path.stat().st_size - 4096))
    quantspec(*command).assert_error(1, "journal.sqlite cannot be used", "--no-resume")
    assert quantspec(*command, "--no-resume", "--json").json["done"] == 3


def test_results_are_rebuilt_from_the_journal(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["batch", str(docs), "--out", str(out), "-n", "3"]
    quantspec(*command)
    whole = (out / "results.jsonl").read_bytes()
    for damaged in (whole[:-7], whole + b'{"document"', b"", None):
        if damaged is None:
            (out / "results.jsonl").unlink()
        else:
            (out / "results.jsonl").write_bytes(damaged)
        quantspec(*command)
        assert (out / "results.jsonl").read_bytes() == whole


def test_results_are_a_file_of_the_folder(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    out.mkdir()
    elsewhere.touch()
    (out / "results.jsonl").symlink_to(elsewhere)
    assert quantspec("batch", str(docs), "--out", str(out), "-n", "3").code == 0
    assert (elsewhere.read_bytes(), len(lines(out))) == (b"", 3)
    (out / "results.jsonl").unlink()
    (out / "results.jsonl").mkdir()
    quantspec("batch", str(docs), "--out", str(out), "-n", "3").assert_error(
        1, "is a directory", "move away what is there"
    )


def test_a_line_that_a_full_disk_cuts_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = {"document": "a", "status": "done", "sha256": "0"}
    with journal.Journal(tmp_path / "out") as kept:
        kept.begin({"a": "a.md", "b": "b.md"}, {})
        kept.finish("a", "a.md", result, "f")
        write = os.write
        monkeypatch.setattr(os, "write", lambda descriptor, raw: write(descriptor, raw[:5]))
        with pytest.raises(FileError, match="no space left"):
            kept.finish("b", "b.md", result | {"document": "b"}, "f")
        monkeypatch.setattr(os, "write", write)
        assert [line["document"] for line in lines(tmp_path / "out")] == ["a"]
        # The journal has it: the next start writes the line.
        kept.begin({}, {})
        assert [line["document"] for line in lines(tmp_path / "out")] == ["a", "b"]


@given(st.text(st.characters(blacklist_characters="/\0"), min_size=1, max_size=300))
def test_every_name_has_a_place(name: str) -> None:
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return
    place = sources.output_name(name, ".md")
    assert len(os.fsencode(place)) <= 255
    assert place.endswith(".md")
    assert place == name + ".md" or len(os.fsencode(name)) > 252


def test_sources_say_what_they_cannot_find(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the name of a document is empty"):
        sources.find([""], tmp_path)
    with pytest.raises(InputError, match="does not exist"):
        sources.Source("x", str(tmp_path / "x")).read()
