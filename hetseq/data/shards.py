"""Data sharding: how many samples of a step come from each shard, and which ranks can read it. Pure, integers only.

A shard is a part of the training data that some ranks can read and the others cannot (`--data-by-host`). Every rank
knows the number of samples in each shard, but can read only its own samples.

The one idea: of the first x samples of an epoch, each shard provides its share of x seats under Webster's apportionment
(Sainte-Laguë). These numbers never fall as x grows, add up to x, and at the end of the epoch equal the shard sizes. So
each step mixes the shards in proportion to their sizes, and each sample comes once per epoch. Within a step the shards
follow one another, and the slice of a data-parallel group remains a run of positions.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


class _Order(Protocol):
    def take(self, start: int, stop: int) -> Indices: ...


@dataclass(frozen=True)
class Shards:
    """The number of samples in each shard, above 0, and the data-parallel groups that can read it, in ascending order.

    A shard without holders was lost with its host: steps are planned as if the first group held it, but are not run.
    """

    samples: tuple[int, ...]
    holders: tuple[tuple[int, ...], ...]
    group_count: int  # of all data-parallel groups

    @property
    def total(self) -> int:
        """The number of samples in all shards."""
        return sum(self.samples)

    @property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """The data-parallel groups among which each shard's part of a step is divided."""
        return tuple(groups or (0,) for groups in self.holders)

    @property
    def lineup(self) -> tuple[int, ...]:
        """All groups in the order of their slices of a step: shard by shard, then the groups that can read none."""
        reading = dict.fromkeys(group for groups in self.readers for group in groups)
        return (*reading, *(group for group in range(self.group_count) if group not in reading))

    @property
    def lost(self) -> tuple[int, ...]:
        """The shards without holders."""
        return tuple(number for number, groups in enumerate(self.holders) if not groups)

    def sizes(self, start: int, stop: int) -> tuple[int, ...]:
        """The number of samples at positions start..stop-1 of an epoch that come from each shard."""
        before, after = apportioned(self.samples, start), apportioned(self.samples, stop)
        return tuple(late - early for early, late in zip(before, after))


class ShardedOrder:
    """The order of one epoch over all shards: position -> index within the shard that it belongs to.

    `orders` holds the order of each shard's own samples. `step` is the number of samples per step; steps begin at its
    multiples, since the layout within a step depends on both of its ends.
    """

    def __init__(self, samples: Sequence[int], orders: Sequence[_Order], *, step: int) -> None:
        self._samples, self._orders, self._step = tuple(samples), orders, step
        self.n = sum(samples)

    def take(self, start: int, stop: int) -> Indices:
        """Sample indices at positions start..stop-1, all in one step and one shard; shape (stop - start,)."""
        if not 0 <= start <= stop <= self.n:
            raise IndexError(f"positions {start} to {stop} of an epoch of {self.n} samples")
        if start == stop:
            return np.empty(0, np.int64)
        first = start - start % self._step
        begins = apportioned(self._samples, first)
        ends = apportioned(self._samples, min(first + self._step, self.n))
        place = start - first
        for begin, end, order in zip(begins, ends, self._orders):
            if place < end - begin:
                if place + stop - start > end - begin:
                    break
                return order.take(begin + place, begin + place + stop - start)
            place -= end - begin
        raise IndexError(f"positions {start} to {stop} belong to more than one shard, and no rank can read both")


@functools.lru_cache(maxsize=64)  # every micro-batch of a step needs both ends of the step
def apportioned(samples: tuple[int, ...], seats: int) -> tuple[int, ...]:
    """How many of `seats` samples each shard provides, by Webster's method: the order of (2 k + 1) / samples, k from 0.

    A tie goes to the first shard. `seats` is at most the sum of `samples`, for which the result is `samples`.
    """
    total, count = sum(samples), len(samples)
    assert 0 <= seats <= total, "no more seats than samples"
    # start from each shard's rounded quota of slightly fewer seats: never too much, and at most `count` seats are left
    fewer = max(0, 2 * seats - count)
    given = [(size * fewer + total) // (2 * total) if fewer else 0 for size in samples]
    left = [(Fraction(2 * number + 1, size), shard) for shard, (number, size) in enumerate(zip(given, samples))]
    heapq.heapify(left)
    for _ in range(seats - sum(given)):
        _, shard = left[0]
        given[shard] += 1
        heapq.heapreplace(left, (Fraction(2 * given[shard] + 1, samples[shard]), shard))
    return tuple(given)
