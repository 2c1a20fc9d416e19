"""HTML: every word of the page in order, for well-formed and malformed pages.

The standard library's parser builds no tree, so nesting may have any depth, and no text is dropped as boilerplate.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass
from html import unescape
from html.parser import HTMLParser
from typing import TYPE_CHECKING

from ..errors import InputError
from .blocks import Blocks, shifted, without_blank_runs
from .formula import Formula
from .numbering import roman

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_BLOCKS = (
    "address article aside blockquote body caption center dd details dialog dir div dl dt fieldset figcaption "
    "figure footer form frameset h1 h2 h3 h4 h5 h6 head header hgroup hr html legend li listing main menu nav "
    "noscript ol optgroup option p pre search section select summary table tbody td textarea tfoot th thead title "
    "tr ul xmp"
)
_BREAKING = frozenset(_BLOCKS.split())
_PREFORMATTED = frozenset({"pre", "textarea", "listing", "xmp"})
_SHIFTED = frozenset({"sup", "sub"})
_LISTS = frozenset({"ul", "ol", "menu", "dir"})
# Not part of the page. A title is shown in the window frame; an unclosed element ends with the head.
_UNSEEN = frozenset({"script", "style", "template", "title"})
# Tags that end an unseen element which is not closed.
_ENDS = {"title": frozenset({"head", "body"}), "span": _BREAKING}
_SPACE = re.compile(r"[ \t\r\n\f]+")

_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_DECLARED = re.compile(rb"""<(?:meta|\?xml)\b[^>]*?\b(?:charset|encoding)\s*=\s*["']?\s*([A-Za-z0-9_.:-]+)""", re.I)
# Python's nearest encodings to those that browsers use for these labels, or for these encodings of Python.
_WINDOWS = {
    **dict.fromkeys(("iso8859-1", "ascii"), "cp1252"),
    "iso8859-9": "cp1254",
    **dict.fromkeys(("gb2312", "gbk"), "gb18030"),
    **dict.fromkeys(("shift_jis", "x-sjis", "windows-31j"), "cp932"),
    **dict.fromkeys(("euc_kr", "windows-949"), "cp949"),
    **dict.fromkeys(("big5", "cn-big5", "x-x-big5"), "big5hkscs"),
    **dict.fromkeys(("tis-620", "iso8859-11", "windows-874"), "cp874"),
    "iso-8859-8-i": "iso8859-8",
}
# The Big5 of browsers has the characters of both: those of Hong Kong, and the euro sign of Windows.
_SECOND = {"big5hkscs": "cp950"}
_FAMILIES = ("utf-8", "iso8859", "iso2022", "cp", "koi8", "gb", "big5", "euc", "shift_jis", "mac", "ascii", "tis")


def decode(name: str, raw: bytes) -> str:
    """The decoded page: by its byte order mark, its declaration, or UTF-8. Invalid bytes are not replaced."""
    encoding = next((encoding for mark, encoding in _MARKS if raw.startswith(mark)), None)
    label = "" if encoding else _declared(raw)
    encodings = ["utf-8-sig" if encoding == "utf-8" else encoding] if encoding else [*_known(label), "utf-8"]
    failure: UnicodeDecodeError | None = None
    for candidate in encodings:
        try:
            text = raw.decode(candidate)
        except UnicodeDecodeError as error:
            failure = failure or error
        else:
            zero = text.find("\0")
            if zero >= 0:
                raise InputError(f"{name} is a binary file (zero character at offset {zero})", "give an HTML page")
            return text
    assert failure is not None
    at = failure.start
    raise InputError(
        f"{name} is not {failure.encoding}: byte 0x{failure.object[at]:02x} at offset {at}", _hint(encoding, label)
    ) from failure


def _hint(mark: str | None, label: str) -> str:
    """What to do with a page that is not in the encoding of its mark or its label."""
    if mark:
        return f"its byte order mark is that of {mark}; copy or download it again"
    known = _known(label)
    if not label or known == ["utf-8"]:
        return "convert it to UTF-8, for example: iconv -f CP1252 -t UTF-8 FILE"
    problem = f"it declares {label}, which {'it is not' if known else 'is no known encoding'}"
    return f"{problem}: convert it from its true encoding to UTF-8"


def _declared(raw: bytes) -> str:
    """The encoding that a page declares; "" if there is none."""
    found = _DECLARED.search(raw[:4096])
    return found[1].decode("ascii") if found else ""


def _known(label: str) -> list[str]:
    """Python's names of a text encoding, if it has any, in the order in which to try them."""
    try:
        encoding = codecs.lookup(_WINDOWS.get(label.lower(), label)).name
    except LookupError:
        return []
    if not encoding.startswith(_FAMILIES):
        return []
    encoding = _WINDOWS.get(encoding, encoding)
    return [encoding, *filter(None, [_SECOND.get(encoding)])]


def text_of(page: str) -> str:
    """The text of a page: paragraphs, headings with #, list items with - or a number, rows of tables with |."""
    return _Reader(page).text()


class _Reader(HTMLParser):
    """Reads a page. The parser scans the rest of the page for the end of each tag, comment or section. Where no end follows,
    this scan is left out: a page of many openings would take quadratic time.
    """

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self._page = page
        self._last_comment = page.rfind("-->")
        self._last_section = page.rfind("]]>")
        self._blocks = Blocks()
        self._pieces: list[str] = []
        self._prefix = ""
        self._heading = 0
        self._lists: list[_List] = []
        # The element that is not shown, and how many of its name are open.
        self._unseen = ""
        self._unseen_depth = 0
        self._preformatted = 0
        # Where the innermost superscript or subscript begins in the paragraph.
        self._shifted: int | None = None
        self._formula: Formula | None = None
        # KaTeX draws a formula with spans after its MathML.
        self._has_mathml = False

    def text(self) -> str:
        """What a page shows."""
        end = self._page.rfind(">") + 1
        self.feed(self._page[:end])
        self.close()
        self.handle_data(unescape(self._page[end:]))
        self._flush()
        return self._blocks.text()

    def handle_data(self, data: str) -> None:
        if self._formula is not None:
            self._formula.data("" if self._unseen else _SPACE.sub(" ", data).strip(" "))
        elif not self._unseen:
            self._pieces.append(data.replace("\r\n", "\n") if self._preformatted else _SPACE.sub(" ", data))

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        if self._is_unseen(tag, opened=True):
            return
        if tag in _BREAKING:
            self._flush()
        if tag in _UNSEEN:
            self._unseen, self._unseen_depth = tag, 1
        elif self._formula is not None:
            self._formula.start(tag, {name: value or "" for name, value in attrs})
        elif tag in _SHIFTED:
            self._shifted = len(self._pieces)
        elif tag == "span":
            self._span((dict(attrs).get("class") or "").split())
        elif tag in {"br", "img"}:
            self._pieces.append("\n" if tag == "br" else _SPACE.sub(" ", dict(attrs).get("alt") or ""))
        elif tag in _PREFORMATTED:
            self._preformatted += 1
        elif tag in _LISTS:
            self._lists.append(_List.of(dict(attrs)) if tag == "ol" else _List())
        elif tag == "li":
            self._item(_integer(dict(attrs).get("value")))
        elif tag[0] == "h" and tag[1:] in {"1", "2", "3", "4", "5", "6"}:
            self._heading = int(tag[1:])
        else:
            self._table(tag, dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        if self._is_unseen(tag, opened=False):
            return
        if tag in _BREAKING:
            self._flush()
        if self._formula is not None:
            self._end_in_formula(tag)
        elif tag in _PREFORMATTED:
            self._preformatted = max(0, self._preformatted - 1)
        elif tag in _SHIFTED and self._shifted is not None:
            inner = "".join(self._pieces[self._shifted :])
            self._pieces[self._shifted :] = [shifted(inner, up=tag == "sup")]
            self._shifted = None
        elif tag in _LISTS:
            self._prefix = ""
            if self._lists:
                self._lists.pop()
        elif tag == "li":
            self._prefix = ""
        elif tag[0] == "h" and tag[1:] in {"1", "2", "3", "4", "5", "6"}:
            self._heading = 0
        else:
            self._end_of_table(tag)

    def _is_unseen(self, tag: str, *, opened: bool) -> bool:
        """True at a tag within an element that is not shown, or at its end."""
        if not self._unseen:
            return False
        if tag in _ENDS.get(self._unseen, ()):
            self._unseen = ""
            return False
        # A title has no elements.
        if tag == self._unseen and not (opened and tag == "title"):
            self._unseen_depth += 1 if opened else -1
            if not self._unseen_depth:
                self._unseen = ""
        return True

    def _span(self, classes: Sequence[str]) -> None:
        if "katex" in classes:
            self._has_mathml = False
        elif "katex-html" in classes and self._has_mathml:
            self._unseen, self._unseen_depth = "span", 1

    def _table(self, tag: str, values: Mapping[str, str | None]) -> None:
        if tag == "table":
            self._blocks.open_table()
        elif tag == "tr":
            self._blocks.open_row()
        elif tag in {"td", "th"}:
            self._blocks.open_cell(_integer(values.get("colspan")) or 1, _integer(values.get("rowspan")) or 1)
        elif tag == "math":
            self._formula = Formula()

    def _end_in_formula(self, tag: str) -> None:
        if self._formula is not None and tag != "math":
            self._formula.end(tag)
        elif self._formula is not None:
            text = self._formula.text()
            self._pieces.append(text)
            self._has_mathml = bool(text)
            self._formula = None

    def _end_of_table(self, tag: str) -> None:
        if tag == "table":
            self._blocks.close_table()
        elif tag == "tr":
            self._blocks.close_row()
        elif tag in {"td", "th"}:
            self._blocks.close_cell()

    def _item(self, number: int | None) -> None:
        indent = "  " * min(len(self._lists) - 1, 8)
        self._prefix = f"{indent}{(self._lists[-1] if self._lists else _List()).next(number)} "

    def parse_html_declaration(self, i: int) -> int:
        """Sections of XHTML and of Word's pages, on which the parser of some Python versions fails or drops text."""
        if self.rawdata.startswith("<![CDATA[", i) and i < self._last_section:
            end = self.rawdata.find("]]>", i)
            self.handle_data(self.rawdata[i + len("<![CDATA[") : end])
            return end + len("]]>")
        if self.rawdata.startswith("<![", i) or (self.rawdata.startswith("<!--", i) and i > self._last_comment):
            return self.parse_bogus_comment(i)
        return super().parse_html_declaration(i)

    def _flush(self) -> None:
        """Ends a paragraph, and a formula in it."""
        self._end_in_formula("math")
        whole, self._pieces, self._shifted = "".join(self._pieces), [], None
        if self._preformatted:
            self._flush_preformatted(whole.strip("\n"))
            return
        lines = [re.sub(" +", " ", line).strip(" ") for line in whole.split("\n")]
        text = without_blank_runs("\n".join(lines)).strip("\n")
        if not text.strip():
            return
        if self._heading:
            number = "" if self._prefix.strip() == "-" else self._prefix.lstrip()
            self._blocks.add(f"{'#' * self._heading} {number}{' '.join(text.split(chr(10)))}", flat=False)
        elif self._prefix:
            self._blocks.add(self._prefix + text, group="list")
        else:
            self._blocks.add(text)
        self._prefix = ""

    def _flush_preformatted(self, text: str) -> None:
        if self._prefix and text.strip():
            # The number on a line of its own leaves the columns as they are.
            text = f"{self._prefix}\n{text}" if "\n" in text else self._prefix + text.lstrip()
            self._prefix = ""
            self._blocks.add(text, group="list")
        else:
            self._blocks.add(text)


@dataclass
class _List:
    """An open list; `number` is that of its next item, None in a list of bullets."""

    number: int | None = None
    step: int = 1
    form: str = "1"

    @classmethod
    def of(cls, values: Mapping[str, str | None]) -> _List:
        """A numbered list. One that counts down from the number of its items, which follow, is a list of bullets."""
        start, down = _integer(values.get("start")), "reversed" in values
        return cls(start if down or start is not None else 1, -1 if down else 1, values.get("type") or "1")

    def next(self, number: int | None) -> str:
        """What a browser shows before the next item, whose own number, if it has one, continues the list."""
        if self.number is None:
            return "-"
        value = self.number if number is None else number
        self.number = value + self.step
        return f"{_formatted(value, self.form)}."


def _formatted(value: int, form: str) -> str:
    """An item's number as digits, letters (a, A) or Roman digits (i, I)."""
    if form in {"i", "I"} and 0 < value < 4000:
        digits = roman(value)
    elif form in {"a", "A"} and value > 0:
        digits, rest = "", value
        while rest:
            rest, letter = divmod(rest - 1, 26)
            digits = chr(ord("a") + letter) + digits
    else:
        return str(value)
    return digits.upper() if form.isupper() else digits


def _integer(value: str | None) -> int | None:
    """A number at the start of an attribute, as browsers read it; None if there is none."""
    found = value and re.match(r"\s*([+-]?[0-9]{1,6})(?![0-9])", value, re.ASCII)
    return int(found[1]) if found else None
