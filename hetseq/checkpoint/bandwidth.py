"""How the bytes of a checkpoint are divided over ranks whose disks are not equally fast: pure.

The one idea: a part's size over the time its writer took is what that rank's disk is worth while all write at once; the
parts are cut anew only where that would save a good part of the time, since the memory that holds them is then too.
"""

from __future__ import annotations

from collections.abc import Sequence

_WORTHWHILE = 1.25  # times faster, or the parts stay as they are
_LEAST_BYTES = 16 << 20  # of a part: below that the time is that of opening and flushing files
_FINENESS = 1000


def better_weights(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, ...] | None:
    """Weights in proportion to bytes per second, by rank; None where they would not save enough, or nothing is known.

    `sizes` and `seconds` are what each rank wrote in the last save, and how long it took. Whole numbers that sum up to
    about 1000, so that small differences between two saves give the same weights.
    """
    if min(sizes, default=0) < _LEAST_BYTES or not all(second > 0 for second in seconds):
        return None
    speeds = [size / second for size, second in zip(sizes, seconds)]
    at_best_s = sum(sizes) / sum(speeds)
    if max(seconds) < _WORTHWHILE * at_best_s:
        return None
    return tuple(float(max(1, round(_FINENESS * speed / sum(speeds)))) for speed in speeds)
