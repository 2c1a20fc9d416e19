"""Paragraphs, headings, list items and tables as text: blank lines between them, rows of cells with " | "."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

# Nested tables are page layout; deeper nesting only costs time.
_NESTING_MAX = 16
# Bounds of the columns and rows that cells cover, and so of the time that a table takes.
_COLUMNS_MAX = 100
_ROWS_MAX = 1000
# A row with several cells, one of which has more paragraphs than this, is page layout.
_CELL_MAX = 4
_SUPERSCRIPTS = str.maketrans("0123456789+-\N{MINUS SIGN}=()n", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻⁼⁽⁾ⁿ")
_SUBSCRIPTS = str.maketrans("0123456789+-\N{MINUS SIGN}=()", "₀₁₂₃₄₅₆₇₈₉₊₋₋₌₍₎")
_BLANK_LINES = re.compile(r"\n(?:[ \t]*\n)+")


@dataclass(frozen=True)
class Block:
    """A piece of text.

    Attributes:
        text: at least one line.
        group: blocks of one group are on adjacent lines; other blocks are separated by blank lines.
        flat: may be part of a row.
    """

    text: str
    group: object = None
    flat: bool = True


@dataclass
class _Table:
    """A table under construction; `row` and `cell` are None between rows and cells.

    Attributes:
        spans: columns and rows of each cell of the row.
        covered: by column, how many of the following rows a cell above still covers.
    """

    blocks: list[Block] = field(default_factory=list)
    row: list[list[Block]] | None = None
    cell: list[Block] | None = None
    spans: list[tuple[int, int]] = field(default_factory=list)
    covered: dict[int, int] = field(default_factory=dict)

    def placed(self) -> list[list[Block]]:
        """The cells of the row that ends, with empty ones where a wider or higher cell covers a column."""
        row, spans = self.row or [], self.spans
        self.row, self.cell, self.spans = None, None, []
        if not self.covered and spans.count((1, 1)) == len(spans):  # most rows
            return row
        cells: list[list[Block]] = []
        end = 0
        below = {column: rows - 1 for column, rows in self.covered.items() if rows > 1}
        for cell, (wide, rows) in zip(row, spans, strict=True):
            while self.covered.get(len(cells)):
                cells.append([])
            columns = max(1, min(wide, _COLUMNS_MAX - len(cells)))
            if rows > 1 and len(cells) < _COLUMNS_MAX:
                below |= dict.fromkeys(range(len(cells), len(cells) + columns), rows - 1)
            end = len(cells) + 1
            cells += [cell, *([] for _ in range(columns - 1))]
        self.covered = below
        return cells[:end]


class Blocks:
    """Collects blocks in reading order."""

    def __init__(self) -> None:
        self._root: list[Block] = []
        self._tables: list[_Table] = []
        # Nesting depth of tables treated as layout.
        self._ignored = 0

    def add(self, text: str, group: object = None, *, flat: bool = True) -> None:
        """Adds a block, unless it is blank; strips white space at the ends of lines."""
        text = "\n".join(line.rstrip() for line in text.split("\n")).strip("\n")
        if text.strip():
            self._target().append(Block(text, group, flat))

    def open_table(self) -> None:
        """A table begins."""
        if len(self._tables) == _NESTING_MAX:
            self._ignored += 1
        else:
            self._tables.append(_Table())

    def open_row(self) -> None:
        """Begins a row, and ends an open one."""
        if self._tables and not self._ignored:
            self.close_row()
            self._tables[-1].row = []

    def open_cell(self, columns: int = 1, rows: int = 1) -> None:
        """Begins a cell that covers so many columns and rows, and ends an open one."""
        if self._tables and not self._ignored:
            table = self._tables[-1]
            if table.row is None:
                table.row = []
            table.cell = []
            table.row.append(table.cell)
            table.spans.append((columns, min(rows, _ROWS_MAX)))

    def widen_cell(self, columns: int) -> None:
        """The open cell covers so many columns."""
        if self._tables and not self._ignored and (spans := self._tables[-1].spans):
            spans[-1] = (columns, spans[-1][1])

    def close_cell(self) -> None:
        """A cell ends."""
        if self._tables and not self._ignored:
            self._tables[-1].cell = None

    def close_row(self) -> None:
        """A row ends."""
        if not self._tables or self._ignored:
            return
        table = self._tables[-1]
        if table.row is None:
            return
        covered = bool(table.covered)
        cells = table.placed()
        filled = [cell for cell in cells if cell]
        if not filled:
            return
        # A cell of several paragraphs is page layout if all other cells are empty.
        alone = len(filled) == 1 and len(filled[0]) > 1 and not covered
        if len(cells) > 1 and not alone and all(len(cell) <= _CELL_MAX and all(b.flat for b in cell) for cell in cells):
            line = " | ".join(" ".join(" ".join(b.text.split("\n")) for b in cell) for cell in cells)
            table.blocks.append(Block(line.strip(), group=id(table)))
        elif len(cells) == 1 and len(cells[0]) == 1 and cells[0][0].flat:
            table.blocks.append(Block(cells[0][0].text, group=id(table)))
        else:
            table.blocks.extend(block for cell in cells for block in cell)

    def close_table(self) -> None:
        """A table ends."""
        if self._ignored:
            self._ignored -= 1
        elif self._tables:
            self.close_row()
            table = self._tables.pop()
            text = _joined(table.blocks)
            if text:
                self._target().append(Block(text, flat=False))

    def text(self) -> str:
        """All blocks; open tables are closed."""
        self._ignored = 0
        while self._tables:
            self.close_table()
        return _joined(self._root)

    def _target(self) -> list[Block]:
        if not self._tables:
            return self._root
        table = self._tables[-1]
        if table.cell is not None:
            return table.cell
        # Text between cells belongs to the preceding cell.
        return table.row[-1] if table.row else table.blocks


def _joined(blocks: list[Block]) -> str:
    pieces: list[str] = []
    before: object = None
    for index, block in enumerate(blocks):
        if index:
            pieces.append("\n" if block.group is not None and block.group == before else "\n\n")
        pieces.append(block.text)
        before = block.group
    return "".join(pieces)


def shifted(text: str, *, up: bool) -> str:
    """Superscript (`up`) or subscript numbers as characters of their own: ten to the sixth is not 106. Other text stays."""
    digits = _SUPERSCRIPTS if up else _SUBSCRIPTS
    return text.translate(digits) if all(ord(character) in digits for character in text.strip()) else text


def unread(count: int, what: str) -> list[str]:
    """A warning, if a document has such things."""
    return [f"{count} {what}{'s' if count > 1 else ''} not read"] if count else []


def without_blank_runs(text: str) -> str:
    """Text with at most one blank line in a row."""
    return _BLANK_LINES.sub("\n\n", text)
