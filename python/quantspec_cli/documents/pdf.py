"""PDF, by pypdf: the text layer in page order, with blank lines where lines are farther apart than usual.

pypdf logs what it cannot read. These messages and those about form fields become warnings of the document, so nothing
is missing silently.
"""

from __future__ import annotations

import io
import logging
import re
import statistics
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .blocks import shifted, unread
from .form import Form

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pypdf import PageObject, PdfReader

_INSTALL = "pip install 'quantspec[documents]'"
_AGAIN = "download it again, or print it to a new PDF"
# Remains of fonts without glyph names. Line breaks and tabs are text.
_CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f]")
_INK = re.compile(r"\S")
# Names of glyphs that are numbers alone. pypdf shows them as text.
_NUMBERED = re.compile(r"/(?!u(?:ni)?[0-9A-F]{4,6}\Z)(?:\.notdef|[A-Za-z_.]*[0-9]+)")
_WORDLESS = re.compile("[\\s\N{REPLACEMENT CHARACTER}\ue000-\uf8ff]*")
_RIGHT_TO_LEFT = re.compile("[\u0590-\u065f\u066a-\u06ef\u06fa-\u08ff\ufb1d-\ufdff\ufe70-\ufefe]")
_LEFT_TO_RIGHT = re.compile("[A-Za-z0-9\u0660-\u0669\u06f0-\u06f9]")
# Factor over the page's usual line distance from which a gap separates paragraphs.
_GAP = 1.3
# Factors over the size of the text before a superscript: its own size is at most the first, and it is raised by more than the
# second and less than the third.
_SMALLER, _RAISED, _ABOVE = 0.85, 0.2, 0.7
# A page with a page-sized picture and fewer words than this is probably a scan with a stamp.
_SCAN_WORDS = 25
# Messages of pypdf shown in full; the others are counted.
_MESSAGES_MAX = 3


def read(name: str, raw: bytes) -> tuple[str, tuple[str, ...]]:
    """The text of a document, and warnings about pages whose text is missing or doubtful."""
    try:
        import pypdf
        from pypdf.errors import DependencyError, PyPdfError
    except ImportError as error:
        raise InputError(f"{name} is a PDF, which needs the package pypdf ({error})", _INSTALL) from error
    log = _Log()
    logger = logging.getLogger("pypdf")
    logger.addHandler(log)
    try:
        return _read(name, pypdf.PdfReader(io.BytesIO(raw)), log)
    except DependencyError as error:
        raise InputError(f"{name} is an encrypted PDF, which needs the package cryptography", _INSTALL) from error
    except NotImplementedError as error:  # protected by other means than a password
        raise InputError(f"{name} is a PDF that pypdf cannot open: {error}", "print it to a new PDF") from error
    except PyPdfError as error:
        raise InputError(
            f"{name} is a damaged PDF: {str(error)[:200] or type(error).__name__}",
            _AGAIN,
        ) from error
    finally:
        logger.removeHandler(log)


@dataclass(frozen=True)
class _Piece:
    """A text as the page draws it.

    Attributes:
        text: not empty.
        font: of a resource of the page.
        height: of its line.
        base: its own height, which a superscript may have above its line.
        size: of its font.
    """

    text: str
    font: Any
    height: float
    base: float
    size: float

    def is_below(self, other: _Piece) -> bool:
        """True if the other piece may be a superscript to this one."""
        raised = other.base - self.base
        return other.size <= _SMALLER * self.size and _RAISED * self.size < raised < _ABOVE * self.size


@dataclass(frozen=True)
class _Page:
    """Result of a page: its text, "" if it has none, or why it cannot be read."""

    number: int
    text: str = ""
    failure: str = ""
    doubtful: bool = False
    scanned: bool = False


def _read(name: str, reader: PdfReader, log: _Log) -> tuple[str, tuple[str, ...]]:
    if reader.is_encrypted and not reader.decrypt(""):
        raise InputError(
            f"{name} is an encrypted PDF: it opens with a password only",
            "save a copy without its password: qpdf --decrypt --password=PASSWORD FILE COPY",
        )
    if reader.root_object.get("/NeedsRendering"):
        raise InputError(
            f"{name} is a dynamic XFA form, which has no text outside of Adobe's reader", "print it to a new PDF"
        )
    form = Form(log.messages.append)
    pages = [_page(number, page, form, log) for number, page in enumerate(reader.pages, 1)]
    texts = [page.text for page in pages if page.text]
    if not texts:
        raise _without_text(name, pages)
    tree: Any = reader.root_object["/Pages"]
    declared = tree.get("/Count")
    missing = declared - len(pages) if isinstance(declared, int) else 0
    lost = [f"{missing} of {declared} pages are missing"] if missing > 0 else []
    attached = 0
    with suppress(Exception):  # a damaged list of files is no error of the text
        attached = len(reader.attachments)
    return "\n\n".join(texts), (*lost, *_warnings(pages, log), *unread(attached, "attached file"))


def _page(number: int, page: PageObject, form: Form, log: _Log) -> _Page:
    from pypdf.errors import DependencyError

    before = len(log.messages)
    try:
        text = _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", _text(page, form))
    except DependencyError:
        raise
    except Exception as error:  # pypdf fails on damaged pages in many ways
        return _Page(number, failure=f"{type(error).__name__}: {str(error)[:200]}")
    if _WORDLESS.fullmatch(text):
        text = ""
    scanned = 0 < len(text.split()) < _SCAN_WORDS and _has_scan(page)
    return _Page(number, text, doubtful=len(log.messages) > before, scanned=scanned)


def _without_text(name: str, pages: Sequence[_Page]) -> InputError:
    count = len(pages)
    if not pages:
        return InputError(f"{name} is a damaged PDF: it has no pages", _AGAIN)
    for page in pages:
        if page.failure:
            return InputError(
                f"{name} is a damaged PDF: page {page.number} of {count} cannot be read: {page.failure}", _AGAIN
            )
    where = "only page" if count == 1 else f"{count} pages"
    return InputError(f"{name} has no text layer on its {where}", "run OCR first, for example: ocrmypdf FILE COPY")


def _warnings(pages: Sequence[_Page], log: _Log) -> Iterator[str]:
    count = len(pages)
    for page in pages:
        if page.failure:
            yield f"page {page.number} of {count} cannot be read: {page.failure}"
    if empty := [page.number for page in pages if not page.text and not page.failure]:
        yield f"{_ranges(empty)} of {count} {'has' if len(empty) == 1 else 'have'} no text"
    if scanned := [page.number for page in pages if page.scanned]:
        yield f"{_ranges(scanned)} of {count}: a picture of the whole page and fewer than {_SCAN_WORDS} words"
    if unnamed := [page.number for page in pages if "\N{REPLACEMENT CHARACTER}" in page.text]:
        yield f"{_ranges(unnamed)} of {count}: characters that the fonts do not name are U+FFFD"
    if mixed := [page.number for page in pages if any(map(_is_mixed, page.text.split("\n")))]:
        yield f"{_ranges(mixed)} of {count}: right-to-left lines with numbers or Latin words may be out of order"
    if doubtful := [page.number for page in pages if page.doubtful]:
        yield f"{_ranges(doubtful)} of {count} may be incomplete: {log.summary()}"


def _is_mixed(line: str) -> bool:
    """True for right-to-left text with parts that are written from left to right, which pypdf may misplace."""
    return bool(_RIGHT_TO_LEFT.search(line) and _LEFT_TO_RIGHT.search(line))


def _text(page: PageObject, form: Form) -> str:
    """The text of a page, followed by its filled-in form fields."""
    pieces: list[_Piece] = []
    rise = shown = 0.0

    def operate(operator: bytes, operands: list[Any], *_: object) -> None:
        nonlocal rise, shown
        if operator == b"Ts" and operands and isinstance(operands[0], (int, float)):
            rise = float(operands[0])
        elif operator in {b"Tj", b"TJ", b"'", b'"'}:
            shown = rise

    def visit(text: str, matrix: list[float], at: list[float], font: Any, size: float) -> None:
        if text:
            scale = at[2] * matrix[1] + at[3] * matrix[3]
            height = at[4] * matrix[1] + at[5] * matrix[3] + matrix[5]
            pieces.append(_Piece(text, font, height, height + scale * shown, abs(scale * size)))

    whole = page.extract_text(visitor_operand_before=operate, visitor_text=visit)
    # The pieces give fonts and positions; if they do not contain the whole text, the text is used as it is.
    if "".join(piece.text for piece in pieces).split() == whole.split():
        whole = _paragraphs(
            _with_superscripts([replace(piece, text=_named(piece.text, piece.font)) for piece in pieces])
        )
    return "\n".join(filter(None, [whole.strip(), *form.texts(page)]))


def _with_superscripts(pieces: Iterable[_Piece]) -> Iterator[tuple[str, float]]:
    """Texts and heights, with raised numbers as superscripts directly after other text: ten to the sixth is not 106."""
    before: _Piece | None = None
    end = " "
    # No space separates the raised pieces so far from the text before them.
    joined = True
    for piece in pieces:
        text = piece.text
        if before is not None and before.is_below(piece):
            # pypdf begins a piece with the space that separates it from the piece before it.
            joined &= not (end.isspace() or text[0].isspace())
            text = shifted(text, up=True) if joined else text
        elif text.strip():
            before, joined = piece, True
        end = text[-1]
        yield text, piece.height


def _named(text: str, font: Any) -> str:
    """The text of a piece, with U+FFFD for the characters that its font does not name."""
    with suppress(Exception):  # of a damaged font the text is taken as it is
        encoding = font.get("/Encoding").get_object()
        if encoding in ("/Identity-H", "/Identity-V") and "/ToUnicode" not in font and not _has_character_codes(font):
            return _INK.sub("\N{REPLACEMENT CHARACTER}", text)
        if "/" in text and "/Differences" in encoding:
            names = sorted(filter(_NUMBERED.fullmatch, map(str, encoding["/Differences"])), key=len, reverse=True)
            return re.sub("|".join(map(re.escape, names)), "\N{REPLACEMENT CHARACTER}", text) if names else text
    return text


def _has_character_codes(font: Any) -> bool:
    """True if the codes of a font without a table of characters may be characters, not numbers of its glyphs."""
    glyphs = font["/DescendantFonts"][0].get_object()
    return bool(
        glyphs["/CIDSystemInfo"]["/Ordering"] == "UCS" or glyphs.get("/CIDToGIDMap", "/Identity") != "/Identity"
    )


def _has_scan(page: PageObject) -> bool:
    """True if the page shows a picture with at least one pixel per point (1/72 inch) of the page."""
    with suppress(Exception):  # damaged pictures are no error on a page with text
        resources: Any = page["/Resources"]
        for reference in resources["/XObject"].values():
            picture: Any = reference.get_object()
            if picture.get("/Subtype") == "/Image":
                box = page.mediabox
                sides = sorted((picture["/Width"], picture["/Height"]))
                if all(side >= length for side, length in zip(sides, sorted((box.width, box.height)), strict=True)):
                    return True
    return False


def _paragraphs(pieces: Iterable[tuple[str, float]]) -> str:
    """Lines, with blank lines between paragraphs; each piece has its height on the page."""
    lines: list[str] = [""]
    heights: list[float | None] = [None]
    for text, height in pieces:
        first, *rest = text.split("\n")
        for index, part in enumerate([first, *rest]):
            if index:
                lines.append("")
                heights.append(None)
            lines[-1] += part
            if part.strip() and heights[-1] is None:
                heights[-1] = height
    kept = [(line.rstrip(), height) for line, height in zip(lines, heights, strict=True) if height is not None]
    gaps = [above - below for (_, above), (_, below) in pairwise(kept)]
    usual = statistics.median_low([gap for gap in gaps if gap > 0.5] or [0.0])
    breaks = ["\n\n" if usual and gap > _GAP * usual else "\n" for gap in gaps]
    return "".join(line + end for (line, _), end in zip(kept, [*breaks, ""], strict=False))


def _ranges(numbers: list[int]) -> str:
    """Page ranges for people: "page 3", "pages 3-4, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"page{'s' if len(numbers) > 1 else ''} {shown}"


class _Log(logging.Handler):
    """Collects pypdf's messages of this thread, and others about text. Installing it keeps Python from printing them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self._thread:
            self.messages.append(record.getMessage())

    def summary(self) -> str:
        """The first messages, each once."""
        distinct = list(dict.fromkeys(self.messages))
        more = len(distinct) - _MESSAGES_MAX
        return "; ".join(distinct[:_MESSAGES_MAX]) + (f"; and {more} more" if more > 0 else "")
