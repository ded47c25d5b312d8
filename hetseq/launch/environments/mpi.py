"""MPI: processes of mpirun or mpiexec from Open MPI, MVAPICH2, MPICH's hydra, and others that use PMI.

None of them passes host names to its processes. One node needs none; on several nodes, MASTER_ADDR or the scheduler
whose job runs mpirun names a host. With Slurm, the list of the job is used: if mpirun starts its daemons with srun,
processes on other nodes see the list of the daemons' step, which lacks the node of mpirun.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetseq.launch.environments import grid_engine, lsf, pbs, slurm
from hetseq.launch.environments.detected import Look, NowhereError, Seen, UnreadableError, index_of

NAME = "mpi"
NEEDS = "OMPI_COMM_WORLD_RANK, MV2_COMM_WORLD_RANK, or PMI_RANK with MPI_LOCALRANKID or PMI_LOCAL_RANK"


@dataclass(frozen=True)
class _Dialect:
    called: str
    rank: str
    size: str
    local_rank: str
    local_size: str


_DIALECTS = (
    _Dialect(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Dialect(
        "MVAPICH2",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    _Dialect("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Dialect("PMI", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
)


def see(look: Look) -> Seen | None:
    """A process of mpirun. srun's own PMI sets no local ranks, and is handled by `slurm`."""
    for dialect in _DIALECTS:
        rank, size = look.number(dialect.rank), look.number(dialect.size)
        local_rank, local_size = look.number(dialect.local_rank), look.number(dialect.local_size)
        if rank is not None and size and local_rank is not None and local_size:
            return _seen(look, dialect, rank, size, local_rank, local_size)
    return None


def _seen(look: Look, dialect: _Dialect, rank: int, size: int, local_rank: int, local_size: int) -> Seen:
    is_one_node = size == local_size
    hosts = (look.host,) if is_one_node else _named_hosts(look)
    return Seen(
        NAME,
        _job_of(look),
        hosts,
        f"{dialect.called}, {dialect.rank}={rank}",
        index=0 if is_one_node else index_of(look.host, hosts),
        nodes=1 if is_one_node else len(hosts) if len(hosts) > 1 else -(-size // local_size),
        processes=size,
        rank=rank if is_one_node else None,
        local_rank=local_rank,
        local_size=local_size,
        end_time=slurm.end_of_job(look),
    )


def _named_hosts(look: Look) -> tuple[str, ...]:
    if address := look.get("MASTER_ADDR"):
        return (address,)
    why = "no variable names one of them"
    try:
        if hosts := _hosts_of_job(look):
            return hosts
    except UnreadableError as error:
        why = str(error)
    raise NowhereError(
        f"mpirun started processes on several nodes, and this one cannot tell where they meet: {why}; name the first"
        " node with MASTER_ADDR (mpirun -x MASTER_ADDR=HOST, mpiexec -genv MASTER_ADDR HOST), or a place with --env mpi"
        " --join file:///SHARED --min-ranks N; --env none has every process train on its own"
    )


def _hosts_of_job(look: Look) -> tuple[str, ...] | None:
    if look.get("PBS_NODEFILE"):
        return pbs.hosts_of(look)[0]
    if look.get("PE_HOSTFILE"):
        return grid_engine.hosts_of(look)[0]
    if look.get("LSB_JOBID"):
        return lsf.hosts_of(look)[0]
    return slurm.allocated(look)


def _job_of(look: Look) -> str:
    """An identifier shared by all processes of one mpirun, and by no others."""
    namespace = look.get("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "MPIEXEC_JOBID", "HYDRA_JOBID")
    scheduler = look.get("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")
    return " ".join(filter(None, (scheduler, namespace, look.get("MASTER_PORT")))) or "mpirun"
