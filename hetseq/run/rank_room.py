"""What a model needs memory for, and what room each rank has for it.

Responsible for measuring and for dividing what ranks of one host have in common. Decides nothing: `owners` does. All
ranks get the same numbers.
"""

from __future__ import annotations

import hashlib
import operator
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from hetseq.balance.memory_plan import USABLE, ModelMemory, RankMemory
from hetseq.balance.shares import Cost
from hetseq.comm.group import Group
from hetseq.config.sections import DistributedConfig
from hetseq.parallel.delayed_init import is_absent
from hetseq.parallel.owned_names import OwnedNames
from hetseq.system import device_memory, host_memory

_WIDE = 8  # bytes of a number in double precision
_NONE = -1
_POOLS = 4  # control groups of a rank that others learn of
_LINK_BYTES_PER_S = 125e6  # 1 Gbit/s: before the first step no link has been measured


@dataclass(frozen=True)
class StateMemory:
    """What a rank needs memory for: what has owners, and beside that what a step needs at once, in bytes."""

    model: ModelMemory
    moving_bytes: int
    has_layers: bool  # the parameters have owners too

    @property
    def kind(self) -> str:
        """The value of `--shard-model`."""
        return "all" if self.has_layers else "state"

    @property
    def bytes(self) -> int:
        """Of what has owners."""
        return self.model.owned_bytes(self.kind)


def memory_of(
    model: torch.nn.Module,
    described: OwnedNames,
    groups: Sequence[list[list[int]]] | None,
    *,
    is_wide: bool,
    computes_in: torch.dtype | None = None,
) -> StateMemory:
    """The memory of a model whose layers come and go in these groups, the root first; None: its parameters stay.

    `described`: the parameters that have owners, or the trained ones. `is_wide`: gradients are summed in double
    precision. `computes_in`: the type of the copies that autocast makes of parameters; None: it makes none.
    """
    parameters, trained = list(described.by_parameter), len(described.trained)
    itemsize = parameters[0].element_size()
    wide = 2 if is_wide and itemsize < _WIDE else 1
    sizes = np.zeros((len(groups or ()), 2), np.int64)  # of the root and each layer: bytes of all, and of trained ones
    for size, of_layer in zip(sizes, groups or ()):
        for index in (index for group in of_layer for index in group):
            size += parameters[index].nbytes, parameters[index].nbytes if index < trained else 0
    known = set(parameters[:trained])
    memory = ModelMemory(
        sum(parameter.numel() for parameter in parameters[:trained]),
        compute_bytes_per_parameter=itemsize,
        optimizer_bytes_per_parameter=2 * itemsize,
        gradient_bytes_per_parameter=itemsize,
        cast_bytes_per_parameter=0 if computes_in is None else computes_in.itemsize,
        frozen_bytes=sum(one.nbytes for one in model.parameters() if one not in known),
        layers=max(1, len(sizes) - 1),
        root_parameters=int(sizes[0, 1]) // itemsize if groups else None,
    )
    if groups is None:
        return StateMemory(memory, memory.gradient_bytes, has_layers=False)
    root, largest = sizes[0].tolist(), sizes[1:].max(axis=0).tolist()
    # two layers and the root are whole; gradients of two units travel, beside what an owner receives of them
    moving = 2 * largest[0] + root[0] + wide * 4 * max(largest[1], root[1])
    return StateMemory(memory, moving, has_layers=True)


@dataclass(frozen=True)
class Brought:
    """What a rank brings from an earlier generation; the defaults are of a rank without state."""

    kind: int = _NONE  # its place in SHARD_MODELS
    rule: int = _NONE  # that `--shard-groups auto` chose, its place in `rank_groups.RULES`
    fraction: float = 0.0  # what it owned, in relation to other ranks
    held_bytes: int | None = None  # on its device, and divided anew; None: the parameters in memory


@dataclass(frozen=True)
class RankRoom:
    """What one rank says of itself."""

    kind: int  # as of `Brought`
    fraction: float
    is_stable: bool
    host: int  # one number for each host
    is_on_gpu: bool
    capacity: int  # bytes of its device for the model and its state
    limit: int | None  # bytes of state that may be on its device; None: no limit
    host_room: int  # bytes of state that may be in host memory, beside a GPU
    rule: int = _NONE  # as of `Brought`
    pool: int = 0  # on its host, what limits its memory: one number for each control group, 0 for the machine
    checkpoints: bool = False  # it computes layers again in backward


class Told(NamedTuple):
    """The row of a rank: what it tells the others; `_NONE` where there is no such number."""

    host: int
    is_on_gpu: int
    of_machine: int  # bytes of host memory that are available to all ranks of the host
    pools: tuple[int, ...]  # control groups, the tightest first
    in_pools: tuple[int, ...]  # bytes that are available to all ranks of each
    on_gpu: int  # bytes that are free
    here: int  # bytes of the model that are there already
    most: int  # of --own-memory, of its node: bytes on devices of its kind
    on_host: int  # and bytes in host memory, if it names both
    kind: int
    fraction: int  # the bits of a double
    is_stable: int
    rule: int
    checkpoints: int

    def numbers(self) -> list[int]:
        """All of it, of one length for all ranks."""
        before, lists, after = self[:3], (self.pools, self.in_pools), self[5:]
        filled = (number for one in lists for number in [*one, *[_NONE] * _POOLS][:_POOLS])
        return [*map(int, before), *filled, *map(int, after)]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Told:
        """The row that has these `numbers`."""
        host, is_on_gpu, of_machine, *rest = numbers
        pools, in_pools = rest[:_POOLS], rest[_POOLS : 2 * _POOLS]
        count = sum(number != _NONE for number in pools)
        return cls(host, is_on_gpu, of_machine, tuple(pools[:count]), tuple(in_pools[:count]), *rest[2 * _POOLS :])


def rooms_of_ranks(
    parameters: Sequence[torch.nn.Parameter],
    group: Group,
    config: DistributedConfig,
    brought: Brought = Brought(),
    *,
    checkpoints: bool = False,
) -> list[RankRoom]:
    """The room of each rank, by rank; ranks divide what their host, or their control group, has. Collective."""
    device, on_host, memory = parameters[0].device, config.own_host_bytes(), host_memory.available()
    is_on_gpu = device.type == "cuda"
    most = config.own_memory_bytes() if is_on_gpu or on_host is None else on_host
    here = brought.held_bytes
    if here is None:
        here = 0 if any(map(is_absent, parameters)) else sum(one.nbytes for one in parameters)
    row = Told(
        int.from_bytes(hashlib.blake2b(socket.gethostname().encode(), digest_size=7).digest(), "big"), is_on_gpu,
        memory.of_machine, tuple(memory.by_group), tuple(memory.by_group.values()),
        device_memory.free_bytes(device) if is_on_gpu else _NONE, here,
        _NONE if most is None else most, _NONE if on_host is None else on_host, brought.kind,
        int(np.float64(brought.fraction).view(np.int64)), config.is_stable, brought.rule,
        checkpoints,
    )  # fmt: skip
    rows = [Told.of(numbers) for numbers in group.all_gather_rows(np.array(row.numbers(), np.int64)).tolist()]
    return [room_of(one, rows) for one in rows]


def room_of(one: Told, rows: Sequence[Told]) -> RankRoom:
    """The room of the rank of one row, beside the rows of all ranks."""
    beside = [other for other in rows if other.host == one.host]
    alike = [other for other in beside if other.is_on_gpu == one.is_on_gpu]
    has_places = one.on_host != _NONE
    # ranks on the CPU have all of their state in host memory, and with such places those on GPUs a part of it
    users = [other for other in beside if not other.is_on_gpu or (has_places and other.on_host != _NONE)] or alike
    parts = [(one.of_machine // len(users), 0)]
    for pool, bytes_ in zip(one.pools, one.in_pools):
        parts.append((bytes_ // max(1, sum(pool in other.pools for other in users)), pool))
    in_memory, narrowest = min(parts)
    host_room = min(one.on_host // len(users), int(USABLE * in_memory)) if has_places and one.is_on_gpu else 0
    limited = beside if not has_places else alike if one.is_on_gpu else users
    return RankRoom(
        one.kind, float(np.int64(one.fraction).view(np.float64)), bool(one.is_stable), one.host, bool(one.is_on_gpu),
        (one.on_gpu if one.is_on_gpu else in_memory) + one.here,
        None if one.most == _NONE else one.most // len(limited), host_room, one.rule, narrowest,
        bool(one.checkpoints),
    )  # fmt: skip


def planned_ranks(
    rooms: Sequence[RankRoom],
    *,
    with_host: bool = False,
    node_link: float | None = None,
    computing: Sequence[bool] = (),
) -> list[RankMemory]:
    """The ranks as the planner sees them before the first step, when neither speeds nor links are known.

    `with_host`: state may be in host memory beside a GPU. `node_link`: how many times as fast links within a host are.
    `computing`: the ranks that have to have room for samples.
    """
    return [
        RankMemory(
            f"rank {rank}", Cost(0.0, 1.0, batch=1), one.capacity, _LINK_BYTES_PER_S, one.host_room if with_host else 0,
            one.limit if one.limit is None or not with_host else one.limit + one.host_room, one.is_stable,
            str(one.host) if node_link else "", node_link and node_link * _LINK_BYTES_PER_S,
            bool(computing) and computing[rank],
        )
        for rank, one in enumerate(rooms)
    ]  # fmt: skip


def device_room(rooms: Sequence[RankRoom], memory: StateMemory) -> tuple[int, ...]:
    """Bytes that each rank has on its device for what it may own."""
    beside = 0 if memory.has_layers else memory.model.parameter_bytes
    found = []
    for one in rooms:
        room = one.capacity - beside
        usable = max(0, int(USABLE * room) - memory.moving_bytes)
        found.append(min(usable, room if one.limit is None else one.limit))
    return tuple(found)


def state_room(rooms: Sequence[RankRoom], memory: StateMemory) -> tuple[int, ...]:
    """Bytes that each rank has for what it may own; where parameters come and go, in host memory too."""
    on_device = device_room(rooms, memory)
    if not memory.has_layers:
        return on_device
    return tuple(map(operator.add, on_device, (one.host_room for one in rooms)))


def room_by_weight(rooms: Sequence[RankRoom], room: Sequence[int], weights: Sequence[float]) -> tuple[int, ...]:
    """The room of each rank where ranks on the CPU that have memory in common divide it by their weights."""
    in_common: dict[tuple[int, int], list[int]] = {}
    for rank, one in enumerate(rooms):
        in_common.setdefault((-1, rank) if one.is_on_gpu else (one.host, one.pool), []).append(rank)
    divided = list(room)
    for ranks in in_common.values():
        whole, total = sum(room[rank] for rank in ranks), sum(weights[rank] for rank in ranks)
        for rank in ranks:
            divided[rank] = int(whole * weights[rank] / total) if total else whole
    return tuple(divided)
