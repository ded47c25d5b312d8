"""How the bytes of a checkpoint are divided among ranks with disks of unequal speed: pure functions.

The one idea: a part's size divided by the time its writer took is the speed of that rank's disk while all write at
once. The parts are cut again only if that would save much time, since their memory must then be allocated again too.
"""

from __future__ import annotations

from collections.abc import Sequence

_WORTHWHILE = 1.25  # times faster; below that the parts stay as they are
_LEAST_BYTES = 16 << 20  # of a part: below that, opening and flushing files takes most of the time
_FINENESS = 1000


def better_weights(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, ...] | None:
    """Weights in proportion to bytes per second, by rank; None if they would save too little, or nothing is known.

    `sizes` and `seconds` are the bytes each rank wrote in the last save, and how long it took. Integers that sum to
    about 1000, so that small differences between two saves give the same weights.
    """
    if min(sizes, default=0) < _LEAST_BYTES or not all(second > 0 for second in seconds):
        return None
    speeds = [size / second for size, second in zip(sizes, seconds)]
    at_best_s = sum(sizes) / sum(speeds)
    if max(seconds) < _WORTHWHILE * at_best_s:
        return None
    return tuple(float(max(1, round(_FINENESS * speed / sum(speeds)))) for speed in speeds)
