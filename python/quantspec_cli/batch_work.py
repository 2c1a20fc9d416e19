"""The work of a batch: which documents are new, changed or interrupted, and what is known of each."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

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
    from .mapreduce import Call
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
        taken: places of answers, by name, to skipped documents of which the last result is another one: an answer at the
            place of another --suffix, or a failure of a run with other options or without the document.
        again: names of pending documents that have changed, or whose model, options or version have.
        missing: names of pending documents whose answers are missing.
        edited: documents whose answers were changed after they were written.
        foreign: names of pending documents whose output is a file that the batch did not write; it is not replaced.
    """

    todo: list[Job] = field(default_factory=list)
    skipped: list[Source] = field(default_factory=list)
    failed: list[Source] = field(default_factory=list)
    taken: dict[str, str] = field(default_factory=dict)
    again: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
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
            answer = _answer(known, row, place)
            if arguments.resume and row is not None and (row.failed or answer is not None):
                with suppress(QuantspecError):  # the read before decoding reports the reason
                    job.sha256 = hashlib.sha256(source.read()).hexdigest()
                last = row.output == place and not row.failed
                missing = False
                if answer is not None and fingerprints.fits(answer, job):
                    size = _size(Path(arguments.out) / place)
                    # The last answer may have been edited, unless a run with other options has begun the document again.
                    if size is not None and (size == answer.size or (last and row.status == "done")):
                        workload.skipped.append(source)
                        workload.taken |= {} if last else {source.name: place}
                        workload.edited += [source.shown] if size != answer.size else []
                        continue
                    missing = row.output == place
                if fingerprints.fails(row, job) and not arguments.retry_failed:
                    workload.failed.append(source)
                    continue
                if row.status == "done":
                    (workload.missing if missing else workload.again).add(source.name)
            if arguments.resume and answer is not None and (other := _other_document(answer, job)) is not None:
                job.source = replace(source, problem=other)
            workload.todo.append(job)
    return workload


def _answer(known: Contents, row: Row | None, place: str) -> Answer | None:
    """The answer that the journal has put at a place; without one the document's last answer, which may have been moved to
    the place of this --suffix.
    """
    answer = known.answers.get(place)
    if answer is None and row is not None:
        answer = known.answers.get(row.output)
    return answer if answer is not None and answer.known else None


def _other_document(answer: Answer, job: Job) -> FileError | None:
    """An error if the answer that would be replaced is to another file, which has not changed since: one of equal name in
    another folder.
    """
    path = job.source.path
    if answer.path is None or path is None or job.sha256 == answer.sha256 or os.path.realpath(path) == answer.path:
        return None
    try:
        if hashlib.sha256(Source(job.source.name, answer.path).read()).hexdigest() != answer.sha256:
            return None
    except QuantspecError:
        return None
    return FileError(
        f"{job.source.shown} would replace the answer to another document, {one_line(shown(answer.path))}",
        "name another folder for the answers (--out), or give the common directory of both documents",
    )


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
        speed: of everything that the speed on one device depends on.
        answer: of everything that the answer to a whole document depends on.
        shortened: the same of one that the context shortens.
        split: of everything that the answer to a document in parts depends on, but for a context that memory shortens.
        failure: of everything that a failure depends on.
    """

    model: str
    speed: str
    answer: str
    shortened: str
    split: str
    failure: str

    def fits(self, answer: Answer, job: Job) -> bool:
        """True if this run would have the same answer to the document."""
        same = answer.name == job.source.name and answer.sha256 == job.sha256
        return same and answer.fingerprint in (self.answer, self.shortened, self.split)

    def fails(self, row: Row, job: Job) -> bool:
        """True if the document would fail again."""
        return row.failed and row.fingerprint == self.failure and row.sha256 == job.sha256 is not None

    def of(self, answer: Call | None, reader: Reader) -> str:
        """The fingerprint of an answer of this run, or of a failure."""
        if answer is None:
            return self.failure
        if not answer.whole:
            return self.split
        return self.shortened if reader.shortens(answer.generation.prompt_tokens) else self.answer
