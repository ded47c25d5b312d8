"""A loop that logs numbers, for the tests of trackers. The words: a folder, and at which step its first rank is killed.

The rank that writes is killed behind `run.log`, before the step has its row.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import hetseq

FOLDER, KILLED = Path(sys.argv[1]), int(sys.argv[2])
STEPS = 16

run = hetseq.start(seed=5)
data: Any = [(torch.full((4,), float(i % 7)), torch.tensor(float(i % 3))) for i in range(48)]
model: Any = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
run.own(model, optimizer)

for step in run.steps(data, global_batch_size=24, max_steps=STEPS):
    for x, y in step:
        step.backward(((model(x)[:, 0] - y) ** 2).sum(), count=len(y))
    run.log(square=step.number**2, norm=model.weight.detach().norm())
    if step.number == KILLED and run.is_first and not (FOLDER / "killed").exists():
        (FOLDER / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if step.number == 12 and not (FOLDER / "go on").exists():
        run.only_first(lambda: (FOLDER / "twelve").touch())
        signal.pause()  # the launcher is killed here
