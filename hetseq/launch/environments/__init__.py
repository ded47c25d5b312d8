"""Launch environments: detects torchrun, a scheduler, mpirun or a cloud, and fills in the options that they imply.

Recognises an environment from the variables and files passed in (`see`), and derives options from it (`choose`).
Nothing here reads os.environ, opens files or sends anything.

Environments closest to the process come first: torchrun may run in a task of srun, and mpirun in a job of PBS.
"""

from __future__ import annotations

from collections.abc import Callable

from hetseq.errors import ConfigError
from hetseq.launch.environments import grid_engine, htcondor, lsf, mpi, pbs, sagemaker, slurm, torchrun
from hetseq.launch.environments.apply import AppliedEnvironment, choose, leaves_room, other_nodes, seconds_to_stop
from hetseq.launch.environments.detected import Environment, Look, NowhereError, Seen, UnreadableError

__all__ = [
    "NAMES", "AppliedEnvironment", "Look", "NowhereError", "Seen", "UnreadableError", "choose", "leaves_room",
    "other_nodes", "seconds_to_stop", "see",
]  # fmt: skip

#: in the order of checks; LSF is listed twice, as jsrun and as a job in which mpirun may have been called
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
    """The first environment that is recognised; with a `name`, only the named one.

    If an environment is there but cannot be read, `tell` says so and none is used, unless it was requested by name.
    Raises ConfigError if a named environment is missing or cannot be read, and NowhereError, a ConfigError too, if the
    process was started together with others and cannot find them.
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
