"""Output of answers: standard output as they grow, or a file that appears at the end."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO, TypeVar

from .errors import EXIT_DONE, FileError, QuantspecError, UsageError, reason
from .signals import SIGNALS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import TracebackType

Item = TypeVar("Item")

# As many as Linux follows.
LINKS_MAX = 40


@dataclass(frozen=True)
class Done:
    """Outcome of a command.

    Attributes:
        code: its exit code.
        document: output of `--json`. `entry` writes it last, so there is exactly one. Signals are held back from
            here on: the work is complete, and only its output remains.
    """

    code: int = EXIT_DONE
    document: Mapping[str, object] | Sequence[object] | None = None

    def __post_init__(self) -> None:
        """Holds signals back if there is a document."""
        if self.document is not None:
            SIGNALS.hold()


class Sink(Protocol):
    """Takes text."""

    def write(self, text: str) -> None:
        """Writes a piece of text; standard output shows it at once."""


class Stdout:
    """Standard output, flushed piece by piece. A closed pipe raises BrokenPipeError."""

    def __init__(self) -> None:
        """Fails at once if there is no standard output (`>&-`)."""
        if sys.stdout is None:
            raise FileError("standard output is closed", "leave it open, or redirect it to a file")

    def write(self, text: str) -> None:
        """Writes and flushes."""
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise unwritable(error) from error


class NullSink:
    """Discards answers, which appear in a document of `--json` instead."""

    def write(self, text: str) -> None:
        """Drops the text."""


class AtomicFile:
    """A file that is never half written: it is written next to its path and moved there at the end. A device, a pipe or an
    open descriptor (/dev/stderr) is written directly.

    Opening it fails at once if the end would fail: a missing folder, a directory of that name, no permission.
    """

    def __init__(self, path: str) -> None:
        if not path:
            raise UsageError("the name of the output is empty", "name a file")
        if path.endswith((os.sep, os.altsep or os.sep)):
            raise UsageError(f"output {path!r} is the name of a directory", "name a file")
        self._kept = False
        number = descriptor(path)
        try:
            if number is not None:
                self._path, self._special = Path(path), True
                self._file = _duplicate(number)
                return
            # A link is followed: the text goes to its target.
            place = _end_of_links(Path(path))
            self._path = Path(os.path.realpath(place.parent), place.name)
            if self._path.is_dir():
                raise UsageError(f"output {path!r} is a directory", "name a file")
            folder = self._path.parent
            if not folder.exists():
                raise FileError(f"folder {folder} of output {path} does not exist", f"create it: mkdir -p {folder}")
            self._special = self._path.exists() and not self._path.is_file()
            # Not named after the file, whose name may already have the maximum length.
            self._temporary = self._path.with_name(f".quantspec-{os.urandom(8).hex()}.tmp")
            if self._special:  # a device or a pipe cannot be replaced
                self._file = self._path.open("w", encoding="utf-8", newline="")
            else:
                # A new file gets default permissions; a replaced one keeps its own.
                replaced = self._path.stat() if self._path.exists() else None
                mode = stat.S_IMODE(replaced.st_mode) if replaced else 0o666
                if replaced and not os.access(self._path, os.W_OK):
                    raise PermissionError(13, "permission denied")
                SIGNALS.temporary.add(self._temporary)
                handle = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
                self._file = os.fdopen(handle, "w", encoding="utf-8", newline="")
                # The mask applies to new files. Only root may change owners, and some file systems support neither.
                if replaced:
                    with contextlib.suppress(OSError, AttributeError):
                        os.chown(self._temporary, replaced.st_uid, replaced.st_gid)
                    with contextlib.suppress(OSError):
                        self._temporary.chmod(mode)
        except OSError as error:
            raise FileError(
                f"output {path} cannot be written: {reason(error)}", "check the name and the folder's permissions"
            ) from error

    def is_at(self, path: str) -> bool:
        """True if the file would overwrite that input; "-" is standard input."""
        try:
            return path != "-" and not self._special and os.path.realpath(path) == str(self._path)
        except (OSError, ValueError):  # a relative path below a deleted folder, or a zero byte
            return False

    def write(self, text: str) -> None:
        """Adds text."""
        with self._reported():
            self._file.write(text)
            # Flushed, so that a reader of a pipe sees each row, and a full device fails before more work.
            if self._special:
                self._file.flush()

    def commit(self) -> None:
        """Puts the file into its place, unless it is closed already."""
        if self._file.closed:
            return
        with self._reported():
            self._file.flush()
            if not self._special:
                os.fsync(self._file.fileno())
            self._file.close()
        if self._special:
            return
        SIGNALS.temporary.discard(self._temporary)
        try:
            self._temporary.replace(self._path)
        except OSError as error:  # the path has changed meanwhile: the text is complete and stays in the temporary file
            self._kept = True
            raise FileError(
                f"output {self._path} cannot be written: {reason(error)}", f"the complete text is in {self._temporary}"
            ) from error

    def discard(self) -> None:
        """Leaves the place as it was."""
        with contextlib.suppress(OSError):
            self._file.close()
        if not (self._special or self._kept):
            self._temporary.unlink(missing_ok=True)
            SIGNALS.temporary.discard(self._temporary)

    def __enter__(self) -> AtomicFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            try:
                self.commit()
            except BaseException:
                self.discard()
                raise
        else:
            self.discard()

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            raise FileError(
                f"output {self._path} cannot be written: {reason(error)}", "free some space or name another file"
            ) from error


class Copy:
    """A file with results that a document or stream has, too: its errors wait until the file is complete."""

    def __init__(self, file: AtomicFile) -> None:
        self._file = file
        self._failure: FileError | None = None

    def write(self, text: str) -> None:
        """Adds text, unless the file has failed."""
        self._attempt(partial(self._file.write, text))

    def complete(self) -> FileError | None:
        """Puts the file into its place; or leaves the place as it was, and returns the first error."""
        self._attempt(self._file.commit)
        if self._failure is not None:
            self._file.discard()
        return self._failure

    def _attempt(self, step: Callable[[], None]) -> None:
        if self._failure is not None:
            return
        try:
            step()
        except FileError as error:
            self._failure = error
        except BrokenPipeError:
            self._failure = FileError("the file is a pipe that nobody reads", "name a file")


def written(file: AtomicFile, text: str) -> FileError | None:
    """Completes a file. An error is returned, so that the caller can show its results before it raises the error."""
    copy = Copy(file)
    copy.write(text)
    return copy.complete()


@contextlib.contextmanager
def opened(path: str | None, inputs: Iterable[str | None]) -> Iterator[AtomicFile | None]:
    """The file of `--output` while the body runs, None if there is none. Refuses to overwrite an input: a prompt, a schema, a
    file of a model, or for `batch` an answer. Inputs that are None do not exist.
    """
    if path is None:
        yield None
        return
    with AtomicFile(path) as file:
        if any(name is not None and file.is_at(name) for name in inputs):
            raise UsageError(f"output {path} is also an input or an answer", "name another file")
        yield file


class Answers:
    """Writes the answers of several prompts in their order: the first unfinished one as it grows, later ones whole.

    Several answers have headings, as `head` prints for several files; `headings` gives one to a single answer, too. A
    heading is written with the answer's first text, or at the end of an empty answer. Every answer ends with a line break.
    """

    def __init__(self, sink: Sink, names: Sequence[str], *, headings: bool = False) -> None:
        self._sink = sink
        self._names = names
        self._headings = headings or len(names) > 1
        self._waiting = [""] * len(names)
        self._given = [0] * len(names)
        self._ended = [False] * len(names)
        self._open = -1
        self._heading = ""
        self._at_line_start = True
        self._next()

    def push(self, index: int, text: str) -> None:
        """Text of one answer."""
        # Counted before the write: a signal during the write must not cause a second one.
        self._given[index] += len(text)
        if index != self._open:
            self._waiting[index] += text
        elif text:
            self._write(text)

    def push_rest(self, index: int, whole: str) -> None:
        """Writes the rest of one answer: a signal may arrive between a piece and its `push`."""
        self.push(index, whole[self._given[index] :])

    def end(self, index: int) -> None:
        """An answer is complete."""
        self._ended[index] = True
        while self._open < len(self._names) and self._ended[self._open]:
            self._write("" if self._at_line_start else "\n")
            self._next()

    def close(self) -> None:
        """All answers are complete."""
        for index in range(len(self._names)):
            self.end(index)

    def _next(self) -> None:
        self._open += 1
        if self._open < len(self._names):
            if self._headings:
                self._heading = ("" if self._open == 0 else "\n") + f"==> {self._names[self._open]} <==\n"
            if self._waiting[self._open]:
                self._write(self._waiting[self._open])

    def _write(self, text: str) -> None:
        """Writes text after the answer's heading, if that is not written yet."""
        text, self._heading = self._heading + text, ""
        if text:
            # Set first: Ctrl-C often arrives during the write, when the text has just appeared.
            self._at_line_start = text.endswith("\n")
            self._sink.write(text)


def _end_of_links(path: Path) -> Path:
    """The target of a path. As with Linux's `protected_symlinks`, a link in a world-writable folder (/tmp) is followed only
    if this user or the folder's owner owns it. Another user's link could lead to one of this user's files.
    """
    everybody = stat.S_ISVTX | stat.S_IWOTH
    for _ in range(LINKS_MAX):
        try:
            target = path.readlink()
        except OSError:  # no link
            return path
        folder, owner = path.parent.stat(), path.lstat().st_uid
        if folder.st_mode & everybody == everybody and owner not in {os.geteuid(), folder.st_uid}:
            raise FileError(
                f"output {path} is a link of user {owner} in a world-writable folder",
                f"name its target {target}, or another file",
            )
        path = path.parent / target
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def descriptor(path: str) -> int | None:
    """The descriptor of this process that a path names (/dev/stdout, /dev/fd/3, a link to one). The file it refers to may be
    shared or unnamed, so it must not be replaced.
    """
    with contextlib.suppress(OSError):
        folders = {os.path.realpath(folder) for folder in ("/dev/fd", "/proc/self/fd", "/proc/thread-self/fd")}
        for _ in range(LINKS_MAX):
            folder, name = os.path.split(path)
            if re.fullmatch(r"0|[1-9][0-9]{0,8}", name) and os.path.realpath(folder) in folders:
                return int(name)
            path = str(Path(folder, Path(path).readlink()))
    return None


def _duplicate(number: int) -> TextIO:
    """A separate stream that continues at the descriptor's position."""
    import fcntl  # not available on Windows, which has no descriptor paths

    # `entry` keeps the number of a closed stream unused.
    closed = number < 3 and (sys.__stdin__, sys.__stdout__, sys.__stderr__)[number] is None
    if closed or fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    return os.fdopen(os.dup(number), "w", encoding="utf-8", newline="")


def until_failure(items: Iterable[Item], failures: list[QuantspecError]) -> Iterator[Item]:
    """Items up to an error of their source, which is appended to `failures`, so that earlier items are written. Errors of
    the writer pass through.
    """
    try:
        yield from items
    except QuantspecError as error:
        failures.append(error)


def redirect_to_null(stream: TextIO | None) -> None:
    """Redirects a standard stream to nothing, so that the flush at exit does not fail on a closed pipe."""
    if stream is None:
        return
    with contextlib.suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)


def unwritable(error: OSError) -> FileError:
    """The error for a standard output that accepts no more data; redirects it to nothing."""
    redirect_to_null(sys.stdout)
    return FileError(f"standard output cannot be written: {reason(error)}", "free some space or write somewhere else")
