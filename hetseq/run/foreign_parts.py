"""Brings a directory group what only ranks of other groups own, so that each run directory gets whole checkpoints.

Responsible for one transfer before a save. The one idea: each owner sends its slices to one rank of each other group,
which holds them until the save has copied them. All ranks know from the same texts who sends what, in which order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hetseq.checkpoint import Held, TensorSlice
from hetseq.comm.directory_groups import DirectoryGroups, gather_texts
from hetseq.comm.slices import SliceExchange

_AT_ONCE = 16 << 20  # bytes in a message, unless a single slice has more
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


@dataclass(frozen=True)
class _Item:
    """A slice, or a whole tensor (`begin` is None), that a rank holds."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int | None
    end: int
    bytes: int


def with_foreign_parts(
    held: Mapping[str, Held], common: frozenset[str], exchange: SliceExchange, sharing: DirectoryGroups
) -> dict[str, Held]:
    """`held`, and what this rank keeps for its directory group; tensors named in `common` are whole on every rank.

    Collective. Raises PeerLostError.
    """
    own = [(item, piece) for name, one in held.items() if name not in common for item, piece in _items(name, one)]
    texts = gather_texts(sharing.whole, json.dumps([list(vars(item).values()) for item, _ in own]))
    of_rank = [
        [
            _Item(name, dtype, tuple(shape), begin, end, size)
            for name, dtype, shape, begin, end, size in json.loads(text)
        ]
        for text in texts
    ]
    found: dict[str, Any] = dict(held)
    # one for all messages: an exchange keeps what it has lent, and no two messages have the same size
    outgoing = exchange.memory(max((_AT_ONCE, *(item.bytes for item, _ in own))), torch.uint8, torch.device("cpu"))
    for owner, items in enumerate(of_rank):
        for group in sharing.parts:
            if owner in group:
                continue
            # state without a dimension is the same on all owners of a tensor
            there = {item.name for rank in group for item in of_rank[rank] if item.begin is None}
            lacking = [place for place, item in enumerate(items) if item.name not in there]
            target = group[owner % len(group)]
            for places in _batches(items, lacking):
                rank = sharing.whole.rank
                pieces = [own[place][1] for place in places] if rank == owner else []
                message = [items[place] for place in places]
                _send(message, pieces, found, exchange, outgoing, way=(owner, target), rank=rank)
    exchange.release(outgoing)
    return found


def _items(name: str, held: Held) -> Iterator[tuple[_Item, torch.Tensor]]:
    if isinstance(held, torch.Tensor):
        yield _Item(name, str(held.dtype), tuple(held.shape), None, held.numel(), held.nbytes), held
        return
    for one in held:
        yield _Item(name, str(one.tensor.dtype), one.shape, one.begin, one.end, one.tensor.nbytes), one.tensor


def _batches(items: Sequence[_Item], places: Sequence[int]) -> Iterator[list[int]]:
    batch: list[int] = []
    for place in places:
        if batch and sum(items[one].bytes for one in (*batch, place)) > _AT_ONCE:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def _send(
    message: Sequence[_Item],
    pieces: Sequence[torch.Tensor],
    found: dict[str, Any],
    exchange: SliceExchange,
    memory: torch.Tensor,
    *,
    way: tuple[int, int],
    rank: int,
) -> None:
    """One message on its way from an owner, who has `pieces`, to a rank of another group; every rank calls it."""
    size, (owner, target) = sum(item.bytes for item in message), way
    outgoing, incoming = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
    if rank == owner:
        outgoing[target] = memory[:size]
        parts = [piece.detach().contiguous().view(-1).view(torch.uint8).cpu() for piece in pieces]
        torch.cat(parts, out=outgoing[target])
    elif rank == target:
        incoming[owner] = torch.empty(size, dtype=torch.uint8)
    exchange.swap(outgoing, incoming).wait()
    offset = 0
    for item in message if incoming else ():
        raw, offset = incoming[owner][offset : offset + item.bytes], offset + item.bytes
        values = raw.clone().view(_DTYPES[item.dtype])  # a copy, for its alignment
        if item.begin is None:
            found[item.name] = values.view(item.shape)
        else:
            found[item.name] = [*found.get(item.name, ()), TensorSlice(values, item.begin, item.end, item.shape)]
