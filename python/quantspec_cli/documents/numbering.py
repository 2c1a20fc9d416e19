"""Numbers of DOCX paragraphs: "1.", "2.3", "(a)", as Word counts them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .archive import local

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .archive import Archive

# Values of a property that is off.
OFF = {"0", "false", "off"}
_LEVELS = 9
_ROMAN = ((1000, "m"), (900, "cm"), (500, "d"), (400, "cd"), (100, "c"), (90, "xc"), (50, "l"), (40, "xl"), (10, "x"))
_ONES = (
    *("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen"),
    *("fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
# Ordinals that are more than a cardinal and "th".
_ORDINALS = {"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth"}
_ORDINALS |= {"twelve": "twelfth"}
# Formats that depend on the language.
_ENGLISH = {"cardinalText", "ordinalText", "ordinal"}
_ROMAN_ONES = ("", "i", "ii", "iii", "iv", "v", "vi", "vii", "viii", "ix")


@dataclass
class _Level:
    """How one level of a list counts."""

    start: int = 1
    form: str = "decimal"
    text: str = ""
    style: str = ""
    legal: bool = False
    # The level restarts after a paragraph of one of this many first levels; None: of any level above it.
    restart: int | None = None

    def set(self, name: str, value: str) -> None:
        """Sets a property by the name of its element."""
        if name == "start":
            self.start = _number(value)
        elif name == "numFmt":
            self.form = value
        elif name == "lvlRestart":
            self.restart = _number(value, _LEVELS)
        elif name == "lvlText":
            self.text = value
        elif name == "pStyle":
            self.style = value
        elif name == "isLgl":
            self.legal = value not in OFF


@dataclass
class _List:
    """Levels of a list; `link` is the list style that has them instead."""

    levels: dict[int, _Level] = field(default_factory=dict)
    link: str = ""


@dataclass
class _Number:
    """One use of a list: the list, where its numbers restart, and levels that count in another way."""

    abstract: str = ""
    starts: dict[int, int] = field(default_factory=dict)
    levels: dict[int, _Level] = field(default_factory=dict)


class Numbering:
    """The lists of a document and their current counts."""

    def __init__(self, archive: Archive, paths: list[str], *, english: bool = True) -> None:
        """Reads the lists. Numbers are words and have the endings of ordinals only if the document is in English."""
        self._english = english
        self._lists: dict[str, _List] = {}
        # The list that defines a list style.
        self._styles: dict[str, str] = {}
        self._numbers: dict[str, _Number] = {}
        self._counts: dict[str, list[int | None]] = {}
        for path in paths:
            self._parse(archive, path)

    def level_of(self, number: str, style: str, level: int | None) -> int:
        """The list level that a style implies."""
        if level is not None:
            return level
        levels = self._levels(self._numbers.get(number, _Number()))
        return next((index for index, one in levels.items() if one.style == style), 0)

    def _levels(self, use: _Number) -> dict[int, _Level]:
        found = self._lists.get(use.abstract, _List())
        linked = self._lists.get(self._styles.get(found.link, ""), found)
        return linked.levels | use.levels

    def next(self, number: str, level: int) -> str:
        """Counts one paragraph. Returns its prefix: "-" for a bullet, "" for none."""
        use = self._numbers.get(number)
        if use is None:  # number 0 removes a paragraph from its list
            return ""
        levels = self._levels(use)
        counts = self._counts.setdefault(use.abstract, [None] * _LEVELS)
        if level in use.starts:
            counts[level] = use.starts.pop(level)
        else:
            before = counts[level]
            counts[level] = levels.get(level, _Level()).start if before is None else before + 1
        for below in range(level + 1, _LEVELS):
            restart = levels.get(below, _Level()).restart
            if restart is None or level < restart:
                counts[below] = None
        here = levels.get(level)
        if here is None or here.form == "bullet":
            return "-"

        def count(match: re.Match[str]) -> str:
            index = int(match[1]) - 1
            of = levels.get(index, _Level())
            value = counts[index]
            if value is None:
                value = counts[index] = of.start
            form = "decimal" if here.legal else of.form
            return _formatted(value, form if self._english or form not in _ENGLISH else "decimal")

        return re.sub("%([1-9])", count, here.text).strip()

    def _parse(self, archive: Archive, path: str) -> None:
        levels: dict[int, _Level] = {}
        level = _Level()
        number = _Number()
        index = 0
        abstract = ""

        def start(tag: str, values: Mapping[str, str]) -> None:
            nonlocal levels, level, number, index, abstract
            name = local(tag)
            of = {local(key): value for key, value in values.items()}
            value = of.get("val", "")
            if name == "abstractNum":
                abstract = of.get("abstractNumId", "")
                levels = self._lists.setdefault(abstract, _List()).levels
            elif name == "styleLink":
                self._styles[value] = abstract
            elif name == "numStyleLink":
                self._lists.setdefault(abstract, _List()).link = value
            elif name == "num":
                number = self._numbers.setdefault(of.get("numId", ""), _Number())
                levels = number.levels
            elif name == "abstractNumId":
                number.abstract = value
            elif name in {"lvl", "lvlOverride"}:
                index = _number(of.get("ilvl", ""), _LEVELS - 1)
                if name == "lvl":
                    level = levels[index] = _Level()
            elif name == "startOverride":
                number.starts[index] = _number(value)
            else:
                level.set(name, value)

        archive.parse(path, start)


def _number(text: str, most: int = 32767) -> int:
    return min(int(text), most) if text.isascii() and text.isdecimal() and len(text) < 6 else 0


def _formatted(value: int, form: str) -> str:
    """A count in one of Word's formats, with words in English; formats of other scripts become digits."""
    if form in {"lowerLetter", "upperLetter"} and value > 0:
        letters = chr(ord("a") + (value - 1) % 26) * ((value - 1) // 26 + 1)
        return letters.upper() if form == "upperLetter" else letters
    if form in {"lowerRoman", "upperRoman"} and value > 0:
        digits = roman(value)
        return digits.upper() if form == "upperRoman" else digits
    if form in {"cardinalText", "ordinalText"} and 0 < value < 100:
        return _words(value, ordinal=form == "ordinalText").capitalize()
    if form == "ordinal":
        teens = value % 100 in {11, 12, 13}
        return str(value) + ("th" if teens else {1: "st", 2: "nd", 3: "rd"}.get(value % 10, "th"))
    if form == "none":
        return ""
    return f"{value:02}" if form == "decimalZero" else str(value)


def _words(value: int, *, ordinal: bool) -> str:
    """A number from 1 to 99: twenty-one, twenty-first."""
    tens, ones = divmod(value, 10) if value >= 20 else (0, value)
    words = [_TENS[tens - 2]] if tens else []
    if ones:
        words.append(_ONES[ones - 1])
    if ordinal:
        last = words.pop()
        words.append(_ORDINALS.get(last) or re.sub("y$", "ie", last) + "th")
    return "-".join(words)


def roman(value: int) -> str:
    """A positive number in small Roman digits."""
    digits = ""
    for size, letters in _ROMAN:
        digits += letters * (value // size)
        value %= size
    return digits + _ROMAN_ONES[value]
