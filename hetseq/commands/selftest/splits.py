"""Cuts of a step's samples over emulated ranks: pure functions over integers, NumPy only.

A cut has, for each rank, the ranges of the step's samples that it takes, one micro-batch each. Ranks take neighbouring
slices, as in training. It knows neither data nor torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

#: by rank, its micro-batches as ranges of the samples of the step
Cut = tuple[tuple[tuple[int, int], ...], ...]


def whole(samples: int, *, unit: int | None = None) -> Cut:
    """One rank with all samples: one micro-batch, or one for each unit."""
    return (tuple(_steps(0, samples, unit or samples)),)


def singles(samples: int, *, size: int = 1) -> Cut:
    """One rank with micro-batches of `size` samples."""
    return (tuple(_steps(0, samples, size)),)


def random_cut(
    samples: int, ranks: int, generator: np.random.Generator, *, unit: int | None = None, least: int = 1
) -> Cut:
    """Ranks with unequal random shares, in micro-batches of several sizes.

    With three or more ranks the first has `least` samples. With a `unit`, shares are whole units, a micro-batch each.
    No micro-batch has fewer than `least` samples unless the whole step has; in a small step a rank may have none.
    """
    grid = unit or least
    places = max(samples // grid, 1)
    fixed = [1] if ranks > 2 and places >= ranks else []
    free = np.arange(2 if fixed else 1, places)
    wanted = ranks - 1 - len(fixed)
    chosen = generator.choice(free, min(wanted, len(free)), replace=False).tolist()
    borders = sorted([*fixed, *chosen])
    if len(chosen) == wanted and len(free) > wanted and _is_equal(borders, places):
        borders[-1] += 1 if borders[-1] + 1 < places else -1
    ends = [0, *(border * grid for border in borders), *[samples] * (ranks - len(borders))]
    return tuple(
        tuple(_steps(start, stop, unit) if unit else _random_steps(start, stop, generator, least=least))
        for start, stop in pairwise(ends)
    )


def micro_batches(cut: Cut) -> Iterator[tuple[int, int]]:
    """All micro-batches of a cut, rank by rank."""
    for rank in cut:
        yield from rank


def shares(cut: Cut) -> tuple[int, ...]:
    """The samples of each rank."""
    return tuple(sum(stop - start for start, stop in rank) for rank in cut)


def _is_equal(borders: list[int], places: int) -> bool:
    return len(set(np.diff([0, *borders, places]).tolist())) == 1


def _steps(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    for begin in range(start, stop, size):
        yield begin, min(begin + size, stop)


def _random_steps(start: int, stop: int, generator: np.random.Generator, *, least: int) -> Iterator[tuple[int, int]]:
    """At least two micro-batches if they fit, of random sizes."""
    while start < stop:
        left = stop - start
        size = int(generator.integers(least, max(least, left // 2) + 1))
        if left - size < least:
            size = left
        yield start, start + size
        start += size
