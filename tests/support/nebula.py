"""Support for the tests of `hetseq.nebula`: a managed place, states that identify their step, and damage."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import hetseq.nebula as nm
from hetseq.nebula import api as facade
from hetseq.nebula.service import Service

ELEMENTS = 1 << 16


@contextmanager
def begun(path: Path, *args: Any, **options: Any) -> Iterator[None]:
    """Between `init` and `close`."""
    nm.init(path, *args, **options)
    try:
        yield
    finally:
        nm.close()


def service() -> Service:
    """The saver of this process."""
    return facade.service()


def kill_writer() -> None:
    """The process that writes now; the previous one may be gone, and the next one not started yet."""
    with suppress(ProcessLookupError):
        os.kill(service().writer_pid, signal.SIGKILL)


def state_of(step: int) -> dict[str, Any]:
    """Every number of it is the step, so a mixture of two cannot hide."""
    return {"weight": torch.full((ELEMENTS,), float(step)), "step": step}


def save(step: int, *names: str, **options: Any) -> nm.Checkpoint:
    """A complete tag of this step."""
    checkpoint = nm.Checkpoint(f"global_step{step}", **options)
    for name in names or ("model",):
        checkpoint.save(name, state_of(step))
    checkpoint.commit()
    return checkpoint


def step_in(state: Any) -> int:
    """The one step that a state is of."""
    (value,) = {int(state["step"]), *(int(number) for number in state["weight"].unique())}
    return value


def tags(path: Path) -> list[str]:
    """Of the complete tags, newest first."""
    return [checkpoint.tag for checkpoint in nm.list_checkpoints(path)]


def flip(path: Path, position: int = -1) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@contextmanager
def stopped_writer(patch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The writer pauses until a save has to wait for it; the list gets a line for each such wait."""
    owner, waits = service(), list[int]()
    wait = owner._await_memory

    def wait_and_tell() -> bool:
        waits.append(1)
        os.kill(owner.writer_pid, signal.SIGCONT)
        return wait()

    os.kill(owner.writer_pid, signal.SIGSTOP)
    patch.setattr(owner, "_await_memory", wait_and_tell)
    try:
        yield waits
    finally:
        os.kill(owner.writer_pid, signal.SIGCONT)
