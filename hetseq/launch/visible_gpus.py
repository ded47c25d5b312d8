"""Number of visible GPUs, counted in another process so that the launcher can handle signals meanwhile.

The one idea: on a slow disk, importing torch may take minutes, mostly in one C call during which no signal is handled.
The launcher needs nothing else of torch, and can kill a process that imports it at once.
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
    """The number of GPUs as torch counts them. Raises the error if torch cannot be imported."""
    count = "" if "torch" in sys.modules else _ask()
    if count.isdigit():
        return int(count)
    import torch

    return torch.cuda.device_count()


def print_count(parent_pid: int) -> None:
    """Print the count, in the other process; never returns."""
    from hetseq.system.processes import die_with_parent

    die_with_parent(parent_pid)
    import torch

    sys.stdout.write(f"{torch.cuda.device_count()}\n")
    sys.stdout.flush()
    os._exit(0)  # a normal exit would take a second to tear down the imports


def _ask() -> str:
    """The output of the other process; it is killed if the wait is interrupted."""
    words = [sys.executable, "-c", _COUNT, json.dumps(sys.path), str(os.getpid())]
    # in its own session, so that Ctrl-C in the terminal reaches only the launcher
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
