"""Ownership: which rank owns which elements of the trained parameters. Pure.

Responsible for cutting the memory of all parameters among the ranks in proportion to given fractions. Knows neither
tensors nor how the fractions are found.

The one idea: parameters lie one after the other in units, each of them one piece of memory. Every unit is cut in rank
order at the same fractions, so every rank owns a part of every unit and no rank is the bottleneck of a transfer.
Tensors are cut in grains, and some must stay whole; what a cut then misses is made up for in the next unit.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

#: elements; a tensor is cut at multiples of it from its own beginning. What loops over vectors leave over, in torch of
#: at most 32 numbers, is rounded differently; cut like this, updates in fp32 and fp64 have equal bits with any owners
GRAIN = 64


@dataclass(frozen=True)
class UnitSizes:
    """The tensors of a unit in the order of their memory: elements of each, and whether it may be cut."""

    elements: tuple[int, ...]
    may_cut: tuple[bool, ...]


@dataclass(frozen=True)
class Ownership:
    """The cuts of all units: rank r owns the elements `bounds[unit][r]` to `bounds[unit][r + 1]` of each unit.

    `bounds` has the shape (units, world_size + 1); each row rises from 0 to the elements of the unit.
    """

    bounds: tuple[tuple[int, ...], ...]

    @property
    def world_size(self) -> int:
        return len(self.bounds[0]) - 1

    @property
    def total(self) -> int:
        """The elements of all units."""
        return sum(bounds[-1] for bounds in self.bounds)

    def owned_by(self, rank: int) -> int:
        """How many elements a rank owns."""
        return sum(bounds[rank + 1] - bounds[rank] for bounds in self.bounds)

    def digest(self) -> int:
        """A signed 64-bit number that names these cuts."""
        return int.from_bytes(
            hashlib.blake2b(repr(self.bounds).encode(), digest_size=8).digest(), "little", signed=True
        )


def cut(units: Sequence[UnitSizes], fractions: Sequence[float]) -> Ownership:
    """Cut each unit in rank order in proportion to `fractions`, one for each rank; a rank with 0 owns nothing.

    A rank's elements over all units follow its fraction as closely as the tensors that stay whole allow. Raises
    ValueError for negative or non-finite fractions, or if none is above 0.
    """
    if not all(math.isfinite(fraction) and fraction >= 0 for fraction in fractions) or not any(fractions):
        raise ValueError(f"fractions {list(fractions)}: expected finite numbers of 0 or more, at least one above 0")
    largest = max(fractions)  # sums of the largest floats would overflow
    fractions = [fraction / largest for fraction in fractions]
    total = math.fsum(fractions)
    # of each rank but the last: what it and those before it own
    reaches = [math.fsum(fractions[: rank + 1]) / total for rank in range(len(fractions) - 1)]
    missed = [0.0] * len(reaches)  # elements by which the cuts so far lie before their places
    bounds = []
    for unit in units:
        elements, cuts = sum(unit.elements), [0]
        for place, reach in enumerate(reaches):
            wanted = reach * elements + missed[place]
            cuts.append(max(cuts[-1], _nearest_cut(unit, wanted)))
            missed[place] = wanted - cuts[-1]
        bounds.append((*cuts, elements))
    return Ownership(tuple(bounds))


def _nearest_cut(unit: UnitSizes, wanted: float) -> int:
    """The place nearest to `wanted` at which the unit may be cut."""
    starts = list(itertools.accumulate(unit.elements, initial=0))  # (tensors + 1,)
    place = min(max(0, round(wanted)), starts[-1])
    index = bisect.bisect_right(starts, place) - 1
    if index == len(unit.elements):
        return place
    before, after = starts[index], starts[index + 1]
    if unit.may_cut[index]:
        before += (place - before) // GRAIN * GRAIN
        after = min(after, before + GRAIN)
    return before if place - before <= after - place else after
