"""`--report FILE`: the results of `bench`, `eval` or `batch` as one page of charts with their numbers.

`charts` draws, `page` lays out, and this module selects the content. A chart without data is left out; a page without
charts says so.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from typing import TYPE_CHECKING, Any

from .. import __version__, output, render
from ..errors import UsageError
from ..options import METHODS
from .charts import Point, Series, bars, lines, roofline, stacked
from .page import Section, Table, page

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

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
# Most documents in a table; a longer page is unreadable.
DOCUMENTS_MAX = 200


@contextlib.contextmanager
def opened(
    path: str | None, inputs: Iterable[str | None], other: str | None = None
) -> Iterator[output.AtomicFile | None]:
    """The file of `--report` while the body runs, None if there is none. Refuses to overwrite an input or the file of
    `--output`, which is `other`.
    """
    if path == "":
        raise UsageError("--report is ''", "name a file, such as report.html", option="report")
    if path is not None and (path == "-" or output.descriptor(path) is not None):
        raise UsageError(f"--report {path} is an open stream", "name a file, such as report.html", option="report")
    with output.opened(path, inputs) as file:
        if file is not None and other is not None and file.is_at(other):
            raise UsageError(f"--report and --output are both {path}", "name two files", option="report")
        yield file


def bench(rows: Sequence[Row], memory: Mapping[str, Row]) -> str:
    """The page of `bench`: its rows, and the statistics of each model's engine."""
    decoded = _longest_answers(rows)
    sections = [
        *_speedups(decoded),
        *_acceptance_by_gamma(decoded),
        *_acceptance_by_position(_longest_drafts(decoded)),
        *_roofline(rows),
        *_rounds(decoded),
        *_memory(memory, "Memory of the engine; a benchmark keeps every view of the cache."),
        *_all_rows(rows),
    ]
    first = rows[0] if rows else {}
    return _page("quantspec bench", _unique(row["model"] for row in rows), first, sections)


def evaluation(found: Row) -> str:
    """The page of `eval`: its document."""
    drafts = {name: score for name, score in found["drafts"].items() if score["acceptance"] is not None}
    names = list(drafts)
    chart = bars(
        names,
        [
            Series("acceptance", [drafts[name]["acceptance"] for name in names]),
            Series("top-1 agreement", [drafts[name]["top1"] for name in names]),
        ],
        x_title="draft",
        y_title="share of positions",
        shown=render.percent,
        marked=_whole_percent,
    )
    sections = [
        Section(
            "Drafts against the INT8 target",
            "Acceptance is the chance that verification keeps a drafted token at temperature 1; top-1 is agreement of the "
            "most likely token.",
            chart,
            ["acceptance", "top-1 agreement"],
            Table(
                ["draft", "acceptance", "top-1"],
                [
                    [name, render.percent(one["acceptance"]), render.percent(one["top1"])]
                    for name, one in drafts.items()
                ],
            ),
        )
        if names
        else None,
        *_acceptance_by_pages(found.get("page_choices", {})),
        *_tokens_per_round(found.get("decoded", ())),
        *_sensitivity(found.get("sensitivity", {})),
        *_divergence(found["targets"]),
        _views(found["targets"]),
        *_weights(found.get("weights", {})),
    ]
    about = {name: found[name] for name in ("device", "device_name", "simd")}
    facts = {"text": f"{found['prompt']}, {found['positions']:,} positions after {found['context']:,} tokens"}
    if cache := render.rounding(found):
        facts["cache"] = cache
    return _page("quantspec eval", [found["model"]], about, [one for one in sections if one is not None], facts)


def _views(targets: Row) -> Section:
    """Scores of the target over each view of the cache."""
    return Section(
        "Views of the cache",
        "Scores of the target over each view of the cache, teacher-forced. KLD and top-1 are against the FP16 cache.",
        None,
        [],
        Table(
            ["view", "nll, nats", "perplexity", "KLD, nats", "top-1"],
            [
                [
                    name,
                    f"{one['nll']:.5f}",
                    f"{one['perplexity']:.4f}",
                    f"{one['kld']:.2e}" if "kld" in one else "-",
                    render.percent(one.get("top1")),
                ]
                for name, one in targets.items()
            ],
        ),
    )


def batch(document: Row, engine: Row) -> str:
    """The page of `batch`: its document, and the engine's `info`, empty if nothing was decoded."""
    stats = document["stats"]
    sections = []
    if stats.get("decode_s") is not None:
        names = {"load_s": "load", "prefill_s": "prompts", "draft_s": "draft", "verify_s": "verify"}
        spent = [Series(shown, [stats[name]]) for name, shown in names.items()]
        sections.append(
            _stack(
                "Time of the engine",
                "Loading, reading prompts, drafting and verifying.",
                ["engine"],
                spent,
                unit="time",
                shown=render.seconds,
            )
        )
        sections += _acceptance_by_position([(document["model"], stats["acceptance_rate_per_position"])], of="model")
        sections += _memory({document["model"]: stats}, "Memory of the engine.")
    results = document["results"]
    listed = results[:DOCUMENTS_MAX]
    more = f" The first {DOCUMENTS_MAX} of {len(results):,}." if len(results) > len(listed) else ""
    sections.append(
        Section(
            "Documents",
            f"{document['done']} done, {document['failed']} failed, {document['skipped']} skipped.{more}",
            None,
            [],
            Table(
                ["document", "status", "prompt tokens", "new tokens", "seconds", "ended by", "warnings"],
                [
                    [
                        row["document"],
                        row["status"],
                        "-" if row["prompt_tokens"] is None else f"{row['prompt_tokens']:,}",
                        f"{row['new_tokens']:,}",
                        f"{row['seconds']:.2f}",
                        row["stop_reason"] or (row["error"] or {}).get("message", "-"),
                        "; ".join(row.get("warnings", ())),
                    ]
                    for row in listed
                ],
                prose=("document", "ended by", "warnings"),
            ),
        )
    )
    facts = {
        "documents": f"{document['documents']:,}",
        "speed": ""
        if stats["documents_per_hour"] is None
        else f"{render.number(stats['documents_per_hour'])} documents/h",
    }
    return _page("quantspec batch", [document["model"]], engine, sections, facts)


# Parts ---------------------------------------------------------------------------------------------------------------


def _page(
    title: str, models: Sequence[str], row: Row, sections: Sequence[Section], facts: Mapping[str, str] | None = None
) -> str:
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


def _longest_answers(rows: Sequence[Row]) -> list[Row]:
    """The decoding rows; of rows that differ only in the answers' length, which labels do not show, the longest."""
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = (row["model"], _test(row))
        if row["test"] == "tg" and (key not in found or found[key]["n_gen"] < row["n_gen"]):
            found[key] = row
    return list(found.values())


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


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
    categories = _unique(_category(row, models=models) for row in rows)
    found = {(_method(row), _category(row, models=models)): value(row) for row in rows}
    names = _unique(_method(row) for row in rows)
    return categories, [Series(name, [found.get((name, category)) for category in categories]) for name in names]


def _table(first: str, categories: Sequence[str], series: Sequence[Series], shown: Callable[[float], str]) -> Table:
    rows = [
        [place, *("-" if one.values[index] is None else shown(one.values[index] or 0.0) for one in series)]
        for index, place in enumerate(categories)
    ]
    return Table([first, *(one.name for one in series)], rows)


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
        return [Section("Speed-up by context", text, chart, names, _table("context", categories, series, _times))]
    categories, series = _grid(rows, lambda row: row["tokens_per_s"])
    if not rows:
        return []
    chart = bars(categories, series, x_title="context, tokens", y_title="tokens/s", shown=render.number)
    text = "Of all sequences together. Speed-ups need rows of plain decoding over an FP16 cache (ar-fp16)."
    names = [one.name for one in series]
    return [
        Section(
            "Tokens per second by context", text, chart, names, _table("context", categories, series, render.number)
        )
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
        shown=_whole_percent,
        top=1.0,
    )
    table = Table(
        ["method", "γ", "acceptance"],
        [[name, f"{gamma:.0f}", render.percent(rate)] for name, of_line in by_line.items() for gamma, rate in of_line],
    )
    text = "Share of drafted tokens that verification kept."
    return [Section("Acceptance by γ", text, chart, list(by_line), table)]


def _acceptance_by_pages(choices: Mapping[str, Mapping[str, Row]]) -> list[Section]:
    """Acceptance of a draft by the pages it reads, for each way to choose them."""
    names = _unique(name for scores in choices.values() for name in scores)
    if not names:
        return []
    series = [Series(name, [scores[name]["acceptance"] for scores in choices.values()]) for name in names]
    chart = bars(
        list(choices), series, x_title="pages", y_title="acceptance", shown=render.percent, marked=_whole_percent
    )
    text = (
        "Drafts of quantspec that read this many pages, by the choice of the pages; tokens reads as many single tokens."
    )
    return [Section("Acceptance by pages", text, chart, names, _table("pages", list(choices), series, render.percent))]


def _tokens_per_round(decoded: Sequence[Row]) -> list[Section]:
    """Tokens of a round of every drafter by γ: a chart for each context, and for each number of pages beyond the default."""
    charts: dict[tuple[int, str], dict[str, Row]] = {}
    for row in decoded:
        of_context = charts.setdefault((row["depth"], ""), {})
        if row["method"] not in of_context:
            of_context[row["method"]] = row
        else:
            charts.setdefault((row["depth"], f", {row['draft_pages']} pages"), {})[row["method"]] = row
    sections = []
    for (depth, pages), rows in charts.items():
        named = {
            method + ("" if pages or row["draft_pages"] == "all" else f", {row['draft_pages']} pages"): row
            for method, row in rows.items()
        }
        chart = lines(
            [
                (name, [(float(at), of) for at, of in enumerate(row["tokens_per_round"], 1)])
                for name, row in named.items()
            ],
            x_title="γ, drafted tokens per round",
            y_title="tokens per round",
        )
        longest = max(len(row["tokens_per_round"]) for row in rows.values())
        table = Table(
            ["method", "accepted", *(f"γ {gamma}" for gamma in range(1, longest + 1))],
            [
                [name, render.percent(row["acceptance_rate"]), *(f"{of:.2f}" for of in row["tokens_per_round"])]
                for name, row in named.items()
            ],
        )
        text = "Tokens that a round emits. Accepted is the share of all tokens of the longest drafts."
        sections.append(Section(f"Tokens per round after {depth:,}{pages}", text, chart, list(named), table))
    return sections


def _longest_drafts(rows: Sequence[Row]) -> list[tuple[str, Sequence[float] | None]]:
    """For each method and context, the row with the longest drafts and its acceptance by position."""
    found: dict[str, tuple[str, Sequence[float]]] = {}
    for row in rows:
        rates = row.get("acceptance_rate_per_position") or []
        key = _test({**row, "gamma": ""})
        if len(rates) > len(found.get(key, ("", []))[1]):
            found[key] = (_test(row), rates)
    return list(found.values())


def _acceptance_by_position(
    drafted: Sequence[tuple[str, Sequence[float] | None]], *, of: str = "method"
) -> list[Section]:
    found = [(name, rates) for name, rates in drafted if rates]
    if not found:
        return []
    points = [(name, [(float(at), rate) for at, rate in enumerate(rates, 1)]) for name, rates in found]
    chart = lines(
        points,
        x_title="position of the drafted token in its round",
        y_title="share of rounds",
        shown=_whole_percent,
        top=1.0,
    )
    longest = max(len(rates) for _, rates in found)
    table = Table(
        [of, *(str(at) for at in range(1, longest + 1))],
        [[name, *map(render.percent, rates), *["-"] * (longest - len(rates))] for name, rates in found],
    )
    text = "Share of rounds whose token at that position was kept; rounds that drafted fewer count as not kept."
    return [Section("Acceptance by position", text, chart, [name for name, _ in found], table)]


def _whole_percent(value: float) -> str:
    return f"{value:.0%}"


def _milliseconds(value: float) -> str:
    return render.seconds(value / 1e3)


def _bytes(value: float) -> str:
    return render.size(round(value))


def _nats(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def _roofline(rows: Sequence[Row]) -> list[Section]:
    """All measurements under the bandwidth measured around them, and the fastest prompt's compute rate."""
    known = [row for row in rows if row.get("flops_per_token") and row["bytes_per_token"] > 0]
    if not known:
        return []
    names = _unique("prompt" if row["test"] == "pp" else _method(row) for row in known)
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


def _stack(
    title: str, text: str, rows: Sequence[str], parts: Sequence[Series], *, unit: str, shown: Callable[[float], str]
) -> Section:
    table = Table(
        ["", *(part.name for part in parts)],
        [[row, *("-" if part.values[index] is None else shown(part.values[index] or 0.0) for part in parts)]
         for index, row in enumerate(rows)],
    )  # fmt: skip
    return Section(title, text, stacked(rows, parts, x_title=unit, shown=shown), [part.name for part in parts], table)


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
    return [_stack("Time of a round", text, names, parts, unit="time of a round", shown=_milliseconds)]


def _memory(memory: Mapping[str, Row], text: str) -> list[Section]:
    parts = [
        Series(shown, [stats.get(name) for stats in memory.values()])
        for name, shown in PARTS.items()
        if any(stats.get(name) for stats in memory.values())
    ]
    if not parts:
        return []
    return [_stack("Memory", text, list(memory), parts, unit="memory held", shown=_bytes)]


def _divergence(targets: Mapping[str, Row]) -> list[Section]:
    known = {name: one["kld"] for name, one in targets.items() if one.get("kld")}
    if not known:
        return []
    chart = stacked(
        list(known), [Series("KLD", list(known.values()))], x_title="KLD to the FP16 cache, nats", shown=_nats
    )
    table = Table(["view", "KLD, nats"], [[name, _nats(value)] for name, value in known.items()])
    return [Section("Divergence from the FP16 cache", "Mean over all positions.", chart, ["KLD"], table)]


def _sensitivity(scores: Mapping[str, Row]) -> list[Section]:
    """Acceptance of the default draft with each kind of matrices in 8 bits, and by layer if that was scored."""
    if not scores:
        return []
    names = list(scores)
    chart = bars(
        names,
        [Series("acceptance", [scores[name]["acceptance"] for name in names])],
        x_title="matrices in 8 bits",
        y_title="acceptance",
        shown=render.percent,
        marked=_whole_percent,
    )
    table = Table(
        ["in 8 bits", "acceptance", "top-1", "draft bytes", "value"],
        [
            [
                name,
                render.percent(one["acceptance"]),
                render.percent(one["top1"]),
                f"+{one['added_share']:.1%}",
                "-" if one["value"] is None else f"{one['value']:.3f}",
            ]
            for name, one in scores.items()
        ],
    )
    text = (
        "The default draft with one kind of matrices in 8 bits. Value: acceptance gained over the share of bytes added."
    )
    sections = [Section("Acceptance by sensitive matrices", text, chart, ["acceptance"], table)]
    by_layer = {name: one["layers"] for name, one in scores.items() if "layers" in one}
    if by_layer:
        rows = zip(*by_layer.values(), strict=True)
        table = Table(
            ["layer", *by_layer], [[str(layer), *(f"{rate:.2%}" for rate in row)] for layer, row in enumerate(rows)]
        )
        text = "The default draft with one matrix in the target's precision."
        sections.append(Section("Acceptance by layer", text, None, [], table))
    return sections


def _weights(scores: Mapping[str, Row]) -> list[Section]:
    if not scores:
        return []
    table = Table(
        ["weights", "KLD, nats", "top-1"],
        [[name, f"{one['kld']:.2e}", render.percent(one["top1"])] for name, one in scores.items()],
    )
    text = "Divergence of the quantised weights from the checkpoint's, both over an FP16 cache."
    return [Section("Weights", text, None, [], table)]


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
