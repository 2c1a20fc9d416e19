"""Shared by the scripts of this folder: one-line errors with a hint, and clean-up on signals."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

# Space in addition to the tensors: header, config, tokenizer.
HEADROOM_BYTES = 64 << 20


class Refusal(Exception):
    """A one-line error and its remedy."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class Parser(argparse.ArgumentParser):
    """Prints errors as one line and one hint."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\nhint: see {self.prog} --help\n")


def reason(error: OSError) -> str:
    """The operating system's message."""
    return (error.strerror or str(error)).lower()


def check_new(out: Path) -> None:
    """Refuses a folder that holds something."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise Refusal(f"{out} exists and is not an empty folder", "name a new or empty folder")


def check_space(out: Path, size: int) -> None:
    """Refuses `size` bytes of tensors that do not fit on the disk."""
    parent = next(path for path in (out, *out.absolute().parents) if path.exists())
    free = shutil.disk_usage(parent).free
    if free < size + HEADROOM_BYTES:
        raise Refusal(
            f"{out} needs {(size + HEADROOM_BYTES) / 1e9:.2f} GB and {free / 1e9:.2f} GB are free",
            "free some space or choose another disk",
        )


def stopped(number: int, _: object) -> NoReturn:
    """A signal that ends the program like Ctrl-C: written files are removed."""
    raise KeyboardInterrupt(number)


def run(work: Callable[[], str], out: Path) -> int:
    """Runs `work`, which writes to `out` and returns a line about it. Returns the exit code."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        # The parent process may have set it to be ignored (nohup).
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stopped)
    try:
        said = work()
    except Refusal as refusal:
        print(f"error: {refusal}\nhint: {refusal.hint}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: cannot write {out}: {reason(error)}\nhint: check space and permissions", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        with suppress(OSError):  # a terminal that has hung up
            print("error: interrupted\nhint: run the command again", file=sys.stderr)
        return 128 + int(*(error.args or (signal.SIGINT,)))
    print(said, file=sys.stderr)
    return 0
