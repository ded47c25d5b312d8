"""A small regression over lanes, with a loop of its own, whose model counts each record that it was trained on.

The words: a folder for what it writes, and what is to happen, separated by commas, each once: `KIND:STEP:RANK`. A rank
is killed in the inner loop (`body`) or behind it (`after`), or the launcher, whose process the folder's file `launcher`
names, is killed (`kill`) or stopped (`stop`).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hetseq

FOLDER, EVENTS = Path(sys.argv[1]), sys.argv[2].split(",") if len(sys.argv) > 2 and sys.argv[2] else []
LANES, LENGTH, BATCH = 8, 640, 16
STEPS = int(os.environ.get("LOOP_STEPS", "40"))
HAS_STATE = os.environ.get("LOOP_STATE", "1") == "1"
SHORT = int(os.environ.get("LOOP_SHORT", "0"))  # records that lane 3 lacks


class Tape:
    """The records of one lane; each that is read adds a byte to the lane's file."""

    def __init__(self, lane: int) -> None:
        self.lane, self.at = lane, 0
        self.file = os.open(FOLDER / f"read-{lane}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.at == LENGTH // LANES - SHORT * (self.lane == 3):
            raise StopIteration
        os.write(self.file, b".")
        number, self.at = self.lane * (LENGTH // LANES) + self.at, self.at + 1
        draw = torch.Generator().manual_seed(number)
        return torch.randn(6, generator=draw), torch.tensor(number)


class SavedTape(Tape):
    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Ledger(nn.Module):
    """How often each record was trained on, times -1 / BATCH, since its learning rate is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.times = nn.Parameter(torch.zeros(LENGTH))


def happen(places: tuple[str, ...], step: int) -> None:
    """What is to happen here, if this process is meant and it has not happened yet."""
    for event in EVENTS:
        kind, at, rank = event.split(":")
        if kind not in places or step < int(at) or run.rank != int(rank):
            continue
        try:
            (FOLDER / f"happened-{event}").touch(exist_ok=False)
        except FileExistsError:
            continue
        if kind in ("body", "after"):
            os.kill(os.getpid(), signal.SIGKILL)
        launcher = int((FOLDER / "launcher").read_text())
        os.kill(launcher, signal.SIGKILL if kind == "kill" else signal.SIGTERM)
        if kind == "kill":
            signal.pause()  # this process ends with its launcher


run = hetseq.start(seed=5)
net: Any = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
ledger: Any = Ledger()
optimizer = torch.optim.SGD(
    [{"params": net.parameters(), "lr": 0.02, "momentum": 0.9}, {"params": ledger.parameters(), "lr": 1.0}]
)
run.own(optimizer, net=net, ledger=ledger)
data = hetseq.Lanes(
    SavedTape if HAS_STATE else Tape, lanes=LANES, length=LENGTH, window=int(os.environ.get("LOOP_WINDOW", "1"))
)

for step in run.steps(data, global_batch_size=BATCH, max_steps=STEPS):
    for x, numbers in step:
        happen(("body",), step.number)
        loss = ((net(x)[:, 0] - x.square().sum(1)) ** 2).sum() + ledger.times[numbers].sum()
        step.backward(loss, count=len(numbers))
    happen(("after", "kill", "stop"), step.number)
    row = {"step": step.number, "loss": step.loss, "grad_norm": step.grad_norm}
    with (FOLDER / f"course-{os.getpid()}").open("a") as file:
        file.write(json.dumps(row) + "\n")
valid = run.evaluate(data, lambda batch: {"numbers": (batch[1].sum(), len(batch[1]))}, batch_size=24)
if run.is_first:
    (FOLDER / "ledger.json").write_text(json.dumps({"times": (ledger.times * -BATCH).tolist(), **valid}))
