"""`quantspec batch` with the native engine on the demo model: each document's tokens are those of `run` on it alone."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Outcome, answers

from quantspec_cli.bench import grid

Run = Callable[..., Outcome]

# Characters of each document: from less than a page to prompts of several chunks.
LENGTHS = (90, 700, 2_500, 4_000, 9_000, 17_000)

# Dies in the third document's last step but two: its answer is in place, its row is not committed, and others decode.
DYING = """
import os, signal
from quantspec_cli import journal
from quantspec_cli.__main__ import main
finish, calls = journal.Journal.finish, []
def dying(*arguments, **options):
    calls.append(arguments)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    finish(*arguments, **options)
journal.Journal.finish = dying
main()
"""


@pytest.mark.slow
def test_ragged_documents_and_a_kill_change_no_token(quantspec: Run, tmp_path: Path) -> None:
    docs, calm, killed = tmp_path / "docs", tmp_path / "calm", tmp_path / "killed"
    docs.mkdir()
    book = gzip.decompress(grid.BOOK.read_bytes()).decode()
    for number, length in enumerate(LENGTHS):
        (docs / f"{number}.txt").write_text(book[5_000 * number :][:length])
    flags = ["-n", "60", "-t", "2", "--json"]
    command = ["batch", str(docs), "--parallel", "3", *flags, "--out"]

    report = quantspec(*command, str(calm)).json
    assert (report["done"], report["stats"]["batch_peak"]) == (len(LENGTHS), 3)
    for result in report["results"]:
        (alone,) = quantspec("run", str(docs / result["document"]), *flags).json["results"]
        assert result["tokens"] == alone["tokens"], result["document"]
        text = alone["text"]
        assert (calm / result["output"]).read_text() == (text if text.endswith("\n") else text + "\n")
    assert len(report["results"]) == len(LENGTHS)

    died = subprocess.run([sys.executable, "-c", DYING, *command, str(killed)], capture_output=True, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert len((killed / "results.jsonl").read_text().splitlines()) == 2
    resumed = quantspec(*command, str(killed)).json
    assert (resumed["done"], resumed["skipped"]) == (len(LENGTHS) - 2, 2)
    assert answers(killed) == answers(calm)
    lines = [json.loads(line) for line in (killed / "results.jsonl").read_text().splitlines()]
    assert {line["document"]: line["tokens"] for line in lines} == {
        line["document"]: line["tokens"] for line in report["results"]
    }
    assert len(lines) == len(LENGTHS)


@pytest.mark.slow
def test_answers_that_end_early_waste_few_pages(quantspec: Run, tmp_path: Path) -> None:
    """Documents of 6,000 and 12,000 tokens. The worst case of `-n 300`: every answer ends at once."""
    docs = tmp_path / "docs"
    docs.mkdir()
    book = gzip.decompress(grid.BOOK.read_bytes()).decode()
    for number, length in enumerate((20_000, 40_000)):
        (docs / f"{number}.txt").write_text(book[5_000 * number :][:length])
    command = ["batch", str(docs), "--out", str(tmp_path / "out"), "-n", "300", "--stop", "e", "-t", "2", "--json"]
    dry = quantspec(*command, "--dry-run").json
    assert (dry["predicted_from"], dry["predicted_s"] > 0) == ("plan", True)
    report = quantspec(*command).json
    lengths = [result["prompt_tokens"] for result in report["results"]]
    reserved = sum((length + 300) // 128 for length in lengths)
    stats = report["stats"]
    assert stats["reserved_pages"] == reserved
    unused = stats["pool_waste"] * reserved
    assert unused == pytest.approx(round(unused))
    # Two or three pages each, and none of the prompts'.
    assert 2 * len(lengths) <= round(unused) <= 3 * len(lengths)
    assert stats["pool_waste"] < 0.05
