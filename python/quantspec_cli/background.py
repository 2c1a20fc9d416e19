"""Work that cannot be interrupted, on a thread that Ctrl-C does not wait for."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

from .errors import internal
from .signals import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")


def run(work: Callable[[], Result]) -> Result:
    """Runs `work` on another thread and waits for it, so that this thread can handle Ctrl-C; `work` must release the GIL.
    After Ctrl-C it continues unattended, and the process may end without it.
    """
    outcome: list[Result] = []
    failure: list[BaseException] = []

    def attempt() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=attempt, name="quantspec-background", daemon=True)
    start(thread)
    while thread.is_alive():
        thread.join(WAIT_S)
    if failure:
        # Panics of Rust libraries are BaseExceptions, which callers do not handle.
        raise failure[0] if isinstance(failure[0], Exception) else internal(failure[0])
    return outcome[0]


def start(thread: threading.Thread) -> None:
    """Starts a thread.

    Raises:
        DoesNotFitError: the system starts no further one.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise internal(error) from error
