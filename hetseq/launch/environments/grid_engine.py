"""Grid Engine (SGE, UGE): a job of a parallel environment; PE_HOSTFILE has a line `host slots queue range` per host.

Only the script has that file. Processes started by `qrsh -inherit` on the other hosts know only the number of hosts.
"""

from __future__ import annotations

from hetseq.launch.environments.detected import Look, NowhereError, Seen, UnreadableError, added, index_of

NAME = "sge"
NEEDS = "JOB_ID and PE_HOSTFILE: submit it with a parallel environment (qsub -pe)"


def see(look: Look) -> Seen | None:
    """The script of a job with a parallel environment. Raises NowhereError in processes that it started elsewhere."""
    job, path = look.get("JOB_ID"), look.get("PE_HOSTFILE")
    if job is None or look.is_terminal:
        return None
    if path is None:
        if look.get("PE") and (count := look.number("NHOSTS") or 1) > 1:
            raise NowhereError(
                f"JOB_ID={job}, NHOSTS={count}: Grid Engine started this process on one of {count} hosts without"
                " PE_HOSTFILE, so it cannot tell where they meet: say so with --join file:///SHARED --min-ranks N, as"
                " hetseq script sge does; --env none has it train on its own"
            )
        return None
    hosts, slots = hosts_of(look)
    task = look.get("SGE_TASK_ID")  # "undefined" unless the job is an array job
    return Seen(
        NAME,
        f"{job}.{task}" if task and task != "undefined" else job,
        hosts,
        f"JOB_ID={job}, PE_HOSTFILE",
        slots=slots,
        index=index_of(look.host, hosts),
        nodes=len(hosts),
        processes=len(hosts),
        restarts=look.number("RESTARTED") or 0,
        is_script=True,
    )


def hosts_of(look: Look) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Hosts and slots; a host with two queues is listed twice in the file. Raises UnreadableError, with the line."""
    pairs = []
    for number, line in enumerate(look.file_of("PE_HOSTFILE").splitlines(), 1):
        words = line.split()
        if not words:
            continue
        if len(words) < 2 or not words[1].isdigit():
            raise UnreadableError(
                f"{look.get('PE_HOSTFILE')}, line {number}: {line}: expected `host slots queue range`"
            )
        pairs.append((words[0], int(words[1])))
    if not pairs:
        raise UnreadableError(f"PE_HOSTFILE={look.get('PE_HOSTFILE')}: this file names no host")
    return added(pairs)
