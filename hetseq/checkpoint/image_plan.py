"""The plan of an image: which part of the state is where in memory, and on which two ranks.

Responsible for cutting what each rank owns into parts, one for each second place, and for naming an image. Pure, apart
from the agreement on the layout, which it gets. The one idea: a part is cut where its copy is, so that a copy is always
a whole part, with a header and checksums of its own, and any node that has it can give it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetseq.balance.second_places import Place
from hetseq.checkpoint.layout import Piece
from hetseq.checkpoint.records import sha256


@dataclass(frozen=True)
class ImagePart:
    """A part of an image: made by the rank `owner`; the rank `keeper` has a copy, None: no rank has."""

    index: int
    owner: int
    keeper: int | None
    pieces: tuple[Piece, ...]


def image_parts(owned: Sequence[Sequence[Piece]], places: Sequence[Sequence[Place]]) -> list[ImagePart]:
    """The parts of an image from the pieces of each rank and the second places of each; equal on all ranks."""
    parts: list[ImagePart] = []
    for owner, (pieces, keepers) in enumerate(zip(owned, places, strict=True)):
        shares = [place.share for place in keepers] or [1.0]
        for number, own in enumerate(cut(pieces, shares)):
            if own:
                keeper = keepers[number].rank if keepers else None
                parts.append(ImagePart(len(parts), owner, keeper, tuple(own)))
    return parts


def cut(pieces: Sequence[Piece], shares: Sequence[float]) -> list[list[Piece]]:
    """The pieces in as many lists as there are shares, in order, with bytes in proportion to the shares."""
    total, groups, start, reached = sum(piece.bytes for piece in pieces), list[list[Piece]](), 0, 0.0
    for share in shares[:-1]:
        reached += share / sum(shares)
        end = round(total * reached)
        groups.append(list(_between(pieces, start, end)))
        start = end
    groups.append(list(_between(pieces, start, total + 1)))
    return groups


def _between(pieces: Sequence[Piece], start: int, end: int) -> Iterator[Piece]:
    """What begins at the bytes `start` to `end` of the pieces, one after the other."""
    offset = 0
    for piece in pieces:
        first, last = (_element(piece, position - offset) for position in (start, end))
        if first < last:
            yield Piece(piece.spec, first, last)
        elif not piece.bytes and start <= offset < end:
            yield piece
        offset += piece.bytes


def _element(piece: Piece, byte: int) -> int:
    """The first element of a piece that begins at this byte of it or later; the end of the piece at most."""
    return min(piece.end, piece.begin + max(0, -(-byte // piece.spec.itemsize)))


@dataclass(frozen=True)
class NodeImages:
    """The images that one rank finds in the memory of its node, and whether it has the state that a generation begins
    from: not if it joins, or if all begin from a checkpoint."""

    memory: str  # equal for ranks that find the same
    holds_state: bool
    images: tuple[tuple[str, int, int, int, tuple[int, ...]], ...]  # plan, step, generation, number of parts, parts


def image_to_keep(nodes: Sequence[NodeImages], *, step: int) -> str | None:
    """The plan of the image that stays when a generation begins with the state after `step`; None: no image does.

    An image on two nodes comes before a newer one whose copies were still under way. An image of a later step, or one
    that only ranks have that join, is of a course that was given up.
    """
    orders: dict[str, tuple[int, int, int]] = {}  # generation, step, number of parts
    places: dict[str, dict[int, set[str]]] = {}  # the memories that have each part, by plan
    are_holders = any(node.holds_state for node in nodes)
    known = {image[0] for node in nodes if node.holds_state or not are_holders for image in node.images}
    for node in nodes:
        for plan, of_step, generation, number, parts in node.images:
            if plan in known and of_step <= step:
                orders[plan] = generation, of_step, number
                for part in parts:
                    places.setdefault(plan, {}).setdefault(part, set()).add(node.memory)
    whole = [plan for plan, parts in places.items() if len(parts) == orders[plan][2]]
    return max(whole, key=lambda plan: (min(map(len, places[plan].values())) > 1, orders[plan]), default=None)


def digest_of(layout: str, parts: Sequence[ImagePart]) -> str:
    """The key of a division into parts, given the key of the layout that it divides."""
    return sha256(json.dumps([layout, [[part.owner, part.keeper, _sizes(part)] for part in parts]]).encode())


def _sizes(part: ImagePart) -> list[int]:
    return [piece.bytes for piece in part.pieces]
