"""Which command of HetSeq started this one, told to the child in its environment: a user must hear less of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_NAME = "HETSEQ_STARTED_BY"
SSH, DEMO = "ssh", "demo"


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
