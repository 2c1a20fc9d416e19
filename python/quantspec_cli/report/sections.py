"""Parts that pages of several commands have."""

from __future__ import annotations

import shlex
import sys
import time
from typing import TYPE_CHECKING, Any

from .. import __version__, render
from .charts import Series, lines, stacked
from .page import Section, Table, page

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    Row = Mapping[str, Any]

# Parts of an engine's memory, as named in statistics.
PARTS = {
    "weights_bytes": "weights",
    "draft_weights_bytes": "draft weights",
    "cache_upper_bytes": "cache, upper nibbles",
    "cache_lower_bytes": "cache, lower nibbles",
    "cache_full_bytes": "cache, FP16",
    "buffer_bytes": "recent tokens",
    "workspace_bytes": "workspace",
}


def command_page(
    title: str, models: Sequence[str], row: Row, sections: Sequence[Section], facts: Mapping[str, str] | None = None
) -> str:
    """The page of a command on `models`. `row` has the fields of an engine's `info`; `facts` stand before the machine."""
    simd = f", {row['simd']}" if row.get("simd") else ""
    threads = f", {row['threads']} threads" if row.get("threads") and row.get("device") == "cpu" else ""
    name = f": {row['device_name']}" if row.get("device_name") else ""
    about = {
        "model": ", ".join(models),
        **(facts or {}),
        "machine": f"{row['device']}{name}{simd}{threads}" if row.get("device") else "",
        "version": _version(),
        "command": shlex.join(["quantspec", *sys.argv[1:]]),
        "made": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }
    return page(f"{title}: {', '.join(models)}" if models else title, about, sections)


def _version() -> str:
    """The version, with the commit of the sources if it is known."""
    from .. import _native

    return __version__ if _native.COMMIT is None else f"{__version__}, commit {_native.COMMIT}"


def unique(names: Iterable[str]) -> list[str]:
    """Each name once, in order."""
    return list(dict.fromkeys(names))


def whole_percent(value: float) -> str:
    """A share as an axis shows it."""
    return f"{value:.0%}"


def _bytes(value: float) -> str:
    return render.size(round(value))


def table(first: str, categories: Sequence[str], series: Sequence[Series], shown: Callable[[float], str]) -> Table:
    """The numbers of a chart: a row per category, a column per series. `first` heads the categories."""
    rows = [
        [place, *("-" if one.values[index] is None else shown(one.values[index] or 0.0) for one in series)]
        for index, place in enumerate(categories)
    ]
    return Table([first, *(one.name for one in series)], rows)


def stack(
    title: str, text: str, rows: Sequence[str], parts: Sequence[Series], *, unit: str, shown: Callable[[float], str]
) -> Section:
    """A chart of stacked bars, one for each of `rows`, with its numbers."""
    table = Table(
        ["", *(part.name for part in parts)],
        [[row, *("-" if part.values[index] is None else shown(part.values[index] or 0.0) for part in parts)]
         for index, row in enumerate(rows)],
    )  # fmt: skip
    return Section(title, text, stacked(rows, parts, x_title=unit, shown=shown), [part.name for part in parts], table)


def memory_of(engines: Mapping[str, Row], text: str) -> list[Section]:
    """Memory by part, from the statistics of each model's engine; nothing without any."""
    parts = [
        Series(shown, [stats.get(name) for stats in engines.values()])
        for name, shown in PARTS.items()
        if any(stats.get(name) for stats in engines.values())
    ]
    if not parts:
        return []
    return [stack("Memory", text, list(engines), parts, unit="memory held", shown=_bytes)]


def acceptance_by_position(
    drafted: Sequence[tuple[str, Sequence[float] | None]], *, of: str = "method"
) -> list[Section]:
    """Acceptance by position in the round, of each (name, shares) that has any; `of` heads the names."""
    found = [(name, rates) for name, rates in drafted if rates]
    if not found:
        return []
    points = [(name, [(float(at), rate) for at, rate in enumerate(rates, 1)]) for name, rates in found]
    chart = lines(
        points,
        x_title="position of the drafted token in its round",
        y_title="share of rounds",
        shown=whole_percent,
        top=1.0,
    )
    longest = max(len(rates) for _, rates in found)
    table = Table(
        [of, *(str(at) for at in range(1, longest + 1))],
        [[name, *map(render.percent, rates), *["-"] * (longest - len(rates))] for name, rates in found],
    )
    text = "Share of rounds whose token at that position was kept; rounds that drafted fewer count as not kept."
    return [Section("Acceptance by position", text, chart, [name for name, _ in found], table)]
