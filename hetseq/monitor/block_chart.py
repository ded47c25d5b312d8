"""Sparklines and stacked bars out of block characters, for a terminal; each piece has the name of its colour.

Pure: numbers in, pieces of text out. It knows no terminal and no colour: a reader without colours tells the kinds of a
bar apart by their characters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

#: text, and what it shows: a key of the table of colours of its reader, "" for plain text
Piece = tuple[str, str]
#: the pieces of one line on the screen, left to right
Line = tuple[Piece, ...]

_LEVELS = "▁▂▃▄▅▆▇█"
_LOGARITHMIC = 10.0  # highest / lowest


def text_of(line: Line) -> str:
    """The characters of a line."""
    return "".join(text for text, _ in line)


def cut(line: Line, width: int) -> Line:
    """The first `width` characters, each of which can be printed: no byte of a name controls the terminal."""
    kept, left = list[Piece](), width
    for text, kind in line:
        shown = "".join(c if c.isprintable() else "?" for c in text)[:left]
        left -= len(shown)
        if shown:
            kept.append((shown, kind))
    return tuple(kept)


def sparkline(values: Sequence[float], width: int) -> str:
    """The course of `values` in at most `width` characters: each shows the mean of as many values; NaN is a gap.

    The scale is logarithmic if the means are positive and the lowest is under a tenth of the highest, as of a loss.
    """
    means = column_means(values, width)
    known = [mean for mean in means if math.isfinite(mean)]
    if not known:
        return ""
    if 0 < min(known) < max(known) / _LOGARITHMIC:
        means, known = [[math.log(mean) for mean in some] for some in (means, known)]
    low, room = min(known), max(known) - min(known)
    if not 0 < room < math.inf:
        return "".join(_LEVELS[0] if math.isfinite(mean) else " " for mean in means)
    top = len(_LEVELS) - 1
    return "".join(_LEVELS[round((mean - low) / room * top)] if math.isfinite(mean) else " " for mean in means)


def column_means(values: Sequence[float], width: int) -> list[float]:
    """The means of at most `width` equal parts of `values`, without what is not finite; NaN if nothing is left."""
    size = len(values)
    columns = max(0, min(size, width))
    parts = [values[at * size // columns : (at + 1) * size // columns] for at in range(columns)]
    known = [[value for value in part if math.isfinite(value)] for part in parts]
    return [sum(part) / len(part) if part else math.nan for part in known]


def stacked_bar(parts: Sequence[tuple[float, str, str]], total: float, width: int) -> Line:
    """A bar of parts (amount, character, kind) of which `total` fills `width` characters; unknown amounts are 0."""
    pieces, begin, end_so_far = list[Piece](), 0, 0.0
    for amount, character, kind in parts:
        end_so_far += amount if math.isfinite(amount) and amount > 0 else 0.0
        end = min(width, round(end_so_far / total * width)) if total > 0 else 0
        if end > begin:
            pieces.append((character * (end - begin), kind))
            begin = end
    return (*pieces, (" " * (width - begin), "")) if begin < width else tuple(pieces)
