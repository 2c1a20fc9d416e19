"""Signals that end a command as Ctrl-C does: files are tidied up, and the text so far is kept."""

from __future__ import annotations

import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_ENDING = ("SIGINT", "SIGTERM", "SIGHUP")  # the last is unknown to Windows

# Whoever signals a process and its group (timeout) or passes on a Ctrl-C that the terminal sent to all means it once.
ECHO_S = 0.25


class Signals:
    """What came, and whether it ends the command now."""

    def __init__(self) -> None:
        self._came: list[int] = []
        self._echo_until = 0.0
        self._held = False

    @property
    def number(self) -> int:
        """What interrupted the command."""
        return self._came[0] if self._came else signal.SIGINT

    def listen(self) -> None:
        """From here on a signal raises KeyboardInterrupt."""
        for number in (getattr(signal, name) for name in _ENDING if hasattr(signal, name)):
            # Whoever started us may have decided otherwise (nohup).
            if signal.getsignal(number) in {signal.SIG_DFL, signal.default_int_handler}:
                signal.signal(number, self._arrived)

    def hold(self) -> None:
        """From here on the first signal is only noted: half a document is worth nothing. Writing it may wait for a reader
        that never reads, so a later signal ends the command, as does one after a signal that has ended the work before.
        """
        self._held = True
        # Time in which a document reaches whoever reads it.
        self._echo_until = max(self._echo_until, time.monotonic() + ECHO_S)

    @contextmanager
    def held(self) -> Iterator[None]:
        """The body comes to its end in spite of a first signal; see `hold`."""
        self.hold()
        try:
            yield
        finally:
            self._held = False

    def _arrived(self, number: int, _frame: FrameType | None) -> None:
        now, first = time.monotonic(), not self._came
        self._came.append(number)
        if not first and now < self._echo_until:
            return
        self._echo_until = now + ECHO_S
        if not (first and self._held):
            raise KeyboardInterrupt


SIGNALS = Signals()
