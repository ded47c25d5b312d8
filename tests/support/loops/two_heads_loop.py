"""What `hetseq train` does with a task, as a loop of one's own on public names alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

import hetseq

sys.path.insert(0, str(Path(__file__).parent))
from two_heads import TwoHeadsTask, write  # as a task's file is imported: by its own name

LR, WARMUP, TOTAL, CLIP, SIZE = 0.02, 3, 12, 0.6, 24

run = hetseq.start(seed=11)
task = TwoHeadsTask.__new__(TwoHeadsTask)  # its options are those of `hetseq train`
model = task.build_model()
decayed = [value for value in model.parameters() if value.ndim >= 2]
others = [value for value in model.parameters() if value.ndim < 2]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}], lr=LR, fused=True
)
run.own(model, optimizer)


def rate(updates: int) -> float:
    """The learning rate of the next update: up linearly, then down linearly to 0."""
    return LR * (updates / WARMUP) if updates <= WARMUP else LR * (1 - (updates - WARMUP) / (TOTAL - WARMUP))


data: Any = task.load_dataset("train")
for step in run.steps(data, global_batch_size=SIZE, max_steps=TOTAL, count=task.count, weights=task.term_weights,
                      clip_norm=CLIP):  # fmt: skip
    lr = rate(step.number - 1)
    for group in optimizer.param_groups:
        group["lr"] = lr
    for batch in step:
        step.backward(task.micro_step(model, batch, {}))
    write(step.number, step.loss, step.terms, step.grad_norm, lr, model)
