"""Errors that a user can see: what is wrong (with its number), what to do about it, and the exit code.

`KINDS` is the only table. Kinds are named by the engine (`ErrorKind` in quantspec-core) and appear in `--json`.
"""

from __future__ import annotations

import errno
import os
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterator

EXIT_DONE = 0
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_DOES_NOT_FIT = 3
EXIT_PARTIAL = 4
EXIT_INTERRUPTED = 130
# 128 + SIGPIPE, as a shell reports a program that the signal ended: the reader of the output has gone.
EXIT_PIPE_CLOSED = 141

# Not printable, but part of words in some scripts, and of emoji.
_JOINERS = "\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}"


class QuantspecError(Exception):
    """Base of all errors of quantspec.

    Attributes:
        kind: machine name, as in `--json`.
        message: one line that names the wrong value.
        hint: one line that names the remedy.
        exit_code: exit code of the command line.
        option: the option with the wrong value, by its name in Python or its flag, so that the command line can add the
            value's source; None if no option is wrong.
        kept: work done before the error, as fields of the document of `--json`.
    """

    kind: ClassVar[str] = "internal"
    exit_code: int = EXIT_ERROR

    def __init__(self, message: str, hint: str, *, option: str | None = None) -> None:
        self.message = one_line(message)
        self.hint = one_line(hint)
        self.option = option
        self.kept: dict[str, object] = {}
        super().__init__(f"{self.message} ({self.hint})")

    def __reduce__(self) -> tuple[type[QuantspecError], tuple[str, str], dict[str, object]]:
        """For pickle and copy, as between processes: the default of exceptions passes one argument only."""
        return type(self), (self.message, self.hint), dict(self.__dict__)

    def to_json(self) -> dict[str, object]:
        """The error as `--json` prints it."""
        body = {"kind": self.kind, "message": self.message, "hint": self.hint, "exit_code": self.exit_code}
        return {"error": body, **self.kept}

    def render(self) -> str:
        """The two lines for stderr."""
        return f"error: {self.message}\nhint: {self.hint}"


class UsageError(QuantspecError, ValueError):
    """An option has a value outside its range, or options contradict each other."""

    kind = "usage"
    exit_code = EXIT_USAGE


class IgnoredError(UsageError):
    """Other options leave this one without effect. Raised before a command does any work: the command line begins again
    without the option if it is from a variable or the settings file.
    """


class DoesNotFitError(QuantspecError):
    """Memory or context is too small. Nothing was truncated."""

    kind = "does_not_fit"
    exit_code = EXIT_DOES_NOT_FIT


class InputError(QuantspecError, ValueError):
    """A prompt or document cannot be used."""

    kind = "input"


class ModelError(QuantspecError):
    """A checkpoint cannot be used: missing, damaged, or of an unsupported family."""

    kind = "model"


class FileError(QuantspecError):
    """The file system refused."""

    kind = "io"


class DeviceError(QuantspecError):
    """A device is absent, too old, busy, or failed."""

    kind = "device"


class NotFiniteError(QuantspecError):
    """Keys, values, weights or logits are NaN or infinite."""

    kind = "not_finite"


class InterruptedByUserError(QuantspecError):
    """Ctrl-C, or a signal with the same effect, arrived before there was any text to keep."""

    kind = "interrupted"
    exit_code = EXIT_INTERRUPTED


class InternalError(QuantspecError):
    """A broken invariant of this program."""

    kind = "internal"


def interrupted(number: int) -> InterruptedByUserError:
    """The error of a signal, with the exit code a shell reports for a program that the signal ended."""
    by = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
    error = InterruptedByUserError(f"interrupted{by}", "run the command again")
    error.exit_code = 128 + number
    return error


KINDS: dict[str, type[QuantspecError]] = {
    error.kind: error
    for error in (
        UsageError,
        DoesNotFitError,
        InputError,
        ModelError,
        FileError,
        DeviceError,
        NotFiniteError,
        InterruptedByUserError,
        InternalError,
    )
}


def of_kind(kind: str, message: str, hint: str) -> QuantspecError:
    """The exception of a kind; an unknown kind is an internal error."""
    return KINDS.get(kind, InternalError)(message, hint)


def internal(error: BaseException) -> QuantspecError:
    """Converts an unexpected exception to an error: a defect of quantspec, unless the system has no memory or thread left."""
    if isinstance(error, MemoryError):
        return DoesNotFitError("out of memory", "use a shorter prompt or a smaller model")
    if isinstance(error, RuntimeError) and str(error) == "can't start new thread":
        return no_thread()
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return InternalError(text, "this is a defect of quantspec; please report it with the command you ran")


def no_thread() -> DoesNotFitError:
    """The error of a system that starts no further thread."""
    return DoesNotFitError(
        "the system starts no further thread", "raise the limits on memory and processes (ulimit -v, ulimit -u)"
    )


def refused(error: OSError) -> FileError:
    """Converts an error of the operating system that no caller expected."""
    where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
    too_many = error.errno in {errno.EMFILE, errno.ENFILE}
    hint = (
        "raise the limit on open files (ulimit -n)"
        if too_many
        else "check the permissions and the free space of the disk"
    )
    return FileError(f"{where}{reason(error)}", hint)


@contextmanager
def native_errors() -> Iterator[None]:
    """Converts errors of the native module to the exceptions of this one."""
    from ._native import NativeError

    try:
        yield
    except NativeError as error:
        raise of_kind(error.kind, error.message, error.hint) from error


def reason(error: OSError) -> str:
    """The operating system's message, without number and path."""
    # Errors of Rust code have the number in their text.
    text = error.strerror or str(error).partition(" (os error ")[0]
    # Other words may be names, such as of a variable.
    return text[:1].lower() + text[1:]


def one_line(text: str) -> str:
    """Makes foreign text (a template's message, the name of a tensor or file) one line without control characters."""
    folded = " ".join(text.split()) if not text.isprintable() else text
    return "".join(
        character if character.isprintable() or character in _JOINERS else "\N{REPLACEMENT CHARACTER}"
        for character in folded
    )
