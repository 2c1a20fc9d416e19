"""`quantspec bench --compare A B`: compares two files of rows, and shows which differences exceed their noise."""

from __future__ import annotations

import json
import math
from pathlib import Path
from stat import S_ISFIFO, S_ISREG
from typing import TYPE_CHECKING, Any

from . import files, output, render
from .bench import tables
from .errors import InputError, InterruptedByUserError, one_line
from .options import shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Row = Mapping[str, Any]

# Larger than any benchmark's rows; reading a pipe or a wrong file stops here.
BYTES_MAX = 64 << 20
# Larger than any time in ms and any number of repetitions. Quotients of such numbers are finite.
NUMBER_MAX = 1e12
# Fields that must match for two rows to be the same measurement. The model counts if a file has several.
KEY = (
    "model",
    "method",
    "kv_target",
    "gamma",
    "draft_pages",
    "accept",
    "batch",
    "test",
    "n_prompt",
    "n_gen",
    "n_depth",
    "ragged",
)
# Fields that may differ between the files, and explain a difference of speed.
CONDITIONS = (
    "quantspec",
    "model",
    "device_name",
    "simd",
    "threads",
    "weights",
    "warm_up",
    "page_choice",
    "draft_refresh",
    "draft_precision",
    "draft_model",
    "draft_model_kv",
    "kv_rounding",
)
# Combined standard deviations of single repetitions above which a difference counts as significant. Of equal pairs, 1 of 10
# exceeds it with two repetitions each, and 1 of 500 with five.
DEVIATIONS = 2.0


def compare(first: str, second: str, *, output_format: str, place: str | None, as_json: bool) -> output.Done:
    """Prints the measurements in both files; the caller prints the document of `--json`."""
    with output.opened(place, [first, second]) as file:
        sink = tables.sink_of(file, as_json=as_json)
        a, b = read(first), read(second)
        rows = list(compared(a, b, first, second))
        for line in differences(a, b):
            render.note(line)
        texts = {name: [str(row[name]) for row in rows] for name in ("model", "method")}
        table = tables.writer(output_format, Compared, sink, texts)
        for row in rows:
            table.row(row)
        table.close()
        unwritten = sink.complete() if isinstance(sink, output.Copy) else None
    if unwritten is not None:
        unwritten.kept = {"results": rows}
        raise unwritten
    return output.Done(document=rows if as_json else None)


def read(name: str) -> list[dict[str, Any]]:
    """The rows of a file: an array (`bench --json`, `-o json`), an error's document, or one row per line (`-o jsonl`)."""
    path = Path(name)
    status = files.status(path)
    # A shell's <(git show ...) is a pipe.
    if status is None or not (S_ISREG(status.st_mode) or S_ISFIFO(status.st_mode)):
        raise InputError(
            f"{name} is no file", "give a file that bench -o jsonl or bench --json wrote", option="compare"
        )
    try:
        with path.open("rb") as file:
            raw = file.read(BYTES_MAX + 1)
    except OSError as error:
        raise files.unreadable(path, error) from error
    if len(raw) > BYTES_MAX:
        raise InputError(f"{name} has more than {BYTES_MAX} bytes", "give the rows of one benchmark")
    try:
        found = _parsed(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{name} holds no rows: {error}",
            "give a file that bench -o jsonl or bench --json wrote",
            option="compare",
        ) from error
    if not found:
        raise InputError(f"{name} holds no rows", "give a file that bench wrote", option="compare")
    if isinstance(found[0], dict) and "error" in found[0]:
        ended = "was interrupted" if _is_interruption(found[0]["error"]) else "ended with an error"
        raise InputError(f"{name} has no finished rows (the run {ended})", "run bench again", option="compare")
    return [_checked(name, number, row) for number, row in enumerate(found, 1)]


def _parsed(text: str) -> list[Any]:
    try:
        document = json.loads(text)
    except ValueError:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    if isinstance(document, dict) and isinstance(document.get("results"), list):
        document = document["results"]
    return document if isinstance(document, list) else [document]


def _is_interruption(error: Any) -> bool:
    return isinstance(error, dict) and error.get("kind") == InterruptedByUserError.kind


def _checked(name: str, number: int, row: Any) -> dict[str, Any]:
    """A row of decoding or of a prompt; checks that the needed fields are numbers."""

    def wrong(what: str) -> InputError:
        return InputError(
            f"row {number} of {name} {what}",
            "give rows of bench as it wrote them; those of bench kernels have no spread to compare",
            option="compare",
        )

    if not isinstance(row, dict) or not {*KEY} - {"accept", "ragged"} <= row.keys():
        raise wrong("is no measurement of bench")
    for field, least in (("ms_per_token", 1 / NUMBER_MAX), ("ms_per_token_sd", 0), ("repetitions", 1)):
        value = row.get(field)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong(f"has no {field}")
        if not least <= value <= NUMBER_MAX:
            raise wrong(f"has {field} {shown(value):.60}")
    if not all(isinstance(row.get(field, ""), str | int) for field in KEY):
        raise wrong("has a field that is neither text nor a whole number")
    return row


def compared(first: Sequence[Row], second: Sequence[Row], one: str, other: str) -> Iterator[dict[str, Any]]:
    """Each measurement in both files. The ratio is the first time over the second: above 1 the second file is faster."""
    single = all(len({row["model"] for row in rows}) == 1 for rows in (first, second))
    mine, others = _by_key(first, one, single=single), _by_key(second, other, single=single)
    common = [key for key in mine if key in others]
    if not common:
        raise InputError(
            f"{one} and {other} have no measurement in common",
            f"compare runs of the same tests: their {', '.join(KEY)} must be equal",
            option="compare",
        )
    for key in common:
        a, b = mine[key], others[key]
        ratio = a["ms_per_token"] / b["ms_per_token"]
        spread = math.hypot(*(row["ms_per_token_sd"] / row["ms_per_token"] for row in (a, b))) * ratio
        known = min(a["repetitions"], b["repetitions"]) > 1
        beyond = abs(ratio - 1) > DEVIATIONS * spread
        yield {
            **{field: a.get(field) for field in KEY},
            "a_ms_per_token": a["ms_per_token"],
            "a_ms_per_token_sd": a["ms_per_token_sd"],
            "b_ms_per_token": b["ms_per_token"],
            "b_ms_per_token_sd": b["ms_per_token_sd"],
            "ratio": ratio,
            "ratio_sd": spread if known else None,
            "change": ("unknown" if not known else "noise" if not beyond else "faster" if ratio > 1 else "slower"),
        }


def differences(first: Sequence[Row], second: Sequence[Row]) -> Iterator[str]:
    """A line for each condition that differs between the files."""
    for field in CONDITIONS:
        a, b = ({one_line(str(row[field])) for row in rows if row.get(field) is not None} for rows in (first, second))
        if a and b and a != b:
            yield f"note: {field} is {', '.join(sorted(a))} in A and {', '.join(sorted(b))} in B"


def _by_key(rows: Sequence[Row], name: str, *, single: bool) -> dict[tuple[Any, ...], Row]:
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = tuple(row.get(field) for field in KEY if not (single and field == "model"))
        if key in found:
            raise InputError(
                f"{name} measures {one_line(_shown(row))} twice", "compare files of one run each", option="compare"
            )
        found[key] = row
    return found


def _shown(row: Row) -> str:
    return f"{row['method']} {row['kv_target']}, {row['test']}{row['n_prompt'] or row['n_gen']} at {row['n_depth']}"


class Compared(tables.Markdown):
    """Both times, and the speed of the second against the first."""

    COLUMNS = (
        ("model", 20), ("method", 10), ("kv", 4), ("gamma", 5), ("pages", 5), ("test", 16), ("A ms/token", 15),
        ("B ms/token", 15), ("A / B", 13), ("B is", 7),
    )  # fmt: skip
    TEXTS = 6

    def cells(self, row: Mapping[str, Any]) -> list[str]:
        """The columns of a comparison."""
        spread = row["ratio_sd"]
        return [
            str(row["model"]),
            str(row["method"]),
            str(row["kv_target"]),
            str(row["gamma"]),
            str(row["draft_pages"]),
            tables.test_cell(row),
            render.with_spread(row["a_ms_per_token"], row["a_ms_per_token_sd"]),
            render.with_spread(row["b_ms_per_token"], row["b_ms_per_token_sd"]),
            f"{row['ratio']:.3f}" + ("" if spread is None else f" ± {spread:.3f}"),
            {"noise": "", "unknown": "?"}.get(row["change"], row["change"]),
        ]
