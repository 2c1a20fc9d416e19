"""A batch that is interrupted, killed or disturbed loses no finished document."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import LONG, Child, Outcome, answers, lines, written

from quantspec_cli import batch, batch_run, batch_view, documents, sources

Run = Callable[..., Outcome]
Start = Callable[..., Child]


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


def test_a_terminal_is_drawn_by_time_and_not_by_document(
    fake: Any, quantspec: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "list.jsonl").write_text("".join(f'{{"id": "{number}", "text": "x"}}\n' for number in range(100)))
    drawn: list[float] = []
    monkeypatch.setattr(batch_view.View, "show", lambda *_: drawn.append(time.perf_counter()))
    command = ["batch", str(tmp_path / "list.jsonl"), "--out", str(tmp_path / "out"), "-n", "2"]
    assert quantspec(*command).code == 0
    assert 0 < len(drawn) < 100
    assert all(after - before > 0.05 for before, after in pairwise(drawn))


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


def test_a_second_interrupt_ends_at_once(start: Start, docs: Path, tmp_path: Path) -> None:
    (docs / "long.txt").write_text("word " * 3000)
    flags = ["-n", "40", "-c", "700", "--long", "map-reduce", "--instruction", "Sum up."]
    child = start("batch", str(docs), "--out", str(tmp_path / "out"), *flags, script={"round_s": 1.0})
    child.until("verify")
    child.send_signal(signal.SIGINT)
    time.sleep(0.4)
    child.send_signal(signal.SIGINT)
    started = time.monotonic()
    child.communicate(timeout=20)
    assert child.returncode == 130
    assert time.monotonic() - started < 1.5
    lines(tmp_path / "out")


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


def test_a_document_that_changes_and_fails_keeps_no_numbers_of_the_counted_one(
    fake: Any, quantspec: Run, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, page = b"caf\xe9", docs / "page.html"
    opened = batch_run.Run._opened
    page.write_text("some words")
    monkeypatch.setattr(documents, "extract", lambda *_: ("some words", ("1 chart not read",)))

    def changed(*arguments: Any) -> Any:
        page.unlink()
        (docs / "a.txt").write_bytes(b"")
        (docs / "b.md").write_bytes(raw)
        return opened(*arguments)

    command = ["batch", str(docs), "--out", str(tmp_path / "out"), "-n", "3", "--json"]
    with monkeypatch.context() as patch:
        patch.setattr(batch_run.Run, "_opened", changed)
        results = {result["document"]: result for result in quantspec(*command).json["results"]}
    hashes = {"page.html": None, "a.txt": hashlib.sha256(b"").hexdigest(), "b.md": hashlib.sha256(raw).hexdigest()}
    for name, digest in hashes.items():
        assert (results[name]["sha256"], results[name]["prompt_tokens"]) == (digest, None), results[name]
        assert "warnings" not in results[name]
    # A file that is back is no failure of the same content.
    page.write_text("some words")
    assert quantspec(*command).json["done"] == 1


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("size_kb", [140, 180, 240])
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
