"""Prompts: documents, standard input or literal text, read completely or refused with the position of the problem."""

from __future__ import annotations

import select
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from . import documents, files
from .errors import DoesNotFitError, InputError, QuantspecError, UsageError, reason
from .options import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import BinaryIO

STDIN = "-"

# More than any supported context holds; bounds the memory for an endless stream.
BYTES_MAX = 1 << 30

# Byte order marks. UTF-32's is tested before UTF-16's, with which it begins.
_MARKS = {
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
# CP1252 has all characters of LATIN1, and the quotation marks and the euro sign of Windows.
_CONVERT = "convert it to UTF-8, for example: iconv -f CP1252 -t UTF-8 FILE"


@dataclass(frozen=True)
class Document:
    """Text to decode from.

    Attributes:
        name: the user's name for it: a path, "stdin" or "text".
        text: its content; plain text and Markdown are unchanged except for a byte order mark.
        warnings: missing or doubtful parts of its text, one line each.
        error: why it cannot be answered, if others can.
    """

    name: str
    text: str
    warnings: tuple[str, ...] = ()
    error: QuantspecError | None = None


def read_all(paths: Sequence[str], texts: Sequence[str]) -> list[Document]:
    """The documents of a command line: files first, then literal texts. Raises the first error if none can be read."""
    if not paths and not texts:
        raise UsageError("no prompt", "name a document, - for standard input, or give --text")
    if list(paths).count(STDIN) > 1:
        raise UsageError("standard input is given twice", "give '--prompt -' once")

    def literal(name: str, text: str) -> Document:
        check_utf8(name, text)
        return with_content(name, text, "give some text after --text")

    hint = "check the path; literal text is given with --text"
    tasks: list[tuple[Document, Callable[[], Document]]] = [
        (Document("stdin" if path == STDIN else path, ""), partial(read, path, hint)) for path in paths
    ]
    for index, text in enumerate(texts):
        name = "text" if len(texts) == 1 else f"text {index + 1}"
        tasks.append((Document(name, ""), partial(literal, name, text)))
    return attempted(tasks)


def attempted(tasks: Iterable[tuple[Document, Callable[[], Document]]]) -> list[Document]:
    """The result of each task, or its document with the error. If all have one, the first is raised, as is a usage error,
    which is not of one document.
    """
    found = []
    for document, task in tasks:
        try:
            found.append(document if document.error is not None else task())
        except UsageError:
            raise
        except QuantspecError as error:
            found.append(replace(document, error=error))
    errors = [document.error for document in found if document.error is not None]
    if len(errors) == len(found):
        raise errors[0]
    return found


def read(path: str, absent: str = "check the path") -> Document:
    """Reads one file, or standard input for "-"; `absent` is the hint if the file does not exist."""
    if path == STDIN:
        if sys.stdin is None:  # closed by the parent process
            raise InputError("standard input is closed", "pipe a document into the command, or name a file")
        try:
            raw = read_whole("stdin", sys.stdin.buffer, text_only=True)
        except OSError as error:
            raise InputError(
                f"standard input cannot be read: {reason(error)}", "pipe a document into the command, or name a file"
            ) from error
        return from_bytes("stdin", raw)
    if not path:
        raise UsageError("the name of a prompt is empty", "name a file, or - for standard input")
    try:
        with Path(path).open("rb") as file:
            raw = read_whole(path, file, text_only=True)
    except FileNotFoundError as error:
        if (target := files.target(path)) is not None:
            raise InputError(
                f"prompt file {path} is a link to {target}, which does not exist",
                "restore that file, or name the document itself",
            ) from error
        raise InputError(f"prompt file {path} does not exist", absent) from error
    except IsADirectoryError as error:
        raise InputError(
            f"prompt file {path} is a directory", "name a file; quantspec batch answers the documents of a directory"
        ) from error
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        raise InputError(f"prompt file {path} cannot be read: {why}", "check the path and its permissions") from error
    return from_bytes(path, raw)


def read_whole(name: str, file: BinaryIO, *, text_only: bool = False) -> bytes:
    """All bytes of a file, up to the largest possible prompt, because a stream may be endless. With `text_only`, of a binary
    file only the beginning, which `from_bytes` refuses.
    """
    raw = bytearray()
    read: Callable[[int], bytes | None] = file.read
    while (chunk := read(1 << 20)) != b"":
        if chunk is None:  # a non-blocking stream without data yet
            select.select([file], [], [])
            continue
        raw += chunk
        if len(raw) > BYTES_MAX:
            if documents.kind(name, raw) is None:
                _refuse_binary(name, bytes(raw))
            raise DoesNotFitError(
                f"{name} has more than {BYTES_MAX} bytes, more than any context holds", "split the document"
            )
        if text_only and b"\0" in chunk and documents.kind(name, raw) is None:
            break
    return bytes(raw)


def from_bytes(name: str, raw: bytes) -> Document:
    """The text of a document by its kind. Other kinds than `documents` are UTF-8 text; nothing is replaced or truncated."""
    which = documents.kind(name, raw)
    if which is not None:
        return Document(name, *documents.extract(which, name, raw, BYTES_MAX))
    _refuse_binary(name, raw)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # Python's position excludes the byte order mark.
        at = error.start + (len(raw) - len(error.object))
        line = raw.count(b"\n", 0, at) + 1
        raise InputError(f"{name} is not UTF-8: byte 0x{raw[at]:02x} at offset {at}, line {line}", _CONVERT) from error
    return with_content(name, text)


def _refuse_binary(name: str, raw: bytes) -> None:
    """Refuses bytes that are no text in one-byte units."""
    documents.refuse(name, raw)
    for mark, encoding in _MARKS.items():
        if raw.startswith(mark):
            raise InputError(f"{name} is {encoding}, not UTF-8", f"convert it: iconv -f {encoding} -t UTF-8 FILE")
    zero = raw.find(b"\0")
    if zero >= 0:
        raise InputError(
            f"{name} is a binary file (zero byte at offset {zero})",
            "give a PDF, DOCX, EPUB or HTML document, or plain text in UTF-8",
        )


def check_utf8(name: str, text: str, hint: str | None = None, *, escaped: bool = False) -> None:
    """Refuses text with lone surrogates. Some stand for invalid UTF-8 bytes of a command line, unless text is `escaped`; the
    others are of escapes.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        is_byte = 0xDC80 <= code <= 0xDCFF and not escaped
        usual = _CONVERT if is_byte else f"correct \\u{code:04x}, half of a surrogate pair"
        raise InputError(f"{name} is not UTF-8: character {error.start} is half of a pair", hint or usual) from error


def check_text(name: str, text: object, hint: str = "give a text") -> None:
    """Refuses what is no text, or has lone surrogates; `hint` is for the first."""
    if not isinstance(text, str):
        raise UsageError(f"{name} is {shown(text):.60}", hint)
    check_utf8(name, text)


def check_arguments(instruction: str | None, system_prompt: str | None, stop: Iterable[str]) -> None:
    """Refuses texts of a command line that are not UTF-8, and an empty instruction."""
    texts = [("the instruction", instruction), ("the system prompt", system_prompt)]
    for name, text in [*texts, *(("a stop string", text) for text in stop)]:
        check_utf8(name, text or "")
    check_instruction(instruction)


def check_instruction(text: str | None) -> None:
    """Refuses an empty instruction. (An empty system prompt replaces the one that a template has by default.)"""
    if text is not None and not text.strip():
        raise UsageError("the instruction is empty", "give some text, or leave it out", option="instruction")


def with_content(name: str, text: str, hint: str = "give a document with some text") -> Document:
    """The document of a text, which is taken as it is; refuses one without content."""
    if not text:
        raise InputError(f"{name} is empty", hint)
    if text.isspace():
        raise InputError(f"{name} holds nothing but white space", hint)
    return Document(name, text)
