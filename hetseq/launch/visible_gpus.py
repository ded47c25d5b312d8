"""How many GPUs this node shows, counted by another process, so that the launcher hears signals meanwhile.

The one idea: importing torch may last minutes where a disk is slow, and most of that in one call in C, during which no
signal is handled. A launcher needs nothing else of torch, and can end a process that imports it at once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress

_TELL_EVERY_S = 60.0
_COUNT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    " from hetseq.launch.visible_gpus import print_count; print_count(int(sys.argv[2]))"
)


def visible_gpus() -> int:
    """As torch counts them; what keeps torch from being imported is raised."""
    count = "" if "torch" in sys.modules else _ask()
    if count.isdigit():
        return int(count)
    import torch

    return torch.cuda.device_count()


def print_count(parent_pid: int) -> None:
    """What the other process does: never returns."""
    from hetseq.system.processes import die_with_parent

    die_with_parent(parent_pid)
    import torch

    sys.stdout.write(f"{torch.cuda.device_count()}\n")
    sys.stdout.flush()
    os._exit(0)  # tearing down what was imported takes a second


def _ask() -> str:
    """What it prints; it is killed where the wait is interrupted."""
    words = [sys.executable, "-c", _COUNT, json.dumps(sys.path), str(os.getpid())]
    # a session of its own: a terminal's Ctrl-C is for the launcher
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True) as process:
        begin_s = time.monotonic()
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    return process.communicate(timeout=_TELL_EVERY_S)[0].decode().strip()
                seconds = time.monotonic() - begin_s
                sys.stderr.write(
                    f"counting GPUs: importing torch (process {process.pid}) has taken {seconds:.0f} s\n"
                )  # fmt: skip
        finally:
            process.kill()
