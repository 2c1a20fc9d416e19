"""The run of a batch: documents in, answers out, and a row of the journal for each.

Each worker thread processes one document at a time, from its bytes to its row in the journal. Parts of a long document
have threads of their own. The engine's scheduler decodes all of them in shared rounds. The main thread shows progress and
handles signals, so a signal never arrives between the steps that finish an answer. Every document ends as done or failed.
The next run continues documents that a signal interrupted.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import sys
import threading
import time
from collections import Counter, deque
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from . import __version__, background, batch_view, hub, mapreduce, output, render, report, sources
from .batch_plan import counted, longest, room
from .batch_reader import OF_DOCUMENT
from .batch_work import RunningCall
from .cluster import Cluster, WorkerSpec
from .engine import Engine
from .errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_PARTIAL,
    DoesNotFitError,
    FileError,
    QuantspecError,
    internal,
    one_line,
)
from .generation import Generation
from .schema import is_complete
from .signals import WAIT_S
from .slots import BeyondMemoryError, Opening

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .batch import Arguments
    from .batch_plan import Room
    from .batch_reader import Reader
    from .batch_work import Fingerprints, Job, Workload
    from .journal import Journal
    from .model import Prompt
    from .options import EngineOptions, GenerateOptions
    from .sources import Source

# Errors of a full or read-only disk, which every later document would meet as well.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}

# Time after which a thread that runs Python, such as the reader of PDF, gives the GIL back to the scheduler, in seconds.
# Python's default of 5 ms may take as long as a round.
_SWITCH_S = 0.0005

# Plans for the memory that is free, before a batch ends with the error of an engine that does not fit.
_OPENINGS = 3

# Interval of redrawing the view, in seconds.
_TICK_S = 0.1


@dataclass(frozen=True)
class Outcome:
    """Result of a document.

    Attributes:
        job: the document.
        seconds: from reading it to the end of its answer.
        answer: the call, or the tree of calls; None if it failed.
        error: why it failed.
    """

    job: Job
    seconds: float
    answer: mapreduce.Call | None
    error: QuantspecError | None

    def to_json(self) -> dict[str, Any]:
        """The object of results.jsonl."""
        source, generation = self.job.source, self.answer and self.answer.generation
        result: dict[str, Any] = {
            "document": source.shown,
            "sha256": self.job.sha256,
            "status": "done" if generation else "failed",
            "output": sources.shown(self.job.output) if generation else None,
            "prompt_tokens": generation.prompt_tokens if generation else self.job.tokens,
            "new_tokens": len(generation.tokens) if generation else 0,
            "tokens": generation.tokens if generation else [],
            "stop_reason": generation.stop_reason if generation else None,
            "seconds": round(self.seconds, 6),
            "calls": len(list(self.answer.tree())) if self.answer else 0,
            "error": self.error and self.error.to_json()["error"],
        }
        if generation and generation.thinking is not None:
            result["thinking"] = generation.thinking
        if warnings := [*self.job.warnings, *(self.answer.warnings() if self.answer else ())]:
            result["warnings"] = warnings
        if self.answer and self.answer.parts:
            result["tree"] = self.answer.to_json()
        return result


class Run:
    """One run over the pending documents."""

    def __init__(
        self,
        arguments: Arguments,
        kept: Journal,
        workload: Workload,
        reader: Reader,
        fingerprints: Fingerprints,
        *,
        page: output.AtomicFile | None,
    ) -> None:
        self.arguments, self.journal, self.workload, self.reader = arguments, kept, workload, reader
        self._fingerprints, self._page = fingerprints, page
        self._ended: SimpleQueue[dict[str, Any] | BaseException] = SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._stopping = threading.Event()
        self._reading = threading.Lock()
        self._writing = threading.Lock()
        self._workers: list[threading.Thread] = []
        # Threads that the parts of all documents may still start.
        self._part_threads = threading.Semaphore(0)
        self._count_s = 0.0
        documents = len(workload.todo) + len(workload.skipped) + len(workload.failed)
        self._view = batch_view.View(
            documents,
            len(workload.skipped),
            len(workload.failed),
            longest=reader.options.max_new_tokens,
            shown=not arguments.quiet,
        )
        # Answers that were cut, by their limit, and documents with partial answers that were.
        self._cut_at: Counter[str] = Counter()
        self._cut_in_parts = 0

    def run(self, engine_options: EngineOptions, found: Sequence[Source]) -> output.Done:
        """Decodes the pending documents and reports on all."""
        arguments, workload = self.arguments, self.workload
        if not arguments.quiet:
            for name in workload.edited:
                render.note(
                    f"warning: the answer to {one_line(name)} was changed after it was written; it stays as it is"
                )
        started = time.perf_counter()
        todo = {job.source.name: job.output for job in workload.todo}
        finished = {source.name: "done" for source in workload.skipped}
        finished |= {source.name: "failed" for source in workload.failed}
        self.journal.take(workload.taken)
        workload.foreign = set(self.journal.begin(todo, finished))
        # Opened during the count: creating a GPU's context takes as long as counting some hundred thousand tokens.
        opening = Opening(self.reader.model, engine_options) if workload.todo and arguments.ray is None else None
        ready = self._examined(opening)
        if not arguments.quiet:
            self._note_of_repeated(ready)
        self._count_s = time.perf_counter() - started
        engine: Engine | Cluster | None = None
        interrupted, failure = False, None
        if ready:
            engine, parallel = self._opened(engine_options, opening, ready)
        if engine is not None:
            try:
                with self._view, _switching():
                    self._decode(engine, parallel)
            except KeyboardInterrupt:
                interrupted = True
                self._stop()
            except QuantspecError as error:
                failure = error
                self._stop()
        try:
            return self._report(engine, found, time.perf_counter() - started, interrupted, failure)
        finally:
            if engine is not None:
                engine.close()

    def _note_of_repeated(self, ready: Sequence[Job]) -> None:
        """Notes how many of the documents have an earlier answer, and why that is not enough."""
        names = {job.source.name for job in ready}
        if again := len(names & self.workload.again):
            render.note(f"to repeat, as the document, the model, the options or quantspec changed: {again}")
        if missing := len(names & self.workload.missing):
            render.note(f"to repeat, as the answer was deleted or moved: {missing}")

    def _opened(
        self, engine_options: EngineOptions, opening: Opening | None, ready: Sequence[Job]
    ) -> tuple[Engine | Cluster | None, int]:
        """The engine, and how many documents decode together. Queues them. No engine if memory holds none of them."""
        arguments, reader = self.arguments, self.reader
        # Longest first, so that no long document decodes alone at the end.
        ready = sorted(ready, key=lambda job: -(job.tokens or 0))
        if arguments.ray is not None:
            self._waiting.extend(ready)
            model_print = self._fingerprints.model
            return _cluster(arguments.ray, arguments, engine_options, reader, ready, model_print=model_print)
        assert opening is not None
        device = opening.take()
        for attempt in range(1, _OPENINGS + 1):
            fit = room(arguments, engine_options, reader, ready, device)
            reader.limit(fit.most, fit.wanted)
            settled = [(job, reader.refusal(job)) for job in ready]
            for job, error in settled:
                if error is not None:
                    self._view.finished(self._finish(Outcome(job, job.read_s, None, error)))
            ready = [job for job, error in settled if error is None]
            if not ready:
                break
            try:
                engine = _engine(arguments, engine_options, reader, fit)
            except DoesNotFitError:
                # Planned to the last page; meanwhile another program may have taken some memory.
                if attempt == _OPENINGS:
                    raise
            else:
                self._waiting.extend(ready)
                return engine, fit.parallel
        return None, 0

    def _examined(self, opening: Opening | None) -> list[Job]:
        """The documents that can be decoded, with their token counts; the others are marked as failed."""
        todo: list[Job] = []
        failed: list[dict[str, Any]] = []
        # Closed before an error is reported, so that the bar is removed.
        with closing(counted(self.arguments, self.workload, self.reader, opening)) as found:
            for job, error in found:
                if error is None:
                    todo.append(job)
                else:
                    failed.append(self._finish(Outcome(job, job.read_s, None, error)))
        # Printed after the bar has been removed.
        for result in failed:
            self._view.finished(result)
        return todo

    def _decode(self, engine: Engine | Cluster, parallel: int) -> None:
        # Two threads for each slot: when a slot becomes free, the next prompt has been read and encoded, so that the engine
        # does not wait for a tokenizer or a disk.
        threads = parallel if isinstance(engine, Cluster) else 2 * parallel
        self._part_threads.release(threads)
        self._workers = [
            threading.Thread(target=self._work, args=(engine,), name="quantspec-document", daemon=True)
            for _ in range(threads)
        ]
        left = len(self._waiting)
        for worker in self._workers:
            background.start(worker)
        drawn = 0.0
        while left:
            with suppress(Empty):
                outcome = self._ended.get(timeout=_TICK_S)
                if isinstance(outcome, BaseException):
                    raise outcome
                left -= 1
                self._view.finished(outcome)
            # Not after each document: with many short ones, drawing would take the time of the scheduler's thread.
            if (now := time.perf_counter()) >= drawn + _TICK_S:
                drawn = now
                self._view.show(self._running, self._waiting, engine.prompt_share)

    def _work(self, engine: Engine | Cluster) -> None:
        """A worker: processes one document after another."""
        while not self._stopping.is_set():
            try:
                job = self._waiting.popleft()
            except IndexError:
                return
            self._running.append(job)
            try:
                self._ended.put(self._finish(self._outcome(engine, job)))
            except KeyboardInterrupt:  # the answer was ended by `_stop`
                return
            except BaseException as error:
                self._ended.put(error if isinstance(error, QuantspecError) else internal(error))
                return
            finally:
                self._running.remove(job)

    def _outcome(self, engine: Engine | Cluster, job: Job) -> Outcome:
        started = time.perf_counter()
        answer, failure = None, None
        try:
            answer = self._answer(engine, job)
        except OF_DOCUMENT as error:
            failure = error
        return Outcome(job, time.perf_counter() - started, answer, failure)

    def _answer(self, engine: Engine | Cluster, job: Job) -> mapreduce.Call:
        reader, name = self.reader, job.source.shown
        # One document at a time: threads that run Python, such as the reader of PDF, would take the GIL from the scheduler.
        with self._reading:
            if self._stopping.is_set():
                raise KeyboardInterrupt
            job.stage = "reading"
            text = reader.read(job).text
            prompt = None if reader.may_split else reader.prompt(name, text)
        if prompt is None:
            return self._in_parts(engine, job, text)
        job.tokens = len(prompt.ids)
        reader.check(prompt)
        generation = self._generate(engine, job, prompt, reader.new_tokens(len(prompt.ids)))
        return mapreduce.Call(generation, whole=True)

    def _in_parts(self, engine: Engine | Cluster, job: Job, document: str) -> mapreduce.Call:
        """The answer to a document that is split unless it fits."""
        reader, name = self.reader, job.source.shown

        def count(text: str) -> int:
            if self._stopping.is_set():  # counting a book takes many pieces
                raise KeyboardInterrupt
            return reader.tokens(name, text)

        def call(texts: Sequence[str], last: bool) -> Sequence[Generation]:
            if texts == [document]:
                prompt = reader.prompt(name, document)
                return [self._generate(engine, job, prompt, reader.new_tokens(len(prompt.ids)))]
            return self._level(engine, job, texts, last=last)

        return mapreduce.answer(name, document, budget=reader.budget, count=count, call=call)

    def _level(self, engine: Engine | Cluster, job: Job, parts: Sequence[str], *, last: bool) -> Sequence[Generation]:
        """The answers to texts that do not depend on each other, in order. They decode together. If some fail, the error of
        the first text in order is raised: texts begin in order, and all that have begun are awaited. `last`: the answer is
        that to the document.
        """
        job.known_calls += len(parts)
        if len(parts) == 1:
            return [self._call(engine, job, parts[0], last=last)]
        answers: list[Future[Generation]] = []
        threads: list[threading.Thread] = []
        failed = threading.Event()

        def work(part: str, answer: Future[Generation]) -> None:
            try:
                answer.set_result(self._call(engine, job, part, last=last))
            except BaseException as error:
                answer.set_exception(error)
                failed.set()
            finally:
                self._part_threads.release()

        for part in parts:
            self._part_threads.acquire()
            if failed.is_set():
                self._part_threads.release()
                break
            answers.append(Future())
            thread = threading.Thread(target=work, args=(part, answers[-1]), name="quantspec-part", daemon=True)
            try:
                background.start(thread)
            except QuantspecError as error:
                answers[-1].set_exception(error)
                self._part_threads.release()
                break
            threads.append(thread)
        for thread in threads:
            thread.join()
        return [answer.result() for answer in answers]

    def _call(self, engine: Engine | Cluster, job: Job, part: str, *, last: bool) -> Generation:
        """The answer to a part of a document, which an interrupted run may have decoded already. `last` as in `_level`."""
        if self._stopping.is_set():
            raise KeyboardInterrupt
        prompt = self.reader.prompt(job.source.shown, part)
        new_tokens = self.reader.new_tokens(len(prompt.ids)) if last else self.reader.part_tokens
        # A context that memory shortens is not in the fingerprint, and may change the limit.
        key = (job.source.name, f"{self._fingerprints.split} {new_tokens}", part)
        with self._writing:
            known = self.journal.kept_call(*key)
            if known is not None:
                job.count(known["prompt_tokens"])
                return Generation(**known)
        found = self._generate(engine, job, prompt, new_tokens)
        # A full disk is reported when the document's answer is written. A part that is not kept may be decoded twice.
        with self._writing, suppress(FileError):
            self.journal.keep_call(*key, asdict(found))
        return found

    def _generate(self, engine: Engine | Cluster, job: Job, prompt: Prompt, new_tokens: int) -> Generation:
        options = replace(self.reader.options, max_new_tokens=new_tokens, shortens=False)
        needed = len(prompt.ids) + new_tokens
        # The engine was opened for the documents as they were counted.
        if needed > engine.context:
            raise FileError(
                f"{prompt.name} grew while the batch ran: it and its answer need {needed} tokens, the engine holds "
                f"{engine.context}",
                "run the command again",
            )
        call = RunningCall(len(prompt.ids))
        job.running.append(call)
        try:
            if isinstance(engine, Cluster):
                generation = engine.generate(call, prompt, options, self._stopping)
            else:
                generation = call.decode(engine, prompt, options, self._stopping)
            # Before it stops running: between the two, the view would take it for a call that has not begun.
            with self._writing:
                job.count(len(prompt.ids))
                self._view.called(len(prompt.ids), len(generation.tokens))
                call.stage = "done"
        finally:
            job.running.remove(call)
        return generation

    def _finish(self, outcome: Outcome) -> dict[str, Any]:
        """Writes the answer, then the journal's row, then the line of results.jsonl, which is returned."""
        with self._writing:
            return self._write(outcome)

    def _write(self, outcome: Outcome) -> dict[str, Any]:
        job, size = outcome.job, None
        if outcome.answer is not None:
            text = outcome.answer.generation.text
            try:
                whole = text if text.endswith("\n") or not text else text + "\n"
                size = self.journal.write(job.source.name, job.output, whole)
            except FileError as error:
                if isinstance(error.__cause__, sqlite3.Error):
                    raise
                if isinstance(error.__cause__, OSError) and error.__cause__.errno in _FULL:
                    error.hint = "free some space and run the command again: it resumes"
                    raise
                outcome = Outcome(job, outcome.seconds, None, error)
        if outcome.answer is not None:
            self._count_cuts(outcome.answer)
        result = outcome.to_json()
        basis = self._fingerprints.of(outcome.answer, self.reader)
        if isinstance(outcome.error, FileError | BeyondMemoryError):
            basis = ""  # the next run may have space or memory for the same document and options
        path = job.source.path and os.path.realpath(job.source.path)
        self.journal.finish(job.source.name, job.output, result, basis, size=size, path=path)
        return result

    def _count_cuts(self, answer: mapreduce.Call) -> None:
        """Counts an answer if its limit cut it, and its document if one cut a partial answer."""
        reader, options = self.reader, self.reader.options
        last, *partial = (call.generation for call in answer.tree())
        if _is_cut(last, options):
            shorter = reader.shortens(last.prompt_tokens)
            self._cut_at["the end of the context" if shorter else _of_flag(options.max_new_tokens)] += 1
        self._cut_in_parts += any(_is_cut(generation, options) for generation in partial)

    def _stop(self) -> None:
        """Ends running work; the next run repeats documents that were decoding."""
        self._stopping.set()
        for call in [call for job in list(self._running) for call in list(job.running)]:
            if (stream := call.stream) is not None:
                stream.close()
        for worker in self._workers:
            while worker.is_alive():  # an interrupt may arrive before the last worker has started
                worker.join(WAIT_S)

    def _report(
        self,
        engine: Engine | Cluster | None,
        found: Sequence[Source],
        wall_s: float,
        interrupted: bool,
        failure: QuantspecError | None,
    ) -> output.Done:
        names = [source.name for source in found]
        # Counted in the journal, because an error may come between an answer and its row.
        done = self.journal.count(names, "done") - len(self.workload.skipped)
        failed = self.journal.results(names, "failed")
        # The tokens of a large folder take gigabytes, so results are read only if they are shown.
        shown = self.arguments.as_json or self._page is not None
        results = self.journal.results(names) if shown else []
        stats: dict[str, Any] = {}
        if isinstance(engine, Cluster) or (engine is not None and failure is None):
            # A run of few documents has lower rates than one of the whole folder, because they decode alone.
            stats = self._statistics(engine, whole=2 * done >= len(found))
        document = {
            "quantspec": __version__,
            "model": self.reader.model.name,
            "documents": len(found),
            "done": done,
            "failed": len(failed),
            "skipped": len(self.workload.skipped),
            "results": results,
            "stats": stats
            | {
                "count_s": self._count_s,
                "wall_s": wall_s,
                "documents_per_hour": 3600 * done / wall_s if done else None,
            },
        }
        if failure is not None:
            failure.kept = document
            raise failure
        if self._page is not None:
            info = engine.info if isinstance(engine, Engine) else {}
            failure = output.written(self._page, report.batch(document, info))
        self._show(document, names, failed, interrupted=interrupted)
        if failure is not None:
            failure.kept = document
            raise failure
        code = EXIT_INTERRUPTED if interrupted else EXIT_PARTIAL if failed else EXIT_DONE
        return output.Done(code, document) if self.arguments.as_json else output.Done(code)

    def _statistics(self, engine: Engine | Cluster, *, whole: bool) -> dict[str, Any]:
        """Those of the engine. Rates of this machine are kept; those of a `whole` folder replace earlier ones."""
        if isinstance(engine, Cluster):
            return engine.statistics()
        stats = dict(engine.statistics())
        if not self.arguments.quiet:
            render.note_of_prompts(engine)
        self._keep_rates(engine.info["device"], stats, replace=whole)
        return stats

    def _show(
        self,
        document: Mapping[str, Any],
        names: Sequence[str],
        failed: Sequence[Mapping[str, Any]],
        *,
        interrupted: bool,
    ) -> None:
        """Prints what failed and, unless quiet, warnings of all documents and the summary."""
        batch_view.failures(failed)
        if self.arguments.quiet:
            return
        for name, warnings in self.journal.warnings(names):
            render.warn_of_document(name, warnings)
        batch_view.summary(document, self.arguments.out)
        if interrupted:
            without = "" if self.arguments.resume else " without --no-resume"
            render.note(f"interrupted; run the same command{without} to continue")
        batch_view.note_of_cuts(self._cut_at, self.reader.options)
        if self._cut_in_parts:
            most = self.reader.part_tokens
            limit = _of_flag(most) if most == self.reader.options.max_new_tokens else render.count(most, "token")
            batch_view.note_of_cut_parts(self._cut_in_parts, limit, self.reader.options)

    def _keep_rates(self, device: str, stats: dict[str, Any], *, replace: bool) -> None:
        """Keeps the rates of this run for later predictions of `--dry-run`."""
        rates = {kind: stats[kind] for kind in ("prefill_tokens_per_s", "decode_tokens_per_s")}
        if not all(rates.values()):
            return
        try:
            self.journal.keep_rates(device, self._fingerprints.speed, rates, replace=replace)
        except FileError as error:
            if not self.arguments.quiet:
                render.note(f"warning: the rates of this run are not kept: {error.message}")


@contextmanager
def _switching() -> Iterator[None]:
    """Threads give the GIL back after `_SWITCH_S`."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _is_cut(answer: Generation, options: GenerateOptions) -> bool:
    """True if the token limit cut the answer. JSON is cut if it is incomplete."""
    if options.json_schema is not None:
        return answer.stop_reason != "eos" and not is_complete(answer.text)
    return answer.stop_reason == "length"


def _of_flag(tokens: int) -> str:
    return f"{render.count(tokens, 'token')} (-n)"


def _cluster(
    address: str,
    arguments: Arguments,
    engine_options: EngineOptions,
    reader: Reader,
    todo: Sequence[Job],
    *,
    model_print: str,
) -> tuple[Cluster, int]:
    """The workers of a Ray cluster, with room for the longest document, and the number of sequences that decode together."""
    spec = WorkerSpec(
        model=hub.absolute(arguments.model),
        revision=arguments.revision,
        offline=arguments.offline,
        fingerprint=model_print,
        options=replace(engine_options, draft_model=hub.absolute(engine_options.draft_model)),
        prompt_cache=arguments.prompt_cache and str(Path(arguments.prompt_cache).absolute()),
        context=longest(reader, todo),
        parallel=arguments.parallel,
    )

    def on_waiting(waiting: int, workers: int) -> None:
        if not arguments.quiet:
            of = render.count(workers, "worker")
            render.note(
                f"waiting for {waiting} of {of} of the Ray cluster: models take long to load, or GPUs are in use"
            )

    cluster = Cluster(address, spec, on_waiting)
    reader.limit(cluster.context, spec.context)
    if cluster.failure is not None and not arguments.quiet:
        render.note(f"warning: a worker could not be started: {cluster.failure.message}")
    if not arguments.quiet:
        workers = render.count(cluster.workers, "worker")
        render.note(f"{render.count(cluster.parallel, 'sequence')} at once on {workers} of the Ray cluster")
    return cluster, cluster.parallel


def _engine(arguments: Arguments, engine_options: EngineOptions, reader: Reader, fit: Room) -> Engine:
    """An engine of this size."""
    with render.progress("loading weights", shown=not arguments.quiet) as on_loading:
        engine = Engine(
            reader.model,
            engine_options,
            context=fit.context,
            longest_prompt=max(1, fit.context - reader.options.new_tokens(fit.context - 1, fit.context)),
            batch=fit.parallel,
            pool=fit.pool,
            prompt_cache=arguments.prompt_cache or True,
            on_loading=on_loading,
        )
    if not arguments.quiet:
        render.note_of_drafts(engine.info)
        render.note_of_weights(engine_options.weights, reader.model, engine.info)
        render.note_of_emulation([engine_options.method])
        render.note_of_idle(engine_options, reader.options.temperature)
    return engine
