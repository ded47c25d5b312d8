"""Which command started this process, as its environment says: another one of HetSeq, or another launcher."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_NAME = "HETSEQ_STARTED_BY"
SSH, DEMO = "ssh", "demo"
_RANKS = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"}
_MPI = ("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "TORCHELASTIC_")


def started_by() -> str:
    """SSH, DEMO, or "" for a user."""
    return os.environ.get(_NAME, "")


def environment_of_child(command: str) -> dict[str, str]:
    """The environment of a process that this command starts."""
    return {**os.environ, _NAME: command}


@contextmanager
def starting_by(command: str) -> Iterator[None]:
    """What is started meanwhile, also in this process, is started by this command."""
    os.environ[_NAME] = command
    try:
        yield
    finally:
        del os.environ[_NAME]


def forget_other_launchers() -> None:
    """Remove from the environment by which libraries of a script would form a process group of their own."""
    for name in [name for name in os.environ if name in _RANKS or name.startswith(_MPI)]:
        del os.environ[name]
