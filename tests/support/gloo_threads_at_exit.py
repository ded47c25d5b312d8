"""Runs a script, and prints how many threads of gloo's process groups are left when the interpreter ends.

torchrun --nproc-per-node 2 tests/support/gloo_threads_at_exit.py examples/sagemaker/fsdp.py
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
from pathlib import Path


def show() -> None:
    """One line, of rank 0: the lines of two ranks could end up in one."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    if os.environ["RANK"] == "0":
        print(f"threads of gloo at exit: {names.count('pt_gloo_runloop')}", flush=True)


if __name__ == "__main__":
    atexit.register(show)  # before the script's own, so after them
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
