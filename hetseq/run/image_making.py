"""The images of a generation whose ranks own parts of the state.

Responsible for making `checkpoint.images.Images` from what a session knows.
"""

from __future__ import annotations

import logging

from hetseq.checkpoint.images import Images, Protection
from hetseq.comm.group import Group
from hetseq.config.sections import CheckpointConfig
from hetseq.parallel.owned_units import OwnedUnits
from hetseq.parallel.replica import Replica
from hetseq.run_directory import RunDirectory

logger = logging.getLogger(__name__)


def make_images(
    config: CheckpointConfig, directory: RunDirectory, group: Group, replica: Replica, *, start: str
) -> Images | None:
    """What keeps the state in memory where ranks own parts of it; None for replicas, and if options say never.

    `start` identifies this start of the run. Collective. Raises RendezvousError and PeerLostError.
    """
    if replica.owned is None or not config.memory_interval_updates:
        return None
    assert isinstance(replica.reducer, OwnedUnits)
    ownership = replica.reducer.ownerships[0]  # other groups hold the same
    owned = [float(ownership.owned_by(rank)) for rank in range(group.world_size)]
    return Images(
        directory.path, directory.run_id, group, start=start, owned=owned if any(owned) else [1.0] * len(owned),
        messages=group.messages() if group.world_size > 1 else None, memory_bytes=config.memory_buffer_bytes(),
        groups=[replica.reducer.division.number_of(rank) for rank in range(group.world_size)],
    )  # fmt: skip


def say_what_protects(protection: Protection, group: Group) -> None:
    """Log, on rank zero, why there are no images, or that they are on one node alone."""
    if group.rank != 0:
        return
    if protection.refusal is not None:
        logger.warning(
            "there is no memory for images of the state (%s), so the loss of an owner costs the steps since the newest"
            " checkpoint: give --memory-buffer-size more, or make room in /dev/shm [no-second-place]",
            protection.refusal,
        )  # fmt: skip
    elif protection.alone and group.world_size > 1:
        logger.log(
            logging.INFO if group.generation == 0 else logging.DEBUG,
            "all ranks are on one node: images in its memory survive a killed process, but not the loss of the node",
        )  # fmt: skip
