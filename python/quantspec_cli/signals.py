"""Signals that end a command like Ctrl-C: files are cleaned up, and the text so far is kept."""

from __future__ import annotations

import signal
import time
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path
    from types import FrameType

_ENDING = ("SIGINT", "SIGTERM", "SIGHUP")  # the last is unknown to Windows

# A signal may arrive twice: timeout signals a process and its group, and a parent may forward Ctrl-C. Repeats within this
# time count once.
ECHO_S = 0.25
# Longest single wait of the main thread, which repeats it. Two kinds of signals do not end a wait: one between Python's last
# check for signals and the start of the wait, and one that the system delivers to another thread.
WAIT_S = 0.1


class Signals:
    """The signals received, and whether one ends the command immediately.

    Attributes:
        temporary: files that the end of the command removes.
    """

    def __init__(self) -> None:
        self._received: list[int] = []
        self._echo_until = 0.0
        self._held = False
        self._answers: dict[int, tuple[str, str]] = {}
        self.temporary: set[Path] = set()

    @property
    def number(self) -> int:
        """What interrupted the command."""
        return self._received[0] if self._received else signal.SIGINT

    def listen(self, answer: Callable[[int], tuple[str, str]]) -> None:
        """From here on a signal raises KeyboardInterrupt. `answer` has the texts for standard error and standard output of a
        command that a signal ends before it has results.
        """
        for number in (getattr(signal, name) for name in _ENDING if hasattr(signal, name)):
            # The parent process may have set them to be ignored (nohup).
            if signal.getsignal(number) in {signal.SIG_DFL, signal.default_int_handler}:
                signal.signal(number, self._arrived)
                self._answers[number] = answer(number)

    def ending(self) -> AbstractContextManager[None]:
        """In the body a signal ends the process at once, even if a package holds the GIL. It must be on the main thread, and
        before the command has results. Without effect in a program that uses the library.
        """
        if not self._answers:
            return nullcontext()
        from . import _native

        return _native.SignalWatch(self._answers, list(self.temporary))

    def hold(self) -> None:
        """From here on the first signal is only recorded, as half a document is useless. Writing may block on a reader that
        never reads, so a later signal ends the command. So does a signal that follows one which has ended the work.
        """
        self._held = True
        # Time for a document to reach its reader.
        self._echo_until = max(self._echo_until, time.monotonic() + ECHO_S)

    def ignore(self) -> None:
        """The command's exit code is decided. As it ends, Python would restore the default of a signal with a handler, and
        the signal would replace the exit code.
        """
        for number in self._answers:
            signal.signal(number, signal.SIG_IGN)

    @contextmanager
    def held(self) -> Iterator[None]:
        """The body completes despite a first signal; see `hold`."""
        self.hold()
        try:
            yield
        finally:
            self._held = False

    def _arrived(self, number: int, _frame: FrameType | None) -> None:
        now, first = time.monotonic(), not self._received
        self._received.append(number)
        if not first and now < self._echo_until:
            return
        self._echo_until = now + ECHO_S
        if not (first and self._held):
            raise KeyboardInterrupt


SIGNALS = Signals()
