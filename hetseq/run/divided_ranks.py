"""The ranks that divide a model, in one generation of a run: who holds which parts, who owns them, and who meets whom.

Responsible for what follows from `--tensor-parallel-degree` and the slots of the ranks. All ranks find the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hetseq.balance.layout import Layout, layout_of, seat_of
from hetseq.comm.group import Group
from hetseq.config.sections import DistributedConfig
from hetseq.data.plan import MicroBatchCap
from hetseq.errors import ConfigError
from hetseq.parallel.divided_model import DividedModel
from hetseq.parallel.owned_units import TensorPlaces
from hetseq.training.micro_batch_size import MicroBatchSizes
from hetseq.training.validation import Validator

_NO_LIMIT = 2**63 - 1


def meet(divided: DividedModel, group: Group, layout: Layout, slots: Sequence[int], config: DistributedConfig) -> None:
    """Connect the ranks that hold one model together, in this generation. Collective.

    Raises ConfigError if no model is whole, because ranks are missing.
    """
    if not layout.busy:
        here = ", ".join(map(str, slots))
        raise ConfigError(
            f"--tensor-parallel-degree {config.tensor_parallel_degree}: no model is whole, since of the ranks that"
            f" divide it only {here} {'is' if group.world_size == 1 else 'are'} here: start {config.tensor_sizes()[0]}"
            " ranks or more, and all of them again after a loss"
        )
    ranks = layout.groups[layout.group_of(group.rank)]
    if not layout.is_idle(group.rank):
        divided.ranks.meet(group.subgroup(ranks, f"tensors-{ranks[0]}"), group)


def in_step(
    sizes: MicroBatchSizes, validators: Sequence[Validator], group: Group, layout: Layout
) -> tuple[MicroBatchSizes, list[Validator]]:
    """The sizes by which the ranks that hold one model together cut their share and validation alike. Collective.

    Raises ConfigError if only some of these ranks count tokens.
    """
    common = MicroBatchSizes(_common_cap(sizes.cap, group, layout), is_fixed=sizes.is_fixed)
    return common, [replace(one, cap=_common_cap(one.cap, group, layout), is_in_step=True) for one in validators]


def _common_cap(cap: MicroBatchCap, group: Group, layout: Layout) -> MicroBatchCap:
    """The smallest limits of the ranks that hold one model together; each node may have other options."""
    limits = np.array([_NO_LIMIT if one is None else one for one in (cap.samples, cap.tokens)], np.int64)
    table = group.all_gather_rows(limits)  # (world_size, 2)
    samples, tokens = table[list(layout.groups[layout.group_of(group.rank)])].T
    has_limit = tokens != _NO_LIMIT
    if has_limit.any() and not has_limit.all():
        raise ConfigError(
            "some ranks that hold one model together have --max-tokens, others do not, and they compute the same"
            " micro-batches: give all of them the same"
        )
    least = [None if one == _NO_LIMIT else one for one in (int(samples.min()), int(tokens.min()))]
    return replace(cap, samples=least[0], tokens=least[1])


def tensor_places(divided: DividedModel, slots: Sequence[int], sizes: Sequence[int]) -> TensorPlaces:
    """Who holds which parts of a model that ranks divide by `sizes`. Any rank, alone."""
    seats, layout = [seat_of(slot, sizes) for slot in slots], layout_of(slots, sizes)
    places = tuple((seat.place,) if seat.size > 1 else tuple(range(max(sizes))) for seat in seats)
    leaders = frozenset(layout.leader_of(number) for number in layout.busy)
    return TensorPlaces(places, tuple(map(divided.place_of, divided.named)), leaders)


def check_groups(groups: Sequence[Sequence[int]], tensors: TensorPlaces, config: DistributedConfig) -> None:
    """Raise ConfigError if the ranks of a group do not hold all parts of the model together."""
    every = {place for places in tensors.of_ranks for place in places}
    for group in groups:
        if {place for rank in group for place in tensors.of_ranks[rank]} < every:
            raise ConfigError(
                f"--shard-groups {config.shard_groups}: the group ({', '.join(map(str, group))}) lacks a part of the"
                f" model, which --tensor-parallel-degree {config.tensor_parallel_degree} divides: make groups of whole"
                " models"
            )


def groups_of_models(
    slots: Sequence[int], sizes: Sequence[int]
) -> tuple[tuple[tuple[int, ...], ...], tuple[float, ...]]:
    """The groups of ranks that each hold one model and all of its state, and how much each rank owns. Pure.

    None if that is one group. Ranks that compute nothing own nothing; they are in the first group.
    """
    layout = layout_of(slots, sizes)
    whole = [layout.groups[number] for number in layout.busy]
    idle = [rank for number in layout.idle for rank in layout.groups[number]]
    groups = sorted([tuple(sorted([*whole[0], *idle])), *whole[1:]])
    fractions = tuple(float(not layout.is_idle(rank)) for rank in range(layout.world_size))
    return tuple(groups) if len(groups) > 1 else (), fractions
