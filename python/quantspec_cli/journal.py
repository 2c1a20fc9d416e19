"""Record of a batch: a journal in SQLite next to the answers, and results.jsonl, which is generated from it.

Three steps finish a document, in this order: its answer is moved to its path, its row is committed, its line is appended
to results.jsonl. If a process dies in between, the next start repeats the document or writes the line. The output folder
belongs to one process at a time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import quote

from . import files
from .errors import FileError, QuantspecError, one_line, reason
from .sources import JOURNAL, STATE, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import TracebackType

RESULTS = "results.jsonl"

# Version of the tables below. A journal of another version is refused.
_VERSION = 3

_TABLES = """
CREATE TABLE IF NOT EXISTS documents (
    name BLOB PRIMARY KEY,
    output BLOB NOT NULL, -- path of its last answer; that of its next one if it has none
    status TEXT NOT NULL CHECK (status IN ('pending', 'done', 'failed')),
    finished INTEGER, -- order in which documents finished
    sha256 TEXT,      -- of the document that failed; NULL if it could not be read
    fingerprint TEXT, -- of everything else that the failure depends on
    failure TEXT      -- the line of results.jsonl; NULL unless the last result is a failure
);
CREATE INDEX IF NOT EXISTS documents_finished ON documents (finished);
CREATE TABLE IF NOT EXISTS answers ( -- files that the journal has put into the folder
    output BLOB PRIMARY KEY,
    name BLOB NOT NULL, -- of the document
    sha256 TEXT,        -- of the document's bytes
    fingerprint TEXT,   -- of everything else that the answer depends on
    path BLOB,          -- real path of the document; NULL for a text of a list
    size INTEGER,       -- bytes of the file; NULL while it is moved there
    result TEXT         -- the line of results.jsonl; NULL while the file is moved there, and after --no-resume
);
CREATE TABLE IF NOT EXISTS calls ( -- answers to parts of documents that are not finished
    name BLOB,
    fingerprint TEXT,
    part BLOB,   -- SHA-256 of the part's text
    answer TEXT, -- in JSON
    PRIMARY KEY (name, fingerprint, part)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rates (device TEXT, speed TEXT, name TEXT, value REAL, PRIMARY KEY (device, speed, name));
"""


class Row(NamedTuple):
    """A document's row in the journal.

    Attributes:
        output: path of its last answer below the folder; that of its next one if it has none.
        status: "pending" (new, changed or interrupted), "done" or "failed".
        failed: its last result is a failure, of a document with this `sha256` (None if it could not be read), and of model,
            options and version with this `fingerprint`.
    """

    output: str
    status: Literal["pending", "done", "failed"]
    failed: bool
    sha256: str | None
    fingerprint: str | None


class Answer(NamedTuple):
    """A file that the journal has put into the folder.

    Attributes:
        name: of the document.
        sha256: of the document's bytes.
        fingerprint: of model, options and version.
        path: the document's real path; None for a text of a list.
        size: in bytes; None if a process died while it moved an answer there.
        known: False if a process died then, and after --no-resume: it may be any answer.
    """

    name: str
    sha256: str | None
    fingerprint: str | None
    path: str | None
    size: int | None
    known: bool


class Contents(NamedTuple):
    """Contents of a journal.

    Attributes:
        rows: of all documents, by name.
        answers: by their paths below the folder.
    """

    rows: dict[str, Row]
    answers: dict[str, Answer]

    def sizes(self) -> dict[str, int | None]:
        """Bytes of the journal's files, by path below the folder; see `Answer.size`."""
        return {output: answer.size for output, answer in self.answers.items()}


class Journal:
    """The journal of one output folder, held by this process until `close`."""

    def __init__(self, out: Path, *, replace: bool = False) -> None:
        """Opens the journal and locks the folder. `replace` drops earlier results, replaces files that the journal did not
        write, and renames a journal that cannot be read.

        Raises:
            FileError: the folder cannot be written, is locked by another process, or its journal is damaged.
        """
        self.out = out
        self.state = out / STATE
        self._replace = replace
        if out.is_symlink() and not out.exists():
            raise FileError(
                f"output folder {out} is a link to {one_line(str(out.readlink()))}, which does not exist",
                "create that folder, or remove the link",
            )
        try:
            self.state.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.state / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise FileError(
                f"output folder {out} cannot be written: {reason(error)}", "name a folder that you may write to"
            ) from error
        try:
            self._take()
            self._connection = self._open()
            self._temporary = self.state / "tmp"
            # Files that were not complete when a process died.
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary.mkdir(exist_ok=True)
        except OSError as error:
            self.close()
            raise FileError(
                f"output folder {out} cannot be written: {reason(error)}", "name a folder that you may write to"
            ) from error
        except BaseException:
            self.close()
            raise

    def _take(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._lock, 200, 0).decode("utf-8", "replace").strip() or "another process"
            raise FileError(
                f"output folder {self.out} is in use by {holder}", "wait for its end, or name another folder"
            ) from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def _open(self) -> sqlite3.Connection:
        path = self.state / JOURNAL
        try:
            return _connect(path)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError) or not self._replace:
                raise FileError(
                    f"journal {path} cannot be used: {error}",
                    "free some space or correct its permissions; a damaged journal is replaced by --no-resume",
                ) from error
        for file in self.state.glob(f"{JOURNAL}*"):
            file.rename(file.with_name(f"damaged-{file.name}"))
        with self._reported():
            return _connect(path)

    def close(self) -> None:
        """Closes the journal and unlocks the folder."""
        connection = getattr(self, "_connection", None)
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()
        with contextlib.suppress(OSError):
            os.close(self._lock)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def contents(self) -> Contents:
        """All rows."""
        with self._reported():
            return _contents(self._connection)

    def begin(self, outputs: Mapping[str, str], finished: Mapping[str, str]) -> list[str]:
        """Marks documents (name to output) as pending, and gives `finished` ones (name to status) their status. Then
        results.jsonl has the lines of all that are not pending.

        A pending document keeps its earlier result until another answer is written: a run with other options that soon ends
        loses nothing.

        Returns the names whose output exists and was not written by this journal; the caller must refuse them.
        """
        with self._reported():
            contents = _contents(self._connection)
            if not self._replace:
                check_results(self.out, contents)
            sizes = contents.sizes()
            refused = [] if self._replace else foreign(self.out, outputs, sizes)
            with self._transaction():
                if self._replace:
                    self._forget(outputs)
                # After a kill only the file that is there now is the journal's.
                unsure = {output for output, size in sizes.items() if size is None}
                for output in unsure.union(outputs.values() if self._replace else ()):
                    self._keep_size(os.fsencode(output), _own_size(self.out, output, sizes))
                self._connection.executemany(
                    "INSERT INTO documents (name, output, status) VALUES (?, ?, 'pending') "
                    "ON CONFLICT (name) DO UPDATE SET status = 'pending'",
                    [(os.fsencode(name), os.fsencode(output)) for name, output in outputs.items()],
                )
                self._connection.executemany(
                    "UPDATE documents SET status = ? WHERE name = ? AND status = 'pending'",
                    [(status, os.fsencode(name)) for name, status in finished.items()],
                )
        self._rewrite()
        return refused

    def take(self, outputs: Mapping[str, str]) -> None:
        """Makes the answers at these places (name to output) the results of these documents. Where the journal has put none,
        the document's last answer is there, too.
        """
        with self._reported(), self._transaction():
            for name, output in outputs.items():
                row, place = os.fsencode(name), os.fsencode(output)
                last = self._connection.execute(
                    "SELECT answers.* FROM answers JOIN documents USING (name, output) WHERE name = ? AND result IS NOT NULL",
                    (row,),
                ).fetchone()
                if last is not None:
                    line = json.dumps({**json.loads(last[-1]), "output": shown(output)}, ensure_ascii=False)
                    self._connection.execute(
                        "INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?, ?, ?, ?)", (place, *last[1:-1], line)
                    )
                self._connection.execute(
                    "UPDATE documents SET output = ?, status = 'done', failure = NULL WHERE name = ?", (place, row)
                )

    def finish(
        self,
        name: str,
        output: str,
        result: Mapping[str, Any],
        fingerprint: str,
        *,
        size: int | None = None,
        path: str | None = None,
    ) -> None:
        """Commits a document's result, then appends its line to results.jsonl. With an answer: its `size` in bytes, and the
        document's real `path`. Without one, an earlier answer stays in its place.
        """
        line, row = json.dumps(result, ensure_ascii=False), os.fsencode(name)
        basis = result["sha256"], fingerprint
        failure = (*basis, line) if size is None else (None, None, None)
        with self._reported(), self._transaction():
            if size is not None:
                self._connection.execute("DELETE FROM calls WHERE name = ?", (row,))
                self._connection.execute(
                    "INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (os.fsencode(output), row, *basis, None if path is None else os.fsencode(path), size, line),
                )
            self._connection.execute(
                "UPDATE documents SET status = ?, finished = (SELECT coalesce(max(finished), 0) + 1 FROM documents), "
                "sha256 = ?, fingerprint = ?, failure = ? WHERE name = ?",
                (result["status"], *failure, row),
            )
        self._append(line)

    def keep_call(self, name: str, fingerprint: str, part: str, answer: Mapping[str, Any]) -> None:
        """Keeps the answer to a part of a document until the document is finished: a book may take hours."""
        with self._reported():
            self._connection.execute(
                "INSERT OR REPLACE INTO calls VALUES (?, ?, ?, ?)",
                (os.fsencode(name), fingerprint, _digest(part), json.dumps(answer, ensure_ascii=False)),
            )

    def kept_call(self, name: str, fingerprint: str, part: str) -> dict[str, Any] | None:
        """The answer of `keep_call`, perhaps in an earlier run; None if there is none."""
        with self._reported():
            found = self._connection.execute(
                "SELECT answer FROM calls WHERE name = ? AND fingerprint = ? AND part = ?",
                (os.fsencode(name), fingerprint, _digest(part)),
            ).fetchone()
        return None if found is None else dict(json.loads(found[0]))

    def write(self, name: str, output: str, text: str) -> int:
        """Moves a document's answer to its path below the folder, atomically. Returns its size in bytes.

        Raises:
            FileError: the path is outside the folder (through a link), there is a file that the journal did not write, or
                the system or the journal refuses; the OSError or sqlite3.Error is its cause.
        """
        target = self.out / output
        check_place(self.out, output)
        self._check_own(output)
        temporary = self._new_temporary()
        try:
            with temporary.open("w", encoding="utf-8", newline="") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            target.parent.mkdir(parents=True, exist_ok=True)
            before = _own_size(self.out, output, self._sizes(output))
            row, place = os.fsencode(name), os.fsencode(output)
            # If the process dies before `finish`, the file may be the earlier one or this answer.
            with self._reported(), self._transaction():
                self._connection.execute("INSERT OR REPLACE INTO answers (output, name) VALUES (?, ?)", (place, row))
                self._connection.execute(
                    "UPDATE documents SET output = ?, sha256 = NULL, fingerprint = NULL, failure = NULL WHERE name = ?",
                    (place, row),
                )
            # A link at the path itself is replaced, not followed.
            try:
                temporary.replace(target)
            except OSError:
                with self._reported(), self._transaction():
                    self._keep_size(place, before)
                raise
            _sync_folder(target.parent)
            return len(text.encode())
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise FileError(
                f"answer {one_line(str(target))} cannot be written: {reason(error)}",
                "check the folder, its permissions and the space on its disk",
            ) from error

    def keep_rates(self, device: str, speed: str, rates: Mapping[str, float], *, replace: bool) -> None:
        """Stores measured rates for the predictions of later runs on this device with this fingerprint of the speed. Earlier
        ones are kept unless `replace`.
        """
        with self._reported(), self._transaction():
            self._connection.executemany(
                f"INSERT OR {'REPLACE' if replace else 'IGNORE'} INTO rates VALUES (?, ?, ?, ?)",
                [(device, speed, name, value) for name, value in rates.items()],
            )

    def results(self, names: Iterable[str], status: str | None = None) -> list[dict[str, Any]]:
        """The results of these documents, in the order in which they finished; with a status, only those that have it."""
        wanted = {os.fsencode(name) for name in names}
        return [json.loads(line) for name, line in self._finished(status) if name in wanted]

    def warnings(self, names: Iterable[str]) -> list[tuple[str, list[str]]]:
        """Names, as results have them, and warnings of these documents, if they are done and have any; in the order of
        `results`.
        """
        wanted = {os.fsencode(name) for name in names}
        found = []
        for name, line in self._finished("done"):
            # Few lines have the field: parsing all of a large folder would take long.
            if '"warnings": ' in line and name in wanted:
                result = json.loads(line)
                found.append((result["document"], result["warnings"]))
        return found

    def count(self, names: Iterable[str], status: str) -> int:
        """How many of these documents have a status."""
        wanted = {os.fsencode(name) for name in names}
        with self._reported():
            found = self._connection.execute("SELECT name FROM documents WHERE status = ?", (status,))
            return sum(name in wanted for (name,) in found)

    def _forget(self, outputs: Mapping[str, str]) -> None:
        """Forgets results and parts of documents, and what the answers at their outputs (name to output) are to."""
        for name, output in outputs.items():
            row, place = os.fsencode(name), os.fsencode(output)
            self._connection.execute("DELETE FROM calls WHERE name = ?", (row,))
            self._connection.execute(
                "UPDATE documents SET output = ?, sha256 = NULL, fingerprint = NULL, failure = NULL WHERE name = ?",
                (place, row),
            )
            self._connection.execute("UPDATE answers SET result = NULL WHERE output = ?", (place,))

    def _check_own(self, output: str) -> None:
        """Refuses to replace a file that another program wrote after `begin`."""
        if not self._replace and foreign(self.out, {output: output}, self._sizes(output)):
            raise not_own(self.out, output)

    def _sizes(self, output: str) -> dict[str, int | None]:
        """As `Contents.sizes`, of one place."""
        with self._reported():
            found = self._connection.execute("SELECT size FROM answers WHERE output = ?", (os.fsencode(output),))
            row = found.fetchone()
            return {} if row is None else {output: row[0]}

    def _keep_size(self, place: bytes, size: int) -> None:
        """Notes the size of the journal's file at a place; -1 if there is none."""
        self._connection.execute("UPDATE answers SET size = ? WHERE output = ?", (size, place))
        self._connection.execute("DELETE FROM answers WHERE size = -1 AND output = ?", (place,))

    def _new_temporary(self) -> Path:
        return self._temporary / os.urandom(8).hex()

    def _finished(self, status: str | None = None) -> Iterator[tuple[bytes, str]]:
        """Names and lines of documents that are not pending; the lines of a large folder need not fit into memory."""
        with self._reported():
            yield from self._connection.execute(
                "SELECT name, coalesce(failure, result) AS line FROM documents LEFT JOIN answers USING (name, output) "
                "WHERE line IS NOT NULL AND status != 'pending' AND status = coalesce(?, status) ORDER BY finished",
                (status,),
            )

    def _rewrite(self) -> None:
        """Rewrites results.jsonl from the journal, replacing whatever a dead process left."""
        path = self.out / RESULTS
        temporary = self._new_temporary()
        try:
            if path.is_file() and not path.is_symlink() and self._is_written(path):
                return
            with temporary.open("wb") as file:
                file.writelines(_raw(line) for _, line in self._finished())
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError as error:
            raise _refused(path, error) from error

    def _is_written(self, path: Path) -> bool:
        """True if a file has the journal's lines and nothing else."""
        with path.open("rb") as file:
            return all(
                file.read(len(raw)) == raw for raw in (_raw(line) for _, line in self._finished())
            ) and not file.read(1)

    def _append(self, line: str) -> None:
        """Appends a whole line; removes the part that a full disk accepted."""
        path = self.out / RESULTS
        raw = _raw(line)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                before = os.fstat(descriptor).st_size
                if os.write(descriptor, raw) != len(raw):
                    os.ftruncate(descriptor, before)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _refused(path, error) from error

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            # After a full disk SQLite may have rolled back already.
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            raise

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise FileError(
                f"journal {self.state / JOURNAL} cannot be used: {error}",
                "free some space or correct its permissions, and run the command again: it resumes",
            ) from error


def foreign(out: Path, outputs: Mapping[str, str], sizes: Mapping[str, int | None]) -> list[str]:
    """The names whose output (name to output) exists and is no file of the journal; its files have these sizes, by output."""
    return [
        name
        for name, output in outputs.items()
        if (found := _size(out / output)) is not None and _own_size(out, output, sizes) != found
    ]


def check_place(out: Path, output: str) -> None:
    """Refuses a path below the folder where no answer can be written, before anything is decoded or created there."""
    target = out / output
    if not files.is_below(target.parent, os.path.realpath(out)):
        raise FileError(f"{target.parent} leads out of {out}, to {os.path.realpath(target.parent)}", "remove the link")
    # The other folders are created.
    folder = next(folder for folder in target.parents if os.path.lexists(folder))
    if not folder.is_dir():
        problem, hint = f"{folder} is no directory", "move it away"
    elif not os.access(folder, os.W_OK | os.X_OK):
        problem, hint = f"no permission to write to {folder}", "correct the permissions of that folder"
    elif not target.is_symlink() and target.is_dir():
        problem, hint = "it is a directory", "move it away"
    else:
        return
    raise FileError(f"answer {target} cannot be written: {problem}", hint)


def check_results(out: Path, contents: Contents) -> None:
    """Refuses a results.jsonl of which the journal knows nothing, because the first run would replace it."""
    # A run that a kill ends before its first row leaves an empty one.
    if not contents.rows and _size(out / RESULTS):
        raise not_own(out, RESULTS)


def not_own(out: Path, output: str) -> FileError:
    """The error for a file that is not the journal's."""
    return FileError(
        f"{shown(str(out / output))} exists and is not as this batch wrote it",
        "move it away, or replace it with --no-resume",
    )


def _own_size(out: Path, output: str, sizes: Mapping[str, int | None]) -> int:
    """Bytes of the journal's file at a path; -1 if there is none. An answer that a kill left without a row counts."""
    found = _size(out / output)
    return -1 if found is None or output not in sizes or sizes[output] not in {None, found} else found


def _size(path: Path) -> int | None:
    try:
        return path.lstat().st_size
    except OSError:
        return None


def peek(out: Path) -> tuple[Contents, dict[str, dict[str, dict[str, float]]]]:
    """Contents and rates (by fingerprint of the speed, and device) of a folder's journal. Neither locks the folder nor writes
    to it.
    """
    path = out / STATE / JOURNAL
    if not path.is_file():
        return Contents({}, {}), {}
    rates: dict[str, dict[str, dict[str, float]]] = {}
    # A closed journal is one file, which can be read in a read-only folder.
    how = "mode=ro" if path.with_name(f"{path.name}-wal").exists() else "immutable=1"
    try:
        with contextlib.closing(sqlite3.connect(f"file:{quote(os.fsencode(path))}?{how}", uri=True)) as connection:
            _check_version(connection, path)
            for device, speed, name, value in connection.execute("SELECT device, speed, name, value FROM rates"):
                rates.setdefault(speed, {}).setdefault(device, {})[name] = value
            return _contents(connection), rates
    except sqlite3.Error as error:
        raise FileError(
            f"journal {path} cannot be used: {error}", "a damaged journal is replaced by --no-resume"
        ) from error


def _contents(connection: sqlite3.Connection) -> Contents:
    rows = connection.execute("SELECT name, output, status, failure IS NOT NULL, sha256, fingerprint FROM documents")
    answers = connection.execute(
        "SELECT output, name, sha256, fingerprint, path, size, result IS NOT NULL FROM answers"
    )
    return Contents(
        {
            os.fsdecode(name): Row(os.fsdecode(output), status, bool(failed), *basis)
            for name, output, status, failed, *basis in rows
        },
        {
            os.fsdecode(output): Answer(
                name=os.fsdecode(name),
                sha256=sha256,
                fingerprint=fingerprint,
                path=None if path is None else os.fsdecode(path),
                size=size,
                known=bool(known),
            )
            for output, name, sha256, fingerprint, path, size, known in answers
        },
    )


def _connect(path: Path) -> sqlite3.Connection:
    # Transactions begin explicitly; one thread at a time uses the connection.
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        # A power failure must not undo what results.jsonl has shown.
        connection.execute("PRAGMA synchronous = FULL")
        _check_version(connection, path)
        (damage,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if damage != "ok":
            raise sqlite3.DatabaseError(damage)
        connection.executescript(_TABLES)
        connection.execute(f"PRAGMA user_version = {_VERSION}")
    except BaseException:
        connection.close()
        raise
    return connection


def _digest(part: str) -> bytes:
    return hashlib.sha256(part.encode()).digest()


def _raw(line: str) -> bytes:
    return (line + "\n").encode()


def _check_version(connection: sqlite3.Connection, path: Path) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version not in (0, _VERSION):
        raise FileError(
            f"journal {path} is of version {version}, this program supports {_VERSION}",
            "use the version of quantspec that wrote it, or name another output folder",
        )


def _sync_folder(folder: Path) -> None:
    """Makes a rename survive a power failure, if the file system supports it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refused(path: Path, error: OSError) -> QuantspecError:
    return FileError(
        f"{path} cannot be written: {reason(error)}",
        "free some space, or move away what is there, and run the command again: it resumes",
    )
