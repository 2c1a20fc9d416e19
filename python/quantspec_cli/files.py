"""What is on the disk, or why the system does not let us look: every refusal is a `FileError`."""

from __future__ import annotations

import errno
import os
from stat import S_ISREG
from typing import TYPE_CHECKING

from .errors import FileError, reason

if TYPE_CHECKING:
    from pathlib import Path

# Nothing can be behind such a name.
_NOTHING = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}


def status(path: str | os.PathLike[str]) -> os.stat_result | None:
    """What is at a place, None where nothing is. The tests of os.path and pathlib raise where a folder may not be searched,
    or take it for an empty one.
    """
    try:
        return os.stat(path)  # noqa: PTH116
    except ValueError:  # a zero byte
        return None
    except OSError as error:
        if error.errno in _NOTHING:
            return None
        raise unreadable(path, error) from error


def is_file(path: Path) -> bool:
    """Whether a file is there, not a directory, device or pipe."""
    found = status(path)
    return found is not None and S_ISREG(found.st_mode)


def read(path: Path) -> bytes:
    """The whole file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: str | os.PathLike[str], error: OSError) -> FileError:
    """What the system refused about a file."""
    return FileError(
        f"{os.fspath(path)} cannot be read: {reason(error)}", "check its permissions and those of the folders above it"
    )
