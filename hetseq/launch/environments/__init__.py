"""What started this process among others: torchrun, a scheduler, mpirun, a cloud; as facts, and as a meeting place.

Responsible for recognising an environment from variables and files that are handed in (`see`), and for what follows
from it for the options (`choose`). Nothing here reads os.environ, opens a file or sends anything.

The order is that of who stands nearest to the process: torchrun may run in a task of srun, and mpirun in a job of PBS.
"""

from __future__ import annotations

from collections.abc import Callable

from hetseq.errors import ConfigError
from hetseq.launch.environments import grid_engine, htcondor, lsf, mpi, pbs, sagemaker, slurm, torchrun
from hetseq.launch.environments.apply import AppliedEnvironment, choose, leaves_room, seconds_to_stop
from hetseq.launch.environments.detected import Environment, Look, NowhereError, Seen, UnreadableError

__all__ = [
    "NAMES", "AppliedEnvironment", "Look", "NowhereError", "Seen", "UnreadableError", "choose", "leaves_room",
    "seconds_to_stop", "see",
]  # fmt: skip

#: in the order in which they are asked; LSF stands here as jsrun, and as a job in which mpirun may have been called
ENVIRONMENTS: tuple[Environment, ...] = (
    Environment(torchrun.NAME, torchrun.NEEDS, torchrun.see),
    Environment(lsf.NAME, lsf.NEEDS, lsf.see_jsrun),
    Environment(mpi.NAME, mpi.NEEDS, mpi.see),
    Environment(slurm.NAME, slurm.NEEDS, slurm.see),
    Environment(sagemaker.NAME, sagemaker.NEEDS, sagemaker.see),
    Environment(grid_engine.NAME, grid_engine.NEEDS, grid_engine.see),
    Environment(pbs.NAME, pbs.NEEDS, pbs.see),
    Environment(lsf.NAME, lsf.NEEDS, lsf.see),
    Environment(htcondor.NAME, htcondor.NEEDS, htcondor.see),
)
NAMES: tuple[str, ...] = tuple(dict.fromkeys(one.name for one in ENVIRONMENTS))


def see(look: Look, name: str = "auto", *, tell: Callable[[str], None] = lambda _: None) -> Seen | None:
    """The first environment that recognises itself; with a name, that one.

    `tell` hears of an environment that is there and cannot be read: then none is used, unless it was asked for by name.
    Raises ConfigError for a named one that is not there or cannot be read, and NowhereError, a ConfigError too, for a
    process that was started beside others and cannot find them.
    """
    for one in ENVIRONMENTS:
        if name not in ("auto", one.name):
            continue
        try:
            seen = one.see(look)
        except UnreadableError as error:
            if name != "auto":
                raise
            tell(f"{one.name} is here, but cannot be used: {error}; --env none leaves it out")
            return None
        if seen is not None:
            return seen
    if name == "auto":
        return None
    needs = next(one.needs for one in ENVIRONMENTS if one.name == name)
    raise ConfigError(
        f"--env {name}: this process was not started by it, which is recognised by {needs}; leave --env out, or say"
        " where the nodes meet with --join"
    )
