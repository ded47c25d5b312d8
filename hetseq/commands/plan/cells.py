"""Cells of the tables of `hetseq plan` and `hetseq simulate`: seconds, speeds and shares as text."""

from __future__ import annotations

from collections.abc import Sequence

_SHOWN_SHARES = 12  # ranks whose shares are listed one by one


def speed_text(per_s: float) -> str:
    """Samples per second with four significant digits."""
    return f"{per_s:,.0f}" if per_s >= 1000 else f"{per_s:.4g}"


def seconds_text(seconds: float) -> str:
    """Seconds with three significant digits, in readable units."""
    if seconds >= 1000:
        return f"{seconds:,.0f} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:,.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs" if seconds else "0 s"


def shares_text(shares: Sequence[int], *, shown: int = _SHOWN_SHARES) -> str:
    """Shares one by one, or from least to most if there are many."""
    if len(shares) <= shown:
        return ",".join(map(str, shares))
    least, most = min(shares), max(shares)
    return str(least) if least == most else f"{least} to {most}"
