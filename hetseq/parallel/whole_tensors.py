"""Parts of a divided model as a checkpoint has them: slices of whole tensors, in row-major order.

Responsible for parts whose elements do not follow each other in the whole tensor, such as some columns of a matrix. The
ranks of a group exchange their elements, so that each of them gets one slice of the whole tensor: a checkpoint knows
nothing of parts, and any layout can read it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hetseq.checkpoint import Held, TensorSlice
from hetseq.comm.directory_groups import gather_texts
from hetseq.comm.group import Group
from hetseq.parallel.divided_model import TensorPart
from hetseq.parallel.owned_state import OwnedState
from hetseq.parallel.owned_units import OwnedUnits

_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_ITSELF = ""  # the key of a parameter's own values


@torch.no_grad()
def assembled(owned: OwnedState, reducer: OwnedUnits, group: Group) -> dict[str, Held]:
    """What this rank gives to a checkpoint of the tensors whose parts are no slices, in new memory on the CPU, by the
    names of a checkpoint. Ranks of other groups than the first give nothing. Collective. Raises PeerLostError.
    """
    found: dict[str, Held] = {}
    told = [json.loads(text) for text in gather_texts(group, json.dumps(_keys(owned)))]
    keys: dict[str, dict[str, str]] = {}
    for of_rank in told:
        for name, types in of_rank.items():
            keys.setdefault(name, {}).update(types)
    names = list(owned.names.values())
    by_whole: dict[str, list[tuple[int, TensorPart]]] = {}
    for index, name in enumerate(names):
        part = owned.described.parts.get(name)
        if part is not None and part.offset is None:
            by_whole.setdefault(part.name, []).append((index, part))
    for whole, parts in by_whole.items():
        for key, dtype in sorted(keys.get(whole, {}).items()):
            values = {index: value for index, value in _values(owned, names, parts, key).items() if not owned.is_copy}
            one = _exchange(parts, values, _DTYPES[dtype], reducer, group)
            if one is not None and one.tensor.numel():
                found[f"optim.{whole}.{key}" if key else f"model.{whole}"] = [one]
    return found


def _keys(owned: OwnedState) -> dict[str, dict[str, str]]:
    """What this rank has an element of for each element of the parts, by the name of the whole: key and type."""
    found: dict[str, dict[str, str]] = {}
    for name, one in owned.fragments.items():
        part = owned.described.parts.get(name)
        if part is None or part.offset is not None:
            continue
        keys = found.setdefault(part.name, {_ITSELF: str(one.owned.dtype)})
        for key, value in owned.optimizer.state.get(one.owned, {}).items():
            if owned.is_divided(key, value, one.owned):
                keys[key] = str(value.dtype)
    return found


def _values(
    owned: OwnedState, names: list[str], parts: list[tuple[int, TensorPart]], key: str
) -> dict[int, tuple[int, Tensor]]:
    """First element and values of what this rank holds of each part, by the place of the part in the model."""
    found = {}
    for index, _ in parts:
        one = owned.fragments.get(names[index])
        if one is not None:
            value = one.owned if key == _ITSELF else owned.optimizer.state[one.owned][key]
            found[index] = one.begin, value.detach().reshape(-1).cpu()
    return found


def _exchange(
    parts: list[tuple[int, TensorPart]],
    values: Mapping[int, tuple[int, Tensor]],
    dtype: torch.dtype,
    reducer: OwnedUnits,
    group: Group,
) -> TensorSlice | None:
    """This rank's slice of one whole tensor, of which the ranks of the first group have some rows each."""
    ranks = list(reducer.division.groups[0] if reducer.division.groups else range(group.world_size))
    rank, any_part = group.rank, parts[0][1]
    ends = [any_part.rows * number // len(ranks) for number in range(len(ranks) + 1)]
    rows = {one: (ends[number], ends[number + 1]) for number, one in enumerate(ranks)}
    exchange, cpu = reducer.exchange, torch.device("cpu")
    outgoing: dict[int, list[Tensor]] = {}
    for index, part in parts:
        if index in values:
            begin, held = values[index]
            for target, (first, last) in rows.items() if rank in ranks else ():
                low, high = max(begin, first * part.width), min(begin + held.numel(), last * part.width)
                if low < high:
                    outgoing.setdefault(target, []).append(held[low - begin : high - begin])
    messages = {}
    for target, chosen in outgoing.items():
        if target != rank:
            flat = torch.cat(chosen).view(torch.uint8)
            messages[target] = exchange.memory(flat.numel(), torch.uint8, cpu)
            messages[target].copy_(flat)
    lists = {source: _spans(parts, source, rows[rank], reducer) for source in ranks} if rank in ranks else {}
    incoming = {
        source: torch.empty(sum(high - low for _, low, high in spans) * dtype.itemsize, dtype=torch.uint8)
        for source, spans in lists.items()
        if source != rank and spans
    }
    exchange.swap(messages, incoming).wait()
    for message in messages.values():
        exchange.release(message)
    if rank not in ranks:
        return None
    arrived: dict[int, Sequence[Tensor]] = {rank: outgoing.get(rank, [])}
    for source, message in incoming.items():
        arrived[source] = message.view(dtype).split([high - low for _, low, high in lists[source]])
    first, last = rows[rank]
    own = {index: torch.empty((last - first) * part.width, dtype=dtype) for index, part in parts}  # rows of each part
    starts = {index: first * part.width for index, part in parts}
    for source, pieces in arrived.items():
        for (index, low, high), piece in zip(lists[source], pieces, strict=True):
            own[index][low - starts[index] : high - starts[index]] = piece
    found = torch.empty((last - first) * any_part.width * any_part.degree, dtype=dtype)
    for index, part in parts:
        part.put_(found, own[index])
    begin = first * any_part.width * any_part.degree
    return TensorSlice(found, begin, begin + found.numel(), any_part.shape)


def _spans(
    parts: list[tuple[int, TensorPart]], source: int, rows: tuple[int, int], reducer: OwnedUnits
) -> list[tuple[int, int, int]]:
    """The elements that a rank holds of some rows of each part: its place in the model, the first one and the end."""
    found = []
    for index, part in parts:
        begin, end = reducer.extent(index, source)
        low, high = max(begin, rows[0] * part.width), min(end, rows[1] * part.width)
        if low < high:
            found.append((index, low, high))
    return found
