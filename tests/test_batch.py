"""`quantspec batch`: every document ends as an answer or a reason. The engine is the toy."""

from __future__ import annotations

import json
import os
import pty
import re
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
from conftest import Outcome, answers, chat_model, ids_of, lines, rest_of

from quantspec_cli import batch, batch_reader, engine, fingerprint, journal

Run = Callable[..., Outcome]


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


def test_an_empty_answer_is_done_with_a_warning(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    model = chat_model(tmp_path / "m", "{% for m in messages %}{{ m.content }}{% endfor %}<think>")
    command = ["batch", str(docs / "a.txt"), "-m", model, "--instruction", "Sum up."]

    def warning(*flags: str) -> str:
        """Of the run, and of the next one, which skips the document."""
        out = tmp_path / flags[-1]
        for _ in range(2):
            outcome = quantspec(*command, "--out", str(out), *flags)
            (result,) = lines(out)
            (words,) = result["warnings"]
            assert (outcome.code, result["status"], answers(out)) == (0, "done", {"a.txt.md": b""})
            assert outcome.stderr.count(f"warning: a.txt: {words}\n") == 1
        return str(words)

    fake.answer = ids_of("A thought without an end.")
    assert warning("-n", "3") == "the answer is empty: it was cut inside its thinking block (raise -n or -c)"
    ended = ids_of("Hm.</think>\n")
    fake.answer = ended + ids_of("\nEND of it")
    assert warning("-n", str(len(ended))) == "the answer is empty: it was cut at -n or -c, after its thinking"
    fake.answer = ids_of("Hm.</think>END of it")
    assert warning("--stop", "END") == "the answer is empty: it begins with a stop string"
    fake.answer = [2]
    assert warning("--seed", "1") == "the answer is empty"


def test_one_of_a_thing_is_singular(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    document = str(docs / "a.txt")
    command = ["batch", document, "--out", str(tmp_path / "out"), "-n", "1", "--ignore-eos"]
    said = quantspec(*command, "--dry-run").stdout + quantspec(*command).stderr
    said += quantspec("run", document, "-n", "1").stderr
    assert not re.findall(r"\b1 (?:new |prompt )?(?:token|document|answer|round)s\b(?!/s)", said), said
    for words in ("1 document: 1 to do", "1 document: 1 done", "at most 1 new token\n", "1 new token (length)"):
        assert words in said
    assert "1 answer was cut at 1 token (-n)" in said


def test_documents_may_be_plain_arguments_of_run(fake: Any, quantspec: Run, docs: Path) -> None:
    a, b = str(docs / "a.txt"), str(docs / "b.md")
    assert quantspec("run", a, b, "-n", "9").stdout == quantspec("run", "-p", a, "-p", b, "-n", "9").stdout
    assert quantspec("run", a, "-p", b, "-n", "9").stdout == quantspec("run", a, b, "-n", "9").stdout


def test_finished_documents_are_skipped_and_changed_ones_repeated(
    fake: Any, quantspec: Run, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    monkeypatch.setattr(fingerprint, "__version__", "9")
    newer = quantspec(*command[:4], "-n", "12", "--instruction", "Sum up.")
    assert "to repeat, as the document, the model, the options or quantspec changed: 4\n" in newer.stderr
    assert "deleted" not in newer.stderr
    assert "4 done, 0 failed, 0 done before" in newer.stderr


def test_a_missing_answer_is_no_change_of_its_document(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["batch", str(docs), "--out", str(out), "-n", "12"]
    quantspec(*command)
    (out / "b.md.md").unlink()
    again = quantspec(*command)
    assert [line for line in again.stderr.splitlines() if "to repeat" in line] == [
        "to repeat, as the answer was deleted or moved: 1"
    ]
    assert "1 done, 0 failed, 2 done before" in again.stderr
    (out / "b.md.md").unlink()
    (docs / "a.txt").write_text("A new text.")
    both = quantspec(*command)
    assert "quantspec changed: 1\n" in both.stderr
    assert "deleted or moved: 1\n" in both.stderr


def test_failures_are_named_and_kept(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (docs / "binary.png").write_bytes(b"\x89PNG\0\0")
    (docs / "empty.txt").write_text("")
    (docs / "latin.txt").write_bytes(b"caf\xe9")
    (docs / "dangling.txt").symlink_to("nowhere")
    (docs / "itself.txt").symlink_to("itself.txt")
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
    assert set(failed) == {"binary.png", "empty.txt", "latin.txt", "dangling.txt", "itself.txt", "pipe", "long.txt"}
    assert failed["dangling.txt"]["message"] == "dangling.txt is a link to nowhere, which does not exist"
    assert failed["dangling.txt"]["hint"] == "restore that file or remove the link"
    assert "levels of symbolic links" in failed["itself.txt"]["message"]
    assert failed["itself.txt"]["hint"] == "mend or remove it"
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
    unreadable = {"dangling.txt", "itself.txt", "pipe"}
    assert not unreadable & {line["document"] for line in lines(out)[-3:]}
    again = quantspec(*command, "--json")
    assert (again.code, again.json["failed"], again.json["done"]) == (4, 7, 0)
    assert {line["document"] for line in lines(out)[-3:]} == unreadable
    tried = quantspec(*command, "--retry-failed")
    assert tried.code == 4
    assert "failed  long.txt and its answer need " in tried.stderr
    assert "13 documents: 0 done, 7 failed, 6 done before" in tried.stderr
    (docs / "empty.txt").write_text("No longer empty.")
    assert quantspec(*command, "--json").json["done"] == 1


def test_a_quiet_batch_still_names_what_failed(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    """As a job of cron, of which nobody reads results.jsonl until something is wrong."""
    command = ["batch", str(docs), "--out", str(tmp_path / "out"), "-n", "3", "-q"]
    outcome = quantspec(*command)
    assert (outcome.code, outcome.stderr) == (0, "")
    (docs / "empty.txt").write_text("")
    outcome = quantspec(*command)
    assert outcome.code == 4
    failed, hint = outcome.stderr.splitlines()
    assert failed.startswith("failed  empty.txt "), failed
    assert hint.startswith("        "), hint


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
    monkeypatch.setattr(batch_reader, "GROUP_CHARACTERS", 0)
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


def test_bad_arguments_are_refused_before_anything_is_written(
    fake: Any, quantspec: Run, docs: Path, tmp_path: Path
) -> None:
    out = ["--out", str(tmp_path / "out")]
    quantspec("batch", *out).assert_error(2, "no document")
    quantspec("batch", str(docs)).assert_error(2, "--out")
    quantspec("batch", str(docs), "--out", "").assert_error(2, "--out")
    quantspec("batch", "-", *out).assert_error(2, "batch takes no standard input", "list.jsonl", "quantspec run -")
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


@pytest.mark.slow
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
    assert re.search(r"of 4 documents(, (about|at most) \S+ s left)?, prompts \S+ and answers \S+ tokens/s", seen)


@pytest.mark.slow
def test_a_small_terminal_shows_names_and_totals(toy_command: list[str], docs: Path, tmp_path: Path) -> None:
    for number in range(9):
        (docs / f"{number}.txt").write_text("The rain fell. " * 40)
    names = {str(path.relative_to(docs)) for path in docs.rglob("*.*")}
    terminal, end = pty.openpty()
    # The system's size of the terminal is 0.
    size = {"COLUMNS": "40", "LINES": "10"}
    environment = {**os.environ, **size, "FAKE_NATIVE": json.dumps({"round_s": 0.1}), "TERM": "xterm"}
    command = [*toy_command, "batch", str(docs), "--out", str(tmp_path / "out"), "-n", "9", "--parallel", "8"]
    child = subprocess.Popen(command, stderr=end, env=environment)
    os.close(end)
    seen = rest_of(terminal).decode()
    assert child.wait(timeout=30) == 0
    frames = [
        re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", frame).splitlines()
        for frame in seen.split("\x1b[1A")
        if " of 12 doc" in frame
    ]
    assert frames
    for frame in frames:
        assert len(frame) < 10, frame
        assert "tokens/s" in "".join(frame[-2:]), "the totals are whole"
        rows = [row for row in frame if re.search(" (waiting|reading|decoding) ", row)]
        assert all(row.split()[0] in names for row in rows), rows


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
