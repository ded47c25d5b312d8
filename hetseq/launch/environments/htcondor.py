"""HTCondor: a job of the vanilla universe, which is one node, or one node of a job of the parallel universe.

The job description, in the file named by _CONDOR_JOB_AD, has the job's number and, in the parallel universe, its hosts.
"""

from __future__ import annotations

import re

from hetseq.launch.environments.detected import Look, Seen, UnreadableError

NAME = "htcondor"
NEEDS = "_CONDOR_SCRATCH_DIR (and, in the parallel universe, _CONDOR_PROCNO, _CONDOR_NPROCS and _CONDOR_JOB_AD)"


def see(look: Look) -> Seen | None:
    """A node of a job."""
    scratch = look.get("_CONDOR_SCRATCH_DIR")
    if scratch is None or look.is_terminal:
        return None
    description = look.read(look.get("_CONDOR_JOB_AD") or "") or ""
    cluster, process = _attribute(description, "ClusterId"), _attribute(description, "ProcId")
    job = ".".join(filter(None, (cluster, process))) or scratch
    count, index = look.number("_CONDOR_NPROCS") or 1, look.number("_CONDOR_PROCNO")
    if count == 1 or index is None:
        return Seen(NAME, job, (look.host,), f"_CONDOR_SCRATCH_DIR={scratch}", index=0)
    remote = _attribute(description, "AllRemoteHosts")
    if cluster is None or remote is None:
        raise UnreadableError(
            f"_CONDOR_NPROCS={count}, but _CONDOR_JOB_AD={look.get('_CONDOR_JOB_AD') or ''} does not say ClusterId and"
            " AllRemoteHosts"
        )
    hosts = tuple(name.rpartition("@")[2].strip() for name in remote.split(","))
    if len(hosts) != count or index >= count:
        raise UnreadableError(f"_CONDOR_PROCNO={index}, _CONDOR_NPROCS={count}, but AllRemoteHosts is {remote}")
    return Seen(
        NAME,
        cluster,
        hosts,
        f"_CONDOR_PROCNO={index}, _CONDOR_NPROCS={count}",
        index=index,
        nodes=len(set(hosts)),
        processes=count,
    )


def _attribute(description: str, name: str) -> str | None:
    """The value of `Name = value`, without quotation marks."""
    found = re.search(rf'^\s*{name}\s*=\s*"?([^"\n]*?)"?\s*$', description, re.MULTILINE | re.IGNORECASE)
    return found[1] if found else None
