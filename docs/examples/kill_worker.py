"""Kills one worker of a run that is under way: `python docs/examples/kill_worker.py RUN RANK STEP`.

Waits until the run has done STEP steps, reads the worker's process id from status/rank-N.json, and sends SIGKILL, as a
machine that loses its power would. Only for workers of this machine.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

PATIENCE_S = 100


def steps_of(run: Path) -> int:
    """The steps that a run has written down."""
    rows = run / "metrics.jsonl"
    return rows.read_bytes().count(b"\n") if rows.exists() else 0


if __name__ == "__main__":
    run, rank, step = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    deadline = time.monotonic() + PATIENCE_S
    while steps_of(run) < step:
        if time.monotonic() > deadline:
            sys.exit(f"{run} has not done {step} steps within {PATIENCE_S} seconds")
        time.sleep(0.05)
    pid = json.loads((run / "status" / f"rank-{rank}.json").read_text())["pid"]
    os.kill(pid, signal.SIGKILL)
    print(f"killed worker {rank}, process {pid}, after step {steps_of(run)}")
