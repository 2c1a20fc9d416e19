"""The journal of a batch and results.jsonl, whole or damaged, on a full disk or a folder without rights."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome, answers, lines

from quantspec_cli import engine, journal, sources
from quantspec_cli.errors import FileError

Run = Callable[..., Outcome]


def test_an_answer_without_a_row_is_not_done(
    fake: Any, quantspec: Run, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the disk were full when the journal is written."""
    command = ["batch", str(docs), "--out", str(tmp_path / "out"), "-n", "3", "--parallel", "1", "--json"]
    finish, calls = journal.Journal.finish, []

    def full(*arguments: Any, **options: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise FileError("the journal cannot be used: disk is full", "free some space")
        finish(*arguments, **options)

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
    # Other drafts have another speed.
    assert rates(30.0, "--seed", "2", "--temperature", "1", "--gamma", "2") == {50.0, 30.0}


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


def test_a_journal_of_another_version_is_kept(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["batch", str(docs), "--out", str(out), "-n", "3"]
    quantspec(*command)
    path = out / sources.STATE / "journal.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 9")
    before = path.read_bytes()
    for flags in ([], ["--dry-run"], ["--no-resume"]):
        quantspec(*command, *flags).assert_error(1, "is of version 9, this program supports 3", "another output folder")
    assert path.read_bytes() == before


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


def test_a_resumed_run_reads_no_results(
    fake: Any, quantspec: Run, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens of 100,000 answers take gigabytes as Python's objects."""
    command = ["batch", str(docs), "--out", str(tmp_path / "out"), "-n", "3"]
    quantspec(*command)

    monkeypatch.setattr(journal, "json", None)
    for flags in ([], ["--dry-run", "--json"]):
        assert quantspec(*command, *flags).code == 0


def test_results_are_a_file_of_the_folder(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.touch()
    assert quantspec("batch", str(docs), "--out", str(out), "-n", "3").code == 0
    (out / "results.jsonl").unlink()
    (out / "results.jsonl").symlink_to(elsewhere)
    assert quantspec("batch", str(docs), "--out", str(out), "-n", "3").code == 0
    assert (elsewhere.read_bytes(), len(lines(out))) == (b"", 3)
    (out / "results.jsonl").unlink()
    (out / "results.jsonl").mkdir()
    quantspec("batch", str(docs), "--out", str(out), "-n", "3").assert_error(
        1, "is a directory", "move away what is there"
    )


def test_the_first_run_replaces_no_results_of_the_user(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "results.jsonl").write_text('{"my": "data"}')
    command = ["batch", str(docs), "--out", str(out), "-n", "3"]
    # The second run finds a journal, which has no document.
    for flags in (["--dry-run"], [], [], ["--dry-run"]):
        quantspec(*command, *flags).assert_error(1, f"{out}/results.jsonl exists and is not as", "--no-resume")
    assert (out / "results.jsonl").read_text() == '{"my": "data"}'
    assert answers(out) == {}
    assert quantspec(*command, "--no-resume", "--dry-run").code == 0
    assert quantspec(*command, "--no-resume").code == 0
    assert len(lines(out)) == 3
    assert quantspec(*command, "--json").json["skipped"] == 3


def test_a_line_that_a_full_disk_cuts_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = {"document": "a", "status": "done", "sha256": "0"}
    with journal.Journal(tmp_path / "out") as kept:
        kept.begin({"a": "a.md", "b": "b.md"}, {})
        kept.finish("a", "a.md", result, "f", size=1)
        write = os.write
        monkeypatch.setattr(os, "write", lambda descriptor, raw: write(descriptor, raw[:5]))
        with pytest.raises(FileError, match="no space left"):
            kept.finish("b", "b.md", result | {"document": "b"}, "f", size=1)
        monkeypatch.setattr(os, "write", write)
        assert [line["document"] for line in lines(tmp_path / "out")] == ["a"]
        # The journal has it: the next start writes the line.
        kept.begin({}, {})
        assert [line["document"] for line in lines(tmp_path / "out")] == ["a", "b"]
