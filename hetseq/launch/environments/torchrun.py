"""torchrun (torch.distributed.run): one process per device, described by torchrun's environment variables.

MASTER_ADDR is the address of torchrun's own store. With the c10d rendezvous this need not be the host of rank zero, so
on several nodes ranks are assigned at the rendezvous.
"""

from __future__ import annotations

from hetseq.launch.environments.detected import Look, Seen, UnreadableError
from hetseq.launch.environments.slurm import end_of_job

NAME = "torchrun"
NEEDS = "TORCHELASTIC_RUN_ID, RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE"


def see(look: Look) -> Seen | None:
    """A process that torchrun started."""
    run = look.get("TORCHELASTIC_RUN_ID")
    if run is None:
        return None
    rank, size = look.number("RANK"), look.number("WORLD_SIZE")
    local_rank, local_size = look.number("LOCAL_RANK"), look.number("LOCAL_WORLD_SIZE")
    if rank is None or size is None or local_rank is None or local_size is None:
        raise UnreadableError(f"TORCHELASTIC_RUN_ID={run}, but one of {NEEDS} is not set")
    address, port = look.get("MASTER_ADDR"), look.get("MASTER_PORT")
    is_one_node = size == local_size
    nodes = 1 if is_one_node else look.number("GROUP_WORLD_SIZE") or -(-size // max(1, local_size))
    return Seen(
        NAME,
        f"{run}:{port or 0}",  # several runs on one machine are all called "none", but each has its own store
        ((look.host,) if is_one_node else (address,) if address else ()),
        f"TORCHELASTIC_RUN_ID={run}",
        index=0 if is_one_node else look.number("GROUP_RANK"),
        nodes=nodes,
        processes=size,
        rank=rank if is_one_node else None,
        local_rank=local_rank,
        local_size=local_size,
        end_time=end_of_job(look),
    )
