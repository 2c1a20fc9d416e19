"""Every error a user can meet: what is wrong (with its number), what to do about it, and the exit code.

`KINDS` is the only table. Kinds are named by the engine (`ErrorKind` in quantspec-core) and appear in `--json`.
"""

from __future__ import annotations

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
# 128 + SIGPIPE, as a shell reports a program that the signal ended: the reader of our output has gone.
EXIT_PIPE_CLOSED = 141


class QuantspecError(Exception):
    """Base of all errors of quantspec.

    Attributes:
        kind: machine name, as in `--json`.
        message: one line, naming the value that is wrong.
        hint: one line, naming the remedy.
        exit_code: what the command line exits with.
        option: whose value is wrong, by its name in Python or its flag, for the command line to say where the value is from;
            None where it is no option's.
        kept: what was done before the error came, as fields of the document of `--json`.
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
        """How pickle and copy make the error anew, as between processes: an exception's own way has one argument only."""
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


class DoesNotFitError(QuantspecError):
    """Memory or context is too small. Nothing was cut."""

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
    """Ctrl-C, or a signal that ends a command like it, arrived before there was anything to keep."""

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
    """The exception of a kind; a kind this version does not know is an internal error."""
    return KINDS.get(kind, InternalError)(message, hint)


def internal(error: BaseException) -> InternalError:
    """An exception nobody expected, as an error: a defect of ours."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return InternalError(text, "this is a defect of quantspec; please report it with the command you ran")


@contextmanager
def native_errors() -> Iterator[None]:
    """Turns errors of the native module into the exceptions of this one."""
    from ._native import NativeError

    try:
        yield
    except NativeError as error:
        raise of_kind(error.kind, error.message, error.hint) from error


def reason(error: OSError) -> str:
    """Why the operating system refused, in its words, without number and path."""
    return (error.strerror or str(error)).lower()


def one_line(text: str) -> str:
    """Foreign text (a template's message, a tensor's or file's name) on one line, with nothing that moves the cursor."""
    folded = " ".join(text.split()) if not text.isprintable() else text
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in folded)
