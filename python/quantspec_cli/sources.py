"""The documents of a batch: those that a directory, a file, a glob or a list names, and the path of each answer.

A document's name is its path below the argument that found it, with `/` between the parts. The name determines the
answer's path, which is always inside the output folder and independent of the other documents.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import TYPE_CHECKING

from . import files, prompts
from .errors import FileError, InputError, QuantspecError, UsageError, one_line, reason

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Where a batch keeps its journal, below the output folder.
STATE = ".quantspec"
JOURNAL = "journal.sqlite"

# Deepest folder that is walked, well below Python's recursion limit.
_DEEPEST = 200

# Longest file name of the common file systems, in bytes.
_NAME_BYTES = 255


@dataclass(frozen=True)
class Source:
    """One document, not yet read.

    Attributes:
        name: unique name, parts separated by `/`; bytes that are not UTF-8 are lone surrogates, as Python names files.
        path: the file to read; None for a literal text.
        text: the literal text of a list; None for a file.
        problem: why the document cannot be read, if known already (a folder that cannot be listed).
    """

    name: str
    path: str | None = None
    text: str | None = None
    problem: QuantspecError | None = None

    @property
    def shown(self) -> str:
        """The name in UTF-8, as in results.jsonl and messages: bytes that are not UTF-8 appear as `\\xff`."""
        return shown(self.name)

    @property
    def _with_path(self) -> str:
        """The name, and the path if a list names the document by an id."""
        is_path = self.path is None or self.path.endswith(self.name)
        return self.shown if is_path else f"{self.shown} ({shown(self.path or '')})"

    def read(self) -> bytes:
        """The document's bytes.

        Raises:
            QuantspecError: InputError if there is no regular file or the system refuses; `problem` if there is one;
                DoesNotFitError for more bytes than any context holds.
        """
        if self.problem is not None:
            raise self.problem
        if self.path is None:
            return (self.text or "").encode()
        try:
            # Opening a FIFO without a writer would block for ever.
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                if not S_ISREG(os.fstat(descriptor).st_mode):
                    raise InputError(f"{self._with_path} is no regular file", "give documents as files")
                return prompts.read_whole(self.shown, file)
        except FileNotFoundError as error:
            if (target := files.target(self.path)) is not None:
                raise InputError(
                    f"{self._with_path} is a link to {shown(target)}, which does not exist",
                    "restore that file or remove the link",
                ) from error
            raise InputError(f"{self._with_path} does not exist", "check the path") from error
        except IsADirectoryError as error:
            raise InputError(f"{self._with_path} is a directory", "give documents as files") from error
        except OSError as error:
            hint = "check its permissions" if isinstance(error, PermissionError) else "mend or remove it"
            raise InputError(f"{self._with_path} cannot be read: {reason(error)}", hint) from error


def shown(path: str) -> str:
    """A path in UTF-8: bytes that are not UTF-8 appear as `\\xff`."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def find(arguments: Sequence[str], out: Path) -> list[Source]:
    """The documents that the arguments name, in a fixed order. The output folder below a walked directory is left out.

    Raises:
        QuantspecError: UsageError or InputError for an argument without documents, for a list that cannot be read, and
            for two documents with the same name.
    """
    if not arguments:
        raise UsageError("no document", "name a directory, files, a quoted glob or a list.jsonl")
    found: dict[str, Source] = {}
    places: dict[str, str] = {}
    for argument in arguments:
        for source in _of_argument(argument, out):
            real = os.path.realpath(source.path) if source.path is not None else None
            if source.name in found:
                if real is not None and real == places.get(source.name):
                    continue  # the same file, named twice
                raise UsageError(
                    f"two documents are called {source.shown}",
                    "give their common directory, or a list.jsonl with an id for each",
                )
            found[source.name] = source
            if real is not None:
                places[source.name] = real
    if not found:
        raise UsageError(f"no document in {', '.join(map(one_line, arguments))}", "name a directory that holds some")
    return list(found.values())


def would_find(argument: str, path: str, out: Path) -> bool:
    """Whether a file at this path, which need not exist, is a document of an argument that is a directory or a glob."""
    parts: Sequence[str] = ["**"]
    if os.path.isdir(argument):
        root = argument
    elif glob.has_magic(argument) and not os.path.exists(argument):
        root, parts = _fixed(argument)
    else:
        return False
    real, left_out = os.path.realpath(path), _left_out(root, out)
    if files.is_below(real, left_out):
        return False
    # Linked folders are entered, too.
    for below, _ in _folders(root, left_out, ()):
        base = os.path.realpath(below)
        names = Path(os.path.relpath(below, root)).parts + Path(os.path.relpath(real, base)).parts
        if files.is_below(real, base) and _fits(names, parts) and not _enters_output(base, real):
            return True
    return False


def _fits(names: Sequence[str], parts: Sequence[str]) -> bool:
    """Whether a path's names match the parts of a glob, by the rules of `_expanded`."""
    if not names or not parts:
        return not names and not parts
    if parts[0] == "**" and _fits(names, parts[1:] or ["*"]):
        return True
    # Only a pattern that begins with a dot matches a hidden name.
    if names[0].startswith(".") and not parts[0].startswith("."):
        return False
    if parts[0] == "**":
        return _fits(names[1:], parts)
    return fnmatchcase(names[0], parts[0]) and _fits(names[1:], parts[1:])


def output_name(name: str, suffix: str) -> str:
    """The answer's path below the output folder. Parts too long for a file system end in a hash of the whole part."""
    *folders, last = name.split("/")
    return "/".join([_shortened(folder, "") for folder in folders] + [_shortened(last, suffix)])


def _shortened(part: str, suffix: str) -> str:
    raw = os.fsencode(part)
    if len(raw) + len(suffix.encode()) <= _NAME_BYTES:
        return part + suffix
    digest = "~" + hashlib.sha256(raw).hexdigest()[:16]
    kept = raw[: _NAME_BYTES - len(suffix.encode()) - len(digest)]
    # A character cut in half would make the name invalid UTF-8.
    return kept.decode("utf-8", "ignore") + digest + suffix


def _of_argument(argument: str, out: Path) -> Iterator[Source]:
    if not argument:
        raise UsageError("the name of a document is empty", "name a directory, a file, a glob or a list.jsonl")
    status = files.status(argument)
    if status is None and glob.has_magic(argument):
        yield from _matches(argument, out)
    elif status is None:
        raise InputError(f"{argument} does not exist", "check the path; quote a glob")
    elif S_ISDIR(status.st_mode):
        yield from sorted(_walk(argument, _left_out(argument, out)), key=lambda source: source.name.split("/"))
    elif argument.lower().endswith(".jsonl"):
        yield from _listed(argument)
    else:
        yield Source(os.path.basename(argument), argument)


def _matches(pattern: str, out: Path) -> Iterator[Source]:
    """Files that a glob matches; names begin after its fixed folders."""
    root, parts = _fixed(pattern)
    left_out = _left_out(root, out)
    found = {
        path: problem
        for path, problem in _expanded(root, parts, left_out)
        if (problem is not None or not os.path.isdir(path))
        and not _is_by_product(os.path.basename(path))
        and not files.is_below(path, left_out)
    }
    if not found:
        raise InputError(f"no file matches {pattern}", "check the pattern; ** stands for any folders")
    for path in sorted(found, key=os.fsencode):
        yield Source(os.path.relpath(path, root), path, problem=found[path])


def _fixed(pattern: str) -> tuple[str, Sequence[str]]:
    """The folder before a glob's first part with a wildcard, and the parts from there on."""
    parts = Path(pattern).parts
    fixed = list(takewhile(lambda part: not glob.has_magic(part), parts))
    return os.path.join(*fixed) if fixed else ".", parts[len(fixed) :]


def _expanded(folder: str, parts: Sequence[str], left_out: str | None) -> Iterator[tuple[str, QuantspecError | None]]:
    """Paths that a glob's parts match below a folder, and folders that `**` cannot enter, with the reason. The standard
    library's `**` would follow a link to a folder above it 40 times. Output folders of batches are left out.
    """
    if "**" not in parts:
        for path in glob.glob(os.path.join(glob.escape(folder), *parts)):
            if not _enters_output(folder, os.path.dirname(path)):
                yield path, None
        return
    at = parts.index("**")
    # With an empty last part, a glob matches folders only.
    for start in glob.glob(os.path.join(glob.escape(folder), *parts[:at], "")):
        if _enters_output(folder, start):
            continue
        for below, entries in _folders(start, left_out, ()):
            if isinstance(entries, QuantspecError):
                yield below, entries
            else:
                yield from _expanded(below, parts[at + 1 :] or ["*"], left_out)


def _left_out(folder: str, out: Path) -> str | None:
    """The output folder's real path: its files are no documents. None if the documents are below it, as with `--out .`."""
    real = os.path.realpath(out)
    if os.path.realpath(folder) == real:
        raise UsageError(f"--out {out} is also a directory of documents", "name another folder for the answers")
    return None if files.is_below(folder, real) else real


def _walk(folder: str, left_out: str | None) -> Iterator[Source]:
    """Every file below a folder that is not hidden, and every folder that cannot be listed."""
    for below, entries in _folders(folder, left_out, ()):
        name = os.path.relpath(below, folder)
        if isinstance(entries, QuantspecError):
            yield Source(name, below, problem=entries)
            continue
        prefix = "" if name == "." else name + "/"
        for entry in entries:
            if not _is_directory(entry):
                yield Source(prefix + entry.name, entry.path)


def _folders(
    folder: str, left_out: str | None, above: tuple[tuple[int, int], ...]
) -> Iterator[tuple[str, list[os.DirEntry[str]] | QuantspecError]]:
    """A folder and all folders below it that are not hidden, with their entries, or the reason why there are none. Linked
    folders are entered, except one that leads back above itself. Output folders of batches are left out.
    """
    try:
        status = os.stat(folder)
        entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
        entries = [entry for entry in entries if not _is_by_product(entry.name)]
    except OSError as error:
        yield folder, FileError(f"folder {folder} cannot be listed: {reason(error)}", "check its permissions")
        return
    me = (status.st_dev, status.st_ino)
    if me in above:
        return
    if len(above) == _DEEPEST:
        yield folder, InputError(f"folder {folder} is {_DEEPEST} levels deep", "name it as a directory of its own")
        return
    yield folder, entries
    for entry in entries:
        if _is_directory(entry) and not files.is_below(entry.path, left_out) and not _is_output(entry.path):
            yield from _folders(entry.path, left_out, (*above, me))


def _is_output(folder: str) -> bool:
    """Whether a folder below the documents is the output folder of a batch."""
    return os.path.isfile(os.path.join(folder, STATE, JOURNAL))


def _enters_output(folder: str, below: str) -> bool:
    """Whether a folder below another is the output folder of a batch, or in one."""
    while (below := below.rstrip(os.sep)) != folder.rstrip(os.sep):
        if _is_output(below):
            return True
        below = os.path.dirname(below)
    return False


def _is_by_product(name: str) -> bool:
    """Whether Word made the file while a document was open, or Windows made it to show a folder."""
    return name.startswith("~$") or name.lower() in {"thumbs.db", "desktop.ini"}


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link without a target: reading it reports why
        return False


def _listed(path: str) -> Iterator[Source]:
    """The documents of a list: one object per line with "path" or "text", and "id" if the name is not the path."""
    document = prompts.from_bytes(path, files.read(Path(path)))
    folder = os.path.dirname(path)
    for number, line in enumerate(document.text.split("\n"), 1):
        if line.strip():
            yield _of_line(f"line {number} of {path}", line, folder)


def _of_line(where: str, line: str, folder: str) -> Source:
    example = 'give {"path": "a.txt"} or {"id": "a", "text": "..."}'
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not JSON", example) from error
    if not isinstance(entry, dict):
        raise InputError(f"{where} is no object", example)
    unknown = sorted(entry.keys() - {"id", "path", "text"})
    if unknown:
        raise InputError(f"{where} has an unknown field {unknown[0]!r}", example)
    for key, value in entry.items():
        # A document without text fails alone, as an empty file does.
        if not isinstance(value, str) or not (value or key == "text"):
            raise InputError(
                f"{key!r} in {where} is {json.dumps(value):.60}", f"give a text that is not empty; {example}"
            )
        if "\0" in value:
            raise InputError(f"{key!r} in {where} has a zero character: {json.dumps(value):.60}", "leave it out")
    if ("path" in entry) == ("text" in entry):
        raise InputError(f"{where} has {'both path and' if 'path' in entry else 'neither path nor'} text", example)
    if "text" in entry and "id" not in entry:
        raise InputError(f"{where} has a text and no id", example)
    name = _safe(where, entry["id"] if "id" in entry else entry["path"])
    for text in entry.values():
        prompts.check_utf8(where, text, escaped=True)
    if "text" in entry:
        return Source(name, text=entry["text"])
    return Source(name, os.path.join(folder, entry["path"]))


def _safe(where: str, name: str) -> str:
    """The name as a relative path that stays below its folder; the root of an absolute path is removed."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise InputError(f"{where}: the name {name} leaves the output folder", 'add an "id" without ".."')
    if not parts or parts[0] == STATE:
        raise InputError(f"{where}: the name {name} cannot be that of an answer", 'add another "id"')
    return "/".join(parts)
