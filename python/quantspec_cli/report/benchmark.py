"""The page of `bench`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import render
from ..options import METHODS
from .charts import Point, Series, bars, lines, roofline
from .page import Section, Table
from .sections import acceptance_by_position, command_page, memory_of, stack, table, unique, whole_percent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Row = Mapping[str, Any]


def bench(rows: Sequence[Row], memory: Mapping[str, Row]) -> str:
    """The page of `bench`: its rows, and the statistics of each model's engine."""
    decoded = _longest_answers(rows)
    sections = [
        *_speedups(decoded),
        *_acceptance_by_gamma(decoded),
        *acceptance_by_position(_longest_drafts(decoded)),
        *_roofline(rows),
        *_rounds(decoded),
        *memory_of(memory, "Memory of the engine; a benchmark keeps every view of the cache."),
        *_all_rows(rows),
    ]
    first = rows[0] if rows else {}
    return command_page("quantspec bench", unique(row["model"] for row in rows), first, sections)


def _longest_answers(rows: Sequence[Row]) -> list[Row]:
    """The decoding rows; of rows that differ only in the answers' length, which labels do not show, the longest."""
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = (row["model"], _test(row))
        if row["test"] == "tg" and (key not in found or found[key]["n_gen"] < row["n_gen"]):
            found[key] = row
    return list(found.values())


def _method(row: Row) -> str:
    """A row's method with its distinguishing settings."""
    drafts = METHODS.get(row["method"], METHODS["ar"])
    name = "plain" if row["method"] == "ar" else row["method"]
    gamma = f", γ {row['gamma']}" if drafts.drafts else ""
    pages = f", {row['draft_pages']} pages" if drafts.draft_view and row["draft_pages"] != "all" else ""
    return f"{name}, {str(row['kv_target']).upper()}{gamma}{pages}"


def _category(row: Row, *, models: bool) -> str:
    """A row's context, with batch and model if there are several."""
    return (f"{row['model']}, " if models else "") + f"{row['n_depth']:,}{_sequences(row)}"


def _test(row: Row) -> str:
    return f"{_method(row)}, after {row['n_depth']:,}{_sequences(row)}"


def _sequences(row: Row) -> str:
    ragged = ", ragged" if row.get("ragged") else ""
    return f" × {row['batch']}{ragged}" if row["batch"] > 1 else ""


def _grid(rows: Sequence[Row], value: Callable[[Row], float | None]) -> tuple[list[str], list[Series]]:
    """Values by context (the categories) and method (the series)."""
    models = len({row["model"] for row in rows}) > 1
    categories = unique(_category(row, models=models) for row in rows)
    found = {(_method(row), _category(row, models=models)): value(row) for row in rows}
    names = unique(_method(row) for row in rows)
    return categories, [Series(name, [found.get((name, category)) for category in categories]) for name in names]


def _times(value: float) -> str:
    return f"{value:.2f}×"


def _speedups(rows: Sequence[Row]) -> list[Section]:
    categories, series = _grid(rows, lambda row: row.get("speedup"))
    if any(value is not None for one in series for value in one.values):
        chart = bars(
            categories,
            series,
            x_title="context, tokens",
            y_title="speed-up",
            shown=_times,
            marked=lambda value: f"{value:g}×",
            reference=1.0,
        )
        text = (
            "Compared with plain decoding over an FP16 cache, within repetitions of steady memory bandwidth. A measurement "
            "without such a repetition has no bar."
        )
        names = [one.name for one in series]
        return [Section("Speed-up by context", text, chart, names, table("context", categories, series, _times))]
    categories, series = _grid(rows, lambda row: row["tokens_per_s"])
    if not rows:
        return []
    chart = bars(categories, series, x_title="context, tokens", y_title="tokens/s", shown=render.number)
    text = "Of all sequences together. Speed-ups need rows of plain decoding over an FP16 cache (ar-fp16)."
    names = [one.name for one in series]
    return [
        Section("Tokens per second by context", text, chart, names, table("context", categories, series, render.number))
    ]


def _acceptance_by_gamma(rows: Sequence[Row]) -> list[Section]:
    """Acceptance by fixed γ: one line for each method and context."""
    fixed = [row for row in rows if row["acceptance_rate"] is not None and isinstance(row["gamma"], int)]
    by_line: dict[str, list[tuple[float, float]]] = {}
    for row in fixed:
        name = _test({**row, "gamma": "fixed"}).replace(", γ fixed", "")
        by_line.setdefault(name, []).append((float(row["gamma"]), row["acceptance_rate"]))
    if len({row["gamma"] for row in fixed}) < 2:
        return []
    chart = lines(
        list(by_line.items()),
        x_title="γ, drafted tokens per round",
        y_title="acceptance",
        shown=whole_percent,
        top=1.0,
    )
    table = Table(
        ["method", "γ", "acceptance"],
        [[name, f"{gamma:.0f}", render.percent(rate)] for name, of_line in by_line.items() for gamma, rate in of_line],
    )
    text = "Share of drafted tokens that verification kept."
    return [Section("Acceptance by γ", text, chart, list(by_line), table)]


def _longest_drafts(rows: Sequence[Row]) -> list[tuple[str, Sequence[float] | None]]:
    """For each method and context, the row with the longest drafts and its acceptance by position."""
    found: dict[str, tuple[str, Sequence[float]]] = {}
    for row in rows:
        rates = row.get("acceptance_rate_per_position") or []
        key = _test({**row, "gamma": ""})
        if len(rates) > len(found.get(key, ("", []))[1]):
            found[key] = (_test(row), rates)
    return list(found.values())


def _milliseconds(value: float) -> str:
    return render.seconds(value / 1e3)


def _roofline(rows: Sequence[Row]) -> list[Section]:
    """All measurements under the bandwidth measured around them, and the fastest prompt's compute rate."""
    known = [row for row in rows if row.get("flops_per_token") and row["bytes_per_token"] > 0]
    if not known:
        return []
    names = unique("prompt" if row["test"] == "pp" else _method(row) for row in known)
    prompt = names.index("prompt") if "prompt" in names else None
    points = []
    for row in known:
        name = "prompt" if row["test"] == "pp" else _method(row)
        flops = row["flops_per_token"]
        place = f"{row['test']}{row['n_prompt'] or row['n_gen']}, " + _test(row).replace(_method(row), name, 1)
        rate = flops * 1e3 / row["ms_per_token"]
        points.append(Point(flops / row["bytes_per_token"], rate, place, names.index(name)))
    bandwidth = max(row["bandwidth_gb_per_s"] for row in known) * 1e9
    fastest = max((point.y for point in points if point.series == prompt), default=None)
    table = Table(
        ["measurement", "operations per byte", "GFLOP/s"],
        [[point.name, render.number(point.x), render.number(point.y / 1e9)] for point in points],
    )
    flat = "" if fastest is None else ", the flat part the fastest prompt of this run"
    text = (
        f"The slope is the measured read bandwidth, {render.number(bandwidth / 1e9)} GB/s{flat}. Points above it read from "
        "caches. Rejected drafts count as work."
    )
    return [Section("Roofline", text, roofline(points, bytes_per_s=bandwidth, flops_per_s=fastest), names, table)]


def _rounds(rows: Sequence[Row]) -> list[Section]:
    timed = [row for row in rows if row.get("round_ms")]
    if not timed:
        return []
    parts = [
        Series("draft", [row["draft_ms"] for row in timed]),
        Series("verify", [row["verify_ms"] for row in timed]),
        Series("loop", [max(row["loop_us"], 0) / 1e3 for row in timed]),
    ]
    text = "Mean time of a round: drafting, one pass of the target, and the loop around both."
    models = len({row["model"] for row in rows}) > 1
    names = [(f"{row['model']}: " if models else "") + _test(row) for row in timed]
    return [stack("Time of a round", text, names, parts, unit="time of a round", shown=_milliseconds)]


def _all_rows(rows: Sequence[Row]) -> list[Section]:
    models = len({row["model"] for row in rows}) > 1
    listed = [
        [
            *([row["model"]] if models else []),
            "any" if row["test"] == "pp" else _method(row),
            row["test"] + str(row["n_prompt"] or row["n_gen"]),
            _category(row, models=False),
            render.with_spread(row["ms_per_token"], row["ms_per_token_sd"]),
            render.number(row["tokens_per_s"]),
            f"{row['gb_per_s']:.1f}",
            render.percent(row["bandwidth_share"]),
            render.percent(row["acceptance_rate"]),
        ]
        for row in rows
    ]
    columns = [
        *(["model"] if models else []),
        "method",
        "test",
        "context",
        "ms/token",
        "tokens/s",
        "GB/s",
        "of read",
        "accepted",
    ]
    text = (
        "pp is prefill of this many tokens, tg decoding. Charts of decoding show the longest answers. All fields are in "
        "bench --json."
    )
    return [Section("All measurements", text, None, [], Table(columns, listed))]
