"""Line charts as SVG, self-contained: for the figures beside records and in reports."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 34, 46
# Distinct for eyes that do not tell red from green (Okabe and Ito).
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
FIXED_COLORS = {"csf": "#0072b2", "native": "#d55e00", "marlin": "#009e73", "stock": "#009e73"}
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#222}.t{font-weight:600;font-size:13px}"
    ".g{stroke:#ddd}.a{stroke:#555}.r{stroke:#999;stroke-dasharray:4 3}"
)


@dataclass(frozen=True)
class Point:
    """low, high: of a bar, equal to y for none."""

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class Chart:
    """log: of either axis; reference: a horizontal line to compare with."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[Point]]
    log_x: bool = True
    log_y: bool = False
    reference: float | None = None


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    log: bool
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        low, high, v = self.low, self.high, value
        if self.log:
            low, high, v = math.log(low), math.log(high), math.log(max(value, 1e-300))
        return self.begin + (v - low) / (high - low) * (self.end - self.begin)

    def ticks(self) -> list[float]:
        if not self.log:
            step = _nice((self.high - self.low) / 5)
            first = math.ceil(self.low / step - 1e-9)
            return [step * i for i in range(first, int(self.high / step + 1e-9) + 1)]
        found = [
            mantissa * 10.0**power
            for power in range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for mantissa in (1, 2, 5)
        ]
        return [tick for tick in found if self.low <= tick <= self.high]


def svg(charts: Sequence[Chart], columns: int = 2) -> str:
    """All charts in one picture, row by row."""
    columns = max(1, min(columns, len(charts)))
    width, height = columns * WIDTH, max(1, -(-len(charts) // columns)) * HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}"><style>{STYLE}</style><rect width="100%" height="100%" fill="#fff"/>'
    ]
    for number, chart in enumerate(charts):
        x, y = number % columns * WIDTH, number // columns * HEIGHT
        parts.append(f'<g transform="translate({x} {y})">{_chart(chart)}</g>')
    return "\n".join([*parts, "</svg>\n"])


def _chart(chart: Chart) -> str:
    points = [point for line in chart.series.values() for point in line]
    if not points:
        return f'<text class="t" x="{LEFT}" y="20">{escape(chart.title)}: nothing measured</text>'
    xs = sorted({point.x for point in points})
    y_values = [v for p in points for v in (p.low, p.high)]
    y_values += [chart.reference] if chart.reference is not None else []
    x_axis = _Axis(*_range(xs[0], xs[-1], chart.log_x), chart.log_x, LEFT, WIDTH - RIGHT)
    low, high = _range(min(y_values), max(y_values), chart.log_y)
    y_axis = _Axis(low if chart.log_y else min(0.0, low), high, chart.log_y, HEIGHT - BOTTOM, TOP)
    parts = [f'<text class="t" x="{LEFT}" y="20">{escape(chart.title)}</text>']
    parts += _grid(chart, xs, x_axis, y_axis)
    for number, (name, line) in enumerate(chart.series.items()):
        color = FIXED_COLORS.get(name, COLORS[number % len(COLORS)])
        parts += _line(sorted(line, key=lambda p: p.x), color, x_axis, y_axis)
        x = LEFT + 8 + number % 4 * 98
        y = TOP + 12 + number // 4 * 15
        parts.append(f'<rect x="{x}" y="{y - 8}" width="14" height="4" fill="{color}"/>')
        parts.append(f'<text x="{x + 18}" y="{y}">{escape(name)}</text>')
    return "".join(parts)


def _grid(chart: Chart, xs: Sequence[float], x_axis: _Axis, y_axis: _Axis) -> list[str]:
    parts = []
    for tick in y_axis.ticks():
        y = y_axis(tick)
        parts.append(f'<line class="g" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_text(tick)}</text>')
    shown: float = -math.inf
    for tick in xs if len(xs) < 16 else x_axis.ticks():
        x = x_axis(tick)
        if x - shown < 30:
            continue
        shown = x
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{_text(tick)}</text>'
        )
    bottom = HEIGHT - BOTTOM
    parts.append(f'<line class="a" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">{escape(chart.x_label)}</text>')
    turned = f'transform="rotate(-90 14 {HEIGHT / 2})" text-anchor="middle"'
    parts.append(f'<text x="14" y="{HEIGHT / 2}" {turned}>{escape(chart.y_label)}</text>')
    if chart.reference is not None:
        y = y_axis(chart.reference)
        parts.append(f'<line class="r" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
    return parts


def _line(line: Sequence[Point], color: str, x_axis: _Axis, y_axis: _Axis) -> list[str]:
    places = [(x_axis(p.x), y_axis(p.y)) for p in line]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts = [f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.8"/>']
    for point, (x, y) in zip(line, places, strict=True):
        if point.high > point.low:
            low, high = y_axis(point.low), y_axis(point.high)
            bar = f'x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}"'
            parts.append(f'<line {bar} stroke="{color}" stroke-opacity="0.5"/>')
        what = f"<title>{_text(point.x)}: {point.y:.4g}</title>"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{color}">{what}</circle>')
    return parts


def _range(low: float, high: float, log: bool) -> tuple[float, float]:
    """A little wider than the data, and never empty."""
    if log:
        low = max(low, 1e-12)
        return low / 1.12, max(high, low) * 1.12
    room = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    return low - (room if low < 0 else 0), high + room


def _nice(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next((m * power for m in (1, 2, 5) if m * power >= step), 10 * power)


def _text(value: float) -> str:
    for unit, size in (("M", 1_000_000), ("K", 1024)):
        if value >= size and value % size == 0:
            return f"{value / size:g}{unit}"
    return f"{value:.6g}"
