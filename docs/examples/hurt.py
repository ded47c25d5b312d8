"""`hetseq train` while its workers die: `python docs/examples/hurt.py --save-dir RUN ...`, with any of its options."""

import os
import subprocess
import sys

from hetseq.testing import Faults

FAULTS = (
    Faults()
    .kill(rank=1)
    .at(step=8, phase="reduce")  # while gradients travel
    .segv(rank=2)
    .at(step=16, phase="forward_backward")
    .kill(rank=0)
    .at(step=24, phase="commit")  # it holds the whole gradient, and has not heard from the others
)

if __name__ == "__main__":
    command = [sys.executable, "-m", "hetseq", "train", *sys.argv[1:]]
    sys.exit(subprocess.run(command, env={**os.environ, **FAULTS.environment()}).returncode)
