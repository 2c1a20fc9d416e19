"""Answers as they decode: `Batch` for several prompts, `Stream` for one, `Generation` for an answer so far."""

from __future__ import annotations

import contextlib
import threading
import weakref
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import QuantspecError, UsageError
from .scheduler import Request
from .signals import WAIT_S
from .text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .model import Model, Prompt
    from .options import GenerateOptions
    from .scheduler import Lease, OnProgress


class TokenLogprob(NamedTuple):
    """Log-probabilities of an emitted token, before penalties, masks, temperature and warpers; natural logarithms.

    Attributes:
        id: the token.
        logprob: its log-probability.
        top: the most likely tokens at its position, (id, log-probability), most likely first.
    """

    id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Generation:
    """An answer, or a stream's answer so far.

    Attributes:
        prompt_tokens: length of the prompt.
        tokens: emitted ids, including those of a thinking block, without the one that ended the text.
        text: the emitted text, without a thinking block.
        stop_reason: "length", "eos", "stop" or "interrupted"; the last one also until a stream's answer ends.
        thinking: text of the thinking block; None if the answer has none.
        logprobs: one for every token; None if they were not requested.
        thinks: the thinking block is not closed: a limit or an interruption cut it.
    """

    prompt_tokens: int
    tokens: list[int]
    text: str
    stop_reason: str
    thinking: str | None = None
    logprobs: list[TokenLogprob] | None = None
    thinks: bool = False


class Piece(NamedTuple):
    """Text added to one answer by its prefill or by one round. May be empty.

    Attributes:
        prompt: index of the prompt.
        text: the text.
        last: the answer ends here.
    """

    prompt: int
    text: str
    last: bool


class Batch:
    """Sequences that decode together: an iterator of `Piece`s as text becomes available.

    Prompts beyond the engine's slots wait for a free one. Threads may share the iterator; each piece goes to one thread.
    Dropping the batch ends its sequences.

    Attributes:
        texts: the growing answers, in the order of the prompts.
        failures: errors by prompt, if they do not end the other answers.
    """

    def __init__(
        self,
        lease: Lease,
        model: Model,
        prompts: Sequence[Prompt],
        options: GenerateOptions,
        on_prefill: OnProgress | None = None,
        *,
        context: int,
        keeps_failures: bool = False,
    ) -> None:
        """Submits the prompts to the engine's scheduler. `context`: most tokens of a prompt and its answer. With
        `keeps_failures` an error of one ends its answer alone.
        """
        self._lease = lease
        self._keeps_failures = keeps_failures
        self.failures: dict[int, QuantspecError] = {}
        self._prompts = prompts
        limits = [options.new_tokens(len(prompt.ids), context) for prompt in prompts]
        self.texts = [
            Text(
                model.tokenizer.answer_bytes(
                    continues=prompt.continues, shown=prompt.thinking.tags if prompt.thinking else ()
                ),
                limit=limit,
                eos=frozenset[int]() if options.ignore_eos else model.eos,
                stops=options.stop,
                thinking=prompt.thinking,
            )
            for prompt, limit in zip(prompts, limits, strict=True)
        ]
        # None wakes a thread whose last piece a signal handler has read.
        self._items: SimpleQueue[tuple[int, str | BaseException, bool] | None] = SimpleQueue()
        self._open = len(prompts)
        # True after an exception: an interrupt may have lost a piece, so no others follow.
        self._failed = False
        # Reentrant, since a signal handler may read a piece while its thread waits for one.
        self._turn = threading.RLock()
        grammar = None if options.json_schema is None else model.grammar(options.json_schema)
        # The scheduler holds the requests, which refer to the batch weakly: dropping the batch ends them.
        self._requests = [
            Request(
                prompt.ids,
                options.sampling() | {"max_new_tokens": limit, "grammar": grammar and grammar.begin()},
                text,
                partial(_put, self._items, index),
                on_prefill,
                weakref.ref(self),
            )
            for index, (prompt, text, limit) in enumerate(zip(prompts, self.texts, limits, strict=True))
        ]
        lease.scheduler.submit(self._requests)

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        scheduler = self._lease.scheduler
        scheduler.check()
        if scheduler.is_inside():
            raise UsageError("a callback of an answer reads the next piece of an answer", "read it after the callback")
        try:
            # One thread waits for the next piece; other threads wait for that thread.
            with self._turn:
                index, item, last = self._next()
                self._open -= last
                if not self._open:
                    self._items.put(None)
                if self._keeps_failures and isinstance(item, QuantspecError):
                    self.failures[index], item = item, ""
                if isinstance(item, str):
                    return Piece(index, item, last)
                raise item
        except StopIteration:
            raise
        except BaseException:
            self._failed = True
            for request in self._requests:
                request.cancelled = True
            raise

    def _next(self) -> tuple[int, str | BaseException, bool]:
        """Waits for the next item in short intervals, so that Ctrl-C is noticed. A signal handler may read other items
        during a wait, and between the arrival of an item and its return.
        """
        while self._open and not self._failed:
            with contextlib.suppress(Empty):
                item = self._items.get(timeout=WAIT_S)
                if item is not None:
                    return item
        raise StopIteration

    def interrupt(self) -> None:
        """Ends unfinished answers and frees their slots, from any thread. Text decoded before can still be read."""
        # Answers that have been read to their end have no slot, and need not wait for other work of the engine.
        self._lease.scheduler.cancel(self._requests if self._open else ())

    def generations(self) -> list[Generation]:
        """The answers so far, in the order of the prompts."""
        return [
            _generation(prompt, text, request)
            for prompt, text, request in zip(self._prompts, self.texts, self._requests, strict=True)
        ]

    def finished(self) -> list[Generation]:
        """The answers, once all have ended."""
        for _ in self:
            pass
        return self.generations()


def _generation(prompt: Prompt, text: Text, request: Request) -> Generation:
    """A copy of an answer, which the scheduler's thread may be extending."""
    # The reason is set last and read first: with one, the answer is complete. Log-probabilities precede their tokens.
    stop_reason, tokens = text.stop_reason or "interrupted", list(text.tokens)
    logprobs = None
    if request.sampling["logprobs"] is not None:
        # A round may emit more tokens than the answer takes.
        logprobs = [TokenLogprob(id, *values) for id, values in zip(tokens, request.logprobs, strict=False)]
    return Generation(len(prompt.ids), tokens, text.text, stop_reason, text.thinking, logprobs, text.thinks)


def _put(items: SimpleQueue[Any], index: int, item: str | BaseException, last: bool) -> None:
    items.put((index, item, last))


class Stream:
    """One answer as an iterator of pieces of text. Dropping it early, or `close`, ends the answer and frees its slot.

    The engine decodes ahead of the reader. Threads may share the stream; each piece goes to one thread.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> str:
        for piece in self._batch:
            if piece.text:
                return piece.text
        raise StopIteration

    def close(self) -> None:
        """Ends the answer, from any thread; waits for the end of the current round."""
        self._batch.interrupt()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def new_tokens(self) -> int:
        """Tokens of the answer so far."""
        return len(self._batch.texts[0].tokens)

    @property
    def generation(self) -> Generation:
        """The answer so far."""
        return self._batch.generations()[0]
