"""Number of visible GPUs, counted in another process so that the launcher can handle signals meanwhile.

The one idea: on a slow disk, importing torch may take minutes, mostly in one C call during which no signal is handled.
The launcher needs nothing else of torch, and can kill a process that imports it at once. A torch that is built for CPUs
shows no GPU: its file of versions tells, and nothing is imported.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_TELL_EVERY_S = 60.0
_COUNT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    " from hetseq.launch.visible_gpus import print_count; print_count(int(sys.argv[2]))"
)


def visible_gpus() -> int:
    """The number of GPUs as torch counts them. Raises the error if torch cannot be imported."""
    if "torch" not in sys.modules and cpu_build() is not None:
        return 0
    count = "" if "torch" in sys.modules else _ask()
    if count.isdigit():
        return int(count)
    import torch

    return torch.cuda.device_count()


def cpu_build() -> str | None:
    """The version of this torch if it is built for CPUs; None if it is built for GPUs, or cannot be told."""
    torch = sys.modules.get("torch")
    version = vars(torch.version) if torch is not None else _version_file()
    is_for_cpus = version.get("cuda", "?") is None and version.get("hip", "?") is None
    return str(version.get("__version__", "")) if is_for_cpus else None


def _version_file() -> dict[str, object]:
    """The constants of torch/version.py."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    found: dict[str, object] = {}
    with suppress(OSError, ValueError, SyntaxError):
        for node in ast.parse(Path(spec.origin).with_name("version.py").read_bytes()).body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Constant):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {target.id: node.value.value for target in targets if isinstance(target, ast.Name)}
    return found


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
