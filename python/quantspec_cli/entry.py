"""Runs a command and converts every outcome to output and an exit code."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from . import panics, settings
from .cli import cli
from .errors import (
    EXIT_INTERRUPTED,
    EXIT_PIPE_CLOSED,
    EXIT_USAGE,
    QuantspecError,
    UsageError,
    internal,
    interrupted,
    refused,
)
from .output import Done, redirect_to_null, unwritable
from .signals import SIGNALS

if TYPE_CHECKING:
    from collections.abc import Container, Sequence


def main() -> int:
    """The `quantspec` command; returns its exit code."""
    _open_standard_streams()
    arguments = sys.argv[1:]
    as_json = _wants_json(arguments) and sys.stdout is not None
    SIGNALS.listen(lambda number: _texts(interrupted(number), as_json=as_json))
    if "_QUANTSPEC_COMPLETE" in os.environ:  # the shell requests completions
        cli.main(prog_name="quantspec")
    code = execute(arguments)
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        redirect_to_null(sys.stdout)
        code = code or EXIT_PIPE_CLOSED
    try:
        sys.stderr.flush()
    except OSError:  # notes without a reader
        redirect_to_null(sys.stderr)
    SIGNALS.ignore()
    return code


def _open_standard_streams() -> None:
    """Prepares the standard streams. A closed stream (`2>&-`) must keep its descriptor: the next file opened would otherwise
    get it, and receive text meant for the stream. Messages are dropped without a standard error. Without a standard
    output `output.Stdout` refuses, and without a standard input `--prompt -`.
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
    if sys.stdout is not None and isinstance(sys.stdout.buffer, io.RawIOBase):
        # With PYTHONUNBUFFERED, a stream drops the rest of a write that a signal cuts short. Writers flush explicitly
        # instead.
        sys.stdout = open(  # noqa: SIM115
            sys.stdout.fileno(), "w", encoding="utf-8", errors="replace", newline="\n", closefd=False
        )


def execute(arguments: Sequence[str]) -> int:
    """Runs a command line and returns its exit code."""
    try:
        done = _invoke(list(arguments))
        document = None if done.document is None else _line(done.document)
    except QuantspecError as error:
        failure: QuantspecError = error
    except (KeyboardInterrupt, click.Abort):
        failure = interrupted(SIGNALS.number)
    except BrokenPipeError:
        redirect_to_null(sys.stdout)
        return EXIT_PIPE_CLOSED
    except Exception as error:
        if os.environ.get("QUANTSPEC_DEBUG"):
            raise
        if isinstance(error.__cause__, KeyboardInterrupt):  # during an import, see `__main__`
            failure = interrupted(SIGNALS.number)
        else:
            failure = refused(error) if isinstance(error, OSError) else internal(error)
    else:
        code = 128 + SIGNALS.number if done.code == EXIT_INTERRUPTED else done.code
        return code if document is None else _print(document, code)
    return _fail(failure, as_json=_wants_json(arguments))


def _wants_json(arguments: Sequence[str]) -> bool:
    """True if `--json` is among the flags: not as another flag's value, and not after `--`."""
    options = [
        option
        for command in (cli, *cli.commands.values())
        for option in command.params
        if isinstance(option, click.Option)
    ]
    with_value = {name for option in options if not option.is_flag for name in option.opts}
    value = False
    for argument in arguments:
        if not value and argument in {"--json", "--"}:
            return argument == "--json"
        value = not value and _takes_next_argument(argument, with_value)
    return False


def _takes_next_argument(argument: str, with_value: Container[str]) -> bool:
    """True if the next argument is the value of this flag. In a group of short flags (-qm) the last one may take it, unless
    an earlier one takes the rest of the argument (-mq).
    """
    if argument.startswith("--"):
        return argument in with_value
    letters = argument[1:] if argument.startswith("-") else ""
    takers = [place for place, letter in enumerate(letters, 1) if f"-{letter}" in with_value]
    return takers[:1] == [len(letters)]


def _invoke(arguments: list[str]) -> Done:
    try:
        with cli.make_context("quantspec", arguments) as context, panics.of_command():
            done = cli.invoke(context)
    except click.exceptions.Exit as left:
        return Done(left.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        with suppress(OSError):  # a standard error without a reader
            click.echo(error.format_message(), err=True)
        return Done(EXIT_USAGE)
    except click.UsageError as error:
        raise _usage(error, arguments) from error
    except click.ClickException as error:
        raise UsageError(error.format_message(), "see quantspec --help") from error
    return done if isinstance(done, Done) else Done()


def _usage(error: click.UsageError, arguments: Sequence[str]) -> UsageError:
    # Errors of click's parser do not name the command.
    named = " ".join(["quantspec", *(argument for argument in arguments[:1] if argument in cli.commands)])
    path = error.ctx.command_path if error.ctx is not None else named
    hint = f"see {path} --help"
    similar = getattr(error, "possibilities", None)
    if similar:
        hint = f"did you mean {' or '.join(sorted(similar))}? {hint}"
    of_group = {name for option in cli.params for name in option.opts}
    if isinstance(error, click.NoSuchOption) and path != cli.name and error.option_name in of_group:
        hint = f"{error.option_name} goes before the command; see quantspec --help"
    message = (error.message if similar else error.format_message()).rstrip(".")
    parameter = getattr(error, "param", None)
    if parameter is not None and error.ctx is not None:
        hint = settings.origin(error.ctx, parameter) + hint
    return UsageError(message[:1].lower() + message[1:], hint)


def _line(document: object) -> str:
    text = json.dumps(document, ensure_ascii=False) + "\n"
    # Bytes of a name that are not UTF-8 appear as \xff, as in `sources.shown`.
    return re.sub("[\udc80-\udcff]", lambda byte: f"\\\\x{ord(byte[0]) - 0xDC00:02x}", text)


def _write(document: str) -> None:
    """Writes the document of `--json`. Nothing follows it on standard output, even if writing fails. Signals stay held back:
    the document has the outcome.
    """
    SIGNALS.hold()
    try:
        sys.stdout.write(document)
        sys.stdout.flush()
    except BaseException:
        redirect_to_null(sys.stdout)
        raise


def _print(document: str, code: int) -> int:
    """Writes the document of a command. Returns its exit code, or that of an error while writing."""
    try:
        _write(document)
    except BrokenPipeError:
        return EXIT_PIPE_CLOSED
    except OSError as error:
        return _fail(unwritable(error), as_json=False)
    except KeyboardInterrupt:
        return _fail(interrupted(SIGNALS.number), as_json=False)
    return code


def _texts(error: QuantspecError, *, as_json: bool) -> tuple[str, str]:
    """What standard error and standard output get for an error."""
    return error.render() + "\n", _line(error.to_json()) if as_json else ""


def _fail(error: QuantspecError, *, as_json: bool) -> int:
    """Writes two lines to stderr, then the document; if one fails, the other is still written. The exit code does not
    change."""
    lines, document = _texts(error, as_json=as_json and sys.stdout is not None)
    try:
        sys.stderr.write(lines)
        sys.stderr.flush()
    except OSError:
        redirect_to_null(sys.stderr)
    if document:
        with suppress(OSError, KeyboardInterrupt):
            _write(document)
    return error.exit_code
