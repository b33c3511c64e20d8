"""Charts as SVG without a library or a script; colours come from the style sheet, for dark mode, print and offline use.

Each chart is drawn in two widths with the same font size, so that its text is readable on a phone. Names of series are
in a legend outside the drawing, where none is cut off. A label is left out if there is no free place for it; the
tooltip has its value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from typing import NamedTuple


class PlotSize(NamedTuple):
    width: int
    height: int


WIDE, NARROW = PlotSize(560, 330), PlotSize(340, 280)
LEFT, RIGHT, TOP, BOTTOM = 50, 18, 30, 42
COLOURS = 8
"""Number of series colours in the style sheet, s0 to s7; further series reuse them with other markers."""
MARKS = ("circle", "square", "triangle", "diamond")
WIDE_RATIO = 20.0
"""Ratio of the largest to the smallest value above which the axis is logarithmic."""
LETTER, LINE = 7.0, 13.0
"""Width of a letter and height of a line, in pixels, for the places of labels."""
CLEAR_STEP = 4.0
"""Distance in pixels of the points of a line that labels avoid."""
MOST_STEPS = 100
"""Steps of one curve of a distribution."""
PLACES = ((0, -9, "middle"), (9, 4, "start"), (0, 18, "middle"), (-9, 4, "end"))
"""Where the label of a marker may be, the best first: offset and anchor."""


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    label: str = ""
    """Printed next to the marker."""
    title: str = ""
    """Tooltip."""
    hollow: bool = False
    ring: bool = False


@dataclass(frozen=True)
class PlotSeries:
    name: str
    points: tuple[Point, ...]
    number: int = 0

    @property
    def style(self) -> str:
        return f"s{self.number % COLOURS}"

    @property
    def mark(self) -> str:
        return MARKS[self.number % len(MARKS)]


class LegendEntry(NamedTuple):
    svg: str
    """A small drawing of the marker or line."""
    name: str


def make_legend(series: Sequence[PlotSeries]) -> tuple[LegendEntry, ...]:
    return tuple(LegendEntry(_draw_key(_draw_mark(one.mark, 8, 7, one.style)), one.name) for one in series)


def _draw_key(inside: str) -> str:
    return f'<svg viewBox="0 0 16 14" class="key" aria-hidden="true">{inside}</svg>'


@dataclass(frozen=True)
class Scale:
    """Maps values to pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, at = math.log10(low), math.log10(high), math.log10(at)
        return self.start + (self.end - self.start) * ((at - low) / (high - low) if high > low else 0.5)

    def choose_ticks(self) -> list[float]:
        return _choose_log_ticks(self.low, self.high) if self.log else _choose_ticks(self.low, self.high)

    def choose_small_ticks(self) -> list[float]:
        """Ticks without a label on a logarithmic axis, at every multiple of a power of ten."""
        few = self.log and self.high < 1e6 * self.low
        return _list_multiples(self.low, self.high, range(1, 10)) if few else []


def _choose_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round values, about `wanted` of them."""
    step = (high - low) / wanted or 1.0
    power = 10.0 ** math.floor(math.log10(step))
    step = next(power * one for one in (1, 2, 2.5, 5, 10) if power * one >= step * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _choose_log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1,) if len(powers) > 5 else (1, 2, 5) if len(powers) > 2 else (1, 2, 3, 5, 7)
    return _list_multiples(low, high, factors)


def _list_multiples(low: float, high: float, factors: Sequence[int]) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [found for power in powers for one in factors if low * 0.999 <= (found := one * 10.0**power) <= high * 1.001]


def make_scale(
    values: Iterable[float], start: float, end: float, *, zero: bool = False, log: bool | None = None
) -> Scale:
    """A scale that covers all values with a margin; logarithmic for wide ranges unless `log` is given."""
    positive = sorted(value for value in values if math.isfinite(value) and value > 0)
    if not positive:
        return Scale(0.0, 1.0, start, end)
    low, high = positive[0], positive[-1]
    if log is None:
        log = not zero and high / low > WIDE_RATIO
    if log:
        return Scale(low / 1.25, high * 1.25, start, end, log=True)
    if zero or low < 0.4 * high:
        return Scale(0.0, high * 1.08, start, end)
    margin = 0.15 * (high - low) or 0.1 * high
    return Scale(max(0.0, low - margin), high + margin, start, end)


def format_number(value: float) -> str:
    """A short label for an axis, such as 12k."""
    for limit, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit * 0.9999:
            return f"{value / (1e3 if unit == 'k' else limit):.4g}{unit}"
    return f"{value:.4g}"


def _format_rate(value: float) -> str:
    """The same with a space, for a unit after it: 18.9 G."""
    text = format_number(value)
    return f"{text[:-1]} {text[-1]}" if text[-1].isalpha() else f"{text} "


def format_percent(value: float) -> str:
    return f"{value:.0%}"


class Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


@dataclass
class Chart:
    """A chart under construction: frame, axes and content."""

    title: str
    size: PlotSize
    x: Scale
    y: Scale | None
    x_name: str
    y_name: str
    format_y: Callable[[float], str] = format_number
    parts: list[str] = field(default_factory=list)
    labels: list[tuple[float, float, str, float]] = field(default_factory=list)
    """Position, text and additional distance from the marker."""
    taken: list[Box] = field(default_factory=list)
    """Markers and placed labels."""

    def add(self, *parts: str) -> None:
        self.parts.extend(parts)

    def add_mark(self, series: PlotSeries, point: Point) -> None:
        if self.y is None:
            return
        x, y = self.x(point.x), self.y(point.y)
        self.add(_draw_mark(series.mark, x, y, series.style, point))
        size = 10 if point.ring else 6
        self.taken.append(Box(x - size, y - size, x + size, y + size))
        if point.label:
            self.labels.append((x, y, point.label, size - 6.0))

    def keep_clear(self, begin: tuple[float, float], end: tuple[float, float]) -> None:
        """No label is drawn over this line."""
        steps = max(1, round(math.dist(begin, end) / CLEAR_STEP))
        for step in range(steps + 1):
            x, y = (a + (b - a) * step / steps for a, b in zip(begin, end, strict=True))
            self.taken.append(Box(x - 1, y - 1, x + 1, y + 1))

    def _draw_labels(self) -> str:
        """Each label at the first free place next to its marker."""
        parts = []
        for x, y, text, more in self.labels:
            half = LETTER * len(text) / 2
            for place_x, place_y, anchor in PLACES:
                dx = place_x + math.copysign(more, place_x) if place_x else 0.0
                dy = place_y if place_x else place_y + math.copysign(more, place_y)
                middle = x + dx + {"start": half, "end": -half}.get(anchor, 0)
                box = Box(middle - half, y + dy - LINE + 3, middle + half, y + dy + 3)
                is_inside = box.left >= LEFT and box.right <= self.size.width and box.top >= TOP - 8
                if is_inside and box.bottom <= self.size.height - BOTTOM and not any(map(box.overlaps, self.taken)):
                    self.taken.append(box)
                    at = f'x="{x + dx:.1f}" y="{y + dy:.1f}"'
                    parts.append(f'<text {at} text-anchor="{anchor}" class="tick">{escape(text)}</text>')
                    break
        return "".join(parts)

    def to_svg(self) -> str:
        width, height = self.size
        kind = "narrow" if width == NARROW.width else "wide"
        return (
            f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
            f'aria-label="{escape(self.title)}" class="plot {kind}">'
            f"{self._draw_axes()}{''.join(self.parts)}{self._draw_labels()}</svg>"
        )

    def _draw_axes(self) -> str:
        width, bottom, parts = self.size.width, self.size.height - BOTTOM, []
        small = self.x.choose_small_ticks()
        parts += [f'<path d="M{self.x(tick):.1f} {bottom}v4" class="small"/>' for tick in small]
        end = -math.inf
        for tick in self.x.choose_ticks():
            at, text = self.x(tick), format_number(tick)
            parts.append(f'<path d="M{at:.1f} {TOP}V{bottom}" class="grid"/>')
            half = LETTER * len(text) / 2
            if at - half > end and at + half <= width:  # on a narrow chart every label may not fit
                end = at + half + 4
                parts.append(f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle" class="tick">{text}</text>')
        if self.y is not None:
            parts += [
                f'<path d="M{LEFT} {self.y(tick):.1f}h-4" class="small"/>' for tick in self.y.choose_small_ticks()
            ]
            for tick in self.y.choose_ticks():
                at = self.y(tick)
                parts.append(f'<path d="M{LEFT} {at:.1f}H{width - RIGHT}" class="grid"/>')
                parts.append(
                    f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end" class="tick">{self.format_y(tick)}</text>'
                )
            name = f"{self.y_name}{' (log)' if self.y.log else ''}"
            parts.append(f'<text x="2" y="12" class="axis">{escape(name)}</text>')
        parts.append(
            f'<text x="{width - RIGHT}" y="{self.size.height - 6}" text-anchor="end" class="axis">'
            f"{escape(self.x_name)}{' (log)' if self.x.log else ''}</text>"
        )
        return "".join(parts)


_NO_POINT = Point(0, 0)


def _draw_mark(kind: str, x: float, y: float, style: str, point: Point = _NO_POINT) -> str:
    size = 4.5
    look = f'class="mark {style}{" hollow" if point.hollow else ""}"'
    title = f"<title>{escape(point.title)}</title>" if point.title else ""
    ring = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" class="ring {style}"/>' if point.ring else ""
    if kind == "circle":
        return f'{ring}<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}" {look}>{title}</circle>'
    shapes: dict[str, list[tuple[float, float]]] = {
        "square": [(-1, -1), (1, -1), (1, 1), (-1, 1)],
        "triangle": [(0, -1.2), (1.15, 0.9), (-1.15, 0.9)],
        "diamond": [(0, -1.35), (1.2, 0), (0, 1.35), (-1.2, 0)],
    }
    points = " ".join(f"{x + size * dx:.1f},{y + size * dy:.1f}" for dx, dy in shapes[kind])
    return f'{ring}<polygon points="{points}" {look}>{title}</polygon>'


def draw_lines(title: str, series: Sequence[PlotSeries], x_name: str, y_name: str, size: PlotSize = WIDE) -> str:
    """Each series as markers joined by a line."""
    every = [point for one in series for point in one.points]
    x = make_scale((point.x for point in every), LEFT, size.width - RIGHT)
    y = make_scale((point.y for point in every), size.height - BOTTOM, TOP)
    chart = Chart(title, size, x, y, x_name, y_name)
    for one in series:
        path = " ".join(f"{x(point.x):.1f},{y(point.y):.1f}" for point in one.points)
        chart.add(f'<polyline points="{path}" class="line {one.style}"/>')
        for begin, end in pairwise(one.points):
            chart.keep_clear((x(begin.x), y(begin.y)), (x(end.x), y(end.y)))
    for one in series:
        for point in one.points:
            chart.add_mark(one, point)
    return chart.to_svg()


def draw_distributions(
    title: str, samples: Sequence[tuple[str, int, Sequence[float]]], x_name: str, size: PlotSize = WIDE
) -> str:
    """Cumulative distribution of (name, series number, values), with markers at the median and the 95th percentile."""
    x = make_scale((value for _, _, values in samples for value in values), LEFT, size.width - RIGHT)
    y = Scale(0.0, 1.0, size.height - BOTTOM, TOP)
    chart = Chart(title, size, x, y, x_name, "share of requests that are faster", format_percent)
    for name, number, values in samples:
        ordered = sorted(values)
        if not ordered:
            continue
        series = PlotSeries(name, (), number)
        count = min(len(ordered), MOST_STEPS)
        path = [f"M{x(ordered[0]):.1f} {y(0):.1f}"]
        for step in range(1, count + 1):
            rank = round(step * len(ordered) / count)
            path.append(f"H{x(ordered[rank - 1]):.1f}V{y(rank / len(ordered)):.1f}")
        chart.add(f'<path d="{"".join(path)}" class="line {series.style}"/>')
        for share in (0.5, 0.95):
            value = ordered[max(0, math.ceil(share * len(ordered)) - 1)]
            words = f"{name}: {share:.0%} of {len(ordered):,} requests within {format_number(value)} ms"
            chart.add_mark(series, Point(value, share, title=words))
    return chart.to_svg()


def draw_roofline(
    title: str,
    points: Sequence[PlotSeries],
    bytes_s: float | None,
    operations_s: float | None,
    size: PlotSize = WIDE,
) -> str:
    """Operations per second over operations per byte; the roof is the upper bound."""
    every = [point for one in points for point in one.points]
    xs = [point.x for point in every]
    ys = [point.y for point in every]
    if bytes_s and operations_s:
        xs += [operations_s / bytes_s * 2, min(xs) / 2]
        ys += [operations_s * 1.6]
    x = make_scale(xs, LEFT, size.width - RIGHT, log=True)
    if bytes_s:
        ys += [bytes_s * x.low, min(operations_s or math.inf, bytes_s * x.high)]
    y = make_scale(ys, size.height - BOTTOM, TOP, log=True)
    chart = Chart(title, size, x, y, "operations per byte read", "operations per second")
    if bytes_s:
        knee = min(operations_s / bytes_s, x.high) if operations_s else x.high
        roof = [(x.low, bytes_s * x.low), (knee, bytes_s * knee)]
        roof += [(x.high, operations_s)] if operations_s and knee < x.high else []
        ends = [(x(at), y(high)) for at, high in roof]
        chart.add(f'<polyline points="{" ".join(f"{at:.1f},{high:.1f}" for at, high in ends)}" class="roof"/>')
        _name_roofs(chart, ends, f"memory {_format_rate(bytes_s)}B/s", operations_s)
    for one in points:
        for point in one.points:
            chart.add_mark(one, point)
    return chart.to_svg()


def _name_roofs(chart: Chart, ends: Sequence[tuple[float, float]], memory: str, operations_s: float | None) -> None:
    """The names above the roofs, where no point can be; only as far as they fit."""
    (left, low), (knee, high) = ends[0], ends[1]
    length = math.hypot(knee - left, high - low)
    if length > LETTER * len(memory) + 20:
        turn = math.degrees(math.atan2(high - low, knee - left))
        at = f"translate({(left + knee) / 2:.1f} {(low + high) / 2:.1f}) rotate({turn:.1f})"
        chart.add(f'<text transform="{at}" dy="-7" text-anchor="middle" class="tick">{escape(memory)}</text>')
    if operations_s and len(ends) > 2:
        compute = f"compute {_format_rate(operations_s)}op/s"
        at = f'x="{ends[2][0]:.1f}" y="{ends[2][1] - 7:.1f}"'
        chart.add(f'<text {at} text-anchor="end" class="tick">{escape(compute)}</text>')


@dataclass(frozen=True)
class Bar:
    name: str
    parts: tuple[tuple[str, float], ...]
    """(kind, amount), from left to right; the kinds are the style sheet's k0, k1, … in the order they first occur."""


def make_bar_legend(bars: Sequence[Bar]) -> tuple[LegendEntry, ...]:
    kinds = dict.fromkeys(kind for bar in bars for kind, _ in bar.parts)
    box = '<rect x="2" y="1" width="12" height="12" class="k{}"/>'
    return tuple(LegendEntry(_draw_key(box.format(order)), kind) for order, kind in enumerate(kinds))


def draw_stacked_bars(title: str, bars: Sequence[Bar], x_name: str, size: PlotSize = WIDE) -> str:
    """Horizontal stacked bars, each below its name."""
    kinds = list(dict.fromkeys(kind for bar in bars for kind, _ in bar.parts))
    size = PlotSize(size.width, TOP + 42 * len(bars) + BOTTOM)
    most = max((sum(amount for _, amount in bar.parts) for bar in bars), default=1.0)
    x = Scale(0.0, most * 1.15, 4.0, size.width - RIGHT)
    chart = Chart(title, size, x, None, x_name, "")
    for row, bar in enumerate(bars):
        top, at = TOP + 42 * row, 0.0
        chart.add(f'<text x="4" y="{top + 2}" class="name">{escape(bar.name)}</text>')
        for kind, amount in bar.parts:
            begin, end = x(at), x(at + amount)
            words = escape(f"{bar.name}, {kind}: {format_number(amount)} {x_name}")
            chart.add(
                f'<rect x="{begin:.1f}" y="{top + 8}" width="{max(0.0, end - begin):.1f}" height="20" '
                f'class="k{kinds.index(kind)}"><title>{words}</title></rect>'
            )
            at += amount
        chart.add(f'<text x="{x(at) + 6:.1f}" y="{top + 22}" class="tick">{format_number(at)}</text>')
    return chart.to_svg()
