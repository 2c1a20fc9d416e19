"""Runs a command and turns whatever happens into output and an exit code."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .cli import cli
from .errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_PIPE_CLOSED,
    EXIT_USAGE,
    DoesNotFitError,
    QuantspecError,
    UsageError,
    internal,
    interrupted,
)
from .output import abandon, unwritable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

# Signals that end a command as Ctrl-C does: files are tidied up, and the text so far is kept.
_ENDING = ("SIGTERM", "SIGHUP")  # the second is unknown to Windows

# What a device that takes no more answers.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}

# Those of them that came.
_came: list[int] = []


def main() -> int:
    """The `quantspec` command; returns its exit code."""
    _open_standard_streams()
    _listen()
    if "_QUANTSPEC_COMPLETE" in os.environ:  # a shell asks for completions
        cli.main(prog_name="quantspec")
    code = execute(sys.argv[1:])
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        abandon(sys.stdout)
        code = code or EXIT_PIPE_CLOSED
    try:
        sys.stderr.flush()
    except OSError:  # notes that nobody could read
        abandon(sys.stderr)
    return code


def _listen() -> None:
    for number in (getattr(signal, name) for name in _ENDING if hasattr(signal, name)):
        # Whoever started us may have decided otherwise (nohup).
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _interrupt)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    _came.append(number)
    raise KeyboardInterrupt


def _signal() -> int:
    """What interrupted the command."""
    return _came[0] if _came else signal.SIGINT


def _open_standard_streams() -> None:
    """Streams as the rest expects them. One that was closed (`2>&-`) must not lend its number to the next file opened, which
    would then receive what somebody writes to the stream. What people read goes nowhere without a standard error; without a
    standard output `output.Stdout` refuses, and without a standard input `--prompt -`.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            # Text is UTF-8 with line breaks as they are, whatever the locale.
            stream.reconfigure(encoding="utf-8", errors="replace", newline="\n")  # type: ignore[union-attr]


def execute(arguments: Sequence[str]) -> int:
    """Runs a command line and returns its exit code."""
    try:
        code = _invoke(list(arguments))
        return 128 + _signal() if code == EXIT_INTERRUPTED else code
    except QuantspecError as error:
        failure: QuantspecError = error
    except (KeyboardInterrupt, click.Abort):
        failure = interrupted(_signal())
    except BrokenPipeError:
        abandon(sys.stdout)
        return EXIT_PIPE_CLOSED
    except MemoryError:
        failure = DoesNotFitError("out of memory", "use a shorter prompt or a smaller model")
    except Exception as error:
        if os.environ.get("QUANTSPEC_DEBUG"):
            raise
        # click writes help and versions itself.
        full = isinstance(error, OSError) and error.errno in _FULL
        failure = unwritable(error) if full else internal(error)  # type: ignore[arg-type]
    return _fail(failure, as_json=_wants_json(arguments))


def _wants_json(arguments: Sequence[str]) -> bool:
    """Whether `--json` is among the flags: not as the value of another one, and not behind `--`."""
    options = [
        option for command in cli.commands.values() for option in command.params if isinstance(option, click.Option)
    ]
    with_value = {name for option in options if not option.is_flag for name in option.opts}
    value = False
    for argument in arguments:
        if not value and argument in {"--json", "--"}:
            return argument == "--json"
        value = not value and argument in with_value
    return False


def _invoke(arguments: list[str]) -> int:
    try:
        with cli.make_context("quantspec", arguments) as context:
            code = cli.invoke(context)
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return EXIT_USAGE
    except click.UsageError as error:
        raise _usage(error) from error
    except click.ClickException as error:
        raise UsageError(error.format_message(), "see quantspec --help") from error
    return code if isinstance(code, int) else EXIT_DONE


def _usage(error: click.UsageError) -> UsageError:
    path = error.ctx.command_path if error.ctx is not None else "quantspec"
    hint = f"see {path} --help"
    similar = getattr(error, "possibilities", None)
    if similar:
        hint = f"did you mean {' or '.join(sorted(similar))}? {hint}"
    message = (error.message if similar else error.format_message()).rstrip(".")
    return UsageError(message[:1].lower() + message[1:], hint)


def _fail(error: QuantspecError, *, as_json: bool) -> int:
    try:
        if as_json and sys.stdout is not None:
            sys.stdout.write(json.dumps(error.to_json(), ensure_ascii=False) + "\n")
            sys.stdout.flush()
        sys.stderr.write(error.render() + "\n")
        sys.stderr.flush()
    except OSError:
        # Nobody is left to tell; the exit code remains.
        abandon(sys.stdout)
        abandon(sys.stderr)
    return error.exit_code
