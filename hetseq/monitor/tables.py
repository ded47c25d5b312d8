"""Rows of cells as lines of text, for commands that tell of several things of a kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Cells = tuple[str, ...]


def table(rows: Sequence[Cells], *, left: Sequence[int]) -> Iterator[str]:
    """Lines with the cells under each other; columns in `left` begin at their left, the others end at their right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        cells = [cell.ljust(width) if place in left else cell.rjust(width)
                 for place, (cell, width) in enumerate(zip(row, widths))]  # fmt: skip
        yield "  ".join(cells).rstrip()
