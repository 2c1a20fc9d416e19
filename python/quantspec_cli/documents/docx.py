"""DOCX: body, tables, text boxes, notes, headers and footers, as Word shows them with all changes accepted.

The XML is read as a stream of events. Deleted and hidden text, field codes and comments are left out. Clause numbers, which
Word computes, are computed here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from string import ascii_letters
from typing import TYPE_CHECKING

from .archive import Archive, local
from .blocks import Blocks, shifted, unread
from .formula import Formula
from .numbering import OFF, Numbering

if TYPE_CHECKING:
    from collections.abc import Mapping

_WORD = (
    "http://schemas.openxmlformats.org/wordprocessingml/2006/main ",
    "http://purl.oclc.org/ooxml/wordprocessingml/main ",
)
_MATH = (
    "http://schemas.openxmlformats.org/officeDocument/2006/math ",
    "http://purl.oclc.org/ooxml/officeDocument/math ",
)
_COMPATIBILITY = "http://schemas.openxmlformats.org/markup-compatibility/2006 "
# Elements whose content is not shown: deletions, previous properties, tab stops, field codes.
_UNSEEN = frozenset(
    {
        *("w:del", "w:moveFrom", "w:pPrChange", "w:rPrChange", "w:tblPrChange", "w:trPrChange", "w:tcPrChange"),
        *("w:tabs", "w:instrText", "w:delText"),
    }
)
_INLINE = {"w:tab": "\t", "w:ptab": "\t", "w:br": "\n", "w:cr": "\n", "w:noBreakHyphen": "\N{NON-BREAKING HYPHEN}"}
# Greek of the font Symbol, by Latin letter.
_GREEK = dict(zip(ascii_letters.encode(), "αβχδεφγηιϕκλμνοπθρστυϖωξψζΑΒΧΔΕΦΓΗΙϑΚΛΜΝΟΠΘΡΣΤΥςΩΞΨΖ", strict=True))
# What the font Symbol has in common with ASCII.
_SHARED = {ord(sign): sign for sign in "%()+,./0123456789:;<=>?[]_{|}"}
# Characters of symbol fonts, by their number in the font: boxes, ticks and arrows of forms, signs of arithmetic, and Greek.
_SYMBOLS = {
    "wingdings": dict(zip(bytes.fromhex("6f7172a878fdfefbfcdfe0e8"), "☐☐☐☐☒☒☑✗✓←→→", strict=True)),
    "wingdings 2": dict(zip(bytes.fromhex("a3515354524f50"), "☐☒☒☒☑✗✓", strict=True)),
    "symbol": _GREEK
    | _SHARED
    | dict(zip(bytes.fromhex("a3b3b9bbb0b1b4b7d7a5aede2d"), "≤≥≠≈°±×•⋅∞→⇒\N{MINUS SIGN}", strict=True)),
}
_SYMBOL_FONTS = {*_SYMBOLS, "wingdings 3", "webdings", "zapfdingbats", "mt extra"}
# Half points by which a superscript is raised at least. Less adjusts text to a line.
_RAISED = 6
_UNNAMED = re.compile("[\ue000-\uf8ff]")
_DEPTH_MAX = 20
# Parts that may contain text and are not read.
_UNREAD = {
    "aFChunk": "inserted file",
    "subDocument": "subdocument",
    "diagramData": "diagram",
    "chart": "chart",
    "oleObject": "embedded object",
    "package": "embedded document",
}


def read(archive: Archive) -> tuple[str, tuple[str, ...]]:
    """The text of a document, and warnings about parts whose text is not in it."""
    main = archive.main_part()
    parts: dict[str, list[str]] = {}
    for path, what in archive.relations(main).values():
        if path in archive and path not in parts.setdefault(what.rpartition("/")[2], []):
            parts[what.rpartition("/")[2]].append(path)
    styles = _styles(archive, parts.get("styles", []))
    english = not styles.language or styles.language.lower().startswith("en")
    numbering = Numbering(archive, parts.get("numbering", []), english=english)
    notes: dict[tuple[str, str], int] = {}

    def story(path: str) -> str:
        reader = _Story(styles, numbering, notes)
        archive.parse(path, reader.start, reader.end, reader.data)
        return reader.text()

    # Headers and footers, shown on every page, are read once.
    headers = dict.fromkeys(story(path) for path in parts.get("header", []))
    body = story(main)
    ends = [story(path) for kind in ("footnotes", "endnotes") for path in parts.get(kind, [])]
    footers = dict.fromkeys(story(path) for path in parts.get("footer", []))
    text = "\n\n".join(filter(None, [*headers, body, *ends, *footers]))
    warnings = [warning for kind, what in _UNREAD.items() for warning in unread(len(parts.get(kind, [])), what)]
    return text, (*warnings, *unread(len(_UNNAMED.findall(text)), "symbol"))


@dataclass
class _Place:
    """Place of paragraphs in headings and lists; None if it is not set."""

    heading: int | None = None
    number: str | None = None
    level: int | None = None

    def set(self, name: str, value: str) -> None:
        """Sets a property by the name of its element; others are passed over."""
        if name == "outlineLvl":
            self.heading = _outline(value)
        elif name == "numId":
            self.number = value
        elif name == "ilvl":
            self.level = _integer(value)


@dataclass
class _Shift:
    """Vertical shift of characters, by two independent properties; "" and None if they are not set.

    Attributes:
        align: superscript, subscript or baseline.
        raised: at least by the distance of a superscript.
    """

    align: str = ""
    raised: bool | None = None

    def shift(self, name: str, value: str) -> None:
        """Sets one of the properties by the name of its element."""
        if name == "vertAlign":
            self.align = value
        else:
            self.raised = _integer(value, 999) >= _RAISED


@dataclass
class _Style(_Place, _Shift):
    """Properties of a style of paragraphs or characters; None and "" if the style does not set them."""

    based_on: str = ""
    hidden: bool | None = None

    def set_of_text(self, name: str, value: str) -> None:
        """Sets a property of its text by the name of its element."""
        if name == "vanish":
            self.hidden = value not in OFF
        else:
            self.shift(name, value)


class _Styles(dict[str, _Style]):
    """The styles of a document, by id.

    Attributes:
        default: the style of paragraphs without one.
        hidden: the document's defaults hide all text.
        language: the document's default language; "" if it has none.
    """

    default = ""
    hidden = False
    language = ""

    def set_default(self, name: str, value: str) -> None:
        """Sets a default of the document by the name of its element; others are passed over."""
        if name == "vanish":
            self.hidden = value not in OFF
        elif name == "lang":
            self.language = value

    def hides(self, table: str, paragraph: str, run: str) -> bool:
        """True if text with these styles is hidden. Each of the three toggles the property, as in Word."""
        paragraph = paragraph if paragraph in self else self.default
        return self.hidden or sum(map(self._sets_hidden, (table, paragraph, run))) % 2 == 1

    def _sets_hidden(self, name: str) -> bool:
        return next((style.hidden for _, style in self.chain(name) if style.hidden is not None), False)

    def shift(self, paragraph: str, run: str) -> _Shift:
        """The vertical shift of text with these styles."""
        paragraph = paragraph if paragraph in self else self.default
        chain = [style for name in (run, paragraph) for _, style in self.chain(name)]
        return _Shift(
            next((style.align for style in chain if style.align), ""),
            next((style.raised for style in chain if style.raised is not None), None),
        )

    def chain(self, name: str) -> list[tuple[str, _Style]]:
        """A style, followed by the styles it is based on."""
        found: list[tuple[str, _Style]] = []
        while name in self and len(found) < _DEPTH_MAX:
            found.append((name, self[name]))
            name = self[name].based_on
        return found


def _styles(archive: Archive, paths: list[str]) -> _Styles:
    styles = _Styles()
    current = _Style()
    path: list[str] = []

    def start(tag: str, values: Mapping[str, str]) -> None:
        nonlocal current
        name, value = local(tag), _value(values)
        if name == "style":
            identifier = _attribute(values, "styleId")
            current = styles.setdefault(identifier, _Style())
            if _attribute(values, "type") == "paragraph" and _attribute(values, "default") not in {"", *OFF}:
                styles.default = identifier
        elif path[-2:] == ["rPrDefault", "rPr"]:
            styles.set_default(name, value)
        elif name in {"vanish", "vertAlign", "position"}:
            # Elsewhere they belong to a part of a table, or to previous properties.
            if path[-2:] == ["style", "rPr"]:
                current.set_of_text(name, value)
        elif name == "name" and current.heading is None:
            lower = value.lower()
            if lower.startswith("heading ") and lower[8:].isdecimal():
                current.heading = int(lower[8:])
            elif lower == "title":
                current.heading = 1
        elif name == "basedOn":
            current.based_on = value
        else:
            current.set(name, value)
        path.append(name)

    for part in paths:
        archive.parse(part, start, lambda _: path.pop())
    return styles


@dataclass
class _Run(_Shift):
    """Properties of a run of characters, or of a paragraph's mark; None and "" if only styles set them."""

    hidden: bool | None = None
    style: str = ""
    # It is in a text box of hidden text.
    enclosed: bool = False

    def set(self, name: str, value: str) -> None:
        """Sets a property by the name of its element."""
        if name == "w:vanish":
            self.hidden = value not in OFF
        elif name == "w:rStyle":
            self.style = value
        else:
            self.shift(name.removeprefix("w:"), value)


@dataclass
class _Paragraph(_Place):
    """A paragraph as it grows."""

    pieces: list[str] = field(default_factory=list)
    style: str = ""
    # The break after it is deleted.
    joins: bool = False
    mark: _Run = field(default_factory=_Run)
    # Its last text is raised and no power.
    raised: bool = False

    def set(self, name: str, value: str) -> None:
        """Sets a property by the name of its element; others are passed over."""
        if name == "pStyle":
            self.style = value
        else:
            super().set(name, value)


@dataclass
class _Control:
    """A check box or a list of choices in a form; its text is not in the document."""

    box: bool
    choice: str = "0"
    entries: list[str] = field(default_factory=list)

    def shown(self) -> str:
        """What Word shows."""
        if self.box:
            return "\N{BALLOT BOX}" if self.choice in OFF else "\N{BALLOT BOX WITH X}"
        index = int(self.choice) if self.choice.isascii() and self.choice.isdecimal() and len(self.choice) < 4 else 0
        return self.entries[index] if index < len(self.entries) else ""


class _Fields:
    """The open fields, of which each shows its result and not its instruction. Fields in an instruction have results, too.

    A field that does not end has no instruction, and text of an earlier paragraph stays, so that no text is lost.
    """

    def __init__(self) -> None:
        # True before the result.
        self._open: list[bool] = []
        self._instructions = 0
        # Text in instructions: where it is.
        self._places: list[tuple[list[str], int]] = []

    def note(self, pieces: list[str]) -> None:
        """The last piece may be part of an instruction."""
        if self._instructions:
            self._places.append((pieces, len(pieces) - 1))

    def mark(self, kind: str) -> None:
        """A field begins, has its result next ("separate"), or ends."""
        if kind == "begin":
            self._open.append(True)
            self._instructions += 1
        elif self._open:
            self._instructions -= self._open.pop()
            if kind == "separate":
                self._open.append(False)
            if not self._instructions:
                for pieces, index in self._places:
                    pieces[index] = ""
                self._places = []


class _Story:
    """One part: body, notes, a header or a footer."""

    def __init__(self, styles: _Styles, numbering: Numbering, notes: dict[tuple[str, str], int]) -> None:
        self.blocks = Blocks()
        self._styles = styles
        self._numbering = numbering
        self._notes = notes
        # The styles of the tables around the current element; "" outside of tables.
        self._tables = [""]
        # A text box is inside a paragraph and contains paragraphs.
        self._paragraphs: list[_Paragraph] = []
        self._unseen = 0
        self._taking = False
        self._written = 0
        self._alternatives: list[int] = []
        self._note = ""
        # Text of paragraphs whose break is deleted, for the next paragraph.
        self._joined: list[str] = []
        self._in_properties = False
        # Those around the current element, as a run may have a text box with runs; each with its paragraph's style.
        self._runs: list[tuple[str, _Run]] = []
        self._control: _Control | None = None
        self._formula: Formula | None = None
        self._fields = _Fields()
        self._field_mark = ""

    def text(self) -> str:
        """The text, at the end of the part."""
        self._release()
        return self.blocks.text()

    def _release(self) -> None:
        """Adds text that no paragraph follows."""
        self._finish(_Paragraph(pieces=self._joined))
        self._joined = []

    def start(self, tag: str, values: Mapping[str, str]) -> None:
        """An element begins."""
        name = _short(tag)
        paragraph = self._paragraphs[-1] if self._paragraphs else None
        if self._unseen or self._is_unseen(name, values):
            if paragraph is not None and self._in_properties and not self._unseen:
                paragraph.joins |= name in {"w:del", "w:moveFrom"}
            self._unseen += 1
            return
        if name == "w:p":
            self._paragraphs.append(_Paragraph(pieces=self._joined))
            self._joined = []
        elif name == "w:pPr":
            self._in_properties = True
        elif name == "w:t":
            self._taking = True
        elif name.startswith("m:"):
            self._in_formula(local(tag), values)
            if name == "m:r" and paragraph is not None:
                self._runs.append((paragraph.style, _Run(enclosed=self._is_hidden())))
        elif name == "mc:AlternateContent":
            self._alternatives.append(self._written)
        elif name in {"w:tbl", "w:tblStyle", "w:tr", "w:tc", "w:gridBefore", "w:gridSpan", "w:footnote", "w:endnote"}:
            self._in_block(name, values)
        elif self._control is not None:
            self._in_control(self._control, name, values)
        elif paragraph is not None:
            self._in_paragraph(paragraph, name, values)

    def _in_formula(self, name: str, values: Mapping[str, str]) -> None:
        if name == "oMath":
            self._formula = Formula()
        if self._formula is not None:
            self._formula.start(name, {"val": _value(values)})
        self._taking |= name == "t"

    def _end_in_formula(self, name: str) -> None:
        self._taking &= name != "t"
        if self._formula is not None:
            self._formula.end(name)
            if name == "oMath":
                formula, self._formula = self._formula, None
                if not formula.empty:  # its text may be hidden
                    self._write(formula.text())

    def _in_block(self, name: str, values: Mapping[str, str]) -> None:
        if name == "w:tbl":
            self._release()
            self._tables.append("")
            self.blocks.open_table()
        elif name == "w:tblStyle":
            self._tables[-1] = _value(values)
        elif name == "w:tr":
            self.blocks.open_row()
        elif name == "w:tc":
            self.blocks.open_cell()
        elif name == "w:gridBefore":
            if columns := _integer(_value(values), 1000):
                self.blocks.open_cell(columns)
                self.blocks.close_cell()
        elif name != "w:gridSpan":
            self._note = f"[^{self._number(name, _attribute(values, 'id'))}]: "
        else:
            self.blocks.widen_cell(_integer(_value(values), 1000))

    def _in_control(self, control: _Control, name: str, values: Mapping[str, str]) -> None:
        # The user's choice follows the default.
        if name in {"w:default", "w:checked", "w:result"}:
            control.choice = _value(values)
        elif name == "w:listEntry":
            control.entries.append(_value(values))

    def _in_paragraph(self, paragraph: _Paragraph, name: str, values: Mapping[str, str]) -> None:
        if name in _INLINE:
            self._write(_INLINE[name])
        elif name == "w:r":
            self._runs.append((paragraph.style, _Run(enclosed=self._is_hidden())))
        elif name in {"w:vanish", "w:rStyle", "w:vertAlign", "w:position"}:
            if self._in_properties:
                paragraph.mark.set(name, _value(values))
            elif self._runs:
                self._runs[-1][1].set(name, _value(values))
        elif name == "w:fldChar":
            self._field_mark = _attribute(values, "fldCharType")
        elif name in {"w:checkBox", "w:ddList"}:
            self._control = _Control(box=name == "w:checkBox")
        elif name == "w:sym":
            self._write(_symbol(_attribute(values, "font"), _attribute(values, "char")))
        elif name in {"w:footnoteReference", "w:endnoteReference"}:
            if not self._is_hidden():
                self._write(f"[^{self._number(name.removesuffix('Reference'), _attribute(values, 'id'))}]")
        elif name.startswith("w:"):
            paragraph.set(name.removeprefix("w:"), _value(values))

    def end(self, tag: str) -> None:
        """An element ends."""
        if self._unseen:
            self._unseen -= 1
            return
        name = _short(tag)
        if name == "w:p":
            self._finish(self._paragraphs.pop())
        elif name == "w:pPr":
            self._in_properties = False
        elif name == "w:r" and self._runs:
            self._runs.pop()
        elif self._control is not None and name in {"w:checkBox", "w:ddList"}:
            self._write(self._control.shown())
            self._control = None
        elif name == "w:fldChar":
            # Only here, as a box or choice in it is not part of its instruction.
            self._fields.mark(self._field_mark)
        elif name == "w:t":
            self._taking = False
        elif name.startswith("m:"):
            self._end_in_formula(local(tag))
            if name == "m:r" and self._runs:
                self._runs.pop()
        elif name == "mc:AlternateContent":
            self._alternatives.pop()
        else:
            self._end_of_block(name)

    def _end_of_block(self, name: str) -> None:
        if name == "w:tbl":
            self._tables.pop()
            self.blocks.close_table()
        elif name == "w:tr":
            self.blocks.close_row()
        elif name == "w:tc":
            self._release()
            self.blocks.close_cell()

    def data(self, text: str) -> None:
        """Characters of an element."""
        if self._taking and not self._unseen:
            if self._formula is None:
                self._write(text)
            elif not self._is_hidden():
                self._formula.data(text)

    def _is_unseen(self, name: str, values: Mapping[str, str]) -> bool:
        if name == "mc:Fallback":  # the same content for programs without support for the newer form
            return bool(self._alternatives) and self._written > self._alternatives[-1]
        if name in {"w:footnote", "w:endnote"}:  # Word shows a note only where text that is shown refers to it
            return (name, _attribute(values, "id")) not in self._notes
        return name in _UNSEEN

    def _number(self, kind: str, identifier: str) -> int:
        return self._notes.setdefault((kind, identifier), len(self._notes) + 1)

    def _is_hidden(self) -> bool:
        """True at hidden text, and in a text box of hidden text."""
        return bool(self._runs) and (self._runs[-1][1].enclosed or self._hides(*self._runs[-1]))

    def _hides(self, paragraph: str, run: _Run) -> bool:
        """True if a run, in a paragraph of this style, is hidden."""
        return self._styles.hides(self._tables[-1], paragraph, run.style) if run.hidden is None else run.hidden

    def _write(self, text: str) -> None:
        if self._is_hidden():
            return
        align = self._align()
        if align in {"superscript", "subscript"}:
            text = shifted(text, up=align == "superscript")
        self._written += len(text)
        if self._paragraphs:
            pieces = self._paragraphs[-1].pieces
            pieces.append(text)
            self._fields.note(pieces)

    def _align(self) -> str:
        """The vertical alignment of the current text."""
        if not self._runs:
            return ""
        style, run = self._runs[-1]
        of_styles = self._styles.shift(style, run.style)
        align = run.align or of_styles.align
        raised = of_styles.raised if run.raised is None else run.raised
        if not self._paragraphs:
            return align
        paragraph = self._paragraphs[-1]
        if align in {"superscript", "subscript"} or not raised:
            paragraph.raised = False
            return align
        # Raised text with a place of its own, such as a cell, is no power. It may be in several runs.
        before = paragraph.pieces[-1:]
        paragraph.raised |= not before or before[0][-1:].isspace()
        return "" if paragraph.raised else "superscript"

    def _finish(self, paragraph: _Paragraph) -> None:
        """Adds a paragraph with its prefix: the number, or the mark of a list, a heading or a note."""
        if paragraph.joins:
            self._joined = paragraph.pieces
            return
        text = "".join(paragraph.pieces).strip("\n ")
        if not text.strip() and self._hides(paragraph.style, paragraph.mark):
            return  # Word does not count it in a list either
        chain = self._styles.chain(paragraph.style)
        heading = paragraph.heading
        if heading is None:
            heading = next((style.heading for _, style in chain if style.heading is not None), 0)
        label, level = self._label(paragraph, chain)
        if not text.strip():
            return
        text = f"{label} {text}" if label else text
        if heading:
            self.blocks.add(f"{'#' * min(heading, 6)} {' '.join(text.split(chr(10)))}", flat=False)
        elif self._note:
            self.blocks.add(self._note + text)
            self._note = ""
        elif label:
            self.blocks.add("  " * level + text, group="list")
        else:
            self.blocks.add(text)

    def _label(self, paragraph: _Paragraph, chain: list[tuple[str, _Style]]) -> tuple[str, int]:
        """The number or bullet that Word shows before a paragraph, and its depth."""
        number, level = paragraph.number, paragraph.level
        if number is None:
            for name, style in chain:
                if style.number is not None:
                    number = style.number
                    if level is None:
                        level = self._numbering.level_of(number, name, style.level)
                    break
        if number is None:
            return "", 0
        return self._numbering.next(number, level or 0), level or 0


def _short(tag: str) -> str:
    """A tag with a short name for its namespace."""
    name = local(tag)
    if tag.startswith(_WORD):
        return f"w:{name}"
    if tag.startswith(_MATH):
        return f"m:{name}"
    return f"mc:{name}" if tag.startswith(_COMPATIBILITY) else name


def _attribute(values: Mapping[str, str], name: str) -> str:
    return next((value for key, value in values.items() if local(key) == name), "")


def _value(values: Mapping[str, str]) -> str:
    return _attribute(values, "val")


def _integer(text: str, most: int = 8) -> int:
    return min(int(text), most) if text.isascii() and text.isdecimal() and len(text) < 4 else 0


def _outline(text: str) -> int:
    """A heading's level: 0 to 8 are outline levels from the top, 9 is body text."""
    return int(text) + 1 if text.isascii() and text.isdecimal() and int(text[:4]) < 9 else 0


def _symbol(font: str, code: str) -> str:
    """A character of a symbol font, by its number in hexadecimal: as it is shown, if known."""
    try:
        number, font = int(code, 16), font.lower()
        # Word adds 0xF000 to most numbers.
        if 0 <= number < 0x100 and font in _SYMBOL_FONTS:
            number += 0xF000
        return _SYMBOLS.get(font, {}).get(number - 0xF000) or chr(number)
    except (ValueError, OverflowError):
        return "\N{REPLACEMENT CHARACTER}"
