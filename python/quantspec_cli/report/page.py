"""A self-contained HTML page of charts: no scripts, nothing external, light or dark by the reader's system."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .charts import colour, escaped

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

# Series use Okabe and Ito's colours, which colour-blind people can distinguish, lightened for dark.
STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c1e21; --soft: #5c6470; --rule: #dfe3e8; --box: #f6f7f9;
  --s0: #0072b2; --s1: #e69f00; --s2: #009e73; --s3: #cc79a7; --s4: #d55e00; --s5: #56b4e9; --s6: #8a8f98; --s7: #6a51a3; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #15181c; --ink: #e8eaed; --soft: #a0a8b3; --rule: #343a42; --box: #1d2127;
    --s0: #4da3dc; --s1: #f0b13c; --s2: #35c29a; --s3: #dd9cc0; --s4: #f0803c;
    --s5: #8acbf0; --s6: #9aa1ab; --s7: #a897d6; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 800px; padding: 32px 24px 64px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 26px; margin: 0 0 16px; } h2 { font-size: 18px; margin: 40px 0 4px; }
p { margin: 4px 0 12px; color: var(--soft); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 3px 20px; margin: 0; padding: 14px 18px;
  background: var(--box); border-radius: 8px; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
code { font: 13px/1.5 ui-monospace, "DejaVu Sans Mono", monospace; }
ul.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; list-style: none; margin: 8px 0; padding: 0; font-size: 13px; }
ul.legend span { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
figure { margin: 0; } svg { display: block; width: 100%; min-width: 600px; height: auto; }
svg text { fill: var(--soft); font-size: 12px; } svg text.value { fill: var(--ink); font-size: 11px; }
.grid { stroke: var(--rule); } .axis { stroke: var(--soft); } .reference { stroke: var(--ink); stroke-dasharray: 5 4; }
.pale { opacity: 0.5; } .roof { fill: none; stroke: var(--soft); stroke-width: 2; }
.stroke { fill: none !important; stroke-width: 2; }
details { margin-top: 8px; font-size: 13px; } summary { cursor: pointer; color: var(--soft); }
div.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 8px 0; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 12px 4px 0; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: var(--soft); font-weight: 600; }
th.prose, td.prose { text-align: left; } td.prose { white-space: normal; overflow-wrap: anywhere; min-width: 9em; }
""" + "\n".join(
    f"svg .s{index} {{ fill: var(--s{index}); }} svg .s{index}.stroke {{ stroke: var(--s{index}); }} "
    f"ul .s{index} {{ background: var(--s{index}); }}"
    for index in range(8)
)


@dataclass(frozen=True)
class Table:
    """Numbers as text, the first column left-aligned; the columns `prose` are left-aligned, too, and wrap."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    prose: Collection[str] = ()

    def html(self) -> str:
        """The table."""
        kinds = [' class="prose"' if name in self.prose else "" for name in self.columns]

        def line(tag: str, cells: Sequence[str]) -> str:
            inside = "".join(f"<{tag}{kind}>{escaped(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
            return f"<tr>{inside}</tr>"

        rows = "\n".join(line("td", row) for row in self.rows)
        return (
            f'<div class="wide"><table><thead>{line("th", self.columns)}</thead>\n<tbody>{rows}</tbody></table></div>'
        )


@dataclass(frozen=True)
class Section:
    """A chart or a table with its explanation.

    Attributes:
        title: the subject.
        text: how to read it, one or two sentences.
        chart: the SVG; None for a table alone.
        legend: names of the series, in the order of their colours; a single series needs none.
        table: the numbers.
    """

    title: str
    text: str
    chart: str | None
    legend: Sequence[str]
    table: Table

    def html(self) -> str:
        """The section."""
        legend = "".join(
            f'<li><span class="{colour(index)}"></span>{escaped(name)}</li>' for index, name in enumerate(self.legend)
        )
        shown = f'<ul class="legend">{legend}</ul>' if len(self.legend) > 1 else ""
        numbers = self.table.html()
        if self.chart is not None:
            numbers = (
                f'{shown}\n<div class="wide">{self.chart}</div>\n<details><summary>Numbers</summary>{numbers}</details>'
            )
        head = f"<h2>{escaped(self.title)}</h2>\n<p>{escaped(self.text)}</p>"
        return f"<section>\n{head}\n<figure>{numbers}</figure>\n</section>"


def page(title: str, about: Mapping[str, str], sections: Iterable[Section]) -> str:
    """The whole page; `about` states what was measured where, and how to repeat it."""
    facts = "\n".join(
        f"<dt>{escaped(name)}</dt><dd>{f'<code>{escaped(value)}</code>' if name == 'command' else escaped(value)}</dd>"
        for name, value in about.items()
        if value
    )
    body = "\n".join(section.html() for section in sections)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escaped(title)}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>{escaped(title)}</h1>\n<dl>\n{facts}\n</dl>\n{body}\n</body>\n</html>\n"
    )
