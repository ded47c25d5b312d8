"""Which process is this, and does that one still live: told exactly on one machine, not at all across two.

Responsible for names of processes that survive the reuse of process ids. It refuses to guess: of a process on another
machine, or in another container of this one, it says "cannot be told", and the caller has to look for other signs.

The one idea: a process id alone names nobody, the same number is handed out again. Together with the moment the process
was started, counted by the kernel since boot, it is unique for as long as the machine runs. A machine is named by its
boot, its host name (clones of a virtual machine share a boot) and its namespaces (containers share a kernel, and not
their process ids).
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
    """One process for ever: `machine` (empty where it cannot be told), process id, start in clock ticks since boot."""

    machine: str
    pid: int
    start: int


def this_process() -> Process:
    """The process that asks; read anew at each call, because a fork makes another one of it."""
    found = state_and_start(os.getpid())
    machine = this_machine()
    if found is None or not machine:
        return Process("", os.getpid(), 0)
    return Process(machine, os.getpid(), found[1])


def this_machine() -> str:
    """16 hexadecimal digits for this boot of this machine as its processes see it; empty where no /proc tells."""
    try:
        parts = [(_PROC / "sys/kernel/random/boot_id").read_text().strip(), socket.gethostname()]
        parts.append(os.readlink(_PROC / "self/ns/pid"))
    except OSError:
        return ""
    with contextlib.suppress(OSError):  # kernels before 5.6 have none; start times are counted in it
        parts.append(os.readlink(_PROC / "self/ns/time"))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def is_alive(process: Process) -> bool | None:
    """True or False for a process of this machine, None for any other: then it cannot be told from here."""
    if not process.machine or process.machine != this_machine():
        return None
    found = state_and_start(process.pid)
    # a zombie has ended, only its parent has not looked yet
    return found is not None and found[0] not in "ZX" and found[1] == process.start
