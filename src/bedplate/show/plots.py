"""Charts as SVG without library or script; colours come from the style sheet, for dark mode, print and offline use."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 540, 330
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 16, 44
COLOURS = 8
"""Number of series colours in the style sheet, s0 to s7; further series reuse them with other markers."""
MARKS = ("circle", "square", "triangle", "diamond")
WIDE_RATIO = 20.0
"""Ratio of the largest to the smallest value above which the axis is logarithmic."""
LABEL_GAP, LETTER = 14, 7.5


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
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit * 0.9999:
            return f"{value / (1e3 if unit == 'k' else limit):.4g}{unit}"
    return f"{value:.4g}"


@dataclass
class Chart:
    """A chart under construction: frame, axes and content."""

    title: str
    x: Scale
    y: Scale | None
    x_name: str
    y_name: str
    height: int = HEIGHT
    parts: list[str] = field(default_factory=list)
    taken: list[tuple[float, float, float]] = field(default_factory=list)
    """Placed labels: left, right and y position."""

    def add(self, *parts: str) -> None:
        self.parts.extend(parts)

    def add_label(self, x: float, y: float, text: str, style: str = "", anchor: str = "start") -> None:
        """Add a label; it moves down until it overlaps no other label."""
        width = LETTER * len(text)
        begin = x - width if anchor == "end" else x
        while any(begin < high and low < begin + width and abs(y - at) < LABEL_GAP for low, high, at in self.taken):
            y += LABEL_GAP
        self.taken.append((begin, begin + width, y))
        self.add(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{style}">{escape(text)}</text>')

    def to_svg(self) -> str:
        return (
            f'<svg viewBox="0 0 {WIDTH} {self.height}" role="img" aria-label="{escape(self.title)}" class="plot">'
            f"<title>{escape(self.title)}</title>{self._draw_axes()}{''.join(self.parts)}</svg>"
        )

    def _draw_axes(self) -> str:
        bottom, parts = self.height - BOTTOM, []
        for tick in self.x.choose_ticks():
            at = self.x(tick)
            parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}" class="grid"/>')
            parts.append(
                f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle" class="tick">{format_number(tick)}</text>'
            )
        y = self.y
        for tick, at in [(tick, y(tick)) for tick in y.choose_ticks()] if y is not None else ():
            parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" class="grid"/>')
            parts.append(
                f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end" class="tick">{format_number(tick)}</text>'
            )
        middle = (TOP + bottom) / 2
        parts.append(
            f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{self.height - 8}" text-anchor="middle" class="axis">'
            f"{escape(self.x_name)}{' (log)' if self.x.log else ''}</text>"
            f'<text transform="translate(13 {middle}) rotate(-90)" text-anchor="middle" class="axis">'
            f"{escape(self.y_name)}{' (log)' if self.y is not None and self.y.log else ''}</text>"
        )
        return "".join(parts)


def _draw_mark(kind: str, x: float, y: float, style: str, point: Point) -> str:
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


def draw_lines(title: str, series: Sequence[PlotSeries], x_name: str, y_name: str) -> str:
    """Each series as markers joined by a line, with its name at the end."""
    every = [point for one in series for point in one.points]
    x = make_scale((point.x for point in every), LEFT, WIDTH - RIGHT - 70)
    y = make_scale((point.y for point in every), HEIGHT - BOTTOM, TOP, log=None)
    chart = Chart(title, x, y, x_name, y_name)
    for one in series:
        path = " ".join(f"{x(point.x):.1f},{y(point.y):.1f}" for point in one.points)
        chart.add(f'<polyline points="{path}" class="line {one.style}"/>')
    for one in series:
        for point in one.points:
            chart.add(_draw_mark(one.mark, x(point.x), y(point.y), one.style, point))
            if point.label:
                chart.add(
                    f'<text x="{x(point.x):.1f}" y="{y(point.y) - 9:.1f}" text-anchor="middle" class="tick">'
                    f"{escape(point.label)}</text>"
                )
        last = one.points[-1]
        chart.add_label(x(last.x) + 11, y(last.y) + 4, one.name, f"name {one.style}")
    return chart.to_svg()


def draw_distributions(title: str, samples: Sequence[tuple[str, int, Sequence[float]]], x_name: str) -> str:
    """Cumulative distribution of (name, series number, values)."""
    x = make_scale((value for _, _, values in samples for value in values), LEFT, WIDTH - RIGHT)
    y = Scale(0.0, 1.0, HEIGHT - BOTTOM, TOP)
    chart = Chart(title, x, y, x_name, "cumulative share of requests")
    for name, order, values in samples:
        ordered = sorted(values)
        if not ordered:
            continue
        style = f"s{order % COLOURS}"
        path = [f"M{x(ordered[0]):.1f} {y(0):.1f}"]
        for rank, value in enumerate(ordered, 1):
            path.append(f"H{x(value):.1f}V{y(rank / len(ordered)):.1f}")
        chart.add(f'<path d="{"".join(path)}" class="line {style}"><title>{escape(name)}</title></path>')
        middle = ordered[(len(ordered) - 1) // 2]
        chart.add_label(x(middle) + 6, y(0.5), name, f"name {style}")
    return chart.to_svg()


def draw_roofline(
    title: str, points: Sequence[PlotSeries], bytes_s: float | None, operations_s: float | None, basis: str = ""
) -> str:
    """Operations per second over operations per byte; the roof is the upper bound."""
    every = [point for one in points for point in one.points]
    xs = [point.x for point in every]
    ys = [point.y for point in every]
    if bytes_s and operations_s:
        xs += [operations_s / bytes_s * 2, min(xs) / 2]
        ys += [operations_s]
    x = make_scale(xs, LEFT, WIDTH - RIGHT, log=True)
    if bytes_s:
        ys += [bytes_s * x.low, min(operations_s or math.inf, bytes_s * x.high)]
    y = make_scale(ys, HEIGHT - BOTTOM, TOP, log=True)
    chart = Chart(title, x, y, "operations per byte read", "operations per second")
    if bytes_s:
        knee = min(operations_s / bytes_s, x.high) if operations_s else x.high
        roof = [(x.low, bytes_s * x.low), (knee, bytes_s * knee)]
        roof += [(x.high, operations_s)] if operations_s and knee < x.high else []
        path = " ".join(f"{x(at):.1f},{y(high):.1f}" for at, high in roof)
        chart.add(f'<polyline points="{path}" class="roof"/>')
        chart.add_label(x(roof[0][0]) + 8, y(roof[0][1]) - 10, f"{format_number(bytes_s)}B/s {basis}".strip(), "tick")
        if operations_s and knee < x.high:
            chart.add_label(
                x(x.high) - 4, y(operations_s) + 14, f"{format_number(operations_s)}op/s {basis}", "tick", "end"
            )
    for one in points:
        for point in one.points:
            chart.add(_draw_mark(one.mark, x(point.x), y(point.y), one.style, point))
        last = one.points[-1]
        chart.add_label(x(last.x) + 9, y(last.y) + 4, one.name, f"name {one.style}")
    return chart.to_svg()


@dataclass(frozen=True)
class Bar:
    name: str
    parts: tuple[tuple[str, float], ...]
    """(kind, amount), from left to right; the kinds are the style sheet's k0, k1, … in the order they first occur."""


def draw_stacked_bars(title: str, bars: Sequence[Bar], x_name: str) -> str:
    """Horizontal stacked bars."""
    kinds = list(dict.fromkeys(kind for bar in bars for kind, _ in bar.parts))
    height = TOP + 30 * len(bars) + 24 + BOTTOM
    left = LEFT + 80
    most = max((sum(amount for _, amount in bar.parts) for bar in bars), default=1.0)
    x = Scale(0.0, most * 1.12, left, WIDTH - RIGHT)
    chart = Chart(title, x, None, x_name, "", height)
    for row, bar in enumerate(bars):
        top, at = TOP + 24 + 30 * row, 0.0
        chart.add(f'<text x="{left - 8}" y="{top + 14}" text-anchor="end" class="name">{escape(bar.name)}</text>')
        for kind, amount in bar.parts:
            begin, end = x(at), x(at + amount)
            words = escape(f"{bar.name}, {kind}: {format_number(amount)}")
            chart.add(
                f'<rect x="{begin:.1f}" y="{top}" width="{max(0.0, end - begin):.1f}" height="20" '
                f'class="k{kinds.index(kind)}"><title>{words}</title></rect>'
            )
            at += amount
        chart.add(f'<text x="{x(at) + 6:.1f}" y="{top + 14}" class="tick">{format_number(at)}</text>')
    at = float(left)
    for order, kind in enumerate(kinds):
        chart.add(
            f'<rect x="{at:.1f}" y="{TOP - 4}" width="10" height="10" class="k{order}"/>'
            f'<text x="{at + 14:.1f}" y="{TOP + 5}" class="tick">{escape(kind)}</text>'
        )
        at += 26 + 7 * len(kind)
    return chart.to_svg()
