"""File system queries; every refusal of the system is a `FileError`."""

from __future__ import annotations

import errno
import os
from stat import S_ISREG
from typing import TYPE_CHECKING

from .errors import FileError, reason

if TYPE_CHECKING:
    from pathlib import Path

# Errors that mean that nothing exists at a path.
_NOTHING = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}


def status(path: str | os.PathLike[str]) -> os.stat_result | None:
    """Status of a path, None if nothing is there. os.path and pathlib raise for a folder without search permission, or treat
    it as empty. A link without a target is an error: a file belongs there.
    """
    try:
        return os.stat(path)  # noqa: PTH116
    except ValueError:  # a zero byte
        return None
    except OSError as error:
        if error.errno in _NOTHING:
            _refuse_link(path)
            return None
        raise unreadable(path, error) from error


def _refuse_link(path: str | os.PathLike[str]) -> None:
    if (to := target(path)) is not None:
        raise FileError(
            f"{os.fspath(path)} is a link to {to}, which does not exist",
            "restore that file or remove the link; a model of the hub can be downloaded again",
        )


def target(path: str | os.PathLike[str]) -> str | None:
    """The path in a link; None if this is no link."""
    try:
        return os.fspath(os.readlink(path))  # noqa: PTH115
    except OSError:
        return None


def is_below(path: str | os.PathLike[str], folder: str | None) -> bool:
    """True for a folder, given by its real path, and for all that is below it. None is no folder."""
    if folder is None:
        return False
    real = os.path.realpath(path)
    return real == folder or real.startswith(folder.rstrip(os.sep) + os.sep)


def is_file(path: Path) -> bool:
    """True for a regular file; false for a directory, device or pipe."""
    found = status(path)
    return found is not None and S_ISREG(found.st_mode)


def read(path: Path) -> bytes:
    """The whole file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: str | os.PathLike[str], error: OSError) -> FileError:
    """The error for a file that the system refused to read."""
    return FileError(
        f"{os.fspath(path)} cannot be read: {reason(error)}", "check its permissions and those of the folders above it"
    )
