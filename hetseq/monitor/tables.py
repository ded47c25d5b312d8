"""Text tables for commands that list several things of a kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Cells = tuple[str, ...]


def table(rows: Sequence[Cells], *, left: Sequence[int]) -> Iterator[str]:
    """Lines with aligned cells; columns in `left` are left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        cells = [cell.ljust(width) if place in left else cell.rjust(width)
                 for place, (cell, width) in enumerate(zip(row, widths))]  # fmt: skip
        yield "  ".join(cells).rstrip()
