"""`--report`: charts are well-formed, escaped and finite for any input; pages are self-contained."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from conftest import Outcome
from hypothesis import given
from hypothesis import strategies as st

from quantspec_cli import output, render, report, sources
from quantspec_cli.report import charts
from quantspec_cli.report.charts import Point, Series

ROOT = Path(__file__).parents[1]
SVG = "{http://www.w3.org/2000/svg}"
# Names may be any folder name.
names = st.text(min_size=0, max_size=30) | st.sampled_from(
    ["</svg>", "<script>alert(1)</script>", "\"&'", "\x00\x1b[31m", "a\nb"]
)
values = st.none() | st.floats(allow_nan=True, allow_infinity=True) | st.floats(0, 1e12)
sizes = st.floats(1e-9, 1e15)


@st.composite
def grids(draw: st.DrawFn) -> tuple[list[str], list[Series]]:
    categories = draw(st.lists(names, min_size=0, max_size=6))
    rows = st.lists(values, min_size=len(categories), max_size=len(categories))
    return categories, [Series(draw(names), draw(rows)) for _ in range(draw(st.integers(0, 10)))]


def checked(svg: str) -> ElementTree.Element:
    """The chart, parsed, if all its coordinates are numbers inside of it."""
    root = ElementTree.fromstring(svg)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for element in root.iter():
        assert element.tag.removeprefix(SVG) in {"svg", "text", "line", "rect", "polyline", "circle", "title"}
        for name, value in element.attrib.items():
            if name in {"x", "x1", "x2", "cx", "width"}:
                assert -0.1 <= float(value) <= width + 0.1, (name, value)
            if name in {"y", "y1", "y2", "cy", "height"}:
                assert -0.1 <= float(value) <= height + 0.1, (name, value)
            if name == "points":
                assert all(0 <= float(part) <= max(width, height) for part in re.split("[ ,]", value))
            assert not re.search(r"\b(nan|inf)\b", value) or name == "aria-label"
    return root


@given(grids(), names)
def test_bars_have_a_rectangle_for_every_value(grid: tuple[list[str], list[Series]], title: str) -> None:
    categories, series = grid
    positive = [Series(one.name, [None if v is None or v < 0 else v for v in one.values]) for one in series]
    root = checked(charts.bars(categories, positive, x_title=title, y_title=title, reference=1.0))
    drawn = sum(len(charts.usable(one.values)) for one in positive)
    assert len(root.findall(f"{SVG}rect")) == drawn


@given(grids(), names)
def test_stacked_bars_have_a_rectangle_for_every_positive_value(
    grid: tuple[list[str], list[Series]], title: str
) -> None:
    categories, series = grid
    root = checked(charts.stacked(categories, series, x_title=title))
    drawn = sum(value > 0 for one in series for value in charts.usable(one.values))
    assert len(root.findall(f"{SVG}rect")) == drawn


@given(
    st.lists(
        st.tuples(
            names,
            st.lists(
                st.tuples(st.integers(1, 64).map(float), values.filter(lambda v: v is None or not v < 0)), max_size=9
            ),
        ),
        max_size=9,
    )
)
def test_lines_have_a_circle_for_every_point(series: list[tuple[str, list[tuple[float, float | None]]]]) -> None:
    points = [(name, [(x, float("nan") if y is None else y) for x, y in of_series]) for name, of_series in series]
    root = checked(charts.lines(points, x_title="x", y_title="y"))
    drawn = sum(len(charts.usable(y for _, y in of_series)) for _, of_series in points)
    assert len(root.findall(f"{SVG}circle")) == drawn


@given(
    st.lists(st.builds(Point, sizes | st.just(float("nan")), sizes, names, st.integers(0, 20)), max_size=8),
    sizes,
    sizes,
)
def test_a_roofline_has_every_point_and_its_bounds(points: list[Point], read: float, flops: float) -> None:
    root = checked(charts.roofline(points, bytes_per_s=read, flops_per_s=flops))
    assert len(root.findall(f"{SVG}circle")) == sum(point.x == point.x for point in points)
    # A point on a bound is drawn on the roof line.
    corner = Point(flops / read, flops, "corner")
    root = checked(charts.roofline([corner], bytes_per_s=read, flops_per_s=flops))
    circle, roof = root.find(f"{SVG}circle"), root.find(f"{SVG}polyline")
    assert circle is not None
    assert roof is not None
    assert f"{circle.attrib['cx']},{circle.attrib['cy']}" in roof.attrib["points"].split()
    root = checked(charts.roofline(points, bytes_per_s=read, flops_per_s=None))
    slope = root.find(f"{SVG}polyline")
    assert slope is not None
    assert len(slope.attrib["points"].split()) == 2


@given(st.floats(1e-12, 1e15), st.integers(1, 10))
def test_ticks_are_few_round_and_reach_the_top(top: float, count: int) -> None:
    marks = charts.ticks(top, count)
    assert marks[0] == 0
    assert marks[-1] >= top * (1 - 1e-6)
    assert 2 <= len(marks) <= 2 * count + 2
    assert f"{marks[1]:.0e}"[0] in "125"


def test_heights_are_proportions() -> None:
    """Against the axis that the chart itself draws."""
    root = checked(
        charts.bars(["a", "b"], [Series("s", [1.0, 4.0])], x_title="x", y_title="y", shown=lambda v: f"{v:g}")
    )
    heights = [float(rect.attrib["height"]) for rect in root.findall(f"{SVG}rect")]
    assert heights[1] == pytest.approx(4 * heights[0], abs=0.2)
    at = {
        text.text: float(text.attrib["y"]) - 4
        for text in root.findall(f"{SVG}text")
        if text.attrib["text-anchor"] == "end"
    }
    assert at["0"] - at["4"] == pytest.approx(heights[1], abs=0.2)


def test_short_labels_of_wide_letters_fit() -> None:
    root = checked(charts.stacked(["demo"], [Series("s", [1.0])], x_title="x"))
    label = next(text for text in root.findall(f"{SVG}text") if text.text == "demo")
    assert float(label.attrib["x"]) > 34.1, "pixels of DejaVu Sans"


def test_text_is_escaped() -> None:
    name = '<b onload="x">&'
    svg = charts.bars([name], [Series(name, [1.0])], x_title=name, y_title=name)
    assert "<b" not in svg
    assert name in {text.text for text in ElementTree.fromstring(svg).findall(f"{SVG}text")}


# Pages ---------------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Content of a page: tags, addresses, section titles, text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.titles: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        assert self._open == [], "every tag is closed"

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in {"href", "src", "data", "action"}]
        if tag != "meta":
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] != ["style"]:
            self.text += data
        if self._open[-1:] == ["h2"]:
            self.titles.append(data)


def parsed(text: str) -> Page:
    """Parses a page; checks that it has no scripts and nothing external."""
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert page.addresses == []
    assert "</svg>" not in text.replace("</svg></div>", ""), "a narrow window scrolls every chart"
    assert "url(" not in text
    assert "@import" not in text
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"\b(nan|None)\b", page.text)
    return page


def rows() -> list[dict[str, Any]]:
    """Measured rows of a GPU, with the fields that this version adds."""
    found: list[dict[str, Any]] = json.loads((ROOT / "benchmarks/results/h200-wide7.json").read_text())
    return [
        row | {"flops_per_token": 1e10, "acceptance_rate_per_position": [0.9, 0.5] if row["gamma"] else None}
        for row in found
    ]


def test_a_page_of_bench() -> None:
    memory = {"weights_bytes": 13 * 10**9, "draft_weights_bytes": 3 * 10**9, "cache_full_bytes": 0}
    page = parsed(report.bench(rows(), {"wide7": memory}))
    assert page.titles == [
        *("Speed-up by context", "Acceptance by position", "Roofline", "Time of a round", "Memory", "All measurements"),
    ]
    for text in (
        "NVIDIA H200",
        "130,048",
        "quantspec, INT8, γ auto, 64 pages",
        f"{rows()[-2]['speedup']:.2f}×",
        "13 GB",
    ):
        assert text in page.text, text


def test_charts_show_the_longest_answers() -> None:
    short = [row | {"n_gen": 8, "speedup": 77.0, "verify_ms": 98765.0} for row in rows()]
    for both in (rows() + short, short + rows()):
        page = parsed(report.bench(both, {}))
        assert "77.00×" not in page.text
        assert render.seconds(98.765) not in page.text
        # Both are in the table of all measurements, and in the roofline, where their names differ.
        assert (
            page.text.count("tg8, plain, FP16, after 4,096") == page.text.count("tg192, plain, FP16, after 4,096") > 0
        )


def test_every_measurement_has_its_batch() -> None:
    page = parsed(report.bench([row | {"batch": 2, "speedup": None} for row in rows()], {}))
    _, table = page.text.split("All measurements")
    assert table.count("4,096 × 2") == sum(row["n_depth"] == 4096 for row in rows())


def test_missing_measurements_have_no_chart() -> None:
    one = [row | {"speedup": None} for row in rows() if row["method"] == "ar" and row["n_depth"] == 4096]
    titles = parsed(report.bench(one, {})).titles
    assert titles == ["Tokens per second by context", "Roofline", "Time of a round", "All measurements"]
    assert parsed(report.bench([], {})).titles == ["All measurements"]


def test_acceptance_by_gamma_needs_two() -> None:
    of = [row for row in rows() if row["gamma"] == "auto" and row["draft_pages"] == "all"]
    fixed = [row | {"gamma": gamma, "acceptance_rate": 0.9 - gamma / 100} for row in of for gamma in (1, 2, 4)]
    assert "Acceptance by γ" in parsed(report.bench(fixed, {})).titles
    assert "Acceptance by γ" not in parsed(report.bench(fixed[:1], {})).titles


def test_a_chart_of_rounds_has_few_lines() -> None:
    """Each number of pages has a chart of its own, as a chart has 16 distinct colours."""
    score = {"acceptance_rate": 0.5, "tokens_per_round": [1.5, 1.9]}
    decoded = [
        {"depth": depth, "method": method, "draft_pages": pages, **score}
        for depth in (300, 4000)
        for method, default in (("quantspec", "all"), ("window", 16))
        for pages in (default, 4, 16)
    ]
    target = {"nll": 1.0, "perplexity": 2.7, "kld": 0.1, "top1": 0.9}
    found = {"model": "m", "prompt": "p", "positions": 1, "context": 0, "kv_rounding": "balanced", "drafts": {}}
    found |= {"device": "cpu", "device_name": "c", "simd": None, "targets": {"int8": target}, "decoded": decoded}
    text = report.evaluation(found)
    titles = [f"Tokens per round after {depth}" for depth in ("300", "4,000")]
    assert parsed(text).titles[:6] == [title + pages for title in titles for pages in ("", ", 4 pages", ", 16 pages")]
    assert [chart.count("<polyline") for chart in text.split("<h2>")[1:7]] == [2] * 6
    assert text.count("</span>window, 16 pages</li>") == 2, "the default number of pages is named"


def test_a_model_name_is_escaped() -> None:
    name = "<script>alert('x')</script>&\x1b[31m"
    page = parsed(report.bench([row | {"model": name} for row in rows()], {name: {"weights_bytes": 1}}))
    assert "<script>alert('x')</script>&" in page.text


@pytest.mark.slow
def test_pages_of_a_run(quantspec: Callable[..., Outcome], tmp_path: Path) -> None:
    place = tmp_path / "a.html"
    flags = ("-p", "16", "-n", "8", "-d", "0,200", "-r", "2", "-g", "1,2", "--methods", "ar-fp16,quantspec")
    outcome = quantspec("bench", *flags, "--report", str(place), "--device", "cpu", "--json")
    assert outcome.code == 0, outcome
    page = parsed(place.read_text())
    assert {"Acceptance by γ", "Acceptance by position", "Roofline", "Memory"} <= set(page.titles)
    for row in outcome.json:
        assert row["flops_per_token"] > 0
        if row["method"] == "quantspec":
            kept = sum(row["acceptance_rate_per_position"])
            assert kept == pytest.approx(row["mean_acceptance_length"] - 1)
    outcome = quantspec("eval", "--tokens", "600", "--context", "580", "--report", str(place), "--device", "cpu")
    assert outcome.code == 0, outcome
    assert parsed(place.read_text()).titles == [
        "Drafts against the INT8 target",
        "Divergence from the FP16 cache",
        "Views of the cache",
    ]
    flags = ("--tokens", "600", "--context", "590", "--device", "cpu", "--report", str(place))
    found = quantspec("eval", *flags, "--draft-pages", "2,3", "--json").json
    page = parsed(place.read_text())
    assert page.titles[1] == "Acceptance by pages"
    for scores in found["page_choices"].values():
        assert all(f"{score['acceptance']:.1%}" in page.text for score in scores.values())
    found = quantspec("eval", *flags, "--decode", "20", "--depths", "5,300", "--draft-pages", "2", "--json").json
    page = parsed(place.read_text())
    assert page.titles[2:6] == [
        *("Tokens per round after 5", "Tokens per round after 5, 2 pages"),
        *("Tokens per round after 300", "Tokens per round after 300, 2 pages"),
    ]
    for row in found["decoded"]:
        cells = [render.percent(row["acceptance_rate"]), *(f"{tokens:.2f}" for tokens in row["tokens_per_round"])]
        assert "".join(cells) in page.text, row
    assert quantspec("eval", *flags, "--k-axis", "token").code == 0
    assert "keys by token, values by token, groups of 128, rounding balanced" in parsed(place.read_text()).text


@pytest.mark.slow
def test_a_page_of_sensitivity_and_weights(quantspec: Callable[..., Outcome], tmp_path: Path) -> None:
    place = tmp_path / "a.html"
    flags = ("--tokens", "300", "--context", "280", "--weights", "int8", "--report", str(place), "--device", "cpu")
    found = quantspec("eval", *flags, "--sensitivity-layers", "--json").json
    page = parsed(place.read_text())
    assert page.titles == [
        "Drafts against the INT8 target",
        "Acceptance by sensitive matrices",
        "Acceptance by layer",
        "Divergence from the FP16 cache",
        "Views of the cache",
        "Weights",
    ]
    assert f"{found['device_name']}, {found['simd']}" in page.text
    assert f"{found['weights']['int8']['kld']:.2e}" in page.text
    for score in found["sensitivity"].values():
        assert f"{score['acceptance']:.1%}" in page.text
        assert all(f"{rate:.2%}" in page.text for rate in score.get("layers", []))


def test_a_page_names_the_commit_of_the_sources() -> None:
    from quantspec_cli import _native

    built = "" if _native.COMMIT is None else f", commit {_native.COMMIT}"
    assert f"0.1.0{built}" in parsed(report.bench(rows(), {})).text
    assert _native.COMMIT is None or re.fullmatch(r"[0-9a-f]{12,40}( with changes)?", _native.COMMIT)


def test_a_page_of_a_batch(fake: Any, quantspec: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/a<b>.txt").write_text("A text.")
    (tmp_path / "docs/empty.txt").write_text("")
    # In the folder of the answers, which the first run creates.
    place, out = tmp_path / "out" / "a.html", str(tmp_path / "out")
    outcome = quantspec("batch", str(tmp_path / "docs"), "--out", out, "-n", "4", "--report", str(place), "--quiet")
    assert outcome.code == 4, outcome
    page = parsed(place.read_text())
    assert page.titles == ["Time of the engine", "Acceptance by position", "Memory", "Documents"]
    assert "a<b>.txt" in page.text
    reason = "empty.txt is empty"
    assert f'<td class="prose">{reason}</td>' in place.read_text(), "reasons wrap instead of leaving a narrow page"
    # A second run: all is done, and there is no engine to report on.
    outcome = quantspec("batch", str(tmp_path / "docs"), "--out", out, "-n", "4", "--report", str(place), "--quiet")
    assert parsed(place.read_text()).titles == ["Documents"]


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages called full.html find no space at their end, as short ones do."""
    commit = output.AtomicFile.commit

    def refused(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    def committed(file: Any) -> None:
        with monkeypatch.context() as patch:
            if file._path.name == "full.html":
                patch.setattr(os, "fsync", refused)
            commit(file)

    monkeypatch.setattr(output.AtomicFile, "commit", committed)


NO_SPACE = re.compile("error: output .*full.html cannot be written: no space left on device\nhint: .*\n$")


def test_a_page_that_cannot_be_written_costs_no_answers(
    fake: Any, full: None, quantspec: Callable[..., Outcome], tmp_path: Path
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/a.txt").write_text("A text.")
    (tmp_path / "docs/empty.txt").write_text("")
    command = ("batch", str(tmp_path / "docs"), "--out", str(tmp_path / "out"), "-n", "4")
    page = ("--report", str(tmp_path / "full.html"))
    outcome = quantspec(*command, *page)
    assert outcome.code == 1
    assert "failed  empty.txt is empty" in outcome.stderr
    assert "2 documents: 1 done, 1 failed, 0 done before" in outcome.stderr
    assert NO_SPACE.search(outcome.stderr)
    found = quantspec(*command, *page, "--json").json
    assert found["error"]["kind"] == "io"
    assert (found["failed"], found["results"]) == (1, quantspec(*command, "--json").json["results"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["docs", "out"]


@pytest.mark.parametrize(
    ("command", "row"),
    [
        pytest.param("bench -p 0 -n 2 -r 1 --methods ar", "| tg2 ", marks=pytest.mark.slow),
        ("eval --tokens 9 --context 4", "\nkv4 "),
    ],
)
def test_a_page_that_cannot_be_written_costs_no_measurements(
    full: None, quantspec: Callable[..., Outcome], tmp_path: Path, command: str, row: str
) -> None:
    flags = (*command.split(), "--device", "cpu", "--report", str(tmp_path / "full.html"))
    printed = quantspec(*flags)
    assert printed.code == 1
    assert row in printed.stdout
    assert NO_SPACE.search(printed.stderr)
    found = quantspec(*flags, "--json", "--output", str(tmp_path / "a.txt")).json
    assert row in (tmp_path / "a.txt").read_text()
    assert found["error"]["kind"] == "io"
    assert found.get("results") or found["drafts"]


def test_a_report_among_the_documents_that_is_none(
    fake: Any, quantspec: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/a.txt").write_text("A text.")
    for documents, place in (
        ("docs/*.txt", "docs/r.html"),
        ("docs/*", "r.html"),
        ("docs", "docs/.r.html"),
        ("docs", "docs/out/r.html"),
    ):
        for _ in range(2):
            outcome = quantspec("batch", documents, "--out", "docs/out", "-n", "3", "--report", place)
            assert outcome.code == 0, (documents, outcome)
            assert "1 document: " in outcome.stderr
        Path(place).unlink()


def test_a_report_overwrites_no_input_or_output(fake: Any, quantspec: Callable[..., Outcome], tmp_path: Path) -> None:
    text = tmp_path / "docs/a.txt"
    text.parent.mkdir()
    text.write_text("A text.")
    out, docs = str(tmp_path / "out"), str(text.parent)
    quantspec("eval", "--prompt", str(text), "--report", str(text)).assert_error(2, "also an input")
    quantspec("eval", "--output", str(tmp_path / "x"), "--report", str(tmp_path / "x")).assert_error(2, "--output")
    quantspec("bench", "--prompt", str(text), "--report", str(text)).assert_error(2, "also an input")
    quantspec("batch", docs, "--out", out, "--report", f"{docs}/report.html").assert_error(2, "would be a document")
    quantspec("batch", "", "--out", out, "--report", "report.html").assert_error(2, "the name of a document is empty")
    quantspec("batch", str(text), "--out", out, "--report", str(text)).assert_error(2, "also an input")
    quantspec("batch", docs, "--out", out, "--report", "x.html", "--dry-run").assert_error(2, "--dry-run")
    Path(out).mkdir(exist_ok=True)
    quantspec("batch", docs, "--out", out, "--report", f"{out}/a.txt.md").assert_error(2, "also an input")
    for pattern in (f"{docs}/*", f"{docs}/**", f"{tmp_path}/**/*.html"):
        command = ("batch", pattern, "--out", out, "--report", f"{docs}/report.html")
        quantspec(*command).assert_error(2, f"would be a document of {pattern}")
    # The folder of the answers is above the documents.
    command = ("batch", docs, "--out", str(tmp_path), "--report", f"{docs}/report.html")
    quantspec(*command).assert_error(2, "would be a document")
    named = tmp_path / "list.jsonl"
    named.write_text('{"id": "a", "text": "A text."}')
    quantspec("batch", str(named), "--out", out, "--report", str(named)).assert_error(2, "also an input")
    assert named.read_text() == '{"id": "a", "text": "A text."}'
    journal = f"{out}/{sources.STATE}/journal.sqlite"
    quantspec("batch", docs, "--out", out, "--report", journal).assert_error(2, "among the files of the journal")
    for stream in ("-", "/dev/stdout"):
        quantspec("eval", "--report", stream).assert_error(2, "open stream")
    for command in (["eval"], ["bench"], ["batch", str(text), "--out", out]):
        quantspec(*command, "--report", "").assert_error(2, "--report is ''")
    quantspec("bench", "kernels", "--report", "x.html").assert_error(2, "--report does not apply")
    assert text.read_text() == "A text."
    assert not (tmp_path / "docs/report.html").exists()
