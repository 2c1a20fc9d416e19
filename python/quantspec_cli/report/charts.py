"""Charts as SVG text: pure functions of numbers and names.

Colours and fonts are classes, which the page defines for light and dark (`page.STYLE`). `s0` to `s7` are series, with
`pale` eight more; `grid`, `axis` and `label` are the rest. Values that are None, NaN or beyond `LARGEST` are left out.
All text is escaped.
"""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import TypeGuard

WIDTH = 720
# Height of a plot with two axes, its margins, and of a row of bars.
HEIGHT, TOP, RIGHT, BOTTOM, LEFT = 300, 18, 18, 46, 62
ROW = 30
# Mean width of a character in labels of 12 pixels of DejaVu Sans, the widest common font, rounded up.
CHARACTER = 7.2
# Distinct colours. As many further series use pale versions, then colours repeat.
COLOURS = 8
# Beyond every measured quantity; sums and axes of such numbers stay finite.
LARGEST = 1e30
# Most characters of a row's label; longer ones are cut.
LABEL_MAX = 50


@dataclass(frozen=True)
class Series:
    """A name and one value per category; None for a missing value."""

    name: str
    values: Sequence[float | None]


@dataclass(frozen=True)
class Point:
    """A measured point of a plot; belongs to the series with that number."""

    x: float
    y: float
    name: str
    series: int = 0


def colour(series: int) -> str:
    """The class of a series."""
    return f"s{series % COLOURS}" + (" pale" if series // COLOURS % 2 else "")


def escaped(text: object) -> str:
    """Foreign text between tags or in an attribute."""
    return html.escape(one_line(str(text)))


def number(value: float) -> str:
    """Three significant digits, thousands separated."""
    return f"{value:,.0f}" if 100 <= abs(value) < 1e15 else f"{value:.3g}"


def is_usable(value: float | None) -> TypeGuard[float]:
    """True if a value can be drawn: finite and within `LARGEST`."""
    return value is not None and abs(value) <= LARGEST


def usable(values: Iterable[float | None]) -> list[float]:
    """The values that can be drawn."""
    return [value for value in values if is_usable(value)]


def ticks(top: float, count: int = 5) -> list[float]:
    """Round numbers from 0 to the first at or above `top`, about `count` steps of 1, 2 or 5 times a power of ten."""
    if top < 1 / LARGEST:
        return [0.0, 1.0]
    raw = top / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    return [step * index for index in range(math.ceil(top / step - 1e-9) + 1)]


def _svg(height: float, title: str, body: Iterable[str]) -> str:
    inside = "\n".join(body)
    return (
        f'<svg viewBox="0 0 {WIDTH} {_at(height)}" role="img" aria-label="{escaped(title)}" '
        f'xmlns="http://www.w3.org/2000/svg">\n{inside}\n</svg>'
    )


def _at(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


def _text(x: float, y: float, text: str, *, anchor: str = "middle", kind: str = "label") -> str:
    return f'<text x="{_at(x)}" y="{_at(y)}" text-anchor="{anchor}" class="{kind}">{escaped(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{_at(x1)}" y1="{_at(y1)}" x2="{_at(x2)}" y2="{_at(y2)}" class="{kind}"/>'


def _rect(x: float, y: float, width: float, height: float, *, kind: str, title: str) -> str:
    return (
        f'<rect x="{_at(x)}" y="{_at(y)}" width="{_at(max(width, 0))}" height="{_at(max(height, 0))}" '
        f'class="{kind}"><title>{escaped(title)}</title></rect>'
    )


def _circle(x: float, y: float, radius: float, *, kind: str, title: str) -> str:
    return (
        f'<circle cx="{_at(x)}" cy="{_at(y)}" r="{_at(radius)}" class="{kind}"><title>{escaped(title)}</title></circle>'
    )


def _y_axis(
    marks: Sequence[float], y: Callable[[float], float], title: str, shown: Callable[[float], str]
) -> list[str]:
    body = []
    for mark in marks:
        body.append(_line(LEFT, y(mark), WIDTH - RIGHT, y(mark), "axis" if mark == 0 else "grid"))
        body.append(_text(LEFT - 7, y(mark) + 4, shown(mark), anchor="end"))
    middle = (y(marks[0]) + y(marks[-1])) / 2
    body.append(
        f'<text x="14" y="{_at(middle)}" text-anchor="middle" class="title" '
        f'transform="rotate(-90 14 {_at(middle)})">{escaped(title)}</text>'
    )
    return body


def bars(
    categories: Sequence[str],
    series: Sequence[Series],
    *,
    x_title: str,
    y_title: str,
    shown: Callable[[float], str] = number,
    marked: Callable[[float], str] | None = None,
    reference: float | None = None,
) -> str:
    """Grouped bars, one group per category. `shown` formats values, `marked` those of the axis. `reference` is a horizontal
    line, such as 1 for speed-ups.
    """
    values = usable(value for one in series for value in one.values)
    marks = ticks(max([*values, reference or 0, 0]))

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * value / marks[-1]

    body = _y_axis(marks, y, y_title, marked or shown)
    group = (WIDTH - LEFT - RIGHT) / max(len(categories), 1)
    bar = min(group * 0.8 / max(len(series), 1), 64)
    # Value labels are above bars if there is room.
    room = bar >= CHARACTER * max((len(shown(value)) for value in values), default=0)
    for index, category in enumerate(categories):
        middle = LEFT + group * (index + 0.5)
        body.append(_text(middle, HEIGHT - BOTTOM + 17, category))
        for place, one in enumerate(series):
            value = one.values[index]
            if not is_usable(value):
                continue
            x = middle + bar * (place - len(series) / 2)
            title = f"{one.name}, {category}: {shown(value)}"
            body.append(_rect(x + 1, y(value), bar - 2, y(0) - y(value), kind=colour(place), title=title))
            if room:
                body.append(_text(x + bar / 2, y(value) - 4, shown(value), kind="value"))
    if reference is not None:
        body.append(_line(LEFT, y(reference), WIDTH - RIGHT, y(reference), "reference"))
    body.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_title, kind="title"))
    return _svg(HEIGHT, f"{y_title} by {x_title}", body)


def lines(
    series: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    *,
    x_title: str,
    y_title: str,
    shown: Callable[[float], str] = number,
    top: float | None = None,
) -> str:
    """Points joined by lines over an axis of whole numbers from 1; `top` is the end of the other axis."""
    points = [point for _, of_series in series for point in of_series if all(map(is_usable, point))]
    last = max(2, math.ceil(max((x for x, _ in points), default=1)))
    # At most as many numbers as fit.
    x_marks = range(1, last + 1, math.ceil(last / 20))
    marks = ticks(top if top is not None else max((y for _, y in points), default=1))

    def x(value: float) -> float:
        return LEFT + 24 + (WIDTH - LEFT - RIGHT - 48) * (value - 1) / (last - 1)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * value / marks[-1]

    body = _y_axis(marks, y, y_title, shown)
    body += [_text(x(mark), HEIGHT - BOTTOM + 17, number(mark)) for mark in x_marks]
    for place, (name, of_series) in enumerate(series):
        good = [(at, value) for at, value in sorted(of_series) if is_usable(at) and is_usable(value)]
        path = " ".join(f"{_at(x(at))},{_at(y(value))}" for at, value in good)
        if len(good) > 1:
            body.append(f'<polyline points="{path}" class="{colour(place)} stroke"/>')
        for at, value in good:
            title = f"{name}, {x_title} {number(at)}: {shown(value)}"
            body.append(_circle(x(at), y(value), 4, kind=colour(place), title=title))
    body.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_title, kind="title"))
    return _svg(HEIGHT, f"{y_title} by {x_title}", body)


def stacked(
    rows: Sequence[str],
    parts: Sequence[Series],
    *,
    x_title: str,
    shown: Callable[[float], str] = number,
) -> str:
    """Horizontal bars of parts, one per row, with the sum at the end."""
    sums = [sum(max(value, 0) for value in usable(part.values[index] for part in parts)) for index in range(len(rows))]
    names = [one_line(row) for row in rows]
    names = [name if len(name) <= LABEL_MAX else name[: LABEL_MAX - 1] + "…" for name in names]
    # The constant is for short names, which may consist of wide letters.
    left = 20 + CHARACTER * max(map(len, names), default=0)
    marks = ticks(max(sums, default=0))
    # The longest bar leaves room for its sum.
    end = WIDTH - RIGHT - CHARACTER * max((len(shown(total)) for total in sums), default=0) - 6
    bottom = 8 + ROW * len(rows)

    def x(value: float) -> float:
        return left + (end - left) * value / marks[-1]

    body = []
    # Marks whose labels would overlap are left out.
    widest = CHARACTER * max(len(shown(mark)) for mark in marks) + 10
    every = max(1, math.ceil(widest / max(x(marks[1]) - x(0), 1e-9)))
    for index, mark in enumerate(marks):
        if index % every == 0:
            body.append(_line(x(mark), 4, x(mark), bottom, "axis" if mark == 0 else "grid"))
            body.append(_text(x(mark), bottom + 16, shown(mark)))
    for index, name in enumerate(names):
        y, at = 8 + ROW * index, 0.0
        body.append(_text(left - 8, y + ROW / 2 + 1, name, anchor="end"))
        for place, part in enumerate(parts):
            value = part.values[index]
            if not is_usable(value) or value <= 0:
                continue
            width = x(at + value) - x(at)
            title = f"{name}, {part.name}: {shown(value)}"
            body.append(_rect(x(at), y + 3, width, ROW - 10, kind=colour(place), title=title))
            at += value
        body.append(_text(x(at) + 6, y + ROW / 2 + 1, shown(at), anchor="start", kind="value"))
    body.append(_text((left + end) / 2, bottom + 34, x_title, kind="title"))
    return _svg(bottom + 42, x_title, body)


def _powers(low: float, high: float) -> list[float]:
    """Powers of ten that enclose both numbers; at least one step."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [10.0**power for power in range(first, max(last, first + 1) + 1)]


def roofline(points: Sequence[Point], *, bytes_per_s: float, flops_per_s: float | None) -> str:
    """Measured points under a machine's two bounds, with logarithmic axes: operations per byte and operations per second.
    Without the second bound the first one continues.
    """
    good = [point for point in points if is_usable(point.x) and is_usable(point.y) and min(point.x, point.y) > 0]
    bounded = flops_per_s is not None
    if flops_per_s is None:
        flops_per_s = 2 * bytes_per_s * max((point.x for point in good), default=1.0)
    ridge, left = flops_per_s / bytes_per_s, LEFT + 30
    xs = _powers(min([ridge, *(point.x for point in good)]) / 1.5, max([ridge, *(point.x for point in good)]) * 1.5)
    lowest = min([xs[0] * bytes_per_s, *(point.y for point in good)])
    ys = _powers(lowest, max([flops_per_s, *(point.y for point in good)]) * 1.2)

    def x(value: float) -> float:
        return left + (WIDTH - left - RIGHT) * math.log(value / xs[0]) / math.log(xs[-1] / xs[0])

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * math.log(value / ys[0]) / math.log(ys[-1] / ys[0])

    body = []
    for mark in ys:
        body.append(_line(left, y(mark), WIDTH - RIGHT, y(mark), "axis" if mark == ys[0] else "grid"))
        body.append(_text(left - 7, y(mark) + 4, _flops(mark), anchor="end"))
    for mark in xs:
        body.append(_line(x(mark), TOP, x(mark), HEIGHT - BOTTOM, "grid"))
        body.append(_text(x(mark), HEIGHT - BOTTOM + 17, number(mark)))
    start = max(xs[0], ys[0] / bytes_per_s)
    corner = f"{_at(x(ridge))},{_at(y(flops_per_s))}"
    roof = f"{_at(x(start))},{_at(y(start * bytes_per_s))} {corner}"
    if bounded:
        roof += f" {_at(x(xs[-1]))},{_at(y(flops_per_s))}"
    body.append(f'<polyline points="{roof}" class="roof"/>')
    for point in good:
        title = f"{point.name}: {number(point.x)} operations per byte, {_flops(point.y)}"
        body.append(_circle(x(point.x), y(point.y), 5, kind=colour(point.series), title=title))
    body.append(_text((left + WIDTH - RIGHT) / 2, HEIGHT - 8, "operations per byte read", kind="title"))
    return _svg(HEIGHT, "roofline: operations per second by operations per byte", body)


def _flops(value: float) -> str:
    for unit, scale in (("PFLOP/s", 1e15), ("TFLOP/s", 1e12), ("GFLOP/s", 1e9)):
        if value >= 0.9995 * scale:
            return f"{number(value / scale)} {unit}"
    return f"{number(value / 1e6)} MFLOP/s"
