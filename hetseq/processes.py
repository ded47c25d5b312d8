"""Processes that end with the one that started them, however that one ends.

The kernel's parent-death signal needs no thread and no cooperation, so it also reaches a process stuck in C code. It
exists on Linux only; elsewhere the pipes between the processes have to do.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; at once if it already has."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def ignore_stop_signals() -> None:
    """For helpers of a worker: stopping is the worker's decision, and it still needs them to finish its step."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
