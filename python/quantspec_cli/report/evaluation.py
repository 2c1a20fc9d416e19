"""The page of `eval`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import render
from .charts import Series, bars, lines, stacked
from .page import Section, Table
from .sections import command_page, table, unique, whole_percent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Row = Mapping[str, Any]


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
        marked=whole_percent,
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
    return command_page("quantspec eval", [found["model"]], about, [one for one in sections if one is not None], facts)


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


def _acceptance_by_pages(choices: Mapping[str, Mapping[str, Row]]) -> list[Section]:
    """Acceptance of a draft by the pages it reads, for each way to choose them."""
    names = unique(name for scores in choices.values() for name in scores)
    if not names:
        return []
    series = [Series(name, [scores[name]["acceptance"] for scores in choices.values()]) for name in names]
    chart = bars(
        list(choices), series, x_title="pages", y_title="acceptance", shown=render.percent, marked=whole_percent
    )
    text = (
        "Drafts of quantspec that read this many pages, by the choice of the pages; tokens reads as many single tokens."
    )
    return [Section("Acceptance by pages", text, chart, names, table("pages", list(choices), series, render.percent))]


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


def _nats(value: float) -> str:
    return f"{value:.1e}" if value else "0"


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
        marked=whole_percent,
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
