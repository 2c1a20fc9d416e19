"""Panics of Rust libraries: exceptions in Python, preceded by a report on standard error that is useless to a user."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, BinaryIO, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Result = TypeVar("Result")

_STDERR = 2
# Descriptors are process-wide. Reentrant, since a signal handler may call this again.
_turn = threading.RLock()
# Set while a command runs. Other programs fork, start processes and write to standard error on any thread, so their
# descriptors stay as they are.
_command = threading.Event()


@contextmanager
def of_command() -> Iterator[None]:
    """The body is a command: `hidden` has an effect."""
    _command.set()
    try:
        yield
    finally:
        _command.clear()


def hidden(work: Callable[[], Result]) -> Result:
    """Runs `work`; if it fails in a command, text that the process wrote to standard error meanwhile is dropped.

    The library writes to the descriptor, so the descriptor is redirected. Text of other threads during successful work
    appears at its end.
    """
    if not _command.is_set():
        return work()
    import tempfile  # takes 5 ms, which `quantspec --help` must not pay for

    with _turn:
        try:
            aside: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115
            stderr = os.dup(_STDERR)
        except OSError:  # no space for a temporary file, or no standard error
            return work()
        failed = True
        try:
            _flush()
            os.dup2(aside.fileno(), _STDERR)
            result = work()
            failed = False
        finally:
            _flush()
            os.dup2(stderr, _STDERR)
            os.close(stderr)
            with aside, suppress(OSError):
                aside.seek(0)
                if not failed and (written := aside.read()):
                    os.write(_STDERR, written)
        return result


def _flush() -> None:
    with suppress(OSError, ValueError, AttributeError):  # the stream is missing, closed, or None
        sys.stderr.flush()
