"""`quantspec cache`: the draft weights that are kept on disk."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from . import render, settings
from .errors import FileError, QuantspecError, native_errors, one_line, reason
from .output import Done, Stdout


def cache(*, clear: bool, as_json: bool) -> Done:
    """Lists the files of draft weights, or removes them.

    Raises:
        QuantspecError: the cache is off.
        FileError: the folder cannot be read, or a file cannot be removed.
    """
    folder = settings.draft_cache()
    if folder is None:
        raise QuantspecError(
            "the cache of draft weights is off",
            "unset QUANTSPEC_DRAFT_CACHE, or set it to a folder; set HOME if it is unset",
        )
    found = listing(folder)
    if clear:
        for file in found["files"]:
            remove(file["path"])
    if as_json:
        return Done(document={**found, "cleared": clear})
    stdout = Stdout()
    stdout.write("\n".join(cleared(found) if clear else lines(found)) + "\n")
    return Done()


def listing(folder: Path) -> dict[str, Any]:
    """The document of `--json`: files by last use, the latest first."""
    from . import _native

    try:
        with native_errors():
            files = _native.draft_files(str(folder))
    except OSError as error:
        raise unreadable(folder, error) from error
    entries = [
        {
            "path": str(path),
            "model": None if model is None else str(model),
            "bytes": size,
            "used": datetime.fromtimestamp(used).astimezone().isoformat(timespec="seconds"),
        }
        for path, model, size, used in reversed(files)
    ]
    total = sum(size for _, _, size, _ in files)
    return {"path": str(folder), "bytes": total, "limit_bytes": _native.DRAFTS_LIMIT_BYTES, "files": entries}


def unreadable(folder: Path, error: OSError) -> FileError:
    """The error of a folder that cannot be listed."""
    return FileError(
        f"cannot read the cache of draft weights {one_line(str(folder))}: {reason(error)}",
        "make the folder readable, or set QUANTSPEC_DRAFT_CACHE to another one",
    )


def remove(path: str) -> None:
    """Removes one file. Another process may have removed it first."""
    try:
        Path(path).unlink(missing_ok=True)
    except OSError as error:
        raise FileError(
            f"cannot remove {one_line(path)}: {reason(error)}", "make its folder writable; files before it were removed"
        ) from error


def lines(found: dict[str, Any]) -> list[str]:
    """The list for people."""
    total = f"{count(found)}, {render.size(found['bytes'])} of at most {render.size(found['limit_bytes'])}"
    rows = [
        f"{render.size(file['bytes']):>10}  {file['used'][:10]}  {one_line(file['model'] or file['path'])}"
        for file in found["files"]
    ]
    return [f"{one_line(found['path'])}: {total}", *rows]


def cleared(found: dict[str, Any]) -> list[str]:
    """What went."""
    return [f"{one_line(found['path'])}: removed {count(found)}, {render.size(found['bytes'])}"]


def count(found: dict[str, Any]) -> str:
    """Files, as a person says it."""
    number = len(found["files"])
    return "1 file" if number == 1 else f"{number} files"
