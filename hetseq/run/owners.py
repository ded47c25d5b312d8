"""Who owns how much of the state in one generation of a run, and the reducer that follows from it.

Responsible for the decisions of `--shard-model`, `--own` and `--own-memory` on measured numbers. All ranks decide
alike, from the same gathered rows. Who owns what stays as it is from generation to generation while its
owners are there: a rank that joins owns nothing with `--own auto`, so it needs no state.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from hetseq.balance.memory_plan import (
    SHARD_MODELS,
    Candidate,
    Groups,
    Layout,
    ModelMemory,
    candidates,
    choose,
    in_words,
    own_fractions,
)
from hetseq.balance.ownership import GRAIN
from hetseq.comm.group import Group
from hetseq.config.sections import DistributedConfig
from hetseq.errors import ConfigError
from hetseq.parallel.activation_checkpointing import checkpoints_itself, is_checkpointed
from hetseq.parallel.delayed_init import is_absent, make_present_
from hetseq.parallel.gradient_sync import GradientSync, gradients_of
from hetseq.parallel.model_layers import groups_of
from hetseq.parallel.owned_gradients import OwnedGradients, units_of
from hetseq.parallel.owned_names import OwnedNames, owned_names
from hetseq.parallel.owned_parameters import OwnedParameters
from hetseq.parallel.owned_state import OwnedState, refuse_shared_memory
from hetseq.parallel.owned_units import Division, OwnedUnits, TensorPlaces, ownerships_of
from hetseq.run.divided_ranks import check_optimizer, groups_of_models, tensor_places
from hetseq.run.loaded_task import LoadedTask
from hetseq.run.rank_groups import RULES, chosen_rule, ranks_in_groups
from hetseq.run.rank_room import (
    Brought,
    RankRoom,
    StateMemory,
    device_room,
    memory_of,
    planned_ranks,
    room_by_weight,
    rooms_of_ranks,
    state_room,
)
from hetseq.system import device_memory
from hetseq.system.processes import keep_freed_memory

logger = logging.getLogger(__name__)

_MIB = 1 << 20
_REFUSES = -1
_ROUNDING = 0.01  # of the state: parts follow the fractions as closely as cuts allow


@dataclass(frozen=True)
class OwnersOfBefore:
    """What a rank brings from an earlier generation; `owned` is None if every rank had the whole state."""

    owned: OwnedState | None

    @property
    def kind(self) -> str:
        """What `--shard-model auto` chose."""
        return "none" if self.owned is None else "all" if self.owned.has_layers else "state"

    def brought(self, parameters: Sequence[torch.nn.Parameter]) -> Brought:
        """What this rank tells the others of it."""
        kind, owned = SHARD_MODELS.index(self.kind), self.owned
        if owned is None:
            return Brought(kind)
        device = parameters[0].device
        # with `state` what it owns of the parameters is in their memory; with `all` they have none of their own
        held = owned.bytes_on(device)
        if not owned.has_layers:
            held += sum(one.nbytes for one in parameters) - sum(one.owned.nbytes for one in owned.fragments.values())
        return Brought(kind, -1 if owned.rule is None else RULES.index(owned.rule), owned.fraction, held)


def make_reducer(
    material: LoadedTask,
    optimizer: torch.optim.Optimizer,
    group: Group,
    config: DistributedConfig,
    *,
    slots: Sequence[int],
    before: OwnersOfBefore | None,
    is_first: bool,
) -> tuple[GradientSync, OwnedState | None]:
    """The sums of gradients of a generation, and what this rank owns; None: all of the state. Collective.

    `before` is None on a rank that has no state yet. In a later generation the parts have yet to move
    (`Replica.take_over_parts`). Parameters of `material` have memory afterwards, or owners. Raises ConfigError if the
    ranks have no room for the state.
    """
    fill, material.fill = material.fill, None  # in a later generation the owners have the numbers
    kind, names, layers, rooms = _what_has_owners(material, group, config, before, slots)
    model, divided, parameters = material.model, material.divided, list(names.by_parameter)
    if kind != "all" and fill is not None:
        absent = [parameter for parameter in model.parameters() if is_absent(parameter)]
        make_present_(absent)
        fill(absent)
    bucket_bytes, is_wide = int(config.bucket_cap_mb * _MIB), config.reduce_dtype is not None
    if kind == "none" and divided is None:
        return gradients_of(parameters, group, bucket_bytes=bucket_bytes, is_wide=is_wide), None
    if kind == "none":  # the ranks that divide the model hold all of its state
        rooms = rooms_of_ranks(list(model.parameters()), group, config)
    memory = memory_of(model, names, layers, is_wide=is_wide)
    tensors = None if divided is None else tensor_places(divided, slots, config.tensor_sizes())
    parts = _parts(kind, rooms, memory, tensors, slots, group, config)
    owned, cuts_tensors = _owned_alike(model, optimizer, names, None if before is None else before.owned, group)
    if tensors is not None:
        check_optimizer(optimizer, names, group, is_elementwise=cuts_tensors, is_first=is_first)
    elements = sum(parameter.numel() for parameter in parameters)
    on_device = _device_elements(rooms[group.rank], device_room(rooms, memory)[group.rank], memory, elements)
    hosts = tuple(one.host for one in rooms)
    division = Division(parts.fractions, cuts_tensors, on_device, parts.groups, hosts, tensors)
    if is_first and kind != "none":
        units = units_of(parameters, bucket_bytes, tensors) if layers is None else list(itertools.chain(*layers))
        _refuse_lack_of_room(units, division, parts.room, memory, names, optimizer, config)
    dtype = torch.float64 if is_wide else None
    reducer: OwnedGradients | OwnedParameters
    if kind == "all":
        owned.has_layers, owned.earlier = True, {} if is_first else owned.held()
        begins = is_first and (fill or True)
        reducer = OwnedParameters(model, material.layers, names, group, division, dtype=dtype, begins=begins)
    else:
        reducer = OwnedGradients(
            parameters, group, division, bucket_bytes=bucket_bytes, dtype=dtype, moved=owned.follow_
        )
        owned.earlier = owned.held()  # in the memory to which it has moved
    on_device = sum(one.end - one.begin for one in reducer.fragments if one.owned.device == reducer.device)
    to_come = memory.model.state_bytes  # what it owns of the parameters is here
    in_use = device_memory.in_use_bytes(reducer.device)
    owned.planned_bytes = in_use + round(on_device / max(1, reducer.ownership.total) * to_come) + memory.moving_bytes
    if config.shard_groups == "auto":
        owned.rule = parts.rule
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
    # ranks that divide a model have no whole state
    more = "" if owned.described.parts else ", or give every rank the whole state with --shard-model none"
    logger.warning(
        "--no-save with --memory-interval-updates 0 keeps no state: if a rank that owns a part of it is lost, all ranks"
        " begin again where this start began; leave one of them out%s", more,
    )  # fmt: skip


def _what_has_owners(
    material: LoadedTask,
    group: Group,
    config: DistributedConfig,
    before: OwnersOfBefore | None,
    slots: Sequence[int],
) -> tuple[str, OwnedNames, list[list[list[int]]] | None, list[RankRoom]]:
    """What `--shard-model` says or chooses. Collective unless it is `none`.

    Returns its value, the names of the parameters, with `all` their places by layer and unit, and the rooms of all
    ranks, none if no parameter has an owner by `--shard-model`.
    """
    model, layers, divided, kind = material.model, material.layers, material.divided, config.shard_model
    earlier = None if before is None else before.owned
    # what has owners does not change when a task freezes some of it
    with_frozen = bool(layers) and divided is None
    names = owned_names(model, with_frozen=with_frozen, divided=divided) if earlier is None else earlier.described
    rooms, units_by_layer = list[RankRoom](), None
    if layers:
        units_by_layer = groups_of(model, layers, list(names.by_parameter), len(names.trained))
    if kind != "none":
        parameters = list(model.parameters())
        rooms = rooms_of_ranks(
            parameters, group, config, Brought() if before is None else before.brought(parameters),
            checkpoints=checkpoints_itself(model) or any(map(is_checkpointed, model.modules())),
        )  # fmt: skip
    if kind == "auto":
        number = max(one.kind for one in rooms)  # a rank that joins brings none
        everything = memory_of(
            model, names, units_by_layer, is_wide=config.reduce_dtype is not None,
            computes_in=material.precision.compute,
        )  # fmt: skip
        kind = SHARD_MODELS[number] if number >= 0 else _chosen(rooms, everything, group, _computing(config, slots))
        if kind != "all" and next(model.parameters()).device.type == "cpu":
            keep_freed_memory()  # loading made way for parameters that come and go
    if kind == "all":
        return kind, names, units_by_layer, rooms
    if earlier is None and layers:
        names = owned_names(model, with_frozen=False, divided=divided)
    return kind, names, None, rooms


@dataclass(frozen=True)
class _Parts:
    """How large a part of the state each rank owns, and which ranks hold all of it together."""

    groups: Groups
    fractions: tuple[float, ...]
    room: tuple[int, ...]  # bytes of each rank
    rule: str  # of --shard-groups


def _parts(
    kind: str,
    rooms: Sequence[RankRoom],
    memory: StateMemory,
    tensors: TensorPlaces | None,
    slots: Sequence[int],
    group: Group,
    config: DistributedConfig,
) -> _Parts:
    """The parts of a generation, on all ranks the same. Raises ConfigError."""
    rule, room = config.shard_groups, state_room(rooms, memory)
    if kind == "none":
        groups, fractions = groups_of_models(slots, config.tensor_sizes())
        return _Parts(groups, fractions, room, rule)
    weights = None if config.own_weights() is None else _by_slot(config, slots)
    if rule == "auto":
        number = max(one.rule for one in rooms)  # a rank that joins brings none
        rule = RULES[number] if number >= 0 else _chosen_groups(rooms, room, weights, memory, group)
    are_whole = None if tensors is None else tensors.are_whole
    groups = ranks_in_groups(config.shard_group_sizes() or rule, rooms, room, weights, memory, slots, are_whole)
    fractions, room = _divide(rooms, room, weights, memory, groups)
    return _Parts(groups, fractions, room, rule)


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
        raise ConfigError(f"--shard-model: rank {refusing[0]} cannot divide the state; its own log says why")
    assert owned is not None
    return owned, bool(answers.all())


def _divide(
    rooms: Sequence[RankRoom],
    room: tuple[int, ...],
    weights: Sequence[float] | None,
    memory: StateMemory,
    groups: Groups,
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """How much each rank owns, in relation to others, and the bytes that it has room for. Raises ConfigError."""
    if weights is not None:
        return tuple(weights), room_by_weight(rooms, room, weights)
    fractions = [0.0] * len(rooms)
    for group in groups or (range(len(rooms)),):
        found: Sequence[float] = [rooms[rank].fraction for rank in group]
        if sum(found) <= 0:
            found = own_fractions(
                [room[rank] for rank in group], [rooms[rank].is_stable for rank in group], memory.bytes
            )
        for rank, fraction in zip(group, found):
            fractions[rank] = fraction
    return tuple(fractions), room


def _device_elements(room: RankRoom, device_room_bytes: int, memory: StateMemory, elements: int) -> int | None:
    """How many of its own elements a rank keeps on its device, of a model of `elements`; None: all of them."""
    if not room.host_room or not memory.has_layers:
        return None
    return device_room_bytes * elements // max(1, memory.bytes)


def _lacking_room(owned: Sequence[int], total: int, room_bytes: Sequence[int], state_bytes: int) -> list[str]:
    """In words, which ranks would own more than they have room for, of `total` elements; the same on all ranks."""
    lacking = []
    for rank, (elements, room) in enumerate(zip(owned, room_bytes)):
        missing = elements / max(1, total) * state_bytes - room
        if missing > max(_ROUNDING, GRAIN / max(1, total)) * state_bytes:
            lacking.append(f"rank {rank} lacks {in_words(missing)}")
    return lacking


def _refuse_lack_of_room(
    units: Sequence[Sequence[int]],
    division: Division,
    room: Sequence[int],
    memory: StateMemory,
    names: OwnedNames,
    optimizer: torch.optim.Optimizer,
    config: DistributedConfig,
) -> None:
    """Raise ConfigError, on all ranks the same, if a rank would own more than it has room for in bytes."""
    ownerships = ownerships_of(list(names.by_parameter), units, division)
    owned_by = [ownerships[division.number_of(rank)].owned_by(rank) for rank in range(len(room))]
    total = ownerships[0].total
    lacking = _lacking_room(owned_by, total, room, memory.bytes)
    if not lacking:
        return
    what = "parameters, optimizer state" if memory.has_layers else "optimizer state"
    reason = f"--own {config.own}: {', '.join(lacking)} for its part of {what} and gradient sums"
    remedy = "give weights by memory with --own, add a node with memory, which need not compute (--balance 3,1,0)"
    if not division.cuts_tensors:
        largest = max(names.by_parameter, key=torch.Tensor.numel)
        reason += (
            f"; {type(optimizer).__name__} updates whole tensors, and {names.by_parameter[largest]} alone takes"
            f" {in_words(largest.numel() / max(1, total) * memory.bytes)}"
        )
        remedy = "take an optimizer that updates each element by itself, such as AdamW, give weights with --own"
    raise ConfigError(f"{reason}: {remedy}, or raise --own-memory where it is set")


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


def _computing(config: DistributedConfig, slots: Sequence[int]) -> list[bool]:
    """Which ranks get samples, as far as `--balance` says."""
    turns = config.balance_turns()
    return [not turns or any(slot < len(weights) and weights[slot] > 0 for weights in turns) for slot in slots]


def _chosen(rooms: Sequence[RankRoom], memory: StateMemory, group: Group, computing: Sequence[bool]) -> str:
    """What `--shard-model auto` chooses, before any speed is known: replicas if they fit, `all` if nothing else does.

    `memory`: of parameters that come and go, or of a model that has no layers. Each rank that is `computing` has to
    have room for samples, unless there is no such layout.
    """
    found = _fitting(rooms, memory.model, computing, has_layers=memory.has_layers)
    if not any(isinstance(one, Layout) for one in found):
        # such ranks may compute smaller micro-batches, and layers again in ways that are not seen here
        alone = replace(memory.model, cast_bytes_per_parameter=0)
        found = _fitting(rooms, alone, [False] * len(rooms), has_layers=memory.has_layers)
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
    return layout.shard_model


def _fitting(
    rooms: Sequence[RankRoom], model: ModelMemory, computing: Sequence[bool], *, has_layers: bool
) -> tuple[Candidate, ...]:
    """The layout of each kind, or why there is none."""
    model = replace(model, checkpoints=all(one.checkpoints for one in rooms))  # each node has its own options
    ranks = planned_ranks(rooms, computing=computing)
    # two micro-batches on each rank: so the planner keeps room for a whole gradient, as `state_room` does afterwards
    total = 2 * len(ranks)
    found = candidates(ranks, model, total, ("none", "state"))
    if has_layers:
        found += candidates(planned_ranks(rooms, with_host=True, computing=computing), model, total, ("all",))
    return found


def _chosen_groups(
    rooms: Sequence[RankRoom], room: Sequence[int], weights: Sequence[float] | None, memory: StateMemory, group: Group
) -> str:
    """What `--shard-groups auto` chooses."""
    rule, why = chosen_rule(rooms, room, weights, memory)
    if group.rank == 0:
        what = "one group of all ranks" if rule == "all" else "one group for each node"
        logger.info("--shard-groups auto: %s: %s", what, why)
    return rule


def _say_who_owns(reducer: OwnedUnits, slots: Sequence[int]) -> None:
    ownership = reducer.ownership
    what = "optimizer state" if isinstance(reducer, OwnedGradients) else "parameters, optimizer state"
    parts = [
        f"rank {slot} {100 * reducer.owned_by(rank) / max(1, ownership.total):.3g} %" for rank, slot in enumerate(slots)
    ]
    logger.info("%s and gradient sums are divided: %s", what, ", ".join(parts))
