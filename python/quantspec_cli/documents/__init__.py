"""Text of PDF, DOCX, HTML and EPUB documents, complete or refused with the reason.

The kind is determined by content first and by the name's suffix second. Only PDF needs a library (pypdf, extra
`documents`). DOCX, EPUB and HTML are read with the standard library, because the text must be complete. python-docx omits
tracked insertions, content controls, text boxes, notes and clause numbers; extractors of "main text" omit what they
classify as boilerplate.

A reader is imported when a document of its kind is read.
"""

from __future__ import annotations

import re
import unicodedata
from pathlib import PurePath
from typing import TYPE_CHECKING

from ..errors import InputError, QuantspecError, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_HTML = {".html", ".htm", ".xhtml", ".xht"}
_BOM = b"\xef\xbb\xbf"

# First bytes of files without usable text, as patterns that no words match: what they are, and what to do.
_CONVERT = "convert it to PDF, DOCX or plain text"
_OCR = "run OCR and give its text or PDF"
_REFUSED: tuple[tuple[bytes, str, str], ...] = (
    (rb"\{\\rtf[0-9\\]", "an RTF document", "save it as DOCX or plain text"),
    (rb"\x89PNG\r\n\x1a\n", "a binary file, a PNG image", _OCR),
    (rb"\xff\xd8\xff", "a binary file, a JPEG image", _OCR),
    # After the size and two bytes more, a ratio that is 0 in almost every file.
    (rb"GIF8[79]a.{6}\0", "a binary file, a GIF image", _OCR),
    (rb"II\*\0|MM\0\*", "a binary file, a TIFF image", _OCR),
    (rb"\0\0\0\x0cjP  ", "a binary file, a JPEG 2000 image", _OCR),
    (rb"RIFF.{4}WEBPVP8", "a binary file, a WebP image", _OCR),
    (rb"AT&TFORM.{4}DJV", "a binary file, a DjVu document", _CONVERT),
    (rb"\x1f\x8b\x08", "a binary file, gzip data", "unpack it"),
    (rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", "a binary file, bzip2 data", "unpack it"),
    (rb"\xfd7zXZ\0", "a binary file, xz data", "unpack it"),
    (rb"\x28\xb5\x2f\xfd", "a binary file, Zstandard data", "unpack it"),
    (rb"7z\xbc\xaf\x27\x1c", "a binary file, a 7z archive", "unpack it"),
    (rb"Rar!\x1a\x07", "a binary file, a RAR archive", "unpack it"),
)

# Presentation forms that fonts use and models do not: ligatures (Latin, Armenian, Hebrew, Arabic), and the shapes of Arabic
# letters within a word.
_FORMS = {
    code: unicodedata.normalize("NFKC", chr(code))
    for code in range(0xFB00, 0xFF00)
    if re.search("LIGATURE|ARABIC LETTER", unicodedata.name(chr(code), ""))
}
# A soft hyphen is drawn in a PDF. Elsewhere it is a place where a line may end, in some books within every long word.
_SOFT_HYPHEN: dict[bool, dict[int, str | None]] = {True: {0xAD: "-"}, False: {0xAD: None}}
_SURROGATES = re.compile("[\ud800-\udfff]")


def kind(name: str, raw: bytes | bytearray) -> str | None:
    """The reader that a document needs ("pdf", "zip", "ole" or "html"), by its first bytes; None for plain text."""
    head = bytes(raw[:1024])
    suffix = PurePath(name).suffix.lower()
    start = head.removeprefix(_BOM).lstrip()
    if start.startswith(b"%PDF-") or (suffix == ".pdf" and b"%PDF-" in head):
        return "pdf"
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return "zip"
    if head.startswith(_OLE):
        return "ole"
    return "html" if suffix in _HTML else None


def refuse(name: str, raw: bytes) -> None:
    """Refuses bytes that are known not to be plain text."""
    for start, what, hint in _REFUSED:
        if re.match(start, raw, re.DOTALL):
            raise InputError(f"{name} is {what}", hint)


def extract(which: str, name: str, raw: bytes, limit: int) -> tuple[str, tuple[str, ...]]:
    """The text of a document of kind `which`, never empty, and warnings about missing parts.

    `limit` bounds the unpacked bytes of an archive. Any failure is an `InputError`.
    """
    try:
        text, warnings = _read(which, name, raw, limit)
    except QuantspecError:
        raise
    except Exception as error:  # readers fail on damaged files in many ways, including RecursionError and MemoryError
        raise InputError(
            f"{name} is damaged: {_short_message(error)}", "open it in its program and save it again"
        ) from error
    text = _SURROGATES.sub(lambda _: "\N{REPLACEMENT CHARACTER}", _pairs(text)).translate(_FORMS)
    text = text.translate(_SOFT_HYPHEN[which == "pdf"]).strip("\n")
    if not text or text.isspace():
        raise InputError(
            f"{name} has no text", "give a document with text; if it holds pictures of pages, run OCR first"
        )
    return text, tuple(one_line(warning) for warning in warnings)


def _read(which: str, name: str, raw: bytes, limit: int) -> tuple[str, Sequence[str]]:
    if which == "pdf":
        from . import pdf

        return pdf.read(name, raw)
    if which == "html":
        from . import html

        return html.text_of(html.decode(name, raw)), ()
    if which == "ole":
        _refuse_ole(name, raw)
    from .archive import Archive

    archive = Archive(name, raw, limit)
    if archive.is_docx():
        from . import docx

        return docx.read(archive)
    if archive.is_epub():
        from . import epub

        return epub.read(archive)
    what = archive.describe()
    raise InputError(f"{name} is {what}", "unpack it" if what == "a zip archive" else _CONVERT)


def _refuse_ole(name: str, raw: bytes) -> None:
    if "EncryptedPackage".encode("utf-16-le") in raw:
        raise InputError(
            f"{name} is an encrypted Office document: it opens with a password only", "save a copy without its password"
        )
    raise InputError(
        f"{name} is an Office document of before 2007 (.doc, .xls, .ppt) or an Outlook message (.msg)",
        "save it as DOCX or PDF",
    )


def _short_message(error: Exception) -> str:
    """A short description of a reader's exception."""
    text = one_line(str(error))[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _pairs(text: str) -> str:
    """Joins the two halves of surrogate pairs."""
    if _SURROGATES.search(text) is None:
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
