"""Random histories of runs into one folder, with other options and suffixes, failures and kills. After each, a run that
nothing disturbs has every answer, and the next one has nothing to do.
"""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quantspec_cli import journal, sources
from quantspec_cli.batch_work import Fingerprints, find_work

NAMES = ("a", "b.txt")


class Kill(BaseException):
    """The process dies."""


class History:
    """Documents, their output folder, and the runs so far."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.documents, self.out = folder / "docs", folder / "out"
        self.documents.mkdir()
        for name in NAMES:
            self.edit(name)

    def edit(self, name: str) -> None:
        (self.documents / name).write_text(f"text {self.random.randrange(3)}")

    def answer(self, name: str, options: str) -> str:
        """Answers differ in length: the journal knows its files by their sizes."""
        digest = hashlib.sha256(((self.documents / name).read_text() + options).encode()).hexdigest()
        return digest[0] * (1 + int(digest[:3], 16))

    def run(self, options: str, suffix: str, *, resume: bool = True, kill: float = 0, fail: float = 0) -> int:
        """A run as `batch_run.Run` makes it; returns how many documents it had to answer."""

        def may_die() -> None:
            if self.random.random() < kill:
                raise Kill

        found = [sources.Source(name, str(self.documents / name)) for name in NAMES]
        places = {source: sources.output_name(source.name, suffix) for source in found}
        prints = Fingerprints(
            "model", "speed", *(f"{kind} {options}" for kind in ("answer", "shortened", "split", "failure"))
        )
        arguments: Any = SimpleNamespace(out=str(self.out), resume=resume, retry_failed=True, quiet=True)
        with journal.Journal(self.out, replace=not resume) as kept:
            work = find_work(arguments, places, kept.contents(), prints)
            kept.take(work.taken)
            assert not kept.begin(
                {job.source.name: job.output for job in work.todo}, {source.name: "done" for source in work.skipped}
            )
            may_die()
            for job in work.todo:
                self.finish(kept, job, options, fails=self.random.random() < fail, may_die=may_die)
        return len(work.todo)

    def finish(self, kept: journal.Journal, job: Any, options: str, *, fails: bool, may_die: Any) -> None:
        name, path = job.source.name, job.source.path
        result = {"document": name, "status": "failed", "output": None}
        result["sha256"] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        if fails:
            kept.finish(name, job.output, result, f"failure {options}")
            return
        replace = Path.replace

        def moved(source: Path, target: Path) -> Path:
            may_die()
            target = replace(source, target)
            may_die()
            return target

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "replace", moved)
            size = kept.write(name, job.output, self.answer(name, options))
        may_die()
        result |= {"status": "done", "output": job.output}
        kept.finish(name, job.output, result, f"answer {options}", size=size, path=path)


@pytest.mark.parametrize("seed", range(60))
def test_no_history_loses_an_answer(tmp_path: Path, seed: int) -> None:
    history = History(tmp_path, seed)
    choose = history.random.choice
    for _ in range(choose([2, 4, 6])):
        if history.random.random() < 0.3:
            history.edit(choose(NAMES))
        if answers := [
            file for name in NAMES for file in history.out.glob(f"{name}.*") if history.random.random() < 0.1
        ]:
            choose(answers).unlink()
        resume, kill, fail = history.random.random() < 0.85, choose([0, 0.15]), choose([0, 0, 0.4])
        try:
            history.run(choose("XY"), choose([".md", ".out"]), resume=resume, kill=kill, fail=fail)
        except Kill:
            continue
    options, suffix = choose("XY"), choose([".md", ".out"])
    history.run(options, suffix)
    lines = [json.loads(line) for line in (history.out / "results.jsonl").read_text().splitlines()]
    assert {line["document"]: (line["status"], line["output"]) for line in lines} == {
        name: ("done", name + suffix) for name in NAMES
    }
    assert len(lines) == len(NAMES)
    for name in NAMES:
        assert (history.out / (name + suffix)).read_text() == history.answer(name, options)
    assert history.run(options, suffix) == 0
