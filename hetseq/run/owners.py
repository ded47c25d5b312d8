"""Who owns how much of the state in one generation of a run, and the reducer that follows from it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from hetseq.comm.group import Group
from hetseq.config.sections import DistributedConfig
from hetseq.parallel.gradient_sync import GradientSync, gradients_of
from hetseq.parallel.owned_gradients import OwnedGradients
from hetseq.parallel.owned_state import OwnedState

logger = logging.getLogger(__name__)

_MIB = 1 << 20


def fractions_by_slot(config: DistributedConfig, slots: Sequence[int]) -> tuple[float, ...]:
    """How much the rank of each slot owns. A slot that the options do not name owns nothing."""
    weights = config.own_weights()
    if not weights:
        return (1.0,) * len(slots)
    own = tuple(weights[slot] if slot < len(weights) else 0.0 for slot in slots)
    if any(own):
        return own
    logger.info("none of the ranks that --own %s names is there: all ranks own as much", config.own)
    return (1.0,) * len(slots)


def owned_by_fractions(
    owned: OwnedState, group: Group, config: DistributedConfig, *, slots: Sequence[int]
) -> OwnedGradients:
    """Sums of gradients that go to their owners. `owned` still has the state by earlier cuts. Collective."""
    owned.earlier = owned.held()
    return OwnedGradients(
        list(owned.names), group, fractions=fractions_by_slot(config, slots),
        bucket_bytes=int(config.bucket_cap_mb * _MIB), cuts_tensors=owned.is_elementwise,
        dtype=torch.float64 if config.reduce_dtype is not None else None,
    )  # fmt: skip


def replicated(parameters: Sequence[torch.nn.Parameter], group: Group, config: DistributedConfig) -> GradientSync:
    """Sums of gradients that every rank gets. Collective."""
    return gradients_of(
        parameters, group, bucket_bytes=int(config.bucket_cap_mb * _MIB), is_wide=config.reduce_dtype is not None
    )
