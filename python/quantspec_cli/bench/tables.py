"""The forms of a benchmark's output: a Markdown table, CSV, JSON and JSON lines."""

from __future__ import annotations

import csv
import io
import itertools
import json
from typing import TYPE_CHECKING, Any

from .. import output, render
from ..errors import one_line
from ..options import METHODS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def sink_of(file: output.AtomicFile | None, *, as_json: bool) -> output.Sink:
    """Destination of the table. With `--json` it is a copy at most: standard output gets a document, which has all rows."""
    if file is not None and not as_json:
        return file
    stdout = output.Stdout()  # raises now if it is closed
    if file is not None:
        return output.Copy(file)
    return output.NullSink() if as_json else stdout


class JsonLines:
    """One object a line, as measured."""

    def __init__(self, sink: output.Sink) -> None:
        self._sink = sink

    def row(self, row: Mapping[str, Any]) -> None:
        """Writes a measurement."""
        self._sink.write(json.dumps(row, ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Does nothing: every row is written already."""


class Json:
    """One array, at the end."""

    def __init__(self, sink: output.Sink) -> None:
        self._sink = sink
        self._rows: list[Mapping[str, Any]] = []

    def row(self, row: Mapping[str, Any]) -> None:
        """Keeps a measurement."""
        self._rows.append(row)

    def close(self) -> None:
        """Writes the array."""
        self._sink.write(json.dumps(self._rows, ensure_ascii=False, indent=1) + "\n")


class Csv:
    """A header and one line per measurement; lists and objects are omitted, inapplicable fields are empty."""

    def __init__(self, sink: output.Sink) -> None:
        self._sink = sink
        self._rows: list[Mapping[str, Any]] = []

    def row(self, row: Mapping[str, Any]) -> None:
        """Collects a measurement; the header has the columns of all."""
        self._rows.append({name: value for name, value in row.items() if not isinstance(value, list | dict)})

    def close(self) -> None:
        """Writes the table."""
        text = io.StringIO()
        names = dict.fromkeys(itertools.chain.from_iterable(self._rows))
        writer = csv.DictWriter(text, list(names), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self._rows)
        self._sink.write(text.getvalue())


class Markdown:
    """A table, row by row."""

    COLUMNS: tuple[tuple[str, int], ...]
    # Number of text columns at the left, which are left-aligned.
    TEXTS: int

    def __init__(self, sink: output.Sink, texts: Mapping[str, Iterable[str]]) -> None:
        """`texts` has all that a column will hold, if it is known: its width."""
        self._sink = sink
        self._started = False
        self._widths = [
            max(map(len, [name, *map(_cell, texts[name])])) if name in texts else width for name, width in self.COLUMNS
        ]

    def row(self, row: Mapping[str, Any]) -> None:
        """Writes a measurement."""
        if not self._started:
            self._started = True
            self._line([name for name, _ in self.COLUMNS])
            rules = ["-" * width if i < self.TEXTS else "-" * (width - 1) + ":" for i, width in enumerate(self._widths)]
            self._line(rules)
        self._line(self.cells(row))

    def cells(self, row: Mapping[str, Any]) -> list[str]:
        """The columns of a measurement."""
        raise NotImplementedError

    def close(self) -> None:
        """Does nothing: every row is written already."""

    def _line(self, cells: Iterable[str]) -> None:
        padded = (
            cell.ljust(width) if i < self.TEXTS else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(map(_cell, cells), self._widths, strict=True))
        )
        self._sink.write("| " + " | ".join(padded) + " |\n")


def _cell(text: str) -> str:
    """Escapes text so that it stays in its cell, for any model name."""
    return one_line(text).replace("|", "\\|")


def model_cell(name: str, *, widened: bool) -> str:
    """A model's name, marked if tools/widen.py made it."""
    return f"{name} (widened)" if widened else name


def test_cell(row: Mapping[str, Any]) -> str:
    """The test of a row, as llama-bench writes it, and its sequences."""
    depth = f" @ d{row['n_depth']}" if row["n_depth"] else ""
    sequences = f" x{row['batch']}" if row["batch"] != 1 else ""
    return f"{row['test']}{row['n_prompt'] or row['n_gen']}{depth}{sequences}" + " ragged" * bool(row.get("ragged"))


class Decoding(Markdown):
    """llama-bench's table, with each row's bandwidth."""

    COLUMNS = (
        ("model", 20), ("device", 6), ("method", 10), ("kv", 4), ("gamma", 5), ("pages", 5), ("test", 16),
        ("ms/token", 15), ("tokens/s", 8), ("speed-up", 8), ("MB/token", 8), ("GB/s", 5), ("of read", 8),
        ("accepted", 8), ("draft ms", 8), ("loop us", 7),
    )  # fmt: skip
    TEXTS = 7

    def cells(self, row: Mapping[str, Any]) -> list[str]:
        """The columns of a measurement."""
        method = METHODS.get(row["method"], METHODS["ar"])
        loop_us, draft_ms = row.get("loop_us"), row.get("draft_step_ms")
        return [
            model_cell(row["model"], widened=row["widened"]),
            row["device"],
            row["method"],
            row["kv_target"],
            str(row["gamma"]) if method.drafts else "-",
            str(row["draft_pages"]) if method.draft_view else "-",
            test_cell(row),
            render.with_spread(row["ms_per_token"], row["ms_per_token_sd"], digits=2),
            render.number(row["tokens_per_s"]),
            "-" if row.get("speedup") is None else f"{row['speedup']:.2f}x",
            f"{row['bytes_per_token'] / 1e6:.1f}",
            f"{row['gb_per_s']:.1f}",
            "-" if row["bandwidth_share"] is None else f"{row['bandwidth_share']:.1%}",
            render.percent(row["acceptance_rate"]),
            "-" if draft_ms is None else f"{draft_ms:.2f}",
            "-" if loop_us is None else f"{loop_us:.0f}",
        ]


class Kernels(Markdown):
    """One kernel per row, with the bytes it must move and the memory bandwidth."""

    COLUMNS = (
        ("kernel", 15), ("form", 8), ("rows", 5), ("shape", 14), ("us", 9), ("MB", 8), ("GB/s", 6), ("of read", 7),
        ("TFLOP/s", 7),
    )  # fmt: skip
    TEXTS = 4

    def cells(self, row: Mapping[str, Any]) -> list[str]:
        """The columns of a measurement."""
        shape = f"{row['n']} x {row['k']}" if row["n"] else f"d{row['context']}" if row["context"] is not None else ""
        return [
            row["kernel"],
            row["form"],
            str(row["rows"]),
            shape,
            f"{row['us']:.1f}",
            f"{row['bytes'] / 1e6:.2f}",
            f"{row['gb_per_s']:.0f}",
            f"{row['bandwidth_share']:.0%}",
            "-" if row["tflop_per_s"] is None else f"{row['tflop_per_s']:.0f}",
        ]


def writer(
    form: str, table: type[Markdown], sink: output.Sink, texts: Mapping[str, Iterable[str]] | None = None
) -> Markdown | Csv | Json | JsonLines:
    """The writer for a form of `--output-format`; `texts` as for `Markdown`."""
    forms: dict[str, type[Csv | Json | JsonLines]] = {"csv": Csv, "json": Json, "jsonl": JsonLines}
    return forms[form](sink) if form in forms else table(sink, texts or {})
