"""Files of the output folder: an answer is the batch's own, and no other file is replaced."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Child, Outcome, answers, lines, written

from quantspec_cli import journal, sources
from quantspec_cli.errors import FileError

Run = Callable[..., Outcome]
Start = Callable[..., Child]


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


def test_a_place_that_cannot_be_written_is_found_before_decoding(
    fake: Any, quantspec: Run, docs: Path, tmp_path: Path
) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    out.mkdir()
    elsewhere.mkdir()
    command = ["batch", str(docs / "deep"), "--out", str(out), "-n", "3", "--json"]

    def refused(*flags: str) -> None:
        """By the dry run, the run and its repetition, none of which loads the model."""
        for outcome in (quantspec(*command, *flags, "--dry-run"), *(quantspec(*command, *flags) for _ in range(2))):
            (error,) = [row["error"]["message"] for row in outcome.json["results"]]
            assert words in error
        assert fake.engines == []

    words = f"leads out of {out}, to {elsewhere}"
    (out / "er").symlink_to(elsewhere)
    refused()
    (out / "er").unlink()
    words = f"answer {out}/er/c.txt.md cannot be written: {out}/er is no directory"
    (out / "er").touch()
    refused()
    (out / "er").unlink()
    words = f"answer {out}/er/c.txt.md cannot be written: it is a directory"
    (out / "er/c.txt.md").mkdir(parents=True)
    refused("--no-resume")
    (out / "er/c.txt.md").rmdir()
    assert quantspec(*command).json["done"] == 1


def test_a_folder_without_permission_is_found_before_decoding(obedient: Run, docs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "er").mkdir(parents=True)
    (out / "er").chmod(0o555)
    command = ["batch", str(docs / "deep"), "--out", str(out), "-n", "3", "--json"]
    dry, run = obedient(*command, "--dry-run"), obedient(*command)
    (out / "er").chmod(0o755)
    for outcome in (dry, run):
        (error,) = [row["error"]["message"] for row in outcome.json["results"]]
        assert f"no permission to write to {out}/er" in error
    assert "decode_s" not in run.json["stats"]


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


@pytest.mark.slow
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
    assert "quantspec changed: 2\n" in quantspec(*command[:-1], "-n", "6").stderr
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
    assert quantspec(*command).json["skipped"] == 3


def test_a_suffix_may_change_and_change_back(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    """Files of both suffixes are the batch's own, and each is replaced only by a run with its suffix."""
    out = tmp_path / "out"

    def done(tokens: str, suffix: str, *flags: str) -> tuple[int, int, int]:
        command = ["batch", str(docs), "--out", str(out), "-n", tokens, "--suffix", suffix, *flags, "--json"]
        report = quantspec(*command).json
        return report.get("done"), report["failed"], report["skipped"]

    assert done("3", ".md") == done("5", ".txt") == (3, 0, 0)
    short, longer = ((out / f"a.txt{suffix}").read_text() for suffix in (".md", ".txt"))
    assert short != longer
    # Two instructions with a suffix each: both are done, and the results are those of the last command.
    for tokens, suffix in (("3", ".md"), ("5", ".txt")):
        assert done(tokens, suffix) == (0, 0, 3)
        assert min((line["output"], line["new_tokens"]) for line in lines(out)) == (f"a.txt{suffix}", int(tokens))
    assert done("5", ".md", "--dry-run") == (None, 0, 0)
    assert done("5", ".md") == (3, 0, 0)
    assert (out / "a.txt.md").read_text() == longer
    for suffix in (".txt", ".md"):
        assert done("5", suffix) == (0, 0, 3)
        assert sorted(line["output"] for line in lines(out))[0] == f"a.txt{suffix}"
    # Someone else's file is still refused.
    (out / "a.txt.txt").write_text("precious")
    assert done("3", ".txt") == (2, 1, 0)
    assert (out / "a.txt.txt").read_text() == "precious"


def test_an_answer_of_another_suffix_and_of_equal_size_is_no_answer(
    fake: Any, quantspec: Run, docs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = ["batch", str(docs / "a.txt"), "--out", str(out), "-n", "3", "--json"]
    for token, suffix in ((17, ".md"), (18, ".txt"), (18, ".md")):
        fake.answer = [token, token, token]
        report = quantspec(*command, "--suffix", suffix, "--seed", str(token), "--temperature", "1").json
        assert (report["done"], report["skipped"]) == (1, 0)
    assert (out / "a.txt.md").read_text() == (out / "a.txt.txt").read_text()


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


def test_a_run_that_fails_loses_no_answers(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    """The options of one run are wrong, and a document is absent in another."""
    command = ["batch", str(docs), "--out", str(tmp_path / "out"), "-n", "3", "--json"]
    before = quantspec(*command).json["results"]
    for _ in range(2):
        assert quantspec(*command, "-n", "9000", "-c", "100").json["failed"] == 3
    absent = (docs / "a.txt").read_bytes()
    (docs / "a.txt").unlink()
    (docs / "a.txt").symlink_to("nowhere")
    report = quantspec(*command).json
    assert (report["failed"], report["skipped"]) == (1, 2)
    (docs / "a.txt").unlink()
    (docs / "a.txt").write_bytes(absent)
    assert quantspec(*command, "--dry-run").json["skipped"] == 3
    report = quantspec(*command).json
    assert (report["done"], report["failed"], report["skipped"]) == (0, 0, 3)
    assert sorted(map(str, report["results"])) == sorted(map(str, before))
    # An answer that was deleted or edited since is none.
    quantspec(*command, "-n", "9000", "-c", "100")
    (tmp_path / "out/a.txt.md").write_text("changed")
    (tmp_path / "out/b.md.md").unlink()
    assert quantspec(*command, "--dry-run").json["skipped"] == 1


def test_an_answer_that_was_replaced_is_forgotten(
    fake: Any, quantspec: Run, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run fails, the next one replaces the answer but not the result, and another fails again."""
    out = tmp_path / "out"
    command = ["batch", str(docs / "a.txt"), "--out", str(out), "--json"]
    failing = [*command, "-n", "9000", "-c", "100"]
    assert quantspec(*command, "-n", "3").json["done"] == 1
    answer = (out / "a.txt.md").read_bytes()
    assert quantspec(*failing).json["failed"] == 1

    def full(*_: Any, **__: Any) -> None:
        raise FileError("the journal cannot be used: disk is full", "free some space")

    with monkeypatch.context() as patch:
        patch.setattr(journal.Journal, "finish", full)
        assert quantspec(*command, "-n", "5").code == 1
    assert (out / "a.txt.md").read_bytes() != answer
    assert quantspec(*failing).json["failed"] == 1
    assert quantspec(*command, "-n", "3").json["done"] == 1
    assert (out / "a.txt.md").read_bytes() == answer


def test_an_answer_that_cannot_be_moved_leaves_its_place_to_the_user(
    fake: Any, quantspec: Run, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the folder is another file system's."""
    out, replace = tmp_path / "out", Path.replace
    command = ["batch", str(docs), "--out", str(out), "-n", "3", "--json"]

    def refuse(path: Path, target: Path) -> Path:
        if target.name.endswith(".md"):
            raise OSError(errno.EXDEV, "another device")
        return replace(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", refuse)
        assert quantspec(*command).json["failed"] == 3
    (out / "a.txt.md").write_text("my own notes")
    report = quantspec(*command).json
    assert (report["done"], report["failed"]) == (2, 1)
    assert (out / "a.txt.md").read_text() == "my own notes"


def test_documents_of_equal_name_in_two_folders(fake: Any, quantspec: Run, tmp_path: Path) -> None:
    for year in ("2023", "2024"):
        (tmp_path / year).mkdir()
        (tmp_path / year / "lease.txt").write_text(f"The lease of {year}.")
    command = ["batch", "--out", str(tmp_path / "out"), "-n", "3", "--json"]
    assert quantspec(*command, str(tmp_path / "2023")).json["done"] == 1
    assert "to repeat" not in quantspec(*command[:-1], str(tmp_path / "2024")).stderr
    answer = (tmp_path / "out/lease.txt.md").read_bytes()
    for _ in range(2):
        (result,) = quantspec(*command, str(tmp_path / "2024")).json["results"]
        assert f"another document, {tmp_path}/2023/lease.txt" in result["error"]["message"]
        assert (tmp_path / "out/lease.txt.md").read_bytes() == answer
    assert quantspec(*command, str(tmp_path / "2023")).json["skipped"] == 1
    # A folder that was moved, with a document that has changed.
    (tmp_path / "2023").rename(tmp_path / "old")
    (tmp_path / "old/lease.txt").write_text("The lease of 2023, amended.")
    assert quantspec(*command, str(tmp_path / "old")).json["done"] == 1


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


def test_an_output_folder_may_be_a_link(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("out")
    command = ["batch", str(docs), "--out", str(tmp_path / "link"), "-n", "3"]
    quantspec(*command).assert_error(1, "is a link to out, which does not exist", "create that folder")
    (tmp_path / "out").mkdir()
    assert quantspec(*command).code == 0
    assert len(answers(tmp_path / "out")) == 3


def test_an_output_folder_may_have_any_name(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    command = ["batch", str(docs), "--out", str(tmp_path / os.fsdecode(b"100%?\xff#")), "-n", "3", "--json"]
    assert quantspec(*command).json["done"] == 3
    assert quantspec(*command, "--dry-run").json["skipped"] == 3
