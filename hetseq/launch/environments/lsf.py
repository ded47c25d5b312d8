"""LSF: a job of bsub, and the processes that IBM's jsrun starts in one.

With jsrun, the first host of the list is the launch node, which runs the batch script but no computation. Without
jsrun the script also runs there, once; processes started by blaunch know their task number.
"""

from __future__ import annotations

from hetseq.launch.environments.detected import Look, Seen, UnreadableError, added, counted, index_of

NAME = "lsf"
NEEDS = "LSB_JOBID, and LSB_DJOB_RANKFILE, LSB_HOSTS or LSB_MCPU_HOSTS (with jsrun also JSM_NAMESPACE_RANK)"


def see(look: Look) -> Seen | None:
    """A process of a batch job."""
    job = look.get("LSB_JOBID")
    if job is None or look.is_terminal:
        return None
    hosts, slots = hosts_of(look)
    index = index_of(look.host, hosts)
    return Seen(
        NAME,
        _id_of(look),
        hosts,
        f"LSB_JOBID={job}",
        slots=slots,
        index=index,
        nodes=len(hosts),
        processes=len(hosts),
        is_script=look.get("LSF_PM_TASKID") is None and not index,
    )


def see_jsrun(look: Look) -> Seen | None:
    """A process that jsrun started."""
    if look.get("JSM_NAMESPACE_RANK") is None:
        return None
    rank, size = look.number("JSM_NAMESPACE_RANK"), look.number("JSM_NAMESPACE_SIZE")
    local_rank, local_size = look.number("JSM_NAMESPACE_LOCAL_RANK"), look.number("JSM_NAMESPACE_LOCAL_SIZE")
    if rank is None or size is None or local_rank is None:
        raise UnreadableError("JSM_NAMESPACE_RANK is set, but not JSM_NAMESPACE_SIZE and JSM_NAMESPACE_LOCAL_RANK")
    local_size = local_size or 1
    hosts: tuple[str, ...] = (look.host,)
    slots: tuple[int, ...] = (size,)
    if size != local_size:
        listed, counts = hosts_of(look)
        hosts, slots = listed[1:], counts[1:]
        if not hosts:
            raise UnreadableError(
                f"jsrun started {size} processes on several nodes, but LSF names the launch node only"
            )
    return Seen(
        NAME,
        _id_of(look),
        hosts,
        f"JSM_NAMESPACE_RANK={rank}",
        slots=slots,
        index=index_of(look.host, hosts),
        nodes=len(hosts),
        processes=size,
        rank=rank if size == local_size else None,
        local_rank=local_rank,
        local_size=local_size,
    )


def _id_of(look: Look) -> str:
    job, element = look.get("LSB_JOBID") or "0", look.get("LSB_JOBINDEX")
    return job if element in (None, "0") else f"{job}[{element}]"


def hosts_of(look: Look) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Hosts and slots, from the file with one line per slot, else from a variable. Raises UnreadableError without any.

    LSB_HOSTS begins with the host on which the script runs. It is missing if it would be too long. Processes started by
    mpirun.lsf may see LSB_MCPU_HOSTS in another order.
    """
    if (path := look.get("LSB_DJOB_RANKFILE", "LSB_DJOB_HOSTFILE")) and (text := look.read(path)):
        return counted(line.split()[0] for line in text.splitlines() if line.strip())
    if text := look.get("LSB_HOSTS"):
        return counted(text.split())
    if text := look.get("LSB_MCPU_HOSTS"):  # `hostA 4 hostB 2`
        words = text.split()
        if len(words) % 2 or not all(word.isdigit() for word in words[1::2]):
            raise UnreadableError(f"LSB_MCPU_HOSTS={text}: expected pairs of a host and its slots")
        return added(zip(words[::2], map(int, words[1::2]), strict=True))
    raise UnreadableError("none of LSB_DJOB_RANKFILE, LSB_HOSTS and LSB_MCPU_HOSTS names a host")
