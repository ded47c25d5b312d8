"""Sums across groups of ranks, each of which has its own sums of everything, cut among its ranks in its own way.

Responsible for which elements travel between owners of different groups, and for that exchange. Knows neither
gradients nor micro-batches.

The one idea: the cuts of all groups together cut a unit into segments, each with one owner in every group. An owner
adds up one part of its segment for all groups and gets the other parts from the others, as in a ring: over the boundary
of groups travel 2 (G - 1) / G of what a rank owns, where G is the number of groups. Terms are added in the order of the
groups, so all groups get the same bits.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hetseq.comm.slices import SliceExchange, Transfer


@dataclass(frozen=True)
class Segment:
    """Elements `begin` to `end` of a unit, and the rank that owns them in each group. Shape (groups,)."""

    begin: int
    end: int
    owners: tuple[int, ...]

    def part(self, group: int) -> slice:
        """The elements that the owner in a group adds up."""
        size, groups = self.end - self.begin, len(self.owners)
        return slice(self.begin + size * group // groups, self.begin + size * (group + 1) // groups)


def segments_of(cuts: Sequence[Sequence[int]], group: int, rank: int) -> list[Segment]:
    """What a rank of a group owns, as segments; `cuts`: the bounds of each group, (groups, ranks + 1). Pure."""
    first, last = cuts[group][rank], cuts[group][rank + 1]
    points = sorted({first, last, *(cut for bounds in cuts for cut in bounds if first < cut < last)})
    return [
        Segment(begin, end, tuple(bisect.bisect_right(bounds, begin) - 1 for bounds in cuts))
        for begin, end in itertools.pairwise(points)
    ]


class GroupSum:
    """The sums of one unit: `total`, (own elements,), has the sums of this rank's group, and later of all."""

    def __init__(
        self, exchange: SliceExchange, total: torch.Tensor, cuts: Sequence[Sequence[int]], group: int, rank: int
    ) -> None:
        self._exchange, self._total, self._group, self._first = exchange, total, group, cuts[group][rank]
        self._segments = segments_of(cuts, group, rank)
        self._incoming: dict[int, torch.Tensor] = {}
        self._outgoing: dict[int, torch.Tensor] = {}
        self._transfer: Transfer | None = None

    def begin(self) -> None:
        """Begin to send this group's terms to the owners that add them up. Collective."""
        self._swap(lambda group: group, lambda _: self._group)

    def add_up(self) -> None:
        """Add the terms up, and begin to send the sums. Collective. Raises PeerLostError."""
        incoming = self._end()
        at = dict.fromkeys(incoming, 0)
        for segment in self._segments:
            own = self._of_unit(segment.part(self._group))
            terms = []
            for group, owner in enumerate(segment.owners):
                if group == self._group:
                    terms.append(own.clone())
                else:
                    terms.append(incoming[owner][at[owner] : at[owner] + own.numel()].to(own.device))
                    at[owner] += own.numel()
            own.copy_(terms[0])
            for term in terms[1:]:
                own.add_(term)
        self._swap(lambda _: self._group, lambda group: group)

    def finish(self) -> None:
        """Take the sums of the others. Raises PeerLostError."""
        incoming = self._end()
        at = dict.fromkeys(incoming, 0)
        for segment in self._segments:
            for group, owner in enumerate(segment.owners):
                if group != self._group:
                    target = self._of_unit(segment.part(group))
                    target.copy_(incoming[owner][at[owner] : at[owner] + target.numel()])
                    at[owner] += target.numel()

    def _of_unit(self, elements: slice) -> torch.Tensor:
        return self._total[elements.start - self._first : elements.stop - self._first]

    def _swap(self, leaves: Callable[[int], int], comes: Callable[[int], int]) -> None:
        """Begin an exchange with each owner of another group: which part leaves and which part comes, by its group."""
        leaving: dict[int, list[torch.Tensor]] = {}
        elements: dict[int, int] = {}
        for segment in self._segments:
            for group, owner in enumerate(segment.owners):
                if group != self._group:
                    leaving.setdefault(owner, []).append(self._of_unit(segment.part(leaves(group))))
                    part = segment.part(comes(group))
                    elements[owner] = elements.get(owner, 0) + part.stop - part.start
        dtype, cpu = self._total.dtype, torch.device("cpu")
        for owner, pieces in leaving.items():
            if size := sum(piece.numel() for piece in pieces):
                memory = self._exchange.memory(size * dtype.itemsize, torch.uint8, cpu)
                torch.cat([piece.to(cpu) for piece in pieces], out=memory.view(dtype))
                self._outgoing[owner] = memory
        self._incoming = {owner: torch.empty(size, dtype=dtype) for owner, size in elements.items()}
        given = {owner: memory.view(torch.uint8) for owner, memory in self._incoming.items() if memory.numel()}
        self._transfer = self._exchange.swap(self._outgoing, given)

    def _end(self) -> dict[int, torch.Tensor]:
        """What has come; the memory of what has left is free again."""
        assert self._transfer is not None, "begun before"
        self._transfer.wait()
        for memory in self._outgoing.values():
            self._exchange.release(memory)
        self._outgoing.clear()
        incoming, self._incoming = self._incoming, {}
        return incoming


def sum_across_groups(sums: Sequence[GroupSum]) -> None:
    """Carry these sums out, one unit after the other with the next one under way. Collective. Raises PeerLostError.

    Memory for what travels is needed for three units at a time.
    """
    for one, before, last in zip([*sums, None, None], [None, *sums, None], [None, None, *sums]):
        if one is not None:
            one.begin()
        if before is not None:
            before.add_up()
        if last is not None:
            last.finish()
