"""PBS Professional, OpenPBS, Torque: PBS_NODEFILE names a host once for each of its processes.

That file exists only on the first host. The script is task 1 of the job; pbsdsh and pbs_tmrsh start later tasks.
"""

from __future__ import annotations

from hetseq.launch.environments.detected import Look, NowhereError, Seen, UnreadableError, counted, index_of

NAME = "pbs"
NEEDS = "PBS_JOBID and PBS_NODEFILE"


def see(look: Look) -> Seen | None:
    """A process of a batch job, not of `qsub -I`."""
    job, path = look.get("PBS_JOBID"), look.get("PBS_NODEFILE")
    if job is None or path is None or look.is_terminal:
        return None
    is_task = (look.number("PBS_TASKNUM") or 1) > 1
    try:
        hosts, slots = hosts_of(look)
    except UnreadableError as error:
        if not is_task:
            raise
        raise NowhereError(
            f"PBS_JOBID={job}, PBS_TASKNUM={look.get('PBS_TASKNUM')}: PBS started this process with others, and it"
            f" cannot tell where they meet: {error}; say so with --join file:///SHARED --min-ranks N, as hetseq script"
            " pbs does; --env none has it train on its own"
        ) from error
    index = index_of(look.host, hosts)
    return Seen(
        NAME,
        job,
        hosts,
        f"PBS_JOBID={job}, PBS_NODEFILE",
        slots=slots,
        index=index,
        nodes=len(hosts),
        processes=len(hosts),
        is_script=not is_task and not index,
    )


def hosts_of(look: Look) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Hosts in the order of the file, and how often each is listed. Raises UnreadableError if there is none."""
    names = [line.strip() for line in look.file_of("PBS_NODEFILE").splitlines() if line.strip()]
    if not names:
        raise UnreadableError(f"PBS_NODEFILE={look.get('PBS_NODEFILE')}: this file names no host")
    return counted(names)
