"""Who owns how much of the state in one generation of a run, and the reducer that follows from it.

Responsible for the decisions of `--shard-model`, `--own` and `--own-memory` on measured numbers. All ranks decide
alike, from the same gathered rows. Who owns what stays as it is from generation to generation while its
owners are there: a rank that joins owns nothing with `--own auto`, so it needs no state.
"""

from __future__ import annotations

import hashlib
import logging
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hetseq.balance.memory_plan import (
    USABLE,
    Layout,
    ModelMemory,
    RankMemory,
    candidates,
    choose,
    in_words,
    own_fractions,
)
from hetseq.balance.ownership import GRAIN, Ownership
from hetseq.balance.shares import Cost
from hetseq.comm.group import Group, Rows
from hetseq.config.sections import DistributedConfig
from hetseq.errors import ConfigError
from hetseq.parallel.gradient_sync import GradientSync, gradients_of
from hetseq.parallel.model_layers import find_layers, groups_of
from hetseq.parallel.owned_gradients import OwnedGradients, units_of
from hetseq.parallel.owned_names import OwnedNames, owned_names
from hetseq.parallel.owned_parameters import Fill, OwnedParameters
from hetseq.parallel.owned_state import OwnedState, refuse_shared_memory
from hetseq.parallel.owned_units import OwnedUnits, ownership_of
from hetseq.system import device_memory, host_memory

logger = logging.getLogger(__name__)

_MIB = 1 << 20
_LINK_BYTES_PER_S = 125e6  # 1 Gbit/s: before the first step no link has been measured
_UNKNOWN, _REPLICAS, _OWNERS = -1, 0, 1
_REFUSES = -1
_WIDE = 8  # bytes of a number in double precision
_ROUNDING = 0.01  # of the state: parts follow the fractions as closely as cuts allow


@dataclass(frozen=True)
class OwnersOfBefore:
    """What a rank brings from an earlier generation; `owned` is None if every rank had the whole state."""

    owned: OwnedState | None


def make_reducer(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    group: Group,
    config: DistributedConfig,
    *,
    slots: Sequence[int],
    before: OwnersOfBefore | None,
    is_first: bool,
    fill: Fill | None = None,
) -> tuple[GradientSync, OwnedState | None]:
    """The sums of gradients of a generation, and what this rank owns; None: all of the state. Collective.

    `before` is None on a rank that has no state yet. In a later generation the parts have yet to move
    (`Replica.take_over_parts`). `fill` draws parameters that have no memory yet. Raises ConfigError
    if the ranks have no room for the state.
    """
    earlier = None if before is None else before.owned
    # what has owners does not change when a task freezes some of it
    described = earlier.described if earlier else owned_names(model, with_frozen=config.shard_model == "all")
    names, trained = described.by_parameter, len(described.trained)
    bucket_bytes = int(config.bucket_cap_mb * _MIB)
    layers = find_layers(model, config.shard_modules, flag="--shard-modules") if config.shard_model == "all" else {}
    groups = groups_of(model, layers, list(names), trained) if layers else None
    frozen = [one for one in model.parameters() if one not in names]
    memory = _model_memory(list(names), trained, config, groups, whole=() if layers else frozen)
    division = None
    if config.shard_model != "none":
        division = _divide(list(names), group, config, memory, slots=slots, before=before)
    if division is None:
        return gradients_of(
            list(names), group, bucket_bytes=bucket_bytes, is_wide=config.reduce_dtype is not None
        ), None  # fmt: skip
    owned, cuts_tensors = _owned_alike(model, optimizer, described, earlier, group)
    if is_first:
        units = units_of(list(names), bucket_bytes)
        if groups is not None:
            units = [unit for of_layer in groups for unit in of_layer]
        ownership = ownership_of(list(names), units, division.fractions, cuts_tensors=cuts_tensors)
        lacking = _lacking_room(ownership, division, memory.state_bytes)
        if lacking:
            raise _no_room(lacking, ownership, memory.state_bytes, names, optimizer, config, cuts_tensors=cuts_tensors)
    dtype = torch.float64 if config.reduce_dtype is not None else None
    reducer: OwnedGradients | OwnedParameters
    if layers:
        owned.earlier = {} if is_first else owned.held()
        reducer = OwnedParameters(
            model, layers, described, group, fractions=division.fractions, cuts_tensors=cuts_tensors, dtype=dtype,
            begins=is_first and (fill or True),
        )  # fmt: skip
    else:
        reducer = OwnedGradients(
            list(names), group, fractions=division.fractions, bucket_bytes=bucket_bytes, cuts_tensors=cuts_tensors,
            dtype=dtype, moved=owned.follow_,
        )  # fmt: skip
        owned.earlier = owned.held()
    share = reducer.ownership.owned_by(group.rank) / max(1, reducer.ownership.total)
    in_use = device_memory.in_use_bytes(next(iter(names)).device)
    to_come = memory.state_bytes - (memory.parameter_bytes if layers else 0)  # what it owns of the parameters is here
    owned.planned_bytes = in_use + round(share * to_come) + memory.moving_bytes
    if is_first:
        owned.adopt_(reducer, cut=group.generation)
        if group.rank == 0:
            _say_who_owns(reducer, slots)
    return reducer, owned


def warn_of_no_save(owned: OwnedState | None, group: Group, *, makes_images: bool) -> None:
    """Log what the loss of owners means for a run that saves nothing."""
    if owned is None or group.world_size < 2:
        return
    if makes_images:
        logger.warning(
            "--no-save writes no state: if all that hold some part of it in memory are lost at once, all ranks begin"
            " again where this start began; leave --no-save out"
        )
        return
    logger.warning(
        "--no-save with --memory-interval-updates 0 keeps no state: if a rank that owns a part of it is lost, all ranks"
        " begin again where this start began; leave one of them out, or give every rank the whole state with"
        " --shard-model none"
    )


def _owned_alike(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    names: OwnedNames,
    earlier: OwnedState | None,
    group: Group,
) -> tuple[OwnedState, bool]:
    """What this rank owns, and whether all ranks may cut tensors. Collective. All ranks raise ConfigError, or none.

    Where memory is short, an optimizer may fail its trial on one rank alone, and all ranks need the same cuts.
    """
    owned, refusal = earlier, None
    try:
        if owned is None:
            refuse_shared_memory(model, names.by_parameter)
            owned = OwnedState(optimizer, names)
    except ConfigError as error:
        refusal = error
    answers = group.all_gather_rows(np.array([_REFUSES if owned is None else owned.is_elementwise], np.int64))[:, 0]
    if refusal is not None:
        raise refusal
    if (refusing := np.flatnonzero(answers == _REFUSES)).size:
        raise ConfigError(f"--shard-model state: rank {refusing[0]} cannot divide the state; its own log says why")
    assert owned is not None
    return owned, bool(answers.all())


@dataclass(frozen=True)
class _Division:
    """How much each rank owns, in relation to others, and the room that it has for that, in bytes."""

    fractions: tuple[float, ...]
    room_bytes: tuple[int, ...]


def _divide(
    parameters: Sequence[torch.nn.Parameter],
    group: Group,
    config: DistributedConfig,
    memory: _Memory,
    *,
    slots: Sequence[int],
    before: OwnersOfBefore | None,
) -> _Division | None:
    """Who owns how much; None: every rank has all of the state. Collective."""
    kind = _UNKNOWN if before is None else _REPLICAS if before.owned is None else _OWNERS
    fraction = before.owned.fraction if before is not None and before.owned is not None else 0.0
    room = _room_bytes(parameters[0].device) + memory.leaving_bytes(parameters)
    host = int.from_bytes(hashlib.blake2b(socket.gethostname().encode(), digest_size=7).digest(), "big")
    most = config.own_memory_bytes()
    numbers = [
        kind,
        int(np.float64(fraction).view(np.int64)),
        room,
        config.is_stable,
        host,
        -1 if most is None else most,
    ]
    numbers.append(parameters[0].is_cuda)
    rows = group.all_gather_rows(np.array(numbers, np.int64))
    rooms, limits = _rooms_and_limits(rows)
    kinds = [int(kind) for kind in rows[:, 0] if kind != _UNKNOWN]
    if config.shard_model == "auto":
        kind = kinds[0] if kinds else _chosen(memory.model, rooms, limits, rows, group)
        if kind == _REPLICAS:
            return None
    free = [
        min(max(0, int(USABLE * room) - memory.moving_bytes), room if limit is None else limit)
        for room, limit in zip(rooms, limits)
    ]
    if config.own_weights() is not None:
        weights = _by_slot(config, slots)
        return _Division(weights, _room_by_weight(rows, free, weights))
    earlier = rows[:, 1].copy().view(np.float64)
    if earlier.sum() > 0:
        return _Division(tuple(earlier.tolist()), tuple(free))
    return _Division(own_fractions(free, [bool(stays) for stays in rows[:, 3]], memory.state_bytes), tuple(free))


def _room_by_weight(rows: Rows, free: Sequence[int], weights: Sequence[float]) -> tuple[int, ...]:
    """The room of each rank where ranks on the CPU of one host divide theirs by their weights."""
    of_host: dict[int, list[int]] = {}
    for rank, (host, is_gpu) in enumerate(rows[:, [4, 6]].tolist()):
        of_host.setdefault(-1 - rank if is_gpu else host, []).append(rank)
    room = list(free)
    for ranks in of_host.values():
        whole, total = sum(free[rank] for rank in ranks), sum(weights[rank] for rank in ranks)
        for rank in ranks:
            room[rank] = int(whole * weights[rank] / total) if total else whole
    return tuple(room)


def _lacking_room(ownership: Ownership, division: _Division, state_bytes: int) -> list[str]:
    """In words, which ranks would own more than they have room for; the same on all ranks."""
    lacking = []
    for rank, room in enumerate(division.room_bytes):
        missing = ownership.owned_by(rank) / max(1, ownership.total) * state_bytes - room
        if missing > max(_ROUNDING, GRAIN / max(1, ownership.total)) * state_bytes:
            lacking.append(f"rank {rank} lacks {in_words(missing)}")
    return lacking


def _no_room(
    lacking: Sequence[str],
    ownership: Ownership,
    state_bytes: int,
    names: Mapping[torch.nn.Parameter, str],
    optimizer: torch.optim.Optimizer,
    config: DistributedConfig,
    *,
    cuts_tensors: bool,
) -> ConfigError:
    """The error for ranks that would own more than they have room for."""
    what = "parameters, optimizer state" if config.shard_model == "all" else "optimizer state"
    reason = f"--own {config.own}: {', '.join(lacking)} for its part of {what} and gradient sums"
    remedy = "give weights by memory with --own, add a node with memory, which need not compute (--balance 3,1,0)"
    if not cuts_tensors:
        largest = max(names, key=torch.Tensor.numel)
        reason += (
            f"; {type(optimizer).__name__} updates whole tensors, and {names[largest]} alone takes"
            f" {in_words(largest.numel() / max(1, ownership.total) * state_bytes)}"
        )
        remedy = "take an optimizer that updates each element by itself, such as AdamW, give weights with --own"
    return ConfigError(f"{reason}: {remedy}, or raise --own-memory where it is set")


def _by_slot(config: DistributedConfig, slots: Sequence[int]) -> tuple[float, ...]:
    """The weights of `--own`. A slot that they do not name owns nothing, unless no named slot is there."""
    weights = config.own_weights()
    own = tuple(weights[slot] if slot < len(weights) else 0.0 for slot in slots) if weights else ()
    if any(own):
        return own
    if weights:
        logger.warning(
            "none of the ranks that own a part by --own %s is there: all ranks own as much [no-owner]", config.own
        )
    return (1.0,) * len(slots)


def _chosen(
    memory: ModelMemory,
    rooms: Sequence[int],
    limits: Sequence[int | None],
    rows: Rows,
    group: Group,
) -> int:
    """What `--shard-model auto` chooses, before any speed is known: replicas if they fit."""
    ranks = [
        RankMemory(
            f"rank {rank}",
            Cost(0.0, 1.0, batch=1),
            room + memory.parameter_bytes,
            _LINK_BYTES_PER_S,
            most_owned_bytes=limit,
            is_stable=bool(rows[rank, 3]),
        )
        for rank, (room, limit) in enumerate(zip(rooms, limits))
    ]
    # two micro-batches on each rank: so the planner keeps room for a whole gradient, as _fractions does afterwards
    found = candidates(ranks, memory, total=2 * len(ranks), kinds=("none", "state"))
    # which one is faster is not known yet; where replicas fit, the loss of a rank costs one step at most
    layout = next((one for one in found if isinstance(one, Layout)), None) or choose(found)
    if group.rank == 0:
        others = "; ".join(
            f"{one.shard_model} would leave {in_words(min(one.left_bytes))} on the fullest rank"
            if isinstance(one, Layout)
            else f"{one.shard_model} does not fit: {one.reason.partition(':')[0]}"
            for one in found
            if one is not layout
        )
        logger.info(
            "--shard-model auto: %s, which leaves %s on the fullest rank; %s", layout.shard_model,
            in_words(min(layout.left_bytes)), others,
        )  # fmt: skip
    return _REPLICAS if layout.shard_model == "none" else _OWNERS


@dataclass(frozen=True)
class _Memory:
    """What a rank needs memory for: what has owners, and beside that what a step needs at once, in bytes."""

    model: ModelMemory
    moving_bytes: int
    has_layers: bool  # the parameters have owners too

    @property
    def state_bytes(self) -> int:
        return self.model.state_bytes + (self.model.frozen_bytes if self.has_layers else 0)

    @property
    def parameter_bytes(self) -> int:
        return self.model.parameter_bytes

    def leaving_bytes(self, parameters: Sequence[torch.nn.Parameter]) -> int:
        """The memory that a whole model leaves when it goes to its owners, 0 if it is not here."""
        return self.model.parameter_bytes if self.has_layers and parameters[0].untyped_storage().size() else 0


def _model_memory(
    parameters: Sequence[torch.nn.Parameter],
    trained: int,
    config: DistributedConfig,
    groups: Sequence[list[list[int]]] | None,
    *,
    whole: Sequence[torch.Tensor] = (),
) -> _Memory:
    """The memory of a model whose layers come and go in these groups, the root first; None: its parameters stay.

    The first `trained` of the `parameters` are trained; frozen ones have owners too, or stay `whole` on every rank.
    """
    itemsize = parameters[0].element_size()
    wide = 2 if config.reduce_dtype is not None and itemsize < _WIDE else 1
    model = ModelMemory(
        sum(parameter.numel() for parameter in parameters[:trained]),
        compute_bytes_per_parameter=itemsize,
        master_bytes_per_parameter=itemsize if groups is not None else 0,
        optimizer_bytes_per_parameter=2 * itemsize,
        gradient_bytes_per_parameter=itemsize,
        frozen_bytes=sum(one.numel() * one.element_size() for one in (*parameters[trained:], *whole)),
    )
    if groups is None:
        return _Memory(model, model.gradient_bytes, has_layers=False)
    sizes = np.zeros((len(groups), 2), np.int64)  # of the root and of each layer: bytes of all, and of the trained ones
    for size, of_layer in zip(sizes, groups):
        for index in (index for group in of_layer for index in group):
            nbytes = parameters[index].numel() * parameters[index].element_size()
            size += nbytes, nbytes if index < trained else 0
    root, largest = sizes[0].tolist(), sizes[1:].max(axis=0).tolist()
    # two layers and the root are whole; gradients of two units travel, beside what an owner receives of them
    moving = 2 * largest[0] + root[0] + wide * 4 * max(largest[1], root[1])
    return _Memory(model, moving, has_layers=True)


def _room_bytes(device: torch.device) -> int:
    """Memory that this process could still get on its device, or on its host, beside the model."""
    if device.type == "cuda":
        return device_memory.free_bytes(device)
    return host_memory.available_bytes()


def _rooms_and_limits(rows: Rows) -> tuple[list[int], list[int | None]]:
    """The room of each rank, and what --own-memory says. Ranks of one host divide both among themselves."""
    beside, on_host = Counter(rows[:, 4].tolist()), Counter(rows[rows[:, 6] == 0, 4].tolist())
    rooms, limits = list[int](), list[int | None]()
    for _, _, room, _, host, most, is_gpu in rows.tolist():
        rooms.append(room if is_gpu else room // on_host[host])
        limits.append(None if most < 0 else most // beside[host])
    return rooms, limits


def _say_who_owns(reducer: OwnedUnits, slots: Sequence[int]) -> None:
    ownership = reducer.ownership
    what = "optimizer state" if isinstance(reducer, OwnedGradients) else "parameters, optimizer state"
    parts = [
        f"rank {slot} {100 * ownership.owned_by(rank) / max(1, ownership.total):.3g} %"
        for rank, slot in enumerate(slots)
    ]
    logger.info("%s and gradient sums are divided: %s", what, ", ".join(parts))
