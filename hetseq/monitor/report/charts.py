"""Line and bar charts as inline SVG: sharp at any width, light and dark, without scripts or fonts.

Places numbers on the page and does not know their meaning. Pure: arrays in, text out; text from elsewhere is escaped.

The one idea: places along the x axis are percentages of the available width, so letters keep their size at 480 and at
1280 pixels. Only the curves are in a box of 1000 x 1000 that is stretched, and their strokes are not. A curve with more
points than columns is drawn as the lowest and the highest value of each column, so no peak is lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

COLUMNS = 400  # of a curve
COLOURS = 8  # classes c0 to c7
_BOX = 1000.0
_HEIGHT = 220  # pixels, of the axes
_BELOW = 22  # pixels, for the numbers of the x axis
_TICKS = 7  # at most
_MOST_DOTS = 60  # more dots would merge into a band
_BARS_OF_A_PICTURE = 16  # a printer cuts a picture that is longer than a page

#: for every page with these charts; the contrast of colours is 4.5:1 as letters, 3:1 as lines
STYLE = """
:root{--paper:#fff;--ink:#1c2024;--soft:#596068;--rule:#d9dde2;--band:#f3e3cf;--tile:#f4f6f8;
--c0:#1f6fb4;--c1:#c2410c;--c2:#2e7d32;--c3:#8e3fae;--c4:#8a6500;--c5:#0e7490;--c6:#be185d;--c7:#626a73}
@media(prefers-color-scheme:dark){:root{--paper:#15181c;--ink:#e6e8ea;--soft:#a3abb4;--rule:#343a41;--band:#4d3f29;
--tile:#1e2328;--c0:#6cb2f5;--c1:#fb923c;--c2:#6fcf7a;--c3:#cf9bf0;--c4:#e0c050;--c5:#4dd0e1;--c6:#f48fb1;--c7:#9aa3ad}}
@media print{:root{--paper:#fff;--ink:#000;--soft:#444;--rule:#ccc;--band:#eee;--tile:#f4f4f4;
--c0:#1f6fb4;--c1:#c2410c;--c2:#2e7d32;--c3:#8e3fae;--c4:#8a6500;--c5:#0e7490;--c6:#be185d;--c7:#626a73}}
.chart{margin:0 0 1.6em;break-inside:avoid}.chart.long{break-inside:auto}.chart figcaption{break-after:avoid}
.chart figcaption{margin:0 0 .7em;font-weight:600}
.chart .unit,.key{font-weight:400;overflow-wrap:anywhere;color:var(--soft);font-size:.86em}
.legend{display:flex;flex-wrap:wrap;gap:.15em 1.1em;margin-top:.2em}.key i{display:inline-block;width:.8em;height:.8em;
margin-right:.4em;border-radius:2px;vertical-align:-.05em;background:currentColor;-webkit-print-color-adjust:exact;print-color-adjust:exact}
.plot{display:block;overflow:visible;margin-left:56px;width:calc(100% - 66px)}.bars{display:block;width:100%}
.plot svg{overflow:visible}.plot text,.bars text{font:12px system-ui,sans-serif;fill:var(--soft);
font-variant-numeric:tabular-nums}.bars text.name{fill:var(--ink)}.grid{stroke:var(--rule)}.band{fill:var(--band)}
i.pale{opacity:.4}.mark{stroke:var(--soft);stroke-dasharray:3 3}
.line{fill:none;stroke-width:1.6;stroke-linejoin:round;vector-effect:non-scaling-stroke}.pale{opacity:.4}
.line.d1{stroke-width:2.2;stroke-dasharray:7 6}.line.d2{stroke-width:2.2;stroke-dasharray:4 9;stroke-dashoffset:-8}
.line.d3{stroke-width:3;stroke-dasharray:2 11;stroke-dashoffset:-3}
i.dashed{background:repeating-linear-gradient(90deg,currentColor 0 .25em,transparent .25em .55em)!important;
width:1.35em!important}
.line.c0{stroke:var(--c0)}.line.c1{stroke:var(--c1)}.line.c2{stroke:var(--c2)}.line.c3{stroke:var(--c3)}
.line.c4{stroke:var(--c4)}.line.c5{stroke:var(--c5)}.line.c6{stroke:var(--c6)}.line.c7{stroke:var(--c7)}
.fill.c0{fill:var(--c0)}.fill.c1{fill:var(--c1)}.fill.c2{fill:var(--c2)}.fill.c3{fill:var(--c3)}
.fill.c4{fill:var(--c4)}.fill.c5{fill:var(--c5)}.fill.c6{fill:var(--c6)}.fill.c7{fill:var(--c7)}
i.c0{color:var(--c0)}i.c1{color:var(--c1)}i.c2{color:var(--c2)}i.c3{color:var(--c3)}i.c4{color:var(--c4)}
i.c5{color:var(--c5)}i.c6{color:var(--c6)}i.c7{color:var(--c7)}i.band{color:var(--band);outline:1px solid var(--rule)}
"""


@dataclass(frozen=True)
class Curve:
    """Points in the order of x, and their name; NaN interrupts the line."""

    name: str
    x: npt.NDArray[Any]  # (n,)
    y: npt.NDArray[Any]  # (n,)
    colour: int = 0
    has_dots: bool = False
    is_pale: bool = False  # behind a curve that matters more
    dash: int = 0  # 1 to 3: another pattern each, so that equal curves behind it can be seen
    is_named: bool = True  # in the legend


@dataclass(frozen=True)
class Band:
    """A range of the x axis, and a title that says why it is marked."""

    first: float
    last: float
    title: str


@dataclass(frozen=True)
class Bar:
    """One bar of several parts, in the order of the kinds."""

    name: str
    parts: Sequence[float]
    note: str  # at its right


def line_chart(
    title: str, curves: Sequence[Curve], *, unit: str = "", x_title: str = "step", bands: Sequence[Band] = (),
    band_name: str = "", marks: Sequence[Band] = (), columns: int = COLUMNS,
) -> str:  # fmt: skip
    """A figure with one pair of axes and its legend above it; "" if no curve has a point."""
    kept = [(curve, *known) for curve in curves if len((known := _known(curve))[0])]
    if not kept:
        return ""
    first, last = min(float(x[0]) for _, x, _ in kept), max(float(x[-1]) for _, x, _ in kept)
    low, high = _range(min(float(y.min()) for _, _, y in kept), max(float(y.max()) for _, _, y in kept))

    def across(x: float) -> float:
        return (x - first) / ((last - first) or 1.0)

    def down(y: float) -> float:
        return (high - y) / ((high - low) or 1.0)

    parts = [_band(band, across, "band") for band in bands if band.last >= first and band.first <= last]
    for value, said in labelled(ticks(low, high)):
        at = f"{down(value) * _HEIGHT:.1f}"
        parts.append(f'<line class="grid" x1="0" x2="100%" y1="{at}" y2="{at}"/>')
        parts.append(f'<text x="-8" y="{down(value) * _HEIGHT + 4:.1f}" text-anchor="end">{said}</text>')
    for value, said in labelled(ticks(first, last)):
        place = across(value)
        anchor = "end" if place > 0.94 else "middle"
        parts.append(f'<text x="{place:.2%}" y="{_HEIGHT + 17}" text-anchor="{anchor}">{said}</text>')
    for mark in marks:
        at = f"{across(mark.first):.2%}"
        parts.append(
            f'<line class="mark" x1="{at}" x2="{at}" y1="0" y2="{_HEIGHT}"><title>{escape(mark.title)}</title></line>'
        )
    parts.append(
        f'<svg width="100%" height="{_HEIGHT}" viewBox="0 0 {_BOX:.0f} {_BOX:.0f}" preserveAspectRatio="none">'
    )
    for curve, _, _ in kept:
        path = path_of(
            np.asarray(curve.x), np.asarray(curve.y), first=first, last=last, low=low, high=high, columns=columns
        )
        parts.append(f'<path class="line {_style(curve)}" d="{path}"><title>{escape(curve.name)}</title></path>')
    parts.append("</svg>")
    for curve, x, y in kept:
        if len(x) == 1 or (curve.has_dots and len(x) <= _MOST_DOTS):
            for at, value in zip(x.tolist(), y.tolist()):
                centre = f'cx="{across(at):.2%}" cy="{down(value) * _HEIGHT:.1f}"'
                parts.append(
                    f'<circle class="fill c{curve.colour}" {centre} r="3">'
                    f"<title>{escape(curve.name)}: {value:.6g} at {number(at)}</title></circle>"
                )
    legend = [(_style(curve), curve.name) for curve, _, _ in kept if curve.is_named]
    legend = [] if len(legend) < 2 else legend
    if bands and band_name:
        legend.append(("band", band_name))
    said = f"{title}: from {low:.6g} to {high:.6g}, {x_title} {number(first)} to {number(last)}"
    return (
        f'<figure class="chart">{_caption(title, f"{unit} by {x_title}" if unit else f"by {x_title}", legend)}'
        f'<svg class="plot" height="{_HEIGHT + _BELOW}" role="img" aria-label="{escape(said)}">'
        + "\n".join(parts)
        + "</svg></figure>\n"
    )


def bar_chart(title: str, kinds: Sequence[tuple[str, int]], bars: Sequence[Bar], *, unit: str) -> str:
    """A figure of horizontal bars, each of the same kinds of parts (name, colour); "" without bars."""
    longest = max((sum(bar.parts) for bar in bars), default=0.0)
    if not longest:
        return ""
    row, lines = 36, list[str]()
    for place, bar in enumerate(bars):
        if place % _BARS_OF_A_PICTURE == 0:
            height = min(_BARS_OF_A_PICTURE, len(bars) - place) * row
            lines += ["</svg>"] * (place > 0)
            lines.append(f'<svg class="bars" height="{height}" role="img" aria-label="{escape(title)}">')
        top, begin = place % _BARS_OF_A_PICTURE * row, 0.0
        lines.append(f'<text class="name" x="0" y="{top + 12}">{escape(bar.name)}</text>')
        lines.append(f'<text x="100%" y="{top + 12}" text-anchor="end">{escape(bar.note)}</text>')
        for (kind, colour), value in zip(kinds, bar.parts):
            width = value / longest
            if width > 0:
                lines.append(
                    f'<rect class="fill c{colour}" x="{begin:.2%}" y="{top + 17}" width="{width:.2%}" height="11">'
                    f"<title>{escape(f'{bar.name}: {kind} {number(value)} {unit}')}</title></rect>"
                )
            begin += width
    legend = [(f"c{colour}", kind) for kind, colour in kinds]
    return (
        f'<figure class="chart{" long" if len(bars) > _BARS_OF_A_PICTURE else ""}">{_caption(title, unit, legend)}'
        + "\n".join(lines)
        + "</svg></figure>\n"
    )


def path_of(
    x: Floats, y: Floats, *, first: float, last: float, low: float, high: float, columns: int = COLUMNS
) -> str:  # fmt: skip
    """The path of a curve in the box: (0, 0) is `first` and `high`, (1000, 1000) is `last` and `low`.

    Points are thinned by `thinned`. A gap of NaN interrupts the line if it is wider than a column.
    """
    places = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
    x, y = x[places].astype(np.float64), y[places].astype(np.float64)
    kept = thinned(x, y, columns)
    is_gap = (np.diff(places, prepend=places[:1]) > 1) & (np.diff(x, prepend=x[:1]) > (last - first) / columns)
    part = np.cumsum(is_gap)
    across = (x[kept] - first) / ((last - first) or 1.0) * _BOX
    down = (high - y[kept]) / ((high - low) or 1.0) * _BOX
    words, before = [], -1
    for at, value, segment in zip(across.tolist(), down.tolist(), part[kept].tolist()):
        words.append(f"{'' if segment == before else 'M'}{_short(at)},{_short(value)}")
        before = segment
    return " ".join(words)


def thinned(x: Floats, y: Floats, columns: int) -> npt.NDArray[np.int64]:
    """The points to draw: the lowest and the highest in each of `columns` equal parts of the x axis, and both ends."""
    if len(x) <= 2 * columns:
        return np.arange(len(x))
    column = np.minimum((x - x[0]) / ((x[-1] - x[0]) or 1.0) * columns, columns - 1).astype(np.int64)
    order = np.lexsort((y, column))
    begins = np.flatnonzero(np.diff(column[order], prepend=-1))
    ends = np.append(begins[1:], len(order)) - 1
    return np.unique(np.concatenate([order[begins], order[ends], [0, len(x) - 1]]))


def ticks(low: float, high: float) -> list[float]:
    """About five round numbers from `low` to `high`; only `low` if both are equal."""
    room = high - low
    if not room > 0:
        return [low]
    step = 10 ** math.floor(math.log10(room / _TICKS))
    step = next(step * factor for factor in (1, 2, 5, 10) if room / (step * factor) <= _TICKS)
    first = math.ceil(low / step - 1e-9)
    return [at * step for at in range(first, math.floor(high / step + 1e-9) + 1)]


def labelled(places: Sequence[float]) -> list[tuple[float, str]]:
    """Ticks with their labels, with enough decimals to tell them apart."""
    step = places[1] - places[0] if len(places) > 1 else 0.0
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    most = max(map(abs, places), default=0.0)
    if not step or most >= 1e7 or decimals > 6:
        return [(place, number(place)) for place in places]
    return [(place, f"{place + 0.0:,.{decimals}f}") for place in places]


def number(value: float) -> str:
    """A number as an axis shows it: `100,000`, `0.25`, `3e-07`."""
    if not math.isfinite(value):
        return "-"
    if value == round(value) and abs(value) < 1e7:
        return f"{round(value):,}"
    text = f"{value:.4g}"
    return f"{value:,.0f}" if "e+" in text and abs(value) < 1e7 else text


def _style(curve: Curve) -> str:
    return f"c{curve.colour}{' pale' * curve.is_pale}{f' dashed d{curve.dash}' if curve.dash else ''}"


def _known(curve: Curve) -> tuple[Floats, Floats]:
    x, y = np.asarray(curve.x, np.float64), np.asarray(curve.y, np.float64)
    is_there = np.isfinite(x) & np.isfinite(y)
    return x[is_there], y[is_there]


def _range(low: float, high: float) -> tuple[float, float]:
    """The range of the y axis: from 0 if that is near, and at least 1 % of the numbers, so that noise looks small."""
    if 0 <= low <= 0.4 * high:
        low = 0.0
    lacking = 0.01 * max(abs(low), abs(high)) - (high - low)
    if low == high == 0:
        return -1.0, 1.0
    return (low - lacking / 2, high + lacking / 2) if lacking > 0 else (low, high)


def _band(band: Band, across: Any, kind: str) -> str:
    begin, end = max(0.0, across(band.first)), min(1.0, across(band.last))
    # a band of one step among 100,000 stays visible
    width = max(end - begin, 0.003)
    return (
        f'<rect class="{kind}" x="{begin:.2%}" y="0" width="{width:.2%}" height="{_HEIGHT}">'
        f"<title>{escape(band.title)}</title></rect>"
    )


def _caption(title: str, unit: str, legend: Sequence[tuple[str, str]]) -> str:
    keys = "".join(f'<span class="key"><i class="{style}"></i>{escape(name)}</span>' for style, name in legend)
    return (
        f'<figcaption>{escape(title)} <span class="unit">{escape(unit)}</span>'
        + (f'<div class="legend">{keys}</div>' if keys else "")
        + "</figcaption>"
    )


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
