"""The work of a batch: which documents are new, changed or interrupted, and what is known of each."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import render
from .errors import FileError, QuantspecError, one_line
from .generation import Stream
from .sources import Source, shown

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping, Sequence

    from .batch import Arguments
    from .batch_reader import Reader
    from .engine import Engine
    from .generation import Generation
    from .journal import Answer, Contents, Row
    from .model import Prompt
    from .options import GenerateOptions


@dataclass(eq=False)
class RunningCall:
    """A call of the model that has begun.

    Attributes:
        tokens: of its prompt.
        stage: "waiting", "reading" or "decoding", with progress `done` of `total`; or "done".
        stream: the growing answer, so that another thread can end it.
    """

    tokens: int
    stage: str = "waiting"
    done: int = 0
    total: int = 0
    stream: Stream | None = field(default=None, repr=False)

    def decode(
        self, engine: Engine, prompt: Prompt, options: GenerateOptions, stopping: threading.Event | None = None
    ) -> Generation:
        """The answer to the prompt. Raises KeyboardInterrupt if `stopping` is set before it is complete."""

        def stopped() -> bool:
            return stopping is not None and stopping.is_set()

        def on_prefill(done: int, total: int) -> None:
            self.stage, self.done, self.total = "reading", done, total
            # The thread that set `stopping` may have missed the stream.
            if stopped() and (stream := self.stream) is not None:
                stream.close()

        try:
            batch = engine.start([prompt], options, on_prefill=on_prefill)
            with Stream(batch) as stream:
                self.stream = stream
                if stopped():  # as above
                    raise KeyboardInterrupt
                for _ in batch:  # the stream has no piece for a round inside a thinking block
                    self.stage, self.done = "decoding", stream.new_tokens
                    # An answer that was complete before is kept, even if this thread had not read it yet.
                    if stopped() and stream.generation.stop_reason == "interrupted":
                        raise KeyboardInterrupt
                generation = stream.generation
        finally:
            self.stream = None  # it has the prompt's ids, and a callback that refers to the call
        if generation.stop_reason == "interrupted":
            raise KeyboardInterrupt
        return generation


@dataclass(eq=False)  # workers look their jobs up in a list that others change
class Job:
    """One document to answer.

    Attributes:
        source: the document's source.
        output: its answer's path below the output folder.
        tokens: of its prompt, if known.
        shared: tokens at its prompt's start that an earlier prompt has as well, if this is a dry run.
        calls: of the model, as planned.
        call_tokens: of the prompts of these calls.
        read_s: seconds that reading it took, before its tokens were counted.
        sha256: of its bytes, if known.
        warnings: about missing or doubtful parts of its text, once it has been read.
        stage: "waiting" or "reading", of the document's bytes.
        running: its calls that have begun.
        known_calls: if it is answered in parts, its calls that have begun or wait for others.
        done_calls: its calls that are done.
        read_tokens: of the prompts of its calls that are done.
    """

    source: Source
    output: str
    tokens: int | None = None
    shared: int = 0
    calls: int = 1
    call_tokens: int = 0
    read_s: float = 0.0
    sha256: str | None = None
    warnings: Sequence[str] = ()
    stage: str = "waiting"
    running: list[RunningCall] = field(default_factory=list)
    known_calls: int = 0
    done_calls: int = 0
    read_tokens: int = 0

    @property
    def planned_tokens(self) -> int:
        """Tokens of the prompts of all calls, as planned; 0 if not known."""
        return max(self.call_tokens, self.tokens or 0)

    def count(self, prompt_tokens: int) -> None:
        """Counts a call that is done."""
        self.done_calls += 1
        self.read_tokens += prompt_tokens


@dataclass
class Workload:
    """The documents of a run, grouped by what has to be done.

    Attributes:
        moved: places of answers, by name, that the journal last had at the place of another --suffix.
        restored: names of skipped documents that another run, with other options or without the document, could not answer.
        again: number of documents that are done again because of a change.
        missing: number of documents that are done again because their answers are missing.
        edited: documents whose answers were changed after they were written.
        foreign: names of pending documents whose output is a file that the batch did not write; it is not replaced.
    """

    todo: list[Job] = field(default_factory=list)
    skipped: list[Source] = field(default_factory=list)
    failed: list[Source] = field(default_factory=list)
    moved: dict[str, str] = field(default_factory=dict)
    restored: list[str] = field(default_factory=list)
    again: int = 0
    missing: int = 0
    edited: list[str] = field(default_factory=list)
    foreign: set[str] = field(default_factory=set)


def find_work(
    arguments: Arguments, places: Mapping[Source, str], known: Contents, fingerprints: Fingerprints
) -> Workload:
    """Finds the pending documents: new, changed, or interrupted."""
    workload = Workload()
    with render.progress("looking at documents", shown=not arguments.quiet) as on_progress:
        for number, (source, place) in enumerate(places.items(), 1):
            if on_progress is not None:
                on_progress(number, len(places))
            row, job = known.rows.get(source.name), Job(source, place)
            if row is not None and row.finished and arguments.resume:
                try:
                    job.sha256 = hashlib.sha256(source.read()).hexdigest()
                except QuantspecError:
                    job.sha256 = None  # the read before decoding reports the reason
                same = job.sha256 is not None and row.sha256 == job.sha256
                status = fingerprints.status(row.fingerprint) if same else None
                if (
                    row.answered.sha256 == job.sha256 is not None
                    and fingerprints.status(row.answered.fingerprint) == "done"
                    and row.output == place
                    and row.size == _size(Path(arguments.out) / place)
                ):
                    workload.skipped.append(source)
                    workload.restored.append(source.name)
                    continue
                if status == "done":
                    size = _size(Path(arguments.out) / place)
                    if _in_place(row, place, size, known.earlier.get(place)):
                        workload.skipped.append(source)
                        workload.moved |= {source.name: place} if row.output != place else {}
                        workload.edited += [source.shown] if size != row.size else []
                        continue
                if status == "failed" and not arguments.retry_failed:
                    workload.failed.append(source)
                    continue
                if row.status == "done":
                    # Nothing that the answer depends on has changed, so only its file can be missing.
                    missing = status == "done" and row.output == place
                    workload.missing += missing
                    workload.again += not missing
                if (other := _other_document(row, job)) is not None:
                    job.source = replace(source, problem=other)
            workload.todo.append(job)
    return workload


def _other_document(row: Row, job: Job) -> FileError | None:
    """An error if the answer at the document's place is to another file, which has not changed since: one of equal name in
    another folder.
    """
    sha256, path = row.answered.sha256 or row.sha256, job.source.path
    if row.path is None or path is None or job.sha256 == sha256 or os.path.realpath(path) == row.path:
        return None
    try:
        if hashlib.sha256(Source(job.source.name, row.path).read()).hexdigest() != sha256:
            return None
    except QuantspecError:
        return None
    return FileError(
        f"{job.source.shown} would replace the answer to another document, {one_line(shown(row.path))}",
        "name another folder for the answers (--out), or give the common directory of both documents",
    )


def _in_place(row: Row, place: str, size: int | None, earlier: Answer | None) -> bool:
    """True if the file at a place, of this size, is the row's answer. At the row's own place it may have been edited, unless
    a run with other options has begun the document again. At the place of another --suffix it has the row's size, and
    `earlier`, the answer that a run with that --suffix put there, is none or the same.
    """
    if size is None or row.output == place:
        return size is not None and (row.size == size or row.status == "done")
    return row.size == size and earlier in (None, (row.sha256, row.fingerprint, size))


def _size(path: Path) -> int | None:
    """Bytes of a file; None if it is missing or unreadable."""
    try:
        return path.stat().st_size
    except OSError:
        return None


@dataclass(frozen=True)
class Fingerprints:
    """Fingerprints of a run.

    Attributes:
        model: the model's.
        answer: of everything that an answer in one call depends on.
        shortened: the same of one that the context shortens.
        split: of everything that an answer in several calls depends on, but for a context that memory shortens.
        failure: of everything that a failure depends on.
    """

    model: str
    answer: str
    shortened: str
    split: str
    failure: str

    def status(self, fingerprint: str | None) -> str | None:
        """The status of a result with a fingerprint; None if this run's result may be another one."""
        if fingerprint == self.failure:
            return "failed"
        return "done" if fingerprint in (self.answer, self.shortened, self.split) else None

    def of(self, result: Mapping[str, Any], reader: Reader) -> str:
        """The fingerprint of a result of this run."""
        if result["status"] != "done":
            return self.failure
        if "tree" in result:
            return self.split
        return self.shortened if reader.shortens(result["prompt_tokens"]) else self.answer
