"""PBS Professional, OpenPBS, Torque: PBS_NODEFILE names a host once for each of its processes."""

from __future__ import annotations

from hetseq.environments.seen import Look, Seen, UnreadableError, counted, index_of

NAME = "pbs"
NEEDS = "PBS_JOBID and PBS_NODEFILE"


def see(look: Look) -> Seen | None:
    """A process of a batch job, not of `qsub -I`."""
    job, path = look.get("PBS_JOBID"), look.get("PBS_NODEFILE")
    if job is None or path is None or look.is_terminal:
        return None
    hosts, slots = hosts_of(look)
    return Seen(
        NAME,
        job,
        hosts,
        f"PBS_JOBID={job}, PBS_NODEFILE",
        slots=slots,
        index=index_of(look.host, hosts),
        nodes=len(hosts),
        processes=len(hosts),
    )


def hosts_of(look: Look) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Hosts in the order of the file, and how often each stands in it. Raises UnreadableError if there is none."""
    names = [line.strip() for line in look.file_of("PBS_NODEFILE").splitlines() if line.strip()]
    if not names:
        raise UnreadableError(f"PBS_NODEFILE={look.get('PBS_NODEFILE')}: this file names no host")
    return counted(names)
