"""Which rank reads which chunk of a checkpoint, where ranks want different tensors or slices: pure functions.

The one idea: a rank reads the chunks that contain what it wants, and the chunks that no rank wants are divided among
the ranks, which read these only to verify them. So together the ranks verify every chunk.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterable, Sequence

#: chunks of each part
Chunks = list[set[int]]


def divide_unwanted(
    wanted: Sequence[Chunks], counts: Sequence[int], holders: Sequence[Collection[int]]
) -> list[Chunks]:
    """For each rank the chunks of each part that it reads only to verify them.

    `wanted` has the chunks that each rank wants of each part, `counts` the number of chunks of each part, and `holders`
    the ranks that can read each part. Each chunk that no rank wants goes to one rank that can read it, so that all
    ranks read about as much in total, and neighbouring chunks go to the same rank.
    """
    loads = [sum(map(len, of_rank)) for of_rank in wanted]
    duties: list[Chunks] = [[set() for _ in counts] for _ in wanted]
    for part, (count, able) in enumerate(zip(counts, holders)):
        unwanted = sorted(set(range(count)).difference(*(of_rank[part] for of_rank in wanted)))
        by_load = [(loads[rank], rank) for rank in able]
        heapq.heapify(by_load)
        quotas = [0] * len(wanted)
        for _ in unwanted:
            load, rank = by_load[0]
            heapq.heapreplace(by_load, (load + 1, rank))
            quotas[rank] += 1
        ends = itertools.accumulate(quotas)
        for rank, (quota, end) in enumerate(zip(quotas, ends)):
            duties[rank][part] = set(unwanted[end - quota : end])
            loads[rank] += quota
    return duties


def to_ranges(chunks: Iterable[int]) -> list[list[int]]:
    """Chunks as [first, last + 1] of each run of neighbours: short, also for a large part that is wanted whole."""
    ranges: list[list[int]] = []
    for chunk in sorted(chunks):
        if ranges and ranges[-1][1] == chunk:
            ranges[-1][1] += 1
        else:
            ranges.append([chunk, chunk + 1])
    return ranges


def from_ranges(ranges: Iterable[Sequence[int]]) -> set[int]:
    """The inverse of `to_ranges`."""
    return {chunk for begin, end in ranges for chunk in range(begin, end)}
