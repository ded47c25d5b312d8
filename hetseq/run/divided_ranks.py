"""The ranks that divide a model, in one generation of a run: who holds which parts, who owns them, and who meets whom.

Responsible for what follows from `--tensor-parallel-degree` and the slots of the ranks. All ranks find the same.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from hetseq.balance.layout import Layout, layout_of, seat_of
from hetseq.comm.group import Group
from hetseq.config.sections import DistributedConfig, MemoryConfig
from hetseq.data.plan import MicroBatchCap
from hetseq.errors import ConfigError
from hetseq.parallel.divided_model import DividedModel
from hetseq.parallel.owned_names import OwnedNames
from hetseq.parallel.owned_units import TensorPlaces
from hetseq.training.micro_batch_size import MicroBatchSizes
from hetseq.training.validation import Validator

logger = logging.getLogger(__name__)

_NO_LIMIT = 2**63 - 1
_PLAIN = (bool, int, float, str, tuple, type(None))


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
    if layout.idle and group.rank == 0:
        idle = [slots[rank] for number in sorted(layout.idle) for rank in layout.groups[number]]
        logger.warning(
            "rank%s %s compute%s nothing, because the model of which %s a part is not whole (--tensor-parallel-degree"
            " %s)", "" if len(idle) == 1 else "s", ", ".join(map(str, idle)), "s" if len(idle) == 1 else "",
            "it has" if len(idle) == 1 else "they have", config.tensor_parallel_degree,
        )  # fmt: skip
    ranks = layout.groups[layout.group_of(group.rank)]
    if not layout.is_idle(group.rank):
        divided.ranks.meet(group.subgroup(ranks, f"tensors-{ranks[0]}"), group)


def sizes_in_step(sizes: MicroBatchSizes, group: Group, layout: Layout, config: MemoryConfig) -> MicroBatchSizes:
    """The sizes by which the ranks that hold one model together cut their common share. Collective.

    Raises ConfigError if these ranks would compute a micro-batch in different ways: each node may have other options.
    """
    again = int.from_bytes(hashlib.blake2b(repr(config.checkpoint_modules).encode(), digest_size=7).digest(), "big")
    own = group.all_gather_rows(np.array([again], np.int64))[list(layout.groups[layout.group_of(group.rank)])]
    if (own != own[0]).any():
        raise ConfigError(
            "ranks that hold one model together have different --checkpoint-modules, and what runs again in backward"
            " has sums over all of them: give their nodes the same"
        )
    return MicroBatchSizes(_common_cap(sizes.cap, group, layout), is_fixed=sizes.is_fixed)


def validators_in_step(validators: Sequence[Validator], group: Group, layout: Layout) -> list[Validator]:
    """The validators of ranks that hold one model together, which cut alike. Collective. Raises ConfigError."""
    is_alone = len(layout.groups[layout.group_of(group.rank)]) == 1
    caps = [_common_cap(one.cap, group, layout) for one in validators]
    return [replace(one, cap=cap, is_in_step=not is_alone) for one, cap in zip(validators, caps, strict=True)]


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


def check_optimizer(
    optimizer: torch.optim.Optimizer, names: OwnedNames, group: Group, *, is_elementwise: bool, is_first: bool
) -> None:
    """Raise ConfigError for an optimizer that cannot update parts of a model as it would update the whole. Collective.

    It must be elementwise, and at the start of a run (`is_first`) have the same settings for a parameter on all ranks:
    a rank that has the model alone has other names for its parameters, by which a task may choose settings.
    """
    if not is_elementwise:
        raise ConfigError(
            f"--tensor-parallel-degree: {type(optimizer).__name__} updates whole tensors, of which ranks have parts:"
            " take an optimizer that updates each element by itself, such as AdamW"
        )
    if not is_first:
        return
    found = {}
    for settings in optimizer.param_groups:
        plain = {key: value for key, value in settings.items() if isinstance(value, _PLAIN)}
        for parameter in settings["params"]:
            if parameter in names.by_parameter:
                found[names.saved_name(names.by_parameter[parameter])] = repr(sorted(plain.items()))
    text = repr(sorted(found.items())).encode()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
    digests = group.all_gather_rows(np.array([digest], np.int64))[:, 0]
    if (other := np.flatnonzero(digests != digests[0])).size:
        raise ConfigError(
            f"rank {other[0]} gives the optimizer other settings for some parameter than rank 0: a rank that has the"
            " model alone (--tensor-parallel-degree) calls a divided one NAME.parametrizations.weight.original0, so let"
            " build_optimizer choose by shape or by module, not by the end of a name"
        )


def tensor_places(divided: DividedModel, slots: Sequence[int], sizes: Sequence[int]) -> TensorPlaces:
    """Who holds which parts of a model that ranks divide by `sizes`. Any rank, alone."""
    seats, layout = [seat_of(slot, sizes) for slot in slots], layout_of(slots, sizes)
    places = tuple((seat.place,) if seat.size > 1 else tuple(range(max(sizes))) for seat in seats)
    leaders = frozenset(layout.leader_of(number) for number in layout.busy)
    return TensorPlaces(places, tuple(map(divided.place_of, divided.named)), leaders)


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
