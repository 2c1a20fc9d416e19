"""Work that cannot be interrupted, done where Ctrl-C need not wait for it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

from .errors import internal

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")


def run(work: Callable[[], Result]) -> Result:
    """Runs `work` on another thread and waits for it, so that this thread hears Ctrl-C meanwhile; `work` must let go of the
    GIL. After Ctrl-C it goes on unattended: the process may end without it.
    """
    outcome: list[Result] = []
    failure: list[BaseException] = []

    def attempt() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=attempt, name="quantspec-background", daemon=True)
    thread.start()
    thread.join()
    if failure:
        # Panics of Rust libraries are no Exceptions; nobody above would expect them.
        raise failure[0] if isinstance(failure[0], Exception) else internal(failure[0])
    return outcome[0]
