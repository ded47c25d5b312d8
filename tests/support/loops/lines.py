"""A small regression with a loop of its own, whose course it writes down; `own_loops` has what tests say about it.

The words: a folder for what it writes, and one thing to happen: `kill:PLACE:RANK:STEP` or `stop:...`, once. Then
how many steps it takes, and with how many ranks; until they are there it is slow.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
from torch import nn

import hetseq
from tests.support.loops.happening import happen, note

STEPS = int(os.environ.get("LOOP_STEPS", "16"))
if len(sys.argv) > 3:
    STEPS = int(sys.argv[3])
AWAITED = int(sys.argv[4]) if len(sys.argv) > 4 else 0


class Points(torch.utils.data.Dataset[Any]):
    """Points of six coordinates, a target, and whether it counts."""

    def __init__(self, count: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 6, generator=draw)
        self.y = self.x.square().sum(1) + torch.randn(count, generator=draw)
        self.counts = torch.rand(count, generator=draw) < 0.7

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index], self.counts[index]


def measure(batch: Any) -> dict[str, Any]:
    happen("evaluate", run.rank, now)
    x, y, counts = batch
    squares = (model(x)[:, 0] - y) ** 2
    return {"loss": (squares.sum(), len(y)), "counted": ((squares * counts).sum(), counts.sum())}


run, now = hetseq.start(seed=5), 0
model: Any = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))
optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
if os.environ.get("LOOP_OPTIMIZER") == "muon":
    groups = [{"params": [model[0].weight], "use_muon": True}, {"params": [model[0].bias, *model[2].parameters()]}]
    optimizer = hetseq.Muon(groups, lr=0.02)
elif os.environ.get("LOOP_OPTIMIZER") == "torch_muon":
    model = nn.Sequential(nn.Linear(6, 24, bias=False), nn.Tanh(), nn.Linear(24, 1, bias=False))
    optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1.0, (k + 1) / 4) * 0.9**k)
average = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda mean, new, _: 0.8 * mean + 0.2 * new)
for parameter in average.parameters():
    parameter.requires_grad_(False)
run.own(model, optimizer, scheduler, average=average)
train, valid = Points(150, 1), Points(60, 2)

for step in run.steps(train, global_batch_size=40, max_steps=STEPS, clip_norm=1.0):
    for x, y, counts in step:
        happen("body", run.rank, step.number)
        step.backward((((model(x)[:, 0] - y) ** 2) * counts).sum(), count=counts.sum())
    now = step.number
    happen("after", run.rank, now)
    scheduler.step()
    average.update_parameters(model)
    row = {"step": now, "loss": step.loss, "grad_norm": step.grad_norm, "lr": scheduler.get_last_lr()[0]}
    if now % 4 == 0:
        row["valid"] = run.evaluate(valid, measure, batch_size=8)
    mean = sum(float(value.double().sum()) for value in average.state_dict().values())
    note({**row, "average": mean})
    if run.world_size < AWAITED:
        time.sleep(0.4)
print("behind the loop")
