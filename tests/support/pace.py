"""How fast this machine is now, for tests of a promise in seconds: a promise is about waiting, not about the CPU.

`is_within(seconds, promise_s)` holds a time against the promise; on a machine that is slower than the one for which
promises are given, or busy with something else, against as many times more.
"""

from __future__ import annotations

import subprocess
import sys
import time

#: what importing torch takes in a new process where a command that must import everything takes 4 s
REFERENCE_S = 2.0


def is_within(seconds: float, promise_s: float) -> bool:
    """Whether `seconds` are at most the promise, at the pace of this machine, which is measured where they are more."""
    return seconds <= promise_s or seconds <= promise_s * slowness()


def slowness() -> float:
    """How many times longer than `REFERENCE_S` a new process takes to import torch here and now; at least 1."""
    began_s = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return max(1.0, (time.monotonic() - began_s) / REFERENCE_S)
