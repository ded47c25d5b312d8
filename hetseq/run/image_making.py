"""The images of a generation whose ranks own parts of the state.

Responsible for making `checkpoint.images.Images` from what a session knows.
"""

from __future__ import annotations

from hetseq.checkpoint.images import Images
from hetseq.comm.group import Group
from hetseq.config.sections import CheckpointConfig
from hetseq.parallel.owned_gradients import OwnedGradients
from hetseq.parallel.replica import Replica
from hetseq.run_directory import RunDirectory


def make_images(
    config: CheckpointConfig, directory: RunDirectory, group: Group, replica: Replica, *, start: str
) -> Images | None:
    """What keeps the state in memory where ranks own parts of it; None for replicas, and if options say never.

    `start` identifies this start of the run. Collective. Raises RendezvousError and PeerLostError.
    """
    if replica.owned is None or not config.memory_interval_updates:
        return None
    assert isinstance(replica.reducer, OwnedGradients)
    ownership = replica.reducer.ownership
    owned = [float(ownership.owned_by(rank)) for rank in range(group.world_size)]
    return Images(
        directory.path, directory.run_id, group, start=start, owned=owned if any(owned) else [1.0] * len(owned),
        messages=group.messages() if group.world_size > 1 else None, memory_bytes=config.memory_buffer_bytes(),
    )  # fmt: skip
