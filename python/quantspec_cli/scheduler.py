"""One thread owns the engine; callers on any thread submit requests and receive text.

Between two rounds (`loop.run_round`, the algorithm) the thread drops cancelled requests, admits a waiting one into a free
slot and prefills a chunk of its prompt. Sequences join and leave the batch at any round, and a long prompt delays the
others by one chunk at a time. Only this thread calls the engine: slots need no locks, and an interrupted caller cannot
leak one.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from . import background, loop
from .errors import InputError, NotFiniteError, QuantspecError, UsageError, internal, native_errors
from .signals import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from . import _native
    from .text import Text

    OnProgress = Callable[[int, int], object]
    # A result, or the error instead.
    _Outcome = SimpleQueue[tuple[Any, BaseException | None]]

Result = TypeVar("Result")

# Least time of a chunk of a prompt, in seconds. Decoding sequences wait for it, so shorter chunks make text smoother.
CHUNK_S = 0.1
# A chunk takes at least as long as this many rounds. With shorter chunks, short answers would end before the next prompt is
# complete. Then documents decode one at a time, and each round reads the weights for a single sequence.
CHUNK_ROUNDS = 4
# Rows of the first chunk, over all layers, before their speed is known.
_FIRST_ROWS = 4096


@dataclass(eq=False)
class Request:
    """One sequence, from its prompt to the end of its answer.

    Attributes:
        ids: token ids of the prompt.
        sampling: keyword arguments of `_native.Engine.add`.
        text: the growing answer; only the scheduler's thread appends to it.
        deliver: called with each piece of text and True for the last one, or with an error instead of the rest. Runs on
            the scheduler's thread.
        on_prefill: called on that thread with (rows done, rows in total) during prefill.
        reader: a reference to the object that reads the answer; when that is dropped, the answer ends. None: only
            `cancel` ends it early.
        cancelled: set by `Scheduler.cancel`.
        logprobs: (log-probability, most likely tokens with theirs) of every emitted token, if `sampling` requests them.
    """

    ids: Sequence[int]
    sampling: Mapping[str, Any]
    text: Text
    deliver: Callable[[str | BaseException, bool], object]
    on_prefill: OnProgress | None = None
    reader: weakref.ref[object] | None = None
    cancelled: bool = field(default=False, init=False)
    logprobs: list[tuple[float, list[tuple[int, float]]]] = field(default_factory=list, init=False)

    @property
    def unwanted(self) -> bool:
        """True if it was cancelled or its reader dropped."""
        # Not cancelled by a destructor: an interrupt there would be lost, and the answer would go on.
        return self.cancelled or (self.reader is not None and self.reader() is None)


@dataclass(eq=False)
class _Scoring:
    """A text to score, in a slot of its own.

    Attributes:
        ids: token ids of the text.
        cancelled: set by `Scheduler.cancel`.
        done: the log-probabilities, or an error.
    """

    ids: Sequence[int]
    cancelled: bool = False
    done: _Outcome = field(default_factory=SimpleQueue)

    @property
    def unwanted(self) -> bool:
        """True if it was cancelled."""
        return self.cancelled

    def deliver(self, error: BaseException, _last: bool) -> None:
        """Ends the wait for the log-probabilities."""
        self.done.put((None, error))


@dataclass(eq=False)
class _Call:
    """Work of a caller to run between two rounds."""

    work: Callable[[], Any]
    done: _Outcome = field(default_factory=SimpleQueue)


class _CancelledError(KeyboardInterrupt):
    """Ends a prefill or a score from its callback, as Ctrl-C does."""


class Scheduler:
    """Decodes requests on one engine, as many at once as it has slots; the others wait in order.

    Attributes:
        kept_tokens: tokens that answers took from rounds, which may emit more. The first token is of the prefill.
        rounds: number of rounds.
        sequence_rounds: sequences per round, summed over all rounds.
        most_sequences: the most sequences in a round.
        engine_s: seconds of calls of the engine, which idles in the rest of the time.
        prompt_s: of these, seconds of chunks of prompts.
        longest_chunk_s: longest time that decoding sequences waited for a chunk of another prompt, in seconds.
    """

    def __init__(self, native: _native.Engine, slots: int) -> None:
        """`start` starts the thread."""
        self.native = native
        self.kept_tokens = 0
        self.rounds = 0
        self.sequence_rounds = 0
        self.most_sequences = 0
        self.engine_s = 0.0
        self.prompt_s = 0.0
        self.longest_chunk_s = 0.0
        self._free = slots
        self._commands: SimpleQueue[Sequence[Request | _Scoring] | _Call | None] = SimpleQueue()
        self._waiting: deque[Request | _Scoring] = deque()
        self._running: dict[int, Request] = {}
        # The slot in prefill; one at a time.
        self._prefilling: int | None = None
        # The request for which too few pages are free until a sequence ends.
        self._too_large: Request | _Scoring | None = None
        self._chunk_rows = _FIRST_ROWS
        # Seconds of the last round.
        self._round_s = 0.0
        self._thread = threading.Thread(target=self._run, name="quantspec-scheduler", daemon=True)
        # Held while a command is enqueued, so that none follows the one that ends the thread.
        self._lock = threading.RLock()
        self._stopped = False
        self._process = os.getpid()

    def start(self) -> None:
        """Starts the thread. `stop` ends it, also after an interrupt of this call."""
        background.start(self._thread)

    def submit(self, requests: Sequence[Request | _Scoring]) -> None:
        """Enqueues requests together; they get slots in this order."""
        self._enqueue(requests)

    def _enqueue(self, command: Sequence[Request | _Scoring] | _Call) -> None:
        # Before the lock: in a forked child it may be locked for ever, by a thread that the child does not have.
        self.check()
        with self._lock:
            self.check()
            self._commands.put(command)

    def score(self, ids: Sequence[int]) -> list[float]:
        """Log-probabilities of a text's tokens from the second on; waits for a free slot and pages, in order of arrival."""
        self.check()
        if self.is_inside():
            raise UsageError("a callback of an answer scores a text", "score it after the callback")
        scoring = _Scoring(ids)
        try:
            self.submit([scoring])
            scores: list[float] = _result(scoring.done)
        except BaseException:
            scoring.cancelled = True
            raise
        return scores

    def cancel(self, requests: Sequence[Request]) -> None:
        """Ends requests immediately. Their slots are free on return, except when called from a callback of the engine."""
        self._check_process()
        for request in requests:
            request.cancelled = True
        if requests and not self.is_inside():
            with contextlib.suppress(UsageError):  # the engine is closed, which ended them, too
                self.call(lambda: None)

    def call(self, work: Callable[[], Result]) -> Result:
        """Runs work that needs the engine between two rounds, and returns its result."""
        self.check()
        if self.is_inside():
            return work()
        call = _Call(work)
        self._enqueue(call)
        result: Result = _result(call.done)
        return result

    def is_inside(self) -> bool:
        """True on the scheduler's own thread (in a callback of a request), which must not wait for the scheduler."""
        return self._thread.ident == threading.get_ident()

    def check(self) -> None:
        """Refuses calls in a forked child, which lacks the engine's threads and a GPU's context, and calls after `stop`."""
        self._check_process()
        if self._stopped:
            raise _closed()

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise UsageError(
                f"the engine belongs to process {self._process}, this is its fork {os.getpid()}",
                'load an engine in every process, or start processes by "spawn"',
            )

    def stop(self) -> None:
        """Ends the thread and its sequences; threads that wait for a piece get an error. A second call completes one that was
        interrupted.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            # Before the command: if an interrupt came between them, callers would wait for a thread that has ended.
            self._stopped = True
            self._commands.put(None)
        if self.is_inside():
            return
        while self._thread.is_alive():
            self._thread.join(WAIT_S)
        self.__dict__.pop("native", None)

    def _run(self) -> None:
        while self._take_commands():
            try:
                self._admit()
                self._prefill_chunk()
                if self._decoding():
                    self._round()
            except BaseException as error:  # a defect must not leave callers waiting; panics are no Exception
                self._fail_all(internal(error))
        self._fail_all(_closed())
        for request in self._waiting:
            request.deliver(_closed(), True)

    def _take_commands(self) -> bool:
        """Processes callers' commands; waits for one if there is nothing else to do. False ends the thread."""
        calls: list[_Call] = []
        goes_on = True
        while not self._commands.empty() or not (calls or self._running or self._waiting):
            command = self._commands.get()
            if command is None:
                goes_on = False
                break
            if isinstance(command, _Call):
                calls.append(command)
            else:
                self._waiting.extend(command)
        self._drop_cancelled()
        for call in calls:
            try:
                call.done.put((call.work(), None))
            except BaseException as error:
                call.done.put((None, error))
        return goes_on

    @contextlib.contextmanager
    def _engine(self) -> Iterator[None]:
        """For calls of the engine: translates their errors, and takes their time."""
        started = time.perf_counter()
        try:
            with native_errors():
                yield
        finally:
            self.engine_s += time.perf_counter() - started

    def _drop_cancelled(self) -> None:
        for slot, request in list(self._running.items()):
            if request.unwanted:
                self._end(slot)
        for waiting in [waiting for waiting in self._waiting if waiting.unwanted]:
            self._waiting.remove(waiting)
            if isinstance(waiting, Request):
                _interrupted(waiting)

    def _admit(self) -> None:
        """Admits the next request once there are pages for its prompt and answer; later requests wait with it.

        No other prompt is in prefill, so all pages that it can share are complete.
        """
        if self._prefilling is not None or not self._free or not self._waiting:
            return
        request = self._waiting[0]
        if request is self._too_large:
            return
        if isinstance(request, _Scoring):
            self._score(request)
            return
        try:
            with self._engine():
                if self._running and not self.native.has_room(request.ids, request.sampling["max_new_tokens"]):
                    self._too_large = request
                    return
                slot = self.native.add(request.ids, **request.sampling)
        except BaseException as error:  # a panic of a grammar, too
            self._waiting.popleft()
            request.deliver(error if isinstance(error, QuantspecError) else internal(error), True)
            return
        self._waiting.popleft()
        self._free -= 1
        self._running[slot] = request
        self._prefilling = slot

    def _score(self, scoring: _Scoring) -> None:
        """Scores the first waiting text, unless too few pages are free until a sequence ends."""

        def on_progress(_done: int, _total: int) -> None:
            if scoring.cancelled or self._stopped:
                raise _CancelledError

        try:
            with self._engine():
                # A score shares no pages of its text.
                if self._running and not self.native.has_room((), len(scoring.ids)):
                    self._too_large = scoring
                    return
                scoring.done.put((self.native.score(scoring.ids, on_progress), None))
        except _CancelledError:
            scoring.deliver(_closed(), True)
        except BaseException as error:
            scoring.deliver(error if isinstance(error, QuantspecError) else internal(error), True)
        self._waiting.popleft()

    def _prefill_chunk(self) -> None:
        """Prefills a chunk of the current prompt: other sequences, and calls of other threads, wait for its end."""
        slot = self._prefilling
        if slot is None:
            return
        request, rows = self._running[slot], self._chunk_rows
        started = time.perf_counter()
        try:
            with self._engine():
                first = self.native.prefill_chunk(slot, rows, self._progress(request))
        except _CancelledError:
            if request.unwanted:
                self._end(slot)
            else:
                self._remove(slot).deliver(_closed(), True)
        except BaseException as error:  # includes a callback's exceptions
            self._remove(slot).deliver(error, True)
        else:
            seconds = time.perf_counter() - started
            self.prompt_s += seconds
            if self._decoding():
                self.longest_chunk_s = max(self.longest_chunk_s, seconds)
            if first is None:
                # At most doubled: a prompt's first rows are cheaper than its last.
                factor = max(CHUNK_S, CHUNK_ROUNDS * self._round_s) / seconds
                self._chunk_rows = max(1, round(rows * min(factor, 2.0)))
            else:
                # A callback may refer to the reader, which would then not be dropped.
                self._prefilling, request.on_prefill = None, None
                self._deliver(slot, [first])

    def _decoding(self) -> list[int]:
        """The slots whose prompts are complete."""
        return [slot for slot in self._running if slot != self._prefilling]

    def _progress(self, request: Request) -> OnProgress:
        def on_prefill(done: int, total: int) -> None:
            called, request.on_prefill = request.on_prefill, None
            if called is not None:
                called(done, total)
                # A callback that raises is reported once, not for every block of rows.
                request.on_prefill = called
            if request.unwanted or self._stopped:
                raise _CancelledError

        return on_prefill

    def _round(self) -> None:
        slots = self._decoding()
        self.rounds += 1
        self.sequence_rounds += len(slots)
        self.most_sequences = max(self.most_sequences, len(slots))
        started = time.perf_counter()
        try:
            with self._engine():
                emitted = loop.run_round(self.native, slots)
        except (NotFiniteError, InputError):
            self._round_of_each(slots)
            return
        except QuantspecError as error:
            self._fail_all(error)
            return
        self._round_s = time.perf_counter() - started
        for slot, tokens in emitted:
            self._deliver(slot, tokens)

    def _round_of_each(self, slots: Sequence[int]) -> None:
        """Repeats a round, one sequence at a time, to find the one with non-finite values, or whose grammar takes too much
        work.
        """
        for slot in slots:
            try:
                with self._engine():
                    ((_, tokens),) = loop.run_round(self.native, [slot])
            except QuantspecError as error:
                self._remove(slot).deliver(error, True)
            else:
                self._deliver(slot, tokens)

    def _deliver(self, slot: int, tokens: Sequence[int]) -> None:
        """Appends tokens to the slot's text; a text that ends leaves the batch."""
        request = self._running[slot]
        if request.sampling.get("logprobs") is not None:
            request.logprobs += self.native.take_logprobs(slot)
        before = len(request.text.tokens)
        piece = request.text.push(tokens)
        if before:
            self.kept_tokens += len(request.text.tokens) - before
        if request.text.stop_reason is not None:
            self._remove(slot)
        request.deliver(piece, request.text.stop_reason is not None)

    def _end(self, slot: int) -> None:
        """Ends a sequence that was cancelled."""
        _interrupted(self._remove(slot))

    def _remove(self, slot: int) -> Request:
        """Frees a slot."""
        request = self._running.pop(slot)
        if slot == self._prefilling:
            self._prefilling = None
        self._free += 1
        self._too_large = None
        self.native.finish(slot)
        return request

    def _fail_all(self, error: QuantspecError) -> None:
        for slot in list(self._running):
            self._remove(slot).deliver(error, True)


class Lease:
    """Owns a scheduler for an engine and its batches; its thread ends when the last of them is dropped."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        # Not at exit: a running prefill would delay it.
        weakref.finalize(self, scheduler.stop).atexit = False
        # After the finaliser, which ends the thread if this is interrupted.
        scheduler.start()


def _result(done: _Outcome) -> Any:
    """Waits for a result in short intervals, so that Ctrl-C is noticed. An interrupt would break the locks of a `Future`."""
    while True:
        with contextlib.suppress(Empty):
            result, error = done.get(timeout=WAIT_S)
            if error is not None:
                raise error
            return result


def _closed() -> UsageError:
    return UsageError("the engine is closed", "load it again")


def _interrupted(request: Request) -> None:
    """Delivers the held-back text of an interrupted answer, and its end."""
    request.deliver(request.text.interrupt(), True)
