"""Second places: which ranks keep a copy of what another rank owns, so that the loss of a node loses nothing. Pure.

Responsible for choosing, for the image of each rank, ranks of other nodes that keep a second copy of it, by the free
memory of the nodes. Does not know what an image contains, and sends nothing.

The one idea: a copy in one piece survives more pairs of deaths than one that is cut, so a copy is cut only where no
node has room for all of it. It goes to the next node that has at least half as much room as the roomiest; other
machines come before other nodes of the same machine.

Groups of ranks that each hold the whole state need an image only if none of them is whole any more. So a copy goes
where the loss of both its places leaves some group whole: mostly to another node of its own group. In another one of
two groups it would die with its owner in just the cases in which it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

IMAGES = 2  # of each part, on each of its places: the newest whole one, and the one being made


@dataclass(frozen=True)
class Lodging:
    """What matters of one rank: ranks with equal `node` share memory that dies with it; a `machine` has nodes.

    `room_bytes` is what its node has for all images of its ranks; equal on all ranks of a node. The ranks of one
    `group` hold the whole state together.
    """

    node: str
    machine: str
    room_bytes: int
    image_bytes: int  # of what the rank owns
    group: int = 0


@dataclass(frozen=True)
class Place:
    """A rank that keeps a share of another rank's image; the shares of one image add up to 1."""

    rank: int
    share: float


def second_places(ranks: Sequence[Lodging]) -> list[tuple[Place, ...]]:
    """The places of the second copy of each rank's image, by rank; empty if there is none on any other node.

    A rank without an image needs none. Where the other nodes have less room than needed, the copy is divided in
    proportion to what they have, and the caller finds out that it does not fit.
    """
    left = {one.node: one.room_bytes for one in ranks}
    for one in ranks:
        left[one.node] -= IMAGES * one.image_bytes
    load = [0] * len(ranks)  # bytes of copies, by the rank that keeps them
    found: list[tuple[Place, ...]] = [()] * len(ranks)
    for rank in sorted(range(len(ranks)), key=lambda rank: (-ranks[rank].image_bytes, rank)):
        size = IMAGES * ranks[rank].image_bytes
        nodes = _others(ranks, rank) if size else []
        if not nodes:
            continue
        spared = [node for node in nodes if _spare_a_group(ranks, ranks[rank].node, node)]
        if sum(max(0, left[node]) for node in spared) >= size:
            nodes = spared
        # the next one with enough room: so not all ranks choose the same, and noise in their figures does not count
        most = max(left[node] for node in nodes)
        chosen = [node for node in nodes if left[node] >= max(size, most / 2)][:1]
        chosen = chosen or [node for node in nodes if left[node] > 0] or nodes[:1]
        total = sum(max(1, left[node]) for node in chosen)
        shares = [max(1, left[node]) / total for node in chosen]
        places = []
        for node, share in zip(chosen, shares):
            keeper = min((at for at, one in enumerate(ranks) if one.node == node), key=lambda at: (load[at], at))
            left[node] -= int(share * size)
            load[keeper] += int(share * size)
            places.append(Place(keeper, share))
        found[rank] = tuple(places)
    return found


def _others(ranks: Sequence[Lodging], rank: int) -> list[str]:
    """The nodes that may keep a copy for a rank, beginning with the one after its own."""
    turn = [ranks[(rank + step) % len(ranks)] for step in range(1, len(ranks))]
    elsewhere = [one for one in turn if one.machine != ranks[rank].machine]
    nodes = [one.node for one in elsewhere or turn if one.node != ranks[rank].node]
    return list(dict.fromkeys(nodes))


def _spare_a_group(ranks: Sequence[Lodging], node: str, other: str) -> bool:
    """Whether some group is whole after the loss of these two nodes."""
    return not {one.group for one in ranks} <= {one.group for one in ranks if one.node in (node, other)}
