"""`quantspec cache`: the draft weights and prompts on disk."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from . import hub, render, settings
from .engine import check_folder
from .errors import FileError, UsageError, native_errors, one_line, reason
from .output import Done, Stdout


class Kind(NamedTuple):
    """Kind of cached files, for messages.

    Attributes:
        name: of its files.
        elsewhere: how to choose another folder.
    """

    name: str
    elsewhere: str


# A file's time may lie beyond the year 9999, the last of Python's dates: this is its first day.
LATEST_S = 253_370_764_800

DRAFTS = Kind("draft weights", "set QUANTSPEC_DRAFT_CACHE to another one")
PROMPTS = Kind("prompts", "name another one with --prompt-cache")


def cache(*, clear: bool, prompt_cache: str | None, as_json: bool) -> Done:
    """Lists the files, or removes them.

    Raises:
        UsageError: the name of the folder of prompts is empty, or there is none and the cache of draft weights is off.
        FileError: a folder cannot be read, or a file cannot be removed.
    """
    if prompt_cache is not None:
        check_folder(prompt_cache)
    folder = settings.draft_cache()
    if folder is None and prompt_cache is None:
        raise UsageError(
            "the cache of draft weights is off",
            "unset QUANTSPEC_DRAFT_CACHE, or set it to a folder; set HOME if it is unset",
        )
    drafts = listing(folder) if folder else None
    prompts = listing(Path(prompt_cache), PROMPTS) if prompt_cache is not None else None
    kinds = [found for found in (drafts, prompts) if found is not None]
    if clear:
        for found in kinds:
            for file in found["files"]:
                remove(file["path"])
    if as_json:
        return Done(document={**(drafts or {}), "prompts": prompts, "cleared": clear})
    stdout = Stdout()
    for found in kinds:
        stdout.write("\n".join(cleared(found) if clear else lines(found)) + "\n")
    return Done()


def listing(folder: Path, kind: Kind = DRAFTS) -> dict[str, Any]:
    """A folder's part of `--json`: files by last use, latest first."""
    from . import _native

    look = _native.draft_files if kind is DRAFTS else _native.prompt_files
    try:
        with native_errors():
            files = look(str(folder))
    except OSError as error:
        raise unreadable(folder, error, kind) from error
    entries = [
        {
            "path": str(path),
            "model": None if model is None else hub.DEMO if Path(model) == hub.demo() else str(model),
            "bytes": size,
            "used": datetime.fromtimestamp(min(used, LATEST_S)).astimezone().isoformat(timespec="seconds"),
        }
        for path, model, size, used in reversed(files)
    ]
    total = sum(size for _, _, size, _ in files)
    limit = _native.DRAFTS_LIMIT_BYTES if kind is DRAFTS else _native.PROMPTS_LIMIT_BYTES
    return {"path": str(folder), "bytes": total, "limit_bytes": limit, "files": entries}


def unreadable(folder: Path, error: OSError, kind: Kind = DRAFTS) -> FileError:
    """The error of a folder that cannot be listed."""
    return FileError(
        f"cannot read the cache of {kind.name} {one_line(str(folder))}: {reason(error)}",
        f"make the folder readable, or {kind.elsewhere}",
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
    """The removed files of a folder, for people."""
    return [f"{one_line(found['path'])}: removed {count(found)}, {render.size(found['bytes'])}"]


def count(found: dict[str, Any]) -> str:
    """A number of files for people, as in "3 files"."""
    number = len(found["files"])
    return "1 file" if number == 1 else f"{number} files"
