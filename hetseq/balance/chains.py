"""Which slice takes a chain of ranks, so that no link carries it more than once. Pure.

Sent directly, the link of an owner of nearly everything, such as a memory server, would carry its slice as often as
there are others that compute: that link would set the time of a step. A sum is added in the order of the chain: the
ranks in order, the owner last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FEWEST = 3  # other ranks; with two a chain saves little, and takes longer to begin


@dataclass(frozen=True)
class Link:
    """The place of one rank in a chain; None before the first and behind the last one."""

    owner: int
    before: int | None
    after: int | None


def chained_owner(bounds: Sequence[float], ranks: Sequence[int]) -> int | None:
    """The owner whose slice takes a chain to or from `ranks`, None if there is none.

    It owns more than half: `bounds` as in `Ownership`, in any unit.
    """
    whole = bounds[-1] - bounds[0]
    for owner in range(len(bounds) - 1):
        if 2 * (bounds[owner + 1] - bounds[owner]) > whole:
            return owner if sum(rank != owner for rank in ranks) >= FEWEST else None
    return None


def link_of_sum(bounds: Sequence[int], givers: Sequence[int], rank: int) -> Link | None:
    """The place of `rank` in the chain of a sum; None if it is in none."""
    owner = chained_owner(bounds, givers)
    if owner is None:
        return None
    return _link(owner, [*(giver for giver in givers if giver != owner), owner], rank)


def link_of_gather(bounds: Sequence[int], takers: Sequence[int], rank: int) -> Link | None:
    """The place of `rank` in the chain by which an owner's slice reaches the takers; None if it is in none."""
    owner = chained_owner(bounds, takers)
    if owner is None:
        return None
    return _link(owner, [owner, *(taker for taker in takers if taker != owner)], rank)


def _link(owner: int, order: Sequence[int], rank: int) -> Link | None:
    if rank not in order:
        return None
    place = order.index(rank)
    return Link(owner, order[place - 1] if place else None, order[place + 1] if place + 1 < len(order) else None)
