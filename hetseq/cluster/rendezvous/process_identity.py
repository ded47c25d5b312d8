"""Process identity: unique names of processes, and whether a process is alive, exact on the same machine only.

Names survive the reuse of process ids. The module does not guess: for a process on another machine, or in another
container of this one, the answer is "unknown", and the caller must look for other signs of life.

The one idea: a process id alone is not unique, since the kernel reuses it. Together with the start time of the process,
counted by the kernel since boot, it is unique while the machine runs. A machine is identified by its boot id, its host
name (clones of a virtual machine share a boot id) and its namespaces (containers share a kernel, but not process ids).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from hetseq.system.processes import state_and_start

_PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """Unique name of a process: `machine` (empty if unknown), process id, start time in clock ticks since boot."""

    machine: str
    pid: int
    start: int


def this_process() -> Process:
    """The calling process; read again at each call, because a fork changes it."""
    found = state_and_start(os.getpid())
    machine = this_machine()
    if found is None or not machine:
        return Process("", os.getpid(), 0)
    return Process(machine, os.getpid(), found[1])


def this_machine() -> str:
    """16 hexadecimal digits that identify this machine, boot and namespace; empty without /proc."""
    try:
        parts = [(_PROC / "sys/kernel/random/boot_id").read_text().strip(), socket.gethostname()]
        parts.append(os.readlink(_PROC / "self/ns/pid"))
    except OSError:
        return ""
    with contextlib.suppress(OSError):  # not in kernels before 5.6; start times depend on it
        parts.append(os.readlink(_PROC / "self/ns/time"))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def is_alive(process: Process) -> bool | None:
    """Whether a process of this machine is alive; None for any other machine, where it is unknown."""
    if not process.machine or process.machine != this_machine():
        return None
    found = state_and_start(process.pid)
    # a zombie has ended, but its parent has not reaped it yet
    return found is not None and found[0] not in "ZX" and found[1] == process.start
