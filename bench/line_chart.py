"""Line charts as one SVG file without scripts or embedded fonts, readable on light and dark backgrounds.

Knows numbers and their coordinates, not their meaning. The one idea: a curve with more points than the
image has columns is drawn as the lowest and the highest value of each column, so no peak is lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_WIDTH, _PANEL, _LEFT, _RIGHT, _TOP, _BELOW = 720, 220, 64, 16, 28, 34  # pixels
_COLUMNS = 320  # of a curve
_TICKS = 5
_STYLE = """
text{font:12px sans-serif;fill:#333}.name{font-weight:bold}line{stroke:#ccc}polyline{fill:none;stroke-width:1.5}
.c0{stroke:#1f6fb4}.c1{stroke:#d1662b}.c2{stroke:#3b8f4a}.c3{stroke:#8c4fa8}
text.c0{fill:#1f6fb4}text.c1{fill:#d1662b}text.c2{fill:#3b8f4a}text.c3{fill:#8c4fa8}text[class^=c]{stroke:none}
@media(prefers-color-scheme:dark){text{fill:#ddd}line{stroke:#555}rect{fill:#1c1c1c}}
"""


@dataclass(frozen=True)
class Curve:
    """Points (x, y) in the order of x, and their name."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """One pair of axes. Logarithmic ones leave out values that are not above zero."""

    title: str
    curves: Sequence[Curve]
    logarithmic: bool = False


def picture(panels: Sequence[Panel], x_title: str) -> str:
    """The panels below each other over one x axis, as the text of an SVG file. Raises ValueError without any point."""
    last = max((x for panel in panels for curve in panel.curves for x, _ in curve.points), default=0)
    if not last:
        raise ValueError("there is no point to draw: expected at least one with x above 0")
    height = len(panels) * (_TOP + _PANEL + _BELOW)
    parts = [f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>']
    for number, panel in enumerate(panels):
        top = number * (_TOP + _PANEL + _BELOW) + _TOP
        parts += _panel(panel, top, last, x_title if number == len(panels) - 1 else "")
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}">'
    return "\n".join([head, f"<style>{_STYLE}</style>", *parts, "</svg>\n"])


def _panel(panel: Panel, top: int, last: float, x_title: str) -> list[str]:
    scale = math.log10 if panel.logarithmic else float
    kept = [[(x, scale(y)) for x, y in curve.points if y > 0 or not panel.logarithmic] for curve in panel.curves]
    values = [y for points in kept for _, y in points] or [0.0]
    low, high = min(values), max(values)
    if panel.logarithmic:
        low, high = math.floor(low), math.ceil(high)
    room = high - low or 1.0

    def across(x: float) -> float:
        return _LEFT + x / last * (_WIDTH - _LEFT - _RIGHT)

    def down(y: float) -> float:
        return top + (high - y) / room * _PANEL

    parts = [f'<text class="name" x="{_LEFT}" y="{top - 10}">{escape(panel.title)}</text>']
    for tick in _ticks(low, high, whole=panel.logarithmic):
        said = f"1e{tick:.0f}" if panel.logarithmic else f"{tick:.3g}"
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{down(tick):.1f}" y2="{down(tick):.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{down(tick) + 4:.1f}" text-anchor="end">{said}</text>')
    for tick in _ticks(0, last, whole=False):
        parts.append(f'<text x="{across(tick):.1f}" y="{top + _PANEL + 16}" text-anchor="middle">{tick:g}</text>')
    if x_title:
        parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{top + _PANEL + 30}" text-anchor="end">{escape(x_title)}</text>')
    for number, (curve, points) in enumerate(zip(panel.curves, kept)):
        drawn = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in thinned(points, _COLUMNS))
        parts.append(f'<polyline class="c{number}" points="{drawn}"/>')
        if len(panel.curves) > 1:
            x, y, name = _WIDTH - _RIGHT - 6, top + 14 + 16 * number, escape(curve.name)
            parts.append(f'<text class="c{number}" x="{x}" y="{y}" text-anchor="end">{name}</text>')
    return parts


def thinned(points: Sequence[tuple[float, float]], columns: int) -> list[tuple[float, float]]:
    """At most two points of each of `columns` equal parts of the list: its lowest and its highest, in their order."""
    if len(points) <= 2 * columns:
        return list(points)
    kept = []
    for column in range(columns):
        part = range(column * len(points) // columns, (column + 1) * len(points) // columns)
        ends = {min(part, key=lambda at: points[at][1]), max(part, key=lambda at: points[at][1])}
        kept += [points[at] for at in sorted(ends)]
    return kept


def _ticks(low: float, high: float, *, whole: bool) -> list[float]:
    """Round numbers from `low` to `high`, some five of them."""
    room = high - low or 1.0
    step = 10 ** math.floor(math.log10(room / _TICKS))
    step = next(step * factor for factor in (1, 2, 5, 10) if room / (step * factor) <= _TICKS)
    if whole:
        step = max(1, round(step))
    first = math.ceil(low / step - 1e-9)
    return [at * step for at in range(first, math.floor(high / step + 1e-9) + 1)]
