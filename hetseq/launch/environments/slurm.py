"""Slurm: the tasks of a job step, which srun starts.

An allocation alone does not count: the body of a batch script and the shell of salloc also have SLURM_JOB_ID, but run
only once. Only a job step runs a command on all of its nodes.
"""

from __future__ import annotations

from hetseq.launch.environments.detected import Look, Seen, UnreadableError
from hetseq.launch.environments.node_list import expand_counts, expand_hosts

NAME = "slurm"
NEEDS = "SLURM_JOB_ID, SLURM_STEP_ID and SLURM_PROCID: start it with srun"
_FIRST_OF_SLURM = 0xFFFFFFF0  # larger step ids are Slurm's own: the batch script, the shell of salloc


def see(look: Look) -> Seen | None:
    """A task of a job step."""
    job, rank = look.get("SLURM_JOB_ID", "SLURM_JOBID"), look.number("SLURM_PROCID")
    step = look.number("SLURM_STEP_ID", "SLURM_STEPID")
    if job is None or rank is None or step is None or step >= _FIRST_OF_SLURM or look.is_terminal:
        return None
    nodes = look.get("SLURM_STEP_NODELIST")
    hosts = allocated(look) if nodes is None else expand_hosts(nodes)
    if hosts is None:
        raise UnreadableError(f"SLURM_JOB_ID={job}, but neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST is set")
    tasks = look.get("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    slots = (1,) * len(hosts) if tasks is None else expand_counts(tasks)
    if len(slots) != len(hosts):
        raise UnreadableError(f"Slurm names {len(hosts)} nodes ({', '.join(hosts)}), but tasks for {len(slots)}")
    index = look.number("SLURM_NODEID")
    if index is None or index >= len(hosts):
        raise UnreadableError(f"SLURM_NODEID={index} with {len(hosts)} nodes: expected 0 to {len(hosts) - 1}")
    is_per_device = max(slots) > 1  # on any node, because all processes must decide the same
    return Seen(
        NAME,
        f"{job}.{step}",
        hosts,
        f"SLURM_JOB_ID={job}, SLURM_STEP_ID={step}",
        slots=slots,
        index=index,
        nodes=len(hosts),
        processes=sum(slots),
        rank=rank if is_per_device else None,
        local_rank=look.number("SLURM_LOCALID") or 0,
        local_size=slots[index],
        restarts=look.number("SLURM_RESTART_COUNT") or 0,
        end_time=end_of_job(look),
    )


def allocated(look: Look) -> tuple[str, ...] | None:
    """The hosts of the job; None outside of one."""
    nodes = look.get("SLURM_JOB_NODELIST", "SLURM_NODELIST")
    return None if nodes is None else expand_hosts(nodes)


def end_of_job(look: Look) -> int | None:
    """When Slurm ends the job, in seconds since 1970; None if unknown."""
    return look.number("SLURM_JOB_END_TIME")
