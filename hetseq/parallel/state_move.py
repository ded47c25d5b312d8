"""Moves parts of the state to new owners, when the ranks of a run or their cuts have changed.

Responsible for moving, of each parameter and of its moments, the elements that a rank owns from now on and does not
hold. Refuses to decide who owns what (`balance.ownership`) and who gives it (`balance.givers`).

The one idea: each rank tells which elements of each unit it holds, and what state the optimizer has of them; from that
and the new cuts every rank computes the same list of messages, one for each unit and each pair of ranks. Nothing that
is held is given up before the caller has heard that all messages have arrived.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hetseq.balance.givers import Gift, gifts
from hetseq.comm.directory_groups import gather_texts
from hetseq.comm.group import Group
from hetseq.parallel.owned_units import OwnedUnits

_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_ITSELF = ""  # the key under which a parameter's own values travel

#: by parameter (its place in the model) and key: type, shape and value, as far as they can be told in JSON
Told = Mapping[int, Mapping[str, tuple[str | None, list[int] | None, Any]]]


@dataclass(frozen=True)
class Held:
    """What a rank holds of one parameter: elements in row-major order, and the optimizer's state of them."""

    begin: int
    end: int
    values: torch.Tensor  # (end - begin,), or of the parameter's shape if it is held whole
    state: Mapping[str, Any] = field(default_factory=dict)


@torch.no_grad()
def move(held: Mapping[int, Held], reducer: OwnedUnits, group: Group) -> tuple[dict[int, dict[str, Any]], int]:
    """Bring this rank all that it owns by the cuts of `reducer`: its parameters are set, its state is returned.

    `held` are the parts of earlier cuts, all of the same state and together everything; empty on a rank that joins.
    Ranks of several groups, or of cuts of two generations, hold some elements several times. Returns the optimizer's
    state of each own parameter, by its place in the model, and the bytes of state that this rank got from others.
    Collective. Raises PeerLostError, and DisagreementError if no rank holds some element.
    """
    extents = np.zeros((len(reducer.parameters), 2), np.int64)
    for index, one in held.items():
        extents[index] = one.begin, one.end
    table = group.all_gather_rows(extents.flatten()).reshape(group.world_size, -1, 2)
    told = [{int(index): keys for index, keys in json.loads(text).items()} for text in gather_texts(group, _told(held))]
    of_pair = _gifts(table, reducer)
    wanted = {index: (fragment.begin, fragment.end) for index, fragment in reducer.own_fragments.items()}
    known: dict[int, Mapping[str, Any]] = {}  # of each parameter, from the lowest rank that holds a part of it
    for of_rank in reversed(told):
        known |= of_rank
    new = {
        index: dict(held[index].state)  # as it is
        if index in held
        and (held[index].begin, held[index].end) == extent
        and held[index].values.shape == reducer.own_fragments[index].owned.shape
        else _empty_state(known.get(index, {}), reducer, index)
        for index, extent in wanted.items()
    }
    received_bytes = 0
    for unit in reducer.unit_members:
        received_bytes += _exchange_unit(unit, held, of_pair, told, reducer, group, new)
    reducer.changed()
    return new, received_bytes


def _gifts(table: np.ndarray[Any, Any], reducer: OwnedUnits) -> dict[tuple[int, int], dict[int, list[Gift]]]:
    """What travels, by giver and taker, and by parameter; `table`: what ranks hold, (world_size, parameters, 2)."""
    wanted = np.array(
        [[reducer.extent(index, rank) for index in range(len(reducer.parameters))] for rank in range(len(table))],
        np.int64,
    )
    found: dict[tuple[int, int], dict[int, list[Gift]]] = {}
    for gift in gifts(table, wanted.reshape(table.shape), hosts=reducer.division.hosts):
        found.setdefault((gift.giver, gift.taker), {}).setdefault(gift.tensor, []).append(gift)
    return found


def _told(held: Mapping[int, Held]) -> str:
    record = {}
    for index, one in held.items():
        keys: dict[str, Any] = {}
        for key, value in one.state.items():
            if not isinstance(value, torch.Tensor):
                keys[key] = [None, None, value]
            elif not value.dim():
                keys[key] = [str(value.dtype), [], value.item()]
            elif value.shape == one.values.shape:
                keys[key] = [str(value.dtype), None, None]  # cut like the parameter
            else:
                keys[key] = [str(value.dtype), list(value.shape), None]
        record[index] = keys
    return json.dumps(record)


def place_of_state(key: str, value: torch.Tensor, parameter: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """A value of an optimizer's state on the device on which the update needs it. `group`: the parameter's.

    As `torch.optim.Optimizer.load_state_dict` has it: only a counter of steps may be elsewhere than its parameter, and
    not if the group is fused or capturable. A parameter that is a single number has moments that are.
    """
    stays = key == "step" and not value.dim() and not group.get("fused") and not group.get("capturable")
    return value if stays else value.to(parameter.device)


def _empty_state(keys: Mapping[str, Any], reducer: OwnedUnits, index: int) -> dict[str, Any]:
    """The state of an own parameter, with memory for the values that are to come."""
    fragment, state = reducer.own_fragments[index], dict[str, Any]()
    device = fragment.owned.device
    for key, (dtype, shape, value) in keys.items():
        if dtype is None:
            state[key] = value
        elif shape == []:
            state[key] = torch.tensor(value, dtype=_DTYPES[dtype])
        elif shape is None:
            state[key] = torch.zeros_like(fragment.owned, dtype=_DTYPES[dtype]).detach()
        else:
            state[key] = torch.zeros(shape, dtype=_DTYPES[dtype], device=device)
    return state


@dataclass(frozen=True)
class _Item:
    """Elements of one tensor in a message: `begin` to `end` of the parameter, all of a tensor of another shape."""

    index: int
    key: str
    begin: int
    end: int
    is_whole: bool
    bytes: int


def _items(
    unit: list[int], gifts_of: Mapping[int, Sequence[Gift]], keys_of: Told, reducer: OwnedUnits
) -> Iterator[_Item]:
    """What one rank sends to another of a unit, in order; the same list on both. `keys_of`: what the giver has told."""
    for gift in (gift for index in unit for gift in gifts_of.get(index, ())):
        index, begin, end = gift.tensor, gift.begin, gift.end
        itemsize = reducer.parameters[index].element_size()
        yield _Item(index, _ITSELF, begin, end, False, (end - begin) * itemsize)
        for key, (dtype, shape, _) in keys_of[index].items():
            if dtype is None or shape == []:
                continue
            itemsize = _DTYPES[dtype].itemsize
            elements = end - begin if shape is None else int(np.prod(shape))
            yield _Item(index, key, begin, end, shape is not None, elements * itemsize)


def _exchange_unit(
    unit: list[int],
    held: Mapping[int, Held],
    of_pair: Mapping[tuple[int, int], Mapping[int, Sequence[Gift]]],
    told: Sequence[Told],
    reducer: OwnedUnits,
    group: Group,
    new: dict[int, dict[str, Any]],
) -> int:
    """Send and receive what changes hands of one unit; the bytes of optimizer state received."""
    rank, exchange, cpu = group.rank, reducer.exchange, torch.device("cpu")
    outgoing, incoming, lists = {}, {}, {}
    for other in range(group.world_size):
        if other == rank:
            continue
        given = list(_items(unit, of_pair.get((rank, other), {}), told[rank], reducer))
        if given:
            outgoing[other] = exchange.memory(sum(item.bytes for item in given), torch.uint8, cpu)
            parts = [_source(held[item.index], item).contiguous().view(-1).view(torch.uint8) for item in given]
            torch.cat([part.cpu() for part in parts], out=outgoing[other])
        lists[other] = list(_items(unit, of_pair.get((other, rank), {}), told[other], reducer))
        if lists[other]:
            incoming[other] = torch.empty(sum(item.bytes for item in lists[other]), dtype=torch.uint8)
    exchange.swap(outgoing, incoming).wait()
    for tensor in outgoing.values():
        exchange.release(tensor)
    for item in _items(unit, _kept(unit, held, reducer, rank), told[rank], reducer):
        if item.key != _ITSELF and new[item.index][item.key] is held[item.index].state[item.key]:
            continue
        _put(item, _source(held[item.index], item).flatten(), reducer, new)
    received = 0
    for other, message in incoming.items():
        offset = 0
        for item in lists[other]:
            raw, offset = message[offset : offset + item.bytes], offset + item.bytes
            dtype = reducer.parameters[item.index].dtype if item.key == _ITSELF else new[item.index][item.key].dtype
            _put(item, raw.clone().view(dtype), reducer, new)  # a copy, for its alignment
            received += item.bytes if item.key != _ITSELF else 0
    return received


def _kept(unit: list[int], held: Mapping[int, Held], reducer: OwnedUnits, rank: int) -> dict[int, list[Gift]]:
    """What this rank holds and will own of a unit, as gifts to itself."""
    found = {}
    for index in unit:
        if index in held:
            first, last = reducer.extent(index, rank)
            begin, end = max(first, held[index].begin), min(last, held[index].end)
            if begin < end:
                found[index] = [Gift(index, rank, rank, begin, end)]
    return found


def _source(one: Held, item: _Item) -> torch.Tensor:
    values: torch.Tensor = one.values if item.key == _ITSELF else one.state[item.key]
    return values if item.is_whole else values.flatten()[item.begin - one.begin : item.end - one.begin]


def _put(item: _Item, values: torch.Tensor, reducer: OwnedUnits, new: dict[int, dict[str, Any]]) -> None:
    fragment = reducer.own_fragments[item.index]
    target = fragment.owned.detach() if item.key == _ITSELF else new[item.index][item.key]
    if item.is_whole:
        target.copy_(values.view(target.shape))
        return
    if target.is_contiguous():
        target.view(-1)[item.begin - fragment.begin : item.end - fragment.begin].copy_(values)
    else:  # whole, in a memory layout of its own
        target.copy_(values.view(target.shape))
