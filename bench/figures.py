"""Statistics of timings: medians and quartiles of paired rounds, shares of summed speeds, tables, the line of JSON.

Pure arithmetic on given numbers; knows no clocks, processes or torch. The one idea: the rows of a round are neighbours
in time, so ratios are taken within a round, and the median is one of ratios. A ratio of medians would compare a calm
minute with a busy one.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: wall time over CPU time above which a run shared its cores
BUSY_ABOVE = 1.1


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of a figure over the rounds."""

    n: int
    median: float
    low: float  # lower and upper quartile, both of them measured values
    high: float

    def shown(self, form: str = ".2f", scale: float = 1.0) -> str:
        """Median and quartiles as text: `0.96 (0.95-0.97)`."""
        median, low, high = (f"{value * scale:{form}}" for value in (self.median, self.low, self.high))
        return f"{median} ({low}-{high})"


def spread(values: Sequence[float]) -> Spread:
    """The spread of at least one value."""
    ranked = sorted(values)
    quarter = len(ranked) // 4
    return Spread(len(ranked), statistics.median(ranked), ranked[quarter], ranked[-1 - quarter])


def paired(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    """one / other of each round. Raises ValueError where a round lacks one of them."""
    return [one / other for one, other in zip(ones, others, strict=True)]


def share_of_sum(speed: float, speeds: Sequence[float]) -> float:
    """A joint speed as a share of the ranks' summed separate speeds, all in the same unit."""
    return speed / math.fsum(speeds)


def efficiency(one_s: float, many_s: float, ranks: int) -> float:
    """Parallel efficiency of `ranks` machines, where one takes `one_s` for work that they do together in `many_s`."""
    return one_s / (ranks * many_s)


def equal_split_share(factors: Sequence[float]) -> float:
    """The most that equal shares can reach of the summed speeds, where rank i is `factors[i]` times slower: 0.5 at 1:3.

    Every rank gets B / W samples, so the step takes as long as the slowest one's.
    """
    return len(factors) / max(factors) / math.fsum(1 / factor for factor in factors)


def stretch(wall_s: float, cpu_s: float, factor: float = 1.0) -> float:
    """Time of a rank over the time of its own work; above `BUSY_ABOVE` another process used its core.

    `factor` is for a throttled rank, which sleeps for factor - 1 times its CPU time.
    """
    return wall_s / (factor * cpu_s)


def busy_mark(stretched: float) -> str:
    """A sentence for a run whose figures are in doubt, else ""."""
    if stretched <= BUSY_ABOVE:
        return ""
    return f"the machine was busy: wall time is {stretched:.2f} x CPU time, so these figures say little"


def settled_after(shares: Sequence[Sequence[int]], tolerance: float = 0.05) -> int:
    """Steps taken before every rank's share was within `tolerance` of its final value, and stayed there.

    `shares` holds each step's shares, by rank; one sample more or less is always within. 0: right from the first step.
    """
    last = shares[-1]
    room = [max(1.0, tolerance * share) for share in last]
    unsettled = [
        number
        for number, step in enumerate(shares, start=1)
        if any(abs(share - final) > most for share, final, most in zip(step, last, room))
    ]
    return max(unsettled, default=0)


def slow_steps(seconds: Sequence[float], *, tail: int = 5, tolerance: float = 0.15) -> int:
    """Steps that took more than `tolerance` longer than the median of the last `tail`, up to the last such one."""
    limit_s = (1 + tolerance) * statistics.median(seconds[-tail:])
    return max((number for number, taken_s in enumerate(seconds, start=1) if taken_s > limit_s), default=0)


def largest_gap(curves: Sequence[Sequence[float]]) -> float:
    """The largest difference between the first curve and any other at the same step; NaN if a value is NaN.

    Raises ValueError for curves of different lengths.
    """
    gaps = [abs(one - other) for curve in curves[1:] for one, other in zip(curves[0], curve, strict=True)]
    return math.nan if any(math.isnan(gap) for gap in gaps) else max(gaps, default=0.0)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, its columns aligned."""
    widths = [max(map(len, column)) for column in zip(heads, *rows)]
    lines = [heads, ["-" * width for width in widths], *rows]
    return "\n".join("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |" for line in lines)


def json_line(script: str, settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """All figures of a run as one line; a spread becomes an object, and NaN becomes null."""
    return json.dumps({"bench": script, "settings": _plain(settings), "rows": _plain(rows)}, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Spread):
        return {"n": value.n, "median": _plain(value.median), "quartiles": [_plain(value.low), _plain(value.high)]}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else None
    return value if isinstance(value, (int, str, bool, type(None))) else str(value)
